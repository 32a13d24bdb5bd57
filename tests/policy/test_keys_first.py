"""Keys of context parallel that travel while queries are projected: the order of events, and no number changed."""

from math import prod

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from dtrain import models, recipe as config
from dtrain.attention.context import GatherKernel
from dtrain.attention.kernels import SdpaKernel
from dtrain.memory.compilation import compile_layers, recomputes_layers
from dtrain.models import read_config
from dtrain.models.common.keys_first import project_keys_first
from dtrain.models.common.micro_batch import MicroBatchContext
from dtrain.parallel.context.batch import shard_sequence
from dtrain.parallel.mesh import Runtime, build_mesh
from dtrain.policy import Policy
from tests.cases import run_cases
from tests.policy.test_compile import by_aot_eager, forget_compiled, graphs
from tests.tiny import tiny_recipe, write_model
from tests.world import run_world

pytestmark = [pytest.mark.processes, pytest.mark.slow]

LENGTH, LAYERS = 24, 2
FULL, SELECTIVE = (f"train.activation_checkpointing={kind}" for kind in ("full", "selective"))
HEADS, KEYS = 64, 32  # columns of q, which are those that o takes, and of k and of v
NUMBERS = 2 * (LENGTH // 2) * 2 * KEYS  # of keys and values that a rank of two sends, of two rows


class Events(TorchDispatchMode):
    """Products of q, k, v and o, the exchanges of keys, and attention, in their order."""

    def __init__(self, group):
        super().__init__()
        self.group, self.order = group, []
        self.waits = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.split("::")[1]
        if (
            name in ("all_gather_into_tensor", "reduce_scatter_tensor")
            and args[-1] == self.group
            and args[0].shape[1:] == (NUMBERS,)
        ):
            self.order.append(f"begin {name.split('_')[0]}")
            self.waits[out.untyped_storage().data_ptr()] = self.order[-1].replace("begin", "wait")
        elif name == "wait_tensor" and (wait := self.waits.pop(args[0].untyped_storage().data_ptr(), None)):
            self.order.append(wait)
        elif name == "mm":
            sizes = {*args[0].shape, *args[1].shape}
            self.order += ["q, o"] if HEADS in sizes else ["kv"] if KEYS in sizes else []
        elif "flash_attention" in name:
            self.order.append("attention")
        return out


def policy_of(rank, recipe, size):
    runtime = Runtime(rank=rank, local_rank=rank, world_size=size)
    sizes = config.derive_sizes(recipe, size)
    mesh = build_mesh(runtime, dp_replicate=sizes.dp_replicate, dp_shard=sizes.dp_shard, cp=sizes.cp, tp=sizes.tp)
    return Policy(recipe, read_config(recipe.model.path), mesh, runtime)


def rows():
    at = torch.arange(LENGTH)[None].expand(2, -1)
    return (7 * at + torch.tensor([[0], [3]])) % 60, at % 15, at // 15


def loss_of(model, inputs, cut=lambda whole: whole):
    """Of two packed rows, of which `cut` gives a rank's part."""
    size = *inputs[0].shape, model.config.hidden_size
    weights = torch.linspace(-1, 1, prod(size), dtype=torch.float64).view(size)
    return model.with_head(
        lambda hidden, _: (hidden.double() * cut(weights)).sum(),
        cut(inputs[0]),
        MicroBatchContext(*map(cut, inputs[1:])),
    )


def gradients(policy):
    cp = policy.mesh.cp
    policy.model.zero_grad()
    loss_of(policy.model, rows(), lambda whole: shard_sequence(whole, cp.get_local_rank(), cp.size())).backward()
    grads = {name: parameter.grad for name, parameter in policy.model.named_parameters() if parameter.grad is not None}
    return {name: grad.full_tensor() if isinstance(grad, DTensor) else grad for name, grad in grads.items()}


def off(results, right):
    """The largest relative difference over parameters."""
    assert results.keys() == right.keys()
    return max(float((results[name] - grad).abs().max() / grad.abs().max()) for name, grad in right.items())


def in_order(rank, recipe):
    policy = policy_of(rank, recipe, 2)
    gradients(policy)  # FSDP makes some of its own once
    events = Events(policy.mesh.cp.get_group().group_name)
    with events:
        gradients(policy)
    return events.order


FORWARD = ["kv", "kv", "begin all", "q, o", "wait all", "attention", "q, o"]
BACKWARD = ["q, o", "q, o", "attention", "begin reduce", "q, o", "q, o", "wait reduce", "kv", "kv", "kv", "kv"]


def test_keys_travel_while_queries_are_projected_and_their_gradients_too(tmp_path):
    write_model(tmp_path / "qwen3-tied", hidden_size=24)
    cases = {kind: (tiny_recipe(tmp_path, CP2, *keys),) for kind, keys in (("none", []), ("full", [FULL]))}
    results = run_cases(in_order, 2, cases)
    assert results["none"] == [FORWARD * LAYERS + BACKWARD * LAYERS] * 2
    # A layer's last product is not computed again: nothing reads what it gave.
    assert results["full"] == [FORWARD * LAYERS + (FORWARD + BACKWARD) * LAYERS] * 2


def keys_first_of(model):
    return [layer for layer in model.model.layers if layer.keys_first is not None]


def as_before(rank, recipe, size):
    """Check that every bit of the gradients is as if queries came before keys, and the exchange after both; how many
    layers project keys first."""
    policy = policy_of(rank, recipe, size)
    first = keys_first_of(policy.model)
    results = gradients(policy)
    for layer in first:
        layer.keys_first = None
    right = gradients(policy)
    assert results.keys() == right.keys()
    changed = [name for name, grad in right.items() if not torch.equal(grad, results[name])]
    assert not changed, changed
    return len(first)


CP2, TP = "parallel.cp=2", "parallel.tp=2"
# Recipe's keys, family, ranks, and how many of its layers project keys first.
CASES = {
    "qk norms": ([], "qwen3", 2, 2),
    "biases, three ranks, all computed again": (["parallel.cp=3", FULL], "qwen2", 3, 2),
    "four ranks": (["parallel.cp=4", "train.tile=mlp"], "llama", 4, 2),
    "some computed again": ([SELECTIVE], "qwen3", 2, 2),
    "on the host": ([FULL, "train.activation_offload=true"], "qwen3", 2, 2),
    "groups of heads": (["train.tile=all"], "qwen3", 2, 0),
    "sequence parallel": ([TP, SELECTIVE], "qwen3", 4, 2),
    "a gate, linear layers": ([FULL], "qwen3.5", 2, 1),
    "sinks": ([], "gpt-oss", 2, 2),
    "keys that layers share": ([FULL], "gemma4", 2, 4),
    "joined in files": ([], "phi3", 2, 2),
    "layers without positions": ([], "smollm3", 2, 2),
    "scaled queries": ([], "ministral3", 2, 2),
    "norms over whole projections": ([], "olmo3", 2, 0),
    "experts": ([], "qwen3-moe", 2, 3),
    "latents": ([], "deepseek-v3", 2, 0),
}


@pytest.mark.parametrize("size", [2, 3, 4])
def test_no_bit_of_a_gradient_changes(tmp_path, size):
    cases = {}
    for name, (keys, family, ranks, _) in CASES.items():
        recipe = tiny_recipe(tmp_path, CP2, "train.dtype=float32", *keys, family=family)
        cases[name] = recipe, ranks
    cases = {name: case for name, case in cases.items() if case[1] == size}
    results = run_cases(as_before, size, cases)
    assert results == {name: [CASES[name][-1]] * size for name in cases}


def compiled(rank, path):
    """The graphs after each of two rows, and how far gradients are from those of layers as written."""
    by_aot_eager()
    forget_compiled()
    made, counts = [], []
    for is_compiled in (False, True):
        model = models.build(read_config(path))
        models.init_weights(model, 0)
        model.use_kernel(GatherKernel(SdpaKernel(), init_device_mesh("cpu", (1,), mesh_dim_names=("cp",))["cp"]))
        project_keys_first(model)
        if is_compiled:
            compile_layers(model, computes_again=True)
        for length in (LENGTH, 16):
            loss_of(model, [stream[:, :length] for stream in rows()]).backward()
            counts.append(graphs())
        made.append({name: parameter.grad for name, parameter in model.named_parameters()})
    compile_layers(model)
    assert not keys_first_of(model)
    return counts[2:], off(made[1], made[0])


def test_compiled_layers_project_keys_first_where_they_are_computed_again(tmp_path):
    """By one graph more; else between two graphs a layer would keep one tensor more."""
    path = write_model(tmp_path / "model", num_hidden_layers=1)
    [(counts, error)] = run_world(compiled, 1, path)
    assert counts == [3, 3]
    assert error < 1e-5
    for kind, again in (("full", True), ("selective", False), ("none", False), ("selective, moved", True)):
        keys = [f"train.activation_checkpointing={kind.split(',')[0]}", f"train.activation_offload={'moved' in kind}"]
        assert recomputes_layers(tiny_recipe(tmp_path, "train.compile=true", *keys).train) == again


def as_alone(rank, recipe, size):
    policy = policy_of(rank, recipe, size)
    results = gradients(policy)
    model = models.build(read_config(recipe.model.path))
    models.init_weights(model.double(), recipe.run.seed)
    loss_of(model, rows()).backward()
    right = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return off(results, right)


@pytest.mark.parametrize("size", [2, 3])
def test_gradients_are_those_of_one_process(tmp_path, size):
    families = "qwen3", "gpt-oss", "gemma4"
    cases = {name: (tiny_recipe(tmp_path, f"parallel.cp={size}", family=name), size) for name in families}
    results = run_cases(as_alone, size, cases)
    assert max(map(max, results.values())) < 1e-12, results
