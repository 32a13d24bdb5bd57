"""Layouts, pixels and texts of images are those of transformers' processors on torchvision, bit for bit.

The answers of these are kept in by_transformers.json, which by_transformers.py makes.
"""

import json
import pickle

import pytest
import torch

from dtrain.base.errors import UserError
from dtrain.data.images.families import read_processor
from dtrain.data.images.files import read_image
from tests.data.images.by_transformers import (
    BOUNDED,
    FILE,
    MODES,
    OF_FILES,
    OF_TEXTS,
    PICTURES,
    SIZES,
    VARIANTS,
    digest,
    file_of,
    many_sizes,
    tokenizer,
    variant,
)
from tests.data.images.makers import PUBLISHED, model_directory, values

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def answers():
    return json.loads(FILE.read_text())


def as_image(pixels, layout):
    """The square image [3, height, width] that Gemma 3's patches were cut from."""
    _, rows, columns = layout.grid
    cut = pixels.view(rows, columns, 3, layout.height // rows, layout.width // columns)
    return cut.permute(2, 0, 3, 1, 4).reshape(3, layout.height, layout.width)


@pytest.mark.parametrize("number", range(len(VARIANTS)))
def test_pixels_and_layout_are_those_of_transformers(tmp_path, answers, number):
    ours = read_processor(variant(tmp_path, *VARIANTS[number]))
    for (height, width), (grid, expected) in zip(SIZES, answers["pixels"][number], strict=True):
        layout, pixels = ours.layout(height, width), ours.pixels(values(height, width).permute(2, 0, 1).contiguous())
        assert pixels.dtype == torch.float32 and pixels.is_contiguous() and len(pixels) == layout.patches
        if grid is None:
            assert digest(as_image(pixels, layout)) == expected and layout.tokens == 256
        else:
            assert digest(pixels) == expected
            assert grid == [*layout.grid, layout.tokens][: len(grid)]


def test_images_of_one_size_are_processed_alike_alone_and_together(tmp_path, answers):
    """transformers resizes images of one size in one call."""
    ours = read_processor(variant(tmp_path, "Qwen3-VL", BOUNDED))
    pictures = [values(301, 203, seed=seed).permute(2, 0, 1) for seed in range(3)]
    assert digest(torch.cat([ours.pixels(picture) for picture in pictures])) == answers["together"]


def test_layouts_of_many_sizes(tmp_path, answers):
    """The arithmetic alone, of sides up to 9,000 pixels and all bounds of aspect."""
    qwen = read_processor(model_directory(tmp_path / "qwen", "Qwen3-VL", fields=BOUNDED))
    gemma = read_processor(model_directory(tmp_path / "gemma", "gemma-4"))
    layouts = [[qwen.layout(*size)[:2], gemma.layout(*size)[:2]] for size in many_sizes()]
    assert digest(torch.tensor(layouts)) == answers["layouts"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("published", OF_FILES)
def test_from_a_file_to_pixels(tmp_path, answers, published, mode):
    processor = read_processor(variant(tmp_path, published, OF_FILES[published]))
    image = read_image(file_of(mode), None)
    pixels, layout = processor.pixels(image.decode()), processor.layout(*image.header()[:2])
    if published == "gemma-3":
        pixels = as_image(pixels, layout)
    assert digest(pixels) == answers["files"][f"{published} {mode}"]


@pytest.mark.parametrize("published", PUBLISHED)
def test_all_forms_of_the_files_are_one_processor(tmp_path, answers, published):
    """transformers' own writing of them, too."""
    old, new = (model_directory(tmp_path / form, published, form) for form in ("preprocessor", "processor"))
    ours = read_processor(old)
    (new / "preprocessor_config.json").write_text('{"image_processor_type": "OtherImageProcessor"}')  # not read
    assert read_processor(new) == ours and read_processor(new).fingerprint == ours.fingerprint
    written = answers["written"][published]
    (old / "preprocessor_config.json").write_text(json.dumps(written))
    assert read_processor(old) == ours == pickle.loads(pickle.dumps(ours))
    written.pop("image_processor_type")
    (old / "preprocessor_config.json").write_text(json.dumps(written))
    assert read_processor(old) == ours  # by config.json's model_type


@pytest.mark.parametrize(
    ("published", "max_pixels", "same_as"),
    [
        ("Qwen3-VL", 100_000, {"size": {"shortest_edge": 65536, "longest_edge": 100_000}}),
        ("Qwen3-VL", 10**9, {}),
        ("Qwen2.5-VL", 3136, {"max_pixels": 3136}),
        ("gemma-3", 896 * 896, {}),
        ("gemma-4", 70 * 48 * 48, {"max_soft_tokens": 70}),
        ("gemma-4", 280 * 48 * 48 - 1, {"max_soft_tokens": 140}),
        ("gemma-4", 10**9, {}),
    ],
)
def test_a_bound_of_pixels_lowers_the_processor_s_own(tmp_path, published, max_pixels, same_as):
    bounded = read_processor(model_directory(tmp_path, published), max_pixels)
    assert bounded == read_processor(model_directory(tmp_path, published, fields=same_as))
    layout = bounded.layout(1000, 800)
    assert layout.height * layout.width <= max_pixels


@pytest.mark.parametrize(
    ("published", "least"), [("Qwen3-VL", 65536), ("Qwen2.5-VL", 3136), ("gemma-3", 802816), ("gemma-4", 161280)]
)
def test_a_bound_below_the_least_is_refused(tmp_path, published, least):
    directory = model_directory(tmp_path, published)
    read_processor(directory, least)
    with pytest.raises(UserError, match=rf"^data.image_max_pixels={least - 1}: .* at least {least} pixels"):
        read_processor(directory, least - 1)


def test_a_fingerprint_is_of_all_that_decides_pixels_and_tokens(tmp_path):
    changes = [{}, {"resample": 2}, {"rescale_factor": 0.01}, {"image_mean": [0.1] * 3}, {"image_std": 0.3}]
    changes += [{"min_pixels": 4000}, {"max_pixels": 9999}, {"merge_size": 1}, {"do_normalize": False}]
    prints = [read_processor(variant(tmp_path, "Qwen2.5-VL", change)).fingerprint for change in changes]
    directory = model_directory(tmp_path, "Qwen2.5-VL", model={"image_token_id": 3})
    prints += [read_processor(directory).fingerprint, read_processor(directory, 5000).fingerprint]
    assert len(set(prints)) == len(prints)
    assert read_processor(variant(tmp_path, "Qwen2.5-VL", {})).fingerprint == prints[0]


@pytest.mark.parametrize("published", PUBLISHED)
def test_texts_are_those_of_transformers(tmp_path, answers, published):
    """The ids of a text with two images, where ours has each placeholder replaced by its expansion."""
    ours = read_processor(variant(tmp_path, published, OF_TEXTS.get(published, {})))
    layouts, words = [ours.layout(*size) for size in PICTURES], tokenizer(PUBLISHED[published][0])
    text = f"a {ours.expansion(layouts[0])} b{ours.expansion(layouts[1])}\nc"
    expected = answers["texts"][published]
    assert words([text])["input_ids"][0] == expected
    count = sum(layout.tokens for layout in layouts)
    assert expected.count(words.get_vocab()[ours.tokens.token]) == count > 2
