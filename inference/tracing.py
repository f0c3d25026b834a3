"""torch.export of a model around its quantized tables: plain tensors in, plain tensors out, any batch size.

Shapes: values [N] ids of all features, feature by feature, lengths [F, B] int64, weights [N] and dense [B, columns]
fp32 where the signature has them. The flat planes of the tables are buffers of what is traced, by names that
`TracedTables` keeps, so that a program can be written without them and get them back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from shardwise.embeddings import BaseEmbeddingConfig, quant
from shardwise.embeddings.quant import QuantizedTables
from shardwise.embeddings.quant.managed_collision import (
    QuantManagedCollisionEmbeddingBagCollection,
    QuantManagedCollisionEmbeddingCollection,
)
from shardwise.jagged import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from .folder import Signature

# typed by nobody: the module is made when it is imported
_shapes: Any = import_module("torch.fx.experimental._config")

# (model, batch of ids, dense input or None) -> what the model says
Call = Callable[[nn.Module, KeyedJaggedTensor, Tensor | None], Any]

# tensors of QuantizedTables that hold tables, and others that their lookups read
PLANES = ("payload", "scales", "remapping")
# collections that turn ids of any range into slots of their tables
MAPPED = (QuantManagedCollisionEmbeddingBagCollection, QuantManagedCollisionEmbeddingCollection)
_BESIDE = ("features", "checked", "guard")


@dataclass(frozen=True)
class TracedTables:
    """Tables of one format of a collection; `buffers` are the names in the program of its tensors."""

    tables: QuantizedTables
    collection: quant.EmbeddingBagCollection | quant.EmbeddingCollection
    buffers: Mapping[str, str]

    def configs(self) -> Sequence[BaseEmbeddingConfig]:
        """The configs of the collection's tables."""
        if isinstance(self.collection, quant.EmbeddingBagCollection):
            return self.collection.embedding_bag_configs()
        return self.collection.embedding_configs()

    def planes(self) -> Iterator[tuple[str, str, Tensor]]:
        """Attribute, name in the program and tensor of each flat tensor that holds tables."""
        for what in PLANES:
            if what in self.buffers:
                yield what, self.buffers[what], getattr(self.tables, what)


@dataclass(frozen=True)
class Traced:
    """A program with what went into it; `outputs` are the names of its outputs."""

    program: ExportedProgram
    module: nn.Module
    groups: Sequence[TracedTables]
    outputs: Sequence[str]


def plain_call(model: nn.Module, features: KeyedJaggedTensor, dense: Tensor | None) -> Any:
    """`model(features)`, or `model(dense, features)` where there is a dense input."""
    return model(features) if dense is None else model(dense, features)


def trace(model: nn.Module, signature: Signature, call: Call = plain_call) -> Traced:
    """Trace the model.

    Raises:
        ValueError: it has no quantized tables, or the signature does not fit it; what torch.export raises besides.
        TypeError: part of the model is sharded.
    """
    model.eval()
    groups = find_tables(model)
    module = _PlainTensors(model, signature, call, groups)
    inputs = sample_inputs(signature, 2)
    sizes: dict[str, Any] = {name: {0: Dim.DYNAMIC} for name in inputs}
    sizes["lengths"] = {1: Dim.DYNAMIC}
    with torch.no_grad():
        # errors of what does not fit are the model's own here, and the names of outputs are no part of a program
        outputs = list(module.named(**inputs))
    # so that the program is not tied to batches of two and more samples, which is what torch takes a 2 for
    with torch.no_grad(), _tables_alone(groups), _shapes.patch(backed_size_oblivious=True):
        program = torch.export.export(module, (), inputs, dynamic_shapes=sizes, strict=False)
    return Traced(program, module, groups, outputs)


def sample_inputs(signature: Signature, batch: int, rows: Mapping[str, int] | None = None) -> dict[str, Tensor]:
    """Inputs of `batch` samples with one id each; ids are 0, or drawn below `rows` of their feature."""
    generator = torch.Generator().manual_seed(0)
    count = len(signature.features)
    ids = [
        torch.randint(rows.get(name, 1) if rows else 1, (batch,), generator=generator) for name in signature.features
    ]
    inputs = {"values": torch.cat(ids), "lengths": torch.ones(count, batch, dtype=torch.int64)}
    if signature.weighted:
        inputs["weights"] = torch.rand(count * batch, generator=generator)
    if signature.dense:
        inputs["dense"] = torch.randn(batch, len(signature.dense), generator=generator)
    return inputs


def find_tables(model: nn.Module) -> list[TracedTables]:
    """The quantized tables of a model.

    Raises:
        ValueError: there are none, they are not on the CPU, or two tables have one name.
        TypeError: part of the model is sharded.
    """
    traced: list[TracedTables] = []
    homes: dict[str, str] = {}
    for path, module in model.named_modules():
        # what holds parts of tables names them by this method
        if callable(getattr(module, "sharded_parameter_names", None)):
            raise TypeError(
                f"module {path!r} is a sharded {type(module).__name__}: a folder holds whole tables, export the"
                " unsharded quantized model, which has the same values"
            )
        if not isinstance(module, (quant.EmbeddingBagCollection, quant.EmbeddingCollection)):
            continue
        for tables in module._groups:
            if tables.payload.device.type != "cpu":
                raise ValueError(f"{path or 'the model'} is on {tables.payload.device}: export takes it on the CPU")
            for table in tables.tables:
                if table.name in homes:
                    raise ValueError(
                        f"two tables are named {table.name!r}, in {homes[table.name]!r} and {path!r}: the folder knows"
                        " tables by their names, rename one"
                    )
                homes[table.name] = path
            number = len(traced)
            planes = [what for what in (*PLANES, *_BESIDE) if isinstance(getattr(tables, what, None), Tensor)]
            traced.append(TracedTables(tables, module, {what: f"{what}_{number}" for what in planes}))
    if not traced:
        raise ValueError(
            "the model has no quantized tables: quantize it with quantize_inference_model first"
            " (quantization_dtype=torch.float32 keeps every value)"
        )
    return traced


class _PlainTensors(nn.Module):
    """The model behind plain tensors; the tensors of its tables are buffers here while it is traced."""

    def __init__(self, model: nn.Module, signature: Signature, call: Call, groups: Sequence[TracedTables]) -> None:
        super().__init__()
        self.model = model
        self._signature, self._call, self._groups = signature, call, groups
        for group in groups:
            for what, name in group.buffers.items():
                self.register_buffer(name, getattr(group.tables, what))

    def forward(
        self, values: Tensor, lengths: Tensor, weights: Tensor | None = None, dense: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        saved = [(group.tables, what, getattr(group.tables, what)) for group in self._groups for what in group.buffers]
        for group in self._groups:
            for what, name in group.buffers.items():
                setattr(group.tables, what, getattr(self, name))
        try:
            return tuple(self.named(values, lengths, weights, dense).values())
        finally:
            for tables, what, tensor in saved:
                setattr(tables, what, tensor)

    def named(
        self, values: Tensor, lengths: Tensor, weights: Tensor | None = None, dense: Tensor | None = None
    ) -> dict[str, Tensor]:
        """The outputs by their names."""
        features = KeyedJaggedTensor(list(self._signature.features), values, weights, lengths)
        return named_outputs(self._call(self.model, features, dense), self._signature.outputs)


@contextmanager
def _tables_alone(groups: Sequence[TracedTables]) -> Iterator[None]:
    """Take away the buffers that show each table of a plane: a program would hold every table twice."""
    hidden = [module for group in groups for module in group.collection.modules() if module is not group.collection]
    saved = [(module, module._buffers) for module in dict.fromkeys(hidden)]
    planes = {plane.untyped_storage().data_ptr() for group in groups for _, _, plane in group.planes()}
    try:
        for module, buffers in saved:
            module._buffers = {
                name: tensor
                for name, tensor in buffers.items()
                if tensor is None or tensor.untyped_storage().data_ptr() not in planes
            }
        yield
    finally:
        for module, buffers in saved:
            module._buffers = buffers


def named_outputs(result: Any, names: Sequence[str] | None = None) -> dict[str, Tensor]:
    """The tensors of what a model returns, by `names` or by those that they have.

    Raises:
        TypeError: there is something else among them.
        ValueError: there are more or fewer than names.
    """
    outputs = dict(_named(result, ""))
    if names is None:
        return outputs
    if len(names) != len(outputs):
        raise ValueError(f"the model has {len(outputs)} outputs, {list(outputs)}, the signature names {list(names)}")
    return dict(zip(names, outputs.values(), strict=True))


def _named(result: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    inner = f"{name}." if name else ""
    if isinstance(result, Tensor):
        yield name or "output", result
    elif isinstance(result, KeyedTensor):
        yield from _named(result.to_dict(), name)
    elif isinstance(result, JaggedTensor):
        yield f"{inner}values", result.values()
        yield f"{inner}lengths", result.lengths()
        if result.weights_or_none() is not None:
            yield f"{inner}weights", result.weights()
    elif isinstance(result, Mapping):
        for key, value in result.items():
            yield from _named(value, f"{inner}{key}")
    elif isinstance(result, (tuple, list)):
        fields: Sequence[Any] = getattr(result, "_fields", range(len(result)))
        for key, value in zip(fields, result, strict=True):
            yield from _named(value, f"{inner}{key}")
    else:
        raise TypeError(
            f"output {name or 'of the model'} is a {type(result).__name__}: a program gives tensors, in dicts, tuples,"
            " KeyedTensors or JaggedTensors; pass `call` to pick them"
        )
