"""A rollout: prompts of the data to completions, their rewards and advantages; the same on every rank. The engine and
the rewards that it needs."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dtrain.base.errors import UserError
from dtrain.base.ranks import Ranks
from dtrain.data.formats.formats import read_tools
from dtrain.data.rows.rows import Cursor, Rows, SampleGroup
from dtrain.data.text.tokenizer import Tokenizer
from dtrain.inference.chats import ImagePrompt
from dtrain.inference.images import prompt_images
from dtrain.inference.native import NativeEngine
from dtrain.inference.request import Request, RolloutEngine, SamplingParams, ShouldStop
from dtrain.losses.policy.advantage import advantages, soft_overlong_penalty, zero_variance_groups
from dtrain.methods.method import RunContext
from dtrain.policy import Policy
from dtrain.policy.other_models import RewardModel
from dtrain.recipe.rollouts import RolloutSection, Sampling
from dtrain.rl.checks import cuda_graph_obstacles
from dtrain.rl.rewards import Rewards
from dtrain.rl.rewards.scoring import nan_to_none
from dtrain.rl.samples import Sample

if TYPE_CHECKING:
    from dtrain.data.images.files import ImageRecord
    from dtrain.data.images.reader import ImageReader
    from dtrain.rl.environments.episodes import Episodes


def open_engine(section: RolloutSection, policy: Policy, tokenizer: Tokenizer, run: RunContext) -> RolloutEngine:
    """Return the engine of `grpo.engine`. Collective. Raises UserError."""
    if section.engine == "http":
        return import_module("dtrain.rl.remote.engine").ServerEngine(section, policy, run)
    obstacles = cuda_graph_obstacles(section, policy.device.type, policy.recipe.parallel)
    steps = None
    if policy.device.type == "cuda":
        why = "; ".join(obstacles)
        run.metrics.say(f"decoding: kernel by kernel ({why})" if why else "decoding: CUDA graphs")
    if not obstacles:
        graphs = import_module("dtrain.inference.graphs")
        keeps = graphs.max_kept_bytes(policy.device)
        steps = graphs.GraphedSteps(policy.model, policy.device, keeps=keeps, insists=section.cuda_graphs is True)
    decode, say = partial(tokenizer.decode, skip_special_tokens=True), run.metrics.say
    return NativeEngine(policy, decode=decode, unshard=section.unshard, steps=steps, offloads=section.offload, say=say)


def open_rewards(section: RolloutSection, run: RunContext) -> Rewards | None:
    """Return the rewards in their own process, on rank 0 alone; None elsewhere, or where the recipe has none. The run
    closes them. Collective. Raises UserError."""
    ranks = Ranks()

    def start() -> Rewards | None:
        if not ranks.is_first or not section.rewards:
            return None
        return run.stack.enter_context(Rewards(section.rewards, timeout=section.reward_timeout, say=run.metrics.say))

    return ranks.run_on_all(start)


@dataclass(frozen=True)
class PromptRow:
    """A prompt of the data: its number in the endless sequence of prompts, its ids, its row, where that lies, and its
    images with their reader."""

    index: int
    ids: list[int]
    row: Mapping[str, Any]
    sample_group: SampleGroup
    images: "Sequence[ImageRecord]" = ()
    reader: "ImageReader | None" = None

    @property
    def data_row(self) -> int:
        """The sample of the data whose images this prompt has; -1 without."""
        return self.sample_group.samples[0] if self.images else -1

    def images_for(self, is_remote: bool) -> dict[str, Any]:
        """Return a request's fields of images: decoded, or with their files for an engine that is remote. Raises
        UserError."""
        if self.reader is None or not self.images:
            return {}
        if not is_remote:
            return {"images": prompt_images(self.reader, self.ids, self.images)}
        messages, tools = self.row["prompt"], read_tools(self.row["columns"])
        return {"image_prompt": ImagePrompt.of(self.reader, self.ids, self.images, messages, tools)}


@dataclass(frozen=True)
class Rollout:
    """Completions group by group, in the data's order, and the place of the last prompt.

    advantages [N]; counted, trained [N] bool: whether a sample takes part, and whether its tokens are trained there.
    measured: fields of the metrics. rows: lines of samples.jsonl, on rank 0 alone.
    """

    samples: list[Sample]
    advantages: Tensor
    counted: Tensor
    trained: Tensor
    last_sample_group: SampleGroup
    measured: dict[str, float]
    rows: list[dict[str, Any]]


@dataclass(frozen=True)
class PromptGroup:
    """The judged completions of a prompt. rewards [size], NaN where nothing is known; parts [size, rewards]: what they
    are the sum of."""

    prompt: PromptRow
    samples: list[Sample]
    rewards: Tensor
    parts: Tensor

    @property
    def has_equal_rewards(self) -> bool:
        """Return whether all known rewards are the same, so that nothing is learned from them."""
        return bool(zero_variance_groups(self.rewards, len(self.rewards)).all())


def read_prompts(rows: Rows, cursor: Cursor, count: int) -> list[PromptRow]:
    """Return the next prompts of `rows` from `cursor` on, fewer than `count` where the epochs end."""
    prompts = []
    for index, place in enumerate(islice(rows.sample_groups(cursor), count), rows.rows_before(cursor)):
        (sample,) = place.samples
        (ids, _), *_ = rows.samples[sample]
        images = () if rows.images is None else rows.samples.images(sample)[0]
        prompts.append(PromptRow(index, ids.tolist(), rows.samples.row(sample), place, images, rows.images))
    return prompts


def iterate_prompts(rows: Rows, size: int) -> Iterator[list[PromptRow]]:
    """Yield the prompts of all `rows`, `size` at a time."""
    cursor = Cursor()
    while prompts := read_prompts(rows, cursor, size):
        yield prompts
        cursor = prompts[-1].sample_group.next_cursor


@dataclass(frozen=True)
class CompletionSampler:
    """Draws completions to prompts. Collective: every rank makes the same calls.

    version: the optimizer steps behind the weights, as the engine counts them. should_stop: ends a draw (Interrupted)
    where this rank is asked to stop; a greedy one, of the likeliest tokens, goes on.
    """

    engine: RolloutEngine
    tokenizer: Tokenizer
    sampling: Sampling
    max_length: int
    seed: int
    should_stop: ShouldStop
    episodes: "Episodes | None" = None

    def sample(self, prompts: Sequence[PromptRow], version: int, count: int = 1, greedy: bool = False) -> list[Sample]:
        """Return `count` completions of each prompt, prompt by prompt."""
        requests, should_stop = self.build_requests(prompts, count, greedy), None if greedy else self.should_stop
        if self.episodes is not None:
            rows = [prompt.row for prompt in prompts for _ in range(count)]
            return self.episodes.play(self.engine, requests, rows, version, should_stop)
        completions = self.engine.generate(requests, should_stop, version=version)
        data_rows = [prompt.data_row for prompt in prompts for _ in range(count)]
        samples = [
            Sample(request.prompt, finish=done.finish, data_row=row)
            for request, done, row in zip(requests, completions, data_rows, strict=True)
        ]
        for sample, done in zip(samples, completions, strict=True):
            sample.append_completion(done)
        return samples

    def build_requests(self, prompts: Sequence[PromptRow], count: int, greedy: bool = False) -> list[Request]:
        """Return the requests of a draw."""
        wanted = self.sampling
        kinds = (0.0, None, 1.0) if greedy else (wanted.temperature, wanted.top_k, wanted.top_p)
        stop_ids, stop = tuple(self.tokenizer.eos_ids), tuple(wanted.stop)
        requests = []
        for prompt in prompts:
            most = min(wanted.max_new_tokens, self.max_length - len(prompt.ids))
            sampling = SamplingParams(most, *kinds, stop_ids=stop_ids, stop=stop)
            images, draws = prompt.images_for(self.engine.is_remote), range(count)
            requests += [Request(prompt.ids, sampling, self.seed, prompt.index, draw, **images) for draw in draws]
        return requests


class Collector:
    """Draws rollouts and judges them. Collective: every rank makes the same calls; rank 0 alone asks the rewards."""

    def __init__(
        self,
        section: RolloutSection,
        sampler: CompletionSampler,
        rows: Rows,
        rewards: Rewards | None,
        rates: RewardModel | None,
    ):
        self.section, self.sampler, self.rows, self.rewards, self.rates = section, sampler, rows, rewards, rates
        self.ranks = Ranks()
        of_functions: list[str] = self.ranks.run_on_first(lambda: rewards.names if rewards else [])
        self.names = of_functions + (["reward_model"] if rates else [])
        self._has_known_reward = False

    def collect(self, cursor: Cursor, version: int) -> Rollout | None:
        """Return the rollout whose prompts begin at `cursor`; None where the data's epochs are over. Raises UserError,
        also where no reward of the first one is known, and Interrupted where the run is asked to stop while completions
        are drawn."""
        section, began = self.section, time.perf_counter()
        size, wanted = section.group_size, section.prompts_per_step
        refills = section.max_refills if section.dynamic_sampling == "refill" else 0
        groups: list[PromptGroup] = []
        for _ in range(1 + refills):
            next_cursor = groups[-1].prompt.sample_group.next_cursor if groups else cursor
            prompts = read_prompts(self.rows, next_cursor, wanted - sum(map(self._teaches, groups)))
            if not prompts:
                break
            samples = self.sampler.sample(prompts, version, size)
            rewards, parts = self._judge(prompts, samples)
            of_prompts = [samples[start : start + size] for start in range(0, len(samples), size)]
            groups += map(PromptGroup, prompts, of_prompts, rewards.split(size), parts.split(size))
        if not groups:
            return None
        last = groups[-1].prompt.sample_group
        if not self._has_known_reward and all(group.rewards.isnan().all() for group in groups):
            of = f" ({', '.join(self.names)})" if self.names else ""
            raise UserError(
                f"none of the first rollout's {len(groups) * size} completions has a known reward{of}: each is None "
                "or NaN, or was not given in time, as said above. The run would train nothing; let the rewards give "
                "numbers, and None only for what they cannot judge"
            )
        self._has_known_reward = True
        if self.sampler.engine.is_remote:
            next_prompts = read_prompts(self.rows, last.next_cursor, wanted)
            self.sampler.engine.prefetch(self.sampler.build_requests(next_prompts, size), version)
        measured = self._measure(groups)  # of all that was drawn, whatever the updates take of it
        if len(groups) > wanted:  # groups that teach first, then the others that were drawn, in the data's order
            groups.sort(key=lambda group: not self._teaches(group))
            groups = sorted(groups[:wanted], key=lambda group: group.prompt.index)
        measured["rollout_time"] = time.perf_counter() - began
        return self._rollout(groups, last, measured)

    def score_greedy_completions(self, prompts: Sequence[PromptRow], version: int) -> tuple[list[Sample], Tensor]:
        """Return a completion of the likeliest tokens for each prompt, and the rewards [n]. Collective."""
        samples = self.sampler.sample(prompts, version, greedy=True)
        return samples, self._judge(prompts, samples)[0]

    def _teaches(self, group: PromptGroup) -> bool:
        """Return whether a group's rewards differ, or that does not matter."""
        return self.section.dynamic_sampling != "refill" or not group.has_equal_rewards

    def _judge(self, prompts: Sequence[PromptRow], samples: Sequence[Sample]) -> tuple[Tensor, Tensor]:
        """Return rewards [N], NaN where nothing is known, and the parts [N, rewards] that they are the sum of. One
        broadcast, and the reward model's collectives."""
        count = len(samples) // max(1, len(prompts))
        rows = [prompt.row for prompt in prompts for _ in range(count)]
        names = dict.fromkeys(name for row in rows for name in row["columns"])
        ids = [[token for token, drawn in zip(s.ids, s.sampled, strict=True) if drawn] for s in samples]
        contents = [row["prompt"] for row in rows]
        is_read = self.ranks.is_first or self.rates is not None
        texts = [self.sampler.tokenizer.decode(tokens, skip_special_tokens=True) for tokens in ids] if is_read else []

        def judge() -> tuple[list[float], list[list[float]]]:
            if self.rewards is None:
                return [float("nan")] * len(samples), []
            columns = {name: [row["columns"].get(name) for row in rows] for name in names}
            scores = self.rewards.score(contents, texts, ids, columns)
            return scores.total, list(scores.parts.values())

        total, parts = self.ranks.run_on_first(judge)
        rewards = torch.tensor(total, dtype=torch.float64)
        if self.rates is not None:
            rated = self.rates.rate(contents, texts)
            parts = [*parts, rated.tolist()]
            rewards = rewards.nan_to_num(nan=0.0) + self.section.reward_model.weight * rated
        rewards = _plus_earned(rewards, samples)
        by_name = torch.tensor(parts, dtype=torch.float64).view(len(self.names), len(samples))
        if self.section.overlong_cache is not None:
            lengths = torch.tensor([sample.longest for sample in samples], dtype=torch.float64)
            rewards = rewards + soft_overlong_penalty(
                lengths, self.section.sampling.max_new_tokens, self.section.overlong_cache
            )
        return rewards, by_name.t()

    def _rollout(self, groups: Sequence[PromptGroup], last: SampleGroup, measured: dict[str, float]) -> Rollout:
        section, size = self.section, self.section.group_size
        samples, rewards = [sample for group in groups for sample in group.samples], _rewards_of(groups)
        values = advantages(rewards, size, baseline=section.advantage, scale=section.scale)
        counted = ~rewards.isnan()
        if section.dynamic_sampling != "none":
            counted &= ~zero_variance_groups(rewards, size)
        trains = counted.clone()
        if section.mask_truncated:
            trains &= torch.tensor([sample.finish != "length" for sample in samples])
        rows = self._lines(groups, values) if self.ranks.is_first else []
        return Rollout(samples, values, counted, trains, last, measured, rows)

    def _measure(self, groups: Sequence[PromptGroup]) -> dict[str, float]:
        samples, rewards = [sample for group in groups for sample in group.samples], _rewards_of(groups)
        spread = _spread(rewards.view(len(groups), -1))
        fields = {"reward_mean": _mean(rewards), "reward_std": _mean(spread)}
        if len(self.names) > 1:
            parts = zip(self.names, torch.cat([group.parts for group in groups]).t(), strict=True)
            fields |= {f"reward/{name}": _mean(part) for name, part in parts}
        if self.sampler.episodes is not None:
            fields["lost_frac"] = sum(sample.finish == "lost" for sample in samples) / len(samples)
            for name in sorted({name for sample in samples for name in sample.metrics}):
                values = [sample.metrics[name] for sample in samples if name in sample.metrics]
                fields[f"environment/{name}"] = sum(values) / len(values)
        if self.section.tools:
            fields["tool_calls"] = sum(sample.calls for sample in samples) / len(samples)
            fields["tool_failures"] = sum(sample.failures for sample in samples) / len(samples)
        return (
            fields
            | length_metrics(samples)
            | {"frac_zero_std": sum(group.has_equal_rewards for group in groups) / len(groups)}
        )

    def _lines(self, groups: Sequence[PromptGroup], values: Tensor) -> list[dict[str, Any]]:
        """Return the rows of samples.jsonl, one for each completion; values: their advantages."""
        rows = [
            (group.prompt, *row)
            for group in groups
            for row in zip(group.samples, group.rewards.tolist(), group.parts.tolist(), strict=True)
        ]
        return [
            {
                "group": prompt.index,
                "prompt": prompt.row["prompt"],
                "completion": self.sampler.tokenizer.decode(list(sample.ids), skip_special_tokens=True),
                "reward": nan_to_none(reward),
                "rewards": nan_to_none(dict(zip(self.names, parts, strict=True))),
                "advantage": value,
                "tokens": len(sample.ids),
                "finish": sample.finish,
                **({"images": [image.entry for image in prompt.images]} if prompt.images else {}),
                **({} if sample.version is None else {"version": sample.version}),
                **({} if sample.earned is None else {"earned": sample.earned}),
                **({"environment": dict(sample.metrics)} if sample.metrics else {}),
            }
            for (prompt, sample, reward, parts), value in zip(rows, values.tolist(), strict=True)
        ]


def length_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Return the mean tokens of the completions, and the share that max_new_tokens or max_length ended."""
    count = max(1, len(samples))
    return {
        "completion_len": sum(sum(sample.sampled) for sample in samples) / count,
        "truncated_frac": sum(sample.finish == "length" for sample in samples) / count,
    }


def _rewards_of(groups: Sequence[PromptGroup]) -> Tensor:
    return torch.cat([group.rewards for group in groups])  # [N]


def _plus_earned(rewards: Tensor, samples: Sequence[Sample]) -> Tensor:
    """Return rewards [N] plus what samples earned in their environments; NaN where neither is known, or the environment
    was lost: rewards of a conversation that broke off would hold that against the model."""
    earned = torch.tensor([float("nan") if s.earned is None else s.earned for s in samples], dtype=torch.float64)
    is_known = ~(rewards.isnan() & earned.isnan())
    is_known &= torch.tensor([sample.finish != "lost" for sample in samples], dtype=torch.bool)
    return torch.where(is_known, rewards.nan_to_num(nan=0.0) + earned.nan_to_num(nan=0.0), float("nan"))


def _spread(rewards: Tensor) -> Tensor:
    """Return the standard deviation (n − 1) of each group of `rewards` [groups, size], unknown ones left out; 0 for
    fewer than two."""
    known = ~rewards.isnan()
    count = known.sum(1)
    filled = torch.where(known, rewards, 0)
    mean = filled.sum(1, keepdim=True) / count.clamp(min=1)[:, None]
    squares = torch.where(known, filled - mean, 0).square().sum(1)
    return (squares / (count - 1).clamp(min=1)).sqrt()


def _mean(values: Tensor) -> float:
    """Return the mean of the values that are known; 0 where none is."""
    known = values[~values.isnan()]
    return known.mean().item() if len(known) else 0.0
