"""The CPU's own paths: lookups block by block, and the update that numba compiles, beside the torch path."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from kernel_inputs import (
    CASES,
    RULES,
    Case,
    Inputs,
    Optimizer,
    assert_close,
    assert_same_bits,
    ids_of,
    inputs,
    optimizer,
    update_args,
    upstream,
)
from torch import Tensor

from shardwise.kernels import (
    define_rule,
    fused_update,
    huge_pages,
    new_guard,
    rule_named,
)
from shardwise.kernels._op import INTERPRETED
from shardwise.kernels.cpu import (
    lookup as cpu_lookup,
    threads as cpu_threads,
    update as cpu_update,
)
from shardwise.kernels.lookup import pooled as pooled_module
from shardwise.kernels.lookup.bounds import check_ids_ref
from shardwise.kernels.lookup.pooled import pooled_lookup_ref
from shardwise.kernels.update import step as update_step

pytestmark = pytest.mark.skipif(INTERPRETED, reason="ops run the interpreted kernels")
FP32 = [case for case in CASES if case.dtype == torch.float32 and not case.slow]
MANY = Case(
    "many ids", tables=((40, 8), (300, 3), (5, 8)), features=((0, False), (1, True), (2, False), (0, True)),
    batch=60, lengths=(0, 40), weighted=True,
)  # fmt: skip


@pytest.fixture
def in_pieces(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Divide even small work among so many threads, and rows of more than 64 ids too."""

    def divide(threads: int) -> None:
        monkeypatch.setattr(cpu_update, "_ALONE", -1)
        monkeypatch.setattr(cpu_update, "_LONG", 64)
        monkeypatch.setattr(torch, "get_num_threads", lambda: threads)

    return divide


def trained(batch: Inputs, rule: str, steps: int = 2, **settings: Any) -> tuple[Tensor, Optimizer]:
    """The tables and the optimizer after some steps, on a copy."""
    weights, state = batch.weights.clone(), replace(optimizer(rule, batch), **settings)
    for step in range(steps):
        fused_update(*update_args(weights, state, upstream(batch, seed=step), batch))
    return weights, state


class Counted:
    """`cpu_update.update`, and whether it did the work."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answers: list[bool] = []
        self.update = cpu_update.update
        monkeypatch.setattr(cpu_update, "update", self)

    def __call__(self, *args: Any) -> bool:
        self.answers.append(self.update(*args))
        return self.answers[-1]


@pytest.mark.parametrize(("rule", "decay"), [("gradient", "none"), *product(RULES, ("none", "l2", "decoupled"))])
def test_compiled_loops_do_every_rule_as_the_torch_path_does(
    rule: str, decay: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("numba")
    counted = Counted(monkeypatch)
    for case in (MANY, replace(MANY, weighted=False, features=((0, False), (1, False)))):
        batch = inputs(case)
        weights, state = trained(batch, rule, decay=decay)
        assert counted.answers and all(counted.answers)
        with monkeypatch.context() as patch:
            patch.setattr(cpu_update, "update", lambda *args: False)
            expected, twin = trained(batch, rule, decay=decay)
        for actual, reference in zip((weights, *state.states), (expected, *twin.states), strict=True):
            if rule_named(rule).is_exact:
                assert_same_bits(actual, reference)
            else:
                assert_close(actual, reference, 1e-6)


def test_rules_are_exact_that_add_up_no_row() -> None:
    sums = {"rowwise_adagrad", "partial_rowwise_adam", "lamb", "partial_rowwise_lamb", "lars_sgd"}
    assert {rule for rule in RULES if not rule_named(rule).is_exact} == sums


@pytest.mark.parametrize("rule", ["sgd", "rowwise_adagrad", "lamb"])
@pytest.mark.parametrize("case", [MANY, *(case for case in FP32 if "hot" in case.name)], ids=lambda case: case.name)
def test_threads_and_pieces_do_not_change_the_bits_of_an_update(
    case: Case, rule: str, in_pieces: Callable[[int], None]
) -> None:
    pytest.importorskip("numba")
    batch = inputs(case)
    alone = trained(batch, rule)
    for threads in (2, 3):
        in_pieces(threads)
        divided = trained(batch, rule)
        assert_same_bits(divided[0], alone[0])
        assert_same_bits(divided[1].states, alone[1].states)


def test_the_sums_of_a_hot_row_have_the_bits_of_the_torch_path(
    monkeypatch: pytest.MonkeyPatch, in_pieces: Callable[[int], None]
) -> None:
    """The order of addition is a contract: chunks of 32, chunks of chunks, whoever adds."""
    pytest.importorskip("numba")
    for weighted in (False, True):
        batch = inputs(Case("hot", ids="hot", batch=1100, lengths=(30, 31), weighted=weighted))
        in_pieces(2)
        compiled, _ = trained(batch, "gradient", 1)
        with monkeypatch.context() as patch:
            patch.setattr(cpu_update, "update", lambda *args: False)
            expected, _ = trained(batch, "gradient", 1)
        assert_same_bits(compiled, expected)


def test_bad_ids_and_positions_past_the_last_offset_train_nothing(in_pieces: Callable[[int], None]) -> None:
    pytest.importorskip("numba")
    batch = inputs(MANY)
    in_pieces(2)
    expected, _ = trained(batch, "sgd")
    garbage = torch.tensor([-1, 10**6, 0])
    padded = replace(
        batch,
        indices=torch.cat([batch.indices, garbage]),
        per_id_weights=torch.cat([batch.per_id_weights, torch.full((3,), float("nan"))]),  # type: ignore[list-item]
    )
    assert_same_bits(trained(padded, "sgd")[0], expected)

    # a bag that is not averaged may lose an id without a trace
    bad = batch.indices.clone()
    bag = next(b for b in range(MANY.batch) if len(batch.bags[0][b]))
    bad[int(batch.offsets[bag])] = 2**40
    weights, _ = trained(replace(batch, indices=bad), "sgd", 1)
    good = torch.ones(len(bad), dtype=torch.bool)
    good[int(batch.offsets[bag])] = False
    fewer = batch.offsets.clone()
    fewer[bag + 1 :] -= 1
    without = replace(
        batch, indices=batch.indices[good], offsets=fewer,
        per_id_weights=None if batch.per_id_weights is None else batch.per_id_weights[good],
    )  # fmt: skip
    assert_same_bits(weights, trained(without, "sgd", 1)[0])


@pytest.mark.full
def test_a_rule_that_numba_cannot_compile_runs_on_torch_with_one_warning() -> None:
    pytest.importorskip("numba")

    @define_rule()
    def softened(w: Any, g: Any, lr: float = 0.1) -> Any:
        return w - lr * torch.tanh(g)

    batch = inputs(FP32[0])
    with pytest.warns(UserWarning, match="rule 'softened'.*runs on torch"):
        weights, _ = trained(batch, softened.name, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trained(batch, softened.name, 1)
    summed, _ = trained(batch, "gradient", 1)
    touched = torch.zeros(20, 8, dtype=torch.bool)
    touched[batch.indices] = True
    expected = torch.where(touched.view(-1), batch.weights - 0.1 * torch.tanh(summed), batch.weights)
    assert_close(weights, expected)


def test_tasks_run_once_each_and_their_error_reaches_the_caller(in_pieces: Callable[[int], None]) -> None:
    in_pieces(3)
    seen: list[int] = []
    lock = threading.Lock()

    def task(number: int) -> Callable[[], int]:
        def work() -> int:
            with lock:
                seen.append(number)
            if number == 5 and failing:
                raise ZeroDivisionError("five")
            return number * number

        return work

    failing = False
    assert cpu_threads.run([task(n) for n in range(40)]) == [n * n for n in range(40)]
    assert sorted(seen) == list(range(40))
    assert cpu_threads.run([]) == []
    failing = True
    with pytest.raises(ZeroDivisionError, match="five"):
        cpu_threads.run([task(n) for n in range(40)])
    failing = False
    assert cpu_threads.run([task(3)]) == [9]


def test_tasks_run_on_torch_s_threads_also_for_several_callers_at_once(in_pieces: Callable[[int], None]) -> None:
    in_pieces(3)
    seen: set[int] = set()
    meet = threading.Barrier(3, timeout=60)

    def task(number: int) -> int:
        seen.add(threading.get_ident())
        if number < 3:
            # none goes on before three threads have one each
            meet.wait()
        return number

    assert cpu_threads.run([partial(task, n) for n in range(9)]) == [*range(9)]
    assert len(seen) == 3 and threading.get_ident() in seen

    def squares(of: int) -> list[int]:
        return cpu_threads.run([partial(pow, of + n, 2) for n in range(50)])

    with ThreadPoolExecutor(4) as callers:
        for of, squared in zip(range(40), callers.map(squares, range(40)), strict=True):
            assert squared == [(of + n) ** 2 for n in range(50)]


@pytest.mark.parametrize("where", ["no OpenMP", "a fork"])
def test_an_update_has_its_bits_where_threads_of_our_own_do_it(
    where: str, in_pieces: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("numba")
    batch = inputs(MANY)
    alone, _ = trained(batch, "rowwise_adagrad")
    in_pieces(3)
    if where == "a fork":
        monkeypatch.setattr(cpu_threads, "_forked", True)
    else:
        monkeypatch.setattr(cpu_threads, "_parallel", lambda: None)
    asked = []
    usual = cpu_threads._in_pool
    monkeypatch.setattr(cpu_threads, "_in_pool", lambda work, threads: (asked.append(threads), usual(work, threads)))
    divided, _ = trained(batch, "rowwise_adagrad")
    assert_same_bits(divided, alone)
    assert asked and set(asked) == {3}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_process_updates_tables_without_the_threads_of_its_parent(in_pieces: Callable[[int], None]) -> None:
    """OpenMP waits for ever for threads that a fork did not take along."""
    pytest.importorskip("numba")
    batch = inputs(MANY)
    in_pieces(2)
    expected, _ = trained(batch, "sgd")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pid = os.fork()
    if pid == 0:
        signal.alarm(60)
        os._exit(0 if torch.equal(trained(batch, "sgd")[0], expected) else 1)
    assert os.waitpid(pid, 0)[1] == 0


def test_torch_was_linked_with_an_openmp_that_takes_work() -> None:
    """Else the update runs on threads that torch's keep from their cores."""
    if sys.platform != "linux" or "OpenMP" not in torch.__config__.parallel_info():
        pytest.skip("torch has no OpenMP here")
    assert cpu_threads._parallel() is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rows_are_copied_bit_for_bit_whatever_their_width_and_place(dtype: torch.dtype) -> None:
    """NaNs of all kinds too: rows are moved as numbers of another type."""
    generator = torch.Generator().manual_seed(0)

    def bits(count: int) -> Tensor:
        return torch.randint(-(2**31), 2**31 - 1, (count,), generator=generator, dtype=torch.int32).view(dtype)[:count]

    whole = torch.int32 if dtype == torch.float32 else torch.int16
    for dim, first in product((1, 3, 4, 8, 12, 128), (0, 1, 4, 16)):
        flat, values = bits(40 * dim + 64), bits(13 * dim).view(13, dim)
        rows, expected = torch.randperm(40, generator=generator)[:13], flat.clone()
        expected.view(whole)[first : first + 40 * dim].view(40, dim)[rows] = values.view(whole)
        update_step.copy_rows(flat[first : first + 40 * dim].view(40, dim), rows, values)
        assert torch.equal(flat.view(whole), expected.view(whole)), (dim, first)


@pytest.fixture(params=["as ever", "on torch", "tiny blocks", "tiny blocks of large outputs"])
def blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if request.param != "as ever":
        monkeypatch.setattr(cpu_lookup, "_loops", lambda: None)
    if request.param.startswith("tiny"):
        monkeypatch.setattr(cpu_lookup, "_BLOCK_ELEMENTS", 24)
        monkeypatch.setattr(cpu_lookup, "_FEW_IDS", 6)
    if request.param.endswith("outputs"):
        monkeypatch.setattr(cpu_lookup, "HUGE_PAGE", 0)
    yield request.param


@pytest.mark.parametrize("short", [0, 1000])
@pytest.mark.parametrize("case", FP32, ids=ids_of(FP32))
def test_blocks_and_the_order_of_ids_do_not_change_the_bits_of_a_lookup(
    case: Case, short: int, blocks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = inputs(case)
    usual = pooled_module.pooled_lookup(*batch.lookup)
    assert_close(usual, pooled_lookup_ref(*batch.lookup_ref))
    monkeypatch.setattr(cpu_lookup, "_SHORT", short)
    assert_same_bits(pooled_module.pooled_lookup(*batch.lookup), usual)


@pytest.mark.parametrize("short", [0, 1000])
def test_a_bad_id_counts_as_none_in_any_block(short: int, blocks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_lookup, "_SHORT", short)
    for lengths in ((1, 1), (0, 9)):
        case = Case(
            "bad", tables=((9, 8), (4, 8)), features=((0, False), (1, True), (0, True)), batch=12, lengths=lengths
        )
        for bad in (-1, 9, 2**40, -(2**63)):
            batch = inputs(case)
            batch.indices[[0, 7, -1]] = bad
            assert_close(pooled_module.pooled_lookup(*batch.lookup), pooled_lookup_ref(*batch.lookup_ref))


@pytest.mark.parametrize("few", [0, 1 << 12, None])
def test_good_batches_are_told_from_bad_ones_as_the_reference_does(
    few: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if few is not None:
        monkeypatch.setattr(cpu_lookup, "_loops", lambda: None)
        monkeypatch.setattr(cpu_lookup, "_FEW_IDS", few)
    case = Case("three", tables=((9, 8), (4, 8)), features=((0, False), (1, False), (0, False)), batch=4)
    for seed, padded in product(range(40), (False, True)):
        batch = inputs(case, seed=seed)
        indices, offsets = batch.indices.clone(), batch.offsets.clone()
        kind, at = seed % 5, seed % max(1, len(indices))
        if kind == 1:
            indices[at] = (-1, 4, 8, 9, 2**40)[seed // 5 % 5]
        elif kind == 2:
            offsets[seed % len(offsets)] += (-1, 1)[seed // 5 % 2]
        elif kind == 3:
            indices = indices[:-1]
        elif kind == 4:
            indices = torch.cat([indices, torch.tensor([-1])])
        guard = new_guard()
        check_ids_ref(indices, offsets, batch.features, guard, padded)
        good = bool((guard == new_guard()).all())
        assert cpu_lookup.ids_are_good(indices, offsets, batch.features, padded) == good, (seed, kind)


def test_advice_about_pages_changes_no_value() -> None:
    large = torch.zeros(1 << 21)[3:]
    large += torch.arange(len(large)).float()
    same = huge_pages.in_huge_pages(large)
    assert same is large and torch.equal(large, torch.arange(len(large)).float())
    for tensor in (torch.ones(3), torch.empty(0), torch.empty(1 << 22, device="meta")):
        assert huge_pages.in_huge_pages(tensor) is tensor


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries decide by other rules")
def test_memory_that_a_step_frees_has_its_pages_in_the_next() -> None:
    code = """
import resource, torch
from shardwise.kernels import huge_pages
def step():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [torch.zeros(4 << 20, dtype=torch.uint8) for _ in range(8)]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
huge_pages.in_huge_pages(torch.empty(1 << 20))
print([step() for _ in range(40)][-1])
"""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "LD_PRELOAD"))}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=env)
    assert done.returncode == 0, done.stderr
    # the heap takes its size in some steps; of 8,192 pages of 4 KB most were faulted in again each time
    assert int(done.stdout) < 500


def test_the_number_of_rules_that_numba_compiles_is_all_of_them() -> None:
    pytest.importorskip("numba")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [rule for rule in RULES if cpu_update._update_loop(rule_named(rule)) is None] == []
