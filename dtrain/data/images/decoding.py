"""Headers and values of image files, by Pillow: JPEG, PNG, GIF, WebP, BMP, TIFF and AVIF.

A header is read without decoding, and every bound holds by it before anything is decoded. Pillow's own bound of pixels,
a setting of the whole process, is neither read nor changed. Torch and Pillow are imported when they are used.
"""

import struct
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from importlib import import_module
from io import BytesIO
from typing import TYPE_CHECKING, Any, NamedTuple

from dtrain.base.errors import UserError

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageFile import ImageFile
    from torch import Tensor

MOST_PIXELS = 64_000_000
MOST_PIXELS_KEY = "data.image_most_pixels"
MOST_ASPECT = 200  # of the longer side to the shorter, as Qwen's processors have it
ANIMATED = "an image has several frames: the first is used"
CMYK = "a CMYK image becomes RGB without its colour profile"
DEEP = "a grey image has more than 8 bits: values above 255 become white; save it with 8 bits to keep its shades"

_FORMATS = ("JPEG", "PNG", "GIF", "WEBP", "BMP", "TIFF", "AVIF")
_PLUGINS = ("Jpeg", "Png", "Gif", "WebP", "Bmp", "Tiff", "Avif")
_ORIENTATION = 0x0112  # EXIF's tag
_TURNS = {
    2: "FLIP_LEFT_RIGHT",
    3: "ROTATE_180",
    4: "FLIP_TOP_BOTTOM",
    5: "TRANSPOSE",
    6: "ROTATE_270",
    7: "TRANSVERSE",
    8: "ROTATE_90",
}
# Pillow's plugins raise these for files that are not whole.
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
# Beginnings of files that stand where an image should, and the fix.
_OTHERS = (
    (b"version https://git-lfs", "it is a pointer of Git LFS; `git lfs pull` fetches the image"),
    (b"<svg", "it is an SVG drawing; save it as PNG"),
    (b"<?xml", "it is XML, perhaps an SVG drawing; save it as PNG"),
    (b"<!doctype html", "it is a web page; download the image itself"),
    (b"<html", "it is a web page; download the image itself"),
    (b"%pdf", "it is a PDF; save its page as PNG"),
)


class Header(NamedTuple):
    """Size of the upright image, in pixels, and sentences to say once for all images that have them."""

    height: int
    width: int
    notes: tuple[str, ...]


def header(data: bytes, name: str, most_pixels: int = MOST_PIXELS) -> Header:
    """Return the size of the image after its EXIF orientation, from its header alone. Only a PNG that has its EXIF
    behind its pixels is decoded.

    Raises UserError that begins with `name`: no image, damaged, more than `most_pixels`, a side 200 times the other,
    no Pillow.
    """
    image = _open(data, name)
    width, height = image.size
    if image.format == "TIFF":  # whose size some versions of Pillow turn, and others do not
        width, height = _tiff_tags(image)[256], _tiff_tags(image)[257]
    if width * height > most_pixels:
        raise UserError(
            f"{name}: the image is {width} × {height}, {width * height / 1e6:,.1f} megapixels, more than the "
            f"{most_pixels / 1e6:g} that are allowed; shrink it, or allow more with {MOST_PIXELS_KEY}"
        )
    if max(width, height) > MOST_ASPECT * min(width, height):
        raise UserError(
            f"{name}: the image is {width} × {height}: one side is more than {MOST_ASPECT} times the other; crop it"
        )
    with _user_errors(name, "the image is torn"):
        swaps = _orientation(image, data) >= 5
    deep = image.mode in ("I", "F") or image.mode.startswith("I;16")
    notes = [(ANIMATED, _is_animated(image)), (CMYK, image.mode == "CMYK"), (DEEP, deep)]
    height, width = (width, height) if swaps else (height, width)
    return Header(height, width, tuple(note for note, applies in notes if applies))


def decode(data: bytes, name: str, most_pixels: int = MOST_PIXELS) -> "Tensor":
    """Return the image as RGB, uint8 [3, H, W], of the height and width that `header` gives: see `upright`."""
    import torch

    rgb = upright(data, name, most_pixels)
    values = bytearray(rgb.tobytes())
    return torch.frombuffer(values, dtype=torch.uint8).view(rgb.height, rgb.width, 3).permute(2, 0, 1).contiguous()


def upright(data: bytes, name: str, most_pixels: int = MOST_PIXELS) -> "Image":
    """Return the image as Pillow's, in RGB, of the size that `header` gives.

    EXIF's orientation is applied, an animation's first frame is taken, transparency lies on white. All other modes are
    converted as Pillow does, which is what transformers' processors make of Pillow's images.
    Raises UserError as `header` does, and for a torn image.
    """
    height, width, _ = header(data, name, most_pixels)
    image = _open(data, name)
    from PIL import Image

    with _user_errors(name, "the image is torn"):
        image.load()
        turn = None if image.format == "TIFF" else _TURNS.get(_orientation(image, data))  # Pillow turns a TIFF
        turned = image if turn is None else image.transpose(Image.Transpose[turn])
        rgb = _on_white(turned) if _has_alpha(turned) else turned.convert("RGB")
    if rgb.size != (width, height):
        raise UserError(
            f"{name}: the image is damaged: it has {rgb.width} × {rgb.height} pixels, and {width} × {height} by its "
            "header; save it anew"
        )
    return rgb


def _open(data: bytes, name: str) -> "ImageFile":
    """Return the image, not decoded: Pillow's `Image.open`, but for its bound of pixels and its other formats, some of
    which run programs."""
    for factory, accepts in _formats():
        if accepts(data[:16]) is True:
            with _user_errors(name, "the image is damaged"):
                return factory(BytesIO(data), "")
    start = data[:64].lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    why = next((fix for beginning, fix in _OTHERS if start.startswith(beginning)), "")
    if data[4:8] == b"ftyp":
        why = "it looks like HEIC or a video; save it as JPEG"
    raise UserError(f"{name}: this is no image of the kinds {', '.join(_FORMATS)}" + (f": {why}" if why else ""))


@cache
def _formats() -> list[tuple[Callable[[BytesIO, str], "ImageFile"], Callable[[bytes], bool | str]]]:
    """Return Pillow's opener of each format, and its check of a file's first 16 bytes."""
    try:
        from PIL import Image
    except ImportError as error:
        raise UserError("images need Pillow, which is not installed: pip install 'dtrain[images]'") from error
    for plugin in _PLUGINS:
        with suppress(ImportError):  # AVIF, before Pillow 11.3
            import_module(f"PIL.{plugin}ImagePlugin")
    return [Image.OPEN[name] for name in _FORMATS if name in Image.OPEN]  # type: ignore[misc]


def _orientation(image: "ImageFile", data: bytes) -> int:
    """Return EXIF's orientation, 1 to 8; 1 where there is none that can be read."""
    from PIL import Image

    if image.format == "PNG" and _has_late_exif(data):
        image.load()
    with suppress(*_DAMAGED):
        tags: Any = _tiff_tags(image) if image.format == "TIFF" else Image.Image.getexif(image)  # a PNG's own decodes
        value = tags.get(_ORIENTATION, 1)
        return value if value in _TURNS else 1
    return 1


def _tiff_tags(image: Any) -> Any:
    return image.tag_v2


def _has_late_exif(data: bytes) -> bool:
    """Return whether a PNG has a chunk behind its pixels that may say its orientation."""
    position, is_behind = 8, False
    while position + 8 <= len(data):
        length, kind = struct.unpack_from(">I4s", data, position)
        start = data[position + 8 : position + 40]
        keyword = start.partition(b"\0")[0] if kind in (b"tEXt", b"zTXt", b"iTXt") else b""
        if is_behind and (kind == b"eXIf" or keyword in (b"Raw profile type exif", b"XML:com.adobe.xmp")):
            return True
        is_behind = is_behind or kind == b"IDAT"
        position += 12 + length
    return False


def _is_animated(image: "ImageFile") -> bool:
    with suppress(*_DAMAGED):
        return image.format != "MPO" and bool(getattr(image, "is_animated", False))  # MPO: a camera's preview
    return False


def _has_alpha(image: "Image") -> bool:
    return "A" in image.getbands() or image.info.get("transparency") is not None


def _on_white(image: "Image") -> "Image":
    from PIL import Image

    white = Image.new("RGBA", image.size, "white")
    white.alpha_composite(image.convert("RGBA"))
    return white.convert("RGB")


@contextmanager
def _user_errors(name: str, what: str) -> Iterator[None]:
    """Raise what Pillow raises in the block as a UserError of `name` and `what`."""
    from PIL import Image

    try:
        yield
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise UserError(f"{name}: the image has more pixels than Pillow opens ({error}); shrink it") from error
    except _DAMAGED as error:
        raise UserError(f"{name}: {what} ({str(error) or type(error).__name__}); is the file whole?") from error
