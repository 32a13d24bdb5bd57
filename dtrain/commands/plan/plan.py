"""A recipe on a world of so many devices, as a plan: what fits, what is sent, how long it may take.

`make_plan` resolves the spec of a run, as `validate` does, in a world that is not here, and traces its step. Of the
files that the recipe names it reads each model's config.json and no other, but for a model that takes images: of this
one also the first rows of the data, the tokenizer and the image processor, where these are here.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from dtrain.base.gpus import OF_FREE
from dtrain.base.problems import Problem, RecipeError
from dtrain.base.row_images import RowImages
from dtrain.commands.plan.hardware import Hardware, Time, estimate
from dtrain.commands.plan.images import images_of_first_rows
from dtrain.commands.plan.spec import PlanSpec
from dtrain.commands.plan.step import Step, plan_step
from dtrain.inference.kv_cache import position_bytes, slot_size
from dtrain.models.common.config import ModelConfig
from dtrain.models.common.flops import flops_per_token, weights_in
from dtrain.models.read_config import read_config
from dtrain.parallel.apply import find_plan, in_words
from dtrain.parallel.fits import mesh_problems_of_model
from dtrain.policy.optimizer import is_torchs
from dtrain.policy.precision import choose_precision
from dtrain.recipe.automatic import changed
from dtrain.recipe.schema import OPTIMIZERS, Recipe, Scheduler
from dtrain.recipe.world import LARGEST_AUTO, STEPS_OF_A_PASS, Sizes
from dtrain.training import method_of
from dtrain.training.eval_sets import longest_answer
from dtrain.training.host import DryHost
from dtrain.training.inputs import RunInputs, World
from dtrain.training.preflight import shapes
from dtrain.training.setup import model as model_setup
from dtrain.training.setup import sizes as sizes_setup
from dtrain.training.setup.data import DataFacts


@dataclass(frozen=True)
class Plan:
    """A recipe's step on one rank of the world of `spec`.

    table: the model's tensor-parallel plan, module pattern → style in words, used where tp is more than 1.
    total_parameters, trained_parameters: of the whole model, with its adapter. tokens: of an optimizer step over all
    ranks, every row full. flops_per_token: of `models.common.flops`, for full rows of one document. budget: bytes for
    tensors on a device. evaluation: bytes that the longest answer of `eval` takes at least, with what a rank holds
    between two steps; 0 without. assumed: in place of the code that the recipe names. chosen: lines on what `auto` is.
    """

    spec: PlanSpec
    hardware: Hardware
    budget: int
    step: Step
    time: Time
    table: Mapping[str, str]
    total_parameters: int
    trained_parameters: int
    tokens: int
    flops_per_token: float
    evaluation: int = 0
    assumed: tuple[str, ...] = ()
    chosen: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        return max(self.step.peak, self.evaluation) <= self.budget

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
    recipe, model, method = spec.recipe, spec.model, method_of(spec.recipe)
    step = plan_step(spec)
    return Plan(
        spec=spec,
        hardware=hardware,
        budget=hardware.budget if budget is None else budget,
        step=step,
        time=estimate(step, spec.sizes, hardware),
        table={
            re.sub(r"\.\d+(?=\.)", ".*", pattern): in_words(style)  # a tower's layers are one
            for pattern, style in find_plan(recipe.parallel.custom_plan, model).items()
        },
        total_parameters=sum(map(weights_in, model.parameters())),
        trained_parameters=sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad),
        tokens=recipe.train.batch * method.rows_of_a_sample() * method.row_length(),
        flops_per_token=flops_per_token(model, recipe.data.max_length) + _vision_flops(spec) / method.row_length(),
        evaluation=_evaluation(spec, step),
        assumed=tuple(_assumed(spec)),
    )


def resolve_plan(recipe: Recipe, world_size: int, device_type: str, hardware: Hardware | None = None) -> PlanSpec:
    """Return the spec of a step of `recipe`.

    Code that the recipe names by import path is replaced by dtrain's own, because only a run imports it: a plan may be
    of a stranger's recipe. torch's own optimizers are used.

    Args:
        recipe: The recipe.
        world_size: Number of devices.
        device_type: "cpu" or "cuda".
        hardware: The devices. None: devices that compute in every dtype.

    Raises:
        RecipeError: If the recipe cannot run there, whatever the memory.
    """
    recipe = ready(recipe)
    if recipe.train.global_batch == "auto":
        few, many = map(method_of(recipe).automatic_batch, (0, LARGEST_AUTO * STEPS_OF_A_PASS))
        if few == many:  # a rollout, whatever the data
            recipe = changed(recipe, {"train.global_batch": few})
    awaited = ["model.path", *(key for key, _ in method_of(recipe).other_models())]  # no weights are read
    inputs = RunInputs.of(recipe, World(world_size, device_type, is_here=False), awaited)
    found = problems(inputs.recipe, world_size)
    if found:
        raise RecipeError(found)
    precision = choose_precision(recipe.train.dtype, device_type, recipe.train.masters)
    if hardware is not None and device_type == "cuda" and torch.bfloat16 not in hardware.arithmetic:
        if precision.compute is torch.bfloat16:
            text = f"train.dtype={recipe.train.dtype} means bfloat16, in which a {hardware.name} does not compute"
            raise RecipeError([Problem("train.dtype", text, "Set train.dtype=float16 or float32")])
        without_varlen = changed(inputs.recipe, {"model.attention": "sdpa"})  # flash attention needs bfloat16 too
        inputs = replace(inputs, recipe=without_varlen)
    images = images_of_first_rows(inputs)
    has_images = bool(images.layouts)
    host = DryHost()
    meta = host.attempt("model", lambda: model_setup.build(inputs, precision, has_images))
    decided = sizes_setup.decide(inputs, DataFacts(inputs.recipe), host)
    if meta is None or decided is None:
        raise RecipeError(host.problems)
    recipe = _without_foreign_code(decided.recipe, decided.sizes)
    return PlanSpec(
        written=inputs.written,
        recipe=recipe,
        world=inputs.world,
        source=inputs.source,
        method=decided.method,
        precision=precision,
        model=meta.model,
        model_config=inputs.model_config(has_images),
        sizes=decided.sizes,
        row_images=images.layouts,
        notes=(*images.notes, *sizes_setup.position_notes(inputs.recipe, inputs.source), *decided.notes),
    )


def _without_foreign_code(recipe: Recipe, sizes: Sizes) -> Recipe:
    """Return the recipe with dtrain's own code in place of import paths, and a number for the global batch."""
    overrides: dict[str, Any] = {}
    if recipe.optimizer.name not in OPTIMIZERS and not is_torchs(recipe.optimizer.name):
        overrides = {"optimizer.name": "adamw", "optimizer.kwargs": {}}
    if isinstance(recipe.parallel.custom_plan, str):
        overrides["parallel.custom_plan"] = None
    if sizes.is_open:
        overrides["train.global_batch"] = sizes.global_batch
    # What a schedule does to the rate changes nothing here.
    return replace(changed(recipe, overrides), scheduler=Scheduler("constant"))


def _vision_flops(spec: PlanSpec) -> float:
    """Return the FLOPs of the vision tower for the images of a row; 0 without."""
    if not spec.has_images:
        return 0.0
    from dtrain.models.vision.flops import ImageFlops

    grids = [image.grid for image in spec.row_images]
    return ImageFlops(*spec.model.model.vision).of(RowImages([], [grids]))


def _assumed(spec: PlanSpec) -> Iterator[str]:
    """Yield notes of what `resolve_plan` put in place of what was written."""
    name, tensor_plan = spec.written.optimizer.name, spec.written.parallel.custom_plan
    if name != spec.recipe.optimizer.name:
        yield f"optimizer.name={name} is not imported: its state is taken to be as large as AdamW's"
    if tensor_plan != spec.recipe.parallel.custom_plan:
        yield f"parallel.custom_plan={tensor_plan} is not imported: the model's own plan stands in"
    if spec.sizes.is_open:
        yield (f"train.global_batch=auto is taken to be {spec.sizes.global_batch}; data of few rows make it smaller")
    yield from spec.notes


def _evaluation(spec: PlanSpec, step: Step) -> int:
    """Return `Plan.evaluation`, for a prompt that fills `data.max_length`."""
    recipe, config = spec.recipe, spec.model_config
    if recipe.eval is None:
        return 0
    longest = config.max_position_embeddings
    answer = max(evaluation.sampling.max_new_tokens or longest_answer(longest) for evaluation in recipe.evals.values())
    slots = slot_size(answer) + slot_size(max(1, min(recipe.data.max_length, longest) - answer))
    of_position = position_bytes(config, spec.precision.compute, spec.sizes.tp)
    return step.parameters + step.state + int(slots * of_position / OF_FREE)


def ready(recipe: Recipe) -> Recipe:
    """Return `recipe` with missing keys filled in that a step's size does not depend on: the data, and the length."""
    if not recipe.data.train.path and not recipe.data.train.sources:
        recipe = changed(recipe, {"data.train": replace(recipe.data.train, path="data.jsonl")})
    if recipe.train.steps is None and recipe.train.epochs is None:
        recipe = changed(recipe, {"train.steps": 1})
    return recipe


def problems(recipe: Recipe, world_size: int) -> list[Problem]:
    """Return the errors of `recipe` on `world_size` ranks, except for memory and the files that only a run reads."""
    errors = shapes(recipe, world_size)
    if recipe.parallel.cpu_offload and recipe.launch.device != "cpu":
        text = "parallel.cpu_offload=true moves parameters between host and device, which a plan does not follow"
        fix = "Plan with parallel.cpu_offload=false, which needs more memory of the device"
        errors.append(Problem("parallel.cpu_offload", text, fix))
    return errors


def with_mesh(recipe: Recipe, world: Sizes) -> Recipe:
    """Return `recipe` on the mesh and with the micro-batch of `world`."""
    mesh = {f"parallel.{name}": size for name, size in world.shape.items()}
    return changed(recipe, mesh | {"train.micro_batch": world.micro_batch})


def with_keys(spec: PlanSpec, recipe: Recipe, sizes: Sizes) -> PlanSpec:
    """Return `spec` with the keys of `recipe`, on other sizes."""
    return replace(spec, recipe=recipe, sizes=sizes)


def on_a_mesh_that_fits(recipe: Recipe, world_size: int, per_node: int) -> Recipe:
    """Return `recipe` as it is, or, if its mesh or micro-batch alone keeps it from `world_size` ranks, on the first of
    `candidates` that does not."""
    if not problems(recipe, world_size) or not recipe.model.path:
        return recipe
    if problems(with_mesh(recipe, Sizes(1, 1, -1, 1, 1, 1, 1, 1)), 1):
        return recipe
    config = read_config(recipe.model.path, method_of(recipe).labels())
    tried = candidates(recipe, config, world_size, per_node, Counter())
    fitting = (with_mesh(recipe, world) for world in tried)
    return next((other for other in fitting if not problems(other, world_size)), recipe)


def candidates(
    recipe: Recipe, config: ModelConfig, world_size: int, per_node: int, counts: Counter[str]
) -> Iterator[Sizes]:
    """Yield every mesh and micro-batch that the model and the recipe allow; the others are counted in `counts`."""
    length, is_open = recipe.data.max_length, recipe.train.global_batch == "auto"
    total = LARGEST_AUTO if is_open else recipe.train.batch
    for tp in divisors(world_size):
        if mesh_problems_of_model(config, tp, recipe.parallel.ep):
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
