"""Dialects: the protocols for completions and new weights of vLLM, SGLang and `dtrain serve`. No torch.

vllm
    Completions: /v1/completions with token ids. `return_token_ids`, `return_tokens_as_token_ids` and `logprobs: 0` ask
    for token ids and log-probabilities (vLLM's openai/completion/protocol.py). Start it with --logprobs-mode
    processed_logprobs: by default, log-probabilities are those before the temperature and the filters.
    New weights from a directory: collective_rpc reload_weights, which needs VLLM_SERVER_DEV_MODE=1
    (docs/training/async_rl.md).
    Adapters: load_lora_adapter (docs/features/lora.md), without load_inplace. That option stays on the stored request,
    so that every step of a completion would read the files again (SkyRL#1606), and prefix caches are by name.

sglang
    Completions: /generate with `input_ids` and `return_logprob`. Ids and log-probabilities are in
    meta_info.output_token_logprobs (docs/basic_usage/sampling_params.md). They are those after the temperature and
    before top-k, top-p and min-p, so leave these off.
    New weights: update_weights_from_disk (docs/advanced_features/sglang_for_rl.md).
    Adapters: load_lora_adapter, and its name as `lora_path` with each prompt (docs/advanced_features/lora.ipynb).

dtrain
    Completions: vLLM's route with `prompt_index` and `sample_index`, so that the tokens are those of the native engine.
    Each choice has the `weight_version` that sampled it.
    New weights: SGLang's route. Adapters: vLLM's route, always with the same name and load_inplace. Completions in
    progress continue with the new adapter, and report their oldest version.

Prompts with images have other routes (`ImageRoute`), whose answers also have the token ids that the server read:

vllm
    /inference/v1/generate: token ids with one placeholder for each image, and `content_parts` with the images
    (vllm-project/vllm#51478). It needs --enable-scale-out. Without that, and for models that write more around an image
    than its own tokens, /v1/chat/completions, where the server applies its own template and tokenizer. With
    `return_token_ids`, both report the ids that they read.
sglang
    /generate: token ids with placeholders, and `image_data` (sgl-project/sglang#26555). It reports the number of tokens
    that it read. Each sample has its own seed, and therefore the images once more.
dtrain
    /v1/completions: the prompt's token ids, and `images`, whose tokens it counts.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from dtrain.base.errors import UserError
from dtrain.base.randomness import random_key
from dtrain.inference.chats import ImagePrompt
from dtrain.inference.request import Completion, Request, SamplingParams
from dtrain.rl.remote.http_client import ClientError, HttpClient, RetryableError, read_models, with_advice

Post = tuple[str, dict[str, Any]]
"""Path and body of a POST."""
VLLM_TOKEN_PREFIX = "token_id:"
VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM's --max-lora-rank accepts."""
ADAPTER_NAME = "trained"
"""Name of the adapter on servers where all versions share one name."""

OTHER_PROMPT_READ = "the server read another prompt than the trainer: "
FIX_IMAGE_PROCESSOR = "Serve the same model directory as the run, so that the image processor is the same"
FIX_CHAT_TEMPLATE = "with the run's chat template (--chat-template, without --default-chat-template-kwargs)"


class Call(Protocol):
    """Calls a server: a POST, or a GET without a body. `HttpEngine._call` is one.

    Args:
        path: Path of the route.
        body: JSON to post. None: GET.
        is_json: Whether the answer must be JSON.
        tries: Largest number of tries. None: the engine's number.

    Raises:
        ClientError: If the server refuses the call.
        UserError: If no try is answered.
    """

    def __call__(
        self, path: str, body: dict[str, Any] | None, *, is_json: bool = True, tries: int | None = None
    ) -> Any: ...


@dataclass(frozen=True)
class AdapterVersion:
    """A version of an adapter.

    Attributes:
        directory: Directory with the adapter in PEFT's layout.
        version: Version of the weights.
        name: A name that no other version and no other run has.
        rank: Rank of the adapter.
    """

    directory: Path
    version: int
    name: str
    rank: int


class Vllm:
    """The dialect of vLLM, and the interface of all dialects.

    Attributes:
        name: Name of the kind of server.
        broadcast_kind: How the server receives broadcast weights: "transfer" is vLLM's weight transfer, "broadcast" a
            process group that dtrain makes. `publish` has a publisher for each.
        pause: Posts before an update of the weights.
        resume: Posts after it.
        clear_caches: Posts before `resume` that discard what was computed with the old weights.
        has_named_versions: Whether each version of an adapter has its own name. The version of a completion then
            follows from the name.
        supports_dora: Whether the server accepts DoRA adapters.
        supports_vision_adapters: Whether the server accepts adapters of vision towers.
        keeps_image_features: Whether the server keeps features of images when its weights change.
        routed_fields: Additional fields of a request that ask for routed experts.
        routed_start: How to start a server that reports routed experts.
    """

    name = "vllm"
    broadcast_kind = "transfer"
    pause: Sequence[Post] = [("/pause?mode=keep&clear_cache=false", {})]
    resume: Sequence[Post] = [("/resume", {})]
    # Keys and values of the old weights, also those of completions in progress, and image features of the old tower.
    clear_caches: Sequence[Post] = [
        ("/reset_prefix_cache?reset_running_requests=true", {}),
        ("/reset_encoder_cache", {}),
    ]
    has_named_versions = True
    supports_dora = supports_vision_adapters = keeps_image_features = False
    routed_fields: dict[str, Any] = {}  # a server reports them in all answers or in none
    routed_start = "Start the server with --enable-return-routed-experts (vLLM 0.21 or later)"

    def body(self, requests: Sequence[Request], model: str, adapter: str | None = None) -> Post:
        """Return the path and body that request samples of one prompt.

        Args:
            requests: The samples, which differ only in their sample_index, in consecutive order.
            model: The model's name on the server.
            adapter: Name of the adapter to sample with.
        """
        body = {
            "model": adapter or model,
            "prompt": list(requests[0].prompt),
            **vllm_sampling_fields(requests),
            "logprobs": 0,
            "return_tokens_as_token_ids": True,
            "return_token_ids": True,
        }
        return "/v1/completions", body

    def read(self, answer: Any, requests: Sequence[Request]) -> list[Completion]:
        """Read the completions of an answer to `requests`.

        Raises:
            RetryableError: If the answer is malformed, but another may be right.
            UserError: If a setting of the server explains what is wrong. The message has the fix.
        """
        return [self._completion(choice) for choice in read_choices(answer, len(requests))]

    def routed(self, answer: Any) -> list[Any]:
        """Return the routed experts of each completion, in the order of `read`.

        Returns:
            For each completion the array in the server's own format, which `rl.routed` reads, a tuple of arrays for
            prompt and completion, or None if the answer has no experts.
        """
        choices = sorted(answer["choices"], key=choice_index)
        experts = [choice.get("routed_experts") for choice in choices]
        # Some releases report the experts of the prompt separately, once for all completions.
        prompt_experts = answer.get("prompt_routed_experts")
        if prompt_experts is None:
            return experts
        pairs = []
        for completion_experts in experts:
            if completion_experts is None:
                completion_experts = []
            pairs.append((prompt_experts, completion_experts))
        return pairs

    def _completion(self, choice: dict[str, Any]) -> Completion:
        logprobs = choice.get("logprobs") or {}
        values = logprobs.get("token_logprobs")
        entries = logprobs.get("content")
        if entries is not None:  # /v1/chat/completions
            values = [entry["logprob"] for entry in entries]
        ids = choice.get("token_ids")
        tokens = logprobs.get("tokens")  # before vLLM 0.10.2 the only place with the ids, as "token_id:5"
        if values is None or (ids is None and tokens is None):
            raise UserError(
                "the server's completions have no log-probabilities or no token ids. Use vLLM 0.10.2 or later, and do "
                "not lower its --max-logprobs"
            )
        if ids is None:
            assert tokens is not None, "checked above"
            ids = _parse_token_ids(tokens)
        return build_completion(ids, values, choice.get("finish_reason"), _parse_version(choice.get("weight_version")))

    def load(self, call: Call, directory: Path, version: int) -> None:
        """Have the server load full weights from a directory. Raises ClientError and UserError."""
        was_paused = all(self._try(call, *post) for post in self.pause)
        try:
            arguments = {"method": "reload_weights", "kwargs": {"weights_path": str(directory)}}
            if not self._try(call, "/collective_rpc", arguments):
                raise UserError("the server has no /collective_rpc. Start it with VLLM_SERVER_DEV_MODE=1")
            self._try(call, "/update_weight_version", {"new_version": str(version)})
            for post in self.clear_caches:
                self._try(call, *post)
        finally:
            if was_paused:
                for post in self.resume:
                    call(*post)

    def stale_weights(self, client: HttpClient, version: int, seconds: float) -> str | None:
        """Return a description of the server's weights if they are older than `version`, for example after a restart.

        Returns:
            The description, for a message. None if the weights are not older, if this release does not report their
            version, or for dialects whose completions report their version themselves.

        Raises:
            RetryableError: If the server does not answer.
        """
        try:
            answer = client.request("/weight_info", None, seconds)
        except ClientError:  # this release has no such route
            return None
        reported = answer.get("weight_version") if isinstance(answer, dict) else None
        server_version = _parse_version(reported)
        if server_version is not None and server_version < version:
            return f"version {server_version} of the weights"
        if reported == "default":
            return "the weights that it was started with"
        return None

    def adapter_problem(self, call: Call) -> str | None:
        """Return why the server cannot load adapters, by how it was started. None if it can."""
        try:
            # An empty name is refused, but with another status than a missing route.
            call("/v1/load_lora_adapter", {"lora_name": "", "lora_path": ""})
        except ClientError as error:
            if error.status in (404, 405):
                return "the server has no /v1/load_lora_adapter"
        return None

    def load_adapter(self, call: Call, adapter: AdapterVersion) -> str:
        """Have the server load an adapter. Return the name with which requests ask for it. Raises UserError."""
        fields = {"lora_name": adapter.name, "lora_path": str(adapter.directory)}
        try:
            call("/v1/load_lora_adapter", fields, is_json=False)
        except (ClientError, UserError) as error:
            raise UserError(with_advice(error, self.start_hint(adapter.rank))) from error
        return adapter.name

    def unload_adapter(self, call: Call, name: str) -> None:
        call("/v1/unload_lora_adapter", {"lora_name": name}, is_json=False, tries=1)

    def start_hint(self, rank: int) -> str:
        """Return a sentence for messages: the command of a server that accepts adapters of rank `rank`."""
        max_rank = rank
        for allowed_rank in VLLM_RANKS:
            if allowed_rank >= rank:
                max_rank = allowed_rank
                break
        return f"Start the server with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and --enable-lora --max-lora-rank {max_rank}"

    @staticmethod
    def _try(call: Call, path: str, body: dict[str, Any]) -> bool:
        """Post `body` to a route that not every release has. Return whether the server has the route."""
        try:
            call(path, body)
        except ClientError as error:
            if error.status not in (404, 405):
                raise
            return False
        return True


class Dtrain(Vllm):
    """The dialect of `dtrain serve`."""

    name = "dtrain"
    broadcast_kind = "broadcast"
    pause = clear_caches = resume = ()  # it pauses by itself from the first bucket of an update to the last
    has_named_versions = False
    supports_dora = supports_vision_adapters = True
    keeps_image_features = False
    routed_fields = {"return_routed_experts": True}
    routed_start = "Serve a mixture of experts with it"

    def body(self, requests: Sequence[Request], model: str, adapter: str | None = None) -> Post:
        first = requests[0]
        path, body = super().body(requests, model, adapter)
        del body["repetition_penalty"]
        indices = {"prompt_index": first.prompt_index, "sample_index": first.sample_index}
        return path, {**body, "seed": first.seed, **indices}

    def load(self, call: Call, directory: Path, version: int) -> None:
        call("/update_weights_from_disk", {"model_path": str(directory), "weight_version": version})

    def stale_weights(self, client: HttpClient, version: int, seconds: float) -> str | None:
        return None

    def adapter_problem(self, call: Call) -> str | None:
        try:
            call("/v1/load_lora_adapter", {"lora_name": ADAPTER_NAME, "lora_path": "", "load_inplace": True})
        except ClientError as error:
            if error.status in (404, 405, 409):  # 409: the server has no memory for an adapter
                return str(error)
        return None

    def load_adapter(self, call: Call, adapter: AdapterVersion) -> str:
        fields = {"lora_name": ADAPTER_NAME, "lora_path": str(adapter.directory), "weight_version": adapter.version}
        call("/v1/load_lora_adapter", {**fields, "load_inplace": True})
        return ADAPTER_NAME

    def start_hint(self, rank: int) -> str:
        return (
            "Start the server with --control DIR, which contains grpo.server.weights_dir, and with --api-key-file FILE"
        )


class Sglang:
    """The dialect of SGLang. The attributes and methods are those of `Vllm`."""

    name = "sglang"
    broadcast_kind = "broadcast"
    # With "retract", completions in progress compute their keys and values again after the pause.
    pause: Sequence[Post] = [("/pause_generation", {"mode": "retract"})]
    clear_caches: Sequence[Post] = ()  # an update clears them
    resume: Sequence[Post] = [("/continue_generation", {})]
    has_named_versions = True
    supports_dora = supports_vision_adapters = False
    keeps_image_features = True  # `flush_cache` does not discard the features of images
    routed_fields = {"return_routed_experts": True}
    routed_start = "Start the server with --enable-return-routed-experts"

    def body(self, requests: Sequence[Request], model: str, adapter: str | None = None) -> Post:
        sampling_params = []
        for request in requests:
            fields = {
                "max_new_tokens": request.sampling.max_new_tokens,
                **sampling_fields(request.sampling),
                "ignore_eos": not request.sampling.stop_ids,  # if true, SGLang also ignores stop tokens
                "sampling_seed": derived_seed(request) % 2**31,  # used with --enable-deterministic-inference
            }
            sampling_params.append(fields)
        body: dict[str, Any] = {
            # The prompt is repeated with a seed for each sample, instead of `n`. The server shares the prompt's keys.
            "input_ids": [list(requests[0].prompt)] * len(requests),
            "sampling_params": sampling_params,
            "return_logprob": True,
            "logprob_start_len": -1,
        }
        if adapter is not None:
            body["lora_path"] = adapter
        return "/generate", body

    def read(self, answer: Any, requests: Sequence[Request]) -> list[Completion]:
        answers = answer if isinstance(answer, list) else [answer]
        if len(answers) != len(requests):
            raise UserError(f"the server returned {len(answers)} completions instead of {len(requests)}")
        return [self._completion(item) for item in answers]

    def routed(self, answer: Any) -> list[Any]:
        answers = answer if isinstance(answer, list) else [answer]
        return [item["meta_info"].get("routed_experts") for item in answers]

    def _completion(self, answer: Any) -> Completion:
        meta = answer.get("meta_info") if isinstance(answer, dict) else None
        if not isinstance(meta, dict):
            raise RetryableError(f"the answer has no meta_info: {str(answer)[:200]}")
        tokens = meta.get("output_token_logprobs")  # (logprob, token id, ...) each
        if tokens is None:
            raise UserError(
                "the server's completions have no output_token_logprobs. Use SGLang's own address, because routers may "
                "drop them"
            )
        finish = meta.get("finish_reason")
        if isinstance(finish, dict):
            finish = finish.get("type")
        ids = [token[1] for token in tokens]
        values = [token[0] for token in tokens]
        return build_completion(ids, values, finish, _parse_version(meta.get("weight_version")))

    def stale_weights(self, client: HttpClient, version: int, seconds: float) -> str | None:
        return None

    def load(self, call: Call, directory: Path, version: int) -> None:
        for post in self.pause:
            call(*post)
        try:
            answer = call("/update_weights_from_disk", {"model_path": str(directory), "weight_version": str(version)})
            self._check_success(answer, directory, "message")
        finally:
            for post in self.resume:
                call(*post)

    def adapter_problem(self, call: Call) -> str | None:
        try:
            information = call("/get_server_info", None)
        except ClientError:
            return None  # a release that does not report it
        if isinstance(information, dict) and not information.get("enable_lora", True):
            return "the server was started without --enable-lora"
        return None

    def load_adapter(self, call: Call, adapter: AdapterVersion) -> str:
        try:
            answer = call("/load_lora_adapter", {"lora_name": adapter.name, "lora_path": str(adapter.directory)})
            self._check_success(answer, adapter.directory, "error_message")
        except (ClientError, UserError) as error:
            raise UserError(with_advice(error, self.start_hint(adapter.rank))) from error
        return adapter.name

    def unload_adapter(self, call: Call, name: str) -> None:
        call("/unload_lora_adapter", {"lora_name": name}, tries=1)

    def start_hint(self, rank: int) -> str:
        return f"Start the server with --enable-lora --max-lora-rank {rank} --lora-target-modules all"

    @staticmethod
    def _check_success(answer: Any, directory: Path, key: str) -> None:
        """Raise UserError if the server did not load `directory`. `key` has the server's reason."""
        if not isinstance(answer, dict):
            raise UserError(f"the server did not confirm that it loaded {directory}: {str(answer)[:200]}")
        if not answer.get("success"):
            raise UserError(f"the server could not load {directory}: {answer.get(key)}")


Dialect = Vllm | Sglang
DIALECTS: dict[str, Dialect] = {"vllm": Vllm(), "sglang": Sglang(), "dtrain": Dtrain()}


def detect_dialect(client: HttpClient, kind: str, seconds: float) -> tuple[Dialect, list[str]]:
    """Return the dialect of a server, and the names of its models.

    Args:
        client: Calls the server.
        kind: A key of DIALECTS, or "auto" for the owner of the server's models.
        seconds: Time limit.

    Raises:
        RetryableError: If the server does not answer, or lists no model.
        ClientError: If the server refuses the call.
        UserError: If the owner of its models is unknown.
    """
    models = read_models(client.request("/v1/models", None, seconds))
    names = [str(model.get("id")) for model in models]
    if kind != "auto":
        return DIALECTS[kind], names or ["default"]
    if not models:
        raise RetryableError("/v1/models lists no model")
    owner = str(models[0].get("owned_by"))
    if owner not in DIALECTS:
        kinds = ", ".join(DIALECTS)
        raise UserError(
            f'{client.url}: the owner of its models is "{owner}", which is not one of {kinds}. Set grpo.server.kind to '
            "the one whose protocol it has"
        )
    return DIALECTS[owner], names


def derived_seed(request: Request) -> int:
    """Return a seed below 2**63 for servers without prompt_index. Samples of one prompt have consecutive seeds."""
    return random_key(request.seed, request.prompt_index) % 2**62 + request.sample_index


def sampling_fields(sampling: SamplingParams) -> dict[str, Any]:
    """Return the fields of a request that have the same names in vLLM and SGLang."""
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "min_p": sampling.min_p,
        "repetition_penalty": 1.0,  # otherwise the model's generation_config.json could set it
        "stop": list(sampling.stop),
        "stop_token_ids": list(sampling.stop_ids),
    }


def vllm_sampling_fields(requests: Sequence[Request]) -> dict[str, Any]:
    """Return the fields of a request to vLLM that determine the samples of one prompt."""
    first = requests[0]
    return {
        **sampling_fields(first.sampling),
        "n": len(requests),
        "max_tokens": first.sampling.max_new_tokens,
        "ignore_eos": True,  # only the stop tokens of the request count
        "seed": derived_seed(first),  # vLLM adds the index of each sample
    }


def build_completion(ids: list[int], logprobs: list[float], finish: Any, version: int | None) -> Completion:
    """Build a completion from the fields of a server's answer, after checking them.

    Args:
        ids: Token ids, [s].
        logprobs: Their log-probabilities, [s].
        finish: Why the completion ended: "stop" or "length".
        version: Version of the weights, if the server reports it.

    Raises:
        RetryableError: If it ended for another reason, such as an abort.
        UserError: If ids or log-probabilities are wrong.

    Example:
        >>> build_completion([5, 7], [-0.5, -1], "stop", None).logprobs
        [-0.5, -1.0]
    """
    if finish not in ("stop", "length"):
        raise RetryableError(f'the finish_reason of a completion is {finish!r}, not "stop" or "length"')
    if len(ids) != len(logprobs):
        raise UserError(f"a completion has {len(ids)} tokens and {len(logprobs)} log-probabilities")
    for token in ids:
        if type(token) is not int or not 0 <= token < 2**31:
            raise UserError(f"a completion has {token!r} as a token id")
    for value in logprobs:
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise UserError(f"a completion has {value!r} as a log-probability")
    return Completion(ids, [float(value) for value in logprobs], finish, version)


def read_choices(answer: Any, count: int) -> list[Any]:
    """Return the choices of an answer in OpenAI's form, sorted by their index.

    Raises:
        RetryableError: If the answer has no choices.
        UserError: If there are not `count` of them.
    """
    choices = answer.get("choices") if isinstance(answer, dict) else None
    if not isinstance(choices, list):
        raise RetryableError(f"the answer has no choices: {str(answer)[:200]}")
    if len(choices) != count:
        raise UserError(f"the server returned {len(choices)} completions instead of n={count}")
    return sorted(choices, key=choice_index)


def choice_index(choice: dict[str, Any]) -> int:
    return int(choice["index"])


def _parse_token_ids(tokens: Sequence[str]) -> list[int]:
    """Return the ids in tokens such as "token_id:5". Raises UserError for tokens that are text."""
    if not all(token.startswith(VLLM_TOKEN_PREFIX) for token in tokens):
        raise UserError("the server's completions have no token ids, only text. Use vLLM 0.10.2 or later")
    return [int(token.removeprefix(VLLM_TOKEN_PREFIX)) for token in tokens]


def _parse_version(value: Any) -> int | None:
    """Return a version of the weights as a number. None for other texts, such as "default"."""
    if isinstance(value, int | str) and str(value).isdecimal():
        return int(value)
    return None


class ImageRoute:
    """How to request completions of prompts with images.

    Attributes:
        path: Path of the route.
        server: Key of the dialect that reads the answers.
        needs_ids: Whether the request has token ids with one placeholder for each image.
    """

    path: str
    server: str
    needs_ids = False

    def supports(self, prompt: ImagePrompt) -> bool:
        """Return whether the route can request completions of `prompt`."""
        return not self.needs_ids or prompt.short_ids is not None

    def body(self, requests: Sequence[Request], model: str, adapter: str | None = None) -> Post:
        """Return the path and body that request samples of one prompt, as `Vllm.body`. Raises UserError."""
        raise NotImplementedError

    def check(self, answer: Any, request: Request) -> None:
        """Check that the server read the prompt of the request.

        Raises:
            UserError: If it read another prompt.
            ClientError: With the status of a missing route, if it ignored the images.
        """

    def read(self, answer: Any, requests: Sequence[Request]) -> list[Completion]:
        """Read the completions, as `Vllm.read`."""
        return DIALECTS[self.server].read(answer, requests)


class VllmRoute(ImageRoute):
    """A route of vLLM, whose answers have the token ids that it read.

    Attributes:
        fix: Additional advice for the error if the server read other ids than the trainer's. It continues a sentence.
    """

    server = "vllm"
    fix = ""

    def missing_ids_error(self) -> Exception:
        """Return the error for an answer without the token ids."""
        return UserError("the server's answer has no prompt_token_ids. Use vLLM 0.10.2 or later")

    def check(self, answer: Any, request: Request) -> None:
        prompt = _image_prompt_of(request)
        ids = answer.get("prompt_token_ids")
        if ids is None:
            raise self.missing_ids_error()
        difference = prompt.difference(request.prompt, ids)
        if difference is not None:
            raise UserError(
                f"{OTHER_PROMPT_READ}{difference}. {FIX_IMAGE_PROCESSOR}{_pixel_limit_note(prompt)}{self.fix}"
            )


class VllmTokens(VllmRoute):
    """Token ids and images to vLLM."""

    path = "/inference/v1/generate"
    needs_ids = True

    def missing_ids_error(self) -> Exception:
        return ClientError(404, "this release of vLLM ignores images next to token ids")

    def body(self, requests: Sequence[Request], model: str, adapter: str | None = None) -> Post:
        prompt = _image_prompt_of(requests[0])
        assert prompt.short_ids is not None, "`supports` checks it"
        return self.path, {
            "model": adapter or model,
            "token_ids": list(prompt.short_ids),
            "content_parts": [{"type": "image_url", "url": uri} for uri in prompt.uris()],
            "sampling_params": {**vllm_sampling_fields(requests), "logprobs": 0},
            "return_token_ids": True,
        }


class VllmChat(VllmRoute):
    """Conversations with images to vLLM.

    The limit on the pixels of images must be set when the server is started (--mm-processor-kwargs), because vLLM does
    not accept it in a request.
    """

    path = "/v1/chat/completions"
    fix = f", {FIX_CHAT_TEMPLATE}"

    def body(self, requests: Sequence[Request], model: str, adapter: str | None = None) -> Post:
        prompt = _image_prompt_of(requests[0])
        body = {
            "model": adapter or model,
            "messages": prompt.chat(),
            **vllm_sampling_fields(requests),
            "logprobs": True,
            "top_logprobs": 0,
            "return_tokens_as_token_ids": True,
            "return_token_ids": True,
        }
        if prompt.tools is not None:
            body |= {"tools": list(prompt.tools), "tool_choice": "none"}
        return self.path, body


class SglangTokens(ImageRoute):
    """Token ids and images to SGLang."""

    path = "/generate"
    server = "sglang"
    needs_ids = True

    def body(self, requests: Sequence[Request], model: str, adapter: str | None = None) -> Post:
        prompt = _image_prompt_of(requests[0])
        assert prompt.short_ids is not None, "`supports` checks it"
        _, body = DIALECTS["sglang"].body(requests, model, adapter)
        num_samples = len(requests)
        return self.path, body | {
            "input_ids": [list(prompt.short_ids)] * num_samples,
            "image_data": [prompt.uris()] * num_samples,
        }

    def check(self, answer: Any, request: Request) -> None:
        first = answer[0] if isinstance(answer, list) else answer
        count = first["meta_info"].get("prompt_tokens")
        if count not in (None, len(request.prompt)):
            raise UserError(
                f"{OTHER_PROMPT_READ}{count} tokens there, {len(request.prompt)} here. {FIX_IMAGE_PROCESSOR}"
            )


class DtrainTokens(ImageRoute):
    """Token ids and images to `dtrain serve`, which refuses a prompt whose image tokens are not its images'."""

    path = "/v1/completions"
    server = "dtrain"

    def body(self, requests: Sequence[Request], model: str, adapter: str | None = None) -> Post:
        prompt = _image_prompt_of(requests[0])
        _, body = DIALECTS["dtrain"].body(requests, model, adapter)
        body["images"] = prompt.uris()
        if prompt.max_pixels is not None:
            body["mm_processor_kwargs"] = {"max_pixels": prompt.max_pixels}
        return self.path, body


ROUTES: Mapping[str, Sequence[ImageRoute]] = {
    "vllm": (VllmTokens(), VllmChat()),
    "sglang": (SglangTokens(),),
    "dtrain": (DtrainTokens(),),
}


def _image_prompt_of(request: Request) -> ImagePrompt:
    assert request.image_prompt is not None, "requests without images use their dialect"
    return request.image_prompt


def _pixel_limit_note(prompt: ImagePrompt) -> str:
    """Return the option with which vLLM uses the run's limit of pixels. "" if the run has none."""
    if prompt.max_pixels is None:
        return ""
    fields = json.dumps({"max_pixels": prompt.max_pixels})
    return f", with data.image_max_pixels={prompt.max_pixels} (--mm-processor-kwargs '{fields}')"
