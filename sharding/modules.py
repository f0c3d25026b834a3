"""`ShardedEmbeddingBagCollection` and `ShardedEmbeddingCollection`: the engine behind the two collections."""

from __future__ import annotations

from typing import Any

import torch

from shardwise.embeddings import EmbeddingCollection
from shardwise.jagged import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from .collection import ShardedCollection
from .owner import InFlight


class ShardedEmbeddingBagCollection(ShardedCollection):
    """An `EmbeddingBagCollection` over several ranks: same inputs, same `KeyedTensor`, same parameter names."""

    def forward(self, features: KeyedJaggedTensor | Exception) -> KeyedTensor:
        """Look this rank's batch up, together with the other ranks. Raises as `begin`."""
        return self.finish(self.begin(features))

    def finish(self, flight: InFlight) -> KeyedTensor:
        """The second half of a forward."""
        names = [name for names in self._names_by_table for name in names]
        values = self._exchanged(flight)
        if self._routes.dense:
            assert self._columns is not None
            dense = self._dense_pieces(flight)
            pieces = [
                dense[n] if n in dense else self._columns.of_lookup(values, n) for n in range(len(self._routes.lookups))
            ]
            values = torch.cat(pieces, dim=1)
        return KeyedTensor(names, self._routes.dims, values.to(self._policy.output_dtype))


class ShardedEmbeddingCollection(ShardedCollection):
    """An `EmbeddingCollection` over several ranks: same inputs, same dict of `JaggedTensor`, same parameter names."""

    def __init__(self, module: EmbeddingCollection, *args: Any, **kwargs: Any) -> None:
        super().__init__(module, *args, **kwargs)
        self._need_indices = module.need_indices()

    def forward(self, features: KeyedJaggedTensor | Exception) -> dict[str, JaggedTensor]:
        """Look this rank's batch up, together with the other ranks. Raises as `begin`."""
        return self.finish(self.begin(features))

    def finish(self, flight: InFlight) -> dict[str, JaggedTensor]:
        """The second half of a forward."""
        features: KeyedJaggedTensor = flight.features
        names = [name for names in self._names_by_table for name in names]
        order, values = self._rows.lookups, self._exchanged(flight).to(self._policy.output_dtype)
        rows = dict(zip(order, torch.split(values, [self._ids_of(flight, n) for n in order]), strict=True))
        rows.update({n: piece.to(values.dtype) for n, piece in self._dense_pieces(flight).items()})
        lengths, begin = features.lengths().view(len(features.keys()), features.stride()), features.offset_per_key()
        found = {}
        for n, name in enumerate(names):
            key = self._key_of(flight, n)
            ids = features.values()[begin[key] : begin[key + 1]] if self._need_indices else None
            found[name] = JaggedTensor(rows[n], weights=ids, lengths=lengths[key])
        return found
