"""Losses of supervised fine-tuning, token by token: formulas and their table of options.

formulas    a function for each loss
options     the table of names, options and ranges
"""
