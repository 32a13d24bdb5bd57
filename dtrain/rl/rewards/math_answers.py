"""Answers to mathematical questions: they are found in a text, and parsed to exact numbers if they are numbers.

    text of a completion                 extract_answer      parse_answer
    "so \\boxed{\\frac{3}{4}}."          "\\frac{3}{4}"      the number 3/4
    "The answer is $1,000."              "$1,000"            the number 1000
    "#### (1, 2)"                        "(1, 2)"            two numbers in brackets

No function raises an exception or takes more than linear time, whatever the model wrote. Only the first
`MAX_ANSWER_LENGTH` characters of an answer are read.
"""

import re
from dataclasses import dataclass
from fractions import Fraction

MAX_ANSWER_LENGTH = 500  # characters
_MAX_DIGITS = 400  # a longer number is compared as text

_BRACES = re.compile(r"\\[{}]|\\(?:boxed|fbox)\s*\{|[{}]")
_BARE_BOX = re.compile(r"\\boxed\s+([^\s$]{1,500})")
_ANSWER_IS = re.compile(r"\banswer\b[^\S\n]*(?:is\b|:|=)[^\S\n]*:?", re.IGNORECASE)
_THIN_SPACE = re.compile(r"(?<=\d)\\,(?=\d{3})")
_SPACES = re.compile(r"\\[,;:! ]|\\q?quad\b|~")
_WRAPPED = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mbox|operatorname)\s*\{([^{}]*)\}")
_SHORT_FRACTION = re.compile(r"\\frac\s*(\d)\s*(\d)")
_HALF_FRACTION = re.compile(r"\\frac\s*(\d)\s*\{")
_FRACTION = re.compile(r"\\frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}")
_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)"
_NUMBER = rf"(?:{_DIGITS}(?:\.\d+)?|\.\d+)"
_ANY_NUMBER = re.compile(
    rf"(?:(?<![\w.)\]}}])[-+])?\$?(?:\\frac\{{[-+]?{_NUMBER}\}}\{{{_NUMBER}\}}|{_NUMBER}(?:\s?/\s?{_NUMBER})?)\s?\\?%?"
)
# "e5", "\\times10^5" or "x10^{5}"
_POWER = r"(?:[eE](?P<exponent>[-+]?\d{1,4})(?!\w)|(?:\\times|\\cdot|\*|×|x)10\^\{?(?P<ten_exponent>[-+]?\d{1,4})\}?)?"
# A sign, then one of "3/4", "1 3/4" and "0.75" or "7.5e2", then perhaps "%"
_SIGNED = re.compile(
    rf"(?P<sign>[-+]?)(?:(?P<numerator>{_NUMBER})/(?P<denominator>{_NUMBER})"
    rf"|(?P<whole>{_DIGITS})[ ](?P<part>{_DIGITS})/(?P<of>{_DIGITS})"
    rf"|(?P<decimal>{_NUMBER}){_POWER})(?P<percent>\\?%)?"
)
_UNIT = re.compile(
    r"(?:(?:\s*\^\s*\{?\s*\\circ\s*\}?|°)\s*[CF]?"
    r"|\s+(?!(?:or|and|to|plus|minus|times|hundred|thousand|million|billion|dozen)\b)[A-Za-z]{2,}[^\d]*"
    r"|(?:\s+[mgslh]|\s*(?:km|cm|mm|kg|mg|lbs?|oz|ml|kl|hrs?|min|mph|mi|in|ft|yd|dollars?|cents?|degrees?))"
    r"(?:\s*\^?\s*\{?\s*[23]\s*\}?)?"
    r")\.?",
    re.DOTALL,
)
_ONE_WORD = re.compile(r"\((\w+)\)")
_NAMED = re.compile(r"\s*[A-Za-z](?:_\{?\w+\}?)?\s*=\s*")


@dataclass(frozen=True)
class MathAnswer:
    """A parsed answer: a number, several answers, or text.

    Attributes:
        text: The normalised text, which is compared if the answer is no number. For several answers, their brackets.
        value: The number. None if the answer is no number.
        percent: Whether it has a percent sign. `value` is then the number before the sign: 25 for "25%".
        parts: Several answers, such as those of (1, 2).
    """

    text: str
    value: Fraction | None = None
    percent: bool = False
    parts: tuple["MathAnswer", ...] = ()


def extract_answer(text: str) -> str | None:
    """Return the final answer in a solution, as it is written. None if there is none.

    It is the last \\boxed{..}, else the text after the last "####", else after the last "answer is", else the last
    number.

    Example:
        >>> extract_answer("6 * 7 = 42, so the answer is 42.")
        '42'
        >>> extract_answer("first \\\\boxed{1}, then \\\\boxed{\\\\frac{1}{2}}")
        '\\\\frac{1}{2}'
    """
    marked = extract_marked_answer(text)
    if marked is not None:
        return marked
    last_number = _last_match(_ANY_NUMBER, _strip_layout(text))
    return None if last_number is None else last_number.group().strip()


def extract_marked_answer(text: str) -> str | None:
    """Return the marked answer in a solution: as `extract_answer`, but not the last number."""
    boxed = _last_box(text)
    if boxed is not None:
        return boxed.strip()
    if "####" in text:  # GSM8K
        return _first_line(text.rpartition("####")[2])
    text = text.replace("**", "")
    last = _last_match(_ANSWER_IS, text)
    if last is None:
        return None
    line = _first_line(text[last.end() :])
    if parse_answer(line).value is not None:
        return line.rstrip(".")
    # "The answer is 5 apples, because ...": the number, unless the sentence names several answers.
    number = _ANY_NUMBER.search(_strip_layout(line))
    sentence = line.partition(". ")[0].rstrip(".")
    has_several = bool(parse_answer(sentence).parts) or " or " in sentence
    if number and not has_several:
        return number.group().strip()
    return sentence or None


def _first_line(text: str) -> str:
    """Return the first line of `text` that is not empty, cut to MAX_ANSWER_LENGTH."""
    return text.strip().partition("\n")[0][:MAX_ANSWER_LENGTH].strip()


def _last_match(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    last = None
    for match in pattern.finditer(text):
        last = match
    return last


def parse_answer(text: str) -> MathAnswer:
    """Parse an answer to a number, several answers, or normalised text.

    Numbers may have signs, thousands separators (1,234 and 1{,}234), decimals, the forms a/b, \\frac and \\dfrac, a
    whole part (1 3/4), powers of ten, and a percent sign. Currency signs, units and "x =" are ignored.

    Example:
        >>> parse_answer("x = \\\\frac{3}{4}").value
        Fraction(3, 4)
        >>> parse_answer("$1,234.50").value
        Fraction(2469, 2)
        >>> [part.value for part in parse_answer("(1, 2)").parts]
        [Fraction(1, 1), Fraction(2, 1)]
    """
    text = _strip_layout(text[:MAX_ANSWER_LENGTH]).strip().rstrip(".").strip()
    name = _NAMED.match(text)  # "x ="
    if name and name.end() < len(text):
        text = text[name.end() :]
    inner = text.strip()
    value, percent = _number(inner)
    if value is not None:
        return MathAnswer(inner, value, percent)
    is_bracketed = inner[:1] in "([{" and inner[-1:] in ")]}" and len(inner) > 2
    bare = inner[1:-1] if is_bracketed else inner
    pieces = _split_at_commas(bare)
    if len(pieces) > 1 and all(piece.strip() for piece in pieces):
        brackets = inner[0] + inner[-1] if is_bracketed else ""
        return MathAnswer(brackets, parts=tuple(parse_answer(piece) for piece in pieces))
    if is_bracketed and inner[0] == "(":  # one number in parentheses
        value, percent = _number(bare)
        if value is not None:
            return MathAnswer(bare, value, percent)
    text = "".join(inner.replace("$", "").split())
    text = _FRACTION.sub(r"(\1)/(\2)", text)
    text = _ONE_WORD.sub(r"\1", text)
    is_word = text.isalpha() and len(text) > 1  # the case of a single letter matters: it is a variable
    return MathAnswer(text.casefold() if is_word else text)


def answers_equal(first: MathAnswer, second: MathAnswer) -> bool:
    """Return whether two answers are equal.

    Numbers are equal if their values are. p% equals both p and p/100 if the other number has no percent sign. Several
    answers are equal if each is, in the same order and brackets. Any other answers are equal if their texts are.

    Example:
        >>> percent = parse_answer("25%")
        >>> answers_equal(percent, parse_answer("1/4")), answers_equal(percent, parse_answer("25"))
        (True, True)
        >>> answers_equal(parse_answer("[1, 2]"), parse_answer("(1, 2)"))
        False
    """
    if first.value is not None and second.value is not None:
        if first.percent == second.percent:
            return first.value == second.value
        percent, number = (first.value, second.value) if first.percent else (second.value, first.value)
        return number in (percent, percent / 100)
    if first.parts or second.parts:
        if len(first.parts) != len(second.parts) or first.text != second.text:
            return False
        return all(answers_equal(left, right) for left, right in zip(first.parts, second.parts, strict=True))
    if first.value is not None or second.value is not None:
        return False
    return first.text == second.text != ""


def _last_box(text: str) -> str | None:
    """Return the contents of the \\boxed{..} that is closed last. None if there is none."""
    open_at: list[int | None] = []  # for each open brace the position after it if it is a box's, else None
    last = None
    for match in _BRACES.finditer(text):
        token = match.group()
        if token in ("\\{", "\\}"):
            continue
        if token == "}":
            begin = open_at.pop() if open_at else None
            if begin is not None:
                last = text[begin : min(match.start(), begin + MAX_ANSWER_LENGTH)]
        else:
            open_at.append(match.end() if token != "{" else None)
    if last is None:
        bare = _BARE_BOX.search(text[text.rfind("\\boxed") :]) if "\\boxed" in text else None
        last = bare.group(1) if bare else None
    return last


def _strip_layout(text: str) -> str:
    """Return `text` without LaTeX commands for layout, spaces and styles. Fractions become \\frac{..}{..}."""
    text = text.replace("\u2212", "-").replace("{,}", ",").replace("\\left", "").replace("\\right", "")
    text = text.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac").replace("\\$", "$").replace("\\!", "")
    for mark in ("\\(", "\\)", "\\[", "\\]", "**"):
        text = text.replace(mark, "")
    text = _WRAPPED.sub(r" \1", _SPACES.sub(" ", _THIN_SPACE.sub("", text)))
    return _HALF_FRACTION.sub(r"\\frac{\1}{", _SHORT_FRACTION.sub(r"\\frac{\1}{\2}", text))


def _number(text: str) -> tuple[Fraction | None, bool]:
    """Return (value, whether there is a percent sign) of a number. The value is None if the text is no number."""
    text = text.replace("$", "").replace("€", "").replace("£", "").strip()
    if text.startswith("{") and text.endswith("}") and text.count("{") == 1:
        text = text[1:-1].strip()
    text = _FRACTION.sub(r" (\1)/(\2)", text).strip()
    text = re.sub(r"\(\s*([-+]?[\d.,]+)\s*\)/\(\s*([\d.,]+)\s*\)", r"\1/\2", text)
    text = re.sub(r"\s*(\\times|\\cdot|[*×/^])\s*", r"\1", text)
    sign_and_space = re.match(r"[-+]\s+", text)
    if sign_and_space:
        text = text[0] + text[sign_and_space.end() :]
    match = _SIGNED.match(text)
    if match is None:
        return None, False
    tail = text[match.end() :]
    if tail.strip() and not _UNIT.fullmatch(tail):
        return None, False
    value = _value_of(match)
    if value is None:
        return None, False
    has_percent = match["percent"] is not None or tail.strip().startswith("percent")
    return (-value if match["sign"] == "-" else value), has_percent


def _value_of(match: re.Match[str]) -> Fraction | None:
    """Return the value of a match of _SIGNED without its sign. None if it has too many digits, or divides by 0."""
    exponent = int(match["exponent"] or match["ten_exponent"] or 0)
    terms = {}
    for name in ("numerator", "denominator", "whole", "part", "of", "decimal"):
        if match[name] is not None:
            terms[name] = match[name].replace(",", "")
    if any(len(term) > _MAX_DIGITS for term in terms.values()) or abs(exponent) > _MAX_DIGITS:
        return None
    numbers = {name: Fraction(term) for name, term in terms.items()}
    if numbers.get("denominator") == 0 or numbers.get("of") == 0:
        return None
    if "numerator" in numbers:
        return numbers["numerator"] / numbers["denominator"]
    if "whole" in numbers:
        return numbers["whole"] + numbers["part"] / numbers["of"]
    return numbers["decimal"] * Fraction(10) ** exponent


def _split_at_commas(text: str) -> list[str]:
    """Split at commas and semicolons that are not in brackets.

    Example:
        >>> _split_at_commas("1, (2, 3); 4")
        ['1', ' (2, 3)', ' 4']
    """
    pieces = []
    depth, begin = 0, 0
    for index, letter in enumerate(text):
        if letter in "([{":
            depth += 1
        elif letter in ")]}":
            depth -= 1
        elif letter in ",;" and depth == 0:
            pieces.append(text[begin:index])
            begin = index + 1
    return [*pieces, text[begin:]]
