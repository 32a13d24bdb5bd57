"""Mistakes of users, one line each, and the words that the answer must hold: file, key and fix.

`recipes.py` holds what stands in a recipe and its overrides; `places.py` what files, weights, devices and directories
tell; `commands.py` what is typed after `dtrain`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from dtrain import recipe as config
from tests.tiny import tiny_grpo, tiny_recipe, write_pairs


@dataclass(frozen=True)
class Mistake:
    """One mistake, and what its answer must say.

    typed: of a recipe's mistake the overrides, one a word; of a command's all words after `dtrain`. `{root}` stands for
    the directory of the files. says: words that the answer holds, whatever their order. files: name → content, text or
    bytes, written under the root before; a name that ends with / is a directory. base: the sound recipe that the
    overrides change: sft, dpo, grpo or distill; or the name of one of `files`, a recipe of its own.
    status: what the process ends with. links: name → where it leads, from the root.
    """

    typed: tuple[str, ...]
    says: tuple[str, ...]
    files: Mapping[str, str | bytes] = field(default_factory=dict)
    base: str = "sft"
    status: int = 1
    links: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Name of the test's case."""
        shown = " ".join(self.typed) or next(iter(self.files), "nothing")
        return f"{self.base}: {shown}"[:80] if self.base != "sft" else shown[:80]

    def write(self, root: Path) -> None:
        """Put `files` under `root`."""
        for name, content in self.files.items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if name.endswith("/"):
                path.mkdir(exist_ok=True)
            else:
                path.write_bytes(content.encode() if isinstance(content, str) else content)

        for name, where in self.links.items():
            if not (root / name).is_symlink():
                (root / name).symlink_to(root / where if where == name else where)

    def words(self, root: Path) -> list[str]:
        """`typed`, with `root` in its place."""
        return [word.replace("{root}", str(root)) for word in self.typed]


def slip(typed: str | tuple[str, ...], *says: str, files=None, base: str = "sft", links=None) -> Mistake:
    """Return a mistake of a recipe: of overrides, or of files beside it."""
    return Mistake((typed,) if isinstance(typed, str) else typed, says, files or {}, base, links=links or {})


def write_sound(root: Path) -> None:
    """A sound recipe of each method, sft.yaml, dpo.yaml and grpo.yaml, with what it reads."""
    pairs = write_pairs(root / "pairs.jsonl")
    recipes = {
        "sft": tiny_recipe(root),
        "dpo": tiny_recipe(root, "method=dpo", f"data.train.path={pairs}"),
        "grpo": tiny_grpo(root),
    }
    for name, recipe in recipes.items():
        (root / f"{name}.yaml").write_text(config.to_yaml(recipe))
