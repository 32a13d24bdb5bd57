"""Completions in one call, and loading of a model with its tokenizer.

`generate` completes token ids with a given model, `generate_text` completes text with the model of a directory. `load`
accepts all kinds of directories: a model in Hugging Face's layout, an adapter in PEFT's, a run, and a checkpoint. The
weights of a run are in its `export/` if that is of the newest checkpoint, and in the checkpoint otherwise.
"""

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
    """Return completions of prompts. No collective.

    A sampled token depends on the seed, the prompt's index and the position in the completion, and not on the other
    prompts.

    Args:
        model: One of dtrain's models, complete on one device.
        prompts: Token ids, of any lengths.
        max_new_tokens: A completion ends after this number of tokens.
        eos_ids: Tokens that end a completion, which includes them.
        temperature: 0 selects the token with the highest probability.
        top_k: Keep the k tokens with the highest probability. None: all.
        top_p: Keep the smallest set of tokens whose probability reaches p.
        seed: Seed of the random numbers.

    Returns:
        Token ids of each completion, in order.

    Raises:
        UserError: If a prompt is empty or has an id outside the vocabulary, or a setting is out of range.
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
    """Yield the completion of each prompt as text, without special tokens, in order.

    Prompts are decoded together. A completion is yielded as soon as it and all completions before it have ended.

    Args:
        directory: A model, an adapter, a run or a checkpoint (see the module).
        prompts: A user's message each, for which the model's chat template is used. With `raw`, or if the model has no
            template, the beginning of a text.
        max_new_tokens: A completion ends after this number of tokens.
        temperature: 0 selects the token with the highest probability.
        top_k: Keep the k tokens with the highest probability. None: all.
        top_p: Keep the smallest set of tokens whose probability reaches p.
        seed: Seed of the random numbers.
        raw: Do not use the chat template.
        images: Image files, which are put before the text of each prompt.
        dtype: Dtype of the model, with the values of `train.dtype`.
        device: Device of the model, with the values of `launch.device`.

    Raises:
        UserError: If the model cannot be loaded, or does not fit the arguments.
    """
    torch_device, directory = choose_device(device), Path(directory)
    parts = [image_part(Path(image)) for image in images]
    if parts and raw:
        raise UserError("images can be used only in a chat, and raw completes a text without one. Leave raw out")
    if parts:
        problem = image_problem(directory)
        if problem:
            raise UserError(f"--image: {problem}")
    loaded = load(directory, choose_dtype(dtype, torch_device), torch_device, vision=bool(parts))
    tokenizer = loaded.tokenizer
    template = None if raw else loaded.template()
    if parts and template is None:
        raise UserError(f"--image: images can be used only in a chat, and {directory} has no chat template")
    sampling = SamplingParams(max_new_tokens, temperature, top_k, top_p, stop_ids=tuple(tokenizer.eos_ids))
    engine = Engine(loaded.model)
    tickets: list[int] = []
    if parts and template is not None:
        encoded = _with_images(loaded, directory, template, parts, prompts)
        for index, (ids, prompt_images) in enumerate(encoded):
            tickets.append(engine.add(Request(ids, sampling, seed, index, images=prompt_images)))
    else:
        for index, prompt in enumerate(prompts):
            ids = encode_prompt(tokenizer, prompt, template)
            tickets.append(engine.add(Request(ids, sampling, seed, index)))
    done: dict[int, list[int]] = {}
    for ticket in tickets:
        while ticket not in done:
            for ended, completion in engine.step():
                done[ended] = completion.ids
        yield loaded.decode(done.pop(ticket))


def _with_images(
    loaded: "LoadedModel",
    directory: Path,
    template: ChatTemplate,
    parts: Sequence[dict[str, Any]],
    prompts: Sequence[str],
) -> Iterator[tuple[list[int], Images | None]]:
    """Yield token ids and images of each prompt, with the images before its text."""
    pixels = None
    chats = loaded.chats(template, loaded.model.config.max_position_embeddings, directory)
    for prompt in prompts:
        content = [*parts, {"type": "text", "text": prompt}]
        chat = chats.encode(Prompt([{"role": "user", "content": content}]))
        images = chats.images_of(chat, pixels)
        pixels = None if images is None else images.pixels  # the same images for all prompts, decoded once
        yield chat.ids, images


class LoadedModel(NamedTuple):
    """Model and tokenizer of a directory.

    Attributes:
        model: The model.
        tokenizer: The tokenizer.
    """

    model: CausalLM
    tokenizer: Tokenizer

    def template(self, file: str | None = None, variables: Mapping[str, Any] | None = None) -> ChatTemplate | None:
        """Return the chat template of the tokenizer's directory, or of `file`. Arguments as in `choose_template`."""
        return choose_template(self.tokenizer.directory, self.tokenizer, file, variables)

    def chats(self, template: ChatTemplate | None, length: int, directory: Path) -> ChatEncoder:
        """Return the encoder of chats for the model, with a reader of images if it has a vision tower.

        Args:
            template: Chat template.
            length: The largest number of tokens of a prompt.
            directory: Directory from which the model was loaded.
        """
        has_tower = self.model.config.vision is not None
        images = ImageReader(self.tokenizer, model_files(directory)) if has_tower else None
        options = PromptOptions(length)
        encoder = PromptEncoder(self.tokenizer, template, max_length=length, options=options, images=images)
        problem = None if has_tower else image_problem(directory)
        return ChatEncoder(encoder, problem or NO_IMAGES)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`, without special tokens."""
        return self.tokenizer.decode(ids, skip_special_tokens=True)


def load(
    directory: Path, dtype: torch.dtype, device: torch.device, classifiers: bool = False, vision: bool = False
) -> LoadedModel:
    """Load model and tokenizer.

    Args:
        directory: A model in Hugging Face's layout or a hub's id that is in the cache, an adapter in PEFT's layout
            (loaded with its base; its tokenizer is its own, or else the base's), a run, or a checkpoint.
        dtype: Dtype of the model.
        device: Device of the model.
        classifiers: Whether classifiers are accepted.
        vision: Whether to load the vision tower.

    Raises:
        UserError: If there is no such model, or it is a classifier and these are not accepted.
    """
    model_directory = _find_model_directory(directory)
    if model_directory is not None:
        model = _load_model(model_directory, dtype, device, 0 if classifiers else None, vision)
        return LoadedModel(model, _tokenizer(model_directory))
    store, step, source = _find_step(directory)
    return LoadedModel(_load_step(store, step, source, dtype, device, vision), Tokenizer.from_directory(source))


def model_files(directory: Path) -> Path:
    """Return the directory with the config.json and the image processor of the model that `load` returns.

    Raises:
        UserError: If there is no model.
    """
    model_directory = _find_model_directory(directory)
    if model_directory is None:
        _, _, source = _find_step(directory)
        return source
    return base_of(model_directory) if is_adapter_directory(model_directory) else model_directory


def image_problem(directory: Path) -> str | None:
    """Return the reason why `load` cannot return a model that uses images. None if it can.

    Raises:
        UserError: If there is no model.
    """
    files = model_files(directory)
    problem = vision_problem(files)
    if problem:
        return problem
    model = models.build(models.read_config(files, vision=True), device="meta")
    if _find_model_directory(directory) is not None:
        stored = WeightFiles(files).stored
        for name in model_tensors(model):
            if is_in_vision_tower(name) and stored.keys().isdisjoint(candidate_names(model, [name])):
                return f"the weights in {files} have no complete vision tower"
        return None
    store, step, source = _find_step(directory)
    base = RunFacts.from_run(source.parent).path
    is_complete = training_tensors(model).keys() <= store.tensor_specs(step).keys()
    if not is_complete and (base is None or not has_weights(base)):
        return f"the vision tower is not in {store.path(step)}, and there are no weights at model.path={base}"
    return None


def _find_model_directory(directory: Path) -> Path | None:
    """Return the directory with the model or adapter: `directory` itself, or its `export/` if it is a run.

    Returns:
        The directory. None if the weights are in a checkpoint.
    """
    directory = hub.find_model_directory(directory)
    directory = step_of_adapter(directory) or directory
    for candidate in (directory, directory / "export"):
        holds_model = (candidate / CONFIG).is_file() or is_adapter_directory(candidate)
        if holds_model and (candidate == directory or _is_newest(candidate)):
            return candidate
    return None


def _find_step(directory: Path) -> tuple[CheckpointStore, int, Path]:
    """Find the checkpoint of a run's directory, or of one of its checkpoints' directories.

    Returns:
        (the run's checkpoints, the number of the step, the directory of the run's model files).

    Raises:
        UserError: If `directory` is neither a run nor a checkpoint.
    """
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


def _load_model(
    directory: Path, dtype: torch.dtype, device: torch.device, labels: int | None, vision: bool
) -> CausalLM:
    """Load the model of a Hugging Face directory.

    For the exported adapter of a run, the base is loaded with the precision that it had in training: in NF4, or rounded
    to the dtype in which the run stored it.
    """
    if not is_adapter_directory(directory):
        return models.from_pretrained(directory, dtype, device, labels=labels, vision=vision)
    in_4_bits, base_dtype = training_precision_of_base(directory)
    model = models.from_pretrained(directory, dtype, device, nf4=in_4_bits, labels=labels, vision=vision)
    config = read_adapter_config(directory)
    base_tensors = []
    for name, tensor in model_tensors(model).items():
        if not peft_names(name, config, model.config):
            base_tensors.append(tensor)
    _round(base_tensors, base_dtype)
    return model


@torch.no_grad()
def _round(tensors: Iterable[Tensor], dtype: torch.dtype | None) -> None:
    """Round tensors in place to values that `dtype` can represent. None leaves them unchanged."""
    if dtype is None:
        return
    for tensor in tensors:
        if tensor.is_floating_point():
            tensor.copy_(tensor.to(dtype))


def _tokenizer(directory: Path) -> Tokenizer:
    """Return the tokenizer of a model's or an adapter's directory."""
    if not is_adapter_directory(directory):
        return Tokenizer.from_directory(directory)
    base = base_of(directory)
    return Tokenizer.from_directory(directory if (directory / TOKENIZER_FILE).is_file() else base, base)


def _load_step(
    store: CheckpointStore, step: int, source: Path, dtype: torch.dtype, device: torch.device, vision: bool
) -> CausalLM:
    """Load the model of a checkpoint. Tensors that are not in the checkpoint are read from the run's base model."""
    sizes = store.tensor_specs(step)
    if SCORE_WEIGHT in sizes:
        raise UserError(
            f"{store.path(step)} is of a model that rates or classifies texts, and writes none; "
            "`dtrain export` makes a directory of it, which `dtrain serve` takes"
        )
    adapter_directory = store.path(step) / ADAPTER
    facts = RunFacts.from_run(store.directory.parent)
    adapter = read_adapter_config(adapter_directory) if is_adapter_directory(adapter_directory) else None
    config = models.read_config(source, vision=vision, implementation=facts.implementation)
    model = build_with_adapters(config, adapter, dtype, "meta")
    if adapter is not None and facts.path is not None:
        # Modules that the adapter stores in full were trained in full, so they are not in 4 bits.
        saved_in_full = adapter.select_saved_modules(linear_shapes(model.config))
        convert_to_4_bits(model, facts.path, dtype, nf4=facts.nf4, except_for=saved_in_full)
    model.to_empty(device="cpu")
    model.tie_weights()
    tensors = training_tensors(model)
    in_step = {name: tensor for name, tensor in tensors.items() if name in sizes}
    # A run does not save frozen weights, and a run on texts has no vision tower. Both are read from the base model.
    if (facts.freezes or vision) and len(in_step) < len(tensors):
        state = store.read_state(step)
        read_weights(model, facts.base_directory(state))
        if facts.freezes:
            frozen = [tensor for name, tensor in tensors.items() if name not in in_step]
            _round(frozen, facts.training_dtype(state))
        tensors = in_step
    store.load(step, tensors, allow_extra=True, cast=tensors)
    return model.to(device)


def _is_newest(export: Path) -> bool:
    """Check whether an export is up to date: it has the newest checkpoint's weights, or the run has no checkpoint."""
    store = CheckpointStore(export.parent / "checkpoints", Ranks(single_process=True))
    step = store.latest()
    if step is None:
        return True
    # An exported adapter does not contain its base. The checkpoint may be the only copy of the base's weights.
    if is_adapter_directory(export):
        return False
    exported = read_saved_step(export)
    save = store.read_state(step).get("save")
    if save is None:  # written by an older version
        return exported.get("save") is None and exported.get("step") == step
    return exported.get("save") == save


def encode_prompt(tokenizer: Tokenizer, prompt: str, template: ChatTemplate | None) -> list[int]:
    """Return the token ids of a prompt.

    With a template, `prompt` is a user message, and the ids end where the model's answer begins. Without a template,
    they are the ids of the text itself.
    """
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
    """Return the dtype in which a run with `train.dtype=name` computes. Raises UserError if the name is unknown."""
    if name not in ("auto", *DTYPES):
        raise UserError(f"dtype={name} is unknown; choose auto, {', '.join(DTYPES)}")
    return choose_precision(name, device.type).compute
