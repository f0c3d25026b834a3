"""Every op that is served by FBGEMM's name: registered as it should be, with what FBGEMM gave for recorded calls."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from checkout import ROOT
from safetensors.torch import load_file
from torch import Tensor

from shardwise.fbgemm import OPS, register_ops
from shardwise.migration.differences import differences_of
from shardwise.perf.evidence.fbgemm.calls import CALLS, draw_call
from shardwise.perf.evidence.fbgemm.ops import RECORDED, RECORDS, family, recorded
from shardwise.perf.evidence.fbgemm.outcome import Outcome, differences, outcome

SCHEMAS = {
    line.partition("(")[0]: line
    for line in (ROOT / "tests" / "fbgemm" / "schemas.txt").read_text(encoding="utf-8").splitlines()
}


@pytest.fixture(scope="module", autouse=True)
def _registered() -> None:
    register_ops()


def served(name: str) -> Any:
    return getattr(torch.ops.fbgemm, name)


@cache
def records(of: str) -> dict[str, Tensor]:
    return load_file(RECORDED / f"{of}.safetensors")


def recorded_outcome(name: str, seed: int) -> Outcome | None:
    """What FBGEMM gave for this call; None where nothing is recorded of it."""
    tensors = {key: value for key, value in records(family(name)).items() if key.startswith(f"{name} {seed} ")}
    if not tensors:
        return None
    by_kind: dict[str, dict[int, Tensor]] = {"output": {}, "argument": {}, "gradient": {}}
    for key, value in tensors.items():
        _, _, kind, place = key.split(" ")
        by_kind[kind][int(place)] = value
    outputs, written, grads = ([each[place] for place in sorted(each)] for each in by_kind.values())
    return Outcome(outputs=outputs, written=written, grads=grads or None)


def test_names_and_schemas_are_upstreams() -> None:
    """schemas.txt is what FBGEMM 1.8.0 has registered; the table of ops says the same, character for character."""
    assert {name: each.schema for name, each in OPS.items()} == {name: SCHEMAS[name] for name in OPS}
    assert {
        name for name, each in OPS.items() if str(served(name).default._schema) != f"fbgemm::{each.schema}"
    } == set()


def test_calls_are_drawn_for_every_op() -> None:
    assert set(CALLS) == set(OPS)


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param("interpreted", marks=pytest.mark.interpreted),
        pytest.param("cuda", marks=pytest.mark.gpu),
    ],
)
def test_recorded_results_of_fbgemm(name: str, device: str) -> None:
    """Values, dtypes, shapes, written arguments and gradients of the first calls."""
    compared, device = 0, device.replace("interpreted", "cpu")
    for seed in range(RECORDS):
        call = draw_call(name, seed)
        ours = outcome(served(name), call, device=device)
        assert not ours.error or not (call.expected or call.difference), ours.error
        if call.expected:
            theirs: Outcome | None = Outcome(outputs=[value for value in call.expected() if value is not None])
            ours.written = []
        else:
            theirs = recorded_outcome(name, seed)
        if theirs is None:
            continue
        compared += 1
        named = recorded(name, seed, ours)
        if theirs.grads is not None:
            # an argument without a part in the outputs has no gradient, or zeros
            theirs.grads = [each for each in theirs.grads if each.count_nonzero()]
            ours.grads = [each for each in ours.grads or [] if each is not None and each.count_nonzero()]
        ours.outputs = [named[key] for key in named if " output " in key]
        faults, _ = differences(ours, theirs)
        assert not faults, f"call {seed} of {name}: {faults}"
    assert compared, f"nothing was compared of {name}"


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", OPS)
def test_opcheck(name: str) -> None:
    """Schema, shapes without values, gradients and dynamic shapes under compilers, on the first call of each."""
    call = next(call for seed in range(RECORDS) if not (call := draw_call(name, seed)).difference)
    checks = ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    if "!" in OPS[name].schema.partition("->")[2]:
        # torch compiles no op of anybody's that returns an argument
        checks.pop()
    torch.library.opcheck(served(name).default, tuple(call.args), test_utils=checks)


def test_a_call_that_is_not_compared_has_a_row_in_the_differences() -> None:
    """Of its op; the report of `evidence fbgemm_ops` leads there."""
    without = {
        name for name in OPS for seed in range(40) if draw_call(name, seed).difference and not differences_of(name)
    }
    assert without == set()
