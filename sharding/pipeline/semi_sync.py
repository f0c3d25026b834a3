"""Semi-synchronous training: rows of the next batch are looked up before the update of this one.

From `start_batch` on, the rows of batch i + 1 leave their tables between forward and backward of batch i, and their way
to the ranks that asked is hidden by the backward. They lack the update of batch i; docs/concepts/pipelines.md has a
table of what each batch sees.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn

from shardwise.sharding.dmp.unwrap import get_unwrapped_module
from shardwise.sharding.modules.placement import sharded_collections

from .ahead import in_step
from .arguments import EmbeddingTrainPipelineContext
from .feed import Fetched
from .sparse_dist import TrainPipelineSparseDist

In = TypeVar("In")
Out = TypeVar("Out")


class TrainPipelineSemiSync(TrainPipelineSparseDist[In, Out]):
    """Looks the next batch up before the update of this one; the exact loop, that much less fresh.

    Batches count from 0, those whose step was made; `reset` begins anew. A lookup of batch b sees the updates of
    batches 0 ... b - 2 if b > `start_batch`, else (and of the first batch of an iterator, or after one that failed) all
    before. Updates themselves are made one after another, by gradients of what was looked up. Modules whose ids are
    mapped to rows, or whose weights are made by feature processors, are looked up in their step, with a warning.

    Args as `TrainPipelineSparseDist`, and:
        start_batch: the first batch after whose forward, and before whose update, the next one is looked up.
        stash_gradients: from then on also have the optimizer of the dense layers step with the gradients of the batch
            before: a forward of batch b then sees steps of batches 0 ... b - 2. Batch `start_batch` makes no step, and
            the gradients of the last batch wait for the next.
        strict: refuse an optimizer that trains tables of the pipelined modules by their gradients.

    Raises:
        ValueError: `start_batch` is negative, or the optimizer is refused by `strict`.
    """

    _batches_ahead = 2
    _default_context_type = EmbeddingTrainPipelineContext

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device | str,
        execute_all_batches: bool = True,
        apply_jit: bool = False,
        start_batch: int = 900,
        stash_gradients: bool = False,
        pipeline_postproc: bool = True,
        custom_model_fwd: Callable[[In], tuple[Tensor, Out]] | None = None,
        strict: bool = False,
        dmp_collection_sync_interval_batches: int | None = 1,
        enable_inplace_copy_batch: bool = False,
        free_features_storage_early: bool = False,
        clear_data_dist_inputs: bool = False,
    ) -> None:
        if start_batch < 0:
            raise ValueError(f"start_batch: must not be negative, got {start_batch}")
        super().__init__(
            model, optimizer, device, execute_all_batches, apply_jit, None, pipeline_postproc, custom_model_fwd,
            dmp_collection_sync_interval_batches, True, enable_inplace_copy_batch, free_features_storage_early,
            clear_data_dist_inputs,
        )  # fmt: skip
        self._start_batch, self._stash_gradients, self._strict = start_batch, stash_gradients, strict
        # gradients of the batch before, once there was one whose step waits
        self._gradients: list[tuple[nn.Parameter, Tensor | None]] | None = None
        self._warned: set[str] = set()
        self._validate_optimizer()

    def is_semi_sync(self) -> bool:
        """Whether the next batch is looked up before the update of the one whose turn it is; the same on all ranks."""
        return self._steps >= self._start_batch

    def start_embedding_lookup(self, batch: In | None, context: EmbeddingTrainPipelineContext) -> None:
        """Look a batch up whose ids were sent: of all its tables, as they are now. All ranks in the same order.

        Raises:
            ValueError: the context is of no batch under way.
        """
        if batch is None:
            return
        fetched = self._fetched_of(context)
        for one in fetched.started:
            self._warn(one.call.name, in_step(one))
        self._ahead.look_up(fetched, all_tables=True)

    def reset(self) -> None:
        """Forget the batches under way, the gradients that wait, and how many batches there were."""
        super().reset()
        self._gradients = None

    def _after_sending(self, following: Fetched[In]) -> None:
        if self.is_semi_sync() and following.has_sent:
            self.start_embedding_lookup(following.batch, following.context)

    def _optimizer_step(self) -> None:
        if not (self._stash_gradients and self.is_semi_sync()):
            super()._optimizer_step()
            return
        before, self._gradients = (
            self._gradients,
            [
                # gradients may be views of memory that the next backward fills
                (param, None if param.grad is None else param.grad.clone())
                for param in self._model.parameters()
            ],
        )
        if before is not None:
            for param, grad in before:
                param.grad = grad
            super()._optimizer_step()

    def _validate_optimizer(self) -> None:
        """Look for tables that the optimizer trains, whose lookups then miss a step of it."""
        given = {id(param) for group in self._optimizer.param_groups for param in group["params"]}
        for path, collection in sharded_collections(get_unwrapped_module(self._model)).items():
            fused = set(collection.fused_parameter_names())
            shared = [name for name, param in collection.named_parameters() if name not in fused and id(param) in given]
            if shared:
                what = f"module {path!r}: the pipeline's optimizer trains its tables {shared} by their gradients"
                if self._strict:
                    raise ValueError(
                        f"{what}, and their lookups would miss its last step: strict=False allows that, or train them"
                        " in the backward by apply_optimizer_in_backward"
                    )
                warnings.warn(f"{what}; their lookups miss its last step", stacklevel=3)

    def _warn(self, name: str, why: str | None) -> None:
        if why is not None and name not in self._warned:
            self._warned.add(name)
            warnings.warn(f"module {name!r} is looked up in its step, with the newest rows: {why}", stacklevel=6)
