"""Promises of the kernels' compiled form, and which of them a compiled case breaks.

Nothing spills. Rows move by as many bytes at a time as their alignment and the tile allow, 16 at most. A lookup waits
at no barrier, or at one after its loop where its output cannot be stored as its rows are held. Atomics are of integers,
which have no order: minima of the checks, counts of keys and rows, marks of a cache's batch; beside them is what
sm_100's compiler adds to products of matrices. A row's columns are added in an order that the row alone decides.

On NVIDIA's also: a lookup asks for all rows of an iteration before it adds the first, and waits for little more than
the ids and the rows; an update of a run of up to four ids waits for memory a few times in turn; and what is read or
written one after another uses all of the sectors that it touches.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ...kernels._op import triton
from .cases import Case
from .compiled import SHARED_BYTES, TARGETS, WHOLE, Report

_BYTES = {"*fp64": 8, "*fp32": 4, "*fp16": 2, "*bf16": 2, "*i64": 8, "*i32": 4, "*i16": 2, "*u8": 1, "*i8": 1}
_WIDEST = 16


class Move(NamedTuple):
    """Rows that a kernel reads or writes: of an argument, aligned to the elements that a constant names, how often.

    Of an argument that is a tuple, rows of each tensor, or for each row of one of them.
    """

    what: str
    argument: str
    align: str
    times: int = 1
    one_of: bool = False


# kernel -> the rows that it moves for each tile
MOVES = {
    "pooled_lookup": (Move("load", "W", "ALIGN", 4), Move("store", "Y", "OUT_ALIGN")),
    "quantized_pooled_lookup": (Move("load", "Q", "ALIGN", 4), Move("store", "Y", "OUT_ALIGN")),
    "gather_values": (Move("load", "Q", "ALIGN"), Move("store", "Y", "OUT_ALIGN")),
    "gather": (Move("load", "W", "ALIGN"), Move("store", "Y", "ALIGN")),
    "collect": (Move("load", "G", "ALIGN"), Move("store", "Q", "ALIGN")),
    "segment_rows": (Move("load", "V", "ALIGN", 2), Move("store", "Y", "ALIGN")),
    "to_padded": (Move("load", "V", "ALIGN"), Move("store", "Y", "OUT_ALIGN")),
    "to_jagged": (Move("load", "X", "ALIGN"), Move("store", "Y", "ALIGN")),
    "weight_gradient": (Move("load", "W", "ALIGN", 2), Move("load", "G", "G_ALIGN")),
    "update": (
        Move("load", "grad", "SRC_ALIGN", 4), Move("load", "W", "ALIGN"), Move("load", "states", "ALIGN"),
        Move("store", "W", "ALIGN"), Move("store", "states", "ALIGN"), Move("store", "partial", "ALIGN"),
    ),
    "index_add": (Move("load", "G", "ALIGN"), Move("store", "X", "ALIGN")),
    "regroup": (Move("load", "X", "ALIGN", one_of=True), Move("store", "Y", "ALIGN", one_of=True)),
}  # fmt: skip
LOOKUPS = ("pooled_lookup", "gather")
# lookups that deal sums of 16 columns a thread out again, after the loop -> barriers at most
DEALING = {"quantized_pooled_lookup": 7, "gather_values": 7}
CHECKS = ("check_ids", "check_gradient")
PRODUCTS = ("dense_bmm", "jagged_bmm")
# kernels that add up integers, in shared memory and then in a table's
COUNTS = ("count_digits", "take_slots")
# those that mark rows and slots of a batch as well, by bits and the number of a batch
MARKS = ("claim_rows", "mark_rows")
# start of a case's name -> latencies that an iteration waits at most, of ids and then of rows; the first that fits
WAITS = {
    # of four gathers one comes after the first sum, behind the arithmetic of hundreds of instructions
    r"quantized_pooled_lookup .* (fp8|int2)( |$)": 2.4,
    r"quantized_pooled_lookup |pooled_lookup ": 2.3,
}
# where rows of 2 bytes an element move one by one (sm_80)
WAITS_OF_NARROW_ROWS = 2.5
# all gathers of an iteration come before one of them is used: four rows, or what leads to the copy of a row
GATHERS_FIRST = r"pooled_lookup |index_add |quantized_pooled_lookup (?!.* (fp8|int2)( |$))"
# start of a version of triton -> of what its ptxas asks for the last of four rows after one sum (2.2 waits for 1.8)
ONE_LATER = {"3.9.": r"quantized_pooled_lookup .* int4( |$)"}
# updates of whole rows on 16 bytes -> how often a chunk of up to four ids waits for memory, one load after another;
# other rows and gradients, and rules with states of both kinds, a fourth time for a part of a latency
UPDATES_OF_WHOLE_ROWS = r"update (?!partial_|lamb .* weighted)\w+ D=(64|128) fp32(?!.* (and|shifted|beside))( |$)"
LONG_WAITS_OF_UPDATES = 3
# elsewhere once more on some version of the compiler
COUNTED_ON = ("sm_90", "sm_100")
# start of a case's name -> registers of a thread at most; the first that fits
REGISTERS = {
    # partial sums of partial sums
    r"update (sgd|rowwise_adagrad) D=128 fp32 .*40 samples": 96,
    r"update (sgd|rowwise_adagrad) D=128 fp32( |$)": 72,
    r"update ": 128,
    r"pooled_lookup ": 80,
    r"weight_gradient |check_gradient |cumsum |regroup .* 3 times": 96,
    r"dense_bmm |jagged_bmm ": 200,
    r"row_keys |mark |chunk |block_sums ": 48,
    # of AMD's; NVIDIA's compiler is told to keep to 64, of which 1024 threads are a multiprocessor's all
    r"chunk_alone ": 80,
    r"softmax |softmax_gradient |vector_product |by_rows |by_vectors ": 96,
    # keys, counts of their values, and those of lower ones, in flight together
    r"count_digits ": 96,
    r"unary_chunk |quantize_rows ": 96,
    # addresses in 64 bits, and of wide rows states beside sixteen hashes a thread: Triton 3.6 takes 80, 3.7 up to 64
    r"take_masked |make_rows normal D=1023 ": 80,
    # a row twice, or hashes in 64 bits; six programs of four warps are on a multiprocessor then
    r"share_exponents |to_fp8_parts |to_fused_rows |from_fused_rows |from_fused_tables ": 96,
    r"hashed_rows |identity_slots ": 96,
    # of rows of odd widths four columns of eight rows, both ways; counts of a row's place
    r"move_rows |pick ": 128,
    # NVIDIA's compiler keeps to 80, of int2 to 104
    r"quantized_pooled_lookup .* (fp8|int2)( |$)": 112,
    r"quantized_pooled_lookup ": 80,
    r"": 64,
}
# of a lookup whose rows are aligned to 16 bytes, whatever its case is called
REGISTERS_OF_ALIGNED_LOOKUPS = 64


def broken_promises(reports: Sequence[tuple[Case, str, Report | str]]) -> list[tuple[Case, str, str]]:
    """Case, target and what is wrong, for each promise that a report breaks; a report that is a sentence is no report.

    A sentence of the result says what was found and what was promised.
    """
    broken = []
    # by rows and target: who added them up first, and how
    order: dict[tuple[str, str], tuple[str, tuple[str, ...]]] = {}
    for case, target, report in reports:
        if isinstance(report, str):
            broken.append((case, target, f"{report}; promised to compile"))
            continue
        broken += [(case, target, sentence) for sentence in _broken_alone(case, target, report)]
        if case.rows:
            other, promised = order.setdefault((case.rows, target), (case.name, report.row_sums))
            if report.row_sums != promised:
                summed = f"adds up columns as {_listed(report.row_sums)}"
                broken.append((case, target, f"{summed}, promised {_listed(promised)} as {other!r} does"))
    return broken


class Bounds(NamedTuple):
    """Bounds that a case promises on a target beside that it spills nothing; None: any number."""

    registers: int
    barriers: int | None
    atomics: str
    moves: tuple[tuple[str, int, int], ...]
    shared_bytes: int
    waits: float | None = None
    long_waits: int | None = None
    gathers_first: bool = False
    whole_sectors: bool = False


def promised(case: Case, target: str) -> Bounds:
    """The bounds that a report of the case is held to."""
    barriers = _barriers(case, target) if case.kernel_name in LOOKUPS else DEALING.get(case.kernel_name)
    # minima of the checks; and what the compiler keeps books with in shared memory where sm_100 multiplies matrices
    known = "min" if case.kernel_name in CHECKS else r"^ATOMS\.(OR|AND)" if case.kernel_name in PRODUCTS else "$^"
    if case.kernel_name in (*COUNTS, *MARKS):
        # a histogram's ones of a warp as one number, from Triton 3.9 on
        added = "ADD(.64)?|POPC.INC.32"
        nvidia, amd = (f"{added}|MAX.S32|OR", "add|smax|or") if case.kernel_name in MARKS else (added, "add")
        known = (
            rf"^(ATOMS|ATOMG\.E|RED\.E)\.({nvidia})(\.STRONG\.GPU)?$|^(buffer|ds|global)_(atomic_)?({amd})(_u32|_x2)?$"
        )
    moves = tuple(promised_moves(case, target))
    bounds = Bounds(_registers(case), barriers, known, moves, SHARED_BYTES[target])
    if TARGETS[target][0] != "cuda":
        return bounds
    # what differs little from these is compiled in part, and not held to what was tuned for them
    updates = target in WHOLE and re.match(UPDATES_OF_WHOLE_ROWS, case.name) and not case.constants["UPPER"]
    return bounds._replace(
        waits=_waits(case), long_waits=LONG_WAITS_OF_UPDATES + (target not in COUNTED_ON) if updates else None,
        gathers_first=re.match(GATHERS_FIRST, case.name) is not None and not _asks_one_later(case),
        whole_sectors=_uses_whole_sectors(case),
    )  # fmt: skip


def _broken_alone(case: Case, target: str, report: Report) -> Iterator[str]:
    bounds = promised(case, target)
    if report.spills:
        yield f"spills {report.spills} bytes, promised 0"
    if report.registers > bounds.registers:
        yield f"takes {report.registers} registers, promised at most {bounds.registers}"
    if report.shared_bytes > bounds.shared_bytes:
        yield f"takes {report.shared_bytes} bytes of shared memory, promised at most {bounds.shared_bytes}"
    if bounds.barriers is not None and report.barriers > bounds.barriers:
        most = "" if case.kernel_name in LOOKUPS else "at most "
        yield f"waits at {report.barriers} barriers, promised {most}{bounds.barriers}"
    lasting = [op for op in report.atomics if not re.search(bounds.atomics, op, re.I)]
    if lasting:
        yield f"has the atomics {', '.join(lasting)}, promised {'minima' if case.kernel_name in CHECKS else 'none'}"
    yield from _narrow(bounds.moves, report)
    yield from _slow(bounds, report)


def _slow(bounds: Bounds, report: Report) -> Iterator[str]:
    """Faults that make a warp wait for memory longer, or ask it for more, than it must."""
    if bounds.waits is not None and report.waits > bounds.waits:
        yield f"waits {report.waits} latencies in an iteration, promised at most {bounds.waits}"
    if bounds.long_waits is not None and report.long_waits > bounds.long_waits:
        yield f"waits for memory {report.long_waits} times in an iteration, promised at most {bounds.long_waits}"
    if bounds.gathers_first and report.gathers_first is False:
        yield "uses a row before it has asked for all of an iteration, promised after"
    if bounds.whole_sectors:
        for name, share in sorted(report.streams.items()):
            if share < 1:
                yield f"{name}: uses {share:.0%} of the sectors that it touches, promised all"


def promised_moves(case: Case, target: str) -> Iterator[tuple[str, int, int]]:
    """("load" or "store", bytes at a time, bytes in all) that a thread moves of the rows of each argument."""
    for access, argument, align, times, one_of in MOVES.get(case.kernel_name, ()):
        own = _elements(case, target, access)
        kinds = case.types[argument][:1] if one_of else case.types[argument]
        for i, kind in enumerate(kinds if isinstance(kinds, tuple) else (kinds,)):
            if argument == "states" and case.constants["KINDS"][i] == "row":
                continue
            # the one rule that returns no new row of the old one
            if access == "load" and argument == "W" and case.name.startswith("update gradient "):
                continue
            place = (argument, i) if isinstance(kinds, tuple) else (argument,)
            # the mask at the end of a row knows its width as a multiple of ALIGN, whatever the row is aligned to
            ends = min(case.constants.get(name, _WIDEST) for name in ("ALIGN", "DIM_ALIGN"))
            known = min(case.constants[align], ends) if place in case.aligned else 1
            elements = min(known, own)
            yield access, min(elements * _BYTES[kind], _WIDEST), times * own * _BYTES[kind]


def _elements(case: Case, target: str, access: str) -> int:
    """Elements of a tile that a thread holds when it loads or stores them."""
    blocks = ("BLOCK_B", "BLOCK_C", "BLOCK_N", "BLOCK_R")
    rows: int = next(size for name, size in case.constants.items() if name in blocks)
    columns: int = case.constants.get("BLOCK_D", 0) or case.constants.get("BLOCK_U", 0)
    if "BLOCK_U" in case.constants and access == "store":
        # a byte that holds several numbers becomes as many columns; a constant 1 is a row or a column that is alone
        columns = min(columns * max(1, 8 // case.constants["BITS"]), case.constants.get("D", columns * 8))
        rows = min(rows, case.constants.get("N", rows), case.constants.get("B", rows))
    columns = columns or case.constants["BLOCK_V"] * case.constants["ALIGN"]
    return max(1, rows * columns // (case.num_warps * TARGETS[target][2]))


def _narrow(moves: Sequence[tuple[str, int, int]], report: Report) -> Iterator[str]:
    for access in ("load", "store"):
        for width in sorted({at_once for kind, at_once, _ in moves if kind == access}, reverse=True):
            need = sum(total for kind, at_once, total in moves if kind == access and at_once >= width)
            have = sum(n * size for (kind, size), n in report.accesses.items() if kind == access and size >= width)
            if have < need:
                yield f"{access}s {have} bytes of rows by {width} bytes at a time, promised {need}"


def _barriers(case: Case, target: str) -> int:
    """1 where a thread holds a row wider than it can store it: the row is dealt out again, once for each tile."""
    (_, loaded, _), (_, stored, _) = promised_moves(case, target)
    return int(loaded // _BYTES[case.types["W"]] > stored // _BYTES[case.types["Y"]])


def _listed(row_sums: tuple[str, ...]) -> str:
    return ", ".join(row_sums) or "nothing"


def _uses_whole_sectors(case: Case) -> bool:
    """A gradient's last block, and rows of few columns, are read under a mask by threads that hold several numbers."""
    return case.kernel_name != "check_gradient" and re.match(r"(de)?quantize_rows D=[13] ", case.name) is None


def _waits(case: Case) -> float | None:
    if case.kernel_name == "pooled_lookup" and not _is_whole(case):
        return WAITS_OF_NARROW_ROWS
    return next((most for start, most in WAITS.items() if re.match(start, case.name)), None)


def _is_whole(case: Case) -> bool:
    """Whether the table's rows move by 16 bytes."""
    return int(case.constants["ALIGN"]) * _BYTES[case.types["W"]] == _WIDEST


def _asks_one_later(case: Case) -> bool:
    version: str = triton.__version__
    return any(version.startswith(start) and re.match(name, case.name) for start, name in ONE_LATER.items())


def _registers(case: Case) -> int:
    if case.kernel_name in LOOKUPS and _is_whole(case):
        return REGISTERS_OF_ALIGNED_LOOKUPS
    return next(most for start, most in REGISTERS.items() if re.match(start, case.name))
