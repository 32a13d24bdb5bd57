"""DeepSeek-V3, whose values have another head size than its queries and keys, on every kernel and over ranks.

It is compared with transformers' model on one process, freed of its float32: logits and the gradients of all
parameters, in float64, over packed documents and over plain rows.
"""

import functools

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from dtrain import models
from dtrain.attention.blocks import Products
from dtrain.attention.context import GatherKernel, RingKernel
from dtrain.attention.kernels import GroupedKernel, SdpaKernel
from dtrain.attention.varlen import VarlenKernel
from dtrain.inference.cached_attention import Decode, Prefill
from dtrain.inference.kv_cache import KeyValues, position_bytes
from dtrain.models.common.micro_batch import MicroBatchContext
from dtrain.parallel.apply import apply_plan
from dtrain.parallel.context.batch import shard_sequence
from dtrain.parallel.experts import shard_experts
from tests.attention.dense import packed_rows, visible
from tests.attention.flash import WrittenFlash
from tests.cases import run_cases
from tests.models.float64 import in_float64
from tests.models.oracle import VOCAB, grads, make, save

RTOL = 1e-9
ROWS, LENGTH = 2, 24
VARIANTS = ("deepseek-v3", "moonlight")  # queries with a latent and without, rotary pairs of both kinds


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    """The directory of each variant's weights."""
    return {variant: save(make(variant), tmp_path_factory.mktemp(variant)) for variant in VARIANTS}


def rows_of(packed):
    """ids, positions and documents [ROWS, LENGTH], and the gradient of the logits, 0 on padding."""
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(0, VOCAB, (ROWS, LENGTH), generator=draw)
    grad = torch.randn(ROWS, LENGTH, VOCAB, generator=draw, dtype=torch.float64)
    if not packed:
        return ids, torch.arange(LENGTH).expand(ROWS, -1), None, grad
    positions, documents = packed_rows(ROWS, LENGTH)
    return ids, positions, documents, grad.masked_fill((documents < 0)[..., None], 0)


def expected_of(variant, packed):
    """Logits and gradients of transformers' model, by names of files."""
    ids, positions, documents, grad = rows_of(packed)
    model = make(variant)
    model = in_float64(model, model.config.qk_rope_head_dim)
    bias = torch.zeros(ROWS, 1, LENGTH, LENGTH, dtype=torch.float64)
    bias = bias.masked_fill(~visible(positions, documents, None)[:, None], float("-inf"))
    logits = model(input_ids=ids, position_ids=positions, attention_mask=bias, use_cache=False).logits
    logits.backward(grad)
    return logits.detach(), grads(model)


def assert_close(found, expected):
    assert found.shape == expected.shape
    assert (found - expected).abs().max() <= RTOL * expected.abs().max()


def compare(model, directory_rows, expected, part=lambda tensor: tensor, whole_of=lambda grad: grad):
    """Run `model` on rows, and compare it with what is `expected` of the whole. part: a rank's part of [B, S, ..];
    whole_of: makes a rank's gradient that of all ranks."""
    ids, positions, documents, grad = (None if stream is None else part(stream) for stream in directory_rows)
    logits, gradients = expected
    found = model.logits(model.model(ids, MicroBatchContext(positions, documents)))
    found = found.full_tensor() if isinstance(found, DTensor) else found
    found.backward(grad)
    right = part(logits)
    if documents is not None:
        found, right = found[documents >= 0], right[documents >= 0]
    assert_close(found, right)
    ours = grads(model, whole_of=whole_of)
    assert ours.keys() == gradients.keys()
    for name, values in gradients.items():
        assert_close(ours[name], values)


KERNELS = {
    "masks": SdpaKernel,
    "masks by groups": lambda: GroupedKernel(SdpaKernel()),
    "varlen": lambda: VarlenKernel(WrittenFlash()),
}
KERNELS_OF_CP = {
    "gathered": lambda mesh: GatherKernel(SdpaKernel(), mesh),
    "gathered by groups": lambda mesh: GroupedKernel(GatherKernel(SdpaKernel(), mesh)),
    "ring": lambda mesh: RingKernel(SdpaKernel(), mesh),
    "ring by products": lambda mesh: RingKernel(SdpaKernel(), mesh, Products()),
    "varlen gathered": lambda mesh: VarlenKernel(WrittenFlash(), GatherKernel(SdpaKernel(), mesh)),
    "varlen ring": lambda mesh: VarlenKernel(WrittenFlash(), RingKernel(SdpaKernel(), mesh)),
}


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("variant", VARIANTS)
def test_one_process(directories, variant, packed):
    expected = expected_of(variant, packed)
    for make_kernel in KERNELS.values():
        model = models.from_pretrained(directories[variant], dtype=torch.float64)
        model.use_kernel(make_kernel())
        compare(model, rows_of(packed), expected)


def summed(grad):
    dist.all_reduce(grad)
    return grad


def on_cp_ranks(rank, directory, variant, packed):
    """Each rank has its tokens, and a part of the gradients."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))["cp"]
    expected = expected_of(variant, packed)
    for make_kernel in KERNELS_OF_CP.values():
        model = models.from_pretrained(directory, dtype=torch.float64)
        model.use_kernel(make_kernel(mesh))
        part = functools.partial(shard_sequence, rank=rank, size=2)
        compare(model, rows_of(packed), expected, part, summed)


@pytest.mark.processes
def test_context_parallel(directories):
    """Keys and values gathered in one message, or passed on in one, by masks and by variable-length calls."""
    cases = {f"{packed=}": (directories["deepseek-v3"], "deepseek-v3", packed) for packed in (True, False)}
    run_cases(on_cp_ranks, 2, cases)


def on_tp_ranks(rank, directory, variant, sequence):
    """Each rank has two of the four heads, and computes the latents of all tokens or, under `sequence`, of its own."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = models.from_pretrained(directory, dtype=torch.float64)
    apply_plan(model, mesh, model.plan, sequence_parallel=sequence)
    compare(model, rows_of(True), expected_of(variant, True), whole_of=lambda grad: grad.full_tensor())
    kept = {name: type(parameter.placements[0]).__name__ for name, parameter in model.named_parameters()}
    of_latents = {kind for name, kind in kept.items() if "_a_" in name}
    of_heads = {kind for name, kind in kept.items() if name.endswith(("q_b_proj.weight", "kv_b_proj.weight"))}
    assert (of_latents, of_heads) == ({"Replicate"}, {"Shard"})


@pytest.mark.processes
def test_tensor_parallel(directories):
    cases = {}
    for variant in VARIANTS:
        for sequence in (False, True):
            cases[f"{variant}, {sequence=}"] = directories[variant], variant, sequence
    run_cases(on_tp_ranks, 2, cases)


def on_ep_ranks(rank, directory, variant):
    """Each rank has half of the experts, and one of the two rows."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("ep", "tp"))
    model = models.from_pretrained(directory, dtype=torch.float64)
    shard_experts(model, mesh["ep"], mesh["tp"])

    def whole_of(grad):
        return grad.full_tensor() if isinstance(grad, DTensor) else summed(grad)

    compare(model, rows_of(True), expected_of(variant, True), lambda tensor: tensor[rank, None], whole_of)


@pytest.mark.processes
def test_expert_parallel(directories):
    run_cases(on_ep_ranks, 2, {variant: (directories[variant], variant) for variant in VARIANTS})


@torch.no_grad()
@pytest.mark.parametrize("variant", VARIANTS)
def test_prompts_and_decoding_over_the_cache(directories, variant):
    """Prompts of 7 tokens, read at once, and five tokens more, one after another: the logits of whole rows."""
    ids, _, _, _ = rows_of(packed=False)
    prompt, length = 7, 12
    theirs = make(variant)
    theirs = in_float64(theirs, theirs.config.qk_rope_head_dim)
    expected = theirs(input_ids=ids[:, :length]).logits
    model = models.from_pretrained(directories[variant], dtype=torch.float64)
    store = KeyValues.of(model.config)
    prompts = [store.new_prompt(prompt) for _ in range(ROWS)]
    found = [model.next_logits(ids[:, :prompt], Prefill(store, prompts, ids.device))]
    for _ in range(ROWS):
        store.new_row()
    decode = Decode(store, prompts, ids.device)
    for token in range(prompt, length):
        decode.begin()
        assert decode.positions.tolist() == [[token]] * ROWS
        found.append(model.next_logits(ids[:, token : token + 1], decode))
        decode.end()
        decode.lengthen()
    assert_close(torch.stack(found, 1), expected[:, prompt - 1 :])
    # Nothing is padded in the cache: heads of 10 + 8 elements in keys, and of 14 in values.
    keys, values = prompts[0].pool.layer(0, torch.empty(4, 18), torch.empty(4, 14))
    assert (keys.shape[-1], values.shape[-1]) == (18, 14)
    assert position_bytes(model.config, torch.float32) == 3 * 4 * (18 + 14) * 4
