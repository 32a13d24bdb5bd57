"""Random number generators as JSON: Python's, torch's on the CPU, and torch's on this rank's CUDA device.

dtrain's own draws depend on the seed and the logical position, so these matter only to what else draws in a run (a
reward function, a user's method). On the saved world size each rank goes on exactly. A rank that gets a copy of another
rank's state (see `CheckpointStore.read_rank_state`) is seeded from that state and the number of the copy: always the
same, and unlike the original.
"""

import base64
import binascii
import random
from typing import Any

import torch

from dtrain.base.errors import UserError
from dtrain.base.randomness import digest


def random_state() -> dict[str, Any]:
    """The state of every generator of this process, as JSON."""
    version, words, gauss = random.getstate()
    state = {"python": [version, list(words), gauss], "torch": _to_text(torch.get_rng_state())}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = _to_text(torch.cuda.get_rng_state())
    return state


def set_random_state(state: dict[str, Any], copy: int = 0) -> None:
    """Put the generators of this process into `state` (copy 0), or into one derived from it. CUDA, where this process
    has it and the state does not, is seeded from the CPU's. UserError for what `random_state` has not written."""
    try:
        version, words, gauss = state["python"]
        cpu = _from_text(state["torch"])
        cuda = _from_text(state["cuda"]) if "cuda" in state else None
        if copy == 0:
            random.setstate((version, tuple(words), gauss))
            torch.set_rng_state(cpu)
        else:
            random.seed(_seed(state["torch"], copy, "python"))
            torch.default_generator.manual_seed(_seed(state["torch"], copy, "torch"))
        if torch.cuda.is_available():
            if copy == 0 and cuda is not None:
                torch.cuda.set_rng_state(cuda)
            else:
                torch.cuda.manual_seed(_seed(state["torch"], copy, "cuda"))
    except (KeyError, TypeError, ValueError, RuntimeError, binascii.Error) as error:
        raise UserError(f"the checkpoint's random state is damaged ({error})") from error


def _seed(text: str, copy: int, generator: str) -> int:
    return int.from_bytes(digest(generator, copy, text), "big") >> 1


def _to_text(state: torch.Tensor) -> str:
    return base64.b64encode(bytes(state.tolist())).decode()


def _from_text(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text, validate=True)), dtype=torch.uint8)
