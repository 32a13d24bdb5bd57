"""Rollouts as the source of a method's batches: the completions of the last one as tensors, the same on every rank,
which its updates read and a checkpoint keeps; and the run's position in them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any

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
from dtrain.rl.collect import Rollout
from dtrain.rl.samples import Sample

if TYPE_CHECKING:
    from dtrain.data.images.files import ImageRecord


@dataclass
class Position:
    """Position of a run in its rollouts.

    rollout: their number so far; done: updates of the last one; step: optimizer steps, which is the version of the
    weights; cursor, epochs: of the data, where the next rollout's prompts begin, None before the first; checked:
    whether engine and trainer were compared.
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
"""Dtypes of a `Buffer`'s own tensors; its streams are float64."""


@dataclass
class Buffer:
    """N sequences, each a prompt and its completion, concatenated: T tokens in all.

    lengths [N] int64; tokens [T] int64; trained [T] bool; advantages [N] float64; counted [N] bool: takes part in the
    updates at all. per_token: [T] float64 each, 0 where a token is not trained. routed: where tokens went in the
    engine, [T, layers, k] int16 (`batch.STREAMS`), None where their own router decides. data_rows [N] int64: the
    samples of the data whose images prompts have, -1 without; None where the data have none.
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
        """Return the buffer of N samples. counted, trains [N] bool: whether a sample takes part, and whether its tokens
        are trained there. advantages [N]."""
        tokens, trained, logprobs = [], [], []
        data_rows = [sample.data_row for sample in samples]
        for sample, is_trained in zip(samples, trains.tolist(), strict=True):
            tokens += [*sample.prompt, *sample.ids]
            trained += [False] * len(sample.prompt) + [is_trained and drawn for drawn in sample.sampled]
            logprobs += [0.0] * len(sample.prompt) + list(sample.logprobs)
        return cls(
            torch.tensor([len(sample.prompt) + len(sample.ids) for sample in samples]),
            torch.tensor(tokens),
            torch.tensor(trained),
            advantages.double(),
            counted,
            {"sampling_logprobs": torch.tensor(logprobs, dtype=torch.float64)},
            _routed(samples, len(tokens)),
            torch.tensor(data_rows) if max(data_rows, default=-1) >= 0 else None,
        )

    @classmethod
    def empty(cls, shapes: Mapping[str, Sequence[int]]) -> "Buffer":
        """Return a buffer whose tensors have these shapes, without values, to load into."""
        tensors = {name: torch.zeros(*shape, dtype=_DTYPES.get(name, torch.float64)) for name, shape in shapes.items()}
        own = {name: tensors.pop(name) for name in _DTYPES if name in tensors}
        return cls(**own, per_token=tensors)

    def __len__(self) -> int:
        return len(self.lengths)

    def tensors(self) -> dict[str, Tensor]:
        """Return every tensor by name, [N], [T] and [T, ..]."""
        own = {name: getattr(self, name) for name in _DTYPES}
        return {name: tensor for name, tensor in own.items() if tensor is not None} | self.per_token

    def batch(self, indices: Sequence[int], data: Rows | None = None) -> Batch:
        """Return these sequences as rows [n, S] with the streams that the loss reads. data: the rows whose images the
        prompts have, where these have any."""
        streams, bounds = (*ROW_STREAMS, "advantages", *self.per_token), list(pairwise(self._offsets()))
        rows = [self._row(index, *bounds[index]) for index in indices]
        if data is None or data.images is None:
            batch: dict[str, Any] = collate(rows, streams)
        else:
            with_images = [
                [(row["input_ids"], self._images(index, data))] for row, index in zip(rows, indices, strict=True)
            ]
            rows = [row | more for row, more in zip(rows, data.images.image_streams_of_rows(with_images), strict=True)]
            batch = collate_with_images(rows, streams)
        if self.routed is not None:
            shape = (*batch["input_ids"].shape, *self.routed.shape[1:])
            batch["routed_experts"] = self.routed.new_full(shape, -1)
            for row, index in zip(batch["routed_experts"], indices, strict=True):
                start, end = bounds[index]
                row[: end - start] = self.routed[start:end]
        return batch

    def _images(self, index: int, data: Rows) -> "Sequence[ImageRecord]":
        """Return the images of a sequence's prompt."""
        data_row = -1 if self.data_rows is None else int(self.data_rows[index])
        return () if data_row < 0 else data.samples.images(data_row)[0]

    def flatten(self, values: Tensor, indices: Sequence[int]) -> Tensor:
        """Return `values` [n, S], computed at the positions of the labels of `batch(indices)`, as float64 [tokens of
        these sequences]: each at the token that its label names."""
        rows = zip(values, self.lengths[list(indices)].tolist(), strict=True)
        shifted = [torch.cat([row.new_zeros(1), row[: length - 1]]) for row, length in rows]
        return torch.cat(shifted).double() if shifted else torch.zeros(0, dtype=torch.float64)

    def set_stream(self, name: str, values: Tensor, order: Sequence[int]) -> None:
        """Keep `values` [T] of stream `name`, which hold the sequences in `order`."""
        kept = torch.zeros_like(self.tokens, dtype=torch.float64)
        offsets = self._offsets()
        for index, piece in zip(order, values.split(self.lengths[list(order)].tolist()), strict=True):
            kept[offsets[index] : offsets[index + 1]] = piece
        self.per_token[name] = torch.where(self.trained, kept, 0)

    def _offsets(self) -> list[int]:
        return [0, *self.lengths.cumsum(0).tolist()]

    def _row(self, index: int, start: int, end: int) -> dict[str, Tensor]:
        tokens, trained = self.tokens[start:end], self.trained[start:end]

        def before(values: Tensor, fill: float) -> Tensor:
            """Return `values` shifted one position to the left, where the label stands."""
            return torch.cat([values[1:], values.new_full((1,), fill)])

        labels = before(torch.where(trained, tokens, IGNORE_INDEX), IGNORE_INDEX)
        row = {
            "input_ids": tokens,
            "labels": labels,
            "position_ids": torch.arange(len(tokens)),
            "seq_ids": torch.zeros_like(tokens),
            "advantages": torch.where(labels == IGNORE_INDEX, 0.0, self.advantages[index]),
        }
        return row | {name: before(values[start:end], 0.0) for name, values in self.per_token.items()}


def _routed(samples: Sequence[Sample], tokens: int) -> Tensor | None:
    """Return the routed experts of all samples [T, layers, k]; None where no sample has them."""
    routed = [sample.routed for sample in samples if sample.routed is not None]
    if not routed:
        return None
    joined = torch.cat(routed)
    if len(joined) != tokens:
        raise ValueError(f"the samples' experts are those of {len(joined)} tokens, and they have {tokens}")
    return joined


@dataclass(eq=False)
class Rollouts(BatchSource):
    """Source of batches of completions, which are drawn to the data's prompts as training goes on and held in a buffer
    that is the same on every rank. Each pass over a rollout takes every completion once, train.global_batch of them a
    step, shared out over the data-parallel ranks by their cost.

    prompts: of a rollout; None: train.global_batch. group_size: completions of a prompt. passes: over a rollout.
    shuffles: passes take an order drawn from the seed, not the data's. settings: values of the keys that may not change
    within a rollout, whose updates are counted.
    """

    settings: dict[str, Any]
    prompts: int | None
    group_size: int = 1
    passes: int = 1
    shuffles: bool = False
    buffer: Buffer = field(default_factory=lambda: Buffer.empty({name: [0] for name in _DTYPES}), init=False)
    position: Position = field(default_factory=Position, init=False)
    measured: dict[str, float] = field(default_factory=dict, init=False)
    is_over: bool = field(default=False, init=False)  # the data's epochs
    data: Rows | None = field(default=None, init=False)  # whose prompts are drawn to

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
        """The last rollout's measures; `rollout_time` in its first step alone."""
        later = self.position.done > 1
        return {name: value for name, value in self.measured.items() if not (later and name == "rollout_time")}

    def remaining_steps(self, rows: Rows, cursor: Cursor, saved: Mapping[str, Any]) -> int:
        left = max(0, (rows.total_rows() or 0) - rows.rows_before(cursor))
        whole, rest = divmod(left * self.group_size, self.size)
        begun = self.steps(saved["shapes"]["lengths"][0]) - saved["done"] if "shapes" in saved else 0
        return begun + whole * self.steps(self.size) + self.steps(rest)

    def steps(self, sequences: int) -> int:
        """Optimizer steps that a rollout of so many completions makes."""
        return -(-sequences // self.batch_size) * self.passes

    def next_rollout(self, collect: Callable[[Cursor, int], Rollout | None], cursor: Cursor) -> Rollout | None:
        """Return the rollout that `collect` gives, and hold it in a buffer; None where the updates of the last one are
        not done, or the data's epochs are over. cursor: where the run began. Collective, as `collect` is."""
        if self._is_begun or self.is_over:
            return None
        position = self.position
        rollout = collect(position.cursor or cursor, position.step)
        self.is_over = rollout is None
        if rollout is not None:
            self.buffer = Buffer.from_samples(rollout.samples, rollout.advantages, rollout.counted, rollout.trained)
            self.measured = rollout.measured
            position.rollout, position.done = position.rollout + 1, 0
            position.cursor, position.epochs = rollout.last_sample_group.next_cursor, rollout.last_sample_group.epochs
        return rollout

    def batches(self, policy: Policy, rows: Rows, cursor: Cursor) -> Iterator[GlobalBatch]:
        """The minibatches of the rollouts. `samples` are completions of the buffer, this dp rank's share of them."""
        while not self.is_over:
            chosen = self._minibatch()
            samples = self.split_over_ranks(policy, self.buffer, chosen)[policy.mesh.dp_rank]
            yield GlobalBatch([], samples, len(chosen), self.position.cursor or cursor, self.position.epochs)

    def split_over_ranks(self, policy: Policy, buffer: Buffer, chosen: Sequence[int]) -> list[list[int]]:
        """Return these completions dealt out over the data-parallel ranks by the FLOPs of training on them."""
        ranks = policy.mesh.dp_size
        if ranks == 1:
            return [list(chosen)]
        costs = [length * flops_per_token(policy.model, length) for length in buffer.lengths[list(chosen)].tolist()]
        # Fixed micro-batches are rows: a rank takes no more of them than its part.
        is_fixed = not (self.recipe.data.packing or self.method.is_dynamic())
        most = -(-len(chosen) // ranks) if is_fixed else None
        return [[chosen[place] for place in share] for share in balance_by_cost(costs, ranks, most)]

    def batch(self, rows: GlobalBatch) -> Batch:
        return self.buffer.batch(rows.samples, self.data)

    def after_step(self, step: int) -> None:
        self.position.done += 1
        self.position.step = step

    def state(self) -> dict[str, Any]:
        """Return the run's position within a rollout. A rollout whose updates are over is not kept."""
        place = asdict(self.position) | {"cursor": list(self.position.cursor or (0, 0))}
        if not self._is_begun:
            return place
        shapes = {name: list(tensor.shape) for name, tensor in self.buffer.tensors().items()}
        return place | {"shapes": shapes, "measured": self.measured, "settings": self.settings}

    def tensors(self) -> dict[str, Tensor]:
        """The buffer's [N], [T] and [T, ..]."""
        return {f"buffer.{name}": tensor for name, tensor in self.buffer.tensors().items()} if self._is_begun else {}

    def check_state(self, state: Mapping[str, Any], changed: Sequence[str] = ()) -> None:
        """Raise UserError if a checkpoint was saved without rollouts, or if the recipe changes what the updates of its
        rollout depend on."""
        if "settings" in state and "shapes" not in state:
            raise UserError(
                f"the checkpoint of step {state['step']} stands within a rollout, as another version of dtrain saved "
                "it: resume from a step between two rollouts (checkpoint.resume=..)"
            )
        missing = [name for name in asdict(Position()) if name not in state]
        if missing:
            raise UserError(
                f"the checkpoint was saved by a run without rollouts, it has no {', '.join(missing)}: begin another "
                "run with these weights (checkpoint.init_from, run.name)"
            )
        changed = list(changed)
        if "shapes" in state:
            for name, value in self.settings.items():
                saved = state["settings"].get(name)
                # A dry run does not read large data, so that train.global_batch=auto has no number there.
                if value not in (saved, "auto"):
                    changed.append(f"{name}: {saved} -> {value}")
        if changed:
            raise UserError(
                f"the checkpoint of step {state['step']} stands within a rollout, whose updates go on as they began, "
                "and the recipe has changed them:\n  "
                + "\n  ".join(changed)
                + "\nTake the change back, resume from a step between two rollouts (checkpoint.resume=..), or begin "
                "another run with these weights (checkpoint.init_from, run.name)"
            )

    def load(self, state: Mapping[str, Any]) -> None:
        self.position = Position(**{name: state[name] for name in asdict(self.position)})
        self.position.cursor = Cursor(*state["cursor"]) if state["rollout"] else None
        self.measured = dict(state.get("measured", {}))
        if "shapes" in state:
            self.buffer = Buffer.empty(state["shapes"])

    @property
    def _is_begun(self) -> bool:
        return self.position.done < self.steps(len(self.buffer))

    def _minibatch(self) -> list[int]:
        """The completions of this step, over all ranks; those that do not count are left out."""
        total, size = len(self.buffer), self.batch_size
        pass_number, part = divmod(self.position.done, -(-total // size))
        order = torch.arange(total)
        if self.shuffles:
            drawn = random_key("minibatch", self.recipe.run.seed, self.position.rollout, pass_number)
            order = permute(order, total, drawn)
        counted = self.buffer.counted.tolist()
        return sorted(index for index in order[part * size : (part + 1) * size].tolist() if counted[index])
