"""TorchRec's ratings of a placed plan, from the estimates of its shards: less is better."""

from __future__ import annotations

from ..topology import Topology
from .sharding_option import ShardingOption
from .types import PerfModel


class NoopPerfModel(PerfModel):
    """A plan is as good as its slowest rank, in milliseconds."""

    def __init__(self, topology: Topology) -> None:
        self._ranks = topology.world_size

    def rate(self, plan: list[ShardingOption]) -> float:
        """Milliseconds of the slowest rank; every shard has a rank and an estimate."""
        times = [0.0] * self._ranks
        for option in plan:
            for shard in option.shards:
                assert shard.rank is not None and shard.perf is not None
                times[shard.rank] += shard.perf.total
        return max(times)


class NoopStorageModel(PerfModel):
    """A plan is as good as the device memory of its fullest rank, in bytes."""

    def __init__(self, topology: Topology) -> None:
        self._ranks = topology.world_size

    def rate(self, plan: list[ShardingOption]) -> float:
        """Bytes of device memory on the fullest rank; every shard has a rank and an estimate."""
        used = [0] * self._ranks
        for option in plan:
            for shard in option.shards:
                assert shard.rank is not None and shard.storage is not None
                used[shard.rank] += shard.storage.hbm
        return max(used)
