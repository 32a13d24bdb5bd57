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
    implementation: str = "auto",
) -> CausalLM:
    """Build the model of a Hugging Face directory, or of an adapter with its base, with its weights.

    Args:
        path: A model's directory (safetensors in one file or with an index), or an adapter's in PEFT's layout.
        dtype: Dtype of the weights.
        device: Device of the model.
        nf4: Round the base of an adapter to 4 bits.
        labels: As in `read_config`.
        vision: As in `read_config`.
        implementation: As in `read_config`.

    Raises:
        UserError: If there is no such directory, the config cannot be used, weights are missing or do not fit, or the
            base of an adapter is not found.

    Collectives:
        None.
    """
    if not is_adapter_directory(path):
        model = build(read_config(path, labels, vision, implementation), dtype, "meta")
        convert_to_4_bits(model, Path(path), dtype, nf4=False)
        _fill(model, path, device)
        return model
    base, adapter = base_of(Path(path)), read_adapter_config(Path(path))
    num_labels = None if labels is None else num_outputs_in_adapter(Path(path)) or labels
    config = read_config(base, num_labels, vision, implementation)
    model = build_with_adapters(config, adapter, dtype, "meta")
    convert_to_4_bits(model, base, dtype, nf4=nf4, except_for=adapter.select_saved_modules(linear_shapes(config)))
    _fill(model, base, device)
    read_adapter(model, path)
    return model


def _fill(model: CausalLM, directory: str | Path, device: torch.device | str) -> None:
    """Allocate a model that is on meta, and read its weights."""
    model.to_empty(device=device)
    model.tie_weights()
    read_weights(model, directory)
