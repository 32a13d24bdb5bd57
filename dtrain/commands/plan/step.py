"""The memory, messages and arithmetic of a training step on one rank, traced on tensors without memory.

The step is the trainer's own: the method's `prepare`, then `Policy.forward_backward` and `optimizer_step`, on a model
that `policy.build.lay_out` placed on a mesh of the planned size. The process group has that many ranks, but only this
process exists. On a planned CPU the host's tensors are in the same memory, so the step's rows are counted too.

Only a few layers and micro-batches are traced, because everything grows linearly with both. Layers of one kind are
alike, so a peak in the forward of the third layer, or in the backward of the last one, is a constant plus a number of
bytes for each further layer. Two traces, one period of the layer types apart, give both numbers. For example, with
traces of 4 and 5 layers a model of 32 layers has

    peak(32) = peak(4) + (peak(5) - peak(4)) * 28

Layers are matched by their distance from the nearer end. The first and the last micro-batch differ from those between
them, so three micro-batches are traced.
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
from dtrain.commands.plan.tracer import Collective, Cost, PlannedMemory, PlanObserver, Tracer
from dtrain.models.common.config import ModelConfig
from dtrain.parallel.mesh import Runtime, build_mesh
from dtrain.parallel.placement import bytes_of
from dtrain.policy import BuildOptions, Policy
from dtrain.policy.build import select_planned_kernel
from dtrain.policy.weights import weight_memory
from dtrain.recipe import Sizes
from dtrain.training.full_rows import FullRows
from dtrain.training.step_spec import StepSpec

TRACED = 3  # number of traced micro-batches: the first, the last, and one for all between them


@dataclass(frozen=True)
class Trace:
    """A traced step.

    Attributes:
        layers: Number of layers.
        micro_batches: Number of micro-batches.
        peaks: Bytes by part at the peak of each phase.
        counts: Costs, as in `Tracer.counts`.
        sizes: Bytes by the name of a field of `Step`. "offloaded_bytes" is that of one micro-batch. On a planned CPU
            "rows" and "micro rows" are the bytes of the host's tensors, and of the rows of one micro-batch.
    """

    layers: int
    micro_batches: int
    peaks: dict[Phase, Counter[str]]
    counts: Counter[Cost]
    sizes: Counter[str]


_STOP_FLAG_BYTES = 16  # two numbers


def trace_step(spec: StepSpec, config: ModelConfig, rank: int = 0) -> Trace:
    """Trace a step on one rank. Nothing is sent, because no other rank is in the process group.

    Can be called once in a process, which keeps the process group.

    Args:
        spec: The step.
        config: The model, perhaps with fewer layers.
        rank: The rank.

    Returns:
        The trace of the traced layers and micro-batches, not extrapolated.

    Raises:
        RuntimeError: If torch.distributed is initialized. A plan cannot share a process with a run.
    """
    from torch.testing._internal.distributed import fake_pg  # noqa: F401 (registers the backend "fake")

    if dist.is_initialized():
        raise RuntimeError("a plan needs its own process, but torch.distributed is initialized in this one")
    warnings.simplefilter("ignore")  # torch warns of changes in later releases
    sizes, device_type = spec.sizes, spec.world.device_type
    dist.init_process_group("fake", store=dist.HashStore(), rank=rank, world_size=sizes.world_size)
    mesh = build_mesh(Runtime(), **sizes.shape, ep=sizes.ep)  # a CPU mesh: FSDP needs no device to open streams on
    device = torch.device(device_type, 0) if device_type == "cuda" else torch.device(device_type)
    tracer = Tracer(mesh, on_host=device_type == "cpu")
    memory = PlannedMemory(tracer.memory, is_pinned=device_type == "cuda")
    kernel = select_planned_kernel(spec.recipe, spec.precision, device_type, mesh)
    observer = PlanObserver(tracer, kernel)
    options = BuildOptions(
        materialize=False,
        kernel=kernel,
        host_memory=memory,
        compile_part=tracer.compile_part,
        determinism_check="none",
        step_local_shards=True,
    )
    policy = Policy(spec.recipe, config, mesh, Runtime(rank=rank, device=device), options=options, observer=observer)
    weights = weight_memory(policy.model)
    tracer.see_all(weights.on_device, "parameters")
    tracer.see_all(weights.on_host, NOT_COUNTED)
    observer.watch_layers(policy.model.model.layers)
    method = spec.method
    for name, tensors in method.attach_models(policy, spec.other_models).tensors().items():
        tracer.see_all(tensors, name)
    micro_batches = min(sizes.accumulation, TRACED)
    rows = FullRows.of(spec, method, micro_batches, "meta")
    tracer.see_all(rows.pixels, NOT_COUNTED)  # they are in the host's memory, and are counted as rows below
    with PlannedDevice(device, tracer.few, tracer.as_one_kernel):
        policy.init_optimizer(total_steps=10)
        updater = policy.updater
        assert updater is not None
        with MetaKernels():  # not traced: the state exists before the step, as from the second step on
            updater.allocate_state()
        # Its exact size is added to the peak afterwards.
        tracer.see_all((tensor for tensor in updater.state_tensors() if tensor.is_meta), NOT_COUNTED)
        observer.watch_optimizer(policy, device_type)
        with torch.cpu.stream(PlannedStream()), tracer:
            tracer.memory.begin(Phase("start"))
            batch, loss = method.prepare(policy, rows.batch())
            policy.forward_backward(batch, loss, method.micro_rows)
            policy.optimizer_step()
    step_sizes = Counter(
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
        step_sizes["rows"] = observer.host_bytes + bytes_of(rows.pixels)
        step_sizes["micro rows"] = observer.micro_batch_bytes
    return Trace(config.num_hidden_layers, micro_batches, tracer.memory.peaks(), tracer.counts, step_sizes)


@dataclass(frozen=True)
class Step:
    """Memory, traffic and arithmetic of one rank in an optimizer step. All sizes are bytes.

    Attributes:
        parameters: Parameters on the device.
        trained_parameters: Those of them that are trained.
        gradients: Gradients at the update.
        optimizer_state: Optimizer state on the device.
        smallest_parameters: The smallest parameters of any rank.
        peak: The peak, with the optimizer state.
        parts: Parts of the peak.
        peak_phase: Phase of the peak.
        activations: Activations that are kept for the backward of a micro-batch, at most.
        traffic: (number of messages, bytes) by collective.
        flops: FLOPs of matrix products and attention by the dtype of their operands.
        bytes_moved: Bytes that all other operations read and write.
        num_kernels: Number of operations that compute.
        layer_embeddings: Parameters that are embeddings of each layer.
        vision_tower: Parameters of the vision tower.
        host_activations: Activations in the host's memory.
        host_optimizer_bytes: Optimizer state and masters in the host's memory, which come to the device for the update.
        offloaded_bytes: Activations that move to the host and back.
        overlapped_flops: FLOPs between the start of a collective of cp and the wait for it, by collective and dtype.
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
        """Bytes that the device has at the update, whatever was computed before. At most `peak`."""
        return self.parameters + self.gradients + self.optimizer_state


def plan_step(spec: StepSpec, *, rank: int = 0, whole: bool = False) -> Step:
    """Plan a step. Nothing is sent and no weights are read.

    The traces run in processes that are forked from this one, which must not have initialized torch.distributed.

    Args:
        spec: The step.
        rank: The rank whose memory is planned.
        whole: Whether every layer is traced.
    """
    return plan_steps([spec], rank=rank, whole=whole)[0]


def plan_steps(specs: Sequence[StepSpec], *, rank: int = 0, whole: bool = False) -> list[Step]:
    """Plan several steps like `plan_step`, with all traces in parallel."""
    configs_by_spec = [_traced_configs(spec, whole) for spec in specs]
    calls = []
    for spec, configs in zip(specs, configs_by_spec, strict=True):
        calls += [partial(trace_step, spec, config, rank) for config in configs]
    remaining_traces = run_in_parallel(calls)
    steps = []
    for spec, configs in zip(specs, configs_by_spec, strict=True):
        traces, remaining_traces = remaining_traces[: len(configs)], remaining_traces[len(configs) :]
        trace = traces[0]
        if len(traces) == 2:
            trace = _extrapolate_layers(traces[0], traces[1], spec.model_config.num_hidden_layers)
        steps.append(_extrapolate_micro_batches(trace, spec.sizes))
    return steps


def num_traces(spec: StepSpec) -> int:
    """Return the number of traces of a step. Each is a process, and they run in parallel."""
    return len(_traced_configs(spec, whole=False))


def _traced_configs(spec: StepSpec, whole: bool) -> list[ModelConfig]:
    """Return configs of the model with the numbers of layers to trace: two numbers, or all layers.

    All layers of a model of transformers are traced, because its own config says which layers are alike.
    """
    config = spec.model_config
    if config.transformers is not None:
        return [config]
    num_layers, period = config.num_hidden_layers, spec.facts.layer_period
    # The layers near both ends, and as many more as are left when whole periods are removed from the model.
    few = 2 * spec.facts.num_end_layers
    few += (num_layers - few) % period
    if whole or not spec.facts.layers_train_alike() or few + 2 * period > num_layers:
        numbers = [num_layers]
    else:
        numbers = [few, few + period]
    return [replace(config, num_hidden_layers=number, layer_types=config.layer_types[:number]) for number in numbers]


def _extrapolate_layers(shorter: Trace, longer: Trace, num_layers: int) -> Trace:
    """Return the trace of a model with `num_layers` layers, from two traces with fewer layers."""
    num_periods = (num_layers - shorter.layers) // (longer.layers - shorter.layers)
    half = shorter.layers // 2

    def extrapolate(first: Counter, second: Counter) -> Counter:
        values: Counter = Counter()
        for key in {**first, **second}:
            values[key] = first[key] + (second[key] - first[key]) * num_periods
        return values

    def index_from_nearer_end(layer: int | None, count: int) -> int | None:
        """Return the index of a layer among `count` layers, negative in the second half: the last layer is -1."""
        if layer is None or layer < half:
            return layer
        return layer - count

    longer_peaks = {}
    for (name, number, layer), peak in longer.peaks.items():
        longer_peaks[name, number, index_from_nearer_end(layer, longer.layers)] = peak
    peaks = {}
    for (name, number, layer), peak in shorter.peaks.items():
        index = index_from_nearer_end(layer, shorter.layers)
        full_layer = index + num_layers if index is not None and index < 0 else index
        peaks[Phase(name, number, full_layer)] = extrapolate(peak, longer_peaks[name, number, index])
    counts = extrapolate(shorter.counts, longer.counts)
    return Trace(num_layers, longer.micro_batches, peaks, counts, extrapolate(shorter.sizes, longer.sizes))


def _extrapolate_micro_batches(trace: Trace, sizes: Sizes) -> Step:
    """Return the step with all micro-batches, from a trace with at most TRACED of them."""
    num_passes = max(1, sizes.accumulation)
    total: Counter[Cost] = Counter()  # over all passes
    # The middle one of the traced micro-batches stands for all between the first and the last.
    num_middle = max(1, sizes.accumulation - TRACED + 1)
    for cost, value in trace.counts.items():
        is_middle = cost.pass_index is not None and cost.pass_index % TRACED == 1
        total[cost._replace(pass_index=None)] += value * (num_middle if is_middle else 1)
    if sizes.world_size > 1:
        # After each step the trainer all-reduces a flag: whether any rank has to stop.
        stop_flag = Collective("all", "all-reduce", sizes.world_size, True)
        # This also removes counts that are 0.
        total += Counter({Cost(None, "messages", stop_flag): 1, Cost(None, "bytes", stop_flag): _STOP_FLAG_BYTES})
    step_sizes = Counter(trace.sizes)
    step_sizes["offloaded_bytes"] *= num_passes
    # On a planned CPU, the rows of one micro-batch are counted twice: as meta tensors in the trace, and among the
    # host's rows. They are subtracted once.
    all_rows = step_sizes.pop("rows", 0) * num_passes // trace.micro_batches
    rows = max(0, all_rows - step_sizes.pop("micro rows", 0))
    peak_phase, peak = max(trace.peaks.items(), key=lambda entry: entry[1].total())
    parts = peak + Counter({"optimizer state": step_sizes["optimizer_state"], "rows": rows})
    traffic: dict[Collective, tuple[int, int]] = {}
    flops: dict[torch.dtype, int] = {}
    overlapped_flops: dict[tuple[Collective, torch.dtype], int] = {}
    for cost, value in total.items():
        collective, dtype = cost.collective, cost.dtype
        if cost.kind == "messages" and collective is not None:
            traffic[collective] = (value, total[Cost(None, "bytes", collective)])
        elif cost.kind == "flops" and dtype is not None:
            flops[dtype] = value
        elif cost.kind == "overlapped" and collective is not None and dtype is not None:
            overlapped_flops[collective, dtype] = value
    return Step(
        **step_sizes,
        peak=parts.total(),
        parts=parts,
        peak_phase=peak_phase,
        activations=max(peak["activations"] for peak in trace.peaks.values()),
        traffic=traffic,
        flops=flops,
        bytes_moved=total[Cost(None, "moved")],
        num_kernels=total[Cost(None, "kernels")],
        overlapped_flops=overlapped_flops,
    )
