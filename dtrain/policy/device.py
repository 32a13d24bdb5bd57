"""The device of a rank: its memory, and its profiler."""

from typing import Any

import torch


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
