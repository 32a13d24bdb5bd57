"""Data files to batches: rows become token ids and masks, are cached, packed and dealt to ranks.

Each package imports those after it:

sources    files, globs, URLs and datasets of the hub; their columns; `open_rows`
rows       the cache of samples, their order, rows of samples; `Batches`
formats    rows of a format to samples: chats, texts, pairs, labels, prompts
text       tokenizers, chat templates, calls of tools
images     images in rows: files, sizes, pixels as a model takes them

model_directory    the directory of a model: config, tokenizer, chat template

Names are imported when they are used, so that what needs no torch loads none.
"""

from typing import TYPE_CHECKING

from dtrain.base.exports import late_names

if TYPE_CHECKING:
    from dtrain.data.formats.prompts import PromptOptions
    from dtrain.data.rows.rows import Batches, Cursor, GlobalBatch, Rows
    from dtrain.data.sources.sources import open_rows
    from dtrain.data.text.template import choose_template
    from dtrain.data.text.tokenizer import Tokenizer
else:  # a type checker would accept any name from __getattr__
    __getattr__ = late_names(
        __name__,
        {
            "formats.prompts": "PromptOptions",
            "rows.rows": "Batches Cursor GlobalBatch Rows",
            "sources.sources": "open_rows",
            "text.template": "choose_template",
            "text.tokenizer": "Tokenizer",
        },
    )

__all__ = ["Batches", "Cursor", "GlobalBatch", "PromptOptions", "Rows", "Tokenizer", "choose_template", "open_rows"]
