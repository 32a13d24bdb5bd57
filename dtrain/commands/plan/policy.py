"""The policy of a rank that is planned, and the models beside it: the trainer's own on stand-ins, traced.

A pass is one micro-batch through the model.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from dtrain.attention.kernels import Kernel
from dtrain.attention.varlen import VarlenKernel
from dtrain.commands.plan.compiled import CompiledRegions
from dtrain.commands.plan.memory import LEFT_OUT, MemoryTimeline, Phase
from dtrain.commands.plan.meta_kernels import MetaKernels
from dtrain.commands.plan.planned_device import PlannedSdpa
from dtrain.commands.plan.spec import PlanSpec
from dtrain.commands.plan.tracer import Tracer
from dtrain.memory.activation_offload import HostMemory
from dtrain.memory.compilation import computes_again, is_selective_inside, obstacle
from dtrain.memory.low_bit_adam import LowBitAdam
from dtrain.memory.selective_checkpointing import AS_WRITTEN, selective
from dtrain.methods import Method
from dtrain.methods.method import MethodWithReference
from dtrain.models.common.config import ModelConfig
from dtrain.models.common.decoder import CausalLM, Layer
from dtrain.models.read_config import read_config
from dtrain.optim.shard_optimizer import ShardOptimizer
from dtrain.parallel.fsdp import MasterTensor, masters_of
from dtrain.parallel.mesh import Mesh
from dtrain.parallel.placement import local_tensor
from dtrain.parallel.runtime import Runtime
from dtrain.policy import Policy
from dtrain.policy.build import keep_for_backward, lay_out, wants_varlen
from dtrain.policy.config import PolicyConfig
from dtrain.policy.optimizer import build_optimizer, place_masters
from dtrain.policy.precision import Precision
from dtrain.policy.reference import Reference
from dtrain.policy.score import Scorer
from dtrain.policy.teacher import Teacher, beside


class PlannedPolicy(Policy):
    """Policy whose parameters stay on meta, and whose optimizer steps this rank's shards as plain tensors."""

    scorer: "_TracedScorer"

    def __init__(self, spec: PlanSpec, config: ModelConfig, mesh: Mesh, runtime: Runtime, tracer: Tracer):
        is_varlen = wants_varlen(spec.recipe, spec.precision, spec.world.device_type)
        # It is not tried out: the device is not here.
        self.kernel: Kernel = VarlenKernel() if is_varlen else PlannedSdpa(mesh.cp.get_local_rank(), mesh.cp.size())
        self.tracer = tracer
        self.memory = PlannedMemory(tracer.memory, is_pinned=spec.world.device_type == "cuda")
        self.build = partial(_build, self.kernel, self.memory, tracer)
        super().__init__(spec.recipe, config, mesh, runtime, self.build)
        self.scorer = _TracedScorer(self)
        self.gradient_bytes = self.state_bytes = self.visiting_bytes = 0
        self.see_all(map(on_device, self.model.parameters()), "parameters")
        self.see_all(masters_of(self.model), LEFT_OUT)

    def see_all(self, tensors: Iterable[Tensor], part: str) -> None:
        """Count this rank's shards of `tensors`, each [...], as `part` in the timeline."""
        for tensor in tensors:
            self.tracer.memory.see(local_tensor(tensor).detach(), part)

    def _read_adapter(self, path: str) -> None:
        """Read nothing: a plan reads no weights."""

    def keep_beside(self, method: Method) -> None:
        """Build the other models that a method holds: a reference, a teacher, a reward model."""
        if method.holds_reference():
            has_path = any(key.endswith(".reference") for key, _ in method.other_models())
            if has_path or not isinstance(method, MethodWithReference):
                self.reference = Reference(self.model, self.sharding, whole=True, adapters=False)
            else:
                method.keep_reference(self)
            self.see_all(self.reference.tensors.values() if self.reference else (), "reference")
        path = method.teacher_path()
        if path is not None:
            method.teacher = Teacher(self, path, self.build)
            self.see_all(method.teacher.model.parameters(), "teacher")
        path = method.reward_model()
        if path is not None:
            self.rates = beside(self, path, read_config(path, labels=0), self.build)
            self.see_all(self.rates.parameters(), "reward model")

    def init_optimizer(self, total_steps: int) -> None:
        """Build the recipe's optimizer as it is from its second step on. Its state is left out of the timeline, its
        cost to the estimate. torch's own step plain tensors here: DTensors would take minutes."""
        is_on_host = self.gradient_device is not None
        self.gradient_device = torch.device("meta") if is_on_host else None
        super().init_optimizer(total_steps)
        assert self.updater is not None
        parameters = {name: parameter for name, parameter in self.model.named_parameters() if parameter.requires_grad}
        shards: dict[str, nn.Parameter] = parameters
        optimizer = self.updater.optimizer
        if not isinstance(optimizer, ShardOptimizer):  # dtrain's own step shards as they are
            shards = {name: nn.Parameter(local_tensor(parameter).detach()) for name, parameter in parameters.items()}
            optimizer = self.updater.optimizer = build_optimizer(self.recipe.optimizer, shards.items())
        for shard in shards.values():
            shard.grad = torch.empty_like(shard)
        with MetaKernels():
            visiting = optimizer.ring_bytes() if isinstance(optimizer, LowBitAdam) else optimizer.step()
        self.state_bytes = visiting if is_on_host and visiting is not None else state_bytes(optimizer)
        if is_on_host:
            self.visiting_bytes = bytes_of([*filter(Tensor.dim, _state(optimizer)), *masters_of(self.model)])
        optimizer.zero_grad()
        self.see_all((value for value in _state(optimizer) if value.is_meta), LEFT_OUT)

        is_fused = shards is not parameters or (isinstance(optimizer, LowBitAdam) and self.device.type == "cuda")

        def before(*_: object) -> None:
            if shards is not parameters:
                for name, parameter in parameters.items():
                    shards[name].grad = None if parameter.grad is None else local_tensor(parameter.grad)
            self.tracer.counts_costs = not is_fused  # such a step reads and writes once what it has

        def after(*_: object) -> None:
            for parameter in parameters.values():
                parameter.grad = None
            self.tracer.counts_costs = True

        optimizer.register_step_pre_hook(before)
        optimizer.register_step_post_hook(after)

    def _backward(self, *step):
        result = super()._backward(*step)
        self.gradient_bytes = bytes_of(parameter.grad for parameter in self.model.parameters())
        self.tracer.memory.rename("temporaries", "gradients")
        self.tracer.current = None
        self.tracer.memory.begin(Phase("update"))
        return result


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of an optimizer's state."""
    return bytes_of(_state(optimizer))


def _state(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]


def on_device(parameter: Tensor) -> Tensor:
    """Return `parameter` [..], or the device's copy of it if its master lies on the host."""
    local = local_tensor(parameter)
    return local.rounded if isinstance(local, MasterTensor) else parameter


def bytes_of(tensors: Iterable[Tensor | None]) -> int:
    """Return the bytes that this rank holds of `tensors`, each [...]."""
    return sum(local_tensor(tensor).nbytes for tensor in tensors if tensor is not None)


class PlannedMemory(HostMemory):
    """Host memory without bytes. timeline: of the device's, of which it is a part where the device is a CPU."""

    def __init__(self, timeline: MemoryTimeline, is_pinned: bool):
        super().__init__()
        self._timeline, self._is_pinned = timeline, is_pinned
        self.is_given_back = not is_pinned

    def moves(self, tensor: Tensor) -> bool:
        return tensor.is_meta

    def taken(self, size: int) -> int:
        """Override `HostMemory.taken`: as of `PinnedMemory` where it is pinned."""
        return 1 << (size - 1).bit_length() if self._is_pinned else size

    def new(self, size: int) -> Tensor:
        part, self._timeline.part = self._timeline.part, LEFT_OUT if self._is_pinned else "host activations"
        buffer = torch.empty(size, dtype=torch.uint8, device="meta")
        self._timeline.part = part
        return buffer

    def copy(self, to: Tensor, source: Tensor) -> None:
        """Copy nothing; the link has the cost of it."""


def _build(
    kernel: Kernel,
    memory: HostMemory,
    tracer: Tracer,
    recipe: PolicyConfig,
    config: ModelConfig,
    mesh: Mesh,
    precision: Precision,
    device: torch.device,
) -> CausalLM:
    """Build the model as `build_model`, without memory or values, its layers as written; where they are to be compiled,
    the tracer counts bytes of their regions. Recomputed activations are not compared with those of the forward: inside
    an operation nobody answers for the planned device, so the two would say that they lie elsewhere."""

    def keep(model: CausalLM, written: PolicyConfig, device: torch.device) -> None:
        model.uncompiled = None
        if recipe.train.compile:
            lora_dropout = 0.0 if recipe.lora is None else recipe.lora.dropout
            model.uncompiled = obstacle(
                recipe.train, is_deterministic=recipe.run.deterministic, lora_dropout=lora_dropout
            )
        if recipe.train.compile and model.uncompiled is None:
            regions = tracer.regions = tracer.regions or CompiledRegions()
            for layer in cast(list[Layer], list(model.model.layers)):
                layer.regions = _planned_regions(layer, regions, is_selective_inside(recipe.train))
                if layer.keys_first is not None:
                    again = computes_again(recipe.train)
                    layer.keys_first = layer.keys_first.compiled_by(regions.region) if again else None
        keep_for_backward(model, recipe, device, memory=memory, determinism_check="none")

    written = replace(recipe, train=replace(recipe.train, compile=False))
    model = lay_out(written, config, mesh, precision, device, kernel, keep=keep)
    place_masters(model, recipe, precision, device)
    return model


def _planned_regions(
    layer: Layer, regions: CompiledRegions, is_selective: bool
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return the parts of a layer as `memory.compilation` compiles them: what they keep and move is counted."""
    before: Callable[..., Any] = regions.region(layer.before, is_selective)
    after: Callable[..., Any] = layer.after
    if not layer.is_sparse:
        after = regions.region(after, is_selective)
    elif is_selective:
        after = selective(after, AS_WRITTEN, determinism_check="none")
    return before, after


class _TracedScorer(Scorer):
    """Scorer that tells the tracer where each pass through the model begins, and the kernel of its rows."""

    def __init__(self, policy: PlannedPolicy):
        super().__init__(policy.model, policy.mesh, policy.device)
        self.tracer, self.kernel = policy.tracer, policy.kernel
        self.passes = 0
        self.host = self.micro_rows = 0  # bytes at the last pass: of the host's tensors, and its own rows

    def at_head(self, batch, fn, *more, **routing):
        tracer, memory, number = self.tracer, self.tracer.memory, self.passes
        if isinstance(self.kernel, PlannedSdpa):
            self.kernel.take(batch)
        self.host, self.micro_rows = tracer.host.total(), bytes_of(batch.values())
        memory.rename("temporaries", "gradients")  # what a backward has left
        self.passes += 1
        tracer.current, tracer.is_forward = number, True
        memory.begin(Phase("begin", number))

        def within(source, local, *more):
            memory.rename("temporaries", "activations")
            memory.begin(Phase("head", number))
            result = fn(source, local, *more)
            memory.rename("temporaries", "loss")
            return result

        result = super().at_head(batch, within, *more, **routing)
        tracer.is_forward = False
        memory.begin(Phase("backward", number))
        return result

    def _by_dp_rank(self, grids):
        return [grids] * self.mesh.dp_size  # the planned rows of all ranks are alike


def mark_layers(layers: Iterable[nn.Module], tracer: Tracer) -> None:
    """Begin a phase at each layer's forward, before each layer's backward, and where a layer is recomputed."""

    def before(index, module, inputs):
        tracer.memory.begin(Phase("forward" if tracer.is_forward else "again", tracer.current, index))

    def at_gradient(index, grad):
        tracer.memory.begin(Phase("backward", tracer.current, index))

    def after(index, module, inputs, output):
        hidden = output[0] if isinstance(output, tuple) else output
        if hidden.requires_grad and tracer.is_forward:
            hidden.register_hook(partial(at_gradient, index))

    for index, layer in enumerate(layers):
        layer.register_forward_pre_hook(partial(before, index))
        layer.register_forward_hook(partial(after, index))
