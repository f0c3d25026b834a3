"""The executor's machine: parsing, branches that meet again, and instructions of a whole warp, beside plain Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from executor_ptx import Array, compute, launch

from shardwise.perf.gpu import Fault, Kernel, Launch, Memory, ParseError

LANES = np.arange(32)
OUT = "mad.wide.u32 %rd20, %tid, 4, %in0; st.global.b32 [%rd20], %r1; ret;"


def words(body: str, *more: Array, threads: int = 64, **settings: Any) -> list[int]:
    """%r1 of each thread after a body."""
    made, (out, *_) = launch(body + OUT, np.zeros(threads, np.uint32), *more, threads=threads, **settings)
    assert not made.faults, str(made.faults[0])
    values: list[int] = out.tolist()
    return values


def entry(body: str, head: str = ".param .u64 a", directives: str = ".reqntid 32", before: str = "") -> str:
    return f"{before}.visible .entry k({head})\n{directives}\n{{\n{body}\n}}\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            entry(".reg .b32 %r<4>;\nfrobnicate.b32 %r1, %r2;"),
            r"PTX line 5: the opcode is not supported: frobnicate.b32",
        ),
        (entry(".reg .b32 %r<4>;\nadd.s32 %r1, %r2, %r9;"), r"PTX line 5: not supported \(operand %r9\)"),
        (entry(".reg .b32 %r<4>;\nadd.s64 %r1, %r2, 1;"), "PTX line 5.*%r2 is narrower than .s64"),
        (entry(".reg .b32 %r<4>;\nadd.s32 %r1, %r2;"), "PTX line 5.*2 operands are read, not 1"),
        (entry("bra L1;\nret;"), "PTX line 4: the label is not defined"),
        (entry(".reg .b32 %r<4>;\nadd.s32 %r1, %r2, 1"), "no semicolon"),
        (entry(".local .b8 depot[16];"), "this declaration is not supported"),
        (entry("ret;", directives=""), "needs .reqntid"),
        (entry("ret;", directives=".reqntid 33"), "whole warps"),
        (entry("bar.sync 1, 16;"), "barrier of a part"),
        (entry("@%p1 ret;"), "the guard is not declared"),
        ("", "must have one .entry"),
    ],
)
def test_errors_name_the_line_and_the_reason(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Kernel(text)
    assert issubclass(ParseError, ValueError)


def test_a_kernel_tells_its_parts() -> None:
    body = """
        .reg .pred %p<2>; .reg .b32 %r<3>; // } a comment
        .loc 1 12 3
        mov.u32 %r1, %tid.x; /* bar.sync 0; */ setp.eq.s32 %p1, %r1, 0;
        .loc 1 13 3, function_name $L__info, inlined_at 1 12 3
        @!%p1 bra $L1;
        bar.sync 0;
        $L1: bar.warp.sync -1; ret;
    """
    made = Kernel(
        entry(body, ".param .u64 .ptr .global .align 1 a, .param .u32 b") + '.file 1 "/some/where/kernels.py"'
    )
    assert (made.name, made.threads, made.params) == ("k", 32, [("u64", "a"), ("u32", "b")])
    assert [str(i) for i in made.code[:3]] == ["mov.u32 %r1, %tid.x", "setp.eq.s32 %p1, %r1, 0", "@!%p1 bra $L1"]
    assert [i.source for i in made.code[:3]] == ["kernels.py:12", "kernels.py:12", "kernels.py:13"]
    assert made.labels["$L1"] == 4
    assert made.barriers == [3, 4]
    assert made.without_barrier(1).barriers == [3]
    assert made.barriers == [3, 4]


def test_names_of_an_inner_scope_are_its_own() -> None:
    inner = "{{ .reg .b32 t; .reg .pred q; mov.b32 t, {}; setp.ne.b32 q, t, 0; @q add.s32 %r1, %r1, t; }}"
    body = ".reg .b32 t; mov.b32 t, 100; mov.b32 %r1, 0;" + inner.format(7) + inner.format(3) + "add.s32 %r1, %r1, t;"
    assert words(body) == [110] * 64


def test_arguments_of_every_size() -> None:
    head = ".param .u64 a, .param .u32 b, .param .f32 c, .param .u16 d, .param .align 8 .b8 e[16], .param .u64 scratch"
    body = """
        .reg .b64 %rd<9>; .reg .b32 %r<9>; .reg .b16 %h<3>;
        ld.param.b64 %rd1, [a]; mov.u32 %r1, %tid.x; mad.wide.u32 %rd1, %r1, 32, %rd1;
        ld.param.s32 %rd2, [b]; ld.param.b32 %r2, [c]; ld.param.u16 %r3, [d];
        mov.b64 %rd3, e; add.s64 %rd3, %rd3, 8; ld.param.b64 %rd4, [%rd3]; ld.param.v2.b32 {%r4, %r5}, [e];
        st.global.b64 [%rd1], %rd2; st.global.b32 [%rd1+8], %r2; st.global.b32 [%rd1+12], %r3;
        st.global.b64 [%rd1+16], %rd4; st.global.v2.b32 [%rd1+24], {%r4, %r5}; ret;
    """
    made, memory = Kernel(entry(body, head)), Memory()
    address = memory.put(np.zeros((32, 4), np.uint64), "A")
    aggregate = np.array([1, 2, 3, 0], np.uint32).tobytes()
    assert not Launch(made, memory, 0, [address, -5, 1.5, 40000, aggregate]).run((1,)).faults
    (row,) = np.unique(memory.get(address), axis=0)
    assert row[0] == 2**64 - 5
    assert row[1:2].view(np.float32)[0] == 1.5
    assert row.view(np.uint32)[3:].tolist() == [40000, 3, 0, 1, 2]
    with pytest.raises(ValueError, match="k takes 6 arguments, got 7"):
        Launch(made, memory, 0, [0] * 7)
    with pytest.raises(ValueError, match="k takes 6 arguments, got 2"):
        Launch(made, memory, 0, [address, 3])


def test_threads_and_ctas_know_their_places() -> None:
    text = entry(
        """
        .reg .b32 %r<9>; .reg .b64 %rd<4>; mov.u32 %r1, %tid.y; mov.u32 %r2, %tid.x; mad.lo.s32 %r1, %r1, 8, %r2;
        mov.u32 %r2, %ctaid.x; mov.u32 %r3, %ctaid.y; mov.u32 %r4, %nctaid.x; mad.lo.s32 %r2, %r3, %r4, %r2;
        mov.u32 %r5, %ntid.x; mov.u32 %r6, %ntid.y; mul.lo.s32 %r5, %r5, %r6; mad.lo.s32 %r1, %r2, %r5, %r1;
        ld.param.b64 %rd1, [a]; mad.wide.u32 %rd1, %r1, 4, %rd1; st.global.b32 [%rd1], %r1; ret;
        """,
        directives=".reqntid 8, 4",
    )
    memory = Memory()
    address = memory.put(np.zeros(32 * 6, np.uint32), "A")
    assert not Launch(Kernel(text), memory, 0, [address]).run((3, 2)).faults
    np.testing.assert_array_equal(memory.get(address), np.arange(32 * 6))


def test_branches_split_and_meet_again() -> None:
    """Collatz steps of each thread's number: every thread leaves the loop at another time."""
    body = """
        add.s32 %r2, %tid, 1; mov.b32 %r1, 0;
        L1: setp.eq.s32 %p1, %r2, 1; @%p1 bra L4;
        and.b32 %r3, %r2, 1; setp.eq.s32 %p2, %r3, 0; @%p2 bra L2;
        mad.lo.s32 %r2, %r2, 3, 1; bra.uni L3;
        L2: shr.u32 %r2, %r2, 1;
        L3: add.s32 %r1, %r1, 1; bra L1;
        L4: bar.sync 0; bar.warp.sync -1;
    """

    def steps(n: int) -> int:
        return 0 if n == 1 else 1 + steps(n // 2 if n % 2 == 0 else 3 * n + 1)

    assert words(body) == [steps(n) for n in range(1, 65)]


def test_instructions_are_counted_as_often_as_they_run() -> None:
    body = "mov.b32 %r1, 0; L1: add.s32 %r1, %r1, 1; setp.lt.s32 %p1, %r1, 5; @%p1 bra L1;"
    made, _ = launch(body + OUT, np.zeros(64, np.uint32), grid=(1,))
    assert made.executed["bra"] == 5
    # and one for the address of the store
    assert (made.executed["add"], made.executed["mad"], made.executed["st"]) == (5, 1, 1)


def source_lane(mode: str, lane: int, by: int, clamp: int, segment: int) -> tuple[int, bool]:
    """PTX ISA, shfl.sync."""
    highest = (lane & segment) | (clamp & ~segment & 31)
    if mode == "up":
        source = lane - by
        valid = source >= highest
    else:
        source = {"down": lane + by, "bfly": lane ^ by, "idx": (lane & segment) | (by & ~segment & 31)}[mode]
        valid = source <= highest
    return (source, True) if valid else (lane, False)


@pytest.mark.parametrize("mode", ["up", "down", "bfly", "idx"])
@pytest.mark.parametrize("segment", [0, 0b11000])
def test_shuffles(mode: str, segment: int) -> None:
    for by in (0, 1, 3, 7, 16, 31):
        clamp = 0 if mode == "up" else 31
        body = f"""
            mul.lo.s32 %r2, %tid, 3; shfl.sync.{mode}.b32 %r3|%p1, %r2, {by}, {segment << 8 | clamp}, -1;
            selp.b32 %r4, 1000, 0, %p1; add.s32 %r1, %r3, %r4;
        """
        want = []
        for thread in range(64):
            source, valid = source_lane(mode, thread % 32, by, clamp, segment)
            want.append((thread // 32 * 32 + source) * 3 + 1000 * valid)
        assert words(body) == want


def test_votes_and_matches() -> None:
    start = "setp.gt.s32 %p1, %tid, 40; shr.u32 %r2, %tid, 2; and.b32 %r2, %r2, 3;"
    ballot = sum(1 << i for i in range(32) if 32 + i > 40)
    assert words(start + "vote.sync.ballot.b32 %r1, %p1, -1;") == [0] * 32 + [ballot] * 32
    for mode, want in {"any": (0, 1), "all": (0, 0), "uni": (1, 0)}.items():
        got = words(start + f"vote.sync.{mode}.pred %p2, %p1, -1; selp.b32 %r1, 1, 0, %p2;")
        assert got == [want[0]] * 32 + [want[1]] * 32, mode
    same = [sum(1 << j for j in range(32) if (j >> 2 & 3) == (i >> 2 & 3)) for i in range(32)]
    assert words(start + "match.any.sync.b32 %r1, %r2, -1;") == same * 2
    assert words("activemask.b32 %r1;") == [2**32 - 1] * 64
    assert words("mov.b32 %r1, 9; @%p0 activemask.b32 %r1;".replace("@%p0", "setp.lt.u32 %p0, %tid, 3; @%p0"))[:4] == [
        7, 7, 7, 9,
    ]  # fmt: skip
    assert words("elect.sync %r2|%p1, -1; selp.b32 %r1, 1, 0, %p1;") == ([1] + [0] * 31) * 2


@pytest.mark.parametrize("mask", [-1, 0x00FF00FF])
def test_reductions_over_lanes(mask: int) -> None:
    functions: dict[str, tuple[str, Any]] = {
        "add": ("s32", np.add), "min": ("s32", np.minimum), "max": ("u32", np.maximum), "xor": ("b32", np.bitwise_xor),
    }  # fmt: skip
    data = np.random.default_rng(1).integers(0, 2**32, 64).astype(np.uint32)
    named = np.array([mask >> i & 1 for i in range(32)], bool)
    guard = (
        f"and.b32 %r4, %tid, 31; shr.u32 %r4, {mask & 0xFFFFFFFF}, %r4; and.b32 %r4, %r4, 1; setp.ne.s32 %p1, %r4, 0;"
    )
    load = "mad.wide.u32 %rd1, %tid, 4, %in1; ld.global.b32 %r2, [%rd1]; mov.b32 %r1, 0;"
    for name, (kind, function) in functions.items():
        got = words(f"{guard} {load} @%p1 redux.sync.{name}.{kind} %r1, %r2, {mask};", data)
        typed = data.view(np.int32) if kind == "s32" else data
        want = [
            int(function.reduce(typed[w : w + 32][named])) % 2**32 if named[i] else 0
            for w in (0, 32)
            for i in range(32)
        ]
        assert got == want, name


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("transposed", [False, True])
def test_matrices_come_and_go(count: int, transposed: bool) -> None:
    """A warp stores matrices with stmatrix, reads words as they lie, and reads them back with ldmatrix."""
    suffix = f"sync.aligned.m8n8.x{count}{'.trans' * transposed}.shared.b16"
    registers = ", ".join(f"%r{10 + i}" for i in range(count))
    back = ", ".join(f"%r{20 + i}" for i in range(count))
    body = "mov.b32 %r0, smem; shl.b32 %r2, %tid, 4; add.s32 %r2, %r2, %r0; mad.wide.u32 %rd1, %tid, 16, %in1;"
    body += "".join(f"ld.global.b32 %r{10 + i}, [%rd1+{4 * i}];" for i in range(count))
    body += f"stmatrix.{suffix} [%r2], {{{registers}}}; bar.warp.sync -1; ldmatrix.{suffix} {{{back}}}, [%r2];"
    body += "mad.lo.s32 %r3, %tid, 4, %r0;" + "".join(
        f"ld.shared.b32 %r4, [%r3+{128 * i}]; mad.wide.u32 %rd2, %tid, 16, %in2; st.global.b32 [%rd2+{4 * i}], %r4;"
        f"mad.wide.u32 %rd2, %tid, 16, %in3; st.global.b32 [%rd2+{4 * i}], %r{20 + i};"
        for i in range(count)
    )
    data = np.random.default_rng(2).integers(0, 2**32, (32, 4)).astype(np.uint32)
    zeros = np.zeros((32, 4), np.uint32)
    made, (_, _, memory, loaded) = launch(
        body + "ret;", np.zeros(1, np.uint32), data, zeros, zeros, threads=32, shared=512
    )
    assert not made.faults, str(made.faults[0])
    np.testing.assert_array_equal(loaded[:, :count], data[:, :count])
    for i in range(count):
        # lane 4 r + c holds elements 2 c and 2 c + 1 of row r
        matrix = np.ascontiguousarray(data[:, i]).view(np.uint16).reshape(8, 8)
        lies = np.ascontiguousarray(memory[:, i]).view(np.uint16).reshape(8, 8)
        np.testing.assert_array_equal(lies, matrix.T if transposed else matrix)


ATOMS: dict[str, tuple[str, Callable[[int, int], int]]] = {
    "add": ("u32", lambda a, b: a + b), "min": ("s32", min), "max": ("u32", max), "and": ("b32", lambda a, b: a & b),
    "or": ("b32", lambda a, b: a | b), "xor": ("b32", lambda a, b: a ^ b), "exch": ("b32", lambda a, b: b),
    "inc": ("u32", lambda a, b: 0 if a >= b else a + 1),
    "dec": ("u32", lambda a, b: b if a == 0 or a > b else a - 1),
}  # fmt: skip


@pytest.mark.parametrize("space", ["global", "shared"])
def test_atomic_operations_go_lane_by_lane(space: str) -> None:
    start = "and.b32 %r2, %tid, 3; mul.lo.s32 %r3, %tid, 7; add.s32 %r3, %r3, 2; mad.wide.u32 %rd1, %r2, 4, %in1;"
    cell = "[%rd1]"
    if space == "shared":
        start += "mov.b32 %r0, smem; mad.lo.s32 %r4, %r2, 4, %r0; st.shared.b32 [%r4], 20; bar.sync 0;"
        cell = "[%r4]"
    for name, (kind, function) in ATOMS.items():
        cells, want = [20] * 4, []
        for thread in range(64):
            want.append(cells[thread % 4])
            cells[thread % 4] = function(cells[thread % 4], 7 * thread + 2) % 2**32
        got = words(f"{start} atom.{space}.{name}.{kind} %r1, {cell}, %r3;", np.full(4, 20, np.uint32), shared=16)
        assert got == want, name
    # each fourth thread finds what the one before it left
    swap = f"{start} mov.b32 %r5, 20; atom.{space}.cas.b32 %r1, {cell}, %r5, %r3;"
    got = words(swap, np.full(4, 20, np.uint32), shared=16)
    assert got == [20] * 4 + [7 * (i % 4) + 2 for i in range(60)]


def test_atomic_sums_of_floats_are_rounded_each_time() -> None:
    data = np.random.default_rng(3).normal(size=64).astype(np.float32)
    body = "mad.wide.u32 %rd1, %tid, 4, %in1; ld.global.b32 %r2, [%rd1]; atom.global.add.f32 %r1, [%in2], %r2;"
    _, (_, _, total) = launch(body + OUT, np.zeros(64, np.uint32), data, np.zeros(1, np.float32))
    want = np.float32(0)
    for x in data:
        want += x
    assert total[0] == want


def test_values_are_packed_and_taken_apart() -> None:
    body = """
        cvt.u16.u32 %h1, %tid; mov.b16 %h2, 3; mov.b32 %r2, {%h1, %h2}; mov.b64 %rd1, {%r2, %tid};
        mov.b64 {%r3, _}, %rd1; mov.b32 {_, %h3}, %r3; cvt.u32.u16 %r4, %h3; shr.u64 %rd2, %rd1, 32;
        cvt.u32.u64 %r5, %rd2; mad.lo.s32 %r1, %r5, 10, %r4;
    """
    assert words(body) == [10 * t + 3 for t in range(64)]


def test_small_types_are_extended_by_their_sign() -> None:
    data = np.array([-3, 200] * 32, np.int16)
    load = "mad.wide.u32 %rd1, %tid, 2, %in1; ld.global.{} %r1, [%rd1];"
    assert words(load.format("s16"), data) == [2**32 - 3, 200] * 32
    assert words(load.format("u16"), data) == [2**16 - 3, 200] * 32
    assert words(load.format("s8"), data) == [2**32 - 3, 2**32 - 56] * 32


def test_a_guarded_instruction_leaves_other_threads_alone() -> None:
    body = "mov.b32 %r1, 5; setp.lt.u32 %p1, %tid, 7; @%p1 add.s32 %r1, %r1, %tid; @!%p1 mov.b32 %r1, 9;"
    assert words(body) == [5 + t if t < 7 else 9 for t in range(64)]


def test_bytes_and_signs_are_permuted() -> None:
    data = [
        np.full(4, 0x83828180 - 0x80808000, np.uint32),
        np.full(4, 0x77665544, np.uint32),
        np.arange(4, dtype=np.uint32),
    ]
    got = compute("prmt.b32.f4e", data, np.uint32).tolist()
    both = (0x77665544 << 32 | int(data[0][0])).to_bytes(8, "little")
    assert got == [int.from_bytes(both[i : i + 4], "little") for i in range(4)]


def test_bytes_that_a_compiler_leaves_undefined_may_be_packed_and_taken_off() -> None:
    pack = "mov.b32 %r2, 3; prmt.b32 %r3, %r40, %r41, 0x3340; prmt.b32 %r4, %r2, %r3, 0x5410;"
    assert words(pack + "prmt.b32 %r1, %r4, %tid, 0x5410;") == [3 + (t << 16) for t in range(64)]
    # of the bytes that are taken one has a value, or none
    assert (
        words("mov.b32 %r2, 0x5500; prmt.b32 %r4, %r40, %r2, 0x0050; shr.u32 %r1, %r4, 8; and.b32 %r1, %r1, 15;")
        == [5] * 64
    )
    for body in ("add.s32 %r1, %r3, 1;", "prmt.b32 %r5, %r3, %r2, 0x3210; mov.b32 %r1, %r5;"):
        with pytest.raises(Fault, match="before it has a value"):
            words(pack + body)


def test_sums_that_a_product_begins_anew_need_no_value() -> None:
    """wgmma of zeros, where its predicate says that the sums before do not count."""
    body = """
        mov.b32 %r10, smem; mad.lo.s32 %r11, %tid, 16, %r10; mov.b32 %r12, 0;
        st.shared.v4.b32 [%r11], {%r12, %r12, %r12, %r12}; fence.proxy.async; bar.sync 0;
        shr.u32 %r13, %r10, 4; and.b32 %r13, %r13, 0x3FFF; cvt.u64.u32 %rd1, %r13;
        setp.eq.u32 %p1, %tid, 1000; setp.lt.u32 %p2, %tid, 1000;
        wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%r1, %r2, %r3, %r4}, %rd1, %rd1, SCALE, 1, 1, 0, 0;
        wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;
    """
    for scale in ("0", "%p1"):
        assert words(body.replace("SCALE", scale), threads=128, shared=2048) == [0] * 128
    with pytest.raises(Fault, match="before it has a value"):
        words(body.replace("SCALE", "%p2"), threads=128, shared=2048)
