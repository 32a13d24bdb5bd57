"""Evaluation: questions are answered and the answers scored, for `dtrain eval` and for the evaluations of a run.

    prepare_questions    reads prompt files and encodes them: `Questions`
    evaluate             samples the answers with a function of the caller, scores them, and returns a `Report`

The caller's function may use a model of a directory on one device, or the model that trains, on its mesh.
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
from dtrain.data.formats.encoder import AS_WRITTEN, describe_string_prompts
from dtrain.data.formats.prompts import Prompt, PromptEncoder, PromptOptions, normalise_prompt
from dtrain.data.sources.files import detect_formats, read_chunks, read_rows
from dtrain.data.sources.reading import ReadFormat, RowReading
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

MAX_SCORED_TOGETHER = 512  # completions of one call of the rewards, whose timeout applies to one call


@dataclass(frozen=True)
class Question:
    """A prompt of a file.

    Attributes:
        location: Where it is, as FILE:LINE.
        prompt: The prompt.
        ids: Its token ids, not yet cut.
        is_string: Whether the file has it as a plain string, not as messages.
        images: Its images, in order.
    """

    location: str
    prompt: Prompt
    ids: list[int]
    is_string: bool = False
    images: "Sequence[ImageRecord]" = ()


@dataclass(frozen=True)
class Questions:
    """The questions of an evaluation.

    Attributes:
        items: The questions.
        samples: Answers for each question.
        sampling: How answers are sampled.
        seed: Seed of the sampling.
        max_prompt_tokens: Tokens of the longest prompt. A longer one loses its beginning.
        pass_reward: The smallest reward with which an answer passes.
        judge_batch_size: Answers of one call of the rewards.
        reader: Reads the images of the questions. None if there are none.
    """

    items: Sequence[Question]
    samples: int
    sampling: SamplingParams
    seed: int
    max_prompt_tokens: int
    pass_reward: float
    judge_batch_size: int = MAX_SCORED_TOGETHER
    reader: "ImageReader | None" = None

    def requests(self) -> list[Request]:
        """Return the requests, question by question, with decoded images. Raises UserError if an image is broken."""
        requests = []
        for index, question in enumerate(self.items):
            ids = question.ids[-self.max_prompt_tokens :]
            images = None if self.reader is None else prompt_images(self.reader, ids, question.images)
            for sample in range(self.samples):
                requests.append(Request(ids, self.sampling, self.seed, index, sample, images=images))
        return requests


@dataclass(frozen=True)
class ScoredAnswer:
    """A scored answer.

    Attributes:
        index: Number of the question.
        sample: Number of the answer to it.
        text: The answer.
        completion: Its tokens.
        reward: Its reward. NaN if unknown.
        parts: The value of each reward, by name.
    """

    index: int
    sample: int
    text: str
    completion: Completion
    reward: float
    parts: dict[str, float]


@dataclass(frozen=True)
class Report:
    """Results of an evaluation.

    Attributes:
        prompts: Number of questions.
        samples: Answers for each question.
        reward: Mean of the known rewards. NaN if none is known.
        reward_stderr: Standard error of the mean, over the means of the questions.
        rewards: Mean of each reward, by name.
        passes: k -> pass@k, an unbiased estimate. An answer passes with a reward of at least `pass_reward`.
        pass_reward: The smallest reward with which an answer passes.
        completion_len: Mean number of tokens of an answer.
        completion_len_max: Tokens of the longest answer.
        truncated_frac: Fraction of answers that were cut.
        unknown: Number of answers without a known reward.
        cut_prompts: Number of prompts that lost their beginning.
        seconds: Duration of the evaluation.

    Reference:
        pass@k: Chen et al., arXiv:2107.03374, section 2.1.
    """

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
        """Compute the report of all answers, which are in the order of the questions."""
        samples = questions.samples
        groups = [answers[start : start + samples] for start in range(0, len(answers), samples)]
        group_means = [_mean_of_known([answer.reward for answer in group]) for group in groups]
        known_means = [mean for mean in group_means if not math.isnan(mean)]
        reward_stderr = math.nan
        if len(known_means) > 1:
            reward_stderr = stdev(known_means) / math.sqrt(len(known_means))
        # A reward of NaN does not pass.
        num_passing = [sum(answer.reward >= questions.pass_reward for answer in group) for group in groups]
        passes = {}
        for k in pass_at_k_values(samples):
            passes[k] = fmean(pass_at_k(k, samples, count) for count in num_passing)
        rewards = {}
        for name in answers[0].parts:
            rewards[name] = _mean_of_known([answer.parts[name] for answer in answers])
        lengths = [len(answer.completion.ids) for answer in answers]
        return cls(
            prompts=len(groups),
            samples=samples,
            reward=_mean_of_known([answer.reward for answer in answers]),
            reward_stderr=reward_stderr,
            rewards=rewards,
            passes=passes,
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
    """Answer the questions and score the answers.

    Args:
        questions: The questions.
        answer: Returns the completions of requests in their order, the same on every rank.
        decode: Decodes token ids.
        judges: The rewards. None on ranks other than the first.
        keep: Receives the scored answers, on the first rank.
        ranks: The ranks that evaluate together.
        should_stop: Whether to stop, asked between two calls of the rewards.

    Returns:
        The report, on every rank.

    Raises:
        UserError: If sampling or a reward fails.
        Interrupted: On every rank, if `should_stop` returns true.

    Collectives:
        Those of `answer`, and one broadcast from the first rank.
    """
    start = time.perf_counter()
    completions = answer(questions.requests())

    def judge() -> Report | None:
        assert judges is not None, "the first rank has the rewards"
        answers: list[ScoredAnswer] = []
        for scored in _score(questions, completions, decode, judges):
            if should_stop():
                return None
            answers += scored
        keep(answers)
        return Report.of(answers, questions, time.perf_counter() - start)

    report = ranks.run_on_first(judge)
    if report is None:
        raise Interrupted
    return report


def _score(
    questions: Questions, completions: Sequence[Completion], decode: Callable[[Sequence[int]], str], judges: Rewards
) -> Iterator[list[ScoredAnswer]]:
    """Yield the scored answers, one batch at a time, in the order of the questions."""
    names = dict.fromkeys(name for question in questions.items for name in question.prompt.columns)
    batch_size = questions.judge_batch_size
    for start in range(0, len(completions), batch_size):
        batch = completions[start : start + batch_size]
        texts = [decode(completion.ids) for completion in batch]
        question_and_sample = [divmod(start + offset, questions.samples) for offset in range(len(batch))]
        prompts = [questions.items[index].prompt for index, _ in question_and_sample]
        columns = {name: [prompt.columns.get(name) for prompt in prompts] for name in names}
        contents = [prompt.content for prompt in prompts]
        scores = judges.score(contents, texts, [completion.ids for completion in batch], columns)
        answers = []
        for offset, (index, sample) in enumerate(question_and_sample):
            parts = {name: values[offset] for name, values in scores.parts.items()}
            answers.append(ScoredAnswer(index, sample, texts[offset], batch[offset], scores.total[offset], parts))
        yield answers


def open_judges(
    rewards: Sequence[Reward], timeout: float, print_line: Callable[[str], None], key: str = "grpo.reward_timeout"
) -> tuple[Rewards, int]:
    """Start the process of the rewards.

    Args:
        rewards: Checked rewards.
        timeout: Seconds that one reward may take for one call.
        print_line: Prints a line.
        key: The recipe key of the timeout, for messages.

    Returns:
        The rewards, and the number of completions for one call of them. With a `judge`, this is so small that a run
        can stop between two calls, and the time limit of a call follows from the judge's own limits.

    Raises:
        UserError: If a reward cannot be loaded.
    """
    judge_options = [reward.options for reward in rewards if reward.fn == "judge"]
    if not judge_options:
        return Rewards(rewards, timeout=timeout, print_line=print_line, key=key), MAX_SCORED_TOGETHER
    judge = import_module("dtrain.rl.remote.judge")
    batch_size = max(judge.batch_size(options) for options in judge_options)
    max_seconds = [judge.max_call_seconds(options, batch_size) for options in judge_options]
    return Rewards(rewards, timeout=max(timeout, *max_seconds), print_line=print_line, key=key), batch_size


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
        reading: How the rows are read before they are of this format.
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
    reading: RowReading = field(default_factory=RowReading)
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
        files, encoder, options.limit, format=options.format, reading=options.reading, key=options.columns_key
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
    reading: RowReading = AS_WRITTEN,
    key: str | None = "data.train.columns",
) -> list[Question]:
    """Read and encode the first `limit` prompts of files. data/formats/prompts.py describes the rows.

    Args:
        files: Files of prompts.
        encoder: Encodes prompts.
        limit: Read only the first N prompts. None: all.
        format: Format of the rows.
        reading: How the rows are read before they are of this format.
        key: The recipe key of `columns`, for messages.

    Raises:
        UserError: If a row is wrong, with file and line.
    """
    names = detect_formats(files, format, "prompts", reading, key)

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

    def iterate() -> Iterator[Question]:
        for file, name in zip(files, names, strict=True):
            read_row = partial(read, name, file.absolute().parent)
            for chunk in read_chunks(file):
                for line, row, (prompt, ids, images) in read_rows(chunk, reading, read_row):
                    is_string = encoder.has_string_prompt(row, name)
                    yield Question(f"{file}:{line}", prompt, ids, is_string, images)

    return list(islice(iterate(), limit))  # rows after the limit are not read


def any_prompt_has_images(files: Sequence[Path], limit: int | None, source: ReadFormat) -> bool:
    """Return whether one of the first `limit` prompts of files has an image. Image files are not read.

    Args:
        files: Files of prompts.
        limit: Look only at the first N prompts. None: at all.
        source: Format of the rows.

    Raises:
        UserError: If a row is wrong, with file and line.
    """
    names = detect_formats(files, source.name, "prompts", source.reading, None)

    def iterate() -> Iterator[Prompt]:
        for file, name in zip(files, names, strict=True):
            for chunk in read_chunks(file):
                for _, _, prompt in read_rows(chunk, source.reading, partial(normalise_prompt, name=name)):
                    yield prompt

    for prompt in islice(iterate(), limit):
        if prompt.content_without_images != prompt.content:
            return True
    return False


def string_prompt_notes(label: str, questions: Sequence[Question], encoder: PromptEncoder) -> list[str]:
    """Return a line on how plain strings among the prompts were read. Empty if there are none."""
    num_strings = sum(question.is_string for question in questions)
    return describe_string_prompts(label, num_strings, encoder.prompts_as, encoder.template)


def _mean_of_known(values: Sequence[float]) -> float:
    """Return the mean of the values that are not NaN. NaN if there are none."""
    known_values = [value for value in values if not math.isnan(value)]
    return fmean(known_values) if known_values else math.nan
