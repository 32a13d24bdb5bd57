"""An exported model in vLLM, and its GGUF file in llama.cpp, beside the run that it was exported from.

    .venv/bin/python tools/real_peers.py vllm runs/real-lora build/real/merged build/real/heldout.jsonl
    .venv/bin/python tools/real_peers.py gguf build/real/merged build/real/merged.gguf

The first prints JSON: of how many prompts the greedy answers are equal token for token, both in float32. The second
prints what tests/real/by_llama_cpp.py finds: token ids, logits, greedy answers. Each makes an environment in the user's
cache at its first call: 3 GB for vLLM; llama-cpp-python is compiled, which takes ten minutes on two cores.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

import torch
from real_equal import Greedy, iterate_prompts
from real_servers import Vllm, environment, install, vllm_python

ROOT = Path(__file__).resolve().parents[1]
LLAMA_CPP = "0.3.36"


def in_vllm(run: Path, export: Path, rows: Path, limit: int, max_new_tokens: int) -> dict:
    """Return the number of prompts, and of those whose greedy answers are equal."""
    greedy = Greedy(run, iterate_prompts(rows, limit), max_new_tokens)
    vllm_python()
    equal = 0
    with tempfile.TemporaryDirectory() as directory:
        server = Vllm(Path(directory), export)
        try:
            server.wait()
            key = server.key_file.read_text().strip()
            for prompt, answer in zip(greedy.prompts, greedy.answers, strict=True):
                body = {"model": "policy", "prompt": prompt, "max_tokens": max_new_tokens, "temperature": 0}
                request = urllib.request.Request(
                    f"{server.url}/v1/completions",
                    json.dumps({**body, "return_token_ids": True}).encode(),
                    {"Content-Type": "application/json", "Authorization": f"Bearer {key}"},
                )
                with urllib.request.urlopen(request, timeout=300) as reply:
                    equal += json.load(reply)["choices"][0]["token_ids"] == list(answer)
        finally:
            server.stop()
    return {"prompts": len(greedy.prompts), "equal_answers": equal}


def in_llama_cpp(export: Path, file: Path) -> int:
    """Print the line of by_llama_cpp.py, and return its status: 1 where the file is not near enough."""
    python = environment(
        f"llama-cpp-{LLAMA_CPP}", lambda python: install(python, "numpy", f"llama-cpp-python=={LLAMA_CPP}")
    )
    script = ROOT / "tests/real/by_llama_cpp.py"
    with tempfile.TemporaryDirectory() as directory:
        expected = Path(directory, "expected.npz")
        variables = {**os.environ, "PYTHONPATH": str(ROOT)}
        subprocess.run([sys.executable, str(script), "expect", str(export), str(expected)], env=variables, check=True)
        return subprocess.run([str(python), str(script), "check", str(expected), str(file)]).returncode


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    peers = parser.add_subparsers(dest="peer", required=True)
    vllm, gguf = peers.add_parser("vllm"), peers.add_parser("gguf")
    for name in ("run", "export", "rows"):
        vllm.add_argument(name, type=Path)
    vllm.add_argument("--limit", type=int, default=20, metavar="N", help="the first N prompts (default 20)")
    vllm.add_argument("--max-new-tokens", type=int, default=32, metavar="N", help="default 32")
    for name in ("export", "file"):
        gguf.add_argument(name, type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.peer == "gguf":
        sys.exit(in_llama_cpp(options.export, options.file))
    else:
        print(json.dumps(in_vllm(options.run, options.export, options.rows, options.limit, options.max_new_tokens)))


if __name__ == "__main__":
    main()
