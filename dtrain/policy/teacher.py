"""A teacher: another model, frozen, on the policy's mesh, whose head a student's loss may read."""

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from dtrain.base.errors import UserError
from dtrain.losses.head.vocabulary import HeadInput
from dtrain.models.common.config import ModelConfig
from dtrain.models.common.decoder import CausalLM
from dtrain.models.read_config import read_config
from dtrain.policy.build import build_model
from dtrain.policy.policy import Policy
from dtrain.policy.precision import Precision
from dtrain.policy.score import Head, Inputs
from dtrain.recipe.schema import Model

Result = TypeVar("Result")


class Teacher:
    """Teacher: the model at `path`, of any size, with the policy's vocabulary. Collective.

    Its weights lie on the mesh as the policy's do (FSDP2, tensor and context parallel, the same plan), in the dtype of
    computation: no optimizer, no gradient, no master copy. A forward gathers one layer at a time, and the head
    (tied: with the embedding) while the student's loss reads it; nothing stays gathered after it.
    Raises UserError where the model cannot be read, or is cut over tp in another way than the policy's.
    """

    def __init__(self, policy: Policy, path: str):
        mesh, config = policy.mesh, read_config(path)
        self.model = build_frozen(policy, path, config)
        self._head = Head.of(self.model, mesh)
        cut_alike = (self._head.shard is None) == (Head.of(policy.model, mesh).shard is None)
        if config.vocab_size != policy.model.config.vocab_size or not cut_alike:
            raise UserError(
                f"distill.teacher={path}: its head holds {config.vocab_size} tokens and is "
                f"{'whole' if self._head.shard is None else 'cut over tp'}, the student's holds "
                f"{policy.model.config.vocab_size}{'' if cut_alike else ' and is not'}: take a teacher with the "
                "student's vocabulary, and a parallel.custom_plan that fits both"
            )

    def at_head(self, inputs: Inputs, fn: Callable[[HeadInput], Result]) -> Result:
        """Return `fn(the teacher's HeadInput)` for the positions of a source's `inputs`, called inside the teacher's
        forward, where its head's weight is whole but for tp. `fn` runs in the caller's grad mode; the teacher gets no
        gradient."""
        with_grad = torch.is_grad_enabled()

        def at_head(hidden: Tensor, head_weight: Tensor) -> Result:
            with torch.set_grad_enabled(with_grad):
                return fn(HeadInput(hidden.flatten(0, 1), head_weight, self._head.softcap))

        with torch.no_grad():
            return self.model.with_head(at_head, inputs.input_ids, inputs.context.of_another_model())


def build_frozen(policy: Policy, path: str, config: ModelConfig) -> CausalLM:
    """Build another model on the mesh of a policy, frozen, in the dtype of computation.

    Args:
        policy: The policy, whose recipe and options decide how the model is laid out.
        path: Directory of the model.
        config: Its config.

    Collectives:
        Those of `build_model`.
    """
    recipe, compute = policy.recipe, policy.precision.compute
    own = replace(
        recipe,
        model=Model(path=path),
        train=replace(recipe.train, activation_checkpointing="none", vision="frozen", train_only=[], freeze=[]),
        parallel=replace(recipe.parallel, reshard_after_forward=True),
        lora=None,
    )
    precision = Precision(master=compute, compute=compute, reduce=compute, reason="the policy's")
    options = replace(policy.options, longest_row=None)
    model = build_model(own, config, policy.mesh, precision, policy.device, options)
    return model.eval().requires_grad_(False)
