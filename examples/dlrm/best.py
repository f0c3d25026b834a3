"""The weights of the best epoch, which a run ends with: that of the lowest test NE.

With a folder of checkpoints they are a checkpoint in its folder `best`, so a run that goes on still has them; otherwise
a copy in memory, of each rank's own shards, which doubles what the weights take (not the optimizer's states). The test
samples choose the epoch, so what it scores on them is a little better than on others.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from arguments import Options
from beside import folder_of
from torch import Tensor

from shardwise import DistributedModelParallel, checkpoint
from shardwise.data import Source


def best_epoch(epochs: Sequence[Mapping[str, float]]) -> int:
    """The number, from 0 on, of the first epoch with the lowest test NE; of the last one if none has an NE."""
    scores = [math.inf if math.isnan(epoch["test_ne"]) else epoch["test_ne"] for epoch in epochs]
    return scores.index(min(scores)) if min(scores) < math.inf else len(scores) - 1


class BestWeights:
    """Keeps the weights of the best epoch so far. All ranks call its methods together."""

    def __init__(self, args: Options, model: DistributedModelParallel, source: Source) -> None:
        folder = folder_of(args)
        self._folder = None if folder is None else folder / "best"
        self._model, self._source, self._asynchronous = model, source, args.checkpoint_async
        self._copy: list[Tensor] = []
        self._saving: checkpoint.Saving | None = None

    def keep(self, step: int) -> None:
        """The model as it is at this step is the best so far."""
        if self._folder is None:
            self._copy = [tensor.clone() for tensor in local_tensors(self._model)]
            return
        self.finish()
        # two, since what a killed run saved last may lie past the checkpoint that the next one goes on from
        self._saving = checkpoint.save(
            self._folder,
            self._model,
            step=step,
            extra={"dense": list(self._source.dense_names)},
            keep_last=2,
            asynchronous=self._asynchronous,
        )

    def finish(self) -> None:
        """Waits until what is being written is complete."""
        if self._saving is not None:
            self._saving.wait()
            self._saving = None

    def path(self, step: int) -> Path | None:
        """The checkpoint of the best weights; None where they are in memory alone."""
        if self._folder is None:
            return None
        # rank 0 looks, so that all ranks load the same
        at = [path for path in checkpoint.steps(self._folder) if int(path.name.split("-")[1].split(".")[0]) == step]
        shared = [at[-1] if at and dist.get_rank() == 0 else None]
        dist.broadcast_object_list(shared)
        return shared[0]

    @torch.no_grad()
    def restore(self, step: int) -> bool:
        """Makes the model what it was at this step; False where that was not kept."""
        path = self.path(step)
        if path is not None:
            checkpoint.load(path, self._model)
            return True
        for tensor, kept in zip(local_tensors(self._model), self._copy, strict=False):
            tensor.copy_(kept)
        return bool(self._copy)


def local_tensors(model: DistributedModelParallel) -> Iterator[Tensor]:
    """The weights that this rank holds, in the same order every time: dense layers, and its shards of tables."""
    for value in model.state_dict().values():
        if hasattr(value, "local_shards"):
            yield from (shard.tensor.detach() for shard in value.local_shards())
        else:
            yield value.detach()
