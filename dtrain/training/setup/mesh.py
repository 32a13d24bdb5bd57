"""Stage mesh: the mesh and the batch in the world, and the models on the mesh."""

from importlib.metadata import version

from dtrain.models.common.config import ModelConfig
from dtrain.parallel.fits import mesh_problems_of_model
from dtrain.recipe.world import batch_problems, mesh_problems
from dtrain.training.spec import RunSpec


def check_keys(spec: RunSpec) -> list[str]:
    """Check that the mesh fits the world, and the batch the mesh."""
    recipe, wrong = spec.recipe, {key for key, _, _ in spec.wrong_values}
    if spec.world.size < 1 or any(key.startswith("parallel.") for key in wrong):
        return []
    problems, shape = mesh_problems(recipe, spec.world.size)
    length, cp = recipe.data.max_length, recipe.parallel.cp
    if cp > 1 and 2 <= length < 2 * cp:  # some pieces would be nothing but padding in every row
        problems.append(
            f"parallel.cp={cp} cuts a sequence into {2 * cp} pieces, and data.max_length={length} has fewer tokens; "
            f"set data.max_length={2 * cp} or more, or parallel.cp={length // 2} or less"
        )
    is_open = recipe.train.global_batch == "auto"  # the data say, when the run starts
    if not is_open and not wrong & {"train.global_batch", "train.micro_batch"}:
        # Where the mesh does not fit its world, what its keys say of dp: of dp_shard=-1 that it is 1 or more.
        replicate, shard = shape[:2] if shape else (recipe.parallel.dp_replicate, max(recipe.parallel.dp_shard, 1))
        problems += batch_problems(recipe, replicate * shard)
    return problems


def check_models(spec: RunSpec) -> list[str]:
    """Check that the model fits the mesh."""
    model = spec.readable_config
    return [] if model is None else unfit(spec, model, spec.recipe.parallel.ep)


def unfit(spec: RunSpec, model: ModelConfig, ep: int) -> list[str]:
    """Return what keeps `model` from the mesh, whose experts are shared by `ep` ranks, one line each."""
    recipe, tp = spec.recipe, spec.recipe.parallel.tp
    problems = mesh_problems_of_model(model, tp, ep) if tp >= 1 and ep >= 1 else []  # else check_keys says so
    if ep > 1 and tuple(map(int, version("torch").split(".")[:2])) < (2, 12):
        problems.append(f"parallel.ep={ep} needs torch 2.12 or newer, and this is {version('torch')}: install one")
    section, masters = recipe.optimizer, recipe.train.masters
    by_rows = {"optimizer.name=muon": section.name == "muon"}
    by_rows |= {f"optimizer.state={section.state}": section.state != "float32"}
    by_rows |= {f"train.masters={masters}": masters != "float32"}
    if model.experts is not None and tp > 1 and any(by_rows.values()):
        named = " and ".join(name for name, is_so in by_rows.items() if is_so)
        problems.append(
            f"{named}: takes parameters by whole rows, and parallel.tp={tp} cuts the rows of the experts' matrices; "
            "leave it out, or set parallel.tp=1 and share experts by parallel.ep"
        )
    most, length = model.most_positions, recipe.data.max_length
    if most is not None and length > most:
        problems.append(
            f"data.max_length={length}: the model has LongRoPE, and beyond {most} tokens (its "
            f"original_max_position_embeddings) another table of positions; set data.max_length={most} or less"
        )
    return problems
