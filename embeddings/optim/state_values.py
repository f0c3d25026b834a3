"""Values of an optimizer's state: numbers, tensors, sharded tensors, dicts of them; compared, then copied in place.

A sharded value is told by what it can do: `to_local` (DTensor) or `local_shards` (ShardedTensor, and the wrapper that a
DTensor of several pieces per rank holds). Nothing here talks to another rank: a rank fills the pieces that it has.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class _Pieces:
    """What a rank holds of a sharded value: `regions` says where each piece lies in the whole, if the value does."""

    layout: tuple[Any, ...]
    tensors: list[Tensor]
    regions: list[tuple[slice, ...]] | None


def plain_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of the dicts, not of the tensors; an object with a `state_dict` gives that."""
    found = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            found[key] = plain_values(value)
        else:
            found[key] = value.state_dict() if _is_stateful(value) else value
    return found


def require_same_states(path: str, mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
    """Raise ValueError unless every value of `mine` can take the one of `theirs` in place.

    Tensors need equal shapes, sharded ones equal pieces; a whole tensor fits a sharded one whose regions are known.
    """
    missing, unexpected = sorted(set(mine) - set(theirs)), sorted(set(theirs) - set(mine))
    if missing or unexpected:
        raise ValueError(f"optimizer states of {path} differ: missing {missing}, unexpected {unexpected}")
    for key, value in mine.items():
        loaded = theirs[key]
        if isinstance(value, Mapping):
            if not isinstance(loaded, Mapping):
                raise ValueError(f"{path}: state {key} is a dict, loaded {type(loaded).__name__}")
            require_same_states(f"{path}.{key}", value, loaded)
        elif isinstance(value, Tensor) and not _is_stateful(value):
            _require_fits(f"{path}: state {key}", value, loaded)


def load_values(mine: Any, theirs: Mapping[str, Any]) -> None:
    """Copy `theirs` into `mine`, which `require_same_states` found to fit: tensors in place, others as copies."""
    for key, value in mine.items():
        loaded = theirs[key]
        if isinstance(value, Mapping):
            load_values(value, loaded)
        elif _is_stateful(value):
            value.load_state_dict(loaded)
        elif isinstance(value, Tensor):
            _fill(value, loaded)
        else:
            mine[key] = deepcopy(loaded)


def fresh_value(key: str, value: Any, device: torch.device) -> Any:
    """A loaded value for a parameter that had none; counts of steps stay where they are, as in torch.optim."""
    if isinstance(value, Mapping):
        return {inner: fresh_value(inner, one, device) for inner, one in value.items()}
    if not isinstance(value, Tensor) or hasattr(value, "local_shards"):
        return deepcopy(value)
    if key == "step" or hasattr(value, "to_local"):
        return value.detach().clone()
    return value.detach().to(device, copy=True)


def _is_stateful(value: Any) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def _pieces_of(value: Any) -> _Pieces | None:
    local = value.to_local() if hasattr(value, "to_local") else value
    if hasattr(local, "local_shards"):
        shards = local.local_shards()
        if hasattr(local, "local_offsets"):
            tensors, offsets = list(shards), local.local_offsets()
        else:
            tensors, offsets = [one.tensor for one in shards], [one.metadata.shard_offsets for one in shards]
        corners = [(tuple(offset), tuple(one.shape)) for offset, one in zip(offsets, tensors, strict=True)]
        regions = [tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True)) for offset, size in corners]
        return _Pieces((tuple(value.size()), corners), tensors, regions)
    if local is value:
        return None
    layout = (tuple(value.shape), tuple(value.placements), tuple(value.device_mesh.shape), tuple(local.shape))
    return _Pieces(layout, [local], None)


def _require_fits(what: str, mine: Tensor, loaded: Any) -> None:
    own, given = _pieces_of(mine), _pieces_of(loaded)
    if own is not None and given is not None:
        if own.layout != given.layout:
            raise ValueError(f"{what} is sharded as {own.layout}, loaded {given.layout}: reshard one of them first")
        return
    if given is not None:
        raise ValueError(f"{what} is whole, loaded one is sharded: gather it first, by full_tensor() say")
    # a ShardedTensor has no other way to tell its size
    size = tuple(mine.size())
    if not isinstance(loaded, Tensor):
        if own is not None or math.prod(size) != 1 or not isinstance(loaded, (int, float)):
            raise ValueError(f"{what} is a tensor of shape {size}, loaded {loaded!r}")
    elif size != tuple(loaded.shape):
        raise ValueError(f"{what} has shape {size}, loaded {tuple(loaded.shape)}")
    elif own is not None and own.regions is None:
        raise ValueError(f"{what} is a DTensor, loaded a plain tensor: distribute it first, by distribute_tensor() say")


@torch.no_grad()
def _fill(mine: Tensor, loaded: Any) -> None:
    own, given = _pieces_of(mine), _pieces_of(loaded)
    if own is None:
        mine.detach().copy_(loaded) if isinstance(loaded, Tensor) else mine.detach().fill_(loaded)
    elif given is not None:
        for piece, source in zip(own.tensors, given.tensors, strict=True):
            piece.detach().copy_(source)
    else:
        for piece, region in zip(own.tensors, own.regions or [], strict=True):
            piece.detach().copy_(loaded[region])
