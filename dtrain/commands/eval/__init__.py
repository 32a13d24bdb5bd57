"""`dtrain eval`: a model's answers to prompts, scored by rewards.

command     the arguments of `dtrain eval`
evaluate    answers prompts and reports their scores; rl/evaluation.py does the work, also for the `eval` of a run
"""
