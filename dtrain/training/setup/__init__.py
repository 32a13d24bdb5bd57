"""Setup of a run: a module per topic, with the checks of that topic and the functions that decide its facts.

outputs      the run's directory, its metrics, its export, the metric by which its saves are kept
tokenizer    the tokenizer and the chat template
model        the model on the meta device
other_models a reference, a teacher, a reward model
transformers_models options that models of transformers do not have, and the proof of their numbers
adapter      the section `lora`
code         code that the recipe names by an import path or a command
mesh         the mesh, and whether the batch and the models fit it
optimizer    the optimizer on the meta device
data         the rows of the splits, and the largest images that a row may have
first_rows   reading the rows in a dry run
evals        the sets of `eval`
sizes        the batch, the method and the steps
kernels      the kernels of attention
schedule     the learning rate over the steps, and runs that would train nothing
start        the checkpoint that the run resumes, and the last step

Every module has some of these functions:

`check_keys`    checks the recipe only
`check_models`  checks the recipe with each model's config.json
`check_files`   checks headers of weights, tokenizers and first rows
`notes`         returns lines for the user about things that are not mistakes

They accept `RunInputs` and return problems. `training.dry_run` has the table of them. The other functions (`build`,
`open_data`, `read_sets`, `decide`, `resolve`) return facts, which are frozen dataclasses such as `DataFacts`.
`training.spec` and `training.dry_run` call them in order.
"""
