"""Compile kernels for GPUs that need not be present, and read from the result what it needs and does.

`python -m shardwise kernels check` does so for every case of `cases.py` and holds what it finds to `checks.py`.
Needs triton, no GPU, no TRITON_INTERPRET.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import IO, Any

from ...kernels._op import triton, warps_on_amd
from .cases import Case
from .scoreboard import waits
from .sectors import sector_shares

# backend, architecture, threads of a warp
TARGETS: dict[str, tuple[str, int | str, int]] = {
    "sm_80": ("cuda", 80, 32),
    "sm_90": ("cuda", 90, 32),
    "sm_100": ("cuda", 100, 32),
    "gfx942": ("hip", "gfx942", 64),
    "sm_75": ("cuda", 75, 32),
    "sm_86": ("cuda", 86, 32),
    "sm_89": ("cuda", 89, 32),
    "gfx950": ("hip", "gfx950", 64),
}
# targets on which every case is compiled: what embeddings are trained on. On the others every kernel, rule, dtype and
# format at D=128, and fp32 also at D=3, a quarter of all cases: they differ little from one that is compiled whole
WHOLE = ("sm_80", "sm_90", "sm_100", "gfx942")
_INDEX = r"(row_keys|mark|chunk|chunk_alone|block_sums|owners|bags|check_ids|check_gradient|count_step) "
_OTHERS = (
    r".* (beside|shifted|tile|tuned|features|padded|masks|weighted|and|to \w*float16|l2|decoupled|mean|long|half)\b"
    r"|.* (blocks|batches|i32 i64|i64 i32|i32 ids|i32 offsets|300 buckets|\d+ samples|\d times|small|broadcast|bool)\b"
    r"|.* fp32 scales(?! behind| in front)|.* \(\d+\) float16|.* boxes of (1|4|5|100) |.* (3|20) tables "
    r"|(claim|mark)_rows .*(several|window|no policy|alone)|take_slots policy [0-2]|.* did not"
    r"|move_rows (of|.*adam|.*bf16)|make_rows .*(bf16|rowwise)"
)
_DIMS = r".*\bD=(128\b|3 fp32)|fp8_part_ends .*\bD=1023|(?!.*\bD=)"  # README.md says so
_SPILLS_ON_TURING = r"(dense|jagged)_bmm .* (fp16|bf16)"
# bytes of shared memory that a program may have at most
SHARED_BYTES = {
    "sm_75": 64 << 10, "sm_80": 163 << 10, "sm_86": 99 << 10, "sm_89": 99 << 10, "sm_90": 227 << 10,
    "sm_100": 227 << 10, "gfx942": 64 << 10, "gfx950": 160 << 10,
}  # fmt: skip
# cases that `kernels registers` prints
TYPICAL = (
    *(f"pooled_lookup D=128 {words}" for words in ("fp32", "fp32 weighted", "fp16", "bf16", "fp16 and fp16")),
    "pooled_lookup D=4096 bf16", "gather D=128 fp32", "weight_gradient D=128 fp32",
    *(f"quantized_pooled_lookup D=128 {format}" for format in ("int8", "int4", "int2", "fp8")),
    *(f"update {rule} D=128 fp32" for rule in ("sgd", "rowwise_adagrad", "adam", "lamb")),
    *(f"update {rule} D=4096 fp32" for rule in ("sgd", "rowwise_adagrad", "lamb")),
    "row_keys sgd D=128 fp32 mean", "mark sgd D=1 fp32 200000 samples", "chunk sgd D=1 fp32 200000 samples",
    "check_ids D=1 fp32", "segment_rows segments D=128 fp32", "index_add D=128 fp32", "resolve D=1 fp32",
    "dense_bmm M=64 K=64 fp32", "jagged_bmm M=64 K=64 fp32",
)  # fmt: skip
# arguments that may reach beyond 2 GB
_LARGE = ("W", "states")
_BYTES = {"byte": 1, "short": 2, "dword": 4, "dwordx2": 8, "dwordx3": 12, "dwordx4": 16}


@dataclass(frozen=True)
class Report:
    """A report on a compiled kernel: what it needs and does.

    `registers` of a thread, `spills` in bytes (on AMD in registers and bytes of scratch), `shared_bytes`, `barriers`
    among the warps of a program, accesses to global memory as (what, bytes of a thread): how many instructions,
    `atomics`, and for each sum over the columns of a tile how they are dealt out: to a thread, lanes, warps.
    Of NVIDIA's also what one warp alone waits for in one pass of the longest loop (scoreboard.py): `waits` in latencies
    of 600 cycles, `long_waits` that miss the first level, and whether all gathers are issued before one is used (None:
    nothing is gathered); and of what is read or written one after another the share of its sectors that a request uses
    (sectors.py), like {"load I": 0.25}.
    """

    registers: int
    spills: int
    shared_bytes: int
    barriers: int
    accesses: dict[tuple[str, int], int]
    atomics: tuple[str, ...]
    row_sums: tuple[str, ...]
    waits: float = 0.0
    long_waits: int = 0
    gathers_first: bool | None = None
    streams: dict[str, float] = field(default_factory=dict)


def has_case(target: str, case: Case) -> bool:
    """Whether the case is compiled for this target, and differs from others there.

    Only AMD's compiler is told where memory is small. Of targets beside WHOLE it is a chosen part of all cases.
    """
    if target in WHOLE:
        return TARGETS[target][0] == "hip" or not case.small
    if re.match(_INDEX, case.name):
        return not case.small
    if target == "sm_75" and re.match(_SPILLS_ON_TURING, case.name):
        return False
    return re.match(_DIMS, case.name) is not None and re.match(_OTHERS, case.name) is None


def compile_case(case: Case, target: str) -> Report:
    """Compile one case for one target of TARGETS."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = case.kernel.arg_names
    signature = {name: "constexpr" if name in case.constants else case.types[name] for name in names}
    paths = {(names.index(name), *place): name for name, *place in _pointers(case)}
    attrs: dict[tuple[Any, ...], list[list[Any]]] = {
        (names.index(name), *place): [["tt.divisibility", 16]] for name, *place in case.aligned
    }
    if TARGETS[target][0] == "hip":
        for path, name in paths.items():
            if case.small or name not in _LARGE:
                attrs.setdefault(path, []).append(["tt.pointer_range", 32])
    source = ASTSource(fn=case.kernel, signature=signature, constexprs=case.constants, attrs=attrs)
    warps = warps_on_amd(case.num_warps) if TARGETS[target][0] == "hip" else case.num_warps
    options: dict[str, Any] = {"num_warps": warps, "enable_fp_fusion": case.fuses}
    if TARGETS[target][0] == "cuda" and case.registers is not None:
        options["maxnreg"] = case.registers
    compiled = triton.compile(source, target=GPUTarget(*TARGETS[target]), options=options)
    read = _read_amdgcn if TARGETS[target][0] == "hip" else _read_cubin
    return read(compiled)


def _pointers(case: Case) -> list[tuple[Any, ...]]:
    pointers: list[tuple[Any, ...]] = []
    for name, kind in case.types.items():
        if isinstance(kind, tuple):
            pointers += [(name, i) for i, part in enumerate(kind) if part[0] == "*"]
        elif kind[0] == "*":
            pointers.append((name,))
    return pointers


def _read_cubin(compiled: Any) -> Report:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = _run("cuobjdump", "-res-usage", file.name)
        sass = _run("nvdisasm", "-c", file.name)
    used = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert used, usage
    ops = re.findall(r"\*/\s+(?:@!?U?P\d+\s+)?([A-Z][A-Z0-9_.]*)", sass)
    accesses: Counter[tuple[str, int]] = Counter()
    for op in ops:
        if op.startswith(("LDG", "STG")):
            width = re.search(r"\.[US]?(8|16|64|128|256)\b", op)
            accesses["load" if op.startswith("LDG") else "store", int(width[1]) // 8 if width else 4] += 1
    atomics = tuple(op for op in ops if re.match(r"ATOM|RED(?!UX)", op))
    loop = waits(sass)
    return Report(
        int(used[1]), int(used[2]), compiled.metadata.shared, sum(op.startswith("BAR.") for op in ops),
        dict(accesses), atomics, _row_sums(compiled), loop.latencies, loop.long, loop.gathers_first,
        sector_shares(compiled.asm["ttgir"], compiled.asm["ptx"]),
    )  # fmt: skip


def _read_amdgcn(compiled: Any) -> Report:
    text = compiled.asm["amdgcn"]

    def number(key: str) -> int:
        match = re.search(rf"\.{key}:\s+(\d+)", text)
        assert match, key
        return int(match[1])

    accesses: Counter[tuple[str, int]] = Counter()
    for access, width in re.findall(
        r"^\s+(?:global|buffer|flat)_(load|store)_[us]?(byte|short|dword(?:x\d)?)", text, re.M
    ):
        accesses[access, _BYTES[width]] += 1
    return Report(
        number("vgpr_count"),
        number("vgpr_spill_count") + number("sgpr_spill_count") + number("private_segment_fixed_size"),
        compiled.metadata.shared, len(re.findall(r"^\s+s_barrier\b", text, re.M)), dict(accesses),
        tuple(re.findall(r"^\s+((?:global|buffer|flat)_atomic\w+)", text, re.M)), _row_sums(compiled),
    )  # fmt: skip


def _run(tool: str, *args: str) -> str:
    path = Path(triton.__path__[0]) / "backends" / "nvidia" / "bin" / tool
    return subprocess.run([path, *args], capture_output=True, text=True, check=True).stdout


def _row_sums(compiled: Any) -> tuple[str, ...]:
    """The layout along the columns of each operand that is added up over its columns, from the compiler's own IR."""
    text = compiled.asm["ttgir"]
    layouts = dict(re.findall(r"^(#\w+) = (#ttg\.\w+<\{.*\}>)", text, re.M))
    layouts_of_sums = []
    for axis, shape, layout in re.findall(
        r'"tt\.reduce"\([^)]*\) <\{axis = (\d)[^}]*\}>.*?\}\) : \(tensor<([\dx]+)x\w+, (#\w+)>', text, re.S
    ):
        if axis == "1":
            dealt = re.findall(r"(?:sizePerThread|threadsPerWarp|warpsPerCTA) = \[\d+, (\d+)\]", layouts[layout])
            layouts_of_sums.append(f"{shape.split('x')[1]} by {' x '.join(dealt) or layouts[layout]}")
    return tuple(layouts_of_sums)


def compile_all(tasks: Sequence[tuple[Case, str]], jobs: int) -> Iterator[tuple[int, Report | str]]:
    """Compile (case, target) pairs in `jobs` processes: place in `tasks` and report, in the order in which they finish.

    In place of a report a sentence says how the compiler failed. A compiler that takes its process down fails the case
    that it was given, no other.
    """
    left = iter(range(len(tasks)))
    busy: dict[Connection, tuple[_Worker, int]] = {}

    def give(worker: _Worker) -> None:
        following = next(left, None)
        worker.pipe.send(following)
        if following is not None:
            busy[worker.pipe] = worker, following

    for _ in range(min(jobs, len(tasks))):
        give(_Worker(tasks))
    while busy:
        for pipe in wait(list(busy)):
            assert isinstance(pipe, Connection)
            worker, index = busy.pop(pipe)
            try:
                report = pipe.recv()
            except EOFError:
                report = worker.last_words()
                worker = _Worker(tasks)
            give(worker)
            yield index, report


class _Worker:
    """A process that compiles the tasks whose places it is sent. It is forked: kernels cannot be pickled."""

    def __init__(self, tasks: Sequence[tuple[Case, str]]) -> None:
        self.pipe, child_end = multiprocessing.Pipe()
        # compilers print the whole program when they fail
        self.printed: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        context = multiprocessing.get_context("fork")
        self.process = context.Process(target=_work, args=(tasks, child_end, self.printed.fileno()), daemon=True)
        self.process.start()
        child_end.close()

    def last_words(self) -> str:
        """How the process ended: its status, minus its signal if it was one, and the first error that it printed."""
        self.process.join()
        error = _first_error(_content(self.printed.fileno())) or "no message"
        return f"the compiler ended its process with {self.process.exitcode}: {error}"


def _work(tasks: Sequence[tuple[Case, str]], pipe: Connection, printed: int) -> None:
    os.dup2(printed, 2)
    while (index := pipe.recv()) is not None:
        os.lseek(printed, 0, os.SEEK_SET)
        os.ftruncate(printed, 0)
        try:
            pipe.send(compile_case(*tasks[index]))
        except Exception as error:
            # passes print what they found and raise that they failed; in Python the cause says more than the place
            message = _first_error(_content(printed)) or _first_error(str(error.__cause__ or error)) or "no message"
            pipe.send(f"the compiler failed: {type(error).__name__}: {message}")


def _content(file: int) -> str:
    return os.pread(file, 1 << 20, 0).decode(errors="replace")


def _first_error(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return next((line for line in lines if re.search("error|assert", line, re.I)), lines[0] if lines else "")
