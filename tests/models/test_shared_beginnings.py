"""Models on a row in which sequences share their beginning, against the same model on each sequence separately."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from dtrain import models
from dtrain.attention.context import GatherKernel, RingKernel
from dtrain.attention.kernels import GroupedKernel, SdpaKernel
from dtrain.attention.tree import TreePacking
from dtrain.attention.varlen import TreeKernel, VarlenKernel
from dtrain.models.common.micro_batch import MicroBatchContext
from dtrain.parallel.context.batch import shard_sequence
from tests.attention.flash import WrittenFlash
from tests.attention.forest import Forest
from tests.cases import run_cases
from tests.models.oracle import VARIANTS, VOCAB

FOREST = Forest([21, 5, 8, 1, 14, 6], [-1, 0, 1, 1, 0, -1])
# Windows and layers without one, sinks, latent attention. gemma3 has 7 layers, 6 of them with a window of 9.
FAMILIES = {"gemma3": "native", "gpt-oss": "native", "deepseek-v3": "native", "mistral-window": "transformers"}
KERNELS = {
    "masks": SdpaKernel,
    "calls": TreeKernel,
    "calls by groups": lambda: GroupedKernel(TreeKernel()),
    "varlen": lambda: VarlenKernel(WrittenFlash()),
}
KERNELS_OF_CP = {
    "gathered masks": lambda mesh: GatherKernel(SdpaKernel(), mesh),
    "gathered calls": lambda mesh: TreeKernel(masked=GatherKernel(SdpaKernel(), mesh)),
    "ring of calls, masks under windows": lambda mesh: TreeKernel(masked=RingKernel(SdpaKernel(), mesh)),
}


def model_of(variant, implementation):
    config = models.parse_config(VARIANTS[variant]().to_dict(), implementation=implementation)
    model = models.build(config, dtype=torch.float64)
    models.init_weights(model, 0)
    return model


def tokens():
    """The row's ids, and a gradient of its logits, in preorder."""
    generator = torch.Generator().manual_seed(0)
    length = sum(FOREST.lengths)
    ids = torch.randint(VOCAB, (1, length), generator=generator)
    return ids, torch.randn(1, length, VOCAB, generator=generator, dtype=torch.float64)


def gradients_of(model):
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@functools.cache
def expected_of(variant, implementation):
    """The logits of each node's tokens at the end of their sequence, and the sums of the gradients."""
    model = model_of(variant, implementation)
    ids, grad = tokens()
    logits = []
    for node, length in enumerate(FOREST.lengths):
        places = FOREST.tokens_of_path(node)
        of_node = model.logits(model.model(ids[:, places], MicroBatchContext()))[:, -length:]
        of_node.backward(grad[:, places[-length:]])
        logits.append(of_node.detach())
    return torch.cat(logits, 1), gradients_of(model)


def assert_close(found, expected):
    assert (found - expected).abs().max() <= 1e-11 * expected.abs().max().clamp(min=1)


@pytest.mark.parametrize("variant", FAMILIES)
def test_a_row_has_the_numbers_of_its_sequences(variant):
    logits, gradients = expected_of(variant, FAMILIES[variant])
    ids, grad = tokens()
    packing = TreePacking.of(FOREST.lengths, FOREST.parents)
    positions, nodes, last = FOREST.streams()
    for make_kernel in KERNELS.values():
        model = model_of(variant, FAMILIES[variant])
        model.use_kernel(make_kernel())
        found = model.logits(model.model(ids, MicroBatchContext(positions, nodes, packing, last_seq_ids=last)))
        found.backward(grad)
        assert_close(found.detach(), logits)
        for name, values in gradients_of(model).items():
            assert_close(values, gradients[name])


def check_on_ranks(rank, size, variant, kernel):
    logits, gradients = expected_of(variant, FAMILIES[variant])
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("cp",))["cp"]
    order = FOREST.in_chunks(2 * size)
    local_order = shard_sequence(order[None], rank, size)[0]
    is_token = local_order >= 0

    def lay_out(tensor, pad):
        local = tensor[:, local_order.clamp(min=0)]
        local[:, ~is_token] = pad
        return local

    ids, grad = tokens()
    positions, nodes, last = FOREST.streams()
    packing = TreePacking.of(FOREST.lengths, FOREST.parents, 2 * size)
    context = MicroBatchContext(lay_out(positions, 0), lay_out(nodes, -1), packing, last_seq_ids=lay_out(last, -1))
    model = model_of(variant, FAMILIES[variant])
    model.use_kernel(KERNELS_OF_CP[kernel](mesh))
    found = model.logits(model.model(lay_out(ids, 0), context))
    found.backward(lay_out(grad, 0.0))
    assert_close(found.detach()[:, is_token], lay_out(logits, 0.0)[:, is_token])
    for name, values in gradients_of(model).items():
        dist.all_reduce(values)
        assert_close(values, gradients[name])


@pytest.mark.processes
def test_context_parallel_ranks_have_the_numbers_of_the_sequences():
    cases = {f"{variant}, {kernel}": (2, variant, kernel) for variant in FAMILIES for kernel in KERNELS_OF_CP}
    run_cases(check_on_ranks, 2, cases)
