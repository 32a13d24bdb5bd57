"""`Policy` under the name and with the keywords of NeMo-RL's policy worker, without Ray.

Code that was written for NeMo-RL can use it by changing an import. Functions of NeMo-RL's worker that dtrain does not
have raise a NotImplementedError that says why.
"""

import os
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import fields
from functools import partial
from operator import attrgetter
from typing import Any, NoReturn

import torch
from torch import Tensor

from dtrain.base.batch import Batch
from dtrain.base.hardware import free_device_memory
from dtrain.base.randomness import random_key
from dtrain.models.building import fill_normal
from dtrain.models.common.config import ModelConfig
from dtrain.parallel import context
from dtrain.parallel.mesh import Mesh, Runtime
from dtrain.parallel.placement import local_slices, local_tensor
from dtrain.policy.batching import Batching, check_batch
from dtrain.policy.checkpoint import PolicyCheckpoint
from dtrain.policy.offloader import DeviceMonitor, PolicyOffloader
from dtrain.policy.options import BuildOptions, PolicyConfig
from dtrain.policy.policy import Policy
from dtrain.policy.results import StepResult, UpdateResult
from dtrain.policy.weights import WeightSender
from dtrain.recipe.rollouts import RolloutSection

MIB = 2**20
NOISE = 0.01  # standard deviation of `_add_noise_to_weights`, NeMo-RL's
_NO_ZMQ = (
    "weights leave by a broadcast (init_collective, broadcast_weights_for_collective) or by handles "
    "(prepare_weights_for_ipc, get_weights_ipc_handles)"
)


def _method_of(part: str, method: Callable[..., Any]) -> property:
    """Return a property that forwards to a method of a part of the policy, such as `checkpoint`."""
    return property(attrgetter(f"{part}.{method.__name__}"), doc=method.__doc__)


def _refusing(name: str, why: str) -> Callable[..., NoReturn]:
    """Return a method that raises NotImplementedError."""

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"DTensorPolicyWorker.{name}: {why}")

    return refuse


class DTensorPolicyWorker(Policy):
    """`Policy` with the methods of NeMo-RL's worker.

    The constructor builds a `Policy`. Then it copies the weights as the reference, builds the optimizer with a schedule
    over `train.steps`, and loads a checkpoint, as NeMo-RL's worker does.

    Args:
        recipe: As in `Policy`, like the four arguments that follow.
        config: Config of the model.
        mesh: The mesh.
        runtime: This rank and its device.
        options: Options for building the model.
        weights_path: Directory of weights that `save_checkpoint` has written. None loads nothing.
        optimizer_path: Directory of the optimizer's state. None loads only the weights.
        init_optimizer: Whether the optimizer is built.
        init_reference_model: Whether the reference is copied.
        others: Arguments of NeMo-RL's worker, which are refused.

    Raises:
        NotImplementedError: For NeMo-RL's own config instead of a recipe, and for `others`.
        ValueError: If the optimizer is to be built, and `train.steps` is null.
    """

    def __init__(
        self,
        recipe: PolicyConfig | None = None,
        config: ModelConfig | None = None,
        mesh: Mesh | None = None,
        runtime: Runtime | None = None,
        options: BuildOptions | None = None,
        *,
        weights_path: str | None = None,
        optimizer_path: str | None = None,
        init_optimizer: bool = True,
        init_reference_model: bool = True,
        **others: Any,
    ):
        if not isinstance(recipe, PolicyConfig) or config is None or mesh is None or runtime is None or others:
            raise NotImplementedError(
                "DTensorPolicyWorker(recipe, config, mesh, runtime) needs a recipe of dtrain, and does not read a "
                "config, tokenizer or processor of NeMo-RL. Write a recipe (dtrain/methods/README.md lists its keys "
                "next to NeMo-RL's), and load it with dtrain.training.load_recipe"
            )
        if init_optimizer and recipe.train.steps is None:
            raise ValueError(
                "train.steps=null: the learning rate schedule needs a number of steps. Set it, or pass "
                "init_optimizer=False"
            )
        super().__init__(recipe, config, mesh, runtime, options=options)
        self._temperature = _temperature_of(recipe)
        if init_reference_model:
            self.init_reference_model()
        if init_optimizer:
            assert recipe.train.steps is not None
            self.init_optimizer(recipe.train.steps)
        if weights_path is not None:
            self.checkpoint.load_checkpoint(weights_path, optimizer_path)

    def train(
        self,
        data: Any,
        loss_fn: Callable[..., Any],
        eval_mode: bool = False,
        gbs: int | None = None,
        mbs: int | Batching | None = None,
    ) -> dict[str, Any]:
        """Train on a batch, in one or more optimizer steps.

        Args:
            data: This dp rank's rows, a mapping of tensors such as a BatchedDataDict. See `Policy.forward_backward`.
            loss_fn: A loss, as for `Policy.forward_backward`.
            eval_mode: Compute the losses only, without gradients or an optimizer.
            gbs: Rows of one optimizer step over all dp ranks. None uses `train.global_batch`.
            mbs: Rows of a micro-batch, or another way to form them. None uses the recipe's.

        Returns:
            A dict with these entries, whose tensors are on the host except in `all_mb_metrics`:

                global_loss       float64 [steps]
                sums              total of each metric, by name, float64 [steps] each
                loads             metrics of a mixture's routing, by name, float64 [steps] each
                tokens            int64 [steps, 3]: trained tokens, documents, tokens
                pairs             int64 [steps, 2]: `pairs` and `windowed_pairs` of `StepCounts`
                vision_flops      int64 [steps]
                all_mb_metrics    this rank's value of each metric in each micro-batch, a list by name
                grad_norm         of the last step, before clipping, [1]; None with `eval_mode`
                lr                of the last step; None with `eval_mode`
                rank, gpu_name, model_dtype

        Raises:
            NotImplementedError: For a loss of NeMo-RL's, recognised by its `loss_type`.
            ValueError: If `gbs` is not the same number of rows for every dp rank, or the batch does not fit.
            RuntimeError: Without an optimizer, unless `eval_mode`.

        Collectives:
            Those of `batching.check_batch` once, then per step the others of `Policy.forward_backward` and
            `optimizer_step`.
        """
        if hasattr(loss_fn, "loss_type"):
            raise NotImplementedError(
                f"DTensorPolicyWorker.train with {type(loss_fn).__name__}: NeMo-RL's losses need the full logits, "
                "which dtrain never computes. Write loss_fn(source, batch, global_valid_seqs, global_valid_toks) with "
                "source.logprobs() (dtrain/policy/score.py)"
            )
        batch_size = self.recipe.train.global_batch
        gbs = self.recipe.train.num_batch_rows if gbs is None and batch_size != "auto" else gbs
        dp_size = self.mesh.dp_size
        if gbs is not None and (gbs < 1 or gbs % dp_size):
            raise ValueError(f"gbs={gbs} must be a multiple of the {dp_size} data-parallel ranks")
        if not eval_mode:
            self._required_updater("train")
        checked = check_batch(data, self.mesh.dp, self.model.config.vocab_size)
        results: list[StepResult] = []
        update: UpdateResult | None = None
        rows_per_step = None if gbs is None else gbs // dp_size
        for step in checked.split_into_steps(rows_per_step):
            if eval_mode:
                results.append(self._evaluate(step, loss_fn, mbs))
            else:
                results.append(self._forward_backward(step, loss_fn, mbs))
                update = self.optimizer_step()
        return _as_dict(results) | {
            "grad_norm": None if update is None else torch.tensor([update.grad_norm]),
            "lr": None if update is None else update.lr,
            "rank": self.rank,
            "gpu_name": self.monitor.get_gpu_info()["name"],
            "model_dtype": self.precision.compute,
        }

    def get_logprobs(self, data: Batch, micro_batch_size: int | Batching | None = None) -> dict[str, Tensor]:
        """Compute the log-probability of every token, whether it has a label or not.

        Args:
            data: This dp rank's rows, as for `Policy.forward_backward`. Labels and masks are not read.
            micro_batch_size: As for `Policy.forward_backward`.

        Returns:
            {"logprobs": [n, S]} on the CPU, in max(float32, the dtype of computation). Position i has the
            log-probability of token i given the tokens before it in its document, 0 for a document's first token and
            for padding. The same on every tp and cp rank.

        Collectives:
            Those of `Policy.logprobs`.
        """

        def score(rows: Batch) -> list[Tensor]:
            return [self.scorer.logprobs(rows, adapters=self._has_adapters)]

        # Position i of `values` has the log-probability of its next token. The last position has no label.
        (values,) = self._scored(data, micro_batch_size, score, every_token=True)
        return {"logprobs": values.roll(1, 1)}

    def get_reference_policy_logprobs(
        self, data: Batch, micro_batch_size: int | Batching | None = None
    ) -> dict[str, Tensor]:
        """Compute `get_logprobs` with the reference's weights: {"reference_logprobs": [n, S]}."""
        with self.use_reference_model():
            return {"reference_logprobs": self.get_logprobs(data, micro_batch_size)["logprobs"]}

    def get_topk_logits(self, data: Batch, k: int, micro_batch_size: int | Batching | None = None) -> dict[str, Tensor]:
        """Compute the k largest logits at every position.

        Args:
            data: This dp rank's rows, as for `Policy.forward_backward`. Labels and masks are not read.
            k: Number of logits; the vocabulary's size if it is smaller.
            micro_batch_size: As for `Policy.forward_backward`.

        Returns:
            {"topk_logits", "topk_indices"}, each [n, S, k] on the CPU, after the model's softcap, descending, equal
            logits by ascending token id; 0 on padding. The same on every tp and cp rank.

        Collectives:
            Those of `Policy.logprobs`.
        """
        score = partial(self.scorer.topk_logits, k=k, adapters=self._has_adapters)
        logits, ids = self._scored(data, micro_batch_size, score, every_token=True)
        return {"topk_logits": logits, "topk_indices": ids}

    # Methods of the policy's parts that NeMo-RL's users call on the worker.
    save_checkpoint = _method_of("checkpoint", PolicyCheckpoint.save_checkpoint)
    load_checkpoint = _method_of("checkpoint", PolicyCheckpoint.load_checkpoint)
    return_state_dict = _method_of("checkpoint", PolicyCheckpoint.return_state_dict)
    prepare_for_lp_inference = _method_of("offloader", PolicyOffloader.prepare_for_lp_inference)
    offload_before_refit = _method_of("offloader", PolicyOffloader.offload_before_refit)
    offload_after_refit = _method_of("offloader", PolicyOffloader.offload_after_refit)
    move_optimizer_to_device = _method_of("offloader", PolicyOffloader.move_optimizer_to_device)
    move_to_device = _method_of("offloader", PolicyOffloader.move_to_device)
    move_to_cpu = _method_of("offloader", PolicyOffloader.move_to_cpu)
    move_to_cuda = _method_of("offloader", PolicyOffloader.move_to_cuda)
    move_buffer_to_device = _method_of("offloader", PolicyOffloader.move_buffer_to_device)
    prepare_refit_info = _method_of("weights", WeightSender.prepare_refit_info)
    broadcast_weights_for_collective = _method_of("weights", WeightSender.broadcast_weights_for_collective)
    reset_peak_memory_stats = _method_of("monitor", DeviceMonitor.reset_peak_memory_stats)
    start_gpu_profiling = _method_of("monitor", DeviceMonitor.start_gpu_profiling)
    stop_gpu_profiling = _method_of("monitor", DeviceMonitor.stop_gpu_profiling)

    score = _refusing("score", "a policy has the head of a language model: train a rating model with method=reward")
    stream_weights_via_ipc_zmq = _refusing("stream_weights_via_ipc_zmq", _NO_ZMQ)
    get_zmq_address = _refusing("get_zmq_address", _NO_ZMQ)
    maybe_init_zmq = _refusing("maybe_init_zmq", _NO_ZMQ)
    report_node_ip_and_gpu_id = _refusing(
        "report_node_ip_and_gpu_id", "places on nodes are Ray's; report_device_id names the device"
    )

    @staticmethod
    def create_context_parallel_ctx(*args: Any, **kwargs: Any) -> AbstractContextManager[None]:
        """Call `dtrain.parallel.context.create_context_parallel_ctx`."""
        return context.create_context_parallel_ctx(*args, **kwargs)

    @staticmethod
    def train_context(cp_context: Any = None) -> AbstractContextManager[None]:
        """Return a context that enters `cp_context`, or does nothing if it is None."""
        return context.get_train_context(False, False, cp_context)()

    def prepare_for_training(self, *args: Any, **kwargs: Any) -> None:
        """Call `PolicyOffloader.prepare_for_training`. Arguments are ignored, as in NeMo-RL."""
        self.offloader.prepare_for_training()

    def init_collective(self, ip: str, port: int, world_size: int, *, train_world_size: int | None = None) -> None:
        """Call `WeightSender.init_collective`.

        Args:
            ip: Address at which rank 0 listens.
            port: Port at which rank 0 listens.
            world_size: Number of training ranks and receivers, as NeMo-RL counts them.
            train_world_size: Number of training ranks in `world_size`. In dtrain only rank 0 of them sends.
        """
        self.weights.init_collective(ip, port, world_size - (train_world_size or 1) + 1)

    def prepare_weights_for_ipc(self) -> tuple[list[tuple[str, int]], float]:
        """Return name and bytes of each full tensor, and the number of bytes that are free for them. No collective.

        The bytes are those in the dtype of computation. See `get_free_memory_bytes`.
        """
        self.weights.prepare_weights_for_ipc()
        sizes = [(name, shape.numel() * dtype.itemsize) for name, (shape, dtype) in self.prepare_refit_info().items()]
        return sizes, float(self.get_free_memory_bytes())

    def get_weights_ipc_handles(self, keys: Iterable[str]) -> dict[str, Any]:
        """Call `WeightSender.get_weights_ipc_handles`, and return its handles in NeMo-RL's form.

        Returns:
            {`report_device_id()`: (False, [(name, (function, arguments))])}. False means that each handle is a single
            tensor.
        """
        handles = self.weights.get_weights_ipc_handles(list(keys))
        return {self.report_device_id(): (False, list(handles.items()))}

    def get_free_memory_bytes(self) -> int:
        """Return the number of bytes of this rank's device that other tensors may use.

        On CUDA these are four fifths of the free memory, on a CPU this rank's share of the host's free memory.
        """
        return free_device_memory(self.device, self.runtime.world_size)

    def get_gpu_info(self) -> dict[str, Any]:
        """Return this rank and its device under NeMo-RL's keys. Memory is in MiB, 0 on a CPU.

        `env_vars` has the launcher's variables of the rank, and CUDA_VISIBLE_DEVICES, None if that is not set.
        `global_device_id` is None, because CUDA_VISIBLE_DEVICES may name devices by UUID or MIG instance.
        """
        rank, info = self.runtime, self.monitor.get_gpu_info()
        is_gpu = self.device.type == "cuda"
        sample = {}  # the first trained parameter
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                sample[name] = _describe(parameter)
                break
        return {
            "rank": rank.rank,
            "world_size": rank.world_size,
            "local_rank": rank.local_rank,
            "local_device_id": self.device.index or 0,
            "global_device_id": None,
            "device_count": torch.cuda.device_count() if is_gpu else 0,
            "device_name": info["name"],
            "memory_allocated_mb": info["memory_allocated"] / MIB,
            "memory_reserved_mb": torch.cuda.memory_reserved(self.device) / MIB if is_gpu else 0.0,
            "peak_memory_allocated_mb": info["max_memory_allocated"] / MIB,
            "peak_memory_reserved_mb": torch.cuda.max_memory_reserved(self.device) / MIB if is_gpu else 0.0,
            "parameter_sample": sample,
            "env_vars": {
                "RANK": str(rank.rank),
                "WORLD_SIZE": str(rank.world_size),
                "LOCAL_RANK": str(rank.local_rank),
                "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES"),
            },
        }

    def _apply_temperature_scaling(self, logits: Tensor) -> Tensor:
        """Divide logits in place by the temperature of the recipe's rollouts; without rollouts they stay as they are.

        Returns:
            `logits`, the same tensor.
        """
        return logits.div_(self._temperature)

    @torch.no_grad()
    def _add_noise_to_weights(self) -> None:
        """Add noise from normal(0, 0.01) to each trained weight, so that a test can see new weights arrive elsewhere.

        The noise of an element depends on its index in the unsharded weight and on the recipe's seed, so all ranks and
        meshes agree. A second call adds the same noise again. No collective.
        """
        with self.sharding.writing():
            for name, parameter in self.model.named_parameters():
                if parameter.requires_grad:
                    weight = local_tensor(parameter)
                    noise = torch.empty_like(weight)
                    number = random_key(self.recipe.run.seed, "noise", name)
                    fill_normal(noise, parameter.shape, local_slices(parameter), number, NOISE)
                    weight.add_(noise)

    def report_device_id(self) -> str:
        """Return the UUID of this rank's GPU, "GPU-...", as nvidia-smi has it; "cpu" on a CPU."""
        if self.device.type != "cuda":
            return self.device.type
        return f"GPU-{torch.cuda.get_device_properties(self.device).uuid}"

    def return_model_config(self) -> ModelConfig:
        """Return the model's config."""
        return self.model.config

    def is_alive(self) -> bool:
        """Return True. NeMo-RL calls this to find out whether a worker responds."""
        return True

    def shutdown(self) -> None:
        """Leave the process group of `init_collective`, and free shared weights. The process continues."""
        self.weights.close()


def _as_dict(results: list[StepResult]) -> dict[str, Any]:
    """Return the results of a batch's steps under NeMo-RL's keys; see `DTensorPolicyWorker.train`."""
    first = results[0]
    counts = [result.counts for result in results]

    def by_step(values: list[dict[str, float]]) -> dict[str, torch.Tensor]:
        return {name: torch.tensor([each[name] for each in values], dtype=torch.float64) for name in values[0]}

    by_micro_batch: dict[str, list[Tensor]] = {name: [] for name in first.names}
    for result in results:
        for metrics in result.micro_batch_metrics:
            for name in first.names:
                by_micro_batch[name].append(metrics[name])
    return {
        "global_loss": torch.tensor([result.loss for result in results], dtype=torch.float64),
        "sums": by_step([result.metrics for result in results]),
        "loads": by_step([result.routing_metrics for result in results]),
        "tokens": torch.tensor([[each.trained_tokens, each.documents, each.tokens] for each in counts]),
        "pairs": torch.tensor([[each.pairs, each.windowed_pairs] for each in counts]),
        "vision_flops": torch.tensor([each.vision_flops for each in counts]),
        "all_mb_metrics": by_micro_batch,
    }


def _temperature_of(recipe: PolicyConfig) -> float:
    """Return the temperature at which a recipe samples completions; 1 for a method that samples none."""
    for field in fields(recipe):
        section = getattr(recipe, field.name)
        if isinstance(section, RolloutSection):
            return section.sampling.temperature
    return 1.0


def _describe(parameter: Tensor) -> dict[str, Any]:
    return {
        "device": str(local_tensor(parameter).device),
        "shape": list(parameter.shape),
        "dtype": str(parameter.dtype),
    }
