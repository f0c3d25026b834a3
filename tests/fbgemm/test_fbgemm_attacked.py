"""Programs written for FBGEMM 1.8 that broke on ours: each test is one of them, cut down to the line that failed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, tensor

import shardwise.fbgemm

ops = torch.ops.fbgemm
assert shardwise.fbgemm.registered_ops()

OFFSETS = tensor([0, 2, 5])
VALUES = torch.linspace(-1.0, 1.0, 15).view(5, 3)


def test_an_op_between_two_graphs_is_not_compiled_itself() -> None:
    """`dense_to_jagged` without total_L ends a graph, and torch.compile went on into the Python of our kernels:
    with sizes that change it raised TorchRuntimeError there, and otherwise compiled each function of them.
    """
    compiled: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., object]:
        compiled.append(graph.code)
        return graph.forward

    def program(values: Tensor, lengths: Tensor) -> Tensor:
        offsets = ops.asynchronous_complete_cumsum(lengths)
        padded = ops.jagged_to_padded_dense(values, [offsets], [4])
        jagged = ops.dense_to_jagged(padded.sin(), [offsets])[0]
        return torch.relu(jagged)

    torch._dynamo.reset()
    function = torch.compile(program, backend=backend, dynamic=True)
    for lengths in (tensor([1, 3, 2]), tensor([4, 0, 1, 4])):
        values = torch.randn(int(lengths.sum()), 3, requires_grad=True)
        output = function(values, lengths)
        torch.testing.assert_close(output, values.sin().relu())
        torch.testing.assert_close(
            *(torch.autograd.grad(each.sum(), values)[0] for each in (output, values.sin().relu()))
        )
    assert all("sin()" in code or "relu" in code for code in compiled), "only the program, before the op and after it"
    torch._dynamo.reset()


@pytest.mark.parametrize("strict", [True, False])
def test_bags_whose_number_the_data_say_can_be_permuted_in_an_exported_program(strict: bool) -> None:
    """The way back from buckets permutes as many bags as there are ids, a number that an earlier op's data say:
    tracing raised "Could not guard on data-dependent expression Ne(u0, 0)".
    """

    class Program(torch.nn.Module):
        def forward(self, values: Tensor, mask: Tensor) -> Tensor:
            ids, _ = ops.masked_select_jagged_1d(values, mask.new_full((1,), 6, dtype=torch.int64), mask)
            order = torch.arange(ids.shape[0], dtype=torch.int32).flip(0)
            moved: Tensor = ops.permute_1D_sparse_data(permute=order, lengths=torch.ones_like(ids), values=ids)[1]
            return moved

    values = torch.arange(6)
    exported = torch.export.export(Program(), (values, values > 2), strict=strict)
    assert exported.module()(values, values > 3).tolist() == [5, 4]


PRODUCTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "jagged_dense_bmm": lambda values, matrices: ops.jagged_dense_bmm(values, OFFSETS, matrices, 3)[0],
    "jagged_jagged_bmm": lambda values, matrices: ops.jagged_jagged_bmm(values, values * matrices.sum(), OFFSETS, 3),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_under_autocast_are_those_without(name: str) -> None:
    """FBGEMM's kernels know no autocast; ours multiplied with torch.bmm, which rounded fp32 to bf16 under it,
    in the forward, and in a backward that was called under it.
    """
    matrices = torch.linspace(0.5, 0.9, 12).view(2, 3, 2)

    def gradients(enabled: bool) -> list[Tensor]:
        leaves = [each.clone().requires_grad_() for each in (VALUES, matrices)]
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            output = PRODUCTS[name](*leaves)
            return [output.detach(), *torch.autograd.grad(output.square().sum(), leaves)]

    for lowered, wanted in zip(gradients(True), gradients(False), strict=True):
        assert torch.equal(lowered, wanted)


def test_long_bags_under_autocast_are_those_without() -> None:
    """A bag far longer than the others is multiplied alone: `@` rounded it to bf16 under autocast."""
    offsets = tensor([0, 600, 601])
    values, matrices = torch.randn(601, 8), torch.randn(2, 8, 4)
    wanted = [
        ops.jagged_dense_bmm(values, offsets, matrices, 600)[0],
        ops.jagged_jagged_bmm(values, values, offsets, 600),
    ]
    with torch.autocast("cpu", torch.bfloat16):
        lowered = [
            ops.jagged_dense_bmm(values, offsets, matrices, 600)[0],
            ops.jagged_jagged_bmm(values, values, offsets, 600),
        ]
    assert all(map(torch.equal, lowered, wanted))


def test_rows_of_8_bits_quantized_under_autocast_are_those_without() -> None:
    """With bit_rate 8 scale and bias, fp16, are joined by torch.cat: under autocast of bf16 it raised
    "Unexpected floating ScalarType in at::autocast::prioritize".
    """
    rows = VALUES[:, :2].contiguous()
    wanted = ops.FloatOrHalfToFusedNBitRowwiseQuantizedSBHalf(rows, 8)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(ops.FloatOrHalfToFusedNBitRowwiseQuantizedSBHalf(rows, bit_rate=8), wanted)


def test_embeddings_merged_from_several_dtypes_have_that_of_the_first() -> None:
    """FBGEMM gives the first tensor's dtype; ours gave the widest, fp32 for fp16 and fp32 tables side by side."""
    merged = ops.merge_pooled_embeddings([VALUES.half(), VALUES], 5, torch.device("cpu"))
    assert torch.equal(merged, torch.cat([VALUES, VALUES], 1).half())


NARROW = tensor([100, 100], dtype=torch.int8)
ONE, THREE, FIVE = tensor([1]), tensor([3]), tensor([5])
# what went wrong -> the call, what is raised, and the argument that the message names
WRONG: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "int8 passed in silence: [0, 100, -56]": (
        lambda: ops.asynchronous_complete_cumsum(t_in=NARROW),
        TypeError,
        "t_in",
    ),
    "int8 passed in silence: [100, -56]": (lambda: ops.asynchronous_inclusive_cumsum(t_in=NARROW), TypeError, "t_in"),
    "uint8 passed in silence": (lambda: ops.asynchronous_exclusive_cumsum(t_in=NARROW.byte()), TypeError, "t_in"),
    "int16 passed in silence": (
        lambda: ops.asynchronous_batched_complete_cumsum(values=NARROW.short()[None]),
        TypeError,
        "values",
    ),
    "'only one element tensors can be converted'": (
        lambda: ops.repeat_arange(lengths=tensor([[1, 2]])),
        ValueError,
        "lengths",
    ),
    "'lengths must have a dimension' of t_in": (lambda: ops.lengths_range(t_in=tensor(2)), ValueError, "t_in"),
    "'tuple index out of range'": (
        lambda: ops.bounds_check_indices(
            rows_per_table=FIVE, indices=ONE, offsets=tensor([0, 1]), bounds_check_mode=1, warning=tensor([0]),
            weights=tensor(1.0),
        ),
        ValueError,
        "weights",
    ),
    "'int has no len'": (
        lambda: ops.batch_index_select_dim0_tensor(
            inputs=torch.ones(3), indices=ONE, input_num_indices=tensor(1), input_rows=THREE, input_columns=ONE
        ),
        ValueError,
        "input_num_indices",
    ),
    "'Index to scalar can have only 1 value'": (
        lambda: ops.index_select_dim0(input=tensor(1.0), indices=tensor([0, 0])),
        ValueError,
        "input",
    ),
    "on CUDA a mask selected": (
        lambda: ops.index_select_dim0(input=torch.ones(2), indices=tensor([True, False])),
        TypeError,
        "indices",
    ),
    "negative sources passed in silence": (
        lambda: ops.get_source_mask(num_sources=-ONE, num_targets=THREE, output_size=2),
        ValueError,
        "num_sources",
    ),
    "what did not fit was cut off": (
        lambda: ops.get_source_mask(num_sources=ONE, num_targets=THREE, output_size=2),
        ValueError,
        "output_size",
    ),
    "id 4 got the row of the last remapping that there is": (
        lambda: ops.pruned_array_lookup(
            indices=tensor([4]), offsets=tensor([0, 1]), index_remappings=tensor([0, -1, 1]),
            index_remappings_offsets=tensor([0, 5]),
        ),
        ValueError,
        "index_remappings_offsets",
    ),
    "negative widths passed in silence": (
        lambda: ops.kt_regroup_arguments(torch.ones(1, 1), keys=[["a", "b"]], lengths=[[2, -1]], groups=[["b"]]),
        ValueError,
        "lengths",
    ),
}  # fmt: skip


@pytest.mark.parametrize("before", WRONG)
def test_a_wrong_argument_is_named(before: str) -> None:
    """Calls whose argument is wrong: these gave wrong numbers in silence, or an error that named something else."""
    call, kind, name = WRONG[before]
    with pytest.raises(kind, match=rf"^{name}\b"):
        call()
