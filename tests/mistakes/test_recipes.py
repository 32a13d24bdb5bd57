"""`dtrain validate` and `dtrain run` answer each mistake of the table with file, key and fix, without a traceback."""

import pytest

from dtrain.commands.cli import main
from tests.mistakes import Mistake, write_sound
from tests.mistakes.recipes import FILES, NUMBERS, PASTED, RECIPES, ROWS, SLIPS, VALUES, WHOLE, WORDS


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A directory with a sound recipe of each kind."""
    root = tmp_path_factory.mktemp("mistakes")
    write_sound(root)
    return root


def answer(mistake: Mistake, command: str, root, capsys) -> tuple[int, str]:
    """Status and stderr of `dtrain COMMAND` on a recipe with the mistake."""
    mistake.write(root)
    base = mistake.base if mistake.base in mistake.files else f"{mistake.base}.yaml"
    status = main([command, str(root / base), *mistake.words(root)])
    return status, capsys.readouterr().err


@pytest.mark.parametrize("name", ["sft", "dpo", "grpo"])
def test_the_recipes_are_sound_without_a_mistake(name, root, capsys):
    assert answer(Mistake((), (), base=name), "validate", root, capsys) == (0, "")


@pytest.mark.parametrize("mistake", RECIPES, ids=lambda one: one.name)
def test_validate_answers_each(mistake, root, capsys):
    status, said = answer(mistake, "validate", root, capsys)
    assert status == mistake.status and not [words for words in mistake.says if words not in said], said


# Two of each table; `run` loads and checks a recipe by the calls that `validate` makes.
TABLES = (NUMBERS, SLIPS, VALUES, FILES, PASTED, ROWS, WORDS, WHOLE)
RUN = [table[at] for table in TABLES for at in (0, len(table) // 2)]


@pytest.mark.parametrize("mistake", RUN, ids=lambda one: one.name)
def test_run_answers_as_validate_does(mistake, root, capsys):
    status, said = answer(mistake, "run", root, capsys)
    assert status == mistake.status and not [words for words in mistake.says if words not in said], said


def test_the_table_is_long_and_holds_no_mistake_twice():
    assert len(RECIPES) >= 200
    assert len({(one.typed, one.base) for one in RECIPES}) == len(RECIPES)
