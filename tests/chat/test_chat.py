"""`dtrain chat`: each answer is what greedy whole forwards give of the conversation so far."""

import io
import sys

import pytest

from dtrain.base.errors import UserError
from dtrain.commands import cli
from tests.serve.serving import make_model, naive
from tests.serve.test_adapters import make_adapter


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("chat"), 1)


@pytest.fixture
def chat(model, monkeypatch, capsys):
    """Lines to `dtrain chat`, its exit status and what it printed, line by line."""

    def talk(lines, *options, directory=model):
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        words = ["chat", str(directory), "--temperature", "0", "--max-new-tokens", "5", "--dtype", "float64", *options]
        status = cli.main(words)
        out, err = capsys.readouterr()
        return status, out.splitlines(), err

    return talk


def answered(directory, *said, end=()):
    """The ids of the last answer, to what was said in turn: numbers of a user's words, lists of an answer's."""
    prompt = [one for word in said for one in ([8, word] if isinstance(word, int) else [8, *word])]
    found, _ = naive(directory, [*prompt, 9, *end], 5)
    return [one for one in found if one != 1]


def words(ids):
    return " ".join(f"w{one}" for one in ids)


def test_answers_follow_the_whole_conversation(model, chat):
    first = answered(model, 5)
    second = answered(model, 5, first, 6)
    afresh = answered(model, 7, 6)  # with a system message
    lines = ["w5", "", "w6", "/again", "/reset", "w5", "/system w7", "w6", "/exit", "w5"]
    status, out, _ = chat(lines)
    assert status == 0 and out == [words(one) for one in (first, second, second, first, afresh)]


def test_thinking_is_the_templates(model, chat):
    plain, thinking = answered(model, 5), answered(model, 5, end=[10])
    assert plain != thinking
    _, out, _ = chat(["w5", "/reset", "/thinking off", "w5"], "--thinking", "on")
    assert out == [words(thinking), words(plain)]


def test_an_adapter_beside_the_model_comes_and_goes(model, chat):
    adapter, merged = make_adapter(model.parent, model, 1, "adapter")
    with_it, without = answered(merged, 5), answered(model, 5)
    assert with_it != without
    lines = ["w5", "/reset", "/adapter off", "w5", "/reset", "/adapter on", "w5"]
    assert chat(lines, "--adapter", str(adapter))[1] == [words(one) for one in (with_it, without, with_it)]
    assert chat(lines, directory=adapter)[1] == [words(one) for one in (with_it, without, with_it)]


@pytest.mark.parametrize(
    ("lines", "options", "message"),
    [
        (["/again"], [], "there is no message to answer yet"),
        (["/adapter off"], [], "there is no adapter"),
        (["/thinkin on"], [], "/thinkin is not a command:\n/again"),
        ([], ["--temperature", "-1"], "temperature=-1.0 must be a number of at least 0"),
        (["w5 " * 127], [], "the conversation has 129 tokens, and the model's context holds 128: /reset begins a new"),
    ],
)
def test_what_cannot_be_is_said(chat, lines, options, message):
    status, out, err = chat(lines, *options)
    assert status == 1 and out == [] and message in err


def test_a_model_without_a_template_is_refused(model, chat, tmp_path):
    for file in model.iterdir():
        if file.name != "chat_template.jinja":
            (tmp_path / file.name).symlink_to(file)
    status, _, err = chat(["w5"], directory=tmp_path)
    assert status == 1 and "has no chat template: give --chat-template FILE" in err


def test_an_answer_that_is_broken_off_stays_as_far_as_it_came(model):
    from dtrain.commands.chat.terminal import Conversation
    from dtrain.data.formats.prompts import PromptEncoder, PromptOptions
    from dtrain.data.text.template import choose_template
    from dtrain.data.text.tokenizer import Tokenizer
    from dtrain.inference.chats import ChatEncoder
    from dtrain.inference.engine import Engine
    from dtrain.inference.request import SamplingParams
    from dtrain.models import from_pretrained

    tokenizer = Tokenizer.from_directory(model)
    template = choose_template(model, tokenizer)
    encoder = PromptEncoder(tokenizer, template, max_length=128, options=PromptOptions(128))
    engine, sampling = Engine(from_pretrained(model)), SamplingParams(50, temperature=0.0)
    conversation = Conversation(engine, ChatEncoder(encoder), 128, sampling)
    pieces = conversation.send("w5")
    said = next(pieces) + next(pieces)
    pieces.close()
    assert conversation.messages == [{"role": "user", "content": "w5"}, {"role": "assistant", "content": said}]
    assert not conversation.engine.has_work and said.startswith(next(conversation.answer_again()))
    # An answer that cannot be generated again, because the context is full now, stays in the conversation.
    messages = list(conversation.messages)
    conversation.max_length = 1
    with pytest.raises(UserError, match="the model's context holds 1"):
        conversation.answer_again()
    assert conversation.messages == messages
