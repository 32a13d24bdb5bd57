"""A recipe on a world of so many devices, as a plan: what fits, what is sent, how long it may take.

`make_plan` resolves the spec of a run, as `validate` does, in a world that is not here, and traces its step. Of the
files that the recipe names it reads each model's config.json and no other, but for a model that takes images: of this
one also the first rows of the data, the tokenizer and the image processor, where these are here.
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
from dtrain.training.preflight import shapes
from dtrain.training.step_spec import StepSpec, config_of, resolve_step


@dataclass(frozen=True)
class Plan:
    """A recipe's step on one rank of the world of `spec`.

    table: the model's tensor-parallel plan, module pattern → style in words, used where tp is more than 1.
    total_parameters, trained_parameters: of the whole model, with its adapter. tokens: of an optimizer step over all
    ranks, every row full. flops_per_token: of `models.common.flops`, for full rows of one document. budget: bytes for
    tensors on a device. evaluation: bytes that the longest answer of `eval` takes at least, with what a rank holds
    between two steps; 0 without. assumed: in place of the code that the recipe names. chosen: lines on what `auto` is.
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
        return max(self.step.peak, self.evaluation_bytes) <= self.budget

    @property
    def device(self) -> str:
        """Type of the devices: cuda, or cpu where the recipe says launch.device=cpu."""
        return self.spec.world.device_type

    def mfu(self, step_time: float) -> float:
        """Return the share of the devices' peak arithmetic that a step of `step_time` seconds would mean."""
        peak = self.hardware.arithmetic[self.spec.precision.compute] * self.spec.world.size
        return self.flops_per_token * self.tokens / (step_time * peak)


def make_plan(recipe: Recipe, world_size: int, hardware: Hardware, budget: int | None = None) -> Plan:
    """Return the plan of `recipe` on `world_size` ranks. Raises RecipeError if it cannot run there, whatever the
    memory."""
    spec = resolve_plan(recipe, world_size, "cpu" if recipe.launch.device == "cpu" else "cuda", hardware)
    recipe, method, facts = spec.recipe, spec.method, spec.facts
    step = plan_step(spec)
    grids = [image.grid for image in spec.row_images]
    answer_bytes = facts.longest_answer_bytes(spec.precision.compute, spec.sizes.tp)
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
        evaluation_bytes=step.parameters + step.optimizer_state + answer_bytes if answer_bytes else 0,
        assumptions=tuple(_assumed(spec)),
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


def _assumed(spec: StepSpec) -> Iterator[str]:
    """Yield notes of what `resolve_step` put in place of what was written."""
    name, tensor_plan = spec.original_recipe.optimizer.name, spec.original_recipe.parallel.custom_plan
    if name != spec.recipe.optimizer.name:
        yield f"optimizer.name={name} is not imported: its state is taken to be as large as AdamW's"
    if tensor_plan != spec.recipe.parallel.custom_plan:
        yield f"parallel.custom_plan={tensor_plan} is not imported: the model's own plan stands in"
    if spec.sizes.is_upper_bound:
        yield (f"train.global_batch=auto is taken to be {spec.sizes.global_batch}; data of few rows make it smaller")
    yield from spec.notes


def ready(recipe: Recipe) -> Recipe:
    """Return `recipe` with missing keys filled in that a step's size does not depend on: the data, and the length."""
    if not recipe.data.train.path and not recipe.data.train.sources:
        recipe = replace_keys(recipe, {"data.train": replace(recipe.data.train, path="data.jsonl")})
    if recipe.train.steps is None and recipe.train.epochs is None:
        recipe = replace_keys(recipe, {"train.steps": 1})
    return recipe


def problems(recipe: Recipe, world_size: int) -> list[Problem]:
    """Return the errors of `recipe` on `world_size` ranks, except for memory and the files that only a run reads."""
    return [*shapes(recipe, world_size), *_unplanned_problems(recipe)]


def _unplanned_problems(recipe: Recipe) -> list[Problem]:
    """Return the errors of a recipe for what a run can do and a plan cannot follow."""
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
    """Return `recipe` as it is, or, if its mesh or micro-batch alone keeps it from `world_size` ranks, on the first of
    `candidates` that does not."""
    if not problems(recipe, world_size) or not recipe.model.path:
        return recipe
    if problems(with_mesh(recipe, Sizes(1, 1, -1, 1, 1, 1, 1, 1)), 1):
        return recipe
    tried = candidates(recipe, config_of(recipe), world_size, per_node, Counter())
    fitting = (with_mesh(recipe, world) for world in tried)
    return next((other for other in fitting if not problems(other, world_size)), recipe)


def candidates(
    recipe: Recipe, config: ModelConfig, world_size: int, per_node: int, counts: Counter[str]
) -> Iterator[Sizes]:
    """Yield every mesh and micro-batch that the model and the recipe allow; the others are counted in `counts`."""
    length, is_open = recipe.data.max_length, recipe.train.global_batch == "auto"
    total = MAX_AUTO_BATCH if is_open else recipe.train.num_batch_rows
    for tp in divisors(world_size):
        if check_model_mesh(config, tp, recipe.parallel.ep):
            counts["tp does not fit the model"] += 1
            continue
        if tp > per_node:
            counts["tp is larger than a node"] += 1
            continue
        for cp in divisors(world_size // tp):
            if cp > 1 and length < 2 * cp:
                counts["cp cuts rows into pieces of nothing"] += 1
                continue
            dp = world_size // tp // cp
            if total % dp:
                counts["train.global_batch is no multiple of dp"] += 1
                continue
            for replicate in divisors(dp):
                for micro in divisors(total // dp):
                    accumulation, ep = total // dp // micro, recipe.parallel.ep
                    yield Sizes(world_size, replicate, dp // replicate, cp, tp, total, micro, accumulation, ep)


def divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
