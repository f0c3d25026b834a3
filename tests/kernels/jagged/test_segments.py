"""Offsets, places, inverses, sums and packs of bags, compared with what lists of lists say."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from kernel_inputs import DEVICES, UPDATES, assert_close, assert_compiled_equals_eager, assert_same_bits, torch_device
from torch import Tensor

from shardwise.kernels import (
    complete_cumsum,
    invert_permute,
    offsets_range,
    offsets_to_lengths,
    pack_segments,
    segment_sum,
    unpack_segments,
)
from shardwise.kernels.cpu import segments as cpu_segments
from shardwise.kernels.jagged.offsets import (
    complete_cumsum_ref,
    invert_permute_ref,
    offsets_range_ref,
    segment_spread_ref,
    segment_sum_ref,
)

OPS = torch.ops.shardwise
LOOPS = cpu_segments, "loops"
LOOSE = settings(max_examples=50, deadline=None)
INDICES = st.sampled_from([torch.int32, torch.int64])
SIZES = st.lists(st.integers(0, 20), max_size=9)


def ends_of(sizes: list[int]) -> list[int]:
    return [*accumulate(sizes, initial=0)]


@LOOSE
@given(st.lists(SIZES.filter(lambda some: len(some) >= 2).map(lambda some: some[:2]), max_size=4), INDICES)
def test_offsets_are_sums_of_all_before_and_lengths_their_differences(
    path: str, rows: list[list[int]], dtype: torch.dtype
) -> None:
    lengths = torch.tensor(rows, dtype=dtype).view(len(rows), 2)
    offsets = complete_cumsum(lengths)
    assert offsets.dtype == dtype
    assert offsets.tolist() == [ends_of(row) for row in rows]
    assert offsets_to_lengths(offsets).tolist() == rows
    assert complete_cumsum(lengths.flatten()).tolist() == ends_of([n for row in rows for n in row])
    assert offsets_to_lengths(complete_cumsum(lengths.flatten())).dtype == dtype


def test_offsets_of_other_tensors_are_torch_s_own() -> None:
    assert complete_cumsum(torch.tensor([1.5, 2.0])).tolist() == [0.0, 1.5, 3.5]
    assert complete_cumsum(torch.tensor([1, 2], dtype=torch.int16)).dtype == torch.int16
    assert complete_cumsum(torch.zeros(0, 3, dtype=torch.int64)).shape == (0, 4)
    assert complete_cumsum(torch.zeros(3, 0, dtype=torch.int64)).tolist() == [[0], [0], [0]]
    assert complete_cumsum(torch.tensor([[1, 2], [3, 4]]).t()).tolist() == [[0, 1, 4], [0, 2, 6]]


@LOOSE
@given(SIZES, INDICES, st.booleans())
def test_a_place_is_counted_from_the_start_of_its_bag(
    path: str, sizes: list[int], dtype: torch.dtype, with_end: bool
) -> None:
    ends = ends_of(sizes)
    # the last of the begins is an empty bag
    begins = ends if with_end or not sizes else ends[:-1]
    got = offsets_range(torch.tensor(begins, dtype=dtype), ends[-1])
    assert got.tolist() == [i for n in sizes for i in range(n)]
    assert got.dtype == dtype


@LOOSE
@given(st.integers(0, 30).flatmap(lambda n: st.permutations(range(n))), INDICES)
def test_an_inverse_undoes_its_permutation(path: str, order: list[int], dtype: torch.dtype) -> None:
    permute = torch.tensor(order, dtype=dtype)
    inverse = invert_permute(permute)
    assert inverse.dtype == dtype
    assert [order[i] for i in inverse.tolist()] == list(range(len(order)))


@LOOSE
@given(st.data())
def test_a_sum_of_a_segment_is_the_sum_of_its_list(path: str, data: st.DataObject) -> None:
    sizes, batch_size = data.draw(SIZES), data.draw(st.sampled_from([1, 1, 2, 3]))
    dtype = data.draw(st.sampled_from([torch.float32, torch.float64, torch.float16, torch.int64, torch.int32]))
    columns = data.draw(st.sampled_from([(), (1,), (3,), (2, 2)]))
    before, after = data.draw(st.integers(0, 3)), data.draw(st.integers(0, 3))
    ends = [before + end for end in ends_of(sizes)]
    count = (ends[-1] + after) * batch_size
    numbers = data.draw(st.lists(st.integers(-9, 9), min_size=count, max_size=count))
    values = torch.tensor(numbers, dtype=dtype).view(-1, *[1] * len(columns)).expand(count, *columns)
    offsets = torch.tensor(ends, dtype=data.draw(INDICES))
    wanted = values.is_floating_point()
    values = values.clone().requires_grad_(wanted)
    got = segment_sum(offsets, values, batch_size=batch_size)
    expected = [sum(numbers[a * batch_size : b * batch_size]) for a, b in zip(ends, ends[1:], strict=False)]
    assert got.dtype == dtype
    assert got.shape == (len(sizes), *columns)
    # nothing wants a gradient: past the dispatcher
    for sums in (got, segment_sum(offsets, values.detach(), batch_size=batch_size)):
        assert sums.tolist() == alike(expected, columns)
    if wanted:
        upstream = torch.tensor(alike([*range(1, len(sizes) + 1)], columns), dtype=dtype).view(got.shape)
        (grad,) = torch.autograd.grad(got, values, upstream)
        bags = [b + 1 for b, n in enumerate(sizes) for _ in range(n * batch_size)]
        assert grad.dtype == dtype
        assert grad.tolist() == alike([0] * before * batch_size + bags + [0] * after * batch_size, columns)


def alike(numbers: list[int], columns: tuple[int, ...]) -> list[Any]:
    """Each number as often as a row of this shape has elements, as that row's list."""
    for n in reversed(columns):
        numbers = [[number] * n for number in numbers]  # type: ignore[misc]
    return numbers


def test_sums_pass_gradcheck_twice(path: str) -> None:
    offsets = torch.tensor([1, 3, 3, 5])
    for shape in ((6,), (6, 2)):
        values = torch.randn(*shape, dtype=torch.float64, requires_grad=True)
        assert torch.autograd.gradcheck(lambda v: segment_sum(offsets, v), values)
        assert torch.autograd.gradgradcheck(lambda v: segment_sum(offsets, v), values)


def test_a_segment_of_ten_million_is_summed_exactly() -> None:
    """In fp16, which ends at 65504, and in int32: sums are kept wider."""
    ones = torch.ones(10_000_000, dtype=torch.int32)
    assert segment_sum(torch.tensor([0, 10_000_000]), ones).tolist() == [10_000_000]
    halves = torch.full((4096,), 0.5, dtype=torch.float16)
    assert segment_sum(torch.tensor([0, 4095, 4096]), halves).tolist() == [2048.0, 0.5]


@LOOSE
@given(st.data())
def test_packs_are_bags_cut_or_filled_and_unpacked_again(data: st.DataObject) -> None:
    bags = data.draw(st.lists(st.lists(st.integers(-9, 99), max_size=6), max_size=6))
    longest, dtype = data.draw(st.integers(0, 7)), data.draw(INDICES)
    values = torch.tensor([v for bag in bags for v in bag], dtype=torch.float32)
    if data.draw(st.booleans()):
        values = torch.stack([values, 2 * values], 1)
    values.requires_grad_()
    lengths = torch.tensor([len(bag) for bag in bags], dtype=dtype)
    packed = pack_segments(values, lengths, longest)
    first = packed if values.dim() == 1 else packed[..., 0]
    filled = [(bag + [0] * longest)[:longest] for bag in bags]
    assert first.tolist() == filled
    cut = [v if i < longest else 0 for bag in bags for i, v in enumerate(bag)]
    for total in (None, values.shape[0]):
        back = unpack_segments(packed, lengths, total=total)
        assert (back if values.dim() == 1 else back[:, 1] / 2).tolist() == cut
    if values.numel():
        (grad,) = torch.autograd.grad(packed.sum(), values)
        kept = [float(i < longest) for bag in bags for i, _ in enumerate(bag)]
        assert (grad if values.dim() == 1 else grad[:, 1]).tolist() == kept


def test_packs_pass_gradcheck() -> None:
    lengths = torch.tensor([2, 0, 3])
    values = torch.randn(5, 2, dtype=torch.float64, requires_grad=True)
    packed = torch.randn(3, 2, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda v: pack_segments(v, lengths, 2), values)
    assert torch.autograd.gradcheck(lambda p: unpack_segments(p, lengths), packed)


IDS, FLOATS, T = torch.tensor([0, 1]), torch.ones(2), torch.tensor


def places(*offsets: int, size: int) -> Callable[[], Any]:
    return lambda: offsets_range(T(offsets, dtype=torch.int64), size)


# each is refused on both paths
REFUSED: list[tuple[type[Exception], str, Callable[[], Any]]] = [
    (ValueError, "must not decrease, entry 2 is 2 after 3", places(0, 3, 2, size=5)),
    (ValueError, "must go from 0 to 5, got from 1 to 5", places(1, 2, size=5)),
    (ValueError, "must not decrease, entry 2 is 5 after 6", places(0, 6, size=5)),
    (ValueError, "must go from 0 to 2, got from 2 to 2", places(size=2)),
    (ValueError, "must not decrease", places(0, -1, 2, size=2)),
    (IndexError, r"permute\[1\] is 3, out of range for 3", lambda: invert_permute(T([0, 3, 1]))),
    (IndexError, r"permute\[1\] is -1", lambda: invert_permute(T([0, -1, 1]))),
    (ValueError, "it is no permutation", lambda: invert_permute(T([0, 1, 1]))),
    (ValueError, "lengths must have a dimension", lambda: complete_cumsum(IDS[0])),
    (ValueError, "at least one entry", lambda: offsets_to_lengths(IDS[:0])),
    (TypeError, "offsets must be int32 or int64", lambda: offsets_range(FLOATS, 2)),
    (ValueError, "offsets must be 1-D", lambda: offsets_range(IDS[None], 2)),
    (TypeError, "permute must be int32 or int64", lambda: invert_permute(IDS.short())),
    (ValueError, "at least one entry", lambda: segment_sum(IDS[:0], FLOATS)),
    (ValueError, "batch_size must be positive, got 0", lambda: segment_sum(IDS, FLOATS, batch_size=0)),
    (ValueError, "values must have a first dimension", lambda: segment_sum(IDS, FLOATS[0])),
    (ValueError, "max_length must be >= 0, got -1", lambda: pack_segments(FLOATS, IDS, -1)),
    (ValueError, "lengths sum to 1, expected 2 values", lambda: pack_segments(FLOATS, IDS, 2)),
    (ValueError, "lengths must be >= 0, got -1", lambda: pack_segments(FLOATS, T([3, -1]), 2)),
    (ValueError, r"packed must be \[1, max_length, ...\]", lambda: unpack_segments(FLOATS[:, None], IDS[:1])),
    (ValueError, "lengths sum to 1, expected 3 values", lambda: unpack_segments(FLOATS[:, None], IDS, total=3)),
]


@pytest.mark.parametrize(("error", "message", "call"), REFUSED)
def test_what_does_not_fit_is_refused(path: str, error: type[Exception], message: str, call: Callable[[], Any]) -> None:
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("offsets", [[0, 4, 3], [-1, 2], [0, 7], [0, 2**62], [5, 2**62, 6]])
@pytest.mark.parametrize(("values", "batch_size"), [(torch.ones(6), 1), (torch.ones(13, 2), 2)], ids=["one", "two"])
def test_offsets_that_leave_the_values_are_refused(
    path: str, offsets: list[int], values: Tensor, batch_size: int
) -> None:
    with pytest.raises(ValueError, match="offsets must not decrease nor leave 0 ... 6, got"):
        segment_sum(T(offsets), values, batch_size=batch_size)


# The same on every device.

SHAPES: list[tuple[int, ...]] = [(), (1,), (3,), (20,), (128,), (2, 3)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("device", UPDATES)
def test_sums_and_their_gradients_equal_the_reference(
    where: torch.device, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    offsets = torch.tensor([0, 0, 3, 21, 22, 22], device=where)
    values = (torch.randn(45, *shape, generator=torch.Generator().manual_seed(0)) * 8).to(dtype).to(where)
    for batch_size in (1, 2):
        got, expected = (
            segment_sum(offsets, values, batch_size=batch_size),
            segment_sum_ref(offsets, values, batch_size),
        )
        assert_close(got.double(), expected.double(), 1e-3 if dtype == torch.float16 else 1e-6)
        assert_same_bits(segment_sum(offsets, values, batch_size=batch_size), got)
        if dtype.is_floating_point:
            wanted = values.clone().requires_grad_()
            (grad,) = torch.autograd.grad(segment_sum(offsets, wanted, batch_size=batch_size), wanted, expected)
            assert_same_bits(grad, segment_spread_ref(offsets, expected, 45, batch_size))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("device", UPDATES)
def test_places_and_inverses_equal_the_reference(where: torch.device, dtype: torch.dtype) -> None:
    offsets = torch.tensor([0, 0, 3, 90, 90, 91], dtype=dtype, device=where)
    assert_same_bits(offsets_range(offsets, 100), offsets_range_ref(offsets, 100))
    assert_same_bits(offsets_range(offsets[:1], 7), torch.arange(7, dtype=dtype))
    permute = torch.randperm(100, generator=torch.Generator().manual_seed(0)).to(dtype).to(where)
    assert_same_bits(invert_permute(permute), invert_permute_ref(permute))
    assert invert_permute(permute[:0]).shape == (0,)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("device", UPDATES)
def test_offsets_equal_the_reference_in_blocks_rows_and_beyond_one_launch(
    where: torch.device, dtype: torch.dtype
) -> None:
    lengths = torch.randint(0, 9, (3, 100), generator=torch.Generator().manual_seed(0)).to(dtype).to(where)
    for some in (lengths[0], lengths, lengths.t(), lengths[:, :16], lengths[:, :1], lengths[:0], lengths[:, :0]):
        assert_same_bits(complete_cumsum(some), complete_cumsum_ref(some))
    long = torch.ones((1 << 14) + 1, dtype=dtype, device=where)
    assert_same_bits(complete_cumsum(long), torch.arange((1 << 14) + 2, dtype=dtype))
    if dtype == torch.int64:
        # sums of 64 bits, whatever a block's are
        assert complete_cumsum(lengths[0] + 2**40)[-1] == int(lengths[0].sum()) + 100 * 2**40


@pytest.mark.parametrize("device", DEVICES[1:])
def test_on_a_gpu_nothing_outside_is_read_or_written(device: str, where: torch.device) -> None:
    """Nobody waits for a GPU to say what does not fit; memory is safe, and no device assert ends the process."""
    values = torch.ones(6, device=where)
    for offsets in ([0, 9, 3], [-5, 2], [4, 2, 6], [0, 2**62]):
        assert segment_sum(torch.tensor(offsets, device=where), values).shape == (len(offsets) - 1,)
        assert segment_sum(torch.tensor(offsets, device=where), values[:, None].repeat(1, 3)).isfinite().all()
    assert invert_permute(torch.tensor([1, 5, -1], device=where)).tolist() == [-1, 0, -1]
    assert offsets_range(torch.tensor([2, 3], device=where), 5).tolist() == [-1, -1, 0, 0, 1]


def op_calls(device: torch.device) -> dict[str, tuple[Any, tuple[Any, ...]]]:
    offsets = torch.tensor([0, 0, 3, 6], device=device)
    values, sums = (torch.randn(n, 3, device=device, requires_grad=True) for n in (6, 3))
    return {
        "segment_sum": (OPS.segment_sum.default, (offsets, values, 1)),
        "segment_sum flat": (OPS.segment_sum.default, (offsets[:3], values.detach()[:, 0].requires_grad_(), 2)),
        "segment_sum ids": (OPS.segment_sum.default, (offsets, torch.arange(6, device=device), 1)),
        "segment_spread": (OPS.segment_spread.default, (offsets, sums, 8, 1)),
        "offsets_range": (OPS.offsets_range.default, (offsets, 6)),
        "complete_cumsum": (OPS.complete_cumsum.default, (torch.tensor([[2, 0, 1], [1, 1, 1]], device=device),)),
        "invert_permute": (OPS.invert_permute.default, (torch.tensor([2, 0, 1], device=device),)),
    }


@pytest.mark.parametrize("name", op_calls(torch.device("cpu")))
@pytest.mark.parametrize("device", UPDATES)
def test_opcheck(device: str, name: str) -> None:
    op, args = op_calls(torch_device(device))[name]
    torch.library.opcheck(op, args)


@pytest.mark.parametrize("device", UPDATES)
def test_compiled_forward_and_backward_equal_eager(where: torch.device) -> None:
    def loss(values: Tensor, lengths: Tensor) -> Tensor:
        offsets = complete_cumsum(lengths)
        places = offsets_range(offsets, values.shape[0])
        sums = segment_sum(offsets, values * places)
        packed = pack_segments(values, offsets_to_lengths(offsets), 2)
        again = unpack_segments(packed, lengths, total=values.shape[0])
        return sums.sin().sum() + packed.cos().sum() + again.exp().sum() + invert_permute(lengths.argsort())[0]

    assert_compiled_equals_eager(
        loss,
        (
            (torch.linspace(-1, 1, sum(sizes), device=where).requires_grad_(), torch.tensor(sizes, device=where))
            for sizes in ([3, 0, 2], [3, 5, 1], [3, 2, 1, 4])
        ),
    )
