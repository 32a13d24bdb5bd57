"""Files of LLaMA-Factory.

Compared with llamafactory/hparams and llamafactory/train of LLaMA-Factory 0.9.5.
"""

from typing import Any

from dtrain.recipe.other_tools import hugging_face
from dtrain.recipe.other_tools.draft import Dataset, Draft, Tool, put_datasets

DEFAULTS: dict[str, Any] = {
    "data.max_length": 2048,
    "data.packing": False,
    "train.activation_checkpointing": "full",
}
LORA_DEFAULTS: dict[str, Any] = {"lora.rank": 8, "lora.dropout": 0.0, "lora.target": "all-linear"}
METHOD_DEFAULTS: dict[str, dict[str, Any]] = {
    "dpo": {"dpo.beta": 0.1, "dpo.loss": "sigmoid"},
    "kto": {"kto.beta": 0.1},
}

PREFERENCE_KEYS: dict[str, dict[str, str]] = {
    "dpo": {
        "pref_beta": "dpo.beta",
        "pref_loss": "dpo.loss",
        "pref_ftx": "dpo.sft_weight",
        "dpo_label_smoothing": "dpo.label_smoothing",
        "ref_model": "dpo.reference",
    },
    "kto": {
        "pref_beta": "kto.beta",
        "kto_chosen_weight": "kto.desirable_weight",
        "kto_rejected_weight": "kto.undesirable_weight",
        "ref_model": "kto.reference",
    },
}
"""Methods, and the keys of preference training that the method's stage reads. Other stages do not read them."""

RENAMED = {
    "cutoff_len": "data.max_length",
    "additional_target": "lora.modules_to_save",
    "lora_target": "lora.target",
    "lora_rank": "lora.rank",
    "lora_alpha": "lora.alpha",
}
# Templates that replace the model's own one in LLaMA-Factory (`replace_jinja_template` in data/template.py), and the
# one that writes texts only. All others are LLaMA-Factory's forms of the templates of a family.
OWN_TEMPLATES = ("alpaca", "base", "chatml", "chatml_de", "default", "empty", "ernie_vl", "fewshot", "vicuna")
NEEDLESS = (
    "do_train",
    "dataset_dir",
    "eval_dataset_dir",
    "tokenized_path",
    "upcast_layernorm",
    "upcast_lmhead_output",
    "mix_strategy",
    "double_quantization",
    "quantization_type",
)


def convert(draft: Draft) -> None:
    """Write the content of a file of LLaMA-Factory to the draft."""
    stage = str(draft.take("stage", default="sft"))
    if stage == "ppo":
        draft.lose("stage", "PPO needs a critic; method=grpo does not")
        draft.set("method", stage)  # refused by dtrain, instead of training otherwise
    else:
        draft.put("method", stage, "stage")
    draft.method = str(draft.values["method"])
    tuning = str(draft.take("finetuning_type", default="lora"))
    has_adapter = tuning == "lora"
    draft.set_defaults(hugging_face.DEFAULTS, DEFAULTS, METHOD_DEFAULTS.get(draft.method, {}))
    if has_adapter:
        draft.set_defaults(LORA_DEFAULTS)

    _convert_data(draft, stage)
    draft.rename(RENAMED)
    hugging_face.convert_training(draft)
    _convert_preferences(draft)
    _convert_tuning(draft, tuning)
    if has_adapter:
        _convert_adapter(draft)
    draft.ignore(*hugging_face.NEEDLESS, *NEEDLESS)
    draft.carry_aliases()
    if has_adapter:
        draft.remove("train.masters")
    hugging_face.finish_adapter(draft, has_adapter)
    hugging_face.add_common_notes(draft)
    if not draft.given("bf16", "fp16", "pure_bf16"):
        draft.note(
            "without bf16 or fp16 LLaMA-Factory computes in the type of the weights' file; here train.dtype=auto"
        )


def _convert_data(draft: Draft, stage: str) -> None:
    """Write the data sets, the chat template, which tokens are trained, and packing."""
    names = draft.take_list("dataset")
    if names:
        put_datasets(draft, "data.train", [Dataset(str(name)) for name in names], "dataset")
        draft.note("dataset names an entry of dataset_info.json there; data.train.path is the file itself")
    validation_names = draft.take_list("eval_dataset")
    put_datasets(draft, "data.val", [Dataset(str(name)) for name in validation_names], "eval_dataset")
    hugging_face.convert_validation_split(draft, "val_size")
    template = draft.take("template")
    if template in OWN_TEMPLATES:
        draft.lose(
            "template",
            f"{template} is LLaMA-Factory's own; set data.chat_template to null for the model's, or to a file",
            "data.chat_template",
        )
    elif template is not None:
        draft.note(f"template: LLaMA-Factory's {template} stands for the model's own chat template, which is used here")
    thinking = draft.take("enable_thinking")
    if thinking is not None:
        draft.put("data.template_kwargs", {"enable_thinking": thinking}, "enable_thinking")
    if stage == "pt":
        draft.put("data.train.format", "text", "stage")
        draft.put("data.loss_on", "all", "stage")
    if draft.take_flag("train_on_prompt", default=False):
        draft.put("data.loss_on", "all", "train_on_prompt")
    if draft.take_flag("mask_history", default=False):
        draft.put("data.loss_on", "last", "mask_history")
    is_packed = draft.take_flag("packing", default=None)
    is_separate = draft.take_flag("neat_packing", default=False)
    if is_separate:
        draft.put("data.packing", True, "neat_packing")
    elif is_packed is not None:
        draft.put("data.packing", is_packed, "packing")
    elif stage == "pt":
        draft.put("data.packing", True, "stage")
    if is_packed and not is_separate:
        draft.lose(
            "packing",
            "without neat_packing samples of a row see one another in LLaMA-Factory, which they never do here; set "
            "data.packing to decide",
            "data.packing",
        )
    elif draft.values.get("data.packing") and not is_separate:
        draft.note(
            "packing without neat_packing lets samples see one another there, never here; it packs into "
            "cutoff_len - 1 tokens"
        )
    if draft.take("interleave_probs") is not None:
        draft.lose("interleave_probs", "data.train.sources has weights, which count samples and not probabilities")


def _convert_preferences(draft: Draft) -> None:
    """Write the keys of preferences under the method that reads them."""
    keys_of_method = PREFERENCE_KEYS.get(draft.method, {})
    draft.rename(keys_of_method)
    every_key = {key for keys in PREFERENCE_KEYS.values() for key in keys}
    for key in sorted(every_key - set(keys_of_method)):
        if draft.take(key):
            draft.lose(key, f"LLaMA-Factory's stage for method={draft.method} does not read it, or dtrain's has no key")
    gamma = draft.take("simpo_gamma")
    if gamma is not None and draft.values.get("dpo.loss") == "simpo":
        draft.put("dpo.kwargs.simpo_gamma", gamma, "simpo_gamma")
    elif gamma is not None:
        draft.lose("simpo_gamma", "only pref_loss=simpo reads it")
    if draft.take("pref_bco_weight"):
        draft.lose("pref_bco_weight", "a list in dpo.loss with bco_pair, and dpo.loss_weights, come close to it")
    if draft.take("ref_model_adapters"):
        draft.lose("ref_model_adapters", f"{draft.method}.reference takes a full model; merge the adapter first")


def _convert_tuning(draft: Draft, tuning: str) -> None:
    """Write which weights are trained, and their type."""
    frozen = ("freeze_trainable_layers", "freeze_trainable_modules", "freeze_extra_modules")
    if tuning == "freeze":
        layers = draft.take("freeze_trainable_layers", default=2)
        draft.lose(
            "finetuning_type",
            f"freeze trains {layers} layers; name their parameters in train.train_only, such as model.layers.31.*",
        )
        for key in frozen:
            if draft.take(key) is not None:
                draft.lose(key, "name the parameters that are trained in train.train_only")
    elif tuning not in ("lora", "full"):
        draft.lose("finetuning_type", f"{tuning}: dtrain trains all weights, or adapters of LoRA and DoRA")
    for key in frozen:
        draft.take(key)  # only finetuning_type=freeze reads them
    if draft.take("freeze_vision_tower") is False:
        draft.put("train.vision", "all", "freeze_vision_tower")
    if draft.take("freeze_multi_modal_projector") is False:
        draft.put("train.vision", "projector", "freeze_multi_modal_projector")
    if draft.take("freeze_language_model"):
        draft.lose("freeze_language_model", "name the parameters that are trained in train.train_only")
    if draft.take_flag("pure_bf16", default=False):
        draft.put("train.dtype", "bfloat16", "pure_bf16")
        draft.put("train.masters", "bfloat16", "pure_bf16")


def _convert_adapter(draft: Draft) -> None:
    """Write the quantization of the base, the adapter to continue, and alpha."""
    bits = draft.take_int("quantization_bit", default=None)
    quantizer = str(draft.take("quantization_method", default="bnb"))
    if bits == 4 and quantizer in ("bnb", "bitsandbytes"):
        draft.put("lora.quantize", "nf4", "quantization_bit")
    elif bits is not None:
        draft.lose("quantization_bit", f"{bits} bits of {quantizer}; lora.quantize=nf4 has 4 bits of bitsandbytes'")
    if draft.take("quantization_type") == "fp4":
        draft.lose("quantization_type", "lora.quantize has nf4 only")
    adapter = draft.take("adapter_name_or_path")
    if adapter is not None:
        starts_anew = draft.take_flag("create_new_adapter", default=False)
        if starts_anew or "," in str(adapter):
            draft.lose("adapter_name_or_path", "adapters are merged into the model there; do so before the run")
        else:
            draft.put("lora.path", adapter, "adapter_name_or_path")
            if draft.method in PREFERENCE_KEYS and not draft.has(f"{draft.method}.reference"):
                comment = "the reference is the model without its adapter there"
                draft.set(f"{draft.method}.reference", "base", comment)
    if not draft.has("lora.alpha"):
        rank = draft.effective("lora.rank")
        draft.set("lora.alpha", 2.0 * rank, f"{draft.version}'s default, 2 × rank")


MARKS = ("stage", "finetuning_type", "cutoff_len", "template", "dataset_dir", "dataset")
LLAMA_FACTORY = Tool("LLaMA-Factory", "0.9.5", MARKS, convert)
