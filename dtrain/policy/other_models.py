"""Frozen models on the policy's mesh: a teacher for distillation, and a reward model that scores completions.

Both are built by `build_frozen_model`: sharded like the policy, in the dtype of computation, without an optimizer,
gradients or master weights.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor

from dtrain.base.batch import IGNORE_INDEX, PADDING_SEQ_ID, STREAMS, Batch, collate, document_ids, num_rows
from dtrain.base.errors import UserError
from dtrain.base.ranges import MAX_REWARD
from dtrain.data.formats.pairs import PairEncoder
from dtrain.data.model_directory import ModelDirectory
from dtrain.losses.head.vocabulary import HeadInput
from dtrain.models.common.config import ModelConfig
from dtrain.models.common.decoder import CausalLM
from dtrain.models.read_config import read_config
from dtrain.parallel.fsdp import Sharding
from dtrain.policy.batching import DynamicShapes, gather_rows, split_into_micro_batches
from dtrain.policy.build import build_model
from dtrain.policy.options import Precision
from dtrain.policy.policy import Policy
from dtrain.policy.prompt_sharing import can_share_prompts
from dtrain.policy.score import HeadSettings, ModelInputs, Scorer
from dtrain.recipe.schema import Model

Result = TypeVar("Result")


class Teacher:
    """A larger or smaller model with the policy's vocabulary, for distillation.

    A forward gathers the weights of one layer at a time, and the head's weight (with tied weights also the embedding's)
    while the student's loss reads it. Nothing stays gathered afterwards.

    Args:
        policy: The student.
        path: Directory of the teacher's model.

    Attributes:
        model: The teacher's model.
        can_share_prompts: Whether it computes the student's rows if these share their beginnings.

    Raises:
        UserError: If the model cannot be read, has another vocabulary, or shards its head in another way than the
            student.

    Collectives:
        Those of building a model.
    """

    def __init__(self, policy: Policy, path: str):
        config = read_config(path)
        self.model = build_frozen_model(policy, path, config)
        self.can_share_prompts = can_share_prompts(policy.recipe.train.share_prompts, config)
        self._head = HeadSettings.from_model(self.model, policy.mesh)
        student_size = policy.model.config.vocab_size
        if config.vocab_size != student_size:
            raise UserError(
                f"distill.teacher={path}: the teacher has a vocabulary of {config.vocab_size} tokens, and the student "
                f"one of {student_size}. Use a teacher with the student's vocabulary"
            )
        # The distillation losses compare shard with shard.
        is_sharded = self._head.shard is not None
        student_is_sharded = HeadSettings.from_model(policy.model, policy.mesh).shard is not None
        if is_sharded != student_is_sharded:
            sharded, unsharded = ("teacher", "student") if is_sharded else ("student", "teacher")
            raise UserError(
                f"distill.teacher={path}: the {sharded}'s head is sharded over tp, and the {unsharded}'s is not. Use a "
                "parallel.custom_plan that fits both models"
            )

    def run_at_head(self, inputs: ModelInputs, fn: Callable[[HeadInput], Result]) -> Result:
        """Run the teacher's forward, and call a function inside of it, at the head.

        Args:
            inputs: The student's input (`LogprobSource.inputs`).
            fn: Receives the teacher's hidden states, at the positions that the student's loss reads, and head weight.
                It runs in the caller's grad mode, but the teacher itself gets no gradient.

        Returns:
            The result of `fn`.

        Collectives:
            Those of the teacher's forward and of `fn`.
        """
        is_grad_enabled = torch.is_grad_enabled()

        def at_head(hidden: Tensor, head_weight: Tensor) -> Result:
            with torch.set_grad_enabled(is_grad_enabled):
                states = inputs.states_for_loss(hidden).flatten(0, 1)
                return fn(HeadInput(states, head_weight, self._head.softcap))

        with torch.no_grad():
            return self.model.with_head(at_head, inputs.input_ids, inputs.context.for_another_model())


class RewardModel:
    """A classifier with one output that scores prompts with their completions.

    The reward model encodes text with its own tokenizer and chat template, as `method: reward` does in training. So it
    may belong to another family than the policy.

    Args:
        policy: The policy, whose mesh and recipe are used.
        source: The reward model's directory.

    Attributes:
        model: The reward model.

    Raises:
        UserError: If the model cannot be read.

    Collectives:
        Those of building a model.
    """

    def __init__(self, policy: Policy, source: ModelDirectory):
        self._policy, self._source = policy, source
        self.model = build_frozen_model(policy, str(source.path), source.config)
        self._sharding = Sharding(self.model)
        self._scorer = Scorer(self.model, policy.mesh, policy.device)
        self._pad_id = source.config.pad_token_id
        self._batching = DynamicShapes(policy.recipe.train.num_micro_batch_rows * policy.recipe.data.max_length)

    @cached_property
    def _encoder(self) -> PairEncoder:
        """Encoder of texts by the model's own tokenizer and template, which are read at the first use."""
        source = self._source
        return PairEncoder(source.tokenizer, source.template, max_length=source.config.max_position_embeddings)

    def rate(self, prompts: Sequence[Any], completions: Sequence[str]) -> Tensor:
        """Score prompts with their completions.

        Rank r of dp scores the prompts r, r + dp, r + 2 · dp and so on. If a text has more tokens than the model has
        positions, its beginning is cut off.

        Args:
            prompts: N texts or lists of messages, the same on every rank.
            completions: N texts, the same on every rank.

        Returns:
            The scores, float64 [N] on the CPU, the same on every rank.

        Raises:
            UserError: If the chat template raises it, and for a score that is NaN or larger than `MAX_REWARD` in size.

        Collectives:
            Over dp one all-reduce and two all-gathers, and those of the forwards.
        """
        dp_size, dp_rank = self._policy.mesh.dp_size, self._policy.mesh.dp_rank
        rows = []
        for index in range(dp_rank, len(prompts), dp_size):
            rows.append(_document_row(self._ids(prompts[index], completions[index])))
        local_scores = torch.zeros(len(rows), dtype=torch.float64)
        batches, plan, _ = split_into_micro_batches(collate(rows), self._batching, len(rows), self._policy.mesh.dp)
        with torch.no_grad():
            for index, batch in enumerate(batches):
                no_targets = torch.zeros(num_rows(batch), dtype=torch.float64)
                labelled = add_targets_at_last_tokens(batch, no_targets, self._pad_id)
                scores = self._scorer.run_at_head(labelled, lambda source, _: source.scores())
                if index < len(plan):  # micro-batches beyond the plan are padding
                    local_scores[plan[index]] = scores[:, 0].double().cpu()
        self._sharding.reshard()

        # The gathered scores are in the order of the ranks: 0, dp, 2·dp, ..., 1, dp + 1, ...
        gathered = gather_rows(local_scores, self._policy.mesh.dp).rows
        order = [index for rank in range(dp_size) for index in range(rank, len(prompts), dp_size)]
        scores = torch.empty_like(gathered).index_copy(0, torch.tensor(order, dtype=torch.int64), gathered)
        unusable = (~(scores.abs() <= MAX_REWARD)).nonzero()  # NaN compares as False
        if len(unusable):
            raise UserError(
                f"grpo.reward_model gave {scores[unusable[0]].item()} for a completion; a number of at most "
                f"{MAX_REWARD:g} in size is needed: is it a reward model, and are its weights complete?"
            )
        return scores

    def _ids(self, prompt: Any, completion: str) -> list[int]:
        if isinstance(prompt, str):
            ids = self._encoder.encode_text(prompt + completion)
        elif prompt and isinstance(prompt[0], Mapping):
            ids = self._encoder.encode_conversation([*prompt, {"role": "assistant", "content": completion}])
        else:
            raise UserError("grpo.reward_model reads text, but these prompts are token ids. Provide prompts as text")
        return ids[-self._encoder.max_length :]


def _document_row(ids: list[int]) -> dict[str, Tensor]:
    tokens = torch.tensor(ids)
    return {
        "input_ids": tokens,
        "labels": torch.full_like(tokens, IGNORE_INDEX),
        "position_ids": torch.arange(len(ids)),
        "seq_ids": torch.zeros_like(tokens),
    }


def add_targets_at_last_tokens(batch: Batch, values: Tensor, pad: int | None) -> Batch:
    """Add one label (0) and one target to each document of a batch, at its last token that is not `pad`.

    A classifier reads its output there, as transformers' classifiers do.

    Args:
        batch: Rows on the host, [n, S].
        values: The target of each document, [documents].
        pad: Id of the padding token, with which a text may end. None uses the last token of each document. A document
            that consists only of `pad` has its label at its first token.

    Returns:
        The batch with new `labels`, [n, S], and the stream `targets`, float64 [n, S].
    """
    ids = document_ids(batch)
    flat_ids = ids.flatten()
    positions = torch.arange(len(flat_ids))
    # The maximum of position + 1 over a document's tokens other than `pad` is the position after the last such token.
    # It is 0 if a document has no such token.
    is_pad = torch.zeros_like(flat_ids, dtype=torch.bool) if pad is None else batch["input_ids"].flatten() == pad
    behind = torch.where(is_pad, 0, positions + 1)
    real = flat_ids != PADDING_SEQ_ID
    ends = torch.zeros(len(values), dtype=torch.int64).scatter_reduce(0, flat_ids[real], behind[real], "amax")
    firsts = torch.full_like(ends, len(flat_ids)).scatter_reduce(0, flat_ids[real], positions[real], "amin")
    index = torch.where(ends > 0, ends - 1, firsts)
    labels = torch.full_like(flat_ids, IGNORE_INDEX).index_fill(0, index, 0)
    targets = torch.zeros(len(flat_ids), dtype=STREAMS["targets"].dtype).index_copy(0, index, values)
    return {**batch, "labels": labels.view_as(ids), "targets": targets.view_as(ids)}


def build_frozen_model(policy: Policy, path: str, config: ModelConfig) -> CausalLM:
    """Build another model on the mesh of a policy, frozen, in the dtype of computation.

    Args:
        policy: The policy, whose mesh, recipe and options are used.
        path: Directory of the model.
        config: Its config.

    Collectives:
        Those of `build_model`.
    """
    recipe, compute = policy.recipe, policy.precision.compute
    frozen_recipe = replace(
        recipe,
        model=Model(path=path),
        train=replace(recipe.train, activation_checkpointing="none", vision="frozen", train_only=[], freeze=[]),
        parallel=replace(recipe.parallel, reshard_after_forward=True),
        lora=None,
    )
    precision = Precision(master=compute, compute=compute, reduce=compute, reason="the policy's")
    options = replace(policy.options, max_row_length=None)
    model = build_model(frozen_recipe, config, policy.mesh, precision, policy.device, options)
    return model.eval().requires_grad_(False)
