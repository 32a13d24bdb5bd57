"""Sections of methods that sample completions: sampling, servers, environments, tools and rewards.

`dtrain.rl` reads these keys. The section of such a method derives from `RolloutSection` and adds its own keys.
"""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from dtrain.base.ranges import AUTO, DIVISOR, STOP, TIME, TOP_K, UP_TO_1, at_least


@dataclass
class Sampling:
    """`grpo.sampling`, `distill.sampling`: how completions are sampled. The GRPO loss uses the same distribution."""

    temperature: Annotated[float, DIVISOR] = 1.0
    """Divisor of the logits, applied before top_k and top_p."""
    top_k: Annotated[int | None, TOP_K] = None
    """Sample from the k tokens with the highest probabilities. null: from all."""
    top_p: Annotated[float, UP_TO_1] = 1.0
    """Sample from the smallest set of tokens whose probabilities sum to at least top_p (nucleus sampling). 1: from
    all."""
    max_new_tokens: Annotated[int, at_least(1)] = 512
    """Maximum number of tokens of a completion. In an environment, of one turn."""
    stop: Annotated[list[str], STOP] = field(default_factory=list)
    """Texts that end a completion, in addition to the model's end-of-sequence tokens."""


@dataclass
class Reward:
    """Entry of `grpo.rewards`."""

    fn: str | None = None
    """Required. The name of a reward (dtrain/rl/rewards/catalog.py lists them), or the import path of a function
    `fn(prompts, completions, completion_ids, **columns)` that returns a list of numbers or None. It may be async."""
    weight: float = 1.0
    """Weight of this reward in the sum."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Options of the reward, such as `{pattern: "yes|no"}` for regex."""
    url: str | None = None
    """For the reward judge: the URL of a server with OpenAI's API, such as `http://localhost:8000/v1`."""
    model: str | None = None
    """For the reward judge: the name of the model on that server. It gives each answer 0 to 10 points, which are
    divided by 10."""
    rubric: str | None = None
    """For the reward judge: a description of a good answer, as a prompt for that model."""

    @property
    def options(self) -> dict[str, Any]:
        """The options of the reward: `kwargs`, and the keys of a judge that are set."""
        judge = {"url": self.url, "model": self.model, "rubric": self.rubric}
        options = {key: value for key, value in judge.items() if value is not None}
        return {**options, **self.kwargs}


@dataclass
class Server:
    """`grpo.server`: servers that sample completions, with `grpo.engine=http`."""

    urls: list[str] = field(default_factory=list)
    """Required. URLs of the servers, such as `http://localhost:8000`."""
    kind: Literal["auto", "dtrain", "vllm", "sglang"] = "auto"
    """Software of the servers. auto: ask the first server."""
    model: str | None = None
    """Name of the model on the servers. null: the name that they report."""
    timeout: Annotated[float, TIME] = 600.0
    """Seconds that a completion, or an update of the weights, may take."""
    retries: Annotated[int, at_least(0)] = 3
    """How many times a request is repeated if the connection or the server fails."""
    concurrency: Annotated[int, at_least(1)] = 64
    """Maximum number of concurrent requests, over all servers."""
    start_timeout: Annotated[float, TIME] = 300.0
    """Seconds to wait for the servers when the run starts."""
    api_key_file: str | None = None
    """File with the API key of the servers. null: no key."""
    weights: Literal["auto", "directory", "broadcast", "adapter"] = "auto"
    """How new weights reach the servers. directory: as safetensors files in `weights_dir`, which the servers can read.
    broadcast: over a process group (to vLLM over NCCL). With `lora`, both send full weights with the adapter merged
    into them. adapter: only the adapter, in `weights_dir`. auto: with `lora`, adapter if all servers support it and
    have the base model that is trained; else directory."""
    weights_dir: str | None = None
    """Directory that the servers see under the same path. null: `weights` in the run's directory."""


@dataclass
class RatingModel:
    """`grpo.reward_model`: a reward model that rates completions: a model with a head of one output, as `method:
    reward` trains it. It is placed on the same mesh as the policy, and reads text with its own tokenizer and chat
    template."""

    path: str | None = None
    """Directory of the reward model, or its id on the hub. null: no reward model."""
    weight: float = 1.0
    """Weight of its score in the sum with `grpo.rewards`, which may be []."""


@dataclass
class Tool:
    """Entry of `grpo.tools`."""

    fn: str | None = None
    """Import path of a Python function, which may be async. The model reads its name, type hints and docstring (with
    `Args:`). Either this or `mcp` is required."""
    mcp: str | None = None
    """A command that starts a tool server of the Model Context Protocol over standard input and output, or the URL of
    one, such as `http://localhost:8000/mcp`. It needs `pip install 'dtrain[mcp]'`."""
    schema: str | None = None
    """For `mcp`, and required there: a file that describes the server's tools. Write it with `python -m
    dtrain.rl.environments.mcp "SERVER" > FILE`. The prompts contain these descriptions."""


@dataclass
class Verifiers:
    """`grpo.verifiers`: an environment of the library `verifiers` (dtrain/rl/README.md), in place of
    `grpo.environment`."""

    name: str | None = None
    """Name of the environment. Its package must be installed. Write its prompts for `data.train.path` with `python -m
    dtrain.rl.environments.verifiers NAME ARGS > FILE`. null: none."""
    args: dict[str, Any] = field(default_factory=dict)
    """Arguments of its `load_environment`. The prompts must be written with the same arguments."""


@dataclass
class RolloutSection:
    """Keys of a rollout: sampling, environments and tools, rewards and advantages."""

    prompts_per_step: Annotated[int, at_least(1)] = 16
    """Number of prompts of a rollout."""
    group_size: Annotated[int, at_least(1)] = 8
    """Number of completions for each prompt. They form a group."""
    advantage: Literal["group", "leave_one_out", "batch", "none"] = "group"
    """Baseline that is subtracted from each reward. group: the mean of its group. leave_one_out: the mean of the others
    in its group. batch: the mean of the rollout. none: 0."""
    scale: Literal["group", "leave_one_out", "batch", "none"] = "group"
    """Divisor of the advantages. group: the standard deviation of the rewards in the group. leave_one_out: that of the
    others in the group. batch: that of the rollout. none: 1. leave_one_out in both keys is NeMo-RL's default; there is
    no division where the standard deviation is 0."""
    rewards: list[Reward] = field(default_factory=lambda: [Reward(fn="math_exact")])
    """The reward of a completion is the weighted sum of these. They run in a process that sees no CUDA device, unless
    their code sets CUDA_VISIBLE_DEVICES before it loads torch."""
    reward_model: RatingModel = field(default_factory=RatingModel)
    """A reward model that rates completions, in addition to `rewards`."""
    reward_timeout: Annotated[float, TIME] = 60.0
    """Seconds that one reward may take for a rollout. After that its values are unknown."""
    mask_truncated: bool = False
    """true: completions that were cut at max_new_tokens are not trained on. They still count if the loss is divided by
    the number of sequences. In an environment this applies to episodes whose last turn was cut, or whose next turn did
    not fit into max_length."""
    overlong_cache: Annotated[int | None, at_least(1, ", or null for no punishment")] = None
    """Soft punishment of long completions (DAPO, arXiv:2503.14476, section 3.4): within the last N tokens before
    max_new_tokens, the reward falls linearly by up to 1. In an environment the longest turn counts, in sampled tokens.
    A turn that was cut, at max_length too, costs 1. null: off."""
    dynamic_sampling: Literal["none", "drop", "refill"] = "none"
    """What happens to groups whose rewards are all equal, which have no gradient. none: they are kept. drop: they are
    left out of the updates. refill: they are replaced by the groups of new prompts (DAPO)."""
    max_refills: Annotated[int, at_least(0)] = 3
    """Maximum number of refills of a rollout. After that training continues with the groups that there are."""
    sampling: Sampling = field(default_factory=Sampling)
    """How completions are sampled."""
    system_prompt: str | None = None
    """System message for conversations without one."""
    environment: str | None = None
    """Import path of a function that makes environments (dtrain/rl/README.md), for completions in several turns. null:
    one completion answers a prompt."""
    verifiers: Verifiers = field(default_factory=Verifiers)
    """An environment of the library `verifiers`, by its name."""
    tools: list[Tool] = field(default_factory=list)
    """Functions that the model may call in its completions (dtrain/rl/README.md), in place of an environment. The
    prompts contain their descriptions."""
    tool_output: Annotated[int, at_least(1)] = 4096
    """Maximum number of characters of a tool's result. A longer result is cut, and says so."""
    environment_timeout: Annotated[float, TIME] = 60.0
    """Seconds that making an environment, or one step of it, may take; with tools, all calls of one turn. After that
    the completion has no known reward."""
    environment_threads: Annotated[int, at_least(1)] = 1
    """Number of threads that make and step environments, or call tools. More than 1 helps if they wait, for example for
    a server. 1: one after another, in the order of the completions."""
    max_turns: Annotated[int, at_least(1)] = 8
    """Maximum number of completions of an episode in an environment, or with tools."""
    engine: Literal["native", "http"] = "native"
    """What samples completions. native: the training processes. http: the servers of `server`."""
    server: Server = field(default_factory=Server)
    """The servers, with `engine: http`."""
    max_off_policy_steps: Annotated[int, at_least(0)] = 0
    """How many optimizer steps old the weights that sampled a completion may be when its updates begin. 0: training
    waits for each rollout. More needs engine=http: the next rollout is sampled while this one is trained on. The number
    must then be at least the optimizer steps of a rollout."""
    router_replay: bool = False
    """For mixtures of experts with engine=http. true: training sends each token to the experts that the server's router
    chose, weighted by the policy's own router (arXiv:2510.11370). Tokens for which the server reports no experts, and
    all tokens in the reference model, use the policy's router. The servers must report experts: `dtrain serve` does,
    and vLLM and SGLang do with --enable-return-routed-experts."""
    unshard: Annotated[bool | str, AUTO] = "auto"
    """true: each rank gathers the full weights (of its tensor-parallel part) once and keeps them while it generates.
    false: each rank gathers each layer for each token. auto: true if the memory allows it."""
    cuda_graphs: Annotated[bool | str, AUTO] = "auto"
    """For engine=native on CUDA: whether a decoding step is one captured CUDA graph. auto: yes, unless the first step
    cannot be captured or computes other numbers than single kernels, and not with parallel.tp or ep or without
    unsharded weights. true: these cases are errors. In both cases a capture that fails halfway ends the run."""
    offload: bool = False
    """true: the optimizer state, and with engine=http the weights as well, are moved to host memory while completions
    are sampled."""
    show: Annotated[int, at_least(0)] = 2
    """Number of completions that the terminal shows for each rollout. samples.jsonl has all of them."""

    @property
    def has_episodes(self) -> bool:
        """Whether completions are answered by an environment or tools."""
        return self.environment is not None or self.verifiers.name is not None or bool(self.tools)
