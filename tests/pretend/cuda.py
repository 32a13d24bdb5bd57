"""A CUDA device in this process: the library loaded, torch.cuda answered, kernels and nccl put in.

`start` comes before anything that imports torch, for torch asks for hooks once. It changes torch for the whole
process: only the helper processes of `server` call it. `insert` sets the card, any time before its memory is used.
"""

import contextlib
import ctypes
import importlib.util
import os
import sys
import types
from datetime import timedelta
from pathlib import Path
from typing import Any

from tests.pretend import graphs, journal
from tests.pretend.card import Card

_CARDS: list[Card] = [Card(devices=1)]
_STARTED: list[Card] = []  # the card, once CUDA has started on it, which a plan's fork would not survive


def library() -> Any:
    """The loaded library: the device's counters and what the kernels need."""
    return sys.modules["pretend_device"]


def card() -> Card:
    return _CARDS[-1]


def insert(new: Card) -> None:
    """Make `new` the card of this process; its memory's counters start over at what is held."""
    _CARDS.append(new)
    _STARTED.clear()
    library().set_devices(new.devices if new.devices is not None else 1)
    library().set_capacity(new.memory)
    library().set_hollow(new.hollow)
    library().reset_peak()
    journal.clear()


def start(built: Path) -> None:
    """Load the library, then torch, and make torch.cuda one with a card."""
    assert "torch" not in sys.modules, "the hooks must be there before torch asks for them"
    ctypes.CDLL(str(built))  # registers the hooks; the module needs torch's Python types, and torch the hooks
    spec = importlib.util.spec_from_file_location("pretend_device", built)
    assert spec is not None and spec.loader is not None
    import torch

    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules["pretend_device"] = module
    from tests.pretend.kernels import Kernels
    from tests.pretend.sdpa import Choice

    module.observe(journal.note)
    module.choose_sdpa_by(Choice(lambda: card().capability, journal.note))
    Kernels(module, journal.note).register()
    _answer_for_cuda(torch, module)
    _put_nccl_in(torch, module)
    insert(Card(devices=1))


class Stream:
    """The one stream, on which everything is done at once."""

    device_type, stream_id, cuda_stream = 1, 0, 0

    def __init__(self, device: Any = None, priority: int = 0, **_: Any):
        import torch

        self.device = torch.device("cuda", _index(device))

    @property
    def device_index(self) -> int:
        return self.device.index

    def wait_stream(self, stream: "Stream") -> None:
        graphs.no_other_stream()

    def wait_event(self, event: "Event") -> None: ...

    def record_event(self, event: "Event | None" = None) -> "Event":
        return event or Event()

    def synchronize(self) -> None:
        journal.note("sync", "stream")

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False


class Event:
    def __init__(self, *_: Any, **__: Any): ...

    def record(self, stream: Stream | None = None) -> None: ...

    def wait(self, stream: Stream | None = None) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        journal.note("sync", "event")

    def elapsed_time(self, other: "Event") -> float:
        return 1.0  # milliseconds


class Device:
    """torch.cuda.device"""

    def __init__(self, device: Any):
        self.index, self.before = _index(device), 0

    def __enter__(self) -> None:
        self.before = library().get_device()
        library().set_device(self.index)

    def __exit__(self, *_: Any) -> None:
        library().set_device(self.before)


def _index(device: Any = None) -> int:
    import torch

    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return library().get_device() if index is None else index


@contextlib.contextmanager
def _on_stream(stream: Any):
    yield stream


def _properties(device: Any = None) -> Any:
    major, minor = card().capability
    return types.SimpleNamespace(
        name=card().name, total_memory=card().memory, major=major, minor=minor, multi_processor_count=132, warp_size=32,
        max_threads_per_multi_processor=2048, regs_per_multiprocessor=65536, shared_memory_per_block_optin=232448,
        L2_cache_size=50 * 2**20, uuid=card().uuid or f"GPU-{_index(device)}",
        is_integrated=False,
    )  # fmt: skip


def _answer_for_cuda(torch: Any, device: Any) -> None:
    stream = Stream(0)
    cuda, accelerator = torch.cuda, torch.accelerator

    def is_available() -> bool:
        return device_count() > 0

    def device_count() -> int:
        return (
            0
            if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
            else 1
            if card().devices is None
            else card().devices
        )

    def init() -> None:
        if card().refusal is not None:
            raise RuntimeError(card().refusal)
        _STARTED.append(card())

    def set_device(of: Any) -> None:
        device.set_device(_index(of))
        _STARTED.append(card())

    answers = {
        "is_available": is_available, "device_count": device_count, "is_initialized": lambda: bool(_STARTED),
        "_lazy_init": lambda: None, "init": init, "_is_compiled": lambda: True,
        "_is_in_bad_fork": lambda: False,
        "current_device": device.get_device, "set_device": set_device, "device": Device,
        "synchronize": lambda of=None: journal.note("sync", "device"),
        "Stream": Stream, "Event": Event, "stream": _on_stream, "set_stream": lambda stream: None,
        "current_stream": lambda of=None: stream, "default_stream": lambda of=None: stream,
        "is_current_stream_capturing": lambda: False,
        "memory_allocated": lambda of=None: device.held(), "max_memory_allocated": lambda of=None: device.peak(),
        "memory_reserved": lambda of=None: device.held(), "max_memory_reserved": lambda of=None: device.peak(),
        "reset_peak_memory_stats": lambda of=None: device.reset_peak(), "empty_cache": lambda: None,
        "mem_get_info": lambda of=None: (card().memory - device.held(), card().memory),
        "memory_stats": lambda of=None: {"allocated_bytes.all.peak": device.peak()},
        "get_device_properties": _properties, "get_device_name": lambda of=None: card().name,
        "get_device_capability": lambda of=None: card().capability,
        "get_arch_list": lambda: list(card().kernels),
        "is_bf16_supported": lambda *_: card().capability >= (8, 0),
        # The random numbers are the host's own: they are drawn by its kernels.
        "get_rng_state": lambda of=None: torch.get_rng_state(),
        "set_rng_state": lambda state, of=None: torch.set_rng_state(state),
        "manual_seed": lambda seed: None, "manual_seed_all": lambda seed: None,
    }  # fmt: skip
    for name, answer in answers.items():
        setattr(cuda, name, answer)
    cuda.CUDAGraph = graphs.Graph

    def refuse_waits(mode: int | str) -> None:
        journal.refuses_waits = mode in (2, "error")

    cuda.set_sync_debug_mode, cuda.get_sync_debug_mode = refuse_waits, lambda: 2 * journal.refuses_waits
    torch._C._host_emptyCache = lambda: None
    cuda.nccl.version = lambda: (2, 28, 0)
    cuda.profiler.start = cuda.profiler.stop = lambda: None
    torch.backends.cudnn.version = lambda: 91900
    torch.version.cuda = "13.0"
    accelerator.is_available, accelerator.device_count = is_available, device_count
    accelerator.current_accelerator = lambda check_available=False: torch.device("cuda") if is_available() else None
    accelerator.current_device_index = device.get_device
    accelerator.current_stream = lambda of=None: stream
    accelerator.synchronize = lambda of=None: journal.note("sync", "device")
    torch._C._cuda_getCurrentRawStream = lambda of=0: 0

    def resize(storage: Any, size: int) -> None:
        if storage.device.type != "cuda":
            return resized(storage, size)
        device.resize_storage(torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage), size)

    resized = torch.UntypedStorage.resize_
    torch.UntypedStorage.resize_ = resize


def _put_nccl_in(torch: Any, device: Any) -> None:
    import torch.distributed as dist
    from torch._C._distributed_c10d import ProcessGroupGloo
    from torch.distributed import distributed_c10d

    def gloo(store: Any, rank: int, size: int, milliseconds: int) -> Any:
        return ProcessGroupGloo(store, rank, size, timeout=timedelta(milliseconds=milliseconds))

    device.make_gloo_by(gloo)
    dist.ProcessGroupNCCL = distributed_c10d.ProcessGroupNCCL = device.ProcessGroupNCCL
    torch._C._distributed_c10d.ProcessGroupNCCL = device.ProcessGroupNCCL
    distributed_c10d._NCCL_AVAILABLE = True
    distributed_c10d.default_pg_nccl_timeout = timedelta(minutes=10)
