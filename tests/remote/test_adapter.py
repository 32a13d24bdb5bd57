"""Adapters to servers: what vLLM's and SGLang's are told, version by version, what they refuse, and what they read."""

import json
import threading

import pytest
import torch
from safetensors.torch import load_file

from dtrain.adapters.config import AdapterConfig
from dtrain.adapters.lora import adapted_layers
from dtrain.base.errors import UserError
from dtrain.recipe.rollouts import Server
from dtrain.recipe.schema import Lora
from dtrain.rl.remote import engine as engine_module
from dtrain.rl.remote.dialects import AdapterVersion
from dtrain.rl.remote.engine import adapter_refusal
from dtrain.rl.remote.publish import AdapterPublisher
from tests.adapters.test_servers import MESHES, recipe_of, trained
from tests.problem_lines import method_problems
from tests.remote.fakes import FakeVllm
from tests.remote.test_http import engine_of, requests_of
from tests.serve.serving import wait_until
from tests.tiny import tiny_grpo
from tests.world import run_world


@pytest.fixture
def versions(tmp_path):
    """A version of an adapter of some rank, in files that say no more than its rank."""

    def of(version, rank=9):
        directory = tmp_path / f"step-{version}"
        directory.mkdir(exist_ok=True)
        config = {"r": rank, "use_dora": False, "modules_to_save": None}
        (directory / "adapter_config.json").write_text(json.dumps(config))
        (directory / "adapter_model.safetensors").touch()
        return AdapterVersion(directory, version, f"run-step-{version}", rank)

    return of


def told(fake, *paths):
    return [(path, body) for path, body in fake.calls if path in paths]


LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


def test_vllm_gets_a_name_a_version_and_forgets_the_one_before(vllm, versions):
    vllm.max_lora_rank = 16
    engine, requests = engine_of(vllm), requests_of(2, 2)
    assert engine.adapter_problem() is None
    for number in (1, 2, 3):
        engine.update_adapter(versions(number))
        assert [one.version for one in engine.generate(requests)] == [number] * 4
        assert {body["model"] for _, body in told(vllm, vllm.completions)[-2:]} == {f"run-step-{number}"}
        assert list(vllm.adapters) == [f"run-step-{number}"]
    loads = [body for _, body in told(vllm, LOAD)][1:]  # the first asked whether it takes any
    assert [body["lora_path"].rpartition("/")[2] for body in loads] == ["step-1", "step-2", "step-3"]
    assert not any("load_inplace" in body for body in loads)  # it would stay on, and read the files at every step


def test_what_is_under_way_keeps_its_version_and_its_adapter(vllm, versions):
    vllm.max_lora_rank = 16
    engine, requests, got = engine_of(vllm), requests_of(1, 2), []
    engine.update_adapter(versions(4))
    go_on = threading.Event()
    vllm.faults = [lambda handler, body: go_on.wait(20) and None]
    thread = threading.Thread(target=lambda: got.append(engine.generate(requests)))
    thread.start()
    wait_until(lambda: told(vllm, vllm.completions))
    engine.update_adapter(versions(5))
    assert list(vllm.adapters) == ["run-step-4", "run-step-5"]
    assert [one.version for one in engine.generate(requests)] == [5, 5]
    go_on.set()
    thread.join()
    assert [one.version for one in got[0]] == [4, 4]
    vllm.max_loras = 2
    engine.update_adapter(versions(6))
    assert "run-step-5" not in vllm.adapters and "run-step-6" in vllm.adapters
    # That version 4 was dropped from its memory in between is no error, and nobody asks for it again.
    engine.update_adapter(versions(7))
    assert [body["lora_name"] for _, body in told(vllm, UNLOAD)] == ["run-step-4", "run-step-5", "run-step-6"]


def test_new_calls_wait_for_the_version_that_is_on_its_way(vllm, versions):
    vllm.max_lora_rank = 16
    engine, requests, got = engine_of(vllm), requests_of(1, 2), []
    engine.update_adapter(versions(1))
    load, go_on = vllm.load, threading.Event()
    vllm.load = lambda *arguments: go_on.wait(20) and load(*arguments)
    updating = threading.Thread(target=engine.update_adapter, args=[versions(2)])
    updating.start()
    wait_until(lambda: len(told(vllm, LOAD)) == 2)
    drawing = threading.Thread(target=lambda: got.append(engine.generate(requests)))
    drawing.start()
    drawing.join(0.3)
    assert drawing.is_alive() and not told(vllm, vllm.completions)
    go_on.set()
    drawing.join()
    updating.join()
    assert [one.version for one in got[0]] == [2, 2]


def test_vllm_that_takes_no_adapter_is_told_how_to_start(vllm, versions):
    engine = engine_of(vllm, retries=0)
    start = "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and --enable-lora --max-lora-rank 16"
    assert start in adapter_refusal(engine, AdapterConfig(rank=9))
    with pytest.raises(UserError, match=f"404: Not Found. Start the server with {start}$"):
        engine.update_adapter(versions(1, 9))
    vllm.max_lora_rank = 8
    assert adapter_refusal(engine, AdapterConfig(rank=9)) is None  # it does not say how much it takes
    with pytest.raises(UserError, match=f"LoRA rank 9 is greater than max_lora_rank 8.*{start}"):
        engine.update_adapter(versions(1, 9))
    with pytest.raises(UserError, match="no server returned"):  # and draws nothing with what it had
        engine.generate(requests_of(1, 1))


def test_a_server_that_lost_its_adapter_is_passed_over_until_the_next(vllm, versions):
    other = FakeVllm()
    vllm.max_lora_rank = other.max_lora_rank = 16
    engine = engine_of(vllm, other, retries=0)
    engine.update_adapter(versions(1))
    vllm.adapters.clear()
    vllm.resident.clear()
    assert [one.version for one in engine.generate(requests_of(4, 1))] == [1] * 4
    other.close()
    engine.update_adapter(versions(2))
    assert list(vllm.adapters) == ["run-step-2"]
    assert [one.version for one in engine.generate(requests_of(2, 1))] == [2] * 2


def test_sglang_gets_the_name_with_each_prompt_and_its_own_version_says_nothing(sglang, versions):
    sglang.version = "3"  # of its base
    engine = engine_of(sglang)
    assert adapter_refusal(engine, AdapterConfig()) is None
    for number in (7, 8):
        engine.update_adapter(versions(number))
        assert [one.version for one in engine.generate(requests_of(1, 2))] == [number] * 2
    assert told(sglang, "/generate")[-1][1]["lora_path"] == "run-step-8" and list(sglang.adapters) == ["run-step-8"]
    sglang.enable_lora = False
    assert "--enable-lora --max-lora-rank 5 --lora-target-modules all" in adapter_refusal(engine, AdapterConfig(rank=5))
    with pytest.raises(UserError, match="LoRA is not enabled.*Start the server with --enable-lora --max-lora-rank 9"):
        engine.update_adapter(versions(9))


def test_auto_says_which_way_and_why(vllm):
    vllm.max_lora_rank = 16
    engine, said = engine_of(vllm), []

    def way(asked, config, **options):
        return engine_module.choose_weight_transport(asked, config, engine, said.append, **options)

    assert [way("auto", None), way("broadcast", None), said] == ["directory", "transfer", []]
    assert way("auto", AdapterConfig()) == "adapter" and len(said) == 2
    assert "Restart servers that got other weights from a run" in said.pop() and "only the adapter" in said.pop()
    assert way("auto", AdapterConfig(dora=True)) == "directory"
    assert "merged weights" in said[-1] and "vllm does not accept lora.dora=true" in said.pop()
    assert way("auto", AdapterConfig(modules_to_save=("lm_head",))) == "directory"
    assert "modules_to_save=['lm_head']" in said.pop()
    assert [way("directory", AdapterConfig()), way("broadcast", AdapterConfig()), said] == [
        "directory",
        "transfer",
        [],
    ]
    assert way("auto", AdapterConfig(), is_rounded=True) == "directory" and "lora.quantize=nf4 trains" in said.pop()
    assert way("adapter", AdapterConfig(), is_rounded=True) == "adapter" and "lora.quantize=nf4 trains" in said[1]
    assert way("auto", AdapterConfig(), has_private_base=True) == "directory"
    assert "only this run's checkpoints contain its base" in said.pop()
    with pytest.raises(
        UserError, match="weights=adapter: only this run's checkpoints contain its base(.|\n)*which sends merged"
    ):
        way("adapter", AdapterConfig(), has_private_base=True)
    with pytest.raises(
        UserError,
        match="vllm does not accept lora.dora=true. Set grpo.server.weights=directory, which sends merged weights",
    ):
        way("adapter", AdapterConfig(dora=True))


@pytest.mark.parametrize(
    "kind, lora, wanted",
    [
        ("auto", None, "and lora is null"),
        ("vllm", Lora(dora=True), "vllm does not accept lora.dora=true. Set grpo.server.weights=directory"),
        ("auto", Lora(modules_to_save=["lm_head"]), "servers do not accept lora.modules_to_save=[lm_head]"),
        ("auto", Lora(dora=True), None),  # who they are is known when they answer
        ("dtrain", Lora(dora=True), None),
    ],
)
def test_what_no_server_can_take_is_said_before_anything_starts(tmp_path, kind, lora, wanted):
    recipe = tiny_grpo(tmp_path, "model.init=pretrained")
    recipe.lora, recipe.grpo.engine = lora, "http"
    recipe.grpo.server = Server(urls=["http://localhost:1"], kind=kind, weights="adapter")
    found = [line for line in method_problems(recipe) if "grpo.server.weights" in line]
    assert len(found) == (wanted is not None)
    if wanted is not None:
        assert wanted in found[0]
    recipe.model.init = "scratch"
    lines = [
        line for line in method_problems(recipe) if "random base of model.init=scratch. Set grpo.server.weights" in line
    ]
    assert len(lines) == (lora is not None)


def publish(rank, recipe, world_size, url, shared):
    policy = trained(rank, recipe, world_size)
    engine = engine_of(url) if rank == 0 else None
    config = engine_module.adapter_of(vars(recipe.lora))
    publisher = AdapterPublisher(shared, recipe.model.directory, config, engine)
    for version in (3, 4, 5):
        publisher.publish(policy.model, version)
    whole = {}
    for name, layer in adapted_layers(policy.model).items():
        a, b = (getattr(one.detach(), "full_tensor", one.detach)() for one in (layer.lora_A, layer.lora_B))
        whole[name] = (layer.wrapper.scale * b @ a).tolist()
    return whole


@pytest.mark.parametrize("mesh, adapter", [("one", "lora"), ("dp2", "rslora"), ("tp4", "rslora")])
def test_the_files_are_the_adapter_for_who_reads_one_rank_and_alpha_alone(tmp_path, vllm, mesh, adapter):
    """vLLM and SGLang: alpha ÷ r · B·A with the config's r and alpha for every layer, and A [r, in] in all of them."""
    vllm.max_lora_rank = 16
    recipe, world_size = recipe_of(tmp_path, mesh, adapter), MESHES[mesh][0]
    whole = run_world(publish, world_size, recipe, world_size, vllm.url, tmp_path / "shared")[0]
    ((name, directory),) = vllm.adapters.items()
    assert name.endswith("-step-5") and len(name) > 10 and directory == str(tmp_path / "shared" / "step-5")
    assert sorted(path.name for path in (tmp_path / "shared").iterdir()) == ["step-4", "step-5"]
    config = json.loads((tmp_path / "shared/step-5/adapter_config.json").read_text())
    assert not (config["use_rslora"] or config["rank_pattern"] or config["alpha_pattern"])
    tensors = load_file(tmp_path / "shared/step-5/adapter_model.safetensors")
    assert len(tensors) == 2 * len(whole)
    for module, wanted in whole.items():
        a, b = (tensors[f"base_model.model.{module}.lora_{one}.weight"] for one in "AB")
        assert a.shape[0] == b.shape[1] == config["r"]
        found, expected = config["lora_alpha"] / config["r"] * b @ a, torch.tensor(wanted, dtype=torch.float64)
        assert expected.abs().max() > 1e-6 and (found - expected).abs().max() <= 1e-13
