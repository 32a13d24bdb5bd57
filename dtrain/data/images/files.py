"""Images as rows write them (path, `file://` or data URI, URL, bytes, `{"bytes", "path"}`): their bytes, and the record
that a cache of rows keeps of each.

An image is known by the SHA-256 of its bytes, never by its path. Neither torch nor Pillow is imported here.
"""

import base64
import binascii
import hashlib
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from dtrain.base.errors import UserError
from dtrain.base.json_files import kind_of
from dtrain.data.images.decoding import MOST_PIXELS, Header, decode, header
from dtrain.data.images.processor import Layout

if TYPE_CHECKING:
    from torch import Tensor

MOST_BYTES = 1 << 30  # of one image's file; 64 megapixels of four channels of 16 bits are half of it
LONGEST_NAME = 80  # characters of an image's name in a message


@dataclass(frozen=True)
class ImageBytes:
    """The bytes of an image's file.

    name    what messages call it: the path or URL, as it was written
    data    the file's bytes, not decoded
    path    the file that they were read from; None: they stood in the row itself
    """

    name: str
    data: bytes = field(repr=False)
    path: Path | None = None

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the bytes, in hex: the image's identity."""
        return hashlib.sha256(self.data).hexdigest()

    def header(self, most_pixels: int = MOST_PIXELS) -> Header:
        """Return the size of the upright image, from its header alone; see `decoding.header`."""
        return header(self.data, self.name, most_pixels)

    def decode(self, most_pixels: int = MOST_PIXELS) -> "Tensor":
        """Return the upright image as RGB, uint8 [3, H, W]; see `decoding.decode`."""
        return decode(self.data, self.name, most_pixels)


@dataclass(frozen=True)
class ImageRecord:
    """Image of a sample.

    name    as messages call it
    digest  SHA-256 of its bytes, in hex
    path    its file, absolute; None: the bytes are in `data`
    origin  file and line of its row, where they are known
    """

    name: str
    digest: str
    layout: Layout
    path: str | None = None
    data: bytes | None = field(default=None, repr=False)
    origin: str | None = None

    @property
    def entry(self) -> dict[str, Any]:
        """Name, path and digest, as samples.jsonl and the answers of evaluations have them."""
        return {"name": self.name, "path": self.path, "digest": self.digest}

    @property
    def key(self) -> int:
        """Number of 63 bits that equal images share."""
        return int(self.digest[:16], 16) >> 1

    def image(self) -> ImageBytes:
        """Return the image, its file read again; named by its row and its whole path. Raises UserError where that is
        another one, or gone."""
        name = ": ".join(part for part in (self.origin, self.path or self.name) if part)
        if self.data is not None:
            return ImageBytes(name, self.data)
        path = Path(str(self.path))
        try:
            image = ImageBytes(name, path.read_bytes(), path)
        except OSError as error:
            raise UserError(f"{name}: the image cannot be read: {error.strerror}; put it back") from error
        if image.digest != self.digest:
            raise UserError(f"{name}: the image is not the one that the run began with; start again")
        return image


def read_image(value: Any, directory: Path | None, cache_dir: Path | None = None) -> ImageBytes:
    """Return the bytes of an image of a row.

    value: a path, which is relative to `directory`; a `file://` URI; a `data:` URI in base64; a URL, which is copied
        into `cache_dir` once; bytes; or an object with `bytes` or `path`, as in the files of the datasets library.
    directory: the directory of the file that names the image; None: no path is taken, as where a stranger asks.
    cache_dir: None: no URL is taken.
    Raises UserError that names the image: no file, no regular file, empty, larger than 1 GiB, no base64.
    """
    if isinstance(value, Mapping):
        data, path = value.get("bytes"), value.get("path")
        if data is None and path is None:
            raise UserError("an image has neither bytes nor a path; give it one of them")
        if data is None:
            return read_image(path, directory, cache_dir)
        if not isinstance(data, bytes | bytearray | memoryview):
            raise UserError(f"an image's bytes must be bytes, not {kind_of(data)}; in JSON write a data URI or a path")
        return _image_bytes(_shortened(path) if isinstance(path, str) else "an image", bytes(data))
    if isinstance(value, bytes | bytearray | memoryview):
        return _image_bytes("an image", bytes(value))
    if isinstance(value, Path):
        return _file(value, str(value), directory)
    if not isinstance(value, str):
        raise UserError(f"an image must be a path, a URL, a data URI or an object with bytes, not {kind_of(value)}")
    if not value:
        raise UserError("an image's path is empty; give it one")
    if value[:5].lower() == "data:":
        return _image_bytes(_shortened(value), _data_of_uri(value))
    if value[:7].lower() == "file://":
        return _file(Path(unquote(urlsplit(value).path)), value, directory)
    if "://" in value:
        return _file(_copy(value, cache_dir), value, Path())
    return _file(Path(value), value, directory)


def _image_bytes(name: str, data: bytes, path: Path | None = None) -> ImageBytes:
    if not data:
        raise UserError(f"{name}: the image is empty, 0 bytes; replace it")
    return ImageBytes(name, data, path)


def _file(path: Path, written: str, directory: Path | None) -> ImageBytes:
    name = _shortened(written)
    if directory is None:
        raise UserError(f"{name}: images are not read from paths here; send the image itself, as a data URI")
    full = directory / path
    try:
        status = full.stat()
        if not stat.S_ISREG(status.st_mode):
            raise UserError(f"{name}: this is a directory or a device, not the file of an image")
        if status.st_size > MOST_BYTES:
            raise UserError(f"{name}: the file is larger than {MOST_BYTES >> 30} GiB; is it an image?")
        return _image_bytes(name, full.read_bytes(), full.absolute())
    except (OSError, ValueError) as error:  # ValueError: a null character in the path
        hint = "; an image in base64 begins with data:image/png;base64," if len(written) > 255 else ""
        if isinstance(error, FileNotFoundError | NotADirectoryError | ValueError):
            raise UserError(f"{name}: there is no such image in {os.path.abspath(directory)}{hint}") from error
        raise UserError(f"{name}: the image cannot be read: {error.strerror}{hint}") from error


def _data_of_uri(uri: str) -> bytes:
    kind, comma, text = uri.partition(",")
    if not comma or not kind.lower().endswith(";base64"):
        raise UserError(f"{_shortened(uri)}: a data URI of an image begins with data:image/png;base64,")
    try:
        return base64.b64decode("".join(unquote(text).split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise UserError(f"{_shortened(uri)}: the data URI is not whole base64 ({error}); write it anew") from error


def _copy(url: str, cache_dir: Path | None) -> Path:
    if cache_dir is None:
        raise UserError(f"{_shortened(url)}: images are not fetched from URLs here; copy the file, and name its path")
    from dtrain.data.sources import urls  # it loads fsspec

    copies = urls.local_copies(url, "an image", cache_dir)
    if len(copies) != 1:
        raise UserError(f"{_shortened(url)}: the URL of an image must name one file, not {len(copies)}")
    return copies[0].absolute()


def _shortened(name: str) -> str:
    return name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 3]}..."
