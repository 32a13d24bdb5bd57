"""Images on every mesh: loss, gradient norm and weights after a step are those of one process."""

import pytest
import torch
from torch.distributed.tensor import DTensor

from dtrain.base.batch import RowImages
from dtrain.data.images.tensors import feature_index
from dtrain.methods.sft import SftMethod
from dtrain.models.building import init_weights
from dtrain.models.read_config import read_config
from dtrain.parallel.mesh import Runtime, build_mesh
from dtrain.policy import Policy
from dtrain.policy.batching import Packed
from dtrain.training import load_recipe
from tests.cases import run_cases
from tests.models.oracle import save
from tests.models.test_vision_models import CASES, IMAGE, images_of, make, token_rows
from tests.stepping import train_step
from tests.tiny import tiny_recipe

LAYOUTS = {
    "dp 2": (2, {"dp_shard": 2}),
    "dp 3": (3, {"dp_shard": 3}),
    "hsdp 2 x 2": (4, {"dp_replicate": 2, "dp_shard": 2}),
    "tp 2": (2, {"tp": 2}),
    "cp 2": (2, {"cp": 2}),
    "dp 2 x cp 2": (4, {"dp_shard": 2, "cp": 2}),
    "cp 2 x tp 2": (4, {"cp": 2, "tp": 2}),
}


def plan(model):
    """The model's own plan without its tower, of which every rank then encodes all images."""
    return {pattern: style for pattern, style in model.plan.items() if "visual" not in pattern}


def batch_of(case, config):
    """Rows with two images, one, none and, padded, one."""
    ids = token_rows(case)
    patches = sum(height * width for grids in case.grids for _, height, width in grids)
    pixels = torch.rand(patches, config.vision.values_per_patch, generator=torch.Generator().manual_seed(1)).double()
    images = images_of(case, ids, pixels, config)
    order = [0, 1, 2, 1]
    labels = ids.roll(-1, 1).masked_fill((ids == IMAGE).roll(-1, 1), -100)
    labels[:, -1] = -100
    seq_ids = torch.zeros(len(order), ids.shape[1], dtype=torch.int64)
    seq_ids[3, 29:] = -1
    batch = {
        "input_ids": ids[order].masked_fill(seq_ids < 0, 0),
        "labels": labels[order].masked_fill(seq_ids.roll(-1, 1) < 0, -100),
        "position_ids": torch.arange(ids.shape[1]).expand(len(order), -1),
        "seq_ids": seq_ids,
        "image_features": torch.stack([feature_index(row == IMAGE) for row in ids])[order],
    }
    if images.rotary_ids is not None:
        batch["rotary_ids"] = images.rotary_ids[order]
    if images.ends is not None:
        batch["image_ends"] = images.ends[order]
    counts = [sum(height * width for _, height, width in grids) for grids in case.grids]
    parts = pixels.split(counts)
    return batch, RowImages([parts[row] for row in order], [case.grids[row] for row in order])


def trained(rank, recipe, name, world_size, sizes, packs):
    runtime = Runtime(rank=rank, world_size=world_size)
    mesh = build_mesh(runtime, **sizes)
    config = read_config(recipe.model.path, vision=True)
    policy = Policy(recipe, config, mesh, runtime)
    policy.init_optimizer(2)
    init_weights(policy.model, 1, only="*.lora_B")  # without which an A has no gradient
    patches = []
    policy.model.model.vision[0].register_forward_pre_hook(lambda _, inputs: patches.append(len(inputs[0])))
    batch, images = batch_of(CASES[name], config)
    mine = list(range(len(images)))[mesh.dp.get_local_rank() :: mesh.dp.size()]
    rows = {key: stream[mine] for key, stream in batch.items()} | {"images": images.select(mine)}
    result = train_step(policy, rows, SftMethod(load_recipe({})).loss, Packed(70) if packs else None)
    named = policy.model.named_parameters()
    weights = {key: (value.full_tensor() if isinstance(value, DTensor) else value).detach() for key, value in named}
    return result.loss, result.grad_norm, weights, sum(patches)


def recipe_of(root, name, *overrides):
    source = root / "model"
    if not source.exists():
        root.mkdir(exist_ok=True)
        save(make(name)[0], source)
    start = ("train.vision=all",) if not any("lora" in override for override in overrides) else ()
    start += ("optimizer.eps=1", "scheduler.warmup_steps=0")  # a gradient that is nothing but rounding moves nothing
    return tiny_recipe(root, f"model.path={source}", "model.init=pretrained", *start, *overrides)


PARTS = {
    "frozen": ["train.vision=frozen"],
    "projector": ["train.vision=projector"],
    "lora": ["lora={rank: 2, target: '.*(q_proj|qkv|proj|linear_fc.|fc1|mlp.[02])', modules_to_save: [merger.norm]}"],
    "dora": ["lora={rank: 2, target: '.*(q_proj|qkv|mlp.[02])', dora: true, modules_to_save: [ln_q]}"],
}
TP2, CP2, SP = "parallel.tp=2", "parallel.cp=2", "parallel.sequence_parallel=true"
NO_SP, RING = "parallel.sequence_parallel=false", "parallel.cp_rotate=ring"
FULL, SELECTIVE = "train.activation_checkpointing=full", "train.activation_checkpointing=selective"
OWN_PLAN = "parallel.custom_plan=tests.policy.test_images.plan"
RUNS = [  # model, layout, overrides of the mesh; of PARTS, what is trained; whether micro-batches are packed
    ("qwen3-vl", "dp 3", [FULL], None, False),
    ("gemma4-bidirectional", "dp 3", [], None, True),
    ("qwen2.5-vl", "tp 2", [TP2, SELECTIVE], None, False),
    ("qwen3.5", "tp 2", [SP, TP2], None, False),
    ("qwen3-vl", "tp 2", [NO_SP, TP2, OWN_PLAN], None, False),
    ("gemma3", "cp 2", [RING, CP2], None, False),
    ("gemma3", "tp 2", [SP, TP2], "projector", False),
    ("qwen3-vl", "dp 2", [FULL], "frozen", False),
    ("qwen2.5-vl", "dp 2", [], "dora", False),
    ("qwen3-vl", "cp 2 x tp 2", [SP, TP2, CP2], None, False),
    ("qwen2.5-vl", "dp 2 x cp 2", [RING, CP2], None, False),
    ("gemma4-bidirectional", "cp 2 x tp 2", [SP, TP2, CP2], None, False),
    ("gemma4", "dp 2 x cp 2", [CP2, SELECTIVE], None, False),
    ("gemma3", "hsdp 2 x 2", [], None, True),
    ("qwen3-vl", "cp 2 x tp 2", [SP, TP2, CP2], "lora", False),
]


@pytest.mark.trap(
    "features of images detached where context parallel cuts the embeddings",
    "NVIDIA-NeMo/Automodel PR#2931",
    "tower, projector and embeddings are not trained",
    "after a step on a mesh all weights are those of one process, the tower's too",
)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_mesh_has_the_numbers_of_one_process(tmp_path, ranks):
    """Of every tower, trained whole, in part or by an adapter, in rows of their own and packed."""
    meshes, references = {}, {}
    for number, (name, layout, overrides, part, packs) in enumerate(RUNS):
        world_size, sizes = LAYOUTS[layout]
        if world_size != ranks:
            continue
        root, both = tmp_path / str(number), PARTS.get(part, [])
        case = f"{name}, {layout}, {part or 'all'}, {'packed' if packs else 'padded'}"
        references[case] = recipe_of(root, name, *both), name, 1, {}, False
        meshes[case] = recipe_of(root, name, *both, *overrides), name, world_size, sizes, packs
    expected, results = run_cases(trained, 1, references), run_cases(trained, ranks, meshes)
    for case, ((one_loss, one_norm, one_weights, one_patches),) in expected.items():
        encoded = [patches for *_, patches in results[case]]
        if meshes[case][0].parallel.custom_plan is None:
            assert sum(encoded) == one_patches, case
        if ranks == 3:  # of which one has no image of its own
            assert min(encoded) > 0, case
        for loss, norm, weights, _ in results[case]:
            assert loss == pytest.approx(one_loss, rel=1e-9), case
            assert norm == pytest.approx(one_norm, rel=1e-9), case
            for key, value in weights.items():
                message = f"{case}, {key}: "
                right = one_weights[key]
                torch.testing.assert_close(value, right, rtol=1e-9, atol=1e-11, msg=lambda text, k=message: k + text)
