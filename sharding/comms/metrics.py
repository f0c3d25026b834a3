"""Metrics of all ranks: states that are sums over samples, added in one all-reduce."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn

from .agreement import Facts, agree, exchange_device
from .env import ShardingEnv
from .exchange import Exchange

M = TypeVar("M", bound=Sequence[nn.Module])


def reduce_metrics(metrics: M, env: ShardingEnv | dist.ProcessGroup | None = None) -> M:
    """Copies of metrics over the samples of all ranks, the same on every rank; those given stay as they are.

    All ranks call this together, with the same metrics in the same order. Buffers are integers and are added, so no bit
    depends on the number of ranks or on their order. A header that compares the ranks' metrics and one all-reduce
    travel, whatever the number of metrics and samples.

    Args:
        metrics: a tuple or list of `StreamingAUC`, `StreamingNE` and the like: any modules whose buffers are int64 sums
            over samples. What is returned is one like it.
        env: the ranks; by default all, or this process alone where there is no process group.

    Raises:
        ValueError: there is no metric, or a module has buffers that are no int64 sums, or none.
        RuntimeError: ranks gave metrics of other kinds or settings; on all ranks.

    Example:
        >>> auc, ne = StreamingAUC(), StreamingNE()
        >>> for metric in (auc, ne):
        ...     metric.update(torch.tensor([0.0, 1.0]), torch.tensor([0, 1]))
        >>> all_auc, all_ne = reduce_metrics((auc, ne), ShardingEnv.from_local(1, 0))
        >>> all_auc.compute()
        1.0
    """
    if isinstance(env, ShardingEnv):
        group = env.require_group()
    else:
        group = dist.group.WORLD if env is None and dist.is_initialized() else env
    exchange = Exchange(group)

    def copies() -> tuple[M, Facts]:
        if not hasattr(metrics, "__len__"):
            raise ValueError(f"metrics must be a tuple or list of them, got {type(metrics).__name__}")
        if not metrics:
            raise ValueError("no metrics to reduce")
        for number, metric in enumerate(metrics):
            if not isinstance(metric, nn.Module):
                raise ValueError(f"metric {number} is no module with sums, but {type(metric).__name__}")
            dtypes = {buffer.dtype for buffer in metric.buffers()}
            if dtypes != {torch.int64}:
                raise ValueError(
                    f"metric {number}, {metric}, has buffers of {sorted(map(str, dtypes)) or 'no dtype'}: what is added"
                    " over ranks in any order is int64"
                )
        facts = {
            f"metric {number}": f"{metric} of {[buffer.numel() for buffer in metric.buffers()]} numbers"
            for number, metric in enumerate(metrics)
        }
        return deepcopy(metrics), facts

    # what is no metric is told by `copies`, on all ranks
    modules = [metric for metric in metrics if isinstance(metric, nn.Module)] if isinstance(metrics, Sequence) else []
    device = next((buffer.device for metric in modules for buffer in metric.buffers()), torch.device("cpu"))
    carrier = exchange_device(group, device)
    reduced, _ = agree(exchange, carrier, copies)
    if not exchange.alone:
        buffers = [buffer for metric in reduced for buffer in metric.buffers()]
        total = exchange.sum(torch.cat([buffer.flatten().to(carrier) for buffer in buffers]), what="metrics")
        for buffer, part in zip(buffers, torch.split(total, [buffer.numel() for buffer in buffers]), strict=True):
            buffer.copy_(part.view_as(buffer))
    return reduced
