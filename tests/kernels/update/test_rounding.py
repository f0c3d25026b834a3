"""Stochastic rounding: which elements are rounded by numbers of their own."""

from __future__ import annotations

import pytest
import torch

from shardwise.kernels.update.rounding import round_stochastically, salt_of


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rows_columns_and_steps_are_rounded_apart(dtype: torch.dtype) -> None:
    """Rows that were all rounded alike passed: the mean over many columns was right, and so was each neighbour."""
    # halfway between two values of either dtype
    w = torch.full((64, 64), 1.0 + 2.0**-8 + (2.0**-11 - 2.0**-8) * (dtype == torch.float16))
    place = torch.arange(64)
    seed = torch.tensor([5])

    def ups(step: int) -> torch.Tensor:
        return round_stochastically(w, dtype, place, salt_of(seed, torch.tensor([step]))) > w

    once = ups(1)
    # of 64 fair coins between 13 and 51 fall alike, but for one time in a million
    for alike in ((once[:-1] == once[1:]).sum(1), (once[:, :-1] == once[:, 1:]).sum(0), (once == ups(2)).sum(1)):
        assert int(alike.min()) >= 13 and int(alike.max()) <= 51
