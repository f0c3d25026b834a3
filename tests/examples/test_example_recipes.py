"""Recipes of examples/recipes print what their pages say, on one rank and on two."""

from __future__ import annotations

import pytest
from forked import run_script

ranks_of_pairs = pytest.mark.parametrize("ranks", [1, 2])


@pytest.mark.ranks
@ranks_of_pairs
def test_metrics_of_all_ranks_have_the_digits_of_one(ranks: int) -> None:
    assert run_script("examples/recipes/metrics.py", ranks=ranks).splitlines() == [
        "samples: 40000, bytes of states: 2231504",
        "AUC 0.8212, off by at most 5e-05",
        "NE 0.8058, calibration 1.0721",
        "AUC of the last 8000: 0.7661",
        "of all samples at once: AUC 0.8212, NE 0.8058",
    ]
