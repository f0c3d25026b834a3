"""Cases of the suite: each operation of the jagged types and each jagged op by itself, beside TorchRec's and FBGEMM's.

Every call has a state of its own, made outside of its time, because both libraries keep what they have computed. Sizes
are keys x bags of each; docs/evidence/beside_torchrec.md shows them all.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial

import torch

from shardwise.perf.suite.case import (
    Call,
    Case,
    Fresh,
    Ready,
    Setting,
)
from shardwise.perf.suite.libraries import Library, ours, torchrec
from shardwise.perf.suite.operations import jagged_ops, jagged_types
from shardwise.perf.suite.operations.operation import (
    Operation,
    Raised,
    Size,
    difference,
)

SIZES = tuple(Size(keys, batch) for keys in (1, 26, 856) for batch in (64, 8192))
SMALL = Size(3, 8)
# operation (a regular expression for its whole name) -> why ours differs, as docs/reference/differences.md says
DIFFERENT: dict[str, str] = {
    "KJT empty": "values are int64, not float32: ids are integers",
    "KJT empty_like, variable": "the batch size is kept where batch sizes vary too",
    "KJT split with zeros.*": "lengths of a piece without keys keep their dtype",
    "KJT permute.*inverse indices": "TorchRec's permute drops inverse indices, ours keeps them",
    "KJT pytree flatten.*|flatten_kjt_list": "batch sizes per key are known on the host: context, not a leaf",
    "JT empty": "offsets are [0], one more than bags, as everywhere",
}


def name_of(operation: Operation, size: Size) -> str:
    """The name of a case."""
    # pytest puts names into brackets
    return f"fresh {operation.name.replace('[', 'by ').replace(']', '')}, {size}"


def reason(operation: str) -> str:
    """Why this operation may differ; "" if it may not."""
    return next((why for pattern, why in DIFFERENT.items() if re.fullmatch(pattern, operation)), "")


def unlike(operation: Operation, size: Size, own: Library, peer: Library | None) -> str:
    """The fault of our result, beside another's if there is one; "" if there is none."""
    got = operation.result(own, size)
    if isinstance(got, Raised) and got.missing:
        return f"missing: {got}"
    want = got if peer is None else operation.result(peer, size)
    if isinstance(got, Raised) != isinstance(want, Raised):
        who, raised = (own, got) if isinstance(got, Raised) else (peer, want)
        return f"only {who.label if who else ''} raises {raised}"
    return f"raises {got}" if isinstance(got, Raised) else difference(got, want, operation.tolerance)


def make(setting: Setting, *, operation: Operation, size: Size) -> Ready:
    """One operation at one size."""
    size = SMALL if setting.small else size
    own, peer = ours(), torchrec() if "torchrec" in setting.peers else None
    fault = unlike(operation, size, own, peer)
    why = reason(operation.name) if fault and not fault.startswith("missing") else ""

    def check() -> None:
        assert not fault or why, fault

    def calls(lib: Library) -> Sequence[Call]:
        return [Fresh(lambda: partial(operation.call, lib, operation.make(lib, size)))]

    peers = {} if peer is None else {"torchrec": calls(peer)}
    return Ready(calls(own), check, peers=peers, graph=False, notes={"different": why} if why else {})


OPERATIONS: dict[str, Sequence[Operation]] = {"types": jagged_types.OPERATIONS, "ops": jagged_ops.OPERATIONS}

CASES: Sequence[Case] = tuple(
    Case(
        name_of(operation, size), "operations", partial(make, operation=operation, size=size),
        frozenset({"operations"}), devices=frozenset({"cpu"}),
    )
    # size by size, because the operations at a size share their inputs
    for size in SIZES
    for listed in OPERATIONS.values()
    for operation in listed
    if operation.fits(size) and (not operation.needs_cuda or torch.cuda.is_available())
)  # fmt: skip
