"""The `dtrain` command and its sub-commands.

cli, arguments    the command line; arguments that several commands have
run               starts the plan that `dtrain run`, and `dtrain.run` from Python, compute in the background
suggestions       suggestions for commands, options and recipes that do not exist
help, completion  `dtrain help KEY`; completions for the shell
run_list          `dtrain ls --runs`
families          `--family`: model families outside of dtrain
convert           `dtrain convert`: a file of another tool as a recipe
preview           `dtrain preview`: training data as the model receives it
web               the HTTP server of `dtrain serve` and of `dtrain report --live`
env               `dtrain env`: versions and devices for a bug report
chat, eval, plan, push, report, serve    the other commands, imported when they are called
"""
