"""PPO with a critic (arXiv:1707.06347): two models on one mesh, sampling, and one checkpoint of both.

    python ppo.py model.path=Qwen/Qwen3-0.6B launch.nproc=2

The reward is the share of even token ids, so that the example needs no data. The advantage is reward − value.
"""

import sys

import torch

import dtrain
from dtrain.recipe.schema import Optimizer

STEPS, SAMPLES, NEW_TOKENS, CLIP, IGNORED = 20, 8, 8, 0.2, -100
PROMPTS = [[3, 5, 7], [11, 13], [2, 17, 19, 23], [29, 31, 37]]


def reward_of(ids):
    return sum(token % 2 == 0 for token in ids) / len(ids)


def make_row(prompt, ids):
    """Return a row of a batch. Labels are the next tokens, and the prompt has none."""
    tokens = torch.tensor([*prompt, *ids])
    labels = tokens[1:].clone()
    labels[: len(prompt) - 1] = IGNORED
    positions = torch.arange(len(labels))
    return {"input_ids": tokens[:-1], "labels": labels, "position_ids": positions, "seq_ids": torch.zeros_like(labels)}


def values_of(source):
    return source.token_scores().squeeze(-1)  # [B, S/cp], from a head of one output


def critic_loss(source, batch, global_sequences, global_tokens):
    is_trained = batch["labels"] != IGNORED
    errors = (values_of(source) - batch["returns"]) ** 2
    return 0.5 * (errors * is_trained).sum() / global_tokens, {}


def policy_loss(source, batch, global_sequences, global_tokens):
    is_trained = batch["labels"] != IGNORED
    ratio = (source.logprobs().logprobs - batch["old_logprobs"]).exp()
    gains = torch.minimum(ratio * batch["advantages"], ratio.clamp(1 - CLIP, 1 + CLIP) * batch["advantages"])
    return -(gains * is_trained).sum() / global_tokens, {}


def train(recipe, runtime):
    policy = dtrain.Policy.from_recipe(recipe, runtime)
    critic = policy.another(labels=1, optimizer=Optimizer(lr=3e-3))
    for model in (policy, critic):
        model.init_optimizer(total_steps=2 * STEPS)
    engine = dtrain.NativeEngine(policy)
    mesh = policy.mesh
    jobs = [(index, sample) for index in range(len(PROMPTS)) for sample in range(SAMPLES)]
    for step in range(STEPS):
        sampling = dtrain.SamplingParams(NEW_TOKENS, temperature=1.0)
        requests = [dtrain.Request(PROMPTS[index], sampling, step, index, sample) for index, sample in jobs]
        completions = engine.generate(requests)  # every rank passes all requests, and gets all completions
        own = range(mesh.dp_rank, len(jobs), mesh.dp_size)
        batch = dtrain.collate([make_row(PROMPTS[jobs[number][0]], completions[number].ids) for number in own])
        rewards = torch.tensor([reward_of(completions[number].ids) for number in own])
        batch["returns"] = rewards[:, None].expand(batch["labels"].shape).contiguous()
        batch["advantages"] = batch["returns"] - critic.token_values(batch, values_of)
        batch["old_logprobs"] = policy.logprobs(batch)
        for _ in range(2):  # updates on the same completions
            for model, loss in ((policy, policy_loss), (critic, critic_loss)):
                model.forward_backward(batch, loss)
                model.optimizer_step()
        if runtime.is_main:
            print(f"step {step + 1}: mean reward {sum(reward_of(done.ids) for done in completions) / len(jobs):.3f}")
    store = dtrain.CheckpointStore(recipe.run.directory / "checkpoints")
    models = {"policy": policy.checkpoint, "critic": critic.checkpoint}
    dtrain.save_models(store, STEPS, models, {"step": STEPS})  # read back by dtrain.load_models


if __name__ == "__main__":
    dtrain.run("sft", ["run.name=ppo", "optimizer.lr=3e-3", "train.micro_batch=4", *sys.argv[1:]], train=train)
