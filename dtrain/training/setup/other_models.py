"""Setup of the models that a method needs besides the trained one: a reference, a teacher, a reward model."""

from dataclasses import fields
from functools import partial

from dtrain import models
from dtrain.base.errors import Problem, UserError, problems_in
from dtrain.base.model_directory import TOKENIZER_FILE, is_adapter_directory
from dtrain.checkpoint.huggingface.read import check_fit
from dtrain.checkpoint.huggingface.safetensor_files import WeightFiles
from dtrain.data.model_directory import ModelDirectory
from dtrain.models.common.config import ModelConfig
from dtrain.training.hub_files import model_ids
from dtrain.training.inputs import RunInputs
from dtrain.training.registry import REWARD_MODEL, TEACHER
from dtrain.training.setup.kernels import shared_prompts_problems
from dtrain.training.setup.mesh import mesh_problems_of
from dtrain.training.setup.model import weight_problems

# Fields of a config that may differ between a policy and its reference, because they do not change the computation.
_FREE_FIELDS = {
    *("max_position_embeddings", "initializer_range", "bos_token_id", "eos_token_ids", "pad_token_id", "dtype"),
    *("unquantized_modules", "is_text_tower", "num_nextn_predict_layers"),
}


def check_models(inputs: RunInputs) -> list[Problem]:
    """Check each model's config.json, and that the model fits the trained model and the mesh."""
    on_hub = {model.key for model in model_ids(inputs.recipe)}
    problems = []
    for key, source in inputs.other_models.items():
        if key not in on_hub:
            problems += problems_in(key, partial(_check_model, inputs, key, source))
    return problems


def _check_model(inputs: RunInputs, key: str, source: ModelDirectory) -> list[Problem]:
    """Check the model of a key.

    Raises:
        UserError: If config.json cannot be read.
    """
    path = source.path
    named = f"{key}={path}"
    if not path.is_dir():
        fix = "Use a model's directory, or its id on the hub"
        if key.endswith(".reference"):
            fix = (
                f"Use {inputs.method.references} (start: the weights that training starts from), a model's directory, "
                "or its id on the hub"
            )
        return [Problem(key, f"{named}: there is no such directory", fix)]
    if is_adapter_directory(path):
        text = f"{named} is an adapter in PEFT's layout, not a model"
        return [Problem(key, text, f"Merge it into its base with `dtrain export {path} OUT`, and set {key}=OUT")]
    if not (path / "config.json").is_file():
        export = path / "export"
        fix = f"Set {key}={export}" if export.is_dir() else "Use a model's directory"
        return [Problem(key, f"{named} has no config.json, so it is not a model", fix)]
    config = source.config
    if config.unquantized_modules is not None:
        text = f"{named} has weights in 4 bits, which are supported only at model.path"
        return [Problem(key, text, "Use the original model")]
    trained_config = inputs.readable_config
    if not key.endswith((TEACHER, REWARD_MODEL)):
        return [] if trained_config is None else reference_problems(trained_config, config, key, str(path))
    # The model is on the same mesh as the trained model. Without experts it is replicated over ep.
    ep = 1 if config.experts is None else inputs.recipe.parallel.ep
    problems = mesh_problems_of(inputs, config, ep, model_key=named)
    if key.endswith(REWARD_MODEL):
        return problems + _check_reward_head(key, named, config)
    if trained_config is not None and config.vocab_size != trained_config.vocab_size:
        text = (
            f"{named}: its vocab_size is {config.vocab_size}, and model.path's is {trained_config.vocab_size}, so "
            "their distributions cannot be compared"
        )
        problems.append(Problem(key, text, "Use models with the same vocabulary"))
    return problems + shared_prompts_problems(inputs.recipe, config, named)


def _check_reward_head(key: str, named: str, config: ModelConfig) -> list[Problem]:
    """Check that a reward model has a trained head with one output."""
    if config.num_labels is None or config.has_new_head:
        fix = "Use a model with a head of one output, as method=reward trains it"
        return [Problem(key, f"{named} is a language model", fix)]
    if config.num_labels != 1:
        text = f"{named}: its head has {config.num_labels} outputs, and a reward is one number"
        return [Problem(key, text, "Use a model with one output")]
    return []


def reference_problems(policy: ModelConfig, reference: ModelConfig, key: str, path: str) -> list[Problem]:
    """Check that a reference is the same kind of model as the policy, since its weights are loaded into that model.

    Args:
        policy: The config of model.path.
        reference: The config of the reference.
        key: The reference's key in the recipe.
        path: The reference's directory.
    """
    differing = []
    for field in fields(policy):
        if field.name not in _FREE_FIELDS and getattr(policy, field.name) != getattr(reference, field.name):
            differing.append(field.name)
    if not differing:
        return []
    pairs = ", ".join(f"{name} {getattr(reference, name)} and {getattr(policy, name)}" for name in differing[:5])
    text = f"{key}={path} is another kind of model than model.path ({pairs})"
    return [Problem(key, text, "Use a model of the same kind")]


def check_files(inputs: RunInputs) -> list[Problem]:
    """Check the headers of the models' weights, and their tokenizers."""
    problems = []
    for key, source in inputs.other_models.items():
        if source.any_config is None:
            continue
        if key not in inputs.pending_downloads:
            problems += weight_problems(source.path, key=key)
        if key.endswith(REWARD_MODEL):
            problems += problems_in(key, partial(_check_template, source))
        elif inputs.source.any_config is not None and (
            key.endswith(TEACHER) or (source.path / TOKENIZER_FILE).is_file()
        ):
            problems += token_problems(source, inputs.source, key, str(source.path))
    return problems


def _check_template(source: ModelDirectory) -> list[Problem]:
    """Read the chat template of a reward model, which encodes text with its own tokenizer and template.

    Raises:
        UserError: If the template cannot be read.
    """
    source.template  # noqa: B018 (a cached property)
    return []


def token_problems(other: ModelDirectory, source: ModelDirectory, key: str, path: str) -> list[Problem]:
    """Check that two tokenizers give every token of `source` the same id.

    Args:
        other: The directory of the other model.
        source: The directory of model.path.
        key: The other model's key in the recipe.
        path: The value of that key.
    """
    named = f"{key}={path}"
    try:
        other_ids, ids = other.tokenizer.vocabulary, source.tokenizer.vocabulary
    except UserError as error:
        return [Problem(key, f"{named}: {error}")]
    differing = [token for token, number in ids.items() if other_ids.get(token, number) != number]
    if not differing:
        return []
    token = min(differing, key=ids.__getitem__)
    text = (
        f"{named}: {len(differing)} tokens have other ids than in model.path. For example, {token!r} is "
        f"{other_ids[token]} there and {ids[token]} in model.path"
    )
    return [Problem(key, text, "Use models with the same tokenizer")]


def check_weights(source: ModelDirectory) -> None:
    """Raise UserError if the headers of a model's weights do not fit its config.json."""
    check_fit(models.build(source.config, device="meta"), WeightFiles(source.path))
