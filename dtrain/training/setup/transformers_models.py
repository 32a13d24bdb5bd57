"""Setup of models of the transformers library: options that they do not have, and the proof of their numbers.

`models.transformers.proof` explains the proof. Its results are stored in the cache directory of the recipe, so that
only the first run of a model spends the seconds that it takes. A result is stored only if the model can be trained.
"""

import json
from collections.abc import Mapping
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dtrain.base.errors import Problem, RecipeError
from dtrain.base.files import atomic_write_text
from dtrain.base.json_files import digest, read_json
from dtrain.base.ranks import Ranks
from dtrain.models.building import build_on_meta
from dtrain.models.common.config import ModelConfig, TransformersModel
from dtrain.parallel.mesh import Mesh
from dtrain.parallel.size_checks import check_model_mesh
from dtrain.recipe import Recipe
from dtrain.training.inputs import RunInputs

if TYPE_CHECKING:
    from dtrain.models.transformers.proof import Proof

_PROOF_VERSION = 1  # changes with the meaning of stored results
# Fields of config.json that name versions and files, and not the model.
_UNPROVED_FIELDS = ("_name_or_path", "transformers_version", "torch_dtype", "dtype")


def check_models(inputs: RunInputs) -> list[Problem]:
    """Refuse options that dtrain does not have for models of transformers. No transformers without such a model."""
    config = inputs.readable_config
    if config is None or config.transformers is None:
        return []
    recipe, problems = inputs.recipe, []
    name = f"the layers of {config.architecture}, which are those of the transformers library"
    if recipe.lora is not None and recipe.lora.quantize != "none":
        text = f"lora.quantize={recipe.lora.quantize} does not store {name}"
        problems.append(Problem("lora.quantize", text, "Set lora.quantize=none"))
    if recipe.train.tile != "none":
        text = f"train.tile={recipe.train.tile} does not cut {name}"
        fix = "Set train.tile=none, or train.activation_checkpointing=full to save memory"
        problems.append(Problem("train.tile", text, fix))
    if recipe.moe.balance > 0:
        text = f"moe.balance={recipe.moe.balance} does not read the routers in {name}"
        problems.append(Problem("moe.balance", text, "Leave it out"))
    if recipe.parallel.sequence_parallel is True and recipe.parallel.tp > 1:
        text = f"parallel.sequence_parallel=true does not shard the sequence in {name}"
        problems.append(Problem("parallel.sequence_parallel", text, "Leave it out"))
    return [*problems, *_check_evals(inputs, config), *_check_tensor_parallel(inputs, config)]


def _check_evals(inputs: RunInputs, config: ModelConfig) -> list[Problem]:
    """Check that the model can answer the questions of `eval`."""
    if not inputs.recipe.evals:
        return []
    from dtrain.inference.decodable import find_decoding_problem  # a run without `eval` does not need it

    problem = find_decoding_problem(config)
    if problem is None:
        return []
    return [Problem("eval", f"eval: {config.architecture} cannot answer the questions: {problem}", "Leave it out")]


def _check_tensor_parallel(inputs: RunInputs, config: ModelConfig) -> list[Problem]:
    """Check that the model can be sharded over the tensor-parallel ranks."""
    tp = inputs.recipe.parallel.tp
    if tp <= 1:
        return []
    if inputs.recipe.parallel.custom_plan is not None:
        text = f"parallel.custom_plan: the layers of {config.architecture} are sharded by the plan of transformers"
        return [Problem("parallel.custom_plan", text, "Leave it out")]
    if any(problem.key == "parallel.tp" for problem in check_model_mesh(config, tp)):
        return []  # `mesh.check_models` reports it
    from dtrain.models.transformers.plan import find_plan_problem  # loads transformers

    problem = find_plan_problem(build_on_meta(config), tp)
    return [] if problem is None else [Problem("parallel.tp", problem, "Set parallel.tp=1")]


def check_files(inputs: RunInputs) -> list[Problem]:
    """Prove that dtrain computes the models of transformers as that library does.

    The results are stored if the cache directory exists, because `dtrain validate` creates no files.
    """
    problems: list[Problem] = []
    config = inputs.readable_config
    # Only here, because a plan or a rank reads a recipe in which `auto` is replaced.
    if inputs.original_recipe.train.compile is True and config is not None and config.transformers is not None:
        text = f"train.compile=true: the layers of {config.architecture} are those of transformers and run uncompiled"
        problems.append(Problem("train.compile", text, "Leave it out"))
    for key, model in inputs.library_models.items():
        proof = _read_or_prove(model, inputs.cache, is_stored=inputs.cache.is_dir())
        problems += proof_problems(proof, key, _path_of(inputs, key), inputs.recipe)
    return problems


def prove_on_first_rank(inputs: RunInputs) -> None:
    """Prove the models of transformers in a run, and store the results. No collective.

    Raises:
        RecipeError: If the recipe cannot train them.
    """
    problems: list[Problem] = []
    for key, model in inputs.library_models.items():
        proof = _read_or_prove(model, inputs.cache, is_stored=True)
        problems += proof_problems(proof, key, _path_of(inputs, key), inputs.recipe)
    if problems:
        raise RecipeError(problems)


def _path_of(inputs: RunInputs, key: str) -> Path:
    return inputs.source.path if key == "model.path" else inputs.other_models[key].path


def proof_problems(proof: "Proof", key: str, path: Path, recipe: Recipe) -> list[Problem]:
    """Return what the proof of a model means for a recipe.

    Args:
        proof: The proof.
        key: The recipe's key of the model.
        path: The model's directory.
        recipe: The recipe.
    """
    if proof.problem:
        library = f"transformers {version('transformers')}"
        text = f"{key}={path}: dtrain cannot train this model of {library}. In a small copy of it, {proof.problem}"
        return [Problem(key, text, f"Set {key} to another model")]
    if not proof.leak:
        return []
    problems = []
    if recipe.data.packing:
        text = f"{key}={path}: its {proof.leak} mixes the documents of a packed row"
        problems.append(Problem("data.packing", text, "Set data.packing=false and parallel.cp=1"))
    if recipe.parallel.cp > 1:
        text = (
            f"parallel.cp={recipe.parallel.cp}: the {proof.leak} of {key}={path} needs all tokens of a row on one rank"
        )
        problems.append(Problem("parallel.cp", text, "Set parallel.cp=1"))
    return problems


def _read_or_prove(model: TransformersModel, cache: Path, is_stored: bool) -> "Proof":
    from dtrain.models.transformers.proof import Proof, prove  # loads transformers

    path = _result_path(cache, model.values)
    if path.is_file():
        stored = read_json(path)
        return Proof(leak=stored["leak"], kept=tuple(stored["kept"]))
    proof = prove(model.values)
    if is_stored and not proof.problem:
        _store(path, {"leak": proof.leak, "kept": proof.kept})
    return proof


def prove_on_mesh(
    recipe: Recipe, models: Mapping[str, TransformersModel], mesh: Mesh, device: torch.device, ranks: Ranks
) -> None:
    """Prove that models of transformers have the same numbers on the run's mesh as in one process.

    Args:
        recipe: The recipe.
        models: The models by the recipe's key.
        mesh: The run's mesh.
        device: Device of this rank.
        ranks: All ranks of the run.

    Raises:
        RecipeError: On every rank, if a model has not.

    Collectives:
        For each model one broadcast. If its result is not stored, also those of a forward and backward, and one
        all-gather of objects.
    """
    if mesh.tp.size() == 1 and mesh.cp.size() == 1:
        return
    from dtrain.models.transformers import proof  # loads transformers

    rotate = recipe.parallel.cp_rotate
    axes = {"tp": mesh.tp.size(), "cp": mesh.cp.size(), "rotate": rotate, "device": device.type}
    problems = []
    for key, model in models.items():
        path = _result_path(recipe.cache, model.values, axes)
        if ranks.run_on_first(path.is_file):
            continue
        differences = ranks.gather_results(partial(proof.prove_on_mesh, model.values, mesh, rotate, device))
        found = [difference for difference in differences if difference is not None]
        if found:
            problems.append(_mesh_problem(recipe, key, found[0]))
        else:
            ranks.run_on_first(partial(_store, path, {}))
    if problems:
        raise RecipeError(problems)


def _mesh_problem(recipe: Recipe, key: str, difference: str) -> Problem:
    """Return the problem of a model that computes other numbers on the mesh."""
    sizes = {"parallel.tp": recipe.parallel.tp, "parallel.cp": recipe.parallel.cp}
    settings = [f"{axis}={size}" for axis, size in sizes.items() if size > 1]
    axes = [setting.partition("=")[0] for setting in settings]
    text = f"{' and '.join(settings)}: in a small copy of the model of {key}, {difference}, compared with one rank"
    return Problem(axes[0], text, f"Set {' and '.join(f'{axis}=1' for axis in axes)}")


def _result_path(cache: Path, values: Mapping[str, Any], axes: Mapping[str, Any] | None = None) -> Path:
    """Return the file of a stored result, whose name is a digest of everything that the result depends on."""
    fields = {name: value for name, value in values.items() if name not in _UNPROVED_FIELDS}
    versions = [_PROOF_VERSION, *(version(name) for name in ("dtrain", "torch", "transformers"))]
    return cache / "proofs" / f"{digest(fields, versions, axes)}.json"


def _store(path: Path, result: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write_text(path, json.dumps(result))
