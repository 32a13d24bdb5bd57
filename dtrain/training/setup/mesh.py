"""Setup of the mesh: whether mesh and batch fit the number of ranks, and the models fit the mesh."""

from dataclasses import replace
from importlib.metadata import version

from dtrain.base.errors import Problem
from dtrain.models.common.config import ModelConfig
from dtrain.parallel.size_checks import check_model_mesh
from dtrain.recipe.world import batch_problems, mesh_problems
from dtrain.training.inputs import RunInputs


def check_keys(inputs: RunInputs) -> list[Problem]:
    """Check that the mesh fits the number of ranks, and the batch fits the mesh."""
    recipe = inputs.recipe
    wrong_keys = {key for key, _, _ in inputs.wrong_values}
    if inputs.world.size < 1 or any(key.startswith("parallel.") for key in wrong_keys):
        return []  # `sizes.check_keys` reports values out of range
    problems, shape = mesh_problems(recipe, inputs.world.size)
    length, cp = recipe.data.max_length, recipe.parallel.cp
    if cp > 1 and 2 <= length < 2 * cp:  # some chunks would be only padding in every row
        text = f"parallel.cp={cp} cuts a sequence into {2 * cp} chunks, and data.max_length={length} has fewer tokens"
        fix = f"Set data.max_length={2 * cp} or more, or parallel.cp={length // 2} or less"
        problems.append(Problem("parallel.cp", text, fix))
    is_decided_by_data = recipe.train.global_batch == "auto"
    if not is_decided_by_data and not wrong_keys & {"train.global_batch", "train.micro_batch"}:
        if shape is not None:
            replicate, shard = shape[:2]
        else:  # the mesh does not fit the ranks, so compare the batch with the keys; dp_shard=-1 counts as 1
            replicate, shard = recipe.parallel.dp_replicate, max(recipe.parallel.dp_shard, 1)
        problems += batch_problems(recipe, replicate * shard)
    return problems


def check_models(inputs: RunInputs) -> list[Problem]:
    """Check that the model fits the mesh."""
    config = inputs.readable_config
    if config is None:
        return []
    return mesh_problems_of(inputs, config, inputs.recipe.parallel.ep)


def mesh_problems_of(inputs: RunInputs, config: ModelConfig, ep: int, model_key: str = "") -> list[Problem]:
    """Check that a model fits the recipe's mesh.

    Args:
        inputs: The run's inputs.
        config: The model's config.
        ep: Number of ranks over which its experts are distributed.
        model_key: For a model other than model.path, its key and value, such as "distill.teacher=/models/large". The
            messages begin with it.
    """
    recipe, tp = inputs.recipe, inputs.recipe.parallel.tp
    problems: list[Problem] = []
    if tp >= 1 and ep >= 1:  # other values are reported by `sizes.check_keys`
        problems += check_model_mesh(config, tp, ep)
    torch_version = version("torch")  # for example "2.12.0+cu130"
    major, minor = torch_version.split(".")[:2]
    if ep > 1 and (int(major), int(minor)) < (2, 12):
        text = f"parallel.ep={ep} needs torch 2.12 or newer, and this is {torch_version}"
        problems.append(Problem("parallel.ep", text, "Install a newer torch"))
    if config.experts is not None and tp > 1:
        problems += _check_row_updates(inputs)
    max_length, length = config.max_document_length, recipe.data.max_length
    if max_length is not None and length > max_length:
        text = (
            f"data.max_length={length}: the model takes documents of at most {max_length} tokens. Beyond, it has "
            "another table of positions (LongRoPE) or none"
        )
        problems.append(Problem("data.max_length", text, f"Set data.max_length={max_length} or less"))
    if model_key:
        problems = [replace(problem, text=f"{model_key}: {problem.text}") for problem in problems]
    return problems


def _check_row_updates(inputs: RunInputs) -> list[Problem]:
    """Refuse optimizers that need complete rows of the experts' matrices, because tensor parallel cuts these rows."""
    section, masters, tp = inputs.recipe.optimizer, inputs.recipe.train.masters, inputs.recipe.parallel.tp
    chosen = []  # the settings that need complete rows
    if section.name == "muon":
        chosen.append("optimizer.name=muon")
    if section.state != "float32":
        chosen.append(f"optimizer.state={section.state}")
    if masters != "float32":
        chosen.append(f"train.masters={masters}")
    if not chosen:
        return []
    text = (
        f"{' and '.join(chosen)} updates complete rows of parameters, and parallel.tp={tp} cuts the rows of the "
        "experts' matrices"
    )
    fix = "Leave it out, or set parallel.tp=1 and distribute experts with parallel.ep"
    return [Problem(chosen[0].partition("=")[0], text, fix)]
