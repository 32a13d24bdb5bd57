"""Tiles, groups of heads and activations on the host: the gradients of plain layers, and what is held on the way."""

import gc
import random
import weakref

import pytest
import torch

from dtrain import models
from dtrain.attention.kernels import GroupedKernel
from dtrain.memory import activation_offload as offload, compilation as compiling, tiles
from dtrain.memory.activation_checkpointing import checkpoint_activations
from dtrain.models.common.micro_batch import MicroBatchContext
from tests.policy.test_compile import by_aot_eager, forget_compiled
from tests.problem_lines import shapes
from tests.tiny import tiny_recipe, write_model
from tests.world import run_world


@pytest.fixture(autouse=True)
def several_tiles(monkeypatch):
    monkeypatch.setattr(tiles, "TILE_TOKENS", 24)
    monkeypatch.setattr(offload, "MIN_OFFLOAD_BYTES", 1024)


def built(path, dtype=torch.float64, tile="none", kind="none", memory=None, is_compiled=False):
    model = models.build(models.read_config(path))
    models.init_weights(model, 0)
    model = model.to(dtype)
    if tile == "all":
        model.use_kernel(GroupedKernel(model.model.kernel))
    if is_compiled:
        compiling.compile_layers(model)
    if tile != "none":
        tiles.tile_layers(model, tile)
    checkpoint_activations(model, kind, is_tiled=tile != "none")
    if memory is not None:
        offload.ActivationOffloader(tuple(model.model.layers), memory)
    return model


def gradients(model, length=37):
    """Of a loss of two packed rows, in float64."""
    at = torch.arange(length)[None].expand(2, -1)
    hidden = model.model((7 * at + torch.tensor([[0], [3]])) % 60, MicroBatchContext(at % 20, at // 20))
    weights = torch.linspace(-1, 1, hidden.numel(), dtype=torch.float64).view_as(hidden)
    model.zero_grad()
    (hidden.double() * weights).sum().backward()
    return {name: one.grad.double() for name, one in model.named_parameters() if one.grad is not None}


def error(found, expected):
    """The largest relative difference over parameters, each by its largest gradient."""
    assert set(found) == set(expected)
    return max(float((found[name] - right).abs().max() / right.abs().max()) for name, right in expected.items())


@pytest.mark.parametrize("family", ["qwen3", "gemma4", "qwen3.5", "gpt-oss", "deepseek-v3"])
def test_gradients_are_those_of_plain_layers(tmp_path, family):
    path = write_model(tmp_path / "model", family)
    expected = gradients(built(path))
    for tile, kind in [("mlp", "none"), ("all", "full"), ("all", "none"), ("all", "selective"), ("mlp", "mlp")]:
        assert error(gradients(built(path, tile=tile, kind=kind)), expected) < 1e-12, (tile, kind)


def test_activations_that_went_to_the_host_change_no_bit(tmp_path):
    path = write_model(tmp_path / "model", "gemma3")
    for tile, kind in [("none", "none"), ("none", "full"), ("none", "mlp"), ("none", "selective"), ("all", "none")]:
        memory = offload.HostMemory()
        expected = gradients(built(path, tile=tile, kind=kind))
        found = gradients(built(path, tile=tile, kind=kind, memory=memory))
        assert all(torch.equal(found[name], right) for name, right in expected.items()), (tile, kind)
        assert memory.copied_bytes > 0


class Rounded(offload.HostMemory):
    """Buffers of powers of two, which are kept, as pinned ones are."""

    releases_buffers = False

    def buffer_size(self, size):
        return 1 << (size - 1).bit_length()


@pytest.mark.parametrize(("kind", "most"), [(offload.HostMemory, 1), (Rounded, 4)])
def test_steps_of_other_lengths_take_no_more_of_the_host_than_the_longest(kind, most):
    draw, memory = random.Random(0), kind()
    parts = [1, 1, 2, 4, 14, 14]  # sizes of what a layer keeps, of a row's length
    longest = 0
    for length in [draw.randrange(10, 2000) for _ in range(200)]:
        longest = max(longest, sum(parts) * length)
        buffers = [memory.send(torch.zeros(part * length, dtype=torch.uint8)) for part in parts]
        assert all(buffer.numel() >= part * length for buffer, part in zip(buffers, parts, strict=True))
        for buffer in buffers:
            memory.release(buffer)
        assert memory.allocated_bytes <= most * longest


class Sizes(offload.HostMemory):
    def __init__(self):
        super().__init__()
        self.sent = []

    def send(self, flat):
        self.sent.append(flat.numel())
        return super().send(flat)


def test_each_storage_goes_once_and_parameters_stay(tmp_path):
    memory = Sizes()
    gradients(built(write_model(tmp_path / "model", "llama"), memory=memory))
    token = 2 * 37 * 8  # bytes of a number of each token
    # The last layer's stay. Of the first: hidden states, normed, q as it is and turned, k alike, v, attended; after it
    # hidden states, normed, gate, up, gated. Each weight takes 8 · 32 bytes a row.
    assert 0 < len(memory.sent) <= 20
    assert all(size % token == 0 for size in memory.sent)


@pytest.mark.slow
def test_a_half_precision_gradient_is_as_near_to_float64s_as_the_plain_one(tmp_path, monkeypatch):
    """Many tiles: their sum would lose bits if it were rounded each time."""
    path = write_model(tmp_path / "model", "llama", num_hidden_layers=1)
    exact = gradients(built(path), length=400)
    off = {}
    for tile in ("none", "mlp", "all"):
        monkeypatch.setattr(tiles, "TILE_TOKENS", 8)
        found = gradients(built(path, torch.bfloat16, tile), length=400)
        name = "model.layers.0.mlp.down_proj.weight"
        off[tile] = float((found[name] - exact[name]).norm() / exact[name].norm())
    assert off["mlp"] < 1.05 * off["none"]
    assert off["all"] < 1.05 * off["none"]


def test_storages_go_and_come_one_layer_at_a_time(tmp_path):
    """Of eight layers, under full checkpointing."""
    path, memory = write_model(tmp_path / "model", "llama", num_hidden_layers=8), offload.HostMemory()
    model = built(path, kind="full", memory=memory)
    inputs, alive = [], []

    def see(layer, args):
        if torch.is_grad_enabled() and not offload.in_backward():
            inputs.append(weakref.ref(args[0].untyped_storage()))
            alive.append(sum(reference() is not None for reference in inputs))

    for layer in model.model.layers:
        layer.register_forward_pre_hook(see)
    gradients(model)
    assert max(alive) == offload.MAX_COPYING_LAYERS + 2  # and what enters, and what the layer before it has yet
    size = 2 * 37 * 32 * 8  # an input's bytes
    assert memory.allocated_bytes == 7 * size  # the last layer's stays
    assert memory.copied_bytes == 2 * 7 * size
    gradients(model)
    assert memory.allocated_bytes == 7 * size  # used again
    gradients(model, length=30)
    assert memory.allocated_bytes == 7 * size * 30 // 37  # in place of those of another size
    with torch.no_grad():
        model(torch.arange(20)[None])
    assert memory.copied_bytes == 4 * 7 * size + 2 * 7 * size * 30 // 37


def test_a_forward_without_a_backward_gives_its_buffers_back(tmp_path):
    memory = offload.HostMemory()
    model = built(write_model(tmp_path / "model", "llama", num_hidden_layers=3), memory=memory)
    sizes = []
    for _ in range(3):
        model(torch.arange(40)[None])
        sizes.append(memory.allocated_bytes)
    assert sizes[0] == sizes[2] > 0


def kept_products(model):
    """How many tensors as large as the MLP's inside does a forward with a graph leave behind."""
    before = inner_tensors()  # of other tests, which keep them alive
    hidden = model.model(torch.arange(36)[None], MicroBatchContext())
    known = {id(tensor) for tensor in before}
    assert hidden.requires_grad
    return sum(id(tensor) not in known for tensor in inner_tensors())


def inner_tensors():
    gc.collect()
    return [one for one in gc.get_objects() if type(one) is torch.Tensor and one.shape[-1:] == (48,)]


def test_what_a_tile_computes_is_kept_by_no_checkpoint_and_computed_once_more(tmp_path):
    path, products = write_model(tmp_path / "model", "llama", num_hidden_layers=1), {}
    assert kept_products(built(path, kind="selective")) > 0
    assert kept_products(built(path, tile="mlp", kind="selective")) == 0
    for tile, kind in [("none", "none"), ("mlp", "selective"), ("mlp", "full")]:
        model, calls = built(path, tile=tile, kind=kind), []
        down = model.model.layers[0].mlp.down_proj
        down.register_forward_hook(lambda *inputs, calls=calls: calls.append(inputs[1][0].shape[1]))
        gradients(model, length=36)
        products[tile, kind] = sum(calls)
    assert products == {("none", "none"): 36, ("mlp", "selective"): 72, ("mlp", "full"): 72}


def compiled_gradients(rank, path):
    forget_compiled()
    by_aot_eager()
    expected, off = gradients(built(path)), []
    for tile, kind in [("all", "full"), ("none", "none")]:
        model = built(path, tile=tile, kind=kind, memory=offload.HostMemory(), is_compiled=True)
        off.append(error(gradients(model), expected))
    return off


@pytest.mark.slow
@pytest.mark.processes
def test_compiled_layers_in_tiles_with_activations_on_the_host(tmp_path):
    [off] = run_world(
        compiled_gradients, 1, write_model(tmp_path / "model", "qwen3", num_hidden_layers=2), timeout=300.0
    )
    assert max(off) < 1e-12


def test_tiles_of_mixtures_alone_are_refused(tmp_path):
    recipe = tiny_recipe(tmp_path, "train.tile=mlp", family="gpt-oss")
    assert any("train.tile=mlp: every layer of this model is a mixture" in one for one in shapes(recipe, 1))
    assert not shapes(tiny_recipe(tmp_path, "train.tile=all", family="gpt-oss"), 1)
