"""FBGEMM's rows, written byte by byte here, become our planes and come back; TorchRec's state fills collections."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise import DataType, EmbeddingBagConfig, EmbeddingConfig, KeyedJaggedTensor, quant
from shardwise.kernels import ROW_FORMATS, dequantize_rows, quantize_rows
from shardwise.quant import (
    FUSED_8BIT,
    FUSED_NBIT,
    INFERENCE,
    FusedLayout,
    fuse_rows,
    inference_layout,
    load_torchrec_state_dict,
    split_rows,
    torchrec_state_dict,
)


def packed(numbers: list[int], bits: int) -> bytes:
    """The first number in the lowest bits of its byte."""
    per_byte = 8 // bits
    numbers = numbers + [0] * (-len(numbers) % per_byte)
    return bytes(
        sum(number << (place * bits) for place, number in enumerate(numbers[at : at + per_byte]))
        for at in range(0, len(numbers), per_byte)
    )


# a row by hand: scale, bias, numbers, and the bytes that FBGEMM keeps them in
SCALE, BIAS = 0.5, -2.0
SINGLES, HALVES = struct.pack("<ff", SCALE, BIAS), struct.pack("<ee", SCALE, BIAS)
ROWS: dict[str, tuple[FusedLayout, str, list[int], tuple[bytes, ...]]] = {
    "fused 8-bit": (FUSED_8BIT, "int8", [0, 255, 7, 128, 1], (bytes([0, 255, 7, 128, 1]), SINGLES)),
    "n-bit of 8": (FUSED_NBIT, "int8", [0, 255, 7, 128], (bytes([0, 255, 7, 128]), HALVES)),
    "n-bit of 4": (FUSED_NBIT, "int4", [1, 15, 0, 9], (b"\xf1\x90", HALVES)),
    "n-bit of 2": (FUSED_NBIT, "int2", [0, 1, 2, 3, 3, 0, 0, 1], (b"\xe4\x43", HALVES)),
    "n-bit of 4, odd": (FUSED_NBIT, "int4", [1, 15, 9], (b"\xf1\x09", HALVES)),
    "table of int8": (INFERENCE, "int8", [3, 1, 4, 1, 5], (HALVES, bytes([3, 1, 4, 1, 5]), bytes(7))),
    "table of int8, 12 fit": (INFERENCE, "int8", list(range(12)), (HALVES, bytes(range(12)))),
    "table of int4": (INFERENCE, "int4", [2, 7, 1, 8], (HALVES, b"\x72\x81", bytes(10))),
    "table of int2": (INFERENCE, "int2", [3, 1, 0, 2], (HALVES, b"\x87", bytes(11))),
    "table of int8, unaligned": (replace(INFERENCE, alignment=1), "int8", [9, 8, 7], (HALVES, bytes([9, 8, 7]))),
}


@pytest.mark.parametrize("name", ROWS)
def test_rows_by_hand_become_planes_and_come_back(name: str) -> None:
    layout, format, numbers, parts = ROWS[name]
    rows, dim = torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.uint8).view(1, -1), len(numbers)
    payload, scales = split_rows(rows, dim=dim, format=format, layout=layout)
    assert payload.tolist() == [list(packed(numbers, ROW_FORMATS[format].bits))]
    assert scales.dtype == layout.scale_dtype and scales.tolist() == [[SCALE, BIAS]]
    values = dequantize_rows(payload, scales, dim, format)
    assert values.tolist() == [[number * SCALE + BIAS for number in numbers]]
    assert torch.equal(fuse_rows(payload, scales, dim=dim, format=format, layout=layout), rows)


@pytest.mark.parametrize(("format", "width"), [("fp16", 128), ("fp32", 256)])
def test_float_rows_have_no_scales(format: str, width: int) -> None:
    payload, scales = quantize_rows(torch.randn(3, 64), format)
    rows = fuse_rows(payload, scales, dim=64, format=format, layout=INFERENCE)
    assert rows.shape == (3, width) and torch.equal(rows, payload)
    assert torch.equal(split_rows(rows, dim=64, format=format, layout=INFERENCE)[0], payload)


@pytest.mark.parametrize("rows", [0, 1, 5])
@pytest.mark.parametrize("dim", [1, 4, 7, 33])
@pytest.mark.parametrize("layout", [FUSED_8BIT, FUSED_NBIT, INFERENCE], ids=lambda layout: layout.name)
def test_any_rows_survive_the_way_there_and_back(layout: FusedLayout, dim: int, rows: int) -> None:
    for format in layout.formats:
        kind = ROW_FORMATS[format]
        payload = torch.randint(0, 256, (rows, kind.row_bytes(dim)), dtype=torch.uint8)
        scales = torch.randn(rows, kind.parts).to(layout.scale_dtype)
        fused = fuse_rows(payload, scales, dim=dim, format=format, layout=layout)
        assert fused.shape == (rows, layout.width(dim, format)) and fused.shape[1] % layout.alignment == 0
        back = split_rows(fused, dim=dim, format=format, layout=layout)
        assert torch.equal(back[0], payload) and torch.equal(back[1], scales)


def test_the_alignment_is_read_off_the_width() -> None:
    assert inference_layout(80, dim=64, format="int8") == INFERENCE
    assert inference_layout(68, dim=64, format="int8").alignment == 1
    assert inference_layout(96, dim=64, format="int8").alignment == 32


WIDE = torch.zeros(2, 80, dtype=torch.uint8)
PLANES, FP8 = quantize_rows(torch.ones(2, 64), "int8"), quantize_rows(torch.ones(2, 4), "fp8")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: split_rows(WIDE, dim=60, format="int8", layout=INFERENCE, table="item"),
            r"item: int8 rows of dim 60 are uint8 \[R, 64\] as INFERENCE .* \[2, 80\]",
        ),
        (
            lambda: split_rows(WIDE.int(), dim=64, format="int8", layout=INFERENCE, table="item"),
            r"item: .* got int32 \[2, 80\]",
        ),
        (
            lambda: split_rows(WIDE, dim=64, format="int4", layout=FUSED_8BIT, table="item"),
            "item: FUSED_8BIT rows hold int8, not int4",
        ),
        (
            lambda: fuse_rows(*FP8, dim=4, format="fp8", layout=INFERENCE, table="item"),
            "item: INFERENCE rows hold int8, int4, int2, fp16, fp32, not fp8",
        ),
        (
            lambda: fuse_rows(*PLANES, dim=64, format="int8", layout=FUSED_8BIT),
            "FUSED_8BIT rows keep scales of torch.float32, got torch.float16",
        ),
        (
            lambda: fuse_rows(*PLANES, dim=63, format="int8", layout=FUSED_NBIT),
            r"payload \[R, 63\] and scales \[R, 2\], got \[2, 64\] and \[2, 2\]",
        ),
        (
            lambda: inference_layout(68, dim=64, format="int4", table="item"),
            "item: int4 .* 36 bytes, or 48 .* got 68; int8 rows are that wide",
        ),
    ],
)
def test_rows_that_do_not_fit_are_refused_by_name(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


class Bits(Tensor):
    """What TorchRec keeps int4 rows in: claims more columns than it has bytes, and gives the bytes by a view."""

    @staticmethod
    def __new__(cls, rows: Tensor, per_byte: int = 2) -> Bits:
        shape = (*rows.shape[:-1], rows.shape[-1] * per_byte)
        return Tensor._make_wrapper_subclass(cls, shape, dtype=torch.uint8)

    def __init__(self, rows: Tensor, per_byte: int = 2) -> None:
        self.rows = rows

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.view.dtype and args[1] == torch.uint8:
            return args[0].rows
        raise NotImplementedError(f"{func}")


FORMATS = {"item": "int8", "user": "int4", "tag": "int2", "city": "fp16"}
TYPES = (DataType.INT8, DataType.INT4, DataType.INT2, DataType.FP16)


def bags() -> quant.EmbeddingBagCollection:
    configs = [
        EmbeddingBagConfig(6 + t, 4 * (t + 1), name, feature_names=[f"f_{name}"], data_type=TYPES[t])
        for t, name in enumerate(FORMATS)
    ]
    return quant.EmbeddingBagCollection(configs, False, "cpu")


class Net(nn.Module):
    """A model around a collection, with a layer beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.ebc = bags()
        self.over = nn.Linear(40, 1)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        out: Tensor = self.over(self.ebc(features).values())
        return out


def by_hand(*, split: bool, alignment: int = 16) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """TorchRec's entries of the tables of `bags`, and the values of their rows."""
    state, values = {}, {}
    for t, (name, format) in enumerate(FORMATS.items()):
        rows, dim, prefix = 6 + t, 4 * (t + 1), f"ebc.embedding_bags.{name}."
        payload, scales = quantize_rows(torch.randn(rows, dim), format)
        values[name] = dequantize_rows(payload, scales, dim, format)
        width = payload.shape[1] + 2 * scales.shape[1]
        fused = torch.full((rows, -(-width // alignment) * alignment), 0, dtype=torch.uint8)
        begin = 2 * scales.shape[1]
        fused[:, :begin] = scales.view(torch.uint8)
        fused[:, begin:width] = payload
        # views with gaps between the rows, as TorchRec's are
        weight = fused[:, begin:width] if split else fused
        state[f"{prefix}weight"] = Bits(weight) if format == "int4" else weight
        if split and scales.shape[1]:
            both = fused[:, :4].view(torch.float16)
            state[f"{prefix}weight_qscale"], state[f"{prefix}weight_qbias"] = both[:, :1], both[:, 1:]
    return state, values


DENSE = {"over.weight": torch.ones(1, 40), "over.bias": torch.zeros(1)}
KJT = KeyedJaggedTensor.from_lengths_sync(
    [f"f_{name}" for name in FORMATS], torch.tensor([0, 5, 6, 1, 7, 2, 8]), torch.tensor([2, 0, 1, 1, 2, 0, 0, 1])
)


@pytest.mark.parametrize(("split", "alignment"), [(False, 16), (False, 1), (True, 16)])
def test_a_torchrec_state_dict_fills_a_model(split: bool, alignment: int) -> None:
    torch.manual_seed(1)
    state, values = by_hand(split=split, alignment=alignment)
    net = Net()
    load_torchrec_state_dict(net, {**state, **DENSE, "ebc.tbes.0.D_offsets": torch.zeros(2)})
    features = KJT.to_dict()
    for name in FORMATS:
        bag = features[f"f_{name}"]
        wanted = torch.stack([values[name][ids].sum(0) for ids in bag.to_dense()])
        assert torch.equal(net.ebc(KJT)[f"f_{name}"], wanted), name
    assert torch.allclose(net(KJT), net.ebc(KJT).values().sum(1, keepdim=True))
    written = torchrec_state_dict(net, split_scale_bias=split, row_alignment=alignment, wrap={"int4": Bits})
    assert written.keys() == state.keys() | DENSE.keys()
    for name, value in {**state, **DENSE}.items():
        assert written[name].shape == value.shape, name
        assert torch.equal(written[name].view(value.dtype), value.view(value.dtype)), name


def test_a_collection_alone_and_sequences_are_filled_too() -> None:
    sequences = quant.EmbeddingCollection(
        [EmbeddingConfig(3, 4, "t", feature_names=["f"], data_type=DataType.INT8)], "cpu"
    )
    payload, scales = quantize_rows(torch.randn(3, 4), "int8")
    rows = fuse_rows(payload, scales, dim=4, format="int8", layout=INFERENCE)
    load_torchrec_state_dict(sequences, {"embeddings.t.weight": rows})
    features = KeyedJaggedTensor.from_lengths_sync(["f"], torch.tensor([2, 0]), torch.tensor([1, 1]))
    assert torch.equal(sequences(features)["f"].values(), dequantize_rows(payload, scales, 4, "int8")[[2, 0]])


def test_tables_that_do_not_fit_are_refused_by_name_and_nothing_is_loaded() -> None:
    net, (state, _) = Net(), by_hand(split=True)
    state.update(DENSE)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    item, scale = "ebc.embedding_bags.item.weight", "ebc.embedding_bags.user.weight_qscale"
    wrong: list[tuple[dict[str, Tensor | None], str]] = [
        ({item: None}, f"table 'item': the state dict has no {item}"),
        ({item: torch.zeros(6, 4)}, "table 'item': the state dict's weight is torch.float32, not bytes of int8 rows"),
        ({item: state[item][:5]}, r"table 'item': the state dict's weight has shape \[5, 4\], the table 6 rows"),
        ({item: state[item][:, :3]}, r"table 'item': int8 rows of dim 4 are uint8 \[R, 8\]"),
        ({scale: None}, "table 'user': the state dict has one of weight_qscale and weight_qbias without the other"),
        ({scale: state[scale].float()}, r"table 'user': weight_qscale must be float16 \[7, 1\], got float32 \[7, 1\]"),
    ]
    for change, message in wrong:
        changed = {name: value for name, value in {**state, **change}.items() if value is not None}
        with pytest.raises(ValueError, match=message):
            load_torchrec_state_dict(net, changed)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    with pytest.raises(RuntimeError, match="over.bias"):
        load_torchrec_state_dict(net, {name: value for name, value in state.items() if name != "over.bias"})


def test_what_torchrec_has_no_rows_for_is_not_written() -> None:
    config = EmbeddingBagConfig(3, 4, "t", feature_names=["f"], data_type=DataType.BF16)
    with pytest.raises(ValueError, match="table 't': INFERENCE rows hold int8, int4, int2, fp16, fp32, not bf16"):
        torchrec_state_dict(quant.EmbeddingBagCollection([config], False, "cpu"))


def test_a_float_state_dict_is_not_read_as_bytes() -> None:
    """Rows of fp32 have the width of padded int8 rows, and were taken for them without a word."""
    config = EmbeddingBagConfig(3, 8, "t", feature_names=["f"], data_type=DataType.INT8)
    for columns in (4, 8):
        with pytest.raises(ValueError, match="table 't': the state dict's weight is torch.float32, not bytes of int8"):
            load_torchrec_state_dict(
                quant.EmbeddingBagCollection([config], False, "cpu"),
                {"embedding_bags.t.weight": torch.zeros(3, columns)},
            )
