"""A quantized collection of ours, TorchRec's and torch's own quantized bags, from the same float tables, int8.

Shapes: T tables of R_t rows x D columns, B samples, N ids; outputs [B, T * D] fp32.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import shardwise
from shardwise.inference import quantize_inference_model
from shardwise.perf.evidence.module_checks import assert_close, expected_output
from shardwise.perf.evidence.module_sides import (
    Batch,
    Setup,
    batches_of,
    configs_of,
    fill,
    fit,
    keyed,
)
from shardwise.perf.suite.case import OURS, Ready, Setting
from shardwise.perf.suite.workloads import Workload, tiny

LookUp = Callable[[Batch], Tensor]
# of a row, whose values lie in a range of LARGEST: what the nearest of 256 levels may be off, and rounding of the scale
LARGEST, STEPS = 0.1, 0.75
FLOOR = "ids: a row of bytes with scale and bias for each id, ids, lengths and the output once"


def make(setting: Setting, *, workload: Workload, batches: int = 10) -> Ready:
    """The forward of collections quantized to int8."""
    # quantized one table after the other, beside the float tables of one side
    peers = sorted(setting.peers & PEERS.keys()) if setting.device == "cpu" else sorted(setting.peers & {"torchrec"})
    cut = tiny(workload) if setting.small else fit(workload, setting.memory_bytes, 2 + len(peers) // 2)
    setup = Setup(cut, device=setting.device, rule="")
    inputs = batches_of(setup, 2 if setting.small else batches)
    floats = _float_tables(setup)
    expected = expected_output(setup, floats, inputs[0])
    sides = {OURS: _ours(setup, floats), **{name: PEERS[name](setup, floats) for name in peers}}
    del floats

    def check() -> None:
        most = max(float(offsets.diff().max()) for _, offsets in inputs[0].by_table)
        tolerance = STEPS * most * LARGEST / 255 / float(expected.abs().max())
        for who, look_up in sides.items():
            assert_close(look_up(inputs[0]), expected, f"output of {who}", tolerance)

    def call(who: str, n: int) -> Tensor:
        return sides[who](inputs[n])

    moved = sum(_bytes(cut, one) for one in inputs) / len(inputs)
    calls = {who: [partial(call, who, n) for n in range(len(inputs))] for who in sides}
    return Ready(
        calls=calls.pop(OURS), check=check, bytes_moved=moved, floor=FLOOR,
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


def _ours(setup: Setup, floats: Sequence[Tensor]) -> LookUp:
    return _quantized(setup, floats, shardwise, quantize_inference_model)


def _torchrec(setup: Setup, floats: Sequence[Tensor]) -> LookUp:
    quantize = importlib.import_module("torchrec.inference.modules").quantize_inference_model
    return _quantized(setup, floats, importlib.import_module("torchrec"), quantize)


def _torch(setup: Setup, floats: Sequence[Tensor]) -> LookUp:
    """What torch.ao's quantized EmbeddingBag calls, a table at a time; scales are fp32."""
    ops: Any = torch.ops.quantized
    packed = [ops.embedding_bag_byte_prepack(table) for table in floats]

    def look_up(batch: Batch) -> Tensor:
        found = [
            ops.embedding_bag_byte_rowwise_offsets(rows, ids, offsets, False, 0, False, None, None, True)
            for rows, (ids, offsets) in zip(packed, batch.by_table, strict=True)
        ]
        return torch.cat(found, dim=1)

    return look_up


PEERS: dict[str, Callable[[Setup, Sequence[Tensor]], LookUp]] = {"torch": _torch, "torchrec": _torchrec}
