"""A decoding step as a CUDA graph: the host starts one graph a token in place of some seventy kernels a layer.

A graph reads and writes the memory that it was captured with. So a step has memory of its own for what changes from
token to token, and rows that come and go are copied into it; the first step of a shape is taken kernel by kernel, the
second one is captured, and the others of this shape are replays. A graph is captured anew where weights, or keys and
values, lie elsewhere than they did. The first graph of a run is proved: its step is taken by replay and by kernels from
the same state. Nothing of it is collective.

Steps, with the keys and values that they read, stay from rollout to rollout where that takes little. Weights that are
gathered anew for each rollout lie elsewhere each time: they are copied to memory that stays too, and graphs read that.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from dtrain.base.errors import UserError
from dtrain.inference.cached_attention import Decode
from dtrain.inference.kv_cache import KeyValues, SlotFlashAttention
from dtrain.inference.sampling import Sampler
from dtrain.models.common.decoder import CausalLM

# Graphs held at a time: each takes a few MiB on the device for its kernels' arguments.
MAX_GRAPHS = 32

# Share of a device's memory that may stay taken while the model trains: half of what a choice of `auto` leaves free.
MAX_KEPT_SHARE = 1 / 20

Replay = Callable[[], None]


def max_kept_bytes(device: torch.device) -> int:
    """Return how much `GraphedSteps` may keep on a CUDA device."""
    return int(torch.cuda.get_device_properties(device).total_memory * MAX_KEPT_SHARE)


class CudaGraphs:
    """Maker of CUDA graphs, all of them in one pool of memory: no two run at a time, and none leaves anything there.
    The pool goes with its last graph, and the maker with it."""

    def __init__(self, device: torch.device):
        self._device = device
        self.nbytes = 0  # of the pool
        # Holds the pool: torch does not enter one again that its last graph has left.
        self._first: torch.cuda.CUDAGraph | None = None

    def run_eagerly(self, step: Callable[[], None]) -> None:
        """Take a step kernel by kernel. Raises RuntimeError where the host waits, which no graph can hold."""
        mode = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings(action="ignore"):  # that it does not see every wait
            torch.cuda.set_sync_debug_mode("error")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode(mode)

    def capture(self, step: Callable[[], None]) -> Replay:
        """Record a step's kernels without running them. Return the function that runs them."""
        graph = torch.cuda.CUDAGraph()
        pool = None if self._first is None else self._first.pool()
        # On torch's own stream for captures: cuBLAS keeps a workspace for every stream that it has seen. Other threads
        # may allocate meanwhile: saving does.
        with torch.cuda.device(self._device), torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            before = torch.cuda.memory_reserved(self._device)
            step()
            self.nbytes += torch.cuda.memory_reserved(self._device) - before
        self._first = self._first or graph
        return graph.replay


class GraphedSteps:
    """Captured steps of one rank's engines, one engine at a time, by their shapes.

    make: called for a maker of graphs. keeps: bytes that may stay between two runs of work. insists: whether what keeps
    a step from being a graph is a UserError. obstacle: what does; steps are taken kernel by kernel from then on. lost:
    why nothing is kept. None: there is no such reason.
    """

    def __init__(
        self,
        model: CausalLM,
        device: torch.device,
        make: Callable[[torch.device], CudaGraphs] = CudaGraphs,
        *,
        keeps: int = 0,
        insists: bool = False,
    ):
        self.obstacle: str | None = None
        self.lost: str | None = None
        self._keeps = keeps
        self._weights = [(module._parameters, name) for module in model.modules() for name in module._parameters]
        self._model, self._device, self._make, self._insists = model, device, make, insists
        self._is_proved = False
        self._clear()

    def _clear(self) -> None:
        self._held: dict[tuple[object, ...], GraphedStep] = {}  # the step last opened stands last
        self._maker: CudaGraphs | None = None
        self._store: KeyValues | None = None
        self._copies: dict[int, nn.Parameter] = {}  # by place among the weights

    def rest(self, flash: SlotFlashAttention | None = None) -> KeyValues:
        """Return an empty cache, before and after work. Steps and what they read stay, or all of it goes. flash: of the
        cache; with another one than before nothing stays."""
        if self._store is not None and self._store.flash is not flash:
            self._clear()
        pools = [] if self._store is None else self._store.pools
        tensors = [tensor for pool in pools for tensor in pool.tensors()]
        taken = _nbytes([*tensors, *self._copies.values()]) + (0 if self._maker is None else self._maker.nbytes)
        if taken > self._keeps:
            self._lose("what they read takes", taken)
        if self._store is None:
            self._store = KeyValues.of(self._model.config, flash)
        for pool in self._store.pools:
            pool.clear()
        return self._store

    def _lose(self, reason: str, taken: int) -> None:
        """Keep nothing from here on."""
        if self._keeps:
            sizes = f"{taken / 2**30:.2f} GiB, and at most {self._keeps / 2**30:.2f} GiB may stay"
            self.lost = f"CUDA graphs are captured anew in each rollout: {reason} {sizes}"
        self._keeps = 0
        self._clear()

    def weights(self) -> list[nn.Parameter | None]:
        """Return the model's parameters as they are, gathered or not, module by module."""
        return [parameters[name] for parameters, name in self._weights]

    def refresh(self, before: Sequence[Tensor | None]) -> None:
        """Copy the weights that were gathered for a rollout to where graphs read them. before: `weights` ungathered."""
        now = self.weights()
        if not self._copies:
            gathered = [place for place, (new, old) in enumerate(zip(now, before, strict=True)) if new is not old]
            unique = {id(weight): weight for place in gathered if (weight := now[place]) is not None}
            taken = _nbytes(unique.values())
            if taken > self._keeps:
                return self._lose("the weights that are gathered for it take", taken)
            fixed = {key: nn.Parameter(torch.empty_like(weight), False) for key, weight in unique.items()}
            self._copies = {place: fixed[id(now[place])] for place in gathered}
        for place, copy in self._copies.items():
            weight = now[place]
            assert weight is not None
            copy.copy_(weight)

    @contextmanager
    def fixed_weights(self) -> Iterator[None]:
        """Context in which modules have the copies as their parameters."""
        now = self.weights()
        try:
            for place, copy in self._copies.items():
                parameters, name = self._weights[place]
                parameters[name] = copy
            yield
        finally:
            for place in self._copies:
                parameters, name = self._weights[place]
                parameters[name] = now[place]

    def addresses(self) -> list[int]:
        """Return the addresses of the weights that graphs read."""
        read = [self._copies.get(place, weight) for place, weight in enumerate(self.weights())]
        return [weight.data_ptr() for weight in read if weight is not None]

    def open(self, decode: Decode, sampler: Sampler, tokens: Tensor) -> "GraphedStep":
        """Return the step for other rows; tokens: the last ones of decode's R, [R] int64."""
        sampler.prepare(self._model.config.vocab_size)
        shape = decode.shape, sampler.shape
        step = self._held.pop(shape, None)
        if step is None:
            step = GraphedStep(self._model, self, decode, sampler, tokens)
        else:
            step.load(decode, sampler, tokens)
        self._held[shape] = step
        if len(self._held) > MAX_GRAPHS:
            del self._held[next(iter(self._held))]
        return step

    def capture(self, step: "GraphedStep") -> Replay | None:
        """Return what replays `step`, None where it is no graph. The first one is proved: from the same state kernels
        and replay give the same. Raises UserError where the capture itself fails: torch's allocator then takes it to be
        underway for good, and fails where it next gives memory back."""
        if self._maker is None:
            self._maker = self._make(self._device)
        expected = None
        try:
            if not self._is_proved:
                expected = step.result(partial(self._maker.run_eagerly, step.run))
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            self.give_up(f"a step of decoding is no graph: {_line(error)}")
            return None
        try:
            replay = self._maker.capture(step.run)
        except RuntimeError as error:
            first = error.__context__ or error  # the end of a capture that failed fails too
            raise UserError(f"capturing a step of decoding: {_line(first)}; set grpo.cuda_graphs=false") from error
        if expected is not None and (difference := step.difference(step.result(replay), expected)):
            self.give_up(f"a captured step of decoding differs from its kernels: {difference}")
            return None
        self._is_proved = True
        return replay

    def give_up(self, obstacle: str) -> None:
        """Take steps kernel by kernel from here on. Raises UserError for one that insists on graphs."""
        if self._insists:
            raise UserError(f"grpo.cuda_graphs=true: {obstacle}; set grpo.cuda_graphs=auto or false")
        self.obstacle = self.obstacle or obstacle


class GraphedStep:
    """Step that decodes one token more of every row, on memory of its own. tokens: the last ones, [R] int64; logprobs:
    theirs, [R] in max(float32, the dtype)."""

    logprobs: Tensor

    def __init__(self, model: CausalLM, steps: GraphedSteps, decode: Decode, sampler: Sampler, tokens: Tensor):
        self._model, self._steps = model, steps
        self._decode, self._sampler = decode, sampler
        self.tokens = tokens.clone()
        self._replay: Replay | None = None
        self._addresses: list[int] = []  # of weights, keys and values, at the capture
        self._is_warm = False

    def load(self, decode: Decode, sampler: Sampler, tokens: Tensor) -> None:
        """Go on with the rows of another Decode of the same shape, and its Sampler."""
        self._decode.load(decode)
        self._sampler.load(sampler)
        self.tokens.copy_(tokens)

    def __call__(self) -> None:
        if not self._is_warm or self._steps.obstacle is not None:
            self.run()
            self._is_warm = True
            return
        addresses = self._steps.addresses() + self._decode.addresses()
        if self._replay is None or self._addresses != addresses:
            self._replay, self._addresses = None, addresses
            self._replay = self._steps.capture(self)
        (self._replay or self.run)()

    def result(self, take: Callable[[], None]) -> tuple[Tensor, Tensor]:
        """Return the rows' tokens and logprobs after `take`, which takes the step; the step is then as it was."""
        state = [self.tokens, *self._decode.state()]
        before = [tensor.clone() for tensor in state]
        try:
            take()
            return self.tokens[self._decode.live], self.logprobs[self._decode.live]
        finally:
            for tensor, old in zip(state, before, strict=True):
                tensor.copy_(old)

    def difference(self, result: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> str | None:
        """Return how results of a step differ, None where they do by no more than rounding."""
        if parted := int((result[0] != expected[0]).sum()):
            return f"{parted} of {len(result[0])} rows drew another token"
        # Of logits in the weights' dtype; what is not a number in both is no difference.
        rounding = 8 * torch.finfo(next(self._model.parameters()).dtype).eps
        if torch.allclose(result[1], expected[1], rtol=rounding, atol=rounding, equal_nan=True):
            return None
        return f"log-probabilities by up to {(result[1] - expected[1]).abs().max().item():.3g}"

    def run(self) -> None:
        """Take the step kernel by kernel."""
        self._decode.begin()
        # Not as FSDP has replaced it: its hooks let other streams wait for this one, which no graph can hold.
        with self._steps.fixed_weights():
            logits = CausalLM.next_logits(self._model, self.tokens[:, None], self._decode)  # [R, V]
        tokens, logprobs = self._sampler.draw(logits, self._decode.drawn)
        if not self._is_warm:
            self.logprobs = torch.empty_like(logprobs)
        self.tokens.copy_(tokens)
        self.logprobs.copy_(logprobs)
        self._decode.end()


def _line(error: BaseException) -> str:
    return str(error).partition("\n")[0]


def _nbytes(tensors: Iterable[Tensor | None]) -> int:
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)
