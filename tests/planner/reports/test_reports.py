"""Two plans compared: what is said to differ does. The page of a plan: well-formed, complete, the same twice."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from html import escape
from html.parser import HTMLParser

import numpy as np
import pytest
from planner_plain_costs import any_solution, choice_of, moved, some_plan, some_tables

from shardwise import planner
from shardwise.planner import Feature, ParameterConstraints, Skew, Table, Topology, plan_tables
from shardwise.planner.layout import Tier
from shardwise.planner.plan.alternatives import alternatives
from shardwise.planner.plan.explanation import (
    PART_NAMES,
    explain,
    gib,
    ms,
)
from shardwise.planner.plan.plan_files import CutDifference, planned_to_json
from shardwise.planner.plan.planned import Planned
from shardwise.planner.reports.difference import diff
from shardwise.planner.reports.figures import Block, merged
from shardwise.planner.reports.page import report
from shardwise.planner.reports.style import COLOURS
from shardwise.planner.search.problem import PARTS
from shardwise.planner.topology import GIB


def plain() -> Planned:
    """Ten tables, all table-wise on rank 0 of 4."""
    planned = some_plan(some_tables(10), 4, local_size=2, hbm_gib=200)
    for item in range(10):
        planned = moved(planned, item, choice_of(planned, item, "table_wise"), (0,))
    return planned


def test_equal_plans_have_no_difference() -> None:
    a = some_plan(some_tables(20), 8, local_size=4, hbm_gib=64)
    b = some_plan(some_tables(20), 8, local_size=4, hbm_gib=64)
    difference = diff(a, replace(b, seconds=99.0))
    assert not difference
    assert str(difference) == "no difference: 20 tables placed alike"
    assert difference.tables == () and difference.ranks == ()


def test_a_moved_table_is_told_with_both_places_and_the_ranks_that_change() -> None:
    a = plain()
    b = moved(a, 3, choice_of(a, 3, "table_wise"), (2,))
    difference = diff(a, b)
    (change,) = difference.tables
    assert difference and change.table == "t3" and difference.same_tables == 9
    assert change.before is not None and change.after is not None
    assert (change.before.ranks, change.after.ranks) == (((0,),), ((2,),))
    text = str(difference)
    before, after = a.loads, b.loads
    for rank in (0, 2):
        assert f"rank {rank}: {ms(before.time_ms[rank])} -> {ms(after.time_ms[rank])} ms" in text
        assert f"HBM {gib(before.hbm[rank])} -> {gib(after.hbm[rank])} GiB" in text
        assert difference.ranks[rank].after_hbm == after.hbm[rank]
    assert "2 ranks of 4 with other time or memory" in text
    assert f"step: {ms(a.solution.time_ms)} -> {ms(b.solution.time_ms)} ms" in text


@pytest.mark.parametrize("strategy", ["row_wise", "data_parallel", "column_wise", "table_row_wise", "grid_shard"])
def test_another_strategy_is_a_difference(strategy: str) -> None:
    a = plain()
    number = choice_of(a, 5, strategy)
    choice = a.problem.items[5].choices[number]
    difference = diff(a, moved(a, 5, number, (0,) * choice.blocks))
    (change,) = difference.tables
    assert change.after is not None and change.after.sharding_type == strategy
    assert change.after.widths == choice.widths
    assert "- table_wise fused on rank 0: " in str(difference) and f"+ {strategy} {choice.compute_kernel}" in str(
        difference
    )


@pytest.mark.parametrize(
    ("before", "after", "sizes", "words"),
    [
        (Tier(500), Tier(0.5), (500, 1000), ("500 slots by Tier(slots=500)", "1,000 slots by Tier(slots=0.5)")),
        (Tier(500), Tier(500, policy="lru"), (500, 500), ("", "500 slots by Tier(slots=500, policy='lru')")),
        (Tier(500), None, (500, None), ("500 slots by Tier(slots=500)", "")),
    ],
    ids=["slots", "policy", "whole"],
)  # fmt: skip
def test_another_tier_is_a_difference(
    before: Tier | None, after: Tier | None, sizes: tuple[int | None, int | None], words: tuple[str, str]
) -> None:
    """`plan diff` did not see slots: two plans were alike that keep other rows of a table on the device."""
    table = Table("t", 2000, 8, features=(Feature("f", 2.0),), optimizer="SGD", skew=Skew(1.1))

    def planned(tier: Tier | None) -> Planned:
        rules = {"t": ParameterConstraints(sharding_types=["table_wise"], tier=tier)}
        return plan_tables([table], Topology(1, "cuda", hbm_cap=GIB, ddr_cap=GIB), 16, constraints=rules)

    a, b = planned(before), planned(after)
    assert not diff(a, planned(before))
    difference = diff(a, b)
    (change,) = difference.tables
    assert change.before and change.after and (change.before.slots, change.after.slots) == sizes
    for sign, text in zip("-+", words, strict=True):
        assert f"{sign} table_wise fused on rank 0, {text}".removesuffix(", ") in str(difference)
    # and so do files without all that is known
    cuts = CutDifference.between(planned_to_json(a), planned_to_json(b))
    assert [*cuts.tables] == ["t"] and str(cuts).count("Tier(") == (before is not None) + (after is not None)
    assert not CutDifference.between(planned_to_json(a), planned_to_json(planned(before)))


def test_blocks_of_one_width_that_change_places_are_no_difference() -> None:
    a = plain()
    number = choice_of(a, 0, "column_wise")
    assert not diff(moved(a, 0, number, (1, 2)), moved(a, 0, number, (2, 1)))
    assert diff(moved(a, 0, number, (1, 2)), moved(a, 0, number, (1, 3)))


def test_tables_and_ranks_of_one_plan_only_are_told() -> None:
    a = some_plan(some_tables(5), 2, hbm_gib=200)
    b = some_plan(some_tables(6), 4, hbm_gib=200)
    difference = diff(a, b)
    new = next(change for change in difference.tables if change.table == "t5")
    assert new.before is None and new.after is not None
    assert "- not in this plan" in str(difference)
    assert "rank 3: no such rank -> " in str(difference)
    assert difference.settings == {"ranks": ("2, 2 to a host", "4, 4 to a host")}
    gone = next(change for change in diff(b, a).tables if change.table == "t5")
    assert gone.after is None


def test_settings_that_differ_are_told_even_where_the_plan_is_the_same() -> None:
    a = plain()
    difference = diff(a, replace(a, settings={**a.settings, "reservation": "15 %"}))
    assert not difference
    assert str(difference) == "no difference: 10 tables placed alike\nreservation: none -> 15 %"


def test_the_dict_is_plain_data() -> None:
    a = some_plan(some_tables(10), 4, local_size=2, hbm_gib=200)
    b = replace(a, solution=any_solution(a.problem, seed=7))
    data = json.loads(json.dumps(diff(a, b).as_dict()))
    assert data["step_ms"] == [a.solution.time_ms, b.solution.time_ms]
    assert len(data["tables"]) + data["same_tables"] == 10
    assert [row["after_ms"] for row in data["ranks"]] == b.loads.time_ms.tolist()
    assert [row["before_hbm"] for row in data["ranks"]] == a.loads.hbm.tolist()


VOID = {"meta", "br"}


class Tags(HTMLParser):
    """Fails where a tag is closed that is not the last open one."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.seen.add(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: object) -> None:
        self.seen.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, f"</{tag}> closes nothing"


def well_formed(page: str) -> set[str]:
    """The tags of a page, all of which are closed."""
    tags = Tags()
    tags.feed(page)
    assert not tags.open
    return tags.seen


def charts(page: str) -> list[ElementTree.Element]:
    return [ElementTree.fromstring(chart) for chart in re.findall(r'<svg class="chart".*?</svg>', page, re.DOTALL)]


def small() -> Planned:
    return some_plan(some_tables(26), 8, local_size=4, hbm_gib=16)


@pytest.mark.parametrize("size", [(1, 1), (26, 8), (120, 64)])
def test_the_page_is_well_formed_and_fetches_nothing(size: tuple[int, int]) -> None:
    page = report(some_plan(some_tables(size[0]), size[1], local_size=min(8, size[1]), hbm_gib=200))
    assert not well_formed(page) & {"script", "link", "img", "iframe", "object", "a"}
    assert not re.search(r"https?:|\bon\w+=|@import|javascript:", page)
    # all that url() names is in the page
    assert all(f'id="{name}"' in page for name in re.findall(r"url\(#([\w-]+)\)", page))
    assert len(re.findall(r"url\(", page)) == len(re.findall(r"url\(#", page))
    for chart in re.findall(r"<svg.*?</svg>", page, re.DOTALL):
        ElementTree.fromstring(chart)
    assert page == report(some_plan(some_tables(size[0]), size[1], local_size=min(8, size[1]), hbm_gib=200))


def test_every_class_of_a_shape_has_a_look() -> None:
    page = report(small())
    used = {name for text in re.findall(r'<rect class="([^"]+)"', page) for name in text.split()}
    styled = set(re.findall(r"\.([\w-]+)\{", page)) | set(re.findall(r"\.([\w-]+)[,:]", page))
    assert used <= styled
    assert {f"p-{part}" for part in PARTS} <= set(COLOURS)


def test_names_are_escaped_everywhere() -> None:
    wild = ["<b>bold</b>", 'a"quoted"&amp;', "</svg><script>alert(1)</script>", "ünïcode"]
    tables = [replace(t, name=name) for t, name in zip(some_tables(4), wild, strict=True)]
    planned = replace(some_plan(tables, 2, hbm_gib=64), settings={"<i>": "<u>"})
    page = report(planned)
    for name in wild:
        assert f'<th scope="row">{escape(name)}<br>' in page
    assert "<script" not in page and "<b>bold" not in page and "<i>" not in page and "<u>" not in page
    well_formed(page)


def test_every_table_is_in_the_list_with_its_numbers() -> None:
    planned = small()
    page = report(planned)
    rows = dict(re.findall(r'<tr class="top"><th scope="row">(\w+)<br>(.*?)(?=<tr class="top">|$)', page, re.DOTALL))
    assert set(rows) == {table.name for table in planned.tables}
    ways_by_item = alternatives(planned)
    for index, (table, choice, _) in enumerate(planned.placed()):
        row = rows[table.name]
        assert f"{table.num_embeddings:,} x {table.embedding_dim} fp32" in row
        assert f'<td class="n">{ms(choice.work_ms)}</td><td class="n">{escape(gib(int(choice.hbm.sum())))}</td>' in row
        for way in ways_by_item[index]:
            other = planned.problem.items[index].choices[way.number]
            assert other.sharding_type in row
        best = min(
            w.slower_ms
            for w in ways_by_item[index]
            if w.fits and w.number != planned.solution.assignment.choices[index]
        )
        assert f'<td class="n">{best:+.3f}</td>' in row


def test_columns_are_as_high_as_ranks_are_slow() -> None:
    planned = small()
    held = planned.loads
    page = charts(report(planned))
    high = np.zeros(0)
    for chart in page[:2]:
        columns: dict[str, float] = {}
        for shape in chart.iter("rect"):
            if "b" in (shape.get("class") or "").split():
                columns[shape.get("x", "")] = columns.get(shape.get("x", ""), 0.0) + float(shape.get("height", "0"))
        high = np.array([columns[x] for x in sorted(columns, key=float)])
        assert np.allclose(high / high.max(), held.time_ms / held.time_ms.max(), atol=0.01)
    bound = page[0].find(".//path[@class='bound']")
    assert bound is not None
    base = max(float(s.get("y", "0")) + float(s.get("height", "0")) for s in page[0].iter("rect"))
    y = float((bound.get("d") or "").split()[1].split("H")[0])
    assert (base - y) / high.max() == pytest.approx(planned.solution.bound_ms / held.time_ms.max(), abs=0.01)


def test_hovering_tells_rank_part_and_table() -> None:
    planned = small()
    held = planned.loads
    first, second, *_ = charts(report(planned))
    titles = [text for title in first.iter("title") for text in [title.text or ""]]
    for rank in range(8):
        time_text = ms(held.parts_ms[PARTS.index("fwd_compute"), rank])
        assert f"rank {rank}, {PART_NAMES['fwd_compute']}: {time_text} ms" in titles
    assert any(
        re.fullmatch(r"rank \d, t\d+: [\d.]+ ms, \w+ \w+(, .*)?", title.text or "") for title in second.iter("title")
    )
    assert all(chart.find("desc") is not None for chart in (first, second))


def test_memory_shows_the_limit_of_each_rank() -> None:
    planned = small()
    memory = charts(report(planned))[2]
    assert len([1 for element in memory.iter("rect") if element.get("class") == "well"]) == 8
    assert len([1 for element in memory.iter("path") if element.get("class") == "limit"]) in (0, 8)
    fullest = int(planned.loads.hbm.argmax())
    assert f"rank {fullest} is the fullest with {gib(planned.loads.hbm[fullest])} of 16.0 GiB" in report(planned)


def test_memory_of_hosts_has_its_own_figure() -> None:
    planned = small()
    items = tuple(
        replace(item, choices=tuple(replace(c, hbm=np.zeros_like(c.hbm), ddr=c.hbm) for c in item.choices))
        for item in planned.problem.items
    )
    problem = replace(planned.problem, items=items, hbm=np.zeros(8, np.int64), ddr=np.full(8, 32 * GIB))
    page = report(replace(planned, problem=problem))
    assert "memory of the hosts" in page and "memory of the devices" not in page


def test_thin_blocks_are_drawn_as_one_for_each_look() -> None:
    stack = [
        Block(value, look, "", f"{value}") for value, look in ((5, "a"), (0.1, "a"), (0.2, "a"), (0.3, "b"), (4, "b"))
    ]
    blocks = merged(stack, 1.0, 40, str)
    assert [(block.value, block.look) for block in blocks] == [
        (5, "a"),
        (pytest.approx(0.3), "a"),
        (0.3, "b"),
        (4, "b"),
    ]
    assert blocks[1].detail.startswith("2 small blocks, ")
    assert sum(block.value for block in merged(stack, 0.0, 2, str)) == pytest.approx(9.6)


def test_a_page_of_500_tables_stays_below_two_megabytes() -> None:
    page = report(some_plan(some_tables(500), 128, local_size=8, hbm_gib=400))
    assert len(page.encode()) < 2_000_000
    assert all(f">t{n}<br>" in page for n in range(500))


def test_of_very_many_tables_those_with_least_work_have_no_details() -> None:
    page = report(some_plan(some_tables(650), 8, hbm_gib=2000))
    assert "Of 650, the 600 with most work have them." in page
    assert page.count("<details><summary>") == 600
    assert all(f">t{n}<br>" in page for n in range(650))


def test_the_package_gives_functions_whatever_was_imported_before() -> None:
    """A module of the same name, once imported, stood where the function was looked for."""
    assert (planner.explain, planner.report, planner.diff) == (explain, report, diff)


def test_a_plan_of_nothing_has_a_page_and_a_text() -> None:
    planned = some_plan([], 4)
    well_formed(report(planned))
    assert explain(planned).startswith("Plan: 0 tables on 4 ranks\n")
    assert str(diff(planned, planned)) == "no difference: 0 tables placed alike"
