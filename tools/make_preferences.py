#!/usr/bin/env python3
"""Write preference pairs from a model's own mistakes: the file's answer is chosen, a wrong one of the model rejected.

    python tools/make_preferences.py runs/quickstart/checkpoints/step-300 build/arithmetic/train.jsonl build/pairs.jsonl

Rows of the input are chat messages whose last one is the right answer. The output has a row
{"prompt": [...], "chosen": [...], "rejected": [...]} for each problem on which a sample was wrong, in the file's order,
up to --pairs. The same model, file and --seed give the same pairs.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

from dtrain.base.errors import UserError
from dtrain.base.json_files import split_lines
from dtrain.data.text.template import choose_template
from dtrain.data.text.tokenizer import Tokenizer
from dtrain.inference.generate import generate, load

BATCH = 256  # problems sampled together


def read_rows(path: Path) -> list[list[dict]]:
    """The messages of each row."""
    return [json.loads(line)["messages"] for line in split_lines(path.read_text(encoding="utf-8")) if line.strip()]


def pairs(
    model: nn.Module,
    tokenizer: Tokenizer,
    rows: list[list[dict]],
    *,
    temperature: float,
    max_new_tokens: int,
    seed: int,
) -> Iterator[dict]:
    """A preference for each row on which one sample of the model was wrong."""
    template = choose_template(tokenizer.directory, tokenizer)
    for start in range(0, len(rows), BATCH):
        some = rows[start : start + BATCH]
        prompts = [tokenizer.encode(template.render(row[:-1], add_generation_prompt=True)) for row in some]
        completions = generate(
            model,
            prompts,
            max_new_tokens=max_new_tokens,
            eos_ids=tokenizer.eos_ids,
            temperature=temperature,
            seed=seed + start,
        )
        for row, ids in zip(some, completions, strict=True):
            answer, given = row[-1]["content"], tokenizer.decode(ids, skip_special_tokens=True).strip()
            if given != answer:
                rejected = [{"role": "assistant", "content": given}]
                yield {"prompt": row[:-1], "chosen": [row[-1]], "rejected": rejected}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a model's directory, a run's or a checkpoint's")
    parser.add_argument("problems", type=Path, help="JSONL of chat messages with right answers")
    parser.add_argument("out", type=Path)
    parser.add_argument("--pairs", type=int, default=4000, help="at most so many (default 4000)")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--max-new-tokens", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    try:
        model, tokenizer = load(args.model, torch.float32, torch.device("cpu"))
        rows = read_rows(args.problems)
        found = pairs(
            model,
            tokenizer,
            rows,
            temperature=args.temperature,
            max_new_tokens=args.max_new_tokens,
            seed=args.seed,
        )
        made = [pair for _, pair in zip(range(args.pairs), found, strict=False)]
    except (UserError, OSError) as error:
        print(f"make_preferences: {error}", file=sys.stderr)
        return 1
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text("".join(json.dumps(pair) + "\n" for pair in made), encoding="utf-8")
    print(f"{args.out}: {len(made)} pairs from {len(rows)} problems")
    return 0 if made else 1


if __name__ == "__main__":
    sys.exit(main())
