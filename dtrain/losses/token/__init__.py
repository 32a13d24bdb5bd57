"""Losses of supervised fine-tuning: the table of their names, options and ranges (options)."""
