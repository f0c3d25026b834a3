"""Plans of quantized models: what the planner may do, what a plan may say, and `shard_quant_model`'s settings."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from jagged_batches import kjt
from torch import nn

from shardwise import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    ParameterConstraints,
    quant,
)
from shardwise.inference import quantize_inference_model, shard_quant_model
from shardwise.inference.sharded import DEFAULT_SHARDERS
from shardwise.planner.cost.shardwise import block_bytes, served_bytes
from shardwise.planner.cost.ways import Way
from shardwise.planner.errors import PlannerError
from shardwise.planner.topology import Topology
from shardwise.sharding import (
    DistributedModelParallel,
    EmbeddingBagCollectionSharder,
    EmbeddingShardingPlanner,
    ShardingEnv,
    ShardingPlan,
    column_wise,
    construct_module_sharding_plan,
    row_wise,
    shard_modules,
    table_wise,
)
from shardwise.sharding.planning.tables import tables_of_model
from shardwise.sharding.quant import (
    QuantEmbeddingBagCollectionSharder,
    QuantEmbeddingCollectionSharder,
    get_all_torchrec_modules,
    get_path_device_tuples,
    get_tbe_specs_from_sharded_module,
    get_tbes_from_sharded_module,
)

NO_CUDA = pytest.mark.skipif(torch.cuda.is_available(), reason="speaks of machines without CUDA")
NO_CUDA_HERE = "device 'cuda': there is no CUDA here, so all runs on the CPU"
KJT = kjt({"item": [[1, 99], []], "shop": [[7], [49]]})


def quantized(**dtypes: torch.dtype) -> nn.Module:
    torch.manual_seed(1)
    tables = [EmbeddingBagConfig(100, 64, "item"), EmbeddingBagConfig(50, 32, "shop")]
    return quantize_inference_model(EmbeddingBagCollection(tables), per_table_weight_dtype=dtypes)


def plan_of(model: nn.Module, item: Any, shop: Any, world_size: int = 2, device: str = "cpu") -> ShardingPlan:
    sharder = QuantEmbeddingBagCollectionSharder()
    where = {"item": item, "shop": shop}
    return ShardingPlan({"": construct_module_sharding_plan(model, where, sharder, world_size, world_size, device)})


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu")])
def test_the_published_snippet_runs(device: torch.device | str) -> None:
    model = quantized()
    sharded_model, _ = shard_quant_model(model, compute_device=device, sharding_device=device)
    assert torch.equal(sharded_model(KJT).values(), model(KJT).values())
    assert sharded_model.device == torch.device("cpu")


def test_by_default_every_table_is_whole_on_one_device() -> None:
    model, plan = shard_quant_model(quantized(), 2, "cpu")
    kinds = {name: (sharding.sharding_type, sharding.compute_kernel) for name, sharding in plan.plan[""].items()}
    assert kinds == dict.fromkeys(["item", "shop"], ("table_wise", "quant"))
    assert sorted(sharding.ranks or [] for sharding in plan.plan[""].values()) == [[0], [1]]
    assert "item  | table_wise    | quant          | [" in str(plan)
    assert "(item): QuantizedRows(100 x 64, int8, on cpu)" in str(model)
    assert not model.training


TYPES = ("table_wise", "row_wise", "column_wise", "table_row_wise", "table_column_wise", "grid_shard", "data_parallel")


@pytest.mark.parametrize("kind", TYPES)
def test_constraints_reach_the_plan_and_keep_the_bits(kind: str) -> None:
    model = quantized()
    wanted = model(KJT).values()
    allowed = {name: ParameterConstraints(sharding_types=[kind], min_partition=16) for name in ("item", "shop")}
    sharded, plan = shard_quant_model(model, 2, "cpu", "cpu", constraints=allowed)
    assert {sharding.sharding_type for sharding in plan.plan[""].values()} == {kind}
    assert torch.equal(sharded(KJT).values(), wanted)


def test_a_plan_that_is_given_is_used_as_it_is() -> None:
    model = quantized()
    plan = plan_of(model, row_wise(), column_wise([1, 0]))
    sharded, used = shard_quant_model(model, 2, "cpu", "cpu", sharding_plan=plan)
    assert used is plan
    assert torch.equal(sharded(KJT).values(), model(KJT).values())
    assert [spec[:4] for spec in get_tbe_specs_from_sharded_module(sharded)] == [
        ("item", 50, 64, "SparseType.INT8"), ("item", 50, 64, "SparseType.INT8"),
        ("shop", 50, 16, "SparseType.INT8"), ("shop", 50, 16, "SparseType.INT8"),
    ]  # fmt: skip
    assert len(get_tbes_from_sharded_module(sharded)) == 1
    assert get_all_torchrec_modules(nn.Sequential(sharded)) == {"0": sharded}
    assert ("device", "cpu") in get_path_device_tuples(sharded)
    assert "(1): PieceOfRows(rows [50, 100), columns [0, 64), on cpu)" in str(sharded)


def test_the_planner_knows_quantized_tables_by_their_bytes() -> None:
    model = quantized(item=torch.quint4x2)
    tables = {table.name: table for table in tables_of_model(model, DEFAULT_SHARDERS, "cpu").tables}
    assert all(table.served and table.optimizer is None for table in tables.values())
    assert [tables[name].element_bytes for name in ("item", "shop")] == [0.5, 1.0]
    assert [tables[name].scale_bytes for name in ("item", "shop")] == [4, 4]
    assert not any(kind == "data_parallel" for table in tables.values() for kind, _ in table.ways)


def test_memory_limits_are_never_violated() -> None:
    tables = [EmbeddingBagConfig(1 << 14, 64, name) for name in ("item", "shop")]
    model = quantize_inference_model(EmbeddingBagCollection(tables, device="meta"))
    # a table takes 68 bytes a row
    room = {"compute_device": "cuda", "device_memory_size": int(1.2 * 68 * (1 << 14))}
    _, plan = _quietly(shard_quant_model, model, 2, **room)
    assert sorted(place.ranks or [] for place in plan.plan[""].values()) == [[0], [1]]
    with pytest.raises(PlannerError, match="insufficient storage"):
        _quietly(shard_quant_model, model, 1, **room)
    with pytest.raises(PlannerError, match="insufficient storage"):
        shard_quant_model(model, 2, "cpu", ddr_cap=1 << 20)
    host = ParameterConstraints(compute_kernels=["quant_uvm"], sharding_types=["table_wise"])
    _, plan = _quietly(shard_quant_model, model, 1, **room, constraints={"item": host})
    assert plan.plan[""]["item"].compute_kernel == "quant_uvm"


def test_tables_of_the_host_are_looked_up_by_the_cpu() -> None:
    model = quantized()
    host = {"item": ParameterConstraints(compute_kernels=["quant_uvm"])}
    sharded, plan = _quietly(shard_quant_model, model, 1, "cuda", constraints=host)
    sharded.load_state_dict(model.state_dict())
    assert sharded.devices()["item"] == [torch.device("cpu")]
    assert torch.equal(sharded(KJT).values().cpu(), model(KJT).values())
    plan.plan[""]["item"].compute_kernel = "quant_uvm_caching"
    with pytest.warns(UserWarning, match="table 'item': kernel 'quant_uvm_caching' has no cache here"):
        _quietly(shard_quant_model, model, 1, "cpu", sharding_plan=plan)


@NO_CUDA
def test_without_cuda_everything_is_on_the_cpu_with_one_warning() -> None:
    many: list[dict[str, Any]] = [
        {}, {"sharding_device": "cuda"}, {"compute_device": "cpu", "sharding_device": "cuda:0"},
    ]  # fmt: skip
    for settings in many:
        model = nn.Sequential(quantized(), quantized())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            shard_quant_model(model, 2, **settings)
        assert [str(warning.message) for warning in caught] == [NO_CUDA_HERE]
        model[0].load_state_dict(quantized().state_dict())
        assert torch.equal(model[0](KJT).values(), quantized()(KJT).values())


@NO_CUDA
def test_a_plan_and_a_device_that_want_cuda_give_one_warning() -> None:
    """DistributedModelParallel said so of its device, and every quantized collection of its plan again."""
    env = ShardingEnv.from_local(2, 0)
    where = (table_wise(0, compute_kernel="quant"), table_wise(1, compute_kernel="quant"))
    plan = plan_of(quantized(), *where, device="cuda").plan[""]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = DistributedModelParallel(
            nn.Sequential(quantized()), env, torch.device("cuda"), ShardingPlan({"0": plan}), DEFAULT_SHARDERS,
            init_data_parallel=False,
        )  # fmt: skip
    assert [(str(warning.message), warning.filename) for warning in caught] == [(NO_CUDA_HERE, __file__)]
    assert torch.equal(model(KJT).values(), quantized()(KJT).values())


@NO_CUDA
def test_tables_may_be_on_devices_of_several_kinds() -> None:
    model = quantized()
    both = row_wise(([30, 30, 40], ["cpu", "cuda", "cuda"]))
    plan = plan_of(model, both, table_wise(0, "cpu", "quant"), 3)
    placed = [str(shard.placement) for shard in plan.plan[""]["item"].sharding_spec.shards]  # type: ignore[union-attr]
    assert placed == ["rank:0/cpu", "rank:1/cuda:0", "rank:2/cuda:1"]
    envs = {"cpu": ShardingEnv.from_local(1, 0), "cuda": ShardingEnv.from_local(2, 0)}
    with pytest.warns(UserWarning, match="there is no CUDA here"):
        sharded = QuantEmbeddingBagCollectionSharder().shard(model, plan.plan[""], envs)  # type: ignore[arg-type]
    assert torch.equal(sharded(KJT).values(), model(KJT).values())


def test_other_ways_to_shard_take_quant_sharders_too() -> None:
    wanted, env = quantized()(KJT).values(), ShardingEnv.from_local(2, 0)
    by_hand = shard_modules(nn.Sequential(quantized()), env, "cpu", sharders=DEFAULT_SHARDERS)
    wrapped = DistributedModelParallel(
        nn.Sequential(quantized()), env, torch.device("cpu"), sharders=DEFAULT_SHARDERS, init_data_parallel=False
    )
    for model in (by_hand, wrapped):
        assert torch.equal(model(KJT).values(), wanted)


def test_tables_that_train_need_a_process_group() -> None:
    model = EmbeddingBagCollection([EmbeddingBagConfig(100, 64, "item")])
    env = ShardingEnv.from_local(2, 0)
    plan = construct_module_sharding_plan(model, {"item": table_wise(0)}, None, 2, 2, "cpu")
    with pytest.raises(ValueError, match="2 ranks need a process group"):
        EmbeddingBagCollectionSharder().shard(model, plan, env)


def test_a_sharder_can_be_for_some_collections() -> None:
    sharder = QuantEmbeddingBagCollectionSharder(shardable_params=["item", "shop"])
    assert list(sharder.shardable_parameters(quantized())) == ["item", "shop"]  # type: ignore[arg-type]
    nothing = QuantEmbeddingBagCollectionSharder(shardable_params=["other"])
    model = quantized()
    assert shard_quant_model(model, 1, "cpu", "cpu", sharders=[nothing])[0] is model
    with pytest.raises(ValueError, match=r"names tables \['item'\] of a EmbeddingBagCollection and not \['shop'\]"):
        QuantEmbeddingBagCollectionSharder(shardable_params=["item"]).shardable_parameters(model)  # type: ignore[arg-type]


def test_what_is_not_quantized_is_told() -> None:
    model = EmbeddingCollection([EmbeddingConfig(10, 4, "a")])
    with pytest.warns(UserWarning, match="nothing was sharded"):
        assert shard_quant_model(model, 1, "cpu", "cpu")[0] is model


ORDERED = plan_of(quantized(), row_wise(reduction="partial"), table_wise(1))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"constraints": {"items": ParameterConstraints()}}, "name tables that the model does not have: 'items': did"),
        ({"device_memory_size": 1}, "device_memory_size has no effect on the CPU"),
        ({"sharding_plan": ORDERED}, r"the plan's reduction \(table 'item'\) has no effect"),
    ],
)
def test_settings_that_have_no_effect_are_told(settings: dict[str, Any], message: str) -> None:
    with pytest.warns(UserWarning, match=message):
        shard_quant_model(quantized(), 2, "cpu", **settings)
    with pytest.warns(UserWarning, match=r"fused_params \['output_dtype'\] have no effect"):
        QuantEmbeddingCollectionSharder({"output_dtype": 1})


def test_a_forward_of_its_own_is_not_lost() -> None:
    class Scaled(quant.EmbeddingBagCollection):
        def forward(self, features: KeyedJaggedTensor) -> Any:
            return super().forward(features).values() * 2

    model = quantized()
    model.__class__ = Scaled
    with (
        pytest.warns(UserWarning, match="Scaled derives from EmbeddingBagCollection.*it is not sharded"),
        pytest.warns(UserWarning, match="nothing was sharded"),
    ):
        assert shard_quant_model(nn.Sequential(model), 1, "cpu")[1].plan == {}
    plan = plan_of(quantized(), table_wise(0), table_wise(0)).plan[""]
    with pytest.raises(TypeError, match="Scaled has a forward of its own"):
        QuantEmbeddingBagCollectionSharder().shard(model, plan, ShardingEnv.from_local(2, 0))  # type: ignore[arg-type]


def test_a_block_takes_the_bytes_that_the_planner_says() -> None:
    model = quantized(item=torch.quint4x2)
    cut = shard_quant_model(model, 2, "cpu", "cpu", sharding_plan=plan_of(model, row_wise(), column_wise([0, 1])))[0]
    ways = {"item": Way("row_wise", "quant", (64,), (50, 50)), "shop": Way("column_wise", "quant", (16, 16), (50,))}
    for table in tables_of_model(model, DEFAULT_SHARDERS, "cpu").tables:
        way = ways[table.name]
        predicted = block_bytes(table, way, way.widths[0], 2, 1) - served_bytes(table, way, way.widths[0], 1)
        used = [b.nbytes for name, b in cut.named_buffers() if name.startswith(f"embedding_bags.{table.name}.shards.0")]
        assert predicted[0] == sum(used)


def changed(item: Any, change: Any) -> ShardingPlan:
    """A plan that is not as it was made."""
    plan = plan_of(quantized(), item, table_wise(1))
    change(plan.plan[""]["item"])
    return plan


OTHER_KERNEL = changed(table_wise(0), lambda sharding: setattr(sharding, "compute_kernel", "fused"))
HALF_A_TABLE = changed(row_wise(), lambda sharding: sharding.sharding_spec.shards.pop())
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "kind": ({"compute_device": "mtia"}, "compute_device must be 'cuda' or 'cpu', got 'mtia'"),
    "one device": ({"compute_device": "cuda:1"}, "'cuda:1' is one device: say 'cuda', of which rank r is cuda:r"),
    "kernel": ({"sharding_plan": OTHER_KERNEL}, "table 'item': compute_kernel 'fused' trains"),
    "hole": ({"sharding_plan": HALF_A_TABLE}, "table 'item': shards hold 3200 of 6400 cells"),
    "rank": ({"world_size": 1, "sharding_plan": plan_of(quantized(), table_wise(1), table_wise(0))}, "rank 1 is not"),
    "module": ({"sharding_plan": ShardingPlan({"ebc": {}})}, r"modules \['ebc'\], quantized collections.* \[''\]"),  # type: ignore[dict-item]
    "both": ({"sharding_plan": ShardingPlan(), "ddr_cap": 1}, "ddr_cap have no effect beside a sharding_plan"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_done_is_refused_by_name(case: str) -> None:
    settings, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        shard_quant_model(quantized(), **{"world_size": 2, "compute_device": "cpu", **settings})


def test_a_planner_plans_a_quantized_model() -> None:
    model = quantized()
    plan = EmbeddingShardingPlanner(Topology(2, "cpu"), batch_size=64).plan(model, DEFAULT_SHARDERS)
    assert {sharding.compute_kernel for sharding in plan.plan[""].values()} == {"quant"}
    sharded, _ = shard_quant_model(model, 2, "cpu", "cpu", sharding_plan=plan)
    assert torch.equal(sharded(KJT).values(), model(KJT).values())


def _quietly(call: Any, *args: Any, **kwargs: Any) -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*there is no CUDA here")
        return call(*args, **kwargs)
