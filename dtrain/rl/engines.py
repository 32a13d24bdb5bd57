"""The engine of a method's completions, the environments that answer them and the rewards that judge them, opened as
the recipe's `grpo` section says."""

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

import torch

from dtrain.base.errors import UserError
from dtrain.base.ranks import Ranks
from dtrain.base.run_context import RunContext
from dtrain.data import Tokenizer
from dtrain.inference.native import NativeEngine
from dtrain.inference.request import AskStop, Completion, Request
from dtrain.policy import Policy
from dtrain.recipe.rollouts import RolloutSection
from dtrain.recipe.schema import Data, Lora
from dtrain.rl.engine_interfaces import EpisodePlayer, RolloutEngine
from dtrain.rl.rewards import Rewards


class OnTheMesh:
    """The native engine on the policy's own weights; with `offload` the optimizer's state waits in host memory."""

    def __init__(self, section: RolloutSection, policy: Policy, tokenizer: Tokenizer):
        refuse_graphs(section, policy.device)
        self.policy, self.offload = policy, section.offload
        self.engine = NativeEngine(
            policy.model,
            policy.mesh,
            policy.device,
            decode=lambda ids: tokenizer.decode(ids, skip_special_tokens=True),
            unshard=section.unshard,
            graphs=import_module("dtrain.inference.graphs").CudaGraphs if section.cuda_graphs else None,
        )

    def generate(self, requests: Sequence[Request], version: int, ask_stop: AskStop | None = None) -> list[Completion]:
        if not self.offload:
            return self.engine.generate(requests, ask_stop)
        self.policy.offloader.offload_before_refit()
        try:
            return self.engine.generate(requests, ask_stop)
        finally:
            self.policy.offloader.prepare_for_training()

    def expect(self, requests: Sequence[Request], version: int) -> None:
        """Do nothing: this engine cannot draw ahead, since the weights are training meanwhile."""


def refuse_graphs(section: RolloutSection, device: torch.device) -> None:
    """Raise UserError for CUDA graphs on another device."""
    if section.engine == "native" and section.cuda_graphs and device.type != "cuda":
        raise UserError(f"grpo.cuda_graphs=true is for CUDA, and this run is on the {device.type}: leave it out")


def open_engine(
    section: RolloutSection, policy: Policy, tokenizer: Tokenizer, run: RunContext, base: Path, lora: Lora | None
) -> RolloutEngine:
    """Return the engine of `grpo.engine`. base: the directory of the model that training began with, and lora: the
    adapter that trains, for servers that are sent it. Collective. Raises UserError."""
    if section.engine == "http":
        return import_module("dtrain.rl.remote.training").OverHttp(section, policy, run, base, lora)
    return OnTheMesh(section, policy, tokenizer)


def open_rewards(section: RolloutSection, run: RunContext) -> Rewards | None:
    """Return the rewards in their own process, on rank 0 alone; None elsewhere, or where the recipe has none. The run
    closes them. Collective. Raises UserError."""
    ranks = Ranks()

    def start() -> Rewards | None:
        if not ranks.is_first or not section.rewards:
            return None
        return run.stack.enter_context(Rewards(section.rewards, timeout=section.reward_timeout, say=run.metrics.say))

    return ranks.together(start)


def open_episodes(section: RolloutSection, data: Data, tokenizer: Tokenizer, run: RunContext) -> EpisodePlayer | None:
    """Return the player of completions in the environment that `grpo.environment` or `grpo.verifiers` names, or with
    `grpo.tools` (`rl.environments.play.Episodes`); None where there are none. Collective. Raises UserError."""
    if not section.has_episodes:
        return None
    return import_module("dtrain.rl.environments.play").open_episodes(section, data, tokenizer, run)
