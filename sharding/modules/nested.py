"""Modules that hold collections, sharded as a whole: feature-processed collections and towers.

Only the collection inside is sharded. Feature processors run on the rank that has the batch, before its ids leave;
interactions run there too, once the rows have come. Both are ordinary layers, data parallel like all others.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.fx import Proxy

from shardwise.embeddings import (
    EmbeddingBagCollection,
    EmbeddingCollection,
    EmbeddingTower,
    EmbeddingTowerCollection,
    FeatureProcessedEmbeddingBagCollection,
    FeatureProcessorDictWrapper,
    FusedEmbeddingBagCollection,
    FusedEmbeddingCollection,
)
from shardwise.embeddings.collections.feature_processors import only_weighs, with_weights
from shardwise.jagged import KeyedJaggedTensor, KeyedTensor
from shardwise.jagged.tracing import record_forward

from ..comms.awaitable import LazyAwaitable
from ..comms.env import ShardingEnv
from ..engine.collection import ShardedCollection
from ..engine.stages import StagedModule, StepContext
from ..engine.step import Step
from ..plan.module_sharder import ModuleSharder, require_tables, require_type
from ..plan.plan import ParameterSharding
from .sharders import (
    BaseEmbeddingSharder,
    CollectionSharder,
    EmbeddingBagCollectionSharder,
    EmbeddingCollectionSharder,
    FusedEmbeddingBagCollectionSharder,
    FusedEmbeddingCollectionSharder,
)


class Nested(StagedModule[list[Any]]):
    """A module of which parts are sharded: its stages are theirs, part after part, on every rank in the same order."""

    @abc.abstractmethod
    def _parts(self) -> list[StagedModule[Any]]:
        """What is sharded of it."""

    @property
    def qcomm_codecs_registry(self) -> dict[str, Any]:
        """Codecs of the exchanges of its parts, which share them; empty without any."""
        return self._parts()[0].qcomm_codecs_registry

    def start(self, features: KeyedJaggedTensor | Exception) -> list[Any]:
        """Route this rank's batch and tell all ranks its sizes."""
        return [part.start(features) for part in self._parts()]

    def send_ids(self, step: list[Any]) -> None:
        """Wait for the sizes of all ranks, and send ids. Raises as `forward`, after all parts did what they can."""
        failure: Exception | None = None
        for part, of_part in zip(self._parts(), step, strict=True):
            try:
                part.send_ids(of_part)
            except Exception as error:
                # on all ranks: the other parts' sizes are on their way, and all take them
                failure = failure or error
        if failure is not None:
            raise failure

    def receive_ids(self, step: list[Any]) -> None:
        """Wait for the ids of all ranks."""
        for part, of_part in zip(self._parts(), step, strict=True):
            part.receive_ids(of_part)

    def prefetch(
        self, dist_input: list[Any], forward_stream: torch.Stream | None = None, ctx: StepContext | None = None
    ) -> bool:
        """Bring the rows of a batch whose ids are here into their slots; False where there is no room yet."""
        parts = zip(self._parts(), dist_input, strict=True)
        # all of them, also after one without room
        there = [part.prefetch(of_part, forward_stream) for part, of_part in parts]
        return all(there)

    def announce(self, dist_input: list[Any]) -> None:
        """Tell row stores of a batch whose ids are here."""
        for part, of_part in zip(self._parts(), dist_input, strict=True):
            part.announce(of_part)

    def look_up(self, step: list[Any], *, all_tables: bool = False) -> None:
        """Find rows and send them off."""
        for part, of_part in zip(self._parts(), step, strict=True):
            part.look_up(of_part, all_tables=all_tables)

    def output_dist(self, ctx: StepContext, output: list[Any]) -> Any:
        """The result, which waits for the rows of other ranks when it is used."""
        (part,), (of_part,) = self._parts(), output
        return part.output_dist(ctx, of_part)

    def fused_parameter_names(self) -> list[str]:
        """Parameters that the backward trains or that other ranks hold."""
        collections = [(name, child) for name, child in self.named_modules() if isinstance(child, ShardedCollection)]
        return [f"{name}.{param}" for name, child in collections for param in child.fused_parameter_names()]


class TowerAwaitable(LazyAwaitable[Tensor]):
    """What towers make of rows that are on their way: [B, sum of N_i]."""

    awaited_type = Tensor

    def __init__(self, interactions: Sequence[nn.Module], rows: Sequence[Any]) -> None:
        super().__init__()
        self._interactions, self._rows = interactions, rows

    def _wait_impl(self) -> Tensor:
        outputs = [interact(rows) for interact, rows in zip(self._interactions, self._rows, strict=True)]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)


class ShardedFeatureProcessedEmbeddingBagCollection(Nested):
    """A `FeatureProcessedEmbeddingBagCollection` whose collection is sharded: same inputs, outputs and names.

    Args:
        module: as it was, with the feature processors.
        collection: the sharded form of its collection.
    """

    _unsharded_type = FeatureProcessedEmbeddingBagCollection

    def __init__(self, module: FeatureProcessedEmbeddingBagCollection, collection: nn.Module) -> None:
        super().__init__()
        self._embedding_bag_collection = collection
        self._feature_processors = module._feature_processors
        self._feature_names = module._feature_names

    def forward(self, features: KeyedJaggedTensor | Exception) -> KeyedTensor:
        """Process this rank's batch and look it up, together with the other ranks.

        Raises:
            KeyError, IndexError, ValueError, TypeError: as the unsharded module, on all ranks.
        """
        if isinstance(features, Proxy):
            return record_forward(ShardedFeatureProcessedEmbeddingBagCollection.forward, self, features)  # type: ignore[no-any-return]
        processed = self._processed(features)
        waiting = cast(ShardedCollection, self._embedding_bag_collection).routed_ahead
        if waiting and waiting[0].awaits_weights and waiting[0].taken_by is features:
            # the batch that left for this call, whose weights are these
            waiting[0].taken_by = processed
        return self._embedding_bag_collection(processed)  # type: ignore[no-any-return]

    @property
    def only_weighs(self) -> bool:
        """Whether the processors leave ids and bags as they are, so that these can leave before the weights."""
        return only_weighs(self._feature_processors)

    def start_without_weights(self, features: KeyedJaggedTensor | Exception) -> Step:
        """Route the batch and tell all ranks its sizes; `forward` makes its weights and sends them.

        The step is one of the collection, for its `routed_ahead`.
        """
        try:
            if not isinstance(features, Exception):
                trained = any(param.requires_grad for param in self._feature_processors.parameters())
                # all ranks must know whether weights have gradients
                ones = torch.ones(features.values().shape[0], device=features.device())
                features = with_weights(features, ones.requires_grad_(trained and torch.is_grad_enabled()))
        except Exception as error:
            features = error
        step = cast(ShardedCollection, self._embedding_bag_collection).start(features)
        step.awaits_weights = True
        return step

    def _parts(self) -> list[StagedModule[Any]]:
        return [cast(ShardedCollection, self._embedding_bag_collection)]

    def start(self, features: KeyedJaggedTensor | Exception) -> list[Any]:
        """Process this rank's batch, route it and tell all ranks its sizes."""
        return super().start(self._processed(features))

    def _processed(self, features: KeyedJaggedTensor | Exception) -> KeyedJaggedTensor | Exception:
        # an error takes the place of the batch, so that no rank waits for this one
        if isinstance(features, Exception):
            return features
        processors = self._feature_processors
        try:
            if isinstance(processors, nn.ModuleDict):
                keys = features.keys()
                if missing := [name for name in self._feature_names if name not in keys]:
                    raise KeyError(f"features {missing} are not in the batch, which has {keys}")
                processors = FeatureProcessorDictWrapper(processors)
            processed: KeyedJaggedTensor = processors(features)
        except Exception as error:
            return error
        return processed


class ShardedEmbeddingTower(Nested):
    """An `EmbeddingTower` whose embedding module is sharded: same inputs, outputs and names."""

    _unsharded_type = EmbeddingTower

    def __init__(self, module: EmbeddingTower, embedding: nn.Module) -> None:
        super().__init__()
        self.embedding = embedding
        self.interaction = module.interaction

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Look this rank's batch up, together with the other ranks, and interact: [B, N]."""
        return self.interaction(self.embedding(*args, **kwargs))  # type: ignore[no-any-return]

    def _parts(self) -> list[StagedModule[Any]]:
        return [cast(ShardedCollection, self.embedding)]

    def output_dist(self, ctx: StepContext, output: list[Any]) -> TowerAwaitable:
        """What the tower makes of its rows, when it is used."""
        return TowerAwaitable([self.interaction], [super().output_dist(ctx, output)])


class ShardedEmbeddingTowerCollection(Nested):
    """An `EmbeddingTowerCollection` whose towers are sharded: same inputs, outputs and names."""

    _unsharded_type = EmbeddingTowerCollection

    def __init__(self, module: EmbeddingTowerCollection, towers: list[ShardedEmbeddingTower]) -> None:
        super().__init__()
        self.towers = nn.ModuleList(towers)
        self._input_params = module._input_params

    def forward(
        self, features: KeyedJaggedTensor | None = None, weighted_features: KeyedJaggedTensor | None = None
    ) -> Tensor:
        """The towers' outputs [B, N_i] side by side, [B, sum of N_i].

        Raises:
            ValueError: `features` or `weighted_features` are missing on a rank where a tower takes them; on all ranks.
        """
        inputs = self._inputs(features, weighted_features)
        return torch.cat([tower(*of_tower) for tower, of_tower in zip(self.towers, inputs, strict=True)], dim=1)

    def _inputs(
        self, features: KeyedJaggedTensor | None, weighted_features: KeyedJaggedTensor | None
    ) -> list[list[KeyedJaggedTensor | Exception]]:
        """What each tower takes; an error in the place of what is missing."""
        given = {"features": features, "weighted_features": weighted_features}
        inputs: list[list[KeyedJaggedTensor | Exception]] = []
        for i, wanted in enumerate(self._input_params):
            inputs.append([])
            for (name, batch), is_wanted in zip(given.items(), wanted, strict=True):
                if is_wanted:
                    missing = ValueError(f"tower {i} takes {name}: give them to forward")
                    inputs[i].append(missing if batch is None else batch)
        return inputs

    def _parts(self) -> list[StagedModule[Any]]:
        return [cast(ShardedEmbeddingTower, tower) for tower in self.towers]

    def start(  # type: ignore[override]
        self, features: KeyedJaggedTensor | None = None, weighted_features: KeyedJaggedTensor | None = None
    ) -> list[Any]:
        """Route each tower's batch and tell all ranks its sizes."""
        inputs = self._inputs(features, weighted_features)
        return [part.start(*of_part) for part, of_part in zip(self._parts(), inputs, strict=True)]

    def output_dist(self, ctx: StepContext, output: list[Any]) -> TowerAwaitable:
        """What the towers make of their rows side by side, when it is used."""
        towers = [cast(ShardedEmbeddingTower, tower) for tower in self.towers]
        rows = [Nested.output_dist(tower, ctx, of_tower) for tower, of_tower in zip(towers, output, strict=True)]
        return TowerAwaitable([tower.interaction for tower in towers], rows)


class FeatureProcessedEmbeddingBagCollectionSharder(CollectionSharder[FeatureProcessedEmbeddingBagCollection]):
    """The sharder of `FeatureProcessedEmbeddingBagCollection`.

    Args:
        ebc_sharder: what shards the collection; by default one with these codecs.
        qcomm_codecs_registry: as `ModuleSharder`.

    Raises:
        ValueError: both are given.
    """

    _module_type = FeatureProcessedEmbeddingBagCollection
    _sharded_type = ShardedFeatureProcessedEmbeddingBagCollection

    def __init__(
        self,
        ebc_sharder: EmbeddingBagCollectionSharder | None = None,
        qcomm_codecs_registry: Mapping[str, Any] | None = None,
    ) -> None:
        if ebc_sharder is not None and qcomm_codecs_registry is not None:
            raise ValueError("qcomm_codecs_registry: the ebc_sharder that is given has its own; give it to that one")
        self._ebc_sharder = ebc_sharder or EmbeddingBagCollectionSharder(qcomm_codecs_registry=qcomm_codecs_registry)
        super().__init__(self._ebc_sharder.fused_params, self._ebc_sharder.qcomm_codecs_registry)

    def shardable_parameters(self, module: FeatureProcessedEmbeddingBagCollection) -> dict[str, nn.Parameter]:
        """Tables of the collection by name."""
        return self._ebc_sharder.shardable_parameters(module._embedding_bag_collection)

    def shard(  # type: ignore[override]
        self,
        module: FeatureProcessedEmbeddingBagCollection,
        params: Mapping[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | str | None = None,
        module_fqn: str | None = None,
    ) -> ShardedFeatureProcessedEmbeddingBagCollection:
        """The sharded form of a feature-processed collection. As `BaseEmbeddingSharder.shard`."""
        require_type(self, module)
        inner = module._embedding_bag_collection
        sharder: BaseEmbeddingSharder[Any] = self._ebc_sharder
        if type(inner) is not sharder.module_type:
            sharder = _sharder_of(inner, self)
        collection = sharder.shard(inner, params, env, device, module_fqn)
        return ShardedFeatureProcessedEmbeddingBagCollection(module, collection).named_in_model(module_fqn)


class EmbeddingTowerSharder(CollectionSharder[EmbeddingTower]):
    """The sharder of `EmbeddingTower`, for any plan of its collection; arguments as `BaseEmbeddingSharder`."""

    _module_type = EmbeddingTower
    _sharded_type = ShardedEmbeddingTower

    def embedding_sharder(self, module: EmbeddingTower) -> ModuleSharder[Any]:
        """What shards the tower's embedding module.

        Raises:
            TypeError: nothing does.
        """
        return _sharder_of(module.embedding, self)

    def shardable_parameters(self, module: EmbeddingTower) -> dict[str, nn.Parameter]:
        """Tables of the tower by name."""
        return self.embedding_sharder(module).shardable_parameters(module.embedding)

    def shard(  # type: ignore[override]
        self,
        module: EmbeddingTower,
        params: Mapping[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | str | None = None,
        module_fqn: str | None = None,
    ) -> ShardedEmbeddingTower:
        """The sharded form of a tower. As `BaseEmbeddingSharder.shard`."""
        require_type(self, module)
        sharder = self.embedding_sharder(module)
        embedding = sharder.shard(module.embedding, params, env, device, module_fqn)
        return ShardedEmbeddingTower(module, embedding).named_in_model(module_fqn)


class EmbeddingTowerCollectionSharder(CollectionSharder[EmbeddingTowerCollection]):
    """The sharder of `EmbeddingTowerCollection`: a plan names the tables of all towers; arguments as its base."""

    _module_type = EmbeddingTowerCollection
    _sharded_type = ShardedEmbeddingTowerCollection

    def __init__(
        self,
        fused_params: dict[str, Any] | None = None,
        qcomm_codecs_registry: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(fused_params, qcomm_codecs_registry)
        self._tower_sharder = EmbeddingTowerSharder(fused_params, qcomm_codecs_registry)

    def shardable_parameters(self, module: EmbeddingTowerCollection) -> dict[str, nn.Parameter]:
        """Tables of all towers by name.

        Raises:
            ValueError: two towers have a table of one name.
        """
        found: dict[str, nn.Parameter] = {}
        for i, tower in enumerate(module.towers):
            assert isinstance(tower, EmbeddingTower)
            for name, param in self._tower_sharder.shardable_parameters(tower).items():
                if name in found:
                    raise ValueError(
                        f"tower {i}: another tower has a table {name!r}, and a plan names tables: rename it"
                    )
                found[name] = param
        return found

    def shard(  # type: ignore[override]
        self,
        module: EmbeddingTowerCollection,
        params: Mapping[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | str | None = None,
        module_fqn: str | None = None,
    ) -> ShardedEmbeddingTowerCollection:
        """The sharded form of a collection of towers. As `BaseEmbeddingSharder.shard`."""
        require_type(self, module)
        tables = self.shardable_parameters(module)
        require_tables(params, tables)
        towers = []
        for tower in module.towers:
            assert isinstance(tower, EmbeddingTower)
            mine = {name: params[name] for name in self._tower_sharder.shardable_parameters(tower)}
            towers.append(self._tower_sharder.shard(tower, mine, env, device, module_fqn))
        return ShardedEmbeddingTowerCollection(module, towers).named_in_model(module_fqn)


_OF_COLLECTIONS: dict[type[nn.Module], type[CollectionSharder[Any]]] = {
    EmbeddingBagCollection: EmbeddingBagCollectionSharder,
    EmbeddingCollection: EmbeddingCollectionSharder,
    FusedEmbeddingBagCollection: FusedEmbeddingBagCollectionSharder,
    FusedEmbeddingCollection: FusedEmbeddingCollectionSharder,
}


def _sharder_of(module: nn.Module, outer: BaseEmbeddingSharder[Any]) -> BaseEmbeddingSharder[Any]:
    """What shards a module by its exact class, with the settings of what shards the module around it."""
    given, codecs = outer.fused_params, outer.qcomm_codecs_registry
    make = _OF_COLLECTIONS.get(type(module))
    if make is not None:
        return make(given, codecs)
    if type(module) is FeatureProcessedEmbeddingBagCollection:
        return FeatureProcessedEmbeddingBagCollectionSharder(EmbeddingBagCollectionSharder(given, codecs))
    raise TypeError(
        f"{type(outer).__name__}: a {type(module).__name__} inside cannot be sharded: a collection can, or a"
        " FeatureProcessedEmbeddingBagCollection"
    )
