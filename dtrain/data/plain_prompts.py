"""Prompts that are plain text: each is written as a user's message, or continued as text (`data.prompts_as`). Torch is
not imported.
"""

from collections.abc import Mapping
from typing import Any

from dtrain.data.preferences import PROMPT_NAMES
from dtrain.errors import UserError

FORMATS = ("prompt_completion", "preference")
"""The formats whose rows may hold prompts as plain text."""


def is_plain(row: Mapping[str, Any], name: str) -> bool:
    """Return whether the prompt of a row of format `name` is plain text, and no completion of it is messages."""
    completions = [row.get(key) for key in ("chosen", "rejected")] if name == "preference" else []
    is_text = isinstance(row.get("prompt"), str) and not any(isinstance(one, list | dict) for one in completions)
    return name in FORMATS and is_text


def as_messages(row: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a row of format `name` with its plain prompt as a user's message and its completion as an assistant's.

    Other rows are returned as they are. Raises UserError for a pair of plain texts without a prompt.
    """
    if name == "preference" and isinstance(row.get("chosen"), str) and not any(map(row.get, ("prompt", *PROMPT_NAMES))):
        raise UserError(
            "data.prompts_as=user: the row has chosen and rejected alone, so no part of them is a user's message; name "
            "the prompt's column prompt, or set data.prompts_as=text"
        )
    if not is_plain(row, name):
        return row
    changed: dict[str, Any] = {"prompt": [{"role": "user", "content": row["prompt"]}]}
    if isinstance(row.get("completion"), str):
        changed["completion"] = [{"role": "assistant", "content": row["completion"]}]
    return {**row, **changed}


def form_of_prompt(row: Mapping[str, Any], name: str) -> str:
    """Return the form of the prompt of a row of format `name`: "plain", "messages", or "text" where it has none."""
    has_texts = name == "preference" and isinstance(row.get("chosen"), str) and row.get("prompt") is None
    if name == "text" or (has_texts and not any(map(row.get, PROMPT_NAMES))):
        return "text"
    return "plain" if is_plain(row, name) else "messages"


def note(prompts_as: str, key: str = "data.prompts_as=") -> str:
    """Return the line that tells what is done with plain prompts. key: the setting and the sign before its value."""
    if prompts_as == "user":
        return (
            f"prompts that are plain text are written as a user's message ({key}user); {key}text continues them as text"
        )
    return (
        f"prompts that are plain text are continued as text, without the chat template ({key}text); {key}user writes "
        "each as a user's message"
    )
