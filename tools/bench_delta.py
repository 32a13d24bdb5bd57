#!/usr/bin/env python3
"""Time and memory of the gated delta rule and of its convolution, forward and backward, beside transformers' torch path
(`torch_chunk_gated_delta_rule`, `causal_conv1d_fn` of Qwen3.5), as JSON.

    .venv/bin/python tools/bench_delta.py
    .venv/bin/python tools/bench_delta.py --length 512 --threads 2 --key-heads 16 --value-heads 32

One row in float32 on a CPU. Times are the least of --rounds, in which the sides take turns in one process, after a
round that does not count; processor seconds by default, which other processes disturb less, and seconds of the clock
with more than one thread. Memory is the growth of the largest resident set in a process of its own, after a small case.
The ratio of times is transformers' over ours, of memory ours over transformers'. The numbers must agree, or it fails.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch import Tensor

SIDES = ("transformers", "dtrain")
SMALL = 128  # tokens of the case that loads what is loaded once


def make_inputs(length: int, key_heads: int, value_heads: int, size: int) -> dict[str, list[Tensor]]:
    draw = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw)

    q, k, v = (normal(1, length, heads, size) for heads in (key_heads, key_heads, value_heads))
    g, beta = -torch.nn.functional.softplus(normal(1, length, value_heads)), normal(1, length, value_heads).sigmoid()
    channels = (2 * key_heads + value_heads) * size
    cases = {"rule": [q, k, v, g, beta], "convolution": [normal(1, length, channels), normal(channels, 4)]}
    return {name: [one.requires_grad_() for one in some] for name, some in cases.items()}


def forward(side: str, part: str, inputs: list[Tensor]) -> Tensor:
    if side == "dtrain":
        from dtrain.attention.linear.layer import LinearMask, causal_conv, gated_delta

        mask = LinearMask.of(None, inputs[0].shape[1])
        return gated_delta(*inputs, mask)[0] if part == "rule" else causal_conv(*inputs, mask)
    from transformers.models.qwen3_5.modeling_qwen3_5 import causal_conv1d_fn, torch_chunk_gated_delta_rule

    if part == "rule":
        return torch_chunk_gated_delta_rule(*inputs, use_qk_l2norm_in_kernel=True)[0]
    x, weight = inputs
    return causal_conv1d_fn(x.transpose(1, 2), weight, None, activation="silu").transpose(1, 2)


def both_ways(side: str, part: str, inputs: list[Tensor]) -> list[Tensor]:
    out = forward(side, part, inputs)
    return [out.detach(), *torch.autograd.grad(out, inputs, torch.ones_like(out))]


def times(arguments: argparse.Namespace) -> dict:
    """{part: {side: seconds}}"""
    clock = time.process_time if arguments.threads == 1 else time.perf_counter
    found: dict[str, dict[str, float]] = {}
    for part, inputs in inputs_of(arguments).items():
        results = {side: both_ways(side, part, inputs) for side in SIDES}
        for one, other in zip(*results.values(), strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=2e-5 * float(one.abs().max()))
        del results
        least = dict.fromkeys(SIDES, float("inf"))
        for _ in range(arguments.rounds):
            for side in SIDES:
                start = clock()
                both_ways(side, part, inputs)
                least[side] = min(least[side], clock() - start)
        found[part] = {side: round(seconds, 4) for side, seconds in least.items()}
    return found


def memory(arguments: argparse.Namespace) -> float:
    """MiB that one side's forward and backward need beside the inputs."""
    both_ways(arguments.side, arguments.part, make_inputs(SMALL, 2, 2, arguments.size)[arguments.part])
    inputs = inputs_of(arguments)[arguments.part]
    before = largest_kib()
    both_ways(arguments.side, arguments.part, inputs)
    return round((largest_kib() - before) / 1024, 1)


def largest_kib() -> int:
    """The largest resident set so far. Not of `resource`, which counts what the parent held at the fork."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def inputs_of(arguments: argparse.Namespace) -> dict[str, list[Tensor]]:
    return make_inputs(arguments.length, arguments.key_heads, arguments.value_heads, arguments.size)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--key-heads", type=int, default=8)
    parser.add_argument("--value-heads", type=int, default=8)
    parser.add_argument("--size", type=int, default=128, help="of a head")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--part", choices=("rule", "convolution"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.side is not None:
        print(json.dumps(memory(arguments)))
        return
    result: dict = {"case": {key: value for key, value in vars(arguments).items() if value is not None}}
    for part, seconds in times(arguments).items():
        # Memory that is given back at once, so that the largest resident set is what is held at one time.
        environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": str(arguments.threads)}
        mebibytes = {}
        for side in SIDES:
            command = [sys.executable, *sys.argv, "--side", side, "--part", part]
            done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
            mebibytes[side] = json.loads(done.stdout.splitlines()[-1])
        result[part] = {
            "seconds": seconds,
            "MiB": mebibytes,
            "times_as_fast": round(seconds["transformers"] / seconds["dtrain"], 2),
            "of_its_memory": round(mebibytes["dtrain"] / mebibytes["transformers"], 2),
        }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
