"""Prompts to completions. Torch is imported with the first function that is asked for."""

from typing import Any

__all__ = ["generate", "generate_text"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from importlib import import_module

        return getattr(import_module("dtrain.rollout.generate"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
