"""Method grpo: group relative policy optimisation of a model on its own, rewarded completions.

A rollout samples `grpo.group_size` completions of each prompt (`dtrain.rl.collect`). The advantage of a completion is
its reward relative to the others of its group. Then several optimizer steps train on the rollout
(`dtrain.rl.rollouts`). Before the first of them, `GrpoMethod.before_step` computes the log-probabilities that the loss
compares with:

    sampling_logprobs     by the engine, while it sampled; they correct the gap between engine and trainer
    old_logprobs          by the trainer with the weights before the first step; the ratio of the loss divides by them.
                          A rollout with a single step needs none, because the ratio is 1 there
    reference_logprobs    by the reference model, if `grpo.beta` is not 0
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from dtrain.base.batch import IGNORE_INDEX, Batch
from dtrain.base.errors import Problem, UserError, problems_of_error
from dtrain.base.ranges import is_number
from dtrain.data.formats.prompts import PromptOptions
from dtrain.data.model_directory import ModelDirectory
from dtrain.data.rows.rows import Cursor, GlobalBatch, Rows
from dtrain.inference.decodable import find_decoding_problem
from dtrain.losses import TrainingSamplingParams
from dtrain.losses.policy.options import LOSSES, find_loss, is_loss_name, problems
from dtrain.losses.policy.terms import Counts, PolicySpec, means, policy_terms, top_entropy_threshold
from dtrain.methods.method import AttachedModels, MethodWithReference, RunContext, RunLog
from dtrain.methods.sections import Grpo
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
from dtrain.rl.samples import Sample
from dtrain.rl.tools import tool_schemas

FIELDS = (
    *("kl", "entropy", "mismatch_kl", "approx_kl", "ratio"),
    *("clip_frac", "clip_low", "clip_high", "correction", "oob_frac", "off_policy_frac"),
)
"""Metrics of the loss, in the order in which they are logged."""
MAX_MISMATCH_KL = 0.01  # nats per token: probabilities that differ by about 14%
MISMATCH_WARNING = (
    "warning: mismatch_kl at step {} is {:.2g}, more than {}: the sampler's probabilities are far from the "
    "trainer's. dtrain/rl/README.md (the native engine) says what to look at. This is said once"
)
SECONDS_BETWEEN_TABLES = 20.0
EQUAL_REWARDS_WARNING = (
    "warning: in every group of the rollout before step {} all rewards are equal, so nothing is learned from it: "
    "samples.jsonl shows whether the prompts are too hard or too easy, or the reward never gives points"
)
MAX_TABLE_TEXT = 72  # characters of a completion in the table of samples


class GrpoMethod(MethodWithReference):
    """GRPO and related methods, by `grpo.loss`.

    Attributes:
        source: The present rollout, and its minibatches.
        collector: Samples and scores the next rollout.

    Reference:
        Shao et al., DeepSeekMath, arXiv:2402.03300, section 4.1.
    """

    Section = Grpo
    section: Grpo
    about = "GRPO, by rewards"
    kind = "prompts"
    shared_beginnings = "prompts"
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
    _began = 0.0  # time at which the present step began
    _has_warned_of_mismatch = False

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
        section = self.section
        models = []
        if self.needs_reference() and section.reference not in ("start", "base"):
            models.append(("grpo.reference", section.reference))
        if section.reward_model.path:
            models.append(("grpo.reward_model.path", section.reward_model.path))
        return models

    def model_problems(self, model: ModelConfig) -> list[Problem]:
        section = self.section
        problems = []
        if section.router_replay and model.experts is None:
            text = "grpo.router_replay=true: this model has no experts"
            if model.transformers is not None:
                text = "grpo.router_replay=true: the routers of transformers' modules cannot replay choices"
            problems.append(Problem("grpo.router_replay", text, "Leave it out"))
        if section.engine == "native":
            if section.cuda_graphs is True and model.transformers is not None:
                text = "grpo.cuda_graphs=true: modules of transformers are not captured in CUDA graphs"
                problems.append(Problem("grpo.cuda_graphs", text, "Leave it out"))
            problem = find_decoding_problem(model)
            if problem is not None:
                text = f"grpo.engine=native cannot sample from {model.architecture}: {problem}"
                problems.append(Problem("grpo.engine", text, "Set grpo.engine=http"))
        return problems

    def code(self) -> list[tuple[str, str | None, str]]:
        section = self.section
        code: list[tuple[str, str | None, str]] = [("grpo.loss", section.loss, "loss")]
        for i, reward in enumerate(section.rewards):
            code.append((f"grpo.rewards[{i}].fn", reward.fn, "reward"))
        for i, tool in enumerate(section.tools):
            code.append((f"grpo.tools[{i}].fn", tool.fn, "tool"))
            code.append((f"grpo.tools[{i}].mcp", tool.mcp, "server of tools"))
        code.append(("grpo.verifiers.name", section.verifiers.name, "environment of verifiers"))
        code.append(("grpo.environment", section.environment, "environment"))
        return code

    def prompts(self) -> PromptOptions:
        section = self.section
        tools = [schema for _, schema in tool_schemas(section.tools)] if section.tools else []
        return PromptOptions.for_length(
            self.recipe.data.max_length,
            section.sampling.max_new_tokens,
            section.system_prompt,
            tools=tools,
            answers_row_tools=section.verifiers.name is not None,
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
        sampling = self.section.sampling
        return TrainingSamplingParams(sampling.top_k, sampling.top_p, sampling.temperature)

    @cached_property
    def source(self) -> Rollouts:
        section, sampling = self.section, self.section.sampling
        settings = {
            "train.global_batch": self.recipe.train.global_batch,
            "grpo.updates_per_rollout": section.updates_per_rollout,
            # The log-probabilities of a rollout depend on these.
            "grpo.sampling.temperature": sampling.temperature,
            "grpo.sampling.top_k": sampling.top_k,
            "grpo.sampling.top_p": sampling.top_p,
        }
        sizes = section.prompts_per_step, section.group_size, section.updates_per_rollout
        return Rollouts(self, settings, *sizes, shuffles=True)

    @cached_property
    def _max_completion_tokens(self) -> int:
        """The largest number of tokens that the model may sample for a prompt, in all turns."""
        section = self.section
        turns = section.max_turns if section.has_episodes else 1
        return min(turns * section.sampling.max_new_tokens, self.recipe.data.max_length)

    @property
    def choices(self) -> list[str]:
        section = self.section
        rollout_size = self.source.size
        steps = self.source.steps(rollout_size)
        plural = "s" if steps > 1 else ""
        micro_batches = ""
        if isinstance(self.micro_rows, Packed):
            micro_batches = f"; micro-batches: packed rows of up to {self.micro_rows.tokens} tokens"
        elif isinstance(self.micro_rows, DynamicShapes):
            micro_batches = f"; micro-batches: completions of like length, up to {self.micro_rows.tokens} tokens"
        return [
            f"a rollout: {section.prompts_per_step} prompts × {section.group_size} completions = {rollout_size}, for "
            f"{steps} optimizer step{plural}{micro_batches}"
        ]

    def check_data(self, columns: Mapping[str, Mapping[str, Any]], samples: Mapping[str, int]) -> None:
        """Check the columns that the rewards read, and the file with the servers' API key."""
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
        """Open the engine, the rewards and the environments, and load the reference and the reward model."""
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
        """Attach the reference, if `grpo.beta` needs one, and the reward model."""
        attached = super().attach_models(policy, others)
        if self.section.reward_model.path is None:
            return attached
        return replace(attached, reward_model=RewardModel(policy, others["grpo.reward_model.path"]))

    def before_step(self, cursor: Cursor) -> None:
        """Sample a rollout if the steps on the last one are done, and compute the log-probabilities it needs.

        Raises:
            UserError: On every rank, if engine and trainer disagree on the first rollout (`grpo.max_mismatch`).

        Collectives:
            Those of sampling and scoring, and those of a forward for each kind of log-probabilities.
        """
        rollout = self.source.next_rollout(self.collector.collect, cursor)
        if rollout is None:
            return
        position, buffer = self.source.position, self.source.buffer
        is_single_step = self.source.steps(len(buffer)) == 1
        max_mismatch = None if position.checked else self.section.max_mismatch
        if max_mismatch is not None or not is_single_step:
            self._compute_logprobs("old_logprobs")
        if max_mismatch is not None:
            self._check_mismatch(max_mismatch)
            position.checked = True
        if is_single_step:
            # The step begins at the very weights that old_logprobs are of, so the loss uses a ratio of 1 without them.
            buffer.per_token.pop("old_logprobs", None)
        if self.policy.reference is not None:
            with self.policy.use_reference_model():
                self._compute_logprobs("reference_logprobs")
        self._run.metrics.write_rows("samples", position.step + 1, rollout.rows)
        self._table.show(position.step + 1, rollout)

    def batch(self, rows: GlobalBatch, split: str = "train") -> Batch:
        self._began = time.perf_counter()
        return super().batch(rows, split)

    def prepare(self, policy: Policy, batch: Batch) -> tuple[Batch, Loss]:
        """Return the batch and its loss function.

        With `top_entropy_quantile` below 1, the loss gets a threshold of the entropies. The threshold is a quantile
        over the full minibatch, so a forward before the training step computes all entropies.

        Collectives:
            With `top_entropy_quantile` below 1, those of a forward, and all-gathers over the data-parallel ranks.
        """
        quantile = self.loss_spec.options["top_entropy_quantile"]
        threshold = num_high_entropy_tokens = None
        if quantile < 1:
            entropies = policy.entropies(batch, self.micro_rows, self.sampling)
            gathered, _ = gather_rows(entropies[batch["labels"] != IGNORE_INDEX], policy.mesh.dp)
            result = top_entropy_threshold(gathered, quantile)
            threshold, num_high_entropy_tokens = (value.to(policy.device, non_blocking=True) for value in result)
        loss = partial(self.loss, entropy_threshold=threshold, high_entropy_tokens=num_high_entropy_tokens)
        return batch, loss

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
        """Compute a micro-batch's part of the loss.

        Args:
            source: Computes log-probabilities of the sampled tokens.
            batch: The micro-batch, [B, S/cp].
            global_seqs: Number of sequences of the global batch.
            global_tokens: Number of trained tokens of the global batch.
            entropy_threshold: Train only tokens whose entropy is at least this. None: all.
            high_entropy_tokens: Number of such tokens in the global batch.

        Returns:
            The loss, a scalar, and the totals of `policy_terms`.
        """
        scores = source.sampled_logprobs(self.sampling, entropy=True)
        mask = batch["labels"] != IGNORE_INDEX  # [B, S/cp]
        return policy_terms(
            self.loss_spec,
            scores.logprobs,
            batch.get("old_logprobs"),
            batch["advantages"],
            mask,
            source.sequences(mask),
            Counts(global_tokens, global_seqs, self._max_completion_tokens, high_entropy_tokens),
            ref_logps=batch.get("reference_logprobs"),
            sampling_logps=batch["sampling_logprobs"],
            entropies=scores.entropy,
            entropy_threshold=entropy_threshold,
        )

    def train_metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics of a step and of its rollout. Only a rollout's first step has `rollout_time`."""
        averages = means(sums)
        averages["clip_frac"] = averages["clip_low"] + averages["clip_high"]
        metrics = {name: averages[name] for name in FIELDS if name in averages}
        mismatch_kl = metrics.get("mismatch_kl", 0.0)
        if mismatch_kl > MAX_MISMATCH_KL and not self._has_warned_of_mismatch:
            self._has_warned_of_mismatch = True
            step = self.source.position.step
            self._run.metrics.print_line(MISMATCH_WARNING.format(step, mismatch_kl, MAX_MISMATCH_KL))
        return self.source.fields | metrics | {"train_time": time.perf_counter() - self._began}

    def validate(self, policy: Policy, rows: Rows) -> dict[str, float]:
        """Return the mean reward and the lengths of one greedy completion for each prompt of `rows`."""
        samples: list[Sample] = []
        total, num_known = 0.0, 0
        for prompts in iterate_prompts(rows, self.source.size):
            new_samples, rewards = self.collector.score_greedy_completions(prompts, self.source.position.step)
            samples += new_samples
            is_known = ~rewards.isnan()
            total += torch.where(is_known, rewards, 0).sum().item()
            num_known += int(is_known.sum())
        metrics = {"reward_mean": total / max(1, num_known)} | length_metrics(samples)
        return {f"val_{name}": value for name, value in metrics.items()}

    def check_state(self, state: Mapping[str, Any], changed: Sequence[str] = ()) -> None:
        """Raise UserError as `Method.check_state`, also for settings that a rollout's remaining steps depend on."""
        changed = list(changed)
        shapes = state.get("shapes")
        if shapes:  # the checkpoint was saved within a rollout
            section = self.section
            if section.beta and "reference_logprobs" not in shapes:
                changed.append(f"grpo.beta: 0.0 -> {section.beta}")
            had_router_replay = "routed" in shapes
            if section.router_replay != had_router_replay:
                changed.append(f"grpo.router_replay: {had_router_replay} -> {section.router_replay}".lower())
        super().check_state(state, changed)

    def _compute_logprobs(self, name: str) -> None:
        """Compute log-probabilities of all trained tokens with the present weights, as a stream of the buffer.

        Each data-parallel rank computes its share of the sequences. All ranks receive all values.

        Args:
            name: Name of the stream in `Buffer.per_token`.

        Collectives:
            Those of a forward, and all-gathers over the data-parallel ranks.
        """
        buffer = self.source.buffer
        shares = self.source.split_over_ranks(self.policy, buffer, range(len(buffer)))
        own_share = shares[self.policy.mesh.dp_rank]
        batch = self.with_prompt_ids(buffer.batch(own_share, self.source.data))
        values = self.policy.logprobs(batch, self.micro_rows, self.sampling)
        gathered, _ = gather_rows(buffer.flatten(values, own_share), self.policy.mesh.dp)
        buffer.set_stream(name, gathered, [index for share in shares for index in share])

    def _check_mismatch(self, max_mismatch: float) -> None:
        """Raise UserError, on every rank, if engine and trainer disagree on the sampled tokens."""
        per_token, trained = self.source.buffer.per_token, self.source.buffer.trained
        gap = (per_token["old_logprobs"] - per_token["sampling_logprobs"])[trained].abs()
        gap = gap[gap.isfinite()]
        mean = gap.mean().item() if len(gap) else 0.0
        if mean > max_mismatch:
            if self.section.engine == "http":
                fix = (
                    "see that the servers serve this very model, in a like dtype, and give the log-probabilities that "
                    "they sample by (vLLM: --logprobs-mode processed_logprobs)"
                )
            else:
                fix = "that is an error in dtrain unless the model computes in float16: please report it"
            raise UserError(
                f"engine and trainer disagree by {mean:.3g} on the log-probabilities of the first rollout's tokens, "
                f"more than grpo.max_mismatch={max_mismatch}: training on them would be wrong. {fix}; or raise "
                "grpo.max_mismatch"
            )


class SampleTable:
    """Prints a table of samples now and then, and warns of rollouts that train nothing.

    The first rollout is shown, and then the next one after 20 seconds without a table.

    Args:
        metrics: Prints lines on the terminal.
        section: The section of the method.
    """

    def __init__(self, metrics: RunLog, section: RolloutSection):
        self.metrics, self.section = metrics, section
        self._last_time = float("-inf")
        self._num_equal = 0  # rollouts whose groups all had equal rewards
        self._was_useless = False  # whether no completion of the last rollout counted

    def show(self, step: int, rollout: Rollout) -> None:
        """Print the table and the warnings, if they are due. Only rank 0 has rows, and prints.

        Args:
            step: The first optimizer step on the rollout.
            rollout: The rollout.
        """
        if rollout.rows and rollout.measured["frac_zero_std"] == 1:
            self._num_equal += 1
            if self._num_equal in (1, 10, 100, 1000):
                self.metrics.print_line(EQUAL_REWARDS_WARNING.format(step))
        max_rows = self.section.show
        is_due = time.monotonic() - self._last_time >= SECONDS_BETWEEN_TABLES
        if rollout.rows and max_rows and is_due:
            self._last_time = time.monotonic()
            for line in _table(step, rollout.measured, rollout.rows[:max_rows]):
                self.metrics.print_line(line)
        is_useless = not rollout.counted.any()
        if is_useless and not self._was_useless:  # only the first of several in a row
            or_equal = ", or the rewards within each group are equal" if self.section.dynamic_sampling != "none" else ""
            self.metrics.print_line(
                f"the rollout before step {step} trains nothing: none of its rewards is known{or_equal}"
            )
        self._was_useless = is_useless


def _table(step: int, measured: Mapping[str, float], rows: list[dict[str, Any]]) -> list[str]:
    """Return the lines of the table."""
    lines = [
        f"rollout before step {step}: reward {measured['reward_mean']:.3f} ± {measured['reward_std']:.3f}, "
        f"{measured['completion_len']:.1f} tokens, {100 * measured['truncated_frac']:.0f}% cut off, "
        f"{100 * measured['frac_zero_std']:.0f}% of the groups alike",
        "  reward  advantage  tokens  completion",
    ]
    for row in rows:
        reward = "-" if row["reward"] is None else f"{row['reward']:.3g}"
        text = " ".join(row["completion"].split())
        if len(text) > MAX_TABLE_TEXT:
            text = text[: MAX_TABLE_TEXT - 3] + "..."
        lines.append(f"  {reward:>6}  {row['advantage']:>9.3f}  {row['tokens']:>6}  {text}")
    return lines


def loss_problems(loss: str, clip: Sequence[float], beta: float, options: Mapping[str, Any]) -> list[Problem]:
    """Check the loss of a `grpo` section, given as `grpo.loss`, `grpo.clip`, `grpo.beta` and `grpo.kwargs`."""
    if not is_loss_name(loss):
        text = f"grpo.loss={loss} is not a policy loss{spelling.value_hint('grpo.loss', loss, LOSSES)}"
        return [Problem("grpo.loss", text)]
    try:
        find_loss(loss)
    except UserError as error:
        return problems_of_error("grpo.loss", error)
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
