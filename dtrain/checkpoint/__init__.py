"""Checkpoints of runs, and model directories in Hugging Face's and PEFT's layouts, in and out.

Promises: a checkpoint saved on one mesh loads on any other; a save is visible only when every rank has written and
synced it, and a published step is never written again; damage is an error that names the file; opening a file runs no
code that is in it (tensors are read with torch's weights-only loader, everything else is JSON).

dcp            saves that a run resumes from, through torch's distributed checkpoint
huggingface    safetensors with config.json, read by slices and written
peft           adapters in PEFT's layout
gguf           one file of a model or an adapter, for llama.cpp
"""
