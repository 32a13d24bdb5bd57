"""Schemas of the tools that a model may call, in OpenAI's function format.

The schema of a Python function is read from its source, from the type hints and the docstring. The schemas of a
server's tools are read from a file. Nothing is imported or run, and torch is not needed. For example,

    def power(base: int, exponent: int = 2) -> int:
        \"\"\"Raise a number to a power.

        Args:
            base: The number.
        \"\"\"

has the schema

    {"type": "function", "function": {
        "name": "power",
        "description": "Raise a number to a power.",
        "parameters": {
            "type": "object",
            "properties": {"base": {"type": "integer", "description": "The number."}, "exponent": {"type": "integer"}},
            "required": ["base"]}}}
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

_JSON_TYPES = {str: "string", int: "integer", bool: "boolean", float: "number"}
"""Python type of a constant -> JSON type."""
_SCHEMA_OF_NAME: Mapping[str, Schema] = MappingProxyType(
    {
        **{python_type.__name__: {"type": json_type} for python_type, json_type in _JSON_TYPES.items()},
        **dict.fromkeys(("list", "List", "Sequence"), {"type": "array"}),
        **dict.fromkeys(("dict", "Dict", "Mapping"), {"type": "object"}),
        "Any": {},
    }
)
"""Name of a hint without brackets -> JSON schema."""
HINTS = "str, int, float, bool, list[..], dict[str, ..], Literal[..], Any, and unions of these with | or Optional"


def tool_schemas(entries: Sequence[Any]) -> list[tuple[Any, Schema]]:
    """Return the schemas of the tools in `grpo.tools`.

    Args:
        entries: The list of `recipe.rollouts.Tool`. An entry is one function, or all tools of a server.

    Returns:
        (entry, schema) for each tool, in their order.

    Raises:
        UserError: If a function, its schema or a file is missing or wrong, or two tools have the same name.
    """
    tools: list[tuple[Any, Schema]] = []
    for entry in entries:
        schemas = [tool_schema(entry.fn)] if entry.fn else read_server_schemas(entry.mcp, entry.schema)
        tools += [(entry, schema) for schema in schemas]
    names: set[str] = set()
    for _, schema in tools:
        name = schema["function"]["name"]
        if name in names:
            raise UserError(
                f"grpo.tools: two tools are named {name}, and the model calls tools by name. Rename one of them"
            )
        names.add(name)
    return tools


def read_server_schemas(command: str | None, file: str | None) -> list[Schema]:
    """Read the schemas of a server's tools from a file.

    Args:
        command: The server's command or URL, for messages.
        file: The file, as `python -m dtrain.rl.environments.mcp` writes it.

    Raises:
        UserError: If the file is missing or is not a list of schemas.
    """
    if not command or not file:
        raise UserError("grpo.tools: an entry needs fn, or mcp and schema")
    how = f'python -m dtrain.rl.environments.mcp "{command}" > {file}'
    path = Path(file).expanduser()
    if not path.is_file():
        raise UserError(f"grpo.tools: the file {file} with the tools of {command} does not exist. Write it: {how}")
    try:
        tools = loads(read_text(path))
    except ValueError as error:
        raise UserError(f"grpo.tools: {file} is not JSON ({error}). Write it again: {how}") from None
    is_list = isinstance(tools, list) and len(tools) > 0
    if not is_list or not all(_is_function_schema(tool) for tool in tools):
        raise UserError(
            f"grpo.tools: {file} must be a list of tools in OpenAI's function format. Write it again: {how}"
        )
    return tools


def _is_function_schema(tool: Any) -> bool:
    """Return whether a value of JSON is a tool in OpenAI's function format."""
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict):
        return False
    return isinstance(function.get("name"), str) and isinstance(function.get("parameters"), dict)


def is_url(server: str) -> bool:
    """Return whether a tool server is reached over HTTP. Otherwise it is a command.

    Example:
        >>> is_url("http://localhost:8000/mcp"), is_url("uvx mcp-server-time")
        (True, False)
    """
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
        raise UserError(f"{server} is not a valid command: {error}") from None
    if not words:
        raise UserError("the command of a tool server is empty")
    file = shutil.which(words[0])
    if file is None:
        raise UserError(f"{server}: the program {words[0]} does not exist")
    return file


def tool_schema(path: str) -> Schema:
    """Return the schema of the function at an import path.

    Raises:
        UserError: If there is no such function, it has no docstring, or a parameter has no hint or one that JSON
            cannot express.
    """
    _, function, file = find_function_and_file(path, "tool")
    node = find_definition(Path(file), function, decorated=True)
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        raise UserError(
            f"tool {path}: {file} has no `def {function}` at its top level, so its hints and docstring cannot be read"
        )
    docstring = ast.get_docstring(node)
    if not docstring:
        raise UserError(f"tool {path} has no docstring. Write one for the model, with what the tool does and its Args")
    description, parameter_descriptions = _parse_docstring(docstring)
    signature = node.args
    if signature.vararg or signature.kwarg or signature.posonlyargs:
        raise UserError(
            f"tool {path} has *args, **kwargs or positional-only parameters, but a call passes arguments by name"
        )
    properties = {}
    for argument in (*signature.args, *signature.kwonlyargs):
        properties[argument.arg] = _parameter_schema(path, argument, parameter_descriptions)
    parameters: Schema = {"type": "object", "properties": properties}
    required = _required_parameters(signature)
    if required:
        parameters["required"] = required
    return {"type": "function", "function": {"name": node.name, "description": description, "parameters": parameters}}


def _required_parameters(signature: ast.arguments) -> list[str]:
    """Return the names of the parameters without a default."""
    num_required = len(signature.args) - len(signature.defaults)  # `defaults` are those of the last parameters
    required = [argument.arg for argument in signature.args[:num_required]]
    for argument, default in zip(signature.kwonlyargs, signature.kw_defaults, strict=True):
        if default is None:
            required.append(argument.arg)
    return required


def _parameter_schema(path: str, argument: ast.arg, descriptions: Mapping[str, str]) -> Schema:
    """Return the JSON schema of a parameter of the tool `path`. Raises UserError."""
    name = argument.arg
    if argument.annotation is None:
        raise UserError(f"tool {path}: its parameter {name} has no type hint. Write for example {name}: str ({HINTS})")
    schema = _hint_schema(argument.annotation)
    if schema is None:
        hint = ast.unparse(argument.annotation)
        raise UserError(f"tool {path}: JSON has no value for the type hint {name}: {hint}. Use {HINTS}")
    if name in descriptions:
        return schema | {"description": descriptions[name]}
    return schema


def _hint_schema(hint: ast.expr) -> Schema | None:
    """Return the JSON schema of a type hint. None if JSON cannot express it.

    Example:
        >>> _hint_schema(ast.parse("dict[str, list[int]] | None", mode="eval").body)
        {'type': 'object', 'additionalProperties': {'type': 'array', 'items': {'type': 'integer'}}, 'nullable': True}
    """
    if isinstance(hint, ast.Constant) and isinstance(hint.value, str):  # a hint in quotes
        try:
            return _hint_schema(ast.parse(hint.value, mode="eval").body)
        except SyntaxError:
            return None
    if isinstance(hint, ast.Name | ast.Attribute):
        return copy(_SCHEMA_OF_NAME.get(_last_name(hint)))
    if isinstance(hint, ast.BinOp) and isinstance(hint.op, ast.BitOr):
        return _union_schema(_union_members(hint))
    if not isinstance(hint, ast.Subscript):
        return None
    generic = _last_name(hint.value)
    arguments = hint.slice.elts if isinstance(hint.slice, ast.Tuple) else [hint.slice]
    if generic == "Optional":
        return _union_schema([*arguments, ast.Constant(None)])
    if generic == "Union":
        return _union_schema(arguments)
    if generic == "Literal":
        return _literal_schema(arguments)
    if generic == "Annotated":
        return _hint_schema(arguments[0])
    return _container_schema(generic, arguments)


def _container_schema(generic: str, arguments: Sequence[ast.expr]) -> Schema | None:
    """Return the schema of list[item] or dict[str, value]. None for other generics and other keys."""
    container_type = _SCHEMA_OF_NAME.get(generic, {}).get("type")
    item_schema = _hint_schema(arguments[-1])
    if item_schema is None:
        return None
    if container_type == "array" and len(arguments) == 1:
        return {"type": "array", "items": item_schema}
    if container_type == "object" and len(arguments) == 2:
        key = arguments[0]
        if isinstance(key, ast.Name) and key.id == "str":
            return {"type": "object", "additionalProperties": item_schema}
    return None


def _union_schema(members: Sequence[ast.expr]) -> Schema | None:
    """Return the JSON schema of a union of hints. None if a member has none.

    A union of simple types is a list of types, and any other union an "anyOf". None as a member makes it "nullable".
    """
    schemas: list[Schema] = []
    is_nullable = False
    for member in members:
        if isinstance(member, ast.Constant) and member.value is None:
            is_nullable = True
            continue
        schema = _hint_schema(member)
        if schema is None:
            return None
        schemas.append(schema)
    if not schemas:
        return None
    if len(schemas) == 1:
        union = schemas[0]
    elif all(schema.keys() == {"type"} for schema in schemas):
        union = {"type": sorted({schema["type"] for schema in schemas})}
    else:
        union = {"anyOf": schemas}
    return union | {"nullable": True} if is_nullable else union


def _literal_schema(members: Sequence[ast.expr]) -> Schema | None:
    """Return the JSON schema of Literal[..]. None if a value is not a text, number, truth value or None."""
    values: list[Any] = []
    types: set[str] = set()
    is_nullable = False
    for member in members:
        if not isinstance(member, ast.Constant):
            return None
        if member.value is None:
            is_nullable = True
        elif type(member.value) in _JSON_TYPES:
            values.append(member.value)
            types.add(_JSON_TYPES[type(member.value)])
        else:
            return None
    if not values:
        return None
    sorted_types = sorted(types)
    schema: Schema = {"type": sorted_types[0] if len(sorted_types) == 1 else sorted_types, "enum": values}
    return schema | {"nullable": True} if is_nullable else schema


def _union_members(hint: ast.expr) -> list[ast.expr]:
    """Return the members of `a | b | c`."""
    if isinstance(hint, ast.BinOp) and isinstance(hint.op, ast.BitOr):
        return [*_union_members(hint.left), *_union_members(hint.right)]
    return [hint]


def _last_name(hint: ast.expr) -> str:
    """Return the last part of a dotted name: "Sequence" for `typing.Sequence`. "" for any other expression."""
    if isinstance(hint, ast.Attribute):
        return hint.attr
    if isinstance(hint, ast.Name):
        return hint.id
    return ""


def _parse_docstring(text: str) -> tuple[str, dict[str, str]]:
    """Split a docstring in Google style into the text before its first section and the descriptions of parameters.

    Example:
        >>> _parse_docstring("Add numbers.\\n\\nArgs:\\n    a: The first\\n        one.\\n    b (int): The second.")
        ('Add numbers.', {'a': 'The first one.', 'b': 'The second.'})
    """
    pattern = r"^(Args|Arguments|Parameters|Returns?|Raises|Yields|Examples?|Notes?):[ ]*$"
    description, *sections = re.split(pattern, text, flags=re.MULTILINE)  # title, text, title, text, ...
    section_of_title = dict(zip(sections[::2], sections[1::2], strict=True))
    block = ""
    for title in ("Args", "Arguments", "Parameters"):
        if title in section_of_title:
            block = section_of_title[title]
            break
    descriptions: dict[str, str] = {}
    first_depth: int | None = None
    name: str | None = None  # the parameter that further indented lines belong to
    for line in block.splitlines():
        if not line.strip():
            continue
        depth = len(line) - len(line.lstrip())
        if first_depth is None:
            first_depth = depth
        entry = None
        if depth <= first_depth:
            entry = re.match(r"\s*\*{0,2}(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)", line)
        if entry:
            name = entry[1]
            descriptions[name] = entry[2].strip()
        elif name is not None:
            descriptions[name] = f"{descriptions[name]} {line.strip()}".strip()
    non_empty = {name: description for name, description in descriptions.items() if description}
    return description.strip(), non_empty
