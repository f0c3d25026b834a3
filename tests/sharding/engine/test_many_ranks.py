"""64 and 512 ranks without processes: a batch of the MLPerf tables routed through a planned mix, rank by rank.

The environment is torch's fake process group; data goes through the functions that a step is made of. Whole steps of 64
ranks run in threads, which exchange where they meet.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lines_run import lines_run
from sharding_steps import blocks_of, handed_over, routed_step
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardwise import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    KeyedJaggedTensor,
    RowWiseAdagrad,
    ShardingEnv,
    apply_optimizer_in_backward,
)
from shardwise.embeddings import OptimizerSpec
from shardwise.perf.counts.many_ranks import IDS, ROWS
from shardwise.perf.counts.traffic import Traffic, predicted_bytes
from shardwise.planner import layout
from shardwise.planner.layout import Shard
from shardwise.sharding.comms.exchange import Buffers, Exchange, Pending
from shardwise.sharding.engine import collection, fused_optimizer
from shardwise.sharding.engine.columns import OutputColumns
from shardwise.sharding.engine.route import Sending
from shardwise.sharding.engine.routes import Routes, Table, plan_routes
from shardwise.sharding.engine.step import Step
from shardwise.sharding.engine.wire import PooledWire, Receiving, unpack_sizes
from shardwise.sharding.modules import generators
from shardwise.sharding.modules.sharded_collections import ShardedEmbeddingBagCollection
from shardwise.sharding.plan.plan import shards_of

# the 26 tables of MLPerf's DLRM-DCNv2, all of 128 columns
NAMES = [f"cat_{n}" for n in range(len(ROWS))]
HOTNESS = dict(zip(NAMES, map(float, IDS), strict=True))
HOST = 8
CPU = torch.device("cpu")


def strategies(world: int) -> list[tuple[str, Any]]:
    """What becomes of each table: the name of its strategy and where it goes."""
    hosts, chosen, large = world // HOST, [], iter(("row", "row", "row", "grid", "host"))
    for n, rows in enumerate(ROWS):
        if rows > 10**7:
            kind = next(large)
            chosen.append((kind, {"grid": [1, 3, 4, hosts - 1], "host": n % hosts}.get(kind)))
        elif rows > 10**5:
            chosen.append(("columns", [n % world, 7 * n % world, (n + 9) % world, (n + 20) % world]))
        else:
            chosen.append(("replica", None) if rows < 1000 else ("table", 5 * n % world))
    return chosen


def shards_for(world: int, rows: Sequence[int], dim: int) -> list[Shard]:
    """By the strategies of `layout`."""
    ways: dict[str, Any] = {
        "row": lambda name, size, _: layout.row_wise(name, size, dim, range(world)),
        "grid": lambda name, size, hosts: layout.grid(name, size, dim, [layout.ranks_of(host, HOST) for host in hosts]),
        "host": lambda name, size, host: layout.table_row_wise(name, size, dim, layout.ranks_of(host, HOST)),
        "columns": lambda name, size, ranks: layout.column_wise(name, size, dim, ranks),
        "replica": lambda name, size, _: layout.data_parallel(name, size, dim, world),
        "table": lambda name, size, rank: layout.table_wise(name, size, dim, rank),
    }
    placed = zip(NAMES, rows, strategies(world), strict=True)
    return [shard for name, size, (kind, where) in placed for shard in ways[kind](name, size, where)]


@pytest.fixture(params=[64, 512])
def world(request: pytest.FixtureRequest) -> Iterator[int]:
    """A fake process group of so many ranks."""
    store = FakeStore()
    dist.init_process_group("fake", store=store, rank=0, world_size=request.param)
    yield request.param
    dist.destroy_process_group()


def test_a_plan_for_the_ranks_of_a_process_group_is_that_of_the_layout(world: int) -> None:
    env = ShardingEnv.from_process_group(dist.group.WORLD, local_world_size=HOST)  # type: ignore[arg-type]
    assert (env.world_size, env.local_world_size) == (world, HOST)
    configs = [
        EmbeddingBagConfig(rows, 128, name, feature_names=[name]) for name, rows in zip(NAMES, ROWS, strict=True)
    ]
    module = EmbeddingBagCollection(configs, device="meta")
    makers = {
        "row": lambda _: generators.row_wise(),
        "grid": generators.grid_shard,
        "host": generators.table_row_wise,
        "columns": generators.column_wise,
        "replica": lambda _: generators.data_parallel(),
        "table": generators.table_wise,
    }
    chosen = {name: makers[kind](where) for name, (kind, where) in zip(NAMES, strategies(world), strict=True)}
    plan = generators.construct_module_sharding_plan(module, chosen, local_size=HOST)
    shards = [shard for n, name in enumerate(NAMES) for shard in shards_of(name, plan[name], ROWS[n], 128, world)]
    assert sorted(shards, key=repr) == sorted(shards_for(world, ROWS, 128), key=repr)


@dataclass
class Routed:
    """Batches of all ranks on their way; most of 512 ranks have none."""

    routes: Routes
    sending: Sending
    batches: list[int]
    kjts: list[KeyedJaggedTensor]
    sent: list[Step]
    # of each source, what goes to each target
    blocks: list[list[Tensor]]


def targets(world: int) -> list[int]:
    """Ranks that are looked at: all of 64; of 512 those that hold most, their neighbours, the first and the last."""
    holders = {rank for kind, ranks in strategies(world) if kind == "columns" for rank in ranks}
    holders |= {rank for kind, rank in strategies(world) if kind == "table"}
    return list(range(world)) if world == 64 else sorted({0, 1, 7, 8, 24, 39, world // 2, world - 1, *holders})


def made(shards: Sequence[Shard], world: int) -> tuple[Routes, Sending]:
    """Make what a rank is made of, for some ranks."""
    tables = [
        Table(n, r, 128, torch.float32, OptimizerSpec("rowwise_adagrad"), (n,))
        for n, r in zip(NAMES, ROWS, strict=True)
    ]
    layout.validate(shards, {table.name: (table.rows, table.dim) for table in tables}, world)
    routes = plan_routes(tables, shards, world, local_size=HOST)
    sending = Sending(routes, NAMES, True, CPU)
    for rank in targets(world):
        # each rank makes these for itself; what it sends does not depend on its number
        Sending(routes, NAMES, True, CPU)
        Receiving(routes, rank, True, CPU)
        OutputColumns(routes, rank)
    return routes, sending


@cache
def routed(world: int) -> Routed:
    routes, sending = made(shards_for(world, ROWS, 128), world)
    batches = [4 if rank % (world // 64) == 0 else 0 for rank in range(world)]
    kjts = [batch_of(rank, batch) for rank, batch in enumerate(batches)]
    nothing = routed_step(batch_of(0, 0), routes, sending)
    sent = [routed_step(kjt, routes, sending) if kjt.stride() else nothing for kjt in kjts]
    empty = blocks_of(nothing)
    blocks = [blocks_of(step) if step.batch else empty for step in sent]
    return Routed(routes, sending, batches, kjts, sent, blocks)


def batch_of(rank: int, samples: int, rows: Sequence[int] = ROWS) -> KeyedJaggedTensor:
    generator = torch.Generator().manual_seed(rank)
    ids = [torch.randint(0, size, (samples * n,), generator=generator) for size, n in zip(rows, IDS, strict=True)]
    return KeyedJaggedTensor(
        NAMES, torch.cat(ids), lengths=torch.tensor(IDS).repeat_interleave(samples), stride=samples
    )


def asked_of(kjt: KeyedJaggedTensor, shard: Shard) -> Tensor:
    """Rows of a shard that a batch names, in the order of its ids."""
    ids = kjt[shard.table].values() - shard.rows[0]
    return ids[(ids >= 0) & (ids < shard.rows[1] - shard.rows[0])]


def test_what_a_rank_expects_of_another_is_what_that_sends(world: int) -> None:
    routing = routed(world)
    for rank in targets(world):
        receiving = Receiving(routing.routes, rank, True, CPU)
        # streams: ids of a table's rows [low, high) travel once, however many of its columns are here
        shards = {
            (slot.lookup, group.shards[slot.shard].rows): group.shards[slot.shard]
            for group in routing.routes.serving[rank].groups
            for slot in group.slots
        }
        assert len(shards) == receiving.streams
        expected = Step(True, receiving)
        unpack_sizes(expected, [[step.batch, step.ids_to[rank], 0] for step in routing.sent])
        for source, step in enumerate(routing.sent):
            assert routing.blocks[source][rank].shape[0] == expected.id_sizes[source]
            # those of some, counted anew
            if step.batch and source % (world // 4) == 0:
                assert step.ids_to[rank] == sum(
                    asked_of(routing.kjts[source], shard).shape[0] for shard in shards.values()
                )


def test_ids_of_all_ranks_arrive_in_global_order(world: int) -> None:
    routing = routed(world)
    for rank in targets(world)[::4]:
        receiving = Receiving(routing.routes, rank, True, CPU)
        step = handed_over(routing.sent, receiving, rank, [blocks[rank] for blocks in routing.blocks])
        slots = [(group.shards[s.shard], s) for group in routing.routes.serving[rank].groups for s in group.slots]
        wanted = [asked_of(kjt, shard) for shard, _ in slots for kjt in routing.kjts if kjt.stride()]
        assert torch.equal(step.received_ids, torch.cat(wanted).to(step.received_ids.dtype))
        assert step.received_lengths.shape == (len(slots), sum(routing.batches))


def test_every_id_goes_to_each_rank_that_has_its_row_once(world: int) -> None:
    routing = routed(world)
    replicas = sum(n for n, (kind, _) in zip(IDS, strategies(world), strict=True) if kind == "replica")
    holders = {"columns": lambda where: len(set(where)), "grid": len}
    copies = sum(
        n * holders.get(kind, lambda _: 1)(where)
        for n, (kind, where) in zip(IDS, strategies(world), strict=True)
        if kind != "replica"
    )
    for step in routing.sent:
        assert sum(step.counts) == step.batch * (copies + replicas * world)


def test_bytes_between_ranks_are_those_that_the_plan_predicts(world: int) -> None:
    routing = routed(world)
    cut = {n for n, (kind, _) in enumerate(strategies(world)) if kind in ("row", "grid", "host")}
    sources = range(0, world, world // 16)
    predicted = {rank: predicted_bytes(routing.routes, rank, routing.batches, HOTNESS) for rank in sources}
    for rank in sources:
        step = routing.sent[rank]
        for target, (pair, block) in enumerate(zip(predicted[rank], routing.blocks[rank], strict=True)):
            assert (block.numel() - step.ids_to[target]) * 4 == pair.lengths
            streams = routing.routes.serving[target].streams
            if not any(stream.lookup in cut for stream in streams):
                assert step.ids_to[target] * 4 == pair.ids
        assert sum(step.ids_to) * 4 == pytest.approx(sum(pair.ids for pair in predicted[rank]))
    for target in targets(world)[::8]:
        # ids spread evenly over the rows of cut tables: six standard deviations
        arrived = sum(routing.sent[rank].ids_to[target] for rank in sources)
        mean = sum(predicted[rank][target].ids for rank in sources) / 4
        assert abs(arrived - mean) <= 6 * mean**0.5


def test_results_and_gradients_have_the_sizes_that_both_sides_expect(world: int) -> None:
    routing = routed(world)
    sampled = targets(world)[:: len(targets(world)) // 6]
    traffic: dict[int, list[Traffic]] = {
        rank: predicted_bytes(routing.routes, rank, routing.batches, HOTNESS) for rank in sampled
    }
    wires = {rank: PooledWire(routing.routes, rank) for rank in sampled}
    sizes = {
        rank: wire.pack_gradients(routing.sent[rank], torch.zeros(routing.batches[rank], 26 * 128), 1, Buffers())[1]
        for rank, wire in wires.items()
    }
    for rank, wire in wires.items():
        step: Any = SimpleNamespace(
            batch=routing.batches[rank], batches=routing.batches, ids_to_groups=routing.sent[rank].ids_to_groups
        )
        results, gradients = wire.row_sizes(step), wire.gradient_sizes(step)
        for peer in sampled:
            assert results[peer] * 4 == traffic[peer][rank].rows
            assert gradients[peer] == sizes[peer][rank]
            assert gradients[peer] * 4 == traffic[peer][rank].gradients


def test_a_plan_for_hundreds_of_ranks_takes_time_in_proportion_to_its_shards(world: int) -> None:
    shards = shards_for(world, ROWS, 128)
    _, lines = lines_run(lambda: made(shards, world))
    assert lines < 60 * len(shards) * len(targets(world))


class Meeting:
    """Where the threads of some ranks exchange blocks."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks = list(ranks)
        self._barrier = threading.Barrier(len(self.ranks), timeout=60)
        self._given: dict[int, Any] = {}

    def exchange(self, number: int, blocks: Any) -> list[Any]:
        """What every rank of the meeting gave."""
        self._given[number] = blocks
        self._barrier.wait()
        gathered = [self._given[rank] for rank in range(len(self.ranks))]
        # none gives the next before all have taken this
        self._barrier.wait()
        return gathered

    def abort(self) -> None:
        self._barrier.abort()


class Recorded(Exchange):
    """An exchange between threads that writes down what it is asked for, with the sizes."""

    def __init__(self, place: tuple[Meeting, int, list[str]], beside: Exchange | None = None) -> None:
        super().__init__(None)
        meeting, rank, self.log = place
        self._meeting, self.world_size, self.rank = meeting, len(meeting.ranks), meeting.ranks.index(rank)
        self.alone = self.world_size == 1

    def broadcast(self, tensor: Tensor, rank: int = 0, *, what: str = "first values") -> None:
        self.log.append(f"broadcast of {list(tensor.shape)}")
        tensor.copy_(self._meeting.exchange(self.rank, tensor.clone())[rank])

    def all_to_all(
        self, send: Tensor, send_sizes: list[int] | None = None, sizes: list[int] | None = None, *, what: str
    ) -> Pending:
        self.log.append(f"{what} among {self.world_size}")
        self.calls += 1
        self.sent += send.numel() * send.element_size()
        even = [send.shape[0] // self.world_size] * self.world_size
        gathered = self._meeting.exchange(self.rank, torch.split(send, send_sizes or even))
        blocks = [blocks[self.rank] for blocks in gathered]
        assert [block.shape[0] for block in blocks] == (sizes or even)
        return Pending(torch.cat(blocks))


@dataclass
class Seen:
    """What a rank saw: its calls of the exchange, outputs of two steps, bytes that it sent and those predicted."""

    log: list[str]
    outputs: list[Tensor]
    sent: int
    predicted: float


SMALL = [max(3, rows // 10**5) for rows in ROWS]


def small() -> EmbeddingBagCollection:
    torch.manual_seed(1)
    configs = [EmbeddingBagConfig(rows, 8, name, feature_names=[name]) for name, rows in zip(NAMES, SMALL, strict=True)]
    module = EmbeddingBagCollection(configs)
    first, *others = module.parameters()
    apply_optimizer_in_backward(RowWiseAdagrad, [first], {"lr": 0.1})
    apply_optimizer_in_backward(torch.optim.SGD, others, {"lr": 0.1})
    return module


def step_of(rank: int, batches: Sequence[int], module: Any, world: Meeting, host: Meeting) -> Seen:
    """Two steps of one rank."""
    log: list[str] = []
    env: Any = SimpleNamespace(
        rank=rank, world_size=len(batches), local_world_size=HOST, process_group=(world, rank, log),
        require_group=lambda: (world, rank, log), local_group=lambda: (host, rank, log),
    )  # fmt: skip
    shards = shards_for(len(batches), SMALL, 8)
    model = ShardedEmbeddingBagCollection(module, shards, env, CPU, default_optimizer=(torch.optim.SGD, {"lr": 0.1}))
    sent, outputs = model._exchange.sent, []
    for number in range(2):
        values = model(batch_of(1000 * number + rank, batches[rank], SMALL)).values()
        outputs.append(values.detach().clone())
        values.backward(values.detach() * len(batches))
    traffic = predicted_bytes(model._routes, rank, batches, HOTNESS)
    predicted = sum(p.headers + p.ids + p.lengths + p.rows + p.gradients for p in traffic)
    return Seen(log, outputs, model._exchange.sent - sent, 2 * predicted)


@pytest.mark.full
def test_64_ranks_in_step_call_the_same_collectives_and_find_what_one_process_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(collection, "Exchange", Recorded)
    # what others see of optimizer states wants a process for each rank
    monkeypatch.setattr(fused_optimizer, "publish", lambda value, env: torch.empty(0))
    size = 64
    batches = [rank % 3 for rank in range(size)]
    everyone = Meeting(range(size))
    hosts = [Meeting(layout.ranks_of(host, HOST)) for host in range(size // HOST)]
    module = small()

    def run(rank: int) -> Seen:
        try:
            return step_of(rank, batches, module, everyone, hosts[rank // HOST])
        except BaseException:
            for meeting in (everyone, *hosts):
                meeting.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        steps = [pool.submit(run, rank) for rank in range(size)]
    errors = [error for error in (step.exception() for step in steps) if error is not None]
    # the others only say that it broke their meeting
    for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
        raise error
    results = [step.result() for step in steps]
    step = ["headers among 64", "ids among 64", "rows among 8", "rows among 64"]
    back = ["row gradients among 64", "row gradients among 8"]
    for result in results:
        assert result.log[-12:] == (step + back) * 2
        assert result.log == results[0].log
    assert sum(result.sent for result in results) == pytest.approx(sum(result.predicted for result in results))
    whole = small()
    begins = list(accumulate(batches, initial=0))
    for number in range(2):
        kjts = [batch_of(1000 * number + rank, batch, SMALL) for rank, batch in enumerate(batches)]
        ids = torch.cat([kjt[name].values() for name in NAMES for kjt in kjts])
        values = whole(
            KeyedJaggedTensor(NAMES, ids, lengths=torch.tensor(IDS).repeat_interleave(sum(batches)))
        ).values()
        for rank, result in enumerate(results):
            expected = values[begins[rank] : begins[rank + 1]]
            assert (result.outputs[number] - expected).abs().sum() <= 1e-5 * expected.abs().sum()
        values.backward(values.detach())
