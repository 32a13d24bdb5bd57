"""`python -m dtrain` is the `dtrain` command."""

from dtrain.commands.cli import command

command()
