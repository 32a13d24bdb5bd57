"""Saving and loading of a policy: as checkpoints, and as a model directory for other programs.

A checkpoint contains the trained parameters and their optimizer's state. Frozen parameters are not saved, because they
are in the files at `model.path`. There are two exceptions, in which no such file exists: a model with random initial
weights (`model.init=scratch`), and frozen weights that came from another checkpoint (`checkpoint.init_from`).
`PolicyCheckpoint.saves_frozen` is True then.

`save_models` and `load_models` store several policies in one step, for example an actor and its critic.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dtrain.adapters.config import AdapterConfig, is_adapter
from dtrain.base import hub
from dtrain.base.errors import UserError
from dtrain.base.files import FileRecord
from dtrain.base.model_directory import is_template_text
from dtrain.base.ranks import Ranks
from dtrain.checkpoint.dcp.store import CheckpointStore, ExtraFilesWriter, TensorSpecs
from dtrain.checkpoint.dcp.training_state import (
    SCORE_WEIGHT,
    frozen_names,
    model_tensors,
    optimizer_state,
    restore_optimizer,
    training_tensors,
)
from dtrain.checkpoint.huggingface.model_files import copy_companions
from dtrain.models.common.decoder import CausalLM
from dtrain.optim.update import Updater
from dtrain.parallel.fsdp import Sharding
from dtrain.parallel.placement import to_parameter_device
from dtrain.policy.reference import Reference


class PolicyCheckpoint:
    """Saves and loads a model and its optimizer.

    Args:
        model: The model, sharded over its mesh.
        sharding: Sharding of `model`.
        directory: Directory of the model's files.
        dtype: Dtype of exports.
        template: File of a chat template that replaces the model's; None keeps the model's.
        saves_frozen: Whether checkpoints contain the frozen parameters, because no files have them.

    Attributes:
        saves_frozen: As the argument. Loading a checkpoint that contains them sets it.
        base_reference: The model without its adapters, if these were loaded from files or a checkpoint; else None.
        updater: Optimizer, schedule and loss scale; None before `Policy.init_optimizer`.
    """

    def __init__(
        self,
        model: CausalLM,
        sharding: Sharding,
        directory: Path,
        dtype: torch.dtype,
        *,
        template: str | None,
        saves_frozen: bool,
    ):
        self.saves_frozen = saves_frozen
        self.base_reference: Reference | None = None
        self.updater: Updater | None = None
        self._model, self._sharding = model, sharding
        self._directory, self._dtype, self._template = directory, dtype, template

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors of a checkpoint by name. No collective.

        These are the trained parameters, the optimizer's state, and with `saves_frozen` the frozen parameters.
        """
        optimizer = None if self.updater is None else self.updater.optimizer
        return training_tensors(self._model, optimizer, frozen=self.saves_frozen)

    def state(self) -> dict[str, Any]:
        """Return the part of a checkpoint that is JSON: the optimizer's options and scalars, schedule, loss scale."""
        updater = self._required_updater
        return {
            "optimizer": optimizer_state(self._model, updater.optimizer),
            "scheduler": updater.scheduler.state_dict(),
            "loss_scale": updater.loss_scale.state_dict() if updater.loss_scale is not None else None,
        }

    def load(
        self,
        store: CheckpointStore,
        step: int,
        state: Mapping[str, Any],
        *,
        extra_tensors: Mapping[str, Tensor],
        keep_options: Collection[str] = (),
        verified: bool = False,
    ) -> None:
        """Fill model, optimizer and schedule from a checkpoint that was saved on any mesh.

        Args:
            store: The checkpoints.
            step: The step to load.
            state: What `state()` returned at the save.
            extra_tensors: Further tensors of the checkpoint, which are filled too.
            keep_options: Options of the optimizer, such as `betas`, that keep the recipe's value.
            verified: As in `CheckpointStore.load`.

        Raises:
            UserError: If the checkpoint does not fit.

        Collectives:
            Those of `CheckpointStore.load`.
        """
        with self.restoring(store, step, state, keep_options=keep_options):
            store.load(step, self.tensors() | dict(extra_tensors), verified=verified)

    @contextmanager
    def restoring(
        self,
        store: CheckpointStore,
        step: int,
        state: Mapping[str, Any],
        prefix: str = "",
        keep_options: Collection[str] = (),
    ) -> Iterator[None]:
        """Prepare for a load inside of this context, in which the caller fills `tensors()` from a checkpoint.

        The optimizer's state is allocated on entry. Schedule and loss scale are loaded on exit.

        Args:
            store: The checkpoints.
            step: The step that is loaded.
            state: What `state()` returned at the save.
            prefix: Prefix of the names of this model's tensors in the checkpoint.
            keep_options: Options of the optimizer that keep the recipe's value.
        """
        restore_optimizer(self._model, self._required_updater.optimizer, state["optimizer"], keep_options=keep_options)
        self.locate_frozen_weights(store, step, prefix)
        with self._sharding.writing():
            yield
        self._load_scalars(state)

    def locate_frozen_weights(self, store: CheckpointStore, step: int, prefix: str = "") -> None:
        """Set `saves_frozen` to whether a checkpoint contains the frozen parameters. No collective.

        Args:
            store: The checkpoints.
            step: The step that will be loaded.
            prefix: Prefix of the names of this model's tensors in the checkpoint.
        """
        stored = store.tensor_specs(step)
        self.saves_frozen = any(f"{prefix}model.{name}" in stored for name in frozen_names(self._model))

    def load_weights(self, store: CheckpointStore, step: int) -> bool:
        """Fill the model, but not the optimizer, from a checkpoint that was saved on any mesh.

        New adapters keep their values if the checkpoint has none.

        Args:
            store: The checkpoints.
            step: The step to load.

        Returns:
            Whether the checkpoint has all weights of the model. If not, only the trained weights were loaded.

        Raises:
            UserError: If the checkpoint does not fit.

        Collectives:
            Those of `CheckpointStore.load`.
        """
        weights = select_weights(self._model, store, step)
        if weights.has_adapters:
            self.keep_base_reference()
        with self._sharding.writing():
            store.load(step, weights.tensors, allow_extra=True, cast=weights.cast)
        self.saves_frozen |= weights.has_frozen
        return weights.is_complete

    def keep_base_reference(self) -> None:
        """Copy the model without its adapters, before adapters and fully trained modules are loaded. No collective."""
        if self.base_reference is None:
            self.base_reference = Reference(self._model, self._sharding, copy_frozen=False, with_adapters=False)

    def save_checkpoint(
        self,
        weights_path: str | Path,
        optimizer_path: str | Path | None = None,
        tokenizer_path: str | Path | None = None,
    ) -> None:
        """Save weights, optimizer and tokenizer to directories, each of which must not contain a save yet.

        The files can be loaded on any mesh. They are complete when this returns.

        Args:
            weights_path: Directory for the model's part of `tensors()`.
            optimizer_path: Directory for the optimizer's state, its schedule and loss scale. None does not save them.
            tokenizer_path: Directory for the tokenizer's files. None does not save them.

        Raises:
            UserError: If a directory contains a save.

        Collectives:
            Those of `CheckpointStore.save`, once or twice, and up to two broadcasts of objects.
        """
        weights = training_tensors(self._model, frozen=self.saves_frozen)
        CheckpointStore(weights_path).save(0, weights, {})
        if optimizer_path is not None:
            CheckpointStore(optimizer_path).save(0, self._optimizer_tensors(), self.state())
        if tokenizer_path is not None:
            target = Path(tokenizer_path)
            Ranks().run_on_first(lambda: target.mkdir(parents=True, exist_ok=True))
            Ranks().run_on_first(lambda: copy_companions(self._directory, target, chat_template=self.chat_template))

    def load_checkpoint(self, weights_path: str | Path, optimizer_path: str | Path | None = None) -> None:
        """Load a save of `save_checkpoint`, on any mesh. Raises UserError if it does not fit.

        Collectives:
            Those of `CheckpointStore.load`, once or twice.
        """
        self.load_weights(CheckpointStore(weights_path), 0)
        if optimizer_path is None:
            return
        store = CheckpointStore(optimizer_path)
        state = store.read_state(0)
        restore_optimizer(self._model, self._required_updater.optimizer, state["optimizer"])
        store.load(0, self._optimizer_tensors())
        self._load_scalars(state)

    def return_state_dict(self) -> dict[str, Any]:
        """Return the model's state dict, DTensors where it is sharded. No collective."""
        self._sharding.reshard()
        return {name: to_parameter_device(tensor) for name, tensor in self._model.state_dict(keep_vars=True).items()}

    def export(self, out: Path, source: Path, saved_step: Mapping[str, Any] | None = None) -> None:
        """Write the model as a Hugging Face directory, in the dtype of computation.

        For a model with adapters, only the adapter is written, in PEFT's layout and its own dtype. There are two
        exceptions, in which the full model is written with the adapter merged: no files have the base
        (`saves_frozen`), or PEFT would misread the adapter.

        Args:
            out: The directory. It is replaced once the new one is complete.
            source: Directory with config.json, the tokenizer, and weights for which the model has no module, such as
                those of a vision tower.
            saved_step: As in `write_directory`.

        Collectives:
            One all-gather per sharded tensor that is written.
        """
        dtype, template = self._dtype, self.chat_template
        if self._adapter_config is None or self._base_name is None or self._is_misread_by_peft:
            from dtrain.checkpoint.huggingface.write import write_directory

            write_directory(
                self._model,
                out,
                source,
                dtype,
                replace=True,
                chat_template=template,
                saved_step=saved_step,
                tower_in_files=not self.saves_frozen,
            )
            return
        from dtrain.checkpoint.peft.files import write_adapter

        write_adapter(
            out,
            model_tensors(self._model),
            self._adapter_config,
            self._model.config,
            self._base_name,
            companions=source,
            chat_template=template,
            saved_step=saved_step,
            replace=True,
        )

    @property
    def adapter_writer(self) -> ExtraFilesWriter | None:
        """Function that writes the adapter in PEFT's layout into each checkpoint; None for a model without adapters.

        Pass it to `CheckpointStore.save` as `write_extra_files`.
        """
        config = self._adapter_config
        if config is None:
            return None
        from dtrain.checkpoint.peft.files import AdapterFiles  # a run without an adapter does not load it

        def write(directory: Path, specs: TensorSpecs, read: Callable[[str], Tensor]) -> Mapping[str, FileRecord]:
            # The base's name is read at each save, because `load_weights` may change it.
            files = AdapterFiles(config, self._model.config, self._base_name)
            return files.write_into_step(directory, specs, read)

        return write

    @property
    def _adapter_config(self) -> AdapterConfig | None:
        """Config of the model's adapters; None without adapters."""
        if self._model.adapters is None:
            return None
        from dtrain.adapters.lora import adapter_config  # a run without an adapter does not load it

        return adapter_config(self._model)

    @property
    def _is_misread_by_peft(self) -> bool:
        """Whether PEFT would load the adapter's files as another adapter (see `misread_layers`)."""
        from dtrain.checkpoint.peft.config import misread_problem  # a run without an adapter does not load it

        config = self._adapter_config
        return config is not None and misread_problem(config, self._model.config) is not None

    @property
    def _base_name(self) -> str | None:
        """The base model's id on the hub, or else its directory. None if no files have the base."""
        if self.saves_frozen:
            return None
        return hub.cached_model_id(self._directory) or str(self._directory.absolute())

    @property
    def chat_template(self) -> str | None:
        """Text of the chat template that the recipe names; None if the model's own is used."""
        if self._template is None or is_template_text(self._template):
            return self._template
        return Path(self._template).read_text()

    @property
    def _required_updater(self) -> Updater:
        if self.updater is None:
            raise RuntimeError("an optimizer's state can be saved and loaded only after Policy.init_optimizer")
        return self.updater

    def _optimizer_tensors(self) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in self.tensors().items() if name.startswith("optim.")}

    def _load_scalars(self, state: Mapping[str, Any]) -> None:
        self._required_updater.scheduler.load_state_dict(state["scheduler"])
        if self._required_updater.loss_scale is not None and state["loss_scale"] is not None:
            self._required_updater.loss_scale.load_state_dict(state["loss_scale"])


MAIN = "policy"
"""Name of the model whose tensors have no prefix in a checkpoint, as in a run that trains only one model."""


def save_models(
    store: CheckpointStore, step: int, models: Mapping[str, PolicyCheckpoint], state: Mapping[str, Any]
) -> None:
    """Save several models with their optimizers as one step of a store.

    Args:
        store: The checkpoints. A step is never overwritten.
        step: Number of the step.
        models: `Policy.checkpoint` of each model by name. Tensors of "policy" keep the names that a run with one model
            uses, such as `model.norm.weight`. The names of other models get a prefix: with the name "critic", the
            tensor is `critic.model.norm.weight`.
        state: Further state of the caller as JSON. `load_models` returns it.

    Raises:
        UserError: If the step exists, or the disk is full.
        ValueError: If a name is not an identifier, or is `model`, `optim` or `method`, which are prefixes of other
            tensors' names.

    Collectives:
        Those of `CheckpointStore.save`.
    """
    tensors: dict[str, Tensor] = {}
    states = {}
    for name, checkpoint in models.items():
        for key, tensor in checkpoint.tensors().items():
            tensors[f"{_prefix(name)}{key}"] = tensor
        states[name] = checkpoint.state()
    store.save(step, tensors, {"models": states, "state": dict(state)})


def load_models(store: CheckpointStore, step: int, models: Mapping[str, PolicyCheckpoint]) -> dict[str, Any]:
    """Load every model and optimizer that `save_models` has saved, on any mesh.

    Args:
        store: The checkpoints.
        step: Number of the step.
        models: `Policy.checkpoint` of each model, under the names of the save. Each needs its optimizer.

    Returns:
        The caller's own state.

    Raises:
        UserError: If the checkpoint has other models, or a model does not fit. Then no weight was changed.

    Collectives:
        Those of `CheckpointStore.load`.
    """
    saved = store.read_state(step)
    states = saved.get("models", {})
    if states.keys() != models.keys():
        raise UserError(
            f"{store.path(step)} has the models {', '.join(sorted(states)) or 'none'}, and "
            f"{', '.join(sorted(models))} are to be loaded: pass the same names as to save_models"
        )
    tensors: dict[str, Tensor] = {}
    with ExitStack() as stack:
        for name, checkpoint in models.items():
            stack.enter_context(checkpoint.restoring(store, step, states[name], _prefix(name)))
            for key, tensor in checkpoint.tensors().items():
                tensors[f"{_prefix(name)}{key}"] = tensor
        store.load(step, tensors)
    return saved["state"]


def _prefix(name: str) -> str:
    """Return the prefix of the names of a model's tensors in a checkpoint of several models.

    >>> _prefix("policy"), _prefix("critic")
    ('', 'critic.')
    """
    if name == MAIN:
        return ""
    if name in ("model", "optim", "method") or not name.isidentifier():
        raise ValueError(f"a model cannot be named {name!r} in a checkpoint; use a word such as critic")
    return f"{name}."


class CheckpointWeights(NamedTuple):
    """Tensors of a model that are filled from a checkpoint without its optimizer.

    Attributes:
        tensors: The tensors of any shape, by their names in the checkpoint.
        cast: Names of the tensors that are cast to their own dtype if the checkpoint has another dtype.
        is_complete: Whether the checkpoint has all frozen weights of the model too.
        has_adapters: Whether the checkpoint has adapters.
        has_frozen: Whether the model has frozen weights, and the checkpoint has them.
    """

    tensors: dict[str, Tensor]
    cast: Collection[str]
    is_complete: bool
    has_adapters: bool
    has_frozen: bool


def select_weights(model: CausalLM, store: CheckpointStore, step: int) -> CheckpointWeights:
    """Select the tensors that `load_weights` fills. No collective.

    Args:
        model: The model, which may be on meta.
        store: The checkpoints.
        step: The step to load.

    Raises:
        UserError: If other parts of the model were trained in the checkpoint's run.
    """
    tensors = training_tensors(model)
    stored = store.tensor_specs(step)
    adapters = {name for name in stored if is_adapter(name) and name.startswith("model.")}
    unknown_adapters = adapters - tensors.keys()
    if unknown_adapters:
        raise UserError(
            f"{store.path(step)} has an adapter that this run has not ({min(unknown_adapters)}): set lora "
            "as its run has it, or merge it (`dtrain export RUN OUT --merged`) and set model.path=OUT"
        )
    if SCORE_WEIGHT in tensors and SCORE_WEIGHT not in stored:
        raise UserError(
            f"{store.path(step)} is of a language model, without a head of rewards: `dtrain export` it, and set "
            "model.path=OUT and checkpoint.init_from=null"
        )
    if SCORE_WEIGHT in stored and SCORE_WEIGHT not in tensors:
        raise UserError(
            f"{store.path(step)} is of a model that rates texts (method=reward): its weights make no language model. "
            "Name a run of another method"
        )
    frozen = {f"model.{name}" for name in frozen_names(model)}
    stored_frozen = frozen & stored.keys()
    is_complete = stored_frozen == frozen
    if stored_frozen and not is_complete:
        raise UserError(
            f"{store.path(step)} has some of the weights that this run freezes, such as {min(stored_frozen)}, and not "
            f"others, such as {min(frozen - stored_frozen)}: its run trained other parts of the model. Freeze the same "
            "ones (lora.modules_to_save, train.vision, train.freeze, train.train_only), or export it and set "
            "model.path=OUT"
        )
    excluded = set() if is_complete else set(frozen)
    if not adapters:
        excluded |= {name for name in tensors if is_adapter(name)}
    selected = {name: tensor for name, tensor in tensors.items() if name not in excluded}
    cast = frozen & selected.keys() | _floating_in_both(selected, stored)
    return CheckpointWeights(selected, cast, is_complete, bool(adapters), bool(frozen) and is_complete)


def _floating_in_both(tensors: Mapping[str, Tensor], stored: TensorSpecs) -> set[str]:
    """Return the names of tensors that have a floating dtype here and in the checkpoint.

    A start from weights is not a resume, so it may round these tensors to another dtype (`train.masters`, float64).
    """
    names = set()
    for name, tensor in tensors.items():
        if name in stored and tensor.is_floating_point() and stored[name][1].is_floating_point:
            names.add(name)
    return names
