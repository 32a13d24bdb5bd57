"""Environments: completions of several turns, which an environment answers until it is done.

A recipe names a function (`grpo.environment`) that makes an environment for each completion:

    make(row, seed) -> environment

`row` is the data's row, with its prompt and columns. `seed` is a number that differs for each completion. The prompt is
the data's. An environment has these methods and attributes:

- `step(text) -> float | None` receives a completion without special tokens and returns its reward, or None.
- `done` says whether the episode is over. It is read after each step.
- `observe()` returns what the model reads next: a text or a list of messages. In a conversation a text becomes a user's
  message.
- `end() -> float | None` is optional. It is called if the episode is cut off before it is done.
- `metrics` is optional: a dict of numbers for metrics.jsonl.

For example, an environment that gives the model a second try:

    class SecondTry:
        def __init__(self, row, seed):
            self.answer, self.tries, self.done = row["columns"]["answer"], 0, False

        def step(self, text):
            self.tries += 1
            is_right = self.answer in text
            self.done = is_right or self.tries == 2
            return float(is_right) if self.done else None

        def observe(self):
            return "Wrong. Try again."

Environments exist only on rank 0, in a process of their own.

    episodes        runs episodes with an engine, and encodes observations
    tools, mcp      the environment of `grpo.tools`: makes tool calls; servers of tools
    verifiers       environments of the library `verifiers` (`grpo.verifiers`), in all its releases
    stepping        `Environments`: the process from outside
    calls           the process from inside: a pool of threads with time limits
"""
