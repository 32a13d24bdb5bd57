"""The device of a rank: weights and optimizer state moved to it to train, and to host memory while others use it; its
memory and its profiler.

On a CPU everything lies where it is, and these functions only switch between training and evaluation.
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
    """Mover of `model` and of its optimizer's state between `device` and the host. No collective; every rank moves its
    own shards.

    keeps_parameters, keeps_state: whether they live in host memory anyway (`parallel.cpu_offload`,
    `parallel.optimizer_offload`).
    """

    def __init__(self, model: CausalLM, device: torch.device, *, keeps_parameters: bool, keeps_state: bool):
        self.updater: Updater | None = None  # from `Policy.init_optimizer` on
        self._model, self._device = model, device
        self._keeps_parameters, self._keeps_state = keeps_parameters, keeps_state

    def prepare_for_training(self) -> None:
        """Bring weights and optimizer state to the device, and the model to training mode."""
        self._onload()
        if not self._keeps_parameters:
            self.move_optimizer_to_device(self._device)
        self._model.train()

    def prepare_for_lp_inference(self) -> None:
        """Bring weights to the device, and the model to evaluation mode; the optimizer's state stays where it is."""
        self._onload()
        self._model.eval()

    def offload_before_refit(self) -> None:
        """Move the optimizer's state to the host: the weights are about to be sent out."""
        self.move_optimizer_to_device("cpu")
        self._free()

    def offload_after_refit(self) -> None:
        """Move weights and optimizer state to the host: the device is another's until `prepare_for_...`."""
        self.move_to_cpu(self._model)
        self._model.eval()
        self.offload_before_refit()

    def move_optimizer_to_device(self, device: str | torch.device) -> None:
        """Move every tensor of the optimizer's state, but where it lives on the host."""
        if self.updater is None or self._keeps_state:
            return
        for state in self.updater.optimizer.state.values():
            for key, value in state.items():
                # torch keeps Adam's count of steps on the host, for all but its fused kind.
                if isinstance(value, Tensor) and (value.dim() or key != "step"):
                    state[key] = value.to(device)

    def move_to_device(self, model: nn.Module, device: str | torch.device) -> nn.Module:
        """Move the parameters and buffers of `model` to `device`, and return it.

        Gathered weights are freed before. If masters are in host memory, only the buffers move.
        """
        Sharding(model).reshard()
        if not get_host_masters(model):
            model.to(device)
        return self.move_buffer_to_device(model, device)

    def move_buffer_to_device(self, model: nn.Module, device: str | torch.device) -> nn.Module:
        """Return `model` with its buffers moved to `device`: FSDP does not move them."""
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                module._buffers[name] = buffer.to(device)
        return model

    def move_to_cpu(self, model: nn.Module) -> nn.Module:
        model = self.move_to_device(model, "cpu")
        self._free()
        return model

    def move_to_cuda(self, model: nn.Module) -> nn.Module:
        """Return `model`, moved to this rank's device, whatever its kind."""
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
    """Reader of the memory of rank `rank`'s `device`, and switch of its profiler; on a CPU neither does anything."""

    def __init__(self, rank: int, device: torch.device):
        self._rank, self._device = rank, device

    def get_gpu_info(self) -> dict[str, Any]:
        """Return this rank's device: rank, name, and bytes in use, at their peak and in all; 0 where it is a CPU."""
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
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)

    def start_gpu_profiling(self) -> None:
        """Begin the range that a profiler started with --capture-range=cudaProfilerApi records."""
        if self._device.type == "cuda":
            torch.cuda.profiler.start()

    def stop_gpu_profiling(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.profiler.stop()


@torch.no_grad()
def get_cpu_state_dict(state_generator: Iterable[tuple[str, Tensor]], pin_memory: bool = False) -> dict[str, Tensor]:
    """Return this rank's part of each (name, tensor), copied to the host; scalars as they are. No collective."""
    copied = {}
    for name, tensor in state_generator:
        local = local_tensor(tensor).detach()
        copied[name] = torch.empty(local.shape, dtype=local.dtype, pin_memory=pin_memory).copy_(local)
    return copied
