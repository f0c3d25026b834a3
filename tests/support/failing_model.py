"""A small sharded model that fails on one rank, at a place of its step and in a way that a test chooses."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from lone_ranks import kill_me, stop_me
from model_zoo import fused
from torch import Tensor, nn

from shardwise import (
    DistributedModelParallel,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    KeyedJaggedTensor,
)
from shardwise.sharding import construct_module_sharding_plan, row_wise
from shardwise.sharding.comms.exchange import Exchange
from shardwise.sharding.engine.shards import LocalShards
from shardwise.sharding.plan.plan import ShardingPlan

ROWS, DIM = 12, 4
# a place between the header, by which all ranks know that one failed, and its error
TEXT = "the text of an error"
# longer than any timeout_s, or Ctrl-C, that it is to outlast
SLEEP_S = 8.0


def raise_error() -> None:
    """What a program does wrong."""
    raise ZeroDivisionError("the loader's seventh batch")


def run_out() -> None:
    """What an allocator says."""
    raise torch.OutOfMemoryError("tried to allocate 40.00 GiB")


def interrupt() -> None:
    """Ctrl-C."""
    os.kill(os.getpid(), signal.SIGINT)
    # the handler runs at a bytecode from here on
    for _ in range(1000):
        pass


def sleep() -> None:
    """A long evaluation on one rank."""
    time.sleep(SLEEP_S)


ACTIONS: dict[str, Callable[[], None]] = {
    "raise": raise_error, "sleep": sleep, "memory": run_out, "interrupt": interrupt, "kill": kill_me, "stop": stop_me,
}  # fmt: skip


@dataclass(frozen=True)
class Fault:
    """What rank `rank` does at a `place` of its third step: one of ACTIONS."""

    place: str
    action: str
    rank: int = 1

    def come(self, place: str, step: int) -> None:
        """The fault, if this is where it happens."""
        if (place, step, dist.get_rank()) == (self.place, 2, self.rank):
            ACTIONS[self.action]()


class Model(nn.Module):
    """Tables between two dense layers, so that dense gradients are averaged before and after the tables' exchange."""

    def __init__(self, fault: Fault) -> None:
        super().__init__()
        self.tables = fused(EmbeddingBagCollection([EmbeddingBagConfig(ROWS, DIM, name) for name in ("user", "item")]))
        self.first, self.last = nn.Linear(DIM, DIM), nn.Linear(2 * DIM, 1)
        self.fault, self.step = fault, 0

    def come(self, place: str) -> None:
        """The fault, if this is where it happens."""
        self.fault.come(place, self.step)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        before = self.first(torch.ones(1, DIM))
        before.register_hook(lambda grad: self.come("before the last all-reduce"))
        self.come("input exchange")
        pooled = self.tables(features).values()
        self.come("forward")
        pooled.register_hook(lambda grad: self.come("backward"))
        return self.last(pooled).sum() + before.sum()  # type: ignore[no-any-return]


def bad_features() -> KeyedJaggedTensor:
    """An id that no table has."""
    return KeyedJaggedTensor(["user", "item"], torch.tensor([ROWS]), lengths=torch.tensor([1, 0, 0, 0]))


def features_of(step: int, rank: int) -> KeyedJaggedTensor:
    """Three ids for each of two features."""
    ids = [(7 * step + 5 * rank + n) % ROWS for n in range(6)]
    return KeyedJaggedTensor(["user", "item"], torch.tensor(ids), lengths=torch.tensor([1, 2, 3, 0]))


def build(fault: Fault, *, timeout_s: float | None = 60) -> DistributedModelParallel:
    """The model, its tables cut by rows over all ranks."""
    torch.manual_seed(0)
    model, world = Model(fault), dist.get_world_size()
    where: dict[str, Any] = dict.fromkeys(("user", "item"), row_wise())
    tables = construct_module_sharding_plan(model.tables, where, world_size=world, local_size=world)
    return DistributedModelParallel(model, plan=ShardingPlan({"tables": tables}), timeout_s=timeout_s)


def train(
    fault: Fault,
    *,
    timeout_s: float | None = 60,
    watched: bool = True,
    steps: int = 4,
    model: DistributedModelParallel | None = None,
) -> None:
    """Train a model some steps, in the third of which the fault comes."""
    model = model or build(fault, timeout_s=timeout_s)
    inner = model.module
    assert isinstance(inner, Model)
    optimizer = torch.optim.SGD([*inner.first.parameters(), *inner.last.parameters()], lr=0.1)
    look_up: Any = LocalShards.look_up
    value: Any = Exchange.value

    def looked_up(shards: LocalShards, *args: Any) -> Any:
        inner.come("look up")
        return look_up(shards, *args)

    def told(exchange: Exchange, *args: Any) -> Any:
        inner.come(TEXT)
        return value(exchange, *args)

    with patch.object(LocalShards, "look_up", looked_up), patch.object(Exchange, "value", told):
        for step in range(steps):
            inner.step = step
            with model.watched() if watched else nullcontext():
                optimizer.zero_grad()
                # on the way to the fault the batch is bad: its rank tells the others why, or cannot
                bad = (fault.place, step, dist.get_rank()) == (TEXT, 2, fault.rank)
                loss = model(bad_features() if bad else features_of(step, dist.get_rank()))
                inner.come("loss")
                loss.backward()
                inner.come("optimizer")
                optimizer.step()
