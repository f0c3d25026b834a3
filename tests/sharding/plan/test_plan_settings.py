"""What plans, fused_params of a sharder and its exchange set of lookups and updates, on one rank and on two."""

from __future__ import annotations

import base64
import os
import pickle
import sys
import tempfile
import warnings
import zlib
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import error_of, run_ranks
from torch import Tensor

import shardwise.torchrec
from shardwise import (
    BoundsCheckMode,
    DataType,
    DistributedModelParallel,
    EmbeddingBagCollection,
    EmbeddingBagCollectionSharder,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingCollectionSharder,
    EmbeddingConfig,
    KeyedJaggedTensor,
    ParameterSharding,
    RowWiseAdagrad,
    ShardingEnv,
    ShardingPlan,
    apply_optimizer_in_backward,
    construct_module_sharding_plan,
)
from shardwise.embeddings.optim.fbgemm_types import (
    CacheAlgorithm,
    EmbeddingLocation,
    EmbOptimType,
    MultiPassPrefetchConfig,
    SparseType,
)
from shardwise.planner.layout import Shard, TableOptions, Tier
from shardwise.sharding import CacheParams, column_wise, data_parallel, row_wise, table_wise
from shardwise.sharding.comms.qcomms import CommType, QCommsConfig, get_qcomm_codecs_registry
from shardwise.sharding.engine import tiers as engine_tiers
from shardwise.sharding.modules.fused_params import SETTINGS, settings_from
from shardwise.sharding.plan.caches import KeyValueParams, within_memory

pytestmark = pytest.mark.ranks

ROWS, DIM = 12, 8
# a whole table, one cut by rows, one cut by columns, one on every rank
PLACES: dict[str, Any] = {"a": table_wise(0), "b": row_wise(), "c": column_wise([0, 0]), "d": data_parallel()}


def batch(bad: str | None = None) -> KeyedJaggedTensor:
    """Three ids of each feature in two bags; the last of feature `bad` is outside its table."""
    ids = [n + (ROWS if bad == f"f{name}" and n == 2 else 0) for name in PLACES for n in range(3)]
    return KeyedJaggedTensor([f"f{name}" for name in PLACES], torch.tensor(ids), lengths=torch.tensor([2, 1] * 4))


def collection(seq: bool = False, dtype: DataType = DataType.FP32, features: str = "") -> Any:
    torch.manual_seed(0)
    config: Any = EmbeddingConfig if seq else EmbeddingBagConfig
    tables = [config(ROWS, DIM, name, dtype, feature_names=[features or f"f{name}"]) for name in PLACES]
    return EmbeddingCollection(tables, device="cpu") if seq else EmbeddingBagCollection(tables, device="cpu")


def sharded(module: Any, changes: dict[str, dict[str, Any]], fused: dict[str, Any], qcomms: Any = None) -> Any:
    """The model over all ranks that there are, with what `changes` say of tables in its plan."""
    kind: Any = EmbeddingCollectionSharder if isinstance(module, EmbeddingCollection) else EmbeddingBagCollectionSharder
    sharder = kind(fused, None if qcomms is None else get_qcomm_codecs_registry(qcomms))
    ranks = dist.group.WORLD
    env = ShardingEnv.from_local(1, 0) if ranks is None else ShardingEnv.from_process_group(ranks)
    of_module = construct_module_sharding_plan(module, PLACES, sharder, world_size=env.world_size, local_size=1)
    for table, settings in changes.items():
        for name, value in settings.items():
            setattr(of_module[table], name, value)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="tables .* have no optimizer")
        return DistributedModelParallel(
            module, env, torch.device("cpu"), ShardingPlan({"": of_module}), [sharder], init_data_parallel=False
        )


def answers(model: Any, features: KeyedJaggedTensor, seq: bool) -> dict[str, Tensor]:
    """The output by feature."""
    output = model(features)
    return {key: output[key].values() if seq else output[key] for key in output.keys()}  # noqa: SIM118


def both(worker: Any, world: int, *args: Any) -> list[Any]:
    """What a worker returns, in this process or on ranks."""
    return [worker(*args)] if world == 1 else run_ranks(world, worker, *args)


FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
HALF = {"a": {"output_dtype": DataType.FP16}, "b": {"output_dtype": DataType.FP16}}


def expect_types(
    changes: Any, fused: Any, own: list[torch.dtype], pooled: torch.dtype, qcomms: QCommsConfig | None = None
) -> None:
    """Outputs are those of the same model without a setting, in the type `own` of each table, pooled in one type."""
    without = qcomms and QCommsConfig(qcomms.forward_precision)
    for seq in (False, True):
        plain = answers(sharded(collection(seq), {}, {}, without), batch(), seq)
        given = answers(sharded(collection(seq), changes, fused, qcomms), batch(), seq)
        for (key, values), dtype in zip(given.items(), own, strict=True):
            assert values.dtype == (dtype if seq else pooled)
            assert torch.equal(values, plain[key].to(dtype).to(values.dtype))


TYPES: list[tuple[Any, Any, list[torch.dtype], torch.dtype]] = [
    ({}, {"output_dtype": SparseType.FP16}, [FP16] * 4, FP16),
    (HALF, {}, [FP16, FP16, FP32, FP32], FP32),
    (HALF, {"output_dtype": DataType.FP16}, [FP16] * 4, FP16),
    # no type of two bytes holds both
    (HALF, {"output_dtype": BF16}, [FP16, FP16, BF16, BF16], FP32),
]


@pytest.mark.parametrize("world", [1, 2])
def test_outputs_have_the_type_of_the_plan_and_of_fused_params(world: int) -> None:
    """A KeyedTensor has the narrowest type that holds those of its tables; rows of ids have their own table's."""
    both(partial(_each, expect_types, TYPES), world)


def _each(check: Any, cases: list[tuple[Any, ...]]) -> None:
    for case in cases:
        check(*case)


@pytest.mark.parametrize("world", [1, 2])
def test_rows_that_arrive_compressed_become_the_output_dtype_of_qcomms(world: int) -> None:
    """Tables on every rank exchange no rows: theirs stay fp32."""
    arrives: list[Any] = []
    for kind, dtype in ((CommType.MX4, SparseType.BF16), (CommType.FP8, SparseType.FP16)):
        config, own = QCommsConfig(kind, output_dtype=dtype), dtype.as_dtype()
        arrives.append(({}, {}, [own, own, own, FP32], FP32, config))
    both(partial(_each, expect_types, arrives), world)


def test_gradients_of_narrow_outputs_train_the_tables() -> None:
    models = [sharded(collection(), {}, fused) for fused in ({}, {"output_dtype": DataType.BF16})]
    before = {name: param.detach().clone() for name, param in models[0].named_parameters()}
    for model in models:
        model(batch()).values().float().sum().backward()
    for (name, plain), (_, narrow) in zip(*(model.named_parameters() for model in models), strict=True):
        # a gradient of ones is the same in both types
        assert torch.equal(plain, narrow) and (plain.grad is not None or not torch.equal(plain, before[name]))


def raised_for(changes: Any, fused: Any, seq: bool) -> dict[str, str]:
    """By table: what a batch raises whose last id of the table is bad; else whether its other rows are as they were."""
    model, found = sharded(collection(seq), changes, fused), {}
    good = answers(model, batch(), seq)
    for name in PLACES:
        error = error_of(lambda name=name: answers(model, batch(bad=f"f{name}"), seq)["fa"])
        found[name] = error.partition(":")[0]
        if not error:
            values = answers(model, batch(bad=f"f{name}"), seq)[f"f{name}"]
            assert torch.equal(values[:1], good[f"f{name}"][:1]) and not values[-1:].any()
    return found


@pytest.mark.filterwarnings("ignore:.*is outside")
@pytest.mark.parametrize("world", [1, 2])
def test_each_table_meets_a_bad_id_in_the_mode_that_its_plan_says(world: int) -> None:
    """One mode held for a whole collection, and a plan that said another was refused."""
    plan = {"b": {"bounds_check_mode": BoundsCheckMode.IGNORE}, "c": {"bounds_check_mode": BoundsCheckMode.V2_FATAL}}
    for fused, others in (({}, "RefusedIndexError"), ({"bounds_check_mode": BoundsCheckMode.IGNORE}, "")):
        for seq in (False, True):
            for found in both(raised_for, world, plan, fused, seq):
                assert found == {"a": others, "b": "", "c": "RefusedIndexError", "d": others}


def test_a_feature_of_two_tables_is_checked_in_the_mode_of_each() -> None:
    """Id 14 is in the larger table, which is strict, and counts as none in the smaller, which is not."""
    tables = [EmbeddingBagConfig(rows, 4, name, feature_names=["f"]) for name, rows in (("small", 10), ("large", 20))]
    module = EmbeddingBagCollection(tables, device="cpu")
    plan = construct_module_sharding_plan(
        module, {"small": table_wise(0), "large": row_wise()}, world_size=1, device_type="cpu"
    )
    plan["small"].bounds_check_mode = BoundsCheckMode.IGNORE
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="tables .* have no optimizer")
        model = DistributedModelParallel(
            module, ShardingEnv.from_local(1, 0), torch.device("cpu"), ShardingPlan({"": plan})
        )
    large = module.get_parameter("embedding_bags.large.weight")
    output = model(KeyedJaggedTensor(["f"], torch.tensor([14]), lengths=torch.tensor([1])))
    assert not output["f@small"].any() and torch.equal(output["f@large"], large[14:15])
    with pytest.raises(IndexError, match=r"table 'large'.*id 20 is outside \[0, 20\)"):
        model(KeyedJaggedTensor(["f"], torch.tensor([20]), lengths=torch.tensor([1])))


def rows_after(changes: Any, fused: Any, own: Any = None) -> dict[str, Tensor]:
    """The rows of bf16 tables on this rank after a step whose numbers have to be rounded."""
    module = collection(dtype=DataType.BF16)
    if own is not None:
        apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), own)
    model = sharded(module, changes, fused)
    (model(batch()).values().float() * 0.37).sum().backward()
    return {name.split(".")[1]: param.detach().clone() for name, param in model.named_parameters()}


@pytest.mark.parametrize("world", [1, 2])
def test_rows_are_rounded_as_the_plan_and_fused_params_say(world: int) -> None:
    settled = {name: {"stochastic_rounding": False} for name in "abc"}
    lr = {"lr": 0.3}
    nearest = both(rows_after, world, {}, {}, {**lr, "stochastic_rounding": False})
    by_chance = both(rows_after, world, {}, {}, lr)
    ways = [
        both(rows_after, world, settled, {**lr}),
        both(rows_after, world, settled, {}, lr),
        both(rows_after, world, {}, {"stochastic_rounding": False}, lr),
        both(rows_after, world, {"a": {"stochastic_rounding": False}}, {**lr}),
    ]
    for rank in range(world):
        for name in "abc":
            exact = nearest[rank][name]
            assert all(torch.equal(way[rank][name], exact) for way in ways[:3])
            assert torch.equal(ways[3][rank][name], exact if name == "a" else by_chance[rank][name])
    assert any(not torch.equal(by_chance[rank][name], nearest[rank][name]) for rank in range(world) for name in "abc")


def test_a_table_that_an_ordinary_optimizer_steps_says_that_rounding_is_not_its_plans() -> None:
    with pytest.warns(UserWarning, match=r"the plan's stochastic_rounding \(table 'd'\) has no effect: .*no optimizer"):
        sharded(collection(dtype=DataType.BF16), {"d": {"stochastic_rounding": False}}, {})


def types_of_rows() -> tuple[set[torch.dtype], bool]:
    module = collection()
    unsharded = {name: child.weight.detach().clone() for name, child in module.embedding_bags.items()}
    model = sharded(module, {}, {"weights_precision": SparseType.FP16})
    rows = dict(model.state_dict())
    held = {name.split(".")[1]: param for name, param in model.named_parameters() if param.numel()}
    answers(model, batch(), False)
    same = torch.equal(held["d"], unsharded["d"].half()) and len(rows) == len(PLACES)
    return {param.dtype for param in held.values()}, same


@pytest.mark.parametrize("world", [1, 2])
def test_tables_are_stored_in_the_precision_of_fused_params(world: int) -> None:
    for dtypes, same in both(types_of_rows, world):
        assert dtypes == {FP16} and same


def norms_after(row_state: str | None) -> list[float]:
    """The norms of the rows of this rank that a step of rowwise Adagrad with `max_norm` touched."""
    fused = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "lr": 0.5, "max_norm": 0.1}
    model = sharded(collection(), {} if row_state is None else {"c": {"row_state": row_state}}, fused)
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    model(batch()).values().sum().backward()
    return [
        norm
        for name, param in model.named_parameters()
        if ".d." not in name and param.numel()
        for norm in param.detach()[(param.detach() != before[name]).any(1)].norm(dim=1).tolist()
    ]


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.full), 2])
@pytest.mark.parametrize("row_state", [None, "table"])
def test_rows_that_an_update_makes_longer_than_max_norm_are_cut(world: int, row_state: str | None) -> None:
    """FBGEMM takes `max_norm` and cuts rows on GPUs alone; the same formula here holds on any device."""
    norms = [norm for rank in both(norms_after, world, row_state) for norm in rank]
    assert len(norms) >= 9 and max(norms) < 0.1 + 1e-6


def test_a_cut_row_is_the_formula_of_rowwise_adagrad_then_scaled() -> None:
    module = collection()
    apply_optimizer_in_backward(RowWiseAdagrad, module.parameters(), {"lr": 0.1, "eps": 1e-6, "max_norm": 0.4})
    before = module.embedding_bags["a"].weight.detach().clone()
    values = module(batch()).values()
    grad = torch.linspace(-1, 1, values.numel()).view_as(values)
    values.backward(grad)
    rows = before.clone()
    for row, bag in ((0, 0), (1, 0), (2, 1)):
        g = grad[bag, :DIM]
        moved = before[row] - 0.1 * g / (g.pow(2).mean().sqrt() + 1e-6)
        rows[row] = moved * min(1.0, 0.4 / float(moved.norm()))
    torch.testing.assert_close(module.embedding_bags["a"].weight.detach(), rows)
    assert module.embedding_bags["a"].weight[:3].norm(dim=1).max() <= 0.4 + 1e-6


# setting of fused_params -> a value that is not obeyed
REFUSED: dict[str, Any] = {
    "ensemble_mode": 1, "emainplace_mode": 1, "counter_based_regularization": 1, "cowclip_regularization": 1,
    "global_weight_decay": 1, "optimizer_state_dtypes": {"momentum1": SparseType.FP16}, "extra_optimizer_config": 1,
    "enable_raw_embedding_streaming": True, "res_params": 1, "res_store_shards": 2, "res_enabled_tables": "a",
    "is_qr_tbe": True, "embedding_specs": [1], "feature_table_map": [1], "pooling_mode": 1, "device": "cpu",
    "table_names": ["a"], "embedding_shard_info": [1],
}  # fmt: skip
OBEYED = (
    *("optimizer", "learning_rate", "lr", "eps", "beta1", "beta2", "momentum", "eta", "initial_accumulator_value"),
    *("weight_decay", "weight_decay_mode", "stochastic_rounding", "seed", "gradient_clipping", "max_gradient"),
    *("max_norm", "output_dtype", "bounds_check_mode", "weights_precision", "location"),
)
# setting of caches -> what it makes of a table of the kernel key_value with 12 rows of 8 fp32 numbers, trained by SGD
CACHES: dict[str, tuple[Any, dict[str, Any] | None]] = {
    "cache_algorithm": (CacheAlgorithm.LFU, {"policy": "lfu"}),
    "cache_load_factor": (0.5, {"slots": 0.5}),
    "cache_sets": (1, {"slots": 12}),
    "cache_reserved_memory": (1.0, {}),
    "cache_precision": (SparseType.FP32, {}),
    "enforce_hbm": (True, None),
    "ssd_storage_directory": ("/nvme", {"folder": "/nvme"}),
    "l2_cache_size": (1 / 2**30 * 96, {"ram_rows": 3}),
    "max_l1_cache_size": (1 / 2**20 * 64, {"slots": 2}),
    "prefetch_pipeline": (True, {}),
}


@pytest.mark.parametrize("name", dict.fromkeys(SETTINGS))
def test_no_key_of_fused_params_is_silent(name: str) -> None:
    """Each is obeyed, which tests of the optimizers and of this file see, refused by name, or named in a warning."""
    if name in REFUSED:
        with pytest.raises(ValueError, match=f"fused_params: {name}=.* is not served"):
            EmbeddingBagCollectionSharder({name: REFUSED[name]})
    elif name in CACHES:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            EmbeddingBagCollectionSharder({name: CACHES[name][0]})
    elif name not in OBEYED:
        with pytest.warns(UserWarning, match=f"fused_params: {name} have no effect with SGD"):
            EmbeddingBagCollectionSharder({name: 1})
    for nothing in (None, False):
        if name not in OBEYED:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                EmbeddingBagCollectionSharder({name: nothing})


@pytest.mark.parametrize(
    ("fused", "kind", "message"),
    [
        (
            {"cache_lod_factor": 0.1},
            TypeError,
            "there is no setting 'cache_lod_factor': did you mean 'cache_load_factor'",
        ),
        (
            {"location": EmbeddingLocation.MTIA},
            ValueError,
            "location=MTIA: rows lie on the collection's device, cpu, or",
        ),
        ({"cache_load_factor": 1.5}, ValueError, "cache_load_factor must be a share of the rows, from 0 to 1, got 1.5"),
        ({"cache_algorithm": "MRU"}, ValueError, "cache_algorithm must be CacheAlgorithm LRU or LFU, got 'MRU'"),
        ({"l2_cache_size": -1}, ValueError, "l2_cache_size must be a number of 0 or more, got -1"),
        ({"location": "host"}, ValueError, "location must be an EmbeddingLocation, got 'host'"),
        ({"max_norm": 1.0}, ValueError, "max_norm=1.0 is not served with SGD: ROWWISE_ADAGRAD"),
        ({"output_dtype": SparseType.INT8}, ValueError, "output_dtype must be one of FP32, FP16, BF16, got"),
        ({"weights_precision": DataType.INT8}, ValueError, "weights_precision must be one of FP32, FP16, BF16, got"),
        ({"bounds_check_mode": 7}, ValueError, "bounds_check_mode must be one of FATAL, WARNING, IGNORE, got 7"),
        ({"optimizer": EmbOptimType.NONE}, ValueError, 'optimizer .*NONE.* is not served .*compute_kernel "dense"'),
        ({"optimizer": EmbOptimType.ENSEMBLE_ROWWISE_ADAGRAD}, ValueError, "ENSEMBLE_.* is not served .it mixes all"),
        ({"optimizer": EmbOptimType.EMAINPLACE_ROWWISE_ADAGRAD}, ValueError, "EMAINPLACE_.* served .it mixes all"),
        ({"optimizer": "ROWWISE_RMSPROP"}, ValueError, "optimizer 'ROWWISE_RMSPROP' is not served"),
        ({"weight_decay_mode": "COUNTER"}, ValueError, "weight_decay_mode 'COUNTER' is served by no rule"),
        ({"weight_decay_mode": "COWCLIP"}, ValueError, "weight_decay_mode 'COWCLIP' is served by no rule"),
    ],
)
def test_what_fused_params_cannot_have_is_refused_by_name(fused: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=f"(?s){message}"):
        EmbeddingBagCollectionSharder(fused)


def tier_in(model: Any, table: str = "a") -> Tier | None:
    """Where the model has the rows of a table."""
    found = model.module.states.tables[table].options.tier
    assert found is None or isinstance(found, Tier)
    return found


@pytest.mark.parametrize("name", CACHES)
def test_settings_of_caches_in_fused_params_make_the_tier_of_tables_that_have_one(name: str, tmp_path: Path) -> None:
    value, change = CACHES[name]
    value, change = (str(tmp_path), {"folder": str(tmp_path)}) if name == "ssd_storage_directory" else (value, change)
    folder = os.path.join(tempfile.gettempdir(), "shardwise")
    expected = None if change is None else replace(Tier(0.2, "file", folder, max_slots=1.0), **change)
    with warnings.catch_warnings():
        if name != "cache_reserved_memory":
            warnings.simplefilter("error")
        model = sharded(collection(), {"a": {"compute_kernel": "key_value"}}, {name: value})
    assert tier_in(model) == expected and tier_in(model, "b") is None
    if name != "enforce_hbm":
        # where nothing is below the device, what it asks for is so
        with pytest.warns(UserWarning, match=f"fused_params: {name} have no effect: the plan has no table with rows"):
            sharded(collection(), {}, {name: value})


@pytest.mark.skipif(sys.platform == "win32", reason="needs locks of POSIX")
@pytest.mark.parametrize("chosen", [False, True])
def test_jobs_share_the_folder_that_none_of_them_chose(
    chosen: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two jobs of a host with `key_value` tables and no folder refused each other."""
    import fcntl

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(engine_tiers, "_files", count())
    folder = tmp_path / "shardwise"
    folder.mkdir()
    with ExitStack() as files:
        for number in range(3):
            other = files.enter_context(open(folder / f"a.0.{number}.lock", "w"))
            fcntl.flock(other, fcntl.LOCK_EX)
        if chosen:
            # the same folder, by a name that somebody gave
            with pytest.raises(BlockingIOError, match="give each job a folder of its own"):
                given = {"ssd_storage_directory": f"{tmp_path}/./shardwise"}
                sharded(collection(), {"a": {"compute_kernel": "key_value"}}, given)
        else:
            assert tier_in(sharded(collection(), {"a": {"compute_kernel": "key_value"}}, {})) is not None


def test_what_a_plan_says_of_a_cache_goes_before_fused_params() -> None:
    said = {"compute_kernel": "fused_uvm_caching", "cache_params": CacheParams(load_factor=0.25)}
    model = sharded(
        collection(),
        {"a": said, "b": {"compute_kernel": "fused_uvm"}, "c": {"tier": Tier(3), "compute_kernel": "fused"}},
        {"cache_load_factor": 0.5, "cache_algorithm": CacheAlgorithm.LRU},
    )
    assert tier_in(model, "a") == Tier(0.25, max_slots=1.0, policy="lru")
    assert [tier_in(model, name) for name in "bcd"] == [Tier(), Tier(3), None]


def test_a_location_below_the_device_is_that_of_all_tables_whose_kernel_says_fused() -> None:
    changes = {"a": {"compute_kernel": "fused"}, "b": {"compute_kernel": "fused_uvm"}}
    model = sharded(collection(), changes, {"location": EmbeddingLocation.MANAGED_CACHING, "lr": 0.1})
    assert tier_in(model, "a") == Tier(0.2, max_slots=1.0) and tier_in(model, "b") == Tier()
    model = sharded(collection(), changes, {"location": EmbeddingLocation.MANAGED, "lr": 0.1})
    assert tier_in(model, "a") == Tier() and tier_in(model, "d") is None


def test_parts_of_a_caches_settings_without_effect_are_named() -> None:
    cached = CacheParams(precision=DataType.FP16, multipass_prefetch_config=MultiPassPrefetchConfig(3), stats=object())
    stored = KeyValueParams(ssd_rocksdb_shards=4, use_passed_in_path=False, l2_cache_size=1)
    said = {"compute_kernel": "key_value", "cache_params": cached, "key_value_params": stored}
    with pytest.warns(UserWarning) as caught:
        sharded(collection(), {"a": said}, {})
    told = [str(warning.message) for warning in caught if "the plan's" in str(warning.message)]
    assert [text.partition(":")[0].removesuffix(" (table 'a') has no effect") for text in told] == [
        f"the plan's {part}"
        for part in (
            "cache_params.precision", "cache_params.multipass_prefetch_config", "key_value_params.ssd_rocksdb_shards",
            "key_value_params.use_passed_in_path",
        )
    ]  # fmt: skip
    assert "FP32" in told[0]
    # the table's own type is what its cache has
    said["cache_params"], said["key_value_params"] = CacheParams(precision=DataType.FP32), KeyValueParams()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sharded(collection(), {"a": said}, {})
    said["cache_params"] = CacheParams(load_factor=2.0)
    with pytest.raises(ValueError, match="table 'a': cache_params.load_factor must be a share of the rows"):
        sharded(collection(), {"a": said}, {})


def test_reserved_memory_is_left_on_a_gpu_by_the_slots_of_its_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 has a whole table of 1000 rows of 16 bytes and the cache of another, rank 1 a cache alone."""
    shards = [Shard("on", 0, (0, 1000), (0, 4)), Shard("a", 0, (0, 500), (0, 4)), Shard("a", 1, (500, 1000), (0, 4))]
    tiers = {"on": None, "a": Tier(0.5, max_slots=1.0)}

    def row(table: str, width: int) -> int:
        return 4 * width

    # tables take 16,000 bytes and slots 250 x 16 of the fuller rank
    assert within_memory(tiers, {"a": 1000}, shards, row, 21_000) == tiers
    assert within_memory(tiers, {"a": 1000}, shards, row, 19_000)["a"] == Tier(250, max_slots=1.0)
    assert within_memory(tiers, {"a": 1000}, shards, row, 16_000)["a"] == Tier(1, max_slots=1.0)
    assert within_memory(tiers, {}, shards, row, 16_000) == tiers
    # a GPU of 19,000 bytes; rows have 8 numbers and no states, and half of 12 are in slots
    sharder, module = EmbeddingBagCollectionSharder({"cache_reserved_memory": 18_900.0}), collection()
    place = construct_module_sharding_plan(module, PLACES, world_size=1, local_size=1, device_type="cpu")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 19_000))
    options, held = {"a": TableOptions(tier=Tier(0.5, max_slots=1.0))}, [Shard("a", 0, (0, ROWS), (0, DIM))]
    rows: dict[str, Any] = {"a": module.embedding_bags["a"].weight}
    fitted = sharder._fitted(place, held, options, rows, torch.device("cuda"))
    assert fitted["a"].tier == Tier(100 // (DIM * 4), max_slots=1.0)
    said = {"compute_kernel": "fused_uvm_caching", "cache_params": CacheParams(reserved_memory=100.0)}
    with pytest.warns(
        UserWarning, match="cache_params.reserved_memory of tables 'a' has no effect: a cpu has no memory"
    ):
        sharded(collection(), {"a": said}, {})


def test_tables_on_the_host_are_those_of_the_cpu() -> None:
    settings = settings_from({"location": EmbeddingLocation.HOST})
    settings.require_device(torch.device("cpu"))
    with pytest.raises(ValueError, match="location=HOST: rows lie on the collection's device, cuda"):
        settings.require_device(torch.device("cuda"))


def test_settings_that_a_table_with_its_own_optimizer_does_not_read_are_named() -> None:
    """TorchRec joins them to the table's optimizer; here they were passed over without a word."""
    module = collection()
    apply_optimizer_in_backward(torch.optim.SGD, [module.embedding_bags["a"].weight], {"lr": 0.1})
    with pytest.warns(UserWarning, match="fused_params: gradient_clipping, max_gradient have no effect on table 'a'"):
        sharded(module, {}, {"lr": 0.5, "gradient_clipping": True, "max_gradient": 0.5})


def test_a_table_that_is_resharded_keeps_what_the_new_plan_says_nothing_of() -> None:
    model = sharded(
        collection(dtype=DataType.BF16),
        {"a": {"output_dtype": DataType.FP16}},
        {"output_dtype": BF16, "learning_rate": 0.1},
    )
    env = ShardingEnv.from_local(1, 0)

    def moved(**settings: Any) -> dict[str, ParameterSharding]:
        plan = construct_module_sharding_plan(
            collection(), {**PLACES, "a": row_wise()}, world_size=env.world_size, device_type="cpu"
        )
        for name, value in settings.items():
            setattr(plan["a"], name, value)
        return {"a": plan["a"]}

    def kinds() -> list[Any]:
        return model.module._output_dtypes[:2]  # type: ignore[no-any-return]

    assert kinds() == [FP16, BF16]
    model.reshard(moved())
    assert kinds() == [FP16, BF16]
    model.reshard(moved(output_dtype=DataType.FP32))
    assert kinds() == [FP32, BF16]
    with pytest.raises(ValueError, match="table 'a': stochastic_rounding stays True when a table is resharded"):
        model.reshard(moved(stochastic_rounding=False))


# what TorchRec 1.8's own `pickle.dumps` gave of a plan for two ranks, compressed: whole tables "a" and "b" [12, 8] on
# ranks 0 and 1. "a": cache_params, enforce_hbm=False, stochastic_rounding=False, V2_FATAL, FP16, key_value_params; "b":
# BoundsCheckMode.NONE, BF16
PICKLED = (
    "c-nPT-ESN<5WiECkdRB8%a>HX5duOb4z&;PSkcl};*{k?P%9x-me)IbW9^3*+naEakjg_VD*3JE0sbTYE5^RtyQGDExU<JIKhON;"
    "H-5JE=g%9x__=qi(gHPzQ6`PmGHoqnBRgxrcsDpjt}|IrCnc}_EC0ps{x|Q|ny{lq&tuQM`=Cl83r;60YfE@D<k<Cj@ElIK<`r1b"
    "olggO>~_q;#KP6yy={3~0y~$6HrIu!8p?|mplc|-ThChq8U1Ts7sfyJ;~u{RVHyzL-HMf6DT_sy(G|xLZ=`oe59+o89WL#XI}IpZ"
    "%^NW$T;)FgUtFq<XWVk{b|T10w~r{vs!pcz+<*;m$K&3(2X1?AH}V4J*1>oa+!iq{pn}?Z_u-q@YN!;klEIl2fhKm<uq1cD&Xp$a"
    "SWWc%#I3Wy8<FPTS_ZF2cq()m?5>HX_0Ro}zD?T~KIJBL1HlCXYeFMU=;`+TV3^GJ%L})7IaOL(tcb2WokCTyY158u3ZsZH|7Ake"
    "xtvnw5#`%u&@0L<T<o?>#WR+3LD~67cmMe-e1E$e8Vu+&$XG=c>lxLw)sTjzk*X%RrKT4;-u#Zb@KX>Lm9_S8a{KF8mm5-04pty*"
    "WCNwFBRj@&YE9y9R&8lz!;N7}zeUDLo4ReNbGio@rj>u`_Kj5nxv^3(t=c;3`=uMEVQm=ICkj@njJW>nbxI=W2)aR9@^a%|489*?"
    "PeLdWvk@~NsMgX*uq=)Xe(!b*n6WcnwwJqeeGIe5!S;HC4vitP5lwtba*;%pozwV!IM7NICQI2lbpu%1<~eC6NRu4)E;}rSB5_Ak"
    "ZZSB~;k>mSiHC7P%50RT$zKxa_GpAzAeXu*Yg$?Kf4H6UP6rU~8~5F?;=i);_GN40_MwjN12?l;u(qKo3+98gEek@EmiTV#qH{kg"
    "`NfQ_4(HJsoqVtW()^sQ_@@yAUWEoGZkMzcse)CxyT#cBiGg~zs^>6DRTPb-SIZ*xhpEPr0yZ1NP?^Za0j)(TX`q=Ufl>fHJ0U@`"
    "hdM(O8)8YrFD)1wM7TI9mEa|1p8>6*o)TLmLXu%W^|&){EAHYD_i!H%=tb;vJi?pt0N;D+@uS5Pgr9Ve4u0A_H268*T0nf6;Aq^("
    "ukg-)%s+mUV3Obu2~O~Id@Y>eV|?V+?mb+L6g~-A8Iz9w1+YAd)&"
)


def loaded_and_trained(seq: bool) -> dict[str, Any]:
    """A rank of a model under TorchRec's plan, and one process with the same batch."""
    shardwise.torchrec.install()
    try:
        plan = pickle.loads(zlib.decompress(base64.b85decode(PICKLED)))
    finally:
        shardwise.torchrec.uninstall()
    config: Any = EmbeddingConfig if seq else EmbeddingBagConfig
    make: Any = EmbeddingCollection if seq else EmbeddingBagCollection
    modules, keys = [], ("fa", "fb")
    for _ in range(2):
        torch.manual_seed(0)
        tables = [config(ROWS, DIM, name, feature_names=[f"f{name}"]) for name in "ab"]
        modules.append(make(tables, device="cpu"))
        apply_optimizer_in_backward(torch.optim.SGD, modules[-1].parameters(), {"lr": 0.25})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = DistributedModelParallel(modules[0], plan=plan)
    ids, lengths = torch.tensor([0, 1, 1, 5, 2, 11]), torch.tensor([2, 1, 0, 3])
    features = KeyedJaggedTensor(list(keys), ids, lengths=lengths)
    outputs = [answers(one, features, seq) for one in (model, modules[1])]
    for output in outputs:
        sum(values.float().mul(0.5).sum() for values in output.values()).backward()  # type: ignore[union-attr]
    held = {name: param.detach() for name, param in model.named_parameters() if param.numel()}
    rows = [torch.equal(param, modules[1].get_parameter(name).detach()) for name, param in held.items()]
    bad = [KeyedJaggedTensor(list(keys), torch.tensor(ids), lengths=torch.ones(2).long()) for ids in ([12, 1], [1, 12])]
    return {
        "outputs": outputs,
        "rows": rows,
        "said": [str(w.message).partition(":")[0] for w in caught],
        "bad": [error_of(lambda batch=batch: answers(model, batch, seq)["fa"]).partition(":")[0] for batch in bad],
    }


@pytest.mark.parametrize("seq", [False, True], ids=["pooled", "sequence"])
def test_a_plan_that_torchrec_pickled_sets_what_it_says_of_its_tables(seq: bool) -> None:
    """Outputs are those of one process, rounded to the table's type; updated rows have the same bits."""
    for found in run_ranks(2, loaded_and_trained, seq):
        sharded_output, alone = found["outputs"]
        for key, own in (("fa", FP16), ("fb", BF16)):
            assert sharded_output[key].dtype == (own if seq else FP32)
            assert torch.equal(sharded_output[key].float(), alone[key].detach().to(own).float())
        assert found["rows"] == [True]
        # "b" lets bad ids pass
        assert found["bad"] == ["RefusedIndexError", ""]
        named = [words for words in found["said"] if words.startswith("the plan's")]
        assert named == [
            f"the plan's {what} (table 'a') has no effect"
            for what in ("cache_params", "enforce_hbm", "key_value_params")
        ]
