"""Servers that speak vLLM's and SGLang's protocols, written from their documentation, with faults on demand.

vLLM: openai/completion/protocol.py (token_ids, tokens as `token_id:N`), serve/dev/rlhf (pause, resume, collective_rpc),
openai/models/serving.py (adapters, which it answers in plain text).
SGLang: docs/basic_usage/sampling_params.md (generate), docs/advanced_features/sglang_for_rl.md and lora.ipynb.
"""

import json
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class Refusal(Exception):
    """An answer of `status` that says `message`."""

    def __init__(self, status: int, message: str):
        self.status, self.message = status, message


# A fault gets the handler and the body; it answers itself and returns True, or returns what to change in the answer.
Fault = Callable[[BaseHTTPRequestHandler, dict], bool | None]


def drawn(prompt: list[int], seed: int, most: int) -> tuple[list[int], list[float]]:
    """Return the tokens and log-probabilities that these servers "draw", a function of prompt and seed."""
    ids = [(sum(prompt) * 31 + seed * 7 + position * position) % 60 + 2 for position in range(most)]
    return ids, [-0.5 - 0.01 * token for token in ids]


class Fake:
    """A server in a thread. calls: (path, body) of every POST. faults: one for each of the next completions. routed:
    what is said of the experts of so many tokens."""

    owner = "nobody"
    routed: Callable[[int], object] | None = None

    def __init__(self):
        self.calls: list[tuple[str, dict]] = []
        self.faults: list[Fault] = []
        self.version = "default"
        self.lock = threading.Lock()
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, format, *arguments):
                pass

            def do_GET(self):
                try:
                    answer = fake.get(self.path)
                except Refusal as error:
                    return self.answer(error.status, fake.problem(error.message))
                self.answer(404 if answer is None else 200, answer or {"detail": "Not Found"})

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"{}")
                fake.post(self, self.path, body)

            def answer(self, status, body):
                self.write(status, json.dumps(body).encode())

            def write(self, status, data):
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        class Quiet(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 256

            def handle_error(self, request, client_address):
                pass

        self.server = Quiet(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def get(self, path):
        return {"data": [{"id": "policy", "owned_by": self.owner}]} if path == "/v1/models" else {"tp_size": 1}

    def post(self, handler, path, body):
        with self.lock:
            self.calls.append((path, body))
            fault = self.faults.pop(0) if self.faults and path == self.completions else None
        if fault is not None and fault(handler, body):
            return
        try:
            answer = self.complete(body) if path == self.completions else self.other(path, body)
        except Refusal as error:
            return handler.answer(error.status, self.problem(error.message))
        if isinstance(answer, str):
            return handler.write(200, answer.encode())
        handler.answer(404 if answer is None else 200, answer or {"detail": "Not Found"})

    def problem(self, message):
        return {"error": {"message": message}}

    def close(self):
        self.server.shutdown()
        self.server.server_close()


class FakeVllm(Fake):
    owner = "vllm"
    completions = "/v1/completions"
    routes = ("/pause", "/resume", "/collective_rpc", "/reset_prefix_cache")
    token_ids = True  # False: a release before 0.10.2
    logprobs = True
    samples = 0  # how many more or fewer than asked for
    short = False
    max_lora_rank: int | None = None  # None: started without runtime updates of adapters
    max_loras = 1  # that stay in memory
    reads: Callable[[list[str]], list[int]] | None = None  # the prompt with these images, of a model that takes some
    scale_out = True  # whether it was started with --enable-scale-out
    passes_over = False  # images beside token ids
    weight_version: str | None = None  # None: a release that cannot say; "default": of the weights it began with

    def __init__(self):
        super().__init__()
        self.adapters: dict[str, str] = {}  # directories, by the names that are known
        self.resident: list[str] = []  # names, the one that came last is the last

    def read_images(self, path, body):
        """An answer to a prompt with images, in the form of chats and of token ids alike."""
        if path == "/inference/v1/generate" and not self.scale_out:
            raise Refusal(403, "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out.")
        if path == "/inference/v1/generate" and not body:
            raise Refusal(400, "token_ids: Field required")
        if path == "/inference/v1/generate":
            uris = [part["url"] for part in body["content_parts"]]
            sampling, is_told = body["sampling_params"], not self.passes_over
            assert sampling["logprobs"] == 0 and body["return_token_ids"]
        else:
            parts = [part for message in body["messages"] for part in message["content"] if isinstance(part, dict)]
            uris = [part["image_url"]["url"] for part in parts if part["type"] == "image_url"]
            sampling, is_told = body, True
            assert body["logprobs"] is True and body["top_logprobs"] == 0 and body["return_token_ids"]
        assert sampling["ignore_eos"] and sampling["repetition_penalty"] == 1.0
        prompt, choices = self.reads(uris), []
        for index in range(sampling["n"]):
            ids, logprobs = drawn(prompt, sampling["seed"] + index, sampling["max_tokens"])
            content = [{"logprob": value} for value in logprobs]
            choices.append(
                {"index": index, "finish_reason": "length", "token_ids": ids, "logprobs": {"content": content}}
            )
        return {"choices": choices[::-1], "prompt_token_ids": prompt if is_told else None}

    def get(self, path):
        if path == "/weight_info":
            return self.weight_version and {"weight_version": self.weight_version}
        answer = super().get(path)
        return {"data": answer["data"] + [{"id": name, "owned_by": "vllm"} for name in self.adapters]}

    def complete(self, body):
        if body["model"] != "policy" and body["model"] not in self.adapters:
            raise Refusal(404, f"The model `{body['model']}` does not exist.")
        assert body["return_tokens_as_token_ids"] and body["return_token_ids"] and body["logprobs"] == 0
        assert body["ignore_eos"] and body["repetition_penalty"] == 1.0
        choices, apart = [self.choice(body, index) for index in range(body["n"] + self.samples)], None
        for choice in choices:
            if isinstance(told := choice["routed_experts"], tuple):
                apart, choice["routed_experts"] = told
        return {"object": "text_completion", "choices": choices[::-1], "usage": {}, "prompt_routed_experts": apart}

    def choice(self, body, index):
        ids, logprobs = drawn(body["prompt"], body["seed"] + index, body["max_tokens"])
        finish = "length"
        stops = [ids.index(token) for token in body["stop_token_ids"] if token in ids]
        if stops:
            ids, logprobs, finish = ids[: min(stops) + 1], logprobs[: min(stops) + 1], "stop"
        if self.short:
            ids, logprobs = ids[:-1], logprobs[:-1]
        choice = {"index": index, "text": "...", "finish_reason": finish, "logprobs": None}
        choice["routed_experts"] = self.routed and self.routed(len(body["prompt"]) + len(ids))
        if self.logprobs:
            choice["logprobs"] = {"tokens": [f"token_id:{token}" for token in ids], "token_logprobs": logprobs}
        return {**choice, "token_ids": ids} if self.token_ids else choice

    def other(self, path, body):
        if self.reads is not None and path in ("/inference/v1/generate", "/v1/chat/completions"):
            return self.read_images(path, body)
        if self.max_lora_rank is not None and path == "/v1/load_lora_adapter":
            return self.load(body["lora_name"], body["lora_path"], self.max_lora_rank)
        if self.max_lora_rank is not None and path == "/v1/unload_lora_adapter":
            return self.unload(body["lora_name"])
        if path == "/update_weight_version" and self.weight_version is not None:
            self.weight_version = body["new_version"]
            return {"success": True, "new_version": self.weight_version}
        return {} if path.split("?")[0] in self.routes else None

    def load(self, name, path, most):
        if not name or not path:
            raise Refusal(400, "Both 'lora_name' and 'lora_path' must be provided.")
        if name in self.adapters:
            raise Refusal(400, f"The lora adapter '{name}' has already been loaded.")
        config = json.loads((Path(path) / "adapter_config.json").read_text())
        assert (Path(path) / "adapter_model.safetensors").is_file()
        if config["use_dora"] or config["modules_to_save"]:
            raise Refusal(400, "vLLM does not yet support DoRA.")
        if config["r"] > most:
            raise Refusal(500, f"LoRA rank {config['r']} is greater than max_lora_rank {most}.")
        self.adapters[name] = path
        self.resident = [*self.resident, name][-self.max_loras :]
        return f"Success: LoRA adapter '{name}' added successfully."

    def unload(self, name):
        if name not in self.adapters:
            raise Refusal(404, f"The lora adapter '{name}' cannot be found.")
        if name not in self.resident:
            raise Refusal(500, f"Failed to remove lora adapter '{name}' from the engine.")
        self.resident.remove(name)
        del self.adapters[name]
        return f"Success: LoRA adapter '{name}' removed successfully."


class FakeSglang(Fake):
    owner = "sglang"
    completions = "/generate"
    succeeds = True
    enable_lora = True
    prompt_tokens: int | None = None  # that it says to have read

    def __init__(self):
        super().__init__()
        self.adapters: dict[str, str] = {}

    def get(self, path):
        return {**super().get(path), "enable_lora": self.enable_lora}

    def problem(self, message):
        return {"success": False, "error_message": message, "loaded_adapters": self.adapters}

    def complete(self, body):
        assert body.get("lora_path") is None or body["lora_path"] in self.adapters
        assert body["return_logprob"] and len(body["input_ids"]) == len(body["sampling_params"])
        is_asked = body.get("return_routed_experts") and self.routed
        pairs = zip(body["input_ids"], body["sampling_params"], strict=True)
        return [self.one(*pair, self.routed if is_asked else None) for pair in pairs]

    def one(self, prompt, sampling, routed):
        ids, logprobs = drawn(prompt, sampling["sampling_seed"], sampling["max_new_tokens"])
        triples = [[value, token, None] for value, token in zip(logprobs, ids, strict=True)]
        meta = {"finish_reason": {"type": "length", "length": len(ids)}, "weight_version": self.version}
        meta |= {} if self.prompt_tokens is None else {"prompt_tokens": self.prompt_tokens}
        meta |= {"routed_experts": routed(len(prompt) + len(ids))} if routed else {}
        return {"text": "...", "output_ids": ids, "meta_info": {**meta, "output_token_logprobs": triples}}

    def other(self, path, body):
        if path == "/update_weights_from_disk":
            if self.succeeds:
                self.version = body["weight_version"]
            return {"success": self.succeeds, "message": "no such layer"}
        if path in ("/load_lora_adapter", "/unload_lora_adapter"):
            return self.change(path, body)
        return {"message": "ok"}

    def change(self, path, body):
        if not self.enable_lora:
            raise Refusal(400, "LoRA is not enabled. Please set `--enable-lora` to enable LoRA.")
        if path == "/load_lora_adapter":
            assert body.keys() == {"lora_name", "lora_path"}
            self.adapters[body["lora_name"]] = body["lora_path"]
        elif self.adapters.pop(body["lora_name"], None) is None:
            raise Refusal(400, "LoRA adapter with that name is not loaded")
        return {"success": True, "error_message": "", "loaded_adapters": self.adapters}


def status(code: int) -> Fault:
    def fault(handler, body):
        handler.answer(code, {"error": {"message": "the cloud passes"}})
        return True

    return fault


def half_answer(handler, body):
    """As many bytes as were promised do not come."""
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    handler.wfile.write(b'{"choices": [')
    handler.close_connection = True
    return True


def no_json(handler, body):
    handler.send_response(200)
    handler.send_header("Content-Length", "6")
    handler.end_headers()
    handler.wfile.write(b"<html>")
    return True


def hang_up(handler, body):
    handler.close_connection = True
    return True


def aborted(handler, body):
    handler.answer(200, {"choices": [{"index": i, "finish_reason": "abort", "token_ids": [], "logprobs":
                                      {"tokens": [], "token_logprobs": []}} for i in range(body["n"])]})  # fmt: skip
    return True


def slow(seconds: float) -> Fault:
    def fault(handler, body):
        time.sleep(seconds)

    return fault
