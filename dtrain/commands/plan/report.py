"""A plan as text and as JSON, the output of `dtrain plan`, and its error for a plan that does not fit."""

import json
from argparse import Namespace
from collections.abc import Collection, Sequence
from dataclasses import asdict, replace
from typing import Any

from dtrain import recipe as config
from dtrain.base.errors import RecipeError, UserError
from dtrain.checkpoint.dcp.retention import planned_saves_line
from dtrain.commands.plan.choose import chosen_plan
from dtrain.commands.plan.hardware import GPUS, USABLE_BANDWIDTH, gib, seconds
from dtrain.commands.plan.plan import Plan, choose_starting_mesh, problems, ready
from dtrain.commands.plan.search import Candidate, SearchResult, find_smallest_change, search
from dtrain.launch.devices import resolve_nproc
from dtrain.training.preflight import load_with_problems


def answer(arguments: Namespace) -> None:
    """Plan the recipe of the command's `arguments`, read as by `dtrain run`, and print the plan.

    A search begins with the recipe's own mesh and micro-batch, or, if so many ranks refuse these, with some that fit.
    Raises RecipeError with all errors that a plan sees, and UserError if the plan does not fit, with a change that
    would.
    """
    loaded, errors = load_with_problems(arguments.recipe, arguments.overrides)
    recipe, known = resolve_nproc(loaded), GPUS[arguments.gpu]
    world_size = arguments.world_size or recipe.launch.num_processes
    hardware = replace(
        known,
        per_node=arguments.gpus_per_node or known.per_node,
        inside=arguments.link_inside * 1e9 if arguments.link_inside else known.inside,  # from GB/s
        between=arguments.link_between * 1e9 if arguments.link_between else known.between,
    )
    if errors:
        raise RecipeError([*errors, *problems(ready(recipe), world_size)])
    with config.redacted_errors(recipe):
        begin, budget = recipe, arguments.memory and int(arguments.memory * 2**30)
        if arguments.search:
            if recipe.launch.device == "cpu":
                raise UserError("launch.device=cpu: --search ranks meshes by the estimate, which knows GPUs only")
            begin = choose_starting_mesh(ready(recipe), world_size, hardware.per_node)
        plan = chosen_plan(begin, world_size, hardware, budget)
        result = search(plan) if arguments.search else None
        if arguments.json:
            more = {"search": search_as_json(result, plan)} if result else {}
            lines = [json.dumps(as_json(plan, arguments.step_time) | more, indent=2)]
        else:
            lines = [text(plan, arguments.step_time), *(["", search_text(result, plan)] if result else [])]
        print(config.redact("\n".join(lines), recipe), flush=True)
        if plan.device == "cuda" and not plan.fits:
            raise UserError(too_much(plan))


def too_much(plan: Plan) -> str:
    """Return the error for a plan that does not fit: by how much, the largest part, and a change that fits."""
    if plan.evaluation_bytes > max(plan.budget, plan.step.peak):
        return (
            f"this does not fit: an evaluation takes {gib(plan.evaluation_bytes)} at least, and the budget is "
            f"{gib(plan.budget)}: lower eval.sampling.max_new_tokens, or share the weights among more ranks"
        )
    over = plan.step.peak - plan.budget
    name, size = max(plan.step.parts.items(), key=lambda entry: entry[1])
    change = find_smallest_change(plan)
    fix = (
        "none of the changes that were tried fits (micro_batch, activation_checkpointing, tile, activation_offload, "
        "tp, cp, up to 128 times the "
        "ranks): take a smaller model, shorter rows, or devices with more memory"
        if change is None
        else f"the smallest change that fits is {change[0]}, with a peak of {gib(change[1].peak)}, which "
        f"leaves {gib(plan.budget - change[1].peak)}"
    )
    return (
        f"this does not fit: the peak is {gib(plan.step.peak)}, {gib(over)} more than the budget of "
        f"{gib(plan.budget)}; the largest part is {name} ({gib(size)}); {fix}"
    )


_PARTS = (
    ("parameters", "parameters", "{parameters}"),
    ("gradients", "gradients", "{gradients}"),
    ("optimizer state", "optimizer state", "{optimizer}, for this rank's share"),
    ("rows", "rows", "the step's tokens and what else the loss reads"),
    ("reference", "reference", "a frozen copy of the weights"),
    ("teacher", "teacher", "this rank's share of the frozen teacher"),
    ("reward model", "reward model", "this rank's share of the frozen reward model"),
    ("gathered parameters", "gathered weights", "whole layers, while they compute"),
    ("host activations", "activations put aside", "kept for the backward too (train.activation_offload)"),
    ("activations", "activations", "kept for the backward of a micro-batch"),
    ("loss", "loss", "gradients that the loss forms in the forward"),
    ("temporaries", "temporaries", "of the operations then running"),
)
_SHOWN = 2**10  # bytes; parts below are not worth a row
_PHASES = {
    "start": "before the forward",
    "begin": "at the embedding",
    "forward": "in the forward",
    "head": "in the head and the loss",
    "backward": "in the backward",
    "again": "in the backward, computing activations again",
    "update": "at the optimizer's step",
}


def _moment(plan: Plan) -> str:
    phase, _, layer = plan.step.peak_phase
    where = "" if layer is None else f" of layer {layer + 1} of {plan.spec.model_config.num_hidden_layers}"
    return _PHASES[phase] + where


def text(plan: Plan, step_time: float | None = None) -> str:
    """Return a plan as text for people."""
    sections = [_head(plan), _memory(plan), _traffic(plan), _time(plan, step_time)]
    if plan.spec.sizes.tp > 1:
        sections.insert(1, _tensor_parallel(plan))
    if saves := _saves(plan):
        sections.append(saves)
    if lines := (*plan.assumptions, *plan.choices):
        sections.insert(1, "\n".join(lines))
    return "\n\n".join(sections)


def _head(plan: Plan) -> str:
    recipe, sizes = plan.spec.recipe, plan.spec.sizes
    dtype = str(plan.spec.precision.compute).removeprefix("torch.")
    where = "CPU processes" if plan.device == "cpu" else f"× {plan.hardware.name}"
    size = f"{_millions(plan.total_parameters)} parameters"
    if plan.trained_parameters < plan.total_parameters:
        of_what = "" if recipe.lora is None else ", an adapter"
        is_stored_so = plan.spec.model_config.unquantized_modules is not None
        if recipe.lora is not None and (recipe.lora.quantize == "nf4" or is_stored_so):
            of_what += ", of a base in nf4"
        size += f", {_millions(plan.trained_parameters)} of them trained{of_what}"
    compiled = "\nlayers computed as written, not as compiled" if recipe.train.compile else ""
    return (
        f"{recipe.method} of {recipe.model.path} ({size}), {dtype}, on "
        f"{sizes.world_size} {where}\n{sizes}\n"
        f"{plan.tokens:,} tokens a step, every row taken to be full and every token trained" + compiled
    )


def _millions(count: int) -> str:
    return f"{count / 1e9:,.2f} B" if count >= 1e9 else f"{count / 1e6:,.1f} M" if count >= 1e5 else f"{count:,}"


def _table(rows: Sequence[tuple[str, ...]], right: Collection[int] = ()) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def _tensor_parallel(plan: Plan) -> str:
    cut = "" if plan.spec.recipe.parallel.sequence_parallel else "out"
    rows = [(f"Tensor parallel over {plan.spec.sizes.tp} ranks", f"with{cut} sequence parallel")]
    return _table(rows + [(f"  {pattern}", style) for pattern, style in plan.table.items()])


def _memory(plan: Plan) -> str:
    step, recipe = plan.step, plan.spec.recipe
    if step.smallest_parameters == step.parameters:
        which = "every rank alike"
    else:
        less = gib(step.parameters - step.smallest_parameters)
        which = f"rank 0: its shards are the largest, the smallest hold {less} less of the parameters"
    trained = step.trained_parameters
    held = f"{gib(step.parameters - trained)} of frozen weights, {gib(trained)} of trained ones"
    kept = "" if plan.spec.recipe.parallel.optimizer_offload else "master "
    where = " on the host, what visits" if plan.spec.recipe.parallel.optimizer_offload else ""
    words = {
        "parameters": f"this rank's share of the {kept}weights" if step.trained_parameters == step.parameters else held,
        "optimizer": plan.spec.recipe.optimizer.name + where,
        "gradients": "of whole layers until the last micro-batch is done"
        if plan.spec.sizes.accumulation > 1 and not plan.spec.recipe.parallel.reduce_each
        else "this rank's share, as far as it is there, and what is on its way",
    }
    rows = [("Memory of a rank at its peak", "", f"({which})")]
    for part, name, why in _PARTS:
        if step.parts.get(part, 0) >= _SHOWN:
            rows.append((f"  {name}", gib(step.parts[part]), why.format(**words)))
        if part == "parameters" and step.layer_embeddings >= _SHOWN:
            rows.append(
                ("  of these the table", gib(step.layer_embeddings), "of embeddings for each layer (train.freeze)")
            )
        if part == "parameters" and step.vision_tower:
            rows.append(("  of these the vision tower", gib(step.vision_tower), f"train.vision={recipe.train.vision}"))
    rows.append(("  peak", gib(step.peak), _moment(plan)))
    if plan.device == "cuda":
        free = plan.budget - step.peak
        rows.append(
            (f"  {'free' if free >= 0 else 'TOO MUCH'} of the budget", gib(abs(free)), f"of {gib(plan.budget)}")
        )
    if step.host_activations:
        pinned = "pinned, " if plan.device == "cuda" else ""
        rows.append(
            ("Activations on the host", gib(step.host_activations), f"{pinned}of each rank (train.activation_offload)")
        )
    rows.append(("Shards held all the time", gib(step.parameters + step.gradients + step.optimizer_state), ""))
    if plan.evaluation_bytes:
        rows.append(
            ("An evaluation, at least", gib(plan.evaluation_bytes), "with the longest answer's keys (eval.sampling)")
        )
    return _table(rows, right=(1,))


def _bytes_of_a_save(plan: Plan) -> int | None:
    """Return about what a save takes; None without saves, or if the optimizer's state is on the host, where a plan does
    not count it."""
    recipe, sizes = plan.spec.recipe, plan.spec.sizes
    if recipe.checkpoint.every is None or recipe.parallel.optimizer_offload is True:
        return None
    # Rank 0 has the largest shards, and what tp does not shard is counted once a rank: a little too much.
    return (plan.step.trained_parameters + plan.step.optimizer_state) * sizes.dp_shard * sizes.cp * sizes.tp


def _saves(plan: Plan) -> str:
    """Return what the run's saves take on the disk; "" if this is not known."""
    recipe, keep, size = plan.spec.recipe, plan.spec.recipe.checkpoint, _bytes_of_a_save(plan)
    if size is None or keep.every is None:
        return ""
    line = planned_saves_line(size, keep, recipe.train.steps, recipe.run.directory / "checkpoints")
    return f"Saves, about {line} on this machine"


def _traffic(plan: Plan) -> str:
    rows = [("Sent by a rank in a step", "ranks", "messages", "bytes")]
    for collective, (count, size) in sorted(plan.step.traffic.items()):
        if collective.ranks > 1:
            dimension = "counts, loss, norm:" if collective.dimension == "all" else collective.dimension
            name = f"  {dimension} {collective.kind}{' (host)' if collective.on_host else ''}"
            rows.append((name, f"{collective.ranks:,}", f"{count:,}", gib(size)))
    return _table(rows, right=(1, 2, 3)) if len(rows) > 1 else "Nothing is sent: one process."


def _time(plan: Plan, step_time: float | None) -> str:
    lines = [f"FLOPs per token: {plan.flops_per_token:.4g} (rows of one document; a run's mfu goes by each document's)"]
    if plan.device == "cuda":
        time = plan.time
        moving = [("  activations move", seconds(time.host), "to the host and back, beside these")]
        lines += [
            f"Estimate of a step: {seconds(time.total)}, {plan.tokens / time.total:,.0f} tokens/s, "
            f"MFU {plan.mfu(time.total):.1%}",
            _table(
                [
                    ("  matrix products", seconds(time.arithmetic), f"at {plan.hardware.reach:.0%} of the peak"),
                    ("  everything else", seconds(time.memory), f"at {USABLE_BANDWIDTH:.0%} of the memory's bandwidth"),
                    ("  messages, hidden", seconds(time.hidden), "beside these, as far as they last"),
                    *(moving if time.host else []),
                    ("  messages, exposed", seconds(time.exposed), "while nothing computes"),
                    ("  optimizer", seconds(time.optimizer), ""),
                ],
                right=(1,),
            ),
            "  An estimate from data sheets: it leaves out the start of kernels, stragglers, other traffic, data and "
            "saving.",
        ]
    if step_time is not None:
        lines.append(f"A step of {seconds(step_time)} would mean an MFU of {plan.mfu(step_time):.1%}.")
    return "\n".join(lines)


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
        "sizes": asdict(plan.spec.sizes),
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
    """Return the best candidates as a table, and how the others ended."""
    rows: list[tuple[str, ...]] = [("", *_SHAPE, "peak", "step", "MFU")]
    for number, candidate in enumerate(result.best, 1):
        sizes, time = (str(getattr(candidate.sizes, name)) for name in _SHAPE), candidate.time.total
        rows.append((str(number), *sizes, gib(candidate.step.peak), seconds(time), f"{plan.mfu(time):.1%}"))
    lines = ["The best meshes and micro-batches by the estimate", _table(rows, right=range(len(rows[0])))]
    if not result.best:
        lines = ["No mesh and micro-batch of those that were traced fits."]
    lines.append("Of all candidates: " + "; ".join(f"{count:,} {why}" for why, count in result.counts.items() if count))
    if result.too_large:
        close = min(result.too_large, key=lambda candidate: candidate.step.peak)
        shape = ", ".join(f"{name} {getattr(close.sizes, name)}" for name in _SHAPE)
        lines.append(f"The one that nearly fits: {shape}, {gib(close.step.peak - plan.budget)} too much")
    return "\n".join(lines)


def search_as_json(result: SearchResult, plan: Plan) -> dict[str, Any]:
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
