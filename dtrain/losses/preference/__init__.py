"""Preference losses: formulas, their table of options, and unpaired ones.

formulas    losses of pairs, a function each
losses      `preference_loss`: a loss by name; weights and combinations
options     the table of names, options and ranges
unpaired    losses of replies marked good or bad
"""
