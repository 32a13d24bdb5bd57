"""The next rollout while training goes on: completions are drawn in a thread, and those that are too old drawn again.

A completion's staleness is the trainer's version of the weights less the completion's. No torch.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

from dtrain.base.errors import UserError
from dtrain.inference.request import AskStop, Completion, Request
from dtrain.rl.remote.http import HttpEngine, wait_for


class RolloutPrefetcher:
    """Prefetcher of one rollout at a time, on one rank.

    max_off_policy_steps: the staleness that `take` lets pass; 0 draws everything that
    older weights drew again.
    """

    def __init__(self, engine: HttpEngine, max_off_policy_steps: int, say: Callable[[str], None] = lambda line: None):
        self.engine, self.most, self.say = engine, max_off_policy_steps, say
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="prefetch")
        self._drawing: Future[list[Completion]] | None = None
        self.requests: list[Request] = []

    @property
    def is_under_way(self) -> bool:
        """True while a rollout was begun and not taken."""
        return self._drawing is not None

    def begin(self, requests: Sequence[Request], version: int) -> None:
        """Draw `requests` in a thread. version: the trainer's, for completions without one from the engine."""
        if self.is_under_way:
            raise ValueError("a rollout is under way: take it first")
        self.requests = list(requests)
        self._drawing = self._thread.submit(self._draw, self.requests, version)

    def take(self, version: int, ask_stop: AskStop | None = None) -> list[Completion]:
        """Wait for the rollout that was begun and return its completions, in order, each at most `max_off_policy_steps`
        older than the trainer's `version`. Those that are older are dropped and drawn again, with the weights of now.

        Raises what the engine raised, UserError where what it draws now is too old as well, and Interrupted soon after
        `ask_stop` says yes: the rollout is then lost.
        """
        if self._drawing is None:
            raise ValueError("no rollout is under way: begin one first")
        drawing, self._drawing = self._drawing, None
        wait_for([drawing], ask_stop)
        completions = drawing.result()
        old = [index for index, age in enumerate(_ages(completions, version)) if age > self.most]
        if old:
            self.say(f"{len(old)} of {len(completions)} completions are more than {self.most} steps old: drawn again")
            again = self._draw([self.requests[index] for index in old], version, ask_stop)
            for index, completion in zip(old, again, strict=True):
                completions[index] = completion
            oldest = max(_ages(again, version))
            if oldest > self.most:
                raise UserError(
                    f"the engine draws with version {version - oldest} of the weights and the trainer has {version}: "
                    f"give it the weights before a rollout, or raise max_off_policy_steps={self.most}"
                )
        return completions

    def close(self) -> None:
        """Wait for what is under way and forget it; close the engine first to end it at once."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._drawing = None

    def _draw(self, requests: Sequence[Request], version: int, ask_stop: AskStop | None = None) -> list[Completion]:
        completions = self.engine.generate(requests, ask_stop)
        return [c if c.version is not None else replace(c, version=version) for c in completions]


def _ages(completions: Sequence[Completion], version: int) -> list[int]:
    """Return how much older than `version` each completion is; all have a version here."""
    return [version - c.version for c in completions if c.version is not None]
