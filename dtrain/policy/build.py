"""Building of a recipe's model on its mesh, in the fixed order in which the parts can be applied.

1. the modules on meta, so that no rank ever holds the whole model, their adapters, and which parameters are trained;
2. tensor parallel, which replaces parameters by their shards, and expert parallel, which does so with experts;
3. context parallel, which sets the attention kernel, and has keys projected before queries where they are gathered;
4. compile, per layer, what lies before and after attention: selective checkpointing is in it, no kernel or hook is;
5. tiles, around these; else activation checkpointing, around all that the layer computes, its collectives included;
   the move of what is kept to the host, around that;
6. FSDP, which cuts whatever parameters it finds;
7. memory for this rank's shards, and their values: read slice by slice, or drawn by logical position.
"""

from collections.abc import Collection
from dataclasses import asdict
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy

from dtrain import models
from dtrain.adapters.config import is_adapter
from dtrain.attention.kernels import HALF, Kernel, SdpaKernel
from dtrain.base.errors import Problem, UserError
from dtrain.base.name_patterns import matches_any, unmatched_patterns
from dtrain.base.ranks import Ranks
from dtrain.checkpoint.huggingface.read import read_weights
from dtrain.memory.activation_checkpointing import checkpoint_activations
from dtrain.models.common.config import SLIDING, ModelConfig
from dtrain.models.common.decoder import CausalLM
from dtrain.parallel.apply import apply_plan, find_plan
from dtrain.parallel.fsdp import mixed_precision, shard_model
from dtrain.parallel.mesh import Mesh
from dtrain.parallel.tensor import full_precision_modules
from dtrain.policy.optimizer import move_masters_to_host
from dtrain.policy.options import BuildOptions, PolicyConfig, Precision
from dtrain.recipe.schema import Train

if TYPE_CHECKING:
    from dtrain.attention.linear.flash import FlashDelta
    from dtrain.models.vision.common import VisionTower


SINGLE_RANK = Ranks(single_process=True)
MAX_MASKED_ROW_LENGTH = 16384  # tokens of a row; beyond, a mask over queries × keys takes longer than anyone waits


def build_model(
    recipe: PolicyConfig,
    config: ModelConfig,
    mesh: Mesh,
    precision: Precision,
    device: torch.device,
    options: BuildOptions | None = None,
) -> CausalLM:
    """Build the recipe's model, sharded over a mesh.

    Trained parameters are in `precision.master`, and frozen ones in `precision.compute`.

    Args:
        recipe: The recipe.
        config: Config of the model.
        mesh: The mesh.
        precision: The dtypes of the model.
        device: Device of the model's parameters.
        options: How it is built, besides what the recipe says. None: the defaults.

    Collectives:
        Those of `build_on_meta`. Every rank of the mesh calls this.
    """
    options = BuildOptions() if options is None else options
    if device.type == "cuda":
        # cuDNN builds a graph for each new shape, and the rows of a micro-batch are as long as its longest.
        torch.backends.cuda.enable_cudnn_sdp(False)
    model = build_on_meta(recipe, config, mesh, precision, device, options)
    if options.materialize:
        _materialize(model, recipe, config, device)
    move_masters_to_host(model, recipe, precision, device)
    return model


def _materialize(model: CausalLM, recipe: PolicyConfig, config: ModelConfig, device: torch.device) -> None:
    """Give the parameters memory and values: those of the recipe's files, or random ones."""
    model.to_empty(device="cpu" if offloads_parameters(recipe, device) else device)
    model.tie_weights()  # memory is given parameter by parameter where FSDP does not hold them
    if recipe.model.init == "scratch":
        models.init_weights(model, recipe.run.seed)
    else:
        read_weights(model, recipe.model.directory)
        if config.has_new_head:
            models.init_weights(model, recipe.run.seed, only="score.*")
    if recipe.lora is not None:
        from dtrain.adapters.lora import init_adapters

        init_adapters(model, recipe.run.seed)


def build_on_meta(
    recipe: PolicyConfig,
    config: ModelConfig,
    mesh: Mesh,
    precision: Precision,
    device: torch.device,
    options: BuildOptions | None = None,
) -> CausalLM:
    """Lay out the model of `build_model` on its mesh. The sharded parameters are on meta.

    One rank that computes in its masters' dtype goes without FSDP: the same bits, and no copies.

    Args:
        recipe: As of `build_model`, like the other arguments.
        config: Config of the model.
        mesh: The mesh.
        precision: The dtypes of the model.
        device: Device of the run.
        options: A kernel in it is used with the exchange of the recipe over cp.

    Collectives:
        On CUDA in half precision, the ranks of cp agree on a kernel, unless `options` has one.
    """
    parallel = recipe.parallel
    options = BuildOptions() if options is None else options
    kernel = options.kernel
    model = models.build(config, dtype=precision.master, device="meta")
    select_trained_parameters(model, recipe, precision.compute)
    if mesh.tp.size() > 1:
        plan = find_plan(parallel.custom_plan, model)
        apply_plan(model, mesh.tp, plan, sequence_parallel=parallel.sequence_parallel)
    if model.routing is not None:
        model.routing.cp, model.routing.tp = mesh.cp, mesh.tp
    if mesh.ep is not None:
        from dtrain.parallel.experts import shard_experts

        shard_experts(model, mesh.ep, mesh.tp)
    if kernel is None:
        ranks = Ranks(mesh.cp.get_group()) if mesh.cp.size() > 1 else SINGLE_RANK
        max_row_length = options.max_row_length or recipe.data.max_length
        kernel = choose_attention(recipe, config, precision, device, max_row_length, ranks)
        model.model.flash_delta, model.model.no_flash_delta_reason = choose_delta(
            recipe, config, precision, device, ranks
        )
    if mesh.cp.size() > 1:
        kernel = _over_context_ranks(kernel, mesh, parallel.cp_rotate)
    if recipe.train.tile == "all":
        from dtrain.attention.kernels import GroupedKernel

        kernel = GroupedKernel(kernel)
    model.use_kernel(kernel)
    if kernel.gathers:
        from dtrain.models.common.keys_first import project_keys_first

        project_keys_first(model)
    if recipe.train.compile:
        from dtrain.memory.compilation import compile_model

        compile_model(
            model,
            recipe.train,
            device,
            is_deterministic=recipe.run.deterministic,
            lora_dropout=0.0 if recipe.lora is None else recipe.lora.dropout,
            compile_part=options.compile_part,
            determinism_check=options.determinism_check,
        )
    _keep_for_backward(model, recipe, device, options)
    if mesh.size > 1 or precision.is_mixed or offloads_parameters(recipe, device):
        dtypes = mixed_precision(precision.compute, precision.reduce)
        offload = CPUOffloadPolicy() if offloads_parameters(recipe, device) else None
        shard_model(model, mesh.fsdp, dtypes, offload, parallel.reshard_after_forward, mesh.expert_fsdp)
    return model


def _keep_for_backward(model: CausalLM, recipe: PolicyConfig, device: torch.device, options: BuildOptions) -> None:
    """Apply tiles, activation checkpointing and activation offload, as `train` says. No collective."""
    train = recipe.train
    is_tiled = train.tile != "none"
    if is_tiled:
        from dtrain.memory.tiles import tile_layers

        tile_layers(model, train.tile)
    layers = None
    if train.compile:
        from dtrain.memory.compilation import modules_to_checkpoint

        layers = modules_to_checkpoint(model, recipe.train)
    checkpoint_activations(model, train.activation_checkpointing, is_tiled, layers, options.determinism_check)
    if train.activation_offload:
        from dtrain.memory import activation_offload as offload

        memory = options.host_memory
        if memory is None:
            memory = offload.PinnedMemory(device) if device.type == "cuda" else offload.HostMemory()
        for stack in (model.model.layers, model.model.vision_layers):
            offload.ActivationOffloader(tuple(stack), memory)


def offloads_parameters(recipe: PolicyConfig, device: torch.device) -> bool:
    """Return whether parameters live in host memory."""
    return recipe.parallel.cpu_offload and device.type != "cpu"  # on a CPU they are there already


def _over_context_ranks(kernel: Kernel, mesh: Mesh, rotate: str) -> Kernel:
    from dtrain.attention.context import GatherKernel, RingKernel
    from dtrain.attention.varlen import VarlenKernel

    over_ranks = RingKernel if rotate == "ring" else GatherKernel
    if isinstance(kernel, VarlenKernel):
        return VarlenKernel(kernel.flash, over_ranks(kernel.masked, mesh.cp), note=kernel.note)
    return over_ranks(kernel, mesh.cp)


def choose_attention(
    recipe: PolicyConfig,
    config: ModelConfig,
    precision: Precision,
    device: torch.device,
    longest: int,
    ranks: Ranks = SINGLE_RANK,
) -> Kernel:
    """Return `VarlenKernel` where it is wanted and sound on every cp rank, else SDPA. Raises UserError where it is not
    sound and `model.attention` insists, or rows, of `longest` tokens at most, are too long for a mask.

    ranks: of cp, on each of which it is proved. Collective over them.
    """
    if not uses_varlen_kernel(recipe, precision, device.type):
        return SdpaKernel()
    from dtrain.attention import varlen
    from dtrain.attention.varlen import VarlenKernel

    kernel, exchanges, shapes = VarlenKernel(), recipe.parallel.cp > 1, config.attention_shapes(recipe.parallel.tp)

    def proof(is_later: bool) -> str | None:
        problems = (
            varlen.check_varlen(
                kernel.flash,
                **shape,
                dtype=precision.compute,
                device=device,
                exchange=recipe.parallel.cp_rotate if exchanges else None,
                is_later=is_later,
            )
            for shape in shapes
        )
        return next(filter(None, problems), None)

    def prove(is_later: bool) -> str | None:
        return next(filter(None, ranks.gather_results(lambda: proof(is_later))), None)

    problem, kernel.note = varlen.choose_version(device, prove, ranks)
    if problem is None:
        return kernel
    if recipe.model.attention == "varlen":
        raise UserError(f"model.attention=varlen: {problem}; set model.attention=auto or sdpa")
    if longest > MAX_MASKED_ROW_LENGTH and (exchanges or recipe.data.packing or SLIDING in config.layer_types):
        length = recipe.data.max_length
        packed = f", packed into rows of {longest}" if longest > length else ""
        raise UserError(
            f"data.max_length={length}{packed}: {problem}. Without it such rows need a mask of {longest} × {longest}: "
            f"set data.max_length={MAX_MASKED_ROW_LENGTH * length // longest} or less, or use a torch and a GPU that "
            "have the kernel (model.attention=sdpa takes the mask all the same, in parts, and is slow)"
        )
    return SdpaKernel(note=problem)


def choose_delta(
    recipe: PolicyConfig, config: ModelConfig, precision: Precision, device: torch.device, ranks: Ranks = SINGLE_RANK
) -> "tuple[FlashDelta | None, str]":
    """Return flash-linear-attention where it is wanted and sound on every cp rank, or None and why it is not taken, ""
    where it is not wanted. Raises UserError where it is not sound and `model.linear_attention` insists. ranks: as of
    `choose_attention`."""
    wanted, sizes, tp = recipe.model.linear_attention, config.linear_attention, recipe.parallel.tp
    is_able = device.type == "cuda" and precision.compute in HALF
    if sizes is None or wanted == "torch" or (wanted == "auto" and not is_able):
        return None, ""
    if recipe.run.deterministic:  # its kernels' blocks, so the order of their sums, are chosen by their times
        return None, "run.deterministic: flash-linear-attention has no fixed order of sums"
    from dtrain.attention.linear import flash

    rule = flash.installed_flash_delta()

    def proof() -> str | None:
        if isinstance(rule, str):
            return rule
        return flash.check_flash_delta(
            rule,
            key_heads=sizes.num_key_heads // tp,
            value_heads=sizes.num_value_heads // tp,
            key_dim=sizes.key_dim,
            value_dim=sizes.value_dim,
            dtype=precision.compute,
            device=device,
            exchanges=recipe.parallel.cp > 1,
        )

    problem = next(filter(None, ranks.gather_results(proof)), None)
    if problem is not None and wanted == "fla":
        raise UserError(f"model.linear_attention=fla: {problem}; set model.linear_attention=auto or torch")
    return (rule, "") if problem is None and not isinstance(rule, str) else (None, problem or "")


def uses_varlen_kernel(recipe: PolicyConfig, precision: Precision, device_type: str) -> bool:
    """Return whether `VarlenKernel` is wanted, where it is sound."""
    if recipe.model.attention == "auto":
        return device_type == "cuda" and precision.compute in HALF
    return recipe.model.attention == "varlen"


def max_masked_row_length(recipe: PolicyConfig, precision: Precision, device_type: str) -> int | None:
    """Return the tokens of the longest row that attention computes with a mask over queries and keys.

    None if attention needs no mask, because `VarlenKernel` is wanted.
    """
    return None if uses_varlen_kernel(recipe, precision, device_type) else MAX_MASKED_ROW_LENGTH


def select_planned_kernel(recipe: PolicyConfig, precision: Precision, device_type: str, mesh: Mesh) -> Kernel:
    """Return the attention kernel of `choose_attention` for a model without values.

    Nothing is tried out, because the device need not be there.

    Args:
        recipe: The recipe.
        precision: The dtypes of the model.
        device_type: "cuda" or "cpu".
        mesh: The mesh.
    """
    if uses_varlen_kernel(recipe, precision, device_type):
        from dtrain.attention.varlen import VarlenKernel

        return VarlenKernel()
    from dtrain.attention.kernels import SdpaByRow

    return SdpaByRow(mesh.cp.get_local_rank(), mesh.cp.size())


def select_trained_parameters(model: CausalLM, recipe: PolicyConfig, dtype: torch.dtype) -> None:
    """Add the adapter of `recipe`, and leave out of training what it does not train; that is kept in `dtype`, that of
    computation: it needs no master copy, no gradient and no optimizer state.

    model: on meta, before it lies on a mesh. Raises UserError for patterns that match nothing, for dropout of a vision
    tower's adapters, and where nothing is left to train.
    """
    if recipe.lora is None:
        _freeze(model, _untrained_parameters(model, _names_by_parameter(model), recipe.train), dtype)
        return
    from dtrain.adapters.lora import add_adapters
    from dtrain.checkpoint.huggingface.quantized import convert_to_4_bits
    from dtrain.checkpoint.peft.config import adapter_of
    from dtrain.models.building import adaptable_shapes

    config = adapter_of(asdict(recipe.lora))
    if problem := config.dropout_problem(adaptable_shapes(model.config)):
        raise UserError(problem)
    model.adapters = add_adapters(model, config, recipe.run.seed)
    modules = {name.rpartition(".")[0] for name, _ in model.named_parameters(remove_duplicate=False)}
    whole = {module for module in modules if config.select_saved_modules([model.config.file_module(module)])}
    trained = {model.config.file_module(module) for module in whole}
    is_nf4 = recipe.lora.quantize == "nf4"
    convert_to_4_bits(model, recipe.model.directory, dtype, nf4=is_nf4, except_for=trained)
    frozen = {
        parameter
        for parameter, known in _names_by_parameter(model).items()
        if not any(is_adapter(name) or name.rpartition(".")[0] in whole for name in known)
    }
    _freeze(model, frozen, dtype)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UserError("lora.target names layers of the vision tower alone, and no data have images: name others")


def _names_by_parameter(model: nn.Module) -> dict[nn.Parameter, list[str]]:
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return names


def _untrained_parameters(model: CausalLM, names: dict[nn.Parameter, list[str]], section: Train) -> set[nn.Parameter]:
    """Return the parameters, of these `names`, that `section` leaves out. A pattern names parameters as
    `named_parameters` does; `*` stands for any part. A parameter of several names (a tied head) matches if one of its
    names does."""
    all_names, of_tower = [name for known in names.values() for name in known], set[str]()
    problems = unmatched_patterns(section.parameter_patterns, all_names)
    for tower in model.model.vision:
        of_tower |= frozen_tower_names(section, tower)
        problems += frozen_pattern_problems(section, tower, all_names)
    if problems:
        raise UserError(problems[0])
    only, frozen = section.train_only, section.freeze
    out = {
        parameter
        for parameter, known in names.items()
        if (only and not matches_any(known, only)) or matches_any(known, frozen) or of_tower.intersection(known)
    }
    if len(out) == len(names):
        vision = f"train.vision={section.vision}, " if of_tower else ""
        raise UserError(f"{vision}train.train_only and train.freeze leave no parameter to train")
    return out


def frozen_tower_names(section: Train, tower: "VisionTower") -> set[str]:
    """Return the names, in the model of `tower`, of its parameters that `train.vision` freezes."""
    trained = {"frozen": (), "projector": tower.projector_patterns, "all": ("*",)}[section.vision]
    return {f"model.{name}" for name, _ in tower.named_parameters() if not matches_any([name], trained)}


def frozen_pattern_problems(section: Train, tower: "VisionTower", names: Collection[str]) -> list[Problem]:
    """Refuse patterns of `train.train_only` that match only parameters that `train.vision` freezes.

    Args:
        section: The section `train`.
        tower: The vision tower.
        names: Names of all parameters of the model.
    """
    frozen = frozen_tower_names(section, tower)
    problems = []
    for pattern in section.train_only:
        named = {name for name in names if matches_any([name], [pattern])}
        if named and named <= frozen:
            text = f"train.train_only: {pattern} matches only parameters that train.vision={section.vision} freezes"
            problems.append(Problem("train.train_only", text, "Set train.vision=all"))
    return problems


def _freeze(model: nn.Module, frozen: Collection[nn.Parameter], dtype: torch.dtype) -> None:
    exact = {parameter for module in full_precision_modules(model).values() for parameter in module.parameters()}
    wide = torch.promote_types(dtype, torch.float32)
    floats = (
        (parameter, wide if parameter in exact else dtype) for parameter in frozen if parameter.is_floating_point()
    )
    copies = {parameter: nn.Parameter(parameter.detach().to(own), requires_grad=False) for parameter, own in floats}
    for module in model.modules():
        for name, held in module._parameters.items():
            if held is not None and held in copies:
                module._parameters[name] = copies[held]
