"""Tiny models that take images, with tokenizer, chat template and image processor, and rows with pictures on disk."""

import json
from pathlib import Path

import torch
import transformers
from PIL import Image
from tokenizers import AddedToken

from dtrain.recipe.schema import Recipe
from tests.data.images.makers import PUBLISHED, TEXTS, encoded, picture
from tests.data.makers import byte_level, save as save_tokenizer, write_jsonl
from tests.models.oracle import _gemma, _qwen3_5, randomise, save
from tests.models.test_vision_models import CASES, SECTIONS
from tests.models.towers import _qwen_vl
from tests.models.vision.oracle import SIGLIP
from tests.tiny import tiny_recipe

_PARTS = (
    "{%- for part in message.content %}{% if part.type == 'image' %}PICTURE{% elif 'text' in part %}{{ part.text }}"
    "{% endif %}{% endfor %}"
)
_CONTENT = "{%- if message.content is string %}{{ message.content }}{% else %}" + _PARTS + "{% endif %}"
QWEN = (
    "{%- for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
    + _CONTENT.replace("PICTURE", "<|vision_start|><|image_pad|><|vision_end|>")
    + "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{%- for message in messages %}"
    "{{ '<start_of_turn>' + ('model' if message.role == 'assistant' else message.role) + '\n' }}"
    + _CONTENT.replace("PICTURE", "<start_of_image>")
    + "{{ '<end_of_turn>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
_TOKENS = {
    "qwen": ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>"),
    "gemma": ("<start_of_image>", "<image_soft_token>", "<end_of_image>"),
    "gemma4": ("<|image>", "<|image|>", "<image|>"),
}
_QWEN_PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "size": {"shortest_edge": 64, "longest_edge": 24 * 24},
    "patch_size": 4,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
}
_QWEN_TOWER = dict(depth=2, patch_size=4, num_position_embeddings=16)


def _qwen3_vl():
    text = dict(head_dim=16, tie_word_embeddings=True)
    return _qwen_vl(transformers.Qwen3VLConfig, text, deepstack_visual_indexes=[0], **_QWEN_TOWER)


def _qwen3_5_vl():
    vision = dict(hidden_size=16, intermediate_size=16, num_heads=2, out_hidden_size=48, **_QWEN_TOWER)
    return transformers.Qwen3_5Config(
        text_config=_qwen3_5(rope_parameters=SECTIONS).to_dict(), vision_config=vision, image_token_id=1
    )


def _gemma3():
    vision = {**SIGLIP, "image_size": 24, "patch_size": 4, "vision_use_head": False}
    text = {**_gemma().to_dict(), "sliding_window": 6}
    return transformers.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=9)


def _gemma4():
    config = CASES["gemma4"].config()
    config.vision_config.position_embedding_size = 160  # patches of the largest side
    return config


_GEMMA4_PROCESSOR = {
    "image_processor_type": "Gemma4ImageProcessor",
    "patch_size": 4,
    "pooling_kernel_size": 2,
    "max_soft_tokens": 70,
}
_GEMMA_PROCESSOR = {
    "image_processor_type": "Gemma3ImageProcessor",
    "size": {"height": 24, "width": 24},
    "image_seq_length": 9,
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
}
FAMILIES = {
    "qwen2.5-vl": (CASES["qwen2.5-vl"].config, "qwen", QWEN, _QWEN_PROCESSOR),
    "qwen3-vl": (_qwen3_vl, "qwen", QWEN, _QWEN_PROCESSOR),
    "qwen3.5": (_qwen3_5_vl, "qwen", QWEN, _QWEN_PROCESSOR),
    "gemma3": (_gemma3, "gemma", GEMMA, _GEMMA_PROCESSOR),
    "gemma4": (_gemma4, "gemma4", GEMMA.replace("<start_of_image>", "<|image|>"), _GEMMA4_PROCESSOR),
}


def write_model(directory: Path, family: str = "qwen3-vl", weights: bool = True, config=None) -> Path:
    """A directory with config.json, tokenizer, chat template and image processor; with weights, random ones in
    float32. config: of the family with other sizes."""
    make, kind, template, processor = FAMILIES[family]
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = byte_level(bos=None)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in _TOKENS[kind]])
    begin, image, end = (tokenizer.token_to_id(text) for text in _TOKENS[kind][:3])
    config = config or make()
    text = config.get_text_config()
    text.vocab_size = tokenizer.get_vocab_size() + 3
    if hasattr(text, "vocab_size_per_layer_input"):
        text.vocab_size_per_layer_input = text.vocab_size
    if kind == "qwen":
        config.image_token_id, config.vision_start_token_id, config.vision_end_token_id = image, begin, end
        config.video_token_id = tokenizer.token_to_id(_TOKENS[kind][3])
        texts = {"eos_token": "<|im_end|>", "bos_token": None, "image_token": _TOKENS[kind][1]}
    else:
        config.image_token_index = config.image_token_id = image
        config.boi_token_index, config.eoi_token_index = begin, end
        config.boi_token_id, config.eoi_token_id = begin, end
        named = dict(zip(("boi_token", "image_token", "eoi_token"), _TOKENS[kind], strict=True))
        texts = {"eos_token": "<end_of_turn>", "bos_token": "<bos>", **named}
    if weights:
        torch.manual_seed(0)
        save(randomise(transformers.AutoModelForImageTextToText.from_config(config)), directory)
    else:
        config.save_pretrained(directory)
    save_tokenizer(directory, tokenizer, template, **texts)
    (directory / "preprocessor_config.json").write_text(json.dumps(processor))
    if kind == "gemma":
        (directory / "processor_config.json").write_text(json.dumps({"image_seq_length": 9}))
    return directory


PUBLISHED_KINDS = {"qwen3_vl": "Qwen3-VL", "qwen3_5": "Qwen3-VL", "gemma4": "gemma-4"}  # of PUBLISHED


def write_photo_rows(directory: Path, config: dict) -> Path:
    """What a plan reads beside the config.json of a published model: its image processor, a tiny tokenizer and a row
    with a photo of 1024 × 768; the rows' path."""
    kind, processor, _ = PUBLISHED[PUBLISHED_KINDS[config["model_type"]]]
    texts = {**TEXTS[kind], "eos_token": "<|im_end|>", "bos_token": "<bos>"}
    template = QWEN if kind == "qwen" else GEMMA.replace("<start_of_image>", texts["image_token"])
    tokenizer = byte_level(bos=None)
    tokens = _TOKENS["qwen"] if kind == "qwen" else [texts[name] for name in ("boi_token", "image_token", "eoi_token")]
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in tokens])
    image = tokenizer.token_to_id(texts["image_token"])
    (directory / "config.json").write_text(json.dumps({**config, "image_token_id": image}))
    save_tokenizer(directory, tokenizer, template, **texts)
    (directory / "preprocessor_config.json").write_text(json.dumps(processor))
    (directory / "photo.png").write_bytes(encoded(Image.new("RGB", (1024, 768))))
    return write_jsonl(directory / "rows.jsonl", [chat("photo.png", "What is it?")])


SIZES = ((16, 16), (24, 9), (12, 40), (30, 30), (8, 16))


def write_pictures(directory: Path) -> list[str]:
    """Pictures of different sizes; their names."""
    directory.mkdir(parents=True, exist_ok=True)
    for number, (height, width) in enumerate(SIZES):
        (directory / f"{number}.png").write_bytes(encoded(picture(height, width, seed=number)))
    return [f"{number}.png" for number in range(len(SIZES))]


def chat(*question: dict | str, answer: str = "two and two") -> dict:
    """A row with a question of parts, of which strings are names of pictures, or texts where they have a space."""
    parts = [{"type": "text", "text": part} if " " in part else {"type": "image", "image": part} for part in question]
    return {"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": answer}]}


def question(number: int, names: list[str]) -> list[str]:
    """Parts of the question of a row: with one picture, two, and none, in turn."""
    first, other = names[number % len(names)], names[(number + 2) % len(names)]
    return [[first, "What is it?"], ["Is it ", first, " or ", other, " and why?"], ["What is two and two?"]][number % 3]


def write_rows(directory: Path, count: int = 12) -> Path:
    """Rows with one picture, two, and none."""
    names = write_pictures(directory)
    answers = ["two and two " * (1 + number % 4) for number in range(count)]
    rows = [chat(*question(number, names), answer=answer) for number, answer in enumerate(answers)]
    return write_jsonl(directory / "rows.jsonl", rows)


def picture_recipe(root: Path, *overrides: str, family: str = "qwen3-vl", name: str = "run") -> Recipe:
    """An SFT recipe over a tiny model that takes images and rows with pictures, float64, 3 steps."""
    model = root / family
    if not model.exists():
        write_model(model, family)
    if not (root / "rows.jsonl").exists():
        write_rows(root)
    of_pictures = (
        f"model.path={model}",
        "model.init=pretrained",
        "data.max_length=128",
        "data.packing=false",
        "data.shuffle=false",
        "train.steps=3",
        "train.global_batch=4",
        "scheduler.warmup_steps=0",
    )
    return tiny_recipe(root, *of_pictures, *overrides, name=name)
