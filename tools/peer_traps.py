#!/usr/bin/env python3
"""Runs some traps of docs/traps.md in a peer, on a CPU: what it gives, and what is right.

    tools/traps --peer transformers
    tools/traps --peer trl

Each check returns (what the peer gives, what is right, how far apart they may be). Models are tiny and made here.
"""

import contextlib
import importlib
import math
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

CHECKS: dict[str, dict[str, Callable[[Path], tuple[float, float, float]]]] = {"transformers": {}, "trl": {}}
WORDS = 40
PLAIN = "{{ bos_token }}{% for m in messages %} w3 {{ m.content }} w4{% endfor %}"
ROWS = [[5, 6, 7, 8, 9, 10, 11, 12, 13, 14], [6, 9], [7, 12, 20], [8, 3]]


def check(peer: str, trap: str) -> Callable:
    """Register a check of a peer under a trap's name."""

    def register(function: Callable) -> Callable:
        CHECKS[peer][trap] = function
        return function

    return register


def make_model(directory: Path, dtype: str = "float32") -> Path:
    """Save a tiny Llama with a word-level tokenizer that puts a BOS in front."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    sizes = dict(vocab_size=WORDS, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
    ids = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2, max_position_embeddings=8192)
    model = LlamaForCausalLM(LlamaConfig(**sizes, **ids, initializer_range=0.3))
    model.to(getattr(torch, dtype)).save_pretrained(directory)
    special = dict(pad_token="<pad>", bos_token="<s>", eos_token="</s>")
    vocabulary = {word: at for at, word in enumerate([*special.values(), *(f"w{at}" for at in range(3, WORDS))])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    PreTrainedTokenizerFast(tokenizer_object=words, chat_template=PLAIN, **special).save_pretrained(directory)
    return directory


def load(directory: Path) -> Any:
    """The model and the tokenizer of `make_model`."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(make_model(directory)).eval()
    return model, AutoTokenizer.from_pretrained(directory)


def mean_over_tokens(model: Any) -> float:
    """Mean loss over every next token of ROWS, each row alone, in float64."""
    import torch
    from torch.nn import functional

    wide, total, count = model.double(), 0.0, 0
    with torch.no_grad():
        for row in ROWS:
            logits = wide(torch.tensor([row])).logits[0, :-1]
            total += functional.cross_entropy(logits, torch.tensor(row[1:]), reduction="sum").item()
            count += len(row) - 1
    return total / count


def trainer_of(directory: Path, model: Any, **options: Any) -> Any:
    """transformers' Trainer on ROWS, one row a batch, its rate so small that the loss stays."""
    from transformers import Trainer, TrainingArguments

    rows = [{"input_ids": row, "labels": row, "attention_mask": [1] * len(row)} for row in ROWS]
    fixed = dict(output_dir=str(directory / "out"), per_device_train_batch_size=1, use_cpu=True)
    fixed |= dict(per_device_eval_batch_size=1, report_to=[], disable_tqdm=True, logging_steps=1, save_strategy="no")
    arguments = TrainingArguments(**fixed, learning_rate=1e-12, **options)
    return Trainer(model=model, args=arguments, train_dataset=rows, eval_dataset=rows)


@check("transformers", "a micro-batch without a label gives NaN")
def loss_without_a_label(root: Path) -> tuple[float, float, float]:
    import torch

    model, _ = load(root)
    ids = torch.tensor([[3, 4, 5]])
    return model(input_ids=ids, labels=torch.full_like(ids, -100)).loss.item(), 0.0, 0.0


@check("transformers", "a mask of ones, or a cache, switches the borders of packed rows off")
def packed_rows(root: Path) -> tuple[float, float, float]:
    """The largest difference of the second document's logits from those that it has alone."""
    import torch

    model, _ = load(root)
    ids, positions = torch.tensor([[5, 6, 7, 8, 9]]), torch.tensor([[0, 1, 2, 0, 1]])
    with torch.no_grad():
        packed = model(input_ids=ids, position_ids=positions, attention_mask=torch.ones_like(ids)).logits[0, 3:]
        alone = model(input_ids=ids[:, 3:]).logits[0]
    return (packed - alone).abs().max().item(), 0.0, 1e-4


@check("transformers", "BOS written twice, by the template and by the tokenizer")
def count_of_bos(root: Path) -> tuple[float, float, float]:
    _, tokenizer = load(root)
    text = tokenizer.apply_chat_template([{"role": "user", "content": "w5 w6"}], tokenize=False)
    return float(tokenizer(text)["input_ids"].count(1)), 1.0, 0.0


@check("transformers", "rotary frequencies rounded by a cast of the model")
def rotary_tables(root: Path) -> tuple[float, float, float]:
    """The largest error of cos at position 8191 of a model that was cast to bfloat16."""
    import torch

    model, _ = load(root)
    size = model.config.hidden_size // model.config.num_attention_heads
    cos, _ = model.bfloat16().model.rotary_emb(torch.zeros(1, 1, 1), torch.tensor([[8191]]))
    theta = model.config.rope_parameters["rope_theta"]
    exact = (8191 * theta ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)).cos()
    return (cos[0, 0, : size // 2].double() - exact).abs().max().item(), 0.0, 5e-3


@check("transformers", "without generation marks the assistant mask is all zeros")
def assistant_mask(root: Path) -> tuple[float, float, float]:
    """Tokens of the mask, of an answer of two words and its end."""
    _, tokenizer = load(root)
    chat = [{"role": "user", "content": "w5"}, {"role": "assistant", "content": "w6 w7"}]
    found = tokenizer.apply_chat_template(chat, return_dict=True, return_assistant_tokens_mask=True)
    return float(sum(found["assistant_masks"])), 3.0, 0.0


@check("transformers", "validation loss depends on the batch size")
def validation_loss(root: Path) -> tuple[float, float, float]:
    model, _ = load(root)
    return trainer_of(root, model).evaluate()["eval_loss"], mean_over_tokens(model), 1e-4


@check("transformers", "loss averaged per micro-batch")
def accumulated_loss(root: Path) -> tuple[float, float, float]:
    model, _ = load(root)
    trainer = trainer_of(root, model, gradient_accumulation_steps=len(ROWS), max_steps=1)
    trainer.train()
    return next(row["loss"] for row in trainer.state.log_history if "loss" in row), mean_over_tokens(model), 1e-3


@check("trl", "log-probabilities in bfloat16 move with the batch")
def log_probabilities(root: Path) -> tuple[float, float, float]:
    """The largest error of log-probabilities of a model in bfloat16 from those of its own hidden states in float64."""
    import torch
    from trl.trainer.utils import selective_log_softmax

    model, _ = load(root)
    model, ids = model.bfloat16(), torch.arange(3, 35)[None]
    with torch.no_grad():
        out = model(input_ids=ids, output_hidden_states=True)
        found = selective_log_softmax(out.logits[:, :-1], ids[:, 1:]).double()
        exact = (out.hidden_states[-1].double() @ model.lm_head.weight.double().T).log_softmax(-1)
    exact = exact[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]
    return (found - exact).abs().max().item(), 0.0, 1e-3


@check("trl", "top-p leaves the mass that it keeps in the importance ratio")
def importance_ratio(root: Path) -> tuple[float, float, float]:
    """The ratio of a policy that has not changed, of the likeliest token under top-p 0.8."""
    import torch
    from transformers import TopPLogitsWarper
    from trl.trainer.utils import selective_log_softmax

    logits = torch.linspace(0, 4, WORDS)[None]
    drawn = TopPLogitsWarper(0.8)(None, logits).log_softmax(-1)[0, -1]
    return (selective_log_softmax(logits, torch.tensor([WORDS - 1])) - drawn).exp().item(), 1.0, 1e-4


@check("trl", "in an odd batch one prompt of KTO's KL has its own reply")
def own_replies(root: Path) -> tuple[float, float, float]:
    """Prompts with their own reply, of three rows in batches of two."""
    from datasets import Dataset
    from trl import KTOConfig, KTOTrainer

    model, tokenizer = load(root)
    rows = [{"prompt": f"w{at}", "completion": f" w{at + 10} w{at + 20}", "label": at != 6} for at in (5, 6, 7)]
    options = dict(per_device_train_batch_size=2, report_to=[], use_cpu=True, bf16=False, loss_type="kto")
    arguments, rows = KTOConfig(output_dir=str(root / "out"), **options), Dataset.from_list(rows)
    made = KTOTrainer(model=model, args=arguments, processing_class=tokenizer, train_dataset=rows).train_dataset
    return float(sum(row["KL_completion_ids"] == row["completion_ids"] for row in made)), 0.0, 0.0


@check("trl", "weights in bfloat16 do not move at a rate of 1e-6")
def moved_weights(root: Path) -> tuple[float, float, float]:
    """How far a weight of a file in bfloat16 moves in the mean, in five steps of the defaults: 5e-6 where its gradients
    keep their sign."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    directory, rows = make_model(root, "bfloat16"), Dataset.from_list([{"text": "w5 w6 w7 w8 w9"}] * 8)
    options = dict(max_steps=5, learning_rate=1e-6, lr_scheduler_type="constant", save_strategy="no", report_to=[])
    options |= dict(use_cpu=True, disable_tqdm=True, per_device_train_batch_size=2)
    trainer = SFTTrainer(str(directory), args=SFTConfig(output_dir=str(root / "out"), **options), train_dataset=rows)
    head = trainer.model.lm_head.weight
    before = head.detach().double()
    trainer.train()
    return (head.detach().double() - before).abs().mean().item(), 5e-6, 2e-6


@check("trl", "packing cuts what is longer than a row")
def packed_tokens(root: Path) -> tuple[float, float, float]:
    """Tokens of four texts of 4, 2, 3 and 1 tokens in rows of 3."""
    from datasets import Dataset
    from trl import pack_dataset

    texts = Dataset.from_list([{"input_ids": ids} for ids in ([1, 2, 3, 4], [5, 6], [7, 8, 9], [10])])
    return float(sum(map(len, pack_dataset(texts, seq_length=3)["input_ids"]))), 10.0, 0.0


@check("trl", "weights of a Jensen-Shannon divergence at the wrong model")
def divergence(root: Path) -> tuple[float, float, float]:
    import torch
    from trl.experimental.gkd import GKDTrainer

    student, teacher = torch.linspace(0, 3, 6)[None, None], torch.linspace(2, 0, 6)[None, None] ** 2
    s, t = student.double().softmax(-1), teacher.double().softmax(-1)
    mixed = 0.7 * s + 0.3 * t
    exact = 0.3 * (t * (t / mixed).log()).sum() + 0.7 * (s * (s / mixed).log()).sum()
    found = GKDTrainer.generalized_jsd_loss(student, teacher, beta=0.3, reduction="sum")
    return found.item(), exact.item(), 1e-5


def main(peer: str) -> None:
    warnings.simplefilter("ignore")
    print(f"| trap | {peer} {importlib.import_module(peer).__version__} | gives | right |\n| --- | --- | --- | --- |")
    for trap, function in CHECKS[peer].items():
        with tempfile.TemporaryDirectory() as directory, contextlib.redirect_stdout(sys.stderr):
            found, right, allowed = function(Path(directory))
        verdict = "right" if math.isfinite(found) and abs(found - right) <= allowed else "wrong"
        print(f"| {trap} | {verdict} | {found:.6g} | {right:.6g} |", flush=True)


if __name__ == "__main__":
    if sys.argv[1:] not in [[peer] for peer in CHECKS]:
        sys.exit(f"usage: tools/traps --peer {' | '.join(CHECKS)}")
    main(sys.argv[1])
