"""What the launches of the jagged ops ask of the compiler; launched.py reads `MODULES` and `launches`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from types import ModuleType
from typing import Any

import torch

from . import bucketize, calibration, unique

# kernel files whose launches are noted
MODULES: tuple[ModuleType, ...] = (bucketize, calibration, unique)

# a run, its label, and what rows it reads where the order of a sum over a row is promised ("" where it is not)
Launch = tuple[Callable[[], Any], str, str]


def launches() -> Iterator[Launch]:
    """Runs of every jagged op."""
    yield from _segments()
    yield from _buckets()
    yield from _dense()
    yield from _select()


def _segments() -> Iterator[Launch]:
    yield from ()


def _buckets() -> Iterator[Launch]:
    integers = {"i32": torch.int32, "i64": torch.int64}
    for ids, lengths in product(integers, integers):
        for words, options in _DIVISIONS.items():
            yield partial(_bucketize, integers[ids], integers[lengths], options), f"{ids} {lengths}{words}", ""
        yield partial(_bucketize, integers[ids], integers[lengths], {}, 300), f"{ids} {lengths} 300 buckets", ""
        for rows in (16, 2**31):
            offsets = torch.arange(17, dtype=integers[lengths])
            call = partial(unique.jagged_unique, torch.zeros(16, dtype=integers[ids]), offsets, [rows, rows])
            yield call, f"{ids} {lengths} {rows} rows", ""
    logits = {"fp32": torch.float32, "fp64": torch.float64, "fp16": torch.float16, "bf16": torch.bfloat16}
    for kind, segments, borders in product(logits, (False, True), (False, True)):
        words = " segments" * segments + " borders" * borders
        yield partial(_calibrate, logits[kind], segments, borders), f"{kind}{words}", ""


_DIVISIONS: dict[str, dict[str, Any]] = {
    "": {},
    " weighted": {"weights": torch.zeros(16), "bucketize_pos": True, "sequence": True},
    " half weights": {"weights": torch.zeros(16, dtype=torch.bfloat16), "sequence": True},
    " batches": {"batch_sizes": [4, 12]},
    " borders": {"block_bucketize_pos": [torch.arange(9), torch.arange(9)], "keep_orig_idx": [True, False]},
    " blocks": {"total_num_blocks": [16, 32], "keep_orig_idx": True},
}


def _bucketize(ids: torch.dtype, lengths: torch.dtype, options: dict[str, Any], buckets: int = 8) -> None:
    bags = torch.ones(16, dtype=lengths)
    bucketize.block_bucketize(
        bags, torch.zeros(16, dtype=ids), torch.full((2,), 16, dtype=torch.int64), buckets, **options
    )


def _calibrate(kind: torch.dtype, segments: bool, borders: bool) -> None:
    logit, bins = torch.zeros(16, dtype=kind), torch.zeros(48, dtype=torch.float64)
    value, lengths = torch.zeros(16, dtype=torch.int64), torch.ones(16, dtype=torch.int64)
    calibration._histogram_binning(
        logit, value if segments else None, lengths if segments else None, 2, bins, bins,
        bins[:15] if borders else None, 16, 0.5, 0.0, 0.0625, 10, 0.5,
    )  # fmt: skip


def _dense() -> Iterator[Launch]:
    yield from ()


def _select() -> Iterator[Launch]:
    yield from ()
