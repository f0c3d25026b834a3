"""The machines of a plan: how many ranks, how much memory each, how fast they read and talk."""

from __future__ import annotations

GIB = 1024**3


class Topology:
    """`world_size` ranks, `local_world_size` to a host, with what each can hold.

    Args:
        world_size: ranks.
        compute_device: "cuda" or "cpu".
        hbm_cap, ddr_cap: bytes of a rank.
    """

    def __init__(
        self,
        world_size: int,
        compute_device: str,
        hbm_cap: int | None = None,
        ddr_cap: int | None = None,
        ssd_cap: int | None = None,
        local_world_size: int | None = None,
    ) -> None:
        self.world_size = world_size
        self.compute_device = compute_device
        self.local_world_size = local_world_size or world_size
        self.hbm = [32 * GIB if hbm_cap is None else hbm_cap] * world_size
        self.ddr = [128 * GIB if ddr_cap is None else ddr_cap] * world_size
