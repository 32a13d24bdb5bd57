"""Group-relative policy optimisation: the model's own completions are rewarded, and it moves towards the better."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from types import MappingProxyType
from typing import Annotated, Any

import torch
from torch import Tensor

from dtrain.base.batch import IGNORE_INDEX, Batch
from dtrain.base.errors import Problem, UserError
from dtrain.base.ranges import UP_TO_1, at_least, is_number
from dtrain.data.formats.prompts import PromptOptions
from dtrain.data.model_directory import ModelDirectory
from dtrain.data.rows.rows import Cursor, GlobalBatch, Rows
from dtrain.losses import TrainingSamplingParams
from dtrain.losses.policy.options import LOSSES, problems
from dtrain.losses.policy.terms import Counts, PolicySpec, means, policy_terms, top_entropy_threshold
from dtrain.methods.method import AttachedModels, MethodWithReference, RunContext, RunLog
from dtrain.models.common.config import ModelConfig
from dtrain.policy import DynamicShapes, Packed, Policy
from dtrain.policy.batching import gather_rows
from dtrain.policy.other_models import RewardModel
from dtrain.policy.score import LogprobSource, Loss
from dtrain.recipe import spelling
from dtrain.recipe.rollouts import RolloutSection
from dtrain.rl.checks import engine_problems, image_problems, reward_and_tool_problems, size_problems
from dtrain.rl.collect import (
    Collector,
    CompletionSampler,
    Rollout,
    iterate_prompts,
    length_metrics,
    open_engine,
    open_rewards,
)
from dtrain.rl.environments.episodes import open_episodes
from dtrain.rl.remote.http_client import read_api_key
from dtrain.rl.rewards.columns import missing_column_problems
from dtrain.rl.rollouts import Rollouts
from dtrain.rl.tools import tool_schemas

FIELDS = (
    *("kl", "entropy", "mismatch_kl", "approx_kl", "ratio"),
    *("clip_frac", "clip_low", "clip_high", "correction", "oob_frac", "off_policy_frac"),
)
MAX_MISMATCH_KL = 0.01  # nats a token: probabilities that differ by about 14 % of themselves
DRIFTED = (
    "warning: mismatch_kl at step {} is {:.2g}, more than {}: the sampler's probabilities are far from the "
    "trainer's. dtrain/rl/README.md (the native engine) says what to look at. This is said once"
)
SECONDS_BETWEEN_TABLES = 20.0
ALIKE = (
    "warning: in every group of the rollout before step {} all rewards are equal, so nothing is learned from it: "
    "samples.jsonl shows whether the prompts are too hard or too easy, or the reward never gives points"
)


@dataclass
class Grpo(RolloutSection):
    """`grpo`: read by method grpo. A rollout is prompts_per_step × group_size completions; a minibatch is
    train.global_batch of them, and each pass over a rollout takes every completion once."""

    updates_per_rollout: Annotated[int, at_least(1)] = 1
    """Passes over a rollout."""
    loss: str = "dapo"
    """The policy loss's name (dtrain/losses/policy/options.py lists them)."""
    beta: float = 0.0
    """Weight of the divergence from the reference. 0: no reference is kept."""
    clip: list[float] = field(default_factory=lambda: [0.2, 0.2])
    """Distances below and above 1 that the ratio may go."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """More options of the loss, such as `{delta: 2.0}`."""
    reference: str = "start"
    """The model that `beta` pulls towards. start: the weights that training starts from; base: the model without its
    adapter (`lora`), even where that was trained before; or the path of a model of the same shapes."""
    sync_every: Annotated[int | None, at_least(1, ", or null for a reference that stands still")] = None
    """The reference moves towards the policy every so many steps. null: it stands still."""
    sync_mix: Annotated[float, UP_TO_1] = 0.6
    """Step of its move: reference = sync_mix · policy + (1 − sync_mix) · reference."""
    dynamic_batch: bool = False
    """true, as `train.dynamic_batch`: a micro-batch holds completions of similar length, as many as fit, with their
    padding, into micro_batch × max_length tokens. false: it holds micro_batch completions."""
    max_mismatch: Annotated[float | None, (lambda v: v > 0, "more than 0, or null for no check")] = 0.1
    """The run ends at its first rollout if trainer and engine differ by more than this in the log-probabilities of the
    sampled tokens (mean absolute difference). null: never."""


class GrpoMethod(MethodWithReference):
    """GRPO (Shao et al., arXiv:2402.03300, section 4.1) and its relatives, by `grpo.loss`. A `collector` draws and
    judges the completions, `source` holds them."""

    Section = Grpo
    section: Grpo
    about = "GRPO, by rewards"
    kind = "prompts"
    models = ("reference", "reward_model.path")
    measures = (
        *FIELDS,
        *("reward_mean", "reward_std", "reward/NAME", "frac_zero_std", "completion_len", "truncated_frac", "lost_frac"),
        *("environment/NAME", "tool_calls", "tool_failures", "rollout_time", "train_time", "router_replay_differs"),
    )
    curves = MappingProxyType({"reward_mean": "reward", "val_reward_mean": "validation reward"})
    best = ("loss", "val_reward_mean")
    more_steps_hint = "a smaller grpo.prompts_per_step"
    adapter_learning_rates = (5e-6, "1e-5")  # full tuning takes 1e-6
    _began = 0.0
    _is_warned = False  # that sampler and trainer have drifted apart

    def problems(self) -> list[Problem]:
        section = self.section
        errors = loss_problems(section.loss, section.clip, section.beta, section.kwargs)
        batch = None if self.recipe.train.global_batch == "auto" else self.recipe.train.num_batch_rows
        errors += size_problems(section, section.updates_per_rollout, batch)
        errors += self.completion_length_problems()
        errors += reward_and_tool_problems(section)
        launch, parallel, lora, model = self.recipe.launch, self.recipe.parallel, self.recipe.lora, self.recipe.model
        errors += engine_problems(section, launch.device, parallel, lora, model)
        if section.sync_every is not None and not section.beta:
            text = "grpo.sync_every moves the reference, and grpo.beta=0 keeps none"
            errors.append(Problem("grpo.sync_every", text, "Set grpo.beta above 0"))
        if section.beta:
            errors += self.base_problems()
        if section.dynamic_sampling == "refill" and self.recipe.train.epochs is not None:
            text = (
                "grpo.dynamic_sampling=refill uses as many prompts as it needs, so the steps of train.epochs cannot be "
                "counted"
            )
            errors.append(Problem("train.epochs", text, "Set train.steps"))
        if section.dynamic_batch and self.recipe.data.packing:
            text = "grpo.dynamic_batch=true is for padded rows, and data.packing packs them"
            errors.append(Problem("grpo.dynamic_batch", text, "Set data.packing=false, or leave it out"))
        return errors + self.loss_on_problems("the tokens that the model samples")

    def format_problem(self, format: str) -> str | None:
        if format in ("preference", "text"):
            return "method=grpo draws its own answers to prompts; give it messages, question or prompt_completion"
        return None

    def image_problems(self) -> list[Problem]:
        return image_problems(self.section)

    def other_models(self) -> list[tuple[str, str]]:
        is_another = self.needs_reference() and self.section.reference not in ("start", "base")
        rates = self.section.reward_model.path
        named = [("grpo.reference", self.section.reference)] if is_another else []
        return named + ([("grpo.reward_model.path", rates)] if rates else [])

    def model_problems(self, model: ModelConfig) -> list[Problem]:
        if model.experts is not None or not self.section.router_replay:
            return []
        return [Problem("grpo.router_replay", "grpo.router_replay=true: this model has no experts", "Leave it out")]

    def code(self) -> list[tuple[str, str | None, str]]:
        named = [(f"grpo.rewards[{i}].fn", reward.fn, "reward") for i, reward in enumerate(self.section.rewards)]
        for i, tool in enumerate(self.section.tools):
            named += [(f"grpo.tools[{i}].fn", tool.fn, "tool"), (f"grpo.tools[{i}].mcp", tool.mcp, "server of tools")]
        named.append(("grpo.verifiers.name", self.section.verifiers.name, "environment of verifiers"))
        return [*named, ("grpo.environment", self.section.environment, "environment")]

    def prompts(self) -> PromptOptions:
        section = self.section
        lengths = self.recipe.data.max_length, section.sampling.max_new_tokens
        tools = [schema for _, schema in tool_schemas(section.tools)] if section.tools else []
        return PromptOptions.for_length(
            *lengths, section.system_prompt, tools=tools, answers_row_tools=section.verifiers.name is not None
        )

    def is_dynamic(self) -> bool:
        return self.recipe.train.dynamic_batch or self.section.dynamic_batch

    def automatic_batch(self, rows: int) -> int:
        return self.section.prompts_per_step * self.section.group_size

    def needs_reference(self) -> bool:
        return bool(self.section.beta)

    def sends_weights(self) -> bool:
        return self.section.server.weights == "broadcast"

    @cached_property
    def loss_spec(self) -> PolicySpec:
        return PolicySpec(self.section.loss, self.section.clip, self.section.beta, self.section.kwargs)

    @cached_property
    def sampling(self) -> TrainingSamplingParams:
        drawn = self.section.sampling
        return TrainingSamplingParams(drawn.top_k, drawn.top_p, drawn.temperature)

    @cached_property
    def source(self) -> Rollouts:
        section, drawn = self.section, self.section.sampling
        settings = {  # by the last three the log-probabilities are measured
            "train.global_batch": self.recipe.train.global_batch,
            "grpo.updates_per_rollout": section.updates_per_rollout,
            "grpo.sampling.temperature": drawn.temperature,
            "grpo.sampling.top_k": drawn.top_k,
            "grpo.sampling.top_p": drawn.top_p,
        }
        sizes = section.prompts_per_step, section.group_size, section.updates_per_rollout
        return Rollouts(self, settings, *sizes, shuffles=True)

    @cached_property
    def _longest(self) -> int:
        """Tokens that the model may draw for a prompt, in all turns."""
        section = self.section
        turns = section.max_turns if section.has_episodes else 1
        return min(turns * section.sampling.max_new_tokens, self.recipe.data.max_length)

    @property
    def choices(self) -> list[str]:
        section, rows = self.section, self.micro_rows
        drawn, steps = self.source.size, self.source.steps(self.source.size)
        words = {Packed: "packed rows of up to {} tokens", DynamicShapes: "completions of like length, up to {} tokens"}
        how = ""
        if isinstance(rows, Packed | DynamicShapes):
            how = f"; micro-batches: {words[type(rows)].format(rows.tokens)}"
        return [
            f"a rollout: {section.prompts_per_step} prompts × {section.group_size} completions = {drawn}, for "
            f"{steps} optimizer step{'s' if steps > 1 else ''}{how}"
        ]

    def check_data(self, columns: Mapping[str, Mapping[str, Any]], samples: Mapping[str, int]) -> None:
        """Check the columns that the rewards read, and the file of the servers' key."""
        section = self.section
        problems = missing_column_problems(section.rewards, columns.values())
        if problems:
            raise UserError("\n".join(problems))
        if section.engine == "http":
            read_api_key(section.server.api_key_file)

    def check_device_supported(self, device: torch.device) -> None:
        if self.section.engine == "native" and self.section.cuda_graphs is True and device.type != "cuda":
            raise UserError(f"grpo.cuda_graphs=true is for CUDA, and this run is on the {device.type}: leave it out")

    def begin(self, policy: Policy, splits: Mapping[str, Rows], run: RunContext) -> None:
        """Opens the engine and the rewards, and keeps the reference where `grpo.beta` needs one."""
        section = self.section
        self.check_device_supported(policy.device)
        attached = self.attach_models(policy, run.other_models)
        tokenizer = run.source.tokenizer
        self.policy, self._run = policy, run
        self._table = SampleTable(run.metrics, section)
        engine = open_engine(section, policy, tokenizer, run)
        rewards = open_rewards(section, run)
        episodes = open_episodes(section, self.recipe.data, run)
        length, seed = self.recipe.data.max_length, self.recipe.run.seed
        sampler = CompletionSampler(engine, tokenizer, section.sampling, length, seed, run.should_stop, episodes)
        self.source.data = splits["train"]
        self.collector = Collector(section, sampler, splits["train"], rewards, attached.reward_model)

    def attach_models(self, policy: Policy, others: Mapping[str, ModelDirectory]) -> AttachedModels:
        """Override `Method.attach_models`: also the reward model."""
        attached = super().attach_models(policy, others)
        if self.section.reward_model.path is None:
            return attached
        return replace(attached, reward_model=RewardModel(policy, others["grpo.reward_model.path"]))

    def before_step(self, cursor: Cursor) -> None:
        """Draws a rollout where the updates of the last one are done; measures what its updates need of the weights as
        they are, and writes it down."""
        rollout = self.source.next_rollout(self.collector.collect, cursor)
        if rollout is None:
            return
        position, buffer = self.source.position, self.source.buffer
        is_single_step = self.source.steps(len(buffer)) == 1
        most = None if position.checked else self.section.max_mismatch
        if most is not None or not is_single_step:
            self._score("old_logprobs")
        if most is not None:
            self._check_mismatch(most)
            position.checked = True
        if is_single_step:  # the update begins at the weights that it is measured by: the ratio is 1
            buffer.per_token.pop("old_logprobs", None)
        if self.policy.reference is not None:
            with self.policy.use_reference_model():
                self._score("reference_logprobs")
        self._run.metrics.write_rows("samples", position.step + 1, rollout.rows)
        self._table.show(position.step + 1, rollout)

    def batch(self, rows: GlobalBatch, split: str = "train") -> Batch:
        self._began = time.perf_counter()
        return super().batch(rows, split)

    def prepare(self, policy: Policy, batch: Batch) -> tuple[Batch, Loss]:
        quantile, threshold = self.loss_spec.options["top_entropy_quantile"], None
        high = None
        if quantile < 1:  # the entropies of the whole minibatch decide, so they are computed beforehand
            entropies = policy.entropies(batch, self.micro_rows, self.sampling)
            gathered, _ = gather_rows(entropies[batch["labels"] != IGNORE_INDEX], policy.mesh.dp)
            result = top_entropy_threshold(gathered, quantile)
            threshold, high = (value.to(policy.device, non_blocking=True) for value in result)
        return batch, partial(self.loss, entropy_threshold=threshold, high_entropy_tokens=high)

    def loss(
        self,
        source: LogprobSource,
        batch: Batch,
        global_seqs: Tensor,
        global_tokens: Tensor,
        *,
        entropy_threshold: Tensor | None = None,
        high_entropy_tokens: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Scalars: the share of the loss, and the sums of `policy_terms`."""
        scores = source.sampled_logprobs(self.sampling, entropy=True)
        mask = batch["labels"] != IGNORE_INDEX  # [B, S/cp]
        return policy_terms(
            self.loss_spec,
            scores.logprobs,
            batch.get("old_logprobs"),
            batch["advantages"],
            mask,
            source.sequences(mask),
            Counts(global_tokens, global_seqs, self._longest, high_entropy_tokens),
            ref_logps=batch.get("reference_logprobs"),
            sampling_logps=batch["sampling_logprobs"],
            entropies=scores.entropy,
            entropy_threshold=entropy_threshold,
        )

    def train_metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """The step's own measures, and its rollout's; `rollout_time` in the first step of a rollout alone."""
        averages = means(sums)
        averages["clip_frac"] = averages["clip_low"] + averages["clip_high"]
        named = {name: averages[name] for name in FIELDS if name in averages}
        if named.get("mismatch_kl", 0.0) > MAX_MISMATCH_KL and not self._is_warned:
            self._is_warned = True
            self._run.metrics.say(DRIFTED.format(self.source.position.step, named["mismatch_kl"], MAX_MISMATCH_KL))
        return self.source.fields | named | {"train_time": time.perf_counter() - self._began}

    def validate(self, policy: Policy, rows: Rows) -> dict[str, float]:
        """The mean reward over all of `rows`, of one completion each, by the likeliest tokens."""
        samples, total, known = [], 0.0, 0
        for prompts in iterate_prompts(rows, self.source.size):
            drawn, rewards = self.collector.score_greedy_completions(prompts, self.source.position.step)
            samples += drawn
            total += torch.where(rewards.isnan(), 0, rewards).sum().item()
            known += int((~rewards.isnan()).sum())
        measured = {"reward_mean": total / max(1, known)} | length_metrics(samples)
        return {f"val_{name}": value for name, value in measured.items()}

    def check_state(self, state: Mapping[str, Any], changed: Sequence[str] = ()) -> None:
        """Raise UserError if the recipe changes what the updates of a rollout under way depend on, too."""
        changed = list(changed)
        if shapes := state.get("shapes"):
            section = self.section
            replays, did = section.router_replay, "routed" in shapes
            if section.beta and "reference_logprobs" not in shapes:
                changed.append(f"grpo.beta: 0.0 -> {section.beta}")
            if replays != did:
                changed.append(f"grpo.router_replay: {did} -> {replays}".lower())
        super().check_state(state, changed)

    def _score(self, name: str) -> None:
        """log p of every trained token by the model as it is, each rank its share, for all ranks."""
        buffer = self.source.buffer
        shares = self.source.split_over_ranks(self.policy, buffer, range(len(buffer)))
        mine = shares[self.policy.mesh.dp_rank]
        values = self.policy.logprobs(buffer.batch(mine, self.source.data), self.micro_rows, self.sampling)
        gathered, _ = gather_rows(buffer.flatten(values, mine), self.policy.mesh.dp)
        buffer.set_stream(name, gathered, [index for share in shares for index in share])

    def _check_mismatch(self, most: float) -> None:
        """Raises UserError, on every rank alike, where engine and trainer disagree on the sampled tokens."""
        per_token, trained = self.source.buffer.per_token, self.source.buffer.trained
        gap = (per_token["old_logprobs"] - per_token["sampling_logprobs"])[trained].abs()
        gap = gap[gap.isfinite()]
        mean = gap.mean().item() if len(gap) else 0.0
        if mean > most:
            fix = (
                "see that the servers serve this very model, in a like dtype, and give the log-probabilities that they "
                "sample by (vLLM: --logprobs-mode processed_logprobs)"
                if self.section.engine == "http"
                else "that is an error in dtrain unless the model computes in float16: please report it"
            )
            raise UserError(
                f"engine and trainer disagree by {mean:.3g} on the log-probabilities of the first rollout's tokens, "
                f"more than grpo.max_mismatch={most}: training on them would be wrong. {fix}; or raise "
                "grpo.max_mismatch"
            )


class SampleTable:
    """Table of a rollout's samples on the terminal, now and then: of the first rollout, and of the next one when 20
    seconds have passed since the last table. And warnings of rollouts that teach nothing."""

    def __init__(self, metrics: RunLog, section: RolloutSection):
        self.metrics, self.section = metrics, section
        self._last = float("-inf")
        self._alike = 0  # rollouts that taught nothing
        self._is_idle = False

    def show(self, step: int, rollout: Rollout) -> None:
        """Show the rollout where it is time. `step`: the first that trains on it. Ranks without rows say nothing."""
        if rollout.rows and rollout.measured["frac_zero_std"] == 1:
            self._alike += 1
            if self._alike in (1, 10, 100, 1000):
                self.metrics.say(ALIKE.format(step))
        most = self.section.show
        if rollout.rows and most and time.monotonic() - self._last >= SECONDS_BETWEEN_TABLES:
            self._last = time.monotonic()
            for line in _table(step, rollout.measured, rollout.rows[:most]):
                self.metrics.say(line)
        is_idle = not rollout.counted.any()
        if is_idle and not self._is_idle:  # the first of several in a row
            alike = ", or its groups' rewards are alike" if self.section.dynamic_sampling != "none" else ""
            self.metrics.say(f"the rollout before step {step} teaches nothing: none of its rewards is known{alike}")
        self._is_idle = is_idle


def _table(step: int, measured: Mapping[str, float], rows: list[dict[str, Any]]) -> list[str]:
    lines = [
        f"rollout before step {step}: reward {measured['reward_mean']:.3f} ± {measured['reward_std']:.3f}, "
        f"{measured['completion_len']:.1f} tokens, {100 * measured['truncated_frac']:.0f}% cut off, "
        f"{100 * measured['frac_zero_std']:.0f}% of the groups alike",
        "  reward  advantage  tokens  completion",
    ]
    for row in rows:
        reward = "-" if row["reward"] is None else f"{row['reward']:.3g}"
        text = " ".join(row["completion"].split())
        text = text if len(text) <= 72 else text[:69] + "..."
        lines.append(f"  {reward:>6}  {row['advantage']:>9.3f}  {row['tokens']:>6}  {text}")
    return lines


def loss_problems(loss: str, clip: Sequence[float], beta: float, options: Mapping[str, Any]) -> list[Problem]:
    """Check the loss of a `grpo` section.

    Args:
        loss: `grpo.loss`.
        clip: `grpo.clip`.
        beta: `grpo.beta`.
        options: `grpo.kwargs`.
    """
    if loss not in LOSSES:
        text = f"grpo.loss={loss} is not a policy loss{spelling.value_hint('grpo.loss', loss, LOSSES)}"
        return [Problem("grpo.loss", text)]
    found = problems(loss, clip, beta, options, "grpo.", "grpo.kwargs.")
    if loss == "cispo" and len(clip) == 2 and is_number(clip[1]) and 0 <= clip[1] < 1:
        text = (
            f"grpo.clip={clip}: the second number of cispo caps the ratio itself, so below 1 it cuts every token's "
            "weight"
        )
        found.append(Problem("grpo.clip", text, "Its papers use 5"))
    for name in ("kl_estimator", "kl_gradient"):
        if name in options and not beta:
            key = f"grpo.kwargs.{name}"
            found.append(Problem(key, f"{key} measures the divergence, and grpo.beta=0 leaves the divergence out"))
    return found
