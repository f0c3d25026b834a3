"""Findings on names of TorchRec: where ours is, how it differs, or the nearest thing. For `shardwise migrate`.

A *name* is a module of TorchRec and what is taken from it, as `torchrec.distributed.types.ShardingType`. A program that
was rewritten has the same names below `shardwise.torchrec`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal, TypeAlias

import shardwise

from .differences import Difference, Word, differences_of
from .fbgemm_names import FBGEMM, FBGEMM_OPS
from .hints import advice
from .mirror import MODULES, OWN_NAMES
from .torchrec_names import TABLE

__all__ = [
    "OPS_ROOT",
    "Finding",
    "Status",
    "finding",
    "home_of",
    "is_module",
    "mirrored",
    "name_at",
]

# ours is there and behaves the same, behaves otherwise, or is not there
Status: TypeAlias = Literal["works", "differs", "missing"]
# where TorchRec's names and FBGEMM's begin
_ROOTS = ("torchrec", "fbgemm_gpu", "torch.ops.fbgemm")
# where the names of its ops begin
OPS_ROOT = "torch.ops.fbgemm."
_NAMES = {**TABLE, **FBGEMM}


@dataclass(frozen=True)
class Finding:
    """What became of a name: `ours` is where it is; `hint` says why it is missing and what is near, if we know."""

    name: str
    status: Status
    ours: str = ""
    hint: str = ""
    differences: Sequence[Difference] = ()

    @property
    def word(self) -> Word | None:
        """The gravest of its differences."""
        return self.differences[0].word if self.differences else None


@cache
def finding(name: str) -> Finding:
    """What we have of TorchRec's `name`."""
    module, _, last = name.rpartition(".")
    if name.startswith(OPS_ROOT) and (op := name.split(".")[3]) in FBGEMM_OPS:
        rows = differences_of(op)
        return Finding(name, "differs" if rows else "works", ours=f"{OPS_ROOT}{op}", differences=rows)
    if last not in _NAMES.get(module, {}):
        if not is_module(name):
            return Finding(name, "missing", hint=advice(name).partition("; ")[2])
        if mirrored(name) == name:
            return Finding(name, "missing", hint="import what is used of it by name")
        return Finding(name, "works", ours=mirrored(name))
    shardwise_name = _NAMES[module][last].replace(":", ".")
    if home_of(module, last) == module:
        return Finding(name, "missing", hint=f"ours is {shardwise_name}")
    if _in_facade(module, last):
        shardwise_name = f"shardwise.{last}"
    called = f"quant.{last}" if name.startswith("torchrec.quant.") else last
    rows = differences_of(called)
    return Finding(name, "differs" if rows else "works", ours=shardwise_name, differences=rows)


def is_module(name: str) -> bool:
    """Whether `name` is a module of TorchRec of which we have something."""
    return name in MODULES


def name_at(module: str, rest: Sequence[str]) -> str | None:
    """The name that begins what a program finds at the attributes `rest` of `module`; None if it is not TorchRec's.

    `ShardingType.ROW_WISE.value` of `torchrec.distributed.types` is `torchrec.distributed.types.ShardingType`.
    """
    parts = [*module.split("."), *rest]
    end = module.count(".") + 1
    if parts[0] == "shardwise" and parts[1:2] in (["torchrec"], ["fbgemm_gpu"]):
        parts, end = parts[1:], max(end - 1, 1)
        if parts[0] == "torchrec" and parts[1:] and parts[1] in OWN_NAMES:
            return None
    if not any(f"{'.'.join(parts)}.".startswith(f"{root}.") for root in _ROOTS):
        return None
    while end < len(parts):
        module, name = ".".join(parts[:end]), parts[end]
        if name in _NAMES.get(module, {}):
            return f"{module}.{name}"
        if name.startswith("__"):
            # every module has those
            return module
        if not is_module(f"{module}.{name}"):
            # of what we lack we do not know where modules end: at the first capital
            ends = (at for at in range(end, len(parts)) if parts[at][0].isupper())
            return ".".join(parts[: next(ends, len(parts)) + 1])
        end += 1
    return ".".join(parts)


def home_of(module: str, name: str) -> str:
    """The module of ours to import `name` of TorchRec's `module` from."""
    if name not in _NAMES.get(module, {}):
        return mirrored(module)
    if _in_facade(module, name):
        return "shardwise"
    home, _, attribute = _NAMES[module][name].partition(":")
    return home if module in FBGEMM and attribute == name else mirrored(module)


def mirrored(module: str) -> str:
    """Where a module is served with every name that we have of it; other libraries' modules stay where they are."""
    root = module.split(".")[0]
    return f"shardwise.{module}" if root == "torchrec" or (root == "fbgemm_gpu" and is_module(module)) else module


def _in_facade(module: str, name: str) -> bool:
    """Whether `shardwise` has that very object: `torchrec.quant` has other classes by the same names."""
    home = _NAMES[module][name].partition(":")[0]
    # by its place and not by the object, which would load torch; a test compares the objects
    return name in shardwise.__all__ and home != "shardwise.quant"
