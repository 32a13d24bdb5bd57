"""Servers as the engine of a training run: they get the weights whenever these change, and may draw the next rollout
while training goes on; rank 0 alone talks to them. A completion's staleness is the trainer's version of the weights
less the completion's."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

from dtrain.adapters.config import AdapterConfig
from dtrain.adapters.lora import adapted_layers
from dtrain.base.errors import Interrupted, ServiceUnavailable, UserError
from dtrain.base.ranks import Ranks
from dtrain.checkpoint.peft.config import adapter_of
from dtrain.inference.request import Completion, Request, RolloutEngine, ShouldStop
from dtrain.methods.method import RunContext
from dtrain.models.common.config import is_in_vision_tower
from dtrain.policy import Policy
from dtrain.recipe.rollouts import RolloutSection
from dtrain.rl.remote.http import HttpEngine, wait_for
from dtrain.rl.remote.publish import AdapterPublisher, DirectoryPublisher, StreamPublisher, TransferPublisher
from dtrain.rl.routed import RoutedExpertsReader

STREAMS: dict[str, type[StreamPublisher]] = {kind.broadcast_kind: kind for kind in (StreamPublisher, TransferPublisher)}
MERGED = "grpo.server.weights=directory sends merged weights"


class ServerEngine(RolloutEngine):
    """Servers as an engine, which get the weights whenever these have changed. Rank 0 alone talks to them.

    A version of the weights is the number of optimizer steps behind them. Raises Unavailable, on every rank, where the
    servers fail, and Interrupted where rank 0 is asked to stop while they come up.
    """

    is_remote = True

    def __init__(self, grpo: RolloutSection, policy: Policy, run: RunContext):
        section, base, lora = grpo.server, policy.recipe.model.directory, policy.recipe.lora
        self.policy, self.offload, self.ranks = policy, grpo.offload, Ranks()
        self._prefetcher: RolloutPrefetcher | None = None
        self._published: int | None = None
        self._engine: HttpEngine | None = None
        routed = RoutedExpertsReader.of(policy.model.config) if grpo.router_replay else None

        def connect() -> bool:
            try:
                engine = self._engine = HttpEngine(
                    section.urls,
                    kind=section.kind,
                    model=section.model,
                    timeout=section.timeout,
                    retries=section.retries,
                    concurrency=section.concurrency,
                    start_timeout=section.start_timeout,
                    api_key_file=section.api_key_file,
                    routed=routed,
                    vocab_size=policy.model.config.vocab_size,
                    say=run.metrics.say,
                    should_stop=run.should_stop,
                )
            except Interrupted:
                return False
            if grpo.max_off_policy_steps:
                self._prefetcher = RolloutPrefetcher(engine, grpo.max_off_policy_steps, run.metrics.say)
                run.stack.callback(self._prefetcher.close)
            run.stack.callback(engine.close)  # runs first, and ends what is under way
            return True

        if not self.ranks.run_on_first(connect):
            raise Interrupted
        engine, towers = self._engine, policy.model.model.vision
        if any(weight.requires_grad for tower in towers for weight in tower.parameters()):
            self.ranks.run_on_first(lambda: check_vision_tower(engine))
        dtype, shared = policy.precision.compute, Path(section.weights_dir or run.path / "weights")
        config = None if lora is None else adapter_of(asdict(lora))
        is_rounded = lora is not None and lora.quantize == "nf4"
        way = self.ranks.run_on_first(
            lambda: choose_weight_transport(
                section.weights,
                config,
                engine,
                run.metrics.say,
                is_rounded=is_rounded,
                is_held=policy.checkpoint.saves_frozen,
                has_tower=any(is_in_vision_tower(name) for name in adapted_layers(policy.model)),
            )
        )
        if way == "adapter" and config is not None:
            adapters = AdapterPublisher(shared, base, config, engine)
            self._publish: Callable[[int], None] = lambda version: adapters.publish(policy.model, version)
        elif way in STREAMS:
            stream = STREAMS[way](engine, device=policy.device, dtype=dtype)
            run.stack.callback(stream.close)
            self._publish = lambda version: stream.publish(policy.weights, version)
        else:
            files = DirectoryPublisher(shared, base, engine, dtype=dtype)
            self._publish = lambda version: files.publish(policy.model, version)

    def generate(
        self, requests: Sequence[Request], should_stop: ShouldStop | None = None, *, version: int = 0
    ) -> list[Completion]:
        try:
            if self._published != version:
                self._publish(version)
                self._published = version
            if self.offload:
                self.policy.offloader.offload_after_refit()
            drawn = self.ranks.run_on_first(lambda: self._draw(list(requests), version, should_stop))
        except UserError as error:
            raise ServiceUnavailable(str(error)) from error
        finally:
            if self.offload:
                self.policy.offloader.prepare_for_training()
        if drawn is None:
            raise Interrupted
        return drawn

    def prefetch(self, requests: Sequence[Request], version: int) -> None:
        if self._prefetcher is not None and requests:
            self._prefetcher.start(requests, version)

    def _draw(self, requests: list[Request], version: int, should_stop: ShouldStop | None) -> list[Completion] | None:
        """Return the completions; None where rank 0 was asked to stop."""
        try:
            if self._prefetcher is not None and self._prefetcher.is_under_way and requests == self._prefetcher.requests:
                return self._prefetcher.result(version, should_stop)
            assert self._engine is not None, "rank 0 talks to the servers"
            return self._engine.generate(requests, should_stop)
        except Interrupted:
            return None


def choose_weight_transport(
    requested: str,
    config: AdapterConfig | None,
    engine: HttpEngine | None,
    say: Callable[[str], None],
    *,
    is_rounded: bool = False,
    is_held: bool = False,
    has_tower: bool = False,
) -> str:
    """Return how weights travel: for `auto` the adapter alone where there is one and all servers take it, else a
    directory of whole weights; says which, and why. For `broadcast` the servers' way, of `STREAMS`. is_rounded: whether
    the adapter is trained beside weights in 4 bits, which are not those that servers have; is_held: beside weights that
    are in the run's checkpoints alone; has_tower: whether it is of a vision tower too. Raises UserError where `adapter`
    was asked for and cannot be."""
    assert engine is not None, "rank 0 talks to the servers"
    if requested == "broadcast":
        return engine.servers[0].dialect.broadcast_kind
    if config is None or requested not in ("auto", "adapter"):
        return "directory" if requested == "auto" else requested
    held = "its base is in this run's checkpoints alone (checkpoint.init_from, model.init), where no server finds it"
    why_not = held if is_held else adapter_refusal(engine, config, has_tower)
    if why_not is not None and requested == "adapter":
        raise UserError(f"grpo.server.weights=adapter: {why_not}; or {MERGED}")
    rounded = "lora.quantize=nf4 trains beside weights in 4 bits, which servers of the same model do not draw with"
    if requested == "auto" and is_rounded:
        why_not = rounded
    if why_not is not None:
        say(f"the servers get merged weights, not the adapter alone: {why_not}")
        return "directory"
    say("the servers get the adapter alone, which they all take; " + (f"{rounded}: " if is_rounded else "") + MERGED)
    say("  the adapter is right beside the weights of model.path: start servers again that an earlier run gave others")
    return "adapter"


class RolloutPrefetcher:
    """Prefetcher of one rollout at a time, on one rank, drawn in a thread.

    max_off_policy_steps: the staleness that `take` lets pass; 0 draws everything that older weights drew again.
    """

    def __init__(self, engine: HttpEngine, max_off_policy_steps: int, say: Callable[[str], None] = lambda line: None):
        self.engine, self.most, self.say = engine, max_off_policy_steps, say
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="prefetch")
        self._drawing: Future[list[Completion]] | None = None
        self.requests: list[Request] = []

    @property
    def is_under_way(self) -> bool:
        """True while a rollout was begun and not taken."""
        return self._drawing is not None

    def start(self, requests: Sequence[Request], version: int) -> None:
        """Draw `requests` in a thread. version: the trainer's, for completions without one from the engine."""
        if self.is_under_way:
            raise ValueError("a rollout is under way: take it first")
        self.requests = list(requests)
        self._drawing = self._thread.submit(self._draw, self.requests, version)

    def result(self, version: int, should_stop: ShouldStop | None = None) -> list[Completion]:
        """Wait for the rollout that was begun and return its completions, in order, each at most `max_off_policy_steps`
        older than the trainer's `version`. Those that are older are dropped and drawn again, with the weights of now.

        Raises what the engine raised, UserError where what it draws now is too old as well, and Interrupted soon after
        `should_stop` says yes: the rollout is then lost.
        """
        if self._drawing is None:
            raise ValueError("no rollout is under way: begin one first")
        drawing, self._drawing = self._drawing, None
        wait_for([drawing], should_stop)
        completions = drawing.result()
        old = [index for index, age in enumerate(_ages(completions, version)) if age > self.most]
        if old:
            self.say(f"{len(old)} of {len(completions)} completions are more than {self.most} steps old: drawn again")
            again = self._draw([self.requests[index] for index in old], version, should_stop)
            for index, completion in zip(old, again, strict=True):
                completions[index] = completion
            oldest = max(_ages(again, version))
            if oldest > self.most:
                raise UserError(
                    f"the engine draws with version {version - oldest} of the weights and the trainer has {version}: "
                    f"give it the weights before a rollout, or raise max_off_policy_steps={self.most}"
                )
        return completions

    def close(self) -> None:
        """Wait for what is under way and forget it; close the engine first to end it at once."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._drawing = None

    def _draw(
        self, requests: Sequence[Request], version: int, should_stop: ShouldStop | None = None
    ) -> list[Completion]:
        completions = self.engine.generate(requests, should_stop)
        return [c if c.version is not None else replace(c, version=version) for c in completions]


def _ages(completions: Sequence[Completion], version: int) -> list[int]:
    """Return how much older than `version` each completion is; all have a version here."""
    return [version - c.version for c in completions if c.version is not None]


def check_vision_tower(engine: HttpEngine | None) -> None:
    """Raise UserError where a server would draw with the features of a vision tower's earlier weights."""
    assert engine is not None  # on the rank that asks
    stale = next((server for server in engine.servers if server.dialect.keeps_image_features), None)
    if stale is not None:
        raise UserError(
            f"{stale.client.url}: {stale.dialect.name} keeps the features of images when its weights change, and the "
            "run trains the vision tower: set train.vision=frozen, or use vLLM or `dtrain serve`"
        )


def adapter_refusal(engine: HttpEngine, config: AdapterConfig, has_tower: bool = False) -> str | None:
    """Return why the servers cannot take an adapter of this kind; None where they can. has_tower: whether it is of a
    vision tower too. Raises UserError."""
    if config.modules_to_save:
        return f"no server takes what is trained beside the adapter, lora.modules_to_save={[*config.modules_to_save]}"
    if config.parameters:
        return f"no server is known to take adapters of experts, lora.target={[*config.parameters]}"
    strict = next((server for server in engine.servers if not server.dialect.supports_dora), None)
    if config.dora and strict is not None:
        return f"{strict.client.url}: {strict.dialect.name} takes no DoRA"
    textual = next((server for server in engine.servers if not server.dialect.supports_vision_adapters), None)
    if has_tower and textual is not None:
        name = f"{textual.client.url}: {textual.dialect.name}"
        return f"{name} takes adapters of decoders alone, and lora.target means layers of the vision tower too"
    lacking = engine.adapter_problem()
    if lacking is None:
        return None
    ranks = config.rank, *config.rank_pattern.values()
    starts = dict.fromkeys(server.dialect.start_hint(max(ranks)) for server in engine.servers)
    return f"{lacking}: {'; '.join(starts)}"
