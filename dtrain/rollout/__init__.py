"""Prompts to completions. Torch is imported with the first function that is asked for. README.md explains it.

request                            what an engine is asked for and gives back
engine, native                     continuous batching on one rank; on a mesh
graphs                             a decoding step as a CUDA graph
sampling, stopping                 the next token; when a completion ends
budget                             how much one engine takes on: rows, memory, its share of the requests
rewards                            what completions earn
tools                              what a model is told of functions that it may call
worker, child                      the user's code in a process of its own, from outside and inside
weights                            weights on their way to another engine, in buckets
generate                           completions in one call
scores                             how likely the tokens of prompts are
routed                             which experts tokens went to, on the wire
"""

from typing import Any

__all__ = ["generate", "generate_text"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from importlib import import_module

        return getattr(import_module("dtrain.rollout.generate"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
