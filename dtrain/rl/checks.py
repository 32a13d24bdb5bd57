"""Checks of the recipe keys for rollouts: sizes, rewards, environments, tools and servers.

The checks read no files and need no torch. Each returns a list of problems, which is empty if the keys are right.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from dtrain.base.errors import Problem
from dtrain.base.plugins import REWARDS_KEY, is_import_path, misspelt_key_hint
from dtrain.base.ranges import closest_name, is_number, magnitude_hint
from dtrain.recipe import spelling
from dtrain.recipe.rollouts import Reward, RolloutSection
from dtrain.recipe.schema import Lora, Model, Parallel
from dtrain.rl.rewards import catalog as rewards


def size_problems(section: RolloutSection, updates: int, batch: int | None) -> list[Problem]:
    """Check the numbers of completions.

    Args:
        section: The section of the method.
        updates: Passes over a rollout.
        batch: `train.global_batch`. None: a rollout.
    """
    problems = []
    rollout = section.prompts_per_step * section.group_size
    batch = rollout if batch is None else batch
    if min(section.prompts_per_step, section.group_size, batch) >= 1 and rollout % batch:
        fitting = sorted({math.gcd(rollout, batch), rollout})
        text = (
            f"train.global_batch={batch} does not divide a rollout of grpo.prompts_per_step "
            f"{section.prompts_per_step} × grpo.group_size {section.group_size} = {rollout} completions"
        )
        fix = f"Set train.global_batch={' or '.join(map(str, fitting))}"
        problems.append(Problem("train.global_batch", text, fix))
    if section.group_size == 1 and (section.advantage in ("group", "leave_one_out") or section.scale == "group"):
        text = (
            f"grpo.group_size=1 with grpo.advantage={section.advantage} and grpo.scale={section.scale} compares a "
            "completion with itself"
        )
        fix = "Set grpo.group_size to 2 or more, or grpo.advantage=batch and grpo.scale=batch"
        problems.append(Problem("grpo.group_size", text, fix))
    elif section.scale == "leave_one_out" and section.group_size < 3:
        text = (
            "grpo.scale=leave_one_out is the spread of the other completions of a group, and "
            f"grpo.group_size={section.group_size} leaves fewer than two of them"
        )
        problems.append(Problem("grpo.scale", text, "Set grpo.group_size to 3 or more, or grpo.scale=none"))
    steps = -(-rollout // batch) * updates if batch >= 1 else 0
    max_staleness = section.max_off_policy_steps
    if section.engine == "http" and 0 < max_staleness < steps:
        text = (
            f"grpo.max_off_policy_steps={max_staleness} is less than the {steps} optimizer steps of a rollout, so "
            "every completion that is sampled ahead would be too old"
        )
        problems.append(Problem("grpo.max_off_policy_steps", text, f"Set it to {steps} or more, or to 0"))
    cache, max_new_tokens = section.overlong_cache, section.sampling.max_new_tokens
    if cache is not None and cache > max_new_tokens:
        text = (
            f"grpo.overlong_cache={cache} is a part of grpo.sampling.max_new_tokens={max_new_tokens}, so it cannot be "
            "more"
        )
        problems.append(Problem("grpo.overlong_cache", text))
    return problems


def reward_and_tool_problems(section: RolloutSection) -> list[Problem]:
    """Check the rewards, environments and tools of a section."""
    return _judging_problems(section) + _verifier_problems(section) + _tool_problems(section)


def cuda_graph_obstacles(section: RolloutSection, device: str, parallel: Parallel) -> list[str]:
    """Return the settings that prevent decoding with CUDA graphs, each with the reason.

    A CUDA graph contains no collective, and reads weights at the addresses that they had when it was captured.

    Args:
        section: The section of the method.
        device: `launch.device`, or the type of the device.
        parallel: The section `parallel`.
    """
    obstacles = []
    if section.cuda_graphs is False:
        obstacles.append("grpo.cuda_graphs=false asks for that")
    if section.engine == "http":
        obstacles.append("grpo.engine=http does not decode here")
    if device not in ("auto", "cuda"):
        obstacles.append(f"launch.device={device} has none")
    if parallel.tp > 1:
        obstacles.append(f"parallel.tp={parallel.tp} sends within every layer")
    if parallel.ep > 1:
        obstacles.append(f"parallel.ep={parallel.ep} sends tokens to experts within every layer")
    if section.unshard is False:
        obstacles.append("grpo.unshard=false gathers weights within every forward")
    return obstacles


def engine_problems(
    section: RolloutSection, device: str, parallel: Parallel, lora: Lora | None, model: Model
) -> list[Problem]:
    """Check `grpo.engine` and the keys that it reads.

    Args:
        section: The section of the method.
        device: `launch.device`.
        parallel: The section `parallel`.
        lora: The section `lora`.
        model: The section `model`.
    """
    problems = []
    server = section.server
    if section.engine == "http":
        problems += _check_server(section, device, lora, model)
    if section.engine != "http" and server.urls:
        text = "grpo.server.urls is not read by grpo.engine=native"
        problems.append(Problem("grpo.server.urls", text, "Set grpo.engine=http, or leave it out"))
    if section.cuda_graphs is True:
        for obstacle in cuda_graph_obstacles(section, device, parallel):
            text = f"grpo.cuda_graphs=true captures complete steps of decoding, and {obstacle}"
            problems.append(Problem("grpo.cuda_graphs", text, "Leave grpo.cuda_graphs out, or change that key"))
    if section.engine != "http" and section.router_replay:
        text = (
            "grpo.router_replay=true is for grpo.engine=http: with grpo.engine=native the same router samples and "
            "trains, so there is nothing to replay"
        )
        problems.append(Problem("grpo.router_replay", text, "Leave it out"))
    if section.engine != "http" and section.max_off_policy_steps:
        text = (
            f"grpo.max_off_policy_steps={section.max_off_policy_steps} samples completions during training, which "
            "needs grpo.engine=http"
        )
        problems.append(Problem("grpo.max_off_policy_steps", text, "Set it to 0 for grpo.engine=native"))
    return problems


def _check_server(section: RolloutSection, device: str, lora: Lora | None, model: Model) -> list[Problem]:
    """Check the keys of servers."""
    server = section.server
    key = "grpo.server.urls"
    problems = []
    if not server.urls:
        fix = f"Set {key} to the servers' addresses, such as [http://localhost:8000]"
        problems.append(Problem(key, "grpo.engine=http needs grpo.server.urls", fix))
    for url in server.urls:
        if not url.startswith(("http://", "https://")):
            problems.append(Problem(key, f"{key}: {url} must begin with http:// or https://"))
    if server.weights == "adapter":
        problems += _adapter_problems(server.kind, lora, model)
    if server.weights == "broadcast" and server.kind == "vllm" and device == "cpu":
        text = "grpo.server.weights=broadcast sends weights to vLLM with NCCL, from a GPU, and launch.device=cpu"
        problems.append(Problem("grpo.server.weights", text, "Set grpo.server.weights=directory"))
    return problems


def image_problems(section: RolloutSection) -> list[Problem]:
    """Return a problem for each key of a section that does not accept prompts with images."""
    text_only = {
        "grpo.environment, grpo.verifiers or grpo.tools": section.has_episodes,
        "grpo.reward_model": section.reward_model.path is not None,
    }
    problems = []
    for key, is_set in text_only.items():
        if is_set:
            text = f"{key} accepts only text, and the prompts have images"
            problems.append(Problem(key.partition(",")[0], text, "Leave it out, or remove the images"))
    return problems


def _judging_problems(section: RolloutSection) -> list[Problem]:
    problems = reward_problems(section.rewards)
    environment = section.environment
    model_path, weight = section.reward_model.path, section.reward_model.weight
    if not is_number(weight):
        text = f"grpo.reward_model.weight={weight} must be a finite number{magnitude_hint(weight)}"
        problems.append(Problem("grpo.reward_model.weight", text))
    if model_path is not None and section.has_episodes:
        text = (
            "grpo.reward_model scores a prompt with one completion, and grpo.environment, grpo.verifiers and "
            "grpo.tools have several turns"
        )
        problems.append(Problem("grpo.reward_model", text, "Leave one of them out"))
    if not section.rewards and environment is None and model_path is None and section.verifiers.name is None:
        text = "grpo.rewards=[] rewards nothing"
        problems.append(Problem("grpo.rewards", text, "Name a reward, such as [{fn: math_exact}]", is_missing=True))
    if environment is not None and "." not in environment and ":" not in environment:
        text = f"grpo.environment={environment} is not an import path"
        problems.append(Problem("grpo.environment", text, "Write it as package.module.make"))
    return problems


def _verifier_problems(section: RolloutSection) -> list[Problem]:
    if section.verifiers.name is None:
        if not section.verifiers.args:
            return []
        text = "grpo.verifiers.args are given without an environment"
        return [Problem("grpo.verifiers.name", text, "Set grpo.verifiers.name")]
    problems = []
    if section.rewards == RolloutSection().rewards:
        text = "grpo.verifiers has rewards of its own, and grpo.rewards is math_exact unless it is set"
        problems.append(Problem("grpo.rewards", text, "Set grpo.rewards=[]"))
    if section.system_prompt is not None:
        text = "grpo.system_prompt would change the prompts of grpo.verifiers"
        problems.append(Problem("grpo.system_prompt", text, "Leave it out, or set one in grpo.verifiers.args"))
    return problems


def _tool_problems(section: RolloutSection) -> list[Problem]:
    problems = []
    for index, tool in enumerate(section.tools):
        key = f"grpo.tools[{index}]"
        example = "package.module.function"
        if tool.mcp is not None:
            if tool.fn is not None:
                problems.append(Problem(key, f"{key}: fn and mcp are two tools", "Add an entry for each of them"))
            if tool.schema is None:
                fix = (
                    "Set it to a file that describes the server's tools, as "
                    f'`python -m dtrain.rl.environments.mcp "{tool.mcp}" > tools.json` writes it'
                )
                problems.append(Problem(f"{key}.schema", f"{key}.schema is required by mcp", fix))
        elif not tool.fn:
            fix = f"Set it to an import path, such as {example}"
            problems.append(Problem(f"{key}.fn", f"{key}.fn is missing", fix, is_missing=True))
        elif "." not in tool.fn and ":" not in tool.fn:
            text = f"{key}.fn={tool.fn} is not an import path"
            problems.append(Problem(f"{key}.fn", text, f"Write it as {example}"))
    answering = []  # keys that answer a completion
    if section.environment is not None:
        answering.append("grpo.environment")
    if section.verifiers.name is not None:
        answering.append("grpo.verifiers")
    if section.tools:
        answering.append("grpo.tools")
    if len(answering) > 1:
        text = f"{' and '.join(answering)} both answer a completion"
        problems.append(Problem(answering[0], text, "Leave one of them out"))
    if section.tools and section.max_turns == 1:
        text = "grpo.max_turns=1 ends before a tool could answer"
        problems.append(Problem("grpo.max_turns", text, "Set it to 2 or more, or leave grpo.tools out"))
    return problems


def _adapter_problems(kind: str, lora: Lora | None, model: Model) -> list[Problem]:
    """Return the reasons why servers of a kind cannot receive only the adapter."""
    key = "grpo.server.weights"
    setting = f"{key}=adapter"
    if lora is None:
        text = f"{setting} sends the adapter's weights, and lora is null"
        return [Problem(key, text, "Leave it out, or set lora={}")]
    reasons = []
    if lora.modules_to_save:
        reasons.append(f"servers do not accept lora.modules_to_save=[{', '.join(lora.modules_to_save)}]")
    if model.init == "scratch":
        reasons.append("no server has the random base of model.init=scratch")
    if lora.dora and kind in ("vllm", "sglang"):
        reasons.append(f"{kind} does not accept lora.dora=true")
    fix = f"Set {key}=directory, which sends merged weights"
    return [Problem(key, f"{setting}: {reason}", fix) for reason in reasons]


def reward_problems(listed: Sequence[Reward], rewards_key: str = "grpo.rewards") -> list[Problem]:
    """Check a list of rewards, without looking up import paths, which `dtrain.rl.rewards.catalog` does.

    Args:
        listed: The rewards.
        rewards_key: Recipe key of the list, for messages.
    """
    problems = []
    for index, reward in enumerate(listed):
        key, name = f"{rewards_key}[{index}]", reward.fn
        fn_key = f"{key}.fn"
        if not is_number(reward.weight):
            text = f"{key}.weight={reward.weight} must be a finite number{magnitude_hint(reward.weight)}"
            problems.append(Problem(f"{key}.weight", text))
        if not name:
            fix = f"Set it to a reward ({', '.join(rewards.REWARDS)}) or an import path"
            problems.append(Problem(fn_key, f"{fn_key} is missing", fix, is_missing=True))
        elif name in rewards.REWARDS:
            problems += _option_problems(key, name, reward.options if name == "judge" else reward.kwargs)
        elif name not in rewards.reward_paths() and not is_import_path(name):
            near = spelling.find_dtrain_value("grpo.rewards.fn", name) or closest_name(name, rewards.reward_paths())
            if near:
                hint = f"did you mean {near}?"
            else:
                hint = f"there are {', '.join(rewards.reward_paths())}, and import paths"
            misspelt_key = misspelt_key_hint(name, REWARDS_KEY)
            problems.append(Problem(fn_key, f"{fn_key}={name} is not a reward{misspelt_key}; {hint}"))
        for option in rewards.JUDGE_OPTIONS:
            if getattr(reward, option) is not None and name != "judge":
                text = f"{key}.{option} is read only by fn=judge"
                problems.append(Problem(f"{key}.{option}", text, "Put options of other rewards into kwargs"))
    return problems


def _option_problems(key: str, name: str, options: Mapping[str, Any]) -> list[Problem]:
    """Check the options of a reward.

    Args:
        key: The reward's key, such as "grpo.rewards[0]".
        name: The reward.
        options: Its options.
    """
    known = rewards.REWARDS[name]
    option_keys = {}
    for option in known:
        is_own_key = name == "judge" and option in rewards.JUDGE_OPTIONS
        option_keys[option] = f"{key}.{option}" if is_own_key else f"{key}.kwargs.{option}"
    problems = []
    for option, default in known.items():
        if default is rewards.REQUIRED and option not in options:
            problems.append(Problem(option_keys[option], f"{option_keys[option]} is required by {name}"))
    for option, value in options.items():
        if option not in known:
            near = rewards.FORMER_NAMES.get(option) or closest_name(option, known)
            fix = f"Did you mean {option_keys[near]}?" if near else f"It reads {', '.join(known)}"
            option_key = f"{key}.kwargs.{option}"
            problems.append(Problem(option_key, f"{option_key} is not read by {name}", fix))
        elif not rewards.OPTION_RANGES[option][0](value):
            text = f"{option_keys[option]}={value} must be {rewards.OPTION_RANGES[option][1]}"
            problems.append(Problem(option_keys[option], text))
    if not problems and name == "length_penalty" and options["target_tokens"] >= options["max_tokens"]:
        target, limit = option_keys["target_tokens"], option_keys["max_tokens"]
        text = f"{target}={options['target_tokens']} must be below {limit}={options['max_tokens']}"
        problems.append(Problem(target, text))
    return problems
