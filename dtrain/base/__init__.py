"""Helpers that every package may import and that import none: errors, JSON, batches, files, randomness.

errors                          errors that a user can mend, and mistakes of a recipe as objects
json_files, ranges              JSON that others may have written; ranges of settings, near misses, plurals
nested_columns                  columns of a row by name, such as `reward_model.ground_truth`
batch                           the batch contract, and images of the rows of a batch
randomness, top_p               random numbers by logical position; the tokens that top-p keeps, without a sort
hardware                        device types, the table of GPUs, free memory and processors
ranks                           agreement of ranks: on errors, on values, on the content of files; work dealt by cost
compiled, fused                 functions of tensors that torch.compile makes kernels of
torch_functions                 functions that torch lacks; deterministic algorithms
files                           files that are whole or absent
hub, model_directory            the hub's cache of models; names of a model directory's files
name_patterns                   patterns of parameter names: regular expressions and globs
addresses, orphans              addresses to listen at; children that end with their parent
plugins                         users' code by import path; names that installed packages register
processes                       signals that ask a run to stop; the search path of users' code
"""
