"""Checks of the keys that rollouts read: sizes, rewards, environments, tools and servers. No torch, no file is read."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from dtrain.base.ranges import is_number, nearest, sizes_for
from dtrain.recipe import key_aliases
from dtrain.recipe.rollouts import Reward, RolloutSection
from dtrain.recipe.schema import Lora, Model, Parallel
from dtrain.rl.rewards import options as rewards


def size_problems(section: RolloutSection, updates: int, batch: int | None) -> list[str]:
    """Return what is wrong with the numbers of completions, one line each. updates: passes over a rollout; batch:
    `train.global_batch`, None where it is a rollout."""
    errors = []
    rollout = section.prompts_per_step * section.group_size
    batch = rollout if batch is None else batch
    if min(section.prompts_per_step, section.group_size, batch) >= 1 and rollout % batch:
        fits = sorted({math.gcd(rollout, batch), rollout})
        errors.append(
            f"train.global_batch={batch} does not divide a rollout of grpo.prompts_per_step "
            f"{section.prompts_per_step} × grpo.group_size {section.group_size} = {rollout} completions; set "
            f"train.global_batch={' or '.join(map(str, fits))}"
        )
    if section.group_size == 1 and (section.advantage in ("group", "leave_one_out") or section.scale == "group"):
        errors.append(
            f"grpo.group_size=1 with grpo.advantage={section.advantage} and grpo.scale={section.scale} compares a "
            "completion with itself: set grpo.group_size to 2 or more, or grpo.advantage=batch and grpo.scale=batch"
        )
    elif section.scale == "leave_one_out" and section.group_size < 3:
        errors.append(
            "grpo.scale=leave_one_out is the spread of a completion's others, and "
            f"grpo.group_size={section.group_size} leaves fewer than two of them: set grpo.group_size to 3 or "
            "more, or grpo.scale=none"
        )
    steps = -(-rollout // batch) * updates if batch >= 1 else 0
    if section.engine == "http" and 0 < section.max_off_policy_steps < steps:
        errors.append(
            f"grpo.max_off_policy_steps={section.max_off_policy_steps} is less than the {steps} optimizer steps of "
            f"a rollout, so that all that is drawn ahead would be too old and drawn again: set it to {steps} or "
            "more, or to 0"
        )
    cache = section.overlong_cache
    if cache is not None and cache > section.sampling.max_new_tokens:
        errors.append(
            f"grpo.overlong_cache={cache} is a part of "
            f"grpo.sampling.max_new_tokens={section.sampling.max_new_tokens}, so it cannot be more"
        )
    return errors


def answer_problems(section: RolloutSection) -> list[str]:
    """Return what is wrong with the rewards, environments and tools of a section, one line each."""
    return _judging_problems(section) + _verifier_problems(section) + _tool_problems(section)


def graph_obstacles(section: RolloutSection, device: str, parallel: Parallel) -> list[str]:
    """Return what keeps a run from decoding by CUDA graphs: these hold no collective, and read weights where they lie
    at their capture. device: `launch.device`, or the kind of the device itself."""
    unfit = {
        "grpo.cuda_graphs=false": (section.cuda_graphs is False, "asks for that"),
        "grpo.engine=http": (section.engine == "http", "does not decode here"),
        f"launch.device={device}": (device not in ("auto", "cuda"), "has none"),
        f"parallel.tp={parallel.tp}": (parallel.tp > 1, "sends within every layer"),
        f"parallel.ep={parallel.ep}": (parallel.ep > 1, "sends tokens to experts within every layer"),
        "grpo.unshard=false": (section.unshard is False, "gathers weights within every forward"),
    }
    return [f"{key} {why}" for key, (is_so, why) in unfit.items() if is_so]


def engine_problems(
    section: RolloutSection, device: str, parallel: Parallel, lora: Lora | None, model: Model
) -> list[str]:
    """Return what is wrong with `grpo.engine` and the keys that it reads, one line each. device: `launch.device`."""
    errors, server, is_http = [], section.server, section.engine == "http"
    if is_http and not server.urls:
        errors.append("grpo.engine=http needs grpo.server.urls: where the servers listen, [http://localhost:8000]")
    for url in server.urls if is_http else ():
        if not url.startswith(("http://", "https://")):
            errors.append(f"grpo.server.urls: {url} must begin with http:// or https://")
    if not is_http and server.urls:
        errors.append("grpo.server.urls is not read by grpo.engine=native: set grpo.engine=http, or leave it out")
    if section.cuda_graphs is True:
        errors += [
            f"grpo.cuda_graphs=true captures whole steps of decoding, and {obstacle}: leave grpo.cuda_graphs out, or "
            "that"
            for obstacle in graph_obstacles(section, device, parallel)
        ]
    if not is_http and section.router_replay:
        errors.append(
            "grpo.router_replay=true is for grpo.engine=http: with grpo.engine=native one router draws and trains, "
            "so that there is nothing to replay; leave it out"
        )
    if not is_http and section.max_off_policy_steps:
        errors.append(
            f"grpo.max_off_policy_steps={section.max_off_policy_steps} draws completions while training goes on, "
            "which needs grpo.engine=http: with grpo.engine=native set it to 0"
        )
    if is_http and server.weights == "adapter":
        errors += _adapter_problems(server.kind, lora, model)
    if is_http and server.weights == "broadcast" and server.kind == "vllm" and device == "cpu":
        errors.append(
            "grpo.server.weights=broadcast to vLLM is by NCCL, from a GPU, and the run has launch.device=cpu: set "
            "grpo.server.weights=directory"
        )
    return errors


def image_problems(section: RolloutSection) -> list[str]:
    """Return what a section has that takes no prompts with images, one line each."""
    others = {
        "grpo.environment, grpo.verifiers or grpo.tools": section.has_episodes,
        "grpo.reward_model": section.reward_model.path is not None,
    }
    return [
        f"{key} takes text alone, and the prompts have images: leave it out, or remove the images"
        for key, is_set in others.items()
        if is_set
    ]


def _judging_problems(section: RolloutSection) -> list[str]:
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


def _verifier_problems(section: RolloutSection) -> list[str]:
    errors = []
    if section.verifiers.name is None:
        return ["grpo.verifiers.args are of no environment: set grpo.verifiers.name"] if section.verifiers.args else []
    if section.rewards == RolloutSection().rewards:
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


def _tool_problems(section: RolloutSection) -> list[str]:
    errors = []
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


def _adapter_problems(kind: str, lora: Lora | None, model: Model) -> list[str]:
    """Return what keeps servers of a kind from taking the adapter alone, one line each."""
    if lora is None:
        return ["grpo.server.weights=adapter sends what lora trains, and lora is null: leave it out, or set lora={}"]
    errors, merged = [], "set grpo.server.weights=directory, which sends merged weights"
    if lora.modules_to_save:
        saved = ", ".join(lora.modules_to_save)
        errors.append(f"grpo.server.weights=adapter: servers take no lora.modules_to_save=[{saved}]; {merged}")
    if model.init == "scratch":
        errors.append(f"grpo.server.weights=adapter: no server has the base that model.init=scratch draws; {merged}")
    if lora.dora and kind in ("vllm", "sglang"):
        errors.append(f"grpo.server.weights=adapter: {kind} takes no lora.dora=true; {merged}")
    return errors


def reward_problems(listed: Sequence[Reward], rewards_key: str = "grpo.rewards") -> list[str]:
    """Return an error for each mistake in a list of rewards, whose key is `rewards_key`.

    Import paths are not looked up here, but by `dtrain.rl.rewards.find`.
    """
    errors = []
    for index, reward in enumerate(listed):
        key, name = f"{rewards_key}[{index}]", reward.fn
        if not is_number(reward.weight):
            errors.append(f"{key}.weight={reward.weight} must be a finite number{sizes_for(reward.weight)}")
        if not name:
            errors.append(f"{key}.fn is missing: name a reward ({', '.join(rewards.REWARDS)}), or give an import path")
        elif name in rewards.REWARDS:
            errors += _option_problems(key, name, reward.options if name == "judge" else reward.kwargs)
        elif not rewards.is_path(name):
            meant = key_aliases.hint("grpo.rewards.fn", name, rewards.REWARDS)
            paths = "" if "did you mean" in meant else ", and import paths"
            errors.append(f"{key}.fn={name} is no reward{meant}{paths}")
        flat = [option for option in rewards.OF_JUDGE if getattr(reward, option) is not None and name != "judge"]
        errors += [f"{key}.{option} is read by fn=judge alone: options of others stand in kwargs" for option in flat]
    return errors


def _option_problems(key: str, name: str, options: Mapping[str, Any]) -> list[str]:
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
