"""Group-relative policy optimisation: the model's own completions are rewarded, and it moves towards the better."""

import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dtrain.base.batch import IGNORE, Batch
from dtrain.base.errors import UserError
from dtrain.base.run_context import RunContext
from dtrain.data import Cursor, GlobalBatch, Rows, Tokenizer
from dtrain.losses import TrainingSamplingParams
from dtrain.losses.policy.terms import Counts, PolicySpec, means, policy_terms, top_entropy_threshold
from dtrain.methods.method import MethodWithReference
from dtrain.methods.rollouts import Rollouts
from dtrain.policy import DynamicShapes, Packed, Policy
from dtrain.policy.batching import gather_rows
from dtrain.policy.reward_model import RewardModel
from dtrain.policy.score import LogprobSource, Loss
from dtrain.recipe.schema import Recipe
from dtrain.rl.collect import (
    Collector,
    CompletionSampler,
    SampleTable,
    lengths_of,
    open_engine,
    open_rewards,
    prompts_of,
    refuse_graphs,
)
from dtrain.rl.environments.episodes import open_episodes
from dtrain.rl.remote.http_client import read_key
from dtrain.rl.rewards.columns import lacking_columns

FIELDS = (
    *("kl", "entropy", "mismatch_kl", "approx_kl", "ratio"),
    *("clip_frac", "clip_low", "clip_high", "correction", "oob_frac", "off_policy_frac"),
)


class GrpoMethod(MethodWithReference):
    """GRPO (Shao et al., arXiv:2402.03300, section 4.1) and its relatives, by `grpo.loss`. A `collector` draws and
    judges the completions, `rollouts` holds them."""

    def __init__(self, recipe: Recipe):
        super().__init__(recipe, recipe.grpo)
        section, drawn = recipe.grpo, recipe.grpo.sampling
        self.loss_spec = PolicySpec(section.loss, section.clip, section.beta, section.kwargs)
        self.sampling = TrainingSamplingParams(drawn.top_k, drawn.top_p, drawn.temperature)
        settings = {  # by the last three the log-probabilities are measured
            "train.global_batch": recipe.train.global_batch,
            "grpo.updates_per_rollout": section.updates_per_rollout,
            "grpo.sampling.temperature": drawn.temperature,
            "grpo.sampling.top_k": drawn.top_k,
            "grpo.sampling.top_p": drawn.top_p,
        }
        sizes = section.prompts_per_step, section.group_size, section.updates_per_rollout
        self.source = self.rollouts = Rollouts(recipe, self.spec, settings, *sizes, shuffles=True)
        self._began = 0.0

    @property
    def _longest(self) -> int:
        """Tokens that the model may draw for a prompt, in all turns."""
        section = self.recipe.grpo
        turns = section.max_turns if section.has_episodes else 1
        return min(turns * section.sampling.max_new_tokens, self.recipe.data.max_length)

    @property
    def choices(self) -> list[str]:
        section, rows = self.recipe.grpo, self.micro_rows
        drawn, steps = self.rollouts.size, self.rollouts.steps(self.rollouts.size)
        words = {Packed: "packed rows of up to {} tokens", DynamicShapes: "completions of like length, up to {} tokens"}
        how = ""
        if isinstance(rows, Packed | DynamicShapes):
            how = f"; micro-batches: {words[type(rows)].format(rows.tokens)}"
        return [
            f"a rollout: {section.prompts_per_step} prompts × {section.group_size} completions = {drawn}, for "
            f"{steps} optimizer step{'s' if steps > 1 else ''}{how}"
        ]

    def examine(self, columns: Mapping[str, Sequence[str]], samples: Mapping[str, int]) -> None:
        """The columns that the rewards take, and the file of the servers' key."""
        section = self.recipe.grpo
        sets = list(dict.fromkeys(tuple(names) for names in columns.values()))
        needs = [(str(reward.fn), reward.options, names) for reward in section.rewards for names in sets]
        problems = [problem for need in needs if (problem := lacking_columns(*need))]
        if problems:
            raise UserError("\n".join(dict.fromkeys(problems)))
        if section.engine == "http":
            read_key(section.server.api_key_file)

    def refuse_device(self, device: torch.device) -> None:
        refuse_graphs(self.recipe.grpo, device)

    def begin(self, policy: Policy, splits: Mapping[str, Rows], run: RunContext) -> None:
        """Opens the engine and the rewards, and keeps the reference where `grpo.beta` needs one."""
        section = self.recipe.grpo
        if self.spec.needs_reference(self.recipe):
            self.keep_reference(policy)
        tokenizer = Tokenizer.from_directory(self.recipe.model.directory)
        self.policy, self._run = policy, run
        self._table = SampleTable(run.metrics, section)
        engine = open_engine(section, policy, tokenizer, run, self.recipe.model.directory, self.recipe.lora)
        rewards = open_rewards(section, run)
        rates = None if section.reward_model.path is None else RewardModel(policy, section.reward_model.path)
        episodes = open_episodes(section, self.recipe.data, tokenizer, run)
        length, seed = self.recipe.data.max_length, self.recipe.run.seed
        sampler = CompletionSampler(engine, tokenizer, section.sampling, length, seed, run.ask_stop, episodes)
        self.collector = Collector(section, sampler, splits["train"], rewards, rates)

    def before_step(self, cursor: Cursor) -> None:
        """Draws a rollout where the updates of the last one are done; measures what its updates need of the weights as
        they are, and writes it down."""
        rollout = self.rollouts.draw(self.collector.collect, cursor)
        if rollout is None:
            return
        position, buffer = self.rollouts.position, self.rollouts.buffer
        is_single_step = self.rollouts.steps(len(buffer)) == 1
        most = None if position.checked else self.recipe.grpo.max_mismatch
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
        self._run.metrics.samples(position.step + 1, rollout.rows)
        self._table.show(position.step + 1, rollout)

    def batch(self, rows: GlobalBatch, split: str = "train") -> Batch:
        self._began = time.perf_counter()
        return super().batch(rows, split)

    def prepare(self, policy: Policy, batch: Batch) -> tuple[Batch, Loss]:
        quantile, threshold = self.loss_spec.options["top_entropy_quantile"], None
        high = None
        if quantile < 1:  # the entropies of the whole minibatch decide, so they are computed beforehand
            entropies = policy.label_entropies(batch, self.micro_rows, self.sampling)
            gathered, _ = gather_rows(entropies[batch["labels"] != IGNORE], policy.mesh.dp)
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
        mask = batch["labels"] != IGNORE  # [B, S/cp]
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

    def fields(self, sums: Mapping[str, float]) -> dict[str, float]:
        """The step's own measures, and its rollout's; `rollout_time` in the first step of a rollout alone."""
        averages = means(sums)
        averages["clip_frac"] = averages["clip_low"] + averages["clip_high"]
        named = {name: averages[name] for name in FIELDS if name in averages}
        return self.rollouts.fields | named | {"train_time": time.perf_counter() - self._began}

    def validate(self, policy: Policy, rows: Rows) -> dict[str, float]:
        """The mean reward over all of `rows`, of one completion each, by the likeliest tokens."""
        samples, total, known = [], 0.0, 0
        for prompts in prompts_of(rows, self.rollouts.size):
            drawn, rewards = self.collector.judge_greedily(prompts, self.rollouts.position.step)
            samples += drawn
            total += torch.where(rewards.isnan(), 0, rewards).sum().item()
            known += int((~rewards.isnan()).sum())
        measured = {"reward_mean": total / max(1, known)} | lengths_of(samples)
        return {f"val_{name}": value for name, value in measured.items()}

    def state(self) -> dict[str, Any]:
        return super().state() | {"has_reference": bool(self._moving)}

    def load(self, state: Mapping[str, Any]) -> None:
        """Raises UserError where the recipe has changed whether the reference moves, too."""
        step, section = state["step"], self.recipe.grpo
        if state["has_reference"] != bool(self._moving):
            holds = "holds the reference that it had moved to" if state["has_reference"] else "holds no reference"
            raise UserError(
                f"grpo.sync_every={section.sync_every} with grpo.beta={section.beta}: the checkpoint of step {step} "
                f"{holds}. Whether the reference moves stays as it was; for a change begin another run with these "
                "weights (checkpoint.init_from, run.name)"
            )
        changed = []
        if "sequences" in state:
            replays, did = section.router_replay, "routed" in state
            if section.beta and "reference_logprobs" not in state["per_token"]:
                changed.append(f"grpo.beta: 0.0 -> {section.beta}")
            if replays != did:
                changed.append(f"grpo.router_replay: {did} -> {replays}".lower())
        self.rollouts.load(state, changed)

    def _score(self, name: str) -> None:
        """log p of every trained token by the model as it is, each rank its share, for all ranks."""
        buffer = self.rollouts.buffer
        shares = self.rollouts.shares(self.policy, buffer, range(len(buffer)))
        mine = shares[self.policy.mesh.dp_rank]
        values = self.policy.label_logprobs(buffer.batch(mine), self.micro_rows, self.sampling)
        gathered, _ = gather_rows(buffer.flat(values, mine), self.policy.mesh.dp)
        buffer.place(name, gathered, [index for share in shares for index in share])

    def _check_mismatch(self, most: float) -> None:
        """Raises UserError, on every rank alike, where engine and trainer disagree on the sampled tokens."""
        per_token, trained = self.rollouts.buffer.per_token, self.rollouts.buffer.trained
        gap = (per_token["old_logprobs"] - per_token["sampling_logprobs"])[trained].abs()
        gap = gap[gap.isfinite()]
        mean = gap.mean().item() if len(gap) else 0.0
        if mean > most:
            fix = (
                "see that the servers serve this very model, in a like dtype, and give the log-probabilities that they "
                "sample by (vLLM: --logprobs-mode processed_logprobs)"
                if self.recipe.grpo.engine == "http"
                else "that is an error in dtrain unless the model computes in float16: please report it"
            )
            raise UserError(
                f"engine and trainer disagree by {mean:.3g} on the log-probabilities of the first rollout's tokens, "
                f"more than grpo.max_mismatch={most}: training on them would be wrong. {fix}; or raise "
                "grpo.max_mismatch"
            )


build = GrpoMethod
