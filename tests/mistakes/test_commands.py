"""Words typed wrong after `dtrain` are answered with what to type, by status 1 or 2, and never with a traceback."""

import pytest

from dtrain import recipe as config
from dtrain.commands.cli import main
from dtrain.commands.eval.evaluate import REWARD_OPTIONS, with_options
from dtrain.commands.suggestions import COMMANDS as THEIRS
from tests.mistakes.commands import COMMANDS
from tests.tiny import tiny_recipe


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("commands")
    (root / "sft.yaml").write_text(config.to_yaml(tiny_recipe(root)))
    return root


@pytest.mark.parametrize("mistake", COMMANDS, ids=lambda one: one.name)
def test_commands_answer(mistake, root, capsys):
    try:
        status = main(mistake.words(root))
    except SystemExit as error:
        status = error.code
    caught = capsys.readouterr()
    assert status == mistake.status and caught.out == ""
    said = " ".join(caught.err.split())
    assert not [words for words in mistake.says if words not in said], caught.err


def test_commands_of_other_tools_are_none_of_ours(capsys):
    for word, said in THEIRS.items():
        with pytest.raises(SystemExit):
            main([word])
        assert said.replace("{word}", word) in capsys.readouterr().err, word


def test_words_with_an_equals_sign_that_are_no_keys_pass(root, capsys):
    assert main(["generate", str(root / "gone"), "--prompt", "a=b"]) == 1
    (root / "x=1.jsonl").write_text("")
    assert main(["eval", str(root / "gone"), str(root / "x=1.jsonl")]) == 1
    assert "no such directory" in capsys.readouterr().err


def test_eval_speaks_of_its_options():
    said = with_options("data.chat_template: there is no file x")
    assert said == "data.chat_template: there is no file x (data.chat_template is --chat-template here)"
    assert with_options("there is no file x") == "there is no file x"
    assert REWARD_OPTIONS.set_column("math_exact", "gold") == """--reward 'math_exact={"column": "gold"}'"""
