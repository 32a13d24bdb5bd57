"""Adapters in PEFT's layout, in and out, with PEFT as the oracle."""

import itertools
import json
import random
from dataclasses import asdict

import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("peft")

from dtrain import models, recipe as config
from dtrain.adapters.config import AdapterConfig
from dtrain.adapters.lora import build_with_adapters
from dtrain.base.errors import UserError
from dtrain.base.model_directory import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from dtrain.checkpoint.dcp.training_state import model_tensors
from dtrain.checkpoint.huggingface.export import export
from dtrain.checkpoint.peft.config import (
    EXPERT_NAMES_OF_PEFT,
    adapter_of,
    adapter_problems,
    misread_layers,
    peft_config,
    read_adapter_config,
)
from dtrain.checkpoint.peft.files import read_adapter, write_adapter
from dtrain.models.building import linear_shapes, module_names
from dtrain.parallel.mesh import Runtime
from dtrain.parallel.placement import local_slices, local_tensor
from dtrain.recipe.schema import Lora
from dtrain.training.preflight import notes
from tests.adapters.by_peft import IDS, SHAPES, STACKS, TIED, load_adapter, load_base, logits, save_adapter, save_base
from tests.problem_lines import lines
from tests.running import run, run_directory
from tests.tiny import save_weights, tiny_recipe, write_model
from tests.world import run_world

CASES = [("qwen3", shape) for shape in SHAPES if shape not in STACKS]
CASES += [
    ("qwen2", "dora"),
    ("gemma3", "lora"),
    ("llama-biases", "dora"),
]
CASES += [("phi3", "lora"), ("phi3", "dora"), ("qwen3.5", "lora"), ("qwen3.5", "dora")]
CASES += [("qwen3.5-moe", "lora"), ("qwen3.5-moe", "one stack"), ("qwen3-moe", "experts"), ("mixtral", "one stack")]
CASES += [("mixtral", "all linear")]
CASES += [("gemma4-moe", "experts"), ("gemma4-moe", "dora"), ("deepseek-v3", "latents"), ("moonlight", "latents")]


def change(directory, **fields):
    file = directory / ADAPTER_CONFIG
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    return directory


@pytest.mark.parametrize(("variant", "shape"), CASES)
@pytest.mark.slow
def test_an_adapter_of_peft_s_gives_its_logits_and_ours_gives_ours(tmp_path, variant, shape):
    base = save_base(tmp_path / "base", variant)
    theirs = save_adapter(base, tmp_path / "theirs", **SHAPES[shape])
    model = models.from_pretrained(tmp_path / "theirs").eval()
    assert (model(IDS) - logits(load_base(base))).abs().max() > 0.1  # it does something
    assert (model(IDS) - logits(theirs)).abs().max() < 5e-5
    config = read_adapter_config(tmp_path / "theirs")
    assert not adapter_problems({"path": tmp_path / "theirs"}, model.config)
    write_adapter(tmp_path / "ours", model_tensors(model), config, model.config, str(base))
    before, after = (load_file(tmp_path / name / ADAPTER_WEIGHTS) for name in ("theirs", "ours"))
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert (logits(load_adapter(base, tmp_path / "ours")) - model(IDS)).abs().max() < 5e-5
    assert read_adapter_config(tmp_path / "ours").select_layers(["x"]) == {}
    again = models.from_pretrained(tmp_path / "ours").eval()
    assert torch.equal(again(IDS), model(IDS))


def test_names_that_peft_takes_for_experts_are_those_of_its_tables():
    from peft.utils import transformers_weight_conversion as theirs

    names = {kind: set(table) for kind, table in theirs._MOE_TARGET_MODULE_MAPPING.items()}
    types = {own: kind for own, kind in theirs._MODEL_TO_CONVERSION_PATTERN.items() if kind in names}
    assert {own: set(found) for own, found in EXPERT_NAMES_OF_PEFT.items()} == {
        own: names[kind] for own, kind in {**types, **{kind: kind for kind in names}}.items()
    }


def random_adapter(base, directory, config):
    """Write a random adapter of the model at `base`, and return the model with it."""
    read = models.read_config(base)
    model, weights = build_with_adapters(read, config).eval(), models.from_pretrained(base).state_dict()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            is_new = name not in weights
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.1 if is_new else weights[name])
    write_adapter(directory, model_tensors(model), config, read, str(base))
    return model


@pytest.mark.parametrize("variant", ["qwen3-moe", "mixtral", "gpt-oss", "granite4", "qwen3.5-moe", "gemma4-moe"])
@pytest.mark.slow
def test_adapters_of_models_whose_files_transformers_converts(tmp_path, variant):
    """All of dtrain's types in that table, but for those with dense layers beside experts of the same names."""
    base = save_base(tmp_path / "base", variant)
    model = random_adapter(base, tmp_path / "ours", AdapterConfig(rank=4, alpha=12))
    assert misread_layers(model.adapters.config, model.config) == []
    assert (logits(load_adapter(base, tmp_path / "ours")) - model(IDS)).abs().max() < 5e-5
    export(tmp_path / "ours", tmp_path / "copy", form="adapter")


def test_dense_layers_beside_experts_are_exported_merged_alone(tmp_path):
    """PEFT drops their adapter: it takes gate_proj for a matrix of experts, in any layer."""
    base = save_base(tmp_path / "base", "qwen3-moe-mixed")
    model = random_adapter(base, tmp_path / "ours", AdapterConfig(rank=4, alpha=12))
    with pytest.raises(UserWarning, match="missing adapter keys"):
        load_adapter(base, tmp_path / "ours")
    with pytest.raises(UserError, match=r"--adapter: PEFT drops the adapter of model\.layers\.\d\.mlp\.gate_proj"):
        export(tmp_path / "ours", tmp_path / "copy", form="adapter")
    assert not (tmp_path / "copy").exists()
    export(tmp_path / "ours", tmp_path / "merged")
    assert (logits(load_base(tmp_path / "merged")) - model(IDS)).abs().max() < 5e-5
    attention = AdapterConfig(rank=4, alpha=12, target=("q_proj", "v_proj"))
    model = random_adapter(base, tmp_path / "attention", attention)
    export(tmp_path / "attention", tmp_path / "copy", form="adapter")
    assert (logits(load_adapter(base, tmp_path / "copy")) - model(IDS)).abs().max() < 5e-5


def test_a_run_over_them_exports_the_merged_model(tmp_path):
    shape = (
        "lora={rank: 4}",
        "model.init=pretrained",
        "checkpoint.export=final",
        "train.steps=3",
        "train.dtype=float32",
    )
    save_weights(write_model(tmp_path / "qwen3-moe-untied", "qwen3-moe", tied=False))
    recipe = tiny_recipe(tmp_path, *shape, family="qwen3-moe", tied=False)
    assert any("export/ is written with the adapter merged" in note for note in notes(recipe))
    run(recipe)
    written = run_directory(recipe) / "export"
    assert not (written / ADAPTER_CONFIG).exists()
    assert logits(load_base(written)).isfinite().all()


@pytest.mark.parametrize("shape", ["lora", "dora"])
def test_in_float64_the_logits_are_those_of_peft_s_merged_model(tmp_path, shape):
    """transformers itself computes norms and rotary tables in float32."""
    base = save_base(tmp_path / "base", "qwen2", torch.float64)
    theirs = save_adapter(base, tmp_path / "adapter", torch.float64, **SHAPES[shape]).double()
    theirs.save_pretrained(tmp_path / "adapter")
    mine = models.from_pretrained(tmp_path / "adapter", torch.float64).eval()
    theirs.merge_and_unload().save_pretrained(tmp_path / "merged")
    merged = models.from_pretrained(tmp_path / "merged", torch.float64).eval()
    assert (mine(IDS) - merged(IDS)).abs().max() < 1e-12


def test_a_tied_embedding_is_written_twice_and_read_as_one(tmp_path):
    base = save_base(tmp_path / "base", "qwen3-tied")
    theirs = save_adapter(base, tmp_path / "adapter", **TIED)
    model = models.from_pretrained(tmp_path / "adapter").eval()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert (model(IDS) - logits(theirs)).abs().max() < 5e-5
    write_adapter(
        tmp_path / "ours", model_tensors(model), read_adapter_config(tmp_path / "adapter"), model.config, str(base)
    )
    found = load_file(tmp_path / "ours" / ADAPTER_WEIGHTS)
    both = [found[f"base_model.model.{name}.weight"] for name in ("lm_head", "model.embed_tokens")]
    assert torch.equal(*both)
    loaded = load_adapter(base, tmp_path / "ours")
    assert (logits(loaded) - model(IDS)).abs().max() < 5e-5
    assert json.loads((tmp_path / "ours" / ADAPTER_CONFIG).read_text())["ensure_weight_tying"] is True


@pytest.mark.trap(
    "a tied embedding and head trained apart",
    "huggingface/transformers #45127",
    "the merged model repeats one token",
    "they are refused",
)
def test_tied_embeddings_that_peft_trained_apart_are_refused(tmp_path):
    base = save_base(tmp_path / "base", "qwen3-tied")
    save_adapter(base, tmp_path / "one", modules_to_save=["embed_tokens"])
    with pytest.raises(UserError, match=r"missing: base_model.model.lm_head.weight \(the head is tied"):
        models.from_pretrained(tmp_path / "one")
    config = models.read_config(base)
    assert "tied" in "".join(lines(adapter_problems({"path": tmp_path / "one"}, config)))
    save_adapter(base, tmp_path / "two", **TIED)
    tensors = load_file(tmp_path / "two" / ADAPTER_WEIGHTS)
    tensors["base_model.model.lm_head.weight"][-1, -1] += 1
    save_file(tensors, tmp_path / "two" / ADAPTER_WEIGHTS)
    with pytest.raises(UserError, match=r"lm_head.weight and .*differ|embed_tokens.weight and .*differ"):
        models.from_pretrained(tmp_path / "two")


TOWERS = {
    "expression": {"target_modules": r".*language_model.*(q|down)_proj"},
    "patterns": {
        "target_modules": r"model\.language_model\..*_proj",
        "exclude_modules": ["model.language_model.layers.1.self_attn.k_proj"],
        "rank_pattern": {r"model\.language_model\.layers\.1\.mlp\..*": 2},
        "alpha_pattern": {"^model.language_model.layers.0.self_attn.q_proj": 90, ".*language_model.*up_proj": 50},
    },
    "saved": {
        "target_modules": r".*language_model.*v_proj",
        "modules_to_save": ["language_model.norm", "model.language_model.layers.1.mlp.up_proj"],
    },
}


def test_a_head_that_is_missing_of_an_untied_model_is_not_called_tied(made):
    adapter = change(made / "adapter", modules_to_save=["lm_head"])
    [problem] = lines(adapter_problems({"path": adapter}, models.read_config(made / "base")))
    assert problem.endswith("missing: base_model.model.lm_head.weight; is it an adapter of this model?")
    with pytest.raises(UserError, match=r"missing: base_model.model.lm_head.weight; is it"):
        models.from_pretrained(adapter)


@pytest.mark.trap(
    "names of a text adapter match nothing in the multimodal model",
    "vllm-project/vllm #48019",
    "the base model answers",
    "names of the tower; PEFT gives the same logits",
)
@pytest.mark.parametrize("case", TOWERS)
@pytest.mark.slow
def test_a_multimodal_model_s_text_tower(tmp_path, case):
    base = save_base(tmp_path / "base", "gemma3-vision")
    theirs = save_adapter(base, tmp_path / "adapter", **TOWERS[case])
    model = models.from_pretrained(tmp_path / "adapter").eval()
    assert (model(IDS) - logits(theirs)).abs().max() < 5e-5
    config = read_adapter_config(tmp_path / "adapter")
    assert not adapter_problems({"path": tmp_path / "adapter"}, model.config)
    write_adapter(tmp_path / "ours", model_tensors(model), config, model.config, str(base))
    assert (logits(load_adapter(base, tmp_path / "ours")) - model(IDS)).abs().max() < 5e-5
    again = models.from_pretrained(tmp_path / "ours").eval()
    assert torch.equal(again(IDS), model(IDS))


def test_what_a_text_tower_saves_is_named_whole(tmp_path):
    """PEFT would save a module of the same name of the vision tower too."""
    base = save_base(tmp_path / "base", "gemma3-vision")
    config = AdapterConfig(rank=4, modules_to_save=("norm",))
    model = build_with_adapters(models.read_config(base), config)
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    write_adapter(tmp_path / "ours", model_tensors(model), config, model.config, str(base))
    saved = json.loads((tmp_path / "ours" / ADAPTER_CONFIG).read_text())["modules_to_save"]
    assert "model.language_model.norm" in saved
    assert all(name.startswith("model.language_model.") for name in saved)
    load_adapter(base, tmp_path / "ours")
    assert read_adapter_config(tmp_path / "ours").select_saved_modules(
        module_names(model.config)
    ) == config.select_saved_modules(module_names(model.config))


MESHES = {
    "dp3": (3, []),
    "tp4": (4, ["parallel.tp=4"]),  # more ranks than key heads
    "dp3 tp2": (6, ["parallel.tp=2"]),
}


def read_on_a_mesh(rank, recipe, adapter):
    from dtrain.models.read_config import read_config
    from dtrain.parallel.mesh import build_mesh
    from dtrain.policy.build import build_model
    from dtrain.policy.options import choose_precision

    ranks = torch.distributed.get_world_size()
    sizes = config.derive_sizes(recipe, ranks)
    runtime = Runtime(rank=rank, world_size=ranks)
    mesh = build_mesh(runtime, dp_replicate=1, dp_shard=sizes.dp_shard, cp=1, tp=sizes.tp)
    precision = choose_precision("float32", "cpu")
    model = build_model(recipe, read_config(recipe.model.path), mesh, precision, torch.device("cpu"))
    read_adapter(model, adapter)
    whole = model_tensors(models.from_pretrained(adapter))
    tensors = model_tensors(model)
    assert tensors.keys() == whole.keys()
    for name, tensor in tensors.items():
        held = local_tensor(tensor)
        if held.numel():
            assert torch.equal(held, whole[name][local_slices(tensor)]), name
    out = adapter.parent / "gathered"
    write_adapter(out, tensors, read_adapter_config(adapter), model.config, None)
    before, after = (load_file(path / ADAPTER_WEIGHTS) for path in (adapter, out))
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("mesh", MESHES)
def test_reading_and_writing_on_a_mesh(tmp_path, mesh):
    ranks, overrides = MESHES[mesh]
    base = save_weights(write_model(tmp_path / "qwen2-tied", "qwen2"))
    save_adapter(base, tmp_path / "adapter", r=3, use_dora=True, **TIED)
    recipe = tiny_recipe(
        tmp_path,
        "model.init=pretrained",
        f"lora={{path: {tmp_path / 'adapter'}}}",
        "train.global_batch=12",
        "train.micro_batch=1",
        *overrides,
        family="qwen2",
    )
    run_world(read_on_a_mesh, ranks, recipe, tmp_path / "adapter")


def test_the_section_s_own_keys(made):
    path = str(made / "adapter")
    config = adapter_of(asdict(Lora(path=path)))
    assert (config.rank, config.alpha, config.dropout) == (4, 12, 0.0)
    assert adapter_of(asdict(Lora(path=path, dropout=0.1))).dropout == 0.1
    change(made / "adapter", lora_dropout=0.3)
    assert adapter_of(asdict(Lora(path=path))).dropout == 0.3
    assert adapter_of(asdict(Lora(path=path, rank=4, alpha=12.0, target=list(config.target)))).rank == 4
    with pytest.raises(UserError) as caught:
        adapter_of(asdict(Lora(path=path, rank=8, dora=True, target=["q_proj"])))
    lines = str(caught.value).splitlines()
    assert len(lines) == 3
    assert lines[0].startswith("lora.rank is 8, and r of ") and "is 4: leave lora.rank out" in lines[0]
    assert "use_dora" in lines[2] and "target_modules" in lines[1]


FIELDS = {
    "target_modules": [["q_proj"], ["self_attn.k_proj", "down_proj"], ["model.layers.1.mlp.up_proj", "o_proj"]]
    + [r".*\.1\..*(up|v)_proj", r"model\.layers\.[02]\.mlp\..*"],
    "exclude_modules": [None, ["1.self_attn.q_proj", "up_proj"], r".*\.2\..*"],
    "layers_to_transform": [None, 1, [0, 2]],
    "layers_pattern": [None, "layers", ["blocks", "layers"]],
    "modules_to_save": [None, ["1.mlp.down_proj"], ["lm_head", "o_proj"]],
    "rank_pattern": [{}, {"q_proj": 2, ".*proj": 3}, {r"layers\.1\..*": 5, "down_proj": 6}],
    "alpha_pattern": [{}, {"^model.layers.0.self_attn.*": 7, "proj": 9}],
    "use_rslora": [False, True],
}


@pytest.mark.trap(
    "the scale of rank-stabilised adapters taken for the plain one",
    "huggingface/peft #3761",
    "another model than was trained",
    "rank and scale of each layer as PEFT has them",
)
def test_layers_ranks_and_scales_are_those_that_peft_chooses(tmp_path):
    """300 random files are read by PEFT's own functions."""
    from peft import LoraConfig
    from peft.tuners.tuners_utils import check_target_module_exists
    from peft.utils.other import get_pattern_key

    config = models.read_config(write_model(tmp_path, num_hidden_layers=3))
    names, draw, seen = list(linear_shapes(config)), random.Random(0), set()
    (tmp_path / ADAPTER_WEIGHTS).write_bytes(b"")
    for _ in range(300):
        fields = {field: draw.choice(values) for field, values in FIELDS.items()}
        if isinstance(fields["target_modules"], str) or fields["layers_to_transform"] is None:
            fields |= {"layers_to_transform": None, "layers_pattern": None}
        theirs = LoraConfig(r=4, lora_alpha=8, **fields)
        (tmp_path / ADAPTER_CONFIG).write_text(json.dumps({"r": 4, "lora_alpha": 8, **fields}))
        expected = {}
        for name in names:
            if check_target_module_exists(theirs, name):
                rank = theirs.rank_pattern.get(get_pattern_key(theirs.rank_pattern.keys(), name), 4)
                alpha = theirs.alpha_pattern.get(get_pattern_key(theirs.alpha_pattern.keys(), name), 8)
                expected[name] = rank, alpha / (rank**0.5 if theirs.use_rslora else rank)
        found = read_adapter_config(tmp_path).select_layers(names)
        assert {name: (low.rank, low.scale) for name, low in found.items()} == expected, fields
        seen.add(len(expected))
    assert len(seen) >= 6


ORDERED = [
    {"q_proj": 2, "layers.0.self_attn.q_proj": 5},
    {"layers.0.self_attn.q_proj": 5, "q_proj": 2},
    {".*_proj": 3, "layers.1.*": 5, "down_proj": 6},
    {"down_proj": 6},
    {},
]


@pytest.mark.parametrize("variant", ["qwen3", "gemma3-vision"])
def test_patterns_mean_in_a_file_what_they_mean_in_the_run(tmp_path, variant):
    """For PEFT too, whose own files are sorted, and whichever way a file's keys are sorted."""
    from peft import LoraConfig
    from peft.tuners.tuners_utils import check_target_module_exists
    from peft.utils.other import get_pattern_key

    model = models.read_config(save_base(tmp_path / "base", variant))
    tower = "model.language_model." if model.is_text_tower else "model."
    save_file({f"base_model.model.{tower}x": torch.zeros(1)}, tmp_path / ADAPTER_WEIGHTS)
    for ranks, alphas in itertools.product(ORDERED, ORDERED):
        config = AdapterConfig(rank=4, alpha=12, rank_pattern=ranks, alpha_pattern=alphas)
        expected = config.select_layers(linear_shapes(model))
        written = peft_config(config, model, None)
        for in_reverse in (False, True):
            for key in ("rank_pattern", "alpha_pattern"):
                written[key] = dict(sorted(written[key].items(), reverse=in_reverse))
            theirs = LoraConfig(**written)
            for name, low in expected.items():
                outer = name.replace("model.", tower)
                assert check_target_module_exists(theirs, outer)
                rank = theirs.rank_pattern.get(get_pattern_key(theirs.rank_pattern.keys(), outer), 4)
                alpha = theirs.alpha_pattern.get(get_pattern_key(theirs.alpha_pattern.keys(), outer), 12)
                assert (rank, alpha / rank) == (low.rank, low.scale), (written, name)
            (tmp_path / ADAPTER_CONFIG).write_text(json.dumps(written))
            assert read_adapter_config(tmp_path).select_layers(linear_shapes(model)) == expected, written
