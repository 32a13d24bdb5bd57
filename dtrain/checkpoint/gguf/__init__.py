"""Models and adapters as GGUF, the files of llama.cpp: one process, tensor by tensor. The package `gguf` writes them.

A file is written where llama.cpp computes the same logits and gives the same ids, and is refused by name elsewhere.

export     a run, a checkpoint, a model or an adapter to one file
families   hyper-parameters and tensors of each architecture, and what llama.cpp computes otherwise
tokenizer  the vocabulary, how it splits a text, its special tokens and the chat template
"""
