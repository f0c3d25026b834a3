"""Checks of the ids of a batch for tables in pieces: where the batch is, before any of it moves."""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.embeddings import LookupPolicy, pick_features
from shardwise.embeddings.quant import QuantizedTable
from shardwise.embeddings.tables.id_check import IdCheck
from shardwise.jagged import KeyedJaggedTensor
from shardwise.kernels import BoundsCheckMode, Feature, pack_features


class BatchCheck:
    """The check of all lookups of one mode; a fault is named by feature, table, sample and id.

    On a GPU it is raised at the next check unless `strict`, which waits for the device.
    """

    def __init__(self, lookups: Sequence[tuple[str, QuantizedTable]], mode: BoundsCheckMode, *, strict: bool) -> None:
        self._features = [feature for feature, _ in lookups]
        names = [f"feature {feature!r} (table {table.name!r})" for feature, table in lookups]
        # a pruned table has more ids than rows
        counts = [table.rows if table.ids is None else table.ids for _, table in lookups]
        sizes = pack_features([Feature(0, count, 1, 0) for count in counts])
        self._check = IdCheck(names, sizes, LookupPolicy(bounds_check=mode, strict=strict))
        self._is_on = mode is not BoundsCheckMode.IGNORE

    def __call__(self, features: KeyedJaggedTensor) -> None:
        """Check a batch.

        Raises:
            KeyError: it lacks features.
            IndexError, ValueError, TypeError: as `shardwise.kernels.check_ids`.
        """
        picked = pick_features(features, self._features)
        if self._is_on:
            ids = picked.values()
            sizes = self._check.features.to(ids.device)
            self._check(ids, picked.offsets(), padded=picked.capacity() is not None, features=sizes)

    def raise_pending(self) -> None:
        """Raise what earlier batches left in their guards on a GPU."""
        self._check.raise_pending()
