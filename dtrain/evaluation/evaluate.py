"""`dtrain eval`: a directory's model answers the prompts of data files, and rewards judge its answers."""

import json
import math
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from tqdm import tqdm

from dtrain.config.schema import Reward
from dtrain.data.files import parse, read_chunks, resolve
from dtrain.data.formats import describe_unknown, detect
from dtrain.data.prompts import Prompt, PromptEncoder, PromptOptions, normalise_prompt
from dtrain.data.template import choose_template
from dtrain.errors import UserError
from dtrain.rollout.engine import Engine
from dtrain.rollout.generate import choose_device, choose_dtype, load
from dtrain.rollout.request import Completion, Request, SamplingParams
from dtrain.rollout.rewards import Rewards
from dtrain.rollout.rewards.math_answers import answer_in

MANY = 0.2  # of the answers, cut at their longest
JUDGED_TOGETHER = 512  # completions of one call of the rewards, whose timeout is for one call


@dataclass(frozen=True)
class Judged:
    """One completion: prompt `index`, sample `sample`, its text and what it earned; NaN where that is not known."""

    index: int
    sample: int
    text: str
    completion: Completion
    reward: float
    parts: dict[str, float]


@dataclass(frozen=True)
class Report:
    """What `dtrain eval` prints. passes: k -> pass@k (arXiv:2107.03374, section 2.1, without its bias), where a
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
    def of(cls, judged: Sequence[Judged], samples: int, pass_reward: float, cut: int, seconds: float) -> "Report":
        groups = [judged[start : start + samples] for start in range(0, len(judged), samples)]
        means = [_mean([one.reward for one in group]) for group in groups]
        known = [mean for mean in means if not math.isnan(mean)]
        right = [sum(one.reward >= pass_reward for one in group) for group in groups]
        powers = [2**power for power in range(samples.bit_length()) if 2**power <= samples]
        lengths = [len(one.completion.ids) for one in judged]
        return cls(
            prompts=len(groups),
            samples=samples,
            reward=_mean([one.reward for one in judged]),
            reward_stderr=stdev(known) / math.sqrt(len(known)) if len(known) > 1 else math.nan,
            rewards={name: _mean([one.parts[name] for one in judged]) for name in judged[0].parts},
            passes={k: fmean(pass_at(k, samples, count) for count in right) for k in sorted({*powers, samples})},
            pass_reward=pass_reward,
            completion_len=fmean(lengths),
            completion_len_max=max(lengths),
            truncated_frac=fmean(one.completion.finish == "length" for one in judged),
            unknown=sum(math.isnan(one.reward) for one in judged),
            cut_prompts=cut,
            seconds=seconds,
        )

    def as_json(self) -> str:
        """One line; what is not known is null."""
        fields = {**self.__dict__, "passes": {str(k): value for k, value in self.passes.items()}}
        return json.dumps(_without_nan(fields))

    def as_table(self) -> str:
        rows = [("prompts", f"{self.prompts} × {self.samples}"), ("reward", _shown(self.reward, self.reward_stderr))]
        if len(self.rewards) == 1:
            rows[1] = ("reward", f"{rows[1][1]} by {next(iter(self.rewards))}")
        else:
            rows += [(f"  {name}", _shown(value)) for name, value in self.rewards.items()]
        rows += [(f"pass@{k}", f"{value:.1%}") for k, value in self.passes.items()]
        rows += [
            ("tokens", f"{self.completion_len:.1f} on average, at most {self.completion_len_max}"),
            ("truncated", f"{self.truncated_frac:.1%}" + "; raise --max-new-tokens" * (self.truncated_frac > MANY)),
        ]
        if self.unknown:
            rows.append(("without reward", str(self.unknown)))
        if self.cut_prompts:
            rows.append(("prompts cut", f"{self.cut_prompts}, at their beginning"))
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


LONGEST_ANSWER = 512  # tokens, where nothing is asked for


def evaluate(asked: Namespace) -> Report:
    """Answer the prompts of data files (data/prompts.py says what a row may be), and judge the answers.

    asked: the command's arguments. Raises UserError.
    """
    start, out = time.perf_counter(), asked.out
    rewards = [read_reward(text) for text in asked.reward or [usual_reward(asked.data)]]
    device = choose_device(asked.device)
    if out is not None and not out.parent.is_dir():
        raise UserError(f"--out {out}: there is no directory {out.parent}")
    with Rewards(rewards, timeout=asked.reward_timeout, say=partial(print, file=sys.stderr)) as judges:
        model, tokenizer = load(asked.directory, choose_dtype(asked.dtype, device), device)
        length = model.config.max_position_embeddings
        new = asked.max_new_tokens or min(LONGEST_ANSWER, length // 2)
        if new >= length:
            raise UserError(
                f"--max-new-tokens {new} leaves no room for a prompt within the model's {length} positions: set less"
            )
        options = PromptOptions.within(length, new, asked.system)
        template = choose_template(tokenizer.directory, tokenizer.special_tokens, asked.chat_template)
        encoder = PromptEncoder(tokenizer, template, max_length=length, options=options)
        rows = list(_read(asked.data, encoder, asked.limit))
        if not rows:
            raise UserError(f"there is no row in {', '.join(asked.data)}")
        sampling = SamplingParams(
            new,
            asked.temperature,
            asked.top_k,
            asked.top_p,
            asked.min_p,
            stop_ids=tuple(tokenizer.eos_ids),
            stop=tuple(asked.stop),
        )
        requests = [
            Request(ids[-options.room :], sampling, asked.seed, index, sample)
            for index, (_, ids) in enumerate(rows)
            for sample in range(asked.samples)
        ]
        decode = partial(tokenizer.decode, skip_special_tokens=True)
        completions = _drawn(Engine(model, decode=decode, max_rows=asked.max_rows), requests)
        prompts = [prompt for prompt, _ in rows]
        judged = list(_judged(prompts, asked.samples, completions, decode, judges))
    cut = sum(len(ids) > options.room for _, ids in rows)
    if out is not None:
        _write(out, judged, prompts)
    return Report.of(judged, asked.samples, asked.pass_reward, cut, time.perf_counter() - start)


def read_reward(text: str) -> Reward:
    """A reward as it is typed: a name or an import path, with options as JSON after `=`. Raises UserError."""
    name, found, options = text.partition("=")
    try:
        kwargs = json.loads(options) if found else {}
    except ValueError as error:
        raise UserError(f"--reward {text}: the options after = are no JSON ({error})") from error
    if not isinstance(kwargs, dict):
        raise UserError(
            f'--reward {text}: the options after = must be a JSON object, such as regex={{"pattern": "yes"}}'
        )
    return Reward(name, kwargs=kwargs)


def usual_reward(data: Sequence[str]) -> str:
    """The reward of data where none is asked for, by its first answers: math_exact, or text_exact where fewer than half
    of them hold a number or a mark of an answer. Rows that are wrong are told later. Raises UserError for files that
    cannot be read."""
    found: list[bool] = []
    for file in resolve(data, "DATA"):
        chunk = next(read_chunks(file), None)
        for line, row in chunk.rows if chunk else ():
            try:
                columns = parse(str(file), line, row)
                answer = normalise_prompt(columns, detect(columns, "prompts") or "messages").columns.get("answer")
            except UserError:
                continue
            found += [answer_in(str(answer)) is not None] if answer not in (None, "") else []
    return "text_exact" if found and 2 * sum(found) < len(found) else "math_exact"


def pass_at(k: int, samples: int, right: int) -> float:
    """The chance that k of `samples` completions, of which `right` pass, have one that does (arXiv:2107.03374)."""
    return 1.0 - math.comb(samples - right, k) / math.comb(samples, k)


def _read(data: Sequence[str], encoder: PromptEncoder, limit: int | None) -> Iterator[tuple[Prompt, list[int]]]:
    """Each row's prompt and its token ids, not yet cut."""
    count = 0
    for file in resolve(data, "DATA"):
        name = None
        for chunk in read_chunks(file):
            for line, row in chunk.rows:
                if count == limit:
                    return
                count += 1
                columns = parse(chunk.file, line, row)
                name = name or detect(columns, "prompts")
                if name is None:
                    raise UserError(f"{file}:{line}: {describe_unknown(columns, 'prompts')}")
                try:
                    prompt = normalise_prompt(columns, name, encoder.options.system)
                    yield prompt, encoder.encode(prompt)
                except UserError as error:
                    raise UserError(f"{file}:{line}: {error}") from error


def _drawn(engine: Engine, requests: Sequence[Request]) -> list[Completion]:
    """The completions, in the requests' order, with a bar on a terminal's stderr."""
    tickets = [engine.add(request) for request in requests]
    found: dict[int, Completion] = {}
    with tqdm(total=len(requests), unit="completion", disable=None, leave=False) as bar:
        while engine.has_work:
            ended = engine.step()
            found.update(ended)
            bar.update(len(ended))
    return [found[ticket] for ticket in tickets]


def _judged(
    prompts: Sequence[Prompt],
    samples: int,
    completions: Sequence[Completion],
    decode: Callable[[Sequence[int]], str],
    judges: Rewards,
) -> Iterator[Judged]:
    names = dict.fromkeys(name for prompt in prompts for name in prompt.columns)
    for start in range(0, len(completions), JUDGED_TOGETHER):
        part = completions[start : start + JUDGED_TOGETHER]
        texts = [decode(completion.ids) for completion in part]
        places = [divmod(start + offset, samples) for offset in range(len(part))]
        columns = {name: [prompts[index].columns.get(name) for index, _ in places] for name in names}
        asked = [prompts[index].asked for index, _ in places]
        scores = judges.score(asked, texts, [completion.ids for completion in part], columns)
        for offset, (index, sample) in enumerate(places):
            parts = {name: values[offset] for name, values in scores.parts.items()}
            yield Judged(index, sample, texts[offset], part[offset], scores.total[offset], parts)


def _write(out: Path, judged: Sequence[Judged], prompts: Sequence[Prompt]) -> None:
    try:
        with out.open("w", encoding="utf-8") as file:
            for one in judged:
                row = {
                    "prompt_index": one.index,
                    "sample_index": one.sample,
                    "prompt": prompts[one.index].asked,
                    "completion": one.text,
                    "reward": one.reward,
                    "rewards": one.parts,
                    "tokens": len(one.completion.ids),
                    "finish": one.completion.finish,
                    "columns": prompts[one.index].columns,
                }
                file.write(json.dumps(_without_nan(row), ensure_ascii=False) + "\n")
    except OSError as error:
        raise UserError(f"--out {out}: {error.strerror or error}") from error


def _mean(values: Sequence[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return fmean(known) if known else math.nan


def _shown(value: float, error: float = math.nan) -> str:
    if math.isnan(value):
        return "not known"
    return f"{value:.4f}" + ("" if math.isnan(error) else f" ± {error:.4f}")


def _without_nan(value: Any) -> Any:
    if isinstance(value, float) and math.isnan(value):
        return None
    if isinstance(value, dict):
        return {key: _without_nan(one) for key, one in value.items()}
    return value
