"""An adapter beside the model that is served: its name, who may change it, and completions of both side by side."""

import json
import threading

import pytest
import torch

from dtrain import models
from dtrain.adapters.config import AdapterConfig, is_adapter
from dtrain.adapters.lora import build_with_adapters
from dtrain.checkpoint.huggingface.write import write_directory
from dtrain.checkpoint.peft.files import write_adapter
from dtrain.inference.engine import Engine
from dtrain.rl.remote.http import HttpEngine
from dtrain.rl.remote.publish import write_marker
from tests.remote.test_publish import paused_under_way
from tests.serve.serving import (
    GREEDY,
    KEY,
    Process,
    ask,
    controlled,
    key_file,
    make_model,
    naive,
    naive_ids,
    serving,
    wait_until,
)

LOAD, UNLOAD, COMPLETIONS = "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/completions"


def make_adapter(root, base, seed, name, rank=4, **options):
    """An adapter's directory, and a directory of the same model merged, written by the code that exports."""
    config = AdapterConfig(rank=rank, alpha=8.0, **options)
    beside = models.from_pretrained(base, torch.float64)
    model = build_with_adapters(beside.config, config, torch.float64)
    model.load_state_dict(beside.state_dict(), strict=False)
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter, tensor in model.named_parameters():
            if is_adapter(parameter):
                tensor.copy_(torch.randn(tensor.shape, generator=draw, dtype=tensor.dtype).abs() + 0.1)
    tensors = dict(model.named_parameters())
    write_adapter(root / name, tensors, config, model.config, str(base))
    write_directory(model, root / f"{name}-merged", base)
    return root / name, root / f"{name}-merged"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("adapters"), 1)


@pytest.fixture(scope="module")
def adapters(base):
    first = make_adapter(base.parent, base, 1, "first")
    second = make_adapter(base.parent, base, 2, "second", rank=3, dora=True, target=("q_proj", "down_proj"))
    return first, second


@pytest.fixture
def server(base):
    with serving(base, key="secret", control=base.parent) as (url, worker):
        yield url, worker


def ids(url, model=None, **changes):
    status, answer = ask(url, COMPLETIONS, {**GREEDY, **changes, **({} if model is None else {"model": model})})
    assert status == 200, answer
    assert answer["model"] == (model or "tiny")
    return answer["choices"][0]["token_ids"]


def load(url, name, directory, **fields):
    return ask(url, LOAD, {"lora_name": name, "lora_path": str(directory), **fields})


def test_completions_by_name_are_the_merged_models_and_the_others_the_models_own(server, base, adapters):
    url, _ = server
    (first, merged), (second, other) = adapters
    wanted, replaced, own = (naive(one, GREEDY["prompt"], 6)[0] for one in (merged, other, base))
    assert len({tuple(one) for one in (wanted, replaced, own)}) == 3
    assert load(url, "mine", first)[0] == 200
    assert [card["id"] for card in ask(url, "/v1/models")[1]["data"]] == ["tiny", "mine"]
    assert ask(url, "/v1/models")[1]["data"][1]["parent"] == "tiny"
    assert [ids(url, "mine"), ids(url), ids(url, "mine")] == [wanted, own, wanted]
    assert load(url, "mine", second)[0] == 400
    assert load(url, "mine", second, load_inplace=True, weight_version=7)[1]["weight_version"] == 7
    assert [ids(url, "mine"), ids(url, "tiny")] == [replaced, own]
    assert load(url, "another", first)[0] == 409
    assert ask(url, UNLOAD, {"lora_name": "another"})[0] == 404
    assert ask(url, UNLOAD, {"lora_name": "mine"})[0] == 200
    assert ask(url, COMPLETIONS, {**GREEDY, "model": "mine"})[0] == 404
    assert ids(url) == own and len(ask(url, "/v1/models")[1]["data"]) == 1
    assert load(url, "another", first)[0] == 200 and ids(url, "another") == wanted


class Watched(Engine):
    """Notes, step by step, which models its rows are of and whether the adapter takes part."""

    def step(self):
        has_adapter = self.adapters is None or self.adapters.enabled
        prompts = {row.prompt.ids[0] for row in self._sequences.values()}
        self.model.seen.append((has_adapter, frozenset(prompts)))
        return super().step()


@pytest.mark.slow
def test_rows_of_model_and_adapter_are_never_in_one_forward(base, adapters):
    (first, merged), _ = adapters
    with serving(base, key="secret", control=base.parent, engine=Watched) as (url, worker):
        worker._engine.model.seen = seen = []
        assert load(url, "mine", first)[0] == 200
        found, threads = {}, []

        def talk(index, model):
            # A prompt's first token says which model it is of.
            prompt = [(20 if model == "mine" else 40), 6, 7, index]
            found[index, model] = ids(url, model, prompt=prompt, max_tokens=8 + index)

        for index in range(6):
            for model in ("tiny", "mine"):
                threads.append(threading.Thread(target=talk, args=(index, model)))
                threads[-1].start()
        for thread in threads:
            thread.join()
    assert {prompts for _, prompts in seen} == {frozenset([20]), frozenset([40])}
    assert all(has_adapter == (prompts == {20}) for has_adapter, prompts in seen)
    for (index, model), tokens in found.items():
        directory, start = (merged, 20) if model == "mine" else (base, 40)
        assert tokens == naive(directory, [start, 6, 7, index], 8 + index)[0]


@pytest.mark.slow
def test_in_place_what_is_under_way_goes_on_and_says_its_oldest_version(server, adapters):
    url, _ = server
    (first, merged), (second, other) = adapters
    body = {**GREEDY, "model": "mine", "max_tokens": 60, "ignore_eos": True}
    assert load(url, "mine", first, weight_version=4)[0] == 200
    thread, got = paused_under_way(url, 1, lambda: ask(url, COMPLETIONS, body)[1]["choices"][0])
    assert load(url, "mine", second, weight_version=5, load_inplace=True)[0] == 200
    ask(url, "/resume", {})
    thread.join()
    assert got[0]["weight_version"] == 4
    before, after = (naive(one, GREEDY["prompt"], 60, stop_ids=())[0] for one in (merged, other))
    assert got[0]["token_ids"][0] == before[0] and got[0]["token_ids"] not in (before, after)
    thread, got = paused_under_way(url, 1, lambda: ask(url, COMPLETIONS, body)[1]["choices"][0])
    assert load(url, "mine", second, load_inplace=True)[1]["weight_version"] == 6  # the same again: not the model alone
    ask(url, "/resume", {})
    thread.join()
    assert got[0]["weight_version"] == 5 and got[0]["token_ids"] == after
    fresh = ask(url, COMPLETIONS, body)[1]["choices"][0]
    assert fresh["weight_version"] == 6 and fresh["token_ids"] == after


def test_unloading_waits_for_what_is_under_way_or_aborts_it(server, adapters):
    url, worker = server
    (first, merged), _ = adapters
    long = {**GREEDY, "model": "mine", "max_tokens": 60, "ignore_eos": True}
    assert load(url, "mine", first)[0] == 200
    thread, got = paused_under_way(url, 1, lambda: ask(url, COMPLETIONS, long))
    assert ask(url, UNLOAD, {"lora_name": "mine"})[0] == 409  # paused, it would wait without end
    unloading = threading.Thread(target=lambda: got.append(ask(url, UNLOAD, {"lora_name": "mine"})))
    ask(url, "/resume", {})
    unloading.start()
    thread.join()
    unloading.join()
    assert [status for status, _ in got] == [200, 200]
    answer = next(answer for _, answer in got if "choices" in answer)
    assert answer["choices"][0]["token_ids"] == naive(merged, GREEDY["prompt"], 60, stop_ids=())[0]
    assert load(url, "mine", first)[0] == 200
    thread, got = paused_under_way(url, 1, lambda: ask(url, COMPLETIONS, long))
    assert ask(url, UNLOAD, {"lora_name": "mine", "mode": "abort"})[0] == 200
    thread.join()
    assert got[0][0] == 503 and "send the request again" in str(got[0][1])
    assert ask(url, UNLOAD, {"lora_name": "mine", "mode": "keep"})[0] == 400


def test_what_waits_for_an_adapter_that_goes_is_told(server, adapters):
    url, worker = server
    (first, _), _ = adapters
    assert load(url, "mine", first)[0] == 200
    ask(url, "/pause", {"mode": "keep"})
    got = []
    thread = threading.Thread(target=lambda: got.append(ask(url, COMPLETIONS, {**GREEDY, "model": "mine"})))
    thread.start()
    wait_until(lambda: worker.load[1] == 1)
    assert ask(url, UNLOAD, {"lora_name": "mine"})[0] == 200
    ask(url, "/resume", {})
    thread.join()
    assert got[0][0] == 404 and got[0][1]["error"]["param"] == "model"
    assert ids(url) == naive_ids(first.parent / "model")


def test_a_model_with_an_adapter_of_its_own_is_one_whose_weights_are_replaced_whole(base, adapters, tmp_path):
    """Logprobs in float64: 1e-12 of the merged model's, and of those that were sent."""
    (first, merged), (second, other) = adapters
    body = {**GREEDY, "logprobs": 0}

    def drawn(url):
        return ask(url, COMPLETIONS, body)[1]["choices"][0]["logprobs"]["token_logprobs"]

    for one, directory in ((first, merged), (second, other)):
        with serving(one, key="secret", control=base.parent) as (url, worker):
            assert drawn(url) == pytest.approx(naive(directory, GREEDY["prompt"], 6)[1], abs=1e-12)
            write_marker(base)
            update = {"model_path": str(base), "weight_version": 3}
            assert ask(url, "/update_weights_from_disk", update)[0] == 200
            assert drawn(url) == pytest.approx(naive(base, GREEDY["prompt"], 6)[1], abs=1e-12)
            status, answer = load(url, "mine", first)
            assert status == 409 and "serve its base model" in str(answer)
            engine = HttpEngine([url], api_key_file=key_file(tmp_path))
            assert "serve its base model" in engine.adapter_problem()
            engine.close()


def test_a_trainer_hears_before_it_sends_that_another_adapter_is_loaded(server, adapters, tmp_path):
    url, _ = server
    engine = HttpEngine([url], api_key_file=key_file(tmp_path))
    assert engine.adapter_problem() is None
    assert load(url, "mine", adapters[0][0])[0] == 200
    assert "'mine' is loaded" in engine.adapter_problem()
    engine.close()


def test_half_an_update_of_the_weights_stays_one(server, base, adapters):
    url, worker = server
    (first, merged), _ = adapters
    worker.run_between_steps(lambda: setattr(worker, "is_half_updated", True))
    status, answer = load(url, "mine", first)
    assert status == 409 and "began and did not end" in str(answer)
    assert worker.is_half_updated and worker.version == 0 and len(ask(url, "/v1/models")[1]["data"]) == 1
    worker.run_between_steps(lambda: setattr(worker, "is_half_updated", False))
    assert load(url, "mine", first)[0] == 200 and ids(url, "mine") == naive_ids(merged)


@pytest.mark.parametrize(
    "change, status, wanted",
    [
        ({"lora_name": ""}, 400, "lora_name"),
        ({"lora_name": "tiny"}, 400, "not the model's"),
        ({"lora_path": "/etc"}, 403, "is not below"),
        ({"lora_path": "{root}/../.."}, 403, "is not below"),
        ({"lora_path": "{root}/none"}, 404, "no such directory"),
        ({"lora_path": "{root}/model"}, 400, "adapter_config.json"),
        ({"lora_path": "{root}/wrong"}, 400, "lora_A"),
        ({"lora_path": "{root}/saved"}, 400, "modules_to_save"),
        ({"lora_path": "{root}/cut"}, 400, "adapter_model.safetensors"),
        ({"lora_int_id": 3}, 400, "lora_int_id is not a field"),
        ({"load_inplace": 1}, 400, "load_inplace"),
        ({"mode": "later"}, 400, "mode"),
    ],
)
def test_what_does_not_fit_changes_nothing(server, base, adapters, change, status, wanted):
    url, _ = server
    root, (first, _) = base.parent, adapters[0]
    if not (root / "wrong").exists():
        for name, changes in (("wrong", {"r": 7}), ("saved", {"modules_to_save": ["lm_head"]}), ("cut", {})):
            (root / name).mkdir()
            config = json.loads((first / "adapter_config.json").read_text())
            (root / name / "adapter_config.json").write_text(json.dumps({**config, **changes}))
            whole = (first / "adapter_model.safetensors").read_bytes()
            (root / name / "adapter_model.safetensors").write_bytes(whole[: -100 if name == "cut" else None])
    fields = {"lora_name": "mine", "lora_path": str(first), **change}
    fields["lora_path"] = fields["lora_path"].replace("{root}", str(root))
    found, answer = ask(url, LOAD, fields)
    assert (found, wanted in str(answer)) == (status, True), answer
    assert ids(url) == naive_ids(base) and len(ask(url, "/v1/models")[1]["data"]) == 1


@pytest.mark.parametrize("path", [LOAD, UNLOAD])
def test_strangers_and_pages_change_no_adapter(base, adapters, path):
    body = {"lora_name": "mine", "lora_path": str(adapters[0][0])}
    with serving(base, key="secret", control=base.parent) as (url, _):
        assert ask(url, path, body, Authorization="Bearer wrong")[0] == 401
        assert ask(url, path, body, **KEY, Origin="http://evil")[0] == 403
    with serving(base, key="secret") as (url, _):  # without --control
        assert ask(url, path, body)[0] == 404
    with serving(base, control=base.parent) as (url, _):  # without a key
        assert ask(url, path, body, Authorization="")[0] == 404


def test_the_command_takes_an_adapter_to_begin_with(base, adapters, tmp_path):
    (first, merged), _ = adapters
    process = Process(base, "--name", "tiny", "--adapter", f"mine={first}", *controlled(tmp_path))
    try:
        assert [ids(process.url, "mine"), ids(process.url)] == [naive_ids(merged), naive_ids(base)]
        assert any("mine" in line for line in process.lines)
    finally:
        process.kill()
    for name, directory, wanted in (("mine", base, "adapter_config.json"), ("tiny", first, "under a name other than")):
        process = Process(base, "--name", "tiny", "--adapter", f"{name}={directory}")
        assert process.process.wait(60) != 0
        process._reader.join(5)
        assert any(wanted in line for line in process.lines), process.lines
