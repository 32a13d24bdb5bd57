"""Rewards: functions that score completions, by name or import path, in a process of their own. No torch.

A reward is a callable, sync or async:

    fn(prompts, completions, completion_ids, **columns) -> list of numbers or None

It is called with keyword arguments, and may accept only some of them. `prompts` are those of the data, strings or lists
of messages. `completions` are texts without special tokens. `completion_ids` are lists of token ids. Every other column
of the data is a list. A value of None means that the reward has no opinion on a completion. Options of the recipe are
keyword arguments, too. An import path may name a class, which is instantiated with the options and then called. For
example, a reward for short completions:

    def short(completion_ids, *, max_tokens=100):
        return [1.0 if len(ids) <= max_tokens else 0.0 for ids in completion_ids]

    catalog                         names, options and import paths of rewards
    columns                         checks that a reward can work with the data's columns
    scoring                         `Rewards`: scores completions with a list of rewards, in a process of its own
    right_answers, math_answers     rewards that compare with the right answer; parsing of answers
    symbolic_answers                the same with the package math-verify
    form                            patterns, tags, JSON, length, repetition
    python_tests                    code that must pass tests: programs, and asserts in Python
    code_sandbox, sandboxed         the sandbox of model-written code; the program inside it

`judge`, the points of another model over HTTP, is in `dtrain.rl.remote`.
"""

from dtrain.rl.rewards.catalog import BUILT_IN, find
from dtrain.rl.rewards.scoring import Rewards, Scores

__all__ = ["BUILT_IN", "Rewards", "Scores", "find"]
