"""The kernels of the ops on bags of rows: no races, no order among programs, and the declared bytes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from bag_rows import OPS, Bags, wanted
from kernel_inputs import torch_device
from recorded_calls import Call, assert_sound, by_kind

from shardwise.perf.compile.recorded import Launch, recorded
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


def forward_and_backward(op: str) -> Call:
    arguments, inputs = wanted(OPS[op].inputs(BAGS, torch.device("cpu")))
    out = OPS[op].call(*arguments)
    gradients = torch.autograd.grad(out, inputs, torch.ones_like(out))
    return Call([out.detach(), *gradients], DECLARED[op](*arguments))


def moved(launch: Launch, kind: str, name: str) -> int:
    """Bytes of an argument that lanes read or wrote, each time they did."""
    tensor = launch.tensors[name]
    low, high = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    accesses = [a for a in launch.accesses if a.kind == kind]
    return sum(int(((a.addresses >= low) & (a.addresses < high)).sum()) * a.itemsize for a in accesses)


@interpreted
@pytest.mark.parametrize("op", OPS)
def test_programs_do_not_race_in_any_order(op: str) -> None:
    assert_sound(lambda: forward_and_backward(op)._replace(traffic=None))


@interpreted
@pytest.mark.parametrize("op", OPS)
def test_the_forward_moves_the_declared_bytes(op: str) -> None:
    torch_device("interpreted")
    with recorded() as launches:
        traffic = forward_and_backward(op).traffic
    assert traffic is not None
    for kind, parts in by_kind(traffic):
        assert {name: moved(launches[0], kind, name) for name in parts} == parts
