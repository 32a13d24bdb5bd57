"""Tasks of verifiers 0.4 and later: a taskset by its name, one completion for each task, scored by the task's rewards.

That release plays a task with a harness, a program that asks for its completions over HTTP. Here the engine samples the
completion and the task scores it, so a taskset that needs tools, several agents or a machine of its own is refused.
"""

import asyncio
import inspect
import json
from collections.abc import Mapping, Sequence
from typing import Any

from dtrain.base.errors import UserError
from dtrain.rl.rewards.find import find_verifiers

MADE = "verifiers"  # the column that says of which environment a row is
ROW = "row"  # the column of what the environment's own data set says


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
        if columns.get(MADE) == self._made:
            task = self._tasks.get(columns[ROW]["key"])
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
        messages = [*_prompt(self._task), vf.AssistantMessage(content=completion)]
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
        prompt = [{"role": message.role, "content": message.content} for message in _prompt(task)]
        are_texts = all(isinstance(message["content"], str) for message in prompt)
        if not are_texts or not any(message["role"] == "user" for message in prompt):
            raise UserError(f"{name}: task {task.data.idx} has no prompt of text")
        rows.append({"prompt": prompt, MADE: {"name": name, "args": dict(args)}, ROW: {"key": task.key}})
    return rows


def _prompt(task: Any) -> list[Any]:
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
