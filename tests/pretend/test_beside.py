"""Neighbours of a run in its process: plans before it, a second run, servers that take its weights."""

from pathlib import Path

import torch

from dtrain import recipe as config
from dtrain.base.batch import collate
from dtrain.commands import cli
from dtrain.commands.plan.processes import Child
from dtrain.inference.request import Request, SamplingParams
from dtrain.methods.sft import SftMethod
from dtrain.models.read_config import read_config
from dtrain.parallel.mesh import build_mesh, init_one_process_group
from dtrain.policy import Policy
from dtrain.rl.remote.http import HttpEngine
from dtrain.rl.remote.publish import DirectoryPublisher
from tests.policy.test_policy import rows
from tests.pretend.runs import rows_of, runtime_of
from tests.pretend.worlds import run_pretend
from tests.remote.test_publish import sha256
from tests.serve.serving import Process, ask, controlled, key_file, make_model
from tests.stepping import train_step
from tests.tiny import tiny_recipe


def seen(rank):
    with Child(torch.cuda.device_count) as child:
        return child.result(), torch.cuda.device_count()


def test_a_plans_process_sees_no_card():
    assert run_pretend(seen, 1) == [(0, 1)]


def ran(rank, paths):
    return [cli.main(["run", str(path)]) for path in paths]


def test_a_second_run_in_one_process_gives_the_same(tmp_path):
    made = [tiny_recipe(tmp_path, "train.steps=3", "train.dtype=bfloat16", name=name) for name in ("first", "second")]
    paths = [tmp_path / f"{recipe.run.name}.yaml" for recipe in made]
    for path, recipe in zip(paths, made, strict=True):
        path.write_text(config.to_yaml(recipe))
    assert run_pretend(ran, 1, paths) == [[0, 0]]
    first, second = ([(row["loss"], row["grad_norm"]) for row in rows_of(recipe)] for recipe in made)
    assert first == second and len(first) == 3


def published(rank, recipe, url, key, shared):
    """After a step on a card, by a directory: what the weights are, and what the server has and answers."""
    runtime = runtime_of(rank, 1)
    init_one_process_group("cuda")
    policy = Policy(recipe, read_config(recipe.model.path), build_mesh(runtime), runtime)
    policy.init_optimizer(4)
    train_step(policy, collate(rows(4)), SftMethod(recipe).loss)
    engine = HttpEngine([url], timeout=60.0, start_timeout=10.0, api_key_file=key)
    DirectoryPublisher(shared, Path(recipe.model.path), engine).publish(policy.model, 1)
    ours = {name: sha256(tensor.cpu()) for name, tensor in policy.weights.full_tensors(torch.float32)}
    theirs = ask(url, "/weight_checker", {"action": "checksum"})[1]["checksums"]
    versions = [one.version for one in engine.generate([Request([5, 6], SamplingParams(max_new_tokens=3))])]
    return ours, theirs, versions


def test_a_server_has_the_cards_weights_by_http(tmp_path):
    recipe = tiny_recipe(tmp_path, "train.global_batch=4", "train.dtype=float32")
    server = Process(make_model(tmp_path, 1), "--max-rows", "4", *controlled(tmp_path), dtype="float32")
    try:
        ((ours, theirs, versions),) = run_pretend(
            published, 1, recipe, server.url, key_file(tmp_path), tmp_path / "shared"
        )
    finally:
        server.kill()
    assert ours == theirs and len(ours) > 10 and versions == [1]
