"""Files of image processors that dtrain does not take: each refused by the file's name and the key."""

import json

import pytest

from dtrain.base.errors import UserError
from dtrain.data.images.families import read_processor
from tests.data.images.makers import PUBLISHED, model_directory


@pytest.mark.parametrize(
    ("published", "fields", "words"),
    [
        (
            "Qwen3-VL",
            {"image_processor_type": "LlavaImageProcessor"},
            "image_processor_type 'LlavaImageProcessor' is not",
        ),
        ("Qwen3-VL", {"image_processor_type": 7}, "image_processor_type 7 is not implemented; there are: Qwen2VL"),
        ("Qwen3-VL", {"do_resize": False}, "do_resize is false"),
        ("Qwen3-VL", {"do_rescale": False}, "do_rescale is false"),
        ("Qwen3-VL", {"do_resize": None, "resample": None}, "do_resize is null; give it a value.*resample is null"),
        (
            "Qwen3-VL",
            {"resample": 1},
            r"resample 1 \(lanczos\) is not implemented; there are: 2 \(bilinear\), 3 \(bicu",
        ),
        ("Qwen3-VL", {"resample": "bicubic"}, "resample 'bicubic' is not implemented"),
        ("Qwen3-VL", {"image_mean": [0.5, 0.5]}, r"image_mean \[0.5, 0.5\]: must be a number for each of 3 channels"),
        ("Qwen3-VL", {"image_std": [0.5, 0.5, 0]}, "image_std .*: must be a number above 0 for each"),
        ("Qwen3-VL", {"rescale_factor": 0}, "rescale_factor 0: must be a number above 0"),
        ("Qwen3-VL", {"size": {"height": 224, "width": 224}}, "min_pixels is missing; max_pixels is missing"),
        ("Qwen3-VL", {"size": 224}, "size must be an object with shortest_edge and longest_edge"),
        ("Qwen3-VL", {"size": {"shortest_edge": 0, "longest_edge": 9}}, "min_pixels 0: must be a whole number"),
        ("Qwen3-VL", {"min_pixels": 9, "max_pixels": 8}, "min_pixels 9 is above max_pixels 8"),
        ("Qwen3-VL", {"patch_size": {"height": 16, "width": 16}}, "patch_size {.*: must be a whole number"),
        (
            "Qwen3-VL",
            {"patch_size": 14},
            "config.json: vision_config.patch_size is 16, and patch_size .* 14; they must",
        ),
        (
            "Qwen3-VL",
            {"merge_size": 3},
            "vision_config.spatial_merge_size is 2, and merge_size of the image processor 3",
        ),
        ("Qwen3-VL", {"temporal_patch_size": 1}, "vision_config.temporal_patch_size is 2"),
        ("gemma-3", {"do_pan_and_scan": True}, "do_pan_and_scan True: crops of an image are not implemented"),
        ("gemma-3", {"size": {"height": 896, "width": 448}}, "must have an equal height and width"),
        ("gemma-3", {"size": {"shortest_edge": 896}}, "must have an equal height and width"),
        ("gemma-3", {"size": {"height": 448, "width": 448}}, "vision_config.image_size is 896, and size .* 448"),
        ("gemma-4", {"max_soft_tokens": 300}, "max_soft_tokens 300 is not one of 70, 140, 280, 560, 1120"),
        ("gemma-4", {"pooling_kernel_size": 2}, "vision_config.pooling_kernel_size is 3"),
    ],
)
@pytest.mark.parametrize("form", ["preprocessor", "processor"])
def test_fields_are_refused_by_name(tmp_path, form, published, fields, words):
    directory = model_directory(tmp_path, published, form, fields)
    with pytest.raises(UserError, match=f"^{directory}/{form}_config.json: .*{words}"):
        read_processor(directory)


@pytest.mark.parametrize(
    ("published", "model", "words"),
    [
        ("gemma-3", {"mm_tokens_per_image": 64}, "config.json: mm_tokens_per_image is 64, and image_seq_length .* 256"),
        ("gemma-3", {"vision_config": {"patch_size": 15}}, "size 896 is not a multiple of the tower's patch_size 15"),
        ("Qwen3-VL", {"image_token_id": None}, "config.json: image_token_id is missing"),
        ("Qwen3-VL", {"image_token_id": -3}, "config.json: image_token_id -3: must be a whole number"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(tmp_path, published, model, words):
    with pytest.raises(UserError, match=words):
        read_processor(model_directory(tmp_path, published, model=model))


def test_every_problem_comes_at_once(tmp_path):
    fields = {"resample": 0, "do_resize": False, "image_mean": "x", "merge_size": 3}
    with pytest.raises(UserError, match="merge_size.*do_resize is false.*resample 0.*image_mean 'x'"):
        read_processor(model_directory(tmp_path, "Qwen3-VL", fields=fields))


def test_the_length_of_gemma_3_s_images_is_processor_config_s(tmp_path):
    model = {"mm_tokens_per_image": 64}
    directory = model_directory(tmp_path, "gemma-3", "processor", {"image_seq_length": 64}, model)
    processor = read_processor(directory)
    layout = processor.layout(5, 7)
    assert layout == (896, 896, (1, 64, 64), 64) and layout.patches == 64 * 64
    assert processor.expansion(layout) == f"\n\n<start_of_image>{'<image_soft_token>' * 64}<end_of_image>\n\n"
    assert processor.tokens.placeholder == "<start_of_image>"


def test_directories_without_their_files(tmp_path):
    with pytest.raises(UserError, match="has neither preprocessor_config.json nor processor_config.json with an image"):
        read_processor(tmp_path)
    (tmp_path / "processor_config.json").write_text('{"processor_class": "Qwen3VLProcessor"}')
    with pytest.raises(UserError, match="has neither"):
        read_processor(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text("{")
    with pytest.raises(UserError, match="preprocessor_config.json is not JSON"):
        read_processor(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text("{}")
    with pytest.raises(UserError, match="config.json: No such file"):
        read_processor(tmp_path)


@pytest.mark.parametrize("published", PUBLISHED)
def test_tokens_are_those_of_the_vocabulary(tmp_path, published):
    processor = read_processor(model_directory(tmp_path, published))
    tokens = processor.tokens
    texts = {tokens.placeholder, tokens.before.strip(), tokens.after.strip()} - {"", tokens.token}
    vocabulary = {text: number for number, text in enumerate(sorted(texts))} | {tokens.token: 9}
    processor.check_tokens(vocabulary)
    for text in vocabulary:
        with pytest.raises(UserError, match="tokenizer.json has no token .*which the image processor writes"):
            processor.check_tokens({name: number for name, number in vocabulary.items() if name != text})
    with pytest.raises(UserError, match="gives .* the id 10, but config.json 9"):
        processor.check_tokens({**vocabulary, tokens.token: 10})


@pytest.mark.parametrize("place", ["extra_special_tokens", "model_specific_special_tokens", None])
def test_texts_of_tokens_stand_in_several_places(tmp_path, place):
    directory = model_directory(tmp_path, "gemma-4")
    names = {"boi_token": "<b>", "eoi_token": {"content": "<e>"}, "image_token": "<i>"}
    (directory / "tokenizer_config.json").write_text(json.dumps({place: names} if place else names))
    processor = read_processor(directory)
    assert processor.tokens == ("<i>", "<b>", "<i>", "<e>", 9)
    (directory / "tokenizer_config.json").write_text('{"extra_special_tokens": ["<x>"]}')
    assert read_processor(directory).tokens == ("<|image|>", "<|image>", "<|image|>", "<image|>", 9)
