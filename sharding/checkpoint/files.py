"""Files of tensors: written one block after another while they are hashed, read one block after another.

The format is that of safetensors (8 bytes: length of the header; a JSON header; the bytes of the tensors), which the
library reads. It writes only what is in memory as a whole, so writing is done here.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from shardwise.planner.layout import Span
from shardwise.sharding.engine.state import Box
from shardwise.untrusted import parse_json

from .errors import CheckpointDamaged
from .manifest import FileFacts, Manifest, Stored, dtype_name, sizes
from .places import Place
from .storage import Files, StoreError, files_in, storage_of

T = TypeVar("T")

# the most that is copied, read or hashed at a time
BLOCK_BYTES = 16 * 2**20
# that of the library
_MAX_HEADER = 100_000_000
_CODES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip


def write_tensors(path: Place, tensors: Sequence[tuple[Stored, Tensor]]) -> FileFacts:
    """Write a file of tensors, from any device, and see it onto the disk; its size and checksum.

    Raises:
        TypeError: a dtype has no name in the format.
        OSError: it cannot be written.
    """
    return write_streams(path, [(stored, [tensor]) for stored, tensor in tensors])


def write_streams(path: Place, tensors: Sequence[tuple[Stored, Iterable[Tensor]]]) -> FileFacts:
    """As `write_tensors`, of tensors that come in blocks of their rows. Raises as that does."""
    return write_named(path, [(stored.key, stored, blocks) for stored, blocks in tensors])


def write_named(
    path: Place, tensors: Sequence[tuple[str, Stored, Iterable[Tensor]]], *, replace: bool = False
) -> FileFacts:
    """As `write_streams`, under other names; with `replace` over a file that is there. Raises as that does."""
    header, at = {}, 0
    for name, stored, _ in tensors:
        if stored.dtype not in _CODES:
            raise TypeError(f"{name}: {dtype_name(stored.dtype)} cannot be saved, these can: {dtype_names()}")
        if name in header:
            raise ValueError(f"two tensors have the address {name}")
        end = at + math.prod(stored.shape) * stored.dtype.itemsize
        header[name] = {"dtype": _CODES[stored.dtype], "shape": list(stored.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    # tensors begin at a multiple of 8 bytes, as in the library
    text += b" " * (-len(text) % 8)
    checksum, size = hashlib.sha256(), 0
    storage = storage_of(path)
    with (storage.replace if replace else storage.create)(path, 8 + len(text) + at) as file:
        for block in (len(text).to_bytes(8, "little"), text):
            size += write_all(file, block)
            checksum.update(block)
        for _, _, tensors_of in tensors:
            for tensor in tensors_of:
                for bytes_of_block in blocks_of(tensor):
                    size += write_all(file, bytes_of_block)
                    checksum.update(bytes_of_block)
    assert size == 8 + len(text) + at
    return FileFacts(path.name, size, checksum.hexdigest())


def write_all(file: Any, data: Any) -> int:
    """Write all of `data` to an unbuffered file, which may take it in parts; its size."""
    view = memoryview(data).cast("B")
    at = 0
    while at < len(view):
        at += file.write(view[at:])
    return at


def dtype_names() -> list[str]:
    """The dtypes that a file can hold."""
    return [dtype_name(dtype) for dtype in _CODES]


def blocks_of(tensor: Tensor) -> Iterator[Any]:
    """A tensor's bytes in order, at most `BLOCK_BYTES` of them at a time (or one row)."""
    if not tensor.numel():
        return
    flat = tensor.detach().reshape(1) if tensor.dim() == 0 else tensor.detach()
    row = flat[0].numel() * flat.element_size()
    for low, high in row_blocks((0, flat.shape[0]), row):
        # a column block of a larger table is copied here, and what is on a GPU
        block = flat[low:high].cpu().contiguous()
        size = block.numel() * block.element_size()
        yield (ctypes.c_char * size).from_address(block.data_ptr())


def row_blocks(rows: Span, row_bytes: int) -> Iterator[Span]:
    """`rows` in pieces of at most `BLOCK_BYTES`, or of one row."""
    step = max(1, BLOCK_BYTES // max(1, row_bytes))
    for low in range(rows[0], rows[1], step):
        yield low, min(low + step, rows[1])


class TensorFiles:
    """The files of a checkpoint, opened as they are needed, each checked against the manifest before."""

    def __init__(self, path: Place | Files, manifest: Manifest) -> None:
        self._files, self._manifest = files_in(path), manifest
        self._facts = {facts.name: facts for facts in manifest.files}
        self._open: dict[str, _Mapped | _Ranges] = {}

    def blocks(self, stored: Stored, box: Box) -> Iterator[tuple[Box, Tensor]]:
        """The cells of `box` (of the tensor itself) with their place in it, at most `BLOCK_BYTES` at a time."""
        if not box:
            yield box, self._file(stored.file).whole(stored)
            return
        row_bytes = math.prod(high - low for low, high in box[1:]) * stored.dtype.itemsize
        for rows in row_blocks(box[0], row_bytes):
            part = (rows, *box[1:])
            yield part, self.read(stored, part)

    def read(self, stored: Stored, box: Box) -> Tensor:
        """The cells of one box."""
        return self._file(stored.file).read(stored, box)

    def _file(self, name: str) -> _Mapped | _Ranges:
        if name not in self._open:
            begins = check_header(self._files, self._facts[name], self._manifest.by_file[name])
            mapped = self._files.map(name)
            self._open[name] = _Ranges(self._files, name, begins) if mapped is None else _Mapped(mapped)
        return self._open[name]

    def close(self) -> None:
        """Let the files go."""
        self._open.clear()


class _Mapped:
    """A file of this machine, in memory as far as it is read."""

    def __init__(self, mapped: Any) -> None:
        self._mapped = mapped

    def whole(self, stored: Stored) -> Tensor:
        """A tensor."""
        return self._mapped.get_tensor(stored.key)  # type: ignore[no-any-return]

    def read(self, stored: Stored, box: Box) -> Tensor:
        """The cells of one box."""
        return self._mapped.get_slice(stored.key)[tuple(slice(*span) for span in box)]  # type: ignore[no-any-return]


class _Ranges:
    """A file that is read by ranges: those of the rows that are wanted, and of them all columns."""

    def __init__(self, files: Files, name: str, begins: Mapping[str, int]) -> None:
        self._files, self._name, self._begins = files, name, begins

    def whole(self, stored: Stored) -> Tensor:
        """A tensor."""
        return self._flat(stored, 0, math.prod(stored.shape)).view(stored.shape)

    def read(self, stored: Stored, box: Box) -> Tensor:
        """The cells of one box; of its rows as many at a time as make a block."""
        below, width = stored.shape[1:], math.prod(stored.shape[1:])
        cells = torch.empty([high - low for low, high in box], dtype=stored.dtype, device="cpu")
        inside = tuple(slice(*span) for span in box[1:])
        for low, high in row_blocks(box[0], width * stored.dtype.itemsize):
            rows = self._flat(stored, low * width, high * width).view(high - low, *below)
            cells[low - box[0][0] : high - box[0][0]] = rows[(slice(None), *inside)]
        return cells

    def _flat(self, stored: Stored, begin: int, end: int) -> Tensor:
        size, at = stored.dtype.itemsize, self._begins[stored.key]
        if begin == end:
            return torch.empty(0, dtype=stored.dtype, device="cpu")
        data = bytearray(self._files.range(self._name, at + begin * size, at + end * size))
        return torch.frombuffer(data, dtype=torch.uint8).view(stored.dtype)


def check_header(path: Place | Files, facts: FileFacts, tensors: Sequence[Stored]) -> dict[str, int]:
    """Check that a file is regular, has its size, and that its header says what the manifest says. Reads no tensor.

    Where each tensor begins in the file, by its key.

    Raises:
        CheckpointDamaged: it does not; names the file.
    """
    files = files_in(path)
    file = files.path / facts.name
    check_size(files, facts)
    with _or_damaged(files, facts.name, files.open) as opened:
        length = int.from_bytes(opened.read(8), "little")
        if facts.bytes < 8 or length > min(facts.bytes - 8, _MAX_HEADER):
            raise CheckpointDamaged(f"{file}: its header would be {length} bytes long, the file has {facts.bytes}")
        text = opened.read(length)
    try:
        header = parse_json(text)
        header.pop("__metadata__", None)
        entries = {
            key: (entry["dtype"], sizes(entry["shape"]), sizes(entry["data_offsets"])) for key, entry in header.items()
        }
    except (ValueError, KeyError, TypeError, RecursionError, AttributeError) as error:
        raise CheckpointDamaged(f"{file}: its header is no safetensors header: {error}") from error
    if set(entries) != {tensor.key for tensor in tensors}:
        strange = sorted({tensor.key for tensor in tensors} ^ set(entries))[:3]
        raise CheckpointDamaged(f"{file}: its header and the manifest list other tensors: {strange} and so on")
    spans = []
    for tensor in tensors:
        code, shape, offsets = entries[tensor.key]
        size = math.prod(tensor.shape) * tensor.dtype.itemsize
        if (
            (code, shape) != (_CODES.get(tensor.dtype), tensor.shape)
            or len(offsets) != 2
            or offsets[1] - offsets[0] != size
        ):
            raise CheckpointDamaged(
                f"{file}: {tensor.key} is {code} {list(shape)} at bytes {list(offsets)}, the manifest says"
                f" {dtype_name(tensor.dtype)} {list(tensor.shape)}"
            )
        spans.append(offsets)
    at = 0
    for low, high in sorted(spans):
        if low != at:
            raise CheckpointDamaged(f"{file}: tensors overlap or leave bytes out at byte {min(low, at)}")
        at = high
    if 8 + length + at != facts.bytes:
        raise CheckpointDamaged(f"{file}: its tensors need {8 + length + at} bytes, the file has {facts.bytes}")
    return {tensor.key: 8 + length + low for tensor, (low, _) in zip(tensors, spans, strict=True)}


def _or_damaged(files: Files, name: str, ask: Callable[[str], T]) -> T:
    """CheckpointDamaged where it is no regular file, or cannot be read; not where a store cannot be asked."""
    try:
        return ask(name)
    except StoreError:
        raise
    except OSError as error:
        raise CheckpointDamaged(f"{files.path / name}: {error.strerror or error}") from error


def check_size(path: Place | Files, facts: FileFacts) -> None:
    """Check that a file is a regular one and has its size.

    Raises:
        CheckpointDamaged: it does not; names the file.
    """
    files = files_in(path)
    size = _or_damaged(files, facts.name, files.size)
    if size != facts.bytes:
        raise CheckpointDamaged(f"{files.path / facts.name} has {size} bytes, it was saved with {facts.bytes}")


def check_checksum(path: Place | Files, facts: FileFacts) -> None:
    """Check that a file has the bytes that were written.

    Raises:
        CheckpointDamaged: it has others; names the file.
    """
    files = files_in(path)
    check_size(files, facts)
    checksum = hashlib.sha256()
    with _or_damaged(files, facts.name, files.open) as opened:
        while block := opened.read(BLOCK_BYTES):
            checksum.update(block)
    if checksum.hexdigest() != facts.sha256:
        file = files.path / facts.name
        raise CheckpointDamaged(f"{file} has other bytes than were saved: sha256 {checksum.hexdigest()}")
