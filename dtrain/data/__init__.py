"""Data files to batches: rows become token ids and masks, are cached, packed and dealt to ranks.

Each package imports those after it:

sources    files, globs, URLs and datasets of the hub; their columns; `open_rows`
rows       the cache of samples, their order, rows of samples; `Batches`
formats    rows of a format to samples: chats, texts, pairs, labels, prompts
text       tokenizers, chat templates, calls of tools
images     images in rows: files, sizes, pixels as a model takes them

Names are imported when they are used, so that what needs no torch loads none.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dtrain.data.formats.prompts import PromptOptions
    from dtrain.data.rows.rows import Batches, Cursor, GlobalBatch, Rows
    from dtrain.data.sources.sources import open_rows
    from dtrain.data.text.template import choose_template
    from dtrain.data.text.tokenizer import Tokenizer

__all__ = ["Batches", "Cursor", "GlobalBatch", "PromptOptions", "Rows", "Tokenizer", "choose_template", "open_rows"]
_HOMES = {
    "Batches": "rows.rows",
    "GlobalBatch": "rows.rows",
    "PromptOptions": "formats.prompts",
    "Cursor": "rows.rows",
    "Rows": "rows.rows",
    "open_rows": "sources.sources",
    "choose_template": "text.template",
    "Tokenizer": "text.tokenizer",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
