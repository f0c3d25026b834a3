"""The index of an update, made right after the lookup of its batch instead of between the gradient and the update.

Ids are known in forward: on a GPU the index is made on a stream of its own, beside what the model does until the
gradient comes back. Off by default (`LookupPolicy.index_in_forward`); results have the same bits.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shardwise.kernels import update_index
from shardwise.kernels._op import capturing
from shardwise.kernels.configs import setting

if TYPE_CHECKING:
    from .table_group import TableGroup


class IndexAhead:
    """The index of the batch of one lookup, for its update; nothing where updates make none, on a CPU."""

    def __init__(
        self,
        group: TableGroup,
        slots: Tensor,
        offsets: Tensor,
        per_id_weights: Tensor | None,
        ids: Tensor | None,
        *,
        pooling: str,
        frozen: tuple[bool, ...],
    ) -> None:
        self._frozen, self._done = frozen, None
        features = group.trained(frozen)
        batch = (slots, offsets, per_id_weights, features)
        hashed = group.seed is not None and group.flat.dtype != torch.float32
        rest = (group.dims, group._segment_numbers, pooling)
        beside = _beside(slots.device)
        if beside is None:
            self._tensors = update_index(*batch, *rest, hashed=hashed, ids=ids)
            return
        beside.wait_stream(_current(slots.device))
        with torch.cuda.stream(beside):
            self._tensors = update_index(*batch, *rest, hashed=hashed, ids=ids)
            self._done = beside.record_event()
        # if no backward comes, nobody else keeps them for the stream
        _record((*batch, ids), beside)

    def tensors(self, frozen: tuple[bool, ...]) -> list[Tensor] | None:
        """What `fused_update` takes on the current stream; None if other tables are left alone now."""
        if frozen != self._frozen:
            return None
        if self._done is not None:
            here = _current(self._tensors[0].device)
            here.wait_event(self._done)
            _record(self._tensors, here)
        return self._tensors


def index_ahead(
    group: TableGroup,
    slots: Tensor,
    offsets: Tensor,
    per_id_weights: Tensor | None,
    ids: Tensor | None,
    *,
    pooling: str,
    frozen: tuple[bool, ...],
) -> IndexAhead | None:
    """The index of a batch that was looked up, if the group makes them in forward and nothing is compiled or captured.

    While gradients wait for a step there is no update that would take it.
    """
    if not setting("index.in_forward", group.policy.index_in_forward) or group.accumulation.waits:
        return None
    if torch.compiler.is_compiling() or not slots.shape[0] or (slots.is_cuda and capturing()):
        return None
    return IndexAhead(group, slots, offsets, per_id_weights, ids, pooling=pooling, frozen=frozen)


def _beside(device: torch.device) -> Any:
    return _stream(device) if device.type == "cuda" else None


@cache
def _stream(device: torch.device) -> Any:
    # one for all groups of a device: their indices are made one after another
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _current(device: torch.device) -> Any:
    return torch.cuda.current_stream(device)


def _record(tensors: Any, stream: Any) -> None:
    """Keep the memory of tensors until the stream is done with it."""
    for tensor in tensors:
        if tensor is not None:
            tensor.record_stream(stream)
