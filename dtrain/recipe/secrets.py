"""Secrets of a recipe: which values are secret, and hiding them in whatever is saved or printed.

Two kinds of values are secret:

- values of environment variables. They are saved and compared by the text that reads them, `${oc.env:NAME}`.
- texts whose key has a name like `api_key` or `HF_TOKEN`, and texts that look like a credential wherever they are: a
  password in a URL, `Bearer ...`, `hf_...`, a private key. They are replaced by `HIDDEN`.

Words such as token and key are also parts of harmless names: `eos_token` is a special token, and `target_key` may be a
column. So `is_secret_name` looks at all words of a name.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

HIDDEN = "<hidden by dtrain>"
Path = tuple[str | int, ...]
"""Where a value is in a tree: keys of mappings and indices of lists, such as ("grpo", "rewards", 0, "url")."""

# Words of a name in snake_case, kebab-case or camelCase.
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
# Words, or the last two words, that name a secret in every context.
_ALWAYS_SECRET = re.compile(r"(.*(secret|password|passwd|passphrase|credential)s?|pwd|authorization|bearer|api_?key)")
# Last words that name a secret unless the word before is one of _HARMLESS.
_MAY_BE_SECRET = ("token", "key", "auth", "pass")
# For special tokens (eos_token), columns (answer_key), the keys of a dictionary (sort_key), counts (max_token).
_HARMLESS = frozenset(
    """bos eos pad unk sep cls mask stop image video audio end start begin special think im eot eom tool role system
    user assistant turn step per by max min num new next last first add sort group primary foreign cache column data
    answer row dict json map label text prompt public lookup index field question required""".split()
)
# Last words of names for something about a secret that is not the secret itself, such as token_path.
_LABELS = frozenset("column field file path dir name env var url type mode scheme method length len count id".split())
# OmegaConf's resolvers that only compute with values of the recipe.
_PURE_RESOLVERS = ("oc.select", "oc.decode", "oc.create", "oc.dict.keys", "oc.dict.values", "oc.deprecated")

# Credentials that are recognized anywhere in a text. Groups 1 and 2 stay; what is between them is hidden.
_CREDENTIALS = (
    re.compile(r"(\b[a-z][\w+.-]*://)(?![^\s/?#]*\$\{)[^\s/?#]*(@)", re.IGNORECASE),  # https://user:password@host
    re.compile(r"(\b(?:Bearer|Basic)\s+)(?=\S*\d)[\w.~+/=-]{8,}()"),  # HTTP headers
    re.compile(r"()\b(?:hf_|gh[opsu]_|AKIA)[A-Za-z0-9]{16,}()"),  # Hugging Face, GitHub, AWS
    re.compile(r"()\b(?:sk-|github_pat_|glpat-|xox[abp]-)[\w-]{12,}()"),  # OpenAI, GitHub, GitLab, Slack
    re.compile(r"()\b(?:eyJ[\w-]{8,}\.[\w-]+\.[\w-]+|AIza[\w-]{30,})()"),  # JSON web tokens, Google
    re.compile(r"(https://hooks\.slack\.com/services/)[\w/]+()"),
    re.compile(r"(-----BEGIN [A-Z ]*PRIVATE KEY-----).*?(?:(-----END)|\Z)", re.DOTALL),
)
# A name and its value within a text. Group 1 is all before the value, 2 the name, 3 the value. An interpolation is no
# secret, so a value that begins with ${ does not match.
_NAMED_VALUES = (
    re.compile(r"((?:^|[?&;#]|(?<=\s))-{0,2}([\w.-]+)=)(?!\$\{)([^&;\s]+)"),  # NAME=value, --name=value, ?name=value
    re.compile(r"^(([\w-]+):[ \t]+)(?!\$\{)(\S.*)$", re.MULTILINE),  # Name: value, a line of headers
    re.compile(r"((?:^|(?<=\s))--([\w-]+)\s+)(?!\$\{|-)(\S+)"),  # --name value
    re.compile(r"""(["']([\w.-]+)["']\s*:\s*["'])(?!\$\{)([^"']+)"""),  # "name": "value", in JSON
)
# The default of an environment variable in an interpolation: ${oc.env:NAME,default}.
_ENVIRONMENT_DEFAULT = re.compile(r"(oc\.env:\s*(\w+)\s*,\s*)([^${}]+)")


def is_secret_name(name: str, alone: bool = True) -> bool:
    """Check whether a name is the name of a secret.

    Args:
        name: A key, an environment variable or an option.
        alone: Whether a name of one word, such as `key` or `pass`, counts as a secret. Such names are often names
            of columns, so callers that have no other evidence of a secret pass False.

    Example:
        >>> is_secret_name("HF_TOKEN"), is_secret_name("eos_token"), is_secret_name("token_path")
        (True, False, False)
    """
    words = _words(name)
    if not words or words[-1] in _LABELS:
        return False
    if _is_always_secret(words):
        return True
    if len(words) == 1:
        word = words[0]
        if alone and word in _MAY_BE_SECRET:
            return True
        return word in ("token", "auth") or word.endswith(("token", "apikey"))
    ends_in_secret = words[-1] in _MAY_BE_SECRET or words[-2:] == ["auth", "header"]
    return ends_in_secret and words[-2] not in _HARMLESS


def _is_always_secret(words: list[str]) -> bool:
    """Check whether one of the words, or the last two together, name a secret in every context."""
    return any(_ALWAYS_SECRET.fullmatch(word) for word in [*words, "_".join(words[-2:])])


def reads_environment(text: str) -> bool:
    """Check whether an interpolation reads the environment, or calls a resolver that is not OmegaConf's own."""
    if "oc.env" in text:
        return True
    resolvers = re.findall(r"\$\{\s*([\w.]+)\s*:", text)
    return any(name not in _PURE_RESOLVERS for name in resolvers)


def environment_names(text: str) -> list[str]:
    """Return the names of the environment variables that a text reads.

    Example:
        >>> environment_names("${oc.env:HOME}/runs/${oc.env:JOB,0}")
        ['HOME', 'JOB']
    """
    return re.findall(r"oc\.env:\s*(\w+)", text)


def iterate_leaves(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield (path, value) for every value in a tree that is not a mapping or a list.

    Example:
        >>> list(iterate_leaves({"betas": [0.9, 0.95]}))
        [(('betas', 0), 0.9), (('betas', 1), 0.95)]
    """
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from iterate_leaves(inner, (*path, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from iterate_leaves(inner, (*path, index))
    else:
        yield path, value


def get_at(value: Any, path: Path) -> Any:
    """Return the value at a path of a tree. None if there is none."""
    for part in path:
        try:
            value = value[part]
        except (LookupError, TypeError):
            return None
    return value


def set_at(value: Any, path: Path, new: Any) -> None:
    """Set the value at a path of a tree, in place."""
    get_at(value, path[:-1])[path[-1]] = new


def escape_interpolations(value: Any) -> Any:
    """Escape the texts of a tree that look like an interpolation, so that OmegaConf reads them as they are."""
    if isinstance(value, Mapping):
        return {key: escape_interpolations(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [escape_interpolations(inner) for inner in value]
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", r"\1\1\\${", value)
    return value


def dotted_key(path: Path) -> str:
    """Return the dotted key of a path.

    Example:
        >>> dotted_key(("grpo", "rewards", 0, "url"))
        'grpo.rewards[0].url'
    """
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")


def is_secret(tree: Any, path: Path, value: Any) -> bool:
    """Check whether a leaf of a tree is a secret by its names.

    The names of a leaf are the keys on its path, and a name next to it:

    - in a list of two, the first entry: `[api_key, 123abc]`
    - in a longer list, an option before it: `[serve, --api-key, 123abc]`
    - in a table of `name` or `key` and `value`: `{name: api_key, value: 123abc}`

    Args:
        tree: The tree.
        path: The path of the leaf.
        value: The leaf.
    """
    if value is None or isinstance(value, bool) or (isinstance(value, str) and "${" in value):
        return False
    names: list[Any] = list(path)
    container, last = get_at(tree, path[:-1]), path[-1]
    if isinstance(container, list) and isinstance(last, int) and last:
        entry_before = container[last - 1]
        if len(container) == 2 or str(entry_before).startswith("--"):
            names.append(entry_before)
    elif isinstance(container, Mapping) and last in ("value", "val"):
        names += [container.get("name"), container.get("key")]
    looks_random = _looks_random(value)
    secret_names = [name for name in names if isinstance(name, str) and is_secret_name(name, alone=looks_random)]
    if not isinstance(value, str):
        # A number under a name such as token is a count or an index, unless the name is always a secret's.
        return any(_ALWAYS_SECRET.fullmatch("_".join(_words(name))) for name in secret_names)
    if may_be_word(value):
        # Under a name such as target_key, a word is the name of a column.
        secret_names = [name for name in secret_names if not _is_column_key(name)]
    is_placeholder = re.fullmatch(r"<.*>|\[.*\]|", value) is not None
    return bool(secret_names) and not is_placeholder


def may_be_word(value: str) -> bool:
    """Check whether a value may be an ordinary word or name, which also occurs in texts that are not secret."""
    return bool(re.fullmatch(r"[A-Za-z_]{1,24}", value))


def _is_column_key(name: str) -> bool:
    """Check whether a name such as target_key may name a column."""
    words = _words(name)
    return words[-1] == "key" and not _is_always_secret(words)


def _words(name: str) -> list[str]:
    """Return the words of a name in lower case."""
    return [word.lower() for word in _WORD.findall(name)]


def _looks_random(value: Any) -> bool:
    """Check whether a value is at least 8 characters without blanks, with letters and digits."""
    return isinstance(value, str) and bool(re.fullmatch(r"(?=.*\d)(?=.*[A-Za-z])\S{8,}", value))


def mask_secrets(text: str, secrets: Sequence[str] = ()) -> str:
    """Hide secrets in a text: the known `secrets`, credentials, and values under the name of a secret.

    Example:
        >>> mask_secrets("git clone https://me:pa55@example.com/x --api-key 12ab34cd")
        'git clone https://<hidden by dtrain>@example.com/x --api-key <hidden by dtrain>'
    """
    for secret in secrets:
        text = text.replace(secret, HIDDEN)
    for pattern in _CREDENTIALS:
        text = pattern.sub(rf"\1{HIDDEN}\2", text)
    for pattern in _NAMED_VALUES:
        text = pattern.sub(_mask_named_value, text)
    return text


def _mask_named_value(match: re.Match[str]) -> str:
    """Return the replacement for a match of _NAMED_VALUES."""
    before, name, value = match[1], match[2], match[3]
    return before + (HIDDEN if is_secret_name(name, alone=False) else value)


def hide_secrets(tree: Any, secrets: Sequence[str] = ()) -> None:
    """Hide every secret of a tree, in place."""
    for path, value in list(iterate_leaves(tree)):
        if is_secret(tree, path, value):
            set_at(tree, path, HIDDEN)
        elif isinstance(value, str):
            set_at(tree, path, mask_secrets(_mask_environment_defaults(path, value), secrets))


def _mask_environment_defaults(path: Path, value: str) -> str:
    """Hide the defaults of environment variables that are secrets by the variable's name or by the value's key."""
    key_name = ""
    for part in path:
        if isinstance(part, str):
            key_name = part

    def mask(match: re.Match[str]) -> str:
        is_hidden = is_secret_name(match[2]) or is_secret_name(key_name)
        return f"{match[1]}'{HIDDEN}'" if is_hidden else match[0]

    return _ENVIRONMENT_DEFAULT.sub(mask, value)
