"""Count what a piece of code would launch on a GPU, without one: Triton kernels, torch's kernels, copies, host syncs.

    with pretended(found := Counted()):
        model = EmbeddingBagCollection(tables=tables, device=CUDA)
        found.clear()
        model(batch)
    print(found.kernels)

What launches is exact: every operation is seen where torch would choose its kernel for CUDA. How many kernels one of
torch's operations launches is exact for most (one) and read in torch's sources for a few (cuda_kernels.py).
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardwise.perf.counts.cuda_kernels import kernels_of, waits
from shardwise.perf.counts.fake_cuda import CUDA, Op, pretended

__all__ = ["CUDA", "Counted", "launches", "pretended"]

_ROOT = Path(os.path.realpath(__file__)).parents[2]
_FOLDERS = ("kernels", "jagged", "embeddings", "sharding", "models", "inference", "shardwise")


@dataclass
class Counted:
    """What happened on the device that is not there, by name.

    Attributes:
        kernels: launches; "torch sort" are those of torch's operation, others are Triton kernels.
        copies: between host and device, "to host" and "to device".
        syncs: the host waits for the device; named by the function of shardwise that does.
    """

    kernels: Counter[str] = field(default_factory=Counter)
    copies: Counter[str] = field(default_factory=Counter)
    syncs: Counter[str] = field(default_factory=Counter)

    def clear(self) -> None:
        """Forget what was counted."""
        for counts in (self.kernels, self.copies, self.syncs):
            counts.clear()

    def operation(self, op: Op, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> None:
        if op.namespace == "c10d":
            # a collective
            return
        name = str(op._schema.name).removeprefix("aten::")
        count = kernels_of(op, args, kwargs, result)
        if count:
            self.kernels[f"torch {name}"] += count
        if waits(op, args, kwargs):
            self.syncs[f"{name} in {_caller()}"] += 1

    def kernel(self, name: str) -> None:
        self.kernels[name.removeprefix("_").removesuffix("_kernel")] += 1

    def copy(self, where: str, waits: bool) -> None:
        self.copies[where] += 1
        if waits:
            self.syncs[f"copy {where} in {_caller()}"] += 1


def _caller() -> str:
    """The innermost function of shardwise that is on the stack, perf's own left out."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        path = Path(os.path.realpath(frame.f_code.co_filename))
        if path.is_relative_to(_ROOT) and path.relative_to(_ROOT).parts[0] in _FOLDERS:
            return f"{path.parent.name}/{path.name} {frame.f_code.co_name}"
        frame = frame.f_back
    return "the caller"


def launches(run: Callable[[], Any]) -> Counter[str]:
    """Kernels that `run` launches by name; it is called within `pretended` and makes its tensors on `CUDA`."""
    with pretended(found := Counted()):
        run()
    return found.kernels
