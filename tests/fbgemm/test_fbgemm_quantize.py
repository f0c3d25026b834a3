"""Quantizing by FBGEMM's names where it has nothing to compare with: errors, NaN, rows of one row or no column."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from shardwise.fbgemm import OPS

ROWS = torch.linspace(-1, 2, 32).view(2, 16)
BYTES = torch.zeros(2, 16, dtype=torch.uint8)


def call(name: str, *args: Any) -> Any:
    return OPS[name].function(*args)


@pytest.mark.parametrize(
    ("name", "args", "error", "words"),
    [
        ("FloatToFused8BitRowwiseQuantized", (ROWS[0],), ValueError, "t must have at least 2 dimensions"),
        ("FloatToFused8BitRowwiseQuantized", (ROWS.double(),), TypeError, "t must be float32.*float64"),
        ("Fused8BitRowwiseQuantizedToFloat", (BYTES[:, :7],), ValueError, "at least 8 bytes"),
        ("Fused8BitRowwiseQuantizedToFloat", (BYTES.float(),), TypeError, "input must be uint8"),
        ("Fused8BitRowwiseQuantizedToFloatOrHalf", (BYTES, 2), ValueError, "output_dtype .* got 2"),
        ("Fused8BitRowwiseQuantizedToFloatOrHalf", (BYTES, 0, True, False), ValueError, "scale_bias_last=False"),
        ("Fused8BitRowwiseQuantizedToFloatMixedDim", (BYTES, torch.tensor([0, 4, 16]), 0), ValueError, r"\[0, 4, 16\]"),
        ("Fused8BitRowwiseQuantizedToFloatMixedDim", (BYTES, torch.tensor([0, 8, 24]), 0), ValueError, "0 to 16"),
        ("FloatToFusedNBitRowwiseQuantizedSBHalf", (ROWS, 0), ValueError, "bit_rate must be 1 to 8, got 0"),
        ("FloatToFusedNBitRowwiseQuantizedSBHalf", (ROWS, 9), ValueError, "got 9"),
        ("FloatToFusedNBitRowwiseQuantizedSBHalf", (ROWS[:, :6], 4), ValueError, "a multiple of 4 columns"),
        ("FusedNBitRowwiseQuantizedSBHalfToFloat", (BYTES[:, :3], 4), ValueError, "at least 4 bytes"),
        ("FloatToBfloat16Quantized", (ROWS.half(),), TypeError, "float32, got torch.float16"),
        ("Bfloat16QuantizedToFloat", (ROWS,), TypeError, "bfloat16, got torch.float32"),
        ("FP8RowwiseQuantizedToFloat", (BYTES[:, :10], True), ValueError, "multiple of 4"),
        ("FloatToPaddedFP8RowwiseQuantized", (ROWS, True, 6), ValueError, "row_dim .* got 6"),
        ("PaddedFP8RowwiseQuantizedToFloat", (BYTES, True, 4), ValueError, r"row_dim \+ 8 = 12"),
        ("FloatToHFP8Quantized", (ROWS, 8, 15, 1.0), ValueError, "ebits must be 1 to 7, got 8"),
        ("FloatToHFP8Quantized", (ROWS, 4, 15, 4.0), ValueError, "at most 1.875"),
        ("HFP8QuantizedToFloat", (BYTES, 4, 200), ValueError, "exponent_bias must be 0 to 127"),
        ("FloatToMSFPQuantized", (ROWS, 0, 8, 3, 127, 0.1, 1.0), ValueError, "bounding_box_size"),
        ("FloatToMSFPQuantized", (ROWS, 4, 8, 3, 127, 1.0, 0.1), ValueError, "min_pos and max_pos"),
    ],
)
def test_bad_arguments_are_named(name: str, args: Sequence[Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        call(name, *args)


def test_rows_with_a_nan_are_seen_to_have_one() -> None:
    """FBGEMM leaves a NaN out of a row's minimum and maximum, and gives the minimum in its place."""
    rows = ROWS.clone()
    rows[0, 3] = float("nan")
    eight = call("Fused8BitRowwiseQuantizedToFloat", call("FloatToFused8BitRowwiseQuantized", rows))
    four = call("FusedNBitRowwiseQuantizedSBHalfToFloat", call("FloatToFusedNBitRowwiseQuantizedSBHalf", rows, 4), 4)
    fp8 = call("FP8RowwiseQuantizedToFloat", call("FloatToFP8RowwiseQuantized", rows, True), True)
    for values in (eight, four, fp8):
        assert values[0].isnan().any()
        assert values[1].isfinite().all()


@pytest.mark.parametrize("name", ["FloatToFused8BitRowwiseQuantized", "HalfToFused8BitRowwiseQuantized"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rows_of_every_float_are_read_as_what_they_are(name: str, dtype: torch.dtype) -> None:
    """FBGEMM's CPU code reads fp16 rows as fp32 and the other way round, beyond their end."""
    rows = ROWS.to(dtype)
    expected = call("FloatToFused8BitRowwiseQuantized", rows.float())
    assert torch.equal(call(name, rows), expected)


def test_a_single_row_begins_its_scales_at_any_byte() -> None:
    """Scales 5 bytes into the storage cannot be viewed as fp32 where they lie."""
    rows = ROWS[:1, :5]
    values = call("Fused8BitRowwiseQuantizedToFloat", call("FloatToFused8BitRowwiseQuantized", rows))
    torch.testing.assert_close(values, rows, rtol=0, atol=0.01)


def test_numbers_in_the_middle_of_two_bf16_numbers_go_away_from_zero() -> None:
    middle = torch.tensor([1.00390625, -1.00390625, 3.4e38, float("nan"), 0.0])
    assert call("FloatToBfloat16Quantized", middle).tolist()[:3] == [1.0078125, -1.0078125, float("inf")]
    # a NaN whose mantissa is all ones would carry into the sign
    nan = torch.tensor([0x7FFFFFFF, 0x7F800001], dtype=torch.int32).view(torch.float32)
    assert call("FloatToBfloat16Quantized", nan).isnan().all()


def test_numbers_too_far_below_their_box_become_zero() -> None:
    """FBGEMM's sums run over the exponent there."""
    box = torch.tensor([[1e30, 1e-30, -1e-38, 0.0, float("inf"), float("nan")]])
    values = call("FloatToMSFPQuantized", box, 6, 8, 5, 127, 1e-30, 2.0**110)
    assert values[0, 1:4].tolist() == [0, 0, 0]
    assert values[0, 4:].tolist() == [2.0**110] * 2
