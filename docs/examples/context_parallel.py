"""Context parallel for a model of your own: each rank computes its part of a long sequence.

    torchrun --nproc-per-node 2 context_parallel.py

Inside of the context, torch's scaled_dot_product_attention exchanges keys and values between the ranks. The gradient
is checked against one process.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import dtrain

VOCAB, WIDTH, HEADS, LENGTH = 50, 32, 4, 64


class Model(nn.Module):
    """One layer of causal attention. Everything else works on single tokens."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.position = nn.Embedding(LENGTH, WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, input_ids, position_ids):
        hidden = self.embed(input_ids) + self.position(position_ids)
        qkv = self.qkv(hidden).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)  # [3, B, heads, S, head size]
        attention = F.scaled_dot_product_attention(*qkv, is_causal=True)
        return self.head(hidden + attention.transpose(1, 2).flatten(2))


def loss_of(model, batch):
    logits = model(batch["input_ids"], batch["position_ids"])
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum")


def make_batch():
    rows = torch.randint(0, VOCAB, (2, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(LENGTH).expand(2, -1).contiguous()
    return {"input_ids": rows[:, :-1].clone(), "labels": rows[:, 1:].clone(), "position_ids": positions}


def main():
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    torch.manual_seed(0)
    model = Model().double()

    context, batch = dtrain.make_cp_batch_and_ctx(mesh, make_batch())
    with context():  # inside, the tensors of the batch are this rank's part of them
        loss = loss_of(model, batch)
        loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    dist.all_reduce(loss.detach())
    gradients = [parameter.grad.clone() for parameter in model.parameters()]

    model.zero_grad()
    expected = loss_of(model, make_batch())
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-9, atol=1e-9)
    for gradient, parameter in zip(gradients, model.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-9, atol=1e-9)
    if dist.get_rank() == 0:
        print(f"{mesh.size()} ranks: loss {loss.item():.4f} and gradients are those of one process")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
