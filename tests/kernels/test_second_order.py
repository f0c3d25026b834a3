"""Every function of ours that autograd follows, differentiated twice: a table over all of them, none of which is wrong.

Second derivatives are taken by plain torch in fp64 and by `gradgradcheck`, or they are an error that names the op.
"""

# pyright: reportCallIssue=false
from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from kernel_inputs import CASES, DEVICES, Case, Inputs, assert_close, inputs
from ranks import run_ranks
from torch import Tensor

import shardwise.fbgemm  # noqa: F401  # has ops of its own
from shardwise import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    ShardingEnv,
    apply_optimizer_in_backward,
)
from shardwise.embeddings import PoolingType
from shardwise.embeddings.collections.sorted_select import sorted_index_select
from shardwise.embeddings.optim.fbgemm_types import ComputeDevice, EmbeddingLocation, OptimType
from shardwise.fbgemm.tables import SplitTableBatchedEmbeddingBagsCodegen
from shardwise.kernels import (
    batched_unary_embeddings,
    block_bucketize,
    jagged_dense_add,
    jagged_dense_add_jagged,
    jagged_dense_bmm,
    jagged_dense_mul,
    jagged_index_add,
    jagged_index_select,
    jagged_jagged_bmm,
    jagged_jagged_mul,
    jagged_softmax,
    jagged_to_padded_dense,
    jagged_vector_product,
    pack_segments,
    padded_dense_to_jagged,
    per_id_weight_gradient,
    permute_1d,
    permute_pooled,
    permute_segments,
    pooled_lookup,
    segment_sum,
    sequence_lookup,
    unpack_segments,
)
from shardwise.sharding import EmbeddingBagCollectionSharder, construct_module_sharding_plan, table_wise
from shardwise.sharding.engine.wire import CutGradient
from shardwise.sharding.torchrec.async_collective import copies
from shardwise.sharding.torchrec.comm_ops import alltoall_pooled
from shardwise.sharding.torchrec.grouped_lookup import CommOpGradientScaling

OPS = torch.ops.shardwise

# ops through which no derivative is taken: they give ids, offsets and quantized rows, or write in place
WITHOUT = {
    "bound_ids", "check_gradient", "check_ids", "claim_rows", "complete_cumsum", "dequantize_rows",
    "expand_into_jagged_permute", "expect_rows", "float_to_bfloat16", "fp8_part_ends", "from_float8", "from_fp8_parts",
    "from_fused_rows", "from_fused_tables", "fused_update", "hashed_rows", "histogram_binning", "identity_slots",
    "initial_rows", "inside_pieces", "invert_permute", "jagged_unique", "link_rows", "list_rows", "lowest", "make_rows",
    "mark_rows", "masked_counts", "move_rows", "murmur_hash", "offsets_range", "pick_lowest", "place_rows",
    "quantize_rows", "quantized_pooled_lookup", "quantized_sequence_lookup", "release_slots", "remapped_rows",
    "reorder_request_lengths", "share_exponents", "take_masked", "take_slots", "to_float8", "to_fp8_parts",
    "to_fused_rows", "unique_ids", "update_index",
}  # fmt: skip

# autograd's own Functions -> where their second derivative is looked at
FUNCTIONS = {
    "padded._ToPadded": "jagged_to_padded_dense",
    "padded._ToJagged": "padded_dense_to_jagged",
    "elementwise._AddDense": "jagged_dense_add",
    "elementwise._AddJagged": "jagged_dense_add_jagged",
    "elementwise._Multiply": "jagged_dense_mul",
    "segments._Move": "move_segments",
    "segments._Collect": "collect_segments",
    "rows._softmax": "jagged_softmax",
    "rows._product": "jagged_vector_product",
    "rows._lookup": "batched_unary_embeddings",
    "rows._dense_bmm": "jagged_dense_bmm",
    "rows._jagged_bmm": "jagged_jagged_bmm",
    "lookup_autograd._FlatOfParameters": "test_collections_without_an_optimizer_have_second_derivatives",
    "lookup_autograd.LookupWithUpdate": "test_a_fused_lookup_is_not_differentiated_twice",
    "wire.CutGradient": "test_a_cut_gradient_is_differentiated_where_it_is_not_cut",
    "collection.ExchangedLookup": "test_sharded_lookups_and_exchanges_are_not_differentiated_twice",
    "async_collective._Start": "test_sharded_lookups_and_exchanges_are_not_differentiated_twice",
    "async_collective._Finish": "test_sharded_lookups_and_exchanges_are_not_differentiated_twice",
    "async_collective._Copies": "test_copies_for_all_ranks_are_differentiated_twice",
    "sparse_gradient._LookupWithSparseGradient": "test_lookups_of_the_optimizer_none_are_not_differentiated_twice",
    "training._Reached": "test_a_fused_lookup_of_fbgemm_is_not_differentiated_twice",
    "grouped_lookup.CommOpGradientScaling": "test_scaled_gradients_and_sorted_selections_are_differentiated_twice",
    "sorted_select._SortedSelect": "test_scaled_gradients_and_sorted_selections_are_differentiated_twice",
    "_op._Refused": "test_a_fused_lookup_is_not_differentiated_twice",
}


@dataclass(frozen=True)
class Entry:
    """A function of some tensors, and the same in plain torch where it takes no fp64."""

    run: Callable[..., Any]
    shapes: Sequence[tuple[int, ...]]
    plain: Callable[..., Any] | None = None


def ints(*numbers: int) -> Tensor:
    return torch.tensor(numbers)


# five bags of 9 rows, of which the last belongs to none
LENGTHS = ints(3, 0, 2, 1, 2)
OFFSETS = ints(0, 3, 3, 5, 6, 8)
TABLES, IDS = ints(0, 4, 6), ints(1, 3, 1, 0, 1, 1, 0, 1)
UNARY = ints(0, 2, 4, 6, 8)
PERMUTE, STARTS, MOVED = ints(1, 0, 1), ints(0, 2, 6), ints(0, 4, 6, 10)
_REQUESTS = ints(0, 1, 3, 3, 4, 7, 8), ints(0, 1, 1, 2, 4, 7, 8), ints(0, 1, 3)
CHOSEN, SELECTED = ints(2, 0, 2), ints(2, 3, 2)
# rows of FBGEMM's: tensor from, tensor to, column from, column to, columns, and the next use of the same columns
BY_PERMUTES = torch.tensor([[1, 0, 0, 0, 2, 0], [0, 0, 1, 2, 2, 0], [0, 1, 0, 0, 1, 0]], dtype=torch.int32)


def jagged_entries() -> dict[str, list[Entry]]:
    """By op: itself, and the functions that lead to it or past it."""

    def on(*integers: Tensor) -> Callable[[Tensor], Any]:
        return lambda like: [tensor.to(like.device) for tensor in integers]

    o, rows, dense = on(OFFSETS), (9, 3), (5, 2, 3)
    return {
        "jagged_softmax": [
            Entry(lambda x, most=most, op=op: op(x, *o(x), most), [rows])
            for op in (OPS.jagged_softmax, jagged_softmax)
            for most in (None, 2)
        ],
        "jagged_softmax_gradient": [
            # of a softmax: rows that take no part are 0 there
            Entry(
                lambda g, x, most=most: OPS.jagged_softmax_gradient(g, OPS.jagged_softmax(x, *o(x), most), *o(g), most),
                [rows, rows],
            )
            for most in (None, 2)
        ],
        "jagged_vector_product": [
            Entry(lambda v, x, op=op: op(v, x, *o(x)), [(10, 4), (9, 6)])
            for op in (OPS.jagged_vector_product, jagged_vector_product)
        ],
        "jagged_vector_product_by_rows": [
            Entry(lambda g, v: OPS.jagged_vector_product_by_rows(g, v, *o(g), 9), [(10, 3), (10, 4)])
        ],
        "jagged_vector_product_by_vectors": [
            Entry(lambda g, x: OPS.jagged_vector_product_by_vectors(g, x, *o(g), 4), [(10, 3), (9, 6)])
        ],
        "batched_unary_embeddings": [
            Entry(lambda w, op=op: op(w, *on(TABLES, UNARY, IDS)(w)), [(2, 6, 1)])
            for op in (OPS.batched_unary_embeddings, batched_unary_embeddings)
        ],
        "batched_unary_embeddings_gradient": [
            Entry(lambda g: OPS.batched_unary_embeddings_gradient(g, *on(TABLES, UNARY, IDS)(g), 6), [(2, 2, 2)])
        ],
        "jagged_dense_bmm": [
            Entry(lambda x, w: jagged_dense_bmm(x, *o(x), w, 2), [rows, (5, 3, 4)]),
            Entry(lambda x, w: OPS.jagged_dense_bmm(x, *o(x), w, None, False), [rows, (5, 3, 4)]),
            Entry(lambda x, w: OPS.jagged_dense_bmm(x, *o(x), w, 2, True), [rows, (5, 4, 3)]),
        ],
        "jagged_jagged_bmm": [
            Entry(lambda x, y, op=op: op(x, y, *o(x), 2), [rows, (9, 4)])
            for op in (OPS.jagged_jagged_bmm, jagged_jagged_bmm)
        ],
        "jagged_to_padded_dense": [
            Entry(lambda x: jagged_to_padded_dense(x, o(x), [2], 7.0), [rows]),
            Entry(lambda x: OPS.jagged_to_padded_dense(x, o(x), [2], 7.0), [rows]),
            Entry(lambda x: pack_segments(x, *on(LENGTHS)(x), 2), [(8, 3)]),
        ],
        "padded_dense_to_jagged": [
            Entry(lambda x: padded_dense_to_jagged(x, o(x), 8), [dense]),
            Entry(lambda x: OPS.padded_dense_to_jagged(x, o(x), 8), [dense]),
            Entry(lambda x: unpack_segments(x, *on(LENGTHS)(x)), [dense]),
        ],
        **{
            op.__name__: [
                Entry(lambda x, d, op=op: op(x, o(x), d), [rows, dense]),
                Entry(lambda x, d, name=op.__name__: getattr(OPS, name)(x, o(x), d), [rows, dense]),
            ]
            for op in (jagged_dense_add, jagged_dense_add_jagged, jagged_dense_mul)
        },
        "padded_jagged_product": [
            Entry(lambda x, y: OPS.padded_jagged_product(x, y, o(x), [2]), [rows, rows]),
            Entry(lambda x, y: jagged_jagged_mul(x, y, o(x)), [rows, rows]),
        ],
        "jagged_index_select": [
            Entry(lambda x: jagged_index_select(x, *on(LENGTHS, CHOSEN)(x))[0], [(8, 3)]),
            Entry(
                lambda x, p: OPS.jagged_index_select(x, p, *on(OFFSETS, CHOSEN)(x), 5, torch.int64, None)[::2],
                [(8,), (8,)],
            ),
        ],
        "jagged_index_add": [
            Entry(lambda x: jagged_index_add(x, *on(SELECTED, CHOSEN, LENGTHS)(x)), [(7, 3)]),
            Entry(lambda x: OPS.jagged_index_add(x, *on(ints(0, 2, 5, 7), CHOSEN, OFFSETS)(x), 5, 8), [(7, 3)]),
        ],
        "move_segments": [
            Entry(lambda x, y: OPS.move_segments([x, y], *on(PERMUTE, STARTS, MOVED)(x), 10), [(6,), (6, 3)]),
            Entry(lambda x: permute_1d(*on(CHOSEN, LENGTHS)(x), x)[1], [(8,)]),
            Entry(lambda x: permute_segments([x], LENGTHS.tolist(), CHOSEN.tolist())[0], [(8, 3)]),
        ],
        "collect_segments": [
            Entry(lambda x, y: OPS.collect_segments([x, y], *on(PERMUTE, STARTS, MOVED)(x), 6), [(10,), (10, 3)])
        ],
        "segment_sum": [
            Entry(lambda x: segment_sum(*o(x), x), [rows]),
            Entry(lambda x: OPS.segment_sum(*o(x), x, 1), [rows]),
        ],
        "segment_spread": [Entry(lambda x: OPS.segment_spread(*o(x), x, 9, 1), [(5, 3)])],
        "regroup_columns": [
            Entry(lambda x: permute_pooled(x, [2, 1, 3], [2, 0, 2]), [(4, 6)]),
            Entry(lambda x: OPS.regroup_columns([x], [0, 0, 2, 0, 1, 0, 2, 2, 0, 0], 1, [4]), [(3, 4)]),
        ],
        "take_pieces": [Entry(lambda x: OPS.take_pieces(x, *on(ints(1, 3, 6), ints(0, 2, 2, 4))(x), 4), [(9,)])],
        "place_pieces": [Entry(lambda x: OPS.place_pieces(x, *on(ints(1, 3, 6), ints(0, 2, 2, 4))(x), 9), [(4,)])],
        # lengths of bags of two requests of 1 and 2 items, two features: 1, 2 and 0, 1, 3, 1
        "reorder_request_values": [
            Entry(lambda x: OPS.reorder_request_values(x, *on(*_REQUESTS)(x), 3, 3, False, 8), [(8, 3)])
        ],
        "restore_request_values": [Entry(lambda x: OPS.restore_request_values(x, *on(*_REQUESTS)(x), 3, 8), [(8,)])],
        # what ops by FBGEMM's names do with tables of columns where they are traced
        "permute_tables": [Entry(lambda x: OPS.permute_tables(x, *on(ints(0, 2, 3, 6), ints(2, 0, 2))(x)), [(4, 6)])],
        "permute_tables_backward": [
            Entry(lambda x: OPS.permute_tables_backward(x, *on(ints(0, 2, 3, 6), ints(2, 0, 2))(x), 6), [(4, 8)])
        ],
        "regroup_by_permutes": [
            Entry(lambda x, y: OPS.regroup_by_permutes([x, y], *on(BY_PERMUTES)(x), [4, 1], False), [(3, 3), (3, 2)])
        ],
        "block_bucketize": [
            Entry(lambda p: block_bucketize(*on(LENGTHS, IDS, ints(1))(p), 4, weights=p).weights, [(8,)])
        ],
    }


_MIXED = next(case for case in CASES if case.name == "mixed dims")
_ALIKE = replace(_MIXED, tables=((11, 8), (6, 8), (5, 8)), features=((0, False), (1, True), (0, False)))


def batch_of(case: Case, device: torch.device) -> Inputs:
    """The batch, behind it ids that are nobody's."""
    batch = inputs(case, device)
    p = batch.per_id_weights
    return replace(
        batch,
        indices=torch.cat([batch.indices, batch.indices.new_tensor([1, -1, 99])]),
        per_id_weights=None if p is None else torch.cat([p, p.new_ones(3)]),
    )


def plain_pooled(b: Inputs, weights: Tensor, p: Tensor | None) -> Tensor:
    """`pooled_lookup` in plain torch, in the dtype of weights."""
    offsets, columns = b.offsets.tolist(), []
    for f, (table, mean) in enumerate(b.case.features):
        rows, pooled = b.tables(weights)[table], []
        for bag in range(b.case.batch):
            low, high = offsets[f * b.case.batch + bag : f * b.case.batch + bag + 2]
            bag_rows = rows[b.indices[low:high].long()]
            bag_rows = bag_rows if p is None else bag_rows * p[low:high, None]
            pooled.append(bag_rows.sum(0) / (max(high - low, 1) if mean else 1))
        columns.append(torch.stack(pooled))
    return torch.cat(columns, 1)


def plain_sequence(b: Inputs, weights: Tensor) -> Tensor:
    ends, table_of = b.offsets[:: b.case.batch].tolist(), [table for table, _ in b.case.features]
    parts = [
        b.tables(weights)[table][b.indices[low:high].long()]
        for table, low, high in zip(table_of, ends, ends[1:], strict=False)
    ]
    return torch.cat([*parts, weights.new_zeros(b.indices.shape[0] - ends[-1], b.dims[0])])


def gradient_of(value: Tensor, by: Tensor, upstream: Tensor) -> Tensor:
    return torch.autograd.grad((value * upstream).sum(), by, create_graph=True)[0]


def lookup_entries(device: torch.device) -> dict[str, list[Entry]]:
    """Ops of tables, which are fp32 at most."""
    entries: dict[str, list[Entry]] = {name: [] for name in LOOKUPS}
    for case in (_MIXED, _ALIKE):
        b, cpu = batch_of(case, device), batch_of(case, torch.device("cpu"))
        layout, columns = (b.features, b.dims, b.segments, b.pooling), sum(b.dims)
        w, p, g = b.weights.shape, b.indices.shape, (case.batch, columns)
        start = torch.randn(w, dtype=torch.float64)

        def lookup(w: Tensor, p: Tensor | None = None, b: Any = b) -> Tensor:
            return pooled_lookup(w, b.indices, b.offsets, p, b.features, b.dims, b.segments, b.pooling)

        def by_table(g: Tensor, p: Tensor | None = None, b: Any = b, layout: Any = layout) -> Tensor:
            zeros = torch.zeros_like(b.weights)
            return OPS.lookup_gradient(zeros, g, b.indices, b.offsets, p, *layout)  # type: ignore[no-any-return]

        def plain_by_table(g: Tensor, p: Tensor | None = None, b: Any = cpu, start: Tensor = start) -> Tensor:
            leaf = start.clone().requires_grad_()
            return gradient_of(plain_pooled(b, leaf, p), leaf, g)

        def by_weights(g: Tensor, w: Tensor, b: Any = b, layout: Any = layout) -> Tensor:
            return per_id_weight_gradient(g, w, b.indices, b.offsets, *layout)

        def plain_by_weights(g: Tensor, w: Tensor, b: Any = cpu) -> Tensor:
            leaf = torch.ones(b.indices.shape, dtype=w.dtype, requires_grad=True)
            return gradient_of(plain_pooled(b, w, leaf), leaf, g)

        def plain(w: Tensor, p: Tensor | None = None, b: Any = cpu) -> Tensor:
            return plain_pooled(b, w, p)

        entries["pooled_lookup"] += [Entry(lookup, [w, p], plain), Entry(lookup, [w], plain)]
        entries["lookup_gradient"] += [Entry(by_table, [g, p], plain_by_table), Entry(by_table, [g], plain_by_table)]
        entries["per_id_weight_gradient"] += [Entry(by_weights, [g, w], plain_by_weights)]
    where = (b.indices, b.offsets, b.features)
    zeros, rows = torch.zeros_like(b.weights), (b.indices.shape[0], b.dims[0])
    layout = (b.features, b.dims, b.segments, "sequence")

    def plain_rows_by_table(g: Tensor) -> Tensor:
        leaf = start.clone().requires_grad_()
        return gradient_of(plain_sequence(cpu, leaf), leaf, g)

    entries["sequence_lookup"].append(
        Entry(lambda w: sequence_lookup(w, *where, b.dims[0], b.segments), [w], lambda w: plain_sequence(cpu, w))
    )
    entries["lookup_gradient"].append(
        Entry(lambda g: OPS.lookup_gradient(zeros, g, *where[:2], None, *layout), [rows], plain_rows_by_table)
    )
    return entries


LOOKUPS = ("pooled_lookup", "sequence_lookup", "lookup_gradient", "per_id_weight_gradient")
JAGGED = tuple(jagged_entries())


def derivatives(
    run: Callable[..., Any], shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, device: torch.device
) -> list[Tensor]:
    """Values, first derivatives of a bent sum of them, and second ones, also by what the first are upstream of."""
    generator = torch.Generator().manual_seed(1)

    def leaf(shape: Sequence[int]) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype).requires_grad_()

    given = [leaf(shape) for shape in shapes]
    values = run(*given)
    values = [values] if isinstance(values, Tensor) else list(values)
    upstream = [leaf(value.shape) for value in values]
    total = sum((u * value.sin()).sum() for u, value in zip(upstream, values, strict=True))
    assert isinstance(total, Tensor)
    first = torch.autograd.grad(total, given, create_graph=True)
    again = sum((leaf(grad.shape) * grad.cos()).sum() for grad in first)
    assert isinstance(again, Tensor)
    second = torch.autograd.grad(again, [*given, *upstream], allow_unused=True, materialize_grads=True)
    return [tensor.detach() for tensor in (*values, *first, *second)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", [*JAGGED, *LOOKUPS])
def test_second_derivatives_are_those_of_plain_torch(where: torch.device, name: str) -> None:
    """`grad(lookup.pow(2).sum(), weight, create_graph=True)` had no graph: what was made of it gave a gradient of 0,
    as did products and softmaxes of jagged rows, and per-id weights."""
    for entry in jagged_entries().get(name) or lookup_entries(where)[name]:
        got = derivatives(entry.run, entry.shapes, torch.float32, where)
        expected = derivatives(entry.plain or entry.run, entry.shapes, torch.float64, torch.device("cpu"))
        for actual, want in zip(got, expected, strict=True):
            assert_close(actual.double().cpu(), want, 1e-5)


@pytest.mark.parametrize("name", JAGGED)
def test_jagged_ops_pass_gradgradcheck(name: str) -> None:
    for entry in jagged_entries()[name]:
        given = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in entry.shapes]
        assert torch.autograd.gradgradcheck(entry.run, given, fast_mode=True, check_undefined_grad=False)


def test_scaled_gradients_and_sorted_selections_are_differentiated_twice() -> None:
    rows = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    indices = ints(2, 0, 2, 3)
    assert torch.autograd.gradgradcheck(lambda rows: sorted_index_select(rows, indices), rows)
    assert torch.autograd.gradgradcheck(lambda rows: CommOpGradientScaling.apply(rows, 3), rows)


def test_every_op_is_listed() -> None:
    """A new op has its second derivative here, or is said to have no first one."""
    registered = {
        name.split("::")[1].split(".")[0] for name in torch._C._dispatch_get_all_op_names() if "shardwise::" in name
    }
    assert {*JAGGED, *LOOKUPS} | WITHOUT == registered
    followed = {
        name for name in registered if torch._C._dispatch_has_kernel_for_dispatch_key(f"shardwise::{name}", "Autograd")
    }
    assert followed == {*JAGGED, *LOOKUPS}


def test_every_function_of_autograd_is_listed() -> None:
    packages = ("kernels", "jagged", "embeddings", "fbgemm", "sharding", "inference", "models")
    for package in packages:
        path = importlib.import_module(f"shardwise.{package}").__path__
        for module in pkgutil.walk_packages(path, f"shardwise.{package}."):
            importlib.import_module(module.name)
    names = {
        f"{function.__module__.split('.')[-1]}.{function.__name__}"
        for function in torch.autograd.Function.__subclasses__()
        # those that a test or torch makes on the way have no module of ours, or another base; a canary's run in a job
        # of TorchRec's, whose lookups have no second derivative
        if function.__module__.startswith(tuple(f"shardwise.{package}." for package in packages))
    }
    assert names == set(FUNCTIONS)
    for name in FUNCTIONS.values():
        assert name in JAGGED or callable(globals()[name])


def features(weighted: bool = False, requires_grad: bool = False) -> KeyedJaggedTensor:
    weights = torch.tensor([0.5, 2.0, -1.0, 3.0, 1.0, 0.25, 1.5], requires_grad=requires_grad) if weighted else None
    return KeyedJaggedTensor(
        keys=["a", "b"], values=ints(1, 2, 1, 5, 0, 3, 3), lengths=ints(2, 0, 2, 1, 1, 1), weights=weights
    )


def bags(weighted: bool = False, pooling: PoolingType = PoolingType.SUM) -> EmbeddingBagCollection:
    tables = [
        EmbeddingBagConfig(
            name=f"t{d}", num_embeddings=6, embedding_dim=d, feature_names=[f], pooling=pooling
        )
        for d, f in ((4, "a"), (8, "b"))
    ]  # fmt: skip
    return EmbeddingBagCollection(tables=tables, is_weighted=weighted)


@pytest.mark.parametrize("kind", ["sum", "mean", "weighted", "sequence"])
def test_collections_without_an_optimizer_have_second_derivatives(kind: str) -> None:
    """`p.grad` of the squared gradient was zero, for bags and for sequences; nn.EmbeddingBag raises."""
    module: Any
    if kind == "sequence":
        module = EmbeddingCollection(
            tables=[EmbeddingConfig(name="t", num_embeddings=6, embedding_dim=4, feature_names=["a", "b"])]
        )
    else:
        module = bags(kind == "weighted", PoolingType.MEAN if kind == "mean" else PoolingType.SUM)
    kjt = features(kind == "weighted", True)
    tables = list(module.parameters())
    output = module(kjt)
    out = torch.cat([output["a"].values(), output["b"].values()]) if kind == "sequence" else output.values()
    p = [kjt.weights()] if kind == "weighted" else []
    by = torch.autograd.grad(out.sin().sum(), [*tables, *p], create_graph=True)
    torch.stack([grad.pow(3).sum() for grad in by]).sum().backward()
    leaves = [table.detach().double().requires_grad_() for table in tables]
    weights = [weight.detach().double().requires_grad_() for weight in p]
    ids, lengths = kjt.values(), kjt.lengths().tolist()
    rows = [leaves[min(i // 4, len(leaves) - 1)][ids[i]] for i in range(7)]
    if kind == "weighted":
        rows = [row * weights[0][i] for i, row in enumerate(rows)]
    if kind == "sequence":
        plain = torch.stack(rows)
    else:
        taken, pooled = iter(rows), []
        for bag, count in enumerate(lengths):
            total = sum((next(taken) for _ in range(count)), torch.zeros(4 if bag < 3 else 8).double())
            pooled.append(total / max(count, 1) if kind == "mean" else total)
        plain = torch.cat([torch.stack(pooled[:3]), torch.stack(pooled[3:])], 1)
    by = torch.autograd.grad(plain.sin().sum(), [*leaves, *weights], create_graph=True)
    torch.stack([grad.pow(3).sum() for grad in by]).sum().backward()
    for got, want in zip([*tables, *p], [*leaves, *weights], strict=True):
        assert got.grad is not None and want.grad is not None and want.grad.abs().max() > 0.1
        assert_close(got.grad.double(), want.grad, 1e-5)


def test_lookups_of_the_optimizer_none_are_not_differentiated_twice() -> None:
    """FBGEMM's module of tables whose gradient is sparse."""
    spec = (5, 4, EmbeddingLocation.HOST, ComputeDevice.CPU)
    module = SplitTableBatchedEmbeddingBagsCodegen([spec], optimizer=OptimType.NONE)
    out = module(ints(1, 3), ints(0, 2))
    (by,) = torch.autograd.grad(out.pow(2).sum(), module.weights_host, create_graph=True)
    with pytest.raises(RuntimeError, match=r"lookup with a sparse gradient: a second derivative .* not implemented"):
        by.to_dense().sum().backward()


def test_a_fused_lookup_of_fbgemm_is_not_differentiated_twice() -> None:
    """Its parameters are reached by the backward, and have no gradient."""
    spec = (5, 4, EmbeddingLocation.HOST, ComputeDevice.CPU)
    module, weights = SplitTableBatchedEmbeddingBagsCodegen([spec]), torch.ones(2, requires_grad=True)
    out = module(ints(1, 3), ints(0, 2), weights)
    (by,) = torch.autograd.grad(out.pow(2).sum(), weights, create_graph=True)
    with pytest.raises(RuntimeError, match=r"lookup with a fused optimizer: a second derivative .* not implemented"):
        by.sum().backward()
    assert all(param.grad is None for param in module.parameters())


def test_a_fused_lookup_is_not_differentiated_twice() -> None:
    """The gradient of per-id weights had no graph under create_graph, and a penalty on it did nothing."""
    module, kjt = bags(weighted=True), features(True, True)
    apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.5})
    before = [table.detach().clone() for table in module.parameters()]
    (by,) = torch.autograd.grad(module(kjt).values().pow(2).sum(), kjt.weights(), create_graph=True)
    assert all(not torch.equal(copy, table) for copy, table in zip(before, module.parameters(), strict=True))
    assert not any(table.requires_grad and table.grad_fn for table in module.parameters())
    with pytest.raises(RuntimeError, match=r"lookup with a fused optimizer: a second derivative .* not implemented"):
        by.pow(2).sum().backward()
    dense = torch.ones(12, requires_grad=True)
    (by,) = torch.autograd.grad((module(kjt).values().detach() @ dense).sin().sum(), dense, create_graph=True)
    by.pow(2).sum().backward()
    assert dense.grad is not None and dense.grad.abs().max() > 0


def _twice() -> list[str]:
    """What the second derivatives of a sharded collection, and of an exchange, said."""
    messages: list[str] = []
    world: Any = torch.distributed.group.WORLD
    env = ShardingEnv.from_process_group(world)
    module, kjt = bags(weighted=True), features(True, True)
    plan = construct_module_sharding_plan(module, {"t4": table_wise(rank=0), "t8": table_wise(rank=1)})
    sharded = EmbeddingBagCollectionSharder().shard(module, plan, env, torch.device("cpu"))
    columns = torch.randn(4, 3, requires_grad=True)
    for out, by in (
        (sharded(kjt).wait().values(), kjt.weights()),
        (alltoall_pooled(columns, [2, 2], [3, 3]).wait(), columns),
    ):
        (grad,) = torch.autograd.grad(out.pow(2).sum(), by, create_graph=True)
        try:
            grad.pow(2).sum().backward()
        except RuntimeError as error:
            messages.append(str(error))
    return messages


@pytest.mark.ranks
def test_sharded_lookups_and_exchanges_are_not_differentiated_twice() -> None:
    for messages in run_ranks(2, _twice):
        assert len(messages) == 2 and all("second derivative" in text for text in messages)
        assert messages[0].startswith("lookup in sharded tables:") and messages[1].startswith("exchange of comm_ops:")


def test_copies_for_all_ranks_are_differentiated_twice() -> None:
    given = torch.randn(3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x: copies(x, 2), [given])


@pytest.mark.parametrize("checked", [False, True])
def test_a_cut_gradient_is_differentiated_where_it_is_not_cut(checked: bool) -> None:
    given = torch.tensor([0.1, -0.4, 2.0, -3.0], requires_grad=True)
    cubes = CutGradient.apply(given, 1.0, checked).pow(3).sum()  # type: ignore[no-untyped-call]
    (grad,) = torch.autograd.grad(cubes, [given], create_graph=True)
    torch.testing.assert_close(grad, (3 * given.detach() ** 2).clamp(max=1))
    (twice,) = torch.autograd.grad(grad.sum(), [given])
    # what comes back through it a second time is cut as well: -2.4 is -1
    torch.testing.assert_close(twice, torch.tensor([0.6, -1.0, 0.0, 0.0]))
