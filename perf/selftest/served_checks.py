"""Checks of the ops that do what FBGEMM's names ask for beside the modules: few bits, requests, parts of bags, hashes.

`SERVED` is the table of them: compilers, the executor of compiled kernels and tests take calls from here, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardwise.kernels import hashes, pieces
from shardwise.kernels.jagged import requests
from shardwise.kernels.lookup import bound_ids, pruned
from shardwise.kernels.quantized import fp8_rows, fused_rows, small_floats

from .check import LENGTHS, Check, check, eighths, offsets_of, random
from .tolerances import SAME, SUM

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_TYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.int32: "i32", torch.int64: "i64"}
ROWS = sum(LENGTHS)


@dataclass(frozen=True)
class Served:
    """A call of an op (`torch.ops.shardwise`), its reference, and the kernels that it launches ("pieces.take").

    `writes` are the inputs that the op changes, tensors or lists of them, compared beside its result if there is one.
    """

    op: str
    words: str
    reference: Callable[..., Any]
    inputs: Callable[..., Sequence[Any]]
    kernels: str
    writes: tuple[int, ...] = ()

    def call(self, *given: Any) -> Any:
        """The op's result, and what it wrote."""
        return self._with_written(getattr(torch.ops.shardwise, self.op)(*given), given)

    def call_reference(self, *given: Any) -> Any:
        """The reference's."""
        return self._with_written(self.reference(*given), given)

    def _with_written(self, result: Any, given: Sequence[Any]) -> Any:
        if not self.writes:
            return result
        changed = [each for i in self.writes for each in (given[i] if isinstance(given[i], list) else [given[i]])]
        results = [] if result is None else result if isinstance(result, tuple) else [result]
        return (*results, *changed)


def few_numbers(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float32, broken: bool = True) -> Tensor:
    """Numbers of all sizes, among them zeros and halves of steps, a row of zeros, one of equals, infinity and NaN."""
    generator = random(seed)
    x = torch.randn(shape, generator=generator) * 2.0 ** torch.randint(-20, 12, shape, generator=generator)
    flat = x.view(-1)
    flat[::5] = (flat[::5] * 16).round() / 16
    flat[::11] *= 0.0
    if len(shape) > 1 and shape[0] > 4:
        x[0], x[1], x[2] = x[2], 0.0, 0.75
        if broken:
            x[3, shape[1] // 2] = float("nan")
            x[4, 0] = -float("inf")
    return x.to(dtype)


def _codes(*shape: int) -> Tensor:
    return torch.randint(0, 256, shape, generator=random(2)).to(torch.uint8)


def _small_floats() -> Iterator[Served]:
    of = small_floats
    for broken in (False, True):
        yield Served(
            "float_to_bfloat16", "700 numbers" + " infinity and NaN" * broken, of.float_to_bfloat16_ref,
            lambda broken=broken: [few_numbers(7, 100, broken=broken)], "quantized.small_floats.to_bfloat16",
        )  # fmt: skip
    for ebits, bias in ((4, 7), (5, 15), (2, 3), (7, 63)):
        most = 2.0 ** ((1 << ebits) - 1 - bias)
        words = f"1-{ebits}-{7 - ebits}, bias {bias}"
        yield Served(
            "to_float8", words, of.to_float8_ref,
            lambda ebits=ebits, bias=bias, most=most: [few_numbers(7, 100), ebits, bias, most],
            "quantized.small_floats.to_float8",
        )  # fmt: skip
        yield Served(
            "from_float8", words, of.from_float8_ref, lambda ebits=ebits, bias=bias: [_codes(7, 100), ebits, bias],
            "quantized.small_floats.from_float8",
        )  # fmt: skip
    for box, dim in ((8, 32), (5, 12), (100, 300), (1, 7), (4, 1), (2000, 4100)):
        yield Served(
            "share_exponents", f"boxes of {box} of {dim}", of.share_exponents_ref,
            lambda box=box, dim=dim: [few_numbers(6, dim), box, 3, 15, 65504.0],
            "quantized.small_floats.share_exponents",
        )  # fmt: skip


def _fp8_rows() -> Iterator[Served]:
    of = fp8_rows
    for forward, (dim, part), dtype in (
        (True, (20, 20), torch.float32), (False, (7, 8), torch.float16), (True, (128, 128), torch.bfloat16),
        (True, (30, 8), torch.float32), (False, (4100, 4100), torch.float32), (True, (1023, 128), torch.float32),
    ):  # fmt: skip
        words = f"{'1-4-3' if forward else '1-5-2'} D={dim} parts of {part} {_TYPES[dtype]}"
        least, parts = (1e-20 if dim <= part else 0.0), -(-dim // part)
        surplus = 0 if least else parts * part - dim
        yield Served(
            "to_fp8_parts", words, of.to_fp8_parts_ref,
            lambda dim=dim, part=part, dtype=dtype, least=least, parts=parts, surplus=surplus, forward=forward: [
                few_numbers(7, dim, dtype=dtype, broken=False), part, least, parts - 1, surplus, forward
            ],
            "quantized.fp8_rows.to_fp8_parts",
        )  # fmt: skip
        made = partial(_fp8_bytes, dim, part, forward)
        if parts > 1:
            yield Served(
                "fp8_part_ends", words, of.fp8_part_ends_ref, lambda made=made, part=part: [made(), part],
                "quantized.fp8_rows.fp8_part_ends",
            )  # fmt: skip
        yield Served(
            "from_fp8_parts", words, of.from_fp8_parts_ref,
            lambda made=made, dim=dim, part=part, parts=parts, forward=forward, dtype=dtype: [
                made(), of.fp8_part_ends_ref(made(), part) if parts > 1 else None, dim + 3 * (parts > 1), part, forward,
                dtype,
            ],
            "quantized.fp8_rows.from_fp8_parts",
        )  # fmt: skip


def _fp8_bytes(dim: int, part: int, forward: bool) -> Tensor:
    surplus = -dim % part
    return fp8_rows.to_fp8_parts_ref(eighths(5, dim), part, 0.0, -(-dim // part) - 1, surplus, forward)


def _fused_rows() -> Iterator[Served]:
    of = fused_rows
    for bits, wide, dim, dtype in (
        (8, True, 20, torch.float32), (8, True, 7, torch.float16), (8, True, 128, torch.bfloat16),
        (8, True, 1023, torch.float32), (4, False, 128, torch.float32), (2, False, 24, torch.float16),
        (1, False, 16, torch.float32), (3, False, 12, torch.float32), (8, False, 6, torch.bfloat16),
    ):  # fmt: skip
        words = f"int{bits} {'fp32' if wide else 'fp16'} scales D={dim} {_TYPES[dtype]}"
        yield Served(
            "to_fused_rows", words, of.to_fused_rows_ref,
            lambda bits=bits, wide=wide, dim=dim, dtype=dtype: [
                # without zeros of both signs, of which a row's lowest number may be either
                eighths(9, dim, dtype=dtype) * torch.arange(9)[:, None].to(dtype) + 0.0, bits, wide, None
            ],
            "quantized.fused_rows.to_fused_rows",
        )  # fmt: skip
        for last in (True, False):
            yield Served(
                "from_fused_rows", f"{words}, scales {'behind' if last else 'in front'}", of.from_fused_rows_ref,
                lambda bits=bits, wide=wide, dim=dim, dtype=dtype, last=last: [
                    _fused_bytes(bits, wide, dim, last), bits, wide, last, dtype
                ],
                "quantized.fused_rows.from_fused_rows",
            )  # fmt: skip
    for bits in (4, 3):
        yield Served(
            "to_fused_rows", f"int{bits} between given ends", of.to_fused_rows_ref,
            lambda bits=bits: [eighths(9, 24), bits, False, torch.tensor([[-1.0, 1.0]] * 8 + [[0.5, 0.5]])],
            "quantized.fused_rows.to_fused_rows",
        )  # fmt: skip
    for dtype, index in ((torch.float32, torch.int64), (torch.float16, torch.int32)):
        yield Served(
            "from_fused_tables", f"{_TYPES[dtype]} {_TYPES[index]} offsets", of.from_fused_tables_ref,
            lambda dtype=dtype, index=index: [
                torch.cat([_fused_bytes(8, True, dim, True) for dim in (5, 0, 12, 64)], 1),
                torch.tensor([0, 13, 21, 41, 113], dtype=index), 81, dtype,
            ],
            "quantized.fused_rows.from_fused_tables",
        )  # fmt: skip


def _fused_bytes(bits: int, wide: bool, dim: int, last: bool) -> Tensor:
    if dim == 0:
        return eighths(9, 2).view(torch.uint8)
    rows = fused_rows.to_fused_rows_ref(eighths(9, dim), bits, wide, None)
    return rows if last else rows.roll(8 if wide else 4, 1)


# items of five requests, of which one has none
REQUESTS, FEATURES = (0, 2, 2, 5, 6, 9), 3
ITEMS = REQUESTS[-1]


def _bags(count: int, seed: int) -> Tensor:
    return torch.randint(0, 6, (count,), generator=random(seed))


def _requests() -> Iterator[Served]:
    of, features, items = requests, FEATURES, ITEMS
    batch_offsets = torch.tensor(REQUESTS)
    for words, broadcast, most, dtype in (
        ("", False, items, torch.int64), (" broadcast", True, items, torch.int32), (" padded", False, 12, torch.int32)
    ):  # fmt: skip
        bags = features * (len(REQUESTS) - 1 if broadcast else items)
        yield Served(
            "reorder_request_lengths", f"lengths{words} {_TYPES[dtype]}", of.reorder_lengths_ref,
            lambda bags=bags, broadcast=broadcast, most=most, dtype=dtype: [
                _bags(bags, 3).to(dtype), batch_offsets.to(dtype), features, items, most, broadcast
            ],
            "jagged.requests.request_lengths",
        )  # fmt: skip
        for row, value in (((), torch.int64), ((), torch.float32), ((20,), torch.float32), ((3,), torch.float16)):
            if (broadcast or most != items) and row:
                continue
            kernels = "jagged.requests.request_values" + " lookup.sequence.gather" * bool(row)
            made = partial(_request_values, row, value, broadcast, most, dtype)
            yield Served(
                "reorder_request_values", f"{row or 'numbers'} {value}{words}".replace("torch.", ""),
                of.reorder_values_ref, made, kernels,
            )  # fmt: skip
            if row or value is torch.int64 and not broadcast and most == items:
                yield Served(
                    "restore_request_values", f"{row or 'numbers'} {value}".replace("torch.", ""),
                    of.restore_values_ref, partial(_restored_values, row, value), kernels,
                )  # fmt: skip


def _request_values(
    row: tuple[int, ...], value: torch.dtype, broadcast: bool, most: int, dtype: torch.dtype
) -> Sequence[Any]:
    bags = FEATURES * (len(REQUESTS) - 1 if broadcast else ITEMS)
    lengths, where = _bags(bags, 3), torch.tensor(REQUESTS)
    reordered = requests.reorder_lengths_ref(lengths, where, FEATURES, ITEMS, most, broadcast)
    ends = [offsets_of(each.tolist()).to(dtype) for each in (lengths, reordered)]
    values = eighths(int(lengths.sum()), *row).mul(8).to(value)
    return [values, *ends, where.to(dtype), ITEMS, most, broadcast, int(reordered.sum())]


def _restored_values(row: tuple[int, ...], value: torch.dtype) -> Sequence[Any]:
    values, offsets, reordered, where, items, *_, size = _request_values(row, value, False, ITEMS, torch.int64)
    return [values, offsets, reordered, where, items, size]


def _pieces() -> Iterator[Served]:
    of = pieces
    for value, index in ((torch.float32, torch.int64), (torch.int64, torch.int32), (torch.bool, torch.int64)):
        words = f"{value}, {_TYPES[index]}".replace("torch.", "")
        values = partial(_values, value)
        yield Served(
            "take_pieces", words, of.take_pieces_ref,
            lambda values=values, index=index: [values(), *(x.to(index) for x in _of_bags()[1:]), None],
            "pieces.take_pieces",
        )  # fmt: skip
        yield Served(
            "place_pieces", words, of.place_pieces_ref,
            lambda values=values, index=index: [
                values()[: int(_of_bags()[2][-1])], *(x.to(index) for x in _of_bags()[1:]), ROWS + 3
            ],
            "pieces.place_pieces",
        )  # fmt: skip
        yield Served(
            "take_masked", words, of.take_masked_ref,
            lambda values=values, index=index: [values(), _mask(), *(x.to(index) for x in _masked_bags()), None],
            "pieces.take_masked",
        )  # fmt: skip
    for index in (torch.int64, torch.int32):
        yield Served(
            "masked_counts", _TYPES[index], of.masked_counts_ref,
            lambda index=index: [_mask(), offsets_of().to(index)], "pieces.masked_counts",
        )  # fmt: skip
        yield Served(
            "inside_pieces", _TYPES[index], of.inside_pieces_ref,
            lambda index=index: [_of_bags()[1].to(index), _of_bags()[2].diff().to(index), ROWS + 3],
            "pieces.inside_pieces",
        )  # fmt: skip


def _values(dtype: torch.dtype) -> Tensor:
    values = eighths(ROWS + 3)
    return values > 0 if dtype is torch.bool else (values * 8).to(dtype)


def _of_bags() -> tuple[Tensor, Tensor, Tensor]:
    """Offsets of bags, where the piece of each begins, and offsets of the pieces."""
    lengths = torch.tensor(LENGTHS)
    start = torch.minimum(torch.tensor([1, 0, 0, 7, 0, 3, 0]), lengths)
    offsets = offsets_of()
    return offsets, offsets[:-1] + start, offsets_of((lengths - start).clamp(0, 4).tolist())


def _mask() -> Tensor:
    return torch.rand(ROWS + 3, generator=random(4)) < 0.6


def _masked_bags() -> tuple[Tensor, Tensor]:
    offsets = offsets_of()
    return offsets, offsets_of(pieces.masked_counts_ref(_mask(), offsets).tolist())


def _ids() -> Iterator[Served]:
    for dtype in (torch.int64, torch.int32):
        ids = partial(_large_ids, dtype)
        yield Served(
            "murmur_hash", _TYPES[dtype], hashes.murmur_hash_ref, lambda ids=ids: [ids(), -7, 2**62 + 5],
            "hashes.murmur_hash",
        )  # fmt: skip
        yield Served(
            "remapped_rows", f"{_TYPES[dtype]} ids", pruned.remapped_rows_ref, partial(_remapped, dtype),
            "lookup.pruned.remapped_rows",
        )  # fmt: skip
        yield Served(
            "hashed_rows", f"{_TYPES[dtype]} ids", pruned.hashed_rows_ref, partial(_hashed, dtype),
            "lookup.pruned.hashed_rows",
        )  # fmt: skip
        for correct in (True, False):
            yield Served(
                "bound_ids", f"{_TYPES[dtype]} ids{', put inside' * correct}", bound_ids.bound_ids_ref,
                lambda dtype=dtype, correct=correct: [
                    torch.tensor([5, -1, 9, 30, -2, 0, 4, 2**31 - 1, 3, 10], dtype=dtype), torch.tensor([9, 0, 4]),
                    torch.tensor([1, 6, 6, 10], dtype=dtype), correct,
                ],
                "lookup.bound_ids.bound_ids", writes=(0,),
            )  # fmt: skip
    for narrow, local, reserved, fallback in ((False, False, 0, True), (True, True, 2, True), (False, True, 0, False)):
        words = "int32 slots" * narrow + " slots of their own" * local + " without a fallback" * (not fallback)
        yield Served(
            "identity_slots", words.strip() or "all slots", pruned.identity_slots_ref,
            partial(_identities, narrow, local, reserved, fallback), "lookup.pruned.identity_slots",
        )  # fmt: skip


def _large_ids(dtype: torch.dtype) -> Tensor:
    most = 2 ** (31 if dtype == torch.int32 else 63) - 1
    return torch.randint(-most, most, (300,), generator=random(5)).to(dtype)


def _remapped(dtype: torch.dtype) -> Sequence[Any]:
    ids = torch.randint(-1, 12, (40,), generator=random(6)).to(dtype)
    remapping = torch.randint(-1, 9, (20,), generator=random(7), dtype=torch.int32)
    # the second of three tables is not pruned
    return [ids, torch.tensor([0, 9, 14, 14, 20, 31, 40], dtype=dtype), remapping, torch.tensor([0, 11, 11, 20])]


def _hashed(dtype: torch.dtype) -> Sequence[Any]:
    ids = torch.randint(-1, 30, (40,), generator=random(6)).to(dtype)
    table = torch.full((24, 2), -1, dtype=torch.int32)
    # keys in the places that probing from their hash leads to
    mixed = hashes.mix32(torch.arange(30)) if dtype == torch.int32 else hashes.mix64(torch.arange(30))
    for begin, slots, keys in ((0, 16, range(0, 30, 2)), (16, 8, range(3, 11))):
        for key in keys:
            at = int(hashes.unsigned_remainder(mixed[key], slots))
            while int(table[begin + at, 0]) != -1:
                at = (at + 1) % slots
            table[begin + at] = torch.tensor([key, key + 100], dtype=torch.int32)
    return [ids, torch.tensor([0, 9, 14, 14, 20, 31, 40], dtype=dtype), table, torch.tensor([0, 16, 16, 24])]


def _identities(narrow: bool, local: bool, reserved: int, fallback: bool) -> Sequence[Any]:
    ids = torch.randint(0, 2**40, (60,), generator=random(8))
    begins = torch.tensor([0, 40]).repeat(30) if local else None
    sizes = torch.tensor([40, 24]).repeat(30) if local else None
    table = torch.full((64, 1), -1, dtype=torch.int64)
    for n, id in enumerate(ids[:30].tolist()):
        begin, size = (0, 64) if begins is None or sizes is None else (int(begins[n]), int(sizes[n]))
        home = int(hashes.unsigned_remainder(hashes.murmur_hash_ref(ids[n]), size - reserved))
        places = [begin + (home + step) % (size - reserved) for step in range(size - reserved)]
        free = next(place for place in places if int(table[place]) == -1)
        table[free] = id % (2**31 - 1) if narrow else id
    return [ids, (table.int() if narrow else table)[:, 0], sizes, begins, 9, reserved, fallback]


SERVED: tuple[Served, ...] = (
    *_small_floats(),
    *_fp8_rows(),
    *_fused_rows(),
    *_requests(),
    *_pieces(),
    *_ids(),
)


def checks() -> Iterator[Check]:
    """Every call of the table, and gradients of ops that have some."""
    for each in SERVED:
        # bytes become bf16 on a GPU as in torch; Triton's interpreter cuts what these round
        rounds = each.op.startswith("from_") and "bf16" in each.words
        yield check(
            "ops by FBGEMM's names", f"{each.op}, {each.words}", each.op, each.call, each.call_reference, each.inputs,
            tolerance=SUM if rounds else SAME,
        )  # fmt: skip
    for op, reference, inputs in (
        ("reorder_request_values restore_request_values", requests.reorder_values_ref,
         partial(_request_values, (20,), torch.float32, False, ITEMS, torch.int64)),
        ("take_pieces place_pieces", pieces.take_pieces_ref,
         lambda: [_values(torch.float32), *_of_bags()[1:], None]),
    ):  # fmt: skip
        yield check(
            "ops by FBGEMM's names", f"gradient of {op.split()[0]}", op,
            getattr(torch.ops.shardwise, op.split()[0]), reference, inputs, leaves=(0,),
        )  # fmt: skip
