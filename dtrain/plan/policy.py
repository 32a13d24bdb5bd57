"""The policy of a rank that is planned, and the models beside it: the trainer's own on stand-ins, traced.

Phases of the memory's timeline are (name, pass, layer); a pass is one micro-batch through the model.
"""

from collections.abc import Iterable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from dtrain.config.schema import Recipe
from dtrain.methods import Method
from dtrain.models.config import ModelConfig
from dtrain.optim import build_optimizer
from dtrain.parallel.checkpointing import checkpoint_activations
from dtrain.parallel.mesh import Mesh
from dtrain.parallel.placement import local_tensor
from dtrain.parallel.runtime import Runtime
from dtrain.plan.kernels import PlannedKernel, planned_kernel
from dtrain.plan.planned_device import MetaKernels
from dtrain.plan.tracer import Tracer
from dtrain.policy import Policy
from dtrain.policy.build import lay_out
from dtrain.policy.precision import Precision
from dtrain.policy.score import Scorer
from dtrain.policy.teacher import Teacher


class PlannedPolicy(Policy):
    """Its parameters stay on meta, and its optimizer steps this rank's shards as plain tensors."""

    def __init__(self, recipe: Recipe, config: ModelConfig, mesh: Mesh, runtime: Runtime, tracer: Tracer):
        self.tracer, self.kernel = tracer, planned_kernel(recipe, mesh, runtime.device.type)
        super().__init__(recipe, config, mesh, runtime, build=partial(_build, self.kernel))
        self.scorer = _TracedScorer(self)
        self.gradient_bytes = 0
        self.see_all(self.model.parameters(), "parameters")

    def see_all(self, tensors: Iterable[Tensor], part: str) -> None:
        for tensor in tensors:
            self.tracer.memory.see(local_tensor(tensor.detach()), part)

    def keep_beside(self, method: Method) -> None:
        """The other models that a method holds: a reference, a teacher."""
        if method.facts.holds_reference(self.recipe):
            self.init_reference_model()
            self.see_all(self.reference.tensors.values(), "reference")
        if (teacher := method.facts.teacher(self.recipe)) is not None:
            method.teacher = Teacher(self, teacher, partial(_build, self.kernel))
            self.see_all(method.teacher.model.parameters(), "teacher")

    def init_optimizer(self, total_steps: int) -> None:
        super().init_optimizer(total_steps)
        self.shards = self._updater.optimizer = _ShardsOptimizer(self)

    def _backward(self, batches, loss_fn, divisors):
        result = super()._backward(batches, loss_fn, divisors)
        self.gradient_bytes = _bytes(parameter.grad for parameter in self.model.parameters())
        self.tracer.memory.rename("temporaries", "gradients")
        self.tracer.current = None
        self.tracer.memory.begin(("update", None, None))
        return result


class _ShardsOptimizer:
    """The recipe's optimizer over a rank's shards as plain tensors, as it is from its second step on. DTensors would
    take minutes to step. Its state is left out of the timeline, its cost to the estimate. state_bytes: of it."""

    def __init__(self, policy: PlannedPolicy):
        self.zero_grad = policy.optimizer.zero_grad
        self._tracer = policy.tracer
        self._parameters = list(policy.model.parameters())
        self._shards = [nn.Parameter(local_tensor(parameter.detach())) for parameter in self._parameters]
        names = (name for name, _ in policy.model.named_parameters())
        self._optimizer = build_optimizer(policy.recipe.optimizer, zip(names, self._shards, strict=True))
        for shard in self._shards:
            shard.grad = torch.empty_like(shard)
        with MetaKernels():
            self._optimizer.step()
        self._optimizer.zero_grad()
        self.state_bytes = state_bytes(self._optimizer)
        for value in _state(self._optimizer):
            if value.is_meta:
                self._tracer.memory.leave_out(value)

    def step(self) -> None:
        for shard, parameter in zip(self._shards, self._parameters, strict=True):
            shard.grad = None if parameter.grad is None else local_tensor(parameter.grad)
        self._tracer.counts_costs = False
        self._optimizer.step()
        self._tracer.counts_costs = True
        self._optimizer.zero_grad()


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of what an optimizer keeps."""
    return _bytes(_state(optimizer))


def _state(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]


def _bytes(tensors: Iterable[Tensor | None]) -> int:
    held = [local_tensor(tensor) for tensor in tensors if tensor is not None]
    return sum(tensor.numel() * tensor.element_size() for tensor in held)


def _build(
    kernel: PlannedKernel, recipe: Recipe, config: ModelConfig, mesh: Mesh, precision: Precision, device: torch.device
) -> nn.Module:
    """As `build_model`, without memory or values. Recomputed activations are not compared with those of the forward:
    inside an operation nobody answers for the planned device, so the two would say that they lie elsewhere."""
    kind = recipe.train.activation_checkpointing
    recipe = replace(recipe, train=replace(recipe.train, activation_checkpointing="none"))
    model = lay_out(recipe, config, mesh, precision, device, kernel)
    checkpoint_activations(model, kind, determinism_check="none")
    return model


class _TracedScorer(Scorer):
    """Tells the tracer where each pass through the model begins, and the kernel of its rows."""

    def __init__(self, policy: PlannedPolicy):
        super().__init__(policy.model, policy.mesh, policy.device)
        self.tracer, self.kernel = policy.tracer, policy.kernel
        self.passes = 0
        self.host = self.micro_rows = 0  # bytes at the last pass: of the host's tensors, and its own rows

    def at_head(self, batch, fn, *more):
        tracer, memory, number = self.tracer, self.tracer.memory, self.passes
        self.kernel.take(batch)
        self.host, self.micro_rows = tracer.host.total(), _bytes(batch.values())
        memory.rename("temporaries", "gradients")  # what a backward has left
        self.passes += 1
        tracer.current, tracer.is_forward = number, True
        memory.begin(("begin", number, None))

        def within(source, local, *more):
            memory.rename("temporaries", "activations")
            memory.begin(("head", number, None))
            result = fn(source, local, *more)
            memory.rename("temporaries", "loss")
            return result

        result = super().at_head(batch, within, *more)
        tracer.is_forward = False
        memory.begin(("backward", number, None))
        return result


def mark_layers(layers: Iterable[nn.Module], tracer: Tracer) -> None:
    """A phase begins with each layer's forward, before each layer's backward, and where a layer is computed again."""

    def before(index, module, inputs):
        tracer.memory.begin(("forward" if tracer.is_forward else "again", tracer.current, index))

    def at_gradient(index, grad):
        tracer.memory.begin(("backward", tracer.current, index))

    def after(index, module, inputs, output):
        if output.requires_grad and tracer.is_forward:
            output.register_hook(partial(at_gradient, index))

    for index, layer in enumerate(layers):
        layer.register_forward_pre_hook(partial(before, index))
        layer.register_forward_hook(partial(after, index))
