"""The policy of a rank that is planned, and the models beside it: on stand-ins, watched, with marks on its timeline."""

from dataclasses import replace

import torch
from torch import Tensor, nn

from dtrain.attention.context import GatherKernel
from dtrain.attention.kernels import SdpaKernel
from dtrain.config.schema import Recipe
from dtrain.methods import Method
from dtrain.models.config import ModelConfig
from dtrain.optim import LossScale, build_optimizer
from dtrain.parallel.mesh import Mesh
from dtrain.parallel.placement import local_tensor
from dtrain.plan.kernels import Planned, PlannedSdpa, PlannedVarlen
from dtrain.plan.stand_in import Stubbed
from dtrain.plan.traffic import Groups
from dtrain.plan.watch import Watch
from dtrain.policy import Policy
from dtrain.policy.build import lay_out, wants_varlen
from dtrain.policy.precision import Precision, choose_precision
from dtrain.policy.score import Scorer
from dtrain.policy.teacher import Teacher


class PlannedPolicy(Policy):
    """The policy of a rank that is planned: it has no weights to read and no optimizer that steps."""

    def __init__(self, recipe: Recipe, config: ModelConfig, mesh: Mesh, rank: int, device: torch.device):
        self.recipe, self.mesh, self.rank, self.device = recipe, mesh, rank, device
        self.offloaded = False
        self.precision = choose_precision(recipe.train.dtype, device.type)
        self.model = _lay_out(recipe, config, self.mesh, self.precision)
        self.loss_scale = LossScale() if self.precision.compute == torch.float16 else None
        self.optimizer = self.scheduler = self._updater = None
        self.reference = None
        self.watch = Watch(Groups(self.mesh), device.type == "cpu")
        self.kernel = PlannedSdpa(mesh.cp.get_local_rank(), mesh.cp.size())
        if mesh.cp.size() == 1 and wants_varlen(recipe, self.precision, device.type):
            self.kernel = PlannedVarlen()
        self.plan_attention(self.model)
        self.scorer = _WatchedScorer(self.model, self.mesh, self.device, self.watch, self.kernel)
        for module in {id(p): p for p in self.model.parameters()}.values():
            self.watch.storages.see(local_tensor(module.detach()), "parameters")

    def plan_attention(self, model: nn.Module) -> None:
        """Put the kernel of a plan where `model` has dtrain's own and the planned device would look at values."""
        if self.watch.on_host or isinstance(self.kernel, PlannedVarlen):
            _use_kernel(model, self.kernel)

    def init_optimizer(self, total_steps: int) -> None:
        super().init_optimizer(total_steps)
        self._updater.optimizer = _ShardsOptimizer(self)

    def _backward(self, batches, loss_fn, divisors):
        result = super()._backward(batches, loss_fn, divisors)
        grads = [local_tensor(parameter.grad) for parameter in self.model.parameters() if parameter.grad is not None]
        self.gradient_bytes = sum(grad.numel() * grad.element_size() for grad in grads)
        self.watch.storages.rename("temporaries", "gradients")
        self.watch.current = None
        self.watch.storages.mark(("update", None, None))
        return result


class _ShardsOptimizer:
    """The recipe's optimizer over a rank's shards as plain tensors, as it is from its second step on. Its state is left
    to `state_bytes`, its cost to the estimate."""

    def __init__(self, policy: PlannedPolicy):
        self.zero_grad = policy.optimizer.zero_grad
        self._watch = policy.watch
        self._parameters = list(policy.model.parameters())
        self._shards = [nn.Parameter(local_tensor(parameter.detach())) for parameter in self._parameters]
        names = (name for name, _ in policy.model.named_parameters())
        self._optimizer = build_optimizer(policy.recipe.optimizer, zip(names, self._shards, strict=True))
        for shard in self._shards:
            shard.grad = torch.empty_like(shard)
        with Stubbed():
            self._optimizer.step()
        self._optimizer.zero_grad()
        for state in self._optimizer.state.values():
            for value in state.values():
                if isinstance(value, Tensor) and value.is_meta:
                    self._watch.storages.leave_out(value)

    def step(self) -> None:
        for shard, parameter in zip(self._shards, self._parameters, strict=True):
            shard.grad = None if parameter.grad is None else local_tensor(parameter.grad)
        self._watch.is_costed = False
        self._optimizer.step()
        self._watch.is_costed = True
        self._optimizer.zero_grad()


def _lay_out(recipe: Recipe, config: ModelConfig, mesh: Mesh, precision: Precision) -> nn.Module:
    """As for a CPU: no kernel is proved on a device that is not here."""
    recipe = replace(recipe, model=replace(recipe.model, attention="sdpa"))
    return lay_out(recipe, config, mesh, precision, torch.device("cpu"))


def _use_kernel(model: nn.Module, kernel: Planned) -> None:
    """Put `kernel` where `model` has dtrain's own, alone or over gathered keys."""
    for layer in model.model.layers:
        held = layer.self_attn.kernel
        if isinstance(held, GatherKernel):
            held.inner = kernel
        elif isinstance(held, SdpaKernel):
            layer.self_attn.kernel = kernel


class _WatchedScorer(Scorer):
    """Marks where each pass through the model begins."""

    def __init__(self, model: nn.Module, mesh: Mesh, device: torch.device, watch: Watch, kernel: Planned):
        super().__init__(model, mesh, device)
        self.watch, self.kernel = watch, kernel
        self.passes = 0
        self.host = self.micro_rows = 0  # bytes at the last pass: of the host's tensors, and its own rows

    def at_head(self, batch, fn, *more):
        watch, storages, number = self.watch, self.watch.storages, self.passes
        self.kernel.take(batch)
        self.host, self.micro_rows = watch.host.total(), sum(one.numel() * one.element_size() for one in batch.values())
        storages.rename("temporaries", "gradients")  # what a backward has left
        self.passes += 1
        watch.current, watch.is_forward = number, True
        storages.mark(("begin", number, None))

        def within(source, local, *more):
            storages.rename("temporaries", "activations")
            storages.mark(("head", number, None))
            result = fn(source, local, *more)
            storages.rename("temporaries", "loss")
            return result

        result = super().at_head(batch, within, *more)
        watch.is_forward = False
        storages.mark(("backward", number, None))
        return result


def keep_beside(policy: PlannedPolicy, method: Method) -> None:
    """The other models that a method holds: a reference, a teacher."""
    storages, recipe = policy.watch.storages, policy.recipe
    if method.facts.holds_reference(recipe):
        policy.init_reference_model()
        for tensor in policy.reference.tensors.values():
            storages.see(local_tensor(tensor), "reference")
    if (teacher := method.facts.teacher(recipe)) is not None:

        def build(own, config, mesh, precision, device):
            return _lay_out(own, config, mesh, precision)

        method.teacher = Teacher(policy, teacher, build)
        policy.plan_attention(method.teacher.model)
        for parameter in method.teacher.model.parameters():
            storages.see(local_tensor(parameter.detach()), "teacher")


def mark_layers(policy: PlannedPolicy) -> None:
    """Mark where each layer begins and ends, forward and backward."""
    watch = policy.watch

    def before(index):
        def hook(module, inputs):
            watch.storages.mark(("forward" if watch.is_forward else "again", watch.current, index))

        return hook

    def after(index):
        def mark(grad):
            watch.storages.mark(("backward", watch.current, index))

        def hook(module, inputs, output):
            if output.requires_grad and watch.is_forward:
                output.register_hook(mark)

        return hook

    for index, layer in enumerate(policy.model.model.layers):
        layer.register_forward_pre_hook(before(index))
        layer.register_forward_hook(after(index))
