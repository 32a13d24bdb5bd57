"""`DTensorPolicyWorker.get_logprobs` and the reference beside transformers', on meshes, padded and packed."""

import pytest
import torch

from dtrain.base.batch import collate
from dtrain.methods.sft import SftMethod
from dtrain.models.read_config import read_config
from dtrain.parallel.mesh import Runtime, build_mesh
from dtrain.recipe import derive_sizes
from tests.cases import run_cases
from tests.stepping import bare_worker, train_step
from tests.tiny import VOCAB, tiny_recipe, write_model

transformers = pytest.importorskip("transformers")

LENGTHS = [7, 1, 12, 3, 9, 5, 2]


def row_of(documents):
    """One row of documents (lists of ids), nothing trained but the last token of each."""
    labels = [[-100] * (len(ids) - 2) + [ids[-1], -100] if len(ids) > 1 else [-100] for ids in documents]
    return {
        "input_ids": torch.tensor(sum(documents, [])),
        "labels": torch.tensor(sum(labels, [])),
        "position_ids": torch.cat([torch.arange(len(ids)) for ids in documents]),
        "seq_ids": torch.cat([torch.full((len(ids),), number) for number, ids in enumerate(documents)]),
    }


def documents_of(seed=0):
    draw = torch.Generator().manual_seed(seed)
    return [torch.randint(0, VOCAB, (length,), generator=draw).tolist() for length in LENGTHS]


def rows_of(packing):
    documents = documents_of()
    return [row_of(documents[:3]), row_of(documents[3:])] if packing else [row_of([ids]) for ids in documents]


def oracle(directory):
    """log p of every token but the first, which has 0, of each of `documents_of`."""
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    found = []
    for ids in documents_of():
        with torch.no_grad():
            logp = model(input_ids=torch.tensor([ids])).logits[0].double().log_softmax(-1)
        found.append([0.0] + [logp[position, token].item() for position, token in enumerate(ids[1:])])
    return found


def score(rank, recipe, world_size, packing, other):
    """This dp rank's rows under policy and reference, flattened without padding, before and after a step."""
    derived = derive_sizes(recipe, world_size)
    mesh = build_mesh(
        Runtime(rank=rank, world_size=world_size), dp_shard=derived.dp_shard, cp=derived.cp, tp=derived.tp
    )
    policy = bare_worker(recipe, read_config(recipe.model.path), mesh, Runtime(rank=rank, world_size=world_size))
    policy.init_optimizer(4)
    policy.init_reference_model(other)
    batch = collate(rows_of(packing)[mesh.dp_rank :: mesh.dp_size])
    real = batch["seq_ids"] >= 0

    def flat(values):
        assert values.device.type == "cpu" and not values[~real].any()
        return values[real].tolist()

    before = flat(policy.get_logprobs(batch, micro_batch_size=2)["logprobs"])
    train_step(policy, batch, SftMethod(recipe).loss)
    after = flat(policy.get_logprobs(batch)["logprobs"])
    reference = flat(policy.get_reference_policy_logprobs(batch)["reference_logprobs"])
    assert flat(policy.get_logprobs(batch)["logprobs"]) == after  # the policy's own weights are back
    with pytest.raises(ZeroDivisionError), policy.use_reference_model():
        raise ZeroDivisionError
    assert flat(policy.get_logprobs(batch)["logprobs"]) == after
    with pytest.raises(RuntimeError, match="nest"), policy.use_reference_model(), policy.use_reference_model():
        pass
    assert flat(policy.get_logprobs(batch)["logprobs"]) == after
    return mesh.dp_rank, before, after, reference


def of_rank(values, packing, dp_rank, dp_size):
    """Return a dp rank's part of the documents' `values`, in a list, one after the other."""
    rows = [sum(values[:3], []), sum(values[3:], [])] if packing else values
    return sum(rows[dp_rank::dp_size], [])


@pytest.mark.parametrize(
    "family, dp, cp, tp, packing",
    [
        ("qwen3", 3, 1, 1, True),  # two packed rows: a rank has none
        ("qwen3", 2, 1, 2, False),
        ("gemma3", 1, 1, 2, True),
        ("gemma3", 1, 2, 1, False),
    ],
)
def test_logprobs_are_those_of_transformers(tmp_path, family, dp, cp, tp, packing):
    torch.manual_seed(0)
    directory = write_model(tmp_path / f"{family}-tied", family)
    other = write_model(tmp_path / "other", family)
    for place in (directory, other):
        source = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(place))
        source.save_pretrained(place)
    shape = (f"parallel.cp={cp}", f"parallel.tp={tp}", f"data.packing={str(packing).lower()}")
    fixed = ("model.init=pretrained", "train.global_batch=12", "train.dtype=float32", "scheduler.warmup_steps=0")
    recipe = tiny_recipe(tmp_path, *fixed, *shape, family=family)
    ranks, expected = dp * cp * tp, {"its own": oracle(directory), "another": oracle(other)}
    cases = {"its own": (recipe, ranks, packing, None), "another": (recipe, ranks, packing, str(other))}
    for name, results in run_cases(score, ranks, cases).items():
        for dp_rank, before, after, reference in results:
            own, right = (of_rank(expected[of], packing, dp_rank, dp) for of in ("its own", name))
            assert before == pytest.approx(own, rel=1e-5, abs=1e-5)
            assert reference == pytest.approx(right, rel=1e-5, abs=1e-5)
            assert not before or after != pytest.approx(before, rel=1e-3)
