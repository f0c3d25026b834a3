"""FBGEMM's modules of tables beside ours of the same names, on the CPU: trained alike, called alike, kept alike.

docs/evidence/beside_fbgemm_tables.md keeps what is printed. Not as it has to be: a case beyond its bound, or a check
that fails. The cases are those of perf/evidence/parity.py; one program makes and trains both modules.
"""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any, TypeVar

import torch
from torch import Tensor

from shardwise import kernels
from shardwise.embeddings.optim import fbgemm_types, optimizers
from shardwise.fbgemm import tables
from shardwise.perf.evidence.parity import (
    CASES,
    COLUMNS,
    FP32_BOUNDS,
    STEPS,
    Case,
    Trace,
    differences,
    train_fbgemm,
    verdict,
)
from shardwise.perf.evidence.report import Report, Section, grid, report_of
from shardwise.perf.suite import libraries

OURS = libraries.Library("shardwise", [tables, fbgemm_types, optimizers, kernels])
Check = Callable[[Any, Any], Iterator[str]]
CheckT = TypeVar("CheckT", bound=Check)
# name -> check: what two libraries do otherwise, in words
CHECKS: dict[str, Check] = {}
# relative to 1 or what is larger
BOUND = 1e-6
SHAPES = [(9, 8), (5, 4), (7, 8)]
ON_CPU = ("EXACT_SGD", "EXACT_ADAGRAD", "EXACT_ROWWISE_ADAGRAD")


def run(options: argparse.Namespace) -> Report:
    """Compare.

    Raises:
        ImportError: FBGEMM is not installed.
    """
    peer = libraries.fbgemm()
    rows, bad = [], []
    for case in CASES:
        apart = compare(case, peer)
        status = verdict(case, apart)
        if status.startswith("BEYOND"):
            bad.append(f"{case.name}: {status}")
        rows.append([case.name, *(_number(apart.get(column)) for column in COLUMNS), status])
    header = ["case", *(f"{kind}, step {step}" for kind, step in COLUMNS), "verdict"]
    lines = [
        "Largest difference between the two `SplitTableBatchedEmbeddingBagsCodegen`, in units of max(1, largest value"
        f" of FBGEMM's tensor). {len(CASES)} cases.",
        f"Bounds: fp32 {FP32_BOUNDS[1]:g} in step 1 and {FP32_BOUNDS[STEPS]:g} in step {STEPS}, fp16 2^-10 and 2^-9.",
        "",
        *grid(header, rows),
        "",
    ]
    checked, wrong = check_all(peer)
    more = [f"{len(checked)} checks besides:", "", *grid(["what is the same", "faults"], checked), ""]
    return report_of([Section(lines, bad), Section(more, wrong)])


def compare(case: Case, peer: Any) -> dict[tuple[str, int], float]:
    """How far the two are apart; FBGEMM's mean of weighted rows is asked for as a sum, as in parity.py."""
    own: Trace = train_fbgemm(case, OURS, as_is=True)
    return differences(own, train_fbgemm(case, peer))


def check_all(peer: Any) -> tuple[list[list[object]], list[str]]:
    """A row for each of CHECKS, and all faults."""
    rows: list[list[object]] = []
    wrong = []
    for name, check in CHECKS.items():
        faults = list(check(OURS, peer))
        rows.append([name, len(faults) or ""])
        wrong += [f"{name}: {fault}" for fault in faults]
    return rows, wrong


def _check(name: str) -> Callable[[CheckT], CheckT]:
    def put(check: CheckT) -> CheckT:
        CHECKS[name] = check
        return check

    return put


def _number(size: float | None) -> str:
    return "" if size is None else f"{size:.1e}" if size else "0"


def make(library: Any, **settings: Any) -> Any:
    """A module of three tables, four features, with random weights."""
    place = (library.EmbeddingLocation.HOST, library.ComputeDevice.CPU)
    settings.setdefault("embedding_specs", [(*shape, *place) for shape in SHAPES])
    settings = {"feature_table_map": [0, 1, 1, 2], "learning_rate": 0.1, "eps": 0.1, **settings}
    made = library.SplitTableBatchedEmbeddingBagsCodegen(**settings)
    torch.manual_seed(1)
    made.init_embedding_weights_uniform(-1, 1)
    return made


def batch(samples: int = 5, *, dtype: torch.dtype = torch.int64) -> tuple[Tensor, Tensor, Tensor]:
    """Indices that all features take, offsets and weights."""
    g = torch.Generator().manual_seed(samples)
    lengths = torch.randint(0, 4, (4 * samples,), generator=g)
    ids = torch.randint(0, 5, (int(lengths.sum()),), generator=g)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    return ids.to(dtype), offsets.to(dtype), torch.rand(len(ids), generator=g)


def train(module: Any, *args: Any, **more: Any) -> Tensor:
    """One forward and backward; gives the output."""
    out: Tensor = module(*args, **more)
    places = torch.arange(out.numel(), dtype=torch.float32).view(out.shape)
    torch.autograd.backward(out, ((places * 7 % 11) / 8 - 0.5).to(out.dtype))
    return out.detach()


def tensors(module: Any) -> dict[str, Tensor]:
    """Tables and states, by name."""
    held = {f"table {t}": table for t, table in enumerate(module.split_embedding_weights())}
    for t, states in enumerate(module.get_optimizer_state()):
        held |= {f"{name} of table {t}": state for name, state in states.items()}
    return held


def apart(own: dict[str, Tensor], theirs: dict[str, Tensor]) -> Iterator[str]:
    """Where two sets of tensors differ."""
    if own.keys() != theirs.keys():
        yield f"{sorted(own)} for {sorted(theirs)}"
        return
    for name, a in own.items():
        b = theirs[name]
        if a.shape != b.shape or a.dtype != b.dtype:
            yield f"{name}: {a.dtype} {list(a.shape)} for {b.dtype} {list(b.shape)}"
        elif a.numel():
            distance = float(((a.double() - b.double()).abs() / b.double().abs().clamp(min=1)).max())
            if not distance <= BOUND:
                yield f"{name}: {distance:.2g} apart"


@_check("arguments of constructors and methods: names, order, defaults")
def _signatures(own: Any, peer: Any) -> Iterator[str]:
    methods = {
        "SplitTableBatchedEmbeddingBagsCodegen": (
            "__init__", "forward", "prefetch", "split_embedding_weights", "split_optimizer_states",
            "get_optimizer_state", "get_optimizer_buffer", "set_learning_rate", "get_learning_rate",
            "update_hyper_parameters", "set_optimizer_step", "flush", "reset_cache_states",
            "reset_embedding_weight_momentum", "init_embedding_weights_uniform",
        ),
        "DenseTableBatchedEmbeddingBagsCodegen": (
            "__init__", "forward", "split_embedding_weights", "init_embedding_weights_uniform",
        ),
    }  # fmt: skip
    for owner, names in methods.items():
        for name in names:
            a, b = (_arguments(getattr(getattr(library, owner), name)) for library in (own, peer))
            if a != b:
                yield f"{owner}.{name}: {a} for {b}"


def _arguments(function: Any) -> list[tuple[str, object]]:
    parameters = inspect.signature(function).parameters.values()
    return [(p.name, str(p.default) if isinstance(p.default, Enum) else p.default) for p in parameters]


@_check("members and values of enums")
def _enums(own: Any, peer: Any) -> Iterator[str]:
    for name in (
        "BoundsCheckMode", "CacheAlgorithm", "ComputeDevice", "EmbeddingLocation", "EmbOptimType", "OptimType",
        "PoolingMode", "SparseType", "WeightDecayMode", "CounterWeightDecayMode", "StepMode", "LearningRateMode",
        "GradSumDecay", "EmbeddingSpecInfo",
    ):  # fmt: skip
        a, b = ({each.name: each.value for each in getattr(library, name)} for library in (own, peer))
        if a != b:
            yield f"{name}: {a} for {b}"
    for each in own.SparseType:
        other = peer.SparseType[each.name]
        for method in ("as_int", "as_dtype", "bit_rate", "align_size", "is_float"):
            if getattr(each, method)() != getattr(other, method)():
                yield f"{each.name}.{method}()"


@_check("numbers that init_embedding_weights_uniform draws")
def _init(own: Any, peer: Any) -> Iterator[str]:
    for a, b in zip(make(own).split_embedding_weights(), make(peer).split_embedding_weights(), strict=True):
        if not torch.equal(a, b):
            yield "others"


@_check("attributes that programs read")
def _attributes(own: Any, peer: Any) -> Iterator[str]:
    a, b = make(own), make(peer)
    for name in (
        "embedding_specs", "dims", "total_D", "max_D", "feature_table_map", "pooling_mode", "is_nobag", "mixed_D",
        "bounds_check_mode_int", "weights_precision", "output_dtype", "current_device", "use_cpu", "optimizer",
        "total_hash_size", "total_hash_size_bits", "stochastic_rounding", "weight_decay_mode", "table_names",
    ):  # fmt: skip
        if str(getattr(a, name)) != str(getattr(b, name)):
            yield f"{name}: {getattr(a, name)} for {getattr(b, name)}"
    for name in ("D_offsets", "hash_size_cumsum", "rows_per_table", "feature_dims", "weights_placements"):
        one, other = getattr(a, name), getattr(b, name)
        if one.dtype != other.dtype or not torch.equal(one, other):
            yield f"{name}: {one} for {other}"


@_check("state dicts: names, shapes, types, and each loads the other's")
def _state_dicts(own: Any, peer: Any) -> Iterator[str]:
    for name in ON_CPU:
        a, b = (make(library, optimizer=library.OptimType[name]) for library in (own, peer))
        train(a, *batch()[:2])
        train(b, *batch(7)[:2])
        kept, theirs = a.state_dict(), b.state_dict()
        ours = {key: (value.dtype, value.shape) for key, value in kept.items()}
        if ours != {key: (value.dtype, value.shape) for key, value in theirs.items()}:
            yield f"{name}: {sorted(ours)} for {sorted(theirs)}"
        for source, target, state in ((a, make(peer, optimizer=peer.OptimType[name]), kept),
                                      (b, make(own, optimizer=own.OptimType[name]), theirs)):  # fmt: skip
            target.load_state_dict(state)
            yield from apart(tensors(target), tensors(source))
            # and they go on alike
            train(target, *batch(3)[:2])
            train(source, *batch(3)[:2])
            yield from apart(tensors(target), tensors(source))


@_check("batch sizes of features and ranks")
def _variable(own: Any, peer: Any) -> Iterator[str]:
    sizes = [[2, 1], [0, 4], [3, 3], [1, 0]]
    ids, offsets, weights = batch(6)
    offsets = offsets[: sum(map(sum, sizes)) + 1]
    ids, weights = ids[: int(offsets[-1])], weights[: int(offsets[-1])]
    for given in (None, weights):
        a, b = make(own), make(peer)
        outs = [train(each, ids, offsets, given, batch_size_per_feature_per_rank=sizes) for each in (a, b)]
        yield from apart({"output": outs[0], **tensors(a)}, {"output": outs[1], **tensors(b)})


@_check("gradients of per-sample weights, of some features only too")
def _weights(own: Any, peer: Any) -> Iterator[str]:
    ids, offsets, weights = batch()
    for wanted in (None, torch.tensor([1, 0, 1, 0], dtype=torch.int32)):
        grads = []
        for library in (own, peer):
            leaf = weights.clone().requires_grad_()
            train(make(library), ids, offsets, leaf, wanted)
            grads.append({"gradient": leaf.grad})
        yield from apart(*grads)  # type: ignore[arg-type]


@_check("int32 indices, offsets of another type, half weights, empty batches")
def _types(own: Any, peer: Any) -> Iterator[str]:
    ids, offsets, weights = batch(dtype=torch.int32)
    for args in (
        (ids, offsets),
        (ids, offsets.long()),
        (ids, offsets, weights.half()),
        (ids[:0], torch.zeros(9, dtype=torch.int32)),
        (ids[:0], torch.zeros(1, dtype=torch.int32)),
    ):
        a, b = make(own), make(peer)
        outs = [train(each, *args) for each in (a, b)]
        yield from apart({"output": outs[0], **tensors(a)}, {"output": outs[1], **tensors(b)})


@_check("output in fp16")
def _fp16(own: Any, peer: Any) -> Iterator[str]:
    a, b = (make(library, output_dtype=library.SparseType.FP16)(*batch()[:2]).detach() for library in (own, peer))
    if a.dtype != b.dtype or float((a.float() - b.float()).abs().max()) > 2.0**-9:
        yield f"{a.dtype} for {b.dtype}, or beyond 2^-9"


@_check("hyper-parameters that change between steps")
def _hyper(own: Any, peer: Any) -> Iterator[str]:
    for name in ON_CPU:
        a, b = (make(library, optimizer=library.OptimType[name]) for library in (own, peer))
        for each in (a, b):
            train(each, *batch()[:2])
            each.set_learning_rate(0.02)
            train(each, *batch(7)[:2])
            each.update_hyper_parameters({"lr": 0.5, "eps": 0.3, "weight_decay": 0.1})
            train(each, *batch(3)[:2])
        yield from apart(tensors(a), tensors(b))
        if abs(a.get_learning_rate() - b.get_learning_rate()) > BOUND:
            yield f"get_learning_rate(): {a.get_learning_rate()} for {b.get_learning_rate()}"


@_check("what is written into tables and states trains")
def _views(own: Any, peer: Any) -> Iterator[str]:
    a, b = (make(library, optimizer=library.OptimType.EXACT_ADAGRAD) for library in (own, peer))
    for each in (a, b):
        each.split_embedding_weights()[1].fill_(0.5)
        each.split_optimizer_states()[2][0].fill_(2)
        train(each, *batch()[:2])
    yield from apart(tensors(a), tensors(b))


@_check("dense tables: output, gradient, state dict")
def _dense(own: Any, peer: Any) -> Iterator[str]:
    for sizes in (SHAPES, [(9, 8), (5, 8)]):
        features = [0, 1, 1, 2][: len(sizes) + 1]
        sides = []
        for library in (own, peer):
            made = library.DenseTableBatchedEmbeddingBagsCodegen(sizes, features, use_cpu=True)
            torch.manual_seed(2)
            made.init_embedding_weights_uniform(-1, 1)
            ids, offsets, weights = batch()
            offsets = offsets[: 5 * len(features) + 1]
            leaf = weights[: int(offsets[-1])].clone().requires_grad_()
            out = train(made, ids[: len(leaf)], offsets, leaf)
            torch.optim.SGD(made.parameters(), lr=0.1).step()
            held = {f"table {t}": table for t, table in enumerate(made.split_embedding_weights())}
            sides.append({"output": out, "gradient": leaf.grad, **held, **made.state_dict()})
        yield from apart(*sides)
