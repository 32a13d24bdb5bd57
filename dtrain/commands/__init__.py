"""The `dtrain` command and its sub-commands.

cli, arguments    the command line; arguments that several commands take
run               the plan that `dtrain run`, and `dtrain.run` from Python, compute next to the run
suggestions       answers to commands and recipes that do not exist
preview           `dtrain preview`: rows as the model sees them
web               the HTTP server of `dtrain serve` and of `dtrain report --live`
env               `dtrain env`: versions for a bug report
chat, eval, plan, push, report, serve    the other commands, loaded when they are called
"""
