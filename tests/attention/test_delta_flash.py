"""Choice of flash-linear-attention: it is taken where it gives torch's numbers in every way it is used."""

import sys
from types import ModuleType

import pytest
import torch

from dtrain.attention.linear.flash import FlashDelta, check_flash_delta, installed_flash_delta
from tests.attention.fla import chunk_gated_delta_rule

SIZES = {"key_heads": 1, "value_heads": 2, "key_dim": 4, "value_dim": 3, "device": torch.device("cpu")}


def documents_leak(*parts, cu_seqlens, cu_seqlens_cpu, initial_state=None, **more):
    """All rows as one document: slime #1686, whose convolution knew where documents lie, and whose rule did not."""
    ends = None if cu_seqlens is None else cu_seqlens[[0, -1]]
    first = None if initial_state is None or ends is None else initial_state[:1]
    out, last = chunk_gated_delta_rule(*parts, cu_seqlens=ends, cu_seqlens_cpu=ends, initial_state=first, **more)
    return out, last if last is None or ends is None else last.expand(len(cu_seqlens) - 1, -1, -1, -1)


def last_document_is_cut(*parts, cu_seqlens, **more):
    """A document's last token is 0."""
    out, last = chunk_gated_delta_rule(*parts, cu_seqlens=cu_seqlens, **more)
    seen = torch.ones(out.shape[1], dtype=torch.bool)
    if cu_seqlens is not None:
        seen[cu_seqlens[2] - 1] = False
    return out * seen[None, :, None, None], last


def no_gradient_of_decays(q, k, v, g, beta, **more):
    return chunk_gated_delta_rule(q, k, v, g.detach() + 0 * g, beta, **more)


def first_states_are_lost(*parts, initial_state, **more):
    lost = None if initial_state is None else 0 * initial_state
    return chunk_gated_delta_rule(*parts, initial_state=lost, **more)


def of_last_states_nothing_comes_back(*parts, **more):
    out, last = chunk_gated_delta_rule(*parts, **more)
    return out, last if last is None or not last.requires_grad else last.detach() + 0 * out.sum()


def without_lengths(*parts, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel):
    raise AssertionError("not reached")


def test_what_gives_torchs_numbers_is_taken():
    assert check_flash_delta(FlashDelta(chunk_gated_delta_rule), dtype=torch.bfloat16, exchanges=True, **SIZES) is None


@pytest.mark.trap(
    "borders given to the convolution and not to the delta rule",
    "THUDM/slime PR#1686",
    "samples see each other",
    "a kernel that gives other numbers than torch is not taken",
)
@pytest.mark.parametrize(
    ("broken", "found"),
    [
        (documents_leak, "gives other numbers than torch here, in packed rows"),
        (last_document_is_cut, "gives other numbers than torch here, in packed rows"),
        (no_gradient_of_decays, "gives other numbers than torch here, in packed rows"),
        (first_states_are_lost, "gives other numbers than torch here, in pieces of rows"),
        (of_last_states_nothing_comes_back, "gives other numbers than torch here, in pieces of rows"),
        (without_lengths, "does not run here: .*unexpected keyword argument"),
    ],
)
def test_what_gives_other_numbers_is_not(broken, found):
    problem = check_flash_delta(FlashDelta(broken), dtype=torch.float32, exchanges=True, **SIZES)
    assert problem is not None
    with pytest.raises(ValueError, match=found):
        raise ValueError(problem)


def test_a_card_without_the_memory_of_a_kernel_does_not_end_the_run(monkeypatch):
    errors = ModuleType("triton.errors")
    errors.TritonError = type("TritonError", (Exception,), {})
    monkeypatch.setitem(sys.modules, "triton.errors", errors)

    def needs_more(*parts, **more):
        raise errors.TritonError("out of resource: shared memory")

    problem = check_flash_delta(FlashDelta(needs_more), dtype=torch.float32, exchanges=False, **SIZES)
    assert problem == "flash-linear-attention does not run here: out of resource: shared memory"


def test_one_that_is_not_there_or_cannot_be_loaded_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "fla", None)
    assert "cannot be loaded" in installed_flash_delta()
    monkeypatch.delitem(sys.modules, "fla")
    assert "is not installed (pip install 'dtrain[fla]')" in installed_flash_delta()
    for name in ("fla", "fla.ops", "fla.ops.gated_delta_rule"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    assert "cannot be loaded" in installed_flash_delta()
    sys.modules["fla.ops.gated_delta_rule"].chunk_gated_delta_rule = chunk_gated_delta_rule
    assert isinstance(installed_flash_delta(), FlashDelta)
