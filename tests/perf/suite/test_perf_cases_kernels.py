"""Cases about kernels and jagged types: all of them run, their checks can fail, workloads are what they say."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise import kernels
from shardwise.kernels import pooled_lookup
from shardwise.kernels.features import FIELDS, FIRST_ROW, MEAN, ROWS
from shardwise.kernels.rule import Rule
from shardwise.kernels.update import rules
from shardwise.perf.suite import peers, workloads
from shardwise.perf.suite.batches import (
    Batch,
    Optimizer,
    compacted,
    distinct_rows,
    first_samples,
    make,
    of_workload,
    optimizer as fresh_states,
)
from shardwise.perf.suite.case import (
    DEVICES,
    SUITES,
    Case,
    Setting,
)
from shardwise.perf.suite.cases import (
    jagged,
    keyed,
    lookup,
    quantized,
    rows,
    served,
    update,
)
from shardwise.perf.suite.libraries import Library
from shardwise.perf.suite.peers import (
    assert_close,
    bags_of,
    peer_calls,
    table_memory,
    torch_lookup,
)
from shardwise.perf.suite.workloads import (
    WORKLOADS,
    Workload,
    draw,
    draw_ids,
    equal,
    fitted,
    sized,
    tiny,
)

MODULES = {
    "lookup": lookup, "update": update, "rows": rows, "quantized": quantized, "jagged": jagged, "keyed": keyed,
    "served": served,
}  # fmt: skip
ALL: list[Case] = [case for module in MODULES.values() for case in module.CASES]
BY_NAME = {case.name: case for case in ALL}
SMALL = Setting(small=True)


@pytest.fixture(autouse=True)
def memory() -> Any:
    """Tables of one test are not those of the next."""
    yield
    peers.release()


@pytest.mark.parametrize("group", MODULES)
def test_every_case_runs_is_right_and_has_a_peer_or_none(group: str) -> None:
    for case in MODULES[group].CASES:
        if "cpu" not in case.devices:
            continue
        ready = case.make(SMALL)
        assert len(ready.calls) == lookup.INPUTS, case.name
        ready.check()
        for calls in (ready.calls, *ready.peers.values()):
            assert len(calls) == len(ready.calls)
            for call in calls:
                call()
        assert set(ready.peers) <= {"torch"}, case.name
        if ready.bytes_moved is not None:
            assert ready.bytes_moved > 0 and ready.floor, case.name
        ready.close()


def test_names_are_unique_and_fields_are_known() -> None:
    assert len(BY_NAME) == len(ALL)
    for case in ALL:
        assert case.suites <= set(SUITES) and case.devices <= set(DEVICES) and "full" in case.suites, case.name
        assert case.unit == "s" and case.group in MODULES


def test_every_rule_every_workload_and_every_jagged_op_has_a_case() -> None:
    names = list(BY_NAME)
    for workload in WORKLOADS:
        assert f"pooled_lookup, {workload.name}" in names
        assert {f"fused_update, {rule}, {workload.name}" for rule in ("sgd", "rowwise_adagrad")} <= {*names}
    assert {rule.name for rule in vars(rules).values() if isinstance(rule, Rule)} - {"gradient"} <= {
        name.split(", ")[1] for name in names if name.startswith("fused_update") and name.endswith("fbgemm default")
    }
    documented = {
        "complete_cumsum", "offsets_to_lengths", "offsets_range", "segment_sum", "pack_segments", "unpack_segments",
        *(name for name in dir(kernels) if name.startswith(("jagged_", "permute_", "histogram_", "generic_hist"))),
        "padded_dense_to_jagged", "keyed_jagged_index_select", "expand_into_jagged_permute", "invert_permute",
        "regroup", "block_bucketize", "unique_ids", "batched_unary_embeddings",
    } - {name for name in dir(kernels) if not callable(getattr(kernels, name))}  # fmt: skip
    covered = {name.split(",")[0] for name in names}
    assert len(documented) > 30 and documented - covered == set()


def spoiled(op: Callable[..., Any]) -> Callable[..., Any]:
    """The op with its first number a little off."""

    def call(*args: Any, **options: Any) -> Any:
        out = op(*args, **options)
        first = out
        while not isinstance(first, Tensor):
            first = first[0]
        first.view(-1)[0] += 1
        return out

    return call


def test_a_lookup_that_is_wrong_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Batch, "lookup", spoiled(Batch.lookup))
    with pytest.raises(AssertionError, match="the reference: off by"):
        BY_NAME["pooled_lookup, fbgemm default"].make(SMALL).check()


def test_a_peer_that_gives_something_else_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup, "torch_lookup", lambda *args: spoiled(torch_lookup(*args)))
    with pytest.raises(AssertionError, match="torch: off by"):
        BY_NAME["pooled_lookup, fbgemm default, mean"].make(SMALL).check()


@pytest.mark.parametrize(
    ("by", "match"),
    [
        (lambda self, batch, *args, **options: None, "the reference"),
        # of distinct rows, not of single elements
        (lambda self, batch, *args, **options: batch.weights.mul_(0.5), "the reference"),
    ],
)
def test_an_update_that_is_wrong_is_not_timed(
    by: Callable[..., None], match: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = Optimizer.update

    def chosen(self: Optimizer, batch: Batch, pooling: str | None = None, **options: Any) -> None:
        (right if options else by)(self, batch, pooling, **options)

    monkeypatch.setattr(Optimizer, "update", chosen)
    with pytest.raises(AssertionError, match=match):
        BY_NAME["fused_update, rowwise_adagrad, fbgemm default"].make(SMALL).check()


def test_a_step_of_torch_that_differs_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "LR", 0.02)
    with pytest.raises(AssertionError, match="torch: off by"):
        BY_NAME["lookup and update, adagrad, fbgemm default"].make(SMALL).check()


def test_quantized_rows_that_are_wrong_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    ready = BY_NAME["quantized_pooled_lookup, int8, fbgemm default"].make(SMALL)
    monkeypatch.setattr(quantized.Batch, "pooled", spoiled_unless_reference(quantized.Batch.pooled))
    with pytest.raises(AssertionError, match="the reference"):
        ready.check()


def spoiled_unless_reference(op: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda self, *by: op(self, *by) if by else op(self) + 1


@pytest.mark.parametrize("name", ["permute_2d", "jagged_to_padded_dense, rows", "segment_sum, rows, long bags"])
def test_a_jagged_op_that_is_wrong_is_not_timed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    op = name.split(",")[0]
    wrong = Library("wrong", [type("Wrong", (), {op: staticmethod(spoiled(getattr(kernels, op)))}), kernels])
    ready = BY_NAME[name].make(SMALL)
    monkeypatch.setattr(jagged, "OURS", wrong)
    with pytest.raises(AssertionError, match="the reference"):
        ready.check()


def test_keys_in_another_order_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = {**keyed._CALLS, "KJT permute, reversed": lambda lib, s: s[0].permute(sorted(s[1]))}
    monkeypatch.setattr(keyed, "_CALLS", calls)
    with pytest.raises(AssertionError):
        BY_NAME["KJT permute, reversed, 26 x 64"].make(SMALL).check()


def test_a_peer_that_fails_is_noted_and_ours_goes_on() -> None:
    def broken() -> Sequence[Callable[[], object]]:
        raise RuntimeError("no kernel for this device")

    builders = {"torch": broken, "fbgemm": broken}
    calls, notes = peer_calls(Setting(), builders)
    assert calls == {} and notes == {"no torch": "RuntimeError: no kernel for this device"}
    assert peer_calls(Setting(), {"torch": lambda: [broken]}, call=False)[0].keys() == {"torch"}


def test_close_means_in_units_of_the_largest() -> None:
    want = torch.tensor([100.0, 1e-6])
    assert_close(want + torch.tensor([0.0, 9e-4]), want, 1e-5, "it")
    for wrong in (want + torch.tensor([0.0, 2e-3]), want * torch.nan, want[:1]):
        with pytest.raises(AssertionError, match="it"):
            assert_close(wrong, want, 1e-5, "it")


def test_tables_share_memory_until_it_is_given_back() -> None:
    first = table_memory(1000, torch.float32, "cpu")
    assert table_memory(500, torch.float32, "cpu").data_ptr() == first.data_ptr()
    halves = table_memory(500, torch.float16, "cpu")
    assert halves.data_ptr() == first.data_ptr() and bool(halves.isfinite().all()) and float(halves.abs().max()) <= 1
    assert torch.unique(table_memory(1000, torch.float32, "cpu")).numel() > 990


def test_bags_of_torch_look_into_the_same_rows() -> None:
    (batch,) = of_workload(tiny(WORKLOADS[0]), "cpu", 1)
    bags = bags_of(batch)
    batch.weights.zero_()
    assert not bool(torch_lookup(bags, batch)().any())


@pytest.mark.parametrize("s", [0.0, 0.8, 1.0, 1.15, 2.0])
@pytest.mark.parametrize("head", [8, 1 << 16])
def test_ids_follow_zipf(s: float, head: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts of the first ranks and of the ranks behind the head, within 5 standard deviations."""
    monkeypatch.setattr(workloads, "_HEAD", head)
    rows, count = 1000, 200_000
    ids = draw_ids(f"zipf {s}", rows, count, on(0))
    frequencies = torch.bincount(ids, minlength=rows)[torch.arange(rows) * 2_654_435_761 % rows].double()
    share = torch.arange(1, rows + 1, dtype=torch.float64).pow(-s)
    share /= share.sum()
    for ranks in (slice(0, 1), slice(1, 4), slice(4, 8), slice(8, 12), slice(12, 100), slice(100, rows)):
        want = float(share[ranks].sum())
        # ranks behind the head are an integral: of the first of 8 a fraction of a percent off
        allowed = 5 * math.sqrt(count * want * (1 - want)) + (0.004 * count * want if head == 8 else 0)
        assert abs(float(frequencies[ranks].sum()) - count * want) <= allowed, (ranks, s)


def on(seed: int) -> dict[str, Any]:
    return {"generator": torch.Generator().manual_seed(seed), "device": "cpu"}


def test_a_tenth_of_hot_ids_name_one_row() -> None:
    counts = torch.bincount(draw_ids("hot", 1000, 100_000, on(1)), minlength=1000)
    assert 0.095 < int(counts.max()) / 100_000 < 0.106
    assert int(counts.topk(2).values[1]) < 200


def test_reused_ids_follow_the_histogram() -> None:
    """The share of ids whose row a batch names so often is the histogram's."""
    count = 400_000
    ids = draw_ids("reuse", 10_000_000, count, on(2))
    times = torch.unique(ids, return_counts=True)[1].double()
    for power, share in enumerate(workloads.REUSE[:10]):
        low, high = 2**power // 2, 2**power
        inside = (times > low) & (times <= high)
        assert abs(float(times[inside].sum()) / count - share) < 0.003, power


def test_ids_of_another_name_are_refused() -> None:
    with pytest.raises(ValueError, match="'uniform', 'zipf S', 'hot' or 'reuse', got 'cold'"):
        draw_ids("cold", 10, 10, on(0))


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda workload: workload.name)
def test_a_batch_fits_its_workload(workload: Workload) -> None:
    small = replace(tiny(workload), batch=5)
    ids, lengths = draw(small, 3)
    assert lengths.shape == (5 * len(small.rows),) and int(lengths.sum()) == ids.numel()
    of = torch.arange(len(small.rows)).repeat_interleave(lengths.view(-1, 5).sum(1))
    assert bool((ids >= 0).all()) and bool((ids < torch.tensor(small.rows)[of]).all())
    assert torch.equal(ids, draw(small, 3)[0]) and not torch.equal(ids, draw(small, 4)[0])


def test_workloads_are_cut_to_the_memory_and_say_so() -> None:
    large = equal("large", 2, 1 << 20, 64, 1 << 16, 32)
    half = fitted(large, 64 << 20 << 2)
    assert sum(half.rows) * 64 * 4 <= 64 << 20 << 2 and half.cut == 2
    on_cpu, on_gpu = sized(large, "cpu", 8 << 30), sized(large, "cuda", 8 << 30)
    assert on_cpu.batch * 64 * 64 <= 1 << 26 and on_cpu.batch_cut == (1 << 16) // on_cpu.batch
    assert (on_gpu.batch, on_gpu.cut) == (large.batch, 1)
    assert on_cpu.notes["batch divided by"] == on_cpu.batch_cut and "batch divided by" not in on_gpu.notes
    assert fitted(equal("one", 3, 1, 8, 1, 1), 1).rows == (1, 1, 1)


def test_the_first_samples_look_up_the_first_rows() -> None:
    for batch in (make("cpu", [(40, 8), (9, 16)], 6, 3, weighted=True, pooling="mean"),):
        some = first_samples(batch, 2)
        assert torch.equal(some.lookup(), batch.lookup()[:2])


def test_a_compacted_batch_looks_up_and_updates_the_same_rows() -> None:
    (batch,) = of_workload(tiny(WORKLOADS[0]), "cpu", 1, pooling="mean")
    less = compacted(batch)
    assert int(less.features[:, ROWS].sum()) == distinct_rows(batch).numel()
    assert torch.equal(less.lookup(), batch.lookup())
    fresh_states("sgd", batch).update(batch)
    fresh_states("sgd", less).update(less)
    assert torch.equal(less.weights.view(-1, 16), batch.weights.view(-1, 16)[distinct_rows(batch)])
    assert less.features[0, FIRST_ROW] == 0


def test_mean_pooling_of_a_workload_is_of_all_features() -> None:
    (batch,) = of_workload(tiny(WORKLOADS[0]), "cpu", 1, pooling="mean")
    summed = pooled_lookup(
        batch.weights, batch.indices, batch.offsets, None,
        torch.where(torch.arange(FIELDS) == MEAN, 0, batch.features), batch.dims, batch.segments, "sum",
    )  # fmt: skip
    torch.testing.assert_close(batch.lookup() * 3, summed)


def test_peers_that_are_not_asked_for_are_not_built() -> None:
    case = BY_NAME["pooled_lookup, fbgemm default"]
    assert not partial(case.make, replace(SMALL, peers=frozenset()))().peers
