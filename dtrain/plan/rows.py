"""The rows of a step that is planned."""

import torch

from dtrain.batch import IGNORE, Row
from dtrain.config.schema import Recipe
from dtrain.methods import Method


def full_rows(recipe: Recipe, method: Method, micro_batches: int) -> list[Row]:
    """A rank's rows of a step, as full as the recipe allows: every row of `data.max_length` tokens (a packed row of
    pairs twice as many), every token trained that has one before it; packed rows hold two documents, so that the masks
    are those of packing."""
    length = method.facts.row_length(recipe)
    count = micro_batches * (method.micro_rows if isinstance(method.micro_rows, int) else recipe.train.micro_batch)
    documents = 2 if recipe.data.packing and method.kind != "prompts" else 1
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
        of_rollouts = ["old_logprobs", "sampling_logprobs", "advantages", "reference_logprobs"]
        names = of_rollouts if recipe.grpo.beta > 0 else of_rollouts[:-1]
        streams |= {name: torch.zeros(length, dtype=torch.float64) for name in names}
    return [{name: stream.clone() for name, stream in streams.items()} for _ in range(count)]
