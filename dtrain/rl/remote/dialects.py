"""Dialects of vLLM, SGLang and `dtrain serve`: requests for completions and notices of new weights. No torch.

vllm    /v1/completions with token ids in and `return_token_ids`, `return_tokens_as_token_ids` and `logprobs: 0` for
        token ids and logprobs out (vLLM's openai/completion/protocol.py). Start it with --logprobs-mode
        processed_logprobs: its default gives logprobs before the temperature and the filters. New weights from a
        directory: collective_rpc reload_weights, which needs VLLM_SERVER_DEV_MODE=1 (docs/training/async_rl.md). An
        adapter: load_lora_adapter (docs/features/lora.md), without load_inplace: it stays on the stored request, so
        that every step of a completion reads the files again (SkyRL#1606), and keys of the prompts are cached by name.
sglang  /generate with `input_ids` and `return_logprob`; ids and logprobs are meta_info.output_token_logprobs
        (docs/basic_usage/sampling_params.md). Its logprobs are after the temperature, before top-k, top-p and min-p:
        leave those off. New weights: update_weights_from_disk (docs/advanced_features/sglang_for_rl.md). An adapter:
        load_lora_adapter, and `lora_path`, its name, with each prompt (docs/advanced_features/lora.ipynb).
dtrain  vLLM's completions with `prompt_index` and `sample_index`, so that the draws are the native engine's; each
        choice says the `weight_version` that it came from. New weights: SGLang's words. An adapter: vLLM's, one that
        is loaded in place of itself: completions under way go on with it, and say their oldest version.

A dialect's `body` asks for samples of one prompt: requests that differ in their sample_index alone, which ascends by 1.
`broadcast_kind`: how it takes broadcast weights, by a process group that dtrain makes or by vLLM's weight transfer;
`pause`, `resume`: the posts before and after an update there; `clear_caches`: those before `resume` that drop what it
has cached. `has_named_versions`: whether each version of an adapter has a name of its own, by which a completion's
version is known; `supports_dora`, `supports_vision_adapters`: whether it takes DoRA, and adapters of vision towers.
`keeps_image_features`: whether features of images outlive the weights that they are of. `routed_fields`: the body's
further fields that ask for experts; `routed`: of each completion in `read`'s order what the answer says of them, for
`rl.routed`; `routed_start`: how to start a server that reports them. `load_adapter` gives the name to ask for. `read`
raises RetryableError for an answer that may be better next time, and UserError, with the fix, for one that a setting of
the server explains.

Prompts with images have other routes, whose answers also have the ids that the server read:

vllm    /inference/v1/generate: token ids with one placeholder for each image, and `content_parts` with the images
        (vllm-project/vllm#51478), which --enable-scale-out opens. Without it, and for models that write more around an
        image than tokens of its own, /v1/chat/completions, where template and tokenizer are the server's. Either tells
        the ids that it read, with `return_token_ids`.
sglang  /generate: token ids with placeholders, and `image_data` (sgl-project/sglang#26555). It tells how many tokens it
        read. Each sample has a seed of its own, and so the images again.
dtrain  /v1/completions: the prompt's token ids, and `images`, whose tokens it counts.
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
from dtrain.rl.remote.http_client import ClientError, HttpClient, RetryableError

Post = tuple[str, dict[str, Any]]  # path and body
VLLM_TOKEN_PREFIX = "token_id:"
VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that --max-lora-rank takes
ADAPTER_NAME = "trained"  # an adapter's name where all versions share one

OTHER_PROMPT_READ = "it read another prompt than the trainer has: "
FIX_IMAGE_PROCESSOR = "Serve the run's very model directory, whose image processor is read there too"
FIX_CHAT_TEMPLATE = "with the run's chat template (--chat-template, without --default-chat-template-kwargs)"


class Call(Protocol):
    """A POST, or without a body a GET; the answer, without `is_json` in any form. tries: at most, None for the engine's
    number. Raises ClientError, and UserError where no try is answered."""

    def __call__(
        self, path: str, body: dict[str, Any] | None, *, is_json: bool = True, tries: int | None = None
    ) -> Any: ...


@dataclass(frozen=True)
class AdapterVersion:
    """A version of an adapter, in a directory of PEFT's layout. name: no other version's, of no run."""

    directory: Path
    version: int
    name: str
    rank: int


class Vllm:
    name = "vllm"
    broadcast_kind = "transfer"
    pause: Sequence[Post] = [("/pause?mode=keep&clear_cache=false", {})]
    resume: Sequence[Post] = [("/resume", {})]
    # Keys of the old weights, those of completions under way too, and what the old tower made of images.
    clear_caches: Sequence[Post] = [
        ("/reset_prefix_cache?reset_running_requests=true", {}),
        ("/reset_encoder_cache", {}),
    ]
    has_named_versions = True
    supports_dora = supports_vision_adapters = keeps_image_features = False
    routed_fields: dict[str, Any] = {}  # all its answers have them, or none
    routed_start = "start it with --enable-return-routed-experts (vLLM 0.21 or later)"

    def body(self, requests: Sequence[Request], model: str, adapter: str | None = None) -> Post:
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
        return [self._completion(choice) for choice in read_choices(answer, len(requests))]

    def routed(self, answer: Any) -> list[Any]:
        experts = [choice.get("routed_experts") for choice in sorted(answer["choices"], key=choice_index)]
        prompt = answer.get("prompt_routed_experts")  # of releases that report a prompt's apart
        return experts if prompt is None else [(prompt, [] if value is None else value) for value in experts]

    def _completion(self, choice: dict[str, Any]) -> Completion:
        logprobs = choice.get("logprobs") or {}
        values, ids = logprobs.get("token_logprobs"), choice.get("token_ids")
        if (entries := logprobs.get("content")) is not None:  # of conversations
            values = [entry["logprob"] for entry in entries]
        tokens: Sequence[str] | None = ids if ids is not None else logprobs.get("tokens")
        if values is None or tokens is None:
            raise UserError(
                "its completions carry no logprobs (or no token ids): use vLLM 0.10.2 or later, with "
                "--max-logprobs at its default or above, or another kind of server"
            )
        if ids is None:
            if not all(token.startswith(VLLM_TOKEN_PREFIX) for token in tokens):
                raise UserError("it answers in text, not token ids: use vLLM 0.10.2 or later")
            ids = [int(token.removeprefix(VLLM_TOKEN_PREFIX)) for token in tokens]
        return build_completion(ids, values, choice.get("finish_reason"), _version(choice.get("weight_version")))

    def load(self, call: Call, directory: Path, version: int) -> None:
        was_paused = all(self._try(call, *post) for post in self.pause)
        try:
            arguments = {"method": "reload_weights", "kwargs": {"weights_path": str(directory)}}
            if not self._try(call, "/collective_rpc", arguments):
                raise UserError("it has no /collective_rpc: start it with VLLM_SERVER_DEV_MODE=1")
            self._try(call, "/update_weight_version", {"new_version": str(version)})
            for post in self.clear_caches:
                self._try(call, *post)
        finally:
            for post in self.resume if was_paused else []:
                call(*post)

    def stale_weights(self, client: HttpClient, version: int, seconds: float) -> str | None:
        """Return what it holds where these are older weights than `version`, as after a restart; None where it has
        them, where completions tell their version, and where the release cannot say. Raises RetryableError."""
        try:
            held = client.request("/weight_info", None, seconds).get("weight_version")
        except ClientError:
            return None
        if (number := _version(held)) is not None:
            return f"version {number} of the weights" if number < version else None
        return "the weights that it began with" if held == "default" else None

    def adapter_problem(self, call: Call) -> str | None:
        """Return why it takes no adapter, by how it was started; None where it takes them."""
        try:
            call("/v1/load_lora_adapter", {"lora_name": "", "lora_path": ""})  # refused, where the route is there
        except ClientError as error:
            return "it has no /v1/load_lora_adapter" if error.status in (404, 405) else None
        return None

    def load_adapter(self, call: Call, adapter: AdapterVersion) -> str:
        fields = {"lora_name": adapter.name, "lora_path": str(adapter.directory)}
        try:
            call("/v1/load_lora_adapter", fields, is_json=False)
        except (ClientError, UserError) as error:
            raise UserError(f"{error}; to take this adapter, {self.start_hint(adapter.rank)}") from error
        return adapter.name

    def unload_adapter(self, call: Call, name: str) -> None:
        call("/v1/unload_lora_adapter", {"lora_name": name}, is_json=False, tries=1)

    def start_hint(self, rank: int) -> str:
        """Return how to start a server that takes adapters of this rank."""
        max_rank = next((allowed for allowed in VLLM_RANKS if allowed >= rank), rank)
        return f"start it with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and --enable-lora --max-lora-rank {max_rank}"

    @staticmethod
    def _try(call: Call, path: str, body: dict[str, Any]) -> bool:
        """Post `body`; return whether the server has `path`: releases differ in the routes beside that which loads."""
        try:
            call(path, body)
        except ClientError as error:
            if error.status not in (404, 405):
                raise
            return False
        return True


class Dtrain(Vllm):
    name = "dtrain"
    broadcast_kind = "broadcast"
    pause = clear_caches = resume = ()  # it decodes nothing from the first bucket of an update to the last
    has_named_versions = False
    supports_dora = supports_vision_adapters = True
    keeps_image_features = False
    routed_fields = {"return_routed_experts": True}
    routed_start = "it must serve a mixture of experts"

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
            return str(error) if error.status in (404, 405, 409) else None  # 409: it has no room for one
        return None

    def load_adapter(self, call: Call, adapter: AdapterVersion) -> str:
        fields = {"lora_name": ADAPTER_NAME, "lora_path": str(adapter.directory), "weight_version": adapter.version}
        call("/v1/load_lora_adapter", {**fields, "load_inplace": True})
        return ADAPTER_NAME

    def start_hint(self, rank: int) -> str:
        return "start it with --control DIR, which holds grpo.server.weights_dir, and --api-key-file FILE"


class Sglang:
    name = "sglang"
    broadcast_kind = "broadcast"
    pause: Sequence[Post] = [("/pause_generation", {"mode": "retract"})]  # what is under way is read anew
    clear_caches: Sequence[Post] = ()  # an update does
    resume: Sequence[Post] = [("/continue_generation", {})]
    has_named_versions = True
    supports_dora = supports_vision_adapters = False
    keeps_image_features = True  # `flush_cache` leaves those of images that it has read
    routed_fields = {"return_routed_experts": True}
    routed_start = "start it with --enable-return-routed-experts"

    def body(self, requests: Sequence[Request], model: str, adapter: str | None = None) -> Post:
        # One prompt many times, each with a seed of its own, rather than `n`: the server shares the prompt's keys.
        body = {
            "input_ids": [list(requests[0].prompt)] * len(requests),
            "sampling_params": [
                {
                    "max_new_tokens": request.sampling.max_new_tokens,
                    **sampling_fields(request.sampling),
                    "ignore_eos": not request.sampling.stop_ids,  # with it SGLang heeds no stop token
                    "sampling_seed": derived_seed(request) % 2**31,  # heeded with --enable-deterministic-inference
                }
                for request in requests
            ],
            "return_logprob": True,
            "logprob_start_len": -1,
        }
        return "/generate", body if adapter is None else {**body, "lora_path": adapter}

    def read(self, answer: Any, requests: Sequence[Request]) -> list[Completion]:
        answers = answer if isinstance(answer, list) else [answer]
        if len(answers) != len(requests):
            raise UserError(f"asked for {len(requests)} completions, it gave {len(answers)}")
        return [self._completion(item) for item in answers]

    def routed(self, answer: Any) -> list[Any]:
        return [item["meta_info"].get("routed_experts") for item in (answer if isinstance(answer, list) else [answer])]

    def _completion(self, answer: Any) -> Completion:
        meta = answer.get("meta_info") if isinstance(answer, dict) else None
        if not isinstance(meta, dict):
            raise RetryableError(f"an answer without meta_info: {str(answer)[:200]}")
        drawn = meta.get("output_token_logprobs")
        if drawn is None:
            raise UserError(
                "its completions carry no output_token_logprobs: is it SGLang, and not a router that drops them?"
            )
        finish = meta.get("finish_reason")
        finish = finish.get("type") if isinstance(finish, dict) else finish
        ids, values = [token[1] for token in drawn], [token[0] for token in drawn]
        return build_completion(ids, values, finish, _version(meta.get("weight_version")))

    def stale_weights(self, client: HttpClient, version: int, seconds: float) -> str | None:
        return None

    def load(self, call: Call, directory: Path, version: int) -> None:
        for post in self.pause:
            call(*post)
        try:
            answer = call("/update_weights_from_disk", {"model_path": str(directory), "weight_version": str(version)})
            if not answer.get("success"):
                raise UserError(f"it could not load {directory}: {answer.get('message')}")
        finally:
            for post in self.resume:
                call(*post)

    def adapter_problem(self, call: Call) -> str | None:
        try:
            information = call("/get_server_info", None)
        except ClientError:
            return None  # a release that does not say
        has = information.get("enable_lora", True) if isinstance(information, dict) else True
        return None if has else "it was started without --enable-lora"

    def load_adapter(self, call: Call, adapter: AdapterVersion) -> str:
        try:
            answer = call("/load_lora_adapter", {"lora_name": adapter.name, "lora_path": str(adapter.directory)})
            if not answer.get("success"):
                raise UserError(f"it could not load {adapter.directory}: {answer.get('error_message')}")
        except (ClientError, UserError) as error:
            raise UserError(f"{error}; to take this adapter, {self.start_hint(adapter.rank)}") from error
        return adapter.name

    def unload_adapter(self, call: Call, name: str) -> None:
        call("/unload_lora_adapter", {"lora_name": name}, tries=1)

    def start_hint(self, rank: int) -> str:
        return f"start it with --enable-lora --max-lora-rank {rank} --lora-target-modules all"


Dialect = Vllm | Sglang
DIALECTS: dict[str, Dialect] = {"vllm": Vllm(), "sglang": Sglang(), "dtrain": Dtrain()}


def detect_dialect(client: HttpClient, kind: str, seconds: float) -> tuple[Dialect, list[str]]:
    """Return the dialect of `kind`, for auto that of the models' owner, and the models' names. Raises RetryableError,
    ClientError and UserError."""
    answer = client.request("/v1/models", None, seconds)
    models = answer.get("data") if isinstance(answer, dict) else None
    names = [str(model.get("id")) for model in models or []]
    if kind != "auto":
        return DIALECTS[kind], names or ["default"]
    if not models:
        raise RetryableError("no model at /v1/models")
    owner = str(models[0].get("owned_by"))
    if owner not in DIALECTS:
        kinds = ", ".join(DIALECTS)
        raise UserError(f"{client.url}: its models are {owner}'s, neither of {kinds}; say which it is like")
    return DIALECTS[owner], names


def derived_seed(request: Request) -> int:
    """Return a seed below 2**63 for servers that know no prompt_index: samples of one prompt follow one another."""
    return random_key(request.seed, request.prompt_index) % 2**62 + request.sample_index


def sampling_fields(sampling: SamplingParams) -> dict[str, Any]:
    """Return the fields that vLLM and SGLang name alike."""
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "min_p": sampling.min_p,
        "repetition_penalty": 1.0,  # a model's generation_config.json may say otherwise
        "stop": list(sampling.stop),
        "stop_token_ids": list(sampling.stop_ids),
    }


def vllm_sampling_fields(requests: Sequence[Request]) -> dict[str, Any]:
    """Return the fields by which vLLM draws the samples of one prompt."""
    first = requests[0]
    return {
        **sampling_fields(first.sampling),
        "n": len(requests),
        "max_tokens": first.sampling.max_new_tokens,
        "ignore_eos": True,  # the stop tokens are those of the request
        "seed": derived_seed(first),  # vLLM adds a sample's index
    }


def build_completion(ids: list[int], logprobs: list[float], finish: Any, version: int | None) -> Completion:
    if finish not in ("stop", "length"):
        raise RetryableError(f"a completion that ended by {finish!r}, not by stop or length")
    if len(ids) != len(logprobs):
        raise UserError(f"a completion of {len(ids)} tokens has {len(logprobs)} logprobs")
    if not all(type(token) is int and 0 <= token < 2**31 for token in ids):
        raise UserError("a completion has a token id that is no id")
    if not all(isinstance(value, int | float) and math.isfinite(value) for value in logprobs):
        raise UserError("a completion has a logprob that is no number")
    return Completion(ids, [float(value) for value in logprobs], finish, version)


def read_choices(answer: Any, count: int) -> list[Any]:
    """Return the choices of an answer in OpenAI's form, by their index. Raises RetryableError where it has none, and
    UserError where they are not `count`."""
    choices = answer.get("choices") if isinstance(answer, dict) else None
    if not isinstance(choices, list):
        raise RetryableError(f"an answer without choices: {str(answer)[:200]}")
    if len(choices) != count:
        raise UserError(f"asked for n={count} completions, it gave {len(choices)}")
    return sorted(choices, key=choice_index)


def choice_index(choice: dict[str, Any]) -> int:
    return int(choice["index"])


def _version(value: Any) -> int | None:
    return int(value) if isinstance(value, int | str) and str(value).isdecimal() else None


class ImageRoute:
    """Way to ask a kind of server for completions of prompts with images. server: whose answers it reads. needs_ids:
    whether it asks with one placeholder for each image."""

    path: str
    server: str
    needs_ids = False

    def supports(self, prompt: ImagePrompt) -> bool:
        """Return whether it can ask for this prompt."""
        return not self.needs_ids or prompt.short_ids is not None

    def body(self, requests: Sequence[Request], model: str, adapter: str | None = None) -> Post:
        """Return the path and the body that ask for samples of one prompt, as a dialect's. Raises UserError."""
        raise NotImplementedError

    def check(self, answer: Any, request: Request) -> None:
        """Raise UserError where the server read another prompt than the request's, and ClientError, as for a route that
        is not there, where it passed the images over."""

    def read(self, answer: Any, requests: Sequence[Request]) -> list[Completion]:
        """Return the completions, as a dialect does."""
        return DIALECTS[self.server].read(answer, requests)


class VllmRoute(ImageRoute):
    """Route of vLLM, which tells the token ids that it read. fix: what else makes them those of the trainer."""

    server = "vllm"
    fix = ""

    def without_ids(self) -> Exception:
        """Return the error for an answer that does not tell the token ids."""
        return UserError("its answer has no prompt_token_ids: use vLLM 0.10.2 or later")

    def check(self, answer: Any, request: Request) -> None:
        prompt, ids = _image_prompt_of(request), answer.get("prompt_token_ids")
        if ids is None:
            raise self.without_ids()
        if (difference := prompt.difference(request.prompt, ids)) is not None:
            raise UserError(
                f"{OTHER_PROMPT_READ}{difference}. {FIX_IMAGE_PROCESSOR}{_pixel_bound_note(prompt)}{self.fix}"
            )


class VllmTokens(VllmRoute):
    """Token ids and images to vLLM."""

    path = "/inference/v1/generate"
    needs_ids = True

    def without_ids(self) -> Exception:
        return ClientError(404, "this release of vLLM has no images beside token ids")

    def body(self, requests: Sequence[Request], model: str, adapter: str | None = None) -> Post:
        prompt = _image_prompt_of(requests[0])
        assert prompt.short_ids is not None, "`takes` says so"
        return self.path, {
            "model": adapter or model,
            "token_ids": list(prompt.short_ids),
            "content_parts": [{"type": "image_url", "url": uri} for uri in prompt.uris()],
            "sampling_params": {**vllm_sampling_fields(requests), "logprobs": 0},
            "return_token_ids": True,
        }


class VllmChat(VllmRoute):
    """Conversations with images to vLLM. Its --mm-processor-kwargs bounds the images: it refuses those of a request."""

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
        assert prompt.short_ids is not None, "`takes` says so"
        _, body = DIALECTS["sglang"].body(requests, model, adapter)
        several = len(requests)
        return self.path, body | {
            "input_ids": [list(prompt.short_ids)] * several,
            "image_data": [prompt.uris()] * several,
        }

    def check(self, answer: Any, request: Request) -> None:
        first = answer[0] if isinstance(answer, list) else answer
        count = first["meta_info"].get("prompt_tokens")
        if count not in (None, len(request.prompt)):
            raise UserError(
                f"{OTHER_PROMPT_READ}it has {count} tokens there and {len(request.prompt)} here. {FIX_IMAGE_PROCESSOR}"
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
    assert request.image_prompt is not None, "requests without images go by their dialect"
    return request.image_prompt


def _pixel_bound_note(prompt: ImagePrompt) -> str:
    """Return how vLLM is told the run's bound of pixels, where there is one."""
    if prompt.max_pixels is None:
        return ""
    fields = json.dumps({"max_pixels": prompt.max_pixels})
    return f", with data.image_max_pixels={prompt.max_pixels} (--mm-processor-kwargs '{fields}')"
