"""Lookups of quantized collections: the values of their rows, in the order and under the names of the trained ones."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from jagged_batches import draw, kjt, pooled, weight
from quantized_tables import BAGS, TYPES, assert_looks_up_its_buffers, float_bags, mixed, quantized, values_of
from torch import Tensor, nn

from shardwise import (
    BoundsCheckMode,
    DataType,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    LookupPolicy,
    quant,
)
from shardwise.embeddings.quant import QuantizedTable, QuantizedTables
from shardwise.embeddings.tables.table_layout import LookupFeature
from shardwise.inference import quantize_inference_model, shard_quant_model
from shardwise.kernels import dequantize_pooled, dequantize_rows, new_guard, quantize_rows

# the largest error of a value in [-1, 1], in parts of its row's range
STEP = {
    DataType.INT8: 0.51 / 255 + 2e-3,
    DataType.INT4: 0.51 / 15 + 2e-3,
    DataType.INT2: 0.51 / 3 + 2e-3,
    DataType.NFP8: 2.0**-4,
    DataType.FP16: 2.0**-11,
    DataType.BF16: 2.0**-8,
    DataType.FP32: 0.0,
}


@pytest.mark.parametrize("data_type", TYPES)
def test_values_are_within_a_step_of_the_float_tables(data_type: DataType) -> None:
    ebc = float_bags()
    made = quantized(ebc, quantization_dtype=TYPES[data_type])
    for config in made.embedding_bag_configs():
        assert config.data_type is data_type
        rows = weight(ebc, config.name)
        reach = rows.amax(1, keepdim=True) - rows.amin(1, keepdim=True)
        assert bool(((values_of(made)[config.name] - rows).abs() <= STEP[data_type] * reach).all())
    assert_looks_up_its_buffers(made, kjt(BAGS), BAGS)
    assert made(kjt(BAGS)).keys() == ebc(kjt(BAGS)).keys() == ["f@a", "g", "f@b", "h"]


@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_formats_and_dims_mix_in_one_collection(is_weighted: bool, dtype: torch.dtype) -> None:
    made, bags = mixed(is_weighted), draw({"h": 8, "f": 6, "g": 6, "unused": 3}, 9)
    weights = torch.rand(sum(len(bag) for feature in bags.values() for bag in feature)) if is_weighted else None
    out = made(kjt(bags, weights=weights, dtype=dtype))
    wanted = pooled(made.embedding_bag_configs(), values_of(made), bags, weights)
    torch.testing.assert_close(out.values(), wanted, rtol=1e-6, atol=1e-6)
    assert out.length_per_key() == [8, 8, 5, 32]
    assert made.is_weighted() == is_weighted


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_outputs_are_rounded_once(dtype: torch.dtype) -> None:
    whole = mixed()
    made = quant.EmbeddingBagCollection(whole.embedding_bag_configs(), False, "cpu", dtype, whole.table_weights())
    assert made.output_dtype() == dtype and made(kjt(BAGS)).values().dtype == dtype
    assert torch.equal(made(kjt(BAGS)).values(), whole(kjt(BAGS)).values().to(dtype))


def test_outputs_of_bytes_carry_the_scales_of_each_row() -> None:
    whole, bags = mixed(), draw({"f": 6, "g": 6, "h": 8}, 5)
    made = quant.EmbeddingBagCollection(whole.embedding_bag_configs(), False, "cpu", torch.uint8, whole.table_weights())
    out, wanted = made(kjt(bags)), whole(kjt(bags))
    assert out.values().dtype == torch.uint8 and made.output_dtype() == torch.uint8
    assert out.keys() == wanted.keys() and out.length_per_key() == [16, 16, 13, 40]
    for key, dim in zip(wanted.keys(), wanted.length_per_key(), strict=True):
        dequantized, values = dequantize_pooled(out[key], [dim]), wanted[key]
        reach = values.amax(1, keepdim=True) - values.amin(1, keepdim=True)
        assert bool(((dequantized - values).abs() <= 0.51 / 255 * reach + 1e-7).all())
    assert torch.equal(
        dequantize_pooled(out.values(), wanted.length_per_key())[:, 8:16], dequantize_pooled(out["g"], [8])
    )
    ec = EmbeddingCollection([EmbeddingConfig(6, 8, "a", feature_names=["f"])], need_indices=True)
    rows = quantize_inference_model(ec, output_dtype=torch.uint8)(kjt(BAGS))["f"]
    assert rows.values().shape == (3, 16) and torch.equal(rows.weights(), torch.tensor([1, 2, 4]))
    sharded, _ = shard_quant_model(quantize_inference_model(ec, output_dtype=torch.uint8), 2, "cpu", "cpu")
    assert torch.equal(sharded(kjt(BAGS))["f"].values(), rows.values())
    dequantized = dequantize_pooled(rows.values(), [8])
    torch.testing.assert_close(dequantized, quantize_inference_model(ec)(kjt(BAGS))["f"].values(), rtol=0, atol=4e-3)


def test_batch_sizes_of_features_and_inverse_indices_as_in_the_trained_collection() -> None:
    made, ebc = mixed(), float_bags()
    inverse = torch.tensor([[0, 1, 0], [1, 1, 0], [0, 0, 0]])
    batch = KeyedJaggedTensor(
        ["f", "g", "h"], torch.tensor([1, 2, 4, 0, 3, 2]), lengths=torch.tensor([2, 1, 0, 2, 1]),
        stride_per_key_per_rank=[[2], [2], [1]], inverse_indices=(["f", "g", "h"], inverse),
    )  # fmt: skip
    full = {"f": [[1, 2], [4], [1, 2]], "g": [[0, 3], [0, 3], []], "h": [[2], [2], [2]]}
    assert torch.equal(made(batch).values(), made(kjt(full)).values())
    assert made(batch).values().shape == ebc(batch).values().shape
    with pytest.raises(ValueError, match="inverse_indices"):
        made(
            KeyedJaggedTensor(
                ["f", "g", "h"], batch.values(), lengths=batch.lengths(), stride_per_key_per_rank=[[2], [2], [1]]
            )
        )


def test_padding_of_a_capacity_is_nobodys() -> None:
    made = mixed()
    batch = kjt(BAGS)
    values = torch.cat([batch.values(), torch.full((4,), 10**6)])
    padded = KeyedJaggedTensor(batch.keys(), values, lengths=batch.lengths(), capacity=values.shape[0])
    assert torch.equal(made(padded).values(), made(batch).values())


@pytest.mark.parametrize(
    ("weighted", "batch", "error", "message"),
    [
        (
            False, kjt({**BAGS, "g": [[0], [6], []]}), IndexError,
            r"feature 'g' \(table 'a'\), sample 1: id 6 is outside \[0, 6\)",
        ),
        (False, kjt({"f": [[1]], "g": [[1]]}), KeyError, r"features \['h'\] are not in the batch"),
        (False, torch.zeros(3), TypeError, "takes a KeyedJaggedTensor, got Tensor"),
        (True, kjt(BAGS), ValueError, "must carry per-id weights"),
        (False, kjt(BAGS, dtype=torch.int16), TypeError, "feature ids must be int32 or int64, got int16"),
    ],
    ids=["id", "feature", "no batch", "no weights", "dtype"],
)  # fmt: skip
def test_bad_input_is_refused_as_by_the_trained_collection(
    weighted: bool, batch: Any, error: type[Exception], message: str
) -> None:
    made = mixed(weighted)
    with pytest.raises(error, match=message):
        made(batch)


@pytest.mark.parametrize("mode", [BoundsCheckMode.WARNING, BoundsCheckMode.IGNORE])
def test_a_bad_id_counts_as_none_where_the_policy_says_so(mode: BoundsCheckMode) -> None:
    made, bad = mixed(), {**BAGS, "h": [[2, 99, 5], [1], []]}
    lenient = quant.EmbeddingBagCollection(
        made.embedding_bag_configs(), False, "cpu", table_name_to_quantized_weights=made.table_weights(),
        policy=LookupPolicy(bounds_check=mode),
    )  # fmt: skip
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        out = lenient(kjt(bad))
    assert torch.equal(out.values(), made(kjt({**bad, "h": [[2, 5], [1], []]})).values())
    assert [str(warning.message) for warning in caught] == (
        ["feature 'h' (table 'c'), sample 0: id 99 is outside [0, 8); it counts as no id"]
        if mode is BoundsCheckMode.WARNING
        else []
    )


@pytest.mark.parametrize("need_indices", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_sequences_are_the_rows_of_their_ids(need_indices: bool, dtype: torch.dtype) -> None:
    tables = [EmbeddingConfig(6, 8, "a", feature_names=["f", "g"]), EmbeddingConfig(7, 8, "b", feature_names=["f"])]
    ec = EmbeddingCollection(tables, need_indices=need_indices)
    made = quantize_inference_model(ec, per_table_weight_dtype={"b": torch.quint4x2}, output_dtype=dtype)
    assert isinstance(made, quant.EmbeddingCollection)
    out, trained, rows = made(kjt(BAGS)), ec(kjt(BAGS)), values_of(made)
    assert list(out) == list(trained) == ["f@a", "g", "f@b"]
    for name, table, feature in (("f@a", "a", "f"), ("g", "a", "g"), ("f@b", "b", "f")):
        ids = torch.tensor([i for bag in BAGS[feature] for i in bag])
        assert torch.equal(out[name].values(), rows[table][ids].to(dtype))
        assert torch.equal(out[name].lengths(), trained[name].lengths())
        assert (out[name].weights_or_none() is not None) == need_indices
        if need_indices:
            assert torch.equal(out[name].weights(), ids)
    assert (made.need_indices(), made.embedding_dim(), made.output_dtype()) == (need_indices, 8, dtype)
    assert made.embedding_names_by_table() == ec.embedding_names_by_table()
    assert [config.data_type for config in made.embedding_configs()] == [DataType.INT8, DataType.INT4]


def test_a_collection_without_tables_gives_no_columns() -> None:
    bags = quant.EmbeddingBagCollection([], False, "cpu")
    assert bags(kjt(BAGS)).values().shape == (3, 0) and bags.device == torch.device("cpu")
    assert quant.EmbeddingCollection([], "cpu")(kjt(BAGS)) == {}


def test_outputs_have_no_gradient_and_tables_are_no_parameters() -> None:
    made = mixed(True)
    out = made(kjt(BAGS, weights=torch.rand(11, requires_grad=True))).values()
    assert not out.requires_grad and not list(made.parameters())


@pytest.mark.parametrize("data_type", TYPES)
def test_given_rows_are_looked_up_as_they_are(data_type: DataType) -> None:
    config = EmbeddingBagConfig(6, 8, "a", data_type, feature_names=["f"])
    rows = torch.randn(6, 8)
    bags = {"f": BAGS["f"]}
    asked = [torch.float16, torch.float32] if data_type in (DataType.INT8, DataType.INT4) else [None]
    for dtype in asked:
        format = {DataType.NFP8: "fp8"}.get(data_type, str(data_type).lower())
        payload, scales = quantize_rows(rows, format, dtype)
        forms: list[Tensor | None] = [scales] if scales.shape[1] else [scales, None]
        if dtype == torch.float16:
            # TorchRec's quantize_state_dict gives scale and bias as bytes
            forms.append(scales.view(torch.uint8))
        for form in forms:
            made = quant.EmbeddingBagCollection([config], False, "cpu", torch.float32, {"a": (payload, form)})
            wanted = pooled([config], {"a": dequantize_rows(payload, scales, 8, format)}, bags)
            torch.testing.assert_close(made(kjt(bags)).values(), wanted, rtol=1e-6, atol=1e-6)


def test_fp32_scales_hold_what_fp16_scales_cannot() -> None:
    config = EmbeddingBagConfig(4, 8, "a", DataType.INT8, feature_names=["f"])
    payload, scales = quantize_rows(torch.randn(4, 8) * 1e6, "int8", torch.float32)
    made = quant.EmbeddingBagCollection(
        [config], False, "cpu", table_name_to_quantized_weights={"a": (payload, scales)}
    )
    assert torch.equal(values_of(made)["a"], dequantize_rows(payload, scales, 8, "int8"))
    for asked in (torch.float32, {"a": torch.float32}):
        assert quant.EmbeddingBagCollection([config], False, "cpu", scale_dtype=asked)._groups[0].scales.dtype == (
            torch.float32
        )


def row(data_type: DataType, kept: int | None = None) -> EmbeddingBagConfig:
    return EmbeddingBagConfig(4, 8, "a", data_type, feature_names=["f"], num_embeddings_post_pruning=kept)


PAYLOAD, SCALES = torch.zeros(4, 8, dtype=torch.uint8), torch.zeros(4, 2, dtype=torch.float16)
REFUSED = [
    ({"tables": [row(DataType.INT64)]}, ValueError, "table 'a': no rows are stored as INT64"),
    ({"scale_dtype": torch.bfloat16}, ValueError, "table 'a': scales of int8 rows are torch.float16 or torch.float32"),
    ({"scale_dtype": {"b": torch.float32}}, ValueError, r"scale_dtype names tables that are not here: \['b'\]"),
    ({"output_dtype": torch.float64}, ValueError, "output_dtype must be one of .*, got torch.float64"),
    ({"weights": {}}, KeyError, r"no weights for tables \['a'\]"),
    ({"weights": {"a": (PAYLOAD[:3], SCALES)}}, ValueError, "table 'a': the payload of int8 rows of dim 8 is uint8"),
    ({"weights": {"a": (PAYLOAD.float(), SCALES)}}, ValueError, r"\[4, 8\], got torch.float32 \[4, 8\]"),
    ({"weights": {"a": (PAYLOAD, SCALES[:, :1])}}, ValueError, "table 'a': the scales of int8 rows are"),
    ({"weights": {"a": (PAYLOAD, None)}}, ValueError, r"torch.float16 \[4, 2\], got None"),
    ({"tables": [row(DataType.INT8)] * 2}, ValueError, "Duplicate table name a"),
    (
        {"tables": [row(DataType.INT8, kept=5)]},
        ValueError,
        r"table 'a': num_embeddings_post_pruning 5 is outside \[0, 4\]",
    ),
]


@pytest.mark.parametrize(("arguments", "error", "message"), REFUSED)
def test_what_cannot_be_stored_is_refused_by_name(
    arguments: dict[str, object], error: type[Exception], message: str
) -> None:
    given = {"tables": [row(DataType.INT8)], "is_weighted": False, "device": "cpu", **arguments}
    given["table_name_to_quantized_weights"] = given.pop("weights", None)
    with pytest.raises(error, match=message):
        quant.EmbeddingBagCollection(**given)  # type: ignore[arg-type]


def test_settings_without_effect_are_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwise.embeddings.quant.collection._WARNED", set())
    tables = [row(DataType.INT8)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            quant.EmbeddingBagCollection(tables, False, "cpu", register_tbes=True, row_alignment=4)
            quant.EmbeddingBagCollection(
                tables, False, "cpu", quant_state_dict_split_scale_bias=True, cache_features_order=True
            )
    assert [str(warning.message) for warning in caught] == [
        "EmbeddingBagCollection: register_tbes=True has no effect, lookups here are no modules",
        "EmbeddingBagCollection: row_alignment=4 has no effect, rows here are not padded",
    ]
    assert all(warning.filename == __file__ for warning in caught)


def test_a_collection_tells_its_tables() -> None:
    assert repr(mixed()) == (
        "QuantizedEmbeddingBagCollection(\n"
        "  (embedding_bags): ModuleDict(\n"
        "    (a): QuantizedRows(6 x 8, int8, float16 scales)\n"
        "    (b): QuantizedRows(7 x 5, int4, float16 scales)\n"
        "    (c): QuantizedRows(8 x 32, fp8, float32 scales)\n"
        "  )\n"
        ")"
    )
    assert [config.data_type for config in mixed().embedding_bag_configs()] == [
        DataType.INT8, DataType.INT4, DataType.NFP8
    ]  # fmt: skip


class Lookup(nn.Module):
    """Tensors in, a tensor out: what torch.export takes."""

    def __init__(self, collection: nn.Module) -> None:
        super().__init__()
        self.collection = collection

    def forward(self, values: Tensor, lengths: Tensor) -> Tensor:
        out: Tensor = self.collection(KeyedJaggedTensor(["f", "g", "h"], values, lengths=lengths)).values()
        return out


def test_a_collection_is_one_graph() -> None:
    made, batch = mixed(), kjt(BAGS)
    inputs = (batch.values(), batch.lengths())
    wanted = made(batch).values()
    compiled = torch.compile(Lookup(made), fullgraph=True, backend="eager")
    assert torch.equal(compiled(*inputs), wanted)
    program = torch.export.export(Lookup(made), inputs)
    for exported in (program, program.run_decompositions()):
        assert torch.equal(exported.module()(*inputs), wanted)
        with pytest.raises(IndexError, match=r"feature 'h' \(table 'c'\), sample 0: id 12 is outside \[0, 8\)"):
            exported.module()(inputs[0] + 10 * (torch.arange(11) == 7), inputs[1])


@pytest.mark.gpu
def test_on_cuda_a_bad_id_raises_at_the_next_batch_or_at_once() -> None:
    made = mixed().to("cuda")
    good, bad = kjt(BAGS, device="cuda"), kjt({**BAGS, "h": [[2, 99, 5], [1], []]}, device="cuda")
    made(bad)
    with pytest.raises(IndexError, match="id 99"):
        made(good)
    torch.testing.assert_close(made(good).values().cpu(), mixed()(kjt(BAGS)).values())
    made(bad)
    with pytest.raises(IndexError, match="id 99"):
        made.check()


TABLE = QuantizedTable("t", 10, 8, "int8")


def pieces() -> Any:
    made = quantized(EmbeddingBagCollection([EmbeddingBagConfig(10, 8, "t", feature_names=["f"])]))
    sharded: Any = shard_quant_model(made, 2, "cpu", "cpu")[0]
    return sharded._checks[0][1]


CHECKS: dict[str, Callable[[], Any]] = {
    "tables": lambda: QuantizedTables([TABLE], [LookupFeature("f", 0, False)]).check,
    "tables in pieces": pieces,
}


@dataclass
class Arrived:
    """A guard that came to the host: of a batch of one id."""

    guard: Tensor
    ids: Tensor
    offsets: Tensor

    def is_raised(self) -> bool:
        return bool(self.guard[0] == 0)


def batch_of(number: int) -> Arrived:
    guard = new_guard()
    if number >= 10:
        guard[0] = 0
    return Arrived(guard, torch.tensor([number]), torch.tensor([0, 1]))


@pytest.mark.parametrize("made", CHECKS.values(), ids=CHECKS.keys())
def test_bad_ids_of_batches_checked_at_once_are_all_raised(made: Callable[[], Any]) -> None:
    """The check kept the guard of the latest batch alone: a bad id of another thread's counted as none, in silence."""
    check = made()
    check._pending.extend(batch_of(number) for number in (3, 11, 4, 12, 5))
    for number in (11, 12):
        with pytest.raises(IndexError, match=rf"feature 'f' \(table 't'\), sample 0: id {number} is outside \[0, 10\)"):
            check.raise_pending()
    check.raise_pending()


@pytest.mark.parametrize("made", CHECKS.values(), ids=CHECKS.keys())
def test_threads_that_read_guards_at_once_raise_each_of_them_once(made: Callable[[], Any]) -> None:
    """A thread that found a guard waiting, and then none as another had taken it, failed with an AttributeError."""
    check, count = made(), 64
    check._pending.extend(batch_of(10 + number) for number in range(count))

    def guard_message(_: int) -> str:
        with pytest.raises(IndexError) as caught:
            check.raise_pending()
        return str(caught.value)

    with ThreadPoolExecutor(4) as pool:
        messages = list(pool.map(guard_message, range(count)))
    assert sorted(int(message.split("id ")[1].split(" ")[0]) for message in messages) == [*range(10, 10 + count)]
    check.raise_pending()
