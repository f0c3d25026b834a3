"""The version of shardwise, read here by the build and by the facade, and how to install what it may need besides."""

from __future__ import annotations

__version__ = "0.1.0"


def how_to_install(extra: str) -> str:
    """The command that installs an extra, as errors say it.

    It names no package of the index: there is none until the first release, and it would be this sentence that changes.
    """
    return f"pip install '.[{extra}]' in a checkout of shardwise"


def in_checkout() -> bool:
    """Whether this is a checkout, which holds the rooms that wheels and source archives leave out."""
    from importlib.util import find_spec

    return find_spec("shardwise.perf.compile") is not None
