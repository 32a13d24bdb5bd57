"""What `MetaKernels` remembers of operations is what torch computes for meta tensors."""

import pytest
import torch

from dtrain.commands.plan.planned_device import MetaKernels


def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


CALLS = {
    "an int and a float": lambda: [meta(2, 3, dtype=torch.int64) * 2, meta(2, 3, dtype=torch.int64) * 2.0],
    "strides": lambda: [meta(4, 6) + 1, meta(6, 4).t() + 1, meta(4, 1).expand(4, 6) + 1],
    "dtypes": lambda: [meta(3) + meta(3), meta(3) + meta(3, dtype=torch.float32), meta(3) + meta()],
    "several results": lambda: [*meta(5, 7).topk(2), *meta(5, 7).sort()],
    "lists": lambda: [torch.cat([meta(2, 3), meta(4, 3)]), torch.cat([meta(2, 3), meta(2, 3)])],
    "new tensors": lambda: [meta(2, 3), torch.arange(5, device="meta"), torch.zeros(3, device="meta")],
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_results_are_torchs(call):
    expected = [(out.shape, out.stride(), out.dtype, out.untyped_storage().nbytes()) for out in call()]
    with MetaKernels():
        for _ in range(2):
            outputs = call()
            assert [(out.shape, out.stride(), out.dtype, out.untyped_storage().nbytes()) for out in outputs] == expected
            assert len({out.untyped_storage()._cdata for out in outputs}) == len(outputs)


def test_storages_are_those_of_the_arguments_where_torch_says_so():
    with MetaKernels():
        for _ in range(2):
            x = meta(2, 6)
            assert x.mul_(2) is x
            assert torch.ops.aten._unsafe_view(x, [3, 4]).untyped_storage()._cdata == x.untyped_storage()._cdata
            assert (x + 1).untyped_storage()._cdata != x.untyped_storage()._cdata
            other = meta(2, 6)
            other.set_(x)
            assert other.untyped_storage()._cdata == x.untyped_storage()._cdata


def test_tensors_of_the_host_are_computed():
    with MetaKernels():
        assert [(torch.arange(3) + step).tolist() for step in (0, 1, 1)] == [[0, 1, 2], [1, 2, 3], [1, 2, 3]]
