"""What TorchRec says of a device and of the links between devices: time, storage, bandwidth."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from .torchrec.constants import CROSS_NODE_BANDWIDTH, INTRA_NODE_BANDWIDTH


@dataclass(unsafe_hash=True)
class Perf:
    """Milliseconds a step, of one shard or of a rank."""

    fwd_compute: float
    fwd_comms: float
    bwd_compute: float
    bwd_comms: float
    input_dist_comms: float = 0.0
    prefetch_compute: float = 0.0

    @property
    def total(self) -> float:
        """All of it but `input_dist_comms`, as TorchRec counts."""
        return self.fwd_compute + self.bwd_compute + self.fwd_comms + self.bwd_comms + self.prefetch_compute

    def __add__(self, other: Perf) -> Perf:
        return Perf(
            self.fwd_compute + other.fwd_compute,
            self.fwd_comms + other.fwd_comms,
            self.bwd_compute + other.bwd_compute,
            self.bwd_comms + other.bwd_comms,
            self.input_dist_comms + other.input_dist_comms,
            self.prefetch_compute + other.prefetch_compute,
        )


@dataclass(order=True, unsafe_hash=True)
class Storage:
    """Bytes in the memory of the device, in that of the host, and on disk."""

    hbm: int
    ddr: int
    ssd: int = 0

    def __add__(self, other: Storage) -> Storage:
        return Storage(self.hbm + other.hbm, self.ddr + other.ddr, self.ssd + other.ssd)

    def __sub__(self, other: Storage) -> Storage:
        return Storage(self.hbm - other.hbm, self.ddr - other.ddr, self.ssd - other.ssd)

    def fits_in(self, other: Storage) -> bool:
        """Not more than `other` anywhere."""
        return self.hbm <= other.hbm and self.ddr <= other.ddr and self.ssd <= other.ssd


@dataclass(unsafe_hash=True)
class DeviceHardware:
    """A rank: the storage it has left and the time of what it was given; reservations and partitioners change both."""

    rank: int
    storage: Storage
    perf: Perf


class CustomTopologyData:
    """Ranks with different memory: bytes of each, by "hbm_cap", "ddr_cap" and "ssd_cap".

    Raises:
        ValueError: another key, or not one number for each rank.
    """

    supported_fields = ["ddr_cap", "hbm_cap", "ssd_cap"]

    def __init__(self, data: Mapping[str, list[int]], world_size: int) -> None:
        for key, caps in data.items():
            self._require_known(key)
            if len(caps) != world_size:
                raise ValueError(f"{key!r} has {len(caps)} numbers for a world of {world_size}: give one a rank")
        self._data = dict(data)
        self._world_size = world_size

    def get_data(self, key: str) -> list[int]:
        """Bytes of each rank.

        Raises:
            KeyError: they were not given.
        """
        self._require_known(key)
        return self._data[key]

    def has_data(self, key: str) -> bool:
        """Were they given?"""
        return key in self._data

    def _require_known(self, key: str) -> None:
        if key not in self.supported_fields:
            raise ValueError(f"{key!r} is not one of {self.supported_fields}")


class CollectiveType(Enum):
    """Kinds of exchange."""

    ALL_TO_ALL = "all_to_all"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_GATHER = "all_gather"
    ALL_REDUCE = "all_reduce"


class GeneralizedCommsBandwidth(ABC):
    """How fast ranks exchange, bytes per millisecond."""

    @abstractmethod
    def get_bw(self, local_world_size: int, world_size: int, collective_type: CollectiveType) -> float:
        """Of an exchange between `world_size` ranks, `local_world_size` to a host."""

    @property
    @abstractmethod
    def intra_host_bw(self) -> float:
        """Between ranks of a host."""

    @property
    @abstractmethod
    def inter_host_bw(self) -> float:
        """Between hosts."""


class BasicCommsBandwidths(GeneralizedCommsBandwidth):
    """Two speeds: within a host and between hosts."""

    def __init__(
        self, inter_host_bw: float = CROSS_NODE_BANDWIDTH, intra_host_bw: float = INTRA_NODE_BANDWIDTH
    ) -> None:
        self.name = "BasicCommsBandwidths"
        self._inter_host_bw, self._intra_host_bw = inter_host_bw, intra_host_bw

    @property
    def intra_host_bw(self) -> float:
        return self._intra_host_bw

    @property
    def inter_host_bw(self) -> float:
        return self._inter_host_bw

    def get_bw(self, local_world_size: int, world_size: int, collective_type: CollectiveType) -> float:
        """The slower link if the exchange leaves a host; an all-reduce always does, with a card for each rank."""
        if collective_type == CollectiveType.ALL_REDUCE:
            return self.inter_host_bw * local_world_size
        return self.intra_host_bw if world_size <= local_world_size else self.inter_host_bw

    def __str__(self) -> str:
        return f"{self.name}: inter_host_bw={self.inter_host_bw}, intra_host_bw={self.intra_host_bw}"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, BasicCommsBandwidths):
            return NotImplemented
        return (self._inter_host_bw, self._intra_host_bw) == (other._inter_host_bw, other._intra_host_bw)

    def __hash__(self) -> int:
        return hash((self._inter_host_bw, self._intra_host_bw))
