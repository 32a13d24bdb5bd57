"""A training loop of your own. dtrain places the model on the mesh, and you decide what happens in a step.

    python own_loop.py model.path=Qwen/Qwen3-0.6B launch.nproc=2 parallel.tp=2

The numbers are the same on every mesh, for example with launch.nproc=1.
"""

import sys

import torch

import dtrain

STEPS = 20
GLOBAL_BATCH = 8


def make_global_batch(step):
    """Return the rows of a step, [8, 33]. They count upwards, which a model learns quickly."""
    generator = torch.Generator().manual_seed(step)
    first = torch.randint(0, 50, (GLOBAL_BATCH, 1), generator=generator)
    return (first + torch.arange(33)) % 64


def cross_entropy(source, batch, global_sequences, global_tokens):
    """Return this micro-batch's part of the mean loss. dtrain adds up the parts of all micro-batches and ranks."""
    loss = -source.weighted_sum() / global_tokens
    return loss, {}


def train(recipe, runtime):
    """Train on one rank. This function is called on every rank, whatever started the processes."""
    policy = dtrain.Policy.from_recipe(recipe, runtime)
    policy.init_optimizer(total_steps=STEPS)
    mesh = policy.mesh
    for step in range(STEPS):
        # Each data-parallel rank takes its own rows. The tp and cp ranks of a data-parallel rank take the same rows.
        rows = make_global_batch(step)[mesh.dp_rank :: mesh.dp_size]
        batch = {"input_ids": rows[:, :-1], "labels": rows[:, 1:]}
        result = policy.forward_backward(batch, cross_entropy, micro_batch_size=2)
        update = policy.optimizer_step()
        if runtime.is_main:
            print(f"step {step + 1}: loss {result.loss:.6f}, gradient norm {update.grad_norm:.4f}")


if __name__ == "__main__":
    dtrain.run("sft", ["run.name=own-loop", "optimizer.lr=1e-3", *sys.argv[1:]], train=train)
