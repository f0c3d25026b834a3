"""The trained model as it serves: its tables int8, in a folder that any process loads.

`train.py --export DIR` writes the folder at the end of a run, and from one of its checkpoints

    shardwise export DIR --model examples/dlrm/serving.py:from_checkpoint --checkpoint runs/1

does. `examples/serve` answers requests from it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from model import build_dlrm
from torch import Tensor, nn

from shardwise import DistributedModelParallel, KeyedJaggedTensor, checkpoint
from shardwise.data import Source
from shardwise.inference import Signature, export_model, quantize_inference_model
from shardwise.models import DLRMTrain

CPU = torch.device("cpu")


def quantize(model: DistributedModelParallel, source: Source, dim: int) -> tuple[DLRMTrain, dict[str, Tensor]]:
    """The trained model on the CPU of every rank, whole, its tables int8; and its weights as they were before.

    All ranks call this together. Tables that are too large for one process stay in a checkpoint, from which `shardwise
    export` takes them where there is the memory.

    Raises:
        SystemExit: a table is not finite, since training diverged.
    """
    whole = build_dlrm(source.feature_rows, len(source.dense_names), dim, CPU)
    weights = checkpoint.full_state_dict(model)
    whole.load_state_dict(weights)
    try:
        quantize_inference_model(whole)
    except ValueError as error:
        raise SystemExit(f"train.py: training diverged, try a smaller --lr: {error}") from None
    return whole, weights


def table_bytes(model: nn.Module) -> int:
    """Bytes of the tables, quantized or not."""
    return sum(tensor.nbytes for name, tensor in model.state_dict().items() if ".embedding_bags." in name)


def export(model: DLRMTrain, source: Source, folder: Path) -> None:
    """Write the folder; a model that is there is replaced."""
    signature = signature_of(list(source.feature_rows), source.dense_names)
    export_model(model, folder, signature=signature, call=answer, force=True)


def from_checkpoint(manifest: checkpoint.Manifest) -> tuple[DLRMTrain, Signature, Callable[..., object]]:
    """The model of a checkpoint that `train.py` saved, its weights yet to be loaded: for `shardwise export`."""
    tables = list(manifest.tables.values())
    rows = {table.table.removeprefix("t_"): table.rows for table in tables}
    dense = manifest.extra["dense"]
    return build_dlrm(rows, len(dense), tables[0].dim, CPU), signature_of(list(rows), dense), answer


def signature_of(features: Sequence[str], dense: Sequence[str]) -> Signature:
    """The names of what the model takes and says."""
    return Signature(features=features, dense=dense, outputs=["logit", "click_probability"])


def answer(model: nn.Module, features: KeyedJaggedTensor, dense: Tensor | None) -> tuple[Tensor, Tensor]:
    """Logits [B] and probabilities of a click of a batch that has no labels."""
    assert isinstance(model, DLRMTrain)
    assert dense is not None
    logits = model.model(dense, features).squeeze(1)
    return logits, torch.sigmoid(logits)
