"""The version of shardwise, read here by the build and by the facade, and how to install what it may need besides."""

from __future__ import annotations

import re
from pathlib import Path

__version__ = "0.1.0"


def root_of_sources() -> Path | None:
    """The folder of the checkout or unpacked source archive that this runs from; None where a wheel is installed."""
    root = Path(__file__).resolve().parents[1]
    return root if (root / "kernels" / "_op.py").is_file() else None


def how_to_install(extra: str) -> str:
    """The command that installs what an extra stands for, as errors say it, for every shell.

    Among its sources shardwise is installed again with the extra. Elsewhere the packages are named as the installed
    metadata has them: that needs neither the sources nor a release of shardwise on the index.
    """
    if root_of_sources():
        return f'pip install ".[{extra}]" in a checkout of shardwise'
    from importlib.metadata import PackageNotFoundError, requires

    try:
        packages = _packages(requires("shardwise") or [], extra)
    except PackageNotFoundError:
        packages = []
    if not packages:
        return f"install what the extra {extra!r} of shardwise names"
    return " ".join(["pip install", *(f'"{package}"' for package in packages)])


def _packages(requirements: list[str], extra: str) -> list[str]:
    """Those of an extra, out of lines like `numba>=0.60; extra == "cpu"`, without its condition."""
    named = []
    for requirement in requirements:
        package, _, marker = requirement.partition(";")
        conditions = [part.strip().replace('"', "'") for part in re.split(r"\band\b", marker)]
        if f"extra == '{extra}'" in conditions:
            conditions.remove(f"extra == '{extra}'")
            named.append("; ".join(filter(None, [package.strip(), " and ".join(conditions)])))
    return named


def in_checkout() -> bool:
    """Whether this is a checkout or an unpacked source archive, which hold the rooms that wheels leave out."""
    from importlib.util import find_spec

    return find_spec("shardwise.perf.compile") is not None
