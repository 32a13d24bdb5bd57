"""A recipe on a world of so many devices, as a plan: what fits, what is sent, how long it may take.

`make_plan` checks the recipe as `validate` does, but for the files that only a run reads: config.json is enough.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from dtrain import models
from dtrain.base.errors import RecipeError
from dtrain.base.gpus import OF_FREE
from dtrain.commands.plan.hardware import Hardware, Time, estimate
from dtrain.commands.plan.step import Step, plan_step
from dtrain.inference.budget import position_bytes
from dtrain.inference.kv_cache import slot_size
from dtrain.methods.spec import spec_of
from dtrain.models.common.config import ModelConfig
from dtrain.models.common.flops import flops_per_token, weights_in
from dtrain.models.read_config import read_config
from dtrain.optim.update import is_torchs
from dtrain.parallel.apply import find_plan, in_words
from dtrain.policy.precision import choose_precision
from dtrain.policy.trained import choose_trained
from dtrain.recipe import Sizes, sizes
from dtrain.recipe.schema import OPTIMIZERS, Recipe, Scheduler
from dtrain.run.eval_sets import longest_answer
from dtrain.run.preflight import shapes


@dataclass(frozen=True)
class Plan:
    """A recipe's step on one rank of a world. device: cuda, or cpu where the recipe says launch.device=cpu.

    table: the model's tensor-parallel plan, module pattern → style in words, used where tp is more than 1.
    total_parameters, trained_parameters: of the whole model, with its adapter. tokens: of an optimizer step over all
    ranks, every row full. flops_per_token: `models.common.flops`, as a run's mfu counts. budget: bytes for tensors
    on a device. evaluation: bytes that the longest answer of `eval` takes at least, with what a rank holds between two
    steps; 0 without. assumed: in place of the code that the recipe names.
    """

    recipe: Recipe
    config: ModelConfig
    sizes: Sizes
    device: str
    dtype: torch.dtype
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

    @property
    def fits(self) -> bool:
        return max(self.step.peak, self.evaluation) <= self.budget

    def mfu(self, step_time: float) -> float:
        """Return the share of the devices' peak arithmetic that a step of `step_time` seconds would mean."""
        peak = self.hardware.arithmetic[self.dtype] * self.sizes.world_size
        return self.flops_per_token * self.tokens / (step_time * peak)


def make_plan(recipe: Recipe, world_size: int, hardware: Hardware, budget: int | None = None) -> Plan:
    """Return the plan of `recipe` on `world_size` ranks. Raises RecipeError if it cannot run there, whatever the
    memory."""
    recipe = ready(recipe)
    errors = problems(recipe, world_size)
    device = "cpu" if recipe.launch.device == "cpu" else "cuda"
    dtype = choose_precision(recipe.train.dtype, device, recipe.train.masters).compute
    if device == "cuda" and torch.bfloat16 not in hardware.arithmetic:
        if dtype is torch.bfloat16:
            errors.append(
                f"train.dtype={recipe.train.dtype} means bfloat16, in which a {hardware.name} does not compute: set "
                "train.dtype=float16 or float32"
            )
        recipe = replace(recipe, model=replace(recipe.model, attention="sdpa"))  # flash attention asks for more, too
    if errors:
        raise RecipeError(errors)
    config, world = read_config(recipe.model.directory, spec_of(recipe).labels(recipe)), sizes(recipe, world_size)
    recipe, assumed = _without_code(recipe)
    if world.is_open:
        assumed.append(f"train.global_batch=auto is taken to be {world.global_batch}; data of few rows make it smaller")
        recipe = replace(recipe, train=replace(recipe.train, global_batch=world.global_batch))
    model = models.build(config, device="meta")
    choose_trained(model, recipe, dtype)
    step = plan_step(recipe, config, world, device=device)
    spec = spec_of(recipe)
    table = find_plan(recipe.parallel.custom_plan, model)
    return Plan(
        recipe=recipe,
        config=config,
        sizes=world,
        device=device,
        dtype=dtype,
        hardware=hardware,
        budget=hardware.budget if budget is None else budget,
        step=step,
        time=estimate(step, world, hardware),
        table={pattern: in_words(style) for pattern, style in table.items()},
        total_parameters=sum(map(weights_in, model.parameters())),
        trained_parameters=sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad),
        tokens=recipe.train.batch * spec.rows_of_a_sample(recipe) * spec.row_length(recipe),
        flops_per_token=flops_per_token(model, recipe.data.max_length),
        evaluation=_evaluation(recipe, config, world, step, dtype),
        assumed=tuple(assumed),
    )


def _evaluation(recipe: Recipe, config: ModelConfig, sizes: Sizes, step: Step, dtype: torch.dtype) -> int:
    """Return `Plan.evaluation`, for a prompt that fills `data.max_length`."""
    if recipe.eval is None:
        return 0
    longest = config.max_position_embeddings
    answer = max(evaluation.sampling.max_new_tokens or longest_answer(longest) for evaluation in recipe.evals.values())
    slots = slot_size(answer) + slot_size(max(1, min(recipe.data.max_length, longest) - answer))
    return step.parameters + step.state + int(slots * position_bytes(config, dtype, sizes.tp) / OF_FREE)


def _without_code(recipe: Recipe) -> tuple[Recipe, list[str]]:
    """Return `recipe` with dtrain's own code in place of the code that it names by import path, and notes of that.

    Only a run imports what a recipe names: a plan may be of a stranger's. torch's own optimizers are here anyhow.
    """
    optimizer, parallel, assumed = recipe.optimizer, recipe.parallel, []
    if optimizer.name not in OPTIMIZERS and not is_torchs(optimizer.name):
        assumed.append(f"optimizer.name={optimizer.name} is not imported: its state is taken to be as large as AdamW's")
        optimizer = replace(optimizer, name="adamw", kwargs={})
    if isinstance(parallel.custom_plan, str):
        assumed.append(f"parallel.custom_plan={parallel.custom_plan} is not imported: the model's own plan stands in")
        parallel = replace(parallel, custom_plan=None)
    # What a schedule does to the rate changes nothing here.
    return replace(recipe, optimizer=optimizer, parallel=parallel, scheduler=Scheduler("constant")), assumed


def ready(recipe: Recipe) -> Recipe:
    """Return `recipe` with missing keys filled in that a step's size does not depend on: the data, and the length."""
    data, train = recipe.data, recipe.train
    if not data.train.path and not data.train.sources:
        data = replace(data, train=replace(data.train, path="data.jsonl"))
    if train.steps is None and train.epochs is None:
        train = replace(train, steps=1)
    return replace(recipe, data=data, train=train)


def problems(recipe: Recipe, world_size: int) -> list[str]:
    """Return the errors of `recipe` on `world_size` ranks, except for memory and the files that only a run reads."""
    errors = shapes(recipe, world_size)
    if recipe.parallel.cpu_offload and recipe.launch.device != "cpu":
        errors.append(
            "parallel.cpu_offload=true moves parameters between host and device, which a plan does not follow: plan "
            "with parallel.cpu_offload=false, which needs more of the device"
        )
    return errors
