"""A training step on stand-in tensors, traced: memory, messages and arithmetic of a `Policy` on one rank.

The step is the trainer's own: the method's `prepare`, then `Policy.forward_backward` and `optimizer_step`, on a model
that `policy.build.lay_out` laid out over a process group of as many ranks as are planned, of which this process is one
and the only one. On a planned CPU the host's tensors lie in the same memory: the step's rows are counted too.

Few layers and micro-batches of it are traced, for everything in it grows evenly with either. Layers of one kind are
alike, so a peak within the third layer's forward, say, or within the last layer's backward is so many bytes and so many
more for each further layer. Two traces, a period of the layer types apart, give both numbers; phases are named by their
distance from the first layer or from the last. Of the micro-batches the first and the last differ from those between.
"""

import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
import torch.distributed as dist

from dtrain.commands.plan.memory import NOT_COUNTED, Phase
from dtrain.commands.plan.planned_device import MetaKernels, PlannedDevice, PlannedStream
from dtrain.commands.plan.processes import run_in_parallel
from dtrain.commands.plan.tracer import Collective, PlannedMemory, PlanObserver, Tracer
from dtrain.models.common.config import ModelConfig
from dtrain.parallel.mesh import Runtime, build_mesh
from dtrain.parallel.placement import bytes_of
from dtrain.policy import BuildOptions, Policy
from dtrain.policy.build import select_planned_kernel
from dtrain.policy.weights import weight_memory
from dtrain.recipe import Sizes
from dtrain.training.full_rows import FullRows
from dtrain.training.step_spec import StepSpec

TRACED = 3  # micro-batches: a first, a last, and one like all between them


@dataclass(frozen=True)
class Trace:
    """A traced step of `layers` layers and `micro_batches` micro-batches.

    peaks: by phase, bytes by part. counts: as of `Tracer`. held: bytes by the name of a field of `Step`,
    "offloaded_bytes" of one micro-batch; "rows", "micro rows": of the host's tensors on a planned CPU, and of those
    that one micro-batch brings.
    """

    layers: int
    micro_batches: int
    peaks: dict[Phase, Counter[str]]
    counts: Counter[tuple]
    held: Counter[str]


def trace_step(spec: StepSpec, config: ModelConfig, rank: int = 0) -> Trace:
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
    memory = PlannedMemory(tracer.memory, is_pinned=device == "cuda")
    kernel = select_planned_kernel(spec.recipe, spec.precision, device, mesh)
    observer = PlanObserver(tracer, kernel)
    options = BuildOptions(
        materialize=False,
        kernel=kernel,
        host_memory=memory,
        compile_part=tracer.compile_part,
        determinism_check="none",
        step_local_shards=True,
    )
    runtime = Runtime(rank=rank, device=planned)
    policy = Policy(spec.recipe, config, mesh, runtime, options=options, observer=observer)
    weights = weight_memory(policy.model)
    tracer.see_all(weights.on_device, "parameters")
    tracer.see_all(weights.on_host, NOT_COUNTED)
    observer.watch_layers(policy.model.model.layers)
    method = spec.method
    for name, tensors in method.attach_models(policy, spec.other_models).tensors().items():
        tracer.see_all(tensors, name)
    micro_batches = min(sizes.accumulation, TRACED)
    rows = FullRows.of(spec, method, micro_batches, "meta")
    tracer.see_all(rows.pixels, NOT_COUNTED)  # the host's, which are counted as its rows
    with PlannedDevice(planned, tracer.few, tracer.as_one_kernel):
        policy.init_optimizer(total_steps=10)
        updater = policy.updater
        assert updater is not None
        with MetaKernels():  # a step as it is from the second one on
            updater.allocate_state()
        tracer.see_all((tensor for tensor in updater.state_tensors() if tensor.is_meta), NOT_COUNTED)
        observer.watch_optimizer(policy, device)
        with torch.cpu.stream(PlannedStream()), tracer:
            tracer.memory.begin(Phase("start"))
            batch, loss = method.prepare(policy, rows.batch())
            policy.forward_backward(batch, loss, method.micro_rows)
            policy.optimizer_step()
    held = Counter(
        parameters=weights.total_bytes,
        trained_parameters=weights.trained_bytes,
        layer_embeddings=weights.layer_table_bytes,
        vision_tower=weights.tower_bytes,
        gradients=observer.gradient_bytes,
        optimizer_state=updater.device_state_bytes(),
        smallest_parameters=weights.smallest_rank_bytes,
        host_activations=memory.allocated_bytes,
        host_optimizer_bytes=updater.host_state_bytes(),
        offloaded_bytes=memory.copied_bytes // micro_batches,
    )
    if tracer.on_host:
        held["rows"] = observer.host_bytes + bytes_of(rows.pixels)
        held["micro rows"] = observer.micro_batch_bytes
    return Trace(config.num_hidden_layers, micro_batches, tracer.memory.peaks(), tracer.counts, held)


_QUESTION = 16  # bytes: two numbers


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
    trained_parameters: int
    gradients: int
    optimizer_state: int
    smallest_parameters: int
    peak: int
    parts: Counter[str]
    peak_phase: Phase
    activations: int
    traffic: dict[Collective, tuple[int, int]]
    flops: dict[torch.dtype, int]
    bytes_moved: int
    num_kernels: int
    layer_embeddings: int = 0
    vision_tower: int = 0
    host_activations: int = 0
    host_optimizer_bytes: int = 0
    offloaded_bytes: int = 0
    overlapped_flops: dict[tuple[Collective, torch.dtype], int] = field(default_factory=dict)

    @property
    def resident(self) -> int:
        """Bytes that the device has at the optimizer's step, whatever was computed before it; at most `peak`."""
        return self.parameters + self.gradients + self.optimizer_state


def plan_step(spec: StepSpec, *, rank: int = 0, whole: bool = False) -> Step:
    """Return the step of rank `rank` in the world of `spec`, whose devices are of type cpu or cuda.

    whole: trace every layer. Nothing is sent, no weight is read; the traces run in processes forked from this one, in
    which torch.distributed must not be up.
    """
    return plan_steps([spec], rank=rank, whole=whole)[0]


def plan_steps(specs: Sequence[StepSpec], *, rank: int = 0, whole: bool = False) -> list[Step]:
    """Return the steps of `specs`, each as of `plan_step`, traced side by side."""
    cuts = [_cuts(spec, whole) for spec in specs]
    calls = [partial(trace_step, spec, cut, rank) for spec, own in zip(specs, cuts, strict=True) for cut in own]
    traces, steps = iter(run_in_parallel(calls)), []
    for spec, own in zip(specs, cuts, strict=True):
        trace, *longer = [next(traces) for _ in own]
        layers = spec.model_config.num_hidden_layers
        steps.append(_of_micro_batches(_of_layers(trace, longer[0], layers) if longer else trace, spec.sizes))
    return steps


def num_traces(spec: StepSpec) -> int:
    """Return how many traces a step takes, as many processes side by side."""
    return len(_cuts(spec, whole=False))


def _cuts(spec: StepSpec, whole: bool) -> list[ModelConfig]:
    """Return the model of `spec` with the numbers of layers that are traced: all of them, or two numbers."""
    config = spec.model_config
    layers, period = config.num_hidden_layers, spec.facts.layer_period
    few = 2 * spec.facts.num_end_layers
    few += (layers - few) % period
    is_whole = whole or not spec.facts.layers_train_alike() or few + 2 * period > layers
    return [
        replace(config, num_hidden_layers=count, layer_types=config.layer_types[:count])
        for count in ([layers] if is_whole else [few, few + period])
    ]


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
    held["offloaded_bytes"] *= passes
    # A planned CPU holds the stand-ins of a micro-batch's rows beside the rows themselves, a real one does not.
    rows = max(0, held.pop("rows", 0) * passes // trace.micro_batches - held.pop("micro rows", 0))
    parts = peak + Counter({"optimizer state": held["optimizer_state"], "rows": rows})
    return Step(
        **held,
        peak=parts.total(),
        parts=parts,
        peak_phase=moment,
        activations=max(peak["activations"] for peak in trace.peaks.values()),
        traffic={key[1]: (count, total["bytes", key[1]]) for key, count in total.items() if key[0] == "messages"},
        flops={key[1]: count for key, count in total.items() if key[0] == "flops"},
        bytes_moved=total["moved",],
        num_kernels=total["kernels",],
        overlapped_flops={key[1:]: count for key, count in total.items() if key[0] == "behind"},
    )
