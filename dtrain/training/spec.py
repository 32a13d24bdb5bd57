"""The spec of a run: everything that follows from its recipe, its files and its ranks, decided once by `resolve`.

Each topic has a module in `training.setup`. Its functions accept the facts that they need and return new ones, which
are not changed afterwards. Each rank of a run calls `resolve`. The other commands call the same functions:

    dtrain run       the checks (`training.dry_run`) in the launcher; then `resolve` on each rank
    dtrain validate  `training.dry_run`: the checks, then the functions of `resolve`, in one process
    dtrain plan      the checks of keys and models, then the functions up to the sizes
    dtrain preview   the rows of `setup.data`

Nothing is allocated: the model is on the meta device, and only the headers of weights are read.
"""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from dtrain.base.ranks import Ranks
from dtrain.checkpoint.dcp.store import CheckpointStore
from dtrain.data.model_directory import ModelDirectory
from dtrain.data.rows.rows import Rows
from dtrain.models.common.config import ModelConfig
from dtrain.parallel.mesh import Runtime
from dtrain.policy.options import Precision, choose_precision
from dtrain.recipe import Recipe, Sizes
from dtrain.training import resume
from dtrain.training.directory import RunDirectory
from dtrain.training.eval_sets import EvalFacts
from dtrain.training.host import Host
from dtrain.training.inputs import RunInputs, World
from dtrain.training.metrics import Recorder
from dtrain.training.resume import Start
from dtrain.training.setup import data as data_setup, model as model_setup, outputs, schedule, sizes, start
from dtrain.training.setup.data import DataFacts
from dtrain.training.setup.model import MetaModel

if TYPE_CHECKING:
    from dtrain.methods import Method
    from dtrain.recipe.rollouts import Reward
    from dtrain.rl.evaluation import Questions


@dataclass(frozen=True)
class RunSpec:
    """Every decision about a run, made before its model is built.

    Attributes:
        original_recipe: The recipe as it was given.
        recipe: The recipe with values in place of `auto`.
        run: The run's directory.
        source: The directory of model.path.
        other_models: The directories of the method's other models, by key.
        method: The method of `recipe`.
        precision: Dtypes of the weights and of the computation.
        model_config: The config of the model, with its vision tower if the data have images.
        has_images: Whether the data or the questions of `eval` have images.
        rows: Rows by split.
        questions: On rank 0, the questions and rewards of each set of `eval`.
        sizes: The mesh and the batch.
        store: The run's checkpoints.
        start: The checkpoint that the run starts from, or a fresh start.
        identities: Digests of everything that the run reads at its start.
        changes: Lines on differences from the recipe of the checkpoint.
        total_steps: The last step.
        validate_every: Steps between validations. None: no validation.
        notes: Lines for the user.
    """

    original_recipe: Recipe
    recipe: Recipe
    run: RunDirectory
    source: ModelDirectory
    other_models: Mapping[str, ModelDirectory]
    method: "Method"
    precision: Precision
    model_config: ModelConfig
    has_images: bool
    rows: Mapping[str, Rows]
    questions: "Mapping[str, tuple[Questions, list[Reward]]]"
    sizes: Sizes
    store: CheckpointStore
    start: Start
    identities: Mapping[str, str]
    changes: tuple[str, ...]
    total_steps: int
    validate_every: int | None
    notes: tuple[str, ...]


@dataclass(frozen=True)
class ResolvedRun:
    """The result of `resolve`.

    Attributes:
        spec: The run's spec.
        host: The ranks.
        recorder: The open sinks of the run's metrics.
    """

    spec: RunSpec
    host: Host
    recorder: Recorder


def resolve(recipe: Recipe, runtime: Runtime, stack: ExitStack) -> ResolvedRun:
    """Resolve the spec of a run on this rank.

    Args:
        recipe: The recipe, which was checked already (`training.dry_run`).
        runtime: This rank.
        stack: Until it closes, the run's directory is locked and its metrics are open.

    Raises:
        UserError: On every rank, for the first problem.

    Collectives:
        Over all ranks.
    """
    ranks = Ranks()
    inputs = RunInputs.of(recipe, World(runtime.world_size, runtime.device.type))
    recorder = outputs.open_outputs(inputs, ranks, runtime.is_main, stack)
    host = Host(ranks, recorder.print_line)
    inputs.source.tokenizer  # noqa: B018 (a cached property; a tokenizer that cannot be read ends the run here)
    precision = choose_precision(recipe.train.dtype, runtime.device.type, recipe.train.masters)
    if inputs.library_models:
        from dtrain.training.setup import transformers_models  # only for models of transformers

        host.on_first_rank("model.path", partial(transformers_models.prove_on_first_rank, inputs))

    # The model is built on meta before the data are read, because reading may take long and mistakes in the model
    # should be found early. But a model has its vision tower only if the data have images. There are three cases:
    #
    #     the recipe has patterns that may match the tower    build once, after the data (lora.target, train.freeze)
    #     otherwise, data without images                      build once, before the data
    #     otherwise, data with images                         build before the data, and again with the tower after it
    waits_for_data = model_setup.may_name_tower(inputs)
    meta: MetaModel | None = None
    if not waits_for_data:
        meta = host.on_first_rank("model", partial(model_setup.build, inputs, precision, False))
    identities = resume.identities(inputs, ranks)
    check_other_models(inputs, host)
    data = data_setup.open_data(inputs, host)
    evals = read_evals(inputs, data, host)
    has_images = data.has_images or evals.has_images
    model_setup.refuse_unused_tower(data.recipe, has_images)
    if has_images or waits_for_data:
        meta = host.on_first_rank("model", partial(model_setup.build, inputs, precision, has_images))

    size_facts = sizes.decide(inputs, data, host)
    assert size_facts is not None, "only a dry run returns None; a rank raises instead"
    if size_facts.steps is not None:
        schedule.refuse_idle(size_facts.recipe, size_facts.method, data.rows["train"], size_facts.steps)
    start_facts = start.resolve(inputs, data, size_facts, meta, {**identities, **data.identities}, host)
    assert start_facts is not None and start_facts.total_steps is not None, "only a dry run returns None"
    spec = RunSpec(
        original_recipe=inputs.original_recipe,
        recipe=size_facts.recipe,
        run=inputs.run,
        source=inputs.source,
        other_models=inputs.other_models,
        method=size_facts.method,
        precision=precision,
        model_config=inputs.model_config(has_images),
        has_images=has_images,
        rows=data.rows,
        questions=evals.questions,
        sizes=size_facts.sizes,
        store=start_facts.store,
        start=start_facts.start,
        identities=start_facts.identities,
        changes=start_facts.changes,
        total_steps=start_facts.total_steps,
        validate_every=start_facts.validate_every,
        notes=(*evals.notes, *size_facts.notes),
    )
    return ResolvedRun(spec, host, recorder)


def check_other_models(inputs: RunInputs, host: Host) -> None:
    """Check on rank 0 that the weights of the reference, the teacher and the reward model fit their configs.

    Raises:
        UserError: On every rank.

    Collectives:
        One broadcast for each model.
    """
    if not inputs.other_models:
        return
    from dtrain.training.setup import other_models  # most runs need no second model

    for key, source in inputs.other_models.items():
        if key not in inputs.pending_downloads:
            host.on_first_rank(key, partial(other_models.check_weights, source))


def read_evals(inputs: RunInputs, data: DataFacts, host: Host) -> EvalFacts:
    """Read the sets of `eval`, if the recipe has any. Errors and collectives are those of `setup.evals.read_sets`."""
    if not inputs.recipe.evals:
        return EvalFacts()
    from dtrain.training.setup import evals  # loads rl and inference, which a run without `eval` does not need

    return evals.read_sets(inputs, data.num_string_prompts, host)
