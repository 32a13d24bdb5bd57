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

THUMBNAIL_SIDE = 256  # maximum pixels of a thumbnail's longer side
JPEG_QUALITY = 80
MAX_THUMBNAILS = 64  # largest number of thumbnails of a page
MAX_THUMBNAIL_BYTES = 4 << 20  # largest size of all thumbnails of a page together

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


def _clean(value: Any) -> Any:
    """Remove control characters and halves of surrogate pairs from a text. Jinja then escapes it."""
    return value if isinstance(value, Markup) else printable(str(value).replace("\r\n", "\n"))


_TEMPLATES = Environment(
    autoescape=True,
    finalize=_clean,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    loader=FileSystemLoader(_FILES),
)
_TEMPLATES.filters |= {"commas": "{:,}".format, "cut": cut, "key_of": sections.key_of, "shown": charts.shown}
_TEMPLATES.filters["as_yaml"] = partial(yaml.safe_dump, sort_keys=False, allow_unicode=True)


def page(data: dict[str, Any], html: dict[str, str], library: str, seen: str = "") -> str:
    """Return the HTML of the page.

    Args:
        data: Data for the page's script, from `page_state`.
        html: HTML of each section, from `page_state`.
        library: Text of `plotly`.
        seen: Identifies this state if the page is live. "" for a file.
    """
    scripts = [_script(library), _script((_FILES / "page.js").read_text("utf-8"))]
    hashes = []
    for script in scripts:
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        hashes.append(f"'sha256-{digest}'")
    return _TEMPLATES.get_template("page.html").render(
        seen=seen,
        names=data["runs"],
        titles=_TITLES,
        sections=html,
        version=__version__,
        made=time.strftime("%Y-%m-%d %H:%M"),
        # These come from dtrain itself or are JSON, so they are not escaped.
        mark=Markup(MARK),
        style=Markup((_FILES / "page.css").read_text("utf-8")),
        data=Markup(embedded(data)),
        library=Markup(scripts[0]),
        script=Markup(scripts[1]),
        hashes=Markup(" ".join(hashes)),
    )


def page_state(runs: Sequence[RunFiles], answers: int) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the content of the page.

    Args:
        runs: The runs.
        answers: Number of prompts of each evaluation whose answers are included.

    Returns:
        The data for the page's script, and the HTML of each section by its id, "" for an empty section.
    """
    data = charts.chart_data(runs)
    lengths = charts.length_histograms(runs)
    prompts, num_prompts = sections.prompts(runs, answers)
    values = {
        "runs": runs,
        "curves": data["charts"],
        "lengths": lengths,
        "identities": identity_rows(runs),
        "results": results(runs),
        "differences": differences(runs),
        "prompts": prompts,
        "num_prompts": num_prompts,
        "most": answers,
        "steps": sections.STEPS,
        "longest": sections.LONGEST,
        "pictures_of": Pictures().of,
        "groups": sections.groups(runs),
        "meshes": sections.meshes(runs),
        "notes": sections.notes(runs),
    }
    module = _TEMPLATES.get_template("sections.html").make_module(values)
    html = {}
    for section in _TITLES:
        render_section = getattr(module, f"{section}_section")
        html[section] = str(render_section()).strip()
    return {**data, "charts": data["charts"] + lengths}, html


def plotly() -> str:
    """Return plotly's own offline file. Raises UserError if it is not installed."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise UserError("the page's charts need plotly, which is not installed: pip install 'dtrain[report]'") from None
    return get_plotlyjs()


def embedded(data: Any) -> str:
    r"""Return JSON that can be part of an HTML script, because nothing in it ends the script or opens a comment.

    Example:
        >>> print(embedded("</script>"))
        "\u003c/script\u003e"
    """
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _script(text: str) -> str:
    """Return a script as a browser sees it in a page, so that its digest is right."""
    return text.replace("\r\n", "\n").replace("\r", "\n").replace("</script", "<\\/script")


class Picture(NamedTuple):
    """An image of a prompt on the page.

    Attributes:
        name: Name of its file.
        uri: Thumbnail as a data URI. None if only the name is shown.
    """

    name: str
    uri: str | None


class Pictures:
    """The thumbnails of a page.

    Images beyond MAX_THUMBNAILS or MAX_THUMBNAIL_BYTES are shown only by name. So are files that are missing, have
    changed since the run read them, or cannot be decoded.
    """

    def __init__(self) -> None:
        self._uris: dict[PromptImage, str | None] = {}
        self._count = self._bytes = 0

    def of(self, images: Sequence[PromptImage]) -> list[Picture]:
        """Return the pictures of a prompt's images."""
        return [Picture(image.name, self._thumbnail(image)) for image in images]

    def _thumbnail(self, image: PromptImage) -> str | None:
        """Return the thumbnail of an image if the page has room for it."""
        if image.path is None or self._count >= MAX_THUMBNAILS:
            return None
        if image not in self._uris:
            self._uris[image] = thumbnail(image)
        uri = self._uris[image]
        if uri is None or self._bytes + len(uri) > MAX_THUMBNAIL_BYTES:
            return None
        self._count += 1
        self._bytes += len(uri)
        return uri


def thumbnail(image: PromptImage) -> str | None:
    """Return the thumbnail of an image as a data URI.

    None if its file cannot be read or decoded, if the file has changed since the run, or if Pillow is not installed.
    """
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
