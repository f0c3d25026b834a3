"""Options of a command that has to run without click, as data: a flag, and what argparse is told of it."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

Options = Mapping[str, Mapping[str, Any]]
# of a flag that is there or not
FLAG: Mapping[str, Any] = {"action": "store_true"}


def parser_of(options: Options, prog: str | None, description: str | None) -> argparse.ArgumentParser:
    """A parser of these options; the description is printed as it is."""
    parser = argparse.ArgumentParser(prog, None, description, formatter_class=argparse.RawDescriptionHelpFormatter)
    for flag, settings in options.items():
        parser.add_argument(flag, **settings)
    return parser
