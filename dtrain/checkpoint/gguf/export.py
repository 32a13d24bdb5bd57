"""Export of a run, a checkpoint, a model or an adapter as one GGUF file for llama.cpp and ollama.

The file is written tensor by tensor under a temporary name, and renamed when it is complete.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dtrain.base.errors import UserError, describe_error
from dtrain.base.files import publish, resolve_links, staging_path
from dtrain.base.model_directory import TOKENIZER_FILE, find_companions, is_chat_template
from dtrain.checkpoint.dcp.training_state import model_tensors, tensor_aliases
from dtrain.checkpoint.gguf.families import (
    ALTERNATIVE,
    add_sizes,
    architecture_of,
    rotary_tensors,
    to_llama_cpp,
    unsupported_window,
)
from dtrain.checkpoint.gguf.tokenizer import Vocabulary, add_vocabulary, general_name, read_vocabulary
from dtrain.checkpoint.huggingface.export import AdapterExport, ModelExport, open_source
from dtrain.checkpoint.huggingface.file_rows import fused_weights
from dtrain.checkpoint.huggingface.merged import FullWeight, fold_scale
from dtrain.checkpoint.huggingface.read import candidate_names
from dtrain.models.common.config import is_in_vision_tower
from dtrain.models.common.decoder import CausalLM

TYPES = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32, "q8_0": torch.float32}
"""Types of a file's matrices, and the dtype to which their values are rounded before they are written."""
_Q8_BLOCK = 32  # values of a row that share a scale in q8_0

_HEAD = "lm_head"


def export_gguf(
    source: str | Path, out: str | Path, kind: str = "f16", form: str | None = None, original_base: bool = False
) -> str:
    """Write one GGUF file. It appears when it is complete.

    Only the text part of a multimodal model is written. An adapter is written without its base, for llama.cpp's option
    --lora next to a file of the base. One tensor is in memory at a time. No process group is needed or used.

    Args:
        source: As in `huggingface.export.export`.
        out: The new file.
        kind: Type of matrices: "f16", "bf16", "f32" or "q8_0" (blocks of 32 values in 8 bits with a scale). Vectors are
            float32. A merged weight is rounded once, to this type.
        form: As in `huggingface.export.export`.
        original_base: As in `huggingface.export.export`.

    Returns:
        Lines about what was read, and about parts of the model that the file or llama.cpp does not have.

    Raises:
        UserError: Before weights are read, for an architecture, a tokenizer or an adapter for which llama.cpp does not
            compute the same as dtrain.
    """
    out = Path(out)
    check_output(out, kind)
    content = open_source(Path(source), None, form, original_base)
    if isinstance(content, AdapterExport):
        return _write_adapter(content, out, kind, is_folded=form == "folded")
    return _write_model(content, out, kind)


def _write_model(content: ModelExport, out: Path, kind: str) -> str:
    """Write the file of a full model."""
    config, layout = content.model.config, content.layout
    arch, file_config = architecture_of(config), _text_config(layout.config)
    vocabulary = _read_vocabulary(content)
    names = _gguf_names(content.model, arch)
    tensors: dict[str, GgufTensor] = {}
    for name, tensor in rotary_tensors(arch, config, file_config).items():
        tensors[name] = GgufTensor(name, tensor.shape, "f32", tensor.to)
    tower_names: set[str] = set()  # in the files
    for name in model_tensors(content.model):
        if is_in_vision_tower(name):
            tower_names.update(candidate_names(content.model, [name]))
    for entry in content.entries:
        if entry.names[0] in tower_names:
            continue
        text_name, name = names[entry.names[0]]
        if name not in tensors:  # files may have a tied head next to its embedding
            read = partial(_read_for_llama_cpp, entry, text_name, content.model, arch)
            tensors[name] = GgufTensor(name, entry.shape, type_of(entry.shape, kind), read)
    with gguf_writer(out, arch) as writer:
        writer.add_type("model")
        title = general_name(out.stem, vocabulary)
        if title is not None:
            writer.add_name(title)
        _add_file_type(writer, kind)
        add_sizes(writer, arch, config, file_config)
        add_vocabulary(writer, vocabulary)
        write_tensors(writer, list(tensors.values()))
    return "\n".join([content.description, *_missing_part_notes(content.model, arch, vocabulary)])


def _write_adapter(content: AdapterExport, out: Path, kind: str, is_folded: bool) -> str:
    """Write llama.cpp's file of a LoRA.

    llama.cpp scales a layer by alpha / rank, with one alpha for all layers. If a layer has another scale, or the
    adapter is folded, the scale is multiplied into B.
    """
    adapter = content.adapter
    arch, config = architecture_of(adapter.model.config), adapter.model.config
    adapter.refuse_more_than_lora("--folded" if is_folded else "--adapter")
    for name in adapter.adapted:
        if is_in_vision_tower(name):
            raise UserError(f"an adapter of a vision tower, {name}: a GGUF file has only the text part; {ALTERNATIVE}")
    if _HEAD in adapter.adapted and config.tie_word_embeddings:
        raise UserError(f"an adapter of {_HEAD}, which is tied: llama.cpp has no such tensor; export it --merged")
    rank = max(layer.rank for layer in adapter.adapted.values())
    alpha = float(rank) if is_folded else adapter.config.alpha

    def read(name: str, dtype: torch.dtype) -> Tensor:
        module, _, part = name.rpartition(".")
        layer, tensor = adapter.adapted[module], adapter.stored(name).float()
        if is_folded:
            tensor = fold_scale(name, tensor, rank, layer.scale)
        elif part == "lora_B":
            tensor = tensor * (layer.scale * layer.rank / alpha)
        if part == "lora_B":  # its rows are those of the layer's weight
            tensor = to_llama_cpp(arch, config, f"{module}.weight", tensor)
        return tensor.to(dtype)

    tensors = []
    for module, layer in adapter.adapted.items():
        weight = gguf_name(f"{module}.weight", arch, config.num_hidden_layers)
        for part in ("lora_A", "lora_B"):
            name = f"{module}.{part}"
            shape = adapter.padded_shape(name, rank if is_folded else layer.rank)
            tensors.append(GgufTensor(f"{weight}.{part.lower()}", shape, type_of(shape, kind), partial(read, name)))
    with gguf_writer(out, arch) as writer:
        writer.add_type("adapter")
        writer.add_name(out.stem)
        _add_file_type(writer, kind)
        writer.add_string("adapter.type", "lora")
        writer.add_float32("adapter.lora.alpha", alpha)
        write_tensors(writer, tensors)
    return f"{content.description}, its scale folded into B" if is_folded else content.description


@dataclass(frozen=True)
class GgufTensor:
    """A tensor of a GGUF file.

    Attributes:
        name: Its name in the file.
        shape: Its shape.
        kind: Its type, such as "f16".
        read: Returns its values in a dtype.
    """

    name: str
    shape: Sequence[int]
    kind: str
    read: Callable[[torch.dtype], Tensor]


def type_of(shape: Sequence[int], kind: str) -> str:
    """Return the type of a tensor in a file of type `kind`.

    Vectors are f32. In a file of q8_0, matrices whose rows cannot be divided into blocks are f16.

    Example:
        >>> type_of([64], "q8_0"), type_of([64, 64], "q8_0"), type_of([64, 40], "q8_0")
        ('f32', 'q8_0', 'f16')
    """
    if len(shape) == 1:
        return "f32"
    return "f16" if kind == "q8_0" and shape[-1] % _Q8_BLOCK else kind


def check_output(out: Path, kind: str) -> None:
    """Raise UserError if the type is unknown, the package `gguf` is missing, or the file exists."""
    if kind not in TYPES:
        raise UserError(f"--type {kind}: choose one of {', '.join(TYPES)}")
    if find_spec("gguf") is None:
        raise UserError(
            "GGUF files are written by the package gguf, which is not installed: pip install 'dtrain[gguf]'"
        )
    if out.exists():
        raise UserError(f"{out} is already there: delete it, or choose another file")


@contextmanager
def gguf_writer(out: Path, arch: str) -> Iterator[Any]:
    """Context with a GGUFWriter of a temporary file, which is renamed to `out` if the block ends without an error.

    After an error, the temporary file is deleted.

    Args:
        out: The new file.
        arch: llama.cpp's architecture.

    Raises:
        UserError: For errors of the disk.
    """
    from gguf import GGUFWriter

    out = resolve_links(out)
    partial = staging_path(out)
    writer = GGUFWriter(partial, arch)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        yield writer
        writer.close()
        publish(partial, out)
    except OSError as error:
        raise UserError(f"{out}: {describe_error(error)}") from error
    finally:
        if writer.fout is not None:
            writer.close()
        partial.unlink(missing_ok=True)


def write_tensors(writer: Any, tensors: Sequence[GgufTensor]) -> None:
    """Write the header of a GGUF file, and then its tensors one by one.

    Args:
        writer: The GGUFWriter, to which all keys have been added.
        tensors: The tensors. Each is read when it is written.

    Raises:
        UserError: If a tensor has values that its type does not have.
    """
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import quantize

    float32 = torch.empty(0).numpy().dtype
    for tensor in tensors:
        kind = GGMLQuantizationType[tensor.kind.upper()]
        block, size = GGML_QUANT_SIZES[kind]
        writer.add_tensor_info(tensor.name, tensor.shape, float32, prod(tensor.shape) // block * size, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in tensors:
        rounded = tensor.read(TYPES[tensor.kind])
        if tensor.kind == "f16" and not rounded.isfinite().all():
            raise UserError(f"{tensor.name} has values that float16 does not: choose --type bf16, or f32")
        values = rounded.float().contiguous().numpy()
        writer.write_tensor_data(quantize(values, GGMLQuantizationType[tensor.kind.upper()]))


def _missing_part_notes(model: CausalLM, arch: str, vocabulary: Vocabulary) -> list[str]:
    """Return lines about parts of a model that the file or llama.cpp does not have."""
    notes = list(vocabulary.notes)
    if model.config.is_text_tower:
        notes.insert(0, "the text part alone: no images")
    if (window := unsupported_window(arch, model.config)) is not None:
        notes.append(
            f"llama.cpp has no sliding window of this architecture: the context length is the window, {window}"
        )
    if (most := model.config.max_document_length) is not None:
        notes.append(
            f"llama.cpp takes long_factor for every text where its context is longer than {most}: dtrain has none"
        )
    return [f"  note: {note}" for note in notes]


def _read_vocabulary(content: ModelExport) -> Vocabulary:
    """Read the tokenizer and the chat template of a model to write, from the last directory that has them."""
    layout = content.layout
    tokenizer_directory = template_directory = None
    for directory in (layout.source, *layout.companions):
        if (directory / TOKENIZER_FILE).is_file():
            tokenizer_directory = directory
        if any(is_chat_template(name) for name in find_companions(directory)):
            template_directory = directory
    tokenizer_directory = tokenizer_directory or layout.source
    template_directory = template_directory or tokenizer_directory
    return read_vocabulary(tokenizer_directory, layout.source, content.model.config.vocab_size, template_directory)


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    inner = config.get("text_config")
    return {**config, **inner} if isinstance(inner, dict) else config


def _gguf_names(model: CausalLM, arch: str) -> dict[str, tuple[str, str]]:
    """Map the possible names of each tensor of the text part in safetensors files to two other names.

    Returns:
        By each possible name: the tensor's name in the files of a text-only model, and its name in a GGUF file. For
        example, the key `language_model.model.norm.weight` of a multimodal model has the value
        ("model.norm.weight", "output_norm.weight").
    """
    known = tensor_aliases(model)
    shapes = {
        name: tuple(tensor.shape) for name, tensor in model_tensors(model).items() if not is_in_vision_tower(name)
    }
    names: dict[str, tuple[str, str]] = {}
    for fused in fused_weights(model, shapes):
        both = fused.name, gguf_name(fused.name, arch, model.config.num_hidden_layers)
        names |= dict.fromkeys(candidate_names(model, known.get(fused.name, [fused.name])), both)
    return names


def gguf_name(name: str, arch: str, layers: int) -> str:
    """Return llama.cpp's name for a tensor of a text model.

    Args:
        name: Name of the tensor in the files of the text model.
        arch: llama.cpp's architecture.
        layers: Number of layers of the model.

    Raises:
        ValueError: If llama.cpp's architecture has no such tensor.
    """
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    (number,) = [number for number, known in MODEL_ARCH_NAMES.items() if known == arch]
    module, _, parameter = name.rpartition(".")
    gguf_module = get_tensor_name_map(number, layers).get_name(module)
    if gguf_module is None:
        raise ValueError(f"llama.cpp's {arch} has no tensor {name}")
    return f"{gguf_module}.{parameter}"


def _read_for_llama_cpp(entry: FullWeight, name: str, model: CausalLM, arch: str, dtype: torch.dtype) -> Tensor:
    """Read a tensor in llama.cpp's form, rounded to `dtype`."""
    return to_llama_cpp(arch, model.config, name, entry.read(dtype).to(dtype))


def _add_file_type(writer: Any, kind: str) -> None:
    from gguf import GGML_QUANT_VERSION, LlamaFileType

    writer.add_file_type(LlamaFileType["ALL_F32" if kind == "f32" else f"MOSTLY_{kind.upper()}"])
    if kind == "q8_0":
        writer.add_quantization_version(GGML_QUANT_VERSION)
