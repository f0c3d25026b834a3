"""Triton's code for sm_90, run by the executor, beside torch: products of matrices, scans, sorts, 8-bit floats."""

from __future__ import annotations

import contextlib
import re
from typing import Any

import numpy as np
import pytest
import torch

from shardwise.kernels._op import HAS_TRITON, tl, triton
from shardwise.perf.gpu import Fault, Kernel, Launch, Memory

pytestmark = pytest.mark.compiled
TRITON: tuple[int, ...] = tuple(map(int, triton.__version__.split(".")[:2])) if HAS_TRITON else (0, 0)


def build(kernel: Any, types: dict[str, str], constants: dict[str, Any], **options: Any) -> tuple[Kernel, int]:
    """A kernel for sm_90, all its pointers on 16 bytes, and the shared memory that it asks for."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    attrs = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if types.get(name, "")[:1] == "*"}
    signature = {name: types.get(name, "constexpr") for name in names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attrs)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    return Kernel(compiled.asm["ptx"]), compiled.metadata.shared


def run(made: tuple[Kernel, int], *values: torch.Tensor, grid: tuple[int, ...] = (1,), ends: bool = False) -> Launch:
    """Launch on tensors, which hold the results after it; a fault that `ends` it is only among its faults."""
    memory = Memory()
    arrays = [value.view(torch.uint8).numpy() for value in values]
    addresses = [memory.put(array, f"X{i}") for i, array in enumerate(arrays)]
    launch = Launch(made[0], memory, made[1], addresses)
    with contextlib.suppress(*[Fault] * ends):
        launch.run(grid)
    for array, address in zip(arrays, addresses, strict=True):
        array[:] = memory.get(address)
    return launch


@triton.jit
def product_kernel(X, Y, Z, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, BLOCK)
    total = tl.zeros((M, N), Z.dtype.element_ty)
    for start in range(0, K, BLOCK):
        x = tl.load(X + m[:, None] * K + (start + k)[None, :])
        y = tl.load(Y + (start + k)[:, None] * N + n[None, :])
        total = tl.dot(x, y, total, out_dtype=Z.dtype.element_ty)
    tl.store(Z + m[:, None] * N + n[None, :], total)


NAMES = {
    torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.int8: "i8",
    torch.float8_e4m3fn: "fp8e4nv", torch.float8_e5m2: "fp8e5",
}  # fmt: skip


@pytest.mark.parametrize(
    ("dtype", "m", "n", "block", "stages"),
    [
        (torch.float16, 64, 64, 32, 3), (torch.float16, 16, 16, 16, 1), (torch.bfloat16, 64, 32, 64, 2),
        (torch.bfloat16, 32, 16, 16, 2), (torch.float32, 64, 32, 32, 2), (torch.float32, 16, 16, 16, 1),
        (torch.int8, 64, 32, 64, 2), (torch.float8_e4m3fn, 64, 32, 64, 2),
    ],
)  # fmt: skip
def test_products_of_matrices(dtype: torch.dtype, m: int, n: int, block: int, stages: int) -> None:
    """mma.sync of 16 rows, wgmma of 64, fed by cp.async in several stages, by ldmatrix and by plain loads."""
    k = 4 * block
    whole = dtype == torch.int8
    kind, out = NAMES[dtype], torch.int32 if whole else torch.float32
    types = {"X": f"*{kind}", "Y": f"*{kind}", "Z": "*i32" if whole else "*fp32"}
    made = build(product_kernel, types, {"M": m, "N": n, "K": k, "BLOCK": block}, num_warps=4, num_stages=stages)
    opcodes = {instruction.parts[0] for instruction in made[0].code}
    assert opcodes & {"wgmma", "mma"}
    assert ("cp" in opcodes) == (stages > 1)
    x, y = (torch.randint(-8, 9, size) if whole else torch.randn(size) for size in ((m, k), (k, n)))
    x, y, z = x.to(dtype), y.to(dtype), torch.zeros(m, n, dtype=out)
    launch = run(made, x, y, z)
    # before 3.7 Triton has no fence between cp.async and wgmma
    known = {"unfenced"} if TRITON < (3, 7) else set()
    assert {fault.kind for fault in launch.faults} <= known, str(launch.faults[0])
    want = x.double() @ y.double() if whole or dtype != torch.float32 else tf32(x) @ tf32(y)
    torch.testing.assert_close(z.double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("taken", "kind"),
    [
        (r"fence\.proxy\.async[^;]*;", "unfenced"),
        (r"cp\.async\.wait_group\s+2;", "in flight"),
        (r"cp\.async\.commit_group;", "in flight"),
        (r"wgmma\.wait_group\.sync\.aligned\s+0;", "in flight"),
        (r"wgmma\.wait_group\.sync\.aligned\s+1;", "in flight"),
        (r"\bbar\.sync\s+0;", "race"),
    ],
)
def test_products_miss_each_fence_and_each_wait(taken: str, kind: str) -> None:
    types = {"X": "*fp16", "Y": "*fp16", "Z": "*fp32"}
    sizes = {"M": 64, "N": 64, "K": 192, "BLOCK": 32}
    whole, shared = build(product_kernel, types, sizes, num_warps=4, num_stages=3)
    text, count = re.subn(taken, "", whole.ptx)
    if not count and TRITON < (3, 7):
        pytest.skip("this Triton has none")
    values = torch.randn(64, 192).half(), torch.randn(192, 64).half(), torch.zeros(64, 64)
    assert kind in {fault.kind for fault in run((Kernel(text), shared), *values, ends=True).faults}


def tf32(x: torch.Tensor) -> torch.Tensor:
    return (x.view(torch.int32) & ~0x1FFF).view(torch.float32).double()


@triton.jit
def together_kernel(X, Y, S, T, N: tl.constexpr):  # type: ignore[no-untyped-def]
    n = tl.arange(0, N)
    x = tl.load(X + n)
    tl.store(Y + n, tl.cumsum(x, 0))
    tl.store(S + n, tl.sort(x))
    tl.store(T, tl.max(x, 0))
    tl.store(T + 1, tl.argmin(x, 0))
    tl.atomic_add(T + 2 + (n & 1), x)


@pytest.mark.parametrize("warps", [1, 4])
def test_scans_sorts_and_atomic_sums(warps: int) -> None:
    made = build(together_kernel, dict.fromkeys("XYST", "*i32"), {"N": 256}, num_warps=warps)
    x = torch.randint(-1000, 1000, (256,), dtype=torch.int32)
    y, s, t = torch.zeros_like(x), torch.zeros_like(x), torch.zeros(4, dtype=torch.int32)
    launch = run(made, x, y, s, t)
    assert not launch.faults, str(launch.faults[0])
    assert torch.equal(y, x.cumsum(0).int())
    assert torch.equal(s, x.sort().values)
    assert t.tolist() == [x.max(), x.argmin(), x[::2].sum(), x[1::2].sum()]


@triton.jit
def eights_kernel(X, Y, Z, N: tl.constexpr):  # type: ignore[no-untyped-def]
    n = tl.arange(0, N)
    x = tl.load(X + n).to(tl.float8e4nv)
    tl.store(Y + n, x)
    tl.store(Z + n, x.to(tl.float16))


def test_8_bit_floats_of_the_compiler() -> None:
    made = build(eights_kernel, {"X": "*fp32", "Y": "*fp8e4nv", "Z": "*fp16"}, {"N": 256}, num_warps=2)
    x, y, z = torch.randn(256) * 50, torch.zeros(256, dtype=torch.float8_e4m3fn), torch.zeros(256, dtype=torch.float16)
    launch = run(made, x, y, z)
    assert not launch.faults
    want = x.to(torch.float8_e4m3fn)
    assert torch.equal(y.view(torch.uint8), want.view(torch.uint8))
    assert torch.equal(z, want.half())


@triton.jit
def turned_kernel(X, Y, T, N: tl.constexpr):  # type: ignore[no-untyped-def]
    i, j = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
    x = tl.load(X + i * N + j)
    tl.store(Y + j * N + i, x)
    tl.store(T + tl.arange(0, N), tl.sum(x, 1))


@pytest.mark.parametrize("warps", [1, 4])
def test_every_barrier_of_a_kernel_is_needed(warps: int) -> None:
    made = build(turned_kernel, dict.fromkeys("XYT", "*fp32"), {"N": 32}, num_warps=warps)
    x = torch.randn(32, 32)

    def outputs() -> list[torch.Tensor]:
        return [torch.zeros(32, 32), torch.zeros(32)]

    y, t = outputs()
    launch = run(made, x, y, t)
    assert not launch.faults, str(launch.faults[0])
    assert torch.equal(y, x.T.contiguous())
    torch.testing.assert_close(t, x.sum(1))
    assert {name: c["bytes"] / c["sectors"] for name, c in launch.requests.items()} == {
        "load X0": 32.0, "store X1": 32.0, "store X2": 32.0,
    }  # fmt: skip
    for i in range(len(made[0].barriers)):
        broken = run((made[0].without_barrier(i), made[1]), x, *outputs())
        assert {fault.kind for fault in broken.faults} == {"race"}
    assert warps == 1 or made[0].barriers


@triton.jit
def shared_word_kernel(X, Y):  # type: ignore[no-untyped-def]
    tl.store(Y, tl.load(X + tl.program_id(0)))


def test_programs_that_write_one_word() -> None:
    made = build(shared_word_kernel, {"X": "*i32", "Y": "*i32"}, {}, num_warps=1)
    launch = run(made, torch.arange(4, dtype=torch.int32), torch.zeros(4, dtype=torch.int32), grid=(4,))
    assert [fault.kind for fault in launch.faults] == ["shared word"]
    assert launch.faults[0].instruction is not None
    assert launch.faults[0].instruction.source.startswith("test_executor_compiled.py:")
    alone = run(made, torch.arange(4, dtype=torch.int32), torch.zeros(4, dtype=torch.int32))
    assert not alone.faults


def test_a_false_alignment_is_seen() -> None:
    made = build(turned_kernel, dict.fromkeys("XYT", "*fp32"), {"N": 32}, num_warps=4)
    memory = Memory()
    data = [np.zeros(32 * 32, np.float32), np.zeros(32 * 32, np.float32), np.zeros(32, np.float32)]
    addresses = [memory.put(array, f"X{i}", 4 * (i == 0)) for i, array in enumerate(data)]
    assert "misaligned" in {fault.kind for fault in Launch(*made[:1], memory, made[1], addresses).run((1,)).faults}
