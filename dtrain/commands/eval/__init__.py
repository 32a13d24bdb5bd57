"""`dtrain eval`: a model's answers to prompts, judged by rewards.

command     the arguments of `dtrain eval`; messages about keys of a recipe, with its options in their place
evaluate    answers to prompts and their report; rl/judging.py judges them, also for the `eval` of a run
"""
