"""A rank that is alone calls its collectives where it is told to, and nothing but that changes: one GPU can run NCCL.

Every job trains in one gloo process twice, once as ever and once within `collectives_at_one_rank`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from failing_model import Fault, build, features_of, train as train_failing
from jagged_batches import gradient_of
from model_zoo import Net, batch_of, dense_optimizer, drain, plain_loop, sharded, state_of
from ranks import error_of, run_ranks, world_group
from sharding_mixes import STRATEGIES, environment, mix_for, train_sharded
from torch import Tensor

from shardwise import RankFailure
from shardwise.checkpoint import full_state_dict, latest, load, save
from shardwise.perf.counts.calls import collectives
from shardwise.sharding import accumulate
from shardwise.sharding.comms.env import collectives_at_one_rank
from shardwise.sharding.comms.exchange import Exchange
from shardwise.sharding.comms.qcomms import (
    CommType,
    QCommsConfig,
    get_qcomm_codecs,
    get_qcomm_codecs_registry,
)
from shardwise.sharding.pipeline import PrefetchTrainPipelineSparseDist, TrainPipelineSparseDist
from shardwise.sharding.torchrec import comm_ops
from shardwise.sharding.torchrec.dist_data import JaggedTensorAllToAll, KJTAllToAll

pytestmark = pytest.mark.ranks
CPU = torch.device("cpu")


def steps(strategy: str, pooled: bool, codecs: str | None = None) -> list[Tensor]:
    """Outputs, weights and states of three steps; weights of ids are learned where there are any."""
    mix = mix_for(strategy, pooled=pooled)
    mix = replace(mix, weighted=pooled and strategy in ("row_wise", "grid"))
    more: dict[str, Any] = {}
    if codecs is not None:
        kind = CommType[codecs]
        more["codecs"] = get_qcomm_codecs_registry(QCommsConfig(kind, kind))
    run = train_sharded(mix, "rowwise_adagrad", 3, environment(), learned=mix.weighted, **more)
    outputs = [tensor for step in run.outputs for tensor in step]
    return [*outputs, *run.weights.values(), *run.states.values(), *run.weight_gradients]


def loop(kind: Any) -> list[Tensor]:
    """Outputs and state of six steps of three collections beside dense layers."""
    model, batches = sharded("pws"), (batch_of(step) for step in range(6))
    if kind is None:
        outputs = plain_loop(model, batches)
    else:
        outputs = drain(kind(model, dense_optimizer(model), CPU).progress, batches)
    return [*outputs, *state_of(model).values()]


def accumulated() -> list[Tensor]:
    """State after two steps of two micro-batches."""
    model = sharded("pws")
    optimizers = dense_optimizer(model), model.fused_optimizer
    for step in range(2):
        with accumulate(model):
            model(batch_of(2 * step))[0].backward()
        model(batch_of(2 * step + 1))[0].backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return list(state_of(model).values())


def saved() -> list[Tensor]:
    """State of a model that was loaded from another's checkpoint and trained on, and the whole tables."""
    with tempfile.TemporaryDirectory() as folder:
        model = sharded("pws")
        optimizer = dense_optimizer(model)
        plain_loop(model, (batch_of(step) for step in range(2)))
        save(folder, model, optimizer, step=2)
        torch.manual_seed(9)
        loaded = sharded("pws", Net("pws"))
        step = latest(folder)
        assert step is not None
        load(step, loaded, dense_optimizer(loaded))
        outputs = plain_loop(loaded, (batch_of(step) for step in range(2, 4)))
        return [*outputs, *state_of(loaded).values(), *full_state_dict(loaded).values()]


def functions() -> list[Tensor]:
    """Every function of `comm_ops`, with its gradient, and batches of other ranks."""
    tensors: list[Tensor] = []
    for function in (
        lambda x: comm_ops.alltoall_pooled(x, [6], [4]),
        lambda x: comm_ops.variable_batch_alltoall_pooled(x.reshape(-1), [[6]], [6], [[4]]),
        lambda x: comm_ops.alltoall_sequence(x, torch.tensor([0, 1]), None, torch.tensor([2, 4]), [6], [6]),
        lambda x: comm_ops.reduce_scatter_pooled([x]),
        lambda x: comm_ops.reduce_scatter_v_pooled(x, [6]),
        lambda x: comm_ops.all_gather_base_pooled(x),
    ):
        x = torch.randn(6, 4, generator=torch.Generator().manual_seed(1)).requires_grad_()
        result = function(x).wait()
        result.backward(torch.arange(float(result.numel())).view(result.shape))
        tensors += [result.detach(), gradient_of(x)]
    exchange = Exchange(dist.group.WORLD)
    first, part = torch.ones(3), torch.arange(4.0)
    exchange.broadcast(first)
    exchange.mean([part, first])
    assert exchange.value(b"words", 0) == b"words"
    batch = batch_of(2).pooled
    arrived = KJTAllToAll(world_group(), [4])(batch).wait().wait()
    bags = torch.tensor([batch.stride()])
    jagged = JaggedTensorAllToAll(batch["f1"], bags, bags, world_group()).wait()
    return [*tensors, first, part, arrived.values(), arrived.lengths(), jagged.values(), jagged.lengths()]


JOBS: dict[str, Callable[[], list[Tensor]]] = {
    **{f"{strategy}, {'pooled' if pooled else 'sequence'}": partial(steps, strategy, pooled)
       for strategy in STRATEGIES for pooled in (True, False)},
    "plain loop": partial(loop, None),
    "sparse pipeline": partial(loop, TrainPipelineSparseDist),
    "prefetching pipeline": partial(loop, PrefetchTrainPipelineSparseDist),
    "accumulation": accumulated,
    "checkpoint": saved,
    "functions": functions,
}  # fmt: skip


def both_ways() -> dict[str, tuple[int, int, list[bool]]]:
    """Of each job the collectives as ever and where they are called, and whether each tensor has the same bits."""
    outcomes = {}
    for name, job in JOBS.items():
        results: list[list[Tensor]] = []
        calls = []
        for context in (nullcontext(), collectives_at_one_rank()):
            torch.manual_seed(0)
            with context, collectives() as called:
                results.append(job())
            calls.append(called.total())
        plain, forced = results
        assert len(plain) == len(forced) > 0
        outcomes[name] = (*calls, [torch.equal(a, b) for a, b in zip(plain, forced, strict=True)])
    return outcomes


def test_collectives_of_one_rank_change_no_bit() -> None:
    (outcomes,) = run_ranks(1, both_ways)
    assert outcomes.keys() == JOBS.keys()
    for name, (plain, forced, same) in outcomes.items():
        assert all(same), (name, same)
        # a header, ids, rows and their gradients in each of three steps
        assert plain == 0 and forced >= (12 if "," in name and "data_parallel" not in name else 6), (name, forced)


def compressed() -> tuple[bool, list[bool], str]:
    """Whether fp32 changes nothing; whether the first outputs are bf16 numbers without and with a codec; the error."""
    with collectives_at_one_rank():
        plain, same, coded = (steps("row_wise", True, codec) for codec in (None, "FP32", "BF16"))
        codecs = get_qcomm_codecs(QCommsConfig(CommType.FP16, CommType.FP16))
        comm_ops.alltoall_pooled(torch.ones(6, 4), [6], [4], codecs=codecs).wait()
        large = comm_ops.alltoall_pooled(torch.full((6, 4), 1e9), [6], [4], codecs=codecs)
        error = error_of(large.wait)
    rounded = [torch.equal(outputs[0], outputs[0].bfloat16().float()) for outputs in (plain, coded)]
    return all(torch.equal(a, b) for a, b in zip(plain, same, strict=True)), rounded, error


def test_codecs_compress_what_a_rank_sends_itself() -> None:
    ((same, rounded, error),) = run_ranks(1, compressed)
    assert same and rounded == [False, True]
    assert error.startswith("OverflowError: ranks [0]: a number is too large for the compressed exchange (fp16)")


def failed() -> tuple[bool, str, str, tuple[int, ...]]:
    """What a rank raises that fails in its third step, what the next exchange of its group says, and who it names."""
    with collectives_at_one_rank():
        model = build(Fault("backward", "raise", rank=0))
    model._watch.timeout_s = 2  # type: ignore[union-attr]
    error = error_of(train_failing, Fault("backward", "raise", rank=0), model=model)
    with pytest.raises(RankFailure) as failure:
        model.module.tables(features_of(0, 0))  # type: ignore[operator, union-attr]
    return model._watch is not None, error, str(failure.value), failure.value.ranks


def test_a_rank_that_fails_closes_its_group_of_one() -> None:
    (outcome,) = run_ranks(1, failed)
    assert outcome[:2] == (True, "ZeroDivisionError: the loader's seventh batch")
    assert "rank 0 failed" in outcome[2] and outcome[3] == (0,)


def test_outside_of_the_block_a_rank_is_alone_again() -> None:
    assert run_ranks(1, alone) == [[True, False, True, True, True]]
    # several ranks never were
    assert run_ranks(2, alone) == [[False, False, False, True, True]] * 2


def alone() -> Sequence[bool]:
    before = Exchange(dist.group.WORLD)
    with collectives_at_one_rank():
        inside, nobody = Exchange(dist.group.WORLD), Exchange(None)
    return [before.alone, inside.alone, Exchange(dist.group.WORLD).alone, nobody.alone, Exchange(None).alone]
