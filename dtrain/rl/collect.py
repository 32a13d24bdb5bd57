"""Collecting a rollout: prompts of the data become completions with rewards and advantages, identical on every rank.

The steps of `Collector.collect`, for `grpo.prompts_per_step=2` and `grpo.group_size=3`:

    read_prompts              prompts 0 and 1 of the data
    CompletionSampler.sample  6 completions: a0 a1 a2 of prompt 0, b0 b1 b2 of prompt 1
    Collector._score          rewards [1, 0, 0, 1, 1, 1]; NaN if no reward has a value for a completion
    dynamic_sampling          the group of prompt 1 has equal rewards, so its advantages are 0: "drop" leaves the
                              group out of the updates, "refill" samples completions of another prompt in addition
    Collector._rollout        advantages, rows of samples.jsonl, metrics

All ranks sample together. Only rank 0 runs the rewards and the environments, and broadcasts their results.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

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
    """Open the engine of `grpo.engine`.

    Raises:
        UserError: If a server cannot be used, or CUDA graphs are required and not possible.

    Collectives:
        Broadcasts from rank 0 for servers. The native engine may issue collectives over the mesh.
    """
    if section.engine == "http":
        return import_module("dtrain.rl.remote.engine").ServerEngine(section, policy, run)
    obstacles = cuda_graph_obstacles(section, policy.device.type, policy.recipe.parallel)
    if policy.model.config.transformers is not None:
        # Their layers are called with their hooks, and may compute what a graph cannot contain.
        obstacles.append("modules of transformers are not captured")
    if policy.device.type == "cuda":
        if obstacles:
            run.metrics.print_line(f"decoding: kernel by kernel ({'; '.join(obstacles)})")
        else:
            run.metrics.print_line("decoding: CUDA graphs")
    steps = None
    if not obstacles:
        graphs = import_module("dtrain.inference.graphs")
        keeps = graphs.max_kept_bytes(policy.device)
        steps = graphs.GraphedSteps(policy.model, policy.device, keeps=keeps, insists=section.cuda_graphs is True)
    return NativeEngine(
        policy,
        decode=partial(tokenizer.decode, skip_special_tokens=True),
        unshard=section.unshard,
        steps=steps,
        offloads=section.offload,
        print_line=run.metrics.print_line,
    )


def open_rewards(section: RolloutSection, run: RunContext) -> Rewards | None:
    """Start the process of the rewards on rank 0. The run closes it.

    Returns:
        The rewards. None on the other ranks, and if the recipe has no rewards.

    Raises:
        UserError: On every rank, if the rewards cannot be loaded.

    Collectives:
        One broadcast from rank 0.
    """
    ranks = Ranks()

    def start() -> Rewards | None:
        if not ranks.is_first or not section.rewards:
            return None
        return run.stack.enter_context(
            Rewards(section.rewards, timeout=section.reward_timeout, print_line=run.metrics.print_line)
        )

    return ranks.run_on_all(start)


@dataclass(frozen=True)
class PromptRow:
    """A prompt of the data.

    Attributes:
        index: Its number in the sequence of prompts over all epochs.
        ids: Its token ids.
        row: The row of the data, with "prompt" and "columns".
        sample_group: Its position in the data, and the position of the next prompt.
        images: Its images, in order.
        reader: Reads the images. None if the data have none.
    """

    index: int
    ids: list[int]
    row: Mapping[str, Any]
    sample_group: SampleGroup
    images: "Sequence[ImageRecord]" = ()
    reader: "ImageReader | None" = None

    @property
    def data_row(self) -> int:
        """The row of the data with the images of this prompt. -1 without images."""
        return self.sample_group.samples[0] if self.images else -1

    def images_for(self, is_remote: bool) -> dict[str, Any]:
        """Return the keyword arguments of a `Request` for the images of this prompt.

        Args:
            is_remote: Whether a server samples the completion. A server gets the image files, and the native engine
                decoded images.

        Raises:
            UserError: If an image cannot be read.
        """
        if self.reader is None or not self.images:
            return {}
        if not is_remote:
            return {"images": prompt_images(self.reader, self.ids, self.images)}
        messages, tools = self.row["prompt"], read_tools(self.row["columns"])
        return {"image_prompt": ImagePrompt.of(self.reader, self.ids, self.images, messages, tools)}


@dataclass(frozen=True)
class Rollout:
    """N scored completions, group by group, in the order of the data.

    Attributes:
        samples: The completions.
        advantages: Their advantages, [N].
        counted: Whether a completion takes part in the updates, [N] bool.
        trained: Whether its sampled tokens are trained, [N] bool.
        last_sample_group: Position of the last prompt in the data.
        measured: Metrics.
        rows: Rows of samples.jsonl. Empty on ranks other than 0.
    """

    samples: list[Sample]
    advantages: Tensor
    counted: Tensor
    trained: Tensor
    last_sample_group: SampleGroup
    measured: dict[str, float]
    rows: list[dict[str, Any]]


class ScoredSamples(NamedTuple):
    """Rewards of N completions.

    Attributes:
        rewards: The total rewards, [N] float64. NaN if no part has a value.
        parts: The parts of the rewards, [N, number of rewards] float64, NaN if unknown.
    """

    rewards: Tensor
    parts: Tensor


@dataclass(frozen=True)
class PromptGroup:
    """The scored completions of a prompt.

    Attributes:
        prompt: The prompt.
        samples: Its completions.
        rewards: Their rewards, [size], NaN if unknown.
        parts: The parts of the rewards, [size, number of rewards].
    """

    prompt: PromptRow
    samples: list[Sample]
    rewards: Tensor
    parts: Tensor

    @property
    def has_equal_rewards(self) -> bool:
        """Whether all known rewards are equal. The advantages are then 0, and the group trains nothing."""
        return bool(zero_variance_groups(self.rewards, len(self.rewards)).all())


def read_prompts(rows: Rows, cursor: Cursor, count: int) -> list[PromptRow]:
    """Return the next `count` prompts of `rows` from `cursor` on, or fewer at the end of the epochs."""
    prompts = []
    sample_groups = islice(rows.sample_groups(cursor), count)
    for index, sample_group in enumerate(sample_groups, start=rows.rows_before(cursor)):
        (sample,) = sample_group.samples
        ids = rows.samples[sample][0][0]
        images = () if rows.images is None else rows.samples.images(sample)[0]
        row = rows.samples.row(sample)
        prompts.append(PromptRow(index, ids.tolist(), row, sample_group, images, rows.images))
    return prompts


def iterate_prompts(rows: Rows, size: int) -> Iterator[list[PromptRow]]:
    """Yield the prompts of all `rows`, `size` at a time."""
    cursor = Cursor()
    while prompts := read_prompts(rows, cursor, size):
        yield prompts
        cursor = prompts[-1].sample_group.next_cursor


@dataclass(frozen=True)
class CompletionSampler:
    """Samples completions of prompts. Every rank makes the same calls.

    Attributes:
        engine: The engine.
        tokenizer: The tokenizer, for its end-of-sequence tokens.
        sampling: How completions are sampled.
        max_length: Largest number of tokens of prompt and completion.
        seed: Seed of the run.
        should_stop: Whether this rank is asked to stop. Sampling then raises Interrupted. Greedy sampling, for
            validation, continues.
        episodes: Plays completions of several turns in environments. None without environments.
    """

    engine: RolloutEngine
    tokenizer: Tokenizer
    sampling: Sampling
    max_length: int
    seed: int
    should_stop: ShouldStop
    episodes: "Episodes | None" = None

    def sample(self, prompts: Sequence[PromptRow], version: int, count: int = 1, greedy: bool = False) -> list[Sample]:
        """Sample `count` completions of each prompt.

        Args:
            prompts: The prompts.
            version: Version of the weights, which is the number of optimizer steps.
            count: Completions of each prompt.
            greedy: Choose the most probable token at each position.

        Returns:
            The completions, prompt by prompt.

        Collectives:
            Those of the engine and the episodes.
        """
        requests = self.build_requests(prompts, count, greedy)
        should_stop = None if greedy else self.should_stop
        prompt_of_requests = [prompt for prompt in prompts for _ in range(count)]
        if self.episodes is not None:
            rows = [prompt.row for prompt in prompt_of_requests]
            return self.episodes.play(self.engine, requests, rows, version, should_stop)
        completions = self.engine.generate(requests, should_stop, version=version)
        samples = []
        for request, completion, prompt in zip(requests, completions, prompt_of_requests, strict=True):
            sample = Sample(request.prompt, finish=completion.finish, data_row=prompt.data_row)
            sample.append_completion(completion)
            samples.append(sample)
        return samples

    def build_requests(self, prompts: Sequence[PromptRow], count: int, greedy: bool = False) -> list[Request]:
        """Return `count` requests for each prompt, as `sample` sends them."""
        temperature, top_k, top_p = self.sampling.temperature, self.sampling.top_k, self.sampling.top_p
        if greedy:
            temperature, top_k, top_p = 0.0, None, 1.0
        stop_ids, stop = tuple(self.tokenizer.eos_ids), tuple(self.sampling.stop)
        requests = []
        for prompt in prompts:
            max_new_tokens = min(self.sampling.max_new_tokens, self.max_length - len(prompt.ids))
            sampling = SamplingParams(max_new_tokens, temperature, top_k, top_p, stop_ids=stop_ids, stop=stop)
            images = prompt.images_for(self.engine.is_remote)
            for sample_index in range(count):
                requests.append(Request(prompt.ids, sampling, self.seed, prompt.index, sample_index, **images))
        return requests


class Collector:
    """Samples and scores rollouts. Every rank makes the same calls, and only rank 0 calls the rewards.

    Args:
        section: The section of the method.
        sampler: Samples completions.
        rows: The training data.
        rewards: The rewards. None on ranks other than 0, and if the recipe has none.
        reward_model: The model of `grpo.reward_model`, on the mesh. None if the recipe has none.

    Attributes:
        names: Names of the rewards. The reward model is the last one.

    Collectives:
        The constructor issues one broadcast.
    """

    def __init__(
        self,
        section: RolloutSection,
        sampler: CompletionSampler,
        rows: Rows,
        rewards: Rewards | None,
        reward_model: RewardModel | None,
    ):
        self.section, self.sampler, self.rows = section, sampler, rows
        self.rewards, self.reward_model = rewards, reward_model
        self.ranks = Ranks()
        self.names: list[str] = self.ranks.run_on_first(lambda: rewards.names if rewards else [])
        if reward_model:
            self.names = [*self.names, "reward_model"]
        self._has_known_reward = False

    def collect(self, cursor: Cursor, version: int) -> Rollout | None:
        """Collect the rollout whose prompts begin at `cursor`.

        Args:
            cursor: Position of the first prompt in the data.
            version: Version of the weights, which is the number of optimizer steps.

        Returns:
            The rollout. None at the end of the data's epochs.

        Raises:
            UserError: If a reward fails, or no reward of the first rollout is known.
            Interrupted: If the run is asked to stop while completions are sampled.

        Collectives:
            Those of sampling and scoring.
        """
        began = time.perf_counter()
        num_groups = self.section.prompts_per_step
        groups = self._sample_groups(cursor, version)
        if not groups:
            return None
        self._check_known_rewards(groups)
        last = groups[-1].prompt.sample_group
        if self.sampler.engine.is_remote:
            next_prompts = read_prompts(self.rows, last.next_cursor, num_groups)
            next_requests = self.sampler.build_requests(next_prompts, self.section.group_size)
            self.sampler.engine.prefetch(next_requests, version)
        # The metrics include all sampled completions, also those of groups that the updates leave out.
        measured = self._measure(groups)
        if len(groups) > num_groups:
            # Prefer groups with different rewards. The sort is stable, so the data's order decides otherwise.
            groups.sort(key=lambda group: not self._is_useful(group))
            groups = sorted(groups[:num_groups], key=lambda group: group.prompt.index)
        measured["rollout_time"] = time.perf_counter() - began
        return self._rollout(groups, last, measured)

    def _sample_groups(self, cursor: Cursor, version: int) -> list[PromptGroup]:
        """Sample and score the groups of a rollout.

        With `dynamic_sampling=refill`, groups with equal rewards do not count, and further rounds sample more prompts
        in their place, up to `max_refills` times.

        Collectives:
            Those of sampling and scoring.
        """
        size = self.section.group_size
        num_rounds = 1
        if self.section.dynamic_sampling == "refill":
            num_rounds += self.section.max_refills
        groups: list[PromptGroup] = []
        for _ in range(num_rounds):
            next_cursor = groups[-1].prompt.sample_group.next_cursor if groups else cursor
            num_useful = sum(self._is_useful(group) for group in groups)
            prompts = read_prompts(self.rows, next_cursor, self.section.prompts_per_step - num_useful)
            if not prompts:
                break
            samples = self.sampler.sample(prompts, version, size)
            scored = self._score(prompts, samples)
            for index, prompt in enumerate(prompts):
                members = slice(index * size, (index + 1) * size)
                groups.append(PromptGroup(prompt, samples[members], scored.rewards[members], scored.parts[members]))
        return groups

    def _check_known_rewards(self, groups: Sequence[PromptGroup]) -> None:
        """Raise UserError if no reward of the first rollout is known. Later rollouts may have none."""
        if not self._has_known_reward and all(group.rewards.isnan().all() for group in groups):
            num_completions = len(groups) * self.section.group_size
            names = f" ({', '.join(self.names)})" if self.names else ""
            raise UserError(
                f"none of the first rollout's {num_completions} completions has a known reward{names}: each is None "
                "or NaN, or was not given in time, as said above. The run would train nothing; let the rewards give "
                "numbers, and None only for what they cannot judge"
            )
        self._has_known_reward = True

    def score_greedy_completions(self, prompts: Sequence[PromptRow], version: int) -> tuple[list[Sample], Tensor]:
        """Sample one completion of each prompt greedily, and return the completions and their rewards, [n].

        Collectives:
            Those of sampling and scoring.
        """
        samples = self.sampler.sample(prompts, version, greedy=True)
        return samples, self._score(prompts, samples).rewards

    def _is_useful(self, group: PromptGroup) -> bool:
        """Return whether a group counts towards `prompts_per_step`. With `refill` its rewards must differ."""
        return self.section.dynamic_sampling != "refill" or not group.has_equal_rewards

    def _score(self, prompts: Sequence[PromptRow], samples: Sequence[Sample]) -> ScoredSamples:
        """Score the samples of `prompts`.

        Collectives:
            One broadcast from rank 0, and those of the reward model.
        """
        group_size = len(samples) // max(1, len(prompts))
        rows = [prompt.row for prompt in prompts for _ in range(group_size)]
        contents = [row["prompt"] for row in rows]
        sampled_ids = [_sampled_ids(sample) for sample in samples]
        texts: list[str] = []
        if self.ranks.is_first or self.reward_model is not None:
            texts = [self.sampler.tokenizer.decode(ids, skip_special_tokens=True) for ids in sampled_ids]

        def call_rewards() -> tuple[list[float], list[list[float]]]:
            if self.rewards is None:
                return [float("nan")] * len(samples), []
            names = dict.fromkeys(name for row in rows for name in row["columns"])
            columns = {name: [row["columns"].get(name) for row in rows] for name in names}
            scores = self.rewards.score(contents, texts, sampled_ids, columns)
            return scores.total, list(scores.parts.values())

        total, parts = self.ranks.run_on_first(call_rewards)
        rewards = torch.tensor(total, dtype=torch.float64)
        if self.reward_model is not None:
            model_scores = self.reward_model.rate(contents, texts)
            parts = [*parts, model_scores.tolist()]
            rewards = rewards.nan_to_num(nan=0.0) + self.section.reward_model.weight * model_scores
        rewards = _add_environment_rewards(rewards, samples)
        if self.section.overlong_cache is not None:
            lengths = torch.tensor([sample.longest for sample in samples], dtype=torch.float64)
            rewards = rewards + soft_overlong_penalty(
                lengths, self.section.sampling.max_new_tokens, self.section.overlong_cache
            )
        parts_by_name = torch.tensor(parts, dtype=torch.float64).view(len(self.names), len(samples))
        return ScoredSamples(rewards, parts_by_name.t())

    def _rollout(self, groups: Sequence[PromptGroup], last: SampleGroup, measured: dict[str, float]) -> Rollout:
        """Build the rollout: compute the advantages, and decide which completions count and are trained.

        Args:
            groups: The groups of the rollout.
            last: Position of the last prompt that was read, also if its group is left out.
            measured: The metrics.
        """
        section = self.section
        samples = [sample for group in groups for sample in group.samples]
        rewards = _join_rewards(groups)
        values = advantages(rewards, section.group_size, baseline=section.advantage, scale=section.scale)
        counted = ~rewards.isnan()
        if section.dynamic_sampling != "none":
            counted &= ~zero_variance_groups(rewards, section.group_size)
        trained = counted.clone()
        if section.mask_truncated:
            trained &= torch.tensor([sample.finish != "length" for sample in samples])
        rows = self._sample_rows(groups, values) if self.ranks.is_first else []
        return Rollout(samples, values, counted, trained, last, measured, rows)

    def _measure(self, groups: Sequence[PromptGroup]) -> dict[str, float]:
        """Return the metrics of a rollout."""
        samples = [sample for group in groups for sample in group.samples]
        rewards = _join_rewards(groups)
        group_std = _group_std(rewards.view(len(groups), -1))
        metrics = {"reward_mean": _mean_of_known(rewards), "reward_std": _mean_of_known(group_std)}
        if len(self.names) > 1:
            parts = torch.cat([group.parts for group in groups]).t()
            for name, part in zip(self.names, parts, strict=True):
                metrics[f"reward/{name}"] = _mean_of_known(part)
        if self.sampler.episodes is not None:
            metrics["lost_frac"] = sum(sample.finish == "lost" for sample in samples) / len(samples)
            metric_names = {name for sample in samples for name in sample.metrics}
            for name in sorted(metric_names):
                values = [sample.metrics[name] for sample in samples if name in sample.metrics]
                metrics[f"environment/{name}"] = sum(values) / len(values)
        if self.section.tools:
            metrics["tool_calls"] = sum(sample.calls for sample in samples) / len(samples)
            metrics["tool_failures"] = sum(sample.failures for sample in samples) / len(samples)
        metrics |= length_metrics(samples)
        metrics["frac_zero_std"] = sum(group.has_equal_rewards for group in groups) / len(groups)
        return metrics

    def _sample_rows(self, groups: Sequence[PromptGroup], values: Tensor) -> list[dict[str, Any]]:
        """Return the rows of samples.jsonl, one for each completion.

        Args:
            groups: The groups.
            values: Advantages of the completions, [N].
        """
        rows = []
        remaining_values = iter(values.tolist())
        for group in groups:
            for sample, reward, parts in zip(group.samples, group.rewards.tolist(), group.parts.tolist(), strict=True):
                row = {
                    "group": group.prompt.index,
                    "prompt": group.prompt.row["prompt"],
                    "completion": self.sampler.tokenizer.decode(list(sample.ids), skip_special_tokens=True),
                    "reward": nan_to_none(reward),
                    "rewards": nan_to_none(dict(zip(self.names, parts, strict=True))),
                    "advantage": next(remaining_values),
                    "tokens": len(sample.ids),
                    "finish": sample.finish,
                }
                if group.prompt.images:
                    row["images"] = [image.entry for image in group.prompt.images]
                if sample.version is not None:
                    row["version"] = sample.version
                if sample.earned is not None:
                    row["earned"] = sample.earned
                if sample.metrics:
                    row["environment"] = dict(sample.metrics)
                rows.append(row)
        return rows


def length_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Return the mean number of sampled tokens, and the fraction of completions that a length limit ended.

    Example:
        >>> cut = Sample([1], ids=[5, 6], sampled=[True, True], finish="length")
        >>> ended = Sample([1], ids=[5, 6, 7, 8], sampled=[True, False, True, True], finish="stop")
        >>> length_metrics([cut, ended])
        {'completion_len': 2.5, 'truncated_frac': 0.5}
    """
    count = max(1, len(samples))
    return {
        "completion_len": sum(sum(sample.sampled) for sample in samples) / count,
        "truncated_frac": sum(sample.finish == "length" for sample in samples) / count,
    }


def _sampled_ids(sample: Sample) -> list[int]:
    """Return the tokens that the model sampled, without those of an environment."""
    return [token for token, is_sampled in zip(sample.ids, sample.sampled, strict=True) if is_sampled]


def _join_rewards(groups: Sequence[PromptGroup]) -> Tensor:
    return torch.cat([group.rewards for group in groups])  # [N]


def _add_environment_rewards(rewards: Tensor, samples: Sequence[Sample]) -> Tensor:
    """Add what samples earned in their environments to rewards, [N].

    The total is NaN if neither part is known. It is also NaN if the environment was lost, because a reward for the
    conversation so far would blame the model for the failure.

    Example:
        >>> nan = float("nan")
        >>> samples = [Sample([], earned=1.0), Sample([], earned=2.0), Sample([]), Sample([], finish="lost")]
        >>> _add_environment_rewards(torch.tensor([0.5, nan, nan, 0.5], dtype=torch.float64), samples).tolist()
        [1.5, 2.0, nan, nan]
    """
    nan = float("nan")
    earned_values = [nan if sample.earned is None else sample.earned for sample in samples]
    earned = torch.tensor(earned_values, dtype=torch.float64)
    is_lost = torch.tensor([sample.finish == "lost" for sample in samples], dtype=torch.bool)
    is_known = ~(rewards.isnan() & earned.isnan()) & ~is_lost
    total = rewards.nan_to_num(nan=0.0) + earned.nan_to_num(nan=0.0)
    return torch.where(is_known, total, nan)


def _group_std(rewards: Tensor) -> Tensor:
    """Return the standard deviation (n - 1) of the known rewards of each group.

    Args:
        rewards: [groups, size], NaN if unknown.

    Returns:
        [groups]. 0 for groups with fewer than two known rewards.
    """
    is_known = ~rewards.isnan()
    count = is_known.sum(1)
    filled = torch.where(is_known, rewards, 0)
    mean = filled.sum(1, keepdim=True) / count.clamp(min=1)[:, None]
    squares = torch.where(is_known, filled - mean, 0).square().sum(1)
    return (squares / (count - 1).clamp(min=1)).sqrt()


def _mean_of_known(values: Tensor) -> float:
    """Return the mean of the values that are not NaN, or 0 if there are none."""
    known_values = values[~values.isnan()]
    return known_values.mean().item() if len(known_values) else 0.0
