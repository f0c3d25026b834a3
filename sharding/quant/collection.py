"""What sharded quantized collections share: pieces of tables on devices of one process, and their buffers and states.

Buffers are the pieces: a table in one piece has `<children>.<table>.weight` (and `.weight_qscale`, `.weight_qbias`,
`.index_remapping`), a table in several `<children>.<table>.shards.<n>.weight`. State dicts have whole tables under the
first names whatever the plan, as the unsharded collection; those of a table in several pieces are copies in the memory
of the host. `.to(device)` moves pieces that are all on one device; pieces on several stay where they are.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Proxy

from shardwise.embeddings.config import PoolingType, embedding_names_by_table
from shardwise.embeddings.quant import QuantizedCollection, QuantizedTable, TableWeights
from shardwise.embeddings.quant.collection import lookup_dtype, note_formats, require_formats
from shardwise.embeddings.quant.tables import scales_as
from shardwise.embeddings.tables.grouped import pick_features
from shardwise.embeddings.tables.id_check import IdCheck
from shardwise.embeddings.tables.table_module import TableModule
from shardwise.embeddings.tables.variable_batch import pad_strides
from shardwise.jagged import KeyedJaggedTensor
from shardwise.jagged.tracing import record_forward
from shardwise.kernels import BoundsCheckMode, Feature, pack_features, row_format
from shardwise.sharding.comms.env import ShardingEnv
from shardwise.sharding.plan.plan import ParameterSharding
from shardwise.sharding.plan.sharded_module import NullShardedModuleContext, ShardedModule

from .fused_params import bounds_check_mode, bounds_check_of
from .storage import (
    Place,
    ServedTable,
    ShardedTables,
    SpreadBatch,
    TableValues,
    byte_span,
    first_device,
    pieces_of,
    reachable,
)

# one for all tables, or one for each type of device
Envs = ShardingEnv | Mapping[str, ShardingEnv]
_SCALES = ("weight_qscale", "weight_qbias")


@dataclass(frozen=True)
class BufferOfShard:
    """A buffer of a sharded collection: rows and columns [lo, hi) of the tensor `name` of a whole table's state."""

    table: str
    name: str
    rows: tuple[int, int]
    cols: tuple[int, int]
    sharding_type: str


@dataclass(frozen=True)
class ServedBatch:
    """A batch on its way: as it was given, padded to equal batch sizes, and on the devices that look it up."""

    given: KeyedJaggedTensor
    padded: KeyedJaggedTensor
    spread: SpreadBatch


@dataclass(frozen=True)
class FoundRows:
    """What the pieces found for a batch, by source, each on its device."""

    batch: ServedBatch
    found: dict[int, Tensor]


class ShardedQuantizedCollection(TableModule, ShardedModule[ServedBatch, FoundRows, Any, NullShardedModuleContext]):
    """What the sharded pooled and sequence collections share.

    Its stages wait for nobody: one process holds all pieces, and `input_dist` gives the batch on their devices itself,
    `output_dist` the output, as in TorchRec.

    Args:
        module: the quantized collection; its values are copied, unless it or `device` is on meta.
        table_name_to_parameter_sharding: where each table goes.
        env: how many ranks there are; a mapping has one for each type of device, and is not asked.
        fused_params: settings by the names of fused_params.py.
        device: where outputs are, by default the first device of the plan; "meta" leaves tables without memory.

    Raises:
        ValueError: the plan does not fit a table, or cuts it where it cannot be cut; names the table.
    """

    _is_pooled: bool
    _unsharded_type: type[nn.Module]
    # whether lookups are scaled by the batch's weights
    _scales_by_weights = False

    def __init__(
        self,
        module: QuantizedCollection,
        table_name_to_parameter_sharding: Mapping[str, ParameterSharding],
        env: Envs,
        fused_params: dict[str, Any] | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self._configs: Any = module._configs
        self._names_by_table = embedding_names_by_table(self._configs)
        self._output_dtype = module.output_dtype()
        self._plan = {config.name: table_name_to_parameter_sharding[config.name] for config in self._configs}
        homes = module._homes()
        served = [
            ServedTable(
                homes[t].group.tables[homes[t].number],
                tuple(config.feature_names),
                getattr(config, "pooling", None) is PoolingType.MEAN,
                homes[t].group.scales.dtype,
            )
            for t, config in enumerate(self._configs)
        ]
        world = env.world_size if isinstance(env, ShardingEnv) else None
        pieces = [pieces_of(one.table, self._plan[one.table.name], world) for one in served]
        wanted = torch.device("meta" if device is None else device)
        home, found = reachable(wanted, [piece for of in pieces for piece in of])
        placed = iter(found)
        pieces = [[next(placed) for _ in of] for of in pieces]
        if wanted.type == "meta":
            home = first_device(pieces)
        is_meta = device is not None and wanted.type == "meta"
        self._tables = ShardedTables(served, pieces, home, pooled=self._is_pooled, meta=is_meta)
        self._checks = self._checks_of(served, module, bounds_check_of(fused_params))
        if not is_meta:
            for t in range(len(served)):
                group, number = homes[t]
                remapping = group.remapping_of(number) if group.is_pruned else None
                self._tables.fill(t, TableValues(group.payload_of(number), group.scales_of(number), remapping))
        self._show()

    def _checks_of(
        self, served: Sequence[ServedTable], module: QuantizedCollection, default: BoundsCheckMode | None
    ) -> list[tuple[list[str], IdCheck]]:
        """Features and check of each mode: that of the table's plan, else of the sharder, else of the collection."""
        policy = module._policy
        lookups: dict[BoundsCheckMode, list[tuple[str, QuantizedTable]]] = {}
        for one in served:
            planned = self._plan[one.table.name].bounds_check_mode
            asked = policy.bounds_check if default is None else default
            if planned is not None:
                asked = bounds_check_mode(planned)
            lookups.setdefault(asked, []).extend((feature, one.table) for feature in one.features)
        checks = []
        for mode, those in lookups.items():
            # a pruned table has more ids than rows
            counts = [table.rows if table.ids is None else table.ids for _, table in those]
            sizes = pack_features([Feature(0, count, 1, 0) for count in counts])
            names = [f"feature {feature!r} (table {table.name!r})" for feature, table in those]
            checks.append(([name for name, _ in those], IdCheck(names, sizes, replace(policy, bounds_check=mode))))
        return checks

    @property
    def device(self) -> torch.device:
        """Where outputs are."""
        return self._tables.home

    def copy(self, device: torch.device) -> nn.Module:
        """This module itself: the plan says where its tables are; `copy_to_device` copies a model."""
        return self

    @property
    def unsharded_module_type(self) -> type[nn.Module]:
        """The class of the quantized collection."""
        return self._unsharded_type

    def create_context(self) -> NullShardedModuleContext:
        """For one step, of which nothing is kept."""
        return NullShardedModuleContext()

    def input_dist(  # type: ignore[override]
        self, ctx: NullShardedModuleContext, features: KeyedJaggedTensor
    ) -> ServedBatch:
        """Check the batch and bring its ids to the devices that look them up. Raises as `forward`."""
        padded = self._ready(features)
        return ServedBatch(features, padded, self._tables.spread(padded, self._scales_by_weights))

    def compute(self, ctx: NullShardedModuleContext, dist_input: ServedBatch) -> FoundRows:
        """Look the batch up on each device; raw rows of tables that are cut by rows come to where outputs are."""
        look_up = self._tables.pooled if self._is_pooled else self._tables.sequence
        return FoundRows(dist_input, look_up(dist_input.spread, lookup_dtype(self._output_dtype)))

    def output_dist(self, ctx: NullShardedModuleContext, output: FoundRows) -> Any:
        """The output, where outputs are."""
        return self._joined(output)

    @abc.abstractmethod
    def _joined(self, output: FoundRows) -> Any:
        """What the pieces found, as the unsharded collection gives it."""

    def forward(self, features: KeyedJaggedTensor) -> Any:
        """Look the batch up: the stages in order."""
        if isinstance(features, Proxy):
            return record_forward(ShardedQuantizedCollection.forward, self, features)
        ctx = self.create_context()
        return self.compute_and_output_dist(ctx, self.input_dist(ctx, features))

    def output_dtype(self) -> torch.dtype:
        """The dtype of the output."""
        return self._output_dtype

    def devices(self) -> dict[str, list[torch.device]]:
        """The device of each piece of each table; where it is to be, for one that is on meta."""
        return {
            config.name: [place.part.device for place in places]
            for config, places in zip(self._configs, self._tables.places, strict=True)
        }

    def sharded_parameter_names(self, prefix: str = "") -> Iterator[str]:
        """None: tables are buffers."""
        return iter(())

    def check(self) -> None:
        """Raise now what a bad id on CUDA would raise at the next forward."""
        for _, check in self._checks:
            check.raise_pending()

    def table_weights(self) -> dict[str, TableWeights]:
        """Payload uint8 [rows, row_bytes] and scales [rows, parts] (None without) of each whole table.

        Views of a table in one piece; a copy in the host's memory of a table in several.
        """
        found = {}
        for t, config in enumerate(self._configs):
            values = self._tables.whole(t)
            found[config.name] = (values.payload, values.scales if values.scales.shape[1] else None)
        return found

    def assign_table_weights(self, weights: Mapping[str, TableWeights]) -> None:
        """Copy in payload and scales of every whole table; pieces on meta come to life on the devices of the plan.

        Raises:
            KeyError: a table is missing.
            ValueError: payload or scales have another shape or dtype than the table, or it is pruned and on meta; names
                it. Nothing is changed.
        """
        if missing := [config.name for config in self._configs if config.name not in weights]:
            raise KeyError(f"no weights for tables {missing}")
        empty, values = self._tables.empty, []
        for served in self._tables.tables:
            payload, scales = weights[served.table.name]
            values.append(TableValues(payload, scales_as(scales, served.table, served.scale_dtype)))
            self._tables.require_fit(served, values[-1])
            if served.table.ids is not None and served.table.name in empty:
                raise ValueError(
                    f"table {served.table.name!r} is pruned: load a state dict, which has its index remapping"
                )
        for t, one in enumerate(values):
            self._tables.fill(t, one)
        self._show()

    def buffers_of_shards(self) -> dict[str, BufferOfShard]:
        """What each buffer is of the whole tables, by its name in this module."""
        found = {}
        for t, config in enumerate(self._configs):
            kind = self._plan[config.name].sharding_type
            for path, name, rows, cols, _ in self._buffers_of(t):
                found[f"{self._children_name}.{config.name}.{path}{name}"] = BufferOfShard(
                    config.name, name, rows, cols, kind
                )
        return found

    def _ready(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """The batch with equal batch sizes, once it is known that all can be looked up."""
        if empty := self._tables.empty:
            raise RuntimeError(
                f"tables {empty} are on meta: fill them with load_state_dict or assign_weights_to_tbe, or give"
                " shard_quant_model another sharding_device"
            )
        padded = pad_strides(features)
        # where the batch is, before any of it moves
        for names, check in self._checks:
            picked = pick_features(padded, names)
            check(picked.values(), picked.offsets(), padded=picked.capacity() is not None)
        return padded

    def _show(self) -> None:
        """Make the children, whose buffers are views of the pieces."""
        children = nn.ModuleDict()
        for t, config in enumerate(self._configs):
            table = self._tables.tables[t].table
            child = children[config.name] = ShardedRows(table, self._tables.places[t])
            for path, name, _, _, view in self._buffers_of(t):
                child.get_submodule(path.rstrip(".")).register_buffer(name, view, persistent=False)
        self.add_module(self._children_name, children)

    def _buffers_of(self, t: int) -> Iterator[tuple[str, str, tuple[int, int], tuple[int, int], Tensor]]:
        """Path below the table's child, name, rows and columns of the whole, and view of each buffer of a table."""
        tables = self._tables
        served, places = tables.tables[t], tables.places[t]
        for n, place in enumerate(places):
            path = "" if len(places) == 1 else f"shards.{n}."
            payload, scales = tables.planes(place)
            rows = place.shard.rows
            yield path, "weight", rows, byte_span(served.table, place.shard.cols), payload
            for part, name in enumerate(_SCALES[: scales.shape[1]]):
                yield path, name, rows, (0, 1), scales[:, part : part + 1]
        remapping = tables.remapping(t)
        if remapping is not None:
            yield "", "index_remapping", (0, remapping.shape[0]), (0, 1), remapping

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        if recurse:
            self._tables.move(fn)
            self._show()
        return super()._apply(fn, recurse)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for t, config in enumerate(self._configs):
            values = self._tables.whole(t)
            for name, tensor in zip(_names(self._tables.tables[t].table), _tensors(values), strict=True):
                destination[f"{prefix}{self._children_name}.{config.name}.{name}"] = tensor
        note_formats(destination, prefix, (served.table for served in self._tables.tables))

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        require_formats(local_metadata, (served.table for served in self._tables.tables))
        for t, config in enumerate(self._configs):
            path = f"{prefix}{self._children_name}.{config.name}."
            names = _names(self._tables.tables[t].table)
            missing = [path + name for name in names if path + name not in state_dict]
            missing_keys += missing
            try:
                if not missing:
                    self._tables.fill(t, _values({name: state_dict[path + name] for name in names}))
            except ValueError as error:
                error_msgs.append(str(error))
        self._show()

    def __getstate__(self) -> dict[str, Any]:
        # the buffers are views: kept, each of them would carry its whole plane into the copy
        return {**self.__dict__, "_modules": {**self._modules, self._children_name: None}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._show()


class ShardedRows(nn.Module):
    """The pieces of one quantized table as buffers, several in `shards`; its collection saves and loads them."""

    def __init__(self, table: QuantizedTable, places: Sequence[Place]) -> None:
        super().__init__()
        self._table, self._places = table, places
        if len(places) > 1:
            self.shards = nn.ModuleList(PieceOfRows(place) for place in places)

    def extra_repr(self) -> str:
        """Rows, dim, format and, of a table in one piece, the device."""
        table = self._table
        ids = "" if table.ids is None else f" for {table.ids} ids"
        where = f", on {self._places[0].part.device}" if len(self._places) == 1 else ""
        return f"{table.rows}{ids} x {table.dim}, {table.format}{where}"

    def _get_name(self) -> str:
        return "QuantizedRows"

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        known = {prefix + name for name in _names(self._table)}
        if strict:
            unexpected_keys += [name for name in state_dict if name.startswith(prefix) and name not in known]


class PieceOfRows(nn.Module):
    """A piece of a quantized table as buffers."""

    def __init__(self, place: Place) -> None:
        super().__init__()
        self._place = place

    def extra_repr(self) -> str:
        """Rows, columns and device."""
        (top, bottom), (left, right) = self._place.shard.rows, self._place.shard.cols
        return f"rows [{top}, {bottom}), columns [{left}, {right}), on {self._place.part.device}"


def _names(table: QuantizedTable) -> list[str]:
    """The names of a whole table's tensors in a state dict."""
    scales = _SCALES[: row_format(table.format).parts]
    return ["weight", *scales, *([] if table.ids is None else ["index_remapping"])]


def _tensors(values: TableValues) -> list[Tensor]:
    """A whole table's tensors in the order of `_names`."""
    scales = torch.split(values.scales, 1, dim=1) if values.scales.shape[1] else ()
    return [values.payload, *scales, *([] if values.remapping is None else [values.remapping])]


def _values(named: Mapping[str, Tensor]) -> TableValues:
    """The inverse of `_tensors`; scales that do not go together stay none, which no table with scales takes."""
    payload, parts = named["weight"], [named[name] for name in _SCALES if name in named]
    if not parts:
        scales = torch.empty(payload.shape[0], 0, dtype=torch.float16, device=payload.device)
    else:
        fits = all(part.dim() == 2 and part.shape[0] == payload.shape[0] for part in parts)
        scales = torch.cat(parts, dim=1) if fits else parts[0]
    return TableValues(payload, scales, named.get("index_remapping"))
