"""How the site reads docstrings: an `Example:` is code that runs, as griffe has it of `Examples:`."""

from __future__ import annotations

from typing import Any

import griffe


class RunningExamples(griffe.Extension):
    """Renames the section before it is parsed; else it would be a note, and `>>>` quotes."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = obj.docstring.value.replace("Example:\n", "Examples:\n")
