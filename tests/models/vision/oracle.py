"""Tiny multimodal models of transformers, random, and their towers beside ours with the same weights."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import transformers
from torch.overrides import TorchFunctionMode

from dtrain.models.common.model_fields import ModelFields
from dtrain.models.vision.common import VisionTower
from dtrain.models.vision.gemma3 import Gemma3Vision
from dtrain.models.vision.gemma4 import Gemma4Vision
from dtrain.models.vision.qwen import Qwen2_5VLVision, Qwen3_5Vision, Qwen3VLVision
from tests.models.oracle import randomise

TEXT_SIZE = 24
TEXT = dict(
    vocab_size=40,
    hidden_size=TEXT_SIZE,
    intermediate_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=12,
    pad_token_id=None,
    bos_token_id=None,
    eos_token_id=None,
)
ROPE = {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [2, 2, 2]}
QWEN = dict(hidden_size=32, intermediate_size=40, num_heads=2, out_hidden_size=TEXT_SIZE)


class WideIslands(TorchFunctionMode):
    """Inside, code that asks for float32 gets float64: transformers' rotary tables, norms and interpolation."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        def widened(value):
            return torch.float64 if value is torch.float32 else value

        func = torch.Tensor.double if func is torch.Tensor.float else func
        return func(*map(widened, args), **{name: widened(value) for name, value in (kwargs or {}).items()})


def qwen_tokens(model, pixels, grids):
    out = model.visual(pixels, grid_thw=torch.tensor(grids).view(-1, 3))
    return out.pooler_output, getattr(out, "deepstack_features", None) or []


def gemma3_images(pixels, grids, patch):
    """The images [n, 3, height, width] of patches [P, values]."""
    images = [
        part.view(rows, columns, 3, patch, patch).permute(2, 0, 3, 1, 4).reshape(3, rows * patch, columns * patch)
        for part, (_, rows, columns) in zip(pixels.split([r * c for _, r, c in grids]), grids, strict=True)
    ]
    return torch.stack(images)


def gemma3_tokens(model, pixels, grids):
    images = gemma3_images(pixels, grids, model.config.vision_config.patch_size)
    return model.get_image_features(images).pooler_output.flatten(0, 1), []


def gemma4_images(pixels, grids, pool):
    """Patches [n, most, values] and their places [n, most, 2], with padding behind every image, as the processor has
    them."""
    parts = pixels.split([rows * columns for _, rows, columns in grids])
    most = max(map(len, parts)) + pool**2
    padded, places = [], []
    for part, (_, rows, columns) in zip(parts, grids, strict=True):
        missing = most - len(part)
        padded.append(torch.cat([part, part.new_zeros(missing, part.shape[1])]))
        at = [(column, row) for row in range(rows) for column in range(columns)]
        places.append(torch.tensor(at + [(-1, -1)] * missing))
    return torch.stack(padded), torch.stack(places)


def gemma4_tokens(model, pixels, grids):
    padded, places = gemma4_images(pixels, grids, model.config.vision_config.pooling_kernel_size)
    return torch.cat(model.get_image_features(padded, places).pooler_output), []


@dataclass(frozen=True)
class Case:
    """A tower, the config of a model of transformers that has it, how that model is asked, and images."""

    tower: type[VisionTower]
    config: Callable[[], transformers.PretrainedConfig]
    tokens: Callable
    grids: tuple[tuple[int, int, int], ...]


def _qwen3_vl(config=transformers.Qwen3VLConfig, **vision):
    sizes = dict(depth=3, patch_size=4, num_position_embeddings=25)
    text = {**TEXT, "rope_parameters": ROPE}
    return config(text_config=text, vision_config={**QWEN, **sizes, **vision})


def _qwen3_5():
    text = {**TEXT, "rope_parameters": ROPE, "layer_types": ["full_attention"] * 2}
    return transformers.Qwen3_5Config(
        text_config=text, vision_config={**QWEN, "depth": 2, "patch_size": 4, "num_position_embeddings": 36}
    )


def _qwen2_5_vl(**vision):
    sizes = dict(depth=3, patch_size=4, window_size=24, fullatt_block_indexes=[1])
    text = {**TEXT, "rope_parameters": ROPE}
    return transformers.Qwen2_5_VLConfig(text_config=text, vision_config={**QWEN, **sizes, **vision})


SIGLIP = dict(hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4)


def _gemma3():
    vision = {**SIGLIP, "image_size": 24, "patch_size": 4, "vision_use_head": False}
    return transformers.Gemma3Config(
        text_config=dict(TEXT), vision_config=vision, mm_tokens_per_image=9, image_token_index=39
    )


def _gemma4(**vision):
    sizes = dict(num_key_value_heads=4, head_dim=12, patch_size=4, pooling_kernel_size=3, position_embedding_size=24)
    text = {**TEXT, "pad_token_id": 0, "hidden_size_per_layer_input": 0, "head_dim": 12, "global_head_dim": 12}
    text["layer_types"] = ["sliding_attention", "full_attention"]
    return transformers.Gemma4Config(text_config=text, vision_config={**SIGLIP, **sizes, **vision}, audio_config=None)


WIDE = ((1, 4, 6), (1, 10, 2), (1, 6, 14), (1, 6, 14), (1, 2, 2))
CASES = {
    "qwen3-vl": Case(Qwen3VLVision, lambda: _qwen3_vl(deepstack_visual_indexes=[0, 2]), qwen_tokens, WIDE),
    "qwen3-vl-merge3": Case(
        Qwen3VLVision,
        lambda: _qwen3_vl(
            deepstack_visual_indexes=[1],
            spatial_merge_size=3,
            temporal_patch_size=1,
            hidden_act="silu",
            rope_parameters={"rope_type": "axial", "rope_theta": 50.0},
        ),
        qwen_tokens,
        ((1, 3, 9), (2, 6, 3)),
    ),
    "qwen3.5": Case(Qwen3_5Vision, _qwen3_5, qwen_tokens, WIDE),
    "qwen2.5-vl": Case(Qwen2_5VLVision, _qwen2_5_vl, qwen_tokens, (*WIDE, (1, 12, 18))),
    "qwen2.5-vl-frames": Case(
        Qwen2_5VLVision, lambda: _qwen2_5_vl(window_size=16, fullatt_block_indexes=[0, 2]), qwen_tokens,
        ((2, 6, 10), (1, 4, 4)),
    ),
    "gemma3": Case(Gemma3Vision, _gemma3, gemma3_tokens, ((1, 6, 6),) * 3),
    "gemma4": Case(Gemma4Vision, _gemma4, gemma4_tokens, ((1, 6, 9), (1, 3, 24), (1, 12, 6), (1, 3, 3))),
    "gemma4-clipped": Case(
        Gemma4Vision,
        lambda: _gemma4(use_clipped_linears=True, num_key_value_heads=2),
        gemma4_tokens,
        ((1, 6, 9), (1, 3, 6)),
    ),
    "gemma4-standardised": Case(
        Gemma4Vision, lambda: _gemma4(standardize=True, pooling_kernel_size=2), gemma4_tokens, ((1, 2, 6), (1, 4, 2))
    ),
}  # fmt: skip


def make_theirs(name, dtype=torch.float64):
    """The multimodal model of transformers of a case, without its head; every parameter and buffer of the tower is
    random."""
    torch.manual_seed(0)
    config = CASES[name].config()
    config._attn_implementation = "eager"
    model = transformers.AutoModel.from_config(config)
    generator = torch.Generator().manual_seed(2)
    randomise(model)
    with torch.no_grad():
        for key, buffer in model.named_buffers():
            if key.endswith(("_min", "_max")):
                bound = 0.3 + torch.rand((), generator=generator)
                buffer.copy_(-bound if key.endswith("_min") else bound)
            elif "std_" in key:
                buffer.copy_(0.5 + torch.rand(buffer.shape, generator=generator))
    return model.to(dtype)


def make_wide(name):
    """`make_theirs` in float64, whose rotary frequencies are float64's too."""
    with WideIslands():
        return make_theirs(name)


def weights_of(theirs):
    """Parameters and buffers of all but the text model, by name."""
    return {key: value for key, value in theirs.state_dict().items() if not key.startswith("language_model.")}


def make_ours(name, theirs):
    """Our tower of a case, with the weights of `theirs`, in their dtype; built on meta."""
    case, problems = CASES[name], []
    config = case.tower.read(ModelFields(theirs.config.to_dict(), problems), TEXT_SIZE)
    assert not problems, problems
    with torch.device("meta"):
        ours = case.tower(config)
    weights = weights_of(theirs)
    ours.to(next(iter(weights.values())).dtype).to_empty(device="cpu")
    ours.load_state_dict(weights, strict=True)
    return ours


def make_pixels(ours, grids, dtype=torch.float64):
    """[P, values] from 0 to 1, random."""
    count = sum(frames * rows * columns for frames, rows, columns in grids)
    pixels = torch.rand(
        count, ours.config.values_per_patch, generator=torch.Generator().manual_seed(4), dtype=torch.float64
    )
    return pixels.to(dtype).requires_grad_()
