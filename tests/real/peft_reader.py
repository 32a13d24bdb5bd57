"""PEFT and dtrain on each other's adapters: a run's read by PEFT, and PEFT's served by dtrain, by name and merged."""

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.real.common import Checks, model, need, served_logprobs, trained  # noqa: E402

need("peft transformers", "peft", "transformers")

import peft  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402

from tests.real.transformers_reader import TEXT, logprobs  # noqa: E402
from tests.serve.serving import Process  # noqa: E402

KINDS = {
    "lora": {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"},
    "rslora": {"r": 4, "lora_alpha": 8, "use_rslora": True, "target_modules": ["q_proj", "v_proj"]},
    "dora": {"r": 4, "lora_alpha": 8, "use_dora": True, "target_modules": ["q_proj", "down_proj"]},
}


def base() -> torch.nn.Module:
    return transformers.AutoModelForCausalLM.from_pretrained(model(), dtype=torch.float32)


def main() -> None:
    checks = Checks()
    print(f"peft {peft.__version__}, transformers {transformers.__version__}")
    ids = transformers.AutoTokenizer.from_pretrained(model())(TEXT)["input_ids"]
    plain = logprobs(base(), ids)
    with tempfile.TemporaryDirectory() as root:
        run = trained(Path(root), "lora={rank: 8, alpha: 16}", "optimizer.lr=1e-2")
        read = peft.PeftModel.from_pretrained(base(), run / "export")
        expected = logprobs(read, ids)
        moved = max(abs(before - after) for before, after in zip(plain, expected, strict=True))
        checks.holds("a run's adapter changes the model", moved > 1e-2, f"{moved:.2g}")
        server = Process(run, dtype="float32", starts=True)
        try:
            checks.near("a run's adapter: log-probabilities", served_logprobs(server.url, ids), expected, 1e-4)
        finally:
            server.kill()

        wanted = {}
        for name, settings in KINDS.items():
            torch.manual_seed(0)
            config = peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **settings)
            made = peft.get_peft_model(base(), config)
            made.save_pretrained(Path(root, name))
            wanted[name] = logprobs(made, ids)
        for name, values in wanted.items():
            server = Process(model(), "--adapter", f"{name}={Path(root, name)}", dtype="float32", starts=True)
            try:
                checks.near(f"PEFT's {name}, by name", served_logprobs(server.url, ids, name), values, 2e-4)
                checks.near("the base beside it", served_logprobs(server.url, ids), plain, 1e-4)
            finally:
                server.kill()
    checks.end()


if __name__ == "__main__":
    main()
