"""Image processors of the families, read from the files of a model's directory.

`ProcessorFiles` reads the fields that all families share, and `read_processor` chooses the family.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtrain.base.errors import UserError
from dtrain.base.json_files import read_json
from dtrain.base.model_directory import CONFIG
from dtrain.data.images.processor import ImageProcessor, ImageTokens, Layout
from dtrain.data.text.tokenizer import TOKEN_TABLES
from dtrain.models.common.config_fields import Fields, format_value, is_number

if TYPE_CHECKING:
    from torch import Tensor


PROCESSOR, PREPROCESSOR, TOKENIZER_CONFIG = "processor_config.json", "preprocessor_config.json", "tokenizer_config.json"
MAX_PIXELS_KEY = "data.image_max_pixels"
_RESAMPLES = {2: "bilinear", 3: "bicubic"}  # Pillow's numbers
_OTHER_RESAMPLES = {0: "nearest", 1: "lanczos", 4: "box", 5: "hamming"}

BUDGETS = (70, 140, 280, 560, 1120)  # image tokens that Gemma 4 was trained with
_GEMMA3_MEAN = (0.5, 0.5, 0.5)  # mean and standard deviation of Gemma 3
_CLIP_MEAN, _CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
_MIN_PIXELS, _MAX_PIXELS = 56 * 56, 28 * 28 * 1280  # of Qwen2-VL


def read_processor(directory: str | Path, max_pixels: int | None = None) -> ImageProcessor:
    """Return the image processor of a model's directory in Hugging Face format.

    It reads processor_config.json (`image_processor`) or preprocessor_config.json, config.json, and texts of special
    tokens in tokenizer_config.json, which `check_tokens` of the result compares with the vocabulary.
    max_pixels: a bound on the pixels of a resized image that lowers the processor's own.
    Raises UserError that names the file and every field that dtrain does not have, or that does not fit config.json.
    """
    files = ProcessorFiles(Path(directory).expanduser())
    written = files.fields.get("image_processor_type")
    kind = _PROCESSOR_OF_MODEL_TYPE.get(str(files.model.get("model_type"))) if written is None else written
    name = kind.removesuffix("Fast").removesuffix("Pil") if isinstance(kind, str) else ""  # transformers' variants
    if name not in _READERS:
        raise UserError(
            f"{files.file}: image_processor_type {format_value(kind)} is not implemented; "
            f"there are: {', '.join(_READERS)}"
        )
    return _READERS[name](files, max_pixels)


class ProcessorFiles:
    """Fields of the files of a model's directory, and the problems that they have.

    file        where the image processor's fields stand: processor_config.json, under `image_processor`, as
                transformers 5 writes them, else preprocessor_config.json
    fields      those fields
    outer       the other fields of processor_config.json
    model       the fields of config.json; `vision` those of its vision_config
    problems    sentences on what does not fit
    """

    def __init__(self, directory: Path):
        self.file, values, outer = _processor_fields(directory)
        self.problems: list[str] = []
        self.fields, self.outer = Fields(values, self.problems), Fields(outer, self.problems)
        model = read_json(directory / CONFIG)
        vision = model.get("vision_config")
        self.model = Fields(model, self.problems, f"{CONFIG}: ")
        self.vision = Fields(vision if isinstance(vision, dict) else {}, self.problems, f"{CONFIG}: vision_config.")
        path = directory / TOKENIZER_CONFIG
        self._tokenizer = read_json(path) if path.is_file() else {}

    def refuse(self) -> None:
        """Raise UserError that names the file and every problem, where there is one."""
        if self.problems:
            raise UserError(f"{self.file}: {'; '.join(self.problems)}")

    def values(
        self, resample: str, mean: tuple[float, float, float], std: tuple[float, float, float], normalise: bool = True
    ) -> dict[str, Any]:
        """Return the fields `resample`, `rescale_factor`, `mean` and `std` of an ImageProcessor; the arguments are the
        kind's defaults."""
        for key in ("do_resize", "do_rescale", "do_normalize", "resample", "rescale_factor"):
            if key in self.fields and self.fields.get(key) is None:  # to transformers false, or another default
                self.fields.add_problem(f"{key} is null; give it a value, or leave it out")
        for key in ("do_resize", "do_rescale"):
            if not self.fields.flag(key, True):
                self.fields.add_problem(f"{key} is false, and dtrain always does it; set it to true")
        normalise = self.fields.flag("do_normalize", normalise)
        return {
            "resample": self._resample(resample),
            "rescale_factor": self.fields.number("rescale_factor", 1 / 255),
            "mean": self._channels("image_mean", mean, zero=True) if normalise else None,
            "std": self._channels("image_std", std, zero=False) if normalise else None,
        }

    def _resample(self, default: str) -> str:
        value = self.fields.get("resample")
        if value is None or (isinstance(value, int) and value in _RESAMPLES):
            return default if value is None else _RESAMPLES[value]
        name = _OTHER_RESAMPLES.get(value) if isinstance(value, int) else None
        self.fields.add_problem(
            f"resample {format_value(value)}{f' ({name})' if name else ''} is not implemented; there are: "
            + ", ".join(f"{number} ({mode})" for number, mode in _RESAMPLES.items())
        )
        return default

    def _channels(self, key: str, default: tuple[float, float, float], zero: bool) -> tuple[float, float, float]:
        value = self.fields.get(key)
        if value is None:
            return default
        channels = value if isinstance(value, list) else [value] * 3
        if len(channels) == 3 and all(is_number(channel) and 0 <= channel < 1e6 for channel in channels):
            if zero or 0 not in channels:
                red, green, blue = map(float, channels)
                return red, green, blue
        self.fields.add_problem(
            f"{key} {format_value(value)}: must be a number {'' if zero else 'above 0 '}for each of 3 channels"
        )
        return default

    def token(self, key: str, default: str) -> str:
        """Return the text of a special token of tokenizer_config.json, such as `boi_token`."""
        places = [self._tokenizer, *(self._tokenizer.get(name) for name in TOKEN_TABLES)]
        for place in places:
            value = place.get(key) if isinstance(place, dict) else None
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str) and text:
                return text
        return default

    def image_texts(self, begin: str, image: str, end: str) -> tuple[str, str, str]:
        """Return the texts of the tokens before an image, of it, and after it; the arguments are the kind's
        defaults."""
        return self.token("boi_token", begin), self.token("image_token", image), self.token("eoi_token", end)

    def image_token_id(self) -> int:
        """Return the id of image tokens by config.json."""
        key = "image_token_index" if self.model.get("image_token_id") is None else "image_token_id"
        if self.model.get(key) is None:
            self.model.add_problem("image_token_id is missing; it says which tokens stand for images")
            return 0
        return self.model.integer(key, minimum=0)

    def integer_of_tower(self, key: str, default: int, other: str | None = None) -> int:
        """Return the number `key` of the processor, which the tower's field `other` (None: of that name) must equal."""
        value = self.fields.integer(key, default)
        self.must_equal(key, value, self.vision, other or key)
        return value

    def must_equal(self, key: str, value: int, place: Fields, other: str) -> None:
        """Add a problem where the field `other` of `place`, a part of config.json, is written and is not `value`, which
        the processor has as `key`."""
        written = place.get(other)
        if written is not None and written != value:
            place.add_problem(
                f"{other} is {format_value(written)}, and {key} of the image processor {value}; they must be equal"
            )


def too_low(max_pixels: int, least: int, why: str) -> UserError:
    """Return the refusal of a bound of the recipe below the least that the processor can have."""
    return UserError(f"{MAX_PIXELS_KEY}={max_pixels}: this model's images have at least {least} pixels: {why}")


def _processor_fields(directory: Path) -> tuple[Path, Mapping[str, Any], Mapping[str, Any]]:
    outer = read_json(directory / PROCESSOR) if (directory / PROCESSOR).is_file() else {}
    inner = outer.get("image_processor")
    if isinstance(inner, dict):
        return directory / PROCESSOR, inner, outer
    if not (directory / PREPROCESSOR).is_file():
        raise UserError(
            f"{directory} has neither {PREPROCESSOR} nor {PROCESSOR} with an image_processor, which say how images are "
            "read; copy them from the model"
        )
    return directory / PREPROCESSOR, read_json(directory / PREPROCESSOR), outer


@dataclass(frozen=True, kw_only=True)
class Qwen2VLProcessor(ImageProcessor):
    """Processor of Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5: an image keeps its aspect, to whole tokens; patches in
    squares merge to tokens.

    patch_size              pixels of a patch's side
    merge_size              patches of a token's side
    temporal_patch_size     frames of a patch; a still image is repeated for each
    min_pixels, max_pixels  of the resized image
    """

    patch_size: int
    merge_size: int
    temporal_patch_size: int
    min_pixels: int
    max_pixels: int

    def layout(self, height: int, width: int) -> Layout:
        """Return the layout; `smart_resize` of https://github.com/QwenLM/Qwen2.5-VL gives height and width.

        A side has at least one token, so an image that is very long may have more than `max_pixels`.
        """
        side = self.patch_size * self.merge_size
        tall, wide = round(height / side) * side, round(width / side) * side
        if tall * wide > self.max_pixels:
            shrink = math.sqrt((height * width) / self.max_pixels)
            tall = max(side, math.floor(height / shrink / side) * side)
            wide = max(side, math.floor(width / shrink / side) * side)
        elif tall * wide < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (height * width))
            tall, wide = math.ceil(height * grow / side) * side, math.ceil(width * grow / side) * side
        grid = (1, tall // self.patch_size, wide // self.patch_size)
        return Layout(tall, wide, grid, tall * wide // side**2)

    def _cut(self, values: "Tensor") -> "Tensor":
        from dtrain.data.images.tensors import cut_merged_patches

        return cut_merged_patches(values, self.patch_size, self.merge_size, self.temporal_patch_size)

    def streams(self, is_image: "Tensor", layouts: Sequence[Layout]) -> "dict[str, Tensor]":
        """Return `image_features` [S] and `rotary_ids` [S, 3], int64."""
        from dtrain.data.images.tensors import feature_index, rotary_positions

        merge = self.merge_size
        sizes = [(frames, rows // merge, columns // merge) for _, _, (frames, rows, columns), _ in layouts]
        return {"image_features": feature_index(is_image), "rotary_ids": rotary_positions(is_image, sizes)}


def _read_qwen2_vl(files: ProcessorFiles, max_pixels: int | None) -> Qwen2VLProcessor:
    """Return Qwen2-VL's processor of a directory. Raises UserError for a bound below the processor's least."""
    patch = files.integer_of_tower("patch_size", 14)
    merge = files.integer_of_tower("merge_size", 2, "spatial_merge_size")
    frames = files.integer_of_tower("temporal_patch_size", 2)
    least, most = _pixel_bounds(files.fields)
    values = files.values("bicubic", _CLIP_MEAN, _CLIP_STD)
    image = files.token("image_token", "<|image_pad|>")
    tokens = ImageTokens(image, "", image, "", files.image_token_id())
    files.refuse()
    least_bound = max(least, (patch * merge) ** 2)
    if max_pixels is not None and max_pixels < least_bound:
        raise too_low(max_pixels, least_bound, "size.shortest_edge of its image processor, or one token")
    return Qwen2VLProcessor(
        patch_size=patch,
        merge_size=merge,
        temporal_patch_size=frames,
        min_pixels=least,
        max_pixels=most if max_pixels is None else min(most, max_pixels),
        tokens=tokens,
        **values,
    )


def _pixel_bounds(fields: Fields) -> tuple[int, int]:
    """Return Qwen2-VL's least and most pixels: the edges of `size`, which min_pixels and max_pixels come before."""
    size = fields.get("size")
    if size is None:
        size = {"shortest_edge": _MIN_PIXELS, "longest_edge": _MAX_PIXELS}
    if not isinstance(size, dict):
        fields.add_problem("size must be an object with shortest_edge and longest_edge")
        return 1, 1
    bounds = Fields(
        {
            "min_pixels": fields.get("min_pixels") or size.get("shortest_edge"),
            "max_pixels": fields.get("max_pixels") or size.get("longest_edge"),
        },
        fields.problems,
    )
    least, most = bounds.integer("min_pixels"), bounds.integer("max_pixels")
    if least > most:
        fields.add_problem(f"min_pixels {least} is above max_pixels {most}")
    return least, most


@dataclass(frozen=True, kw_only=True)
class Gemma3Processor(ImageProcessor):
    """Processor of Gemma 3: every image is stretched to size × size pixels, and has the same number of tokens.

    size        pixels of a side
    patch_size  pixels of a patch's side, by config.json: transformers' tower cuts them itself
    count       image tokens, which the projector pools from the patches
    """

    size: int
    patch_size: int
    count: int

    def layout(self, height: int, width: int) -> Layout:
        """Return the layout, the same for all images."""
        side = self.size // self.patch_size
        return Layout(self.size, self.size, (1, side, side), self.count)

    def _cut(self, values: "Tensor") -> "Tensor":
        from dtrain.data.images.tensors import cut_merged_patches

        return cut_merged_patches(values, self.patch_size, merge=1, frames=1)


def _read_gemma3(files: ProcessorFiles, max_pixels: int | None) -> Gemma3Processor:
    """Return Gemma 3's processor of a directory. Raises UserError for a bound below its one size."""
    fields = files.fields
    size = _gemma3_side(fields)
    fields.must_be_off("do_pan_and_scan", "crops of an image are not implemented; set it to false")
    patch = files.vision.integer("patch_size", 16)
    # The length stands in processor_config.json; the preprocessor_config.json of older files repeats it.
    count = files.outer.integer("image_seq_length", 256)
    files.must_equal("size", size, files.vision, "image_size")
    files.must_equal("image_seq_length", count, files.model, "mm_tokens_per_image")
    if size % patch:
        fields.add_problem(f"size {size} is not a multiple of the tower's patch_size {patch}")
    values = files.values("bilinear", _GEMMA3_MEAN, _GEMMA3_MEAN)
    begin, image, end = files.image_texts("<start_of_image>", "<image_soft_token>", "<end_of_image>")
    tokens = ImageTokens(begin, f"\n\n{begin}", image, f"{end}\n\n", files.image_token_id())
    files.refuse()
    if max_pixels is not None and max_pixels < size * size:
        raise too_low(max_pixels, size * size, f"each is made {size} × {size}; leave the key out")
    return Gemma3Processor(size=size, patch_size=patch, count=count, tokens=tokens, **values)


def _gemma3_side(fields: Fields) -> int:
    size = fields.get("size")
    if size is None:
        return 224
    edges = (size.get("height"), size.get("width")) if isinstance(size, dict) else (None, None)
    if edges[0] != edges[1] or edges[0] is None:
        fields.add_problem(f"size {format_value(size)}: must have an equal height and width")
        return 224
    return Fields({"size": edges[0]}, fields.problems).integer("size")


@dataclass(frozen=True, kw_only=True)
class Gemma4Processor(ImageProcessor):
    """Processor of Gemma 4: an image is made as large as a budget of tokens allows, of its aspect in whole tokens.

    patch_size           pixels of a patch's side
    pooling_kernel_size  patches of a token's side
    max_soft_tokens      one of `BUDGETS`
    """

    patch_size: int
    pooling_kernel_size: int
    max_soft_tokens: int

    def layout(self, height: int, width: int) -> Layout:
        """Return the layout: the largest sides of whole tokens, of this aspect, within the budget. A side of less
        than one token has one. The formula is that of Gemma4ImageProcessor in transformers 5.
        """
        side = self.patch_size * self.pooling_kernel_size
        most = self.max_soft_tokens * side**2
        factor = math.sqrt(most / (height * width))
        tall, wide = math.floor(factor * height / side), math.floor(factor * width / side)  # in tokens
        if not tall:
            tall, wide = 1, min(width // height, self.max_soft_tokens)
        elif not wide:
            tall, wide = min(height // width, self.max_soft_tokens), 1
        grid = (1, tall * self.pooling_kernel_size, wide * self.pooling_kernel_size)
        return Layout(tall * side, wide * side, grid, tall * wide)

    def _cut(self, values: "Tensor") -> "Tensor":
        from dtrain.data.images.tensors import cut_patches

        return cut_patches(values, self.patch_size)


def _read_gemma4(files: ProcessorFiles, max_pixels: int | None) -> Gemma4Processor:
    """Return Gemma 4's processor of a directory. A bound of pixels takes the largest budget within it. Raises UserError
    for a bound below the least budget."""
    fields = files.fields
    patch, kernel = files.integer_of_tower("patch_size", 16), files.integer_of_tower("pooling_kernel_size", 3)
    budget = fields.integer("max_soft_tokens", 280)
    if budget not in BUDGETS:
        fields.add_problem(f"max_soft_tokens {budget} is not one of {', '.join(map(str, BUDGETS))}")
    values = files.values("bicubic", (0.0, 0.0, 0.0), (1.0, 1.0, 1.0), normalise=False)
    begin, image, end = files.image_texts("<|image>", "<|image|>", "<image|>")
    tokens = ImageTokens(image, begin, image, end, files.image_token_id())
    files.refuse()
    if max_pixels is not None:
        pixels = (patch * kernel) ** 2  # of a token
        within = [count for count in BUDGETS if count <= budget and count * pixels <= max_pixels]
        if not within:
            raise too_low(max_pixels, BUDGETS[0] * pixels, f"{BUDGETS[0]} tokens are its least budget")
        budget = within[-1]
    return Gemma4Processor(
        patch_size=patch, pooling_kernel_size=kernel, max_soft_tokens=budget, tokens=tokens, **values
    )


_READERS = {
    "Qwen2VLImageProcessor": _read_qwen2_vl,
    "Qwen2_5_VLImageProcessor": _read_qwen2_vl,  # of the first files of Qwen2.5-VL
    "Gemma3ImageProcessor": _read_gemma3,
    "Gemma4ImageProcessor": _read_gemma4,
}
_QWEN_MODEL_TYPES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
_PROCESSOR_OF_MODEL_TYPE = dict.fromkeys(_QWEN_MODEL_TYPES, "Qwen2VLImageProcessor")
_PROCESSOR_OF_MODEL_TYPE |= {"gemma3": "Gemma3ImageProcessor", "gemma4": "Gemma4ImageProcessor"}
