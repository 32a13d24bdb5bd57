"""Rollouts as the source of a method's batches: `Buffer` stores the completions, `Rollouts` deals them out.

A rollout is sampled once and then trained on for several optimizer steps. Its completions are tensors in a `Buffer`,
identical on every rank and saved with a checkpoint, so a run can resume between two steps of a rollout. For example,
with 4 prompts, 2 completions each, `train.global_batch=4` and `grpo.updates_per_rollout=2`:

    rollout    8 completions
    step 1     completions [0, 2, 5, 7]    first pass, in a random order from the seed
    step 2     completions [1, 3, 4, 6]
    step 3     completions [1, 2, 6, 7]    second pass, in another order
    step 4     completions [0, 3, 4, 5]    `position.done` is 4, so the next step starts another rollout

The sequences of a buffer are concatenated instead of padded. Two samples with prompts [5, 6] and [4] and completions
[7, 8] and [3] are

    lengths    [4, 2]
    tokens     [5, 6, 7, 8, 4, 3]
    trained    [F, F, T, T, F, T]

`Buffer.batch` makes padded rows of them. Labels are shifted there: the label at position t is token t + 1, and the
value of every per-token stream (`old_logprobs`, ...) moves to the position of the label with it.
"""

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from dtrain.base.batch import IGNORE_INDEX, ROW_STREAMS, Batch, collate, collate_with_images
from dtrain.base.errors import UserError
from dtrain.base.randomness import random_key
from dtrain.base.ranks import balance_by_cost
from dtrain.data.rows.rows import Cursor, GlobalBatch, Rows, permute
from dtrain.methods.method import BatchSource
from dtrain.models.common.flops import flops_per_token
from dtrain.policy import Policy
from dtrain.policy.prompt_sharing import MIN_SAVED_FRACTION
from dtrain.rl.collect import Rollout
from dtrain.rl.samples import Sample

if TYPE_CHECKING:
    from dtrain.data.images.files import ImageRecord


Prompt = TypeVar("Prompt", bound=Hashable)


@dataclass
class Position:
    """Position of a run in its rollouts. Checkpoints contain these fields.

    Attributes:
        rollout: Number of rollouts so far.
        done: Number of optimizer steps on the last rollout.
        step: Number of optimizer steps of the run, which is the version of the weights.
        cursor: Position in the data at which the next rollout's prompts begin. None before the first rollout.
        epochs: Epochs of the data so far.
        checked: Whether the log-probabilities of engine and trainer were compared.
    """

    rollout: int = 0
    done: int = 0
    step: int = 0
    cursor: Cursor | None = None
    epochs: float = 0.0
    checked: bool = False


_DTYPES = {
    "lengths": torch.int64,
    "tokens": torch.int64,
    "trained": torch.bool,
    "advantages": torch.float64,
    "counted": torch.bool,
    "routed": torch.int16,
    "data_rows": torch.int64,
}
"""Dtypes of the tensors that are attributes of a `Buffer`. Its per-token streams are float64."""


@dataclass
class Buffer:
    """N sequences of a prompt and its completion, concatenated to T tokens. The names are those in checkpoints.

    Attributes:
        lengths: Tokens of each sequence, [N] int64.
        tokens: Token ids, [T] int64.
        trained: Whether the loss includes a token, [T] bool.
        advantages: Advantage of each sequence, [N] float64.
        counted: Whether a sequence takes part in the updates, [N] bool.
        per_token: Streams by name, such as "old_logprobs", [T] float64 each. Untrained tokens have 0.
        routed: Experts that the engine's router chose, [T, layers, k] int16. None if the trainer's router decides.
        data_rows: Row of the data with the images of the prompt, [N] int64, -1 for a prompt without images. None if no
            prompt has any.
    """

    lengths: Tensor
    tokens: Tensor
    trained: Tensor
    advantages: Tensor
    counted: Tensor
    per_token: dict[str, Tensor] = field(default_factory=dict)
    routed: Tensor | None = None
    data_rows: Tensor | None = None

    @classmethod
    def from_samples(cls, samples: Sequence[Sample], advantages: Tensor, counted: Tensor, trains: Tensor) -> "Buffer":
        """Concatenate N samples.

        Args:
            samples: The samples.
            advantages: Their advantages, [N].
            counted: Whether each sample takes part in the updates, [N] bool.
            trains: Whether the sampled tokens of each sample are trained, [N] bool. A truncated completion may count
                in the averages without being trained.
        """
        tokens: list[int] = []
        trained: list[bool] = []
        logprobs: list[float] = []
        for sample, is_trained in zip(samples, trains.tolist(), strict=True):
            num_prompt_tokens = len(sample.prompt)
            tokens += sample.prompt
            tokens += sample.ids
            trained += [False] * num_prompt_tokens
            trained += [is_trained and is_sampled for is_sampled in sample.sampled]
            logprobs += [0.0] * num_prompt_tokens
            logprobs += sample.logprobs
        data_rows = [sample.data_row for sample in samples]
        has_images = max(data_rows, default=-1) >= 0
        return cls(
            lengths=torch.tensor([len(sample.prompt) + len(sample.ids) for sample in samples]),
            tokens=torch.tensor(tokens),
            trained=torch.tensor(trained),
            advantages=advantages.double(),
            counted=counted,
            per_token={"sampling_logprobs": torch.tensor(logprobs, dtype=torch.float64)},
            routed=_concatenate_routed_experts(samples, len(tokens)),
            data_rows=torch.tensor(data_rows) if has_images else None,
        )

    @classmethod
    def empty(cls, shapes: Mapping[str, Sequence[int]]) -> "Buffer":
        """Allocate a buffer for loading.

        Args:
            shapes: The shape of each tensor of `tensors()`, by name.
        """
        attributes: dict[str, Tensor] = {}
        per_token: dict[str, Tensor] = {}
        for name, shape in shapes.items():
            if name in _DTYPES:
                attributes[name] = torch.zeros(*shape, dtype=_DTYPES[name])
            else:
                per_token[name] = torch.zeros(*shape, dtype=torch.float64)
        return cls(**attributes, per_token=per_token)

    def __len__(self) -> int:
        return len(self.lengths)

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors by name, [N], [T] or [T, layers, k]."""
        tensors = {}
        for name in _DTYPES:
            tensor = getattr(self, name)
            if tensor is not None:
                tensors[name] = tensor
        return tensors | self.per_token

    def batch(self, indices: Sequence[int], data: Rows | None = None) -> Batch:
        """Return the sequences `indices` as padded rows, [n, S], with the streams that the loss reads.

        Args:
            indices: Indices of sequences.
            data: The rows whose images the prompts contain. None if there are no images.
        """
        streams = (*ROW_STREAMS, "advantages", *self.per_token)
        bounds = list(pairwise(self._offsets()))
        rows = [self._row(index, *bounds[index]) for index in indices]
        if data is None or data.images is None:
            batch: dict[str, Any] = collate(rows, streams)
        else:
            documents_of_rows = []
            for row, index in zip(rows, indices, strict=True):
                documents_of_rows.append([(row["input_ids"], self._images(index, data))])
            image_streams = data.images.image_streams_of_rows(documents_of_rows)
            rows = [row | images for row, images in zip(rows, image_streams, strict=True)]
            batch = collate_with_images(rows, streams)
        if self.routed is not None:
            shape = (*batch["input_ids"].shape, *self.routed.shape[1:])
            batch["routed_experts"] = self.routed.new_full(shape, -1)  # -1: padding, which the router decides
            for row, index in zip(batch["routed_experts"], indices, strict=True):
                start, end = bounds[index]
                row[: end - start] = self.routed[start:end]
        return batch

    def _images(self, index: int, data: Rows) -> "Sequence[ImageRecord]":
        """Return the images of a sequence's prompt."""
        data_row = -1 if self.data_rows is None else int(self.data_rows[index])
        return () if data_row < 0 else data.samples.images(data_row)[0]

    def flatten(self, values: Tensor, indices: Sequence[int]) -> Tensor:
        """Concatenate values of the rows of `batch(indices)`, moved from the labels to the tokens that they name.

        For example, the row [a, b, c, padding] of a sequence of three tokens becomes [0, a, b], because `a` belongs to
        the label at position 0, which is token 1.

        Args:
            values: Values at the positions of the labels, [n, S].
            indices: Indices of the sequences, n.

        Returns:
            The values, float64, [tokens of these sequences].
        """
        shifted = []
        for row, length in zip(values, self.lengths[list(indices)].tolist(), strict=True):
            shifted.append(torch.cat([row.new_zeros(1), row[: length - 1]]))
        return torch.cat(shifted).double() if shifted else torch.zeros(0, dtype=torch.float64)

    def prompts(self, indices: Sequence[int]) -> list[tuple[int, ...]]:
        """Return the tokens of each sequence before its first trained token. All tokens, if none is trained."""
        offsets = self._offsets()
        prompts = []
        for index in indices:
            sequence = slice(offsets[index], offsets[index + 1])
            tokens, trained = self.tokens[sequence], self.trained[sequence]
            end = int(trained.int().argmax()) if bool(trained.any()) else len(tokens)
            prompts.append(tuple(tokens[:end].tolist()))
        return prompts

    def set_stream(self, name: str, values: Tensor, order: Sequence[int]) -> None:
        """Set the stream `name` of `per_token`.

        Args:
            name: Name of the stream.
            values: Concatenated values of the sequences in `order`, [T].
            order: Indices of all sequences, in the order of `values`. Data-parallel ranks compute their shares, so
                this is not the order of the buffer.
        """
        stream = torch.zeros_like(self.tokens, dtype=torch.float64)
        offsets = self._offsets()
        values_of_sequences = values.split(self.lengths[list(order)].tolist())
        for index, sequence_values in zip(order, values_of_sequences, strict=True):
            stream[offsets[index] : offsets[index + 1]] = sequence_values
        self.per_token[name] = torch.where(self.trained, stream, 0)

    def _offsets(self) -> list[int]:
        """Return the start of each sequence in `tokens`, and the end of the last one."""
        return [0, *self.lengths.cumsum(0).tolist()]

    def _row(self, index: int, start: int, end: int) -> dict[str, Tensor]:
        """Return a sequence as a row, with labels and streams shifted by one position."""
        tokens, trained = self.tokens[start:end], self.trained[start:end]
        labels = _shift_left(torch.where(trained, tokens, IGNORE_INDEX), IGNORE_INDEX)
        row = {
            "input_ids": tokens,
            "labels": labels,
            "position_ids": torch.arange(len(tokens)),
            "seq_ids": torch.zeros_like(tokens),
            "advantages": torch.where(labels == IGNORE_INDEX, 0.0, self.advantages[index]),
        }
        for name, values in self.per_token.items():
            row[name] = _shift_left(values[start:end], 0.0)
        return row


def _shift_left(values: Tensor, fill: float) -> Tensor:
    """Move every value to the position before its token, where the label of that token is."""
    return torch.cat([values[1:], values.new_full((1,), fill)])


def _concatenate_routed_experts(samples: Sequence[Sample], num_tokens: int) -> Tensor | None:
    """Return the routed experts of all samples, [T, layers, k]. None if no sample has them."""
    routed = [sample.routed for sample in samples if sample.routed is not None]
    if not routed:
        return None
    joined = torch.cat(routed)
    if len(joined) != num_tokens:
        raise ValueError(f"the samples have routed experts for {len(joined)} tokens, but {num_tokens} tokens")
    return joined


@dataclass(eq=False)
class Rollouts(BatchSource):
    """Source of batches of completions, sampled as training goes on.

    Each pass over a rollout uses every completion once, `train.global_batch` of them in a step. The completions of a
    step are distributed over the data-parallel ranks by their cost.

    Attributes:
        settings: Values of the recipe keys that may not change within a rollout, by key.
        prompts: Prompts of a rollout. None: `train.global_batch`.
        group_size: Completions of a prompt.
        passes: Passes over a rollout.
        shuffles: Whether each pass has a random order from the seed. Otherwise it has the data's order.
        buffer: The last rollout, identical on every rank.
        position: Position of the run.
        measured: Metrics of the last rollout.
        is_over: Whether the data's epochs are used up.
        data: The rows with the prompts. Set before the first rollout.
    """

    settings: dict[str, Any]
    prompts: int | None
    group_size: int = 1
    passes: int = 1
    shuffles: bool = False
    buffer: Buffer = field(default_factory=lambda: Buffer.empty({name: [0] for name in _DTYPES}), init=False)
    position: Position = field(default_factory=Position, init=False)
    measured: dict[str, float] = field(default_factory=dict, init=False)
    is_over: bool = field(default=False, init=False)
    data: Rows | None = field(default=None, init=False)

    @cached_property
    def batch_size(self) -> int:
        """Completions of an optimizer step, over all ranks."""
        return self.recipe.train.num_batch_rows

    @property
    def size(self) -> int:
        """Completions of a rollout."""
        return (self.prompts or self.batch_size) * self.group_size

    @property
    def fields(self) -> dict[str, float]:
        """Metrics of the last rollout. Only its first step has `rollout_time`."""
        fields = dict(self.measured)
        if self.position.done > 1:
            fields.pop("rollout_time", None)
        return fields

    def remaining_steps(self, rows: Rows, cursor: Cursor, saved: Mapping[str, Any]) -> int:
        remaining_prompts = max(0, (rows.total_rows() or 0) - rows.rows_before(cursor))
        num_full_rollouts, num_last_completions = divmod(remaining_prompts * self.group_size, self.size)
        started_steps = 0
        if "shapes" in saved:  # the checkpoint was saved within a rollout
            num_sequences = saved["shapes"]["lengths"][0]
            started_steps = self.steps(num_sequences) - saved["done"]
        return started_steps + num_full_rollouts * self.steps(self.size) + self.steps(num_last_completions)

    def steps(self, sequences: int) -> int:
        """Return the number of optimizer steps that a rollout of `sequences` completions takes."""
        return -(-sequences // self.batch_size) * self.passes

    def next_rollout(self, collect: Callable[[Cursor, int], Rollout | None], cursor: Cursor) -> Rollout | None:
        """Collect the next rollout if it is due, and store it in `buffer`.

        Args:
            collect: Samples a rollout from a position in the data and a version of the weights. Returns None at the
                end of the data's epochs.
            cursor: Position in the data at which the run began.

        Returns:
            The rollout. None if the steps of the last one are not done, or the data's epochs are used up.

        Collectives:
            Those of `collect`.
        """
        if self._has_steps_left or self.is_over:
            return None
        position = self.position
        rollout = collect(position.cursor or cursor, position.step)
        self.is_over = rollout is None
        if rollout is not None:
            self.buffer = Buffer.from_samples(rollout.samples, rollout.advantages, rollout.counted, rollout.trained)
            self.measured = rollout.measured
            position.rollout += 1
            position.done = 0
            position.cursor = rollout.last_sample_group.next_cursor
            position.epochs = rollout.last_sample_group.epochs
        return rollout

    def batches(self, policy: Policy, rows: Rows, cursor: Cursor) -> Iterator[GlobalBatch]:
        """Yield the minibatches. Their `samples` are indices of completions in `buffer`, this rank's share of them."""
        while not self.is_over:
            minibatch = self._minibatch()
            samples = self.split_over_ranks(policy, self.buffer, minibatch)[policy.mesh.dp_rank]
            yield GlobalBatch([], samples, len(minibatch), self.position.cursor or cursor, self.position.epochs)

    def split_over_ranks(self, policy: Policy, buffer: Buffer, chosen: Sequence[int]) -> list[list[int]]:
        """Distribute the completions `chosen` over the data-parallel ranks by the FLOPs of training on them.

        If prompts are computed once (`train.share_prompts`), completions of one prompt go to one rank, as far as the
        ranks' costs allow.
        """
        num_ranks = policy.mesh.dp_size
        if num_ranks == 1:
            return [list(chosen)]

        def cost(length: int) -> float:
            return length * flops_per_token(policy.model, length)

        lengths = buffer.lengths[list(chosen)].tolist()
        costs = [cost(length) for length in lengths]
        # Micro-batches of a fixed number of rows: every rank gets the same number of rows, at most one less.
        has_fixed_rows = not (self.recipe.data.packing or self.method.is_dynamic())
        max_rows = -(-len(chosen) // num_ranks) if has_fixed_rows else None
        if policy.prompt_sharing is not None:
            prompts = buffer.prompts(chosen)
            prompt_costs = {prompt: cost(len(prompt)) for prompt in prompts}
            groups = split_groups(prompts, costs, prompt_costs, num_ranks, has_fixed_rows)
            if groups is not None:
                return [[chosen[position] for position in positions] for positions in groups]
        shares = []
        for positions in balance_by_cost(costs, num_ranks, max_rows):  # positions in `chosen`
            shares.append([chosen[position] for position in positions])
        return shares

    def batch(self, rows: GlobalBatch) -> Batch:
        return self.buffer.batch(rows.samples, self.data)

    def after_step(self, step: int) -> None:
        self.position.done += 1
        self.position.step = step

    def state(self) -> dict[str, Any]:
        """Return the position of the run, and the shapes of the buffer if steps on it are left."""
        state = asdict(self.position) | {"cursor": list(self.position.cursor or (0, 0))}
        if not self._has_steps_left:
            return state
        shapes = {name: list(tensor.shape) for name, tensor in self.buffer.tensors().items()}
        return state | {"shapes": shapes, "measured": self.measured, "settings": self.settings}

    def tensors(self) -> dict[str, Tensor]:
        """Return the buffer's tensors, [N], [T] or [T, layers, k], if steps on them are left."""
        if not self._has_steps_left:
            return {}
        return {f"buffer.{name}": tensor for name, tensor in self.buffer.tensors().items()}

    def check_state(self, state: Mapping[str, Any], changed: Sequence[str] = ()) -> None:
        """Raise UserError if this run cannot continue from `state`.

        It cannot if the checkpoint was saved without rollouts, or if the recipe changes what the remaining steps of a
        rollout depend on.
        """
        if "settings" in state and "shapes" not in state:
            raise UserError(
                f"the checkpoint of step {state['step']} was saved within a rollout by another version of dtrain: "
                "resume from a step between two rollouts (checkpoint.resume=..)"
            )
        missing = [name for name in asdict(Position()) if name not in state]
        if missing:
            raise UserError(
                f"the checkpoint was saved by a run without rollouts: it has no {', '.join(missing)}. Start another "
                "run with these weights (checkpoint.init_from, run.name)"
            )
        changed = list(changed)
        if "shapes" in state:
            for name, value in self.settings.items():
                saved = state["settings"].get(name)
                # A dry run does not read large data, so train.global_batch=auto is not yet a number there.
                if value not in (saved, "auto"):
                    changed.append(f"{name}: {saved} -> {value}")
        if changed:
            raise UserError(
                f"the checkpoint of step {state['step']} was saved within a rollout, and the recipe changes settings "
                "that its remaining steps depend on:\n  "
                + "\n  ".join(changed)
                + "\nUndo the change, resume from a step between two rollouts (checkpoint.resume=..), or start "
                "another run with these weights (checkpoint.init_from, run.name)"
            )

    def load(self, state: Mapping[str, Any]) -> None:
        self.position = Position(**{name: state[name] for name in asdict(self.position)})
        self.position.cursor = Cursor(*state["cursor"]) if state["rollout"] else None
        self.measured = dict(state.get("measured", {}))
        if "shapes" in state:
            self.buffer = Buffer.empty(state["shapes"])

    @property
    def _has_steps_left(self) -> bool:
        """Whether optimizer steps on the present rollout are left."""
        return self.position.done < self.steps(len(self.buffer))

    def _minibatch(self) -> list[int]:
        """Return the completions of this step, over all ranks, without those that do not count."""
        total = len(self.buffer)
        steps_per_pass = -(-total // self.batch_size)
        pass_number, step_in_pass = divmod(self.position.done, steps_per_pass)
        # The order of a pass depends only on the seed, the rollout and the pass, so that a resumed run continues it.
        order = torch.arange(total)
        if self.shuffles:
            seed = random_key("minibatch", self.recipe.run.seed, self.position.rollout, pass_number)
            order = permute(order, total, seed)
        start = step_in_pass * self.batch_size
        counted = self.buffer.counted.tolist()
        selected = order[start : start + self.batch_size].tolist()
        return sorted(index for index in selected if counted[index])


def split_groups(
    prompts: Sequence[Prompt],
    costs: Sequence[float],
    prompt_costs: Mapping[Prompt, float],
    num_ranks: int,
    has_fixed_rows: bool,
) -> list[list[int]] | None:
    """Distribute completions over ranks so that those of one prompt stay together and the ranks have similar costs.

    Every group of completions is divided into the same number of parts. The number is the one with which the most
    expensive rank costs the least, so that for example a single group is divided over all ranks.

    Args:
        prompts: The prompt of each completion.
        costs: Cost of each completion with its prompt.
        prompt_costs: Cost of each prompt, which a rank pays once for each part.
        num_ranks: Number of ranks.
        has_fixed_rows: Whether every rank gets the same number of completions, at most one less.

    Returns:
        The completions of each rank, ascending. None if shared prompts would save less than a tenth of the cost.

    Example:
        Two prompts of cost 4 with two completions each, which cost 1 more, on two ranks:

        >>> split_groups(["a", "b", "a", "b"], [5, 5, 5, 5], {"a": 4, "b": 4}, 2, False)
        [[0, 2], [1, 3]]
    """
    groups: dict[Prompt, list[int]] = {}
    for index, prompt in enumerate(prompts):
        groups.setdefault(prompt, []).append(index)
    saved = sum((len(members) - 1) * prompt_costs[prompt] for prompt, members in groups.items())
    if not costs or saved < MIN_SAVED_FRACTION * sum(costs):
        return None
    if has_fixed_rows:
        # Consecutive completions, group by group: at most num_ranks - 1 groups are divided.
        by_group = [index for members in groups.values() for index in members]
        bounds = [rank * len(by_group) // num_ranks for rank in range(num_ranks + 1)]
        return [sorted(by_group[start:end]) for start, end in pairwise(bounds)]
    best: list[list[int]] = []
    lowest_cost = math.inf
    largest_group = max(len(members) for members in groups.values())
    for num_parts in range(1, largest_group + 1):
        parts = _divide_groups(groups, costs, prompt_costs, num_parts)
        ranks = balance_by_cost([part.cost for part in parts], num_ranks)  # the parts of each rank
        highest_cost = max(sum(parts[index].cost for index in indices) for indices in ranks)
        if highest_cost < lowest_cost:
            lowest_cost = highest_cost
            best = []
            for indices in ranks:
                completions = [completion for index in indices for completion in parts[index].completions]
                best.append(sorted(completions))
    return best


class GroupPart(NamedTuple):
    """Some completions of one prompt, and their cost with the prompt."""

    completions: list[int]
    cost: float


def _divide_groups(
    groups: Mapping[Prompt, Sequence[int]],
    costs: Sequence[float],
    prompt_costs: Mapping[Prompt, float],
    num_parts: int,
) -> list[GroupPart]:
    """Divide every group of completions into `num_parts` parts of similar costs, or fewer if it is smaller.

    Args:
        groups: The completions of each prompt, by their index.
        costs: Cost of each completion with its prompt.
        prompt_costs: Cost of each prompt.
        num_parts: Number of parts.
    """
    parts = []
    for prompt, members in groups.items():
        own_costs = [costs[index] - prompt_costs[prompt] for index in members]
        for positions in balance_by_cost(own_costs, min(num_parts, len(members))):
            completions = [members[position] for position in positions]
            cost = prompt_costs[prompt] + sum(own_costs[position] for position in positions)
            parts.append(GroupPart(completions, cost))
    return parts
