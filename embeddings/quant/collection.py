"""What quantized collections share: tables grouped by format, buffers that are views of the groups' planes.

A table is the buffers `<children>.<table>.weight` (uint8 [rows, row_bytes]), `.weight_qscale` and `.weight_qbias`
([rows, 1], where its format has them) and, if it is pruned, `.index_remapping` (int32 [ids]). Lookups read the planes;
`.to()`, loading, copying and pickling keep both the same memory.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardwise.embeddings.config import BaseEmbeddingConfig, PoolingType, embedding_names_by_table, named_tables
from shardwise.embeddings.policy import LookupPolicy
from shardwise.embeddings.tables.grouped import (
    Found,
    SharedFeatures,
    look_up_groups,
    plan_columns,
    shared_features,
)
from shardwise.embeddings.tables.table_layout import LookupFeature
from shardwise.embeddings.tables.table_module import TableModule
from shardwise.jagged import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from shardwise.kernels import quantize_pooled, row_format

from .formats import table_format
from .tables import QuantizedTable, QuantizedTables, TableWeights, scales_as

DEFAULT_ROW_ALIGNMENT = 16


class QuantizedRows(nn.Module):
    """The rows of one quantized table, as buffers: `weight`, `weight_qscale`, `weight_qbias`, `index_remapping`."""

    weight: Tensor

    def __init__(self, table: QuantizedTable, scale_dtype: torch.dtype) -> None:
        super().__init__()
        self._table, self._scale_dtype = table, scale_dtype

    def extra_repr(self) -> str:
        """Rows, dim and format."""
        table = self._table
        scales = f", {str(self._scale_dtype).removeprefix('torch.')} scales" if row_format(table.format).parts else ""
        ids = "" if table.ids is None else f" for {table.ids} ids"
        return f"{table.rows}{ids} x {table.dim}, {table.format}{scales}"


class _Home(NamedTuple):
    """Where a table lies: its group, and its number there."""

    group: QuantizedTables
    number: int


_WARNED: set[str] = set()


def tell_what_does_nothing(who: str, *, register_tbes: bool, row_alignment: int) -> None:
    """Warn, once for each, of TorchRec's settings that were set and change nothing here."""
    told = []
    if register_tbes:
        told.append(f"{who}: register_tbes=True has no effect, lookups here are no modules")
    if row_alignment != DEFAULT_ROW_ALIGNMENT:
        told.append(f"{who}: row_alignment={row_alignment} has no effect, rows here are not padded")
    for message in told:
        if message not in _WARNED:
            _WARNED.add(message)
            warnings.warn(message, stacklevel=3)


class QuantizedCollection(TableModule):
    """Tables grouped by format; the part of the pooled and the sequence collection that both have.

    Raises:
        ValueError: another `output_dtype`.
    """

    # what `repr` calls it
    _shown_name: str
    _config_type: type[BaseEmbeddingConfig] = BaseEmbeddingConfig
    _shared_features: SharedFeatures | None = None

    def __init__(
        self,
        tables: Sequence[BaseEmbeddingConfig],
        device: torch.device | str | None,
        output_dtype: torch.dtype,
        weights: Mapping[str, TableWeights] | None,
        *,
        scale_dtype: torch.dtype | Mapping[str, torch.dtype] | None,
        policy: LookupPolicy,
    ) -> None:
        super().__init__()
        if output_dtype not in OUTPUT_DTYPES:
            raise ValueError(f"output_dtype must be one of {', '.join(map(str, OUTPUT_DTYPES))}, got {output_dtype}")
        given = named_tables(list(tables), type(self).__name__, self._config_type)
        self._configs = [replace(config, feature_names=list(config.feature_names)) for config in given]
        self._names_by_table = embedding_names_by_table(self._configs)
        self._output_dtype, self._policy = output_dtype, policy
        self._empty_device = torch.device("cpu" if device is None else device)
        dtypes = _scale_dtypes(self._configs, scale_dtype, weights or {})
        stored = [_stored(config) for config in self._configs]
        members: dict[tuple[str, torch.dtype, bool], list[int]] = {}
        for t, (table, dtype) in enumerate(zip(stored, dtypes, strict=True)):
            members.setdefault((table.format, dtype, table.ids is not None), []).append(t)
        self._members = list(members.values())
        self._groups = [
            QuantizedTables(
                [stored[t] for t in ts],
                [
                    LookupFeature(feature, number, self._is_averaged(self._configs[t]))
                    for number, t in enumerate(ts)
                    for feature in self._configs[t].feature_names
                ],
                scale_dtype=dtype,
                device=self._empty_device,
                policy=policy,
            )
            for (_, dtype, _), ts in members.items()
        ]
        self._columns = plan_columns(self._groups, self._members, self._names_by_table)
        self._shared_features = shared_features(self._members, [config.feature_names for config in self._configs])
        self._show()
        self.register_load_state_dict_pre_hook(_refuse_other_rows)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_post_hook(_take_back_replaced)  # type: ignore[no-untyped-call]
        if weights is not None:
            self.assign_table_weights(weights)

    @property
    def device(self) -> torch.device:
        """Where the tables are."""
        return self._groups[0].device if self._groups else self._empty_device

    @property
    def _device(self) -> torch.device:
        """`device`, by the name of TorchRec's attribute."""
        return self.device

    def output_dtype(self) -> torch.dtype:
        """The dtype of the output; uint8 for rows of bytes."""
        return self._output_dtype

    def check(self) -> None:
        """Raise now what a bad id on CUDA would raise at the next forward."""
        for group in self._groups:
            group.check.raise_pending()

    def table_weights(self) -> dict[str, TableWeights]:
        """Payload uint8 [rows, row_bytes] and scales [rows, parts] (None without) of each table, as views."""
        self._settle()
        found = {}
        for t, (group, number) in sorted(self._homes().items()):
            scales = group.scales_of(number) if group.format.parts else None
            found[self._configs[t].name] = (group.payload_of(number), scales)
        return found

    @torch.no_grad()
    def assign_table_weights(self, weights: Mapping[str, TableWeights]) -> None:
        """Copy in the payload and scales of every table; a collection on meta comes to life where they are.

        Scales are [rows, parts] of the table's scale dtype, the same as bytes, or None where the format has none. Rows
        are taken to be of the table's format: those of fp16 and bf16 have one shape.

        Raises:
            KeyError: a table is missing.
            ValueError: payload or scales have another shape or dtype than the table, or it is pruned and on meta; names
                it.
        """
        if missing := [config.name for config in self._configs if config.name not in weights]:
            raise KeyError(f"no weights for tables {missing}")
        homes = self._homes()
        given = {}
        for t, (group, number) in homes.items():
            table = group.tables[number]
            payload, scales = weights[table.name]
            if payload.dtype != torch.uint8 or payload.shape != (table.rows, table.row_bytes):
                raise ValueError(
                    f"table {table.name!r}: the payload of {table.format} rows of dim {table.dim} is uint8"
                    f" [{table.rows}, {table.row_bytes}], got {payload.dtype} {list(payload.shape)}"
                )
            given[t] = payload, scales_as(scales, table, group.scales.dtype)
        first = next(iter(given.values()))[0] if given else None
        if first is not None and self.device.type == "meta" and first.device.type != "meta":
            if pruned := [table.name for group in self._groups if group.is_pruned for table in group.tables]:
                raise ValueError(f"tables {pruned} are pruned: load a state dict, which has their index remapping")
            self.to_empty(device=first.device)
        for t, (payload, scales) in given.items():
            group, number = homes[t]
            if not payload.is_meta:
                group.payload_of(number).copy_(payload)
                group.scales_of(number).copy_(scales)

    def _homes(self) -> dict[int, _Home]:
        """Where each table lies."""
        grouped = zip(self._groups, self._members, strict=True)
        return {t: _Home(group, number) for group, ts in grouped for number, t in enumerate(ts)}

    def _look_up(
        self, features: KeyedJaggedTensor, look_up: Callable[[QuantizedTables, KeyedJaggedTensor], Tensor]
    ) -> Found:
        if not torch.compiler.is_compiling():
            shown, children = self._views, self._modules[self._children_name]._modules  # type: ignore[union-attr]
            # a loop here, as every lookup asks this of every table
            for table, child in children.items():
                for name, buffer in child._buffers.items():  # type: ignore[union-attr]
                    if buffer is not shown[table, name]:
                        _take_back_replaced(self, None)
        return look_up_groups(self._groups, features, look_up, self._shared_features)

    def _settle(self) -> None:
        """Take over what was put in the place of a table's buffers, as a program that gives meta tensors memory does.

        Raises:
            ValueError: some tables have memory by now and others not; names those.
        """
        shown = self._views
        for table, child in self._children().items():
            for name, buffer in child._buffers.items():
                if buffer is not shown[table, name]:
                    _take_back_replaced(self, None)
                    return

    def _is_averaged(self, config: BaseEmbeddingConfig) -> bool:
        return getattr(config, "pooling", None) is PoolingType.MEAN

    def _show(self) -> None:
        """Make the children: their buffers are views of the planes."""
        homes = self._homes()
        children = nn.ModuleDict()
        self._views: dict[tuple[str, str], Tensor] = {}
        for t, config in enumerate(self._configs):
            group, number = homes[t]
            children[config.name] = QuantizedRows(group.tables[number], group.scales.dtype)
            for name, view in _views(group, number):
                # no view to autograd: torch 2.9 loses the base of one where it decomposes an exported program
                buffer = view.data
                children[config.name].register_buffer(name, buffer)
                self._views[config.name, name] = buffer
        self.add_module(self._children_name, children)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        if recurse:
            self._settle()
            for group in self._groups:
                group.move(fn)
            self._show()
        return super()._apply(fn, recurse)

    def _get_name(self) -> str:
        return self._shown_name

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        note_formats(destination, prefix, (table for group in self._groups for table in group.tables))

    def __getstate__(self) -> dict[str, Any]:
        # the buffers are views: kept, each of them would carry its group's whole plane into the copy
        self._settle()
        modules = {**self._modules, self._children_name: None}
        return {**self.__dict__, "_modules": modules, "_views": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._show()


def _stored(config: BaseEmbeddingConfig) -> QuantizedTable:
    """The table of a config; one with `num_embeddings_post_pruning` is pruned to so many rows."""
    rows, kept = config.num_embeddings, config.num_embeddings_post_pruning
    if kept is not None and not 0 <= kept <= rows:
        raise ValueError(
            f"table {config.name!r}: num_embeddings_post_pruning {kept} is outside [0, {rows}], its num_embeddings"
        )
    ids = None if kept is None else rows
    return QuantizedTable(
        config.name, rows if kept is None else kept, config.embedding_dim, table_format(config).name, ids
    )


def _scale_dtypes(
    configs: Sequence[BaseEmbeddingConfig],
    asked: torch.dtype | Mapping[str, torch.dtype] | None,
    weights: Mapping[str, TableWeights],
) -> list[torch.dtype]:
    """The dtype of each table's scales: what is asked for, else what the given scales have, else the format's own."""
    if isinstance(asked, Mapping) and (unknown := set(asked) - {config.name for config in configs}):
        raise ValueError(f"scale_dtype names tables that are not here: {sorted(unknown)}")
    found = []
    for config in configs:
        format = table_format(config)
        dtype = asked.get(config.name) if isinstance(asked, Mapping) else asked
        scales = weights.get(config.name, (None, None))[1]
        if dtype is None and scales is not None and scales.dtype != torch.uint8:
            dtype = scales.dtype
        if not format.parts:
            dtype = None
        elif dtype is not None and dtype not in format.scale_dtypes:
            raise ValueError(
                f"table {config.name!r}: scales of {format.name} rows are"
                f" {' or '.join(map(str, format.scale_dtypes))}, not {dtype}"
            )
        found.append(dtype or format.scale_dtype)
    return found


def _views(group: QuantizedTables, number: int) -> Iterator[tuple[str, Tensor]]:
    """The buffers of a table by their names."""
    yield "weight", group.payload_of(number)
    scales = group.scales_of(number)
    for part, name in enumerate(("weight_qscale", "weight_qbias")[: group.format.parts]):
        yield name, scales[:, part : part + 1]
    if group.is_pruned:
        yield "index_remapping", group.remapping_of(number)


def note_formats(destination: Mapping[str, Any], prefix: str, tables: Iterable[QuantizedTable]) -> None:
    """Note the tables' formats in the metadata of a state dict: rows of fp16 and bf16 are bytes of one shape."""
    # what is no state dict of torch's own has no metadata
    noted = getattr(destination, "_metadata", {}).get(prefix.removesuffix("."))
    if noted is not None:
        noted["formats"] = {table.name: table.format for table in tables}


def require_formats(metadata: Mapping[str, Any], tables: Iterable[QuantizedTable]) -> None:
    """ValueError if the state dict with this metadata has a table in another format; it may not say."""
    formats = metadata.get("formats", {})
    for table in tables:
        given = formats.get(table.name, table.format)
        if given != table.format:
            raise ValueError(f"table {table.name!r}: rows are {table.format} here, those of the state dict {given}")


def _refuse_other_rows(
    module: nn.Module, state_dict: Mapping[str, Any], prefix: str, metadata: Mapping[str, Any], *_: Any
) -> None:
    """Before loading: float values copied into uint8 rows would be cut without a word, as would finer scales."""
    assert isinstance(module, QuantizedCollection)
    for (table, name), view in module._views.items():
        given = state_dict.get(f"{prefix}{module._children_name}.{table}.{name}")
        if isinstance(given, Tensor) and given.dtype != view.dtype:
            raise ValueError(
                f"table {table!r}: {name} is {view.dtype} here, the state dict has {given.dtype}: quantize a float"
                " collection with from_float, or make this one with the scale_dtype of the state dict"
            )
    require_formats(metadata, (table for group in module._groups for table in group.tables))


@torch.no_grad()
def _take_back_replaced(module: nn.Module, _: Any) -> None:
    """After `load_state_dict(assign=True)`: the views return, with the values of what had taken their place."""
    assert isinstance(module, QuantizedCollection)
    given = {
        (table, name): child._buffers[name]
        for table, child in module._children().items()
        for name in list(child._buffers)
        if child._buffers[name] is not module._views[table, name]
    }
    if not given:
        return
    device = next(new.device for new in given.values() if new is not None)
    if module.device.type == "meta" and device.type != "meta":
        if left := sorted({table for table, name in module._views if (table, name) not in given}):
            raise ValueError(f"tables {left} would stay on meta: load them too, or call to_empty first")
        # not `_apply`, which would first take back what is replaced
        for group in module._groups:
            group.move(partial(torch.empty_like, device=device))
    module._show()
    for key, new in given.items():
        assert new is not None
        module._views[key].copy_(new)


OUTPUT_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.uint8)
# a scale and a bias
_SCALE_BYTES = 8


def lookup_dtype(output_dtype: torch.dtype) -> torch.dtype:
    """The dtype in which rows are looked up: bytes are made of fp32 values."""
    return torch.float32 if output_dtype is torch.uint8 else output_dtype


# as bytes each feature's row is dim + 8 wide: int8 numbers, then a scale and a bias in fp32, for `dequantize_pooled`
def pooled_output(values: Tensor, names: list[str], dims: Sequence[int], output_dtype: torch.dtype) -> KeyedTensor:
    """Features side by side, [B, sum of dims], as the output of a pooled collection."""
    if output_dtype is not torch.uint8 or not names:
        return KeyedTensor(names, list(dims), values)
    return KeyedTensor(names, [dim + _SCALE_BYTES for dim in dims], quantize_pooled(values, dims))


def sequence_output(by_name: dict[str, JaggedTensor], output_dtype: torch.dtype) -> dict[str, JaggedTensor]:
    """Rows of each feature, [N, dim], as the output of a sequence collection."""
    if output_dtype is not torch.uint8:
        return by_name
    return {
        name: JaggedTensor(
            quantize_pooled(rows.values(), [rows.values().shape[1]]),
            weights=rows.weights_or_none(),
            lengths=rows.lengths(),
        )
        for name, rows in by_name.items()
    }
