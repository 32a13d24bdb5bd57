"""From a recipe to a model that lies on its mesh, by the fixed order in which the parts can be applied.

1. the modules on meta, so that no rank ever holds the whole model, their adapters, and which parameters are trained;
2. tensor parallel, which replaces parameters by their shards;
3. context parallel, which only sets the attention kernel;
4. activation checkpointing, around what the layer computes, its collectives included;
5. compile, per layer, so that it sees the checkpointing and not FSDP's hooks;
6. FSDP, which cuts whatever parameters it finds;
7. memory for this rank's shards, and their values: read slice by slice, or drawn by logical position.
"""

import torch

from dtrain import models
from dtrain.attention.context import GatherKernel, RingKernel
from dtrain.attention.kernels import Kernel, SdpaKernel, choose_kernel
from dtrain.attention.varlen import HALF, VarlenKernel, prove
from dtrain.checkpoint.huggingface import read_weights
from dtrain.config.schema import Recipe
from dtrain.errors import UserError
from dtrain.models.adapters import init_adapters
from dtrain.models.config import SLIDING, ModelConfig
from dtrain.models.layers import CausalLM
from dtrain.parallel.apply import apply_plan, find_plan
from dtrain.parallel.checkpointing import checkpoint_activations
from dtrain.parallel.fsdp import shard_model
from dtrain.parallel.mesh import Mesh
from dtrain.policy.precision import Precision
from dtrain.policy.trained import choose_trained


def build_model(
    recipe: Recipe, config: ModelConfig, mesh: Mesh, precision: Precision, device: torch.device
) -> CausalLM:
    """The recipe's model, sharded over `mesh`, its trained parameters in `precision.master`, frozen ones in
    `precision.compute`, on `device`.

    Collective: every rank of the mesh calls it.
    """
    model = lay_out(recipe, config, mesh, precision, device)
    model.to_empty(device="cpu" if _offloads(recipe, device) else device)
    model.tie_weights()  # memory is given parameter by parameter where FSDP does not hold them
    if recipe.model.init == "scratch":
        models.init_weights(model, recipe.run.seed)
    else:
        read_weights(model, recipe.model.directory)
    if recipe.lora is not None:
        init_adapters(model, recipe.run.seed)
    return model


def lay_out(
    recipe: Recipe,
    config: ModelConfig,
    mesh: Mesh,
    precision: Precision,
    device: torch.device,
    kernel: Kernel | None = None,
) -> CausalLM:
    """The model as `build_model` lays it out, all but the last step: its parameters, sharded over `mesh`, are on meta.

    kernel: in place of the one that the recipe and the device ask for. One rank that computes in its masters' dtype
    goes without FSDP: the same bits, and no copies. No collective.
    """
    parallel = recipe.parallel
    model = models.build(config, dtype=precision.master, device="meta")
    choose_trained(model, recipe, precision.compute)
    if mesh.tp.size() > 1:
        plan = find_plan(parallel.custom_plan, model)
        apply_plan(model, mesh.tp, plan, sequence_parallel=parallel.sequence_parallel)
    if mesh.cp.size() > 1:
        kernel = kernel or choose_kernel("sdpa", device=device.type, documents=True, backward=True)
        model.use_kernel((RingKernel if parallel.cp_rotate == "ring" else GatherKernel)(kernel, mesh.cp))
    elif kernel is not None or wants_varlen(recipe, precision, device.type):
        model.use_kernel(kernel or _proved(recipe, config, mesh, precision, device))
    checkpoint_activations(model, recipe.train.activation_checkpointing)
    if recipe.train.compile:
        for layer in model.model.layers:
            layer.compile()
    if mesh.size > 1 or precision.is_mixed or _offloads(recipe, device):
        shard_model(
            model,
            mesh.fsdp,
            compute_dtype=precision.compute,
            reduce_dtype=precision.reduce,
            reshard_after_forward=parallel.reshard_after_forward,
            cpu_offload=_offloads(recipe, device),
        )
    return model


def wants_varlen(recipe: Recipe, precision: Precision, device_type: str) -> bool:
    """Whether packed rows are to take `VarlenKernel`, where it is sound, without context parallel."""
    if recipe.model.attention == "auto":
        return device_type == "cuda" and precision.compute in HALF
    return recipe.model.attention == "varlen"


def _proved(
    recipe: Recipe, config: ModelConfig, mesh: Mesh, precision: Precision, device: torch.device
) -> SdpaKernel | VarlenKernel:
    """`VarlenKernel` where it is sound here. Where it is not, SDPA, or UserError if `model.attention` insists."""
    tp = mesh.tp.size()
    problem = prove(
        VarlenKernel(),
        heads=config.num_attention_heads // tp,
        key_heads=max(1, config.num_key_value_heads // tp),
        head_dim=config.head_dim,
        window=config.sliding_window if SLIDING in config.layer_types else None,
        dtype=precision.compute,
        device=device,
    )
    if problem is None:
        return VarlenKernel()
    if recipe.model.attention == "varlen":
        raise UserError(f"model.attention=varlen: {problem}; set model.attention=auto or sdpa")
    return SdpaKernel(note=problem)


def _offloads(recipe: Recipe, device: torch.device) -> bool:
    return recipe.parallel.cpu_offload and device.type != "cpu"  # on a CPU they are there already
