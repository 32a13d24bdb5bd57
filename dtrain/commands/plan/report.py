"""The output of `dtrain plan`: a plan as text or JSON, and the error for a plan that does not fit."""

import json
from argparse import Namespace
from collections.abc import Collection, Sequence
from dataclasses import asdict, replace
from typing import Any

from dtrain import recipe as config
from dtrain.base.errors import UserError
from dtrain.checkpoint.dcp.retention import planned_saves_line
from dtrain.commands.plan.choose import chosen_plan
from dtrain.commands.plan.hardware import GPUS, USABLE_BANDWIDTH, Hardware, gib, seconds
from dtrain.commands.plan.plan import Plan, choose_starting_mesh, ready
from dtrain.commands.plan.search import Candidate, SearchResult, find_smallest_change, search
from dtrain.launch.devices import resolve_nproc
from dtrain.recipe import Recipe
from dtrain.training.preflight import print_origin


def print_plan(arguments: Namespace, loaded: Recipe) -> None:
    """Plan a recipe and print the plan.

    A search begins with the recipe's own mesh and micro-batch. If the number of ranks does not allow them, it begins
    with others that it does.

    Args:
        arguments: The arguments of the command.
        loaded: The recipe.

    Raises:
        RecipeError: With all mistakes in the recipe that a plan can find.
        UserError: If the plan does not fit. The message names a change that would.
    """
    print_origin(loaded)
    recipe = resolve_nproc(loaded)
    world_size = arguments.world_size or recipe.launch.num_processes
    hardware = _hardware(arguments)
    with config.redacted_errors(recipe):
        start = recipe
        if arguments.search:
            if recipe.launch.device == "cpu":
                raise UserError("launch.device=cpu: --search ranks meshes by estimated times, which only GPUs have")
            start = choose_starting_mesh(ready(recipe), world_size, hardware.per_node)
        budget = arguments.memory and int(arguments.memory * 2**30)
        plan = chosen_plan(start, world_size, hardware, budget)
        result = search(plan) if arguments.search else None
        if arguments.json:
            tree = as_json(plan, arguments.step_time)
            if result is not None:
                tree["search"] = search_as_json(result, plan)
            output = json.dumps(tree, indent=2)
        else:
            output = text(plan, arguments.step_time)
            if result is not None:
                output += f"\n\n{search_text(result, plan)}"
        print(config.redact(output, recipe), flush=True)
        if plan.device == "cuda" and not plan.fits:
            raise UserError(too_much(plan))


def _hardware(arguments: Namespace) -> Hardware:
    """Return the GPU of the arguments, with the links that they set."""
    hardware = GPUS[arguments.gpu]
    if arguments.gpus_per_node:
        hardware = replace(hardware, per_node=arguments.gpus_per_node)
    if arguments.link_inside:
        hardware = replace(hardware, inside=arguments.link_inside * 1e9)  # the option is in GB/s
    if arguments.link_between:
        hardware = replace(hardware, between=arguments.link_between * 1e9)
    return hardware


def too_much(plan: Plan) -> str:
    """Return the error for a plan that does not fit: by how much, the largest part, and a change that fits."""
    if plan.evaluation_bytes > max(plan.budget, plan.step.peak):
        return (
            f"this does not fit: an evaluation needs at least {gib(plan.evaluation_bytes)}, and the budget is "
            f"{gib(plan.budget)}: lower eval.sampling.max_new_tokens, or shard the weights over more ranks"
        )
    largest_part, part_size = max(plan.step.parts.items(), key=lambda entry: entry[1])
    change = find_smallest_change(plan)
    if change is None:
        fix = (
            "none of the changes that were tried fits (micro_batch, activation_checkpointing, tile, "
            "activation_offload, tp, cp, up to 128 times the ranks): use a smaller model, shorter rows, or devices "
            "with more memory"
        )
    else:
        overrides, step = change
        fix = (
            f"the smallest change that fits is {overrides}, with a peak of {gib(step.peak)}, which leaves "
            f"{gib(plan.budget - step.peak)}"
        )
    return (
        f"this does not fit: the peak is {gib(plan.step.peak)}, {gib(plan.step.peak - plan.budget)} more than the "
        f"budget of {gib(plan.budget)}; the largest part is {largest_part} ({gib(part_size)}); {fix}"
    )


# Parts of the peak: name in the plan, name in the table, explanation.
_PARTS = (
    ("parameters", "parameters", "{parameters}"),
    ("gradients", "gradients", "{gradients}"),
    ("optimizer state", "optimizer state", "{optimizer}, this rank's shard"),
    ("rows", "rows", "token ids and other inputs of the step"),
    ("reference", "reference", "the frozen reference model, this rank's shard"),
    ("teacher", "teacher", "the frozen teacher, this rank's shard"),
    ("reward model", "reward model", "the frozen reward model, this rank's shard"),
    ("gathered parameters", "gathered weights", "unsharded weights of the layers that are computing"),
    ("host activations", "offloaded activations", "kept for the backward too (train.activation_offload)"),
    ("activations", "activations", "kept for the backward of a micro-batch"),
    ("loss", "loss", "gradients that the loss computes in the forward"),
    ("temporaries", "temporaries", "of the operations that are running"),
)
_SHOWN = 2**10  # smaller parts, in bytes, have no row
_PHASES = {
    "start": "before the forward",
    "begin": "at the embedding",
    "forward": "in the forward",
    "head": "in the head and the loss",
    "backward": "in the backward",
    "again": "in the backward, while activations are recomputed",
    "update": "at the optimizer step",
}


def _moment(plan: Plan) -> str:
    """Return where the peak is, as text."""
    phase, _, layer = plan.step.peak_phase
    if layer is None:
        return _PHASES[phase]
    return f"{_PHASES[phase]} of layer {layer + 1} of {plan.spec.model_config.num_hidden_layers}"


def text(plan: Plan, step_time: float | None = None) -> str:
    """Format a plan for the terminal.

    Args:
        plan: The plan.
        step_time: Measured seconds of a step, for its MFU.
    """
    sections = [_head(plan)]
    notes = (*plan.assumptions, *plan.choices)
    if notes:
        sections.append("\n".join(notes))
    if plan.spec.sizes.tp > 1:
        sections.append(_tensor_parallel(plan))
    sections += [_memory(plan), _traffic(plan), _time(plan, step_time)]
    saves = _saves(plan)
    if saves:
        sections.append(saves)
    return "\n\n".join(sections)


def _head(plan: Plan) -> str:
    """Return the section on model, devices, sizes and tokens."""
    recipe, sizes = plan.spec.recipe, plan.spec.sizes
    dtype = str(plan.spec.precision.compute).removeprefix("torch.")
    devices = "CPU processes" if plan.device == "cpu" else f"× {plan.hardware.name}"
    size = f"{format_parameters(plan.total_parameters)} parameters"
    if plan.trained_parameters < plan.total_parameters:
        adapter = "" if recipe.lora is None else ", in an adapter"
        is_stored_quantized = plan.spec.model_config.unquantized_modules is not None
        if recipe.lora is not None and (recipe.lora.quantize == "nf4" or is_stored_quantized):
            adapter += " of a base in nf4"
        size += f", {format_parameters(plan.trained_parameters)} of them trained{adapter}"
    lines = [
        f"{recipe.method} of {recipe.model.path} ({size}), {dtype}, on {sizes.world_size} {devices}",
        str(sizes),
        f"{plan.tokens:,} tokens per step, if every row is full and every token is trained",
    ]
    if recipe.train.compile:
        lines.append("compiled layers are planned as they are written")
    return "\n".join(lines)


def format_parameters(count: int) -> str:
    """Format a number of parameters.

    Example:
        >>> format_parameters(1_235_814_400), format_parameters(5_636_096), format_parameters(4096)
        ('1.24 B', '5.6 M', '4,096')
    """
    if count >= 1e9:
        return f"{count / 1e9:,.2f} B"
    if count >= 1e5:
        return f"{count / 1e6:,.1f} M"
    return f"{count:,}"


def _table(rows: Sequence[tuple[str, ...]], right: Collection[int] = ()) -> str:
    """Align rows in columns. `right` has the columns that are aligned at their right end."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = []
        for column, (cell, width) in enumerate(zip(row, widths, strict=True)):
            cells.append(cell.rjust(width) if column in right else cell.ljust(width))
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _tensor_parallel(plan: Plan) -> str:
    """Return the table of modules and their tensor-parallel styles."""
    is_sharded = plan.spec.recipe.parallel.shards_sequence(plan.spec.model_config.transformers is None)
    with_or_without = "with" if is_sharded else "without"
    rows = [(f"Tensor parallel over {plan.spec.sizes.tp} ranks", f"{with_or_without} sequence parallel")]
    rows += [(f"  {pattern}", style) for pattern, style in plan.table.items()]
    return _table(rows)


def _memory(plan: Plan) -> str:
    """Return the table of the memory of a rank."""
    step, recipe = plan.step, plan.spec.recipe
    if step.smallest_parameters == step.parameters:
        which = "the same on every rank"
    else:
        less = gib(step.parameters - step.smallest_parameters)
        which = f"rank 0, whose shards are the largest; the smallest have {less} less of the parameters"
    explanations = _explanations(plan)
    rows = [("Memory of a rank at its peak", "", f"({which})")]
    for part, name, explanation in _PARTS:
        if step.parts.get(part, 0) >= _SHOWN:
            rows.append((f"  {name}", gib(step.parts[part]), explanation.format(**explanations)))
        if part == "parameters" and step.layer_embeddings >= _SHOWN:
            size = gib(step.layer_embeddings)
            rows.append(("    of these, embeddings", size, "of every layer (frozen by train.freeze)"))
        if part == "parameters" and step.vision_tower:
            rows.append(("    of these, vision tower", gib(step.vision_tower), f"train.vision={recipe.train.vision}"))
    rows.append(("  peak", gib(step.peak), _moment(plan)))
    if plan.device == "cuda":
        free = plan.budget - step.peak
        name = "free" if free >= 0 else "TOO MUCH"
        rows.append((f"  {name} of the budget", gib(abs(free)), f"of {gib(plan.budget)}"))
    if step.host_activations:
        pinned = "pinned memory" if plan.device == "cuda" else "memory"
        size = gib(step.host_activations)
        rows.append(("Activations on the host", size, f"{pinned} of each rank (train.activation_offload)"))
    resident = gib(step.parameters + step.gradients + step.optimizer_state)
    rows.append(("Shards", resident, "parameters, gradients and optimizer state"))
    if plan.evaluation_bytes:
        size = gib(plan.evaluation_bytes)
        rows.append(("An evaluation, at least", size, "with the keys and values of the longest answer (eval.sampling)"))
    return _table(rows, right=(1,))


def _explanations(plan: Plan) -> dict[str, str]:
    """Return the explanations of parts that depend on the recipe."""
    step, parallel = plan.step, plan.spec.recipe.parallel
    if step.trained_parameters == step.parameters:
        # With an offloaded optimizer the master weights are on the host.
        kind = "weights" if parallel.optimizer_offload else "master weights"
        parameters = f"this rank's shard of the {kind}"
    else:
        frozen = gib(step.parameters - step.trained_parameters)
        parameters = f"{frozen} of frozen weights, {gib(step.trained_parameters)} of trained ones"
    optimizer = plan.spec.recipe.optimizer.name
    if parallel.optimizer_offload:
        optimizer += " on the host: the part that is on the device during the update"
    if plan.spec.sizes.accumulation > 1 and not parallel.reduce_each:
        gradients = "unsharded until the last micro-batch is done"
    else:
        gradients = "this rank's shard, as far as it exists, and what is being reduced"
    return {"parameters": parameters, "optimizer": optimizer, "gradients": gradients}


def _bytes_of_a_save(plan: Plan) -> int | None:
    """Return about how many bytes a checkpoint has.

    None if the run saves none, or if the optimizer's state is on the host, where a plan does not count it.
    """
    recipe, sizes = plan.spec.recipe, plan.spec.sizes
    if recipe.checkpoint.every is None or recipe.parallel.optimizer_offload is True:
        return None
    # Rank 0 has the largest shards, and weights that tp does not shard are counted once per rank: slightly too much.
    return (plan.step.trained_parameters + plan.step.optimizer_state) * sizes.dp_shard * sizes.cp * sizes.tp


def _saves(plan: Plan) -> str:
    """Return the section on disk space for checkpoints. "" if it is not known."""
    recipe = plan.spec.recipe
    size = _bytes_of_a_save(plan)
    if size is None or recipe.checkpoint.every is None:
        return ""
    directory = recipe.run.directory / "checkpoints"
    line = planned_saves_line(size, recipe.checkpoint, recipe.train.steps, directory)
    return f"Checkpoints, about {line} on this machine"


def _traffic(plan: Plan) -> str:
    """Return the table of the messages that a rank sends."""
    rows = [("Sent by a rank in a step", "ranks", "messages", "bytes")]
    for collective, (count, size) in sorted(plan.step.traffic.items()):
        if collective.ranks == 1:
            continue
        dimension = "counts, loss, norm:" if collective.dimension == "all" else collective.dimension
        host = " (host)" if collective.on_host else ""
        name = f"  {dimension} {collective.kind}{host}"
        rows.append((name, f"{collective.ranks:,}", f"{count:,}", gib(size)))
    if len(rows) == 1:
        return "Nothing is sent: there is one process."
    return _table(rows, right=(1, 2, 3))


def _time(plan: Plan, step_time: float | None) -> str:
    """Return the section on arithmetic and time."""
    per_token = f"{plan.flops_per_token:.4g}"
    lines = [f"FLOPs per token: {per_token} (for rows of one document; the mfu of a run counts each document's own)"]
    if plan.device == "cuda":
        time = plan.time
        rows = [
            ("  matrix products", seconds(time.arithmetic), f"at {plan.hardware.reach:.0%} of peak arithmetic"),
            ("  other operations", seconds(time.memory), f"at {USABLE_BANDWIDTH:.0%} of peak memory bandwidth"),
            ("  hidden communication", seconds(time.hidden), "during the two above"),
        ]
        if time.host:
            rows.append(("  activation offload", seconds(time.host), "to the host and back, during the first two"))
        rows += [
            ("  exposed communication", seconds(time.exposed), "while nothing computes"),
            ("  optimizer", seconds(time.optimizer), ""),
        ]
        lines += [
            f"Estimated step time: {seconds(time.total)}, {plan.tokens / time.total:,.0f} tokens/s, "
            f"MFU {plan.mfu(time.total):.1%}",
            _table(rows, right=(1,)),
            "  Estimated from data sheets, without kernel starts, stragglers, other traffic, data loading and "
            "checkpoints.",
        ]
    if step_time is not None:
        lines.append(f"A step of {seconds(step_time)} would mean an MFU of {plan.mfu(step_time):.1%}.")
    return "\n".join(lines)


def _sizes_as_json(plan: Plan) -> dict[str, Any]:
    """Return the sizes of the mesh and the batch. The entry "is_open" says whether the batch is an upper bound."""
    sizes = asdict(plan.spec.sizes)
    sizes["is_open"] = sizes.pop("is_upper_bound")  # the name that readers of the JSON know
    return sizes


def as_json(plan: Plan, step_time: float | None = None) -> dict[str, Any]:
    """Return a plan as a dict for JSON, in bytes and seconds."""
    step, time = plan.step, plan.time
    measured = {} if step_time is None else {"step_time": step_time, "mfu": plan.mfu(step_time)}
    return {
        "method": plan.spec.recipe.method,
        "model": plan.spec.recipe.model.path,
        "total_parameters": plan.total_parameters,
        "trained_parameters": plan.trained_parameters,
        "device": plan.device,
        "gpu": plan.hardware.name if plan.device == "cuda" else None,
        "dtype": str(plan.spec.precision.compute).removeprefix("torch."),
        "sizes": _sizes_as_json(plan),
        "assumed": list(plan.assumptions),
        "chosen": list(plan.choices),
        "save_bytes": _bytes_of_a_save(plan),
        "tensor_parallel_plan": dict(plan.table),
        "rank": 0,
        "memory": {
            "parameters": step.parameters,
            "trained_parameters": step.trained_parameters,
            "gradients": step.gradients,
            "optimizer_state": step.optimizer_state,
            "activations": step.activations,
            "peak": step.peak,
            "peak_moment": _moment(plan),
            "peak_parts": dict(step.parts),
            "per_layer_table": step.layer_embeddings,
            "vision_tower": step.vision_tower,
            "lightest_rank_parameters": step.smallest_parameters,
            "host_activations": step.host_activations,
            "evaluation": plan.evaluation_bytes,
            "budget": plan.budget if plan.device == "cuda" else None,
            "fits": plan.fits if plan.device == "cuda" else None,
        },
        "traffic": [
            {**collective._asdict(), "count": count, "bytes": size}
            for collective, (count, size) in sorted(step.traffic.items())
            if collective.ranks > 1
        ],
        "tokens": plan.tokens,
        "flops_per_token": plan.flops_per_token,
        "estimate": {
            "step_time": time.total,
            "mfu": plan.mfu(time.total),
            "arithmetic": time.arithmetic,
            "memory": time.memory,
            "optimizer": time.optimizer,
            "hidden_communication": time.hidden,
            "exposed_communication": time.exposed,
            "activation_offload": time.host,
            "is_estimate": True,
        }
        if plan.device == "cuda"
        else None,
        **measured,
    }


_SHAPE = ("dp_replicate", "dp_shard", "cp", "tp", "micro_batch")


def search_text(result: SearchResult, plan: Plan) -> str:
    """Return the best candidates as a table, and the number of others by outcome."""
    if result.best:
        rows: list[tuple[str, ...]] = [("", *_SHAPE, "peak", "step", "MFU")]
        for number, candidate in enumerate(result.best, 1):
            shape = [str(getattr(candidate.sizes, name)) for name in _SHAPE]
            time = candidate.time.total
            rows.append((str(number), *shape, gib(candidate.step.peak), seconds(time), f"{plan.mfu(time):.1%}"))
        lines = ["Fastest meshes and micro-batches by estimated step time", _table(rows, right=range(len(rows[0])))]
    else:
        lines = ["None of the meshes and micro-batches that were traced fits."]
    outcomes = [f"{outcome}: {count:,}" for outcome, count in result.counts.items() if count]
    lines.append(f"Candidates by outcome: {'; '.join(outcomes)}")
    if result.too_large:
        closest = min(result.too_large, key=lambda candidate: candidate.step.peak)
        shape_text = ", ".join(f"{name} {getattr(closest.sizes, name)}" for name in _SHAPE)
        lines.append(f"The closest that does not fit: {shape_text}, {gib(closest.step.peak - plan.budget)} too much")
    return "\n".join(lines)


def search_as_json(result: SearchResult, plan: Plan) -> dict[str, Any]:
    """Return the result of a search as a dict for JSON, in bytes and seconds."""

    def entry(candidate: Candidate) -> dict[str, Any]:
        shape = {name: getattr(candidate.sizes, name) for name in _SHAPE}
        return {
            **shape,
            "peak": candidate.step.peak,
            "step_time": candidate.time.total,
            "mfu": plan.mfu(candidate.time.total),
        }

    return {
        "best": [entry(candidate) for candidate in result.best],
        "too_large": [entry(candidate) for candidate in result.too_large],
        "counts": dict(result.counts),
    }
