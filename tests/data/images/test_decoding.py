"""Headers and values of image files against Pillow's and transformers': modes, orientations, frames, broken files."""

import random
import sys
import warnings
from io import BytesIO

import pytest
import torch
from PIL import Image, ImageFile
from transformers.image_transforms import convert_to_rgb

from dtrain.base.errors import UserError
from dtrain.data.images import files
from dtrain.data.images.files import ANIMATED, CMYK, DEEP, decode_image, read_image_header
from tests.data.images.makers import animation, chunk, encoded, picture, png_that_claims, values

LOSSLESS = {"PNG": {}, "TIFF": {}, "WEBP": {"lossless": True}, "AVIF": {"quality": 100, "subsampling": "4:4:4"}}
FILES = {
    "JPEG": encoded(picture(33, 20), "JPEG"),
    "PNG": encoded(picture(33, 20)),
    "palette": encoded(picture(33, 20, "P")),
    "GIF": animation("GIF"),
    "WEBP": encoded(picture(33, 20), "WEBP"),
    "animated WEBP": animation("WEBP"),
    "BMP": encoded(picture(33, 20), "BMP"),
    "TIFF": encoded(picture(33, 20), "TIFF", compression="tiff_deflate"),
    "AVIF": encoded(picture(33, 20), "AVIF"),
    "EXIF": encoded(picture(33, 20), "JPEG", orientation=6),
}


def turned(image, orientation):
    """An image [3, H, W] as EXIF's table of orientations says it must be shown."""
    return {
        1: lambda it: it,
        2: lambda it: it.flip(-1),
        3: lambda it: it.rot90(2, (-2, -1)),
        4: lambda it: it.flip(-2),
        5: lambda it: it.mT,
        6: lambda it: it.rot90(-1, (-2, -1)),
        7: lambda it: it.rot90(2, (-2, -1)).mT,
        8: lambda it: it.rot90(1, (-2, -1)),
    }[orientation](image)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", [*LOSSLESS, "JPEG"])
def test_orientation(kind, orientation):
    plain = encoded(picture(5, 8), kind, **LOSSLESS.get(kind, {}))
    data = encoded(picture(5, 8), kind, orientation, **LOSSLESS.get(kind, {}))
    image = decode_image(data, "it")
    assert torch.equal(image, turned(decode_image(plain, "it"), orientation))
    assert read_image_header(data, "it") == (*image.shape[1:], ()) and image.is_contiguous()
    if kind != "AVIF" and kind != "JPEG":
        assert torch.equal(decode_image(plain, "it"), values(5, 8).permute(2, 0, 1))


@pytest.mark.parametrize("late", ["eXIf", "XML:com.adobe.xmp"])
def test_orientation_of_a_png_behind_its_pixels(late):
    plain = encoded(picture(5, 8))
    exif = Image.Exif()
    exif[0x0112] = 6
    packet = b'XML:com.adobe.xmp\0\0\0\0\0<x tiff:Orientation="6"/>'
    tail = chunk(b"eXIf", exif.tobytes()[6:]) if late == "eXIf" else chunk(b"iTXt", packet)
    end = chunk(b"IEND", b"")
    data = plain.removesuffix(end) + chunk(b"tEXt", b"date\0now") + tail + end
    assert read_image_header(data, "it")[:2] == (8, 5)
    assert torch.equal(decode_image(data, "it"), turned(decode_image(plain, "it"), 6))


def test_an_exif_that_cannot_be_read_turns_nothing():
    data = encoded(picture(5, 8), "JPEG", exif=b"Exif\0\0 no TIFF at all")
    assert read_image_header(data, "it")[:2] == (5, 8) == decode_image(data, "it").shape[1:]


@pytest.mark.parametrize("mode", ["1", "L", "LA", "RGB", "RGBA", "P", "I;16", "CMYK", "YCbCr", "I", "F"])
@pytest.mark.parametrize("kind", ["PNG", "TIFF", "JPEG", "WEBP", "BMP"])
def test_modes_are_converted_as_by_transformers(kind, mode):
    written = {"PNG": "1 L LA RGB RGBA P I;16", "TIFF": "1 L LA RGB RGBA P I;16 CMYK I F", "JPEG": "1 L RGB CMYK YCbCr"}
    if mode not in written.get(kind, "L RGB RGBA").split():
        return
    data = encoded(picture(6, 7, mode), kind)
    stream = Image.open(BytesIO(data))
    expected = torch.from_numpy(convert_to_rgb(stream, return_numpy=True).copy()).permute(2, 0, 1)
    assert torch.equal(decode_image(data, "it"), expected) and decode_image(data, "it").dtype == torch.uint8
    assert len(expected.unique()) > 1
    notes = {"CMYK": (CMYK,), "I;16": (DEEP,), "I": (DEEP,), "F": (DEEP,)}.get(stream.mode, ())
    assert read_image_header(data, "it").notes == notes


def test_transparency_lies_on_white():
    image = Image.new("RGBA", (2, 1), (0, 0, 0, 0))
    image.putpixel((1, 0), (10, 20, 30, 255))
    assert decode_image(encoded(image), "it").flatten(1).T.tolist() == [[255, 255, 255], [10, 20, 30]]
    keyed = encoded(Image.new("RGB", (1, 1), (1, 2, 3)), transparency=(1, 2, 3))
    assert decode_image(keyed, "it").flatten().tolist() == [255, 255, 255]


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG", "TIFF"])
def test_the_first_frame_of_an_animation(kind):
    options = {"lossless": True} if kind == "WEBP" else {}
    frames = [picture(9, 12, seed=seed) for seed in (0, 1)]
    if kind == "GIF":
        frames = [frame.quantize(64).convert("RGB") for frame in frames]
    data = encoded(frames[0], kind, save_all=True, append_images=frames[1:], **options)
    assert read_image_header(data, "it") == (9, 12, (ANIMATED,))
    first = torch.frombuffer(bytearray(frames[0].tobytes()), dtype=torch.uint8).view(9, 12, 3).permute(2, 0, 1)
    assert torch.equal(decode_image(data, "it"), first)


@pytest.mark.parametrize("name", FILES)
def test_a_header_decodes_nothing(name, monkeypatch):
    shape = decode_image(FILES[name], "it").shape[1:]
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda _: pytest.fail("decoded"))
    assert read_image_header(FILES[name], "it")[:2] == shape


@pytest.mark.parametrize("name", ["JPEG", "PNG", "GIF", "BMP", "TIFF"])
def test_a_torn_image_is_refused_when_it_is_decoded(name):
    data = encoded(picture(33, 20), name)
    data = data[: len(data) * 2 // 3]
    assert read_image_header(data, "cat")[:2] == (33, 20) or name == "TIFF"  # its header stands behind its pixels
    with pytest.raises(UserError, match=r"^cat: the image is (torn|damaged) \(.*\); is the file complete\?$"):
        decode_image(data, "cat")


def test_broken_files_are_refused_or_read_as_their_header_says():
    """Cut anywhere, or with bytes turned to others."""
    chance = random.Random(0)
    outcomes = {"refused": 0, "read": 0}
    for data in FILES.values():
        for _ in range(60):
            broken = bytearray(data[: chance.randrange(1, len(data))] if chance.random() < 0.5 else data)
            for _ in range(chance.choice([0, 1, 5])):
                broken[chance.randrange(len(broken))] = chance.randrange(256)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                try:
                    size = read_image_header(bytes(broken), "it", 10_000)[:2]
                    assert decode_image(bytes(broken), "it", 10_000).shape == (3, *size)
                    outcomes["read"] += 1
                except UserError as error:
                    assert str(error).startswith("it: ")
                    outcomes["refused"] += 1
    assert min(outcomes.values()) > 100, outcomes


def test_pixels_of_another_size_than_the_header_s_are_refused(monkeypatch):
    monkeypatch.setattr(files, "read_image_header", lambda *_: (20, 33, ()))
    with pytest.raises(UserError, match="^it: the image is damaged: it has 20 × 33 pixels, and 33 × 20 by its header"):
        decode_image(FILES["PNG"], "it")


@pytest.mark.parametrize("read", [read_image_header, decode_image])
def test_bounds_hold_before_decoding(read, monkeypatch):
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda _: pytest.fail("decoded"))
    with pytest.raises(UserError, match="bomb.png: the image has more pixels than Pillow opens"):
        read(png_that_claims(100_000, 100_000), "bomb.png")
    with pytest.raises(UserError, match="9000 × 9000, 81.0 megapixels, more than the 64 .*image_most_pixels"):
        read(png_that_claims(9_000, 9_000), "bomb.png")
    with pytest.raises(UserError, match="8 × 5, 0.0 megapixels, more than the 3.9e-05"):
        read(encoded(picture(5, 8)), "it", 39)
    with pytest.raises(UserError, match="201 × 1: one side is more than 200 times the other"):
        read(encoded(Image.new("L", (201, 1))), "it")
    with pytest.raises(UserError, match="cannot read this file as an image"):
        read(encoded(picture(5, 8), "GIF").replace(b"\x08\0\x05\0", b"\0\0\x05\0"), "it")
    assert read_image_header(png_that_claims(9_000, 9_000), "it", 10**8)[:2] == (9_000, 9_000)
    assert read_image_header(encoded(Image.new("L", (200, 1))), "it")[:2] == (1, 200)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"It is a text.", "cannot read this file as an image"),
        (b"version https://git-lfs.github.com/spec/v1\noid ...", "git lfs pull"),
        (b"\n<!DOCTYPE html><html>", "web page"),
        (b"<svg xmlns=''>", "SVG"),
        (b"\0\0\0\x18ftypheic\0\0\0\0mif1heic", "damaged|HEIC"),
        (b"\0\0\0\x18ftypisom\0\0\0\0", "HEIC or a video"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "cannot read this file as an image"),
    ],
)
def test_what_is_no_image(data, words):
    with pytest.raises(UserError, match=f"^cat.png: .*({words})"):
        read_image_header(data, "cat.png")


def test_without_pillow(monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(UserError, match=r"pip install 'dtrain\[images\]'"):
        read_image_header(FILES["PNG"], "it")
