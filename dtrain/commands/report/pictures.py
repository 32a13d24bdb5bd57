"""Thumbnails of the images of prompts, as data URIs of JPEG that stand in the page itself. No torch."""

import base64
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import NamedTuple

from dtrain.base.errors import UserError
from dtrain.data.images.decoding import upright
from dtrain.data.images.files import read_image
from dtrain.training.metrics.answers import ImageOfPrompt

SIDE = 256  # pixels of a thumbnail's longer side, at most
QUALITY = 80  # of JPEG
MOST = 64  # thumbnails on a page
MOST_BYTES = 4 << 20  # of all of them


class Picture(NamedTuple):
    """Image of a prompt on the page. uri: its thumbnail; None where its name stands alone."""

    name: str
    uri: str | None


class Pictures:
    """Thumbnails of a page. What its bounds leave out is shown by name, as is a file that is gone, is no longer the
    image that the run read, or cannot be decoded."""

    def __init__(self) -> None:
        self._uris: dict[ImageOfPrompt, str | None] = {}
        self._count = self._bytes = 0

    def of(self, images: Sequence[ImageOfPrompt]) -> list[Picture]:
        """Return the pictures of a prompt's images."""
        return [Picture(image.name, self._taken(image)) for image in images]

    def _taken(self, image: ImageOfPrompt) -> str | None:
        """Return the thumbnail of `image` where the page has room for it."""
        if image.path is None or self._count >= MOST:
            return None
        if image not in self._uris:
            self._uris[image] = thumbnail(image)
        uri = self._uris[image]
        if uri is None or self._bytes + len(uri) > MOST_BYTES:
            return None
        self._count, self._bytes = self._count + 1, self._bytes + len(uri)
        return uri


def thumbnail(image: ImageOfPrompt) -> str | None:
    """Return the thumbnail of an image with a path as a data URI; None where its file cannot be read or shown, is
    another one by its digest, or Pillow is not installed."""
    try:
        file = read_image(Path(str(image.path)), Path())
        if file.digest != image.digest:
            return None
        small = upright(file.data, file.name)
    except UserError:
        return None
    small.thumbnail((SIDE, SIDE))
    jpeg = BytesIO()
    small.save(jpeg, "JPEG", quality=QUALITY)
    return f"data:image/jpeg;base64,{base64.b64encode(jpeg.getvalue()).decode()}"
