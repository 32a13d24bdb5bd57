"""Completions in one call: of token ids by a model at hand, and of text by a directory's model."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dtrain import models
from dtrain.adapters.lora import build_with_adapters
from dtrain.base import hub
from dtrain.base.errors import UserError
from dtrain.base.hardware import choose_device_type
from dtrain.base.model_directory import ADAPTER_CONFIG, CONFIG, TOKENIZER_FILE, has_weights, is_adapter_directory
from dtrain.base.ranks import Ranks
from dtrain.checkpoint.dcp.store import CheckpointStore, locate_step, step_of
from dtrain.checkpoint.dcp.training_state import SCORE_WEIGHT, model_tensors, training_tensors
from dtrain.checkpoint.huggingface.merged import RunFacts, step_of_adapter, training_precision_of_base
from dtrain.checkpoint.huggingface.model_files import read_saved_step
from dtrain.checkpoint.huggingface.quantized import convert_to_4_bits
from dtrain.checkpoint.huggingface.read import candidate_names, read_weights
from dtrain.checkpoint.huggingface.safetensor_files import WeightFiles
from dtrain.checkpoint.peft.config import ADAPTER, base_of, read_adapter_config
from dtrain.checkpoint.peft.tensors import peft_names
from dtrain.data.formats.prompts import Prompt, PromptEncoder, PromptOptions
from dtrain.data.images.reader import ImageReader
from dtrain.data.text.template import ChatTemplate, choose_template
from dtrain.data.text.tokenizer import Tokenizer
from dtrain.inference.chats import NO_IMAGES, ChatEncoder, image_part, vision_problem
from dtrain.inference.engine import Engine
from dtrain.inference.request import Request, SamplingParams
from dtrain.models.building import linear_shapes
from dtrain.models.common.config import is_in_vision_tower
from dtrain.models.common.decoder import CausalLM
from dtrain.models.common.micro_batch import Images
from dtrain.policy.options import DTYPES, choose_precision


def generate(
    model: CausalLM,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    eos_ids: Sequence[int],
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    seed: int = 0,
) -> list[list[int]]:
    """Return completions of `prompts` (token ids of any lengths), in order; each ends with the EOS token that ended it.

    model: one of dtrain's, whole on one device (not sharded). temperature 0 is greedy. A draw depends on seed, the
    prompt's index and the position in the completion, not on what else is in the batch. No collective. Raises
    UserError: an empty prompt, an id beyond the vocabulary, settings out of range.
    """
    sampling = SamplingParams(max_new_tokens, temperature, top_k, top_p, stop_ids=tuple(eos_ids))
    requests = [Request(prompt, sampling, seed, index) for index, prompt in enumerate(prompts)]
    return [completion.ids for completion in Engine(model).generate(requests)]


def generate_text(
    directory: Path,
    prompts: Sequence[str],
    *,
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    seed: int = 0,
    raw: bool = False,
    images: Sequence[Path] = (),
    dtype: str = "auto",
    device: str = "auto",
) -> Iterator[str]:
    """Yield the completion of each prompt as text, without special tokens, in order, each once those before it are out.

    directory: in Hugging Face's layout, or an adapter's in PEFT's; or a run's, of which `export/` serves where it is of
    the newest checkpoint, else that checkpoint; or a checkpoint's. A prompt is a user's message in the model's chat
    template, or with `raw`, or where the model has no template, the beginning of a text. images: files whose images
    stand in front of each prompt. dtype and device: as `train.dtype` and `launch.device` of a recipe. Raises UserError.
    """
    torch_device, directory = choose_device(device), Path(directory)
    parts = [image_part(Path(image)) for image in images]
    if parts and raw:
        raise UserError("images stand in a chat, and raw is without one: leave raw out")
    if parts and (problem := image_problem(directory)):
        raise UserError(f"--image: {problem}")
    loaded = load(directory, choose_dtype(dtype, torch_device), torch_device, vision=bool(parts))
    tokenizer, template = loaded.tokenizer, None if raw else loaded.template()
    if parts and template is None:
        raise UserError(f"--image: images stand in a chat, and {directory} has no chat template")
    sampling = SamplingParams(max_new_tokens, temperature, top_k, top_p, stop_ids=tuple(tokenizer.eos_ids))
    engine = Engine(loaded.model)
    if parts and template is not None:
        encoded = _with_images(loaded, directory, template, parts, prompts)
    else:
        encoded = ((encode_prompt(tokenizer, prompt, template), None) for prompt in prompts)
    tickets = [engine.add(Request(ids, sampling, seed, index, images=own)) for index, (ids, own) in enumerate(encoded)]
    done: dict[int, list[int]] = {}
    for ticket in tickets:
        while ticket not in done:
            done.update((ended, completion.ids) for ended, completion in engine.step())
        yield loaded.decode(done.pop(ticket))


def _with_images(
    loaded: "LoadedModel",
    directory: Path,
    template: ChatTemplate,
    parts: Sequence[dict[str, Any]],
    prompts: Sequence[str],
) -> Iterator[tuple[list[int], Images | None]]:
    """Yield token ids and images of each prompt, a user's message with the parts of images in front of its text."""
    length, pixels = loaded.model.config.max_position_embeddings, None
    chats = loaded.chats(template, length, directory)
    for prompt in prompts:
        content = [*parts, {"type": "text", "text": prompt}]
        chat = chats.encode(Prompt([{"role": "user", "content": content}]))
        images = chats.images_of(chat, pixels)
        pixels = None if images is None else images.pixels  # the same for all prompts
        yield chat.ids, images


class LoadedModel(NamedTuple):
    """Model and tokenizer of a directory."""

    model: CausalLM
    tokenizer: Tokenizer

    def template(self, file: str | None = None, variables: Mapping[str, Any] | None = None) -> ChatTemplate | None:
        """Return the chat template of the tokenizer's directory, or of `file`; as `choose_template`."""
        return choose_template(self.tokenizer.directory, self.tokenizer, file, variables)

    def chats(self, template: ChatTemplate | None, length: int, directory: Path) -> ChatEncoder:
        """Return the encoder of chats of at most `length` tokens for the model, which was loaded from `directory`, with
        its images if it has a vision tower."""
        has_tower = self.model.config.vision is not None
        images = ImageReader(self.tokenizer, model_files(directory)) if has_tower else None
        options = PromptOptions(length)
        encoder = PromptEncoder(self.tokenizer, template, max_length=length, options=options, images=images)
        return ChatEncoder(encoder, NO_IMAGES if has_tower else image_problem(directory) or NO_IMAGES)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`, without special tokens."""
        return self.tokenizer.decode(ids, skip_special_tokens=True)


def load(
    directory: Path, dtype: torch.dtype, device: torch.device, classifiers: bool = False, vision: bool = False
) -> LoadedModel:
    """Return model and tokenizer of a Hugging Face directory, or of a hub's id that is in the cache; an adapter's in
    PEFT's layout (with its base; the tokenizer is its own, else the base's), a run's directory or a checkpoint's.
    vision: with the tower for images. Raises UserError, for a classifier too unless `classifiers`."""
    if (held := _whole_in(directory)) is not None:
        model = _model_in(held, dtype, device, 0 if classifiers else None, vision)
        return LoadedModel(model, _tokenizer(held))
    store, step, source = _step_in(directory)
    return LoadedModel(_model_of(store, step, source, dtype, device, vision), Tokenizer.from_directory(source))


def model_files(directory: Path) -> Path:
    """Return the directory of config.json and of the image processor of the model that `load` gives. Raises
    UserError."""
    held = _whole_in(directory)
    if held is None:
        return _step_in(directory)[2]
    return base_of(held) if is_adapter_directory(held) else held


def image_problem(directory: Path) -> str | None:
    """Return why `load` cannot give a model that takes images; None where it can. Raises UserError where it gives none
    at all."""
    files = model_files(directory)
    if problem := vision_problem(files):
        return problem
    model = models.build(models.read_config(files, vision=True), device="meta")
    if _whole_in(directory) is not None:
        stored = WeightFiles(files).stored
        tower = (name for name in model_tensors(model) if is_in_vision_tower(name))
        if any(stored.keys().isdisjoint(candidate_names(model, [name])) for name in tower):
            return f"the weights in {files} have no whole vision tower"
        return None
    store, step, source = _step_in(directory)
    base, is_whole = (
        RunFacts.from_run(source.parent).path,
        training_tensors(model).keys() <= store.tensor_specs(step).keys(),
    )
    if not is_whole and (base is None or not has_weights(base)):
        return f"the vision tower is not in {store.path(step)}, and there are no weights at model.path={base}"
    return None


def _whole_in(directory: Path) -> Path | None:
    """Return the directory of the model, or the adapter, that stands for `directory`; None where a step of a run
    does."""
    directory = hub.find_model_directory(directory)
    directory = step_of_adapter(directory) or directory
    for candidate in (directory, directory / "export"):
        holds_model = (candidate / CONFIG).is_file() or is_adapter_directory(candidate)
        if holds_model and (candidate == directory or _is_newest(candidate)):
            return candidate
    return None


def _step_in(directory: Path) -> tuple[CheckpointStore, int, Path]:
    """Return the store and the number of a run's step, and the directory of the run's model files."""
    directory = hub.find_model_directory(directory)
    directory = step_of_adapter(directory) or directory
    is_run = (directory / "checkpoints").is_dir()
    if not is_run and step_of(directory.absolute()) is None:
        raise UserError(
            f"{directory} holds neither a model (config.json), nor an adapter ({ADAPTER_CONFIG}), nor a run "
            "(checkpoints/ or export/), nor a checkpoint"
        )
    store, step = locate_step(directory, Ranks(single_process=True))
    return store, step, store.directory.parent / "model"


def _model_in(directory: Path, dtype: torch.dtype, device: torch.device, labels: int | None, vision: bool) -> CausalLM:
    """Return the model of a Hugging Face directory; a run's exported adapter gets its base as the run trained on it."""
    if not is_adapter_directory(directory):
        return models.from_pretrained(directory, dtype, device, labels=labels, vision=vision)
    in_4_bits, kept = training_precision_of_base(directory)
    model = models.from_pretrained(directory, dtype, device, nf4=in_4_bits, labels=labels, vision=vision)
    config = read_adapter_config(directory)
    tensors = model_tensors(model).items()
    _round([tensor for name, tensor in tensors if not peft_names(name, config, model.config)], kept)
    return model


@torch.no_grad()
def _round(tensors: Iterable[Tensor], dtype: torch.dtype | None) -> None:
    """Round tensors in place to the values of `dtype`; None leaves them."""
    for tensor in tensors:
        if dtype is not None and tensor.is_floating_point():
            tensor.copy_(tensor.to(dtype))


def _tokenizer(directory: Path) -> Tokenizer:
    if not is_adapter_directory(directory):
        return Tokenizer.from_directory(directory)
    base = base_of(directory)
    return Tokenizer.from_directory(directory if (directory / TOKENIZER_FILE).is_file() else base, base)


def _model_of(
    store: CheckpointStore, step: int, source: Path, dtype: torch.dtype, device: torch.device, vision: bool
) -> CausalLM:
    """Return the model of a run's step: tensors that are not in the step are read from the run's base."""
    sizes = store.tensor_specs(step)
    if SCORE_WEIGHT in sizes:
        raise UserError(
            f"{store.path(step)} is of a model that rates or classifies texts, and writes none; "
            "`dtrain export` makes a directory of it, which `dtrain serve` takes"
        )
    folder, facts = store.path(step) / ADAPTER, RunFacts.from_run(store.directory.parent)
    adapter = read_adapter_config(folder) if is_adapter_directory(folder) else None
    model = build_with_adapters(models.read_config(source, vision=vision), adapter, dtype, "meta")
    if adapter is not None and facts.path is not None:
        whole = adapter.select_saved_modules(linear_shapes(model.config))
        convert_to_4_bits(model, facts.path, dtype, nf4=facts.nf4, except_for=whole)
    model.to_empty(device="cpu")
    model.tie_weights()
    tensors = training_tensors(model)
    held = {name: tensor for name, tensor in tensors.items() if name in sizes}
    if (facts.freezes or vision) and len(held) < len(tensors):  # a run on texts has no tower
        state = store.read_state(step)
        read_weights(model, facts.base_directory(state))
        if facts.freezes:
            _round([tensor for name, tensor in tensors.items() if name not in held], facts.training_dtype(state))
        tensors = held
    store.load(step, tensors, allow_extra=True, cast=tensors)
    return model.to(device)


def _is_newest(export: Path) -> bool:
    """Return whether the run that `export` lies in holds no checkpoint beyond it, nor one of another training."""
    store = CheckpointStore(export.parent / "checkpoints", Ranks(single_process=True))
    step, held = store.latest(), read_saved_step(export)
    if step is None or is_adapter_directory(export):  # whose base may be in the step alone
        return step is None
    save = store.read_state(step).get("save")
    return held.get("save") == save and (save is not None or held.get("step") == step)


def encode_prompt(tokenizer: Tokenizer, prompt: str, template: ChatTemplate | None) -> list[int]:
    """Return token ids of a user's message, ready for the answer; of the bare text without a template."""
    if template is None:
        return tokenizer.encode(prompt, add_special_tokens=True)
    text = template.render([{"role": "user", "content": prompt}], add_generation_prompt=True)
    return tokenizer.encode(text)


def choose_device(name: str) -> torch.device:
    """Return the device of this process: the first CUDA device, or the CPU.

    Args:
        name: auto, cpu or cuda.

    Raises:
        UserError: If the name is unknown, or if there is no such device.
    """
    return torch.device(choose_device_type("device", name))


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the dtype that a run with `train.dtype=name` computes in there. Raises UserError."""
    if name not in ("auto", *DTYPES):
        raise UserError(f"dtype={name} is unknown; choose auto, {', '.join(DTYPES)}")
    return choose_precision(name, device.type).compute
