"""Checks of the ids of a batch for tables in pieces: where the batch is, before any of it moves."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.embeddings import pick_features
from shardwise.embeddings.quant import QuantizedTable
from shardwise.embeddings.tables.async_guard import UnreadGuard, next_raised
from shardwise.jagged import KeyedJaggedTensor
from shardwise.kernels import BoundsCheckMode, Feature, check_ids, new_guard, pack_features, raise_from_guard


class IdCheck:
    """The check of all lookups of one mode; a fault is named by feature, table, sample and id.

    On a GPU it is raised at the next check unless `strict`, which waits for the device.
    """

    def __init__(self, lookups: Sequence[tuple[str, QuantizedTable]], mode: BoundsCheckMode, *, strict: bool) -> None:
        self._features = [feature for feature, _ in lookups]
        self._names = [f"feature {feature!r} (table {table.name!r})" for feature, table in lookups]
        # a pruned table has more ids than rows
        counts = [table.rows if table.ids is None else table.ids for _, table in lookups]
        self._sizes = pack_features([Feature(0, count, 1, 0) for count in counts])
        self._fatal, self._strict = mode is BoundsCheckMode.FATAL, strict
        self._is_on = mode is not BoundsCheckMode.IGNORE
        # several where threads look up at once
        self._unread: deque[UnreadGuard] = deque()

    def __call__(self, features: KeyedJaggedTensor) -> None:
        """Check a batch.

        Raises:
            KeyError: it lacks features.
            IndexError, ValueError, TypeError: as `shardwise.kernels.check_ids`.
        """
        picked = pick_features(features, self._features)
        if not self._is_on:
            return
        if not torch.compiler.is_compiling():
            self.raise_pending()
        ids, offsets = picked.values(), picked.offsets()
        guard, sizes = new_guard(ids.device), self._sizes.to(ids.device)
        padded = picked.capacity() is not None
        check_ids(ids, offsets, sizes, guard, names=self._names, fatal=self._fatal, padded=padded)
        # a graph has nobody to read what it left in a guard
        if ids.is_cuda and not torch.compiler.is_compiling():
            self._unread.append(UnreadGuard(guard).send(ids, offsets))
            if self._strict:
                self.raise_pending()

    def raise_pending(self) -> None:
        """Raise what earlier batches left in their guards on a GPU."""
        while (unread := next_raised(self._unread)) is not None:
            sizes: Tensor = self._sizes.to(unread.ids.device)
            raise_from_guard(unread.guard, unread.ids, unread.offsets, sizes, self._names, fatal=self._fatal)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_unread": deque()}
