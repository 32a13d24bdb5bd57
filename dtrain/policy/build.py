"""Build a recipe's model on its mesh.

The parts are applied in this order. No other order works:

1. Modules on the meta device, so that no rank ever allocates the full model. Adapters are added, and the parameters
   that are not trained are frozen.
2. Tensor parallel, which replaces parameters by their shards. Expert parallel, which does the same for experts.
3. The attention kernel, with the exchange of keys under context parallel. If a kernel gathers keys, keys are projected
   before queries, so that the exchange overlaps with the projection of queries.
4. `torch.compile` of the parts of each layer before and after attention. Selective activation checkpointing is inside
   of the compiled parts. Kernels and hooks are outside of them.
5. Tiles around the compiled parts, or else activation checkpointing around the full layer with its collectives. The
   offload of saved activations to the host comes around that.
6. FSDP, which shards the parameters that exist by now: those of the model, of the adapters and of tensor parallel.
7. Memory for this rank's shards, and their values. The values are read slice by slice from files, or are random numbers
   that depend on the position in the full tensor. So a model has the same weights on every mesh.

`build_on_meta` does steps 1 to 6, `build_model` all of them. A plan needs only the first six.
"""

from collections.abc import Collection
from dataclasses import asdict
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy

from dtrain import models
from dtrain.adapters.config import is_adapter
from dtrain.attention import varlen
from dtrain.attention.kernels import HALF, Kernel, SdpaKernel
from dtrain.attention.varlen import TreeKernel, VarlenKernel
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

MAX_MASKED_ROW_LENGTH = 16384
"""Tokens of the longest row that attention should compute with a mask over queries × keys, because of the time."""


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
        options: Options for building that are not in a recipe. None uses the defaults.

    Collectives:
        Those of `build_on_meta`. Every rank of the mesh calls this.
    """
    options = BuildOptions() if options is None else options
    if device.type == "cuda":
        # cuDNN would build a graph for each new shape, and the width of micro-batches varies from step to step.
        torch.backends.cuda.enable_cudnn_sdp(False)
    model = build_on_meta(recipe, config, mesh, precision, device, options)
    if options.materialize:
        _materialize(model, recipe, config, device)
    move_masters_to_host(model, recipe, precision, device)
    return model


def _materialize(model: CausalLM, recipe: PolicyConfig, config: ModelConfig, device: torch.device) -> None:
    """Give the parameters memory and values, which are read from the recipe's files or random."""
    model.to_empty(device="cpu" if offloads_parameters(recipe, device) else device)
    # Without FSDP, `to_empty` allocates each parameter by itself, which unties the head.
    model.tie_weights()
    if recipe.model.init == "scratch":
        models.init_weights(model, recipe.run.seed)
    else:
        read_weights(model, recipe.model.directory)
        if config.has_new_head:
            models.init_weights(model, recipe.run.seed, only="score.*")
    if recipe.lora is not None:
        from dtrain.adapters.lora import init_adapters  # only for runs with adapters

        init_adapters(model, recipe.run.seed)


def build_on_meta(
    recipe: PolicyConfig,
    config: ModelConfig,
    mesh: Mesh,
    precision: Precision,
    device: torch.device,
    options: BuildOptions | None = None,
) -> CausalLM:
    """Build the model of `build_model` on its mesh without values: the sharded parameters are on the meta device.

    FSDP is left out if a single rank computes in the dtype of its masters. The results are the same bit by bit, and no
    weight has to be copied.

    Args:
        recipe: The recipe.
        config: Config of the model.
        mesh: The mesh.
        precision: The dtypes of the model.
        device: Device of the run.
        options: Options for building that are not in a recipe. A kernel in `options` is combined with the recipe's
            exchange over cp.

    Collectives:
        On CUDA in half precision, the ranks of cp agree on a kernel, unless `options` has one.
    """
    parallel = recipe.parallel
    options = BuildOptions() if options is None else options
    model = models.build(config, dtype=precision.master, device="meta")
    select_trained_parameters(model, recipe, precision.compute)
    if mesh.tp.size() > 1:
        plan = find_plan(parallel.custom_plan, model)
        shards_sequence = parallel.shards_sequence(config.transformers is None)
        apply_plan(model, mesh.tp, plan, sequence_parallel=shards_sequence)
    if model.routing is not None:
        model.routing.cp, model.routing.tp = mesh.cp, mesh.tp
    if mesh.ep is not None:
        from dtrain.parallel.experts import shard_experts  # only for expert parallel

        shard_experts(model, mesh.ep, mesh.tp)
    _attach_kernel(model, recipe, config, mesh, precision, device, options)
    if recipe.train.compile:
        from dtrain.memory.compilation import compile_model  # loads torch's compiler

        compile_model(
            model,
            recipe.train,
            device,
            is_deterministic=recipe.run.deterministic,
            lora_dropout=0.0 if recipe.lora is None else recipe.lora.dropout,
            compile_part=options.compile_part,
            determinism_check=options.determinism_check,
        )
    _apply_memory_options(model, recipe, device, options)
    if mesh.size > 1 or precision.is_mixed or offloads_parameters(recipe, device):
        dtypes = mixed_precision(precision.compute, precision.reduce)
        offload = CPUOffloadPolicy() if offloads_parameters(recipe, device) else None
        shard_model(model, mesh.fsdp, dtypes, offload, parallel.reshard_after_forward, mesh.expert_fsdp)
    return model


def _attach_kernel(
    model: CausalLM,
    recipe: PolicyConfig,
    config: ModelConfig,
    mesh: Mesh,
    precision: Precision,
    device: torch.device,
    options: BuildOptions,
) -> None:
    """Give the layers their attention kernel. Its collectives are those of `build_on_meta`."""
    kernel = options.kernel
    if kernel is None:
        ranks = Ranks(mesh.cp.get_group()) if mesh.cp.size() > 1 else SINGLE_RANK
        max_row_length = options.max_row_length or recipe.data.max_length
        kernel = choose_attention(recipe, config, precision, device, max_row_length, ranks)
        delta = choose_delta(recipe, config, precision, device, ranks)
        model.model.flash_delta, model.model.no_flash_delta_reason = delta.kernel, delta.note
    if mesh.cp.size() > 1:
        kernel = _over_context_ranks(kernel, mesh, recipe.parallel.cp_rotate)
    if recipe.train.tile == "all":
        from dtrain.attention.kernels import GroupedKernel

        kernel = GroupedKernel(kernel)
    model.use_kernel(kernel)
    if kernel.gathers:
        from dtrain.models.common.keys_first import project_keys_first  # only for gathered keys

        project_keys_first(model)


def _apply_memory_options(model: CausalLM, recipe: PolicyConfig, device: torch.device, options: BuildOptions) -> None:
    """Apply tiles, activation checkpointing and activation offload, as the section `train` says. No collective."""
    train = recipe.train
    is_tiled = train.tile != "none"
    if is_tiled:
        from dtrain.memory.tiles import tile_layers  # optional

        tile_layers(model, train.tile)
    layers = None
    if train.compile:
        from dtrain.memory.compilation import modules_to_checkpoint  # loads torch's compiler

        layers = modules_to_checkpoint(model, recipe.train)
    checkpoint_activations(model, train.activation_checkpointing, is_tiled, layers, options.determinism_check)
    if train.activation_offload:
        from dtrain.memory import activation_offload as offload  # optional

        memory = options.host_memory
        if memory is None:
            memory = offload.PinnedMemory(device) if device.type == "cuda" else offload.HostMemory()
        for stack in (model.model.layers, model.model.vision_layers):
            offload.ActivationOffloader(tuple(stack), memory)


def offloads_parameters(recipe: PolicyConfig, device: torch.device) -> bool:
    """Check whether parameters are stored in host memory. On a CPU they are there anyway, and this is False."""
    return recipe.parallel.cpu_offload and device.type != "cpu"


def _over_context_ranks(kernel: Kernel, mesh: Mesh, rotate: str) -> Kernel:
    """Wrap a kernel in the exchange of keys over cp."""
    from dtrain.attention.context import GatherKernel, RingKernel  # only for context parallel

    exchange = RingKernel if rotate == "ring" else GatherKernel
    if isinstance(kernel, VarlenKernel):
        # Its inner kernel exchanges the keys, and computes the rows that need a mask.
        return type(kernel)(kernel.flash, exchange(kernel.masked, mesh.cp), note=kernel.note)
    return exchange(kernel, mesh.cp)


def _first_problem(problems: list[str | None]) -> str | None:
    """Return the first problem of several ranks, or None."""
    for problem in problems:
        if problem is not None:
            return problem
    return None


def choose_attention(
    recipe: PolicyConfig,
    config: ModelConfig,
    precision: Precision,
    device: torch.device,
    longest: int,
    ranks: Ranks = SINGLE_RANK,
) -> Kernel:
    """Choose the attention kernel: `VarlenKernel` if it is selected and correct on every cp rank, otherwise SDPA.

    Correctness is tested: the kernel computes a small example for each of the model's attention shapes on the device,
    and the results are compared with those of plain PyTorch.

    Args:
        recipe: The recipe.
        config: Config of the model.
        precision: The dtypes of the model.
        device: Device of the run.
        longest: Tokens of the longest row.
        ranks: The cp ranks.

    Raises:
        UserError: If the kernel is not correct, and `model.attention` demands it or rows of `longest` tokens are too
            long for a mask.

    Collectives:
        Those of `varlen.choose_version` over `ranks`.
    """
    if not uses_varlen_kernel(recipe, precision, device.type):
        return TreeKernel() if device.type == "cpu" else SdpaKernel()
    kernel = VarlenKernel()

    def check_on_all_ranks(is_later: bool) -> str | None:
        problems = ranks.gather_results(
            lambda: _find_varlen_problem(kernel, recipe, config, precision, device, is_later)
        )
        return _first_problem(problems)

    problem, kernel.note = varlen.choose_version(device, check_on_all_ranks, ranks)
    if problem is None:
        return kernel
    if recipe.model.attention == "varlen":
        raise UserError(f"model.attention=varlen: {problem}; set model.attention=auto or sdpa")
    _refuse_long_mask(recipe, config, longest, problem)
    return SdpaKernel(note=problem)


def _find_varlen_problem(
    kernel: "VarlenKernel",
    recipe: PolicyConfig,
    config: ModelConfig,
    precision: Precision,
    device: torch.device,
    is_later: bool,
) -> str | None:
    """Return a problem of `VarlenKernel` with the model's shapes on this rank. None if it is correct. No collective.

    `is_later` is that of `varlen.check_varlen`. The other arguments are those of `choose_attention`.
    """
    exchange = recipe.parallel.cp_rotate if recipe.parallel.cp > 1 else None
    for shape in config.attention_shapes(recipe.parallel.tp):
        problem = varlen.check_varlen(
            kernel.flash,
            **shape,
            dtype=precision.compute,
            device=device,
            exchange=exchange,
            is_later=is_later,
            shares_beginnings=recipe.train.share_prompts is not False,
        )
        if problem is not None:
            return problem
    return None


def _refuse_long_mask(recipe: PolicyConfig, config: ModelConfig, longest: int, problem: str) -> None:
    """Raise UserError if rows need a mask and are too long for one.

    Args:
        recipe: The recipe.
        config: Config of the model.
        longest: Tokens of the longest row.
        problem: Why `VarlenKernel`, which needs no mask, cannot be used.
    """
    needs_mask = recipe.parallel.cp > 1 or recipe.data.packing or SLIDING in config.layer_types
    if longest <= MAX_MASKED_ROW_LENGTH or not needs_mask:
        return
    length = recipe.data.max_length
    packed = f", packed into rows of {longest}" if longest > length else ""
    raise UserError(
        f"data.max_length={length}{packed}: {problem}. Without it such rows need a mask of {longest} × {longest}: "
        f"set data.max_length={MAX_MASKED_ROW_LENGTH * length // longest} or less, or use a torch and a GPU that "
        "have the kernel. model.attention=sdpa computes these rows in parts, which is slow"
    )


class DeltaChoice(NamedTuple):
    """Kernel of linear attention layers.

    Attributes:
        kernel: flash-linear-attention; None for plain PyTorch.
        note: Why flash-linear-attention is not used although the recipe would allow it; "" otherwise.
    """

    kernel: "FlashDelta | None"
    note: str


def choose_delta(
    recipe: PolicyConfig,
    config: ModelConfig,
    precision: Precision,
    device: torch.device,
    ranks: Ranks = SINGLE_RANK,
) -> DeltaChoice:
    """Choose the kernel of linear attention layers: flash-linear-attention if it is correct on every cp rank.

    Arguments are those of `choose_attention`.

    Raises:
        UserError: If flash-linear-attention cannot be imported or is not correct, and `model.linear_attention` is fla.

    Collectives:
        One all-gather of objects over `ranks`, if the kernel is selected.
    """
    selected = recipe.model.linear_attention
    sizes = config.linear_attention
    tp = recipe.parallel.tp
    is_supported = device.type == "cuda" and precision.compute in HALF
    if sizes is None or selected == "torch" or (selected == "auto" and not is_supported):
        return DeltaChoice(None, "")
    if recipe.run.deterministic:
        # The kernels choose the sizes of their blocks by measured times, and with them the order of summation.
        return DeltaChoice(None, "run.deterministic: flash-linear-attention has no fixed order of sums")
    from dtrain.attention.linear import flash  # only on CUDA

    # The kernel, or a text with the reason why it cannot be imported.
    rule = flash.installed_flash_delta()

    def check_on_this_rank() -> str | None:
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

    problem = _first_problem(ranks.gather_results(check_on_this_rank))
    if problem is not None and selected == "fla":
        raise UserError(f"model.linear_attention=fla: {problem}; set model.linear_attention=auto or torch")
    if problem is not None or isinstance(rule, str):
        return DeltaChoice(None, problem or "")
    return DeltaChoice(rule, "")


def uses_varlen_kernel(recipe: PolicyConfig, precision: Precision, device_type: str) -> bool:
    """Check whether `model.attention` selects `VarlenKernel` on a device, provided that it is correct there."""
    if recipe.model.attention == "auto":
        return device_type == "cuda" and precision.compute in HALF
    return recipe.model.attention == "varlen"


def max_masked_row_length(recipe: PolicyConfig, precision: Precision, device_type: str) -> int | None:
    """Return the tokens of the longest row that attention computes with a mask over queries × keys.

    None if attention needs no mask, because `VarlenKernel` is selected.
    """
    return None if uses_varlen_kernel(recipe, precision, device_type) else MAX_MASKED_ROW_LENGTH


def select_planned_kernel(recipe: PolicyConfig, precision: Precision, device_type: str, mesh: Mesh) -> Kernel:
    """Return the attention kernel of `choose_attention` for a plan of a model without values.

    The kernel is not tested, because the planned device may be absent.

    Args:
        recipe: The recipe.
        precision: The dtypes of the model.
        device_type: "cuda" or "cpu".
        mesh: The mesh.
    """
    if uses_varlen_kernel(recipe, precision, device_type):
        return VarlenKernel()
    from dtrain.attention.kernels import SdpaByRow  # only for plans

    by_row = SdpaByRow(mesh.cp.get_local_rank(), mesh.cp.size())
    return TreeKernel(masked=by_row) if device_type == "cpu" else by_row


def select_trained_parameters(model: CausalLM, recipe: PolicyConfig, dtype: torch.dtype) -> None:
    """Add the recipe's adapters, and freeze the parameters that the recipe does not train.

    Frozen parameters are stored in the dtype of computation. They need no master copy, gradient or optimizer state.

    Args:
        model: The model on the meta device, before it is sharded.
        recipe: The recipe.
        dtype: The dtype of computation.

    Raises:
        UserError: For patterns that match nothing, for dropout of a vision tower's adapters, and if no parameter is
            left to train.
    """
    if recipe.lora is None:
        _freeze(model, _untrained_parameters(model, _names_by_parameter(model), recipe.train), dtype)
        return
    from dtrain.adapters.lora import add_adapters  # only for runs with adapters
    from dtrain.checkpoint.huggingface.quantized import convert_to_4_bits
    from dtrain.checkpoint.peft.config import adapter_of
    from dtrain.models.building import adaptable_shapes

    config = adapter_of(asdict(recipe.lora))
    problem = config.dropout_problem(adaptable_shapes(model.config))
    if problem:
        raise UserError(problem)
    model.adapters = add_adapters(model, config, recipe.run.seed)

    # `lora.modules_to_save` selects modules that are trained fully. A recipe uses the names of modules in files, which
    # differ from the model's names where a file joins several modules (`ModelConfig.file_module`).
    all_modules = {name.rpartition(".")[0] for name, _ in model.named_parameters(remove_duplicate=False)}
    fully_trained = set()
    unquantized = set()  # names in files
    for module in all_modules:
        file_module = model.config.file_module(module)
        if config.select_saved_modules([file_module]):
            fully_trained.add(module)
            unquantized.add(file_module)
    is_nf4 = recipe.lora.quantize == "nf4"
    convert_to_4_bits(model, recipe.model.directory, dtype, nf4=is_nf4, except_for=unquantized)

    frozen = set()
    for parameter, names in _names_by_parameter(model).items():
        is_trained = any(is_adapter(name) or name.rpartition(".")[0] in fully_trained for name in names)
        if not is_trained:
            frozen.add(parameter)
    _freeze(model, frozen, dtype)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UserError(
            "lora.target names only layers of the vision tower, and the data have no images. Name other layers"
        )


def _names_by_parameter(model: nn.Module) -> dict[nn.Parameter, list[str]]:
    """Return all names of each parameter. A tied head has two."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return names


def _untrained_parameters(
    model: CausalLM, names_by_parameter: dict[nn.Parameter, list[str]], section: Train
) -> set[nn.Parameter]:
    """Return the parameters that the section `train` excludes from training.

    Args:
        model: The model.
        names_by_parameter: All names of each parameter. A pattern matches a parameter if it matches one of its names.
        section: The recipe's section.
    """
    all_names = [name for names in names_by_parameter.values() for name in names]
    frozen_in_tower: set[str] = set()
    problems = unmatched_patterns(section.parameter_patterns, all_names)
    for tower in model.model.vision:
        frozen_in_tower |= frozen_tower_names(section, tower)
        problems += frozen_pattern_problems(section, tower, all_names)
    if problems:
        raise UserError(problems[0])

    untrained = set()
    for parameter, names in names_by_parameter.items():
        is_selected = not section.train_only or matches_any(names, section.train_only)
        is_frozen = matches_any(names, section.freeze) or bool(frozen_in_tower.intersection(names))
        if is_frozen or not is_selected:
            untrained.add(parameter)
    if len(untrained) == len(names_by_parameter):
        vision = f"train.vision={section.vision}, " if frozen_in_tower else ""
        raise UserError(f"{vision}train.train_only and train.freeze leave no parameter to train")
    return untrained


def frozen_tower_names(section: Train, tower: "VisionTower") -> set[str]:
    """Return the names of a vision tower's parameters that `train.vision` freezes, as they are called in the model."""
    trained_patterns = {"frozen": (), "projector": tower.projector_patterns, "all": ("*",)}[section.vision]
    return {f"model.{name}" for name, _ in tower.named_parameters() if not matches_any([name], trained_patterns)}


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
        matching = {name for name in names if matches_any([name], [pattern])}
        if matching and matching <= frozen:
            text = f"train.train_only: {pattern} matches only parameters that train.vision={section.vision} freezes"
            problems.append(Problem("train.train_only", text, "Set train.vision=all"))
    return problems


def _freeze(model: nn.Module, frozen: Collection[nn.Parameter], dtype: torch.dtype) -> None:
    """Replace parameters by copies in `dtype` that need no gradient.

    Copies in modules that need full precision, such as routers, are at least float32.
    """
    full_precision = {
        parameter for module in full_precision_modules(model).values() for parameter in module.parameters()
    }
    wide = torch.promote_types(dtype, torch.float32)
    copies = {}
    for parameter in frozen:
        if parameter.is_floating_point():
            copy_dtype = wide if parameter in full_precision else dtype
            copies[parameter] = nn.Parameter(parameter.detach().to(copy_dtype), requires_grad=False)
    # A tied parameter belongs to several modules, and all of them get the same copy.
    for module in model.modules():
        for name, original in module._parameters.items():
            if original is not None and original in copies:
                module._parameters[name] = copies[original]
