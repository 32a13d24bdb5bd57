"""A training step on stand-in tensors, traced: memory, messages and arithmetic of a `Policy` on one rank.

The step is the trainer's own: the method's `prepare`, then `Policy.forward_backward` and `optimizer_step`, on a model
that `policy.build.lay_out` laid out over a process group of as many ranks as are planned, of which this process is one
and the only one. On a planned CPU the host's tensors lie in the same memory: the step's rows are counted too.

Few layers and micro-batches of it are traced, for everything in it grows evenly with either. Layers of one kind are
alike, so a peak within the third layer's forward, say, or within the last layer's backward is so many bytes and so many
more for each further layer. Two traces, a period of the layer types apart, give both numbers; phases are named by their
distance from the first layer or from the last. Of the micro-batches the first and the last differ from those between.
"""

import re
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import product
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from dtrain.adapters.config import LoraLayer
from dtrain.base.batch import IGNORE, Row, collate
from dtrain.base.row_images import RowImages
from dtrain.checkpoint.peft.config import adapter_of
from dtrain.commands.plan.children import side_by_side
from dtrain.commands.plan.images import is_packed, split, streams_of
from dtrain.commands.plan.memory import LEFT_OUT, Phase
from dtrain.commands.plan.planned_device import PlannedDevice, PlannedStream
from dtrain.commands.plan.policy import PlannedPolicy, bytes_of, mark_layers, on_device
from dtrain.commands.plan.spec import PlanSpec
from dtrain.commands.plan.tracer import Collective, Tracer
from dtrain.data.images.reader import ImageReader
from dtrain.memory.activation_offload import ON_THEIR_WAY
from dtrain.methods import Method
from dtrain.models.common.config import ModelConfig
from dtrain.models.shapes import adaptable, modules
from dtrain.parallel.mesh import build_mesh
from dtrain.parallel.placement import local_bounds
from dtrain.parallel.runtime import Runtime
from dtrain.policy.config import PolicyConfig
from dtrain.recipe import Sizes

TRACED = 3  # micro-batches: a first, a last, and one like all between them


@dataclass(frozen=True)
class Trace:
    """A traced step of `layers` layers and `micro_batches` micro-batches.

    peaks: by phase, bytes by part. counts: as of `Tracer`. held: bytes by the name of a field of `Step`, "offloaded" of
    one micro-batch; "rows", "micro rows": of the host's tensors on a planned CPU, and of those that one micro-batch
    brings.
    """

    layers: int
    micro_batches: int
    peaks: dict[Phase, Counter[str]]
    counts: Counter[tuple]
    held: Counter[str]


def trace_step(spec: PlanSpec, config: ModelConfig, rank: int = 0) -> Trace:
    """Trace a step of `spec` on the model of `config`, as rank `rank` of its world computes it. Nothing is sent: no
    other rank is in the process group.

    Can be called once, in a process of its own, which keeps the group. Raises RuntimeError where torch.distributed is
    up: a plan never shares a process with a run.
    """
    from torch.testing._internal.distributed import fake_pg  # noqa: F401 (registers the backend "fake")

    if dist.is_initialized():
        raise RuntimeError("a plan needs a process of its own, and torch.distributed is up in this one")
    warnings.simplefilter("ignore")  # torch's own, of what a later release will want
    sizes, device = spec.sizes, spec.world.device_type
    dist.init_process_group("fake", store=dist.HashStore(), rank=rank, world_size=sizes.world_size)
    mesh = build_mesh(Runtime(), **sizes.shape, ep=sizes.ep)  # FSDP on stand-ins is FSDP on a CPU
    planned = torch.device(device, 0) if device == "cuda" else torch.device(device)
    tracer = Tracer(mesh, on_host=device == "cpu")
    policy = PlannedPolicy(spec, config, mesh, Runtime(rank=rank, device=planned), tracer)
    mark_layers(policy.model.model.layers, tracer)
    method = type(spec.method)(spec.recipe)
    policy.keep_beside(method)
    micro_batches = min(sizes.accumulation, TRACED)
    rows = full_rows(method, micro_batches, spec)
    images = images_of(spec, len(rows), "meta")
    pixels = images.pixels if images is not None else []
    policy.see_all(pixels, LEFT_OUT)  # the host's, which are counted as its rows
    with PlannedDevice(planned, tracer.few, tracer.as_one_kernel):
        policy.init_optimizer(total_steps=10)
        with torch.cpu.stream(PlannedStream()), tracer:
            tracer.memory.begin(Phase("start"))
            batch, loss = method.prepare(policy, batch_of(rows, images))
            policy.forward_backward(batch, loss, method.micro_rows)
            policy.optimizer_step()
    parameters = list(policy.model.parameters())
    table = getattr(policy.model.model, "embed_tokens_per_layer", None)
    held = Counter(
        parameters=bytes_of(map(on_device, parameters)),
        trained=bytes_of(on_device(parameter) for parameter in parameters if parameter.requires_grad),
        table=0 if table is None else bytes_of([on_device(table.weight)]),
        tower=bytes_of(on_device(weight) for tower in policy.model.model.vision for weight in tower.parameters()),
        gradients=policy.gradient_bytes,
        state=policy.state_bytes,
        lightest=_min_shard_bytes(parameters),
        host=policy.memory.bytes,
        visiting=policy.visiting_bytes,
        offloaded=policy.memory.copied // micro_batches,
    )
    if tracer.on_host:
        held["rows"] = policy.scorer.host + bytes_of(pixels)
        held["micro rows"] = policy.scorer.micro_rows
    return Trace(config.num_hidden_layers, micro_batches, tracer.memory.peaks(), tracer.counts, held)


def batch_of(rows: Sequence[Row], images: RowImages | None) -> dict[str, Any]:
    """Return the batch of rows as full as `full_rows` makes them. images: of the rows."""
    batch: dict[str, Any] = collate(rows, list(rows[0]))
    return batch if images is None else batch | {"images": images}


def images_of(spec: PlanSpec, rows: int, device: str = "cpu") -> RowImages | None:
    """Return the images of so many planned rows, with pixels of zeros on `device`; None without images."""
    if not spec.row_images or (tower := spec.model_config.vision) is None:
        return None
    shape = sum(image.patches for image in spec.row_images), tower.values
    grids = [image.grid for image in spec.row_images]
    return RowImages([torch.zeros(shape, device=device) for _ in range(rows)], [grids] * rows)


def full_rows(method: Method, micro_batches: int, spec: PlanSpec | None = None) -> list[Row]:
    """Return a rank's rows of a step, as full as the recipe allows: every row of `data.max_length` tokens (a packed row
    of pairs twice as many), every token trained that has one before it; packed rows hold two documents, so that the
    masks are those of packing. spec: with the images of a row, for which every row has the streams."""
    recipe = method.recipe
    length = method.row_length()
    count = micro_batches * recipe.train.micro * method.rows_of_a_sample()
    documents = split(spec.row_images if spec else (), length, 2 if is_packed(method) else 1)
    places = torch.arange(length)
    seq_ids = torch.arange(len(documents)).repeat_interleave(torch.tensor([tokens for tokens, _ in documents]))
    begins = torch.searchsorted(seq_ids, seq_ids)
    streams = {
        "input_ids": torch.ones_like(places),
        "labels": torch.where((begins.roll(-1) == places + 1) | (places == length - 1), IGNORE, 1),
        "position_ids": places - begins,
        "seq_ids": seq_ids,
    }
    if spec is not None and spec.row_images:
        streams |= streams_of(documents, ImageReader(spec.source.tokenizer, spec.source.path).processor)
    if method.kind == "prompts":
        of_rollouts = ["old_logprobs", "sampling_logprobs", "advantages", "reference_logprobs"]
        names = of_rollouts if method.needs_reference() else of_rollouts[:-1]
        streams |= {name: torch.zeros(length, dtype=torch.float64) for name in names}
    if method.kind == "labelled":  # the second half are replies that do not belong to their prompts
        streams["desirable"] = torch.where(streams["labels"] == IGNORE, 0.0, 1.0).double()
    rows: list[Row] = [{name: stream.clone() for name, stream in streams.items()} for _ in range(count)]
    others = rows if method.kind == "labelled" else []
    return [*rows, *({**row, "desirable": torch.zeros_like(row["desirable"])} for row in others)]


def _min_shard_bytes(parameters: Sequence[Tensor]) -> int:
    """Return the bytes of `parameters` on the rank that holds fewest. Chunks fall off towards the last rank of a
    dimension, so it is last in some of them; rank 0 holds most."""
    ndim = max((p.device_mesh.ndim for p in parameters if isinstance(p, DTensor)), default=0)

    def size(parameter: Tensor, is_last: tuple[bool, ...]) -> int:
        bounds = local_bounds(parameter, lambda mesh, dim: mesh.size(dim) - 1 if is_last[dim] else 0)
        return prod(end - start for start, end in bounds) * on_device(parameter).element_size()

    corners = product((False, True), repeat=ndim)
    return min(sum(size(parameter, corner) for parameter in parameters) for corner in corners)


_QUESTION = 16  # bytes: two numbers
_MARGIN = 2  # layers at either end that differ from those between: prefetched, kept gathered


@dataclass(frozen=True)
class Step:
    """Memory, traffic and arithmetic of one rank in an optimizer step, in bytes.

    trained: of the parameters those that are; table: those that are embeddings for each layer; tower: those of the
    vision tower. lightest: the smallest parameters that a rank has. peak: with the optimizer's state. parts: what it is
    made of. moment: where it is. activations: kept for the backward of a micro-batch, at most. traffic: (messages,
    bytes). flops: by the dtype of their operands. moved: read and written by all other operations. kernels: number of
    operations that compute. host: of the host's memory for activations; offloaded: to it and back.
    visiting: of what is on the host for the optimizer, which visits the device at the step. behind: flops of products
    that are computed between the beginning of a collective of cp and the wait for it.
    """

    parameters: int
    trained: int
    gradients: int
    state: int
    lightest: int
    peak: int
    parts: Counter[str]
    moment: Phase
    activations: int
    traffic: dict[Collective, tuple[int, int]]
    flops: dict[torch.dtype, int]
    moved: int
    kernels: int
    table: int = 0
    tower: int = 0
    host: int = 0
    visiting: int = 0
    offloaded: int = 0
    behind: dict[tuple[Collective, torch.dtype], int] = field(default_factory=dict)

    @property
    def held(self) -> int:
        """Bytes that the device has at the optimizer's step, whatever was computed before it; at most `peak`."""
        return self.parameters + self.gradients + self.state


def plan_step(spec: PlanSpec, *, rank: int = 0, whole: bool = False) -> Step:
    """Return the step of rank `rank` in the world of `spec`, whose devices are of type cpu or cuda.

    whole: trace every layer. Nothing is sent, no weight is read; the traces run in processes forked from this one, in
    which torch.distributed must not be up.
    """
    return plan_steps([spec], rank=rank, whole=whole)[0]


def plan_steps(specs: Sequence[PlanSpec], *, rank: int = 0, whole: bool = False) -> list[Step]:
    """Return the steps of `specs`, each as of `plan_step`, traced side by side."""
    cuts = [_cuts(spec, whole) for spec in specs]
    calls = [partial(trace_step, spec, cut, rank) for spec, own in zip(specs, cuts, strict=True) for cut in own]
    traces, steps = iter(side_by_side(calls)), []
    for spec, own in zip(specs, cuts, strict=True):
        trace, *longer = [next(traces) for _ in own]
        layers = spec.model_config.num_hidden_layers
        steps.append(_of_micro_batches(_of_layers(trace, longer[0], layers) if longer else trace, spec.sizes))
    return steps


def traces_of(spec: PlanSpec) -> int:
    """Return how many traces a step takes, as many processes side by side."""
    return len(_cuts(spec, whole=False))


def _cuts(spec: PlanSpec, whole: bool) -> list[ModelConfig]:
    """Return the model of `spec` with the numbers of layers that are traced: all of them, or two numbers."""
    config = spec.model_config
    layers, period = config.num_hidden_layers, _period(config.layer_types)
    deepstack = len(getattr(config.vision, "deepstack", ()))  # of as many first layers, which add the tower's features
    leaving = ON_THEIR_WAY + 1 if spec.recipe.train.activation_offload else 0
    few = 2 * max(_MARGIN, period + 1 if period > 1 else 0, deepstack + 1 if deepstack else 0, leaving)
    few += (layers - few) % period
    is_whole = whole or not _alike(spec.recipe, config) or few + 2 * period > layers
    return [
        replace(config, num_hidden_layers=count, layer_types=config.layer_types[:count])
        for count in ([layers] if is_whole else [few, few + period])
    ]


def _alike(recipe: PolicyConfig, config: ModelConfig) -> bool:
    """Return whether all layers of a type train the same parameters, and no layer needs another's keys."""
    if config.shared_layers:
        return False
    if recipe.lora is None:
        patterns = "".join([*recipe.train.train_only, *recipe.train.freeze])
        return not any(sign in patterns for sign in "0123456789?[")  # without these, a pattern means every layer
    adapter = adapter_of(asdict(recipe.lora))
    layers: list[dict[str, LoraLayer | None]] = [{} for _ in config.layer_types]
    whole = dict.fromkeys(adapter.saved(modules(config)))
    for name, low in {**whole, **adapter.adapted(adaptable(config))}.items():
        if match := re.fullmatch(r"model\.layers\.(\d+)\.(.*)", name):
            layers[int(match[1])][match[2]] = low
    of_type = dict(zip(config.layer_types, layers, strict=True))
    return all(of_type[kind] == layer for kind, layer in zip(config.layer_types, layers, strict=True))


def _period(types: tuple[str, ...]) -> int:
    """Return the number of layers after which their types repeat; all of them if they never do."""
    fits = (n for n in range(1, len(types)) if all(kind == types[i % n] for i, kind in enumerate(types)))
    return next(fits, len(types))


def _of_layers(shorter: Trace, longer: Trace, layers: int) -> Trace:
    times, half = (layers - shorter.layers) // (longer.layers - shorter.layers), shorter.layers // 2

    def line(first: Counter, second: Counter) -> Counter:
        return Counter({key: first[key] + (second[key] - first[key]) * times for key in {**first, **second}})

    def anchored(layer: int | None, count: int) -> int | None:
        """Return the index of `layer` among `count` layers from the nearer end: the last one is -1."""
        return layer if layer is None or layer < half else layer - count

    others = {
        (phase, number, anchored(layer, longer.layers)): peak for (phase, number, layer), peak in longer.peaks.items()
    }
    peaks = {}
    for (phase, number, layer), peak in shorter.peaks.items():
        place = anchored(layer, shorter.layers)
        layer = place + layers if place is not None and place < 0 else place
        peaks[Phase(phase, number, layer)] = line(peak, others[phase, number, place])
    counts, held = line(shorter.counts, longer.counts), line(shorter.held, longer.held)
    return Trace(layers, longer.micro_batches, peaks, counts, held)


def _of_micro_batches(trace: Trace, sizes: Sizes) -> Step:
    total: Counter[tuple] = Counter()
    more = max(1, sizes.accumulation - TRACED + 1)
    for (number, *what), value in trace.counts.items():
        total[tuple(what)] += value * (more if number is not None and number % TRACED == 1 else 1)
    if sizes.world_size > 1:  # the trainer asks whether any rank has to stop
        question = Collective("all", "all-reduce", sizes.world_size, True)
        total += Counter({("messages", question): 1, ("bytes", question): _QUESTION})
    moment, peak = max(trace.peaks.items(), key=lambda entry: entry[1].total())
    held, passes = Counter(trace.held), max(1, sizes.accumulation)
    held["offloaded"] *= passes
    # A planned CPU holds the stand-ins of a micro-batch's rows beside the rows themselves, a real one does not.
    rows = max(0, held.pop("rows", 0) * passes // trace.micro_batches - held.pop("micro rows", 0))
    parts = peak + Counter({"optimizer state": held["state"], "rows": rows})
    return Step(
        **held,
        peak=parts.total(),
        parts=parts,
        moment=moment,
        activations=max(peak["activations"] for peak in trace.peaks.values()),
        traffic={key[1]: (count, total["bytes", key[1]]) for key, count in total.items() if key[0] == "messages"},
        flops={key[1]: count for key, count in total.items() if key[0] == "flops"},
        moved=total["moved",],
        kernels=total["kernels",],
        behind={key[1:]: count for key, count in total.items() if key[0] == "behind"},
    )
