"""Checks with a real model: SmolLM2-135M-Instruct trained, measured and exported, in rows of one table.

    tools/check_real                   every row that has no result of its commands yet; then docs/real.md
    tools/check_real --list            the rows and their commands
    tools/check_real --again sft-lora  that row anew, and the rows that rest on it

A row is a list of shell commands, which a reader can repeat, and a sentence made from what they wrote. Results stand in
build/real/rows; a row whose commands, or those of a row it rests on, have changed is run again. An interrupted run goes
on from its last checkpoint. Runs lie in runs/real-*.
"""

import argparse
import hashlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUILD, RUNS, PAGE = ROOT / "build/real", ROOT / "runs", ROOT / "docs/real.md"
MODEL = "build/SmolLM2-135M-Instruct"
EVAL = "build/real/heldout.jsonl --reward tools.real_tasks.exact --max-new-tokens 32 --json"
SHAPE = "train.dtype=float32 train.activation_checkpointing=none scheduler.warmup_steps=5 launch.device=cpu"
SFT = f"dtrain run sft data.train.path=build/real/train.jsonl data.max_length=512 train.epochs=null {SHAPE}"


@dataclass(frozen=True)
class Row:
    """A row of the table. title: of what; result: its sentence, read when the commands are done; needs: names of the
    rows whose files it reads."""

    title: str
    commands: tuple[str, ...]
    result: Callable[[], str]
    needs: tuple[str, ...] = ()
    runs: tuple[str, ...] = field(default=())  # the names of its runs


def written(name: str) -> dict:
    """Return the JSON object in the file `name` of build/real; lines before it may say what was installed."""
    text = (BUILD / name).read_text(encoding="utf-8")
    return json.loads(text[text.index("{") :])


def accuracy(name: str) -> float:
    return 100 * written(f"{name}.json")["rewards"]["exact"]


def steps_of(run: str) -> list[dict]:
    lines = (RUNS / run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [row for line in lines if "loss" in (row := json.loads(line))]


def trained(run: str, field_name: str = "loss", label: str = "loss") -> str:
    """Return steps, the mean of a field over the first and the last five of them, speed and memory of a run."""
    rows = steps_of(run)
    first, last = (statistics.mean(row[field_name] for row in part) for part in (rows[:5], rows[-5:]))
    speed = statistics.median(row["tokens_per_sec"] for row in rows[1:])
    memory = max(row["mem_gib"] for row in rows)
    return f"{len(rows)} steps; {label} {first:.3f} → {last:.3f}; {speed:.0f} tokens/s; {memory:.1f} GiB a process"


def accuracies(before: str, after: str) -> str:
    return f"right answers {accuracy(before):.1f} % → {accuracy(after):.1f} %"


def equal(name: str) -> str:
    result = written(f"{name}.json")
    count = result["prompts"]
    return (
        f"of {count} prompts {result['equal_ids']} have equal token ids, {result['equal_answers']} equal greedy answers"
        f"; relative difference of logits {result['logits']:.1e}"
    )


def same_losses(*runs: str) -> str:
    """Return how far the losses of runs are from those of the first."""
    alone = [row["loss"] for row in steps_of(runs[0])]
    texts = []
    for run in runs[1:]:
        losses = [row["loss"] for row in steps_of(run)]
        gap = max(abs(mine - right) / abs(right) for mine, right in zip(losses, alone, strict=True))
        texts.append(f"{run.removeprefix('real-mesh-')} {gap:.1e}")
    return f"{len(alone)} steps; relative difference of losses from one process: {', '.join(texts)}"


def beside_trl() -> str:
    result = written("trl.json")
    ours, theirs = result["dtrain"][0], result["trl"][0]
    return (
        f"relative difference of losses {result['largest_relative_loss_difference']:.1e} (the last is "
        f"{result['last_loss']:.3f}); dtrain {ours['tokens_per_sec']:.0f} tokens/s, {ours['peak_memory_gib']:.1f} GiB; "
        f"TRL with PEFT {theirs['tokens_per_sec']:.0f} tokens/s, {theirs['peak_memory_gib']:.1f} GiB"
    )


def drawn_reward(name: str) -> float:
    return written(f"{name}.json")["rewards"]["scored"]


# The one of the ten tasks whose draws are right and wrong most evenly: who of several people likes a thing.
NEEDLES = """grep '"task": "needle_haystack"' build/real/{0}.jsonl > build/real/needles-{0}.jsonl"""
GRPO_EVAL = (
    "build/real/needles-heldout.jsonl --reward tools.real_tasks.scored --samples 8 --temperature 1.0 "
    "--max-new-tokens 24 --json"
)
ROWS = {
    "tasks": Row(
        "Ten tasks of reasoning-gym",
        (f"tools/real-model {MODEL}", "python tools/real_tasks.py build/real"),
        lambda: f"{len((BUILD / 'train.jsonl').read_text().splitlines())} rows to train on, 200 held out",
    ),
    "logits": Row(
        "The model in dtrain and in transformers",
        (f"python tools/real_equal.py {MODEL} {MODEL} build/real/heldout.jsonl > build/real/logits.json",),
        lambda: equal("logits"),
        ("tasks",),
    ),
    "before": Row(
        "The model before training",
        (f"dtrain eval {MODEL} {EVAL} > build/real/before.json",),
        lambda: f"right answers {accuracy('before'):.1f} %",
        ("tasks",),
    ),
    "sft-lora": Row(
        "SFT of an adapter of rank 16, two processes",
        (
            f"{SFT} model.path={MODEL} run.name=real-lora lora={{}} optimizer.lr=1e-3 train.steps=60 "
            "train.global_batch=4 train.micro_batch=2 launch.nproc=2",
            f"dtrain eval runs/real-lora {EVAL} > build/real/lora.json",
        ),
        lambda: f"{accuracies('before', 'lora')}; {trained('real-lora')}",
        ("before",),
        ("real-lora",),
    ),
    "sft-full": Row(
        "SFT of every weight, two processes",
        (
            f"{SFT} model.path={MODEL} run.name=real-full optimizer.lr=1e-4 train.steps=60 "
            "train.global_batch=4 train.micro_batch=2 launch.nproc=2",
            f"dtrain eval runs/real-full {EVAL} > build/real/full.json",
        ),
        lambda: f"{accuracies('before', 'full')}; {trained('real-full')}",
        ("before",),
        ("real-full",),
    ),
    "export": Row(
        "The adapter merged, in transformers",
        (
            "rm -rf build/real/merged && dtrain export runs/real-lora build/real/merged",
            "python tools/real_equal.py runs/real-lora build/real/merged build/real/heldout.jsonl "
            "> build/real/export.json",
        ),
        lambda: equal("export"),
        ("sft-lora",),
    ),
    "vllm": Row(
        "The adapter merged, in vLLM",
        (
            "python tools/real_peers.py vllm runs/real-lora build/real/merged build/real/heldout.jsonl "
            "> build/real/vllm.json",
        ),
        lambda: "of {prompts} prompts {equal_answers} have equal greedy answers".format(**written("vllm.json")),
        ("export",),
    ),
    "gguf": Row(
        "The adapter merged, as a GGUF file in llama.cpp",
        (
            "rm -f build/real/merged.gguf",
            "dtrain export runs/real-lora build/real/merged.gguf --type f32",
            "python tools/real_peers.py gguf build/real/merged build/real/merged.gguf > build/real/gguf.txt",
        ),
        lambda: (BUILD / "gguf.txt").read_text(encoding="utf-8").splitlines()[-1],
        ("export",),
    ),
    "dpo": Row(
        "DPO on pairs of the adapted model's own right and wrong answers",
        (
            "dtrain eval runs/real-lora build/real/train.jsonl --limit 400 --samples 4 --temperature 1.0 "
            "--max-new-tokens 24 --reward tools.real_tasks.exact --out build/real/drawn.jsonl",
            "python tools/real_tasks.py build/real --pairs build/real/drawn.jsonl",
            f"dtrain run dpo model.path=build/real/merged data.train.path=build/real/pairs.jsonl run.name=real-dpo "
            f"lora={{}} optimizer.lr=1e-4 dpo.sft_weight=0.2 data.max_length=256 train.epochs=null train.steps=15 "
            f"train.global_batch=8 train.micro_batch=4 launch.nproc=2 {SHAPE}",
            f"dtrain eval runs/real-dpo {EVAL} > build/real/dpo.json",
        ),
        lambda: f"{accuracies('lora', 'dpo')}; {trained('real-dpo', 'accuracy', 'pairs ranked right')}",
        ("export",),
        ("real-dpo",),
    ),
    "grpo": Row(
        "GRPO of the adapted model on one task, needle_haystack, with its own scorer",
        (
            NEEDLES.format("train"),
            NEEDLES.format("heldout"),
            f"dtrain eval build/real/merged {GRPO_EVAL} > build/real/scored-before.json",
            "dtrain run grpo model.path=build/real/merged data.train.path=build/real/needles-train.jsonl "
            "run.name=real-grpo lora={} optimizer.lr=3e-4 'grpo.rewards=[{fn: tools.real_tasks.scored}]' "
            "grpo.prompts_per_step=8 grpo.group_size=8 grpo.sampling.max_new_tokens=24 data.max_length=256 "
            "train.epochs=null train.steps=20 "
            f"scheduler.name=linear train.global_batch=64 train.micro_batch=8 launch.nproc=2 {SHAPE}",
            f"dtrain eval runs/real-grpo {GRPO_EVAL} > build/real/scored-after.json",
        ),
        lambda: (
            f"mean score of 8 answers to each of 20 held-out questions {drawn_reward('scored-before'):.3f} → "
            f"{drawn_reward('scored-after'):.3f}; {trained('real-grpo', 'reward_mean', 'mean reward')}"
        ),
        ("export",),
        ("real-grpo",),
    ),
    "distill": Row(
        "Distillation of the fully trained model into the first one",
        (
            f"dtrain run distill model.path={MODEL} distill.teacher=runs/real-full/export "
            "data.train.path=build/real/train.jsonl run.name=real-distill lora={} optimizer.lr=1e-3 "
            "data.max_length=512 train.epochs=null train.steps=30 train.global_batch=4 train.micro_batch=2 "
            f"launch.nproc=2 {SHAPE}",
            f"dtrain eval runs/real-distill {EVAL} > build/real/distill.json",
        ),
        lambda: f"{accuracies('before', 'distill')} (its teacher {accuracy('full'):.1f} %); {trained('real-distill')}",
        ("sft-full",),
        ("real-distill",),
    ),
    "meshes": Row(
        "One SFT run on one process, on tp 3, and on dp 2 × cp 2",
        tuple(
            f"{SFT} model.path={MODEL} run.name=real-mesh-{name} data.max_length=256 scheduler.warmup_steps=0 "
            f"optimizer.lr=1e-4 train.steps=3 train.global_batch=2 checkpoint.every=null checkpoint.export=none {mesh}"
            for name, mesh in {
                "one": "train.micro_batch=2 launch.nproc=1",
                "tp3": "train.micro_batch=2 launch.nproc=3 parallel.tp=3",
                "dp2cp2": "train.micro_batch=1 launch.nproc=4 parallel.cp=2",
            }.items()
        ),
        lambda: same_losses("real-mesh-one", "real-mesh-tp3", "real-mesh-dp2cp2"),
        ("tasks",),
        ("real-mesh-one", "real-mesh-tp3", "real-mesh-dp2cp2"),
    ),
    "trl": Row(
        "One adapter trained by dtrain and by TRL with PEFT: the same rows, one process each",
        (
            f"python tools/bench_sft.py --peer trl --model {MODEL} --rows build/real/train.jsonl --rounds 1 --steps 10 "
            "--warmup 2 > build/real/trl.json",
        ),
        beside_trl,
        ("tasks",),
    ),
}


def digest_of(name: str) -> str:
    """Return a digest of the commands of a row and of those that it rests on."""
    row = ROWS[name]
    parts = [*row.commands, *map(digest_of, row.needs)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def result_of(name: str) -> dict | None:
    """Return the result of a row that stands; None where there is none, or one of other commands."""
    path = BUILD / "rows" / f"{name}.json"
    result = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
    return result if result is not None and result["digest"] == digest_of(name) else None


def forget(name: str) -> None:
    """Delete the results, and the runs, of a row and of those that rest on it."""
    (BUILD / "rows" / f"{name}.json").unlink(missing_ok=True)
    for run in ROWS[name].runs:
        shutil.rmtree(RUNS / run, ignore_errors=True)
    for other, row in ROWS.items():
        if name in row.needs:
            forget(other)


def run_row(name: str) -> dict:
    """Run the commands of a row, write its result and return it. Exits where a command fails."""
    row, began = ROWS[name], time.monotonic()
    stale, digest = BUILD / "rows" / f"{name}.digest", digest_of(name)
    stale.parent.mkdir(parents=True, exist_ok=True)
    if not stale.is_file() or stale.read_text() != digest:
        forget(name)  # runs of other commands
        stale.write_text(digest)
    bins = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PATH": bins}
    with (BUILD / f"{name}.log").open("a") as log:
        for command in row.commands:
            print(f"tools/check_real: {name}: {command}", flush=True)
            done = subprocess.run(["bash", "-c", command], cwd=ROOT, env=environ, stderr=log)
            if done.returncode:
                sys.exit(f"tools/check_real: {name}: the command ended with {done.returncode}; {log.name} says why")
    result = {"digest": digest, "result": row.result(), "minutes": round((time.monotonic() - began) / 60, 1)}
    (BUILD / "rows" / f"{name}.json").write_text(json.dumps(result), encoding="utf-8")
    return result


def page(results: dict[str, dict]) -> str:
    """Return docs/real.md: the table, and the commands of each row."""
    table = "\n".join(
        f"| {ROWS[name].title} | {result['result']} | {result['minutes']} |" for name, result in results.items()
    )
    commands = "\n\n".join("\n".join([f"# {name}", *ROWS[name].commands]) for name in results)
    total = sum(result["minutes"] for result in results.values())
    return f"""# A real model

`tools/check_real` runs all of this and writes this page. The tool fetches the model, SmolLM2-135M-Instruct (weights of
4 bits, expanded to float32), and writes the data: ten tasks of reasoning-gym. All rows took {total:.0f} minutes on two
CPU cores, one thread a process, after the downloads. They need 10 GiB of memory. Arithmetic is float32.

An answer is right if its task's own scorer gives the full score. It contains nothing else and has at most 32 tokens.
Shares are of 200 held-out questions, answered greedily. Speeds are medians of steps. The minutes of a row include its
evaluation. The machine was also used for other work.

| | result | minutes |
| --- | --- | --- |
{table}

The commands of each row. The first lines make the environment:

```text
tools/setup && source .venv/bin/activate && pip install -U 'pip>=25.1' && pip install --group real
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false

{commands}
```
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--list", action="store_true", help="print the rows and their commands")
    parser.add_argument("--only", choices=ROWS, help="this row, and those it rests on")
    parser.add_argument("--again", choices=ROWS, help="forget the result of this row first")
    options = parser.parse_args()
    if options.list:
        for name, row in ROWS.items():
            print("\n  ".join([f"{name}: {row.title}", *row.commands]))
        return
    if options.again:
        forget(options.again)
    results: dict[str, dict] = {}

    def complete(name: str) -> None:
        if name not in results:
            for needed in ROWS[name].needs:
                complete(needed)
            results[name] = result_of(name) or run_row(name)
            print(f"{name}: {results[name]['result']} ({results[name]['minutes']} minutes)", flush=True)

    for name in [options.only] if options.only else ROWS:
        complete(name)
    if options.only is None:
        PAGE.write_text(page(results), encoding="utf-8")
        print(f"tools/check_real: wrote {PAGE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
