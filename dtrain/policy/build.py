"""From a recipe to a model that lies on its mesh, by the fixed order in which the parts can be applied.

1. the modules on meta, so that no rank ever holds the whole model;
2. tensor parallel, which replaces parameters by their shards;
3. context parallel, which only sets the attention kernel;
4. activation checkpointing, around what the layer computes, its collectives included;
5. compile, per layer, so that it sees the checkpointing and not FSDP's hooks;
6. FSDP, which cuts whatever parameters it finds;
7. memory for this rank's shards, and their values: read slice by slice, or drawn by logical position.
"""

from collections.abc import Mapping
from functools import partial
from importlib import import_module

import torch
from torch import nn
from torch.distributed._composable import checkpoint
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from dtrain import models
from dtrain.attention.context import GatherKernel
from dtrain.attention.kernels import choose_kernel
from dtrain.attention.ring import RingKernel
from dtrain.checkpoint.huggingface import read_weights
from dtrain.config.schema import Recipe
from dtrain.errors import UserError
from dtrain.models.config import ModelConfig
from dtrain.parallel.apply import Plan, apply_plan
from dtrain.parallel.fsdp import shard_model
from dtrain.parallel.mesh import Mesh
from dtrain.policy.precision import Precision


def build_model(recipe: Recipe, config: ModelConfig, mesh: Mesh, precision: Precision, device: torch.device) -> nn.Module:
    """The recipe's model, sharded over `mesh`, its parameters in `precision.master` on `device`.

    One rank that computes in its masters' dtype goes without FSDP: the same bits, and no copies.
    Collective: every rank of the mesh calls it.
    """
    sharded = mesh.size > 1 or precision.is_mixed
    model = models.build(config, dtype=precision.master, device="meta" if sharded else device)
    parallel = recipe.parallel
    if mesh.tp.size() > 1:
        plan = find_plan(parallel.custom_plan, model)
        apply_plan(model, mesh.tp, plan, sequence_parallel=parallel.sequence_parallel)
    if mesh.cp.size() > 1:
        kernel = choose_kernel("sdpa", device=device.type, documents=True, backward=True)
        model.use_kernel((RingKernel if parallel.cp_rotate == "ring" else GatherKernel)(kernel, mesh.cp))
    checkpoint_activations(model, recipe.train.activation_checkpointing)
    if recipe.train.compile:
        for layer in model.model.layers:
            layer.compile()
    if sharded:
        shard_model(
            model,
            mesh.fsdp,
            compute_dtype=precision.compute,
            reduce_dtype=precision.reduce,
            reshard_after_forward=parallel.reshard_after_forward,
            cpu_offload=parallel.cpu_offload,
        )
        model.to_empty(device="cpu" if parallel.cpu_offload else device)
    if recipe.model.init == "scratch":
        models.init_weights(model, recipe.run.seed)
    else:
        read_weights(model, recipe.model.path)
    return model


def find_plan(custom: str | Mapping[str, str] | None, model: nn.Module) -> Plan:
    """The model's own plan, or what replaces it: a table, or the import path of one (or of a function of the model)."""
    if custom is None:
        return model.plan
    if not isinstance(custom, str):
        return custom
    module, _, name = custom.rpartition(".")
    try:
        plan = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(f"parallel.custom_plan={custom}: {error}; give the import path of a plan") from error
    return plan(model) if callable(plan) else plan


def checkpoint_activations(model: nn.Module, kind: str) -> None:
    """Recompute activations in the backward: of whole layers (full), of their MLPs (mlp), or of all but the results of
    matrix products and attention (selective). Module names stay as they are. No collective."""
    if kind == "none":
        return
    for layer in model.model.layers:
        if kind == "full":
            checkpoint(layer)
        elif kind == "mlp":
            checkpoint(layer.mlp)
        else:
            checkpoint(layer, context_fn=partial(create_selective_checkpoint_contexts, _keep_expensive))


_EXPENSIVE = frozenset(
    {
        torch.ops.aten.mm.default,
        torch.ops.aten.addmm.default,
        torch.ops.aten.bmm.default,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
        torch.ops.aten._scaled_dot_product_flash_attention.default,
        torch.ops.aten._scaled_dot_product_efficient_attention.default,
        torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    }
)


def _keep_expensive(context, operation, *args, **kwargs) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in _EXPENSIVE else CheckpointPolicy.PREFER_RECOMPUTE
