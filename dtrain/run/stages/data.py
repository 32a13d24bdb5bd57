"""Stage data: the rows of the splits, as the run reads them, and of a dry run the sets of `eval`.

A dry run tokenises files of up to SMALL_DATA bytes whole; of others it reads the first rows of each file, and the shape
of all rows that LOOK_SECONDS allow. Its notes say what it did not read.
"""

import time
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtrain.base.json_files import loads
from dtrain.data import Rows, open_rows
from dtrain.data.formats.plain_prompts import describe
from dtrain.data.sources.sources import Look, looks
from dtrain.methods.spec import spec_of
from dtrain.run import eval_sets
from dtrain.run.host import DryHost, Host
from dtrain.run.preflight import to_copy

if TYPE_CHECKING:
    from dtrain.run.spec import RunSpec

SMALL_DATA = 4 << 20
LOOK_SECONDS = 5.0


def resolve(spec: "RunSpec", host: Host) -> bool:
    """Open the rows of data.train and data.val; the first process of a run to come tokenises, the others wait for its
    cache. A dry run of a recipe that is wrong already ends here."""
    if isinstance(host, DryHost):
        _look(spec, host)
        if not host.known:
            _look_at_sets(spec, host)
        return not host.known
    for split in _splits(spec):
        spec.rows[split] = _open(spec, split, host)
    for split, rows in spec.rows.items():
        host.ranks.same(rows.fingerprint, f"data.{split} is not the same on every host")
    spec.columns = {split: rows.samples.column_names() for split, rows in spec.rows.items()}
    spec.is_data_read = True
    if "val" in spec.rows:
        spec.identities["data.val.fingerprint"] = spec.rows["val"].samples.identity
    spec.identities["data.fingerprint"] = spec.rows["train"].samples.identity
    spec.plain_prompts = spec.rows["train"].samples.meta["plain_prompts"]
    return True


def _splits(spec: "RunSpec") -> list[str]:
    return ["train"] if spec.recipe.data.val is None else ["train", "val"]


def _options(spec: "RunSpec", cache_dir: Path | None) -> dict[str, Any]:
    """Return the arguments of `open_rows` and `looks` that follow from a recipe. Raises UserError."""
    recipe, method = spec.recipe, spec_of(spec.recipe)
    return {
        "kind": method.kind,
        "prompts": method.prompts(recipe),
        "label": method.label(recipe),
        "seed": recipe.run.seed,
        "tokenizer": spec.tokenizer,
        "cache_dir": cache_dir,
    }


def _open(spec: "RunSpec", split: str, host: Host) -> Rows:
    recipe, is_shown = spec.recipe, not isinstance(host, DryHost) and host.ranks.is_first
    options = _options(spec, host.cache_dir(spec))
    return open_rows(recipe.data, split=split, epochs=recipe.train.epochs, say=host.say, progress=is_shown, **options)


def _look(spec: "RunSpec", host: DryHost) -> None:
    """Read the first rows of every file, and the rows where the files are small. Each file's first mistake is one of
    the problems."""
    recipe, before = spec.recipe, len(host.problems)
    of_rows = ("data.", "data=", "grpo.tools")
    is_unread = any(line.startswith(of_rows) for line in (*host.known, *host.awaited)) or to_copy(recipe)
    options = None if is_unread else host.ask(_options, spec, host.cache_dir(spec))
    if options is None:
        return
    plain: dict[str, int] = {}
    files: list[tuple[str, Look]] = []
    start = len(host.problems)
    for split in _splits(spec):
        opened = host.ask(partial(looks, recipe.data, split=split, **options)) or []
        files += [(f"data.{split}", look) for look in opened]
        chunks = [host.ask(look.first) for look in opened]
        rows = [loads(text)["columns"] for chunk in chunks if chunk for text in chunk.columns if text]
        spec.columns[split] = list(dict.fromkeys(name for row in rows for name in row))
        plain[split] = sum(chunk.plain_prompts for chunk in chunks if chunk)
    spec.plain_prompts = plain["train"]
    if len(host.problems) > start:
        return
    encoders = {key: look.encoder for key, look in files}
    is_small = sum(_size(look.file) for _, look in files) <= SMALL_DATA
    if is_small and not host.known:
        host.ask(_open_small, spec, host)
    plain |= {split: rows.samples.meta["plain_prompts"] for split, rows in spec.rows.items()}
    spec.plain_prompts = plain["train"]
    for split, count in plain.items():
        encoder = encoders[f"data.{split}"]
        host.notes += describe(f"{split} data", count, encoder.prompts_as, encoder.template, bool(spec.rows))
    if not is_small:
        _shapes(files, host)
    spec.is_data_read = bool(spec.columns) and len(host.problems) == before


def _look_at_sets(spec: "RunSpec", host: DryHost) -> None:
    """Read the sets of `eval` as the run does."""
    recipe = spec.recipe
    for eval_set in eval_sets.sets(recipe):
        if f"{eval_set.key}.path" not in host.awaited:
            read_set = import_module("dtrain.run.evaluations").read_set
            host.ask(read_set, recipe, eval_set, spec.tokenizer, spec.plain_prompts, host.notes.append)


def _open_small(spec: "RunSpec", host: DryHost) -> None:
    spec.rows = {split: _open(spec, split, host) for split in _splits(spec)}
    spec.columns = {split: rows.samples.column_names() for split, rows in spec.rows.items()}


def _size(file: Path) -> int:
    """Bytes, those that are packed counted tenfold."""
    return file.stat().st_size * (10 if file.suffix.lower() in (".gz", ".parquet") else 1)


def _shapes(files: Sequence[tuple[str, Look]], host: DryHost) -> None:
    """The shape of the rows of large files, and in the time that is left what the template and the lengths refuse. Each
    file is given an equal part of the time."""
    end, before = time.monotonic() + LOOK_SECONDS, len(host.problems)
    files = list({look.file: (key, look) for key, look in reversed(files)}.values())  # a share of a file is one of both
    for whole, what in ((False, "not looked at"), (True, "looked at without the chat template and data.too_long")):
        wanted = [file for file in files if not (whole and file[1].shape_is_all)]
        unread = []
        for index, (key, look) in enumerate(sorted(wanted, key=lambda file: _size(file[1].file))):
            now = time.monotonic()
            line = host.ask(look.rest, now + max(0.0, end - now) / (len(wanted) - index), whole)
            if line is not None:
                unread.append(f"{key}: {look.file} from line {line} on")
        if unread:
            more = f", and of {len(unread) - 3} more files" if len(unread) > 3 else ""
            listed = "; ".join(unread[:3])
            host.notes.append(f"note: {what}, for want of time: {listed}{more}. The run reads it all")
        if unread or len(host.problems) > before:
            return
