"""From the `data` section of a recipe to samples and rows: the one door through which trainer and preview come in."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dtrain.data.cache import Samples, Source, open_cache
from dtrain.data.encoder import LONG, RowEncoder
from dtrain.data.files import first_row, resolve
from dtrain.data.formats import (
    CHAT_FORMATS,
    FORMATS,
    KINDS,
    describe_unknown,
    detect,
    refuse_preference,
    refuse_single,
)
from dtrain.data.pairs import PairEncoder
from dtrain.data.prompts import PromptEncoder, PromptOptions
from dtrain.data.rows import Rows
from dtrain.data.sample import Encoder
from dtrain.data.template import ChatTemplate, choose_template
from dtrain.data.tokenizer import Tokenizer
from dtrain.errors import UserError

Say = Callable[[str], None]


def open_rows(
    section: Any,
    *,
    split: str = "train",
    kind: str = "examples",
    prompts: PromptOptions | None = None,
    tokenizer: Tokenizer,
    seed: int = 0,
    epochs: int | None = None,
    cache_dir: str | Path | None = None,
    say: Say = print,
    progress: bool = True,
) -> Rows:
    """The rows of `section.train` or `section.val`; what was detected, chosen, cut and left out goes to `say`.

    section     the recipe's `data` (its field names, as attributes)
    split       "train", or "val": unshuffled, one epoch, each weight taken as 1
    kind        what the method trains on: examples, pairs (a sample is a chosen and a rejected document) or prompts
    prompts     how prompts are made, where the method trains on these
    cache_dir   where section.cache_dir says nothing

    Every rank calls it: the first makes the cache, the others wait for it. Raises UserError.
    """
    train = split == "train"
    sources = _sources(getattr(section, split), f"data.{split}", say, kind)
    if not train:
        sources = [Source(source.files, source.format) for source in sources]
    samples = open_cache(
        sources,
        _encoder(section, tokenizer, {source.format for source in sources}, say, kind, prompts),
        cache_dir=section.cache_dir or cache_dir,
        num_workers=section.num_workers,
        progress=progress,
        label=f"{split} data",
    )
    for line in report(samples, f"{split} data", section.too_long):
        say(line)
    return Rows(
        samples,
        max_length=section.max_length,
        packing=section.packing and kind != "prompts",  # what is packed are the completions, once there are some
        shuffle=section.shuffle and train,
        seed=seed,
        epochs=epochs if train else 1,
    )


def _sources(split: Any, key: str, say: Say, kind: str) -> list[Source]:
    """The sources of data.train or data.val, their formats detected and said. Raises UserError."""
    sources = []
    for path, name, weight, where in _given(split, key):
        files = tuple(resolve(path, f"{where}.path"))
        if not 0 <= weight < float("inf"):
            raise UserError(f"{where}.weight is {weight!r}; it must be a number, 0 or above")
        if name == "auto":
            name = _detected(files, kind)
            more = f" and {len(files) - 1} more files" if len(files) > 1 else ""
            say(f"{key}: {files[0]}{more}: format {name} (detected)")
        elif name not in {**FORMATS, **KINDS[kind]}:
            known = ", ".join(dict.fromkeys([*FORMATS, *KINDS[kind]]))
            raise UserError(f"{where}.format is {name!r}; known are auto, {known}")
        if name == "preference" and kind != "pairs":
            raise UserError(f"{files[0]}: {refuse_preference()}")
        if name not in KINDS[kind]:
            raise UserError(f"{files[0]}: {refuse_single(name, kind)}")
        sources.append(Source(files, name, float(weight)))
    return sources


def _encoder(
    section: Any, tokenizer: Tokenizer, formats: set[str], say: Say, kind: str, prompts: PromptOptions | None
) -> RowEncoder:
    """Rows to samples as the section asks; says which chat template serves, and what loss_on means for plain rows."""
    template = choose_template(
        tokenizer.directory, tokenizer.special_tokens, section.chat_template, section.template_kwargs
    )
    limits = {"max_length": section.max_length, "too_long": section.too_long}
    encoder: RowEncoder
    if kind == "pairs":
        encoder = PairEncoder(tokenizer, template, **limits)
    elif kind == "prompts":
        encoder = PromptEncoder(tokenizer, template, options=prompts or PromptOptions(section.max_length), **limits)
    else:
        encoder = Encoder(tokenizer, template, loss_on=section.loss_on, **limits)
    if template and formats & {*CHAT_FORMATS, "prompt_completion", "preference", "question"}:
        say(f"chat template: {template.origin}")
        for note in _template_notes(template, encoder):
            say(note)
    plain = kind == "examples"
    if plain and "text" in formats and section.loss_on != "all":
        say(f"data.loss_on={section.loss_on}: rows of plain text have no such part, so all of their tokens are trained")
    if "tokenized" in formats:
        keys = ", ".join(KINDS[kind]["tokenized"])
        what = "their labels, not data.loss_on, say what is trained" if plain else f"nothing is added to {keys}"
        say(f"tokenized rows are used as they are: {what}")
    return encoder


def report(samples: Samples, label: str, too_long: str = "truncate") -> list[str]:
    """What a cache holds and what is missing from it, in sentences."""
    meta = samples.meta
    noun = samples.noun
    trained = "" if noun == "prompts" else f", {meta['trained_tokens']:,} of them trained"
    lines = [f"{label}: {meta['samples']:,} {noun} of {meta['rows']:,} rows, {meta['tokens']:,} tokens{trained}"]
    limit = f"data.max_length={meta['max_length']}"
    if meta["truncated"]:
        lines.append(f"{label}: {meta['truncated']:,} {noun} truncated to {limit}; {meta['tokens_cut']:,} tokens cut")
    if meta["too_long"]:
        lines.append(f"{label}: {meta['too_long']:,} rows dropped, longer than {limit} (data.too_long={too_long})")
    if meta["untrained"]:
        named = [f"{file}:{line} ({reason})" for file, line, reason in meta["left_out"] if reason != LONG]
        why = "without a trained token" if samples.documents_per_sample == 1 else "that teach no preference"
        lines.append(
            f"{label}: {meta['untrained']:,} rows left out {why}: {', '.join(named[:5])}"
            + (", ..." if meta["untrained"] > len(named[:5]) else "")
        )
    if meta["left_out"] and (samples.directory / "left_out.txt").is_file():
        lines.append(f"{label}: all rows left out are listed in {samples.directory / 'left_out.txt'}")
    return lines


def _given(split: Any, key: str) -> list[tuple[str | list[str], str, float, str]]:
    """(path, format, weight, key) of each source."""
    if split is None:
        raise UserError(f"{key} is null: name its data with {key}.path")
    if split.sources and split.path:
        raise UserError(f"{key}.path and {key}.sources are both set; sources replace path, so keep one of them")
    if split.sources:
        return [
            (source.path, source.format, source.weight, f"{key}.sources[{number}]")
            for number, source in enumerate(split.sources)
        ]
    if not split.path:
        raise UserError(f"{key}.path is not set: name a file, a glob or a list of them")
    return [(split.path, split.format, 1.0, key)]


def _detected(files: Sequence[Path], kind: str) -> str:
    """The format of the first row that there is; the encoder holds all others to it."""
    for file in files:
        if first := first_row(file):
            line, row = first
            name = detect(row, kind)
            if name is None:
                raise UserError(f"{file}:{line}: {describe_unknown(row, kind)}")
            return name
    raise UserError(f"the dataset is empty: there is no row in {', '.join(map(str, files[:3]))}")


def _template_notes(template: ChatTemplate, encoder: RowEncoder) -> list[str]:
    notes = []
    if template.writes_today:
        notes.append(
            "the chat template writes today's date into each conversation; "
            "data.template_kwargs.date_string may fix it (what tokenising writes is kept in the cache)"
        )
    if encoder.replies.headers().ending == "" and "{% generation" not in template.source:
        notes.append("the chat template writes no end-of-turn token: a model trained with it does not learn to stop")
    return notes
