"""Every kind of fault planted in a small kernel and found, beside the kernel without it, which is clean."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from executor_ptx import kernel, launch, prepare

from shardwise.perf.gpu import KINDS, Fault, Launch, Memory

WORDS = np.arange(64, dtype=np.uint32)
NOTHING = np.zeros(64, np.uint32)
# each thread's word of shared memory in %r1, that of its neighbour in %r2, of the lane 32 threads on in %r3
PLACES = """
    mov.b32 %r0, smem; mad.lo.s32 %r1, %tid, 4, %r0;
    add.s32 %r4, %tid, 1; and.b32 %r4, %r4, 63; mad.lo.s32 %r2, %r4, 4, %r0;
    xor.b32 %r5, %tid, 32; mad.lo.s32 %r3, %r5, 4, %r0;
    xor.b32 %r6, %tid, 1; mad.lo.s32 %r7, %r6, 4, %r0;
"""


def faults(body: str, *buffers: np.ndarray[Any, Any], **settings: Any) -> list[tuple[str, int | None]]:
    """Kinds and threads of what is found, also where the launch ends."""
    made, _ = prepare(body, *buffers, **settings)
    try:
        made.run(settings.get("grid", (1,)), step_limit=20_000)
    except Fault as fault:
        assert fault.finding in made.faults
    assert all(finding.kind in KINDS and str(finding) for finding in made.faults)
    return [(finding.kind, finding.thread) for finding in made.faults]


COPY = (
    "mad.wide.u32 %rd1, %tid, {step}, %in0; {load}; mad.wide.u32 %rd2, %tid, 4, %in1; st.global.b32 [%rd2], %r1; ret;"
)


@pytest.mark.parametrize(
    ("step", "load", "found"),
    [
        (4, "ld.global.b32 %r1, [%rd1]", []),
        (8, "ld.global.b32 %r1, [%rd1]", [("outside", 32)]),
        (4, "ld.global.b32 %r1, [%rd1+-4]", [("outside", 0)]),
        # the last thread's four words end beyond the buffer
        (4, "and.b64 %rd1, %rd1, -16; ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%rd1]", []),
        (4, "and.b64 %rd1, %rd1, -16; ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%rd1+16]", [("outside", 60)]),
        (4, "setp.lt.u32 %p1, %tid, 63; mov.b32 %r1, 0; @%p1 ld.global.b32 %r1, [%rd1+4]", []),
        (4, "mov.u64 %rd1, 0; ld.global.b32 %r1, [%rd1]", [("outside", 0)]),
        # one buffer too far is no other buffer
        (4, "add.s64 %rd1, %rd1, 1048576; ld.global.b32 %r1, [%rd1]", [("outside", 0)]),
        (4, "atom.global.add.u32 %r1, [%rd1], 1", []),
        (4, "atom.global.add.u32 %r1, [%rd1+64], 1", [("outside", 48)]),
        (4, "st.global.b32 [%rd1+252], %tid; mov.b32 %r1, 0", [("outside", 1)]),
        # a prefetch of nothing does nothing
        (4, "prefetch.global.L2 [%rd1+4096]; mov.b32 %r1, 0", []),
    ],
)
def test_addresses_outside_of_every_buffer(step: int, load: str, found: list[tuple[str, int]]) -> None:
    assert faults(COPY.format(step=step, load=load), WORDS, NOTHING) == found


@pytest.mark.parametrize(("shift", "found"), [(0, []), (16, []), (8, [("misaligned", 0)]), (4, [("misaligned", 0)])])
def test_vector_accesses_through_a_false_alignment(shift: int, found: list[tuple[str, int]]) -> None:
    body = "mad.wide.u32 %rd1, %tid, 16, %in0; ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%rd1]; ret;"
    assert faults(body, np.arange(256, dtype=np.uint32), shift=shift) == found


def test_misaligned_accesses_of_shared_memory() -> None:
    assert faults(PLACES + "st.shared.b32 [%r1+2], %tid; ret;", shared=272) == [("misaligned", 0)]
    assert faults(PLACES + "st.shared.b32 [%r1+4], %tid; ret;", shared=272) == []


@pytest.mark.parametrize(
    ("access", "found"),
    [
        ("st.shared.b32 [%r1], %tid", []),
        ("st.shared.b32 [%r1+4], %tid", [("outside", 63)]),
        ("atom.shared.add.u32 %r10, [%r1+256], 1", [("outside", 0)]),
        ("mov.b32 %r10, 0; st.shared.b32 [%r10], %tid", [("outside", 0)]),
    ],
)
def test_addresses_outside_of_shared_memory(access: str, found: list[tuple[str, int]]) -> None:
    assert faults(f"{PLACES} {access}; ret;", shared=256) == found


BARRIER, WARP = "bar.sync 0;", "bar.warp.sync -1;"
WRITE, READ = "st.shared.b32 [%r1], %tid;", "ld.shared.b32 %r10, [{}];"
LAST_THREAD, OF_WARP = "setp.eq.s32 %p1, %tid, 63;", "and.b32 %r8, %tid, 32; mad.lo.s32 %r8, %r8, 4, %r0;"
ADD = "atom.shared.add.u32 %r10, [%r0], 1;"


@pytest.mark.parametrize(
    ("body", "found"),
    [
        # write, read: with another warp, with another lane
        (WRITE + BARRIER + READ.format("%r3"), []),
        (WRITE + WARP + READ.format("%r3"), [("race", 0)]),
        (WRITE + WARP + READ.format("%r7"), []),
        (WRITE + READ.format("%r7"), [("race", 0)]),
        (WRITE + READ.format("%r1"), []),
        # a shuffle orders no memory
        (WRITE + "shfl.sync.bfly.b32 %r9, %tid, 1, 31, -1;" + READ.format("%r7"), [("race", 0)]),
        # read, write
        (WRITE + BARRIER + READ.format("%r3") + BARRIER + "st.shared.b32 [%r1], %r10;", []),
        (WRITE + BARRIER + READ.format("%r3") + "st.shared.b32 [%r1], %r10;", [("race", 0)]),
        (WRITE + BARRIER + READ.format("%r7") + "st.shared.b32 [%r1], %r10;", [("race", 0)]),
        (WRITE + BARRIER + READ.format("%r7") + WARP + "st.shared.b32 [%r1], %r10;", []),
        (WRITE + BARRIER + READ.format("%r1") + "st.shared.b32 [%r1], 7;", []),
        # both warps read, then they write
        (WRITE + BARRIER + READ.format("%r0") + WARP + "st.shared.b32 [%r0], 7;", [("race", 0)]),
        # what a lane read before the warp met does not matter, what others read since does
        (WRITE + BARRIER + READ.format("%r7") + WARP + READ.format("%r1") + "st.shared.b32 [%r1], 7;", []),
        (WRITE + BARRIER + READ.format("%r0") + WARP + LAST_THREAD + "@%p1 st.shared.b32 [%r0], 7;", [("race", 63)]),
        (WRITE + BARRIER + OF_WARP + READ.format("%r8") + LAST_THREAD + "@%p1 st.shared.b32 [%r8], 7;", [("race", 63)]),
        (WRITE + BARRIER + OF_WARP + READ.format("%r8") + WARP + LAST_THREAD + "@%p1 st.shared.b32 [%r8], 7;", []),
        # write, write
        (WRITE + "st.shared.b32 [%r3], %tid;", [("race", 0)]),
        (WRITE + BARRIER + "st.shared.b32 [%r3], %tid;", []),
        ("st.shared.b32 [%r0], %tid;", [("race", 0)]),
        # the same value, at once and twice
        ("st.shared.b32 [%r0], 7;", []),
        ("st.shared.b32 [%r0], 7; st.shared.b32 [%r0], 7;", [("race", 0)]),
        # atomic accesses among themselves, and beside others
        ("st.shared.b32 [%r0], 0;" + BARRIER + ADD + BARRIER + READ.format("%r0"), []),
        ("st.shared.b32 [%r0], 0;" + BARRIER + ADD + READ.format("%r0"), [("race", 0)]),
        (WRITE + "atom.shared.add.u32 %r10, [%r3], 1;", [("race", 0)]),
        # bytes of one word are different memory
        ("add.s32 %r1, %tid, %r0; st.shared.b8 [%r1], %tid;" + BARRIER + "ld.shared.b8 %r10, [%r1];", []),
    ],
)  # fmt: skip
def test_races_in_shared_memory(body: str, found: list[tuple[str, int]]) -> None:
    assert faults(f"{PLACES} {body} ret;", shared=256) == found


def test_shared_memory_that_nobody_wrote() -> None:
    read = f"{BARRIER} ld.shared.b32 %r10, [%r3]; ret;"
    assert faults(f"{PLACES} st.shared.b32 [%r1], %tid; {read}", shared=256) == []
    half = "setp.lt.u32 %p1, %tid, 32; @%p1 st.shared.b32 [%r1], %tid;"
    assert faults(f"{PLACES} {half} {read}", shared=256) == [("unwritten", 0)]
    # each CTA has its own
    first = "mov.u32 %r8, %ctaid.x; setp.eq.s32 %p1, %r8, 0; @%p1 st.shared.b32 [%r1], %tid;"
    assert faults(f"{PLACES} {first} {read}", shared=256, grid=(2,)) == [("unwritten", 0)]


OWN = """
    mov.u32 %r8, %ctaid.x; mad.lo.s32 %r9, %r8, 64, %tid;
    mad.wide.u32 %rd1, %r9, 4, %in0; mad.wide.u32 %rd2, %tid, 4, %in0;
"""
# halves of a word
HALVES = "mov.u32 %r8, %ctaid.x; mad.lo.s32 %r9, %tid, 4, %r8; mad.wide.u32 %rd1, %r9, 2, %in0; mov.b16 %h1, 1;"


@pytest.mark.parametrize(
    ("body", "found"),
    [
        (f"{OWN} st.global.b32 [%rd1], %tid;", []),
        (f"{OWN} st.global.b32 [%rd2], %tid;", [("shared word", 0)]),
        (f"{OWN} ld.global.b32 %r10, [%rd2];", []),
        (f"{OWN} ld.global.b32 %r10, [%rd2]; st.global.b32 [%rd1], %tid;", [("shared word", 0)]),
        (f"{OWN} st.global.b32 [%rd1], %tid; ld.global.b32 %r10, [%rd2];", [("shared word", 0)]),
        (f"{OWN} ld.global.b32 %r10, [%rd1]; st.global.b32 [%rd1], %tid;", []),
        (f"{OWN} atom.global.add.u32 %r10, [%rd2], 1; red.global.max.u32 [%rd2], 1;", []),
        (f"{OWN} atom.global.add.u32 %r10, [%rd2], 1; st.global.b32 [%rd1], %tid;", [("shared word", 0)]),
        (f"{OWN} ld.global.b32 %r10, [%rd2]; atom.global.add.u32 %r10, [%rd2], 1;", [("shared word", 0)] * 2),
        (f"{OWN} ld.relaxed.gpu.global.b32 %r10, [%rd2]; atom.global.add.u32 %r10, [%rd2], 1;", []),
        (f"{HALVES} st.global.b16 [%rd1], %h1;", []),
    ],
)
def test_words_that_two_ctas_share(body: str, found: list[tuple[str, int]]) -> None:
    data = np.zeros(256, np.uint32)
    assert faults(f"{body} ret;", data, grid=(3,)) == found
    # one CTA has nobody to share with
    assert faults(f"{body} ret;", data, grid=(1,)) == []


LAST = "setp.gt.u32 %p1, %tid, 31; setp.eq.u32 %p2, %tid, 5; setp.ne.u32 %p3, %tid, 5;"


@pytest.mark.parametrize(
    ("body", "found"),
    [
        # a warp goes around one of two barriers; then it meets the other warp at the second
        ("@%p1 bra L1; bar.sync 0; L1: bar.sync 0; ret;", [("missing", 0)]),
        ("bar.sync 0; bar.sync 0; ret;", []),
        # those who left are not waited for
        ("@%p1 bra L1; bar.sync 0; L1: ret;", []),
        ("@%p1 exit; bar.sync 0; ret;", []),
        ("@%p2 bra L1; bar.sync 0; L1: bar.sync 0; ret;", [("missing", 0)]),
        ("@%p2 exit; shfl.sync.up.b32 %r1, %tid, 1, 0, -1; ret;", [("missing", 6)]),
        ("@%p2 exit; shfl.sync.up.b32 %r1, %tid, 8, 0, 0xffffffdf; ret;", [("missing", 37), ("missing", 13)]),
        ("@%p2 bra L1; shfl.sync.bfly.b32 %r1, %tid, 1, 31, -1; L1: ret;", [("missing", 5), ("missing", 4)]),
        ("shfl.sync.bfly.b32 %r1, %tid, 1, 31, -1; ret;", []),
        # a warp alone may shuffle
        ("@%p1 bra L1; shfl.sync.bfly.b32 %r1, %tid, 1, 31, -1; L1: ret;", []),
        # lanes that the mask names, and others
        ("@%p3 shfl.sync.idx.b32 %r1, %tid, 0, 31, 0xffffffdf; ret;", [("missing", 37)]),
        ("setp.lt.u32 %p4, %tid, 4; @%p4 shfl.sync.idx.b32 %r1, %tid, 0, 31, 0xf; ret;", []),
        ("setp.lt.u32 %p4, %tid, 5; @%p4 shfl.sync.idx.b32 %r1, %tid, 0, 31, 0xf; ret;", [("missing", 4)]),
        ("setp.lt.u32 %p4, %tid, 3; @%p4 shfl.sync.idx.b32 %r1, %tid, 0, 31, 0xf; ret;", [("missing", 3)]),
        ("@%p3 redux.sync.add.s32 %r1, %tid, -1; ret;", [("missing", 5)]),
        ("redux.sync.add.s32 %r1, %tid, -1; ret;", []),
        ("@%p3 vote.sync.ballot.b32 %r1, %p1, -1; ret;", [("missing", 5)]),
        ("@%p3 bar.warp.sync -1; ret;", [("missing", 5)]),
        ("@%p2 exit; bar.warp.sync -1; ret;", []),
    ],
)
def test_threads_that_do_not_come(body: str, found: list[tuple[str, int]]) -> None:
    assert faults(LAST + body) == found


@pytest.mark.parametrize(
    "op",
    [
        "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r10}, [%r11]",
        "stmatrix.sync.aligned.m8n8.x1.shared.b16 [%r11], {%r10}",
    ],
)
def test_lanes_that_do_not_come_to_a_matrix(op: str) -> None:
    # each warp has a matrix of 128 bytes
    rows = "and.b32 %r12, %tid, 7; shr.u32 %r13, %tid, 5; mad.lo.s32 %r12, %r13, 8, %r12;"
    start = f"{PLACES} {LAST} {rows} mad.lo.s32 %r11, %r12, 16, %r0; st.shared.b32 [%r1], 0; mov.b32 %r10, 0; {BARRIER}"
    assert faults(f"{start} {op}; ret;", shared=256) == []
    assert ("missing", 5) in faults(f"{start} @%p3 {op}; ret;", shared=256)


@pytest.mark.parametrize("rows", ["x1", "x1.trans"])
def test_a_matrix_needs_a_barrier_though_each_lane_gives_the_address_of_what_it_wrote(rows: str) -> None:
    """Lanes get parts of rows that others wrote."""
    start = f"{PLACES} and.b32 %r12, %tid, 7; mad.lo.s32 %r11, %r12, 16, %r0; setp.lt.u32 %p1, %tid, 8; mov.b32 %r9, 0;"
    write = "@%p1 st.shared.v4.b32 [%r11], {%r9, %r9, %r9, %r9};"
    read = f"ldmatrix.sync.aligned.m8n8.{rows}.shared.b16 {{%r10}}, [%r11]; ret;"
    # lane 0 has a part of row 0, or of rows 0 and 1
    assert faults(f"{start} {write} {read}", threads=32, shared=128) == [("race", 1 if rows == "x1" else 0)]
    assert faults(f"{start} {write} bar.warp.sync -1; {read}", threads=32, shared=128) == []
    store = f"stmatrix.sync.aligned.m8n8.{rows}.shared.b16 [%r11], {{%r9}};"
    words = "ld.shared.b32 %r10, [%r1]; ret;"
    # each lane reads a word of a row: its own, where no lane has a column
    expected = [] if rows == "x1" else [("race", 0)]
    assert faults(f"{start} {store} {words}", threads=32, shared=128) == expected
    assert faults(f"{start} {store} bar.warp.sync -1; {words}", threads=32, shared=128) == []


ASYNC = PLACES + "mad.wide.u32 %rd1, %tid, 4, %in0; mad.wide.u32 %rd2, %tid, 4, %in1;"
BEGIN = "cp.async.ca.shared.global [%r1], [%rd1], 4;"
COMMIT, WAIT = "cp.async.commit_group;", "cp.async.wait_group {};"
END = "ld.shared.b32 %r10, [{}]; st.global.b32 [%rd2], %r10; ret;"


@pytest.mark.parametrize(
    ("body", "found"),
    [
        (BEGIN + COMMIT + WAIT.format(0) + END.format("%r1"), []),
        (BEGIN + COMMIT + END.format("%r1"), [("in flight", 0)]),
        (BEGIN + WAIT.format(0) + END.format("%r1"), [("in flight", 0)]),
        (BEGIN + COMMIT + WAIT.format(1) + END.format("%r1"), [("in flight", 0)]),
        (BEGIN + COMMIT + COMMIT + WAIT.format(1) + END.format("%r1"), []),
        (BEGIN + "cp.async.wait_all;" + END.format("%r1"), []),
        # others see it after a barrier behind the wait
        (BEGIN + COMMIT + WAIT.format(0) + END.format("%r3"), [("race", 0)]),
        (BEGIN + COMMIT + WAIT.format(0) + BARRIER + END.format("%r3"), []),
        (BEGIN + COMMIT + BARRIER + WAIT.format(0) + END.format("%r3"), [("race", 0)]),
        # what is there is not overwritten while another reads it, nor a copy while it goes on
        (WRITE + BARRIER + READ.format("%r3") + BEGIN + COMMIT + WAIT.format(0) + "ret;", [("race", 0)]),
        (BEGIN + COMMIT + "st.shared.b32 [%r1], 0;" + WAIT.format(0) + "ret;", [("in flight", 0)]),
    ],
)  # fmt: skip
def test_copies_that_were_not_waited_for(body: str, found: list[tuple[str, int]]) -> None:
    assert faults(ASYNC + body, WORDS, NOTHING, shared=256) == found


def test_a_copy_arrives_with_its_wait_and_fills_with_zeros() -> None:
    size = "setp.lt.u32 %p1, %tid, 10; selp.b32 %r20, 4, 0, %p1;"
    body = (
        ASYNC + size + "cp.async.ca.shared.global [%r1], [%rd1], 4, %r20;" + COMMIT + WAIT.format(0) + END.format("%r1")
    )
    made, (_, out) = launch(body, WORDS + 1, NOTHING, shared=256)
    assert not made.faults
    assert out.tolist() == [*range(1, 11)] + [0] * 54


def test_memory_that_the_caller_left_empty() -> None:
    body = "mad.wide.u32 %rd1, %tid, 4, %in0; {} ld.global.b32 %r1, [%rd1]; ret;"
    assert faults(body.format(""), NOTHING, initialised=False) == [("unwritten", 0)]
    assert faults(body.format(""), NOTHING) == []
    assert faults(body.format("st.global.b32 [%rd1], %tid;"), NOTHING, initialised=False) == []
    half = "setp.lt.u32 %p1, %tid, 40; @%p1 st.global.b32 [%rd1], %tid;"
    assert faults(body.format(half), NOTHING, initialised=False) == [("unwritten", 40)]


def test_what_was_written_is_known_to_the_next_launch() -> None:
    memory = Memory()
    address = memory.put(NOTHING, "Y", initialised=np.arange(256) < 128)
    assert memory.written(address).sum() == 128
    store = kernel("setp.gt.u32 %p1, %tid, 50; mad.wide.u32 %rd1, %tid, 4, %in0; @%p1 st.global.b32 [%rd1], 7; ret;", 1)
    Launch(store, memory, 0, [address]).run((1,))
    assert np.flatnonzero(~memory.written(address)).tolist() == list(range(128, 204))
    load = kernel("mad.wide.u32 %rd1, %tid, 4, %in0; ld.global.b32 %r1, [%rd1]; ret;", 1)
    assert [f.thread for f in Launch(load, memory, 0, [address]).run((1,)).faults] == [32]


def test_loops_without_an_end() -> None:
    assert faults("L1: add.s32 %r1, %tid, 1; setp.gt.s32 %p1, %r1, 0; @%p1 bra L1; ret;") == [("endless", None)]
    assert faults("mov.b32 %r1, 0; L1: add.s32 %r1, %r1, 1; setp.lt.s32 %p1, %r1, 50; @%p1 bra L1; ret;") == []


def test_registers_without_a_value() -> None:
    assert faults("add.s32 %r1, %r2, 1; ret;") == [("unwritten", None)]


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ("st.global.b32 [%rd1], %tid; bar.sync 0; ld.global.b32 %r1, [%rd2];", []),
        ("st.global.b32 [%rd1], %tid; ld.global.b32 %r1, [%rd2];", [("race", 0)]),
        ("ld.global.b32 %r1, [%rd2]; bar.sync 0; st.global.b32 [%rd1], %tid;", []),
        ("ld.global.b32 %r1, [%rd2]; st.global.b32 [%rd1], %tid;", [("race", 0)]),
        ("ld.global.b32 %r1, [%rd1]; st.global.b32 [%rd1], %tid;", []),
        ("atom.global.add.u32 %r1, [%rd1], 1; atom.global.add.u32 %r1, [%rd2], 1;", []),
        ("atom.global.add.u32 %r1, [%rd1], 1; st.global.b32 [%rd2], 1;", [("race", 0)]),
    ],
)
def test_races_of_two_warps_of_a_cta_in_global_memory(body: str, found: list[tuple[str, int]]) -> None:
    own = "mov.u32 %r8, %ctaid.x; mad.lo.s32 %r8, %r8, 64, %tid; mad.wide.u32 %rd1, %r8, 4, %in0;"
    # the other warp's word
    own += "xor.b32 %r9, %r8, 32; mad.wide.u32 %rd2, %r9, 4, %in0;"
    data = np.zeros(128, np.uint32)
    assert faults(own + body + "ret;", data, grid=(2,)) == found
    # lanes of a warp go in step
    own = own.replace("%r8, 32;", "%r8, 1;")
    assert faults(own + body + "ret;", data, grid=(2,)) == []


def test_a_finding_says_what_where_and_who() -> None:
    with pytest.raises(Fault, match=r"outside.*B0, 256 bytes.*`ld.global.b32 %r1, \[%rd1\]`.*PTX line \d+.*thread 32"):
        launch(COPY.format(step=8, load="ld.global.b32 %r1, [%rd1]"), WORDS, NOTHING)


def test_each_barrier_that_is_taken_out_is_missed() -> None:
    body = WRITE + BARRIER + READ.format("%r3") + BARRIER + "st.shared.b32 [%r2], %r10; ret;"
    whole = kernel(PLACES + body, 1)
    assert len(whole.barriers) == 2
    for i in range(2):
        made = Launch(whole.without_barrier(i), Memory(), 256, [0]).run((1,))
        assert {finding.kind for finding in made.faults} == {"race"}
    assert not Launch(whole, Memory(), 256, [0]).run((1,)).faults


def test_ctas_in_another_order_give_other_results_where_they_share() -> None:
    body = "mov.u32 %r1, %ctaid.x; st.global.b32 [%in0], %r1; ret;"
    last = {int(launch(body, NOTHING, grid=(8,), shuffle=seed)[1][0][0]) for seed in range(8)}
    assert len(last) > 1
    assert int(launch(body, NOTHING, grid=(8,))[1][0][0]) == 7


def test_sectors_of_the_requests_of_warps() -> None:
    body = "mad.wide.u32 %rd1, %tid, {step}, %in0; ld.global.{kind} {into}, [%rd1]; ret;"
    data = np.zeros(4096, np.uint32)
    cases = {
        # bytes apart, type: requests, bytes, sectors of two warps
        (4, "b32", "%r1"): (2, 256, 8),
        (8, "b32", "%r1"): (2, 256, 16),
        (32, "b32", "%r1"): (2, 256, 64),
        (0, "b32", "%r1"): (2, 8, 2),
        (16, "v4.b32", "{%r1, %r2, %r3, %r4}"): (2, 1024, 32),
        (32, "v4.b32", "{%r1, %r2, %r3, %r4}"): (2, 1024, 64),
        (1, "b8", "%h1"): (2, 64, 2),
    }
    for (step, kind, into), want in cases.items():
        made, _ = launch(body.format(step=step, kind=kind, into=into), data)
        assert dict(made.requests) == {"load B0": dict(zip(("requests", "bytes", "sectors"), want, strict=True))}
        ((_, name),) = made.instruction_requests
        assert name == "load B0"
    half = "setp.lt.u32 %p1, %tid, 8; mad.wide.u32 %rd1, %tid, 4, %in0; @%p1 st.global.b32 [%rd1], %tid; ret;"
    assert dict(launch(half, data)[0].requests) == {"store B0": {"requests": 1, "bytes": 32, "sectors": 1}}
