"""Servers as the engine of a training run: given the weights whenever these change, asked by rank 0 alone."""

from collections.abc import Callable, Sequence
from pathlib import Path

from dtrain.config.schema import Recipe
from dtrain.errors import Interrupted, Unavailable, UserError
from dtrain.methods.method import RunContext
from dtrain.parallel.ranks import Ranks
from dtrain.policy import Policy
from dtrain.remote.ahead import Ahead
from dtrain.remote.http import HttpEngine
from dtrain.remote.publish import DirectoryPublisher, StreamPublisher
from dtrain.rollout.request import AskStop, Completion, Request


class OverHttp:
    """Servers, which are given the weights whenever these have changed. Rank 0 alone talks to them.

    A version of the weights is the number of optimizer steps behind them. Raises Unavailable, on every rank, where the
    servers fail, and Interrupted where rank 0 is asked to stop while they come up.
    """

    def __init__(self, recipe: Recipe, policy: Policy, run: RunContext):
        section = recipe.grpo.server
        self.policy, self.offload, self.ranks = policy, recipe.grpo.offload, Ranks()
        self._ahead: Ahead | None = None
        self._published: int | None = None
        self._publisher: StreamPublisher | DirectoryPublisher

        engine: HttpEngine | None = None

        def connect() -> bool:
            nonlocal engine
            try:
                engine = HttpEngine(
                    section.urls,
                    kind=section.kind,
                    model=section.model,
                    timeout=section.timeout,
                    retries=section.retries,
                    concurrency=section.concurrency,
                    start_timeout=section.start_timeout,
                    api_key_file=section.api_key_file,
                    say=run.metrics.say,
                    ask_stop=run.ask_stop,
                )
            except Interrupted:
                return False
            if recipe.grpo.max_off_policy_steps:
                self._ahead = Ahead(engine, recipe.grpo.max_off_policy_steps, run.metrics.say)
                run.stack.callback(self._ahead.close)
            run.stack.callback(engine.close)  # runs first, and ends what is under way
            return True

        if not self.ranks.first(connect):
            raise Interrupted
        dtype = policy.precision.compute
        if section.weights == "broadcast":
            stream = self._publisher = StreamPublisher(engine, device=policy.device, dtype=dtype)
            run.stack.callback(stream.close)
            self._publish: Callable[[int], None] = lambda version: stream.publish(policy, version)
        else:
            shared = Path(section.weights_dir or run.path / "weights")
            files = self._publisher = DirectoryPublisher(shared, recipe.model.directory, engine, dtype=dtype)
            self._publish = lambda version: files.publish(policy.model, version)

    def generate(self, requests: Sequence[Request], version: int, ask_stop: AskStop | None = None) -> list[Completion]:
        try:
            if self._published != version:
                self._publish(version)
                self._published = version
            if self.offload:
                self.policy.offload_after_refit()
            drawn = self.ranks.first(lambda: self._draw(list(requests), version, ask_stop))
        except UserError as error:
            raise Unavailable(str(error)) from error
        finally:
            if self.offload:
                self.policy.prepare_for_training()
        if drawn is None:
            raise Interrupted
        return drawn

    def expect(self, requests: Sequence[Request], version: int) -> None:
        if self._ahead is not None and requests:
            self._ahead.begin(requests, version)

    def _draw(self, requests: list[Request], version: int, ask_stop: AskStop | None) -> list[Completion] | None:
        """None: rank 0 was asked to stop."""
        try:
            if self._ahead is not None and self._ahead.is_under_way and requests == self._ahead.requests:
                return self._ahead.take(version, ask_stop)
            return self._publisher.engine.generate(requests, ask_stop)
        except Interrupted:
            return None
