"""Recipes of other tools, as their users paste them."""

LLAMA_FACTORY = """\
model_name_or_path: Qwen/Qwen3-0.6B
trust_remote_code: true
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 8
lora_target: all
dataset: mine.jsonl
template: qwen3
cutoff_len: 2048
output_dir: saves/x
overwrite_output_dir: true
plot_loss: true
per_device_train_batch_size: 2
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
num_train_epochs: 3.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
ddp_timeout: 180000000
val_size: 0.1
"""
AXOLOTL = """\
base_model: Qwen/Qwen3-0.6B
load_in_4bit: true
datasets:
  - path: mine.jsonl
    type: alpaca
val_set_size: 0.05
adapter: qlora
sequence_len: 2048
sample_packing: true
lora_r: 32
lora_alpha: 16
lora_target_linear: true
micro_batch_size: 2
gradient_accumulation_steps: 4
num_epochs: 1
optimizer: adamw_bnb_8bit
lr_scheduler: cosine
learning_rate: 0.0002
gradient_checkpointing: true
flash_attention: true
special_tokens:
  pad_token: "<|end_of_text|>"
"""
TORCHTUNE = """\
model:
  _component_: torchtune.models.qwen2.qwen2_0_5b
tokenizer:
  _component_: torchtune.models.qwen2.qwen2_tokenizer
  path: /tmp/vocab.json
dataset:
  _component_: torchtune.datasets.alpaca_dataset
batch_size: 2
epochs: 1
max_steps_per_epoch: null
gradient_accumulation_steps: 8
optimizer:
  _component_: torch.optim.AdamW
  lr: 2.0e-05
enable_activation_checkpointing: true
"""
TRL = """\
model_name_or_path: Qwen/Qwen3-0.6B
dataset_name: mine.jsonl
learning_rate: 1.0e-6
per_device_train_batch_size: 8
num_generations: 8
max_completion_length: 256
max_prompt_length: 512
reward_funcs: [accuracy]
use_vllm: true
beta: 0.04
"""
