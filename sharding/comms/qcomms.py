"""Which codecs a sharder uses, by TorchRec's names (torchrec.distributed.fbgemm_qcomm_codec and .types).

`codecs_of` turns what a sharder is given into the pair of codecs that the exchange runs. Other than in TorchRec, the
registry means the same on every device and for every collective: rows of all plans travel in one all-to-all, so
nothing falls back to fp16 for a reduce-scatter or on CPU, and values out of range raise instead of being clamped.
`UserCodec` runs a `QuantizedCommCodec` that a user brings.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, unique
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from ...planner.layout import TRAINED_TYPES, type_name
from .codecs import BF16, FP16, FP32, Codec, Floats, Format, FormatCodec, check_block, fp8, int8, mx4

QuantizationContext = TypeVar("QuantizationContext")

_DTYPES = {"FP32": torch.float32, "FP16": torch.float16, "BF16": torch.bfloat16}
_MOST_PAIRS = 64
_pairs: dict[tuple[int, int, str], tuple[object, tuple[Codec, Codec]]] = {}


@unique
class CommType(Enum):
    """What values are while they travel."""

    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"
    FP8 = "fp8"
    INT8 = "int8"
    MX4 = "mx4"

    def __str__(self) -> str:
        return self.value


class CommOp(Enum):
    """The collectives that a registry names; here all of them are one exchange."""

    POOLED_EMBEDDINGS_ALL_TO_ALL = "pooled_embeddings_all_to_all"
    POOLED_EMBEDDINGS_REDUCE_SCATTER = "pooled_embeddings_reduce_scatter"
    SEQUENCE_EMBEDDINGS_ALL_TO_ALL = "sequence_embeddings_all_to_all"


class QuantizedCommCodec(Generic[QuantizationContext]):
    """What a codec of one's own has to offer. `ctx` is what `create_context` returned, None by default."""

    def encode(self, input_tensor: Tensor, ctx: QuantizationContext | None = None) -> Tensor:
        """Values fp32 [n] as `quantized_dtype` [calc_quantized_size(n)]."""
        raise NotImplementedError

    def decode(self, input_grad: Tensor, ctx: QuantizationContext | None = None) -> Tensor:
        """The inverse of `encode`: [calc_quantized_size(n)] -> fp32 [n]."""
        raise NotImplementedError

    @property
    def quantized_dtype(self) -> torch.dtype:
        """The dtype of what `encode` returns."""
        raise NotImplementedError

    def calc_quantized_size(self, input_len: int, ctx: QuantizationContext | None = None) -> int:
        """How many elements of `quantized_dtype` become of `input_len` values."""
        raise NotImplementedError

    def create_context(self) -> QuantizationContext | None:
        """What `encode` and `decode` share, made once."""
        return None

    def padded_size(
        self, input_tensor: Tensor, dim_per_rank: list[int], my_rank: int, qcomm_ctx: QuantizationContext
    ) -> tuple[int, int]:
        """The width of a sample of [B, D] after padding, and the padding. Blocks are flat, so nothing asks for it."""
        return input_tensor.shape[-1], 0


class NoOpQuantizedCommCodec(QuantizedCommCodec[QuantizationContext]):
    """Values fp32 [n] travel as they are."""

    def encode(self, input_tensor: Tensor, ctx: QuantizationContext | None = None) -> Tensor:
        return input_tensor

    def decode(self, input_grad: Tensor, ctx: QuantizationContext | None = None) -> Tensor:
        return input_grad

    @property
    def quantized_dtype(self) -> torch.dtype:
        return torch.float32

    def calc_quantized_size(self, input_len: int, ctx: QuantizationContext | None = None) -> int:
        return input_len


@dataclass
class QuantizedCommCodecs:
    """The codecs of a collective: rows in forward, their gradients in backward."""

    forward: QuantizedCommCodec[Any] = field(default_factory=NoOpQuantizedCommCodec)
    backward: QuantizedCommCodec[Any] = field(default_factory=NoOpQuantizedCommCodec)


@dataclass(eq=False)
class FormatCommCodec(QuantizedCommCodec[None]):
    """One of our formats under TorchRec's names: fp16 and bf16 in their dtype and shape, the others as bytes.

    Formats that share scales take whole rows only here, as the length of the bytes has to tell that of the values;
    inside the exchange, which knows both, blocks have any length.
    """

    codec: FormatCodec

    def encode(self, input_tensor: Tensor, ctx: None = None) -> Tensor:
        dtype, n = self.quantized_dtype, input_tensor.numel()
        self.calc_quantized_size(n)
        data = self.codec.encode(input_tensor.reshape(-1)).view(dtype)
        return data if dtype is torch.uint8 else data[:n].view(input_tensor.shape)

    def decode(self, input_grad: Tensor, ctx: None = None) -> Tensor:
        codec, format, dtype = self.codec, self.codec.format, self.quantized_dtype
        if input_grad.dtype != dtype:
            raise ValueError(f"{codec.name}: expected {dtype}, got {input_grad.dtype}")
        if dtype is torch.uint8:
            size = input_grad.shape[0]
            # scales are filled up to less than a row takes
            n = size * 8 // (format.row * format.bits + 8 * format.row_bytes) * format.row
            if codec.encoded_bytes(n) != size:
                raise ValueError(f"{codec.name}: no number of whole rows of {format.row} values has {size} bytes")
            decoded = codec.decode(input_grad, n)
            return decoded if codec.output_dtype is None else decoded.to(codec.output_dtype)
        values = input_grad.to(torch.float32)
        return values if codec.loss_scale is None else values / codec.loss_scale

    @property
    def quantized_dtype(self) -> torch.dtype:
        format = self.codec.format
        return format.dtype if isinstance(format, Floats) and format.row == 1 else torch.uint8

    def calc_quantized_size(self, input_len: int, ctx: None = None) -> int:
        row = self.codec.format.row
        if input_len % row:
            raise ValueError(f"{self.codec.name}: the number of values must be a multiple of {row}, got {input_len}")
        return input_len if row == 1 else self.codec.encoded_bytes(input_len)


@dataclass
class QCommsConfig:
    """How rows (forward) and their gradients (backward) travel.

    A loss scale multiplies values on the way, for fp16 and bf16. `fp8_quantize_dim` and `mx4_quantize_dim` are the
    numbers of values that share a scale: multiples of 4 and 8, 64 and 32 by default, the backward ones as forward. In
    backward fp8 is e5m2, with `fp8_bwd_uses_143` e4m3. `output_dtype` is what rows become that arrive as fp8 or mx4,
    and so the type of a collection's output: fp32 (the default), fp16 or bf16; gradients arrive as fp32.
    `fp8_output_dtype` is an older name of it. `mx4_rounding_mode` may only be even (2).

    Raises:
        ValueError: a precision, a rounding mode, a dtype or a number of values that is not served; names it.
    """

    forward_precision: CommType = CommType.FP32
    backward_precision: CommType = CommType.FP32
    forward_loss_scale: float | None = None
    backward_loss_scale: float | None = None
    fp8_quantize_dim: int | None = None
    fp8_quantize_dim_bwd: int | None = None
    fp8_bwd_uses_143: bool | None = False
    fp8_output_dtype: object = None
    mx4_quantize_dim: int | None = None
    mx4_quantize_dim_bwd: int | None = None
    mx4_rounding_mode: object = None
    output_dtype: object = None

    def __post_init__(self) -> None:
        for side in ("forward", "backward"):
            kind = getattr(self, f"{side}_precision")
            if not isinstance(kind, CommType):
                raise ValueError(f"{side}_precision must be a CommType, got {kind!r}")
            if getattr(self, f"{side}_loss_scale") is not None and kind not in (CommType.FP16, CommType.BF16):
                warnings.warn(f"QCommsConfig: {side}_loss_scale is not used: {kind} needs none", stacklevel=3)
        # a member of an enum has a name: TorchRec's own enums need not be there
        rounds = self.mx4_rounding_mode
        if rounds is not None and str(getattr(rounds, "name", rounds)).lower() not in ("even", "2"):
            raise ValueError(f"mx4_rounding_mode: mx4 rounds to even (2), got {rounds!r}; leave it out")
        if self.fp8_output_dtype is not None and self.output_dtype is None:
            self.output_dtype = self.fp8_output_dtype
        for name in ("output_dtype", "fp8_output_dtype"):
            value = getattr(self, name)
            if value is not None and type_name(value) not in TRAINED_TYPES:
                raise ValueError(f"{name}: rows become one of {', '.join(TRAINED_TYPES)}, got {value!r}")
        if self.arrives_as is None and self.output_dtype is not None and type_name(self.output_dtype) != "FP32":
            warnings.warn(
                f"QCommsConfig: output_dtype is not used: rows that travel as {self.forward_precision} arrive as fp32",
                stacklevel=3,
            )
        for kind in (CommType.FP8, CommType.MX4):
            forward, backward = f"{kind}_quantize_dim", f"{kind}_quantize_dim_bwd"
            if kind not in (self.forward_precision, self.backward_precision):
                for name in (forward, backward):
                    if getattr(self, name) is not None:
                        warnings.warn(f"QCommsConfig: {name} is not used: neither precision is {kind}", stacklevel=3)
            elif getattr(self, backward) is None:
                setattr(self, backward, getattr(self, forward))

    @property
    def arrives_as(self) -> torch.dtype | None:
        """The type that rows are given when they arrive; None leaves it to the collection."""
        if self.output_dtype is None or self.forward_precision not in (CommType.FP8, CommType.MX4):
            return None
        return _DTYPES[type_name(self.output_dtype)]


def get_qcomm_codecs(qcomms_config: QCommsConfig | None) -> QuantizedCommCodecs:
    """The pair of codecs that a config describes; without one, values travel as they are."""
    if qcomms_config is None:
        return QuantizedCommCodecs()
    config, exponent_bits = qcomms_config, 4 if qcomms_config.fp8_bwd_uses_143 else 5
    forward = _side(
        config.forward_precision, config.forward_loss_scale, config.fp8_quantize_dim, 4, config.mx4_quantize_dim
    )
    if isinstance(forward, FormatCommCodec):
        forward.codec.output_dtype = config.arrives_as
    return QuantizedCommCodecs(
        forward,
        _side(
            config.backward_precision, config.backward_loss_scale, config.fp8_quantize_dim_bwd, exponent_bits,
            config.mx4_quantize_dim_bwd,
        ),
    )  # fmt: skip


def _side(
    kind: CommType, loss_scale: float | None, fp8_row: int | None, exponent_bits: int, mx4_row: int | None
) -> QuantizedCommCodec[Any]:
    plain = {CommType.FP16: FP16, CommType.BF16: BF16}
    scaled: dict[CommType, Callable[[], Format]] = {
        CommType.FP8: partial(fp8, row=fp8_row, exponent_bits=exponent_bits),
        CommType.INT8: int8,
        CommType.MX4: partial(mx4, row=mx4_row),
    }
    if kind is CommType.FP32:
        return NoOpQuantizedCommCodec()
    return FormatCommCodec(
        FormatCodec(plain[kind], loss_scale=loss_scale) if kind in plain else FormatCodec(scaled[kind]())
    )


def get_qcomm_codecs_registry(
    qcomms_config: QCommsConfig, comm_ops: list[CommOp] | None = None, device: torch.device | None = None
) -> dict[str, QuantizedCommCodecs] | None:
    """What a sharder's `qcomm_codecs_registry` takes: codecs by name of the collective, by default of all three.

    None where both precisions are FP32. `device` makes no difference: every format runs on every device.
    """
    if {qcomms_config.forward_precision, qcomms_config.backward_precision} == {CommType.FP32}:
        return None
    codecs = get_qcomm_codecs(qcomms_config)
    return {op.name: codecs for op in (list(CommOp) if comm_ops is None else comm_ops)}


def codecs_of(
    registry: Mapping[str, QuantizedCommCodecs] | None, *, pooled: bool = True, device: torch.device | None = None
) -> tuple[Codec, Codec]:
    """The codecs of a collection's rows and of their gradients, from a sharder's registry.

    A pooled collection is told by the two pooled collectives, a sequence one by its own; without any of them values
    travel as fp32. A codec of one's own is tried on `device`, by default the CPU.

    Raises:
        ValueError: an unknown collective, a value that is no QuantizedCommCodecs, pooled collectives that differ
            (their rows travel together), or a codec of one's own that does not do what `QuantizedCommCodec` says.
    """
    for name, codecs in (registry or {}).items():
        if name not in CommOp.__members__:
            raise ValueError(
                f"qcomm_codecs_registry: unknown collective {name!r}, known are {list(CommOp.__members__)}"
            )
        if not (hasattr(codecs, "forward") and hasattr(codecs, "backward")):
            raise ValueError(f"qcomm_codecs_registry[{name!r}] must be a QuantizedCommCodecs, got {codecs!r}")
    of_pooled = [CommOp.POOLED_EMBEDDINGS_ALL_TO_ALL, CommOp.POOLED_EMBEDDINGS_REDUCE_SCATTER]
    ops = of_pooled if pooled else [CommOp.SEQUENCE_EMBEDDINGS_ALL_TO_ALL]
    given = [registry[op.name] for op in ops if registry and op.name in registry]
    pairs = [(_codec(codecs.forward, device), _codec(codecs.backward, device)) for codecs in given]
    if len({(_identity(forward), _identity(backward)) for forward, backward in pairs}) > 1:
        raise ValueError(
            f"qcomm_codecs_registry: the rows of all plans travel in one exchange, but {ops[0].name} has {pairs[0]} "
            f"and {ops[1].name} {pairs[1]}; give both the same"
        )
    return pairs[0] if pairs else (FormatCodec(FP32), FormatCodec(FP32))


def codec_pair(codecs: QuantizedCommCodecs, device: torch.device | None = None) -> tuple[Codec, Codec]:
    """The codecs of one collective: of its rows and of their gradients. Raises as `codecs_of`."""
    if not (hasattr(codecs, "forward") and hasattr(codecs, "backward")):
        raise ValueError(f"codecs must be a QuantizedCommCodecs, got {codecs!r}")
    # a codec of one's own is tried when it is made ready, so once
    key = id(codecs.forward), id(codecs.backward), str(device)
    if key not in _pairs:
        if len(_pairs) >= _MOST_PAIRS:
            _pairs.clear()
        # the codecs are kept too: their ids stay theirs
        _pairs[key] = codecs, (_codec(codecs.forward, device), _codec(codecs.backward, device))
    return _pairs[key][1]


def _codec(codec: QuantizedCommCodec[Any], device: torch.device | None) -> Codec:
    if isinstance(codec, FormatCommCodec):
        return codec.codec
    if isinstance(codec, NoOpQuantizedCommCodec):
        return FormatCodec(FP32)
    return UserCodec(codec, device)


def _identity(codec: Codec) -> object:
    # two codecs of a user's class may be set up differently
    return id(codec.codec) if isinstance(codec, UserCodec) else (codec.name, codec.output_dtype)


# lengths at which a codec is tried before it is trusted, in units of its row
_TRIED = (1, 2, 3, 5, 64)


class UserCodec(Codec):
    """Encodes block by block. Blocks are filled up with zeros where the codec takes whole rows only.

    Raises ValueError when it is made: the codec, tried on a few lengths on `device`, does not return what it announces.
    """

    def __init__(self, codec: Any, device: torch.device | None = None) -> None:
        self.codec = codec
        # one for all blocks: what FBGEMM's codecs note in it while encoding, they need for decoding
        self._context = codec.create_context() if hasattr(codec, "create_context") else None
        self.name = f"{type(codec).__module__}.{type(codec).__qualname__}"
        missing = []
        for name in ("encode", "decode", "calc_quantized_size", "quantized_dtype"):
            try:
                getattr(codec, name)
            except (AttributeError, NotImplementedError):
                # the latter from a property that the protocol declares
                missing.append(name)
        if missing:
            raise ValueError(f"codec {self.name} has no {', '.join(missing)}: see QuantizedCommCodec")
        # TorchRec's NoOp codec has it as a method
        dtype = codec.quantized_dtype() if callable(codec.quantized_dtype) else codec.quantized_dtype
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"codec {self.name}: quantized_dtype must be a torch.dtype, got {dtype!r}")
        self._dtype: torch.dtype = dtype
        self._row = 1
        self._find_row(device)
        # FBGEMM's formats are one class
        self.name += f"[{dtype}/{self._row}]"

    def encoded_bytes(self, elements: int) -> int:
        return -(-self._size(elements) * self._dtype.itemsize // 4) * 4 if elements else 0

    def encode_blocks(self, flat: Tensor, sizes: Sequence[int]) -> tuple[Tensor, list[int]]:
        check_block(flat, torch.float32, sum(sizes))
        pieces = [flat[:0].view(torch.uint8)]
        for block in torch.split(flat, [n for n in sizes if n]):
            values = torch.nn.functional.pad(block, (0, -block.shape[0] % self._row))
            data, size = self.codec.encode(values, self._context), self._size(block.shape[0])
            if not isinstance(data, Tensor) or data.dtype != self._dtype or data.shape != (size,):
                got = f"{data.dtype} of shape {list(data.shape)}" if isinstance(data, Tensor) else repr(data)
                raise ValueError(
                    f"codec {self.name} announced {self._dtype} of shape [{size}] for {values.shape[0]} values, "
                    f"encode returned {got}"
                )
            data = data.contiguous().view(torch.uint8)
            pieces.append(torch.nn.functional.pad(data, (0, -data.shape[0] % 4)))
        return torch.cat(pieces), [self.encoded_bytes(n) for n in sizes]

    def decode_blocks(self, data: Tensor, sizes: Sequence[int]) -> Tensor:
        bytes_per_block = [self.encoded_bytes(n) for n in sizes]
        check_block(data, torch.uint8, sum(bytes_per_block))
        pieces = [data.new_empty(0, dtype=torch.float32)]
        for n, block in zip(sizes, torch.split(data, bytes_per_block), strict=True):
            if n:
                used, whole = block[: self._size(n) * self._dtype.itemsize], n + -n % self._row
                values = self.codec.decode(used.view(self._dtype), self._context)
                if not isinstance(values, Tensor) or values.numel() != whole:
                    got = list(values.shape) if isinstance(values, Tensor) else repr(values)
                    raise ValueError(f"codec {self.name}: decode of {whole} values returned {got}")
                pieces.append(values.reshape(-1).to(torch.float32)[:n])
        return torch.cat(pieces)

    def overflows(self, flat: Tensor) -> Tensor:
        back = self.decode(self.encode(flat), flat.shape[0])
        return (flat.isfinite() & ~back.isfinite()).any()

    def _size(self, elements: int) -> int:
        """Elements of the codec's dtype for so many values, filled up to whole rows."""
        return int(self.codec.calc_quantized_size(elements + -elements % self._row, self._context))

    def _find_row(self, device: torch.device | None) -> None:
        """A row is 1, or how many values the context says belong together if the codec does not take any number."""
        failures: list[str] = []
        in_context = (getattr(self._context, name, 0) for name in ("row_dim", "mx_group_size"))
        for row in (1, *(row for row in in_context if isinstance(row, int) and row > 0)):
            self._row = row
            try:
                for n in _TRIED:
                    self.decode(self.encode(torch.zeros(n * row, device=device)), n * row)
                return
            except Exception as error:
                failures.append(f"with multiples of {row} values: {type(error).__name__}: {error}")
        raise ValueError(
            f"codec {self.name} cannot run in the exchange: it must take any number of values, or the multiples of "
            f"row_dim in its context. Tried " + "; ".join(failures)
        )
