"""The lookup that numba compiles on the CPU, beside the one on torch alone: the same bits, however work is divided."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest
import torch
from kernel_inputs import CASES, Case, Inputs, assert_close, assert_same_bits, ids_of, inputs
from torch import Tensor

from shardwise.kernels import new_guard
from shardwise.kernels._op import INTERPRETED
from shardwise.kernels.cpu import lookup as cpu_lookup
from shardwise.kernels.lookup.bounds import check_ids_ref
from shardwise.kernels.lookup.pooled import pooled_lookup, pooled_lookup_ref

pytestmark = pytest.mark.skipif(INTERPRETED, reason="ops run the interpreted kernels")

_TABLES = ((40, 128), (300, 64), (5, 16), (7, 1), (9, 213), (3, 300))
_EVERY = tuple((t, t % 2 == 1) for t in range(len(_TABLES)))
WIDTHS = [
    Case(f"widths {dtype} {weighted}", tables=_TABLES, features=_EVERY, batch=7, lengths=(0, 30), dtype=dtype,
         weighted=weighted)
    for dtype, weighted in product((torch.float32, torch.float16, torch.bfloat16), (False, True))
]  # fmt: skip


@pytest.fixture(autouse=True)
def _numba() -> None:
    pytest.importorskip("numba")


@pytest.fixture(params=[1, 2, 3])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Divide even small work among so many threads."""
    monkeypatch.setattr(cpu_lookup, "_ALONE", -1)
    monkeypatch.setattr(cpu_lookup, "_ALONE_IDS", -1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: request.param)
    yield request.param


def on_torch(batch: Inputs, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    with monkeypatch.context() as patch:
        patch.setattr(cpu_lookup, "_loops", lambda: None)
        return pooled_lookup(*batch.lookup)


def spoilt(batch: Inputs) -> Inputs:
    """The same with an id in five outside its table, on either side."""
    indices = batch.indices.clone()
    far = 2**31 - 1 if indices.dtype == torch.int32 else 2**62
    indices[::5] = torch.tensor([-1, far, -far - 1, 300], dtype=indices.dtype).repeat(len(indices))[: len(indices[::5])]
    return replace(batch, indices=indices)


@pytest.mark.parametrize("case", [*CASES, *WIDTHS], ids=ids_of([*CASES, *WIDTHS]))
def test_compiled_loops_have_the_bits_of_the_torch_path(
    case: Case, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = inputs(case)
    for case_batch in (batch, spoilt(batch)):
        assert_same_bits(pooled_lookup(*case_batch.lookup), on_torch(case_batch, monkeypatch))
    if not case.slow:
        assert_close(pooled_lookup(*batch.lookup), pooled_lookup_ref(*batch.lookup_ref))


def test_a_lookup_was_done_by_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(*args: object) -> None:
        raise AssertionError("the torch path did it")

    monkeypatch.setattr(cpu_lookup, "bag_sums", nothing)
    for case in WIDTHS:
        pooled_lookup(*inputs(case).lookup)


def test_rows_and_weights_that_are_no_numbers_come_out_as_they_do_on_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    for case in WIDTHS:
        batch = inputs(case)
        batch.weights[::7], batch.weights[::11], batch.weights[::13] = torch.nan, torch.inf, -torch.inf
        batch.weights[::3] *= 1e-7
        same = {"rtol": 0, "atol": 0, "equal_nan": True}
        torch.testing.assert_close(pooled_lookup(*batch.lookup), on_torch(batch, monkeypatch), **same)


def test_views_that_are_not_contiguous_are_read_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = inputs(WIDTHS[1])
    assert batch.per_id_weights is not None
    strided = replace(
        batch,
        indices=torch.stack([batch.indices, batch.indices - 1], 1)[:, 0],
        offsets=torch.stack([batch.offsets, batch.offsets + 1], 1)[:, 0],
        per_id_weights=torch.stack([batch.per_id_weights] * 3, 1)[:, 1],
    )
    assert not strided.indices.is_contiguous()
    assert_same_bits(pooled_lookup(*strided.lookup), on_torch(batch, monkeypatch))


def test_offsets_out_of_order_are_not_followed_outside_the_ids(threads: int) -> None:
    """What reads them raises for them elsewhere; here no memory may be read that is not theirs."""
    batch = inputs(Case("some", tables=((9, 8), (4, 8)), features=((0, False), (1, True)), batch=5))
    offsets = batch.offsets
    least, most = -(2**63), 2**63 - 1
    far = torch.tensor([0, 2**62, least, -1, 0, 3, most, 1, least, most, len(batch.indices)])
    for bad in (offsets.flip(0), offsets - 100, offsets * 2**40, far, far.flip(0)):
        assert pooled_lookup(*replace(batch, offsets=bad).lookup).shape == (5, 16)
        assert not cpu_lookup.ids_are_good(batch.indices, bad, batch.features, True)


def test_the_check_sees_every_id_and_offset(threads: int) -> None:
    """One id or offset made bad at a time, each of them."""
    case = Case("some", tables=((9, 8), (4, 8), (7, 8)), features=((0, False), (1, False), (2, False)), batch=5)
    batch = inputs(case)
    rows = batch.features[:, 1].tolist()
    for ids_dtype, offsets_dtype in product((torch.int32, torch.int64), repeat=2):
        indices, offsets = batch.indices.to(ids_dtype), batch.offsets.to(offsets_dtype)
        assert cpu_lookup.ids_are_good(indices, offsets, batch.features, False)
        for at in range(len(indices)):
            f = next(f for f in range(3) if at < int(offsets[(f + 1) * 5]))
            for bad in (-1, rows[f], torch.iinfo(ids_dtype).min, torch.iinfo(ids_dtype).max):
                spoiled = indices.clone()
                spoiled[at] = bad
                assert not cpu_lookup.ids_are_good(spoiled, offsets, batch.features, False)
        for at, by, padded in product(range(len(offsets)), (-100, -1, 1, 100), (False, True)):
            spoiled = offsets.clone()
            spoiled[at] += by
            guard = new_guard()
            check_ids_ref(indices, spoiled, batch.features, guard, padded)
            good = bool((guard == new_guard()).all())
            assert cpu_lookup.ids_are_good(indices, spoiled, batch.features, padded) == good, (at, by, padded)
