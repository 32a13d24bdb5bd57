"""`ProcessorFiles`: files of a model's directory that decide its image processor, and fields of all kinds."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dtrain.base.errors import UserError
from dtrain.base.json_files import read_json
from dtrain.base.model_directory import CONFIG
from dtrain.data.text.tokenizer import TOKEN_TABLES
from dtrain.models.common.config_fields import Fields, is_number, shown

PROCESSOR, PREPROCESSOR, TOKENIZER_CONFIG = "processor_config.json", "preprocessor_config.json", "tokenizer_config.json"
MAX_PIXELS_KEY = "data.image_max_pixels"
_RESAMPLES = {2: "bilinear", 3: "bicubic"}  # Pillow's numbers
_OTHER_RESAMPLES = {0: "nearest", 1: "lanczos", 4: "box", 5: "hamming"}


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
                self.fields.problem(f"{key} is null; give it a value, or leave it out")
        for key in ("do_resize", "do_rescale"):
            if not self.fields.flag(key, True):
                self.fields.problem(f"{key} is false, and dtrain always does it; set it to true")
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
        self.fields.problem(
            f"resample {shown(value)}{f' ({name})' if name else ''} is not implemented; there are: "
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
        self.fields.problem(
            f"{key} {shown(value)}: must be a number {'' if zero else 'above 0 '}for each of 3 channels"
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
            self.model.problem("image_token_id is missing; it says which tokens stand for images")
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
            place.problem(f"{other} is {shown(written)}, and {key} of the image processor {value}; they must be equal")


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
