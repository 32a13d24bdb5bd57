"""Distillation of the student's own samples: the bits of the same completions from a file, meshes, resume inside a
rollout, shares, validation against dense models, and what is refused."""

import json
import random

import pytest
import torch

from dtrain import models
from dtrain.losses.head.kl import forward_kl
from dtrain.models.read_config import read_config
from dtrain.rl import on_policy
from tests.methods.comparing import assert_same_run
from tests.methods.test_distill import teacher_at
from tests.problem_lines import preflight
from tests.running import assert_same, metrics, run, trajectory, weights
from tests.tiny import VOCAB, tiny_recipe

FIXED = ("train.steps=4", "train.micro_batch=2", "distill.prompts_per_step=16", "distill.sampling.temperature=0.8")
HALF = (*FIXED, "distill.student_share=0.5", "distill.kl=jsd", "distill.jsd_beta=0.3")


def write_answers(path, count=40):
    """Tokenized prompts with the data's own answers."""
    draw = random.Random(3)
    with path.open("w") as file:
        for _ in range(count):
            asked, answer = ([draw.randrange(2, VOCAB) for _ in range(draw.randint(1, most))] for most in (6, 9))
            row = {"prompt_ids": asked, "input_ids": asked + answer, "labels": [-100] * len(asked) + answer}
            file.write(json.dumps(row) + "\n")
    return path


def recipe_at(root, *overrides, name="run", **options):
    rows = root / "answers.jsonl"
    if not rows.exists():
        write_answers(rows)
    section = [
        "method=distill",
        f"distill.teacher={teacher_at(root)}",
        f"data.train.path={rows}",
        "distill.samples=student",
        "distill.sampling.max_new_tokens=6",
    ]
    return tiny_recipe(root, *section, *overrides, name=name, **options)


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_the_same_completions_from_a_file_give_the_same_bits(tmp_path, monkeypatch, share):
    drawn, all_counted = [], on_policy._all_counted
    monkeypatch.setattr(on_policy, "_all_counted", lambda samples: drawn.extend(samples) or all_counted(samples))
    shape = ("data.packing=false", "train.steps=4", "checkpoint.every=4")
    own = run(recipe_at(tmp_path, *shape, *FIXED, f"distill.student_share={share}", name="own"))
    assert len(drawn) == 32 and sum(one.finish == "data" for one in drawn) == 32 * (1 - share)
    lines = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    of_data, of_prompt = ({tuple(line[key]): line["labels"] for line in lines} for key in ("input_ids", "prompt_ids"))
    answered = []  # no row twice, and those of the data as they stand there
    for one in drawn:
        from_data = one.finish == "data"
        answered.append((of_data if from_data else of_prompt)[tuple(one.ids if from_data else one.prompt)])
        assert not from_data or list(one.sampled) == [label != -100 for label in answered[-1]]
    assert len({id(labels) for labels in answered}) == 32
    groups = [json.loads(line)["group"] for line in (tmp_path / "runs/own/samples.jsonl").read_text().splitlines()]
    assert groups == [number for number, one in enumerate(drawn) if one.finish != "data"]
    with (tmp_path / "drawn.jsonl").open("w") as file:
        for one in drawn:
            ids = [*one.prompt, *one.ids]
            sampled = [False] * len(one.prompt) + list(one.sampled)
            labels = [token if is_drawn else -100 for token, is_drawn in zip(ids, sampled, strict=True)]
            file.write(json.dumps({"input_ids": ids, "labels": labels}) + "\n")
    section = ["method=distill", f"distill.teacher={teacher_at(tmp_path)}", f"data.train.path={tmp_path}/drawn.jsonl"]
    given = run(tiny_recipe(tmp_path, *section, *shape, "train.micro_batch=2", "data.shuffle=false", name="given"))
    assert trajectory(own) == trajectory(given)
    found = weights(own, 4)
    for name, right in weights(given, 4).items():
        assert torch.equal(found[name], right), name


def test_experts_over_ranks_give_the_numbers_of_one_process(tmp_path):
    """Other meshes: tests/methods/test_every_method.py."""
    fixed = (*HALF, "data.packing=false", "checkpoint.every=4")
    one = run(recipe_at(tmp_path, *fixed, family="qwen3-moe", name="one"))
    mesh = run(recipe_at(tmp_path, *fixed, "parallel.ep=2", family="qwen3-moe", name="mesh"), 2)
    assert_same_run(mesh, one)


def test_a_teacher_with_linear_attention_gets_every_completion_on_its_own(tmp_path):
    (tmp_path / "answers.jsonl").write_text('{"prompt_ids": [5, 6, 7, 8, 9, 10, 11]}\n' * 16)
    teacher = f"distill.teacher={teacher_at(tmp_path, 'qwen3.5')}"
    shape = (*FIXED, teacher, "train.steps=2", "checkpoint.every=2")
    alone = run(recipe_at(tmp_path, *shape, "train.share_prompts=false", name="alone"))
    assert_same_run(run(recipe_at(tmp_path, *shape, name="auto")), alone)
    (problem,) = preflight(recipe_at(tmp_path, *shape, "train.share_prompts=true"), 1)
    assert problem.startswith("train.share_prompts=true: distill.teacher=")
    assert "has linear attention" in problem and problem.endswith("Leave it out.")


def test_a_run_goes_on_inside_a_rollout(tmp_path):
    shape = (*HALF, "checkpoint.every=3", "scheduler.name=constant")
    whole = run(recipe_at(tmp_path, *shape, name="whole"))
    run(recipe_at(tmp_path, *shape, "train.steps=3", name="halves"))
    changed = recipe_at(tmp_path, *shape, "train.global_batch=4", name="halves")
    with pytest.raises(Exception, match=r"within a rollout(.|\n)*train.global_batch: 8 -> 4"):
        run(changed)
    halves = run(recipe_at(tmp_path, *shape, name="halves"), 2)
    assert_same(halves, whole, rtol=1e-9)
    samples = [(tmp_path / "runs" / name / "samples.jsonl").read_text() for name in ("whole", "halves")]
    assert samples[0] == samples[1]


@pytest.mark.parametrize("share", ["1.0", "0.29", "0.7", "0.005"])
def test_any_so_many_prompts_in_a_row_hold_the_share(share):
    collector = object.__new__(on_policy.StudentCollector)
    collector.share = on_policy.Fraction(share)
    drawn = [collector.is_sampled(index) for index in range(700)]
    for start in (0, 1, 133, 500):
        assert sum(drawn[start : start + 200]) == round(float(share) * 200)


def test_validation_is_the_divergence_over_the_students_likeliest_answers(tmp_path):
    shape = ("train.steps=1", "optimizer.lr=1e-30", "scheduler.warmup_steps=0", "train.validate_every=1")
    recipe = run(recipe_at(tmp_path, *shape, "data.val.path=${data.train.path}", "data.packing=false"))
    row = next(row for row in metrics(recipe) if "val_loss" in row)
    student = models.build(read_config(recipe.model.path), torch.float64)
    models.init_weights(student, recipe.run.seed)
    teacher = models.from_pretrained(recipe.distill.teacher, torch.float64)
    found = []
    for line in (tmp_path / "answers.jsonl").read_text().splitlines():
        ids = json.loads(line)["prompt_ids"]
        for _ in range(6):
            with torch.no_grad():
                logq, logp = (model(torch.tensor([ids]))[0, -1].log_softmax(-1) for model in (student, teacher))
            found.append(forward_kl(logq, logp).item())
            ids = [*ids, logq.argmax().item()]
            if ids[-1] == 1:
                break
    assert row["val_loss"] == pytest.approx(sum(found) / len(found), rel=1e-9)


@pytest.mark.parametrize(
    ("overrides", "answer"),
    [
        (["distill.student_share=0"], "distill.student_share=0.0 must be more than 0, up to 1"),
        (["distill.student_share=1.5"], "distill.student_share=1.5 must be more than 0, up to 1"),
        (["distill.jsd_beta=2"], "distill.jsd_beta=2.0 must be from 0 to 1"),
        (["distill.jsd_beta=0.2"], "distill.jsd_beta=0.2 is read only with distill.kl=jsd"),
        (["distill.zero_outside_topk=false"], "distill.zero_outside_topk=false is read only with distill.top_k"),
        (["distill.samples=data", "distill.mixed_kl_weight=1"], "distill.mixed_kl_weight=1.0 is read only with"),
        (["distill.prompts_per_step=12"], "train.global_batch=8 does not divide a rollout"),
        (["distill.sampling.max_new_tokens=32"], "leaves no room for a prompt within data.max_length=32"),
        (["distill.sampling.temperature=0"], "distill.sampling.temperature=0.0 must be"),
        (["data.loss_on=all"], "data.loss_on=all has no effect"),
        (["data.train.format=text"], "distill.samples=student draws its own answers to prompts"),
        (["data.train.format=question", "distill.student_share=0.5"], "set distill.student_share=1"),
        (["distill.samples=data"], "distill.sampling.max_new_tokens is about sampling from the student"),
    ],
)
def test_mistakes_are_named_before_a_run(tmp_path, overrides, answer):
    assert answer in "\n".join(preflight(recipe_at(tmp_path, *overrides), 1))


def test_rows_without_prompts_are_named_before_a_run(tmp_path):
    (tmp_path / "texts.jsonl").write_text('{"text": "w3 w4"}\n')
    found = "\n".join(preflight(recipe_at(tmp_path, f"data.train.path={tmp_path}/texts.jsonl"), 1))
    assert "texts.jsonl:1: no known format has the keys text" in found
