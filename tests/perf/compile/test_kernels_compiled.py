"""Every kernel compiled for GPUs that need not be here keeps its promises, and a kernel that breaks one is caught.

A subset of what `python -m shardwise kernels check` compiles.

Takes 40 s: kernels are compiled, most of them by a second each.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from unittest.mock import patch

import pytest
from targets import targeted

from shardwise.kernels._op import tl, triton
from shardwise.kernels.lookup import sequence
from shardwise.kernels.update.rules import BUILT_IN
from shardwise.perf.compile import cases as launched, compiled
from shardwise.perf.compile.cases import Batch, Case
from shardwise.perf.compile.checks import LONG_WAITS_OF_UPDATES, broken_promises, promised_moves
from shardwise.perf.compile.compiled import Report

pytestmark = pytest.mark.compiled

# on every target
MAIN = (
    "pooled_lookup D=128 fp32", "gather D=128 fp32", "weight_gradient D=128 fp32", "update sgd D=128 fp32",
    "update rowwise_adagrad D=128 fp32", "check_ids D=1 fp32",
)  # fmt: skip
# on sm_90: every kind of tile, of alignment, of type and of rule
MORE = (
    *(f"pooled_lookup D={dim} fp32" for dim in (1, 2, 3, 4, 5, 20, 1023)),
    *(f"pooled_lookup D=128 {words}" for words in ("fp16", "fp16 and fp16", "fp32 and bf16", "fp32 weighted")),
    *(f"pooled_lookup D=128 fp32 {words}" for words in ("beside D=1", "beside D=127", "i32 ids i32 offsets")),
    *(f"pooled_lookup D={words}" for words in ("6 bf16",)),
    *(f"gather D={words}" for words in ("3 fp32", "20 fp32", "128 fp16", "6 bf16", "1 fp32")),
    *(f"weight_gradient D={words}" for words in ("3 fp32", "1024 fp32", "128 fp32 and fp16", "1 fp32")),
    *(f"update {rule} D=128 fp32" for rule in BUILT_IN),
    *(f"update sgd D={dim} fp32" for dim in (1, 4, 5, 8, 12, 1023, 4096)),
    *(f"update rowwise_adagrad D={words}" for words in ("3 fp32", "20 fp32", "128 fp16 rounded", "128 bf16 rounded")),
    *(f"update adam D={words}" for words in ("1024 fp32", "4096 fp32", "128 fp32 decoupled", "128 fp32 weighted")),
    *("update lamb D=4096 fp32 beside D=1", "update sgd D=128 fp32 l2", "resolve D=128 fp32 1000 features 1 samples"),
    *("resolve D=1 fp32", "resolve D=128 fp32 i32 ids", "check_ids D=128 fp32 i32 ids", "check_gradient D=1 fp32"),
)  # fmt: skip
MATRIX = [*((name, target) for target in compiled.WHOLE for name in MAIN), *((name, "sm_90") for name in MORE)]
# one case of each of the targets of which only chosen cases are compiled
MATRIX += [
    ("pooled_lookup D=128 bf16", "sm_75"),
    ("update rowwise_adagrad D=128 fp32", "sm_86"),
    ("quantized_pooled_lookup D=128 fp8", "sm_89"),
    ("gather D=128 bf16", "gfx950"),
]
# rows whose columns are added in one order, whatever lies beside them and however they are cut into programs
ORDERED = [
    ("update rowwise_adagrad D=128 fp32", "sm_90"), ("weight_gradient D=64 fp32 and fp32", "gfx942"),
    ("update rowwise_adagrad D=4096 fp32", "sm_90"), ("update lamb D=20 fp32", "sm_90"),
    ("weight_gradient D=64 fp32 and fp32", "sm_90"), ("weight_gradient D=4 fp32 and fp32", "sm_90"),
]  # fmt: skip


@cache
def cases() -> dict[str, Case]:
    return {case.name: case for case in launched.cases()}


@cache
def report(name: str, target: str) -> Report:
    return compiled.compile_case(cases()[name], target)


def sentences(*planted: Case, target: str = "sm_90") -> list[str]:
    """What the check says of cases, compiled as the command compiles them."""
    tasks = [(case, target) for case in planted]
    reports = dict(compiled.compile_all(tasks, jobs=1))
    return [sentence for _, _, sentence in broken_promises([(*task, reports[i]) for i, task in enumerate(tasks)])]


@pytest.mark.parametrize(("name", "target"), targeted(MATRIX))
def test_a_case_keeps_its_promises(name: str, target: str) -> None:
    assert broken_promises([(cases()[name], target, report(name, target))]) == []


@pytest.mark.parametrize(
    ("rows", "target"),
    # the first has many cases; that of D=4096 says the same of the rule
    [pytest.param(*pair, id=" ".join(pair), marks=() if n else pytest.mark.full) for n, pair in enumerate(ORDERED)],
)
def test_columns_are_added_in_one_order(rows: str, target: str) -> None:
    """A table of D=64 in a launch with one of D=63 added the products of its per-id weights in another order."""
    same = [case for case in cases().values() if case.rows == rows and compiled.has_case(target, case)]
    assert len(same) > 1
    assert all(report(case.name, target).row_sums for case in same)
    assert broken_promises([(case, target, report(case.name, target)) for case in same]) == []


def test_every_state_laid_out_like_the_table_is_promised_to_move_as_the_table_does() -> None:
    moves = list(promised_moves(cases()["update adam D=128 fp32"], "sm_90"))
    # four gradient rows at once, the weights and two states; the weights, two states and the partial sum
    assert sum(total for what, _, total in moves if what == "load") == 16 * (4 + 1 + 2)
    assert sum(total for what, _, total in moves if what == "store") == 16 * (1 + 2 + 1)
    assert {at_once for _, at_once, _ in moves} == {16}


def test_every_kernel_and_every_rule_has_cases() -> None:
    """A merge made a launch a generator, which ran nothing: nineteen cases were gone and nobody missed them."""
    kernels = {name for module in launched._MODULES for name, _ in launched.kernels_of(module)}
    assert {case.kernel_name for case in cases().values()} == kernels
    assert {name.split()[1] for name in cases() if name.startswith("update ")} == {*BUILT_IN}


@pytest.mark.parametrize("target", ["sm_75", "sm_86", "sm_89", "gfx950"])
def test_a_target_that_is_compiled_in_part_has_every_kernel_rule_type_and_format(target: str) -> None:
    assert target not in compiled.WHOLE
    chosen = [case for case in cases().values() if compiled.has_case(target, case)]
    assert len(chosen) < len(cases()) / 4
    assert {case.kernel_name for case in chosen} == {case.kernel_name for case in cases().values()}
    for kernel in ("update", "quantized_pooled_lookup"):
        place = 1 if kernel == "update" else 2
        assert {case.name.split()[place] for case in chosen if case.kernel_name == kernel} == {
            case.name.split()[place] for case in cases().values() if case.kernel_name == kernel
        }
    tables = {case.types["W"] for case in chosen if case.kernel_name in ("pooled_lookup", "gather", "update")}
    assert tables == {"*fp32", "*fp16", "*bf16"}


def test_a_spill_is_caught() -> None:
    """Chunks enough to need more registers than there are."""
    case = cases()["update adam D=1024 fp32"]
    crowded = replace(case, constants={**case.constants, "BLOCK_C": 2}, num_warps=1)
    assert any(sentence.startswith("spills ") for sentence in sentences(crowded))


@triton.jit
def _forgetful_kernel(W, at, Y, N, D, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, ALIGN: tl.constexpr):  # type: ignore[no-untyped-def]  # fmt: skip  # noqa: E501
    position = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    begin = tl.load(at + position, mask=position < N, other=-1)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    mask = (begin >= 0)[:, None] & (d < D)[None, :]
    rows = tl.load(W + (begin * ALIGN)[:, None] + d[None, :], mask=mask, other=0.0)
    tl.store(Y + (position * D)[:, None] + d[None, :], rows, mask=mask)


def test_a_narrow_load_of_aligned_rows_is_caught() -> None:
    """The compiler is not told that D is a multiple of 4: it masks, and so reads, each element for itself."""
    with patch.object(sequence, "_gather_kernel", _forgetful_kernel):
        noted = launched.launches(lambda: launched.look_up_sequence(Batch(20)), "D=20 fp32")
    forgetful = next(case for case in noted if case.kernel_name == "gather")
    assert sentences(cases()["gather D=20 fp32"]) == []
    assert "loads 0 bytes of rows by 16 bytes at a time, promised 16" in sentences(forgetful)


def test_a_compiler_that_fails_is_caught() -> None:
    case = cases()["gather D=3 fp32"]
    odd = replace(case, constants={**case.constants, "BLOCK_D": 3})
    (sentence,) = sentences(odd)
    assert sentence.startswith("the compiler failed: ") and "power of 2" in sentence


def test_a_compiler_that_takes_its_process_down_is_caught_and_the_other_cases_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compile_case = compiled.compile_case

    def compile_or_die(case: Case, target: str) -> Report:
        if case.name == "gather D=3 fp32":
            os.write(2, b"module {\nfirst.cpp:7: error: layouts differ\n")
            os.kill(os.getpid(), signal.SIGKILL)
        return compile_case(case, target)

    monkeypatch.setattr(compiled, "compile_case", compile_or_die)
    names = ("gather D=128 fp32", "gather D=3 fp32", "gather D=4 fp32")
    assert sentences(*(cases()[name] for name in names)) == [
        "the compiler ended its process with -9: first.cpp:7: error: layouts differ; promised to compile"
    ]


def test_another_order_of_columns_is_caught() -> None:
    """Warps without chunks share a row, and each adds up a part of it."""
    case = cases()["update rowwise_adagrad D=128 fp32"]
    # beside it, eight warps take more registers than the promised ones, or wait longer
    (sentence,) = [
        sentence
        for sentence in sentences(case, replace(case, name=f"{case.name} shared", num_warps=8))
        if sentence.startswith("adds up columns as 128 by ")
    ]
    assert repr(case.name) in sentence


def altered(name: str, **changes: float | tuple[str, ...] | dict[str, float]) -> list[str]:
    """What the check says of a case whose report differs in one thing."""
    changed: Sequence[tuple[Case, str, Report]] = [(cases()[name], "sm_90", replace(report(name, "sm_90"), **changes))]  # type: ignore[arg-type]
    return [sentence for _, _, sentence in broken_promises(changed)]


def test_registers_barriers_and_atomics_are_held_to_their_bounds() -> None:
    lookup, update = "pooled_lookup D=128 fp32", "update sgd D=128 fp32"
    assert altered(lookup, registers=64) == altered(update, registers=72) == []
    assert altered(lookup, registers=65) == ["takes 65 registers, promised at most 64"]
    assert altered(update, registers=73) == ["takes 73 registers, promised at most 72"]
    assert altered(lookup, shared_bytes=(227 << 10) + 1) == [
        "takes 232449 bytes of shared memory, promised at most 232448"
    ]
    assert altered(lookup, barriers=1) == ["waits at 1 barriers, promised 0"]
    assert altered("pooled_lookup D=128 fp16", barriers=2) == ["waits at 2 barriers, promised 1"]
    assert altered(update, atomics=("REDG.ADD.F32",)) == ["has the atomics REDG.ADD.F32, promised none"]
    assert altered(lookup, waits=2.3) == altered(update, long_waits=LONG_WAITS_OF_UPDATES, gathers_first=False) == []
    assert altered(lookup, waits=2.31) == ["waits 2.31 latencies in an iteration, promised at most 2.3"]
    late = f"waits for memory {LONG_WAITS_OF_UPDATES + 1} times in an iteration, promised at most"
    assert altered(update, long_waits=LONG_WAITS_OF_UPDATES + 1) == [f"{late} {LONG_WAITS_OF_UPDATES}"]
    order = "uses a row before it has asked for all of an iteration, promised after"
    assert altered(lookup, gathers_first=False) == [order]
    (sentence,) = altered(update, streams={"load chunks": 0.25})
    assert sentence == "load chunks: uses 25% of the sectors that it touches, promised all"
    assert altered("check_ids D=1 fp32", streams={}, atomics=("ATOMG.ADD",)) == [
        "has the atomics ATOMG.ADD, promised minima"
    ]
