"""Losses of supervised fine-tuning, token by token: the table of their names, options and ranges."""
