"""The page of a report: one HTML file that needs no network.

Images of prompts are thumbnails in the page itself, as data URIs. The page's content security policy allows only
dtrain's two scripts. No torch.
"""

import base64
import hashlib
import json
import time
from collections.abc import Sequence
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from dtrain import __version__
from dtrain.base.errors import UserError
from dtrain.commands.report import charts, sections
from dtrain.commands.report.results import cut, differences, identity_rows, results
from dtrain.commands.report.run_files import RunFiles
from dtrain.data.images.files import read_image, upright_image
from dtrain.training.metrics.records import PromptImage
from dtrain.training.metrics.terminal import printable

THUMBNAIL_SIDE = 256  # pixels of a thumbnail's longer side, at most
JPEG_QUALITY = 80  # of JPEG
MAX_THUMBNAILS = 64  # thumbnails on a page
MAX_THUMBNAIL_BYTES = 4 << 20  # of all of them

MARK = '<meta name="generator" content="dtrain report">'
_FILES = Path(__file__).parent
_TITLES = {
    "runs": "Runs",
    "differences": "What differs",
    "curves": "Curves",
    "answers": "Answers over the steps",
    "groups": "Groups of completions",
    "lengths": "Lengths",
    "mesh": "Mesh",
    "recipes": "Recipes",
    "notes": "Notes",
}


def _harmless(value: Any) -> Any:
    """Return text without control characters and halves of surrogate pairs; Jinja then escapes it."""
    return value if isinstance(value, Markup) else printable(str(value).replace("\r\n", "\n"))


_TEMPLATES = Environment(
    autoescape=True,
    finalize=_harmless,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    loader=FileSystemLoader(_FILES),
)
_TEMPLATES.filters |= {"commas": "{:,}".format, "cut": cut, "key_of": sections.key_of, "shown": charts.shown}
_TEMPLATES.filters["as_yaml"] = partial(yaml.safe_dump, sort_keys=False, allow_unicode=True)


def page(data: dict[str, Any], html: dict[str, str], library: str, seen: str = "") -> str:
    """Return the page of `page_state`. library: the text of `plotly`. seen: of a page that is live, the mark of that
    state."""
    style, code = ((_FILES / name).read_text("utf-8") for name in ("page.css", "page.js"))
    scripts = [_script(library), _script(code)]
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    sound = {"mark": MARK, "style": style, "data": embedded(data), "library": scripts[0], "script": scripts[1]}
    sound["hashes"] = " ".join(f"'sha256-{digest}'" for digest in digests)
    values = {"seen": seen, "names": data["runs"], "titles": _TITLES, "sections": html, "version": __version__}
    values |= {name: Markup(text) for name, text in sound.items()}
    return _TEMPLATES.get_template("page.html").render(values, made=time.strftime("%Y-%m-%d %H:%M"))


def page_state(runs: Sequence[RunFiles], answers: int) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the data for the page's script, and the HTML of each section, "" for an empty one."""
    data, lengths = charts.drawn(runs), charts.lengths(runs)
    prompts, num_prompts = sections.prompts(runs, answers)
    values = {"runs": runs, "curves": data["charts"], "lengths": lengths}
    values |= {"identities": identity_rows(runs), "results": results(runs), "differences": differences(runs)}
    values |= {"prompts": prompts, "num_prompts": num_prompts, "most": answers}
    values |= {"steps": sections.STEPS, "longest": sections.LONGEST, "pictures_of": Pictures().of}
    values |= {"groups": sections.groups(runs), "meshes": sections.meshes(runs), "notes": sections.notes(runs)}
    module = _TEMPLATES.get_template("sections.html").make_module(values)
    html = {id: str(getattr(module, f"{id}_section")()).strip() for id in _TITLES}
    return {**data, "charts": data["charts"] + lengths}, html


def plotly() -> str:
    """Return plotly's own offline file. Raises UserError if it is not installed."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise UserError("the page's charts need plotly, which is not installed: pip install 'dtrain[report]'") from None
    return get_plotlyjs()


def embedded(data: Any) -> str:
    """Return JSON that can stand inside a script: nothing in it ends the script or opens a comment."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _script(text: str) -> str:
    """Return a script as a browser sees it in a page, so that its digest is right."""
    return text.replace("\r\n", "\n").replace("\r", "\n").replace("</script", "<\\/script")


class Picture(NamedTuple):
    """Image of a prompt on the page. uri: its thumbnail; None where its name stands alone."""

    name: str
    uri: str | None


class Pictures:
    """Thumbnails of a page. What its bounds leave out is shown by name, as is a file that is gone, is no longer the
    image that the run read, or cannot be decoded."""

    def __init__(self) -> None:
        self._uris: dict[PromptImage, str | None] = {}
        self._count = self._bytes = 0

    def of(self, images: Sequence[PromptImage]) -> list[Picture]:
        """Return the pictures of a prompt's images."""
        return [Picture(image.name, self._taken(image)) for image in images]

    def _taken(self, image: PromptImage) -> str | None:
        """Return the thumbnail of `image` where the page has room for it."""
        if image.path is None or self._count >= MAX_THUMBNAILS:
            return None
        if image not in self._uris:
            self._uris[image] = thumbnail(image)
        uri = self._uris[image]
        if uri is None or self._bytes + len(uri) > MAX_THUMBNAIL_BYTES:
            return None
        self._count, self._bytes = self._count + 1, self._bytes + len(uri)
        return uri


def thumbnail(image: PromptImage) -> str | None:
    """Return the thumbnail of an image with a path as a data URI; None where its file cannot be read or shown, is
    another one by its digest, or Pillow is not installed."""
    try:
        file = read_image(Path(str(image.path)), Path())
        if file.digest != image.digest:
            return None
        small = upright_image(file.data, file.name)
    except UserError:
        return None
    small.thumbnail((THUMBNAIL_SIDE, THUMBNAIL_SIDE))
    jpeg = BytesIO()
    small.save(jpeg, "JPEG", quality=JPEG_QUALITY)
    return f"data:image/jpeg;base64,{base64.b64encode(jpeg.getvalue()).decode()}"
