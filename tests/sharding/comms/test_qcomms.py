"""Compression settings by TorchRec's names, and the codecs that the exchange makes of them."""

from __future__ import annotations

import enum
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.sharding.comms.codecs import Codec, FormatCodec
from shardwise.sharding.comms.qcomms import (
    CommOp,
    CommType,
    NoOpQuantizedCommCodec,
    QCommsConfig,
    QuantizedCommCodec,
    QuantizedCommCodecs,
    UserCodec,
    codecs_of,
    get_qcomm_codecs,
    get_qcomm_codecs_registry,
)


class Halves(QuantizedCommCodec[None]):
    """A codec of a user: fp16, times a factor."""

    def __init__(self, factor: float = 1.0) -> None:
        self.factor = factor

    def encode(self, input_tensor: Tensor, ctx: None = None) -> Tensor:
        return (input_tensor * self.factor).half()

    def decode(self, input_grad: Tensor, ctx: None = None) -> Tensor:
        return input_grad.float() / self.factor

    quantized_dtype = torch.float16  # type: ignore[assignment]

    def calc_quantized_size(self, input_len: int, ctx: None = None) -> int:
        return input_len


class Rows(Halves):
    """A codec of a user that takes whole rows: of each row its mean."""

    quantized_dtype = torch.float32

    def create_context(self) -> Any:
        return SimpleNamespace(row_dim=8)

    def encode(self, input_tensor: Tensor, ctx: Any = None) -> Tensor:
        return input_tensor.view(-1, ctx.row_dim).mean(1)

    def decode(self, input_grad: Tensor, ctx: Any = None) -> Tensor:
        return input_grad.repeat_interleave(ctx.row_dim)

    def calc_quantized_size(self, input_len: int, ctx: Any = None) -> int:
        assert input_len % ctx.row_dim == 0, f"{input_len} is not a multiple of {ctx.row_dim}"
        return input_len // ctx.row_dim


class Longer(Halves):
    def calc_quantized_size(self, input_len: int, ctx: None = None) -> int:
        return input_len + 1


SparseType = enum.Enum("SparseType", {"FP32": "fp32", "BF16": "bf16"})


def registry(forward: CommType, backward: CommType = CommType.FP32, **settings: Any) -> Any:
    return get_qcomm_codecs_registry(QCommsConfig(forward, backward, **settings))


def names(pair: tuple[Codec, Codec]) -> tuple[str, str]:
    return pair[0].name, pair[1].name


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"forward": CommType.FP16, "backward": CommType.BF16}, ("fp16", "bf16")),
        ({"forward": CommType.FP16}, ("fp16", "fp32")),
        ({"forward": CommType.FP32, "backward": CommType.FP16, "backward_loss_scale": 128}, ("fp32", "fp16*128")),
        ({"forward": CommType.FP8, "backward": CommType.FP8}, ("fp8e4/64", "fp8e5/64")),
        ({"forward": CommType.FP8, "backward": CommType.FP8, "fp8_bwd_uses_143": True}, ("fp8e4/64", "fp8e4/64")),
        ({"forward": CommType.FP8, "backward": CommType.FP8, "fp8_quantize_dim": 32}, ("fp8e4/32", "fp8e5/32")),
        (
            {"forward": CommType.FP8, "backward": CommType.FP8, "fp8_quantize_dim": 32, "fp8_quantize_dim_bwd": 16},
            ("fp8e4/32", "fp8e5/16"),
        ),
        ({"forward": CommType.INT8, "backward": CommType.INT8}, ("int8/64", "int8/64")),
        ({"forward": CommType.MX4, "backward": CommType.FP8}, ("mx4/32", "fp8e5/64")),
        ({"forward": CommType.MX4, "backward": CommType.MX4, "mx4_quantize_dim": 64}, ("mx4/64", "mx4/64")),
    ],
    ids=str,
)
@pytest.mark.parametrize("pooled", [True, False])
def test_a_config_says_which_codecs_run(settings: dict[str, Any], expected: tuple[str, str], pooled: bool) -> None:
    assert names(codecs_of(registry(**settings), pooled=pooled)) == expected


def test_no_compression_is_no_registry() -> None:
    assert registry(CommType.FP32) is None
    assert names(codecs_of(None)) == names(codecs_of({})) == ("fp32", "fp32")
    assert not codecs_of(None)[0].compresses


def test_a_registry_names_every_collective_or_those_asked_for() -> None:
    assert list(registry(CommType.FP16)) == [op.name for op in CommOp]
    only = get_qcomm_codecs_registry(
        QCommsConfig(CommType.FP16), [CommOp.SEQUENCE_EMBEDDINGS_ALL_TO_ALL], torch.device("cpu")
    )
    assert names(codecs_of(only, pooled=False)) == ("fp16", "fp32")
    assert names(codecs_of(only, pooled=True)) == ("fp32", "fp32")
    scatter = get_qcomm_codecs_registry(QCommsConfig(CommType.BF16), [CommOp.POOLED_EMBEDDINGS_REDUCE_SCATTER])
    assert names(codecs_of(scatter)) == ("bf16", "fp32")


@pytest.mark.parametrize("kind", list(CommType), ids=str)
def test_codecs_round_trip_under_the_names_of_torchrec(kind: CommType) -> None:
    codec = get_qcomm_codecs(QCommsConfig(kind, kind)).forward
    x = torch.randn(128)
    context = codec.create_context()
    data = codec.encode(x, context)
    assert data.dtype == codec.quantized_dtype
    assert data.shape == (codec.calc_quantized_size(128, context),)
    back = codec.decode(data, context)
    tolerance = {"fp32": 0.0, "fp16": 1e-3, "bf16": 8e-3, "fp8": 0.07, "int8": 0.02, "mx4": 0.6}[str(kind)]
    assert back.shape == x.shape
    assert (back - x).abs().max() <= tolerance * x.abs().max()
    assert codec.padded_size(x.view(2, 64), [64], 0, context) == (64, 0)


def test_codecs_by_themselves_take_whole_rows_and_say_so() -> None:
    codec = get_qcomm_codecs(QCommsConfig(CommType.INT8)).forward
    with pytest.raises(ValueError, match="int8/64: the number of values must be a multiple of 64, got 65"):
        codec.encode(torch.zeros(65))
    with pytest.raises(ValueError, match="int8/64: no number of whole rows of 64 values has 73 bytes"):
        codec.decode(torch.zeros(73, dtype=torch.uint8))
    for kind in (CommType.INT8, CommType.FP8, CommType.MX4):
        codec = get_qcomm_codecs(QCommsConfig(kind)).forward
        assert [len(codec.decode(codec.encode(torch.zeros(64 * rows)))) for rows in range(6)] == [*range(0, 384, 64)]
    halves = get_qcomm_codecs(QCommsConfig(CommType.FP16, forward_loss_scale=4.0)).forward
    assert torch.equal(halves.encode(torch.ones(3, 5)), torch.full((3, 5), 4.0).half())
    assert torch.equal(halves.decode(halves.encode(torch.ones(3, 5))), torch.ones(3, 5))
    with pytest.raises(ValueError, match="fp16\\*4.0: expected torch.float16, got torch.float32"):
        halves.decode(torch.ones(3))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"forward_precision": CommType.FP8, "fp8_quantize_dim": 30}, "fp8: values sharing a scale .* of 4, got 30"),
        ({"forward_precision": CommType.MX4, "mx4_quantize_dim": 4}, "mx4: values sharing a scale .* of 8, got 4"),
        ({"forward_precision": "fp16"}, "forward_precision must be a CommType, got 'fp16'"),
        ({"forward_precision": CommType.FP8, "output_dtype": "int8"}, "output_dtype: rows become one of FP32, FP16"),
        ({"forward_precision": CommType.FP8, "fp8_output_dtype": torch.int8}, "output_dtype: rows become one of FP32"),
        ({"forward_precision": CommType.MX4, "mx4_rounding_mode": 1}, "mx4_rounding_mode: mx4 rounds to even"),
        ({"forward_precision": CommType.FP16, "forward_loss_scale": -1.0}, "the loss scale must be positive"),
    ],
)
def test_what_is_not_served_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        get_qcomm_codecs(QCommsConfig(**settings))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"fp8_quantize_dim": 64}, "fp8_quantize_dim is not used: neither precision is fp8"),
        ({"mx4_quantize_dim_bwd": 64}, "mx4_quantize_dim_bwd is not used: neither precision is mx4"),
        ({"forward_precision": CommType.INT8, "forward_loss_scale": 2.0}, "forward_loss_scale is not used: int8"),
        ({"forward_precision": CommType.INT8, "output_dtype": SparseType.BF16}, "output_dtype is not used: rows that"),
    ],
)
def test_what_has_no_effect_is_said(settings: dict[str, Any], message: str) -> None:
    with pytest.warns(UserWarning, match=message):
        config = QCommsConfig(**settings)
    codec = codecs_of(get_qcomm_codecs_registry(config))[0]
    assert isinstance(codec, FormatCodec)
    assert codec.loss_scale is None


def test_settings_that_say_what_happens_anyway_are_taken() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        QCommsConfig(CommType.FP8, output_dtype=SparseType.FP32, fp8_output_dtype=torch.float32)
        QCommsConfig(CommType.MX4, mx4_rounding_mode=2)


@pytest.mark.parametrize("kind", [CommType.FP8, CommType.MX4])
@pytest.mark.parametrize("settings", [{"output_dtype": SparseType.BF16}, {"fp8_output_dtype": torch.bfloat16}])
def test_rows_that_share_scales_become_the_output_dtype(kind: CommType, settings: dict[str, Any]) -> None:
    codecs = get_qcomm_codecs(QCommsConfig(kind, CommType.BF16, **settings))
    plain = get_qcomm_codecs(QCommsConfig(kind, CommType.BF16))
    values = torch.linspace(-3, 3, 64)
    decoded = codecs.forward.decode(codecs.forward.encode(values))
    assert decoded.dtype == torch.bfloat16
    assert torch.equal(decoded, plain.forward.decode(plain.forward.encode(values)).bfloat16())
    assert codecs.backward.decode(codecs.backward.encode(values)).dtype == torch.float32
    mixed = {
        "POOLED_EMBEDDINGS_ALL_TO_ALL": codecs, "POOLED_EMBEDDINGS_REDUCE_SCATTER": plain,
    }  # fmt: skip
    with pytest.raises(ValueError, match="the rows of all plans travel in one exchange"):
        codecs_of(mixed)


@pytest.mark.parametrize("output", [None, SparseType.FP32, SparseType.BF16])
def test_mx4_gives_the_peers_numbers_in_the_output_dtype(output: SparseType | None) -> None:
    """Those of fbgemm-gpu-cpu 1.8.0, exactly: bf16 has all that mx4 has. The peer takes no FP16."""
    values = torch.linspace(-3, 3, 64) * torch.logspace(-2, 1, 64)
    codec = get_qcomm_codecs(QCommsConfig(CommType.MX4, CommType.BF16, output_dtype=output)).forward
    decoded = codec.decode(codec.encode(values))
    assert decoded.dtype == (torch.bfloat16 if output is SparseType.BF16 else torch.float32)
    assert decoded.double().sum().item() == 201.875
    assert decoded[::9].tolist() == [-0.03125, -0.0625, -0.09375, -0.09375, 0.0, 0.0, 8.0, 32.0]


def test_a_registry_is_checked() -> None:
    with pytest.raises(ValueError, match="unknown collective 'ALL_TO_ALL'"):
        codecs_of({"ALL_TO_ALL": QuantizedCommCodecs()})
    wrong: Any = {"POOLED_EMBEDDINGS_ALL_TO_ALL": CommType.FP16}
    with pytest.raises(ValueError, match="must be a QuantizedCommCodecs, got <CommType.FP16"):
        codecs_of(wrong)
    different = {
        "POOLED_EMBEDDINGS_ALL_TO_ALL": get_qcomm_codecs(QCommsConfig(CommType.FP8)),
        "POOLED_EMBEDDINGS_REDUCE_SCATTER": get_qcomm_codecs(QCommsConfig(CommType.FP16)),
    }
    with pytest.raises(ValueError, match="one exchange, but POOLED_EMBEDDINGS_ALL_TO_ALL has .*fp8e4.*SCATTER .*fp16"):
        codecs_of(different)
    assert names(codecs_of(different, pooled=False)) == ("fp32", "fp32")


SIZES = [3, 0, 1, 16, 9]


@pytest.mark.parametrize(
    "own", [Halves(), Halves(4.0), Rows(), NoOpQuantizedCommCodec()], ids=lambda c: type(c).__name__
)
def test_a_codec_of_ones_own_runs_on_blocks(own: QuantizedCommCodec[Any]) -> None:
    codec, _ = codecs_of({"POOLED_EMBEDDINGS_ALL_TO_ALL": QuantizedCommCodecs(own)})
    x = torch.arange(29.0)
    data, sizes = codec.encode_blocks(x, SIZES)
    assert data.dtype == torch.uint8
    assert sizes == [codec.encoded_bytes(n) for n in SIZES]
    assert sum(sizes) == data.shape[0]
    assert all(size % 4 == 0 for size in sizes)
    back = codec.decode_blocks(data, SIZES)
    assert back.shape == x.shape
    if not isinstance(own, Rows):
        assert torch.equal(back, x)
    else:
        # the mean of each row of 8, the last of a block filled up with zeros
        assert back[:3].tolist() == [3 / 8] * 3
        assert back[4:12].tolist() == [7.5] * 8
    assert codec.decode_blocks(*codec.encode_blocks(x[:0], [0, 0])[:1], [0, 0]).shape == (0,)


def test_the_name_of_a_codec_of_ones_own_says_what_ranks_have_to_agree_on() -> None:
    assert UserCodec(Halves()).name.endswith("Halves[torch.float16/1]")
    assert UserCodec(Rows()).name.endswith("Rows[torch.float32/8]")


def test_a_codec_of_ones_own_reports_what_does_not_fit() -> None:
    codec = UserCodec(Halves())
    assert codec.overflows(torch.tensor([1.0, 7e4]))
    assert not codec.overflows(torch.tensor([1.0, 6e4]))
    assert not codec.overflows(torch.empty(0))


def test_the_same_object_for_two_collectives_is_the_same_codec() -> None:
    both = QuantizedCommCodecs(Halves())
    codecs_of({"POOLED_EMBEDDINGS_ALL_TO_ALL": both, "POOLED_EMBEDDINGS_REDUCE_SCATTER": both})
    other = QuantizedCommCodecs(Halves(2.0))
    with pytest.raises(ValueError, match="one exchange"):
        codecs_of({"POOLED_EMBEDDINGS_ALL_TO_ALL": both, "POOLED_EMBEDDINGS_REDUCE_SCATTER": other})


@pytest.mark.parametrize(
    ("codec", "message"),
    [
        (Longer(), r"Longer cannot run .* announced torch.float16 of shape \[2\] for 1 values"),
        (object(), "object has no encode, decode, calc_quantized_size, quantized_dtype"),
        (type("Unfinished", (Halves,), {"encode": QuantizedCommCodec.encode})(), "NotImplementedError"),
        (
            type("Unfinished", (Halves,), {"quantized_dtype": QuantizedCommCodec.quantized_dtype})(),
            "Unfinished has no quantized_dtype",
        ),
    ],
    ids=["longer", "no codec", "no encode", "no dtype"],
)
def test_a_codec_that_does_not_keep_its_word_is_refused(codec: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        UserCodec(codec)
