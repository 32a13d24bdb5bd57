"""`dtrain env`: versions and devices of this machine, for bug reports."""

import argparse
import os
import platform
from importlib.metadata import PackageNotFoundError, version

import torch

from dtrain import __version__

PACKAGES = (
    *("torch", "safetensors", "omegaconf", "torchdata", "tokenizers", "huggingface_hub", "fsspec", "jinja2", "tqdm"),
    *("numpy", "pillow", "pyarrow", "tensorboard", "wandb", "plotly", "starlette", "uvicorn", "mcp", "math-verify"),
    *("trackio", "mlflow", "swanlab", "verifiers", "gguf", "transformers", "fla-core", "flash-attn-3", "flash-attn-4"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add no argument: the command takes none."""


def run(arguments: argparse.Namespace) -> None:
    """Print the versions and devices."""
    print(describe())


def describe() -> str:
    """Return the versions and devices, one per line."""
    rows = [("dtrain", __version__), ("python", platform.python_version()), ("system", platform.platform())]
    rows += [(name, _version(name)) for name in PACKAGES]
    rows.append(("cpu", f"{os.cpu_count()} cores, torch uses {torch.get_num_threads()} threads"))
    rows.append(("memory", f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.1f} GiB"))
    if torch.cuda.is_available():
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        rows.append(("cuda", f"{torch.version.cuda}, nccl {nccl}, cudnn {torch.backends.cudnn.version()}"))
        for index in range(torch.cuda.device_count()):
            device = torch.cuda.get_device_properties(index)
            rows.append((f"cuda:{index}", f"{device.name}, {device.total_memory / 2**30:.1f} GiB"))
    else:
        rows.append(("cuda", "no device" if torch.version.cuda else "torch is built without it"))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
