"""What can be said of the comparison with FBGEMM's quantized tables without it: plants are found, our side runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.kernels import dequantize_rows, quantize_rows
from shardwise.perf.evidence.compare_quant import (
    DTYPES,
    MODEL_DTYPES,
    ROWS,
    beyond_rounding,
    compare_rows,
    lookup,
    same_bits,
)
from shardwise.perf.suite.cases.quantized import Stored
from shardwise.quant import FUSED_8BIT, fuse_rows, split_rows


def stored(spoil: float = 0.0) -> Stored:
    """int8 rows of ours on both sides, theirs with one number changed."""

    def quantize(values: Tensor) -> Tensor:
        payload, scales = quantize_rows(values, "int8", torch.float32)
        payload[0, 0] ^= int(spoil > 0)
        return fuse_rows(payload, scales, dim=values.shape[1], format="int8", layout=FUSED_8BIT)

    def dequantize(rows: Tensor) -> Tensor:
        dim = rows.shape[1] - 8
        return dequantize_rows(*split_rows(rows, dim=dim, format="int8", layout=FUSED_8BIT), dim, "int8") + spoil

    return Stored("int8, fp32 scales", "int8", FUSED_8BIT, quantize, dequantize)


@pytest.mark.parametrize("kind", [kind for kind in ROWS if kind != "an infinity"])
def test_every_kind_of_rows_is_compared(kind: str) -> None:
    comparison = compare_rows(kind, stored(), 3)
    assert comparison.rows > 0 and comparison.different == comparison.refused == 0 and comparison.apart <= 0
    assert comparison.ours == comparison.theirs


def test_plants_are_found() -> None:
    comparison = compare_rows("normal", stored(spoil=0.5), 3)
    assert comparison.different == 3 and comparison.apart > 0.1


def test_a_table_that_we_refuse_for_no_reason_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Stored, values: Tensor) -> Any:
        raise ValueError("no")

    monkeypatch.setattr(Stored, "ours", refuse)
    with pytest.raises(ValueError, match="no"):
        compare_rows("normal", stored(), 1)


def test_halves_may_be_a_last_place_apart() -> None:
    halves = torch.tensor([1.0, 100.0, -3.0], dtype=torch.bfloat16)
    for factor, beyond in ((1, False), (3, True)):
        other = (halves.view(torch.int16) + factor).view(torch.bfloat16)
        assert bool((beyond_rounding(halves, other) > 0).all()) is beyond
    assert beyond_rounding(torch.tensor([1.0]), torch.tensor([1.5])).item() == 0.5
    assert same_bits(torch.tensor([0.0, torch.nan, 1.0]), torch.tensor([-0.0, torch.nan, 2.0])).tolist() == [
        True,
        True,
        False,
    ]


@pytest.mark.parametrize("format", MODEL_DTYPES)
def test_our_side_of_the_lookups_is_what_its_rows_say(format: str) -> None:
    for mode in ("sum", "mean", "sequence"):
        case = lookup(format, mode, weighted=False, index_dtype=torch.int64)
        values = [
            dequantize_rows(*planes, dim, format) for planes, (_, dim) in zip(case.planes(), case.tables, strict=True)
        ]
        bags = case.offsets.view(-1)[:2]
        first = values[0][case.ids[bags[0] : bags[1]]]
        wanted = {"sum": first.sum(0), "mean": first.mean(0), "sequence": first}[mode]
        out = case.ours(torch.float32)
        own = out[: len(first)] if mode == "sequence" else out[0, : first.shape[1]]
        assert torch.allclose(own, wanted, atol=1e-5)
        assert [case.ours(dtype).dtype for dtype in DTYPES.values()] == list(DTYPES.values())
