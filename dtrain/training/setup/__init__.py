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
tower        the model anew with its vision tower, where rows have images
sizes        the method and its section, the batch and the steps
kernels      the kernels of attention
schedule     the learning rate over the steps, and runs that would train nothing
start        the checkpoint that the run goes on from

All that is asked about a topic is in its file. A stage has those of these functions that it needs:

`check_keys`    problems of the recipe alone, a line each
`check_models`  of the recipe with each model's config.json
`check_files`   of weights' headers, tokenizers, first rows
`notes`         lines for the user that are no mistakes, which `run.preflight.notes` collects
`resolve`       fills fields of the `RunSpec`; returns whether the next stage has what it needs

`DryHost.check` calls the checks before any stage resolves, each kind on all stages before the next kind. A check
therefore finds the spec as it is made, without what `resolve` fills.
"""
