"""FlashAttention-3 on a pretend card: taken where its package is and it proves itself, forward and backward alike, else
torch's own. A stand-in for it, entered where torch's own list of versions has it."""

import sys
from functools import partial
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import torch
from torch.nn import attention

from dtrain.attention import varlen
from dtrain.attention.varlen import choose_version
from dtrain.base.ranks import Ranks
from dtrain.models.read_config import read_config
from dtrain.policy import build
from dtrain.policy.options import choose_precision
from tests.pretend import cuda, journal
from tests.pretend.card import Card
from tests.pretend.kernels import Kernels
from tests.pretend.worlds import run_pretend
from tests.tiny import tiny_recipe

NAMES = ("flash_attention_backward", "flash_attention_forward")  # plain rows go to cuDNN there


def install(called, wrong=None):
    """Install the package, whose operations add their names to `called`; `wrong` is what gives other numbers."""
    sys.modules["flash_attn_interface"] = module = ModuleType("flash_attn_interface")
    module.__spec__ = ModuleSpec(module.__name__, None)
    own = Kernels(cuda.library(), journal.note)

    def compute(name, *arguments, **options):
        called.append(name)
        first, *others = getattr(own, name)(*arguments, **options)
        return (first * 1.25 if name == wrong else first), *others

    def register():
        if wrong == "all":
            raise ImportError("libcudart.so.11 is missing")
        library = torch.library.Library("aten", "IMPL", "CUDA")
        for name in NAMES:
            library.impl(f"_{name}", partial(compute, name), "CUDA")
        return SimpleNamespace(remove=library._destroy)

    attention.register_flash_attention_impl("FA3", register_fn=register)


def chosen(rank, root, wrongs):
    """Return of each package the kernel with its note, what is active then, and what a later proof called of it."""
    recipe, device, found = tiny_recipe(root, "train.dtype=bfloat16"), torch.device("cuda", rank), []
    config, precision = read_config(recipe.model.path), choose_precision("bfloat16", "cuda")
    for wrong in wrongs:
        called: list[str] = []
        varlen._refused_versions.clear()  # each is another process
        if wrong != "none":
            install(called, wrong)
        kernel = build.choose_attention(recipe, config, precision, device, 64)
        called.clear()
        prove_again(kernel, config, device)
        found.append((kernel.name, kernel.note, attention.current_flash_attention_impl(), sorted(set(called))))
    return found


def prove_again(kernel, config, device):
    (shape,) = config.attention_shapes()
    more = {"dtype": torch.bfloat16, "device": device, "is_later": True}
    assert varlen.check_varlen(kernel.flash, **shape, **more) is None


def test_a_version_that_proves_itself_is_taken_for_all_of_attention(tmp_path):
    tiny_recipe(tmp_path)
    wrongs = ["none", None, *NAMES, "all"]
    (found,) = run_pretend(chosen, 1, tmp_path, wrongs)
    (none, right, *others, broken) = found
    assert none == ("varlen", "", None, [])
    assert right == ("varlen", "FA3", "FA3", sorted(NAMES))
    for wrong, (name, note, active, called) in zip(NAMES, others, strict=True):
        assert note.startswith("FA2: FA3: varlen gives other numbers"), (wrong, note)
        assert (name, active, called) == ("varlen", None, [])
    assert broken == ("varlen", "FA2: FA3 does not load: libcudart.so.11 is missing", None, [])


def test_a_card_of_another_generation_keeps_torchs_own(tmp_path):
    tiny_recipe(tmp_path)
    (found,) = run_pretend(chosen, 1, tmp_path, [None], card=Card(capability=(8, 0)))
    assert found == [("varlen", "", None, [])]


def of_two(rank):
    """Return the note where rank 0 alone has the package, and how often it was asked for a proof of what."""
    asked: list[bool] = []
    if rank == 0:
        install([])
    _, note = choose_version(torch.device("cuda", rank), asked.append, Ranks())
    return note, attention.current_flash_attention_impl(), asked


def test_ranks_that_attend_together_take_one_version():
    assert run_pretend(of_two, 2) == [("FA2: FA3 is not on every rank", None, [False])] * 2
