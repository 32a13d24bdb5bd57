"""Schemas of the tools that a model may call, in OpenAI's function format: those of Python functions, read from their
source; those of servers, from a file.

Nothing is imported or run: hints and docstring stand in the source. No torch.
"""

import ast
import re
import shlex
import shutil
from collections.abc import Mapping, Sequence
from copy import copy
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any

from dtrain.base.errors import UserError
from dtrain.base.json_files import loads, read_text
from dtrain.rl.rewards.catalog import find_definition, find_function_and_file

Schema = dict[str, Any]

_CONSTANTS = {str: "string", int: "integer", bool: "boolean", float: "number"}
_PLAIN: Mapping[str, Schema] = MappingProxyType(
    {
        **{kind.__name__: {"type": name} for kind, name in _CONSTANTS.items()},
        **dict.fromkeys(("list", "List", "Sequence"), {"type": "array"}),
        **dict.fromkeys(("dict", "Dict", "Mapping"), {"type": "object"}),
        "Any": {},
    }
)
HINTS = "str, int, float, bool, list[..], dict[str, ..], Literal[..], Any, and unions of these with | or Optional"


def tool_schemas(entries: Sequence[Any]) -> list[tuple[Any, Schema]]:
    """Return each tool of `recipe.rollouts.Tool`s as (entry that names it, schema), in their order: the schema of the
    function `fn`, or those in the file `schema` of a server's tools; {"type": "function", "function": {..}}.

    Raises UserError: as `tool_schema` does; no such file, or one of something else; two tools of one name.
    """
    schemas_of = [
        (tool, [tool_schema(tool.fn)] if tool.fn else read_server_schemas(tool.mcp, tool.schema)) for tool in entries
    ]
    tools = [(tool, schema) for tool, schemas in schemas_of for schema in schemas]
    names = [schema["function"]["name"] for _, schema in tools]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UserError(f"grpo.tools: two of them are named {twice}, by which the model calls them; rename one")
    return tools


def read_server_schemas(command: str | None, file: str | None) -> list[Schema]:
    """Return the schemas in a file that was written of a server's tools. Raises UserError."""
    if not command or not file:
        raise UserError("grpo.tools: an entry needs fn, or mcp and schema")
    how = f'python -m dtrain.rl.environments.mcp "{command}" > {file}'
    path = Path(file).expanduser()
    if not path.is_file():
        raise UserError(f"grpo.tools: there is no file {file} of what {command} offers, which every prompt tells; "
                        f"write it: {how}")  # fmt: skip
    try:
        tools = loads(read_text(path))
    except ValueError as error:
        raise UserError(f"grpo.tools: {file} is no JSON ({error}); write it anew: {how}") from None
    are_sound = isinstance(tools, list) and all(
        isinstance(tool, dict)
        and isinstance(function := tool.get("function"), dict)
        and isinstance(function.get("name"), str)
        and isinstance(function.get("parameters"), dict)
        for tool in tools
    )
    if not are_sound or not tools:
        raise UserError(f"grpo.tools: {file} must be a list of tools in OpenAI's function format; write it anew: {how}")
    return tools


def is_url(server: str) -> bool:
    """Return whether a tool server is reached over HTTP; otherwise it is a command."""
    return server.startswith(("http://", "https://"))


def find_server(server: str) -> str:
    """Return the file of a tool server's program, or its URL. Nothing is started or reached.

    Raises:
        UserError: If there is no such program, or the package `mcp` is not installed.
    """
    if find_spec("mcp") is None:
        raise UserError(f"{server}: tool servers need the package mcp, which is not installed: "
                        "pip install 'dtrain[mcp]'")  # fmt: skip
    if is_url(server):
        return server
    try:
        words = shlex.split(server)
    except ValueError as error:
        raise UserError(f"{server} is no command: {error}") from None
    if not words:
        raise UserError("the command of a tool server is empty")
    file = shutil.which(words[0])
    if file is None:
        raise UserError(f"{server}: there is no program {words[0]}")
    return file


def tool_schema(path: str) -> Schema:
    """Return the schema of the function at an import path. Raises UserError: no such function; no docstring; a
    parameter without a hint, or of a kind that JSON cannot give."""
    _, function, file = find_function_and_file(path, "tool")
    node = find_definition(Path(file), function, decorated=True)
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        raise UserError(
            f"tool {path}: {file} has no `def {function}` at its top, whose hints and docstring can be read"
        )
    text = ast.get_docstring(node)
    if not text:
        raise UserError(f"tool {path} has no docstring: write what it does, which the model reads, and its Args")
    description, described = _docstring(text)
    takes = node.args
    if takes.vararg or takes.kwarg or takes.posonlyargs:
        raise UserError(f"tool {path} takes *args, **kwargs or positional parameters: a call gives arguments by name")
    named = (*takes.args, *takes.kwonlyargs)
    properties = {argument.arg: _parameter(path, argument, described) for argument in named}
    bare = [*takes.args[: len(takes.args) - len(takes.defaults)]]
    bare += [key for key, default in zip(takes.kwonlyargs, takes.kw_defaults, strict=True) if default is None]
    parameters: Schema = {"type": "object", "properties": properties}
    if bare:
        parameters["required"] = [argument.arg for argument in bare]
    return {"type": "function", "function": {"name": node.name, "description": description, "parameters": parameters}}


def _parameter(path: str, argument: ast.arg, described: Mapping[str, str]) -> Schema:
    name = argument.arg
    if argument.annotation is None:
        raise UserError(f"tool {path}: its parameter {name} has no type hint; write {name}: str, say ({HINTS})")
    schema = _of_hint(argument.annotation)
    if schema is None:
        hint = ast.unparse(argument.annotation)
        raise UserError(f"tool {path}: {name}: {hint} is no hint that a call's JSON can fill; known are {HINTS}")
    return schema | ({"description": described[name]} if name in described else {})


def _of_hint(hint: ast.expr) -> Schema | None:
    """Return the JSON schema of a hint; None where it has none."""
    if isinstance(hint, ast.Constant) and isinstance(hint.value, str):
        try:
            return _of_hint(ast.parse(hint.value, mode="eval").body)
        except SyntaxError:
            return None
    if isinstance(hint, ast.Name | ast.Attribute):
        return copy(_PLAIN.get(_last(hint)))
    if isinstance(hint, ast.BinOp) and isinstance(hint.op, ast.BitOr):
        return _union([*_sides(hint)])
    if not isinstance(hint, ast.Subscript):
        return None
    outer, inner = _last(hint.value), hint.slice
    parts = inner.elts if isinstance(inner, ast.Tuple) else [inner]
    if outer in ("Optional", "Union"):
        return _union([*parts, *([ast.Constant(None)] if outer == "Optional" else [])])
    if outer == "Literal":
        return _literal(parts)
    if outer == "Annotated":
        return _of_hint(parts[0])
    within = _of_hint(parts[-1])
    if within is None or _PLAIN.get(outer, {}).get("type") not in ("array", "object"):
        return None
    if _PLAIN[outer]["type"] == "array":
        return {"type": "array", "items": within} if len(parts) == 1 else None
    is_text = len(parts) == 2 and isinstance(parts[0], ast.Name) and parts[0].id == "str"
    return {"type": "object", "additionalProperties": within} if is_text else None


def _union(parts: Sequence[ast.expr]) -> Schema | None:
    """Return the JSON schema of a union of hints; None where one has none. null beside one kind is `nullable`; several
    plain kinds are a list of types, others stand under anyOf."""
    kinds = [_of_hint(part) for part in parts if not (isinstance(part, ast.Constant) and part.value is None)]
    known = [kind for kind in kinds if kind is not None]
    if not known or len(known) < len(kinds):
        return None
    if len(known) == 1:
        schema = known[0]
    elif all(kind.keys() == {"type"} for kind in known):
        schema = {"type": sorted({kind["type"] for kind in known})}
    else:
        schema = {"anyOf": known}
    return schema | ({"nullable": True} if len(kinds) < len(parts) else {})


def _literal(parts: Sequence[ast.expr]) -> Schema | None:
    values = [part.value for part in parts if isinstance(part, ast.Constant)]
    kinds = sorted({_CONSTANTS[type(value)] for value in values if type(value) in _CONSTANTS})
    plain = [value for value in values if value is not None]
    if len(values) < len(parts) or not kinds or any(type(value) not in _CONSTANTS for value in plain):
        return None
    schema: Schema = {"type": kinds[0] if len(kinds) == 1 else kinds, "enum": plain}
    return schema | ({"nullable": True} if None in values else {})


def _sides(hint: ast.expr) -> list[ast.expr]:
    if isinstance(hint, ast.BinOp) and isinstance(hint.op, ast.BitOr):
        return [*_sides(hint.left), *_sides(hint.right)]
    return [hint]


def _last(hint: ast.expr) -> str:
    return hint.attr if isinstance(hint, ast.Attribute) else hint.id if isinstance(hint, ast.Name) else ""


def _docstring(text: str) -> tuple[str, dict[str, str]]:
    """Return a docstring's text before its first section, and that of each parameter under `Args:` (Google's style)."""
    pattern = r"^(Args|Arguments|Parameters|Returns?|Raises|Yields|Examples?|Notes?):[ ]*$"
    description, *sections = re.split(pattern, text, flags=re.MULTILINE)
    named = dict(zip(sections[::2], sections[1::2], strict=True))
    block = next((named[name] for name in ("Args", "Arguments", "Parameters") if name in named), "")
    described: dict[str, str] = {}
    indent, name = None, None
    for line in block.splitlines():
        if not line.strip():
            continue
        depth = len(line) - len(line.lstrip())
        indent = depth if indent is None else indent
        begins = re.match(r"\s*\*{0,2}(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)", line) if depth <= indent else None
        if begins:
            name = begins[1]
            described[name] = begins[2].strip()
        elif name is not None:
            described[name] = f"{described[name]} {line.strip()}".strip()
    return description.strip(), {name: entry for name, entry in described.items() if entry}
