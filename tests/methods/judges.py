"""Rewards and environments for tests, found by import path. No torch: the rewards' worker imports this file."""


def even(completion_ids):
    """The share of tokens with an even id, rounded so that groups may be alike."""
    return [round(sum(token % 2 == 0 for token in ids) / max(1, len(ids)), 1) for ids in completion_ids]


def wanted(completion_ids, wanted):
    """1 where the prompt's wanted token was drawn."""
    return [float(token in ids) for ids, token in zip(completion_ids, wanted, strict=True)]


def nothing(completions):
    """The same for all: no group teaches anything."""
    return [0.0] * len(completions)


def silent(completions):
    """No opinion on anything."""
    return [None] * len(completions)


class FallsSilent:
    """An opinion on the first rollout alone."""

    def __init__(self):
        self.calls = 0

    def __call__(self, completion_ids):
        self.calls += 1
        return even(completion_ids) if self.calls == 1 else silent(completion_ids)


def not_a_number(completions):
    """Return NaN, as a library that divides zero by zero would."""
    return [float("nan")] * len(completions)


def of_messages(completions):
    """As TRL hands conversations over: lists of messages."""
    return [float(len(completion[0]["content"])) for completion in completions]


class Asks:
    """Two or three turns, by the environment's seed: each earns the share of even words, and a word is given back."""

    def __init__(self, row, seed):
        self.turns = 2 + seed % 2
        self.done = False

    def step(self, completion):
        self.turns -= 1
        self.done = self.turns == 0
        words = completion.split()
        return sum(int(word[1:]) % 2 == 0 for word in words) / max(1, len(words))

    def observe(self):
        return " w5 w6 w7"


class Breaks(Asks):
    """Every third raises in its last step."""

    def __init__(self, row, seed):
        super().__init__(row, seed)
        self.breaks = seed % 3 == 0

    def step(self, completion):
        earned = super().step(completion)
        if self.breaks and self.done:
            raise RuntimeError("no luck")
        return earned
