"""Whether the ids of a batch lie in their tables and its bags fit its values, before they leave."""

from __future__ import annotations

import torch

from shardwise.embeddings.tables.id_check import passes_unchecked
from shardwise.jagged import KeyedJaggedTensor
from shardwise.jagged._segments import Beside
from shardwise.kernels import BoundsCheckMode, check_ids, new_guard, raise_from_guard, require_ids
from shardwise.kernels.cpu import ids_are_good

from .route import Division, Sending


def check_batch(
    features: KeyedJaggedTensor, sending: Sending, mode: BoundsCheckMode, divided: Division | None = None
) -> None:
    """Raise, or warn, for ids outside their tables; on a GPU the sizes of what was `divided` come with what is found.

    Raises:
        TypeError, IndexError, ValueError: as `EmbeddingBagCollection.forward` describes.
    """
    require_ids("feature ids", features.values())
    if not sending.used:
        return
    picked = features if sending.all_used else features.permute(sending.used)
    ids, offsets, padded = picked.values(), picked.offsets(), picked.capacity() is not None
    fatal = mode is BoundsCheckMode.FATAL
    if ids.is_cpu and fatal and ids_are_good(ids, offsets, sending.checked, padded):
        return
    if mode is BoundsCheckMode.IGNORE and passes_unchecked(ids, offsets, padded=padded):
        return
    guard, names = new_guard(ids.device), sending.checked_names
    check_ids(ids, offsets, sending.checked, guard, names=names, fatal=fatal, padded=padded)
    if ids.is_cuda:
        # their sizes, which must be known before they leave, come along; a bad offset explains wrong ones
        beside = Beside(guard if divided is None else torch.cat([guard, divided.sizes_there]))
        try:
            features._sizes(beside)
        finally:
            numbers = beside.read()
            raise_from_guard(guard, ids, offsets, sending.checked, names, fatal=fatal, numbers=numbers[:3])
        if divided is not None:
            divided.sizes = numbers[3:]
