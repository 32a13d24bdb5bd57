"""Pictures, their files in every format, and directories of models with image processors, for tests."""

import json
import struct
import zlib
from io import BytesIO
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

CLIP = {"image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711]}
HALF = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
TEXTS = {
    "qwen": {"image_token": "<|image_pad|>"},
    "gemma3": {
        "boi_token": "<start_of_image>",
        "image_token": "<image_soft_token>",
        "eoi_token": "<end_of_image>",
    },
    "gemma4": {"boi_token": "<|image>", "image_token": "<|image|>", "eoi_token": "<image|>"},
}
# Fields as the published files have them.
PUBLISHED = {
    "Qwen2.5-VL": (
        "qwen",
        {
            "min_pixels": 3136,
            "max_pixels": 12845056,
            "patch_size": 14,
            "temporal_patch_size": 2,
            "merge_size": 2,
            **CLIP,
            "image_processor_type": "Qwen2VLImageProcessor",
            "processor_class": "Qwen2_5_VLProcessor",
        },
        {
            "model_type": "qwen2_5_vl",
            "image_token_id": 9,
            "vision_config": {"patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2},
        },
    ),
    "Qwen3-VL": (
        "qwen",
        {
            "size": {"longest_edge": 16777216, "shortest_edge": 65536},
            "patch_size": 16,
            "temporal_patch_size": 2,
            "merge_size": 2,
            **HALF,
            "processor_class": "Qwen3VLProcessor",
            "image_processor_type": "Qwen2VLImageProcessorFast",
        },
        {
            "model_type": "qwen3_vl",
            "image_token_id": 9,
            "vision_config": {"patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2},
        },
    ),
    "gemma-3": (
        "gemma3",
        {
            "do_convert_rgb": None,
            "do_normalize": True,
            "do_pan_and_scan": None,
            "do_rescale": True,
            "do_resize": True,
            **HALF,
            "image_processor_type": "Gemma3ImageProcessor",
            "image_seq_length": 256,
            "pan_and_scan_max_num_crops": None,
            "resample": 2,
            "rescale_factor": 0.00392156862745098,
            "size": {"height": 896, "width": 896},
        },
        {
            "model_type": "gemma3",
            "image_token_index": 9,
            "mm_tokens_per_image": 256,
            "vision_config": {"image_size": 896, "patch_size": 14},
        },
    ),
    "gemma-4": (
        "gemma4",
        {
            "do_convert_rgb": True,
            "do_normalize": False,
            "do_rescale": True,
            "do_resize": True,
            "image_mean": [0.0] * 3,
            "image_std": [1.0] * 3,
            "image_processor_type": "Gemma4ImageProcessor",
            "image_seq_length": 280,
            "max_soft_tokens": 280,
            "patch_size": 16,
            "pooling_kernel_size": 3,
            "resample": 3,
            "rescale_factor": 0.00392156862745098,
        },
        {
            "model_type": "gemma4",
            "image_token_id": 9,
            "vision_config": {"patch_size": 16, "pooling_kernel_size": 3},
        },
    ),
}


def values(height: int, width: int, channels: int = 3, seed: int = 0) -> Tensor:
    """Noise over a slope, uint8 [height, width, channels]: every pixel its own, with edges and smooth parts."""
    generator = torch.Generator().manual_seed(seed + 7919 * height + width)
    noise = torch.randint(0, 256, (height, width, channels), generator=generator)
    slope = torch.linspace(0, 255, height)[:, None, None] + torch.linspace(0, 64, width)[None, :, None]
    picture = torch.where(torch.rand(height, width, 1, generator=generator) < 0.5, noise, slope.expand_as(noise))
    return picture.clamp(0, 255).to(torch.uint8)


def picture(height: int, width: int, mode: str = "RGB", seed: int = 0) -> Image.Image:
    """A picture of `values` in a mode of Pillow; P has transparent colours."""
    channels = {"RGB": 3, "RGBA": 4, "CMYK": 4, "YCbCr": 3, "L": 1, "LA": 2}.get(mode)
    if channels is not None:
        return Image.frombytes(mode, (width, height), values(height, width, channels, seed).numpy().tobytes())
    if mode == "P":
        paletted = picture(height, width, seed=seed).quantize(16)
        paletted.info["transparency"] = bytes([0, 128, 255, 40] * 4)
        return paletted
    if mode == "I;16":
        deep = values(height, width, 1, seed).to(torch.int32) * 3
        return Image.frombytes(mode, (width, height), deep.to(torch.int16).numpy().tobytes())
    return picture(height, width, "L", seed).convert(mode)


def encoded(image: Image.Image, kind: str = "PNG", orientation: int = 1, **options) -> bytes:
    """The file of an image, with EXIF's orientation."""
    if orientation != 1:
        exif = Image.Exif()
        exif[0x0112] = orientation
        options["exif"] = exif
    stream = BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def animation(kind: str) -> bytes:
    return encoded(picture(9, 12), kind, save_all=True, append_images=[picture(9, 12, seed=1)])


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png_that_claims(width: int, height: int) -> bytes:
    """A PNG of a few bytes whose header claims so many pixels."""
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    pixels = chunk(b"IDAT", zlib.compress(b"\0" * 64))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + pixels + chunk(b"IEND", b"")


def model_directory(
    path: Path, published: str, form: str = "preprocessor", fields: dict | None = None, model: dict | None = None
) -> Path:
    """A directory with the processor's fields in one of their two forms, and a config.json; `fields` and `model`
    replace what is published, a field of None stands for null."""
    family, processor, config = PUBLISHED[published]
    processor = {**processor, **(fields or {})}
    path.mkdir(parents=True, exist_ok=True)
    if form == "processor":
        outer = {"image_processor": processor, "image_seq_length": processor.get("image_seq_length", 256)}
        (path / "processor_config.json").write_text(json.dumps(outer))
    else:
        (path / "preprocessor_config.json").write_text(json.dumps(processor))
    (path / "config.json").write_text(json.dumps({**config, **(model or {})}))
    (path / "tokenizer_config.json").write_text(json.dumps(TEXTS[family]))
    return path
