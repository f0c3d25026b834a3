"""Quantize the same rows with FBGEMM on the CPU and with shardwise, look them up on both, compare bits and errors.

docs/evidence/beside_fbgemm_quant.md tells how to read what is printed, and keeps it.

Letters: R rows, D dim, T tables, B samples, N ids.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import shardwise
from shardwise.embeddings.quant import QuantizedTable, QuantizedTables
from shardwise.embeddings.tables.table_layout import LookupFeature
from shardwise.inference import quantize_inference_model
from shardwise.kernels import quantize_rows
from shardwise.perf.evidence.report import Report, Section, report_of
from shardwise.perf.suite import libraries
from shardwise.perf.suite.cases.quantized import Stored, inference_tables, stored
from shardwise.perf.suite.options import Options
from shardwise.quant import load_torchrec_state_dict, torchrec_state_dict

SHAPES, SEED = 40, 0
# outputs may be so many steps apart, after one unit in the last place of halves; an error of quantizing so large
STEPS, WORST = 1e-3, 1.0
# values of the same rows, and outputs of models with the same tables, may differ by so much of the largest
VALUES = 1e-6
# where bits differ on purpose
DIFFERENT = {
    "int8, fp16 scales": "FBGEMM rounds bias and scale to nearest; so do we, unless that cuts a row by more than half a"
    " step at an end: then our bias is rounded down and our scale up, and 256 levels reach from end to end"
}
# tables of a lookup, (rows, dim), and what is looked up in them
TABLES = [(1000, 64), (50, 8), (1, 128), (200, 100)]
SAMPLES, MEAN_LENGTH = 64, 10
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
MODEL_DTYPES = {
    "int8": torch.qint8, "int4": torch.quint4x2, "int2": torch.quint2x4, "fp16": torch.float16, "fp32": torch.float32,
}  # fmt: skip
# kinds of rows, from normal numbers [R, D]
ROWS: dict[str, Callable[[Tensor], Tensor]] = {
    "normal": lambda x: x,
    "trained": lambda x: 0.02 * x,
    "constant": lambda x: x[:, :1].expand_as(x).contiguous(),
    "zeros": torch.zeros_like,
    "zeros of both signs": lambda x: torch.where(x > 0, 0.0, -0.0),
    "around 10": lambda x: 10 + 0.01 * x,
    "a last place around 1": lambda x: 1 + 1e-7 * x,
    "small": lambda x: 1e-4 * x,
    "tiny": lambda x: 1e-8 * x,
    "subnormal": lambda x: 1e-41 * x,
    "near the end of fp16": lambda x: 8e3 * x,
    "beyond fp16": lambda x: 1e6 * x,
    "huge": lambda x: 1e30 * x,
    "one outlier": lambda x: torch.where(torch.arange(x.shape[1]) == x.shape[1] // 2, 1e4, x),
    "negative": lambda x: -x.abs() - 1,
    "few values": lambda x: x.round(),
    "an infinity": lambda x: torch.where(torch.arange(x.shape[1]) == x.shape[1] // 2, torch.inf, x),
}


def same_bits(a: Tensor, b: Tensor) -> Tensor:
    """Where elements are equal, or nan both; zeros are equal whatever their signs."""
    return (a == b) | (a.isnan() & b.isnan()) if a.is_floating_point() else a == b


class RowsFound(NamedTuple):
    """Of rows of one kind: how many, how many differ in payload or scales, and the largest errors.

    `ours` and `theirs` are the errors of quantizing in steps; `apart` is by how much of a row's largest value the sides
    differ in what they make of the same quantized rows. All of rows with finite values and scales, -1 without any.
    `refused` counts rows of tables that we raise for, of which FBGEMM makes scales that are not finite.
    """

    rows: int
    different: int
    refused: int
    ours: float
    theirs: float
    apart: float


def compare_rows(kind: str, how: Stored, shapes: int) -> RowsFound:
    """Quantize `shapes` tables of random sizes on both sides."""
    numbers = torch.Generator().manual_seed(SEED)
    rows = different = refused = 0
    worst = [-1.0, -1.0, -1.0]
    for _ in range(shapes):
        count, wanted = (int(torch.randint(1, most, (), generator=numbers)) for most in (100, 300))
        dim = how.dim(wanted)
        values = ROWS[kind](torch.randn(count, dim, generator=numbers))
        rows, peer = rows + count, how.theirs(values)
        finite = peer[1].isfinite().all(1) & values.isfinite().all(1)
        try:
            own = how.ours(values)
        except ValueError:
            if bool(finite.all()):
                raise
            refused += count
            continue
        same = same_bits(own[0], peer[0]).all(1) & same_bits(own[1], peer[1]).all(1)
        different += int((~same).sum())
        (own_values, back), (_, peer_values) = how.values(own, dim), how.values(peer, dim)
        step = peer[1][:, :1].float().abs()
        fits = finite & own[1].isfinite().all(1) & (step[:, 0] > 0)
        if bool(fits.any()):
            size = own_values.abs().amax(1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
            far = [
                (own_values - values).abs() / step,
                (peer_values - values).abs() / step,
                (own_values - back).abs() / size,
            ]
            worst = [max(old, float(new[fits].max())) for old, new in zip(worst, far, strict=True)]
    return RowsFound(rows, different, refused, *worst)


def rows_section(shapes: int) -> Section:
    """Bits of payload and scales, and the error of quantizing, for each kind of rows."""
    ways = stored()
    lines = [
        "## Rows", "",
        f"{shapes} tables of 1 to 99 rows x 1 to 299 columns a cell: have payload and scales the same bits, and the"
        " largest error of quantizing, in FBGEMM's steps (- where a scale is 0). Refused: shardwise raises, FBGEMM"
        " makes scales that are not finite.", "",
        f"| rows | {' | '.join(how.name for how in ways)} |", "| --- |" + " --- |" * len(ways),
    ]  # fmt: skip
    bad, apart = [], {how.name: 0.0 for how in ways}
    for kind in ROWS:
        cells = []
        for how in ways:
            result = compare_rows(kind, how, shapes)
            apart[how.name] = max(apart[how.name], result.apart)
            error = f"{result.ours:.2g}" if result.ours >= 0 else "-"
            if result.refused:
                cells.append(f"{100 * result.refused / result.rows:.0f} % refused")
                continue
            if not result.different:
                cells.append(f"same, {error}")
                continue
            cells.append(f"{100 * result.different / result.rows:.0f} % differ, {error} to {result.theirs:.2g}")
            if how.name not in DIFFERENT:
                bad.append(f"{kind} rows as {how.name}: {result.different} of {result.rows} differ")
            elif not result.ours <= max(result.theirs, WORST):
                bad.append(f"{kind} rows as {how.name}: error of {result.ours:.2g} steps, theirs {result.theirs:.2g}")
        lines.append(f"| {kind} | {' | '.join(cells)} |")
    lines += [
        "",
        "Back to values, the same quantized rows on both sides, largest difference as part of a row's largest value:",
    ]
    lines += [f"{', '.join(f'{name} {worst:.2g}' for name, worst in apart.items())}.", ""]
    lines += [line for name, why in DIFFERENT.items() for line in (f"{name}: {why}.", "")]
    bad += [f"{name}: values are {worst:.2g} of a row apart" for name, worst in apart.items() if not worst <= VALUES]
    return Section(lines, bad)


@dataclass(frozen=True)
class Lookup:
    """Ids of T features and B samples over tables of one format; `mode` is sum, mean or sequence."""

    format: str
    mode: str
    tables: list[tuple[int, int]]
    ids: Tensor
    offsets: Tensor
    per_id_weights: Tensor | None
    seed: int = 0

    def planes(self) -> list[tuple[Tensor, Tensor]]:
        """Payload and scales of each table."""
        numbers = torch.Generator().manual_seed(self.seed)
        drawn = [torch.randn(rows, dim, generator=numbers) for rows, dim in self.tables]
        return [quantize_rows(values, self.format) for values in drawn]

    def ours(self, dtype: torch.dtype) -> Tensor:
        """Our output, pooled [B, sum of dims] or a sequence [N, D]."""
        tables = [QuantizedTable(f"t{t}", *shape, self.format) for t, shape in enumerate(self.tables)]
        lookups = [LookupFeature(f"f{t}", t, self.mode == "mean") for t in range(len(tables))]
        group = QuantizedTables(tables, lookups)
        for t, (payload, scales) in enumerate(self.planes()):
            group.payload_of(t).copy_(payload)
            group.scales_of(t).copy_(scales)
        if self.mode == "sequence":
            return group.sequence(self.ids, self.offsets, dtype)
        return group.pooled(self.ids, self.offsets, self.per_id_weights, dtype)

    def theirs(self, peer: Any, dtype: torch.dtype) -> Tensor:
        """The output of FBGEMM's inference tables with the same rows."""
        tbe = inference_tables(peer, self.format, self.mode, self.tables, dtype, self.planes())
        output: Tensor = tbe(self.ids, self.offsets, self.per_id_weights)
        return output

    def steps(self) -> Tensor:
        """The largest quantization step of each output column, [sum of dims] or [1]; 1 for formats without scales."""
        largest = [
            scales[:, 0].float().abs().max() if scales.shape[1] else torch.ones(()) for _, scales in self.planes()
        ]
        if self.mode == "sequence":
            return torch.stack(largest).max()[None]
        return torch.cat([step.expand(dim) for step, (_, dim) in zip(largest, self.tables, strict=True)])


def lookup(format: str, mode: str, *, weighted: bool, index_dtype: torch.dtype) -> Lookup:
    """Bags of 0 to 2 * MEAN_LENGTH ids; a sequence reads tables of one dim."""
    tables = [(rows, TABLES[0][1]) for rows, _ in TABLES] if mode == "sequence" else TABLES
    numbers = torch.Generator().manual_seed(SEED)
    lengths = torch.randint(0, 2 * MEAN_LENGTH + 1, (len(tables) * SAMPLES,), generator=numbers)
    counts = lengths.view(len(tables), SAMPLES).sum(1).tolist()
    ids = [torch.randint(0, rows, (n,), generator=numbers) for (rows, _), n in zip(tables, counts, strict=True)]
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    weights = torch.rand(sum(counts), generator=numbers) if weighted else None
    return Lookup(format, mode, tables, torch.cat(ids).to(index_dtype), offsets.to(index_dtype), weights)


def beyond_rounding(a: Tensor, b: Tensor) -> Tensor:
    """How far two outputs are apart, less one unit in the last place of halves."""
    far = (a.float() - b.float()).abs()
    if a.dtype == torch.float32:
        return far
    exponent = torch.frexp(torch.maximum(a.float().abs(), b.float().abs())).exponent
    return (far - torch.finfo(a.dtype).eps * torch.exp2(exponent - 1.0)).clamp(min=0)


def lookups_section(peer: Any) -> Section:
    """Outputs of inference tables that hold the same rows."""
    shapes = ", ".join(f"{rows} x {dim}" for rows, dim in TABLES)
    lines = [
        "## Lookups", "",
        f"Tables of {shapes}; {SAMPLES} samples, 0 to {2 * MEAN_LENGTH} ids a bag, int64 and int32 ids. Outputs with"
        " the same bits, and how far the others are apart at most, in steps (1 for fp16 and fp32 tables).", "",
        f"| tables | lookup | {' | '.join(DTYPES)} |", "| --- | --- |" + " --- |" * len(DTYPES),
    ]  # fmt: skip
    bad = []
    for format in MODEL_DTYPES:
        for mode, weighted in (("sum", False), ("mean", False), ("sum", True), ("mean", True), ("sequence", False)):
            cells, name = [], f"{mode}, weighted" if weighted else mode
            for label, dtype in DTYPES.items():
                same, apart, beyond = 1.0, 0.0, 0.0
                for index_dtype in (torch.int64, torch.int32):
                    case = lookup(format, mode, weighted=weighted, index_dtype=index_dtype)
                    own_out, peer_out = case.ours(dtype), case.theirs(peer, dtype)
                    if own_out.dtype != peer_out.dtype or own_out.shape != peer_out.shape:
                        bad.append(
                            f"{format} {name}: {own_out.dtype} {list(own_out.shape)}, not {list(peer_out.shape)}"
                        )
                        continue
                    same = min(same, float(same_bits(own_out, peer_out).double().mean()))
                    apart = max(apart, float(((own_out.float() - peer_out.float()).abs() / case.steps()).max()))
                    beyond = max(beyond, float((beyond_rounding(own_out, peer_out) / case.steps()).max()))
                cells.append("all" if same == 1 else f"{100 * same:.1f} %, {apart:.2g}")
                # the order of adding is free, what a row's values are is not; FBGEMM's bf16 rounds ties up
                if not beyond <= STEPS or (mode == "sequence" and same < 1 and dtype != torch.bfloat16):
                    bad.append(f"{format} {name} to {label}: {apart:.2g} apart, {100 * same:.1f} % the same")
            lines.append(f"| {format} | {name} | {' | '.join(cells)} |")
    return Section([*lines, ""], bad)


def _collection(library: Any, weights: Sequence[Tensor]) -> Any:
    """A float collection of that library with these tables, the second averaged."""
    pooling = (library.PoolingType.SUM, library.PoolingType.MEAN)
    configs = [
        library.EmbeddingBagConfig(
            name=f"t{t}", num_embeddings=len(weight), embedding_dim=weight.shape[1], feature_names=[f"f{t}"],
            pooling=pooling[t % 2],
        )
        for t, weight in enumerate(weights)
    ]  # fmt: skip
    collection = library.EmbeddingBagCollection(tables=configs)
    for t, weight in enumerate(weights):
        collection.embedding_bags[f"t{t}"].weight.data.copy_(weight)
    return nn.Sequential(collection)


def models_section(peer: Any) -> Section:
    """`quantize_inference_model` of both libraries on the same float collection, and each other's state dicts."""
    numbers = torch.Generator().manual_seed(SEED)
    weights = [torch.randn(rows, dim, generator=numbers) for rows, dim in TABLES[:2]]
    lengths = torch.randint(0, 2 * MEAN_LENGTH + 1, (2 * SAMPLES,), generator=numbers)
    counts = lengths.view(2, SAMPLES).sum(1).tolist()
    ids = torch.cat([torch.randint(0, len(w), (n,), generator=numbers) for w, n in zip(weights, counts, strict=True)])
    keys = ["f0", "f1"]
    own_input, peer_input = (lib.KeyedJaggedTensor(keys=keys, values=ids, lengths=lengths) for lib in (shardwise, peer))
    lines = [
        "## Models", "",
        "One float collection through `quantize_inference_model` of both: largest error of the outputs against the"
        " float ones; have their state dicts the same bits; and, with the other's state loaded, how far the outputs are"
        " from the other's, as part of the largest.", "",
        "| tables | error of ours | error of theirs | state | ours from their state | theirs from our state |",
        "| --- | --- | --- | --- | --- | --- |",
    ]  # fmt: skip
    bad = []
    for format, dtype in MODEL_DTYPES.items():
        wanted = _collection(shardwise, weights)(own_input).values().detach()
        own_model, peer_model = _quantized(peer, weights, dtype)
        own_out, peer_out = own_model(own_input).values(), peer_model(peer_input).values()
        written = torchrec_state_dict(own_model, wrap={"int4": peer.UInt4Tensor, "int2": peer.UInt2Tensor})
        state = peer_model.state_dict()
        same = all(torch.equal(t.view(torch.uint8), state[name].view(torch.uint8)) for name, t in written.items())
        own_loaded, peer_loaded = _quantized(peer, [torch.zeros_like(weight) for weight in weights], dtype)
        load_torchrec_state_dict(own_loaded, state)
        # what its tables know of memory stays its own
        peer_loaded.load_state_dict(written, strict=False)
        loaded = [own_loaded(own_input).values() - peer_out, peer_loaded(peer_input).values() - own_out]
        apart = [float(off.abs().max() / wanted.abs().max()) for off in loaded]
        errors = [float((out - wanted).abs().max()) for out in (own_out, peer_out)]
        cells = [
            f"{errors[0]:.3g}",
            f"{errors[1]:.3g}",
            "same" if same else "differs",
            *(f"{off:.2g}" for off in apart),
        ]
        lines.append(f"| {format} | {' | '.join(cells)} |")
        if not same and f"{format}, fp16 scales" not in DIFFERENT:
            bad.append(f"{format} models: states differ")
        if not max(apart) <= VALUES:
            bad.append(f"{format} models: the other's state gives other outputs")
        if not errors[0] <= 1.1 * errors[1] + VALUES:
            bad.append(f"{format} models: error {errors[0]:.3g}, theirs {errors[1]:.3g}")
    return Section([*lines, ""], bad)


def _quantized(peer: Any, weights: Sequence[Tensor], dtype: torch.dtype) -> tuple[nn.Module, nn.Module]:
    """Quantized models of ours and of theirs with these tables."""
    return (
        quantize_inference_model(_collection(shardwise, weights), quantization_dtype=dtype),
        peer.quantize_inference_model(_collection(peer, weights), quantization_dtype=dtype),
    )


OPTIONS: Options = {
    "--shapes": {"type": int, "default": SHAPES, "help": "tables of each kind of rows"},
}


def run(options: argparse.Namespace) -> Report:
    """Compare and print.

    Raises:
        ImportError: TorchRec or FBGEMM is not installed.
    """
    peer = libraries.torchrec()
    return report_of([rows_section(options.shapes), lookups_section(peer), models_section(peer)])
