"""Stages of `resolve`, a file each, in the order in which they resolve.

outputs      the run's directory, its metrics, its export, which saves it keeps
tokenizer    the tokenizer and the chat template
model        precision, the model on meta, digests of what is read
others       a reference, a teacher, a reward model
adapter      the section `lora`
code         what the recipe names by an import path or a command
mesh         the mesh, and whether the batch and the models fit it
optimizer    the optimizer on meta
first_rows   the rows as a dry run looks at them
data         the rows of the splits
evals        the sets of `eval`
sizes        the method and its section, the batch and the steps
kernels      the kernels of attention
schedule     the learning rate over the steps, and runs that would train nothing
start        the checkpoint that the run goes on from

All that is asked about a topic is in its file: `check_keys`, `check_models` and `check_files` return problems of what
they read (`dtrain.run.host.DEPTHS`), one line each, and `notes` lines that are no mistakes; `resolve` fills fields of
the `RunSpec`, and returns whether the next stage has what it needs. A stage has those that it needs.
"""
