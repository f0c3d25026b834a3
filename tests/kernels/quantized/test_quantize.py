"""Quantizing: kernels equal the reference in every bit, errors stay within half a step, and bad rows are refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from kernel_inputs import DEVICES, assert_compiled_equals_eager, assert_same_bits, torch_device
from torch import Tensor

from shardwise.kernels import (
    ROW_FORMATS,
    dequantize_pooled,
    dequantize_rows,
    quantize_pooled,
    quantize_rows,
    row_format,
)
from shardwise.kernels.cpu import quantized_lookup as cpu_quantized
from shardwise.kernels.quantized.rows import (
    _dequantize_rows,
    _quantize_rows,
    dequantize_rows_ref,
    quantize_rows_ref,
)

# (format, dtype of its scales)
FORMATS = [(name, dtype) for name, kind in ROW_FORMATS.items() for dtype in kind.scale_dtypes or (None,)]
PACKED = [(name, dtype) for name, dtype in FORMATS if row_format(name).levels]


def rows_of(dim: int) -> Tensor:
    """Rows of every size, small and large, constant, zero, far from zero, with negative and positive ends."""
    generator = torch.Generator().manual_seed(dim)
    rows = torch.randn(12, dim, generator=generator)
    rows *= torch.tensor([1, 1e-4, 1e-7, 0, 100, 3000, 1e-2, 1e-2, 1, 1, 1e-30, 6e4])[:, None]
    rows[6:8] += torch.tensor([10.0, -10.0])[:, None]
    rows[8], rows[9] = 3.14159, rows[9].abs()
    rows[11] = rows[11].clamp(-60000, 60000)
    return rows


@pytest.mark.parametrize("device", DEVICES)
def test_fp8_rows_too_small_for_a_scale_are_zeros(device: str) -> None:
    """A scale of one bit made 600 steps out of such a value: 448 on the CPU, and a code of -0 in the kernel."""
    rows = torch.tensor([[600 * 2.0**-149, -300 * 2.0**-149], [2.0**-126, -(2.0**-127)], [0.0, 0.0]])
    payload, scales = quantize_rows(rows.to(torch_device(device)), "fp8")
    assert_same_bits((payload, scales), quantize_rows_ref(rows, "fp8"))
    back = dequantize_rows(payload, scales, 2, "fp8").cpu()
    assert torch.equal(back, torch.tensor([[0.0, 0.0], [1.0, -0.5], [0.0, 0.0]]) * 448 * scales.cpu())
    assert bool(((back[1] - rows[1]).abs() <= 2.0**-8 * rows[1].abs()).all())


@pytest.mark.parametrize("dim", [1, 7, 40])
@pytest.mark.parametrize(("format", "scales"), FORMATS)
@pytest.mark.parametrize("device", DEVICES)
def test_rows_become_the_reference_in_every_bit(device: str, format: str, scales: torch.dtype | None, dim: int) -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        rows = rows_of(dim).to(dtype)
        expected = quantize_rows_ref(rows, format, scales)
        got = quantize_rows(rows.to(torch_device(device)), format, scales)
        assert_same_bits(got, expected)
        assert_same_bits(dequantize_rows(*got, dim, format), dequantize_rows_ref(*expected, dim, format))
        half = dequantize_rows(*got, dim, format, torch.float16)
        assert_same_bits(half, dequantize_rows_ref(*expected, dim, format, torch.float16))


def odd_rows(count: int, dim: int, generator: torch.Generator) -> Tensor:
    """Rows of a kind each: zeros of both signs, constant, tiny, huge, far from zero, any bits, with a NaN or an Inf."""
    rows = torch.randn(count, dim, generator=generator)
    for row, kind in zip(rows, torch.randint(0, 14, (count,), generator=generator).tolist(), strict=True):
        signs = torch.where(torch.rand(dim, generator=generator) < 0.5, -1.0, 1.0)
        made = {
            0: signs * 0.0, 1: row[:1].expand(dim), 2: row * 1e-41, 3: row * 1e38, 4: row * 1e-2 - 10,
            5: row.clamp(min=0) * signs, 6: row.abs(), 7: -row.abs(), 8: (row * 2).round(), 9: row * 6e4,
            10: torch.randint(-(2**31), 2**31 - 1, (dim,), generator=generator).int().view(torch.float32),
        }.get(kind, row)  # fmt: skip
        row.copy_(made.clone())
        if kind > 10:
            at = int(torch.randint(0, dim, (1,), generator=generator))
            row[at] = {11: float("nan"), 12: float("inf"), 13: -float("inf")}[kind]
    return rows


def bits_of(x: Tensor) -> Tensor:
    """Bits as integers; those of every NaN are the same."""
    if not x.is_floating_point():
        return x
    bits = x.view({2: torch.int16, 4: torch.int32}[x.itemsize])
    return torch.where(x.isnan(), torch.zeros_like(bits), bits)


@pytest.mark.parametrize(
    ("path", "threads", "seeds"),
    [
        ("loops", 1, range(24)),
        ("loops", 2, range(21, 23)),
        ("torch", 1, range(24)),
        pytest.param("loops", 1, range(25, 2000), marks=pytest.mark.long),
        pytest.param("torch", 1, range(25, 2000), marks=pytest.mark.long),
    ],
)
def test_any_rows_have_the_reference_bits_on_the_cpu(
    monkeypatch: pytest.MonkeyPatch, path: str, threads: int, seeds: range
) -> None:
    """Past the check that refuses rows which are not finite: what is made of those is the same too."""
    if path == "torch":
        monkeypatch.setattr(cpu_quantized, "_quantizing", lambda: None)
        monkeypatch.setattr(cpu_quantized, "_looking_up", lambda: None)
    monkeypatch.setattr(cpu_quantized, "ALONE", 64)
    monkeypatch.setattr(cpu_quantized, "_QUANTIZED_ELEMENTS", 256)
    dims = (1, 2, 3, 5, 15, 16, 17, 20, 31, 32, 33, 34, 47, 63, 64, 65, 66, 100, 128, 130, 515)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for seed in seeds:
            generator = torch.Generator().manual_seed(seed)
            dim, count = dims[seed % len(dims)], (1, 17, 40, 70)[seed % 4]
            rows = odd_rows(count, dim, generator).to((torch.float32, torch.float16, torch.bfloat16)[seed % 3])
            if seed % 5 == 0:
                # not contiguous
                rows = torch.cat([rows, rows], 1)[:, :dim]
            for format, scales in FORMATS:
                dtype = scales or row_format(format).scale_dtype
                got, want = _quantize_rows(rows, format, dtype), quantize_rows_ref(rows, format, dtype)
                for actual, reference in zip(got, want, strict=True):
                    assert torch.equal(bits_of(actual), bits_of(reference)), (seed, format, dtype, dim)
                back, expected = (
                    _dequantize_rows(*want, dim, format, rows.dtype),
                    dequantize_rows_ref(*want, dim, format, rows.dtype),
                )
                assert torch.equal(bits_of(back), bits_of(expected)), (seed, format, dtype, dim)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("device", DEVICES)
def test_rows_wider_than_a_tile_become_the_reference_too(device: str) -> None:
    rows = rows_of(530)[:3]
    got, expected = quantize_rows(rows.to(torch_device(device)), "int4"), quantize_rows_ref(rows, "int4")
    assert_same_bits(got, expected)
    assert_same_bits(dequantize_rows(*got, 530, "int4"), dequantize_rows_ref(*expected, 530, "int4"))


@pytest.mark.parametrize(("format", "scales"), PACKED)
def test_values_come_back_within_half_a_step(format: str, scales: torch.dtype | None) -> None:
    """Small values, and values far from zero, were cut at the row's end when int8's fp16 scale was rounded down."""
    generator = torch.Generator().manual_seed(0)
    levels = row_format(format).levels
    for spread, centre in ((1.0, 0.0), (1e-3, 0.0), (1e-4, 0.0), (1e-2, 1.0), (1e-2, -10.0)):
        if (format, scales) != ("int8", torch.float16) and scales == torch.float16 and spread < 1:
            # FBGEMM's bits are asked for there, with what they lose
            continue
        rows = (torch.rand(200, 64, generator=generator) * 2 - 1) * spread + centre
        payload, made = quantize_rows(rows, format, scales)
        error = (dequantize_rows(payload, made, 64, format) - rows).abs()
        # by the scale that was stored, with what fp32 loses in the sum and FBGEMM's epsilon in the fused 8-bit rows
        assert bool((error <= 0.52 * made[:, :1].float() + 4e-7 * (abs(centre) + spread)).all())
        if scales == torch.float32:
            step = (rows.amax(1, keepdim=True) - rows.amin(1, keepdim=True)) / levels
            assert bool((error <= 0.52 * step + 4e-7 * (abs(centre) + spread)).all())


def test_numbers_lie_where_fbgemm_has_them() -> None:
    """Quantized by FBGEMM 1.8.0: FloatToFusedNBitRowwiseQuantizedSBHalf and FloatToFused8BitRowwiseQuantized."""
    row = torch.tensor([[-0.5, 0.25, 0.75, 1.0, -0.125, 0.5, 0.625, 0.0]])
    int4, scales4 = quantize_rows(row, "int4")
    int2, scales2 = quantize_rows(row, "int2")
    int8, scales8 = quantize_rows(row, "int8", torch.float32)
    assert int4.tolist() == [[128, 253, 164, 91]]
    assert int2.tolist() == [[232, 105]]
    assert int8.tolist() == [[0, 128, 212, 255, 64, 170, 191, 85]]
    assert scales4.view(torch.uint8).tolist() == [[102, 46, 0, 184]]
    assert scales2.view(torch.uint8).tolist() == [[0, 56, 0, 184]]
    assert scales8.view(torch.uint8).tolist() == [[193, 192, 192, 59, 0, 0, 0, 191]]


@pytest.mark.parametrize("format", ROW_FORMATS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("device", DEVICES)
def test_a_row_that_is_not_finite_is_refused(device: str, value: float, format: str) -> None:
    rows = torch.zeros(4, 5, device=torch_device(device))
    rows[2, 3] = value
    with pytest.raises(ValueError, match=rf"row 2 is not finite, {value} in column 3"):
        quantize_rows(rows, format)


@pytest.mark.parametrize("format", ["int8", "int4", "int2", "fp16"])
def test_a_row_too_large_for_fp16_is_refused_with_the_way_out(format: str) -> None:
    way_out = "bf16 or fp32 rows" if format == "fp16" else "scale_dtype=torch.float32"
    rows = torch.zeros(4, 5)
    rows[3, 1] = -1e6
    with pytest.raises(ValueError, match=rf"row 3 reaches from -1e\+06 to 0, more than .*{way_out}"):
        quantize_rows(rows, format)
    if format != "fp16":
        payload, scales = quantize_rows(rows, format, torch.float32)
        assert dequantize_rows(payload, scales, 5, format)[3, 1] == -1e6


REFUSED: list[tuple[str, Callable[[], object]]] = [
    ("no row format is named 'int3'", lambda: quantize_rows(torch.ones(2, 3), "int3")),
    (
        r"scales of fp8 rows are torch\.float32, not torch\.float16",
        lambda: quantize_rows(torch.ones(2, 3), "fp8", torch.float16),
    ),
    (r"floats \[R, D\], got torch\.int64 \[3\]", lambda: quantize_rows(torch.arange(3), "int8")),
    (
        r"int4 rows of dim 9 have payload \[2, 5\]",
        lambda: dequantize_rows(*quantize_rows(torch.ones(2, 7), "int4"), 9, "int4"),
    ),
    (r"dims \[7, 8\] are \[B, 15\], got \[5, 24\]", lambda: quantize_pooled(torch.randn(5, 24), [7, 8])),
    (
        r"dims \[7\] are \[B, 15\], got \[5, 56\]",
        lambda: dequantize_pooled(quantize_pooled(torch.randn(5, 24), [7, 8, 8, 1]), [7]),
    ),
]


@pytest.mark.parametrize(("message", "call"), REFUSED)
def test_bad_arguments_are_refused(message: str, call: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("format", ROW_FORMATS)
@pytest.mark.parametrize("device", DEVICES)
def test_a_table_without_rows_stays_one(device: str, format: str) -> None:
    payload, scales = quantize_rows(torch.empty(0, 6, device=torch_device(device)), format)
    kind = row_format(format)
    assert (payload.shape, scales.shape) == ((0, kind.row_bytes(6)), (0, kind.parts))
    assert dequantize_rows(payload, scales, 6, format).shape == (0, 6)


@pytest.mark.parametrize("device", DEVICES)
def test_quantizing_compiles_into_one_graph(device: str) -> None:
    rows = rows_of(7).to(torch_device(device))

    def there_and_back(x: Tensor) -> Tensor:
        return dequantize_rows(*quantize_rows(x, "int4"), 7, "int4") * 2

    assert_compiled_equals_eager(there_and_back, [(rows,)], 0.0)


@pytest.mark.parametrize("device", DEVICES)
def test_pooled_rows_as_bytes_are_int8_rows_with_scales_at_their_end(device: str) -> None:
    dims = [7, 8, 8, 1]
    pooled = torch.randn(5, sum(dims), generator=torch.Generator().manual_seed(1)).to(torch_device(device))
    rows = quantize_pooled(pooled, dims)
    assert rows.shape == (5, sum(dims) + 8 * len(dims))
    column = 0
    for dim, block, values in zip(dims, rows.split([dim + 8 for dim in dims], 1), pooled.split(dims, 1), strict=True):
        payload, scales = quantize_rows_ref(values.cpu(), "int8", torch.float32)
        assert_same_bits(block[:, :dim], payload)
        assert_same_bits(block[:, dim:].contiguous().view(torch.float32), scales)
        back = dequantize_pooled(rows, dims)[:, column : column + dim]
        assert_same_bits(back, dequantize_rows_ref(payload, scales, dim, "int8"))
        column += dim
    assert quantize_pooled(pooled[:0], dims).shape == (0, 56)


@pytest.mark.parametrize("dim", [5, 8])
def test_one_pooled_row_of_any_dim_comes_back(dim: int) -> None:
    """One bag of one feature whose dim is no multiple of 4 raised "storage_offset must be divisible by 4".

    A slice of one row is contiguous already, so its scales were read where they lay.
    """
    pooled = torch.linspace(-1, 1, dim)[None]
    assert (dequantize_pooled(quantize_pooled(pooled, [dim]), [dim]) - pooled).abs().max() < 0.01
