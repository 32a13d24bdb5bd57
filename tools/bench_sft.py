#!/usr/bin/env python3
"""Tokens per second, time per step and peak memory of SFT or DPO, as JSON; alone or beside TRL's trainers.

    .venv/bin/python tools/bench_sft.py quickstart launch.nproc=2 --steps 50
    .venv/bin/python tools/bench_sft.py my.yaml launch.nproc=8 train.micro_batch=2
    .venv/bin/python tools/bench_sft.py --peer trl
    .venv/bin/python tools/bench_sft.py --peer trl --method dpo
    .venv/bin/python tools/bench_sft.py --peer trl --method sft-images --steps 4 --warmup 1
    .venv/bin/python tools/bench_sft.py --peer trl --model build/SmolLM2-135M-Instruct --rows build/real/train.jsonl

With a recipe: runs it in a scratch directory without checkpoints, validation and export; the first --warmup steps do
not count.

With --peer: both sides train the same weights on the same rows in the same order (a Llama of 9 million parameters,
vocabulary 8192, 4 rows of 512 tokens a step, float32, fused AdamW, no gradient checkpointing), one thread each, taking
turns --rounds times, each in a process of its own; the losses must agree. For dpo the rows are two pairs, a prompt of
128 tokens and completions of 384, against the model that they start from, which both sides score as they go. With
sft-images the model is a tiny Qwen3-VL in float32, tower and all, and a row a prompt with a picture and its completion,
which alone is trained on both sides. The peer's processor is transformers' own on Pillow, since the registry's
torchvision does not load beside a CPU torch; no picture is resized, where Pillow and torchvision round otherwise. With
--model and --rows (chat messages) both train the same adapter of that model, which PEFT has drawn, 16 rows a step. The
peer lives in an environment that is made once under --env. A ratio above 1 means that dtrain is faster; memory is the
process's peak resident set.
"""

import argparse
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

TOOLS = Path(__file__).resolve().parent
PEERS = {"trl": ("bench_trl.py", ["trl==1.16.*", "peft==0.21.*", "pillow"])}
ROWS, LENGTH, VOCAB = 4, 512, 8192
CHAT_ROWS, CHAT_LENGTH = 16, 256  # of --rows
PROMPT = 128  # tokens of a pair's prompt
SIDES = (8, 16, 24)  # of pictures: whole pairs of patches, so that none is resized
LLAMA_9M = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": VOCAB,
    "max_position_embeddings": 1024,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "dtype": "float32",
}


def run_dtrain(recipe: str, overrides: list[str], steps: int, warmup: int, environ: dict[str, str]) -> dict:
    """Run a recipe for warmup + steps and read its metrics.jsonl."""
    with tempfile.TemporaryDirectory() as scratch:
        fixed = [
            f"run.dir={scratch}",
            "run.name=bench",
            f"train.steps={warmup + steps}",
            "train.epochs=null",
            "train.validate_every=null",
            "checkpoint.every=null",
            "checkpoint.export=none",
            "metrics.tensorboard=false",
            "metrics.wandb=null",
        ]
        command = [sys.executable, "-m", "dtrain", "run", recipe, *overrides, *fixed]
        finished = subprocess.run(command, env=environ, capture_output=True, text=True)
        if finished.returncode:
            raise SystemExit(f"{' '.join(command)}\nfailed:\n{finished.stdout}{finished.stderr}")
        lines = Path(scratch, "bench", "metrics.jsonl").read_text().splitlines()
        settled = Path(scratch, "bench", "config.yaml").read_text()
    rows = [json.loads(line) for line in lines][warmup:]
    seconds = sum(row["step_time"] for row in rows)
    return {
        "processes": int(re.search(r"nproc: (\d+)", settled)[1]),
        "steps": len(rows),
        "tokens_per_sec": round(sum(row["tokens"] for row in rows) / seconds, 1),
        "step_time": round(statistics.median(row["step_time"] for row in rows), 5),
        "peak_memory_gib": round(max(row["mem_gib"] for row in rows), 4),
        "losses": [row["loss"] for row in rows],
    }


def make_environment(directory: Path, packages: list[str]) -> Path:
    """The peer's Python; made where it is not there."""
    python = directory / "bin" / "python"
    wanted = "\n".join([*packages, sys.version])
    stamp = directory / "installed"
    if not (stamp.is_file() and stamp.read_text() == wanted):
        print(f"making {directory} with {', '.join(packages)}", file=sys.stderr)
        venv.create(directory, with_pip=True, clear=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *packages], check=True)
        stamp.write_text(wanted)
    return python


def write_case(directory: Path, rows: int, method: str) -> None:
    """The model with random weights, a word-level tokenizer and the data: rows.jsonl of tokens, and for dpo text.jsonl,
    the same pairs as words for the peer."""
    import torch
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, models, pre_tokenizers

    from dtrain.models import build, init_weights, parse_config

    (directory / "config.json").write_text(json.dumps(LLAMA_9M))
    model = build(parse_config(LLAMA_9M), dtype=torch.float32)
    init_weights(model, 0)
    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    words = Tokenizer(models.WordLevel({f"w{index:04}": index for index in range(VOCAB)}, unk_token="w0002"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(directory / "tokenizer.json"))
    special = {"bos_token": "w0000", "eos_token": "w0001", "pad_token": "w0001"}  # no other word begins with these
    names = {"tokenizer_class": "PreTrainedTokenizerFast", **special}
    (directory / "tokenizer_config.json").write_text(json.dumps(names))
    draw = random.Random(0)

    def ids(count: int) -> list[int]:
        return [draw.randrange(2, VOCAB) for _ in range(count)]

    with (directory / "rows.jsonl").open("w") as file, (directory / "text.jsonl").open("w") as words_file:
        if method == "sft":
            for _ in range(rows):
                tokens = ids(LENGTH)
                file.write(json.dumps({"input_ids": tokens, "labels": tokens}) + "\n")
            return
        for _ in range(rows // 2):
            completions = ([*ids(LENGTH - PROMPT - 1), 1] for _ in range(2))  # each ends with EOS, as the peer wants it
            pair = dict(zip(("prompt", "chosen", "rejected"), (ids(PROMPT), *completions), strict=True))
            file.write(json.dumps({f"{name}_ids": tokens for name, tokens in pair.items()}) + "\n")
            text = {name: " ".join(f"w{token:04}" for token in tokens) for name, tokens in pair.items()}
            words_file.write(json.dumps({**text, "prompt": text["prompt"] + " "}) + "\n")


def write_pictures(directory: Path, rows: int) -> None:
    """The tiny Qwen3-VL with random weights, and rows.jsonl of prompts with a picture each and their completions."""
    from PIL import Image

    sys.path.insert(0, str(TOOLS.parent))
    from tests.pictures import write_model

    write_model(directory)
    settings = directory / "tokenizer_config.json"
    fields = json.loads(settings.read_text())
    # TRL trains what the template writes behind the end of a turn, dtrain does not: leave nothing there.
    fields["chat_template"] = fields["chat_template"].replace("'<|im_end|>\n'", "'<|im_end|>'")
    settings.write_text(json.dumps(fields))
    draw = random.Random(0)
    with (directory / "rows.jsonl").open("w") as file:
        for number in range(rows):
            wide, tall = draw.choice(SIDES), draw.choice(SIDES)
            image = directory / f"{number}.png"
            Image.frombytes("RGB", (wide, tall), draw.randbytes(3 * wide * tall)).save(image)
            parts = [{"type": "image"}, {"type": "text", "text": "What is it? " * draw.randint(1, 4)}]
            answer = {"role": "assistant", "content": "two and two " * draw.randint(1, 8)}
            row = {"prompt": [{"role": "user", "content": parts}], "completion": [answer], "images": [str(image)]}
            file.write(json.dumps(row) + "\n")


def write_chat(directory: Path, model: Path, rows: Path, count: int) -> None:
    """Write the first `count` conversations of `rows` to rows.jsonl as tokens and labels, by the model's template."""
    from dtrain.base.json_files import split_lines
    from dtrain.data.formats.encoder import Encoder
    from dtrain.data.formats.formats import normalise
    from dtrain.data.text.template import choose_template
    from dtrain.data.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_directory(model)
    encoder = Encoder(tokenizer, choose_template(model, tokenizer), max_length=CHAT_LENGTH)
    with (directory / "rows.jsonl").open("w") as file:
        for line in split_lines(rows.read_text(encoding="utf-8"))[:count]:
            ids, trained = encoder.encode(normalise({"messages": json.loads(line)["messages"]}, "messages"))
            labels = [token if is_trained else -100 for token, is_trained in zip(ids, trained, strict=True)]
            file.write(json.dumps({"input_ids": ids[:CHAT_LENGTH], "labels": labels[:CHAT_LENGTH]}) + "\n")


def compare(options: argparse.Namespace) -> dict:
    """Both sides in turn, `options.rounds` times."""
    peer, method, steps, warmup = options.peer, options.method, options.steps, options.warmup
    script, packages = PEERS[peer]
    torch_version = subprocess.check_output(
        [sys.executable, "-c", "import torch; print(torch.__version__.split('+')[0])"], text=True
    ).strip()
    python = make_environment(options.env, [f"torch=={torch_version}", *packages])
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    sides: dict[str, list[dict]] = {"dtrain": [], peer: []}
    with tempfile.TemporaryDirectory() as scratch:
        case = Path(scratch)
        model, batch, length = options.model or case, ROWS // 2 if method == "dpo" else ROWS, LENGTH
        adapter: list[str] = []
        if method == "sft-images":
            write_pictures(case, ROWS * (steps + warmup))
        elif options.model is None:
            write_case(case, ROWS * (steps + warmup), method)
        else:
            batch, length, adapter = CHAT_ROWS, CHAT_LENGTH, [str(case / "adapter")]
            write_chat(case, model, options.rows, batch * (steps + warmup))
        recipe = [
            f"model.path={model}",
            f"data.train.path={case / 'rows.jsonl'}",
            f"data.max_length={length}",
            "data.packing=false",
            "data.shuffle=false",
            f"train.global_batch={batch}",
            f"train.micro_batch={batch}",
            "train.dtype=float32",
            "train.activation_checkpointing=none",
            "optimizer.lr=1e-4",
            "scheduler.name=constant",
            "scheduler.warmup_steps=0",
            "launch.device=cpu",
            "launch.nproc=1",
            *(f"lora.path={directory}" for directory in adapter),
            *(["train.vision=all", "data.loss_on=completion"] if method == "sft-images" else []),
        ]
        rows_file = case / ("text.jsonl" if method == "dpo" else "rows.jsonl")
        sizes = [method, model, rows_file, batch, length, steps, warmup, *adapter]
        command = [str(word) for word in (python, TOOLS / script, *sizes)]
        if adapter:
            _run_peer(command, environ)  # writes the adapter
        for number in range(options.rounds):
            sides["dtrain"].append(run_dtrain(method.removesuffix("-images"), recipe, steps, warmup, environ))
            sides[peer].append(json.loads(_run_peer(command, environ).splitlines()[-1]))
            speeds = {name: results[-1]["tokens_per_sec"] for name, results in sides.items()}
            print(f"round {number + 1} of {options.rounds}: tokens/s {speeds}", file=sys.stderr)
    ours, theirs = sides["dtrain"], sides[peer]
    pairs = zip(ours[0]["losses"], theirs[0]["losses"], strict=True)
    gap = max(abs(a - b) / abs(b) for a, b in pairs)
    ratios = [a["tokens_per_sec"] / b["tokens_per_sec"] for a, b in zip(ours, theirs, strict=True)]
    return {
        "peer": peer,
        "method": method,
        "speed_ratio": round(statistics.median(ratios), 3),
        "speed_ratios": [round(ratio, 3) for ratio in ratios],
        "memory_ratio": round(
            max(run["peak_memory_gib"] for run in ours) / max(run["peak_memory_gib"] for run in theirs), 3
        ),
        "largest_relative_loss_difference": gap,
        "last_loss": ours[0]["losses"][-1],
        **{name: [_without_losses(run) for run in results] for name, results in sides.items()},
    }


def _run_peer(command: list[str], environ: dict[str, str]) -> str:
    finished = subprocess.run(command, env=environ, capture_output=True, text=True)
    if finished.returncode:
        raise SystemExit(f"{' '.join(command)}\nfailed:\n{finished.stdout}{finished.stderr}")
    return finished.stdout


def _without_losses(run: dict) -> dict:
    return {name: value for name, value in run.items() if name != "losses"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?", help="a recipe's file or name")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--steps", type=int, default=20, help="steps that count (default 20)")
    parser.add_argument("--warmup", type=int, default=5, help="steps before them (default 5)")
    parser.add_argument("--peer", choices=PEERS, help="compare with this library instead")
    parser.add_argument(
        "--method", choices=("sft", "dpo", "sft-images"), default="sft", help="what is compared (default sft)"
    )
    parser.add_argument("--model", type=Path, help="a real model's directory, in a comparison")
    parser.add_argument("--rows", type=Path, help="its rows: chat messages")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each side in a comparison (default 3)")
    parser.add_argument(
        "--env",
        type=Path,
        default=Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "dtrain" / "bench-peer",
        help="where the peer's environment lies (default %(default)s)",
    )
    args = parser.parse_intermixed_args()
    if args.peer:
        if (args.model is None) != (args.rows is None) or (args.model is not None and args.method != "sft"):
            parser.error("--model and --rows go together, and with --method sft")
        result = compare(args)
    elif args.recipe:
        run = run_dtrain(args.recipe, args.overrides, args.steps, args.warmup, dict(os.environ))
        result = {"recipe": args.recipe, **_without_losses(run)}
    else:
        parser.error("name a recipe, or a --peer")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
