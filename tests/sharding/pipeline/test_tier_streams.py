"""Rows that are brought on a stream of their own never meet lookups and updates of another one without an order.

There is no GPU here: streams are clocks, and whatever touches a slot or what is known of it leaves its stream's time.
Two that touch the same, one of them to write, must be ordered by events. Work itself is done at once, on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from model_zoo import ROWS, bag_tables, batch_of, drain, fused, stores_of
from pipeline_runs import CPU
from ranks import run_ranks
from test_tier_pipelines import OneTable
from torch import Tensor

from shardwise import (
    DistributedModelParallel,
    EmbeddingBagCollection,
    RowWiseAdagrad,
    ShardingPlan,
    construct_module_sharding_plan,
)
from shardwise.embeddings.tables.table_group import TableGroup
from shardwise.embeddings.tiers import Residency, cached_rows, turns
from shardwise.planner.layout import Tier
from shardwise.sharding import table_wise
from shardwise.sharding.comms import streams as engine_streams
from shardwise.sharding.pipeline import PrefetchTrainPipelineSparseDist, streams

pytestmark = pytest.mark.ranks
Clock = dict[str, int]
# in the place of a slot: all that is known of slots
KNOWN = -1


class Stream:
    """What work was given to it, and what it has waited for: the time of every stream that its own work comes after."""

    device = torch.device("cuda", 0)

    def __init__(self, name: str) -> None:
        self.name, self.clock = name, {name: 0}

    def record_event(self) -> Clock:
        return dict(self.clock)

    def wait_event(self, event: Clock) -> None:
        for name, time in event.items():
            self.clock[name] = max(time, self.clock.get(name, 0))

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.clock)


class Device:
    """In the place of torch.cuda, and of a program that looks for races."""

    def __init__(self) -> None:
        self.current = [Stream("main")]
        # of a place: who wrote last, and who read since, by stream and time
        self.writes: dict[int, tuple[str, int]] = {}
        self.reads: dict[int, dict[str, int]] = {}
        self.races: list[str] = []
        self.done: set[tuple[str, str]] = set()

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        self.current.append(stream)
        yield
        self.current.pop()

    def current_stream(self, device: torch.device) -> Stream:
        return self.current[-1]

    def synchronize(self, device: torch.device) -> None:
        raise AssertionError("slots do not grow here")

    def touch(self, what: str, places: list[int], *, writes: bool) -> None:
        """Work on the current stream that reads, or reads and writes, these places."""
        here = self.current[-1]
        here.clock[here.name] += 1
        self.done.add((what, here.name))
        for place in places:
            before = [self.writes[place]] if place in self.writes else []
            before += list(self.reads.get(place, {}).items()) if writes else []
            for name, time in before:
                if here.clock.get(name, 0) < time:
                    self.races.append(f"{what} on {here.name} beside {name}")
            if writes:
                self.writes[place] = here.name, here.clock[here.name]
                self.reads[place] = {}
            else:
                self.reads.setdefault(place, {})[here.name] = here.clock[here.name]


class _Torch:
    """torch, with the device in the place of torch.cuda."""

    def __init__(self, device: Device) -> None:
        self.device_module = device

    def get_device_module(self, device: torch.device) -> Device:
        return self.device_module

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@contextmanager
def watched(device: Device) -> Iterator[None]:
    """Inside, what touches the slots of one table is touched on the device."""
    move, look_up, update = cached_rows.move_rows, TableGroup.look_up, TableGroup.update

    def moving(parts: Any, records: Tensor, slots: Tensor, saves: Tensor, loads: Tensor, *first: int) -> None:
        device.touch("save", slots[saves >= 0].tolist(), writes=False)
        device.touch("load", slots[loads >= 0].tolist(), writes=True)
        move(parts, records, slots, saves, loads, *first)

    def looking(group: TableGroup, slots: Tensor, *args: Any) -> Tensor:
        device.touch("look up", slots.unique().tolist(), writes=False)
        return look_up(group, slots, *args)

    def updating(group: TableGroup, grad: Tensor, slots: Tensor, *args: Any, **kwargs: Any) -> None:
        device.touch("update", slots.unique().tolist(), writes=True)
        update(group, grad, slots, *args, **kwargs)

    def knowing(name: str) -> Any:
        method = getattr(Residency, name)

        def known(residency: Residency, *args: Any, **kwargs: Any) -> Any:
            device.touch(name, [KNOWN], writes=True)
            return method(residency, *args, **kwargs)

        return known

    with ExitStack() as patches:
        for module in (streams, engine_streams, turns):
            patches.enter_context(patch.object(module, "torch", _Torch(device)))
        patches.enter_context(patch.object(cached_rows, "move_rows", moving))
        patches.enter_context(patch.object(TableGroup, "look_up", looking))
        patches.enter_context(patch.object(TableGroup, "update", updating))
        for name in ("want_ids", "release", "announce_ids", "withdraw"):
            patches.enter_context(patch.object(Residency, name, knowing(name)))
        patches.enter_context(patch.object(Tensor, "record_stream", lambda tensor, stream: None))
        yield


def trained(below: str, folder: str, ordered: bool) -> tuple[list[str], set[tuple[str, str]]]:
    """The races of a pipeline with a stream for rows, and what was done on which stream."""
    tables = fused(EmbeddingBagCollection(bag_tables({"f0": ROWS})), RowWiseAdagrad)
    plan = construct_module_sharding_plan(
        tables, {"tf0": table_wise(rank=0)}, local_size=1, world_size=1, device_type="cpu"
    )
    plan["tf0"].tier = Tier(26, below, folder if below == "file" else None)
    model: Any = DistributedModelParallel(OneTable(tables), plan=ShardingPlan({"pooled": plan}))
    device = Device()
    with watched(device):
        (store,) = stores_of(model)
        if ordered:
            store._turns = turns.Turns(Stream.device)
        pipeline: Any = PrefetchTrainPipelineSparseDist(
            model, torch.optim.SGD([torch.zeros(1)]), CPU, ahead=4, prefetch=2
        )
        pipeline._feed.stream, pipeline._stream = Stream("copies"), Stream("routing")
        pipeline._rows_stream = Stream("rows")
        pipeline._ahead = pipeline._ahead_of(model)
        batches = [batch_of(n).pooled.permute([0]) for n in range(30)]
        given = iter(batches)
        for step in range(20):
            pipeline.progress(given)
            if step % 7 == 5:
                with torch.no_grad():
                    model(batches[step])
        pipeline.reset()
        pipeline._feed.stream = Stream("copies")
        drain(pipeline.progress, given)
    return device.races, device.done


@pytest.mark.parametrize("below", ["ram", "file"])
def test_rows_come_on_their_own_stream_in_an_order_with_lookups_and_updates(below: str, tmp_path: Path) -> None:
    ((races, done),) = run_ranks(1, trained, below, str(tmp_path), True)
    assert not races
    assert {
        ("want_ids", "rows"),
        ("announce_ids", "rows"),
        ("save", "rows"),
        ("look up", "main"),
        ("update", "main"),
    } <= done
    # what a thread reads is put into its slots where it is looked up
    assert ("load", "rows" if below == "ram" else "main") in done


def test_without_turns_they_would_meet(tmp_path: Path) -> None:
    """The count can tell."""
    ((races, _),) = run_ranks(1, trained, "ram", str(tmp_path), False)
    assert {"load on rows beside main", "look up on main beside rows"} & set(races)
