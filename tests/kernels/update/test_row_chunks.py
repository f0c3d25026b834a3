"""The index of an update on a GPU: its kernels against torch, the levels that they leave, and the guard of a step."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from kernel_inputs import Case, Inputs, assert_same_bits, inputs, optimizer, torch_device, update_args, upstream

from shardwise.kernels import fused_update, new_guard, persistent_grid
from shardwise.kernels.features import FIRST_ROW, Lookup, unflatten_segments
from shardwise.kernels.lookup import bounds
from shardwise.kernels.transpose import CHUNK
from shardwise.kernels.update import row_chunks
from shardwise.kernels.update.row_chunks import (
    HASH,
    ROW,
    SLOT,
    SOURCE,
    START,
    RowChunks,
)
from shardwise.kernels.update.row_keys import BLOCK
from shardwise.perf.compile.recorded import races, recorded

interpreted = pytest.mark.interpreted

TWO = ((9, 8), (5, 8), (40, 4))
CASES = [
    Case("one program", tables=TWO, features=((0, False), (1, True), (2, False)), batch=3, lengths=(0, 4)),
    Case("one program of more", tables=TWO, features=((0, False), (1, False)), batch=40, lengths=(0, 4)),
    Case("weighted", tables=TWO, features=((0, True), (2, False)), batch=9, lengths=(0, 3), weighted=True),
    Case("many programs", tables=TWO, features=((0, False), (0, True), (2, False)), batch=60, lengths=(1, 6)),
    Case("hot", tables=((40, 4),), features=((0, False),), batch=90, lengths=(9, 13), ids="hot"),
    Case("int32", tables=TWO, features=((2, False), (1, False)), batch=5, lengths=(0, 3), index_dtype=torch.int32),
]  # fmt: skip


def index_of(batch: Inputs) -> RowChunks:
    step = torch.zeros(1, dtype=torch.int64)
    chunks = row_chunks.row_chunks(lookup_of(batch), 20, new_guard(), step, hashed=True)
    assert step.item() == 1
    return chunks


def lookup_of(batch: Inputs) -> Lookup:
    segments = unflatten_segments(batch.segments)
    return Lookup(batch.indices, batch.offsets, batch.per_id_weights, batch.features, segments, batch.pooling)


def assert_equals_reference(batch: Inputs) -> None:
    chunks = index_of(batch)
    levels, source, scale = row_chunks.row_chunks_ref(lookup_of(batch), 20)
    used = len(source)
    assert chunks.source[:used].tolist() == source.tolist()
    assert (chunks.scale is None) == (scale is None)
    if scale is not None and chunks.scale is not None:
        assert_same_bits(chunks.scale[:used], scale)
    assert len(chunks.levels) == len(levels)
    for number, (level, expected) in enumerate(zip(chunks.levels, levels, strict=True)):
        n = int(expected.total)
        if number:
            # runs of one chunk were done on the level before: these are the others'
            assert n <= level.capacity
        assert int(chunks.totals[number]) == n
        assert level.chunks[START, : n + 1].tolist() == expected.start[: n + 1].tolist()
        assert level.chunks[ROW, :n].tolist() == expected.row[:n].tolist()
        assert level.chunks[SLOT, :n].tolist() == expected.slot[:n].tolist()
        if number == 0:
            assert level.chunks[SOURCE, :n].tolist() == source[expected.start[:n]].tolist()
        assert max([-1, *expected.slot[:n].tolist()]) < level.slots
        first_rows = sorted({int(first) for first in batch.features[:, FIRST_ROW]})
        for row, own in zip(level.chunks[ROW, :n].tolist(), level.chunks[HASH, :n].tolist(), strict=True):
            assert own == row - max(first for first in first_rows if first <= row)


@interpreted
@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_the_kernels_find_the_chunks_of_the_reference(case: Case) -> None:
    torch_device("interpreted")
    assert_equals_reference(inputs(case))


@interpreted
@pytest.mark.parametrize("tail", [1, 2, 8])
def test_more_levels_are_those_of_the_reference(tail: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch_device("interpreted")
    monkeypatch.setattr(row_chunks, "TAIL", tail)
    batch = inputs(CASES[4])
    assert row_chunks.levels(batch.indices.shape[0]) > 2
    assert_equals_reference(batch)


@interpreted
@pytest.mark.parametrize("tail", [2, row_chunks.TAIL])
def test_runs_of_every_length_are_cut_as_the_reference_cuts_them(tail: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs that end with a chunk and one id later, over several blocks; sums and searches take several turns."""
    torch_device("interpreted")
    monkeypatch.setattr(row_chunks, "TAIL", tail)
    monkeypatch.setattr(row_chunks, "_PARTS", (2, 4))
    monkeypatch.setattr(persistent_grid, "PERSISTENT_PROGRAMS", 1)
    batch = inputs(Case("", tables=((900, 4),), features=((0, False), (0, True)), batch=90, lengths=(0, 21)))
    n = len(batch.indices)
    runs = torch.tensor([1, 32, 33, 1100, 31, 64, 65, *[1, 2] * 250])
    ids = torch.arange(len(runs)).repeat_interleave(runs)[:n]
    assert n > 7 * BLOCK and n == len(ids)
    batch.indices.copy_(ids[torch.randperm(n, generator=torch.Generator().manual_seed(0))])
    # outside their table, and so of no row
    batch.indices[[3, 700]] = torch.tensor([-1, 900])
    assert_equals_reference(batch)


@interpreted
@pytest.mark.parametrize("case", [CASES[2], CASES[4]], ids=["one program", "many programs"])
def test_its_programs_do_not_race_and_their_order_is_nobodys(case: Case) -> None:
    torch_device("interpreted")
    batch = inputs(case)
    with recorded() as launches:
        given = index_of(batch)
    assert [race for launch in launches for race in races(launch)] == []
    with recorded(order=3):
        other = index_of(batch)
    n = int(given.totals[0])
    for level, other_level in zip(given.levels, other.levels, strict=True):
        assert level.chunks[:, :n].shape == other_level.chunks[:, :n].shape
    assert_same_bits(given.levels[0].chunks[:, :n], other.levels[0].chunks[:, :n])
    assert_same_bits(given.totals, other.totals)


@interpreted
@pytest.mark.parametrize("rule", ["sgd", "rowwise_adagrad"])
def test_levels_that_are_added_up_at_once_give_the_same_bits(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch_device("interpreted")
    expected = None
    for tail in (1, 4, CHUNK, CHUNK * CHUNK):
        monkeypatch.setattr(row_chunks, "TAIL", tail)
        batch = inputs(CASES[4])
        state = optimizer(rule, batch)
        fused_update(*update_args(batch.weights, state, upstream(batch), batch))
        got = torch.cat([batch.weights, *state.states])
        expected = got if expected is None else expected
        assert_same_bits(got, expected)


@pytest.mark.parametrize(
    ("ids", "count"), [(0, 1), (1, 1), (32, 1), (33, 2), (4096, 2), (4097, 3), (54_000, 3), (131_072, 3), (131_073, 4)]
)
def test_few_levels_add_up_a_row_that_every_id_hits(ids: int, count: int) -> None:
    assert row_chunks.levels(ids) == count


def test_levels_never_fall_as_batches_grow() -> None:
    assert all(smaller <= larger for smaller, larger in pairwise(row_chunks.levels(2**k) for k in range(30)))


@pytest.mark.parametrize("fatal", [True, False])
@pytest.mark.parametrize("device", ["cpu", pytest.param("interpreted", marks=interpreted)])
def test_a_check_lowers_the_guard_of_the_step_too(device: str, fatal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch_device(device)
    monkeypatch.setattr(bounds, "raise_from_guard", lambda *args, **kwargs: None)
    batch = inputs(CASES[3])
    batch.indices[[70, 90]] = 1000
    batch.offsets[40] = 2**40
    own, step = new_guard(), new_guard()
    own[0], step[2] = 80, 7
    arguments = (batch.indices, batch.offsets, batch.features, own)
    if device == "cpu":
        bounds.check_ids_ref(*arguments, False, step, fatal)
    else:
        bounds._check_ids(*arguments, batch.names, fatal, False, step)
    assert own[0] <= 80 and own[1:].tolist() == [41, 7]
    assert step[1:].tolist() == [41, 7]
    assert (step[0] != bounds.OK) == fatal
