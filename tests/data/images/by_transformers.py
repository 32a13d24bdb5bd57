"""Answers of transformers' image processors on torchvision, kept in by_transformers.json for tests without torchvision.

torchvision fits one build of torch alone, and transformers imports no model beside one that does not fit. So the
answers are made in an environment that has both, and pixels are kept as digests of their float32 bytes:

    python -m tests.data.images.by_transformers
"""

import hashlib
import json
import tempfile
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from tokenizers import Tokenizer as Backend, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from tests.data.images.makers import PUBLISHED, TEXTS, encoded, model_directory, picture, values

FILE = Path(__file__).with_suffix(".json")
# Height, width: odd, tall, wide, of one pixel, of whole patches, and around the bounds of the processors.
SIZES = [
    (1, 1),
    (3, 500),
    (500, 3),
    (28, 28),
    (56, 56),
    (55, 57),
    (256, 256),
    (255, 256),
    (37, 411),
    (200, 1),
    (321, 123),
    (768, 840),
    (896, 896),
    (48, 960),
    (14, 42),
    (600, 801),
]
BOUNDED = {"size": {"shortest_edge": 3136, "longest_edge": 50_176}}  # 56 × 56 and 224 × 224
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("Qwen2.5-VL", {}),
    ("Qwen2.5-VL", {"min_pixels": None, "max_pixels": None, **BOUNDED}),
    ("Qwen2.5-VL", {"min_pixels": 50_000, "max_pixels": 50_176, "resample": 2, "temporal_patch_size": 1}),
    ("Qwen3-VL", {}),
    ("Qwen3-VL", {"size": None, "rescale_factor": 0.01, "image_std": [0.5, 1, 2]}),
    ("Qwen3-VL", {"do_normalize": False, "merge_size": 1, **BOUNDED}),
    ("gemma-3", {}),
    ("gemma-3", {"size": {"height": 56, "width": 56}, "resample": 3, "image_mean": 0.25, "image_std": [0.1, 0.2, 0.3]}),
    ("gemma-4", {}),
    ("gemma-4", {"max_soft_tokens": 70}),
    ("gemma-4", {"max_soft_tokens": 140, "do_normalize": True, "image_mean": [0.1, 0.2, 0.3], "resample": 2}),
]
MODES = ("L", "LA", "RGBA", "P", "CMYK", "I;16", "1")
OF_FILES = {"Qwen3-VL": BOUNDED, "gemma-3": {"size": {"height": 56, "width": 56}}, "gemma-4": {}}
OF_TEXTS = {"gemma-3": {"size": {"height": 56, "width": 56}}, "Qwen3-VL": BOUNDED}
PICTURES = ((60, 90), (120, 40))


def digest(pixels: Tensor) -> str:
    return hashlib.sha256(pixels.contiguous().numpy().tobytes()).hexdigest()[:32]


def variant(directory: Path, published: str, fields: dict[str, Any], form: str = "preprocessor") -> Path:
    """A directory whose config.json fits the processor's fields."""
    vision = {key: fields[key] for key in ("patch_size", "temporal_patch_size") if fields.get(key)}
    vision = {"image_size": (fields.get("size") or {}).get("height", 896), "patch_size": 14, **vision}
    if published != "gemma-3":
        vision = {"spatial_merge_size": fields.get("merge_size") or 2}
    return model_directory(directory, published, form, fields, {"vision_config": vision})


def many_sizes() -> list[tuple[int, int]]:
    """Sides up to 9,000 pixels, whose aspect is at most 200."""
    generator = torch.Generator().manual_seed(0)
    sides = torch.exp(torch.rand(4000, 2, generator=generator) * 9.1).long().clamp(1, 9000).tolist()
    square = [(side + off, side) for side in (56, 64, 224, 240, 256) for off in (-1, 0, 1)]
    sizes = [*map(tuple, sides), *square, (1, 200), (200, 1), (45, 9000)]
    return [size for size in sizes if max(size) <= 200 * min(size)]


def file_of(mode: str) -> bytes:
    return encoded(picture(61, 47, mode), "TIFF" if mode == "CMYK" else "PNG")


def tokenizer(family: str) -> PreTrainedTokenizerFast:
    """A tokenizer whose words are single characters, with the family's special tokens."""
    extra = dict(TEXTS[family])
    if family == "gemma4":
        extra |= {"audio_token": "<|audio|>", "boa_token": "<|audio>", "eoa_token": "<audio|>"}
    words = [*"\nabc .", *("<|video_pad|>", "<|video|>"), *extra.values()]
    backend = Backend(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="."))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token=".", pad_token=".", extra_special_tokens=extra)


def _pixels_of(answer: Any) -> tuple[Any, str]:
    """Grid or number of tokens, and the digest of the pixels without padding."""
    (pixels,) = answer["pixel_values"][None] if "image_grid_thw" in answer else answer["pixel_values"]
    if "image_grid_thw" in answer:
        return answer["image_grid_thw"][0].tolist(), digest(pixels)
    if "image_position_ids" not in answer:
        return None, digest(pixels)
    places = answer["image_position_ids"][0]
    is_real = (places >= 0).all(-1)
    columns, rows = (places[is_real].max(0).values + 1).tolist()
    assert places[is_real].tolist() == [[column, row] for row in range(rows) for column in range(columns)]
    return [1, rows, columns, *answer["num_soft_tokens_per_image"].tolist()], digest(pixels[is_real])


def answers(folder: Path) -> dict[str, Any]:
    """transformers' answers of every kind. Needs a torchvision that fits torch."""
    import transformers as hf
    from transformers.models.gemma4.image_processing_gemma4 import get_aspect_ratio_preserving_size
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

    def processor(name: str, published: str, fields: dict[str, Any]) -> Any:
        made = hf.AutoImageProcessor.from_pretrained(variant(folder / name, published, fields))
        assert made.backend == "torchvision"
        return made

    whole = {
        "Qwen2.5-VL": lambda images, words: hf.Qwen2_5_VLProcessor(images, words, hf.Qwen2VLVideoProcessor()),
        "Qwen3-VL": lambda images, words: hf.Qwen3VLProcessor(images, words, hf.Qwen3VLVideoProcessor()),
        "gemma-3": lambda images, words: hf.Gemma3Processor(images, words),
        "gemma-4": lambda images, words: hf.Gemma4Processor(
            hf.Gemma4AudioFeatureExtractor(), images, words, hf.Gemma4VideoProcessor()
        ),
    }
    pixels, files, written, texts = [], {}, {}, {}
    for number, (published, fields) in enumerate(VARIANTS):
        theirs = processor(f"variant-{number}", published, fields)
        pictures = [Image.fromarray(values(*size).numpy()) for size in SIZES]
        pixels.append([_pixels_of(theirs(image, return_tensors="pt")) for image in pictures])
    images = [Image.fromarray(values(301, 203, seed=seed).numpy()) for seed in range(3)]
    together = processor("together", "Qwen3-VL", BOUNDED)(images, return_tensors="pt")["pixel_values"]
    for published, fields in OF_FILES.items():
        theirs = processor(f"files-{published}", published, fields)
        for mode in MODES:  # Gemma3Processor asks for conversion
            image = Image.open(BytesIO(file_of(mode)))
            files[f"{published} {mode}"] = _pixels_of(theirs(image, do_convert_rgb=True, return_tensors="pt"))[1]
    for published, (family, _, _) in PUBLISHED.items():
        directory = model_directory(folder / f"written-{published}", published)
        hf.AutoImageProcessor.from_pretrained(directory).save_pretrained(directory)
        written[published] = json.loads((directory / "preprocessor_config.json").read_text())
        theirs = processor(f"texts-{published}", published, OF_TEXTS.get(published, {}))
        text, words = "a {0} b{0}\nc".format(_placeholder(family)), tokenizer(family)
        both = whole[published](theirs, words)
        pictures = [picture(*size) for size in PICTURES]
        texts[published] = both(text=[text], images=[pictures], return_tensors="pt")["input_ids"][0].tolist()
    layouts = [
        [smart_resize(*size, 32, 3136, 50_176), get_aspect_ratio_preserving_size(*size, 16, 2520, 3)]
        for size in many_sizes()
    ]
    return {
        "pixels": pixels,
        "together": digest(together),
        "layouts": digest(torch.tensor(layouts)),
        "files": files,
        "written": written,
        "texts": texts,
    }


def _placeholder(family: str) -> str:
    """What a chat template writes for an image, by the documentation of the family's processor."""
    return {
        "qwen": TEXTS["qwen"]["image_token"],
        "gemma3": TEXTS["gemma3"]["boi_token"],
        "gemma4": TEXTS["gemma4"]["image_token"],
    }[family]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made_in:
        lines = (f"{json.dumps(kind)}: {json.dumps(value)}" for kind, value in answers(Path(made_in)).items())
        FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
