"""Arguments of Unsloth's scripts, written as lines `key: value`.

Compared with unsloth/models/loader.py, llama.py (`get_peft_model`) and rl.py (its defaults of TRL's configs) of
Unsloth 2026.10.9.
"""

from typing import Any

from dtrain.recipe.other_tools import hugging_face, trl
from dtrain.recipe.other_tools.draft import Draft, Tool

DEFAULTS: dict[str, Any] = {
    "run.seed": 3407,
    "data.max_length": 2048,
    "train.micro_batch": 4,
    "optimizer.lr": 5e-5,
    "optimizer.weight_decay": 0.001,
    "optimizer.state": "int8",
    "scheduler.warmup": 0.1,
}
LORA_DEFAULTS: dict[str, Any] = {
    "lora.rank": 16,
    "lora.alpha": 16,
    "lora.dropout": 0.0,
    "lora.target": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "lora.quantize": "nf4",
}


def convert(draft: Draft) -> None:
    """Write the content of a file with Unsloth's arguments to the draft."""
    draft.method = trl.method_of(draft)
    has_adapter = not draft.take_flag("full_finetuning", default=False)
    draft.set_defaults(hugging_face.DEFAULTS, trl.DEFAULTS, trl.METHOD_DEFAULTS[draft.method], DEFAULTS)
    if has_adapter:
        draft.set_defaults(LORA_DEFAULTS)
    draft.ignore("dtype", "bf16", "random_state", "loftq_config")
    draft.rename({"model_name": "model.path", "r": "lora.rank"})
    draft.rename({"use_gradient_checkpointing": "train.activation_checkpointing"})
    if draft.take_flag("load_in_4bit", default=True) is False:
        draft.put("lora.quantize", "none", "load_in_4bit")
    trl.convert_data(draft)
    hugging_face.convert_training(draft, accumulation=2)
    trl.convert_method(draft)
    draft.carry_aliases()
    if draft.method == "grpo":
        hugging_face.convert_rollout_size(draft)
    hugging_face.finish_adapter(draft, has_adapter)
    if draft.method == "sft":
        draft.note(hugging_face.COMPLETIONS_ONLY)
    hugging_face.add_common_notes(draft)


UNSLOTH = Tool("Unsloth", "2026.10.9", ("model_name",), convert)
