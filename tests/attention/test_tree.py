"""Rows in which sequences share their beginning: the numbers of each sequence computed separately, in float64."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from dtrain.attention.context import GatherKernel, RingKernel
from dtrain.attention.kernels import GroupedKernel, SdpaKernel
from dtrain.attention.tree import TreePacking, split_nodes
from dtrain.attention.varlen import TreeKernel, VarlenKernel
from dtrain.attention.visibility import MaskStreams, Visibility
from dtrain.parallel.context.batch import shard_sequence
from tests.attention.dense import tensors
from tests.attention.flash import WrittenFlash
from tests.attention.forest import FORESTS, drawn
from tests.cases import run_cases

CPU = torch.device("cpu")
WINDOWS = [None, 1, 6, 45]
HEADS = [(4, 2, 8), (3, 1, 5), (2, 2, 11)]  # query heads, key heads, size of a value
KERNELS_OF_CP = {
    "gather": lambda mesh: GatherKernel(SdpaKernel(), mesh),
    "ring": lambda mesh: RingKernel(SdpaKernel(), mesh),
    "gather by heads": lambda mesh: GroupedKernel(GatherKernel(SdpaKernel(), mesh)),
    "calls gather": lambda mesh: TreeKernel(masked=GatherKernel(SdpaKernel(), mesh)),
    "calls ring": lambda mesh: TreeKernel(masked=RingKernel(SdpaKernel(), mesh)),
    "calls gather by heads": lambda mesh: GroupedKernel(TreeKernel(masked=GatherKernel(SdpaKernel(), mesh))),
    "varlen gather": lambda mesh: VarlenKernel(WrittenFlash(), GatherKernel(SdpaKernel(), mesh)),
    "varlen ring": lambda mesh: VarlenKernel(WrittenFlash(), RingKernel(SdpaKernel(), mesh)),
}


@pytest.mark.parametrize("num_chunks", [2, 4, 6])
@pytest.mark.parametrize("node_lengths", [[1], [5, 3, 2], [7, 1, 1, 1, 12, 4], [3, 3, 3, 3, 3, 3, 3]])
def test_every_chunk_has_the_same_share_of_every_node(node_lengths, num_chunks):
    """Pieces of a node, and chunks, differ by at most one token, and no token is lost."""
    pieces, chunk_length = split_nodes(node_lengths, num_chunks)
    assert [sum(of_node) for of_node in zip(*pieces, strict=True)] == node_lengths
    for of_node in zip(*pieces, strict=True):
        assert max(of_node) - min(of_node) <= 1
    chunk_sizes = [sum(of_chunk) for of_chunk in pieces]
    assert chunk_length - 1 <= min(chunk_sizes) <= max(chunk_sizes) == chunk_length


class Expected:
    """q, k, v, sinks and a gradient of the output for a forest, and the results of `Forest.attend`, in preorder."""

    def __init__(self, forest, window, heads, has_sinks):
        num_heads, key_heads, value_size = heads
        self.q, self.k, self.v, self.grad = tensors(
            1, sum(forest.lengths), num_heads, key_heads, 8, value_size=value_size
        )
        self.sinks = torch.linspace(-2, 4, num_heads, dtype=torch.float64) if has_sinks else None
        leaves = [tensor.clone().requires_grad_() for tensor in (self.q, self.k, self.v)]
        sinks = None if self.sinks is None else self.sinks.clone().requires_grad_()
        out = forest.attend(*leaves, window, 0.3, sinks)
        out.backward(self.grad)
        self.results = [out.detach(), *(leaf.grad for leaf in leaves)]
        self.sink_grad = None if sinks is None else sinks.grad


def largest_error(found, expected):
    if not expected.numel():  # a rank without tokens
        return 0.0
    difference = found.detach().double() - expected
    return float(difference.abs().max() / expected.abs().max().clamp(min=1))


def visibility_of(kernel, window, positions, nodes, last, packing):
    """The packing alone where the kernel computes from it, else the streams of all keys."""
    length = positions.shape[1]
    inner = kernel.inner if isinstance(kernel, GroupedKernel) else kernel
    if isinstance(inner, VarlenKernel):
        # Calls compute every row but those of a ring under a window.
        assert kernel.computes_from(packing, window) == (inner.masked.ring() is None or window is None)
    if kernel.computes_from(packing, window):
        assert kernel.keys(MaskStreams(positions, nodes, last), packing) is None
        return Visibility(length, length, window, packing=packing)
    keys = kernel.keys(MaskStreams(positions, nodes, last))
    return Visibility(
        *(length, keys.positions.shape[1], window, positions, keys.positions, nodes, keys.documents),
        key_last_documents=keys.last_documents,
    )


def check_row(kernel, forest, window, heads, has_sinks, dtype, limit, padding=3):
    expected = Expected(forest, window, heads, has_sinks)
    positions, nodes, last = forest.streams(padding)
    length = positions.shape[1]
    packing = TreePacking.of([*forest.lengths, padding], [*forest.parents, -1])
    visibility = visibility_of(kernel, window, positions, nodes, last, packing)
    padded = []
    for tensor in (expected.q, expected.k, expected.v, expected.grad):
        padded.append(torch.nn.functional.pad(tensor, (0, 0, 0, 0, 0, padding), value=9.0).to(dtype))
    leaves = [tensor.requires_grad_() for tensor in padded[:3]]
    sinks = None if expected.sinks is None else expected.sinks.to(dtype).requires_grad_()
    out = kernel(*leaves, kernel.prepare(visibility, dtype, CPU), 0.3, sinks)
    num_tokens = length - padding
    out[:, :num_tokens].backward(padded[3][:, :num_tokens])
    for found, right in zip([out, *(leaf.grad for leaf in leaves)], expected.results, strict=True):
        assert found.dtype == dtype
        assert largest_error(found[:, :num_tokens], right) <= limit
    if sinks is not None:
        assert largest_error(sinks.grad, expected.sink_grad) <= limit


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("name", FORESTS)
def test_a_row_has_the_numbers_of_its_sequences(name, window):
    for heads in HEADS:
        check_row(SdpaKernel(), FORESTS[name], window, heads, False, torch.float64, 1e-12)
    check_row(GroupedKernel(SdpaKernel()), FORESTS[name], window, HEADS[0], False, torch.float64, 1e-12)
    check_row(SdpaKernel(), FORESTS[name], window, HEADS[0], True, torch.float64, 1e-12)
    check_row(SdpaKernel(), FORESTS[name], window, HEADS[0], True, torch.float32, 1e-5)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("case", [*FORESTS, *range(12)], ids=str)
def test_calls_have_the_numbers_of_the_sequences(case, window):
    forest = FORESTS[case] if case in FORESTS else drawn(case)
    for heads in HEADS:
        for has_sinks in (False, True):
            check_row(TreeKernel(), forest, window, heads, has_sinks, torch.float64, 1e-12)
    check_row(TreeKernel(), forest, window, HEADS[0], True, torch.float32, 1e-5)
    check_row(GroupedKernel(TreeKernel()), forest, window, HEADS[0], True, torch.float64, 1e-12)
    flash = WrittenFlash()
    check_row(VarlenKernel(flash), forest, window, HEADS[0], False, torch.float64, 1e-12)
    assert flash.calls


def check_on_ranks(rank, kernel_name, size, forest, window, heads, has_sinks, dtype, limit):
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("cp",))["cp"]
    kernel = KERNELS_OF_CP[kernel_name](mesh)
    expected = Expected(forest, window, heads, has_sinks)
    order = forest.in_chunks(2 * size)
    is_token = order >= 0

    def lay_out(tensor, pad):
        """This rank's part of the row in chunks, given all tokens in preorder."""
        row = tensor[:, order.clamp(min=0)]
        row[:, ~is_token] = pad
        return shard_sequence(row, rank, size)

    positions, nodes, last = (lay_out(stream, pad) for stream, pad in zip(forest.streams(), (0, -1, -1), strict=True))
    packing = TreePacking.of(forest.lengths, forest.parents, 2 * size)
    visibility = visibility_of(kernel, window, positions, nodes, last, packing)
    leaves = [lay_out(tensor, 9.0).to(dtype).requires_grad_() for tensor in (expected.q, expected.k, expected.v)]
    sinks = None if expected.sinks is None else expected.sinks.to(dtype).requires_grad_()
    out = kernel(*leaves, kernel.prepare(visibility, dtype, CPU), 0.3, sinks)
    out.backward(lay_out(expected.grad, 0.0).to(dtype))
    is_local_token = nodes[0] >= 0
    for found, right in zip([out, *(leaf.grad for leaf in leaves)], expected.results, strict=True):
        assert largest_error(found[:, is_local_token], lay_out(right, 0.0)[:, is_local_token]) <= limit
    if sinks is not None:
        dist.all_reduce(sinks.grad)
        assert largest_error(sinks.grad, expected.sink_grad) <= limit


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_have_the_numbers_of_the_sequences(size):
    cases = {}
    for kernel in KERNELS_OF_CP:
        forests = (
            FORESTS if kernel in ("gather", "ring") else FORESTS | {f"drawn {seed}": drawn(seed) for seed in range(6)}
        )
        for number, (name, forest) in enumerate(forests.items()):
            for window in WINDOWS:
                heads, has_sinks = HEADS[number % 3], window in (None, 6) and number % 2 == 0
                cases[f"{kernel}, {name}, {window}"] = (
                    *(kernel, size, forest, window, heads, has_sinks, torch.float64, 1e-12),
                )
    run_cases(check_on_ranks, size, cases)


def pairs(calls):
    """Pairs of query and key, each causal segment counted as a rectangle."""
    total = 0
    for call in calls:
        total += sum(q * k for q, k in zip(call.query_lengths, call.key_lengths, strict=True))
    return total


def test_a_prompt_is_read_once():
    """Eight completions of 128 behind a prompt of 512: one segment over the prompt, and a third of the pairs."""
    packing = TreePacking.of([512] + [128] * 8, [-1] + [0] * 8)
    own, of_prompt = packing.of_rows(None)
    assert own.query_lengths == own.key_lengths == [512] + [128] * 8
    assert (of_prompt.query_lengths, of_prompt.key_lengths) == ([1024], [512])
    assert pairs(packing.of_rows(None)) == 512**2 + 8 * 128**2 + 1024 * 512
    # A window that hides nothing copies no keys, and one that hides something copies at most window - 1 per node.
    assert packing.of_rows(640) == packing.of_rows(None)
    (under_window,) = packing.of_rows(100)
    assert sum(under_window.key_lengths) == 512 + 8 * (128 + 99)


@pytest.mark.parametrize("exchange", ["over_gathered", "in_ring"])
def test_ranks_have_the_same_work(exchange):
    """Within a percent, although the completions are as many as there are chunks, and short."""
    size = 4
    packing = TreePacking.of([4096] + [509] * 8, [-1] + [0] * 8, 2 * size)
    work = []
    for rank in range(size):
        calls = getattr(packing, exchange)(None, rank, size)
        work.append(pairs(calls) if exchange == "over_gathered" else pairs(sum(calls, [])))
    assert max(work) <= 1.01 * min(work)


@pytest.mark.parametrize("window", [None, 20])
def test_only_the_inputs_and_the_output_are_saved(window):
    """Neither masks nor copies of the prompt's keys."""
    forest = FORESTS["a prompt with three completions"]
    expected = Expected(forest, window, HEADS[0], False)
    leaves = [tensor.clone().requires_grad_() for tensor in (expected.q, expected.k, expected.v)]
    length = sum(forest.lengths)
    packing = TreePacking.of(forest.lengths, forest.parents)
    kernel = TreeKernel()
    prepared = kernel.prepare(Visibility(length, length, window, packing=packing), torch.float64, CPU)
    saved = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = kernel(*leaves, prepared, 0.3)
    log_sum_exp_bytes = out.shape[1] * out.shape[2] * out.element_size()
    assert sum(saved.values()) <= sum(tensor.nbytes for tensor in (*leaves, out)) + log_sum_exp_bytes


@pytest.mark.parametrize(
    ("lengths", "parents", "message"),
    [
        ([3, 0], [-1, 0], "node 1 has 0 tokens"),
        ([3, 2, 2, 1], [-1, 0, -1, 1], "node 3 is not behind its parent 1"),
        ([3, 2], [-1, 1], "node 1 is not behind its parent 1"),
    ],
)
def test_nodes_that_are_no_forest_in_preorder(lengths, parents, message):
    with pytest.raises(ValueError, match=message):
        TreePacking.of(lengths, parents)
