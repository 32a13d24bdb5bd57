"""Files of models of the transformers library: read, trained, exported, and read by transformers again."""

import json
import math
import shutil
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from hashlib import sha256

import peft
import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

from dtrain import models
from dtrain.base.errors import UserError
from dtrain.base.ranks import Ranks
from dtrain.checkpoint.dcp.training_state import model_tensors
from dtrain.checkpoint.huggingface.export import export
from dtrain.checkpoint.huggingface.merged import full_weights
from dtrain.checkpoint.huggingface.read import check_fit, read_weights
from dtrain.checkpoint.huggingface.safetensor_files import WeightFiles
from dtrain.checkpoint.huggingface.write import write_directory
from dtrain.policy.weights import flatten_bucket, join_weight_group
from tests.policy.test_weights import free_port
from tests.running import assert_same_rows, run, run_all, run_directory, trajectory
from tests.serve.serving import ask, serving
from tests.tiny import tiny_dpo, tiny_recipe, write_model

IDS = torch.arange(24).view(2, 12) % 67 + 3
SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.3,
}
EXPERTS = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
}
OTHER_KINDS = {
    "qwen2_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
}
KINDS = {
    "llama": {},
    "cohere2": {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
    "deepseek_v3": EXPERTS,  # files have the experts one by one
    "gpt_neox": {"tie_word_embeddings": False},  # other names of decoder and head
    "phi": {},  # a head with a bias
}


def save_model(kind, directory, **changes):
    """Write a model with random weights as transformers does, and return it."""
    config = hf.CONFIG_MAPPING[kind](**{**SIZES, **(KINDS | OTHER_KINDS)[kind], **changes})
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(config, dtype=torch.float32, experts_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(directory)
    return model


def read(directory, **options):
    """Read a model of transformers into dtrain, float64."""
    config = models.read_config(directory, implementation="transformers", **options)
    model = models.build(config, torch.float64)
    read_weights(model, directory)
    return model


def change(model):
    """Change all weights a little, as training does."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)


def logits(directory):
    """Return transformers' logits of a directory, float64, and check that all of its tensors are used."""
    options = {"dtype": torch.float64, "experts_implementation": "eager", "output_loading_info": True}
    model, info = hf.AutoModelForCausalLM.from_pretrained(directory, **options)
    assert not any(info.values()), info
    with torch.no_grad():
        return model.eval()(IDS, use_cache=False).logits


@pytest.mark.parametrize("kind", KINDS)
def test_read_and_written_as_transformers_does(tmp_path, kind):
    save_model(kind, tmp_path / "source")
    model = read(tmp_path / "source")
    with torch.no_grad():
        assert (model(IDS) - logits(tmp_path / "source")).abs().max() < 1e-5
        change(model)
        write_directory(model, tmp_path / "out", tmp_path / "source", ranks=Ranks(single_process=True))
        assert (model(IDS) - logits(tmp_path / "out")).abs().max() < 1e-5
    out, source = load_file(tmp_path / "out" / "model.safetensors"), load_file(tmp_path / "source/model.safetensors")
    assert {name: value.shape for name, value in out.items()} == {name: value.shape for name, value in source.items()}


def edit_weights(directory, edit):
    """Change the tensors of a file in place by a function."""
    tensors = load_file(directory / "model.safetensors")
    edit(tensors)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})


def test_experts_that_do_not_fit_are_reported_by_their_names_in_files(tmp_path):
    save_model("deepseek_v3", tmp_path)
    expert = "model.layers.1.mlp.experts"

    def edit(tensors):
        del tensors[f"{expert}.2.up_proj.weight"]
        tensors[f"{expert}.4.down_proj.weight"] = tensors[f"{expert}.3.down_proj.weight"].clone()
        tensors["model.norm.weight"] = tensors["model.norm.weight"][:16].clone()
        tensors["model.extra.weight"] = torch.ones(2)

    edit_weights(tmp_path, edit)
    model = models.build(models.read_config(tmp_path, implementation="transformers"), device="meta")
    with pytest.raises(UserError) as error:
        check_fit(model, WeightFiles(tmp_path))
    assert str(error.value).splitlines()[1:] == [
        f"  missing: {expert}.2.up_proj.weight",
        "  shape: model.norm.weight is [16], the model has [32]",
        "  unexpected: model.extra.weight",
        f"  unexpected: {expert}.4.down_proj.weight",
    ]


def test_layers_that_predict_further_tokens_are_not_read(tmp_path):
    save_model("deepseek_v3", tmp_path)

    def edit(tensors):
        for name in [name for name in tensors if name.startswith("model.layers.1.")]:
            tensors[name.replace("layers.1.", "layers.2.")] = tensors[name].clone()

    edit_weights(tmp_path, edit)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))
    with torch.no_grad():
        expected = hf.AutoModelForCausalLM.from_pretrained(
            tmp_path, dtype=torch.float64, experts_implementation="eager"
        )
        assert (read(tmp_path)(IDS) - expected(IDS).logits).abs().max() < 1e-5


def test_a_head_that_differs_from_its_embedding_is_refused(tmp_path):
    save_model("llama", tmp_path, tie_word_embeddings=False)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    with pytest.raises(UserError, match="differ: model.embed_tokens.weight and lm_head.weight"):
        read(tmp_path)


def test_a_classifier_loads_in_transformers(tmp_path):
    save_model("phi", tmp_path / "source")
    model = read(tmp_path / "source", labels=3)
    with torch.no_grad():
        model.score.weight.copy_(torch.randn(3, 32))
        write_directory(model, tmp_path / "out", tmp_path / "source", ranks=Ranks(single_process=True))
        loaded, info = hf.AutoModelForSequenceClassification.from_pretrained(
            tmp_path / "out", dtype=torch.float64, output_loading_info=True
        )
        assert type(loaded).__name__ == "PhiForSequenceClassification" and not any(info.values())
        assert (model(IDS)[:, -1] - loaded.eval()(IDS).logits).abs().max() < 1e-5
        again = read(tmp_path / "out", labels=0)
        assert torch.equal(again(IDS), model(IDS))
    with pytest.raises(UserError, match="transformers has no Cohere2ForSequenceClassification"):
        save_model("cohere2", tmp_path / "other")
        read(tmp_path / "other", labels=3)


def recipe_of(root, kind, *overrides, name="run", make=tiny_recipe):
    """A recipe of two steps for a model that transformers wrote, by the modules of transformers."""
    directory = root / "qwen3-tied"
    if not directory.exists():
        write_model(directory)
        save_model(kind, directory, vocab_size=67)
    shape = ("model.init=pretrained", "model.implementation=transformers", "train.steps=2", "scheduler.warmup_steps=0")
    return make(root, *shape, "train.global_batch=8", "train.micro_batch=4", *overrides, name=name)


def copied(root, kind, first, *overrides, name):
    """The recipe of a copy of a run that has only its first step."""
    recipe = recipe_of(root, kind, "checkpoint.every=1", *overrides, name=name)
    shutil.copytree(run_directory(first), run_directory(recipe))
    shutil.rmtree(run_directory(recipe) / "checkpoints" / "step-2")
    return recipe


def test_a_run_resumes_on_another_mesh_and_exports_its_steps(tmp_path):
    kind = "deepseek_v3"
    first = run(recipe_of(tmp_path, kind, "checkpoint.every=1", "checkpoint.export=final"))
    same = run(copied(tmp_path, kind, first, name="same"))
    assert trajectory(same) == trajectory(first)
    # Two ranks read other experts of the files, and other parts of the checkpoint.
    begun = recipe_of(tmp_path, kind, "train.micro_batch=2", name="begun on two ranks")
    resumed = copied(tmp_path, kind, first, "train.micro_batch=2", name="resumed on two ranks")
    ep = ("train.micro_batch=2", "parallel.ep=2")
    experts_begun = recipe_of(tmp_path, kind, *ep, "checkpoint.export=final", name="begun with ep")
    experts_resumed = copied(tmp_path, kind, first, *ep, name="resumed with ep")
    for sharded in run_all([begun, resumed, experts_begun, experts_resumed], 2):
        assert_same_rows(trajectory(sharded), trajectory(first), 1e-9, 1e-9, sharded.run.name)
    expected = logits(run_directory(first) / "export")
    torch.testing.assert_close(logits(run_directory(experts_begun) / "export"), expected, rtol=0, atol=1e-5)
    with pytest.raises(UserError, match="model.implementation: transformers -> native"):
        run(copied(tmp_path, kind, first, "model.implementation=native", name="native"))
    with pytest.raises(UserError, match="has trained model.layers.1.mlp.experts.down_proj and not"):
        changed = ("model.implementation=native", "checkpoint.allow_changes=[model.implementation]")
        run(copied(tmp_path, kind, first, *changed, name="changed"))

    directory = run_directory(first)
    with pytest.raises(UserError, match="model.implementation is not that of its run. Use that one, or `dtrain export"):
        begun = ("model.implementation=native", f"checkpoint.init_from={directory}")
        run(recipe_of(tmp_path, kind, *begun, name="native from it"))
    export(directory, tmp_path / "out")
    export(directory / "checkpoints" / "step-1", tmp_path / "half", "bfloat16")
    assert torch.equal(logits(tmp_path / "out"), logits(directory / "export"))
    source = load_file(tmp_path / "qwen3-tied" / "model.safetensors")
    assert load_file(tmp_path / "half" / "model.safetensors").keys() == source.keys()


@pytest.mark.parametrize("dora", ["false", "true"])
def test_an_adapter_is_the_one_that_peft_computes(tmp_path, dora):
    """GPT-NeoX has other names of the decoder: gpt_neox.layers.0.attention.query_key_value."""
    lora = ("lora.target=[query_key_value,dense]", "lora.rank=2", f"lora.dora={dora}", "optimizer.lr=0.1")
    directory = run_directory(run(recipe_of(tmp_path, "gpt_neox", *lora, "checkpoint.export=final")))
    base = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "qwen3-tied", dtype=torch.float64)
    ids = IDS % 67
    with torch.no_grad():
        unchanged = base(ids).logits
        adapted = peft.PeftModel.from_pretrained(base, directory / "export", autocast_adapter_dtype=False)(ids).logits
        assert (adapted - unchanged).abs().max() > 0.1
        loaded = models.from_pretrained(directory / "export", torch.float64)
        assert (loaded(ids) - adapted).abs().max() < 1e-5
        export(directory / "export", tmp_path / "merged")
        merged = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float64)
        assert (merged(ids).logits - adapted).abs().max() < 1e-4  # merged weights are float32, as the base's files


def test_a_reference_of_files_has_the_numbers_of_the_model(tmp_path):
    """With equal weights, the first loss of DPO is log(2)."""
    recipe = recipe_of(tmp_path, "llama", make=tiny_dpo)
    recipe = recipe_of(tmp_path, "llama", f"dpo.reference={recipe.model.path}", make=tiny_dpo)
    assert trajectory(run(recipe))[0][0] == pytest.approx(math.log(2), abs=1e-12)


def test_weights_are_sent_to_a_server_by_their_names_in_files(tmp_path):
    """The experts of Qwen2-MoE are matrices of their own in files and messages, and a stack in the model."""
    write_model(tmp_path)
    save_model("qwen2_moe", tmp_path, vocab_size=67)
    model = read(tmp_path)
    change(model)
    with serving(tmp_path, key="secret", control=tmp_path) as (url, _):
        weights = {name: weight.read(torch.float64) for name, weight in full_weights(model).items()}
        assert weights.keys() == load_file(tmp_path / "model.safetensors").keys()
        port, group_name = free_port(), "weights"
        meeting = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2}
        bucket = {"names": list(weights), "shapes": [list(weight.shape) for weight in weights.values()]}
        bucket |= {"dtypes": ["float64"] * len(weights), "load_format": "flattened_bucket", "weight_version": 2}
        with ThreadPoolExecutor() as pool:
            joined = pool.submit(ask, url, "/init_weights_update_group", meeting | {"group_name": group_name})
            group = join_weight_group(
                "127.0.0.1", port, 0, 2, torch.device("cpu"), name=group_name, wait=timedelta(seconds=30)
            )
            assert joined.result()[0] == 200
            assert ask(url, "/check_weights", {key: bucket[key] for key in ("names", "dtypes", "shapes")})[0] == 200
            updated = pool.submit(ask, url, "/update_weights_from_distributed", bucket | {"group_name": group_name})
            group.broadcast(flatten_bucket(list(weights.values())), 0).wait()
            assert updated.result()[0] == 200, updated.result()
        checksums = ask(url, "/weight_checker", {"action": "checksum"})[1]["checksums"]
    own = {name: tensor.detach() for name, tensor in model_tensors(model).items()}
    assert checksums == {name: sha256(tensor.numpy().tobytes()).hexdigest() for name, tensor in own.items()}
