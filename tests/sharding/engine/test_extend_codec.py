"""A format of one's own, fp16 under a scale per row of 64 values, carries rows and gradients."""

from __future__ import annotations

import pytest
import torch
from jagged_batches import tables_of
from ranks import run_ranks
from sharding_mixes import Mix, Run, TableCase, batches_of_rank, build, environment, held, shard, span_of, train
from sharding_steps import expect_held
from torch import Tensor

from shardwise.sharding.comms.codecs import Floats, FormatCodec
from shardwise.sharding.comms.qcomms import CommOp, FormatCommCodec, QuantizedCommCodecs

pytestmark = pytest.mark.ranks

SCALED_FP16 = Floats("fp16/64", 16, 64, 4, torch.float16)
# 64 columns: a bag's sum is a row of the format; a table on each rank
MIX = Mix(
    (TableCase("t0", 23, 64, ("f0",), "table_wise", seed=1), TableCase("t1", 9, 64, ("f1",), "table_wise", seed=5))
)
LARGE = 2.0**30


def arrived(values: Tensor) -> Tensor:
    """Rows [n, 64] after their way, by the definition of the format."""
    scale = (values.abs().amax(1, keepdim=True) / 65504).clamp(min=2.0**-126)
    return (values / scale).half().float() * scale


def large_step(rank: int, world: int, codecs: dict[str, QuantizedCommCodecs] | None) -> Run:
    """A step on sums and gradients beyond fp16: over ranks with codecs, or of one process on what would arrive."""
    module = build(MIX, "sgd")
    with torch.no_grad():
        for weight in module.parameters():
            weight.mul_(LARGE)
    model = module if codecs is None else shard(MIX, module, environment(), codecs=codecs)
    ((batch, upstream),) = batches_of_rank(MIX, range(1), rank, world)
    gradients = [gradient * LARGE for gradient in upstream]
    run = train(MIX, model, [(batch, gradients if codecs else [*map(arrived, gradients)])], False)
    run.weights = tables_of(module) if codecs is None else held(model)[0]
    return run


def step_of_rank() -> Run:
    codec = FormatCommCodec(FormatCodec(SCALED_FP16))
    return large_step(environment().rank, 2, {op.name: QuantizedCommCodecs(codec, codec) for op in CommOp})


def test_a_format_of_ones_own_carries_values_beyond_its_dtype() -> None:
    want, runs = large_step(0, 1, None), run_ranks(2, step_of_rank)
    for rank, run in enumerate(runs):
        assert len(run.weights) == 1
        expect_held(want, run.weights, {})
        for value, whole in zip(run.outputs[0], want.outputs[0], strict=True):
            assert whole.abs().max() > 65504 and not torch.equal(whole, arrived(whole))
            assert torch.equal(value, arrived(whole)[slice(*span_of(MIX, rank, 2))])
