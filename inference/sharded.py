"""Sharding of a quantized model over the devices of one process."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from shardwise.planner.constraints import ParameterConstraints
from shardwise.planner.topology import Topology
from shardwise.planner.torchrec.reservations import FixedPercentageStorageReservation
from shardwise.sharding.comms.env import ShardingEnv
from shardwise.sharding.modules.placement import find_places, shard_places
from shardwise.sharding.plan.device_fallback import device_here, quiet_without_cuda
from shardwise.sharding.plan.module_sharder import ModuleSharder
from shardwise.sharding.plan.plan import EmbeddingComputeKernel, ShardingPlan, ShardingType
from shardwise.sharding.planning.planners import EmbeddingShardingPlanner
from shardwise.sharding.quant import (
    FUSED_PARAM_LENGTHS_TO_OFFSETS_LOOKUP,
    FUSED_PARAM_QUANT_STATE_DICT_SPLIT_SCALE_BIAS,
    FUSED_PARAM_REGISTER_TBE_BOOL,
    QuantEmbeddingBagCollectionSharder,
    QuantEmbeddingCollectionSharder,
    QuantFeatureProcessedEmbeddingBagCollectionSharder,
)
from shardwise.sharding.quant.managed_collision import (
    QuantManagedCollisionEmbeddingBagCollectionSharder,
    QuantManagedCollisionEmbeddingCollectionSharder,
)

# as TorchRec's but for the bounds check mode, which is that of the collection: by default a bad id raises
DEFAULT_FUSED_PARAMS: dict[str, Any] = {
    FUSED_PARAM_REGISTER_TBE_BOOL: True,
    FUSED_PARAM_QUANT_STATE_DICT_SPLIT_SCALE_BIAS: True,
    FUSED_PARAM_LENGTHS_TO_OFFSETS_LOOKUP: False,
}
DEFAULT_SHARDERS: list[ModuleSharder[Any]] = [
    QuantEmbeddingBagCollectionSharder(fused_params=DEFAULT_FUSED_PARAMS),
    QuantEmbeddingCollectionSharder(fused_params=DEFAULT_FUSED_PARAMS),
    QuantFeatureProcessedEmbeddingBagCollectionSharder(fused_params=DEFAULT_FUSED_PARAMS),
    QuantManagedCollisionEmbeddingBagCollectionSharder(QuantEmbeddingBagCollectionSharder(DEFAULT_FUSED_PARAMS)),
    QuantManagedCollisionEmbeddingCollectionSharder(QuantEmbeddingCollectionSharder(DEFAULT_FUSED_PARAMS)),
]
_TABLE_WISE = {
    "*": ParameterConstraints(
        sharding_types=[ShardingType.TABLE_WISE.value], compute_kernels=[EmbeddingComputeKernel.QUANT.value]
    )
}
# one lookup at a time is what a server that has not said more does
_BATCH_SIZE = 1


def shard_quant_model(
    model: nn.Module,
    world_size: int = 1,
    compute_device: torch.device | str = "cuda",
    sharding_device: torch.device | str = "meta",
    sharders: Sequence[ModuleSharder[Any]] | None = None,
    device_memory_size: int | None = None,
    constraints: Mapping[str, ParameterConstraints] | None = None,
    ddr_cap: int | None = None,
    sharding_plan: ShardingPlan | None = None,
) -> tuple[nn.Module, ShardingPlan]:
    """The model with its quantized collections in pieces on `world_size` devices of this process, and the plan.

    Outputs have the bits of the unsharded model. Collections are replaced in place; of a model that is a collection
    itself the sharded form is returned. Without CUDA what is to be on "cuda" is on the CPU, with one warning.

    Args:
        world_size: devices; rank r of "cuda" is cuda:r, all ranks of "cpu" are the CPU.
        compute_device: the kind of device that holds pieces and looks them up, "cuda" or "cpu".
        sharding_device: where outputs are; with "meta" they are on the first device, and the pieces have no memory
            before `load_state_dict` or `assign_weights_to_tbe` bring values.
        sharders: by default `DEFAULT_SHARDERS`.
        device_memory_size, ddr_cap: bytes of a GPU, by default what the first has, and of the host for each rank.
        constraints: by table name; by default every table is whole on one device.
        sharding_plan: taken as it is; by default the planner makes one.

    Raises:
        ValueError: there is no such kind of device, the plan does not fit the model, or a setting has no effect.
        PlannerError: no plan stays within memory and constraints.
    """
    kind, home = _kind(compute_device), torch.device(sharding_device)
    used = DEFAULT_SHARDERS if sharders is None else list(sharders)
    wanted = "cuda" if "cuda" in (kind, home.type) else "cpu"
    device_here(wanted, stacklevel=2)
    with quiet_without_cuda(wanted):
        if sharding_plan is None:
            planner = EmbeddingShardingPlanner(
                _topology(world_size, kind, device_memory_size, ddr_cap),
                _BATCH_SIZE,
                storage_reservation=FixedPercentageStorageReservation(0.0),
                constraints=dict(_TABLE_WISE if constraints is None else constraints),
            )
            sharding_plan = planner.plan(model, used)
        else:
            idle = {"constraints": constraints, "device_memory_size": device_memory_size, "ddr_cap": ddr_cap}
            if without := [name for name, value in idle.items() if value is not None]:
                raise ValueError(f"{', '.join(without)} have no effect beside a sharding_plan: leave out one of them")
        env = ShardingEnv.from_local(world_size, 0)
        places = find_places(model, used, sharding_plan, lambda _: env)
        if unknown := sorted(set(sharding_plan.plan) - {place.path for place in places}):
            has = sorted(place.path for place in places)
            raise ValueError(f"the plan names modules {unknown}, quantized collections of the model are {has}")
        if not places:
            warnings.warn(
                "nothing was sharded: the model has no quantized collection; quantize_inference_model makes them",
                stacklevel=2,
            )
        return shard_places(model, places, sharding_plan, home), sharding_plan


def _kind(device: torch.device | str) -> str:
    """The kind of the devices of all ranks.

    Raises:
        ValueError: it is a single device, or none that serves.
    """
    asked = torch.device(device)
    if asked.type not in ("cpu", "cuda"):
        raise ValueError(f"compute_device must be 'cuda' or 'cpu', got {str(device)!r}")
    if asked.index:
        raise ValueError(
            f"compute_device {str(device)!r} is one device: say 'cuda', of which rank r is cuda:r, or choose devices by"
            " CUDA_VISIBLE_DEVICES or a sharding_plan"
        )
    return asked.type


def _topology(world_size: int, kind: str, device_memory_size: int | None, ddr_cap: int | None) -> Topology:
    if kind == "cpu" and device_memory_size is not None:
        warnings.warn("device_memory_size has no effect on the CPU, whose memory is ddr_cap", stacklevel=3)
    hbm = device_memory_size
    if hbm is None and kind == "cuda" and torch.cuda.is_available():
        hbm = torch.cuda.get_device_properties(0).total_memory
    return Topology(world_size, kind, hbm, ddr_cap, local_world_size=world_size)
