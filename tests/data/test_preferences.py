"""Preferences of every shape that is read to their one shape, and what is said of the others."""

import pytest

from dtrain.base.errors import UserError
from dtrain.data.formats.formats import detect_format, normalise
from dtrain.data.formats.pairs import ChatPair, TextPair, TokenPair, normalise_pair

ASK, AGAIN = {"role": "user", "content": "hi"}, {"role": "user", "content": "and?"}
GOOD, BAD = {"role": "assistant", "content": "ho"}, {"role": "assistant", "content": "no"}
SYSTEM = {"role": "system", "content": "be brief"}
TOOL = {"type": "function", "function": {"name": "f"}}


def test_detection():
    pair = {"prompt": "p", "chosen": "c", "rejected": "r"}
    assert detect_format(pair, "pairs") == detect_format({**pair, "messages": [ASK]}, "pairs") == "preference"
    assert detect_format({"prompt_ids": [1], "chosen_ids": [2], "rejected_ids": [3], **pair}, "pairs") == "tokenized"
    assert detect_format({"messages": [ASK]}, "pairs") is detect_format({"input_ids": [1]}, "pairs") is None
    assert detect_format({**pair, "rejected": None}, "pairs") is None


@pytest.mark.parametrize("row, expected", [
    ({"prompt": "p", "chosen": "c", "rejected": "r", "messages": [ASK]}, TextPair("p", "c", "r")),
    ({"prompt": "p", "chosen": "", "rejected": "r"}, TextPair("p", "", "r")),
    ({"chosen": "a c", "rejected": "a r"}, TextPair(None, "a c", "a r")),
    ({"prompt": [ASK], "chosen": [GOOD], "rejected": [BAD], "tools": [TOOL]}, ChatPair([ASK], [GOOD], [BAD], [TOOL])),
    ({"prompt": [ASK], "chosen": GOOD, "rejected": BAD}, ChatPair([ASK], [GOOD], [BAD])),
    ({"prompt": [ASK], "chosen": "ho", "rejected": "no"}, ChatPair([ASK], [GOOD], [BAD])),
    ({"prompt": "hi", "chosen": [GOOD], "rejected": [BAD, ASK, GOOD]}, ChatPair([ASK], [GOOD], [BAD, ASK, GOOD])),
    # The prompt stands in the completions again, and counts once.
    ({"prompt": "hi ", "chosen": [SYSTEM, ASK, GOOD], "rejected": [SYSTEM, ASK, BAD]},
     ChatPair([SYSTEM, ASK], [GOOD], [BAD])),
    ({"prompt": [ASK], "chosen": [ASK, GOOD], "rejected": [ASK, BAD]}, ChatPair([ASK], [GOOD], [BAD])),
    # An implicit prompt: the messages that both begin with.
    ({"chosen": [ASK, GOOD], "rejected": [ASK, BAD], "question": "hi"}, ChatPair([ASK], [GOOD], [BAD])),
    ({"chosen": [SYSTEM, ASK, BAD, AGAIN, GOOD], "rejected": [SYSTEM, ASK, BAD, AGAIN, BAD]},
     ChatPair([SYSTEM, ASK, BAD, AGAIN], [GOOD], [BAD])),
    ({"chosen": [ASK, GOOD], "rejected": [ASK, GOOD]}, ChatPair([ASK], [GOOD], [GOOD])),
    ({"chosen": [ASK, GOOD], "rejected": [ASK, GOOD, AGAIN, BAD]}, ChatPair([ASK], [GOOD], [GOOD, AGAIN, BAD])),
    ({"system": "be brief", "prompt": "hi", "chosen": [GOOD], "rejected": [BAD]},
     ChatPair([SYSTEM, ASK], [GOOD], [BAD])),
    ({"system": "be brief", "prompt": [{**SYSTEM, "role": "developer"}, ASK], "chosen": [GOOD], "rejected": [BAD]},
     ChatPair([{**SYSTEM, "role": "developer"}, ASK], [GOOD], [BAD])),
    # orca_dpo_pairs, with a system message and without; its copies of argilla's.
    ({"system": "be brief", "question": "hi", "chosen": "ho", "rejected": "no"},
     ChatPair([SYSTEM, ASK], [GOOD], [BAD])),
    ({"system": "", "question": "hi", "chosen": "ho", "rejected": "no"}, ChatPair([ASK], [GOOD], [BAD])),
    ({"system": "be brief", "input": "hi", "chosen": "ho", "rejected": "no"}, ChatPair([SYSTEM, ASK], [GOOD], [BAD])),
    # LLaMA-Factory's, of both kinds.
    ({"conversations": [{"from": "human", "value": "hi"}], "chosen": {"from": "gpt", "value": "ho"},
      "rejected": {"from": "gpt", "value": "no"}}, ChatPair([ASK], [GOOD], [BAD])),
    ({"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "no"}, {"from": "human",
      "value": "and?"}], "system": "be brief", "chosen": "ho", "rejected": "no"},
     ChatPair([SYSTEM, ASK, BAD, AGAIN], [GOOD], [BAD])),
    ({"instruction": "hi", "input": "", "chosen": "ho", "rejected": "no"}, ChatPair([ASK], [GOOD], [BAD])),
    ({"instruction": "and?", "history": [["hi", "no"]], "system": "be brief", "chosen": "ho", "rejected": "no"},
     ChatPair([SYSTEM, ASK, BAD, AGAIN], [GOOD], [BAD])),
    ({"instruction": "hi", "input": "there", "chosen": [GOOD], "rejected": [BAD]},
     ChatPair([{"role": "user", "content": "hi\n\nthere"}], [GOOD], [BAD])),
    # ultrafeedback_binarized: the prompt is there twice, and the scores are nobody's.
    ({"prompt": "hi", "prompt_id": "f0", "chosen": [ASK, GOOD], "rejected": [ASK, BAD], "messages": [ASK, GOOD],
      "score_chosen": 8.0, "score_rejected": 2.0}, ChatPair([ASK], [GOOD], [BAD])),
    # hh-rlhf: plain texts that share their beginning.
    ({"chosen": "\n\nHuman: hi\n\nAssistant: ho", "rejected": "\n\nHuman: hi\n\nAssistant: no"},
     TextPair(None, "\n\nHuman: hi\n\nAssistant: ho", "\n\nHuman: hi\n\nAssistant: no")),
    ({"prompt": [{**ASK, "train": False}], "chosen": [{"from": "gpt", "value": "ho"}], "rejected": [BAD]},
     ChatPair([ASK], [GOOD], [BAD])),
])  # fmt: skip
def test_shapes(row, expected):
    assert normalise_pair(row, "preference") == expected


def test_tokens():
    row = {"prompt_ids": [1, 2], "chosen_ids": "[3]", "rejected_ids": [3, 4]}
    assert normalise_pair(row, "tokenized") == TokenPair([1, 2], [3], [3, 4])


def tokens(**more):
    return {"prompt_ids": [1], "chosen_ids": [2], "rejected_ids": [3], **more}


def chats(**more):
    return {"prompt": [ASK], "chosen": [GOOD], "rejected": [BAD], **more}


@pytest.mark.parametrize("row, name, words", [
    (tokens(prompt_ids=[]), "tokenized", ["prompt_ids is empty", "at least one token"]),
    (tokens(chosen_ids=[]), "tokenized", ["chosen_ids is empty"]),
    (tokens(rejected_ids=[1, 2.5]), "tokenized", ["rejected_ids[1] must be a whole number"]),
    (tokens(chosen_ids=[-1]), "tokenized", ["chosen_ids holds a negative id"]),
    (tokens(rejected_ids=None), "tokenized", ["rejected_ids is null in this row"]),
    (chats(), "tokenized", ["no prompt_ids", "looks like format preference"]),
    ({"messages": [ASK, GOOD]}, "preference", ["no chosen and no rejected", "method=sft trains on", "messages"]),
    ({"question": "x"}, "preference", ["no known format has the keys question", "prompt_ids, chosen_ids"]),
    (chats(chosen="ho"), "preference", ["chosen is a string and rejected a list"]),
    (chats(chosen=7, rejected=7), "preference", ["chosen must be a list, not a number"]),
    (chats(chosen=[]), "preference", ["chosen is an empty list"]),
    (chats(chosen=[AGAIN, GOOD]), "preference", ["chosen[0] is a user message", "begins with an assistant message"]),
    (chats(rejected=[{"role": "bot", "content": "x"}]), "preference", ["rejected[0].role is 'bot'"]),
    (chats(rejected=[{**BAD, "train": False}]), "preference", ["rejected[0] asks not to be trained"]),
    (chats(chosen=[ASK], rejected=[ASK]), "preference", ["chosen has no message beyond the prompt's"]),
    (chats(prompt=None), "preference", ["do not begin with the same message", "prompt is null"]),
    (chats(prompt=None, query="hi"), "preference", ["in addition to chosen", "query", "columns={prompt: query}"]),
    (chats(prompt=None, question="hi", input="x"), "preference", ["question, input. Name the prompt"]),
    (chats(prompt=None, conversations=[{"from": "x", "value": "y"}]), "preference", ["conversations[0].from is 'x'"]),
    (chats(prompt="other", chosen=[ASK, GOOD], rejected=[ASK, BAD]), "preference", ["prompt is a string that is none"]),
    ({"chosen": [ASK, GOOD, ASK, GOOD], "rejected": [ASK, GOOD, AGAIN, BAD]}, "preference", ["chosen[2] is a user"]),
    ({"chosen": "yes", "rejected": "no", "id": 1}, "preference", ["do not begin alike", "chosen, rejected, id"]),
    ({"chosen": "a", "rejected": "ab", "instruction": 7}, "preference", ["instruction must be a string, not a number"]),
    ({"prompt": "p", "chosen": "a", "rejected": "b", "tools": [TOOL]}, "preference", ["tools goes with messages"]),
    ({"prompt": "p", "chosen": "a", "rejected": "b", "system": "s"}, "preference", ["system goes with messages"]),
    ({"prompt": 5, "chosen": "a", "rejected": "b"}, "preference", ["prompt must be a string, not a number"]),
    (chats(prompt=5), "preference", ["prompt must be a list, not a number"]),
])  # fmt: skip
def test_mistakes_name_the_key(row, name, words):
    with pytest.raises(UserError) as error:
        normalise_pair(row, name)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_single_methods_refuse_pairs():
    for row, name in ((chats(), "preference"), (chats(), "text"), (tokens(), "text"), (tokens(), "tokenized")):
        with pytest.raises(UserError, match="set method=dpo|looks like format preference"):
            normalise(row, name)
