"""Collections whose tables give their rows to ids of any range: `ManagedCollisionEmbedding{Bag,}Collection`.

A forward maps the ids to slots, gives slots with a new id a new row, and looks the slots up.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor

from shardwise.embeddings.collections.bag_collection import EmbeddingBagCollection
from shardwise.embeddings.collections.collection import TableCollection
from shardwise.embeddings.collections.sequence_collection import EmbeddingCollection
from shardwise.embeddings.config import BaseEmbeddingConfig
from shardwise.jagged import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from .behind_maps import BehindMaps, require_tables_of_maps
from .collection import ManagedCollisionCollection


class BaseManagedCollisionEmbeddingCollection(
    BehindMaps[KeyedTensor | dict[str, JaggedTensor], KeyedJaggedTensor | None]
):
    """What the two have in common. A forward returns (embeddings, remapped ids or None), always a tuple.

    A row whose slot goes to another id begins anew: by the table's `init_fn`, with the optimizer states of a fused
    optimizer as at the start. (States of an optimizer that steps outside of the backward stay.) Its values depend on
    the table's name and the number of batches seen alone, so they need no state of a random generator.

    Args:
        embedding_module: the collection.
        managed_collision_collection: modules of the same tables.
        return_remapped_features: return the slots too, as a KJT.
        allow_in_place_embed_weight_update: renew rows behind autograd's back, for several forwards before a backward.

    Raises:
        ValueError: the two have different tables.
    """

    _managed_collision_collection: ManagedCollisionCollection
    _embedding_module: EmbeddingBagCollection | EmbeddingCollection

    def __init__(
        self,
        embedding_module: EmbeddingBagCollection | EmbeddingCollection,
        managed_collision_collection: ManagedCollisionCollection,
        return_remapped_features: bool = False,
        allow_in_place_embed_weight_update: bool = False,
    ) -> None:
        super().__init__()
        facts = ("num_embeddings", "embedding_dim", "feature_names")
        pooled = isinstance(embedding_module, EmbeddingBagCollection)
        who = "Embedding Bag Collection" if pooled else "Embedding Collection"
        require_tables_of_maps(who, embedding_module._configs, managed_collision_collection, facts)
        self._managed_collision_collection = managed_collision_collection
        self._embedding_module = embedding_module
        self._return_remapped_features = return_remapped_features
        self._allow_in_place_embed_weight_update = allow_in_place_embed_weight_update

    def _remap(self, features: KeyedJaggedTensor, mutate_miss_lengths: bool) -> KeyedJaggedTensor:
        """Slots in the place of ids; those that are another's now have a row that begins anew.

        Raises:
            TypeError: the collection inside was sharded or quantized by itself.
        """
        if not isinstance(self._embedding_module, TableCollection):
            raise TypeError(
                f"{type(self).__name__}: its collection was sharded or quantized without it, and would take slots for"
                f" ids of its own; give a sharder for {type(self).__name__} too, or quantize that"
            )
        slots: KeyedJaggedTensor = super()._remap(features, mutate_miss_lengths)
        self._renew(self._managed_collision_collection.evict())
        return slots

    def lookup_remapped_lengths_mask(self, features: KeyedJaggedTensor) -> Tensor:
        """Whether each bag has ids once they are remapped: bool [features of the tables * samples].

        In train() the ids are learned, as by a forward. Raises as a forward's remapping.
        """
        slots: KeyedJaggedTensor = self._managed_collision_collection(features)
        return slots.lengths().to(torch.bool)

    def _rows_of(self, slots: KeyedJaggedTensor) -> KeyedTensor | dict[str, JaggedTensor]:
        return self._embedding_module(slots)  # type: ignore[no-any-return]

    @torch.no_grad()
    def _renew(self, evicted: Mapping[str, Tensor | None]) -> None:
        """Have the rows of slots begin anew."""
        modules = self._managed_collision_collection.modules_by_table()
        for config in self._embedding_module._configs:
            slots = evicted[config.name]
            if slots is not None and slots.numel():
                values = fresh_rows(config, slots.numel(), modules[config.name].batches_seen())
                self._embedding_module.renew_rows(
                    config.name, slots, values, quietly=self._allow_in_place_embed_weight_update
                )


class ManagedCollisionEmbeddingBagCollection(BaseManagedCollisionEmbeddingCollection):
    """An `EmbeddingBagCollection` for ids of any range: (KeyedTensor, remapped ids or None).

    Example:
        >>> table = EmbeddingBagConfig(100, 8, "item", feature_names=["clicked"])
        >>> items = MCHManagedCollisionModule(100, "cpu", LFU_EvictionPolicy(), eviction_interval=1)
        >>> collection = ManagedCollisionCollection({"item": items}, [table])
        >>> module = ManagedCollisionEmbeddingBagCollection(EmbeddingBagCollection([table]), collection)
        >>> batch = KeyedJaggedTensor(["clicked"], torch.tensor([2**60, 7, 7]), lengths=torch.tensor([2, 1]))
        >>> pooled, _ = module(batch)
        >>> pooled["clicked"].shape
        torch.Size([2, 8])
    """

    def __init__(
        self,
        embedding_bag_collection: EmbeddingBagCollection,
        managed_collision_collection: ManagedCollisionCollection,
        return_remapped_features: bool = False,
        allow_in_place_embed_weight_update: bool = False,
    ) -> None:
        super().__init__(
            embedding_bag_collection, managed_collision_collection, return_remapped_features,
            allow_in_place_embed_weight_update,
        )  # fmt: skip

    @property
    def _embedding_bag_collection(self) -> EmbeddingBagCollection:
        assert isinstance(self._embedding_module, EmbeddingBagCollection)
        return self._embedding_module


class ManagedCollisionEmbeddingCollection(BaseManagedCollisionEmbeddingCollection):
    """An `EmbeddingCollection` for ids of any range: (JaggedTensor by feature, remapped ids or None)."""

    def __init__(
        self,
        embedding_collection: EmbeddingCollection,
        managed_collision_collection: ManagedCollisionCollection,
        return_remapped_features: bool = False,
        allow_in_place_embed_weight_update: bool = False,
    ) -> None:
        super().__init__(
            embedding_collection, managed_collision_collection, return_remapped_features,
            allow_in_place_embed_weight_update,
        )  # fmt: skip

    @property
    def _embedding_collection(self) -> EmbeddingCollection:
        assert isinstance(self._embedding_module, EmbeddingCollection)
        return self._embedding_module


def fresh_rows(config: BaseEmbeddingConfig, rows: int, step: int, *, first_row: int = 0) -> Tensor:
    """New values [rows, D] fp32 on the CPU, for slots of the shard that begins with `first_row`, in batch `step`.

    Those of `init_fn`, by a seed made of what is known everywhere: a run that goes on from a checkpoint, and every rank
    that holds columns of a table, makes the same rows.
    The global random generator is left as it was.
    """
    text = f"{config.name}:{first_row}:{step}"
    seed = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
    generator = torch.default_generator
    state = generator.get_state()
    generator.manual_seed(seed % 2**63)
    try:
        values = torch.empty(rows, config.embedding_dim, device="cpu")
        assert config.init_fn is not None
        # a function that fills in place may return None
        made = config.init_fn(values)
    finally:
        generator.set_state(state)
    return values if made is None else made
