"""Method distill: loss and gradient against dense float64 logits, and the same numbers on every mesh."""

import json
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.tensor import DTensor

from dtrain import models
from dtrain.base.batch import IGNORE_INDEX, collate
from dtrain.checkpoint.huggingface.write import write_directory
from dtrain.losses.head.kl import forward_kl, reverse_kl
from dtrain.losses.head.vocabulary import HeadInput
from dtrain.methods.distill import DistillMethod
from dtrain.models.read_config import read_config
from dtrain.parallel.mesh import Runtime, build_mesh
from dtrain.recipe import derive_sizes
from dtrain.training import load_recipe
from tests.policy.test_policy import rows
from tests.problem_lines import preflight
from tests.running import MESHES, assert_parity, distance, metrics, overrides_of, run, trajectory, weights
from tests.stepping import bare_worker, train_step
from tests.tiny import VOCAB, tiny_recipe, write_model
from tests.world import run_world

LARGER = {"hidden_size": 64, "num_hidden_layers": 3, "intermediate_size": 80}


def teacher_at(root, family="llama", **changes):
    """Return a teacher's directory, with weights: of another width than the student's, and mostly of another family."""
    directory = root / f"teacher-{family}"
    if not (directory / "model.safetensors").exists():
        source = write_model(root / f"teacher-{family}-config", family, tied=False, **{**LARGER, **changes})
        model = models.build(read_config(source), torch.float64)
        models.init_weights(model, 7)
        write_directory(model, directory, source, torch.float64)
    return directory


def recipe_at(root, *overrides, **options):
    return tiny_recipe(root, "method=distill", f"distill.teacher={teacher_at(root)}", *overrides, **options)


def dense_loss(section, student_logits, teacher_logits):
    """T² · KL [T tokens] from whole logits, by the recipe's words."""
    student, teacher = (logits.double() / section.temperature for logits in (student_logits, teacher_logits))
    logq, logp = student.log_softmax(-1), teacher.log_softmax(-1)
    if section.kl == "jsd":
        return section.temperature**2 * dense_jsd(section, student, teacher)
    share = {"forward": 1.0, "reverse": 0.0, "mixed": section.mixed_kl_weight}[section.kl]
    if section.top_k is not None:
        values, ids = teacher.topk(section.top_k, -1)
        top = values.log_softmax(-1)
        if section.zero_outside_topk:
            forward = forward_kl(logq.gather(-1, ids), top)
            reverse = reverse_kl(logq, torch.full_like(logq, -100.0).scatter(-1, ids, top))
        else:
            chosen = student.gather(-1, ids).log_softmax(-1)
            forward, reverse = forward_kl(chosen, top), reverse_kl(chosen, top)
    else:
        forward, reverse = forward_kl(logq, logp), reverse_kl(logq, logp)
    return section.temperature**2 * (share * forward + (1 - share) * reverse)


def dense_jsd(section, student, teacher):
    """β · KL(teacher || m) + (1 − β) · KL(student || m) [T tokens] of probabilities, m their mixture."""
    q, p, beta = student.softmax(-1), teacher.softmax(-1), section.jsd_beta
    if section.top_k is not None:
        values, ids = teacher.topk(section.top_k, -1)
        p = torch.zeros_like(p).scatter(-1, ids, values.softmax(-1))
        if not section.zero_outside_topk:
            q = torch.zeros_like(q).scatter(-1, ids, student.gather(-1, ids).softmax(-1))
    mixed = beta * p + (1 - beta) * q
    both = [
        torch.where(one > 0, one * (one.clamp(min=1e-300).log() - mixed.clamp(min=1e-300).log()), 0).sum(-1)
        for one in (p, q)
    ]
    return beta * both[0] + (1 - beta) * both[1]


# TRL 1.16's GKDTrainer.generalized_jsd_loss at temperature 2, summed and divided by the three tokens, by its beta.
TRLS = {
    0.0: 0.834747055671241,
    0.1: 0.06766076804933872,
    0.5: 0.16257490642797431,
    0.9: 0.05997115782503728,
    1.0: 0.6949129513995734,
}


@pytest.mark.trap(
    "weights of a Jensen-Shannon divergence at the wrong model",
    "huggingface/trl PR#3043",
    "distillation towards another model",
    "the numbers of TRL after its fix",
)
@pytest.mark.parametrize("beta", TRLS)
@pytest.mark.parametrize("k", [None, 20])
def test_the_jsd_is_trls(tmp_path, beta, k):
    """On the same logits, through heads of softcaps alone, and through the teacher's top 20 of 20."""
    places = torch.arange(60, dtype=torch.float64).view(3, 20)
    student, teacher = (places * 1.7).sin() * 4, (places * places * 0.3).cos() * 3
    section = recipe_at(tmp_path, "distill.kl=jsd", f"distill.jsd_beta={beta}", "distill.temperature=2")
    section.distill.top_k = k
    method = DistillMethod(section)
    eye = torch.eye(20, dtype=torch.float64)
    capped, theirs = (HeadInput(cap * (one / cap).atanh(), eye, cap) for one, cap in ((student, 9.0), (teacher, 5.0)))
    method.teacher = SimpleNamespace(run_at_head=lambda inputs, fn: fn(theirs))
    source = SimpleNamespace(head_input=capped, inputs={}, shard=None)
    index, three = torch.arange(3), torch.tensor(3)
    loss, sums = method.loss(source, {"label_index": index}, three, three)
    assert loss.item() / 4 == pytest.approx(TRLS[beta], rel=1e-6)
    if k is None:
        logs = [(logits / 2).log_softmax(-1) for logits in (student, teacher)]
        for name, kl in (("forward_kl", forward_kl), ("reverse_kl", reverse_kl)):
            torch.testing.assert_close(sums[name], kl(*logs).sum(), rtol=1e-12, atol=0)


def policy_of(recipe, rank=0, world_size=1):
    derived, runtime = derive_sizes(recipe, world_size), Runtime(rank=rank, world_size=world_size)
    mesh = build_mesh(runtime, dp_shard=derived.dp_shard, cp=derived.cp, tp=derived.tp)
    policy = bare_worker(recipe, read_config(recipe.model.path), mesh, runtime)
    policy.init_optimizer(4)
    return policy


def gradients_of_one_step(rank, recipe, batch):
    """The largest relative error of the loss and of any parameter's gradient, against dense logits."""
    policy = policy_of(recipe)
    method = DistillMethod(recipe)
    method.attach_models(policy, {})
    dense = models.build(policy.model.config, torch.float64)
    dense.load_state_dict(policy.model.state_dict())
    teacher = models.from_pretrained(recipe.distill.teacher, torch.float64)
    trained = batch["labels"] != IGNORE_INDEX
    with torch.no_grad():
        theirs = teacher(batch["input_ids"])[trained]
    right = dense_loss(recipe.distill, dense(batch["input_ids"])[trained], theirs).mean()
    right.backward()
    policy.optimizer.step = lambda: None  # the weights stay
    policy.optimizer.zero_grad = lambda set_to_none: None  # and so do the gradients
    result = train_step(policy, *method.prepare(policy, batch))
    errors = [abs(result.loss - right.item()) / abs(right.item())]
    for (name, parameter), expected in zip(policy.model.named_parameters(), dense.parameters(), strict=True):
        size = expected.grad.abs().max()
        errors.append(((parameter.grad - expected.grad).abs().max() / size).item())
        assert size > 0, name
    assert not any(parameter.requires_grad for parameter in method.teacher.model.parameters())
    return max(errors)


@pytest.mark.trap(
    "the mixture of two models taken of their log-probabilities",
    "huggingface/trl #2202",
    "another divergence where one is sure",
    "dense logits in float64",
)
@pytest.mark.parametrize(
    "options",
    [
        [],
        ["kl=reverse", "temperature=2.0"],
        ["kl=mixed", "mixed_kl_weight=0.3", "temperature=0.5"],
        ["top_k=5", "temperature=2.0"],
        ["top_k=5", "kl=mixed"],
        ["top_k=5", "kl=reverse", "zero_outside_topk=false"],
        [f"top_k={VOCAB}"],
        ["kl=jsd", "jsd_beta=0.3", "temperature=2.0"],
        ["top_k=5", "kl=jsd", "jsd_beta=0.8"],
        ["top_k=5", "kl=jsd", "zero_outside_topk=false"],
    ],
)
def test_loss_and_gradients_are_those_of_dense_logits(tmp_path, options):
    keys = [f"distill.{option}" for option in options]
    recipe = recipe_at(tmp_path, *keys, "train.max_grad_norm=null")
    batch = collate(rows(6))
    batch["labels"][:, ::3] = IGNORE_INDEX
    assert run_world(gradients_of_one_step, 1, recipe, batch)[0] < 1e-9


KINDS = {
    "whole vocabulary": ["distill.kl=mixed", "distill.temperature=2.0"],
    "top k": ["distill.top_k=7", "distill.kl=mixed"],
    "jsd": ["distill.kl=jsd", "distill.jsd_beta=0.3"],
}


def test_a_larger_teacher_of_the_family_on_a_mesh(tmp_path):
    teacher = teacher_at(tmp_path, "qwen3.5", linear_num_value_heads=4, linear_value_head_dim=8)
    shape = ["method=distill", f"distill.teacher={teacher}", *KINDS["whole vocabulary"], "data.packing=true"]
    shape += ["train.steps=2", "scheduler.warmup_steps=0", "checkpoint.every=2", "train.global_batch=12"]
    one = run(tiny_recipe(tmp_path, *shape, "train.micro_batch=12", family="qwen3.5", name="one"))
    ranks, options = MESHES["tp2+sp cp2 ring"]
    cut = tiny_recipe(tmp_path, *shape, *overrides_of(ranks, options, "float64"), family="qwen3.5", name="cut")
    assert_parity(run(cut, ranks), trajectory(one), weights(one))


@pytest.mark.parametrize("kind", ["whole vocabulary", "top k"])
def test_validation_is_the_loss_over_the_whole_set(tmp_path, kind):
    """At a rate of 0, on one batch that is the whole training set."""
    options = ["data.val.path=${data.train.path}", "train.validate_every=1", "train.steps=1", "data.packing=false"]
    options.append("scheduler.warmup_steps=0")
    recipe = run(recipe_at(tmp_path, *options, *KINDS[kind], "optimizer.lr=1e-30", "train.global_batch=60"))
    step, validation = metrics(recipe)
    assert validation["val_loss"] == pytest.approx(step["loss"], rel=1e-12)
    for name in ("forward_kl", "reverse_kl") if kind == "whole vocabulary" else ("topk_mass",):
        assert validation[f"val_{name}"] == pytest.approx(step[name], rel=1e-12)


def test_the_student_comes_near_its_teacher_and_learns_nothing_from_labels(tmp_path):
    """Rows whose labels are noise: what falls is the distance to the teacher."""
    options = ["train.steps=30", "optimizer.lr=3e-2", "optimizer.weight_decay=0", "distill.kl=forward"]
    recipe = run(recipe_at(tmp_path, *options))
    kl = [row["forward_kl"] for row in metrics(recipe) if "forward_kl" in row]
    assert kl[-1] < kl[0] / 2
    assert [row["loss"] for row in metrics(recipe)] == pytest.approx(kl)
    assert all(row["reverse_kl"] > 0 for row in metrics(recipe))


def test_a_student_that_is_the_teacher_has_no_loss(tmp_path):
    teacher = teacher_at(tmp_path)
    recipe = run(
        recipe_at(
            tmp_path,
            f"model.path={teacher}",
            "model.init=pretrained",
            "train.steps=1",
            "scheduler.warmup_steps=0",
            "distill.kl=mixed",
        )
    )
    row = metrics(recipe)[0]
    assert abs(row["loss"]) < 1e-10 and row["grad_norm"] < 1e-8


def teacher_after_a_step(rank, recipe, world_size):
    policy = policy_of(recipe, rank, world_size)
    method = DistillMethod(recipe)
    method.attach_models(policy, {})
    train_step(policy, *method.prepare(policy, collate(rows(4)[rank::world_size])))
    parameters = list(method.teacher.model.parameters())
    assert all(isinstance(parameter, DTensor) and parameter.grad is None for parameter in parameters)
    assert {parameter.dtype for parameter in parameters} == {torch.bfloat16}
    return sum(parameter.to_local().numel() for parameter in parameters), sum(p.numel() for p in parameters)


def test_a_teacher_lies_in_shards_in_the_dtype_of_computation(tmp_path):
    recipe = recipe_at(tmp_path, "train.dtype=bfloat16", "train.global_batch=4")
    shares, wholes = zip(*run_world(teacher_after_a_step, 2, recipe, 2), strict=True)
    assert sum(shares) == wholes[0]


def topk_logits(rank, recipe, world_size, batch, k):
    policy = policy_of(recipe, rank, world_size)
    share = {name: tensor[policy.mesh.dp_rank :: policy.mesh.dp_size] for name, tensor in batch.items()}
    found = policy.get_topk_logits(share, k, micro_batch_size=2)
    with torch.no_grad():
        whole = models.build(policy.model.config, torch.float64)
        models.init_weights(whole, recipe.run.seed)
        logits = whole(share["input_ids"])
    values, ids = logits.sort(dim=-1, descending=True, stable=True)
    real = share["seq_ids"] >= 0
    torch.testing.assert_close(found["topk_logits"][real], values[real][:, :k], rtol=1e-10, atol=1e-12)
    assert torch.equal(found["topk_indices"][real], ids[real][:, :k])
    assert not found["topk_logits"][~real].any() and found["topk_logits"].shape == (*real.shape, k)


@pytest.mark.parametrize(("tp", "cp", "dp"), [(1, 1, 1), (2, 1, 2), (2, 2, 1)])
def test_topk_logits_of_a_policy(tmp_path, tp, cp, dp):
    recipe = tiny_recipe(tmp_path, f"parallel.tp={tp}", f"parallel.cp={cp}", "train.global_batch=4")
    run_world(topk_logits, tp * cp * dp, recipe, tp * cp * dp, collate(rows(5)), 6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_lower_precision_follows(tmp_path, dtype):
    exact = trajectory(run(recipe_at(tmp_path, "train.steps=3", name="exact")))
    options = ["train.steps=3", f"train.dtype={dtype}", "parallel.tp=2"]
    found = trajectory(run(recipe_at(tmp_path, *options, name="lower"), 4))
    for mine, right in zip(found, exact, strict=True):
        assert distance(mine[0], right[0]) <= (0.05 if dtype == "bfloat16" else 1e-4)


def test_a_run_goes_on_where_it_stopped(tmp_path):
    shape = ["checkpoint.every=2", "scheduler.name=constant", "distill.top_k=5"]
    whole = run(recipe_at(tmp_path, *shape, "train.steps=4", name="whole"))
    run(recipe_at(tmp_path, *shape, "train.steps=2", name="halves"))
    halves = run(recipe_at(tmp_path, *shape, "train.steps=4", name="halves"), 2)
    assert_parity(halves, trajectory(whole), weights(whole))


@pytest.mark.parametrize(
    ("overrides", "answer"),
    [
        (["distill.teacher=null"], "distill.teacher is missing"),
        (["distill.teacher=gone"], "distill.teacher=gone: there is no such directory"),
        (["distill.top_k=0"], "distill.top_k=0 must be at least 1"),
        (["distill.temperature=0"], "distill.temperature=0.0 must be"),
        (["distill.mixed_kl_weight=1.5"], "distill.mixed_kl_weight=1.5 must be from 0 to 1"),
    ],
)
def test_mistakes_are_named_before_a_run(tmp_path, overrides, answer):
    assert answer in "\n".join(preflight(recipe_at(tmp_path, *overrides), 1))


def test_a_teacher_that_does_not_fit_is_named_before_a_run(tmp_path):
    def problems(teacher, *overrides):
        return "\n".join(preflight(recipe_at(tmp_path, f"distill.teacher={teacher}", *overrides), 6))

    wide = write_model(tmp_path / "wide", vocab_size=80)
    assert "wide: its vocab_size is 80, and model.path's is 67" in problems(wide)
    assert "wide: " in problems(wide) and "Set distill.teacher to a directory with weights" in problems(wide)
    other = teacher_at(tmp_path, "qwen2")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"] |= {"w5": 6, "w6": 5}
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert "2 tokens have other ids than in model.path. For example, 'w5' is 6 there and 5 in model.path" in problems(
        other
    )
    heads = teacher_at(tmp_path, "gemma3", num_attention_heads=6, num_key_value_heads=3)
    found = problems(heads, "parallel.tp=2")
    assert "teacher-gemma3: parallel.tp=2 and the model's 3 KV heads" in found
    assert problems(teacher_at(tmp_path), "train.global_batch=12") == ""


def test_a_kl_that_is_not_known(tmp_path):
    with pytest.raises(Exception, match="distill.kl"):
        load_recipe(recipe_at(tmp_path), ["distill.kl=sideways"])
