"""The CASES of the kernel tests, one seeded `inputs()` builder for all of them, and where the same tests run.

`DEVICES` runs a test three times, each in its own process: `cpu` on the torch twins, `interpreted` on the Triton
kernels in the interpreter (TRITON_INTERPRET=1, `-m interpreted`), `cuda` on a GPU (`-m gpu`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.kernels import RULES as DEFINED, Feature, Segment, flatten_segments, new_guard, pack_features
from shardwise.kernels._op import HAS_TRITON, INTERPRETED

Tensors = Tensor | Iterable[Tensor]

DEVICES = [
    "cpu",
    pytest.param("interpreted", marks=pytest.mark.interpreted),
    pytest.param("cuda", marks=pytest.mark.gpu),
]

# where an update runs: on a CPU the torch twins alone ("cpu"), or the loops that numba compiles
UPDATES = [*DEVICES, "numba"]

# Largest |a - b| allowed, in units of the largest |b| of the tensor, by the dtype that holds a
TOLERANCE = {torch.float64: 1e-12, torch.float32: 3e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


@dataclass(frozen=True)
class Case:
    """One shape of a lookup: tables, features over them, and how a batch of ids is drawn."""

    name: str
    tables: tuple[tuple[int, int], ...] = ((20, 8),)  # (rows, dim)
    features: tuple[tuple[int, bool], ...] = ((0, False),)  # (table, averaged)
    batch: int = 5
    lengths: tuple[int, int] = (0, 4)  # shortest and longest bag
    empty: tuple[int, ...] = ()  # features without ids
    weighted: bool = False
    ids: str = "uniform"  # or "hot" (all ids row 0 ... of the table), "last"
    index_dtype: torch.dtype = torch.int64
    offset_dtype: torch.dtype = torch.int64
    dtype: torch.dtype = torch.float32
    slow: bool = False  # too large for the interpreter and for the references, which are Python loops


def _dim(dim: int, rows: int = 7) -> Case:
    return Case(f"dim {dim}", tables=((rows, dim),), batch=3)


_MIXED = ((11, 8), (6, 3), (1, 16), (9, 8), (5, 20))
_EVERY = tuple((t, t % 2 == 1) for t in range(len(_MIXED)))

CASES = [
    Case("one table"),
    Case("empty bags", lengths=(0, 1), batch=9),
    Case("empty feature", tables=_MIXED, features=_EVERY, empty=(0, 3)),
    Case("all features empty", tables=_MIXED, features=_EVERY, empty=(0, 1, 2, 3, 4)),
    Case("batch 0", tables=_MIXED, features=_EVERY, batch=0),
    Case("one id", batch=1, lengths=(1, 1)),
    Case("one row", tables=((1, 8),)),
    *(_dim(dim) for dim in (1, 3, 4, 5, 16, 128)),
    _dim(1023, rows=3),
    _dim(4096, rows=2),
    Case("mixed dims", tables=_MIXED, features=_EVERY, weighted=True),
    Case("shared table", tables=((9, 8), (4, 8)), features=((0, False), (1, True), (0, True), (0, False))),
    Case("mean", features=((0, True),), lengths=(0, 9)),
    Case("mean and sum", tables=((9, 8), (4, 8)), features=((0, False), (1, True))),
    Case("weighted", weighted=True),
    Case("weighted mean", weighted=True, features=((0, True),)),
    Case("long bags", lengths=(30, 70), batch=3),
    Case("int32 ids", index_dtype=torch.int32),
    Case("int32 offsets", offset_dtype=torch.int32, tables=_MIXED, features=_EVERY),
    Case("int32 both", index_dtype=torch.int32, offset_dtype=torch.int32, weighted=True),
    Case("fp16 table", dtype=torch.float16, tables=_MIXED, features=_EVERY, weighted=True),
    Case("bf16 table", dtype=torch.bfloat16, tables=_MIXED, features=_EVERY),
    Case("hot row 3000", ids="hot", batch=100, lengths=(30, 30)),
    Case("hot row 100000", ids="hot", batch=1000, lengths=(100, 100), slow=True),
    Case("last row", ids="last", tables=((50, 8), (20, 8)), features=((0, False), (1, False))),
    Case("40 features", tables=tuple((3 + t, 4 * (1 + t % 5)) for t in range(40)),
         features=tuple((t, t % 3 == 0) for t in range(40)), batch=2),
]  # fmt: skip
SMALL = [case for case in CASES if not case.slow]


def ids_of(cases: Sequence[Case]) -> list[str]:
    """Names of the cases, as pytest shows them."""
    return [case.name for case in cases]


def per_device(cases: Sequence[Case], devices: Sequence[Any] = DEVICES) -> list[Any]:
    """(device, case) pairs; the interpreter is spared the slow cases."""
    return [
        pytest.param(name, case, marks=marks, id=f"{name}-{case.name}")
        for name, marks in _named(devices)
        for case in cases
        if not (case.slow and name == "interpreted")
    ]


# rules whose kernels differ in kind: without a state, with one a row, and with both kinds and sums over the row
KINDS = ("sgd", "rowwise_adagrad", "partial_rowwise_lamb")


def per_rule(devices: Sequence[Any], kinds: Sequence[str] = KINDS) -> list[Any]:
    """(device, rule) pairs; the interpreter takes rules that are not among `kinds` in `make test-all` alone."""
    return crossed(devices, RULES, lambda rule: rule not in kinds)


def crossed(devices: Sequence[Any], names: Iterable[Any], repeats: Callable[..., bool]) -> list[Any]:
    """(device, name) pairs, or with tuples more; those that say nothing new of a kernel are full in the interpreter."""
    each = [one if isinstance(one, tuple) else (one,) for one in names]
    return [
        pytest.param(device, *name, marks=[*marks, *full_if(device == "interpreted" and repeats(*name))])
        for device, marks in _named(devices)
        for name in each
    ]


def full_if(repeats: bool) -> list[pytest.MarkDecorator]:
    """The mark of a case that repeats what another says of the same kernel."""
    return [pytest.mark.full] if repeats else []


def _named(devices: Sequence[Any]) -> list[tuple[str, Sequence[Any]]]:
    return [(device, ()) if isinstance(device, str) else (device.values[0], device.marks) for device in devices]


def torch_device(name: str) -> torch.device:
    """The device of a `DEVICES` entry, after making sure that this process runs there what the entry says."""
    assert (name == "interpreted") == INTERPRETED, f"{name!r} tests do not run with TRITON_INTERPRET={INTERPRETED:d}"
    assert name != "cuda" or HAS_TRITON
    return torch.device("cuda" if name == "cuda" else "cpu")


@dataclass(frozen=True)
class Inputs:
    """A batch as the ops take it, and the same batch as lists: `bags[f][b]` are ids, `scales[f][b]` their weights."""

    case: Case
    weights: Tensor
    indices: Tensor
    offsets: Tensor
    per_id_weights: Tensor | None
    features: Tensor
    dims: list[int]
    segments: list[int]
    pooling: str
    names: list[str]
    bases: list[int]
    first_rows: list[int]
    bags: list[list[list[int]]]
    scales: list[list[list[float]]] | None

    @property
    def lookup(self) -> tuple[Any, ...]:
        """Arguments of `pooled_lookup`."""
        return (*self.lookup_ref, self.segments, self.pooling)

    @property
    def lookup_ref(self) -> tuple[Any, ...]:
        """Arguments of `pooled_lookup_ref`."""
        return self.weights, self.indices, self.offsets, self.per_id_weights, self.features, self.dims

    def tables(self, flat: Tensor | None = None) -> list[Tensor]:
        """The tables inside a flat buffer that is laid out like W: views [R, D]."""
        flat = self.weights if flat is None else flat
        return [
            flat[base : base + rows * dim].view(rows, dim)
            for (rows, dim), base in zip(self.case.tables, self.bases, strict=True)
        ]

    def row_states(self, state: Tensor) -> list[Tensor]:
        """The tables' parts of a state with one number a row."""
        return [state[first : first + rows] for (rows, _), first in zip(self.case.tables, self.first_rows, strict=True)]

    def batch_of(self, seed: int) -> Inputs:
        """Another batch for the same tables."""
        other = inputs(self.case, self.weights.device, seed)
        return replace(other, weights=self.weights)

    def to(self, device: torch.device) -> Inputs:
        """The same batch elsewhere."""
        moved = {name: value.to(device) for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **moved)


def layout(tables: Sequence[tuple[int, int]]) -> tuple[list[int], list[int], list[Segment], int]:
    """Tables of equal dim side by side, each dim on a 16-byte boundary: bases, first rows, segments and elements."""
    bases, first_rows = [0] * len(tables), [0] * len(tables)
    segments, element, row = [], 0, 0
    for dim in sorted({dim for _, dim in tables}):
        element = -(-element // 8) * 8
        begin, first_row = element, row
        for t, (rows, _) in enumerate(tables):
            if tables[t][1] == dim:
                bases[t], first_rows[t] = element, row
                element, row = element + rows * dim, row + rows
        segments.append(Segment(dim, first_row, row, begin))
    return bases, first_rows, segments, element


def inputs(case: Case, device: torch.device | str = "cpu", seed: int = 0) -> Inputs:
    """The batch of a case: weights of seed 0, ids and per-id weights of `seed`."""
    generator = torch.Generator().manual_seed(seed)
    bases, first_rows, segments, elements = layout(case.tables)
    weights = torch.randn(elements, generator=torch.Generator().manual_seed(0)).to(case.dtype)
    bags: list[list[list[int]]] = []
    scales: list[list[list[float]]] = []
    for f, (table, _) in enumerate(case.features):
        low, high = (0, 0) if f in case.empty else case.lengths
        counts = torch.randint(low, high + 1, (case.batch,), generator=generator).tolist()
        rows = case.tables[table][0]
        bags.append([_draw(case.ids, rows, count, generator) for count in counts])
        scales.append([(torch.rand(count, generator=generator) + 0.5).tolist() for count in counts])
    flat = [i for feature in bags for bag in feature for i in bag]
    ends = torch.tensor([len(bag) for feature in bags for bag in feature], dtype=torch.int64).cumsum(0)
    features = [
        Feature(bases[t], case.tables[t][0], case.tables[t][1], first_rows[t], mean) for t, mean in case.features
    ]
    dims = [feature.dim for feature in features]
    p = torch.tensor([p for feature in scales for bag in feature for p in bag], dtype=torch.float32)
    batch = Inputs(
        case=case,
        weights=weights,
        indices=torch.tensor(flat, dtype=case.index_dtype),
        offsets=torch.cat([ends.new_zeros(1), ends]).to(case.offset_dtype),
        per_id_weights=p if case.weighted else None,
        features=pack_features(features),
        dims=dims,
        segments=flatten_segments(segments),
        pooling="mean" if any(mean for _, mean in case.features) else "sum",
        names=[f"feature 'f{f}' of table 't{t}'" for f, (t, _) in enumerate(case.features)],
        bases=bases,
        first_rows=first_rows,
        bags=bags,
        scales=scales if case.weighted else None,
    )
    return batch.to(torch.device(device))


def _draw(how: str, rows: int, count: int, generator: torch.Generator) -> list[int]:
    if how == "hot":
        return [0] * count
    if how == "last":
        return [rows - 1] * count
    return torch.randint(0, rows, (count,), generator=generator).tolist()


# "gradient" is no optimizer: it writes the sums of a row's gradients
RULES = [rule for rule in DEFINED if rule != "gradient"]
# what tests use unless they say otherwise; each rule takes what it knows of these
HYPER = {
    "lr": 0.1, "eps": 1e-6, "beta1": 0.9, "beta2": 0.99, "momentum": 0.5, "weight_decay": 0.125, "eta": 0.25,
    "l1": 0.01, "l2": 0.5,
}  # fmt: skip


@dataclass
class Optimizer:
    """What an update changes besides the weights, and what steers it."""

    rule: str
    states: list[Tensor]
    step: Tensor
    hyper: Tensor
    guard: Tensor
    decay: str = "none"
    max_gradient: float | None = None
    seed: Tensor | None = None

    @property
    def by_name(self) -> dict[str, float]:
        """The hyper-parameters, and the weight decay."""
        return dict(zip([*DEFINED[self.rule].hyper, "weight_decay"], self.hyper.tolist(), strict=True))

    def copied(self) -> Optimizer:
        """The same state elsewhere in memory."""
        tensors = {name: value.clone() for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **tensors, states=[state.clone() for state in self.states])


def optimizer(rule: str, batch: Inputs, *, decay: str = "none", **hyper: float) -> Optimizer:
    """Fresh states of a rule for the tables of `batch`; hyper-parameters of HYPER unless given."""
    device, rows = batch.weights.device, sum(rows for rows, _ in batch.case.tables)
    defined = DEFINED[rule]
    states = [torch.zeros(rows if kind == "row" else batch.weights.numel(), device=device) for kind in defined.kinds]
    known = {**HYPER, **hyper}
    numbers = [known.get(name, default) for name, default in defined.hyper.items()] + [known["weight_decay"]]
    return Optimizer(
        rule, states, torch.zeros(1, dtype=torch.int64, device=device),
        torch.tensor(numbers, dtype=torch.float64, device=device), new_guard(device), decay,
    )  # fmt: skip


def update_args(
    weights: Tensor, state: Optimizer, grad: Tensor, batch: Inputs, pooling: str | None = None
) -> tuple[Any, ...]:
    """Arguments of `fused_update` and of its reference, pooled as the case says."""
    return (
        weights, state.states, state.step, grad, batch.indices, batch.offsets, batch.per_id_weights,
        batch.features, batch.dims, batch.segments, state.rule, state.hyper, state.guard, pooling or batch.pooling,
        state.decay, state.max_gradient, state.seed,
    )  # fmt: skip


def upstream(batch: Inputs, seed: int = 1) -> Tensor:
    """A fixed gradient of the pooled output."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch.case.batch, sum(batch.dims), generator=generator).to(batch.weights.device)


def assert_close(got: Tensors, expected: Tensors, tolerance: float | None = None) -> None:
    """max|got - expected| <= tolerance * max|expected|, of each if several; by the table above unless one is given."""
    if not isinstance(got, Tensor) or not isinstance(expected, Tensor):
        for one, other in zip(got, expected, strict=True):
            assert_close(one, other, tolerance)
        return
    assert got.shape == expected.shape
    tolerance = TOLERANCE[got.dtype] if tolerance is None else tolerance
    got, expected = got.detach().cpu().double(), expected.detach().cpu().double()
    assert got.isfinite().all()
    if expected.numel():
        worst, largest = (got - expected).abs().max().item(), expected.abs().max().item()
        assert worst <= tolerance * largest, f"differs by {worst:.3g}, allowed {tolerance:.3g} of {largest:.3g}"


def assert_same_bits(got: Tensors, expected: Tensors) -> None:
    """Equal in every bit; as many and each, where there are several."""
    if not isinstance(got, Tensor) or not isinstance(expected, Tensor):
        for one, other in zip(got, expected, strict=True):
            assert_same_bits(one, other)
        return
    assert got.dtype == expected.dtype
    assert torch.equal(got.detach().cpu(), expected.detach().cpu())


def assert_compiled_equals_eager(
    run: Callable[..., Tensor], batches: Iterable[tuple[Any, ...]], tolerance: float | None = None
) -> None:
    """One graph, made for the first batch, gives the number of every batch and its gradients by all that want one."""
    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend="aot_eager")
    for given in batches:
        leaves = [part for part in given if isinstance(part, Tensor) and part.requires_grad]
        got, expected = compiled(*given), run(*given)
        assert_close(got, expected, tolerance)
        if leaves:
            assert_close(torch.autograd.grad(got, leaves), torch.autograd.grad(expected, leaves), tolerance)
