"""Sizes that change from batch to batch make Triton compile nothing anew, and every launch fits a grid.

Ops run on tensors of a GPU that is not there and that hold no values, so they may be of any size. What a launch would
compile is the key that Triton's own binder makes of its arguments.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from shardwise.kernels import memory
from shardwise.kernels._op import HAS_TRITON, INTERPRETED
from shardwise.kernels.features import Feature, Segment, flatten_segments, pack_features
from shardwise.kernels.jagged.unique import _of_tables
from shardwise.kernels.row_formats import ROW_FORMATS, TABLE_BOUNDARY, row_format
from shardwise.kernels.rule import RULES
from shardwise.perf.compile import cases as launched
from shardwise.perf.counts.fake_cuda import FakeCudaTensor, use_fake_cuda

pytestmark = pytest.mark.skipif(not HAS_TRITON or INTERPRETED, reason="needs triton, not its interpreter")

OPS = torch.ops.shardwise
DIMS = [128, 128, 20]
ROWS = 50_000
LAST = 2**31 - 1
_TYPES = {torch.int32: "int32", torch.int64: "int64"}


class Nothing:
    """What happens besides launches is not looked at."""

    def operation(self, op: Any, args: Any, kwargs: Any, result: Any) -> None: ...

    def allocation(self, memory: Any, op: Any, dtype: torch.dtype) -> None: ...

    def copy(self, where: str, waits: bool) -> None: ...

    def kernel(self, name: str) -> None: ...


class Launches:
    """Of every kernel the keys of what its launches would compile, and the largest of their grids."""

    def __init__(self) -> None:
        from triton.backends.compiler import GPUTarget
        from triton.compiler import make_backend

        self.backend = make_backend(GPUTarget("cuda", 90, 32))
        self.binders: dict[Any, Any] = {}
        self.keys: defaultdict[Any, set[str]] = defaultdict(set)
        self.grids: defaultdict[str, list[tuple[int, ...]]] = defaultdict(list)

    def note(self, kernel: Any, *args: Any, grid: Any, **options: Any) -> None:
        from triton.runtime.jit import create_function_from_signature

        if any(n <= 0 for n in grid):
            # triton launches no empty grid
            return
        if kernel not in self.binders:
            self.binders[kernel] = create_function_from_signature(kernel.signature, kernel.params, self.backend)
        options.pop("warmup", None)
        _, specialization, options = self.binders[kernel](*args, **options)
        self.keys[kernel].add(str((specialization, options)))
        self.grids[kernel.fn.__name__].append(tuple(grid))

    @contextmanager
    def noted(self) -> Iterator[None]:
        from triton.runtime.jit import JITFunction

        def run(kernel: Any, *args: Any, grid: Any, **options: Any) -> None:
            self.note(kernel, *args, grid=grid, **options)

        # a tensor without values needs no memory
        with (
            use_fake_cuda(Nothing()),
            patch.object(JITFunction, "run", run),
            patch.object(memory, "_memory_of", lambda device: None),
        ):
            yield


def gpu(*shape: int, dtype: torch.dtype = torch.float32, shift: int = 0) -> Tensor:
    """A tensor without values; with a shift it is a slice that begins so many numbers into its memory."""
    with _disable_current_modes():
        numbers = torch.empty(shift + torch.Size(shape).numel(), dtype=dtype, device="meta")
        return FakeCudaTensor(numbers[shift:].view(shape))


class Batch:
    """Sizes of a batch: ids, samples, what is selected of them, and by how much ids and the like are shifted."""

    def __init__(self, ids: int, samples: int, other: int, shift: int, features: int = 3) -> None:
        self.n, self.b, self.m, self.shift, self.f = ids, samples, other, shift, features

    def __repr__(self) -> str:
        return f"Batch({self.n}, {self.b}, {self.m}, {self.shift}, {self.f})"

    def ids(self, n: int | None = None, dtype: torch.dtype = torch.int64) -> Tensor:
        return gpu(self.n if n is None else n, dtype=dtype, shift=self.shift)

    def offsets(self, bags: int | None = None, dtype: torch.dtype = torch.int64) -> Tensor:
        return gpu((self.f * self.b if bags is None else bags) + 1, dtype=dtype, shift=self.shift)

    def weights(self) -> Tensor:
        return gpu(self.n, shift=self.shift)


def tables(dims: list[int], itemsize: int = 4, boundary: int | None = None) -> tuple[Any, list[int]]:
    base, features = 0, []
    for t, dim in enumerate(dims):
        features.append(Feature(base, ROWS, dim, t * ROWS))
        base += -(-ROWS * dim // 64) * 64
    packed = pack_features(features) if boundary is None else pack_features(features, boundary=boundary)
    segments = [Segment(dim, t * ROWS, (t + 1) * ROWS, features[t].base) for t, dim in enumerate(dims)]
    return (base, packed), flatten_segments(segments)


def on_gpu(tensor: Tensor) -> Tensor:
    with _disable_current_modes():
        return FakeCudaTensor(tensor.to("meta"))


def look_up(batch: Batch, index: torch.dtype = torch.int64) -> None:
    (size, packed), segments = tables(DIMS)
    where = batch.ids(dtype=index), batch.offsets(dtype=index)
    table, features = gpu(size), on_gpu(packed)
    for weights in (None, batch.weights()):
        OPS.pooled_lookup(table, *where, weights, features, DIMS, segments, "sum", torch.float32)
    OPS.per_id_weight_gradient(gpu(batch.b, sum(DIMS)), table, *where, features, DIMS, segments, "sum")
    OPS.check_ids(*where, features, gpu(3, dtype=torch.int64), list("abc"), True, False, gpu(3, dtype=torch.int64))
    OPS.check_gradient(gpu(batch.b, sum(DIMS)), gpu(3, dtype=torch.int64))
    (size, packed), segments = tables([128, 128, 128])
    OPS.sequence_lookup(gpu(size), *where, on_gpu(packed), 128, segments, torch.float32)


def update(batch: Batch, rule: str = "rowwise_adagrad") -> None:
    (size, packed), segments = tables(DIMS)
    where, table, features = (batch.ids(), batch.offsets()), gpu(size), on_gpu(packed)
    kinds = RULES[rule].kinds
    states = [gpu(len(DIMS) * ROWS if kind == "row" else size) for kind in kinds]
    for weights in (None, batch.weights()):
        OPS.fused_update(
            table, states, gpu(1, dtype=torch.int64), gpu(batch.b, sum(DIMS)), *where, weights, features, DIMS,
            segments, rule, gpu(len(RULES[rule].hyper) + 1, dtype=torch.float64), gpu(3, dtype=torch.int64), "sum",
            "none", None, None,
        )  # fmt: skip
    index = OPS.update_index(*where, None, features, segments, sum(DIMS), "sum", False)
    OPS.fused_update(
        table, states, gpu(1, dtype=torch.int64), gpu(batch.b, sum(DIMS)), *where, None, features, DIMS, segments, rule,
        gpu(len(RULES[rule].hyper) + 1, dtype=torch.float64), gpu(3, dtype=torch.int64), "sum", "none", None, None,
        index=index,
    )  # fmt: skip


def gradient(batch: Batch) -> None:
    (size, packed), segments = tables(DIMS)
    where = batch.ids(), batch.offsets(), None, on_gpu(packed), DIMS, segments, "sum"
    OPS.lookup_gradient(gpu(size), gpu(batch.b, sum(DIMS)), *where)


def quantized(batch: Batch, format: str) -> None:
    kind, (_, packed) = row_format(format), tables([128, 128, 128], boundary=TABLE_BOUNDARY)[0]
    payload = gpu(3 * ROWS * kind.row_bytes(128), dtype=torch.uint8)
    scales = gpu(3 * ROWS * kind.parts, dtype=kind.scale_dtype)
    where, features = (batch.ids(), batch.offsets()), on_gpu(packed)
    for weights in (None, batch.weights()):
        OPS.quantized_pooled_lookup(payload, scales, *where, weights, features, [128] * 3, format, torch.float32)
    OPS.quantized_sequence_lookup(payload, scales, *where, features, 128, format, torch.float32)
    OPS.quantize_rows(gpu(batch.m, 128), format, kind.scale_dtype)
    rows = gpu(batch.m, kind.row_bytes(128), dtype=torch.uint8), gpu(batch.m, kind.parts, dtype=kind.scale_dtype)
    OPS.dequantize_rows(*rows, 128, format, torch.float32)


def segments(batch: Batch) -> None:
    bags = batch.f * batch.b
    ends, others, order = batch.offsets(), batch.offsets(batch.m), batch.ids(batch.m)
    for values in ([batch.ids()], [batch.ids(), batch.weights()], [gpu(batch.n, 128)]):
        OPS.move_segments(values, order, ends, others, batch.m * 3)
        if values[0].is_floating_point():
            OPS.collect_segments(values, order, others, ends, batch.m * 3)
    OPS.collect_segments([batch.weights()], order, others, ends, batch.m * 3)
    OPS.expand_into_jagged_permute(order, ends, others, batch.m * 3)
    OPS.segment_sum(ends, batch.weights(), 1)
    OPS.segment_sum(batch.offsets(batch.f), gpu(batch.n, 128), batch.b)
    OPS.segment_spread(ends, gpu(bags, 128), batch.n, 1)
    OPS.offsets_range(ends[:-1], batch.n)
    OPS.invert_permute(order)
    OPS.complete_cumsum(batch.ids(bags))
    OPS.complete_cumsum(gpu(batch.f, batch.b, dtype=torch.int32))


def select(batch: Batch) -> None:
    indices, ends = batch.ids(batch.m), batch.offsets()
    for values, weights in ((batch.ids(), None), (batch.ids(), batch.weights()), (gpu(batch.n, 128), None)):
        OPS.jagged_index_select(values, weights, ends, indices, batch.b, torch.int64, 2 * batch.n)
    OPS.jagged_index_add(
        gpu(batch.n, 128), batch.offsets(batch.f * batch.m), indices, ends, batch.b, batch.n + 5
    )  # fmt: skip
    OPS.jagged_index_add(batch.weights(), batch.offsets(batch.f * batch.m), indices, ends, batch.b, batch.n + 5)


def regroup(batch: Batch) -> None:
    from shardwise.kernels.jagged.regroup_plan import plan_pieces

    runs = plan_pieces([128, 64], [[(0, 0, 64), (1, 0, 64)], [(0, 64, 64)]]).runs
    OPS.regroup_columns([gpu(batch.b, 128), gpu(batch.b, 64)], *map(list, runs[:1]), runs.repeats, list(runs.widths))


def padded(batch: Batch) -> None:
    for dims in (1, 2):
        offsets = [batch.offsets(batch.b), batch.offsets(batch.m)][:dims]
        extents = [50, 7][:dims]
        for values in (gpu(batch.n, 128), batch.ids()):
            rest = values.shape[1:]
            OPS.jagged_to_padded_dense(values, offsets, extents, 0.0)
            OPS.padded_dense_to_jagged(gpu(batch.b, *extents, *rest, dtype=values.dtype), offsets, batch.n)
        values, dense = gpu(batch.n, 128), gpu(batch.b, *extents, 128)
        OPS.jagged_dense_add(values, offsets, dense)
        OPS.jagged_dense_add_jagged(values, offsets, dense)
        OPS.jagged_dense_mul(values, offsets, dense)
        OPS.padded_jagged_product(values, values, offsets, extents)


def bags_of_rows(batch: Batch) -> None:
    ends, rows, most = batch.offsets(batch.b), gpu(batch.n, 64), 50
    for limit in (None, most):
        OPS.jagged_softmax(rows, ends, limit)
        OPS.jagged_softmax_gradient(rows, rows, ends, limit)
        OPS.jagged_dense_bmm(rows, ends, gpu(batch.b, 64, 64), limit, False)
        OPS.jagged_dense_bmm(rows, ends, gpu(batch.b, 64, 64), limit, True)
        OPS.jagged_jagged_bmm(rows, rows, ends, limit)
    OPS.jagged_vector_product(gpu(batch.b, batch.m), rows, ends)
    OPS.jagged_vector_product_by_rows(gpu(batch.b, 64), gpu(batch.b, batch.m), ends, batch.n)
    OPS.jagged_vector_product_by_vectors(gpu(batch.b, 64), rows, ends, batch.m)
    where = gpu(batch.f + 1, dtype=torch.int64), batch.offsets(), batch.ids()
    OPS.batched_unary_embeddings(gpu(2, 3 * ROWS, 1), *where)
    OPS.batched_unary_embeddings_gradient(gpu(2, batch.b, batch.f), *where, 3 * ROWS)


def buckets(batch: Batch) -> None:
    lengths, sizes = batch.ids(batch.f * batch.b), gpu(batch.f, dtype=torch.int64)
    OPS.block_bucketize(lengths, batch.ids(), sizes, 8, None, None, None, None, False, None, False, False)
    OPS.block_bucketize(lengths, batch.ids(), sizes, 8, batch.weights(), None, None, None, False, None, True, True)
    # numbers of tables are tensors of the host
    _of_tables((ROWS,) * 3, (0, 1, 2))
    OPS.jagged_unique(batch.ids(), batch.offsets(), [ROWS] * 3, [0, 1, 2])
    bins = gpu(48, dtype=torch.float64)
    for segment in ((None, None), (batch.ids(batch.m), batch.ids())):
        OPS.histogram_binning(
            gpu(batch.n, shift=batch.shift), *segment, 2, bins, bins, None, 16, 0.5, 0.0, 0.0625, 10, 0.5
        )  # fmt: skip


def few_bits(batch: Batch) -> None:
    x = gpu(batch.m, 128)
    OPS.float_to_bfloat16(gpu(batch.n, shift=batch.shift))
    OPS.to_float8(gpu(batch.n, shift=batch.shift), 4, 7, 240.0)
    OPS.from_float8(gpu(batch.n, dtype=torch.uint8, shift=batch.shift), 4, 7)
    OPS.share_exponents(x, 16, 3, 15, 65504.0)
    OPS.to_fp8_parts(x, 128, 1e-20, 0, 0, True)
    OPS.to_fp8_parts(x, 48, 0.0, 2, 16, True)
    rows = gpu(batch.m, 3 * 56, dtype=torch.uint8)
    if batch.m:
        ends = OPS.fp8_part_ends(rows, 48)
        OPS.from_fp8_parts(rows, ends, 128, 48, True, torch.float32)
    OPS.to_fused_rows(x, 8, True, None)
    OPS.from_fused_rows(gpu(batch.m, 136, dtype=torch.uint8), 8, True, True, torch.float32)
    OPS.from_fused_tables(gpu(batch.m, 136 * 2, dtype=torch.uint8), gpu(3, dtype=torch.int64), 256, torch.float32)


def requests(batch: Batch) -> None:
    """Of as many items as there are samples, and two features."""
    where, bags = batch.offsets(batch.m), 2 * batch.b
    for broadcast, most in ((False, batch.b), (True, batch.b)):
        OPS.reorder_request_lengths(batch.ids(2 * batch.m if broadcast else bags), where, 2, batch.b, most, broadcast)
    ends = batch.offsets(bags), batch.offsets(bags)
    for values in (batch.ids(), gpu(batch.n, 128)):
        OPS.reorder_request_values(values, *ends, where, batch.b, batch.b, False, batch.n)
        OPS.restore_request_values(values, *ends, where, batch.b, batch.n)


def parts_of_bags(batch: Batch) -> None:
    begins, ends = batch.ids(batch.m), batch.offsets(batch.m)
    OPS.take_pieces(batch.weights(), begins, ends, 3 * batch.m)
    OPS.place_pieces(batch.weights(), begins, ends, 3 * batch.m)
    OPS.inside_pieces(begins, begins, batch.n)
    mask = gpu(batch.n, dtype=torch.bool, shift=batch.shift)
    OPS.masked_counts(mask, batch.offsets())
    OPS.take_masked(batch.weights(), mask, batch.offsets(), batch.offsets(), batch.n // 2)


def hashed(batch: Batch) -> None:
    OPS.murmur_hash(batch.ids(), 0, 0)
    OPS.bound_ids(batch.ids(), gpu(3, dtype=torch.int64), batch.offsets(3), True)
    ends, offsets = gpu(batch.f + 1, dtype=torch.int64), batch.offsets()
    OPS.remapped_rows(batch.ids(), offsets, gpu(ROWS, dtype=torch.int32), ends)
    OPS.hashed_rows(batch.ids(), offsets, gpu(ROWS, 2, dtype=torch.int32), ends)
    slots = gpu(ROWS, 1, dtype=torch.int64)[:, 0]
    OPS.identity_slots(batch.ids(), slots, None, None, 128, 0, True)
    OPS.identity_slots(batch.ids(), slots, batch.ids(), batch.ids(), 128, 0, True)


def rows_of_tiers(batch: Batch) -> None:
    """Moves of as many rows as a batch misses, victims of two tables' slots, values of fresh rows."""
    parts, records = [gpu(ROWS, 128), gpu(ROWS)], gpu(4 * ROWS, 576, dtype=torch.uint8)
    OPS.move_rows(parts, records, batch.ids(), batch.ids(), batch.ids())
    keys, borders = gpu(batch.n, dtype=torch.int32), gpu(3, dtype=torch.int64)
    OPS.lowest(keys, keys, borders, gpu(2, dtype=torch.int64, shift=batch.shift), batch.m)
    bins, picked = gpu(2048, dtype=torch.int32), gpu(batch.n, dtype=torch.int64, shift=batch.shift)
    OPS.pick_lowest(keys, keys, borders, gpu(2, dtype=torch.int64, shift=batch.shift), bins, picked)
    for kind in ("uniform", "normal"):
        OPS.make_rows(
            parts, batch.ids(), batch.ids(), gpu(batch.n, dtype=torch.bool), batch.b, 3, 7, 0, kind, 0.0, 1.0, [0.0]
        )
        OPS.initial_rows(batch.ids(), gpu(1, dtype=torch.int64), 0, 128, kind, 0.0, 1.0, torch.float32)


def batches_of_caches(batch: Batch) -> None:
    """What comes in place of rows, places in the ring and numbers of batches hang on the batch; tables do not."""
    (_, packed), _ = tables(DIMS)
    features, count = on_gpu(packed), len(DIMS)
    slots, held = gpu(ROWS, dtype=torch.int32), gpu(ROWS, dtype=torch.int32)
    score, key, flags = gpu(ROWS, dtype=torch.int64), gpu(ROWS, dtype=torch.int32), gpu(ROWS, dtype=torch.bool)
    slot_of, bits = gpu(count * ROWS, dtype=torch.int32), gpu(count * ROWS // 32 + 1, dtype=torch.int32)
    counts, tallies = gpu(4, count, dtype=torch.int64, shift=batch.shift), gpu(1, dtype=torch.int64, shift=batch.shift)
    borders, first = gpu(count + 1, dtype=torch.int64), gpu(count, dtype=torch.int64)
    ids, offsets = batch.ids(), gpu(count * batch.b + 1, dtype=torch.int64, shift=batch.shift)
    numbers = 3, 7 + batch.n, 40 + batch.b
    OPS.claim_rows(
        ids, offsets, features, first, slot_of, borders, held, slots, score, key, bits, tallies, counts, slots[:0],
        batch.m, *numbers, True, True,
    )  # fmt: skip
    OPS.mark_rows(ids, offsets, features, borders, bits, tallies, counts[0])
    OPS.list_rows(bits, tallies, batch.n)
    row_of = gpu(ROWS, dtype=torch.int64)
    OPS.take_slots(
        ids, batch.ids(), borders, slot_of, row_of, held, flags, flags, score, key, counts, slots[:0], *numbers
    )
    OPS.place_rows(gpu(batch.n, dtype=torch.int64), offsets, first, slot_of, gpu(30, dtype=torch.int64))
    OPS.release_slots(batch.ids(), held, flags, True)
    ring = gpu(2 * batch.n, dtype=torch.int32, shift=batch.shift)
    OPS.link_rows(ids, slot_of, row_of, ring, key, batch.b, batch.m, batch.n)
    OPS.expect_rows(ids, slot_of, ring, key, batch.m)


JOBS: dict[str, Callable[[Batch], None]] = {
    "lookups": look_up,
    "update": update,
    "gradient": gradient,
    **{f"quantized {format}": lambda batch, format=format: quantized(batch, format) for format in ROW_FORMATS},
    "segments": segments,
    "select": select,
    "regroup": regroup,
    "padded": padded,
    "rows": bags_of_rows,
    "buckets": buckets,
    "few bits": few_bits,
    "requests": requests,
    "parts of bags": parts_of_bags,
    "hashes": hashed,
    "rows of tiers": rows_of_tiers,
    "batches of caches": batches_of_caches,
}


def batches(count: int) -> list[Batch]:
    """Two usual batches, then every kind of size: none, one, a multiple of 16, a slice at an odd place."""
    draw = random.Random(7)
    made = [Batch(4091, 101, 57, 0), Batch(3001, 77, 90, 1)]
    special = [(1, 1, 1), (4096, 64, 32), (0, 5, 3), (16, 16, 16), (17, 1, 1), (5000, 256, 1), (1, 300, 48)]
    for i in range(count - 2):
        n, b, m = special[i // 2 % 7] if i % 2 else (draw.randint(2, 6000), draw.randint(2, 300), draw.randint(2, 200))
        made.append(Batch(n, b, m, draw.randint(0, 3)))
    return made


# of these several are compiled for one job, by what a batch is like: as many at most, and why
SEVERAL = {
    # levels of chunks by the number of ids, which index each level's kind of tile, the last of which ends what is open;
    # one program for few ids; keys of an index made ahead count no step
    "_row_keys_kernel": 8, "_mark_kernel": 6, "_chunk_kernel": 16, "_chunk_alone_kernel": 8, "_update_kernel": 16,
    # three sizes of block, int32 and int64
    "_cumsum_kernel": 6,
    # three tiles by the mean length of a bag, with a matrix and with its transpose
    "_dense_bmm_kernel": 6,
}  # fmt: skip


@cache
def noted(job: str) -> tuple[dict[Any, set[str]], Launches]:
    """What 50 batches of a job would compile: after the first two, and in all."""
    launches, first = Launches(), dict[Any, set[str]]()
    with launches.noted():
        for number, batch in enumerate(batches(50)):
            JOBS[job](batch)
            if number == 1:
                first = {kernel: set(keys) for kernel, keys in launches.keys.items()}
    return first, launches


@pytest.mark.parametrize("job", JOBS)
def test_after_two_batches_of_a_job_nothing_is_compiled(job: str) -> None:
    """Each kernel had a variant for N = 1, N % 16 == 0, other N, and ids that were a slice: 0.3 to 1 s in some step."""
    first, launches = noted(job)
    assert launches.keys
    for kernel, keys in launches.keys.items():
        name = kernel.fn.__name__
        if name in SEVERAL:
            assert len(keys) <= SEVERAL[name], name
        else:
            new = keys - first.get(kernel, set())
            assert not new, (name, first.get(kernel), new)


def test_every_kernel_was_launched_by_these_jobs() -> None:
    launched_here = {kernel for job in JOBS for kernel in noted(job)[1].keys}
    every = {kernel for module in launched._MODULES for _, kernel in launched.kernels_of(module)}
    assert {kernel.fn.__name__ for kernel in every - launched_here} == set()


def test_a_size_that_is_specialized_is_seen() -> None:
    """The first two batches of a job are not all there is: a kernel of which nothing is said compiles three times."""
    from triton.runtime.jit import JITFunction

    from shardwise.kernels.lookup import finite

    plain, launches = JITFunction(finite._check_gradient_kernel.fn), Launches()
    for n in (100, 7, 16, 1, 32, 9):
        launches.note(plain, gpu(n), gpu(3, dtype=torch.int64), n, 128, LAST, grid=(1,))
    assert len(launches.keys[plain]) == 3
    for shift in (1, 4):
        launches.note(plain, gpu(9, shift=shift), gpu(3, dtype=torch.int64), 9, 128, LAST, grid=(1,))
    assert len(launches.keys[plain]) == 4


# more ids than an int32 counts, and more bags than a grid has places in y
LARGE = Batch(3_000_000_000, 70_001, 70_003, 0)


@pytest.mark.parametrize("job", JOBS)
def test_launches_of_large_batches_fit_a_grid(job: str) -> None:
    """CUDA takes 65,535 programs along y and z, and 2^31 - 1 along x."""
    launches = Launches()
    # no more can be sorted on a GPU; without values torch makes a matrix of a sum of all numbers before one
    most = {"update": LAST, "gradient": LAST, "rows": 400_000_000, "buckets": 400_000_000, "rows of tiers": LAST}
    batch = Batch(most.get(job, LARGE.n), LARGE.b, LARGE.m, 0)
    with launches.noted():
        JOBS[job](batch)
    assert launches.grids
    for name, grids in launches.grids.items():
        for x, y, z in [(*grid, 1, 1)[:3] for grid in grids]:
            assert x <= LAST and y <= 65_535 and z <= 65_535, (name, grids)


def test_bags_of_more_columns_than_a_grid_has_places_in_y_are_padded() -> None:
    """16.7 million numbers of fp32 a bag were the most: blocks of a bag's columns lay along y."""
    launches = Launches()
    with launches.noted():
        OPS.jagged_to_padded_dense(gpu(1000, 128), [gpu(4, dtype=torch.int64)], [1 << 20], 0.0)
    ((blocks,),) = launches.grids["_to_padded_kernel"]
    assert 65_535 < blocks <= LAST


TOO_MANY = Batch(2**31, 1001, 2**31, 0)
OFFSETS = TOO_MANY.offsets(2**31)
SORTS: dict[str, Callable[[], object]] = {
    "the update of a lookup: 2,147,483,648 ids": lambda: update(Batch(2**31, 1001, 5, 0)),
    "block_bucketize: 2,147,483,648 ids": lambda: buckets(TOO_MANY),
    "jagged_unique: 2,147,483,648 ids": lambda: OPS.jagged_unique(
        TOO_MANY.ids(), TOO_MANY.offsets(), [ROWS] * 3, [0, 1, 2]
    ),
    "the gradient of batched_unary_embeddings: 2,147,483,648 ids": lambda: OPS.batched_unary_embeddings_gradient(
        gpu(2, 1001, 3), gpu(4, dtype=torch.int64), TOO_MANY.offsets(), TOO_MANY.ids(), 3 * ROWS
    ),
    "jagged_index_add: 2,147,483,648 indices": lambda: OPS.jagged_index_add(
        TOO_MANY.weights(), OFFSETS, TOO_MANY.ids(), TOO_MANY.offsets(5), 5, 10
    ),
    "the gradient of moved segments: 2,147,483,648 segments": lambda: OPS.collect_segments(
        [TOO_MANY.weights()], TOO_MANY.ids(), TOO_MANY.offsets(5), OFFSETS, 10
    ),
}


@pytest.mark.parametrize("text", SORTS)
def test_more_than_torch_sorts_on_a_gpu_is_refused_by_name(text: str) -> None:
    """torch says that "the dimension being sorted can not have more than INT_MAX elements", and not whose it is."""
    limit = f"^{text} in one call; torch.sort takes at most 2,147,483,647 on a GPU: split the batch"
    with Launches().noted(), pytest.raises(ValueError, match=limit):
        SORTS[text]()
