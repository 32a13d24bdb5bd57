"""`read_processor`: the image processor of a model's directory, of the kinds that dtrain has."""

from pathlib import Path

from dtrain.base.errors import UserError
from dtrain.data.images import gemma3, gemma4, qwen2_vl
from dtrain.data.images.fields import ProcessorFiles
from dtrain.data.images.processor import ImageProcessor
from dtrain.models.common.config_fields import shown

_KINDS = {
    "Qwen2VLImageProcessor": qwen2_vl.read,
    "Qwen2_5_VLImageProcessor": qwen2_vl.read,  # of the first files of Qwen2.5-VL
    "Gemma3ImageProcessor": gemma3.read,
    "Gemma4ImageProcessor": gemma4.read,
}
_MODEL_TYPES = {
    **dict.fromkeys(
        ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), "Qwen2VLImageProcessor"
    ),
    "gemma3": "Gemma3ImageProcessor",
    "gemma4": "Gemma4ImageProcessor",
}


def read_processor(directory: str | Path, max_pixels: int | None = None) -> ImageProcessor:
    """Return the image processor of a model's directory in Hugging Face format.

    It reads processor_config.json (`image_processor`) or preprocessor_config.json, config.json, and texts of special
    tokens in tokenizer_config.json, which `check_tokens` of the result compares with the vocabulary.
    max_pixels: a bound on the pixels of a resized image that lowers the processor's own.
    Raises UserError that names the file and every field that dtrain does not have, or that does not fit config.json.
    """
    files = ProcessorFiles(Path(directory).expanduser())
    written = files.fields.get("image_processor_type")
    kind = _MODEL_TYPES.get(str(files.model.get("model_type"))) if written is None else written
    name = kind.removesuffix("Fast").removesuffix("Pil") if isinstance(kind, str) else ""  # transformers' variants
    if name not in _KINDS:
        raise UserError(
            f"{files.file}: image_processor_type {shown(kind)} is not implemented; there are: {', '.join(_KINDS)}"
        )
    return _KINDS[name](files, max_pixels)
