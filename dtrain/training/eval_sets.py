"""The sets of a recipe's `eval`: their names, when they are due, and the fields that they write. No torch.

A set's fields in metrics.jsonl begin with its `prefix`. With `eval: {path: ...}` the recipe has one set without a name,
whose prefix is `eval_`. With `eval: {math: {path: ...}, code: {path: ...}}` it has two, whose prefixes are `eval_math_`
and `eval_code_`. `training.evaluations` writes the fields, and `checkpoint.keep_best` may name one.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dtrain.recipe.schema import BEST_METRICS, Eval

if TYPE_CHECKING:
    from dtrain.recipe.rollouts import Reward
    from dtrain.rl.evaluation import Questions

Better = Callable[[Iterable[float]], float]
"""`max` or `min`: chooses the best of several values of a field."""
DEFAULT_MAX_NEW_TOKENS = 512  # tokens of an answer, if neither the recipe nor the model's length sets fewer


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
        """The code that the set names, as in `Method.code`: key, import path, kind."""
        return [(f"{self.key}.rewards[{i}].fn", reward.fn, "reward") for i, reward in enumerate(self.section.rewards)]

    def is_due(self, step: int, is_last: bool) -> bool:
        """Check whether the set is evaluated after `step`. Step 0 is before the first step."""
        if step == 0:
            return self.section.at_start
        every = self.section.every
        return is_last or (every is not None and step % every == 0)


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


def list_eval_sets(section: Eval | dict[str, Eval] | None) -> list[EvalSet]:
    """Return the sets of a recipe's section `eval`, in its order."""
    if section is None:
        return []
    if isinstance(section, Eval):
        return [EvalSet("eval", "eval", "eval_", section)]
    return [EvalSet(name, f"eval.{name}", f"eval_{name}_", set_section) for name, set_section in section.items()]


def default_max_new_tokens(max_positions: int) -> int:
    """Return the maximum length of an answer if the recipe sets none: at most half of the model's positions.

    >>> default_max_new_tokens(40_960), default_max_new_tokens(256)
    (512, 128)
    """
    return min(DEFAULT_MAX_NEW_TOKENS, max_positions // 2)


def rankable_fields(eval_set: EvalSet) -> dict[str, Better]:
    """Return the fields of a set that `checkpoint.keep_best` can name, and whether the largest or smallest is best."""
    from dtrain.rl.rewards.scoring import (  # loads rl, which only a recipe with `eval` needs
        pass_at_k_values,
        reward_names,
    )

    larger_is_better = ["reward_mean"]
    larger_is_better += [f"pass@{k}" for k in pass_at_k_values(eval_set.section.samples)]
    if len(eval_set.section.rewards) > 1:  # each reward of several is written too
        larger_is_better += [f"reward/{name}" for name in reward_names(eval_set.section.rewards)]
    better_of: dict[str, Better] = {}
    for name in larger_is_better:
        better_of[f"{eval_set.prefix}{name}"] = max
    for name in ("completion_len", "truncated_frac"):
        better_of[f"{eval_set.prefix}{name}"] = min
    return better_of


def better_function(field: str, section: Eval | dict[str, Eval] | None) -> Better:
    """Return the function that chooses the better of two values of `checkpoint.keep_best`: `max` or `min`.

    Args:
        field: The value of `checkpoint.keep_best`.
        section: The recipe's section `eval`.
    """
    if field in BEST_METRICS:
        return BEST_METRICS[field]
    for eval_set in list_eval_sets(section):
        better_of = rankable_fields(eval_set)
        if field in better_of:
            return better_of[field]
    return min
