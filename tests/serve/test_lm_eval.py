"""lm-eval's `local-completions` on `dtrain serve` against its own `hf`, on a task that needs no network."""

import json
import random

import pytest

from tests.serve.serving import make_model, serving

lm_eval = pytest.importorskip("lm_eval", reason="lm-eval is no package of the tests: `pip install lm-eval[api]`")

TASK = """task: choices
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
doc_to_choice: "{{{{choices}}}}"
metric_list: [{{metric: acc}}]
"""


def test_loglikelihoods_are_those_of_its_hf_backend(tmp_path):
    from lm_eval.tasks import TaskManager

    model = make_model(tmp_path, 1)
    tokenizer = {"eos_token": "w1", "pad_token": "w0", "tokenizer_class": "PreTrainedTokenizerFast"}
    (model / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    draw, rows = random.Random(0), tmp_path / "rows.jsonl"

    def words(count):
        return " ".join(f"w{draw.randrange(2, 60)}" for _ in range(count))

    made = ({"question": words(5), "choices": [words(2), words(3), words(1)], "answer": 0} for _ in range(12))
    rows.write_text("".join(json.dumps(row) + "\n" for row in made))
    (tmp_path / "choices.yaml").write_text(TASK.format(rows=rows))
    tasks = TaskManager(include_path=str(tmp_path), include_defaults=False)

    def answers(backend, **options):
        given = ",".join(f"{key}={value}" for key, value in options.items())
        more = {"task_manager": tasks, "batch_size": 2, "log_samples": True, "device": "cpu"}
        found = lm_eval.simple_evaluate(backend, model_args=given, tasks=["choices"], **more)
        return [one[0] for sample in found["samples"]["choices"] for one in sample["resps"]]

    expected = answers("hf", pretrained=model, dtype="float32")
    with serving(model) as (url, _):
        base = f"{url}/v1/completions"
        words_of = {"tokenizer_backend": "huggingface", "tokenizer": model, "tokenized_requests": True}
        found = answers("local-completions", model="tiny", base_url=base, num_concurrent=1, **words_of)
    for (mine, is_greedy), (theirs, their_greedy) in zip(found, expected, strict=True):
        assert float(mine) == pytest.approx(float(theirs), abs=1e-4) and str(is_greedy) == str(their_greedy)
