"""What the record of the interpreter shows of bucketing, deduplication and calibration: no races, no order of programs,
no more bytes than declared.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from bucket_inputs import CASES, Bags, running_on
from recorded_calls import Call as Recorded, assert_sound, by_kind
from torch import Tensor

from shardwise.kernels import block_bucketize, histogram_binning_calibration_by_feature, jagged_unique
from shardwise.perf.compile.recorded import (
    SECTOR,
    recorded,
    sectors,
)
from shardwise.perf.suite.declared import Traffic
from shardwise.perf.suite.declared_jagged import block_bucketize_bytes, histogram_binning_bytes, jagged_unique_bytes

pytestmark = pytest.mark.interpreted


class Call(NamedTuple):
    """What an op returned, the bytes it declares, and by launch argument those that are read at random or searched."""

    results: list[Tensor | None]
    traffic: Traffic
    scattered: tuple[str, ...]


SPREAD = Bags([[[(7 * i + j) % 60 for j in range(i % 5)] for i in range(60)] for _ in range(3)], [20, 15, 8], 4)


def bucketize_call(batch: Bags, weighted: bool) -> Call:
    device = torch.device("cpu")
    lengths, ids, sizes, buckets = batch.tensors(device)
    weights = torch.arange(float(len(ids))) if weighted else None
    result = block_bucketize(
        lengths, ids, sizes, buckets, weights=weights, bucketize_pos=weighted, sequence=weighted
    )  # fmt: skip
    traffic = block_bucketize_bytes(lengths, ids, buckets, weights, weighted, weighted)
    searched = ("ends_of_bags", "S", "ends", "begins", "totals", "borders", "keep")
    return Call(list(result), traffic, (*searched, "bag", "local", "P", "permute", "source", "bucket"))


def unique_call() -> Call:
    lengths, ids, _, _ = SPREAD.tensors(torch.device("cpu"))
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    result = jagged_unique(ids, offsets, [60] * 3)
    traffic = jagged_unique_bytes(ids, 180, len(result.ids))
    return Call(list(result), traffic, ("O", "first_rows", "hash_sizes", "inverse", "unique", "I"))


def calibration_call() -> Call:
    logit, lengths = torch.linspace(-3, 3, 200), torch.arange(200) % 3
    value, bins = torch.arange(int(lengths.sum())) % 5, torch.arange(64, dtype=torch.float64)
    result = histogram_binning_calibration_by_feature(logit, value, lengths, 3, bins, bins, 16, positive_weight=0.5)
    return Call(list(result), histogram_binning_bytes(logit, value, lengths), ("V", "E", "H"))


CALLS: dict[str, Callable[[], Call]] = {
    "bucketize": lambda: bucketize_call(SPREAD, False),
    "bucketize with all": lambda: bucketize_call(SPREAD, True),
    "bucketize a long bag": lambda: bucketize_call(CASES["long bag"], True),
    "unique": unique_call,
    "calibration": calibration_call,
}


@pytest.mark.parametrize("name", CALLS)
def test_programs_do_not_race_in_any_order(name: str) -> None:
    def call() -> Recorded:
        with running_on("interpreted"):
            return Recorded([result for result in CALLS[name]().results if result is not None])

    assert_sound(call, orders=(1, 2))


@pytest.mark.parametrize("name", CALLS)
def test_no_sector_moves_beyond_the_declared_bytes(name: str) -> None:
    """Arrays that are gone through in order; of the others a program fetches as many elements as are declared."""
    with running_on("interpreted"), recorded() as launches:
        call = CALLS[name]()
    seen = set()
    for kind, declared in by_kind(call.traffic):
        for letter, nbytes in declared.items():
            for launch in launches:
                tensor = launch.tensors.get(letter)
                if tensor is None or letter in call.scattered:
                    continue
                count = sectors(launch, kind, tensor)
                seen.add(letter)
                assert SECTOR * count.fetched <= nbytes + 2 * SECTOR * len(launch.programs), f"{kind} {letter}"
    assert len(seen) >= 3


def test_the_sort_of_buckets_is_over_one_byte_an_id() -> None:
    for buckets, itemsize in ((255, 1), (256, 2)):
        with running_on("interpreted"), recorded() as launches:
            bucketize_call(Bags([[[1, 2, 3]]], [1], buckets), False)
        assert [launch.tensors["bucket"].itemsize for launch in launches] == [itemsize] * 2
