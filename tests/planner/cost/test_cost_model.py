"""The cost model: formulas by hand, what is conserved and what grows, constants, exact sums, bytes of real ranks."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from shardwise import DataType, ShardingEnv
from shardwise.kernels import rule_named
from shardwise.perf.compile.compiled import TARGETS
from shardwise.planner.constants_measured import CARDS, NUMBERS, OFFERED, Constants, card_named
from shardwise.planner.cost.draws import distinct_ids, shares
from shardwise.planner.cost.shardwise import ShardwiseCost, block_bytes, step_bytes
from shardwise.planner.cost.ways import Way, ways_of
from shardwise.planner.layout import split_rows
from shardwise.planner.plan.planning import plan_tables
from shardwise.planner.search.problem import PARTS, Choice
from shardwise.planner.tables import STATES, Feature, Skew, Table
from shardwise.planner.topology import Topology
from shardwise.sharding.calibration.calibrate import way_of
from shardwise.sharding.calibration.trial import Placed, Step

# nothing costs anything, but for what a test sets: bandwidths of 1 GB/s are 1e6 bytes a millisecond
FREE = Constants(**{name: 1e30 if name.endswith("_gb_s") else 0.0 for name in NUMBERS}, source="")
B, LENGTH, ROWS, DIM = 100, 5.0, 1000, 64
TABLE = Table("t", ROWS, DIM, features=(Feature("f", LENGTH),), optimizer="RowWiseAdagrad")
IDS, MS = B * LENGTH, 1e-6


def _way(kind: str, world: int, blocks: int = 1, rows: int = ROWS) -> Way:
    widths = (DIM // blocks,) * blocks
    if kind == "data_parallel":
        return Way(kind, "dense", widths, (rows,) * world, replica=True)
    spread = {"row_wise": world, "table_row_wise": 2, "grid_shard": 2}.get(kind, 1)
    return Way(kind, "fused", widths, tuple(split_rows(rows, spread)))


def _price(
    way: Way, table: Table = TABLE, world: int = 4, local: int | None = None, **constants: float
) -> dict[str, Any]:
    """Milliseconds [K, S] by part, where only `constants` cost anything."""
    cost = ShardwiseCost(Topology(world, "cpu", local_world_size=local), B, FREE.with_(**constants))
    return dict(zip(PARTS, cost.price(table, way).parts_ms, strict=True))


def test_ids_and_lengths_come_from_the_other_ranks() -> None:
    price = _price(_way("table_wise", 4), intra_gb_s=1.0)
    # 4 bytes an id, 4 a length, 3 of 4 ranks are others
    assert price["input_comms"] == pytest.approx((4 * 4 * IDS + 4 * 4 * B) * 3 / 4 * MS)
    assert price["fwd_comms"] == pytest.approx(4 * B * DIM * 4 * 3 / 4 * MS)
    assert price["bwd_comms"] == pytest.approx(price["fwd_comms"])


@pytest.mark.parametrize(
    ("table", "factor"), [(replace(TABLE, weighted=True), 8), (replace(TABLE, num_embeddings=2**31), 8), (TABLE, 4)]
)
def test_weights_and_large_tables_double_the_bytes_of_an_id(table: Table, factor: int) -> None:
    way = _way("table_wise", 4, rows=table.num_embeddings)
    input_ms = _price(way, table, intra_gb_s=1.0)["input_comms"]
    assert input_ms == pytest.approx((factor * 4 * IDS + 4 * 4 * B) * 3 / 4 * MS)


def test_ranks_of_other_hosts_are_reached_at_the_bandwidth_between_hosts() -> None:
    inside = _price(_way("table_wise", 4), local=2, intra_gb_s=1.0)["fwd_comms"]
    outside = _price(_way("table_wise", 4), local=2, inter_gb_s=1.0)["fwd_comms"]
    assert inside == pytest.approx(4 * B * DIM * 4 * 1 / 4 * MS)
    assert outside == pytest.approx(4 * B * DIM * 4 * 2 / 4 * MS)


def test_a_lookup_reads_each_row_once_from_memory_and_then_from_caches() -> None:
    draws = 4 * IDS
    distinct = ROWS * (1 - (1 - 1 / ROWS) ** draws)
    memory = _price(_way("table_wise", 4), row_gb_s=1.0)
    caches = _price(_way("table_wise", 4), again_gb_s=1.0)
    assert memory["fwd_compute"] == pytest.approx(distinct * DIM * 4 * MS)
    assert caches["fwd_compute"] == pytest.approx((draws - distinct) * DIM * 4 * MS)
    # the row and its state, read and written
    assert memory["bwd_compute"] == pytest.approx(distinct * 2 * (DIM * 4 + 4) * MS)
    assert caches["bwd_compute"] == pytest.approx(draws * DIM * 4 * MS)


@pytest.mark.parametrize(
    ("constant", "part", "each"),
    [
        ("id_ns", "fwd_compute", 4 * IDS),
        ("bag_ns", "fwd_compute", 4 * B),
        ("update_id_ns", "bwd_compute", 4 * IDS),
        ("stream_us", "overhead", 1e3),
    ],
)
def test_a_count_is_paid_for_by_its_constant(constant: str, part: str, each: float) -> None:
    price = _price(_way("table_wise", 4), **_only_constant(constant))
    assert price.pop(part) == pytest.approx(each * MS)
    assert max(other.max() for other in price.values()) < 1e-12


def test_sources_divide_ids_for_row_ranges_and_add_partial_sums() -> None:
    way = _way("row_wise", 4)
    np.testing.assert_allclose(_price(way, cut_id_ns=1.0)["overhead"], np.full((1, 4), IDS * MS))
    added, whole = (_price(_way(kind, 4), copy_gb_s=1.0)["fwd_compute"] for kind in ("row_wise", "table_wise"))
    # each rank writes sums of all bags, and as a source adds those of three others to the first: 3 x 12 bytes
    np.testing.assert_allclose(added, np.broadcast_to(whole + 3 * 3 * B * DIM * 4 * MS, (1, 4)))


def test_sums_that_are_added_in_a_host_leave_it_once() -> None:
    """Every rank of the host has sums of all bags; those of each source leave by one of them."""
    way = _way("table_row_wise", 8)
    inside = _price(way, world=8, local=2, intra_gb_s=1.0)["fwd_comms"]
    outside = _price(way, world=8, local=2, inter_gb_s=1.0)["fwd_comms"]
    block = 8 * B * DIM * 4
    np.testing.assert_allclose(inside, np.full((1, 2), block / 2 * MS))
    np.testing.assert_allclose(outside, np.full((1, 2), block / 2 * 6 / 8 * MS))


def test_replicas_take_the_ids_and_gradients_of_all_and_look_up_their_own() -> None:
    way = _way("data_parallel", 4)
    price = _price(way, intra_gb_s=1.0)
    np.testing.assert_allclose(price["bwd_comms"], np.full((1, 4), 4 * B * DIM * 4 * 3 / 4 * MS))
    assert not price["fwd_comms"].any()
    np.testing.assert_allclose(_price(way, id_ns=1.0)["fwd_compute"], np.full((1, 4), IDS * MS))
    np.testing.assert_allclose(_price(way, update_id_ns=1.0)["bwd_compute"], np.full((1, 4), 4 * IDS * MS))


def test_dense_gradients_of_all_rows_go_around_a_ring() -> None:
    dense = replace(TABLE, optimizer=None)
    price = _price(_way("data_parallel", 4), dense, intra_gb_s=1.0)
    np.testing.assert_allclose(price["bwd_comms"], np.full((1, 4), 2 * ROWS * DIM * 4 * 3 / 4 * MS))
    assert not price["input_comms"].any()


def test_rows_of_sequences_travel_one_for_each_id() -> None:
    rows = replace(TABLE, pooled=False)
    price = _price(_way("table_wise", 4), rows, intra_gb_s=1.0)
    assert price["fwd_comms"] == pytest.approx(4 * IDS * DIM * 4 * 3 / 4 * MS)
    # a number for each rank's ids instead of a length for each bag
    assert price["input_comms"] == pytest.approx((4 * 4 * IDS + 4 * 4) * 3 / 4 * MS)
    by_rows = _price(_way("row_wise", 4), rows, intra_gb_s=1.0)["fwd_comms"]
    assert by_rows.sum() == pytest.approx(price["fwd_comms"].sum())


def _real(kind: str, world: int = 4, table: Table = TABLE, blocks: int = 1, local: int | None = None) -> Choice:
    cost = ShardwiseCost(Topology(world, "cpu", local_world_size=local), B)
    return cost.price(table, _way(kind, world, blocks, table.num_embeddings))


def _only_constant(constant: str) -> dict[str, Any]:
    return {constant: 1.0}


@pytest.mark.parametrize("constant", ["row_gb_s", "again_gb_s", "copy_gb_s"])
@pytest.mark.parametrize("part", ["fwd_compute", "bwd_compute"])
def test_column_shards_move_together_what_the_whole_table_moves(constant: str, part: str) -> None:
    table = replace(TABLE, optimizer="Adagrad")
    whole, cut = (
        _price(_way(kind, 4, n), table, **_only_constant(constant))[part]
        for kind, n in (("table_wise", 1), ("column_wise", 4))
    )
    assert cut.sum() == pytest.approx(whole.sum())


@pytest.mark.parametrize("constant", ["row_gb_s", "again_gb_s", "id_ns", "update_id_ns", "update_row_ns"])
@pytest.mark.parametrize("skew", [Skew(), Skew(1.1), Skew(1.1, sorted_ids=True)])
def test_row_shards_look_up_together_what_the_whole_table_does(constant: str, skew: Skew) -> None:
    table = replace(TABLE, skew=skew)
    whole, cut = (
        sum(p.sum() for p in _price(_way(kind, 4), table, **_only_constant(constant)).values())
        for kind in ("table_wise", "row_wise")
    )
    assert cut == pytest.approx(whole, rel=5e-3)


def test_the_first_rows_are_busiest_where_ids_are_sorted_by_frequency() -> None:
    times = _real("row_wise", table=replace(TABLE, skew=Skew(1.1, sorted_ids=True))).time_ms[0]
    assert times.tolist() == sorted(times.tolist(), reverse=True) and times[0] > 1.2 * times[1]
    spread = _real("row_wise", table=replace(TABLE, skew=Skew(1.1))).time_ms[0]
    np.testing.assert_allclose(spread, spread[0])


WAYS = ("table_wise", "row_wise", "column_wise", "data_parallel", "table_row_wise")


@pytest.mark.parametrize("kind", WAYS)
@pytest.mark.parametrize(
    "more",
    [
        {"features": (Feature("f", 2 * LENGTH),)},
        {"features": (Feature("f", LENGTH), Feature("g", 1.0))},
        {"weighted": True},
        {"num_embeddings": 50 * ROWS},
    ],
)
def test_more_to_do_takes_longer(kind: str, more: dict[str, Any]) -> None:
    assert _real(kind, local=2, table=replace(TABLE, **more)).work_ms > _real(kind, local=2).work_ms


@pytest.mark.parametrize("kind", WAYS)
def test_a_faster_machine_takes_no_longer(kind: str) -> None:
    for name in NUMBERS:
        constants = CARDS["cpu"].constants
        value = getattr(constants, name)
        faster = constants.with_(**{name: value * 2 if name.endswith("_gb_s") else value / 2})
        topology, way = Topology(4, "cpu", local_world_size=2), _way(kind, 4)
        before, after = (
            ShardwiseCost(topology, B, machine).price(TABLE, way).work_ms for machine in (constants, faster)
        )
        assert after <= before


def test_every_rank_pays_for_its_own_batch_whatever_the_plan() -> None:
    topology = Topology(4, "cpu")
    sent = ShardwiseCost(topology, B, FREE.with_(sent_id_ns=1.0)).base_ms([TABLE, TABLE])
    assert sent == pytest.approx(2 * IDS * MS)
    steps = ShardwiseCost(topology, B, FREE.with_(step_us=10.0, exchange_us=1.0))
    other = replace(TABLE, module="other")
    assert steps.base_ms([TABLE, TABLE]) == pytest.approx(14e-3)
    assert steps.base_ms([TABLE, other]) == pytest.approx(28e-3)
    # one rank exchanges nothing
    alone = ShardwiseCost(Topology(1, "cpu"), B, FREE.with_(step_us=10.0, exchange_us=1.0))
    assert alone.base_ms([TABLE]) == pytest.approx(10e-3)


def test_a_batch_size_of_a_feature_goes_before_that_of_the_model() -> None:
    table = replace(TABLE, features=(Feature("f", LENGTH, batch_size=3 * B),))
    assert _price(_way("table_wise", 4), table, id_ns=1.0)["fwd_compute"] == pytest.approx(3 * 4 * IDS * MS)


def test_tables_that_differ_by_name_alone_share_a_price() -> None:
    cost = ShardwiseCost(Topology(4, "cpu"), B)
    twin = replace(TABLE, name="u", module="m", features=(Feature("g", LENGTH),))
    assert cost.price(TABLE, _way("table_wise", 4)) is cost.price(twin, _way("table_wise", 4))


def test_bandwidths_that_the_user_gave_win() -> None:
    usual, given = Topology(4, "cpu"), Topology(4, "cpu", intra_host_bw=2e6, ddr_mem_bw=5e6)
    constants = CARDS["cpu"].constants
    assert ShardwiseCost(usual, B, constants).constants == constants
    changed = ShardwiseCost(given, B, constants).constants
    # bytes a millisecond; rows stay as much slower than memory in order as they were
    assert (changed.intra_gb_s, changed.copy_gb_s) == (pytest.approx(2.0), pytest.approx(5.0))
    assert changed.row_gb_s / changed.copy_gb_s == pytest.approx(constants.row_gb_s / constants.copy_gb_s)


def test_memory_is_counted_where_the_device_has_it() -> None:
    for device, here, there in (("cuda", "hbm", "ddr"), ("cpu", "ddr", "hbm")):
        choice = ShardwiseCost(Topology(4, device), B).price(TABLE, _way("table_wise", 4))
        assert getattr(choice, here).min() > ROWS * DIM * 4 and not getattr(choice, there).any()


def test_a_hot_small_table_is_not_left_to_one_rank() -> None:
    """The plan for one table that all ranks read: one rank alone would do all the work."""
    table = Table("t", 100, 128, features=(Feature("f", 200.0),), optimizer="SGD")
    planned = plan_tables([table], Topology(8, "cuda"), 4096, cost=ShardwiseCost(Topology(8, "cuda"), 4096))
    ((_, choice, _),) = planned.placed()
    assert choice.sharding_type != "table_wise"


def test_the_same_question_has_the_same_answer() -> None:
    topology = Topology(16, "cuda", local_world_size=8)
    table = replace(TABLE, skew=Skew(1.05, 2.0, sorted_ids=True), num_embeddings=12_345)
    first, second = (
        [ShardwiseCost(topology, B).price(table, way).parts_ms for way in ways_of(table, topology)] for _ in range(2)
    )
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))


MISSING = object()


def test_constants_come_back_from_json(tmp_path: Path) -> None:
    path = tmp_path / "constants.json"
    constants = CARDS["h200"].constants
    constants.save(path, {"times": [1, 2]})
    assert Constants.load(path) == constants
    assert json.loads(path.read_text())["measured"] == {"times": [1, 2]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"row_gb_s": 0.0}, "row_gb_s must be positive"),
        ({"id_ns": -1.0}, "id_ns must be 0 or more"),
        ({"step_us": float("nan")}, "step_us must be a finite number"),
        ({"step_us": "5"}, "step_us must be a finite number"),
        ({"speed": 1.0}, r"unknown \['speed'\]"),
        ({"format": "else"}, "no constants of the planner"),
        ({"bag_ns": MISSING}, r"missing \['bag_ns'\]"),
    ],
)
def test_bad_constants_are_refused_by_name(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = tmp_path / "constants.json"
    given = {**CARDS["cpu"].constants.to_json(), **change}
    path.write_text(json.dumps({name: value for name, value in given.items() if value is not MISSING}))
    with pytest.raises(ValueError, match=message):
        Constants.load(path)


def test_presets_say_that_nobody_measured_them() -> None:
    assert all("nothing was measured" in card.constants.source for name, card in CARDS.items() if name != "cpu")
    assert card_named("H100") is CARDS["h100"]
    with pytest.raises(ValueError, match="card 'tpu' is unknown"):
        card_named("tpu")
    with pytest.raises(ValueError, match="card 'A100' is unknown: say which, a100-80, a100-40, a100-80-pcie"):
        card_named("A100")
    with pytest.raises(ValueError, match="card 'mi300' is unknown: did you mean 'mi300x'?"):
        card_named("mi300")


def test_kernels_are_compiled_for_every_card_that_is_offered() -> None:
    """A card of an architecture that kernels are not compiled for would be planned for and then run plain torch."""
    assert {name for name, card in CARDS.items() if card.target} == set(OFFERED) == set(CARDS) - {"cpu", "v100-32"}
    assert {CARDS[name].target for name in OFFERED} <= set(TARGETS)
    wanted = {"b200": "sm_100", "gh200": "sm_90", "l4": "sm_89", "l40s": "sm_89", "a10": "sm_86", "a100-80": "sm_80"}
    wanted |= {"mi300x": "gfx942", "mi325x": "gfx942", "mi355x": "gfx950"}
    assert {name: CARDS[name].target for name in wanted} == wanted


def test_faster_links_and_memory_make_a_card_faster() -> None:
    for slow, fast in (("l4", "a10"), ("a10", "l40s"), ("l40s", "a100-80-pcie"), ("a100-80", "h100"), ("h200", "b200")):
        slower, other = CARDS[slow].constants, CARDS[fast].constants
        assert slower.row_gb_s < other.row_gb_s and slower.intra_gb_s <= other.intra_gb_s
    assert CARDS["a100-80-pcie"].constants.intra_gb_s < CARDS["a100-80"].constants.intra_gb_s / 9


@pytest.mark.parametrize(("rows", "draws"), [(1, 5), (10, 3), (1000, 1), (1000, 5000), (10**9, 10**6)])
def test_uniform_ids_have_the_closed_form(rows: int, draws: int) -> None:
    expected = rows * -np.expm1(draws * np.log1p(-1 / rows)) if rows > 1 else 1.0
    assert distinct_ids(rows, draws, Skew()) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("rows", [1, 2, 300, 5000, 100_000])
@pytest.mark.parametrize(("alpha", "shift"), [(0.5, 0.0), (1.0, 0.0), (1.0, 3.0), (1.2, 20.0), (2.0, 0.0)])
@pytest.mark.parametrize("draws", [1, 50, 300_000])
def test_a_power_law_sums_over_all_ids(rows: int, alpha: float, shift: float, draws: int) -> None:
    mass = (np.arange(1, rows + 1) + shift) ** -alpha
    mass /= mass.sum()
    seen = 1 - (1 - mass) ** draws
    block = -(-rows // 3)
    parts = tuple(max(0, min(block, rows - block * part)) for part in range(3))
    cuts = [slice(low, low + size) for low, size in zip(np.cumsum([0, *parts]), parts, strict=False)]
    skew = Skew(alpha, shift, sorted_ids=True)
    lookups, distinct = shares(rows, draws, skew, parts)
    assert distinct_ids(rows, draws, skew) == pytest.approx(seen.sum(), rel=2e-3)
    np.testing.assert_allclose(lookups, [mass[cut].sum() for cut in cuts], atol=2e-3)
    np.testing.assert_allclose(distinct, [seen[cut].sum() for cut in cuts], atol=2e-3 * seen.sum())


def test_ids_that_are_not_sorted_fall_on_rows_evenly() -> None:
    lookups, distinct = shares(100, 1000, Skew(1.1), (60, 40))
    np.testing.assert_allclose(lookups, [0.6, 0.4])
    np.testing.assert_allclose(distinct, np.array([0.6, 0.4]) * distinct_ids(100, 1000, Skew(1.1)))


def test_more_skew_means_fewer_different_ids() -> None:
    counts = [distinct_ids(10_000, 20_000, Skew(alpha)) for alpha in (0.0, 0.4, 0.8, 1.2, 2.0)]
    assert counts == sorted(counts, reverse=True) and counts[-1] < 0.1 * counts[0]


def test_no_draws_and_no_rows_have_no_ids() -> None:
    assert distinct_ids(10, 0, Skew(1.0)) == distinct_ids(0, 10, Skew()) == 0


BATCH, WORLD = 512, 2
KINDS = ("table_wise", "row_wise", "column_wise", "data_parallel")


def _tables(optimizer: str | None, pooled: bool = True, dtype: DataType = DataType.FP32) -> list[Table]:
    """Rows that do not divide by the ranks; elements that fill whole boundaries of 64 bytes."""
    features = (Feature("a", 12.0),), (Feature("b", 3.0), Feature("c", 7.0))
    # rows of sequences share a buffer where they have one width
    dims = (64, 32) if pooled else (64, 64)
    return [
        Table(f"t{n}", 2001 + n, dim, dtype, table_features, pooled, optimizer=optimizer)
        for n, (dim, table_features) in enumerate(zip(dims, features, strict=True))
    ]


def _placed(tables: list[Table], kind: str, first: int | None = None) -> list[Placed]:
    placed = []
    for number, table in enumerate(tables):
        way = way_of(table, kind, Topology(WORLD, "cpu"))
        start = number if first is None else first
        starts = (0,) if way.span > 1 else tuple((start + k) % WORLD for k in range(len(way.widths)))
        placed.append(Placed(table, way, starts))
    return placed


def _predicted(placed: list[Placed], *, step: bool) -> list[int]:
    total = np.zeros(WORLD, np.int64)
    for item in placed:
        for width, start in zip(item.way.widths, item.starts, strict=True):
            num_bytes = step_bytes(item.table, item.way, width, WORLD, BATCH)
            if not step:
                num_bytes = block_bytes(item.table, item.way, width, WORLD, BATCH) - num_bytes
            total[start : start + item.way.span] += num_bytes
    per_rank: list[int] = total.tolist()
    return per_rank


def _held(placed: list[Placed]) -> int:
    """Bytes of rows and states on this rank."""
    assert dist.group.WORLD is not None
    step = Step(placed, 4, ShardingEnv.from_process_group(dist.group.WORLD), torch.device("cpu"))
    groups = [group for collection in step.collections() for group in collection._tables.all_groups()]
    tensors = [tensor for group in groups for tensor in (group.flat, *group.states)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("optimizer", "kind", "dtype"),
    [
        *product(("SGD", "RowWiseAdagrad", "Adagrad", "Adam", "LAMB"), KINDS, [DataType.FP32]),
        # half rows keep whole states
        ("Adagrad", "row_wise", DataType.FP16),
        ("Adagrad", "row_wise", DataType.BF16),
    ],
)
def test_rows_and_states_take_the_bytes_that_are_predicted(optimizer: str, kind: str, dtype: DataType) -> None:
    placed = _placed(_tables(optimizer, dtype=dtype), kind)
    boundaries = 64 * len(placed) * len(placed[0].way.widths) * (4 // (4 if dtype is DataType.FP32 else 2))
    for real, predicted in zip(run_ranks(WORLD, _held, placed), _predicted(placed, step=False), strict=True):
        assert predicted <= real <= predicted + boundaries


def _peak(placed: list[Placed]) -> int:
    """The most bytes that this rank allocates in a step, over those that it holds."""
    assert dist.group.WORLD is not None
    step = Step(placed, BATCH, ShardingEnv.from_process_group(dist.group.WORLD), torch.device("cpu"))
    for _ in range(2):
        step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    assert profile.profiler is not None and profile.profiler.kineto_results is not None
    kineto_events: list[Any] = list(profile.profiler.kineto_results.events())
    events = [event for event in kineto_events if event.name() == "[memory]"]
    changes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return int(np.cumsum(changes).max())


@pytest.mark.ranks
@pytest.mark.parametrize("pooled", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_takes_about_the_memory_that_is_predicted(kind: str, pooled: bool) -> None:
    placed = _placed(_tables("RowWiseAdagrad", pooled), kind)
    for real, predicted in zip(run_ranks(WORLD, _peak, placed), _predicted(placed, step=True), strict=True):
        # the rank that looks up less also has its own batch to put together
        assert predicted / 2.5 < real < 1.5 * predicted


def test_an_optimizer_keeps_what_its_rule_says() -> None:
    for name, rule_name in RULES.items():
        kinds = list(rule_named(rule_name).kinds)
        assert STATES[name] == (kinds.count("element"), kinds.count("row"))
    assert set(RULES) == set(STATES)


RULES = {
    "SGD": "sgd", "RowWiseAdagrad": "rowwise_adagrad", "Adagrad": "adagrad", "Adam": "adam", "AdamW": "adam",
    "SparseAdam": "adam", "LAMB": "lamb", "LarsSGD": "lars_sgd", "PartialRowWiseAdam": "partial_rowwise_adam",
    "PartialRowWiseLAMB": "partial_rowwise_lamb", "FTRL": "ftrl",
}  # fmt: skip


def test_dense_replicas_also_hold_their_gradient_and_its_bucket() -> None:
    (table, _) = _tables(None)
    way = way_of(table, "data_parallel", Topology(WORLD, "cpu"))
    assert block_bytes(table, way, 64, WORLD, BATCH).tolist() == [3 * 4 * 2001 * 64] * WORLD


def test_int4_rows_take_half_a_byte_an_element() -> None:
    table = replace(_tables("SGD")[0], data_type=DataType.INT4)
    way = way_of(table, "table_wise", Topology(WORLD, "cpu"))
    held = block_bytes(table, way, 64, WORLD, BATCH) - step_bytes(table, way, 64, WORLD, BATCH)
    assert held.tolist() == [2001 * 32]
