"""Models of dtrain inside the contexts of context parallel, and models whose attention cannot be seen there.

dtrain's models with a context-parallel kernel give the numbers of one process. Attention of other models is in
test_context_attention.py.
"""

import threading
from functools import partial
from unittest.mock import patch

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.modules.module import _has_any_global_hook
from torch.utils.checkpoint import checkpoint

from dtrain import models
from dtrain.attention.context import GatherKernel, RingKernel
from dtrain.attention.kernels import SdpaKernel
from dtrain.memory import compilation as regions
from dtrain.models.common.micro_batch import MicroBatchContext
from dtrain.parallel.context import create_context_parallel_ctx, make_cp_batch_and_ctx
from dtrain.parallel.context.batch import shard_sequence
from tests.cases import run_cases
from tests.tiny import VOCAB, save_weights, write_model
from tests.world import run_world

KERNELS_OF_CP = {"gather": GatherKernel, "ring": RingKernel}


def a_batch(length=12):
    ids = torch.randint(0, VOCAB, (2, length), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids.clone()}


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, **sizes)).double().eval()


def logits_of(model, batch):
    return model(input_ids=batch["input_ids"], position_ids=batch["position_ids"]).logits


def attention_out_of_sight(rank, size, kind):
    """Check a model that calls attention in compiled code, and one that calls none that the context knows."""
    mesh, batch = init_device_mesh("cpu", (size,), mesh_dim_names=("cp",)), a_batch()
    model = llama() if kind == "compiled" else torch.nn.Embedding(VOCAB, 4)
    call = partial(logits_of, model) if kind == "compiled" else lambda batch: model(batch["input_ids"])
    if kind == "compiled":
        model.compile(backend="eager")
    ctx, batch = make_cp_batch_and_ctx(mesh, batch)
    if size == 1:  # whole rows: right, and nothing to say
        with ctx():
            call(batch | {"position_ids": torch.arange(12)[None]})
        with create_context_parallel_ctx(mesh, [batch["input_ids"]], [1], ()):
            call(batch | {"position_ids": torch.arange(12)[None]})
        return
    for _ in range(2):  # the second time the code is compiled
        ctx, batch = make_cp_batch_and_ctx(mesh, a_batch())
        reason = "compiled" if kind == "compiled" else "none of dtrain's .* computed no attention"
        with pytest.raises(RuntimeError, match=reason), ctx():
            call(batch)
        assert batch["position_ids"].tolist() == [list(range(12))] and batch["input_ids"].shape == (2, 6)
        assert not _has_any_global_hook()


@pytest.mark.filterwarnings("ignore:Using `torch.compile:UserWarning")
def test_attention_that_the_context_cannot_see_is_an_error():
    llama()  # its classes are imported here, and not by every rank
    run_cases(attention_out_of_sight, 1, {"none": (1, "none")})
    run_cases(attention_out_of_sight, 2, {one: (2, one) for one in ("compiled", "none")})


def beside_a_model(rank):
    """Check that other models and other errors are left alone."""
    mesh, model = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",)), llama()
    ctx, batch = make_cp_batch_and_ctx(mesh, a_batch())
    with pytest.raises(ZeroDivisionError), ctx():
        logits_of(model, batch)
        _ = 1 / 0
    assert batch["position_ids"].shape == (1, 12) and not _has_any_global_hook()

    ctx, batch = make_cp_batch_and_ctx(mesh, a_batch())
    with ctx():  # a model of another thread is another's
        other = threading.Thread(target=logits_of, args=(model, dict(batch)))
        other.start()
        other.join()

    # The inner context's error passes through the outer one, whose buffers are restored.
    buffer, embedding = torch.arange(8)[None], torch.nn.Embedding(VOCAB, 4)
    ctx, batch = make_cp_batch_and_ctx(mesh, a_batch())
    outer = create_context_parallel_ctx(mesh["cp"], [buffer], [1], ())
    with pytest.raises(RuntimeError, match="Embedding ran"), outer, ctx():
        embedding(batch["input_ids"])
    assert buffer.tolist() == [list(range(8))] and not _has_any_global_hook()


def test_an_exception_inside_is_not_hidden_and_other_models_are_left_alone():
    run_world(beside_a_model, 2)


def a_kernel_of_another_dimension(rank, directory):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    model = models.from_pretrained(directory, dtype=torch.float64)
    ctx, batch = make_cp_batch_and_ctx(mesh, a_batch())
    model.use_kernel(GatherKernel(SdpaKernel(), mesh["tp"]))
    with pytest.raises(RuntimeError, match="none of dtrain's context-parallel kernels over these 2 ranks"), ctx():
        model(batch["input_ids"], batch["position_ids"])
    # Another mesh of the same ranks has a group of its own.
    model.use_kernel(GatherKernel(SdpaKernel(), init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))["a"]))
    ctx, batch = make_cp_batch_and_ctx(mesh, a_batch())
    with ctx():
        model(batch["input_ids"], batch["position_ids"])


def test_a_kernel_over_other_ranks_of_the_same_number_is_an_error(tmp_path):
    run_world(a_kernel_of_another_dimension, 4, save_weights(write_model(tmp_path / "model")))


def a_model_of_ours(rank, directory, name, variant):
    mesh, length = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",)), 12
    whole = models.from_pretrained(directory, dtype=torch.float64)
    model = models.from_pretrained(directory, dtype=torch.float64)
    model.use_kernel(KERNELS_OF_CP[name](SdpaKernel(), mesh["cp"]))
    whole.use_kernel(SdpaKernel())
    up = torch.randn(2, length, VOCAB, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    if variant == "compiled":
        with patch("torch.compile", partial(torch.compile, backend="eager")):  # hooks are Dynamo's, kernels are not
            regions.compile_layers(model)
    elif variant == "compiled whole":
        model.compile(backend="eager")
    batch = a_batch(length)
    expected = whole(batch["input_ids"])
    (expected * up).sum().backward()
    ctx, batch = make_cp_batch_and_ctx(mesh, batch)

    def loss_of(ids, positions):
        logits = (
            model.logits(model.model(ids, MicroBatchContext(positions)))
            if variant == "hidden"
            else model(ids, positions)
        )
        return logits, (logits * shard_sequence(up, rank, 2)).sum()

    with ctx():
        ids, positions = batch["input_ids"], batch["position_ids"]
        if variant == "embedded":
            assert model.model.embed_tokens(ids).shape[1] == length // 2  # first a module without a kernel
        if variant == "recomputed":
            logits, loss = checkpoint(loss_of, ids, positions.clone(), use_reentrant=False)
        else:
            logits, loss = loss_of(ids, positions)
        if variant != "outside":
            loss.backward()
    if variant == "outside":
        loss.backward()
    share = shard_sequence(expected.detach(), rank, 2)
    error = ((logits - share).abs().max() / share.abs().max()).item()
    parts = {name: one.grad for name, one in model.named_parameters()}
    for one in parts.values():
        torch.distributed.all_reduce(one)
    wholes = {name: one.grad for name, one in whole.named_parameters()}
    return max([error, *(((parts[n] - g).abs().max() / g.abs().max()).item() for n, g in wholes.items())])


VARIANTS = {"gather": ["plain", "recomputed", "hidden"], "ring": ["plain", "outside", "recomputed", "embedded"]}
COMPILED = ["compiled", "compiled whole"]


def test_a_model_of_ours_gives_the_numbers_of_one_process(tmp_path):
    llama = save_weights(write_model(tmp_path / "llama", "llama", num_hidden_layers=1))
    of_one = {"num_hidden_layers": 1, "layer_types": ["linear_attention"]}
    linear = save_weights(write_model(tmp_path / "linear", "qwen3.5", **of_one))
    cases = {f"llama, {name}, {one}": (llama, name, one) for name, variants in VARIANTS.items() for one in variants}
    cases |= {f"llama, {one}": (llama, name, one) for name, one in zip(KERNELS_OF_CP, COMPILED, strict=True)}
    cases |= {f"linear, {name}, {one}": (linear, name, one) for name, one in (("gather", "hidden"), ("ring", "plain"))}
    errors = {name: max(ranks) for name, ranks in run_cases(a_model_of_ours, 2, cases).items()}
    assert not {name: error for name, error in errors.items() if not error < 1e-10}
