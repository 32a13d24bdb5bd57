"""lm-eval on a trained run: `local-completions` and `local-chat-completions` on `dtrain serve`, and its own `hf` on the
export. The same task gives the same answers and the same score as `dtrain eval`."""

import json
import random
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.real.common import Checks, dtrain, need, trained  # noqa: E402

need("lm-eval[api]", "lm_eval", "transformers", "tenacity")

import lm_eval  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

from tests.serve.serving import Process  # noqa: E402

ROWS, TOKENS = 12, 12
TASK = """task: sums
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{prompt}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["\\n"], do_sample: false, temperature: 0.0, max_gen_toks: {tokens}}}
filter_list:
  - name: last number
    filter: [{{function: regex, regex_pattern: "(-?[0-9]+)", group_select: -1}}, {{function: take_first}}]
metric_list: [{{metric: exact_match}}]
"""


def write_tasks(root: Path, rows: Sequence[dict]) -> TaskManager:
    (root / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (root / "sums.yaml").write_text(TASK.format(rows=root / "rows.jsonl", tokens=TOKENS))
    return TaskManager(include_path=str(root), include_defaults=False)


def main() -> None:
    checks, draw = Checks(), random.Random(0)
    print(f"lm-eval {version('lm-eval')}, transformers {version('transformers')}")
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        numbers = [(draw.randrange(1, 30), draw.randrange(1, 9)) for _ in range(ROWS)]
        text = "1 + 1 = 2\n2 + 3 = 5\n{} + {} ="
        rows = [{"prompt": text.format(a, b), "answer": str(a + b)} for a, b in numbers]
        tasks, run = write_tasks(root, rows), trained(root)

        def expected(how: str) -> tuple[float, list[str]]:
            out, words = root / f"{how}.jsonl", ["--max-new-tokens", str(TOKENS), "--stop", "\n", "--dtype", "float32"]
            words += ["--reward", "math_exact", "--prompts-as", how, "--out", str(out), "--json"]
            score = json.loads(dtrain("eval", str(run), str(root / "rows.jsonl"), *words))["reward"]
            return score, [json.loads(line)["completion"] for line in out.read_text().splitlines()]

        def scored(backend: str, is_chat: bool = False, **options: object) -> tuple[float, list[str]]:
            given = ",".join(f"{key}={value}" for key, value in options.items())
            more = {"task_manager": tasks, "batch_size": 1, "log_samples": True, "device": "cpu"}
            result = lm_eval.simple_evaluate(
                backend, model_args=given, tasks=["sums"], apply_chat_template=is_chat, **more
            )
            answers = [sample["resps"][0][0] for sample in sorted(result["samples"]["sums"], key=lambda s: s["doc_id"])]
            return result["results"]["sums"]["exact_match,last number"], answers

        def compare(name: str, mine: tuple[float, list[str]], theirs: tuple[float, list[str]]) -> None:
            same = sum(
                a.split("\n")[0].strip() == b.split("\n")[0].strip() for a, b in zip(mine[1], theirs[1], strict=True)
            )
            checks.same(f"{name}: answers that are the same", same, ROWS)
            checks.near(f"{name}: score", [theirs[0]], [mine[0]], 1e-9)

        text_score, chat_score = expected("text"), expected("user")
        checks.holds("dtrain eval: some right and some wrong", 0 < text_score[0] < 1, f"{text_score[0]:.3f}")
        checks.holds("dtrain eval, chat: score", True, f"{chat_score[0]:.3f}")
        compare("hf on the export", text_score, scored("hf", pretrained=run / "export", dtype="float32"))
        compare("hf, chat", chat_score, scored("hf", True, pretrained=run / "export", dtype="float32"))
        server = Process(run, dtype="float32", starts=True)
        try:
            words = {"tokenizer_backend": "huggingface", "tokenizer": run / "export", "num_concurrent": 1}
            served = {"model": run, **words}
            base = f"{server.url}/v1"
            compare(
                "local-completions", text_score, scored("local-completions", base_url=f"{base}/completions", **served)
            )
            talk = scored("local-chat-completions", True, base_url=f"{base}/chat/completions", **served)
            compare("local-chat-completions", chat_score, talk)
        finally:
            server.kill()
    checks.end()


if __name__ == "__main__":
    main()
