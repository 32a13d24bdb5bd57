"""Every method on every mesh has the numbers of one process: each pair of options meets in a run.

The usual tests run each option once. The pairs are among the extended ones (tests/extended.txt).

All fields of metrics.jsonl but times, the completions and the weights after the last step, relative: 1e-9 in float64.
tests/test_every_pair.py does the same for the options of SFT.
"""

from functools import partial

import pytest

from tests.covering import covering, each_value, worlds
from tests.methods.comparing import assert_same_run
from tests.methods.recipes import METHODS, recipe_of
from tests.running import assert_each, run, run_all
from tests.tiny import tiny_grpo

# Options that decide numbers: the one process has them too.
MODEL = {
    "method": {name: [] for name in METHODS if name != "sft"},
    "family": {"gemma3": [], "qwen3-moe": []},
    "rows": {"packed": ["data.packing=true"], "padded": ["data.packing=false"]},
    "trained": {"all": [], "LoRA": ["lora={rank: 4, dropout: 0.2}"]},
}
# Options that change no number: the one process has none of them.
MESH = {
    "mesh": {
        "dp3": [],
        "cp3": ["parallel.cp=3"],
        "tp2 cp2": ["parallel.tp=2", "parallel.cp=2", "parallel.cp_rotate=ring"],
    },
    "micro-batches": {
        "of rows": [],
        "by tokens": ["train.dynamic_batch=true"],
    },
    "prompts": {"shared": ["train.share_prompts=true"], "shared if it pays": []},
    "checkpointing": {name: [f"train.activation_checkpointing={name}"] for name in ("none", "full")},
}
AXES = MODEL | MESH
# The one process computes every sequence on its own.
ALONE = ["train.share_prompts=false"]
# A model of rewards trains its head beside an adapter.
HEAD = "lora.modules_to_save=[score]"


def ranks_of(case):
    return 3 if case["mesh"] in ("dp3", "cp3") else 4


def can_run(case):
    shares = case.get("method") not in ("distill", "distill top k", "classes")
    if case.get("prompts") == "shared" and not shares:
        return False
    return not (case.get("rows") == "packed" and case.get("micro-batches") == "by tokens")


def cost_of(case):
    draws = case["method"] in ("grpo", "grpo in turns", "on-policy", "kto")
    return ranks_of(case) * (3 if draws else 2)


CASES = covering({name: [*values] for name, values in AXES.items()}, allows=can_run, cost=cost_of)
EACH_OPTION = each_value(CASES, cost_of)
OTHERS = [case for case in CASES if case not in EACH_OPTION]


def overrides_of(case, axes):
    chosen = [option for axis, values in axes.items() for option in values[case[axis]]]
    if "mesh" in axes:
        dp = 3 if case["mesh"] == "dp3" else 1
        chosen.append(f"train.micro_batch={12 // (2 * dp)}")
    if case["trained"] == "LoRA" and case["method"] in ("pairs", "classes"):
        chosen.append(HEAD)
    return chosen


@pytest.mark.trap(
    "KTO's KL estimated from another number of rows than the step has",
    "huggingface/trl PR#2153",
    "results depend on gradient accumulation",
    "the same KL on every mesh and at any split",
)
@pytest.mark.parametrize("cases", [pytest.param(cases, id=name) for name, cases in worlds(EACH_OPTION, ranks_of, 5)])
def test_runs_on_meshes_are_those_of_one_process(tmp_path, cases):
    run_and_compare(tmp_path, cases)


@pytest.mark.parametrize("cases", [pytest.param(cases, id=name) for name, cases in worlds(OTHERS, ranks_of, 5)])
def test_pairs_of_options_on_meshes_are_those_of_one_process(tmp_path, cases):
    run_and_compare(tmp_path, cases)


def run_and_compare(tmp_path, cases):
    alone, on_mesh = [], []
    for number, case in enumerate(cases):
        root = tmp_path / str(number)
        root.mkdir()
        shape = {"family": case["family"]}
        alone.append(
            recipe_of(
                root, case["method"], *overrides_of(case, MODEL), "train.micro_batch=12", *ALONE, name="alone", **shape
            )
        )
        on_mesh.append(recipe_of(root, case["method"], *overrides_of(case, AXES), name="mesh", **shape))
    run_all(alone)
    run_all(on_mesh, ranks_of(cases[0]))
    assert_each(
        [
            (", ".join(case.values()), partial(assert_same_run, *runs))
            for *runs, case in zip(on_mesh, alone, cases, strict=True)
        ]
    )


LOSSES = ["grpo", "dr_grpo", "dapo", "bnpo", "gspo", "gspo_token", "cispo", "sapo", "luspo", "vespo", "dppo_tv"]
LOSSES += ["dppo_kl", "gmpo", "reinforce"]


@pytest.mark.trap(
    "a loss divided by the tokens of the whole rollout at each of its steps",
    "huggingface/trl PR#6024",
    "the learning rate is not the one that was set",
    "losses are the same at any split",
)
def test_losses_of_grpo_do_not_depend_on_the_split(tmp_path):
    """One micro-batch of eight padded rows, against packed rows two by two on two ranks."""
    whole, split = [], []
    for loss in LOSSES:
        fixed = (f"grpo.loss={loss}", "grpo.clip=[0.2,5.0]" if loss == "cispo" else "grpo.beta=0", "train.steps=2")
        fixed += ("checkpoint.every=2", "scheduler.warmup_steps=0")
        padded = ("data.packing=false", "train.micro_batch=8")
        whole.append(run(tiny_grpo(tmp_path, *fixed, *padded, name=f"{loss} whole")))
        split.append(tiny_grpo(tmp_path, *fixed, "data.packing=true", "train.micro_batch=2", name=f"{loss} split"))
    run_all(split, 2)
    assert_each([(loss, partial(assert_same_run, *runs)) for *runs, loss in zip(split, whole, LOSSES, strict=True)])
