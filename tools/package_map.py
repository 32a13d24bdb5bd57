"""Write the map of the packages in dtrain/README.md, from their order and the first sentences of their docstrings.

python tools/package_map.py
"""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "dtrain" / "README.md"
BEGIN, END = "<!-- packages: written by tools/package_map.py -->", "<!-- end of packages -->"


def packages() -> list[str]:
    """Return the packages in their order, as dtrain/__init__.py has it."""
    for node in ast.parse((ROOT / "dtrain" / "__init__.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "PACKAGES":
            return list(ast.literal_eval(node.value))
    raise LookupError("dtrain/__init__.py has no PACKAGES")


def first_sentence(package: str) -> str:
    """Return the first paragraph of a package's docstring, in one line."""
    text = ast.get_docstring(ast.parse((ROOT / "dtrain" / package / "__init__.py").read_text()))
    assert text, f"dtrain/{package} has no docstring"
    return " ".join(text.split("\n\n")[0].split())


def package_table() -> str:
    """Return the map as a table of Markdown, between its marks."""
    rows = "\n".join(f"| `{name}` | {first_sentence(name)} |" for name in packages())
    return f"{BEGIN}\n| package | what it holds |\n| --- | --- |\n{rows}\n{END}"


def main() -> None:
    text = README.read_text()
    before, _, rest = text.partition(BEGIN)
    README.write_text(before + package_table() + rest.partition(END)[2])


if __name__ == "__main__":
    main()
