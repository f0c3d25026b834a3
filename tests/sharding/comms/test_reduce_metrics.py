"""Metrics added over ranks: the same bits on 1, 2 and 4, in one all-reduce, and errors that all ranks share."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor, nn

from shardwise import MetricWindow, ShardingEnv, StreamingAUC, StreamingNE, reduce_metrics
from shardwise.models import auc


def samples() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    logits = 2 * torch.randn(2_000, generator=generator) - 1
    labels = (torch.rand(2_000, generator=generator) < logits.sigmoid()).float()
    return logits, labels, torch.rand(2_000, generator=generator)


def reduced() -> tuple[list[Tensor], list[float], dict[str, list[int]]]:
    """States and values over all ranks, and the bytes of each collective."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    metrics = [StreamingAUC(), StreamingNE(), StreamingAUC(7)]
    # a rank's share is of another size than its neighbour's
    first, last = ((2_000 * number * number) // (world_size * world_size) for number in (rank, rank + 1))
    for part in zip(*(tensor[first:last].split(97) for tensor in samples()), strict=True):
        for metric in metrics:
            metric.update(*part)
    before = [metric.state.clone() for metric in metrics]
    sent: dict[str, list[int]] = {"all_reduce": [], "all_to_all_single": []}

    def counted(name: str) -> Any:
        collective = getattr(dist, name)

        def call(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            sent[name].append(tensor.nbytes)
            return collective(tensor, *args, **kwargs)

        return patch.object(dist, name, call)

    group = dist.group.WORLD
    assert group is not None
    with counted("all_reduce"), counted("all_to_all_single"):
        totals = reduce_metrics(metrics, ShardingEnv.from_process_group(group))
    assert all(torch.equal(metric.state, state) for metric, state in zip(metrics, before, strict=True))
    return [metric.state for metric in totals], [metric.compute() for metric in totals], sent


@pytest.mark.ranks
def test_values_have_the_same_bits_on_any_number_of_ranks() -> None:
    ((states, values, sent),) = run_ranks(1, reduced)
    logits, labels, weights = samples()
    assert all(not calls for calls in sent.values())
    for world_size in (2, 4):
        for other_states, other_values, sent in run_ranks(world_size, reduced):
            assert all(torch.equal(a, b) for a, b in zip(states, other_states, strict=True))
            assert other_values == values
            # all metrics travel as one
            assert sent["all_reduce"] == [2_097_208 + 134_304 + 262_200]
            # a header of some numbers, whatever the number of samples
            assert len(sent["all_to_all_single"]) == 1 and sent["all_to_all_single"][0] < 1024 * world_size
    alone = StreamingAUC()
    alone.update(logits, labels, weights)
    assert alone.compute() == values[0]
    assert abs(values[2] - values[0]) < 1e-3 and abs(values[0] - auc(logits, labels)) < 0.02


def refused() -> list[str]:
    """What is said to a rank whose metrics, or whose labels, are not those of the others."""
    rank, errors = dist.get_rank(), []
    metric = StreamingAUC()
    metric.update(torch.zeros(2), torch.tensor([0.0, 0.5 if rank else 1.0]))
    (total,) = reduce_metrics([metric])
    for call in (
        total.compute,
        lambda: reduce_metrics([StreamingAUC(7 + rank)]),
        lambda: reduce_metrics([StreamingNE()] * (1 + rank)),
        lambda: reduce_metrics([nn.BatchNorm1d(2) if rank else StreamingNE()]),
        lambda: reduce_metrics([]),
    ):
        try:
            call()
        except (ValueError, RuntimeError) as error:
            errors.append(str(error))
    return errors


@pytest.mark.ranks
def test_what_is_wrong_on_one_rank_is_told_on_all() -> None:
    first, second = run_ranks(2, refused)
    assert first == second and len(first) == 5
    assert first[0].startswith("1 labels are neither 0 nor 1, beside 3 samples that are well")
    assert "mantissa_bits=7" in first[1] and "mantissa_bits=8" in first[1]
    assert "metric 1" in first[2]
    assert "metric 0, BatchNorm1d" in first[3] and "what is added over ranks in any order is int64" in first[3]
    assert "no metrics to reduce" in first[4]


def test_without_a_process_group_a_metric_is_its_own_sum() -> None:
    logits, labels, _ = samples()
    window = MetricWindow(StreamingNE(), samples=4_000, pieces=2)
    window.update(logits, labels)
    (total,) = reduce_metrics([window.latest()])
    assert total.compute() == window.latest().compute() and total.samples == 2_000
    (total,) = reduce_metrics([window.latest()], ShardingEnv.from_local(1, 0))
    assert total.samples == 2_000
    with pytest.raises(ValueError, match="metrics must be a tuple or list of them, got StreamingNE"):
        reduce_metrics(window.latest())  # type: ignore[type-var]
    with pytest.raises(ValueError, match="2 ranks need a process group"):
        reduce_metrics([window.latest()], ShardingEnv.from_local(2, 0))
