"""Other models on the policy's mesh, all of them frozen: a teacher, and a reward model.

A student's loss may read the teacher's head. A reward model rates texts.
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
from dtrain.policy.score import HeadSettings, ModelInputs, Scorer
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
        self.model = build_frozen_model(policy, path, config)
        self._head = HeadSettings.of(self.model, mesh)
        cut_alike = (self._head.shard is None) == (HeadSettings.of(policy.model, mesh).shard is None)
        if config.vocab_size != policy.model.config.vocab_size or not cut_alike:
            raise UserError(
                f"distill.teacher={path}: its head holds {config.vocab_size} tokens and is "
                f"{'whole' if self._head.shard is None else 'cut over tp'}, the student's holds "
                f"{policy.model.config.vocab_size}{'' if cut_alike else ' and is not'}: take a teacher with the "
                "student's vocabulary, and a parallel.custom_plan that fits both"
            )

    def run_at_head(self, inputs: ModelInputs, fn: Callable[[HeadInput], Result]) -> Result:
        """Return `fn(the teacher's HeadInput)` for the positions of a source's `inputs`, called inside the teacher's
        forward, where its head's weight is whole but for tp. `fn` runs in the caller's grad mode; the teacher gets no
        gradient."""
        with_grad = torch.is_grad_enabled()

        def at_head(hidden: Tensor, head_weight: Tensor) -> Result:
            with torch.set_grad_enabled(with_grad):
                return fn(HeadInput(hidden.flatten(0, 1), head_weight, self._head.softcap))

        with torch.no_grad():
            return self.model.with_head(at_head, inputs.input_ids, inputs.context.for_another_model())


class RewardModel:
    """Classifier of one output, read from `path`, that scores prompts and their completions. Collective.

    It reads text, with its own chat template and its own tokenizer, as `method: reward` trains it: another family than
    the policy's will do. Its weights lie on the mesh as a teacher's do. Raises UserError where it cannot be read.
    """

    def __init__(self, policy: Policy, source: ModelDirectory):
        self._policy, self._source, config = policy, source, source.config
        self.model = build_frozen_model(policy, str(source.path), config)
        self._sharding = Sharding(self.model)
        self._scorer = Scorer(self.model, policy.mesh, policy.device)
        self._pad, recipe = config.pad_token_id, policy.recipe
        self._batching = DynamicShapes(recipe.train.num_micro_batch_rows * recipe.data.max_length)

    @cached_property
    def _encoder(self) -> PairEncoder:
        """Encoder of texts, by the model's own tokenizer and template, which are read at the first use."""
        source = self._source
        return PairEncoder(source.tokenizer, source.template, max_length=source.config.max_position_embeddings)

    def rate(self, prompts: Sequence[Any], completions: Sequence[str]) -> Tensor:
        """Return the scores [N], float64 on the CPU, the same on every rank, of N prompts (texts or lists of messages)
        with their completions. Each dp rank computes every dp-th; an all-reduce and two all-gathers beside those of
        forwards. A text beyond the model's positions loses its beginning. Raises UserError as the template does, and
        for a score that is NaN, or too large to compute with."""
        policy = self._policy
        mine = range(policy.mesh.dp_rank, len(prompts), policy.mesh.dp_size)
        rows = [_document_row(self._ids(prompts[index], completions[index])) for index in mine]
        own_scores = torch.zeros(len(rows), dtype=torch.float64)
        batches, plan = split_into_micro_batches(collate(rows), self._batching, len(rows), policy.mesh.dp)
        with torch.no_grad():
            for index, batch in enumerate(batches):
                scored = add_targets_at_last_tokens(batch, torch.zeros(num_rows(batch), dtype=torch.float64), self._pad)
                scores = self._scorer.run_at_head(scored, lambda source, _: source.scores())
                if index < len(plan):
                    own_scores[plan[index]] = scores[:, 0].double().cpu()
        self._sharding.reshard()
        gathered, _ = gather_rows(own_scores, policy.mesh.dp)
        dp_size = policy.mesh.dp_size
        order = [index for rank in range(dp_size) for index in range(rank, len(prompts), dp_size)]
        scores = torch.empty_like(gathered).index_copy(0, torch.tensor(order, dtype=torch.int64), gathered)
        unusable = (~(scores.abs() <= MAX_REWARD)).nonzero()
        if len(unusable):
            raise UserError(
                f"grpo.reward_model gave {scores[unusable[0]].item()} for a completion; a number of at most "
                f"{MAX_REWARD:g} in size is needed: is it a reward model, and are its weights whole?"
            )
        return scores

    def _ids(self, prompt: Any, completion: str) -> list[int]:
        if isinstance(prompt, str):
            ids = self._encoder.encode_text(prompt + completion)
        elif prompt and isinstance(prompt[0], Mapping):
            ids = self._encoder.encode_conversation([*prompt, {"role": "assistant", "content": completion}])
        else:
            raise UserError("grpo.reward_model reads text, and these prompts are token ids: give prompts as text")
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
    """Return the batch [n, S] with a label (0) at the last token of each document that is not `pad` (its first, where
    all are), and `values` [documents] there as the stream `targets`. On the host."""
    ids, positions = document_ids(batch), torch.arange(batch["input_ids"].numel())
    flat = ids.flatten()
    read = positions + 1 if pad is None else torch.where(batch["input_ids"].flatten() == pad, 0, positions + 1)
    real = flat != PADDING_SEQ_ID
    ends = torch.zeros(len(values), dtype=torch.int64).scatter_reduce(0, flat[real], read[real], "amax")
    firsts = torch.full_like(ends, len(flat)).scatter_reduce(0, flat[real], positions[real], "amin")
    ends = torch.where(ends > 0, ends - 1, firsts)
    labels = torch.full_like(flat, IGNORE_INDEX).index_fill(0, ends, 0)
    targets = torch.zeros(len(flat), dtype=STREAMS["targets"].dtype).index_copy(0, ends, values)
    return {**batch, "labels": labels.view_as(ids), "targets": targets.view_as(ids)}


def build_frozen_model(policy: Policy, path: str, config: ModelConfig) -> CausalLM:
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
    options = replace(policy.options, max_row_length=None)
    model = build_model(own, config, policy.mesh, precision, policy.device, options)
    return model.eval().requires_grad_(False)
