"""Steps of one process that are counted: what a step is, and how it is made on a device.

Shapes: T tables of R rows x D columns, B samples, bags of 0 to 64 ids. Rows are cut: no count depends on them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shardwise import (
    DataType,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    KeyedTensor,
    RowWiseAdagrad,
    apply_optimizer_in_backward,
    in_backward_optimizer_filter,
)
from shardwise.inference import quantize_embeddings
from shardwise.models import DLRM, DLRMTrain
from shardwise.perf.suite.case import Call
from shardwise.perf.suite.workloads import EBC, draw

ROWS = 1000
SHAPE = replace(EBC[128], name="26 tables, batch 64", rows=tuple(min(rows, ROWS) for rows in EBC[128].rows))
KEYS = [f"f{t}" for t in range(len(SHAPE.rows))]
DENSE = 13

# prepares the call of a turn: what it works on is made here and not counted
Prepare = Callable[[int], Call]


@dataclass(frozen=True)
class Step:
    """A step by its name; `make` sets it up on a device.

    Without `cuda` the path that CUDA takes is not counted: it needs more of CUDA than tensors.
    """

    name: str
    make: Callable[[torch.device], Prepare]
    cuda: bool = True


def batch_of(turn: int, device: torch.device, *, weighted: bool = False) -> KeyedJaggedTensor:
    """A batch that nothing was asked of: the ids are those of the turn, the lengths the same in each."""
    ids, lengths = draw(SHAPE, 0)
    counts = lengths.view(len(KEYS), -1).sum(1)
    ids = (ids + turn) % torch.repeat_interleave(torch.tensor(SHAPE.rows), counts, output_size=len(ids))
    weights = torch.full(ids.shape, 0.5).to(device) if weighted else None
    return KeyedJaggedTensor(keys=KEYS, values=ids.to(device), lengths=lengths.to(device), weights=weights)


def tables_of(kind: Any, **options: Any) -> list[Any]:
    """Configs of the tables."""
    return [
        kind(name=f"t{t}", num_embeddings=rows, embedding_dim=SHAPE.dim, feature_names=[KEYS[t]], **options)
        for t, rows in enumerate(SHAPE.rows)
    ]


def collection(device: torch.device, **options: Any) -> EmbeddingBagCollection:
    """The pooled collection without an optimizer."""
    weighted = options.pop("is_weighted", False)
    return EmbeddingBagCollection(tables=tables_of(EmbeddingBagConfig, **options), device=device, is_weighted=weighted)


def bag_step(device: torch.device, *, optimizer: type[torch.optim.Optimizer], **options: Any) -> Prepare:
    """Forward, and the backward that updates the tables."""
    model = collection(device, **options)
    apply_optimizer_in_backward(optimizer, model.parameters(), {"lr": 0.01})
    grad = torch.full((SHAPE.batch, SHAPE.dim * len(KEYS)), 0.1).to(device)

    def prepare(turn: int) -> Call:
        batch = batch_of(turn, device, weighted=options.get("is_weighted", False))
        return lambda: model(batch).values().backward(grad)

    return prepare


def quantized(device: torch.device) -> Any:
    """The pooled collection in rows of 8 bits."""
    return quantize_embeddings(nn.Sequential(collection(device)), torch.int8, inplace=True)


def forward(device: torch.device, *, build: Callable[[torch.device], Any]) -> Prepare:
    """A lookup without gradients."""
    model = build(device)

    def prepare(turn: int) -> Call:
        batch = batch_of(turn, device)

        def call() -> Tensor:
            with torch.no_grad():
                return model(batch).values()  # type: ignore[no-any-return]

        return call

    return prepare


def sequence_step(device: torch.device) -> Prepare:
    """Rows of ids, and the backward that updates them."""
    model = EmbeddingCollection(tables=tables_of(EmbeddingConfig), device=device)
    apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.01})

    def prepare(turn: int) -> Call:
        batch = batch_of(turn, device)
        ids = batch.values().shape[0]
        grad = torch.full((ids, SHAPE.dim), 0.1).to(device)
        lengths = [jt.values().shape[0] for jt in batch.to_dict().values()]
        grads = list(torch.split(grad, lengths))
        given = batch_of(turn, device)

        def call() -> None:
            looked_up = model(given)
            torch.autograd.backward([looked_up[key].values() for key in KEYS], grads)

        return call

    return prepare


def dlrm(device: torch.device) -> tuple[DLRMTrain, torch.optim.Optimizer]:
    """A DLRM whose tables have their optimizer in the backward, and that of its dense layers."""
    tables = collection(device)
    apply_optimizer_in_backward(RowWiseAdagrad, tables.parameters(), {"lr": 0.01})
    model = DLRMTrain(DLRM(tables, DENSE, [64, SHAPE.dim], [64, 1], dense_device=device))
    return model, torch.optim.SGD(dict(in_backward_optimizer_filter(model.named_parameters())).values(), lr=0.01)


def dlrm_step(device: torch.device) -> Prepare:
    """Forward, backward and the step of the dense layers."""
    from shardwise.data import Batch

    model, optimizer = dlrm(device)

    def prepare(turn: int) -> Call:
        dense = torch.full((SHAPE.batch, DENSE), 0.5).to(device)
        batch = Batch(dense, batch_of(turn, device), torch.ones(SHAPE.batch).to(device))

        def call() -> None:
            optimizer.zero_grad()
            loss, _ = model(batch)
            loss.backward()
            optimizer.step()

        return call

    return prepare


def on_batch(
    device: torch.device, *, run: Callable[[Any], object], made: Callable[[int, torch.device], Any] = batch_of
) -> Prepare:
    """An operation of a batch, or of what else is `made` for a turn, that nothing was asked of."""

    def prepare(turn: int) -> Call:
        given = made(turn, device)
        return lambda: run(given)

    return prepare


def two_batches(turn: int, device: torch.device) -> list[KeyedJaggedTensor]:
    """Of other keys."""
    first, second = batch_of(turn, device), batch_of(turn, device)
    return [first, KeyedJaggedTensor([f"g{key}" for key in KEYS], second.values(), lengths=second.lengths())]


def two_outputs(turn: int, device: torch.device) -> list[KeyedTensor]:
    """Of other keys."""
    return [
        KeyedTensor(keys, [SHAPE.dim] * len(keys), torch.ones(SHAPE.batch, SHAPE.dim * len(keys)).to(device))
        for keys in (KEYS, ["g0", "g1"])
    ]


def regroup(outputs: list[KeyedTensor]) -> object:
    """Columns of two outputs in two groups."""
    return KeyedTensor.regroup(outputs, [[*KEYS[::2], "g1"], [*KEYS[1::2], "g0"]])


STEPS: Sequence[Step] = (
    Step("EBC forward", partial(forward, build=collection)),
    Step("EBC step, SGD", partial(bag_step, optimizer=torch.optim.SGD)),
    Step("EBC step, rowwise Adagrad", partial(bag_step, optimizer=RowWiseAdagrad)),
    Step("EBC step, weighted, SGD", partial(bag_step, optimizer=torch.optim.SGD, is_weighted=True)),
    Step("EBC step, fp16, SGD", partial(bag_step, optimizer=torch.optim.SGD, data_type=DataType.FP16)),
    Step("EC step, SGD", sequence_step),
    Step("quantized EBC forward, int8", partial(forward, build=quantized)),
    Step("DLRM step, rowwise Adagrad", dlrm_step),
    Step("KJT permute", partial(on_batch, run=lambda batch: batch.permute(list(range(len(KEYS)))[::-1]))),
    Step("KJT split", partial(on_batch, run=lambda batch: batch.split([10, 10, 6]))),
    Step("KJT to_dict", partial(on_batch, run=lambda batch: batch.to_dict())),
    Step("KJT concat", partial(on_batch, run=lambda batches: KeyedJaggedTensor.concat(batches), made=two_batches)),
    Step("KT regroup", partial(on_batch, run=regroup, made=two_outputs)),
)
