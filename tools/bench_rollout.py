#!/usr/bin/env python3
"""Tokens per second of dtrain's native rollout engine beside transformers' generate, as JSON.

    .venv/bin/python tools/bench_rollout.py
    .venv/bin/python tools/bench_rollout.py --prompts 16 --rounds 1 --workload even

Both sides sample at temperature 1 from the same random weights (a Llama of 9 million parameters, vocabulary 8192,
float32) on a CPU with the same number of threads: --prompts prompts of 256 tokens, 8 samples each. Two workloads:

    uneven   every sample has a length of its own, drawn from 16 to 256
    even     every sample has 128 tokens

Here lengths are max_new_tokens of each request. transformers runs a batch until its longest sample is done, each row
stopped at its length by a StoppingCriteria, and an all-done batch at once; it is given the batch size of --batches that
is fastest for it, found in a first round that does not count. The sides take turns --rounds times, each in a process of
its own, which loads and warms up before its clock starts; greedy tokens must agree. The ratio is dtrain's tokens per
second over transformers', a median over the rounds. The peer needs transformers in --python.
"""

import argparse
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench_sft import LLAMA_9M, VOCAB

SAMPLES, PROMPT, EVEN, SHORTEST, LONGEST = 8, 256, 128, 16, 256
GREEDY = 24  # tokens that both sides must agree on


def make_case(workload: str, prompts: int, prompt_tokens: int) -> dict:
    """Token ids of the prompts and the lengths of their samples."""
    draw = random.Random(0)
    return {
        "prompts": [[draw.randrange(2, VOCAB) for _ in range(prompt_tokens)] for _ in range(prompts)],
        "lengths": [
            [EVEN if workload == "even" else draw.randint(SHORTEST, LONGEST) for _ in range(SAMPLES)]
            for _ in range(prompts)
        ],
    }


def write_model(directory: Path) -> None:
    from safetensors.torch import save_file

    from dtrain.models import build, init_weights, parse_config

    (directory / "config.json").write_text(json.dumps(LLAMA_9M))
    model = build(parse_config(LLAMA_9M))
    init_weights(model, 0)
    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


def dtrain_side(directory: Path, case: dict, _: int) -> dict:
    from dtrain.inference.engine import Engine
    from dtrain.inference.request import Request, SamplingParams
    from dtrain.models import from_pretrained

    model = from_pretrained(directory)

    def run(lengths: list[list[int]], temperature: float) -> list[list[int]]:
        requests = [
            Request(prompt, SamplingParams(length, temperature), 0, index, sample)
            for index, (prompt, some) in enumerate(zip(case["prompts"], lengths, strict=False))
            for sample, length in enumerate(some)
        ]
        return [completion.ids for completion in Engine(model).generate(requests)]

    return timed(case, run)


def transformers_side(directory: Path, case: dict, batch: int) -> dict:
    import torch
    from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="sdpa").eval()
    model.generation_config.eos_token_id = None

    class Lengths(StoppingCriteria):
        def __init__(self, lengths, start):
            self.lengths, self.start = torch.tensor(lengths), start

        def __call__(self, input_ids, scores, **kwargs):
            return input_ids.shape[1] - self.start >= self.lengths

    def run(lengths: list[list[int]], temperature: float) -> list[list[int]]:
        rows = [(prompt, length) for prompt, some in zip(case["prompts"], lengths, strict=False) for length in some]
        found = []
        for start in range(0, len(rows), batch):
            some = rows[start : start + batch]
            ids = torch.tensor([prompt for prompt, _ in some])
            counts = [length for _, length in some]
            sampled = (
                {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
            )
            output = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max(counts),
                stopping_criteria=StoppingCriteriaList([Lengths(counts, ids.shape[1])]),
                pad_token_id=0,
                **sampled,
            )
            fresh = output[:, ids.shape[1] :].tolist()
            found += [row[:count] for row, count in zip(fresh, counts, strict=True)]
        return found

    return timed(case, run)


def timed(case: dict, run) -> dict:
    """One side's run of the case, after a short greedy one."""
    greedy = run([[GREEDY]] * 2, 0.0)
    start = time.perf_counter()
    found = run(case["lengths"], 1.0)
    seconds = time.perf_counter() - start
    expected = [length for some in case["lengths"] for length in some]
    if [len(ids) for ids in found] != expected:
        raise SystemExit("a completion has another length than was asked for")
    return {
        "seconds": round(seconds, 2),
        "tokens_per_sec": round(sum(expected) / seconds, 1),
        "peak_memory_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 3),
        "greedy": greedy,
    }


SIDES = {"dtrain": dtrain_side, "transformers": transformers_side}


def run_side(side: str, python: str, directory: Path, case: Path, batch: int, threads: int) -> dict:
    root = Path(__file__).resolve().parents[1]
    path = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
    environ = {**os.environ, "PYTHONPATH": path} | {
        name: str(threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
    }
    command = [python, __file__, "--side", side, str(directory), str(case), str(batch)]
    finished = subprocess.run(command, env=environ, capture_output=True, text=True)
    if finished.returncode:
        raise SystemExit(f"{' '.join(command)}\nfailed:\n{finished.stdout}{finished.stderr}")
    return json.loads(finished.stdout.splitlines()[-1])


def compare(workload: str, directory: Path, args: argparse.Namespace) -> dict:
    case = directory / f"{workload}.json"
    case.write_text(json.dumps(make_case(workload, args.prompts, args.prompt_tokens)))

    def run(side: str, batch: int = 0) -> dict:
        python = sys.executable if side == "dtrain" else args.python
        result = run_side(side, python, directory, case, batch, args.threads)
        load = os.getloadavg()[0]
        print(f"{workload}: {side} {batch or ''} {result['tokens_per_sec']} tokens/s, load {load:.1f}", file=sys.stderr)
        return result

    rows = args.prompts * SAMPLES
    batches = sorted({min(batch, rows) for batch in args.batches})
    tried = {batch: run("transformers", batch)["tokens_per_sec"] for batch in batches} if len(batches) > 1 else {}
    best = max(tried, key=tried.get) if tried else batches[0]
    ours, theirs = [], []
    for number in range(args.rounds):
        for side in ("dtrain", "transformers") if number % 2 == 0 else ("transformers", "dtrain"):
            if side == "dtrain":
                ours.append(run("dtrain"))
            else:
                theirs.append(run("transformers", best))
    greedy = [run.pop("greedy") for run in [*ours, *theirs]]
    agree = all(one == greedy[0] for one in greedy)
    ratios = [a["tokens_per_sec"] / b["tokens_per_sec"] for a, b in zip(ours, theirs, strict=True)]
    return {
        "speed_ratio": round(statistics.median(ratios), 3),
        "speed_ratios": [round(ratio, 3) for ratio in ratios],
        "greedy_tokens_agree": agree,
        "peer_batch": best,
        "peer_batches_tried": tried,
        "dtrain": ours,
        "transformers": theirs,
    }


def main() -> None:
    if sys.argv[1:2] == ["--side"]:
        side, directory, case, batch = sys.argv[2:]
        print(json.dumps(SIDES[side](Path(directory), json.loads(Path(case).read_text()), int(batch))))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=("uneven", "even"), help="one of the two alone")
    parser.add_argument("--prompts", type=int, default=64, help="default 64")
    parser.add_argument("--prompt-tokens", type=int, default=PROMPT, help=f"default {PROMPT}")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each side (default 3)")
    parser.add_argument("--threads", type=int, default=1, help="of each side (default 1)")
    parser.add_argument(
        "--batches",
        type=lambda text: [int(part) for part in text.split(",")],
        default=[64, 128, 512],
        help="batch sizes tried for transformers (default 64,128,512)",
    )
    parser.add_argument("--python", default=sys.executable, help="an interpreter with transformers (default: this one)")
    args = parser.parse_args()
    workloads = [args.workload] if args.workload else ["uneven", "even"]
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        write_model(directory)
        result = {
            "model": "Llama, 9 M parameters, vocabulary 8192, float32",
            "prompts": args.prompts,
            "samples": SAMPLES,
            "prompt_tokens": args.prompt_tokens,
            "threads": args.threads,
            **{workload: compare(workload, directory, args) for workload in workloads},
        }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
