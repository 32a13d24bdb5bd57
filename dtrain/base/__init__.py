"""Helpers that every package may import and that import none: errors, JSON, batches, files, randomness.

errors, problems                errors that a user can mend; mistakes of a recipe as objects
json_files, ranges              JSON that others may have written; ranges of settings, near misses, plurals
nested_columns                  columns of a row by name, such as `reward_model.ground_truth`
batch, row_images               the batch contract; images of the rows of a batch
dealing                         work of known costs, dealt to places
randomness, top_p               random numbers by logical position; the tokens that top-p keeps, without a sort
deterministic                   torch's deterministic algorithms, and cumulative sums under them
devices                         the kind of device that a setting selects
ranks                           agreement of ranks: on errors, on values, on the content of files
compiled, fused                 functions of tensors that torch.compile makes kernels of
torch_functions                 calls of torch that no TorchFunctionMode sees
files                           files that are whole or absent
hub, model_directory            the hub's cache of models; names of a model directory's files
network_errors                  errors of the clients of servers and object stores
name_patterns                   patterns of parameter names: regular expressions and globs
import_paths, exports           the search path of users' code; names of packages that are imported late
addresses, orphans              addresses to listen at; children that end with their parent
stop_signals                    the signals that ask a run to stop
gpus, host_memory               the table of GPUs; free memory, of a device and of this host
"""
