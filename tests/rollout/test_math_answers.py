"""Answers taken out of texts and compared: pairs that are equal, pairs that are not, and texts made to be slow."""

import doctest
import importlib
import math
import time
from fractions import Fraction

import pytest

from dtrain.base.errors import UserError
from dtrain.recipe.rollouts import Reward
from dtrain.rl.checks import reward_problems
from dtrain.rl.rewards import BUILT_IN
from dtrain.rl.rewards.form import format_tags, json_valid, length_penalty, regex, repetition_penalty
from dtrain.rl.rewards.math_answers import extract_answer, parse_answer
from dtrain.rl.rewards.right_answers import cosine_length, math_exact, numeric, text_exact
from tests.problem_lines import lines

EQUAL = [  # what a completion says, what the data has
    ("The answer is 42.", "42"),
    ("6*7=42", "so it is 42 #### 42"),
    ("#### 1,234", "1234"),
    ("#### 1,234\nThe end.", 1234),
    ("#### 41\nNo:\n#### 42\n", "42"),
    (r"\boxed{42}", 42.0),
    (r"first \boxed{1}, then $\boxed{42}$.", "42"),
    (r"\boxed{\frac{1}{2}}", "0.5"),
    (r"\boxed{\dfrac{-3}{6}}", "-1/2"),
    (r"\boxed{-\frac12}", "-.5"),
    (r"\boxed{1\frac{1}{2}}", "1.5"),
    ("answer: 2 1/2", "5/2"),
    (r"\boxed{3.0}", "3"),
    (r"\boxed{1{,}000{,}000}", "1000000"),
    (r"\boxed{12\,345}", "12345"),
    (r"\boxed{\$18}", "18"),
    ("She makes $18 every day.", "18"),
    ("**Answer:** $-7$", "-7"),
    ("The final answer is: \u22127", "-7"),
    (r"\boxed{25\%}", "25"),
    (r"\boxed{25\%}", "0.25"),
    ("25 percent", "25%"),
    (r"\boxed{42\text{ cm}}", "42"),
    (r"\boxed{42\,\mathrm{cm}^2}", "42"),
    (r"\boxed{90^\circ}", "90"),
    ("answer is 5 apples.", "5"),
    (r"\boxed{3.2\times10^5}", "320000"),
    (r"\boxed{1e-3}", "0.001"),
    (r"\boxed{x = 7}", "7"),
    (r"\boxed{(1, 2)}", r"\left(1,2\right)"),
    (r"\boxed{(\frac{1}{2}, 3)}", "(0.5, 3)"),
    (r"\boxed{2\sqrt{3}}", r"2 \sqrt{3}"),
    (r"\boxed{\frac{x}{2}}", "x/2"),
    (r"\boxed{\text{Yes}}", "yes"),
    (r"\boxed{\text{(B)}}", "B"),
    (r"\boxed{(3)}", "3"),
    ("The answer is yes.", "Yes"),
    (r"\boxed{\{1, 2\}}", r"\{1,2\}"),
    ("... = 3 + 4 = 7", "7"),
    ("between 3-5", "5"),
    (r"\boxed{0.1}", 0.1),
    (r"\boxed{0.0000001}", 1e-7),
    (r"\boxed 7", "7"),
    (r"a truncated \boxed{8} and \boxed{9", "8"),
    ("answer is 10 because 2*5=10 and 3*3=9", "10"),
    ("9" * 300, "9" * 300),
    ("#### " + "9" * 450, "9" * 450),
]
DIFFERENT = [
    ("42", "43"),
    ("", "42"),
    ("no number", "42"),
    (r"\boxed{}", "0"),
    (r"\boxed{3 or 4}", "3"),
    ("The answer is 3 or 4.", "3"),
    (r"\boxed{3 \text{ million}}", "3"),
    (r"\boxed{5x}", "5"),
    (r"\boxed{2\pi}", "2"),
    (r"\boxed{(1, 2)}", "(2, 1)"),
    (r"\boxed{(1, 2)}", "[1, 2]"),
    (r"\boxed{(1, 2, 3)}", "(1, 2)"),
    (r"\boxed{1/0}", "0"),
    (r"\boxed{25\%}", "2500"),
    (r"\boxed{0.3333}", "1/3"),
    (r"\boxed{42} no, \boxed{41}", "42"),
    ("#### 42 #### 41", "42"),
    (r"\boxed{x}", "X"),
    (r"\boxed{2^10}", "2"),
    ("9" * 300 + "8", "9" * 300 + "7"),
    (r"\boxed{1e99999999}", "1"),
]
SLOW = [
    r"\boxed{" * 14_000,
    r"\boxed{" + "{" * 99_000,
    r"\boxed{1}" * 11_000,
    r"\text{" * 16_000,
    r"\frac{" * 16_000,
    r"\boxed" + " " * 99_000,
    "answer" + " " * 99_000,
    "answer is " * 10_000,
    "#### " * 20_000,
    "1" * 100_000,
    "1," * 50_000,
    "111," * 25_000 + "1111",
    "1/" * 50_000,
    "1." * 50_000,
    "-" * 100_000,
    " " * 100_000,
    "answer is " + "(" * 100_000,
    r"\boxed{" + "(" * 90_000 + "}",
    "<think>" * 14_000,
    "[" * 100_000,
    "```\n" + "\n" * 99_000,
    "{" * 50_000 + "}" * 50_000,
    "1e" * 50_000,
    "\u0664\u0665\ud800" * 30_000,
]


@pytest.mark.parametrize(("said", "right"), EQUAL)
def test_equal_answers(said, right):
    assert math_exact([said], answer=[right]) == [1.0]


@pytest.mark.parametrize(("said", "right"), DIFFERENT)
def test_different_answers(said, right):
    assert math_exact([said], answer=[right]) == [0.0]


def test_numbers_are_exact():
    assert parse_answer("0.1").value == Fraction(1, 10)
    assert parse_answer(r"\frac{22}{7}").value == Fraction(22, 7)
    assert parse_answer("1,234.5").value == Fraction(2469, 2)
    assert extract_answer("nothing here") is None


def test_a_row_without_an_answer_has_no_reward_and_a_missing_column_is_named():
    assert math_exact(["1", "2", "0"], answer=[None, "", 0]) == [None, None, 1.0]
    assert numeric(["1", "2", "3"], answer=[None, "no number", 3]) == [None, None, 1.0]
    with pytest.raises(UserError, match=r"no column 'answer' \(it has gold\); name the right one: grpo.rewards="):
        math_exact(["1"], gold=["1"])
    assert math_exact(["1"], column="gold", gold=["1"]) == [1.0]


@pytest.mark.parametrize(
    ("answer", "right", "wrong", "rewards"),
    [
        (["New York", "NYC"], ["NYC", "new  york"], ["York"], (text_exact,)),
        (["1/2", "0.25"], ["\\boxed{0.5}", "so 1/4"], ["2"], (math_exact, numeric)),
        (["no number", 7], ["7"], ["8"], (math_exact, text_exact, numeric)),
        (4, ["4", "4.0"], ["5", "40"], (math_exact, text_exact, numeric)),
        (4.0, ["4", "4.0"], ["4.5"], (math_exact, text_exact, numeric)),
        (1234567, ["1,234,567", "1234567"], ["12,34,567"], (text_exact,)),
        (1e-7, ["0.0000001"], ["0.000001"], (math_exact, text_exact, numeric)),
        (True, ["true", "True"], ["false", "1"], (text_exact,)),
        (True, ["#### true", "#### True"], ["#### false", "1"], (math_exact,)),
        (["red", "blue"], ["#### blue"], ["#### green"], (math_exact,)),
    ],
)
def test_answers_may_be_lists_and_numbers(answer, right, wrong, rewards):
    for reward in rewards:
        options = {"ignore_case": True} if reward is text_exact else {}
        for texts, expected in ((right, 1.0), (wrong, 0.0)):
            nested = [{"truth": {"is": answer}}] * len(texts)
            assert reward(texts, answer=[answer] * len(texts), **options) == [expected] * len(texts), reward
            found = reward(texts, column="row.truth.is", row=nested, **options)
            assert found == [expected] * len(texts), reward


def test_rows_without_an_accepted_answer_have_no_reward():
    empty = [None, "", [], [None, ""], float("nan")]
    for reward in (math_exact, text_exact, numeric):
        assert reward(["1"] * 5, answer=empty) == [None] * 5
    assert cosine_length(["#### 7"] * 2, [[1]] * 2, max_tokens=1, answer=[["8", 7], []]) == [0.5, None]
    objects = [{"is": "1"}, {}, None]
    assert text_exact(["1"] * 3, column="truth.is", truth=objects) == [1.0, None, None]


@pytest.mark.parametrize("reward", [math_exact, text_exact, numeric])
def test_an_object_is_no_answer(reward):
    with pytest.raises(UserError, match=r"'gold' holds an object \(value, aliases\).*column: gold.aliases"):
        reward(["1"], column="gold", gold=[{"value": "1", "aliases": ["1", "one"]}])
    with pytest.raises(UserError, match="holds a list of lists or objects"):
        reward(["1"], answer=[[{"text": "1"}]])
    with pytest.raises(UserError, match=r"no column 'gold.value' \(it has answer\)"):
        reward(["1"], column="gold.value", answer=["1"])


def test_close_numbers():
    assert numeric(["3.14"] * 3, answer=[3.1415] * 3, absolute=0.01) == [1.0] * 3
    assert numeric(["3.14"], answer=["3.1415"]) == [0.0]
    assert numeric(["99.5", "98.9"], answer=[100, 100], relative=0.01) == [1.0, 0.0]
    assert numeric(["0.1"], answer=[0.1], relative=0.0) == [1.0]


def test_tags_in_order_once_each():
    good = "<think> a </think>\n\n<answer>b</answer>\n"
    for text, strict, loose in (
        (good, 1, 1),
        ("so " + good, 0, 1),
        (good + "!", 0, 1),
        (good + good, 0, 0),
        ("<answer>b</answer><think>a</think>", 0, 0),
        ("<think><answer>b</answer></think>", 0, 0),
        ("</think>a<think><answer>b</answer>", 0, 0),
        ("<think>a</think>", 0, 0),
        ("", 0, 0),
    ):
        assert format_tags([text]) == [strict], text
        assert format_tags([text], strict=False) == [loose], text
    assert format_tags(["a</x>"], tags=["x"], prefix="<x>") == [1.0]


def test_text():
    given = ["a  b", "A b", "a", "", "7"]
    assert text_exact(given, answer=["a b\n", "a b", "a b", "a", 7]) == [1.0, 0.0, 0.0, 0.0, 1.0]
    assert text_exact(given, answer=["a b", "a b", None, "", "8"], ignore_case=True) == [1.0, 1.0, None, None, 0.0]
    with pytest.raises(UserError, match="gold"):
        text_exact(["a"], column="gold", answer=["a"])


def test_json():
    for text, valid in (("1", 1), (" [1, 2] ", 1), ("NaN", 0), ("", 0), ("{'a': 1}", 0), ("9" * 9000, 1), ("[1] x", 0)):
        assert json_valid([text]) == [valid], text[:9]
    assert json_valid(["```json\n{}\n```", "```\n{}\n```\nand more"]) == [1.0, 0.0]


@pytest.mark.parametrize("text", SLOW, ids=[ascii(text[:12]) for text in SLOW])
def test_any_text_gives_a_number_soon(text):
    """100,000 characters made to be slow: a number each, in a time that only a quadratic rule would exceed."""
    started = time.process_time()
    scores = [
        math_exact([text], answer=["1"]),
        math_exact(["1"], answer=[text]),
        numeric([text], answer=["1"]),
        format_tags([text]),
        json_valid([text]),
        text_exact([text], answer=["a b"]),
        text_exact(["a b"], answer=[text]),
        regex([text], pattern="a+b"),
    ]
    assert all(type(score) is float for (score,) in scores)
    assert time.process_time() - started < 2.0


@pytest.mark.parametrize("name", BUILT_IN)
def test_the_docstrings_examples(name):
    module = importlib.import_module(BUILT_IN[name].partition(":")[0])
    result = doctest.testmod(module)
    assert result.attempted and not result.failed
    assert not doctest.testmod(importlib.import_module("dtrain.rl.rewards.math_answers")).failed


def test_length_and_repetition_as_trl_has_them():
    """TRL 1.16's get_cosine_scaled_reward(16, -2, -0.25, 0.75, 3) and get_repetition_penalty_reward(2, -0.5), run once
    on these lengths and ids."""
    lengths, options = (0, 3, 16, 40), {"min_value_wrong": -2, "max_value_wrong": -0.25}
    options |= {"min_value_correct": 0.75, "max_value_correct": 3, "max_tokens": 16}
    ids = [[1] * length for length in lengths]
    trl = {7: [3.0, 2.8104033138403635, 0.75, 0.75], 8: [-2.0, -1.8525359107647272, -0.25, -0.25]}
    for said, expected in trl.items():
        found = cosine_length([f"#### {said}"] * 4, ids, gold=[7] * 4, column="gold", **options)
        assert found == pytest.approx(expected, rel=1e-12)
    assert cosine_length(["#### 7"], [[1]], max_tokens=9, answer=[None]) == [None]
    with pytest.raises(UserError, match="reward cosine_length: the data has no column 'answer'"):
        cosine_length(["#### 7"], [[1]], max_tokens=9, gold=[7])
    ids = [[1, 2, 1, 2, 1, 3], [4], [5, 5], [6, 6, 6]]
    assert repetition_penalty(ids, ngram_size=2, max_penalty=-0.5) == [-0.2, 0.0, 0.0, -0.25]


@pytest.mark.parametrize("call, says", [
    (lambda: repetition_penalty([[1, 1]], max_penalty=1.0), "max_penalty=1.0 must be a finite number, at most 0"),
    (lambda: repetition_penalty([[1, 1]], ngram_size=0), "ngram_size=0 must be a whole number, at least 1"),
    (lambda: length_penalty([[1]], target_tokens=9, max_tokens=9), "target_tokens=9 must be below max_tokens=9"),
    (lambda: cosine_length(["4"], [[1]], max_tokens=0, answer=[4]), "max_tokens=0 must be a whole number, at least 1"),
])  # fmt: skip
def test_a_reward_that_is_called_directly_refuses_what_a_recipe_may_not_say(call, says):
    """TRL's get_repetition_penalty_reward refuses a positive max_penalty too."""
    with pytest.raises(UserError, match=says):
        call()


def test_what_a_recipe_may_say():
    good = [
        Reward("math_exact", 1.0, {"column": "gold"}),
        Reward("regex", 0.5, {"pattern": "a|b", "full": True}),
        Reward("length_penalty", -0.5, {"target_tokens": 10, "max_tokens": 20}),
        Reward("json_valid", 1, {"required_keys": ["a"]}),
        Reward("my.module.fn", 1, {"anything": [1]}),
        Reward("my.module:fn"),
        Reward("judge", url="http://x/v1", model="m", rubric="r", kwargs={"concurrency": 2}),
    ]
    assert reward_problems(good) == []
    for reward, message in (
        (Reward("math_exat"), ".fn=math_exat is not a reward; did you mean math_exact?"),
        (Reward("my module.fn"), ".fn=my module.fn is not a reward; there are math_exact, "),
        (Reward(None), ".fn is missing. Set it to a reward (math_exact, "),
        (Reward("numeric", math.nan), ".weight=nan must be a finite number"),
        (Reward("regex"), ".kwargs.pattern is required by regex"),
        (Reward("regex", 1, {"pattern": "("}), ".kwargs.pattern=( must be a regular expression"),
        (
            Reward("python_tests", 1, {"isolated": False}),
            ".kwargs.isolated is not read by python_tests. Did you mean grpo.rewards[1].kwargs.allow_full_access?",
        ),
        (Reward("numeric", 1, {"colum": "a"}), ".kwargs.colum is not read by numeric. Did you mean grpo.rewards[1]"),
        (Reward("length_penalty", 1, {"target_tokens": 9, "max_tokens": 9}), ".kwargs.target_tokens=9 must be below"),
        (Reward("format_tags", 1, {"tags": []}), ".kwargs.tags=[] must be"),
        (Reward("cosine_length"), ".kwargs.max_tokens is required by cosine_length"),
        (Reward("repetition_penalty", 1, {"ngram_size": 0}), ".kwargs.ngram_size=0 must be a whole number, at least 1"),
        (Reward("repetition_penalty", 1, {"max_penalty": 1}), ".kwargs.max_penalty=1 must be a finite number, at most"),
    ):
        (found,) = lines(reward_problems([good[0], reward]))
        assert found.startswith(f"grpo.rewards[1]{message}"), found
    assert len(reward_problems([Reward("regex", 1, {"colum": 1, "full": 3})])) == 3
