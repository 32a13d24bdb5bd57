"""Setup of models of the transformers library: options that they do not have, and the proof of their numbers.

`models.transformers.proof` explains the proof, which takes seconds. There are three entry points:

    check_files            called by the checks of a recipe: the proof in one process
    prove_on_first_rank    called by rank 0 of a run: the same proof, read from the cache if it is stored
    prove_on_mesh          called by all ranks of a run with tensor or context parallelism: mesh against one process

Results are stored in the cache directory of the recipe (`cache/proofs/<digest>.json`), if the model can be trained.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dtrain.adapters.config import AdapterConfig
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

_PROOF_VERSION = 2  # changes with the meaning of stored results
# Fields of config.json that name versions and files, and not the model.
_UNPROVED_FIELDS = ("_name_or_path", "transformers_version", "torch_dtype", "dtype")


def check_models(inputs: RunInputs) -> list[Problem]:
    """Return the options of a recipe that do not apply to its model of transformers.

    transformers is not imported for other models.
    """
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
    return problems + _prove_models(inputs, is_stored=inputs.cache.is_dir())


def prove_on_first_rank(inputs: RunInputs) -> None:
    """Prove the models of transformers in a run, and store the results. No collective.

    Raises:
        RecipeError: If the recipe cannot train them.
    """
    problems = _prove_models(inputs, is_stored=True)
    if problems:
        raise RecipeError(problems)


def _prove_models(inputs: RunInputs, is_stored: bool) -> list[Problem]:
    """Prove the policy and other models of a recipe that are models of transformers.

    Args:
        inputs: The recipe and its models.
        is_stored: Whether to store results in the cache directory. Stored results are read in any case.
    """
    problems: list[Problem] = []
    for key, model in inputs.library_models.items():
        path = inputs.source.path if key == "model.path" else inputs.other_models[key].path
        proof = _read_or_prove(model, inputs.cache, is_stored)
        problems += proof_problems(proof, key, path, inputs.recipe)
    return problems


def proof_problems(proof: "Proof", key: str, path: Path, recipe: Recipe) -> list[Problem]:
    """Return the problems of a recipe that follow from the proof of one of its models.

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
    problems = []
    if key == "model.path" and recipe.lora is not None and recipe.lora.path is None:
        problems += _uncalled_layer_problems(proof, AdapterConfig.from_values(asdict(recipe.lora)))
    if not proof.leak:
        return problems
    if recipe.data.packing:
        text = f"{key}={path}: its {proof.leak} mixes the documents of a packed row"
        problems.append(Problem("data.packing", text, "Set data.packing=false and parallel.cp=1"))
    if recipe.train.share_prompts is True:
        text = f"train.share_prompts=true: the {proof.leak} of {key}={path} mixes the documents of a row"
        problems.append(Problem("train.share_prompts", text, "Set train.share_prompts=false"))
    if recipe.parallel.cp > 1:
        text = (
            f"parallel.cp={recipe.parallel.cp}: the {proof.leak} of {key}={path} needs all tokens of a row on one rank"
        )
        problems.append(Problem("parallel.cp", text, "Set parallel.cp=1"))
    return problems


def _uncalled_layer_problems(proof: "Proof", adapters: AdapterConfig) -> list[Problem]:
    """Refuse adapters of layers whose weight another module reads without calling the layer."""
    problems = []
    for kind in proof.uncalled:
        name = f"layers.0.{kind.replace('*', '0')}"
        if not adapters.is_targeted(name):
            continue
        text = (
            f"lora.target selects {kind}, whose weight another module reads without calling the layer, so that an "
            "adapter would have no effect"
        )
        short = kind.rpartition("*.")[2]  # the name within an expert, if there is one
        problems.append(Problem("lora.target", text, f"Add {short} to lora.exclude, such as lora.exclude=[{short}]"))
    return problems


def _read_or_prove(model: TransformersModel, cache: Path, is_stored: bool) -> "Proof":
    """Return the stored proof of a model. If there is none, prove the model, and store the proof if `is_stored`."""
    from dtrain.models.transformers.proof import Proof, prove  # loads transformers

    path = _result_path(cache, model.values)
    if path.is_file():
        stored = read_json(path)
        return Proof(leak=stored["leak"], kept=tuple(stored["kept"]), uncalled=tuple(stored["uncalled"]))
    proof = prove(model.values)
    if is_stored and not proof.problem:
        _store(path, {"leak": proof.leak, "kept": proof.kept, "uncalled": proof.uncalled})
    return proof


def prove_on_mesh(
    recipe: Recipe, models: Mapping[str, TransformersModel], mesh: Mesh, device: torch.device, ranks: Ranks
) -> None:
    """Prove that models of transformers compute the same loss and gradients on the run's mesh as in one process.

    Args:
        recipe: The recipe.
        models: The models by the recipe's key.
        mesh: The run's mesh.
        device: Device of this rank.
        ranks: All ranks of the run.

    Raises:
        RecipeError: On every rank, if a model computes other numbers.

    Collectives:
        For each model one broadcast. If its result is not stored, also those of a forward and backward, one all-gather
        of objects and another broadcast.
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
        difference_by_rank = ranks.gather_results(partial(proof.prove_on_mesh, model.values, mesh, rotate, device))
        differences = [difference for difference in difference_by_rank if difference is not None]
        if differences:
            problems.append(_mesh_problem(recipe, key, differences[0]))
        else:
            # An empty result: the existence of the file is all that the next run reads.
            ranks.run_on_first(partial(_store, path, {}))
    if problems:
        raise RecipeError(problems)


def _mesh_problem(recipe: Recipe, key: str, difference: str) -> Problem:
    """Return the problem of a model that computes other numbers on the mesh."""
    sizes = {"parallel.tp": recipe.parallel.tp, "parallel.cp": recipe.parallel.cp}
    axes = [axis for axis, size in sizes.items() if size > 1]
    settings = " and ".join(f"{axis}={sizes[axis]}" for axis in axes)
    fix = " and ".join(f"{axis}=1" for axis in axes)
    text = f"{settings}: in a small copy of the model of {key}, {difference}, compared with one rank"
    return Problem(axes[0], text, f"Set {fix}")


def _result_path(cache: Path, values: Mapping[str, Any], axes: Mapping[str, Any] | None = None) -> Path:
    """Return the file of a stored result, whose name is a digest of everything that the result depends on."""
    fields = {name: value for name, value in values.items() if name not in _UNPROVED_FIELDS}
    versions = [_PROOF_VERSION, *(version(name) for name in ("dtrain", "torch", "transformers"))]
    return cache / "proofs" / f"{digest(fields, versions, axes)}.json"


def _store(path: Path, result: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write_text(path, json.dumps(result))
