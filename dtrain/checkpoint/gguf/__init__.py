"""Models and adapters as GGUF, the files of llama.cpp. The package `gguf` writes them, in one process, by tensor.

A file is written only if llama.cpp computes the same logits and the same token ids. Everything else is refused by name.

export     a run, a checkpoint, a model or an adapter to one file
families   hyperparameters and tensors of each architecture, and differences to llama.cpp
tokenizer  the vocabulary, how it splits a text, its special tokens and the chat template
"""
