"""`dtrain serve` of a classifier: outputs are transformers', and what cannot be is refused."""

import json
from contextlib import contextmanager

import pytest
import torch
import transformers

from dtrain.base.errors import UserError
from dtrain.commands.serve.classify import Classifier, ClassifyService, label_names
from dtrain.data.formats.pairs import PairEncoder
from dtrain.data.text.template import choose_template
from dtrain.inference.generate import load
from tests.serve.serving import ask, in_thread
from tests.tiny import write_model

TEMPLATE = "{% for m in messages %}{{ m.role ~ ' ' ~ m.content ~ ' w1 ' }}{% endfor %}"


def written(root, labels):
    """A llama classifier as transformers writes it, in float64; w0 is padding."""
    directory = write_model(root / f"rates{labels}", "llama", num_labels=labels, pad_token_id=0)
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    config = json.loads((directory / "config.json").read_text())
    torch.manual_seed(7)
    known = transformers.AutoConfig.for_model(config.pop("model_type"), **config)
    model = transformers.AutoModelForSequenceClassification.from_config(known, dtype=torch.float64).eval()
    model.save_pretrained(directory)
    return directory, model


@contextmanager
def serving(directory, max_length=32):
    model, tokenizer = load(directory, torch.float64, torch.device("cpu"), classifiers=True)
    encoder = PairEncoder(tokenizer, choose_template(directory, tokenizer), max_length=max_length)
    names = label_names(directory / "config.json", model.config.num_labels)
    service = ClassifyService(Classifier(model), encoder, "tiny", names, None, {"localhost", "127.0.0.1"})
    with in_thread(service) as url:
        yield url


@pytest.fixture(scope="module", params=[1, 3])
def served(request, tmp_path_factory):
    directory, oracle = written(tmp_path_factory.mktemp("classify"), request.param)
    with serving(directory) as url:
        yield url, oracle


def scores_of(oracle, ids):
    with torch.no_grad():
        return oracle(torch.tensor([ids])).logits[0]


def test_outputs_are_those_of_transformers(served):
    """Texts end with EOS as they are trained; ids are as they are, padding at either end. Float32 norms there: 1e-5."""
    url, oracle = served
    given = ["w3 w4", [5, 6, 7, 8, 0, 0], [0, 9], "w5"]
    status, answer = ask(url, "/classify", {"input": given, "model": "tiny"})
    assert status == 200 and answer["usage"]["total_tokens"] == 3 + 6 + 2 + 2
    for one, ids in zip(answer["data"], [[3, 4, 1], [5, 6, 7, 8, 0, 0], [0, 9], [5, 1]], strict=True):
        right = scores_of(oracle, ids)
        probs = right.softmax(0) if len(right) > 1 else right.sigmoid()
        assert one["scores"] == pytest.approx(right.tolist(), rel=1e-5, abs=1e-6)
        assert one["probs"] == pytest.approx(probs.tolist(), rel=1e-5)
        assert one["label"] == f"LABEL_{int(right.argmax())}" and one["num_classes"] == len(right)
    bare = ask(url, "/v1/classify", {"input": "w3 w4", "add_special_tokens": False})[1]["data"][0]
    assert bare["scores"] == pytest.approx(scores_of(oracle, [3, 4]).tolist(), rel=1e-5, abs=1e-6)
    chat = [{"role": "w6", "content": "w7"}, {"role": "w8", "content": "w9"}]
    told = ask(url, "/classify", {"messages": [{**chat[0], "role": "user"}, {**chat[1], "role": "assistant"}]})[1]
    right = scores_of(oracle, [2, 7, 1, 2, 9, 1])  # the roles are unknown words
    assert told["data"][0]["scores"] == pytest.approx(right.tolist(), rel=1e-5, abs=1e-6)


@pytest.mark.parametrize(
    ("path", "body", "status", "answer"),
    [
        ("/classify", {}, 400, "give either input"),
        ("/classify", {"input": "w3", "messages": []}, 400, "give either input"),
        ("/classify", {"input": [3, 9999]}, 400, "not in the vocabulary"),
        ("/classify", {"input": "w3 " * 40}, 400, "has 41 tokens"),
        ("/classify", {"input": "w3", "model": "other"}, 404, "the model is tiny"),
        ("/classify", {"inputs": "w3"}, 400, "did you mean input?"),
        ("/v1/completions", {"prompt": "w3"}, 404, "/classify"),
    ],
)
def test_what_cannot_be_is_refused(served, path, body, status, answer):
    found, told = ask(served[0], path, body)
    assert found == status and answer in told["error"]["message"]


def test_models_that_write_are_no_classifiers_and_the_other_way_round(tmp_path):
    directory, _ = written(tmp_path, 1)
    with pytest.raises(UserError, match="it rates or classifies texts"):
        load(directory, torch.float64, torch.device("cpu"))
    status, listed = 0, None
    with serving(directory) as url:
        status, listed = ask(url, "/v1/models")
        assert ask(url, "/health") == (200, {"status": "ok"})
    assert status == 200 and listed["data"][0]["max_model_len"] == 32
