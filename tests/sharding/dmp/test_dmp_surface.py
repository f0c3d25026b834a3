"""DistributedModelParallel's arguments, wrappers around dense layers, what is inside, and copies."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from jagged_batches import kjt
from model_zoo import bag_tables, fused
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from shardwise import (
    DistributedModelParallel,
    EmbeddingBagCollection,
    KeyedJaggedTensor,
    RowWiseAdagrad,
    ShardedEmbeddingBagCollection,
    ShardingEnv,
    ShardingPlan,
)
from shardwise.embeddings import PositionWeightedModuleCollection
from shardwise.sharding import (
    EmbeddingBagCollectionSharder,
    EmbeddingCollectionSharder,
    ModuleSharder,
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_wise,
)
from shardwise.sharding.dmp.composable import shard
from shardwise.sharding.dmp.data_parallel import DataParallelWrapper, DefaultDataParallelWrapper, materialize
from shardwise.sharding.dmp.unwrap import (
    copy_to_device,
    get_module,
    get_unsharded_module_names,
    get_unwrapped_module,
    sharded_model_copy,
)

pytestmark = pytest.mark.ranks

ROWS = {"a": 13, "b": 11}


def bags(optimizer: bool = True, kind: type[EmbeddingBagCollection] = EmbeddingBagCollection) -> EmbeddingBagCollection:
    torch.manual_seed(7)
    collection = kind(bag_tables(ROWS))
    return fused(collection, RowWiseAdagrad) if optimizer else collection


class Scaled(EmbeddingBagCollection):
    """A collection with a forward of its own."""

    def forward(self, features: KeyedJaggedTensor) -> Any:
        pooled = super().forward(features)
        return type(pooled)(pooled.keys(), pooled.length_per_key(), pooled.values() * 2)


class Net(nn.Module):
    def __init__(self, dense: nn.Module | None = None, collection: nn.Module | None = None) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.ebc = collection or bags()
        self.dense = dense or nn.Linear(16, 4)
        self.over = nn.Sequential(nn.ReLU(), nn.Linear(4, 1))

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        return self.over(self.dense(self.ebc(features).values())).sum()


def batch_of(rank: int) -> KeyedJaggedTensor:
    return kjt({"a": [[1 + rank, 2 + rank], [3 + rank]], "b": [[4 + rank], [5 + rank, 6 + rank]]})


def mine() -> KeyedJaggedTensor:
    return batch_of(dist.get_rank() if dist.is_initialized() else 0)


def gradients(wrapper: dict[str, Any]) -> dict[str, Tensor]:
    dmp = DistributedModelParallel(Net(), data_parallel_wrapper=DefaultDataParallelWrapper(**wrapper))
    wrapped = dmp._dmp_wrapped_module
    assert isinstance(wrapped, DistributedDataParallel)
    assert wrapped.find_unused_parameters == wrapper.get("find_unused_parameters", False)
    assert wrapped.static_graph == wrapper.get("static_graph", True)
    assert wrapped.bucket_bytes_cap == wrapper.get("bucket_cap_mb", 25) * 2**20
    dmp(mine()).backward()
    return {name: param.grad.clone() for name, param in dmp.named_parameters() if param.grad is not None}


WRAPPERS: dict[str, tuple[dict[str, Any], float]] = {
    "as it is": ({}, 1e-6),
    "fp16": ({"allreduce_comm_precision": "fp16"}, 1e-3),
    "bf16": ({"allreduce_comm_precision": "bf16", "bucket_cap_mb": 1}, 1e-2),
    "no static graph": ({"static_graph": False, "find_unused_parameters": True}, 1e-6),
    "arguments of DDP": ({"ddp_kwargs": {"gradient_as_bucket_view": False}}, 1e-6),
    "one more left alone": ({"params_to_ignore": ["over.1.bias"]}, 1e-6),
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_dense_gradients_are_averaged_as_the_wrapper_says(name: str) -> None:
    wrapper, tolerance = WRAPPERS[name]
    model, left_alone = Net(), wrapper.get("params_to_ignore", [])
    # both before the first backward, which trains the tables
    (torch.stack([model(batch_of(rank)) for rank in range(2)]).mean()).backward()
    own = Net()
    own(batch_of(1)).backward()
    first, second = run_ranks(2, gradients, wrapper)
    assert first.keys() == {"dense.weight", "dense.bias", "over.1.weight", "over.1.bias"}
    for key, value in first.items():
        assert torch.equal(value, second[key]) or key in left_alone
        wanted = dict((own if key in left_alone else model).named_parameters())[key].grad
        assert wanted is not None
        assert (second[key] - wanted).abs().max() <= tolerance * wanted.abs().max(), key
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(name)
    for other in (torch.float16, torch.bfloat16) if dtype is None else (dtype,):
        fits = all(torch.equal(value, value.to(other).float()) for value in first.values())
        assert fits == (other is dtype)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            lambda: {"data_parallel_wrapper": DefaultDataParallelWrapper(allreduce_comm_precision="fp8")}, ValueError,
            r"allreduce_comm_precision must be one of \[None, 'fp16', 'bf16'\], got 'fp8'",
        ),
        (
            lambda: {"data_parallel_wrapper": DefaultDataParallelWrapper(params_to_ignore=["nowhere"])}, ValueError,
            r"params_to_ignore \['nowhere'\]: the model has no such parameters",
        ),
        (
            lambda: {"data_parallel_wrapper": "ddp"}, TypeError,
            "data_parallel_wrapper must be a DataParallelWrapper, got str",
        ),
        (lambda: {"model_tracker_configs": {}}, ValueError, "model_tracker_configs"),
    ],
    ids=["fp8", "nowhere", "str", "model_tracker_configs"],
)  # fmt: skip
def test_a_wrapper_that_cannot_be_is_refused(
    arguments: Callable[[], dict[str, Any]], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        DistributedModelParallel(Net(), ShardingEnv.from_local(1, 0), **arguments())


class Counting(DataParallelWrapper):
    """Wraps nothing and counts."""

    def __init__(self) -> None:
        self.calls: list[tuple[ShardingEnv, torch.device]] = []

    def wrap(self, dmp: DistributedModelParallel, env: ShardingEnv, device: torch.device) -> None:
        self.calls.append((env, device))
        dmp._dmp_wrapped_module = nn.Sequential(dmp._dmp_wrapped_module)


def test_a_wrapper_of_ones_own_is_asked_once() -> None:
    wrapper, env = Counting(), ShardingEnv.from_local(1, 0)
    dmp = DistributedModelParallel(Net(), env, data_parallel_wrapper=wrapper, init_data_parallel=False)
    assert wrapper.calls == []
    dmp.init_data_parallel()
    dmp.init_data_parallel()
    assert wrapper.calls == [(env, torch.device("cpu"))]
    assert dmp.device == torch.device("cpu")


def lazy() -> tuple[list[float], list[str]]:
    torch.manual_seed(dist.get_rank())
    dmp = DistributedModelParallel(Net(nn.LazyLinear(4)), init_data_parallel=False)
    assert not isinstance(dmp._dmp_wrapped_module, DistributedDataParallel)
    with torch.no_grad():
        dmp(mine())
    dmp.init_data_parallel()
    assert isinstance(dmp._dmp_wrapped_module, DistributedDataParallel)
    losses = []
    for _ in range(2):
        dmp.zero_grad()
        dmp(batch_of(0)).backward()
        losses.append(float(sum(p.grad.abs().sum() for p in dmp.module.dense.parameters())))  # type: ignore[union-attr]
    return losses, [name for name, _ in dmp.named_parameters()]


def test_lazy_layers_are_made_data_parallel_after_a_first_forward() -> None:
    first, second = run_ranks(2, lazy)
    assert first[0] == second[0]
    assert "dense.weight" in first[1]


def left_on_meta() -> list[float]:
    model = Net(nn.Linear(16, 4, device="meta"))
    with pytest.raises(ValueError, match=r"\['dense.weight', 'dense.bias'\] are on meta, .* pass init_parameters=True"):
        DistributedModelParallel(model, init_parameters=False)
    model = Net(nn.Linear(16, 4, device="meta"))
    dmp = DistributedModelParallel(model, init_parameters=False, init_data_parallel=False)
    assert model.dense.weight.is_meta
    assert not any(param.is_meta for name, param in dmp.named_parameters() if "dense" not in name)
    dense: Any = model.dense
    dense.to_empty(device="cpu")
    nn.init.constant_(dense.weight, 0.25)
    nn.init.constant_(dense.bias, dist.get_rank())
    dmp.init_data_parallel()
    # those of the first rank
    return [float(dense.weight.mean()), float(dense.bias.mean())]


def test_parameters_on_meta_can_be_left_to_the_user() -> None:
    assert run_ranks(2, left_on_meta) == [[0.25, 0.0]] * 2


def test_what_a_dict_of_parameters_holds_is_initialised_by_its_owner() -> None:
    """Position weights on meta became zeros: their ParameterDict has no reset_parameters, its owner has."""
    module = nn.Sequential(PositionWeightedModuleCollection({"a": 3}, "meta"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        materialize(module, torch.device("cpu"))
    assert [param.tolist() for param in module.parameters()] == [[1.0, 1.0, 1.0]]


class Halved(nn.Module):
    """What a sharder of one's own makes of a layer."""

    def __init__(self, module: nn.Linear) -> None:
        super().__init__()
        self.inner = module

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) / 2

    def sharded_parameter_names(self, prefix: str = "") -> Iterator[str]:
        yield from (f"{prefix}.inner.{name}" for name in ("weight", "bias"))


class LinearSharder(ModuleSharder[nn.Linear]):
    def shard(self, module: nn.Linear, params: Any, env: Any, device: Any = None, module_fqn: Any = None) -> nn.Module:
        assert set(params) == {"weight", "bias"}
        return Halved(module)

    @property
    def module_type(self) -> type[nn.Linear]:
        return nn.Linear


def with_sharders() -> None:
    model, whole = Net(), {"weight": data_parallel(), "bias": data_parallel()}
    size: dict[str, Any] = {"world_size": 2, "device_type": "cpu"}
    plan = ShardingPlan({
        "ebc": construct_module_sharding_plan(model.ebc, {"ta": row_wise(), "tb": row_wise()}, **size),
        "dense": construct_module_sharding_plan(model.dense, whole, LinearSharder(), **size),
    })  # fmt: skip
    sharders: list[ModuleSharder[Any]] = [EmbeddingBagCollectionSharder(), LinearSharder()]
    with pytest.raises(ValueError, match="the plan has no part for module 'over.1'; .* pass sharders without one"):
        DistributedModelParallel(model, plan=plan, sharders=sharders)
    plan.plan["over.1"] = construct_module_sharding_plan(model.over[1], whole, LinearSharder(), **size)
    dmp = DistributedModelParallel(model, plan=plan, sharders=sharders)
    assert dmp.sharders == sharders
    assert isinstance(model.dense, Halved)
    names = {name for name, _ in dmp.named_parameters()}
    assert {"dense.inner.weight", "over.1.inner.bias", "ebc.embedding_bags.ta.weight"} <= names
    # all is sharded: nothing is left for DDP
    assert not isinstance(dmp._dmp_wrapped_module, DistributedDataParallel)
    assert set(get_unsharded_module_names(dmp)) == {"_dmp_wrapped_module.over.0"}
    plain = Net()
    hidden = plain.dense(plain.ebc(mine()).values()) / 2
    torch.testing.assert_close(dmp(mine()), (plain.over(hidden) / 2).sum(), rtol=0, atol=1e-5)


def test_sharders_say_what_is_sharded_and_how() -> None:
    run_ranks(2, with_sharders)


def derived() -> None:
    model = Net(collection=bags(False, Scaled))
    with pytest.warns(UserWarning) as caught:
        dmp = DistributedModelParallel(model)
    assert ["Scaled derives from EmbeddingBagCollection" in str(warning.message) for warning in caught] == [True]
    assert isinstance(dmp.module.ebc, Scaled)
    dmp(mine()).backward()
    assert dmp.module.get_parameter("ebc.embedding_bags.ta.weight").grad is not None
    expected = Net(collection=bags(False, Scaled))(mine())
    torch.testing.assert_close(dmp(mine()), expected, rtol=0, atol=1e-5)


def test_a_class_of_ones_own_is_data_parallel_unless_a_sharder_is_given_for_it() -> None:
    """Its forward doubles the rows; sharded as its base the model would have lost that without a word."""
    run_ranks(2, derived)


def test_fused_params_of_a_sharder_are_the_optimizer_of_tables_without_one() -> None:
    sharder = EmbeddingBagCollectionSharder({"optimizer": "ROWWISE_ADAGRAD", "learning_rate": 0.5})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dmp = DistributedModelParallel(Net(collection=bags(False)), ShardingEnv.from_local(1, 0), sharders=[sharder])
    assert dmp.fused_optimizer.param_groups[0]["lr"] == 0.5
    with pytest.warns(UserWarning, match=r"tables \['ta', 'tb'\] have no optimizer: .* SGD at lr 0.01"):
        DistributedModelParallel(Net(collection=bags(False)), ShardingEnv.from_local(1, 0))
    # a sharder for other modules leaves these alone
    dmp = DistributedModelParallel(Net(), ShardingEnv.from_local(1, 0), sharders=[EmbeddingCollectionSharder()])
    assert type(dmp.module.ebc) is EmbeddingBagCollection
    assert dmp.plan.plan == {}


def sharded_before() -> None:
    model = Net()
    model.ebc = shard(model.ebc, row_wise(), device="cpu")
    dmp = DistributedModelParallel(model)
    assert dmp.plan.plan == {}
    dmp(mine()).backward()
    assert set(dmp.fused_optimizer.params) == {f"ebc.embedding_bags.{name}.weight" for name in ("ta", "tb")}
    assert math.isfinite(dmp(batch_of(4)))


def test_a_module_that_is_sharded_already_stays_as_it_is() -> None:
    run_ranks(2, sharded_before)


def plan_devices() -> list[str]:
    model = Net()
    where = {"ta": table_wise(0), "tb": table_wise(1)}
    plan = construct_module_sharding_plan(model.ebc, where, world_size=2, device_type="cuda")
    with pytest.warns(UserWarning) as caught:
        dmp = DistributedModelParallel(model, plan=ShardingPlan({"ebc": plan}))
    dmp(mine()).backward()
    assert {param.device.type for param in dmp.parameters()} == {"cpu"}
    if not torch.cuda.is_available():
        with pytest.warns(UserWarning) as caught_of_device:
            on_cpu = DistributedModelParallel(Net(), device="cuda", plan=ShardingPlan({"ebc": plan}))
        on_cpu(mine()).backward()
        assert on_cpu.device.type == "cpu"
        messages = [str(warning.message) for warning in caught_of_device]
        assert messages == ["device 'cuda': there is no CUDA here, so all runs on the CPU"]
    with pytest.raises(
        ValueError, match="rank 1: device 'xla': the process group .gloo. exchanges tensors on cpu, cuda"
    ):
        DistributedModelParallel(Net(), device="xla" if dist.get_rank() == 1 else "cpu")
    return [f"{warning.filename} {warning.message}" for warning in caught]


def test_a_plan_made_for_cuda_runs_on_the_cpu_with_one_warning() -> None:
    for messages in run_ranks(2, plan_devices):
        assert len(messages) == 1
        assert messages[0].startswith(__file__)
        assert "the plan places tables on cuda, and they are sharded for device 'cpu': there they go" in messages[0]


def unwrapped() -> None:
    model = Net()
    dmp = DistributedModelParallel(model)
    wrapped = dmp._dmp_wrapped_module
    assert isinstance(wrapped, DistributedDataParallel)
    assert get_module(dmp) is wrapped
    assert dmp.module is get_unwrapped_module(dmp) is get_unwrapped_module(wrapped) is model
    assert get_unwrapped_module(model) is get_module(model) is model
    assert get_unsharded_module_names(nn.Linear(2, 2)) == []
    names = {"_dmp_wrapped_module.module.dense", "_dmp_wrapped_module.module.over"}
    assert set(get_unsharded_module_names(dmp)) == names


def test_the_model_inside_and_the_names_of_what_is_not_sharded() -> None:
    """The names of torchrec 1.8.0, wrappers included."""
    run_ranks(2, unwrapped)


def copied(how: str) -> None:
    dmp = DistributedModelParallel(Net(), init_data_parallel=False)
    other: Any
    if how == "deepcopy":
        with sharded_model_copy("cpu"):
            other = copy.deepcopy(dmp)
    else:
        other = dmp.copy("cpu") if how == "copy" else copy_to_device(dmp, torch.device("cpu"), torch.device("cpu"))
    assert isinstance(other.module.ebc, ShardedEmbeddingBagCollection)
    assert torch.equal(other(mine()), dmp(mine()))
    before = {name: param.detach().clone() for name, param in dmp.named_parameters()}
    other(mine()).backward()
    # what the copy trains is what it looks up, and its optimizer's
    for model in (dmp, other):
        for path, sharded in model._sharded.items():
            for name, param in sharded.fused_optimizer.params.items():
                assert param.data_ptr() == model.module.get_parameter(f"{path}.{name}").data_ptr()
    shared = how != "deepcopy"
    assert any(not torch.equal(param, before[name]) for name, param in dmp.named_parameters()) == shared
    assert torch.equal(other(mine()), dmp(mine())) == shared
    # tensors outside copy as they did
    weight = nn.Parameter(torch.ones(2))
    assert copy.deepcopy(weight).data_ptr() != weight.data_ptr()


@pytest.mark.parametrize("how", ["deepcopy", "copy", "copy_to_device"])
def test_copies_look_up_what_they_train(how: str) -> None:
    """A copy to another place has its own tables; one to the same device shares them, as in torchrec 1.8.0."""
    run_ranks(2, copied, how)
