"""Mistakes in a recipe, its overrides and its files: `validate` and `run` answer each before anything is trained."""

from tests.mistakes import Mistake

RECIPES: tuple[Mistake, ...] = (
    Mistake(("launch.nproc=0",), ("launch.nproc=0 must be at least 1",)),
    Mistake(("dpo.loss=dpo",), ("dpo.loss=dpo", "sigmoid"), base="dpo"),
)
