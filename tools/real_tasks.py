"""Ten tasks of reasoning-gym as rows for training and evaluation, and their scorers as rewards.

    .venv/bin/python tools/real_tasks.py build/real                  train.jsonl, heldout.jsonl
    .venv/bin/python tools/real_tasks.py build/real --pairs DRAWN    pairs.jsonl, from what `dtrain eval --out` wrote

A row is `{"messages": [the question, the answer], "task": ..., "entry": ...}`. No question of heldout.jsonl is in
train.jsonl. A second call writes the same bytes. The package reasoning-gym writes the questions and scores the answers
(the dependency group `real`, which tools/check_real installs). The tasks have short questions, answers of a few tokens,
and sizes at which a model of 135 million parameters learns within minutes.
"""

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path

from dtrain.base.json_files import split_lines

TASKS = {
    "chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2},
    "family_relationships": {"min_family_size": 4, "max_family_size": 5},
    "fraction_simplification": {"max_value": 9, "max_factor": 9, "styles": ["plain"]},
    "gcd": {"min_value": 2, "max_value": 30},
    "leg_counting": {"min_animals": 1, "max_animals": 2, "min_instances": 1, "max_instances": 5},
    "needle_haystack": {"min_num_statements": 3, "max_num_statements": 6},
    "number_filtering": {"min_numbers": 3, "max_numbers": 4, "max_decimals": 0},
    "products": {"min_digits": 1, "max_digits": 1},
    "spell_backward": {"min_word_len": 3, "max_word_len": 4},
    "syllogism": {},
}
"""Name of a task in reasoning-gym -> how its questions are drawn."""


def exact(completions: Sequence[str], task: Sequence[str], entry: Sequence[dict]) -> list[float]:
    """Return for each completion 1 where the scorer of its task gives the full score, else 0: a reward."""
    return [float(score >= 1) for score in scored(completions, task, entry)]


def scored(completions: Sequence[str], task: Sequence[str], entry: Sequence[dict]) -> list[float]:
    """Return the score in [0, 1] that each completion gets from the scorer of its task: a reward."""
    import reasoning_gym

    rows = zip(completions, task, entry, strict=True)
    return [float(reasoning_gym.get_score_answer_fn(name)(text.strip(), row)) for text, name, row in rows]


def draw(name: str, count: int, seed: int) -> list[dict]:
    """Return at most `count` rows of a task, each question once."""
    import reasoning_gym

    rows: dict[str, dict] = {}
    for entry in reasoning_gym.create_dataset(name, size=4 * count, seed=seed, **TASKS[name]):
        entry = json.loads(json.dumps(entry, default=str))
        messages = [
            {"role": "user", "content": entry["question"]},
            {"role": "assistant", "content": str(entry["answer"])},
        ]
        rows.setdefault(entry["question"], {"messages": messages, "task": name, "entry": entry})
    return list(rows.values())[:count]


def write(directory: Path, train: int, heldout: int) -> None:
    """Write train.jsonl and heldout.jsonl, of at most `train` and `heldout` rows a task, shuffled."""
    directory.mkdir(parents=True, exist_ok=True)
    parts: dict[str, list[dict]] = {"heldout": [], "train": []}
    for number, name in enumerate(TASKS):
        rows = draw(name, train + heldout, seed=number)
        parts["heldout"] += rows[:heldout]
        parts["train"] += rows[heldout:]
    for part, rows in parts.items():
        random.Random(part).shuffle(rows)
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (directory / f"{part}.jsonl").write_text(lines, encoding="utf-8")
        print(f"{directory / part}.jsonl: {len(rows)} rows of {len(TASKS)} tasks")


def write_pairs(directory: Path, drawn: Path) -> None:
    """Write pairs.jsonl: of each prompt that got right and wrong answers the first right one, and the first wrong."""
    answers: dict[int, list[dict]] = {}
    for line in split_lines(drawn.read_text(encoding="utf-8")):
        row = json.loads(line)
        answers.setdefault(row["prompt_index"], []).append(row)
    pairs = []
    for rows in answers.values():
        right, wrong = ([row for row in rows if (row["reward"] >= 1) == is_right] for is_right in (True, False))
        if right and wrong:
            chosen, rejected = ([{"role": "assistant", "content": row[0]["completion"]}] for row in (right, wrong))
            pairs.append({"prompt": rows[0]["prompt"], "chosen": chosen, "rejected": rejected})
    (directory / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs), encoding="utf-8")
    print(f"{directory / 'pairs.jsonl'}: {len(pairs)} pairs of {len(answers)} prompts")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--train", type=int, default=400, metavar="N", help="rows of a task at most (default 400)")
    parser.add_argument("--heldout", type=int, default=20, metavar="N", help="rows of a task (default 20)")
    parser.add_argument("--pairs", type=Path, metavar="DRAWN", help="write pairs.jsonl from these answers")
    options = parser.parse_args()
    if options.pairs is not None:
        return write_pairs(options.directory, options.pairs)
    write(options.directory, options.train, options.heldout)


if __name__ == "__main__":
    main()
