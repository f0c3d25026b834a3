"""What travels between ranks: packed bytes, headers, and ids in the order of one process that saw the whole batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given, settings
from hypothesis import strategies as st
from ranks import run_ranks
from torch import Tensor

from shardwise import KeyedJaggedTensor
from shardwise.embeddings import OptimizerSpec
from shardwise.sharding import header
from shardwise.sharding.exchange import Exchange, _held, _Lent, packed_size, unpack
from shardwise.sharding.layout import Shard, data_parallel, table_wise
from shardwise.sharding.route import Inbound, Outbound, Routes, Table, arrange, block_layout, plan_routes, route

DTYPES = [torch.uint8, torch.int16, torch.int32, torch.int64, torch.float16, torch.float32, torch.float64]
ALONE = Exchange(None)


def tensors_like(numbers: list[tuple[int, torch.dtype]]) -> list[Tensor]:
    return [(torch.arange(n) * 37 % 251).to(dtype) for n, dtype in numbers]


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 19), st.sampled_from(DTYPES)), min_size=1, max_size=6))
def test_what_is_packed_comes_out_again(numbers: list[tuple[int, torch.dtype]]) -> None:
    tensors = tensors_like(numbers)
    sizes, dtypes = [n for n, _ in numbers], [dtype for _, dtype in numbers]
    size = packed_size(sizes, dtypes)
    (block,) = ALONE.ids([tensors], [size])
    assert size % 8 == 0
    assert block.shape == (size,)
    for sent, came in zip(tensors, unpack(block, sizes, dtypes), strict=True):
        assert sent.dtype == came.dtype
        assert torch.equal(sent, came)


def bytes_and_rows(seed: int) -> tuple[bool, float, float, int]:
    """Blocks of odd sizes to every rank and back; the two sides of the adjoint's equation."""
    rank, world = dist.get_rank(), dist.get_world_size()
    exchange = Exchange(dist.group.WORLD)

    def block(source: int, target: int) -> list[Tensor]:
        return tensors_like([((seed + 3 * source + 5 * target) % 7, torch.int32), (source * target % 3, torch.float64)])

    layouts = [([t.shape[0] for t in block(r, rank)], [torch.int32, torch.float64]) for r in range(world)]
    received = exchange.ids([block(rank, r) for r in range(world)], [packed_size(*layout) for layout in layouts])
    same = all(
        torch.equal(sent, came)
        for r in range(world)
        for sent, came in zip(block(r, rank), unpack(received[r], *layouts[r]), strict=True)
    )

    generator = torch.Generator().manual_seed(seed * 10 + rank)
    sizes = [[(seed * s + 2 * t + s) % 5 for t in range(world)] for s in range(world)]
    rows = [torch.randn(n, generator=generator) for n in sizes[rank]]
    gradients = [torch.randn(sizes[r][rank], generator=generator) for r in range(world)]
    forth = exchange.rows(rows, [sizes[r][rank] for r in range(world)])
    back = exchange.rows_transpose(gradients, sizes[rank])
    one = sum(float(torch.dot(a, b)) for a, b in zip(forth, gradients, strict=True))
    other = sum(float(torch.dot(a, b)) for a, b in zip(rows, back, strict=True))
    return same, one, other, exchange.calls


@pytest.mark.ranks
@pytest.mark.parametrize("world", [1, 2, 3])
def test_blocks_arrive_and_rows_transpose_is_the_adjoint_of_rows(world: int) -> None:
    for seed in (0, 1, 4):
        ranks = run_ranks(world, bytes_and_rows, seed)
        assert all(same and calls == 3 for same, _, _, calls in ranks)
        # <rows(x), y> over all ranks is <x, rows_transpose(y)>
        assert sum(one for _, one, _, _ in ranks) == pytest.approx(sum(other for _, _, other, _ in ranks), abs=1e-5)


def lend_and_settle() -> list[int]:
    """Bytes that the backend can still hold after an exchange and a broadcast, and what is out after settling."""
    exchange = Exchange(dist.group.WORLD)
    values = torch.arange(2.0 * exchange.world_size)
    exchange.rows(values.split(2), [2] * exchange.world_size)
    exchange.broadcast(values)
    held = sum(tensor.untyped_storage().nbytes() for tensor in _Lent._out)
    assert _Lent.settle()
    # a finished collective reaches nothing of ours, and ours are intact
    assert torch.equal(values, torch.arange(2.0 * exchange.world_size))
    return [held, len(_held(_Lent._out))]


@pytest.mark.ranks
@pytest.mark.parametrize("world", [1, 2])
def test_the_backend_has_let_go_of_every_tensor_once_settled(world: int) -> None:
    assert run_ranks(world, lend_and_settle) == [[0, 0]] * world


def test_a_process_does_not_exit_while_the_backend_holds_a_tensor_of_its_last_collective() -> None:
    mine = torch.arange(4.0)
    with _Lent(mine) as (lent,):
        assert lent.data_ptr() == mine.data_ptr()
        held = lent[:2]  # refers to it from C++, as a thread of gloo does
    assert not _Lent.settle(0.01)
    del held
    assert _Lent.settle(0.01)
    assert mine.tolist() == [0, 1, 2, 3]


FACTS: dict[str, Any] = {"update": True, "fingerprint": 2**62 + 5, "groups": 3}
CHECKED: dict[str, Any] = {"update": True, "fingerprint": 2**62 + 5}


def test_a_header_tells_each_rank_its_sizes() -> None:
    heads = header.unpack(header.pack(7, [[1, 2, 3], [4], []], **FACTS).tolist())
    assert [head.ids_to_groups for head in heads] == [[1, 2, 3], [4, 0, 0], [0, 0, 0]]
    assert all((head.batch, head.update, head.fingerprint, head.text) == (7, True, 2**62 + 5, "") for head in heads)
    header.raise_failures(heads, None, **CHECKED)


@settings(deadline=None)
@given(st.text(st.characters(exclude_characters="\0"), max_size=600))
# a file name that is no UTF-8: its rank raised before the exchange, and the others waited
@example("\udcff")
def test_the_text_of_a_failure_travels_up_to_512_bytes(text: str) -> None:
    failure = ValueError(text)
    heads = header.unpack(header.pack_failure(failure, 2, **FACTS).tolist())
    data = text.encode(errors="backslashreplace")
    assert heads[0].text == data[:512].decode(errors="replace")
    with pytest.raises(ValueError) as raised:
        header.raise_failures([header.unpack(header.pack(1, [[]], **FACTS).tolist())[0], heads[1]], None, **CHECKED)
    assert str(raised.value) == f"rank 1: {heads[1].text}"


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
    sent = [header.pack(1, [[]], **FACTS), header.pack_failure(failure, 1, **FACTS)]
    heads = [head for rows in sent for head in header.unpack(rows.tolist())]
    with pytest.raises(Exception) as raised:
        header.raise_failures(heads, None, **CHECKED)
    assert type(raised.value) is kind
    assert raised.value.args == (text,)


def test_a_process_alone_raises_its_own_exception() -> None:
    failure = ZeroDivisionError("by zero")
    with pytest.raises(ZeroDivisionError) as raised:
        header.raise_failures(header.unpack(header.pack_failure(failure, 1, **FACTS).tolist()), failure, **CHECKED)
    assert raised.value is failure


def naive_order(bags: list[list[list[list[int]]]], lookups: list[int]) -> tuple[list[int], list[int]]:
    """Ids and bag lengths by (lookup, rank, sample, position); bags[rank][lookup][sample] are ids."""
    chosen = [bag for n in lookups for one in bags for bag in one[n]]
    return [i for bag in chosen for i in bag], [len(bag) for bag in chosen]


BAG = st.lists(st.integers(0, 8), max_size=3)


@st.composite
def worlds(draw: st.DrawFn) -> tuple[list[int | None], list[bool], list[list[list[list[int]]]]]:
    """Where each lookup's table is (None: on every rank), whether it is trained, and bags[rank][lookup][sample]."""
    world = draw(st.integers(1, 4))
    where = draw(st.lists(st.none() | st.integers(0, world - 1), max_size=4))
    trained = draw(st.lists(st.booleans(), min_size=len(where), max_size=len(where)))
    batches = draw(st.lists(st.integers(0, 3), min_size=world, max_size=world))
    bags = [[[draw(BAG) for _ in range(n)] for _ in where] for n in batches]
    return where, trained, bags


def kjt_of(bags: list[list[list[int]]], batch: int, dtype: torch.dtype = torch.int64) -> KeyedJaggedTensor:
    ids = torch.tensor([i for one in bags for bag in one for i in bag], dtype=dtype)
    lengths = torch.tensor([len(bag) for one in bags for bag in one], dtype=torch.int64)
    # weights tell the ids apart
    weights = torch.arange(len(ids), dtype=torch.float32)
    return KeyedJaggedTensor([f"f{n}" for n in range(len(bags))], ids, weights, lengths, stride=batch)


def routes_of(where: list[int | None], trained: list[bool], world: int) -> Routes:
    tables = [
        Table(f"t{n}", 9, 4, torch.float32, OptimizerSpec("sgd") if sgd else None, (f"f{n}",))
        for n, sgd in enumerate(trained)
    ]
    shards: list[Shard] = []
    for n, place in enumerate(where):
        shards += data_parallel(f"t{n}", 9, 4, world) if place is None else table_wise(f"t{n}", 9, 4, place)
    return plan_routes(tables, shards, world)


def hand_over(routes: Routes, sent: list[Outbound], rank: int, update: bool) -> Inbound:
    """What `rank` gets of what all ranks sent, as the exchange would bring it."""
    lookups, blocks = len(routes.served(rank, update)), []
    for outbound in sent:
        ids = sum(outbound.ids_to_groups[rank])
        elements, dtypes, size = block_layout(lookups, outbound.batch, ids, routes.id_dtype, True)
        (block,) = ALONE.ids([outbound.blocks[rank]], [size])
        blocks.append(unpack(block, elements, dtypes))
    per_group = [sum(o.ids_to_groups[rank][g] for o in sent) for g in range(len(routes.groups[rank]))]
    return arrange(blocks, [o.batch for o in sent], lookups, per_group, keep_arrival=True)


@settings(deadline=None)
@given(worlds(), st.booleans())
def test_ids_arrive_in_the_order_of_one_process(
    drawn: tuple[list[int | None], list[bool], list[list[list[list[int]]]]], update: bool
) -> None:
    where, trained, bags = drawn
    world = len(bags)
    routes = routes_of(where, trained, world)
    batches = [len(one[0]) if one else 0 for one in bags]
    kjts = [kjt_of(one, batch) for one, batch in zip(bags, batches, strict=True)]
    sent = [route(kjt, routes, weighted=True, update=update) for kjt in kjts]
    for rank in range(world):
        mine = [n for n, place in enumerate(where) if place == rank]
        replicas = [n for n, place in enumerate(where) if place is None and trained[n]]
        # tables of a group stand together; here those trained and those not
        served = routes.served(rank, update)
        assert sorted(served) == sorted(mine + (replicas if update else []))
        inbound = hand_over(routes, sent, rank, update)
        ids, lengths = naive_order(bags, served)
        assert inbound.ids.tolist() == ids
        assert inbound.offsets.diff().tolist() == lengths
        assert int(inbound.offsets[0]) == 0
        assert inbound.batches == batches
        assert sum(inbound.group_ids) == len(ids)
        weights = [w for n in served for kjt in kjts for w in kjt[f"f{n}"].weights().tolist()]
        assert inbound.weights is not None
        assert inbound.weights.tolist() == weights
        if inbound.arrival is not None:
            came = torch.cat([torch.cat([kjt[f"f{n}"].values() for n in served] or [kjt.values()[:0]]) for kjt in kjts])
            assert torch.equal(came[inbound.arrival].long(), inbound.ids.long())
            assert sorted(inbound.arrival.tolist()) == list(range(len(ids)))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("rows", [2**31 - 1, 2**31])
def test_ids_travel_as_int32_where_every_row_number_fits(rows: int, dtype: torch.dtype) -> None:
    """int32 ids of a table beyond 2^31 rows raised "value cannot be converted to type int without overflow"."""
    table = Table("t", rows, 1, torch.float32, OptimizerSpec("sgd"), ("f0",))
    routes = plan_routes([table], table_wise("t", rows, 1, 0), 1)
    bags = [[[0, 2**31 - 2], [7]]]
    outbound = route(kjt_of(bags, 2, dtype), routes, weighted=False, update=True)
    ids = outbound.blocks[0][0]
    assert ids.dtype == (torch.int32 if rows < 2**31 else torch.int64)
    assert ids.tolist() == [0, 2**31 - 2, 7]


def test_an_id_beyond_int32_stays_outside_of_every_table() -> None:
    table = Table("t", 9, 1, torch.float32, OptimizerSpec("sgd"), ("f0",))
    routes = plan_routes([table], table_wise("t", 9, 1, 0), 1)
    outbound = route(kjt_of([[[2**32 + 3, -(2**32) + 3]]], 1), routes, weighted=False, update=True)
    assert not any(0 <= i < 9 for i in outbound.blocks[0][0].tolist())


def test_parts_of_tables_are_not_routed_yet() -> None:
    table = Table("t", 9, 4, torch.float32, None, ("f",))
    with pytest.raises(ValueError, match=r"table 't': only whole tables are routed, got rows \(0, 5\)"):
        plan_routes([table], [Shard("t", 0, (0, 5), (0, 4)), Shard("t", 0, (5, 9), (0, 4))], 1)
