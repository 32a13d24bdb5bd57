"""Completions in several turns: an environment answers each, until it is done.

An environment is made for each completion by a function that a recipe names (`grpo.environment`),

    make(row, seed) -> environment

row: the data's row, its prompt and columns; seed: a number of its own for each completion. The prompt is the data's;
then `step` is given each completion's text, without special tokens, and returns what it earns, None for no opinion.
`done` is read after each step. `observe` returns what the model reads next: a text, which becomes a user's message
where the prompt is a conversation, or messages. An environment may have `end() -> float | None`, called where no more
completions come though it is not done; and `metrics`, a dict of numbers that are reported.

All on one rank only.

    episodes                        completions and what stands between them, around an engine
    tools, mcp                      the environment of `grpo.tools`: calls are done, and answered; servers of tools
    verifiers                       those of `grpo.verifiers`, of the library of that name, in all its releases
    stepping                        `Environments` asks them, in a process of their own
    calls                           there: the calls; threads, each given up where it hangs
"""
