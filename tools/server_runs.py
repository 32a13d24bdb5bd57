"""Checks of a server of another project by whole runs of GRPO, by its end within a rollout, and by wrong flags."""

import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from server_checks import Report, Trainer, engine_of, finish, grpo, requests_of

from dtrain.base.errors import UserError
from dtrain.inference.request import SamplingParams
from dtrain.rl.remote.engine import adapter_refusal
from dtrain.rl.remote.http import HttpEngine
from dtrain.rl.remote.publish import AdapterPublisher, DirectoryPublisher
from dtrain.rl.routed import RoutedExpertsReader

DIRECTORY = "grpo.server.weights=directory"


def rows(root: Path, name: str, file: str) -> list[dict]:
    path = root / "runs" / name / file
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def steps(root: Path, name: str) -> list[dict]:
    return [row for row in rows(root, name, "metrics.jsonl") if "loss" in row]


def ages(root: Path, name: str) -> list[int]:
    """Return how many optimizer steps each completion's weights were behind when its updates began."""
    return [row["step"] - 1 - row["version"] for row in rows(root, name, "samples.jsonl")]


def log_of(root: Path, name: str) -> str:
    return (root / f"{name}.log").read_text(errors="replace")


def failure(root: Path, name: str, status: int) -> str:
    return log_of(root, name)[-500:] if status else ""


def check_runs(report: Report, root: Path, model: Path, server) -> None:
    """Weights by adapter and by directory, each also with rollouts that are drawn while training goes on.

    Adapters come first: they are of the weights that the server began with.
    """
    ways = {"adapter": ("lora={rank: 4, alpha: 12}",), "directory": (DIRECTORY,)}
    for way, overrides in ways.items():
        name = f"run {way}"
        status = finish(grpo(root, way, model, [server], *overrides))
        report.holds(name, "8 steps, the run ends well", status == 0, failure(root, way, status))
        largest = max((row["mismatch_kl"] for row in steps(root, way)), default=float("inf"))
        report.near(name, "mismatch_kl of sampler and trainer, at most", largest, 1e-7)
        report.holds(name, "completions are of the weights of their step", {*ages(root, way)} == {0})
        moved = len({row["loss"] for row in steps(root, way)})
        report.holds(name, "losses that differ", moved == 8, f"{moved} of 8")

        ahead = f"{way}-ahead"
        more = ("grpo.max_off_policy_steps=4", "train.steps=12", "run.seed=3")
        status = finish(grpo(root, ahead, model, [server], *overrides, *more))
        compared = "12 steps with the next rollout under way, the run ends well"
        report.holds(f"{name} ahead", compared, status == 0, failure(root, ahead, status))
        behind = ages(root, ahead)
        ok = bool(behind) and max(behind) <= 4 and max(behind) > 0 and min(behind) == 0
        figure = f"{min(behind, default=0)} to {max(behind, default=0)}"
        report.holds(f"{name} ahead", "completions are 0 to 4 steps old, and some are old", ok, figure)
    report.tells("run adapter", "auto chose the adapter", log_of(root, "adapter"), "only the adapter")
    finish(grpo(root, "changed", model, [server], *ways["adapter"]))
    compared = "an adapter on a server that got whole weights since"
    report.tells("run adapter", compared, log_of(root, "changed"), "engine and trainer disagree")


def check_two(report: Report, root: Path, model: Path, servers: Sequence) -> None:
    """Two servers share a run; one is killed in it, and the run goes on."""
    run = grpo(root, "two", model, servers, DIRECTORY, "train.steps=60", "checkpoint.every=null")
    until = time.monotonic() + 200
    while len(steps(root, "two")) < 8 and run.poll() is None and time.monotonic() < until:
        time.sleep(0.1)
    killed_at = len(steps(root, "two"))
    servers[0].stop()
    status = finish(run)
    served = [server.log.read_text(errors="replace").count("POST /v1/completions") for server in servers]
    report.holds("two", "both drew", min(served) > 0, f"{served[0]} and {served[1]} calls")
    compared = f"one killed after step {killed_at} of 60: the run ends well"
    report.holds("two", compared, status == 0 and 0 < killed_at < 60, failure(root, "two", status))
    largest = max((row["mismatch_kl"] for row in steps(root, "two")), default=float("inf"))
    report.near("two", "mismatch_kl of sampler and trainer, at most", largest, 1e-7)


def check_restart(report: Report, root: Path, model: Path, start: Callable) -> None:
    """A server killed within a rollout and started again, so that it has the weights that it began with."""
    server = start(None)
    try:
        server.wait()
        trainer, engine = Trainer(root, model), engine_of(server, retries=1000, timeout=200.0, concurrency=2)
        publisher = DirectoryPublisher(root / "shared", model, engine)
        trainer.change(1)
        publisher.publish(trainer.policy.model, 1)
        requests = requests_of(SamplingParams(200), prompts=24, samples=4)
        outcome: list = []

        def draw() -> None:
            try:
                outcome.append(engine.generate(requests))
            except UserError as error:
                outcome.append(error)

        drawing = threading.Thread(target=draw)
        drawing.start()
        time.sleep(2)
        server.stop()
        was_under_way = drawing.is_alive()
        server = start(server.port)
        drawing.join()
        report.holds("restart", "the server was killed within the rollout", was_under_way)
        if isinstance(outcome[0], UserError):
            report.tells(
                "restart", "weights that it began with are refused", str(outcome[0]), "may have been restarted"
            )
        else:
            report.near("restart", "server's logprobs and trainer's, at most", trainer.gap(requests, outcome[0])[0])
        server.wait()
        publisher.publish(trainer.policy.model, 2)
        short = requests_of(SamplingParams(12))
        report.near("restart", "the same after the next update", trainer.gap(short, engine.generate(short))[0])
    finally:
        server.stop()


def check_flags(report: Report, root: Path, model: Path, bare, small) -> None:
    """Flags that were left out, or are too small: each is told with the fix.

    bare: with VLLM_SERVER_DEV_MODE alone; small: without it, with adapters of rank 1 alone.
    """
    overrides = ("grpo.sampling.temperature=0.7", "train.steps=2", DIRECTORY)
    for name, server, fix in (
        ("processed_logprobs", bare, "(vLLM: --logprobs-mode processed_logprobs)"),
        ("VLLM_SERVER_DEV_MODE", small, "Start it with VLLM_SERVER_DEV_MODE=1"),
    ):
        finish(grpo(root, name, model, [server], *overrides))
        report.tells("flags", f"a run without {name}", log_of(root, name), fix)

    trainer = Trainer(root, model)
    engine = engine_of(bare)
    requests = requests_of(SamplingParams(12, 0.7))
    largest, _ = trainer.gap(requests, engine.generate(requests))
    report.apart("flags", "no processed_logprobs: server's and trainer's at temperature 0.7", largest)
    lora = Trainer(root, model, "lora={rank: 4, alpha: 12}")
    config = lora.adapter
    fix = "Start the server with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and --enable-lora --max-lora-rank 8"
    report.tells("flags", "no adapters", str(adapter_refusal(engine, config)), fix)
    publisher = AdapterPublisher(root / "adapters", model, config, engine_of(small, retries=0))
    report.refused("flags", "adapters of rank 1 alone", lambda: publisher.publish(lora.policy.model, 1), fix)

    wrong = root / "wrong-key"
    wrong.write_text("another\n")
    report.refused(
        "flags", "a wrong key", lambda: HttpEngine([bare.url], api_key_file=wrong), "grpo.server.api_key_file"
    )
    report.refused("flags", "no key", lambda: HttpEngine([bare.url]), "grpo.server.api_key_file")
    long = [replace(request, sampling=SamplingParams(400)) for request in requests[:1]]
    report.refused("flags", "a context that is too small", lambda: engine.generate(long), "--max-model-len")
    report.refused("flags", "another model's name", lambda: engine_of(bare, model="other"), "policy")
    fewer = engine_of(bare, vocab_size=9)
    report.refused(
        "flags", "a model of more tokens", lambda: fewer.generate(requests), "does it serve this very model?"
    )
    routed = RoutedExpertsReader(8, 2, (0, 1), 2)
    report.refused("flags", "no experts", lambda: engine_of(bare, routed=routed), "--enable-return-routed-experts")
