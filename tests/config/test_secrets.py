"""Secrets of a recipe: what the environment gave is saved as its text, plain ones are hidden, and all still run."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from dtrain import recipe as config
from dtrain.base.errors import RecipeError, UserError
from dtrain.recipe.secrets import HIDDEN, hide_secrets, is_secret_name, mask_secrets
from dtrain.training import load_recipe, recipe_keys
from dtrain.training.preflight import notes
from tests.forked_python import ForkedPython
from tests.tiny import tiny_recipe

ROOT = Path(__file__).parents[2]
TOKEN = "hunter2-from-the-environment"
PLAIN = "swordfish-in-plain-text"


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("PLACE", "/models")
    monkeypatch.setenv("RATE", "0.25")
    monkeypatch.delenv("NOWHERE", raising=False)


REFERENCES = {
    "${oc.env:HF_TOKEN}": TOKEN,
    "Bearer ${oc.env:HF_TOKEN}": f"Bearer {TOKEN}",
    "${oc.env:NOWHERE,${oc.env:HF_TOKEN}}": TOKEN,
    "${oc.select:data.template_kwargs.first}": TOKEN,
    "${data.template_kwargs.first}": TOKEN,
    "https://me:${oc.env:HF_TOKEN}@host/x": f"https://me:{TOKEN}@host/x",
    "${oc.env:PLACE}/Qwen3": "/models/Qwen3",
}


@pytest.mark.parametrize("text", REFERENCES)
def test_what_the_environment_gives_is_saved_as_its_text(text, monkeypatch):
    kwargs = {"first": "${oc.env:HF_TOKEN}", "x": text, "plain": "${train.global_batch}"}
    recipe = load_recipe({"data": {"template_kwargs": kwargs}})
    assert recipe.data.template_kwargs == {"first": TOKEN, "x": REFERENCES[text], "plain": 64}
    saved = config.to_yaml(recipe)
    assert TOKEN not in saved and yaml.safe_load(saved)["data"]["template_kwargs"] == {**kwargs, "plain": 64}
    assert load_recipe(yaml.safe_load(saved)) == recipe and config.diff_recipes(saved, recipe) == []
    handed = load_recipe(yaml.safe_load(config.to_yaml(recipe, with_secrets=True)))  # as a worker gets it
    taken = config.with_origins_of(handed, json.loads(json.dumps(config.origins(recipe))))
    assert taken == recipe and config.to_yaml(taken) == saved
    resolved = yaml.safe_dump({"run": {"name": "sft"}, "data": {"template_kwargs": recipe.data.template_kwargs}})
    assert config.diff_recipes(resolved, recipe) == []  # as an earlier dtrain saved it
    again = load_recipe(recipe, ["train.steps=7"])  # a recipe that is changed keeps its references
    assert TOKEN not in config.to_yaml(again) and again.data.template_kwargs == recipe.data.template_kwargs
    before = config.to_yaml(recipe)
    monkeypatch.setenv("HF_TOKEN", "another-one")
    assert config.diff_recipes(before, load_recipe(yaml.safe_load(before))) == []


def test_numbers_and_names_from_the_environment_count_by_their_value(monkeypatch):
    monkeypatch.setenv("KIND", "adam")
    words = ["optimizer.lr=${oc.env:RATE}", "optimizer.name=${oc.env:KIND}", "train.dtype=${oc.env:TYPE,float32}"]
    saved = config.to_yaml(load_recipe({}, words))
    assert "oc.env" not in saved
    monkeypatch.setenv("RATE", "0.5")
    assert config.diff_recipes(saved, load_recipe({}, words)) == [("optimizer.lr", 0.25, 0.5)]


def test_a_value_that_code_has_replaced_is_not_taken_back_for_its_text():
    recipe = load_recipe({}, ["model.path=${oc.env:PLACE}/Qwen3"])
    assert yaml.safe_load(config.to_yaml(recipe))["model"]["path"] == "${oc.env:PLACE}/Qwen3"
    recipe.model.path = "/cache/Qwen3"
    assert yaml.safe_load(config.to_yaml(recipe))["model"]["path"] == "/cache/Qwen3"


def test_text_that_looks_like_an_interpolation_comes_back_as_it_was():
    recipe = load_recipe({"grpo": {"system_prompt": r"write \${x} and \\\${oc.env:HF_TOKEN}"}})
    assert load_recipe(yaml.safe_load(config.to_yaml(recipe))).grpo.system_prompt == recipe.grpo.system_prompt


@pytest.mark.parametrize("text", ["${oc.env:NOWHERE}", "Bearer ${oc.env:NOWHERE}", "${oc.decode:${oc.env:NOWHERE}}"])
def test_a_variable_that_is_missing_is_named_with_its_key(text):
    with pytest.raises(RecipeError, match=r"grpo.system_prompt: the environment has no NOWHERE"):
        load_recipe({"grpo": {"system_prompt": text}})


def test_no_message_holds_a_value():
    wrong = {
        "train": {"steps": "${oc.env:HF_TOKEN}"},
        "optimizer": {"name": "${oc.env:HF_TOKEN}", "kwargs": {"api_key": PLAIN}, "betas": PLAIN},
        "model": "${oc.env:HF_TOKEN}",
        "grpo": {"kwargs": "${oc.decode:'[1,${oc.env:HF_TOKEN}'}"},
    }
    with pytest.raises(RecipeError) as caught:
        load_recipe(wrong, [f"optimizer.kwargs.password=[{PLAIN}", f"grpo.nothing.token={PLAIN}"])
    assert TOKEN not in str(caught.value) and PLAIN not in str(caught.value) and "train.steps=" in str(caught.value)


def test_no_error_on_the_way_holds_a_value():
    recipe = load_recipe({"data": {"template_kwargs": {"api_key": PLAIN, "x": "${oc.env:HF_TOKEN}"}}})
    with pytest.raises(UserError, match="refused") as caught, config.redacted_errors(recipe):
        raise UserError(f"refused: {PLAIN}, {TOKEN}")
    assert TOKEN not in str(caught.value) and PLAIN not in str(caught.value)


SECRET = """HF_TOKEN hf_token token api_key OPENAI_API_KEY apiKey X-Api-Key wandb_key judge_key password db_password
    dbpassword client_secret Authorization auth basic_auth authToken AWS_SECRET_ACCESS_KEY private_key passphrase
    credentials db_pass hftoken accessToken Proxy-Authorization""".split()
HARMLESS = """tokenizer tokens max_new_tokens keep_last monkey key key_column sort_key answer_key required_keys
    token_level eos_token bos_token pad_token add_bos_token stop_token num_token author keyboard secretary password_file
    api_key_file token_type token_id pass_reward bypass column""".split()


def test_names_of_secrets_and_names_that_only_look_so():
    assert [name for name in SECRET if not is_secret_name(name, alone=False)] == []
    assert [name for name in HARMLESS if is_secret_name(name, alone=False)] == []
    assert [key for key in recipe_keys() if any(is_secret_name(part, alone=False) for part in key.split("."))] == []
    assert all(map(is_secret_name, ("KEY", "TOKEN", "AUTH")))


@pytest.mark.parametrize("name", SECRET)
def test_plain_text_is_hidden_and_still_runs(name):
    given = {"optimizer": {"kwargs": {name: PLAIN, "deep": [{"headers": {name: PLAIN}}]}}}
    recipe = load_recipe(given)
    assert recipe.optimizer.kwargs[name] == PLAIN
    saved = config.to_yaml(recipe)
    assert PLAIN not in saved and HIDDEN in saved and config.diff_recipes(saved, recipe) == []
    assert load_recipe(yaml.safe_load(config.to_yaml(recipe, with_secrets=True))) == recipe  # what a worker is handed
    assert len(notes(recipe)) == 2 and PLAIN not in "".join(notes(recipe))
    assert PLAIN not in config.redact(f"refused: {PLAIN}!", recipe)
    with pytest.raises(RecipeError, match=r"optimizer.kwargs.*was hidden when this recipe was saved"):
        load_recipe(yaml.safe_load(saved))


def test_what_reads_as_a_secret_is_hidden_under_any_name():
    for text in (
        f"https://me:{PLAIN}@host/x",
        f"http://{PLAIN}@host",
        f"https://host/x?api_key={PLAIN}&n=3",
        f"Bearer {PLAIN}4",
        f"Authorization: {PLAIN}",
        f"HF_TOKEN={PLAIN} python x.py --password={PLAIN}",
        "hf_" + "aB3" * 11,
        f"sk-{PLAIN}",
        f"Server=h;Password={PLAIN};",
        f'{{"n": 1, "api_key": "{PLAIN}"}}',
        f"curl --api-key {PLAIN} url",
        f"Accept: all\nPassword: {PLAIN}",
        f"https://host/cb#access_token={PLAIN}",
        f"-----BEGIN RSA PRIVATE KEY-----\n{PLAIN}\n-----END RSA PRIVATE KEY-----",
        f"-----BEGIN PRIVATE KEY-----\n{PLAIN}",
        "eyJaB3aB3aB3.aB3aB3.aB3",
        "AIza" + "aB3" * 12,
        "https://hooks.slack.com/services/T0/B0/aB3",
    ):
        assert PLAIN not in mask_secrets(text) and "aB3" not in mask_secrets(text), text
    tree = {"a": [["Authorization", PLAIN], {"name": "HF_TOKEN", "value": PLAIN}], "b": {"key": "sk9-aB3xQ7"}}
    tree |= {"args": ["--model", "m1", "--api-key", PLAIN, "--n", "3"], "env": [{"key": "HF_TOKEN", "val": PLAIN}]}
    hide_secrets(tree)
    assert PLAIN not in str(tree) and tree["b"]["key"] == HIDDEN
    assert tree["args"] == ["--model", "m1", "--api-key", HIDDEN, "--n", "3"]
    for text in (
        "http://host/a@b",
        "give --api-key-file FILE",
        '{"max_tokens": "5"}',
        "max_tokens=5",
        "The answer is: 5",
        "Basic arithmetic",
        "a/b?key=1&steps=2",
    ):
        assert mask_secrets(text) == text
    kept = {"key": "answer", "eos_token": "</s>", "token": "<|end|>", "tokens": 5, "max_token": 4, "password": None}
    assert load_recipe(load_recipe({"grpo": {"kwargs": kept}})).grpo.kwargs == kept
    assert HIDDEN not in config.to_yaml(load_recipe({"grpo": {"kwargs": kept}}))
    fallback = load_recipe({"grpo": {"kwargs": {"api_key": f"${{oc.env:NOWHERE,{PLAIN}}}"}}})
    assert fallback.grpo.kwargs["api_key"] == PLAIN and PLAIN not in config.to_yaml(fallback)


def test_hosts_whose_values_differ_under_one_text_are_told_so():
    recipe = load_recipe({}, ["grpo.system_prompt=${oc.env:HF_TOKEN}", f"optimizer.kwargs.api_key={PLAIN}"])
    assert config.redacted_values(recipe) == {"grpo.system_prompt": TOKEN, "optimizer.kwargs.api_key": PLAIN}


@pytest.mark.parametrize("nproc", [1, 2])
def test_a_run_leaves_no_secret_behind_and_resumes_with_another(tmp_path, nproc):
    plain = tiny_recipe(tmp_path, "train.steps=2", "checkpoint.every=1", f"launch.nproc={nproc}", "launch.device=cpu")
    path = tmp_path / "mine.yaml"
    path.write_text(config.to_yaml(load_recipe(plain, ["run.name=run", "metrics.tensorboard=true"])))
    words = [
        "data.template_kwargs.token=${oc.env:HF_TOKEN}",
        f"data.template_kwargs.api_key={PLAIN}",
        "data.template_kwargs.greeting=Bearer ${oc.env:HF_TOKEN}",
    ]

    def dtrain(*arguments, **more):
        environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **more}
        started = ForkedPython(
            [sys.executable, "-m", "dtrain", *arguments],
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
        )
        out, err = started.communicate(timeout=300)
        assert TOKEN not in out + err and PLAIN not in out + err
        return started.returncode, err

    status, err = dtrain("run", str(path), *words)
    assert status == 0, err
    assert "note: data.template_kwargs.api_key is a secret in plain text" in err
    files = [file for file in (tmp_path / "runs").rglob("*") if file.is_file()]
    assert [file for file in files if TOKEN.encode() in file.read_bytes() or PLAIN.encode() in file.read_bytes()] == []
    saved = yaml.safe_load((tmp_path / "runs" / "run" / "config.yaml").read_text())
    kept = {"token": "${oc.env:HF_TOKEN}", "api_key": HIDDEN, "greeting": "Bearer ${oc.env:HF_TOKEN}"}
    assert saved["data"]["template_kwargs"] == kept
    state = json.loads((tmp_path / "runs" / "run" / "checkpoints" / "step-2" / "state.json").read_text())
    assert yaml.safe_load(state["recipe"])["data"]["template_kwargs"] == kept
    if nproc == 1:
        status, err = dtrain("run", str(path), *words, "train.steps=3", HF_TOKEN="another-one")
        assert status == 0 and "changed since then: train.steps: 2 -> 3" in err, err
        assert "template_kwargs" not in err.split("resumed from")[1]
        status, err = dtrain("run", str(path), *words, "data.template_kwargs.token=no")
        assert status == 1 and "data.template_kwargs.token: ${oc.env:HF_TOKEN} ->" in err


def test_names_and_paths_that_only_look_like_secrets_stay():
    rewards = [{"fn": "math_exact", "kwargs": {"target_key": "answer", "ground_truth_key": "gold"}}]
    words = ["model.path=/models/hf_llama3_8b_instruct", "data.train.path=/d/answer.jsonl"]
    recipe = load_recipe({"method": "grpo", "grpo": {"rewards": rewards}}, words)
    saved = config.to_yaml(recipe)
    assert HIDDEN not in saved and load_recipe(yaml.safe_load(saved)) == recipe == load_recipe(recipe)
    assert config.redact("the answer is gold", recipe) == "the answer is gold"


def test_what_decides_numbers_counts_by_its_value(monkeypatch):
    words = ["method=grpo", "grpo.clip=${oc.decode:${oc.env:CLIP}}"]
    monkeypatch.setenv("CLIP", "[0.1, 0.1]")
    saved = config.to_yaml(load_recipe({}, words))
    monkeypatch.setenv("CLIP", "[0.5, 0.5]")
    assert [key for key, _, _ in config.diff_recipes(saved, load_recipe({}, words))] == ["grpo.clip"]
