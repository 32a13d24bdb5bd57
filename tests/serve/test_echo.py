"""Completions with `echo`: how likely the prompts' own tokens are, against transformers."""

import pytest
import torch
import transformers

from dtrain import models
from dtrain.inference.engine import score_prompts
from tests.serve.serving import ask, make_model, serving

PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [12], [13, 14, 15], [5, 6, 7, 8, 9, 10, 11]]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("echo"), 1)


@pytest.fixture(scope="module")
def server(model):
    with serving(model) as (url, _):
        yield url


@pytest.fixture(scope="module")
def oracle(model):
    """log p of every token after the tokens before it: ids [n] -> [n − 1, V]"""
    theirs = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)

    @torch.no_grad()
    def logprobs(ids):
        return theirs(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)

    return logprobs


def completed(server, **more):
    status, answer = ask(server, "/v1/completions", {"temperature": 0, "echo": True, **more})
    assert status == 200, answer
    return answer


@pytest.mark.parametrize("max_tokens", [0, 3])
def test_a_prompts_tokens_have_the_logprobs_of_transformers(server, oracle, max_tokens):
    answer = completed(server, prompt=PROMPTS, n=2, max_tokens=max_tokens, logprobs=1, return_token_ids=True, seed=0)
    assert [choice["index"] for choice in answer["choices"]] == list(range(2 * len(PROMPTS)))
    for choice in answer["choices"]:
        ids, told = PROMPTS[choice["index"] // 2] + choice["token_ids"], choice["logprobs"]
        whole = oracle(ids) if len(ids) > 1 else torch.zeros(0, 1)
        assert told["tokens"] == [f"w{one}" for one in ids]
        assert choice["text"].replace(" ", "") == "".join(told["tokens"])
        assert told["token_logprobs"][0] is None and told["top_logprobs"][0] is None
        for place, row in enumerate(whole):
            best = {f"w{int(row.argmax())}": float(row.max())}
            assert told["token_logprobs"][place + 1] == pytest.approx(float(row[ids[place + 1]]), abs=1e-5)
            assert told["top_logprobs"][place + 1] == pytest.approx(best, abs=1e-5)


def test_texts_are_echoed_and_the_likeliest_are_told_where_they_are_asked_for(server):
    (choice,) = completed(server, prompt="w5 w6 w7", max_tokens=1, logprobs=0)["choices"]
    assert choice["text"].startswith("w5 w6 w7") and choice["logprobs"]["top_logprobs"] is None
    assert len(choice["logprobs"]["token_logprobs"]) == 4
    (choice,) = completed(server, prompt="w5 w6 w7", max_tokens=0)["choices"]
    assert choice["text"] == "w5 w6 w7" and choice["logprobs"] is None


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"stream": True}, "echo=True cannot be streamed"),
        ({"stream": True, "return_routed_experts": True}, "return_routed_experts=True cannot be streamed"),
        ({"temperature": 1, "logprobs": 1}, "logprobs=1 returns the most likely tokens"),
        ({"prompt": [3] * 200, "max_tokens": 0}, "the model's context"),
    ],
)
def test_what_echo_cannot_be_asked_with_is_said(server, more, words):
    status, answer = ask(server, "/v1/completions", {"prompt": [5], "echo": True, **more})
    assert status == 400 and words in answer["error"]["message"]


@pytest.mark.parametrize("together", [1, 8, 100])
def test_what_is_scored_together_changes_no_score(model, together):
    net = models.from_pretrained(model, torch.float64)
    alone = [score_prompts(net, [one], 1)[0] for one in PROMPTS]
    for mine, one in zip(score_prompts(net, PROMPTS, together), alone, strict=True):
        assert mine.argmax_ids == one.argmax_ids and mine.logprobs == pytest.approx(one.logprobs, rel=1e-12)
