"""What travels between ranks: blocks, headers, and ids in the order of one process that saw the whole batch."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given, settings, strategies as st
from jagged_batches import kjt as keyed
from lone_ranks import lone_ranks
from ranks import run_ranks, world_group
from sharding_steps import blocks_of, handed_over, routed_step
from torch import Tensor

from shardwise import KeyedJaggedTensor, RankFailure
from shardwise.embeddings import OptimizerSpec
from shardwise.planner import layout
from shardwise.planner.layout import Shard
from shardwise.sharding.comms.consensus import STEP_ERRORS, send_header
from shardwise.sharding.comms.exchange import Exchange, Pending, _aliases, _device_of_objects, hang_up, in_use, settle
from shardwise.sharding.comms.watch import watch_over
from shardwise.sharding.engine.route import Sending
from shardwise.sharding.engine.routes import Routes, Table, plan_routes
from shardwise.sharding.engine.wire import Receiving, pack_weight_gradients

CPU = torch.device("cpu")


def numbers(n: int, first: int) -> Tensor:
    return torch.arange(first, first + n, dtype=torch.int32)


def blocks_and_rows(seed: int) -> tuple[bool, float, float, int]:
    """Blocks of odd sizes to every rank and back; the two sides of the adjoint's equation."""
    rank, world = dist.get_rank(), dist.get_world_size()
    exchange = Exchange(dist.group.WORLD)

    def block(source: int, target: int) -> list[Tensor]:
        return [numbers((seed + 3 * source + 5 * target) % 7, source), numbers(source * target % 3, target)]

    sizes_of = [sum(t.shape[0] for t in block(r, rank)) for r in range(world)]
    blocks = [torch.cat(block(rank, r)) for r in range(world)]
    pending = exchange.all_to_all(torch.cat(blocks), list(map(len, blocks)), sizes_of, what="ids")
    received = torch.split(pending.wait(), sizes_of)
    same = all(torch.equal(torch.cat(block(r, rank)), received[r]) for r in range(world))

    generator = torch.Generator().manual_seed(seed * 10 + rank)
    sizes = [[(seed * s + 2 * t + s) % 5 for t in range(world)] for s in range(world)]
    sent_sizes, received_sizes = sizes[rank], [sizes[r][rank] for r in range(world)]
    rows, gradients = (torch.randn(sum(n), generator=generator) for n in (sent_sizes, received_sizes))
    forth = exchange.rows(rows, sent_sizes, received_sizes).wait()
    back = exchange.rows_transpose(gradients, received_sizes, sent_sizes).wait()
    return same, float(torch.dot(forth, gradients)), float(torch.dot(rows, back)), exchange.calls


@pytest.mark.ranks
@pytest.mark.parametrize("world", [1, 2, 3])
def test_blocks_arrive_and_rows_transpose_is_the_adjoint_of_rows(world: int) -> None:
    for seed in (0, 1, 4):
        ranks = run_ranks(world, blocks_and_rows, seed)
        # one rank exchanges nothing
        assert all(same and calls == (3 if world > 1 else 0) for same, _, _, calls in ranks)
        # <rows(x), y> over all ranks is <x, rows_transpose(y)>
        assert sum(dot for _, dot, _, _ in ranks) == pytest.approx(sum(dot for _, _, dot, _ in ranks), abs=1e-5)


def lend_and_settle() -> list[int]:
    """Bytes that the backend can still hold after an exchange and a broadcast, and what is out after settling."""
    exchange = Exchange(dist.group.WORLD)
    values = torch.arange(2.0 * exchange.world_size)
    sizes = [2] * exchange.world_size
    exchange.rows(values, sizes, sizes).wait()
    exchange.broadcast(values)
    held_bytes = sum(tensor.untyped_storage().nbytes() for tensor in _aliases)
    assert settle()
    # a finished collective reaches nothing of ours, and ours are intact
    assert torch.equal(values, torch.arange(2.0 * exchange.world_size))
    return [held_bytes, len(in_use())]


def leave_without_waiting() -> tuple[bool, int]:
    """Whether all is settled though one result was never asked for and another is kept, and what waits for it then."""
    exchange = Exchange(dist.group.WORLD)
    rows = torch.zeros(exchange.world_size, 3, dtype=torch.int64)
    asked, never = (exchange.all_to_all(rows, what="headers") for _ in range(2))
    asked.wait()
    return settle(), len(asked.wait()) + len(never.wait())


@pytest.mark.ranks
def test_a_process_that_leaves_results_on_their_way_ends_at_once() -> None:
    """A training loop that was left with batches under way waited ten seconds at its exit."""
    assert run_ranks(2, leave_without_waiting) == [(True, 4), (True, 4)]


def keep_the_failure() -> tuple[str, bool]:
    """What rank 0 raises while rank 1 fails, and whether nothing is held though the error is kept."""
    group = world_group()
    watch = watch_over([group], 20, hang_up)
    assert watch is not None
    with pytest.raises((RankFailure, ZeroDivisionError)) as error, watch.over("a step"):
        if dist.get_rank() == 1:
            raise ZeroDivisionError
        Exchange(group).gather([7], CPU)
    return error.typename, settle(2) and not _aliases


@pytest.mark.ranks
def test_a_process_that_keeps_the_failure_of_a_rank_ends_at_once() -> None:
    """An uncaught RankFailure, whose traceback Python keeps to the end, made each process wait ten seconds at its exit:
    a frame of it knew the collective, and the collective its tensors."""
    ends = [rank.value for rank in lone_ranks(2, keep_the_failure)]
    assert ends == [("RankFailure", True), ("ZeroDivisionError", True)]


def test_a_group_that_is_gone_has_nothing_to_hang_up() -> None:
    """A program whose handler of RankFailure destroyed its group while the watch closed it printed a traceback of the
    watch's thread beside the failure."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group = world_group()
    dist.destroy_process_group()
    hang_up(group)


@pytest.mark.ranks
@pytest.mark.parametrize("world", [1, 2])
def test_the_backend_has_let_go_of_every_tensor_once_settled(world: int) -> None:
    assert run_ranks(world, lend_and_settle) == [[0, 0]] * world


def test_a_process_does_not_exit_while_the_backend_holds_a_tensor_of_its_last_collective() -> None:
    values = torch.arange(4.0)
    pending = Pending(values, Exchange(None), lambda *tensors, **_: None)
    (alias,) = pending._aliases
    assert alias.data_ptr() == values.data_ptr()
    view = alias[:2]  # refers to it from C++, as a thread of gloo does
    pending.wait()
    assert alias.numel() == 0
    assert not settle(0.01)
    del view
    assert settle(0.01)
    assert values.tolist() == [0, 1, 2, 3]


# the fingerprint of a plan, a backward that trains tables, no gradients of weights
SHARED = (2**62 + 5, 2, 0)


class Heard(Exchange):
    """An exchange in which every other rank sends what is given: rows of a header, and then bytes."""

    def __init__(self, rows: list[list[int]], message: bytes = b"") -> None:
        super().__init__(None)
        self._rows, self._message, self.world_size, self.alone = rows, message, len(rows), False

    def all_to_all(self, *args: Any, **kwargs: Any) -> Pending:
        return Pending(torch.tensor(self._rows))

    def value(self, mine: bytes, rank: int, device: torch.device | None = None) -> bytes:
        assert rank == 1
        return self._message


def row_of(*numbers: int, status: int = 0, shared: tuple[int, ...] = SHARED) -> list[int]:
    return [*shared, status, *numbers]


def received(exchange: Exchange, numbers: Any) -> list[list[int]]:
    return send_header(exchange, CPU, numbers, shared=SHARED).receive()


def test_a_header_brings_each_rank_its_numbers() -> None:
    assert received(Heard([row_of(7, 6, 5), row_of(8, 4, 0)]), [[0] * 3] * 2) == [[7, 6, 5], [8, 4, 0]]


def headers_of_other_lengths() -> list[list[int]]:
    rank, world = dist.get_rank(), dist.get_world_size()
    rows = [[100 * rank + target] * (1 + target) for target in range(world)]
    return send_header(Exchange(dist.group.WORLD), CPU, rows, width=4).receive()


@pytest.mark.ranks
def test_rows_for_ranks_with_fewer_groups_are_filled_up() -> None:
    for rank, rows in enumerate(run_ranks(3, headers_of_other_lengths)):
        assert rows == [([100 * source + rank] * (1 + rank) + [0] * 4)[:4] for source in range(3)]


@pytest.mark.parametrize(
    ("shared", "what"),
    [
        ((6, 2, 0), "plans, table configs or order of lookups"),
        ((SHARED[0], 0, 0), "whether gradients are enabled"),
        ((SHARED[0], 1, 0), r"whether their module is in train\(\) or eval\(\)"),
        ((SHARED[0], 2, 1), "whether per-id weights have gradients"),
    ],
)
def test_ranks_that_differ_are_named(shared: tuple[int, ...], what: str) -> None:
    with pytest.raises(RuntimeError, match=rf"^ranks \[1\] differ from this one in .*{what}"):
        received(Heard([row_of(0), row_of(0, shared=shared)]), [[0]] * 2)


@settings(deadline=None)
@given(st.text(max_size=600))
# a file name that is no UTF-8: its rank raised before the exchange, and the others waited
@example("\udcff")
def test_the_text_of_a_failure_travels_as_it_is(text: str) -> None:
    assert str(STEP_ERRORS.of_rank(ValueError(text), 3)) == f"rank 3: {text}"


@pytest.mark.parametrize(
    ("failure", "kind", "text"),
    [
        (IndexError("id 9"), IndexError, "rank 1: id 9"),
        (TypeError("no"), TypeError, "rank 1: no"),
        (KeyError("a 'b'"), KeyError, "rank 1: a 'b'"),
        (KeyError(), KeyError, "rank 1: "),
        (ZeroDivisionError("by zero"), RuntimeError, "rank 1: ZeroDivisionError: by zero"),
        (torch.OutOfMemoryError("full"), RuntimeError, "rank 1: OutOfMemoryError: full"),
    ],
)
def test_a_failure_keeps_its_type_and_names_its_rank(failure: Exception, kind: type[Exception], text: str) -> None:
    exchange = Heard([row_of(0), row_of(0, status=1)], b"e" + STEP_ERRORS.encode(failure))
    with pytest.raises(Exception) as raised:
        received(exchange, [[0]] * 2)
    assert type(raised.value) is kind
    assert raised.value.args == (text,)


def test_a_process_alone_raises_its_own_exception() -> None:
    failure = ZeroDivisionError("by zero")
    with pytest.raises(ZeroDivisionError) as raised:
        received(Exchange(None), failure)
    assert raised.value is failure


ROWS, DIM = 9, 4
BAG = st.lists(st.integers(0, ROWS - 1), max_size=3)
Bags = list[list[list[list[int]]]]


@st.composite
def worlds(draw: st.DrawFn) -> tuple[list[list[Shard]], Bags]:
    """Shards of each lookup's table, and bags[rank][lookup][sample]."""
    world = draw(st.integers(1, 4))
    ranks = st.integers(0, world - 1)
    plans = []
    for n in range(draw(st.integers(0, 4))):
        name, cut, at = f"t{n}", draw(st.integers(0, ROWS)), [draw(ranks) for _ in range(4)]
        ways = {
            "replica": lambda t: layout.data_parallel(t, ROWS, DIM, world),
            "whole": lambda t, at=at: layout.table_wise(t, ROWS, DIM, at[0]),
            "columns": lambda t, at=at: layout.column_wise(t, ROWS, DIM, at[:2], [1, 3]),
            "rows": lambda t, at=at, cut=cut: layout.row_wise(t, ROWS, DIM, at[:2], [cut, ROWS - cut]),
            "grid": lambda t, at=at: layout.grid(t, ROWS, DIM, [at[:2], at[2:]]),
        }
        plans.append(ways[draw(st.sampled_from(sorted(ways)))](name))
    batches = [draw(st.integers(0, 3)) for _ in range(world)]
    return plans, [[[draw(BAG) for _ in range(batch)] for _ in plans] for batch in batches]


def kjt_of(bags: list[list[list[int]]], dtype: torch.dtype = torch.int64) -> KeyedJaggedTensor:
    """Weights tell the ids apart."""
    count = sum(len(bag) for samples in bags for bag in samples)
    weights = torch.arange(count, dtype=torch.float32)
    return keyed({f"f{n}": samples for n, samples in enumerate(bags)}, weights=weights, dtype=dtype)


def routes_of(plans: list[list[Shard]], world: int, **more: Any) -> Routes:
    sgd = OptimizerSpec("sgd")
    tables = [Table(f"t{n}", ROWS, DIM, torch.float32, sgd, (f"f{n}",)) for n in range(len(plans))]
    return plan_routes(tables, [shard for shards in plans for shard in shards], world, **more)


@settings(deadline=None)
@given(worlds(), st.booleans(), st.booleans())
def test_ids_arrive_in_the_order_of_one_process(
    drawn: tuple[list[list[Shard]], Bags], pooled: bool, update: bool
) -> None:
    """At every slot: ids of all ranks' samples in their order, as row numbers of the shard, each with its weight."""
    plans, bags = drawn
    world = len(bags)
    routes = routes_of(plans, world, pooled=pooled, weighted=True)
    kjts = [kjt_of(rank_bags) for rank_bags in bags]
    sending = Sending(routes, [f"f{n}" for n in range(len(plans))], update, CPU)
    sent = [routed_step(kjt, routes, sending, kjt.weights()) for kjt in kjts]
    for rank in range(world):
        step = handed_over(sent, Receiving(routes, rank, update, CPU), rank)
        ids, lengths, weights = [], [], []
        groups = [group for group in routes.serving[rank].groups if update or not group.is_replica]
        for group in groups:
            for slot in group.slots:
                low, high = group.shards[slot.shard].rows
                for source, kjt in zip(bags, kjts, strict=True):
                    id_weights = iter(kjt[f"f{slot.lookup}"].weights().tolist())
                    bags_of = [[(i - low, next(id_weights)) for i in bag] for bag in source[slot.lookup]]
                    kept = [[(i, w) for i, w in bag if 0 <= i < high - low] for bag in bags_of]
                    ids += [i for bag in kept for i, _ in bag]
                    weights += [w for bag in kept for _, w in bag]
                    lengths += [len(bag) for bag in kept] if pooled else [sum(map(len, kept))]
        assert step.received_ids.tolist() == ids
        assert step.received_offsets.diff().tolist() == lengths
        assert int(step.received_offsets[0]) == 0
        assert step.received_weights is not None and step.received_weights.tolist() == weights
        assert step.batches == [kjt.stride() if pooled else 1 for kjt in kjts]
        samples, first_slot = step.received_lengths.shape[1], [0, *accumulate(len(group.slots) for group in groups)]
        slots = [sum(lengths[a * samples : b * samples]) for a, b in pairwise(first_slot)]
        assert [b - a for a, b in pairwise(step.first_id)] == slots
        # what each id is given goes back to its source, stream by stream
        arrived = torch.cat([blocks_of(sender)[rank][: sender.ids_to[rank]] for sender in sent])
        step.returned_from = step.ids_from
        back, sizes = pack_weight_gradients(step, [step.received_ids + 1.0])
        # once from each slot that looks it up
        assert sizes == step.ids_from and bool(((back % (arrived + 1) == 0) & (back > 0)).all())


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("rows", [2**31 - 1, 2**31])
def test_ids_travel_as_int32_where_every_row_number_fits(rows: int, dtype: torch.dtype) -> None:
    """int32 ids of a table beyond 2^31 rows raised "value cannot be converted to type int without overflow"."""
    table = Table("t", rows, 1, torch.float32, OptimizerSpec("sgd"), ("f0",))
    routes = plan_routes([table], layout.table_wise("t", rows, 1, 0), 1)
    batch = kjt_of([[[0, 2**31 - 2], [7]]], dtype)
    step = routed_step(batch, routes, Sending(routes, ["f0"], True, CPU))
    assert step.sent_ids.dtype == (torch.int32 if rows < 2**31 else torch.int64)
    assert step.sent_ids.tolist() == [0, 2**31 - 2, 7]
    assert len(blocks_of(step)[0]) - step.sent_lengths.numel() == (3 if rows < 2**31 else 6)


@pytest.mark.parametrize("world", [1, 2])
def test_an_id_beyond_int32_stays_outside_of_every_table(world: int) -> None:
    table = Table("t", 9, 1, torch.float32, OptimizerSpec("sgd"), ("f0",))
    routes = plan_routes([table], layout.row_wise("t", 9, 1, range(world)), world)
    sending = Sending(routes, ["f0"], True, CPU)
    step = routed_step(kjt_of([[[2**32 + 3, -(2**32) + 3, 9, -1]]]), routes, sending, lenient=True)
    assert step.sent_ids.shape == (4,)
    assert not any(0 <= i < 9 for i in step.sent_ids.tolist())


def test_columns_that_are_cut_for_some_rows_only_are_refused() -> None:
    table = Table("t", 9, 4, torch.float32, None, ("f",))
    shards = [Shard("t", 0, (0, 5), (0, 4)), Shard("t", 0, (5, 9), (0, 1)), Shard("t", 1, (5, 9), (1, 4))]
    with pytest.raises(ValueError, match=r"^table 't': columns \(0, 1\) are held for some rows only, .* columns first"):
        plan_routes([table], shards, 2)


def bytes_of_rank_one() -> tuple[bytes, object]:
    by: list[object] = []
    broadcast = dist.broadcast

    def noted(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        by.append(str(tensor.device))
        return broadcast(tensor, *args, **kwargs)

    with patch.object(dist, "broadcast", noted):
        value = Exchange(dist.group.WORLD).value(b"of %d" % dist.get_rank(), 1, torch.device("cuda", 1))
    return value, by


@pytest.mark.ranks
def test_bytes_of_a_rank_are_carried_by_gloo_in_host_memory() -> None:
    assert run_ranks(2, bytes_of_rank_one) == [(b"of 1", ["cpu", "cpu"])] * 2


def no_bytes_of_rank_one() -> bytes:
    return Exchange(dist.group.WORLD).value(b"longer" if dist.get_rank() == 0 else b"", 1)


@pytest.mark.ranks
def test_a_rank_may_have_no_bytes_to_give() -> None:
    assert run_ranks(2, no_bytes_of_rank_one) == [b"", b""]


@pytest.mark.parametrize(
    ("backends", "device", "bound", "current", "local", "by"),
    [
        ("cpu:gloo,cuda:nccl", "cuda:2", None, 0, None, "cpu"),
        ("cuda:nccl", "cuda:2", None, 0, None, "cuda:2"),
        ("cuda:nccl", None, "cuda:3", 0, "1", "cuda:3"),
        # without set_device all ranks took the first GPU
        ("cuda:nccl", None, None, 0, "1", "cuda:1"),
        ("cuda:nccl", "cpu", None, 2, "1", "cuda:2"),
        # each process sees one GPU
        ("cuda:nccl", None, None, 0, "5", "cuda:0"),
        ("cuda:nccl", None, None, 0, None, "cuda:0"),
    ],
)
def test_nccl_carries_bytes_by_the_own_device_of_a_rank(
    monkeypatch: pytest.MonkeyPatch, backends: str, device: str | None, bound: str | None, current: int,
    local: str | None, by: str,
) -> None:  # fmt: skip
    group: Any = Mock(bound_device_id=None if bound is None else torch.device(bound))
    monkeypatch.setattr(dist, "get_backend_config", lambda group: backends)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    if local is None:
        monkeypatch.delenv("LOCAL_RANK", raising=False)
    else:
        monkeypatch.setenv("LOCAL_RANK", local)
    assert _device_of_objects(group, None if device is None else torch.device(device)) == torch.device(by)
