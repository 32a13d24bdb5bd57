"""The sets of a recipe's `eval`: their names, when they are due, and the fields that they write. No torch.

A set's rows of metrics.jsonl have fields that begin with its `prefix`: `eval_` where the recipe has one set without a
name, `eval_<name>_` in a table. `run.evaluations` writes them; `checkpoint.keep_best` and `train.patience` may name
one.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dtrain.recipe.schema import BEST, Eval

if TYPE_CHECKING:
    from dtrain.recipe.rollouts import Reward
    from dtrain.rl.judging import Questions

Better = Callable[[Iterable[float]], float]
DEFAULT_MAX_NEW_TOKENS = 512


@dataclass(frozen=True)
class EvalSet:
    """A set of `eval`.

    Attributes:
        name: Its name, or "eval" if the recipe has one set without a name.
        key: Its key in the recipe, such as `eval.math`.
        prefix: The prefix of its fields in metrics.jsonl.
        section: Its keys and values.
    """

    name: str
    key: str
    prefix: str
    section: Eval

    @property
    def code(self) -> list[tuple[str, str | None, str]]:
        """The code that the set names, as `Method.code`."""
        return [(f"{self.key}.rewards[{i}].fn", reward.fn, "reward") for i, reward in enumerate(self.section.rewards)]

    def is_due(self, step: int, is_last: bool) -> bool:
        every = self.section.every
        return self.section.at_start if step == 0 else is_last or (every is not None and step % every == 0)


@dataclass(frozen=True)
class EvalFacts:
    """The sets of `eval`.

    Attributes:
        questions: On rank 0, the questions and rewards of each set by its name. Empty on the other ranks.
        has_images: Whether questions have images, so that the model needs its vision tower.
        notes: On rank 0, lines for the user.
    """

    questions: "Mapping[str, tuple[Questions, list[Reward]]]" = field(default_factory=dict)
    has_images: bool = False
    notes: tuple[str, ...] = ()


def sets(section: Eval | dict[str, Eval] | None) -> list[EvalSet]:
    """Return the sets of a recipe's `eval`, in its order."""
    if isinstance(section, Eval):
        return [EvalSet("eval", "eval", "eval_", section)]
    return [EvalSet(name, f"eval.{name}", f"eval_{name}_", each) for name, each in (section or {}).items()]


def default_max_new_tokens(positions: int) -> int:
    """Tokens, of a model with so many positions, where nothing is asked for."""
    return min(DEFAULT_MAX_NEW_TOKENS, positions // 2)


def fields(eval_set: EvalSet) -> dict[str, Better]:
    """The fields of a set by which a save can be the best, and which of two values is. A reward of several is measured
    beside them as `reward/<its name>`."""
    from dtrain.rl.rewards.scoring import names_of, passes

    rising = ["reward_mean", *(f"pass@{k}" for k in passes(eval_set.section.samples))]
    falling = ["completion_len", "truncated_frac"]
    if len(eval_set.section.rewards) > 1:
        rising += [f"reward/{name}" for name in names_of(eval_set.section.rewards)]
    names: dict[str, Better] = {f"{eval_set.prefix}{name}": max for name in rising}
    return names | {f"{eval_set.prefix}{name}": min for name in falling}


def better(field: str, section: Eval | dict[str, Eval] | None) -> Better:
    """Return the function (max, min) that chooses the better of two values of `checkpoint.keep_best`. section: a
    recipe's `eval`."""
    measured = {name: choose for each in sets(section) for name, choose in fields(each).items()}
    return BEST.get(field) or measured.get(field, min)
