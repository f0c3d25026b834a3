"""Collections whose tables are pruned in training: `ITEPEmbeddingBagCollection` and `ITEPEmbeddingCollection`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Proxy

from shardwise.embeddings.collections.bag_collection import EmbeddingBagCollection
from shardwise.embeddings.collections.collection import TableCollection
from shardwise.embeddings.collections.sequence_collection import EmbeddingCollection
from shardwise.embeddings.config import EmbeddingBagConfig, EmbeddingConfig
from shardwise.jagged import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from shardwise.jagged.scripting import NotScriptable
from shardwise.jagged.tracing import OneNode, record_forward

from .itep_modules import GenericITEPModule


class PrunedCollection(OneNode, NotScriptable, nn.Module):
    """What the two have in common: the collection by `_collection_name`, the module `_itep_module`, and `_iter` [].

    `_iter` counts batches in train(). An `itep_module` without lookups gets the collection.

    Raises:
        TypeError, ValueError: as `GenericITEPModule.attach`.
    """

    _collection_name: str
    _itep_module: GenericITEPModule
    _iter: Tensor

    def __init__(self, collection: nn.Module, itep_module: GenericITEPModule) -> None:
        super().__init__()
        self.add_module(self._collection_name, collection)
        self._itep_module = itep_module
        if not itep_module.lookups:
            itep_module.attach(collection)
        self.register_buffer("_iter", torch.tensor(0, device="cpu"))

    def forward(self, features: KeyedJaggedTensor) -> Any:
        """Give the batch's ids their rows and look those up.

        Raises:
            RefusedIndexError: an id is outside of its table's range.
            KeyError, IndexError, ValueError: as the collection.
            TypeError: the collection inside was sharded or quantized by itself.
        """
        if isinstance(features, Proxy):
            return record_forward(PrunedCollection.forward, self, features)
        collection = self.get_submodule(self._collection_name)
        if not isinstance(collection, TableCollection):
            raise TypeError(
                f"{type(self).__name__}: its collection was sharded or quantized without it, and would take rows for"
                f" ids of its own; give DistributedModelParallel the {type(self).__name__}Sharder too"
            )
        # .to(device) takes buffers along, and this one is read at every step
        self._iter = self._iter.cpu()
        rows = self._itep_module(features, int(self._iter))
        output = collection(rows)
        if self.training:
            self._iter += 1
        return output


class ITEPEmbeddingBagCollection(PrunedCollection):
    """An `EmbeddingBagCollection` whose tables have fewer rows than ids: the ids that are used most have rows.

    Example:
        >>> table = EmbeddingBagConfig(100, 8, "item", feature_names=["clicked"])
        >>> module = ITEPEmbeddingBagCollection(EmbeddingBagCollection([table]), GenericITEPModule({"item": 1000}))
        >>> batch = KeyedJaggedTensor(["clicked"], torch.tensor([999, 7, 7]), lengths=torch.tensor([2, 1]))
        >>> module(batch)["clicked"].shape
        torch.Size([2, 8])
    """

    _collection_name = "_embedding_bag_collection"
    _embedding_bag_collection: EmbeddingBagCollection

    def __init__(self, embedding_bag_collection: EmbeddingBagCollection, itep_module: GenericITEPModule) -> None:
        super().__init__(embedding_bag_collection, itep_module)

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Pooled rows. Raises as `PrunedCollection.forward`."""
        return super().forward(features)  # type: ignore[no-any-return]

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """Those of the collection."""
        return self._embedding_bag_collection.embedding_bag_configs()


class ITEPEmbeddingCollection(PrunedCollection):
    """An `EmbeddingCollection` whose tables have fewer rows than ids: the ids that are used most have rows."""

    _collection_name = "_embedding_collection"
    _embedding_collection: EmbeddingCollection

    def __init__(self, embedding_collection: EmbeddingCollection, itep_module: GenericITEPModule) -> None:
        super().__init__(embedding_collection, itep_module)

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Rows by feature. Raises as `PrunedCollection.forward`."""
        return super().forward(features)  # type: ignore[no-any-return]

    def embedding_configs(self) -> list[EmbeddingConfig]:
        """Those of the collection."""
        return self._embedding_collection.embedding_configs()

    def embedding_bag_configs(self) -> list[EmbeddingConfig]:
        """Those of the collection, by the name that TorchRec has."""
        return self.embedding_configs()
