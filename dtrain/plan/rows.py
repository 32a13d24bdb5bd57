"""The rows of a step that is planned."""

import torch

from dtrain.batch import IGNORE, Row
from dtrain.config.schema import Recipe
from dtrain.methods import Method


def full_rows(recipe: Recipe, method: Method, micro_batches: int) -> list[Row]:
    """A rank's rows of a step, as full as the recipe allows: every row of `data.max_length` tokens (a packed row of
    pairs twice as many), every token trained that has one before it; packed rows hold two documents, so that the masks
    are those of packing."""
    length, packed = recipe.data.max_length, recipe.data.packing
    count = micro_batches * (method.micro_rows if isinstance(method.micro_rows, int) else recipe.train.micro_batch)
    if method.kind == "pairs" and packed:
        length *= 2
    documents = 1 if method.kind == "prompts" or not packed else 2
    places = torch.arange(length)
    seq_ids = places * documents // length
    begins = torch.searchsorted(seq_ids, seq_ids)
    streams = {
        "input_ids": torch.ones_like(places),
        "labels": torch.where((begins.roll(-1) == places + 1) | (places == length - 1), IGNORE, 1),
        "position_ids": places - begins,
        "seq_ids": seq_ids,
    }
    if method.kind == "prompts":
        streams |= {name: torch.zeros(length, dtype=torch.float64) for name in _of_rollouts(recipe)}
    return [{name: stream.clone() for name, stream in streams.items()} for _ in range(count)]


def _of_rollouts(recipe: Recipe) -> list[str]:
    """The streams that a rollout adds to its rows."""
    return ["old_logprobs", "sampling_logprobs", "advantages"] + ["reference_logprobs"] * (recipe.grpo.beta > 0)
