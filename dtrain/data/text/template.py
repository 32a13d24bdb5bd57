"""Chat templates: finding a model's template, and rendering conversations with it.

A template is jinja2. It runs in jinja2's `ImmutableSandboxedEnvironment` with the extras that transformers'
`apply_chat_template` adds, so `render` writes what transformers writes. The sandbox keeps a template away from the
machine. It does not limit time or memory: a template that loops for hours makes its own run slow, which the threat
model (docs/security.md) leaves to the user.

Which characters come from which message. The template is compiled with calls of two functions: `dtrain_round` at the
start of each round of a loop, and `dtrain_mark` after the loop and around `{% generation %}` blocks. In `render` both
write nothing. In `render_marked` they write marks between private delimiters. For example, with | as the delimiter:

    template    {% for m in messages %}[{{ m.role }}] {{ m.content }} {% endfor %}
    render      [user] Hi [assistant] Hello
    marked      |round:1:0|[user] Hi |round:1:1|[assistant] Hello |endloop:1:|

So message 1 is the text from the second mark to the third, whatever the template trims or rewrites.

This module does not import torch.
"""

import hashlib
import json
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from dtrain.base.errors import UserError
from dtrain.base.json_files import read_json, read_text
from dtrain.base.model_directory import CHAT_TEMPLATE, CHAT_TEMPLATES, is_template_text
from dtrain.data.formats.formats import ROLES
from dtrain.data.text.tokenizer import ControlTokens, Tokenizer

SpecialTokens = Literal["structure", "all", "none"]  # of `data.special_tokens`
RESERVED = ("messages", "tools", "documents", "add_generation_prompt")  # variables that dtrain sets
REASONING = ("reasoning_content", "thinking", "reasoning")  # names of a message's thoughts
DEFAULT_NAMES = ("default", "tool_use")  # the names that are used if there are several named templates
DELIMITERS = ("\U000f1234", "\U000f4321", "\U00101234", "\U00104321")  # private characters; no text has all four
NULL_CONTENT = object()  # a content that the template sees as null. None itself is left out, as in transformers
PROBE = "A thought that no template has."
SILENT = {"dtrain_round": lambda item, loop: "", "dtrain_mark": lambda kind, loop: ""}  # marks that write nothing
OPENING = (
    ". The conversation begins with an assistant message, which some templates do not accept: put a user message in "
    "front of it, or name another template with data.chat_template"
)
MAX_SOURCE_BYTES = 1 << 20
MAX_REASON = 500  # characters of a template's own error message
# Exceptions that the code of a template can raise for a conversation that it does not accept.
FAILURES = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)


Tools = Sequence[Mapping[str, Any]]
Messages = Sequence[Mapping[str, Any]]


@dataclass
class MarkedText:
    """A rendered conversation, and where its messages are.

    Attributes:
        text: The text.
        blocks: Characters [start, end) of each message; None if they are not known.
        generations: Characters [start, end) of the `{% generation %}` blocks.
    """

    text: str
    blocks: list[tuple[int, int] | None]
    generations: list[tuple[int, int]] = field(default_factory=list)


class _Mark(NamedTuple):
    """A mark in a rendered conversation.

    Attributes:
        position: Its position in the text without marks.
        kind: round, endloop, generation, endgeneration, or end (of the text).
        loop: Number of the loop in the template, as text.
        message: For kind "round", the index of the message, as text.
    """

    position: int
    kind: str
    loop: str
    message: str


@dataclass(frozen=True)
class _ContentLayout:
    """The form in which a template reads the content of messages.

    Attributes:
        thinks_in_parts: Whether it reads thoughts only as parts of the content.
        text_in_parts: Roles whose text it reads only as a part of the content, not as a string.
    """

    thinks_in_parts: bool
    text_in_parts: frozenset[str]


class ChatTemplate:
    """The chat template of a model, with the variables that it is rendered with.

    Attributes:
        source: The template.
        origin: Where it was found, for messages.
        variables: Variables of every rendering: the special tokens and the recipe's `data.template_kwargs`.
    """

    def __init__(
        self,
        source: str,
        origin: str,
        special_tokens: Mapping[str, str],
        variables: Mapping[str, Any] | None = None,
        tool_source: str | None = None,
        control_texts: Sequence[str] = (),
        framing_texts: Sequence[str] = (),
        escapes: SpecialTokens = "structure",
    ):
        """Compile the template.

        Args:
            source: The template.
            origin: Where it was found, for messages.
            special_tokens: `bos_token` and others, as the template sees them.
            variables: The recipe's `data.template_kwargs`.
            tool_source: A template that is used instead for conversations with tools.
            control_texts: Texts of the tokenizer's control tokens.
            framing_texts: Those that belong to the structure even if the template does not write them
                (`Tokenizer.framing_texts`).
            escapes: The recipe's `data.special_tokens`: which control tokens are escaped in the words of users and
                tools.

        Raises:
            UserError: If the template is not valid, or `variables` has a name that dtrain sets.
        """
        self.source = source
        self.origin = origin
        self._sources = (source, tool_source or "")
        self._arguments = (source, origin, dict(special_tokens), dict(variables or {}), tool_source)
        self._control_arguments = (tuple(control_texts), tuple(framing_texts), escapes)
        reserved = [name for name in variables or {} if name in RESERVED]
        if reserved:
            raise UserError(f"data.template_kwargs.{reserved[0]} is set by dtrain itself. Remove it from the recipe")
        self.variables = {**special_tokens, **(variables or {})}
        self._environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
        )
        self._environment.filters["tojson"] = _tojson
        self._environment.globals["raise_exception"] = _raise_exception
        self._environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        self._template = self._compile(source)
        self._tool_template = self._template if tool_source is None else self._compile(tool_source)
        self._layouts: dict[bool, _ContentLayout] = {}  # with tools or without

    def __reduce__(self):
        # A compiled template cannot be pickled, so a worker process compiles it again.
        return ChatTemplate, (*self._arguments, *self._control_arguments)

    @cached_property
    def control_tokens(self) -> ControlTokens:
        """The control tokens of the tokenizer, and which of them are escaped in messages of users and tools."""
        texts, _, escapes = self._control_arguments
        if escapes == "all":
            return ControlTokens(texts)
        return ControlTokens(texts, escaped=() if escapes == "none" else self.structure)

    @cached_property
    def structure(self) -> frozenset[str]:
        """The control tokens that the template writes itself, and the tokens that frame texts and images."""
        texts, framing_texts, _ = self._control_arguments
        return frozenset(framing_texts) | self._find_written_tokens(ControlTokens(texts))

    def _find_written_tokens(self, control_tokens: ControlTokens) -> set[str]:
        """Return the texts of the control tokens that the template writes itself.

        Most templates spell their tokens out. Some compose them, as Phi-4-mini's `'<|' + message.role + '|>'`, so
        conversations with every role are rendered, too. A template may refuse any of these.
        """
        if not control_tokens.texts:
            return set()
        texts = []
        for source in self._sources:
            texts += self._constants_of(source)
        for messages, tools in _probe_conversations():
            with suppress(UserError):
                texts.append(self._run(_name_reasoning(messages), tools, True, SILENT))
        token_texts: set[str] = set()
        for text in texts:
            token_texts.update(match[0] for match in control_tokens.find(text))
        return token_texts

    def _constants_of(self, source: str) -> list[str]:
        """Return the texts that a template spells out, and the values of the variables that it names."""
        tree = self._environment.parse(source)
        texts = [node.data for node in tree.find_all(nodes.TemplateData)]
        texts += [node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)]
        values = [self.variables.get(node.name) for node in tree.find_all(nodes.Name)]
        return texts + [value for value in values if isinstance(value, str)]

    @cached_property
    def fingerprint(self) -> str:
        """Hash of everything that decides what is written."""
        source, _, *others = self._arguments  # the origin decides nothing
        # dtrain did not always write contents as parts. Caches from then lack their text, so they need another hash.
        layouts = [self._layout(with_tools=False), self._layout(with_tools=True)]
        if any(layout.thinks_in_parts for layout in layouts):
            others.append("thoughts are parts")
        if any(layout.text_in_parts for layout in layouts):
            others.append("texts are parts")
        return hashlib.sha256(json.dumps([source, *others], sort_keys=True, default=str).encode()).hexdigest()[:16]

    @property
    def sources_by_name(self) -> dict[str, str]:
        """The templates by name: `default`, and `tool_use` if conversations with tools have another template."""
        source, tool_source = self._sources
        templates = {"default": source}
        if tool_source:
            templates["tool_use"] = tool_source
        return templates

    @property
    def writes_todays_date(self) -> bool:
        """True if the template writes the current date, and no variable fixes it."""
        return any("strftime_now" in source for source in self._sources) and "date_string" not in self.variables

    def render(
        self,
        messages: Messages,
        tools: Tools | None = None,
        add_generation_prompt: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Render a conversation as text.

        Args:
            messages: The conversation.
            tools: Tools that it lists.
            add_generation_prompt: Whether the text ends with the beginning of a reply.
            variables: Variables for this conversation, in addition to `self.variables`.

        Raises:
            UserError: If the template refuses the conversation, with the template's own message and line.
        """
        prepared = self._prepare(messages, tools is not None)
        return self._run(prepared, tools, add_generation_prompt, {**(variables or {}), **SILENT})

    def has_variable(self, name: str) -> bool:
        """Return True if the template reads a variable of this name that a user may set."""
        special_tokens = self._arguments[2]
        if not name.isidentifier() or name in RESERVED or name in special_tokens or name in self._environment.globals:
            return False
        return any(re.search(rf"\b{name}\b", source) for source in self._sources)

    def render_marked(self, messages: Messages, tools: Tools | None = None) -> MarkedText:
        """Render a conversation, and find the characters of each message.

        A message's characters are the text that its round of a loop over the messages writes. They are not known if no
        loop or several loops write the message, or if the marks would change the text.

        Raises:
            UserError: If the template refuses the conversation.
        """
        text = self.render(messages, tools)
        prepared = self._prepare(messages, tools is not None)
        unused_delimiters = [delimiter for delimiter in DELIMITERS if delimiter not in text]
        if not unused_delimiters:
            raise UserError("the conversation has the private characters that dtrain marks messages with. Remove them")
        delimiter = unused_delimiters[0]
        index_of_message = {id(message): index for index, message in enumerate(prepared)}

        def mark_round(item: Any, loop: int) -> str:
            index = index_of_message.get(id(item))
            return "" if index is None else f"{delimiter}round:{loop}:{index}{delimiter}"

        def mark(kind: str, loop: int) -> str:
            return f"{delimiter}{kind}:{loop}:{delimiter}"

        marked = self._run(prepared, tools, False, {"dtrain_round": mark_round, "dtrain_mark": mark})
        parts = marked.split(delimiter)  # text, mark, text, mark, ..., text
        texts, payloads = parts[::2], parts[1::2]
        if "".join(texts) != text:
            return MarkedText(text, [None] * len(prepared))
        marks = []
        position = 0
        for piece, payload in zip(texts, [*payloads, "end::"], strict=True):
            position += len(piece)
            kind, loop, index = payload.split(":")
            marks.append(_Mark(position, kind, loop, index))
        return MarkedText(text, _message_blocks(text, marks, len(prepared)), _generation_blocks(marks))

    def _prepare(self, messages: Messages, with_tools: bool) -> list[dict[str, Any]]:
        """Return messages as transformers passes them to a template.

        Nulls are left out, reasoning has every name in use, and control tokens of users are escaped. Texts and thoughts
        become parts of the content if the template reads nothing else.
        """
        prepared = _name_reasoning([self.control_tokens.escape_message(message) for message in messages])
        layout = self._layout(with_tools)
        has_reasoning = any("reasoning_content" in message for message in prepared)
        if has_reasoning and layout.thinks_in_parts:
            prepared = [_thoughts_as_parts(message) for message in prepared]
        result = []
        for message in prepared:
            if message.get("role") in layout.text_in_parts:
                message = _text_as_part(message)
            result.append(message)
        return result

    def _layout(self, with_tools: bool) -> _ContentLayout:
        """Return the form in which the template reads contents, with tools or without. Each form is found once."""
        if with_tools not in self._layouts:
            self._layouts[with_tools] = self._find_layout([] if with_tools else None)
        return self._layouts[with_tools]

    def _find_layout(self, tools: list[Any] | None) -> _ContentLayout:
        """Find the form by rendering a known text as a string and as a part of the content."""
        has_tool_source = tools is not None and self._sources[1] != ""
        source = self._sources[1] if has_tool_source else self.source
        text_in_parts: set[str] = set()
        if re.search(r"""['"]text['"]|\.text\b""", source):
            text_in_parts = self._roles_with_text_in_parts(tools)
        thinks_in_parts = False
        if re.search("""['"]thinking['"]""", source):
            thinks_in_parts = self._finds_thoughts_in_parts(tools, _question(text_in_parts))
        return _ContentLayout(thinks_in_parts, frozenset(text_in_parts))

    def _roles_with_text_in_parts(self, tools: list[Any] | None) -> set[str]:
        """Return the roles whose text the template reads only as a part of the content.

        Some templates loop over the parts of a content and find none in a string (SmolVLM, Idefics 3).
        """
        roles = set()
        user = {"role": "user", "content": PROBE}
        if self._is_read_only_as_part([user], [_text_as_part(user)], tools):
            roles.add("user")
        question = _question(roles)
        assistant = {"role": "assistant", "content": PROBE}
        if self._is_read_only_as_part([question, assistant], [question, _text_as_part(assistant)], tools):
            roles.add("assistant")
        system = {"role": "system", "content": PROBE}
        if self._is_read_only_as_part([system, question], [_text_as_part(system), question], tools):
            roles.add("system")
        return roles

    def _finds_thoughts_in_parts(self, tools: list[Any] | None, question: dict[str, Any]) -> bool:
        """Check whether the template reads thoughts only as parts of type thinking (Ministral 3)."""
        thought = _name_reasoning([{"role": "assistant", "content": "b", "thinking": PROBE}])[0]
        return self._is_read_only_as_part([question, thought], [question, _thoughts_as_parts(thought)], tools)

    def _is_read_only_as_part(
        self, as_text: list[dict[str, Any]], as_part: list[dict[str, Any]], tools: list[Any] | None
    ) -> bool:
        """Check whether the template writes the probe of `as_part`, and does not write that of `as_text`."""
        if PROBE in self._render_probe(as_text, tools):
            return False
        rendered = self._render_probe(as_part, tools)
        # A template that writes a list as it is would write the names of the parts, too.
        return PROBE in rendered and "'type'" not in rendered

    def _render_probe(self, messages: list[dict[str, Any]], tools: list[Any] | None) -> str:
        """Render messages. Return an empty text if the template refuses them."""
        try:
            return self._run(messages, tools, False, SILENT)
        except UserError:
            return ""

    def _run(self, messages, tools, add_generation_prompt: bool, marks: Mapping[str, Any]) -> str:
        """Render prepared messages. Raises UserError with the template's own message and line."""
        template = self._template if tools is None else self._tool_template
        try:
            return template.render(
                **{**self.variables, **marks},
                messages=messages,
                tools=None if tools is None else list(tools),
                documents=None,
                add_generation_prompt=add_generation_prompt,
            )
        except FAILURES as problem:
            line = _template_line(problem)
            where = f" (line {line} of the template)" if line else ""
            reason = str(problem)[:MAX_REASON] or type(problem).__name__
            roles = [message["role"] for message in messages if message.get("role") not in ("system", "developer")]
            hint = ""
            if roles[:1] == ["assistant"]:
                reason = reason.rstrip(".")
                hint = OPENING
            raise UserError(
                f"the chat template, {self.origin}, refuses the conversation{where}: {reason}{hint}"
            ) from problem

    def _compile(self, source: str) -> jinja2.Template:
        try:
            tree = self._environment.parse(source)
            return self._environment.from_string(_LoopMarks().visit(tree))
        except (*FAILURES, SyntaxError, AssertionError) as problem:
            line = f", line {problem.lineno}" if isinstance(problem, jinja2.TemplateSyntaxError) else ""
            reason = str(getattr(problem, "message", problem))[:MAX_REASON] or type(problem).__name__
            raise UserError(f"{self.origin}{line}: the chat template is not valid: {reason}") from problem


class _FoundTemplates(NamedTuple):
    """Templates of a model's directory.

    Attributes:
        templates: Their sources by name.
        origin: Where they were found, for messages.
    """

    templates: dict[str, str]
    origin: str


def choose_template(
    directory: Path,
    tokenizer: Tokenizer,
    file: str | None = None,
    variables: Mapping[str, Any] | None = None,
    escapes: SpecialTokens = "structure",
) -> ChatTemplate | None:
    """Choose the chat template of a model.

    The first of these that exists: `file`, chat_template.jinja of the directory, the chat_template of its
    tokenizer_config.json, that of its chat_template.json (which processors write). If there are several named templates
    (a list in JSON, or the files of additional_chat_templates/), `default` is used, and `tool_use` for conversations
    with tools.

    Args:
        directory: The model's directory.
        tokenizer: Its tokenizer.
        file: The recipe's `data.chat_template`: a file, or the text of a template.
        variables: The recipe's `data.template_kwargs`.
        escapes: The recipe's `data.special_tokens`.

    Returns:
        The template; None if there is none.

    Raises:
        UserError: If the template is not valid, or there is none with the name `default`.
    """

    def build(source: str, origin: str, tool_source: str | None = None) -> ChatTemplate:
        return ChatTemplate(
            source,
            origin,
            tokenizer.special_tokens,
            variables,
            tool_source,
            control_texts=tokenizer.control_tokens.texts,
            framing_texts=tokenizer.framing_texts,
            escapes=escapes,
        )

    if file is not None and is_template_text(file):
        return build(file, "data.chat_template")
    if file is not None:
        path = Path(file).expanduser()
        if not path.is_file():
            raise UserError(f"data.chat_template: there is no file {file}")
        text = read_text(path, MAX_SOURCE_BYTES)
        return build(text, f"{path} (data.chat_template)")
    templates, origin = _find_templates(directory)
    if not templates:
        return None
    if "default" not in templates:
        raise UserError(
            f"{origin}: there is no template named default, only {', '.join(templates)}. "
            "Save one of them as a file and name it with data.chat_template"
        )
    return build(templates["default"], origin, templates.get("tool_use"))


def _find_templates(directory: Path) -> _FoundTemplates:
    """Return the chat templates of a model's directory.

    As in transformers, a template in a file of its own (chat_template.jinja, additional_chat_templates/*.jinja) comes
    before one of the same name in a JSON file.
    """
    file = directory / CHAT_TEMPLATE
    if file.exists():
        templates, origin = {"default": read_text(file, MAX_SOURCE_BYTES)}, str(file)
    else:
        templates, origin = _find_templates_in_json(directory)
    for file in sorted((directory / CHAT_TEMPLATES).glob("*.jinja")):
        templates[file.stem] = read_text(file, MAX_SOURCE_BYTES)
        if file.stem in DEFAULT_NAMES:
            origin = f"{origin}, {file}" if origin else str(file)
        elif not origin:
            origin = str(file.parent)
    return _FoundTemplates(templates, origin)


def _find_templates_in_json(directory: Path) -> _FoundTemplates:
    """Return the chat templates of tokenizer_config.json, or else of chat_template.json. Raises UserError."""
    for name in ("tokenizer_config.json", "chat_template.json"):
        path = directory / name
        value = read_json(path).get("chat_template") if path.is_file() else None
        if value is None:
            continue
        if isinstance(value, str):
            return _FoundTemplates({"default": value}, f"{path} (chat_template)")
        templates = value if isinstance(value, dict) else _templates_of_list(value)
        are_texts = all(isinstance(key, str) and isinstance(text, str) for key, text in templates.items())
        if not templates or not are_texts:
            raise UserError(f"{path}: chat_template must be a template, or a list of them, each with name and template")
        used = ""
        if "default" in templates:
            used = " 'default'"
            if "tool_use" in templates:
                used += ", with tools tool_use"
        return _FoundTemplates(dict(templates), f"{path} (chat_template{used})")
    return _FoundTemplates({}, "")


def _templates_of_list(entries: Any) -> dict[Any, Any]:
    """Return the templates of a list of {"name", "template"}; {} if it is no such list."""
    if not isinstance(entries, list):
        return {}
    templates = {}
    for entry in entries:
        if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
            return {}
        templates[entry["name"]] = entry.get("template")
    return templates


def _probe_conversations() -> list[tuple[list[dict[str, Any]], list[dict[str, Any]] | None]]:
    """Return conversations, with their tools, in which every role speaks."""
    question = {"role": "user", "content": "a"}
    reply = {"role": "assistant", "content": "b", "reasoning_content": "c"}
    function = {"name": "f", "description": "", "parameters": {"type": "object", "properties": {}}}
    call = {"type": "function", "id": "call00000", "function": {"name": "f", "arguments": {}}}
    calling = {"role": "assistant", "content": "", "tool_calls": [call]}
    result = {"role": "tool", "name": "f", "tool_call_id": "call00000", "content": "d"}
    conversations: list[tuple[list[dict[str, Any]], list[dict[str, Any]] | None]] = [
        ([question, reply, question, reply], None),
        ([question, calling, result, reply], [{"type": "function", "function": function}]),
    ]
    for role in ROLES:
        message = {"role": role, "content": "a"}
        conversations += [([message, question], None), ([question, message], None)]
    return conversations


def _name_reasoning(messages: Messages) -> list[dict[str, Any]]:
    """Return messages without nulls, with their reasoning under each name in use."""
    prepared = []
    for message in messages:
        message = {name: value for name, value in message.items() if value is not None}
        if message.get("content") is NULL_CONTENT:
            message["content"] = None
        for name in REASONING:
            if name in message:
                reasoning = message[name]
                message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
                break
        prepared.append(message)
    return prepared


def _question(text_in_parts: Collection[str]) -> dict[str, Any]:
    """Return a question, in the form in which a template reads the text of users."""
    question = {"role": "user", "content": "a"}
    return _text_as_part(question) if "user" in text_in_parts else question


def _text_as_part(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message whose text is a part of its content."""
    content = message.get("content")
    if not isinstance(content, str):
        return message
    return message | {"content": [{"type": "text", "text": content}]}


def _thoughts_as_parts(message: dict[str, Any]) -> dict[str, Any]:
    """Return an assistant message whose thoughts and text are parts of its content."""
    if "reasoning_content" not in message or message["role"] != "assistant":
        return message
    parts = [{"type": "thinking", "thinking": message["reasoning_content"]}]
    if message.get("content"):
        parts.append({"type": "text", "text": message["content"]})
    return message | {"content": parts}


class _Generation(Extension):
    """`{% generation %} ... {% endgeneration %}`: the part of a template that the model itself writes."""

    tags = {"generation"}

    def parse(self, parser) -> list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        scope = nodes.Scope(body).set_lineno(line)
        return [_call("dtrain_mark", line, "generation", 0), scope, _call("dtrain_mark", line, "endgeneration", 0)]


class _LoopMarks(NodeTransformer):
    """Inserts `dtrain_round` at the start of each round of every loop with one variable, and `dtrain_mark` after it."""

    def __init__(self):
        self.loops = 0

    def visit_For(self, node: nodes.For):
        self.loops += 1
        loop = self.loops
        self.generic_visit(node)
        if not isinstance(node.target, nodes.Name):
            return node
        variable = nodes.Name(node.target.name, "load")
        node.body.insert(0, _call("dtrain_round", node.lineno, variable, loop))
        return [node, _call("dtrain_mark", node.lineno, "endloop", loop)]


def _call(name: str, line: int, *arguments: Any) -> nodes.Node:
    values = [value if isinstance(value, nodes.Node) else nodes.Const(value) for value in arguments]
    return nodes.Output([nodes.Call(nodes.Name(name, "load"), values, [], None, None)]).set_lineno(line)


def _tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    """Return a value as JSON. jinja's own filter `tojson` would escape HTML characters."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str):
    raise jinja2.TemplateError(message)


def _template_line(problem: BaseException) -> int | None:
    """Return the line of the template that raised. jinja rewrites the frames of the traceback to these lines."""
    line = None
    frame = problem.__traceback__
    while frame is not None:
        if re.fullmatch(r"<template>|<unknown>", frame.tb_frame.f_code.co_filename):
            line = frame.tb_lineno
        frame = frame.tb_next
    return line


def _message_blocks(text: str, marks: Sequence[_Mark], num_messages: int) -> list[tuple[int, int] | None]:
    """Return the span of each message in `text`. None for a message that no loop round, or more than one, wrote."""
    spans_of_messages: list[list[tuple[int, int]]] = [[] for _ in range(num_messages)]
    for number, mark in enumerate(marks):
        if mark.kind != "round":
            continue
        # The round ends at the next round of the same loop, or where the loop ends.
        end = len(text)
        for later in marks[number + 1 :]:
            if later.kind in ("round", "endloop") and later.loop == mark.loop:
                end = later.position
                break
        if text[mark.position : end].strip():
            spans_of_messages[int(mark.message)].append((mark.position, end))
    return [spans[0] if len(spans) == 1 else None for spans in spans_of_messages]


def _generation_blocks(marks: Sequence[_Mark]) -> list[tuple[int, int]]:
    starts = [mark.position for mark in marks if mark.kind == "generation"]
    ends = [mark.position for mark in marks if mark.kind == "endgeneration"]
    return list(zip(starts, ends, strict=True))
