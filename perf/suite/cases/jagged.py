"""Cases of the suite: the jagged ops, as jagged_ops.py calls them, and those that FBGEMM has on GPUs only.

Sizes: keys x bags of each; short bags have 0 to 6 values, long ones 0 to 192. M is the longest bag, D the columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from shardwise import kernels
from shardwise.kernels import plan_regroup
from shardwise.kernels.jagged import (
    bmm as jagged_bmm,
    bucketize,
    elementwise,
    index_add,
    index_select,
    offsets as jagged,
    padded,
    permute,
    regroup as regrouping,
    softmax,
    unary_embeddings,
    unique,
    vector_product,
)
from shardwise.kernels.jagged.segments import move_segments_ref
from shardwise.perf.suite.case import (
    Call,
    Case,
    Ready,
    Setting,
)
from shardwise.perf.suite.cases.lookup import (
    CUDA,
    EVERY,
    FULL,
    INPUTS,
)
from shardwise.perf.suite.declared_jagged import (
    block_bucketize_bytes,
    jagged_index_select_bytes,
    move_segments_bytes,
    segment_sum_bytes,
    to_jagged_bytes,
    to_padded_bytes,
)
from shardwise.perf.suite.libraries import Library, fbgemm
from shardwise.perf.suite.operations import jagged_ops
from shardwise.perf.suite.operations.inputs import (
    IDS,
    batch,
    columns,
    dims,
    rows_of,
)
from shardwise.perf.suite.operations.jagged_ops import (
    BUCKETS,
    TOLERANCE,
    D,
    M,
    _op,
)
from shardwise.perf.suite.operations.operation import (
    Operation,
    Size,
    contents,
    difference,
)
from shardwise.perf.suite.peers import peer_calls

# what is timed, on a CPU and on a GPU, and what the references, some of them loops over bags, are given
TIMED = {"cpu": Size(26, 1024), "cuda": Size(26, 8192)}
CHECKED, SMALL = Size(3, 32), Size(3, 4)
# the longest of long bags, of which a key has so many times fewer
LONG, FEWER = 192, 32
# bins of a calibration and values of its feature
BINS, SEGMENTS = 100, 42

_NO_OP = "FBGEMM has no such op"

OURS = Library("shardwise", [kernels])


def _reference() -> Library:
    """The references by the names and with the arguments of the ops."""

    complete_cumsum = jagged.complete_cumsum_ref

    def permute_1d(order: Tensor, lengths: Tensor, values: Tensor, weights: Tensor | None = None) -> Any:
        moved = lengths[order.long()]
        ends = complete_cumsum(lengths), complete_cumsum(moved)
        given = [values] if weights is None else [values, weights]
        parts = move_segments_ref(given, order, *ends)
        return moved, parts[0], parts[1] if len(parts) > 1 else None

    def permute_2d(order: Tensor, lengths: Tensor, values: Tensor, weights: Tensor | None = None) -> Any:
        rows, bags = order.long()[:, None], lengths.shape[1]
        flat = (rows * bags + torch.arange(bags, device=order.device)).flatten()
        moved, *parts = permute_1d(flat, lengths.flatten(), values, weights)
        return moved.view(-1, bags), *parts

    def pack_segments(values: Tensor, lengths: Tensor, longest: int) -> Tensor:
        return padded.jagged_to_padded_dense_ref(values, [complete_cumsum(lengths)], [longest])

    def unpack_segments(packed: Tensor, lengths: Tensor) -> Tensor:
        return padded.padded_dense_to_jagged_ref(packed, [complete_cumsum(lengths)], int(lengths.sum()))

    def segment_sum(offsets: Tensor, values: Tensor, *, batch_size: int = 1) -> Tensor:
        return jagged.segment_sum_ref(offsets, values, batch_size)

    def padded_dense_to_jagged(dense: Tensor, offsets: Sequence[Tensor], total: int | None = None) -> Tensor:
        return padded.padded_dense_to_jagged_ref(dense, offsets, int(offsets[-1][-1]) if total is None else total)

    def permute_segments(tensors: Sequence[Tensor], sizes: Sequence[int], order: Sequence[int]) -> list[Tensor]:
        return [torch.cat([torch.split(x, list(sizes))[s] for s in order]) for x in tensors]

    return Library("the reference", [SimpleNamespace(
        complete_cumsum=complete_cumsum, permute_1d=permute_1d, permute_2d=permute_2d, pack_segments=pack_segments,
        unpack_segments=unpack_segments, segment_sum=segment_sum, padded_dense_to_jagged=padded_dense_to_jagged,
        permute_segments=permute_segments, block_bucketize=bucketize.block_bucketize_ref,
        expand_into_jagged_permute=permute.expand_into_jagged_permute_ref, invert_permute=jagged.invert_permute_ref,
        offsets_range=jagged.offsets_range_ref, jagged_to_padded_dense=padded.jagged_to_padded_dense_ref,
        jagged_dense_add=elementwise.jagged_dense_add_ref,
        jagged_dense_add_jagged=elementwise.jagged_dense_add_jagged_ref,
        jagged_dense_mul=elementwise.jagged_dense_mul_ref, jagged_dense_bmm=jagged_bmm.jagged_dense_bmm_ref,
        jagged_jagged_bmm=jagged_bmm.jagged_jagged_bmm_ref, jagged_softmax=softmax.jagged_softmax_ref,
        jagged_vector_product=vector_product.jagged_vector_product_ref,
        jagged_index_select=index_select.jagged_index_select_ref, jagged_index_add=index_add.jagged_index_add_ref,
        keyed_jagged_index_select=index_select.keyed_jagged_index_select_ref,
        batched_unary_embeddings=unary_embeddings.batched_unary_embeddings_ref, jagged_unique=unique.jagged_unique_ref,
    ), _torch_functions()])  # fmt: skip


def _torch_functions() -> SimpleNamespace:
    """The ops in plain torch, those that have a plain way, by the names and with the arguments of ours."""

    def offsets_range(offsets: Tensor, size: int) -> Tensor:
        lengths = torch.diff(offsets, append=offsets.new_full((1,), size))
        return torch.arange(size, device=offsets.device) - offsets.repeat_interleave(lengths, output_size=size)

    def permute_pooled(pooled: Tensor, widths: Sequence[int], order: Sequence[int]) -> Tensor:
        parts = torch.split(pooled, list(widths), 1)
        return torch.cat([parts[i] for i in order], 1)

    def unique_ids(ids: Tensor) -> tuple[Tensor, Tensor, None]:
        return *torch.unique(ids, return_inverse=True), None

    def regroup(tensors: Sequence[Tensor], plan: Any) -> list[Tensor]:
        return regrouping.regroup_ref(tensors, plan.pieces)

    def invert_permute(order: Tensor) -> Tensor:
        places = torch.arange(order.shape[0], dtype=order.dtype, device=order.device)
        return torch.empty_like(order).scatter_(0, order.long(), places)

    return SimpleNamespace(
        complete_cumsum=lambda lengths: torch.nn.functional.pad(lengths.cumsum(0), (1, 0)),
        offsets_to_lengths=torch.diff, jagged_jagged_mul=lambda x, y, offsets: x * y, offsets_range=offsets_range,
        permute_pooled=permute_pooled, unique_ids=unique_ids, regroup=regroup, invert_permute=invert_permute,
    )  # fmt: skip


TORCH = Library("torch", [_torch_functions()])


def _long(size: Size) -> tuple[Tensor, Tensor, Tensor]:
    """Lengths [F * B / FEWER], offsets and ids of long bags, about as many ids as the short ones have."""
    g = torch.Generator().manual_seed(7)
    lengths = torch.randint(0, LONG + 1, (size.keys * max(1, size.batch // FEWER),), generator=g)
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    return lengths, offsets, torch.randint(0, IDS, (int(offsets[-1]),), generator=g)


def _float_rows(rows: int) -> Tensor:
    return torch.randn(rows, D, generator=torch.Generator().manual_seed(8))


def _order(size: Size) -> Tensor:
    return torch.randperm(size.keys, generator=torch.Generator().manual_seed(9)).int()


def _none(k: Any, *inputs: Any) -> Any:
    raise NotImplementedError(_NO_OP)


def _long_segments(size: Size) -> list[Any]:
    lengths, _, ids = _long(size)
    return [_order(size), lengths.view(size.keys, -1), ids, None]


def _long_rows(size: Size) -> list[Any]:
    _, offsets, ids = _long(size)
    return [offsets, _float_rows(len(ids))]


def _long_padded(size: Size) -> list[Any]:
    offsets, rows = _long_rows(size)
    return [rows, [offsets], [LONG], 0.0]


def _long_blocks(size: Size) -> list[Any]:
    lengths, _, ids = _long(size)
    return [lengths, ids, torch.full((size.keys,), -(-IDS // BUCKETS))]


def _added(size: Size) -> list[Any]:
    b, bags = batch(size), size.keys * size.batch
    chosen = torch.randint(0, bags, (bags,), generator=torch.Generator().manual_seed(11))
    added, total = b.lengths[chosen], int(b.lengths.sum())
    return [_float_rows(int(added.sum())), added, chosen, b.lengths, total]


def _keyed(size: Size) -> list[Any]:
    """Half of the samples, in some order."""
    order = torch.randperm(size.batch, generator=torch.Generator().manual_seed(10))
    b, samples = batch(size), order[: -(-size.batch // 2)]
    total = int(b.lengths.view(*size)[:, samples].sum())
    return [b.values, b.lengths, b.offsets, samples, size.batch, None, total]


def _segments(size: Size) -> list[Any]:
    counts = batch(size).lengths.view(*size).sum(1).tolist()
    return [[batch(size).values, batch(size).weights], counts, _order(size).tolist()]


def _grouped(size: Size) -> list[Any]:
    names = [[f"{letter}{f}" for f in range(size.keys)] for letter in "fg"]
    groups = [[name for listed in names for name in listed[g::4]] for g in range(min(4, size.keys))]
    return [[columns(size, 0), columns(size, 1)], plan_regroup(names, [dims(size)] * 2, groups)]


def _logits(size: Size) -> list[Any]:
    g = torch.Generator().manual_seed(12)
    count = size.keys * size.batch
    values = torch.randint(0, 2, (count,), generator=g)
    numbers = torch.arange(BINS * (SEGMENTS + 1), dtype=torch.float64)
    segments = torch.randint(0, SEGMENTS, (int(values.sum()),), generator=g)
    return [torch.randn(count, generator=g), segments, values, SEGMENTS, numbers * 3, numbers]


def _calibrate(k: Any, *inputs: Any) -> Any:
    return k.histogram_binning_calibration_by_feature(*inputs, **_WEIGHTS, lower_bound=0.0, upper_bound=1.0)


def _calibrate_generic(k: Any, *inputs: Any) -> Any:
    return k.generic_histogram_binning_calibration_by_feature(*inputs, **_WEIGHTS)


_WEIGHTS = {"positive_weight": 0.4, "bin_ctr_in_use_after": 600, "bin_ctr_weight_value": 0.9995}
_OPERATIONS = [
    *jagged_ops.OPERATIONS,
    # work is divided differently where bags are long
    *_op("permute_2d, long bags", _long_segments, "permute_2D_sparse_data"),
    *_op("jagged_to_padded_dense, rows, long bags", _long_padded),
    # FBGEMM adds up integers and numbers, not rows
    *_op("segment_sum, rows", lambda size: [batch(size).offsets, rows_of(size, D)], _none),
    *_op("segment_sum, rows, long bags", _long_rows, _none),
    *_op(
        "block_bucketize, long bags", _long_blocks,
        lambda k, lengths, ids, sizes: k.block_bucketize_sparse_features(
            lengths, ids, False, False, sizes, BUCKETS
        ),
        lambda k, *a: k.block_bucketize(*a, BUCKETS),
    ),
    # jagged_ops.py leaves these out, because FBGEMM has none or none on the CPU
    *_op("offsets_to_lengths", lambda size: [batch(size).offsets], _none),
    *_op("unpack_segments", lambda size: [jagged_ops._random(size, M, D), batch(size).lengths], _none),
    *_op(
        "jagged_jagged_mul", lambda size: [rows_of(size, D), rows_of(size, D).flip(1), [batch(size).offsets]], _none
    ),
    *_op(
        "jagged_index_add", _added,
        lambda k, values, added, chosen, lengths, total: k.jagged_index_add_2d_forward_v2(
            values, chosen, added.cumsum(0), lengths.cumsum(0), total, len(values)
        ),
        lambda k, values, added, chosen, lengths, total: (
            k.jagged_index_add(values, added, chosen, lengths, num_rows=total)
            if k is OURS else k.jagged_index_add(values, added, chosen, lengths)
        ),
    ),
    *_op(
        "keyed_jagged_index_select", _keyed,
        lambda k, *a: list(k.keyed_jagged_index_select_dim1(*a)),
        lambda k, *a: (
            k.keyed_jagged_index_select(*a[:-1], selected_lengths_sum=a[-1])
            if k is OURS else k.keyed_jagged_index_select(*a[:-1])
        ),
    ),
    *_op("permute_segments", _segments, _none),
    *_op("regroup", _grouped, _none),
    *_op("unique_ids", lambda size: [batch(size).values % 10_000], _none),
    *_op(
        "jagged_unique", lambda size: [batch(size).values % 10_000, batch(size).offsets, [10_000] * size.keys], _none
    ),
    # a reference of these is not a function of the ops' arguments
    *_op("histogram_binning_calibration_by_feature", lambda size: [*_logits(size), BINS], _calibrate, _calibrate),
    *_op(
        "generic_histogram_binning_calibration_by_feature",
        lambda size: [*_logits(size), torch.linspace(0, 1, BINS + 1, dtype=torch.float64)[1:-1].contiguous()],
        _calibrate_generic, _calibrate_generic,
    ),
]  # fmt: skip


def _nbytes(tree: Any) -> int:
    return sum(leaf.nbytes for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor))


def _declared(name: str, state: Sequence[Any], out: Any) -> tuple[float, str]:
    """The bytes that the op's module declares, or its tensors in and out, and what they count."""
    op = "" if name.endswith(_BOTH_WAYS) else name.split(",")[0]
    if op in ("permute_1d", "permute_2d"):
        given = [x for x in state[2:4] if x is not None]
        return move_segments_bytes(given, out[1].shape[0]).bytes_moved, "values: each once each way, no search"
    if op == "segment_sum":
        return segment_sum_bytes(state[0], state[1]).bytes_moved, "values and offsets once, a sum for each segment"
    if op == "jagged_to_padded_dense":
        return to_padded_bytes(state[0], state[1], state[2]).bytes_moved, "rows in bags once, all of the result once"
    if op == "padded_dense_to_jagged":
        total = out.shape[0]
        return to_jagged_bytes(state[0], state[1], total).bytes_moved, "rows that are kept once each way, no search"
    if op == "jagged_index_select":
        offsets = torch.nn.functional.pad(state[1].cumsum(0), (1, 0))
        moved = jagged_index_select_bytes(state[0], offsets, state[2], state[1].shape[0]).bytes_moved
        return moved, "selected rows once each way, no search"
    if op == "block_bucketize":
        asked = out.positions is not None, out.unbucketize_permute is not None
        moved = block_bucketize_bytes(state[0], state[1], BUCKETS, out.weights, *asked).bytes_moved
        return moved, "ids there and back by way of their bucket; sorts and sums are left out"
    return _nbytes(state) + _nbytes(out), "tensors: every input and every output once"


# ops that wait for the device, because the host must know how large a result is
_WAITS = (
    "permute_1d", "permute_2d", "jagged_index_select", "unpack_segments", "unique_ids", "jagged_unique",
    "block_bucketize", "padded_dense_to_jagged",
)  # fmt: skip


def moved_to(tree: Any, device: str) -> Any:
    """The tensors of a state as others on the device, which want gradients where they did."""

    def move(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return leaf.detach().clone().to(device).requires_grad_(leaf.requires_grad)

    return pytree.tree_map(move, tree)


def _same(operation: Operation, a: Any, b: Any, side: str) -> None:
    def on_host(result: Any) -> Any:
        return pytree.tree_map_only(Tensor, lambda x: x.detach().cpu(), contents(operation.read(result)))

    unlike = difference(on_host(a), on_host(b), max(operation.tolerance, TOLERANCE))
    assert not unlike, f"{operation.name}, {side}: {unlike}"


def _make(setting: Setting, operation: Operation) -> Ready:
    size = SMALL if setting.small else TIMED[setting.device]
    made = operation.make(OURS, size)
    states = [moved_to(made, setting.device) for _ in range(INPUTS)]

    def of_fbgemm() -> Sequence[Call]:
        fbgemm()
        return _calls(Library("FBGEMM", [torch.ops.fbgemm], peer=True))

    def _calls(library: Library) -> Sequence[Call]:
        return [partial(operation.call, library, state) for state in states]

    peers, trouble = peer_calls(setting, {"fbgemm": of_fbgemm, "torch": lambda: _calls(TORCH)})
    # few have a plain form in torch, and some none in FBGEMM
    trouble = {peer: why for peer, why in trouble.items() if peer != "no torch" and _NO_OP not in str(why)}

    def check() -> None:
        if not operation.name.endswith("calibration_by_feature") and not operation.name.startswith("histogram"):
            some = moved_to(operation.make(OURS, CHECKED), setting.device)
            _same(operation, operation.call(OURS, some), operation.call(_reference(), some), "the reference")
        result = operation.call(OURS, states[0])
        if setting.device != "cpu":
            _same(operation, result, operation.call(OURS, moved_to(made, "cpu")), "the CPU")
        for name, calls in peers.items():
            _same(operation, result, calls[0](), name)

    moved, floor = _declared(operation.name, states[0], operation.call(OURS, states[0]))
    waits = operation.name.split(",")[0] in _WAITS
    return Ready(_calls(OURS), check, moved, floor, peers, graph=not waits, notes={"size": str(size), **trouble})


_BOTH_WAYS = "forward and backward"
# options of an op that change little, and gradients: not in the short suites
_FULL = (", sequence", ", positions", ", weighted", "bags of bags", _BOTH_WAYS)

# and not on a CPU what has a sibling there that does about the same
_SIBLINGS = (
    "permute_1d", "offsets_to_lengths", "jagged_to_padded_dense, ids", "jagged_to_padded_dense, rows, long bags",
    "padded_dense_to_jagged", "jagged_dense_add_jagged", "jagged_dense_mul", "jagged_jagged_mul",
    "jagged_jagged_bmm", "permute_segments", "histogram_binning_calibration_by_feature",
    "generic_histogram_binning_calibration_by_feature",
)  # fmt: skip


def _suites(name: str) -> frozenset[str]:
    if any(part in name for part in _FULL):
        return FULL
    return CUDA if name in _SIBLINGS else EVERY


CASES: Sequence[Case] = tuple(
    Case(operation.name, "jagged", partial(_make, operation=operation), _suites(operation.name))
    for operation in _OPERATIONS
)  # fmt: skip
