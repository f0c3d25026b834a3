"""Small names and ops of TorchRec's, each used for what it is there for; graphs of torch.fx."""

from __future__ import annotations

import copy
import logging
import re
import warnings
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed._shard.sharding_spec import ShardMetadata

from shardwise import (
    DLRM,
    DataType,
    DistributedModelParallel,
    EmbeddingBagCollection,
    EmbeddingBagCollectionSharder,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingComputeKernel,
    EmbeddingConfig,
    FusedEmbeddingBagCollection,
    KeyedJaggedTensor,
    ModuleSharder,
    ParameterConstraints,
    ParameterSharding,
    PoolingType,
    RowWiseAdagrad,
    ShardingEnv,
    ShardingPlan,
    ShardingType,
    Topology,
    apply_optimizer_in_backward,
    construct_module_sharding_plan,
    fuse_embedding_optimizer,
    shard,
)
from shardwise.embeddings.config import EmbeddingTableConfig
from shardwise.embeddings.optim.fbgemm_types import (
    EmbeddingLocation,
    EmbOptimType,
    MultiPassPrefetchConfig,
    PoolingMode,
    SparseType,
    data_type_to_sparse_type,
    pooling_type_to_pooling_mode,
    pooling_type_to_str,
)
from shardwise.embeddings.tables.table_layout import TableBatchedEmbeddingSlice, weights_bytes_in_emb_kernel
from shardwise.inference.quantize import quantize_inference_model
from shardwise.migration.fbgemm_names import FBGEMM_OPS
from shardwise.migration.hints import OPS, advice
from shardwise.migration.mirror import hint_at_ops, leave_ops_alone
from shardwise.migration.names import finding
from shardwise.planner.layout import Tier
from shardwise.planner.torchrec.enumerators import EmbeddingEnumerator
from shardwise.planner.torchrec.storage_estimators import EmbeddingStorageEstimator
from shardwise.sharding import (
    FusedEmbeddingBagCollectionSharder,
    column_wise,
    data_parallel,
    row_wise,
    table_wise,
)
from shardwise.sharding.dmp.tracing import Tracer, symbolic_trace
from shardwise.sharding.dmp.unwrap import CopyableMixin
from shardwise.sharding.modules.sharded_collections import ShardedFusedEmbeddingBagCollection
from shardwise.sharding.plan.plan import CacheParams
from shardwise.sharding.torchrec.bucketize import get_bucket_metadata_from_shard_metadata
from shardwise.sharding.torchrec.fused_params import (
    KeyValueParams,
    add_params_from_parameter_sharding,
    convert_to_fbgemm_types,
    merge_fused_params,
)
from shardwise.sharding.torchrec.global_settings import get_propogate_device, set_propogate_device
from shardwise.sharding.torchrec.plan_delta import output_sharding_plan_delta_single, output_sharding_plans_delta


def tables(rows: int = 8, dim: int = 64) -> list[EmbeddingBagConfig]:
    return [EmbeddingBagConfig(rows, dim, name, feature_names=[f"f_{name}"]) for name in ("ta", "tb")]


def test_a_type_of_ours_is_fbgemms_and_torchs() -> None:
    for name, dtype, bits in (("FP32", torch.float32, 32), ("BF16", torch.bfloat16, 16), ("INT8", torch.uint8, 8),
                              ("INT4", torch.quint4x2, 4), ("INT2", torch.quint2x4, 2),
                              ("NFP8", torch.float8_e4m3fn, 8)):  # fmt: skip
        sparse_type = data_type_to_sparse_type(DataType[name])
        assert (sparse_type, sparse_type.as_dtype(), sparse_type.bit_rate()) == (SparseType[name], dtype, bits)
        assert SparseType.from_dtype(dtype) is sparse_type
    assert (SparseType.MX4.bit_rate(), SparseType.FP8.bit_rate(), SparseType.FP16.bit_rate()) == (4, 8, 16)
    with pytest.raises(ValueError, match="no table of FBGEMM's has numbers of this type"):
        data_type_to_sparse_type(DataType.INT64)
    with pytest.raises(ValueError, match="no table has numbers of type torch.int64"):
        SparseType.from_dtype(torch.int64)


def test_a_mean_over_row_shards_is_a_sum_that_is_divided_later() -> None:
    assert pooling_type_to_pooling_mode(PoolingType.MEAN) is PoolingMode.MEAN
    assert pooling_type_to_pooling_mode(PoolingType.MEAN, ShardingType.ROW_WISE) is PoolingMode.SUM
    assert pooling_type_to_pooling_mode(PoolingType.NONE, ShardingType.ROW_WISE) is PoolingMode.NONE
    assert [mode.do_pooling() for mode in PoolingMode] == [True, True, False]
    assert pooling_type_to_str(PoolingType.MEAN) == "mean"
    with pytest.raises(ValueError, match="has no mode"):
        pooling_type_to_str(PoolingType.NONE)


@pytest.mark.parametrize("optimizer", [EmbOptimType.EXACT_ROWWISE_ADAGRAD, EmbOptimType.ADAM, EmbOptimType.LARS_SGD])
def test_an_optimizer_by_fbgemms_name_trains_the_tables(optimizer: EmbOptimType) -> None:
    sharder = EmbeddingBagCollectionSharder(fused_params={"optimizer": optimizer, "learning_rate": 0.1})
    env = ShardingEnv.from_local(1, 0)
    sharded: Any = shard(EmbeddingBagCollection(tables()), row_wise(), env, "cpu", sharder=sharder)
    before = sharded.parameter("ta").detach().clone()
    features = KeyedJaggedTensor(["f_ta", "f_tb"], torch.tensor([3, 4]), lengths=torch.ones(2).long())
    sharded(features).values().sum().backward()
    moved = (sharded.parameter("ta") - before).abs().sum(1).nonzero().flatten().tolist()
    assert moved == [3]


def test_a_fused_collection_lies_where_its_location_says() -> None:
    for location in (None, EmbeddingLocation.DEVICE, EmbeddingLocation.HOST):
        made = FusedEmbeddingBagCollection(tables(), torch.optim.SGD, {"lr": 0.1}, False, "cpu", location)
        assert made.device.type == "cpu"
    with pytest.raises(ValueError, match="location=HOST: rows lie on the collection's device, cuda"):
        FusedEmbeddingBagCollection(tables(), torch.optim.SGD, {}, False, "cuda", EmbeddingLocation.HOST)


@pytest.mark.parametrize(
    ("location", "tier"),
    [
        (EmbeddingLocation.MANAGED, Tier()),
        (EmbeddingLocation.MANAGED_CACHING, Tier(0.2, max_slots=1.0)),
        (EmbeddingLocation.DEVICE, None),
    ],
)
def test_a_fused_collection_lies_below_its_device_once_it_is_sharded(
    location: EmbeddingLocation, tier: Tier | None
) -> None:
    env, optimizer = ShardingEnv.from_local(1, 0), (torch.optim.SGD, {"lr": 0.1})
    made = FusedEmbeddingBagCollection(tables(), *optimizer, False, "meta", location)
    fused = fuse_embedding_optimizer(EmbeddingBagCollection(tables()), *optimizer, torch.device("meta"), location)
    sharder = FusedEmbeddingBagCollectionSharder()
    for module in (made, fused, copy.deepcopy(made)):
        of_module = construct_module_sharding_plan(
            module, {"ta": table_wise(0), "tb": table_wise(0, tier=Tier(3))}, sharder, 1, 1, "cpu"
        )
        found: Any = sharder.shard(module, of_module, env)  # type: ignore[arg-type]
        assert [found.states.tables[name].options.tier for name in ("ta", "tb")] == [tier, Tier(3)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if tier is not None:
            # the rows of an unsharded collection are where it is
            with pytest.warns(
                UserWarning, match=f"location={location.name}: .* has its rows on its device, cpu, until"
            ):
                FusedEmbeddingBagCollection(tables(), *optimizer, location=location)
        else:
            FusedEmbeddingBagCollection(tables(), *optimizer, location=location)


def test_a_table_config_makes_a_collection() -> None:
    config = EmbeddingTableConfig(
        8, 4, "t", feature_names=["f"], pooling=PoolingType.MEAN, is_weighted=True, embedding_names=["f"]
    )
    made = EmbeddingBagCollection([config], config.is_weighted)
    weighted = KeyedJaggedTensor(["f"], torch.tensor([1, 2]), torch.tensor([2.0, 4.0]), torch.tensor([2]))
    (rows,) = (param.detach() for param in made.parameters())
    assert torch.allclose(made(weighted).values(), (2 * rows[1] + 4 * rows[2])[None] / 2)


def test_a_slice_is_a_part_of_the_buffer_and_of_its_gradient() -> None:
    flat = torch.arange(20.0, requires_grad=True)
    part = TableBatchedEmbeddingSlice(flat, 8, 20, 4, 3)
    assert isinstance(part, nn.Parameter) and part.requires_grad and part.grad is None and part.grad_fn is None
    module = nn.Module()
    module.register_parameter("weight", part)
    assert torch.equal(module.state_dict()["weight"], torch.arange(8.0, 20).view(4, 3))
    (flat * 2).sum().backward()
    assert part.grad is not None and torch.equal(part.grad, torch.full((4, 3), 2.0))
    part.grad = torch.ones(4, 3)
    assert flat.grad is not None and flat.grad.tolist() == [2.0] * 8 + [1.0] * 12
    with torch.no_grad():
        part.fill_(5)
    assert flat.tolist() == [*range(8), *[5] * 12]
    copied = copy.deepcopy(part)
    with torch.no_grad():
        copied.zero_()
    assert flat[8:].tolist() == [5] * 12 and copied.requires_grad
    part.grad = None
    assert flat.grad is None
    assert not TableBatchedEmbeddingSlice(torch.zeros(4), 0, 4, 2, 2).requires_grad


def test_bytes_of_rows_count_scales_and_not_states() -> None:
    ebc = FusedEmbeddingBagCollection(tables(), RowWiseAdagrad, {"lr": 0.1})
    assert weights_bytes_in_emb_kernel(ebc) == 2 * 8 * 64 * 4
    assert weights_bytes_in_emb_kernel(nn.ModuleList([ebc, ebc])) == 2 * 8 * 64 * 4
    quantized = quantize_inference_model(EmbeddingBagCollection(tables()))
    scales = sum(b.nbytes for name, b in quantized.named_buffers() if name.endswith(("_qscale", "_qbias")))
    assert scales and weights_bytes_in_emb_kernel(quantized) == 2 * 8 * 64 + scales


def rows(*sizes: int, dim: int = 4) -> list[ShardMetadata]:
    starts = [sum(sizes[:n]) for n in range(len(sizes))]
    return [ShardMetadata([start, 0], [size, dim], "rank:0/cpu") for start, size in zip(starts, sizes, strict=True)]


def test_buckets_of_rows_are_counted_by_shard() -> None:
    buckets = get_bucket_metadata_from_shard_metadata(rows(40, 20, 60), 6)
    assert (buckets.num_buckets_per_shard, buckets.bucket_offsets_per_shard, buckets.bucket_size) == (
        [2, 1, 3], [0, 2, 3], 20,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("shards", "buckets", "message"),
    [
        ([], 2, "at least one shard"),
        (rows(10, 10), 3, "20 rows do not make 3 equal buckets"),
        (rows(5, 15), 2, r"shards end at rows \[5\], inside a bucket of 10 rows"),
        ([ShardMetadata([0, 4], [8, 4], "rank:0/cpu")], 2, "rows of a table one after another"),
        (list(reversed(rows(10, 10))), 2, "rows of a table one after another"),
    ],
)
def test_shards_that_do_not_keep_buckets_whole_are_refused(
    shards: list[ShardMetadata], buckets: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        get_bucket_metadata_from_shard_metadata(shards, buckets)


def test_fused_parameters_of_a_table_win_over_the_sharders() -> None:
    sharders = {"learning_rate": 0.1, "eps": [1]}
    merged = merge_fused_params(sharders, {"lr": 0.5})
    assert merged == {"learning_rate": 0.5, "eps": [1]} and merged["eps"] is not sharders["eps"]
    assert merge_fused_params() == {}


def test_a_plans_settings_join_the_fused_parameters() -> None:
    plan = plan_of(ta=row_wise(), tb=data_parallel())
    sharding = plan["ta"]
    sharding.cache_params = CacheParams(
        load_factor=0.3, precision=DataType.FP16, multipass_prefetch_config=MultiPassPrefetchConfig(3)
    )
    sharding.stochastic_rounding = False
    fused_params = convert_to_fbgemm_types(add_params_from_parameter_sharding({"learning_rate": 0.2}, sharding))
    assert fused_params == {
        "learning_rate": 0.2, "cache_load_factor": 0.3, "cache_precision": SparseType.FP16,
        "multipass_prefetch_config": (3, 6 * 1024 * 1024), "stochastic_rounding": False,
    }  # fmt: skip
    with pytest.warns(UserWarning, match="fused_params: multipass_prefetch_config have no effect"):
        assert EmbeddingBagCollectionSharder(fused_params).default_optimizer[1] == {
            "lr": 0.2,
            "stochastic_rounding": False,
        }
    with pytest.warns(UserWarning, match="of a data_parallel table"):
        add_params_from_parameter_sharding({"learning_rate": 0.2}, plan["tb"])


def test_settings_of_a_store_join_those_of_a_table_on_ssd() -> None:
    spec = construct_module_sharding_plan(EmbeddingBagCollection(tables()), {"ta": table_wise(0), "tb": table_wise(0)},
                                          world_size=1, local_size=1)["ta"].sharding_spec  # fmt: skip
    stored = KeyValueParams(ssd_storage_directory="/data", max_l1_cache_size=64)
    sharding = ParameterSharding(
        "table_wise", EmbeddingComputeKernel.KEY_VALUE.value, [0], spec, key_value_params=stored
    )
    fused_params = add_params_from_parameter_sharding(None, sharding)
    assert fused_params["ssd_storage_directory"] == "/data" and fused_params["max_l1_cache_size"] == 64
    assert "l2_cache_size" not in fused_params
    assert hash(stored) == hash(copy.deepcopy(stored)) and stored == copy.deepcopy(stored)


class OnSsd(EmbeddingBagCollectionSharder):
    """Offers no other kernel than one of tables in files."""

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        return ["key_value"]


def test_the_planner_prices_a_cache_by_its_size() -> None:
    def hbm(params: KeyValueParams | None) -> int:
        constraint = ParameterConstraints(["table_wise"], ["key_value"], key_value_params=params)
        constraints, topology = {"ta": constraint, "tb": constraint}, Topology(1, "cuda")
        estimator = EmbeddingStorageEstimator(topology, constraints)
        enumerator = EmbeddingEnumerator(topology, 512, constraints, [estimator])
        options = enumerator.enumerate(EmbeddingBagCollection(tables(10**6, 4)), [OnSsd()])
        return sum(
            table_shard.storage.hbm
            for option in options
            for table_shard in option.shards
            if table_shard.storage is not None
        )

    assert hbm(KeyValueParams(max_l1_cache_size=1)) != hbm(KeyValueParams(max_l1_cache_size=2))


def plan_of(*, rows: int = 8, **cuts: Any) -> Any:
    """A plan of both tables for two ranks."""
    ebc = EmbeddingBagCollection(tables(rows))
    return construct_module_sharding_plan(ebc, cuts, local_size=2, world_size=2, device_type="cpu")


def test_a_delta_has_what_is_placed_or_cut_otherwise() -> None:
    old = plan_of(ta=table_wise(0), tb=row_wise(), rows=1024)
    other = plan_of(ta=table_wise(1), tb=row_wise(), rows=1024)
    volume, delta = output_sharding_plan_delta_single(old, other, True)
    assert list(delta) == ["ta"] and delta["ta"].ranks == [1] and volume == 1024 * 64 * 4 / 2**20
    # the same ranks, another cut: TorchRec would pass this over
    _, delta = output_sharding_plan_delta_single(old, plan_of(ta=table_wise(0), tb=column_wise([0, 1]), rows=1024))
    assert list(delta) == ["tb"] and delta["tb"].sharding_type == "column_wise"
    assert output_sharding_plans_delta({"": old}, {"": old}) == {"": (0.0, {})}
    with pytest.raises(ValueError, match=r"the plans have different tables: \['tb'\]"):
        output_sharding_plan_delta_single(old, type(old)({"ta": old["ta"]}))
    with pytest.raises(ValueError, match=r"the new plan lacks modules \['ebc'\]"):
        output_sharding_plans_delta({"ebc": old}, {})


def resharded_by_a_delta() -> tuple[bool, float, list[int] | None]:
    torch.manual_seed(0)
    model: Any = nn.Module()
    model.add_module("ebc", EmbeddingBagCollection(tables()))
    apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    features = KeyedJaggedTensor(["f_ta", "f_tb"], torch.tensor([3, 4]), lengths=torch.ones(2).long())
    plan = plan_of(ta=table_wise(0, compute_kernel="fused"), tb=table_wise(0, compute_kernel="fused"))
    dmp = DistributedModelParallel(model, plan=ShardingPlan({"ebc": plan}))
    sharded = model.ebc
    before = sharded(features).values().detach().clone()
    aim = plan_of(ta=table_wise(1, compute_kernel="fused"), tb=table_wise(0, compute_kernel="fused"))
    delta = output_sharding_plans_delta(dmp.plan.plan, {"ebc": aim}, True)
    volume = dmp.reshard(delta, "ebc")
    return torch.equal(sharded(features).values(), before), volume, dmp.plan.plan["ebc"]["ta"].ranks


def test_a_model_goes_over_to_the_plan_by_its_delta() -> None:
    for same, volume, ranks in run_ranks(2, resharded_by_a_delta):
        assert same and volume == 8 * 64 * 4 / 2**20 and ranks == [1]


def test_a_fused_collection_becomes_its_own_sharded_class_and_says_what_it_holds(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ebc = FusedEmbeddingBagCollection(tables(), torch.optim.SGD, {"lr": 0.1})
    with caplog.at_level(logging.INFO, "shardwise.sharding.modules.sharded_collections"):
        sharded = shard(ebc, table_wise(0), ShardingEnv.from_local(1, 0), "cpu")
    assert type(sharded) is ShardedFusedEmbeddingBagCollection
    assert f"rank 0 holds {2 * 8 * 64 * 4} bytes of 2 tables" in caplog.text


def test_a_copyable_module_copies_itself() -> None:
    class Layer(CopyableMixin):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

    layer = Layer()
    copied: Any = layer.copy(torch.device("meta"))
    assert copied.weight.device.type == "meta" and layer.weight.tolist() == [1, 1]


def test_a_device_that_is_given_is_used_whatever_the_switch_says() -> None:
    set_propogate_device(True)
    with pytest.warns(UserWarning, match="quantized shards go to the device that is given"):
        set_propogate_device(False)
    assert get_propogate_device()


def test_a_sharder_says_its_module_type_by_subscript() -> None:
    assert ModuleSharder[nn.Module] is not None


@pytest.fixture
def hinting() -> Iterator[None]:
    hint_at_ops()
    yield
    leave_ops_alone()


@pytest.mark.parametrize(
    ("op", "alternative"),
    [
        ("get_unique_indices_with_inverse", "shardwise.kernels.unique_ids"),
        ("jagged_softmax_backward", "torch.ops.fbgemm.jagged_softmax"),
        ("split_embedding_codegen_lookup_sgd_function", "EmbeddingBagCollection with apply_optimizer_in_backward"),
        ("new_unified_tensor", "host memory, caches and SSD are not served"),
        ("quantize_mx_cuda", "shardwise.QCommsConfig"),
        ("mystery", "nothing of ours does the same; ops of ours are functions of shardwise.kernels"),
    ],
)
def test_an_op_that_nobody_registered_says_what_to_use(hinting: None, op: str, alternative: str) -> None:
    """Torch said "'_OpNamespace' 'fbgemm' object has no attribute ..." in a program without FBGEMM.

    That is where two of three user programs with FBGEMM's ops stopped, with nothing to go on.
    """
    with pytest.raises(AttributeError, match=f"^torch.ops.fbgemm.{op} is not served; .*{re.escape(alternative)}"):
        getattr(torch.ops.fbgemm, op)
    assert not hasattr(torch.ops.fbgemm, op)
    entry = finding(f"torch.ops.fbgemm.{op}.default")
    assert entry.status == "missing" and alternative in entry.hint


def test_an_op_that_is_registered_wins(hinting: None) -> None:
    library = torch.library.Library("fbgemm", "FRAGMENT")
    library.define("hyperbolic_tables(Tensor values) -> Tensor")
    library.impl("hyperbolic_tables", lambda values: values * 2, "CompositeImplicitAutograd")
    two = torch.tensor([2.0])
    assert torch.ops.fbgemm.hyperbolic_tables(two).item() == 4
    assert torch.ops.fbgemm.hyperbolic_tables.default(two).item() == 4
    assert torch.ops.fbgemm.hyperbolic_tables.__module__ == torch.ops.aten.add.__module__.replace("aten", "fbgemm")

    def traced(values: torch.Tensor) -> torch.Tensor:
        return torch.ops.fbgemm.hyperbolic_tables(values) + 1

    assert torch.compile(traced, backend="eager", fullgraph=True)(two).item() == 5
    assert torch.fx.symbolic_trace(traced)(two).item() == 5
    leave_ops_alone()
    assert torch.ops.fbgemm.hyperbolic_tables(two).item() == 4
    with pytest.raises(AttributeError, match="object has no attribute 'mystery'"):
        torch.ops.fbgemm.mystery  # noqa: B018


@pytest.mark.parametrize("alternative", OPS)
def test_what_is_hinted_at_is_there(alternative: str) -> None:
    # the first dotted or capital name of the hint
    names = re.findall(r"(?:shardwise\.)?(?:\w+\.)*(?:[A-Z]\w+|\w+_\w+)", alternative)
    assert names, alternative
    for name in names:
        home, _, last = name.rpartition(".")
        home = home or ("shardwise.kernels" if last == "dequantize_rows" else "shardwise")
        assert hasattr(import_module(home), last), f"{home} has no {last}"


def test_ops_that_are_hinted_at_are_not_served() -> None:
    assert not {op for ops in OPS.values() for op in ops.split()} & FBGEMM_OPS


def test_names_of_served_ops_are_those_of_the_table() -> None:
    """`shardwise migrate` reads them without torch."""
    from shardwise.fbgemm import OPS as SERVED

    assert set(SERVED) == FBGEMM_OPS


def test_install_hints_and_uninstall_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    import shardwise.torchrec

    try:
        shardwise.torchrec.install()
        with pytest.raises(AttributeError, match="use shardwise.kernels.unique_ids"):
            torch.ops.fbgemm.get_unique_indices  # noqa: B018
    finally:
        shardwise.torchrec.uninstall()
    with pytest.raises(AttributeError, match="object has no attribute 'get_unique_indices'"):
        torch.ops.fbgemm.get_unique_indices  # noqa: B018
    assert advice("torch.ops.fbgemm").startswith("shardwise has no counterpart of torch.ops.fbgemm")


def three_tables() -> EmbeddingBagCollection:
    torch.manual_seed(0)
    return EmbeddingBagCollection([EmbeddingBagConfig(10, 8, f"t{n}", feature_names=[f"f{n}"]) for n in range(3)])


class Sequences(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ec = EmbeddingCollection([EmbeddingConfig(10, 8, "t", feature_names=["f0"])])

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        return self.ec(features)["f0"].values() * 2


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ebc, self.over = three_tables(), nn.Linear(24, 1)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        return self.over(self.ebc(features).values())


FEATURES = KeyedJaggedTensor(["f0", "f1", "f2"], torch.tensor([1, 2, 3, 4, 5, 6]), lengths=torch.ones(6).long())


@pytest.mark.parametrize("make", [Mixed, Sequences, lambda: quantize_inference_model(Mixed())])
def test_a_collection_is_one_node_and_the_graph_gives_what_the_model_gives(make: type[nn.Module]) -> None:
    model = make()
    traced = symbolic_trace(model)
    assert any(node.op == "call_module" and node.target in ("ebc", "ec") for node in traced.graph.nodes)
    assert torch.equal(traced(FEATURES), model(FEATURES))


def test_dlrm_is_traced_down_to_its_tables() -> None:
    model = DLRM(three_tables(), 4, [8, 8], [8, 1])
    traced = symbolic_trace(model)
    calls = {str(node.target) for node in traced.graph.nodes if node.op == "call_module"}
    assert "sparse_arch.embedding_bag_collection" in calls and any("dense_arch.model" in call for call in calls)
    dense = torch.randn(2, 4)
    assert torch.equal(traced(dense, FEATURES), model(dense, FEATURES))


def test_modules_named_by_class_or_by_path_are_one_node_as_well() -> None:
    for named in ("Mixed", "inner"):
        model = nn.Sequential()
        model.add_module("inner", Mixed())
        targets = [node.target for node in Tracer([named]).trace(model).nodes if node.op == "call_module"]
        assert targets == ["inner"]


def traced_when_sharded() -> tuple[bool, list[str]]:
    model = DistributedModelParallel(Mixed())
    traced = symbolic_trace(model)
    same = torch.equal(traced(FEATURES), model(FEATURES))
    return same, [str(node.target) for node in traced.graph.nodes if node.op == "call_module"]


def test_a_sharded_model_is_traced_through_its_wrapper() -> None:
    for same, targets in run_ranks(2, traced_when_sharded):
        assert same
        assert [target.rpartition(".")[2] for target in targets] == ["ebc", "over"]
        assert all(target.startswith("_dmp_wrapped_module.") for target in targets)
