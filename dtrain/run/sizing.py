"""Sizes of a run that its recipe leaves to `auto`: what a run chose before, and what needs no plan.

`launch` asks here before it asks the plan beside the run (`commands.plan.choose`).
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from dtrain import models
from dtrain import recipe as config
from dtrain.base.errors import UserError
from dtrain.checkpoint.huggingface.safetensor_files import weight_files
from dtrain.recipe.automatic import AUTO, USUAL, as_overrides, changed, open_keys, value_of
from dtrain.run.directory import ABOUT
from dtrain.run.spec import RunSpec

MACHINE = "machine"
"""Key of about.json: kind, memory and number of the devices that sizes were chosen for."""
_SURE = 0.25  # of the memory, within which a closed form needs no plan
_FREE_KEYS = ("run.", "launch.", "metrics.", "checkpoint.", "eval.", "train.steps", "train.epochs")  # cost no memory
_COPIES = 8  # of the weights in float64: masters, gradients, moments, gathered, a reference
_TENSORS = 64  # of a token's width in float64 that a layer keeps, generously


@dataclass(frozen=True)
class Sizing:
    """Values of the keys that a recipe leaves open, and lines that say why."""

    values: Mapping[str, Any]
    lines: tuple[str, ...]

    @classmethod
    def of(cls, values: Mapping[str, Any], why: str) -> "Sizing":
        """Return `values` with one line, that says `why` for all."""
        return cls(values, (f"{', '.join(as_overrides(values))} (auto): {why}",))


def sizing_before(spec: RunSpec, machine: Mapping[str, Any]) -> Sizing | None:
    """Return what this run chose before on such a machine, for a recipe whose memory is the same; None where it did
    not."""
    recipe, run = spec.written, spec.run
    with suppress(OSError, ValueError, KeyError, UserError):
        if recipe.checkpoint.resume is None or json.loads((run.path / ABOUT).read_text())[MACHINE] != machine:
            return None
        saved = run.config.read_text(encoding="utf-8")
        values = {key: old for key, old, new in config.diff(saved, recipe) if key in USUAL and new == AUTO}
        differing = [key for key, _, _ in config.diff(saved, changed(recipe, values))]
        if values.keys() == {*open_keys(recipe)} and all(key.startswith(_FREE_KEYS) for key in differing):
            return Sizing.of(values, "as this run chose before, on the same machine")
    return None


def usual_sizing(spec: RunSpec, memory: int) -> Sizing | None:
    """Return the usual values for processes of a CPU with `memory` bytes each, where a closed form that is far too
    large shows that they fit; None where it takes a plan."""
    method, shape = spec.method, spec.source.config
    if method.teacher_path() is not None or method.reward_model() is not None:
        return None
    model = models.build(shape, device="meta")
    weights = sum(parameter.numel() for parameter in model.parameters())
    if spec.recipe.model.init == "pretrained":  # with a tower, whose weights may be in 4 bits
        weights = max(weights, 2 * sum(file.stat().st_size for file in weight_files(spec.source.path)))
    length = method.longest_row()
    tokens = spec.recipe.train.micro * length * method.rows_of_a_sample()
    width = max(sum(weight.shape[0] for weight in layer.parameters()) for layer in model.model.layers)
    heads = shape.num_attention_heads
    kept = tokens * (shape.num_hidden_layers * (width + heads * length) + 4 * shape.vocab_size)
    if 8 * (_COPIES * weights + _TENSORS * kept) > memory * _SURE:
        return None
    values = {key: value_of(spec.recipe, key) for key in open_keys(spec.written)}
    return Sizing.of(values, "a small model")
