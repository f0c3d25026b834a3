"""What a pipeline of your own keeps of a batch between the stages of its step, by TorchRec's names."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from shardwise.sharding.comms.awaitable import Awaitable
from shardwise.sharding.engine.stages import StepContext


@dataclass
class TrainPipelineContext:
    """A batch under way: what its sharded modules wait for, by their paths.

    Args:
        input_dist_splits_requests: what `input_dist` returned; its wait sends the ids.
        input_dist_tensors_requests: what that wait returned; `PipelinedForward` takes it from here.
        module_contexts: of `create_context`, one a module.
        events: recorded when a stage of the batch was done, for other streams.
        index: of the batch.
        module_contexts_next_batch, fused_splits_awaitables, postproc_fwd_results, version: for pipelines that use them.
    """

    input_dist_splits_requests: dict[str, Awaitable[Any]] = field(default_factory=dict)
    input_dist_tensors_requests: dict[str, Awaitable[Any]] = field(default_factory=dict)
    module_contexts: dict[str, StepContext] = field(default_factory=dict)
    module_contexts_next_batch: dict[str, StepContext] = field(default_factory=dict)
    fused_splits_awaitables: list[tuple[list[str], Awaitable[Any]]] = field(default_factory=list)
    events: list[torch.Event] = field(default_factory=list)
    postproc_fwd_results: dict[str, Any] = field(default_factory=dict)
    index: int | None = None
    version: int = 0


@dataclass
class PrefetchTrainPipelineContext(TrainPipelineContext):
    """A batch whose rows are brought into their slots before its step.

    Args:
        module_input_post_prefetch: what `input_dist` brought, once `prefetch` has run; `PrefetchPipelinedForward` takes
            it from here, with
        module_contexts_post_prefetch: the module's context.
        module_input_post_prefetch_next_batch, module_contexts_post_prefetch_next_batch: for pipelines that use them.
    """

    module_input_post_prefetch: dict[str, Any] = field(default_factory=dict)
    module_contexts_post_prefetch: dict[str, StepContext] = field(default_factory=dict)
    module_input_post_prefetch_next_batch: dict[str, Any] = field(default_factory=dict)
    module_contexts_post_prefetch_next_batch: dict[str, StepContext] = field(default_factory=dict)
