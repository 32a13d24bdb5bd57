"""Policy-gradient losses: formulas, the table of their options, and advantages.

formulas    one function per loss, and sums over the sequences of a micro-batch
terms       a loss with its KL term, corrections and metrics: `policy_terms` for GRPO, `policy_loss` for padded rows
options     the table of names, options and ranges
advantage   advantages from rewards
"""
