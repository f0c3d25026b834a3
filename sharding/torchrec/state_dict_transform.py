"""State dicts of sharded models for one process or another device, as TorchRec's inference packages them.

A *cut* value is a ShardedTensor or DTensor: in pieces over the ranks of its process group. All ranks call these
together.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..comms.agreement import Facts, agree, exchange_device, facts_of_all
from ..comms.exchange import Exchange
from ..comms.failures import agreed
from ..engine.state import (
    Box,
    box_of,
    local_pieces,
    part_of,
)


def state_dict_gather(src: Mapping[str, Any], dst: Mapping[str, Tensor]) -> None:
    """Fill the tensors of `dst` by the values of the same names in `src`, whole ones on every rank.

    What is cut in `src` is gathered on rank 0 of its process group alone, shard after shard; elsewhere that tensor of
    `dst` stays as it is. Values take the dtype and device of `dst`.

    Raises:
        KeyError: `src` lacks a name of `dst`.
        ValueError: a value is no tensor or has another shape, or ranks ask for different names; of what is cut, on all
            ranks of its process group.
    """
    groups: dict[dist.ProcessGroup, list[str]] = {}
    for name in dst:
        if _is_cut(src.get(name)):
            groups.setdefault(_group_of(src[name]), []).append(name)
    exchanges = {group: Exchange(group) for group in groups}
    for group, exchange in exchanges.items():

        def checked(names: list[str] = groups[group], leads: bool = exchange.rank == 0) -> tuple[None, Facts]:
            _check(src, dst, names if leads else [])
            return None, {"names to gather, in their order": str(names)}

        # what is wrong on one rank is raised on all, which would wait for it
        agree(exchange, exchange_device(group, torch.device("cpu")), checked)
    _check(src, dst, [])
    for group, names in groups.items():
        for name in names:
            _gather(exchanges[group], src[name], dst[name])
    with torch.no_grad():
        for name, target in dst.items():
            if not _is_cut(src[name]):
                target.copy_(src[name])


def _check(src: Mapping[str, Any], dst: Mapping[str, Tensor], gathered: Sequence[str]) -> None:
    """Raise what is wrong with whole values, and with those cut ones that come to this rank."""
    for name, target in dst.items():
        if name not in src:
            raise KeyError(f"state_dict_gather: src has no {name!r}")
        value = src[name]
        if not _is_cut(value) and not isinstance(value, Tensor):
            raise ValueError(f"{name!r}: a tensor is what can be gathered, not {type(value).__name__}")
        if (name in gathered or not _is_cut(value)) and tuple(target.shape) != _size(value):
            raise ValueError(f"{name!r}: src has shape {_size(value)}, dst {tuple(target.shape)}")


@torch.no_grad()
def _gather(exchange: Exchange, value: Any, target: Tensor) -> None:
    """The pieces of a cut value, one after another, into rank 0's `target`."""
    device = _device_of(value)
    local = dict(local_pieces(value))
    for rank, box in _pieces(exchange, value):
        shape = [high - low for low, high in box]
        size = math.prod(shape)
        if not size:
            continue
        piece = local[box].detach() if rank == exchange.rank else None
        if rank != 0:
            none = [0] * exchange.world_size
            send = torch.empty(0, dtype=_dtype(value), device=device) if piece is None else piece.reshape(-1)
            send_sizes = none if piece is None else [size, *none[1:]]
            sizes = none if exchange.rank else [size if other == rank else 0 for other in range(exchange.world_size)]
            came = exchange.numbers(send, send_sizes, sizes).wait()
            piece = came.view(shape) if exchange.rank == 0 else None
        if exchange.rank == 0:
            assert piece is not None
            part_of(target, tuple((0, n) for n in target.shape), box).copy_(piece)


def state_dict_all_gather_keys(state_dict: Mapping[str, Any], pg: dist.ProcessGroup) -> list[str]:
    """The names in the state dicts of all ranks, sorted, each once."""
    return sorted({name for names in _kinds(state_dict, pg) for name in names})


def _kinds(state_dict: Mapping[str, Any], pg: dist.ProcessGroup) -> list[Mapping[str, str]]:
    """The kinds of each rank's values by name: "cut", "whole" or the type of what is no tensor."""
    kinds = {
        name: "cut" if _is_cut(value) else "whole" if isinstance(value, Tensor) else type(value).__name__
        for name, value in state_dict.items()
    }
    return facts_of_all(Exchange(pg), exchange_device(pg, torch.device("cpu")), kinds)


def state_dict_to_device(
    state_dict: Mapping[str, Any], pg: dist.ProcessGroup, device: torch.device | str
) -> dict[str, Any]:
    """The state dict of this rank with its values, or its pieces of them, on `device`; names in their sorted order.

    A ShardedTensor that only other ranks have becomes one without a piece here.

    Raises:
        ValueError: on all ranks: a value is no tensor, a rank lacks what is whole or a DTensor on another, or a value
            is cut over ranks that `pg` does not have.
    """
    here = torch.empty(0, device=device).device
    exchange, told_on = Exchange(pg), exchange_device(pg, torch.device("cpu"))
    kinds = _kinds(state_dict, pg)
    names = sorted({name for of_rank in kinds for name in of_rank})
    ranks = dist.get_process_group_ranks(pg)
    metadata = {name: json.dumps(_described(state_dict[name])) for name in names if _is_cut(state_dict.get(name))}
    # what a rank lacks it has to know the cut of; the device of each rank travels with that
    lacking = [name for name in names if any(name not in of_rank for of_rank in kinds)]
    facts = facts_of_all(
        exchange, told_on, {"device": str(here), **{f"cut of {name}": metadata.get(name, "") for name in lacking}}
    )
    devices = dict(zip(ranks, [of_rank["device"] for of_rank in facts], strict=True))
    for name in names:
        for rank, of_rank in enumerate(kinds):
            if of_rank.get(name, "cut") not in ("cut", "whole"):
                raise agreed(ValueError(f"{name!r}: rank {rank} has {of_rank[name]}, which is no tensor"))
        cuts = [of_rank.get(f"cut of {name}") for of_rank in facts]
        if name in lacking and not any(cut and json.loads(cut)["pieces"] is not None for cut in cuts):
            without = [rank for rank, of_rank in enumerate(kinds) if name not in of_rank]
            raise agreed(
                ValueError(f"{name!r}: ranks {without} lack it, and only a ShardedTensor has no piece on a rank")
            )
        if name in lacking and name not in state_dict:
            metadata[name] = next(cut for cut in cuts if cut)
    return {name: _moved(name, state_dict.get(name), metadata.get(name), pg, here, devices) for name in names}


def _moved(
    name: str,
    value: Any,
    described: str | None,
    pg: dist.ProcessGroup,
    device: torch.device,
    devices: Mapping[int, str],
) -> Any:
    """`value` on `device`; None is a ShardedTensor, as `described`, that this rank has no piece of."""
    if described is None:
        return value.to(device)
    cut = json.loads(described)
    if cut["pieces"] is None:
        return _moved_dtensor(value, pg, device)
    from torch.distributed._shard.metadata import ShardMetadata
    from torch.distributed._shard.sharded_tensor.api import ShardedTensor
    from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties
    from torch.distributed._shard.sharded_tensor.shard import Shard
    from torch.distributed._shard.sharding_spec.api import EnumerableShardingSpec

    strange = sorted({rank for rank, _, _ in cut["pieces"]} - {*devices})
    if strange:
        raise agreed(
            ValueError(f"{name!r} has pieces on ranks {strange}, which are not in the process group: {[*devices]}")
        )
    pieces = [ShardMetadata(offsets, sizes, f"rank:{rank}/{devices[rank]}") for rank, offsets, sizes in cut["pieces"]]
    by_offsets = {tuple(piece.shard_offsets): piece for piece in pieces}
    local = [] if value is None else value.local_shards()
    dtype = getattr(torch, cut["dtype"])
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        [Shard(shard.tensor.to(device), by_offsets[tuple(shard.metadata.shard_offsets)]) for shard in local],
        ShardedTensorMetadata(pieces, torch.Size(cut["size"]), TensorProperties(dtype=dtype)),
        process_group=pg,
        sharding_spec=EnumerableShardingSpec(pieces),
    )


def _moved_dtensor(value: Any, pg: dist.ProcessGroup, device: torch.device) -> Any:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

    mesh = value.device_mesh
    if mesh.device_type != device.type:
        mesh = DeviceMesh.from_group(pg, device.type)
    return DTensor.from_local(
        value.to_local().to(device), mesh, value.placements, run_check=False, shape=value.shape, stride=value.stride()
    )


def _described(value: Any) -> dict[str, Any]:
    """Size, dtype and pieces (rank, offsets, sizes) of a cut value; a DTensor says its pieces by its mesh."""
    size, dtype = list(_size(value)), str(_dtype(value)).removeprefix("torch.")
    if not hasattr(value, "local_shards"):
        return {"size": size, "dtype": dtype, "pieces": None}
    pieces = [
        (shard.placement.rank(), [*shard.shard_offsets], [*shard.shard_sizes])
        for shard in value.metadata().shards_metadata
    ]
    return {"size": size, "dtype": dtype, "pieces": pieces}


def _is_cut(value: Any) -> bool:
    return hasattr(value, "local_shards") or hasattr(value, "to_local")


def _size(value: Any) -> tuple[int, ...]:
    return tuple(value.metadata().size if hasattr(value, "local_shards") else value.shape)


def _dtype(value: Any) -> torch.dtype:
    # a ShardedTensor's own attribute warns that the class will go
    dtype = value.metadata().tensor_properties.dtype if hasattr(value, "local_shards") else value.dtype
    assert isinstance(dtype, torch.dtype)
    return dtype


def _group_of(value: Any) -> dist.ProcessGroup:
    group = value._process_group if hasattr(value, "local_shards") else value.device_mesh.get_group()
    assert isinstance(group, dist.ProcessGroup)
    return group


def _device_of(value: Any) -> torch.device:
    """Where the ranks have their pieces: of one kind for all, so that they exchange them by one backend."""
    if not hasattr(value, "local_shards"):
        return torch.device(value.device_mesh.device_type)
    pieces = value.metadata().shards_metadata
    return torch.device(pieces[0].placement.device().type if pieces else "cpu")


def _pieces(exchange: Exchange, value: Any) -> list[tuple[int, Box]]:
    """Rank in the group and place of each piece, in one order on all ranks."""
    if hasattr(value, "local_shards"):
        ranks = dist.get_process_group_ranks(_group_of(value))
        shards = value.metadata().shards_metadata
        return [
            (ranks.index(shard.placement.rank()), box_of(shard.shard_offsets, shard.shard_sizes)) for shard in shards
        ]
    # each rank knows its own places in the mesh
    boxes = json.dumps([box for box, _ in local_pieces(value)])
    facts = facts_of_all(exchange, _device_of(value), {"pieces": boxes})
    return [
        (rank, tuple((low, high) for low, high in box))
        for rank, of_rank in enumerate(facts)
        for box in json.loads(of_rank["pieces"])
    ]
