"""Checks of a recipe's `grpo` section and of what surrounds it. No torch, no file is read."""

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from dtrain.base.ranges import NUMBER, hint, is_number, nearest, sizes_for
from dtrain.data.formats.prompts import PromptOptions
from dtrain.losses.policy.options import LOSSES, RANGES, SHARED, is_clip
from dtrain.methods.dpo_section import base_problems
from dtrain.methods.spec import REWARD_MODEL, MethodSpec
from dtrain.recipe import key_aliases
from dtrain.recipe.schema import Grpo, Recipe, Reward
from dtrain.rl.rewards import options as rewards
from dtrain.rl.tools import tool_schemas


def problems(recipe: Recipe) -> list[str]:
    """Return what is wrong with a recipe of method grpo, beside its ranges, one line each."""
    section = recipe.grpo
    errors = loss_problems(section.loss, section.clip, section.beta, section.kwargs)
    errors += _sizes(recipe)
    errors += _rewards(recipe)
    errors += _verifiers(recipe)
    errors += _tools(recipe)
    errors += _engine(recipe)
    if section.sync_every is not None and not section.beta:
        errors.append("grpo.sync_every moves the reference, and grpo.beta=0 keeps none: set grpo.beta above 0")
    if section.beta:
        errors += base_problems(recipe, "grpo", section.reference)
    if section.dynamic_sampling == "refill" and recipe.train.epochs is not None:
        errors.append(
            "grpo.dynamic_sampling=refill takes as many prompts as it needs, so that train.epochs cannot be counted in "
            "steps: set train.steps"
        )
    if section.dynamic_batch and recipe.data.packing:
        errors.append("grpo.dynamic_batch=true is for padded rows: set data.packing=false, or leave it out")
    if recipe.data.loss_on != "assistant":
        errors.append(
            f"data.loss_on={recipe.data.loss_on} plays no part under method=grpo: what the model draws is trained; "
            "leave it out"
        )
    return errors


def no_room(section: str, drawn: int, longest: int) -> str:
    """Return the error text for completions of so many tokens within so many."""
    return (
        f"{section}.sampling.max_new_tokens={drawn} leaves no room for a prompt within data.max_length={longest}, "
        "which bounds both together: lower the first or raise the second"
    )


def _sizes(recipe: Recipe) -> list[str]:
    section, errors = recipe.grpo, []
    rollout = section.prompts_per_step * section.group_size
    batch = rollout if recipe.train.global_batch == "auto" else recipe.train.batch
    if min(section.prompts_per_step, section.group_size, batch) >= 1 and rollout % batch:
        fits = sorted({math.gcd(rollout, batch), rollout})
        errors.append(
            f"train.global_batch={batch} does not divide a rollout of grpo.prompts_per_step {section.prompts_per_step} "
            f"× grpo.group_size {section.group_size} = {rollout} completions; set train.global_batch="
            f"{' or '.join(map(str, fits))}"
        )
    if section.group_size == 1 and (section.advantage in ("group", "leave_one_out") or section.scale == "group"):
        errors.append(
            f"grpo.group_size=1 with grpo.advantage={section.advantage} and grpo.scale={section.scale} compares a "
            "completion with itself: set grpo.group_size to 2 or more, or grpo.advantage=batch and grpo.scale=batch"
        )
    elif section.scale == "leave_one_out" and section.group_size < 3:
        errors.append(
            "grpo.scale=leave_one_out is the spread of a completion's others, and "
            f"grpo.group_size={section.group_size} leaves fewer than two of them: set grpo.group_size to 3 or more, "
            "or grpo.scale=none"
        )
    longest = recipe.data.max_length
    if longest >= 2 and section.sampling.max_new_tokens >= longest:
        errors.append(no_room("grpo", section.sampling.max_new_tokens, longest))
    cache = section.overlong_cache
    if cache is not None and cache > section.sampling.max_new_tokens:
        errors.append(
            f"grpo.overlong_cache={cache} is a part of grpo.sampling.max_new_tokens={section.sampling.max_new_tokens}, "
            "so it cannot be more"
        )
    return errors


def _rewards(recipe: Recipe) -> list[str]:
    section = recipe.grpo
    errors = reward_problems(section.rewards)
    path = section.environment
    rates, weight = section.reward_model.path, section.reward_model.weight
    if not is_number(weight):
        errors.append(f"grpo.reward_model.weight={weight} must be a finite number{sizes_for(weight)}")
    if rates is not None and section.has_episodes:
        errors.append(
            "grpo.reward_model rates a prompt and one completion, and grpo.environment, grpo.verifiers and grpo.tools "
            "make several turns: leave one of them out"
        )
    if not section.rewards and path is None and rates is None and section.verifiers.name is None:
        errors.append("grpo.rewards=[] rewards nothing: name one, such as [{fn: math_exact}]")
    if path is not None and not set(".:") & set(path):
        errors.append(f"grpo.environment={path} must be an import path, such as package.module.make")
    return errors


def _verifiers(recipe: Recipe) -> list[str]:
    section, errors = recipe.grpo, []
    if section.verifiers.name is None:
        return ["grpo.verifiers.args are of no environment: set grpo.verifiers.name"] if section.verifiers.args else []
    if section.rewards == Grpo().rewards:
        errors.append(
            "grpo.rewards is math_exact where it is left out, and grpo.verifiers rewards by its own rubric: set "
            "grpo.rewards=[]"
        )
    if section.system_prompt is not None:
        errors.append(
            "grpo.system_prompt would change the prompts of grpo.verifiers: leave it out, or give one in "
            "grpo.verifiers.args"
        )
    return errors


def _tools(recipe: Recipe) -> list[str]:
    section, errors = recipe.grpo, []
    for index, tool in enumerate(section.tools):
        key = f"grpo.tools[{index}]"
        if tool.mcp is not None:
            if tool.fn is not None:
                errors.append(f"{key}: fn and mcp are two tools: give each an entry of its own")
            if tool.schema is None:
                errors.append(
                    f"{key}.schema is required by mcp: name a file with what the server offers, which "
                    f'`python -m dtrain.rl.environments.mcp "{tool.mcp}" > tools.json` writes'
                )
        elif not set(".:") & set(tool.fn or ""):
            named = f"={tool.fn} must be" if tool.fn else " is missing: give"
            errors.append(f"{key}.fn{named} an import path, such as package.module.function")
    answers = {
        "grpo.environment": section.environment is not None,
        "grpo.verifiers": section.verifiers.name is not None,
        "grpo.tools": bool(section.tools),
    }
    if sum(answers.values()) > 1:
        both = " and ".join(key for key, is_so in answers.items() if is_so)
        errors.append(f"{both} both answer a completion: leave one of them out")
    if section.tools and section.max_turns == 1:
        errors.append("grpo.max_turns=1 ends before a tool could answer: set it to 2 or more, or leave grpo.tools out")
    return errors


def _engine(recipe: Recipe) -> list[str]:
    section, errors = recipe.grpo, []
    if section.engine == "http" and not section.server.urls:
        errors.append("grpo.engine=http needs grpo.server.urls: where the servers listen, [http://localhost:8000]")
    for url in section.server.urls if section.engine == "http" else ():
        if not url.startswith(("http://", "https://")):
            errors.append(f"grpo.server.urls: {url} must begin with http:// or https://")
    if section.engine == "native" and section.server.urls:
        errors.append("grpo.server.urls is not read by grpo.engine=native: set grpo.engine=http, or leave it out")
    if section.cuda_graphs:
        errors += _graphs(recipe)
    if section.engine == "native" and section.router_replay:
        errors.append(
            "grpo.router_replay=true is for grpo.engine=http: with grpo.engine=native one router draws and trains, so "
            "that there is nothing to replay; leave it out"
        )
    if section.engine == "native" and section.max_off_policy_steps:
        errors.append(
            f"grpo.max_off_policy_steps={section.max_off_policy_steps} draws completions while training goes on, which "
            "needs grpo.engine=http: with grpo.engine=native set it to 0"
        )
    if section.engine == "http" and section.server.weights == "adapter":
        errors += _adapter_alone(recipe)
    size = section.prompts_per_step * section.group_size
    batch = size if recipe.train.global_batch == "auto" else recipe.train.batch
    steps = -(-size // batch) * section.updates_per_rollout if batch >= 1 else 0
    if section.engine == "http" and 0 < section.max_off_policy_steps < steps:
        errors.append(
            f"grpo.max_off_policy_steps={section.max_off_policy_steps} is less than the {steps} optimizer steps of a "
            f"rollout, so that all that is drawn ahead would be too old and drawn again: set it to {steps} or more, or "
            "to 0"
        )
    return errors


def _graphs(recipe: Recipe) -> list[str]:
    """Graphs hold no collective, and read weights where they lie at their capture."""
    unfit = {
        "grpo.engine=http": (recipe.grpo.engine == "http", "does not decode here"),
        "launch.device=cpu": (recipe.launch.device == "cpu", "has none"),
        f"parallel.tp={recipe.parallel.tp}": (recipe.parallel.tp > 1, "sends within every layer"),
        f"parallel.ep={recipe.parallel.ep}": (recipe.parallel.ep > 1, "sends tokens to experts within every layer"),
        "grpo.unshard=false": (recipe.grpo.unshard is False, "gathers weights within every forward"),
    }
    return [
        f"grpo.cuda_graphs=true captures whole steps of decoding, and {key} {why}: leave grpo.cuda_graphs out, or that"
        for key, (is_so, why) in unfit.items()
        if is_so
    ]


def _adapter_alone(recipe: Recipe) -> list[str]:
    kind, lora = recipe.grpo.server.kind, recipe.lora
    if lora is None:
        return ["grpo.server.weights=adapter sends what lora trains, and lora is null: leave it out, or set lora={}"]
    errors, merged = [], "set grpo.server.weights=directory, which sends merged weights"
    if lora.modules_to_save:
        saved = ", ".join(lora.modules_to_save)
        errors.append(f"grpo.server.weights=adapter: servers take no lora.modules_to_save=[{saved}]; {merged}")
    if recipe.model.init == "scratch":
        errors.append(f"grpo.server.weights=adapter: no server has the base that model.init=scratch draws; {merged}")
    if lora.dora and kind in ("vllm", "sglang"):
        errors.append(f"grpo.server.weights=adapter: {kind} takes no lora.dora=true; {merged}")
    return errors


def loss_problems(loss: str, clip: Sequence[float], beta: float, options: Mapping[str, Any]) -> list[str]:
    """Return what is wrong with a `grpo` section's loss, one line each, by the recipe's keys; options: its kwargs."""
    if loss not in LOSSES:
        return [f"grpo.loss={loss} is no policy loss{key_aliases.hint('grpo.loss', loss, LOSSES)}"]
    errors = []
    if not is_clip(clip):
        errors.append(f"grpo.clip={clip} must be two numbers of at least 0: how far below and above 1 the ratio may go"
                      + next((sizes for bound in clip if (sizes := sizes_for(bound))), ""))  # fmt: skip
    elif loss == "cispo" and clip[1] < 1:
        errors.append(f"grpo.clip={clip}: cispo's second number caps the ratio itself, so below 1 it cuts every "
                      "token's weight; its papers take 5")  # fmt: skip
    if not (is_number(beta) and beta >= 0):
        errors.append(f"grpo.beta={beta} must be a finite number, at least 0{sizes_for(beta)}")
    read = {**SHARED, **LOSSES[loss].options}
    for key, value in options.items():
        if key not in read:
            errors.append(f"grpo.kwargs.{key} is not read by {loss}{hint(key, read, 'grpo.kwargs.')}")
        elif not (allowed := RANGES.get(key, NUMBER))[0](value):
            errors.append(f"grpo.kwargs.{key}={value} must be {allowed[1]}{sizes_for(value)}")
        elif key in ("kl_estimator", "kl_gradient") and not beta:
            errors.append(f"grpo.kwargs.{key} says how the divergence is measured, and grpo.beta=0 leaves it out")
    return errors or _combinations(loss, read | dict(options))


def _combinations(loss: str, options: Mapping[str, Any]) -> list[str]:
    errors = []
    if options.get("delta") is not None and options.get("dual_clip") is not None:
        errors.append("grpo.kwargs: delta and dual_clip bound the same ratio; give one of them")
    if LOSSES[loss].by_sequence and options["top_entropy_quantile"] < 1:
        errors.append(f"grpo.kwargs.top_entropy_quantile: {loss} is a loss of whole sequences, which keep all tokens")
    smallest, largest = options["sampling_clip_min"], options["sampling_clip_max"]
    if smallest is not None and largest is not None and smallest >= largest:
        errors.append(f"grpo.kwargs.sampling_clip_min={smallest} must be below sampling_clip_max={largest}")
    return errors


def reward_problems(listed: Sequence[Reward]) -> list[str]:
    """Return what is wrong with `grpo.rewards`, a line each; each is a `recipe.schema.Reward`. Import paths are not
    looked up here: `dtrain.rl.rewards.find` does."""
    errors = []
    for index, reward in enumerate(listed):
        key, name = f"grpo.rewards[{index}]", reward.fn
        if not is_number(reward.weight):
            errors.append(f"{key}.weight={reward.weight} must be a finite number{sizes_for(reward.weight)}")
        if not name:
            errors.append(f"{key}.fn is missing: name a reward ({', '.join(rewards.REWARDS)}), or give an import path")
        elif name in rewards.REWARDS:
            errors += _of_options(key, name, reward.options if name == "judge" else reward.kwargs)
        elif not rewards.is_path(name):
            meant = key_aliases.hint("grpo.rewards.fn", name, rewards.REWARDS)
            paths = "" if "did you mean" in meant else ", and import paths"
            errors.append(f"{key}.fn={name} is no reward{meant}{paths}")
        flat = [option for option in rewards.OF_JUDGE if getattr(reward, option) is not None and name != "judge"]
        errors += [f"{key}.{option} is read by fn=judge alone: options of others stand in kwargs" for option in flat]
    return errors


def _of_options(key: str, name: str, options: Mapping[str, Any]) -> list[str]:
    known = rewards.REWARDS[name]
    at = {
        option: f"{key}.{option}" if name == "judge" and option in rewards.OF_JUDGE else f"{key}.kwargs.{option}"
        for option in known
    }
    errors = [
        f"{at[option]} is required by {name}"
        for option, default in known.items()
        if default is rewards.REQUIRED and option not in options
    ]
    for option, value in options.items():
        if option not in known:
            near = rewards.FORMER_NAMES.get(option) or nearest(option, known)
            suggestion = f"; did you mean {at[near]}?" if near else f"; it reads {', '.join(known)}"
            errors.append(f"{key}.kwargs.{option} is not read by {name}{suggestion}")
        elif not rewards.RANGES[option][0](value):
            errors.append(f"{at[option]}={value} must be {rewards.RANGES[option][1]}")
    if not errors and name == "length_penalty" and options["target_tokens"] >= options["max_tokens"]:
        bounds = options["target_tokens"], options["max_tokens"]
        errors.append(f"{at['target_tokens']}={bounds[0]} must be below {at['max_tokens']}={bounds[1]}")
    return errors


class GrpoSpec(MethodSpec):
    kind = "prompts"
    adapter_rates = (5e-6, "1e-5")  # full tuning takes 1e-6
    curves = MappingProxyType({"reward_mean": "reward", "val_reward_mean": "validation reward"})
    best = ("loss", "val_reward_mean")
    more_steps = "a smaller grpo.prompts_per_step"

    def problems(self, recipe: Recipe) -> list[str]:
        return problems(recipe)

    def refuses(self, recipe: Recipe, format: str) -> str | None:
        if format in ("preference", "text"):
            return "method=grpo draws its own answers to prompts; give it messages, question or prompt_completion"
        return None

    def other_models(self, recipe: Recipe) -> list[tuple[str, str]]:
        is_another = self.needs_reference(recipe) and recipe.grpo.reference not in ("start", "base")
        rates = self.reward_model(recipe)
        named = [("grpo.reference", recipe.grpo.reference)] if is_another else []
        return named + ([(REWARD_MODEL, rates)] if rates else [])

    def reward_model(self, recipe: Recipe) -> str | None:
        return recipe.grpo.reward_model.path

    def code(self, recipe: Recipe) -> list[tuple[str, str | None, str]]:
        named = [(f"grpo.rewards[{i}].fn", reward.fn, "reward") for i, reward in enumerate(recipe.grpo.rewards)]
        for i, tool in enumerate(recipe.grpo.tools):
            named += [(f"grpo.tools[{i}].fn", tool.fn, "tool"), (f"grpo.tools[{i}].mcp", tool.mcp, "server of tools")]
        named.append(("grpo.verifiers.name", recipe.grpo.verifiers.name, "environment of verifiers"))
        return [*named, ("grpo.environment", recipe.grpo.environment, "environment")]

    def prompts(self, recipe: Recipe) -> PromptOptions:
        section = recipe.grpo
        lengths = recipe.data.max_length, section.sampling.max_new_tokens
        tools = [schema for _, schema in tool_schemas(section.tools)] if section.tools else []
        return PromptOptions.within(
            *lengths, section.system_prompt, tools=tools, answers=section.verifiers.name is not None
        )

    def longest_row(self, recipe: Recipe) -> int:
        """Packed, a micro-batch is one row."""
        return recipe.data.max_length * (recipe.train.micro_batch if recipe.data.packing else 1)

    def is_dynamic(self, recipe: Recipe) -> bool:
        return recipe.train.dynamic_batch or recipe.grpo.dynamic_batch

    def automatic_batch(self, recipe: Recipe, rows: int) -> int:
        return recipe.grpo.prompts_per_step * recipe.grpo.group_size

    def needs_reference(self, recipe: Recipe) -> bool:
        return bool(recipe.grpo.beta)

    def sends_weights(self, recipe: Recipe) -> bool:
        return recipe.grpo.server.weights == "broadcast"


def spec(recipe: Recipe | None = None) -> GrpoSpec:
    """The spec of this method."""
    return GrpoSpec()
