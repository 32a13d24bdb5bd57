"""Routes by which servers take prompts with images, and what they tell of the ids that they then read. No torch.

vllm    /inference/v1/generate: token ids with one placeholder for each image, and `content_parts` with the images
        (vllm-project/vllm#51478), which --enable-scale-out opens. Without it, and for models that write more around an
        image than tokens of its own, /v1/chat/completions, where template and tokenizer are the server's. Either tells
        the ids that it read, with `return_token_ids`.
sglang  /generate: token ids with placeholders, and `image_data` (sgl-project/sglang#26555). It tells how many tokens it
        read. Each sample has a seed of its own, and so the images again.
dtrain  /v1/completions: the prompt's token ids, and `images`, whose tokens it counts.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from dtrain.base.errors import UserError
from dtrain.inference.image_prompts import ImagePrompt
from dtrain.inference.request import Completion, Request
from dtrain.rl.remote.dialects import DIALECTS, Post, draws_of_vllm
from dtrain.rl.remote.http_client import ClientError

OTHER_PROMPT = "it read another prompt than the trainer has: "
FIX_IMAGES = "Serve the run's very model directory, whose image processor is read there too"
FIX_CHAT = "with the run's chat template (--chat-template, without --default-chat-template-kwargs)"


class ImageRoute:
    """Way to ask a kind of server for completions of prompts with images. server: whose answers it reads. needs_ids:
    whether it asks with one placeholder for each image."""

    path: str
    server: str
    needs_ids = False

    def takes(self, prompt: ImagePrompt) -> bool:
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
        prompt, ids = _prompt(request), answer.get("prompt_token_ids")
        if ids is None:
            raise self.without_ids()
        if (difference := prompt.difference(request.prompt, ids)) is not None:
            raise UserError(f"{OTHER_PROMPT}{difference}. {FIX_IMAGES}{_bound(prompt)}{self.fix}")


class VllmTokens(VllmRoute):
    """Token ids and images to vLLM."""

    path = "/inference/v1/generate"
    needs_ids = True

    def without_ids(self) -> Exception:
        return ClientError(404, "this release of vLLM has no images beside token ids")

    def body(self, requests: Sequence[Request], model: str, adapter: str | None = None) -> Post:
        prompt = _prompt(requests[0])
        assert prompt.short_ids is not None, "`takes` says so"
        return self.path, {
            "model": adapter or model,
            "token_ids": list(prompt.short_ids),
            "content_parts": [{"type": "image_url", "url": uri} for uri in prompt.uris()],
            "sampling_params": {**draws_of_vllm(requests), "logprobs": 0},
            "return_token_ids": True,
        }


class VllmChat(VllmRoute):
    """Conversations with images to vLLM. Its --mm-processor-kwargs bounds the images: it refuses those of a request."""

    path = "/v1/chat/completions"
    fix = f", {FIX_CHAT}"

    def body(self, requests: Sequence[Request], model: str, adapter: str | None = None) -> Post:
        prompt = _prompt(requests[0])
        body = {
            "model": adapter or model,
            "messages": prompt.chat(),
            **draws_of_vllm(requests),
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
        prompt = _prompt(requests[0])
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
            raise UserError(f"{OTHER_PROMPT}it has {count} tokens there and {len(request.prompt)} here. {FIX_IMAGES}")


class DtrainTokens(ImageRoute):
    """Token ids and images to `dtrain serve`, which refuses a prompt whose image tokens are not its images'."""

    path = "/v1/completions"
    server = "dtrain"

    def body(self, requests: Sequence[Request], model: str, adapter: str | None = None) -> Post:
        prompt = _prompt(requests[0])
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


def _prompt(request: Request) -> ImagePrompt:
    assert request.image_prompt is not None, "requests without images go by their dialect"
    return request.image_prompt


def _bound(prompt: ImagePrompt) -> str:
    """Return how vLLM is told the run's bound of pixels, where there is one."""
    if prompt.max_pixels is None:
        return ""
    fields = json.dumps({"max_pixels": prompt.max_pixels})
    return f", with data.image_max_pixels={prompt.max_pixels} (--mm-processor-kwargs '{fields}')"
