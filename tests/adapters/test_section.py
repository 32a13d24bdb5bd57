"""The section `lora` as its user meets it: how it is written, what is refused before work, and what is noted."""

import json

import pytest
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel

from dtrain import models, recipe as config
from dtrain.adapters.config import AdapterConfig
from dtrain.adapters.lora import add_adapters
from dtrain.base.errors import RecipeError, UserError
from dtrain.commands.cli import main
from dtrain.models.building import linear_shapes, module_names
from dtrain.models.common.decoder import DECODER_PLAN
from dtrain.models.common.linear import Linear
from dtrain.parallel.apply import apply_plan
from dtrain.parallel.tensor import colwise
from dtrain.recipe.schema import Lora
from dtrain.training import load_recipe
from dtrain.training.preflight import notes
from tests.models.published import CONFIGS
from tests.problem_lines import preflight
from tests.tiny import FAMILIES, tiny_grpo, tiny_recipe, write_model, write_pairs
from tests.world import run_world

ADAPTER = ["lora={}", "lora.rank=8"]


@pytest.fixture(scope="module")
def problems(tmp_path_factory):
    """Return the problems of a recipe of a tiny Qwen3 with overrides."""
    recipe = tiny_recipe(tmp_path_factory.mktemp("recipe"))
    return lambda *overrides: preflight(load_recipe(recipe, overrides), 1)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], None),
        (["lora={}"], Lora()),
        (["lora=null"], None),
        (["lora.rank=8"], Lora(rank=8)),
        (["lora.rank=8", "lora={}"], Lora(rank=8)),  # a mapping is merged
        (["lora.rank=8", "lora=null"], None),
        (["lora={rank: 8, alpha: 3}"], Lora(rank=8, alpha=3.0)),
        (["lora.target=[q_proj,v_proj]"], Lora(target=["q_proj", "v_proj"])),
        (["lora.target=.*_proj"], Lora(target=".*_proj")),
        (["lora.rank_pattern={q_proj: 4e0}"], Lora(rank_pattern={"q_proj": 4})),
        (["lora.alpha_pattern={q_proj: 8}"], Lora(alpha_pattern={"q_proj": 8.0})),
    ],
)
def test_how_it_is_written(overrides, expected):
    loaded = load_recipe("sft", overrides)
    assert loaded.lora == expected
    assert load_recipe(loaded) == loaded and config.diff_recipes(config.to_yaml(loaded), loaded) == []


@pytest.mark.parametrize(
    ("override", "answer"),
    [
        ("lora=true", "lora=true: lora is a mapping with the keys rank, alpha"),
        ("lora=1", "write lora={} for their defaults, or null for none"),
        (f"lora.target={'[' * 33}{']' * 33}", "lora.target: the value is nested too deep"),
        (f"lora.target={'[' * 5000}{']' * 5000}", "lora.target: the value is nested too deep"),
        ("lora=qlora", "write lora={} for their defaults, or null for none"),
        ("lora.rank=1.5", "lora.rank=1.5 must be a whole number"),
        ("lora.rnk=8", "lora.rnk is not a key of a recipe; did you mean lora.rank?"),
        ("lora.r=8", "lora.r: dtrain's word for it is lora.rank"),
        ("lora.quantize=nf8", "lora.quantize=nf8 is not one of none, nf4"),
        ("lora.rank_pattern={q_proj: 1.5}", "must be a mapping from names to whole numbers"),
        ("lora.alpha_pattern={q_proj: x}", "must be a mapping from names to numbers"),
        ("lora.modules_to_save=lm_head", "lora.modules_to_save=lm_head must be a list of texts"),
    ],
)
def test_what_is_no_section_says_what_to_write(override, answer):
    with pytest.raises(RecipeError) as caught:
        load_recipe("sft", [override])
    assert answer in "\n".join(map(str, caught.value.problems))


# Overrides → what each problem says: the key, and the fix.
REFUSED = {
    "no rank": (["lora.rank=0"], "lora.rank=0 must be at least 1, or lora=null for full fine-tuning"),
    "no alpha": (["lora.alpha=0"], "lora.alpha=0.0 must be a finite number above 0"),
    "alpha beyond numbers": (["lora.alpha=1e400"], "lora.alpha=inf must be a finite number"),
    "alpha is no number": (["lora.alpha=.nan"], "lora.alpha=nan must be a finite number"),
    "all dropped": (["lora.dropout=1"], "lora.dropout=1.0 must be from 0 up to 1"),
    "dropout below nothing": (["lora.dropout=-0.1"], "lora.dropout=-0.1 must be from 0"),
    "a pattern's rank": (["lora.rank_pattern={q_proj: 0}"], "must be a mapping to ranks of at least 1"),
    "a pattern's alpha": (["lora.alpha_pattern={q_proj: -1}"], "must be a mapping to finite numbers above 0"),
    "no target": (["lora.target=[]"], "lora.target=[] must be all-linear, a list of names, or a regular expression"),
    "an empty name": (["lora.exclude=['']"], "lora.exclude=[''] must be a list of names"),
    "everything saved": (["lora.modules_to_save=['']"], "lora.modules_to_save=[''] must be a list of names"),
    "target is no expression": (
        ["lora.target='(q_proj'"],
        "lora.target: (q_proj is not a regular expression (missing )",
    ),
    "exclude is no expression": (["lora.exclude='*q_proj'"], "a list of names is written [q_proj, v_proj]"),
    "a pattern is no expression": (
        ["lora.rank_pattern={'q_proj)': 4}"],
        "lora.rank_pattern: q_proj) is not a regular expression",
    ),
    "a target of brackets": ([f"lora.target='{'(' * 5000}{')' * 5000}'"], "(it is nested too deeply)"),
    "a name that slipped": (
        ["lora.target=[q_prj,v_proj]"],
        "lora.target: q_prj matches no linear layer of the model. Did you mean q_proj?",
    ),
    "a name of another model": (
        ["lora.target=[Wqkv]"],
        "lora.target: Wqkv matches no linear layer of the model. There are q_proj, k_proj, v_proj, o_proj, gate_proj",
    ),
    "a name as an expression": (["lora.target=q_proj"], "Set lora.target=[q_proj]"),
    "an expression for nothing": (
        ["lora.target=layers.*attn"],
        "A text is a regular expression for full names, such as model.layers.0.self_attn.q_proj",
    ),
    "nothing of that name to exclude": (["lora.exclude=[q_prj]"], "lora.exclude: q_prj matches no linear layer"),
    "a rank for nothing": (
        ["lora.rank_pattern={down: 4}"],
        "lora.rank_pattern: down matches the end of no adapted layer's name. Did you mean down_proj?",
    ),
    "an alpha for what is excluded": (
        ["lora.alpha_pattern={q_proj: 4}", "lora.exclude=[q_proj]"],
        "lora.alpha_pattern: q_proj matches the end of no adapted layer's name",
    ),
    "nothing of that name to save": (
        ["lora.modules_to_save=[lm_haed]"],
        "lora.modules_to_save: lm_haed matches no module with weights of its own. Did you mean lm_head?",
    ),
    "a block to save": (["lora.modules_to_save=[self_attn]"], "lora.modules_to_save: self_attn matches no module"),
    "a rank above a layer's": (
        ["lora.rank=40", "lora.target=[q_proj]"],
        "an adapter of rank 40 is larger than q_proj itself, [64, 32]. Set lora.rank=32 or less, or "
        "lora.rank_pattern={q_proj: 32}",
    ),
    "the head": (
        ["lora.target=[q_proj,lm_head]"],
        "lora.target names lm_head, which gets no adapter. Put it in lora.modules_to_save, [lm_head]",
    ),
    "only the head": (["lora.target=[lm_head]"], "to train it fully, and name linear layers in lora.target"),
    "only the head, as a text": (["lora.target=lm_head"], "and name linear layers in lora.target, or all-linear"),
    "the embedding, by its whole name": (
        ["lora.target=[q_proj,model.embed_tokens]"],
        "lora.target names embed_tokens, which gets no adapter. Put it in lora.modules_to_save, [embed_tokens]",
    ),
    "the head, by an expression": (
        ["lora.target=.*(proj|head)"],
        "matches lm_head too, which gets no adapter. Put it in lora.modules_to_save, [lm_head], to train it fully, or "
        "in lora.exclude",
    ),
    "nothing left": (
        ["lora.target=[q_proj]", "lora.exclude=.*self_attn.*"],
        "lora.exclude=.*self_attn.* leaves no layer of lora.target=['q_proj'] with an adapter",
    ),
    "parts of the model": (
        ["train.train_only=[model.layers.1.*]"],
        "Set train.train_only=[]. lora.target and lora.exclude choose the layers with an adapter",
    ),
    "parts frozen": (["train.freeze=['*norm*']"], "Set train.freeze=[]. lora.target and lora.exclude choose"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_refused_with_its_key_and_a_fix(problems, case):
    overrides, answer = REFUSED[case]
    found = problems(*ADAPTER, *overrides)
    assert len(found) == 1 and answer in found[0], found


def test_all_that_is_wrong_comes_at_once(problems):
    found = problems(
        *ADAPTER,
        "lora.target=[q_prj,lm_head,k_proj]",
        "lora.exclude=[gone]",
        "lora.rank=33",
        "lora.modules_to_save=[nothing]",
        "train.freeze=['*norm*']",
        "optimizer.lr=-1",
    )
    assert len(found) == 7, found


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["lora.target=[q_proj,layers.1.mlp.down_proj]", "lora.rank_pattern={'layers.1.mlp.down_proj': 4}"],
        ["lora.target=all-linear", "lora.modules_to_save=[lm_head]"],  # what target=[lm_head] is told
        ["lora.target=.*", "lora.exclude=[lm_head,embed_tokens]"],
        ["lora.target=.*", "lora.modules_to_save=[lm_head,embed_tokens]"],
        ["lora.modules_to_save=[norm,down_proj]", "lora.dropout=0.999"],
        ["lora.target=.*_proj", "lora.modules_to_save=[o_proj]"],
        ["lora.rank=32", "lora.alpha=1e-6", "lora.rslora=true", "lora.dora=true"],
        ["lora.quantize=nf4", "train.dtype=float32", "lora=null", "train.freeze=['*norm*']"],
        ["method=distill", "distill.teacher=${model.path}", "model.init=scratch"],
    ],
)
def test_what_is_sound_is_let_through(problems, overrides):
    found = problems(*ADAPTER, *overrides)
    assert [one for one in found if "lora" in one or "train." in one] == []


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["lora={}"], "such as optimizer.lr=2e-4"),
        (["lora={}", "optimizer.lr=4.9e-5"], "optimizer.lr=4.9e-05 is low for a fresh adapter"),
        (["lora={}", "optimizer.lr=5e-5"], None),
        ([], None),
        (["lora.path=somewhere"], None),  # it has learned already
        (["lora={}", "method=dpo", "optimizer.lr=1e-6"], "such as optimizer.lr=1e-5"),
        (["lora={}", "method=dpo", "optimizer.lr=5e-6"], None),
        (["lora={}", "method=grpo", "optimizer.lr=1e-6"], "such as optimizer.lr=1e-5"),
    ],
)
def test_a_low_learning_rate_is_noted(overrides, told):
    lines = notes(load_recipe("sft", overrides))
    assert [] == lines if told is None else [told in note for note in lines] == [True]
    assert all("10 times the rate of full fine-tuning is usual" in note for note in lines)


def test_validate_tells_the_note_and_the_problems(tmp_path, capsys):
    model, rows = write_model(tmp_path / "model"), tmp_path / "rows.jsonl"
    rows.write_text('{"text": "w3 w4"}\n' * 20)
    words = ["validate", "sft", f"model.path={model}", f"data.train.path={rows}", "model.init=scratch"]
    words.append("data.max_length=128")  # the positions of the model; more would be noted, too
    assert main([*words, "lora={}"]) == 0
    assert "note: optimizer.lr=1e-05 is low for a fresh adapter" in capsys.readouterr().out
    assert main([*words, "lora={}", "optimizer.lr=2e-4"]) == 0
    assert "note" not in capsys.readouterr().out
    assert main([*words, "lora.target=[q_prj]", "lora.rank=0", "train.stpes=1"]) == 1
    told = capsys.readouterr().err
    assert "train.stpes" in told and "lora.rank=0" in told
    assert main([*words, "lora.target=[q_prj]"]) == 1
    assert "lora.target: q_prj matches no linear layer" in capsys.readouterr().err


BASE = {"base_model_name_or_path": "BASE", "peft_type": "LORA", "r": 8, "target_modules": ["q_proj"]}


def test_directories_that_are_no_model_of_the_key_say_where_they_belong(tmp_path):
    model, adapter = write_model(tmp_path / "base"), tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({**BASE, "base_model_name_or_path": str(model)}))
    recipe = tiny_recipe(tmp_path)

    def found(*overrides):
        return preflight(load_recipe(recipe, [f"model.path={model}", *overrides]), 1)

    assert found() == []
    [problem] = found(f"model.path={adapter}")
    assert f"model.path={adapter} is an adapter in PEFT's layout, not a model" in problem
    assert f"To continue training it, set model.path={model} and lora.path={adapter}" in problem
    pairs = write_pairs(tmp_path / "pairs.jsonl")
    [problem] = found("method=dpo", f"data.train.path={pairs}", f"dpo.reference={adapter}")
    assert f"Merge it into its base with `dtrain export {adapter} OUT`, and set dpo.reference=OUT" in problem
    [problem] = found(f"lora.path={tmp_path / 'gone'}")
    assert f"lora.path={tmp_path / 'gone'}: there is no such directory" in problem
    (adapter / "adapter_model.safetensors").touch()
    found_in_adapter = found(f"lora.path={adapter}", "lora.rank=4")
    assert any("lora.rank is 4, and r of" in one for one in found_in_adapter), found_in_adapter
    (adapter / "adapter_config.json").write_text(json.dumps({**BASE, "base_model_name_or_path": "gone"}))
    [problem] = found(f"model.path={adapter}")
    assert "set model.path=BASE and lora.path=" in problem and "gone, and no model is there" in problem


def test_four_bits_ask_for_sizes_and_weights_of_a_trained_model(tmp_path):
    sizes = {"hidden_size": 128, "intermediate_size": 192}
    fits, odd = write_model(tmp_path / "fits", **sizes), write_model(tmp_path / "odd", **sizes | {"hidden_size": 96})
    recipe = load_recipe(tiny_recipe(tmp_path), ["lora.quantize=nf4", "train.dtype=float32"])
    words = ["model.init=pretrained", "parallel.dp_shard=1"]

    def found(*overrides, world_size=1):
        problems = preflight(load_recipe(recipe, [*words, *overrides]), world_size)
        return [one for one in problems if "model.safetensors" not in one]

    assert found(f"model.path={fits}") == []
    assert "which do not divide the 96 of q_proj. Set lora.quantize=none" in found(f"model.path={odd}")[0]
    attention, mlp = found(f"model.path={fits}", "parallel.tp=2", world_size=2)
    assert "parallel.tp=2 does not divide the 1 blocks" in attention and "the 3 blocks of 64 inputs" in mlp
    [problem] = found(f"model.path={fits}", "train.dtype=float64")
    assert "Set train.dtype=float32 or bfloat16, or lora.quantize=none" in problem
    [problem] = found(f"model.path={fits}", "model.init=scratch")
    assert "Set model.init=pretrained, or lora.quantize=none" in problem
    run = tmp_path / "other" / "checkpoints" / "step-3"
    run.mkdir(parents=True)
    [problem] = found(f"model.path={fits}", f"checkpoint.init_from={run}")
    assert f"`dtrain export {run} OUT`, then set model.path=OUT" in problem
    (run / "adapter").mkdir()
    assert found(f"model.path={fits}", f"checkpoint.init_from={run}") == []
    assert found(f"model.path={fits}", f"checkpoint.init_from={tmp_path / 'other'}") == []


def test_a_run_of_grpo_looks_at_the_section_too(tmp_path):
    found = preflight(tiny_grpo(tmp_path, "lora.target=[lm_head]"), 1)
    assert any("Put it in lora.modules_to_save" in one for one in found)


SHAPES = {**FAMILIES, "gemma3 4b": CONFIGS["gemma3-4b"]}


@pytest.mark.parametrize("family", SHAPES)
def test_the_names_are_those_of_the_model(tmp_path, family):
    if family in FAMILIES:
        shape = models.read_config(write_model(tmp_path, family))
    else:
        shape = models.parse_config(SHAPES[family])
    model = models.build(shape, device="meta")
    parameters = [name for name, _ in model.named_parameters(remove_duplicate=False) if ".decay." not in name]
    assert set(module_names(shape)) == {shape.file_module(name.rpartition(".")[0]) for name in parameters}
    found = {name: one for name, one in model.named_modules() if isinstance(one, Linear)}
    whole = {name: [found[part] for part in shape.model_modules(name)] for name in map(shape.file_module, found)}
    assert list(linear_shapes(shape)) == list(whole)
    assert linear_shapes(shape) == {
        name: (sum(part.out_features for part in parts), parts[0].in_features) for name, parts in whole.items()
    }


def with_styles(rank, path, styles):
    """Return the error of a plan with `styles` for the MLPs' gates on a model with adapters; None where it applies."""
    model = models.build(models.read_config(path), device="meta")
    add_adapters(model, AdapterConfig(rank=4))
    plan = {**DECODER_PLAN, "model.layers.*.self_attn.?_norm": "head_norm", **styles}
    try:
        apply_plan(model, init_device_mesh("cpu", (2,)), plan, sequence_parallel=False)
    except UserError as error:
        return str(error)


def my_style(module, tp):
    raise AssertionError("it is not asked")


@pytest.mark.parametrize(
    ("style", "answer"),
    [
        ("colwise", None),
        (colwise, None),
        (my_style, "model.layers.*.mlp.gate_proj: my_style does not know the adapter of this layer; give it"),
        (ColwiseParallel(), "ColwiseParallel does not know the adapter of this layer; give it a named style"),
    ],
)
def test_a_style_of_one_s_own_is_refused_beside_an_adapter(tmp_path, style, answer):
    path = write_model(tmp_path / "model", tied=False)
    said = run_world(with_styles, 2, path, {"model.layers.*.mlp.gate_proj": style})[1]
    assert said is None if answer is None else answer in said
