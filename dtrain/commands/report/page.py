"""The whole page: one file that fetches nothing. Its policy (CSP) lets a browser run dtrain's two scripts alone."""

import base64
import hashlib
import json
import time
from collections.abc import Sequence
from pathlib import Path
from string import Template
from typing import Any

from dtrain import __version__
from dtrain.base.errors import UserError
from dtrain.commands.report import charts, sections
from dtrain.commands.report.run_files import RunFiles

MARK = '<meta name="generator" content="dtrain report">'
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
_CONTROLS = """<div class="controls" id="controls" hidden>
<label>across <select id="x-axis"><option value="step">steps</option><option value="tokens">tokens</option>
<option value="hours">hours</option></select></label>
<label>smooth <input id="smooth" type="range" min="0" max="0.98" step="0.02" value="0"></label>
<label><input id="log-y" type="checkbox"> logarithmic</label><span class="controls" id="shown-runs" hidden></span></div>
<noscript><p>The curves need JavaScript; beside each of their titles stands what they come to.</p></noscript>"""


def plotly() -> str:
    """Return plotly's own offline file. Raises UserError if it is not installed."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise UserError("the page's charts need plotly, which is not installed: pip install 'dtrain[report]'") from None
    return get_plotlyjs()


def state(runs: Sequence[RunFiles], answers: int) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the data for the page's script, and the HTML of each section, "" for an empty one."""
    data = charts.drawn(runs)
    lengths = charts.lengths(runs)
    html = {
        "runs": sections.overview(runs),
        "differences": sections.differing(runs),
        "curves": sections.charts(data["charts"], runs),
        "answers": sections.answers(runs, answers),
        "groups": sections.groups(runs),
        "lengths": sections.charts(lengths, runs),
        "mesh": sections.meshes(runs),
        "recipes": sections.recipes(runs),
        "notes": sections.notes(runs),
    }
    data["charts"] += lengths
    return data, html


def page(data: dict[str, Any], html: dict[str, str], library: str, seen: str = "") -> str:
    """Return the page of `state`. library: the text of `plotly`. seen: of a page that is live, the mark of that
    state."""
    form, style, code = (Path(__file__).with_name(f"page.{end}").read_text("utf-8") for end in ("html", "css", "js"))
    scripts = [_script(library), _script(code)]
    policy = f"default-src 'none'; script-src {' '.join(map(_hash, scripts))}; style-src 'unsafe-inline'; img-src data:"
    policy += "; base-uri 'none'; form-action 'none'" + ("; connect-src 'self'" if seen else "")
    names = [sections.safe(name) for name in data["runs"]]
    title = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
    heads = " · ".join(sections.chip(number, name) for number, name in enumerate(data["runs"]))
    links = "".join(
        f'<li{_hidden(html[id])}><a href="#{id}">{_TITLES[id]}</a></li>'
        for id in html
        if id not in ("recipes", "notes")
    )
    body = "".join(
        f'<section id="{id}"{_hidden(text)}><h2>{_TITLES[id]}</h2>{_CONTROLS if id == "curves" else ""}'
        f'<div class="body">{text}</div></section>'
        for id, text in html.items()
    )
    return Template(form).substitute(
        {"seen": seen, "mark": MARK, "policy": policy, "title": title, "style": style, "heads": heads, "links": links},
        **{"version": __version__, "made": time.strftime("%Y-%m-%d %H:%M"), "body": body, "data": embedded(data)},
        **{"library": scripts[0], "script": scripts[1]},
    )


def embedded(data: Any) -> str:
    """Return JSON that can stand inside a script: nothing in it ends the script or opens a comment."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _script(text: str) -> str:
    """Return a script as a browser sees it in a page, so that its digest is right."""
    return text.replace("\r\n", "\n").replace("\r", "\n").replace("</script", "<\\/script")


def _hash(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def _hidden(text: str) -> str:
    return "" if text else " hidden"
