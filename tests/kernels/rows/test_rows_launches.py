"""Where rows lie is decided and changed on the device: its path launches a few kernels and waits for nothing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from shardwise.kernels import initial_rows, lowest, move_rows
from shardwise.kernels._op import HAS_TRITON, INTERPRETED
from shardwise.perf.counts.launches import CUDA, Counted, use_fake_cuda

pytestmark = pytest.mark.skipif(not HAS_TRITON or INTERPRETED, reason="needs triton, not its interpreter")


@pytest.fixture(autouse=True)
def _poison() -> Iterator[None]:
    """Memory is not filled: that would be more launches."""
    yield


def test_rows_move_and_victims_are_picked_without_a_wait_for_the_device() -> None:
    with use_fake_cuda(counts := Counted()):
        parts = [torch.zeros(40, 8, device=CUDA), torch.zeros(40, device=CUDA)]
        records = torch.zeros(90, 64, dtype=torch.uint8, device=CUDA)
        keys, held = torch.zeros(40, dtype=torch.int32, device=CUDA), torch.zeros(40, dtype=torch.int32, device=CUDA)
        borders, wanted = torch.tensor([0, 10, 40], device=CUDA), torch.tensor([3, 5], device=CUDA)
        seed = torch.tensor([1], device=CUDA)
        slots = torch.full((8,), -1, device=CUDA)
        given = 0, 8, "normal", 0.0, 1.0, torch.float32
        # the table of the normal distribution comes to a device once
        initial_rows(slots, seed, *given)
        for run, kernels in (
            (lambda: lowest(keys, held, borders, wanted, 8), 7),
            (lambda: move_rows(parts, records, slots, slots, slots), 1),
            (lambda: initial_rows(slots, seed, *given), 1),
        ):
            counts.clear()
            run()
            assert sum(counts.kernels.values()) == kernels
            assert not counts.syncs and not counts.copies
