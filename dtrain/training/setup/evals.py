"""Stage evals: the sets of `eval`, their rewards and questions."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from types import MappingProxyType

from dtrain.base.errors import UserError
from dtrain.data.formats.encoder import evaluated_as
from dtrain.data.formats.formats import detect
from dtrain.data.formats.prompts import PromptEncoder, PromptOptions, normalise_prompt
from dtrain.data.sources import columns
from dtrain.data.sources.files import first_row, formats_of, parse, read_chunks
from dtrain.data.sources.files import resolve as find_files
from dtrain.data.sources.sources import image_reader
from dtrain.inference.request import SamplingParams
from dtrain.recipe.rollouts import Reward
from dtrain.rl.checks import reward_problems
from dtrain.rl.judging import Questions, plain_prompts_of, read_questions
from dtrain.rl.rewards.columns import RewardKeys, lacking_columns_of
from dtrain.rl.rewards.find import BUILT_IN
from dtrain.rl.rewards.math_answers import answer_in
from dtrain.rl.rewards.options import is_path
from dtrain.training.eval_sets import EvalSet, longest_answer, sets
from dtrain.training.host import Host, problems_of
from dtrain.training.setup.data import accept_images, files_here, of_no_hub
from dtrain.training.spec import RunSpec

DRAWN = ("text", "preference")  # formats of rows that ask nothing


def check_keys(spec: RunSpec) -> list[str]:
    """Return what is wrong in `eval`, one line each."""
    errors: list[str] = []
    for eval_set in sets(spec.recipe.eval):
        key, section = eval_set.key, eval_set.section
        if not re.fullmatch(r"\w[\w-]*", eval_set.name, re.ASCII):
            errors.append(
                f"eval: the set's name {eval_set.name!r} must be letters, digits, _ and - alone: its fields bear it"
            )
        if not section.path:
            errors.append(f"{key}.path is missing: set it to a file of prompts, a glob or a list of them")
        if section.format in DRAWN:
            errors.append(
                f"{key}.format={section.format}: the model answers prompts; give it messages, question or "
                "prompt_completion"
            )
        errors += columns.unknown(section.columns, "prompts", section.format, f"{key}.columns")
        errors += reward_problems(section.rewards, f"{key}.rewards")
        if section.samples > 1 and section.sampling.temperature == 0:
            errors.append(
                f"{key}.samples={section.samples} with {key}.sampling.temperature=0 draws one answer so many times: "
                f"set {key}.sampling.temperature=1.0, or {key}.samples=1"
            )
    return errors


def check_files(spec: RunSpec) -> list[str]:
    """Check each set's files, as far as they are here."""
    return [problem for eval_set in sets(spec.recipe.eval) for problem in _check_set(spec, eval_set)]


def _check_set(spec: RunSpec, eval_set: EvalSet) -> list[str]:
    config, files = spec.source.any_config, []
    positions = None if config is None else config.max_position_embeddings
    problems = of_no_hub(eval_set.section, eval_set.key)
    problems += problems_of(lambda: files.extend(files_here(spec, eval_set.section, eval_set.key)))
    return problems + problems_of(_look, eval_set, files, positions)


def _look(eval_set: EvalSet, files: Sequence[Path], positions: int | None) -> list[str]:
    """Check a set, whose `files` are those that are here: its rewards on the columns of each file's first row, that its
    judges answer, and room for a prompt among the model's `positions`. Raises UserError."""
    section, errors = eval_set.section, _unjudged(eval_set)
    new = section.sampling.max_new_tokens
    if positions is not None and new is not None and new >= positions:
        errors.append(
            f"{eval_set.key}.sampling.max_new_tokens={new} leaves no room for a prompt within the model's {positions} "
            "positions: set less"
        )
    if not files or section.format in DRAWN:
        return errors
    formats = formats_of(files, section.format, "prompts", section.columns, f"{eval_set.key}.columns")
    rewards = rewards_of(eval_set, files)
    for file, name in zip(files, formats, strict=True):
        first = first_row(file)
        if name == "tokenized" and any(reward.fn == "judge" for reward in rewards):
            errors.append(f"{file}: its prompts are token ids, and a judge reads words: give it prompts as text")
        if first is not None:
            line, row = first
            try:
                kept = normalise_prompt(columns.renamed(row, section.columns), name).columns
            except UserError as problem:
                raise UserError(f"{file}:{line}: {problem}") from problem
            # `check_keys` reports rewards of unknown names.
            known = [reward for reward in rewards if reward.fn in BUILT_IN or is_path(str(reward.fn))]
            keys = RewardKeys(f"{eval_set.key}.rewards", f"{eval_set.key}.reward_timeout", f"{eval_set.key}.columns")
            for refusal in lacking_columns_of(known, [kept], keys):
                errors.append(f"{file}:{line}: {refusal}")
    return list(dict.fromkeys(errors))


def _unjudged(eval_set: EvalSet) -> list[str]:
    errors = []
    for index, reward in enumerate(eval_set.section.rewards):
        if reward.fn == "judge" and not reward_problems([reward]):
            try:
                import_module("dtrain.rl.remote.judge").Judge(**reward.options).look()
            except UserError as error:
                errors.append(f"{eval_set.key}.rewards[{index}]: {error}")
    return errors


def rewards_of(eval_set: EvalSet, files: Sequence[Path]) -> list[Reward]:
    """Return the rewards of a set, or the usual one of its data where it names none."""
    return eval_set.section.rewards or [Reward(usual_reward(files, eval_set.section.columns))]


def usual_reward(files: Sequence[Path], names: Mapping[str, str] = MappingProxyType({})) -> str:
    """Return the reward of data for which none is named, by its first answers.

    It is math_exact, or text_exact if fewer than half of the answers hold a number or a mark of an answer. Wrong rows
    are skipped here; the reader of the questions reports them.

    Args:
        files: Files of prompts.
        names: The files' own names of columns (`eval.columns`).

    Raises:
        UserError: If a file cannot be read.
    """
    is_math: list[bool] = []
    for file in files:
        chunk = next(read_chunks(file), None)
        for line, row in chunk.rows if chunk else ():
            try:
                parsed = columns.renamed(parse(str(file), line, row), names)
                answer = normalise_prompt(parsed, detect(parsed, "prompts") or "messages").columns.get("answer")
            except UserError:
                continue
            accepted = answer if isinstance(answer, list) else [answer]
            texts = [str(text) for text in accepted if text not in (None, "")]
            if texts:
                is_math.append(any(answer_in(text) is not None for text in texts))
    return "text_exact" if is_math and 2 * sum(is_math) < len(is_math) else "math_exact"


def resolve(spec: RunSpec, host: Host) -> bool:
    """Read the sets, on the first rank."""
    for eval_set in sets(spec.recipe.eval):
        if f"{eval_set.key}.path" not in spec.awaited:
            host.first(partial(_read, spec, eval_set))
    has_images = any(questions.reader is not None for questions, _ in spec.questions.values())
    if host.ranks.every(lambda: has_images)[0]:
        host.ask(accept_images, spec, True)
    return True


def _read(spec: RunSpec, eval_set: EvalSet) -> None:
    """Read the questions of a set, and the rewards that judge its answers. Raises UserError for rows that are wrong, or
    too long."""
    recipe, section, tokenizer = spec.recipe, eval_set.section, spec.source.tokenizer
    length = spec.model_config.max_position_embeddings
    drawn = section.sampling
    new = drawn.max_new_tokens or longest_answer(length)
    options = PromptOptions.within(length, new, section.system_prompt)
    template = spec.source.template
    prompts_as = evaluated_as(recipe.data.prompts_as, spec.plain_prompts, template)
    reader = image_reader(recipe.data, tokenizer, spec.cache)
    encoder = PromptEncoder(
        tokenizer, template, max_length=length, options=options, prompts_as=prompts_as, images=reader
    )
    files = find_files(section.path or [], f"{eval_set.key}.path", section, spec.cache)
    columns = section.columns, f"{eval_set.key}.columns"
    prompts = read_questions(files, encoder, section.limit, format=section.format, columns=columns[0], key=columns[1])
    spec.notes += plain_prompts_of(eval_set.key, prompts, encoder)
    for prompt in prompts:
        if len(prompt.ids) > options.room:
            raise UserError(
                f"{prompt.place}: the prompt has {len(prompt.ids)} tokens, and beside the {new} of an answer the "
                f"model's {length} positions have room for {options.room}: set {eval_set.key}.sampling.max_new_tokens "
                "to less, or leave the row out"
            )
    sampling = SamplingParams(
        new, drawn.temperature, drawn.top_k, drawn.top_p, stop_ids=tuple(tokenizer.eos_ids), stop=tuple(drawn.stop)
    )
    rewards = [_remembered(spec, reward) for reward in rewards_of(eval_set, files)]
    questions = Questions(prompts, section.samples, sampling, recipe.run.seed, options.room, section.pass_reward)
    if any(prompt.images for prompt in prompts):
        questions = replace(questions, reader=reader)
    spec.questions[eval_set.name] = questions, rewards


def _remembered(spec: RunSpec, reward: Reward) -> Reward:
    """A judge keeps what it judged beside the data's caches."""
    if reward.fn != "judge" or "cache" in reward.kwargs:
        return reward
    return replace(reward, kwargs={**reward.kwargs, "cache": str(spec.cache / "judged.jsonl")})
