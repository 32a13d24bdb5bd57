"""Conditions on a model for `lora.quantize=nf4`. Imports no torch.

Blocks of 64 weights of a row share a scale. A tensor-parallel rank of a layer that is cut by its inputs holds whole
blocks, so that the ranks' weights are those of one process.
"""

from dtrain.models.common.adapter_config import linears
from dtrain.models.common.config import ModelConfig

BLOCK = 64
_CUT_BY_INPUTS = ("o_proj", "out_proj", "down_proj", "output_linear")  # of the style rowwise


def quantize_problems(config: ModelConfig, quantize: str, tp: int) -> list[str]:
    """Return what keeps a model from `lora.quantize` on `tp` tensor-parallel ranks, one line each."""
    if quantize != "nf4" and config.unquantized is not None:
        return [
            "its config.json has a quantization_config of bitsandbytes: set lora.quantize=nf4 to train an adapter "
            "of the weights in 4 bits, or use the original checkpoint"
        ]
    if quantize != "nf4":
        return []
    problems = []
    for name, inputs in {name.rpartition(".")[2]: columns for name, (_, columns) in linears(config).items()}.items():
        if inputs % BLOCK:
            problems.append(
                f"lora.quantize=nf4 makes blocks of {BLOCK} inputs, which do not divide the {inputs} of {name}: set "
                "lora.quantize=none"
            )
        elif name in _CUT_BY_INPUTS and inputs // BLOCK % tp:
            fitting = [str(size) for size in range(1, tp) if inputs // BLOCK % size == 0]
            problems.append(
                f"parallel.tp={tp} does not divide the {inputs // BLOCK} blocks of {BLOCK} inputs that "
                f"lora.quantize=nf4 makes of {name}'s {inputs}; of the sizes below it tp may be {', '.join(fitting)}"
            )
    return problems
