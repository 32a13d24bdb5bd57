"""`ImageRecord`: image of a sample, as a cache of rows keeps it: not its pixels, but where its bytes are."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dtrain.base.errors import UserError
from dtrain.data.images.files import ImageBytes
from dtrain.data.images.processor import Layout


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

    @classmethod
    def of(cls, image: ImageBytes, layout: Layout) -> "ImageRecord":
        """Return the record of an image that was read."""
        if image.path is None:
            return cls(image.name, image.digest, layout, data=image.data)
        return cls(image.name, image.digest, layout, path=str(image.path))

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
