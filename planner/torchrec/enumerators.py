"""TorchRec's enumerator: the sharding options of every table of a module."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from ..constraints import ParameterConstraints
from ..topology import Topology
from .components import Enumerator, ShardEstimator
from .constants import POOLING_FACTOR
from .estimators import EmbeddingPerfEstimator, EmbeddingStorageEstimator
from .offered_options import (
    allowed_kernels,
    allowed_types,
    cuts,
    partition_by,
    rectangles,
    row_shares,
)
from .sharding_option import Shard, SharderDataMap, ShardingOption
from .utils import build_sharder_data_map, sharder_name


class EmbeddingEnumerator(Enumerator):
    """Lists, for every table of the modules that a sharder knows, each type and kernel that is offered and allowed.

    Args:
        topology: machines.
        batch_size: of one rank.
        constraints: by table name.
        estimator: one or several that write costs; by default TorchRec's of time and of storage.
        use_exact_enumerate_order: modules in the order in which they stand; by default the last child comes first.
    """

    def __init__(
        self,
        topology: Topology,
        batch_size: int,
        constraints: dict[str, ParameterConstraints] | None = None,
        estimator: ShardEstimator | list[ShardEstimator] | None = None,
        use_exact_enumerate_order: bool | None = False,
    ) -> None:
        self._topology = topology
        self._batch_size = batch_size
        self._constraints = constraints or {}
        self._in_order = bool(use_exact_enumerate_order)
        if estimator is None:
            estimator = [
                EmbeddingPerfEstimator(topology, constraints),
                EmbeddingStorageEstimator(topology, constraints),
            ]
        self._estimators = estimator if isinstance(estimator, list) else [estimator]
        self._shares = row_shares(topology)
        self._has_ssd = any(device.storage.ssd > 0 for device in topology.devices)
        self._sharder_map: dict[str, Any] = {}
        self._sharder_data_map: SharderDataMap = {}
        self._last: tuple[Any, list[Any], list[ShardingOption]] | None = None

    @property
    def sharder_map(self) -> dict[str, Any]:
        """The sharders given last, by their modules' class as `utils.sharder_name` spells it."""
        return self._sharder_map

    @property
    def last_stored_search_space(self) -> list[ShardingOption] | None:
        """The options listed last."""
        return None if self._last is None else self._last[2]

    def enumerate(self, module: Any, sharders: list[Any]) -> list[ShardingOption]:
        """The options of every table, with their estimates; always in the same order.

        Raises:
            RuntimeError: constraints leave a table none.
        """
        if self._last is not None and self._last[0] is module and self._last[1] == sharders:
            return copy.deepcopy(self._last[2])
        self._sharder_map = {sharder_name(sharder.module_type): sharder for sharder in sharders}
        self._sharder_data_map = build_sharder_data_map(self._sharder_map)
        options = [
            option
            for path, part, sharder in self._shardable(module)
            for name, tensor in sharder.shardable_parameters(part).items()
            for option in self._options_of(name, tensor, path, part, sharder)
        ]
        self.populate_estimates(options)
        self._last = (module, list(sharders), copy.deepcopy(options))
        return options

    def populate_estimates(self, sharding_options: list[ShardingOption]) -> None:
        """Writes estimates into the options."""
        for estimator in self._estimators:
            estimator.estimate(sharding_options, self._sharder_data_map)

    def _shardable(self, module: Any) -> Iterator[tuple[str, Any, Any]]:
        """Path, module and sharder of the modules that sharders know; what is within them is theirs."""
        waiting = [("", module)]
        while waiting:
            path, part = waiting.pop(0 if self._in_order else -1)
            sharder = self._sharder_map.get(sharder_name(type(part)))
            if sharder is not None:
                yield path, part, sharder
            else:
                waiting += [(f"{path}.{name}" if path else name, child) for name, child in part.named_children()]

    def _options_of(self, name: str, tensor: Any, path: str, module: Any, sharder: Any) -> list[ShardingOption]:
        constraint, device = self._constraints.get(name), self._topology.compute_device
        asked = constraint or ParameterConstraints(pooling_factors=[POOLING_FACTOR])
        if asked.device_group and asked.device_group != device:
            return []
        processed = "FeatureProcessedEmbeddingBagCollection" in sharder_name(type(module))
        types = allowed_types(sharder.sharding_types(device), asked.sharding_types, processed)
        pairs = [
            (kind, kernel)
            for kind in types
            for kernel in allowed_kernels(sharder.compute_kernels(kind, device), asked.compute_kernels, self._has_ssd)
        ]
        if not pairs:
            raise RuntimeError(
                f"No available sharding type and compute kernel combination for {name!r}: on {device},"
                f" {type(sharder).__name__} offers {_offer(sharder, device)}; the constraint allows"
                f" sharding_types={asked.sharding_types}, compute_kernels={asked.compute_kernels}"
            )
        pooled, buckets = ShardingOption.module_pooled(module, path), _buckets(name, module)
        rows, columns = tensor.shape
        world, group = self._topology.world_size, self._topology.intra_group_size
        made = []
        for kind, kernel in pairs:
            cut = cuts(
                kind, rows, columns, world, group,
                min_partition=asked.min_partition, shares=self._shares, buckets=buckets,
            )  # fmt: skip
            option = ShardingOption(
                name=name,
                tensor=tensor,
                module=(path, module),
                input_lengths=asked.pooling_factors,
                batch_size=self._batch_size,
                sharding_type=kind,
                partition_by=partition_by(kind).value,
                compute_kernel=kernel,
                shards=[Shard(list(size), list(offset)) for size, offset in rectangles(*cut)],
                cache_params=copy.deepcopy(asked.cache_params),
                enforce_hbm=asked.enforce_hbm,
                stochastic_rounding=asked.stochastic_rounding,
                bounds_check_mode=asked.bounds_check_mode,
                dependency=_tower(name, path, module),
                is_pooled=pooled,
                feature_names=asked.feature_names,
                output_dtype=asked.output_dtype,
                key_value_params=copy.deepcopy(asked.key_value_params),
            )
            made.append(option)
        return made


def get_partition_by_type(sharding_type: str) -> str:
    """The value of `PartitionByType` of a sharding type.

    Raises:
        ValueError: the type is unknown.
    """
    return partition_by(sharding_type).value


def _offer(sharder: Any, device: str) -> str:
    return ", ".join(f"{kind}: {sharder.compute_kernels(kind, device)}" for kind in sharder.sharding_types(device))


def _buckets(name: str, module: Any) -> int | None:
    """Buckets of the rows of a virtual table."""
    configs = getattr(module, "embedding_bag_configs", None) or getattr(module, "embedding_configs", None)
    for config in configs() if configs else ():
        if config.name == name and getattr(config, "use_virtual_table", False):
            return getattr(config, "total_num_buckets", None)
    return None


def _tower(name: str, path: str, module: Any) -> str | None:
    """What the tables of a tower have in common: they are placed on one host."""
    kind = type(module).__name__
    if kind == "EmbeddingTower":
        return path
    if kind != "EmbeddingTowerCollection":
        return None
    for number, tower in enumerate(module.towers):
        if any(name in parameter.split(".") for parameter, _ in tower.named_parameters()):
            return f"{path}.tower_{number}"
    raise RuntimeError(f"table {name!r} is in none of the towers of {path!r}")
