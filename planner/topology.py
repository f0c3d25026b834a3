"""The machines of a plan: how many ranks, how much memory each, how fast they read and talk.

By TorchRec's names, with its defaults: time, storage, devices and the links between them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from operator import attrgetter
from typing import Any

from .constants import (
    BWD_COMPUTE_MULTIPLIER,
    CROSS_NODE_BANDWIDTH,
    DDR_CAP,
    DDR_MEM_BW,
    HBM_CAP,
    HBM_MEM_BW,
    HBM_TO_DDR_MEM_BW,
    INTRA_NODE_BANDWIDTH,
    SSD_CAP,
    SSD_MEM_BW,
    WEIGHTED_FEATURE_BWD_COMPUTE_MULTIPLIER,
)
from .constants_measured import CARDS, meant_card
from .hashes import hash_sha256_to_int


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


GIB = 1024**3
COMPUTE_DEVICES = ("cpu", "cuda", "mtia")
# GiB of device memory that a process finds on a card, rounded down
CARD_HBM_GIB = {name: int(card.memory_gib) for name, card in CARDS.items() if name != "cpu"}


def _given(attribute: str, doc: str) -> Any:
    """A value that a topology was made with: it is read, never set."""
    return property(attrgetter(attribute), doc=doc)


class Topology:
    """`world_size` ranks, `local_world_size` to a host, with what each can hold and how fast it is.

    Args:
        world_size: ranks.
        compute_device: "cuda", "cpu" or "mtia".
        hbm_cap, ddr_cap, ssd_cap: bytes of a rank; by default 32 GiB (or what `card` has, and 0 on a CPU), 128 GiB and
            2 TiB.
        local_world_size: ranks of a host; by default all.
        pod_size: hosts that a fast link joins.
        hbm_mem_bw, ddr_mem_bw, ssd_mem_bw, hbm_to_ddr_mem_bw, intra_host_bw, inter_host_bw: bytes per millisecond.
        bwd_compute_multiplier, weighted_feature_bwd_compute_multiplier, uneven_sharding_perf_multiplier: for TorchRec's
            estimator: backward over forward, the same of weighted tables on top, and uneven shards over even ones.
        custom_topology_data: memory of each rank, where ranks differ.
        generalized_comms_bandwidths: instead of `intra_host_bw` and `inter_host_bw`.
        created_by_factory: kept.
        card: the kind of GPU, one of `CARD_HBM_GIB`, for its memory and for our cost model.

    Raises:
        ValueError: an argument that describes no machine; the text says which and what it may be.

    Example:
        >>> topology = Topology(world_size=16, compute_device="cuda", local_world_size=8, card="h100")
        >>> topology.world_size, topology.local_world_size
        (16, 8)
        >>> topology.devices[0].storage.hbm // 2**30
        79
    """

    devices: list[DeviceHardware] = _given("_devices", "The ranks; a reservation takes from their storage.")
    compute_device: str = _given("_compute_device", "Where tables are looked up.")
    world_size: int = _given("_world_size", "Ranks.")
    local_world_size: int = _given("_local_world_size", "Ranks of a host.")
    hbm_mem_bw: float = _given("_hbm_mem_bw", "Of device memory, bytes per millisecond.")
    ddr_mem_bw: float = _given("_ddr_mem_bw", "Of host memory, bytes per millisecond.")
    ssd_mem_bw: float = _given("_ssd_mem_bw", "Of disk, bytes per millisecond.")
    hbm_to_ddr_mem_bw: float = _given("_hbm_to_ddr_mem_bw", "Between device and host, bytes per millisecond.")
    comms_bandwidths: GeneralizedCommsBandwidth = _given("_comms_bandwidths", "Between ranks, by kind of exchange.")
    bwd_compute_multiplier: float = _given("_bwd_compute_multiplier", "Backward over forward.")
    weighted_feature_bwd_compute_multiplier: float = _given(
        "_weighted_feature_bwd_compute_multiplier", "Backward of a weighted table over that of another."
    )
    uneven_sharding_perf_multiplier: float = _given(
        "_uneven_sharding_perf_multiplier", "Uneven row shards over even ones."
    )
    custom_topology_data: CustomTopologyData | None = _given(
        "_custom_topology_data", "Memory of each rank as it was given, where ranks differ."
    )
    intra_host_bw: float = _given("_comms_bandwidths.intra_host_bw", "Between ranks of a host, bytes per millisecond.")
    inter_host_bw: float = _given("_comms_bandwidths.inter_host_bw", "Between hosts, bytes per millisecond.")

    def __init__(
        self,
        world_size: int,
        compute_device: str,
        hbm_cap: int | None = None,
        ddr_cap: int | None = None,
        ssd_cap: int | None = None,
        local_world_size: int | None = None,
        pod_size: int | None = None,
        hbm_mem_bw: float = HBM_MEM_BW,
        ddr_mem_bw: float = DDR_MEM_BW,
        ssd_mem_bw: float = SSD_MEM_BW,
        hbm_to_ddr_mem_bw: float = HBM_TO_DDR_MEM_BW,
        intra_host_bw: float = INTRA_NODE_BANDWIDTH,
        inter_host_bw: float = CROSS_NODE_BANDWIDTH,
        bwd_compute_multiplier: float = BWD_COMPUTE_MULTIPLIER,
        custom_topology_data: CustomTopologyData | None = None,
        weighted_feature_bwd_compute_multiplier: float = WEIGHTED_FEATURE_BWD_COMPUTE_MULTIPLIER,
        uneven_sharding_perf_multiplier: float = 1.0,
        generalized_comms_bandwidths: GeneralizedCommsBandwidth | None = None,
        created_by_factory: bool = False,
        *,
        card: str | None = None,
    ) -> None:
        if world_size < 1:
            raise ValueError(f"world_size must be 1 or more, got {world_size}")
        if compute_device not in COMPUTE_DEVICES:
            raise ValueError(f"compute_device must be one of {', '.join(COMPUTE_DEVICES)}, got {compute_device!r}")
        local_world_size = local_world_size or world_size
        if world_size % local_world_size:
            raise ValueError(
                f"world_size={world_size} does not divide into hosts of local_world_size={local_world_size}"
            )
        if pod_size is not None and not 0 < pod_size <= world_size:
            raise ValueError(f"pod_size={pod_size} must be from 1 to world_size={world_size}")
        if card is not None and card not in CARD_HBM_GIB:
            raise ValueError(f"card {card!r} is not known, and hbm_cap says as much of its memory{meant_card(card)}")
        speeds = {
            "hbm_mem_bw": hbm_mem_bw, "ddr_mem_bw": ddr_mem_bw, "ssd_mem_bw": ssd_mem_bw,
            "hbm_to_ddr_mem_bw": hbm_to_ddr_mem_bw, "intra_host_bw": intra_host_bw, "inter_host_bw": inter_host_bw,
        }  # fmt: skip
        for name, speed in speeds.items():
            if speed <= 0:
                raise ValueError(f"{name} must be positive (bytes per millisecond), got {speed}")

        hbm_default = HBM_CAP if card is None else CARD_HBM_GIB[card] * GIB
        if compute_device == "cpu":
            hbm_cap = hbm_default = 0
        given = custom_topology_data
        hbm = _caps("hbm_cap", hbm_cap, hbm_default, given, world_size)
        ddr = _caps("ddr_cap", ddr_cap, DDR_CAP, given, world_size)
        ssd = _caps("ssd_cap", ssd_cap, SSD_CAP, given, world_size)
        self._devices = [
            DeviceHardware(rank, Storage(*caps), Perf(0, 0, 0, 0))
            for rank, caps in enumerate(zip(hbm, ddr, ssd, strict=True))
        ]
        self._world_size = world_size
        self._compute_device = compute_device
        self._local_world_size = local_world_size
        self._pod_size = pod_size
        self._hbm_mem_bw = hbm_mem_bw
        self._ddr_mem_bw = ddr_mem_bw
        self._ssd_mem_bw = ssd_mem_bw
        self._hbm_to_ddr_mem_bw = hbm_to_ddr_mem_bw
        self._comms_bandwidths = generalized_comms_bandwidths or BasicCommsBandwidths(inter_host_bw, intra_host_bw)
        self._bwd_compute_multiplier = bwd_compute_multiplier
        self._weighted_feature_bwd_compute_multiplier = weighted_feature_bwd_compute_multiplier
        self._uneven_sharding_perf_multiplier = uneven_sharding_perf_multiplier
        self._custom_topology_data = custom_topology_data
        self._created_by_factory = created_by_factory
        self.card = card

    @property
    def hbm(self) -> list[int]:
        """Bytes of device memory that each rank has left [W]."""
        return [device.storage.hbm for device in self._devices]

    @property
    def ddr(self) -> list[int]:
        """Bytes of host memory that each rank has left [W]."""
        return [device.storage.ddr for device in self._devices]

    @property
    def hosts(self) -> int:
        """Hosts."""
        return self._world_size // self._local_world_size

    @property
    def intra_group_size(self) -> int:
        """Ranks that a fast link joins: those of a pod, or of a host where there are no pods."""
        return self._local_world_size * (1 if self._pod_size is None else self._pod_size)

    def __repr__(self) -> str:
        many = f"{self.hosts} hosts of {self._local_world_size}" if self.hosts > 1 else "one host"
        what = self._compute_device if self.card is None else f"{self._compute_device} {self.card}"
        speeds = {
            "HBM": self._hbm_mem_bw,
            "DDR": self._ddr_mem_bw,
            "HBM to DDR": self._hbm_to_ddr_mem_bw,
            "within a host": self.intra_host_bw,
            "between hosts": self.inter_host_bw,
        }
        rates = ", ".join(f"{name} {speed * 1000 / 1e9:.4g}" for name, speed in speeds.items())
        return (
            f"Topology({self._world_size} ranks ({what}) on {many}; a rank has HBM {_range_gib(self.hbm)},"
            f" DDR {_range_gib(self.ddr)}; GB/s: {rates})"
        )

    def _hash(self) -> int:
        left = [[getattr(d.storage, tier) for d in self._devices] for tier in ("hbm", "ddr", "ssd")]
        return hash_sha256_to_int(self._facts(*left))

    def _facts(self, *storage: object) -> list[object]:
        """The facts that a plan depends on, in TorchRec's order; `storage` says what devices have."""
        return [
            self._world_size,
            self._compute_device,
            *storage,
            self._local_world_size,
            self.intra_group_size,
            self._hbm_mem_bw,
            self._ddr_mem_bw,
            self._ssd_mem_bw,
            self._hbm_to_ddr_mem_bw,
            self.intra_host_bw,
            self.inter_host_bw,
            self._bwd_compute_multiplier,
            self._weighted_feature_bwd_compute_multiplier,
            self._uneven_sharding_perf_multiplier,
        ]


def _caps(name: str, cap: int | None, default: int, given: CustomTopologyData | None, world_size: int) -> Sequence[int]:
    caps = given.get_data(name) if given and given.has_data(name) else [default if cap is None else cap] * world_size
    if len(caps) != world_size:
        raise ValueError(f"custom_topology_data has {len(caps)} numbers for {name}, the world {world_size} ranks")
    if min(caps) < 0:
        raise ValueError(f"{name} must be 0 or more bytes, got {min(caps)}")
    return caps


def _range_gib(caps: Sequence[int]) -> str:
    low, high = min(caps) / GIB, max(caps) / GIB
    return f"{low:.4g} GiB" if low == high else f"{low:.4g} to {high:.4g} GiB"


def placement(compute_device: str, rank: int, local_size: int) -> str:
    """Rank and device as plans write them, "rank:9/cuda:1"."""
    device = f"{compute_device}:{rank % local_size}" if compute_device in ("cuda", "mtia") else compute_device
    return f"rank:{rank}/{device}"


def round_to_nearest(x: int, unit: int) -> int:
    """The multiple of `unit` next to `x`."""
    return round(x / unit) * unit
