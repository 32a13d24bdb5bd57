"""Kinds of data files by their suffix."""

from pathlib import PurePath

KINDS = {".jsonl": "json", ".json": "json", ".ndjson": "json", ".csv": "csv", ".parquet": "parquet"}


def ending_of(file: PurePath) -> str:
    """Return the ending, a key of KINDS for a file of rows; that before .gz where the two may stand together."""
    suffixes = [suffix.lower() for suffix in file.suffixes]
    is_packed = suffixes[-1:] == [".gz"] and suffixes[-2:-1] not in ([], [".parquet"])
    return ["", *suffixes][-2 if is_packed else -1]
