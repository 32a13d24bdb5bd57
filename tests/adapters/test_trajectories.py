"""Ten AdamW steps of SFT with an adapter beside the same steps by hand on PEFT's model: loss, grad norm and weights.

float32, relative: loss 1e-5, norm 1e-4.
"""

import itertools
import json

import pytest
import torch

from dtrain import models
from dtrain.adapters.config import AdapterConfig, is_adapter
from dtrain.adapters.lora import add_adapters, init_adapters
from tests.running import metrics, run, trajectory, weights
from tests.serve.serving import make_model
from tests.test_oracle import DECAY, LR, STEPS, by_hand, packed_batches, padded_batches, prepared
from tests.tiny import tiny_grpo, write_pairs

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CASES = {
    "llama": ("llama", {"rank": 8}),
    "llama: rsLoRA of two": ("llama", {"rank": 4, "alpha": 8, "rslora": True, "target": ["q_proj", "v_proj"]}),
    "qwen2: DoRA, biases": ("qwen2", {"rank": 4, "dora": True}),
    "qwen3: patterns": (
        "qwen3",
        {"rank": 2, "rank_pattern": {"down_proj": 5}, "alpha_pattern": {"layers.0.self_attn.q_proj": 3}},
    ),
    "qwen3: tied embedding too": ("qwen3", {"rank": 2, "modules_to_save": ["embed_tokens"], "target": ["o_proj"]}),
    "llama: head and norms too": ("llama", {"rank": 2, "modules_to_save": ["lm_head", "norm"]}),
    "gemma3: a regular expression": (
        "gemma3",
        {"rank": 3, "target": r".*layers\.[02]\..*_proj", "exclude": ["k_proj"]},
    ),
    "gemma3: DoRA, rsLoRA": ("gemma3", {"rank": 3, "dora": True, "rslora": True}),
}


def peft_model(source, section, directory):
    """PEFT's model with the adapter that a recipe's `section` starts with."""
    target = section.get("target", LINEAR)
    exclude = section.get("exclude")
    saved = section.get("modules_to_save")
    config = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=section["rank"],
        lora_alpha=section.get("alpha", 32),
        target_modules=target,
        exclude_modules=exclude,
        use_rslora=section.get("rslora", False),
        use_dora=section.get("dora", False),
        rank_pattern=section.get("rank_pattern", {}),
        alpha_pattern=section.get("alpha_pattern", {}),
        modules_to_save=saved,
        ensure_weight_tying=source.config.tie_word_embeddings and bool(saved),
    )
    model = peft.get_peft_model(source, config)
    ours = models.build(models.read_config(directory), device="meta")
    add_adapters(ours, AdapterConfig.from_values(section))
    ours.to_empty(device="cpu")
    models.init_weights(ours, 1)  # DoRA's magnitudes are PEFT's own
    init_adapters(ours, 0)
    theirs = dict(model.named_parameters())
    adapters = {name for name, _ in ours.named_parameters() if is_adapter(name)}
    with torch.no_grad():
        for name in adapters:
            if name.endswith("lora_A"):
                theirs[_of_default(name)].copy_(ours.get_parameter(name))
    assert {_of_default(name) for name in adapters} == {name for name in theirs if "lora_" in name}
    return model


def _of_default(name):
    module, _, parameter = name.rpartition(".")
    parameter = {"lora_magnitude": "lora_magnitude_vector"}.get(parameter, parameter)
    return f"base_model.model.{module}.{parameter}.default.weight"


@pytest.mark.parametrize(("case", "packing"), [*zip(CASES, itertools.cycle([False, True]), strict=False)])
def test_ten_steps_equal_peft(tmp_path, case, packing):
    family, section = CASES[case]
    source, recipe, path = prepared(
        tmp_path, family, packing, lora=section, checkpoint={"every": STEPS, "export": "none"}
    )
    batches = packed_batches(recipe) if packing else padded_batches(path)
    expected, theirs = by_hand(peft_model(source, section, recipe.model.path), batches)
    run(recipe)
    for (loss, norm, *_), (want, want_norm, *_) in zip(trajectory(recipe), expected, strict=True):
        assert abs(loss - want) <= 1e-5 * want
        assert abs(norm - want_norm) <= 1e-4 * want_norm
    saved = {name.removeprefix("model."): one for name, one in weights(recipe).items() if name.startswith("model.")}
    assert any(is_adapter(name) for name in saved)
    for name, value in saved.items():
        module, _, parameter = name.rpartition(".")
        key = (
            _of_default(name) if is_adapter(name) else f"base_model.model.{module}.modules_to_save.default.{parameter}"
        )
        # Of the weight and of the way that Adam can go: it makes steps of a gradient that is zero but for rounding.
        scale = theirs[key].abs().max() + STEPS * LR
        assert (value - theirs[key]).abs().max() <= 1e-4 * scale, name


def log_prob(model, prompt, ids):
    logits = model(torch.tensor([prompt + ids]))[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1)[torch.arange(len(ids)), ids].sum()


@pytest.mark.parametrize(
    ("loss", "section"),
    [
        ("ipo", {"rank": 4, "dora": True}),
        ("sigmoid", {"rank": 2, "modules_to_save": ["lm_head", "norm"]}),
    ],
)
def test_dpo_s_steps_equal_peft(tmp_path, loss, section):
    """The reference is PEFT's model with its adapter switched off, and what it trains whole as it was."""
    beta, pairs = 0.5, 4
    source, recipe, _ = prepared(
        tmp_path,
        "llama",
        False,
        method="dpo",
        lora=section,
        dpo={"loss": loss, "beta": beta},
        data={"train": {"path": str(write_pairs(tmp_path / "pairs.jsonl"))}, "max_length": 32, "packing": False},
        train={"steps": 5, "global_batch": pairs, "micro_batch": 2, "dtype": "float32"},
    )
    model = peft_model(source, section, recipe.model.path)
    optimizer = torch.optim.AdamW(decayed(model), lr=LR, betas=(0.9, 0.95))
    schedule = transformers.get_cosine_with_min_lr_schedule_with_warmup(optimizer, 3, 5, min_lr_rate=0.1)
    rows = [json.loads(line) for line in (tmp_path / "pairs.jsonl").read_text().splitlines()]
    run(recipe)
    for step, (found, norm, *_) in enumerate(trajectory(recipe)):
        total = 0.0
        for row in rows[step * pairs : (step + 1) * pairs]:
            answers = [(row["prompt_ids"], row[name]) for name in ("chosen_ids", "rejected_ids")]
            with torch.no_grad(), model.disable_adapter():
                before = [log_prob(lambda ids: model(ids).logits, *one) for one in answers]
            now = [log_prob(lambda ids: model(ids).logits, *one) for one in answers]
            gap = (now[0] - before[0]) - (now[1] - before[1])
            if loss == "sigmoid":
                value = -torch.nn.functional.logsigmoid(beta * gap)
            elif loss == "hinge":
                value = torch.relu(1 - beta * gap)
            else:
                lengths = [len(ids) for _, ids in answers]
                gap = (now[0] - before[0]) / lengths[0] - (now[1] - before[1]) / lengths[1]
                value = (gap - 1 / (2 * beta)) ** 2
            (value / pairs).backward()
            total += value.item() / pairs
        want = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
        assert abs(found - total) <= 5e-5 * abs(total) and abs(norm - want) <= 1e-4 * want
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


def decayed(model):
    trained = [p for p in model.parameters() if p.requires_grad]
    wide, narrow = ([p for p in trained if (p.dim() >= 2) == is_wide] for is_wide in (True, False))
    return [{"params": one, "weight_decay": d} for one, d in ((wide, DECAY), (narrow, 0.0)) if one]


def test_grpo_s_steps_equal_peft(tmp_path):
    """The completions are dtrain's own, judged, scored and trained on again by PEFT's model."""
    from tests.methods.test_grpo_oracle import SETTINGS, advantages, loss_of, scores

    section = {"rank": 4}
    path = make_model(tmp_path, 1)
    settings = [one for one in SETTINGS if "overlong" not in one and "mask_truncated" not in one]
    recipe = tiny_grpo(tmp_path, f"model.path={path}", *settings, "lora={rank: 4}", "optimizer.lr=1e-2")
    run(recipe)
    source = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    whole = peft_model(source, section, path)
    for parameter in whole.parameters():
        parameter.data = parameter.data.double()

    def model(ids):
        return whole(ids).logits

    optimizer = torch.optim.AdamW(decayed(whole), lr=1e-2, betas=(0.9, 0.95), eps=1e-8)
    rows = iter(metrics(recipe))
    samples = [json.loads(line) for line in (recipe.run.directory / "samples.jsonl").open()]
    for step in (1, 3):
        mine = [row for row in samples if row["step"] == step]
        words = [[int(word[1:]) for word in row["completion"].split()] for row in mine]
        worth = advantages([row["reward"] for row in mine])
        drawn = [(row["prompt"], ids, one, False) for row, ids, one in zip(mine, words, worth, strict=True)]
        with torch.no_grad():
            old = [scores(model, *row[:2])[0] for row in drawn]
            with whole.disable_adapter():
                reference = [scores(model, *row[:2])[0] for row in drawn]
        for _ in range(2):
            loss = loss_of("dapo", model, drawn, old, reference)
            optimizer.zero_grad()
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(whole.parameters(), 1.0).item()
            optimizer.step()
            row = next(rows)
            assert row["loss"] == pytest.approx(loss.item(), rel=5e-5, abs=1e-8)
            assert row["grad_norm"] == pytest.approx(norm, rel=1e-4)
