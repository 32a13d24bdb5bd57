"""Reading prompts and decoding with a cache gives the logits of a whole forward, in rows of different lengths."""

import pytest
import torch

from dtrain import models
from dtrain.inference.cached_attention import Decode, Prefill
from dtrain.inference.kv_cache import SMALLEST_SLOT, KeyValues
from dtrain.models.common.config import SLIDING
from tests.models.oracle import VARIANTS, VOCAB


def build(variant, dtype=torch.float64):
    model = models.build(models.parse_config(VARIANTS[variant]().to_dict()), dtype=dtype)
    models.init_weights(model, 0)
    return model


def store_of(model):
    config = model.config
    return KeyValues([config.sliding_window if kind == SLIDING else None for kind in config.layer_types])


@pytest.mark.parametrize(
    "variant",
    [
        "llama3.1",
        "mistral-window",
        "mixtral-window",
        "qwen2-window",
        "qwen3",
        "gemma3-softcap",
        "qwen3.5",
        "qwen3.5-moe",
        "qwen3.5-tied",
        "qwen3.5-pairs",
        "gemma4",
        "gemma4-unshared",
        "gemma4-shared-pairs",
        "gemma4-moe",
        "gpt-oss",
        "deepseek-v3",
        "deepseek-v3-yarn",
        "olmo3",
        "smollm3-window",
        "granite",
        "ministral3-window",
    ],
)
@torch.no_grad()
@pytest.mark.slow
def test_cached_decoding_is_a_whole_forward(variant):
    """Prompts shorter and longer than the window, in pools of two sizes; three rows of one, and rows that outgrow
    their first slots."""
    model, store, cpu = build(variant), store_of(build(variant)), torch.device("cpu")
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(0, VOCAB, (length,), generator=generator) for length in (3, 17, 40)]
    samples = [0, 2, 1, 2, 2]  # the prompt of each row
    steps = SMALLEST_SLOT + 9
    added = torch.randint(0, VOCAB, (len(samples), steps), generator=generator)

    whole = [model(torch.cat([prompts[sample], added[row]])[None])[0] for row, sample in enumerate(samples)]
    places = {}
    for some in ([0, 1], [2]):  # one pool each
        taken = [store.new_prompt(len(prompts[index])) for index in some]
        padded = torch.nn.utils.rnn.pad_sequence([prompts[index] for index in some], batch_first=True)
        logits = model.next_logits(padded, Prefill(store, taken, cpu))
        for index, place, found in zip(some, taken, logits, strict=True):
            places[index] = place
            expected = whole[samples.index(index)][len(prompts[index]) - 1]
            torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)
    for row in range(len(samples)):
        store.new_row(row)
    decode = None
    for step in range(steps):
        if step == 5:  # a row leaves: another takes its slot
            store.release([store.rows_in_order()[1]])
            decode = None
        if store.grow() or decode is None:
            rows = [place.owner for place in store.rows_in_order()]
            decode = Decode(store, [places[samples[row]] for row in rows], cpu)
        decode.begin()
        logits = model.next_logits(added[rows, step][:, None], decode)
        decode.end()
        decode.lengthen()
        for row, found in zip(rows, logits, strict=True):
            expected = whole[row][len(prompts[samples[row]]) + step]
            torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)
    assert rows != sorted(rows) and len(rows) == 4


@pytest.mark.parametrize("variant", ["qwen3", "gemma3", "gemma4"])
@torch.no_grad()
def test_bfloat16_is_float32_but_for_rounding(variant):
    wide, narrow, cpu = build(variant, torch.float32), build(variant, torch.bfloat16), torch.device("cpu")
    prompt, added = torch.arange(20), torch.arange(30, 50)
    found = {}
    for model in (wide, narrow):
        store = store_of(model)
        place = store.new_prompt(len(prompt))
        model.next_logits(prompt[None], Prefill(store, [place], cpu))
        store.new_row()
        decode = Decode(store, [place], cpu)
        for token in added:
            decode.begin()
            logits = model.next_logits(token[None, None], decode)
            decode.end()
            decode.lengthen()
        found[model] = logits.float()
    whole = narrow(torch.cat([prompt, added])[None])[0, -1:].float()
    error = (found[narrow] - found[wide]).norm() / found[wide].norm()
    assert error < 2 * (whole - found[wide]).norm() / found[wide].norm() + 1e-3
