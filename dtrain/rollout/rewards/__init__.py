"""What a completion earns: functions by name or import path, run in a process of their own. No torch.

A reward is a callable, async or not,

    fn(prompts, completions, completion_ids, **columns) -> list of numbers or None

called with keywords, of which it may take fewer: prompts as they stand in the data (a string or a list of messages),
completions as text without special tokens, completion_ids as lists of ints, every other column of the data as a list.
None says that it has no opinion on a completion. Options of the recipe are given by keyword too; an import path may
also name a class, which is made with the options and then called.

`find` looks an import path up; `Rewards` scores with a list of them. `worker` is the process, `calls` what it does with
a function; the other files are the rewards that come with dtrain.
"""

from dtrain.rollout.rewards.find import BUILT_IN, find
from dtrain.rollout.rewards.scoring import Rewards, Scores, reward_names

__all__ = ["BUILT_IN", "Rewards", "Scores", "find", "reward_names"]
