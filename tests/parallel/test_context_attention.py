"""Attention of other code inside the contexts of context parallel: the numbers of one process, or an error at the call.

Expected values come from transformers on one process, or from a softmax written out by hand.
"""

import itertools
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils.checkpoint import CheckpointError

from dtrain.parallel.context import create_context_parallel_ctx, make_cp_batch_and_ctx
from dtrain.parallel.context.batch import gather_sequence, shard_sequence
from tests.cases import run_cases
from tests.tiny import VOCAB
from tests.world import run_world

SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
}
WINDOWS = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}


class WideNorm(nn.Module):
    """Gemma's norm in the dtype of its input; transformers sums the gradient of its weight in float32."""

    def __init__(self, norm):
        super().__init__()
        self.weight, self.eps = norm.weight, norm.eps

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * (1 + self.weight)


# Models whose positions, heads or windows are written unlike Llama's. Keys have no bias: its gradient is zero but for
# rounding.
OTHERS = {
    "OPT": {"ffn_dim": 24, "num_hidden_layers": 2, "word_embed_proj_dim": 16, "dropout": 0.0, "enable_bias": False},
    "Bert": {"intermediate_size": 24, "num_hidden_layers": 2, "is_decoder": True},
    "Falcon": {"num_hidden_layers": 2, "alibi": False},
    "Exaone4": SIZES | WINDOWS,
}
HEADS = {
    "OPT": "OPTForCausalLM",
    "Bert": "BertLMHeadModel",
    "Falcon": "FalconForCausalLM",
    "Exaone4": "Exaone4ForCausalLM",
}


def model_of(family, attention="sdpa", **changes):
    import transformers

    options = SIZES | (WINDOWS if family == "gemma3" else {"sliding_window": 5} if family == "mistral" else {})
    options |= {"attn_implementation": attention} | changes
    kinds = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
        "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
        "gemma3": (transformers.Gemma3TextConfig, transformers.Gemma3ForCausalLM),
    }
    if family in OTHERS:
        options = {"vocab_size": VOCAB, "hidden_size": 16, "num_attention_heads": 4, **OTHERS[family]} | changes
        kinds[family] = (getattr(transformers, f"{family}Config"), getattr(transformers, HEADS[family]))
    config, model = kinds[family]
    torch.manual_seed(0)
    model = model(config(**options)).double()
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child).__name__ == "Gemma3RMSNorm":
                setattr(module, name, WideNorm(child))
    return model


@pytest.fixture(scope="module", autouse=True)
def _transformers_is_loaded():
    """Load the models in this process: every rank would take seconds to import them."""
    for family in ("llama", "qwen3", "mistral", "gemma3", *OTHERS):
        model_of(family)


def rows(length, packed=()):
    """Return ids, labels and positions of two rows; packed: the lengths of the documents of each row."""
    generator = torch.Generator().manual_seed(length)
    ids, labels = torch.randint(0, VOCAB, (2, 2, length), generator=generator)
    positions = torch.arange(length)[None]
    if packed:
        positions = torch.stack([torch.cat([torch.arange(n) for n in lengths]) for lengths in packed])
    return {"input_ids": ids, "labels": labels, "position_ids": positions}


def loss_of(model, batch, **options):
    streams = {name: batch[name] for name in ("input_ids", "position_ids", "attention_mask") if name in batch}
    logits = model(**streams, **options).logits
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum")


def errors_against(loss, model, expected, reference):
    """Return the largest relative difference of the loss and gradients, summed over ranks, from one process's."""
    total = loss.detach().clone()
    dist.all_reduce(total)
    errors = [((total - expected) / expected).abs().item()]
    for one, other in zip(model.parameters(), reference.parameters(), strict=True):
        grad = one.grad.clone()
        dist.all_reduce(grad)
        errors.append(((grad - other.grad).abs().max() / other.grad.abs().max()).item())
    return max(errors)


def a_model(rank, size, family, length, options):
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("cp",))
    use_cache, packed = options.get("use_cache", False), options.get("packed", ())
    model, reference = model_of(family), model_of(family)
    batch = rows(length, packed)
    expected = loss_of(reference, batch, use_cache=use_cache)
    expected.backward()
    if "checkpoint" in options:
        model.activation_checkpointing_enable({"use_reentrant": options["checkpoint"]})
        model.train()
    if "rotate" in options:
        kept = {batch["input_ids"], batch["labels"]}  # which the backward reads
        ctx = partial(create_context_parallel_ctx, mesh, [*batch.values()], [1] * 3, kept, options["rotate"])
    else:
        ctx, batch = make_cp_batch_and_ctx(mesh, batch)
    with ctx():
        loss = loss_of(model, batch, use_cache=use_cache)
        if not options.get("outside"):
            loss.backward()
    if options.get("outside"):
        loss.backward()
    return errors_against(loss, model, expected.detach(), reference)


PACKED = [[5, 1, 7, 11], [13, 11]]
CASES = {
    2: [
        *(("llama", length, {"use_cache": cached}) for length in (13, 24) for cached in (False, True)),
        ("qwen3", 22, {"outside": True}),
        ("qwen3", 24, {"rotate": "alltoall"}),
        ("gemma3", 13, {}),
        ("gemma3", 30, {"use_cache": True}),
        ("gemma3", 24, {"rotate": "ring", "outside": True}),
        ("gemma3", 24, {"packed": PACKED}),
        ("gemma3", 24, {"checkpoint": False}),
        ("llama", 24, {"checkpoint": True}),
        ("llama", 24, {"packed": PACKED, "rotate": "alltoall"}),
        # One rank's tokens have no jump in their positions, so its mask does not show the documents: the second's
        # tokens 2 to 5, then the first's 0, 1, 6 and 7. With a cache transformers has no documents.
        *(
            ("llama", 8, {"packed": [lengths, lengths], "use_cache": cached})
            for lengths in ([2, 6], [4, 4])
            for cached in (False, True)
        ),
    ],
    3: [
        ("llama", 17, {}),
        ("mistral", 17, {}),
        ("OPT", 17, {}),
        ("Falcon", 17, {}),
        ("Exaone4", 25, {"packed": [[8, 17], [25]]}),
        ("Falcon", 24, {"rotate": "alltoall"}),
        ("qwen3", 24, {"packed": PACKED}),
        ("gemma3", 25, {"packed": [[8, 17], [25]]}),
        ("gemma3", 24, {"rotate": "addtoall"}),
    ],
    4: [("llama", 9, {}), ("qwen3", 24, {"packed": PACKED, "use_cache": False}), ("gemma3", 40, {})],
}


@pytest.mark.parametrize("size", CASES)
def test_models_of_transformers_give_the_numbers_of_one_process(size):
    cases = {f"{family} {length} {options}": (size, family, length, options) for family, length, options in CASES[size]}
    errors = {name: max(ranks) for name, ranks in run_cases(a_model, size, cases).items()}
    assert not {name: error for name, error in errors.items() if not error < 1e-9}


def attention_by_hand(q, k, v, visible=None, bias=None, scale=None):
    """Return softmax attention [B, H, Q, hd]; visible and bias are broadcast to [B, H, Q, K]."""
    k, v = (part.repeat_interleave(q.shape[1] // part.shape[1], 1) for part in (k, v))
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if bias is not None:
        scores = scores + bias
    if visible is not None:
        scores = scores.masked_fill(~visible, float("-inf"))
    weights = scores.exp()
    return weights / weights.sum(-1, keepdim=True) @ v


def bare_calls(rank, size, rotate, kind):
    """Check the output and gradients of calls without any module."""
    mesh, length = init_device_mesh("cpu", (size,), mesh_dim_names=("cp",))["cp"], 4 * size
    torch.manual_seed(2)
    value_size = {"wide values": 5, "narrow values": 2}.get(kind, 3)
    q, k, v, up = (
        torch.randn(2, heads, length, hd, dtype=torch.float64)
        for heads, hd in ((4, 3), (2, 3), (2, value_size), (4, value_size))
    )
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    some = torch.rand(2, 1, length, length) < 0.5
    some |= torch.eye(length, dtype=torch.bool)
    bias = torch.randn(2, 4, length, length, dtype=torch.float64)
    seen = torch.arange(length) < torch.tensor([length - 2, length])[:, None]
    rows_of = partial(shard_sequence, rank=rank, size=size, dim=2)
    local_causal = torch.ones(length // size, length // size, dtype=torch.bool).tril()
    local_padded = local_causal & shard_sequence(seen, rank, size)[:, None, None, :]
    arguments, expected = {
        "all keys": ({}, {}),
        "causal": ({"is_causal": True}, {"visible": causal}),
        "scale": ({"is_causal": True, "scale": 0.3}, {"visible": causal, "scale": 0.3}),
        "wide values": ({"is_causal": True}, {"visible": causal}),
        "narrow values": ({"is_causal": True}, {"visible": causal}),
        "causal mask": ({"attn_mask": local_causal}, {"visible": causal}),
        "padded mask": ({"attn_mask": local_padded}, {"visible": causal & seen[:, None, None, :]}),
        "float mask": (
            {"attn_mask": torch.zeros(local_causal.shape, dtype=torch.float64).masked_fill(~local_causal, -1e400)},
            {"visible": causal},
        ),
        "own rows": ({"attn_mask": rows_of(some)}, {"visible": some}),
        "own biases": ({"attn_mask": rows_of(bias)}, {"bias": bias}),
        "all rows": ({"attn_mask": some}, {"visible": some}),
        "keys": ({"attn_mask": seen[:, None, None, :]}, {"visible": seen[:, None, None, :]}),
    }[kind]
    inputs = [part.clone().requires_grad_() for part in (q, k, v)]
    whole = attention_by_hand(*inputs, **expected)
    (whole * up).sum().backward()
    locals_ = [rows_of(part).clone().requires_grad_() for part in (q, k, v)]
    with create_context_parallel_ctx(mesh, [torch.zeros(2, length)], [1], (), rotate):
        out = F.scaled_dot_product_attention(*locals_, enable_gqa=True, **arguments)
        (out * rows_of(up)).sum().backward()
    errors = [(out - rows_of(whole)).abs().max().item()]
    errors += [(one.grad - rows_of(other.grad)).abs().max().item() for one, other in zip(locals_, inputs, strict=True)]
    return max(errors)


KINDS = ["all keys", "causal", "scale", "wide values", "narrow values", "causal mask", "padded mask", "float mask"]
KINDS += ["own rows", "own biases", "all rows", "keys"]


@pytest.mark.parametrize("size", [2, 3])
def test_bare_calls_attend_to_the_keys_of_all_ranks(size):
    ways = itertools.product(["allgather", "alltoall"], KINDS)
    cases = {f"{rotate} {kind}": (size, rotate, kind) for rotate, kind in ways}
    errors = {name: max(ranks) for name, ranks in run_cases(bare_calls, size, cases).items()}
    assert not {name: error for name, error in errors.items() if not error < 1e-12}


class Encoder(nn.Module):
    """Attention in both directions over embeddings."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 4).double()

    def forward(self, ids):
        x = self.embed(ids)[:, None]
        return F.scaled_dot_product_attention(x, x, x)[:, 0]


def padding_in_both_directions(rank):
    """Check that no query sees padding, of the caller's rows (9 and 6 tokens) or up to a multiple of 4."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    torch.manual_seed(0)
    model, batch = Encoder(), rows(9)
    x, lengths = model.embed(batch["input_ids"])[:, None], torch.tensor([9, 6])
    seen = torch.arange(9) < lengths[:, None]
    for mask in (None, seen.long()):
        visible = torch.ones(1, dtype=torch.bool) if mask is None else seen[:, None, None, :]
        expected = attention_by_hand(x, x, x, visible)[:, 0]
        ctx, batch = make_cp_batch_and_ctx(mesh, rows(9) | ({} if mask is None else {"attention_mask": mask}))
        with ctx():
            out = model(batch["input_ids"])
        joined = gather_sequence(out.detach(), mesh["cp"].get_group())
        assert joined.shape[1] == 12 and torch.allclose(joined[:, :9], expected, rtol=1e-12)


def rotation_gathers_no_keys(rank):
    """Count the collectives of a call: one for its description, and those of keys where they are gathered."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))["cp"]
    counts = {}
    for rotate in ("allgather", "alltoall"):
        x = torch.randn(1, 2, 4, 4, requires_grad=True)
        with create_context_parallel_ctx(mesh, [torch.zeros(1, 8)], [1], (), rotate), CommDebugMode() as debug:
            F.scaled_dot_product_attention(x, x, x, is_causal=True).sum().backward()
        counts[rotate] = [count for _, count in sorted(debug.get_comm_counts().items(), key=str)]
    assert counts == {"allgather": [2, 1], "alltoall": [1]}


def nested_contexts(rank):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    model, batch = model_of("llama"), rows(12)
    expected = loss_of(model, batch).detach()
    outer = create_context_parallel_ctx(mesh["cp"], [torch.arange(12)[None]], [1], ())
    ctx, batch = make_cp_batch_and_ctx(mesh, batch)
    with outer, ctx(), torch.no_grad():
        loss = loss_of(model, batch)
    dist.all_reduce(loss)
    assert torch.allclose(loss, expected, rtol=1e-12)


def recomputed_outside(rank):
    """Check that activations which are recomputed after the context, from local keys, are an error."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    model = model_of("llama").train()
    model.activation_checkpointing_enable({"use_reentrant": False})
    ctx, batch = make_cp_batch_and_ctx(mesh, rows(12))
    with ctx():
        loss = loss_of(model, batch)
    with pytest.raises(CheckpointError):
        loss.backward()
    model.activation_checkpointing_enable({"use_reentrant": True})
    ctx, batch = make_cp_batch_and_ctx(mesh, rows(12))
    with pytest.raises(RuntimeError, match="call backward inside the context"), ctx():
        loss_of(model, batch)
    ctx, batch = make_cp_batch_and_ctx(mesh, rows(12))
    with ctx(), torch.no_grad():  # nothing will be computed again
        loss_of(model, batch)


def other_lengths_of_a_batch(rank):
    """Check rows that are cut along another dimension, and queries without a batch."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))["cp"]
    torch.manual_seed(0)
    x = torch.randn(3, 8, 2, dtype=torch.float64)  # heads, tokens, head size
    expected = attention_by_hand(x[None], x[None], x[None], visible=torch.ones(8, 8, dtype=torch.bool).tril())[0]
    buffer = x.transpose(0, 1).contiguous()  # tokens first
    with create_context_parallel_ctx(mesh, [buffer], [0], ()):
        part = buffer.transpose(0, 1)
        out = F.scaled_dot_product_attention(part, part, part, is_causal=True)
    assert torch.allclose(out, shard_sequence(expected, rank, 2), rtol=1e-12)


def test_encoders_nested_contexts_recomputation_and_calls_without_a_batch():
    functions = (
        padding_in_both_directions,
        rotation_gathers_no_keys,
        nested_contexts,
        recomputed_outside,
        other_lengths_of_a_batch,
    )
    run_cases(lambda rank, function: function(rank), 2, {one.__name__: (one,) for one in functions})


def raises(rank, error, message, call):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    torch.manual_seed(0)
    ctx, batch = make_cp_batch_and_ctx(mesh, rows(8))
    seen = None
    try:
        with ctx():
            try:
                call(rank, batch)
            except (NotImplementedError, ValueError, torch._dynamo.exc.Unsupported) as problem:
                seen = problem
                raise
    except (RuntimeError, ValueError) as problem:
        assert problem is seen, f"raised on exit: {problem}"
    assert isinstance(seen, error) and message in str(seen), repr(seen)
    assert batch["position_ids"].shape[1] == 8


def part(batch, tokens=4):
    return torch.randn(2, 2, tokens, 4, dtype=torch.float64)


def bare(rank, batch, **options):
    x = part(batch)
    F.scaled_dot_product_attention(x, x, x, **options)


def cross(rank, batch):
    F.scaled_dot_product_attention(part(batch), part(batch, 3), part(batch, 3))


def patches(rank, batch):
    F.scaled_dot_product_attention(part(batch, 6), part(batch, 6), part(batch, 6))


def other_mask_on_one_rank(rank, batch):
    mask = torch.ones(4, 4, dtype=torch.bool)
    bare(rank, batch, attn_mask=mask if rank else mask.tril())


def without_positions(rank, batch, family="llama"):
    model_of(family).eval()(input_ids=batch["input_ids"], use_cache=False)


def with_labels(rank, batch):
    model_of("llama")(**batch)


def with_a_model(rank, batch, family="llama", attention="sdpa", before=None, **changes):
    model = model_of(family, attention, **changes)
    if before is not None:
        before(model)
    use_cache = changes.get("use_cache", False)
    loss_of(model, batch, use_cache=use_cache)


class Module(nn.Module):
    """A module whose forward is a function of embeddings [B, S, 4]."""

    def __init__(self, function, **attributes):
        super().__init__()
        self.function = function
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, ids):
        return self.function(F.one_hot(ids % 4, 4).double())


def by_module(rank, batch, function, **attributes):
    Module(function, **attributes)(batch["input_ids"])


def attend(x, **options):
    return F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], **options)


def flex(x):
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention(x[:, None], x[:, None], x[:, None])


def varlen(x):
    from torch.nn.attention.varlen import varlen_attn

    ends = torch.tensor([0, 4], dtype=torch.int32)
    return varlen_attn(x[0][:, None], x[0][:, None], x[0][:, None], ends, ends, 4, 4)


class Types:
    layer_types = ("full_attention", "linear_attention")


class Chunks:
    attention_chunk_size = 4


REFUSED = {
    "dropout": (NotImplementedError, "dropout of 0.1", partial(bare, dropout_p=0.1, is_causal=True)),
    "cross": (NotImplementedError, "Only self-attention", cross),
    "patches": (NotImplementedError, "Only self-attention", patches),
    "all local keys": (ValueError, "meaning of attn_mask", partial(bare, attn_mask=torch.ones(4, 4) > 0)),
    "bias": (ValueError, "adds a bias", partial(bare, attn_mask=torch.full((4, 4), 0.5, dtype=torch.float64))),
    "another length": (ValueError, "is neither over", partial(bare, attn_mask=torch.ones(4, 5) > 0)),
    "mask and causal": (ValueError, "not both", partial(bare, attn_mask=torch.ones(4, 8) > 0, is_causal=True)),
    "no positions": (ValueError, "position_ids", without_positions),
    "no positions, summed": (ValueError, "position_ids", partial(without_positions, family="OPT")),
    "no positions, from a buffer": (ValueError, "position_ids", partial(without_positions, family="Bert")),
    "labels": (NotImplementedError, "shifted labels", with_labels),
    "eager": (NotImplementedError, "eager attention", partial(with_a_model, attention="eager")),
    "window unseen": (
        ValueError,
        "sliding window of 2",
        partial(by_module, function=partial(attend, is_causal=True), sliding_window=2),
    ),
    "window both ways": (NotImplementedError, "both directions", partial(by_module, function=attend, sliding_window=2)),
    "linear": (
        NotImplementedError,
        "linear_attention",
        partial(by_module, function=partial(attend, is_causal=True), config=Types()),
    ),
    "chunked": (
        NotImplementedError,
        "chunked_attention",
        partial(by_module, function=partial(attend, is_causal=True), config=Chunks()),
    ),
    "convolution": (
        NotImplementedError,
        "convolution",
        partial(by_module, function=lambda x: F.conv1d(x.transpose(1, 2), torch.ones(4, 4, 3).double(), padding=2)),
    ),
    "multi-head": (
        NotImplementedError,
        "MultiheadAttention",
        partial(by_module, function=lambda x: nn.MultiheadAttention(4, 2, batch_first=True).double()(x, x, x)),
    ),
    "varlen": (NotImplementedError, "varlen", partial(by_module, function=varlen)),
    "flex": ((NotImplementedError, torch._dynamo.exc.Unsupported), "", partial(by_module, function=flex)),
}


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_what_cannot_be_computed_over_all_ranks_raises_at_the_call():
    run_cases(raises, 2, REFUSED)
    run_world(one_rank_refuses, 2)


def one_rank_refuses(rank):
    """Check that a rank whose own mask is fine raises as well, rather than wait for the other one."""
    message = "rank 1 of the 2" if rank == 0 else "meaning of attn_mask"
    error = NotImplementedError if rank == 0 else ValueError
    raises(rank, error, message, other_mask_on_one_rank)


def test_calls_after_the_context_are_left_alone():
    run_world(after, 2)


def after(rank):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    ctx, batch = make_cp_batch_and_ctx(mesh, rows(8))
    x = part(batch)
    with ctx():
        sharded = F.scaled_dot_product_attention(x, x, x, is_causal=True)
    local = F.scaled_dot_product_attention(x, x, x, is_causal=True)
    visible = torch.ones(4, 4, dtype=torch.bool).tril()
    assert torch.allclose(local, attention_by_hand(x, x, x, visible)) and not torch.allclose(sharded, local)
