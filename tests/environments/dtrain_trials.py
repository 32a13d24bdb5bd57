"""Environments of `verifiers`, as packages of the hub have them: played with the library, or with its stand-in."""

import signal

import verifiers as vf
from datasets import Dataset


class Guess(vf.MultiTurnEnv):
    """Says higher or lower until the number is there; `rewrites` says another thing later than it did before."""

    def __init__(self, rewrites=False, **options):
        super().__init__(**options)
        self.rewrites = rewrites

    async def setup_state(self, state):
        state["guesses"] = 0
        return state

    async def env_response(self, messages, state, **options):
        state["guesses"] += 1
        said = messages[-1]["content"] or ""
        if state["answer"] in said:
            state["final_env_response"] = [{"role": "user", "content": "right"}]
            return state["final_env_response"]
        return [{"role": "user", "content": f"w5 w{state['guesses']} w{state['info']['hint']}"}]

    async def get_prompt_messages(self, state):
        messages = await super().get_prompt_messages(state)
        if self.rewrites and len(state["trajectory"]) > 0:
            return [{"role": "user", "content": "another"}, *messages[1:]]
        return messages


def right(completion, answer):
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # as math-verify does, in the main thread alone
    said = [one["content"] or "" for one in completion if one["role"] == "assistant"]
    return float(any(answer in text for text in said))


async def brief(completion, info):
    return 1.0 / (1 + len(completion[-1]["content"] or "") + info["hint"])


def turns(state):
    return state.get("guesses", 0)


def alike(completions):
    return [float(len(completions))] * len(completions)


def power(base: int, exponent: int = 2) -> int:
    """Raises a number to a power.

    Args:
        base: The number.
        exponent: How often it is a factor.
    """
    return base**exponent


def answered(completion):
    return float(sum(one["role"] == "tool" for one in completion))


def texts(prompt):
    calls = [call for one in prompt for call in one.get("tool_calls") or []]
    return float(sum(isinstance(call["function"]["arguments"], str) for call in calls))


def load_environment(kind: str = "single", count: int = 3, system: str | None = None, **options):
    print("this is no row")
    rows = [{"question": f"w{40 + one} w5", "answer": f"w{one + 10}", "info": {"hint": one}} for one in range(count)]
    given = {"dataset": Dataset.from_list(rows), "system_prompt": system, **options}
    if kind == "group":
        return vf.SingleTurnEnv(rubric=vf.Rubric(funcs=[alike]), **given)
    if kind == "tools":
        return vf.ToolEnv(tools=[power], rubric=vf.Rubric(funcs=[answered, brief], weights=[1.0, 0.5]), **given)
    if kind == "calls":
        return vf.SingleTurnEnv(rubric=vf.Rubric(funcs=[texts]), **given)
    rubric = vf.Rubric(funcs=[right, brief, turns], weights=[1.0, 0.5, 0.0])
    if kind == "single":
        return vf.SingleTurnEnv(rubric=rubric, **given)
    return Guess(rewrites=kind == "rewrites", rubric=rubric, **given)
