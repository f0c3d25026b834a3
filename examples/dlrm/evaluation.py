"""Evaluation of a model on the test samples, with its tables as they are and as int8."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from arguments import Options
from serving import CPU, export, table_bytes
from torch import nn

from shardwise import StreamingAUC, StreamingNE, reduce_metrics
from shardwise.data import Batch, Source
from shardwise.models import DLRMTrain

# 4 MB; the AUC of 10,000 samples is off by 1e-6 or so
AUC_BITS = 11


def read(batches: Iterator[Batch]) -> Iterator[Batch]:
    """The same batches; what the reader refuses on the way, such as a bad row, ends the run with its message."""
    try:
        yield from batches
    except ValueError as error:
        raise SystemExit(f"train.py: {error}") from None


@dataclass(frozen=True)
class Scores:
    """How a model does on all ranks' samples; the AUC is off by at most `auc_error`."""

    auc: float
    ne: float
    auc_error: float


@torch.no_grad()
def evaluate(model: nn.Module, batches: Iterator[Batch], device: torch.device) -> Scores:
    """The scores over all ranks, in memory that does not grow with the samples; all ranks call this together."""
    model.eval()
    ranking, entropy = StreamingAUC(AUC_BITS, device=device), StreamingNE(device=device)
    for batch in batches:
        _, (_, logits, labels) = model(batch.to(device))
        ranking.update(logits, labels)
        entropy.update(logits, labels)
    ranking, entropy = reduce_metrics((ranking, entropy))
    return Scores(ranking.compute(), entropy.compute(), ranking.error_bound())


def evaluate_quantized(args: Options, served: DLRMTrain, source: Source, share: dict[str, int]) -> dict[str, float]:
    """How the model `served`, its tables int8, does on the test samples; rank 0 exports it if that is asked for."""
    scores = evaluate(served, read(source.evaluate(args.batch_size, **share)), CPU)
    before, after = 4 * args.dim * sum(source.feature_rows.values()), table_bytes(served)
    if args.export is not None and dist.get_rank() == 0:
        export(served, source, args.export)
    return {
        "test_auc": scores.auc,
        "test_ne": scores.ne,
        "fp32_table_bytes": before,
        "table_bytes": after,
        "ratio": before / after,
    }
