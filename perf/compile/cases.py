"""Cases for the compiler, of every launch: noted from the launches themselves, on small CPU tensors.

The ops run with their kernels replaced by a note of the arguments, so a case holds what Triton would see at that
launch: argument types, which of them are multiples of 16 or the constant 1, constexprs and warps. Nothing is compiled.
Letters of a case's name: D columns of its table; "fp16 and bf16" are table and output (or gradient of the output).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from ...kernels import configs
from ...kernels._op import load_kernels
from ...kernels.features import (
    Feature,
    Segment,
    flatten_segments,
    pack_features,
)
from ...kernels.lookup import (
    bounds,
    finite,
    pooled,
    sequence,
    weight_gradient,
)
from ...kernels.rule import RULES
from ...kernels.update import (
    index_op,
    row_chunks,
    row_keys,
    update,
)
from ...kernels.update.rules import BUILT_IN
from ..tune.candidates import RULES as MAIN_RULES
from . import cases_jagged as launched_jagged, cases_quantized as launched_quantized, cases_served as launched_served

_OWN = (bounds, finite, index_op, pooled, row_chunks, row_keys, sequence, update, weight_gradient)
_MODULES = (*_OWN, *launched_jagged.MODULES, *launched_quantized.MODULES, *launched_served.MODULES)
_TYPES = {
    torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.int32: "i32", torch.int64: "i64",
    torch.float64: "fp64", torch.int16: "i16", torch.uint8: "u8", torch.int8: "i8",
}  # fmt: skip
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_HALVES = (torch.float16, torch.bfloat16)

# every power-of-two class, rows on 16 bytes and not
DIMS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 20, 32, 40, 48, 64, 128, 200, 256, 512, 1023, 1024, 2048, 4096)
FEW_DIMS = (1, 3, 4, 20, 64, 128, 1023, 4096)
# MAIN_RULES differ in what they keep: nothing, a number a row, elements; the others run at FEW_DIMS
# rules at every setting: with lamb, which adds over a row twice
SET_RULES = (*MAIN_RULES, "lamb")


@dataclass(frozen=True)
class Case:
    """One kernel as a launch asks for it.

    `types` has a type for each argument that is no constant, a tuple of types for a tuple. `aligned` names those that
    are multiples of 16: (argument,) or (argument, place in the tuple). `rows` describes the rows that the kernel reads:
    cases of equal `rows` must add up the columns of a row in the same order. In a `small` case all memory lies within
    2 GB, which AMD's compiler uses. `registers` of a thread is what NVIDIA's compiler is told to keep to; a case that
    `fuses` may round a product and a sum at once.
    """

    name: str
    kernel: Any
    types: dict[str, Any]
    constants: dict[str, Any]
    aligned: tuple[tuple[str | int, ...], ...]
    num_warps: int
    registers: int | None = None
    fuses: bool = True
    rows: str = ""
    small: bool = False

    @property
    def kernel_name(self) -> str:
        """The kernel's function, without what all of them are called."""
        return self.name.split()[0]


@dataclass(frozen=True)
class Batch:
    """A table of `dim` columns and a batch for it, perhaps `beside` another table; what is not usual is in its name."""

    dim: int = 128
    dtype: torch.dtype = torch.float32
    other: torch.dtype = torch.float32  # of the output or of its gradient
    beside: int = 0  # columns of a table and a feature before this one
    features: int = 1  # on this table
    weighted: bool = False
    shifted: bool = False  # the table does not begin on 16 bytes
    ids: torch.dtype = torch.int64
    offsets: torch.dtype = torch.int64
    samples: int = 8
    rows: int = 4

    def __str__(self) -> str:
        words = [f"D={self.dim} {_TYPES[self.dtype]}"]
        words += [f"and {_TYPES[self.other]}"] * (self.other != torch.float32)
        words += [f"beside D={self.beside}"] * bool(self.beside)
        words += [f"{self.features} features"] * (self.features != 1)
        words += ["weighted"] * self.weighted + ["shifted"] * self.shifted
        words += [f"{_TYPES[self.ids]} ids"] * (self.ids != torch.int64)
        words += [f"{_TYPES[self.offsets]} offsets"] * (self.offsets != torch.int64)
        words += [f"{self.samples} samples"] * (self.samples != 8) + [f"{self.rows} rows"] * (self.rows != 4)
        return " ".join(words)

    @property
    def dims(self) -> list[int]:
        return [self.beside] * bool(self.beside) + [self.dim] * self.features

    def tables(self) -> tuple[Tensor, Tensor, list[int]]:
        """The flat buffer, the features and the segments; tables begin on 16 bytes unless shifted."""
        base, features, segments = 0, [], []
        for t, dim in enumerate(dict.fromkeys(self.dims)):
            count = self.features if dim == self.dim else 1
            features += [Feature(base, self.rows, dim, t * self.rows)] * count
            segments.append(Segment(dim, t * self.rows, (t + 1) * self.rows, base))
            # a launch reads no table: one that would not fit is as good
            base += (min(self.rows, 4) * dim + 7) // 8 * 8
        buffer = torch.zeros(base + 1, dtype=self.dtype)
        return buffer[1:] if self.shifted else buffer[:-1], pack_features(features), flatten_segments(segments)

    def bags(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Ids, offsets and per-id weights: one id a bag."""
        n = len(self.dims) * self.samples
        weights = torch.ones(n) if self.weighted else None
        return torch.zeros(n, dtype=self.ids), torch.arange(n + 1, dtype=self.offsets), weights

    def gradient(self) -> Tensor:
        return torch.zeros(self.samples, sum(self.dims), dtype=self.other)


def look_up(batch: Batch) -> None:
    weights, features, segments = batch.tables()
    ids, offsets, per_id = batch.bags()
    pooled.pooled_lookup(weights, ids, offsets, per_id, features, batch.dims, segments, "sum", batch.other)


def look_up_sequence(batch: Batch) -> None:
    weights, features, segments = batch.tables()
    ids, offsets, _ = batch.bags()
    sequence.sequence_lookup(weights, ids, offsets, features, batch.dim, segments, batch.other)


def weight_gradients(batch: Batch) -> None:
    weights, features, _ = batch.tables()
    ids, offsets, _ = batch.bags()
    weight_gradient.per_id_weight_gradient(batch.gradient(), weights, ids, offsets, features, batch.dims)


def check(batch: Batch, padded: bool = False, masks: bool = False, fatal: bool = True) -> None:
    _, features, _ = batch.tables()
    ids, offsets, _ = batch.bags()
    guard, names = bounds.new_guard(), ["f"] * len(batch.dims)
    step_guard = bounds.new_guard() if masks else None
    bounds.check_ids(ids, offsets, features, guard, names=names, fatal=fatal, padded=padded, step_guard=step_guard)
    finite.check_gradient(batch.gradient(), guard)


def step(
    batch: Batch,
    rule: str,
    decay: str = "none",
    rounding: bool = False,
    scale: int = 1,
    pooling: str = "sum",
    ahead: bool = False,
    forced: Mapping[str, configs.Setting] | None = None,
) -> None:
    """An optimizer step, with a tile `scale` times the usual, an index made `ahead`, or settings of a variant."""
    weights, features, segments = batch.tables()
    ids, offsets, per_id = batch.bags()
    chosen = RULES[rule]
    rows = 2 * min(batch.rows, 4)
    states = [torch.zeros(rows if kind == "row" else len(weights)) for kind in chosen.kinds]
    index: list[Tensor] = []
    if ahead:
        index = index_op.update_index(ids, offsets, per_id, features, batch.dims, segments, pooling, hashed=rounding)
    tile = partial(update.update_tile, scale=scale)
    with patch.object(update, "update_tile", tile), configs.variant(forced or {}):
        update.fused_update(
            weights, states, torch.zeros(1, dtype=torch.int64), batch.gradient(), ids, offsets, per_id, features,
            batch.dims, segments, rule, torch.full((len(chosen.hyper) + 1,), 0.5, dtype=torch.float64),
            bounds.new_guard(), pooling, decay, None, torch.zeros(1, dtype=torch.int64) if rounding else None,
            index=index,
        )  # fmt: skip


def cases() -> list[Case]:
    """Every kernel at the configurations that launches choose, each once."""
    all_cases: list[Case] = []
    for run, label, rows in _launches():
        for case in launches(run, label, rows):
            # functions of rules and kernels compare by identity
            if not any(case.kernel is old.kernel and case == replace(old, name=case.name) for old in all_cases):
                all_cases.append(case)
    small = [
        case for case in all_cases if case.name.split(" ", 1)[1].endswith(("D=3 fp32", "D=128 fp32", "D=128 fp16"))
    ]
    return all_cases + [replace(case, name=f"{case.name} small", small=True) for case in small]


def launches(run: Callable[[], object], label: str, rows: str = "") -> list[Case]:
    """Cases of what `run` launches, the last launch of each kernel: tables beside the one meant come before it."""
    with _noted() as noted:
        run()
    # the index of an update is made without a look at rows
    of_index = {name for module in (row_chunks, row_keys) for name, _ in kernels_of(module)}
    of_rows = {name: f"{name} {rows}" for name in noted if rows and name not in of_index}
    return [
        _case(f"{name} {label}", kernel, args, kwargs, of_rows.get(name, ""))
        for name, (kernel, args, kwargs) in noted.items()
    ]


def _launches() -> Iterator[tuple[Callable[[], object], str, str]]:
    """Runs, their labels, and what rows they read where the order of a sum over a row is promised."""
    usual = [Batch(dim) for dim in DIMS]
    halves = [Batch(dim, torch.bfloat16) for dim in (1, 3, 4, 5, 6, 20, 64, 256, 1023, 4096)]
    mixed = [Batch(128, dtype, other) for dtype, other in product(_FLOATS, _FLOATS)]
    # beside a row of one column only the output's columns are not aligned, beside one of its own class both
    beside = [Batch(dim, beside=other) for dim in (4, 64, 128, 1024) for other in (1, dim - 1)]
    odd = [
        Batch(samples=1),
        Batch(dim=1, samples=1),
        Batch(samples=16),
        Batch(shifted=True),
        Batch(dim=3, shifted=True),
    ]
    narrow = [Batch(ids=i, offsets=o) for i, o in product((torch.int32, torch.int64), repeat=2)]
    weighted = [Batch(dim, weighted=True) for dim in FEW_DIMS] + [Batch(128, dtype, weighted=True) for dtype in _HALVES]
    for batch in [*usual, *halves, *mixed, *beside, *odd, *narrow, *weighted, Batch(features=1000, samples=1)]:
        rows = f"D={batch.dim} {_TYPES[batch.dtype]}"
        yield partial(look_up, batch), str(batch), ""
        if not batch.weighted:
            yield from (
                (partial(weight_gradients, batch), str(batch), f"{rows} and {_TYPES[batch.other]}"),
                (partial(check, batch), str(batch), ""),
            )  # fmt: skip
        if not batch.beside and not batch.weighted:
            yield partial(look_up_sequence, batch), str(batch), ""
    yield from (
        (partial(check, Batch(), padded=True), f"{Batch()} padded", ""),
        (partial(check, Batch(), masks=True), f"{Batch()} masks", ""),
        (partial(check, Batch(), masks=True, fatal=False), f"{Batch()} masks warning", ""),
    )  # fmt: skip
    yield from launched_jagged.launches()
    yield from launched_quantized.launches()
    yield from launched_served.launches()
    for batch, rule, settings in _steps():
        words = [settings.get("decay", ""), "rounded" if settings.get("rounding") else ""]
        words.append(f"tile x{settings['scale']}" if settings.get("scale", 1) > 1 else "")
        words += [settings.get("pooling", ""), "index ahead" if settings.get("ahead") else ""]
        words += [name.removeprefix("update.") for name in settings.get("forced", ())]
        rows = f"{rule} D={batch.dim} {_TYPES[batch.dtype]}"
        yield partial(step, batch, rule, **settings), " ".join(filter(None, [rule, str(batch), *words])), rows


def _asked(batch: Batch, rule: str, **settings: Any) -> tuple[Batch, str, dict[str, Any]]:
    return batch, rule, settings


def _steps() -> Iterator[tuple[Batch, str, dict[str, Any]]]:
    for rule in BUILT_IN:
        yield from (
            *(_asked(Batch(dim), rule) for dim in (DIMS if rule in MAIN_RULES else FEW_DIMS)),
            *(
                _asked(Batch(), rule, decay=decay)
                for decay in (("l2", "decoupled") if "lr" in RULES[rule].hyper else ())
            ),
            *(
                _asked(Batch(dtype=dtype), rule, rounding=True)
                for dtype in (_HALVES if rule in SET_RULES else (torch.bfloat16,))
            ),
        )  # fmt: skip
    for rule in SET_RULES:
        for dim, dtype in product((4, 128, 4096), _HALVES):
            yield from (
                _asked(Batch(dim, dtype), rule),
                _asked(Batch(dim, other=dtype), rule),
            )  # fmt: skip
        yield from (
            *(_asked(Batch(dim, beside=1), rule) for dim in (4, 20, 64, 128, 1024, 4096)),
            *(_asked(batch, rule) for batch in (Batch(weighted=True), Batch(shifted=True), Batch(rows=2**31))),
            # where rows may have partial sums the last launch adds those
            *(_asked(Batch(dim, samples=40), rule) for dim in FEW_DIMS),
            _asked(Batch(samples=40, beside=1), rule),
            *(_asked(Batch(dtype=dtype, samples=40), rule, rounding=True) for dtype in _HALVES),
            *(
                _asked(Batch(dim), rule, scale=scale)
                for dim, scale in (product((64, 127, 128, 1024), (1, 2, 4)) if RULES[rule].takes_row else ())
            ),
        )  # fmt: skip
    # what may be forced on a launch for any device; rows are prefetched on NVIDIA's alone
    yield from (
        _asked(Batch(), rule, forced={"update.next_entries": True, "update.contiguous": True})
        for rule in ("rowwise_adagrad", "adam")
    )  # fmt: skip
    # one program for all ids, of each size, and many; levels; what ids, offsets and factors are
    for samples in (8, 40, 1100, 2100, 4100, 200_000):
        yield from (
            _asked(Batch(1, samples=samples), "sgd"),
            _asked(Batch(1, torch.bfloat16, samples=samples, weighted=True), "sgd", rounding=True),
            _asked(Batch(1, samples=samples, rows=2**31), "sgd"),
        )  # fmt: skip
    yield from (
        *(
            _asked(Batch(ids=ids, offsets=offsets), "sgd", rounding=True)
            for ids, offsets in product((torch.int32, torch.int64), repeat=2)
        ),
        *(
            _asked(Batch(weighted=weighted), "sgd", pooling=pooling)
            for weighted, pooling in product((False, True), ("mean", "sequence"))
        ),
        _asked(Batch(1), "sgd", ahead=True),
    )  # fmt: skip


@contextmanager
def _noted() -> Iterator[dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]]]:
    """Launches in the context are noted by the name of their kernel instead of run, on whatever device."""
    load_kernels()
    noted: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {}
    with ExitStack() as patches:
        for module in _MODULES:
            if hasattr(module, "runs_kernel"):
                patches.enter_context(patch.object(module, "runs_kernel", lambda tensor: True))
            if hasattr(module, "direct"):
                # past the dispatcher there is no kernel
                patches.enter_context(patch.object(module, "direct", lambda *tensors: False))
            for name, kernel in kernels_of(module):
                patches.enter_context(patch.object(module, f"_{name}_kernel", _Note(name, kernel, noted)))
        yield noted


def kernels_of(module: Any) -> list[tuple[str, Any]]:
    """Short names and kernels of a kernel file."""
    return [(n[1 : -len("_kernel")], k) for n, k in vars(module).items() if n[0] == "_" and n.endswith("_kernel")]


class _Note:
    """Stands in for a kernel: its launch only leaves the arguments."""

    def __init__(self, name: str, kernel: Any, noted: dict[str, Any]) -> None:
        self.name, self.kernel, self.noted = name, kernel, noted

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, **kwargs: Any) -> None:
            self.noted[self.name] = (self.kernel, args, kwargs)

        return launch


def _case(name: str, kernel: Any, args: tuple[Any, ...], options: dict[str, Any], rows: str) -> Case:
    types: dict[str, Any] = {}
    constants: dict[str, Any] = {}
    aligned: list[tuple[str | int, ...]] = []
    for parameter, value in zip(kernel.params, args, strict=True):
        if parameter.is_constexpr or (type(value) is int and value == 1 and not parameter.do_not_specialize):
            constants[parameter.name] = value
        elif isinstance(value, tuple):
            types[parameter.name] = tuple(_type(part) for part in value)
            # what a decorator says of an argument is not said of the parts of a tuple (triton 3.6.0 to 3.9.0)
            aligned += [(parameter.name, i) for i, part in enumerate(value) if _is_aligned(part)]
        else:
            types[parameter.name] = _type(value)
            specialized = not (parameter.do_not_specialize or parameter.do_not_specialize_on_alignment)
            if specialized and _is_aligned(value):
                aligned.append((parameter.name,))
    return Case(
        name, kernel, types, constants, tuple(aligned), options.get("num_warps", 4), options.get("maxnreg"),
        options.get("enable_fp_fusion", True), rows,
    )  # fmt: skip


def _type(value: Tensor | float) -> str:
    if isinstance(value, Tensor):
        return f"*{_TYPES[value.dtype]}"
    if isinstance(value, float):
        return "fp32"
    return "i32" if -(2**31) <= value < 2**31 else "i64"


def _is_aligned(value: Tensor | float) -> bool:
    # Triton says nothing of a number with a fraction
    return not isinstance(value, float) and (value.data_ptr() if isinstance(value, Tensor) else value) % 16 == 0
