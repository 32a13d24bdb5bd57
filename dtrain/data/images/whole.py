"""`check_whole`: torn image files, told by the structure of the file's bytes alone; nothing is decoded.

Each format says where its file ends: a JPEG by its marker EOI, a PNG by its chunk IEND (its checksums are compared
too), a GIF by its blocks, an AVIF by its boxes, a BMP by its rows, a TIFF by the places of its values and strips. A
file that ends before is torn, at whatever byte it was cut (a GIF: unless a frame is whole and no block is cut); what
follows the end is not looked at. Pillow finds no header in a torn WebP. Damage within compressed pixels is found where
they are decoded, and in a PNG here.
"""

import re
import struct
import zlib
from collections.abc import Callable
from types import MappingProxyType

from dtrain.base.errors import UserError

_MARKER = re.compile(rb"\xff[^\x00\x01\xff\xd0-\xd7]", re.DOTALL)  # no stuffed byte, filler or restart of a JPEG's scan
_SOI, _EOI, _SOS = 0xD8, 0xD9, 0xDA
_GIF_HEADER, _TRAILER, _FRAME, _EXTENSION = 13, 0x3B, 0x2C, 0x21
_TIFF_SIZES = (0, 1, 1, 2, 4, 8, 1, 1, 2, 4, 8, 4, 8, 4, 0, 0, 8, 8, 8)  # bytes of a value, by its type
_MOST_STRIPS = 1 << 20
_TIFF_CODES = MappingProxyType({3: "H", 4: "I", 16: "Q"})  # of SHORT, LONG, LONG8
_TIFF_OFFSETS = MappingProxyType({273: 279, 324: 325})  # tags of places of strips and tiles, and of their sizes
_RLE = (1, 2)  # of a BMP's compressions


def check_whole(data: bytes, name: str) -> None:
    """Raise UserError that begins with `name` where the file of an image ends before its format says so, or a part of a
    PNG is not what its checksum says. Files of other formats pass."""
    try:
        why = next((check(data) for begins, check in _CHECKS if begins.match(data)), None)
    except (struct.error, IndexError, OverflowError):  # a number, a byte or a place past the end
        why = "its end is missing"
    if why is not None:
        raise UserError(f"{name}: the image is torn ({why}); is the file whole?")


def _missing(count: int) -> str:
    return f"missing bytes: {count:,}"


def _jpeg(data: bytes) -> str | None:
    position, has_scan = 0, False
    while marker := _MARKER.search(data, position):
        kind, position = data[marker.end() - 1], marker.end()
        if kind == _EOI:
            return None if has_scan else "it has no pixels"
        if kind != _SOI:
            position += struct.unpack_from(">H", data, position)[0]
        has_scan = has_scan or kind == _SOS
    return "its end is missing"


def _png(data: bytes) -> str | None:
    position, view = 8, memoryview(data)
    while position < len(data):
        length, kind = struct.unpack_from(">I4s", data, position)
        (checksum,) = struct.unpack_from(">I", data, position + 8 + length)
        if zlib.crc32(view[position + 4 : position + 8 + length]) != checksum:
            return f"the checksum of its chunk {kind.decode('latin-1')} is another"
        if kind == b"IEND":
            return None
        position += 12 + length
    return "its end is missing"


def _gif(data: bytes) -> str | None:
    position, has_frame = _GIF_HEADER + _colour_bytes(data[10]), False
    while not has_frame or position < len(data):  # some programs write no trailer
        kind = data[position]
        if kind == _TRAILER:
            return None
        if kind == _FRAME:
            position += 11 + _colour_bytes(data[position + 9])
            has_frame = True
        elif kind == _EXTENSION:
            position += 2
        else:  # bytes between blocks, over which Pillow passes too
            position += 1
            continue
        while size := data[position]:
            position += 1 + size
        position += 1
    return None


def _colour_bytes(flags: int) -> int:
    """Return the bytes of a GIF's table of colours."""
    return 3 * 2 ** ((flags & 7) + 1) if flags & 0x80 else 0


def _avif(data: bytes) -> str | None:
    position, kinds = 0, set[bytes]()
    while position < len(data) and not kinds >= {b"meta", b"mdat"}:
        size, kind = struct.unpack_from(">I4s", data, position)
        kinds.add(kind)
        if size == 1:
            (size,) = struct.unpack_from(">Q", data, position + 8)
        if size == 0:  # a box that goes on to the end, wherever that is
            return None
        position += max(size, 8)
    return None if position <= len(data) else _missing(position - len(data))


def _bmp(data: bytes) -> str | None:
    file_size, start, header = struct.unpack_from("<I4xII", data, 2)
    width, height, bits = struct.unpack_from("<HH2xH" if header == 12 else "<ii2xH", data, 18)
    compression, size = (0, 0) if header == 12 else struct.unpack_from("<II", data, 30)
    if compression not in _RLE:
        size = (width * bits + 31) // 32 * 4 * abs(height)
    end = start + size if size else file_size
    return None if end <= len(data) else _missing(end - len(data))


def _tiff(data: bytes) -> str | None:
    order = "<" if data[:2] == b"II" else ">"
    is_big = struct.unpack_from(order + "H", data, 2)[0] == 43
    place, count, entry = ("Q", "Q", "HHQ8s") if is_big else ("I", "H", "HHI4s")
    (position,) = struct.unpack_from(order + place, data, 8 if is_big else 4)
    (entries,) = struct.unpack_from(order + count, data, position)  # of the first page, the one that is decoded
    position += struct.calcsize(order + count)
    values = dict[int, tuple[int, ...]]()
    for _ in range(entries):
        tag, kind, number, own = struct.unpack_from(order + entry, data, position)
        position += struct.calcsize(order + entry)
        size = number * (_TIFF_SIZES[kind] if kind < len(_TIFF_SIZES) else 0)
        start = struct.unpack(order + place, own)[0] if size > len(own) else position - len(own)
        if start + size > len(data):
            return _missing(start + size - len(data))
        is_place = tag in _TIFF_OFFSETS or tag in _TIFF_OFFSETS.values()
        if is_place and tag not in values and kind in _TIFF_CODES and number <= _MOST_STRIPS:
            values[tag] = struct.unpack_from(f"{order}{number}{_TIFF_CODES[kind]}", data, start)
    for offsets, sizes in _TIFF_OFFSETS.items():
        strips = zip(values.get(offsets, ()), values.get(sizes, ()), strict=False)
        end = max((offset + size for offset, size in strips), default=0)
        if end > len(data):
            return _missing(end - len(data))
    return None


_CHECKS: tuple[tuple[re.Pattern[bytes], Callable[[bytes], str | None]], ...] = (
    (re.compile(rb"\xff\xd8\xff"), _jpeg),
    (re.compile(rb"\x89PNG\r\n\x1a\n"), _png),
    (re.compile(rb"GIF8[79]a"), _gif),
    (re.compile(rb"BM"), _bmp),
    (re.compile(rb"....ftypavi[fs]", re.DOTALL), _avif),
    (re.compile(rb"II\*\0|MM\0\*|II\+\0|MM\0\+"), _tiff),
)
