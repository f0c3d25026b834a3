"""Cases of the suite: ops by FBGEMM's names whose arithmetic is not that of a jagged op or of a lookup.

Called as programs call them, past torch's dispatcher on our side. Rows have 128 columns; bags 0 to 6 values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from shardwise.fbgemm import OPS
from shardwise.kernels import hashes, pieces
from shardwise.kernels.jagged import requests
from shardwise.kernels.lookup import pruned
from shardwise.kernels.quantized import fp8_rows, fused_rows, small_floats
from shardwise.perf.suite.case import Call, Case, Ready, Setting
from shardwise.perf.suite.cases.jagged import moved_to
from shardwise.perf.suite.cases.lookup import CUDA, EVERY, INPUTS
from shardwise.perf.suite.libraries import fbgemm
from shardwise.perf.suite.peers import peer_calls

DIM = 128
# rows of few bits and ids of hashes, and bags; a small case, a CPU, a GPU
ROWS = {"small": 8, "cpu": 4096, "cuda": 262_144}
REQUESTS, FEATURES = 8, 26


@dataclass(frozen=True)
class Operation:
    """An op, its arguments for a number of rows, and what gives its results in plain torch.

    It `waits` for the device, or its reference `loops` over ids in Python and is no peer.
    """

    op: str
    make: Callable[[int], list[Any]]
    reference: Callable[..., Any]
    waits: bool = False
    loops: bool = False


def _random(seed: int = 1) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _floats(rows: int) -> Tensor:
    return torch.randn(rows, DIM, generator=_random())


def _lengths(bags: int) -> Tensor:
    return torch.randint(0, 7, (bags,), generator=_random(2))


def _offsets(lengths: Tensor) -> Tensor:
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0))


def _values(bags: int) -> Tensor:
    count = int(_lengths(bags).sum())
    return torch.randint(0, 2**40, (count,), generator=_random(3))


def _ads(rows: int) -> tuple[Tensor, Tensor, Tensor, int]:
    """Lengths of bags, offsets of requests, lengths by feature, and the items of all requests."""
    items = max(rows // FEATURES, REQUESTS)
    where = torch.arange(REQUESTS + 1) * items // REQUESTS
    lengths = _lengths(items * FEATURES)
    return lengths, where, requests.reorder_lengths_ref(lengths, where, FEATURES, items, items, False), items


def _ad_values(rows: int, columns: int = 0) -> list[Any]:
    lengths, where, reordered, items = _ads(rows)
    count = int(lengths.sum())
    values = torch.randn(count, columns, generator=_random(3)) if columns else torch.arange(count)
    return [_offsets(lengths), values, _offsets(reordered), where, items]


def _ad_values_ref(offsets: Tensor, values: Tensor, reordered: Tensor, where: Tensor, items: int) -> Tensor:
    return requests.reorder_values_ref(values, offsets, reordered, where, items, items, False, len(values))


def _slice_ref(values: Tensor, lengths: Tensor, start: Tensor, most: int) -> Any:
    left = (lengths - start).clamp(0, most)
    return pieces.take_pieces_ref(values, _offsets(lengths)[:-1] + start, _offsets(left)), left


def _masked_ref(values: Tensor, lengths: Tensor, mask: Tensor) -> Any:
    return values[mask], pieces.masked_counts_ref(mask, _offsets(lengths))


def _slots(rows: int) -> list[Any]:
    """Ids of which half have a slot."""
    ids = torch.randint(0, 2**40, (rows,), generator=_random(4))
    identities = torch.full((2 * rows, 1), -1, dtype=torch.int64)
    home = hashes.unsigned_remainder(hashes.murmur_hash_ref(ids), 2 * rows)
    identities[home[::2], 0] = ids[::2]
    return [ids, identities, 4, True, -1, True]


def _slots_ref(ids: Tensor, identities: Tensor, probes: int, *_: Any) -> Any:
    return pruned.identity_slots_ref(ids, identities[:, 0], None, None, probes, 0, True), None


def _remapping(rows: int) -> list[Any]:
    remapping = torch.randint(-1, rows, (2 * rows,), generator=_random(5), dtype=torch.int32)
    ids = torch.randint(0, rows, (rows,), generator=_random(6))
    return [ids, torch.tensor([0, rows // 2, rows]), remapping, torch.tensor([0, rows, 2 * rows])]


OPERATIONS: Sequence[Operation] = (
    Operation("FloatToBfloat16Quantized", lambda n: [_floats(n)], small_floats.float_to_bfloat16_ref),
    Operation("FloatToHFP8Quantized", lambda n: [_floats(n), 4, 7, 240.0], small_floats.to_float8_ref),
    Operation(
        "HFP8QuantizedToFloat", lambda n: [small_floats.to_float8_ref(_floats(n), 4, 7, 240.0), 4, 7],
        small_floats.from_float8_ref,
    ),
    Operation(
        "FloatToMSFPQuantized", lambda n: [_floats(n), 16, 5, 3, 15, 1e-4, 65504.0],
        lambda x, box, ebits, mbits, bias, least, most: small_floats.share_exponents_ref(x, box, mbits, bias, most),
    ),
    Operation(
        "FloatToFP8RowwiseQuantized", lambda n: [_floats(n), True],
        lambda x, forward: fp8_rows.to_fp8_parts_ref(x, DIM, fp8_rows.EPSILON, 0, 0, forward),
    ),
    Operation(
        "FP8RowwiseQuantizedToFloat",
        lambda n: [fp8_rows.to_fp8_parts_ref(_floats(n), DIM, fp8_rows.EPSILON, 0, 0, True), True],
        lambda rows, forward: fp8_rows.from_fp8_parts_ref(rows, None, DIM, DIM, forward, torch.float32),
    ),
    Operation(
        "FloatToFused8BitRowwiseQuantized", lambda n: [_floats(n)],
        lambda x: fused_rows.to_fused_rows_ref(x, 8, True, None),
    ),
    Operation(
        "Fused8BitRowwiseQuantizedToFloat", lambda n: [fused_rows.to_fused_rows_ref(_floats(n), 8, True, None)],
        lambda rows: fused_rows.from_fused_rows_ref(rows, 8, True, True, torch.float32),
    ),
    Operation(
        "FloatToFusedNBitRowwiseQuantizedSBHalf", lambda n: [_floats(n), 4],
        lambda x, bits: fused_rows.to_fused_rows_ref(x, bits, False, None),
    ),
    Operation(
        "reorder_batched_ad_lengths", lambda n: [*_ads(n)[:2], _ads(n)[3]],
        lambda lengths, where, items: requests.reorder_lengths_ref(
            lengths, where, len(lengths) // items, items, items, False
        ),
    ),
    Operation("reorder_batched_ad_indices", _ad_values, _ad_values_ref),
    Operation("reorder_batched_sequence_embeddings", lambda n: _ad_values(n // 4, DIM), _ad_values_ref),
    Operation(
        "jagged_slice", lambda n: [_values(n), _lengths(n), _lengths(n).clamp(max=1), 3], _slice_ref, waits=True
    ),
    Operation(
        "masked_select_jagged_1d",
        lambda n: [_values(n), _lengths(n), torch.rand(len(_values(n)), generator=_random(7)) < 0.5],
        _masked_ref, waits=True,
    ),
    Operation("zero_collision_hash", _slots, _slots_ref, loops=True),
    Operation("pruned_array_lookup", _remapping, pruned.remapped_rows_ref),
)  # fmt: skip


def _nbytes(tree: Any) -> int:
    return sum(leaf.nbytes for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor))


def _same(name: str, ours: Any, theirs: Any) -> None:
    both = (pytree.tree_leaves(ours), pytree.tree_leaves(theirs))
    for a, b in zip(*both, strict=True):
        if isinstance(b, Tensor):
            assert a.dtype == b.dtype and torch.equal(a.cpu(), b.cpu()), f"{name}: {int((a.cpu() != b.cpu()).sum())}"


def _make(setting: Setting, operation: Operation) -> Ready:
    made = operation.make(ROWS["small" if setting.small else setting.device])
    states = [moved_to(made, setting.device) for _ in range(INPUTS)]
    function = OPS[operation.op].function

    def of_fbgemm() -> Sequence[Call]:
        fbgemm()
        return [partial(getattr(torch.ops.fbgemm, operation.op), *state) for state in states]

    def of_torch() -> Sequence[Call]:
        return [partial(operation.reference, *state) for state in states]

    made_by = {"fbgemm": of_fbgemm} if operation.loops else {"fbgemm": of_fbgemm, "torch": of_torch}
    peers, trouble = peer_calls(setting, made_by)

    def check() -> None:
        small = operation.make(ROWS["small"])
        result = function(*moved_to(small, setting.device))
        _same(f"{operation.op}, the reference", result, operation.reference(*small))

    moved = _nbytes(states[0]) + _nbytes(function(*states[0]))
    return Ready(
        [partial(function, *state) for state in states], check, moved,
        "tensors: every input and every output once", peers, graph=not operation.waits,
        notes={"rows": str(ROWS["small" if setting.small else setting.device]), **trouble},
    )  # fmt: skip


# on a CPU those that programs for CPUs call
_ON_CPU = (
    "Fused8BitRowwiseQuantizedToFloat", "FloatToFused8BitRowwiseQuantized", "reorder_batched_ad_indices",
    "reorder_batched_ad_lengths", "jagged_slice", "zero_collision_hash",
)  # fmt: skip
CASES: Sequence[Case] = tuple(
    Case(
        f"fbgemm {operation.op}", "served", partial(_make, operation=operation),
        EVERY if operation.op in _ON_CPU else CUDA,
    )
    for operation in OPERATIONS
)  # fmt: skip
