"""`dtrain eval`: a model's answers to prompts, judged by rewards.

command     the arguments of `dtrain eval`
evaluate    answers to prompts and their report, with keys of a recipe as the command's options; rl/evaluation.py judges
            them, also for the `eval` of a run
"""
