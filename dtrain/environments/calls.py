"""Inside the environments' process: what is asked of one environment, checked so that it can travel as JSON."""

import importlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dtrain.errors import UserError
from dtrain.rollout.child import Answer


def load(module: str, function: str) -> Callable[[Any, int], Any]:
    """The maker. Whatever the module raises passes."""
    return getattr(importlib.import_module(module), function)


def make(maker: Callable[[Any, int], Any], row: Mapping[str, Any], seed: int) -> Any:
    """An environment. Raises UserError where it is none; whatever the maker raises passes, here and below."""
    environment = maker(row, seed)
    if not callable(getattr(environment, "step", None)):
        raise UserError(f"gave {_shown(environment)}, which has no step")
    return environment


def step(environment: Any, text: str) -> Answer:
    """What the completion earned, NaN as None, and whether that was all. Raises UserError for no number."""
    earned = environment.step(text)
    if earned is not None:
        if isinstance(earned, str) or not hasattr(earned, "__float__") or math.isinf(float(earned)):
            raise UserError(f"gave {_shown(earned)}; a finite number or None is needed")
        earned = None if math.isnan(float(earned)) else float(earned)
    return {"earned": earned, "done": bool(environment.done)}


def observe(environment: Any) -> Answer:
    """What is read next. Raises UserError for what is neither a text nor messages, or cannot be JSON."""
    found = environment.observe()
    if isinstance(found, str):
        return {"observation": str(found)}
    is_list = isinstance(found, Sequence) and len(found) > 0
    if not (is_list and all(isinstance(message, dict) and "role" in message for message in found)):
        raise UserError(f"gave {_shown(found)}; a text or a list of messages is needed")
    messages = list(found)
    try:
        json.dumps(messages)
    except (TypeError, ValueError) as error:
        raise UserError(f"gave {_shown(found)}; messages must be JSON, and: {error}") from None
    return {"observation": messages}


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
