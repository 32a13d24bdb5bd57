"""Cards that a run cannot go on with: `dtrain run` on every rank ends with status 1 and says why, before a byte of any
card is taken."""

import os
import re
from dataclasses import replace
from functools import partial

import pytest

from dtrain import recipe as config
from dtrain.commands import cli
from tests.policy.test_weights import free_port
from tests.pretend import cuda
from tests.pretend.card import GIB, Card
from tests.pretend.worlds import run_pretend
from tests.tiny import tiny_recipe
from tests.world import run_world

H100, T4 = Card(), Card(name="Tesla T4", capability=(7, 5), memory=15 * GIB)
A100 = Card(name="NVIDIA A100-SXM4-80GB", capability=(8, 0))
SLICE = Card(name="NVIDIA H100 80GB HBM3 MIG 1g.10gb", memory=10 * GIB)
SMALL = Card(memory=2**19)
OLD = Card(refusal="The NVIDIA driver on your system is too old (found version 11040)")
HALF, HIDDEN = "train.dtype=bfloat16", {"CUDA_VISIBLE_DEVICES": ""}

CASES = {
    "memory of one": ([H100, SMALL], (), {}, "this does not fit: the peak is .*the smallest change"),
    "bfloat16": ([T4], (HALF,), {}, r"Tesla T4 \(15 GiB, .* does not compute in bfloat16 .*Set train.dtype=float16"),
    "kernels": ([Card(kernels=("sm_100",))], (), {}, "no kernels for NVIDIA H100.* it is built for sm_100; install"),
    "kinds": ([H100, A100], (), {}, "of different kinds, NVIDIA H100.* on rank 0; NVIDIA A100.* on rank 1"),
    "one card": ([Card(uuid="GPU-5")] * 2, (), {}, "2 ranks on .* share 1 GPU, and NCCL takes one rank each"),
    "slices": ([SLICE] * 2, (), {}, "rank 0 has a MIG slice, .* set launch.nproc=1"),
    "driver of one": ([H100, OLD], (), {}, "CUDA does not start on .*: The NVIDIA driver on your system is too old"),
    "hidden from both": ([H100] * 2, ("launch.device=cuda",), HIDDEN, "CUDA_VISIBLE_DEVICES= hides all GPUs: unset"),
}


def started(rank, path, cards, port, root, environ):
    """Return `dtrain run`'s status under torchrun, and the bytes that it took of its card; its words go to a file."""
    count = str(len(cards))
    if len(cards) > 1:
        of_rank = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
        os.environ.update(of_rank | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
    os.environ.update(environ)
    said = os.open(root / f"said-{rank}", os.O_CREAT | os.O_WRONLY)
    os.dup2(said, 2)
    before = cuda.library().peak()
    try:
        status = cli.main(["run", str(path)])
    except SystemExit as end:
        status = end.code
    return status, cuda.library().peak() - before


def with_card(cards, rank, size, store):
    import torch

    torch.set_num_threads(1)
    cuda.insert(cards[rank])


def ends(rank, path, cards, port, root, environ):
    """Return the result of `started` on each rank, with a card of its own."""
    return run_world(started, len(cards), path, cards, port, root, environ, join=partial(with_card, cards))


@pytest.mark.parametrize("name", CASES)
def test_every_rank_ends_before_weights_and_says_why(tmp_path, name):
    cards, keys, environ, words = CASES[name]
    cards = [replace(card, devices=len(cards)) for card in cards]
    recipe = tiny_recipe(tmp_path, "train.dtype=float32", *keys)
    path = tmp_path / "recipe.yaml"
    path.write_text(config.to_yaml(recipe))
    (found,) = run_pretend(ends, 1, path, cards, free_port(), tmp_path, environ, card=Card(devices=len(cards)))
    print(found, *((tmp_path / f"said-{rank}").read_text() for rank in range(len(cards))), sep="\n")
    assert found == [(1, 0)] * len(cards)
    said = [(tmp_path / f"said-{rank}").read_text() for rank in range(len(cards))]
    assert "Traceback" not in said[0], said[0]
    assert re.search(f"^dtrain: .*{words}", said[0], re.M | re.S), said
