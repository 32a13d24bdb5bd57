"""Plugin of vLLM on a machine without a GPU: its weight transfer `gloo`, which is vLLM's own `nccl` (its routes, its
checks, its packed messages, its loading) but for the group, which is torch's gloo, and for streams of CUDA, of which
there are none. Where the group meets stands in the 128 bytes of `nccl_unique_id_b64`. `server_transfer` has the other
end.
"""

from contextlib import nullcontext
from types import SimpleNamespace

GROUP = "gloo-transfer"
STREAM = SimpleNamespace(synchronize=lambda: None)


def register() -> None:
    """Add the engine to vLLM, as its entry point `vllm.general_plugins`."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if "gloo" not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine("gloo", "gloo_transfer", "engine")


def __getattr__(name: str):
    """Give `engine`, the class, when vLLM asks for it: its module is not to be imported before."""
    if name != "engine":
        raise AttributeError(name)
    import torch
    import torch.distributed as dist
    from vllm.distributed.weight_transfer import packed_tensor
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

    packed_tensor._get_streams = lambda index, count: (STREAM,) * count
    packed_tensor.torch = SimpleNamespace(
        **{key: getattr(torch, key) for key in ("Tensor", "cat", "empty", "uint8", "dtype")},
        accelerator=SimpleNamespace(current_device_index=lambda: 0),
        cuda=SimpleNamespace(stream=lambda stream: nullcontext()),
    )
    torch.accelerator.synchronize = lambda *arguments: None

    class GlooTransferEngine(NCCLWeightTransferEngine):
        def init_transfer_engine(self, init_info):
            self.packed, self.packed_buffer_size_bytes = init_info.packed, init_info.packed_buffer_size_bytes
            host, port = init_info.nccl_unique_id_bytes.rstrip(b"\0").decode().split(":")
            rank = init_info.rank_offset + self.parallel_config.rank
            store = dist.TCPStore(host, int(port), init_info.world_size)
            for prefix in (GROUP, f"{GROUP}/", "cpu/"):
                store = dist.PrefixStore(prefix, store)
            group = dist.ProcessGroupGloo(store, rank, init_info.world_size)
            total = torch.zeros(1)
            group.allreduce(total).wait()  # the first sum, as of vLLM's communicator
            self.model_update_group = SimpleNamespace(
                broadcast=lambda tensor, src, stream=None: group.broadcast(tensor, src).wait(), destroy=lambda: None
            )

    return GlooTransferEngine
