"""Files of TRL's command line (`trl sft --config`), and of the alignment handbook, which builds on it.

Compared with trl/trainer/*_config.py, trl/trainer/model_config.py and trl/scripts/utils.py of TRL 1.16.
"""

from collections.abc import Mapping
from typing import Any

from dtrain.recipe.other_tools import hugging_face
from dtrain.recipe.other_tools.draft import (
    FILE_READERS,
    Dataset,
    Draft,
    Tool,
    as_list,
    put_chat_template,
    put_datasets,
    set_split,
)

METHODS = {
    "grpo": ("num_generations", "max_completion_length", "reward_funcs", "num_iterations", "epsilon", "scale_rewards"),
    "kto": ("desirable_weight", "undesirable_weight"),
    "distill": ("teacher_model_name_or_path",),
    "reward": ("center_rewards_coefficient",),
    "dpo": (
        "beta",
        "precompute_ref_log_probs",
        "label_smoothing",
        "f_divergence_type",
        "ref_model",
        "loss_weights",
        "ld_alpha",
    ),
}
"""Methods, and the keys that only a file for this method has. A file does not name its method: the command does."""

DEFAULTS: dict[str, Any] = {
    "data.max_length": 1024,
    "data.packing": False,
    "train.dtype": "bfloat16",
    "train.activation_checkpointing": "full",
}
METHOD_DEFAULTS: dict[str, dict[str, Any]] = {
    "sft": {"data.loss_on": "all", "optimizer.lr": 2e-5},
    "dpo": {"optimizer.lr": 1e-6, "dpo.beta": 0.1, "dpo.loss": "sigmoid"},
    "kto": {"data.shuffle": False, "optimizer.lr": 1e-6, "kto.beta": 0.1},
    "reward": {"optimizer.lr": 1e-4},
    "grpo": {
        "data.max_length": 4096,
        "optimizer.lr": 1e-6,
        "grpo.group_size": 8,
        "grpo.loss": "dapo",
        "grpo.beta": 0.0,
        "grpo.sampling.max_new_tokens": 512,
    },
    "distill": {
        "data.max_length": 4096,
        "optimizer.lr": 1e-6,
        "distill.samples": "student",
        "distill.kl": "reverse",
        "distill.sampling.max_new_tokens": 512,
    },
}
LORA_DEFAULTS: dict[str, Any] = {
    "lora.rank": 16,
    "lora.alpha": 32,
    "lora.dropout": 0.05,
    "lora.target": ["q_proj", "v_proj"],
}

IMPORTANCE_SAMPLING = {
    "vllm_importance_sampling_mode": "grpo.kwargs.sampling_correction",
    "vllm_importance_sampling_clip_max": "grpo.kwargs.sampling_clip_max",
    "vllm_importance_sampling_cap": "grpo.kwargs.sampling_clip_max",
    "vllm_importance_sampling_clip_min": "grpo.kwargs.sampling_clip_min",
}

CUT_PROMPTS = "TRL cuts no prompt; data.max_length is for prompt and completion together"


def method_of(draft: Draft) -> str:
    """Return the method that the user typed, or that the file's keys show; else supervised fine-tuning."""
    if draft.typed_method:
        return draft.typed_method
    for method, keys in METHODS.items():
        if draft.given(*keys):
            return method
    return "sft"


def convert(draft: Draft) -> None:
    """Write the content of a file of TRL's command line to the draft."""
    draft.method = method_of(draft)
    has_adapter = draft.take_flag("use_peft", default=False)
    draft.set_defaults(hugging_face.DEFAULTS, DEFAULTS, METHOD_DEFAULTS[draft.method])
    if has_adapter:
        draft.set_defaults(LORA_DEFAULTS)
    convert_data(draft)
    hugging_face.convert_training(draft)
    convert_method(draft)
    convert_weights(draft, has_adapter)
    draft.carry_aliases()
    if draft.method == "grpo":
        hugging_face.convert_rollout_size(draft)
    _add_notes(draft, has_adapter)


def convert_data(draft: Draft) -> None:
    """Write `dataset_name` or TRL's list `datasets`, and the column of plain texts."""
    draft.ignore(*hugging_face.NEEDLESS)
    entries = draft.take_entries("datasets")
    put_datasets(draft, "data.train", [_dataset(draft, entry) for entry in entries], "datasets")
    name = draft.take("dataset_name")
    train_set, validation_set = Dataset(str(name)), Dataset(str(name))
    set_split(draft, train_set, "data.train", draft.take("dataset_train_split"), "dataset_train_split")
    test_split = draft.take("dataset_test_split", default="test")
    if name is not None and name not in FILE_READERS:
        draft.put("data.train.path", name, "dataset_name")
        if train_set.split not in (None, "train"):
            draft.put("data.train.split", train_set.split, "dataset_train_split")
        if draft.take("eval_strategy", "evaluation_strategy") in ("steps", "epoch"):
            set_split(draft, validation_set, "data.val", test_split, "dataset_test_split")
            if not validation_set.is_slice:
                draft.put("data.val.path", name, "dataset_name")
                draft.put("data.val.split", validation_set.split, "dataset_test_split")
    column = draft.take("dataset_text_field")
    if column not in (None, "text"):
        draft.put("data.train.columns", {"text": column}, "dataset_text_field")
    put_chat_template(draft, "chat_template_path")
    put_chat_template(draft, "chat_template")


def _dataset(draft: Draft, entry: Mapping[str, Any]) -> Dataset:
    """Return an entry of TRL's `datasets`, whose keys are arguments of `load_dataset`."""
    if entry.get("fraction") is not None:
        draft.lose("datasets.fraction", "data.train.sources has weights, which take other rows in every epoch")
    files = entry.get("data_files")
    path = files if files is not None else str(entry.get("path"))
    dataset = Dataset(path, subset=entry.get("name"))
    set_split(draft, dataset, "data.train", entry.get("split"), "datasets.split")
    return dataset


def convert_method(draft: Draft) -> None:
    """Write the keys whose meaning depends on the method."""
    method = draft.method
    if method == "distill":
        _convert_divergence(draft)
        draft.rename({"temperature": "distill.temperature"})
    if method in ("dpo", "kto", "grpo"):
        draft.rename({"beta": f"{method}.beta"})
    if method in ("sft", "dpo", "kto", "grpo"):
        draft.rename({"loss_type": f"{method}.loss"})
    if method == "grpo":
        draft.rename({"temperature": "grpo.sampling.temperature"})
    if method in ("grpo", "distill"):
        draft.rename({"top_p": f"{method}.sampling.top_p"})
        draft.rename({"max_completion_length": f"{method}.sampling.max_new_tokens"})
        if draft.take("top_k") not in (None, 0, -1):
            draft.put(f"{method}.sampling.top_k", draft.file["top_k"], "top_k")
    if method == "reward":
        draft.ignore("lora_task_type")  # SEQ_CLS: an adapter of a model with one output, as method=reward trains
    if method == "kto":
        draft.rename({"ref_model": "kto.reference"})
        draft.ignore("precompute_ref_log_probs")  # it saves time, and changes no number
    if method == "grpo":
        hugging_face.convert_rewards(draft)
        hugging_face.convert_clip(draft)
        draft.rename(IMPORTANCE_SAMPLING)
        if draft.take("vllm_importance_sampling_correction") is False:
            draft.put("grpo.kwargs.sampling_correction", "none", "vllm_importance_sampling_correction")
    if method == "dpo":
        draft.rename({"f_alpha_divergence_coef": "dpo.kwargs.f_alpha_divergence_coef"})
    if method in ("dpo", "kto", "grpo"):
        hugging_face.convert_moving_reference(draft, every=512, mix=0.6)


def _convert_divergence(draft: Draft) -> None:
    """Write TRL's beta of a distillation: 0 is the forward KL, 1 the reverse KL, and values between are the JSD."""
    beta = draft.take_number("beta", default=None)
    if beta is None:
        return
    if beta in (0, 1):
        draft.put("distill.kl", "forward" if beta == 0 else "reverse", "beta")
    else:
        draft.put("distill.kl", "jsd", "beta")
        draft.put("distill.jsd_beta", beta, "beta")


def convert_weights(draft: Draft, has_adapter: bool) -> None:
    """Write the type of the trained weights. PEFT keeps adapters in float32, whatever the type of the base."""
    source = "dtype" if draft.given("dtype") else "torch_dtype"
    dtype = draft.take("dtype", "torch_dtype")
    if dtype is None or has_adapter:
        return
    if dtype == "auto":
        draft.lose(source, "the weights' type is that of the model's files; write train.masters=bfloat16 or float32")
    else:
        draft.put("train.masters", dtype, source)


def _add_notes(draft: Draft, has_adapter: bool) -> None:
    method = draft.method
    if method == "sft":
        draft.note(hugging_face.COMPLETIONS_ONLY)
    if method == "dpo":
        draft.note("a file of KTO that has beta only reads as DPO's: write method=kto behind FILE")
    if method in ("grpo", "distill"):
        draft.note(CUT_PROMPTS)
    if has_adapter:
        draft.note(
            "PEFT takes q_proj and v_proj of Llama, Qwen 2 and 3, Gemma and Mistral; other families have other layers"
        )
    hugging_face.finish_adapter(draft, has_adapter)
    hugging_face.add_common_notes(draft)


# The alignment handbook has TRL's keys, and mixtures of its own (src/alignment/configs.py and data.py).


def convert_handbook(draft: Draft) -> None:
    """Write the content of a file of the alignment handbook to the draft."""
    mixture = draft.section("dataset_mixture")
    entries = draft.take_entries("dataset_mixture.datasets")
    datasets = [_handbook_dataset(draft, entry) for entry in entries]
    put_datasets(draft, "data.train", datasets, "dataset_mixture.datasets")
    if any(dataset.weight not in (None, 1.0) for dataset in datasets):
        draft.note("a weight takes a fixed part of a data set there; here it takes other rows of it in every epoch")
    if mixture.get("test_split_size"):
        draft.put("data.val", mixture["test_split_size"], "dataset_mixture.test_split_size")
    _convert_former_mixture(draft)
    convert(draft)


def _handbook_dataset(draft: Draft, entry: Mapping[str, Any]) -> Dataset:
    dataset = Dataset(str(entry.get("id")), subset=entry.get("config"), weight=entry.get("weight"))
    set_split(draft, dataset, "data.train", entry.get("split"), "dataset_mixture.datasets.split")
    return dataset


def _convert_former_mixture(draft: Draft) -> None:
    """Write `dataset_mixer`, which maps data sets to shares, and `dataset_splits`, one of which is for validation."""
    weights = draft.section("dataset_mixer")
    splits = [str(split) for split in as_list(draft.take("dataset_splits"))]
    subsets = as_list(draft.take("dataset_configs"))
    train_split = next((split for split in splits if split.startswith("train")), None)
    test_split = next((split for split in splits if split.startswith("test")), None)
    datasets, validation_sets = [], []
    for index, (path, weight) in enumerate(weights.items()):
        subset = str(subsets[index]) if index < len(subsets) else None
        datasets.append(Dataset(path, split=train_split, subset=subset, weight=weight))
        validation_sets.append(Dataset(path, split=test_split, subset=subset))
    put_datasets(draft, "data.train", datasets, "dataset_mixer")
    if test_split and draft.given("eval_strategy", "evaluation_strategy", "do_eval"):
        put_datasets(draft, "data.val", validation_sets, "dataset_mixer")


TRL = Tool("TRL", "1.16", ("model_name_or_path", "dataset_name"), convert)
HANDBOOK = Tool("alignment-handbook", "2025.7", (r"dataset_mixer\..*", r"dataset_mixture\..*"), convert_handbook)
