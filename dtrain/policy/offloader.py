"""Moving weights and optimizer state between a rank's device and host memory; the device's memory and profiler.

In reinforcement learning, an inference engine may use the same GPU between two training steps. Then NeMo-RL's users
call, in this order:

    offloader.offload_before_refit()         optimizer state -> host, while weights are sent to the engine
    offloader.offload_after_refit()          weights -> host, while the engine generates
    offloader.prepare_for_lp_inference()     weights -> device, to compute log-probabilities
    offloader.prepare_for_training()         optimizer state -> device

On a CPU nothing is moved, and these functions only switch between training and evaluation.
"""

import gc
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from dtrain.models.common.decoder import CausalLM
from dtrain.optim.update import Updater
from dtrain.parallel.fsdp import Sharding, get_host_masters
from dtrain.parallel.placement import local_tensor


class PolicyOffloader:
    """Moves a model and its optimizer's state between a device and the host.

    Every rank moves its own shards. No method communicates.

    Args:
        model: The model.
        device: This rank's device.
        keeps_parameters: Whether parameters stay in host memory (`parallel.cpu_offload`).
        keeps_state: Whether the optimizer's state stays in host memory (`parallel.optimizer_offload`).

    Attributes:
        updater: Optimizer, schedule and loss scale; None before `Policy.init_optimizer`.
    """

    def __init__(self, model: CausalLM, device: torch.device, *, keeps_parameters: bool, keeps_state: bool):
        self.updater: Updater | None = None
        self._model, self._device = model, device
        self._keeps_parameters, self._keeps_state = keeps_parameters, keeps_state

    def prepare_for_training(self) -> None:
        """Move weights and optimizer state to the device, and switch the model to training mode."""
        self._onload()
        if not self._keeps_parameters:
            self.move_optimizer_to_device(self._device)
        self._model.train()

    def prepare_for_lp_inference(self) -> None:
        """Move the weights to the device, and switch the model to evaluation mode. Optimizer state is not moved."""
        self._onload()
        self._model.eval()

    def offload_before_refit(self) -> None:
        """Move the optimizer's state to the host, before weights are sent."""
        self.move_optimizer_to_device("cpu")
        self._free()

    def offload_after_refit(self) -> None:
        """Move weights and optimizer state to the host, so that another program can use the device."""
        self.move_to_cpu(self._model)
        self._model.eval()
        self.offload_before_refit()

    def move_optimizer_to_device(self, device: str | torch.device) -> None:
        """Move every tensor of the optimizer's state, unless the state stays in host memory."""
        if self.updater is None or self._keeps_state:
            return
        for state in self.updater.optimizer.state.values():
            for key, value in state.items():
                # torch keeps Adam's count of steps on the host, except in its fused implementation.
                if isinstance(value, Tensor) and (value.dim() or key != "step"):
                    state[key] = value.to(device)

    def move_to_device(self, model: nn.Module, device: str | torch.device) -> nn.Module:
        """Move the parameters and buffers of `model` to `device`, and return it.

        Gathered weights are freed first. If masters are in host memory, only the buffers move.
        """
        Sharding(model).reshard()
        if not get_host_masters(model):
            model.to(device)
        return self.move_buffer_to_device(model, device)

    def move_buffer_to_device(self, model: nn.Module, device: str | torch.device) -> nn.Module:
        """Move the buffers of `model`, which FSDP does not move, and return it."""
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                module._buffers[name] = buffer.to(device)
        return model

    def move_to_cpu(self, model: nn.Module) -> nn.Module:
        """Move `model` to the host, free unused device memory, and return the model."""
        model = self.move_to_device(model, "cpu")
        self._free()
        return model

    def move_to_cuda(self, model: nn.Module) -> nn.Module:
        """Move `model` to this rank's device, also if that is a CPU, and return it."""
        return self.move_to_device(model, self._device)

    def _onload(self) -> None:
        self.move_buffer_to_device(self._model, self._device)
        if not self._keeps_parameters:
            self.move_to_device(self._model, self._device)

    def _free(self) -> None:
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()


class DeviceMonitor:
    """Reads the memory of a rank's device, and starts and stops its profiler. On a CPU it does nothing.

    Args:
        rank: The rank, for reports.
        device: Its device.
    """

    def __init__(self, rank: int, device: torch.device):
        self._rank, self._device = rank, device

    def get_gpu_info(self) -> dict[str, Any]:
        """Return the rank, the device, its name, and its memory in bytes: allocated, peak and total. 0 on a CPU."""
        info: dict[str, Any] = {"rank": self._rank, "device": str(self._device), "name": self._device.type}
        if self._device.type != "cuda":
            return info | {"memory_allocated": 0, "max_memory_allocated": 0, "memory_total": 0}
        properties = torch.cuda.get_device_properties(self._device)
        return info | {
            "name": properties.name,
            "memory_allocated": torch.cuda.memory_allocated(self._device),
            "max_memory_allocated": torch.cuda.max_memory_allocated(self._device),
            "memory_total": properties.total_memory,
        }

    def reset_peak_memory_stats(self) -> None:
        """Start a new measurement of the peak."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)

    def start_gpu_profiling(self) -> None:
        """Begin the range that a profiler started with --capture-range=cudaProfilerApi records."""
        if self._device.type == "cuda":
            torch.cuda.profiler.start()

    def stop_gpu_profiling(self) -> None:
        """End the range of `start_gpu_profiling`."""
        if self._device.type == "cuda":
            torch.cuda.profiler.stop()


@torch.no_grad()
def get_cpu_state_dict(state_generator: Iterable[tuple[str, Tensor]], pin_memory: bool = False) -> dict[str, Tensor]:
    """Copy this rank's shard of each tensor to the host. No collective.

    Args:
        state_generator: Names and tensors.
        pin_memory: Copy to pinned memory.
    """
    copied = {}
    for name, tensor in state_generator:
        local = local_tensor(tensor).detach()
        copied[name] = torch.empty(local.shape, dtype=local.dtype, pin_memory=pin_memory).copy_(local)
    return copied
