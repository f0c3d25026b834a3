"""The shapes that decide on a GPU, and how they are cut to its memory; batches of them with and without values.

Letters as in the kernels: T tables, R rows, D dim, B samples, L ids a bag, N ids. Tables of a shape take the same
bytes on a card of 80 GB as on a larger one, so that the two are compared on the same work.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardwise import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    KeyedJaggedTensor,
    RowWiseAdagrad,
    apply_optimizer_in_backward,
)
from shardwise.embeddings.tables.table_layout import TableShape, lay_out
from shardwise.kernels import RULES, Feature, check_ids, flatten_segments, new_guard, pack_features
from shardwise.kernels.features import ROWS
from shardwise.perf.suite.batches import (
    Batch,
    Optimizer,
    of_workload,
    optimizer,
)
from shardwise.perf.suite.workloads import (
    DCNV2,
    FBGEMM_DEFAULT,
    PRODUCTION,
    Workload,
    equal,
    fitted,
    tiny,
)

RULE = "rowwise_adagrad"
# of tables; states, gradients, inputs and scratch of a backward take as much again at most
TABLES_BYTES = 30 << 30
# of a card's memory, where that is less
SHARE = 0.4
# what the inputs of a shape that are timed in turn touch together: several times the L2 of an H200
ROTATED_BYTES = 256 << 20
MOST_INPUTS = 8

Call = Callable[[], object]


@dataclass(frozen=True)
class Shape:
    """A workload with a short name."""

    name: str
    about: str
    workload: Workload

    @property
    def ids(self) -> int:
        """N of a batch."""
        return int(sum(self.workload.lengths) * self.workload.batch)

    @property
    def inputs(self) -> int:
        """Distinct batches that a measurement rotates through; two in a proof."""
        if self.ids < 1000:
            return 2
        touched = self.ids * self.workload.dim * self.workload.dtype.itemsize
        return max(2, min(MOST_INPUTS, -(-ROTATED_BYTES // touched)))

    @property
    def scaled(self) -> str:
        """What was cut, "" if nothing was."""
        cut = self.workload.cut
        return f"largest tables divided by {cut}" if cut > 1 else ""


SHAPES: Mapping[str, Shape] = {
    shape.name: shape
    for shape in (
        Shape("A", "32 tables of 1M rows, 20 ids a bag, batch 8192", PRODUCTION),
        Shape("A fp16", "A with tables of fp16", replace(PRODUCTION, name="production fp16", dtype=torch.float16)),
        Shape("C", "MLPerf DCNv2 multi-hot on one GPU, batch 8192", DCNV2),
        Shape("FBGEMM", "FBGEMM's default: 32 tables of 1e5 rows, 20 ids a bag, batch 512", FBGEMM_DEFAULT),
        Shape("L=1", "26 tables of 1M rows, one id a bag, batch 8192", equal("26 x 8192", 26, 1 << 20, 128, 8192, 1)),
        Shape("64 x 26", "26 tables of 1e5 rows, one id a bag, batch 64", equal("64 x 26", 26, 100_000, 128, 64, 1)),
    )
}
PROFILED = tuple(SHAPES)


def sized(shape: Shape, memory_bytes: int, *, small: bool = False) -> Shape:
    """The shape with its largest tables halved until all of them fit; a tiny one of its kind if `small`."""
    if small:
        return replace(shape, workload=tiny(shape.workload))
    most = min(TABLES_BYTES, int(memory_bytes * SHARE))
    return replace(shape, workload=fitted(shape.workload, most, float(shape.workload.dtype.itemsize)))


def checked(shape: Shape) -> Shape:
    """The same batch over tables of few rows, many ids of a row: what bits are compared on."""
    rows = tuple(min(rows, 5000) for rows in shape.workload.rows)
    return replace(shape, workload=replace(shape.workload, rows=rows))


def memory_of(device: str) -> int:
    """Bytes of the card, or what a dry run may use."""
    return int(torch.cuda.get_device_properties(0).total_memory) if device == "cuda" else 1 << 30


def batches_of(shape: Shape, device: str, inputs: int | None = None) -> list[Batch]:
    """Distinct batches over one set of tables."""
    return of_workload(shape.workload, device, inputs or shape.inputs)


def calls_of(batches: list[Batch], call: str) -> list[Call]:
    """One call a batch: "forward" a lookup, "backward" the fused update, "step" ids' check, lookup and update.

    And "module" a forward and backward of a collection with such tables.
    """
    if call == "forward":
        return [batch.lookup for batch in batches]
    if call == "module":
        model = _collection(batches[0])
        return [partial(_trained, model, _features_of(batch), batch.grad) for batch in batches]
    state = optimizer(RULE, batches[0])
    return [partial(state.update if call == "backward" else partial(_step, state), batch) for batch in batches]


def _step(state: Optimizer, batch: Batch) -> Tensor:
    names = ["feature"] * len(batch.dims)
    check_ids(batch.indices, batch.offsets, batch.features, state.guard, names=names)
    pooled = batch.lookup()
    state.update(batch)
    return pooled


def results_of(batch: Batch, call: str) -> list[Tensor]:
    """What a call gives on tables and states of its own."""
    if call == "forward":
        return [batch.lookup()]
    if call == "module":
        torch.manual_seed(0)
        model = _collection(batch)
        pooled = _trained(model, _features_of(batch), batch.grad)
        return [pooled, *(tensor.clone() for tensor in model.state_dict().values())]
    own = replace(batch, weights=batch.weights.clone())
    state = optimizer(RULE, own)
    if call == "backward":
        state.update(own)
        return [own.weights, *state.states]
    return [_step(state, own), own.weights, *state.states]


def _collection(batch: Batch) -> EmbeddingBagCollection:
    """Tables as the batch's, with values of their own, trained by RULE."""
    tables = [
        EmbeddingBagConfig(name=f"t{t}", num_embeddings=rows, embedding_dim=dim, feature_names=[f"f{t}"])
        for t, (rows, dim) in enumerate(zip(batch.features[:, ROWS].tolist(), batch.dims, strict=True))
    ]
    model = EmbeddingBagCollection(tables=tables, device=batch.weights.device)
    apply_optimizer_in_backward(RowWiseAdagrad, model.parameters(), {"lr": 0.01})
    return model


def _features_of(batch: Batch) -> KeyedJaggedTensor:
    keys = [f"f{t}" for t in range(len(batch.dims))]
    features = KeyedJaggedTensor(keys, batch.indices, offsets=batch.offsets, lengths=batch.offsets.diff())
    # known on the host, as of a batch that a loader made
    features.length_per_key()
    return features


def _trained(model: EmbeddingBagCollection, features: KeyedJaggedTensor, grad: Tensor) -> Tensor:
    pooled: Tensor = model(features).values()
    torch.autograd.backward(pooled, grad)
    return pooled.detach()


def hollow(shape: Shape, place: Callable[[Tensor], Tensor], rule: str = RULE) -> tuple[Batch, Optimizer]:
    """A batch of the shape and its optimizer without values: `place` takes meta tensors to a device not there."""
    work = shape.workload
    bases, first_rows, segments, elements = lay_out(
        [TableShape(str(t), rows, work.dim) for t, rows in enumerate(work.rows)]
    )
    tables, bags = len(work.rows), len(work.rows) * work.batch
    features = [Feature(bases[t], work.rows[t], work.dim, first_rows[t], False) for t in range(tables)]

    def empty(count: int | tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return place(torch.empty(count, dtype=dtype, device="meta"))

    batch = Batch(
        weights=empty(elements, work.dtype), indices=empty(shape.ids, torch.int64),
        offsets=empty(bags + 1, torch.int64), per_id_weights=None,
        features=place(pack_features(features).to("meta")), dims=[work.dim] * tables,
        segments=flatten_segments(segments), pooling="sum",
        grad=empty((work.batch, tables * work.dim), torch.float32),
    )  # fmt: skip
    chosen = RULES[rule]
    sizes = [max(batch.segments[2::4]) if kind == "row" else elements for kind in chosen.kinds]
    hyper: Any = empty(len(chosen.hyper) + 1, torch.float64)
    state = Optimizer(
        rule, [empty(size, torch.float32) for size in sizes], empty(1, torch.int64), hyper,
        place(new_guard(torch.device("cpu")).to("meta")),
    )  # fmt: skip
    return batch, state


def hollow_call(batch: Batch, state: Optimizer, call: str) -> None:
    """What `calls_of` calls, once, on a batch without values."""
    if call == "forward":
        batch.lookup()
    elif call == "backward":
        state.update(batch)
    else:
        _step(state, batch)
