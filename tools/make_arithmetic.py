#!/usr/bin/env python3
"""Write the quickstart's data and model directory: sums as chat messages, a small tokenizer, a model from scratch.

    python tools/make_arithmetic.py build/arithmetic

gives, the same bytes every time,

    train.jsonl val.jsonl heldout.jsonl    rows {"messages": [user: "47 + 58", assistant: "105"]}
    model/                                 config.json (Qwen3, 2.7 million parameters), tokenizer.json,
                                           tokenizer_config.json with a chat template, generation_config.json

Two numbers that meet in heldout.jsonl or val.jsonl meet, in either order, nowhere in train.jsonl.
"""

import argparse
import json
import random
from itertools import combinations_with_replacement
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers.pre_tokenizers import ByteLevel, Digits

SPECIAL_TOKENS = ["<|endoftext|>", "<|user|>", "<|assistant|>", "<|end|>"]
CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|' + message.role + '|>' + message.content + '<|end|>' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"
)
VOCAB_SIZE = 320
MAX_LENGTH = 512


def problem(a: int, b: int) -> dict:
    return {
        "messages": [
            {"role": "user", "content": f"{a} + {b}"},
            {"role": "assistant", "content": str(a + b)},
        ]
    }


def split_pairs(digits: int, val: int, heldout: int, seed: int) -> dict[str, list[tuple[int, int]]]:
    """Ordered pairs of numbers of `digits` digits by split; both orders of a pair fall into the same one."""
    pairs = list(combinations_with_replacement(range(10 ** (digits - 1), 10**digits), 2))
    draw = random.Random(seed)
    draw.shuffle(pairs)
    if val + heldout >= len(pairs):
        raise SystemExit(f"--val {val} and --heldout {heldout} leave nothing to train on: there are {len(pairs)} pairs")
    parts = {"val": pairs[:val], "heldout": pairs[val : val + heldout], "train": pairs[val + heldout :]}
    splits = {}
    for name, part in parts.items():
        if name == "train":
            splits[name] = [order for a, b in part for order in ({(a, b), (b, a)})]
        else:
            splits[name] = [(a, b) if draw.random() < 0.5 else (b, a) for a, b in part]
        splits[name].sort()
        draw.shuffle(splits[name])
    return splits


def train_tokenizer(texts: list[str], special_tokens: list[str]) -> Tokenizer:
    """Byte-level BPE whose digits stand alone, as in Qwen's and Gemma's tokenizers."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    digits, rest = Digits(individual_digits=True), ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, rest])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=special_tokens,
        initial_alphabet=sorted(ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def write_tokenizer(
    directory: Path,
    texts: list[str],
    special_tokens: list[str] = SPECIAL_TOKENS,
    chat_template: str = CHAT_TEMPLATE,
    **fields: str,
) -> dict[str, int]:
    """The tokenizer's files of a model directory, and generation_config.json; returns the special tokens' ids.

    fields: more of tokenizer_config.json.
    """
    tokenizer = train_tokenizer(texts, special_tokens)
    tokenizer.save(str(directory / "tokenizer.json"))
    ids = {token: tokenizer.token_to_id(token) for token in special_tokens}
    end_of_text, end_of_turn = ids["<|endoftext|>"], ids["<|end|>"]
    files = {
        "generation_config.json": {"eos_token_id": [end_of_turn, end_of_text], "pad_token_id": end_of_text},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "added_tokens_decoder": {
                str(index): {
                    "content": token,
                    "lstrip": False,
                    "normalized": False,
                    "rstrip": False,
                    "single_word": False,
                    "special": True,
                }
                for token, index in ids.items()
            },
            "bos_token": None,
            "eos_token": "<|end|>",
            "pad_token": "<|endoftext|>",
            "model_max_length": MAX_LENGTH,
            "chat_template": chat_template,
            **fields,
        },
    }
    for name, content in files.items():
        write_json(directory / name, content)
    return ids


def write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def write_model(directory: Path, texts: list[str]) -> None:
    """A model directory as a real one is laid out, less the weights."""
    directory.mkdir(parents=True, exist_ok=True)
    ids = write_tokenizer(directory, texts)
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 384,
        "intermediate_size": 768,
        "num_hidden_layers": 2,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "hidden_act": "silu",
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": MAX_LENGTH,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "tie_word_embeddings": True,
        "initializer_range": 0.02,
        "bos_token_id": ids["<|endoftext|>"],
        "eos_token_id": ids["<|end|>"],
        "torch_dtype": "float32",
    }
    write_json(directory / "config.json", config)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="directory to write")
    parser.add_argument("--digits", type=int, default=2, help="digits of each number (default 2)")
    parser.add_argument("--val", type=int, default=200, help="pairs in val.jsonl (default 200)")
    parser.add_argument("--heldout", type=int, default=500, help="pairs in heldout.jsonl (default 500)")
    parser.add_argument("--seed", type=int, default=0, help="of the split (default 0)")
    args = parser.parse_args()

    splits = split_pairs(args.digits, args.val, args.heldout, args.seed)
    args.out.mkdir(parents=True, exist_ok=True)
    texts = []
    for name, pairs in splits.items():
        rows = [problem(a, b) for a, b in pairs]
        (args.out / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        if name == "train":
            texts = [turn["content"] for row in rows for turn in row["messages"]]
    write_model(args.out / "model", texts)
    counts = ", ".join(f"{len(pairs)} {name}" for name, pairs in sorted(splits.items()))
    print(f"{args.out}: {counts} problems; model/ holds a tokenizer and the config of a model from scratch")


if __name__ == "__main__":
    main()
