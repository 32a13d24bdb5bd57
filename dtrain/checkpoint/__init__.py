"""Checkpoints of runs, and model directories in Hugging Face's and PEFT's layouts.

- A checkpoint that was saved on one mesh can be loaded on any other.
- A save is visible only when every rank has written and synced its files. A published step is never written again.
- Damage is an error that names the file.
- Opening a file runs no code that is in it. Tensors are read with torch's weights-only loader, everything else is JSON.

dcp            saves from which a run resumes, through torch's distributed checkpoint
huggingface    safetensors with config.json, read slice by slice and written
peft           adapters in PEFT's layout
gguf           one file of a model or an adapter, for llama.cpp
"""
