"""Quantized tables: a trained model made ready to serve, its rows read and written, pruned, and taken to TorchRec."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from shardwise import (
    DataType,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    FeatureProcessedEmbeddingBagCollection,
    KeyedJaggedTensor,
    PositionWeightedModuleCollection,
    quant,
)
from shardwise.embeddings.managed_collision import (
    LFU_EvictionPolicy,
    ManagedCollisionCollection,
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
    MCHManagedCollisionModule,
)
from shardwise.inference import (
    assign_weights_to_tbe,
    get_table_to_weights_from_tbe,
    quantize_embeddings,
    quantize_inference_model,
    set_pruning_data,
)

TABLES = [
    EmbeddingBagConfig(1000, 64, "item", feature_names=["clicked", "bought"]),
    EmbeddingBagConfig(5000, 64, "user", feature_names=["user"]),
]
BATCH = KeyedJaggedTensor(
    ["clicked", "bought", "user"], torch.tensor([101, 202, 303, 7, 1, 2]), lengths=torch.tensor([2, 1, 0, 1, 1, 1])
)


class Model(nn.Module):
    """Pooled, weighted and unpooled tables under one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.pooled = EmbeddingBagCollection(TABLES)
        self.recent = FeatureProcessedEmbeddingBagCollection(
            EmbeddingBagCollection([EmbeddingBagConfig(1000, 16, "recent", feature_names=["clicked"])], True),
            PositionWeightedModuleCollection({"clicked": 10}),
        )
        self.history = EmbeddingCollection([EmbeddingConfig(1000, 16, "history", feature_names=["clicked"])])
        self.over = nn.Linear(3 * 64 + 16 + 16, 1)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        history = self.history(features)["clicked"].to_padded_dense(10).sum(1)
        columns = [self.pooled(features).values(), self.recent(features).values(), history]
        out: Tensor = self.over(torch.cat(columns, dim=1))
        return out


def bytes_of(module: nn.Module) -> int:
    """Bytes of a module's parameters and buffers."""
    return sum(value.numel() * value.itemsize for value in module.state_dict().values())


def whole_models() -> None:
    """Every collection of a model in one call; tables may differ."""
    torch.manual_seed(0)
    model = Model()
    before, size = model(BATCH).detach(), bytes_of(model)
    dtypes = {"user": torch.quint4x2, "history": torch.float8_e4m3fn}
    quantize_inference_model(model, per_table_weight_dtype=dtypes)
    print(model.pooled)
    print(f"{size / bytes_of(model):.1f} times smaller, off by {(model(BATCH) - before).abs().max():.4f}")
    classes = (
        quant.EmbeddingBagCollection, quant.FeatureProcessedEmbeddingBagCollection, quant.EmbeddingCollection
    )  # fmt: skip
    print("quantized:", [isinstance(m, c) for m, c in zip(model.children(), classes, strict=False)])
    fresh = quantize_embeddings(Model(), torch.int8, inplace=True)
    print("one class only:", [type(module).__module__.split(".")[2] for module in list(fresh.children())[:3]])


def one_collection() -> None:
    """By hand: what `from_float` reads is the module's qconfig."""
    ebc = EmbeddingBagCollection(TABLES)
    ebc.qconfig = quant.QuantConfig(activation=torch.float16, weight=torch.int8)  # type: ignore[assignment]
    made = quant.EmbeddingBagCollection.from_float(ebc)
    print("outputs:", made.output_dtype(), "tables:", [str(c.data_type) for c in made.embedding_bag_configs()])
    # rows as pairs of payload and scales, from one model into another that has none yet
    empty = quant.EmbeddingBagCollection(made.embedding_bag_configs(), False, "meta", torch.float16)
    assign_weights_to_tbe(empty, get_table_to_weights_from_tbe(made))
    print("same rows:", torch.equal(empty(BATCH).values(), made(BATCH).values()))
    # the same from a state dict, on meta first
    rows: dict[str, tuple[Tensor, Tensor | None]] = {}
    types = {"item": DataType.INT8, "user": DataType.INT8}
    device = quant.quantize_state_dict(ebc, rows, types)
    again = quant.EmbeddingBagCollection(made.embedding_bag_configs(), False, device, torch.float16, rows)
    print("same again:", torch.equal(again(BATCH).values(), made(BATCH).values()))
    model = nn.Sequential(quant.EmbeddingBagCollection(made.embedding_bag_configs(), False, "meta"))
    quant.meta_to_cpu_placement(model)
    print("on", next(model.buffers()).device)


def pruned() -> None:
    """Rows that nobody needs are left out: their ids give zeros."""
    ebc, keeps_seven = EmbeddingBagCollection(TABLES), torch.full((1000,), -1)
    keeps_seven[7] = 0
    set_pruning_data(ebc, {"item": keeps_seven, "user": 2})
    made = quantize_inference_model(ebc)
    print(made)
    pooled = made(BATCH)
    print("rows of zeros:", {key: (~pooled[key].any(1)).tolist() for key in pooled.keys()})  # noqa: SIM118


def behind_maps() -> None:
    """Ids of any size go to slots of a table by maps, which learn no more once the table is quantized."""
    batch = KeyedJaggedTensor(["ad"], torch.tensor([2**40, 7, 2**40]), lengths=torch.tensor([2, 1]))
    bags, rows = [EmbeddingBagConfig(10, 8, "ad")], [EmbeddingConfig(10, 8, "ad")]
    pooled = ManagedCollisionEmbeddingBagCollection(EmbeddingBagCollection(bags), maps_of(bags))
    unpooled = ManagedCollisionEmbeddingCollection(EmbeddingCollection(rows), maps_of(rows))
    kinds = (quant.QuantManagedCollisionEmbeddingBagCollection, quant.QuantManagedCollisionEmbeddingCollection)
    for module, kind in zip((pooled, unpooled), kinds, strict=True):
        module(batch)
        made = quantize_inference_model(module)
        looked_up, slots = made(batch)
        print("behind maps:", isinstance(made, kind), type(looked_up).__name__, bool((slots.values() < 10).all()))


def maps_of(tables: list[EmbeddingBagConfig] | list[EmbeddingConfig]) -> ManagedCollisionCollection:
    """A map of slots for the one table."""
    module = MCHManagedCollisionModule(10, torch.device("cpu"), LFU_EvictionPolicy(), 1)
    return ManagedCollisionCollection({"ad": module}, tables)


def as_torchrec_has_them() -> None:
    """TorchRec's state dicts and FBGEMM's rows hold the same bits in another order."""
    made = quantize_inference_model(EmbeddingBagCollection(TABLES))
    state = quant.torchrec_state_dict(made)
    other = quantize_inference_model(EmbeddingBagCollection(TABLES))
    quant.load_torchrec_state_dict(other, state)
    print("through TorchRec's names:", torch.equal(other(BATCH).values(), made(BATCH).values()))
    payload, scales = get_table_to_weights_from_tbe(made)["item"]
    assert scales is not None
    for layout in (quant.FUSED_NBIT, quant.INFERENCE):
        assert isinstance(layout, quant.FusedLayout)
        rows = quant.fuse_rows(payload, scales, dim=64, format="int8", layout=layout)
        back, _ = quant.split_rows(rows, dim=64, format="int8", layout=layout)
        print(layout.name, list(rows.shape), torch.equal(back, payload))
    print(quant.FUSED_8BIT.width(64, "int8"), quant.inference_layout(80, dim=64, format="int8").alignment)


def as_torchrec_prepares_it() -> None:
    """What TorchRec's programs switch on before is always on; the calls are understood."""
    model, types = Model(), [EmbeddingBagCollection, EmbeddingCollection]
    quant.quant_prep_enable_quant_state_dict_split_scale_bias(model.pooled)
    quant.quant_prep_enable_quant_state_dict_split_scale_bias_for_types(model, types)
    quant.quant_prep_enable_register_tbes(model, types)
    quant.quant_prep_enable_cache_features_order(model, types)
    quant.quant_prep_customize_row_alignment(model, types, 16)
    names: list[str] = []
    quant.for_each_module_of_type_do(model, types, lambda module: names.append(type(module).__name__))
    print("prepared:", names)


if __name__ == "__main__":
    whole_models()
    one_collection()
    pruned()
    behind_maps()
    as_torchrec_has_them()
    as_torchrec_prepares_it()
