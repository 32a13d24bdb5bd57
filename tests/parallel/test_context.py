"""The public face of context parallel: what is cut, padded, restored, and handed through."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from dtrain.parallel import context
from dtrain.parallel.context import (
    create_context_parallel_ctx,
    gather_tokens,
    get_train_context,
    make_cp_batch_and_ctx,
    shard_tokens,
)
from dtrain.parallel.context.batch import shard_streams
from tests.world import run_world


class Dimension:
    """One dimension of a mesh, as users' tests hand it in."""

    def __init__(self, size, rank=0):
        self._size, self._rank = size, rank

    def size(self):
        return self._size

    def get_local_rank(self):
        return self._rank

    def get_group(self):
        return None


class GroupAlone:
    """A dimension that knows no rank of its own."""

    def size(self):
        return 2

    def get_group(self):
        return "the group"


class StandIn(dict):
    mesh_dim_names = ("cp", "tp")

    def __init__(self, cp, rank=0):
        super().__init__(cp=Dimension(cp, rank), tp=Dimension(1))


def held(length, size, rank):
    """The tokens of a rank, by the definition of head and tail."""
    chunk = length // (2 * size)
    return [t for c in (rank, 2 * size - 1 - rank) for t in range(c * chunk, (c + 1) * chunk)]


def padded(values, multiple, pad):
    return values + [pad] * (-len(values) % multiple)


def a_batch(length=10):
    ids = torch.arange(1, length + 1)
    return {"input_ids": torch.stack([ids, ids + 100]), "labels": torch.stack([ids + 1, ids + 101])}


@pytest.mark.trap(
    "padding for context parallel lies inside the chunks",
    "NVIDIA/TransformerEngine #1929",
    "tokens count as padding, padding as tokens",
    "every stream is padded alike before it is cut",
)
@pytest.mark.parametrize(("size", "rank"), [(s, r) for s in (2, 3, 4) for r in range(s)])
@pytest.mark.parametrize("length", [10, 24])
def test_every_stream_is_padded_and_cut_and_positions_alone_come_back(size, rank, length):
    batch = {
        **a_batch(length),
        "attention_mask": torch.ones(2, length),
        "seq_ids": torch.zeros(2, length, dtype=torch.int64),
        "padding_mask": torch.zeros(2, length, dtype=torch.bool),
        "lengths": torch.tensor([length, length]),
    }
    mask = torch.ones(2, length)
    expected = {
        "input_ids": (batch["input_ids"][1].tolist(), 9),
        "labels": (batch["labels"][1].tolist(), -100),
        "seq_ids": ([0] * length, -1),
        "padding_mask": ([False] * length, True),
        "loss_mask": ([1.0] * length, 0.0),
    }
    whole = length + -length % (2 * size)
    ctx, same = make_cp_batch_and_ctx(StandIn(size, rank), batch, mask, padding_token_id=9)
    assert same is batch and "attention_mask" not in batch
    assert batch["position_ids"].shape == (1, whole) and batch["input_ids"].shape == (2, whole)
    mine = held(whole, size, rank)
    with ctx():
        for name, (values, pad) in expected.items():
            full = padded(values, 2 * size, pad)
            assert batch[name][1].tolist() == [full[t] for t in mine], name
        assert batch["position_ids"].tolist() == [mine]  # they go on counting over the padding
        assert batch["lengths"].tolist() == [length, length]
    assert batch["position_ids"].tolist() == [list(range(whole))]
    assert batch["input_ids"].shape == (2, len(mine))
    if whole == length:
        assert mask.shape == (2, len(mine))  # nothing to pad: the caller's tensor itself was cut


@pytest.mark.trap(
    "positions with three coordinates cut along the wrong axis",
    "NVIDIA-NeMo/Automodel #1482",
    "tokens at the positions of others",
    "the sequence is cut, whatever stands in front",
)
def test_positions_of_the_caller_are_kept_whatever_their_axes():
    own = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 0, 1, 2]]).expand(2, -1).contiguous()
    batch = {**a_batch(), "position_ids": own}
    ctx, _ = make_cp_batch_and_ctx(StandIn(2, 1), batch)
    with ctx():
        full = [0, 1, 2, 0, 1, 2, 3, 0, 1, 2, 3, 4]
        assert batch["position_ids"].tolist() == [full[3:9]] * 2
    several = torch.arange(3 * 2 * 8).view(3, 2, 8)  # an axis per coordinate in front of [B, S]
    batch = {**a_batch(8), "position_ids": several.clone()}
    ctx, _ = make_cp_batch_and_ctx(StandIn(2), batch)
    with ctx():
        assert torch.equal(batch["position_ids"], several[..., [0, 1, 6, 7]])
    assert torch.equal(batch["position_ids"], several)


@pytest.mark.trap(
    "rotary positions of images not padded with their tokens",
    "hiyouga/LlamaFactory #10782",
    "a crash, or tokens at the positions of others",
    "they are padded to the same multiple of 2·cp and cut along the sequence, three numbers a token",
)
@pytest.mark.parametrize(("size", "rank"), [(2, 0), (2, 1), (3, 2)])
def test_rotary_positions_of_images_are_padded_and_cut_with_their_tokens(size, rank):
    ids = a_batch(10)["input_ids"]
    turned = torch.stack([ids, ids + 1000, ids + 2000], -1)  # [2, 10, 3]: each token's own
    cut = shard_streams({"input_ids": ids, "rotary_ids": turned}, Dimension(size, rank))
    assert cut["rotary_ids"].shape == (*cut["input_ids"].shape, 3)
    real = cut["input_ids"] > 0
    assert 0 < int(real.sum()) and torch.equal(cut["input_ids"][0] > 0, torch.tensor(held(12, size, rank)) < 10)
    for axis in range(3):
        assert torch.equal(cut["rotary_ids"][..., axis][real], (cut["input_ids"] + 1000 * axis)[real])
        assert not cut["rotary_ids"][..., axis][~real].any()


def test_without_context_parallel_nothing_is_touched():
    for mesh in (None, StandIn(1), {}):
        batch = {**a_batch(), "attention_mask": torch.ones(2, 10)}
        before = dict(batch)
        ctx, same = make_cp_batch_and_ctx(mesh, batch)
        assert ctx is contextlib.nullcontext and same is batch and batch == before
        with ctx():
            pass


@pytest.mark.parametrize("name", ["input_ids", "labels"])
def test_ids_and_labels_are_needed(name):
    batch = a_batch()
    del batch[name]
    with pytest.raises(KeyError, match=name):
        make_cp_batch_and_ctx(StandIn(2), batch)


def test_the_flat_form_is_asked_for_by_use_te():
    lengths = torch.tensor([[4], [4]])
    batch = {**a_batch(4), "seq_lens": lengths, "seq_lens_padded": lengths}
    for mesh, tokens in ((None, 8), (StandIn(1), 8), (StandIn(2), 4)):
        ctx, flat = make_cp_batch_and_ctx(mesh, batch, use_te=True)
        assert ctx is contextlib.nullcontext
        assert flat["qkv_format"] == "thd" and flat["input_ids"].shape == (tokens,)
    _, flat = make_cp_batch_and_ctx(None, batch, use_te=True, num_chunks=2, padding_token_id=3)
    assert flat["input_ids"].shape == (2, 4)


def test_the_context_is_built_by_the_functions_of_the_module(monkeypatch):
    seen = {}

    def create(**keywords):
        seen.update(keywords)
        return "cp context"

    monkeypatch.setattr(context, "create_context_parallel_ctx", create)
    monkeypatch.setattr(context, "get_train_context", lambda loss_parallel, compiled, cp: (loss_parallel, compiled, cp))
    mesh, mask = StandIn(2), torch.ones(2, 12)
    ctx, batch = make_cp_batch_and_ctx(mesh, a_batch(12), mask)
    assert ctx == (False, False, "cp context")
    assert seen["cp_mesh"] is mesh["cp"] and seen["cp_seq_dims"] == [1, 1, 1, 1]
    names = ("input_ids", "labels", "position_ids", "loss_mask")
    for buffer, name in zip(seen["cp_buffers"], names, strict=True):
        assert buffer is batch[name]
        assert (id(buffer) in {id(kept) for kept in seen["cp_no_restore_buffers"]}) == (name != "position_ids")


def test_buffers_are_cut_in_place_and_restored_after_an_exception():
    first, second = torch.arange(8.0).view(1, 8), torch.arange(16).view(8, 2)
    view, memory = first.view(8), first.data_ptr()
    ctx = create_context_parallel_ctx(Dimension(2, 1), [first, second], [1, 0], {second}, "alltoall")
    with pytest.raises(ZeroDivisionError), ctx:
        assert first.tolist() == [[2.0, 3.0, 4.0, 5.0]] and second[:, 0].tolist() == [4, 6, 8, 10]
        first += 100  # a rank's own copy
        _ = 1 / 0
    assert first.tolist() == [list(range(8))] and first.data_ptr() == memory
    assert torch.equal(view, first.view(8))
    assert second.shape == (4, 2)


@pytest.mark.parametrize("method", [None, "allgather", "alltoall", "addtoall", "ring"])
def test_the_rotations_that_there_are(method):
    create_context_parallel_ctx(Dimension(2), [], [], set(), method)


@pytest.mark.parametrize(
    ("buffers", "dims", "method", "message"),
    [
        ([], [], "broadcast", "cp_rotate_method='broadcast': there are"),
        ([torch.zeros(1, 8)], [], None, "1 buffers and 0 sequence dimensions"),
        ([torch.zeros(1, 6)], [1], None, "6 tokens cannot be cut into 4 equal chunks"),
    ],
)
def test_what_a_context_cannot_be_made_of(buffers, dims, method, message):
    with pytest.raises(ValueError, match=message):
        create_context_parallel_ctx(Dimension(2), buffers, dims, set(), method)


def test_a_mesh_that_knows_its_group_alone(monkeypatch):
    monkeypatch.setattr(dist, "get_rank", lambda group=None: {"the group": 1}[group])
    buffer = torch.arange(4).view(1, 4)
    with create_context_parallel_ctx(GroupAlone(), [buffer], [1], {buffer}):
        assert buffer.tolist() == [[1, 2]]


def test_train_context_enters_what_is_asked_for():
    entered = []

    @contextlib.contextmanager
    def recorded():
        entered.append("in")
        yield
        entered.append("out")

    with get_train_context(False, False)():
        pass
    with get_train_context(False, True, recorded())():
        assert entered == ["in"]
        assert torch._dynamo.compiled_autograd.in_compiled_autograd_region is False
    assert entered == ["in", "out"]


def loss_is_parallel(rank):
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    logits, target = torch.randn(5, 6), torch.tensor([0, 5, 2, 3, 1])
    local = DTensor.from_local(logits.chunk(2, 1)[rank].contiguous(), mesh, [Shard(1)])
    expected = torch.nn.functional.cross_entropy(logits, target)
    with get_train_context(True, False)():
        loss = torch.nn.functional.cross_entropy(local, target)
        return abs(loss.full_tensor().item() - expected.item()), str(loss.placements)


def test_loss_parallel_is_entered():
    for error, placements in run_world(loss_is_parallel, 2):
        assert error < 1e-6 and "Replicate" in placements


def there_and_back(rank, size, length):
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("cp",))["cp"]
    torch.manual_seed(1)
    advantages = torch.randn(2, length, dtype=torch.float64)
    whole = length + -length % (2 * size)
    mine = shard_tokens(advantages, mesh, pad=-7.0)
    full = torch.nn.functional.pad(advantages, (0, whole - length), value=-7.0)
    assert torch.equal(mine, full[:, held(whole, size, rank)])
    assert torch.equal(gather_tokens(mine, mesh, length), advantages)
    # Cut as the batch's own streams are.
    batch = {"input_ids": torch.arange(length)[None], "labels": torch.arange(length)[None]}
    ctx, _ = make_cp_batch_and_ctx(init_device_mesh("cpu", (size, 1), mesh_dim_names=("cp", "tp")), batch)
    with ctx():
        same = shard_tokens(torch.arange(length)[None], mesh)
        assert torch.equal(same[batch["labels"] >= 0], batch["input_ids"][batch["labels"] >= 0])
    by_head = torch.randn(2, length, 3, 4)
    assert torch.equal(gather_tokens(shard_tokens(by_head, mesh), mesh, length), by_head)
    mine = mine.clone().requires_grad_()
    (gather_tokens(mine, mesh, length) * advantages).sum().backward()
    assert torch.allclose(mine.grad, size * shard_tokens(advantages, mesh), rtol=1e-12)


@pytest.mark.parametrize(("size", "length"), [(2, 10), (3, 7), (3, 12), (4, 9)])
def test_per_token_tensors_go_to_the_layout_and_back_in_the_callers_order(size, length):
    run_world(there_and_back, size, size, length)


def test_per_token_tensors_without_context_parallel():
    values = torch.randn(2, 5)
    assert shard_tokens(values, None) is values and gather_tokens(values, None, 5) is values


@pytest.mark.trap(
    "embeddings cut over context parallel outside of autograd",
    "NVIDIA-NeMo/Automodel #2931",
    "the embeddings are not trained",
    "their gradient comes back",
)
@pytest.mark.parametrize(("size", "rank"), [(2, 0), (2, 1), (3, 2)])
@pytest.mark.parametrize("name", ["input_ids", "inputs_embeds"])
def test_embeddings_keep_their_gradient_and_streams_of_any_name_are_cut(size, rank, name):
    given, whole = a_batch(10), 10 + -10 % (2 * size)
    words = torch.randn(200, 4, requires_grad=True)
    labels = given["labels"].clone()
    passing = {"pixel_values": torch.randn(5, 10), "names": ["a", "b"], "scores": torch.ones(2), "none": None}
    batch = {name: words[given["input_ids"]], "token_type_ids": given["input_ids"] % 3, **passing}
    batch |= {"hidden": torch.randn(2, 10, 7), "sideways": torch.arange(20).view(10, 2)}
    before = dict(batch)
    ctx, same = make_cp_batch_and_ctx(
        StandIn(size, rank), batch, padding_token_id=9, labels=labels, extra_seq_buffers={"sideways": 0}
    )
    mine = [t for t in held(whole, size, rank)]
    with ctx():
        embedded = torch.cat([before[name], torch.zeros(2, whole - 10, 4)], 1)
        assert same is batch and torch.equal(batch[name], embedded[:, mine])
        assert batch["labels"].tolist() == [[padded(row, 2 * size, -100)[t] for t in mine] for row in labels.tolist()]
        for stream, dim in (("token_type_ids", 1), ("hidden", 1), ("sideways", 0)):
            assert batch[stream].shape[dim] == len(mine)
        assert all(batch[key] is value for key, value in passing.items())
        batch[name].sum().backward()
    assert words.grad.sum() == 2 * 4 * sum(t < 10 for t in mine)


@pytest.mark.parametrize(
    ("change", "options", "error", "message"),
    [
        ({"loss_mask": torch.ones(2, 9)}, {}, ValueError, r"loss_mask \[2, 9\] is not as long as input_ids \[2, 10\]"),
        ({}, {"extra_seq_buffers": {"teacher": 1}}, KeyError, "teacher"),
        ({"teacher": torch.ones(2, 8)}, {"extra_seq_buffers": {"teacher": 1}}, ValueError, "teacher"),
        ({}, {"extra_seq_buffers": {"labels": 1}, "use_te": True}, ValueError, "extra_seq_buffers"),
        ({"labels": torch.ones(2, 9)}, {}, ValueError, "labels"),
    ],
)
def test_streams_of_another_length_are_refused(change, options, error, message):
    batch = {**a_batch(), **change}
    mask = batch.pop("loss_mask", None)
    with pytest.raises(error, match=message):
        make_cp_batch_and_ctx(StandIn(2), batch, mask, **options)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (torch.tensor([[1] * 10, [0] * 3 + [1] * 7]), "padding on the left"),
        (torch.ones(2, 1, 10, 10), r"\[2, 1, 10, 10\]"),
        ({"full_attention": None}, "dict"),
    ],
)
def test_a_mask_that_cannot_be_dropped_without_changing_the_numbers_is_refused(mask, message):
    with pytest.raises(ValueError, match=message):
        make_cp_batch_and_ctx(StandIn(2), {**a_batch(), "attention_mask": mask})


def test_a_buffer_with_a_gradient_is_not_cut_in_place():
    with pytest.raises(ValueError, match="buffer 1 requires grad"):
        create_context_parallel_ctx(Dimension(2), [torch.ones(1, 4), torch.ones(1, 4, requires_grad=True)], [1, 1], ())
