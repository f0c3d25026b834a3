"""Tuned configs: looked up at launches and by the CPU path, where none is known the heuristic stays. Pure data.

Files are JSON that `shardwise kernels autotune` writes, one for each device: those in kernels/tuned/, those that
SHARDWISE_TUNED names, those given to `use_configs`. An entry is found by kernel, dtype, class of D (the power of two
that D fits in), class of the mean length of bags (as well) and the version of Triton: first of this device, then of
another of its architecture; first of the same length, then of the nearest, at most 4 times longer or shorter.
No config changes a bit of a result: a tile that would deal the columns of a row out anew is not taken.
"""

from __future__ import annotations

import platform
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from shardwise.untrusted import parse_json, read_regular

from . import _op
from ._op import next_power_of_2

FORMAT = 1
FOLDER = Path(__file__).resolve().parent / "tuned"
INTERPRETER = "interpreter"
DTYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}

Tile = tuple[int, int, int]
Config = Mapping[str, int]

# smallest and largest value of what a config of a kernel may say; all of them powers of two
LIMITS = {
    "rows": (1, 64), "columns": (1, 4096), "warps": (1, 16), "chunks": (1, 16), "programs": (64, 1 << 16),
}  # fmt: skip
_TILE = ("rows", "columns", "warps")
# kernel -> what its configs say; the kernel of an update is "update " and the rule
FIELDS: dict[str, tuple[str, ...]] = {
    "pooled_lookup": _TILE,
    "gather": _TILE,
    "quantized_pooled_lookup": _TILE,
    "gather_values": _TILE,
    "segment_rows": _TILE,
    "index_add": _TILE,
    "to_padded": _TILE,
    "to_jagged": _TILE,
    "update": ("chunks", "programs"),
}
# setting of the CPU path -> smallest and largest value
CPU_LIMITS = {
    "lookup_block_elements": (1 << 10, 1 << 28),
    "lookup_few_ids": (0, 1 << 24),
    "lookup_short": (0, 1 << 10),
    "lookup_alone": (0, 1 << 30),
    "check_alone_ids": (0, 1 << 30),
    "update_block_elements": (1 << 10, 1 << 28),
    "update_alone": (0, 1 << 30),
    "update_elements_an_id": (1, 1 << 10),
    "update_tasks": (1, 1 << 10),
    "update_long": (1 << 6, 1 << 30),
}


@dataclass(frozen=True)
class Key:
    """The launches that an entry is for: `dim` and `length` are classes, `dtype` is also a format of quantized rows."""

    kernel: str
    dtype: str
    dim: int
    length: int
    triton: str

    def __str__(self) -> str:
        return f"{self.kernel} {self.dtype} D={self.dim} L={self.length}"


@dataclass(frozen=True)
class Tuned:
    """A file's configs for one device. `cpu` is by setting and by the number of threads that it was tuned for."""

    device: str
    architecture: str
    entries: Mapping[Key, Config] = field(default_factory=dict)
    cpu: Mapping[tuple[str, int], int] = field(default_factory=dict)


S = TypeVar("S", bool, int, tuple[int, int])
Setting = bool | int | tuple[int, int]
# What an A/B on a device may force on launches (`variant`), and the type of its value. None of them changes a bit of
# a result. Registers are those of a thread at most, 0 without a bound; a tile is chunks and warps of an update program;
# waves are the programs of its grid over those that the device holds at once, 0 where these do not decide.
SETTINGS: dict[str, type] = {
    "lookup.registers": int,
    "lookup.long_bags_first": bool,
    "update.registers": int,
    "update.prefetch": bool,
    "update.next_entries": bool,
    "update.contiguous": bool,
    "update.programs": int,
    "update.waves": int,
    "update.tile": tuple,
    "index.block": int,
    "index.warps": int,
    "index.in_forward": bool,
}

# paths given to use_configs; what the tuner and the checks of candidates put in place of all files
_given: tuple[Path, ...] = ()
_forced: Mapping[str, Config] = {}
_forced_cpu: Mapping[str, int] = {}
_variant: Mapping[str, Setting] = {}
# settings that launches asked for since the last `variant` began: what nobody asks for, nothing is forced by
_read: set[str] = set()
_asked: dict[str, int] | None = None
# functions to call where what is forced, or the files, change
_forgets: list[Callable[[], None]] = []


def use_configs(*paths: str | Path) -> None:
    """Look in these files first, and in the files of these folders, from now on; without any, no longer in any.

    Raises:
        FileNotFoundError: a path is not there. What is no good in a file is warned of at the first lookup.
    """
    global _given
    given = tuple(Path(path) for path in paths)
    for path in given:
        if not path.exists():
            raise FileNotFoundError(f"no file or folder of tuned configs at {path}")
    _given = given
    forget()


def forget() -> None:
    """Read the files again at the next lookup."""
    _files.cache_clear()
    _forget_found()


def _forget_found() -> None:
    for forget_what in _forgets:
        forget_what()


def forgotten(forget: Callable[[], None]) -> None:
    """Call `forget` wherever what tiles and settings follow from changes, as the `cache_clear` of a cached plan."""
    _forgets.append(forget)


@contextmanager
def forced(configs: Mapping[str, Config] | None = None, cpu: Mapping[str, int] | None = None) -> Iterator[None]:
    """In the context kernels have these configs ({}: the heuristic's), settings of the CPU path these values."""
    global _forced, _forced_cpu
    before = _forced, _forced_cpu
    _forced, _forced_cpu = {**_forced, **(configs or {})}, {**_forced_cpu, **(cpu or {})}
    _forget_found()
    try:
        yield
    finally:
        _forced, _forced_cpu = before
        _forget_found()


@contextmanager
def variant(settings: Mapping[str, Setting]) -> Iterator[None]:
    """In the context launches have these settings (`SETTINGS`) in place of their own; contexts inside add to it.

    Raises:
        ValueError: a name is unknown, or a value is of another type.
    """
    global _variant
    for name, value in settings.items():
        if name not in SETTINGS:
            raise ValueError(f"unknown setting {name!r}: expected one of {', '.join(SETTINGS)}")
        if type(value) is not SETTINGS[name]:
            raise ValueError(f"setting {name!r} must be a {SETTINGS[name].__name__}, got {value!r}")
    before, _variant = _variant, {**_variant, **settings}
    _read.clear()
    _forget_found()
    try:
        yield
    finally:
        _variant = before
        _forget_found()


def setting(name: str, usual: S) -> S:
    """A launch's setting: the `variant`'s, or the usual one where it has none."""
    _read.add(name)
    value: Any = _variant.get(name, usual)
    return cast(S, value)


def settings_read() -> frozenset[str]:
    """Settings that launches asked for since the last `variant` began."""
    return frozenset(_read)


def length_class(ids: int, bags: int) -> int:
    """The power of two that the mean length of bags fits in; no device is asked."""
    return next_power_of_2(-(-ids // max(bags, 1)))


def tile(kernel: str, heuristic: Tile, dtype: torch.dtype | str, width: int, length: int, device: torch.device) -> Tile:
    """Rows, columns and warps of a tile of rows that move by whole vectors: tuned ones for their class, if known."""
    config = _found(kernel, dtype, width, length, device)
    return heuristic if not config else (config["rows"], config["columns"], config["warps"])


def gather_tile(kernel: str, rows: Tensor, dim: int, align: int, length: int = 1) -> Tile:
    """Tuned, or of the heuristic of that name: the tile of a kernel that reads rows of this dim out of `rows`."""
    return _gather_tile(kernel, rows.dtype, dim, align, length, rows.device)


@lru_cache(maxsize=4096)
def _gather_tile(kernel: str, dtype: torch.dtype, dim: int, align: int, length: int, device: torch.device) -> Tile:
    heuristic, width = _op.gather_tile(dim, dtype.itemsize, align), next_power_of_2(dim)
    return (
        tile(kernel, heuristic, dtype, width, length, device)
        if align == min(width, 16 // dtype.itemsize)
        else heuristic
    )


def update_tile(
    rule: str, heuristic: Tile, programs: int, dtype: torch.dtype, align: int, device: torch.device
) -> tuple[int, int, int, int]:
    """Chunks, columns, warps and programs at most of an update; `align` is what elements its rows are aligned to.

    Entries of updates are of length 1: how long bags are says nothing of how often rows are hit.

    Chunks and warps change together and a row stays with as many warps as it had, so its columns are added in the
    order in which the heuristic's tile adds them.
    """
    (chunks, columns, warps), programs = _tuned_update(rule, heuristic, programs, dtype, align, device)
    chunks, warps = setting("update.tile", (chunks, warps))
    return chunks, columns, warps, setting("update.programs", programs)


def _tuned_update(
    rule: str, heuristic: Tile, programs: int, dtype: torch.dtype, align: int, device: torch.device
) -> tuple[Tile, int]:
    chunks, columns, warps = heuristic
    config = _found(f"update {rule}", dtype, columns, 1, device)
    if not config:
        return heuristic, programs
    wanted = config.get("chunks", chunks)
    scaled = warps * wanted // chunks
    # what tests of compiled layouts hold to: each warp of both tiles has a row's columns, four at most to a thread
    fits = scaled * chunks == warps * wanted and 0 < scaled <= 16 and columns <= 32 * align * min(warps, scaled)
    tuned = (wanted, columns, scaled) if fits else heuristic
    return tuned, config.get("programs", programs)


def cpu(setting: str, heuristic: int) -> int:
    """A setting of the CPU path: tuned for this CPU and number of threads, if known."""
    if _asked is not None:
        _asked[setting] = heuristic
    return _cpu_settings(torch.get_num_threads()).get(setting, heuristic)


@contextmanager
def asked() -> Iterator[dict[str, int]]:
    """Settings of the CPU path that calls in the context look up, and their heuristics' values."""
    global _asked
    settings: dict[str, int] = {}
    _asked = settings
    try:
        yield settings
    finally:
        _asked = None


@lru_cache(maxsize=4096)
def _found(kernel: str, dtype: torch.dtype | str, width: int, length: int, device: torch.device) -> Config | None:
    if kernel in _forced:
        return _forced[kernel]
    if not (files := _files()):
        return None
    name, architecture = identity(device)
    version = triton_version()
    best: tuple[tuple[int, int, int], Config] | None = None
    for order, file in enumerate(files):
        if file.architecture != architecture:
            continue
        for key, config in file.entries.items():
            same = (key.kernel, key.dtype, key.dim, key.triton) == (kernel, dtype_name(dtype), width, version)
            apart = abs(key.length.bit_length() - length.bit_length())
            if same and apart <= 2:
                rank = (int(file.device != name), apart, order)
                if best is None or rank < best[0]:
                    best = rank, config
    return None if best is None else best[1]


@lru_cache(maxsize=64)
def _cpu_settings(threads: int) -> Mapping[str, int]:
    tuned: dict[str, int] = {}
    files = [file for file in _files() if file.cpu]
    name = cpu_name() if files else ""
    for file in reversed(files):
        if file.device == name:
            tuned.update({setting: value for (setting, n), value in file.cpu.items() if n == threads})
    return {**tuned, **_forced_cpu}


@cache
def identity(device: torch.device) -> tuple[str, str]:
    """Name and architecture of the device whose kernels run on tensors there."""
    if device.type != "cuda":
        return (INTERPRETER, INTERPRETER) if _op.INTERPRETED else (cpu_name(), "cpu")
    properties: Any = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return properties.name, properties.gcnArchName.split(":")[0]
    return properties.name, f"sm_{properties.major}{properties.minor}"


@cache
def cpu_name() -> str:
    """The model of this CPU as it says itself, or the name of its architecture."""
    try:
        match = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        match = None
    return match[1].strip() if match else platform.processor() or platform.machine() or "cpu"


def slug(name: str) -> str:
    """A device's name as the name of a file: "NVIDIA H200" is nvidia_h200."""
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_") or "device"


def triton_version() -> str:
    """The version of Triton, "" without it."""
    return str(getattr(_op.triton, "__version__", None) or "")


def dtype_name(dtype: torch.dtype | str) -> str:
    """As entries name it."""
    return dtype if isinstance(dtype, str) else DTYPES.get(dtype, str(dtype).removeprefix("torch."))


@cache
def _files() -> tuple[Tuned, ...]:
    """Every readable file: those given, those of the environment, those that come with shardwise."""
    named = [*_given, *([Path(_op.TUNED)] if _op.TUNED else [])]
    if missing := [path for path in named if not path.exists()]:
        warnings.warn(f"shardwise: no tuned configs at {missing[0]}, the heuristics serve", stacklevel=2)
    paths = [file for path in (*named, FOLDER) for file in _listed(path)]
    tuned = []
    for path in dict.fromkeys(paths):
        try:
            tuned.append(read(path))
        except (OSError, ValueError, RecursionError) as error:
            warnings.warn(f"shardwise: the tuned configs of {path} are not used: {error}", stacklevel=2)
    return tuple(tuned)


def _listed(path: Path) -> list[Path]:
    return sorted(path.glob("*.json")) if path.is_dir() else [path] if path.exists() else []


def read(path: Path) -> Tuned:
    """A file's content, checked.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no file of tuned configs, or an entry is out of bounds; the message says which.
    """
    try:
        content = parse_json(read_regular(path))
    except ValueError as error:
        raise ValueError(f"no JSON: {error}") from error
    if not isinstance(content, dict) or content.get("shardwise_tuned") != FORMAT:
        raise ValueError(f"no file of tuned configs of format {FORMAT}")
    if unknown := set(content) - {"shardwise_tuned", "device", "architecture", "entries", "cpu"}:
        raise ValueError(f"unknown field {sorted(unknown)[0]!r}")
    device, architecture = (_text(content, name) for name in ("device", "architecture"))
    entries = dict(_entry(entry) for entry in _list(content, "entries"))
    return Tuned(device, architecture, entries, dict(_cpu_entry(entry) for entry in _list(content, "cpu")))


def _list(content: Mapping[str, Any], name: str) -> Sequence[Mapping[str, Any]]:
    entries = content.get(name, [])
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ValueError(f"{name} must be a list of objects")
    return entries


def _text(content: Mapping[str, Any], name: str) -> str:
    text = content.get(name)
    if not isinstance(text, str):
        raise ValueError(f"{name} must be text, got {text!r}")
    return text


def _whole(content: Mapping[str, Any], name: str, low: int, high: int, power: bool = True) -> int:
    value = content.get(name)
    if type(value) is not int or not low <= value <= high or (power and value & (value - 1)):
        kind = "a power of two" if power else "a whole number"
        raise ValueError(f"{name} must be {kind} from {low} to {high}, got {value!r}")
    return value


def _entry(entry: Mapping[str, Any]) -> tuple[Key, Config]:
    kernel, config = _text(entry, "kernel"), entry.get("config")
    fields = FIELDS.get("update" if kernel.startswith("update ") else kernel)
    if fields is None or kernel == "update":
        raise ValueError(f"unknown kernel {kernel!r}")
    if not isinstance(config, dict):
        raise ValueError(f"config of {kernel!r} must be an object, got {config!r}")
    # an empty config stands for the heuristic; a tile is whole
    if not set(config) <= set(fields) or (config and fields is _TILE and set(config) != set(fields)):
        raise ValueError(f"config of {kernel!r} must have {', '.join(fields)}, got {', '.join(config)}")
    key = Key(
        kernel, _text(entry, "dtype"), _whole(entry, "dim", 1, 1 << 20), _whole(entry, "length", 1, 1 << 30),
        _text(entry, "triton"),
    )  # fmt: skip
    return key, {name: _whole(config, name, *LIMITS[name]) for name in config}


def _cpu_entry(entry: Mapping[str, Any]) -> tuple[tuple[str, int], int]:
    setting = _text(entry, "setting")
    if setting not in CPU_LIMITS:
        raise ValueError(f"unknown setting {setting!r}")
    threads = _whole(entry, "threads", 1, 1 << 12, power=False)
    return (setting, threads), _whole(entry, "value", *CPU_LIMITS[setting], power=False)


for _cache in (_found, _gather_tile, _cpu_settings):
    forgotten(_cache.cache_clear)
