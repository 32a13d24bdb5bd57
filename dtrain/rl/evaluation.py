"""Questions to answers and their rewards: the common part of `dtrain eval` and the evaluations of a run.

The caller passes what answers: a model of a directory on one device, or the one that trains, on its mesh.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from itertools import islice
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

from dtrain.base.errors import Interrupted, UserError
from dtrain.base.ranks import Ranks
from dtrain.data.formats.encoder import describe_string_prompts
from dtrain.data.formats.prompts import Prompt, PromptEncoder, PromptOptions, normalise_prompt
from dtrain.data.sources.files import detect_formats, read_chunks, read_rows
from dtrain.data.text.template import ChatTemplate
from dtrain.data.text.tokenizer import Tokenizer
from dtrain.inference.images import prompt_images
from dtrain.inference.request import Completion, Request, SamplingParams, ShouldStop
from dtrain.recipe.rollouts import Reward
from dtrain.rl.rewards import Rewards
from dtrain.rl.rewards.scoring import pass_at_k, pass_at_k_values

if TYPE_CHECKING:
    from dtrain.data.images.files import ImageRecord
    from dtrain.data.images.reader import ImageReader

JUDGED_TOGETHER = 512  # completions of one call of the rewards, whose timeout is for one call


@dataclass(frozen=True)
class Question:
    """A prompt of a file: its place there, and its token ids, not yet cut. is_plain: whether the file has it as a plain
    string. images: those of its parts, in order."""

    location: str
    prompt: Prompt
    ids: list[int]
    is_string: bool = False
    images: "Sequence[ImageRecord]" = ()


@dataclass(frozen=True)
class Questions:
    """The questions of an evaluation, each of `items` answered `samples` times. room: tokens of the longest prompt; a
    longer one loses its beginning. pass_reward: the least reward with which a completion passes. together: completions
    of one call of the rewards. reader: of the questions' images, where any has some."""

    items: Sequence[Question]
    samples: int
    sampling: SamplingParams
    seed: int
    max_prompt_tokens: int
    pass_reward: float
    judge_batch_size: int = JUDGED_TOGETHER
    reader: "ImageReader | None" = None

    def requests(self) -> list[Request]:
        """Return the requests, prompt by prompt, with their images decoded. Raises UserError."""
        requests = []
        for index, question in enumerate(self.items):
            ids = question.ids[-self.max_prompt_tokens :]
            images = None if self.reader is None else prompt_images(self.reader, ids, question.images)
            draws = range(self.samples)
            requests += [Request(ids, self.sampling, self.seed, index, draw, images=images) for draw in draws]
        return requests


@dataclass(frozen=True)
class ScoredAnswer:
    """A completion of prompt `index`, sample `sample`, with its text and its reward; NaN where that is not known."""

    index: int
    sample: int
    text: str
    completion: Completion
    reward: float
    parts: dict[str, float]


@dataclass(frozen=True)
class Report:
    """Results of an evaluation. passes: k -> pass@k (arXiv:2107.03374, section 2.1, without its bias), where a
    completion passes whose reward is at least `pass_reward`. The standard error is over the prompts' means."""

    prompts: int
    samples: int
    reward: float
    reward_stderr: float
    rewards: dict[str, float]
    passes: dict[int, float]
    pass_reward: float
    completion_len: float
    completion_len_max: int
    truncated_frac: float
    unknown: int
    cut_prompts: int
    seconds: float

    @classmethod
    def of(cls, answers: Sequence[ScoredAnswer], questions: Questions, seconds: float) -> "Report":
        samples = questions.samples
        groups = [answers[start : start + samples] for start in range(0, len(answers), samples)]
        means = [_mean([answer.reward for answer in group]) for group in groups]
        known = [mean for mean in means if not math.isnan(mean)]
        right = [sum(answer.reward >= questions.pass_reward for answer in group) for group in groups]
        lengths = [len(answer.completion.ids) for answer in answers]
        return cls(
            prompts=len(groups),
            samples=samples,
            reward=_mean([answer.reward for answer in answers]),
            reward_stderr=stdev(known) / math.sqrt(len(known)) if len(known) > 1 else math.nan,
            rewards={name: _mean([answer.parts[name] for answer in answers]) for name in answers[0].parts},
            passes={k: fmean(pass_at_k(k, samples, count) for count in right) for k in pass_at_k_values(samples)},
            pass_reward=questions.pass_reward,
            completion_len=fmean(lengths),
            completion_len_max=max(lengths),
            truncated_frac=fmean(answer.completion.finish == "length" for answer in answers),
            unknown=sum(math.isnan(answer.reward) for answer in answers),
            cut_prompts=sum(len(question.ids) > questions.max_prompt_tokens for question in questions.items),
            seconds=seconds,
        )


def evaluate(
    questions: Questions,
    answer: Callable[[Sequence[Request]], Sequence[Completion]],
    decode: Callable[[Sequence[int]], str],
    judges: Rewards | None,
    keep: Callable[[list[ScoredAnswer]], None],
    *,
    ranks: Ranks,
    should_stop: ShouldStop = lambda: False,
) -> Report:
    """Answer the questions and judge the answers. Collective over `ranks`, of which the first alone has `judges`, and
    passes the scored answers to `keep`; all get the report.

    answer: completions of requests, in their order, the same on every rank. should_stop: whether to give up between two
    calls of the judges. Raises UserError, and Interrupted on every rank.
    """
    start = time.perf_counter()
    completions = answer(questions.requests())

    def judge() -> Report | None:
        assert judges is not None, "the first rank has them"
        answers: list[ScoredAnswer] = []
        for part in _score(questions, completions, decode, judges):
            if should_stop():
                return None
            answers += part
        keep(answers)
        return Report.of(answers, questions, time.perf_counter() - start)

    report = ranks.run_on_first(judge)
    if report is None:
        raise Interrupted
    return report


def _score(
    questions: Questions, completions: Sequence[Completion], decode: Callable[[Sequence[int]], str], judges: Rewards
) -> Iterator[list[ScoredAnswer]]:
    names = dict.fromkeys(name for question in questions.items for name in question.prompt.columns)
    for start in range(0, len(completions), questions.judge_batch_size):
        part = completions[start : start + questions.judge_batch_size]
        texts = [decode(completion.ids) for completion in part]
        places = [divmod(start + offset, questions.samples) for offset in range(len(part))]
        prompts = [questions.items[index].prompt for index, _ in places]
        columns = {name: [prompt.columns.get(name) for prompt in prompts] for name in names}
        contents, ids = [prompt.content for prompt in prompts], [completion.ids for completion in part]
        scores = judges.score(contents, texts, ids, columns)
        by_answer = zip(places, texts, part, scores.total, *scores.parts.values(), strict=True)
        yield [
            ScoredAnswer(index, sample, text, completion, total, dict(zip(scores.parts, values, strict=True)))
            for (index, sample), text, completion, total, *values in by_answer
        ]


def open_judges(
    rewards: Sequence[Reward], timeout: float, say: Callable[[str], None], key: str = "grpo.reward_timeout"
) -> tuple[Rewards, int]:
    """Return the rewards in their process, and how many completions they are given together: with a judge, so few that
    a run may be stopped between two calls, whose time its own bounds then limit. Raises UserError."""
    judges = [reward.options for reward in rewards if reward.fn == "judge"]
    if not judges:
        return Rewards(rewards, timeout=timeout, say=say, key=key), JUDGED_TOGETHER
    judge = import_module("dtrain.rl.remote.judge")
    together = max(map(judge.batch_size, judges))
    bounds = [judge.max_call_seconds(options, together) for options in judges]
    return Rewards(rewards, timeout=max(timeout, *bounds), say=say, key=key), together


@dataclass(frozen=True)
class QuestionOptions:
    """How the prompts of an evaluation are read and answered: by `eval` of a run, and by `dtrain eval`.

    Attributes:
        sampling: How answers are sampled. The tokenizer's end tokens are added to it.
        samples: Answers for each prompt.
        seed: Seed of the sampling.
        pass_reward: The smallest reward with which an answer passes.
        system_prompt: A system message for prompts without one.
        prompts_as: How plain strings are read, as in `data.prompts_as`.
        limit: Use only the first N prompts. None: all.
        format: Format of the rows.
        columns: The files' own names of columns.
        columns_key: The key of `columns`, for messages. None if the caller has no such setting.
    """

    sampling: SamplingParams
    samples: int
    seed: int
    pass_reward: float
    system_prompt: str | None
    prompts_as: str
    limit: int | None
    format: str = "auto"
    columns: Mapping[str, str] = field(default_factory=dict)
    columns_key: str | None = "data.train.columns"


@dataclass(frozen=True)
class PreparedQuestions:
    """The questions of an evaluation, and lines on how they were read."""

    questions: Questions
    notes: Sequence[str]


def prepare_questions(
    label: str,
    files: Sequence[Path],
    options: QuestionOptions,
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    positions: int,
    images: "ImageReader | None",
) -> PreparedQuestions:
    """Read the prompts of `files` and encode them for a model.

    Args:
        label: The name of the files in notes, such as "eval.math".
        files: Files of prompts.
        options: How they are read and answered.
        tokenizer: The model's tokenizer.
        template: The model's chat template, if it has one.
        positions: The model's positions, which prompt and answer share.
        images: Reads images of prompts. None: prompts have none.

    Raises:
        UserError: If a row is wrong, with file and line.
    """
    max_new_tokens = options.sampling.max_new_tokens
    prompt_options = PromptOptions.for_length(positions, max_new_tokens, options.system_prompt)
    encoder = PromptEncoder(
        tokenizer,
        template,
        max_length=positions,
        options=prompt_options,
        prompts_as=options.prompts_as,
        images=images,
    )
    items = read_questions(
        files, encoder, options.limit, format=options.format, columns=options.columns, key=options.columns_key
    )
    sampling = replace(options.sampling, stop_ids=tuple(tokenizer.eos_ids))
    has_images = any(item.images for item in items)
    questions = Questions(
        items,
        options.samples,
        sampling,
        options.seed,
        prompt_options.max_prompt_length,
        options.pass_reward,
        reader=images if has_images else None,
    )
    return PreparedQuestions(questions, string_prompt_notes(label, items, encoder))


def read_questions(
    files: Sequence[Path],
    encoder: PromptEncoder,
    limit: int | None,
    *,
    format: str = "auto",
    columns: Mapping[str, str] | None = None,
    key: str | None = "data.train.columns",
) -> list[Question]:
    """Return the first `limit` prompts of `files` (data/formats/prompts.py says what a row may be). `key` is that of
    `columns`. Raises UserError, with file and line."""
    columns = columns or {}
    names = detect_formats(files, format, "prompts", columns, key)

    def read(name: str, directory: Path, row: Mapping[str, Any]) -> tuple[Prompt, list[int], list[Any]]:
        prompt = normalise_prompt(encoder.as_messages(row, name), name, encoder.options.system)
        encoder.directory = directory
        images = encoder.images_of(prompt)
        ids = encoder.encode(prompt, images)
        if len(ids) > encoder.options.max_prompt_length and images:
            raise UserError(
                f"the prompt has {len(ids)} tokens and images, and there is room for "
                f"{encoder.options.max_prompt_length}"
            )
        return replace(prompt, content=prompt.content_without_images), ids, [image.record for image in images]

    questions = (
        Question(f"{file}:{line}", prompt, ids, encoder.has_string_prompt(row, name), images)
        for file, name in zip(files, names, strict=True)
        for chunk in read_chunks(file)
        for line, row, (prompt, ids, images) in read_rows(chunk, columns, partial(read, name, file.absolute().parent))
    )
    return list(islice(questions, limit))


def any_prompt_has_images(files: Sequence[Path], limit: int | None) -> bool:
    """Return whether one of the first `limit` prompts of `files` has an image. Nothing of it is read. Raises UserError,
    with file and line."""
    names = detect_formats(files, "auto", "prompts", {}, None)
    prompts = (
        prompt
        for file, name in zip(files, names, strict=True)
        for chunk in read_chunks(file)
        for _, _, prompt in read_rows(chunk, {}, partial(normalise_prompt, name=name))
    )
    return any(prompt.content_without_images != prompt.content for prompt in islice(prompts, limit))


def string_prompt_notes(label: str, questions: Sequence[Question], encoder: PromptEncoder) -> list[str]:
    """Return the line that tells how `encoder` read the plain strings among the prompts, if there are any."""
    num_plain = sum(question.is_string for question in questions)
    return describe_string_prompts(label, num_plain, encoder.prompts_as, encoder.template)


def _mean(values: Sequence[float]) -> float:
    known_values = [value for value in values if not math.isnan(value)]
    return fmean(known_values) if known_values else math.nan
