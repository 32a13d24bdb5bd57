"""Sections of recipes that draw completions: how they are drawn, answered by environments and tools, and rewarded.

`dtrain.rl` reads these; a method whose section has more keys derives from `RolloutSection`.
"""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from dtrain.base.ranges import AUTO, DIVISOR, STOP, TIME, TOP_K, UP_TO_1, at_least


@dataclass
class Sampling:
    """`grpo.sampling`, `distill.sampling`: how completions are drawn. GRPO computes with the same distribution."""

    temperature: Annotated[float, DIVISOR] = 1.0
    """Divides the logits before anything else."""
    top_k: Annotated[int | None, TOP_K] = None
    """Keep the k likeliest tokens. null: all."""
    top_p: Annotated[float, UP_TO_1] = 1.0
    """Keep the likeliest tokens of this much probability."""
    max_new_tokens: Annotated[int, at_least(1)] = 512
    """Tokens of the longest completion; in an environment, of the longest turn."""
    stop: Annotated[list[str], STOP] = field(default_factory=list)
    """Texts that end a completion, beside the model's end-of-sequence tokens."""


@dataclass
class Reward:
    """Entry of `grpo.rewards`."""

    fn: str | None = None
    """Required. A reward's name (dtrain/rl/rewards/catalog.py lists them), or an import path of
    `fn(prompts, completions, completion_ids, **columns) -> list of numbers or None`, async or not."""
    weight: float = 1.0
    """Its weight in the sum."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Its options, such as `{pattern: "yes|no"}` for regex."""
    url: str | None = None
    """Of judge: where a server listens that answers as OpenAI's API does, such as `http://localhost:8000/v1`."""
    model: str | None = None
    """Of judge: the name of the model there that gives each answer 0 to 10 points, divided by 10."""
    rubric: str | None = None
    """Of judge: what a good answer is, in words for that model."""

    @property
    def options(self) -> dict[str, Any]:
        """`kwargs`, and the keys above that are given."""
        judge = {"url": self.url, "model": self.model, "rubric": self.rubric}
        return {**{key: value for key, value in judge.items() if value is not None}, **self.kwargs}


@dataclass
class Server:
    """`grpo.server`: read with `grpo.engine=http`."""

    urls: list[str] = field(default_factory=list)
    """Required. Where the servers listen, such as `http://localhost:8000`."""
    kind: Literal["auto", "dtrain", "vllm", "sglang"] = "auto"
    """What they are. auto asks the first one."""
    model: str | None = None
    """The model's name on the servers. null: the one that they report."""
    timeout: Annotated[float, TIME] = 600.0
    """Seconds that a completion, or an update of the weights, may take."""
    retries: Annotated[int, at_least(0)] = 3
    """How often a request is sent again where the connection or the server failed."""
    concurrency: Annotated[int, at_least(1)] = 64
    """Requests on their way at once, over all servers."""
    start_timeout: Annotated[float, TIME] = 300.0
    """Seconds that the servers may take to come up, when the run starts."""
    api_key_file: str | None = None
    """A file with the key that the servers want. null: none."""
    weights: Literal["auto", "directory", "broadcast", "adapter"] = "auto"
    """How new weights reach the servers. directory: as safetensors in `weights_dir`, which the servers can read.
    broadcast: over a process group, to vLLM over NCCL. With `lora` both send whole weights with the adapter merged.
    adapter: the adapter alone, in `weights_dir`. auto: with `lora` the adapter, if all servers take it and have the
    base that is trained; else directory."""
    weights_dir: str | None = None
    """A directory that the servers see under the same path. null: `weights` in the run's directory."""


@dataclass
class RatingModel:
    """`grpo.reward_model`: a model with a head of one output, as `method: reward` trains it, that rates completions. It
    lies on the mesh beside the policy and reads text, with its own tokenizer and chat template."""

    path: str | None = None
    """Its directory, or its id on the hub. null: none."""
    weight: float = 1.0
    """What its score counts for beside `grpo.rewards`, which may be []."""


@dataclass
class Tool:
    """Entry of `grpo.tools`."""

    fn: str | None = None
    """Import path of a Python function, async or not. Its name, hints and docstring (with `Args:`) tell the model what
    it does and takes. This or `mcp` is required."""
    mcp: str | None = None
    """A command that starts a tool server, which speaks the Model Context Protocol over its standard input and output;
    or the address of one over HTTP, `http://localhost:8000/mcp`. It needs `pip install 'dtrain[mcp]'`."""
    schema: str | None = None
    """Of mcp, and required there: a file with what the server offers, as
    `python -m dtrain.rl.environments.mcp "SERVER" > FILE` writes it. Prompts tell the model of the tools in it."""


@dataclass
class Verifiers:
    """`grpo.verifiers`: an environment of the library `verifiers` (dtrain/rl/README.md), in place of
    `grpo.environment`."""

    name: str | None = None
    """Its name, whose package must be installed. `python -m dtrain.rl.environments.verifiers NAME ARGS > FILE` writes
    its prompts for `data.train.path`. null: none."""
    args: dict[str, Any] = field(default_factory=dict)
    """What its `load_environment` is called with. The data must be written with the same."""


@dataclass
class RolloutSection:
    """Keys of a rollout: how it is drawn, answered and rewarded."""

    prompts_per_step: Annotated[int, at_least(1)] = 16
    """Prompts of a rollout."""
    group_size: Annotated[int, at_least(1)] = 8
    """Completions drawn for each prompt."""
    advantage: Literal["group", "leave_one_out", "batch", "none"] = "group"
    """What is subtracted from a reward: the mean of its group, of its group's others, of the rollout, or nothing."""
    scale: Literal["group", "leave_one_out", "batch", "none"] = "group"
    """Divisor of the difference: the standard deviation of its group, of its group's others, of the rollout, or none.
    leave_one_out in both keys is NeMo-RL's default; a spread of 0 divides nothing there."""
    rewards: list[Reward] = field(default_factory=lambda: [Reward(fn="math_exact")])
    """A completion earns the weighted sum of these. They run in a process that sees no CUDA device, unless the code
    names one in CUDA_VISIBLE_DEVICES before it loads torch."""
    reward_model: RatingModel = field(default_factory=RatingModel)
    """A model that rates completions, beside `rewards`."""
    reward_timeout: Annotated[float, TIME] = 60.0
    """Seconds that one reward may take over a rollout; after that its values are unknown."""
    mask_truncated: bool = False
    """Completions that max_new_tokens cut train nothing; they still count where a loss divides by sequences. So do,
    in an environment, episodes whose last turn was cut, or whose next turn found no room in max_length."""
    overlong_cache: Annotated[int | None, at_least(1, ", or null for no punishment")] = None
    """Soft punishment of length (arXiv:2503.14476, section 3.4): within the last so many tokens before max_new_tokens
    the reward falls by up to 1. In an environment the longest turn decides, counted in tokens that the model drew. A
    turn that was cut, by max_length too, costs 1. null: off."""
    dynamic_sampling: Literal["none", "drop", "refill"] = "none"
    """Groups whose rewards are all equal teach nothing. drop: they are left out of the updates. refill: new prompts
    take their place."""
    max_refills: Annotated[int, at_least(0)] = 3
    """How many times a rollout is refilled. After that it goes on with the groups that it has."""
    sampling: Sampling = field(default_factory=Sampling)
    """How completions are drawn."""
    system_prompt: str | None = None
    """The system message of conversations that have none."""
    environment: str | None = None
    """Import path of a maker of environments (dtrain/rl/README.md): completions in several turns. null: one
    completion answers a prompt."""
    verifiers: Verifiers = field(default_factory=Verifiers)
    """An environment of the library `verifiers`, by its name."""
    tools: list[Tool] = field(default_factory=list)
    """Functions that the model may call in its completions (dtrain/rl/README.md), in place of an environment. Each
    prompt tells it of them."""
    tool_output: Annotated[int, at_least(1)] = 4096
    """Characters of the longest answer of a tool. What is beyond is cut, and the answer says so."""
    environment_timeout: Annotated[float, TIME] = 60.0
    """Seconds that making an environment, or one step of it, may take; of tools, all calls of one turn. After that it
    is given up, and its completion has no known reward."""
    environment_threads: Annotated[int, at_least(1)] = 1
    """How many threads make and step environments, or call tools. More than 1 helps where they wait, for a server say.
    1: one after another, in the order of the completions."""
    max_turns: Annotated[int, at_least(1)] = 8
    """Completions of the longest episode in an environment, or with tools."""
    engine: Literal["native", "http"] = "native"
    """What draws completions: the training processes, or servers."""
    server: Server = field(default_factory=Server)
    """The servers of `engine: http`."""
    max_off_policy_steps: Annotated[int, at_least(0)] = 0
    """How many optimizer steps old a completion's weights may be when its updates begin. 0: training waits for each
    rollout. More needs engine=http: the next rollout is drawn while this one is trained on. It must then be at least
    the optimizer steps of a rollout."""
    router_replay: bool = False
    """engine=http, of a mixture of experts: training sends tokens to the experts that the server's router took, weighed
    by the policy's own router (arXiv:2510.11370). Tokens that the server says nothing of go where that router sends
    them, and in the reference all do. Servers must tell experts: `dtrain serve` does, vLLM and SGLang with
    --enable-return-routed-experts."""
    unshard: Annotated[bool | str, AUTO] = "auto"
    """auto | true | false. true: a rank gathers the whole weights (its tensor-parallel part) once and keeps them while
    it generates. false: it gathers each layer for each token. auto: true where memory allows."""
    cuda_graphs: Annotated[bool | str, AUTO] = "auto"
    """engine=native on CUDA: a step of decoding is one captured graph, and the first must draw what its kernels draw.
    auto: kernel by kernel where that one differs or waits, under parallel.tp or ep, or without whole weights. true:
    refused there. A capture that fails ends the run."""
    offload: bool = False
    """The optimizer's state, and with engine=http the weights, wait in host memory while completions are drawn."""
    show: Annotated[int, at_least(0)] = 2
    """Completions of each rollout that the terminal shows; samples.jsonl has all."""

    @property
    def has_episodes(self) -> bool:
        """Return whether an environment or tools answer completions."""
        return self.environment is not None or self.verifiers.name is not None or bool(self.tools)
