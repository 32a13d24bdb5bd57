"""Lists of data sets in other tools' files, as `data.train` and `data.val`, and named chat templates."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from dtrain.recipe.other_tools.draft import Draft

FILE_READERS = ("json", "csv", "parquet", "arrow", "text")
"""Names that `load_dataset` accepts in place of a data set. The files are then in `data_files`."""


@dataclass
class Dataset:
    """One data set of a file, with dtrain's names for its options. A value of None was not given."""

    path: str | list[str]
    split: str | None = None
    subset: str | None = None
    revision: str | None = None
    format: str | None = None
    columns: dict[str, str] = field(default_factory=dict)
    weight: float | None = None

    def options(self) -> dict[str, Any]:
        """Return the options that are set, by their names in `data.train.sources`. The path is not one of them."""
        values = {
            "split": self.split if self.split != "train" else None,  # dtrain's default too
            "subset": self.subset,
            "revision": self.revision,
            "format": self.format,
            "columns": self.columns or None,
            "weight": self.weight if self.weight != 1 else None,
        }
        return {name: value for name, value in values.items() if value is not None}


def put_datasets(draft: Draft, section: str, datasets: Sequence[Dataset], source: str) -> None:
    """Write data sets to `data.train` or `data.val`.

    Data sets with the same options become a list of paths, others become `sources`.

    Args:
        section: "data.train" or "data.val".
        source: The file's key, for messages.
    """
    if not datasets:
        return
    first_options = datasets[0].options()
    if all(dataset.options() == first_options for dataset in datasets) and "weight" not in first_options:
        paths: list[str] = []
        for dataset in datasets:
            paths += dataset.path if isinstance(dataset.path, list) else [dataset.path]
        draft.put(f"{section}.path", paths, source)
        for name, value in first_options.items():
            draft.put(f"{section}.{name}", value, source)
    else:
        sources = [{"path": dataset.path, **dataset.options()} for dataset in datasets]
        draft.put(f"{section}.sources", sources, source)


def put_split(draft: Draft, key: str, value: Any, source: str) -> str | None:
    """Return the split's name; a slice such as `train[:95%]` becomes a lost key instead."""
    if value is None:
        return None
    if "[" in str(value) or "+" in str(value):
        draft.lose(source, f"{key} takes a split's name, no slice; write the part into a file of its own", key)
        return None
    return str(value)


def put_chat_template(draft: Draft, source: str) -> None:
    """Write a chat template that the file gives as a file's path, as text, or by a name of the tool's own."""
    value = draft.take(source)
    if value in (None, "tokenizer_default", "default"):  # the model's own
        return
    text = str(value)
    if "{%" in text or "{{" in text:
        draft.lose(
            source,
            "the file contains the template's text; save it to a file of its own and set data.chat_template to it",
        )
    elif text.endswith((".jinja", ".jinja2", ".txt")):
        draft.put("data.chat_template", text, source)
    else:
        tool = draft.tool.name if draft.tool else "the other tool"
        draft.lose(
            source,
            f"the template {text} is {tool}'s; here the model's own is used, or the file that data.chat_template names",
        )
