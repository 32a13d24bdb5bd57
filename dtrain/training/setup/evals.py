"""Setup of the evaluations: checks of the section `eval`, and reading its questions and rewards."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path

from dtrain.base.errors import Problem, RecipeError, UserError, problems_in
from dtrain.base.plugins import is_import_path
from dtrain.data.formats.encoder import AS_WRITTEN, resolve_prompts_as
from dtrain.data.formats.formats import detect_format
from dtrain.data.formats.prompts import normalise_prompt
from dtrain.data.sources import columns
from dtrain.data.sources.files import detect_formats, find_files as find_files, first_row, parse_row, read_chunks
from dtrain.data.sources.reading import PLUGIN_KEY, RowReading, is_function, known_formats, read_format
from dtrain.data.sources.sources import image_reader
from dtrain.inference.request import SamplingParams
from dtrain.recipe.rollouts import Reward
from dtrain.rl.checks import reward_problems
from dtrain.rl.evaluation import QuestionOptions, Questions, prepare_questions
from dtrain.rl.rewards.catalog import reward_paths
from dtrain.rl.rewards.columns import RewardKeys, missing_column_problems
from dtrain.rl.rewards.math_answers import extract_answer
from dtrain.training.eval_sets import EvalFacts, EvalSet, default_max_new_tokens, list_eval_sets
from dtrain.training.host import Host
from dtrain.training.inputs import RunInputs
from dtrain.training.setup.code import unknown_name
from dtrain.training.setup.data import check_hub_options, local_files, refuse_images

FORMATS_WITHOUT_PROMPTS = ("text", "preference")


def check_keys(inputs: RunInputs) -> list[Problem]:
    """Check the section `eval`."""
    problems = []
    for eval_set in list_eval_sets(inputs.recipe.eval):
        key, section = eval_set.key, eval_set.section
        if not re.fullmatch(r"\w[\w-]*", eval_set.name, re.ASCII):
            text = f"eval: {eval_set.name!r} cannot be the name of a set, because its metrics are named after it"
            problems.append(Problem(key, text, "Use only letters, digits, _ and -"))
        if not section.path:
            fix = "Set it to a file of prompts, a glob or a list of them"
            problems.append(Problem(f"{key}.path", f"{key}.path is missing", fix, is_missing=True))
        problems += check_format(section.format, f"{key}.format")
        problems += columns.check_column_names(section.columns, "prompts", section.format, f"{key}.columns")
        problems += reward_problems(section.rewards, f"{key}.rewards")
        if section.samples > 1 and section.sampling.temperature == 0:
            text = f"{key}.samples={section.samples} samples the same answer N times at {key}.sampling.temperature=0"
            fix = f"Set {key}.sampling.temperature=1.0, or {key}.samples=1"
            problems.append(Problem(f"{key}.samples", text, fix))
    return problems


def check_format(format: str, key: str) -> list[Problem]:
    """Check the format of prompts. `key` names it in messages: "eval.format", or "--format" of `dtrain eval`."""
    if format in FORMATS_WITHOUT_PROMPTS:
        text = f"{key}={format} has no prompts for the model to answer"
        return [Problem(key, text, "Use messages, question or prompt_completion")]
    return unknown_name(key, format, known_formats(), plugin_key=PLUGIN_KEY)


def check_files(inputs: RunInputs) -> list[Problem]:
    """Check each set's files that are on this machine already."""
    problems = []
    for eval_set in list_eval_sets(inputs.recipe.eval):
        problems += _check_set(inputs, eval_set)
    return problems


def _check_set(inputs: RunInputs, eval_set: EvalSet) -> list[Problem]:
    """Check a set's files, as far as they are on this machine."""
    config = inputs.source.any_config
    positions = None if config is None else config.max_position_embeddings
    problems = check_hub_options(eval_set.section, eval_set.key)
    files: list[Path] = []

    def find_local_files() -> list[Problem]:
        files.extend(local_files(inputs, eval_set.section, eval_set.key))
        return []

    problems += problems_in(f"{eval_set.key}.path", find_local_files)
    return problems + problems_in(eval_set.key, partial(_check_rows, eval_set, files, positions))


def _check_rows(eval_set: EvalSet, files: Sequence[Path], positions: int | None) -> list[Problem]:
    """Check that judges answer, that a prompt has room, and that the first rows have the columns of the rewards.

    Args:
        eval_set: The set.
        files: Its files that are on this machine.
        positions: The model's positions, if known.

    Raises:
        UserError: If a row cannot be read.
    """
    section = eval_set.section
    problems = _check_judges(eval_set)
    max_new_tokens = section.sampling.max_new_tokens
    if positions is not None and max_new_tokens is not None and max_new_tokens >= positions:
        key = f"{eval_set.key}.sampling.max_new_tokens"
        text = f"{key}={max_new_tokens} leaves no room for a prompt within the model's {positions} positions"
        problems.append(Problem(key, text, "Set a smaller number"))
    if not files or section.format in FORMATS_WITHOUT_PROMPTS:
        return problems
    format_name, reading = read_format(section.format, section.columns, f"{eval_set.key}.format")
    if format_name not in known_formats():  # reported by `check_keys`
        return problems
    formats = detect_formats(files, format_name, "prompts", reading, f"{eval_set.key}.columns")
    convert = reading.reader()
    rewards = rewards_of(eval_set, files)
    # `check_keys` reports rewards with unknown names.
    names = reward_paths()
    existing_rewards = [reward for reward in rewards if reward.fn in names or is_import_path(str(reward.fn))]
    keys = RewardKeys(f"{eval_set.key}.rewards", f"{eval_set.key}.reward_timeout", f"{eval_set.key}.columns")
    for file, format_name in zip(files, formats, strict=True):
        if format_name == "tokenized" and any(reward.fn == "judge" for reward in rewards):
            text = f"{file}: its prompts are token ids, and the reward `judge` reads text"
            problems.append(Problem(keys.rewards, text, "Use prompts as text"))
        first = first_row(file)
        if first is None:
            continue
        line, row = first
        try:
            kept = normalise_prompt(convert(row), format_name).columns
        except UserError as error:
            raise UserError(f"{file}:{line}: {error}") from error
        for refusal in missing_column_problems(existing_rewards, [kept], keys):
            problems.append(Problem(keys.rewards, f"{file}:{line}: {refusal}"))
    return list(dict.fromkeys(problems))


def _check_judges(eval_set: EvalSet) -> list[Problem]:
    """Check that the servers of the rewards `judge` answer."""
    problems = []
    for index, reward in enumerate(eval_set.section.rewards):
        if reward.fn != "judge" or reward_problems([reward]):
            continue
        key = f"{eval_set.key}.rewards[{index}]"
        judge = import_module("dtrain.rl.remote.judge").Judge(**reward.options)  # only a recipe with a judge loads it
        try:
            judge.check_server()
        except UserError as error:
            problems.append(Problem(key, f"{key}: {error}"))
    return problems


def rewards_of(eval_set: EvalSet, files: Sequence[Path]) -> list[Reward]:
    """Return the rewards of a set, or the default reward for its data if the recipe names none."""
    if eval_set.section.rewards:
        return eval_set.section.rewards
    return [Reward(usual_reward(files, _reading_of(eval_set)))]


def _reading_of(eval_set: EvalSet) -> RowReading:
    """Return the conversion of a set's rows."""
    section = eval_set.section
    return read_format(section.format, section.columns, f"{eval_set.key}.format").reading


def usual_reward(files: Sequence[Path], reading: RowReading = AS_WRITTEN) -> str:
    """Return the name of the default reward for data, by the answers in the first rows of each file.

    The default is math_exact. It is text_exact if fewer than half of the answers contain a number or a mark of a final
    answer, such as \\boxed. Wrong rows are skipped here, because the reader of the questions reports them.

    Args:
        files: Files of prompts.
        reading: How their rows are read.

    Raises:
        UserError: If a file cannot be read.
    """
    convert = reading.reader()
    num_answers, num_math = 0, 0
    for file in files:
        chunk = next(read_chunks(file), None)
        if chunk is None:
            continue
        for line, row in chunk.rows:
            try:
                parsed = convert(parse_row(str(file), line, row))
                format_name = detect_format(parsed, "prompts") or "messages"
                answer = normalise_prompt(parsed, format_name).columns.get("answer")
            except UserError:
                continue
            # A row may have one answer or a list of accepted answers.
            accepted = answer if isinstance(answer, list) else [answer]
            texts = [str(text) for text in accepted if text not in (None, "")]
            if texts:
                num_answers += 1
                if any(extract_answer(text) is not None for text in texts):
                    num_math += 1
    return "text_exact" if 2 * num_math < num_answers else "math_exact"


def read_sets(inputs: RunInputs, num_string_prompts: int, host: Host) -> EvalFacts:
    """Read the questions of every set, on rank 0.

    Args:
        inputs: The run's inputs.
        num_string_prompts: Number of training rows whose prompt is a string instead of messages. String prompts of
            `eval` are encoded in the same way.
        host: The ranks.

    Raises:
        UserError: On every rank, if a row is wrong or too long, or if the model does not accept images.

    Collectives:
        A broadcast for each set, and one all-gather.
    """
    questions = {}
    notes: list[str] = []
    for eval_set in list_eval_sets(inputs.recipe.eval):
        if f"{eval_set.key}.path" in inputs.pending_downloads:
            continue
        read = host.on_first_rank(f"{eval_set.key}.path", partial(_read_set, inputs, eval_set, num_string_prompts))
        if read is not None:
            questions[eval_set.name] = (read.questions, read.rewards)
            notes += read.notes
    has_images_here = any(set_questions.reader is not None for set_questions, _ in questions.values())
    has_images = host.ranks.gather_results(lambda: has_images_here)[0]  # only rank 0 has questions
    if has_images:
        host.attempt("eval", partial(refuse_images, inputs))
    return EvalFacts(questions, has_images, tuple(notes))


@dataclass(frozen=True)
class _ReadSet:
    """The questions and rewards of a set, and notes for the user."""

    questions: Questions
    rewards: list[Reward]
    notes: list[str]


def _read_set(inputs: RunInputs, eval_set: EvalSet, num_string_prompts: int) -> _ReadSet:
    """Read the questions of a set, and the rewards that judge its answers.

    Raises:
        UserError: If a row is wrong or too long.
    """
    recipe, section, source = inputs.recipe, eval_set.section, inputs.source
    positions = source.config.max_position_embeddings
    chosen = section.sampling
    sampling = SamplingParams(
        chosen.max_new_tokens or default_max_new_tokens(positions),
        chosen.temperature,
        chosen.top_k,
        chosen.top_p,
        stop=tuple(chosen.stop),
    )
    options = QuestionOptions(
        sampling=sampling,
        samples=section.samples,
        seed=recipe.run.seed,
        pass_reward=section.pass_reward,
        system_prompt=section.system_prompt,
        prompts_as=resolve_prompts_as(recipe.data.prompts_as, num_string_prompts, source.template),
        limit=section.limit,
        format="auto" if is_function(section.format) else section.format,
        reading=_reading_of(eval_set),
        columns_key=f"{eval_set.key}.columns",
    )
    files = find_files(section.path or [], f"{eval_set.key}.path", section, inputs.cache)
    images = image_reader(recipe.data, source.tokenizer, inputs.cache)
    prepared = prepare_questions(eval_set.key, files, options, source.tokenizer, source.template, positions, images)
    _refuse_long_prompts(eval_set, prepared.questions, positions)
    rewards = [_with_cache(inputs, reward) for reward in rewards_of(eval_set, files)]
    return _ReadSet(prepared.questions, rewards, list(prepared.notes))


def _refuse_long_prompts(eval_set: EvalSet, questions: Questions, positions: int) -> None:
    """Raise RecipeError for a prompt that leaves no room for its answer. `dtrain eval` cuts such prompts instead."""
    for question in questions.items:
        if len(question.ids) > questions.max_prompt_tokens:
            key = f"{eval_set.key}.sampling.max_new_tokens"
            text = (
                f"{question.location}: the prompt has {len(question.ids)} tokens. With "
                f"{questions.sampling.max_new_tokens} tokens for an answer, the model's {positions} positions have "
                f"room for {questions.max_prompt_tokens}"
            )
            raise RecipeError([Problem(key, text, f"Set a smaller {key}, or leave the row out")])


def _with_cache(inputs: RunInputs, reward: Reward) -> Reward:
    """Return the reward. The reward `judge` gets a file in the cache, so that it judges no answer twice."""
    if reward.fn != "judge" or "cache" in reward.kwargs:
        return reward
    return replace(reward, kwargs={**reward.kwargs, "cache": str(inputs.cache / "judged.jsonl")})
