"""Export of a quantized model to a folder that serves it; see folder.py for what is in there."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from shardwise._version import __version__
from shardwise.embeddings import EmbeddingBagConfig, PoolingType
from shardwise.embeddings.quant import QuantizedTables
from shardwise.sharding.checkpoint.files import write_named
from shardwise.sharding.checkpoint.manifest import Stored

from .folder import (
    COMPILED,
    PROGRAM,
    TABLES,
    VERSION,
    FeatureFacts,
    ModelFacts,
    OutputFacts,
    Place,
    Plane,
    Signature,
    TableFacts,
    file_facts,
    new_folder,
    require_free,
    write_facts,
)
from .predict import PredictFactory, parts_of
from .program import compile_program
from .tracing import MAPPED, PLANES, Call, Traced, TracedTables, plain_call, sample_inputs, trace


def export_model(
    model: nn.Module | PredictFactory,
    folder: str | os.PathLike[str],
    *,
    signature: Signature | None = None,
    call: Call | None = None,
    compiled: bool = False,
    force: bool = False,
) -> ModelFacts:
    """Write a quantized model into a folder, from which `load_program` serves it and `read_tables` reads its tables.

    The program is compared with the model on a batch, bit by bit, before anything is written. Nothing is left behind
    by an export that fails, and a model that was there before stays.

    Args:
        model: on the CPU, its tables quantized (`quantize_inference_model`); or a `PredictFactory` of one.
        folder: is made. One with a model in it is replaced if `force` is set, any other is refused.
        signature: the names of the inputs; of a factory by default `model_inputs_data()["signature"]`.
        call: how the model is called, `call(model, features, dense)` with a KeyedJaggedTensor and a tensor or None. By
            default `model(features)`, or `model(dense, features)` where the signature has a dense input.
        compiled: also compile it ahead of time, for the processor of this machine (`load_program(compiled=True)`).
        force: replace a model that is there.

    Returns:
        What `model.json` says.

    Raises:
        FileExistsError: the folder is there.
        ValueError: the model has no quantized tables, or the signature does not fit it.
        TypeError: part of the model is sharded: what is exported is the unsharded model.
        KeyError: the model does not find the features that it wants in those of the signature.
        RuntimeError: the program does not give the bits of the model.
    """
    require_free(Path(folder).absolute(), force=force)
    if isinstance(model, PredictFactory):
        model, signature, call = parts_of(model, signature, call)
    if signature is None:
        raise ValueError("the inputs of the model need names: signature=Signature(features=[...], dense=[...])")
    if not isinstance(signature, Signature):
        raise TypeError(f"signature must be a Signature(features=[...], dense=[...]), got {type(signature).__name__}")
    traced = trace(model, signature, call or plain_call)
    tables = [facts for group in traced.groups for facts in _table_facts(group)]
    features = [_feature_facts(name, tables) for name in signature.features]
    _compare(traced, sample_inputs(signature, 3, {feature.name: feature.ids or 1 for feature in features}))
    with new_folder(folder, force=force) as made:
        _write_tables(made / TABLES, traced.groups)
        save_program(traced, made / PROGRAM)
        if compiled:
            compile_program(traced.program, made / COMPILED)
        facts = ModelFacts(
            format_version=VERSION,
            versions={"shardwise": __version__, "torch": str(torch.__version__)},
            dense=tuple(signature.dense),
            features=tuple(features),
            weighted=signature.weighted,
            outputs=tuple(_output_facts(traced)),
            tables=tuple(tables),
            planes=tuple(plane for group in traced.groups for plane in _planes(group)),
            files=tuple(file_facts(made / name) for name in (TABLES, PROGRAM, *([COMPILED] if compiled else []))),
        )
        write_facts(made, facts)
    return facts


def save_program(traced: Traced, path: Path) -> None:
    """Write the program without the planes, which come back from the file of tables."""
    state = traced.program.state_dict
    planes = {name: state[name] for group in traced.groups for _, name, _ in group.planes()}
    state.update({name: plane.new_zeros(1) for name, plane in planes.items()})
    try:
        torch.export.save(traced.program, path)
    finally:
        state.update(planes)


def _compare(traced: Traced, inputs: Mapping[str, Tensor]) -> None:
    """RuntimeError unless program and model give the same bits."""
    with torch.no_grad():
        wanted, given = traced.module(**inputs), traced.program.module()(**inputs)
    for name, expected, output in zip(traced.outputs, wanted, given, strict=True):
        if expected.shape != output.shape or not torch.equal(expected.nan_to_num(), output.nan_to_num()):
            raise RuntimeError(
                f"output {name!r} of the program differs from the model's: its forward may read Python state, draw"
                " random numbers, or branch on values"
            )


def _tensors(tables: QuantizedTables, number: int) -> Iterator[tuple[str, str, Tensor]]:
    """Plane, name in the file and cells of each tensor of a table, views of the planes."""
    for what in PLANES:
        if getattr(tables, what, None) is not None and (what != "scales" or tables.format.parts):
            yield what, f"{tables.tables[number].name}.{what}", getattr(tables, f"{what}_of")(number)


def _write_tables(path: Path, groups: Sequence[TracedTables]) -> None:
    entries = [
        entry for group in groups for n in range(len(group.tables.tables)) for entry in _tensors(group.tables, n)
    ]
    write_named(
        path,
        [(name, Stored("table", name, "", tuple(cells.shape), cells.dtype), [cells]) for _, name, cells in entries],
    )


def _planes(group: TracedTables) -> Iterator[Plane]:
    for what, name, plane in group.planes():
        places = [
            Place(tensor, int(cells.storage_offset()))
            for n in range(len(group.tables.tables))
            for of, tensor, cells in _tensors(group.tables, n)
            if of == what
        ]
        yield Plane(name, _name(plane.dtype), plane.numel(), tuple(places))


def _table_facts(group: TracedTables) -> Iterator[TableFacts]:
    tables = group.tables
    configs = {config.name: config for config in group.configs()}
    for number, table in enumerate(tables.tables):
        cells_of = {what: cells for what, _, cells in _tensors(tables, number)}
        config = configs[table.name]
        pooling = None
        if isinstance(config, EmbeddingBagConfig):
            pooling = "mean" if config.pooling is PoolingType.MEAN else "sum"
        yield TableFacts(
            name=table.name,
            rows=table.rows,
            ids=cells_of["remapping"].shape[0] if "remapping" in cells_of else table.rows,
            dim=table.dim,
            format=table.format,
            scale_dtype=_name(tables.scales.dtype) if "scales" in cells_of else None,
            pruned="remapping" in cells_of,
            mapped=isinstance(group.collection, MAPPED),
            pooling=pooling,
            features=tuple(config.feature_names),
            bytes=sum(cells.nbytes for cells in cells_of.values()),
        )


def _feature_facts(name: str, tables: Sequence[TableFacts]) -> FeatureFacts:
    """Of a feature, which may go to several tables: an id must be good in all of them."""
    holding = [table for table in tables if name in table.features]
    ids = min([table.ids for table in holding if not table.mapped], default=None)
    return FeatureFacts(name, tuple(table.name for table in holding), ids)


def _output_facts(traced: Traced) -> Iterator[OutputFacts]:
    nodes = {node.name: node for node in traced.program.graph.nodes}
    batch = nodes["lengths"].meta["val"].shape[1]
    for name, spec in zip(traced.outputs, traced.program.graph_signature.output_specs, strict=True):
        value = nodes[spec.arg.name].meta["val"]
        shape = (n if isinstance(n, int) else "batch" if str(n) == str(batch) else "ids" for n in value.shape)
        yield OutputFacts(name, _name(value.dtype), tuple(shape))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
