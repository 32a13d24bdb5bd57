#!/usr/bin/env python3
"""Build the documentation site: the Markdown pages of the repository, and an API reference from the docstrings.

    python tools/docs_site.py              build/docs/site
    python tools/docs_site.py --out DIR    another directory than build/docs
    python tools/docs_site.py serve        also show it at http://127.0.0.1:8000

`docs/mkdocs.yml` is the configuration. The pages are copied to `<out>/pages` under the paths that they have in the
repository, with the files that they link to. The reference has a page for each module. mkdocs runs in strict mode: a
link that leads nowhere is an error.
"""

import argparse
import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"\]\(([^)\s#]+)(?:#[^)\s]*)?\)")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", nargs="?", choices=("build", "serve"), default="build")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "docs")
    arguments = parser.parse_args()
    out: Path = arguments.out.resolve()
    pages = out / "pages"
    shutil.rmtree(pages, ignore_errors=True)
    for page in find_pages():
        copy_page(page, pages)
    configuration = out / "mkdocs.yml"
    configuration.write_text(yaml.safe_dump(configure(out, write_reference(pages)), sort_keys=False))
    words = [sys.executable, "-m", "mkdocs", arguments.command, "--strict", "-f", str(configuration)]
    if arguments.command == "build":
        words += ["-d", str(out / "site")]
    return subprocess.run(words, cwd=out).returncode


def find_pages() -> list[Path]:
    """Return the Markdown pages of the repository, relative to its root."""
    folders = [ROOT / "docs", ROOT / "dtrain", ROOT / "recipes"]
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
    for folder in folders:
        pages += sorted(folder.rglob("*.md"))
    return [page.relative_to(ROOT) for page in pages]


def copy_page(page: Path, pages: Path) -> None:
    """Copy a page and the files of the repository that it links to, except other pages."""
    files = [page]
    for link in LINK.findall((ROOT / page).read_text()):
        if "://" in link or link.endswith(".md"):
            continue
        target = (ROOT / page.parent / link).resolve()
        if target.is_file():
            files.append(target.relative_to(ROOT))
    for file in files:
        (pages / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / file, pages / file)


def write_reference(pages: Path) -> list[dict[str, Any]]:
    """Write a page for each documented module, and return the entries of the navigation, one for each package."""
    navigation: list[dict[str, Any]] = [{"dtrain": write_module("dtrain", ROOT / "dtrain" / "__init__.py", pages)}]
    for package in sorted(path.parent for path in (ROOT / "dtrain").glob("*/__init__.py")):
        entries: list[dict[str, str]] = []
        for file in sorted(package.rglob("*.py")):
            if ast.get_docstring(ast.parse(file.read_text())) is None:
                continue
            parts = file.relative_to(ROOT).with_suffix("").parts
            if parts[-1] == "__init__":
                parts = parts[:-1]
            name = ".".join(parts)
            # Below the package the title is the rest of the name: rows.cache for dtrain.data.rows.cache.
            title = ".".join(parts[2:]) or name
            entries.append({title: write_module(name, file, pages)})
        navigation.append({package.name: entries})
    return navigation


def write_module(name: str, file: Path, pages: Path) -> str:
    """Write the page of a module, and return its path below `pages`."""
    path = f"reference/{name.replace('.', '/')}.md"
    if file.name == "__init__.py":
        path = f"reference/{name.replace('.', '/')}/index.md"
    page = pages / path
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(
        f"# {name}\n\n::: {name}\n    options:\n      show_root_heading: false\n      show_root_toc_entry: false\n"
    )
    return path


def configure(out: Path, reference: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the configuration of docs/mkdocs.yml for the pages in `out`, with the API reference in the navigation."""
    configuration: dict[str, Any] = yaml.safe_load((ROOT / "docs" / "mkdocs.yml").read_text())
    configuration["docs_dir"] = str(out / "pages")
    configuration["site_dir"] = str(out / "site")
    for plugin in configuration["plugins"]:
        if isinstance(plugin, dict) and "mkdocstrings" in plugin:
            handler = plugin["mkdocstrings"]["handlers"]["python"]
            handler["paths"] = [str(ROOT)]
            handler["options"]["extensions"] = [f"{ROOT / 'tools' / 'docs_sections.py'}:ExampleSections"]
    configuration["nav"].append({"API": reference})
    return configuration


if __name__ == "__main__":
    sys.exit(main())
