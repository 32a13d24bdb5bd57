"""Secrets of a recipe, which only its run may see: values that the environment gives, text under names like TOKEN.

A value from the environment is known by its text, `${oc.env:NAME}`: that is what is saved, and what a resume compares.
Plain text under such a name, a password in a URL and the like are hidden in whatever is saved or printed.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

HIDDEN = "<hidden by dtrain>"
Path = tuple[str | int, ...]

_PART = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_ALWAYS = re.compile(r"(.*(secret|password|passwd|passphrase|credential)s?|pwd|authorization|bearer|api_?key)")
_MAY_BE = ("token", "key", "auth", "pass")
# First words that make such a name a harmless one: special tokens, columns, a dictionary's keys; and last words.
_HARMLESS = frozenset(
    """bos eos pad unk sep cls mask stop image video audio end start begin special think im eot eom tool role system
    user assistant turn step per by max min num new next last first add sort group primary foreign cache column data
    answer row dict json map label text prompt public lookup index field question required""".split()
)
_LABELS = frozenset("column field file path dir name env var url type mode scheme method length len count id".split())
_PURE = ("oc.select", "oc.decode", "oc.create", "oc.dict.keys", "oc.dict.values", "oc.deprecated")
_IN_TEXT = (
    re.compile(r"(\b[a-z][\w+.-]*://)(?![^\s/?#]*\$\{)[^\s/?#]*(@)", re.IGNORECASE),
    re.compile(r"(\b(?:Bearer|Basic)\s+)(?=\S*\d)[\w.~+/=-]{8,}()"),
    re.compile(r"()\b(?:hf_|gh[opsu]_|AKIA)[A-Za-z0-9]{16,}()"),
    re.compile(r"()\b(?:sk-|github_pat_|glpat-|xox[abp]-)[\w-]{12,}()"),
    re.compile(r"()\b(?:eyJ[\w-]{8,}\.[\w-]+\.[\w-]+|AIza[\w-]{30,})()"),
    re.compile(r"(https://hooks\.slack\.com/services/)[\w/]+()"),
    re.compile(r"(-----BEGIN [A-Z ]*PRIVATE KEY-----).*?(?:(-----END)|\Z)", re.DOTALL),
)
_SETTING = re.compile(r"((?:^|[?&;#]|(?<=\s))-{0,2}([\w.-]+)=)(?!\$\{)([^&;\s]+)")
_HEADER = re.compile(r"^(([\w-]+):[ \t]+)(?!\$\{)(\S.*)$", re.MULTILINE)
_OPTION = re.compile(r"((?:^|(?<=\s))--([\w-]+)\s+)(?!\$\{|-)(\S+)")
_MEMBER = re.compile(r"""(["']([\w.-]+)["']\s*:\s*["'])(?!\$\{)([^"']+)""")
_FALLBACK = re.compile(r"(oc\.env:\s*(\w+)\s*,\s*)([^${}]+)")


def is_secret_name(name: str, alone: bool = True) -> bool:
    """Return whether `name` is the name of a secret. alone: also a bare word such as `key`, which names columns too."""
    words = _words(name)
    if not words or words[-1] in _LABELS:
        return False
    if any(map(_ALWAYS.fullmatch, [*words, "_".join(words[-2:])])):
        return True
    if len(words) == 1:
        return alone and words[0] in _MAY_BE or words[0] in ("token", "auth") or words[0].endswith(("token", "apikey"))
    kinds = [at for at, word in enumerate(words) if word in _MAY_BE]
    last = words[-1] in _MAY_BE or words[-2:] == ["auth", "header"]
    return bool(kinds) and last and words[-2] not in _HARMLESS


def reads_environment(text: str) -> bool:
    """Return whether an interpolation reads the environment, or calls a resolver that is none of OmegaConf's own."""
    return "oc.env" in text or any(name not in _PURE for name in re.findall(r"\$\{\s*([\w.]+)\s*:", text))


def environment_names(text: str) -> list[str]:
    return re.findall(r"oc\.env:\s*(\w+)", text)


def iterate_leaves(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield every value that is no container, with its place."""
    if isinstance(value, Mapping | list):
        entries = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, inner in entries:
            yield from iterate_leaves(inner, (*path, key))
    else:
        yield path, value


def get_at(value: Any, path: Path) -> Any:
    """Return the value at a place; None where there is none."""
    for part in path:
        try:
            value = value[part]
        except (LookupError, TypeError):
            return None
    return value


def set_at(value: Any, path: Path, new: Any) -> None:
    get_at(value, path[:-1])[path[-1]] = new


def escape_interpolations(value: Any) -> Any:
    """Escape the texts in `value` that only look like an interpolation, so that OmegaConf takes them as they are."""
    if isinstance(value, Mapping):
        return {key: escape_interpolations(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [escape_interpolations(inner) for inner in value]
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value


def dotted_key(path: Path) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")


def is_secret(tree: Any, path: Path, value: Any) -> bool:
    """Return whether the leaf `value` of `tree` is a secret by the names on its way, or by the name beside it: in a
    list of two, after an option (`--api-key`) in a longer list, in a table of name or key and value."""
    if value is None or isinstance(value, bool) or (isinstance(value, str) and "${" in value):
        return False
    names: list[Any] = list(path)
    beside, last = get_at(tree, path[:-1]), path[-1]
    if isinstance(beside, list) and isinstance(last, int) and last:
        before = beside[last - 1]  # an option of a command line, or the name of a pair
        names += [before] if len(beside) == 2 or str(before).startswith("--") else []
    elif isinstance(beside, Mapping) and last in ("value", "val"):
        names += [beside.get("name"), beside.get("key")]
    secret_names = [name for name in names if isinstance(name, str) and is_secret_name(name, alone=_looks_drawn(value))]
    if not isinstance(value, str):  # a number of tokens, a column's number
        return any(_ALWAYS.fullmatch("_".join(_words(name))) for name in secret_names)
    if may_be_word(value):  # the name of a column, under a name such as target_key
        secret_names = [name for name in secret_names if not _is_column_key(name)]
    return bool(secret_names) and not re.fullmatch(r"<.*>|\[.*\]|", value)


def may_be_word(value: str) -> bool:
    """Return whether `value` may be a word of any text, or a name."""
    return bool(re.fullmatch(r"[A-Za-z_]{1,24}", value))


def _is_column_key(name: str) -> bool:
    words = _words(name)
    return words[-1] == "key" and not any(map(_ALWAYS.fullmatch, [*words, "_".join(words[-2:])]))


def _words(name: str) -> list[str]:
    return [word.lower() for word in _PART.findall(name)]


def _looks_drawn(value: Any) -> bool:
    return isinstance(value, str) and bool(re.fullmatch(r"(?=.*\d)(?=.*[A-Za-z])\S{8,}", value))


def mask_secrets(text: str, secrets: Sequence[str] = ()) -> str:
    """Mask `secrets` in `text`, and everything that reads as one wherever it stands."""
    for secret in secrets:
        text = text.replace(secret, HIDDEN)
    for pattern in _IN_TEXT:
        text = pattern.sub(rf"\1{HIDDEN}\2", text)
    for pattern in (_SETTING, _HEADER, _OPTION, _MEMBER):
        text = pattern.sub(lambda match: match[1] + (HIDDEN if is_secret_name(match[2], False) else match[3]), text)
    return text


def hide_secrets(tree: Any, secrets: Sequence[str] = ()) -> None:
    """Mask every secret of `tree` in place."""
    for path, value in list(iterate_leaves(tree)):
        if is_secret(tree, path, value):
            set_at(tree, path, HIDDEN)
        elif isinstance(value, str):
            name = next((part for part in reversed(path) if isinstance(part, str)), "")

            def without(match: re.Match[str], name: str = name) -> str:
                is_hidden = is_secret_name(match[2]) or is_secret_name(name)
                return f"{match[1]}'{HIDDEN}'" if is_hidden else match[0]

            set_at(tree, path, mask_secrets(_FALLBACK.sub(without, value), secrets))
