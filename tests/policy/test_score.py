"""`LogprobSource.logprobs` inside the model's forward on a mesh: loss, norm and entropy of one process, any mesh."""

import pytest

from dtrain.base.batch import IGNORE_INDEX, collate
from dtrain.methods.sft import SftMethod
from dtrain.models.read_config import read_config
from dtrain.parallel.mesh import Runtime, build_mesh
from dtrain.policy import Policy
from dtrain.recipe import derive_sizes
from dtrain.training import load_recipe
from tests.cases import run_cases
from tests.policy.test_policy import rows
from tests.stepping import train_step
from tests.tiny import tiny_recipe


def by_token(source, batch, global_seqs, global_tokens):
    """A loss of log-probabilities and entropies that no weighted sum can express."""
    values = source.logprobs(temperature=0.8, entropy=True, log_p2=True)
    assert values.logprobs.shape == values.log_p2.shape == batch["labels"].shape
    probabilities = values.logprobs.exp() * (batch["labels"] != IGNORE_INDEX)
    loss = -(probabilities * 3 + 0.1 * values.entropy).sum() / global_tokens
    return loss, {}


def sum_by_token(source, batch, global_seqs, global_tokens):
    return -source.logprobs().logprobs.sum() / global_tokens, {}


def two_steps(rank, recipe, world_size, loss_fn):
    derived = derive_sizes(recipe, world_size)
    runtime = Runtime(rank=rank, world_size=world_size)
    mesh = build_mesh(runtime, dp_shard=derived.dp_shard, cp=recipe.parallel.cp, tp=recipe.parallel.tp)
    policy = Policy(recipe, read_config(recipe.model.path), mesh, runtime)
    policy.init_optimizer(4)
    loss_fn = SftMethod(load_recipe({})).loss if loss_fn == "sft" else loss_fn
    results = [train_step(policy, collate(rows(4)), loss_fn) for _ in range(2)]
    return [([result.loss], result.grad_norm) for result in results]


def flat(results):
    return [number for losses, norm in results for number in (*losses, *(norm if isinstance(norm, list) else [norm]))]


def test_losses_of_tokens_are_those_of_one_process(tmp_path):
    def on(tp, cp, *losses):
        shape = ("train.global_batch=4", "scheduler.warmup_steps=0", f"parallel.tp={tp}", f"parallel.cp={cp}")
        recipe = tiny_recipe(tmp_path, *shape)
        cases = {getattr(loss_fn, "__name__", loss_fn): (recipe, tp * cp, loss_fn) for loss_fn in losses}
        return [flat(ranks[0]) for ranks in run_cases(two_steps, tp * cp, cases).values()]

    mine, of_sums = on(2, 2, by_token, sum_by_token)
    alone, *others = on(1, 1, by_token, sum_by_token, "sft")
    assert mine == pytest.approx(alone, rel=1e-9)
    for expected in others:
        assert of_sums == pytest.approx(expected, rel=1e-9)
