"""The pretend device itself: it holds memory, refuses what CUDA refuses, and its kernels give what a dense computation
in float64 gives."""

import pytest
import torch
from torch.nn.attention.varlen import varlen_attn

from tests.pretend import cuda, journal
from tests.pretend.card import Card
from tests.pretend.worlds import run_pretend

DEVICE = "cuda"


def refused(words, action):
    with pytest.raises((RuntimeError, torch.OutOfMemoryError), match=words):
        action()


def devices_are_kept_apart(rank):
    here, there = torch.ones(3, device=DEVICE), torch.ones(3)
    assert here.device == torch.device("cuda", rank) and not here.is_cpu
    assert torch.equal(
        (here + here[0] + torch.tensor(1.0)).cpu(), torch.full((3,), 3.0)
    )  # a number may lie on the host
    assert (
        torch.empty(2, device=DEVICE).isnan().all() and (torch.empty(2, dtype=torch.int32, device=DEVICE) == -1).all()
    )
    refused("same device", lambda: here + there)
    refused("same device", lambda: torch.cat([here, there]))
    refused("same device", lambda: here.new_ones(3, 3) @ there)
    refused("same device", lambda: torch.nn.functional.embedding(torch.zeros(1, dtype=torch.int64), here[:, None]))
    refused("same device", lambda: there.index_select(0, torch.zeros(1, dtype=torch.int64, device=DEVICE)))
    with pytest.raises(TypeError):
        here.numpy()
    if rank == 1:
        refused("same device", lambda: here + torch.ones(3, device="cuda:0"))
    with pytest.raises(RuntimeError, match="ordinal"):
        torch.ones(1, device="cuda:7")


def test_operands_on_two_devices_are_refused():
    run_pretend(devices_are_kept_apart, 2)


def memory_is_counted(rank):
    before = torch.cuda.memory_allocated()
    kept = torch.zeros(1000, device=DEVICE)  # 4,000 bytes in 8 blocks of 512
    assert torch.cuda.memory_allocated() - before == 4096
    (kept + 1).sum()
    assert torch.cuda.max_memory_allocated() - before == 2 * 4096 + 512
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.max_memory_allocated() - before == 4096
    refused("CUDA out of memory", lambda: torch.zeros(2**18, device=DEVICE))
    assert torch.cuda.get_device_properties(0).total_memory == 2**20
    assert torch.cuda.get_device_name() == "NVIDIA T4" and torch.cuda.get_device_capability() == (7, 5)
    del kept
    assert torch.cuda.memory_allocated() == before


def test_memory_is_counted_and_ends():
    run_pretend(memory_is_counted, 1, card=Card(name="NVIDIA T4", capability=(7, 5), memory=2**20))


def waits_are_noted(rank):
    some = torch.arange(5.0, device=DEVICE)
    pinned = torch.ones(5, pin_memory=True)

    def waits(action):
        journal.clear()
        action()
        return journal.total("sync")

    assert waits(lambda: some.sum().item()) == 1
    assert waits(lambda: some.nonzero()) == 1
    assert waits(lambda: some[some > 2]) == 1
    assert waits(lambda: some.cpu()) == 1
    assert waits(lambda: torch.tensor([1, 2], device=DEVICE)) == 1
    assert waits(lambda: some[torch.tensor([1, 2])]) == 1
    assert waits(lambda: torch.ones(3).to(DEVICE, non_blocking=True)) == 0 and journal.total("pageable") == 1
    assert waits(lambda: pinned.to(DEVICE, non_blocking=True)) == 0 and journal.total("pageable") == 0
    assert waits(lambda: pinned.copy_(some, non_blocking=True)) == 0
    assert waits(lambda: (some * 2 + torch.zeros(5, device=DEVICE)).topk(2)) == 0


def test_waits_of_the_host_are_noted():
    run_pretend(waits_are_noted)


def nccl_takes_what_is_on_the_card(rank):
    import torch.distributed as dist

    value = torch.full((2,), float(rank + 1), device=DEVICE)
    dist.all_reduce(value)
    assert value.tolist() == [3.0, 3.0]
    on_host = torch.ones(2)
    dist.all_reduce(on_host)  # by gloo, which the group has beside it
    half = dist.new_group([0, 1], backend="nccl")
    refused("No backend type associated with device type cpu", lambda: dist.all_reduce(on_host, group=half))
    refused("contiguous", lambda: dist.all_reduce(torch.ones(4, 4, device=DEVICE)[:, ::2]))
    refused("contiguous", lambda: dist.all_reduce(torch.ones(4, 2, device=DEVICE).t()))  # dense, and NCCL takes it not
    mesh = torch.distributed.device_mesh.init_device_mesh("cuda", (2, 1), mesh_dim_names=("a", "b"))
    part = torch.ones(1, device=DEVICE)
    dist.all_reduce(part, group=mesh["a"].get_group())
    assert part.item() == 2.0 and journal.total("nccl") >= 2


def test_nccl_refuses_the_hosts_tensors():
    run_pretend(nccl_takes_what_is_on_the_card, 2)


def dense(q, k, v, lengths, window, scale):
    """[T, H, hd] and [H, T] in float64: queries and keys of each document lie at the ends of one another."""
    out, lse = torch.zeros(q.shape, dtype=torch.float64), torch.full(q.shape[1::-1], torch.inf, dtype=torch.float64)
    q, k, v = (one.double() for one in (q, k, v))
    at = 0, 0
    for queries, keys in lengths:
        a, b = slice(at[0], at[0] + queries), slice(at[1], at[1] + keys)
        at = a.stop, b.stop
        groups = q.shape[1] // k.shape[1]
        scores = torch.einsum("qhd,khd->hqk", q[a], k[b].repeat_interleave(groups, 1)) * scale
        distance = torch.arange(queries)[:, None] + keys - queries - torch.arange(keys)
        left, right = (queries + keys if side < 0 else side for side in window)
        hidden = (distance > left) | (-distance > right)
        scores = scores.masked_fill(hidden, -torch.inf)
        total = scores.logsumexp(-1)
        lse[:, a] = torch.where(total == -torch.inf, torch.inf, total)
        weights = (scores - total[..., None]).exp().nan_to_num(0.0)
        out[a] = torch.einsum("hqk,khd->qhd", weights, v[b].repeat_interleave(groups, 1))
    return out, lse


LENGTHS = [(3, 7), (5, 5), (4, 2), (1, 6), (2, 0), (600, 700)]


def varlen_gives_the_dense_numbers(rank):
    draw = torch.Generator().manual_seed(1)
    total_q, total_k = (sum(length[i] for length in LENGTHS) for i in (0, 1))
    parts = [torch.randn(n, h, 16, generator=draw).half() for n, h in ((total_q, 4), (total_k, 2), (total_k, 2))]
    grad = torch.randn(total_q, 4, 16, generator=draw).half()
    ends = [torch.tensor([0, *(length[i] for length in LENGTHS)]).cumsum(0).int().to(DEVICE) for i in (0, 1)]
    longest = [max(length[i] for length in LENGTHS) for i in (0, 1)]
    for window in ((-1, -1), (-1, 0), (2, 0), (3, 1)):
        leaves = [one.double().requires_grad_() for one in parts]
        wanted, wanted_lse = dense(*leaves, LENGTHS, window, 0.3)
        wanted_grads = torch.autograd.grad(wanted, leaves, grad.double())
        cards = [one.to(DEVICE).requires_grad_() for one in parts]
        out, lse = varlen_attn(
            *cards, *ends, *longest, scale=0.3, window_size=window, enable_gqa=True,
            return_aux=torch.nn.attention.varlen.AuxRequest(lse=True),
        )  # fmt: skip
        grads = torch.autograd.grad(out, cards, grad.to(DEVICE))
        torch.testing.assert_close(lse.cpu().double(), wanted_lse, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(out.cpu().double(), wanted, rtol=1e-3, atol=1e-3)
        for found, expected in zip(grads, wanted_grads, strict=True):
            torch.testing.assert_close(found.cpu().double(), expected, rtol=4e-3, atol=4e-3)


def test_variable_length_flash_is_aligned_to_the_ends():
    run_pretend(varlen_gives_the_dense_numbers)


def blocks_are_merged(rank):
    """The backward of a part of the keys, from the output and the log-sum-exp of all of them."""
    draw = torch.Generator().manual_seed(2)
    parts = [torch.randn(n, 2, 8, generator=draw).bfloat16().to(DEVICE) for n in (12, 20, 20)]
    grad = torch.randn(12, 2, 8, generator=draw).bfloat16().to(DEVICE)
    forward, backward = torch.ops.aten._flash_attention_forward, torch.ops.aten._flash_attention_backward

    def ends(*values):
        return torch.tensor(values, dtype=torch.int32, device=DEVICE)

    q, k, v = parts
    whole = ends(0, 12), ends(0, 20), 12, 20, 0.0
    out, lse, *_ = forward(q, k, v, *whole, False, False)
    state = torch.zeros(2, dtype=torch.uint64, device=DEVICE), torch.empty(0, device=DEVICE)
    expected = backward(grad, q, k, v, out, lse, *whole, False, *state)
    found = []
    for piece in (slice(0, 8), slice(8, 20)):
        size = piece.stop - piece.start
        found.append(
            backward(grad, q, k[piece], v[piece], out, lse, ends(0, 12), ends(0, size), 12, size, 0.0, False, *state)
        )
    torch.testing.assert_close((found[0][0].float() + found[1][0].float()), expected[0].float(), rtol=0.02, atol=0.02)
    for index in (1, 2):
        assert torch.equal(torch.cat([one[index] for one in found]), expected[index])


def test_flash_backward_takes_the_log_sum_exp_of_a_larger_softmax():
    run_pretend(blocks_are_merged)


def flash_refuses(rank):
    forward = torch.ops.aten._flash_attention_forward
    good = torch.zeros(4, 2, 16, dtype=torch.bfloat16, device=DEVICE)
    ends = torch.tensor([0, 4], dtype=torch.int32, device=DEVICE)

    def call(q, cumulative, longest=4):
        return lambda: forward(q, q, q, cumulative, cumulative, longest, longest, 0.0, True, False)

    call(good, ends)()
    refused("fp16 and bf16", call(good.float(), ends))
    refused("multiple of 8", call(good[..., :12].contiguous(), ends))
    refused("at most 256", call(good.new_zeros(4, 2, 264), ends))
    refused("contiguous last dimension", call(good.transpose(1, 2).contiguous().transpose(1, 2), ends))
    refused("int32", call(good, ends.long()))
    refused("same device", call(good, ends.cpu()))
    refused("longer than 3", call(good, ends, 3))


def test_variable_length_flash_refuses_what_the_kernel_refuses():
    run_pretend(flash_refuses)


def sdpa_takes(rank, expected):
    from torch.nn.functional import scaled_dot_product_attention as sdpa

    def kernel(dtype, *, heads=(4, 4), size=64, mask=False, keys=8, length=8):
        q = torch.zeros(1, heads[0], length, size, dtype=dtype, device=DEVICE, requires_grad=True)
        k = torch.zeros(1, heads[1], keys, size, dtype=dtype, device=DEVICE)
        bias = torch.zeros(1, 1, length, keys, dtype=dtype, device=DEVICE) if mask else None
        journal.clear()
        sdpa(q, k, k, attn_mask=bias, is_causal=not mask, enable_gqa=heads[0] != heads[1]).sum().backward()
        assert q.grad.device == q.device
        return next(what.split()[1] for what, _ in journal.entries("kernel") if what.startswith("sdpa"))[:-1]

    half = torch.bfloat16
    assert kernel(half) == expected
    assert kernel(half, mask=True) == ("CUDNN_ATTENTION" if expected == "CUDNN_ATTENTION" else "EFFICIENT_ATTENTION")
    assert kernel(half, size=256) == "FLASH_ATTENTION"
    assert kernel(half, heads=(4, 2), size=256, mask=True) == "MATH"
    assert kernel(torch.float32) == "EFFICIENT_ATTENTION"
    assert kernel(torch.float32, heads=(4, 2)) == kernel(torch.float64) == "MATH"
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
        assert kernel(half) == "FLASH_ATTENTION"
    refused("which holds all scores", lambda: kernel(torch.float64, length=1025, keys=1025))


@pytest.mark.parametrize("capability, expected", [((9, 0), "CUDNN_ATTENTION"), ((8, 0), "FLASH_ATTENTION")])
def test_sdpa_chooses_by_the_card(capability, expected):
    run_pretend(sdpa_takes, 1, expected, card=Card(capability=capability))


def kernels_are_the_cpus(rank):
    """Each of SDPA's kernels against the CPU's in float64, forward and backward."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import rms_norm, scaled_dot_product_attention as sdpa

    draw = torch.Generator().manual_seed(3)
    parts = [torch.randn(2, 3, 9, 16, generator=draw).bfloat16() for _ in range(4)]
    bias = (
        torch.where(torch.rand(2, 1, 9, 9, generator=draw) < 0.3, -torch.inf, 0.0).fill_diagonal_(0.0)
        if False
        else None
    )
    masks = torch.zeros(2, 1, 9, 9).masked_fill_(torch.rand(2, 1, 9, 9, generator=draw) < 0.3, -torch.inf)
    masks.diagonal(dim1=-2, dim2=-1).fill_(0.0)
    cases = [(kernel, None) for kernel in ("FLASH", "CUDNN", "EFFICIENT")] + [
        (k, masks) for k in ("CUDNN", "EFFICIENT")
    ]
    for name, bias in cases:
        leaves = [one.double().requires_grad_() for one in parts[:3]]
        wanted = sdpa(*leaves, attn_mask=None if bias is None else bias.double(), is_causal=bias is None)
        expected = [wanted, *torch.autograd.grad(wanted, leaves, parts[3].double())]
        cards = [one.to(DEVICE).requires_grad_() for one in parts[:3]]
        with sdpa_kernel(getattr(SDPBackend, f"{name}_ATTENTION")):
            mask = None if bias is None else bias.bfloat16().to(DEVICE)
            out = sdpa(*cards, attn_mask=mask, is_causal=bias is None)
        found = [out, *torch.autograd.grad(out, cards, parts[3].to(DEVICE))]
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one.cpu().double(), other, rtol=0.02, atol=0.02)
    x, weight, grad = (
        torch.randn(5, 8, generator=draw),
        torch.randn(8, generator=draw),
        torch.randn(5, 8, generator=draw),
    )
    results = []
    for device in ("cpu", DEVICE):
        leaves = [one.to(device).requires_grad_() for one in (x, weight)]
        out = rms_norm(leaves[0], (8,), leaves[1], 1e-6)
        results.append([one.cpu() for one in (out, *torch.autograd.grad(out, leaves, grad.to(device)))])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    assert any("fused" in what or "sdpa" in what for what, _ in journal.entries("kernel"))
    a, b = parts[0][0, 0].to(DEVICE), parts[1][0, 0].T.to(DEVICE)
    assert torch.equal(torch.mm(a, b, out_dtype=torch.float32).cpu(), a.cpu().float() @ b.cpu().float())
    total = torch.ones(len(a), b.shape[1], device=DEVICE)
    torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    assert torch.equal(total.cpu(), 1 + a.cpu().float() @ b.cpu().float())


def test_emulated_kernels_give_the_cpus_numbers():
    run_pretend(kernels_are_the_cpus)


def of_this_process(rank):
    return cuda.card()


def test_the_card_of_a_world_is_its_own():
    assert run_pretend(of_this_process, 2, card=Card(devices=4, name="A"))[1].devices == 4
    assert [card.name for card in run_pretend(of_this_process, 1)] == [Card().name]
