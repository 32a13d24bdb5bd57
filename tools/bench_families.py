#!/usr/bin/env python3
"""Time and memory of the forward and backward of a family's small shape beside transformers, as JSON.

    .venv/bin/python tools/bench_families.py gemma4
    .venv/bin/python tools/bench_families.py qwen3-moe --length 2048 --threads 2

gemma4: E2B's layers, fewer and narrower: shared keys, wide MLPs, a table of embeddings for each layer. qwen3-moe: 64
experts, 8 of them a token, beside transformers' loop over experts (`eager`). One row in float32 on a CPU, its loss
the cross entropy of every next token. Times are the least of --rounds, in which the sides take turns in one process,
after a round that does not count; processor seconds by default, which other processes disturb less, and seconds of
the clock with more than one thread. Memory is the growth of the largest resident set in a process of its own, after a
short row, beside weights and gradients. The ratio of times is transformers' over ours, of memory ours over
transformers'. The losses and gradients must agree, or it fails.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from dtrain import models
from dtrain.losses.head.weighted_sum import weighted_logprob_sum
from dtrain.models.common.micro_batch import MicroBatchContext
from tests.models.oracle import grads

SIDES = ("transformers", "dtrain")
SMALL = 32  # tokens of the row that loads what is loaded once
VOCABULARY = 32_768
GEMMA4: dict[str, Any] = dict(
    vocab_size=VOCABULARY,
    vocab_size_per_layer_input=32_768,
    hidden_size=256,
    intermediate_size=1024,
    num_hidden_layers=10,
    layer_types=(["sliding_attention"] * 4 + ["full_attention"]) * 2,
    num_kv_shared_layers=5,
    use_double_wide_mlp=True,
    num_attention_heads=4,
    num_key_value_heads=1,
    head_dim=64,
    global_head_dim=128,
    hidden_size_per_layer_input=32,
    sliding_window=128,
    final_logit_softcapping=30.0,
)
QWEN3_MOE: dict[str, Any] = dict(
    vocab_size=VOCABULARY,
    hidden_size=256,
    num_hidden_layers=6,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    num_experts=64,
    num_experts_per_tok=8,
    moe_intermediate_size=96,
    norm_topk_prob=True,
    initializer_range=0.2,  # so that no two experts are as good as alike
)
FAMILIES = {
    "gemma4": lambda: transformers.Gemma4ForCausalLM(transformers.Gemma4TextConfig(**GEMMA4)),
    "qwen3-moe": lambda: transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**QWEN3_MOE)),
}


def make(side: str, family: str) -> Any:
    torch.manual_seed(0)
    theirs = FAMILIES[family]().train()
    theirs.set_experts_implementation("eager")
    if side == "transformers":
        return theirs
    with tempfile.TemporaryDirectory() as directory:
        transformers.utils.logging.disable_progress_bar()
        theirs.save_pretrained(directory)
        return models.from_pretrained(directory).train()


def step(side: str, model: Any, ids: Tensor) -> Tensor:
    """The loss of ids [1, S]; the gradients are the parameters'."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.zero_()
    count = ids.shape[1] - 1
    if side == "transformers":
        loss = model(input_ids=ids, labels=ids).loss
    else:
        index = torch.arange(count)
        cap, weights = model.config.final_logit_softcapping, torch.full((count,), -1 / count)

        def of_head(hidden: Tensor, weight: Tensor) -> Tensor:
            return weighted_logprob_sum(hidden.flatten(0, 1), weight, ids[0, 1:], weights, index, softcap=cap)

        loss = model.with_head(of_head, ids, MicroBatchContext())
    loss.backward()
    return loss.detach()


def times(arguments: argparse.Namespace) -> dict[str, float]:
    clock = time.process_time if arguments.threads == 1 else time.perf_counter
    sides, ids = {side: make(side, arguments.family) for side in SIDES}, draw(arguments.length)
    losses = [step(side, model, ids) for side, model in sides.items()]
    torch.testing.assert_close(*losses, rtol=1e-5, atol=0)
    theirs = grads(sides["transformers"])
    for name, grad in grads(sides["dtrain"]).items():
        torch.testing.assert_close(grad, theirs[name], rtol=0, atol=1e-3 * float(theirs[name].abs().max()))
    least = dict.fromkeys(SIDES, float("inf"))
    for _ in range(arguments.rounds):
        for side, model in sides.items():
            start = clock()
            step(side, model, ids)
            least[side] = min(least[side], clock() - start)
    return {side: round(seconds, 3) for side, seconds in least.items()}


def memory(arguments: argparse.Namespace) -> float:
    """MiB that one side's forward and backward need beside weights and gradients."""
    model = make(arguments.side, arguments.family)
    step(arguments.side, model, draw(SMALL))
    held = resident_kib("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the largest so far is what there is
    step(arguments.side, model, draw(arguments.length))
    return round((resident_kib("VmHWM") - held) / 1024, 1)


def resident_kib(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))


def draw(length: int) -> Tensor:
    return torch.randint(0, VOCABULARY, (1, length), generator=torch.Generator().manual_seed(1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("family", choices=FAMILIES)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.side is not None:
        print(json.dumps(memory(arguments)))
        return
    seconds, mebibytes = times(arguments), {}
    # Memory that is given back at once, so that the largest resident set is what is held at one time.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": str(arguments.threads)}
    for side in SIDES:
        command = [sys.executable, *sys.argv, "--side", side]
        done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
        mebibytes[side] = json.loads(done.stdout.splitlines()[-1])
    result = {
        "case": {key: value for key, value in vars(arguments).items() if value is not None},
        "seconds": seconds,
        "MiB": mebibytes,
        "times_as_fast": round(seconds["transformers"] / seconds["dtrain"], 2),
        "of_its_memory": round(mebibytes["dtrain"] / mebibytes["transformers"], 2),
    }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
