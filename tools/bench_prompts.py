#!/usr/bin/env python3
"""Times training steps with prompts computed once (`train.share_prompts`), against each completion on its own.

    python tools/bench_prompts.py [--device cpu|cuda] [--steps N]

prints one line of JSON per shape: groups of K completions (`grpo`) or pairs (`dpo`), with the lengths of the prompt and
of a completion. Both sides are the same policy on the same packed rows, in processes of their own that run in turns:
shared, alone, alone, shared. A step is forward, backward and update.

    speed          step time alone ÷ step time shared, medians of all steps
    flops          FLOPs alone ÷ FLOPs shared, as `mfu` counts them
    memory         peak memory shared ÷ peak memory alone; on a CPU above that of the process before the first step
    loss_differs   relative difference of the first step's loss

On a CPU the model has 6 layers of 256 hidden units in float32, and a process one thread. On CUDA it has 16 layers of
2048 in bfloat16.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dtrain.models.common.flops import get_text_flops  # noqa: E402
from dtrain.models.read_config import read_config  # noqa: E402
from dtrain.parallel.mesh import Runtime, build_mesh, init_one_process_group  # noqa: E402
from dtrain.policy import Packed, Policy  # noqa: E402
from dtrain.policy.prompt_sharing import PROMPT_IDS  # noqa: E402
from dtrain.training import load_recipe  # noqa: E402

# Method, completions of a prompt, tokens of the prompt, tokens of a completion.
SHAPES = (
    ("grpo", 8, 512, 128),
    ("grpo", 8, 256, 256),
    ("grpo", 8, 64, 512),
    ("grpo", 16, 1024, 64),
    ("dpo", 2, 256, 256),
    ("dpo", 2, 64, 256),
    ("dpo", 2, 16, 512),
)
SIZES = {
    "cpu": {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 6, "num_attention_heads": 4},
    "cuda": {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 16, "num_attention_heads": 16},
}
VOCABULARY = {"cpu": 2048, "cuda": 32768}
WARMUP = 2


def build_policy(root: Path, setting: str, device: str, length: int) -> Policy:
    """Build a policy of a Llama from scratch, with its optimizer."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_key_value_heads": SIZES[device]["num_attention_heads"] // 2,
        "vocab_size": VOCABULARY[device],
        "max_position_embeddings": 8192,
        **SIZES[device],
    }
    (root / "config.json").write_text(json.dumps(config))
    dtype = "float32" if device == "cpu" else "bfloat16"
    recipe = load_recipe(
        "sft",
        [
            f"model.path={root}",
            "model.init=scratch",
            "data.train.path=none",
            f"data.max_length={length}",
            "train.steps=100",
            "train.micro_batch=1",
            f"train.dtype={dtype}",
            f"train.share_prompts={setting}",
            "train.activation_checkpointing=none",
            "train.activation_offload=false",
            "train.tile=none",
        ],
    )
    runtime = Runtime(rank=0, local_rank=0, world_size=1, device=torch.device(device))
    init_one_process_group(device)
    policy = Policy(recipe, read_config(root), build_mesh(runtime), runtime)
    policy.init_optimizer(total_steps=100)
    return policy


def make_batch(group_size: int, prompt_length: int, completion_length: int, vocabulary: int, step: int):
    """Return one group of completions of a random prompt, of which the completions are trained."""
    generator = torch.Generator().manual_seed(step)
    prompt = torch.randint(vocabulary, (prompt_length,), generator=generator).expand(group_size, -1)
    completions = torch.randint(vocabulary, (group_size, completion_length), generator=generator)
    input_ids = torch.cat([prompt, completions], 1)
    token_mask = torch.zeros(input_ids.shape, dtype=torch.bool)
    token_mask[:, prompt_length:] = True
    return {
        "input_ids": input_ids,
        "token_mask": token_mask,
        PROMPT_IDS: torch.zeros_like(input_ids),
        "advantages": torch.randn(group_size, 1, generator=generator).expand(input_ids.shape),
    }


def grpo_loss(source, batch, global_sequences, global_tokens):
    logprobs = source.logprobs(entropy=True).logprobs
    return -(logprobs * batch["advantages"].to(logprobs)).sum() / global_tokens, {}


def dpo_loss(source, batch, global_sequences, global_tokens):
    chosen, rejected = source.sum_by_document(source.logprobs().logprobs).unflatten(0, (-1, 2)).unbind(1)
    losses = -torch.nn.functional.logsigmoid(0.1 * (chosen - rejected))
    return source.count_once(losses.sum() / global_sequences), {}


def run_side(method: str, shape: list[int], setting: str, device: str, steps: int) -> dict:
    """Train some steps in this process, and return the time, the FLOPs and the memory of a step."""
    torch.set_num_threads(1)
    group_size, prompt_length, completion_length = shape
    length = group_size * (prompt_length + completion_length)
    loss_fn = grpo_loss if method == "grpo" else dpo_loss
    with tempfile.TemporaryDirectory() as root:
        policy = build_policy(Path(root), setting, device, length)
        flops = get_text_flops(policy.model)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        times, losses = [], []
        for step in range(WARMUP + steps):
            batch = make_batch(*shape, VOCABULARY[device], step)
            if device == "cuda":
                torch.cuda.synchronize()
            began = time.perf_counter()
            result = policy.forward_backward(batch, loss_fn, Packed(length))
            policy.optimizer_step()
            if device == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - began)
            losses.append(result.loss)
        counts = result.counts
        if device == "cuda":
            memory = torch.cuda.max_memory_allocated() / 2**30
        else:
            memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20 - before
        return {
            "times": times[WARMUP:],
            "flops": flops.per_token * counts.tokens + flops.per_pair * counts.pairs,
            "memory": memory,
            "loss": losses[0],
        }


def compare(method: str, shape: tuple[int, ...], device: str, steps: int) -> dict:
    """Run both sides in turns, and return their ratios."""
    sides: dict[str, list[dict]] = {"true": [], "false": []}
    for setting in ("true", "false", "false", "true"):
        arguments = [method, *map(str, shape), setting, device, str(steps)]
        output = subprocess.run(
            [sys.executable, __file__, "--side", *arguments], stdout=subprocess.PIPE, text=True, check=True
        ).stdout
        sides[setting].append(json.loads(output.splitlines()[-1]))
    shared, alone = sides["true"], sides["false"]

    def median_time(runs: list[dict]) -> float:
        return statistics.median(seconds for run in runs for seconds in run["times"])

    def largest_memory(runs: list[dict]) -> float:
        return max(run["memory"] for run in runs)

    group_size, prompt_length, completion_length = shape
    return {
        "method": method,
        "group": group_size,
        "prompt": prompt_length,
        "completion": completion_length,
        "device": device,
        "step_time": round(median_time(shared), 4),
        "step_time_alone": round(median_time(alone), 4),
        "speed": round(median_time(alone) / median_time(shared), 3),
        "flops": round(alone[0]["flops"] / shared[0]["flops"], 3),
        "memory": round(largest_memory(shared) / largest_memory(alone), 3),
        "loss_differs": abs(shared[0]["loss"] - alone[0]["loss"]) / abs(alone[0]["loss"]),
    }


def main() -> None:
    if sys.argv[1:2] == ["--side"]:
        method, *shape, setting, device, steps = sys.argv[2:]
        print(json.dumps(run_side(method, [int(size) for size in shape], setting, device, int(steps))))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--steps", type=int, default=6, help="steps of each process")
    arguments = parser.parse_args()
    for method, *shape in SHAPES:
        print(json.dumps(compare(method, tuple(shape), arguments.device, arguments.steps)), flush=True)


if __name__ == "__main__":
    main()
