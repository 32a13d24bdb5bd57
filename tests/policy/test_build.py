"""Choice of the attention kernel that a model is built with."""

import pytest
import torch

from dtrain.attention import varlen
from dtrain.base.errors import UserError
from dtrain.models.read_config import read_config
from dtrain.parallel.mesh import Mesh, Runtime
from dtrain.policy import build
from dtrain.policy.options import BuildOptions, choose_precision
from tests.tiny import tiny_recipe
from tests.world import run_world


def kernel_of(recipe, device, **more):
    """The kernel of a model laid out for `device`, which no tensor touches: everything is on meta."""
    from dtrain.parallel.mesh import build_mesh

    mesh: Mesh = build_mesh(Runtime(), dp_replicate=1, dp_shard=1, cp=1, tp=1)
    precision = choose_precision(recipe.train.dtype, device.type)
    model = build.build_on_meta(recipe, read_config(recipe.model.path), mesh, precision, device, BuildOptions(**more))
    (kernel,) = {id(layer.self_attn.kernel): layer.self_attn.kernel for layer in model.model.layers}.values()
    return kernel


def choices(rank, root):
    asked = []

    def proof(problem):
        def prove(kernel, **shape):
            asked.append(shape)
            return problem

        return prove

    cuda = torch.device("cuda", 0)
    half = tiny_recipe(root, "train.dtype=bfloat16", family="gemma3")
    own = varlen.check_varlen
    try:
        varlen.check_varlen = proof(None)
        assert kernel_of(half, cuda).name == "varlen"
        assert asked.pop() == {
            "heads": 4, "key_heads": 2, "head_dim": 16, "value_dim": 16, "window": 6,
            "dtype": torch.bfloat16, "device": cuda, "exchange": None, "sinks": False, "is_later": False,
            "shares_beginnings": True,
        }  # fmt: skip
        kernel_of(tiny_recipe(root, "train.dtype=bfloat16", "train.share_prompts=false", family="gemma3"), cuda)
        assert not asked.pop()["shares_beginnings"]
        for other in (tiny_recipe(root, "train.dtype=float32"), tiny_recipe(root, "model.attention=sdpa")):
            assert kernel_of(other, cuda).name == "sdpa"
        assert kernel_of(half, torch.device("cpu")).name == "sdpa" and not asked
        varlen.check_varlen = proof("varlen does not run here: too old")
        chosen = kernel_of(half, cuda)
        assert (chosen.name, chosen.note) == ("sdpa", "varlen does not run here: too old")
        wanted = tiny_recipe(root, "train.dtype=bfloat16", "model.attention=varlen")
        with pytest.raises(UserError, match="model.attention=varlen: varlen does not run here: too old; set"):
            kernel_of(wanted, cuda)
        long = "data.max_length=16385"
        with pytest.raises(UserError, match="data.max_length=16385: varlen does not run here: too old. Without it"):
            kernel_of(tiny_recipe(root, "train.dtype=bfloat16", long), cuda)
        packed = tiny_recipe(root, "train.dtype=bfloat16", "data.max_length=8192")
        with pytest.raises(UserError, match="rows of 16386: .* 16386 × 16386: set data.max_length=8191 or less"):
            kernel_of(packed, cuda, max_row_length=16386)
        assert kernel_of(packed, cuda, max_row_length=16384).name == "sdpa"
        for able in ("data.max_length=16384", "model.attention=sdpa"):
            assert kernel_of(tiny_recipe(root, "train.dtype=bfloat16", long, able), cuda).name == "sdpa"
        varlen.check_varlen = own
        with pytest.raises(UserError, match="model.attention=varlen: varlen does not run here"):
            kernel_of(wanted, torch.device("cpu"))
    finally:
        varlen.check_varlen = own


def test_the_kernel_is_the_one_that_proves_itself(tmp_path):
    run_world(choices, 1, tmp_path)


def deltas(rank, root):
    from dtrain.attention.linear import flash

    cuda, cpu, asked = torch.device("cuda", 0), torch.device("cpu"), []
    own = flash.installed_flash_delta, flash.check_flash_delta
    rule = flash.FlashDelta(lambda *parts, **more: (parts[2], None))

    def chosen(*keys, device=cuda, dtype="bfloat16", family="qwen3.5"):
        recipe = tiny_recipe(root, f"train.dtype={dtype}", *keys, family=family)
        precision = choose_precision(dtype, device.type)
        return build.choose_delta(recipe, read_config(recipe.model.path), precision, device)

    fla = "model.linear_attention=fla"
    try:
        assert chosen()[0] is None and "is not installed (pip install 'dtrain[fla]')" in chosen()[1]
        with pytest.raises(UserError, match="model.linear_attention=fla: flash-linear-attention is not installed"):
            chosen(fla)
        flash.installed_flash_delta, flash.check_flash_delta = lambda: rule, lambda rule, **shape: asked.append(shape)
        assert chosen("parallel.tp=2", "parallel.cp=2") == (rule, "")
        sizes = read_config(root / "qwen3.5-tied").linear_attention
        assert asked.pop() == {
            "key_heads": sizes.num_key_heads // 2, "value_heads": sizes.num_value_heads // 2, "key_dim": sizes.key_dim,
            "value_dim": sizes.value_dim, "dtype": torch.bfloat16, "device": cuda, "exchanges": True,
        }  # fmt: skip
        assert chosen("model.linear_attention=torch") == chosen(dtype="float32") == chosen(device=cpu) == (None, "")
        assert chosen("run.deterministic=true")[0] is None and not asked
        assert chosen(family="qwen3") == chosen(fla, family="qwen3") == (None, "") and not asked
        flash.check_flash_delta = lambda rule, **shape: "other numbers"
        assert chosen() == (None, "other numbers")
        with pytest.raises(UserError, match="model.linear_attention=fla: other numbers; set .*=auto or torch"):
            chosen(fla)
    finally:
        flash.installed_flash_delta, flash.check_flash_delta = own


def test_linear_attention_is_by_the_library_that_proves_itself(tmp_path):
    run_world(deltas, 1, tmp_path)


def of_two(rank, root, rotate):
    """The kernels where rank 1 alone finds a problem, and where none does."""
    from dtrain.parallel.mesh import build_mesh

    cuda, own, names = torch.device("cuda", rank), varlen.check_varlen, []
    recipe = tiny_recipe(root, "train.dtype=bfloat16", "parallel.cp=2", f"parallel.cp_rotate={rotate}")
    mesh = build_mesh(Runtime(rank=rank), dp_replicate=1, dp_shard=1, cp=2, tp=1)
    precision = choose_precision("bfloat16", "cuda")
    try:
        for problem in (None, "too old"):
            varlen.check_varlen = lambda kernel, exchange, problem=problem, **_: problem if rank == 1 else None
            model = build.build_on_meta(recipe, read_config(recipe.model.path), mesh, precision, cuda)
            names.append((model.model.kernel.name, model.model.kernel.note))
    finally:
        varlen.check_varlen = own
    return names


@pytest.mark.parametrize(
    ("rotate", "by_flash", "by_mask"),
    [("allgather", "varlen over gathered keys", "sdpa over gathered keys"), ("ring", "varlen ring", "ring")],
)
def test_the_ranks_of_context_parallel_take_one_kernel(tmp_path, rotate, by_flash, by_mask):
    tiny_recipe(tmp_path)
    assert run_world(of_two, 2, tmp_path, rotate) == [[(by_flash, ""), (by_mask, "too old")]] * 2
