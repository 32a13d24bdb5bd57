"""Environments and tasks of the library `verifiers`, by name, as environments of dtrain.

Release 0.4 and later has tasksets (`TaskMaker`): one completion for each task, scored by the task's rewards. There, a
program (a harness) plays a task and requests its completions over HTTP. Here, the engine samples the completion and the
task scores it, so tasksets that need tools, several agents or a machine of their own are refused.

Earlier releases have environments with rollouts (`RolloutMaker`). The library expects to call a client for each
completion, while dtrain samples first and then steps the environment. So a rollout runs as a coroutine in the main
thread, and its client waits there for the next step:

    thread of the step                       coroutine of the rollout, in the main thread
    RolloutEnvironment.step(completion)  ->  `_Channel.request` returns the completion, the rollout continues
    waits in `_Channel.wait_for_request` <-  it requests the next completion, or ends
    returns the reward, or None

`python -m dtrain.rl.environments.verifiers NAME` writes the prompts of an environment or taskset.
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
from typing import Any, NamedTuple

from dtrain.base.errors import UserError
from dtrain.data.text.call_form import with_text_arguments
from dtrain.data.text.tool_calls import read_calls
from dtrain.rl.rewards.catalog import find_verifiers
from dtrain.rl.worker import shown

ENVIRONMENT_COLUMN = "verifiers"  # the column with the name and arguments of a row's environment
ROW_COLUMN = "row"  # the column with the row of the environment's own data set

Message = dict[str, Any]
CALL_OPENINGS = ("<tool_call>", "<|python_tag|>", "[TOOL_CALLS]")
"""Texts that begin tool calls. The text of a turn ends before the first of them."""


class TaskMaker:
    """Maker of environments, each a task with one completion.

    Args:
        name: The taskset's name.
        args: Values of its config.
        specials: Texts of the special tokens. They are removed from completions.

    Raises:
        UserError: As `load_tasks`.
    """

    def __init__(self, name: str, args: Mapping[str, Any], specials: Sequence[str]):
        self._made = {"name": name, "args": dict(args)}
        self._tasks = {task.key: task for task in load_tasks(name, args)}
        self._specials = specials
        self._loop = asyncio.new_event_loop()

    def main(self) -> None:
        """Run the event loop of the scoring. The main thread calls this, because math-verify sets alarms."""
        self._loop.run_forever()

    def __call__(self, row: Mapping[str, Any], seed: int) -> "ScoredTask":
        columns = row["columns"]
        task = None
        if columns.get(ENVIRONMENT_COLUMN) == self._made:
            task = self._tasks.get(columns[ROW_COLUMN]["key"])
        if task is None:
            raise UserError(f"the data's row is not a task of {json.dumps(self._made)}. {_write_command(self._made)}")
        return ScoredTask(task, self._specials, self._loop)


class ScoredTask:
    """Environment of one completion, which the task scores.

    Attributes:
        done: Whether the completion was scored.
        metrics: The task's rewards and metrics.
    """

    def __init__(self, task: Any, specials: Sequence[str], loop: asyncio.AbstractEventLoop):
        self.done = False
        self.metrics: dict[str, float] = {}
        self._task, self._specials, self._loop = task, specials, loop

    def step(self, completion: str) -> float:
        """Score the completion by the task's rewards, and return their total. The episode is then done."""
        import verifiers.v1 as vf

        for special in self._specials:
            completion = completion.replace(special, "")
        messages = [*_task_prompt(self._task), vf.AssistantMessage(content=completion)]
        nodes = []
        for index, message in enumerate(messages):
            parent = index - 1 if index > 0 else None
            is_completion = index == len(messages) - 1
            nodes.append(vf.MessageNode(parent=parent, message=message, sampled=is_completion))
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
        has_own_environment = vf.environment_class(name) is not vf.SingleAgentEnv
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise UserError(f"grpo.verifiers: {error} (grpo.verifiers.args={json.dumps(dict(args))})") from None
    if has_own_environment:
        raise _unsupported_taskset(name, "has an environment of its own")
    if not taskset.bounded:
        raise _unsupported_taskset(name, "has endlessly many tasks")
    if taskset.toolsets(taskset.config):
        raise _unsupported_taskset(name, "has tools")
    tasks = list(taskset)
    if not tasks:
        raise UserError(f"grpo.verifiers: {name} has no tasks")
    one_of_each_class = {type(task): task for task in tasks}
    for task in one_of_each_class.values():
        problem = _task_problem(task)
        if problem is not None:
            raise _unsupported_taskset(name, problem)
    return tasks


def _task_problem(task: Any) -> str | None:
    """Return the obstacle to scoring a task from one completion. None without one."""
    import verifiers.v1 as vf

    task_class = type(task)
    if task_class.toolsets(task.config):
        return "has tools"
    if task_class.setup is not vf.Task.setup or task_class.finalize is not vf.Task.finalize:
        return "prepares a machine for each task"
    if _needs_runtime(task):
        return "needs a machine to score each task"
    return None


def _unsupported_taskset(name: str, problem: str) -> UserError:
    return UserError(
        f"grpo.verifiers: {name} {problem}, but dtrain supports only tasks that are scored from one completion. "
        "Write it as grpo.environment and grpo.rewards"
    )


def _write_command(made: Mapping[str, Any]) -> str:
    """Return the advice to write the data again. `made` has the name and arguments of the environment."""
    command = f"python -m dtrain.rl.environments.verifiers {made['name']}"
    if made["args"]:
        command += f" '{json.dumps(made['args'])}'"
    return f"Write the data again: {command} > FILE"


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
            raise UserError(f"grpo.verifiers: the prompt of task {task.data.idx} of {name} is missing or is not text")
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
    """Return the environment of a release before 0.4, `vf.load_environment(name, **args)`.

    Raises:
        UserError: If it is not installed, cannot be loaded, or its rollouts cannot be stepped one by one.
    """
    find_verifiers(name)
    import verifiers as vf

    try:
        environment = vf.load_environment(name, **args)
    except (RuntimeError, ValueError, TypeError) as error:
        cause = ""
        if error.__cause__ and str(error.__cause__) not in str(error):
            cause = f" ({error.__cause__})"
        raise UserError(f"grpo.verifiers: {error}{cause} (grpo.verifiers.args={json.dumps(dict(args))})") from None
    problem = None
    if getattr(environment, "message_type", "chat") != "chat":
        problem = "continues plain texts, but dtrain supports only conversations"
    elif environment.rubric.has_group_rewards:
        problem = "rewards all completions of a group together, but dtrain supports only rewards of single completions"
    if problem is not None:
        raise UserError(f"grpo.verifiers: {name} {problem}. Write it as grpo.environment and grpo.rewards")
    return environment


def has_tasksets() -> bool:
    """Return whether the installed release is 0.4 or later, whose environments are tasksets."""
    import verifiers as vf

    return not hasattr(vf, "load_environment")


def open_library(name: str, args: Mapping[str, Any], specials: Sequence[str]) -> "RolloutMaker | TaskMaker":
    """Return the maker of the environments of `grpo.verifiers`.

    Raises:
        UserError: As `load_legacy_environment` and `load_tasks`.
    """
    find_verifiers(name)
    return TaskMaker(name, args, specials) if has_tasksets() else RolloutMaker(name, args, specials)


class RolloutMaker:
    """Maker of environments, each a rollout of the library for one completion.

    Args:
        name: The environment's name.
        args: Its arguments.
        specials: Texts of the special tokens. They are removed from completions.

    Raises:
        UserError: As `load_legacy_environment`.
    """

    def __init__(self, name: str, args: Mapping[str, Any], specials: Sequence[str]):
        self.made: dict[str, Any] = {"name": name, "args": dict(args)}
        self._environment = load_legacy_environment(name, args)
        self._specials = specials
        self._loop = asyncio.new_event_loop()

    def main(self) -> None:
        """Run the event loop of the rollouts. The main thread calls this.

        Rewards of math-verify set alarms, which only the main thread may do. The library counts their errors in another
        thread as a reward of 0.
        """
        self._loop.run_forever()

    def __call__(self, row: Mapping[str, Any], seed: int) -> "RolloutEnvironment":
        columns = row["columns"]
        if columns.get(ENVIRONMENT_COLUMN) != self.made:
            origin = "no environment of verifiers"
            if ENVIRONMENT_COLUMN in columns:
                origin = json.dumps(columns[ENVIRONMENT_COLUMN])
            raise UserError(
                f"the data's row belongs to {origin}, but grpo.verifiers is {json.dumps(self.made)}. "
                f"{_write_command(self.made)}"
            )
        channel = _Channel(self._loop)
        # The library's own client has the arguments of tool calls as text.
        prompt = [with_text_arguments(message) for message in row["prompt"]]
        inputs = {**columns[ROW_COLUMN], "prompt": prompt}
        rollout = self._environment.run_rollout(inputs, _client(channel), "dtrain", {})
        channel.run(rollout)
        tools = columns.get("tools") or []
        to_reply = partial(_reply_message, specials=self._specials, calls=columns.get("calls"), tools=tools)
        return RolloutEnvironment(channel, prompt, tools, to_reply)


class RolloutEnvironment:
    """Environment of one completion: a rollout that waits for the completion's turns.

    Args:
        channel: The rollout.
        prompt: The messages that were encoded as the prompt.
        tools: The tools that the prompt describes.
        to_reply: Makes a message of a turn's text and the number of calls before it.

    Attributes:
        done: Whether the rollout has ended.
        metrics: The metrics of the rubric, after the end.

    Raises:
        UserError: If the rollout ends at once, or requests a completion of another prompt.
    """

    def __init__(
        self,
        channel: "_Channel",
        prompt: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        to_reply: Callable[[str, int], Message],
    ):
        self.done, self.metrics = False, dict[str, float]()
        self._channel, self._tools, self._to_reply = channel, tools, to_reply
        self._messages: list[Message] = [*prompt]  # of the conversation so far
        self._num_calls = 0  # tool calls so far
        request = channel.wait_for_request()
        if request is None:
            self._read_reward()  # raises the error of the rollout, if there was one
            raise UserError("the rollout ended before it requested a completion")
        self._check(request, len(self._messages))

    def __del__(self) -> None:
        self._channel.task.cancel()

    def step(self, completion: str) -> float | None:
        """Pass a turn to the rollout. Return the rollout's reward if it has ended, otherwise None."""
        reply = self._to_reply(completion, self._num_calls)
        self._num_calls += len(reply.get("tool_calls", []))
        self._messages.append(reply)
        self._channel.answer(reply)
        if self._channel.wait_for_request() is not None:
            return None
        self.done = True
        return self._read_reward()

    def observe(self) -> list[Message]:
        """Return the messages after the reply.

        Raises:
            UserError: If earlier messages have changed, or the new ones cannot be trained on.
        """
        request = self._channel.last_request
        begin = len(self._messages)
        self._check(request, begin)
        new = [_comparable_message(message) for message in request.messages[begin:]]
        if not new:
            raise UserError("the rollout requests another completion without a new message")
        names = {call["id"]: call["function"]["name"] for call in self._messages[-1].get("tool_calls", [])}
        for message in new:
            if not isinstance(message.setdefault("content", ""), str):
                raise UserError(f"the rollout adds {shown(message)}. Only messages of text are supported")
            if message["role"] == "assistant":
                raise UserError("the rollout adds a message of the assistant, but only the model may write these")
            if message["role"] == "tool":
                message["name"] = names.get(message.get("tool_call_id"), "unread")
        self._messages += new
        return new

    def end(self) -> float | None:
        """End the rollout because there is no room for another turn, and return its reward.

        The rollout gets the error that the library itself raises for a prompt that is too long.

        Raises:
            UserError: If the rollout requests another completion instead of ending.
        """
        import verifiers as vf

        self._channel.fail(vf.OverlongPromptError("there is no room for another turn"))
        if self._channel.wait_for_request() is not None:
            raise UserError("the rollout requests another completion, but there is no room for another turn")
        return self._read_reward()

    def _read_reward(self) -> float | None:
        """Return the reward of the ended rollout, and set `metrics`.

        Raises:
            RuntimeError: If the rollout failed.
        """
        result = self._channel.task.result()
        if result.get("error"):
            raise RuntimeError(f"the rollout failed: {result['error']}")
        self.metrics = {}
        for name, value in (result.get("metrics") or {}).items():
            if isinstance(value, int | float) and math.isfinite(value):
                self.metrics[name] = float(value)
        return result["reward"]

    def _check(self, request: "_CompletionRequest", count: int) -> None:
        """Check that the first `count` messages of a request, and its tools, are those that the tokens came from.

        Raises:
            UserError: If they are not.
        """
        requested = [_comparable_message(message) for message in request.messages[:count]]
        expected = [_comparable_message(message) for message in self._messages]
        if requested != expected:
            raise UserError(
                "the rollout changes earlier messages of the conversation, but dtrain supports only new messages at "
                "its end"
            )
        requested_tools = [_comparable_tool(tool) for tool in request.tools]
        expected_tools = [_comparable_tool(tool) for tool in self._tools]
        if requested_tools != expected_tools:
            raise UserError(
                "the rollout offers other tools than the prompt describes. Write the data again if the environment has "
                "changed"
            )


class _CompletionRequest(NamedTuple):
    """A rollout's request for a completion, and the future that receives it."""

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]]
    answer: "asyncio.Future[Any]"


class _Channel:
    """Connects a rollout, which runs in an event loop, and the thread that steps it.

    Attributes:
        last_request: The last request of the rollout.
        task: The rollout.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self._loop = loop
        self._requests: SimpleQueue[_CompletionRequest | None] = SimpleQueue()  # None: the rollout has ended

    def run(self, rollout: Any) -> None:
        """Start the coroutine of the rollout in the event loop."""
        self.task = asyncio.run_coroutine_threadsafe(rollout, self._loop)
        self.task.add_done_callback(lambda _: self._requests.put(None))

    async def request(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> Any:
        """Wait for the next completion, `openai.types.chat.ChatCompletion`. The rollout calls this."""
        answer: asyncio.Future[Any] = self._loop.create_future()
        self._requests.put(_CompletionRequest(messages, tools, answer))
        return await answer

    def wait_for_request(self) -> _CompletionRequest | None:
        """Wait for the next request of the rollout, without a time limit of its own. None if the rollout has ended."""
        request = self._requests.get()
        if request is not None:
            self.last_request = request
        return request

    def answer(self, reply: Message) -> None:
        """Answer the last request with a message."""
        from openai.types.chat import ChatCompletion

        finish = "tool_calls" if reply.get("tool_calls") else "stop"
        choice = {"index": 0, "finish_reason": finish, "message": reply}
        fields = {"id": "dtrain", "object": "chat.completion", "created": 0, "model": "dtrain", "choices": [choice]}
        completion = ChatCompletion.model_validate(fields)
        self._loop.call_soon_threadsafe(self.last_request.answer.set_result, completion)

    def fail(self, error: Exception) -> None:
        """Answer the last request with an error."""
        self._loop.call_soon_threadsafe(self.last_request.answer.set_exception, error)


def _client(channel: _Channel) -> Any:
    """Return a client of the library whose completions come from a channel."""
    from verifiers.clients import OpenAIChatCompletionsClient

    class Client(OpenAIChatCompletionsClient):
        async def get_native_response(self, prompt: Any, model: str, sampling_args: Any, tools: Any = None, **_: Any):
            return await channel.request(prompt, tools or [])

        async def raise_from_native_response(self, response: Any) -> None:
            """Raise nothing: an empty completion is judged as any other."""

    return Client(None)


def _reply_message(
    text: str, count: int, *, specials: Sequence[str], calls: Sequence[Any] | None, tools: Any
) -> Message:
    """Return a turn's text as a message of the assistant. Calls that cannot be read stay in its text.

    Args:
        text: The turn, special tokens included.
        count: Number of tool calls in earlier turns.
        specials: Texts of the special tokens.
        calls: The form of tool calls, and whether a turn has at most one. None without tools.
        tools: The tools, in OpenAI's function format.
    """
    tool_calls = []
    if tools and calls is not None:
        form, is_single = calls
        parameters = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}
        tool_calls = read_calls(form, text, parameters)
        if is_single:
            tool_calls = tool_calls[:1]
    if any(call.problem for call in tool_calls):
        tool_calls = []
    if tool_calls:
        begin = min((text.find(opening) for opening in CALL_OPENINGS if opening in text), default=0)
        text = text[:begin].rstrip()
    for special in specials:
        text = text.replace(special, "")
    message: Message = {"role": "assistant", "content": text}
    if tool_calls:
        message["tool_calls"] = []
        for number, call in enumerate(tool_calls, start=count):
            function = {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)}
            message["tool_calls"].append({"type": "function", "id": f"call{number:05}", "function": function})
    return message


def _comparable_message(message: Mapping[str, Any]) -> Message:
    """Return a message in a form for comparison: without empty values, and with its parts of text joined."""
    comparable = {key: value for key, value in message.items() if key != "name" and value not in (None, "", [])}
    parts = comparable.get("content")
    if isinstance(parts, list) and all(isinstance(part, Mapping) and part.get("type") == "text" for part in parts):
        comparable["content"] = "".join(part["text"] for part in parts)
    if "tool_calls" in comparable:
        comparable["tool_calls"] = [_comparable_call(call) for call in comparable["tool_calls"]]
    return comparable


def _comparable_call(call: Any) -> Any:
    """Return the id, name and arguments of a call, which may be JSON as text or an object."""
    if isinstance(call, str):
        call = json.loads(call)
    function = call.get("function", call)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with suppress(ValueError):  # arguments that are not JSON are compared as text
            arguments = json.loads(arguments or "{}")
    return [call.get("id"), function.get("name"), arguments]


def _comparable_tool(tool: Mapping[str, Any]) -> list[Any]:
    function = tool["function"]
    return [function[key] for key in ("name", "description", "parameters")]


def environment_rows(
    environment: Any, name: str, args: Mapping[str, Any], is_eval: bool = False
) -> list[dict[str, Any]]:
    """Return a row for each prompt of an environment's data set, with what its rubric reads.

    Args:
        environment: The environment.
        name: Its name.
        args: Its arguments.
        is_eval: Use its data set for evaluation.

    Raises:
        UserError: If the data set is empty, or contains values that are not JSON.
    """
    try:
        dataset = environment.get_eval_dataset() if is_eval else environment.get_dataset()
    except ValueError as error:
        raise UserError(f"{name}: {error}") from None
    rows = []
    for record in dataset:
        info = record.get("info") or {}
        if isinstance(info, str):
            info = json.loads(info)
        prompt = []
        for message in map(_mapping, record["prompt"]):
            prompt.append({key: value for key, value in message.items() if value is not None})
        row: dict[str, Any] = {"prompt": prompt, ENVIRONMENT_COLUMN: {"name": name, "args": dict(args)}}
        if isinstance(record.get("answer"), str):
            row["answer"] = record["answer"]
        tools = info.get("tool_defs", environment.tool_defs) or []
        if tools:
            row["tools"] = [_openai_tool(_mapping(tool)) for tool in tools]
        row[ROW_COLUMN] = {key: value for key, value in record.items() if key != "prompt"}
        rows.append(row)
    if not rows:
        raise UserError(f"grpo.verifiers: the data set of {name} is empty")
    try:
        json.dumps(rows)
    except TypeError as error:
        raise UserError(f"grpo.verifiers: the data set of {name} has a column that is not JSON: {error}") from None
    return rows


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else value.model_dump()


def _openai_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool in OpenAI's function format."""
    function = tool.get("function", tool)
    fields = {key: function[key] for key in ("name", "description", "parameters")}
    return {"type": "function", "function": fields}


def main() -> None:
    """Write the prompts of an environment, as a file for `data.train.path`."""
    parser = argparse.ArgumentParser("python -m dtrain.rl.environments.verifiers", description=main.__doc__)
    parser.add_argument("name", help="grpo.verifiers.name")
    parser.add_argument("args", nargs="?", type=json.loads, default={}, help="grpo.verifiers.args, as JSON")
    parser.add_argument("--eval", action="store_true", help="write the prompts of its data set for evaluation")
    options = parser.parse_args()
    if "" not in sys.path:
        sys.path.append("")
    try:
        with redirect_stdout(sys.stderr):  # the environment may print lines that are not rows
            find_verifiers(options.name)
            if has_tasksets():
                if options.eval:
                    raise UserError("--eval: a taskset has only one data set. Leave it out, or choose another by args")
                rows = task_rows(options.name, options.args)
            else:
                environment = load_legacy_environment(options.name, options.args)
                rows = environment_rows(environment, options.name, options.args, options.eval)
    except UserError as error:
        raise SystemExit(f"dtrain: {error}") from None
    for row in rows:
        print(json.dumps(row, ensure_ascii=False))


if __name__ == "__main__":
    main()
