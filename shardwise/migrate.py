"""What we have of each name of TorchRec: where ours is, how it differs, or the nearest thing. For `shardwise migrate`.

A *name* is a module of TorchRec and what is taken from it, as `torchrec.distributed.types.ShardingType`. A program that
was rewritten has the same names below `shardwise.torchrec`.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Literal

import shardwise

from .migrate_differences import DIFFERENCES
from .torchrec import TABLE

__all__ = ["MIRROR", "Finding", "Row", "finding", "home_of", "is_module", "mirrored", "name_at"]

MIRROR = "shardwise.torchrec"
# where TorchRec's names and FBGEMM's begin
_ROOTS = ("torchrec", "fbgemm_gpu", "torch.ops.fbgemm")
_MODULES = {".".join(path.split(".")[:end]) for path in TABLE for end in range(1, path.count(".") + 2)}


@dataclass(frozen=True)
class Row:
    """A row of docs/differences.md, by the words that it begins with."""

    section: str
    begins: str

    @property
    def link(self) -> str:
        return f"docs/differences.md#{self.section.lower().replace(' ', '-')}"


@dataclass(frozen=True)
class Finding:
    """What became of a name: `ours` is where it is, `nearest` something like it where there is none."""

    name: str
    status: Literal["mapped", "differs", "missing"]
    ours: str = ""
    nearest: str = ""
    differences: Sequence[Row] = ()


@cache
def finding(name: str) -> Finding:
    """What we have of TorchRec's `name`."""
    module, _, last = name.rpartition(".")
    if last not in TABLE.get(module, {}):
        if is_module(name):
            return Finding(name, "mapped", ours=f"shardwise.{name}")
        return Finding(name, "missing", nearest=_nearest(last))
    ours = f"shardwise.{last}" if _in_facade(module, last) else TABLE[module][last].replace(":", ".")
    called = f"quant.{last}" if name.startswith("torchrec.quant.") else last
    rows = tuple(
        Row(section, begins)
        for section, table in DIFFERENCES.items()
        for begins, names in table.items()
        if called in names.split()
    )
    return Finding(name, "differs" if rows else "mapped", ours=ours, differences=rows)


def is_module(name: str) -> bool:
    """Whether `name` is a module of TorchRec of which we have something."""
    return name in _MODULES


def name_at(module: str, rest: Sequence[str]) -> str | None:
    """The name that begins what a program finds at the attributes `rest` of `module`; None if it is not TorchRec's.

    `ShardingType.ROW_WISE.value` of `torchrec.distributed.types` is `torchrec.distributed.types.ShardingType`.
    """
    parts = [*module.split("."), *rest]
    end = module.count(".") + 1
    if parts[:2] == MIRROR.split("."):
        parts, end = parts[1:], max(end - 1, 1)
        if parts[1:2] in (["TABLE"], ["install"]):
            return None
    if not any(f"{'.'.join(parts)}.".startswith(f"{root}.") for root in _ROOTS):
        return None
    while end < len(parts):
        module, name = ".".join(parts[:end]), parts[end]
        if name in TABLE.get(module, {}):
            return f"{module}.{name}"
        if not is_module(f"{module}.{name}"):
            # of what we lack we do not know where modules end: at the first capital
            ends = (at for at in range(end, len(parts)) if parts[at][0].isupper())
            return ".".join(parts[: next(ends, len(parts)) + 1])
        end += 1
    return ".".join(parts)


def home_of(module: str, name: str) -> str:
    """The module of ours to import `name` of TorchRec's `module` from."""
    return "shardwise" if name in TABLE.get(module, {}) and _in_facade(module, name) else mirrored(module)


def mirrored(module: str) -> str:
    """Where a module is served with every name that we have of it; other libraries' modules stay where they are."""
    return f"shardwise.{module}" if module.split(".")[0] == "torchrec" else module


def _in_facade(module: str, name: str) -> bool:
    """Whether `shardwise` has that very object: `torchrec.quant` has other classes by the same names."""
    if name not in shardwise.__all__:
        return False
    home, _, ours = TABLE[module][name].partition(":")
    return getattr(shardwise, name) is getattr(import_module(home), ours)


def _nearest(last: str) -> str:
    """Of all that we have, what is called most like `last`; empty if nothing is."""
    places = {name: f"shardwise.{name}" for name in shardwise.__all__}
    # the first module that has a name is the shortest way to it
    places |= {name: f"{module}.{name}" for module in reversed([*TABLE]) for name in TABLE[module]}
    close = difflib.get_close_matches(last, sorted(places), n=1, cutoff=0.7)
    return places[close[0]] if close else ""
