"""The model card of a run: what was trained, on what, how it went, and the recipe without its secrets."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Template

from dtrain import __version__
from dtrain.base.hub import id_of
from dtrain.commands.report.run_files import RunFiles
from dtrain.data.sources.hub import is_data_id
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
    """A run and its export. step: that the export is of; base: the id of the model that it began from on the hub, None
    where that is not known."""

    name: str
    files: RunFiles
    step: int | None
    is_adapter: bool
    base: str | None

    @property
    def losses(self) -> tuple[Sequence[records.Point], Sequence[records.Point]]:
        """The training's and the validation's, by step."""
        return self.files.known("loss"), self.files.known("val_loss")


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
    recipe, method = run.files.recipe, str(run.files.recipe.get("method"))
    front: dict[str, Any] = {"library_name": "peft" if run.is_adapter else "transformers"}
    if run.base is not None:
        front |= {"base_model": run.base, "base_model_relation": "adapter" if run.is_adapter else "finetune"}
    if named := datasets(recipe):
        front["datasets"] = named
    front |= {"pipeline_tag": "text-generation", "tags": ["dtrain", method]}
    as_yaml = partial(yaml.safe_dump, sort_keys=False, allow_unicode=True)
    text = Path(__file__).with_name("card.md.jinja").read_text("utf-8")
    return Template(text, trim_blocks=True, keep_trailing_newline=True).render(
        front=as_yaml({**theirs, **front}),
        run=run,
        how=METHODS.get(method, method),
        version=__version__,
        has_license="license" in theirs,
        results={name: f"{run.files.curves[name].values[-1]:.4g}" for name in RESULTS if name in run.files.curves},
        curve=CURVE if any(run.losses) else None,
        data=run.files.data,
        recipe=as_yaml(shown(recipe)),
    )


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
