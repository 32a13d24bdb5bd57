"""Journal of what a run costs a GPU: waits of the host for the device, copies, collectives, and which kernels ran.

Each entry is (kind, what, where): `where` is the innermost line of dtrain on the stack, or "". Kinds: `sync` the host
waits for the device; `pageable` a copy from memory that is not pinned, asked not to wait; `copy` one that is pinned;
`nccl` a collective; `kernel` a choice that torch makes by device.
"""

import sys
from collections import Counter

_ROOM = "/dtrain/"
_seen: Counter[tuple[str, str, str]] = Counter()


refuses_waits = False  # as under torch.cuda.set_sync_debug_mode("error")


def note(kind: str, what: str) -> None:
    if refuses_waits and kind in ("sync", "pageable"):
        raise RuntimeError("called a synchronizing CUDA operation")
    _seen[kind, what, _where()] += 1


def clear() -> None:
    _seen.clear()


def entries(kind: str) -> dict[tuple[str, str], int]:
    """{(what, where): how often} of a kind, since the last `clear`."""
    return {(what, where): count for (of, what, where), count in sorted(_seen.items()) if of == kind}


def total(kind: str) -> int:
    return sum(entries(kind).values())


def _where() -> str:
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if _ROOM in name and "/tests/" not in name:
            return f"{name[name.rindex(_ROOM) + 1 :]}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
