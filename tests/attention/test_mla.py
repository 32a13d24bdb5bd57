"""Multi-head latent attention, whose values have another head size than its queries and keys, on every kernel.

The model is transformers' DeepSeek-V3 with dense layers, and the attention of its layers replaced by `LatentAttention`,
which calls dtrain's kernels. It is compared with transformers' own attention on one process: logits and the gradients
of all parameters, in float64, over packed documents.
"""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from dtrain.attention.blocks import Products
from dtrain.attention.context import GatherKernel, RingKernel
from dtrain.attention.groups import GroupedKernel
from dtrain.attention.kernels import SdpaKernel
from dtrain.attention.varlen import VarlenKernel
from dtrain.attention.visibility import Visibility
from dtrain.inference.cached_attention import Decode, Prefill
from dtrain.inference.kv_cache import KeyValues
from dtrain.parallel.collectives import enter_region, leave_region
from dtrain.parallel.context.batch import shard_sequence
from tests.attention.dense import packed_rows, visible
from tests.attention.flash import WrittenFlash
from tests.cases import run_cases

RTOL = 1e-9
ROWS, LENGTH, VOCAB, HEADS, LAYERS = 2, 24, 40, 4, 2
NOPE, ROPE, VALUE = 6, 4, 7  # sizes of a head: of q and k 6 + 4, of v 7
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": LAYERS,
    "first_k_dense_replace": LAYERS,  # no layer is a mixture, whose router computes in float32
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "q_lora_rank": 12,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": NOPE,
    "qk_rope_head_dim": ROPE,
    "v_head_dim": VALUE,
}


class LatentAttention(nn.Module):
    """DeepSeek-V3's attention (arXiv:2412.19437, section 2.1.1) with the parameters' names of transformers.

    Under tensor parallel a rank computes its heads: it takes the rows of `q_b_proj` and `kv_b_proj` that belong to
    them, and the columns of `o_proj`. What leads to the latents is computed by each rank.
    """

    def __init__(self, original, tp_group=None):
        super().__init__()
        self.index, self.scale, self.tp_group = original.layer_idx, original.scaling, tp_group
        for name in ("q_a_proj", "q_a_layernorm", "kv_a_proj_with_mqa", "kv_a_layernorm"):
            setattr(self, name, getattr(original, name))
        self.q_b_proj = local_part(original.q_b_proj, 0, tp_group)
        self.kv_b_proj = local_part(original.kv_b_proj, 0, tp_group)
        self.o_proj = local_part(original.o_proj, 1, tp_group)

    def forward(self, hidden_states, position_embeddings, attend, **_):
        """Return [B, S, D]; attend: of the layer's index, q, k, v and scale, with heads [B, S, H, ..]."""
        cos, sin = (table[:, :, None, : ROPE // 2] for table in position_embeddings)  # [B, S, 1, ROPE / 2]
        latent_q = self.q_a_layernorm(self.q_a_proj(hidden_states))
        latent_kv, k_rope = self.kv_a_proj_with_mqa(hidden_states).split([SIZES["kv_lora_rank"], ROPE], -1)
        latent_kv = self.kv_a_layernorm(latent_kv)
        if self.tp_group is not None:
            latent_q, latent_kv, k_rope = (enter_region(x, self.tp_group) for x in (latent_q, latent_kv, k_rope))
        q_nope, q_rope = self.q_b_proj(latent_q).unflatten(-1, (-1, NOPE + ROPE)).split([NOPE, ROPE], -1)
        k_nope, v = self.kv_b_proj(latent_kv).unflatten(-1, (-1, NOPE + VALUE)).split([NOPE, VALUE], -1)
        q = torch.cat([q_nope, rotated(q_rope, cos, sin)], -1)
        k_rope = rotated(k_rope[:, :, None], cos, sin).expand(*k_nope.shape[:3], ROPE)  # one for all heads
        k = torch.cat([k_nope, k_rope], -1)
        out = self.o_proj(attend(self.index, q, k, v, self.scale).flatten(2))
        return (out if self.tp_group is None else leave_region(out, self.tp_group)), None


def local_part(linear, dim, group):
    """This rank's part of a projection, cut along `dim` of its weight."""
    if group is None:
        return linear
    weight = linear.weight.detach().chunk(group.size(), dim)[group.rank()].clone()
    part = nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype)
    part.weight = nn.Parameter(weight)
    return part


def rotated(x, cos, sin):
    """Interleaved pairs of x [B, S, heads, ROPE], rotated."""
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.cat([even * cos - odd * sin, odd * cos + even * sin], -1)


def deepseek():
    """transformers' model in float64. Its own norms compute in float32."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    torch.manual_seed(0)
    model = DeepseekV3ForCausalLM(DeepseekV3Config(**SIZES, attn_implementation="sdpa")).double()
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child).__name__ == "DeepseekV3RMSNorm":
                weight = torch.rand_like(child.weight) + 0.5
                norm = nn.RMSNorm(len(weight), eps=1e-6, dtype=torch.float64)
                norm.weight = nn.Parameter(weight)
                setattr(module, name, norm)
    return model


def with_latent_attention(model, tp_group=None):
    for layer in model.model.layers:
        layer.self_attn = LatentAttention(layer.self_attn, tp_group)
    return model


def logits_of(model, ids, positions, **options):
    return model(input_ids=ids, position_ids=positions, use_cache=False, **options).logits


def by_kernel(kernel, prepared):
    """What `LatentAttention` attends with."""
    return lambda index, q, k, v, scale: kernel(q, k, v, prepared, scale)


def rows_of(packed):
    """ids, positions and documents [ROWS, LENGTH], and the gradient of the logits."""
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(0, VOCAB, (ROWS, LENGTH), generator=draw)
    grad = torch.randn(ROWS, LENGTH, VOCAB, generator=draw, dtype=torch.float64)
    if packed:
        return ids, *packed_rows(ROWS, LENGTH), grad
    return ids, torch.arange(LENGTH).expand(ROWS, -1), None, grad


def expected_of(packed):
    """Logits and gradients of transformers' own attention, by name."""
    ids, positions, documents, grad = rows_of(packed)
    model = deepseek()
    bias = torch.zeros(ROWS, 1, LENGTH, LENGTH, dtype=torch.float64)
    bias = bias.masked_fill(~visible(positions, documents, None)[:, None], float("-inf"))
    logits = logits_of(model, ids, positions, attention_mask=bias)
    logits.backward(grad)
    return logits.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


def compare(found, expected):
    assert found.shape == expected.shape
    assert (found - expected).abs().max() <= RTOL * expected.abs().max()


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
@pytest.mark.parametrize("name", KERNELS)
def test_one_process(name, packed):
    ids, positions, documents, grad = rows_of(packed)
    expected, gradients = expected_of(packed)
    kernel = KERNELS[name]()
    seen = Visibility(LENGTH, LENGTH, None, positions, positions, documents, documents, rows=ROWS)
    model = with_latent_attention(deepseek())
    attend = by_kernel(kernel, kernel.prepare(seen, torch.float64, ids.device))
    logits = logits_of(model, ids, positions, attention_mask=torch.zeros(1, 1, 1, 1), attend=attend)
    logits.backward(grad)
    compare(logits, expected)
    for parameter, values in model.named_parameters():
        compare(values.grad, gradients[parameter])


def on_cp_ranks(rank, name, packed):
    """Each rank has its tokens, and a part of the gradients."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))["cp"]
    kernel = KERNELS_OF_CP[name](mesh)
    ids, positions, documents, grad = (
        None if stream is None else shard_sequence(stream, rank, 2) for stream in rows_of(packed)
    )
    expected, gradients = expected_of(packed)
    key_positions, key_documents = kernel.keys(positions, documents)
    seen = Visibility(LENGTH // 2, LENGTH, None, positions, key_positions, documents, key_documents, rows=ROWS)
    model = with_latent_attention(deepseek())
    attend = by_kernel(kernel, kernel.prepare(seen, torch.float64, ids.device))
    logits = logits_of(model, ids, positions, attention_mask=torch.zeros(1, 1, 1, 1), attend=attend)
    logits.backward(grad)
    compare(logits, shard_sequence(expected, rank, 2))
    for parameter, values in model.named_parameters():
        dist.all_reduce(values.grad)
        compare(values.grad, gradients[parameter])


@pytest.mark.processes
def test_context_parallel():
    """Keys and values gathered in one message, or passed on in one, by masks and by variable-length calls."""
    cases = {f"{name}, {packed=}": (name, packed) for name in KERNELS_OF_CP for packed in (True, False)}
    run_cases(on_cp_ranks, 2, cases)


def on_tp_ranks(rank, packed):
    """Each rank has two of the four heads."""
    ids, positions, documents, grad = rows_of(packed)
    expected, gradients = expected_of(packed)
    group, kernel = dist.group.WORLD, SdpaKernel()
    seen = Visibility(LENGTH, LENGTH, None, positions, positions, documents, documents, rows=ROWS)
    model = with_latent_attention(deepseek(), group)
    attend = by_kernel(kernel, kernel.prepare(seen, torch.float64, ids.device))
    logits = logits_of(model, ids, positions, attention_mask=torch.zeros(1, 1, 1, 1), attend=attend)
    logits.backward(grad)
    compare(logits, expected)
    for parameter, values in model.named_parameters():
        right = gradients[parameter]
        if values.shape != right.shape:
            right = right.chunk(2, int(parameter.endswith("o_proj.weight")))[rank]
        compare(values.grad, right)


@pytest.mark.processes
def test_tensor_parallel():
    run_cases(on_tp_ranks, 2, {f"{packed=}": (packed,) for packed in (True, False)})


@torch.no_grad()
def test_prompts_and_decoding_over_the_cache():
    """Prompts of 7 tokens, read at once, and five tokens more, one after another: the logits of whole rows."""
    ids, positions, _, _ = rows_of(packed=False)
    prompt, length = 7, 12
    model, latent = deepseek(), with_latent_attention(deepseek())
    expected = logits_of(model, ids[:, :length], positions[:, :length])
    store = KeyValues([None] * LAYERS)
    prompts = [store.new_prompt(prompt) for _ in range(ROWS)]
    mask = torch.zeros(1, 1, 1, 1)
    prefill = Prefill(store, prompts, ids.device)
    found = [logits_of(latent, ids[:, :prompt], positions[:, :prompt], attention_mask=mask, attend=prefill.attend)]
    for _ in range(ROWS):
        store.new_row()
    decode = Decode(store, prompts, ids.device)
    for token in range(prompt, length):
        decode.begin()
        assert decode.positions.tolist() == [[token]] * ROWS
        found.append(
            logits_of(latent, ids[:, token : token + 1], decode.positions, attention_mask=mask, attend=decode.attend)
        )
        decode.end()
        decode.lengthen()
    compare(torch.cat(found, 1), expected)
    keys, values = prompts[0].pool.layer(0, torch.empty(HEADS, NOPE + ROPE), torch.empty(HEADS, VALUE))
    assert (keys.shape[-1], values.shape[-1]) == (NOPE + ROPE, VALUE)  # nothing is padded in the cache
