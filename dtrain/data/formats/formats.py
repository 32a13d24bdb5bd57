"""Formats of rows: how each is recognised and checked, and how it becomes one of three shapes.

    Conversation    rows of messages, ShareGPT and Alpaca, and prompts and completions that are messages
    Text            a text, or a prompt and a completion that are strings
    TokenizedRow    token ids, used as they are

For example, these two rows become the same `Conversation`:

    {"messages": [{"role": "user", "content": "2 + 2"}, {"role": "assistant", "content": "4"}]}
    {"conversations": [{"from": "human", "value": "2 + 2"}, {"from": "gpt", "value": "4"}]}

pairs.py reads preference rows, and prompts.py reads prompts. Errors are UserErrors that name the key and the fix. The
caller adds file and line.

This module does not import torch.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, NamedTuple

from dtrain.base.errors import UserError
from dtrain.base.json_files import as_list, json_type, loads
from dtrain.base.ranges import closest_name, format_value, plural
from dtrain.data.formats.image_parts import COLUMN, images_in, read_content, text_of, with_images

# Suffixes of data files, with the kind of file.
FILE_KINDS = {".jsonl": "json", ".json": "json", ".ndjson": "json", ".csv": "csv", ".parquet": "parquet"}
IGNORE = -100  # label of a token without loss, as in PyTorch's cross_entropy

# The required keys of each format. A row has the first format whose keys it has.
FORMATS: dict[str, tuple[str, ...]] = {
    "tokenized": ("input_ids",),
    "messages": ("messages",),
    "sharegpt": ("conversations",),
    "preference": ("chosen", "rejected"),
    "alpaca": ("instruction", "output"),
    "prompt_completion": ("prompt", "completion"),
    "text": ("text",),
}
# For methods that train on pairs.
PAIR_FORMATS: dict[str, tuple[str, ...]] = {
    "tokenized": ("prompt_ids", "chosen_ids", "rejected_ids"),
    "preference": ("chosen", "rejected"),
}
# For methods that train on the model's completions of prompts.
PROMPT_FORMATS: dict[str, tuple[str, ...]] = {
    "tokenized": ("prompt_ids",),
    "messages": ("messages",),
    "sharegpt": ("conversations",),
    "prompt_completion": ("prompt",),
    "question": ("question",),
    "alpaca": ("instruction",),
}
# For methods that train on replies with a label. A preference row is two of them.
LABELLED_FORMATS = {name: keys for name, keys in FORMATS.items() if name != "text"}
# The formats of each kind of row that a method trains on.
FORMATS_BY_KIND = {
    "examples": FORMATS,
    "pairs": PAIR_FORMATS,
    "prompts": PROMPT_FORMATS,
    "labelled": LABELLED_FORMATS,
}
# Columns with a mask of the trained tokens, in tokenized rows of other tools.
MASKS = ("completion_mask", "assistant_masks", "assistant_mask", "prompt_mask", "loss_mask")
LABELS = ("label", "kto_tag")  # columns that say whether a reply is a good one
CHAT_FORMATS = ("messages", "sharegpt", "alpaca")
ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
# Roles of dtrain for ShareGPT's speakers.
SHAREGPT_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "observation": "tool",
    "function_response": "tool",
    "tool_response": "tool",
    **{role: role for role in ROLES},
}
THOUGHTS_HINT = "; only an assistant's content begins with thoughts"
CALL_ROLES = ("function_call", "tool_call")  # ShareGPT's speakers whose text is a tool call
CALL_KEYS = ("type", "id", "index")  # keys of a call next to its function
# Names for a call's arguments in Llama 3, LangChain and other tools.
OTHER_ARGUMENT_KEYS = ("parameters", "args", "input", "kwargs")
# Words that people use for roles, with the role that is meant.
ROLE_HINTS = {"human": "user", "gpt": "assistant", "bot": "assistant", "ai": "assistant", "model": "assistant"}

# The error for preference rows if a method trains on single examples.
PREFERENCES_REFUSED = (
    "the rows are preferences, pairs of a chosen and a rejected completion: set method=dpo, which trains on them, "
    "or give each row messages, or prompt and completion"
)


def file_suffix(file: PurePath) -> str:
    """Return the suffix of a file in lower case. For gzipped data files, it is the suffix before .gz.

    Example:
        >>> file_suffix(PurePath("rows.JSONL.gz")), file_suffix(PurePath("rows.parquet.gz"))
        ('.jsonl', '.gz')
    """
    suffixes = [suffix.lower() for suffix in file.suffixes]
    if not suffixes:
        return ""
    # A parquet file is compressed inside, so it is never read through gzip.
    is_gzipped = suffixes[-1] == ".gz" and len(suffixes) > 1 and suffixes[-2] != ".parquet"
    return suffixes[-2] if is_gzipped else suffixes[-1]


@dataclass(frozen=True)
class Conversation:
    """A conversation.

    Attributes:
        messages: The messages.
        train: The row's mark of each message: True (trained), False (not trained), or None without a mark.
        tools: Tools that the conversation lists.
        prompt: Number of messages at the beginning that are never trained; 0 unless the row has prompt and completion.
    """

    messages: list[dict[str, Any]]
    train: list[bool | None]
    tools: list[dict[str, Any]] | None = None
    prompt: int = 0


@dataclass(frozen=True)
class Text:
    """A plain text.

    Attributes:
        prompt: The beginning of the text; empty if the row has only a text.
        completion: The rest.
    """

    prompt: str
    completion: str


@dataclass(frozen=True)
class TokenizedRow:
    """Token ids as a row writes them.

    Attributes:
        ids: Token ids.
        trained: For each token, whether it is a target.
    """

    ids: list[int]
    trained: list[bool]


class ReadMessages(NamedTuple):
    """Messages of a row.

    Attributes:
        messages: The messages.
        train: The mark of each: trained, not trained, or None.
    """

    messages: list[dict[str, Any]]
    train: list[bool | None]


def detect_format(row: Mapping[str, Any], kind: str = "examples") -> str | None:
    """Return the format of a row among those of `kind`, or None. A null counts as absent, because parquet adds nulls.

    Example:
        >>> detect_format({"prompt": "2 + 2 =", "completion": " 4", "text": None})
        'prompt_completion'
    """
    for name, keys in FORMATS_BY_KIND[kind].items():
        if all(row.get(key) is not None for key in keys):
            return name
    return None


def null_keys(row: Mapping[str, Any], kind: str = "examples") -> list[str]:
    """Return the keys that are null in a row and prevent its format from being recognised.

    Example:
        >>> null_keys({"prompt": "2 + 2 =", "completion": None})
        ['completion']
    """
    for keys in FORMATS_BY_KIND[kind].values():
        if all(key in row for key in keys):
            return [key for key in keys if row[key] is None]
    return []


def _describe_null(keys: list[str]) -> str:
    verb = "is" if len(keys) == 1 else "are"
    return f"{' and '.join(keys)} {verb} null in this row. Give the row a value there, or leave the row out"


def describe_unknown_format(row: Mapping[str, Any], kind: str = "examples") -> str:
    """Return the error for a row in which `detect_format` found no format."""
    keys = null_keys(row, kind)
    if keys:
        return _describe_null(keys)
    if kind == "examples" and detect_format(row, "pairs") is not None:
        return PREFERENCES_REFUSED
    single = detect_format(row, "examples")
    if kind == "pairs" and single is not None:
        message = refuse_single(single, kind)
        if row.get("label") is not None:
            message += (
                "; method=kto trains on single replies with a label, method=reward on any text with one "
                "(reward.task=classes or numbers)"
            )
        return message
    if kind == "pairs":
        tokenized_keys = ", ".join(PAIR_FORMATS["tokenized"])
        formats = f"preference: chosen, rejected, with prompt or without; tokenized: {tokenized_keys}"
    else:
        known = FORMATS_BY_KIND[kind].items()
        formats = "; ".join(f"{name}: {', '.join(keys)}" for name, keys in known if name != "preference")
    hint = ""
    if kind == "examples" and detect_format(row, "prompts"):
        hint = ", or set method=grpo, which trains on prompts"
    return (
        f"no known format has the keys {', '.join(map(str, row)) or '(none)'}. The formats and their keys are: "
        f"{formats}. Rename the columns of the file{hint}"
    )


def refuse_single(name: str, kind: str) -> str:
    """Return the error for rows of format `name` if a method trains on pairs or prompts."""
    if kind == "prompts":
        keys = "messages, prompt, question, instruction or prompt_ids"
        return f"rows of format {name} hold no prompt to answer; method=grpo needs {keys}"
    return (
        f"rows of format {name} are single examples, which method=sft trains on; method=dpo, and method=reward with "
        "reward.task=pairs, train on preferences: give each row prompt, chosen and rejected, or "
        f"{', '.join(PAIR_FORMATS['tokenized'])}"
    )


def require_keys(row: Mapping[str, Any], name: str, kind: str = "examples") -> None:
    """Raise UserError if a row is not of format `name`."""
    required = FORMATS_BY_KIND[kind][name]
    missing = [key for key in required if row.get(key) is None]
    if not missing:
        return
    other = detect_format(row, kind)
    if other is None and all(key in row for key in required):
        raise UserError(_describe_null(missing))
    looks = f"it looks like format {other}" if other else describe_unknown_format(row, kind)
    raise UserError(
        f"the source's format is {name}, but this row has no {' and no '.join(missing)}; {looks}. "
        "Rows of different formats belong into different files, each one of data.train.sources"
    )


def refuse_images(row: Mapping[str, Any], what: str) -> None:
    """Raise UserError if a row without messages has images. `what` names the row's content."""
    if not row.get(COLUMN):
        return
    images = images_in(row)
    if images:
        raise UserError(
            f"the row has {len(images)} {plural(len(images), 'image')} in its column {COLUMN}, but images must be in "
            f"messages, and {what} take none. Give the row messages"
        )


def normalise(row: Mapping[str, Any], name: str) -> Conversation | Text | TokenizedRow:
    """Convert a row of a single example to its shape.

    Args:
        row: The row.
        name: Its format, a key of `FORMATS`.

    Raises:
        UserError: If the row is wrong.

    Example:
        >>> normalise({"prompt": "2 + 2 =", "completion": " 4"}, "prompt_completion")
        Text(prompt='2 + 2 =', completion=' 4')
    """
    if name == "preference":
        raise UserError(PREFERENCES_REFUSED)
    if name not in FORMATS:
        raise UserError(
            f"rows of format {name} have no reply to train on. Give each row messages, or instruction and output"
        )
    require_keys(row, name)
    if name not in ("text", "tokenized"):
        _refuse_bad_reply(row)
    sample = _READERS[name](row)
    if not isinstance(sample, Conversation):
        refuse_images(row, {"text": "texts", "tokenized": "token ids"}.get(name, "plain prompts"))
    return sample


def _refuse_bad_reply(row: Mapping[str, Any]) -> None:
    """Raise UserError if a label says that the reply is a bad one, which should not be trained."""
    for key in LABELS:
        if str(row.get(key)).lower() == "false":
            raise UserError(
                f"{key} is false: rows with a reply and a label (KTO) hold bad replies too, and sft would train them. "
                f"Set method=kto, which learns from both, or keep the rows whose {key} is true; where {key} says "
                "something else, rename this column"
            )


def read_string(value: Any, key: str) -> str:
    """Return `value` if it is a string. Otherwise raise UserError with the name `key`."""
    if not isinstance(value, str):
        raise UserError(f"{key} must be a string, not {json_type(value)}")
    return value


def read_tools(row: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """Return the tools of a row, or None. `functions` is OpenAI's former name of `tools`. Raises UserError."""
    if row.get("tools") in (None, "", []):
        functions = row.get("functions")
        if not isinstance(functions, list) or not all(isinstance(item, dict) and "name" in item for item in functions):
            return None
        return [{"type": "function", "function": item} for item in functions] or None
    tools = as_list(row["tools"], "tools")
    for index, tool in enumerate(tools):
        if not isinstance(tool, dict):
            raise UserError(f"tools[{index}] must be an object (a JSON schema of a function), not {json_type(tool)}")
    return tools


def _read_chat(row: Mapping[str, Any], key: str) -> Conversation:
    row_messages, marks = read_messages(row[key], key)
    messages = with_system(row_messages, row.get("system"))
    added_marks: list[bool | None] = [None] * (len(messages) - len(row_messages))
    return Conversation(with_images(row, messages), added_marks + marks, read_tools(row))


def with_system(messages: list[dict[str, Any]], system: Any) -> list[dict[str, Any]]:
    """Return messages that begin with the row's `system` text, unless they begin with a system message already."""
    if not system or messages[0]["role"] in ("system", "developer"):
        return messages
    return [{"role": "system", "content": read_string(system, "system")}, *messages]


def read_messages(value: Any, key: str) -> ReadMessages:
    """Read a list of messages.

    Args:
        value: The list, or its JSON text.
        key: Name of the list, for messages.

    Raises:
        UserError: If the list is empty or a message is wrong.

    Example:
        >>> read_messages([{"from": "gpt", "value": "4", "weight": 0}], "conversations")
        ReadMessages(messages=[{'role': 'assistant', 'content': '4'}], train=[False])
    """
    entries = as_list(value, key)
    if not entries:
        raise UserError(f"{key} is an empty list. Give at least one user and one assistant message")
    messages = []
    marks = []
    for index, entry in enumerate(entries):
        message, mark = _read_message(entry, f"{key}[{index}]")
        messages.append(message)
        marks.append(mark)
    has_former_calls = any(isinstance(entry, dict) and entry.get("function_call") is not None for entry in entries)
    if has_former_calls:
        # Most chat templates know a tool's answer only by the role tool.
        for message in messages:
            if message["role"] == "function":
                message["role"] = "tool"
    return ReadMessages(messages, marks)


def _read_message(entry: Any, key: str) -> tuple[dict[str, Any], bool | None]:
    """Return a message in OpenAI's form, and the row's mark of it."""
    if not isinstance(entry, dict):
        raise UserError(f'{key} must be an object like {{"role": "user", "content": "..."}}, not {json_type(entry)}')
    message = {name: value for name, value in entry.items() if value is not None}
    if "role" not in message and "from" in message:
        if "value" not in message:
            raise _missing_text_error(entry, key, "value")
        message = _read_sharegpt_message(message, key)
    elif key.startswith("conversations[") and str(message.get("role")) in SHAREGPT_ROLES:
        message["role"] = SHAREGPT_ROLES[message["role"]]
    role = _checked_role(message, key)
    mark = _pop_mark(message, key)
    if "function_call" in message:  # OpenAI's former form
        message = {"tool_calls": [{"type": "function", "function": message.pop("function_call")}], **message}
    if "tool_calls" in message:
        message["tool_calls"] = read_tool_calls(message["tool_calls"], f"{key}.tool_calls")
    if role == "assistant" and isinstance(message.get("content"), list):
        message = _with_reasoning_content(message, f"{key}.content")
    if "content" in message:
        message["content"] = read_content(message["content"], f"{key}.content", THOUGHTS_HINT)
    elif not message.get("tool_calls"):
        raise _missing_text_error(entry, key, "content")
    return message, mark


def _checked_role(message: Mapping[str, Any], key: str) -> str:
    role = message.get("role")
    if not isinstance(role, str):
        raise UserError(f"{key} has no role. Give it one of {', '.join(ROLES)}")
    if role not in ROLES:
        near = ROLE_HINTS.get(role.lower()) or closest_name(role.lower(), ROLES)
        hint = f"; did you mean {near!r}?" if near else ""
        raise UserError(f"{key}.role is {role!r}, which is no known role{hint}; known are {', '.join(ROLES)}")
    return role


def _missing_text_error(entry: Mapping[str, Any], key: str, name: str) -> UserError:
    """Return the error for a message whose text `name` is null or absent."""
    state = f"{key}.{name} is null" if name in entry else f"{key} has no {name}"
    return UserError(f"{state}. Give it a string, or leave the row out")


def _read_sharegpt_message(message: Mapping[str, Any], key: str) -> dict[str, Any]:
    speaker = message["from"]
    rest = {name: value for name, value in message.items() if name not in ("from", "value")}
    if speaker in CALL_ROLES:
        return {**rest, "role": "assistant", "tool_calls": _read_sharegpt_calls(message["value"], f"{key}.value")}
    if speaker not in SHAREGPT_ROLES:
        known = ", ".join([*SHAREGPT_ROLES, *CALL_ROLES])
        raise UserError(f"{key}.from is {speaker!r}, which is no known speaker; known are {known}")
    return {**rest, "role": SHAREGPT_ROLES[speaker], "content": message["value"]}


def _read_sharegpt_calls(value: Any, key: str) -> list[dict[str, Any]]:
    try:
        calls = loads(value) if isinstance(value, str) else value
    except ValueError as problem:
        raise UserError(f"{key} must be the JSON of a function call ({problem})") from problem
    if not isinstance(calls, list):
        calls = [calls]
    for call in calls:
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            raise UserError(f'{key} must be a function call like {{"name": "...", "arguments": {{...}}}}')
    return [{"type": "function", "function": call} for call in calls]


def _pop_mark(message: dict[str, Any], key: str) -> bool | None:
    """Remove and return the mark of a message: `train: false`, or `weight: 0` as in OpenAI's fine-tuning files."""
    train = message.pop("train", None)
    weight = message.pop("weight", None)
    if train is not None and not isinstance(train, bool):
        raise UserError(f"{key}.train must be true or false, not {train!r}")
    if weight is not None:
        if isinstance(weight, bool) or weight not in (0, 1):
            raise UserError(f"{key}.weight is {weight!r}; only 0 (not trained) and 1 (trained) are known")
        if train is not None and train != bool(weight):
            raise UserError(f"{key}.train and {key}.weight say different things. Keep one of them")
        train = bool(weight)
    if train and message["role"] != "assistant":
        raise UserError(
            f"{key} is a {message['role']} message and asks to be trained, but only assistant messages are. "
            "Remove the mark, or set data.loss_on=all to train on every token"
        )
    return train


def _with_reasoning_content(message: dict[str, Any], key: str) -> dict[str, Any]:
    """Move thoughts at the beginning of a content to `reasoning_content`.

    Mistral and Anthropic write them as parts, `{"type": "thinking", "thinking": ...}`.
    """
    thoughts: list[str] = []
    parts = list(message["content"])
    while parts and isinstance(parts[0], dict) and parts[0].get("type") == "thinking":
        part = parts.pop(0)
        thought = read_content(part.get("thinking"), f"{key}[{len(thoughts)}].thinking")
        thoughts.append(text_of(thought))
    if not thoughts:
        return message
    if "reasoning_content" in message:
        raise UserError(f"{key} has parts of type 'thinking', and so has reasoning_content. Keep one of them")
    message = message | {"content": parts, "reasoning_content": "".join(thoughts)}
    if not parts and message.get("tool_calls"):
        del message["content"]
    return message


def read_tool_calls(value: Any, key: str) -> list[dict[str, Any]]:
    """Read the tool calls of a message.

    Args:
        value: A list of calls, `{"type": "function", "function": {"name": .., "arguments": ..}}`. A call may also be
            the inner object, `{"name": .., "arguments": ..}`.
        key: Position of the list in the row, for messages.

    Returns:
        The calls in OpenAI's form, with objects as arguments.

    Raises:
        UserError: If a call has another form. The error names its position, such as `messages[1].tool_calls[0]`.
    """
    calls = as_list(value, key)
    return [_read_tool_call(call, f"{key}[{index}]") for index, call in enumerate(calls)]


def _read_tool_call(call: Any, key: str) -> dict[str, Any]:
    """Convert one tool call, with an outer object or without, to OpenAI's form. See `read_tool_calls`."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise UserError(f'{key} must be like {{"type": "function", "function": {{"name": "...", "arguments": {{}}}}}}')
    call_items = {name: item for name, item in call.items() if item is not None}
    is_inner_object = function is call
    if is_inner_object:
        arguments_key = f"{key}.arguments"
        outer = {name: item for name, item in call_items.items() if name in CALL_KEYS}
        inner = {name: item for name, item in call_items.items() if name not in CALL_KEYS}
    else:
        arguments_key = f"{key}.function.arguments"
        outer = call_items
        inner = function
    if "type" not in outer:
        outer = {"type": "function", **outer}
    arguments = function.get("arguments")
    misnamed = [name for name in OTHER_ARGUMENT_KEYS if function.get(name)]
    if arguments in (None, "") and misnamed:
        raise UserError(f"{arguments_key} is missing, and the call has {misnamed[0]}: rename that key to arguments")
    return {**outer, "function": {**inner, "arguments": _read_call_arguments(arguments, arguments_key)}}


def _read_call_arguments(value: Any, key: str) -> dict[str, Any]:
    """Return the arguments of a call as an object.

    OpenAI's API and most data sets write them as JSON text. As in vLLM, an empty text and null mean no arguments.
    """
    if isinstance(value, str) and not value.strip():
        return {}
    if isinstance(value, str):
        try:
            value = loads(value)
        except ValueError as problem:
            raise UserError(
                f"{key} is {format_value(value)}, which cannot be read as JSON ({problem}). Give the arguments as an "
                'object, such as {"city": "Oslo"}, or as its JSON text'
            ) from problem
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise UserError(f"{key} must be an object of the arguments by name, or its JSON text, not {json_type(value)}")
    return value


def _read_alpaca(row: Mapping[str, Any]) -> Conversation:
    """Return an Alpaca row as a conversation. `system` and `history` are read, too."""
    reply = {"role": "assistant", "content": read_string(row["output"], "output")}
    messages = with_system([*read_question(row), reply], row.get("system"))
    return Conversation(with_images(row, messages), [None] * len(messages), read_tools(row))


def read_question(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the messages of an Alpaca row without its reply: those of `history`, and the instruction.

    Raises:
        UserError: If `history` is not a list of [question, reply].

    Example:
        >>> row = {"instruction": "And 3 + 3?", "history": [["2 + 2?", "4"]]}
        >>> [message["content"] for message in read_question(row)]
        ['2 + 2?', '4', 'And 3 + 3?']
    """
    messages = []
    for index, pair in enumerate(as_list(row.get("history") or [], "history")):
        if not isinstance(pair, list) or len(pair) != 2:
            raise UserError(f"history[{index}] must be a list of two strings, a question and its reply")
        question, reply = pair
        messages.append({"role": "user", "content": read_string(question, f"history[{index}][0]")})
        messages.append({"role": "assistant", "content": read_string(reply, f"history[{index}][1]")})
    return [*messages, {"role": "user", "content": read_instruction(row)}]


def read_instruction(row: Mapping[str, Any]) -> str:
    """Return the instruction of an Alpaca row, and its input after a blank line if there is one.

    Example:
        >>> read_instruction({"instruction": "Add.", "input": "2 + 2"})
        'Add.\\n\\n2 + 2'
    """
    instruction = read_string(row["instruction"], "instruction")
    context = row.get("input")
    return f"{instruction}\n\n{read_string(context, 'input')}" if context else instruction


def _read_prompt_completion(row: Mapping[str, Any]) -> Conversation | Text:
    prompt, completion = row["prompt"], row["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        return Text(prompt, completion)
    if isinstance(prompt, str) or isinstance(completion, str):
        raise UserError("prompt and completion must both be strings or both be lists of messages")
    question, question_marks = read_messages(prompt, "prompt")
    before = with_system(question, row.get("system"))
    after, after_marks = read_messages(completion, "completion")
    added_marks: list[bool | None] = [None] * (len(before) - len(question))
    train = added_marks + question_marks + after_marks
    return Conversation(with_images(row, before + after), train, read_tools(row), prompt=len(before))


def _read_text(row: Mapping[str, Any]) -> Text:
    return Text("", read_string(row["text"], "text"))


def _read_tokenized(row: Mapping[str, Any]) -> TokenizedRow:
    ids = read_integers(row["input_ids"], "input_ids")
    _refuse_masks(row)
    if any(token < 0 for token in ids):
        raise UserError("input_ids holds a negative id")
    if row.get("labels") is None:
        return TokenizedRow(ids, [True] * len(ids))
    labels = read_integers(row["labels"], "labels")
    if len(labels) != len(ids):
        raise UserError(f"input_ids has {len(ids)} entries and labels {len(labels)}; they must be equally long")
    for index, (token, label) in enumerate(zip(ids, labels, strict=True)):
        if label not in (IGNORE, token):
            raise UserError(
                f"labels[{index}] is {label}, but input_ids[{index}] is {token}: labels must not be shifted, so each "
                f"is the id of its own position, or {IGNORE} where no loss is wanted"
            )
    return TokenizedRow(ids, [label != IGNORE for label in labels])


def _refuse_masks(row: Mapping[str, Any]) -> None:
    """Raise UserError if a tokenized row has a column, such as a mask, that would change what is trained."""
    if row.get("attention_mask") is not None and not all(as_list(row["attention_mask"], "attention_mask")):
        raise UserError("attention_mask has zeros: tokenized rows are used whole; leave the padding out of input_ids")
    if row.get("labels") is not None:
        return
    for name in MASKS:
        if row.get(name) is not None:
            raise UserError(
                f"{name} is not read. Write what is trained into labels: the id of each position, or {IGNORE} where "
                "it is not trained"
            )


def read_integers(value: Any, key: str) -> list[int]:
    """Return a list of whole numbers. Raises UserError with the name `key`."""
    values = as_list(value, key)
    for index, item in enumerate(values):
        if isinstance(item, bool) or not isinstance(item, int):
            raise UserError(f"{key}[{index}] must be a whole number, not {item!r}")
    return values


# How each format is read.
_READERS: dict[str, Callable[[Mapping[str, Any]], Conversation | Text | TokenizedRow]] = {
    "messages": lambda row: _read_chat(row, "messages"),
    "sharegpt": lambda row: _read_chat(row, "conversations"),
    "alpaca": _read_alpaca,
    "prompt_completion": _read_prompt_completion,
    "text": _read_text,
    "tokenized": _read_tokenized,
}
