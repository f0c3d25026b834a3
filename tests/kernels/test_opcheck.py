"""Every op is registered as torch expects, and compiles with its backward, fused or not, into one graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import bucket_inputs
import pytest
import torch
from checkout import file_of_tests
from kernel_inputs import (
    CASES,
    DEVICES,
    KINDS,
    Case,
    Inputs,
    assert_close,
    assert_same_bits,
    crossed,
    inputs,
    optimizer,
    torch_device,
    update_args,
    upstream,
)
from torch import Tensor

import shardwise.fbgemm  # noqa: F401  # has ops of its own
from shardwise.kernels import RULES, check_ids, fused_update, new_guard, pooled_lookup, sequence_lookup

OPS = torch.ops.shardwise
# the jagged and the quantized ops are checked beside their other tests
# test file -> ops that are checked there
JAGGED = {
    "select": {"jagged_index_add", "jagged_index_select"},
    "regroup": {"regroup_columns"},
    "fbgemm_permute": {"permute_tables", "permute_tables_backward", "regroup_by_permutes"},
    "padded": {
        "jagged_dense_add", "jagged_dense_add_jagged", "jagged_dense_mul", "jagged_to_padded_dense",
        "padded_dense_to_jagged", "padded_jagged_product",
    },
    "bag_rows": {
        "batched_unary_embeddings", "batched_unary_embeddings_gradient", "jagged_dense_bmm", "jagged_jagged_bmm",
        "jagged_softmax", "jagged_softmax_gradient", "jagged_vector_product", "jagged_vector_product_by_rows",
        "jagged_vector_product_by_vectors",
    },
    "quantized_lookup": {
        "dequantize_rows", "quantize_rows", "quantized_pooled_lookup", "quantized_sequence_lookup",
    },
    "segments": {"complete_cumsum", "invert_permute", "offsets_range", "segment_spread", "segment_sum"},
    "cache_batches": {
        "claim_rows", "expect_rows", "link_rows", "list_rows", "make_rows", "mark_rows", "pick_lowest", "place_rows",
        "release_slots", "take_slots",
    },
    "initial_rows": {"initial_rows"},
    "lowest": {"lowest"},
    "move_rows": {"move_rows"},
    "permute": {"collect_segments", "expand_into_jagged_permute", "move_segments"},
    "served_ops": {
        "bound_ids", "float_to_bfloat16", "fp8_part_ends", "from_float8", "from_fp8_parts", "from_fused_rows",
        "from_fused_tables", "hashed_rows", "identity_slots", "inside_pieces", "masked_counts", "murmur_hash",
        "place_pieces", "remapped_rows", "reorder_request_lengths", "reorder_request_values", "restore_request_values",
        "share_exponents", "take_masked", "take_pieces", "to_float8", "to_fp8_parts", "to_fused_rows",
    },
}  # fmt: skip
MIXED = next(case for case in CASES if case.name == "mixed dims")
ALIKE = replace(MIXED, tables=((11, 8), (6, 8), (5, 8)), features=((0, False), (1, False), (2, False)), weighted=False)


def longer(batch: Inputs) -> Inputs:
    """The batch with ids, and weights, that lie past its last offset."""
    p = batch.per_id_weights
    return replace(
        batch,
        indices=torch.cat([batch.indices, batch.indices.new_tensor([1, -1, 99])]),
        per_id_weights=None if p is None else torch.cat([p, p.new_full((3,), float("nan"))]),
    )


def op_calls(device: torch.device, *, padded: bool = False) -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """Name -> op and arguments, with gradients wanted where the op gives them."""
    mixed, alike = inputs(MIXED, device), inputs(ALIKE, device)
    if padded:
        mixed, alike = longer(mixed), longer(alike)
    assert mixed.per_id_weights is not None
    grad = upstream(mixed)
    rows = torch.randn(alike.indices.numel(), 8, device=device)
    where, segments = (mixed.indices, mixed.offsets), mixed.segments
    weights, scale = mixed.weights.clone().requires_grad_(), mixed.per_id_weights.clone().requires_grad_()
    rest = (mixed.features, mixed.dims, segments, mixed.pooling)
    alike_weights = alike.weights.clone().requires_grad_()
    return {
        **{
            f"fused_update {rule}": (
                OPS.fused_update.default,
                update_args(mixed.weights, optimizer(rule, mixed), grad, mixed),
            )
            for rule in RULES
        },
        "fused_update sequence": (
            OPS.fused_update.default,
            update_args(alike.weights, optimizer("sgd", alike), rows, alike, "sequence"),
        ),
        "update_index": (
            OPS.update_index.default,
            (*where, mixed.per_id_weights, mixed.features, segments, sum(mixed.dims), mixed.pooling, True),
        ),
        "check_ids": (
            OPS.check_ids.default,
            (*where, mixed.features, new_guard(device), mixed.names, True, padded),
        ),
        "lookup_gradient": (
            OPS.lookup_gradient.default,
            (mixed.weights, grad, *where, mixed.per_id_weights, *rest),
        ),
        "per_id_weight_gradient": (
            OPS.per_id_weight_gradient.default,
            (grad, mixed.weights, *where, mixed.features, mixed.dims),
        ),
        "pooled_lookup": (OPS.pooled_lookup.default, (weights, *where, scale, *rest, torch.float32)),
        "pooled_lookup unweighted": (OPS.pooled_lookup.default, (weights, *where, None, *rest, torch.bfloat16)),
        "sequence_lookup": (
            OPS.sequence_lookup.default,
            (alike_weights, alike.indices, alike.offsets, alike.features, 8, alike.segments, torch.float16),
        ),
        "check_gradient": (OPS.check_gradient.default, (grad, new_guard(device))),
        **bucket_inputs.op_calls(device),
    }


def of_other_rules(name: str) -> bool:
    """Whether this is the op whose schema other rules show as well."""
    op, _, rule = name.partition(" ")
    return op == "fused_update" and rule not in (*KINDS, "gradient", "sequence")


@pytest.mark.parametrize(("device", "name"), crossed(DEVICES, op_calls(torch.device("cpu")), of_other_rules))
def test_opcheck(device: str, name: str) -> None:
    op, args = op_calls(torch_device(device))[name]
    torch.library.opcheck(op, args)


# the ops that read ids; one rule stands for all
PADDED = ["pooled_lookup", "sequence_lookup", "check_ids", "per_id_weight_gradient", "lookup_gradient",
          "fused_update sequence", "fused_update rowwise_adagrad"]  # fmt: skip


@pytest.mark.parametrize("name", PADDED)
@pytest.mark.parametrize("device", DEVICES)
def test_opcheck_of_a_batch_with_padding(device: str, name: str) -> None:
    op, args = op_calls(torch_device(device), padded=True)[name]
    torch.library.opcheck(op, args)


def test_opcheck_covers_every_op() -> None:
    listed = {name.split()[0] for name in op_calls(torch.device("cpu"))}
    for name, ops in JAGGED.items():
        source = file_of_tests(f"test_{name}.py").read_text()
        assert "library.opcheck(" in source
        assert [op for op in sorted(ops) if op not in source] == [], name
        listed |= ops
    registered = {
        name.split("::")[1].split(".")[0] for name in torch._C._dispatch_get_all_op_names() if "shardwise::" in name
    }
    assert listed == registered


@dataclass(frozen=True)
class Fused:
    """A lookup whose backward is the fused update: the update hangs on the scalar `hook`."""

    batch: Inputs
    state: tuple[list[Tensor], Tensor, Tensor, Tensor]
    rule: str

    def __call__(self, weights: Tensor, hook: Tensor) -> Tensor:
        return _FusedLookup.apply(weights, hook, self.batch, self.state, self.rule)  # type: ignore[no-any-return, no-untyped-call]


class _FusedLookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weights: Tensor, hook: Tensor, batch: Inputs, state: Any, rule: str) -> Tensor:
        ctx.batch, ctx.state, ctx.rule, ctx.weights = batch, state, rule, weights
        return pooled_lookup(
            weights, batch.indices, batch.offsets, batch.per_id_weights, batch.features, batch.dims, batch.segments,
            batch.pooling,
        )  # fmt: skip

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        b, (states, step, hyper, guard) = ctx.batch, ctx.state
        fused_update(
            ctx.weights, states, step, grads[0], b.indices, b.offsets, b.per_id_weights, b.features, b.dims,
            b.segments, ctx.rule, hyper, guard, b.pooling,
        )  # fmt: skip
        return None, grads[0].new_zeros(()), None, None, None


Step = Callable[[Inputs], Sequence[Tensor]]


def lookup_step(batch: Inputs) -> Sequence[Tensor]:
    """Checks, a lookup, and its gradients by both of its differentiable inputs."""
    weights, scale = batch.weights.clone().requires_grad_(), batch.per_id_weights
    assert scale is not None
    scale = scale.clone().requires_grad_()
    guard, grad = new_guard(weights.device), upstream(batch)

    def loss(weights: Tensor, scale: Tensor, guard: Tensor, indices: Tensor, offsets: Tensor) -> Tensor:
        check_ids(indices, offsets, batch.features, guard, names=batch.names)
        out = pooled_lookup(
            weights, indices, offsets, scale * 2, batch.features, batch.dims, batch.segments, batch.pooling
        )
        return (torch.tanh(out) * grad).sum()

    run = maybe_compiled(loss)
    value = run(weights, scale, guard, batch.indices, batch.offsets)
    return [value.detach(), *torch.autograd.grad(value, (weights, scale))]


def sequence_step(batch: Inputs) -> Sequence[Tensor]:
    """A sequence lookup and its gradient."""
    weights = batch.weights.clone().requires_grad_()

    def loss(weights: Tensor, indices: Tensor, offsets: Tensor) -> Tensor:
        return torch.sin(
            sequence_lookup(weights, indices, offsets, batch.features, batch.dims[0], batch.segments)
        ).sum()

    value = maybe_compiled(loss)(weights, batch.indices, batch.offsets)
    return [value.detach(), *torch.autograd.grad(value, weights)]


def fused_step(batch: Inputs) -> Sequence[Tensor]:
    """Three steps in which the tables are trained by the backward itself."""
    weights, optim, grad = batch.weights.clone(), optimizer("adam", batch), upstream(batch)
    hook = torch.zeros((), device=weights.device, requires_grad=True)
    state = (optim.states, optim.step, optim.hyper, optim.guard)
    fused = Fused(batch, state, "adam")

    def loss(weights: Tensor, hook: Tensor) -> Tensor:
        return (torch.tanh(fused(weights, hook)) * grad).sum()

    run = maybe_compiled(loss)
    values = []
    for _ in range(3):
        value = run(weights, hook)
        value.backward()
        values.append(value.detach())
    return [*values, weights, *optim.states, optim.step]


backend: str | None = None


def maybe_compiled(fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
    if backend is None:
        return fn
    compiled: Callable[..., Tensor] = torch.compile(fn, fullgraph=True, backend=backend)
    return compiled


STEPS: dict[str, tuple[Step, Case]] = {
    "pooled": (lookup_step, MIXED),
    "sequence": (sequence_step, ALIKE),
    "fused": (fused_step, MIXED),
}


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("device", DEVICES)
def test_compiled_forward_and_backward_equal_eager(device: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    step, case = STEPS[name]
    batch = inputs(case, torch_device(device))
    expected = step(batch)
    torch._dynamo.reset()
    monkeypatch.setattr(f"{__name__}.backend", "aot_eager")
    assert_same_bits(step(batch), expected)


@pytest.mark.full
@pytest.mark.parametrize("device", [d for d in DEVICES if d == "cpu" or d == DEVICES[2]])
def test_inductor_compiles_a_fused_step(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = inputs(MIXED, torch_device(device))
    expected = fused_step(batch)
    torch._dynamo.reset()
    monkeypatch.setattr(f"{__name__}.backend", "inductor")
    for got, want in zip(fused_step(batch), expected, strict=True):
        assert_close(got.float(), want.float(), 1e-5)
