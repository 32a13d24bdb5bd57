"""`dtrain eval`: how well a model answers the prompts of data files, by rewards.

command     the command's arguments
evaluate    answers, rewards, and the report
"""
