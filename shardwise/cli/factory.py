"""Functions of the user's own, by MODULE:FACTORY or FILE.py:FACTORY: `--model` and `--loader` of commands."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from traceback import extract_tb
from types import ModuleType
from typing import Any

from .._names import did_you_mean


def factory_named(text: str, option: str = "--model") -> Callable[..., Any]:
    """The function that MODULE:FACTORY or FILE.py:FACTORY names, the value of `option`.

    Raises:
        ValueError: there is none; says what is missing.
    """
    module, colon, name = text.rpartition(":")
    if not colon or not module or not name:
        raise ValueError(f"{option} {text}: write MODULE:FACTORY or FILE.py:FACTORY")
    path = Path(module) if module.endswith(".py") else None
    if path is not None and not path.is_file():
        there = [file.name for file in path.parent.glob("*.py")] if path.parent.is_dir() else []
        raise ValueError(f"{option} {text}: there is no file {module}{did_you_mean(path.name, there)}")
    # as `python -m` and `python FILE.py` do
    sys.path.insert(0, "." if path is None else str(path.absolute().parent))
    try:
        imported = import_module(module) if path is None else _imported(path)
    except ModuleNotFoundError as error:
        raise ValueError(f"{option} {text}: {error}") from error
    except (Exception, SystemExit) as error:
        raise failed(text, error, option) from error
    function = getattr(imported, name, None)
    if not callable(function):
        functions = [
            attribute
            for attribute, value in vars(imported).items()
            if callable(value) and not attribute.startswith("_")
        ]
        raise ValueError(f"{option} {text}: {module} has no function {name}{did_you_mean(name, functions)}")
    return function  # type: ignore[no-any-return]


def _imported(path: Path) -> ModuleType:
    """The module that a file is, also where another one has its name."""
    spec = spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    spec.loader.exec_module(module)
    return module


def failed(text: str, error: BaseException, option: str = "--model") -> ValueError:
    """What to say of an error in the user's own code: what it is and, if the message does not say it, where."""
    frame = extract_tb(error.__traceback__)[-1]
    place = "" if isinstance(error, SyntaxError) else f" ({frame.filename}:{frame.lineno})"
    return ValueError(f"{option} {text}: {type(error).__name__}: {error}{place}")
