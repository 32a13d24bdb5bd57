"""Checks of dtrain's client against a server of another project, each with the figure that it saw.

The trainer is a dtrain policy in float32 in this process, or a whole `dtrain run grpo`. The client is
`dtrain.rl.remote`, as a run has it.
"""

import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch

from dtrain.adapters.config import AdapterConfig
from dtrain.base.batch import collate
from dtrain.base.errors import UserError
from dtrain.checkpoint.peft.config import adapter_of
from dtrain.inference.native import NativeEngine
from dtrain.inference.request import Completion, Request, SamplingParams
from dtrain.losses.head.logprobs import TrainingSamplingParams
from dtrain.models import read_config
from dtrain.parallel.mesh import Runtime, build_mesh, init_one_process_group
from dtrain.parallel.placement import local_tensor
from dtrain.policy import Policy
from dtrain.rl.remote.http import HttpEngine
from dtrain.rl.remote.publish import AdapterPublisher, DirectoryPublisher
from dtrain.training import load_recipe
from tests.tiny import save_weights, write_model, write_prompts

NEAR = 1e-4  # of two log-probabilities in float32
APART = 1e-2  # of log-probabilities by different weights, in the mean
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
}
EXPERTS = {"moe_intermediate_size": 32, "mlp_only_layers": []}
ROOT = Path(__file__).resolve().parents[1]


@dataclass
class Result:
    """Outcome of one check. ok: None where this machine cannot make it."""

    name: str
    compared: str
    figure: str
    bound: str
    ok: bool | None


@dataclass
class Report:
    """Results, each printed as it comes."""

    results: list[Result] = field(default_factory=list)

    def near(self, name: str, compared: str, figure: float, most: float = NEAR) -> None:
        self._add(Result(name, compared, f"{figure:.2e}", f"at most {most:g}", figure <= most))

    def apart(self, name: str, compared: str, figure: float, least: float = APART) -> None:
        self._add(Result(name, compared, f"{figure:.2e}", f"at least {least:g}", figure >= least))

    def holds(self, name: str, compared: str, ok: bool, figure: str = "") -> None:
        self._add(Result(name, compared, figure or ("yes" if ok else "no"), "yes", ok))

    def refused(self, name: str, compared: str, act: Callable[[], object], fix: str) -> None:
        """Add whether `act` raises a UserError that tells `fix`."""
        try:
            act()
            message = "nothing was refused"
        except UserError as error:
            message = str(error)
        self.tells(name, compared, message, fix)

    def tells(self, name: str, compared: str, message: str, fix: str) -> None:
        ok = fix in message
        self._add(Result(name, compared, "told" if ok else f"said: {message[-600:]}", fix, ok))

    def not_here(self, name: str, reason: str) -> None:
        self._add(Result(name, "", f"not here: {reason}", "", None))

    def _add(self, result: Result) -> None:
        self.results.append(result)
        if result.ok is None:
            return print(f"{result.name}: {result.figure}", flush=True)
        outcome = "ok" if result.ok else "FAILED"
        print(f"{result.name}: {result.compared}: {result.figure} ({result.bound}) {outcome}", flush=True)

    def as_json(self) -> list[dict]:
        return [asdict(result) for result in self.results]


def make_model(root: Path, family: str, seed: int = 0) -> Path:
    """Return a tiny model of sizes that vLLM's kernels take, with random weights."""
    directory = root / family
    if not directory.exists():
        changes = SIZES | (EXPERTS if family == "qwen3-moe" else {})
        save_weights(write_model(directory, family, tied=False, **changes), seed)
        settings = '{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "w1", "pad_token": "w0"}\n'
        (directory / "tokenizer_config.json").write_text(settings)
    return directory


class Trainer:
    """A dtrain policy in float32 of the model in `directory`, and its view of completions."""

    def __init__(self, root: Path, directory: Path, *overrides: str):
        settings = {
            "run": {"name": "trainer", "dir": str(root / "runs")},
            "model": {"path": str(directory)},
            "data": {"train": {"path": str(prompts_file(root))}, "max_length": 128},
            "train": {"steps": 1, "global_batch": 8, "micro_batch": 8, "dtype": "float32"},
        }
        self.recipe = load_recipe(settings, overrides)
        runtime = Runtime()
        init_one_process_group("cpu")
        mesh = build_mesh(runtime, dp_shard=1, cp=1, tp=1)
        self.policy = Policy(self.recipe, read_config(directory), mesh, runtime)
        self.policy.init_optimizer(1)
        self.directory = directory

    @property
    def adapter(self) -> AdapterConfig:
        assert self.recipe.lora is not None
        return adapter_of(asdict(self.recipe.lora))

    def gap(self, requests: Sequence[Request], completions: Sequence[Completion]) -> tuple[float, float]:
        """Return the largest and the mean distance between the completions' log-probabilities and the policy's."""
        sampling = requests[0].sampling
        rows = []
        for request, completion in zip(requests, completions, strict=True):
            ids = torch.tensor([*request.prompt, *completion.ids])
            labels = ids.clone()
            labels[: len(request.prompt)] = -100
            count = len(ids) - 1
            places = {"position_ids": torch.arange(count), "seq_ids": torch.zeros(count, dtype=torch.int64)}
            rows.append({"input_ids": ids[:-1], "labels": labels[1:], **places})
        filters = TrainingSamplingParams(sampling.top_k, sampling.top_p, sampling.temperature or 1.0)
        values = self.policy.logprobs(collate(rows), 8, filters)
        distances = []
        for row, request, completion in zip(values, requests, completions, strict=True):
            start = len(request.prompt) - 1
            mine = row[start : start + len(completion.ids)]
            distances.append((mine.double() - torch.tensor(completion.logprobs, dtype=torch.float64)).abs())
        every = torch.cat(distances)
        return every.max().item(), every.mean().item()

    def greedy(self, requests: Sequence[Request]) -> list[Completion]:
        return NativeEngine(self.policy).generate(requests)

    @torch.no_grad()
    def change(self, seed: int, keep: str | None = None) -> None:
        """Move what is trained by random numbers, but weights with `keep` in their names."""
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.policy.model.named_parameters():
            if parameter.requires_grad and not (keep and keep in name):
                held = local_tensor(parameter)
                noise = torch.randn(held.shape, generator=generator)
                size = held.abs().mean().item() or 1.0  # B of an adapter begins with zeros
                held.add_(noise * 0.05 * size)


def prompts_file(root: Path) -> Path:
    file = root / "prompts.jsonl"
    if not file.exists():
        write_prompts(file)
    return file


def requests_of(sampling: SamplingParams, prompts: int = 4, samples: int = 3, seed: int = 5) -> list[Request]:
    """Return requests for some samples of some prompts of ids below the tiny models' vocabulary."""
    texts = [[(7 * place + 3 * token) % 60 + 2 for token in range(3 + 2 * place)] for place in range(prompts)]
    pairs = itertools.product(enumerate(texts), range(samples))
    return [Request(text, sampling, seed, place, sample) for (place, text), sample in pairs]


def engine_of(server, **settings) -> HttpEngine:
    return HttpEngine([server.url], api_key_file=server.key_file, **{"timeout": 120.0, **settings})


def check_draws(report: Report, name: str, trainer: Trainer, engine: HttpEngine) -> None:
    """Token ids, log-probabilities, greedy completions, n, seeds and stop tokens of a server of the trainer's model."""
    for words, sampling in {
        "temperature 1": SamplingParams(12),
        "temperature 0.7": SamplingParams(12, 0.7),
        "temperature 0.8, top-k 9, top-p 0.9": SamplingParams(12, 0.8, 9, 0.9),
    }.items():
        requests = requests_of(sampling)
        drawn = engine.generate(requests)
        largest, _ = trainer.gap(requests, drawn)
        tokens = sum(len(completion.ids) for completion in drawn)
        report.near(f"{name} logprobs", f"{words}: server's and trainer's, {tokens} tokens", largest)

    requests = requests_of(SamplingParams(16, 0.0), samples=1)
    drawn, expected = engine.generate(requests), trainer.greedy(requests)
    same = sum(first.ids == second.ids for first, second in zip(drawn, expected, strict=True))
    report.holds(f"{name} greedy", "completions that are the native engine's, token for token", same == len(drawn),
                 f"{same} of {len(drawn)}")  # fmt: skip

    requests = requests_of(SamplingParams(12), prompts=2, samples=4)
    drawn, again = engine.generate(requests), engine.generate(requests)
    alone = [engine.generate([request])[0] for request in requests]
    report.holds(f"{name} n", "samples of a prompt that differ", len({tuple(c.ids) for c in drawn[:4]}) == 4)
    same = sum(first.ids == second.ids for first, second in zip(drawn, again, strict=True))
    report.holds(f"{name} seeds", "samples drawn again that are the same", same == 8, f"{same} of 8")
    same = sum(first.ids == second.ids for first, second in zip(drawn, alone, strict=True))
    report.holds(f"{name} seeds alone", "samples that are the same in a call of their own", same == 8, f"{same} of 8")

    stop = drawn[0].ids[4]
    end = drawn[0].ids.index(stop) + 1
    stopped = engine.generate([replace(requests[0], sampling=SamplingParams(12, stop_ids=(stop,)))])[0]
    ok = stopped.ids == drawn[0].ids[:end] and stopped.finish == "stop"
    figure = f"{len(stopped.ids)} tokens, {stopped.finish}"
    report.holds(f"{name} stop token", "a completion ends with it, and keeps it", ok, figure)


def check_stop_text(report: Report, name: str, trainer: Trainer, engine: HttpEngine, decode: Callable) -> None:
    """A stop text: the completion ends with the token that completes it, as the native engine's."""
    request = requests_of(SamplingParams(24, 0.0), prompts=1, samples=1)[0]
    ids = engine.generate([request])[0].ids
    text = decode(ids[2:4])
    sampling = SamplingParams(24, 0.0, stop=(text,))
    requests = [replace(request, sampling=sampling)]
    native = NativeEngine(trainer.policy, decode=decode)
    (drawn,), (expected,) = engine.generate(requests), native.generate(requests)
    ok = drawn.ids == expected.ids and drawn.finish == expected.finish == "stop"
    figure = f"{len(drawn.ids)} and {len(expected.ids)} tokens"
    report.holds(f"{name} stop text", f"the native engine's completion up to {text!r}", ok, figure)


def check_weights(
    report: Report, name: str, trainer: Trainer, engine: HttpEngine, shared: Path, most: float = NEAR
) -> None:
    """Two versions by directory, each drawn with after it was given. most: between server and trainer.

    vLLM on CPUs packs some weights into another layout when it starts, and not again: the experts of a mixture, and the
    head where it is the embedding too. That is told, and no failure.
    """
    publisher = DirectoryPublisher(shared, trainer.directory, engine)
    requests = requests_of(SamplingParams(12))
    config = trainer.policy.model.config
    is_tied = config.tie_word_embeddings
    for version in (1, 2):
        before = trainer.gap(requests, engine.generate(requests))[0]
        trainer.change(version, keep="embed_tokens" if is_tied else None)
        _, old = trainer.gap(requests, engine.generate(requests))
        publisher.publish(trainer.policy.model, version)
        new, _ = trainer.gap(requests, engine.generate(requests))
        report.apart(f"{name} weights {version}", "server of the old weights and trainer of the new, in the mean", old)
        if config.experts is not None and new > most:
            report.not_here(f"{name} weights {version}", f"{new:.2g} apart: vLLM on CPUs packs experts when it starts")
            return
        report.near(f"{name} weights {version}", "the same when they were sent by directory", max(before, new), most)
    if is_tied:
        trainer.change(3)
        publisher.publish(trainer.policy.model, 3)
        new, _ = trainer.gap(requests, engine.generate(requests))
        if new <= most:
            report.near(f"{name} weights 3", "the same for the embedding, which is the head too", new, most)
        else:
            report.not_here(f"{name} weights 3", f"{new:.2g} apart: vLLM on CPUs packs a tied head when it starts")


def check_adapter(report: Report, name: str, root: Path, server, base: Trainer, *overrides: str) -> None:
    """Two versions of an adapter by name, beside calls to the base."""
    trainer = Trainer(root, base.directory, "lora={rank: 4, alpha: 12}", *overrides)
    engine = engine_of(server)
    publisher = AdapterPublisher(root / f"{name}-adapter", trainer.directory, trainer.adapter, engine)
    requests = requests_of(SamplingParams(12))
    for version in (1, 2):
        trainer.change(version)
        _, old = trainer.gap(requests, engine.generate(requests))
        publisher.publish(trainer.policy.model, version)
        drawn = engine.generate(requests)
        new, _ = trainer.gap(requests, drawn)
        report.apart(f"{name} adapter {version}", "server of the old weights and trainer of the new, in the mean", old)
        report.near(f"{name} adapter {version}", "the same when it was sent by name", new)
        versions = {completion.version for completion in drawn}
        report.holds(f"{name} adapter {version}", "completions say the version", versions == {version})


def grpo(root: Path, name: str, model: Path, servers: Sequence, *overrides: str) -> subprocess.Popen:
    """Start `dtrain run grpo` over servers: 16 completions a rollout, each rollout two steps; its output in a file."""
    urls = ", ".join(server.url for server in servers)
    settings = [
        f"run.name={name}",
        f"run.dir={root / 'runs'}",
        f"model.path={model}",
        f"data.train.path={prompts_file(root)}",
        "data.max_length=64",
        "train={steps: 8, global_batch: 8, micro_batch: 8, dtype: float32}",
        "optimizer.lr=0.02",
        "scheduler.warmup_steps=0",
        "checkpoint={every: null, export: none}",
        "metrics.tensorboard=false",
        "grpo.prompts_per_step=4",
        "grpo.group_size=4",
        "grpo.rewards=[{fn: tests.methods.judges.even}]",
        "grpo.sampling.max_new_tokens=8",
        "grpo.engine=http",
        f"grpo.server.urls=[{urls}]",
        f"grpo.server.api_key_file={servers[0].key_file}",
        *overrides,
    ]
    command = [sys.executable, "-m", "dtrain", "run", "grpo", *settings]
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with (root / f"{name}.log").open("w") as out:
        return subprocess.Popen(command, stdout=out, stderr=out, env=variables, cwd=root)


def finish(process: subprocess.Popen, seconds: float = 400.0) -> int:
    """Return the status of a run; None of its time is left after `seconds`."""
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()
    finally:
        with suppress(ProcessLookupError):
            process.kill()
