"""Checks of dtrain's client with prompts that have images, against a server of another project."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
import transformers
from server_checks import Report, engine_of, finish, grpo
from server_runs import DIRECTORY, failure, log_of, steps

from dtrain import models
from dtrain.data.rows.rows import Cursor
from dtrain.data.sources.sources import open_rows
from dtrain.data.text.tokenizer import Tokenizer
from dtrain.inference.chats import ImagePrompt
from dtrain.inference.engine import Engine
from dtrain.inference.images import build_images
from dtrain.inference.request import Completion, Request, SamplingParams
from dtrain.models.common.decoder import CausalLM
from dtrain.rl.collect import read_prompts
from dtrain.rl.remote.dialects import ROUTES
from tests import pictures

LENGTH = 128


def make_image_model(root: Path) -> Path:
    """Return a tiny Qwen3-VL of sizes that vLLM's kernels take, with random weights."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [6, 5, 5], "mrope_interleaved": True}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    text = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "rope_parameters": rope, **heads}
    vision = {"depth": 2, "hidden_size": 64, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64}
    vision |= {"patch_size": 4, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
    config = transformers.Qwen3VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=False)
    directory = pictures.write_model(root / "qwen3-vl", config=config)
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    named = {"video_token": "<|video_pad|>", "vision_start_token": "<|vision_start|>"}
    named |= {"vision_end_token": "<|vision_end|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings | named))
    processor = json.loads((directory / "preprocessor_config.json").read_text())
    video = {**processor, "video_processor_type": "Qwen3VLVideoProcessor"}
    del video["image_processor_type"]
    (directory / "preprocessor_config.json").write_text(
        json.dumps({**processor, "processor_class": "Qwen3VLProcessor"})
    )
    (directory / "video_preprocessor_config.json").write_text(json.dumps(video))
    return directory


class Pictured:
    """Prompts with one picture, two, and none, and a model of dtrain's in float32 that reads them."""

    def __init__(self, root: Path, directory: Path):
        recipe = pictures.picture_recipe(root, f"model.path={directory}", "method=grpo", f"data.max_length={LENGTH}")
        tokenizer = Tokenizer.from_directory(directory)
        rows = open_rows(recipe.data, tokenizer=tokenizer, progress=False, print_line=lambda line: None, kind="prompts")
        self.prompts = read_prompts(rows, Cursor(), 12)
        self.model: CausalLM = models.from_pretrained(directory, torch.float32, vision=True).eval()

    def requests(self, sampling: SamplingParams, samples: int, is_remote: bool = True) -> list[Request]:
        return [
            Request(prompt.ids, sampling, 5, prompt.index, sample, **fields)
            for prompt in self.prompts
            for fields in (prompt.images_for(is_remote),)
            for sample in range(samples)
        ]

    def greedy(self, sampling: SamplingParams) -> list[Completion]:
        return Engine(self.model).generate(self.requests(sampling, 1, is_remote=False))

    @torch.no_grad()
    def gap(self, requests: Sequence[Request], completions: Sequence[Completion], swaps: bool = False) -> float:
        """Return the largest distance of log-probabilities of completions behind images from the model's. swaps: with
        the pixels upside down."""
        distances = [0.0]
        for request, completion in zip(requests, completions, strict=True):
            prompt = self.prompts[request.prompt_index]
            if prompt.reader is None or not prompt.images:
                continue
            ids = torch.tensor([*request.prompt, *completion.ids])
            (row,) = prompt.reader.image_streams_of_rows([[(ids, prompt.images)]])
            pixels = row["pixels"].flip(0) if swaps else row["pixels"]
            images = build_images(row, pixels, [record.layout.grid for record in prompt.images])
            logits = self.model(ids[None], images=images)[0, len(request.prompt) - 1 : -1]
            logprobs = (logits / request.sampling.temperature).log_softmax(-1)
            mine = logprobs.gather(-1, torch.tensor(completion.ids)[:, None])[:, 0]
            distances.append((mine - torch.tensor(completion.logprobs)).abs().max().item())
        return max(distances)


def check_images(report: Report, root: Path, model: Path, server) -> None:
    """Token ids with images, conversations, greedy completions, seeds, and runs that train the tower."""
    pictured = Pictured(root, model)
    chat = ROUTES["vllm"][1:]
    for route in ("ids", "chat"):
        engine = engine_of(server)
        if route == "chat":
            engine.servers[0].image_routes = chat
        for temperature in (1.0, 0.7):
            requests = pictured.requests(SamplingParams(10, temperature), 3)
            drawn = engine.generate(requests)
            compared = f"temperature {temperature:g}: server's and trainer's, behind images"
            report.near(f"images {route} logprobs", compared, pictured.gap(requests, drawn))
        report.apart(f"images {route} logprobs", "the same for other pixels", pictured.gap(requests, drawn, swaps=True))
        same = sum(one.ids == other.ids for one, other in zip(drawn, engine.generate(requests), strict=True))
        figure = f"{same} of {len(drawn)}"
        report.holds(f"images {route} seeds", "samples drawn again that are the same", same == len(drawn), figure)
        sampling = SamplingParams(10, 0.0)
        pairs = list(zip(engine.generate(pictured.requests(sampling, 1)), pictured.greedy(sampling), strict=True))
        same = sum(one.ids == other.ids for one, other in pairs)
        compared = "completions that are the native engine's, token for token"
        report.holds(f"images {route} greedy", compared, same == len(pairs), f"{same} of {len(pairs)}")
    first = pictured.requests(SamplingParams(4), 1)[0]
    assert isinstance(first.image_prompt, ImagePrompt)
    other = replace(first, prompt=[*first.prompt, 5])
    report.refused("images", "another prompt", lambda: engine_of(server).generate([other]), "no token there and 5 here")

    data = (f"data.train.path={root / 'rows.jsonl'}", f"data.max_length={LENGTH}")
    for name, overrides in {
        "adapter": ("lora={rank: 4, alpha: 12}",),  # of the weights that the server began with
        "tower": (DIRECTORY, "train.vision=all"),
        "tower ahead": (DIRECTORY, "train.vision=all", "grpo.max_off_policy_steps=4"),
    }.items():
        status = finish(grpo(root, name, model, [server], *data, *overrides))
        report.holds(f"images {name}", "8 steps, the run ends well", status == 0, failure(root, name, status))
        if "ahead" not in name:
            largest = max((row["mismatch_kl"] for row in steps(root, name)), default=float("inf"))
            report.near(f"images {name}", "mismatch_kl of sampler and trainer, at most", largest, 1e-7)
    finish(grpo(root, "bounded", model, [server], *data, DIRECTORY, "data.image_max_pixels=256"))
    fix = "--mm-processor-kwargs '{\"max_pixels\": 256}'"
    report.tells("images", "a bound of pixels that the server has not", log_of(root, "bounded"), fix)
