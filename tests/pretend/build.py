"""The pretend device's library, built once: kept beside the user's caches under a name made of the sources, torch and
the compiler. Asks for no torch: it runs before torch may be imported."""

import fcntl
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

SOURCES = Path(__file__).parent / "native"
NAME = "pretend_device"
FLAGS = ("-O1", "-fPIC", "-shared", "-std=c++20", "-w", f"-DTORCH_EXTENSION_NAME={NAME}")
FLAGS += ("-DTORCH_API_INCLUDE_EXTENSION_H", "-DUSE_DISTRIBUTED", "-DUSE_C10D_GLOO")


def missing() -> str | None:
    """Why the device cannot be had here; None where it can."""
    if sys.platform != "linux":
        return "the pretend device is built on Linux alone"
    if shutil.which("g++") is None:
        return "the pretend device needs g++"
    version = importlib.metadata.version("torch")
    if not version.startswith("2.13."):
        return f"the pretend device is written for torch 2.13, and this is {version}"
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        return "the pretend device needs Python's headers"
    try:
        _cache().mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return f"the pretend device is kept in {_cache()}: {error.strerror}"
    return None


def library() -> Path:
    """The built library. About half a minute where it is not there yet; of several processes one builds it.

    Raises RuntimeError with the compiler's words where it fails.
    """
    sources = sorted(SOURCES.iterdir())
    compiler = subprocess.run(["g++", "--version"], capture_output=True, text=True, check=True).stdout
    known = [compiler, sys.version, importlib.metadata.version("torch"), str(_torch()), *FLAGS]
    known += [path.read_text() for path in sources]
    digest = hashlib.blake2b("\0".join(known).encode(), digest_size=12).hexdigest()
    folder = _cache() / f"pretend-{digest}"
    built = folder / f"{NAME}.so"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # until the file is closed, also by a death
        if not built.exists():
            _compile(SOURCES / "pretend.cpp", built)
    return built


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "dtrain-tests"


def _compile(source: Path, built: Path) -> None:
    torch = _torch()
    includes = [torch / "include", torch / "include/torch/csrc/api/include", sysconfig.get_paths()["include"]]
    with tempfile.TemporaryDirectory(dir=built.parent) as folder:
        made = Path(folder) / built.name
        command = ["g++", *FLAGS, *(f"-I{path}" for path in includes), str(source), "-o", str(made)]
        command += [f"-L{torch / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"]
        command += [f"-Wl,-rpath,{torch / 'lib'}"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"the pretend device does not build:\n{done.stderr[-4000:]}")
        made.replace(built)


def _torch() -> Path:
    found = importlib.util.find_spec("torch")
    assert found is not None and found.origin is not None
    return Path(found.origin).resolve().parent  # several trees may link to one environment
