"""A caller's own streams through a policy: any mesh, any number of rows on a rank, any making of micro-batches
give the loss and the norm of one process, or every rank says what is wrong."""

import re

import pytest
import torch

from dtrain.base.batch import collate
from dtrain.methods.sft import SftMethod
from dtrain.models.read_config import read_config
from dtrain.parallel.mesh import Runtime, build_mesh
from dtrain.policy import Policy
from dtrain.policy.batching import DynamicShapes, Fixed, Packed
from dtrain.recipe import derive_sizes
from dtrain.training import load_recipe
from tests.cases import run_cases
from tests.policy.test_policy import rows
from tests.stepping import bare_worker, train_step
from tests.tiny import VOCAB, tiny_recipe
from tests.world import run_world

MAKINGS = [Fixed(2), DynamicShapes(24), Packed(24)]
ROWS = 7
LONGEST = max(len(row["input_ids"]) for row in rows(ROWS))


def of_callers(batch, start, width):
    """Streams of every kind for rows `start`, .. of all, the same wherever a row is; NaN stands on the padding."""
    count, length = batch["input_ids"].shape
    draw = torch.Generator().manual_seed(5)
    weights, kinds = torch.rand(ROWS, LONGEST, generator=draw), torch.randint(0, 4, (ROWS, LONGEST, 3), generator=draw)
    vectors = torch.rand(ROWS, width, generator=draw, dtype=torch.float64)
    mine, real = slice(start, start + count), batch["seq_ids"] >= 0
    return batch | {
        "weight": torch.where(real, weights[mine, :length], torch.nan).requires_grad_(),
        "flag": weights[mine, :length] > 0.5,
        "kinds": kinds[mine, :length].to(torch.int32),
        "advantages": vectors[mine, 0],  # a known name, here a value for each row
        "vectors": vectors[mine],
        "matrices": vectors[mine][:, None].expand(-1, 2, -1),
    }


def loss_of_streams(source, batch, global_seqs, global_tokens):
    logprobs, ids = source.logprobs().logprobs, batch["document_ids"]
    assert batch["weight"].shape == batch["flag"].shape == batch["kinds"].shape[:2] == logprobs.shape
    assert batch["flag"].dtype == torch.bool and batch["kinds"].dtype == torch.int32
    by_row = batch["advantages"] + batch["vectors"].square().sum(1) + batch["matrices"][:, 1].sum(1)
    of_document = torch.cat([by_row.new_zeros(1), by_row])[ids + 1]
    tokens = batch["weight"] * logprobs - batch["flag"] * logprobs.square() + 0.1 * batch["kinds"].sum(2) * logprobs
    return -(tokens * of_document).sum() / global_tokens, {"flags": batch["flag"].sum()}


def build(rank, recipe, world_size, kind=Policy):
    derived = derive_sizes(recipe, world_size)
    runtime = Runtime(rank=rank, world_size=world_size)
    mesh = build_mesh(runtime, dp_shard=derived.dp_shard, cp=recipe.parallel.cp, tp=recipe.parallel.tp)
    return kind(recipe, read_config(recipe.model.path), mesh, runtime), mesh


def with_streams(rank, recipe, world_size, counts, width):
    policy, mesh = build(rank, recipe, world_size)
    policy.init_optimizer(20)
    start, count = sum(counts[: mesh.dp_rank]), counts[mesh.dp_rank]
    batch = of_callers(collate(rows(ROWS)[start : start + count]), start, width)
    if not count:  # such a rank may know nothing of the streams, or the wrong thing
        batch = {"input_ids": batch["input_ids"], "flag": torch.empty(0), "other": torch.empty(0, 3)}
    found = []
    for making in MAKINGS:
        losses = policy.evaluate(batch, loss_of_streams, making)
        result = train_step(policy, batch, loss_of_streams, making)
        assert policy.logprobs(batch, making).shape == batch["input_ids"].shape
        found.append([losses.loss, result.loss, result.grad_norm])
        found[-1].append(result.result.metrics["flags"])
    assert batch.get("weight") is None or batch["weight"].grad is None
    return found


def on(tmp_path, counts, *shape, width=4, ranks=1):
    recipe = tiny_recipe(tmp_path, "train.global_batch=12", "optimizer.lr=1e-30", *shape)
    return run_world(with_streams, len(counts) * ranks, recipe, len(counts) * ranks, counts, width)


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """The numbers of one process, the same by each making."""
    (makings,) = on(tmp_path_factory.mktemp("one"), [ROWS])
    for numbers in makings[1:]:
        assert numbers == pytest.approx(makings[0], rel=1e-11)
    return makings[0]


@pytest.mark.parametrize(
    "counts, shape, ranks",
    [
        ([4, 0, 3], (), 1),
        ([7], ("parallel.cp=3", "parallel.cp_rotate=ring"), 3),
        ([7], ("parallel.cp=2", "parallel.tp=2", "parallel.cp_rotate=ring"), 4),
        ([0, 7], ("parallel.cp=2",), 2),
    ],
)
def test_every_mesh_and_making_gives_the_numbers_of_one_process(tmp_path, expected, counts, shape, ranks):
    for found in on(tmp_path, counts, *shape, ranks=ranks):
        for numbers in found:
            assert numbers == pytest.approx(expected, rel=1e-11)


def test_a_row_s_vector_as_long_as_the_rows_of_one_rank_stays_a_row_s_vector(tmp_path):
    width = max(len(row["input_ids"]) for row in rows(ROWS)[:2])
    assert width < LONGEST  # of the other rank, and of one process
    expected = on(tmp_path, [ROWS], width=width)[0]
    for found in on(tmp_path, [2, 5], width=width):
        assert found[0] == pytest.approx(expected[0], rel=1e-11)


def by_sequence(source, batch, global_seqs, global_tokens):
    """A loss to which a document without a trained token would add log 2."""
    sums = source.sum_by_document(source.logprobs().logprobs) * batch["reward"][: source.num_documents]
    losses = torch.nn.functional.softplus(sums)
    return source.count_once(losses.sum() / global_seqs), {
        "sequences": source.count_once(torch.ones_like(losses).sum())
    }


def with_masked_rows(rank, recipe, world_size, kept, drops, gbs):
    policy, mesh = build(rank, recipe, world_size, bare_worker)
    policy.init_optimizer(20)
    batch = collate(rows(ROWS)) | {"reward": torch.arange(1.0, ROWS + 1), "sample_mask": torch.tensor(kept).float()}
    if drops:
        chosen = batch.pop("sample_mask").bool()
        batch = {name: tensor[chosen] for name, tensor in batch.items()}
    part = slice(mesh.dp_rank * 4, mesh.dp_rank * 4 + 4) if world_size > 1 else slice(None)
    mine = {name: tensor[part] for name, tensor in batch.items()}
    if gbs is not None:
        return policy.train(mine, by_sequence, gbs=gbs)["tokens"].tolist()
    step = train_step(policy, mine, by_sequence)
    counts = step.result.counts
    return step.loss, step.grad_norm, [counts.trained_tokens, counts.documents, counts.tokens], step.result.metrics


def test_rows_that_sample_mask_leaves_out_are_no_sequences(tmp_path):
    kept = [1, 0, 1, 1, 0, 0, 0]
    recipe = tiny_recipe(tmp_path, "train.global_batch=12", "optimizer.lr=1e-30")
    losses, norm, tokens, sums = run_world(with_masked_rows, 1, recipe, 1, kept, True, None)[0]
    assert sums == {"sequences": sum(kept)} and tokens[1] == sum(kept)
    for world_size in (1, 2):
        for found in run_world(with_masked_rows, world_size, recipe, world_size, kept, False, None):
            assert found[:2] == (pytest.approx(losses, rel=1e-12), pytest.approx(norm, rel=1e-12))
            assert found[2] == tokens
    steps = run_world(with_masked_rows, 1, recipe, 1, kept, False, 4)[0]
    assert [step[1] for step in steps] == [sum(kept[:4]), sum(kept[4:])]  # a step's rows are those of the batch


def with_positions(rank, recipe, world_size, gap, fill):
    """Loss and norm by each making, the positions jumping by `gap` after the second token, `fill` on the padding."""
    policy, _ = build(rank, recipe, world_size)
    policy.init_optimizer(20)
    batch = collate(rows(ROWS))
    positions = torch.arange(batch["input_ids"].shape[1])
    positions = positions + gap * (positions > 1)
    batch["position_ids"] = torch.where(batch["seq_ids"] >= 0, positions, fill)
    results = [train_step(policy, batch, SftMethod(load_recipe({})).loss, making) for making in MAKINGS]
    return [(result.loss, result.grad_norm) for result in results]


def test_positions_are_the_caller_s_on_every_mesh_whatever_stands_on_padding(tmp_path):
    def on(ranks, *shape):
        """[(gap, loss and norm of a rank and making)]"""
        recipe = tiny_recipe(tmp_path, "train.global_batch=12", "optimizer.lr=1e-30", *shape)
        cases = {f"{gap}, {fill}": (recipe, ranks, gap, fill) for gap in (0, 9) for fill in (0, 10_000)}
        results = run_cases(with_positions, ranks, cases)
        return [(cases[name][2], pair) for name, found in results.items() for pairs in found for pair in pairs]

    alone = on(1)
    expected = {gap: next(pair for of, pair in alone if of == gap) for gap in (0, 9)}
    assert expected[9][0] != pytest.approx(expected[0][0], rel=1e-3)
    for gap, pair in (*alone, *on(2, "parallel.cp=2")):
        assert pair == pytest.approx(expected[gap], rel=1e-11)


def what_is_wrong(count):
    """Changes of the second rank's batch of `count` rows, and what every rank is told."""
    ids, ones = torch.zeros(count, 4, dtype=torch.int64), torch.ones(count, 4)
    return [
        ({"note": ["a"] * count}, "stream note is a list"),
        ({"note": "a"}, "stream note is a str"),
        ({"extra": ones.to_sparse()}, "stream extra is a torch.sparse_coo"),
        ({"extra": torch.tensor(1.0)}, r"stream extra has shape \[\], and input_ids has \[2, 4\]"),
        ({"extra": torch.ones(count + 1, 4)}, r"stream extra has shape \[3, 4\], and input_ids"),
        ({"weight": None}, "stream weight is a NoneType"),
        ({"weight": "left out"}, "stream weight is missing on dp rank 1, which has rows"),
        ({"weight": ones.double()}, r"stream weight is not the same on every rank: .*float32.*float64"),
        ({"weight": ones[..., None]}, "stream weight is not the same on every rank"),
        ({"weight": ones[:, 0]}, "stream weight is not the same on every rank"),
        ({"label_index": ones}, "stream label_index: this name is reserved"),
        ({"prompt_ids": ids[:, 0]}, r"stream prompt_ids has shape \[2\], and input_ids has \[2, 4\]"),
        ({"input_ids": ids + VOCAB}, f"input_ids are from {VOCAB} to {VOCAB}, and the model has {VOCAB} tokens"),
        ({"labels": ids - 1}, "labels are from -1 to -1"),
        ({"labels": ids[:, 1:]}, r"labels must be a tensor \[2, 4\] for input_ids \[2, 4\], not \[2, 3\]"),
        ({"seq_ids": ids + 1}, "seq_ids must count a row's documents from 0"),
        ({"position_ids": ids}, "position_ids must rise within a document"),
        ({"attention_mask": torch.tensor([[0, 1, 1, 1]] * count)}, "padding must be on the right"),
        ({"sample_mask": ones}, r"sample_mask must be a tensor \[2\]"),
        ({"input_ids": ids[0]}, r"input_ids must be a tensor \[n, S\]"),
    ]


def refused(rank, recipe):
    policy, _ = build(rank, recipe, 2, bare_worker)
    policy.init_optimizer(20)
    good = {"input_ids": torch.ones(2, 4, dtype=torch.int64), "weight": torch.ones(2, 4)}

    def loss(source, batch, global_seqs, global_tokens):
        return -(source.logprobs().logprobs * batch["weight"]).sum() / global_tokens, {}

    told = []
    for change, _ in what_is_wrong(2):
        batch = good | change if rank else good
        if change.get("weight") == "left out" and rank:
            del batch["weight"]
        with pytest.raises(ValueError) as error:
            train_step(policy, batch, loss)
        told.append(str(error.value))
    for change in ({"input_ids": good["input_ids"][0]}, {"seq_ids": good["input_ids"]}):
        for call in (policy.get_logprobs, lambda batch: policy.get_topk_logits(batch, 2)):
            with pytest.raises(ValueError, match="dp rank 1"):
                call(good | change if rank else good)
    with pytest.raises(ValueError, match="gbs=3 must be a multiple of the 2 data-parallel ranks"):
        policy.train(good, loss, gbs=3)
    policy.train(good, loss, gbs=2)  # nothing waits in a collective
    return told


def test_what_cannot_be_taken_is_refused_on_every_rank_by_name(tmp_path):
    told = run_world(refused, 2, tiny_recipe(tmp_path))
    assert told[0] == told[1]
    for text, (_, pattern) in zip(told[0], what_is_wrong(2), strict=True):
        assert re.search(pattern, text), (pattern, text)
