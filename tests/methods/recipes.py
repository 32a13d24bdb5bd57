"""Tiny recipes of every method."""

from pathlib import Path

from dtrain.recipe.schema import Recipe
from tests.methods import test_distill, test_kto, test_on_policy, test_reward
from tests.methods.test_dpo_runs import recipe_of as dpo
from tests.methods.test_grpo_runs import RICH
from tests.tiny import tiny_grpo, tiny_recipe


def reward(task):
    def recipe_of(root, *overrides, **options):
        return test_reward.recipe_at(root, task, *overrides, **options)

    return recipe_of


# name: (maker of its recipe, overrides)
METHODS = {
    "sft": (tiny_recipe, ()),
    "dpo": (dpo, ("data.max_length=24", "dpo.sft_weight=0.1", "dpo.use_weighting=true", "dpo.sync_every=2")),
    "dpo over the batch": (dpo, ("data.max_length=24", "dpo.loss=[sigmoid,aot]", "dpo.label_smoothing=0.1")),
    "kto": (test_kto.recipe_of, ()),
    # Truncated completions are trained too, so that many of a group share their prompt.
    "grpo": (tiny_grpo, ("grpo.prompts_per_step=6", "grpo.mask_truncated=false", *RICH)),
    "grpo in turns": (
        tiny_grpo,
        (
            "grpo.prompts_per_step=6",
            "grpo.environment=tests.methods.judges.Asks",
            "grpo.rewards=[]",
            "grpo.sampling.stop=[w1,w2,w3]",
            "grpo.unshard=false",
        ),
    ),
    "distill": (test_distill.recipe_at, ("distill.kl=mixed", "distill.temperature=2.0")),
    "distill top k": (test_distill.recipe_at, ("distill.top_k=7", "distill.kl=jsd", "distill.jsd_beta=0.3")),
    "on-policy": (test_on_policy.recipe_at, ("distill.prompts_per_step=24", "distill.student_share=0.5")),
    "pairs": (reward("pairs"), ()),
    "classes": (reward("classes"), ()),
}


def recipe_of(root, method: str, *overrides: str, name: str, family: str = "qwen3") -> Recipe:
    """Return a recipe of METHODS: 3 steps of 12 samples in float64, validated on 7 samples and saved at the last."""
    make, options = METHODS[method]
    steps = ("train.steps=3", "checkpoint.every=3", "scheduler.warmup_steps=0", "train.global_batch=12")
    validated = ("data.val.path=${data.train.path}", "train.validate_every=3")
    recipe = make(root, *options, *steps, *validated, *overrides, name=name, family=family)
    rows = Path(recipe.data.train.path)
    recipe.data.val.path = str(rows.with_suffix(".val.jsonl"))
    Path(recipe.data.val.path).write_text("".join(rows.read_text().splitlines(keepends=True)[:7]))
    return recipe
