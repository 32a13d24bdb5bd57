"""The peer's side of `bench_sft.py --peer trl`: TRL's SFTTrainer or DPOTrainer, run in an environment of its own.

    python bench_trl.py METHOD CASE ROWS LENGTH STEPS WARMUP

prints one line of JSON. A step is timed from the end of the one before to its own end; nothing is logged in between.
"""

import json
import resource
import statistics
import sys
import tempfile
import time

import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
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
        return loss


class RecordedSft(Recorded, SFTTrainer):
    pass


class RecordedDpo(Recorded, DPOTrainer):
    pass


def main() -> None:
    method, case, rows, length, steps, warmup = *sys.argv[1:3], *map(int, sys.argv[3:])
    is_sft = method == "sft"
    torch.set_num_threads(1)
    clock = Clock()
    with tempfile.TemporaryDirectory() as out:
        config = (SFTConfig if is_sft else DPOConfig)(
            output_dir=out,
            max_steps=warmup + steps,
            per_device_train_batch_size=rows if is_sft else rows // 2,
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
        rows_file = f"{case}/{'rows' if is_sft else 'text'}.jsonl"
        trainer = (RecordedSft if is_sft else RecordedDpo)(
            model=AutoModelForCausalLM.from_pretrained(case, dtype=torch.float32),
            args=config,
            train_dataset=load_dataset("json", data_files=rows_file, split="train", cache_dir=out),
            processing_class=AutoTokenizer.from_pretrained(case),
            callbacks=[clock],
        )
        trainer.losses = []
        trainer.train()
    times = [end - start for start, end in zip(clock.ends[warmup - 1 : -1], clock.ends[warmup:], strict=True)]
    result = {
        "processes": 1,
        "steps": len(times),
        "tokens_per_sec": round(rows * length * len(times) / sum(times), 1),
        "step_time": round(statistics.median(times), 5),
        "peak_memory_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 4),
        "losses": [loss.item() for loss in trainer.losses[warmup:]],
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
