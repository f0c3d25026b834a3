"""Evaluation of a model on the test samples, with its tables as they are and as int8."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from arguments import Options
from serving import CPU, export, table_bytes
from torch import Tensor, nn

from shardwise.data import Batch, Source
from shardwise.models import DLRMTrain, auc, normalized_entropy


def read(batches: Iterator[Batch]) -> Iterator[Batch]:
    """The same batches; what the reader refuses on the way, such as a bad row, ends the run with its message."""
    try:
        yield from batches
    except ValueError as error:
        raise SystemExit(f"train.py: {error}") from None


@torch.no_grad()
def evaluate(model: nn.Module, batches: Iterator[Batch], device: torch.device) -> tuple[Tensor, Tensor]:
    """Logits and labels of all ranks' samples, on the CPU."""
    model.eval()
    # the empty starts serve a source without test samples
    logits, labels = [torch.empty(0)], [torch.empty(0)]
    for batch in batches:
        _, (_, batch_logits, batch_labels) = model(batch.to(device))
        logits.append(batch_logits.cpu())
        labels.append(batch_labels.cpu())
    return gather(torch.cat(logits)), gather(torch.cat(labels))


def gather(part: Tensor) -> Tensor:
    """The parts of all ranks, which may differ in length, end to end on the CPU."""
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, part.cpu())
    return torch.cat(parts)


def evaluate_quantized(args: Options, served: DLRMTrain, source: Source, share: dict[str, int]) -> dict[str, float]:
    """How the model `served`, its tables int8, does on the test samples; rank 0 exports it if that is asked for."""
    logits, labels = evaluate(served, read(source.evaluate(args.batch_size, **share)), CPU)
    before, after = 4 * args.dim * sum(source.feature_rows.values()), table_bytes(served)
    if args.export is not None and dist.get_rank() == 0:
        export(served, source, args.export)
    return {
        "test_auc": auc(logits, labels),
        "test_ne": normalized_entropy(logits, labels),
        "fp32_table_bytes": before,
        "table_bytes": after,
        "ratio": before / after,
    }
