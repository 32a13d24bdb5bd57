"""dtrain's client against the real vLLM: what dtrain/rl/README.md promises of it, with a figure for each promise.

    tools/check_servers                      all, about 20 minutes on two cores
    tools/check_servers --only qwen3 flags   some
    tools/check_servers --list               their names
    tools/check_servers --clients            other projects' clients and readers against dtrain: tests/real

vLLM's build for CPUs is installed once, in an environment of its own below ~/.cache/dtrain/servers. Servers listen on
127.0.0.1, and end with this program. Models are tiny ones made on the spot, and SmolLM2 of tools/real-model.
"""

import argparse
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import real_model  # noqa: E402
import torch  # noqa: E402
from client_scripts import run_scripts  # noqa: E402
from real_servers import VLLM, Vllm, torchvision_for, vllm_python  # noqa: E402
from server_checks import (  # noqa: E402
    Report,
    Trainer,
    check_adapter,
    check_draws,
    check_stop_text,
    check_weights,
    engine_of,
    make_model,
)
from server_images import check_images, make_image_model  # noqa: E402
from server_runs import check_flags, check_restart, check_runs, check_two  # noqa: E402
from server_transfer import check_own, check_transfer, plugin  # noqa: E402

from dtrain.data.text.tokenizer import Tokenizer  # noqa: E402

SMOLLM2 = ROOT / "build/SmolLM2-135M-Instruct"
LORA = ("--enable-lora", "--max-lora-rank", "8", "--max-loras", "2")
PROCESSED = ("--logprobs-mode", "processed_logprobs")
DEVELOPMENT = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}


@contextmanager
def served(directory: Path, model: Path, *flags: str, **settings) -> Iterator[Vllm]:
    """Give a server that is up, and end it."""
    server = Vllm(directory, model, *flags, **settings)
    try:
        server.wait()
        yield server
    finally:
        server.stop()


def of_family(family: str) -> Callable[[Report, Path], None]:
    def check(report: Report, root: Path) -> None:
        model = make_model(root, family)
        flags = () if family == "qwen3-moe" else LORA
        with served(root / "server", model, *PROCESSED, *flags, **DEVELOPMENT) as server:
            trainer, engine = Trainer(root, model), engine_of(server)
            check_draws(report, family, trainer, engine)
            if flags:
                check_adapter(report, family, root, server, trainer)
            check_weights(report, family, trainer, engine, root / "shared")

    return check


def smollm2(report: Report, root: Path) -> None:
    if not real_model.is_made(SMOLLM2):
        real_model.make(SMOLLM2)
    decode = Tokenizer.from_directory(SMOLLM2).decode
    with served(root / "server", SMOLLM2, *PROCESSED, **DEVELOPMENT) as server:
        trainer, engine = Trainer(root, SMOLLM2), engine_of(server)
        check_draws(report, "SmolLM2", trainer, engine)
        check_stop_text(report, "SmolLM2", trainer, engine, decode)
        # A server that begins with the changed weights is 1.8e-4 from float64 too, at a token of log-probability -15.
        check_weights(report, "SmolLM2", trainer, engine, root / "shared", most=5e-4)


def runs(report: Report, root: Path) -> None:
    model = make_model(root, "qwen3")
    with served(root / "server", model, *PROCESSED, *LORA, **DEVELOPMENT) as server:
        check_runs(report, root, model, server)


def two(report: Report, root: Path) -> None:
    model = make_model(root, "qwen3")
    with ExitStack() as stack:
        servers = [Vllm(root / f"server-{number}", model, *PROCESSED, **DEVELOPMENT) for number in range(2)]
        for server in servers:
            stack.callback(server.stop)
        for server in servers:
            server.wait()
        check_two(report, root, model, servers)


def restart(report: Report, root: Path) -> None:
    model = make_model(root, "qwen3")
    check_restart(report, root, model, lambda port: Vllm(root / "server", model, *PROCESSED, port=port, **DEVELOPMENT))


def flags(report: Report, root: Path) -> None:
    model, updates = make_model(root, "qwen3"), {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    with served(root / "bare", model, VLLM_SERVER_DEV_MODE="1") as bare:
        with served(root / "small", model, *PROCESSED, "--enable-lora", "--max-lora-rank", "1", **updates) as small:
            check_flags(report, root, model, bare, small)


def transfer(report: Report, root: Path) -> None:
    model = make_model(root, "qwen3")
    gloo, nccl = (("--weight-transfer-config", f'{{"backend": "{backend}"}}') for backend in ("gloo", "nccl"))
    with served(root / "gloo", model, *PROCESSED, *gloo, PYTHONPATH=str(plugin(root)), **DEVELOPMENT) as server:
        check_transfer(report, root, model, server)
    with served(root / "bare", model, **DEVELOPMENT) as bare, served(root / "nccl", model, *nccl, **DEVELOPMENT) as own:
        check_own(report, own, bare)


def experts(report: Report, root: Path) -> None:
    """Needs a release of vLLM that reports experts without Triton: this one does not on CPUs."""
    model = make_model(root, "qwen3-moe")
    server = Vllm(root / "server", model, *PROCESSED, "--enable-return-routed-experts", **DEVELOPMENT)
    try:
        server.wait()
        report.holds("experts", "the server tells experts: extend this check", False)
    except RuntimeError as error:
        found = re.search(r"Value error, (.*?)(?: \[type=|$)", str(error), re.MULTILINE)
        report.not_here("experts", found[1] if found else str(error)[-200:])
    finally:
        server.stop()


def images(report: Report, root: Path) -> None:
    model, still = make_image_model(root), ("--limit-mm-per-prompt", '{"video": 0}')
    pictures = {"PYTHONPATH": str(torchvision_for(vllm_python())), **DEVELOPMENT}
    with served(root / "server", model, *PROCESSED, *LORA, *still, "--enable-scale-out", **pictures) as server:
        check_images(report, root, model, server)


CHECKS: dict[str, Callable[[Report, Path], None]] = {
    "qwen3": of_family("qwen3"),
    "llama": of_family("llama"),
    "qwen3-moe": of_family("qwen3-moe"),
    "smollm2": smollm2,
    "runs": runs,
    "two": two,
    "restart": restart,
    "flags": flags,
    "transfer": transfer,
    "experts": experts,
    "images": images,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=CHECKS)
    parser.add_argument("--list", action="store_true")
    parser.add_argument(
        "--clients", nargs="*", metavar="NAME", help="run tests/real in place of the checks, all or some"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there too")
    parser.add_argument("--keep", type=Path, metavar="DIRECTORY", help="a new directory for models, runs and logs")
    options = parser.parse_args()
    if options.list:
        return print("\n".join(CHECKS))
    if options.clients is not None:
        if not real_model.is_made(SMOLLM2):
            real_model.make(SMOLLM2)
        sys.exit(bool(run_scripts(options.clients)))
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    vllm_python()
    report, started = Report(), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="check-servers-") as temporary:
        root = options.keep or Path(temporary)
        for name in options.only or CHECKS:
            place = (root / name).absolute()
            place.mkdir(parents=True)
            try:
                CHECKS[name](report, place)
            except RuntimeError as error:  # a server that does not come up
                report.tells(name, "the server comes up", str(error), "up")
    failed = [result for result in report.results if result.ok is False]
    absent = sum(result.ok is None for result in report.results)
    if options.json:
        versions = {"vllm": VLLM, "torch": torch.__version__}
        options.json.write_text(json.dumps({"versions": versions, "results": report.as_json()}, indent=1) + "\n")
    minutes = (time.monotonic() - started) / 60
    passed = len(report.results) - len(failed) - absent
    print(f"vLLM {VLLM}: {passed} passed, {len(failed)} failed, {absent} not here, in {minutes:.0f} minutes")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
