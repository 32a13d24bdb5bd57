"""Attention under context parallel: each rank has the queries of its tokens, and sees the keys of all ranks.

There are two kernels. `GatherKernel` gathers the keys and values of all ranks before it computes attention.
`RingKernel` passes them from rank to rank and merges the partial results (Liu et al., Ring Attention,
arXiv:2310.01889). Both compute attention under masks. A `varlen.VarlenKernel` that contains one of them uses
variable-length calls instead. k and v always travel in one message, as one flat buffer with all of k before all of v,
because their heads may have different sizes.

Example: cp=2 and a row of 8 tokens with positions 0 to 7. The row is cut into 4 chunks, of which rank r has chunks r
and 3 - r (`parallel.context.batch`). There is one head of q and k of 2 numbers, and one of v with 1 number.

    rank 0    tokens 0 1 6 7    q [1, 4, 1, 2], k [1, 4, 1, 2], v [1, 4, 1, 1]
    rank 1    tokens 2 3 4 5    the same shapes

Gathered: a rank sends 4 * 2 + 4 * 1 = 12 numbers in one all-gather and receives [2, 12], which are joined in the order
of the row to k [1, 8, 1, 2] and v [1, 8, 1, 1]. The queries of rank 0 see the keys

    query 0: 0    query 1: 0 1    query 6: 0 to 6    query 7: 0 to 7

Backward, a rank has gradients of all 8 keys and values. It cuts them to [2, 12], and one reduce-scatter sums the ranks'
gradients: rank 0 receives the 12 numbers of tokens 0 1 6 7.

In a ring: rank 0 computes on its own keys while it sends them to rank 1, and then on those that rank 1 has sent.

    step 0, keys 0 1 6 7    query 0: 0    query 1: 0 1    query 6: 0 1 6    query 7: 0 1 6 7
    step 1, keys 2 3 4 5    query 0: -    query 1: -      query 6: 2 3 4 5  query 7: 2 3 4 5

`blocks` merges the two by their log-sum-exp. Suppose that all scores are 0 and that the value of token t is t. Query 6
then has the mean (0 + 1 + 6) / 3 = 7/3 of 3 keys, lse = ln 3, in step 0, and 14/4 = 3.5 of 4 keys, lse = ln 4, in step
1. Merged: 7/3 * 3/7 + 3.5 * 4/7 = 3, the mean of 0 to 6, with lse = ln 7.

Backward, the keys travel again, and the gradient of each rank's keys follows them one step behind: it starts as zeros
on the rank that has the keys, every rank adds its part and passes it on, and after cp messages it is home.

    step 0    rank 0 computes the gradient of keys 0 1 6 7 by its own queries and sends these 12 numbers to rank 1
    step 1    rank 1 adds the part of its queries, 2 3 4 5, and sends the sum back to rank 0

README.md continues the example with the numbers of these gradients.

Masks come from positions and documents, and not from the order of tokens on a rank: one small all-gather of them per
forward. If the host knows the packing of the full rows, there is neither a mask nor that all-gather.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dtrain.attention.blocks import BlockByBlock, BlockComputation, KeysAndValues, MaskedBlocks, blocks_for
from dtrain.attention.kernels import Gathering, Kernel
from dtrain.attention.packing import Call, Packing
from dtrain.attention.segments import Flash, Segments, Steps, VarlenBlocks, pick
from dtrain.attention.tree import TreePacking
from dtrain.attention.visibility import BlockMask, MaskStreams, Visibility, additive
from dtrain.parallel.context.batch import SequenceGather, gather_sequence, shard_sequence


class ContextKernel(Kernel):
    """Base of the kernels over the keys of all cp ranks.

    q is [B, S/cp, H, hd], k [B, S/cp, kv, hd], v [B, S/cp, kv, hd_v], the output [B, S/cp, H, hd_v], all in the
    head-tail layout.
    """

    is_context_parallel = True

    def __init__(self, inner: Kernel, mesh: DeviceMesh):
        self.inner, self.note = inner, inner.note
        self.group = mesh.get_group()

    def keys(self, local: MaskStreams, packing: Packing | TreePacking | None = None) -> MaskStreams | None:
        """Override `Kernel.keys`. The packing is not read. If there are documents, positions are [B, S], too.

        Collectives:
            One all-gather for all streams.
        """
        if local.documents is None:
            return MaskStreams(gather_sequence(local.positions, self.group))
        streams = [local.positions.expand_as(local.documents), local.documents]
        if local.last_documents is not None:
            streams.append(local.last_documents)
        return MaskStreams(*gather_sequence(torch.stack(streams), self.group, dim=2).unbind(0))


class GatherKernel(ContextKernel):
    """Attention over gathered keys, computed by `inner` as if each rank had queries of a full row.

    Collectives:
        Per layer one all-gather of keys and values, and one reduce-scatter of their gradients in the backward.
    """

    exchange = " over gathered keys"
    gathers = True

    def __init__(self, inner: Kernel, mesh: DeviceMesh):
        super().__init__(inner, mesh)
        self.name = inner.name + self.exchange

    def prepare(self, visibility: Visibility, dtype: torch.dtype, device: torch.device) -> Any:
        return self.inner.prepare(visibility, dtype, device)

    def begin_gather(self, k: Tensor, v: Tensor, prepared: Any) -> Gathering:
        """Begin to gather k and v to [B, S, kv, hd] and [B, S, kv, hd_v].

        Collectives:
            One asynchronous all-gather. In the backward one reduce-scatter.
        """
        return cast(Gathering, SequenceGather([k, v], self.group, dim=1).wait)

    def over(self, q: Tensor, k: Tensor, v: Tensor, prepared: Any, scale: float, sinks: Tensor | None = None) -> Tensor:
        """Override `Kernel.over`; k and v are those of full rows."""
        return self.inner(q, k, v, prepared, scale, sinks)

    def calls(self, packing: Packing | TreePacking, window: int | None) -> list[list[Call]]:
        """Return the calls of this rank's queries over the keys of full rows."""
        return [packing.over_gathered(window, self.group.rank(), self.group.size())]

    def over_segments(
        self, flash: Flash, q: Tensor, k: Tensor, v: Tensor, steps: Steps, scale: float, sinks: Tensor | None
    ) -> Tensor:
        """Override `Kernel.over_segments`; k and v are those of full rows."""
        return over_keys(flash, q, k.flatten(0, 1), v.flatten(0, 1), steps[0], scale, sinks)


def over_keys(
    flash: Flash, q: Tensor, k: Tensor, v: Tensor, calls: list[Segments], scale: float, sinks: Tensor | None
) -> Tensor:
    """Compute attention of a rank's queries over the keys of full rows, with one call for each of its two chunks.

    Args:
        flash: Implementation of variable-length attention.
        q: [B, 2c, H, hd], c the tokens of a chunk.
        k: [B · S, kv, hd].
        v: [B · S, kv, hd_v].
        calls: One for the head chunks, one for the tail chunks.
        scale: Factor of the scores.
        sinks: [H], or None.

    Returns:
        [B, 2c, H, hd_v].
    """
    outputs = []
    for chunk, segments in zip(q.chunk(2, 1), calls, strict=True):
        keys = pick(k, segments.keys), pick(v, segments.keys)
        out = flash(chunk.flatten(0, 1), *keys, segments, scale, sinks)
        outputs.append(out.unflatten(0, chunk.shape[:2]))
    return torch.cat(outputs, 1)


class RingKernel(ContextKernel):
    """Attention in a ring of ranks: keys and values travel, and are never gathered.

    Under masks, every exchange has a bias of 0 or -inf for each pair of query and key. With variable-length calls,
    there are at most two calls for each rank's keys, or three under a window.

    Args:
        inner: Kernel of one rank. Only its note is used.
        mesh: The mesh of the cp dimension.
        blocks: Implementation of masked attention over one rank's keys. None: `blocks_for` of the device.

    Collectives:
        Per layer cp - 1 exchanges of keys and values in the forward and again in the backward, with cp exchanges of
        their gradients in max(float32, the dtype). Each is with the two neighbours.
    """

    name = "ring"
    exchange = " ring"

    def __init__(self, inner: Kernel, mesh: DeviceMesh, blocks: BlockComputation | None = None):
        super().__init__(inner, mesh)
        self.blocks = blocks

    def prepare(self, visibility: Visibility, dtype: torch.dtype, device: torch.device) -> list[BlockMask | None]:
        """Return the masks of this rank's queries over the keys of each rank in the ring, its own first.

        Args:
            visibility: The mask of this rank's queries over the keys of all ranks.
            dtype: Dtype of a bias.
            device: Device of a bias.

        Returns:
            cp masks. None instead of a mask means that the queries see none of these keys. To find this out, the host
            waits for the device.
        """
        size, rank = self.group.size(), self.group.rank()
        masks = []
        for distance in range(size):
            source = (rank - distance) % size  # the rank whose keys arrive in this step
            positions, documents = visibility.key_positions, visibility.key_documents
            last_documents = visibility.key_last_documents
            if positions is not None:
                positions = shard_sequence(positions, source, size)
            if documents is not None:
                documents = shard_sequence(documents, source, size)
            if last_documents is not None:
                last_documents = shard_sequence(last_documents, source, size)
            part = replace(
                visibility,
                keys=visibility.keys // size,
                key_positions=positions,
                key_documents=documents,
                key_last_documents=last_documents,
            )
            masks.append(_block_mask(part, dtype, device))
        return masks

    def over(self, q: Tensor, k: Tensor, v: Tensor, prepared: Any, scale: float, sinks: Tensor | None = None) -> Tensor:
        attention = MaskedBlocks(self.blocks or blocks_for(q.device), scale)
        q, k, v = q.transpose(1, 2).contiguous(), k.transpose(1, 2), v.transpose(1, 2)  # [B, heads, S/cp, hd or hd_v]
        return BlockByBlock.apply(q, k, v, prepared, self.ring(), attention, sinks).transpose(1, 2)

    def has_calls(self, packing: Packing | TreePacking, window: int | None) -> bool:
        """Override `Kernel.has_calls`: rows with shared beginnings have none under a window."""
        return window is None or not packing.is_tree

    def ring(self) -> "Ring":
        """Override `Kernel.ring`."""
        return Ring(self.group)

    def calls(self, packing: Packing | TreePacking, window: int | None) -> list[list[Call]]:
        """Return the calls over the keys of each rank in the ring, this rank's first."""
        return packing.in_ring(window, self.group.rank(), self.group.size())

    def over_segments(
        self, flash: Flash, q: Tensor, k: Tensor, v: Tensor, steps: Steps, scale: float, sinks: Tensor | None
    ) -> Tensor:
        """Override `Kernel.over_segments`; k and v are this rank's."""
        shape = q.shape[:2]
        q, k, v = (part.flatten(0, 1) for part in (q, k, v))  # [B · S/cp, heads, hd or hd_v]
        attention = VarlenBlocks(flash, scale)
        out = BlockByBlock.apply(q.contiguous(), k, v, steps, self.ring(), attention, sinks)
        return out.unflatten(0, shape)


def _block_mask(part: Visibility, dtype: torch.dtype, device: torch.device) -> BlockMask | None:
    """Return the mask of queries over one rank's keys: a bias, or `part` itself. None if the queries see no key.

    On a GPU, `part` itself is returned if the bias would be large. `MaskedBlocks` then computes the bias of some
    queries at a time. On a CPU the bias is always computed here.
    """
    if device.type == "cpu":
        runs = [slice(0, part.queries)]
    else:
        runs = part.runs()
    if len(runs) > 1:
        for run in runs:
            if bool(part.visible(run, device).any()):
                return part
        return None
    visible = part.visible(runs[0], device)  # [B or 1, Q, K]
    if not bool(visible.any()):
        return None
    return additive(visible, dtype)[:, None]


class _Incoming(NamedTuple):
    """An exchange with the neighbours that is under way.

    Attributes:
        received: The message from the rank before, complete after `wait`.
        sent: The buffer that is being sent. A reference here keeps its memory until `wait`.
        requests: The send and the receive.
    """

    received: KeysAndValues
    sent: Tensor
    requests: list[dist.Work]

    def wait(self) -> KeysAndValues:
        """Wait for both directions, and return the received message."""
        for request in self.requests:
            request.wait()
        return self.received


class Ring(NamedTuple):
    """Exchange of keys and values with the two neighbours in a ring of ranks, in one message each."""

    group: Any

    def around(self, k: Tensor, v: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield k and v of every rank: this rank's first, then those of the rank before it, and so on around the ring.

        Each block is sent on before it is yielded, so the next one travels while the caller computes. Every rank must
        read the iterator to its end.

        Collectives:
            One exchange with the neighbours (`pass_on`) for each block but the last.
        """
        message = KeysAndValues.copy_of(k, v)
        size = self.group.size()
        for distance in range(size):
            is_last = distance == size - 1
            incoming = None if is_last else self.pass_on(message)
            yield message.k, message.v
            if incoming is not None:
                message = incoming.wait()

    def pass_on(self, message: KeysAndValues) -> _Incoming:
        """Send a message to the next rank of the ring, and receive one of the same shapes from the rank before.

        Returns:
            The exchange under way. Its `wait` returns the received message.

        Collectives:
            One send and one receive, which every rank of the ring must call.
        """
        group, size, rank = self.group, self.group.size(), self.group.rank()
        received = torch.empty_like(message.buffer)
        operations = [
            dist.P2POp(dist.isend, message.buffer, group=group, group_peer=(rank + 1) % size),
            dist.P2POp(dist.irecv, received, group=group, group_peer=(rank - 1) % size),
        ]
        requests = dist.batch_isend_irecv(operations)
        return _Incoming(KeysAndValues.of_buffer(received, message), message.buffer, requests)
