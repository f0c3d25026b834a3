"""The machines of a plan: how many ranks, how much memory each, how fast they read and talk."""

from __future__ import annotations

from collections.abc import Sequence

from .constants_measured import CARDS
from .hardware import (
    BasicCommsBandwidths,
    CustomTopologyData,
    DeviceHardware,
    GeneralizedCommsBandwidth,
    Perf,
    Storage,
)
from .hashes import hash_sha256_to_int
from .torchrec.constants import (
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

GIB = 1024**3
COMPUTE_DEVICES = ("cpu", "cuda", "mtia")
# GiB of device memory that a process finds on a card, rounded down
CARD_HBM_GIB = {name: int(card.memory_gib) for name, card in CARDS.items() if name != "cpu"}


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
    """

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
            raise ValueError(f"card {card!r} is not known: give hbm_cap instead, or one of {', '.join(CARD_HBM_GIB)}")
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
    def devices(self) -> list[DeviceHardware]:
        """The ranks; a reservation takes from their storage."""
        return self._devices

    @property
    def hbm(self) -> list[int]:
        """Bytes of device memory that each rank has left [W]."""
        return [device.storage.hbm for device in self._devices]

    @property
    def ddr(self) -> list[int]:
        """Bytes of host memory that each rank has left [W]."""
        return [device.storage.ddr for device in self._devices]

    @property
    def compute_device(self) -> str:
        """Where tables are looked up."""
        return self._compute_device

    @property
    def world_size(self) -> int:
        """Ranks."""
        return self._world_size

    @property
    def local_world_size(self) -> int:
        """Ranks of a host."""
        return self._local_world_size

    @property
    def hosts(self) -> int:
        """Hosts."""
        return self._world_size // self._local_world_size

    @property
    def intra_group_size(self) -> int:
        """Ranks that a fast link joins: those of a pod, or of a host where there are no pods."""
        return self._local_world_size * (1 if self._pod_size is None else self._pod_size)

    @property
    def hbm_mem_bw(self) -> float:
        """Of device memory, bytes per millisecond."""
        return self._hbm_mem_bw

    @property
    def ddr_mem_bw(self) -> float:
        """Of host memory, bytes per millisecond."""
        return self._ddr_mem_bw

    @property
    def ssd_mem_bw(self) -> float:
        """Of disk, bytes per millisecond."""
        return self._ssd_mem_bw

    @property
    def hbm_to_ddr_mem_bw(self) -> float:
        """Between device and host, bytes per millisecond."""
        return self._hbm_to_ddr_mem_bw

    @property
    def intra_host_bw(self) -> float:
        """Between ranks of a host, bytes per millisecond."""
        return self._comms_bandwidths.intra_host_bw

    @property
    def inter_host_bw(self) -> float:
        """Between hosts, bytes per millisecond."""
        return self._comms_bandwidths.inter_host_bw

    @property
    def comms_bandwidths(self) -> GeneralizedCommsBandwidth:
        """Between ranks, by kind of exchange."""
        return self._comms_bandwidths

    @property
    def bwd_compute_multiplier(self) -> float:
        """Backward over forward."""
        return self._bwd_compute_multiplier

    @property
    def weighted_feature_bwd_compute_multiplier(self) -> float:
        """Backward of a weighted table over that of another."""
        return self._weighted_feature_bwd_compute_multiplier

    @property
    def uneven_sharding_perf_multiplier(self) -> float:
        """Uneven row shards over even ones."""
        return self._uneven_sharding_perf_multiplier

    @property
    def custom_topology_data(self) -> CustomTopologyData | None:
        """Memory of each rank as it was given, where ranks differ."""
        return self._custom_topology_data

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
        told = ", ".join(f"{name} {speed * 1000 / 1e9:.4g}" for name, speed in speeds.items())
        return (
            f"Topology({self._world_size} ranks ({what}) on {many}; a rank has HBM {_range_gib(self.hbm)},"
            f" DDR {_range_gib(self.ddr)}; GB/s: {told})"
        )

    def _hash(self) -> int:
        storages = [(d.storage.hbm, d.storage.ddr, d.storage.ssd) for d in self._devices]
        return hash_sha256_to_int([*self._said(), storages])

    def _said(self) -> list[object]:
        """What a plan depends on, storage apart."""
        return [
            self._world_size,
            self._compute_device,
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
