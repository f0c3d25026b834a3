"""What the compiler makes of every kernel for a GPU that need not be here: spills, load widths, atomics, registers."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

pytest.importorskip("triton")

from shardwise.kernels.features import row_alignment
from shardwise.perf import compiled
from shardwise.perf.compiled import Case, Report

pytestmark = pytest.mark.compiled

TARGET = "sm_90"
CASES = {case.name: case for case in compiled.cases()}
# Dims of every power-of-two class, on 16 bytes and not: the classes that some Triton versions crash on lie between
DIMS = (2, 5, 6, 8, 12, 16, 20, 40, 48, 64, 200, 512, 2048)
CASES |= {case.name: case for case in (compiled._update("sgd", dim, "fp32") for dim in DIMS)}
# 72 registers a thread leave room for 28 warps of 32 threads on a multiprocessor of 65,536 registers
REGISTERS = 72
# check_ids searches F feature boundaries for 1024 ids at once and moves little
MORE_REGISTERS = {"check_ids": 96}

# Launches turn an argument of 1 into a constant, which is no tensor in the kernel: one feature, one sample, one column.
ONES = [
    ("pooled_lookup D=3 fp32", {"B": 1, "N": 1}),
    ("gather D=3 fp32", {"D": 1, "N": 1, "ALIGN": 1}),
    ("resolve", {"F": 1, "B": 1, "N": 1, "D": 1, "ALIGN": 1}),
    ("check_ids", {"F": 1, "B": 1, "N": 1}),
    ("fused_update rowwise_adagrad D=3 fp32", {"D": 1, "ALIGN": 1, "SRC_ALIGN": 1}),
]


@cache
def report(name: str) -> Report:
    return compiled.compile_case(CASES[name], TARGET)


def altered(case: Case, *, ones: dict[str, Any] | None = None, types: dict[str, str] | None = None) -> Report:
    """The report of a case with arguments made constant, or with other types."""
    constants = {**case.constants, **(ones or {})}
    divisible = tuple(name for name in case.divisible if name not in constants)
    case = replace(case, constants=constants, types={**case.types, **(types or {})}, divisible=divisible)
    return compiled.compile_case(case, TARGET)


def atomics(found: Report) -> list[str]:
    """Atomic operations on memory; REDUX reduces within a warp."""
    return [op for op in found.memory_ops if re.match(r"ATOM|RED(?!UX)", op)]


@pytest.mark.parametrize("name", CASES)
def test_nothing_spills_and_registers_stay_in_bounds(name: str) -> None:
    found = report(name)
    assert found.spills == 0
    assert not any(op.startswith(("LDL", "STL")) for op in found.memory_ops)
    assert found.registers <= MORE_REGISTERS.get(name, REGISTERS)


@pytest.mark.parametrize("name", CASES)
def test_only_the_checks_have_atomics(name: str) -> None:
    """They take an integer minimum. A float sum by atomics would depend on the order of the programs."""
    if name.startswith("check_"):
        assert atomics(report(name)) == ["ATOMG.32"] or atomics(report(name)) == ["ATOMG.64"]
    else:
        assert atomics(report(name)) == []


def on_16_bytes(name: str) -> bool:
    found = re.search(r"D=(\d+) (fp32|fp16|bf16)", name)
    if found is None:
        return False
    dim, itemsize = int(found[1]), 4 if found[2] == "fp32" else 2
    # an update's tile of 16 rows of 4 columns holds 8 bytes for each thread of a warp
    return row_alignment(dim, itemsize) * itemsize == 16 and not (dim < 8 and name.startswith("fused_update"))


@pytest.mark.parametrize("name", [name for name in CASES if on_16_bytes(name)])
def test_rows_on_16_bytes_move_by_16_bytes(name: str) -> None:
    """Four gathers in flight for a tile of pooled or gradient rows, one for a row of a sequence."""
    found = report(name).memory_ops
    assert found["LDG.128"] >= (1 if name.startswith("gather") else 4)
    # the gradient of a weight is one number
    assert name.startswith("weight_gradient") or found["STG.128"] >= 1


@pytest.mark.parametrize("rule", ["sgd", "adagrad", "rowwise_adagrad", "adam"])
def test_every_state_laid_out_like_the_table_moves_by_16_bytes(rule: str) -> None:
    element_states = {"sgd": 0, "adagrad": 1, "rowwise_adagrad": 0, "adam": 2}[rule]
    found = report(f"fused_update {rule} D=128 fp32").memory_ops
    # four gradient rows, the weights and the states; the weights, the states and the partial sum
    assert found["LDG.128"] == 4 + 1 + element_states
    assert found["STG.128"] == 1 + element_states + 1


@pytest.mark.parametrize(("name", "ones"), ONES, ids=[name for name, _ in ONES])
def test_arguments_of_one_compile(name: str, ones: dict[str, Any]) -> None:
    """A table of one column, or one sample of one feature, failed in the compiler: a constant has no .to()."""
    assert altered(CASES[name], ones=ones).spills == 0


@pytest.mark.parametrize("name", ["pooled_lookup D=128 fp32", "resolve", "check_ids"])
def test_int32_ids_and_offsets_compile(name: str) -> None:
    found = altered(CASES[name], types={"I": "*i32", "O": "*i32"})
    assert found.spills == 0
    assert found.registers <= MORE_REGISTERS.get(name, REGISTERS)


def test_a_spill_would_be_seen() -> None:
    """Chunks enough to need more registers than there are."""
    case = CASES["fused_update adam D=1024 fp32"]
    crowded = replace(case, constants={**case.constants, "BLOCK_C": 4}, num_warps=1)
    assert compiled.compile_case(crowded, TARGET).spills > 0
