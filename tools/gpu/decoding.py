"""Part on decoding: by CUDA graphs and without, the same tokens, and both rates; over products and over varlen_attn."""

import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path

from dtrain.recipe.schema import Recipe
from tools.gpu.ranks import Run
from tools.gpu.runs import WRONG, Options, shape_recipe

SAME = 0.9  # share of the rows whose first two tokens are to be equal


def decoding(options: Options, run: Run, root: Path) -> Iterator[str]:
    """The same tokens with CUDA graphs as without, and both rates, over products and over varlen_attn. Graphs round the
    rows up, so that products may be taken in another order: bfloat16's near ties may part, and few rows may."""
    tokens = 12 if options.small else 128
    recipe = shape_recipe(root, "0.6B", 64, options.small, name="decoding")
    for rows, with_flash in product((8,) if options.small else (8, 256), (False, True)):
        eager, eager_rate, *_ = run(decode_rank, 1, recipe, rows, tokens, False, with_flash)[0]
        graphs, rate, captures, note = run(decode_rank, 1, recipe, rows, tokens, True, with_flash)[0]
        equal = sum(ids == others for ids, others in zip(eager, graphs, strict=True))
        first = sum(ids[:2] == others[:2] for ids, others in zip(eager, graphs, strict=True))
        words = f"{rows} rows: {equal} equal to the end, {first} in two tokens; tokens/s {eager_rate:,.0f} eager, "
        words += f"{rate:,.0f} by graphs of {captures} captures; {'varlen_attn' if with_flash else 'products'} {note}"
        yield f"{'ok' if first >= SAME * rows and not note else WRONG}  {words.rstrip()}"


def decode_rank(
    rank: int, size: int, recipe: Recipe, rows: int, tokens: int, with_graphs: bool, with_flash: bool
) -> tuple[list[list[int]], float, int, str]:
    """Return `rows` samples of eight prompts, `tokens` long, the tokens a second of the second time, the count of
    graphs that both times captured, and why varlen_attn was not taken where it was asked for."""
    import torch

    from dtrain import models
    from dtrain.inference.engine import Engine
    from dtrain.inference.graphs import CudaGraphs, GraphedSteps
    from dtrain.inference.request import Request, SamplingParams
    from dtrain.inference.varlen_decode import choose_varlen_decode

    captured = []

    class Counting(CudaGraphs):
        def capture(self, step):
            captured.append(step)
            return super().capture(step)

    device = torch.device("cuda", rank)
    model = models.build(models.read_config(recipe.model.directory), torch.bfloat16)
    models.init_weights(model, 0)
    model = model.to(device)
    flash, note = choose_varlen_decode(model.config, torch.bfloat16, device) if with_flash else (None, "")
    steps = GraphedSteps(model, device, Counting, insists=True) if with_graphs else None
    engine = Engine(model, steps=steps, flash=flash)
    prompts = [[1 + (7 * at + prompt) % 50 for at in range(20 + prompt)] for prompt in range(8)]
    sampling = SamplingParams(tokens, 1.0, top_p=0.9)
    requests = [Request(prompts[row % 8], sampling, 0, row % 8, row) for row in range(rows)]
    for _ in range(2):
        began = time.monotonic()
        answers = engine.generate(requests)  # waits for the device: it looks at the tokens
        rate = rows * tokens / (time.monotonic() - began)
    return [answer.ids for answer in answers], rate, len(captured), note
