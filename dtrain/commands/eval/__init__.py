"""How well a model answers prompts, by rewards: `dtrain eval`, and what a run with `eval` asks of its own model.

judging     questions to answers, their worth, and the report: of both
command     the arguments of `dtrain eval`
evaluate    `dtrain eval` itself
training    the evaluations of a run, which the trainer loads by name
"""
