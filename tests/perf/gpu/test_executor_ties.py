"""Rounding of the executor where a number lies just between two."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from shardwise.perf.gpu.rounding import to_bf16, to_tf32


@pytest.mark.parametrize(("low", "kept"), [(16, "bf16"), (13, "tf32")])
def test_ties_go_to_even_and_neighbours_of_ties_to_the_nearest(low: int, kept: str) -> None:
    """Operands at random hold no ties: rounding them away from zero passed."""
    whole = np.arange(0x3F800000, 0x3F800000 + (9 << low), 1 << low, dtype=np.uint32)
    half = np.uint32(1 << (low - 1))
    bits = np.concatenate([whole + half - np.uint32(1), whole + half, whole + half + np.uint32(1)])
    x = np.concatenate([bits, bits | np.uint32(1 << 31)]).view(np.float32)
    unit = 2.0 ** (low - 23)
    # numpy rounds to even
    expected = np.round(x.astype(np.float64) / unit) * unit
    if kept == "tf32":
        assert to_tf32(x, "rn").astype(np.float64).tolist() == expected.tolist()
    else:
        got = torch.from_numpy(to_bf16(x).astype(np.int16)).view(torch.bfloat16)
        assert got.double().tolist() == expected.tolist()
