#!/usr/bin/env python3
"""Time and memory of dtrain's own families beside the same models with transformers' modules, as JSON.

    .venv/bin/python tools/bench_twins.py                # all families that both have
    .venv/bin/python tools/bench_twins.py llama olmo2 --length 512

Each family is built twice at one small size, with `model.implementation` native and transformers, and both take turns
with the forward and backward of one packed row in float32 on one process, without compilation. Seconds are the least of
--rounds, of the processor, which other processes disturb less. Losses must agree to 1e-5, or the tool fails.

`planned` is what `dtrain plan` counts for a step of a model of about a billion parameters on one H100 in bfloat16. Only
native layers can be compiled, and a run on a GPU compiles them.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from dtrain import models
from dtrain.commands.plan.hardware import GPUS
from dtrain.commands.plan.plan import make_plan
from dtrain.losses.head.weighted_sum import weighted_logprob_sum
from dtrain.models.common.decoder import CausalLM
from dtrain.models.common.micro_batch import MicroBatchContext
from dtrain.training import recipe_and_problems

IMPLEMENTATIONS = ("native", "transformers")
VOCABULARY = 8192
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 8192,
    "pad_token_id": None,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
LARGE: dict[str, Any] = {
    "vocab_size": 65536,
    "hidden_size": 2048,
    "intermediate_size": 5504,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
EXPERTS = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 172}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 32},
    "qwen3_moe": {"head_dim": 32, **EXPERTS},
    "mistral": {"sliding_window": 128},
    "mixtral": {"num_local_experts": 8, "sliding_window": None},
    "ministral3": {},
    "phi3": {},
    "olmo2": {},
    "olmo3": {"sliding_window": 128},
    "smollm3": {},
    "granite": {},
    "gemma3_text": {"head_dim": 32, "sliding_window": 128},
    "deepseek_v3": {
        "n_routed_experts": 16,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 172,
        "n_group": 1,
        "topk_group": 1,
        "kv_lora_rank": 64,
        "q_lora_rank": 64,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
        "first_k_dense_replace": 1,
    },
    "gpt_oss": {"head_dim": 32, "num_local_experts": 16, "num_experts_per_tok": 4, "sliding_window": 128},
}


def config_values(family: str, sizes: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a config.json of a family."""
    fields = {**SMALL, **sizes, **FAMILIES[family]}
    if "kv_lora_rank" in fields:  # with latent attention, each query head has keys of its own
        fields["num_key_value_heads"] = fields["num_attention_heads"]
    config = transformers.CONFIG_MAPPING[family](**fields)
    cls = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    values: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return values | {"architectures": [cls.__name__]}


def build_twins(family: str) -> dict[str, CausalLM]:
    """Build a family with both implementations, and the same weights where the names correspond."""
    values = config_values(family, {})
    twins = {}
    for implementation in IMPLEMENTATIONS:
        model = models.build(models.parse_config(values, implementation=implementation))
        models.init_weights(model, seed=0)
        twins[implementation] = model.train()
    return twins


def step(model: CausalLM, ids: Tensor, context: MicroBatchContext) -> float:
    """Compute the loss of ids [1, S] and its gradients."""
    for parameter in model.parameters():
        parameter.grad = None
    count = ids.shape[1] - 1
    index, weights = torch.arange(count), torch.full((count,), -1 / count)
    cap = model.config.final_logit_softcapping

    def of_head(hidden: Tensor, weight: Tensor) -> Tensor:
        return weighted_logprob_sum(hidden.flatten(0, 1), weight, ids[0, 1:], weights, index, softcap=cap)

    loss = model.with_head(of_head, ids, context)
    loss.backward()
    return float(loss.detach())


def measure_seconds(family: str, length: int, rounds: int) -> dict[str, float]:
    """Return the least processor seconds of a step of each implementation."""
    twins = build_twins(family)
    ids = torch.randint(0, VOCABULARY, (1, length), generator=torch.Generator().manual_seed(1))
    half = length // 2
    positions = torch.cat([torch.arange(half), torch.arange(length - half)])[None]
    documents = (torch.arange(length) >= half).long()[None]
    context = MicroBatchContext(positions, documents)
    losses = [step(model, ids, context) for model in twins.values()]
    has_same_names = {name for name, _ in twins["native"].named_parameters()} == {
        name for name, _ in twins["transformers"].named_parameters()
    }
    if has_same_names and abs(losses[0] - losses[1]) > 1e-5 * abs(losses[0]):
        raise SystemExit(f"{family}: the losses differ: {losses}")
    seconds = dict.fromkeys(twins, float("inf"))
    for _ in range(rounds):
        for implementation, model in twins.items():
            start = time.process_time()
            step(model, ids, context)
            seconds[implementation] = min(seconds[implementation], time.process_time() - start)
    return seconds


class Planned(NamedTuple):
    """Peak and time that a plan counts for a step on one H100.

    Attributes:
        gib: The peak.
        milliseconds: The estimated time.
    """

    gib: float
    milliseconds: float


def plan_large(family: str, implementation: str, is_compiled: bool) -> Planned:
    """Plan a step of a large model of a family."""
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(config_values(family, LARGE)))
        words = [f"model.path={directory}", f"model.implementation={implementation}"]
        words += [f"train.compile={str(is_compiled).lower()}", "model.init=scratch"]
        words += ["data.train.path=rows.jsonl", "data.max_length=4096", "train.micro_batch=1", "train.global_batch=1"]
        words += ["train.steps=1", "train.activation_checkpointing=none", "parallel.sequence_parallel=false"]
        recipe, problems = recipe_and_problems("sft", words)
        if problems:
            raise SystemExit(str(problems))
        plan = make_plan(recipe, 1, GPUS["h100"])
        return Planned(round(plan.step.peak / 2**30, 2), round(1000 * plan.time.total, 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", metavar="FAMILY", help=f"of {', '.join(FAMILIES)} (default: all)")
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = {}
    for family in arguments.families or FAMILIES:
        seconds = measure_seconds(family, arguments.length, arguments.rounds)
        native, library = plan_large(family, "native", False), plan_large(family, "transformers", False)
        compiled = plan_large(family, "native", True)
        rows[family] = {
            "seconds": {name: round(value, 3) for name, value in seconds.items()},
            "planned": {
                "native": native._asdict(),
                "native, compiled": compiled._asdict(),
                "transformers": library._asdict(),
            },
            "times_as_fast": round(seconds["transformers"] / seconds["native"], 2),
            "times_as_fast_compiled_by_plan": round(library.milliseconds / compiled.milliseconds, 2),
            "of_its_memory_compiled_by_plan": round(compiled.gib / library.gib, 2),
        }
        print(f"{family}: {json.dumps(rows[family])}", file=sys.stderr)
    print(json.dumps({"length": arguments.length, "families": rows}, indent=1))


if __name__ == "__main__":
    main()
