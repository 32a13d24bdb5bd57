"""Vision towers against those of transformers with the same weights, and what all of them promise."""

import copy
from fnmatch import fnmatchcase

import pytest
import torch
import transformers
from safetensors.torch import load_file

from dtrain.models.common.micro_batch import Features
from dtrain.models.common.model_fields import ModelFields
from dtrain.models.vision.common import block_order, patch_positions, segment_attention
from dtrain.models.vision.gemma3 import Gemma3Vision
from dtrain.models.vision.gemma4 import Gemma4Vision
from dtrain.models.vision.qwen import Qwen2_5VLVision, Qwen3_5Vision, Qwen3VLVision, window_order
from dtrain.parallel.tensor import LocalParameters
from tests.models.oracle import save
from tests.models.vision.oracle import CASES, TEXT_SIZE, WideIslands, make_ours, make_pixels, make_theirs, make_wide

pytestmark = pytest.mark.slow

# Of features, and of gradients: in float32 those of queries and keys, in a softmax near one, differ by more.
TIMES = {torch.float64: (1e-9, 1e-9), torch.float32: (1e-5, 1e-4)}


def relative(value, expected):
    assert value.shape == expected.shape
    return ((value - expected).abs().max() / expected.abs().max()).item()


def all_of(features: Features) -> list[torch.Tensor]:
    return [features.tokens, *features.deepstack.values()]


def backward(values):
    """Of a weighted sum, so that every element counts by another weight."""
    generator = torch.Generator().manual_seed(5)
    total = 0.0
    for value in values:
        total = total + (value * torch.randn(value.shape, generator=generator, dtype=torch.float64).to(value)).sum()
    total.backward()


def assert_same_grads(ours, theirs, most):
    expected = {key: parameter.grad for key, parameter in theirs.named_parameters()}
    for key, parameter in ours.named_parameters():
        if key.endswith("k_proj.bias"):  # it changes no softmax
            assert max(parameter.grad.abs().max(), expected[key].abs().max()) < most
        else:
            assert expected[key].abs().max() > 1e-6 and relative(parameter.grad, expected[key]) < most, key


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", TIMES, ids=str)
def test_features_and_gradients_are_transformers(name, dtype):
    case, (most, most_of_grads) = CASES[name], TIMES[dtype]
    theirs = make_wide(name) if dtype == torch.float64 else make_theirs(name, dtype)
    ours = make_ours(name, theirs)
    pixels, their_pixels = (make_pixels(ours, case.grids, dtype) for _ in range(2))
    features = ours(pixels, case.grids)
    if dtype == torch.float64:
        with WideIslands():
            tokens, deepstack = case.tokens(theirs, their_pixels, case.grids)
    else:
        tokens, deepstack = case.tokens(theirs, their_pixels, case.grids)
    assert list(features.deepstack) == list(range(len(deepstack)))
    assert features.tokens.shape == (sum(map(ours.config.num_tokens, case.grids)), TEXT_SIZE)
    for value, expected in zip(all_of(features), [tokens, *deepstack], strict=True):
        assert value.dtype == dtype and relative(value, expected) < most
    backward(all_of(features))
    backward([tokens, *deepstack])
    assert relative(pixels.grad, their_pixels.grad) < most_of_grads
    assert_same_grads(ours, theirs, most_of_grads)


@pytest.mark.parametrize("name", CASES)
def test_an_image_beside_others_is_as_if_alone(name):
    case = CASES[name]
    together = make_ours(name, make_theirs(name))
    alone = copy.deepcopy(together)
    pixels = make_pixels(together, case.grids)
    features = together(pixels, case.grids)
    lengths = [frames * rows * columns for frames, rows, columns in case.grids]
    parts = [alone(part, (grid,)) for part, grid in zip(pixels.detach().split(lengths), case.grids, strict=True)]
    joined = [torch.cat(values) for values in zip(*map(all_of, parts), strict=True)]
    for value, expected in zip(all_of(features), joined, strict=True):
        assert relative(value, expected) < 1e-12
    backward(all_of(features))
    backward(joined)
    assert_same_grads(together, alone, 1e-12)


@pytest.mark.parametrize("name", CASES)
def test_without_an_image_there_are_no_features_and_zero_gradients(name):
    ours = make_ours(name, make_theirs(name, torch.float32))
    features = ours(torch.zeros(0, ours.config.values_per_patch), ())
    assert all(value.shape == (0, TEXT_SIZE) and value.dtype == torch.float32 for value in all_of(features))
    sum(value.sum() for value in all_of(features)).backward()
    for key, parameter in ours.named_parameters():
        assert parameter.grad is not None and not parameter.grad.any(), key


@pytest.mark.parametrize("name", CASES)
def test_pixels_in_float32_reach_a_narrower_tower_and_nothing_else_is_narrow(name):
    case = CASES[name]
    theirs = make_theirs(name, torch.bfloat16)
    ours = make_ours(name, theirs)
    pixels = make_pixels(ours, case.grids, torch.float32).detach()
    exact = make_ours(name, make_theirs(name, torch.float32))(pixels, case.grids)
    mine = ours(pixels, case.grids)
    tokens, deepstack = case.tokens(theirs, pixels.to(torch.bfloat16), case.grids)
    for value, expected, right in zip(all_of(mine), [tokens, *deepstack], all_of(exact), strict=True):
        assert value.dtype == torch.bfloat16
        error, their_error = ((x.float() - right).square().mean().sqrt() for x in (value, expected))
        assert error < 1.2 * their_error


@pytest.mark.parametrize("name", CASES)
def test_parameters_are_read_through_their_views(name):
    """Every parameter is half of what its view gives: a module that read one past its view would see the half."""
    case = CASES[name]
    ours = make_ours(name, make_theirs(name))
    pixels = make_pixels(ours, case.grids).detach()
    expected = all_of(ours(pixels, case.grids))
    for key, module in ours.named_modules():
        own = [name for name, _ in module.named_parameters(recurse=False)]
        assert not own or isinstance(module, LocalParameters), key
        for name in own:
            getattr(module, name).data.div_(2)
        if own:
            module.local_views = {name: lambda parameter: 2 * parameter for name in own}
    assert all(torch.equal(*pair) for pair in zip(all_of(ours(pixels, case.grids)), expected, strict=True))


@pytest.mark.parametrize("name", CASES)
def test_starting_values_are_those_of_transformers_in_kind(name):
    """Where transformers starts with ones, zeros or constants, so do the patterns; other values are random ones."""
    case = CASES[name]
    fresh = transformers.AutoModel.from_config(case.config())
    ours = make_ours(name, fresh)
    for key, parameter in ours.named_parameters():
        kind = next(kind for pattern, kind in ours.initial_values.items() if fnmatchcase(key, pattern))
        constant = {"ones": 1.0, "zeros": 0.0}.get(kind)
        if constant is None:
            assert parameter.std() > 0, key
        else:
            assert (parameter - constant).abs().max() < 1e-5, key  # SigLIP's biases are of 1e-6
    for key, buffer in ours.named_buffers():
        value = next(value for pattern, value in ours.initial_buffers.items() if fnmatchcase(key, pattern))
        assert (buffer == value).all(), key


@pytest.mark.parametrize("name", ["qwen3-vl", "qwen3.5", "qwen2.5-vl", "gemma3", "gemma4-clipped"])
def test_files_have_one_of_the_names(name, tmp_path):
    model = transformers.AutoModelForImageTextToText.from_config(CASES[name].config())
    ours = make_ours(name, model.model)
    save(model, tmp_path)
    files = load_file(tmp_path / "model.safetensors")
    for key, value in ours.state_dict().items():
        names = ours.file_names(key)
        (there,) = [file for file in names if file in files]
        assert torch.equal(files[there], value), key
        assert f"model.{key}" in names  # transformers' own


@pytest.mark.parametrize("name", CASES)
def test_layers_and_projector_are_parts_of_the_tower(name):
    ours = make_ours(name, make_theirs(name))
    assert len(ours.layers) == ours.config.num_hidden_layers
    of_layers = {id(parameter) for parameter in ours.layers.parameters()}
    projector = [
        key
        for key, _ in ours.named_parameters()
        if any(fnmatchcase(key, pattern) for pattern in ours.projector_patterns)
    ]
    parameters = dict(ours.named_parameters())
    assert projector and not any(id(parameters[key]) in of_layers for key in projector)


@pytest.mark.parametrize(
    ("name", "grids", "words"),
    [
        ("qwen3-vl", ((1, 4, 5),), "an image of 4 x 5 patches: both sides must be multiples of 2"),
        ("qwen2.5-vl", ((1, 0, 4),), "an image of 0 x 4 patches: both sides"),
        ("gemma3", ((1, 6, 6), (1, 6, 3)), "an image of 6 x 3 patches: all images have 6 x 6"),
        ("gemma4", ((1, 3, 27),), "an image of 3 x 27 patches: there are positions for 24 at each side"),
        ("gemma4", ((1, 4, 3),), "multiples of 3"),
    ],
)
def test_images_that_do_not_fit_are_refused(name, grids, words):
    ours = make_ours(name, make_theirs(name))
    with pytest.raises(ValueError, match=words):
        ours(torch.zeros(sum(rows * columns for _, rows, columns in grids), ours.config.values_per_patch), grids)


def test_pixels_that_are_not_those_of_the_grids_are_refused():
    ours = make_ours("qwen3.5", make_theirs("qwen3.5"))
    for shape in [(7, ours.config.values_per_patch), (8, 5), (8, ours.config.values_per_patch, 1)]:
        with pytest.raises(ValueError, match="of images with 8 patches of 96 values"):
            ours(torch.zeros(shape), ((1, 2, 4),))


def test_attention_is_that_of_each_segment():
    generator = torch.Generator().manual_seed(0)
    lengths = (3, 3, 1, 4, 3)
    q, k, v = (torch.randn(14, heads, 8, generator=generator, dtype=torch.float64) for heads in (4, 2, 2))
    start = 0
    mixed = segment_attention(q, k, v, lengths, scale=0.3)
    for length in lengths:
        rows = slice(start, start + length)
        for head in range(4):
            scores = q[rows, head] @ k[rows, head // 2].t() * 0.3
            assert relative(mixed[rows, head], scores.softmax(-1) @ v[rows, head // 2]) < 1e-13
        start += length


def test_averages_and_their_products_may_be_beyond_float16():
    ours = make_ours("gemma4-standardised", make_theirs("gemma4-standardised", torch.float16)).vision_tower
    ours.std_bias.fill_(6e4)
    ours.std_scale.fill_(0.1)
    hidden = 2e4 * torch.linspace(1, 1.2, 4 * 32).view(4, 32).half()
    pooled = ours.pool(hidden, [(2, 2)])
    expected = (hidden.double().mean(0, keepdim=True) * 32**0.5 - 6e4) * 0.1
    assert relative(pooled, expected) < 2e-3


def test_orders_of_patches_written_out():
    assert patch_positions([(2, 4), (2, 2)], 2).tolist() == [
        [0, 0], [0, 1], [1, 0], [1, 1], [0, 2], [0, 3], [1, 2], [1, 3], [0, 0], [0, 1], [1, 0], [1, 1],
    ]  # fmt: skip
    assert block_order([(1, 1), (2, 4)], 1).tolist() == [*range(9)]
    assert block_order([(2, 4)], 2).tolist() == [0, 1, 4, 5, 2, 3, 6, 7]
    order, lengths = window_order([(3, 3), (2, 2)], 2)
    assert lengths == [1, 2, 2, 4, 4]
    assert order.tolist() == [8, 2, 5, 6, 7, 0, 1, 3, 4, 9, 10, 11, 12]


def read(tower, hidden=TEXT_SIZE, outer=None, **vision):
    problems: list[str] = []
    config = tower.read(ModelFields({"vision_config": vision, **(outer or {})}, problems), hidden)
    return config, problems


TOWERS = (Qwen3VLVision, Qwen3_5Vision, Qwen2_5VLVision, Gemma3Vision, Gemma4Vision)


@pytest.mark.parametrize("tower", TOWERS)
def test_a_field_that_is_not_known_is_refused(tower):
    fields = {"out_hidden_size": TEXT_SIZE} if "Qwen" in tower.__name__ else {}
    fields |= {"image_size": 896, "patch_size": 14} if tower is Gemma3Vision else {}
    assert read(tower, **fields)[1] == []
    assert read(tower, **fields, model_type="x", torch_dtype="bfloat16", new_gate=None)[1] == []
    assert read(tower, **fields, new_gate=3)[1] == [
        "vision_config.new_gate 3: not a field that dtrain knows; it may change the numbers"
    ]


OUT = {"out_hidden_size": TEXT_SIZE}
SIDES = {"image_size": 896, "patch_size": 14}


@pytest.mark.parametrize(
    ("tower", "fields", "words"),
    [
        (Qwen3VLVision, {}, "out_hidden_size 3584 where the text's hidden_size is 24"),
        (Qwen3VLVision, {**OUT, "depth": 24}, "deepstack_visual_indexes [8, 16, 24] of 24 layers"),
        (Qwen3VLVision, {**OUT, "deepstack_visual_indexes": [16, 8]}, "each once and in order"),
        (Qwen3VLVision, {**OUT, "deepstack_visual_indexes": 8}, "each once and in order"),
        (Qwen3VLVision, {**OUT, "num_position_embeddings": 2300}, "num_position_embeddings 2300: must be a square"),
        (Qwen3VLVision, {**OUT, "num_heads": 7}, "hidden_size 1152 is not a multiple of 7 heads"),
        (Qwen3VLVision, {**OUT, "num_heads": 64}, "heads of 18: rotary positions of two axes need a multiple of 4"),
        (Qwen3VLVision, {**OUT, "hidden_act": "quick_gelu"}, "hidden_act 'quick_gelu' is not implemented"),
        (Qwen3VLVision, {**OUT, "rope_parameters": {"rope_type": "yarn"}}, "rope_type 'yarn' is not implemented"),
        (Qwen3VLVision, {**OUT, "rope_parameters": {"factor": 2.0}}, "rope_parameters.factor 2.0: not a field"),
        (Qwen3VLVision, {**OUT, "rope_parameters": [1]}, "rope_parameters [1] is no object"),
        (Qwen3_5Vision, {**OUT, "deepstack_visual_indexes": [3]}, "deepstack_visual_indexes [3]: not a field"),
        (Qwen2_5VLVision, {**OUT, "window_size": 20}, "window_size 20 is less than the 28 pixels of a token"),
        (Gemma3Vision, {"image_size": 900, "patch_size": 14}, "image_size 900 is not a multiple of patch_size 14"),
        (Gemma3Vision, {"image_size": 224, "patch_size": 16}, "mm_tokens_per_image 256: must be a square"),
        (Gemma3Vision, {**SIDES, "attention_dropout": 0.1}, "attention_dropout 0.1: dropout is not implemented"),
        (Gemma4Vision, {"num_key_value_heads": 5}, "num_attention_heads 12 is not a multiple of num_key_value_heads 5"),
        (Gemma4Vision, {"head_dim": 6}, "heads of 6: rotary positions"),
    ],
)
def test_what_cannot_be_computed_is_refused(tower, fields, words):
    (problem,) = read(tower, **fields)[1]
    assert words in problem


def test_a_vision_config_that_is_no_object_is_refused():
    problems: list[str] = []
    Qwen3_5Vision.read(ModelFields({"vision_config": 3}, problems), 3584)
    assert problems == ["vision_config 3 is no object"]


def test_published_sizes():
    """In the words of the files of Qwen3-VL-4B, Qwen2.5-VL-7B, gemma-3-4b and gemma-4-E4B."""
    qwen3, problems = read(
        Qwen3VLVision, 2560, model_type="qwen3_vl", deepstack_visual_indexes=[5, 11, 17], depth=24, in_channels=3,
        hidden_act="gelu_pytorch_tanh", hidden_size=1024, initializer_range=0.02, intermediate_size=4096, num_heads=16,
        num_position_embeddings=2304, out_hidden_size=2560, patch_size=16, spatial_merge_size=2, temporal_patch_size=2,
    )  # fmt: skip
    assert not problems and (qwen3.values_per_patch, qwen3.table_side, qwen3.num_tokens((1, 4, 6))) == (1536, 48, 6)
    qwen2_5, problems = read(
        Qwen2_5VLVision, 3584, model_type="qwen2_5_vl", depth=32, hidden_act="silu", hidden_size=1280, num_heads=16,
        intermediate_size=3420, in_chans=3, out_hidden_size=3584, patch_size=14, spatial_merge_size=2, window_size=112,
        spatial_patch_size=14, fullatt_block_indexes=[7, 15, 23, 31], tokens_per_second=2, temporal_patch_size=2,
    )  # fmt: skip
    assert not problems and (qwen2_5.window, qwen2_5.head_dim, qwen2_5.values_per_patch) == (4, 80, 1176)
    gemma3, problems = read(
        Gemma3Vision, 2560, {"mm_tokens_per_image": 256}, model_type="siglip_vision_model", hidden_size=1152,
        image_size=896, intermediate_size=4304, num_attention_heads=16, num_hidden_layers=27, patch_size=14,
        vision_use_head=False,
    )  # fmt: skip
    assert not problems and (gemma3.side, gemma3.pool, gemma3.num_tokens((1, 64, 64))) == (64, 4, 256)
    gemma4, problems = read(
        Gemma4Vision, 2560, model_type="gemma4_vision", attention_bias=False, attention_dropout=0.0, head_dim=64,
        default_output_length=280, global_head_dim=64, hidden_activation="gelu_pytorch_tanh", hidden_size=768,
        intermediate_size=3072, max_position_embeddings=131072, num_attention_heads=12, num_hidden_layers=16,
        num_key_value_heads=12, patch_size=16, pooling_kernel_size=3, position_embedding_size=10240,
        rms_norm_eps=1e-6, rope_parameters={"rope_theta": 100.0, "rope_type": "default"}, standardize=False,
        use_clipped_linears=True,
    )  # fmt: skip
    assert not problems and (gemma4.clipped, gemma4.theta, gemma4.num_tokens((1, 6, 9))) == (True, 100.0, 6)
