"""PPO with a critic (arXiv:1707.06347), written as a user would write it: two trained models and one checkpoint, with
nothing but what dtrain's own objects offer."""

import pytest
import torch

from dtrain.base.batch import IGNORE_INDEX, collate
from dtrain.base.errors import UserError
from dtrain.checkpoint.dcp.store import CheckpointStore
from dtrain.inference.native import NativeEngine
from dtrain.inference.request import Request, SamplingParams
from dtrain.models import read_config
from dtrain.parallel.mesh import Runtime, build_mesh
from dtrain.policy import Policy, load_models, save_models
from dtrain.recipe import derive_sizes
from dtrain.recipe.schema import Optimizer
from tests.cases import run_cases
from tests.tiny import tiny_recipe
from tests.world import run_world

PROMPTS = [[3, 5, 7], [11, 13], [2, 17, 19, 23], [29, 31, 37]]
SAMPLES = 2  # completions of a prompt
NEW_TOKENS = 6
GAMMA, LAMBDA = 1.0, 0.95
CLIP, VALUE_CLIP = 0.2, 0.2
EPOCHS = 2  # updates on the same completions


def to_reward(ids):
    """Scripted reward: the share of even tokens in a completion."""
    return sum(token % 2 == 0 for token in ids) / len(ids)


def values_of(source):
    """The critic's value of every position, [B, S/cp], from its head of one output."""
    return source.token_scores().squeeze(-1)


def critic_loss(source, batch, global_sequences, global_tokens):
    """Half the squared error of values, clipped as PPO clips the ratio."""
    values, old, returns = values_of(source), batch["old_values"], batch["returns"]
    clipped = old + (values - old).clamp(-VALUE_CLIP, VALUE_CLIP)
    errors = torch.maximum((values - returns) ** 2, (clipped - returns) ** 2)
    total = 0.5 * (errors * (batch["labels"] != IGNORE_INDEX)).sum()
    return total / global_tokens, {"value_error": total}


def actor_loss(source, batch, global_sequences, global_tokens):
    """PPO's clipped surrogate."""
    ratio = (source.logprobs().logprobs - batch["old_logprobs"]).exp()
    advantages, trained = batch["advantages"], batch["labels"] != IGNORE_INDEX
    gains = torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
    return -(gains * trained).sum() / global_tokens, {"clipped": ((ratio - 1).abs() > CLIP).logical_and(trained).sum()}


def row_of(prompt, completion):
    ids = torch.tensor([*prompt, *completion.ids])
    labels = ids[1:].clone()
    labels[: len(prompt) - 1] = IGNORE_INDEX
    length = len(labels)
    positions, documents = torch.arange(length), torch.zeros(length, dtype=torch.int64)
    return {"input_ids": ids[:-1], "labels": labels, "position_ids": positions, "seq_ids": documents}


def advantages_of(values, labels, rewards):
    """Generalised advantage estimation (arXiv:1506.02438) over the completion's tokens; the reward is at its end."""
    advantages = torch.zeros_like(values)
    for row, reward in enumerate(rewards):
        places = (labels[row] != IGNORE_INDEX).nonzero().flatten().tolist()
        following_value, advantage, gain = 0.0, 0.0, reward
        for place in reversed(places):
            error = gain + GAMMA * following_value - values[row, place]
            advantage = error + GAMMA * LAMBDA * advantage
            advantages[row, place] = advantage
            following_value, gain = values[row, place], 0.0
    return advantages


class Ppo:
    def __init__(self, rank, recipe, world_size):
        runtime = Runtime(rank=rank, local_rank=rank, world_size=world_size)
        shape = derive_sizes(recipe, world_size)
        mesh = build_mesh(runtime, dp_shard=shape.dp_shard, cp=shape.cp, tp=shape.tp)
        self.policy = Policy(recipe, read_config(recipe.model.path), mesh, runtime)
        adapters = None if recipe.lora is None else True
        self.critic = self.policy.another(labels=1, optimizer=Optimizer(lr=3e-3), adapters=adapters)
        for model in (self.policy, self.critic):
            model.init_optimizer(total_steps=100)
        self.engine = NativeEngine(self.policy)
        self.models = {"policy": self.policy.checkpoint, "critic": self.critic.checkpoint}

    def step(self, number):
        """Sample, judge, and update both models; return the numbers of the last update."""
        sampling = SamplingParams(NEW_TOKENS)
        asked = [(index, sample) for index in range(len(PROMPTS)) for sample in range(SAMPLES)]
        requests = [Request(PROMPTS[index], sampling, 1000 + number, index, sample) for index, sample in asked]
        completions = self.engine.generate(requests)
        mesh = self.policy.mesh
        mine = range(mesh.dp_rank, len(asked), mesh.dp_size)
        batch = collate([row_of(PROMPTS[asked[index][0]], completions[index]) for index in mine])
        rewards = [to_reward(completions[index].ids) for index in mine]
        values = self.critic.token_values(batch, values_of)
        batch["old_values"], batch["old_logprobs"] = values, self.policy.logprobs(batch)
        batch["advantages"] = advantages_of(values, batch["labels"], rewards)
        batch["returns"] = batch["advantages"] + values
        for _ in range(EPOCHS):
            results = []
            for model, loss in ((self.policy, actor_loss), (self.critic, critic_loss)):
                result = model.forward_backward(batch, loss)
                update = model.optimizer_step()
                results += [result.loss, update.grad_norm, *result.metrics.values()]
        return [*results, *(token for completion in completions for token in completion.ids)]


def trained(rank, recipe, world_size, steps):
    ppo = Ppo(rank, recipe, world_size)
    return [ppo.step(number) for number in range(steps)]


def resumed(rank, recipe, world_size, at):
    first, store = Ppo(rank, recipe, world_size), CheckpointStore(at)
    for number in range(2):
        first.step(number)
    save_models(store, 2, first.models, {"step": 2})
    second = Ppo(rank, recipe, world_size)
    state = load_models(store, 2, second.models)
    names = {name.split(".")[0] for name in store.tensor_specs(2)}
    with pytest.raises(UserError, match="has the models critic, policy, and policy are to be loaded"):
        load_models(store, 2, {"policy": second.policy.checkpoint})
    with pytest.raises(ValueError, match="a model cannot be named 'model'"):
        save_models(store, 3, {"model": first.critic.checkpoint}, {})
    return [first.step(2), first.step(3)], [second.step(state["step"]), second.step(3)], sorted(names)


def recipe_at(tmp_path, *more):
    fixed = "train.global_batch=8", "train.micro_batch=2", "optimizer.lr=1e-3", "scheduler.warmup_steps=0"
    return tiny_recipe(tmp_path, *fixed, *more)


MESHES = {
    "dp 2": [],
    "tp 2": ["parallel.tp=2", "parallel.sequence_parallel=false"],
    "sequence parallel": ["parallel.tp=2", "parallel.sequence_parallel=true"],
    "cp 2": ["parallel.cp=2"],
}


@pytest.mark.parametrize("trained_part", [[], ["lora={rank: 4, dropout: 0.1}"]], ids=["all weights", "adapters"])
def test_two_ranks_have_the_numbers_of_one(tmp_path, trained_part):
    recipe = recipe_at(tmp_path, *trained_part)
    (expected,) = run_world(trained, 1, recipe, 1, 4)
    assert expected[0][4] != expected[-1][4]  # the critic learns
    cases = {name: (recipe_at(tmp_path, *mesh, *trained_part), 2, 4) for name, mesh in MESHES.items()}
    for name, ranks in run_cases(trained, 2, cases).items():
        for found in ranks:
            for own, others in zip(found, expected, strict=True):
                assert own == pytest.approx(others, rel=1e-9, abs=1e-12), name


def refused(rank, recipe, words):
    runtime = Runtime(rank=rank, local_rank=rank, world_size=1)
    policy = Policy(recipe, read_config(recipe.model.path), build_mesh(runtime), runtime)
    adapters = recipe.lora is None or None
    with pytest.raises(UserError, match=words):
        policy.another(labels=1, adapters=adapters)
    critic = policy.another(labels=1, adapters=False)
    assert critic.model.adapters is None and all(weight.requires_grad for weight in critic.model.parameters())


@pytest.mark.parametrize(("lora", "words"), [([], "the recipe has no section lora"), (["lora={}"], "Pass adapters=T")])
def test_adapters_of_a_second_model_must_be_chosen(tmp_path, lora, words):
    run_world(refused, 1, recipe_at(tmp_path, *lora), words)


@pytest.mark.parametrize(("world_size", "has_adapters"), [(1, False), (2, False), (2, True)])
def test_both_models_are_resumed_exactly(tmp_path, world_size, has_adapters):
    recipe = recipe_at(tmp_path, *(["parallel.tp=2", "lora={rank: 4}"] if has_adapters else []))
    for expected, found, names in run_world(resumed, world_size, recipe, world_size, tmp_path / "saved"):
        assert found == expected
        assert names == ["critic", "model", "optim"]
