"""Sharders: what can be done with the tables of a class of module, and the sharded module of a plan.

A sharder is chosen by a module's exact class. A class of yours that derives from a collection has a forward of its own,
which its sharded form would not run: it has no sharder, `sharder_of` warns, and `require_sharder` raises. Derive a
sharder whose `module_type` is your class to say that the collection's forward will do.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar, cast

import torch
from torch import Tensor, nn

from shardwise.embeddings import (
    LAMB,
    EmbeddingBagCollection,
    EmbeddingCollection,
    FusedEmbeddingBagCollection,
    FusedEmbeddingCollection,
    LarsSGD,
    PartialRowWiseAdam,
    PartialRowWiseLAMB,
    RowWiseAdagrad,
    optimizer_spec,
)

from ...planner.layout import CAPABILITIES, Shard, TableOptions
from ..comms.env import ShardingEnv
from ..engine.collection import ShardedCollection
from ..engine.held import Mark
from ..engine.id_map import IdMap
from ..plan.plan import (
    SERVED_KERNELS,
    EmbeddingComputeKernel,
    ParameterSharding,
    ShardingType,
    options_of,
    shards_of,
    tables_of,
)
from .sharded_collections import (
    ShardedEmbeddingBagCollection,
    ShardedEmbeddingCollection,
    ShardedFusedEmbeddingBagCollection,
)

M = TypeVar("M", bound=nn.Module)

# a table without an optimizer, as TorchRec has it
DEFAULT_OPTIMIZER: Mark = (torch.optim.SGD, {"lr": 0.01})
# FBGEMM's name of an optimizer -> ours, and what of fused_params it reads besides _COMMON
_MOMENTS = ("eps", "beta1", "beta2")
_OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], tuple[str, ...]]] = {
    "SGD": (torch.optim.SGD, ()),
    "ADAGRAD": (torch.optim.Adagrad, ("eps", "initial_accumulator_value")),
    "ROWWISE_ADAGRAD": (RowWiseAdagrad, ("eps", "initial_accumulator_value")),
    "ADAM": (torch.optim.Adam, _MOMENTS),
    "LAMB": (LAMB, _MOMENTS),
    "LARS_SGD": (LarsSGD, ("momentum", "eta")),
    "PARTIAL_ROWWISE_ADAM": (PartialRowWiseAdam, _MOMENTS),
    "PARTIAL_ROWWISE_LAMB": (PartialRowWiseLAMB, _MOMENTS),
}
_COMMON = (
    *("lr", "weight_decay", "weight_decay_mode", "stochastic_rounding", "seed"),
    *("gradient_clipping", "max_gradient"),
)


class ModuleSharder(ABC, Generic[M]):
    """What can be done with the tables of modules of class `module_type`.

    Args:
        qcomm_codecs_registry: codecs of the exchanges, as `get_qcomm_codecs_registry` makes them.
    """

    def __init__(self, qcomm_codecs_registry: Mapping[str, Any] | None = None) -> None:
        self._qcomm_codecs_registry = qcomm_codecs_registry

    @abstractmethod
    def shard(
        self,
        module: M,
        params: Mapping[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | str | None = None,
        module_fqn: str | None = None,
    ) -> nn.Module:
        """The sharded form of `module` by a plan of its tables; all ranks call this together."""

    @property
    @abstractmethod
    def module_type(self) -> type[M]:
        """The class of module that this sharder is for."""

    @property
    def qcomm_codecs_registry(self) -> Mapping[str, Any] | None:
        """Codecs of the exchanges, or None."""
        return self._qcomm_codecs_registry

    def shardable_parameters(self, module: M) -> dict[str, nn.Parameter]:
        """Parameters that a plan places, by their names in it."""
        return dict(module.named_parameters())

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Sharding types that a plan may use."""
        return [ShardingType.DATA_PARALLEL.value]

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        """Kernels that a plan may use for a table of this type."""
        return [EmbeddingComputeKernel.DENSE.value]

    def storage_usage(self, tensor: Tensor, compute_device_type: str, compute_kernel: str) -> dict[str, int]:
        """Bytes of a table by where they lie: "hbm" on a GPU, "ddr" on the CPU. Optimizer states are not counted.

        Raises:
            ValueError: the device type or the kernel is not served.
        """
        _require_device_type(compute_device_type)
        if compute_kernel not in SERVED_KERNELS:
            raise ValueError(f"compute_kernel {compute_kernel!r} is not one of {list(SERVED_KERNELS)}")
        where = "ddr" if compute_device_type == "cpu" else "hbm"
        return {where: tensor.element_size() * tensor.numel()}


class BaseEmbeddingSharder(ModuleSharder[M]):
    """A sharder of collections: every type on every device, one table per parameter.

    Args:
        fused_params: the optimizer of tables that have none in their backward, in FBGEMM's words: `optimizer` (its
            `EmbOptimType`, the name of one, or a class of ours), `learning_rate` (or `lr`, default 0.01), `eps`,
            `weight_decay`, ... A setting that the optimizer does not read, and one about caches and storage, has no
            effect: a warning names it.
        qcomm_codecs_registry: as `ModuleSharder`.

    Raises:
        ValueError: the optimizer has no fused rule, or a number is no good.
    """

    def __init__(
        self,
        fused_params: dict[str, Any] | None = None,
        qcomm_codecs_registry: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(qcomm_codecs_registry)
        self._fused_params = fused_params
        self._default_optimizer = optimizer_from(fused_params or {})

    @property
    def fused_params(self) -> dict[str, Any] | None:
        """As given."""
        return self._fused_params

    @property
    def default_optimizer(self) -> Mark:
        """Class and keyword arguments of the optimizer of tables that have none in their backward."""
        return self._default_optimizer

    def shardable_parameters(self, module: M) -> dict[str, nn.Parameter]:
        """Tables by name."""
        collection = cast(EmbeddingBagCollection, module)
        return dict(zip((config.name for config in tables_of(module)), collection._table_parameters(), strict=True))

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """All of them, on the CPU as on a GPU."""
        _require_device_type(compute_device_type)
        return [kind.value for kind in ShardingType if kind.value in CAPABILITIES[compute_device_type]]

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        """ "dense" of replicated tables (an optimizer in the backward is kept), "fused" of all others."""
        _require_device_type(compute_device_type)
        return list(CAPABILITIES[compute_device_type].get(sharding_type, ())[:1])

    def shard(
        self,
        module: M,
        params: Mapping[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | str | None = None,
        module_fqn: str | None = None,
    ) -> ShardedCollection:
        """The sharded form of a collection; all ranks call this together. `device` is the CPU unless given.

        Raises:
            TypeError: the module is not of class `module_type`.
            ValueError: the plan does not fit the module.
        """
        shards, options = self._cut(module, params, env, module_fqn)
        return self._build(module, shards, env, torch.device(device or "cpu"), options)

    def _cut(
        self, module: nn.Module, params: Mapping[str, ParameterSharding], env: ShardingEnv, module_fqn: str | None
    ) -> tuple[list[Shard], dict[str, TableOptions]]:
        """The shards of a module's plan, and how they work together. Raises as `shard`."""
        if not isinstance(module, self.module_type):
            raise TypeError(f"{type(self).__name__} shards {self.module_type.__name__}, got {type(module).__name__}")
        where = f" of module {module_fqn!r}" if module_fqn else ""
        sizes = {config.name: (config.num_embeddings, config.embedding_dim) for config in tables_of(module)}
        if set(params) != set(sizes):
            raise ValueError(f"the plan{where} has tables {sorted(params)}, the module {sorted(sizes)}")
        shards = [
            shard for name, size in sizes.items() for shard in shards_of(name, params[name], *size, env.world_size)
        ]
        return shards, {name: options_of(params[name]) for name in sizes}

    def _build(
        self,
        module: nn.Module,
        shards: Sequence[Shard],
        env: ShardingEnv,
        device: torch.device,
        options: Mapping[str, TableOptions],
        *,
        dedup: bool = False,
        id_maps: Mapping[str, IdMap] | None = None,
    ) -> ShardedCollection:
        make: Any = ShardedEmbeddingCollection
        if isinstance(module, EmbeddingBagCollection):
            fused = isinstance(module, FusedEmbeddingBagCollection)
            make = ShardedFusedEmbeddingBagCollection if fused else ShardedEmbeddingBagCollection
        made: ShardedCollection = make(
            module, shards, env, device,
            default_optimizer=self._default_optimizer, options=dict(options), codecs=self.qcomm_codecs_registry,
            dedup=dedup, id_maps=id_maps,
        )  # fmt: skip
        return made


class EmbeddingBagCollectionSharder(BaseEmbeddingSharder[EmbeddingBagCollection]):
    """The sharder of `EmbeddingBagCollection`."""

    @property
    def module_type(self) -> type[EmbeddingBagCollection]:
        """`EmbeddingBagCollection`."""
        return EmbeddingBagCollection

    @property
    def sharded_module_type(self) -> type[ShardedEmbeddingBagCollection]:
        """`ShardedEmbeddingBagCollection`."""
        return ShardedEmbeddingBagCollection


class EmbeddingCollectionSharder(BaseEmbeddingSharder[EmbeddingCollection]):
    """The sharder of `EmbeddingCollection`.

    Args:
        fused_params, qcomm_codecs_registry: as `BaseEmbeddingSharder`.
        use_index_dedup: send each id of a batch once, whatever number of times it occurs.
    """

    def __init__(
        self,
        fused_params: dict[str, Any] | None = None,
        qcomm_codecs_registry: Mapping[str, Any] | None = None,
        use_index_dedup: bool = False,
    ) -> None:
        super().__init__(fused_params, qcomm_codecs_registry)
        self._use_index_dedup = use_index_dedup

    @property
    def module_type(self) -> type[EmbeddingCollection]:
        """`EmbeddingCollection`."""
        return EmbeddingCollection

    @property
    def sharded_module_type(self) -> type[ShardedEmbeddingCollection]:
        """`ShardedEmbeddingCollection`."""
        return ShardedEmbeddingCollection

    def _build(
        self,
        module: nn.Module,
        shards: Sequence[Shard],
        env: ShardingEnv,
        device: torch.device,
        options: Mapping[str, TableOptions],
        *,
        dedup: bool = False,
        id_maps: Mapping[str, IdMap] | None = None,
    ) -> ShardedCollection:
        return super()._build(module, shards, env, device, options, dedup=self._use_index_dedup, id_maps=id_maps)


class _BringsOptimizer(BaseEmbeddingSharder[M]):
    """A sharder of collections that have their optimizer."""

    def __init__(
        self,
        fused_params: dict[str, Any] | None = None,
        qcomm_codecs_registry: Mapping[str, Any] | None = None,
    ) -> None:
        if fused_params:
            raise ValueError(
                f"{type(self).__name__}: fused_params {dict(fused_params)} have no effect: "
                "the collection has its optimizer"
            )
        super().__init__(fused_params, qcomm_codecs_registry)


class FusedEmbeddingBagCollectionSharder(_BringsOptimizer[FusedEmbeddingBagCollection]):
    """The sharder of `FusedEmbeddingBagCollection`, which brings its optimizer: `fused_params` raise ValueError."""

    @property
    def module_type(self) -> type[FusedEmbeddingBagCollection]:
        """`FusedEmbeddingBagCollection`."""
        return FusedEmbeddingBagCollection

    @property
    def sharded_module_type(self) -> type[ShardedFusedEmbeddingBagCollection]:
        """`ShardedFusedEmbeddingBagCollection`."""
        return ShardedFusedEmbeddingBagCollection


class FusedEmbeddingCollectionSharder(_BringsOptimizer[FusedEmbeddingCollection]):
    """The sharder of `FusedEmbeddingCollection`, which brings its optimizer: `fused_params` raise ValueError."""

    @property
    def module_type(self) -> type[FusedEmbeddingCollection]:
        """`FusedEmbeddingCollection`."""
        return FusedEmbeddingCollection


def get_default_sharders() -> list[ModuleSharder[Any]]:
    """Sharders of collections, trained and quantized ones, more than TorchRec's; towers need their own."""
    # here, as it derives from what this file has
    from ..quant import (
        QuantEmbeddingBagCollectionSharder,
        QuantEmbeddingCollectionSharder,
        QuantFeatureProcessedEmbeddingBagCollectionSharder,
    )
    from ..quant.managed_collision import (
        QuantManagedCollisionEmbeddingBagCollectionSharder,
        QuantManagedCollisionEmbeddingCollectionSharder,
    )
    from .managed_collision_sharders import (
        ManagedCollisionEmbeddingBagCollectionSharder,
        ManagedCollisionEmbeddingCollectionSharder,
    )
    from .nested import FeatureProcessedEmbeddingBagCollectionSharder

    # those of quantized tables are of a folder below, where pyright sees this module under another name
    sharders: list[Any] = [
        EmbeddingBagCollectionSharder(),
        EmbeddingCollectionSharder(),
        FusedEmbeddingBagCollectionSharder(),
        FusedEmbeddingCollectionSharder(),
        FeatureProcessedEmbeddingBagCollectionSharder(),
        ManagedCollisionEmbeddingBagCollectionSharder(),
        ManagedCollisionEmbeddingCollectionSharder(),
        QuantEmbeddingBagCollectionSharder(),
        QuantEmbeddingCollectionSharder(),
        QuantFeatureProcessedEmbeddingBagCollectionSharder(),
        QuantManagedCollisionEmbeddingBagCollectionSharder(),
        QuantManagedCollisionEmbeddingCollectionSharder(),
    ]
    return sharders


def sharder_of(module: nn.Module, sharders: Sequence[ModuleSharder[Any]]) -> ModuleSharder[Any] | None:
    """The first sharder for the module's exact class, or None; a class that only derives from one warns."""
    found = next((one for one in sharders if one.module_type is type(module)), None)
    near = [one for one in sharders if isinstance(module, one.module_type)]
    if found is None and near:
        warnings.warn(f"{_derived(module, near[0])}; it is not sharded", stacklevel=2)
    return found


def require_sharder(module: nn.Module, sharder: ModuleSharder[Any] | None = None) -> ModuleSharder[Any]:
    """`sharder` if it fits the module, or the default sharder for the module's exact class.

    Raises:
        TypeError: there is none.
    """
    if sharder is not None:
        if not isinstance(module, sharder.module_type):
            names = type(sharder).__name__, sharder.module_type.__name__, type(module).__name__
            raise TypeError("{} shards {}, got {}".format(*names))
        return sharder
    near = [one for one in get_default_sharders() if isinstance(module, one.module_type)]
    found = next((one for one in near if one.module_type is type(module)), None)
    if found is None:
        raise TypeError(
            _derived(module, near[0])
            if near
            else f"{type(module).__name__} holds no tables: expected a collection, or a sharder for it"
        )
    return found


def optimizer_from(fused_params: Mapping[str, Any]) -> Mark:
    """The optimizer class and keyword arguments that FBGEMM's settings mean; see `BaseEmbeddingSharder`."""
    given = {"lr" if name == "learning_rate" else name: value for name, value in fused_params.items()}
    asked = given.pop("optimizer", "SGD")
    if isinstance(asked, type) and issubclass(asked, torch.optim.Optimizer):
        mark = (asked, given)
    else:
        # FBGEMM's enum, its name or its value
        name = str(getattr(asked, "name", asked)).upper().removeprefix("EXACT_").replace("ROW_WISE", "ROWWISE")
        if name not in _OPTIMIZERS:
            raise ValueError(f"fused_params: optimizer {asked!r} is not served; these are: {', '.join(_OPTIMIZERS)}")
        kind, reads = _OPTIMIZERS[name]
        unread = sorted(set(given) - {*reads, *_COMMON})
        if unread:
            warnings.warn(f"fused_params: {', '.join(unread)} have no effect with {name}", stacklevel=3)
        mark = (kind, {name: value for name, value in given.items() if name not in unread})
    mark[1].setdefault("lr", DEFAULT_OPTIMIZER[1]["lr"])
    optimizer_spec(*mark, table="(fused_params)")
    return mark


def _derived(module: nn.Module, near: ModuleSharder[Any]) -> str:
    own, base = type(module).__name__, near.module_type.__name__
    return (
        f"{own} derives from {base}, and sharders are for exact classes, as the sharded form would not run the forward"
        f" of {own}: give a sharder whose module_type is {own}"
    )


def _require_device_type(device_type: str) -> None:
    if device_type not in CAPABILITIES:
        raise ValueError(f"compute_device_type must be {' or '.join(map(repr, CAPABILITIES))}, got {device_type!r}")
