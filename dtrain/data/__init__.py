"""Data files to batches: rows become token ids and masks, are cached, packed and dealt to ranks.

Each package imports those after it:

sources    files, globs, URLs and datasets of the hub; their columns; `open_rows`
rows       the cache of samples, their order, rows of samples; `Batches`
formats    rows of a format to samples: chats, texts, pairs, labels, prompts
text       tokenizers, chat templates, calls of tools
images     images in rows: files, sizes, pixels as a model takes them

model_directory    the directory of a model: config, tokenizer, chat template

This package exports no names. Import them from its modules, most of which load no torch.
"""
