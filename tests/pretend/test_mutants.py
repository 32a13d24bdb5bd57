"""A wrong device put in at one place of dtrain: a run on the CPU does not notice, a run on a pretend card ends."""

import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import dtrain
from tests.pretend.mutants import Mutant
from tests.pretend.runs import train_on_card
from tests.pretend.test_costs import MEMORY, WAITS
from tests.pretend.test_saves import sent
from tests.pretend.worlds import run_pretend
from tests.tiny import tiny_recipe

FOUND = "same device|must be CUDA|on several devices|different devices"


def sft(root, *keys, name="run"):
    return tiny_recipe(root, "train.steps=1", "scheduler.warmup_steps=0", "train.dtype=bfloat16", *keys, name=name)


def received(root, *keys, name="run"):
    return tiny_recipe(root, "train.global_batch=4", "train.dtype=float32", family="llama")


class Place(NamedTuple):
    """of dtrain: `device` within `line` of `module` becomes `instead`; the run of `make` on `size` ranks ends."""

    module: str
    line: str
    device: str
    instead: str = ""
    make: Any = sft
    size: int = 1
    keys: tuple[str, ...] = ()


PLACES = {
    "a micro-batch goes to the first card": Place(
        "policy.score", "views_of(pinned.to(device, non_blocking=True))", "device, ", '"cuda:0", ', size=2
    ),
    "weights that are sent": Place(
        "policy.weights", "receivers.broadcast(flatten_bucket(full), 0)", "(full)", "(full).cpu()", make=received
    ),
}  # fmt: skip


def test_every_mutant_still_fits():
    """The line that each changes stands once in its file."""
    costs = [cost for table in (MEMORY, WAITS) for cost in table.values()]
    for module, line in {(place.module, place.line) for place in [*PLACES.values(), *costs]}:
        source = (Path(dtrain.__file__).parent / f"{module.replace('.', '/')}.py").read_text()
        assert source.count(line) == 1, (module, line)


@pytest.mark.parametrize("place", PLACES)
def test_a_wrong_device_is_noticed(tmp_path, place):
    """The run ends, or its steps wait for the card more often than without: CUDA itself takes some tensors of the
    host."""
    module, line, device, instead, make, size, keys = PLACES[place]
    assert device in line
    mutant = Mutant(f"dtrain.{module}", line, line.replace(device, instead))
    recipe = make(tmp_path, *keys, name="mutant")
    run = (sent, 1, recipe) if make is received else (train_on_card, size, recipe, size)
    try:
        found = run_pretend(*run, mutants=[mutant])
    except AssertionError as error:
        assert re.search(FOUND, str(error)), error
        return
    usual = run_pretend(train_on_card, size, make(tmp_path, *keys, name="usual"), size)
    assert found[0].count("sync") > usual[0].count("sync")


def test_a_mutant_that_fits_nowhere_is_told(tmp_path):
    with pytest.raises(AssertionError, match="stands 0 times in dtrain.training.trainer"):
        run_pretend(train_on_card, 1, sft(tmp_path), 1, mutants=[Mutant("dtrain.training.trainer", "no such line", "")])


def test_the_same_run_without_a_mutant_goes_well(tmp_path):
    """Imported anew all the same, so that what ends the others is the mutant."""
    run_pretend(
        train_on_card,
        1,
        sft(tmp_path),
        1,
        mutants=[Mutant("dtrain.training.trainer", '"""The training loop: ', '"""The training loop: ')],
    )
