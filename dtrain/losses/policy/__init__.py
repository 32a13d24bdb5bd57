"""Policy-gradient losses: formulas, their table of options, advantages.

formulas    losses per token or sequence, a function each; sums over the sequences of a micro-batch
terms       a loss with its divergence, corrections and metrics, as GRPO uses it; `policy_loss` over padded completions
options     the table of names, options and ranges
advantage   advantages from rewards
"""
