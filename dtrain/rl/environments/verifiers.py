"""Environments and tasks of the library `verifiers`, by name, as environments of dtrain.

Release 0.4 and later has tasksets: one completion for each task, scored by the task's rewards. That release plays a
task with a harness, a program that asks for its completions over HTTP. Here the engine samples the completion and the
task scores it, so a taskset that needs tools, several agents or a machine of its own is refused.

Earlier releases have environments. The main thread of the environments' process runs all rollouts; a rollout that asks
its client for a completion waits for the next step. `python -m dtrain.rl.environments.verifiers NAME` writes its
prompts.
"""

import argparse
import asyncio
import inspect
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from functools import partial
from queue import SimpleQueue
from typing import Any

from dtrain.base.errors import UserError
from dtrain.data.text.call_form import with_text_arguments
from dtrain.data.text.tool_calls import read_calls
from dtrain.rl.rewards.catalog import find_verifiers
from dtrain.rl.worker import shown

ENVIRONMENT_COLUMN = "verifiers"  # the column that says of which environment a row is
ROW_COLUMN = "row"  # the column of what the environment's own data set says

Message = dict[str, Any]
CALL_OPENINGS = ("<tool_call>", "<|python_tag|>", "[TOOL_CALLS]")  # what is before the first of them is a turn's text


class Tasks:
    """Maker of environments, each a task with one completion.

    Args:
        name: The taskset's name.
        args: Values of its config.
        specials: Texts of the special tokens, which a completion may have in it and a message has not.

    Raises:
        UserError: As `load_tasks`.
    """

    def __init__(self, name: str, args: Mapping[str, Any], specials: Sequence[str]):
        self._made = {"name": name, "args": dict(args)}
        self._tasks = {task.key: task for task in load_tasks(name, args)}
        self._specials = specials
        self._loop = asyncio.new_event_loop()

    def main(self) -> None:
        """Run the scoring, for ever: in the process's main thread, where math-verify may set its alarms."""
        self._loop.run_forever()

    def __call__(self, row: Mapping[str, Any], seed: int) -> "ScoredTask":
        columns = row["columns"]
        task = None
        if columns.get(ENVIRONMENT_COLUMN) == self._made:
            task = self._tasks.get(columns[ROW_COLUMN]["key"])
        if task is None:
            raise UserError(
                f"the data's row is no task of {json.dumps(self._made)}: write the data anew: "
                f"python -m dtrain.rl.environments.verifiers {self._made['name']} "
                f"'{json.dumps(self._made['args'])}' > FILE"
            )
        return ScoredTask(task, self._specials, self._loop)


class ScoredTask:
    """Environment of one completion, which the task scores. metrics: the task's rewards and metrics."""

    def __init__(self, task: Any, specials: Sequence[str], loop: asyncio.AbstractEventLoop):
        self.done = False
        self.metrics: dict[str, float] = {}
        self._task, self._specials, self._loop = task, specials, loop

    def step(self, completion: str) -> float:
        import verifiers.v1 as vf

        for special in self._specials:
            completion = completion.replace(special, "")
        messages = [*_task_prompt(self._task), vf.AssistantMessage(content=completion)]
        nodes = []
        for place, message in enumerate(messages):
            is_completion = place == len(messages) - 1
            nodes.append(vf.MessageNode(parent=place - 1 if place else None, message=message, sampled=is_completion))
        task = self._task
        trace = vf.Trace(
            task=vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash),
            agent=vf.AgentInfo(config=vf.AgentConfig()),
            nodes=nodes,
            is_completed=True,
            ok=True,
        )
        asyncio.run_coroutine_threadsafe(task.score(trace), self._loop).result()
        self.done = True
        rewards = {name: reward.score for name, reward in trace.rewards.items() if reward is not None}
        metrics = {name: value for name, value in trace.metrics.items() if value is not None}
        self.metrics = rewards | metrics
        return trace.reward


def load_tasks(name: str, args: Mapping[str, Any]) -> list[Any]:
    """Return the tasks of a taskset.

    Raises:
        UserError: If it is not installed or cannot be loaded, is empty or endless, or needs more than a completion.
    """
    find_verifiers(name)
    import verifiers.v1 as vf

    try:
        taskset = vf.load_taskset(vf.taskset_config_type(name).model_validate({**args, "id": name}))
        has_other_agents = vf.environment_class(name) is not vf.SingleAgentEnv
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise UserError(f"grpo.verifiers: {error}; grpo.verifiers.args are {json.dumps(dict(args))}") from None
    problem = None
    if has_other_agents:
        problem = "is played by an environment of its own"
    elif not taskset.bounded:
        problem = "has no last task"
    elif taskset.toolsets(taskset.config):
        problem = "offers tools"
    tasks = [] if problem else list(taskset)
    one_of_each_class = {type(task): task for task in tasks}
    for task_class, task in one_of_each_class.items():
        if task_class.toolsets(task.config):
            problem = "offers tools"
        elif task_class.setup is not vf.Task.setup or task_class.finalize is not vf.Task.finalize:
            problem = "prepares a machine for each task"
        elif _needs_runtime(task):
            problem = "scores with a machine for each task"
    if problem is not None:
        raise UserError(f"grpo.verifiers: {name} {problem}, and dtrain plays tasks of one completion; write it as "
                        "grpo.environment and grpo.rewards")  # fmt: skip
    if not tasks:
        raise UserError(f"{name}: its data set is empty")
    return tasks


def task_rows(name: str, args: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a row for each task: its prompt and its key.

    Raises:
        UserError: As `load_tasks`, and for a prompt that is missing or not text.
    """
    rows = []
    for task in load_tasks(name, args):
        prompt = [{"role": message.role, "content": message.content} for message in _task_prompt(task)]
        are_texts = all(isinstance(message["content"], str) for message in prompt)
        if not are_texts or not any(message["role"] == "user" for message in prompt):
            raise UserError(f"{name}: task {task.data.idx} has no prompt of text")
        rows.append(
            {"prompt": prompt, ENVIRONMENT_COLUMN: {"name": name, "args": dict(args)}, ROW_COLUMN: {"key": task.key}}
        )
    return rows


def _task_prompt(task: Any) -> list[Any]:
    import verifiers.v1 as vf

    messages = []
    if task.data.system_prompt:
        messages.append(vf.SystemMessage(content=task.data.system_prompt))
    prompt = task.data.prompt
    if isinstance(prompt, str):
        prompt = [vf.UserMessage(content=prompt)]
    return [*messages, *(prompt or [])]


def _needs_runtime(task: Any) -> bool:
    """Return whether a reward, metric or judge of a task needs the machine that a harness ran on."""
    judges = [judge.score for judge in task.plugged_judges()]
    for signal in (*task.hooks("metric"), *task.hooks("reward"), *judges):
        runtime = inspect.signature(signal).parameters.get("runtime")
        if runtime is not None and runtime.default is inspect.Parameter.empty:
            return True
    return False


def load_legacy_environment(name: str, args: Mapping[str, Any]) -> Any:
    """Return `vf.load_environment(name, **args)`. Raises UserError where it is not installed, cannot be loaded, or
    is of a kind whose rollouts cannot be stepped one by one."""
    find_verifiers(name)
    import verifiers as vf

    try:
        environment = vf.load_environment(name, **args)
    except (RuntimeError, ValueError, TypeError) as error:
        cause = f" ({error.__cause__})" if error.__cause__ and str(error.__cause__) not in str(error) else ""
        raise UserError(f"grpo.verifiers: {error}{cause}; grpo.verifiers.args are {json.dumps(dict(args))}") from None
    problem = None
    if getattr(environment, "message_type", "chat") != "chat":
        problem = "continues plain texts, and dtrain plays conversations with it"
    elif environment.rubric.has_group_rewards:
        problem = "rewards all completions of a group together, and dtrain asks it for each by itself"
    if problem is not None:
        raise UserError(f"grpo.verifiers: {name} {problem}; write it as grpo.environment and grpo.rewards")
    return environment


def has_tasksets() -> bool:
    """Return whether the installed release is 0.4 or later, whose environments are tasksets."""
    import verifiers as vf

    return not hasattr(vf, "load_environment")


def open_library(name: str, args: Mapping[str, Any], specials: Sequence[str]) -> "Library | Tasks":
    """Return the maker of the environments of `grpo.verifiers`.

    Raises UserError as `load_legacy_environment` and `load_tasks`.
    """
    find_verifiers(name)
    return Tasks(name, args, specials) if has_tasksets() else Library(name, args, specials)


class Library:
    """Maker of environments, each a rollout of the library, one for each completion.

    specials: texts of the special tokens, which a completion may have in it and a message has not.
    """

    def __init__(self, name: str, args: Mapping[str, Any], specials: Sequence[str]):
        self.made: dict[str, Any] = {"name": name, "args": dict(args)}
        self._environment = load_legacy_environment(name, args)
        self._specials = specials
        self._loop = asyncio.new_event_loop()

    def main(self) -> None:
        """Run the rollouts, for ever: in the process's main thread, since rewards of math-verify set alarms, which no
        other thread may, and the library takes what they raise there for 0."""
        self._loop.run_forever()

    def __call__(self, row: Mapping[str, Any], seed: int) -> "Played":
        columns = row["columns"]
        if columns.get(ENVIRONMENT_COLUMN) != self.made:
            origin = (
                json.dumps(columns[ENVIRONMENT_COLUMN])
                if ENVIRONMENT_COLUMN in columns
                else "no environment of verifiers"
            )
            arguments = f" '{json.dumps(self.made['args'])}'" if self.made["args"] else ""
            raise UserError(
                f"the data's row is of {origin}, and the run of {json.dumps(self.made)}: write the data anew: "
                f"python -m dtrain.rl.environments.verifiers {self.made['name']}{arguments} > FILE"
            )
        talk = _Talk(self._loop)
        prompt = [with_text_arguments(message) for message in row["prompt"]]  # as the library's own client has them
        inputs = {**columns[ROW_COLUMN], "prompt": prompt}
        rollout = self._environment.run_rollout(inputs, _client(talk), "dtrain", {})
        talk.run(rollout)
        read = partial(_message, specials=self._specials, calls=columns.get("calls"), tools=columns.get("tools") or [])
        return Played(talk, prompt, columns.get("tools") or [], read)


class Played:
    """Environment of one completion: a rollout that waits for it. earned: what the rubric gives where the rollout is
    over, with its parts, the `metrics`."""

    def __init__(
        self,
        talk: "_Talk",
        prompt: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        read: Callable[[str, int], Message],
    ):
        self.done, self.metrics = False, dict[str, float]()
        self._talk, self._tools, self._read = talk, tools, read
        self._messages: list[Message] = [*prompt]
        self._count = 0  # calls so far
        if talk.hear() is None:
            self._earned()
            raise UserError("its rollout ended before it asked for a completion")
        self._check(talk.messages, talk.tools, len(self._messages))

    def __del__(self) -> None:
        self._talk.task.cancel()

    def step(self, completion: str) -> float | None:
        reply = self._read(completion, self._count)
        self._count += len(reply.get("tool_calls", []))
        self._messages.append(reply)
        self._talk.say(reply)
        if self._talk.hear() is not None:
            return None
        self.done = True
        return self._earned()

    def observe(self) -> list[Message]:
        """Return the messages behind the reply. Raises UserError where those before are no longer what they were."""
        begin = len(self._messages)
        self._check(self._talk.messages, self._talk.tools, begin)
        new = [_comparable_message(message) for message in self._talk.messages[begin:]]
        if not new:
            raise UserError("it asks again and said nothing, and a turn needs a message before it")
        names = {call["id"]: call["function"]["name"] for call in self._messages[-1].get("tool_calls", [])}
        for message in new:
            if not isinstance(message.setdefault("content", ""), str):
                raise UserError(f"it said {shown(message)}; messages of text alone can be trained on")
            if message["role"] == "assistant":
                raise UserError("it speaks for the model, and what the model did not draw is not trained as its own")
            if message["role"] == "tool":
                message["name"] = names.get(message.get("tool_call_id"), "unread")
        self._messages += new
        return new

    def end(self) -> float | None:
        """End the rollout as it ends where a prompt is too long: there is no room for another turn."""
        import verifiers as vf

        self._talk.fail(vf.OverlongPromptError("there is no room for another turn"))
        if self._talk.hear() is not None:
            raise UserError("it asks again where there is no room for another turn")
        return self._earned()

    def _earned(self) -> float | None:
        """Return the reward of the rollout. Raises whatever it raised."""
        result = self._talk.task.result()
        if result.get("error"):
            raise RuntimeError(f"the rollout failed: {result['error']}")
        metrics = result.get("metrics") or {}
        numbers = {name: value for name, value in metrics.items() if isinstance(value, int | float)}
        self.metrics = {name: float(value) for name, value in numbers.items() if math.isfinite(value)}
        return result["reward"]

    def _check(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], count: int) -> None:
        """Check that the messages begin as the tokens do that were read and drawn. Raises UserError."""
        if [_comparable_message(message) for message in messages[:count]] != [
            _comparable_message(message) for message in self._messages
        ]:
            raise UserError("it asks with other messages than were read and drawn before, and dtrain trains on one "
                            "conversation that only grows")  # fmt: skip
        if [_comparable_tool(tool) for tool in tools] != [_comparable_tool(tool) for tool in self._tools]:
            raise UserError("it offers other tools than the prompt tells of, which dtrain cannot follow; write the "
                            "data anew if the environment has changed")  # fmt: skip


class _Talk:
    """Channel between a rollout, in its loop, and the thread that steps it."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self._loop = loop
        self._heard: SimpleQueue[tuple[Any, ...] | None] = SimpleQueue()

    def run(self, rollout: Any) -> None:
        self.task = asyncio.run_coroutine_threadsafe(rollout, self._loop)
        self.task.add_done_callback(lambda _: self._heard.put(None))

    async def ask(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> Any:
        """Return the completion that follows, `openai.types.chat.ChatCompletion`."""
        answer: asyncio.Future[Any] = self._loop.create_future()
        self._heard.put((messages, tools, answer))
        return await answer

    def hear(self) -> tuple[Any, ...] | None:
        """Return what the rollout asks next; None where it is over. It waits for ever: the caller is given up."""
        heard = self._heard.get()
        if heard is not None:
            self.messages, self.tools, self._answer = heard
        return heard

    def say(self, reply: Message) -> None:
        from openai.types.chat import ChatCompletion

        finish = "tool_calls" if reply.get("tool_calls") else "stop"
        choice = {"index": 0, "finish_reason": finish, "message": reply}
        whole = {"id": "dtrain", "object": "chat.completion", "created": 0, "model": "dtrain", "choices": [choice]}
        self._loop.call_soon_threadsafe(self._answer.set_result, ChatCompletion.model_validate(whole))

    def fail(self, error: Exception) -> None:
        self._loop.call_soon_threadsafe(self._answer.set_exception, error)


def _client(talk: _Talk) -> Any:
    from verifiers.clients import OpenAIChatCompletionsClient

    class Client(OpenAIChatCompletionsClient):
        """Client whose completions a step brings."""

        async def get_native_response(self, prompt: Any, model: str, sampling_args: Any, tools: Any = None, **_: Any):
            return await talk.ask(prompt, tools or [])

        async def raise_from_native_response(self, response: Any) -> None:
            """Raise nothing: an empty completion is judged as any other."""

    return Client(None)


def _message(text: str, count: int, *, specials: Sequence[str], calls: Sequence[Any] | None, tools: Any) -> Message:
    """Return a completion as a server's answer. calls: the form of calls, and whether there is one a turn at most.
    count: of the calls before. Calls that cannot be read are text."""
    read = []
    if tools and calls is not None:
        form, is_single = calls
        parameters = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}
        read = read_calls(form, text, parameters)[: 1 if is_single else None]
    if any(call.problem for call in read):
        read = []
    if read:
        begin = min((text.find(opening) for opening in CALL_OPENINGS if opening in text), default=0)
        text = text[:begin].rstrip()
    for special in specials:
        text = text.replace(special, "")
    written = [
        {
            "type": "function",
            "id": f"call{count + number:05}",
            "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
        }
        for number, call in enumerate(read)
    ]
    return {"role": "assistant", "content": text, **({"tool_calls": written} if written else {})}


def _comparable_message(message: Mapping[str, Any]) -> Message:
    """Return a message as others are compared with it: parts of text are one text, what is empty is left out."""
    plain = {key: value for key, value in message.items() if key != "name" and value not in (None, "", [])}
    parts = plain.get("content")
    if isinstance(parts, list) and all(isinstance(part, Mapping) and part.get("type") == "text" for part in parts):
        plain["content"] = "".join(part["text"] for part in parts)
    if "tool_calls" in plain:
        plain["tool_calls"] = [_comparable_call(call) for call in plain["tool_calls"]]
    return plain


def _comparable_call(call: Any) -> Any:
    """Return a call's id, name and arguments, from a conversation that was read from a file, or from a client's."""
    call = json.loads(call) if isinstance(call, str) else call
    function = call.get("function", call)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with suppress(ValueError):  # what is not JSON is compared as text
            arguments = json.loads(arguments or "{}")
    return [call.get("id"), function.get("name"), arguments]


def _comparable_tool(tool: Mapping[str, Any]) -> list[Any]:
    function = tool["function"]
    return [function[key] for key in ("name", "description", "parameters")]


def environment_rows(
    environment: Any, name: str, args: Mapping[str, Any], is_eval: bool = False
) -> list[dict[str, Any]]:
    """Return rows of prompts of its data set, with what its rubric reads. Raises UserError for a data set that is
    empty, or holds what JSON does not."""
    try:
        dataset = environment.get_eval_dataset() if is_eval else environment.get_dataset()
    except ValueError as error:
        raise UserError(f"{name}: {error}") from None
    rows = []
    for record in dataset:
        info = record.get("info") or {}
        info = json.loads(info) if isinstance(info, str) else info
        defined = info.get("tool_defs", environment.tool_defs) or []
        messages = map(_mapping, record["prompt"])
        prompt = [{key: value for key, value in message.items() if value is not None} for message in messages]
        row: dict[str, Any] = {"prompt": prompt, ENVIRONMENT_COLUMN: {"name": name, "args": dict(args)}}
        row |= {"answer": record["answer"]} if isinstance(record.get("answer"), str) else {}
        row |= {"tools": [_openai_tool(_mapping(tool)) for tool in defined]} if defined else {}
        rows.append(row | {ROW_COLUMN: {key: value for key, value in record.items() if key != "prompt"}})
    if not rows:
        raise UserError(f"{name}: its data set is empty")
    try:
        json.dumps(rows)
    except TypeError as error:
        raise UserError(f"{name}: a column of its data set is no JSON: {error}") from None
    return rows


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else value.model_dump()


def _openai_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a definition in OpenAI's function format."""
    function = tool.get("function", tool)
    about = {key: function[key] for key in ("name", "description", "parameters")}
    return {"type": "function", "function": about}


def main() -> None:
    """Writes an environment's prompts, as `data.train.path` reads them."""
    parser = argparse.ArgumentParser("python -m dtrain.rl.environments.verifiers", description=main.__doc__)
    parser.add_argument("name", help="grpo.verifiers.name")
    parser.add_argument("args", nargs="?", type=json.loads, default={}, help="grpo.verifiers.args, as JSON")
    parser.add_argument("--eval", action="store_true", help="those of its data set for evaluation")
    options = parser.parse_args()
    if "" not in sys.path:
        sys.path.append("")
    try:
        with redirect_stdout(sys.stderr):  # what the environment prints is no row
            find_verifiers(options.name)
            if has_tasksets():
                if options.eval:
                    raise UserError("--eval: a taskset has one data set; choose another by its args")
                rows = task_rows(options.name, options.args)
            else:
                rows = environment_rows(
                    load_legacy_environment(options.name, options.args), options.name, options.args, options.eval
                )
    except UserError as error:
        raise SystemExit(f"dtrain: {error}") from None
    for row in rows:
        print(json.dumps(row, ensure_ascii=False))


if __name__ == "__main__":
    main()
