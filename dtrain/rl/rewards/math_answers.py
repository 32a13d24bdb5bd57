"""Answers to mathematical questions, taken out of a text, and read as exact numbers where they are numbers.

Every function is total and takes time linear in its text; only the first `LONGEST` characters of an answer are read.
"""

import re
from dataclasses import dataclass
from fractions import Fraction

LONGEST = 500  # characters of an answer
_MOST_DIGITS = 400  # of a number; what is longer is compared as text

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
_POWER = r"(?:[eE]([-+]?\d{1,4})(?!\w)|(?:\\times|\\cdot|\*|×|x)10\^\{?([-+]?\d{1,4})\}?)?"
_SIGNED = re.compile(
    rf"([-+]?)(?:({_NUMBER})/({_NUMBER})|({_DIGITS})[ ]({_DIGITS})/({_DIGITS})|({_NUMBER}){_POWER})(\\?%)?"
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
    """A parsed answer. value: where it is a number; percent: it was written with a percent sign, before division by
    100.

    parts: where it is several, (1, 2). text: normalised, for what is neither.
    """

    text: str
    value: Fraction | None = None
    percent: bool = False
    parts: tuple["MathAnswer", ...] = ()


def extract_answer(text: str) -> str | None:
    """Return the answer that a solution ends in, as it is written: the last \\boxed{..}, else what follows the last
    "####", else the last "answer is", else the last number; None without any.

    >>> extract_answer("6 * 7 = 42, so the answer is 42.")
    '42'
    >>> extract_answer("first \\\\boxed{1}, then \\\\boxed{\\\\frac{1}{2}}")
    '\\\\frac{1}{2}'
    """
    marked = extract_marked_answer(text)
    if marked is not None:
        return marked
    last = [None, *_ANY_NUMBER.finditer(_plain(text))][-1]
    return None if last is None else last.group().strip()


def extract_marked_answer(text: str) -> str | None:
    """Return the answer that a solution marks: that of `extract_answer`, without its last resort, the last number."""
    boxed = _last_box(text)
    if boxed is not None:
        return boxed.strip()
    if "####" in text:
        return text.rpartition("####")[2].strip().partition("\n")[0][:LONGEST].strip()
    text = text.replace("**", "")
    last = [None, *_ANSWER_IS.finditer(text)][-1]
    if last is None:
        return None
    line = text[last.end() :].lstrip().partition("\n")[0][:LONGEST].strip()
    if read(line).value is not None:
        return line.rstrip(".")
    number = _ANY_NUMBER.search(_plain(line))
    sentence = line.partition(". ")[0].rstrip(".")
    if number and not read(sentence).parts and " or " not in sentence:
        return number.group().strip()
    return sentence or None


def read(text: str) -> MathAnswer:
    """Parse an answer as a number, several answers, or normalised text.

    Understood: signs, thousands separators (1,234 and 1{,}234), decimals, a/b, \\frac and \\dfrac, mixed numbers,
    powers of ten, percent; currency signs, units and "x =" are left out.
    """
    text = _plain(text[:LONGEST]).strip().rstrip(".").strip()
    named = _NAMED.match(text)
    if named and named.end() < len(text):
        text = text[named.end() :]
    inner = text.strip()
    value, percent = _number(inner)
    if value is not None:
        return MathAnswer(inner, value, percent)
    bare = inner[1:-1] if inner[:1] in "([{" and inner[-1:] in ")]}" and len(inner) > 2 else inner
    pieces = _at_commas(bare)
    if len(pieces) > 1 and all(piece.strip() for piece in pieces):
        brackets = inner[0] + inner[-1] if bare is not inner else ""
        return MathAnswer(brackets, parts=tuple(read(piece) for piece in pieces))
    if inner[:1] == "(" and bare is not inner:
        value, percent = _number(bare)
        if value is not None:
            return MathAnswer(bare, value, percent)
    text = _ONE_WORD.sub(r"\1", _FRACTION.sub(r"(\1)/(\2)", "".join(inner.replace("$", "").split())))
    return MathAnswer(text.casefold() if text.isalpha() and len(text) > 1 else text)


def equal(first: MathAnswer, second: MathAnswer) -> bool:
    """Return whether two answers are equal. Numbers are compared by value, a percentage both as p and as p/100 where
    the other has no percent sign; several one by one, in their order, in the same brackets; the rest by text."""
    if first.value is not None and second.value is not None:
        if first.percent == second.percent:
            return first.value == second.value
        percent, plain = (first.value, second.value) if first.percent else (second.value, first.value)
        return plain in (percent, percent / 100)
    if first.parts or second.parts:
        pairs = zip(first.parts, second.parts, strict=False)
        same = len(first.parts) == len(second.parts) and first.text == second.text
        return same and all(equal(left, right) for left, right in pairs)
    return first.value is None and second.value is None and first.text == second.text != ""


def _last_box(text: str) -> str | None:
    """Return the contents of the \\boxed{..} that is closed last; None without any."""
    open_at: list[int | None] = []  # where a box begins, None for other braces
    last = None
    for match in _BRACES.finditer(text):
        token = match.group()
        if token in ("\\{", "\\}"):
            continue
        if token == "}":
            begin = open_at.pop() if open_at else None
            if begin is not None:
                last = text[begin : min(match.start(), begin + LONGEST)]
        else:
            open_at.append(match.end() if token != "{" else None)
    if last is None:
        bare = _BARE_BOX.search(text[text.rfind("\\boxed") :]) if "\\boxed" in text else None
        last = bare.group(1) if bare else None
    return last


def _plain(text: str) -> str:
    """Return `text` without LaTeX's marks of layout, spaces and styles, and with every fraction as \\frac{..}{..}."""
    text = text.replace("\u2212", "-").replace("{,}", ",").replace("\\left", "").replace("\\right", "")
    text = text.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac").replace("\\$", "$").replace("\\!", "")
    for mark in ("\\(", "\\)", "\\[", "\\]", "**"):
        text = text.replace(mark, "")
    text = _WRAPPED.sub(r" \1", _SPACES.sub(" ", _THIN_SPACE.sub("", text)))
    return _HALF_FRACTION.sub(r"\\frac{\1}{", _SHORT_FRACTION.sub(r"\\frac{\1}{\2}", text))


def _number(text: str) -> tuple[Fraction | None, bool]:
    text = text.replace("$", "").replace("€", "").replace("£", "").strip()
    if text.startswith("{") and text.endswith("}") and text.count("{") == 1:
        text = text[1:-1].strip()
    text = _FRACTION.sub(r" (\1)/(\2)", text).strip()
    text = re.sub(r"\(\s*([-+]?[\d.,]+)\s*\)/\(\s*([\d.,]+)\s*\)", r"\1/\2", text)
    text = re.sub(r"\s*(\\times|\\cdot|[*×/^])\s*", r"\1", text)
    apart = re.match(r"[-+]\s+", text)
    match = _SIGNED.match(text[0] + text[apart.end() :] if apart else text)
    if match is None:
        return None, False
    tail = match.string[match.end() :]
    if tail.strip() and not _UNIT.fullmatch(tail):
        return None, False
    sign, top, bottom, whole, part, of, plain, power, ten, percent = match.groups()
    terms = [term.replace(",", "") for term in (top, bottom, whole, part, of, plain) if term is not None]
    if any(len(term) > _MOST_DIGITS for term in terms) or abs(int(power or ten or 0)) > _MOST_DIGITS:
        return None, False
    numbers = [Fraction(term) for term in terms]
    if (bottom is not None or of is not None) and numbers[-1] == 0:
        return None, False
    if top is not None:
        value = numbers[0] / numbers[1]
    elif whole is not None:
        value = numbers[0] + numbers[1] / numbers[2]
    else:
        value = numbers[0] * Fraction(10) ** int(power or ten or 0)
    return -value if sign == "-" else value, percent is not None or tail.strip().startswith("percent")


def _at_commas(text: str) -> list[str]:
    """Cut at the commas that no bracket holds and that are no thousands separators."""
    pieces, depth, begin = [], 0, 0
    for place, letter in enumerate(text):
        depth += (letter in "([{") - (letter in ")]}")
        if letter in ",;" and depth == 0:
            pieces.append(text[begin:place])
            begin = place + 1
    return [*pieces, text[begin:]]
