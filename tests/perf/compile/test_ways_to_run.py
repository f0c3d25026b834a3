"""The ways to run a kernel work on this machine, and memory that shardwise leaves unwritten is seen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from poison import poisoned

from shardwise.kernels._op import tl, triton

TARGETS = [("cuda", 80, 32), ("cuda", 90, 32), ("cuda", 100, 32), ("hip", "gfx942", 64)]


@triton.jit
def double_kernel(x_ptr, y_ptr, n, block: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * block + tl.arange(0, block)
    tl.store(y_ptr + at, 2 * tl.load(x_ptr + at, mask=at < n, other=0.0), mask=at < n)


@pytest.mark.interpreted
def test_the_interpreter_runs_a_kernel_on_cpu_tensors() -> None:
    x, y = torch.arange(10.0), torch.full((10,), -1.0)
    double_kernel[(2,)](x, y, 9, block=8)
    assert y.tolist() == [0, 2, 4, 6, 8, 10, 12, 14, 16, -1]


@pytest.mark.compiled
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: str(target[1]))
def test_a_kernel_compiles_for_a_gpu_that_is_not_here(target: tuple[str, Any, int]) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {"x_ptr": "*fp32", "y_ptr": "*fp32", "n": "i32", "block": "constexpr"}
    source = ASTSource(double_kernel, signature=signature, constexprs={"block": 128})
    binary = triton.compile(source, target=GPUTarget(*target))
    assert binary.asm["cubin" if target[0] == "cuda" else "hsaco"]


def allocate_as(module: str, expression: str) -> torch.Tensor:
    scope = {"torch": torch, "x": torch.ones(3), "__name__": module}
    result = eval(expression, scope)
    assert isinstance(result, torch.Tensor)
    return result


ALLOCATIONS = [
    "torch.empty(3)",
    "torch.empty(3, dtype=torch.bfloat16)",
    "torch.empty(3, dtype=torch.float8_e4m3fn)",
    "torch.empty(3, requires_grad=True)",
    "torch.empty_like(x)",
    "torch.empty_strided((3,), (2,))",
    "x.new_empty(3)",
]


@pytest.mark.parametrize("expression", ALLOCATIONS)
def test_shardwise_finds_nan_in_memory_it_did_not_write(expression: str) -> None:
    assert allocate_as("shardwise.kernels.lookup.pooled", expression).float().isnan().all()


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int8, torch.uint8])
def test_shardwise_finds_a_huge_integer_in_memory_it_did_not_write(dtype: torch.dtype) -> None:
    assert (allocate_as("shardwise.jagged.x", f"torch.empty(3, dtype={dtype})") == torch.iinfo(dtype).max - 1).all()


def test_memory_of_other_code_is_left_alone() -> None:
    allocated = []
    with poisoned(), patch("poison._fill", allocated.append):
        allocate_as("torch.nn.functional", "torch.empty(3)")
        allocate_as("shardwise.kernels.lookup.pooled", "torch.empty(3)")
    assert len(allocated) == 1


def test_the_poison_does_not_break_a_compiled_graph() -> None:
    def twice(x: torch.Tensor) -> torch.Tensor:
        return torch.empty(3).copy_(x) + x.new_empty(3).copy_(x)

    function: Callable[..., torch.Tensor] = torch.compile(twice, fullgraph=True, backend="eager")
    assert function(torch.ones(3)).tolist() == [2, 2, 2]
