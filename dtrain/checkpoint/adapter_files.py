"""Adapters in and out in PEFT's files."""

from pathlib import Path

from torch import nn


def read_adapter(model: nn.Module, directory: str | Path) -> None:
    raise NotImplementedError
