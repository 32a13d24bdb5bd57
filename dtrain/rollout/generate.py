"""The native engine: prompts to completions with a KV cache; and the same as text, for a directory's model."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from dtrain.attention.cache import KVCache
from dtrain.data.template import choose_template
from dtrain.data.tokenizer import Tokenizer
from dtrain.errors import UserError
from dtrain.rollout.sampling import sample, uniforms

# How many tokens are decoded between looks at which rows have ended: on CUDA each look waits for the device.
_LOOK_EVERY = {"cpu": 1}
_LOOK_EVERY_ELSEWHERE = 16
# Prompts that `generate_text` decodes together.
_TEXT_BATCH = 32


@torch.no_grad()
def generate(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    eos_ids: Sequence[int],
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    seed: int = 0,
) -> list[list[int]]:
    """Completions of `prompts` (token ids, lengths may differ), in order; each ends with the EOS token that stopped it.

    model: one of dtrain's, whole on one device (not sharded). temperature 0 is greedy. A draw depends on seed, the
    prompt's index and the position in the completion, not on what else is in the batch. Prompts are padded on the
    right; a row's tokens take the slots of its padding before a query can see them. Rows that have ended leave the
    batch. No collective. Raises UserError: an empty prompt, an id beyond the vocabulary, settings out of range.
    """
    _check(model, prompts, max_new_tokens, temperature, top_k, top_p)
    if not prompts or max_new_tokens == 0:
        return [[] for _ in prompts]
    was_training = model.training
    model.eval()
    try:
        return _decode(model, prompts, max_new_tokens, eos_ids, temperature, top_k, top_p, seed)
    finally:
        model.train(was_training)


def _decode(model, prompts, max_new_tokens, eos_ids, temperature, top_k, top_p, seed) -> list[list[int]]:
    completions: list[list[int]] = [[] for _ in prompts]
    device = next(model.parameters()).device
    look_every = _LOOK_EVERY.get(device.type, _LOOK_EVERY_ELSEWHERE)
    ends = torch.tensor(list(eos_ids), dtype=torch.int64, device=device)
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    cache = KVCache(model.config.num_hidden_layers, int(lengths.max()) + max_new_tokens)
    padded = [torch.tensor(prompt, dtype=torch.int64) for prompt in prompts]
    input_ids = nn.utils.rnn.pad_sequence(padded, batch_first=True).to(device)  # [B, S]
    hidden = model.hidden_states(input_ids, cache=cache)  # [B, S, D]
    hidden = hidden[torch.arange(len(prompts), device=device), lengths - 1]  # [B, D]

    rows = list(range(len(prompts)))  # the prompt that each row of the batch goes on
    numbers = uniforms(seed, rows, max_new_tokens).to(device) if temperature else lengths.new_zeros((len(rows), 1))
    fresh: list[Tensor] = []  # tokens [B] decoded since the last look
    for position in range(max_new_tokens):
        draw = numbers[:, position] if temperature else numbers[:, 0]
        tokens = sample(model.logits(hidden), draw, temperature, top_k, top_p)  # [B]
        fresh.append(tokens)
        is_last = position == max_new_tokens - 1
        if is_last or len(fresh) == look_every:
            alive = _collect(torch.stack(fresh, 1), ends, rows, completions)
            fresh = []
            if is_last or not alive:
                break
            if len(alive) < len(rows):
                kept = torch.tensor(alive, device=device)
                cache.select(kept)
                rows = [rows[index] for index in alive]
                tokens, lengths, numbers = tokens[kept], lengths[kept], numbers[kept]
        positions = (lengths + position)[:, None]  # [B, 1]
        hidden = model.hidden_states(tokens[:, None], position_ids=positions, cache=cache)[:, 0]  # [B, D]
    return completions


def _collect(fresh: Tensor, ends: Tensor, rows: list[int], completions: list[list[int]]) -> list[int]:
    """Append fresh tokens [B, n] to their completions up to the first EOS; returns the rows without one."""
    ended = torch.isin(fresh, ends).tolist()
    alive = []
    for index, (tokens, flags) in enumerate(zip(fresh.tolist(), ended, strict=True)):
        stop = flags.index(True) + 1 if True in flags else None
        completions[rows[index]] += tokens[:stop]
        if stop is None:
            alive.append(index)
    return alive


def _check(model, prompts, max_new_tokens, temperature, top_k, top_p) -> None:
    for index, prompt in enumerate(prompts):
        if not prompt:
            raise UserError(f"prompt {index} is empty: a completion needs at least one token to follow")
        if not 0 <= min(prompt) <= max(prompt) < model.config.vocab_size:
            size = model.config.vocab_size
            raise UserError(f"prompt {index} has a token id outside the model's vocabulary of {size}")
    if max_new_tokens < 0:
        raise UserError(f"max_new_tokens={max_new_tokens} must not be negative")
    if temperature < 0.0:
        raise UserError(f"temperature={temperature} must not be negative; 0 takes the likeliest token")
    if top_k is not None and top_k < -1:
        raise UserError(f"top_k={top_k} must be a positive number, or null for all tokens")
    if not 0.0 < top_p <= 1.0:
        raise UserError(f"top_p={top_p} must be above 0 and at most 1")


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
    dtype: str = "auto",
    device: str = "auto",
) -> Iterator[str]:
    """The completion of each prompt as text, special tokens left out, in order.

    directory: in Hugging Face's layout; or a run's, of which `export/` serves, or a checkpoint that is newer; or a
    checkpoint's. A prompt is a user's message in the model's chat template, or with `raw`, or where the model has no
    template, the beginning of a text. dtype and device: as `train.dtype` and `launch.device` of a recipe. Raises
    UserError.
    """
    torch_device = _device(device)
    model, tokenizer = load(Path(directory), _dtype(dtype, torch_device), torch_device)
    encoded = [encode_prompt(tokenizer, prompt, raw) for prompt in prompts]
    for start in range(0, len(encoded), _TEXT_BATCH):
        completions = generate(
            model,
            encoded[start : start + _TEXT_BATCH],
            max_new_tokens=max_new_tokens,
            eos_ids=tokenizer.eos_ids,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed + start,
        )
        yield from (tokenizer.decode(ids, skip_special_tokens=True) for ids in completions)


def load(directory: Path, dtype: torch.dtype, device: torch.device) -> tuple[nn.Module, Tokenizer]:
    """Model and tokenizer of a Hugging Face directory, a run's directory or a checkpoint's. Raises UserError."""
    from dtrain import models
    from dtrain.checkpoint.ranks import Ranks
    from dtrain.checkpoint.store import locate, step_of
    from dtrain.checkpoint.training_state import training_tensors

    if not directory.is_dir():
        raise UserError(f"{directory}: no such directory; give a model's directory, a run's or a checkpoint's")
    for candidate in (directory, directory / "export"):
        if (candidate / "config.json").is_file() and not _is_behind(candidate, directory / "checkpoints"):
            return models.from_pretrained(candidate, dtype, device), Tokenizer.from_directory(candidate)
    is_run = (directory / "checkpoints").is_dir()
    if not is_run and step_of(directory.absolute()) is None:
        raise UserError(
            f"{directory} holds neither a model (config.json), nor a run (checkpoints/ or export/), nor a checkpoint"
        )
    store, step = locate(directory, Ranks(alone=True))
    source = store.directory.parent / "model"
    kept = next(dtype for name, (_, dtype) in store.tensors(step).items() if name.startswith("model."))
    model = models.build(models.read_config(source), kept)
    store.load(step, training_tensors(model), only=True)
    return model.to(device, dtype), Tokenizer.from_directory(source)


def _is_behind(export: Path, checkpoints: Path) -> bool:
    """Whether a run has saved a checkpoint since it wrote `export`."""
    saved = [path.stat().st_mtime_ns for path in checkpoints.glob("step-*")]
    return max(saved, default=0) > export.stat().st_mtime_ns


def encode_prompt(tokenizer: Tokenizer, prompt: str, raw: bool) -> list[int]:
    """Token ids of a user's message, ready for the assistant's answer; of the bare text if `raw` or no template."""
    template = None if raw else choose_template(tokenizer.directory, tokenizer.special_tokens)
    if template is None:
        return tokenizer.encode(prompt, add_special_tokens=True)
    text = template.render([{"role": "user", "content": prompt}], add_generation_prompt=True)
    return tokenizer.encode(text)


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("device=cuda: torch sees no CUDA device here; use cpu or auto")
    if name not in ("cpu", "cuda"):
        raise UserError(f"device={name} is unknown; choose auto, cpu or cuda")
    return torch.device(name)


def _dtype(name: str, device: torch.device) -> torch.dtype:
    names = ("bfloat16", "float16", "float32", "float64")
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if name not in names:
        raise UserError(f"dtype={name} is unknown; choose auto, {', '.join(names)}")
    return getattr(torch, name)
