"""Cases of the suite: collections as modules, from KeyedJaggedTensor to what comes out, beside those of the peers.

"EBC step, criteo shrink 128" is TorchRec's own benchmark (its benchmarks/ebc_benchmarks.py): `kjt.to(device)`, forward,
the sum of all pooled columns put side by side by name, backward, with SGD in it. Each step of each side makes its
KeyedJaggedTensor anew from the same tensors.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

import shardwise
from shardwise.inference import quantize_inference_model
from shardwise.perf.suite.case import (
    OURS,
    Case,
    Ready,
    Setting,
)
from shardwise.perf.suite.cases.module_sides import (
    PEERS,
    Batch,
    Setup,
    assert_forwards,
    assert_steps,
    batches_of,
    configs_of,
    expected_output,
    fill,
    fit,
    forward_bytes,
    forward_of,
    keyed,
    sides_of,
    step_bytes,
    step_of,
    unfused_side,
)
from shardwise.perf.suite.libraries import torchrec
from shardwise.perf.suite.peers import assert_close
from shardwise.perf.suite.workloads import (
    EBC,
    FBGEMM_DEFAULT,
    Workload,
    equal,
    tiny,
)

# distinct batches, as TorchRec's benchmark has them
BATCHES = 10
EVERYWHERE = frozenset({"cpu", "cuda", "full", "ebc"})
LARGE = frozenset({"cuda", "full"})

PRODUCTION = equal("production", 32, 1_000_000, 128, 8192, 20)
# those of perf/results/cpu/beside_fbgemm.json, besides FBGEMM's default
BESIDE_FBGEMM = [
    equal(f"26 x 100k x {dim}, batch {batch}, {length} id{'s' * (length > 1)}", 26, 100_000, dim, batch, length)
    for dim, batch, length in product((64, 128), (2048, 8192), (1, 20))
]
SINGLE_HOT = next(
    workload for workload in BESIDE_FBGEMM if (workload.dim, workload.batch, workload.lengths[0]) == (128, 8192, 1)
)
SEQUENCE = equal("8 x 100k x 64, batch 512", 8, 100_000, 64, 512, 10)
# so little for kernels that a step is what Python and torch's dispatch take
ONE_SAMPLE = equal("one sample of 26 keys", 26, 1000, 4, 1, 1)

FORWARD_FLOOR = "ids: a row for each id, ids, lengths and the output once"
STEP_FLOOR = (
    "ids: a row for each id forward, a gradient row for each id backward, touched rows and states twice, 96 bytes an id"
    " of the sort"
)

# of a row, whose values lie in a range of LARGEST: what the nearest of 256 levels may be off, and rounding of the scale
LARGEST, STEPS = 0.1, 0.75
QUANTIZED_FLOOR = "ids: a row of bytes with scale and bias for each id, ids, lengths and the output once"
LookUp = Callable[[Batch], Tensor]


@dataclass(frozen=True)
class _Kind:
    """The properties that set a case apart.

    Attributes:
        setup: of the sides; its workload is cut to fit.
        forward: only the forward, under no_grad.
        summed: the loss is the sum of the output; else the output has a given gradient.
        unfused: the peer is TorchRec's plain collection with a dense optimizer, which has a gradient as large as the
            tables.
        captured: a CUDA graph can record ours.
        copies: tables of a side that fit in its part of the memory: more where gradients or states are as large.
    """

    setup: Setup
    forward: bool = False
    summed: bool = False
    unfused: bool = False
    captured: bool = False
    copies: float = 1.0


def make(setting: Setting, *, kind: _Kind) -> Ready:
    """A forward or a training step of a collection."""
    makers = {"torchrec": unfused_side} if kind.unfused else PEERS
    if not kind.setup.pooled and setting.device == "cpu":
        # TorchRec's fused collection of sequences refuses the CPU
        makers = {name: make for name, make in makers.items() if name != "torchrec"}
    peers = {name: makers[name] for name in sorted(setting.peers & makers.keys())}
    setup, notes = _fitted(setting, kind, len(peers))
    batches = batches_of(setup, 2 if setting.small else BATCHES)
    sides = sides_of(setup, peers)
    grads = [None if kind.summed else _upstream(setup, batch) for batch in batches]

    def check() -> None:
        if kind.forward:
            assert_forwards(setup, sides, batches[0])
        else:
            assert_steps(setup, sides, batches[0], grads[0])

    def close() -> None:
        sides.clear()
        if not setting.small:
            # modules and their optimizers hold each other, gigabytes at a time
            gc.collect()

    def call(who: str, n: int) -> object:
        side = sides[who]
        return forward_of(side, batches[n]) if kind.forward else step_of(side, batches[n], grads[n])

    count = forward_bytes if kind.forward else step_bytes
    calls = {who: [partial(call, who, n) for n in range(len(batches))] for who in sides}
    return Ready(
        calls=calls.pop(OURS),
        check=check,
        bytes_moved=sum(count(setup, batch) for batch in batches) / len(batches),
        floor=FORWARD_FLOOR if kind.forward else STEP_FLOOR,
        peers=calls,
        graph=kind.captured,
        close=close,
        notes=notes,
    )


def _fitted(setting: Setting, kind: _Kind, peers: int) -> tuple[Setup, dict[str, object]]:
    """The setup at the setting's device and size, and what has to be known of it."""
    setup = kind.setup
    if setting.small:
        workload = tiny(setup.workload)
    else:
        workload = fit(setup.workload, setting.memory_bytes, 1 + peers, copies=kind.copies)
    notes: dict[str, object] = {"cut": workload.cut}
    if not kind.forward and not kind.unfused:
        rowwise = setup.rule == "rowwise_adagrad"
        notes["optimizer of torch"] = f"torch.optim.{'Adagrad' if rowwise else 'SGD'}, sparse gradients"
    return replace(setup, workload=workload, device=setting.device), notes


def _upstream(setup: Setup, batch: Batch) -> Tensor:
    """A gradient for the output of a batch."""
    work = setup.workload
    shape = (work.batch, work.dim * len(work.rows)) if setup.pooled else (batch.ids.shape[0], work.dim)
    return torch.randn(shape, generator=torch.Generator().manual_seed(5)).to(setup.device)


def _benchmark(shrink: int, **options: Any) -> Setup:
    """TorchRec's benchmark."""
    return Setup(EBC[shrink], **{"rule": "sgd", "joined": True, "on_host": True, **options})


def _trained(workload: Workload, suites: frozenset[str], *, slow: bool = False) -> list[Case]:
    """Forward, and forward with backward and rowwise Adagrad."""
    name = workload.name
    return [
        Case(f"EBC forward, {name}", "module", partial(make, kind=_Kind(Setup(workload, rule=""), forward=True)),
             suites, slow=slow),
        Case(f"EBC step, {name}", "module",
             partial(make, kind=_Kind(Setup(workload, rule="rowwise_adagrad"), copies=1.25)), suites, slow=slow),
    ]  # fmt: skip


def make_quantized(setting: Setting, *, workload: Workload, batches: int = BATCHES) -> Ready:
    """The forward of collections quantized to int8."""
    # quantized one table after the other, beside the float tables of one side
    peers = (
        sorted(setting.peers & QUANTIZED_PEERS.keys())
        if setting.device == "cpu"
        else sorted(setting.peers & {"torchrec"})
    )
    cut = tiny(workload) if setting.small else fit(workload, setting.memory_bytes, 2 + len(peers) // 2)
    setup = Setup(cut, device=setting.device, rule="")
    inputs = batches_of(setup, 2 if setting.small else batches)
    floats = _float_tables(setup)
    expected = expected_output(setup, floats, inputs[0])
    sides = {OURS: _shardwise(setup, floats), **{name: QUANTIZED_PEERS[name](setup, floats) for name in peers}}
    del floats

    def check() -> None:
        most = max(float(offsets.diff().max()) for _, offsets in inputs[0].by_table)
        tolerance = STEPS * most * LARGEST / 255 / float(expected.abs().max())
        for who, look_up in sides.items():
            assert_close(look_up(inputs[0]), expected, tolerance, f"output of {who}")

    def call(who: str, n: int) -> Tensor:
        return sides[who](inputs[n])

    moved = sum(_bytes(cut, batch) for batch in inputs) / len(inputs)
    calls = {who: [partial(call, who, n) for n in range(len(inputs))] for who in sides}
    return Ready(
        calls=calls.pop(OURS), check=check, bytes_moved=moved, floor=QUANTIZED_FLOOR,
        peers=calls, graph=False, close=sides.clear, notes={"cut": cut.cut},
    )  # fmt: skip


def _bytes(work: Workload, batch: Batch) -> float:
    # with fp16 scale and bias
    rows = batch.ids.shape[0] * (work.dim + 4)
    return rows + work.batch * len(work.rows) * work.dim * 4 + batch.ids.nbytes + batch.lengths.nbytes


def _float_tables(setup: Setup) -> list[Tensor]:
    tables = [torch.empty(rows, setup.workload.dim, device=setup.device) for rows in setup.workload.rows]
    fill(tables)
    return tables


def _quantized(setup: Setup, floats: Sequence[Tensor], library: Any, quantize: Any) -> LookUp:
    """A float collection of the library through its `quantize_inference_model`."""
    collection = library.EmbeddingBagCollection(tables=configs_of(library, setup), device=torch.device(setup.device))
    with torch.no_grad():
        for t, table in enumerate(floats):
            collection.embedding_bags[f"t{t}"].weight.copy_(table)
    made = quantize(nn.Sequential(collection), quantization_dtype=torch.qint8)
    look_up = keyed(setup, library, made)

    @torch.no_grad()
    def forward(batch: Batch) -> Tensor:
        return look_up(batch)

    return forward


def _shardwise(setup: Setup, floats: Sequence[Tensor]) -> LookUp:
    return _quantized(setup, floats, shardwise, quantize_inference_model)


def _torchrec(setup: Setup, floats: Sequence[Tensor]) -> LookUp:
    return _quantized(setup, floats, torchrec(), torchrec().quantize_inference_model)


def _torch(setup: Setup, floats: Sequence[Tensor]) -> LookUp:
    """The ops that torch.ao's quantized EmbeddingBag calls, a table at a time; scales are fp32."""
    ops: Any = torch.ops.quantized
    packed = [ops.embedding_bag_byte_prepack(table) for table in floats]

    def look_up(batch: Batch) -> Tensor:
        pooled = [
            ops.embedding_bag_byte_rowwise_offsets(rows, ids, offsets, False, 0, False, None, None, True)
            for rows, (ids, offsets) in zip(packed, batch.by_table, strict=True)
        ]
        return torch.cat(pooled, dim=1)

    return look_up


QUANTIZED_PEERS: dict[str, Callable[[Setup, Sequence[Tensor]], LookUp]] = {"torch": _torch, "torchrec": _torchrec}


CASES: Sequence[Case] = (
    *(
        Case(f"EBC step, {EBC[shrink].name}", "module",
             partial(make, kind=_Kind(_benchmark(shrink), summed=True)),
             EVERYWHERE if shrink == 128 else frozenset({"full", "ebc"}))
        for shrink in EBC
    ),
    Case("EBC step, criteo shrink 128, captured", "module",
         partial(make, kind=_Kind(_benchmark(128, on_host=False), summed=True, captured=True)),
         frozenset({"cuda", "full", "ebc"}), devices=frozenset({"cuda"})),
    Case("EBC step, criteo shrink 128, dense gradients", "module",
         partial(make, kind=_Kind(_benchmark(128), summed=True, unfused=True, copies=1.5)),
         frozenset({"ebc"}), slow=True),
    Case("EBC step, one sample of 26 keys", "module",
         partial(make, kind=_Kind(Setup(ONE_SAMPLE, joined=True, on_host=True), summed=True)), EVERYWHERE),
    *_trained(FBGEMM_DEFAULT, frozenset({"cpu", "cuda", "full"})),
    *(
        case
        for workload in BESIDE_FBGEMM
        for case in _trained(
            workload, frozenset({"cpu", "cuda", "full"} if workload is SINGLE_HOT else {"full"}),
            slow=workload.batch * workload.lengths[0] > 100_000,
        )
    ),
    *_trained(PRODUCTION, LARGE, slow=True),
    Case(f"quantized EBC forward, {FBGEMM_DEFAULT.name}, int8", "module",
         partial(make_quantized, workload=FBGEMM_DEFAULT)),
    Case(f"EC step, {SEQUENCE.name}", "module",
         partial(make, kind=_Kind(Setup(SEQUENCE, rule="sgd", pooled=False), summed=True))),
)  # fmt: skip
