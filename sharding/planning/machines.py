"""The machines that this process is one of, as a `Topology`: ranks from the process group, memory from the devices."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist

from shardwise.planner.topology import CARD_HBM_GIB, GIB, Topology

from ..comms.env import get_local_size, number_in_environment

# where a container finds its limit, in bytes or "max"
_LIMIT_OF_CONTAINER = Path("/sys/fs/cgroup/memory.max")


def topology_here(
    compute_device: str | None = None, *, world_size: int | None = None, local_world_size: int | None = None
) -> Topology:
    """Machines like this one, as many as there are ranks.

    Args:
        compute_device: "cuda" or "cpu"; by default "cuda" where there is one.
        world_size: ranks; by default those of the process group, or WORLD_SIZE of the environment.
        local_world_size: ranks of a host; by default LOCAL_WORLD_SIZE of the environment, or all.

    Raises:
        RuntimeError: nobody says how many ranks there are.
    """
    if world_size is None:
        world_size = dist.get_world_size() if dist.is_initialized() else number_in_environment(("WORLD_SIZE",))
    if not world_size:
        raise RuntimeError(
            "nobody says for how many ranks to plan: call torch.distributed.init_process_group first, or give"
            " topology=Topology(world_size=..., compute_device=...)"
        )
    local = local_world_size or get_local_size(world_size)
    kind = compute_device or ("cuda" if torch.cuda.is_available() else "cpu")
    ddr = host_bytes() // local
    if kind == "cpu" or not torch.cuda.is_available():
        return Topology(world_size, kind, ddr_cap=ddr, local_world_size=local)
    name, hbm = torch.cuda.get_device_name(), torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    return Topology(world_size, kind, hbm, ddr, local_world_size=local, card=card_of(name, hbm))


def host_bytes() -> int:
    """The memory of this host, or what the container that this process is in may use of it."""
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError, ValueError):
        return min(whole, int(_LIMIT_OF_CONTAINER.read_text()))
    return whole


def card_of(name: str, hbm_bytes: int) -> str | None:
    """Which of the planner's cards a GPU is, by the name that CUDA has for it; None if it is none of them."""
    words = name.lower().replace("-", " ").split()
    near = [card for card in CARD_HBM_GIB if card.partition("-")[0] in words]
    # its memory, then whether it is joined by PCIe alone, as the name says
    return min(
        near,
        key=lambda card: (abs(CARD_HBM_GIB[card] * GIB - hbm_bytes) // GIB, ("pcie" in card) != ("pcie" in words)),
        default=None,
    )
