"""What must hold in a recipe's `eval`. No torch.

`problems` reads no file; `look` reads first rows, and asks judges whether they are there.
"""

import math
import re
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from dtrain.base.errors import UserError
from dtrain.base.ranges import is_finite, is_number, shown
from dtrain.data.formats.formats import detect
from dtrain.data.formats.prompts import normalise_prompt
from dtrain.data.sources import columns
from dtrain.data.sources.files import first_row, formats_of, parse, read_chunks
from dtrain.methods.grpo_section import reward_problems
from dtrain.recipe.schema import Recipe, Reward
from dtrain.rl.rewards.columns import lacking_columns
from dtrain.rl.rewards.find import BUILT_IN
from dtrain.rl.rewards.math_answers import answer_in
from dtrain.rl.rewards.options import is_path
from dtrain.run.eval_sets import EvalSet, sets

DRAWN = ("text", "preference")  # formats of rows that ask nothing


def problems(recipe: Recipe) -> list[str]:
    """Return what is wrong in `eval`, one line each."""
    found: list[str] = []
    for one in sets(recipe):
        key, section = one.key, one.section
        if not re.fullmatch(r"\w[\w-]*", one.name, re.ASCII):
            found.append(
                f"eval: the set's name {one.name!r} must be letters, digits, _ and - alone: its fields bear it"
            )
        if not section.path:
            found.append(f"{key}.path is missing: set it to a file of prompts, a glob or a list of them")
        if section.format in DRAWN:
            found.append(
                f"{key}.format={section.format}: the model answers prompts; give it messages, question or "
                "prompt_completion"
            )
        found += _ranges(one)
        found += columns.unknown(section.columns, "prompts", section.format, f"{key}.columns")
        found += [one.in_its_keys(problem) for problem in reward_problems(section.rewards)]
        if section.samples > 1 and section.sampling.temperature == 0:
            found.append(
                f"{key}.samples={section.samples} with {key}.sampling.temperature=0 draws one answer so many times: "
                f"set {key}.sampling.temperature=1.0, or {key}.samples=1"
            )
    return found


def _ranges(one: EvalSet) -> list[str]:
    section, drawn = one.section, one.section.sampling
    temperature = is_number(drawn.temperature) and drawn.temperature >= 0
    held = (
        ("every", section.every is None or section.every >= 1, "at least 1, or null"),
        ("limit", section.limit is None or section.limit >= 1, "at least 1, or null for all"),
        ("samples", 1 <= section.samples <= 10_000, "at least 1, and at most 10000"),
        ("pass_reward", is_finite(section.pass_reward), "a finite number"),
        ("reward_timeout", 0 < section.reward_timeout < math.inf, "a finite number, more than 0"),
        ("show", section.show >= 0, "at least 0"),
        ("sampling.temperature", temperature, "a finite number, at least 0; 0 takes the likeliest token"),
        ("sampling.top_k", drawn.top_k is None or 1 <= drawn.top_k < 2**31, "at least 1, below 2**31, or null for all"),
        ("sampling.top_p", 0 < drawn.top_p <= 1, "more than 0, up to 1"),
        ("sampling.max_new_tokens", drawn.max_new_tokens is None or drawn.max_new_tokens >= 1, "at least 1, or null"),
        ("sampling.stop", all(drawn.stop), "texts that are not empty"),
    )
    return [f"{one.key}.{key}={shown(_at(section, key))} must be {words}" for key, holds, words in held if not holds]


def _at(section: object, key: str) -> object:
    for part in key.split("."):
        section = getattr(section, part)
    return section


def look(one: EvalSet, files: Sequence[Path], positions: int | None) -> list[str]:
    """Of a set, whose `files` are those that are here: its rewards on the columns of each file's first row, judges that
    do not answer, and room for a prompt among the model's `positions`. Raises UserError."""
    section, found = one.section, _unjudged(one)
    new = section.sampling.max_new_tokens
    if positions is not None and new is not None and new >= positions:
        found.append(
            f"{one.key}.sampling.max_new_tokens={new} leaves no room for a prompt within the model's {positions} "
            "positions: set less"
        )
    if not files or section.format in DRAWN:
        return found
    formats = formats_of(files, section.format, "prompts", section.columns, f"{one.key}.columns")
    rewards = rewards_of(one, files)
    for file, name in zip(files, formats, strict=True):
        first = first_row(file)
        if name == "tokenized" and any(reward.fn == "judge" for reward in rewards):
            found.append(f"{file}: its prompts are token ids, and a judge reads words: give it prompts as text")
        if first is not None:
            line, row = first
            try:
                asked = normalise_prompt(columns.renamed(row, section.columns), name).columns
            except UserError as problem:
                raise UserError(f"{file}:{line}: {problem}") from problem
            known = [one for one in rewards if one.fn in BUILT_IN or is_path(str(one.fn))]  # of others check tells
            told = [lacking_columns(str(reward.fn), reward.options, asked) for reward in known]
            found += [f"{file}:{line}: {one.in_its_keys(problem)}" for problem in told if problem]
    return list(dict.fromkeys(found))


def _unjudged(one: EvalSet) -> list[str]:
    found = []
    for index, reward in enumerate(one.section.rewards):
        if reward.fn == "judge" and not reward_problems([reward]):
            try:
                import_module("dtrain.rl.remote.judge").Judge(**reward.options).look()
            except UserError as error:
                found.append(f"{one.key}.rewards[{index}]: {error}")
    return found


def rewards_of(one: EvalSet, files: Sequence[Path]) -> list[Reward]:
    """Return the rewards of a set, or the usual one of its data where it names none."""
    return one.section.rewards or [Reward(usual_reward(files))]


def usual_reward(files: Sequence[Path]) -> str:
    """The reward of data where none is asked for, by its first answers: math_exact, or text_exact where fewer than half
    of them hold a number or a mark of an answer. Rows that are wrong are told later. Raises UserError for files that
    cannot be read."""
    found: list[bool] = []
    for file in files:
        chunk = next(read_chunks(file), None)
        for line, row in chunk.rows if chunk else ():
            try:
                given = parse(str(file), line, row)
                answer = normalise_prompt(given, detect(given, "prompts") or "messages").columns.get("answer")
            except UserError:
                continue
            found += [answer_in(str(answer)) is not None] if answer not in (None, "") else []
    return "text_exact" if found and 2 * sum(found) < len(found) else "math_exact"
