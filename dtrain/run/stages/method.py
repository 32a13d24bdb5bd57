"""Stage method: the section of the method."""

from dtrain.base.ranges import shown
from dtrain.methods.spec import spec_of
from dtrain.run.spec import RunSpec


def check_keys(spec: RunSpec) -> list[str]:
    """Check what the section lacks or has wrong, and the range of every value of the recipe."""
    method, recipe = spec_of(spec.recipe), spec.recipe
    problems = [f"{key}={shown(value)} must be {sentence}" for key, value, sentence in spec.wrong_values]
    return problems + method.missing(recipe) + method.problems(recipe)


def check_files(spec: RunSpec) -> list[str]:
    """Return keys that the recipe gives to another method."""
    return [
        f"{key} is read by method={(other := key.split('.')[0])} alone, and this recipe has "
        f"method={spec.recipe.method}: leave it out, or set method={other}"
        for key in getattr(spec.recipe, "unread", ())
    ]
