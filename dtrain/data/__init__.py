"""Files to batches: rows of data files become token ids and masks, are cached, packed into rows, and dealt to ranks.

The way of a sample: files.py → formats.py → template.py (in sandbox.py), replies.py, tokenizer.py → sample.py →
(pool.py) cache.py → order.py → rows.py; of a pair, preferences.py and pairs.py instead of formats.py and sample.py; of
a reply that is wanted or not, labelled.py around sample.py; with a class, number or margin, judged.py; of a prompt,
prompts.py. plain_prompts.py makes messages of prompts that are strings. encoder.py is what all these share.
tool_format.py and tool_calls.py are how a template writes calls of tools, and how they are read. cache_seal.py tells
whether a cache is as it was written.
columns.py gives a file's columns our names. hub.py and hub_files.py find the files of a dataset of the hub;
urls.py copies those behind URLs.
sources.py is the door through which trainer and preview come in, by `open_rows`; the trainer then draws `Batches`.
Only these two know a recipe.
What is named here is loaded when it is first asked for, so that what needs no torch loads none.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dtrain.data.prompts import PromptOptions
    from dtrain.data.rows import Batches, Cursor, GlobalBatch, Rows
    from dtrain.data.sources import open_rows
    from dtrain.data.template import choose_template
    from dtrain.data.tokenizer import Tokenizer

__all__ = ["Batches", "Cursor", "GlobalBatch", "PromptOptions", "Rows", "Tokenizer", "choose_template", "open_rows"]
_HOMES = {
    "Batches": "rows",
    "GlobalBatch": "rows",
    "PromptOptions": "prompts",
    "Cursor": "rows",
    "Rows": "rows",
    "open_rows": "sources",
    "choose_template": "template",
    "Tokenizer": "tokenizer",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
