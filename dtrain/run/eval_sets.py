"""The sets of a recipe's `eval`: their names, when they are due, and the fields that they write. No torch.

A set's rows of metrics.jsonl have fields that begin with its `prefix`: `eval_` where the recipe has one set without a
name, `eval_<name>_` in a table. `evaluation.training` writes them; `checkpoint.keep_best` and `train.patience` may name
one.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from dtrain.base.ranges import nearest, shown
from dtrain.methods.spec import spec_of
from dtrain.recipe.schema import BEST, Eval, Recipe

Better = Callable[[Iterable[float]], float]
LONGEST_ANSWER = 512


@dataclass(frozen=True)
class EvalSet:
    """A set of `eval`: its name, its key in the recipe, the prefix of its fields."""

    name: str
    key: str
    prefix: str
    section: Eval

    def in_its_keys(self, text: str) -> str:
        """Return a text of code shared with GRPO, with this set's keys."""
        named = re.sub(r"grpo\.(rewards|reward_timeout|sampling)", rf"{self.key}.\1", text)
        return named.replace("data.train.", f"{self.key}.")

    @property
    def code(self) -> list[tuple[str, str | None, str]]:
        """The code that the set names, as `methods.spec.MethodSpec.code`."""
        return [(f"{self.key}.rewards[{i}].fn", reward.fn, "reward") for i, reward in enumerate(self.section.rewards)]

    def is_due(self, step: int, is_last: bool) -> bool:
        every = self.section.every
        return self.section.at_start if step == 0 else is_last or (every is not None and step % every == 0)


def sets(recipe: Recipe) -> list[EvalSet]:
    """Return the sets of a recipe, in its order."""
    if isinstance(recipe.eval, Eval):
        return [EvalSet("eval", "eval", "eval_", recipe.eval)]
    return [EvalSet(name, f"eval.{name}", f"eval_{name}_", section) for name, section in recipe.evals.items()]


def longest_answer(positions: int) -> int:
    """Tokens, of a model with so many positions, where nothing is asked for."""
    return min(LONGEST_ANSWER, positions // 2)


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


def better(field: str, recipe: Recipe) -> Better:
    """Return the function (max, min) that chooses the better of two values of `checkpoint.keep_best`."""
    measured = {name: choose for each in sets(recipe) for name, choose in fields(each).items()}
    return BEST.get(field) or measured.get(field, min)


def best_problems(recipe: Recipe) -> list[str]:
    """Return what is wrong with `checkpoint.keep_best` and `train.patience`, one line each.

    keep_best compares saves, so each save needs a value of its own; patience counts values.
    """
    best, every, patience = recipe.checkpoint.keep_best, recipe.checkpoint.every, recipe.train.patience
    if best is None:
        asks = f"train.patience={patience} counts values of checkpoint.keep_best, which is null: name a field there"
        return [asks] if patience is not None else []
    set_of = {name: each for each in sets(recipe) for name in fields(each)}
    measured = [*(name for name in BEST if name in spec_of(recipe).best), *set_of]
    if best in BEST and best not in measured:
        return [f"checkpoint.keep_best={best} is not measured by method={recipe.method}; it has {', '.join(measured)}"]
    if best not in measured:
        near = nearest(best, measured)
        known = ", ".join([*BEST, *set_of])
        return [
            f"checkpoint.keep_best={best} is none of {known}, nor null" + (f"; did you mean {near}?" if near else "")
        ]
    if best == "loss":
        return []
    key = f"{set_of[best].key}.every" if best in set_of else "train.validate_every"
    often = set_of[best].section.every if best in set_of else recipe.train.validate_every
    problems = []
    if every is not None and (often is None or every % often):
        problems.append(
            f"checkpoint.keep_best={best} needs a measure at every save, and checkpoint.every={every} is no multiple "
            f"of {key}={shown(often)}: set {key}={every}"
        )
    if patience is not None and often is None:
        problems.append(f"train.patience={patience} counts values of {best}, and {key}=null: set {key}")
    return problems
