"""The plan of a recipe on a number of devices: whether it fits, what is sent, and how long a step may take.

`make_plan` resolves the spec of a run like `validate`, for devices that need not exist, and traces its step. The only
files it reads are the config.json of each model. For a model with images it also reads the first rows of the data, the
tokenizer and the image processor, if they are on this machine.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from dtrain.base.errors import Problem
from dtrain.commands.plan.hardware import Hardware, StepTime, estimate_step
from dtrain.commands.plan.step import Step, plan_step
from dtrain.models.common.config import ModelConfig
from dtrain.parallel.size_checks import check_model_mesh
from dtrain.recipe import Recipe, Sizes
from dtrain.recipe.world import MAX_AUTO_BATCH, replace_keys
from dtrain.training.preflight import shape_problems
from dtrain.training.step_spec import StepSpec, config_of, resolve_step


@dataclass(frozen=True)
class Plan:
    """A recipe's step on one rank.

    Attributes:
        spec: The step.
        hardware: The devices.
        budget: Bytes that tensors may use on a device.
        step: Memory, traffic and arithmetic of the step.
        time: Estimated time of the step.
        table: The model's tensor-parallel plan: module pattern -> style. Used if tp is larger than 1.
        total_parameters: Number of parameters of the full model, with its adapter.
        trained_parameters: Number of those that are trained.
        tokens: Tokens of an optimizer step over all ranks, if every row is full.
        flops_per_token: FLOPs of `models.common.flops`, for full rows of one document.
        evaluation_bytes: Bytes that the longest answer of `eval` needs at least, with the rank's parameters and
            optimizer state. 0 if the recipe has no `eval`.
        assumptions: Lines on what was planned in place of something that cannot be planned.
        choices: Lines on the values chosen for keys that are `auto`.
    """

    spec: StepSpec
    hardware: Hardware
    budget: int
    step: Step
    time: StepTime
    table: Mapping[str, str]
    total_parameters: int
    trained_parameters: int
    tokens: int
    flops_per_token: float
    evaluation_bytes: int = 0
    assumptions: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether the step and an evaluation fit into the budget."""
        return max(self.step.peak, self.evaluation_bytes) <= self.budget

    @property
    def device(self) -> str:
        """Type of the devices: "cuda", or "cpu" if the recipe has launch.device=cpu."""
        return self.spec.world.device_type

    def mfu(self, step_time: float) -> float:
        """Return the model FLOPs utilization of steps that take `step_time` seconds."""
        peak = self.hardware.arithmetic[self.spec.precision.compute] * self.spec.world.size
        return self.flops_per_token * self.tokens / (step_time * peak)


def make_plan(recipe: Recipe, world_size: int, hardware: Hardware, budget: int | None = None) -> Plan:
    """Plan a recipe.

    Args:
        recipe: The recipe.
        world_size: Number of devices.
        hardware: The devices.
        budget: Bytes that tensors may use on a device. None: `hardware.budget`.

    Raises:
        RecipeError: If the recipe cannot run there, whatever the memory.
    """
    device_type = "cpu" if recipe.launch.device == "cpu" else "cuda"
    spec = resolve_plan(recipe, world_size, device_type, hardware)
    recipe, method, facts = spec.recipe, spec.method, spec.facts
    step = plan_step(spec)
    grids = [image.grid for image in spec.row_images]
    answer_bytes = facts.longest_answer_bytes(spec.precision.compute, spec.sizes.tp)
    evaluation_bytes = 0
    if answer_bytes:
        evaluation_bytes = step.parameters + step.optimizer_state + answer_bytes
    return Plan(
        spec=spec,
        hardware=hardware,
        budget=hardware.budget if budget is None else budget,
        step=step,
        time=estimate_step(step, spec.sizes, hardware),
        table=facts.tensor_parallel_styles(),
        total_parameters=facts.weights.total,
        trained_parameters=facts.weights.trained,
        tokens=recipe.train.num_batch_rows * method.rows_per_sample() * method.row_length(),
        flops_per_token=facts.row_flops_per_token(method.row_length(), grids),
        evaluation_bytes=evaluation_bytes,
        assumptions=tuple(_assumptions(spec)),
    )


def resolve_plan(recipe: Recipe, world_size: int, device_type: str, hardware: Hardware | None = None) -> StepSpec:
    """Return the spec of a step of `recipe`, by `training.step_spec`.

    Args:
        recipe: The recipe.
        world_size: Number of devices.
        device_type: "cpu" or "cuda".
        hardware: The devices. None: devices that compute in every dtype.

    Raises:
        RecipeError: If the recipe cannot run there, whatever the memory.
    """
    recipe = ready(recipe)
    lacks_bfloat16 = hardware is not None and device_type == "cuda" and torch.bfloat16 not in hardware.arithmetic
    without_bfloat16 = hardware.name if hardware is not None and lacks_bfloat16 else None
    return resolve_step(recipe, world_size, device_type, without_bfloat16, _unplanned_problems(recipe))


def _assumptions(spec: StepSpec) -> Iterator[str]:
    """Yield notes on what `resolve_step` replaced in the recipe."""
    optimizer = spec.original_recipe.optimizer.name
    custom_plan = spec.original_recipe.parallel.custom_plan
    if optimizer != spec.recipe.optimizer.name:
        yield f"optimizer.name={optimizer} is not imported: its state is assumed to be as large as AdamW's"
    if custom_plan != spec.recipe.parallel.custom_plan:
        yield f"parallel.custom_plan={custom_plan} is not imported: the model's own plan is used"
    if spec.sizes.is_upper_bound:
        yield (
            f"train.global_batch=auto is assumed to be {spec.sizes.global_batch}; data with few rows make it smaller"
        )
    yield from spec.notes


def ready(recipe: Recipe) -> Recipe:
    """Fill in missing keys that a step's size does not depend on: the data and the number of steps."""
    if not recipe.data.train.path and not recipe.data.train.sources:
        recipe = replace_keys(recipe, {"data.train": replace(recipe.data.train, path="data.jsonl")})
    if recipe.train.steps is None and recipe.train.epochs is None:
        recipe = replace_keys(recipe, {"train.steps": 1})
    return recipe


def problems(recipe: Recipe, world_size: int) -> list[Problem]:
    """Return the mistakes of a recipe on a number of ranks, except for memory and for files that only a run reads."""
    return [*shape_problems(recipe, world_size), *_unplanned_problems(recipe)]


def _unplanned_problems(recipe: Recipe) -> list[Problem]:
    """Return problems with settings that a run supports and a plan does not."""
    errors = []
    if recipe.parallel.cpu_offload and recipe.launch.device != "cpu":
        text = "parallel.cpu_offload=true moves parameters between host and device, which a plan does not follow"
        fix = "Plan with parallel.cpu_offload=false, which needs more memory of the device"
        errors.append(Problem("parallel.cpu_offload", text, fix))
    return errors


def with_mesh(recipe: Recipe, world: Sizes) -> Recipe:
    """Return `recipe` on the mesh and with the micro-batch of `world`."""
    mesh = {f"parallel.{name}": size for name, size in world.shape.items()}
    return replace_keys(recipe, mesh | {"train.micro_batch": world.micro_batch})


def with_keys(spec: StepSpec, recipe: Recipe, sizes: Sizes) -> StepSpec:
    """Return `spec` with the keys of `recipe`, on other sizes."""
    return replace(spec, recipe=recipe, sizes=sizes)


def choose_starting_mesh(recipe: Recipe, world_size: int, per_node: int) -> Recipe:
    """Return a recipe that can run on `world_size` ranks, for a search to begin with.

    This is the recipe itself if it can. Otherwise it gets the first mesh and micro-batch of `candidates` with which it
    can. If none helps, or if the recipe has other mistakes, it is returned unchanged.
    """
    if not problems(recipe, world_size) or not recipe.model.path:
        return recipe
    single_rank = with_mesh(recipe, Sizes(1, 1, -1, 1, 1, 1, 1, 1))
    if problems(single_rank, 1):
        return recipe
    for sizes in candidates(recipe, config_of(recipe), world_size, per_node, Counter()):
        changed = with_mesh(recipe, sizes)
        if not problems(changed, world_size):
            return changed
    return recipe


def candidates(
    recipe: Recipe, config: ModelConfig, world_size: int, per_node: int, counts: Counter[str]
) -> Iterator[Sizes]:
    """Yield every mesh and micro-batch that the model and the recipe allow.

    Args:
        recipe: The recipe.
        config: The model.
        world_size: Number of ranks.
        per_node: Devices of a node. tp does not leave a node.
        counts: The meshes that are not possible are counted here by reason.
    """
    length, ep = recipe.data.max_length, recipe.parallel.ep
    global_batch = MAX_AUTO_BATCH if recipe.train.global_batch == "auto" else recipe.train.num_batch_rows
    for tp in divisors(world_size):
        if check_model_mesh(config, tp, ep):
            counts["tp does not fit the model"] += 1
            continue
        if tp > per_node:
            counts["tp is larger than a node"] += 1
            continue
        for cp in divisors(world_size // tp):
            if cp > 1 and length < 2 * cp:
                counts["cp is too large for data.max_length"] += 1
                continue
            dp = world_size // tp // cp
            if global_batch % dp:
                counts["train.global_batch is not a multiple of dp"] += 1
                continue
            rows = global_batch // dp
            for replicate in divisors(dp):
                for micro_batch in divisors(rows):
                    yield Sizes(
                        world_size,
                        replicate,
                        dp // replicate,
                        cp,
                        tp,
                        global_batch,
                        micro_batch,
                        rows // micro_batch,
                        ep,
                    )


def divisors(number: int) -> list[int]:
    """Return the divisors of a number in ascending order.

    Example:
        >>> divisors(12)
        [1, 2, 3, 4, 6, 12]
    """
    return [candidate for candidate in range(1, number + 1) if number % candidate == 0]
