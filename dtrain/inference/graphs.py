"""A decoding step as a CUDA graph: the host starts one graph a token in place of some seventy kernels a layer.

A graph reads and writes the memory that it was captured with. So a step has memory of its own for what changes from
token to token, and rows that come and go are copied into it; the first step of a shape is taken kernel by kernel, the
second one is captured, and the others of this shape are replays. A graph is captured anew where weights, or keys and
values, lie elsewhere than they did. Nothing of it is collective.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from dtrain.inference.cached_attention import Decode
from dtrain.inference.sampling import Sampler
from dtrain.models.common.decoder import CausalLM

# Graphs held at a time: each takes a few MiB on the device for its kernels' arguments.
MOST = 32

Replay = Callable[[], None]


class CudaGraphs:
    """Maker of CUDA graphs, all of them in one pool of memory: no two run at a time, and none leaves anything there.
    One for each run of work, since its graphs share memory until the last one goes."""

    def __init__(self, device: torch.device):
        self._device = device
        # Holds the pool: torch does not enter one again that its last graph has left.
        self._first: torch.cuda.CUDAGraph | None = None

    def capture(self, step: Callable[[], None]) -> Replay:
        """Record a step's kernels without running them. Return the function that runs them."""
        graph = torch.cuda.CUDAGraph()
        pool = None if self._first is None else self._first.pool()
        # On torch's own stream for captures: cuBLAS keeps a workspace for every stream that it has seen. Other threads
        # may allocate meanwhile: saving does.
        with torch.cuda.device(self._device), torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            step()
        self._first = self._first or graph
        return graph.replay


class Steps:
    """Steps of one engine for as long as it has work, by their shapes."""

    def __init__(self, model: CausalLM, maker: CudaGraphs):
        self._model, self._maker = model, maker
        self._held: dict[tuple[object, ...], Step] = {}  # the one last asked for stands last

    def open(self, decode: Decode, sampler: Sampler, tokens: Tensor) -> "Step":
        """Return the step for other rows; tokens: the last ones of decode's R, [R] int64."""
        sampler.prepare(self._model.config.vocab_size)
        shape = decode.shape, sampler.shape
        step = self._held.pop(shape, None)
        if step is None:
            step = Step(self._model, self._maker, decode, sampler, tokens)
        else:
            step.load(decode, sampler, tokens)
        self._held[shape] = step
        if len(self._held) > MOST:
            del self._held[next(iter(self._held))]
        return step


class Step:
    """Step that decodes one token more of every row, on memory of its own. tokens: the last ones, [R] int64; logprobs:
    theirs, [R] in max(float32, the dtype)."""

    logprobs: Tensor

    def __init__(self, model: CausalLM, maker: CudaGraphs, decode: Decode, sampler: Sampler, tokens: Tensor):
        self._model, self._maker = model, maker
        self._weights = [(held, name) for module in model.modules() for held in [module._parameters] for name in held]
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
        if not self._is_warm:
            self._run()
            self._is_warm = True
            return
        weights = (held[name] for held, name in self._weights)
        addresses = [weight.data_ptr() for weight in weights if weight is not None] + self._decode.addresses()
        if self._replay is None or self._addresses != addresses:
            self._replay, self._addresses = None, addresses
            self._replay = self._maker.capture(self._run)
        self._replay()

    def _run(self) -> None:
        self._decode.begin()
        # Not as FSDP has replaced it: its hooks let other streams wait for this one, which no graph can hold.
        logits = CausalLM.next_logits(self._model, self.tokens[:, None], self._decode)  # [R, V]
        tokens, logprobs = self._sampler.draw(logits, self._decode.drawn)
        if not self._is_warm:
            self.logprobs = torch.empty_like(logprobs)
        self.tokens.copy_(tokens)
        self.logprobs.copy_(logprobs)
        self._decode.end()
