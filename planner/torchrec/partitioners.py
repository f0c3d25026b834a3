"""TorchRec's partitioners: a proposal has an option for each table, a partitioner gives every shard a rank.

Row-wise and data-parallel tables have a shard for every rank. The others are placed one group after the other, largest
first: what lies on one rank goes to the rank that has least time so far and room, what lies on one host to the host
that has least time so far and room. Ranks that have the same time are filled across hosts, so that no host's memory is
used up first. The default planner does not use them, it searches (`search/solve.py`).
"""

from __future__ import annotations

import heapq
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial

from ..errors import PlannerError, PlannerErrorType
from ..topology import DeviceHardware, Storage, Topology
from .perf_models import NoopPerfModel
from .sharding_option import PartitionByType, Shard, ShardingOption
from .types import Partitioner
from .utils import bytes_to_gb, mb_to_bytes, reset_shard_rank

logger = logging.getLogger(__name__)

# a search for less memory ends where less than this is to be gained
LEAST_GAIN_BYTES = mb_to_bytes(10)


class SortBy(Enum):
    """The measure by which groups are sorted, largest first."""

    STORAGE = "storage"
    PERF = "perf"


@dataclass
class ShardingOptionGroup:
    """Options that are placed together: one, or those of tables that depend on each other (towers).

    `param_count` is the number of tables in the module of the first, negative so that small modules come first.
    """

    sharding_options: list[ShardingOption]
    storage_sum: Storage
    perf_sum: float
    param_count: int


class GreedyPerfPartitioner(Partitioner):
    """Places groups largest first, each where there is least time so far.

    Args:
        sort_by: by what groups are large: device memory (then host memory), or time.
        balance_modules: groups of modules with few tables come first, so that each module is spread.
    """

    def __init__(self, sort_by: SortBy = SortBy.STORAGE, balance_modules: bool = False) -> None:
        self._sort_by = sort_by
        self._balance_modules = balance_modules

    def partition(
        self, proposal: list[ShardingOption], storage_constraint: Topology, hbm_per_device: int | None = None
    ) -> list[ShardingOption]:
        """The proposal, with the ranks of its shards filled in.

        Args:
            proposal: an option for each table, with estimates.
            storage_constraint: the devices and what they may hold. It is not changed.
            hbm_per_device: bytes that every device may hold instead; None or 0 as `storage_constraint` says.

        Raises:
            PlannerError: a shard found no room (`PlannerErrorType.PARTITION`); some ranks are filled in then.
            ValueError: an option asks for a `partition_by` that there is not.
        """
        devices = [
            DeviceHardware(d.rank, Storage(hbm_per_device or d.storage.hbm, d.storage.ddr, d.storage.ssd), d.perf)
            for d in storage_constraint.devices
        ]
        size = storage_constraint.intra_group_size
        hosts = [devices[size * k : size * (k + 1)] for k in range(storage_constraint.world_size // size)]
        for option in proposal:
            if option.partition_by == PartitionByType.UNIFORM.value:
                _place_uniform(option, devices)
        queue: _Queue | None = None
        for group in group_options(proposal, sort_by=self._sort_by, balance_modules=self._balance_modules):
            kind = group.sharding_options[0].partition_by
            if kind == PartitionByType.DEVICE.value:
                if queue is None:
                    queue = _Queue(devices, storage_constraint.local_world_size)
                _place_on_devices(_only(group), queue)
                continue
            # what follows changes devices behind the queue's back
            queue = None
            if kind == PartitionByType.HOST.value:
                _place_on_host(group, hosts)
            elif kind == PartitionByType.MULTI_HOST.value:
                _place_on_hosts(_only(group), hosts)
            else:
                raise ValueError(f"table {group.sharding_options[0].name}: partition_by {kind!r} is not a known kind")
        return proposal


class MemoryBalancedPartitioner(Partitioner):
    """Places by time, then again with less and less device memory as long as the plan is hardly slower.

    Args:
        max_search_count: how often to try with less.
        tolerance: how much slower than the first plan another may be, as a share of its time.
        balance_modules: as in `GreedyPerfPartitioner`.
    """

    def __init__(self, max_search_count: int = 10, tolerance: float = 0.02, balance_modules: bool = False) -> None:
        self._max_search_count = max_search_count
        self._tolerance = tolerance
        self._balance_modules = balance_modules

    def partition(self, proposal: list[ShardingOption], storage_constraint: Topology) -> list[ShardingOption]:
        """The proposal, with the ranks of its shards filled in.

        Raises:
            PlannerError: a shard found no room with all the memory that there is.
        """
        greedy = GreedyPerfPartitioner(SortBy.PERF, self._balance_modules)
        rating = NoopPerfModel(storage_constraint)
        greedy.partition(proposal, storage_constraint)
        slowest_ms = rating.rate(proposal) * (1 + self._tolerance)
        best = _ranks(proposal)
        used, largest = [0] * storage_constraint.world_size, 0
        for shard, rank in zip(_shards(proposal), best, strict=True):
            assert shard.storage is not None and rank is not None
            used[rank] += shard.storage.hbm
            largest = max(largest, shard.storage.hbm)
        # it works with `enough` bytes and not with `too_little`, or so we assume below the average
        enough, too_little = max(used), max(sum(used) // len(used), largest)
        for _ in range(self._max_search_count):
            if too_little + LEAST_GAIN_BYTES >= enough:
                break
            reset_shard_rank(proposal)
            hbm = (enough + too_little) // 2
            try:
                greedy.partition(proposal, storage_constraint, hbm)
                fits = rating.rate(proposal) <= slowest_ms
            except PlannerError:
                fits = False
            logger.info("%.3f GB a device %s", bytes_to_gb(hbm), "do" if fits else "are too little")
            if fits:
                enough, best = hbm, _ranks(proposal)
            else:
                too_little = hbm
        for shard, rank in zip(_shards(proposal), best, strict=True):
            shard.rank = rank
        return proposal


def group_options(
    sharding_options: Sequence[ShardingOption], *, sort_by: SortBy = SortBy.STORAGE, balance_modules: bool = False
) -> list[ShardingOptionGroup]:
    """The options that do not lie on all ranks, those of dependent tables together, largest first."""
    tables_of = Counter(option.path for option in sharding_options)
    groups: dict[str, ShardingOptionGroup] = {}
    for option in sharding_options:
        if option.partition_by == PartitionByType.UNIFORM.value:
            continue
        key = option.dependency or option.fqn
        if key not in groups:
            groups[key] = ShardingOptionGroup([], Storage(0, 0, 0), 0.0, -tables_of[option.path])
        group = groups[key]
        group.sharding_options.append(option)
        group.storage_sum += option.total_storage
        group.perf_sum += option.total_perf

    def size(group: ShardingOptionGroup) -> tuple[int, Storage | float]:
        first = group.param_count if balance_modules else 0
        return first, group.storage_sum if sort_by == SortBy.STORAGE else group.perf_sum

    # reversed, so that groups of a size stay in order
    return sorted(groups.values(), key=size, reverse=True)


class _Queue:
    """Devices in order of their time, those with the same time by their place on the host, then by rank."""

    def __init__(self, devices: Sequence[DeviceHardware], local_size: int) -> None:
        self._local_size = local_size
        self._devices = {device.rank: device for device in devices}
        self._heap = [self._entry(device) for device in devices]
        heapq.heapify(self._heap)

    def __len__(self) -> int:
        return len(self._devices)

    def take(self, storage: Storage) -> DeviceHardware | None:
        """Remove and return the first device that has room for this; None if none has."""
        passed, fitting = [], None
        while self._heap and fitting is None:
            entry = heapq.heappop(self._heap)
            device = self._devices[entry[-1]]
            if storage.fits_in(device.storage):
                fitting = device
            else:
                passed.append(entry)
        for entry in passed:
            heapq.heappush(self._heap, entry)
        return fitting

    def put(self, device: DeviceHardware) -> None:
        """Give a device back, with what it now does."""
        heapq.heappush(self._heap, self._entry(device))

    def largest(self) -> Storage:
        """The storage left on the emptiest device."""
        return max(device.storage for device in self._devices.values())

    def _entry(self, device: DeviceHardware) -> tuple[float, int, int]:
        return device.perf.total, device.rank % self._local_size, device.rank


def _place_on_devices(option: ShardingOption, queue: _Queue) -> None:
    # tables on SSD have one shard of a table on a rank at most
    apart = option.sharding_type == "column_wise" and option.compute_kernel == "key_value"
    if apart and option.num_shards > len(queue):
        raise _partition_error(
            f"table {option.name}: {option.num_shards} column shards need as many ranks, there are {len(queue)}"
        )
    held_back = []
    for shard in option.shards:
        assert shard.storage is not None
        device = queue.take(shard.storage)
        if device is None and apart:
            raise _partition_error(
                f"table {option.name}: no rank that has no column shard of it yet has room for {shard.storage}"
            )
        if device is None:
            raise _partition_error(
                f"Device partition failed. Couldn't find a rank for shard {shard} of table {option.name}, "
                f"largest device storage: {queue.largest()}"
            )
        _put(shard, device)
        if apart:
            held_back.append(device)
        else:
            queue.put(device)
    for device in held_back:
        queue.put(device)


def _place_uniform(option: ShardingOption, devices: Sequence[DeviceHardware]) -> None:
    """Shard i on device i."""
    if option.num_shards != len(devices):
        raise _partition_error(f"table {option.name} has {option.num_shards} shards for {len(devices)} devices")
    for shard, device in zip(option.shards, devices, strict=True):
        assert shard.storage is not None
        if not shard.storage.fits_in(device.storage):
            raise _partition_error(
                f"table {option.name}: a shard of {shard.storage} does not fit on rank {device.rank}, "
                f"which has {device.storage} left"
            )
        _put(shard, device)


def _place_on_host(group: ShardingOptionGroup, hosts: Sequence[Sequence[DeviceHardware]]) -> None:
    """All options of a group on one host: rows over its ranks, columns each to the rank with least time."""
    for host in sorted(hosts, key=_time_ms):
        room = sum((device.storage for device in host), Storage(0, 0, 0))
        if group.storage_sum.fits_in(room) and _placed(partial(_place_within, group.sharding_options, host), host):
            return
    names = ", ".join(option.name for option in group.sharding_options)
    raise _partition_error(f"can't find a host for sharding option group {names}, {group.storage_sum}")


def _place_within(options: Sequence[ShardingOption], host: Sequence[DeviceHardware]) -> None:
    for option in options:
        if option.sharding_type == "table_row_wise":
            _place_uniform(option, host)
        elif option.sharding_type == "table_column_wise":
            _place_on_devices(option, _Queue(host, len(host)))
        else:
            raise _partition_error(f"table {option.name}: {option.sharding_type} is not for one host")


def _place_on_hosts(option: ShardingOption, hosts: Sequence[Sequence[DeviceHardware]]) -> None:
    """Columns on neighbours in the order of time, rows of each over the ranks of a host.

    With at least as many columns as hosts every host is used, some more than once.
    """
    if option.sharding_type != "grid_shard":
        raise _partition_error(f"table {option.name}: {option.sharding_type} is not for several hosts")
    columns, rest = divmod(option.num_shards, len(hosts[0]))
    if rest:
        raise _partition_error(
            f"table {option.name}: {option.num_shards} shards are no multiple of {len(hosts[0])}, the ranks of a host"
        )
    in_order = sorted(hosts, key=_time_ms)
    for first in range(max(1, len(hosts) - columns + 1)):
        devices = [device for k in range(columns) for device in in_order[(first + k) % len(hosts)]]
        if _placed(partial(_place_uniform, option, devices), devices):
            return
    raise _partition_error(f"can't find hosts for sharding option group {option.name}, {option.total_storage}")


def _placed(place: Callable[[], None], devices: Sequence[DeviceHardware]) -> bool:
    """Whether `place` found room on these devices; if not, they are as before."""
    before = [(device.storage, device.perf) for device in devices]
    try:
        place()
    except PlannerError:
        for device, (storage, perf) in zip(devices, before, strict=True):
            device.storage, device.perf = storage, perf
        return False
    return True


def _put(shard: Shard, device: DeviceHardware) -> None:
    assert shard.storage is not None and shard.perf is not None
    shard.rank = device.rank
    # new objects: those of the topology, and those that `_placed` keeps, stay as they are
    device.storage = device.storage - shard.storage
    device.perf = device.perf + shard.perf


def _only(group: ShardingOptionGroup) -> ShardingOption:
    if len(group.sharding_options) > 1:
        names = ", ".join(option.name for option in group.sharding_options)
        raise _partition_error(f"tables {names} depend on each other and can only be placed on one host")
    return group.sharding_options[0]


def _time_ms(host: Sequence[DeviceHardware]) -> float:
    total = 0.0
    # one by one: how `sum` rounds depends on the version of Python
    for device in host:
        total += device.perf.total
    return total


def _partition_error(message: str) -> PlannerError:
    return PlannerError(message, PlannerErrorType.PARTITION)


def _shards(proposal: Sequence[ShardingOption]) -> Iterator[Shard]:
    return (shard for option in proposal for shard in option.shards)


def _ranks(proposal: Sequence[ShardingOption]) -> list[int | None]:
    return [shard.rank for shard in _shards(proposal)]
