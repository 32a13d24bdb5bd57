"""`dtrain eval`: a directory's model answers the prompts of data files, and rewards judge its answers."""

import json
import math
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from tqdm import tqdm

from dtrain.base.errors import UserError
from dtrain.base.json_files import read_json
from dtrain.base.nested_columns import example_row
from dtrain.base.ranks import Ranks
from dtrain.checkpoint.huggingface.merged import step_of_adapter
from dtrain.data.formats.encoder import refuse_without_template, resolve_prompts_as
from dtrain.data.images.reader import ImageReader
from dtrain.data.sources.files import find_files
from dtrain.inference.engine import Engine
from dtrain.inference.generate import choose_device, choose_dtype, image_problem, load, model_files
from dtrain.inference.request import Completion, Request, SamplingParams
from dtrain.recipe.rollouts import Reward
from dtrain.rl.evaluation import (
    QuestionOptions,
    Questions,
    Report,
    ScoredAnswer,
    any_prompt_has_images,
    open_judges,
    prepare_questions,
)
from dtrain.rl.evaluation import evaluate as answer_and_judge
from dtrain.rl.rewards.columns import RewardKeys, missing_column_problems
from dtrain.rl.rewards.scoring import nan_to_none
from dtrain.training.directory import DATA
from dtrain.training.eval_sets import default_max_new_tokens
from dtrain.training.metrics import records
from dtrain.training.setup.evals import usual_reward

MANY = 0.2  # of the answers, cut at their longest
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
    """Answer the prompts of data files (data/formats/prompts.py says what a row may be), and judge the answers.

    arguments: the command's. Raises UserError.
    """
    out, files = arguments.out, find_files(arguments.data, "DATA")
    rewards = [read_reward(text) for text in arguments.reward or [usual_reward(files)]]
    device = choose_device(arguments.device)
    if out is not None and not out.parent.is_dir():
        raise UserError(f"--out {out}: there is no directory {out.parent}")
    judges, judge_batch_size = open_judges(
        rewards, arguments.reward_timeout, partial(print, file=sys.stderr), REWARD_OPTIONS.timeout
    )
    with judges:
        model_files(arguments.directory)  # refuses a directory without a model before the data are read
        has_images = any_prompt_has_images(files, arguments.limit)
        if has_images and (problem := image_problem(arguments.directory)):
            raise UserError(f"DATA: the prompts have images: {problem}")
        loaded = load(arguments.directory, choose_dtype(arguments.dtype, device), device, vision=has_images)
        model, tokenizer = loaded
        images = ImageReader(tokenizer, model_files(arguments.directory)) if has_images else None
        length = model.config.max_position_embeddings
        new = arguments.max_new_tokens or default_max_new_tokens(length)
        if new >= length:
            raise UserError(
                f"--max-new-tokens {new} leaves no room for a prompt within the model's {length} positions: set less"
            )
        template = loaded.template(arguments.chat_template, arguments.template_kwargs)
        refuse_without_template(arguments.prompts_as, template, tokenizer.directory)
        chosen, trained_plain = (arguments.prompts_as, 0) if arguments.prompts_as else trained_as(arguments.directory)
        sampling = SamplingParams(
            new,
            arguments.temperature,
            arguments.top_k,
            arguments.top_p,
            arguments.min_p,
            stop=tuple(arguments.stop),
        )
        options = QuestionOptions(
            sampling=sampling,
            samples=arguments.samples,
            seed=arguments.seed,
            pass_reward=arguments.pass_reward,
            system_prompt=arguments.system,
            prompts_as=resolve_prompts_as(chosen, trained_plain, template),
            limit=arguments.limit,
            columns_key=None,
        )
        prepared = prepare_questions("DATA", files, options, tokenizer, template, length, images)
        for line in prepared.notes:
            print(with_options(line), file=sys.stderr)
        questions = replace(prepared.questions, judge_batch_size=judge_batch_size)
        rows = questions.items
        columns = example_row(row.prompt.columns for row in rows)
        problems = missing_column_problems(rewards, [columns], REWARD_OPTIONS)
        if problems:
            raise UserError("\n".join(problems))
        engine = Engine(model, decode=loaded.decode, max_rows=arguments.max_rows)
        draw, write = partial(_drawn, engine), partial(_write, out, questions)
        return answer_and_judge(questions, draw, loaded.decode, judges, write, ranks=Ranks(single_process=True))


def trained_as(directory: Path) -> tuple[str | None, int]:
    """Return `data.prompts_as` of the run whose directory, export or checkpoint `directory` is, and how many of its
    training rows had a plain prompt; (None, 0) of a model that is none of a run's. Raises UserError for a damaged
    config.yaml or data.json."""
    run = (step_of_adapter(directory) or directory).absolute()
    if run.name == "export":
        run = run.parent
    elif run.parent.name == "checkpoints":
        run = run.parent.parent
    chosen = (records.read_recipe(run).get("data") or {}).get("prompts_as")
    data = read_json(run / DATA) if (run / DATA).is_file() else {}
    return chosen, data.get("train", {}).get("plain_prompts", 0)


def as_json(report: Report) -> str:
    """Return the report as one line of JSON; unknown values are null."""
    fields = {**report.__dict__, "passes": {str(k): value for k, value in report.passes.items()}}
    return json.dumps(nan_to_none(fields))


def as_table(report: Report) -> str:
    rows = [
        ("prompts", f"{report.prompts} × {report.samples}"),
        ("reward", _shown(report.reward, report.reward_stderr)),
    ]
    if len(report.rewards) == 1:
        rows[1] = ("reward", f"{rows[1][1]} by {next(iter(report.rewards))}")
    else:
        rows += [(f"  {name}", _shown(value)) for name, value in report.rewards.items()]
    rows += [(f"pass@{k}", f"{value:.1%}") for k, value in report.passes.items()]
    advice = "; raise --max-new-tokens" if report.truncated_frac > MANY else ""
    rows += [
        ("tokens", f"{report.completion_len:.1f} on average, at most {report.completion_len_max}"),
        ("truncated", f"{report.truncated_frac:.1%}" + advice),
    ]
    if report.unknown:
        rows.append(("without reward", str(report.unknown)))
    if report.cut_prompts:
        rows.append(("prompts cut", f"{report.cut_prompts}, at their beginning"))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def read_reward(text: str) -> Reward:
    """Return the reward that `text` names: a name or an import path, with options as JSON after `=`.

    Raises UserError.
    """
    name, separator, options = text.partition("=")
    try:
        kwargs = json.loads(options) if separator else {}
    except ValueError as error:
        raise UserError(f"--reward {text}: the options after = are no JSON ({error})") from error
    if not isinstance(kwargs, dict):
        raise UserError(
            f'--reward {text}: the options after = must be a JSON object, such as regex={{"pattern": "yes"}}'
        )
    return Reward(name, kwargs=kwargs)


def _drawn(engine: Engine, requests: Sequence[Request]) -> list[Completion]:
    """Return the completions in the order of `requests`; shows a progress bar on a terminal's stderr."""
    tickets = [engine.add(request) for request in requests]
    completions: dict[int, Completion] = {}
    with tqdm(total=len(requests), unit="completion", disable=None, leave=False) as bar:
        while engine.has_work:
            ended = engine.step()
            completions.update(ended)
            bar.update(len(ended))
    return [completions[ticket] for ticket in tickets]


def _write(out: Path | None, questions: Questions, answers: Sequence[ScoredAnswer]) -> None:
    if out is None:
        return
    try:
        with out.open("w", encoding="utf-8") as file:
            for answer in answers:
                question = questions.items[answer.index]
                prompt, images = question.prompt, [image.entry for image in question.images]
                row = {
                    "prompt_index": answer.index,
                    "sample_index": answer.sample,
                    "prompt": prompt.content,
                    **({"images": images} if images else {}),
                    "completion": answer.text,
                    "reward": answer.reward,
                    "rewards": answer.parts,
                    "tokens": len(answer.completion.ids),
                    "finish": answer.completion.finish,
                    "columns": prompt.columns,
                }
                file.write(json.dumps(nan_to_none(row), ensure_ascii=False) + "\n")
    except OSError as error:
        raise UserError(f"--out {out}: {error.strerror or error}") from error


def _shown(value: float, error: float = math.nan) -> str:
    if math.isnan(value):
        return "not known"
    return f"{value:.4f}" + ("" if math.isnan(error) else f" ± {error:.4f}")


def with_options(message: str) -> str:
    """Return a message that may name keys of a recipe, followed by this command's options for these keys."""
    named = [f"{key} is {option} here" for key, option in OPTION_OF_KEY.items() if key in message]
    if not named:
        return message
    return f"{message} ({', '.join(named)})"
