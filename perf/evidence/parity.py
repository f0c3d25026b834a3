"""Train the same tables on the same batches through FBGEMM's CPU ops and through shardwise; print how far they part.

docs/evidence/parity.md tells how and keeps what was printed. Not as it has to be: a case is beyond its bound.

Shapes: ids of F features and B samples, outputs [B, sum of dims], or [N, dim] where nothing is pooled.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwise import (
    DataType,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    PoolingType,
    RowWiseAdagrad,
    WeightDecayMode,
    apply_optimizer_in_backward,
)
from shardwise.perf.evidence.report import Report, grid, versions
from shardwise.perf.suite import libraries

# samples, the longest bag but one, and steps
B, LENGTH, STEPS = 32, 6, 10
# (rows, dim) of each table; FBGEMM wants dims in multiples of 4, and one dim where nothing is pooled
POOLED = ((60, 128), (7, 4), (300, 32), (40, 16))
UNPOOLED = tuple((rows, 32) for rows, _ in POOLED)
# rule -> FBGEMM's name, our class
OPTIMIZERS: dict[str, tuple[str, type[torch.optim.Optimizer]]] = {
    "sgd": ("EXACT_SGD", torch.optim.SGD),
    "adagrad": ("EXACT_ADAGRAD", torch.optim.Adagrad),
    "rowwise_adagrad": ("EXACT_ROWWISE_ADAGRAD", RowWiseAdagrad),
}
# an eps so large that its place in the formula shows, and that Adagrad does not turn the rounding of a sum near 0 into
# a step of another size
LR, EPS, WEIGHT_DECAY, MAX_GRADIENT, START = 0.05, 0.1, 0.1, 0.5, 0.1

# what is compared, and in which steps
COMPARED = ("output", "weights", "states", "gradient of per-id weights")
COLUMNS = [(kind, step) for kind in COMPARED for step in (1, STEPS)]
FP32_BOUNDS = {1: 1e-6, STEPS: 1e-5}
# one last place of fp16: FBGEMM's SGD and Adagrad round the step before they subtract it
FP16_BOUNDS = {1: 2.0**-10, STEPS: 2.0**-9}
BEYOND = "BEYOND"

# what one side did: tensors by what they are and after how many steps
Trace = dict[tuple[str, int], list[Tensor]]


@dataclass(frozen=True)
class Case:
    """One way to train; `shared` gives every table two features, `decay` names a WeightDecayMode."""

    rule: str
    pooling: str = "sum"
    weighted: bool = False
    fp16: bool = False
    shared: bool = False
    decay: str = ""
    clipped: bool = False
    start: float = 0.0
    defaults: bool = False

    @property
    def name(self) -> str:
        flags = {
            "weighted": self.weighted, "fp16": self.fp16, "two features a table": self.shared,
            f"weight decay {self.decay}": self.decay, "clipped gradient": self.clipped,
            f"states from {self.start:g}": self.start, "default lr and eps": self.defaults,
        }  # fmt: skip
        return ", ".join([self.rule, self.pooling, *(flag for flag, wanted in flags.items() if wanted)])

    @property
    def tables(self) -> tuple[tuple[int, int], ...]:
        return UNPOOLED if self.pooling == "none" else POOLED

    @property
    def table_of(self) -> list[int]:
        """The table of each feature."""
        return [t for t in range(len(self.tables)) for _ in range(2 if self.shared else 1)]

    @property
    def bounds(self) -> dict[int, float]:
        return FP16_BOUNDS if self.fp16 else FP32_BOUNDS


_POOLINGS = (("sum", False), ("mean", False), ("sum", True), ("mean", True), ("none", False))
_ROWWISE = "rowwise_adagrad"
CASES = [
    *(Case(rule, p, w, fp16) for fp16 in (False, True) for rule in OPTIMIZERS for p, w in _POOLINGS),
    *(Case(rule, p, w, shared=True) for rule in OPTIMIZERS for p, w in (_POOLINGS[0], _POOLINGS[3])),
    *(Case(rule, p, w, clipped=True) for rule in OPTIMIZERS for p, w in _POOLINGS[2:]),
    # of rows that are fp32 and pooled, FBGEMM's CPU ops decay only those of tables with two features
    *(Case(_ROWWISE, p, w, shared=True, decay=decay) for decay in ("L2", "DECOUPLE") for p, w in _POOLINGS),
    *(Case(_ROWWISE, fp16=True, decay=decay) for decay in ("L2", "DECOUPLE")),
    *(Case(_ROWWISE, shared=True, decay=decay, clipped=True) for decay in ("L2", "DECOUPLE")),
    *(Case(rule, start=START) for rule in ("adagrad", _ROWWISE)),
    *(Case(rule, defaults=True) for rule in OPTIMIZERS),
]


@dataclass(frozen=True)
class Batch:
    """Ids of all features with their bags' lengths [F * B], and the gradient of the lookup's output."""

    ids: Tensor
    lengths: Tensor
    per_id_weights: Tensor | None
    grad: Tensor


def make_batch(case: Case, step: int) -> Batch:
    """The batch of a step: a third of a feature's ids are one row, bags are empty now and then, features by turns."""
    g = torch.Generator().manual_seed(step)
    features = [case.tables[t] for t in case.table_of]
    lengths = torch.randint(0, LENGTH + 1, (len(features), B), generator=g)
    lengths[0, 0] = 5 * LENGTH
    lengths[1] *= step % 2
    ids = []
    for (rows, _), count in zip(features, lengths.sum(1).tolist(), strict=True):
        hot = torch.rand(count, generator=g) < 1 / 3
        ids.append(torch.where(hot, rows // 2, torch.randint(0, rows, (count,), generator=g)))
    n = int(lengths.sum())
    per_id_weights = torch.rand(n, generator=g) + 0.5 if case.weighted else None
    shape = (n, features[0][1]) if case.pooling == "none" else (B, sum(dim for _, dim in features))
    return Batch(torch.cat(ids), lengths.flatten(), per_id_weights, torch.randn(*shape, generator=g))


def first_weights(case: Case) -> list[Tensor]:
    """What the tables hold at first, on both sides."""
    g = torch.Generator().manual_seed(0)
    dtype = torch.float16 if case.fp16 else torch.float32
    return [torch.randn(*table, generator=g).to(dtype) for table in case.tables]


def train_shardwise(case: Case) -> Trace:
    """STEPS steps through the public API."""
    keys = [f"f{f}" for f in range(len(case.table_of))]
    tables: list[dict[str, Any]] = [
        {
            "num_embeddings": rows, "embedding_dim": dim, "name": f"t{t}",
            "feature_names": [key for key, table in zip(keys, case.table_of, strict=True) if table == t],
            "data_type": DataType.FP16 if case.fp16 else DataType.FP32,
        }
        for t, (rows, dim) in enumerate(case.tables)
    ]  # fmt: skip
    collection: EmbeddingBagCollection | EmbeddingCollection
    if case.pooling == "none":
        collection = EmbeddingCollection([EmbeddingConfig(**table) for table in tables])
    else:
        pooling = PoolingType[case.pooling.upper()]
        configs = [EmbeddingBagConfig(**table, pooling=pooling) for table in tables]
        collection = EmbeddingBagCollection(configs, is_weighted=case.weighted)
    names = list(collection.state_dict())
    collection.load_state_dict(dict(zip(names, first_weights(case), strict=True)))
    apply_optimizer_in_backward(OPTIMIZERS[case.rule][1], collection.parameters(), _our_settings(case))

    def look_up(batch: Batch, per_id_weights: Tensor | None) -> Tensor:
        looked_up = collection(KeyedJaggedTensor(keys, batch.ids, per_id_weights, batch.lengths))
        return (
            torch.cat([rows.values() for rows in looked_up.values()])
            if isinstance(looked_up, dict)
            else looked_up.values()
        )

    def states() -> list[Tensor]:
        of = collection.fused_optimizer().state_dict()["state"]
        return [state for name in names for state in of[name].values()]

    return _train(case, look_up, lambda: list(collection.state_dict().values()), states)


def _our_settings(case: Case) -> dict[str, Any]:
    settings: dict[str, Any] = {} if case.defaults else {"lr": LR} if case.rule == "sgd" else {"lr": LR, "eps": EPS}
    if case.start:
        settings["initial_accumulator_value"] = case.start
    if case.fp16:
        settings["stochastic_rounding"] = False
    if case.decay:
        settings.update(weight_decay=WEIGHT_DECAY, weight_decay_mode=WeightDecayMode[case.decay])
    if case.clipped:
        settings.update(gradient_clipping=True, max_gradient=MAX_GRADIENT)
    return settings


def train_fbgemm(case: Case, peer: Any, *, as_is: bool = False) -> Trace:
    """STEPS steps of FBGEMM's table-batched op on the CPU.

    Its mean of weighted rows has a backward that is not the forward's, so that mean is asked for as a sum with weights
    over the bag's length, unless `as_is`.
    """
    divided = case.pooling == "mean" and case.weighted and not as_is
    tbe = _tbe(case, peer, {"pooling_mode": peer.PoolingMode.SUM} if divided else {})

    def look_up(batch: Batch, per_id_weights: Tensor | None) -> Tensor:
        if divided and per_id_weights is not None:
            per_id_weights = per_id_weights / batch.lengths.repeat_interleave(batch.lengths)
        return _look_up_fbgemm(tbe, batch, per_id_weights)

    def states() -> list[Tensor]:
        return [state for of_table in tbe.split_optimizer_states() for state in of_table]

    for table, weights in zip(tbe.split_embedding_weights(), first_weights(case), strict=True):
        table.copy_(weights)
    for state in states():
        state.fill_(case.start)
    return _train(case, look_up, tbe.split_embedding_weights, states)


def _tbe(case: Case, peer: Any, arguments: dict[str, Any]) -> Any:
    """FBGEMM's op for a case; `arguments` win over the case's."""
    settings = {
        "embedding_specs": _specs(case.tables, peer),
        "feature_table_map": case.table_of,
        "optimizer": peer.EmbOptimType[OPTIMIZERS[case.rule][0]],
        "pooling_mode": peer.PoolingMode[case.pooling.upper()],
        "weights_precision": peer.SparseType.FP16 if case.fp16 else peer.SparseType.FP32,
        "stochastic_rounding": False,
        "device": torch.device("cpu"),
    }
    if not case.defaults:
        settings.update(learning_rate=LR, eps=EPS)
    if case.decay:
        settings.update(weight_decay=WEIGHT_DECAY, weight_decay_mode=peer.WeightDecayMode[case.decay])
    if case.clipped:
        settings.update(gradient_clipping=True, max_gradient=MAX_GRADIENT)
    return peer.SplitTableBatchedEmbeddingBagsCodegen(**{**settings, **arguments})


def _specs(tables: Sequence[tuple[int, int]], peer: Any) -> list[tuple[Any, ...]]:
    return [(rows, dim, peer.EmbeddingLocation.HOST, peer.ComputeDevice.CPU) for rows, dim in tables]


def _look_up_fbgemm(tbe: Any, batch: Batch, per_id_weights: Tensor | None) -> Tensor:
    offsets = torch.cat([batch.lengths.new_zeros(1), batch.lengths.cumsum(0)])
    return tbe(batch.ids, offsets, per_id_weights)  # type: ignore[no-any-return]


def _train(
    case: Case,
    look_up: Callable[[Batch, Tensor | None], Tensor],
    weights: Callable[[], list[Tensor]],
    states: Callable[[], list[Tensor]],
) -> Trace:
    trace: Trace = {}
    for step in range(1, STEPS + 1):
        batch = make_batch(case, step)
        per_id_weights = None if batch.per_id_weights is None else batch.per_id_weights.requires_grad_()
        out = look_up(batch, per_id_weights)
        torch.autograd.backward(out, batch.grad)
        if step in (1, STEPS):
            grad = [] if per_id_weights is None or per_id_weights.grad is None else [per_id_weights.grad]
            for kind, tensors in zip(COMPARED, ([out], weights(), states(), grad), strict=True):
                # a state of rows is [rows] or [rows, 1]
                trace[kind, step] = [tensor.detach().double().flatten() for tensor in tensors]
    return trace


def differences(own: Trace, peer: Trace) -> dict[tuple[str, int], float]:
    """Largest difference of each thing compared, in units of max(1, largest value of FBGEMM's tensor).

    Raises:
        ValueError: the sides have tensors of other numbers or sizes; names what.
    """
    largest = {}
    for kind in sorted({*own, *peer}):
        a, b = own.get(kind, []), peer.get(kind, [])
        if [len(tensor) for tensor in a] != [len(tensor) for tensor in b]:
            raise ValueError(f"{kind}: shardwise has sizes {[len(t) for t in a]}, FBGEMM {[len(t) for t in b]}")
        if a:
            largest[kind] = max(_difference(x, y) for x, y in zip(a, b, strict=True))
    return largest


def _difference(own: Tensor, peer: Tensor) -> float:
    if not bool((own.isfinite() & peer.isfinite()).all()):
        return math.inf
    return float((own - peer).abs().max() / peer.abs().max().clamp(min=1)) if len(own) else 0.0


def verdict(case: Case, apart: dict[tuple[str, int], float]) -> str:
    """ "same bits", "within", or what is beyond its bound."""
    beyond = [f"{kind} in step {step}" for (kind, step), size in apart.items() if not size <= case.bounds[step]]
    if beyond:
        return f"{BEYOND}: {', '.join(beyond)}"
    return "within" if any(apart.values()) else "same bits"


def compare(peer: Any) -> tuple[list[str], bool]:
    """Lines of the table of CASES, and whether every case is within its bounds."""
    header = ["case", *(f"{kind}, step {step}" for kind, step in COLUMNS), "verdict"]
    rows, good = [], True
    for case in CASES:
        apart = differences(train_shardwise(case), train_fbgemm(case, peer))
        status = verdict(case, apart)
        good = good and not status.startswith(BEYOND)
        numbers = [
            "" if column not in apart else f"{apart[column]:.1e}" if apart[column] else "0" for column in COLUMNS
        ]
        rows.append([case.name, *numbers, status])
    return grid(header, rows), good


def outside(peer: Any) -> list[str]:
    """Lines of a table of what the cases leave out: what FBGEMM's CPU ops make of each setting."""
    rows = [[words, _try(case, peer, arguments)] for words, case, arguments in _settings(peer)]
    mean = Case("sgd", "mean", weighted=True)
    apart = differences(train_fbgemm(mean, peer, as_is=True), train_fbgemm(mean, peer))
    numbers = ", ".join(f"{kind} {apart[kind, 1]:.1e}" for kind in COMPARED if (kind, 1) in apart)
    rows.append([f"{mean.name}, as it is", f"taken; differs from the sum with weights / length by: {numbers}"])
    return grid(["setting", "FBGEMM on the CPU"], rows)


def _settings(peer: Any) -> Iterator[tuple[str, Case, dict[str, Any]]]:
    """Words for a setting, the case that it is added to, and FBGEMM's arguments."""
    plain, compared = Case("sgd"), {name for name, _ in OPTIMIZERS.values()}
    for optimizer in peer.EmbOptimType:
        if optimizer.name not in compared:
            yield f"optimizer {optimizer.name} for EXACT_ROWWISE_ADAGRAD", Case(_ROWWISE), {"optimizer": optimizer}
    for precision in peer.SparseType:
        if precision.name not in ("FP32", "FP16"):
            yield f"weights_precision {precision.name}", plain, {"weights_precision": precision}
    yield "embedding_dim 6", plain, {"embedding_specs": _specs([(rows, 6) for rows, _ in POOLED], peer)}
    yield "no pooling, tables of several dims", plain, {"pooling_mode": peer.PoolingMode.NONE}
    decayed = [*(Case(rule, shared=True) for rule in ("sgd", "adagrad")), Case(_ROWWISE)]
    for case in decayed:
        for mode in ("L2", "DECOUPLE"):
            arguments = {"weight_decay": WEIGHT_DECAY, "weight_decay_mode": peer.WeightDecayMode[mode]}
            yield f"{case.name}: weight_decay_mode {mode}", case, arguments
    for mode, name, definition in (
        ("COUNTER", "counter_based_regularization", peer.CounterBasedRegularizationDefinition()),
        ("COWCLIP", "cowclip_regularization", peer.CowClipDefinition()),
        ("DECOUPLE_GLOBAL", "global_weight_decay", peer.GlobalWeightDecayDefinition()),
    ):
        arguments = {"weight_decay": WEIGHT_DECAY, "weight_decay_mode": peer.WeightDecayMode[mode], name: definition}
        yield f"{_ROWWISE}: weight_decay_mode {mode}", Case(_ROWWISE), arguments
    for case in (Case(_ROWWISE), Case(_ROWWISE, shared=True)):
        yield f"{case.name}: max_norm", case, {"max_norm": 0.1}
    for rule in OPTIMIZERS:
        yield f"{rule}, sum, fp16: stochastic_rounding", Case(rule, fp16=True), {"stochastic_rounding": True}


def _try(case: Case, peer: Any, arguments: dict[str, Any]) -> str:
    try:
        tbe = _tbe(case, peer, arguments)
    except Exception as error:
        return f"refused, {_one_line(error)}"
    try:
        after = _three_steps(tbe, case)
    except Exception as error:
        return f"fails in the first step, {_one_line(error)}"
    same = torch.equal(after, _three_steps(_tbe(case, peer, {}), case))
    return "taken, same bits as without it" if same else "taken"


def _three_steps(tbe: Any, case: Case) -> Tensor:
    """All weights afterwards; they begin as ones, in whatever type."""
    for table in tbe.split_embedding_weights():
        table.fill_(1)
    for step in range(3):
        batch = make_batch(case, step)
        torch.autograd.backward(_look_up_fbgemm(tbe, batch, batch.per_id_weights), batch.grad)
    return torch.cat([table.double().flatten() for table in tbe.split_embedding_weights()])


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:100]}"


def report(peer: Any) -> Report:
    """All that is printed, and whether every case is within its bounds."""
    lines, good = compare(peer)
    beyond = sum(f"| {BEYOND}" in line for line in lines)
    text = [
        versions(),
        "",
        f"Largest difference between shardwise and FBGEMM, in units of max(1, largest value of FBGEMM's tensor)."
        f" {len(CASES)} cases, {beyond} beyond a bound.",
        f"Bounds: fp32 {FP32_BOUNDS[1]:g} in step 1 and {FP32_BOUNDS[STEPS]:g} in step {STEPS}, fp16 2^-10 and 2^-9.",
        "",
        *lines,
        "",
        "What FBGEMM makes on the CPU of settings that the cases leave out:",
        "",
        *outside(peer),
        "",
    ]
    return Report("\n".join(text), good)


def run(options: argparse.Namespace) -> Report:
    """Train all cases on both sides, and print.

    Raises:
        ImportError: FBGEMM is not installed.
    """
    return report(libraries.fbgemm())
