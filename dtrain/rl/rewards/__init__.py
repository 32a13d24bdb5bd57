"""Rewards of completions: functions by name or import path, run in a process of their own. No torch.

A reward is a callable, async or not,

    fn(prompts, completions, completion_ids, **columns) -> list of numbers or None

called with keywords, of which it may take fewer: prompts as they stand in the data (a string or a list of messages),
completions as text without special tokens, completion_ids as lists of ints, every other column of the data as a list.
None says that it has no opinion on a completion. Options of the recipe are given by keyword too; an import path may
also name a class, which is made with the options and then called.

    catalog                         an import path or a name to a function; the options of those of our own
    columns                         whether a reward can work with the data's columns
    scoring                         `Rewards` scores with a list of them, in a process of its own; the service there
    right_answers, math_answers     those that come with dtrain: right answers, and reading them
    symbolic_answers                those that math-verify compares
    form                            patterns, layout, JSON, length, repetition
    python_tests                    code that passes tests: programs, and asserts in Python
    code_sandbox, sandboxed         the sandbox of model-written code; the program inside it

`judge`, another model's points over HTTP, is in `dtrain.rl.remote`.
"""

from dtrain.rl.rewards.catalog import BUILT_IN, find
from dtrain.rl.rewards.scoring import Rewards, Scores

__all__ = ["BUILT_IN", "Rewards", "Scores", "find"]
