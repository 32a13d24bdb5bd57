"""transformers and dtrain on each other's directories: a run's export read by transformers, a directory that
transformers saved served by dtrain. Log-probabilities are the same, and greedy texts."""

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.real.common import Checks, dtrain, need, served_logprobs, trained  # noqa: E402

need("transformers", "transformers")

import torch  # noqa: E402
import transformers  # noqa: E402

from tests.serve.serving import Process  # noqa: E402

TEXT = "The capital of France is Paris, and the capital of Italy is Rome."


def logprobs(model: torch.nn.Module, ids: list[int]) -> list[float]:
    """Return the log-probabilities of all of `ids` but the first."""
    with torch.no_grad():
        rows = model(input_ids=torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    return rows.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()


def compare(checks: Checks, name: str, directory: Path, model: torch.nn.Module, ids: list[int]) -> None:
    server = Process(directory, dtype="float32", starts=True)
    try:
        checks.near(f"{name}: log-probabilities", served_logprobs(server.url, ids), logprobs(model, ids), 1e-4)
    finally:
        server.kill()


def main() -> None:
    checks = Checks()
    print(f"transformers {transformers.__version__}")
    with tempfile.TemporaryDirectory() as root:
        run = trained(Path(root))
        model = transformers.AutoModelForCausalLM.from_pretrained(run / "export", dtype=torch.float32)
        tokenizer = transformers.AutoTokenizer.from_pretrained(run / "export")
        ids = tokenizer(TEXT)["input_ids"]
        compare(checks, "an export", run, model, ids)
        talk = [{"role": "user", "content": "Hello"}]
        prompt = tokenizer.apply_chat_template(talk, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        drawn = model.generate(**prompt, max_new_tokens=12, do_sample=False)[0, prompt["input_ids"].shape[1] :]
        text = tokenizer.decode(drawn, skip_special_tokens=True)
        words = ("--prompt", "Hello", "--max-new-tokens", "12", "--temperature", "0", "--dtype", "float32")
        checks.same("an export: greedy text", dtrain("generate", str(run), *words).strip(), text.strip())

        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.05)
        saved = Path(root, "saved")
        model.save_pretrained(saved)
        tokenizer.save_pretrained(saved)
        compare(checks, "what transformers saved", saved, model, ids)
    checks.end()


if __name__ == "__main__":
    main()
