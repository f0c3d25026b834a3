"""The kernels of the ops on bags of rows: no races, no order among programs, the declared bytes, no spills."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from bag_rows import OPS, Bags, wanted
from kernel_inputs import assert_same_bits, torch_device
from torch import Tensor

from shardwise.perf.compile import cases as launched
from shardwise.perf.compile import cases_jagged as launched_jagged
from shardwise.perf.compile import compiled
from shardwise.perf.compile.cases import Case
from shardwise.perf.compile.checks import broken_promises
from shardwise.perf.compile.recorded import Launch, races, recorded
from shardwise.perf.suite import declared_jagged as declared_segments
from shardwise.perf.suite.declared import Traffic

interpreted = pytest.mark.interpreted
BAGS = Bags("recorded", lengths=(5, 0, 13, 2, 20, 1), rest=3, left=8, right=16, tables=2, vector=9)
# tile: rows of a program of `jagged_dense_bmm` at this many rows a bag
DECLARED: dict[str, Callable[..., Traffic]] = {
    "dense_bmm": lambda x, offsets, dense, _: declared_segments.jagged_dense_bmm_bytes(x, offsets, dense, tile=16),
    "jagged_bmm": lambda x, y, offsets, _: declared_segments.jagged_jagged_bmm_bytes(x, y, offsets),
    "softmax": lambda values, offsets, _: declared_segments.jagged_softmax_bytes(values, offsets),
    "vector_product": declared_segments.jagged_vector_product_bytes,
    "unary": lambda weight, _, offsets, ids: declared_segments.batched_unary_embeddings_bytes(weight, offsets, ids),
}


def forward_and_backward(op: str) -> tuple[list[Tensor], tuple[Any, ...]]:
    arguments, inputs = wanted(OPS[op].inputs(BAGS, torch.device("cpu")))
    out = OPS[op].call(*arguments)
    return [out.detach(), *torch.autograd.grad(out, inputs, torch.ones_like(out))], arguments


@cache
def as_given(op: str) -> tuple[list[Tensor], tuple[Any, ...], list[Launch]]:
    torch_device("interpreted")
    with recorded() as launches:
        results, arguments = forward_and_backward(op)
    return results, arguments, launches


def moved(launch: Launch, kind: str, name: str) -> int:
    """Bytes of an argument that lanes read or wrote, each time they did."""
    tensor = launch.tensors[name]
    low, high = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    found = [a for a in launch.accesses if a.kind == kind]
    return sum(int(((a.addresses >= low) & (a.addresses < high)).sum()) * a.itemsize for a in found)


@interpreted
@pytest.mark.parametrize("op", OPS)
def test_programs_do_not_race(op: str) -> None:
    launches = as_given(op)[2]
    assert launches and [race for launch in launches for race in races(launch)] == []


@interpreted
@pytest.mark.parametrize("op", OPS)
def test_results_have_the_same_bits_in_any_order_of_programs(op: str) -> None:
    expected = as_given(op)[0]
    with recorded(order=1):
        got = forward_and_backward(op)[0]
    for one, other in zip(got, expected, strict=True):
        assert_same_bits(one, other)


@interpreted
@pytest.mark.parametrize("op", OPS)
def test_the_forward_moves_the_declared_bytes(op: str) -> None:
    _, arguments, launches = as_given(op)
    traffic = DECLARED[op](*arguments)
    for kind, parts in (("read", traffic.reads), ("write", traffic.writes)):
        assert {name: moved(launches[0], kind, name) for name in parts} == parts


# kernels at sizes and types that differ in their tiles
MATRIX = [
    ("dense_bmm M=64 K=64 fp32", "sm_90"), ("dense_bmm M=64 K=64 fp32 long", "sm_80"),
    ("dense_bmm M=64 K=64 bf16 long", "gfx942"), ("jagged_bmm M=64 K=64 fp32", "sm_90"),
    ("jagged_bmm M=3 K=20 fp16", "sm_100"), ("softmax D=128 fp32", "sm_90"),
    ("softmax_gradient D=1023 fp16", "sm_80"), ("vector_product D=32 fp32", "gfx942"),
    ("by_vectors D=1023 fp32", "sm_90"), ("unary_chunk fp32 two levels", "sm_90"),
]  # fmt: skip


@cache
def cases() -> dict[str, Case]:
    noted = [launched.launches(*launch) for launch in launched_jagged._bmm()]
    return {case.name: case for found in noted for case in found}


@pytest.mark.compiled
@pytest.mark.parametrize(("name", "target"), MATRIX, ids=[f"{name} {target}" for name, target in MATRIX])
def test_a_case_keeps_its_promises(name: str, target: str) -> None:
    case = cases()[name]
    report = compiled.compile_case(case, target)
    assert broken_promises([(case, target, report)]) == []
    assert report.atomics == ()
