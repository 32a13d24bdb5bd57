"""Generation with the KV cache gives the logits of a whole forward, in rows of different lengths."""

import pytest
import torch

from dtrain import models
from dtrain.attention.cache import KVCache
from tests.models.oracle import VARIANTS, VOCAB


def build(variant):
    model = models.build(models.parse_config(VARIANTS[variant]().to_dict()), dtype=torch.float64)
    models.init_weights(model, 0)
    return model


@pytest.mark.parametrize("variant", ["llama3.1", "mistral-window", "qwen2-window", "qwen3", "gemma3-softcap"])
@torch.no_grad()
def test_cached_decoding_is_a_whole_forward(variant):
    model = build(variant)
    lengths, steps = torch.tensor([3, 17, 9]), 14
    tokens = torch.randint(0, VOCAB, (3, 17 + steps), generator=torch.Generator().manual_seed(0))
    cache = KVCache(model.config.num_hidden_layers, max_length=17 + steps)
    prompts = torch.where(torch.arange(17) < lengths[:, None], tokens[:, :17], 0)
    logits = model(prompts, cache=cache)
    for row, length in enumerate(lengths):
        expected = model(tokens[row : row + 1, :length])[0]
        torch.testing.assert_close(logits[row, :length], expected, rtol=1e-11, atol=1e-12)
    rows = torch.arange(3)
    for step in range(steps):
        positions = (lengths + step)[:, None]
        logits = model(tokens[rows, positions[:, 0]][:, None], position_ids=positions, cache=cache)
        for row, length in enumerate(lengths + step):
            expected = model(tokens[row : row + 1, : length + 1])[0, -1]
            torch.testing.assert_close(logits[row, 0], expected, rtol=1e-11, atol=1e-12)


@torch.no_grad()
def test_several_tokens_at_once_and_positions_that_follow():
    model = build("gemma3")
    tokens = torch.randint(0, VOCAB, (2, 100), generator=torch.Generator().manual_seed(0))
    whole = model(tokens)
    cache = KVCache(model.config.num_hidden_layers, max_length=100)
    parts = [model(tokens[:, a:b], cache=cache) for a, b in ((0, 5), (5, 80), (80, 81), (81, 100))]
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-11, atol=1e-12)


@torch.no_grad()
def test_rows_can_be_selected_and_repeated():
    model = build("qwen3")
    tokens = torch.randint(0, VOCAB, (3, 9), generator=torch.Generator().manual_seed(0))
    cache = KVCache(model.config.num_hidden_layers, max_length=9)
    model(tokens[:, :8], cache=cache)
    rows = torch.tensor([2, 0, 2, 2])
    cache.select(rows)
    torch.testing.assert_close(model(tokens[rows, 8:], cache=cache)[:, 0], model(tokens[rows])[:, -1])


def test_a_full_cache_says_so():
    model = build("qwen3")
    cache = KVCache(model.config.num_hidden_layers, max_length=4)
    with pytest.raises(ValueError, match="holds 4 positions; 0 \\+ 5 do not fit"):
        model(torch.zeros(1, 5, dtype=torch.int64), cache=cache)
