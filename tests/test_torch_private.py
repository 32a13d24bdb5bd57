"""Use of what torch does not promise: each private name stands in one file, and what is called takes what it is given.

Operators of ATen are named wherever they are counted or kept. Those that are called are in `OPERATORS`.
"""

import ast
import importlib
import re
from inspect import signature
from pathlib import Path

import pytest
import torch
import torch.nn.attention.varlen  # makes torch.ops.torch_attn

import dtrain

PACKAGE = Path(dtrain.__file__).parent
ATTENTION = "query key value dropout_p is_causal scale"

# The arguments that an operator is given: by position, then by name. What it has beside has a default.
OPERATORS = {
    "aten::_scaled_dot_product_flash_attention_for_cpu": ("query key value", f"{ATTENTION} attn_mask"),
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": (
        "grad_out query key value out logsumexp",
        "dropout_p is_causal attn_mask scale",
    ),
    "aten::_scaled_dot_product_flash_attention": ("query key value", ATTENTION),
    "aten::_scaled_dot_product_efficient_attention": (
        "query key value",
        f"{ATTENTION} attn_bias compute_log_sumexp",
    ),
    # By name; a plan reads the first seven by their positions.
    "torch_attn::_varlen_attn_backward": (
        "grad_out query key value out lse cu_seq_q",
        "cu_seq_k max_q max_k is_causal rng_state scale window_size",
    ),
    "_c10d_functional::all_reduce": ("input reduce_op group_name", ""),
    "_c10d_functional::all_gather_into_tensor": ("input group_size group_name", ""),
    "_c10d_functional::reduce_scatter_tensor": ("input reduce_op group_size group_name", ""),
    "_c10d_functional::all_to_all_single": ("input output_split_sizes input_split_sizes group_name", ""),
    "_c10d_functional::wait_tensor": ("tensor", ""),
}

# Functions and classes: where they are, and the names of what they are given.
FUNCTIONS = {
    "torch.distributed.device_mesh:DeviceMesh._concatenate": "device_mesh_list",
    "torch.distributed.device_mesh:DeviceMesh._flatten": "mesh_dim_name",
    "torch.distributed.device_mesh:DeviceMesh._unflatten": "dim mesh_sizes mesh_dim_names",
    "torch.distributed.fsdp._fully_shard._fsdp_common:FSDPMeshInfo": "mesh shard_mesh_dim",
    "torch.distributed.fsdp._fully_shard._fsdp_common:HSDPMeshInfo": "mesh shard_mesh_dim replicate_mesh_dim",
    "torch.distributed.fsdp._fully_shard._fsdp_common:ShardPlacementResult": "placement mesh_info",
    "torch._dynamo.utils:maybe_enable_compiled_autograd": "should_enable",
    "torch._dynamo:maybe_mark_dynamic": "t index",
    "torch._dynamo.eval_frame:skip_code": "code",
}

# The one file of each name; those of C++ tell no signature, and run wherever the tests do.
HOMES = {
    "attention/foreign/sharded_attention.py": "skip_code",
    "base/torch_functions.py": "FakeTensor _C.DisableTorchFunction _C._current_graph_task_id _cdata",
    "base/compiled.py": (
        "FailOnRecompileLimitHit TorchDynamoException _dynamo.config.recompile_limit _dynamo.maybe_mark_dynamic "
        "has_triton"
    ),
    "commands/plan/compiled.py": "_C._current_autograd_node _get_sequence_nr _sequence_nr",
    "commands/plan/memory.py": "OpOverload",
    "commands/plan/planned_device.py": "FakeWork TorchDispatchMode _engine_run_backward _schema",
    "commands/plan/step.py": "fake_pg",
    "commands/plan/tracer.py": "_resolve_process_group",
    "launch/devices.py": "_C._accelerator_setAllocatorSettings",
    "losses/logits/groups.py": "_assert_async",
    "memory/activation_offload.py": "tree_leaves",
    "memory/activation_checkpointing.py": "checkpoint",
    "parallel/collectives.py": "_c10d_functional",
    "parallel/context/train_context.py": "maybe_enable_compiled_autograd",
    "parallel/fsdp.py": "FSDPMeshInfo HSDPMeshInfo ShardPlacementResult",
    "memory/host_masters.py": "_C._disabled_torch_function_impl",
    "parallel/mesh.py": "_concatenate _device_types _get_backend _unflatten",
    "parallel/placement.py": "_StridedShard _foreach_mul_ _foreach_norm _local_tensor",
    "memory/compilation.py": "_higher_order_ops",
    # Of transformers.
    "models/transformers/config.py": "_decode_special_floats _from_config",
    "models/transformers/conversion.py": "_keys_to_ignore_on_load_unexpected",
    "models/transformers/experts.py": "_apply_gate",
    "models/transformers/model.py": "_init_weights _is_hf_initialized _keep_in_fp32_modules_strict",
    "policy/weights.py": "_Options _devices",
}
# Of Python's standard library, and of modules.
OTHERS = {
    "_actions",
    "_asdict",
    "_buffers",  # of torch.nn.Module, in many files
    "_current_frames",
    "_exit",
    "_field_defaults",
    "_non_persistent_buffers_set",  # as `_buffers`
    "_option_string_actions",
    "_parameters",  # as `_buffers`
    "_replace",
    "_serve",
}
NAMESPACES = {"_C", "_dynamo"}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def names_bound(tree: ast.Module) -> set[str]:
    """Private names that a file of dtrain gives to something itself."""
    names = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            is_own = isinstance(node, ast.Name) or ast.unparse(node.value) in ("self", "cls")
            names |= {node.id if isinstance(node, ast.Name) else node.attr} if is_own else set()
    return set(filter(is_private, names))


def private_names(tree: ast.Module) -> set[str]:
    """Names that a file takes from private modules of torch, and private attributes of anything but itself."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            is_inner = any(map(is_private, (node.module or "").split(".")))
            names |= {alias.name for alias in node.names if is_inner or is_private(alias.name)}
        elif isinstance(node, ast.Attribute):
            text = ast.unparse(node)
            parts = text.split(".")
            inner = [place for place, part in enumerate(parts) if place and re.fullmatch("_[A-Za-z]\\w*", part)]
            is_operator = re.match(r"(torch\.ops\.(?!_c10d)|_?aten\.)", text) is not None
            if not inner or is_operator or parts[0] in ("self", "cls"):
                continue
            is_within = parts[inner[0]] in NAMESPACES
            name = ".".join(parts[inner[0] :]) if is_within else parts[inner[0]]
            names |= {name} - NAMESPACES - {"_dynamo.config"}
    return names


def test_each_private_name_of_torch_stands_in_one_file():
    trees = {path: ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")}
    own = OTHERS.union(*map(names_bound, trees.values()))
    used: dict[str, set[str]] = {}
    for path, tree in trees.items():
        for name in private_names(tree) - own:
            used.setdefault(name, set()).add(path.relative_to(PACKAGE).as_posix())
    assert used == {name: {home} for home, names in HOMES.items() for name in names.split()}


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_take_what_they_are_given(name):
    namespace, operator = name.split("::")
    by_position, by_name = (names.split() for names in OPERATORS[name])
    arguments = getattr(getattr(torch.ops, namespace), operator).default._schema.arguments
    assert [argument.name for argument in arguments][: len(by_position)] == by_position
    rest = {argument.name: argument.has_default_value() for argument in arguments}
    assert {*by_name} <= rest.keys()
    assert all(rest[name] for name in rest.keys() - {*by_position, *by_name})


@pytest.mark.parametrize("place", FUNCTIONS)
def test_functions_take_what_they_are_given(place):
    module, _, path = place.partition(":")
    function = importlib.import_module(module)
    for part in path.split("."):
        if part == "ShardPlacementResult" and not hasattr(function, part):
            pytest.skip("torch 2.11 has none, and parallel.ep is refused there")
        function = getattr(function, part)
    bound_to = (None,) if path.endswith(("_flatten", "_unflatten")) else ()
    signature(function).bind(*bound_to, **dict.fromkeys(FUNCTIONS[place].split()))
