"""Kinds of data files by their suffix; formats of rows: detection, checks, and one shape per kind of training.

The three shapes: `Conversation` (messages, ShareGPT, Alpaca, prompt and completion as messages), `Text` (a text, or
prompt and completion as strings), and `TokenizedRow` (used as they are). What a pair of a chosen and a rejected
completion says is in pairs.py, what a prompt says in prompts.py. Torch is not imported.
Problems are UserErrors that name the key and the fix; the caller, who knows them, puts file and line in front.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from dtrain.base.errors import UserError
from dtrain.base.json_files import as_list, json_type, loads
from dtrain.base.ranges import closest_name, format_value, plural
from dtrain.data.formats.image_parts import COLUMN, images_in, read_content, text_of, with_images

FILE_KINDS = {
    ".jsonl": "json",
    ".json": "json",
    ".ndjson": "json",
    ".csv": "csv",
    ".parquet": "parquet",
}  # of data files
IGNORE = -100  # a label without loss, as everywhere in the field

# The keys by which a format is known; the first that a row has all of is its format.
FORMATS: dict[str, tuple[str, ...]] = {
    "tokenized": ("input_ids",),
    "messages": ("messages",),
    "sharegpt": ("conversations",),
    "preference": ("chosen", "rejected"),
    "alpaca": ("instruction", "output"),
    "prompt_completion": ("prompt", "completion"),
    "text": ("text",),
}
# The same for methods that train on pairs.
PAIR_FORMATS: dict[str, tuple[str, ...]] = {
    "tokenized": ("prompt_ids", "chosen_ids", "rejected_ids"),
    "preference": ("chosen", "rejected"),
}
# The same for methods that train on what the model answers to prompts.
PROMPT_FORMATS: dict[str, tuple[str, ...]] = {
    "tokenized": ("prompt_ids",),
    "messages": ("messages",),
    "sharegpt": ("conversations",),
    "prompt_completion": ("prompt",),
    "question": ("question",),
    "alpaca": ("instruction",),
}
# The same for methods that train on replies with a label; a pair is two of them.
LABELLED_FORMATS = {name: keys for name, keys in FORMATS.items() if name != "text"}
# What a method trains on -> its formats.
FORMATS_BY_KIND = {"examples": FORMATS, "pairs": PAIR_FORMATS, "prompts": PROMPT_FORMATS, "labelled": LABELLED_FORMATS}
MASKS = ("completion_mask", "assistant_masks", "assistant_mask", "prompt_mask", "loss_mask")  # of tokenized rows
LABELS = ("label", "kto_tag")  # of a row with one reply: whether it is a good one
CHAT_FORMATS = ("messages", "sharegpt", "alpaca")
ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
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
THOUGHTS = "; only an assistant's content begins with thoughts"
CALL_ROLES = ("function_call", "tool_call")
CALL_KEYS = ("type", "id", "index")  # keys of a call next to its function
ARGUMENTS_ELSEWHERE = (
    "parameters",
    "args",
    "input",
    "kwargs",
)  # names for a call's arguments in Llama 3, LangChain, ..
ROLE_HINTS = {"human": "user", "gpt": "assistant", "bot": "assistant", "ai": "assistant", "model": "assistant"}


def file_suffix(file: PurePath) -> str:
    """Return the ending, a key of FILE_KINDS for a file of rows; that before .gz where the two may stand together."""
    suffixes = [suffix.lower() for suffix in file.suffixes]
    is_packed = suffixes[-1:] == [".gz"] and suffixes[-2:-1] not in ([], [".parquet"])
    return ["", *suffixes][-2 if is_packed else -1]


PREFERENCES_REFUSED = (
    "the rows are preferences, pairs of a chosen and a rejected completion: set method=dpo, which trains on them, "
    "or give each row messages, or prompt and completion"
)
"""The refusal of preferences where a method wants single examples."""


@dataclass(frozen=True)
class Conversation:
    """Messages of a conversation; `train[i]` is the row's mark of messages[i]: True, False, or None without one.

    The first `prompt` messages are never trained (0 unless the row has a prompt and a completion).
    """

    messages: list[dict[str, Any]]
    train: list[bool | None]
    tools: list[dict[str, Any]] | None = None
    prompt: int = 0


@dataclass(frozen=True)
class Text:
    """Plain text: a prompt, which is empty where a row has a text alone, and what follows it."""

    prompt: str
    completion: str


@dataclass(frozen=True)
class TokenizedRow:
    """Token ids as the row has them. `trained[t]`: token t is a target."""

    ids: list[int]
    trained: list[bool]


def detect_format(row: Mapping[str, Any], kind: str = "examples") -> str | None:
    """Return the row's format among those of `kind`, or None. Null counts as absent: parquet fills it in."""
    for name, keys in FORMATS_BY_KIND[kind].items():
        if all(row.get(key) is not None for key in keys):
            return name
    return None


def null_keys(row: Mapping[str, Any], kind: str = "examples") -> list[str]:
    """Return the keys that are null in a row without a format, of the first format whose keys the row has."""
    for keys in FORMATS_BY_KIND[kind].values():
        if all(key in row for key in keys):
            return [key for key in keys if row[key] is None]
    return []


def _describe_null(keys: list[str]) -> str:
    verb = "is" if len(keys) == 1 else "are"
    return f"{' and '.join(keys)} {verb} null in this row. Give the row a value there, or leave the row out"


def describe_unknown_format(row: Mapping[str, Any], kind: str = "examples") -> str:
    """Return the message for a row in which `detect` found no format."""
    if keys := null_keys(row, kind):
        return _describe_null(keys)
    if kind == "examples" and detect_format(row, "pairs") is not None:
        return PREFERENCES_REFUSED
    single = detect_format(row, "examples")
    if kind == "pairs" and single is not None:
        labelled = (
            "; method=kto trains on single replies with a label, method=reward on any text with one "
            "(reward.task=classes or numbers)"
        )
        return refuse_single(single, kind) + (labelled if row.get("label") is not None else "")
    if kind == "pairs":
        known = (
            f"preference: chosen, rejected, with prompt or without; tokenized: {', '.join(PAIR_FORMATS['tokenized'])}"
        )
    else:
        known = "; ".join(
            f"{name}: {', '.join(keys)}" for name, keys in FORMATS_BY_KIND[kind].items() if name != "preference"
        )
    return (
        f"no known format has the keys {', '.join(map(str, row)) or '(none)'}. The formats and their keys are: "
        f"{known}. Rename the columns of the file"
        + (
            ", or set method=grpo, which trains on prompts"
            if kind == "examples" and detect_format(row, "prompts")
            else ""
        )
    )


def refuse_single(name: str, kind: str) -> str:
    """Return the refusal of rows of format `name` where a method wants pairs or prompts."""
    if kind == "prompts":
        wanted = "messages, prompt, question, instruction or prompt_ids"
        return f"rows of format {name} hold no prompt to answer; method=grpo needs {wanted}"
    return (
        f"rows of format {name} are single examples, which method=sft trains on; method=dpo, and method=reward with "
        "reward.task=pairs, train on preferences: give each row prompt, chosen and rejected, or "
        f"{', '.join(PAIR_FORMATS['tokenized'])}"
    )


def require_keys(row: Mapping[str, Any], name: str, kind: str = "examples") -> None:
    """Raise UserError for a row that is not of format `name`."""
    missing = [key for key in FORMATS_BY_KIND[kind][name] if row.get(key) is None]
    if missing:
        other = detect_format(row, kind)
        if other is None and all(key in row for key in FORMATS_BY_KIND[kind][name]):
            raise UserError(_describe_null(missing))
        looks = f"it looks like format {other}" if other else describe_unknown_format(row, kind)
        raise UserError(
            f"the source's format is {name}, but this row has no {' and no '.join(missing)}; {looks}. "
            "Rows of different formats belong into different files, each one of data.train.sources"
        )


def refuse_images(row: Mapping[str, Any], what: str) -> None:
    """Raise UserError where a row of `what`, which has no messages, has images."""
    if row.get(COLUMN) and (images := images_in(row)):
        raise UserError(
            f"the row has {len(images)} {plural(len(images), 'image')} in its column {COLUMN}, and images stand in "
            f"messages: {what} take none; give the row messages"
        )


def normalise(row: Mapping[str, Any], name: str) -> Conversation | Text | TokenizedRow:
    """Return `row` of format `name` in its one shape. Raises UserError."""
    if name == "preference":
        raise UserError(PREFERENCES_REFUSED)
    if name not in FORMATS:
        raise UserError(
            f"rows of format {name} have no reply to train on; give each row messages, or instruction and output"
        )
    require_keys(row, name)
    _refuse_bad_reply(row, name)
    sample: Conversation | Text | TokenizedRow = {
        "messages": lambda: _chat(row, "messages"),
        "sharegpt": lambda: _chat(row, "conversations"),
        "alpaca": lambda: _alpaca(row),
        "prompt_completion": lambda: _prompt_completion(row),
        "text": lambda: Text("", read_string(row["text"], "text")),
        "tokenized": lambda: _tokens(row),
    }[name]()
    if not isinstance(sample, Conversation):
        refuse_images(row, {"text": "texts", "tokenized": "token ids"}.get(name, "plain prompts"))
    return sample


def _refuse_bad_reply(row: Mapping[str, Any], name: str) -> None:
    for key in LABELS:
        if name not in ("text", "tokenized") and str(row.get(key)).lower() == "false":
            raise UserError(
                f"{key} is false: rows with a reply and a label (KTO) hold bad replies too, and sft would train them. "
                f"Set method=kto, which learns from both, or keep the rows whose {key} is true; where {key} says "
                "something else, rename this column"
            )


def read_string(value: Any, key: str) -> str:
    """Return `value` if it is a string. Raises UserError, naming `key`, as its neighbours do."""
    if not isinstance(value, str):
        raise UserError(f"{key} must be a string, not {json_type(value)}")
    return value


def read_tools(row: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """Return the row's tools, or None. `functions` is OpenAI's former way to give them."""
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


def _chat(row: Mapping[str, Any], key: str) -> Conversation:
    written, marks = read_messages(row[key], key)
    messages = with_system(written, row.get("system"))
    train = [None] * (len(messages) - len(written)) + marks
    return Conversation(with_images(row, messages), train, read_tools(row))


def with_system(messages: list[dict[str, Any]], system: Any) -> list[dict[str, Any]]:
    """Return `messages`, behind the row's text `system` where it has one and they begin with no system message."""
    if not system or messages[0]["role"] in ("system", "developer"):
        return messages
    return [{"role": "system", "content": read_string(system, "system")}, *messages]


def read_messages(value: Any, key: str) -> tuple[list[dict[str, Any]], list[bool | None]]:
    """Return the messages of a list, and the mark of each: trained, not trained, or None."""
    entries = as_list(value, key)
    if not entries:
        raise UserError(f"{key} is an empty list; give at least one user and one assistant message")
    pairs = [_message(entry, f"{key}[{index}]") for index, entry in enumerate(entries)]
    if any(isinstance(entry, dict) and entry.get("function_call") is not None for entry in entries):
        for message, _ in pairs:  # most templates know an answer of a tool by this role alone
            message["role"] = "tool" if message["role"] == "function" else message["role"]
    return [message for message, _ in pairs], [train for _, train in pairs]


def _message(entry: Any, key: str) -> tuple[dict[str, Any], bool | None]:
    if not isinstance(entry, dict):
        raise UserError(f'{key} must be an object like {{"role": "user", "content": "..."}}, not {json_type(entry)}')
    message = {name: value for name, value in entry.items() if value is not None}
    if "role" not in message and "from" in message:
        if "value" not in message:
            raise _no_text(entry, key, "value")
        message = _sharegpt_message(message, key)
    elif key.startswith("conversations[") and str(message.get("role")) in SHAREGPT_ROLES:
        message["role"] = SHAREGPT_ROLES[message["role"]]
    role = message.get("role")
    if not isinstance(role, str):
        raise UserError(f"{key} has no role; give it one of {', '.join(ROLES)}")
    if role not in ROLES:
        near = ROLE_HINTS.get(role.lower()) or closest_name(role.lower(), ROLES)
        raise UserError(
            f"{key}.role is {role!r}, which is no known role"
            + (f"; did you mean {near!r}?" if near else "")
            + f"; known are {', '.join(ROLES)}"
        )
    train = _train_flag(message, key)
    if "function_call" in message:  # OpenAI's former way
        message = {"tool_calls": [{"type": "function", "function": message.pop("function_call")}], **message}
    if "tool_calls" in message:
        message["tool_calls"] = read_tool_calls(message["tool_calls"], f"{key}.tool_calls")
    if role == "assistant" and isinstance(message.get("content"), list):
        message = _with_thoughts(message, f"{key}.content")
    if "content" in message:
        message["content"] = read_content(message["content"], f"{key}.content", THOUGHTS)
    elif not message.get("tool_calls"):
        raise _no_text(entry, key, "content")
    return message, train


def _no_text(entry: Mapping[str, Any], key: str, name: str) -> UserError:
    """Return the refusal of a message whose text `name` is null, or not there."""
    state = f"{key}.{name} is null" if name in entry else f"{key} has no {name}"
    return UserError(f"{state}; give it a string, or leave the row out")


def _sharegpt_message(message: Mapping[str, Any], key: str) -> dict[str, Any]:
    speaker, rest = message["from"], {name: value for name, value in message.items() if name not in ("from", "value")}
    if speaker in CALL_ROLES:
        return {**rest, "role": "assistant", "tool_calls": _sharegpt_calls(message["value"], f"{key}.value")}
    if speaker not in SHAREGPT_ROLES:
        known = ", ".join([*SHAREGPT_ROLES, *CALL_ROLES])
        raise UserError(f"{key}.from is {speaker!r}, which is no known speaker; known are {known}")
    return {**rest, "role": SHAREGPT_ROLES[speaker], "content": message["value"]}


def _sharegpt_calls(value: Any, key: str) -> list[dict[str, Any]]:
    try:
        calls = loads(value) if isinstance(value, str) else value
    except ValueError as problem:
        raise UserError(f"{key} must be the JSON of a function call ({problem})") from problem
    calls = calls if isinstance(calls, list) else [calls]
    if not all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls):
        raise UserError(f'{key} must be a function call like {{"name": "...", "arguments": {{...}}}}')
    return [{"type": "function", "function": call} for call in calls]


def _train_flag(message: dict[str, Any], key: str) -> bool | None:
    """Pop the mark of a message: `train: false`, or `weight: 0` as OpenAI's fine-tuning files have it."""
    train, weight = message.pop("train", None), message.pop("weight", None)
    if train is not None and not isinstance(train, bool):
        raise UserError(f"{key}.train must be true or false, not {train!r}")
    if weight is not None:
        if isinstance(weight, bool) or weight not in (0, 1):
            raise UserError(f"{key}.weight is {weight!r}; only 0 (not trained) and 1 (trained) are known")
        if train is not None and train != bool(weight):
            raise UserError(f"{key}.train and {key}.weight say different things; keep one of them")
        train = bool(weight)
    if train and message["role"] != "assistant":
        raise UserError(
            f"{key} is a {message['role']} message and asks to be trained; only assistant messages are. "
            "Take the mark away, or set data.loss_on=all to train on every token"
        )
    return train


def _with_thoughts(message: dict[str, Any], key: str) -> dict[str, Any]:
    """Return a message whose content begins with parts of type thinking, as Mistral and Anthropic write them, with
    `reasoning_content` in their place."""
    thoughts: list[str] = []
    parts = list(message["content"])
    while parts and isinstance(parts[0], dict) and parts[0].get("type") == "thinking":
        thought = read_content(parts.pop(0).get("thinking"), f"{key}[{len(thoughts)}].thinking")
        thoughts.append(text_of(thought))
    if not thoughts:
        return message
    if "reasoning_content" in message:
        raise UserError(f"{key} has parts of type 'thinking', and so has reasoning_content; keep one of them")
    message = message | {"content": parts, "reasoning_content": "".join(thoughts)}
    if not parts and message.get("tool_calls"):
        del message["content"]
    return message


def read_tool_calls(value: Any, key: str) -> list[dict[str, Any]]:
    """Read the tool calls of a message.

    Args:
        value: A list of calls, `{"type": "function", "function": {"name": .., "arguments": ..}}`. A call may also be
            the inner object, `{"name": .., "arguments": ..}`.
        key: The place of the list in the row, for messages.

    Returns:
        The calls in OpenAI's form, with objects as arguments.

    Raises:
        UserError: If a call has another form. The message contains its place, such as `messages[1].tool_calls[0]`.
    """
    calls = as_list(value, key)
    return [_tool_call(call, f"{key}[{index}]") for index, call in enumerate(calls)]


def _tool_call(call: Any, key: str) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise UserError(f'{key} must be like {{"type": "function", "function": {{"name": "...", "arguments": {{}}}}}}')
    given = {name: item for name, item in call.items() if item is not None}
    is_inner_object = function is call
    if is_inner_object:
        arguments_key = f"{key}.arguments"
        outer = {name: item for name, item in given.items() if name in CALL_KEYS}
        inner = {name: item for name, item in given.items() if name not in CALL_KEYS}
    else:
        arguments_key = f"{key}.function.arguments"
        outer = given
        inner = function
    if "type" not in outer:
        outer = {"type": "function", **outer}
    arguments = function.get("arguments")
    misnamed = [name for name in ARGUMENTS_ELSEWHERE if function.get(name)]
    if arguments in (None, "") and misnamed:
        raise UserError(f"{arguments_key} is missing, and the call has {misnamed[0]}: rename that key to arguments")
    return {**outer, "function": {**inner, "arguments": _call_arguments(arguments, arguments_key)}}


def _call_arguments(value: Any, key: str) -> dict[str, Any]:
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


def _alpaca(row: Mapping[str, Any]) -> Conversation:
    """Return Alpaca's row as a conversation; `system` and `history`, a list of [question, reply], are read too."""
    reply = {"role": "assistant", "content": read_string(row["output"], "output")}
    messages = with_system([*read_question(row), reply], row.get("system"))
    return Conversation(with_images(row, messages), [None] * len(messages), read_tools(row))


def read_question(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the messages of history, and the user's with the instruction."""
    messages = []
    for index, pair in enumerate(as_list(row.get("history") or [], "history")):
        if not isinstance(pair, list) or len(pair) != 2:
            raise UserError(f"history[{index}] must be a list of two strings, a question and its reply")
        messages.append({"role": "user", "content": read_string(pair[0], f"history[{index}][0]")})
        messages.append({"role": "assistant", "content": read_string(pair[1], f"history[{index}][1]")})
    return [*messages, {"role": "user", "content": read_instruction(row)}]


def read_instruction(row: Mapping[str, Any]) -> str:
    """Return instruction, and behind a blank line input, where there is one."""
    instruction, context = read_string(row["instruction"], "instruction"), row.get("input")
    return f"{instruction}\n\n{read_string(context, 'input')}" if context else instruction


def _prompt_completion(row: Mapping[str, Any]) -> Conversation | Text:
    prompt, completion = row["prompt"], row["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        return Text(prompt, completion)
    if isinstance(prompt, str) or isinstance(completion, str):
        raise UserError("prompt and completion must both be strings or both be lists of messages")
    question, question_marks = read_messages(prompt, "prompt")
    before = with_system(question, row.get("system"))
    after, after_marks = read_messages(completion, "completion")
    train = [None] * (len(before) - len(question)) + question_marks + after_marks
    return Conversation(with_images(row, before + after), train, read_tools(row), prompt=len(before))


def _tokens(row: Mapping[str, Any]) -> TokenizedRow:
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
    """Raise UserError for another column of tokenized rows, such as a mask, that would change the numbers."""
    if row.get("attention_mask") is not None and not all(as_list(row["attention_mask"], "attention_mask")):
        raise UserError("attention_mask has zeros: tokenized rows are used whole; leave the padding out of input_ids")
    for name in MASKS:
        if row.get(name) is not None and row.get("labels") is None:
            raise UserError(
                f"{name} is not read: say what is trained in labels, the id of each position or {IGNORE} where "
                "it is not trained"
            )


def read_integers(value: Any, key: str) -> list[int]:
    """Return `value` as a list of whole numbers."""
    values = as_list(value, key)
    for index, item in enumerate(values):
        if isinstance(item, bool) or not isinstance(item, int):
            raise UserError(f"{key}[{index}] must be a whole number, not {item!r}")
    return values
