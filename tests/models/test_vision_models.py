"""Models with their vision towers are transformers': logits, and gradients of tower, projector and text."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
import transformers

from dtrain import models
from dtrain.data.images.tensors import feature_index, image_ends, rotary_positions
from dtrain.models.common.micro_batch import Images
from tests.models.oracle import _gemma, _gemma4, _qwen3_5, grads, randomise, save
from tests.models.towers import _qwen_vl
from tests.models.vision.oracle import SIGLIP, WideIslands, gemma3_images, gemma4_images

pytestmark = pytest.mark.slow

IMAGE, START, END = 90, 92, 93
LENGTH = 34
QWEN = dict(depth=3, patch_size=4)
SECTIONS = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}


def of_qwen(pixels, grids):
    return {"pixel_values": pixels, "image_grid_thw": torch.tensor(grids)}


def of_gemma3(pixels, grids):
    return {"pixel_values": gemma3_images(pixels, grids, 4)}


def of_gemma4(pixels, grids):
    padded, places = gemma4_images(pixels, grids, 2)
    return {"pixel_values": padded, "image_position_ids": places}


def gemma3():
    vision = {**SIGLIP, "image_size": 24, "patch_size": 4, "vision_use_head": False}
    text = {**_gemma().to_dict(), "sliding_window": 6}
    return transformers.Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=9, image_token_index=IMAGE
    )


def gemma4(**text):
    sizes = dict(num_key_value_heads=4, head_dim=8, patch_size=4, pooling_kernel_size=2, position_embedding_size=24)
    return transformers.Gemma4Config(
        text_config={**_gemma4(**text).to_dict(), "pad_token_id": 3},
        vision_config={**SIGLIP, **sizes},
        audio_config=None,
        image_token_id=IMAGE,
    )


def qwen3_5():
    text = _qwen3_5(rope_parameters=SECTIONS).to_dict()
    vision = dict(hidden_size=16, intermediate_size=16, num_heads=2, out_hidden_size=48, num_position_embeddings=16)
    return transformers.Qwen3_5Config(
        text_config=text, vision_config={**QWEN, **vision}, image_token_id=IMAGE, vision_start_token_id=START
    )


@dataclass(frozen=True)
class Case:
    """A multimodal model: its config, what transformers takes of images, which token types it wants, the patches that
    become one token at each side, and the images of each row."""

    config: Callable
    inputs: Callable
    types: str
    pool: int
    grids: tuple


SOME = (((1, 4, 2), (1, 2, 6)), ((1, 6, 4),), ())
CASES = {
    "qwen2.5-vl": Case(
        lambda: _qwen_vl(
            transformers.Qwen2_5_VLConfig,
            dict(hidden_size=64),
            out_hidden_size=64,
            **QWEN,
            window_size=16,
            fullatt_block_indexes=[1],
        ),
        of_qwen, "mm_token_type_ids", 2, SOME,
    ),
    "qwen3-vl": Case(
        lambda: _qwen_vl(
            transformers.Qwen3VLConfig,
            dict(head_dim=16, tie_word_embeddings=True),
            num_position_embeddings=16,
            deepstack_visual_indexes=[0, 1],
            **QWEN,
        ),
        of_qwen, "mm_token_type_ids", 2, SOME,
    ),
    "qwen3.5": Case(qwen3_5, of_qwen, "mm_token_type_ids", 2, SOME),
    "gemma3": Case(gemma3, of_gemma3, "token_type_ids", 2, (((1, 6, 6), (1, 6, 6)), ((1, 6, 6),), ())),
    "gemma4": Case(gemma4, of_gemma4, "mm_token_type_ids", 2, SOME),
    "gemma4-bidirectional": Case(
        lambda: gemma4(use_bidirectional_attention="vision", sliding_window=5), of_gemma4, "mm_token_type_ids", 2, SOME
    ),
}  # fmt: skip


def token_rows(case: Case):
    """Token ids [3, S] of rows with the images of `case`."""
    ids = torch.randint(4, 89, (len(case.grids), LENGTH), generator=torch.Generator().manual_seed(0))
    for row, grids in enumerate(case.grids):
        at = 2 + row
        for _, height, width in grids:
            tokens = height * width // case.pool**2
            ids[row, at : at + tokens + 2] = torch.tensor([START, *[IMAGE] * tokens, END])
            at += tokens + 3
    return ids


def images_of(case: Case, ids, pixels, config) -> Images:
    """The images of rows of one document each."""
    is_image = ids == IMAGE
    sizes = [[(t, h // case.pool, w // case.pool) for t, h, w in grids] for grids in case.grids]
    grids = [grid for some in case.grids for grid in some]
    rotary_ids = ends = None
    if any(rope.sections for rope in config.ropes.values()):
        rotary_ids = torch.stack([rotary_positions(row, some) for row, some in zip(is_image, sizes, strict=True)])
    if config.bidirectional_types:
        lengths = [[t * h * w for t, h, w in some] for some in sizes]
        ends = torch.stack([image_ends(row, some) for row, some in zip(is_image, lengths, strict=True)])
    return Images(pixels, grids, feature_index(is_image.flatten()).view_as(ids), rotary_ids, ends)


def make(name):
    """The float32 model of transformers of a case, every parameter random, and the same in float64."""
    torch.manual_seed(0)
    config = CASES[name].config()
    narrow = randomise(transformers.AutoModelForImageTextToText.from_config(config))
    with WideIslands():  # the frequencies of its rotary embeddings too
        wide = transformers.AutoModelForImageTextToText.from_config(config).double()
    wide.load_state_dict(narrow.state_dict())
    for module in wide.modules():
        if "ScaledWordEmbedding" in type(module).__name__:
            module.embed_scale = torch.tensor(module.scalar_embed_scale, dtype=torch.float64)
    wide.set_attn_implementation("eager")  # sdpa's mask knows no wide softmax
    return narrow, wide.eval()


@pytest.mark.parametrize("name", CASES)
def test_logits_and_gradients_are_those_of_transformers(name, tmp_path):
    case, (narrow, theirs) = CASES[name], make(name)
    ours = models.from_pretrained(save(narrow, tmp_path), torch.float64, vision=True)
    ids = token_rows(case)
    grids = [grid for some in case.grids for grid in some]
    generator = torch.Generator().manual_seed(1)
    patches = sum(height * width for _, height, width in grids)
    pixels = torch.rand(patches, ours.config.vision.values_per_patch, generator=generator, dtype=torch.float64)
    with WideIslands():
        types = {case.types: (ids == IMAGE).int()}
        expected = theirs(input_ids=ids, **types, **case.inputs(pixels, grids)).logits
    logits = ours(ids, images=images_of(case, ids, pixels, ours.config))
    assert (logits - expected).abs().max() < 1e-9 * expected.abs().max()
    weights = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
    expected.backward(weights)
    logits.backward(weights)
    theirs_by_name = {file: gradient for file, gradient in grads(theirs).items() if gradient is not None}
    compared = set()
    for file, gradient in grads(ours, theirs_by_name).items():
        largest = theirs_by_name[file].abs().max().clamp(min=1e-5)  # a bias of keys changes no softmax: it has none
        assert (gradient - theirs_by_name[file]).abs().max() <= 1e-9 * largest, file
        compared.add(file)
    assert compared == set(theirs_by_name)


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_packed_documents_are_those_of_rows_of_their_own(name, tmp_path):
    case = CASES[name]
    ours = models.from_pretrained(save(make(name)[0], tmp_path), torch.float64, vision=True)
    ids = token_rows(case)
    patches = sum(height * width for grids in case.grids for _, height, width in grids)
    pixels = torch.rand(
        patches, ours.config.vision.values_per_patch, generator=torch.Generator().manual_seed(1)
    ).double()
    images = images_of(case, ids, pixels, ours.config)
    expected = ours(ids, images=images)
    streams = {"rotary_ids": images.rotary_ids, "ends": images.ends, "feature_index": images.feature_index}
    packed = {key: None if stream is None else stream.flatten(0, 1)[None] for key, stream in streams.items()}
    documents = torch.arange(len(ids)).repeat_interleave(LENGTH)[None]
    positions = torch.arange(LENGTH).repeat(len(ids))[None]
    logits = ours(ids.view(1, -1), positions, documents, images=replace(images, **packed))
    assert (logits.view_as(expected) - expected).abs().max() < 1e-12 * expected.abs().max()


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_rows_without_images_run_the_tower_and_change_nothing(name, tmp_path):
    source = save(make(name)[0], tmp_path)
    ours, text = models.from_pretrained(source, vision=True), models.from_pretrained(source)
    assert text.config.vision is None and not any("vis" in key for key, _ in text.named_parameters())
    ids = token_rows(CASES[name])[2:]
    none = Images(torch.empty(0, ours.config.vision.values_per_patch), [], torch.full_like(ids, -1))
    assert torch.equal(ours(ids, images=none), text(ids)) and torch.equal(ours(ids), text(ids))
    with pytest.raises(ValueError, match="without its vision tower"):
        text(ids, images=none)
