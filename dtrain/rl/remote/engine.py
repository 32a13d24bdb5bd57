"""Servers as the engine of a training run.

Before each rollout, the servers get the present weights if these have changed. With `grpo.max_off_policy_steps` they
sample the next rollout while the run trains on this one:

    step 8     servers have version 8; rollout A is sampled, then rollout B is started
    step 9-10  training on A; B is sampled with version 8
    step 10    B is due, and its completions are 2 steps old. With max_off_policy_steps=2 they are used. With 1 they are
               dropped and sampled again with version 10

Only rank 0 communicates with the servers. The staleness of a completion is the trainer's version of the weights minus
the completion's version.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
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
from dtrain.rl.remote.http import HttpEngine, wait_for, with_version
from dtrain.rl.remote.http_client import with_advice
from dtrain.rl.remote.publish import AdapterPublisher, DirectoryPublisher, StreamPublisher, TransferPublisher
from dtrain.rl.routed import RoutedExpertsReader

STREAMS: dict[str, type[StreamPublisher]] = {kind.broadcast_kind: kind for kind in (StreamPublisher, TransferPublisher)}
"""Kind of broadcast -> publisher."""
MERGED_HINT = "Set grpo.server.weights=directory, which sends merged weights"


class ServerEngine(RolloutEngine):
    """An engine that samples with servers, and sends them the weights when these have changed.

    Args:
        grpo: The section of the method.
        policy: The policy.
        run: The run.

    Raises:
        ServiceUnavailable: On every rank, if the servers fail (`generate`).
        UserError: If a server cannot receive the weights as the recipe asks.
        Interrupted: If rank 0 is asked to stop while the servers come up.

    Collectives:
        Broadcasts from rank 0.
    """

    is_remote = True

    def __init__(self, grpo: RolloutSection, policy: Policy, run: RunContext):
        self.policy, self.offload, self.ranks = policy, grpo.offload, Ranks()
        self._prefetcher: RolloutPrefetcher | None = None
        self._published_version: int | None = None
        self._engine: HttpEngine | None = None  # on rank 0
        if not self.ranks.run_on_first(lambda: self._connect(grpo, run)):
            raise Interrupted
        if any(weight.requires_grad for tower in policy.model.model.vision for weight in tower.parameters()):
            self.ranks.run_on_first(lambda: check_vision_tower(self._engine))
        self._publish = self._open_publisher(grpo, run)

    def _connect(self, grpo: RolloutSection, run: RunContext) -> bool:
        """Connect to the servers, on rank 0. Return False if the run is asked to stop meanwhile."""
        section = grpo.server
        model_config = self.policy.model.config
        try:
            self._engine = HttpEngine(
                section.urls,
                kind=section.kind,
                model=section.model,
                timeout=section.timeout,
                retries=section.retries,
                concurrency=section.concurrency,
                start_timeout=section.start_timeout,
                api_key_file=section.api_key_file,
                routed=RoutedExpertsReader.of(model_config) if grpo.router_replay else None,
                vocab_size=model_config.vocab_size,
                print_line=run.metrics.print_line,
                should_stop=run.should_stop,
            )
        except Interrupted:
            return False
        if grpo.max_off_policy_steps:
            self._prefetcher = RolloutPrefetcher(self._engine, grpo.max_off_policy_steps, run.metrics.print_line)
            run.stack.callback(self._prefetcher.close)
        # The stack runs its callbacks in reverse order. The engine is closed first, which ends the calls in progress.
        # Otherwise the prefetcher would wait for them.
        run.stack.callback(self._engine.close)
        return True

    def _open_publisher(self, grpo: RolloutSection, run: RunContext) -> Callable[[int], None]:
        """Return a function that sends the weights to the servers as the given version.

        Collectives:
            Broadcasts from rank 0. The function that is returned gathers the weights.
        """
        policy, section = self.policy, grpo.server
        lora = policy.recipe.lora
        adapter_config = None if lora is None else adapter_of(asdict(lora))
        transport = self.ranks.run_on_first(
            lambda: choose_weight_transport(
                section.weights,
                adapter_config,
                self._engine,
                run.metrics.print_line,
                is_rounded=lora is not None and lora.quantize == "nf4",
                has_private_base=policy.checkpoint.saves_frozen,
                has_tower=any(is_in_vision_tower(name) for name in adapted_layers(policy.model)),
            )
        )
        shared = Path(section.weights_dir or run.path / "weights")
        base = policy.recipe.model.directory
        dtype = policy.precision.compute
        if transport == "adapter" and adapter_config is not None:
            adapters = AdapterPublisher(shared, base, adapter_config, self._engine)
            return lambda version: adapters.publish(policy.model, version)
        if transport in STREAMS:
            stream = STREAMS[transport](self._engine, device=policy.device, dtype=dtype)
            run.stack.callback(stream.close)
            return lambda version: stream.publish(policy.weights, version)
        files = DirectoryPublisher(shared, base, self._engine, dtype=dtype)
        return lambda version: files.publish(policy.model, version)

    def generate(
        self, requests: Sequence[Request], should_stop: ShouldStop | None = None, *, version: int = 0
    ) -> list[Completion]:
        try:
            if self._published_version != version:
                self._publish(version)
                self._published_version = version
            if self.offload:
                self.policy.offloader.offload_after_refit()
            completions = self.ranks.run_on_first(lambda: self._sample(list(requests), version, should_stop))
        except UserError as error:
            raise ServiceUnavailable(str(error)) from error
        finally:
            if self.offload:
                self.policy.offloader.prepare_for_training()
        if completions is None:
            raise Interrupted
        return completions

    def prefetch(self, requests: Sequence[Request], version: int) -> None:
        if self._prefetcher is not None and requests:
            self._prefetcher.start(requests, version)

    def _sample(self, requests: list[Request], version: int, should_stop: ShouldStop | None) -> list[Completion] | None:
        """Return the completions, on rank 0. None if it was asked to stop."""
        try:
            if self._prefetcher is not None and self._prefetcher.is_running and requests == self._prefetcher.requests:
                return self._prefetcher.result(version, should_stop)
            assert self._engine is not None, "rank 0 has the engine"
            return self._engine.generate(requests, should_stop)
        except Interrupted:
            return None


def choose_weight_transport(
    requested: str,
    config: AdapterConfig | None,
    engine: HttpEngine | None,
    print_line: Callable[[str], None],
    *,
    is_rounded: bool = False,
    has_private_base: bool = False,
    has_tower: bool = False,
) -> str:
    """Return how the weights are sent, and print the choice and its reason.

    Args:
        requested: `grpo.server.weights`.
        config: Config of the adapter. None without an adapter.
        engine: The servers.
        print_line: Prints a line.
        is_rounded: Whether the adapter is trained on 4-bit weights, which the servers do not have.
        has_private_base: Whether only the run's checkpoints contain the base model, so that servers cannot load it.
        has_tower: Whether the adapter includes layers of a vision tower.

    Returns:
        "adapter", "directory", or for `broadcast` the servers' kind of broadcast, a key of STREAMS. "auto" chooses the
        adapter if there is one and all servers accept it.

    Raises:
        UserError: If `adapter` was requested and is not possible.
    """
    assert engine is not None, "only rank 0 calls this"
    if requested == "broadcast":
        return engine.servers[0].dialect.broadcast_kind
    if config is None or requested not in ("auto", "adapter"):
        return "directory" if requested == "auto" else requested
    why_not: str | None  # why the adapter is not sent
    if has_private_base:
        why_not = (
            "only this run's checkpoints contain its base (checkpoint.init_from, model.init), so servers cannot load it"
        )
    else:
        why_not = adapter_refusal(engine, config, has_tower)
    if why_not is not None and requested == "adapter":
        raise UserError(f"grpo.server.weights=adapter: {with_advice(why_not, MERGED_HINT)}")
    rounding = "lora.quantize=nf4 trains with 4-bit weights, but the servers sample with the weights before rounding"
    if requested == "auto" and is_rounded:
        why_not = rounding
    if why_not is not None:
        print_line(f"the servers get merged weights instead of the adapter: {why_not}")
        return "directory"
    print_line("the servers get only the adapter, which all of them accept")
    if is_rounded:
        print_line(f"  {rounding}. {MERGED_HINT}")
    print_line("  the servers must have the weights of model.path. Restart servers that got other weights from a run")
    return "adapter"


class RolloutPrefetcher:
    """Samples the next rollout in a thread, one rollout at a time, on one rank.

    Args:
        engine: The servers.
        max_off_policy_steps: Largest staleness of a completion. With 0, all completions of older weights are sampled
            again.
        print_line: Prints a line.

    Attributes:
        requests: The requests of the rollout in progress.
    """

    def __init__(
        self, engine: HttpEngine, max_off_policy_steps: int, print_line: Callable[[str], None] = lambda line: None
    ):
        self.engine, self.max_staleness, self.print_line = engine, max_off_policy_steps, print_line
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="prefetch")
        self._future: Future[list[Completion]] | None = None
        self.requests: list[Request] = []

    @property
    def is_running(self) -> bool:
        """Whether a rollout was started and its result was not fetched."""
        return self._future is not None

    def start(self, requests: Sequence[Request], version: int) -> None:
        """Start sampling `requests`.

        Args:
            requests: The requests.
            version: The trainer's version of the weights, for completions whose server reports none.
        """
        if self.is_running:
            raise ValueError("a rollout is in progress: fetch its result first")
        self.requests = list(requests)
        self._future = self._thread.submit(self._sample, self.requests, version)

    def result(self, version: int, should_stop: ShouldStop | None = None) -> list[Completion]:
        """Wait for the rollout and return its completions, in order.

        Completions that are older than `max_off_policy_steps` are dropped and sampled again with the present weights.

        Args:
            version: The trainer's version of the weights.
            should_stop: Ends the wait with Interrupted. The rollout is then lost.

        Raises:
            UserError: If the engine fails, or new completions are too old as well.
            Interrupted: If `should_stop` returns true.
        """
        if self._future is None:
            raise ValueError("no rollout is in progress: start one first")
        future, self._future = self._future, None
        wait_for([future], should_stop)
        completions = future.result()
        old = [index for index, age in enumerate(_staleness(completions, version)) if age > self.max_staleness]
        if old:
            message = f"{len(old)} of {len(completions)} completions are more than {self.max_staleness} steps old"
            self.print_line(f"{message}: sampled again")
            new_completions = self._sample([self.requests[index] for index in old], version, should_stop)
            for index, completion in zip(old, new_completions, strict=True):
                completions[index] = completion
            oldest = max(_staleness(new_completions, version))
            if oldest > self.max_staleness:
                raise UserError(
                    f"the servers sample with version {version - oldest} of the weights, but the trainer has version "
                    f"{version}. Send them the weights before each rollout, or raise "
                    f"grpo.max_off_policy_steps={self.max_staleness}"
                )
        return completions

    def close(self) -> None:
        """Wait for the rollout in progress and discard it. Close the engine before, to end it at once."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._future = None

    def _sample(
        self, requests: Sequence[Request], version: int, should_stop: ShouldStop | None = None
    ) -> list[Completion]:
        completions = self.engine.generate(requests, should_stop)
        return [with_version(completion, version) for completion in completions]


def _staleness(completions: Sequence[Completion], version: int) -> list[int]:
    """Return the staleness of each completion. All have a version here."""
    return [version - completion.version for completion in completions if completion.version is not None]


def check_vision_tower(engine: HttpEngine | None) -> None:
    """Raise UserError if a server would use features of images that an older vision tower computed."""
    assert engine is not None, "only the rank with the engine calls this"
    for server in engine.servers:
        if server.dialect.keeps_image_features:
            raise UserError(
                f"{server.client.url}: {server.dialect.name} keeps the features of images when its weights change, but "
                "the run trains the vision tower. Set train.vision=frozen, or use vLLM or `dtrain serve`"
            )


def adapter_refusal(engine: HttpEngine, config: AdapterConfig, has_tower: bool = False) -> str | None:
    """Return why the servers cannot receive an adapter. None if all can.

    Args:
        engine: The servers.
        config: Config of the adapter.
        has_tower: Whether the adapter includes layers of a vision tower.

    Raises:
        UserError: If a server does not answer.
    """
    if config.modules_to_save:
        modules = [*config.modules_to_save]
        return f"no server accepts modules that are trained next to the adapter, lora.modules_to_save={modules}"
    if config.parameters:
        return f"no server is known to accept adapters of experts, lora.target={[*config.parameters]}"
    for server in engine.servers:
        name = f"{server.client.url}: {server.dialect.name}"
        if config.dora and not server.dialect.supports_dora:
            return f"{name} does not accept lora.dora=true"
        if has_tower and not server.dialect.supports_vision_adapters:
            return f"{name} accepts only adapters of decoders, and lora.target also selects layers of the vision tower"
    problem = engine.adapter_problem()
    if problem is None:
        return None
    max_rank = max([config.rank, *config.rank_pattern.values()])
    start_hints = dict.fromkeys(server.dialect.start_hint(max_rank) for server in engine.servers)
    return with_advice(problem, ". ".join(start_hints))
