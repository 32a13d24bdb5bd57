"""One training step on stand-in tensors, watched: what `Policy.train` allocates, sends and computes on one rank.

The step is the trainer's own: the method's `prepare`, then `Policy.train`, on a model that `policy.build.lay_out` laid
out over a process group of as many ranks as are planned, of which this process is one and the only one. The optimizer
steps this rank's shards as plain tensors; `optimizer.state_bytes` says what it holds.

On a planned CPU the host's tensors lie in the same memory: the step's rows are counted too.
"""

import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dtrain.attention.context import GatherKernel
from dtrain.attention.kernels import SdpaKernel
from dtrain.batch import IGNORE, Batch, Row, collate
from dtrain.config import Sizes
from dtrain.config.schema import Recipe
from dtrain.methods import METHODS, Method
from dtrain.models.config import ModelConfig
from dtrain.optim import build_optimizer
from dtrain.parallel.mesh import Mesh, build_mesh
from dtrain.parallel.placement import local_tensor
from dtrain.parallel.runtime import Runtime
from dtrain.plan.costs import Cost, cost
from dtrain.plan.kernels import Planned, PlannedSdpa, PlannedVarlen
from dtrain.plan.memory import Piece, Storages
from dtrain.plan.optimizer import state_bytes
from dtrain.plan.shards import min_shard_elements
from dtrain.plan.stand_in import OnDevice, Stubbed, is_wrapped
from dtrain.plan.traffic import Groups, Sent, collective
from dtrain.policy import Policy
from dtrain.policy.build import lay_out, wants_varlen
from dtrain.policy.precision import Precision, choose_precision
from dtrain.policy.score import Scorer
from dtrain.policy.step import LossScale
from dtrain.policy.teacher import Teacher


@contextmanager
def world(rank: int, size: int) -> Iterator[None]:
    """A process group of `size` ranks in which this process is `rank` and nobody else is there; nothing is sent.

    Raises RuntimeError where torch.distributed is up: a plan never shares a process with a run.
    """
    from torch.testing._internal.distributed import fake_pg  # noqa: F401 (registers the backend "fake")

    if dist.is_initialized():
        raise RuntimeError("a plan needs a process of its own, and torch.distributed is up in this one")
    dist.init_process_group("fake", store=dist.HashStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


# One row of a step's traffic: (dimension, kind, ranks, on_host).
Lane = tuple[str, str, int, bool]


@dataclass(frozen=True)
class Watched:
    """A step of so many layers and micro-batches, as it was seen.

    pieces: by (phase, pass, layer), the peaks of its timeline; a pass is one micro-batch through the model, None what
    is around them. traffic: (count, bytes) by pass and lane. costs: by pass. parameters, gradients, state: bytes of
    this rank's shards, and of what the optimizer keeps for them. lightest: the smallest parameters that a rank has.
    micro_batches: that were traced. rows, micro_rows: of the host's tensors on a planned CPU, and of those of them that
    one micro-batch brings.
    """

    layers: int
    pieces: dict[tuple[str, int | None, int | None], Piece]
    traffic: dict[int | None, dict[Lane, tuple[int, int]]]
    costs: dict[int | None, Cost]
    parameters: int
    gradients: int
    state: int
    lightest: int
    micro_batches: int
    rows: int
    micro_rows: int


class Watch(Stubbed):
    """Hands every operation to those who count. on_host: the planned device is a CPU, whose gloo works on a copy of
    what it reduces and scatters."""

    def __init__(self, groups: Groups, on_host: bool):
        super().__init__()
        self.on_host = on_host
        self.storages = Storages("temporaries")
        self.host = Storages("rows")
        self.sent: list[tuple[int | None, Sent]] = []
        self.costs: dict[int | None, Cost] = defaultdict(Cost)
        self.current: int | None = None  # the pass through the model
        self.is_forward = False
        self.is_costed = True
        self._groups = groups

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if is_wrapped(types):
            return NotImplemented
        kwargs = kwargs or {}
        self.storages.poll()
        if self.on_host and func is torch.ops.c10d._reduce_scatter_base_.default and args[0].shape != args[1].shape:
            self.storages.within_operation(args[1])
        out = super().__torch_dispatch__(func, types, args, kwargs)
        everything = list(_tensors((args, tuple(kwargs.values()), out)))
        tensors = [one for one in everything if one.is_meta]
        self.storages.saw(func, tensors)
        for one in everything:
            if not one.is_meta:
                self.host.see(one)
        sent = collective(func, args, out, self._groups, self.current is not None)
        if sent is not None:
            self.sent.append((self.current, sent))
        elif tensors and self.is_costed:
            self.costs[self.current] += cost(func, args, kwargs, out, tensors)
        return out


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors in nested tuples and lists."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple | list):
            yield from _tensors(value)


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
            use_planned_kernel(model, self.kernel)

    def init_optimizer(self, total_steps: int) -> None:
        super().init_optimizer(total_steps)
        self._updater.optimizer = _ShardsOptimizer(self)

    def _backward(self, batches, loss_fn, count):
        result = super()._backward(batches, loss_fn, count)
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


def use_planned_kernel(model: nn.Module, kernel: Planned) -> None:
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

    def _at_head(self, batch, fn):
        watch, storages, number = self.watch, self.watch.storages, self.passes
        self.kernel.take(batch)
        self.host, self.micro_rows = watch.host.total(), sum(one.numel() * one.element_size() for one in batch.values())
        storages.rename("temporaries", "gradients")  # what a backward has left
        self.passes += 1
        watch.current, watch.is_forward = number, True
        storages.mark(("begin", number, None))

        def at_head(source, local):
            storages.rename("temporaries", "activations")
            storages.mark(("head", number, None))
            result = fn(source, local)
            storages.rename("temporaries", "loss")
            return result

        result = super()._at_head(batch, at_head)
        watch.is_forward = False
        storages.mark(("backward", number, None))
        return result


def watch_step(recipe: Recipe, config: ModelConfig, sizes: Sizes, *, rank: int = 0, device: str = "cuda") -> "Watched":
    """One step of `recipe` on the model of `config`, as rank `rank` of `sizes.world_size` computes it on a device of
    type `device`. No collective is sent; torch.distributed must not be up."""
    micro_batches = min(sizes.accumulation, TRACED)
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # torch's own, of what a later release will want
        stack.enter_context(world(rank, sizes.world_size))
        runtime = Runtime(rank=rank, world_size=sizes.world_size)  # FSDP on stand-ins is FSDP on a CPU
        mesh = build_mesh(runtime, dp_replicate=sizes.dp_replicate, dp_shard=sizes.dp_shard, cp=sizes.cp, tp=sizes.tp)
        on_device = stack.enter_context(OnDevice(device))
        policy = PlannedPolicy(recipe, config, mesh, rank, on_device.device)
        _mark_layers(policy)
        method = METHODS[recipe.method](recipe)
        _keep_beside(policy, method)
        policy.init_optimizer(total_steps=10)
        with policy.watch:
            policy.watch.storages.mark(("start", None, None))
            rows = full_rows(recipe, method, micro_batches)
            batch, loss = method.prepare(policy, collate(rows, list(rows[0])))
            policy.train(batch, loss, mbs=method.micro_rows)
    return _seen(policy, config.num_hidden_layers, micro_batches)


def _seen(policy: PlannedPolicy, layers: int, micro_batches: int) -> Watched:
    watch = policy.watch
    traffic: dict[int | None, dict[Lane, tuple[int, int]]] = defaultdict(dict)
    for number, sent in watch.sent:
        lane = (sent.dimension, sent.kind, sent.ranks, sent.on_host)
        count, size = traffic[number].get(lane, (0, 0))
        traffic[number][lane] = count + 1, size + sent.size
    parameters = list(policy.model.parameters())
    shapes = [tuple(local_tensor(parameter.detach()).shape) for parameter in parameters]
    itemsize = policy.precision.master.itemsize
    rows = (policy.scorer.host, policy.scorer.micro_rows) if watch.on_host else (0, 0)
    return Watched(
        layers,
        watch.storages.pieces(),
        dict(traffic),
        dict(watch.costs),
        sum(map(prod, shapes)) * itemsize,
        policy.gradient_bytes,
        state_bytes(policy.recipe.optimizer, shapes, policy.precision.master),
        min_shard_elements(parameters) * itemsize,
        micro_batches,
        *rows,
    )


TRACED = 3  # micro-batches: a first, a last, and one like all between them


def _keep_beside(policy: PlannedPolicy, method: Method) -> None:
    """The other models that a method holds: a reference, a teacher."""
    storages, recipe = policy.watch.storages, policy.recipe
    if _has_reference(recipe, method):
        policy.init_reference_model()
        for tensor in policy.reference.tensors.values():
            storages.see(local_tensor(tensor), "reference")
    if recipe.method == "distill":

        def build(own, config, mesh, precision, device):
            return _lay_out(own, config, mesh, precision)

        method.teacher = Teacher(policy, recipe.distill.teacher, build)
        policy.plan_attention(method.teacher.model)
        for parameter in method.teacher.model.parameters():
            storages.see(local_tensor(parameter.detach()), "teacher")


def _has_reference(recipe: Recipe, method: Method) -> bool:
    if recipe.method == "dpo":
        return method.objective.needs_reference and not recipe.dpo.precompute
    return recipe.method == "grpo" and recipe.grpo.beta > 0


def full_rows(recipe: Recipe, method: Method, micro_batches: int) -> list[Row]:
    """A rank's rows of a step, as full as the recipe allows: every row of `data.max_length` tokens (a packed row of
    pairs twice as many), every token trained that has one before it; packed rows hold two documents, so that the masks
    are those of packing."""
    length, packed = recipe.data.max_length, recipe.data.packing
    count = micro_batches * (method.micro_rows if isinstance(method.micro_rows, int) else recipe.train.micro_batch)
    if method.kind == "pairs" and packed:
        length *= 2
    documents = 1 if method.kind == "prompts" or not packed else 2
    places = torch.arange(length)
    seq_ids = places * documents // length
    begins = torch.searchsorted(seq_ids, seq_ids)
    streams = {
        "input_ids": torch.ones_like(places),
        "labels": torch.where((begins.roll(-1) == places + 1) | (places == length - 1), IGNORE, 1),
        "position_ids": places - begins,
        "seq_ids": seq_ids,
    }
    if method.kind == "prompts":
        streams |= {name: torch.zeros(length, dtype=torch.float64) for name in _of_rollouts(recipe)}
    return [{name: stream.clone() for name, stream in streams.items()} for _ in range(count)]


def full_batch(recipe: Recipe, method: Method, micro_batches: int) -> Batch:
    """`full_rows` as a batch."""
    rows = full_rows(recipe, method, micro_batches)
    return collate(rows, list(rows[0]))


def _of_rollouts(recipe: Recipe) -> list[str]:
    """The streams that a rollout adds to its rows."""
    return ["old_logprobs", "sampling_logprobs", "advantages"] + ["reference_logprobs"] * (recipe.grpo.beta > 0)


def _mark_layers(policy: PlannedPolicy) -> None:
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
