"""What outlives a run: its checkpoints, and Hugging Face directories in and out.

Promises: a checkpoint saved on one mesh loads on any other; a save is visible only when every rank has written and
synced it, and a published step is never written again; damage is an error that names the file; opening a file runs no
code that is in it (tensors are read with torch's weights-only loader, everything else is JSON).

- `store.CheckpointStore`: the steps of one run, `checkpoints/step-N`; `pieces` puts tensors of any placement into
  torch's distributed checkpoint.
- `background.Saver`: saves that training does not wait for; `retention`: which saves stay.
- `training_state`, `rng`: model, optimizer and random number generators as named tensors and JSON, and back.
- `rundir.RunDirectory`: the directory of a run, its lock, and what a resume may change; `origin`: what it began from.
- `identity`: what files hold, as digests.
- `huggingface.read_weights`, `huggingface_write.write_directory`, `export.export`: safetensors in and out;
  `safetensor_files` reads slices of them, `quantized` weights in 4 bits; `file_rows`: which rows of a file's tensor one
  of the model's is.
- `adapter_files`, `peft_config`: adapters in PEFT's layout, in and out; `adapter_base`: whether a model is the base
  that one names; `adapter_export`: alone, folded, or merged into what `base_weights` finds; `merged`: a model's weights
  with the adapter merged.
- `hub`: models by their id on the Hugging Face hub.
- `files`, `model_files`: files that are whole or absent; the small files beside a model's weights.
"""
