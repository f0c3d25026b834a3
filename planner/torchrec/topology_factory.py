"""A topology's factory: the user's values go before the hardware's, and those before what the kernels need."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

from ..constants import BWD_COMPUTE_MULTIPLIER, WEIGHTED_FEATURE_BWD_COMPUTE_MULTIPLIER
from ..topology import (
    COMPUTE_DEVICES,
    GIB,
    GeneralizedCommsBandwidth,
    Topology,
)

# share by which the user's memory may differ from that of the hardware before a warning says so
_CAP_TOLERANCE = 0.05
_MEMORY_SPEEDS = ("hbm_mem_bw", "ddr_mem_bw", "ssd_mem_bw", "hbm_to_ddr_mem_bw")
_LINK_SPEEDS = ("intra_host_bw", "inter_host_bw")


class TopologyConfigBase(ABC):
    """The base of the configurations: `additional_params` has whatever they have no field for."""

    additional_params: dict[str, Any]

    def get_param(self, key: str, default: Any = None) -> Any:
        """One of `additional_params`."""
        return self.additional_params.get(key, default)

    def has_param(self, key: str) -> bool:
        """Is it there?"""
        return key in self.additional_params

    @abstractmethod
    def validate(self) -> None:
        """Raises ValueError, or warns, where the configuration describes no machine."""


@dataclass(frozen=True)
class HardwareConfig(TopologyConfigBase):
    """The machines' memory and bandwidths: bytes of a rank, and bytes per millisecond. None is unknown."""

    hbm_cap_bytes: int | None = None
    ddr_cap_bytes: int | None = None
    ssd_cap_bytes: int | None = None
    intra_host_bw: float | None = None
    inter_host_bw: float | None = None
    hbm_mem_bw: float | None = None
    ddr_mem_bw: float | None = None
    hbm_to_ddr_mem_bw: float | None = None
    ssd_mem_bw: float | None = None
    additional_params: dict[str, Any] = field(default_factory=dict)

    def get_validation_issues(self, compute_device: str | None = None) -> list[str]:
        """Values that cannot be, in words: these are detected ones, which the user's may replace."""
        positive = ["ddr_cap_bytes", *_LINK_SPEEDS, *_MEMORY_SPEEDS]
        if compute_device in ("cuda", "mtia"):
            positive.insert(0, "hbm_cap_bytes")
        known = {name: getattr(self, name) for name in positive if getattr(self, name) is not None}
        issues = [f"{name}={value} is non-positive" for name, value in known.items() if value <= 0]
        if self.ssd_cap_bytes is not None and self.ssd_cap_bytes < 0:
            issues.append(f"ssd_cap_bytes={self.ssd_cap_bytes} is negative")
        within, between = self.intra_host_bw, self.inter_host_bw
        if within is not None and between is not None and within < between:
            issues.append(f"intra_host_bw ({within:.0f}) < inter_host_bw ({between:.0f}): a host is faster within")
        return issues

    def validate(self, compute_device: str | None = None) -> None:
        """Warns of `get_validation_issues`."""
        issues = self.get_validation_issues(compute_device)
        if issues:
            warnings.warn("HardwareConfig: " + "; ".join(issues), stacklevel=2)


@dataclass(frozen=True)
class TrainerConfig(TopologyConfigBase):
    """The user's wishes. `additional_params` may have a `CustomTopologyData` as "custom_topology_data"."""

    world_size: int | None = None
    local_world_size: int | None = None
    hbm_cap_bytes: int | None = None
    ddr_cap_bytes: int | None = None
    ssd_cap_bytes: int | None = None
    is_dry_run: bool = False
    dry_run_hbm_bytes: int | None = None
    dry_run_ddr_bytes: int | None = None
    pod_size: int | None = None
    additional_params: dict[str, Any] = field(default_factory=dict)

    def validate(self) -> None:
        """Raises ValueError without a world size or with a pod larger than it."""
        if self.world_size is None:
            raise ValueError("TrainerConfig needs a world_size")
        if self.pod_size is not None and self.pod_size > self.world_size:
            raise ValueError(f"pod_size={self.pod_size} is more than world_size={self.world_size}")


@dataclass(frozen=True)
class KernelConfig(TopologyConfigBase):
    """The kernels' device, and the estimator's factor for their backward.

    `use_hardware_based_bandwidth`: speeds are those of `HardwareConfig`, not TorchRec's constants.
    """

    compute_device: str = "cuda"
    bwd_compute_multiplier: float = BWD_COMPUTE_MULTIPLIER
    weighted_feature_bwd_compute_multiplier: float = WEIGHTED_FEATURE_BWD_COMPUTE_MULTIPLIER
    uneven_sharding_perf_multiplier: float = 1.0
    use_hardware_based_bandwidth: bool = False
    generalized_comms_bandwidths: GeneralizedCommsBandwidth | None = None
    additional_params: dict[str, Any] = field(default_factory=dict)

    def validate(self) -> None:
        """Raises ValueError for an unknown device."""
        if self.compute_device not in COMPUTE_DEVICES:
            raise ValueError(f"compute_device must be one of {', '.join(COMPUTE_DEVICES)}, got {self.compute_device!r}")


class TopologyFactory:
    """Makes topologies of configurations."""

    @staticmethod
    def create_topology(
        trainer_config: TrainerConfig,
        hardware_config: HardwareConfig | None = None,
        kernel_config: KernelConfig | None = None,
    ) -> Topology:
        """A topology of the user's values, else the hardware's, else TorchRec's constants.

        Raises:
            ValueError: a configuration is not valid.
        """
        hardware, kernel = hardware_config or HardwareConfig(), kernel_config or KernelConfig()
        trainer_config.validate()
        hardware.validate(kernel.compute_device)
        kernel.validate()
        assert trainer_config.world_size is not None
        caps = {kind: _cap(kind, trainer_config, hardware) for kind in ("hbm", "ddr", "ssd")}
        measured = kernel.use_hardware_based_bandwidth
        links = kernel.generalized_comms_bandwidths
        names = [*_MEMORY_SPEEDS, *(_LINK_SPEEDS if links is None else ())] if measured else []
        speeds = {name: getattr(hardware, name) for name in names if getattr(hardware, name) is not None}
        return Topology(
            trainer_config.world_size,
            kernel.compute_device,
            caps["hbm"],
            caps["ddr"],
            caps["ssd"],
            trainer_config.local_world_size,
            trainer_config.pod_size,
            **speeds,
            bwd_compute_multiplier=kernel.bwd_compute_multiplier,
            custom_topology_data=trainer_config.get_param("custom_topology_data"),
            weighted_feature_bwd_compute_multiplier=kernel.weighted_feature_bwd_compute_multiplier,
            uneven_sharding_perf_multiplier=kernel.uneven_sharding_perf_multiplier,
            generalized_comms_bandwidths=links,
            created_by_factory=True,
        )


def _cap(kind: str, trainer: TrainerConfig, hardware: HardwareConfig) -> int | None:
    """Bytes of a rank, None for the default."""
    dry = getattr(trainer, f"dry_run_{kind}_bytes", None) if trainer.is_dry_run else None
    if dry is not None:
        return int(dry)
    asked: int | None = getattr(trainer, f"{kind}_cap_bytes")
    actual: int | None = getattr(hardware, f"{kind}_cap_bytes")
    if asked is None:
        return actual
    if actual and actual > 0 and not trainer.is_dry_run and abs(asked - actual) > _CAP_TOLERANCE * actual:
        warnings.warn(
            f"{kind}_cap: planning with the {asked / GIB:.1f} GiB of TrainerConfig, the hardware has"
            f" {actual / GIB:.1f} GiB",
            stacklevel=3,
        )
    return asked
