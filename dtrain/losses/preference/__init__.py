"""Preference losses: formulas and the table of their options.

formulas    one function per loss, of pairs of completions (DPO) and of single replies (KTO)
losses      `preference_loss` by name, sums of several losses, and derivatives by log-probabilities
options     the table of names, options and ranges
"""
