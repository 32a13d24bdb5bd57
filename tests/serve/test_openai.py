"""OpenAI's own client on `dtrain serve`, against whole forwards of the model. tests/real has more of it."""

import pytest

from tests.serve.serving import PROMPT, make_model, naive, serving

openai = pytest.importorskip("openai", reason="openai is no package of the tests: `pip install openai`")

pytestmark = pytest.mark.processes  # the client asks `uname` for its headers

MESSAGES = [{"role": "user", "content": "w5"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("openai"), 1)


@pytest.fixture(scope="module")
def url(model):
    with serving(model, key="secret") as (url, _):
        yield url


@pytest.fixture
def client(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="secret", max_retries=0, timeout=60) as client:
        yield client


def text_of(ids):
    return " ".join(f"w{token}" for token in ids)


def test_models_and_completions(client, model):
    assert [card.id for card in client.models.list()] == ["tiny"]
    expected = text_of(naive(model, PROMPT, 6)[0])
    asked = {"model": "tiny", "prompt": text_of(PROMPT), "max_tokens": 6, "temperature": 0}
    assert client.completions.create(**asked).choices[0].text == expected
    parts = list(client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(part.choices[0].text for part in parts[:-1]) == expected
    assert parts[-1].choices == [] and parts[-1].usage.completion_tokens == 6
    assert all(part.usage is None for part in parts[:-1])


def test_chats(client, model):
    expected = text_of(naive(model, [8, 5, 9], 6)[0])
    asked = {"model": "tiny", "messages": MESSAGES, "max_tokens": 6, "temperature": 0}
    whole = client.chat.completions.create(**asked)
    assert whole.choices[0].message.content == expected and whole.usage.prompt_tokens == 3
    parts = list(client.chat.completions.create(**asked, stream=True))
    assert "".join(part.choices[0].delta.content for part in parts) == expected
    assert parts[0].choices[0].delta.role == "assistant" and parts[-1].choices[0].finish_reason == "length"


def test_a_final_message_is_continued(client, model):
    expected = text_of(naive(model, [8, 5, 8, 6], 6)[0])
    messages = [*MESSAGES, {"role": "assistant", "content": "w6"}]
    asked = {"model": "tiny", "messages": messages, "max_tokens": 6, "temperature": 0}
    as_vllm = {"continue_final_message": True, "add_generation_prompt": False}
    for extra in ({"continue_final_message": True}, as_vllm):
        answer = client.chat.completions.create(**asked, extra_body=extra)
        assert answer.choices[0].message.content == expected and answer.usage.prompt_tokens == 4


@pytest.mark.parametrize(
    ("change", "error", "kind"),
    [
        ({"model": "other"}, "NotFoundError", "not_found_error"),
        ({"max_tokens": 10**6}, "BadRequestError", "invalid_request_error"),
        ({"extra_body": {"temperatur": 1}}, "BadRequestError", "invalid_request_error"),
    ],
)
def test_errors_are_those_of_openai(client, change, error, kind):
    with pytest.raises(getattr(openai, error)) as raised:
        client.chat.completions.create(**{"model": "tiny", "messages": MESSAGES, **change})
    assert raised.value.type == kind and raised.value.message


def test_a_wrong_key_is_an_authentication_error(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="wrong", max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError, match="key is wrong"):
            client.models.list()
