"""The model card of a run: what was trained, on what, how it went, and the recipe without its secrets."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from dtrain import __version__
from dtrain.base.hub import id_of
from dtrain.data.sources.files import is_data_id
from dtrain.recipe import secrets
from dtrain.run.metrics import records

CURVE = "loss.svg"
METHODS = {
    "sft": "supervised fine-tuning",
    "dpo": "direct preference optimization",
    "kto": "KTO, by replies that are wanted or not",
    "grpo": "GRPO, by rewards",
    "distill": "distillation",
    "reward": "a reward model or classifier",
}
# The fields whose last value is in the table of results, if the run has measured them.
RESULTS = ("loss", "val_loss", "reward_mean", "val_reward_mean", "val_accuracy", "accuracy")


@dataclass(frozen=True)
class Run:
    """A run as its directory describes it. recipe: the saved one; rows: of metrics.jsonl; data: split -> counts and
    identity; base: the id of the model that it began from on the hub, None where that is not known."""

    name: str
    recipe: Mapping[str, Any]
    rows: Sequence[Mapping[str, Any]]
    data: Mapping[str, Mapping[str, Any]]
    step: int | None
    is_adapter: bool
    base: str | None


def base_of_recipe(recipe: Mapping[str, Any]) -> str | None:
    """Return the hub's id of the model that a run began from; None if its path does not contain it."""
    path = (recipe.get("model") or {}).get("path")
    return id_of(Path(path)) if isinstance(path, str) else None


def datasets(recipe: Mapping[str, Any]) -> list[str]:
    """Return the hub's ids among the paths of the training data."""
    train = (recipe.get("data") or {}).get("train") or {}
    ids = []
    for source in [train, *(train.get("sources") or [])]:
        path = source.get("path") or []
        ids += [name for name in ([path] if isinstance(path, str) else path) if is_data_id(name)]
    return list(dict.fromkeys(ids))


def card(run: Run, theirs: Mapping[str, Any]) -> str:
    """Return README.md of the repository. theirs: the front matter of the one that is there, whose other keys stay."""
    front: dict[str, Any] = {"library_name": "peft" if run.is_adapter else "transformers"}
    if run.base is not None:
        front |= {"base_model": run.base, "base_model_relation": "adapter" if run.is_adapter else "finetune"}
    if named := datasets(run.recipe):
        front["datasets"] = named
    front |= {"pipeline_tag": "text-generation", "tags": ["dtrain", str(run.recipe.get("method"))]}
    parts = [f"---\n{yaml.safe_dump({**theirs, **front}, sort_keys=False, allow_unicode=True)}---", f"# {run.name}"]
    parts.append(_about(run))
    if "license" not in theirs:
        parts.append(
            "No license is named yet: the owner of this repository adds one above, as the base model's allows."
        )
    parts += _results(run) + _data(run)
    parts += ["## Recipe", f"```yaml\n{yaml.safe_dump(shown(run.recipe), sort_keys=False, allow_unicode=True)}```"]
    return "\n\n".join(parts) + "\n"


def shown(recipe: Mapping[str, Any]) -> Any:
    """Return a saved recipe without its secrets, and with the last name alone of paths on this machine."""

    def public(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {str(key): public(entry) for key, entry in value.items()}
        if isinstance(value, list):
            return [public(item) for item in value]
        if isinstance(value, str) and "://" in value:
            return value.partition("?")[0]  # a query may be a signature
        if not isinstance(value, str) or not value.startswith(("/", "~", "./", "../")):
            return value
        return id_of(Path(value)) or Path(value).name

    tree = public(recipe)
    secrets.hide(tree)
    return tree


def _about(run: Run) -> str:
    kind = "An adapter" if run.is_adapter else "A model"
    began = f" from [{run.base}](https://huggingface.co/{run.base})" if run.base else ""
    how = METHODS.get(str(run.recipe.get("method")), str(run.recipe.get("method")))
    steps = f", after {run.step:,} steps" if run.step is not None else ""
    return f"{kind} trained{began} by {how} with dtrain {__version__}{steps}."


def _results(run: Run) -> list[str]:
    last: dict[str, float] = {}
    for row in run.rows:
        last |= {name: row[name] for name in RESULTS if isinstance(row.get(name), int | float)}
    train, val = records.points(run.rows, "loss"), records.points(run.rows, "val_loss")
    parts = []
    if last:
        parts.append("## Results")
        lines = [f"| {name} | {value:.4g} |" for name, value in last.items()]
        parts.append("\n".join(["| last value of | |", "| --- | --- |", *lines]))
    if train or val:
        parts.append(f"![The losses over the steps]({CURVE})")
    return parts


def _data(run: Run) -> list[str]:
    if not run.data:
        return []
    lines = [
        f"| {split} | {counts.get('rows', 0):,} | {counts.get('samples', 0):,} | {counts.get('tokens', 0):,} | "
        f"`{counts.get('identity', '')}` |"
        for split, counts in run.data.items()
    ]
    note = "The identity is a digest of the tokenized samples: the same data, tokenizer and template give the same."
    return [
        "## Data",
        "\n".join(["| | rows | samples | tokens | identity |", "| --- | --- | --- | --- | --- |", *lines]),
        note,
    ]
