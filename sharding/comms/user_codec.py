"""A user's own `QuantizedCommCodec` in the place of one of ours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .codecs import Codec, check_bytes, check_values

# lengths at which a codec is tried before it is trusted, in units of its row
_TRIED = (1, 2, 3, 5, 64)


class ForeignCodec(Codec):
    """Encodes block by block. Blocks are filled up with zeros where the codec takes whole rows only.

    Raises ValueError when it is made: the codec, tried on a few lengths on `device`, does not return what it announces.
    """

    def __init__(self, codec: Any, device: torch.device | None = None) -> None:
        self.codec = codec
        # one for all blocks: what FBGEMM's codecs note in it while encoding, they need for decoding
        self._context = codec.create_context() if hasattr(codec, "create_context") else None
        self.name = f"{type(codec).__module__}.{type(codec).__qualname__}"
        missing = [
            name for name in ("encode", "decode", "calc_quantized_size", "quantized_dtype") if not _offers(codec, name)
        ]
        if missing:
            raise ValueError(f"codec {self.name} has no {', '.join(missing)}: see QuantizedCommCodec")
        # TorchRec's NoOp codec has it as a method
        dtype = codec.quantized_dtype() if callable(codec.quantized_dtype) else codec.quantized_dtype
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"codec {self.name}: quantized_dtype must be a torch.dtype, got {dtype!r}")
        self._dtype: torch.dtype = dtype
        self._row = self._whole_row(device)
        # FBGEMM's formats are one class
        self.name += f"[{dtype}/{self._row}]"

    def encoded_bytes(self, elements: int) -> int:
        size = self._filled(elements)
        return -(-self._size(size) * self._dtype.itemsize // 4) * 4 if size else 0

    def encode_blocks(self, flat: Tensor, sizes: Sequence[int]) -> tuple[Tensor, list[int]]:
        check_values(flat, sum(sizes))
        pieces = [flat[:0].view(torch.uint8)]
        for block in torch.split(flat, list(sizes)):
            if block.shape[0]:
                data = self._encode(torch.nn.functional.pad(block, (0, -block.shape[0] % self._row)))
                pieces.append(torch.nn.functional.pad(data, (0, -data.shape[0] % 4)))
        return torch.cat(pieces), [self.encoded_bytes(n) for n in sizes]

    def decode_blocks(self, data: Tensor, sizes: Sequence[int]) -> Tensor:
        bytes_per_block = [self.encoded_bytes(n) for n in sizes]
        check_bytes(data, sum(bytes_per_block))
        values = [data.new_empty(0, dtype=torch.float32)]
        for n, block in zip(sizes, torch.split(data, bytes_per_block), strict=True):
            if n:
                size = self._filled(n)
                values.append(self._decode(block[: self._size(size) * self._dtype.itemsize], size)[:n])
        return torch.cat(values)

    def overflows(self, flat: Tensor) -> Tensor:
        back = self.decode(self.encode(flat), flat.shape[0])
        return (flat.isfinite() & ~back.isfinite()).any()

    def _filled(self, elements: int) -> int:
        return -(-elements // self._row) * self._row

    def _size(self, elements: int) -> int:
        return int(self.codec.calc_quantized_size(elements, self._context))

    def _encode(self, values: Tensor) -> Tensor:
        data = self.codec.encode(values, self._context)
        size = self._size(values.shape[0])
        if not isinstance(data, Tensor) or data.dtype != self._dtype or data.shape != (size,):
            got = f"{data.dtype} of shape {list(data.shape)}" if isinstance(data, Tensor) else repr(data)
            raise ValueError(
                f"codec {self.name} announced {self._dtype} of shape [{size}] for {values.shape[0]} values, "
                f"encode returned {got}"
            )
        return data.contiguous().view(torch.uint8)

    def _decode(self, data: Tensor, elements: int) -> Tensor:
        values = self.codec.decode(data.view(self._dtype), self._context)
        if not isinstance(values, Tensor) or values.numel() != elements:
            got = list(values.shape) if isinstance(values, Tensor) else repr(values)
            raise ValueError(f"codec {self.name}: decode of {elements} values returned {got}")
        return values.reshape(-1).to(torch.float32)

    def _whole_row(self, device: torch.device | None) -> int:
        """1, or how many values the context says belong together if the codec does not take any number."""
        rows = [1, *(getattr(self._context, name, 0) for name in ("row_dim", "mx_group_size"))]
        failures: list[str] = []
        for row in rows:
            if not isinstance(row, int) or row <= 0:
                continue
            try:
                for n in _TRIED:
                    self._decode(self._encode(torch.zeros(n * row, device=device)), n * row)
                return row
            except Exception as error:
                failures.append(f"with multiples of {row} values: {type(error).__name__}: {error}")
        raise ValueError(
            f"codec {self.name} cannot run in the exchange: it must take any number of values, or the multiples of "
            f"row_dim in its context. Tried " + "; ".join(failures)
        )


def _offers(codec: Any, name: str) -> bool:
    try:
        return hasattr(codec, name)
    except NotImplementedError:
        # a property that the protocol declares
        return False
