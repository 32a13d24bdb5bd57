"""Models with their weights from a directory in Hugging Face's or PEFT's layout."""

from pathlib import Path

import torch

from dtrain.adapters.lora import build_with_adapters
from dtrain.base.model_directory import is_adapter_directory
from dtrain.checkpoint.huggingface.quantized import convert_to_4_bits
from dtrain.checkpoint.huggingface.read import read_weights
from dtrain.checkpoint.peft.config import base_of, read_adapter_config
from dtrain.checkpoint.peft.files import read_adapter
from dtrain.checkpoint.peft.tensors import num_outputs_in_adapter
from dtrain.models.building import build, linear_shapes
from dtrain.models.common.decoder import CausalLM
from dtrain.models.read_config import read_config


def from_pretrained(
    path: str | Path,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    *,
    nf4: bool = False,
    labels: int | None = None,
    vision: bool = False,
) -> CausalLM:
    """The model in a Hugging Face directory, its weights (safetensors, one file or an index) in `dtype` on `device`; or
    an adapter in PEFT's layout, with its base. nf4: whether an adapter's base is rounded to 4 bits. labels, vision: as
    of `read_config`. Raises UserError: no such directory, a config that cannot be used, weights that are missing or do
    not fit, a base that is not found."""
    if not is_adapter_directory(path):
        model = build(read_config(path, labels, vision), dtype, "meta")
        convert_to_4_bits(model, Path(path), dtype, nf4=False)
        _fill(model, path, device)
        return model
    base, adapter = base_of(Path(path)), read_adapter_config(Path(path))
    config = read_config(base, None if labels is None else num_outputs_in_adapter(Path(path)) or labels, vision)
    model = build_with_adapters(config, adapter, dtype, "meta")
    convert_to_4_bits(model, base, dtype, nf4=nf4, except_for=adapter.select_saved_modules(linear_shapes(config)))
    _fill(model, base, device)
    read_adapter(model, path)
    return model


def _fill(model: CausalLM, directory: str | Path, device: torch.device | str) -> None:
    """Give the model, on meta, memory on `device` and its weights."""
    model.to_empty(device=device)
    model.tie_weights()
    read_weights(model, directory)
