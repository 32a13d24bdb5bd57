"""Decoding steps as CUDA graphs: the host starts one graph per token instead of some seventy kernels per layer.

A graph reads and writes the memory with which it was captured. A step (`GraphedStep`) therefore has its own memory for
everything that changes from token to token. If rows are added or removed, the new rows are copied into this memory.
`GraphedSteps` keeps one step for each shape:

    first step       runs kernel by kernel, which also initialises libraries
    second step      is captured, and then replayed
    further steps    are replayed, until weights, keys or values have other addresses; then the step is captured again

The first graph of a run is verified: the step runs from the same state by kernels and by replay, and the results are
compared. Nothing here is collective.

Steps, and the cache that they read, are kept from rollout to rollout if they take little memory. Weights that FSDP
gathers anew for each rollout have other addresses each time, so they are copied to fixed memory, which the graphs read.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dtrain.base.errors import UserError
from dtrain.inference.cached_attention import Decode
from dtrain.inference.kv_cache import KeyValues, SlotFlashAttention
from dtrain.inference.sampling import Sampler
from dtrain.models.common.decoder import CausalLM

# The largest number of graphs. Each takes a few MiB on the device for the arguments of its kernels.
MAX_GRAPHS = 32

# Share of a device's memory that may be kept while the model trains. It is half of the memory that `auto` sizes leave
# free (`commands.plan.choose.FREE_SHARE`).
MAX_KEPT_SHARE = 1 / 20

Replay = Callable[[], None]


def max_kept_bytes(device: torch.device) -> int:
    """Return the bytes that `GraphedSteps` may keep on a CUDA device."""
    return int(torch.cuda.get_device_properties(device).total_memory * MAX_KEPT_SHARE)


class CudaGraphs:
    """Captures CUDA graphs that share one memory pool.

    Sharing is safe because only one graph runs at a time, and no graph leaves results in the pool. The pool is freed
    with its last graph, so this object must not be used afterwards.

    Args:
        device: The device.

    Attributes:
        nbytes: Bytes of the pool.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self.nbytes = 0
        # Keeps the pool alive: torch cannot use a pool again whose last graph was deleted.
        self._first: torch.cuda.CUDAGraph | None = None

    def run_eagerly(self, step: Callable[[], None]) -> None:
        """Run a step kernel by kernel.

        Raises:
            RuntimeError: If the host waits for the device, which a graph cannot do.
        """
        mode = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings(action="ignore"):  # a warning that this mode does not detect every wait
            torch.cuda.set_sync_debug_mode("error")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode(mode)

    def capture(self, step: Callable[[], None]) -> Replay:
        """Record the kernels of a step without running them. Return the function that runs them."""
        graph = torch.cuda.CUDAGraph()
        pool = None if self._first is None else self._first.pool()
        # Capture on torch's own stream for captures, because cuBLAS keeps a workspace for every stream that it has
        # seen. The mode is "thread_local", because other threads may allocate memory during the capture, for example
        # one that saves a checkpoint.
        with torch.cuda.device(self._device), torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            before = torch.cuda.memory_reserved(self._device)
            step()
            self.nbytes += torch.cuda.memory_reserved(self._device) - before
        self._first = self._first or graph
        return graph.replay


class GraphedSteps:
    """Captured decoding steps by shape, with the cache and the copies of weights that they read.

    Only one engine of this rank may use an object at a time.

    Args:
        model: The model.
        device: The device.
        make: Creates the object that captures graphs.
        keeps: Bytes that may be kept between two rollouts.
        insists: Whether to raise UserError if a step cannot be captured.

    Attributes:
        obstacle: Reason why steps cannot be captured. They then run kernel by kernel. None if they can.
        not_kept_reason: Reason why nothing is kept between rollouts. None if steps are kept.
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
        self.not_kept_reason: str | None = None
        self._keeps = keeps
        # Where each weight is: the dict of a module's parameters, and the name there.
        self._weights: list[tuple[dict[str, nn.Parameter | None], str]] = []
        for module in model.modules():
            for name in module._parameters:
                self._weights.append((module._parameters, name))
        self._model, self._device, self._make, self._insists = model, device, make, insists
        self._is_verified = False
        self._clear()

    def _clear(self) -> None:
        """Drop all steps, graphs, caches and copies."""
        self._steps: dict[tuple[object, ...], GraphedStep] = {}  # by shape, the most recently used last
        self._maker: CudaGraphs | None = None
        self._store: KeyValues | None = None
        self._copies: dict[int, nn.Parameter] = {}  # copies of gathered weights, by index in `_weights`

    def rest(self, flash: SlotFlashAttention | None = None) -> KeyValues:
        """Return an empty cache. An engine calls this before and after its work.

        Steps, cache and copies are kept if they take at most `keeps` bytes. Otherwise all of them are dropped.

        Args:
            flash: Attention of the cache. Nothing is kept if it changes.
        """
        if self._store is not None and self._store.flash is not flash:
            self._clear()
        used = _total_bytes(self._copies.values())
        if self._store is not None:
            for pool in self._store.pools:
                used += _total_bytes(pool.tensors())
        if self._maker is not None:
            used += self._maker.nbytes
        if used > self._keeps:
            self._keep_nothing("what they read takes", used)
        if self._store is None:
            self._store = KeyValues.of(self._model.config, flash)
        for pool in self._store.pools:
            pool.clear()
        return self._store

    def _keep_nothing(self, reason: str, used: int) -> None:
        """Keep nothing between rollouts from here on, because of the `used` bytes."""
        if self._keeps:
            sizes = f"{used / 2**30:.2f} GiB, and at most {self._keeps / 2**30:.2f} GiB may stay"
            self.not_kept_reason = f"CUDA graphs are captured anew in each rollout: {reason} {sizes}"
        self._keeps = 0
        self._clear()

    def weights(self) -> list[nn.Parameter | None]:
        """Return the model's parameters as they are now, gathered or not."""
        return [parameters[name] for parameters, name in self._weights]

    def refresh(self, before: Sequence[Tensor | None]) -> None:
        """Copy the weights that were gathered for a rollout to the memory that graphs read.

        Args:
            before: `weights` before they were gathered.
        """
        now = self.weights()
        if not self._copies:
            gathered: dict[int, nn.Parameter] = {}  # by index in `_weights`
            for index, (new, old) in enumerate(zip(now, before, strict=True)):
                if new is not None and new is not old:
                    gathered[index] = new
            unique = {id(weight): weight for weight in gathered.values()}  # a tied weight is copied once
            used = _total_bytes(unique.values())
            if used > self._keeps:
                return self._keep_nothing("the weights that are gathered for it take", used)
            copies = {key: nn.Parameter(torch.empty_like(weight), False) for key, weight in unique.items()}
            self._copies = {index: copies[id(weight)] for index, weight in gathered.items()}
        for index, copy in self._copies.items():
            weight = now[index]
            assert weight is not None
            copy.copy_(weight)

    @contextmanager
    def fixed_weights(self) -> Iterator[None]:
        """Context in which the modules' parameters are the copies."""
        now = self.weights()
        try:
            for index, copy in self._copies.items():
                parameters, name = self._weights[index]
                parameters[name] = copy
            yield
        finally:
            for index in self._copies:
                parameters, name = self._weights[index]
                parameters[name] = now[index]

    def addresses(self) -> list[int]:
        """Return the addresses of the weights that graphs read."""
        addresses = []
        for index, weight in enumerate(self.weights()):
            read = self._copies.get(index, weight)
            if read is not None:
                addresses.append(read.data_ptr())
        return addresses

    def open(self, decode: Decode, sampler: Sampler, tokens: Tensor) -> "GraphedStep":
        """Return the step of a shape, with new rows.

        Args:
            decode: Cache of the rows.
            sampler: Sampler of the rows.
            tokens: The last token of each, int64 [R].
        """
        sampler.prepare(self._model.config.vocab_size)
        shape = decode.shape, sampler.shape
        step = self._steps.pop(shape, None)
        if step is None:
            step = GraphedStep(self._model, self, decode, sampler, tokens)
        else:
            step.load(decode, sampler, tokens)
        self._steps[shape] = step
        if len(self._steps) > MAX_GRAPHS:
            least_recently_used = next(iter(self._steps))
            del self._steps[least_recently_used]
        return step

    def capture(self, step: "GraphedStep") -> Replay | None:
        """Capture a step. Return the function that replays it, or None if the step cannot be a graph.

        The first graph is verified: kernels and replay must compute the same result from the same state.

        Raises:
            UserError: If the capture itself fails. The run cannot continue without graphs then, because torch's
                allocator still assumes a capture in progress and would fail when it next frees memory.
        """
        if self._maker is None:
            self._maker = self._make(self._device)
        expected = None
        try:
            if not self._is_verified:
                expected = step.result(partial(self._maker.run_eagerly, step.run))
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            self.give_up(f"a step of decoding is no graph: {_first_line(error)}")
            return None
        try:
            replay = self._maker.capture(step.run)
        except RuntimeError as error:
            # The end of a failed capture raises an error as well. The first error is its context.
            first = error.__context__ or error
            raise UserError(
                f"capturing a step of decoding: {_first_line(first)}; set grpo.cuda_graphs=false"
            ) from error
        if expected is not None:
            difference = step.difference(step.result(replay), expected)
            if difference:
                self.give_up(f"a captured step of decoding differs from its kernels: {difference}")
                return None
        self._is_verified = True
        return replay

    def give_up(self, obstacle: str) -> None:
        """Run steps kernel by kernel from here on.

        Raises:
            UserError: If graphs are required (`insists`).
        """
        if self._insists:
            raise UserError(f"grpo.cuda_graphs=true: {obstacle}; set grpo.cuda_graphs=auto or false")
        self.obstacle = self.obstacle or obstacle


class StepResult(NamedTuple):
    """Tokens that a step has sampled, without those of padding.

    Attributes:
        tokens: int64 [rows].
        logprobs: Their log-probabilities, [rows].
    """

    tokens: Tensor
    logprobs: Tensor


class GraphedStep:
    """Step that decodes one token of every row, with memory of its own.

    Args:
        model: The model.
        steps: The steps to which it belongs.
        decode: Cache of the rows.
        sampler: Sampler of the rows.
        tokens: The last token of each, int64 [R].

    Attributes:
        tokens: The last token of each row, int64 [R].
        logprobs: Their log-probabilities, [R] in max(float32, the dtype). Allocated by the first step.
    """

    logprobs: Tensor

    def __init__(self, model: CausalLM, steps: GraphedSteps, decode: Decode, sampler: Sampler, tokens: Tensor):
        self._model, self._steps = model, steps
        self._decode, self._sampler = decode, sampler
        self.tokens = tokens.clone()
        self._replay: Replay | None = None
        self._addresses: list[int] = []  # of weights, keys and values, at the capture
        self._has_run = False

    def load(self, decode: Decode, sampler: Sampler, tokens: Tensor) -> None:
        """Continue with the rows of another cache of the same shape, and their sampler."""
        self._decode.load(decode)
        self._sampler.load(sampler)
        self.tokens.copy_(tokens)

    def __call__(self) -> None:
        """Run the step, by replay if possible."""
        if not self._has_run or self._steps.obstacle is not None:
            self.run()
            self._has_run = True
            return
        addresses = self._steps.addresses() + self._decode.addresses()
        if self._replay is None or self._addresses != addresses:
            self._replay, self._addresses = None, addresses
            self._replay = self._steps.capture(self)
        if self._replay is None:
            self.run()
        else:
            self._replay()

    def result(self, run: Callable[[], None]) -> StepResult:
        """Return the result of `run`, which runs the step, and restore the state before it."""
        state = [self.tokens, *self._decode.state()]
        before = [tensor.clone() for tensor in state]
        try:
            run()
            return StepResult(self.tokens[self._decode.live], self.logprobs[self._decode.live])
        finally:
            for tensor, old in zip(state, before, strict=True):
                tensor.copy_(old)

    def difference(self, result: StepResult, expected: StepResult) -> str | None:
        """Describe the difference between two results of the step. None if it is at most rounding."""
        num_different = int((result.tokens != expected.tokens).sum())
        if num_different:
            return f"{num_different} of {len(result.tokens)} rows drew another token"
        # Rounding of logits in the weights' dtype. NaNs in both are no difference.
        tolerance = 8 * torch.finfo(next(self._model.parameters()).dtype).eps
        if torch.allclose(result.logprobs, expected.logprobs, rtol=tolerance, atol=tolerance, equal_nan=True):
            return None
        largest = (result.logprobs - expected.logprobs).abs().max().item()
        return f"log-probabilities by up to {largest:.3g}"

    def run(self) -> None:
        """Run the step kernel by kernel."""
        self._decode.begin()
        # Call the function of the class, because FSDP has replaced the method of the instance by one with hooks. The
        # hooks make other streams wait for this one, which a graph cannot contain.
        with self._steps.fixed_weights():
            logits = CausalLM.next_logits(self._model, self.tokens[:, None], self._decode)  # [R, V]
        tokens, logprobs = self._sampler.sample(logits, self._decode.num_sampled)
        if not self._has_run:
            self.logprobs = torch.empty_like(logprobs)
        self.tokens.copy_(tokens)
        self.logprobs.copy_(logprobs)
        self._decode.end()


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]


def _total_bytes(tensors: Iterable[Tensor | None]) -> int:
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)
