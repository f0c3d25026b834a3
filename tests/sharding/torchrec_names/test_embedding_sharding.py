"""TorchRec's words for tables of a rank: groups, lookups of groups, and a sharded module that is made of them.

Numbers marked as the peer's are those of torchrec 1.8.0 and fbgemm-gpu-cpu 1.8.0 for the same input.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from jagged_batches import random_kjt
from model_zoo import bag_tables
from ranks import run_ranks
from torch import Tensor, nn

from shardwise import (
    DataType,
    DistributedModelParallel,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    KeyedTensor,
    ModuleSharder,
    ParameterSharding,
    PoolingType,
    RowWiseAdagrad,
    ShardedModule,
    ShardingEnv,
    ShardingPlan,
    apply_optimizer_in_backward,
    construct_module_sharding_plan,
)
from shardwise.embeddings import LAMB, CombinedOptimizer
from shardwise.embeddings.collections.position_weights import BaseGroupedFeatureProcessor
from shardwise.embeddings.optim.fbgemm_types import EmbeddingLocation, EmbOptimType
from shardwise.sharding import (
    Awaitable,
    LazyAwaitable,
    ShardedEmbeddingBagCollection,
    column_wise,
    data_parallel,
    row_wise,
    table_wise,
)
from shardwise.sharding.plan.plan import EmbeddingComputeKernel as Kernel, ShardingType
from shardwise.sharding.torchrec.dist_data import KJTAllToAll
from shardwise.sharding.torchrec.embedding_sharding import (
    BaseEmbeddingDist,
    BaseSparseFeaturesDist,
    EmbeddingSharding,
    EmbeddingShardingContext,
    KJTListSplitsAwaitable,
    create_sharding_infos_by_sharding,
    group_tables,
    infos_of_bags,
    infos_of_rows,
    sharded_tables,
)
from shardwise.sharding.torchrec.embedding_types import (
    KJTList,
    ListOfKJTList,
    ShardedEmbeddingModule,
    ShardedEmbeddingTable,
    compute_kernel_to_embedding_location,
)
from shardwise.sharding.torchrec.fused_params import emb_opt_type_to_optimizer_class, optimizer_type_to_emb_opt_type
from shardwise.sharding.torchrec.grouped_lookup import GroupedEmbeddingsLookup, GroupedPooledEmbeddingsLookup
from shardwise.sharding.torchrec.mean_pooling import _apply_mean_pooling, _create_mean_pooling_divisor
from shardwise.sharding.torchrec.pooled_dist import PooledEmbeddingsAllToAll

ADAGRAD = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.1, "eps": 1e-8}


def table(name: str, cols: int = 4, rows: int = 6, **fields: Any) -> ShardedEmbeddingTable:
    """A table that its rank has as a whole."""
    features = fields.pop("features", [f"f{name}"])
    given = {"compute_kernel": Kernel.FUSED, "fused_params": {}, **fields}
    return ShardedEmbeddingTable(
        rows, cols, name, feature_names=features, embedding_names=features, local_rows=rows, local_cols=cols, **given
    )


def test_shards_of_one_kind_are_looked_up_together() -> None:
    """Groups, their order, and their mean load factor are the peer's."""
    cached, ahead = Kernel.FUSED_UVM_CACHING, {"prefetch_pipeline": True}
    tables = [
        table("a"),
        table("b", data_type=DataType.FP16),
        table("c", pooling=PoolingType.MEAN),
        table("d", compute_kernel=Kernel.DENSE),
        table("e", 8, compute_kernel=Kernel.FUSED_UVM),
        table("f", compute_kernel=cached, fused_params={"cache_load_factor": 0.2}),
        table("g", rows=2, compute_kernel=cached, fused_params={"cache_load_factor": 0.6}),
        table("h", compute_kernel=cached, fused_params=ahead),
        table("i", 8, compute_kernel=cached, fused_params=ahead),
        table("j", fused_params={"learning_rate": 0.5}),
        table("k", fused_params={"learning_rate": 0.5}, features=["x", "y"]),
        table("l", fused_params={"use_one_tbe_per_table": True}),
        table("m", fused_params={"use_one_tbe_per_table": True}),
        table("n", compute_kernel=cached, fused_params=ahead),
    ]
    groups, none = group_tables([tables, []])
    assert none == []
    assert ["".join(group.table_names()) for group in groups] == ["aefg", "b", "c", "d", "hn", "i", "jk", "l", "m"]
    assert groups[0].fused_params == {"cache_load_factor": pytest.approx(0.3)}
    assert [group.fused_params for group in groups[4:]] == [ahead, ahead, {"learning_rate": 0.5}, {}, {}]
    assert {group.compute_kernel for group in groups} == {Kernel.FUSED, Kernel.DENSE}
    of_j, first = groups[6], groups[0]
    assert of_j.feature_names() == ["fj", "x", "y"] == of_j.embedding_names() and of_j.num_features() == 3
    assert (first.dim_sum(), first.embedding_dims(), first.feature_hash_sizes()) == (20, [4, 8, 4, 4], [6, 6, 6, 2])
    assert first.embedding_shard_metadata() == [None] * 4 and not first.is_using_virtual_table()
    quantized = [table("q", compute_kernel=Kernel.QUANT, data_type=DataType.INT8)]
    quantized += [table("r", compute_kernel=Kernel.QUANT, data_type=DataType.INT4)]
    (of_both,) = group_tables([quantized])[0]
    assert of_both.table_names() == ["q", "r"] and of_both.data_type is None
    with pytest.raises(ValueError, match=r"tables \['w'\] are weighted and others not"):
        group_tables([[table("a")], [table("w", is_weighted=True)]])


def filled(tables: nn.Module) -> Any:
    """With the weights that the peer had too."""
    with torch.no_grad():
        for n, (_, param) in enumerate(tables.named_parameters()):
            param.copy_(torch.arange(float(param.numel())).view(param.shape).mul(0.1).add(n).sin())
    return tables


def batch_of(keys: list[str], lengths: list[int], *, weighted: bool = False) -> KeyedJaggedTensor:
    count = sum(lengths)
    weights = torch.arange(float(count)).add(1).div(4).requires_grad_() if weighted else None
    return KeyedJaggedTensor(keys, torch.arange(count) * 7 % 6, weights, lengths=torch.tensor(lengths))


def trained(module: Any, batch: KeyedJaggedTensor, steps: int = 1) -> Tensor:
    """The last output of as many steps, whose gradients are cosines of the place."""
    output = torch.empty(0)
    for _ in range(steps):
        found = module(batch)
        output = found.values() if isinstance(found, KeyedTensor) else found
        (output * torch.arange(output.numel()).view(output.shape).cos()).sum().backward()
    return output.detach()


MIXED = [
    table("a", fused_params=ADAGRAD), table("b", 8, fused_params=ADAGRAD, features=["x", "y"]),
    table("c", pooling=PoolingType.MEAN, fused_params=ADAGRAD), table("d", compute_kernel=Kernel.DENSE),
]  # fmt: skip


def test_pooled_lookups_train_as_a_collection_and_as_the_peer() -> None:
    lookup = filled(GroupedPooledEmbeddingsLookup(group_tables([MIXED])[0]))
    names = ["a.weight", "b.weight", "c.weight", "d.weight"]
    assert [name for name, _ in lookup.named_parameters()] == names == list(lookup.state_dict())
    configs = [
        EmbeddingBagConfig(6, t.embedding_dim, t.name, feature_names=t.feature_names, pooling=t.pooling) for t in MIXED
    ]
    bags = filled(EmbeddingBagCollection(configs))
    fused = [bags.embedding_bags[name].weight for name in "abc"]
    apply_optimizer_in_backward(RowWiseAdagrad, fused, {"lr": 0.1, "eps": 1e-8})
    batch = batch_of(["fa", "x", "y", "fc", "fd"], [2, 0, 1, 3, 1, 1, 2, 2, 0, 1])
    output = trained(lookup, batch, 2)
    assert torch.equal(output, trained(bags, batch, 2))
    for (_, param), wanted in zip(lookup.named_parameters(), bags.parameters(), strict=True):
        assert torch.equal(param, wanted)
    gradient = dict(lookup.named_parameters())["d.weight"].grad
    assert gradient is not None and torch.equal(gradient, bags.embedding_bags["d"].weight.grad)
    # the peer's
    assert output.double().sum().item() == pytest.approx(-3.319781806, abs=1e-5)
    sums = [param.double().sum().item() for param in lookup.parameters()]
    assert sums == pytest.approx([16.963138357, -3.369684607, 0.043110009, -15.776369844], abs=1e-5)
    # states are by the names of the shards, and load
    other = GroupedPooledEmbeddingsLookup(group_tables([MIXED])[0])
    assert other.load_state_dict(lookup.state_dict()) == ([], [])
    assert all(torch.equal(value, lookup.state_dict()[name]) for name, value in other.state_dict().items())
    assert [name for name, _ in other.named_parameters_by_table()] == ["a", "b", "c", "d"]
    with pytest.raises(RuntimeError, match=r"lacks \['d.weight'\] and has \['e'\]"):
        other.load_state_dict({**{name: lookup.state_dict()[name] for name in names[:3]}, "e": output})
    with pytest.raises(ValueError, match=r"a.weight: the shard is \[6, 4\], loaded \[1, 4\]"):
        other.load_state_dict({"a.weight": torch.zeros(1, 4)}, strict=False)


def test_weights_get_gradients_and_processors_change_the_batch_of_their_groups() -> None:
    weighted = [
        table("a", fused_params=ADAGRAD, is_weighted=True),
        table("b", 8, fused_params=ADAGRAD, is_weighted=True),
    ]
    lookup = filled(GroupedPooledEmbeddingsLookup(group_tables([weighted])[0]))
    batch = batch_of(["fa", "fb"], [2, 1, 0, 3], weighted=True)
    output = trained(lookup, batch)
    # the peer's
    assert output.double().sum().item() == pytest.approx(-19.843464464, abs=1e-5)
    sums = [param.double().sum().item() for param in lookup.parameters()]
    assert sums == pytest.approx([16.832828932, -2.273426149], abs=1e-5)
    gradient = batch.weights().grad
    assert gradient is not None
    wanted = [-0.321298182, -0.224291727, 0.754192233, 0.844988465, 1.153709173, 0.762605906]
    assert gradient.tolist() == pytest.approx(wanted, abs=1e-5)

    class Doubles(BaseGroupedFeatureProcessor):
        def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
            weights = torch.full((features.values().shape[0],), 2.0)
            return KeyedJaggedTensor(features.keys(), features.values(), weights, lengths=features.lengths())

    groups = group_tables([[table("a", fused_params=ADAGRAD), table("b", has_feature_processor=True)]])[0]
    lookup = filled(GroupedPooledEmbeddingsLookup(groups, feature_processor=Doubles()))
    plain = filled(GroupedPooledEmbeddingsLookup(group_tables([[table("a"), table("b", fused_params=ADAGRAD)]])[0]))
    batch = batch_of(["fa", "fb"], [2, 1, 1, 3])
    assert torch.equal(lookup(batch), plain(batch) * torch.tensor([1.0] * 4 + [2.0] * 4))


def test_rows_of_ids_train_as_a_collection_and_as_the_peer() -> None:
    none = PoolingType.NONE
    tables = [
        table("a", fused_params=ADAGRAD, pooling=none),
        table("b", fused_params=ADAGRAD, features=["fa", "y"], pooling=none),
        table("d", compute_kernel=Kernel.DENSE, pooling=none),
    ]
    lookup = filled(GroupedEmbeddingsLookup(group_tables([tables])[0]))
    # keys are told by their places: a feature of two tables comes once for each, here with other ids
    output = trained(lookup, batch_of(["fa", "fb", "y", "fd"], [2, 0, 1, 3, 1, 1, 2, 0]))
    assert output.shape == (40,) and output.double().sum().item() == pytest.approx(18.213169876, abs=1e-5)
    sums = [param.double().sum().item() for param in lookup.parameters()]
    assert sums == pytest.approx([16.814387441, 15.764338262, -0.156783689], abs=1e-5)
    rows = EmbeddingCollection([EmbeddingConfig(6, 4, name, feature_names=[f"f{name}"]) for name in "ab"])
    apply_optimizer_in_backward(RowWiseAdagrad, filled(rows).parameters(), {"lr": 0.1, "eps": 1e-8})
    pair = [table(name, fused_params=ADAGRAD, pooling=none) for name in "ab"]
    lookup, batch = filled(GroupedEmbeddingsLookup(group_tables([pair])[0])), batch_of(["fa", "fb"], [2, 0, 1, 3])
    found = rows(batch)
    flat = torch.cat([found[name].values().flatten() for name in ("fa", "fb")])
    assert torch.equal(lookup(batch), flat)
    for output in (lookup(batch), flat):
        (output * torch.arange(output.numel()).cos()).sum().backward()
    assert all(map(torch.equal, lookup.parameters(), rows.parameters()))


def test_shards_of_one_table_on_a_rank_are_numbered_and_averages_of_row_shards_are_left_to_others() -> None:
    halves = [table("a", fused_params=ADAGRAD) for _ in range(2)]
    lookup = filled(GroupedPooledEmbeddingsLookup(group_tables([halves])[0]))
    assert [name for name, _ in lookup.named_parameters()] == ["a.weight", "a@1.weight"]
    output = lookup(batch_of(["fa", "fb"], [1, 1, 1, 1]))
    assert torch.equal(output[:, 4:], list(lookup.parameters())[1][[2, 3]]), "ids 14 % 6 and 21 % 6"
    means = group_tables([[table("c", pooling=PoolingType.MEAN)]])[0]
    batch, by_type = batch_of(["fc"], [2, 3]), {}
    for kind in (None, ShardingType.ROW_WISE):
        by_type[kind] = filled(GroupedPooledEmbeddingsLookup(means, sharding_type=kind))(batch)
    ones = torch.tensor([[2.0], [3.0]])
    assert torch.allclose(by_type[None] * ones, by_type[ShardingType.ROW_WISE])


@pytest.mark.parametrize("pooled", [True, False])
@pytest.mark.parametrize("kernel", [Kernel.FUSED_UVM, Kernel.FUSED_UVM_CACHING, Kernel.KEY_VALUE])
def test_a_grouped_lookup_over_rows_below_the_device_has_the_bits_of_one_on_it(kernel: Kernel, pooled: bool) -> None:
    """It was refused by name. Caches of one group have the mean of the load factors of its tables."""
    kind = GroupedPooledEmbeddingsLookup if pooled else GroupedEmbeddingsLookup
    settings = {**ADAGRAD, "cache_load_factor": 0.5}
    names = ("a", "b")

    def made(kernel: Kernel, fused_params: dict[str, Any]) -> Any:
        group = [table(name, compute_kernel=kernel, fused_params=dict(fused_params)) for name in names]
        return kind(group_tables([group])[0])

    below, whole = made(kernel, settings), made(Kernel.FUSED, ADAGRAD)
    begin = {name: torch.arange(rows.numel()).view_as(rows) / 7 for name, rows in whole.state_dict().items()}
    for lookup in (below, whole):
        lookup.load_state_dict(begin)
    keys = [feature for config in whole.grouped_configs for feature in config.feature_names()]
    for step in range(5):
        lengths = [1 + (step + n) % 3 for n in range(2 * len(keys))]
        outputs = [lookup(batch_of(keys, lengths)) for lookup in (below, whole)]
        assert torch.equal(*outputs)
        for output in outputs:
            (output * torch.arange(output.numel()).view_as(output).cos()).sum().backward()
    found, expected = below.state_dict(), whole.state_dict()
    assert found.keys() == expected.keys() and not torch.equal(expected["a.weight"], begin["a.weight"])
    assert all(torch.equal(found[name], expected[name]) for name in found)
    for kernel_module, other in zip(below._emb_modules, whole._emb_modules, strict=True):
        assert all(map(torch.equal, kernel_module.split_embedding_weights(), other.split_embedding_weights()))
        assert kernel_module.fused_optimizer.param_groups[0]["lr"] == other.fused_optimizer.param_groups[0]["lr"]
        tiers = [each.options.tier for each in kernel_module._collection.states.tables.values()]
        # as TorchRec groups tables, a load factor is that of caches over host memory
        slots = {Kernel.FUSED_UVM: None, Kernel.FUSED_UVM_CACHING: 0.5, Kernel.KEY_VALUE: 0.2}[kernel]
        assert {tier.slots for tier in tiers} == {slots}


def test_what_a_grouped_lookup_has_no_rows_for_is_refused() -> None:
    dims = GroupedPooledEmbeddingsLookup([]), GroupedEmbeddingsLookup([])
    batch = batch_of(["fa"], [1, 1])
    assert dims[0](batch).shape == (2, 0) and dims[1](batch).shape == (0,)
    with pytest.raises(ValueError, match="table 'a': the kernels of a grouped lookup are .*, got 'ssd_virtual_table'"):
        GroupedPooledEmbeddingsLookup(group_tables([[table("a", compute_kernel=Kernel.SSD_VIRTUAL_TABLE)]])[0])
    empty = table("a")
    empty.local_rows = 0
    with pytest.raises(ValueError, match="table 'a': an empty shard is not looked up"):
        GroupedEmbeddingsLookup(group_tables([[empty]])[0])
    lookup = GroupedPooledEmbeddingsLookup(group_tables([[table("a")]])[0])
    with pytest.raises(ValueError, match="takes batches of one batch size"):
        lookup(KeyedJaggedTensor(["fa"], torch.tensor([1]), lengths=torch.tensor([1]), stride_per_key_per_rank=[[1]]))
    with pytest.raises(ValueError, match="sum to the 2 keys"):
        lookup(batch_of(["fa", "fb"], [1, 1, 1, 1]))
    with pytest.raises(ValueError, match="EmbeddingBagCollection pools, and its pooling is PoolingType.NONE"):
        EmbeddingBagCollection([table("a", pooling=PoolingType.NONE)])


def test_divisors_are_lengths_of_bags_or_sums_of_their_weights() -> None:
    """The peer's, to the last bit."""
    lengths, offsets, keys = torch.tensor([2, 0, 1, 3]), torch.tensor([0, 2, 2, 3, 6]), ["a", "b"]
    order: dict[str, Any] = {"kjt_inverse_order": torch.tensor([0, 1]), "kjt_key_indices": {"a": 0, "b": 1}}

    def divisor(names: list[str], dims: list[int], sums: list[str], places: list[int], **given: Any) -> Any:
        settings = {
            "lengths": lengths, "offsets": offsets, "stride": 2, "stride_per_key": [2, 2],
            "variable_batch_per_feature": False, **order, **given,
        }  # fmt: skip
        return _create_mean_pooling_divisor(
            keys=keys, dim_per_key=torch.tensor(dims), embedding_names=names, embedding_dims=dims,
            pooling_type_to_rs_features={"SUM": sums, "MEAN": ["a"]}, kt_key_ordering=torch.tensor(places), **settings,
        )  # fmt: skip

    eps, one, two, three = 9.999999974752427e-07, 1.0000009536743164, 2.0000009536743164, 3.0000009536743164
    assert divisor(keys, [2, 1], ["b"], [0, 1]).tolist() == [[two, two, one], [eps, eps, one]]
    weights = torch.tensor([0.5, 0.25, 2.0, 1.0, 1.0, 1.0])
    shared = divisor(["b", "a", "b@"], [2, 1, 1], [], [1, 0, 1], weights=weights)
    assert shared.tolist() == [[two, two, 0.7500010132789612, two], [three, three, eps, three]]
    variable: dict[str, Any] = {
        "stride_per_key": [2, 1],
        "variable_batch_per_feature": True,
        "lengths": torch.tensor([2, 0, 1]),
    }
    full = (keys, torch.tensor([[1, 0, 0], [0, 0, 0]]))
    assert divisor(keys, [2, 1], [], [0, 1], inverse_indices=full, **variable).tolist() == [
        [eps, eps, one], [two, two, one], [two, two, one],
    ]  # fmt: skip
    with pytest.raises(ValueError, match="needs inverse_indices"):
        divisor(keys, [2, 1], [], [0, 1], **variable)
    sums = KeyedTensor(keys, [2, 1], torch.tensor([[4.0, 2.0, 3.0]]))
    halves = _apply_mean_pooling(sums, torch.tensor([[2.0, 2.0, 3.0]]))
    assert halves.keys() == keys and halves.values().tolist() == [[2.0, 1.0, 1.0]]


def test_names_of_optimizers_and_places_of_kernels_are_fbgemms() -> None:
    for kind, name in ((torch.optim.Adam, "ADAM"), (RowWiseAdagrad, "EXACT_ROWWISE_ADAGRAD"), (LAMB, "LAMB")):
        found = optimizer_type_to_emb_opt_type(kind)
        assert found is EmbOptimType[name] and emb_opt_type_to_optimizer_class(found) is kind
    assert emb_opt_type_to_optimizer_class(None) is emb_opt_type_to_optimizer_class(EmbOptimType.SHAMPOO) is None
    with pytest.raises(ValueError, match="Cannot cast .*Adadelta.* to an EmbOptimType"):
        optimizer_type_to_emb_opt_type(torch.optim.Adadelta)
    where = {kernel: compute_kernel_to_embedding_location(kernel) for kernel in (Kernel.FUSED, Kernel.QUANT_UVM)}
    assert where == {Kernel.FUSED: EmbeddingLocation.DEVICE, Kernel.QUANT_UVM: EmbeddingLocation.MANAGED}
    assert compute_kernel_to_embedding_location(Kernel.FUSED_UVM_CACHING) is EmbeddingLocation.MANAGED_CACHING
    with pytest.raises(ValueError, match="Invalid EmbeddingComputeKernel"):
        compute_kernel_to_embedding_location(Kernel.CUSTOMIZED_KERNEL)


def test_rows_have_infos_too_and_what_is_not_there_is_named() -> None:
    rows = EmbeddingCollection([EmbeddingConfig(6, 4, name, feature_names=["f"]) for name in "ab"])
    plan = {name: ParameterSharding("data_parallel", "dense", [0]) for name in "ab"}
    ((key, (a, b)),) = infos_of_rows(rows, plan, None).items()
    assert key == ("data_parallel", "cpu") and a.param is rows.embeddings["a"].weight
    assert b.embedding_config.embedding_names == ["f@b"] and b.embedding_config.pooling is PoolingType.NONE
    with pytest.raises(KeyError, match="b not in table_name_to_parameter_sharding"):
        create_sharding_infos_by_sharding(rows, {"a": plan["a"]})
    with pytest.raises(KeyError, match="table 'a': the module has no 'bags.a.weight'"):
        infos_of_bags(rows, plan, "bags.", None)


def test_lists_of_batches_are_lists() -> None:
    batches = [batch_of(["a"], [1, n]) for n in range(3)]
    listed = KJTList(list(batches))
    listed[2] = batches[0]
    assert len(listed) == 3 and list(listed) == [*batches[:2], batches[0]] and listed[1] is batches[1]
    moved = listed.to(torch.device("cpu"))
    assert [batch.values().tolist() for batch in moved] == [batch.values().tolist() for batch in listed]
    of_all = ListOfKJTList([listed, moved])
    of_all[0] = moved
    assert of_all[0] is moved and len(of_all) == len(list(of_all)) == 2
    streams: list[object] = []

    class Told(KeyedJaggedTensor):
        def record_stream(self, stream: Any) -> None:
            streams.append(stream)

    told = Told(["a"], torch.tensor([1]), lengths=torch.tensor([1]))
    stream: Any = object()
    ListOfKJTList([KJTList([told]), KJTList([told, told])]).record_stream(stream)
    assert streams == [stream] * 3


# ---- a module of one's own


ROWS = {"a": 12, "b": 7, "c": 9}


class TableWise(EmbeddingSharding[EmbeddingShardingContext, KeyedJaggedTensor, Tensor, Tensor]):
    """Whole tables on ranks."""

    def __init__(self, infos: Any, env: ShardingEnv, codecs: Mapping[str, Any] | None = None) -> None:
        super().__init__(codecs)
        self._env, self._pg = env, env.require_group()
        self._tables = sharded_tables(infos, env.world_size)
        self._groups = group_tables(self._tables)

    def create_input_dist(self, device: Any = None) -> BaseSparseFeaturesDist[KeyedJaggedTensor]:
        return Batches(self._pg, self.features_per_rank())

    def create_lookup(self, device: Any = None, fused_params: Any = None, feature_processor: Any = None) -> Any:
        return GroupedPooledEmbeddingsLookup(self._groups[self._env.rank], device, self._pg, feature_processor)

    def create_output_dist(self, device: Any = None) -> BaseEmbeddingDist[EmbeddingShardingContext, Tensor, Tensor]:
        return Columns(self._pg, [sum(group.dim_sum() for group in groups) for groups in self._groups])

    def _of_groups(self, what: str) -> list[list[Any]]:
        return [[value for group in groups for value in getattr(group, what)()] for groups in self._groups]

    def feature_names_per_rank(self) -> list[list[str]]:
        return self._of_groups("feature_names")

    def feature_names(self) -> list[str]:
        return sum(self.feature_names_per_rank(), [])

    def features_per_rank(self) -> list[int]:
        return list(map(len, self.feature_names_per_rank()))

    def embedding_dims(self) -> list[int]:
        return sum(self._of_groups("embedding_dims"), [])

    def embedding_names_per_rank(self) -> list[list[str]]:
        return self._of_groups("embedding_names")

    def embedding_names(self) -> list[str]:
        return sum(self.embedding_names_per_rank(), [])

    def embedding_shard_metadata(self) -> list[Any]:
        return sum(self._of_groups("embedding_shard_metadata"), [])

    def embedding_tables(self) -> list[ShardedEmbeddingTable]:
        return self._tables[self._env.rank]


class Batches(BaseSparseFeaturesDist[KeyedJaggedTensor]):
    def __init__(self, pg: Any, splits: list[int]) -> None:
        super().__init__()
        self._dist = KJTAllToAll(pg, splits)

    def forward(self, sparse_features: KeyedJaggedTensor) -> Any:
        return self._dist(sparse_features)


class Columns(BaseEmbeddingDist[EmbeddingShardingContext, Tensor, Tensor]):
    def __init__(self, pg: Any, dims: list[int]) -> None:
        super().__init__()
        self._dist = PooledEmbeddingsAllToAll(pg, dims)

    def forward(self, local_embs: Tensor, sharding_ctx: EmbeddingShardingContext | None = None) -> Any:
        assert sharding_ctx is not None
        return self._dist(local_embs, sharding_ctx.batch_size_per_rank)


@dataclass
class OwnContext:
    sharding_contexts: list[EmbeddingShardingContext] = field(default_factory=list)


class Whole(LazyAwaitable[KeyedTensor]):
    awaited_type = KeyedTensor

    def __init__(self, columns: Awaitable[Tensor], names: list[str], dims: list[int]) -> None:
        super().__init__()
        self._columns, self._names, self._dims = columns, names, dims

    def _wait_impl(self) -> KeyedTensor:
        return KeyedTensor(self._names, self._dims, self._columns.wait())


class OwnBags(EmbeddingBagCollection):
    """A collection that a sharder of one's own shards."""


class ShardedOwnBags(ShardedEmbeddingModule[KJTList, list[Tensor], KeyedTensor, OwnContext]):
    def __init__(self, module: OwnBags, params: Mapping[str, ParameterSharding], env: ShardingEnv) -> None:
        super().__init__()
        (infos,) = create_sharding_infos_by_sharding(module, params).values()
        self._way = TableWise(infos, env)
        self._input_dists, self._output_dists = [self._way.create_input_dist()], [self._way.create_output_dist()]
        lookup = self._way.create_lookup()
        self._lookups = [lookup]
        self.embedding_bags = nn.ModuleDict()
        for name, param in lookup.named_parameters_by_table():
            self.embedding_bags[name] = nn.Module()
            self.embedding_bags[name].register_parameter("weight", param)
        with torch.no_grad():
            for (_, param), own in zip(lookup.named_parameters(), self._way.embedding_tables(), strict=True):
                param.copy_(module.embedding_bags[own.name].weight)
        self.stages: list[str] = []

    @property
    def unsharded_module_type(self) -> type[nn.Module]:
        return OwnBags

    @property
    def shardings(self) -> dict[str, Any]:
        return {"table_wise": self._way}

    @property
    def fused_optimizer(self) -> CombinedOptimizer:
        kernels = [kernel for lookup in self._lookups for kernel in lookup._emb_modules]  # type: ignore[union-attr]
        return CombinedOptimizer([(f"group{n}", kernel.fused_optimizer) for n, kernel in enumerate(kernels)])  # type: ignore[misc]

    def create_context(self) -> OwnContext:
        return OwnContext()

    def input_dist(self, ctx: OwnContext, features: KeyedJaggedTensor) -> Awaitable[Awaitable[KJTList]]:  # type: ignore[override]
        self.stages.append("input_dist")
        keys = features.keys()
        ordered = features.permute([keys.index(name) for name in self._way.feature_names()])
        ctx.sharding_contexts = [EmbeddingShardingContext() for _ in self._input_dists]
        return KJTListSplitsAwaitable([dist(ordered) for dist in self._input_dists], ctx)

    def compute(self, ctx: OwnContext, dist_input: KJTList) -> list[Tensor]:
        self.stages.append("compute")
        return [lookup(features) for lookup, features in zip(self._lookups, dist_input, strict=True)]

    def output_dist(self, ctx: OwnContext, output: list[Tensor]) -> Whole:
        self.stages.append("output_dist")
        columns = self._output_dists[0](output[0], ctx.sharding_contexts[0])
        return Whole(columns, self._way.embedding_names(), self._way.embedding_dims())

    def sharded_parameter_names(self, prefix: str = "") -> Iterator[str]:
        yield from (f"{prefix}.embedding_bags.{name}.weight" for name in self.embedding_bags)


class OwnSharder(ModuleSharder[OwnBags]):
    @property
    def module_type(self) -> type[OwnBags]:
        return OwnBags

    def shardable_parameters(self, module: OwnBags) -> dict[str, nn.Parameter]:
        return {name: child.weight for name, child in module.embedding_bags.items()}  # type: ignore[misc]

    def shard(self, module: OwnBags, params: Any, env: ShardingEnv, device: Any = None, module_fqn: Any = None) -> Any:
        return ShardedOwnBags(module, params, env)


class Net(nn.Module):
    bags: Any

    def __init__(self, kind: type[EmbeddingBagCollection]) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.bags, self.over = kind(bag_tables(ROWS)), nn.Linear(24, 1)
        apply_optimizer_in_backward(RowWiseAdagrad, self.bags.parameters(), {"lr": 0.2})

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        pooled = self.bags(features).to_dict()
        return self.over(torch.cat([pooled[name] for name in ROWS], dim=1)).sin().sum()  # type: ignore[no-any-return]


def own_beside_ours() -> Any:
    rank, world = dist.get_rank(), dist.get_world_size()
    where = {"ta": table_wise(1), "tb": table_wise(0), "tc": table_wise(1)}
    of_module = construct_module_sharding_plan(
        Net(EmbeddingBagCollection).bags, where, world_size=world, device_type="cpu"
    )
    weights, losses = [], []
    for kind, sharders in ((EmbeddingBagCollection, None), (OwnBags, [OwnSharder()])):
        net: Any = Net(kind)
        dmp: Any = DistributedModelParallel(net, plan=ShardingPlan({"bags": of_module}), sharders=sharders)
        dense = torch.optim.SGD(dmp.module.over.parameters(), lr=0.1)
        losses.append([])
        for step in range(3):
            # ranks have batches of different sizes
            loss = dmp(random_kjt(ROWS, 3 + rank, seed=10 * step + rank))
            losses[-1].append(loss.item())
            loss.backward()
            dense.step()
            dense.zero_grad()
        weights.append({name: value.detach().clone() for name, value in net.named_parameters() if value.numel()})
    bags = net.bags
    states = {key.rsplit("/")[-1] for key in dmp.fused_optimizer.state_dict()["state"]}
    facts = (
        isinstance(bags, ShardedModule), bags.stages[:3], bags._way.feature_names_per_rank(), len(states),
        # ours count as sharded embedding modules too
        [issubclass(kind, ShardedEmbeddingModule) for kind in (EmbeddingBagCollection, ShardedEmbeddingBagCollection)],
    )  # fmt: skip
    return losses, weights, facts, shards_told()


def shards_told() -> list[Any]:
    """What a plan of all types says of the shards on ranks, and what the sharded model has there."""
    where = {"ta": row_wise(), "tb": column_wise([0, 1]), "tc": data_parallel()}
    bags = Net(EmbeddingBagCollection).bags
    plan = construct_module_sharding_plan(bags, where, world_size=2, device_type="cpu")
    whole = create_sharding_infos_by_sharding(bags, plan, {"eps": 1e-6})
    dmp = DistributedModelParallel(bags, plan=ShardingPlan({"": plan}))
    told = []
    for infos in (whole, create_sharding_infos_by_sharding(dmp.module, dmp.plan.plan[""])):  # type: ignore[arg-type]
        tables = [table for of_type in infos.values() for table in sharded_tables(of_type, 2)[dist.get_rank()]]
        told.append(sorted((t.name, t.local_rows, t.local_cols, t.compute_kernel.value) for t in tables))
    # the state dict's shards are those
    state = {name.split(".")[1]: value for name, value in dmp.state_dict().items()}
    held = [
        (name, *shard.tensor.shape, "fused")
        for name in ("ta", "tb")
        for shard in state[name].local_shards()
    ]  # fmt: skip
    settings = [info.fused_params for info in whole["row_wise"]]
    by_device = infos_of_bags(bags, plan, "embedding_bags.", None)
    assert [(*key, [info.embedding_config.name for info in of_key]) for key, of_key in by_device.items()] == [
        ("row_wise", "cpu", ["ta"]), ("column_wise", "cpu", ["tb"]), ("data_parallel", "cpu", ["tc"]),
    ]  # fmt: skip
    own = [tuple(info.param.shape) for info in infos["row_wise"]]
    return [*told, sorted([*held, ("tc", *state["tc"].shape, "dense")]), settings, list(whole), own]


@pytest.mark.ranks
@pytest.mark.filterwarnings("ignore:fused parameters")
def test_a_sharded_module_made_of_torchrecs_parts_trains_as_ours() -> None:
    """As programs of others build them: a strategy, its dists and lookup, a module of them and its sharder, in DMP."""
    for rank, (losses, (ours, own), facts, told) in enumerate(run_ranks(2, own_beside_ours)):
        assert losses[0] == pytest.approx(losses[1], abs=1e-6)
        held = {"embedding_bags.ta.weight", "embedding_bags.tc.weight"} if rank else {"embedding_bags.tb.weight"}
        assert {name.removeprefix("bags.") for name in own} == {*held, "over.weight", "over.bias"}
        for name, value in own.items():
            assert torch.allclose(value, ours[name], atol=1e-6), name
        stages = ["input_dist", "compute", "output_dist"]
        assert facts == (True, stages, [["b"], ["a", "c"]], 1 + rank, [False, True])
        from_plain, from_sharded, shards, settings, kinds, own_part = told
        assert from_plain == from_sharded == shards
        assert settings == [{"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.2, "eps": 1e-6}]
        assert kinds == ["row_wise", "column_wise", "data_parallel"] and own_part == [(6, 8)]
