"""The model of a compiled loop's waits, on loops written by hand, and the share of sectors that streams use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch

from shardwise.kernels._op import tl, triton
from shardwise.perf.compile import (
    cases as launched,
    cases_jagged as launched_jagged,
    checks as promises,
    compiled,
)
from shardwise.perf.compile.cases import Batch, Case
from shardwise.perf.compile.checks import broken_promises
from shardwise.perf.compile.scoreboard import (
    HIT,
    LATENCY,
    Waits,
    waits,
)
from shardwise.perf.compile.sectors import sector_shares

# of the arguments at 0x210 (ids), 0x218 and 0x220: a thread's element, then two loops' worth of registers
BEGIN = """
S2R R0, SR_TID.X
IMAD.SHL.U32 R1, R0, 0x8, RZ
IADD3 R2, P0, R1, c[0x0][0x210], RZ
IADD3.X R3, RZ, c[0x0][0x214], RZ, P0, !PT
IADD3 R4, P0, R1, c[0x0][0x218], RZ
ULDC.64 UR4, c[0x0][0x220]
"""
# the loads of an id's row: its address is the id's
ROW = "LEA R{a}, P1, R{id}, UR4, 0x4\nLEA.HI.X R{a1}, R{id}, UR5, R{id1}, 0x4, P1"
GATHER = "LDG.E.128 R{v}, desc[UR6][R{a}.64]"


def sass(*loop: str, before: str = BEGIN, after: str = "EXIT") -> str:
    """A kernel as nvdisasm prints it: what comes before the loop, the loop, and what comes after."""
    texts = [before, ".L_x_0:", *loop, "@P6 BRA `(.L_x_0)", after]
    lines = [line.strip() for text in texts for line in text.splitlines() if line.strip()]
    return "\n".join(
        line if line.startswith(".L") else f"        /*{i:04x}*/   {line} ;" for i, line in enumerate(lines)
    )


def lookup(*order: str) -> str:
    """Two ids and their rows; `order` names the steps: "i" loads both ids, "r0" gathers a row, "+0" adds it."""
    steps = {
        "i": "LDG.E.64 R6, [R2.64]\nLDG.E.64 R8, [R2.64+0x8]",
        "r0": "\n".join((ROW, GATHER)).format(a=10, a1=11, id=6, id1=7, v=16),
        "r1": "\n".join((ROW, GATHER)).format(a=12, a1=13, id=8, id1=9, v=20),
        "+0": "FADD R24, R24, R16",
        "+1": "FADD R24, R24, R20",
    }
    return sass(*(steps[step] for step in order))


def test_a_warp_waits_for_its_ids_and_then_for_all_rows_together() -> None:
    stalls = waits(lookup("i", "r0", "r1", "+0", "+1"))
    assert (stalls.long, stalls.gathers_first) == (2, True)
    assert 1.9 < stalls.latencies < 2.1
    assert [text for _, text in stalls.stops] == ["LEA R10, P1, R6, UR4, 0x4", "FADD R24, R24, R16"]
    assert all(LATENCY * 0.9 < cycles <= LATENCY for cycles, _ in stalls.stops)


def test_a_row_that_is_gathered_after_the_first_sum_is_waited_for_by_itself() -> None:
    """The flagship's loop was so compiled, beside a comment that said four gathers were in flight."""
    stalls = waits(lookup("i", "r0", "+0", "r1", "+1"))
    assert (stalls.long, stalls.gathers_first) == (3, False)
    assert stalls.latencies > 2.9


@pytest.mark.parametrize(
    ("second", "long"),
    [
        ("LDG.E R12, [R2.64+0x8]", 1),
        ("LDG.E R12, [R2.64+0x7c]", 1),
        ("LDG.E R12, [R2.64+0x80]", 2),
        # as another thread computes it, and of another argument
        ("IADD3 R10, P0, R0, c[0x0][0x210], RZ\nLDG.E R12, [R10.64]", 1),
        ("LDG.E R12, [R4.64]", 2),
        ("IADD3 R10, P0, R2, 0x400, RZ\nLDG.E R12, [R10.64]", 2),
    ],
)
def test_a_line_that_the_pass_has_loaded_is_there(second: str, long: int) -> None:
    stalls = waits(sass("LDG.E R6, [R2.64]", "IADD3 R7, R6, 0x1, RZ", second, "IADD3 R13, R12, 0x1, RZ"))
    assert stalls.long == long
    assert long == 2 or stalls.latencies < (LATENCY + 2 * HIT) / LATENCY


def test_what_a_pass_loads_for_the_next_is_not_waited_for_where_something_else_is() -> None:
    address, row = ROW.format(a=10, a1=11, id=6, id1=7), GATHER.format(a=10, v=16)
    ids, add = "LDG.E.64 R6, [R2.64]", "FADD R24, R24, R16"
    assert waits(sass(ids, address, row, add)).long == 2
    assert waits(sass(address, ids, row, add)).long == 1


def test_a_row_that_was_prefetched_is_no_long_wait() -> None:
    row = ROW.format(a=10, a1=11, id=6, id1=7)
    loop = (
        "LDG.E.64 R6, [R2.64]",
        row,
        "LDG.E R30, [R4.64]",
        "FADD R31, R30, R30",
        "LDG.E R16, [R10.64]",
        "FADD R24, R16, R24",
    )
    assert waits(sass(*loop)).long == 3
    assert waits(sass(*loop[:2], "CCTL.E.PF2 [R10.64]", *loop[2:])).long == 2


def test_long_waits_are_those_of_a_pass_that_goes_through_no_inner_loop() -> None:
    inner = ".L_x_1:\nLDG.E R6, [R2.64]\nIADD3 R7, R6, 0x1, RZ\n@P5 BRA `(.L_x_1)"
    other = ("LDG.E R16, [R4.64]", "FADD R24, R16, R24")
    through, past = waits(sass(*other, inner)), waits(sass(*other))
    assert (through.long, past.long) == (1, 1)
    assert through.latencies > 1.9 > past.latencies


def test_code_behind_the_end_is_no_loop_and_an_inner_loop_is_taken_once() -> None:
    """A square root's slow path lies behind the kernel and jumps back into it."""
    inner = ".L_x_1:\nLDG.E R6, [R2.64]\nIADD3 R7, R6, 0x1, RZ\n@P5 BRA `(.L_x_1)"
    slow = "EXIT\n.L_x_2:\n" + "MUFU.RSQ R40, R41\n" * 40 + "BRA `(.L_x_0)"
    assert waits(sass(inner, after=slow)) == waits(sass(inner))
    assert waits(sass(inner)).long == 1
    assert waits("        /*0000*/   EXIT ;") == Waits()


@triton.jit(do_not_specialize=["M"])
def _copy_kernel(I, Y, N, M, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    ids = tl.load(I + i, mask=i < N, other=0)
    # a gather is no stream
    tl.store(Y + i, tl.load(I + ids, mask=i < N, other=0), mask=i < M)


def copy_case(kind: str, block: int, aligned: bool) -> Case:
    types = {"I": f"*{kind}", "Y": f"*{kind}", "N": "i32", "M": "i32"}
    known = (("I",), ("Y",), ("N",)) if aligned else (("I",), ("Y",))
    return Case("copy", _copy_kernel, types, {"BLOCK": block}, known, 4)


@pytest.mark.compiled
@pytest.mark.parametrize(
    ("kind", "block", "aligned", "load", "store"),
    [
        # threads that hold 16 bytes and move them one number after another
        ("i32", 512, False, 0.25, 0.25),
        ("i64", 512, False, 0.5, 0.5),
        ("i64", 512, True, 1.0, 0.5),
        ("i32", 128, False, 1.0, 1.0),
        ("i64", 128, False, 1.0, 1.0),
    ],
)
def test_threads_that_hold_neighbours_and_move_them_one_by_one_use_a_part_of_their_sectors(
    kind: str, block: int, aligned: bool, load: float, store: float
) -> None:
    """Every kernel of the index asked for ids, keys and marks two to four times: nothing had looked."""
    case = copy_case(kind, block, aligned)
    report = compiled.compile_case(case, "sm_90")
    assert report.streams == {"load I": load, "store Y": store}
    sentences = [sentence for _, _, sentence in broken_promises([(case, "sm_90", report)])]
    assert len(sentences) == (load < 1) + (store < 1)
    assert all("of the sectors that it touches, promised all" in sentence for sentence in sentences)


def test_two_element_sizes_at_one_place_of_the_source_are_told_apart() -> None:
    """A loop over tensors stores ids and weights by one line: 4 bytes of weights are no half of an id."""
    ttgir = """
#blocked = #ttg.blocked<{sizePerThread = [1], threadsPerWarp = [32], warpsPerCTA = [4], order = [0]}>
  tt.func public @k(%Y: !tt.ptr<i64> loc("Y"(#loc)), %Q: !tt.ptr<f32> loc("Q"(#loc))) {
    %i = tt.make_range {end = 128 : i32, start = 0 : i32} : tensor<128xi32, #blocked> loc(#loc2)
    %0 = tt.splat %Y : !tt.ptr<i64> -> tensor<128x!tt.ptr<i64>, #blocked> loc(#loc2)
    %1 = tt.addptr %0, %i : tensor<128x!tt.ptr<i64>, #blocked>, tensor<128xi32, #blocked> loc(#loc2)
    tt.store %1, %5 : tensor<128x!tt.ptr<i64>, #blocked> loc(#loc3)
    %2 = tt.splat %Q : !tt.ptr<f32> -> tensor<128x!tt.ptr<f32>, #blocked> loc(#loc2)
    %3 = tt.addptr %2, %i : tensor<128x!tt.ptr<f32>, #blocked>, tensor<128xi32, #blocked> loc(#loc2)
    tt.store %3, %6 : tensor<128x!tt.ptr<f32>, #blocked> loc(#loc3)
#loc2 = loc("k.py":2:9)
#loc3 = loc(callsite(#loc2 at #loc2))
"""
    ptx = """
    .file 1 "k.py"
    .loc 1 2 9
    st.global.b64 [ %rd1 + 0 ], { %rd2 };
    st.global.b32 [ %rd3 + 0 ], { %r2 };
"""
    assert sector_shares(ttgir, ptx) == {"store Y": 1.0, "store Q": 1.0}
    wide = ttgir.replace("sizePerThread = [1]", "sizePerThread = [2]")
    assert sector_shares(wide, ptx) == {"store Y": 0.5, "store Q": 0.5}


RUNS: dict[str, Callable[[], object]] = {
    "pooled_lookup D=128 fp32 weighted": partial(launched.look_up, Batch(weighted=True)),
    "pooled_lookup D=8 fp32": partial(launched.look_up, Batch(8)),
    "index_add D=128 fp32": partial(launched_jagged._add_bags, (8, 128), torch.float32),
    "check_gradient D=1 fp32": partial(launched.check, Batch(1)),
    "update rowwise_adagrad D=128 fp32": partial(launched.step, Batch(), "rowwise_adagrad"),
}


def case_named(name: str) -> Case:
    kernel, label = name.split(" ", 1)
    return next(case for case in launched.launches(RUNS[name], label) if case.kernel_name == kernel)


@pytest.mark.compiled
@pytest.mark.parametrize("name", [*RUNS][:3])
def test_without_a_bound_of_registers_the_compiler_gathers_row_after_row(name: str) -> None:
    case = case_named(name)
    assert broken_promises([(case, "sm_90", compiled.compile_case(case, "sm_90"))]) == []
    unbound = replace(case, registers=None)
    broken = broken_promises([(unbound, "sm_90", compiled.compile_case(unbound, "sm_90"))])
    assert "uses a row before it has asked for all of an iteration, promised after" in [text for _, _, text in broken]


@pytest.mark.compiled
def test_a_gradient_of_any_size_is_read_by_16_bytes_up_to_its_last_block() -> None:
    """Of 8 elements nobody knows that the last mask ends on 16 bytes: all were read one by one."""
    case = case_named("check_gradient D=1 fp32")
    assert ("N",) not in case.aligned
    # 16 elements a thread
    assert compiled.compile_case(case, "sm_90").accesses["load", 16] == 4


@pytest.mark.compiled
def test_an_update_waits_as_often_as_it_promises() -> None:
    report = compiled.compile_case(case_named("update rowwise_adagrad D=128 fp32"), "sm_90")
    assert report.long_waits == promises.LONG_WAITS_OF_UPDATES
