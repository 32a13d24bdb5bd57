"""DPO's step: transformers' loss and gradient norm, and the same numbers at every split and on every mesh."""

import math

import pytest
import torch

from dtrain.base.batch import collate
from dtrain.losses.preference.options import LOSSES
from dtrain.methods.dpo import DpoMethod, PairTotals
from dtrain.models.read_config import read_config
from dtrain.parallel.mesh import Runtime, build_mesh
from dtrain.policy import Policy
from dtrain.recipe import derive_sizes
from tests.problem_lines import method_problems
from tests.stepping import train_step
from tests.tiny import VOCAB, tiny_recipe, write_model
from tests.world import run_world

transformers = pytest.importorskip("transformers")

# (prompt, chosen, rejected) tokens of four pairs; lengths that no cut divides.
PAIRS = [(3, 4, 2), (1, 1, 5), (6, 2, 7), (2, 5, 5)]


def pairs_of(seed=0):
    """[(ids, tokens of the prompt)] of every document: chosen, rejected, chosen, ..."""
    draw = torch.Generator().manual_seed(seed)
    documents = []
    for prompt, chosen, rejected in PAIRS:
        ids = torch.randint(0, VOCAB, (prompt,), generator=draw)
        for length in (chosen, rejected):
            documents.append((torch.cat([ids, torch.randint(0, VOCAB, (length,), generator=draw)]), prompt))
    return documents


def row_of(documents):
    labels = []
    for ids, prompt in documents:
        shifted = torch.full_like(ids, -100)
        shifted[prompt - 1 : -1] = ids[prompt:]
        labels.append(shifted)
    return {
        "input_ids": torch.cat([ids for ids, _ in documents]),
        "labels": torch.cat(labels),
        "position_ids": torch.cat([torch.arange(len(ids)) for ids, _ in documents]),
        "seq_ids": torch.cat([torch.full((len(ids),), number) for number, (ids, _) in enumerate(documents)]),
    }


def rows_of(dp_rank, dp_size, packing):
    """This rank's rows: pairs i with i % dp_size == dp_rank, or packed rows of two pairs."""
    documents = pairs_of()
    if packing:
        rows = [row_of(documents[:2]), row_of(documents[2:8])]
        return rows[dp_rank::dp_size]
    pairs = [documents[2 * index : 2 * index + 2] for index in range(len(PAIRS))]
    return [row_of([document]) for pair in pairs[dp_rank::dp_size] for document in pair]


def steps(rank, recipe, world_size, count=2):
    """Loss, gradient norm and fields of some steps on the same pairs."""
    derived = derive_sizes(recipe, world_size)
    runtime = Runtime(rank=rank, world_size=world_size)
    mesh = build_mesh(runtime, dp_shard=derived.dp_shard, cp=derived.cp, tp=derived.tp)
    policy = Policy(recipe, read_config(recipe.model.path), mesh, runtime)
    policy.init_optimizer(8)
    method = DpoMethod(recipe)
    method.attach_models(policy, {})
    found = []
    for number in range(count):
        rows = rows_of(mesh.dp_rank, mesh.dp_size, recipe.data.packing)
        batch, loss = method.prepare(policy, collate(rows))
        result = train_step(policy, batch, loss, method.micro_rows)
        method.after_step(policy, number + 1)
        fields = method.train_metrics(result.result.metrics)
        found += [result.loss, result.grad_norm, *fields.values()]
    return found


def recipe_of(root, *overrides, family="qwen3"):
    fixed = ("method=dpo", "train.global_batch=4", "train.micro_batch=4", "scheduler.warmup_steps=0")
    plain = ("optimizer.name=sgd", "optimizer.lr=0.1", "data.packing=false")
    return tiny_recipe(root, *fixed, *plain, *overrides, family=family)


OPTIONS = {
    "exo_pair": ("dpo.label_smoothing=0.01",),
    "robust": ("dpo.label_smoothing=0.2",),
    "aot": ("dpo.label_smoothing=0.1",),
    "bco_pair": ("dpo.kwargs.bco_shift=batch",),
    "sigmoid_norm": ("dpo.use_weighting=true",),
}


def steps_of_each(rank, recipes, world_size):
    return [steps(rank, recipe, world_size) for recipe in recipes]


SPLITS = {
    "packed one by one": (1, 1, True),
    "two ranks, packed in uneven rows": (2, 1, True),
}


def test_a_step_is_the_same_however_the_pairs_are_split(tmp_path):
    """All losses: four pairs at once, and the ways of SPLITS. Meshes: tests/methods/test_every_method.py."""
    named = {loss: (f"dpo.loss={loss}", *OPTIONS.get(loss, ())) for loss in LOSSES}
    named["mixed"] = ("dpo.loss=[sigmoid,sft,aot_unpaired]", "dpo.loss_weights=[0.7,0.2,0.5]")
    fixed = ("dpo.sft_weight=0.3", "dpo.beta=0.5", "dpo.ld_alpha=0.25")
    recipes = {(loss, "whole"): recipe_of(tmp_path, *fixed, *more) for loss, more in named.items()}
    for loss, more in named.items():
        for split, (_, micro, packing) in SPLITS.items():
            shape = (f"train.micro_batch={micro}", f"data.packing={str(packing).lower()}")
            recipes[loss, split] = recipe_of(tmp_path, *fixed, *more, *shape)
    values = {}
    for world_size in (1, 2):
        chosen = [key for key in recipes if SPLITS.get(key[1], (1,))[0] == world_size]
        first, *_ = run_world(steps_of_each, world_size, [recipes[key] for key in chosen], world_size, timeout=300)
        values |= dict(zip(chosen, first, strict=True))
    for loss, split in recipes:
        assert all(value == value for value in values[loss, "whole"])
        assert values[loss, split] == pytest.approx(values[loss, "whole"], rel=1e-9, abs=1e-12), (loss, split)


def by_hand(directory, other, weighting):
    """Two steps of SGD on transformers' model: loss and clipped norm, beside a reference of its own. weighting: pairs
    are weighted as TRL 1.16 does it, by at most 1."""
    policy, reference = (
        transformers.AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32) for place in (directory, other)
    )

    def logps(model):
        sums, aligned = [], []
        for ids, prompt in pairs_of():
            logp = model(input_ids=ids[None]).logits[0].log_softmax(-1)
            logp = logp[prompt - 1 : -1]
            of_labels = logp.gather(1, ids[prompt:, None]).squeeze(1)
            sums.append(of_labels.sum())
            aligned.append((of_labels - (2 * logp).logsumexp(-1)).mean().detach())
        return torch.stack(sums).view(-1, 2), torch.stack(aligned).view(-1, 2).sum(1).exp()

    with torch.no_grad():
        ref, _ = logps(reference)
    tokens = sum(chosen for _, chosen, _ in PAIRS)
    found = []
    for _ in range(2):
        logp, weights = logps(policy)
        margins = (logp[:, 0] - ref[:, 0]) - (logp[:, 1] - ref[:, 1])
        losses = -torch.nn.functional.logsigmoid(0.5 * margins)
        loss = (losses * weights.clamp(max=1) if weighting else losses).mean() - 0.3 * logp[:, 0].sum() / tokens
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        rewards = 0.5 * (logp - ref).detach()
        accuracy = (rewards[:, 0] > rewards[:, 1]).float().mean()
        found += [loss.item(), norm.item(), *rewards.mean(0).tolist(), 0.5 * margins.mean().item(), accuracy.item()]
        found += [weights.clamp(max=1).mean().item()] * weighting
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter -= 0.1 * parameter.grad
                parameter.grad = None
    return found


@pytest.mark.parametrize(("family", "weighting"), [("llama", True), ("gemma3", False)])
def test_two_steps_equal_transformers(tmp_path, family, weighting):
    torch.manual_seed(0)
    directory = write_model(tmp_path / f"{family}-tied", family)
    other = write_model(tmp_path / "other", family)
    for place in (directory, other):
        source = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(place))
        source.save_pretrained(place)
    more = ("model.init=pretrained", "train.dtype=float32", "optimizer.weight_decay=0", "scheduler.name=constant")
    loss = ("dpo.beta=0.5", "dpo.sft_weight=0.3", f"dpo.reference={other}", "train.micro_batch=2")
    loss += (f"dpo.use_weighting={str(weighting).lower()}",)
    found = run_world(steps, 1, recipe_of(tmp_path, *more, *loss, family=family), 1)[0]
    assert found == pytest.approx(by_hand(directory, other, weighting), rel=1e-4, abs=1e-5)


def test_the_reference_stays_and_moves_as_it_is_told(tmp_path):
    """At the first step policy and reference are one; a reference that follows wholly is one with it again later."""
    still = run_world(steps, 1, recipe_of(tmp_path), 1, 3)[0]
    follows = run_world(steps, 1, recipe_of(tmp_path, "dpo.sync_every=1", "dpo.sync_mix=1.0"), 1, 3)[0]
    log2 = torch.tensor(2.0, dtype=torch.float64).log().item()
    assert still[0] == pytest.approx(log2, rel=1e-12) and still[6] < log2 - 1e-6 and still[12] < still[6]
    assert follows[::6] == pytest.approx([log2] * 3, rel=1e-12)


def test_a_pair_weighs_at_most_one_and_its_weight_has_no_gradient():
    logps = torch.tensor([[-1.0, -2.0], [-0.5, -1.5]], dtype=torch.float64, requires_grad=True)
    log_p2 = torch.tensor([[-0.5, -0.25], [-3.0, -0.25]], dtype=torch.float64)
    batch = {"labels": torch.ones(2, 2, dtype=torch.long)}
    for order, log_weight in (([1, 1], 2 * (2.5 - 1.25) / 2), ([0, 1], (-0.5 - 1.75 + 2.5 - 1.25) / 2)):
        streams = PairTotals.streams(batch, logps[order], log_p2[order])
        weights = PairTotals.of(streams.sum(-1)).pair_weights
        expected = torch.tensor([min(1.0, math.exp(log_weight))], dtype=torch.float64)
        torch.testing.assert_close(weights, expected, rtol=1e-12, atol=0)
        assert not weights.requires_grad


def test_weights_of_pairs_are_refused_where_a_loss_compares_pairs(tmp_path):
    for loss, fits in (("aot", False), ("bco_pair", True), ("[sigmoid,aot_unpaired]", False), ("sft", False)):
        found = method_problems(recipe_of(tmp_path, f"dpo.loss={loss}", "dpo.use_weighting=true"))
        assert any("dpo.use_weighting" in line for line in found) is not fits, loss
