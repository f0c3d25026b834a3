"""The tables of an exported model with numpy alone: `read_tables(folder)["user"].rows(ids)`.

Row formats are those of kernels/row_formats.py: value = number * scale + bias, computed in fp32.
Shapes: payload [R, row_bytes] uint8, scales [R, parts], remapping [ids] int32; ids [N], offsets [B + 1].
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from safetensors import SafetensorError, safe_open

from .folder import TABLES, ModelDamaged, TableFacts, check_file, read_facts

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]


@dataclass(frozen=True, eq=False)
class Table:
    """A quantized table as arrays; `scales` and `remapping` are None where it has none."""

    facts: TableFacts
    payload: Bytes
    scales: NDArray[np.floating] | None
    remapping: NDArray[np.int32] | None

    def rows(self, ids: ArrayLike) -> Floats:
        """The row of each id, [N, dim]; zeros for an id whose row was pruned.

        Raises:
            TypeError: ids are not integers.
            IndexError: an id is outside the table; names table, place and id.
        """
        wanted = self._ids(ids)
        out = np.zeros((wanted.shape[0], self.facts.dim), np.float32)
        rows = wanted if self.remapping is None else self.remapping[wanted]  # [N], -1 where pruned
        there = rows >= 0
        out[there] = self._values(rows[there])
        return out

    def pooled(self, ids: ArrayLike, offsets: ArrayLike, weights: ArrayLike | None = None) -> Floats:
        """The rows of each bag of ids, added, or averaged where the table does that: [B, dim].

        Bag b is ids[offsets[b] : offsets[b + 1]]; an empty one is zeros. With `weights` [N] rows are scaled first.

        Raises:
            ValueError: the table does not pool, offsets do not go up from 0 to N, or there are not N weights.
            IndexError, TypeError: as `rows`.
        """
        if self.facts.pooling is None:
            raise ValueError(f"table {self.facts.name!r} keeps the rows of a sample apart: use rows(ids)")
        rows, ends = self.rows(ids), np.asarray(offsets)
        if ends.size and not np.issubdtype(ends.dtype, np.integer):
            raise TypeError(f"table {self.facts.name!r}: offsets must be integers, got {ends.dtype}")
        if ends.ndim != 1 or not len(ends) or ends[0] != 0 or ends[-1] != len(rows) or (np.diff(ends) < 0).any():
            raise ValueError(f"table {self.facts.name!r}: offsets must go up from 0 to the number of ids, {len(rows)}")
        if weights is not None:
            scale = np.asarray(weights, np.float32)
            if scale.shape != rows.shape[:1]:
                raise ValueError(f"table {self.facts.name!r}: {len(rows)} ids need as many weights, got {scale.shape}")
            rows = rows * scale[:, None]
        sizes = np.diff(ends)  # [B]
        sums = np.zeros((len(sizes), self.facts.dim), np.float32)  # [B, dim]
        np.add.at(sums, np.repeat(np.arange(len(sizes)), sizes), rows)
        if self.facts.pooling == "mean":
            sums /= np.maximum(sizes, 1).astype(np.float32)[:, None]
        return sums

    def _ids(self, ids: ArrayLike) -> NDArray[np.int64]:
        array = np.asarray(ids)
        if array.size == 0:
            return np.zeros(0, np.int64)
        if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
            raise TypeError(
                f"table {self.facts.name!r}: ids must be a list of integers, got {array.dtype}, {array.ndim}-D"
            )
        bad = np.flatnonzero((array < 0) | (array >= self.facts.ids))
        if bad.size:
            at = int(bad[0])
            raise IndexError(f"table {self.facts.name!r}, place {at}: id {array[at]} is outside [0, {self.facts.ids})")
        return array.astype(np.int64)

    def _values(self, rows: NDArray[np.integer]) -> Floats:
        numbers = _NUMBERS[self.facts.format](self.payload[rows])[:, : self.facts.dim]
        if self.scales is None:
            return numbers
        scales = self.scales[rows].astype(np.float32)  # [N, parts]
        values: Floats = numbers * scales[:, :1]
        if scales.shape[1] == 2:
            values += scales[:, 1:]
        return values


def read_tables(folder: str | os.PathLike[str], *, verify: bool = True) -> dict[str, Table]:
    """The tables of a model that `export_model` wrote, by name.

    Args:
        folder: where it is.
        verify: compare the checksum of the file first, for which it is read once more.

    Raises:
        FileNotFoundError: it is no exported model.
        ModelDamaged: a file is missing, cut off or changed, or of a later version; names it.
    """
    facts = read_facts(folder)
    path = check_file(folder, facts, TABLES, verify=verify)
    try:
        with safe_open(path, framework="numpy") as file:
            return {table.name: _table(file.get_tensor, table, str(path)) for table in facts.tables}
    except SafetensorError as error:
        raise ModelDamaged(f"{path}: {error}") from error


def _table(tensor: Callable[[str], NDArray[np.generic]], facts: TableFacts, path: str) -> Table:
    if facts.format not in _NUMBERS:
        raise ModelDamaged(f"{path}: table {facts.name!r} has rows of format {facts.format!r}, which is not known here")
    payload = tensor(facts.payload)
    scales = None if facts.scales is None else tensor(facts.scales)
    remapping = None if facts.remapping is None else tensor(facts.remapping)
    if payload.dtype != np.uint8 or payload.ndim != 2 or payload.shape[0] != facts.rows:
        raise ModelDamaged(f"{path}: {facts.payload} is not uint8 [{facts.rows}, bytes of a row]")
    for name, array, size in ((facts.scales, scales, facts.rows), (facts.remapping, remapping, facts.ids)):
        if array is not None and array.shape[0] != size:
            raise ModelDamaged(f"{path}: {name} has {array.shape[0]} rows, {size} are written down")
    return Table(facts, payload, scales, remapping)  # type: ignore[arg-type]


def _packed(bits: int) -> Callable[[Bytes], Floats]:
    """Numbers of fewer than 8 bits, the first column in the lowest bits of its byte."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)

    def numbers(payload: Bytes) -> Floats:
        codes = (payload[:, :, None] >> shifts) & np.uint8(2**bits - 1)  # [N, bytes, 8 / bits]
        return codes.reshape(payload.shape[0], payload.shape[1] * len(shifts)).astype(np.float32)

    return numbers


def _bf16(payload: Bytes) -> Floats:
    # the upper half of an fp32
    return (payload.view("<u2").astype(np.uint32) << 16).view(np.float32)


def _fp8(payload: Bytes) -> Floats:
    return _E4M3[payload]


def _e4m3() -> Floats:
    """The value of each byte: sign, 4 bits of exponent biased by 7, 3 of mantissa; all ones are no number."""
    byte = np.arange(256)
    exponent, mantissa = (byte >> 3) & 15, byte & 7
    value = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))
    value[(byte & 127) == 127] = np.nan
    return np.where(byte < 128, value, -value).astype(np.float32)


_E4M3 = _e4m3()
_NUMBERS: dict[str, Callable[[Bytes], Floats]] = {
    "int8": lambda payload: payload.astype(np.float32),
    "int4": _packed(4),
    "int2": _packed(2),
    "fp8": _fp8,
    "fp16": lambda payload: payload.view("<f2").astype(np.float32),
    "bf16": _bf16,
    "fp32": lambda payload: payload.view("<f4").astype(np.float32),
}
