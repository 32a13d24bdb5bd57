"""A few lines that stand in for the library `verifiers` where it is not installed: the calls that dtrain makes and the
environments of `dtrain_trials` need, no more. tests/environments/test_verifiers.py holds both to the same results."""

import importlib
import inspect
import json

from verifiers.clients import OpenAIChatCompletionsClient as Client


class Error(Exception):
    pass


class OverlongPromptError(Error):
    pass


class Rubric:
    def __init__(self, funcs, weights=None):
        self.funcs, self.weights = list(funcs), list(weights or [1.0] * len(funcs))

    @property
    def has_group_rewards(self):
        return any("completions" in inspect.signature(one).parameters for one in self.funcs)

    async def score(self, state):
        given = {"state": state, **{key: state.get(key) for key in ("prompt", "completion", "answer", "info")}}
        reward, metrics = 0.0, {}
        for function, weight in zip(self.funcs, self.weights, strict=True):
            wanted = inspect.signature(function).parameters
            found = function(**{key: value for key, value in given.items() if key in wanted})
            metrics[function.__name__] = float(await found if inspect.iscoroutine(found) else found)
            reward += weight * metrics[function.__name__]
        return reward, metrics


class MultiTurnEnv:
    message_type = "chat"

    def __init__(self, dataset, rubric, max_turns=-1, system_prompt=None, tool_defs=None):
        self.rubric, self.max_turns, self.tool_defs = rubric, max_turns, tool_defs
        before = [{"role": "system", "content": system_prompt}] if system_prompt else []
        self.rows = [
            {**row, "example_id": number, "prompt": [*before, {"role": "user", "content": row["question"]}]}
            for number, row in enumerate(dataset)
        ]

    def get_dataset(self):
        return self.rows

    get_eval_dataset = get_dataset

    async def setup_state(self, state):
        return state

    def is_over(self, state):
        return 0 < self.max_turns <= len(state["trajectory"])

    async def get_prompt_messages(self, state):
        if not state["trajectory"]:
            return state["prompt"]
        messages = [*state["trajectory"][-1]["prompt"], *state["trajectory"][-1]["completion"]]
        return [*messages, *await self.env_response(messages, state)]

    async def run_rollout(self, input, client, model, sampling_args):
        assert isinstance(client, Client)
        state = {**input, "trajectory": [], "final_env_response": None}
        state["completion"], error = [], None
        try:
            await self.setup_state(state)
            while not self.is_over(state):
                prompt = await self.get_prompt_messages(state)
                if state["final_env_response"] is not None:
                    break
                reply = await client.get_response(prompt, model, sampling_args, self.tool_defs)
                state["trajectory"].append({"prompt": prompt, "completion": [reply]})
        except OverlongPromptError:
            pass
        except Error as raised:
            error = raised
        if state["trajectory"]:
            last = state["trajectory"][-1]
            whole = [*last["prompt"], *last["completion"], *(state["final_env_response"] or [])]
            state["completion"] = whole[len(state["prompt"]) :]
        reward, metrics = await self.rubric.score(state)
        metrics["num_turns"] = float(len(state["trajectory"]))
        return {"reward": reward, "metrics": metrics, "error": error}


class SingleTurnEnv(MultiTurnEnv):
    def __init__(self, **options):
        super().__init__(**options, max_turns=1)


class ToolEnv(MultiTurnEnv):
    """Its tools have whole numbers alone, the first of them required."""

    def __init__(self, tools, max_turns=10, **options):
        self.tools = {one.__name__: one for one in tools}
        super().__init__(max_turns=max_turns, tool_defs=[_definition(one) for one in tools], **options)

    def is_over(self, state):
        called = not state["trajectory"] or state["trajectory"][-1]["completion"][-1].get("tool_calls")
        return super().is_over(state) or not called

    async def env_response(self, messages, state):
        found = []
        for call in messages[-1]["tool_calls"]:
            function = call["function"]
            try:
                text = str(self.tools[function["name"]](**json.loads(function["arguments"])))
            except Exception as error:
                text = str(error)
            found.append({"role": "tool", "tool_call_id": call["id"], "content": text})
        return found


def _definition(function):
    parameters = inspect.signature(function).parameters
    schema = {
        "type": "object",
        "properties": {name: {"type": "integer"} for name in parameters},
        "required": [next(iter(parameters))],
    }
    return {"name": function.__name__, "description": inspect.getdoc(function), "parameters": schema}


def load_environment(name, **args):
    module = importlib.import_module(name.rpartition("/")[2].replace("-", "_"))
    try:
        return module.load_environment(**args)
    except Exception as error:
        raise RuntimeError(f"Failed to load environment '{name}': {error}") from error
