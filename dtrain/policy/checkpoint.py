"""Saving and loading of a policy: in checkpoints, and as a directory that others read.

A checkpoint holds what is trained and its optimizer's state. Frozen parameters are in the files at `model.path`, and a
checkpoint holds them only where they came from elsewhere: drawn, or from `checkpoint.init_from`.
"""

from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dtrain.adapters.config import AdapterConfig, is_adapter
from dtrain.base import hub
from dtrain.base.errors import UserError
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
    """Saver and loader of `model` and of the updater of its weights.

    directory: of the files that the model is of. dtype: that of exports. template: the file of a chat template in place
    of the model's. saves_frozen: whether the frozen parameters are in no files but the run's checkpoints.
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
        self.base_reference: Reference | None = None  # the model without its adapters, where these were loaded
        self.updater: Updater | None = None  # from `Policy.init_optimizer` on
        self._model, self._sharding = model, sharding
        self._directory, self._dtype, self._template = directory, dtype, template

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that a checkpoint holds of model and optimizer, under its names: those that are trained,
        their state, and the frozen parameters that no files hold. No collective."""
        optimizer = None if self.updater is None else self.updater.optimizer
        return training_tensors(self._model, optimizer, frozen=self.saves_frozen)

    def state(self) -> dict[str, Any]:
        """Return the part of a checkpoint beside `tensors`, as JSON: optimizer options, schedule, loss scale."""
        updater = self._updating
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
        """Fill model, optimizer and schedule from a checkpoint of whatever mesh; `state` is what `state()` gave.

        beside: what else the checkpoint holds, filled too. keep: optimizer options (`betas`, ...) that stay as the
        recipe has them. verified: as `CheckpointStore.load`. Collective. Raises UserError where the checkpoint does not
        fit.
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
        """Context in which the caller fills `tensors()` from a checkpoint. Allocates the optimizer's state before.

        Args:
            store: The checkpoints.
            step: The step that is loaded.
            state: What `state()` returned at the save.
            prefix: What the names of this model's tensors begin with in the checkpoint.
            keep: Options of the optimizer that stay as the recipe has them.
        """
        restore_optimizer(self._model, self._updating.optimizer, state["optimizer"], keep_options=keep_options)
        self.locate_frozen_weights(store, step, prefix)
        with self._sharding.writing():
            yield
        self._load_scalars(state)

    def locate_frozen_weights(self, store: CheckpointStore, step: int, prefix: str = "") -> None:
        """Find where the frozen parameters are that `load` will fill: in this checkpoint, or in files.

        Args:
            store: The checkpoints.
            step: The step that will be loaded.
            prefix: What the names of this model's tensors begin with in the checkpoint.
        """
        stored = store.tensor_specs(step)
        self.saves_frozen = any(f"{prefix}model.{name}" in stored for name in frozen_names(self._model))

    def load_weights(self, store: CheckpointStore, step: int) -> bool:
        """Fill the model alone from a checkpoint of whatever mesh: with all weights, or with the trained ones alone
        where it holds no others. Return whether it held all. New adapters stay as they are where it has none.
        Collective. Raises UserError where it does not fit.
        """
        weights = select_weights(self._model, store, step)
        if weights.has_adapters:
            self.keep_base_reference()
        with self._sharding.writing():
            store.load(step, weights.tensors, allow_extra=True, cast=weights.cast)
        self.saves_frozen |= weights.has_frozen
        return weights.is_complete

    def keep_base_reference(self) -> None:
        """Keep the model without its adapters, before these and the modules trained beside them are loaded."""
        self.base_reference = self.base_reference or Reference(
            self._model, self._sharding, copy_frozen=False, with_adapters=False
        )

    def save_checkpoint(
        self,
        weights_path: str | Path,
        optimizer_path: str | Path | None = None,
        tokenizer_path: str | Path | None = None,
    ) -> None:
        """Save the weights that `tensors` has to `weights_path`, and with a path for it the optimizer's state (with its
        schedule and loss scale) and the tokenizer's files, each in a directory that holds no other save. Collective.

        Written in full before it returns, for any mesh to load. Raises UserError where there is a save already.
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
        """Load a save of `save_checkpoint`, on whatever mesh. Collective. Raises UserError where it does not fit."""
        self.load_weights(CheckpointStore(weights_path), 0)
        if optimizer_path is None:
            return
        store = CheckpointStore(optimizer_path)
        state = store.read_state(0)
        restore_optimizer(self._model, self._updating.optimizer, state["optimizer"])
        store.load(0, self._optimizer_tensors())
        self._load_scalars(state)

    def return_state_dict(self) -> dict[str, Any]:
        """Return the model's state dict, DTensors where it is sharded. No collective."""
        self._sharding.reshard()
        return {name: to_parameter_device(tensor) for name, tensor in self._model.state_dict(keep_vars=True).items()}

    def export(self, out: Path, source: Path, saved_step: Mapping[str, Any] | None = None) -> None:
        """Write the model as a Hugging Face directory, in the dtype that the run computes in. Collective.

        An adapter is written by itself, in PEFT's layout and its own dtype. It is merged if no files hold its base, or
        if PEFT would misread it.

        source: gives config.json, the tokenizer, and weights that the model has no module for (a vision tower). held:
        as of `write_directory`. `out` is replaced once the new directory is complete.
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
        """Writer of the adapter, in PEFT's layout, into each checkpoint of a run that trains one; None for others."""
        config = self._adapter_config
        if config is None:
            return None
        from dtrain.checkpoint.peft.files import AdapterFiles

        return lambda *step: AdapterFiles(config, self._model.config, self._base_name).write_into_step(*step)

    @property
    def _adapter_config(self) -> AdapterConfig | None:
        """The config of the model's adapters, or None without adapters."""
        if self._model.adapters is None:
            return None
        from dtrain.adapters.lora import adapter_config  # a run without an adapter does not load it

        return adapter_config(self._model)

    @property
    def _is_misread_by_peft(self) -> bool:
        """Return whether PEFT would load another adapter than the model has from files in its layout."""
        from dtrain.checkpoint.peft.config import misread_problem  # a run without an adapter does not load it

        config = self._adapter_config
        return config is not None and misread_problem(config, self._model.config) is not None

    @property
    def _base_name(self) -> str | None:
        """Return the name by which others find the adapter's base; None where no files hold it."""
        return None if self.saves_frozen else hub.cached_model_id(self._directory) or str(self._directory.absolute())

    @property
    def chat_template(self) -> str | None:
        """Text of the recipe's own chat template; None where the model's is used."""
        return Path(self._template).read_text() if self._template else None

    @property
    def _updating(self) -> Updater:
        if self.updater is None:
            raise RuntimeError("the state of an optimizer is saved and loaded after Policy.init_optimizer alone")
        return self.updater

    def _optimizer_tensors(self) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in self.tensors().items() if name.startswith("optim.")}

    def _load_scalars(self, state: Mapping[str, Any]) -> None:
        self._updating.scheduler.load_state_dict(state["scheduler"])
        if self._updating.loss_scale is not None and state["loss_scale"] is not None:
            self._updating.loss_scale.load_state_dict(state["loss_scale"])


MAIN = "policy"  # the model whose tensors have no prefix in a checkpoint, as in a run that trains one model


def save_models(
    store: CheckpointStore, step: int, models: Mapping[str, PolicyCheckpoint], state: Mapping[str, Any]
) -> None:
    """Save several models with their optimizers as one step of a store.

    Args:
        store: The checkpoints. A step is never overwritten.
        step: Number of the step.
        models: `Policy.checkpoint` of each model by name. Tensors of "policy" keep the names that a run with one model
            uses, such as `model.norm.weight`. Those of a model "critic" are `critic.model.norm.weight` and so on.
        state: What else the caller wants back from `load_models`, as JSON.

    Raises:
        UserError: If the step exists, or the disk is full.
        ValueError: If a name is no word, or is `model`, `optim` or `method`, with which other tensors' names begin.

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
    """Return what the names of a model's tensors begin with in a checkpoint of several models."""
    if name == MAIN:
        return ""
    if name in ("model", "optim", "method") or not name.isidentifier():
        raise ValueError(f"a model named {name!r}: tensors would be confused with others; use a word such as critic")
    return f"{name}."


class CheckpointWeights(NamedTuple):
    """Tensors that a model takes of a checkpoint: `wanted`, of which those named in `cast` keep their dtype, [any
    shape]."""

    tensors: dict[str, Tensor]
    cast: Collection[str]
    is_complete: bool
    has_adapters: bool
    has_frozen: bool


def select_weights(model: CausalLM, store: CheckpointStore, step: int) -> CheckpointWeights:
    """Return the tensors that `load_weights` fills. UserError where the step is of a model with other parts trained. No
    collective."""
    tensors = training_tensors(model)
    stored = store.tensor_specs(step)
    adapters = {name for name in stored if is_adapter(name) and name.startswith("model.")}
    if adapters - tensors.keys():
        raise UserError(
            f"{store.path(step)} has an adapter that this run has not ({min(adapters - tensors.keys())}): set lora "
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
    held = frozen & stored.keys()
    if held and held < frozen:
        raise UserError(
            f"{store.path(step)} holds some of the weights that this run freezes, such as {min(held)}, and not "
            f"others, such as {min(frozen - held)}: its run trained other parts of the model. Freeze the same ones "
            "(lora.modules_to_save, train.vision, train.freeze, train.train_only), or export it and set model.path=OUT"
        )
    is_whole = held == frozen
    left_out = set() if is_whole else frozen
    if not adapters:
        left_out |= {name for name in tensors if is_adapter(name)}
    wanted = {name: tensor for name, tensor in tensors.items() if name not in left_out}
    cast = frozen & wanted.keys() | _of_other_dtypes(wanted, stored)
    return CheckpointWeights(wanted, cast, is_whole, bool(adapters), bool(frozen) and is_whole)


def _of_other_dtypes(tensors: Mapping[str, Tensor], stored: TensorSpecs) -> set[str]:
    """Return the names of tensors in another floating type than the stored one (`train.masters`, float64): starting
    from weights is no resume, so they may be rounded."""
    types = {name: (tensor.dtype, stored[name][1]) for name, tensor in tensors.items() if name in stored}
    return {name for name, (own, other) in types.items() if own.is_floating_point and other.is_floating_point}
