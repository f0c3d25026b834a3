"""Sharders: which class each is for, what it offers, and what it hands to the engine."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from enum import Enum
from typing import Any, cast

import pytest
import torch
from torch import nn

from shardwise import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    FusedEmbeddingBagCollection,
    FusedEmbeddingCollection,
    RowWiseAdagrad,
    ShardingEnv,
)
from shardwise.embeddings import (
    LAMB,
    FeatureProcessedEmbeddingBagCollection,
    LarsSGD,
    PartialRowWiseAdam,
    PartialRowWiseLAMB,
    PositionWeightedModuleCollection,
)
from shardwise.embeddings.managed_collision import (
    BaseManagedCollisionEmbeddingCollection,
    LFU_EvictionPolicy,
    ManagedCollisionCollection,
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
    MCHManagedCollisionModule,
)
from shardwise.sharding import (
    BaseEmbeddingSharder,
    EmbeddingBagCollectionSharder,
    EmbeddingCollectionSharder,
    FusedEmbeddingBagCollectionSharder,
    FusedEmbeddingCollectionSharder,
    ModuleSharder,
    ParameterSharding,
    Shard,
    TableOptions,
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    get_default_sharders,
    row_wise,
)
from shardwise.sharding.modules import sharders
from shardwise.sharding.modules.default_sharders import require_sharder, sharder_of
from shardwise.sharding.modules.fused_params import optimizer_from

BAGS = [EmbeddingBagConfig(7, 4, "t"), EmbeddingBagConfig(9, 4, "u", feature_names=["f", "g"])]
SEQUENCES = [EmbeddingConfig(7, 4, "t"), EmbeddingConfig(9, 4, "u")]


def maps_of(tables: Any) -> ManagedCollisionCollection:
    """A map for each table."""
    maps = {t.name: MCHManagedCollisionModule(t.num_embeddings, "meta", LFU_EvictionPolicy(), 1) for t in tables}
    return ManagedCollisionCollection(maps, tables)


MODULES: dict[type[nn.Module], nn.Module] = {
    EmbeddingBagCollection: EmbeddingBagCollection(BAGS, device="meta"),
    EmbeddingCollection: EmbeddingCollection(SEQUENCES, device="meta"),
    FusedEmbeddingBagCollection: FusedEmbeddingBagCollection(BAGS, torch.optim.SGD, {"lr": 0.1}, device="meta"),
    FusedEmbeddingCollection: FusedEmbeddingCollection(SEQUENCES, torch.optim.SGD, {"lr": 0.1}, device="meta"),
    FeatureProcessedEmbeddingBagCollection: FeatureProcessedEmbeddingBagCollection(
        EmbeddingBagCollection(BAGS, True, "meta"), PositionWeightedModuleCollection({"f": 3}, "meta")
    ),
    ManagedCollisionEmbeddingBagCollection: ManagedCollisionEmbeddingBagCollection(
        EmbeddingBagCollection(BAGS, device="meta"), maps_of(BAGS)
    ),
    ManagedCollisionEmbeddingCollection: ManagedCollisionEmbeddingCollection(
        EmbeddingCollection(SEQUENCES, device="meta"), maps_of(SEQUENCES)
    ),
}
# replicas would give slots to the ids of their own batches
NOT_MAPPED = {"data_parallel", "table_row_wise", "grid_shard"}
ALL_TYPES = [
    "data_parallel", "table_wise", "column_wise", "row_wise", "table_row_wise", "table_column_wise", "grid_shard",
]  # fmt: skip


class Scaled(EmbeddingBagCollection):
    """A collection with a forward of its own."""

    def forward(self, features: Any) -> Any:
        return super().forward(features)


class Engine:
    """Stands for the sharded collections and keeps what it was given."""

    def __init__(self, module: nn.Module, shards: list[Shard], env: ShardingEnv, device: torch.device, **more: Any):
        self.module, self.shards, self.env, self.device, self.more = module, shards, env, device, more


TRAINS = [sharder for sharder in get_default_sharders() if isinstance(sharder, BaseEmbeddingSharder)]


@pytest.mark.parametrize("sharder", TRAINS, ids=lambda sharder: type(sharder).__name__)
def test_a_sharder_offers_every_type_on_every_device(sharder: ModuleSharder[Any]) -> None:
    """torchrec 1.8.0 has no row-wise types on the CPU, so that its own tutorial does not run there."""
    module = MODULES[sharder.module_type]
    params = sharder.shardable_parameters(module)
    assert {name: tuple(param.shape) for name, param in params.items()} == {"t": (7, 4), "u": (9, 4)}
    assert {id(param) for param in params.values()} == {
        id(param) for name, param in module.named_parameters() if "embedding" in name
    }
    mapped = isinstance(module, BaseManagedCollisionEmbeddingCollection)
    served = [kind for kind in ALL_TYPES if not mapped or kind not in NOT_MAPPED]
    for device in ("cpu", "cuda"):
        assert sharder.sharding_types(device) == served
        for kind in ALL_TYPES:
            assert sharder.compute_kernels(kind, device) == ["dense" if kind == "data_parallel" else "fused"]
    assert sharder.qcomm_codecs_registry is None


def test_storage_is_counted_where_a_table_lies() -> None:
    sharder, table = EmbeddingBagCollectionSharder(), torch.empty(7, 4, dtype=torch.float16, device="meta")
    assert sharder.storage_usage(table, "cuda", "fused") == {"hbm": 56}
    assert sharder.storage_usage(table, "cpu", "dense") == {"ddr": 56}
    # below the device
    assert sharder.storage_usage(table, "cuda", "fused_uvm_caching") == {"ddr": 56}
    assert sharder.storage_usage(table, "cpu", "key_value") == {"ssd": 56}
    with pytest.raises(ValueError, match="compute_kernel 'ssd_virtual_table' is not one of"):
        sharder.storage_usage(table, "cpu", "ssd_virtual_table")
    for call in (
        lambda: sharder.sharding_types("tpu"),
        lambda: sharder.compute_kernels("row_wise", "tpu"),
        lambda: sharder.storage_usage(table, "tpu", "fused"),
    ):
        with pytest.raises(ValueError, match="compute_device_type must be 'cpu' or 'cuda' or 'mtia', got 'tpu'"):
            call()


def test_sharders_are_chosen_by_exact_class() -> None:
    """A class of its own has a forward of its own, which the sharded form would pass over without a word."""
    defaults = get_default_sharders()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for kind, module in MODULES.items():
            assert type(sharder_of(module, defaults)).__name__ == f"{kind.__name__}Sharder"
            assert type(require_sharder(module)).__name__ == f"{kind.__name__}Sharder"
        assert sharder_of(nn.Linear(2, 2), defaults) is None
    scaled = Scaled(BAGS, device="meta")
    message = "Scaled derives from EmbeddingBagCollection, and sharders are for exact classes, .* module_type is Scaled"
    with pytest.warns(UserWarning, match=f"{message}; it is not sharded"):
        assert sharder_of(scaled, defaults) is None
    with pytest.raises(TypeError, match=message):
        construct_module_sharding_plan(scaled, {"t": data_parallel(), "u": data_parallel()}, world_size=1)
    with pytest.raises(TypeError, match="Linear holds no tables: expected a collection, or a sharder for it"):
        require_sharder(nn.Linear(2, 2))


def test_a_sharder_of_ones_own_serves_a_class_of_ones_own() -> None:
    class ScaledSharder(EmbeddingBagCollectionSharder):
        @property
        def module_type(self) -> type[Scaled]:
            return Scaled

    scaled, sharder = Scaled(BAGS, device="meta"), ScaledSharder()
    assert sharder_of(scaled, [*get_default_sharders(), sharder]) is sharder
    plan = construct_module_sharding_plan(scaled, {"t": data_parallel(), "u": row_wise()}, sharder, world_size=2)
    assert plan["u"].sharding_type == "row_wise"
    with pytest.raises(TypeError, match="ScaledSharder shards Scaled, got EmbeddingBagCollection"):
        sharder.shard(cast(Any, MODULES[EmbeddingBagCollection]), plan, ShardingEnv.from_local(1, 0))


def test_module_sharder_is_generic_and_does_what_torchrecs_does_by_default() -> None:
    """The tutorial casts to ModuleSharder[torch.nn.Module]."""
    assert cast(ModuleSharder[nn.Module], EmbeddingBagCollectionSharder()).module_type is EmbeddingBagCollection

    class Replicated(ModuleSharder[nn.Linear]):
        def shard(
            self, module: nn.Linear, params: Mapping[str, ParameterSharding], env: ShardingEnv, device: Any = None,
            module_fqn: str | None = None,
        ) -> nn.Module:  # fmt: skip
            return module

        @property
        def module_type(self) -> type[nn.Linear]:
            return nn.Linear

    sharder = Replicated({"codecs": 1})
    assert set(sharder.shardable_parameters(nn.Linear(2, 2))) == {"weight", "bias"}
    assert sharder.sharding_types("cpu") == ["data_parallel"]
    assert sharder.compute_kernels("data_parallel", "cpu") == ["dense"]
    assert sharder.qcomm_codecs_registry == {"codecs": 1}
    abstract: Any = ModuleSharder
    with pytest.raises(TypeError, match="abstract"):
        abstract()


@pytest.mark.parametrize(
    ("sharder", "engine", "dedup"),
    [
        (
            EmbeddingBagCollectionSharder({"learning_rate": 0.5}, {"all_to_all": 1}),
            "ShardedEmbeddingBagCollection",
            False,
        ),
        (EmbeddingCollectionSharder({"lr": 0.5}, {"all_to_all": 1}), "ShardedEmbeddingCollection", False),
        (EmbeddingCollectionSharder({"lr": 0.5}, {"all_to_all": 1}, True), "ShardedEmbeddingCollection", True),
    ],
)
def test_a_sharder_hands_shards_and_options_to_the_engine(
    sharder: BaseEmbeddingSharder[Any], engine: str, dedup: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharders, engine, Engine)
    module, env = MODULES[sharder.module_type], ShardingEnv.from_local(1, 0)
    where = {"u": row_wise(reduction="ordered"), "t": column_wise([0, 0], row_state="table")}
    plan = construct_module_sharding_plan(module, where, sharder, world_size=1, device_type="cpu")
    sharded: Any = sharder.shard(module, plan, env, "cpu", "model.tables")
    assert (sharded.module, sharded.env, sharded.device) == (module, env, torch.device("cpu"))
    # in the module's order, not the plan's
    assert sharded.shards == [
        Shard("t", 0, (0, 7), (0, 2)), Shard("t", 0, (0, 7), (2, 4)), Shard("u", 0, (0, 9), (0, 4)),
    ]  # fmt: skip
    assert sharded.more == {
        "default_optimizer": (torch.optim.SGD, {"lr": 0.5}),
        "options": {"t": TableOptions(row_state="table"), "u": TableOptions("ordered")},
        "codecs": {"all_to_all": 1},
        "dedup": dedup,
        "id_maps": None,
    }
    sharded = sharder.shard(module, plan, env)
    assert sharded.device == torch.device("cpu")
    del plan["u"]
    with pytest.raises(ValueError, match=r"the plan of module 'a.b' has tables \['t'\], the module \['t', 'u'\]"):
        sharder.shard(module, plan, env, module_fqn="a.b")


def test_one_switch_has_all_sharders_send_each_id_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torchrec.distributed.embedding.set_ec_index_dedup`: it holds for what is sharded while it is on."""
    monkeypatch.setattr(sharders, "ShardedEmbeddingCollection", Engine)
    sharder = EmbeddingCollectionSharder({"lr": 0.5})
    module: Any = MODULES[sharder.module_type]
    env = ShardingEnv.from_local(1, 0)
    plan = construct_module_sharding_plan(
        module, {"u": row_wise(), "t": row_wise()}, sharder, world_size=1, device_type="cpu"
    )
    seen = []
    for switch in (True, False):
        with pytest.warns(DeprecationWarning, match="use_index_dedup=...\\) says it for its own modules"):
            sharders.set_ec_index_dedup(switch)
        assert sharders.get_ec_index_dedup() is switch
        sharded: Any = sharder.shard(module, plan, env, "cpu")
        seen.append(sharded.more["dedup"])
    assert seen == [True, False]


# as FBGEMM's
EmbOptimType = Enum(
    "EmbOptimType",
    {
        "EXACT_SGD": "exact_sgd", "EXACT_ROWWISE_ADAGRAD": "exact_row_wise_adagrad", "ADAM": "adam",
        "PARTIAL_ROWWISE_LAMB": "partial_row_wise_lamb", "SHAMPOO": "shampoo",
    },
)  # fmt: skip


@pytest.mark.parametrize(
    ("fused_params", "kind", "kwargs"),
    [
        ({}, torch.optim.SGD, {"lr": 0.01}),
        ({"learning_rate": 0.5}, torch.optim.SGD, {"lr": 0.5}),
        ({"optimizer": EmbOptimType.EXACT_SGD, "lr": 0.5}, torch.optim.SGD, {"lr": 0.5}),
        (
            {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.02, "eps": 0.002, "weight_decay": 0.1},
            RowWiseAdagrad, {"lr": 0.02, "eps": 0.002, "weight_decay": 0.1},
        ),
        ({"optimizer": "exact_row_wise_adagrad"}, RowWiseAdagrad, {"lr": 0.01}),
        ({"optimizer": "EXACT_ADAGRAD", "eps": 1e-5}, torch.optim.Adagrad, {"lr": 0.01, "eps": 1e-5}),
        (
            {"optimizer": EmbOptimType.ADAM, "beta1": 0.8, "beta2": 0.99, "stochastic_rounding": False},
            torch.optim.Adam, {"lr": 0.01, "beta1": 0.8, "beta2": 0.99, "stochastic_rounding": False},
        ),
        ({"optimizer": "lamb", "eps": 1e-5}, LAMB, {"lr": 0.01, "eps": 1e-5}),
        ({"optimizer": "lars_sgd", "momentum": 0.8, "eta": 0.01}, LarsSGD, {"lr": 0.01, "momentum": 0.8, "eta": 0.01}),
        ({"optimizer": "partial_row_wise_adam", "beta1": 0.8}, PartialRowWiseAdam, {"lr": 0.01, "beta1": 0.8}),
        ({"optimizer": EmbOptimType.PARTIAL_ROWWISE_LAMB}, PartialRowWiseLAMB, {"lr": 0.01}),
        ({"optimizer": torch.optim.SGD, "momentum": 0.9}, torch.optim.SGD, {"lr": 0.01, "momentum": 0.9}),
        (
            {"gradient_clipping": True, "max_gradient": 2.0, "weight_decay": 0.1, "weight_decay_mode": "l2"},
            torch.optim.SGD,
            {
                "lr": 0.01, "gradient_clipping": True, "max_gradient": 2.0, "weight_decay": 0.1,
                "weight_decay_mode": "l2",
            },
        ),
    ],
)  # fmt: skip
def test_fused_params_name_an_optimizer(fused_params: dict[str, Any], kind: type, kwargs: dict[str, Any]) -> None:
    original = dict(fused_params)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert optimizer_from(fused_params) == (kind, kwargs)
    assert EmbeddingBagCollectionSharder(fused_params).fused_params == original == fused_params


def test_what_fused_params_do_not_do_is_said_once_by_name() -> None:
    """FBGEMM takes momentum and eps for SGD, and does nothing with them."""
    fused_params = {"momentum": 0.9, "eps": 1e-8, "uvm_host_mapped": True, "learning_rate": 0.5}
    with pytest.warns(
        UserWarning, match="fused_params: eps, momentum, uvm_host_mapped have no effect with SGD"
    ) as caught:
        assert EmbeddingBagCollectionSharder(fused_params)._default_optimizer == (torch.optim.SGD, {"lr": 0.5})
    assert [str(warning.filename) for warning in caught] == [__file__]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: EmbeddingBagCollectionSharder({"optimizer": EmbOptimType.SHAMPOO}),
            "fused_params: optimizer .*SHAMPOO.* is not served .FBGEMM does not serve it either.; these are: SGD",
        ),
        (
            lambda: EmbeddingBagCollectionSharder({"learning_rate": -1}),
            r"\(fused_params\).*: lr must be finite and not",
        ),
        (
            lambda: FusedEmbeddingBagCollectionSharder({"lr": 1}),
            r"FusedEmbeddingBagCollectionSharder: fused_params \{'lr': 1\} have no effect: the collection",
        ),
        (lambda: FusedEmbeddingCollectionSharder({"lr": 1}), "FusedEmbeddingCollectionSharder: fused_params"),
    ],
)
def test_fused_params_that_make_no_optimizer_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_sharders_say_what_they_make() -> None:
    assert EmbeddingBagCollectionSharder().sharded_module_type.__name__ == "ShardedEmbeddingBagCollection"
    assert EmbeddingCollectionSharder().sharded_module_type.__name__ == "ShardedEmbeddingCollection"
    assert [sharder.module_type for sharder in TRAINS] == list(MODULES)


@pytest.mark.parametrize("kind", [EmbeddingBagCollectionSharder, FusedEmbeddingCollectionSharder])
def test_an_order_of_sharding_types_has_no_effect_and_says_so(kind: Any) -> None:
    """It was an unknown argument."""
    with pytest.warns(UserWarning, match="sharded_module_order_overwrite has no effect: tables of all sharding types"):
        kind(None, None, ["ROW_WISE", "table_wise"])
    for wrong in (["rows"], "row_wise"):
        with pytest.raises(ValueError, match="sharded_module_order_overwrite must be a list of data_parallel, .*, got"):
            kind(sharded_module_order_overwrite=wrong)
