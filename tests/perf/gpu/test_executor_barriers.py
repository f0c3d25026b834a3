"""A barrier that nothing misses: redundant if all that it alone orders ran, of one thread each; else unexplained."""

from __future__ import annotations

import numpy as np
import pytest
from executor_ptx import kernel, prepare

from shardwise.perf.gpu import Launch, Memory
from shardwise.perf.gpu.barriers import SEVERAL, Around, fixed_places, pairs_at

PLACES = "mov.b32 %r0, smem; mad.lo.s32 %r1, %tid, 4, %r0; xor.b32 %r5, %tid, 32; mad.lo.s32 %r3, %r5, 4, %r0;"
BARRIER, WRITE = "bar.sync 0;", "st.shared.b32 [%r1], %tid;"
OWN, OTHER = "ld.shared.b32 %r10, [%r1];", "ld.shared.b32 %r10, [%r3];"


def around(body: str, barrier: int = 0, *, threads: int = 64, shared: int = 256) -> tuple[Around, list[str]]:
    """What is known of a barrier after a run of a kernel without it, and the faults of that run."""
    whole = kernel(PLACES + body + " ret;", 1, threads)
    watch = Around(pairs_at(whole, barrier), fixed_places(whole))
    made = Launch(whole.without_barrier(barrier), Memory(), shared, [0], around=watch).run((2,))
    watch.end_launch()
    return watch, [finding.kind for finding in made.faults]


def opcodes(body: str, barrier: int = 0) -> set[tuple[str, str]]:
    """The pairs that a barrier alone is between, by opcode."""
    whole = kernel(PLACES + body + " ret;", 1)
    return {(whole.code[a].parts[0], whole.code[b].parts[0]) for a, b in pairs_at(whole, barrier)}


def test_a_barrier_between_a_threads_own_words_is_redundant() -> None:
    watch, faults = around(WRITE + BARRIER + OWN)
    assert faults == [] and len(watch.pairs) == 1 and watch.redundant


def test_a_barrier_that_orders_nothing_is_redundant() -> None:
    watch, faults = around(BARRIER + WRITE + OWN)
    assert faults == [] and watch.pairs == frozenset() and watch.redundant
    # two reads need no order
    assert opcodes(WRITE + BARRIER + OTHER + BARRIER + OWN, 1) == set()


def test_a_barrier_that_is_missed_is_not_redundant() -> None:
    watch, faults = around(WRITE + BARRIER + OTHER)
    assert faults == ["race"] and not watch.redundant and watch.meeting == watch.pairs


def test_what_no_run_came_to_shows_nothing() -> None:
    """The end of a loop and its begin, where it goes around once."""
    body = f"mov.b32 %r9, 0; L1: {BARRIER} {WRITE} {BARRIER} {OTHER} add.s32 %r9, %r9, 1;"
    body += "setp.lt.s32 %p1, %r9, {}; @%p1 bra L1;"
    once, faults = around(body.format(1))
    # the write after the read was not behind it in this run: that both ran is what counts, and that they meet
    assert faults == [] and not once.redundant
    assert around(body.format(2))[1] == ["race"]
    skipped, faults = around(WRITE + BARRIER + "setp.gt.u32 %p1, %tid, 64; @%p1 ld.shared.b32 %r10, [%r3];")
    assert faults == [] and not skipped.redundant and skipped.apart == skipped.meeting == set()


def test_barriers_between_and_branches_around_them_decide_which_pairs_there_are() -> None:
    assert opcodes(WRITE + BARRIER + OTHER) == {("st", "ld")}
    assert opcodes(WRITE + BARRIER + BARRIER + OTHER) == set()
    # a way around the second barrier
    jump = "setp.lt.u32 %p1, %tid, 64; @%p1 bra L1;"
    assert opcodes(WRITE + BARRIER + jump + BARRIER + "L1: " + OTHER) == {("st", "ld")}
    # a barrier of a warp orders nothing between warps, and one of all orders the lanes of a warp
    assert opcodes(WRITE + BARRIER + "bar.warp.sync -1;" + OTHER) == {("st", "ld")}
    assert opcodes(WRITE + "bar.warp.sync -1;" + BARRIER + OTHER) == set()
    # words of global memory are ordered by a barrier, too, but not those of parameters
    assert opcodes("st.global.b32 [%in0], %tid;" + BARRIER + "ld.global.b32 %r10, [%in0];") == {("st", "ld")}
    # a copy writes where it begins and where it is waited for
    wait = "cp.async.wait_group 0;"
    copy = f"cp.async.ca.shared.global [%r1], [%in0], 4; cp.async.commit_group; {wait}"
    assert opcodes(copy + BARRIER + OTHER) == {("cp", "ld")}
    assert len(pairs_at(kernel(PLACES + copy + BARRIER + OTHER + "ret;", 1), 0)) == 2


def test_words_of_global_memory_that_one_warp_writes_and_another_reads() -> None:
    body = "mul.wide.u32 %rd1, %tid, 4; add.s64 %rd1, %in0, %rd1; xor.b32 %r5, %tid, {}; mul.wide.u32 %rd2, %r5, 4;"
    body += "add.s64 %rd2, %in0, %rd2; st.global.b32 [%rd1], %tid; bar.sync 0; ld.global.b32 %r1, [%rd2]; ret;"
    for lane, redundant in ((32, False), (1, True)):
        made, _ = prepare(body.format(lane), np.zeros(64, np.uint32))
        watch = Around(pairs_at(made.kernel, 0))
        made.kernel, made.record.around = made.kernel.without_barrier(0), watch
        made.run((1,))
        watch.end_launch()
        assert watch.redundant is redundant and (made.faults == []) is redundant


@pytest.mark.parametrize(("second", "meets"), [([0, 1], False), ([1, 0], True), ([SEVERAL, 1], True)])
def test_pieces_of_one_owner_each_are_apart(second: list[int], meets: bool) -> None:
    watch = Around(frozenset({(3, 7)}))
    pieces = np.array([[0], [2]])
    watch.note(3, 0, np.array([0, 1]), pieces, 4)
    watch.note(7, 0, np.array(second), pieces, 4)
    # another memory's pieces have nothing to do with it
    watch.note(7, 1 << 36, np.array([5, 5]), pieces, 4)
    watch.come(3, 1, np.arange(2))
    watch.go_by(1, np.arange(2))
    watch.come(7, 1, np.arange(2))
    watch.end_launch()
    assert (watch.meeting == watch.pairs) is meets and watch.redundant is not meets
    other = Around(watch.pairs)
    assert not other.redundant
    other.join(watch)
    assert other.redundant is not meets


def test_buffers_that_a_loop_exchanges_are_not_apart_before_it_went_around() -> None:
    """Each turn writes own words of one buffer and reads others' of the other one."""
    body = "add.s32 %r2, %r1, 256; add.s32 %r4, %r3, 256; st.shared.b32 [%r1], %tid; st.shared.b32 [%r2], %tid;"
    body += f"mov.b32 %r9, 0; bar.sync 0; L1: bar.sync 0; {WRITE} ld.shared.b32 %r10, [%r4];"
    body += "mov.b32 %r6, %r1; mov.b32 %r1, %r2; mov.b32 %r2, %r6; mov.b32 %r6, %r3; mov.b32 %r3, %r4;"
    body += "mov.b32 %r4, %r6; add.s32 %r9, %r9, 1; setp.lt.s32 %p1, %r9, {}; @%p1 bra L1;"
    once, faults = around(body.format(1), 1, shared=512)
    assert faults == [] and once.pairs and not once.meeting and not once.redundant
    twice, faults = around(body.format(2), 1, shared=512)
    assert faults == ["race"] * 2 and not twice.redundant


@pytest.mark.parametrize(("address", "redundant"), [("%r1", True), ("%r8", False)])
def test_addresses_that_follow_from_the_thread_need_no_second_turn(address: str, redundant: bool) -> None:
    """Words of its own that each thread writes and reads in a loop that goes around once."""
    body = f"mov.b32 %r9, 0; mov.b32 %r8, %r1; bar.sync 0; L1: bar.sync 0; st.shared.b32 [{address}], %tid;"
    body += f"ld.shared.b32 %r10, [{address}]; add.s32 %r8, %r8, 4; add.s32 %r9, %r9, 1;"
    watch, faults = around(body + "setp.lt.s32 %p1, %r9, 1; @%p1 bra L1;", 1)
    assert faults == [] and watch.pairs and watch.redundant is redundant


def test_a_copy_reads_until_it_is_waited_for() -> None:
    """One warp copies words that the other changes, behind a barrier after the wait; one before it is no help."""
    body = "mul.wide.u32 %rd1, %tid, 4; add.s64 %rd1, %in0, %rd1; xor.b32 %r5, %tid, 32; mul.wide.u32 %rd2, %r5, 4;"
    body += "add.s64 %rd2, %in0, %rd2; cp.async.ca.shared.global [%r1], [%rd1], 4; cp.async.commit_group; bar.sync 0;"
    body += "cp.async.wait_group 0; bar.sync 0; st.global.b32 [%rd2], %tid; ret;"
    made, _ = prepare(PLACES + body, np.zeros(64, np.uint32), shared=256)
    watch = Around(pairs_at(made.kernel, 1), fixed_places(made.kernel))
    made.kernel, made.record.around = made.kernel.without_barrier(1), watch
    made.run((1,))
    watch.end_launch()
    assert made.faults == [] and watch.meeting and not watch.redundant


def test_a_barrier_of_some_lanes_is_none() -> None:
    barriers = "bar.warp.sync -1; {} " + OTHER
    assert opcodes(WRITE + barriers.format("bar.warp.sync -1;")) == set()
    assert opcodes(WRITE + barriers.format("bar.warp.sync 3;")) == {("st", "ld")}
