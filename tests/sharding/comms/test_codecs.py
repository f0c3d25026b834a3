"""Compressed blocks: how far values may move, exactly how many bytes they take, and what does not fit is reported."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings, strategies as st
from torch import Tensor

from shardwise.sharding.comms.codecs import (
    BF16,
    FP16,
    FP32,
    Codec,
    FormatCodec,
    fp8,
    int8,
    mx4,
)

INF, NAN = math.inf, math.nan
FORMATS = [FP32, FP16, BF16, fp8(), fp8(exponent_bits=5), fp8(row=12), int8(), int8(row=4), mx4(), mx4(row=8)]
CODECS = [FormatCodec(f) for f in FORMATS] + [FormatCodec(FP16, loss_scale=256.0), FormatCodec(BF16, loss_scale=0.3)]
UNSCALED = [codec for codec in CODECS if codec.loss_scale is None]
PLAIN = [codec for codec in CODECS if codec.format.row == 1]
SCALED = [codec for codec in CODECS if codec.format.row > 1]
SIZES = [0, 1, 2, 3, 0, 64, 65, 128, 7, 0]

every_codec = pytest.mark.parametrize("codec", CODECS, ids=lambda c: c.name)
plain_codec = pytest.mark.parametrize("codec", PLAIN, ids=lambda c: c.name)
scaled_codec = pytest.mark.parametrize("codec", SCALED, ids=lambda c: c.name)
float32 = st.floats(width=32, allow_nan=False, allow_infinity=False)


def travelled(codec: Codec, x: Tensor) -> Tensor:
    """What arrives of a block."""
    return codec.decode(codec.encode(x), len(x))


def error_allowed(x: Tensor, codec: FormatCodec) -> Tensor:
    """What each value may move by, in float64: relative to itself, to its row, and to the least number there is."""
    value, row = x.double().abs(), codec.format.row
    padded = torch.nn.functional.pad(x.double(), (0, -x.shape[0] % row)).view(-1, row)
    # the filling zeros may not count in a range
    padded[-1, row - (-x.shape[0] % row) :] = x[-1].item()
    largest, extent = padded.abs().amax(1), padded.amax(1) - padded.amin(1)
    largest, extent = (t.repeat_interleave(row)[: x.shape[0]] for t in (largest, extent))
    scale = 1.0 if codec.loss_scale is None else codec.loss_scale
    # half the distance to the next value: relative to a value, to its row's largest (where spacing bottoms out), least
    name = codec.format.name.split("/")[0]
    relative, of_row, least = {
        "fp32": (0.0, 0.0, 0.0),
        "fp16": (2.0**-11, 0.0, 2.0**-25),
        "bf16": (2.0**-8, 0.0, 2.0**-133),
        "fp8e4": (2.0**-4, 2.0**-10 / 448, 2.0**-136),
        "fp8e5": (2.0**-3, 2.0**-17 / 57344, 2.0**-143),
        "int8": (0.0, 2.0**-22, 2.0**-127),
        # 7 becomes 6; below, half of a quarter of the power of two, which is at least a seventh of the largest
        "mx4": (1 / 4, 1 / 14, 2.0**-128),
    }[name]
    step = extent / 255 / 2 if name == "int8" else 0.0
    # and the roundings of fp32 on the way there and back
    steps = 0 if scale == 1.0 and row == 1 else 1
    return (relative * value + of_row * largest + step + least / scale) * 1.001 + steps * (2.0**-21 * value + 2.0**-148)


@every_codec
@settings(deadline=None, max_examples=40)
@given(st.lists(float32, min_size=1, max_size=70))
@example([0.0, -0.0])
@example([1.4e-45, -1.1e-38, 5e-42])
@example([65504.0, -65519.0, 6e-8])
@example([448.0, 1e-3, 464.0, 500.0])
@example([1.0, 7.0, 6.5, 5.0, 3.5, 2.5, 0.25, 0.75])
@example([1000.0, 1000.0001, 1000.0002])
@example([3.4e38])
@example([1.0] * 64 + [1e20])
def test_values_move_by_no_more_than_the_format_says(codec: FormatCodec, values: list[float]) -> None:
    x = torch.tensor(values)
    data = codec.encode(x)
    assert (data.dtype, data.shape) == (torch.uint8, (codec.encoded_bytes(len(values)),))
    back = codec.decode(data, len(values))
    assert (back.dtype, back.shape) == (torch.float32, x.shape)
    if not codec.overflows(x):
        moved = (back.double() - x.double()).abs()
        assert (moved <= error_allowed(x, codec)).all(), (moved, error_allowed(x, codec))


@every_codec
@settings(deadline=None, max_examples=40)
@given(st.lists(float32, min_size=1, max_size=70))
@example([65519.0])
@example([65520.0, INF])
@example([3.4e38, -3.4e38])
@example([3.3961775e38])
@example([3.4028235e38])
def test_an_overflow_is_reported_exactly_where_a_finite_value_does_not_arrive(
    codec: FormatCodec, values: list[float]
) -> None:
    """TorchRec clamps what fp16 cannot hold, and trains on the clamped values without a word."""
    x = torch.tensor(values)
    back = travelled(codec, x)
    assert codec.overflows(x).item() == bool((x.isfinite() & ~back.isfinite()).any())
    assert codec.overflows(x).shape == ()


@pytest.mark.parametrize(
    ("codec", "fits", "too_large"),
    [
        (FormatCodec(FP16), 65519.0, 65520.0),
        (FormatCodec(FP16, loss_scale=16.0), 4094.9, 4095.0),
        (FormatCodec(BF16), 3.396e38, 3.397e38),
        (FormatCodec(FP32), 3.4028235e38, None),
        (FormatCodec(int8()), 3.4028235e38, None),
        (FormatCodec(fp8()), 3.4e38, None),
    ],
    ids=str,
)
def test_the_largest_values(codec: FormatCodec, fits: float, too_large: float | None) -> None:
    assert not codec.overflows(torch.tensor([1.0, -fits]))
    if too_large is not None:
        assert codec.overflows(torch.tensor([1.0, -too_large]))
        assert codec.overflows(torch.tensor([NAN, too_large, INF]))


def test_an_int8_row_wider_than_fp32_is_reported() -> None:
    assert FormatCodec(int8()).overflows(torch.tensor([3e38, -3e38]))


@plain_codec
def test_inf_and_nan_pass_through_formats_that_have_them(codec: FormatCodec) -> None:
    x = torch.tensor([INF, -INF, NAN, 1.0])
    torch.testing.assert_close(travelled(codec, x), x, rtol=2.0**-8, atol=0, equal_nan=True)
    assert not codec.overflows(x)


@scaled_codec
@pytest.mark.parametrize("bad", [INF, -INF, NAN])
def test_inf_and_nan_turn_their_row_into_nan_and_are_reported(codec: FormatCodec, bad: float) -> None:
    row = codec.format.row
    x = torch.ones(3 * row)
    x[row + 1] = bad
    back = travelled(codec, x)
    assert back[row : 2 * row].isnan().all()
    assert torch.equal(back[:row], x[:row])
    assert torch.equal(back[2 * row :], x[2 * row :])
    assert codec.overflows(x)
    assert codec.overflows(x[row : row + 2])


@every_codec
def test_blocks_encoded_in_one_go_are_the_blocks_encoded_one_by_one(codec: Codec) -> None:
    x = torch.randn(sum(SIZES))
    data, sizes = codec.encode_blocks(x, SIZES)
    assert sizes == [codec.encoded_bytes(n) for n in SIZES]
    assert all(size % 4 == 0 for size in sizes)
    blocks = torch.split(x, SIZES)
    for block, encoded in zip(blocks, torch.split(data, sizes), strict=True):
        assert torch.equal(encoded, codec.encode(block))
    back = codec.decode_blocks(data, SIZES)
    assert torch.equal(back, torch.cat([travelled(codec, block) for block in blocks]))
    # the exchange hands over blocks in the middle of a buffer
    moved = torch.cat([torch.zeros(4, dtype=torch.uint8), data])[4:]
    assert torch.equal(codec.decode_blocks(moved, SIZES), back)


@every_codec
@pytest.mark.parametrize("sizes", [[], [0], [0, 0, 0]])
def test_empty_blocks_take_no_bytes(codec: Codec, sizes: list[int]) -> None:
    data, bytes_per_block = codec.encode_blocks(torch.empty(0), sizes)
    assert data.shape == (0,)
    assert bytes_per_block == [0] * len(sizes)
    assert codec.decode_blocks(data, sizes).shape == (0,)
    assert not codec.overflows(torch.empty(0))


@pytest.mark.parametrize(
    ("format", "bytes_by_elements"),
    [
        (FP32, {1: 4, 3: 12, 4096: 16384}),
        (FP16, {1: 4, 2: 4, 3: 8, 4096: 8192}),
        (BF16, {1: 4, 2: 4, 3: 8, 4096: 8192}),
        (fp8(), {1: 8, 64: 68, 65: 76, 4096: 4096 + 4 * 64}),
        (fp8(row=128), {4096: 4096 + 4 * 32}),
        (int8(), {1: 12, 64: 72, 65: 84, 4096: 4096 + 8 * 64}),
        (mx4(), {1: 8, 8: 8, 9: 12, 32: 20, 33: 24, 4096: 2048 + 128}),
    ],
    ids=lambda v: getattr(v, "name", ""),
)
def test_bytes_of_a_block(format: Any, bytes_by_elements: dict[int, int]) -> None:
    codec = FormatCodec(format)
    assert {n: codec.encoded_bytes(n) for n in bytes_by_elements} == bytes_by_elements
    assert {n: codec.encode(torch.ones(n)).shape[0] for n in bytes_by_elements} == bytes_by_elements


@pytest.mark.parametrize("codec", UNSCALED, ids=lambda c: c.name)
@pytest.mark.parametrize("value", [0.0, 1.0, -2.0])
def test_constant_rows_arrive_as_they_were(codec: Codec, value: float) -> None:
    x = torch.full((130,), value)
    torch.testing.assert_close(travelled(codec, x), x, rtol=2.0**-23, atol=0)


@pytest.mark.parametrize("value", [0.1, -1e-30, 3.4e38, 1e-40])
def test_a_constant_int8_row_is_exact(value: float) -> None:
    x = torch.full((130,), value)
    assert torch.equal(travelled(FormatCodec(int8()), x), x)


def test_a_tail_row_keeps_its_own_range() -> None:
    """Filled up with zeros, the row 100..101 would have steps of 0.4 instead of 0.004."""
    x = torch.cat([torch.zeros(64), torch.linspace(100, 101, 5)])
    assert (travelled(FormatCodec(int8()), x) - x).abs().max() < 0.0021


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_plain_formats_are_the_bytes_of_their_dtype(dtype: torch.dtype) -> None:
    x = torch.randn(64) * 1e-4
    codec = FormatCodec(FP16 if dtype is torch.float16 else BF16)
    assert torch.equal(codec.encode(x).view(dtype), x.to(dtype))
    assert torch.equal(travelled(codec, x), x.to(dtype).float())


def test_fp32_is_a_view() -> None:
    x = torch.randn(64)
    codec = FormatCodec(FP32)
    assert not codec.compresses
    assert FormatCodec(FP16).compresses
    assert codec.encode(x).data_ptr() == x.data_ptr()
    assert codec.decode(codec.encode(x), 64).data_ptr() == x.data_ptr()


def test_a_loss_scale_saves_small_values_from_vanishing() -> None:
    x = torch.full((4,), 1e-8)
    assert not travelled(FormatCodec(FP16), x).any()
    torch.testing.assert_close(travelled(FormatCodec(FP16, loss_scale=2.0**14), x), x, rtol=2.0**-11, atol=0)


def test_small_values_survive_fp8_and_mx4() -> None:
    """Rows of tables begin around 1e-3, gradients far below: without a scale per row e4m3 makes most of them zero."""
    x = torch.linspace(1, 2, 64) * 1e-7
    for format, relative in ((fp8(), 2.0**-4), (fp8(exponent_bits=5), 2.0**-3), (mx4(), 0.26)):
        torch.testing.assert_close(travelled(FormatCodec(format), x), x, rtol=relative, atol=0)


def test_mx4_is_the_nearest_of_its_sixteen_values_with_ties_to_even() -> None:
    """Compared with a search over all values, for a row whose power of two is 1."""
    codec = FormatCodec(mx4())
    grid = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    x = torch.linspace(0, 6.9375, 112)
    distance = (x[:, None] - grid).abs()
    # of two nearest the one with the even code: an odd one is a little farther
    nearest = grid[(distance + (torch.arange(8) % 2) * 1e-6).argmin(1)]
    rows = torch.cat([torch.tensor([6.0]), x[:31], torch.tensor([6.0]), x[31:62], torch.tensor([6.0]), x[62:93]])
    expected = torch.cat([nearest.new_tensor([6.0]), nearest[:31], nearest.new_tensor([6.0]), nearest[31:62]])
    back = travelled(codec, rows)
    assert torch.equal(back[:64], expected)
    assert torch.equal(travelled(codec, -rows), -back)
    # one byte per row says 2 ** 0, and 0.5, 6 are the nibbles 1, 7
    data = codec.encode(torch.tensor([0.5, 6.0] * 16))
    assert data.tolist() == [0x71] * 16 + [127, 0, 0, 0]


def test_mx4_takes_the_next_power_of_two_where_the_largest_value_rounds_up_to_it() -> None:
    codec = FormatCodec(mx4())
    assert travelled(codec, torch.tensor([6.99, 1.0])).tolist() == [6.0, 1.0]
    assert travelled(codec, torch.tensor([7.0, 1.0])).tolist() == [8.0, 1.0]


@every_codec
def test_the_same_values_give_the_same_bytes_and_encoding_twice_changes_nothing(codec: FormatCodec) -> None:
    x = torch.randn(200)
    assert torch.equal(codec.encode(x), codec.encode(x.clone()))
    back = travelled(codec, x)
    torch.testing.assert_close(travelled(codec, back), back, rtol=2.0**-20, atol=2.0**-20)


@every_codec
def test_values_that_do_not_lie_side_by_side_are_taken(codec: Codec) -> None:
    x = torch.randn(128, 2)[:, 0]
    assert torch.equal(codec.encode(x), codec.encode(x.contiguous()))
    ones = torch.ones(1).expand(128)
    assert torch.equal(codec.encode(ones), codec.encode(torch.ones(128)))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda codec: codec.encode_blocks(torch.zeros(4), [1, 2]),
            r"takes 3 float32 values, got torch.float32 of .*\[4\]",
        ),
        (lambda codec: codec.encode(torch.zeros(4, dtype=torch.float64)), "got torch.float64"),
        (lambda codec: codec.decode(torch.zeros(4).byte(), 3), r"expected 8 bytes, got torch.uint8 of shape \[4\]"),
        (lambda _: FormatCodec(FP16, loss_scale=0.0), "the loss scale must be positive and finite, got 0"),
        (lambda _: mx4(row=12), "mx4: values sharing a scale must be a positive multiple of 8, got 12"),
    ],
)
def test_what_is_not_a_block_is_refused(make: Callable[[Codec], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(FormatCodec(FP16))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@every_codec
def test_cuda_gives_the_bytes_of_the_cpu(codec: Codec) -> None:
    x = torch.cat([torch.randn(500), torch.randn(500) * 1e-40, torch.tensor([3e38, 65519.0, 0.0])])
    data, _ = codec.encode_blocks(x.cuda(), [500, 3, 500])
    assert torch.equal(data.cpu(), codec.encode_blocks(x, [500, 3, 500])[0])
    assert torch.equal(codec.decode_blocks(data, [500, 3, 500]).cpu(), codec.decode_blocks(data.cpu(), [500, 3, 500]))
    assert codec.overflows(x.cuda()).item() == codec.overflows(x).item()
