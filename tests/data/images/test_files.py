"""Images as rows write them: paths, URIs, URLs, bytes; and what is refused, by the image's name."""

import base64
import hashlib
import subprocess
import sys

import fsspec
import pytest

from dtrain.base.errors import UserError
from dtrain.data.images import files
from dtrain.data.images.files import ImageBytes, read_image
from tests.data.images.makers import encoded, picture

PNG = encoded(picture(3, 4))


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "a cat~.png").write_bytes(PNG)
    return tmp_path


def test_every_way_to_write_an_image_gives_its_bytes(folder):
    path = folder / "pictures" / "a cat~.png"
    text = base64.b64encode(PNG).decode()
    written = {
        "pictures/a cat~.png": "pictures/a cat~.png",
        str(path): str(path),
        path.as_uri(): path.as_uri(),
        f"data:image/png;base64,{text}": "data:image/png;base64,",
        f"DATA:;base64,{text[:40]}\n{text[40:]}": "DATA:;base64,",
    }
    images = [read_image(value, folder) for value in written]
    for image, name in zip(images, written.values(), strict=True):
        assert image.name.startswith(name[:77]) and len(image.name) <= 80
    images += [read_image(value, folder) for value in (path.relative_to(folder), PNG, bytearray(PNG), memoryview(PNG))]
    images += [
        read_image({"bytes": PNG, "path": "x.png"}, folder),
        read_image({"bytes": None, "path": "pictures/a cat~.png"}, folder),
        read_image({"path": str(path)}, folder),
        read_image({"bytes": PNG, "path": None}, None),
    ]
    assert {image.data for image in images} == {PNG}
    assert {image.digest for image in images} == {hashlib.sha256(PNG).hexdigest()}
    assert images[9].name == "x.png" and images[0].header()[:2] == (3, 4) and images[0].decode().shape == (3, 3, 4)
    assert PNG[:20] not in repr(images[0]).encode()


def test_an_image_is_known_by_its_content(folder):
    (folder / "b.png").write_bytes(PNG)
    (folder / "c.png").write_bytes(encoded(picture(3, 4, seed=1)))
    same, other = read_image("b.png", folder), read_image("c.png", folder)
    assert same.digest == read_image("pictures/a cat~.png", folder).digest != other.digest


def test_a_url_is_copied_once(tmp_path):
    memory = fsspec.filesystem("memory")
    memory.pipe("/bucket/cat.png", PNG)
    try:
        image = read_image("memory://bucket/cat.png", None, tmp_path)
        assert (image.name, image.data) == ("memory://bucket/cat.png", PNG)
        with pytest.raises(UserError, match="no file is at memory://bucket/dog.png"):
            read_image("memory://bucket/dog.png", None, tmp_path)
    finally:
        memory.store.clear()
        memory.pseudo_dirs[:] = [""]
    assert read_image("memory://bucket/cat.png", tmp_path, tmp_path).data == PNG  # its copy serves


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("dog.png", "^dog.png: there is no such image in /"),
        ("pictures", "^pictures: this is a directory or a device"),
        ("/dev/zero", "^/dev/zero: this is a directory or a device"),
        ("", "an image's path is empty"),
        ("a\0b.png", "there is no such image"),
        ("empty.png", "^empty.png: the image is empty, 0 bytes"),
        ("large.png", "^large.png: the file is larger than 1 GiB"),
        ("empty.png/x", "there is no such image"),
        ("/9j/" * 99, "^(/9j/)+/...: there is no such image in /.*data:image/png;base64,$"),
        ("iVBORw0KGgo" * 99, "^iVBORw0KGgo.{69}: the image cannot be read: .*data:image/png;base64,$"),
        ("https://example.org/cat.png", "^https://example.org/cat.png: images are not fetched from URLs here; copy"),
        ("data:image/png;base64", "begins with data:image/png;base64,"),
        ("data:image/png,abc", "begins with data:image/png;base64,"),
        ("data:image/png;base64,ab$cd", "is not whole base64"),
        ("data:image/png;base64,abc", "is not whole base64"),
        ("data:image/png;base64,", "the image is empty"),
        (b"", "^an image: the image is empty"),
        ({"bytes": b"", "path": "x.png"}, "^x.png: the image is empty"),
        ({"bytes": None, "path": None}, "neither bytes nor a path"),
        ({"bytes": "abc"}, "an image's bytes must be bytes, not a string"),
        (None, "not null"),
        (7, "must be a path, a URL, a data URI or an object with bytes, not a number"),
    ],
)
def test_refusals_name_the_image(folder, value, words):
    (folder / "empty.png").touch()
    with (folder / "large.png").open("wb") as file:
        file.truncate(files.MAX_FILE_BYTES + 1)
    with pytest.raises(UserError, match=words):
        read_image(value, folder)


def test_no_path_is_taken_from_a_stranger(folder):
    for value in ("/etc/passwd", "pictures/a cat~.png", "file:///etc/passwd", {"path": "/etc/passwd"}):
        with pytest.raises(UserError, match="images are not read from paths here; send the image itself"):
            read_image(value, None)


def test_a_text_file_with_an_image_s_name(folder):
    (folder / "text.png").write_text("It is a text.")
    with pytest.raises(UserError, match=r"^text.png: Pillow cannot read this file as an image"):
        read_image("text.png", folder).header()


def test_size_and_identity_need_no_torch_and_reading_no_pillow():
    code = f"""
import sys
from dtrain.data.images.families import read_processor
from dtrain.data.images.files import ImageBytes, read_image
image = read_image({PNG!r}, None)
image.digest
assert not {{"torch", "PIL", "numpy"}} & sys.modules.keys()
assert image.header()[:2] == (3, 4)
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_bytes_are_a_value():
    assert ImageBytes("a", PNG) == ImageBytes("a", PNG)
