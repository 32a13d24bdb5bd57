"""Completions in several turns: a recipe's environments, or its tools, which rank 0 calls, with an engine that all
ranks call."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dtrain.base.ranks import Ranks
from dtrain.base.run_context import RunContext
from dtrain.data import Tokenizer
from dtrain.data.text.template import ChatTemplate, choose_template
from dtrain.data.text.tool_format import ToolFormat, learn_tool_format
from dtrain.inference.request import AskStop, Completion, Request
from dtrain.recipe.rollouts import RolloutSection
from dtrain.recipe.schema import Data
from dtrain.rl.buffer import Sample
from dtrain.rl.engine_interfaces import RolloutEngine
from dtrain.rl.environments.episodes import environment_seed, run_episodes
from dtrain.rl.environments.observations import Observations
from dtrain.rl.environments.stepping import Environments
from dtrain.rl.rewards.find import find
from dtrain.rl.tools import tool_schemas


@dataclass(frozen=True)
class _AtVersion:
    """An engine as the episodes call it."""

    engine: RolloutEngine
    version: int
    ask_stop: AskStop | None

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        return self.engine.generate(requests, self.version, self.ask_stop)


@dataclass(frozen=True)
class Episodes:
    """Plays requests as episodes in environments, which ranks other than 0 do not have. Collective."""

    environments: Environments | None
    tokenizer: Tokenizer
    template: ChatTemplate | None
    calls: ToolFormat | None
    max_turns: int
    max_length: int
    ranks: Ranks
    has_tools_in_rows: bool = False

    def play(
        self,
        engine: RolloutEngine,
        requests: Sequence[Request],
        rows: Sequence[Mapping[str, Any]],
        version: int,
        ask_stop: AskStop | None = None,
    ) -> list[Sample]:
        """Play an episode for each request, whose data row the environment is made with; in their order. Raises
        UserError as `environments` does, and Interrupted as `engine` does."""

        calls = self.calls
        if self.has_tools_in_rows and (
            tools := next(filter(None, (row["columns"].get("tools") for row in rows)), None)
        ):
            calls = learn_tool_format(self.template, tools)
            form = (calls.form, calls.is_single)
            rows = [{**row, "columns": {**row["columns"], "calls": form}} for row in rows]

        def make() -> None:
            if self.environments is not None:
                seeds = [environment_seed(request) for request in requests]
                self.environments.make([(dict(row), seed) for row, seed in zip(rows, seeds, strict=True)])

        self.ranks.first(make)
        is_chat = bool(rows) and isinstance(rows[0]["prompt"], list) and isinstance(rows[0]["prompt"][0], Mapping)
        episodes = run_episodes(
            _AtVersion(engine, version, ask_stop),
            requests,
            self.environments,
            Observations(self.tokenizer, self.template if is_chat else None, calls),
            max_turns=self.max_turns,
            max_length=self.max_length,
            first=self.ranks.first,
        )
        if self.environments is not None:
            self.environments.forget()
        return [
            Sample(
                episode.prompt,
                episode.ids,
                episode.sampled,
                episode.logprobs,
                episode.finish,
                episode.version,
                episode.earned,
                episode.longest,
                (episode.calls, episode.failures),
                episode.routed,
                episode.metrics,
            )
            for episode in episodes
        ]


def open_episodes(section: RolloutSection, data: Data, tokenizer: Tokenizer, run: RunContext) -> Episodes:
    """Open the environments of `section`, or its tools, in their own process, on rank 0 alone; the run closes it.
    Collective. Raises UserError."""
    library = section.verifiers
    template = choose_template(tokenizer.directory, tokenizer.special_tokens, data.chat_template, data.template_kwargs)
    tools = tool_schemas(section.tools) if section.tools else []
    calls = learn_tool_format(template, [schema for _, schema in tools]) if tools else None
    ranks = Ranks()

    def start() -> Environments | None:
        if not ranks.is_first:
            return None
        arguments: dict[str, Any] = {"path": section.environment}
        if calls is not None:
            sources = [(find(tool.fn, "tool") if tool.fn else tool.mcp, schema["function"]) for tool, schema in tools]
            options = (sources, calls.form, calls.is_single, section.tool_output)
            arguments = {"path": "dtrain.rl.environments.tools:Toolbox", "options": options, "whose": "grpo.tools"}
        if library.name is not None:
            path = "dtrain.rl.environments.verifiers:Library"
            library_options = (library.name, library.args, tokenizer.special_texts)
            arguments = {"path": path, "options": library_options, "whose": "grpo.verifiers"}
        environments = Environments(
            **arguments, timeout=section.environment_timeout, threads=section.environment_threads, say=run.metrics.say
        )
        return run.stack.enter_context(environments)

    environments, has_own = ranks.together(start), library.name is not None
    return Episodes(environments, tokenizer, template, calls, section.max_turns, data.max_length, ranks, has_own)
