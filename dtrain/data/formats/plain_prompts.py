"""Prompts that are plain strings: continued as raw text, or put into the chat template as a user's messages.

`data.prompts_as` says which: text or user. Under user a row is read as if its prompt were a user's message, and its
completions an assistant's. Torch is not imported.
"""

from pathlib import Path

from dtrain.base.errors import UserError
from dtrain.base.ranges import plural
from dtrain.data.text.template import ChatTemplate

TEXT, USER = "text", "user"
KEY = "data.prompts_as"


def evaluated_as(chosen: str | None, trained_plain: int, template: ChatTemplate | None) -> str:
    """Return how an evaluation reads plain prompts: as `chosen` (`data.prompts_as`), else as the training data's, of
    which `trained_plain` rows had one, else as a user's messages; without a template as text."""
    if template is None:
        return TEXT
    return chosen or (TEXT if trained_plain else USER)


def refuse_without_template(prompts_as: str | None, template: ChatTemplate | None, directory: Path) -> None:
    """Raise UserError for `user` where the model in `directory` has no chat template."""
    if prompts_as == USER and template is None:
        raise UserError(
            f"{KEY}=user puts prompts into the chat template, and {directory} has none; name a file with "
            f"data.chat_template, take the instruct model's directory, or set {KEY}=text"
        )


def describe(label: str, count: int, prompts_as: str, template: ChatTemplate | None, is_all: bool = True) -> list[str]:
    """Return the line that tells what is done with `count` plain prompts, and the key that does the other; none without
    a prompt or a template. is_all: False where the count is of the first rows alone."""
    if not count or template is None:
        return []
    number, noun = (f"{count:,}", plural(count, "prompt")) if is_all else (f"{count:,} of the first", "prompts")
    prompts = f"{label}: {number} {noun} as plain text"
    if prompts_as == USER:
        return [f"{prompts}: read as a user's message, in the chat template ({KEY}=text: continued as raw text)"]
    return [f"{prompts}: continued as raw text, without the chat template ({KEY}=user: read as a user's message)"]
