"""What draws a method's completions and what judges them, as the recipe's `grpo` section says it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from dtrain.checkpoint.ranks import Ranks
from dtrain.config.schema import Grpo, Recipe
from dtrain.data import Tokenizer
from dtrain.methods.method import Run
from dtrain.policy import Policy
from dtrain.rollout.native import NativeEngine
from dtrain.rollout.request import Completion, Request
from dtrain.rollout.rewards import Rewards


class OnTheMesh:
    """The native engine on the policy's own weights; with `offload` the optimizer's state waits in host memory."""

    def __init__(self, recipe: Recipe, policy: Policy, tokenizer: Tokenizer):
        self.policy, self.offload = policy, recipe.grpo.offload
        self.engine = NativeEngine(
            policy.model,
            policy.mesh,
            policy.device,
            decode=lambda ids: tokenizer.decode(ids, skip_special_tokens=True),
            unshard=recipe.grpo.unshard,
        )

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Collective; the same on every rank."""
        with self.generating():
            return self.engine.generate(requests)

    @contextmanager
    def generating(self) -> Iterator[None]:
        """Inside, memory is the engine's."""
        if self.offload:
            self.policy.offload_before_refit()
        try:
            yield
        finally:
            if self.offload:
                self.policy.prepare_for_training()


def open_engine(recipe: Recipe, policy: Policy, tokenizer: Tokenizer, run: Run):
    """The engine of `grpo.engine`. Collective."""
    return OnTheMesh(recipe, policy, tokenizer)


def open_rewards(section: Grpo, run: Run) -> Rewards | None:
    """The rewards in their own process, on rank 0 alone; the run closes it. Collective. Raises UserError."""
    opened: list[Rewards] = []

    def start() -> None:
        rewards = Rewards(section.rewards, timeout=section.reward_timeout, say=run.metrics.say)
        opened.append(run.stack.enter_context(rewards))

    Ranks().first(start)
    return opened[0] if opened else None
