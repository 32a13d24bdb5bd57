"""The reference's sums for every pair of a set, computed once before the first step and kept beside the data's cache.

A table is float64 [pairs, 2]: Σ weight · log p of the chosen and of the rejected completion. Its file is named by what
it depends on beside the data: what the reference's weights are, the dtype, the weights of tokens.
"""

import hashlib
import os
import secrets
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from dtrain.base.batch import IGNORE, Batch, collate, document_ids, documents, sum_by_document
from dtrain.base.json_files import digest
from dtrain.base.ranks import Ranks
from dtrain.base.row_images import collate_with_images
from dtrain.data import Rows
from dtrain.data.rows.rows import pack
from dtrain.losses.preference.losses import length_desensitised_weights
from dtrain.methods.method import MethodWithReference
from dtrain.policy import Policy
from dtrain.policy.batching import all_reduced

WINDOW = 1024  # pairs scored between looks at how many rows they make


def reference_table(
    method: MethodWithReference,
    policy: Policy,
    rows: Rows,
    identities: Mapping[str, str],
    ld_alpha: float | None,
) -> Tensor:
    """Return the table of `rows`' pairs, from the file next to their cache, or compute and write it.

    Args:
        method: Builds the reference if the policy has none and the table has to be computed.
        policy: The policy that is trained.
        rows: Rows of pairs.
        identities: Digests of what the run reads at its start; the file's name depends on the reference's.
        ld_alpha: Length desensitisation of the token weights (`dpo.ld_alpha`). None: every weight is 1.

    Returns:
        Sums of the reference's log-probabilities of the chosen and the rejected completion, float64 [pairs, 2].

    Collectives:
        One gather of objects; if the table is computed, those of the forwards and one all-reduce over dp.
    """
    depends_on = [identities["dpo.reference"], identities["model.config"], str(policy.precision.compute)]
    name = f"reference-{digest([*depends_on, ld_alpha])[:16]}.bin"
    file = rows.samples.directory / name
    shape = (len(rows.samples), 2)
    kept = _kept(file, 16 * shape[0])
    everywhere = all(Ranks().every(lambda: kept is not None))
    if kept is not None and everywhere:
        return torch.frombuffer(kept, dtype=torch.float64).view(shape)
    if policy.reference is None:
        method.keep_reference(policy)
    table = torch.zeros(shape, dtype=torch.float64)
    with policy.use_reference_model():
        for start in range(0, shape[0], WINDOW):
            _score(method, policy, rows, range(start, min(start + WINDOW, shape[0])), table, ld_alpha)
    all_reduced(table, policy.mesh.dp)  # each pair was scored by one rank
    if policy.rank == 0:
        partial = file.with_suffix(f".{secrets.token_hex(8)}.part")  # another run may be at the same table
        content = table.numpy().tobytes()
        with partial.open("wb") as written:
            written.write(content + hashlib.sha256(content).digest())
            written.flush()
            os.fsync(written.fileno())
        partial.rename(file)
    return table


def _kept(file: Path, size: int) -> bytearray | None:
    """The table's `size` bytes in a file that ends with their SHA-256; None where it is not there, or not whole."""
    if not file.is_file() or file.stat().st_size != size + hashlib.sha256().digest_size:
        return None
    content = bytearray(file.read_bytes())
    table, checksum = content[:size], content[size:]
    return table if hashlib.sha256(table).digest() == checksum else None


def at_first_labels(batch: Batch, sums: Tensor) -> Tensor:
    """A stream [n, S] whose sums by document are `sums` [documents]: each stands at its document's first label, where
    every weight is 1."""
    labelled = (batch["labels"] != IGNORE).flatten().nonzero().squeeze(1)
    owners = document_ids(batch).flatten()[labelled]
    is_first = torch.ones_like(owners, dtype=torch.bool)
    is_first[1:] = owners[1:] != owners[:-1]
    stream = torch.zeros(batch["labels"].numel(), dtype=torch.float64)
    stream[labelled[is_first]] = sums[owners[is_first]]
    return stream.view(batch["labels"].shape)


def _score(
    method: MethodWithReference, policy: Policy, rows: Rows, samples: range, table: Tensor, ld_alpha: float | None
) -> None:
    """Write the sums of this dp rank's share of `samples` to their rows of `table`."""
    if rows.packing:
        lengths = rows.samples.lengths(torch.arange(samples.start, samples.stop)).tolist()
        bins = [[samples[index] for index in members] for members in pack(lengths, rows.capacity)]
    else:
        bins = [[index] for index in samples]
    mine = bins[policy.mesh.dp_rank :: policy.mesh.dp_size]
    built = [row for members in mine for row in rows.build(members)]
    batch: Batch = collate(built) if rows.images is None else collate_with_images(built)
    logprobs = policy.logprobs(batch, method.micro_rows).double()
    ids = document_ids(batch)
    if ld_alpha is not None:
        logprobs = logprobs * length_desensitised_weights(ids, batch["labels"], ld_alpha)
    sums = sum_by_document(logprobs, ids, documents(batch))
    order = torch.tensor([index for members in mine for index in members], dtype=torch.int64)
    table[order] = sums.view(-1, 2)
