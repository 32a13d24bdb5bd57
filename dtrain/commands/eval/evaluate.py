"""`dtrain eval`: a model answers the prompts of data files, and rewards score its answers."""

import json
import math
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from dtrain.base.errors import UserError
from dtrain.base.json_files import read_json
from dtrain.base.nested_columns import example_row
from dtrain.base.ranks import Ranks
from dtrain.checkpoint.huggingface.merged import step_of_adapter
from dtrain.data.formats.encoder import refuse_without_template, resolve_prompts_as
from dtrain.data.images.reader import ImageReader
from dtrain.data.sources.files import find_files
from dtrain.data.sources.reading import ReadFormat, read_format
from dtrain.data.text.template import ChatTemplate
from dtrain.inference.engine import Engine
from dtrain.inference.generate import LoadedModel, choose_device, choose_dtype, image_problem, load, model_files
from dtrain.inference.request import Completion, Request, SamplingParams
from dtrain.recipe.rollouts import Reward
from dtrain.rl.evaluation import (
    QuestionOptions,
    Questions,
    Report,
    ScoredAnswer,
    any_prompt_has_images,
    evaluate as answer_and_judge,
    open_judges,
    prepare_questions,
)
from dtrain.rl.rewards.columns import RewardKeys, missing_column_problems
from dtrain.rl.rewards.scoring import nan_to_none
from dtrain.training.directory import DATA
from dtrain.training.eval_sets import default_max_new_tokens
from dtrain.training.metrics import records
from dtrain.training.setup.evals import check_format, usual_reward

MANY = 0.2  # share of truncated answers from which on a longer limit is recommended
REWARD_OPTIONS = RewardKeys(
    rewards="--reward",
    timeout="--reward-timeout",
    columns=None,
    column_setting="""--reward '{name}={{"column": "{column}"}}'""",
)
OPTION_OF_KEY = {
    "data.chat_template": "--chat-template",
    "data.prompts_as": "--prompts-as",
    "data.train.path": "DATA",
    "model.path": "DIR",
}
"""Keys that messages of shared code may name, and this command's arguments for them."""


def evaluate(arguments: Namespace) -> Report:
    """Answer the prompts of data files and score the answers.

    data/formats/prompts.py describes the rows of the files.

    Args:
        arguments: Arguments of the command.

    Raises:
        UserError: If the model, the data or the rewards cannot be used.
    """
    out, files = arguments.out, find_files(arguments.data, "DATA")
    for problem in check_format(arguments.format, "--format"):
        raise UserError(str(problem))
    source = read_format(arguments.format, {}, "--format")
    rewards = [read_reward(text) for text in arguments.reward or [usual_reward(files, source.reading)]]
    device = choose_device(arguments.device)
    if out is not None and not out.parent.is_dir():
        raise UserError(f"--out {out}: there is no directory {out.parent}")
    judges, judge_batch_size = open_judges(
        rewards, arguments.reward_timeout, partial(print, file=sys.stderr), REWARD_OPTIONS.timeout
    )
    with judges:
        model_files(arguments.directory)  # refuses a directory without a model before the data are read
        loaded, images = _load_model(arguments, files, source, device)
        model, tokenizer = loaded
        template = loaded.template(arguments.chat_template, arguments.template_kwargs)
        refuse_without_template(arguments.prompts_as, template, tokenizer.directory)
        options = _question_options(arguments, source, model.config.max_position_embeddings, template)
        length = model.config.max_position_embeddings
        prepared = prepare_questions("DATA", files, options, tokenizer, template, length, images)
        for line in prepared.notes:
            print(with_options(line), file=sys.stderr)
        questions = replace(prepared.questions, judge_batch_size=judge_batch_size)
        columns = example_row(question.prompt.columns for question in questions.items)
        problems = missing_column_problems(rewards, [columns], REWARD_OPTIONS)
        if problems:
            raise UserError("\n".join(problems))
        engine = Engine(model, decode=loaded.decode, max_rows=arguments.max_rows)
        generate, write = partial(_generate, engine), partial(_write, out, questions)
        ranks = Ranks(single_process=True)
        return answer_and_judge(questions, generate, loaded.decode, judges, write, ranks=ranks)


def _load_model(
    arguments: Namespace, files: Sequence[Path], source: ReadFormat, device: torch.device
) -> tuple[LoadedModel, ImageReader | None]:
    """Load the model, and a reader of images if the prompts have any."""
    has_images = any_prompt_has_images(files, arguments.limit, source)
    if has_images:
        problem = image_problem(arguments.directory)
        if problem:
            raise UserError(f"DATA: the prompts have images: {problem}")
    loaded = load(arguments.directory, choose_dtype(arguments.dtype, device), device, vision=has_images)
    images = ImageReader(loaded.tokenizer, model_files(arguments.directory)) if has_images else None
    return loaded, images


def _question_options(
    arguments: Namespace, source: ReadFormat, max_positions: int, template: ChatTemplate | None
) -> QuestionOptions:
    """Collect the options for encoding prompts and sampling answers."""
    max_new_tokens = arguments.max_new_tokens or default_max_new_tokens(max_positions)
    if max_new_tokens >= max_positions:
        raise UserError(
            f"--max-new-tokens {max_new_tokens} leaves no room for a prompt within the model's {max_positions} "
            "positions: set less"
        )
    if arguments.prompts_as:
        prompts_as, num_plain_prompts = arguments.prompts_as, 0
    else:
        prompts_as, num_plain_prompts = trained_as(arguments.directory)
    sampling = SamplingParams(
        max_new_tokens,
        arguments.temperature,
        arguments.top_k,
        arguments.top_p,
        arguments.min_p,
        stop=tuple(arguments.stop),
    )
    return QuestionOptions(
        sampling=sampling,
        samples=arguments.samples,
        seed=arguments.seed,
        pass_reward=arguments.pass_reward,
        system_prompt=arguments.system,
        prompts_as=resolve_prompts_as(prompts_as, num_plain_prompts, template),
        limit=arguments.limit,
        format=source.name,
        reading=source.reading,
        columns_key=None,
    )


def trained_as(directory: Path) -> tuple[str | None, int]:
    """Return how the run that trained a model read plain prompts.

    Args:
        directory: Directory of a run, of its export or of one of its checkpoints.

    Returns:
        `data.prompts_as` of the run, and the number of its training rows with a plain prompt. (None, 0) if no run
        trained the model.

    Raises:
        UserError: If config.yaml or data.json is damaged.
    """
    run = (step_of_adapter(directory) or directory).absolute()
    if run.name == "export":
        run = run.parent
    elif run.parent.name == "checkpoints":
        run = run.parent.parent
    recipe_data = records.read_recipe(run).get("data") or {}
    data = read_json(run / DATA) if (run / DATA).is_file() else {}
    return recipe_data.get("prompts_as"), data.get("train", {}).get("plain_prompts", 0)


def as_json(report: Report) -> str:
    """Return the report as one line of JSON. Values that are not known are null."""
    passes = {str(k): value for k, value in report.passes.items()}  # keys of JSON objects are texts
    return json.dumps(nan_to_none({**report.__dict__, "passes": passes}))


def as_table(report: Report) -> str:
    """Return the report as a table for the terminal."""
    rows = [("prompts", f"{report.prompts} × {report.samples}")]
    reward = _format_score(report.reward, report.reward_stderr)
    if len(report.rewards) == 1:
        (name,) = report.rewards
        rows.append(("reward", f"{reward} by {name}"))
    else:
        rows.append(("reward", reward))
        rows += [(f"  {name}", _format_score(value)) for name, value in report.rewards.items()]
    rows += [(f"pass@{k}", f"{value:.1%}") for k, value in report.passes.items()]
    rows.append(("tokens", f"{report.completion_len:.1f} on average, at most {report.completion_len_max}"))
    advice = "; raise --max-new-tokens" if report.truncated_frac > MANY else ""
    rows.append(("truncated", f"{report.truncated_frac:.1%}{advice}"))
    if report.unknown:
        rows.append(("without reward", str(report.unknown)))
    if report.cut_prompts:
        rows.append(("prompts cut", f"{report.cut_prompts}, at their beginning"))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def read_reward(text: str) -> Reward:
    """Parse the value of --reward: a name or an import path, with options as JSON after `=`.

    Example:
        >>> read_reward('regex={"pattern": "yes"}').kwargs
        {'pattern': 'yes'}

    Raises:
        UserError: If the options are not a JSON object.
    """
    name, separator, options = text.partition("=")
    try:
        kwargs = json.loads(options) if separator else {}
    except ValueError as error:
        raise UserError(f"--reward {text}: the options after = are not JSON ({error})") from error
    if not isinstance(kwargs, dict):
        raise UserError(
            f'--reward {text}: the options after = must be a JSON object, such as regex={{"pattern": "yes"}}'
        )
    return Reward(name, kwargs=kwargs)


def _generate(engine: Engine, requests: Sequence[Request]) -> list[Completion]:
    """Return the completions in the order of `requests`. Shows a progress bar if stderr is a terminal."""
    tickets = [engine.add(request) for request in requests]
    completions: dict[int, Completion] = {}
    with tqdm(total=len(requests), unit="completion", disable=None, leave=False) as bar:
        while engine.has_work:
            ended = engine.step()
            completions.update(ended)
            bar.update(len(ended))
    return [completions[ticket] for ticket in tickets]


def _write(out: Path | None, questions: Questions, answers: Sequence[ScoredAnswer]) -> None:
    """Write each answer with its rewards as a JSON line."""
    if out is None:
        return
    try:
        with out.open("w", encoding="utf-8") as file:
            for answer in answers:
                question = questions.items[answer.index]
                row: dict[str, Any] = {
                    "prompt_index": answer.index,
                    "sample_index": answer.sample,
                    "prompt": question.prompt.content,
                }
                if question.images:
                    row["images"] = [image.entry for image in question.images]
                row |= {
                    "completion": answer.text,
                    "reward": answer.reward,
                    "rewards": answer.parts,
                    "tokens": len(answer.completion.ids),
                    "finish": answer.completion.finish,
                    "columns": question.prompt.columns,
                }
                file.write(json.dumps(nan_to_none(row), ensure_ascii=False) + "\n")
    except OSError as error:
        raise UserError(f"--out {out}: {error.strerror or error}") from error


def _format_score(value: float, error: float = math.nan) -> str:
    if math.isnan(value):
        return "not known"
    text = f"{value:.4f}"
    return text if math.isnan(error) else f"{text} ± {error:.4f}"


def with_options(message: str) -> str:
    """Append this command's options to a message that names keys of a recipe.

    Example:
        >>> with_options("set model.path")
        'set model.path (model.path is DIR here)'
    """
    options = [f"{key} is {option} here" for key, option in OPTION_OF_KEY.items() if key in message]
    if not options:
        return message
    return f"{message} ({', '.join(options)})"
