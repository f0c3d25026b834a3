"""Pipelines that look rows up at another time, or keep less under way: bits, ends and errors as of the others."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from model_zoo import Batch, Net, batch_of, dense_optimizer, drain, plain_loop, same, sharded
from pipeline_runs import CPU, as_a_plain_loop, equal
from ranks import error_of, run_ranks
from test_pipeline_errors import Failing, collect
from test_pipeline_semi_sync import optimizer_of, semi_sync_loop, with_a_dense_table
from test_pipeline_weights import made
from torch import Tensor

from shardwise import PoolingType
from shardwise.sharding import (
    EvalPipelineFusedSparseDist,
    TrainPipelineFusedSparseDist,
    TrainPipelineSemiSync,
    TrainPipelineSparseDistLite,
)

pytestmark = pytest.mark.ranks

KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "lite": (TrainPipelineSparseDistLite, {"free_features_storage_early": True, "clear_data_dist_inputs": True}),
    "fused": (TrainPipelineFusedSparseDist, {}),
    "late": (TrainPipelineFusedSparseDist, {"embedding_lookup_after_data_dist": True, "emb_lookup_stream": "new"}),
    "semi": (TrainPipelineSemiSync, {"start_batch": 1}),
}


def made_of(kind: str, model: Any) -> Any:
    pipeline, settings = KINDS[kind]
    return pipeline(model, dense_optimizer(model), CPU, **settings)


def expected(
    kind: str, model: Any, outputs: list[Tensor], epochs: list[list[int]], parts: str, *, counts_anew: bool = False
) -> bool:
    """Whether a model and its outputs are those of the loop over batches of these numbers."""
    if kind != "semi":
        return as_a_plain_loop(model, outputs, [n for numbers in epochs for n in numbers], parts)
    plain = sharded(parts)
    optimizer, batches = dense_optimizer(plain), [[batch_of(n) for n in numbers] for numbers in epochs]
    wanted: list[Tensor] = []
    for several in [[one] for one in batches] if counts_anew else [batches]:
        wanted += semi_sync_loop(plain, optimizer, several, 1, False)
    return same(wanted, outputs) and equal(model, plain)


def runs(kind: str) -> dict[str, object]:
    """What holds of a pipeline: its bits, its ends over loaders of different lengths, its errors, a fresh start."""
    good: dict[str, object] = {}
    model, outputs, epochs = sharded("pws"), list[Tensor](), list[list[int]]()
    pipeline = made_of(kind, model)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="ranks .* have no batch left")
        for epoch, of_ranks in enumerate([[4, 6], [2, 0], [3, 3]]):
            numbers = [10 * epoch + n for n in range(of_ranks[dist.get_rank()])]
            outs = drain(pipeline.progress, map(batch_of, numbers))
            epochs.append([10 * epoch + n for n in range(min(of_ranks))])
            good[f"ends {epoch}"] = len(outs) == min(of_ranks)
            outputs += outs
    good["bits"] = expected(kind, model, outputs, epochs, "pws")

    for error in (None, ValueError("line 7")):
        model = sharded("p")
        outputs, raised = collect(made_of(kind, model), Failing(3, error))
        # the batch after one that failed begins anew
        good[f"goes on after {error}"] = expected(kind, model, outputs, [[0, 1, 2], [4, 5, 6, 7]], "p")
        good[f"raises {error}"] = [at for at, _, message in raised if message.startswith("rank 1: ")] == [3]

    model = sharded("p")
    pipeline, before = made_of(kind, model), (batch_of(n) for n in range(20, 27))
    outputs = [pipeline.progress(before).detach().clone() for _ in range(3)]
    pipeline.reset()
    outputs += drain(pipeline.progress, (batch_of(n) for n in range(2)))
    good["reset"] = expected(kind, model, outputs, [[20, 21, 22], [0, 1]], "p", counts_anew=True)
    return good


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.full] if kind == "late" else []) for kind in KINDS]
)
def test_they_end_fail_and_go_on_as_the_others(kind: str) -> None:
    for of_rank in run_ranks(2, runs, kind):
        assert [what for what, good in of_rank.items() if not good] == []


class Counts(TrainPipelineSparseDistLite[Batch, Tensor]):
    """How many batches are under way in the forward, and how many ids of theirs have left."""

    seen: list[tuple[int, int]]

    def _model_fwd(self, batch: Batch) -> tuple[Tensor, Tensor]:
        self.seen.append((len(self.batches), sum(bool(fetched.started) for fetched in self._queue)))
        return super()._model_fwd(batch)


def under_way() -> list[tuple[int, int]]:
    model = sharded("p")
    pipeline = Counts(model, dense_optimizer(model), CPU)
    pipeline.seen = []
    drain(pipeline.progress, (batch_of(n) for n in range(4)))
    return pipeline.seen


def test_lite_has_one_batch_under_way_while_its_rows_are_looked_up() -> None:
    """In the first step nobody knows yet which parts of the batch the model looks up."""
    assert run_ranks(1, under_way) == [[(1, 0), (1, 1), (1, 1), (1, 1)]]


def evaluates(prefetch: bool) -> tuple[bool, bool, list[int]]:
    """Whether outputs are those of the model, whose weights stay; and after which forwards rows had been looked up."""
    model, plain = sharded("ps"), sharded("ps")
    log: list[int] = []
    number = [0]
    look_up, collection = model.module.pooled.look_up, model.module.pooled

    def counted(step: Any) -> None:
        if step.phase < 3:
            log.append(number[0])
        look_up(step)

    collection.look_up = counted
    model.module.register_forward_hook(lambda *_: number.__setitem__(0, number[0] + 1))
    pipeline: Any = EvalPipelineFusedSparseDist(
        model, dense_optimizer(model), CPU, enable_embedding_lookup_prefetch=prefetch
    )
    outputs = drain(pipeline.progress, (batch_of(n) for n in range(5)))
    with torch.no_grad():
        wanted = [plain(batch_of(n))[1] for n in range(5)]
    return same(wanted, outputs), equal(model, plain), log


def test_an_evaluation_may_look_the_next_batch_up_after_the_forward() -> None:
    """With it the rows of a batch are there before its step; each batch is looked up once either way."""
    for prefetch in (False, True):
        assert run_ranks(2, evaluates, prefetch) == [(True, True, [0, 1, 2, 3, 4])] * 2


def processed(kind: str) -> tuple[bool, list[str]]:
    """Whether a feature-processed model has the bits of a plain loop, and what was warned of."""
    model, plain = made("mix", PoolingType.SUM), made("mix", PoolingType.SUM)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        outputs = drain(made_of(kind, model).progress, (batch_of(n) for n in range(6)))
    good = same(plain_loop(plain, (batch_of(n) for n in range(6))), outputs) and equal(model, plain)
    return good, [str(one.message) for one in caught if "looked up in its step" in str(one.message)]


def test_weights_that_processors_make_are_those_of_the_step() -> None:
    """Their lookup is in the step, with the newest of all, and the semi-synchronous pipeline says so once."""
    assert run_ranks(2, processed, "fused") == [(True, [])] * 2
    for good, (message,) in run_ranks(2, processed, "semi"):
        assert good and message.startswith("module 'processed._embedding_bag_collection' is looked up in its step")


def refusals() -> list[str]:
    model = sharded("p", Net("p"))
    every = torch.optim.SGD(model.parameters(), lr=0.1)
    dense, mixed = dense_optimizer(model), with_a_dense_table()
    return [
        error_of(TrainPipelineFusedSparseDist, model, dense, CPU, emb_lookup_stream="side"),
        error_of(TrainPipelineSemiSync, model, dense, CPU, start_batch=-1),
        error_of(TrainPipelineSemiSync, model, every, CPU, strict=True),
        error_of(TrainPipelineSemiSync, mixed, optimizer_of(mixed), CPU, strict=True),
    ]


def test_what_makes_no_sense_is_refused() -> None:
    side, negative, fused, by_gradient = run_ranks(1, refusals)[0]
    assert side == "ValueError: emb_lookup_stream: must be one of ['data_dist', 'new', 'current'], got 'side'"
    assert negative == "ValueError: start_batch: must not be negative, got -1"
    # an optimizer that lists tables which their backward trains steps over them
    assert fused == ""
    assert by_gradient.startswith(
        "ValueError: module 'pooled': the pipeline's optimizer trains its tables ['embedding_bags.t2.weight'] by their"
    )
