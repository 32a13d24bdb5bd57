"""Questions to answers and their worth: what `dtrain eval` and the evaluations of a run have in common.

Who answers is given: a model of a directory on one device, or the one that trains, on its mesh.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from dtrain.base.errors import Interrupted, UserError
from dtrain.base.ranks import Ranks
from dtrain.data.formats.plain_prompts import describe
from dtrain.data.formats.prompts import Prompt, PromptEncoder, normalise_prompt
from dtrain.data.sources.columns import lacking, renamed
from dtrain.data.sources.files import formats_of, parse, read_chunks
from dtrain.inference.request import AskStop, Completion, Request, SamplingParams
from dtrain.recipe.schema import Reward
from dtrain.rl.pass_at_k import pass_at, passes
from dtrain.rl.rewards import Rewards

JUDGED_TOGETHER = 512  # completions of one call of the rewards, whose timeout is for one call


@dataclass(frozen=True)
class Question:
    """A prompt of a file: where it stands, and its token ids, not yet cut. is_plain: whether the file has it as a plain
    string."""

    place: str
    prompt: Prompt
    ids: list[int]
    is_plain: bool = False


@dataclass(frozen=True)
class Questions:
    """What is asked: each of `asked` so many times. room: tokens of the longest prompt; a longer one loses its
    beginning. pass_reward: from which a completion passes. together: completions of one call of the rewards."""

    asked: Sequence[Question]
    samples: int
    sampling: SamplingParams
    seed: int
    room: int
    pass_reward: float
    together: int = JUDGED_TOGETHER

    def requests(self) -> list[Request]:
        """Prompt by prompt."""
        return [
            Request(one.ids[-self.room :], self.sampling, self.seed, index, sample)
            for index, one in enumerate(self.asked)
            for sample in range(self.samples)
        ]


@dataclass(frozen=True)
class ScoredAnswer:
    """One completion: prompt `index`, sample `sample`, its text and what it earned; NaN where that is not known."""

    index: int
    sample: int
    text: str
    completion: Completion
    reward: float
    parts: dict[str, float]


@dataclass(frozen=True)
class Report:
    """What came out. passes: k -> pass@k (arXiv:2107.03374, section 2.1, without its bias), where a
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
    def of(cls, judged: Sequence[ScoredAnswer], asked: Questions, seconds: float) -> "Report":
        samples = asked.samples
        groups = [judged[start : start + samples] for start in range(0, len(judged), samples)]
        means = [_mean([one.reward for one in group]) for group in groups]
        known = [mean for mean in means if not math.isnan(mean)]
        right = [sum(one.reward >= asked.pass_reward for one in group) for group in groups]
        lengths = [len(one.completion.ids) for one in judged]
        return cls(
            prompts=len(groups),
            samples=samples,
            reward=_mean([one.reward for one in judged]),
            reward_stderr=stdev(known) / math.sqrt(len(known)) if len(known) > 1 else math.nan,
            rewards={name: _mean([one.parts[name] for one in judged]) for name in judged[0].parts},
            passes={k: fmean(pass_at(k, samples, count) for count in right) for k in passes(samples)},
            pass_reward=asked.pass_reward,
            completion_len=fmean(lengths),
            completion_len_max=max(lengths),
            truncated_frac=fmean(one.completion.finish == "length" for one in judged),
            unknown=sum(math.isnan(one.reward) for one in judged),
            cut_prompts=sum(len(one.ids) > asked.room for one in asked.asked),
            seconds=seconds,
        )


def evaluate(
    asked: Questions,
    answer: Callable[[Sequence[Request]], Sequence[Completion]],
    decode: Callable[[Sequence[int]], str],
    judges: Rewards | None,
    keep: Callable[[list[ScoredAnswer]], None],
    *,
    ranks: Ranks,
    ask_stop: AskStop = lambda: False,
) -> Report:
    """Answer and judge. Collective over `ranks`, of which the first alone has `judges`, and is given the answers to
    `keep`; all get the report.

    answer: completions of requests, in their order, the same on every rank. ask_stop: whether to give up between two
    calls of the judges. Raises UserError, and Interrupted on every rank.
    """
    start = time.perf_counter()
    completions = answer(asked.requests())

    def judge() -> Report | None:
        assert judges is not None, "the first rank has them"
        judged: list[ScoredAnswer] = []
        for part in _judged(asked, completions, decode, judges):
            if ask_stop():
                return None
            judged += part
        keep(judged)
        return Report.of(judged, asked, time.perf_counter() - start)

    report = ranks.first(judge)
    if report is None:
        raise Interrupted
    return report


def _judged(
    asked: Questions, completions: Sequence[Completion], decode: Callable[[Sequence[int]], str], judges: Rewards
) -> Iterator[list[ScoredAnswer]]:
    names = dict.fromkeys(name for one in asked.asked for name in one.prompt.columns)
    for start in range(0, len(completions), asked.together):
        part = completions[start : start + asked.together]
        texts = [decode(completion.ids) for completion in part]
        places = [divmod(start + offset, asked.samples) for offset in range(len(part))]
        prompts = [asked.asked[index].prompt for index, _ in places]
        columns = {name: [prompt.columns.get(name) for prompt in prompts] for name in names}
        scores = judges.score([one.content for one in prompts], texts, [one.ids for one in part], columns)
        yield [
            ScoredAnswer(
                index,
                sample,
                texts[offset],
                part[offset],
                scores.total[offset],
                {name: values[offset] for name, values in scores.parts.items()},
            )
            for offset, (index, sample) in enumerate(places)
        ]


def open_judges(
    rewards: Sequence[Reward], timeout: float, say: Callable[[str], None], key: str = "grpo.reward_timeout"
) -> tuple[Rewards, int]:
    """The rewards in their process, and how many completions they are given together: with a judge, so few that a run
    may be stopped between two calls, whose time its own bounds then say. Raises UserError."""
    judges = [one.options for one in rewards if one.fn == "judge"]
    if not judges:
        return Rewards(rewards, timeout=timeout, say=say, key=key), JUDGED_TOGETHER
    room = import_module("dtrain.rl.remote.judge")
    together = max(map(room.together, judges))
    bounds = [room.seconds_for(options, together) for options in judges]
    return Rewards(rewards, timeout=max(timeout, *bounds), say=say, key=key), together


def read_questions(
    files: Sequence[Path],
    encoder: PromptEncoder,
    limit: int | None,
    *,
    format: str = "auto",
    columns: Mapping[str, str] | None = None,
    key: str = "data.train.columns",
) -> list[Question]:
    """Return the first `limit` prompts of `files` (data/formats/prompts.py says what a row may be). `key` is that of
    `columns`. Raises UserError, with file and line."""
    columns = columns or {}
    found: list[Question] = []
    names = formats_of(files, format, "prompts", columns, key)
    for file, name in zip(files, names, strict=True):
        for chunk in read_chunks(file):
            for line, raw in chunk.rows:
                if len(found) == limit:
                    return found
                given, place = parse(chunk.file, line, raw), f"{file}:{line}"
                try:
                    row = renamed(given, columns)
                    prompt = normalise_prompt(encoder.in_messages(row, name), name, encoder.options.system)
                    found.append(Question(place, prompt, encoder.encode(prompt), encoder.has_plain_prompt(row, name)))
                except UserError as error:
                    raise UserError(f"{place}: {error}{lacking(given, columns)}") from error
    return found


def plain_prompts_of(label: str, asked: Sequence[Question], encoder: PromptEncoder) -> list[str]:
    """Return the line that tells how `encoder` read the plain strings among the prompts, if there are any."""
    return describe(label, sum(one.is_plain for one in asked), encoder.prompts_as, encoder.template)


def known(value: Any) -> Any:
    """For JSON: what is not known is null."""
    if isinstance(value, float) and math.isnan(value):
        return None
    if isinstance(value, dict):
        return {key: known(one) for key, one in value.items()}
    return value


def _mean(values: Sequence[float]) -> float:
    found = [value for value in values if not math.isnan(value)]
    return fmean(found) if found else math.nan
