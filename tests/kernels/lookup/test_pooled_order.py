"""The order of addition of a pooled lookup, which its bits depend on."""

from __future__ import annotations

import pytest
import torch
from kernel_inputs import DEVICES, Case, assert_same_bits, inputs, torch_device

from shardwise.kernels import pooled_lookup


@pytest.mark.parametrize("device", DEVICES)
def test_rows_of_a_bag_are_added_one_after_another_in_the_order_of_its_ids(device: str) -> None:
    """A kernel that added four rows as two pairs passed every test: sums were compared by tolerance alone."""
    case = Case("order", tables=((50, 16), (20, 16)), features=((0, False), (1, False)), batch=6, lengths=(0, 40))
    batch = inputs(case, torch_device(device))
    expected = torch.zeros(case.batch, 32)
    for f, (table, _) in enumerate(case.features):
        rows = batch.tables()[table].cpu()
        for b, bag in enumerate(batch.bags[f]):
            for i in bag:
                expected[b, 16 * f : 16 * (f + 1)] += rows[i]
    assert_same_bits(pooled_lookup(*batch.lookup), expected)
