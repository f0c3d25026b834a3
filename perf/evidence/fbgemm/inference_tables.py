"""FBGEMM's inference tables beside ours: the same bytes in both, random mixes of tables, and their outputs compared.

docs/evidence/beside_fbgemm_inference.md tells how to read what is printed, and keeps it.

Shapes: T tables, F features, N ids.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from shardwise.fbgemm.tables import IntNBitTableBatchedEmbeddingBagsCodegen
from shardwise.perf.evidence.report import Report, Section, grid, report_of
from shardwise.perf.suite.options import Options

from .calls import Draw

TYPES = ("FP32", "FP16", "FP8", "INT8", "INT4", "INT2")
OUTPUTS = ("FP32", "FP16", "BF16", "INT8")
MODES = ("SUM", "MEAN", "NONE")
# relative and absolute distance allowed: sums of fp32, which FBGEMM adds with products in one rounding, and one
# rounding to a half
BOUNDS = {torch.float32: 1e-6, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}

OPTIONS: Options = {
    "--mixes": {"type": int, "default": 3000, "help": "mixes of tables"},
    "--first": {"type": int, "default": 0, "help": "the number of the first mix"},
}


@dataclass
class Mix:
    """Tables and a batch: rows, dims, types and remappings [T], the table of each feature, and further arguments."""

    rows: list[int]
    dims: list[int]
    types: list[str]
    table_of: list[int]
    mode: str
    output: str
    arguments: dict[str, Any]
    remappings: list[Tensor | None] | None
    check: str
    batch: tuple[Tensor, Tensor, Tensor | None]

    @property
    def ids_of(self) -> list[int]:
        """[F] ids that each feature's table takes."""
        return [_ids_of(self.rows[t], self.remappings[t] if self.remappings else None) for t in self.table_of]

    @property
    def kind(self) -> str:
        """The row of the table that is printed."""
        weighted = ", weighted" if self.batch[2] is not None and self.mode != "NONE" else ""
        return f"{self.mode.lower()}{weighted} to {self.output.lower()}"

    @property
    def undefined(self) -> str:
        """What FBGEMM does not do right of it, in a few words; empty where it does."""
        pruned = self.remappings is not None and any(m is not None and bool((m == -1).any()) for m in self.remappings)
        if self.output == "INT8" and self.mode != "NONE":
            return "pooled uint8 outputs"
        if self.output == "INT8" and pruned:
            return "uint8 rows of pruned ids"
        if "FP8" in self.types and pruned:
            return "pruned ids of fp8 tables"
        return ""

    @property
    def same_bits(self) -> bool:
        """Whether outputs have to have the same bits: values of rows, and sums of them without weights."""
        return self.output in ("FP32", "FP16", "INT8") and self.kind.startswith(("sum to", "none"))


def draw_mix(seed: int) -> Mix:
    """The mix of this number."""
    draw = Draw("inference tables", seed)
    tables, mode = draw.between(1, 5), draw.choice(MODES)
    output = draw.choice((*OUTPUTS[:3], *OUTPUTS))
    types = [draw.choice(("INT8",) if output == "INT8" else TYPES) for _ in range(tables)]
    dims = [4 * draw.between(1, 12) for _ in range(tables)]
    if mode == "NONE":
        dims = [dims[0]] * tables
    rows = [draw.between(1, 12) for _ in range(tables)]
    # FBGEMM's remapping is by feature, so that it is right where features and tables are the same
    remappings = [_remapping(draw, count) for count in rows] if draw.coin(0.3) else None
    table_of = [*range(tables), *(draw.below(tables) for _ in range(draw.below(3) if remappings is None else 0))]
    ids_of = [_ids_of(rows[t], remappings[t] if remappings else None) for t in table_of]
    check = draw.choice(("WARNING", "IGNORE", "FATAL", "NONE"))
    bad = check in ("WARNING", "IGNORE") and draw.coin(0.2)
    dtype = draw.index_dtype()
    lengths = draw.lengths(len(table_of) * draw.between(1, 5), dtype=dtype)
    batch = len(lengths) // len(table_of)
    ids = [
        draw.choice((-2, ids_of[bag // batch], 99)) if bad and draw.coin(0.2) else draw.below(ids_of[bag // batch])
        for bag, length in enumerate(lengths.tolist())
        for _ in range(length)
    ]
    arguments: dict[str, Any] = {"indices_dtype": dtype, "cacheline_alignment": draw.coin(0.8)}
    if draw.coin():
        arguments["row_alignment"] = draw.choice((1, 4, 16))
    if draw.coin(0.3):
        arguments |= {"fp8_exponent_bits": 5, "fp8_exponent_bias": 15}
    arguments["use_array_for_index_remapping"] = draw.coin()
    weights = draw.floats(len(ids), scale=1.0) if draw.coin(0.3) else None
    indices = torch.tensor(ids, dtype=dtype)
    return Mix(
        rows,
        dims,
        types,
        table_of,
        mode,
        output,
        arguments,
        remappings,
        check,
        (indices, draw.offsets(lengths), weights),
    )


def _ids_of(rows: int, remapping: Tensor | None) -> int:
    return rows if remapping is None else len(remapping)


def _remapping(draw: Draw, rows: int) -> Tensor | None:
    """Of more ids than rows: to each row one id, in any order, and -1 to all others."""
    if draw.coin(0.3):
        return None
    ids = rows + draw.below(8)
    to = torch.full((ids,), -1, dtype=torch.int32)
    to[draw.permutation(ids)[:rows]] = torch.arange(rows, dtype=torch.int32)
    return to


def build(mix: Mix, module: Any, upstream: Any) -> Any:
    """Tables of this mix by the class `module`, with upstream's enums; rows are drawn by the mix alone."""
    place = upstream.EmbeddingLocation.HOST
    made = module(
        [
            (f"t{t}", rows, dim, upstream.SparseType[kind], place)
            for t, (rows, dim, kind) in enumerate(zip(mix.rows, mix.dims, mix.types, strict=True))
        ],
        feature_table_map=mix.table_of,
        pooling_mode=upstream.PoolingMode[mix.mode],
        output_dtype=upstream.SparseType[mix.output],
        bounds_check_mode=upstream.BoundsCheckMode[mix.check],
        index_remapping=mix.remappings,
        device="cpu",
        **mix.arguments,
    )
    made.initialize_weights()
    numbers = torch.Generator().manual_seed(sum(mix.rows) + 31 * sum(mix.dims))
    for (rows, scales), kind, dim in zip(made.split_embedding_weights(), mix.types, mix.dims, strict=True):
        rows.copy_(_bytes(rows, kind, dim, numbers))
        if scales is not None:
            scales.copy_((0.01 * torch.randn(len(rows), 2, generator=numbers)).half().view(torch.uint8))
    return made


def _bytes(rows: Tensor, kind: str, dim: int, numbers: torch.Generator) -> Tensor:
    if kind in ("FP32", "FP16"):
        values = torch.rand(len(rows), dim, generator=numbers) - 0.5
        return values.to(torch.float32 if kind == "FP32" else torch.float16).view(torch.uint8)
    codes = torch.randint(0, 256, rows.shape, generator=numbers, dtype=torch.uint8)
    # numbers below 2 whatever the bits of their exponent
    return codes & 0xBF if kind == "FP8" else codes


def compare(mix: Mix, upstream: Any) -> tuple[list[str], bool, float]:
    """Faults, whether outputs have the same bits, and how far they are apart."""
    theirs, ours = (
        build(mix, module, upstream)
        for module in (upstream.IntNBitTableBatchedEmbeddingBagsCodegen, IntNBitTableBatchedEmbeddingBagsCodegen)
    )
    faults = _layout_faults(theirs, ours)
    # FBGEMM writes into ids and offsets that it corrects
    outputs = [side(*(None if each is None else each.clone() for each in mix.batch)) for side in (ours, theirs)]
    a, b = outputs
    if a.dtype != b.dtype or a.shape != b.shape:
        return [*faults, f"{a.dtype} {list(a.shape)} for {b.dtype} {list(b.shape)}"], False, 0.0
    if mix.undefined:
        return faults, False, 0.0
    same = torch.equal(a.nan_to_num(), b.nan_to_num()) if a.is_floating_point() else torch.equal(a, b)
    if mix.same_bits and not same:
        faults.append("bits differ")
    far = (a.double() - b.double()).abs() / b.double().abs().clamp(min=1)
    apart = float(far.max()) if far.numel() else 0.0
    if not apart <= BOUNDS.get(a.dtype, 0.0):
        faults.append(f"{apart:.2g} apart")
    return faults, same, apart


def _layout_faults(theirs: Any, ours: Any) -> list[str]:
    """Where state dicts, buffers or views of rows differ."""
    faults = []
    pairs = {"state dict": (theirs.state_dict(), ours.state_dict())}
    for name in ("weights_host", "weights_dev", "weights_offsets", "weights_placements"):
        pairs[name] = ({name: getattr(theirs, name)}, {name: getattr(ours, name)})
    for mode in (0, 1, 2):
        views = [_views(side, mode) for side in (theirs, ours)]
        pairs[f"rows, mode {mode}"] = (views[0], views[1])
    for name, (a, b) in pairs.items():
        same = list(a) == list(b) and all(a[key].dtype == b[key].dtype and _equal(a[key], b[key]) for key in a)
        if not same:
            faults.append(f"{name} differs")
    return faults


def _views(side: Any, mode: int) -> dict[str, Tensor]:
    try:
        splits: Sequence[Any] = side.split_embedding_weights_with_scale_bias(mode)
    except RuntimeError:
        # halves that do not begin on two bytes are no view
        return {}
    return {
        f"{t} {part}": each for t, split in enumerate(splits) for part, each in enumerate(split) if each is not None
    }


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(
        a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8)
    )


def run(options: argparse.Namespace) -> Report:
    """Compare.

    Raises:
        ImportError: FBGEMM is not installed.
    """
    upstream = import_module("fbgemm_gpu.split_table_batched_embeddings_ops_inference")
    calls, same, apart, bad = Counter[str](), Counter[str](), dict[str, float](), []
    skipped, types, others = Counter[str](), Counter[str](), Counter[str]()
    for seed in range(options.first, options.first + options.mixes):
        mix = draw_mix(seed)
        faults, equal, far = compare(mix, upstream)
        bad += [f"mix {seed}, {mix.kind}: {fault}" for fault in faults]
        types.update(mix.types)
        others["pruned"] += mix.remappings is not None
        others["with ids out of range"] += mix.check in ("WARNING", "IGNORE") and _is_bad(mix)
        if mix.undefined:
            skipped[mix.undefined] += 1
            continue
        calls[mix.kind] += 1
        same[mix.kind] += equal
        apart[mix.kind] = max(apart.get(mix.kind, 0.0), far)
    lines = [
        f"{options.mixes} mixes of 1 to 5 tables ({', '.join(f'{types[name]} {name.lower()}' for name in TYPES)});"
        f" {', '.join(f'{count} {what}' for what, count in others.items())}.",
        "", *grid(
            ["lookup", "mixes", "same bits", "largest difference"],
            [[kind, calls[kind], same[kind], f"{apart[kind]:.1e}" if apart[kind] else "0"] for kind in sorted(calls)],
        ), "", "Outputs not compared, by what [differences.md](../reference/differences.md) says:", "",
        *grid(["difference", "mixes"], skipped.most_common()),
    ]  # fmt: skip
    return report_of([Section(lines, bad)])


def _is_bad(mix: Mix) -> bool:
    indices, offsets, _ = mix.batch
    sizes = mix.ids_of
    batch = (len(offsets) - 1) // len(sizes)
    per_feature = offsets[::batch].diff()
    most = torch.tensor(sizes).repeat_interleave(per_feature)
    return bool(((indices < 0) | (indices >= most)).any())
