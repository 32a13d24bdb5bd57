"""How vLLM, SGLang and `dtrain serve` are asked for completions and told of new weights. No torch.

vllm    /v1/completions with token ids in and `return_token_ids`, `return_tokens_as_token_ids` and `logprobs: 0` for
        token ids and logprobs out (vLLM's openai/completion/protocol.py). Start it with --logprobs-mode
        processed_logprobs: its default gives logprobs before the temperature and the filters. New weights from a
        directory: collective_rpc reload_weights, which needs VLLM_SERVER_DEV_MODE=1 (docs/training/async_rl.md).
sglang  /generate with `input_ids` and `return_logprob`; ids and logprobs are meta_info.output_token_logprobs
        (docs/basic_usage/sampling_params.md). Its logprobs are after the temperature, before top-k, top-p and min-p:
        leave those off. New weights: update_weights_from_disk (docs/advanced_features/sglang_for_rl.md).
dtrain  vLLM's completions with `prompt_index` and `sample_index`, so that the draws are the native engine's; each
        choice says the `weight_version` that it came from. New weights: SGLang's words.

A dialect's `read` raises Unanswered for an answer that may be better next time, and UserError, with the fix, for one
that a setting of the server explains.
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from dtrain.errors import UserError
from dtrain.randomness import key
from dtrain.remote.wire import Refused, Unanswered, Wire
from dtrain.rollout.request import Completion, Request

Call = Callable[[str, dict[str, Any]], Any]  # path and body -> the answer
TOKEN = "token_id:"


class Dialect(Protocol):
    """`body` asks for samples of one prompt: requests that differ in their sample_index alone, which ascends by 1."""

    name: str
    streams: bool  # whether it can join a process group that dtrain makes

    def body(self, requests: Sequence[Request], model: str) -> tuple[str, dict[str, Any]]: ...

    def read(self, answer: Any, requests: Sequence[Request]) -> list[Completion]: ...

    def load(self, call: Call, directory: Path, version: int) -> None: ...

    def pause(self, call: Call) -> None: ...

    def resume(self, call: Call) -> None: ...


class Vllm:
    name = "vllm"
    streams = False

    def body(self, requests: Sequence[Request], model: str) -> tuple[str, dict[str, Any]]:
        first = requests[0]
        sampling = first.sampling
        body = {
            "model": model,
            "prompt": list(first.prompt),
            "n": len(requests),
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "min_p": sampling.min_p,
            "repetition_penalty": 1.0,  # a model's generation_config.json may say otherwise
            "stop": list(sampling.stop),
            "stop_token_ids": list(sampling.stop_ids),
            "ignore_eos": True,  # the stop tokens are those of the request
            "seed": derived_seed(first),  # vLLM adds a sample's index
            "logprobs": 0,
            "return_tokens_as_token_ids": True,
            "return_token_ids": True,
        }
        return "/v1/completions", body

    def read(self, answer: Any, requests: Sequence[Request]) -> list[Completion]:
        choices = answer.get("choices") if isinstance(answer, dict) else None
        if not isinstance(choices, list):
            raise Unanswered(f"an answer without choices: {str(answer)[:200]}")
        if len(choices) != len(requests):
            raise UserError(f"asked for n={len(requests)} completions, it gave {len(choices)}")
        choices = sorted(choices, key=lambda choice: choice["index"])
        return [self._completion(choice) for choice in choices]

    def _completion(self, choice: dict[str, Any]) -> Completion:
        logprobs = choice.get("logprobs") or {}
        tokens, values = logprobs.get("tokens"), logprobs.get("token_logprobs")
        ids = choice.get("token_ids")
        if values is None or (ids is None and tokens is None):
            raise UserError(
                "its completions carry no logprobs (or no token ids): use vLLM 0.10.2 or later, with "
                "--max-logprobs at its default or above, or another kind of server"
            )
        if ids is None:
            if not all(token.startswith(TOKEN) for token in tokens):
                raise UserError("it answers in text, not token ids: use vLLM 0.10.2 or later")
            ids = [int(token.removeprefix(TOKEN)) for token in tokens]
        return _completion(ids, values, choice.get("finish_reason"), _version(choice.get("weight_version")))

    def load(self, call: Call, directory: Path, version: int) -> None:
        paused = self._try(call, "/pause?mode=keep&clear_cache=false")
        try:
            arguments = {"method": "reload_weights", "kwargs": {"weights_path": str(directory)}}
            if not self._try(call, "/collective_rpc", arguments):
                raise UserError("it has no /collective_rpc: start it with VLLM_SERVER_DEV_MODE=1")
            self._try(call, "/reset_prefix_cache")
        finally:
            if paused:
                self.resume(call)

    def pause(self, call: Call) -> None:
        call("/pause?mode=keep&clear_cache=false", {})

    def resume(self, call: Call) -> None:
        call("/resume", {})

    @staticmethod
    def _try(call: Call, path: str, body: dict[str, Any] | None = None) -> bool:
        """Whether the server has `path`: releases differ in the routes beside the one that loads."""
        try:
            call(path, body or {})
        except Refused as error:
            if error.status not in (404, 405):
                raise
            return False
        return True


class Dtrain(Vllm):
    name = "dtrain"
    streams = True

    def body(self, requests: Sequence[Request], model: str) -> tuple[str, dict[str, Any]]:
        first = requests[0]
        path, body = super().body(requests, model)
        del body["repetition_penalty"]
        return path, {
            **body,
            "seed": first.seed,
            "prompt_index": first.prompt_index,
            "sample_index": first.sample_index,
        }

    def load(self, call: Call, directory: Path, version: int) -> None:
        call("/update_weights_from_disk", {"model_path": str(directory), "weight_version": version})

    def pause(self, call: Call) -> None:
        """Not needed: it decodes nothing from the first bucket of an update to the last."""

    def resume(self, call: Call) -> None:
        """See `pause`."""


class Sglang:
    name = "sglang"
    streams = True

    def body(self, requests: Sequence[Request], model: str) -> tuple[str, dict[str, Any]]:
        # One prompt many times, each with a seed of its own, rather than `n`: the server shares the prompt's keys.
        prompt = list(requests[0].prompt)
        body = {
            "input_ids": [prompt] * len(requests),
            "sampling_params": [self._sampling(request) for request in requests],
            "return_logprob": True,
            "logprob_start_len": -1,
        }
        return "/generate", body

    def _sampling(self, request: Request) -> dict[str, Any]:
        sampling = request.sampling
        return {
            "max_new_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "min_p": sampling.min_p,
            "repetition_penalty": 1.0,
            "stop": list(sampling.stop),
            "stop_token_ids": list(sampling.stop_ids),
            "ignore_eos": not sampling.stop_ids,  # with it SGLang heeds no stop token
            "sampling_seed": derived_seed(request) % 2**31,  # heeded with --enable-deterministic-inference
        }

    def read(self, answer: Any, requests: Sequence[Request]) -> list[Completion]:
        answers = answer if isinstance(answer, list) else [answer]
        if len(answers) != len(requests):
            raise UserError(f"asked for {len(requests)} completions, it gave {len(answers)}")
        return [self._completion(one) for one in answers]

    def _completion(self, answer: Any) -> Completion:
        meta = answer.get("meta_info") if isinstance(answer, dict) else None
        if not isinstance(meta, dict):
            raise Unanswered(f"an answer without meta_info: {str(answer)[:200]}")
        drawn = meta.get("output_token_logprobs")
        if drawn is None:
            raise UserError(
                "its completions carry no output_token_logprobs: is it SGLang, and not a router that drops them?"
            )
        finish = meta.get("finish_reason")
        finish = finish.get("type") if isinstance(finish, dict) else finish
        ids, values = [int(one[1]) for one in drawn], [one[0] for one in drawn]
        return _completion(ids, values, finish, _version(meta.get("weight_version")))

    def load(self, call: Call, directory: Path, version: int) -> None:
        self.pause(call)
        try:
            answer = call("/update_weights_from_disk", {"model_path": str(directory), "weight_version": str(version)})
            if not answer.get("success"):
                raise UserError(f"it could not load {directory}: {answer.get('message')}")
        finally:
            self.resume(call)

    def pause(self, call: Call) -> None:
        call("/pause_generation", {"mode": "retract"})  # what is under way is read anew with the new weights

    def resume(self, call: Call) -> None:
        call("/continue_generation", {})


DIALECTS: dict[str, Dialect] = {dialect.name: dialect for dialect in (Vllm(), Sglang(), Dtrain())}


def recognise(wire: Wire, seconds: float) -> tuple[Dialect, list[str]]:
    """Which server it is, by the owner of its models, and their names. Raises Unanswered, Refused and UserError."""
    answer = wire.get("/v1/models", seconds)
    models = answer.get("data") if isinstance(answer, dict) else None
    if not models:
        raise Unanswered("no model at /v1/models")
    owner = str(models[0].get("owned_by"))
    if owner not in DIALECTS:
        raise UserError(f"{wire.url}: its models are {owner}'s, neither of {', '.join(DIALECTS)}; say which it is like")
    return DIALECTS[owner], [str(model.get("id")) for model in models]


def derived_seed(request: Request) -> int:
    """A seed below 2**63 for servers that know no prompt_index: samples of one prompt follow one another."""
    return key(request.seed, request.prompt_index) % 2**62 + request.sample_index


def _completion(ids: list[int], logprobs: list[float], finish: Any, version: int | None) -> Completion:
    if finish not in ("stop", "length"):
        raise Unanswered(f"a completion that ended by {finish!r}, not by stop or length")
    if len(ids) != len(logprobs):
        raise UserError(f"a completion of {len(ids)} tokens has {len(logprobs)} logprobs")
    if not all(isinstance(value, int | float) and math.isfinite(value) for value in logprobs):
        raise UserError("a completion has a logprob that is no number")
    return Completion(ids, [float(value) for value in logprobs], finish, version)


def _version(value: Any) -> int | None:
    return int(value) if isinstance(value, int | str) and str(value).isdecimal() else None
