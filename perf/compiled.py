"""Compile the kernels for GPUs that need not be present, and read registers, spills and load widths from the result.

Run as `python -m shardwise.perf.compiled [--target sm_90]` for a table. Needs triton, no GPU, no TRITON_INTERPRET.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from shardwise.kernels import RULES, bounds, features, finite, pooled, sequence, update, weight_gradient
from shardwise.kernels._op import gather_tile, next_power_of_2

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
_NVIDIA_TOOLS = os.path.join(*triton.__path__, "backends", "nvidia", "bin")


@dataclass(frozen=True)
class Case:
    """One kernel at one configuration: argument types, constexprs, and which arguments are multiples of 16."""

    name: str
    kernel: Any
    types: dict[str, str | tuple[str, ...]]
    constants: dict[str, Any]
    divisible: tuple[str, ...] = ()
    num_warps: int = 4


@dataclass(frozen=True)
class Report:
    """What a compiled kernel needs: registers a thread, spilled bytes (registers on AMD), shared bytes, memory ops."""

    registers: int
    spills: int
    shared_bytes: int
    memory_ops: dict[str, int]


_FIELDS = {
    name: getattr(features, name) for name in ("BASE", "ROWS", "DIM", "COLUMN", "MEAN", "FIRST_ROW", "ORDER", "FIELDS")
}


def cases() -> list[Case]:
    """Every kernel at the configurations that launches choose, over dtypes and dims."""
    return [
        *(_pooled(dim, "fp32", False) for dim in (3, 4, 32, 64, 128, 1024)),
        *(_pooled(128, dtype, False) for dtype in ("fp16", "bf16")),
        _pooled(128, "fp32", True),
        *(_update(rule, 128, "fp32") for rule in RULES),
        *(_update("rowwise_adagrad", dim, "fp32") for dim in (3, 4, 32, 256, 1024, 4096)),
        *(_update("rowwise_adagrad", 128, dtype) for dtype in ("fp16", "bf16")),
        *(_update("adam", dim, "fp32") for dim in (1024, 4096)),
        *(_gather(dim, dtype) for dim, dtype in ((3, "fp32"), (4, "fp32"), (128, "fp32"), (128, "fp16"))),
        _case("resolve", sequence._resolve_kernel, "I*i64 O*i64 FT*i64 at*i64 N:i32 F:i32 B:i32 D:i32",
              STEPS=6, BLOCK_N=512, ALIGN=4),
        _case("check_ids", bounds._check_ids_kernel, "I*i64 O*i64 FT*i64 guard*i64 N:i32 F:i32 B:i32",
              BLOCK=1024, STEPS=6, NONE=bounds.OK, PADDED=False),
        _case("check_gradient", finite._check_gradient_kernel, "G*fp32 guard*i64 N:i32", BLOCK=4096, NONE=bounds.OK),
        *(_weight_gradient(dim, dtype) for dim, dtype in ((3, "fp32"), (128, "fp32"), (128, "fp16"), (1024, "fp32"))),
        *(_update("rowwise_adagrad", dim, "fp32", scale=scale) for dim in (64, 128) for scale in (2, 4)),
        *(_update("rowwise_adagrad", 128, dtype, rounds=n) for n, dtype in ((1, "bf16"), (2, "fp16"))),
        *(_update("adam", 128, "fp32", decay=decay) for decay in (1, 2)),
    ]  # fmt: skip


def _pooled(dim: int, dtype: str, weighted: bool) -> Case:
    itemsize = 4 if dtype == "fp32" else 2
    block_b, block_d, warps = gather_tile(next_power_of_2(dim), itemsize)
    return _case(
        f"pooled_lookup D={dim} {dtype}{' weighted' if weighted else ''}", pooled._pooled_lookup_kernel,
        f"W*{dtype} I*i64 O*i64 P{'*fp32' if weighted else '*i64'} FT*i64 Y*fp32 N:i64 B:i32"
        f" y_stride{_int(dim)} first:i32",
        warps, HAS_P=weighted, BLOCK_B=block_b, BLOCK_D=block_d,
        ALIGN=features.row_alignment(dim, itemsize), OUT_ALIGN=features.row_alignment(dim, 4),
    )  # fmt: skip


def _update(rule: str, dim: int, dtype: str, *, scale: int = 1, rounds: int = 0, decay: int = 0) -> Case:
    block_c, block_d, warps = update.update_tile(dim, scale)
    align, defined = features.row_alignment(dim, 4), RULES[rule]
    case = _case(
        f"fused_update {rule} D={dim} {dtype}{' x' + str(scale) if scale > 1 else ''}{' rounded' if rounds else ''}"
        f"{' decay' + str(decay) if decay else ''}", update._update_kernel,
        f"W*{dtype} partial*fp32 start*i64 row_of*i32 hash_of*i64 slot_of*i64 n_chunks*i64 src*i64 scale*fp32"
        f" grad*fp32 numbers*fp32 salt*i64 guard*i64 low:i32 D{_int(dim)}",
        warps, NONE=bounds.OK, RULE=defined.in_triton, KINDS=defined.kinds, NUMBERS=len(defined.numbers) + 1,
        TAKES_ROW=defined.takes_row, DECAY=decay, ROUNDS=rounds, HAS_SCALE=False, BLOCK_C=block_c, BLOCK_D=block_d,
        ALIGN=align, SRC_ALIGN=align,
    )  # fmt: skip
    case.types["states"] = ("*fp32",) * len(defined.kinds)
    return case


def _weight_gradient(dim: int, dtype: str) -> Case:
    itemsize = 4 if dtype == "fp32" else 2
    block_b, block_d, warps = weight_gradient.weight_gradient_tile(next_power_of_2(dim), itemsize)
    return _case(
        f"weight_gradient D={dim} {dtype}", weight_gradient._weight_gradient_kernel,
        f"W*{dtype} I*i64 O*i64 G*fp32 FT*i64 Q*fp32 N:i64 B:i32 g_stride{_int(dim)} first:i32",
        warps, BLOCK_B=block_b, BLOCK_D=block_d,
        ALIGN=features.row_alignment(dim, itemsize), G_ALIGN=features.row_alignment(dim, 4),
    )  # fmt: skip


def _gather(dim: int, dtype: str) -> Case:
    itemsize = 4 if dtype == "fp32" else 2
    block_n, block_d, warps = gather_tile(dim, itemsize)
    return _case(
        f"gather D={dim} {dtype}", sequence._gather_kernel, f"W*{dtype} at*i64 Y*fp32 N:i32 D{_int(dim)}",
        warps, BLOCK_N=block_n, BLOCK_D=block_d, ALIGN=features.row_alignment(dim, itemsize),
    )  # fmt: skip


def _int(dim: int) -> str:
    return ":16" if dim % 16 == 0 else ":i32"


def _case(name: str, kernel: Any, arguments: str, num_warps: int = 4, **constants: Any) -> Case:
    """Arguments as "W*fp32" (an aligned pointer), "N:i32" (an int) or "D:16" (an int known to be a multiple of 16)."""
    types: dict[str, str | tuple[str, ...]] = {}
    divisible = []
    for argument in arguments.split():
        what, kind = re.split(r"[*:]", argument)
        types[what] = f"*{kind}" if "*" in argument else "i32" if kind == "16" else kind
        if "*" in argument or kind == "16":
            divisible.append(what)
    constants.update({field: number for field, number in _FIELDS.items() if field in kernel.arg_names})
    return Case(name, kernel, types, constants, tuple(divisible), num_warps)


def compile_case(case: Case, target: str) -> Report:
    """Compile one case for one target of TARGETS."""
    names = case.kernel.arg_names
    signature = {name: "constexpr" if name in case.constants else case.types[name] for name in names}
    attrs: dict[tuple[int, ...], Any] = {(names.index(name),): [["tt.divisibility", 16]] for name in case.divisible}
    for name, kinds in case.types.items():
        if isinstance(kinds, tuple):
            attrs.update({(names.index(name), place): [["tt.divisibility", 16]] for place in range(len(kinds))})
    source = ASTSource(fn=case.kernel, signature=signature, constexprs=case.constants, attrs=attrs)
    compiled = triton.compile(source, target=TARGETS[target], options={"num_warps": case.num_warps})
    if target.startswith("sm"):
        return _read_cubin(compiled)
    return _read_amdgcn(compiled)


def _read_cubin(compiled: Any) -> Report:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = _run("cuobjdump", "-res-usage", file.name)
        sass = _run("nvdisasm", "-c", file.name)
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found, usage
    ops = re.findall(r"\*/\s+(?:@!?U?P\d+\s+)?((?:LDG|STG|LDL|STL|ATOM\w*|RED(?!UX)|BAR)[A-Z0-9_.]*)", sass)
    widths: Counter[str] = Counter()
    for op in ops:
        width = re.search(r"\.(64|128|U8|U16)\b", op)
        widths[f"{op.split('.')[0]}.{width[1] if width else '32'}"] += 1
    return Report(int(found[1]), int(found[2]), compiled.metadata.shared, dict(widths))


def _read_amdgcn(compiled: Any) -> Report:
    text = compiled.asm["amdgcn"]

    def number(key: str) -> int:
        found = re.search(key + r":\s+(\d+)", text)
        assert found, key
        return int(found[1])

    ops = Counter(re.findall(r"^\s+((?:global|buffer|flat|scratch)_(?:load|store)\w+)", text, re.M))
    return Report(number(r"\.vgpr_count"), number(r"\.vgpr_spill_count"), compiled.metadata.shared, dict(ops))


def _run(tool: str, *args: str) -> str:
    return subprocess.run([os.path.join(_NVIDIA_TOOLS, tool), *args], capture_output=True, text=True, check=True).stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", choices=[*TARGETS, "all"], default="sm_90")
    chosen = parser.parse_args().target
    for target in TARGETS if chosen == "all" else [chosen]:
        for case in cases():
            report = compile_case(case, target)
            ops = " ".join(f"{op}x{n}" for op, n in sorted(report.memory_ops.items()))
            print(
                f"{target} {case.name:42} {report.registers:4} registers {report.spills:3} spilled"
                f" {report.shared_bytes:6} shared  {ops}"
            )


if __name__ == "__main__":
    main()
