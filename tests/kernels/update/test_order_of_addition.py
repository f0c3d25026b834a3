"""The order of addition in the fused update, its transposed index, and that nothing is read on the host.

Takes a minute in the interpreter: each rule updates rows of a thousand hits again and again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from kernel_inputs import (
    CASES,
    DEVICES,
    HYPER,
    RULES,
    SMALL,
    UPDATES,
    Case,
    Inputs,
    assert_same_bits,
    inputs,
    optimizer,
    per_device,
    per_rule,
    torch_device,
    update_args,
    upstream,
)
from torch import Tensor
from torch._subclasses import FakeTensorMode

from shardwise.kernels import (
    RULES as DEFINED,
    Feature,
    Segment,
    configs,
    flatten_segments,
    fused_update,
    pack_features,
    persistent_grid,
)
from shardwise.kernels.cpu import update as cpu_update
from shardwise.kernels.features import bag_of_position
from shardwise.kernels.lookup import (
    bounds,
    finite,
    pooled,
    sequence,
    weight_gradient,
)
from shardwise.kernels.transpose import CHUNK, chunks_of, levels_for, transpose_index
from shardwise.kernels.update import row_chunks, row_keys, update

# A set of (row, gradient) pairs, each a bag of one id. The marked rows are hit 1, 31, ... times, in three levels.

HITS = {2: 1, 3: 31, 5: 32, 7: 33, 11: 100, 13: 1100}
ROWS, DIM = 64, 8


def marked_pairs() -> list[tuple[int, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    pairs = [(row, torch.randn(DIM, generator=generator)) for row, hits in HITS.items() for _ in range(hits)]
    return [pairs[i] for i in torch.randperm(len(pairs), generator=generator).tolist()]


def other_pairs(count: int, seed: int, rows: list[int] | None = None) -> list[tuple[int, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    rows = rows or [row for row in range(ROWS) if row not in HITS]
    picks = torch.randint(0, len(rows), (count,), generator=generator).tolist()
    return [(rows[pick], torch.randn(DIM, generator=generator)) for pick in picks]


def interleaved(a: list[tuple[int, Tensor]], b: list[tuple[int, Tensor]], seed: int) -> list[tuple[int, Tensor]]:
    """`a` and `b` merged at random; each keeps its own order."""
    generator = torch.Generator().manual_seed(seed)
    first = set(torch.randperm(len(a) + len(b), generator=generator)[: len(a)].tolist())
    sources = iter(a), iter(b)
    return [next(sources[i not in first]) for i in range(len(a) + len(b))]


def updated_rows(
    pairs: list[tuple[int, Tensor]], rule: str, device: torch.device, tables_before: int = 0
) -> dict[int, Tensor]:
    """The marked rows (weights and states side by side) after an update with `pairs`."""
    tables = [(9, 16)] * min(tables_before, 1) + [(17, DIM)] * (tables_before > 1) + [(ROWS, DIM)]
    features, segments, elements, first_row = [], [], 0, 0
    for rows, dim in sorted(tables, key=lambda table: -table[1]):
        features.append(Feature(elements, rows, dim, first_row))
        if segments and segments[-1].dim == dim:
            segments[-1] = segments[-1]._replace(end_row=first_row + rows)
        else:
            segments.append(Segment(dim, first_row, first_row + rows, elements))
        elements, first_row = elements + rows * dim, first_row + rows
    last = features[-1]
    weights = torch.randn(elements, generator=torch.Generator().manual_seed(5))
    weights[last.base :] = torch.randn(ROWS * DIM, generator=torch.Generator().manual_seed(4))
    defined = DEFINED[rule]
    states = [torch.full((first_row if kind == "row" else elements,), 0.5, device=device) for kind in defined.kinds]
    hyper = torch.tensor([*(HYPER.get(name, 0.0) for name in defined.hyper), 0.0], dtype=torch.float64)
    weights, dims, count = weights.to(device), [f.dim for f in features], len(pairs)
    ids = [torch.arange(count) % f.rows for f in features[:-1]] + [torch.tensor([row for row, _ in pairs])]
    columns = [torch.ones(count, f.dim) for f in features[:-1]] + [torch.stack([g for _, g in pairs])]
    fused_update(
        weights, states, torch.zeros(1, dtype=torch.int64, device=device),
        torch.cat(columns, dim=1).to(device), torch.cat(ids).to(device),
        torch.arange(count * len(features) + 1, device=device), None, pack_features(features, device), dims,
        flatten_segments(segments), rule, hyper.to(device),
        bounds.new_guard(device), "sum",
    )  # fmt: skip
    table = weights[last.base :].view(ROWS, DIM)
    result = {}
    for row in HITS:
        parts = [table[row]]
        for kind, state in zip(defined.kinds, states, strict=True):
            at = last.first_row + row
            parts.append(state[at : at + 1] if kind == "row" else state[last.base :].view(ROWS, DIM)[row])
        result[row] = torch.cat(parts).cpu()
    return result


def assert_same_rows(got: dict[int, Tensor], expected: dict[int, Tensor]) -> None:
    for row, bits in expected.items():
        assert torch.equal(got[row], bits), f"row {row}, hit {HITS[row]} times"


# one that adds over the row and keeps a sum of it
SUMS = ("rowwise_adagrad",)


@pytest.mark.parametrize(("device", "rule"), per_rule(UPDATES, SUMS))
def test_a_row_has_the_same_bits_alone_and_twice(device: str, rule: str) -> None:
    where, pairs = torch_device(device), marked_pairs()
    together = updated_rows(pairs, rule, where)
    assert_same_rows(updated_rows(pairs, rule, where), together)
    for row in HITS:
        alone = updated_rows([pair for pair in pairs if pair[0] == row], rule, where)
        assert torch.equal(alone[row], together[row]), f"row {row}, hit {HITS[row]} times"


@pytest.mark.parametrize(("device", "rule"), per_rule(UPDATES, SUMS))
def test_a_row_has_the_same_bits_behind_other_tables(device: str, rule: str) -> None:
    where, pairs = torch_device(device), marked_pairs()
    expected = updated_rows(pairs, rule, where)
    for tables_before in (1, 2):
        assert_same_rows(updated_rows(pairs, rule, where, tables_before), expected)


@pytest.mark.parametrize(("device", "rule"), per_rule(UPDATES, SUMS))
def test_a_row_has_the_same_bits_with_other_neighbours(device: str, rule: str) -> None:
    """Other rows before, between and behind, permuted, and 35 % of all ids on one other row."""
    where, pairs = torch_device(device), marked_pairs()
    expected = updated_rows(pairs, rule, where)
    others = other_pairs(200, seed=7)
    relabelled = [((row + 29) % ROWS, g) for row, g in others if (row + 29) % ROWS not in HITS]
    hot = other_pairs(len(pairs) * 35 // 65, seed=8, rows=[4])
    for mixed in (
        interleaved(pairs, others, seed=9),
        interleaved(pairs, others, seed=10),
        interleaved(pairs, relabelled, seed=9),
        interleaved(pairs, hot, seed=9),
        hot + pairs,
    ):
        assert_same_rows(updated_rows(mixed, rule, where), expected)


@pytest.mark.parametrize(("device", "rule"), per_rule(DEVICES[1:], SUMS))
def test_a_row_has_the_same_bits_on_every_tile_and_grid(
    device: str, where: torch.device, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks of a tile and programs of a grid; the columns of a tile are fixed by the dim (see update_tile)."""
    pairs = interleaved(marked_pairs(), other_pairs(100, seed=7), seed=9)
    expected = updated_rows(pairs, rule, where)
    own, block_d, warps = update.update_tile(DIM)
    for chunks, programs in ((1, 64), (8, 1), (16, 3), (32, 7)):
        if rule == "rowwise_adagrad" and device == "cuda":
            # the norm of a row follows the tile's layout: that is why the tile is a function of the dim alone
            chunks = own
        monkeypatch.setattr(update, "update_tile", lambda dim, chunks=chunks: (chunks, block_d, warps))
        monkeypatch.setattr(persistent_grid, "PERSISTENT_PROGRAMS", programs)
        assert_same_rows(updated_rows(pairs, rule, where), expected)


@pytest.mark.parametrize("device", DEVICES[1:])
def test_a_row_has_the_same_bits_however_a_launch_asks_for_memory(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a variant may force, on programs that go through several tiles each."""
    where, pairs = torch_device(device), interleaved(marked_pairs(), other_pairs(100, seed=7), seed=9)
    monkeypatch.setattr(persistent_grid, "PERSISTENT_PROGRAMS", 3)
    expected = updated_rows(pairs, "rowwise_adagrad", where)
    for forced in (
        {"update.next_entries": True, "update.prefetch": True},
        {"update.next_entries": True, "update.contiguous": True, "update.registers": 48},
        {"update.waves": 1},
    ):
        with configs.variant(forced):
            assert_same_rows(updated_rows(pairs, "rowwise_adagrad", where), expected)


@pytest.mark.parametrize("rule", RULES)
def test_a_row_has_the_same_bits_in_every_block_of_the_torch_path(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where = torch_device("cpu")
    pairs = interleaved(marked_pairs(), other_pairs(100, seed=7), seed=9)
    expected = updated_rows(pairs, rule, where)
    for rows in (1, 3, 40):
        monkeypatch.setattr(cpu_update, "_BLOCK_ELEMENTS", rows * DIM)
        assert_same_rows(updated_rows(pairs, rule, where), expected)


UNWEIGHTED_SUMS = [case for case in SMALL if not case.weighted and not any(mean for _, mean in case.features)]


@pytest.mark.parametrize(("device", "case"), [p for p in per_device(UNWEIGHTED_SUMS) if p.values[0] != "cpu"])
def test_the_kernel_and_the_torch_twin_give_the_same_bits(
    device: str, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For SGD and unweighted sums; the lr is a power of two, so that a fused multiply-add rounds as two steps do."""
    grad_seed = 1
    batch = inputs(case, torch_device(device))
    twin = inputs(case)
    state = optimizer("sgd", batch, lr=0.5)
    fused_update(*update_args(batch.weights, state, upstream(batch, grad_seed), batch))
    monkeypatch.setattr(update, "runs_kernel", lambda tensor: False)
    fused_update(*update_args(twin.weights, optimizer("sgd", twin, lr=0.5), upstream(twin, grad_seed), twin))
    assert_same_bits(batch.weights, twin.weights)


AT = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def naive_chunks(keys: list[int], low: int, high: int) -> tuple[list[list[int]], list[int], list[int], list[int]]:
    """Positions, row and slot of each chunk, and the keys of the slots."""
    chunks: list[list[int]] = []
    rows: list[int] = []
    for row in sorted(set(keys)):
        run = [i for i, key in enumerate(keys) if key == row]
        if low <= row < high:
            chunks += [run[i : i + CHUNK] for i in range(0, len(run), CHUNK)]
            rows += [row] * -(-len(run) // CHUNK)
    slots, next_keys = [], []
    for row in rows:
        slots.append(len(next_keys) if rows.count(row) > 1 else -1)
        next_keys += [row] if rows.count(row) > 1 else []
    return chunks, rows, slots, next_keys


@pytest.mark.parametrize("device", AT)
@settings(max_examples=60, deadline=None)
@given(
    runs=st.lists(st.tuples(st.integers(0, 9), st.sampled_from([1, 2, 31, 32, 33, 64, 65, 150])), max_size=6),
    bounds=st.tuples(st.integers(0, 10), st.integers(0, 10)),
)
def test_chunks_match_a_naive_implementation(device: str, runs: list[tuple[int, int]], bounds: tuple[int, int]) -> None:
    low, high = min(bounds), max(bounds)
    keys = sorted([row for row, count in runs for _ in range(count)]) or [low]
    got = chunks_of(torch.tensor(keys, dtype=torch.int32, device=device), low, high)
    positions, rows, slots, next_keys = naive_chunks(keys, low, high)
    count = len(rows)
    assert got.total.tolist() == [count]
    start = got.start.tolist()
    assert [list(range(start[c], start[c + 1])) for c in range(count)] == positions
    assert got.row[:count].tolist() == rows
    assert got.slot[:count].tolist() == slots
    # entries past the last chunk are read by nobody, but a slot there would be written
    assert got.next_keys.tolist()[: len(next_keys)] == next_keys
    assert set(got.next_keys.tolist()[len(next_keys) :]) <= {high}


@pytest.mark.parametrize("device", AT)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_the_transposed_index_matches_a_naive_implementation(device: str, data: st.DataObject) -> None:
    count, batch = data.draw(st.integers(1, 3)), data.draw(st.integers(0, 3))
    rows = data.draw(st.lists(st.integers(1, 4), min_size=count, max_size=count))
    lengths = data.draw(st.lists(st.integers(0, 4), min_size=count * batch, max_size=count * batch))
    ignored = data.draw(st.integers(0, 2))
    ids = data.draw(st.lists(st.integers(-1, 4), min_size=sum(lengths) + ignored, max_size=sum(lengths) + ignored))
    first_row = [sum(rows[:f]) for f in range(count)]
    features = pack_features([Feature(4 * first_row[f], rows[f], 4, first_row[f]) for f in range(count)], device)
    offsets = torch.tensor([0, *torch.tensor(lengths, dtype=torch.int64).cumsum(0).tolist()], device=device)
    segments = [Segment(4, 0, sum(rows), 0)]
    got = transpose_index(torch.tensor(ids, dtype=torch.int64, device=device), offsets, features, segments)

    bag_of = [bag for bag, length in enumerate(lengths) for _ in range(length)]
    keys = []
    for position, row in enumerate(ids):
        f = bag_of[position] // batch if position < len(bag_of) else 0
        inside = position < len(bag_of) and 0 <= row < rows[f]
        keys.append(first_row[f] + row if inside else sum(rows))
    order = sorted(range(len(ids)), key=lambda position: (keys[position], position))
    assert got.position.tolist() == order
    assert got.keys.tolist() == [keys[position] for position in order]
    for position, bag in zip(got.position.tolist(), got.bag.tolist(), strict=True):
        assert position >= len(bag_of) or bag == bag_of[position]
    assert bag_of_position(offsets, len(ids)).tolist() == bag_of + [count * batch] * ignored


@pytest.mark.parametrize(("ids", "levels"), [(0, 1), (1, 1), (32, 1), (33, 2), (1024, 2), (1025, 3), (10**6, 4)])
def test_levels_suffice_for_a_row_hit_by_every_id(ids: int, levels: int) -> None:
    assert levels_for(ids) == levels


class Launches:
    """Stands in for a Triton kernel and remembers its grids."""

    def __init__(self) -> None:
        self.grids: list[tuple[int, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args, **kwargs: self.grids.append(grid)


KERNELS = ((pooled, "_pooled_lookup_kernel"), (sequence, "_resolve_kernel"), (sequence, "_gather_kernel"),
           (bounds, "_check_ids_kernel"), (update, "_update_kernel"), (finite, "_check_gradient_kernel"),
           (weight_gradient, "_weight_gradient_kernel"), (row_keys, "_row_keys_kernel"),
           (row_keys, "_count_step_kernel"), (row_chunks, "_mark_kernel"), (row_chunks, "_block_sums_kernel"),
           (row_chunks, "_chunk_kernel"), (row_chunks, "_chunk_alone_kernel"))  # fmt: skip


def without_a_host_read(monkeypatch: pytest.MonkeyPatch, call: Callable[[Inputs, Any], object], case: Case) -> int:
    """Run `call` as on a GPU, with fake tensors, which have no values to read; returns the number of launches.

    (A torch without CUDA cannot slice a fake tensor that says "cuda", so these say "cpu".)
    """
    pytest.importorskip("triton")
    launches = Launches()
    for module, name in KERNELS:
        monkeypatch.setattr(module, name, launches)
        monkeypatch.setattr(module, "runs_kernel", lambda tensor: True, raising=False)
    # on a CPU a bad batch raises at once
    monkeypatch.setattr(bounds, "raise_from_guard", lambda *args, **kwargs: None)
    # an address is not a value
    monkeypatch.setattr(Tensor, "data_ptr", lambda self: 0)
    batch = inputs(case)
    with FakeTensorMode():
        fake = {
            name: torch.empty(value.shape, dtype=value.dtype)
            for name, value in vars(batch).items()
            if isinstance(value, Tensor)
        }
        call(replace(batch, **fake), torch.empty(batch.case.batch, sum(batch.dims)))
    return len(launches.grids)


@pytest.mark.parametrize("case", SMALL, ids=[case.name for case in SMALL])
def test_no_lookup_or_update_reads_a_value_on_the_host(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    def step(batch: Inputs, grad: Tensor) -> None:
        bounds._check_ids(batch.indices, batch.offsets, batch.features, bounds.new_guard(), batch.names, True, False)
        arguments: list[Any] = [*batch.lookup, torch.float32]
        pooled._pooled_lookup(*arguments)
        weight_gradient._per_id_weight_gradient(
            grad, batch.weights, batch.indices, batch.offsets, batch.features, batch.dims
        )
        finite._check_gradient(grad, bounds.new_guard())
        if len(set(batch.dims)) == 1:
            sequence._sequence_lookup(
                batch.weights, batch.indices, batch.offsets, batch.features, batch.dims[0], batch.segments,
                torch.float32,
            )  # fmt: skip
        for rule in RULES:
            update._fused_update(*update_args(batch.weights, optimizer(rule, batch), grad, batch))
        update.lookup_gradient(
            batch.weights, grad, batch.indices, batch.offsets, batch.per_id_weights, batch.features, batch.dims,
            batch.segments, batch.pooling,
        )  # fmt: skip

    assert without_a_host_read(monkeypatch, step, case) >= 1


def test_a_read_on_the_host_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Exception, match="_local_scalar_dense"):
        without_a_host_read(monkeypatch, lambda batch, grad: int(batch.offsets[-1]), CASES[0])
