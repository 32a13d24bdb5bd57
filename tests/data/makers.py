"""Tiny tokenizers and data files for the tests of the data room."""

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

SPECIAL = [
    "<unk>", "<s>", "</s>", "<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>",
    "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>",
]  # fmt: skip
CORPUS = [
    "The quick brown fox jumps over the lazy dog. What is two and two? Four, of course: 2 + 2 = 4.\n\n",
    "system user assistant model tool You are a helper. Answer the question, then stop.\nThinking about it, I say so.",
    "Grüße aus Köln, 東京 and Ελλάδα; emoji 🙂 too.",
] * 4


def byte_level(bos: str | None = "<|begin_of_text|>", normalizer=None) -> Tokenizer:
    """As Llama 3 and Qwen are made; with `bos`, a post-processor that puts it in front."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    steps = [processors.ByteLevel(trim_offsets=True)]
    if bos:
        steps.append(_template(tokenizer, bos))
    tokenizer.post_processor = processors.Sequence(steps)
    return tokenizer


def metaspace() -> Tokenizer:
    """As Llama 2 and Gemma are made: ▁ for spaces, one put in front, bytes for what is unknown."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    data = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=SPECIAL + data, show_progress=False)
    tokenizer.train_from_iterator([line.replace(" ", "▁") for line in CORPUS], trainer)
    content = json.loads(tokenizer.to_str())
    content["added_tokens"] = content["added_tokens"][: len(SPECIAL)]  # byte tokens are plain entries of the model
    tokenizer = Tokenizer.from_str(json.dumps(content))
    tokenizer.post_processor = _template(tokenizer, "<s>")
    return tokenizer


def _template(tokenizer: Tokenizer, bos: str):
    return processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))])


def save(directory: Path, tokenizer: Tokenizer, template: str | None = None, **config) -> Path:
    """A model's directory with this tokenizer, its template in tokenizer_config.json."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>", **config}
    config = {name: value for name, value in config.items() if value is not None}
    if template is not None:
        config["chat_template"] = template
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def write_jsonl(file: Path, rows) -> Path:
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return file
