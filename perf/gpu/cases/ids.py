"""Cases of what is done with ids around lookups: buckets, distinct ids, and the calibration of predictions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any

import torch

from shardwise.kernels import (
    block_bucketize,
    generic_histogram_binning_calibration_by_feature,
    histogram_binning_calibration,
    histogram_binning_calibration_by_feature,
    jagged_unique,
)
from shardwise.perf.selftest.tolerances import CALIBRATION, SAME

from .case import Case, name_of

INTEGERS = (torch.int64, torch.int32)
BUCKETS = ("jagged.bucketize.bucket_of_id", "jagged.bucketize.place_in_buckets")
UNIQUE = ("jagged.unique.unique_key", "jagged.unique.number_unique")
LENGTHS = (3, 0, 1, 7, 0, 40)


def cases() -> Iterator[Case]:
    """Every option of the division into buckets, tables that share features, and bins of each kind."""
    yield from (
        *_divisions(),
        *_distinct(),
        *_calibrations(),
    )  # fmt: skip


def _divisions() -> Iterator[Case]:
    options: dict[str, dict[str, Any]] = {
        "plain": {},
        "weighted": {"weighted": True, "bucketize_pos": True, "sequence": True},
        "half weights": {"weighted": torch.bfloat16, "sequence": True},
        "varying batches": {"batch_sizes": [2, 4], "sequence": True},
        "borders": {"borders": [[0, 1, 1, 80], [0, 5, 6, 100]], "keep_orig_idx": [True, False], "sequence": True},
        "blocks": {"total_num_blocks": [6, 3], "keep_orig_idx": True, "bucketize_pos": True},
        "raw ids": {"sizes": (4, 0), "sequence": True},
    }
    for words, chosen in options.items():
        for ids, lengths in product(INTEGERS, INTEGERS) if words in ("plain", "weighted") else ((INTEGERS[0],) * 2,):
            quick = words == "weighted" and ids == lengths == torch.int64
            yield Case(
                f"ids in buckets, {words}, {name_of(ids)} ids, {name_of(lengths)} lengths", BUCKETS,
                partial(_divide, ids, lengths, 3, **chosen), SAME, quick,
            )  # fmt: skip
    yield from (
        Case("ids in 300 buckets", BUCKETS, partial(_divide, *INTEGERS, 300, sizes=(1, 1)), SAME),
        Case("ids in one bucket", BUCKETS, partial(_divide, *INTEGERS, 1), SAME),
        Case(
            "large ids in buckets",
            BUCKETS,
            partial(_divide, torch.int64, torch.int64, 3, sizes=(2**60, 2**60), most=2**62),
            SAME,
        ),
        Case(
            "700 ids in buckets",
            BUCKETS,
            partial(_divide, *INTEGERS, 4, lengths_of=(100, 0, 30, 350, 219, 1), sequence=True),
            SAME,
        ),
    )  # fmt: skip


def _divide(
    ids_dtype: torch.dtype,
    lengths_dtype: torch.dtype,
    buckets: int,
    *,
    sizes: tuple[int, int] = (40, 30),
    most: int = 130,
    weighted: Any = None,
    borders: Sequence[Sequence[int]] | None = None,
    lengths_of: Sequence[int] = LENGTHS,
    **options: Any,
) -> Sequence[Any]:
    count, generator = sum(lengths_of), torch.Generator().manual_seed(1)
    if weighted is not None:
        options["weights"] = (torch.arange(count) / 8).to(torch.float32 if weighted is True else weighted)
    if borders is not None:
        options["block_bucketize_pos"] = [torch.tensor(border) for border in borders]
    ids = torch.randint(0, most, (count,), generator=generator).to(ids_dtype)
    parts = block_bucketize(
        torch.tensor(lengths_of, dtype=lengths_dtype), ids, torch.tensor(sizes, dtype=ids_dtype), buckets, **options
    )
    return [part for part in parts if part is not None]


def _distinct() -> Iterator[Case]:
    for ids, offsets in product(INTEGERS, INTEGERS):
        quick = ids == torch.int64 and offsets == torch.int32
        words = f"{name_of(ids)} ids, {name_of(offsets)} offsets"
        yield Case(
            f"distinct ids, {words}", UNIQUE, partial(_unique, ids, offsets, LENGTHS, [50, 60], None), SAME, quick
        )
    yield from (
        Case("distinct ids of shared tables", UNIQUE, partial(_unique, *INTEGERS, LENGTHS, [50, 60], [0, 0, 1]), SAME),
        Case(
            "distinct ids of a table of 3 G rows",
            UNIQUE,
            partial(_unique, torch.int64, torch.int64, LENGTHS, [50, 3 * 10**9], None),
            SAME,
        ),
        Case("distinct ids of 900", UNIQUE, partial(_unique, *INTEGERS, (400, 1, 99, 400), [50, 60], None), SAME),
    )  # fmt: skip


def _unique(
    ids_dtype: torch.dtype, offsets_dtype: torch.dtype, lengths: Sequence[int], sizes: list[int], tables: Any
) -> Sequence[Any]:
    ends = torch.tensor(lengths).cumsum(0)
    offsets = torch.cat([ends.new_zeros(1), ends]).to(offsets_dtype)
    ids = torch.randint(0, 50, (sum(lengths),), generator=torch.Generator().manual_seed(1)).to(ids_dtype)
    return [*jagged_unique(ids, offsets, sizes, tables)]


def _calibrations() -> Iterator[Case]:
    kinds = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
    yield from (
        Case(
            f"calibration, {form}, {name_of(kind)}", ("jagged.calibration.histogram_binning",),
            partial(_calibrate, kind, form), CALIBRATION, quick=kind == torch.float32 and form == "by feature",
        )
        for kind, form in product(kinds, ("plain", "by feature", "borders"))
    )  # fmt: skip


def _calibrate(kind: torch.dtype, form: str) -> Sequence[Any]:
    generator, bins, count = torch.Generator().manual_seed(1), 8, 300
    logit = torch.randn(count, generator=generator).to(kind)
    examples = torch.randint(0, 40, (4 * bins if form != "plain" else bins,), generator=generator).double()
    positives = (examples * torch.rand(len(examples), generator=generator, dtype=torch.float64)).floor()
    numbers: dict[str, Any] = {"positive_weight": 0.5, "bin_ctr_in_use_after": 10, "bin_ctr_weight_value": 0.75}
    if form == "plain":
        return [*histogram_binning_calibration(logit, examples, positives, **numbers)]
    lengths = torch.randint(0, 3, (count,), generator=generator)
    value = torch.randint(0, 5, (int(lengths.sum()),), generator=generator)
    if form == "by feature":
        return [
            *histogram_binning_calibration_by_feature(logit, value, lengths, 3, examples, positives, bins, **numbers)
        ]
    borders = torch.linspace(0.1, 0.9, bins - 1)
    return [
        *generic_histogram_binning_calibration_by_feature(
            logit, value, lengths, 3, examples, positives, borders, **numbers
        )
    ]
