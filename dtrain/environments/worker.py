"""The environments' process. Each make and each step runs in a thread of its crew, and is given up where it hangs.

    in    ("load", (module, function, timeout, threads))
          ("make", [(row, seed), ..])           environments numbered from 0; those before are gone
          ("step", [(number, text, is_last), ..])
          ("forget", null)                      let the environments go
          ("stuck", null)                       how many threads were given up and hang still?
    out   {"ready": true}                       the maker is loaded
          {"replies": [[number, reply], ..]}    to a make or a step, in parts, as they come
          {"stuck": count}                      to these two

A reply is {} for a make and {"earned": number or null, "done": bool, "observation": text, messages or null} for a step;
{"missed": "late" or "untried"}; or what went wrong, as `child` says it, with {"stage": "make", "step" or "observe"}.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from dtrain.environments import calls
from dtrain.environments.crew import Crew, Missed
from dtrain.rollout.child import Answer, Tell, attempt, serve


def main(parent: int) -> None:
    """Serve calls until the parent closes the pipe. Never returns."""
    serve(parent, _EnvironmentServer().handle)


class _EnvironmentServer:
    """The maker, and the environments by number."""

    def __init__(self) -> None:
        self.environments: dict[int, Any] = {}

    def handle(self, kind: str, content: Any, tell: Tell) -> None:
        if kind == "load":
            tell(attempt(partial(self._load, *content)))
        elif kind == "make":
            self.environments = {}
            made = [partial(self._make, self.environments, place, *one) for place, one in enumerate(content)]
            self._reply(range(len(content)), made, tell)
        elif kind == "step":
            stepped = [partial(_step, self.environments, *one) for one in content]
            self._reply([number for number, *_ in content], stepped, tell)
        else:
            # What ends with an environment may be its thread's alone.
            clear = [partial(attempt, self._clear)] if kind == "forget" else []
            for _ in self.crew.do(clear):
                pass
            tell({"stuck": self.crew.stuck})

    def _clear(self) -> Answer:
        self.environments.clear()
        return {}

    def _load(self, module: str, function: str, timeout: float, threads: int) -> Answer:
        self.maker: Callable[[Any, int], Any] = calls.load(module, function)
        self.crew: Crew[Any] = Crew(threads, timeout)
        return {"ready": True}

    def _make(self, environments: dict[int, Any], number: int, row: Mapping[str, Any], seed: int) -> Answer:
        """One that is late lands among those of its own call."""

        def make() -> Answer:
            environments[number] = calls.make(self.maker, row, seed)
            return {}

        answer = attempt(make)
        return answer | {"stage": "make"} if answer else answer

    def _reply(self, numbers: Sequence[int], tasks: Sequence[Callable[[], Answer]], tell: Tell) -> None:
        for outcomes in self.crew.do(tasks):
            replies = [
                (numbers[place], {"missed": one.value} if isinstance(one, Missed) else one) for place, one in outcomes
            ]
            tell({"replies": replies})


def _step(environments: dict[int, Any], number: int, text: str, is_last: bool) -> Answer:
    """A step and, where that was not the last, an observation. An environment that is over is not kept."""
    environment = environments.pop(number)
    answer = attempt(partial(calls.step, environment, text))
    if "done" not in answer:
        return answer | {"stage": "step"}
    if answer["done"] or is_last:
        return answer | {"observation": None}
    seen = attempt(partial(calls.observe, environment))
    if "observation" not in seen:
        return seen | {"stage": "observe"}
    environments[number] = environment
    return answer | seen
