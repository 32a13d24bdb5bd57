"""What must hold in a recipe's `grpo` section and around it. No torch, no file is read."""

import math
from collections.abc import Callable
from typing import Any

from dtrain.config.numbers import is_number
from dtrain.config.policy_losses import problems as loss_problems
from dtrain.config.rewards import problems as reward_problems
from dtrain.config.schema import Recipe

# As `check.RANGES`.
RANGES: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("grpo.prompts_per_step", lambda v: v >= 1, "at least 1"),
    ("grpo.group_size", lambda v: v >= 1, "at least 1"),
    ("grpo.updates_per_rollout", lambda v: v >= 1, "at least 1"),
    ("grpo.sync_every", lambda v: v >= 1, "at least 1, or null for a reference that stands still"),
    ("grpo.sync_mix", lambda v: 0 < v <= 1, "more than 0, up to 1"),
    ("grpo.reward_timeout", lambda v: 0 < v < math.inf, "a finite number, more than 0"),
    ("grpo.environment_timeout", lambda v: 0 < v < math.inf, "a finite number, more than 0"),
    ("grpo.environment_threads", lambda v: v >= 1, "at least 1"),
    ("grpo.overlong_cache", lambda v: v >= 1, "at least 1, or null for no punishment"),
    ("grpo.max_refills", lambda v: v >= 0, "at least 0"),
    ("grpo.max_turns", lambda v: v >= 1, "at least 1"),
    ("grpo.max_off_policy_steps", lambda v: v >= 0, "at least 0"),
    ("grpo.unshard", lambda v: v in ("auto", True, False), "auto, true or false"),
    ("grpo.max_mismatch", lambda v: v > 0, "more than 0, or null for no check"),
    ("grpo.show", lambda v: v >= 0, "at least 0"),
    ("grpo.sampling.temperature", lambda v: is_number(v) and v > 0, "a finite number, more than 0, 1e-10 to 1e10"),
    ("grpo.sampling.top_k", lambda v: 1 <= v < 2**31, "at least 1, below 2**31, or null for all"),
    ("grpo.sampling.top_p", lambda v: 0 < v <= 1, "more than 0, up to 1"),
    ("grpo.sampling.max_new_tokens", lambda v: v >= 1, "at least 1"),
    ("grpo.sampling.stop", lambda v: all(v), "texts that are not empty"),
    ("grpo.server.timeout", lambda v: 0 < v < math.inf, "a finite number, more than 0"),
    ("grpo.server.start_timeout", lambda v: 0 < v < math.inf, "a finite number, more than 0"),
    ("grpo.server.retries", lambda v: v >= 0, "at least 0"),
    ("grpo.server.concurrency", lambda v: v >= 1, "at least 1"),
)


def problems(recipe: Recipe) -> list[str]:
    """What is wrong with a recipe of method grpo, beside its ranges, one line each."""
    section = recipe.grpo
    found = loss_problems(section.loss, clip=section.clip, beta=section.beta, options=section.kwargs)
    found += _sizes(recipe)
    found += _rewards(recipe)
    found += _engine(recipe)
    if section.sync_every is not None and not section.beta:
        found.append("grpo.sync_every moves the reference, and grpo.beta=0 keeps none: set grpo.beta above 0")
    if section.dynamic_sampling == "refill" and recipe.train.epochs is not None:
        found.append(
            "grpo.dynamic_sampling=refill takes as many prompts as it needs, so that train.epochs cannot be counted in "
            "steps: set train.steps"
        )
    if section.dynamic_batch and recipe.data.packing:
        found.append("grpo.dynamic_batch=true is for padded rows: set data.packing=false, or leave it out")
    if recipe.data.loss_on != "assistant":
        found.append(
            f"data.loss_on={recipe.data.loss_on} plays no part under method=grpo: what the model draws is trained; "
            "leave it out"
        )
    return found


def _sizes(recipe: Recipe) -> list[str]:
    section, batch = recipe.grpo, recipe.train.global_batch
    found = []
    rollout = section.prompts_per_step * section.group_size
    if min(section.prompts_per_step, section.group_size, batch) >= 1 and rollout % batch:
        fits = sorted({math.gcd(rollout, batch), rollout})
        found.append(
            f"train.global_batch={batch} does not divide a rollout of grpo.prompts_per_step {section.prompts_per_step} "
            f"× grpo.group_size {section.group_size} = {rollout} completions; set train.global_batch="
            f"{' or '.join(map(str, fits))}"
        )
    if section.group_size == 1 and (section.advantage in ("group", "leave_one_out") or section.scale == "group"):
        found.append(
            f"grpo.group_size=1 with grpo.advantage={section.advantage} and grpo.scale={section.scale} compares a "
            "completion with itself: set grpo.group_size to 2 or more, or grpo.advantage=batch and grpo.scale=batch"
        )
    longest = recipe.data.max_length
    if longest >= 2 and section.sampling.max_new_tokens >= longest:
        found.append(
            f"grpo.sampling.max_new_tokens={section.sampling.max_new_tokens} leaves no room for a prompt within "
            f"data.max_length={longest}, which bounds both together: lower the first or raise the second"
        )
    cache = section.overlong_cache
    if cache is not None and cache > section.sampling.max_new_tokens:
        found.append(
            f"grpo.overlong_cache={cache} is a part of grpo.sampling.max_new_tokens={section.sampling.max_new_tokens}, "
            "so it cannot be more"
        )
    return found


def _rewards(recipe: Recipe) -> list[str]:
    section = recipe.grpo
    found = reward_problems(section.rewards)
    path = section.environment
    if not section.rewards and path is None:
        found.append("grpo.rewards=[] rewards nothing: name one, such as [{fn: math_exact}]")
    if path is not None and not set(".:") & set(path):
        found.append(f"grpo.environment={path} must be an import path, such as package.module.make")
    return found


def _engine(recipe: Recipe) -> list[str]:
    section, found = recipe.grpo, []
    if section.engine == "http" and not section.server.urls:
        found.append("grpo.engine=http needs grpo.server.urls: where the servers listen, [http://localhost:8000]")
    for url in section.server.urls if section.engine == "http" else ():
        if not url.startswith(("http://", "https://")):
            found.append(f"grpo.server.urls: {url} must begin with http:// or https://")
    if section.engine == "native" and section.server.urls:
        found.append("grpo.server.urls is not read by grpo.engine=native: set grpo.engine=http, or leave it out")
    if section.engine == "native" and section.max_off_policy_steps:
        found.append(
            f"grpo.max_off_policy_steps={section.max_off_policy_steps} draws completions while training goes on, which "
            "needs grpo.engine=http: with grpo.engine=native set it to 0"
        )
    size, batch = section.prompts_per_step * section.group_size, recipe.train.global_batch
    steps = -(-size // batch) * section.updates_per_rollout if batch >= 1 else 0
    if section.engine == "http" and 0 < section.max_off_policy_steps < steps:
        found.append(
            f"grpo.max_off_policy_steps={section.max_off_policy_steps} is less than the {steps} optimizer steps of a "
            f"rollout, so that all that is drawn ahead would be too old and drawn again: set it to {steps} or more, or "
            "to 0"
        )
    return found
