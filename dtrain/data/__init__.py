"""Files to batches: rows of data files become token ids and masks, are cached, packed into rows, and dealt to ranks.

The way of a sample: files.py → formats.py → template.py (in sandbox.py), replies.py, tokenizer.py → sample.py →
(pool.py) cache.py → order.py, packing.py → rows.py → loader.py; of a pair, preferences.py and pairs.py instead of
formats.py and sample.py; of a prompt, prompts.py; encoder.py is what sample.py, pairs.py and prompts.py share.
sources.py is the door through which trainer and preview come in, by `open_rows`; the trainer then draws `Batches`.
Only these two know a recipe.
What is named here is loaded when it is first asked for, so that what needs no torch loads none.
"""

import importlib

_HOMES = {
    "Tokenizer": "tokenizer",
    "ChatTemplate": "template",
    "choose_template": "template",
    "Encoder": "sample",
    "PairEncoder": "pairs",
    "PromptEncoder": "prompts",
    "PromptOptions": "prompts",
    "Source": "cache",
    "Samples": "cache",
    "open_cache": "cache",
    "Cursor": "rows",
    "Row": "rows",
    "Rows": "rows",
    "Batches": "loader",
    "GlobalBatch": "loader",
    "open_rows": "sources",
}
__all__ = list(_HOMES)


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
