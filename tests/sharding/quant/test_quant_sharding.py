"""Quantized tables over devices of one process give the output bits of the unsharded ones, however they are cut."""

from __future__ import annotations

import copy
import pickle
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from jagged_batches import draw, kjt as kjt_of
from ranks import error_of
from sharding_mixes import same_tensors
from torch import Tensor, nn
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharding_spec.api import EnumerableShardingSpec

from shardwise import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    FeatureProcessedEmbeddingBagCollection,
    KeyedJaggedTensor,
    PoolingType,
    PositionWeightedModuleCollection,
)
from shardwise.inference import (
    assign_weights_to_tbe,
    get_table_to_weights_from_tbe,
    quantize_inference_model,
    set_pruning_data,
    shard_quant_model,
)
from shardwise.inference.sharded import DEFAULT_SHARDERS
from shardwise.kernels import BoundsCheckMode
from shardwise.sharding import (
    ParameterSharding,
    ShardedModule,
    ShardingEnv,
    ShardingPlan,
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    grid_shard,
    row_wise,
    table_column_wise,
    table_row_wise,
    table_wise,
)
from shardwise.sharding.dmp.tracing import symbolic_trace
from shardwise.sharding.dmp.unwrap import CopyMixIn, ModuleCopyMixin, ModuleNoCopyMixin, copy_to_device
from shardwise.sharding.quant import (
    FUSED_PARAM_BOUNDS_CHECK_MODE,
    QuantEmbeddingBagCollectionSharder,
    sharded_tbes_weights_spec,
)
from shardwise.sharding.quant.inspect import populate_fx_names, recursive_populate_fx_names

CPU = torch.device("cpu")
WORLD, LOCAL = 4, 2
ROWS = {"item": 37, "shop": 11, "city": 5}
# features of each table; "seen" looks two tables up
FEATURES = {"item": ["seen", "bought"], "shop": ["seen"], "city": ["home"]}
# how each of the three tables is cut
PLANS: dict[str, tuple[Any, Any, Any]] = {
    "table_wise": (table_wise(0), table_wise(3), table_wise(1)),
    "one_device": (table_wise(2), table_wise(2), table_wise(2)),
    "row_wise": (row_wise(), row_wise(), row_wise()),
    "column_wise": (column_wise([3, 0]), column_wise([1, 1]), column_wise([0, 1, 2, 3])),
    "table_column_wise": (table_column_wise(1), table_column_wise(0), table_column_wise(1)),
    "table_row_wise": (table_row_wise(0), table_row_wise(1), table_row_wise(1)),
    "grid": (grid_shard([0, 1]), grid_shard([1, 0]), grid_shard([0, 1])),
    "replicated": (data_parallel(), data_parallel(), data_parallel()),
    "mix": (grid_shard([1, 0]), column_wise([2, 1]), data_parallel()),
    "another_mix": (column_wise([0, 3]), row_wise(), table_wise(2)),
}
FORMATS = {
    "int8": torch.int8, "int4": torch.quint4x2, "int2": torch.quint2x4, "fp8": torch.float8_e4m3fn,
    "fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32,
}  # fmt: skip
KINDS = ("pooled", "weighted", "processed", "sequence", "indices")


def float_model(kind: str) -> nn.Module:
    torch.manual_seed(7)
    if kind in ("sequence", "indices"):
        rows = [EmbeddingConfig(n, 32, name, feature_names=FEATURES[name]) for name, n in ROWS.items()]
        return EmbeddingCollection(rows, need_indices=kind == "indices")
    poolings = [PoolingType.SUM, PoolingType.MEAN, PoolingType.SUM]
    bags = EmbeddingBagCollection(
        [
            EmbeddingBagConfig(n, dim, name, feature_names=FEATURES[name], pooling=pooling)
            for (name, n), dim, pooling in zip(ROWS.items(), (64, 32, 16), poolings, strict=True)
        ],
        is_weighted=kind in ("weighted", "processed"),
    )
    if kind != "processed":
        return bags
    lengths = PositionWeightedModuleCollection({"seen": 9, "bought": 9})
    for weight in lengths.position_weights.values():
        nn.init.uniform_(weight)
    return FeatureProcessedEmbeddingBagCollection(bags, lengths)


def quantized(kind: str, format: str = "int8") -> nn.Module:
    return quantize_inference_model(
        float_model(kind), fp_weight_dtype=FORMATS[format], quantization_dtype=FORMATS[format]
    )


LEAST = {"bought": 37, "unread": 1000, "home": 5, "seen": 11}


def batch(kind: str = "pooled", samples: int = 6) -> KeyedJaggedTensor:
    """Bags of 0 to 8 ids, the last row of every table among them; one sample without ids, one feature nobody reads."""
    bags = draw(LEAST, samples, longest=8, seed=3)
    for key, of_key in bags.items():
        of_key[0], of_key[-1] = [], [*of_key[-1], LEAST[key] - 1]
    count = sum(len(bag) for of_key in bags.values() for bag in of_key)
    weights = torch.rand(count, generator=torch.Generator().manual_seed(3))
    return kjt_of(bags, weights=weights if kind in ("weighted", "processed") else None)


def plan_of(model: nn.Module, cuts: tuple[Any, Any, Any]) -> ShardingPlan:
    sharder = next(candidate for candidate in DEFAULT_SHARDERS if candidate.module_type is type(model))
    generators = dict(zip(ROWS, cuts, strict=True))
    return ShardingPlan({"": construct_module_sharding_plan(model, generators, sharder, LOCAL, WORLD, "cpu")})


def sharded(model: nn.Module, cuts: tuple[Any, Any, Any], device: str = "cpu") -> nn.Module:
    return shard_quant_model(model, WORLD, "cpu", device, sharding_plan=plan_of(model, cuts))[0]


def tensors(output: Any) -> list[torch.Tensor]:
    if not isinstance(output, dict):
        return [output.values()]
    parts = [part for jt in output.values() for part in (jt.values(), jt.lengths(), jt.weights_or_none())]
    return [part for part in parts if part is not None]


def same_bits(actual: Any, expected: Any) -> bool:
    names = [list(out) if isinstance(out, dict) else (out.keys(), out.length_per_key()) for out in (actual, expected)]
    return names[0] == names[1] and all(
        a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        for a, b in zip(tensors(actual), tensors(expected), strict=True)
    )


def expect_bits_of_unsharded(model: nn.Module, cuts: str, kind: str = "pooled") -> None:
    kjt = batch(kind)
    assert same_bits(sharded(model, PLANS[cuts])(kjt), model(kjt)), cuts


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cuts", PLANS)
def test_a_sharded_model_gives_the_bits_of_the_unsharded_one(cuts: str, kind: str) -> None:
    expect_bits_of_unsharded(quantized(kind), cuts, kind)


@pytest.mark.parametrize("tracer", [torch.fx.symbolic_trace, symbolic_trace])
@pytest.mark.parametrize("kind", KINDS)
def test_a_sharded_collection_is_one_node_of_a_graph(kind: str, tracer: Any) -> None:
    """With torch's tracer it read a proxy as though it were a batch."""
    model = quantized(kind)
    cut = sharded(model, PLANS["mix"])
    for root in (cut, nn.Sequential(cut)):
        traced = tracer(root)
        assert [node.op for node in traced.graph.nodes] == ["placeholder", "call_module", "output"]
        assert same_bits(traced(batch(kind)), model(batch(kind)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cuts", ["table_wise", "grid", "another_mix"])
def test_stages_that_are_called_one_by_one_give_the_bits_of_a_forward(cuts: str, kind: str) -> None:
    """Two batches under way, as a pipeline has them; ids are on the devices of the pieces before anything is found."""
    model, kjts = quantized(kind), [batch(kind), batch(kind, 4)]
    cut: Any = sharded(model, PLANS[cuts])
    assert isinstance(cut, ShardedModule) and cut.unsharded_module_type is type(model)
    contexts = [cut.create_context() for _ in kjts]
    arrived = [cut.input_dist(ctx, kjt) for ctx, kjt in zip(contexts, kjts, strict=True)]
    computed = [cut.compute(ctx, of_batch) for ctx, of_batch in zip(contexts, arrived, strict=True)]
    for ctx, of_batch, kjt in zip(contexts, computed, kjts, strict=True):
        assert same_bits(cut.output_dist(ctx, of_batch), model(kjt))
        assert same_bits(cut.compute_and_output_dist(ctx, cut.input_dist(ctx, kjt)), model(kjt))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("kind", ["weighted", "sequence"])
@pytest.mark.parametrize("cuts", ["grid", "another_mix"])
def test_every_row_format_keeps_its_bits(cuts: str, kind: str, format: str) -> None:
    expect_bits_of_unsharded(quantized(kind, format), cuts, kind)


@pytest.mark.parametrize(("format", "dim"), [("int4", 7), ("int2", 5)])
def test_columns_that_end_within_a_byte_are_whole_at_the_end_of_a_row(format: str, dim: int) -> None:
    bags = EmbeddingBagCollection([EmbeddingBagConfig(n, dim, t, feature_names=FEATURES[t]) for t, n in ROWS.items()])
    model, kjt = quantize_inference_model(bags, quantization_dtype=FORMATS[format]), batch()
    for cuts in (PLANS["table_wise"], (column_wise([0, 1], [4, dim - 4]), row_wise(), table_wise(0))):
        assert same_bits(sharded(model, cuts)(kjt), model(kjt))


@pytest.mark.parametrize("kind", KINDS)
def test_column_blocks_may_be_cut_at_different_rows(kind: str) -> None:
    model, kjt = quantized(kind), batch(kind)
    plan = plan_of(model, PLANS["row_wise"])
    width = 32 if kind in ("sequence", "indices") else 64
    tiles = [(0, 0, 20, 8), (20, 0, 17, 8), (0, 8, 9, width - 8), (9, 8, 0, width - 8), (9, 8, 28, width - 8)]
    cuts = [ShardMetadata([r, c], [h, w], f"rank:{n % WORLD}/cpu") for n, (r, c, h, w) in enumerate(tiles)]
    plan.plan[""]["item"] = ParameterSharding("grid_shard", "quant", None, EnumerableShardingSpec(cuts))
    assert same_bits(shard_quant_model(model, WORLD, "cpu", "cpu", sharding_plan=plan)[0](kjt), model(kjt))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_outputs_have_the_dtype_that_was_asked_for(dtype: torch.dtype) -> None:
    expect_bits_of_unsharded(quantize_inference_model(float_model("pooled"), output_dtype=dtype), "mix")


def test_tables_of_several_formats_lie_side_by_side() -> None:
    dtypes = {"item": torch.quint4x2, "shop": torch.float16}
    model = quantize_inference_model(float_model("pooled"), per_table_weight_dtype=dtypes)
    for cuts in PLANS:
        expect_bits_of_unsharded(model, cuts)


@pytest.mark.parametrize("cuts", PLANS)
def test_pruned_tables_keep_their_remapping(cuts: str) -> None:
    remapping = torch.full((37,), -1)
    remapping[::2] = torch.arange(19).flip(0)
    model = quantize_inference_model(set_pruning_data(float_model("pooled"), {"item": remapping, "shop": 6}))
    expect_bits_of_unsharded(model, cuts)


@pytest.mark.parametrize("kind", KINDS)
def test_batches_of_other_shapes(kind: str) -> None:
    model = quantized(kind)
    cut = sharded(model, PLANS["another_mix"])
    kjt = batch(kind)
    weights = torch.empty(0) if kjt.weights_or_none() is not None else None
    empty = kjt_of(dict.fromkeys(LEAST, [[], []]), weights=weights, dtype=torch.int32)
    small = KeyedJaggedTensor(kjt.keys(), kjt.values().int(), kjt.weights_or_none(), lengths=kjt.lengths().int())
    for features in (empty, small):
        assert same_bits(cut(features), model(features))


@pytest.mark.parametrize("kind", ["pooled", "sequence"])
def test_features_may_differ_in_batch_size(kind: str) -> None:
    kjt = KeyedJaggedTensor(
        ["bought", "home", "seen"],
        torch.tensor([36, 2, 4, 0, 10]),
        lengths=torch.tensor([1, 1, 1, 1, 1]),
        stride_per_key_per_rank=[[1], [2], [2]],
        inverse_indices=(["bought", "home", "seen"], torch.tensor([[0, 0, 0], [0, 1, 1], [1, 0, 1]])),
    )
    model = quantized(kind)
    for cuts in ("grid", "column_wise"):
        assert same_bits(sharded(model, PLANS[cuts])(kjt), model(kjt))


class Net(nn.Module):
    """Collections of both kinds inside a model, one of them twice."""

    def __init__(self) -> None:
        super().__init__()
        self.sparse = nn.ModuleDict({"bags": float_model("pooled"), "rows": float_model("sequence")})
        self.again = self.sparse["bags"]
        self.dense = nn.Linear(176, 1)

    def forward(self, kjt: KeyedJaggedTensor) -> torch.Tensor:
        rows = self.sparse["rows"](kjt)["home"].values().sum()
        return self.dense(self.sparse["bags"](kjt).values()) + self.again(kjt).values().sum() + rows


def test_collections_inside_a_model_are_replaced_in_place() -> None:
    model = quantize_inference_model(Net())
    wanted = model(batch())
    replaced, plan = shard_quant_model(model, 2, "cpu", "cpu")
    assert replaced is model and sorted(plan.plan) == ["sparse.bags", "sparse.rows"]
    assert model.again is model.sparse["bags"]  # type: ignore[index]
    assert type(model.again).__name__ == "ShardedQuantEmbeddingBagCollection"
    assert torch.equal(model(batch()), wanted)


def test_weights_that_do_not_fit_are_named_and_change_nothing() -> None:
    model = sharded(quantized("pooled"), PLANS["mix"])
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    weights = get_table_to_weights_from_tbe(quantized("pooled", "int4"))
    with pytest.raises(ValueError, match=r"table 'item': payload of int8 rows is torch.uint8 \[37, 64\], got .*37, 32"):
        assign_weights_to_tbe(model, weights)
    with pytest.raises(KeyError, match="no weights for tables .'city'"):
        assign_weights_to_tbe(model, {name: weights[name] for name in ("item", "shop")})
    state = {**before, "embedding_bags.item.shards.0.weight": before["embedding_bags.item.weight"]}
    del state["embedding_bags.city.weight"]
    state["embedding_bags.shop.weight_qscale"] = torch.zeros(11, 1)
    error = error_of(model.load_state_dict, state)
    assert (
        error.startswith("RuntimeError") and 'Unexpected key(s) in state_dict: "embedding_bags.item.shards.0' in error
    )
    assert 'Missing key(s) in state_dict: "embedding_bags.city.weight"' in error
    assert "table 'shop': scales of int8 rows is torch.float16 [11, 2]" in error
    assert same_tensors(model.state_dict(), before)


def test_rows_alone_do_not_fill_a_pruned_table_on_meta() -> None:
    model = quantize_inference_model(set_pruning_data(float_model("pooled"), {"shop": 6}))
    empty = sharded(model, PLANS["mix"], "meta")
    with pytest.raises(ValueError, match="table 'shop' is pruned: load a state dict"):
        assign_weights_to_tbe(empty, get_table_to_weights_from_tbe(model))
    empty.load_state_dict(model.state_dict())
    assert same_bits(empty(batch()), model(batch()))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cuts", ["mix", "row_wise"])
def test_a_state_dict_does_not_know_the_plan(cuts: str, kind: str) -> None:
    model, other = quantized(kind), sharded(quantized(kind), PLANS[cuts])
    wanted, sharded_state = model.state_dict(), other.state_dict()
    assert list(sharded_state) == list(wanted) and same_tensors(sharded_state, wanted)
    ones = {name: value * 0 + 1 for name, value in wanted.items()}
    other.load_state_dict(ones)
    assert same_tensors(other.state_dict(), ones)
    model.load_state_dict(other.state_dict())
    kjt = batch(kind)
    assert same_bits(other(kjt), model(kjt))


@pytest.mark.parametrize("how", ["load_state_dict", "assign"])
@pytest.mark.parametrize("cuts", PLANS)
def test_tables_on_meta_come_to_life_where_the_plan_says(cuts: str, how: str) -> None:
    model = quantized("pooled")
    empty = sharded(model, PLANS[cuts], "meta")
    assert all(buffer.is_meta for buffer in empty.buffers())
    with pytest.raises(RuntimeError, match="are on meta: fill them"):
        empty(batch())
    if how == "assign":
        assign_weights_to_tbe(empty, get_table_to_weights_from_tbe(model))
    else:
        empty.load_state_dict(model.state_dict())
    assert not any(buffer.is_meta for buffer in empty.buffers())
    assert same_bits(empty(batch()), model(batch()))


def test_the_spec_of_buffers_says_what_to_copy_where() -> None:
    model = quantized("pooled", "int4")
    other = nn.ModuleDict({"sparse": sharded(model, PLANS["mix"])})
    state = {f"sparse.{name}": tensor for name, tensor in model.state_dict().items()}
    specs = sharded_tbes_weights_spec(other)
    assert set(specs) == {name for name, _ in other.named_buffers()}
    assert {spec.sharding_type for spec in specs.values()} == {"grid_shard", "column_wise", "data_parallel"}
    for name, spec in specs.items():
        (row, column), (rows, columns) = spec.shard_offsets, spec.shard_sizes
        whole = state[spec.fqn][row : row + rows, column : column + columns]
        assert torch.equal(other.get_buffer(name), whole)
        other.get_buffer(name).zero_()
    assert not other["sparse"](batch()).values().any()


def test_a_model_can_be_moved_and_emptied() -> None:
    model = sharded(quantized("sequence"), PLANS["mix"])
    wanted, state = model(batch()), copy.deepcopy(model.state_dict())
    emptied = copy_to_device(model, CPU, torch.device("meta"))
    assert all(buffer.is_meta for buffer in emptied.buffers()) and same_bits(model(batch()), wanted)
    emptied.to_empty(device="cpu")
    emptied.load_state_dict(state)
    assert same_bits(emptied(batch()), wanted)
    assert same_bits(model.to("cpu")(batch()), wanted)
    # a plan says where tables are
    itself: Any = model
    assert itself.copy(torch.device("meta")) is model


class OwnCopy(nn.Linear, CopyMixIn):
    def copy(self, device: torch.device) -> nn.Module:
        return nn.Linear(1, 1, device=device)


class Moves(nn.Linear, ModuleCopyMixin):
    pass


class Stays(nn.Linear, ModuleNoCopyMixin):
    pass


def test_a_module_says_itself_what_its_copy_is() -> None:
    """TorchRec's mixins: what has none of them moves tensors of one device."""
    model: Any = nn.ModuleDict({"inner": nn.Sequential(OwnCopy(2, 2), Moves(2, 2), Stays(2, 2), nn.Linear(2, 2))})
    model.register_buffer("here", torch.ones(1))
    copied: Any = copy_to_device(model, CPU, torch.device("meta"))
    own, moves, stays, plain = copied["inner"]
    assert (type(own), own.weight.shape, own.weight.device.type) == (nn.Linear, (1, 1), "meta")
    assert [copied.here.is_meta, moves.weight.is_meta, plain.weight.is_meta] == [True] * 3
    assert torch.equal(stays.weight, model["inner"][2].weight) and stays is not model["inner"][2]
    # the model itself is as it was
    assert not any(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])
    assert copy_to_device(Stays(1, 1), CPU, torch.device("meta")).weight.device == CPU  # type: ignore[union-attr]


def test_a_trace_finds_a_path_to_every_quantized_collection() -> None:
    """`torchrec.quant.utils.recursive_populate_fx_names` has nothing to do: each is one node by its own path."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.plain = quantized("pooled")
            self.cut = sharded(quantized("pooled"), PLANS["mix"])

        def forward(self, features: KeyedJaggedTensor) -> Tensor:
            return self.plain(features).values() + self.cut(features).values()

    net = Net()
    before = {name: dict(vars(module)) for name, module in net.named_modules()}
    recursive_populate_fx_names(net)
    populate_fx_names(net.cut)
    assert all(vars(module) == before[name] for name, module in net.named_modules())
    traced = symbolic_trace(net)
    assert [node.target for node in traced.graph.nodes if node.op == "call_module"] == ["plain", "cut"]
    assert torch.equal(traced(batch()), net(batch()))
    with pytest.raises(TypeError, match="a quantized EmbeddingBagCollection has its lookups named, got Net"):
        populate_fx_names(net)


@pytest.mark.parametrize("how", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_copies_share_nothing_and_give_the_same_bits(how: Any) -> None:
    model = sharded(quantized("pooled"), PLANS["mix"])
    wanted = model(batch())
    copied = how(model)
    for buffer in model.buffers():
        buffer.zero_()
    assert same_bits(copied(batch()), wanted)
    for buffer in copied.buffers():
        buffer.zero_()
    assert not copied(batch()).values().any()


def test_halving_a_model_leaves_quantized_tables_alone() -> None:
    model = sharded(quantized("pooled", "fp8"), PLANS["mix"])
    wanted = model(batch())
    assert same_bits(model.half()(batch()), wanted)


class OfTensors(nn.Module):
    """A collection behind plain tensors."""

    def __init__(self, collection: nn.Module) -> None:
        super().__init__()
        self.collection = collection

    def forward(self, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        values: torch.Tensor = self.collection(KeyedJaggedTensor(list(LEAST), ids, lengths=lengths)).values()
        return values


@pytest.mark.parametrize("cuts", ["table_wise", "grid"])
def test_a_sharded_model_is_exported_for_any_number_of_ids(cuts: str) -> None:
    model, kjt, none = quantized("pooled"), batch(), torch.zeros(24, dtype=torch.int64)
    whole, shapes = OfTensors(sharded(model, PLANS[cuts])), ({0: torch.export.Dim.DYNAMIC}, None)
    with torch.no_grad():
        program = torch.export.export(whole, (kjt.values(), kjt.lengths()), dynamic_shapes=shapes, strict=False)
    short = KeyedJaggedTensor(kjt.keys(), kjt.values()[:2], lengths=none.index_fill(0, torch.tensor([1, 3]), 1))
    for features in (kjt, short):
        assert torch.equal(program.module()(features.values(), features.lengths()), model(features).values())


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cuts", PLANS)
def test_pieces_on_a_gpu_give_its_bits_and_rows_may_lie_anywhere(cuts: str, kind: str) -> None:
    """One GPU holds the pieces of all ranks; of tables cut by rows every second piece is on the host."""
    model, kjt = quantized(kind).to("cuda"), batch(kind)
    plan = plan_of(model, PLANS[cuts])
    for entry in plan.plan[""].values():
        for n, shard in enumerate(entry.sharding_spec.shards if entry.sharding_spec else ()):
            where = "cpu" if n % 2 and "row" in entry.sharding_type else "cuda:0"
            shard.placement = torch.distributed._remote_device(f"rank:{n % WORLD}/{where}")
    sharded_model: Any = shard_quant_model(model, WORLD, "cuda", "cuda", sharding_plan=plan)[0]
    wanted = model(kjt.to("cuda"))
    for entry in (kjt, kjt.to("cuda")):
        assert same_bits(sharded_model(entry), wanted)
    sharded_model.check()


@pytest.mark.gpu
def test_pieces_on_several_devices_stay_where_they_are() -> None:
    plan = plan_of(quantized("pooled"), (row_wise(), table_wise(0), table_wise(0)))
    spec = plan.plan[""]["item"].sharding_spec
    assert spec is not None
    spec.shards[1].placement = torch.distributed._remote_device("rank:1/cuda:0")
    model: Any = shard_quant_model(quantized("pooled"), WORLD, "cpu", "cpu", sharding_plan=plan)[0]
    devices = model.devices()
    assert torch.device("cuda:0") in devices["item"]
    wanted = model(batch())
    assert model.to("cuda").devices() == devices and model.device == torch.device("cuda:0")
    assert same_bits(model.to("cpu")(batch()), wanted)


@pytest.mark.parametrize(("format", "widths", "step"), [("int4", [33, 31], 2), ("int2", [34, 30], 4)])
def test_a_cut_inside_a_byte_is_refused(format: str, widths: list[int], step: int) -> None:
    message = f"table 'item': columns .*{format} rows begin or end inside a byte: cut at multiples of {step} columns"
    with pytest.raises(ValueError, match=message):
        sharded(quantized("pooled", format), (column_wise([0, 1], widths), table_wise(0), table_wise(0)))


@pytest.mark.parametrize("cuts", PLANS)
@pytest.mark.parametrize("kind", ["pooled", "sequence"])
def test_a_bad_id_is_named_as_in_the_unsharded_model(kind: str, cuts: str) -> None:
    kjt = kjt_of({"bought": [[1], []], "home": [[4], []], "seen": [[], [3, 11]]})
    model = quantized(kind)
    for module in (model, sharded(model, PLANS[cuts])):
        assert (
            error_of(module, kjt)
            == "RefusedIndexError: feature 'seen' (table 'shop'), sample 1: id 11 is outside [0, 11)"
        )


def test_the_bounds_check_mode_is_honoured() -> None:
    kjt, good = (
        kjt_of({"bought": [[37]], "home": [[4]], "seen": [[-1]]}),
        kjt_of({"bought": [[]], "home": [[4]], "seen": [[]]}),
    )
    model = quantized("pooled")
    plan = plan_of(model, PLANS["row_wise"])
    for mode in (BoundsCheckMode.IGNORE, BoundsCheckMode.NONE, BoundsCheckMode.WARNING):
        sharder = QuantEmbeddingBagCollectionSharder({FUSED_PARAM_BOUNDS_CHECK_MODE: mode})
        lenient = sharder.shard(model, plan.plan[""], ShardingEnv.from_local(WORLD, 0))  # type: ignore[arg-type]
        warned = mode is BoundsCheckMode.WARNING
        with pytest.warns(UserWarning, match="id -1 is outside") if warned else nullcontext():
            output = lenient(kjt)
        assert torch.equal(output.values(), lenient(good).values())
    plan.plan[""]["item"].bounds_check_mode = BoundsCheckMode.IGNORE
    strict = shard_quant_model(model, WORLD, "cpu", "cpu", sharding_plan=plan)[0]
    with pytest.raises(IndexError, match=r"feature 'seen' \(table 'shop'\), sample 0: id -1"):
        strict(kjt)
