"""Preference losses: formulas and their table of options.

formulas    a function each, of pairs and of replies marked good or bad
losses      `preference_loss`: a loss by name; weights and combinations
options     the table of names, options and ranges
"""
