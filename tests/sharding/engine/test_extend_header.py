"""A field more in the header, added where docs/concepts/engine.md says: ranks tell each other a number a step."""

from unittest.mock import patch

import pytest
import sharding_mixes as mixes
from ranks import run_ranks
from torch import Tensor

from shardwise import DataType, KeyedJaggedTensor
from shardwise.sharding.engine import collection
from shardwise.sharding.engine.step import Step
from shardwise.sharding.engine.wire import pack_sizes, unpack_sizes

pytestmark = pytest.mark.ranks
WAYS = {"row_wise": DataType.FP32, "data_parallel": DataType.FP32, "table_wise": DataType.BF16}
CASES = [mixes.TableCase(f"t{n}", 20, 8, (f"f{n}",), way, dtype=WAYS[way]) for n, way in enumerate(WAYS)]
MIX = mixes.Mix(tuple(CASES), settings=())


class NumberedStep(Step):
    """IDS_SENT: `numbers_from` [W], what each rank gave its step."""

    numbers_from: list[int]


def with_numbers() -> tuple[mixes.Run, mixes.Run, list[list[int]]]:
    """A plain run, one whose headers have a number more, and the numbers [steps][W] that came."""
    env, arrived = mixes.environment(), list[list[int]]()

    def pack(step: Step) -> list[list[int]]:
        return [[*row[:3], 100 * env.rank + len(arrived), *row[3:]] for row in pack_sizes(step)]

    def unpack(step: NumberedStep, sizes: list[list[int]]) -> None:
        step.numbers_from = [row[3] for row in sizes]
        unpack_sizes(step, [[*row[:3], *row[4:]] for row in sizes])

    def forward(batch: KeyedJaggedTensor) -> dict[str, Tensor]:
        step = model.begin(batch)
        arrived.append(step.numbers_from)
        model.routed_ahead.append(step)
        return model(batch)

    plain, model = mixes.train_sharded(MIX, "adam", 3, env), mixes.shard(MIX, mixes.build(MIX, "adam"), env)
    # one rank has a group more, whose number ends its row
    assert len({len(serving.groups) for serving in model._routes.serving}) == 2
    model._header_width += 1
    with patch.multiple(collection, Step=NumberedStep, pack_sizes=pack, unpack_sizes=unpack):
        run = mixes.train(MIX, forward, mixes.batches_of_rank(MIX, range(3)), False, lambda: model.collectives)
    run.weights, run.states = mixes.held(model)
    return plain, run, arrived


def test_a_number_more_in_the_header_arrives_and_changes_no_bit() -> None:
    for plain, run, arrived in run_ranks(2, with_numbers):
        assert arrived == [[0, 100], [1, 101], [2, 102]]
        mixes.expect_same_runs(plain, run)
        assert run.collectives == plain.collectives
