"""Bytes that the elementwise operations of compiled regions move (`policy.compiling`).

A compiler joins the operations between two products to kernels that read what they are given and write what others
need. So a tensor of a region is counted once where such an operation reads it and no other of the same call has made
it: an input, a saved tensor, the result of a product; and once where it is read by a product, by another call or
outside. What only such operations of one call see is not counted. The backward of a call is a call of its own.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from dtrain.commands.plan.memory import Allocation, OpOverload
from dtrain.parallel.activation_offload import in_backward

Watch = Callable[[OpOverload, Sequence[Tensor], Sequence[Tensor]], None]


class FusedBytes:
    """Counts the bytes of regions. Calls have numbers, that of a forward n, of its backward −n; None is outside. watch:
    gets each operation of a region that keeps what the compiler keeps, with its tensors and its results."""

    def __init__(self) -> None:
        self.call: int | None = None
        self.watch: Watch | None = None
        self._begins, self._ends = [0], [0]  # of a forward's nodes in autograd's sequence, by the number of the call
        self._made: dict[int, tuple[Allocation, int]] = {}  # what was made and not counted, and in which call
        self._read: dict[int, Allocation] = {}  # counted in the call that was last
        self._last: int | None = None

    def region(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return `function` as a region: each call of it is one."""

        def call(*tensors: Tensor) -> Any:
            number, outer = len(self._begins), self.call
            self._begins.append(torch.autograd._get_sequence_nr())
            self._ends.append(self._begins[-1])
            self.call = number
            try:
                return function(*tensors)
            finally:
                self.call, self._ends[number] = outer, torch.autograd._get_sequence_nr()

        return call

    @contextmanager
    def watched_by(self, watch: Watch) -> Iterator[None]:
        """Give the operations within to `watch`, then to the former one again."""
        former, self.watch = self.watch, watch
        try:
            yield
        finally:
            self.watch = former

    def moved(self, inputs: Iterable[Allocation], outputs: Iterable[Allocation], is_product: bool) -> tuple[int, bool]:
        """Return the bytes to count for an operation, and whether it is outside: then it has its own beside them."""
        call, bytes_moved = self._current(), 0
        if call != self._last:
            self._last, self._read = call, {}
        for allocation in {id(each): each for each in inputs}.values():
            _, maker = self._made.get(id(allocation), (None, None))
            is_within = maker is not None and maker == call and not is_product
            if maker is not None and not is_within:  # it is written
                bytes_moved += allocation.size
                del self._made[id(allocation)]
            if call is not None and not is_product and not is_within and id(allocation) not in self._read:
                bytes_moved += allocation.size
                self._read[id(allocation)] = allocation
        if call is not None and not is_product:
            self._made |= {id(each): (each, call) for each in outputs}
        return bytes_moved, call is None

    def _current(self) -> int | None:
        """Return the call that is under way: a forward, or a backward by the node that autograd works on."""
        node = torch._C._current_autograd_node()
        if self.call is not None or torch.is_grad_enabled():  # of what is computed again in a backward, too
            return self.call
        if node is None:  # autograd adds gradients up between two nodes
            return self._last if in_backward() and self._last is not None and self._last < 0 else None
        place = bisect_right(self._begins, node._sequence_nr()) - 1
        return -place if node._sequence_nr() < self._ends[place] else None
