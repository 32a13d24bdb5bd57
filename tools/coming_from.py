#!/usr/bin/env python3
"""Writes docs/coming-from.md: a file of each other tool, and the recipe that it becomes.

    .venv/bin/python tools/coming_from.py

The files stand here. The recipes are what `dtrain convert` makes of them. tests/test_docs.py holds the page to it.
"""

import ast
import io
import re
import sys
from contextlib import chdir, redirect_stderr, redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from omegaconf import OmegaConf

sys.path.insert(0, str(Path(__file__).parents[1]))

from dtrain.commands.cli import main
from dtrain.training import convert_recipe

PAGE = Path(__file__).parents[1] / "docs" / "coming-from.md"
HEAD = """# Coming from another tool

`dtrain convert FILE` turns a file of another tool into a recipe. It knows files of TRL, the alignment handbook,
axolotl, LLaMA-Factory, Unsloth, torchtune, NeMo-RL, verl and Automodel. For example, with axolotl's file
[below](#axolotl), in which a line `lr_scheduler: rex` and one `use_mlflow: true` were added:

{shown}

| command | does |
| --- | --- |
| `dtrain convert FILE` | print the recipe, and on stderr what could not be taken |
| `dtrain convert FILE -o my.yaml key=value` | write it to a new file, with changes |
| `dtrain run FILE key=value` | convert and run; so do `dtrain validate`, `dtrain preview` and `dtrain plan` |

- A comment marks each value that the file leaves to its tool, if dtrain's own default is another, and each value that
  stands in the file in another form.
- A key that dtrain cannot express and that may change a number stops `dtrain run FILE`. The error names the key. Either
  set dtrain's key for it on the command line, or write the recipe with `-o`, read its last lines, and run that.
- Keys that change no number and that dtrain does not have are left out. The run names them. W&B stays: with
  `wandb_project`, the run needs the extra `wandb`, or `metrics.wandb=null`.
- The comments below a recipe say what dtrain does otherwise, although no key of the file is about it.
- `train.global_batch` is that of one GPU. For more GPUs, multiply it by their number. The batches of NeMo-RL, verl and
  Automodel count all GPUs.
- Saving, logging and validation keep dtrain's defaults, unless the file has keys for them.
- The same keys do not give the same bits: dtrain draws the order of rows and the start of adapters in its own way.
- A method that dtrain does not have, such as PPO with a critic, stays in the recipe, and dtrain refuses it.

`tests/config/` has tables of files from these tools' repositories. Each trains a tiny model there, or the test names
the one thing that dtrain cannot express. `tools/coming_from.py` writes this page.
"""
TRL = """\
model_name_or_path: Qwen/Qwen3-0.6B
dataset_name: trl-lib/Capybara
learning_rate: 2.0e-4
num_train_epochs: 1
packing: true
per_device_train_batch_size: 2
gradient_accumulation_steps: 8
warmup_ratio: 0.03
use_peft: true
lora_r: 32
lora_alpha: 16
"""
AXOLOTL = """\
base_model: Qwen/Qwen3-0.6B
load_in_4bit: true
datasets:
  - path: chat.jsonl
    type: chat_template
val_set_size: 0.05
sequence_len: 2048
sample_packing: true
adapter: qlora
lora_r: 32
lora_alpha: 16
lora_target_linear: true
gradient_accumulation_steps: 4
micro_batch_size: 2
num_epochs: 1
optimizer: adamw_bnb_8bit
lr_scheduler: cosine
learning_rate: 0.0002
bf16: auto
gradient_checkpointing: true
"""
LLAMA_FACTORY = """\
model_name_or_path: Qwen/Qwen3-0.6B
stage: dpo
do_train: true
finetuning_type: lora
lora_rank: 16
dataset: pairs.jsonl
template: qwen3
cutoff_len: 2048
pref_beta: 0.1
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 5.0e-6
num_train_epochs: 3.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
"""
TORCHTUNE = """\
model:
  _component_: torchtune.models.llama3_2.lora_llama3_2_1b
  lora_attn_modules: ['q_proj', 'v_proj', 'output_proj']
  apply_lora_to_mlp: True
  lora_rank: 64
  lora_alpha: 128
tokenizer:
  _component_: torchtune.models.llama3.llama3_tokenizer
  path: /models/Llama-3.2-1B-Instruct/original/tokenizer.model
  max_seq_len: null
checkpointer:
  _component_: torchtune.training.FullModelHFCheckpointer
  checkpoint_dir: /models/Llama-3.2-1B-Instruct
dataset:
  _component_: torchtune.datasets.alpaca_cleaned_dataset
  packed: False
seed: null
shuffle: True
batch_size: 2
epochs: 1
max_steps_per_epoch: null
gradient_accumulation_steps: 8
clip_grad_norm: null
optimizer:
  _component_: torch.optim.AdamW
  lr: 3e-4
lr_scheduler:
  _component_: torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup
  num_warmup_steps: 100
loss:
  _component_: torchtune.modules.loss.CEWithChunkedOutputLoss
metric_logger:
  _component_: torchtune.training.metric_logging.DiskLogger
dtype: bf16
"""
UNSLOTH = """\
model, tokenizer = FastLanguageModel.from_pretrained(model_name="unsloth/Qwen3-4B", max_seq_length=2048)
model = FastLanguageModel.get_peft_model(model, r=32, lora_alpha=32)
dataset = load_dataset("json", data_files="chat.jsonl", split="train")
trainer = SFTTrainer(
    model=model,
    train_dataset=dataset,
    args=SFTConfig(gradient_accumulation_steps=4, max_steps=60, learning_rate=2e-4, warmup_steps=5),
)
"""
NEMO_RL = """\
defaults: grpo_math_1B.yaml
grpo:
  num_prompts_per_step: 16
  num_generations_per_prompt: 8
  max_num_steps: 500
policy:
  model_name: Qwen/Qwen3-0.6B
  train_global_batch_size: 128
  max_total_sequence_length: 2048
  optimizer:
    kwargs: {lr: 1.0e-6}
data:
  train: {data_path: questions.jsonl}
"""
AUTOMODEL = """\
model:
  _target_: nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained
  pretrained_model_name_or_path: meta-llama/Llama-3.2-1B
step_scheduler:
  global_batch_size: 64
  local_batch_size: 8
  max_steps: 1000
dataset:
  _target_: nemo_automodel.components.datasets.llm.chat_dataset.ChatDataset
  path_or_dataset_id: chat.jsonl
peft:
  _target_: nemo_automodel.components._peft.lora.PeftConfig
  match_all_linear: true
  dim: 16
optimizer:
  _target_: torch.optim.AdamW
  lr: 1.0e-4
  weight_decay: 0
lr_scheduler:
  lr_decay_style: cosine
"""
VERL = """\
algorithm:
  adv_estimator: grpo
data:
  train_files: gsm8k/train.parquet
  val_files: gsm8k/test.parquet
  train_batch_size: 256
  max_prompt_length: 512
  max_response_length: 1024
  filter_overlong_prompts: true
actor_rollout_ref:
  model:
    path: Qwen/Qwen3-8B
    enable_gradient_checkpointing: true
  actor:
    optim: {lr: 1.0e-6}
    ppo_mini_batch_size: 64
    ppo_micro_batch_size_per_gpu: 8
    use_kl_loss: true
    kl_loss_coef: 0.001
    kl_loss_type: low_var_kl
  rollout:
    name: vllm
    n: 8
trainer:
  total_epochs: 15
  save_freq: 20
  test_freq: 5
"""
HANDBOOK = """\
model_name_or_path: HuggingFaceTB/SmolLM2-1.7B
torch_dtype: bfloat16
dataset_mixture:
  datasets:
    - {id: HuggingFaceTB/smoltalk, config: all, split: train, weight: 1.0}
    - {id: HuggingFaceTB/smol-smoltalk, split: train, weight: 0.5}
  test_split_size: 0.01
learning_rate: 3.0e-4
num_train_epochs: 2
max_length: 8192
per_device_train_batch_size: 4
gradient_accumulation_steps: 4
lr_scheduler_type: cosine
warmup_ratio: 0.1
packing: true
"""
FILES = {
    "TRL": (
        "A file for `trl sft --config`. Of a script's `LoraConfig` write `use_peft: true`, `lora_r` and `lora_alpha`.",
        TRL,
    ),
    "alignment-handbook": ("", HANDBOOK),
    "axolotl": ("", AXOLOTL),
    "LLaMA-Factory": ("", LLAMA_FACTORY),
    "torchtune": ("", TORCHTUNE),
    "Unsloth": ("A script's arguments, those of all its calls, are written as lines `key: value` first.", UNSLOTH),
    "NeMo-RL": ("What a file lacks is in the example that it builds on.", NEMO_RL),
    "verl": ("A script's overrides are written as YAML first, as in this file.", VERL),
    "Automodel": ("", AUTOMODEL),
}
"""Tool → what to know of its files, and one of them."""


def page() -> str:
    """The page's text."""
    return "\n".join([HEAD.format(shown=session()), *(_section(name, *shown) for name, shown in FILES.items())])


def session() -> str:
    """What `dtrain convert` prints for axolotl's file with a schedule that dtrain does not have, and a tracker."""
    more = "lr_scheduler: rex\nuse_mlflow: true\n"
    file = "\n".join([*(line for line in AXOLOTL.splitlines() if "lr_scheduler" not in line), more])
    with TemporaryDirectory() as directory, chdir(directory):
        Path("axolotl.yaml").write_text(file, encoding="utf-8")
        printed, rest = io.StringIO(), io.StringIO()
        with redirect_stdout(printed), redirect_stderr(rest):
            main(["convert", "axolotl.yaml", "-o", "qlora.yaml"])
        head = Path("qlora.yaml").read_text(encoding="utf-8").splitlines()[:18]
    printed_lines = [*printed.getvalue().splitlines(), *rest.getvalue().splitlines()]
    command = ["```text", "$ dtrain convert axolotl.yaml -o qlora.yaml", *printed_lines, "```"]
    return "\n".join([*command, "\nThe recipe begins with\n", "```text", *head, "```"])


def recipe(file: str) -> str:
    """The recipe that a file of another tool becomes, with its comments."""
    made = convert_recipe(arguments(file))
    assert made is not None, file
    return made.text()


def arguments(file: str) -> dict[str, Any]:
    """What a YAML file, or the calls of a script, say. A script's arguments that are no plain values are left out."""
    if not re.search(r"^\w+(, \w+)* = ", file, re.MULTILINE):
        return OmegaConf.to_container(OmegaConf.create(file))  # type: ignore[return-value]
    calls = [node for node in ast.walk(ast.parse(file)) if isinstance(node, ast.Call)]
    given = {one.arg: one.value.value for node in calls for one in node.keywords if isinstance(one.value, ast.Constant)}
    return {str(key): value for key, value in given.items() if key != "split"}


def _section(name: str, about: str, file: str) -> str:
    language = "python" if file == UNSLOTH else "text"
    blocks = [f"```{language}\n{file}```", f"becomes\n\n```yaml\n{recipe(file)}\n```"]
    return "\n\n".join([f"## {name}", *([about] if about else []), *blocks]) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
