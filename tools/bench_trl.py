"""The peer's side of `bench_sft.py --peer trl`: TRL's SFTTrainer or DPOTrainer, run in an environment of its own.

    python bench_trl.py METHOD MODEL ROWS BATCH LENGTH STEPS WARMUP [ADAPTER]

prints one line of JSON. METHOD is sft, dpo, or sft-images for a Qwen3-VL on rows with pictures.
A step is timed from the end of the one before to its own end; nothing is logged in between.
ADAPTER is a directory in PEFT's layout to train; where it is not there, an adapter of rank 16 on every linear layer is
written to it, and nothing is trained.
"""

import json
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from datasets import Image, List, load_dataset
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    ProcessorMixin,
    TrainerCallback,
)
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer


class Clock(TrainerCallback):
    def __init__(self):
        self.ends = []

    def on_step_end(self, args, state, control, **kwargs):
        self.ends.append(time.perf_counter())


class Recorded:
    """Keeps every step's loss, as it is computed anyway."""

    def training_step(self, *args, **kwargs):
        loss = super().training_step(*args, **kwargs)
        self.losses.append(loss.detach())
        self.tokens.append(self._tokens_of(*args, **kwargs))
        return loss

    @staticmethod
    def _tokens_of(model, inputs, *args, **kwargs):
        return int(inputs["attention_mask"].sum()) if "attention_mask" in inputs else 0


class RecordedSft(Recorded, SFTTrainer):
    pass


class RecordedDpo(Recorded, DPOTrainer):
    pass


class ImagesAndText(Qwen3VLProcessor):
    """Qwen3-VL's processor without the part for videos, which needs torchvision."""

    def __init__(self, image_processor=None, tokenizer=None, chat_template=None):
        self.image_token, self.video_token = "<|image_pad|>", "<|video_pad|>"
        self.image_token_id, self.video_token_id = tokenizer.convert_tokens_to_ids([self.image_token, self.video_token])
        ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)


def processor_of(directory, has_images):
    """The model's tokenizer, or with images its processor, whose pixels Pillow makes."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    if not has_images:
        return tokenizer
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    images = Qwen2VLImageProcessorPil.from_pretrained(directory)
    return ImagesAndText(images, tokenizer, chat_template=tokenizer.chat_template)


def write_adapter(model, directory: Path) -> None:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")).save_pretrained(directory)


def main() -> None:
    method, directory, rows_file = sys.argv[1:4]
    rows, length, steps, warmup = map(int, sys.argv[4:8])
    adapter = Path(sys.argv[8]) if len(sys.argv) > 8 else None
    is_sft, has_images = method != "dpo", method == "sft-images"
    torch.set_num_threads(1)
    kind = AutoModelForImageTextToText if has_images else AutoModelForCausalLM
    model = kind.from_pretrained(directory, dtype=torch.float32)
    if adapter is not None and not adapter.exists():
        return write_adapter(model, adapter)
    if adapter is not None:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, adapter, is_trainable=True)
    clock = Clock()
    with tempfile.TemporaryDirectory() as out:
        config = (SFTConfig if is_sft else DPOConfig)(
            output_dir=out,
            max_steps=warmup + steps,
            per_device_train_batch_size=rows,
            gradient_accumulation_steps=1,
            gradient_checkpointing=False,
            max_length=length,
            **({"packing": False} if is_sft else {"beta": 0.1, "loss_type": ["sigmoid"]}),
            learning_rate=1e-4,
            lr_scheduler_type="constant",
            optim="adamw_torch_fused",
            adam_beta1=0.9,
            adam_beta2=0.95,
            adam_epsilon=1e-8,
            weight_decay=0.1,
            max_grad_norm=1.0,
            bf16=False,
            fp16=False,
            use_cpu=True,
            train_sampling_strategy="sequential",
            dataloader_num_workers=0,
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        dataset = load_dataset("json", data_files=rows_file, split="train", cache_dir=out)
        if has_images:
            dataset = dataset.cast_column("images", List(Image()))
        trainer = (RecordedSft if is_sft else RecordedDpo)(
            model=model,
            args=config,
            train_dataset=dataset,
            processing_class=processor_of(directory, has_images),
            callbacks=[clock],
        )
        trainer.losses, trainer.tokens = [], []
        trainer.train()
    times = [end - start for start, end in zip(clock.ends[warmup - 1 : -1], clock.ends[warmup:], strict=True)]
    tokens = 2 * rows * length * len(times)  # of pairs
    if has_images:
        tokens = sum(trainer.tokens[warmup:])
    elif is_sft:
        tokens = sum(map(len, dataset[rows * warmup : rows * (warmup + steps)]["input_ids"]))
    result = {
        "processes": 1,
        "steps": len(times),
        "tokens_per_sec": round(tokens / sum(times), 1),
        "step_time": round(statistics.median(times), 5),
        "peak_memory_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 4),
        "losses": [loss.item() for loss in trainer.losses[warmup:]],
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
