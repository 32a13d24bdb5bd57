"""Peaks of GPU memory that others have published, beside what `dtrain plan` says of the same step.

    .venv/bin/python tools/plan_peaks.py [WORD ...]     # JSON, of the runs that have these words in their names
    .venv/bin/python tools/plan_peaks.py --table        # the table of docs/gpus.md

plan_peaks.toml has the runs. All of them take about two minutes, and no GPU. A plan counts what is allocated; it is
compared as it is with figures of what is reserved too, which are higher. tests/plan/test_published_peaks.py holds some
runs to the bounds.
"""

import json
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from torch import Tensor
from torch.nn import functional

from dtrain.commands.plan.hardware import GPUS
from dtrain.commands.plan.plan import resolve_plan
from dtrain.commands.plan.step import plan_step
from dtrain.methods.sft import SftMethod
from dtrain.training import load_recipe
from tests.models.published import CONFIGS

PUBLISHED: dict[str, Any] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
PLAIN = ("parallel.optimizer_offload=false", "parallel.reduce_each=false", "train.activation_offload=false")
PLAIN += ("train.activation_checkpointing=none", "train.tile=none")
"""Keys of a run of which nothing else is said."""
MEDIAN, WORST = 0.06, 0.15  # shares that plans may be off
HEAD = ("published by", "counter", "runs", "off by: median", "worst", "of this")


@dataclass(frozen=True)
class Run:
    """A published peak. rows: of a micro-batch. logits: those that a loss over whole logits keeps until the backward is
    done, half or float32; None for a loss by tiles. why: reason of a miss, where there is one."""

    source: str
    path: str
    gib: float
    model: str
    gpus: int
    gpu: str
    length: int
    rows: int
    micro_batches: int
    keys: tuple[str, ...]
    logits: str | None
    why: str | None


def runs(*words: str) -> Iterator[Run]:
    """Yield the runs that have each of `words` in their source's name or path."""
    for source in PUBLISHED["source"]:
        for entry in source["run"]:
            path, *figures = entry["is"]
            keys = (*PLAIN, *source["keys"], *entry.get("keys", ()))
            why = entry.get("why", source.get("why"))
            run = Run(source["name"], source["path"] + path, *figures, keys, source.get("logits"), why)
            if all(word in f"{run.source} {run.path}" for word in words):
                yield run


class WholeLogits(SftMethod):
    """SFT with the loss of programs that hold all logits [N, V] at once, and a copy in float32.

    What a variable of theirs keeps lives until the next micro-batch's takes its place."""

    def loss(self, source, batch, global_seqs, global_tokens):
        hidden, weight, _ = source.head_input
        logits = functional.linear(hidden, weight)  # [N, V]
        wide = logits.float()  # [N, V]
        total = functional.cross_entropy(wide, batch["labels"].flatten(), reduction="sum")
        self.kept = self.keep(logits, wide)
        ones = torch.ones((), device=total.device)
        return total / global_tokens, {"lost": total.detach(), "trained": ones, "correct": ones}

    def keep(self, logits: Tensor, wide: Tensor) -> Tensor:
        raise NotImplementedError


class KeepsHalf(WholeLogits):
    """As transformers, whose output has the logits in the model's dtype."""

    def keep(self, logits: Tensor, wide: Tensor) -> Tensor:
        return logits


class KeepsFloat32(WholeLogits):
    """As prime-rl, which casts the output."""

    def keep(self, logits: Tensor, wide: Tensor) -> Tensor:
        return wide


METHODS = {None: SftMethod, "half": KeepsHalf, "float32": KeepsFloat32}


def planned_gib(run: Run) -> float:
    """Return the planned peak of a rank in the step of `run`."""
    config = dict(PUBLISHED["model"][run.model])
    base = config.pop("base")
    batch = run.rows * run.micro_batches * run.gpus
    keys = [f"data.max_length={run.length}", f"train.micro_batch={run.rows}", f"train.global_batch={batch}", *run.keys]
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(CONFIGS[base] | config))
        recipe = load_recipe("sft", [f"model.path={directory}", "data.train.path=data.jsonl", *keys])
        spec = resolve_plan(recipe, run.gpus, "cuda", GPUS[run.gpu])
    measured = replace(spec, method_class=METHODS[run.logits])
    return plan_step(measured).peak / 2**30


def report(run: Run) -> dict[str, Any]:
    planned = planned_gib(run)
    figures = {"published": run.gib, "planned": round(planned, 3), "off": round(planned / run.gib - 1, 4)}
    why = {"why": run.why} if run.why is not None and abs(figures["off"]) > MEDIAN else {}
    return {"source": run.source, "path": run.path, "model": run.model, "gpus": run.gpus, **figures, **why}


def summary(reports: Sequence[dict[str, Any]]) -> dict[str, float]:
    shares = [abs(entry["off"]) for entry in reports]
    return {"count": len(shares), "median": median(shares), "worst": max(shares)}


def table(reports: Sequence[dict[str, Any]]) -> Iterator[list[str]]:
    """Yield the rows of docs/gpus.md: of each source, then of all."""
    for source in PUBLISHED["source"]:
        own = summary([entry for entry in reports if entry["source"] == source["name"]])
        yield [source["name"], f"`{source['measures']}`", *_cells(own), source["note"]]
    settings = {replace(run, source="", path="", gib=0.0, gpu="", why=None) for run in runs()}
    yield ["all", "", *_cells(summary(reports)), f"{len(settings)} settings, some of them on several GPUs"]


def _cells(own: dict[str, float]) -> list[str]:
    return [str(own["count"]), f"{own['median']:.1%}", f"{own['worst']:.1%}"]


def main(*words: str) -> None:
    as_table = words == ("--table",)
    reports = [report(run) for run in runs(*(() if as_table else words))]
    if as_table:
        for row in (HEAD, ["---"] * len(HEAD), *table(reports)):
            print("| " + " | ".join(row) + " |")
    else:
        print(json.dumps({"runs": reports, **summary(reports)}, indent=1))


if __name__ == "__main__":
    main(*sys.argv[1:])
