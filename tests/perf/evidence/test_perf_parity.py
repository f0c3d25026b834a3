"""What can be said of the comparison with FBGEMM without FBGEMM: it sees a difference, and our side of it runs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from checkout import ROOT

from shardwise.perf.evidence.__main__ import mark
from shardwise.perf.evidence.parity import CASES, STEPS, Case, Trace, differences, train_shardwise, verdict

PAGE = ROOT / "docs/evidence/parity.md"


def trace(value: float, planted: float = 0.0) -> Trace:
    """Two tables of 4 weights after one step and after all; the first table's last weight is off by `planted`."""
    off = torch.tensor([0.0, 0.0, 0.0, planted])
    return {("weights", step): [torch.full((4,), value) + off, torch.ones(4)] for step in (1, STEPS)}


@pytest.mark.parametrize(
    ("value", "planted", "fp16", "outcome"),
    [
        (0.5, 0.0, False, "same bits"),
        (0.5, 5e-7, False, "within"),
        (0.5, 5e-6, False, "BEYOND: weights in step 1"),
        (0.5, 5e-5, False, f"BEYOND: weights in step 1, weights in step {STEPS}"),
        # in units of the largest value, where that is more than 1
        (100.0, 5e-5, False, "within"),
        (0.5, 5e-5, True, "within"),
        (0.5, 1.5e-3, True, "BEYOND: weights in step 1"),
        (0.5, float("nan"), False, f"BEYOND: weights in step 1, weights in step {STEPS}"),
    ],
)
def test_a_planted_difference_is_measured_and_named(value: float, planted: float, fp16: bool, outcome: str) -> None:
    difference = differences(trace(value, planted), trace(value))
    assert verdict(Case("sgd", fp16=fp16), difference) == outcome


def test_sides_that_have_other_tensors_are_not_compared() -> None:
    own, peer = trace(1.0), trace(1.0)
    peer["states", 1] = [torch.zeros(3)]
    with pytest.raises(ValueError, match="'states', 1.*sizes \\[\\], FBGEMM \\[3\\]"):
        differences(own, peer)


def test_names_of_cases_are_distinct() -> None:
    names = [case.name for case in CASES]
    assert sorted(set(names)) == sorted(names)


@pytest.mark.parametrize("case", [Case("sgd", "sum"), Case("rowwise_adagrad", "mean", weighted=True, shared=True)])
def test_our_side_gives_the_same_bits_twice_and_another_pooling_is_seen(case: Case) -> None:
    once = train_shardwise(case)
    assert verdict(case, differences(train_shardwise(case), once)) == "same bits"
    other = replace(case, pooling="mean" if case.pooling == "sum" else "sum")
    assert verdict(case, differences(train_shardwise(other), once)).startswith("BEYOND: ")


def test_the_committed_table_has_every_case_within_its_bounds() -> None:
    _, mark_text, printed = PAGE.read_text().partition(mark("parity"))
    assert mark_text
    verdicts = {line.split(" | ")[0].removeprefix("| "): line.split(" | ")[-1] for line in printed.splitlines()}
    for case in CASES:
        assert verdicts[case.name].removesuffix(" |") in ("within", "same bits"), case.name
