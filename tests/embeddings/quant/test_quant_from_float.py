"""From float models to quantized ones: every kind of collection, whole models, and what is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from jagged_batches import kjt, weight
from quantized_tables import BAGS, assert_looks_up_its_buffers, configs, float_bags, quantized, values_of
from ranks import run_ranks
from torch import Tensor, nn

from shardwise import (
    BoundsCheckMode,
    DataType,
    DistributedModelParallel,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    EmbeddingTower,
    EmbeddingTowerCollection,
    FeatureProcessedEmbeddingBagCollection,
    FusedEmbeddingBagCollection,
    FusedEmbeddingCollection,
    KeyedJaggedTensor,
    KeyedTensor,
    LookupPolicy,
    PositionWeightedModuleCollection,
    RowWiseAdagrad,
    apply_optimizer_in_backward,
    quant,
)
from shardwise.checkpoint import full_state_dict
from shardwise.embeddings import PositionWeightedModule
from shardwise.embeddings.collections.collection import TableCollection
from shardwise.inference import quantize_embeddings, quantize_inference_model, set_pruning_data
from shardwise.inference.quantize import (
    DEFAULT_QUANT_MAPPING,
    DEFAULT_QUANTIZATION_DTYPE,
    quantize_feature,
    trim_torch_package_prefix_from_typename,
)
from shardwise.kernels import dequantize_rows, quantize_rows

SEQUENCES = [EmbeddingConfig(6, 8, "d", feature_names=["f"]), EmbeddingConfig(7, 8, "e", feature_names=["g"])]


def trained() -> EmbeddingBagCollection:
    ebc = float_bags()
    apply_optimizer_in_backward(RowWiseAdagrad, ebc.parameters(), {"lr": 0.1})
    ebc(kjt(BAGS)).values().sum().backward()
    return ebc


FLOAT: dict[str, Callable[[], TableCollection]] = {
    "float": float_bags,
    "half": lambda: EmbeddingBagCollection(configs(DataType.FP16)),
    "trained": trained,
    "fused": lambda: FusedEmbeddingBagCollection(configs(), torch.optim.SGD, {"lr": 0.1}),
    "sequences": lambda: EmbeddingCollection(SEQUENCES),
    "fused sequences": lambda: FusedEmbeddingCollection(SEQUENCES, torch.optim.Adam, {"lr": 0.1}),
}


@pytest.mark.parametrize("make", FLOAT.values(), ids=FLOAT)
def test_every_float_collection_is_quantized_row_by_row(make: Callable[[], TableCollection]) -> None:
    module = make()
    kind: Any = quant.EmbeddingCollection if isinstance(module, EmbeddingCollection) else quant.EmbeddingBagCollection
    module.qconfig = quant.QuantConfig(torch.float32, torch.int8)  # type: ignore[assignment]
    made = kind.from_float(module)
    for name, rows in values_of(made).items():
        payload, scales = quantize_rows(weight(module, name).detach(), "int8")
        assert torch.equal(rows, dequantize_rows(payload, scales, rows.shape[1], "int8"))
    out, wanted = made(kjt(BAGS)), module(kjt(BAGS))
    pairs = (
        [(out.values(), wanted.values())]
        if isinstance(out, KeyedTensor)
        else [(out[name].values(), wanted[name].values()) for name in wanted]
    )
    for dequantized, values in pairs:
        torch.testing.assert_close(dequantized, values.detach(), rtol=0, atol=0.02)


def test_qconfig_takes_observers_dtypes_and_torchs_own_class() -> None:
    observer = torch.ao.quantization.PlaceholderObserver.with_args
    tables = {"b": torch.quint4x2}
    types = []
    for qconfig in (
        quant.QuantConfig(observer(dtype=torch.float16), observer(dtype=torch.int8), tables),
        quant.QuantConfig(activation=torch.float16, weight=torch.int8, per_table_weight_dtype=tables),
        torch.ao.quantization.QConfig(observer(dtype=torch.float16), observer(dtype=torch.int8)),
    ):
        module = float_bags()
        module.qconfig = qconfig  # type: ignore[assignment]
        made = quant.EmbeddingBagCollection.from_float(module)
        assert made.output_dtype() == torch.float16
        types.append([config.data_type.name for config in made.embedding_bag_configs()])
        assert [config.data_type.name for config in module.embedding_bag_configs()] == ["FP32"] * 3
    assert types == [["INT8", "INT4", "INT8"]] * 2 + [["INT8"] * 3]
    module.qconfig = quant.QuantConfig(torch.float32, "int8")  # type: ignore[assignment]
    with pytest.raises(TypeError, match="a QuantConfig holds dtypes, or observers that have one, not 'int8'"):
        quant.EmbeddingBagCollection.from_float(module)


class Net(nn.Module):
    """A collection of each kind, one of them in two places, beside a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = float_bags()
        self.inner = nn.ModuleDict({"again": self.bags, "sequences": EmbeddingCollection(SEQUENCES)})
        tables = [EmbeddingBagConfig(6, 4, "p", feature_names=["f"])]
        self.processed = FeatureProcessedEmbeddingBagCollection(
            EmbeddingBagCollection(tables, is_weighted=True), PositionWeightedModuleCollection({"f": 3})
        )
        self.over = nn.Linear(3, 1)


def test_a_model_is_quantized_in_place_with_its_shared_parts() -> None:
    net = Net()
    assert quantize_inference_model(net, fp_weight_dtype=torch.quint4x2, output_dtype=torch.float16) is net
    assert type(net.bags) is quant.EmbeddingBagCollection and net.inner["again"] is net.bags
    inner = net.inner["sequences"]
    assert isinstance(inner, quant.EmbeddingCollection)
    assert type(net.processed) is quant.FeatureProcessedEmbeddingBagCollection
    assert not net.training and type(net.over) is nn.Linear
    assert net.processed.embedding_bag_configs()[0].data_type is DataType.INT4
    assert inner.embedding_configs()[0].data_type is DataType.INT8
    assert net.bags(kjt(BAGS)).values().dtype == torch.float16
    with pytest.warns(UserWarning, match="nothing was quantized: the model has no float collection"):
        assert quantize_inference_model(net) is net


def test_a_model_that_is_a_collection_is_left_as_it_is() -> None:
    ebc = float_bags()
    made = quantize_inference_model(ebc, quantization_dtype=torch.quint4x2)
    assert type(made) is quant.EmbeddingBagCollection and not made.training
    assert ebc.training and not hasattr(ebc, "qconfig") and weight(ebc, "a").dtype == torch.float32
    assert [config.data_type for config in made.embedding_bag_configs()] == [DataType.INT4] * 3
    assert [config.data_type for config in ebc.embedding_bag_configs()] == [DataType.FP32] * 3


@pytest.mark.parametrize("by_feature", [False, True])
def test_feature_processors_go_on_in_the_quantized_module(by_feature: bool) -> None:
    tables = [EmbeddingBagConfig(6, 4, "p", feature_names=["f", "g"])]
    processors: Any = PositionWeightedModuleCollection({"f": 3, "g": 3})
    if by_feature:
        processors = {"f": PositionWeightedModule(3), "g": PositionWeightedModule(3)}
    module = FeatureProcessedEmbeddingBagCollection(EmbeddingBagCollection(tables, is_weighted=True), processors)
    with torch.no_grad():
        for param in module._feature_processors.parameters():
            param.copy_(torch.tensor([1.0, 2.0, 0.5]))
    made = quantize_inference_model(module, fp_weight_dtype=torch.float32)
    assert isinstance(made, quant.FeatureProcessedEmbeddingBagCollection)
    bags = {name: BAGS[name] for name in "fg"}
    torch.testing.assert_close(made(kjt(bags)).values(), module(kjt(bags)).values().detach())
    assert [name for name, _ in made.named_parameters()] and not made(kjt(bags)).values().requires_grad
    moved = copy.deepcopy(made).to("meta")
    assert all(param.is_meta for param in moved.parameters())
    with pytest.raises(ValueError, match="takes a feature_processor"):
        quant.FeatureProcessedEmbeddingBagCollection(made.embedding_bag_configs(), True, "cpu")


def test_towers_look_up_quantized_tables() -> None:
    class Values(nn.Module):
        def forward(self, pooled: KeyedTensor) -> Tensor:
            return pooled.values()

    towers = EmbeddingTowerCollection([EmbeddingTower(float_bags(), Values())])
    wanted = towers(kjt(BAGS)).detach()
    quantize_inference_model(towers, quantization_dtype=torch.float32)
    assert type(towers.get_submodule("towers.0.embedding")) is quant.EmbeddingBagCollection
    torch.testing.assert_close(towers(kjt(BAGS)), wanted)


def test_the_policy_goes_with_the_tables() -> None:
    ebc = EmbeddingBagCollection(configs(), policy=LookupPolicy(bounds_check=BoundsCheckMode.IGNORE))
    made, bags = quantize_inference_model(ebc), {**BAGS, "h": [[2, 99, 5], [1], []]}
    assert torch.equal(made(kjt(bags)).values(), made(kjt({**BAGS, "h": [[2, 5], [1], []]})).values())


def test_hooks_stay_where_they_were() -> None:
    ebc, seen = float_bags(), []
    ebc.register_forward_pre_hook(lambda module, args: seen.append(type(module)))
    ebc.register_forward_hook(lambda module, args, out: KeyedTensor(out.keys(), out.length_per_key(), -out.values()))
    made = quantize_inference_model(ebc, quantization_dtype=torch.float32)
    torch.testing.assert_close(made(kjt(BAGS)).values(), ebc(kjt(BAGS)).values().detach())
    assert seen == [quant.EmbeddingBagCollection, EmbeddingBagCollection]


class Twice(nn.Module):
    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        out = super().forward(features)  # type: ignore[misc]
        return KeyedTensor(out.keys(), out.length_per_key(), 2 * out.values())


class Doubled(Twice, EmbeddingBagCollection):
    """A forward of somebody's own."""


class QuantizedDoubled(Twice, quant.EmbeddingBagCollection):
    """The same of quantized tables."""


def test_a_forward_of_ones_own_is_not_lost() -> None:
    """A derived collection was replaced by the plain quantized one, and what its forward added was gone."""
    model = nn.Sequential(Doubled(configs()))
    with pytest.raises(TypeError, match="Doubled has a forward of its own, which EmbeddingBagCollection.from_float"):
        quantize_inference_model(model)
    wanted = model[0](kjt(BAGS)).values().detach()
    mapping = {**DEFAULT_QUANT_MAPPING, f"{__name__}.Doubled": QuantizedDoubled}
    quantize_inference_model(model, mapping, quantization_dtype=torch.float32)
    torch.testing.assert_close(model[0](kjt(BAGS)).values(), wanted)


def test_a_mapping_by_torchrecs_names_is_understood() -> None:
    net = Net()
    quantize_inference_model(
        net, {"torchrec.modules.embedding_modules.EmbeddingBagCollection": quant.EmbeddingBagCollection}
    )
    assert type(net.bags) is quant.EmbeddingBagCollection
    # what the mapping leaves out stays float
    assert type(net.inner["sequences"]) is EmbeddingCollection


def test_quantize_embeddings_replaces_what_it_is_asked_to() -> None:
    net = Net()
    made = quantize_embeddings(net, torch.quint4x2, inplace=False, per_table_weight_dtype={"a": torch.int8})
    assert type(net.bags) is EmbeddingBagCollection and isinstance(made, Net)
    assert isinstance(made.bags, quant.EmbeddingBagCollection)
    assert [c.data_type.name for c in made.bags.embedding_bag_configs()] == ["INT8", "INT4", "INT4"]
    assert type(made.inner["sequences"]) is EmbeddingCollection and made.training
    assert quantize_embeddings(net, torch.int8, True, [EmbeddingCollection], output_dtype=torch.bfloat16) is net
    assert type(net.inner["sequences"]) is quant.EmbeddingCollection
    assert net.bags(kjt(BAGS)).values().dtype == torch.bfloat16
    model = nn.Sequential(Doubled(configs()))
    quantize_embeddings(model, torch.int8, True, additional_mapping={Doubled: QuantizedDoubled})
    assert type(model[0]) is QuantizedDoubled
    with pytest.raises(ValueError, match="additional_mapping has no quantized class for Linear"):
        quantize_embeddings(net, torch.int8, True, [nn.Linear])


BAD_ROWS: list[tuple[torch.dtype, float, str]] = [
    (torch.int8, float("nan"), "table 'b': row 4 is not finite, nan in column 2"),
    (torch.float32, float("inf"), "table 'b': row 4 is not finite, inf in column 2"),
    (torch.int8, -1e6, "table 'b': row 4 reaches from -1e.06 to .*, more than fp16 scales hold: scale_dtype=torch.flo"),
    (torch.float16, -1e5, "table 'b': row 4 reaches from -100000 to .*, more than fp16 rows hold: take bf16"),
]


@pytest.mark.parametrize(("dtype", "value", "message"), BAD_ROWS)
def test_rows_that_cannot_be_stored_are_named_and_nothing_is_replaced(
    dtype: torch.dtype, value: float, message: str
) -> None:
    model = nn.Sequential(float_bags())
    with torch.no_grad():
        weight(model[0], "b")[4, 2] = value
    with pytest.raises(ValueError, match=message):
        quantize_inference_model(model, quantization_dtype=dtype)
    assert type(model[0]) is EmbeddingBagCollection
    if value == -1e6:
        for scales in (torch.float32, {"b": torch.float32}):
            made = quantized(copy.deepcopy(model[0]), scale_dtype=scales)
            assert (values_of(made)["b"] - weight(model[0], "b")).abs().max() <= 0.51 * 1e6 / 255


def test_what_is_asked_for_in_vain_is_refused() -> None:
    net = Net()
    with pytest.raises(ValueError, match=r"names tables that are not quantized: \['x'\]; there are \['a', 'b', 'c',"):
        quantize_inference_model(net, per_table_weight_dtype={"x": torch.int8})
    with pytest.raises(ValueError, match=r"scale_dtype names tables that are not quantized: \['x'\]"):
        quantize_inference_model(net, scale_dtype={"x": torch.float32})
    with pytest.raises(ValueError, match="table 'a': tables are quantized to int8, .*, not to torch.int64"):
        quantize_inference_model(net, quantization_dtype=torch.int64)
    assert type(net.bags) is EmbeddingBagCollection
    with pytest.raises(TypeError, match="from_float takes a float EmbeddingBagCollection, got Linear"):
        quant.EmbeddingBagCollection.from_float(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="set module.qconfig = QuantConfig"):
        quant.EmbeddingBagCollection.from_float(float_bags())
    module = float_bags()
    module.qconfig = quant.QuantConfig(torch.float32, torch.int8)  # type: ignore[assignment]
    with pytest.warns(UserWarning, match="use_precomputed_fake_quant has no effect"):
        quant.EmbeddingBagCollection.from_float(module, use_precomputed_fake_quant=True)


def quantize_what_is_sharded() -> tuple[str, bool]:
    torch.manual_seed(0)
    plain = nn.Sequential(float_bags())
    sharded = DistributedModelParallel(copy.deepcopy(plain))
    with pytest.raises(TypeError) as raised:
        quantize_inference_model(sharded)
    model = nn.Sequential(float_bags())
    model.load_state_dict(full_state_dict(sharded))
    quantize_inference_model(model)
    quantize_inference_model(plain)
    return str(raised.value), torch.equal(model(kjt(BAGS)).values(), plain(kjt(BAGS)).values())


@pytest.mark.ranks
def test_a_sharded_model_is_not_passed_over_and_is_shown_the_way_out() -> None:
    for message, same in run_ranks(2, quantize_what_is_sharded):
        assert "is a sharded ShardedEmbeddingBagCollection: load shardwise.checkpoint.full_state_dict(model)" in message
        assert same


def test_a_model_on_meta_is_quantized_without_rows() -> None:
    made = quantize_inference_model(nn.Sequential(EmbeddingBagCollection(configs(), device="meta")))
    assert all(value.is_meta for value in made.state_dict().values())
    source = quantize_inference_model(nn.Sequential(float_bags()))
    made.load_state_dict(source.state_dict(), assign=True)
    assert torch.equal(made(kjt(BAGS)).values(), source(kjt(BAGS)).values())


REMAPPING = torch.tensor([-1, 2, 0, -1, -1, 1, -1, -1])


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_pruned_ids_are_rows_of_zeros(dtype: torch.dtype) -> None:
    ebc = float_bags()
    whole = quantized(ebc)
    assert set_pruning_data(ebc, {"b": 3, "c": REMAPPING}) is ebc
    made = quantized(ebc)
    assert [config.num_embeddings_post_pruning for config in made.embedding_bag_configs()] == [None, 3, 3]
    assert repr(made.embedding_bags["c"]) == "QuantizedRows(3 for 8 ids x 32, int8, float16 scales)"
    rows, kept = values_of(whole), values_of(made)
    assert torch.equal(kept["b"], rows["b"][:3]) and torch.equal(kept["c"], rows["c"][[2, 5, 1]])
    # a mean divides by the ids that were left out too, as in FBGEMM
    out, bags = made(kjt(BAGS, dtype=dtype)), {**BAGS, "h": [[2, 2, 5], [7, 1], [0]]}
    torch.testing.assert_close(out["f@b"], torch.stack([rows["b"][[1, 2]].sum(0) / 2, *torch.zeros(2, 5)]))
    wanted = torch.stack([rows["c"][[2, 2, 5]].sum(0), rows["c"][1], torch.zeros(32)])
    torch.testing.assert_close(made(kjt(bags, dtype=dtype))["h"], wanted)
    assert torch.equal(out["g"], whole(kjt(BAGS))["g"])
    with pytest.raises(IndexError, match=r"table 'c'\), sample 0: id 8 is outside \[0, 8\)"):
        made(kjt({**BAGS, "h": [[8], [], []]}, dtype=dtype))


def test_sequences_and_processed_features_are_pruned_where_they_are_listed() -> None:
    net = Net()
    with pytest.raises(ValueError, match=r"set_pruning_data: no tables \['d'\], there are \['a', 'b', 'c', 'p'\]"):
        set_pruning_data(net, {"d": 2})
    set_pruning_data(net, {"d": 2, "p": 0}, [EmbeddingCollection, FeatureProcessedEmbeddingBagCollection])
    rows = weight(net.inner["sequences"], "d").detach().clone()
    quantize_inference_model(net, fp_weight_dtype=torch.float32, quantization_dtype=torch.float32)
    looked_up = net.inner["sequences"](kjt(BAGS))["f"].values()
    assert torch.equal(looked_up, torch.stack([rows[1], *torch.zeros(2, 8)]))
    assert not net.processed(kjt(BAGS)).values().any()


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (9, r"table 'c': 9 rows after pruning is outside \[0, 8\]"),
        (REMAPPING[:5], r"table 'c': a remapping is \[8\], one row for each id, got \[5\]"),
        (torch.tensor([0, 0, -1, -1, -1, -1, -1, -1]), "the rows 0 to 1 once each"),
        (torch.tensor([0, 2, -1, -1, -1, -1, -1, -1]), "the rows 0 to 1 once each"),
        (torch.tensor([0, 1, -2, -1, -1, -1, -1, -1]), "a remapping has -1 for ids left out"),
    ],
)
def test_pruning_data_that_is_none_is_refused(rows: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        set_pruning_data(float_bags(), {"c": rows})


def test_a_config_says_how_many_rows_stay() -> None:
    config = EmbeddingBagConfig(6, 8, "a", feature_names=["f"], num_embeddings_post_pruning=2)
    ebc = EmbeddingBagCollection([config])
    made = quantize_inference_model(ebc, quantization_dtype=torch.float32)
    wanted = torch.stack([weight(ebc, "a")[1].detach(), *torch.zeros(2, 8)])
    assert torch.equal(made(kjt({"f": BAGS["f"]})).values(), wanted)


TYPES_TO_PREPARE = [EmbeddingBagCollection, EmbeddingCollection]


def test_what_torchrec_prepares_is_as_it_is_to_be_already() -> None:
    net = Net()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    quant.quant_prep_enable_quant_state_dict_split_scale_bias(net.bags)
    quant.quant_prep_enable_quant_state_dict_split_scale_bias_for_types(net, TYPES_TO_PREPARE)
    quant.quant_prep_enable_register_tbes(net, TYPES_TO_PREPARE)
    quant.quant_prep_enable_cache_features_order(net, TYPES_TO_PREPARE)
    quant.quant_prep_customize_row_alignment(net, TYPES_TO_PREPARE, 16)
    with pytest.warns(UserWarning, match="row_alignment=4 has no effect: rows are not padded"):
        quant.quant_prep_customize_row_alignment(net, TYPES_TO_PREPARE, 4)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    with pytest.raises(ValueError, match="row_alignment must be a power of two, got 12"):
        quant.quant_prep_customize_row_alignment(net, TYPES_TO_PREPARE, 12)
    with pytest.raises(TypeError, match="module_types must be classes of modules, got 'EmbeddingBagCollection'"):
        quant.quant_prep_enable_register_tbes(net, ["EmbeddingBagCollection"])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="a module is prepared, got str"):
        quant.quant_prep_enable_quant_state_dict_split_scale_bias("net")  # type: ignore[arg-type]
    seen: list[nn.Module] = []
    quant.for_each_module_of_type_do(net, [EmbeddingBagCollection], seen.append)
    assert seen == [net.bags, net.processed._embedding_bag_collection]


def test_a_state_dict_becomes_rows_that_a_constructor_takes() -> None:
    ebc, weights = float_bags(), {}
    types = {"a": DataType.INT8, "b": DataType.INT4, "c": DataType.FP16}
    assert quant.quantize_state_dict(ebc, weights, types, {"a": 4}) == torch.device("cpu")
    assert weights["a"][0].shape == (4, 8) and weights["c"][1] is None
    tables = configs()
    for config in tables:
        config.data_type = types[config.name]
    tables[0].num_embeddings_post_pruning = 4
    made = quant.EmbeddingBagCollection(tables, False, "cpu", torch.float32, weights)
    set_pruning_data(ebc, {"a": 4})
    same = quantize_inference_model(ebc, per_table_weight_dtype={"b": torch.quint4x2, "c": torch.float16})
    assert torch.equal(made(kjt(BAGS)).values(), same(kjt(BAGS)).values())
    with pytest.raises(KeyError, match="no data type for table 'b'"):
        quant.quantize_state_dict(ebc, {}, {"a": DataType.INT8})
    with pytest.raises(ValueError, match="'bias' is no table's weight"):
        quant.quantize_state_dict(nn.ParameterDict({"bias": nn.Parameter(torch.zeros(2))}), {}, {})


def test_small_things_of_torchrecs_module() -> None:
    assert torch.int8 == DEFAULT_QUANTIZATION_DTYPE
    assert trim_torch_package_prefix_from_typename("<torch_package_0>.a.B") == "a.B"
    assert trim_torch_package_prefix_from_typename("a.B") == "a.B"
    half, ids = quantize_feature(nn.Linear(2, 2), (torch.ones(2, dtype=torch.float64), torch.tensor([1])))
    assert half.dtype == torch.float16 and ids.dtype == torch.int64


def test_the_buffers_are_what_is_looked_up_after_all_of_this() -> None:
    made = quantize_inference_model(trained(), per_table_weight_dtype={"b": torch.quint2x4})
    assert_looks_up_its_buffers(made, kjt(BAGS), BAGS)
