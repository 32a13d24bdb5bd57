"""Images of rows: their bytes, the record that a cache stores of each, and their sizes and pixels, read by Pillow.

Formats are JPEG, PNG, GIF, WebP, BMP, TIFF and AVIF. A row writes an image as a path, a `file://` or data URI, a URL,
bytes, or `{"bytes", "path"}`. An image is identified by the SHA-256 of its bytes, never by its path.

When a data set is opened, only the headers of its images are read. An image is decoded when a batch needs it.
`read_image_header` and `verify_image` find the mistakes that Pillow can see without decoding (an unknown format, too
many pixels, a PNG whose checksums are wrong); a file that is cut short elsewhere is found by `decode_image`. Torch and
Pillow are imported when they are used, because both are optional for a run without images.
"""

import base64
import binascii
import hashlib
import os
import stat
import struct
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import unquote, urlsplit

from dtrain.base.errors import UserError
from dtrain.base.json_files import json_type
from dtrain.data.images.processor import Layout

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageFile import ImageFile
    from torch import Tensor


MAX_STORED_PIXELS = 64_000_000
MAX_STORED_PIXELS_KEY = "data.image_most_pixels"
MAX_ASPECT_RATIO = 200  # of the longer side to the shorter one; the limit of Qwen's processors
# Notes on images.
ANIMATED = "an image has several frames: the first is used"
CMYK = "a CMYK image becomes RGB without its colour profile"
DEEP = "a grey image has more than 8 bits: values above 255 become white; save it with 8 bits to keep its shades"

# Pillow's other formats are left out: some of them run programs.
_FORMATS = ("JPEG", "PNG", "GIF", "WEBP", "BMP", "TIFF", "AVIF")
_ORIENTATION, _WIDTH, _HEIGHT = 0x0112, 256, 257  # tags of EXIF and TIFF
# The chunks of a PNG that may hold its EXIF data.
_PNG_EXIF_CHUNKS = (b"eXIf", b"Raw profile type exif", b"XML:com.adobe.xmp")
# Pillow's plugins raise any of these for files that are cut short or damaged.
_DAMAGED = (
    OSError,
    SyntaxError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    EOFError,
    RuntimeError,
    struct.error,
    zlib.error,
)
# First bytes of other files that people name as images, with an explanation and a fix.
_OTHER_FILES = (
    (b"version https://git-lfs", "it is a pointer of Git LFS; `git lfs pull` fetches the image"),
    (b"<svg", "it is an SVG drawing; save it as PNG"),
    (b"<?xml", "it is XML, perhaps an SVG drawing; save it as PNG"),
    (b"<!doctype html", "it is a web page; download the image itself"),
    (b"<html", "it is a web page; download the image itself"),
    (b"%pdf", "it is a PDF; save its page as PNG"),
)

MAX_FILE_BYTES = 1 << 30  # 64 megapixels with four channels of 16 bits are half of it
MAX_NAME = 80  # characters of an image's name in a message


class ImageHeader(NamedTuple):
    """Size of an image.

    Attributes:
        height: Height of the upright image in pixels.
        width: Width of the upright image in pixels.
        notes: Sentences that are printed once for all images that have them.
    """

    height: int
    width: int
    notes: tuple[str, ...]


@dataclass(frozen=True)
class ImageBytes:
    """The bytes of an image's file.

    Attributes:
        name: Name in messages: the path or URL as the row writes it.
        data: Bytes of the file, not decoded.
        path: The file; None if the bytes are in the row itself.
    """

    name: str
    data: bytes = field(repr=False)
    path: Path | None = None

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the bytes, in hex: the image's identity."""
        return hashlib.sha256(self.data).hexdigest()

    def header(self, max_stored_pixels: int = MAX_STORED_PIXELS) -> ImageHeader:
        """Return the size of the upright image from its header; see `read_image_header`."""
        return read_image_header(self.data, self.name, max_stored_pixels)

    def decode(self, max_stored_pixels: int = MAX_STORED_PIXELS) -> "Tensor":
        """Return the upright image as RGB, uint8 [3, H, W]; see `decode_image`."""
        return decode_image(self.data, self.name, max_stored_pixels)


@dataclass(frozen=True)
class ImageRecord:
    """An image of a sample, as a cache stores it.

    Attributes:
        name: Name in messages.
        digest: SHA-256 of its bytes, in hex.
        layout: Its patches and tokens.
        path: Absolute path of its file; None if the bytes are in `data`.
        data: Its bytes if it has no file.
        origin: Data file and line of its row, if they are known.
    """

    name: str
    digest: str
    layout: Layout
    path: str | None = None
    data: bytes | None = field(default=None, repr=False)
    origin: str | None = None

    @property
    def entry(self) -> dict[str, Any]:
        """Name, path and digest, as in samples.jsonl and the answers of evaluations."""
        return {"name": self.name, "path": self.path, "digest": self.digest}

    @property
    def key(self) -> int:
        """A number of 63 bits, equal for equal images."""
        return int(self.digest[:16], 16) >> 1

    def image(self) -> ImageBytes:
        """Read the image again. Its name contains the row and the full path.

        Raises:
            UserError: If the file was deleted or has another content.
        """
        name = self.path or self.name
        if self.origin:
            name = f"{self.origin}: {name}"
        if self.data is not None:
            return ImageBytes(name, self.data)
        path = Path(str(self.path))
        try:
            image = ImageBytes(name, path.read_bytes(), path)
        except OSError as error:
            raise UserError(f"{name}: the image cannot be read: {error.strerror}. Put it back") from error
        if image.digest != self.digest:
            raise UserError(f"{name}: the image is not the one that the run began with. Start again")
        return image


def read_image(value: Any, directory: Path | None, cache_dir: Path | None = None) -> ImageBytes:
    """Read the bytes of an image.

    Args:
        value: A path relative to `directory`, a `file://` URI, a `data:` URI in base64, a URL, bytes, or an object with
            `bytes` or `path`, as in the files of the datasets library.
        directory: Directory of the file that names the image. None refuses paths, for requests to a server.
        cache_dir: Directory to which URLs are copied once; None refuses URLs.

    Raises:
        UserError: If there is no such file, or it is empty, larger than 1 GiB, no regular file or no base64. The error
            names the image.
    """
    if isinstance(value, Mapping):
        data = value.get("bytes")
        path = value.get("path")
        if data is None and path is None:
            raise UserError("an image has neither bytes nor a path. Give it one of them")
        if data is None:
            return read_image(path, directory, cache_dir)
        if not isinstance(data, bytes | bytearray | memoryview):
            raise UserError(
                f"an image's bytes must be bytes, not {json_type(data)}. In JSON write a data URI or a path"
            )
        return _image_bytes(_shortened(path) if isinstance(path, str) else "an image", bytes(data))
    if isinstance(value, bytes | bytearray | memoryview):
        return _image_bytes("an image", bytes(value))
    if isinstance(value, Path):
        return _image_of_path(value, str(value), directory)
    if not isinstance(value, str):
        raise UserError(f"an image must be a path, a URL, a data URI or an object with bytes, not {json_type(value)}")
    if not value:
        raise UserError("an image's path is empty. Give it one")
    if value[:5].lower() == "data:":
        return _image_bytes(_shortened(value), _data_of_uri(value))
    if value[:7].lower() == "file://":
        return _image_of_path(Path(unquote(urlsplit(value).path)), value, directory)
    if "://" in value:
        return _image_of_path(_copy_of_url(value, cache_dir), value, Path())
    return _image_of_path(Path(value), value, directory)


def _image_bytes(name: str, data: bytes, path: Path | None = None) -> ImageBytes:
    if not data:
        raise UserError(f"{name}: the image is empty, 0 bytes. Replace it")
    return ImageBytes(name, data, path)


def _image_of_path(path: Path, path_text: str, directory: Path | None) -> ImageBytes:
    name = _shortened(path_text)
    if directory is None:
        raise UserError(f"{name}: images are not read from paths here; send the image itself, as a data URI")
    full = directory / path
    try:
        status = full.stat()
        if not stat.S_ISREG(status.st_mode):
            raise UserError(f"{name}: this is a directory or a device, not the file of an image")
        if status.st_size > MAX_FILE_BYTES:
            raise UserError(f"{name}: the file is larger than {MAX_FILE_BYTES >> 30} GiB. Is it an image?")
        return _image_bytes(name, full.read_bytes(), full.absolute())
    except (OSError, ValueError) as error:  # ValueError: a null character in the path
        hint = "; an image in base64 begins with data:image/png;base64," if len(path_text) > 255 else ""
        if isinstance(error, FileNotFoundError | NotADirectoryError | ValueError):
            raise UserError(f"{name}: there is no such image in {os.path.abspath(directory)}{hint}") from error
        raise UserError(f"{name}: the image cannot be read: {error.strerror}{hint}") from error


def _data_of_uri(uri: str) -> bytes:
    header, comma, text = uri.partition(",")
    if not comma or not header.lower().endswith(";base64"):
        raise UserError(f"{_shortened(uri)}: a data URI of an image begins with data:image/png;base64,")
    try:
        return base64.b64decode("".join(unquote(text).split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise UserError(f"{_shortened(uri)}: the data URI is not whole base64 ({error}). Write it again") from error


def _copy_of_url(url: str, cache_dir: Path | None) -> Path:
    if cache_dir is None:
        raise UserError(f"{_shortened(url)}: images are not fetched from URLs here; copy the file, and name its path")
    from dtrain.data.sources import urls  # it loads fsspec

    copies = urls.local_copies(url, "an image", cache_dir)
    if len(copies) != 1:
        raise UserError(f"{_shortened(url)}: the URL of an image must name one file, not {len(copies)}")
    return copies[0].absolute()


def _shortened(name: str) -> str:
    return name if len(name) <= MAX_NAME else f"{name[: MAX_NAME - 3]}..."


def read_image_header(data: bytes, name: str, max_stored_pixels: int = MAX_STORED_PIXELS) -> ImageHeader:
    """Return an image's size after its EXIF orientation, without decoding its pixels.

    A PNG that has its EXIF data after its pixels is decoded, because Pillow finds that data only then.

    Args:
        data: The bytes of the image's file.
        name: The image's name in error messages.
        max_stored_pixels: The largest number of pixels that is accepted.

    Raises:
        UserError: If the bytes are not an image, the image is larger than `max_stored_pixels`, one side is more than
            200 times the other, or Pillow is not installed.
    """
    image = _open_image(data, name)
    width, height = image.size
    if image.format == "TIFF":
        # Whether Pillow has already turned `size` depends on its release; the tags always hold the stored size.
        width, height = image.tag_v2[_WIDTH], image.tag_v2[_HEIGHT]  # type: ignore[attr-defined]
    if width * height > max_stored_pixels:
        raise UserError(
            f"{name}: the image is {width} × {height}, {width * height / 1e6:,.1f} megapixels, more than the "
            f"{max_stored_pixels / 1e6:g} that are allowed. Shrink it, or allow more with {MAX_STORED_PIXELS_KEY}"
        )
    if max(width, height) > MAX_ASPECT_RATIO * min(width, height):
        raise UserError(
            f"{name}: the image is {width} × {height}: one side is more than {MAX_ASPECT_RATIO} times the "
            "other; crop it"
        )
    notes = []
    with _as_user_error(name):
        swaps_sides = _orientation(image, data) >= 5
        # The second frame of an MPO file is a camera's preview.
        if image.format != "MPO" and getattr(image, "is_animated", False):
            notes.append(ANIMATED)
    if image.mode == "CMYK":
        notes.append(CMYK)
    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        notes.append(DEEP)
    if swaps_sides:
        height, width = width, height
    return ImageHeader(height, width, tuple(notes))


def verify_image(data: bytes, name: str) -> None:
    """Check an image's file for damage that Pillow finds without decoding. Raises UserError.

    Pillow compares the checksums of a PNG. For other formats, it checks no more than `read_image_header` does.
    """
    image = _open_image(data, name)
    with _as_user_error(name):
        image.verify()


def decode_image(data: bytes, name: str, max_stored_pixels: int = MAX_STORED_PIXELS) -> "Tensor":
    """Return the upright image as RGB, uint8 [3, H, W], of the height and width that `read_image_header` returns."""
    import torch

    rgb = upright_image(data, name, max_stored_pixels)
    values = bytearray(rgb.tobytes())
    return torch.frombuffer(values, dtype=torch.uint8).view(rgb.height, rgb.width, 3).permute(2, 0, 1).contiguous()


def upright_image(data: bytes, name: str, max_stored_pixels: int = MAX_STORED_PIXELS) -> "Image":
    """Return the image in RGB, turned by its EXIF orientation.

    The first frame of an animation is used, and transparent pixels are placed on white. Other modes are converted as
    Pillow converts them, which is what transformers' processors do with Pillow's images.

    Raises:
        UserError: As `read_image_header`, and if the file is cut short or damaged.
    """
    height, width, _ = read_image_header(data, name, max_stored_pixels)
    image = _open_image(data, name)
    from PIL import ImageOps

    with _as_user_error(name):
        image.load()
        turned = ImageOps.exif_transpose(image)
        has_alpha = "A" in turned.getbands() or turned.info.get("transparency") is not None
        rgb = _on_white(turned) if has_alpha else turned.convert("RGB")
    if rgb.size != (width, height):
        raise UserError(
            f"{name}: the image is damaged: it has {rgb.width} × {rgb.height} pixels, and {width} × {height} by its "
            "header; save it anew"
        )
    return rgb


def _open_image(data: bytes, name: str) -> "ImageFile":
    """Open the image with Pillow, which reads its header."""
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError as error:
        raise UserError("images need Pillow, which is not installed: pip install 'dtrain[images]'") from error
    Image.init()
    installed = [kind for kind in _FORMATS if kind in Image.OPEN]  # AVIF came with Pillow 11.3
    try:
        return Image.open(BytesIO(data), formats=installed)
    except UnidentifiedImageError as error:
        explanation = _other_file(data) or "is the file complete?"
        formats = ", ".join(installed)
        raise UserError(f"{name}: Pillow cannot read this file as an image ({formats}): {explanation}") from error
    except Image.DecompressionBombError as error:
        raise UserError(f"{name}: the image has more pixels than Pillow opens ({error}); shrink it") from error
    except _DAMAGED as error:
        raise UserError(f"{name}: the image is damaged ({_text_of(error)}); is the file complete?") from error


def _other_file(data: bytes) -> str:
    """Return an explanation and a fix for a file that is not an image, by its first bytes; "" if they are unknown."""
    start = data[:64].lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    for beginning, explanation in _OTHER_FILES:
        if start.startswith(beginning):
            return explanation
    if data[4:8] == b"ftyp":
        return "it looks like HEIC or a video; save it as JPEG"
    return ""


def _orientation(image: "ImageFile", data: bytes) -> int:
    """Return the orientation in the EXIF data, 1 to 8; 1 (upright) if there is none that can be read."""
    if image.format == "TIFF":
        value = image.tag_v2.get(_ORIENTATION, 1)  # type: ignore[attr-defined]
    elif image.format == "PNG" and not any(chunk in data for chunk in _PNG_EXIF_CHUNKS):
        value = 1  # getexif would decode a PNG without EXIF data in search of it
    else:
        value = image.getexif().get(_ORIENTATION, 1)
    return value if value in range(1, 9) else 1


def _on_white(image: "Image") -> "Image":
    """Return a transparent image on a white background, in RGB."""
    from PIL import Image

    white = Image.new("RGBA", image.size, "white")
    white.alpha_composite(image.convert("RGBA"))
    return white.convert("RGB")


def _text_of(error: BaseException) -> str:
    return str(error) or type(error).__name__


@contextmanager
def _as_user_error(name: str) -> Iterator[None]:
    """Convert Pillow's errors in the block to a UserError."""
    try:
        yield
    except _DAMAGED as error:
        raise UserError(f"{name}: the image is torn ({_text_of(error)}); is the file complete?") from error
