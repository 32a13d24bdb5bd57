"""torch.cuda.CUDAGraph on the pretend card: calls between its begin and its end are recorded, then replayed.

What CUDA refuses meanwhile is refused: the host waits, or copies from memory that is not pinned, or another stream
waits for this one and does not come back.
"""

from typing import Any

from tests.pretend import journal

_FELT = ("sync", "pageable", "copy", "nccl")
_capturing: list["Graph"] = []


def no_other_stream() -> None:
    """A stream waits for another: in a capture it becomes a part of the graph, and must end there."""
    if _capturing:
        raise RuntimeError("a stream waits for one that is being captured")


class Graph:
    captures, replays = 0, 0  # of all graphs of the process

    def __init__(self, keep_graph: bool = False):
        self._recording: Any = None
        self._pool = (0, id(self))
        self._felt: dict[str, int] = {}

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global", **_: Any) -> None:
        import torch

        from tests.replay import Recording

        assert not _capturing and self._recording is None and capture_error_mode == "thread_local"
        self._pool = pool or self._pool
        self._recording = Recording(torch.device("cuda"))
        self._felt = {kind: journal.total(kind) for kind in _FELT}
        _capturing.append(self)
        self._recording.__enter__()

    def capture_end(self) -> None:
        Graph.captures += 1
        self._recording.__exit__(None, None, None)
        _capturing.clear()
        felt = {kind: journal.entries(kind) for kind in _FELT if journal.total(kind) > self._felt[kind]}
        self._recording.end()
        if felt:
            raise RuntimeError(f"operation not permitted when stream is capturing: {felt}")

    def replay(self) -> None:
        Graph.replays += 1
        self._recording.replay()

    def pool(self) -> tuple[int, int]:
        return self._pool
