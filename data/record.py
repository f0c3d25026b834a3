"""Traces of any loader: the rows that the batches of a program want of its tables, written as they come."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.embeddings import (
    BaseEmbeddingConfig,
    EmbeddingBagCollectionInterface,
    EmbeddingCollectionInterface,
    data_type_to_dtype,
    optimizer_of,
    optimizer_spec,
)
from shardwise.embeddings.tiers.simulate import record_bytes
from shardwise.jagged import KeyedJaggedTensor

from .traces import Trace, TracedTable, TraceWriter


@dataclasses.dataclass(frozen=True)
class LookedUp:
    """A table of a trace and the features whose ids are its rows."""

    table: TracedTable
    features: tuple[str, ...]


def record_trace(
    batches: Iterable[Any],
    tables: nn.Module | Iterable[LookedUp | BaseEmbeddingConfig],
    path: str | os.PathLike[str],
    *,
    merge: int = 1,
    most: int | None = None,
) -> Trace:
    """Write which rows of each table every batch wants, and return the trace. Batches are not kept.

    Args:
        batches: what a loader gives: KeyedJaggedTensors, or batches that have one or more of them, as an attribute (as
            `Batch` has), an element, or a value. Ids are rows: a batch is taken after its ids were remapped.
        tables: the model or module that looks them up, or configs of tables; the optimizer in a table's backward, if
            there is one by then, counts for the bytes of its rows.
        path: a file .npz or .parquet.
        merge: batches of the loader that make up one step: the ranks, where the loader gives those of one rank.
        most: steps at most; None takes the loader to its end, which some do not have.

    Raises:
        ValueError: no tables; no step; a batch without their features; an id that is no integer, or none of a table's
            rows; `merge` or `most` not positive. No file is left then.
    """
    for what, value in (("merge", merge), ("most", most)):
        if value is not None and value < 1:
            raise ValueError(f"record_trace: {what} must be positive, got {value}")
    looked_up = tables_in(tables) if isinstance(tables, nn.Module) else [*map(_of_config, tables)]
    if not looked_up:
        raise ValueError("record_trace: there are no tables: pass a model that has embedding collections, or configs")
    with TraceWriter(path, [each.table for each in looked_up]) as writer:
        for step in islice(_steps(batches, merge), most):
            samples, ids = 0, {}
            of_features = [_by_feature(features) for features in step]
            for each in looked_up:
                found = [ids for each_batch in of_features for f in each.features for ids in each_batch.get(f, ())]
                if not found and not any(f in each_batch for f in each.features for each_batch in of_features):
                    there = sorted({name for each_batch in of_features for name in each_batch})
                    raise ValueError(
                        f"table {each.table.name!r}: batch {writer.batches} has none of its features"
                        f" {', '.join(each.features)}: it has {', '.join(there) or 'no KeyedJaggedTensor'}"
                    )
                ids[each.table.name] = torch.cat(found) if found else torch.zeros(0, dtype=torch.int64)
            samples = sum(max((kjt.stride() for kjt in features), default=0) for features in step)
            writer.add(samples, ids)
        if not writer.batches:
            steps = "a batch" if merge == 1 else f"{merge} batches, which merge={merge} makes a step of"
            raise ValueError(f"record_trace: the loader did not give {steps}: there is nothing to record")
    return Trace(path)


def tables_in(module: nn.Module) -> list[LookedUp]:
    """The tables of all collections in a module, the first of each name.

    Raises:
        ValueError: two tables of one name have other sizes.
    """
    found: dict[str, LookedUp] = {}
    for child in module.modules():
        if isinstance(child, EmbeddingBagCollectionInterface):
            configs: Sequence[BaseEmbeddingConfig] = child.embedding_bag_configs()
        elif isinstance(child, EmbeddingCollectionInterface):
            configs = child.embedding_configs()
        else:
            continue
        for config in configs:
            parameter = next((p for name, p in child.named_parameters() if f".{config.name}." in f".{name}"), None)
            each = _of_config(config, parameter)
            before = found.setdefault(config.name, each)
            if before.table != each.table:
                raise ValueError(f"two tables are named {config.name!r}, and differ: {before.table} and {each.table}")
            merged = tuple(dict.fromkeys([*before.features, *each.features]))
            found[config.name] = dataclasses.replace(before, features=merged)
    return [*found.values()]


def _of_config(config: LookedUp | BaseEmbeddingConfig, parameter: nn.Parameter | None = None) -> LookedUp:
    if isinstance(config, LookedUp):
        return config
    marked = None if parameter is None else optimizer_of(parameter)
    rule = None if marked is None else optimizer_spec(*marked, table=config.name).rule
    record = record_bytes(config.embedding_dim, data_type_to_dtype(config.data_type), rule)
    table = TracedTable(config.name, config.num_embeddings, config.embedding_dim, config.data_type.value, record)
    return LookedUp(table, tuple(config.feature_names) or (config.name,))


def _steps(batches: Iterable[Any], merge: int) -> Iterator[list[list[KeyedJaggedTensor]]]:
    """The jagged features of the batches of each step; what is left of an incomplete step is left out."""
    step: list[list[KeyedJaggedTensor]] = []
    for batch in batches:
        step.append([*jagged_in(batch)])
        if len(step) == merge:
            yield step
            step = []


def jagged_in(batch: Any, depth: int = 3) -> Iterator[KeyedJaggedTensor]:
    """The KeyedJaggedTensors of a batch, itself among them, to a few levels of what it is made of."""
    if isinstance(batch, KeyedJaggedTensor):
        yield batch
    elif depth and not isinstance(batch, (str, bytes, Tensor)):
        if isinstance(batch, Mapping):
            parts: Iterable[Any] = batch.values()
        elif isinstance(batch, (tuple, list)):
            parts = batch
        elif dataclasses.is_dataclass(batch):
            parts = [getattr(batch, field.name) for field in dataclasses.fields(batch)]
        else:
            parts = vars(batch).values() if hasattr(batch, "__dict__") else ()
        for part in parts:
            yield from jagged_in(part, depth - 1)


def _by_feature(features: Iterable[KeyedJaggedTensor]) -> dict[str, list[Tensor]]:
    """Ids of each feature."""
    ids: dict[str, list[Tensor]] = {}
    for kjt in features:
        if kjt.values().is_floating_point():
            raise ValueError(f"features {', '.join(kjt.keys())}: ids must be integers, got {kjt.values().dtype}")
        for key, values in zip(kjt.keys(), torch.split(kjt.values(), kjt.length_per_key()), strict=True):
            ids.setdefault(key, []).append(values.to("cpu", torch.int64))
    return ids
