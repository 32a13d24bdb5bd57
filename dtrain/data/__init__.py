"""From data files to batches: rows become token ids and masks, which are cached, packed and assigned to ranks.

Each package imports those after it:

sources    files, globs, URLs and datasets of the hub; their columns; `open_rows`
rows       the cache of samples, their order, rows of samples; `Batches`
formats    from rows to samples: chats, texts, pairs, labels, prompts
text       tokenizers, chat templates, tool calls
images     images in rows: files, sizes, pixels and streams for a model

model_directory    the directory of a model: config, tokenizer, chat template

This package exports no names. Import them from its modules, most of which load no torch.
"""
