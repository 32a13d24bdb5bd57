"""Torn files of images: cut behind any byte they are refused without being decoded, and whole ones are not."""

import io
import struct
import tracemalloc

import pytest
from PIL import Image, ImageFile

from dtrain.base.errors import UserError
from dtrain.data.images.decoding import header
from dtrain.data.images.whole import check_whole
from tests.data.images.makers import animation, chunk, encoded, picture


def tiff_with_words_behind_its_pixels() -> bytes:
    data = encoded(picture(9, 7), "TIFF", description="a cat and more")
    place = data.index(struct.pack("<HHI", 270, 2, 15)) + 8
    return data[:place] + struct.pack("<I", len(data)) + data[place + 4 :] + b"a cat and more\0"


FILES = {
    "JPEG": encoded(picture(33, 20), "JPEG"),
    "progressive JPEG": encoded(picture(33, 20), "JPEG", progressive=True),
    "JPEG with restarts": encoded(picture(33, 20, "CMYK"), "JPEG", orientation=6, restart_marker_blocks=1),
    "PNG": encoded(picture(9, 7)),
    "animated PNG": animation("PNG"),
    "GIF": encoded(picture(33, 20), "GIF")[:-1],  # some programs write no trailer
    "animated GIF": animation("GIF"),
    "WEBP": encoded(picture(33, 20), "WEBP", orientation=6),
    "animated WEBP": animation("WEBP"),
    "BMP": encoded(picture(33, 20), "BMP"),
    "BMP of bits": encoded(picture(33, 20, "1"), "BMP"),
    "TIFF": encoded(picture(9, 7), "TIFF", orientation=6),
    "compressed TIFF": encoded(picture(33, 20), "TIFF", compression="tiff_deflate"),
    "TIFF with words": tiff_with_words_behind_its_pixels(),
    "BigTIFF": encoded(picture(9, 7), "TIFF", big_tiff=True),
    "TIFF of pages": animation("TIFF"),
    "AVIF": encoded(picture(33, 20), "AVIF"),
}


def refusal(data: bytes) -> str | None:
    """Return the error of an image that is refused before it is decoded, else None."""
    try:
        header(data, "cat")
        check_whole(data, "cat")
    except UserError as error:
        return str(error)
    return None


@pytest.mark.filterwarnings("ignore::UserWarning")  # of Pillow, at torn TIFFs
@pytest.mark.parametrize("name", FILES)
def test_a_file_cut_behind_any_byte_is_refused_by_its_structure(name, monkeypatch):
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda _: pytest.fail("decoded"))
    data = FILES[name]
    assert refusal(data) is None and refusal(data + b"\0junk") is None
    reasons = {cut: refusal(data[:cut]) for cut in {*range(1, len(data), 9), *range(len(data) - 20, len(data))}}
    passed = [cut for cut, reason in reasons.items() if reason is None]
    if name == "animated GIF":  # its first frame is whole, and no block is cut
        passed = [cut for cut in passed if data[cut - 1] or data[cut] not in b"\x21\x2c\x3b"]
    if name == "TIFF of pages":  # the first page, which alone is decoded, is whole
        monkeypatch.undo()
        passed = [cut for cut in passed if first_page(data[:cut]) != first_page(data)]
    assert not passed
    assert all(reason is None or reason.startswith("cat: ") for reason in reasons.values())


def first_page(data: bytes) -> bytes:
    with Image.open(io.BytesIO(data)) as image:
        return image.tobytes()


def test_what_is_torn_is_told():
    png, jpeg = FILES["PNG"], FILES["JPEG"]
    changed = bytearray(png)
    changed[-20] ^= 1
    assert (
        refusal(bytes(changed))
        == "cat: the image is torn (the checksum of its chunk IDAT is another); is the file whole?"
    )
    assert refusal(png[:-1]) == "cat: the image is torn (its end is missing); is the file whole?"
    assert refusal(FILES["BMP"][:-3]) == "cat: the image is torn (missing bytes: 3); is the file whole?"
    far = b"II+\0" + struct.pack("<HHQ", 8, 0, 2**64 - 1)  # a TIFF whose first table is behind all files
    with pytest.raises(UserError, match="its end is missing"):
        check_whole(far, "it")
    scan = jpeg.index(b"\xff\xda")
    assert "it has no pixels" in refusal(jpeg[:scan] + b"\xff\xd9")


def test_files_of_older_programs_are_whole():
    """A bitmap of OS/2, one in runs, a PNG with words behind its pixels, a JPEG with another behind it."""
    os2 = b"BM" + struct.pack("<IIIIHHHH", 0, 0, 26, 12, 3, 2, 1, 24) + bytes(24)
    runs = b"BM" + struct.pack("<IIIIiiHHIIIIII", 0, 0, 54, 40, 3, 2, 1, 8, 1, 8, 0, 0, 0, 0) + bytes(8)
    for data in (os2, runs):
        check_whole(data, "it")
        with pytest.raises(UserError, match="missing bytes: 1"):
            check_whole(data[:-1], "it")
    end = chunk(b"IEND", b"")
    assert refusal(FILES["PNG"].removesuffix(end) + chunk(b"tEXt", b"date\0now") + end) is None
    assert refusal(FILES["JPEG"] * 2) is None


def test_what_follows_the_first_page_or_the_pixels_is_not_looked_at():
    """A TIFF whose next page lies behind the end, and an AVIF with bytes behind its pixels."""
    assert refusal(FILES["AVIF"] + b"\n") is None
    entry = struct.pack("<HHII", 256, 4, 1, 1)
    assert refusal_of_tiff(1, entry, 10**6) is None


def test_a_tiff_of_many_long_tables_takes_no_memory():
    """Of a thousand tags, each over the whole file."""
    size = 1 << 21
    entries = b"".join(struct.pack("<HHII", 1000 + tag, 3, size // 2, 0) for tag in range(1000))
    tracemalloc.start()
    assert refusal_of_tiff(1000, entries, 0, size) is None
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 3 * size


def refusal_of_tiff(count, entries, next_page, size=0):
    data = b"II*\0" + struct.pack("<IH", 8, count) + entries + struct.pack("<I", next_page)
    try:
        check_whole(data.ljust(size, b"\0"), "cat")
    except UserError as error:
        return str(error)
    return None
