"""Small models for the checkpoint tests, with sizes that no mesh divides."""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

VOCAB, DIM = 67, 10


class Tiny(nn.Module):
    """Embedding, two linear layers, a norm's weight and a head, under names like a decoder's."""

    def __init__(self, tied: bool = False, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.model = nn.ModuleDict(
            {
                "embed_tokens": nn.Embedding(VOCAB, DIM, dtype=dtype),
                "up": nn.Linear(DIM, 13, bias=True, dtype=dtype),
                "down": nn.Linear(13, DIM, bias=False, dtype=dtype),
                "norm": nn.LayerNorm(DIM, bias=False, dtype=dtype),
            }
        )
        self.lm_head = nn.Linear(DIM, VOCAB, bias=False, dtype=dtype)
        if tied:
            self.lm_head.weight = self.model["embed_tokens"].weight

    ignored_checkpoint_names = (r".*\.inv_freq",)

    def checkpoint_names(self, name: str) -> list[str]:
        return [name]

    def forward(self, ids):
        hidden = self.model["embed_tokens"](ids)
        hidden = hidden + self.model["down"](torch.tanh(self.model["up"](hidden)))
        return self.lm_head(self.model["norm"](hidden))


def seeded(seed: int, **kwargs) -> Tiny:
    torch.manual_seed(seed)
    return Tiny(**kwargs)


def on_mesh(model: nn.Module, *, replicate: int = 1, shard: int = 1, tp: int = 1) -> nn.Module:
    """`model`, whole and the same on every rank, sharded by torch over a mesh of these sizes."""
    mesh = init_device_mesh("cpu", (replicate, shard, tp), mesh_dim_names=("replicate", "shard", "tp"))
    if tp > 1:
        tied = model.lm_head.weight is model.model["embed_tokens"].weight
        for module in model.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                placement = Shard(0) if name == "weight" and parameter.dim() == 2 else Replicate()
                module.register_parameter(name, nn.Parameter(distribute_tensor(parameter, mesh["tp"], [placement])))
        if tied:
            model.lm_head.weight = model.model["embed_tokens"].weight
    fully_shard(model, mesh=mesh["replicate", "shard"] if replicate > 1 else mesh["shard"])
    return model


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
