"""From a caller's batch to micro-batches.

Three steps lead from the batch that a caller passes to `Policy.forward_backward` to the inputs of the model's forward:

1. `check_batch` checks the rows of this data-parallel (dp) rank, and that the streams are the same on every dp rank. If
   not, every rank raises the same error, so that none waits in a collective for a rank that has failed.
2. `CheckedBatch.split_into_steps` divides the rows into optimizer steps.
3. `split_into_micro_batches` divides the rows of a step into micro-batches, by one of three rules:

       Fixed(rows=2)               a number of rows per micro-batch
       DynamicShapes(tokens=4096)  rows of similar length, as many as fit into a number of tokens with their padding
       Packed(tokens=4096)         rows joined to one long row without padding

For example, four rows of 5, 2, 3 and 2 tokens become these micro-batches of rows, each with its shape:

    Fixed(2)            [0, 1] [2, 5]    [2, 3] [2, 3]
    DynamicShapes(6)    [0] [1, 5]       [2, 1] [2, 3]    [3] [1, 2]
    Packed(7)           [0, 1] [1, 7]    [2, 3] [1, 5]

The loss of a step is the same for all of them, because documents never see one another.

A *stream* is a tensor of the batch. A stream [n, S, ..] has a value for each token of the n rows, and is packed and
padded like the token ids. A stream [n, ..] whose second dimension is not S has a value for each row. The shape
decides, so a vector of K values per row should be passed as [n, 1, K], in case K equals S by chance.

Every dp rank runs the same number of micro-batches, because each forward and backward has collectives. A rank with
fewer rows runs micro-batches of padding at the end.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dtrain.base.batch import IGNORE_INDEX, PADDING_SEQ_ID, ROW_STREAMS, STREAMS, Batch, RowImages, complete_batch, trim
from dtrain.base.randomness import random_key
from dtrain.base.ranks import Ranks
from dtrain.data.rows.rows import pack
from dtrain.policy.prompt_sharing import PROMPT_IDS, PromptSharing, SharedPrompts, SharedRow

RESERVED_STREAMS = ("document_ids", "label_index")
"""Names of streams that the policy adds to each micro-batch. A caller's stream must have another name."""


@dataclass(frozen=True)
class StreamSpec:
    """Dtype and shape of a stream, without the number of rows.

    Attributes:
        dtype: Its dtype.
        shape: Its shape without the first dimension: (S, ..) for a value per token.
        row_length: S, the length of the rows on this rank. -1 if the stream has a value per row in any case.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    row_length: int

    @property
    def per_token(self) -> bool:
        return self.shape[:1] == (self.row_length,)

    @property
    def key(self) -> tuple[Any, ...]:
        """Key for a comparison of ranks: it is equal if the ranks' streams can be parts of one global stream.

        The length of rows may differ between ranks, so it is not part of the key.
        """
        if self.per_token:
            return (self.dtype, True, *self.shape[1:])
        return (self.dtype, False, *self.shape)


class RankStreams(NamedTuple):
    """Description of one dp rank's rows. The ranks exchange these descriptions if their streams differ.

    Attributes:
        problem: Error of this rank's own batch, or None.
        num_rows: Number of rows.
        specs: The streams by name.
    """

    problem: str | None
    num_rows: int
    specs: dict[str, StreamSpec]


class StepRows(NamedTuple):
    """This dp rank's rows of one optimizer step.

    Attributes:
        batch: Every stream of the rows, [n, S, ..], or [n, ..] for a stream in `per_row`.
        per_row: Names of the streams that have a value for each row instead of each token.
        max_rows: The largest number of rows that any dp rank has in this step.
        images: Images of the rows; None if the caller passes none.
    """

    batch: Batch
    per_row: frozenset[str]
    max_rows: int
    images: RowImages | None


class CheckedBatch(NamedTuple):
    """A complete batch (`batch.complete_batch`) whose streams have the same names, dtypes and shapes on every dp rank.

    Attributes:
        batch: Every stream, [n, S, ..] or [n, ..]. Streams per token have their pad value on padding.
        per_row: Names of the streams that have a value for each row instead of each token.
        max_rows: The largest number of rows that any dp rank has.
        sample_mask: Which rows take part, bool [n]; None for all.
        images: Images of the rows; None if the caller passes none.
    """

    batch: Batch
    per_row: frozenset[str]
    max_rows: int
    sample_mask: Tensor | None
    images: RowImages | None = None

    def split_into_steps(self, rows_per_step: int | None = None) -> list[StepRows]:
        """Split the rows into optimizer steps, as many on every rank, without the rows that `sample_mask` excludes.

        Args:
            rows_per_step: Rows of this dp rank in one step. None makes one step of the full batch.
        """
        # A batch without rows on any rank is still one step, so that the caller gets a result.
        total = max(self.max_rows, 1)
        size = rows_per_step or total
        return [self._step(start, size) for start in range(0, total, size)]

    def _step(self, start: int, size: int) -> StepRows:
        rows = slice(start, start + size)
        max_rows = min(size, self.max_rows - start)
        if self.sample_mask is None:
            batch = {name: tensor[rows] for name, tensor in self.batch.items()}
            images = None if self.images is None else self.images.select(range(len(self.images))[rows])
            return StepRows(batch, self.per_row, max_rows, images)
        selected = torch.arange(len(self.sample_mask))[rows][self.sample_mask[rows]]
        batch = {name: tensor[selected] for name, tensor in self.batch.items()}
        images = None if self.images is None else self.images.select(selected.tolist())
        return StepRows(batch, self.per_row, max_rows, images)


def check_batch(batch: Mapping[str, Any], dp: DeviceMesh, vocab_size: int) -> CheckedBatch:
    """Check and complete this dp rank's rows, and check that the streams are the same on every dp rank.

    A rank without rows receives the missing streams with zero rows, so that it can build micro-batches of padding.

    Args:
        batch: The caller's batch, as `batch.complete_batch` accepts it, with further streams and `images`.
        dp: The data-parallel mesh.
        vocab_size: Size of the model's vocabulary.

    Raises:
        ValueError: On every dp rank alike: for what `complete_batch` refuses, a token id outside the vocabulary, a
            stream that is not a tensor or has another number of rows than `input_ids`, a stream that is missing on a
            rank with rows, and a stream whose dtype or shape differs between ranks.

    Collectives:
        Over dp one all-reduce of three integers. If the ranks do not agree, also one all-gather of objects.
    """
    specs: dict[str, StreamSpec] = {}
    full: Batch = {}
    problem = None
    images = batch.get("images")
    batch = {name: stream for name, stream in batch.items() if name != "images"}
    # A problem of one rank is raised only after the exchange below: otherwise the other ranks would wait there.
    try:
        full = complete_batch(batch)
        specs = _stream_specs(full, vocab_size)
        if images is not None and len(images) != len(full["input_ids"]):
            raise ValueError(
                f"images has entries for {len(images)} rows, and input_ids has {len(full['input_ids'])} rows"
            )
    except ValueError as error:
        problem = str(error)
    num_rows = len(full["input_ids"]) if full else 0

    max_rows, streams_agree = num_rows, True
    if dp.size() > 1:
        digest = random_key(problem or sorted((name, *spec.key) for name, spec in specs.items())) % 2**62
        # max(x) == -max(-x) exactly if all ranks have the same x, so one all-reduce answers both questions.
        largest = all_reduce(torch.tensor([num_rows, digest, -digest]), dp, dist.ReduceOp.MAX)
        max_rows = int(largest[0])
        streams_agree = bool(largest[1] == -largest[2])
    if not streams_agree:
        local_streams = RankStreams(problem, num_rows, specs)
        problem, specs = _resolve(Ranks(dp.get_group()).gather_results(lambda: local_streams))
    if problem is not None:
        raise ValueError(problem)

    _match_streams(full, specs, num_rows)
    per_row = frozenset(name for name, spec in specs.items() if not spec.per_token)
    sample_mask = batch["sample_mask"].cpu().bool() if "sample_mask" in batch else None
    return CheckedBatch(full, per_row, max_rows, sample_mask, images)


def _match_streams(full: Batch, specs: Mapping[str, StreamSpec], num_rows: int) -> None:
    """Bring `full` to exactly the streams of `specs`, in place, and set padding to the streams' pad values.

    A rank without rows gets empty streams.
    """
    # Only a rank without rows can have a stream that the others lack: an optional one, added by `complete_batch`.
    for name in full.keys() - specs.keys() - set(ROW_STREAMS):
        del full[name]
    padding = full["seq_ids"] == PADDING_SEQ_ID  # [n, S]
    has_padding = bool(padding.any())
    for name, spec in specs.items():
        if num_rows:
            stream = full[name]
        else:
            row_length = full["input_ids"].shape[1]
            shape = (row_length, *spec.shape[1:]) if spec.per_token else spec.shape
            stream = torch.empty((0, *shape), dtype=spec.dtype)
        if spec.per_token and has_padding:
            trailing = [1] * (stream.dim() - 2)
            stream = stream.masked_fill(padding.view(*padding.shape, *trailing), _pad_value(name))
        full[name] = stream


def _stream_specs(batch: Mapping[str, Any], vocab_size: int) -> dict[str, StreamSpec]:
    """Return the spec of every stream except `ROW_STREAMS`. Raises ValueError."""
    ids, labels = batch["input_ids"], batch["labels"]
    # Under tensor parallel an id outside the vocabulary would silently have an embedding of 0.
    _check_ids("input_ids", ids, vocab_size)
    _check_ids("labels", labels[labels != IGNORE_INDEX], vocab_size)
    specs = {}
    for name, value in batch.items():
        if name in ROW_STREAMS:
            continue
        if not isinstance(value, Tensor) or value.is_nested or value.layout != torch.strided:
            kind = value.layout if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(f"stream {name} is a {kind}. Streams are dense tensors of shape [n, S, ..] or [n, ..]")
        if name in RESERVED_STREAMS:
            raise ValueError(f"stream {name}: this name is reserved, choose another one")
        if name == PROMPT_IDS and value.shape != ids.shape:
            raise ValueError(
                f"stream {name} has shape {list(value.shape)}, and input_ids has {list(ids.shape)}: every token needs "
                "the number of its document's prompt"
            )
        if value.shape[:1] != ids.shape[:1]:
            raise ValueError(
                f"stream {name} has shape {list(value.shape)}, and input_ids has {list(ids.shape)}: the first "
                "dimension must be the rows"
            )
        specs[name] = StreamSpec(value.dtype, tuple(value.shape[1:]), ids.shape[1])
    return specs


def _check_ids(name: str, ids: Tensor, vocab_size: int) -> None:
    """Raise ValueError for token ids outside [0, vocab_size)."""
    if not ids.numel():
        return
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocab_size:
        raise ValueError(f"{name} are from {low} to {high}, and the model has {vocab_size} tokens")


def _resolve(ranks: list[RankStreams]) -> tuple[str | None, dict[str, StreamSpec]]:
    """Compare the streams of all dp ranks. Ranks without rows are left out.

    Returns:
        An error or None, and the specs that are valid for all ranks, the same on each of them.
    """
    problems = [f"dp rank {rank}: {each.problem}" for rank, each in enumerate(ranks) if each.problem is not None]
    if problems:
        return "\n".join(problems), {}
    specs_by_rank = {rank: each.specs for rank, each in enumerate(ranks) if each.num_rows}
    names: dict[str, None] = {}  # a set in order of appearance, so that every rank reports the same problem
    for specs in specs_by_rank.values():
        names.update(dict.fromkeys(specs))

    agreed: dict[str, StreamSpec] = {}
    for name in names:
        missing = [rank for rank, specs in specs_by_rank.items() if name not in specs]
        if missing:
            return f"stream {name} is missing on dp rank {missing[0]}, which has rows", {}
        by_rank = {rank: specs[name] for rank, specs in specs_by_rank.items()}
        first = list(by_rank.values())[0]
        if all(spec.key == first.key for spec in by_rank.values()):
            agreed[name] = first
        elif all((spec.dtype, spec.shape) == (first.dtype, first.shape) for spec in by_rank.values()):
            # On some ranks the rows are, by chance, as long as a vector per row. The shape is the same on ranks whose
            # rows have another length, so the stream has no value per token: -1 is never equal to a size.
            agreed[name] = StreamSpec(first.dtype, first.shape, -1)
        else:
            shapes = [f"[n, {str(spec.shape)[1:-1]}] {spec.dtype} on dp rank {rank}" for rank, spec in by_rank.items()]
            return f"stream {name} is not the same on every rank: {', '.join(shapes)}", {}
    return None, agreed


@dataclass(frozen=True)
class Fixed:
    """Micro-batches with a fixed number of rows, in the batch's order.

    Attributes:
        rows: Rows of a micro-batch; the last one may have fewer.

    Example:
        >>> Fixed(rows=2).plan([5, 2, 3])
        [[0, 1], [2]]
    """

    rows: int
    is_packed = False

    def plan(self, lengths: Sequence[int]) -> list[list[int]]:
        """Return the indices of the rows of each micro-batch.

        Args:
            lengths: Tokens of each row, without padding.
        """
        indices = list(range(len(lengths)))
        return [indices[start : start + self.rows] for start in range(0, len(indices), self.rows)]


@dataclass(frozen=True)
class DynamicShapes:
    """Micro-batches of rows of similar length, as many as fit into a number of tokens with their padding.

    Attributes:
        tokens: Limit of rows × longest row. A row that is longer than this gets a micro-batch of its own.
        rows_per_sample: This many consecutive rows belong together and stay in one micro-batch, such as the chosen and
            the rejected answer of a preference pair.

    Example:
        Row 0 with 5 tokens has no room for another row. Rows 2 and 1 need 2 × 3 = 6 tokens with padding.

        >>> DynamicShapes(tokens=6).plan([5, 2, 3])
        [[0], [2, 1]]
    """

    tokens: int
    rows_per_sample: int = 1
    is_packed = False

    def plan(self, lengths: Sequence[int]) -> list[list[int]]:
        """Return the indices of the rows of each micro-batch.

        Args:
            lengths: Tokens of each row, without padding.
        """
        samples: list[list[int]] = []
        for start in range(0, len(lengths), self.rows_per_sample):
            samples.append(list(range(start, min(start + self.rows_per_sample, len(lengths)))))
        longest_rows = [max(lengths[row] for row in sample) for sample in samples]
        # Longest first, so the first sample of a micro-batch decides how wide it is. Ties keep the batch's order.
        order = sorted(range(len(samples)), key=lambda sample: (-longest_rows[sample], sample))

        plan: list[list[int]] = []
        width = 0
        for index in order:
            sample = samples[index]
            if plan and (len(plan[-1]) + len(sample)) * width <= self.tokens:
                plan[-1] += sample
            else:
                plan.append(list(sample))
                width = longest_rows[index]
        return plan


@dataclass(frozen=True)
class Packed:
    """Micro-batches of rows that are joined to one row. The documents in it do not see one another.

    Attributes:
        tokens: Largest length of the joined row. A row that is longer than this gets a micro-batch of its own.

    Example:
        >>> Packed(tokens=7).plan([5, 2, 9, 3])
        [[2], [0, 1], [3]]
    """

    tokens: int
    is_packed = True

    def plan(self, lengths: Sequence[int]) -> list[list[int]]:
        """Return the indices of the rows of each micro-batch.

        Args:
            lengths: Tokens of each row, without padding.
        """
        too_long = [[index] for index, length in enumerate(lengths) if length > self.tokens]
        fitting = [index for index, length in enumerate(lengths) if length <= self.tokens]
        bins = pack([lengths[index] for index in fitting], self.tokens)
        return too_long + [[fitting[position] for position in members] for members in bins]


Batching = Fixed | DynamicShapes | Packed


def all_reduce(values: Tensor, mesh: DeviceMesh, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
    """Reduce a tensor in place over the ranks of a one-dimensional mesh.

    Args:
        values: [..], of any dtype that the group's backend reduces.
        mesh: The mesh, such as the dp ranks.
        op: The reduction.

    Returns:
        `values`, the same tensor.

    Collectives:
        One all-reduce, none for a single rank.
    """
    if mesh.size() > 1:
        dist.all_reduce(values, op, group=mesh.get_group())
    return values


class GatheredRows(NamedTuple):
    """Rows of all ranks of a mesh.

    Attributes:
        rows: The rows in the order of the ranks, [total, ..].
        start: Index of this rank's first row in `rows`.
    """

    rows: Tensor
    start: int


def gather_rows(rows: Tensor, mesh: DeviceMesh) -> GatheredRows:
    """Gather the rows of every rank of a one-dimensional mesh.

    Args:
        rows: This rank's rows on the host, [n, ..]. n may differ between ranks.
        mesh: The mesh.

    Collectives:
        Two all-gathers, none for a single rank.
    """
    if mesh.size() == 1:
        return GatheredRows(rows, 0)
    group = mesh.get_group()
    counts = [torch.zeros(1, dtype=torch.int64) for _ in range(mesh.size())]
    dist.all_gather(counts, torch.tensor([len(rows)]), group=group)
    lengths = [int(count) for count in counts]
    # all_gather needs the same shape on every rank.
    longest = max(lengths)
    padded = torch.cat([rows, rows.new_zeros(longest - len(rows), *rows.shape[1:])])
    parts = [rows.new_zeros(longest, *rows.shape[1:]) for _ in lengths]
    dist.all_gather(parts, padded, group=group)
    joined = torch.cat([part[:length] for part, length in zip(parts, lengths, strict=True)])
    return GatheredRows(joined, sum(lengths[: mesh.get_local_rank()]))


def row_lengths(batch: Batch) -> list[int]:
    """Return the number of tokens of each row, without the padding on the right. The batch is on the host.

    >>> row_lengths({"seq_ids": torch.tensor([[0, 0, 1], [0, -1, -1]])})
    [3, 1]
    """
    return (batch["seq_ids"] != PADDING_SEQ_ID).sum(1).tolist()


class MicroBatch(dict[str, Tensor]):
    """Rows of one forward, as a dict of streams on the host.

    Attributes:
        per_row: Names of the streams that have a value for each row, [n, ..]. The others are [n, S, ..].
        images: Images of the rows, or None. The stream `image_features` counts features over all rows.
        shared_row: How the model computes the only row of the micro-batch, whose documents begin alike. None: every
            document is computed on its own.
    """

    def __init__(
        self,
        streams: Mapping[str, Tensor],
        per_row: Collection[str] = (),
        images: RowImages | None = None,
        shared_row: SharedRow | None = None,
    ):
        super().__init__(streams)
        self.per_row = frozenset(per_row)
        self.images = images
        self.shared_row = shared_row


class MicroBatches(NamedTuple):
    """Micro-batches of a step.

    Attributes:
        batches: The micro-batches, as many on every dp rank. Those beyond `plan` are padding.
        plan: Indices of the rows of each micro-batch that has any.
        is_packed: Whether the rows of each micro-batch are joined to one row.
    """

    batches: list[MicroBatch]
    plan: list[list[int]]
    is_packed: bool


def split_into_micro_batches(
    rows: Batch,
    batching: Batching,
    max_rows: int,
    dp: DeviceMesh,
    per_row: Collection[str] = (),
    images: RowImages | None = None,
    sharing: PromptSharing | None = None,
) -> MicroBatches:
    """Split this dp rank's rows into micro-batches, as many on every dp rank.

    If documents share their beginnings, the rows of each micro-batch are joined to one row, whatever the rule. The
    limit of `DynamicShapes` and `Packed` is then the number of computed tokens, or of labels if there are more of them.

    Args:
        rows: Streams of the rows, [n, S, ..] or [n, ..].
        batching: The rule.
        max_rows: The largest number of rows that any dp rank has.
        dp: The data-parallel mesh.
        per_row: Names of the streams that have a value for each row.
        images: Images of the rows.
        sharing: How the documents of a group in the stream `prompt_ids` share their beginnings. None: they do not.

    Collectives:
        One all-reduce over dp, unless `batching` is `Fixed`, where `max_rows` determines the number.
    """
    shared = None
    if sharing is not None and PROMPT_IDS in rows and len(rows["input_ids"]):
        found = SharedPrompts(rows, images, sharing)
        shared = found if found.saves else None
    if shared is None or isinstance(batching, Fixed):
        plan = batching.plan(row_lengths(rows))
    else:
        plan = _plan_shared_rows(shared, batching)
    if isinstance(batching, Fixed):
        count = -(-max_rows // batching.rows)  # rounded up
    else:
        count = int(all_reduce(torch.tensor([len(plan)]), dp, dist.ReduceOp.MAX))
    is_packed = batching.is_packed or shared is not None
    batches = build_micro_batches(rows, plan, max(1, count), is_packed, per_row, images, shared)
    return MicroBatches(batches, plan, is_packed)


def _plan_shared_rows(shared: SharedPrompts, batching: DynamicShapes | Packed) -> list[list[int]]:
    """Return the rows of each micro-batch, with the rows that share a beginning in as few micro-batches as possible.

    Args:
        shared: The documents of the rows.
        batching: The limit of tokens, and the rows that have to stay together.
    """
    rows_per_sample = batching.rows_per_sample if isinstance(batching, DynamicShapes) else 1
    parts: list[list[int]] = []  # the rows of each part
    for samples in shared.linked_samples(rows_per_sample):
        parts += _split_to_fit(shared, samples, batching.tokens)
    lengths = [shared.num_tokens(part) for part in parts]
    plan = []
    for members in Packed(batching.tokens).plan(lengths):
        plan.append([row for index in members for row in parts[index]])
    return plan


def _split_to_fit(shared: SharedPrompts, samples: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
    """Divide samples that share a beginning into parts of at most `max_tokens`, as few as possible.

    Args:
        shared: The documents of the rows.
        samples: The rows of each sample. A sample that is longer than this is a part of its own.
        max_tokens: The limit, as `SharedPrompts.num_tokens` counts.

    Returns:
        The rows of each part.
    """
    all_rows = [row for rows in samples for row in rows]
    if shared.num_tokens(all_rows) <= max_tokens:
        return [all_rows]
    parts: list[list[int]] = []
    for rows in samples:
        if parts and shared.num_tokens([*parts[-1], *rows]) <= max_tokens:
            parts[-1] += rows
        else:
            parts.append(list(rows))
    return parts


def build_micro_batches(
    batch: Batch,
    plan: Sequence[Sequence[int]],
    count: int,
    is_packed: bool,
    per_row: Collection[str] = (),
    images: RowImages | None = None,
    shared: SharedPrompts | None = None,
) -> list[MicroBatch]:
    """Build the micro-batches of a plan, and micro-batches of padding up to `count`.

    Args:
        batch: Streams of the rows, [n, S, ..] or [n, ..].
        plan: Indices of the rows of each micro-batch.
        count: Number of micro-batches to build.
        is_packed: Join the rows of a micro-batch to one row. Streams with a value for each row are not joined: they
            stay [b, ..] next to a row [1, S].
        per_row: Names of the streams that have a value for each row. A stream [n] always is one.
        images: Images of the rows.
        shared: The documents of the rows, if some of them share their beginnings. Rows are then packed.
    """
    if len(plan) > count:
        raise ValueError(f"the plan has {len(plan)} micro-batches, and only {count} are to be built")
    per_row = {name for name, tensor in batch.items() if name in per_row or tensor.dim() == 1}
    batches = []
    for rows in plan:
        streams = {name: tensor[list(rows)] for name, tensor in batch.items()}
        if "image_features" in streams:
            streams["image_features"] = _renumber_features(streams["image_features"])
        per_token = {name: stream for name, stream in streams.items() if name not in per_row}
        per_token = _join_rows(per_token) if is_packed and len(rows) > 1 else trim(per_token)
        selected_images = None if images is None else images.select(rows)
        shared_row = None if shared is None else shared.shared_row(rows)
        batches.append(MicroBatch(streams | per_token, per_row, selected_images, shared_row))
    for _ in range(count - len(plan)):
        batches.append(_padding_batch(batch, per_row))
    return batches


def merge_micro_batch_values(
    values: Sequence[Tensor], batch: Batch, plan: Sequence[Sequence[int]], is_packed: bool
) -> Tensor:
    """Put values per token of micro-batches into the order and shape of the batch.

    Args:
        values: A tensor [b, s, ..] for each micro-batch, in the order of `plan`. Tensors beyond `plan` are of padding.
        batch: The batch, [n, S].
        plan: Indices of the rows of each micro-batch.
        is_packed: Whether the micro-batches are packed.

    Returns:
        [n, S, ..], 0 on padding.
    """
    count, length = batch["input_ids"].shape
    out = values[0].new_zeros(count, length, *values[0].shape[2:])
    lengths = row_lengths(batch)
    for part, rows in zip(values, plan, strict=False):
        if is_packed and len(rows) > 1:
            lengths_of_rows = [lengths[row] for row in rows]
            row_values = part[0, : sum(lengths_of_rows)].split(lengths_of_rows)
            for row, row_value in zip(rows, row_values, strict=True):
                out[row, : lengths[row]] = row_value
        else:
            out[list(rows), : part.shape[1]] = part
    return out


def _join_rows(batch: Batch) -> Batch:
    """Join rows to one, without padding: [b, S, ..] -> [1, tokens, ..]. Rows of padding become one token of padding.

    Document numbers continue from row to row. For example, seq_ids [[0, 1, -1], [0, 0, 1]] become [[0, 1, 2, 2, 3]].
    """
    is_token = batch["seq_ids"] != PADDING_SEQ_ID  # [b, S]
    if not bool(is_token.any()):
        return {name: tensor[:1, :1] for name, tensor in batch.items()}
    per_row = batch["seq_ids"].amax(1, keepdim=True) + 1  # documents of each row
    seq_ids = batch["seq_ids"] + per_row.cumsum(0) - per_row
    joined = {name: tensor[is_token][None] for name, tensor in batch.items()}
    joined["seq_ids"] = seq_ids[is_token][None]
    return joined


def _renumber_features(features: Tensor) -> Tensor:
    """Renumber image features, [n, S], from a count within each row to a count over all rows. -1 means no feature.

    >>> _renumber_features(torch.tensor([[0, 1, -1], [-1, 0, 1]]))
    tensor([[ 0,  1, -1],
            [-1,  2,  3]])
    """
    counts = (features >= 0).sum(1)
    first = counts.cumsum(0) - counts
    return torch.where(features >= 0, features + first[:, None], features)


def _padding_batch(batch: Batch, per_row: Collection[str]) -> MicroBatch:
    """Return a micro-batch of one token of padding, with the streams of `batch`."""
    streams = {}
    for name, tensor in batch.items():
        if name in per_row:
            streams[name] = tensor.new_full((1, *tensor.shape[1:]), 0)
        else:
            streams[name] = tensor.new_full((1, 1, *tensor.shape[2:]), _pad_value(name))
    return MicroBatch(streams, per_row)


def _pad_value(name: str) -> float | int:
    """Return the pad value of a stream; 0 for a caller's own stream."""
    if name not in STREAMS:
        return 0
    return STREAMS[name].pad or 0
