"""A griffe extension for the API reference: docstrings have a section `Example`, and griffe reads `Examples`."""

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"^( *)Example:$", flags=re.MULTILINE)


class ExampleSections(griffe.Extension):
    """Rename the sections, so that their code is shown as code."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rename the section in the docstring of `obj`, if it has one."""
        if obj.docstring is not None:
            obj.docstring.value = EXAMPLE.sub(r"\1Examples:", obj.docstring.value)
