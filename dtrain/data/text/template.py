"""Chat templates: the choice of a model's template, and its rendering.

A template is jinja2, run in jinja2's `ImmutableSandboxedEnvironment` with the extras that transformers'
`apply_chat_template` adds, so that `render` writes what transformers writes. The sandbox keeps a template away from the
machine. It does not limit time or memory: a template that loops for hours makes its own run slow, which the threat
model (docs/security.md) leaves to the user. Torch is not imported.

The template is compiled with marks that are silent in `render`: at the start of each round of a loop over messages,
after such a loop, and around `{% generation %}` blocks. `marked` lets them speak, so that one more rendering tells
which characters come from which message, whatever the template trims or rewrites.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from dtrain.base.errors import UserError
from dtrain.base.json_files import read_json, read_text
from dtrain.base.model_directory import CHAT_TEMPLATE, CHAT_TEMPLATES
from dtrain.data.formats.formats import ROLES
from dtrain.data.text.tokenizer import ControlTokens, Tokenizer

SpecialTokens = Literal["structure", "all", "none"]  # of `data.special_tokens`
RESERVED = ("messages", "tools", "documents", "add_generation_prompt")
REASONING = ("reasoning_content", "thinking", "reasoning")
NAMED = ("default", "tool_use")  # the names of templates that are chosen without being asked for
DELIMITERS = ("\U000f1234", "\U000f4321", "\U00101234", "\U00104321")  # private use: no text has them all
NULL_CONTENT = object()  # a content that the template sees as null; null itself is left out, as transformers does
PROBE = "A thought that no template has."
SILENT = {"dtrain_round": lambda item, loop: "", "dtrain_mark": lambda kind, loop: ""}
OPENING = (
    ". The conversation begins with an assistant message, which some templates do not accept: put a user message in "
    "front of it, or name another template with data.chat_template"
)
SOURCE_BYTES = 1 << 20
LONGEST_REASON = 500  # characters of a template's own message
# What a template's own code can raise on a row that does not suit it.
FAILURES = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)


@dataclass
class MarkedText:
    """Text of a rendering, the characters [start, end) of each message (None: not known), and of generation blocks."""

    text: str
    blocks: list[tuple[int, int] | None]
    generations: list[tuple[int, int]] = field(default_factory=list)


@dataclass(frozen=True)
class _Layout:
    """Form in which a template reads the contents of messages.

    Attributes:
        thinks_in_parts: Whether it reads thoughts only as parts of the content.
        text_in_parts: Roles whose text it reads only as a part of the content, not as a string.
    """

    thinks_in_parts: bool
    text_in_parts: frozenset[str]


class ChatTemplate:
    """Chat template of a model, with the variables that it is rendered with.

    source          the template; `tool_source`, where there is one, takes its place for conversations with tools
    origin          where it was found, for messages
    special_tokens  `bos_token` ... as the template sees them
    variables       the recipe's `data.template_kwargs`
    control_texts   texts of the tokenizer's control tokens
    framing_texts   those of them that are structure whether the template writes them or not (`Tokenizer.framing_texts`)
    escapes         which control tokens are escaped where users and tools write them: the recipe's
                    `data.special_tokens`
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
        self.source, self.origin, self._sources = source, origin, (source, tool_source or "")
        self._arguments = (source, origin, dict(special_tokens), dict(variables or {}), tool_source)
        self._control_arguments = (tuple(control_texts), tuple(framing_texts), escapes)
        taken = [name for name in variables or {} if name in RESERVED]
        if taken:
            raise UserError(f"data.template_kwargs.{taken[0]} is set by dtrain itself; take it out of the recipe")
        self.variables = {**special_tokens, **(variables or {})}
        self._environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
        )
        self._environment.filters["tojson"] = _tojson
        self._environment.globals["raise_exception"] = _raise_exception
        self._environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        self._template = self._compiled(source)
        self._tool_template = self._template if tool_source is None else self._compiled(tool_source)
        self._layouts: dict[bool, _Layout] = {}

    def __reduce__(self):
        return ChatTemplate, (*self._arguments, *self._control_arguments)

    @cached_property
    def control_tokens(self) -> ControlTokens:
        """The control tokens, with those that are escaped in the words of users and tools."""
        texts, _, escapes = self._control_arguments
        if escapes == "all":
            return ControlTokens(texts)
        return ControlTokens(texts, escaped=() if escapes == "none" else self.structure)

    @cached_property
    def structure(self) -> frozenset[str]:
        """The control tokens that the template writes itself, and those that frame texts and images."""
        texts, framing, _ = self._control_arguments
        return frozenset(framing) | self._written_tokens(ControlTokens(texts))

    def _written_tokens(self, known: ControlTokens) -> set[str]:
        """Return the texts of the control tokens that the template writes itself.

        Most templates spell their tokens out. Some compose them, as Phi-4-mini's `'<|' + message.role + '|>'`, so
        conversations with every role are rendered, too. A template may refuse any of these.
        """
        if not known.texts:
            return set()
        texts = [text for source in self._sources for text in self._constants(source)]
        for messages, tools in _probes():
            with suppress(UserError):
                texts.append(self._run(_named_reasoning(messages), tools, True, SILENT))
        return {match[0] for text in texts for match in known.find(text)}

    def _constants(self, source: str) -> list[str]:
        """Return the texts that a template spells out, and the values of the variables that it names."""
        tree = self._environment.parse(source)
        texts = [node.data for node in tree.find_all(nodes.TemplateData)]
        texts += [node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)]
        values = [self.variables.get(node.name) for node in tree.find_all(nodes.Name)]
        return texts + [value for value in values if isinstance(value, str)]

    @cached_property
    def fingerprint(self) -> str:
        """Hash of everything that decides what is written."""
        source, _, *others = self._arguments  # where it was found decides nothing
        # Parts of contents were not always made. A cache from then would be read, without their text.
        layouts = [self._layout(with_tools) for with_tools in (False, True)]
        if any(layout.thinks_in_parts for layout in layouts):
            others.append("thoughts are parts")
        if any(layout.text_in_parts for layout in layouts):
            others.append("texts are parts")
        return hashlib.sha256(json.dumps([source, *others], sort_keys=True, default=str).encode()).hexdigest()[:16]

    @property
    def sources_by_name(self) -> dict[str, str]:
        """The templates by name: `default`, and `tool_use` where conversations with tools have one of their own."""
        source, tool_source = self._sources
        return {"default": source} | ({"tool_use": tool_source} if tool_source else {})

    @property
    def writes_todays_date(self) -> bool:
        return any("strftime_now" in source for source in self._sources) and "date_string" not in self.variables

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Render the conversation as text. variables: of this conversation, over those of all. Raises UserError with
        the template's own message and line."""
        return self._run(
            self._prepared(messages, tools is not None), tools, add_generation_prompt, {**(variables or {}), **SILENT}
        )

    def has_variable(self, name: str) -> bool:
        """Return whether the template knows a variable of this name that is not dtrain's to set."""
        is_own = name in (*RESERVED, *self._arguments[2]) or name in self._environment.globals
        return name.isidentifier() and not is_own and any(re.search(rf"\b{name}\b", source) for source in self._sources)

    def render_marked(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> MarkedText:
        """Render the conversation as text, with the span of each message.

        A message's characters are those written in its round of the one loop over messages that writes anything in
        it; None where no loop, or more than one, does. No characters are known where marks would change the text.
        """
        text = self.render(messages, tools)
        prepared = self._prepared(messages, tools is not None)
        delimiter = next((mark for mark in DELIMITERS if mark not in text), None)
        if delimiter is None:
            raise UserError("the conversation has the private characters that dtrain marks messages with; remove them")
        index_of = {id(message): index for index, message in enumerate(prepared)}

        def begin(item: Any, loop: int) -> str:
            index = index_of.get(id(item))
            return "" if index is None else f"{delimiter}round:{loop}:{index}{delimiter}"

        def mark(kind: str, loop: int) -> str:
            return f"{delimiter}{kind}:{loop}:{delimiter}"

        pieces = self._run(prepared, tools, False, {"dtrain_round": begin, "dtrain_mark": mark}).split(delimiter)
        if "".join(pieces[::2]) != text:
            return MarkedText(text, [None] * len(prepared))
        position, events = 0, []
        for piece, payload in zip(pieces[::2], [*pieces[1::2], "end::"], strict=True):
            position += len(piece)
            kind, loop, index = payload.split(":")
            events.append((position, kind, loop, index))
        return MarkedText(text, _blocks(text, events, len(prepared)), _generations(events))

    def _prepared(self, messages: Sequence[Mapping[str, Any]], with_tools: bool) -> list[dict[str, Any]]:
        """Return messages as transformers hands them to a template: nulls left out, reasoning under each name in use,
        control tokens of users escaped. Texts and thoughts are made parts of the content for a template that reads
        nothing else."""
        prepared = _named_reasoning([self.control_tokens.escape_message(message) for message in messages])
        layout = self._layout(with_tools)
        if any("reasoning_content" in message for message in prepared) and layout.thinks_in_parts:
            prepared = [_in_blocks(message) for message in prepared]
        return [_text_as_part(message) if message.get("role") in layout.text_in_parts else message
                for message in prepared]  # fmt: skip

    def _layout(self, with_tools: bool) -> "_Layout":
        """Return the form in which the template reads contents of messages; probed once for each template."""
        if with_tools not in self._layouts:
            self._layouts[with_tools] = self._probe_layout([] if with_tools else None)
        return self._layouts[with_tools]

    def _probe_layout(self, tools: list[Any] | None) -> "_Layout":
        source = self._sources[1] or self.source if tools is not None else self.source

        def rendered(messages: list[dict[str, Any]]) -> str:
            try:
                return self._run(messages, tools, False, SILENT)
            except UserError:
                return ""

        def is_read_as_part(as_text: list[dict[str, Any]], as_part: list[dict[str, Any]]) -> bool:
            # A template that writes a list as it is would write the names of the parts too.
            if PROBE in rendered(as_text):
                return False
            written = rendered(as_part)
            return PROBE in written and "'type'" not in written

        question = {"role": "user", "content": "a"}
        # Some templates loop over the parts of a content and find none in a string (SmolVLM, Idefics 3).
        text_in_parts: set[str] = set()
        if re.search(r"""['"]text['"]|\.text\b""", source):
            ask, say = {"role": "user", "content": PROBE}, {"role": "assistant", "content": PROBE}
            if is_read_as_part([ask], [_text_as_part(ask)]):
                text_in_parts.add("user")
                question = _text_as_part(question)
            if is_read_as_part([question, say], [question, _text_as_part(say)]):
                text_in_parts.add("assistant")
            system = {"role": "system", "content": PROBE}
            if is_read_as_part([system, question], [_text_as_part(system), question]):
                text_in_parts.add("system")
        # Some read thoughts as parts only, of type thinking (Ministral 3).
        thinks_in_parts = False
        if re.search("""['"]thinking['"]""", source):
            thought = _named_reasoning([{"role": "assistant", "content": "b", "thinking": PROBE}])[0]
            thinks_in_parts = is_read_as_part([question, thought], [question, _in_blocks(thought)])
        return _Layout(thinks_in_parts, frozenset(text_in_parts))

    def _run(self, messages, tools, add_generation_prompt: bool, marks: Mapping[str, Any]) -> str:
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
            reason = str(problem)[:LONGEST_REASON] or type(problem).__name__
            others = [message["role"] for message in messages if message.get("role") not in ("system", "developer")]
            hint = ""
            if others[:1] == ["assistant"]:
                reason, hint = reason.rstrip("."), OPENING
            raise UserError(
                f"the chat template, {self.origin}, refuses the conversation{where}: {reason}{hint}"
            ) from problem

    def _compiled(self, source: str) -> jinja2.Template:
        try:
            tree = self._environment.parse(source)
            return self._environment.from_string(_LoopMarks().visit(tree))
        except (*FAILURES, SyntaxError, AssertionError) as problem:
            line = f", line {problem.lineno}" if isinstance(problem, jinja2.TemplateSyntaxError) else ""
            reason = str(getattr(problem, "message", problem))[:LONGEST_REASON] or type(problem).__name__
            raise UserError(f"{self.origin}{line}: the chat template is not valid: {reason}") from problem


def choose_template(
    directory: Path,
    tokenizer: Tokenizer,
    file: str | None = None,
    variables: Mapping[str, Any] | None = None,
    escapes: SpecialTokens = "structure",
) -> ChatTemplate | None:
    """Choose the recipe's own `file` (data.chat_template), else chat_template.jinja of the model's `directory`, else
    the chat_template of its tokenizer_config.json, else of its chat_template.json (of processors); else None.

    Of several named templates (a list in JSON, or the files of additional_chat_templates/) `default` is chosen, and
    `tool_use` for conversations with tools. escapes: the recipe's `data.special_tokens`. Raises UserError.
    """

    def made(source: str, origin: str, tool_source: str | None = None) -> ChatTemplate:
        controls = (tokenizer.control_tokens.texts, tokenizer.framing_texts, escapes)
        return ChatTemplate(source, origin, tokenizer.special_tokens, variables, tool_source, *controls)

    if file is not None:
        path = Path(file).expanduser()
        if not path.is_file():
            raise UserError(f"data.chat_template: there is no file {file}")
        text = read_text(path, SOURCE_BYTES)
        return made(text, f"{path} (data.chat_template)")
    templates, origin = _templates_of(directory)
    if not templates:
        return None
    if "default" not in templates:
        raise UserError(
            f"{origin}: there is no template named default, only {', '.join(templates)}; "
            "save one of them as a file and name it with data.chat_template"
        )
    return made(templates["default"], origin, templates.get("tool_use"))


def _templates_of(directory: Path) -> tuple[dict[str, str], str]:
    """Return the chat templates of a model's directory by name, and where they were found, for messages.

    As in transformers, a template in a file of its own (chat_template.jinja, additional_chat_templates/*.jinja) comes
    before one of the same name in a JSON file.
    """
    file = directory / CHAT_TEMPLATE
    if file.exists():
        templates, origin = {"default": read_text(file, SOURCE_BYTES)}, str(file)
    else:
        templates, origin = _templates_in_json(directory)
    for file in sorted((directory / CHAT_TEMPLATES).glob("*.jinja")):
        templates[file.stem] = read_text(file, SOURCE_BYTES)
        origin = ", ".join(filter(None, [origin, str(file)])) if file.stem in NAMED else origin or str(file.parent)
    return templates, origin


def _templates_in_json(directory: Path) -> tuple[dict[str, str], str]:
    for name in ("tokenizer_config.json", "chat_template.json"):
        path = directory / name
        value = read_json(path).get("chat_template") if path.is_file() else None
        if value is None:
            continue
        if isinstance(value, str):
            return {"default": value}, f"{path} (chat_template)"
        named = value if isinstance(value, dict) else _named(value)
        if not all(isinstance(text, str) for text in [*named, *named.values()]) or not named:
            raise UserError(f"{path}: chat_template must be a template, or a list of them, each with name and template")
        with_tools = ", with tools tool_use" if "tool_use" in named else ""
        which = f" 'default'{with_tools}" if "default" in named else ""
        return dict(named), f"{path} (chat_template{which})"
    return {}, ""


def _probes() -> list[tuple[list[dict[str, Any]], list[dict[str, Any]] | None]]:
    """Return conversations, with their tools, in which every role speaks."""
    ask, reply = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "reasoning_content": "c"}
    function = {"name": "f", "description": "", "parameters": {"type": "object", "properties": {}}}
    call = {"type": "function", "id": "call00000", "function": {"name": "f", "arguments": {}}}
    calling = {"role": "assistant", "content": "", "tool_calls": [call]}
    result = {"role": "tool", "name": "f", "tool_call_id": "call00000", "content": "d"}
    probes: list[tuple[list[dict[str, Any]], list[dict[str, Any]] | None]] = [
        ([ask, reply, ask, reply], None),
        ([ask, calling, result, reply], [{"type": "function", "function": function}]),
    ]
    for role in ROLES:
        message = {"role": role, "content": "a"}
        probes += [([message, ask], None), ([ask, message], None)]
    return probes


def _named(entries: Any) -> dict[Any, Any]:
    is_sound = isinstance(entries, list) and all(
        isinstance(entry, dict) and isinstance(entry.get("name"), str) for entry in entries
    )
    return {entry["name"]: entry.get("template") for entry in entries} if is_sound else {}


def _named_reasoning(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages without nulls, their reasoning under each name in use."""
    prepared = []
    for message in messages:
        message = {name: value for name, value in message.items() if value is not None}
        if message.get("content") is NULL_CONTENT:
            message["content"] = None
        reasoning = next((message[name] for name in REASONING if name in message), None)
        if reasoning is not None:
            message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
        prepared.append(message)
    return prepared


def _text_as_part(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message whose text is a part of its content."""
    content = message.get("content")
    if not isinstance(content, str):
        return message
    return message | {"content": [{"type": "text", "text": content}]}


def _in_blocks(message: dict[str, Any]) -> dict[str, Any]:
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
    """Transformer that marks the start of each round of every loop with one variable, and the end of the loop."""

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
    """Return JSON as it is: jinja's own filter would escape HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str):
    raise jinja2.TemplateError(message)


def _template_line(problem: BaseException) -> int | None:
    """Return the template's line that raised: jinja rewrites the traceback's frames to the template's lines."""
    line, frame = None, problem.__traceback__
    while frame is not None:
        if re.fullmatch(r"<template>|<unknown>", frame.tb_frame.f_code.co_filename):
            line = frame.tb_lineno
        frame = frame.tb_next
    return line


def _blocks(text: str, events: list[tuple[int, str, str, str]], count: int) -> list[tuple[int, int] | None]:
    spans_by_message: list[list[tuple[int, int]]] = [[] for _ in range(count)]
    for number, (start, kind, loop, index) in enumerate(events):
        if kind != "round":
            continue
        rest = (at for at, other, of, _ in events[number + 1 :] if other in ("round", "endloop") and of == loop)
        end = next(rest, len(text))
        if text[start:end].strip():
            spans_by_message[int(index)].append((start, end))
    return [spans[0] if len(spans) == 1 else None for spans in spans_by_message]


def _generations(events: list[tuple[int, str, str, str]]) -> list[tuple[int, int]]:
    starts = [at for at, kind, _, _ in events if kind == "generation"]
    ends = [at for at, kind, _, _ in events if kind == "endgeneration"]
    return list(zip(starts, ends, strict=True))
