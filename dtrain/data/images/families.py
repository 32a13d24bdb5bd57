"""The image processors of the model families, read from the files of a model's directory.

`read_processor` chooses the family, and `ProcessorFiles` reads the fields that all families have. For an image of
1000 × 700 pixels (height, width), the families make

    Qwen3-VL   992 × 704 pixels, 31 × 22 = 682 tokens     the aspect is kept, with whole tokens of 32 × 32 pixels
    Gemma 4    960 × 672 pixels, 20 × 14 = 280 tokens     as large as a budget of 280 tokens of 48 × 48 pixels allows
    Gemma 3    896 × 896 pixels, 256 tokens               every image is stretched to one square
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

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
_RESAMPLES = {2: "bilinear", 3: "bicubic"}  # by Pillow's numbers
_OTHER_RESAMPLES = {0: "nearest", 1: "lanczos", 4: "box", 5: "hamming"}

BUDGETS = (70, 140, 280, 560, 1120)  # image tokens that Gemma 4 was trained with
_GEMMA3_MEAN = (0.5, 0.5, 0.5)  # mean and standard deviation of Gemma 3
_CLIP_MEAN, _CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
_MIN_PIXELS, _MAX_PIXELS = 56 * 56, 28 * 28 * 1280  # of Qwen2-VL


def read_processor(directory: str | Path, max_pixels: int | None = None) -> ImageProcessor:
    """Read the image processor of a model's directory in Hugging Face format.

    It is read from processor_config.json (`image_processor`) or preprocessor_config.json, from config.json, and from
    the special tokens of tokenizer_config.json. `check_tokens` of the result compares these with the vocabulary.

    Args:
        directory: The model's directory.
        max_pixels: Maximum number of pixels of a resized image, if it is below the processor's own.

    Raises:
        UserError: If a field has a value that dtrain does not implement, or does not fit config.json. The error names
            the file and all such fields.
    """
    files = ProcessorFiles(Path(directory).expanduser())
    kind = files.fields.get("image_processor_type")
    if kind is None:
        kind = _PROCESSOR_OF_MODEL_TYPE.get(str(files.model.get("model_type")))
    # transformers' variants of a processor have the same numbers.
    name = kind.removesuffix("Fast").removesuffix("Pil") if isinstance(kind, str) else ""
    if name not in _READERS:
        raise UserError(
            f"{files.file}: image_processor_type {format_value(kind)} is not implemented; "
            f"there are: {', '.join(_READERS)}"
        )
    return _READERS[name](files, max_pixels)


class ProcessorFiles:
    """Fields of the files of a model's directory, and their problems.

    Attributes:
        file: File of the image processor: processor_config.json if it has `image_processor` (transformers 5), otherwise
            preprocessor_config.json.
        fields: Fields of the image processor.
        outer: Other fields of processor_config.json.
        model: Fields of config.json.
        vision: Fields of its vision_config.
        problems: Sentences on fields that are not implemented or do not fit together.
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
        """Raise UserError with the file and all problems, if there are any."""
        if self.problems:
            raise UserError(f"{self.file}: {'; '.join(self.problems)}")

    def values(
        self, resample: str, mean: tuple[float, float, float], std: tuple[float, float, float], normalise: bool = True
    ) -> dict[str, Any]:
        """Return the fields `resample`, `rescale_factor`, `mean` and `std` of an ImageProcessor.

        Args:
            resample: Default of the family.
            mean: Default of the family.
            std: Default of the family.
            normalise: Default of the family for do_normalize.
        """
        for key in ("do_resize", "do_rescale", "do_normalize", "resample", "rescale_factor"):
            if key in self.fields and self.fields.get(key) is None:  # to transformers it is false, or another default
                self.fields.add_problem(f"{key} is null; give it a value, or leave it out")
        for key in ("do_resize", "do_rescale"):
            if not self.fields.flag(key, True):
                self.fields.add_problem(f"{key} is false, and dtrain always does it; set it to true")
        normalise = self.fields.flag("do_normalize", normalise)
        return {
            "resample": self._resample(resample),
            "rescale_factor": self.fields.number("rescale_factor", 1 / 255),
            "mean": self._channels("image_mean", mean, allow_zero=True) if normalise else None,
            "std": self._channels("image_std", std, allow_zero=False) if normalise else None,
        }

    def _resample(self, default: str) -> str:
        value = self.fields.get("resample")
        if value is None:
            return default
        if isinstance(value, int) and value in _RESAMPLES:
            return _RESAMPLES[value]
        other_name = _OTHER_RESAMPLES.get(value) if isinstance(value, int) else None
        suffix = f" ({other_name})" if other_name else ""
        implemented = ", ".join(f"{number} ({mode})" for number, mode in _RESAMPLES.items())
        self.fields.add_problem(f"resample {format_value(value)}{suffix} is not implemented; there are: {implemented}")
        return default

    def _channels(self, key: str, default: tuple[float, float, float], allow_zero: bool) -> tuple[float, float, float]:
        """Return a number for each channel. The file may have one number for all of them."""
        value = self.fields.get(key)
        if value is None:
            return default
        channels = value if isinstance(value, list) else [value] * 3
        are_numbers = all(is_number(channel) and 0 <= channel < 1e6 for channel in channels)
        if len(channels) == 3 and are_numbers and (allow_zero or 0 not in channels):
            red, green, blue = map(float, channels)
            return red, green, blue
        bound = "" if allow_zero else "above 0 "
        self.fields.add_problem(f"{key} {format_value(value)}: must be a number {bound}for each of 3 channels")
        return default

    def token(self, key: str, default: str) -> str:
        """Return the text of a special token of tokenizer_config.json, such as `boi_token`."""
        for table in (self._tokenizer, *(self._tokenizer.get(name) for name in TOKEN_TABLES)):
            value = table.get(key) if isinstance(table, dict) else None
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str) and text:
                return text
        return default

    def image_texts(self, begin: str, image: str, end: str) -> tuple[str, str, str]:
        """Return the texts of the tokens before an image, of an image token, and after the image.

        The arguments are the family's defaults.
        """
        return self.token("boi_token", begin), self.token("image_token", image), self.token("eoi_token", end)

    def image_token_id(self) -> int:
        """Return the id of image tokens in config.json."""
        key = "image_token_index" if self.model.get("image_token_id") is None else "image_token_id"
        if self.model.get(key) is None:
            self.model.add_problem("image_token_id is missing; it is the id of the tokens that stand for images")
            return 0
        return self.model.integer(key, minimum=0)

    def integer_of_tower(self, key: str, default: int, other: str | None = None) -> int:
        """Return a number of the processor that config.json's vision_config repeats.

        A problem is added if the two numbers differ.

        Args:
            key: The processor's field.
            default: The number if the processor's files do not have this field.
            other: The field of vision_config. None if it has the name `key`, too.
        """
        value = self.fields.integer(key, default)
        self.must_equal(key, value, self.vision, other or key)
        return value

    def must_equal(self, key: str, value: int, config: Fields, other: str) -> None:
        """Add a problem if a field of config.json is set and differs from a field of the processor.

        Args:
            key: The processor's field.
            value: Its value.
            config: A part of config.json.
            other: The field of `config`.
        """
        config_value = config.get(other)
        if config_value is not None and config_value != value:
            config.add_problem(
                f"{other} is {format_value(config_value)}, and {key} of the image processor {value}; they must be equal"
            )


def _too_low_error(max_pixels: int, min_pixels: int, why: str) -> UserError:
    """Return the error for a `data.image_max_pixels` that is smaller than the processor's smallest image."""
    return UserError(f"{MAX_PIXELS_KEY}={max_pixels}: this model's images have at least {min_pixels} pixels: {why}")


def _processor_fields(directory: Path) -> tuple[Path, Mapping[str, Any], Mapping[str, Any]]:
    """Return the image processor's file, its fields, and the other fields of processor_config.json."""
    outer = read_json(directory / PROCESSOR) if (directory / PROCESSOR).is_file() else {}
    inner = outer.get("image_processor")
    if isinstance(inner, dict):
        return directory / PROCESSOR, inner, outer
    if not (directory / PREPROCESSOR).is_file():
        raise UserError(
            f"{directory} has neither {PREPROCESSOR} nor {PROCESSOR} with an image_processor, which describe how "
            "images are read. Copy them from the model"
        )
    return directory / PREPROCESSOR, read_json(directory / PREPROCESSOR), outer


@dataclass(frozen=True, kw_only=True)
class Qwen2VLProcessor(ImageProcessor):
    """Processor of Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5.

    An image keeps its aspect, rounded to whole tokens. Squares of patches are merged to tokens.

    Attributes:
        patch_size: Pixels of a patch's side.
        merge_size: Patches of a token's side.
        temporal_patch_size: Frames of a patch. A still image is repeated for each.
        min_pixels: Minimum number of pixels of the resized image.
        max_pixels: Maximum number of pixels of the resized image.
    """

    patch_size: int
    merge_size: int
    temporal_patch_size: int
    min_pixels: int
    max_pixels: int

    def layout(self, height: int, width: int) -> Layout:
        """Return the layout of an image.

        A side has at least one token, so a very long image may have more than `max_pixels`.

        Reference:
            `smart_resize` of https://github.com/QwenLM/Qwen2.5-VL.
        """
        token_side = self.patch_size * self.merge_size  # pixels
        new_height = round(height / token_side) * token_side
        new_width = round(width / token_side) * token_side
        if new_height * new_width > self.max_pixels:
            shrink = math.sqrt((height * width) / self.max_pixels)
            new_height = max(token_side, math.floor(height / shrink / token_side) * token_side)
            new_width = max(token_side, math.floor(width / shrink / token_side) * token_side)
        elif new_height * new_width < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (height * width))
            new_height = math.ceil(height * grow / token_side) * token_side
            new_width = math.ceil(width * grow / token_side) * token_side
        grid = (1, new_height // self.patch_size, new_width // self.patch_size)
        return Layout(new_height, new_width, grid, new_height * new_width // token_side**2)

    def _cut(self, values: "Tensor") -> "Tensor":
        from dtrain.data.images.tensors import cut_merged_patches

        return cut_merged_patches(values, self.patch_size, self.merge_size, self.temporal_patch_size)

    def streams(self, is_image: "Tensor", layouts: Sequence[Layout]) -> "dict[str, Tensor]":
        """Return `image_features` [S] and `rotary_ids` [S, 3], both int64; see tensors.py."""
        from dtrain.data.images.tensors import feature_index, rotary_positions

        sizes = []  # frames, rows and columns of each image in tokens
        for layout in layouts:
            frames, rows, columns = layout.grid
            sizes.append((frames, rows // self.merge_size, columns // self.merge_size))
        return {"image_features": feature_index(is_image), "rotary_ids": rotary_positions(is_image, sizes)}


def _read_qwen2_vl(files: ProcessorFiles, max_pixels: int | None) -> Qwen2VLProcessor:
    """Read a Qwen2-VL processor. Raises UserError, also if `max_pixels` is below the processor's minimum."""
    patch = files.integer_of_tower("patch_size", 14)
    merge = files.integer_of_tower("merge_size", 2, "spatial_merge_size")
    frames = files.integer_of_tower("temporal_patch_size", 2)
    bounds = _read_pixel_bounds(files.fields)
    values = files.values("bicubic", _CLIP_MEAN, _CLIP_STD)
    image = files.token("image_token", "<|image_pad|>")
    tokens = ImageTokens(image, "", image, "", files.image_token_id())
    files.refuse()
    smallest = max(bounds.min_pixels, (patch * merge) ** 2)
    if max_pixels is not None and max_pixels < smallest:
        raise _too_low_error(max_pixels, smallest, "size.shortest_edge of its image processor, or one token")
    return Qwen2VLProcessor(
        patch_size=patch,
        merge_size=merge,
        temporal_patch_size=frames,
        min_pixels=bounds.min_pixels,
        max_pixels=bounds.max_pixels if max_pixels is None else min(bounds.max_pixels, max_pixels),
        tokens=tokens,
        **values,
    )


class _PixelBounds(NamedTuple):
    min_pixels: int
    max_pixels: int


def _read_pixel_bounds(fields: Fields) -> _PixelBounds:
    """Return Qwen2-VL's bounds: min_pixels and max_pixels, or else the edges of `size` (which are pixel counts)."""
    size = fields.get("size")
    if size is None:
        size = {"shortest_edge": _MIN_PIXELS, "longest_edge": _MAX_PIXELS}
    if not isinstance(size, dict):
        fields.add_problem("size must be an object with shortest_edge and longest_edge")
        return _PixelBounds(1, 1)
    bounds = Fields(
        {
            "min_pixels": fields.get("min_pixels") or size.get("shortest_edge"),
            "max_pixels": fields.get("max_pixels") or size.get("longest_edge"),
        },
        fields.problems,
    )
    min_pixels = bounds.integer("min_pixels")
    max_pixels = bounds.integer("max_pixels")
    if min_pixels > max_pixels:
        fields.add_problem(f"min_pixels {min_pixels} is above max_pixels {max_pixels}")
    return _PixelBounds(min_pixels, max_pixels)


@dataclass(frozen=True, kw_only=True)
class Gemma3Processor(ImageProcessor):
    """Processor of Gemma 3. Every image is stretched to size × size pixels and has the same number of tokens.

    Attributes:
        size: Pixels of a side.
        patch_size: Pixels of a patch's side, from config.json, because transformers' tower cuts the patches itself.
        count: Image tokens, which the projector pools from the patches.
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
    """Read a Gemma 3 processor. Raises UserError, also if `max_pixels` is below its one size."""
    fields = files.fields
    size = _gemma3_side(fields)
    fields.must_be_off("do_pan_and_scan", "crops of an image are not implemented; set it to false")
    patch = files.vision.integer("patch_size", 16)
    # The number is in processor_config.json. The preprocessor_config.json of older models repeats it.
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
        raise _too_low_error(max_pixels, size * size, f"each is made {size} × {size}; leave the key out")
    return Gemma3Processor(size=size, patch_size=patch, count=count, tokens=tokens, **values)


def _gemma3_side(fields: Fields) -> int:
    """Return the side of Gemma 3's square images in pixels."""
    size = fields.get("size")
    if size is None:
        return 224
    height = size.get("height") if isinstance(size, dict) else None
    if height is None or height != size.get("width"):
        fields.add_problem(f"size {format_value(size)}: must have an equal height and width")
        return 224
    return Fields({"size": height}, fields.problems).integer("size")


@dataclass(frozen=True, kw_only=True)
class Gemma4Processor(ImageProcessor):
    """Processor of Gemma 4. An image is made as large as a budget of tokens allows, with its aspect in whole tokens.

    Attributes:
        patch_size: Pixels of a patch's side.
        pooling_kernel_size: Patches of a token's side.
        max_soft_tokens: The budget, one of `BUDGETS`.
    """

    patch_size: int
    pooling_kernel_size: int
    max_soft_tokens: int

    def layout(self, height: int, width: int) -> Layout:
        """Return the layout of an image: the largest sides with its aspect, in whole tokens, within the budget.

        A side that is shorter than one token gets one.

        Reference:
            Gemma4ImageProcessor in transformers 5.
        """
        token_side = self.patch_size * self.pooling_kernel_size  # pixels
        max_pixels = self.max_soft_tokens * token_side**2
        factor = math.sqrt(max_pixels / (height * width))
        rows = math.floor(factor * height / token_side)  # of tokens
        columns = math.floor(factor * width / token_side)
        if rows == 0:
            rows = 1
            columns = min(width // height, self.max_soft_tokens)
        elif columns == 0:
            rows = min(height // width, self.max_soft_tokens)
            columns = 1
        grid = (1, rows * self.pooling_kernel_size, columns * self.pooling_kernel_size)
        return Layout(rows * token_side, columns * token_side, grid, rows * columns)

    def _cut(self, values: "Tensor") -> "Tensor":
        from dtrain.data.images.tensors import cut_patches

        return cut_patches(values, self.patch_size)


def _read_gemma4(files: ProcessorFiles, max_pixels: int | None) -> Gemma4Processor:
    """Read a Gemma 4 processor. `max_pixels` selects the largest budget of tokens that fits.

    Raises:
        UserError: If the files are wrong, or `max_pixels` is below the smallest budget.
    """
    fields = files.fields
    patch = files.integer_of_tower("patch_size", 16)
    kernel = files.integer_of_tower("pooling_kernel_size", 3)
    budget = fields.integer("max_soft_tokens", 280)
    if budget not in BUDGETS:
        fields.add_problem(f"max_soft_tokens {budget} is not one of {', '.join(map(str, BUDGETS))}")
    values = files.values("bicubic", (0.0, 0.0, 0.0), (1.0, 1.0, 1.0), normalise=False)
    begin, image, end = files.image_texts("<|image>", "<|image|>", "<image|>")
    tokens = ImageTokens(image, begin, image, end, files.image_token_id())
    files.refuse()
    if max_pixels is not None:
        token_pixels = (patch * kernel) ** 2
        fitting = [count for count in BUDGETS if count <= budget and count * token_pixels <= max_pixels]
        if not fitting:
            raise _too_low_error(max_pixels, BUDGETS[0] * token_pixels, f"{BUDGETS[0]} tokens are its least budget")
        budget = fitting[-1]
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
