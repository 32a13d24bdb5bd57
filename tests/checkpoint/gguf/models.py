"""Tiny models with tokenizers of real kinds, and a GGUF file read by transformers, the outside oracle."""

import json
import warnings
from pathlib import Path

import torch
import transformers as hf
from tokenizers import AddedToken, Regex, Tokenizer, models as kinds, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers.integrations.gguf.gguf_tokenizer_mapping import convert_gguf_tokenizer, get_gguf_tokenizer
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from tests.tiny import save_weights, write_model

ROWS = 384  # of the embedding: more than there are tokens
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace("{1,3}", "")
TEXTS = (
    "the theme: a hat, 1234567 hats",
    "  L'été,\n\n naïve ÉCOLE\t🙂 漢字 I'M we'll",
    "<|turn|>the<tool> hat <|turn|>",
    "",
)
MERGES = ("t h", "h e", "th e", "a t", "h at", "Ġ t", "Ġt he", "Ġ h", "Ġh at", "e m", "Ġ Ġ", "ĠĠ Ġ")
SHAPES = {
    "llama": {"head_dim": 16},
    "llama3": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
        "attention_bias": True,
        "mlp_bias": True,
    },
    "mistral": {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": None},
    "qwen2": {},
    "qwen3": {},
    "gemma3": {},
    "phi3": {},
}
"""Families -> fields of config.json beside those of tests/tiny.py."""


def byte_level(split: str | None = None, ignore_merges: bool = False) -> Tokenizer:
    """A byte-level tokenizer whose texts are split by a regular expression, or as GPT-2's are."""
    pairs = [tuple(merge.split(" ")) for merge in MERGES]
    words = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in pairs)]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(kinds.BPE(vocabulary, pairs, ignore_merges=ignore_merges))
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)
    steps = [] if split is None else [pre_tokenizers.Split(Regex(split), "isolated")]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*steps, last]) if steps else last
    return tokenizer


def sentencepiece(adds_space: bool) -> Tokenizer:
    """A tokenizer as SentencePiece's BPE makes them: Llama 2's, or Gemma's, which adds no space before a text."""
    special = ["<unk>", "<s>", "</s>"]
    words = [*special, *(f"<0x{value:02X}>" for value in range(256)), *"▁theamI':,1234567L"]
    formed = ["th", "he", "the", "▁the", "at", "hat", "▁hat", "▁▁", "em"]
    vocabulary = {word: number for number, word in enumerate([*words, *formed])}
    pairs = [
        (word[:cut], word[cut:])
        for word in formed
        for cut in range(1, len(word))
        if {word[:cut], word[cut:]} <= vocabulary.keys()
    ]
    tokenizer = Tokenizer(kinds.BPE(vocabulary, pairs, byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    spaces = [normalizers.Replace(" ", "▁")]
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), *spaces]) if adds_space else spaces[0]
    tokenizer.add_special_tokens(special)
    return tokenizer


def add_tokens(tokenizer: Tokenizer, bos: str | None = None) -> Tokenizer:
    """Add a special token and one that is not; bos: what comes before a text."""
    tokenizer.add_special_tokens(["<|turn|>"])
    tokenizer.add_tokens([AddedToken("<tool>", special=False, normalized=False)])
    if bos is not None:
        tokenizer.add_special_tokens([bos])
        tokenizer.post_processor = TemplateProcessing(
            single=[bos, "$A"], special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
    return tokenizer


def make(
    directory: Path, family: str = "llama", tokenizer: Tokenizer | None = None, weights: bool = True, **fields
) -> Path:
    """The directory of a tiny model of a family of `SHAPES` or tests/tiny.py, with a tokenizer."""
    base = family if family in ("qwen2", "qwen3", "gemma3", "phi3") or family not in SHAPES else "llama"
    write_model(directory, base, **{"vocab_size": ROWS, **SHAPES.get(family, {}), **fields})
    (tokenizer or add_tokens(byte_level())).save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|turn|>"}))
    (directory / "chat_template.jinja").write_text("{{ messages }}<|turn|>")
    return save_weights(directory)


def model_of(file: Path, directory: Path):
    """transformers' model of a GGUF file's tensors, its config that of `directory`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = hf.AutoConfig.from_pretrained(directory)
        if config.model_type == "mistral":  # which llama.cpp takes for a Llama
            config = hf.LlamaConfig(**{**config.to_dict(), "model_type": "llama"})
        model = hf.AutoModelForCausalLM.from_config(config).eval()
        tensors = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=model)["tensors"]
    left, unknown = model.load_state_dict(tensors, strict=False)
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    assert not unknown and not set(left) - tied, (left, unknown)
    return model


def tokenizer_of(file: Path) -> Tokenizer:
    """transformers' tokenizer of a GGUF file."""
    architecture, facts, _ = get_gguf_tokenizer(str(file))
    return convert_gguf_tokenizer(architecture, facts)[0]


def values(file: Path) -> dict:
    """The keys of a GGUF file."""
    from gguf import GGUFReader

    return {name: field.contents() for name, field in GGUFReader(file).fields.items()}


def logits(model, ids: torch.Tensor) -> torch.Tensor:
    """[B, S, V] of transformers' model."""
    with torch.no_grad():
        return model(input_ids=ids).logits
