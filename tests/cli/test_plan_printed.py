"""`shardwise plan` in 30 lines, at every width, for few tables and many, with the names that people give them."""

from __future__ import annotations

import pytest

pytest.importorskip("click")
pytest.importorskip("rich")

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
from rendered import WIDTHS, rendered

from shardwise.cli.plan_printed import LINES, _Column, _lines, _middled, folded
from shardwise.planner.plan.explanation import ms
from shardwise.planner.plan.plan_files import load_planned, save_planned
from shardwise.planner.plan.planning import plan_tables
from shardwise.planner.tables import Feature, Table
from shardwise.planner.topology import Topology


def tables(count: int) -> list[Table]:
    """Of many sizes, some with long names, one with letters that a terminal obeys."""
    names = [f"t{n}" if n % 3 else f"a_table_with_a_rather_long_name_as_pipelines_make_them_{n}" for n in range(count)]
    names[0] = "\x1b[31mred\nand_more"
    rows = np.random.default_rng(5).integers(10, 2_000_000, count).tolist()
    return [
        Table(name, size, 16 * (1 + n % 4), features=(Feature(name, 1.0 + n % 7),), optimizer="RowWiseAdagrad")
        for n, (name, size) in enumerate(zip(names, rows, strict=True))
    ]


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Files of plans: of few tables, of 856 on 16 ranks, of few on 128 ranks."""
    folder = tmp_path_factory.mktemp("plans")
    asked = {"few": (5, 2, 2), "many": (856, 16, 8), "ranks": (40, 128, 8)}
    for name, (count, world, local) in asked.items():
        topology = Topology(world, "cuda", local_world_size=local, card="h200")
        save_planned(plan_tables(tables(count), topology, 512, seconds=0), folder / f"{name}.json")
    return {name: folder / f"{name}.json" for name in asked}


@pytest.mark.parametrize("columns", WIDTHS)
@pytest.mark.parametrize("name", ["few", "many", "ranks"])
def test_a_plan_is_told_in_thirty_lines_that_fit(
    name: str, columns: int, plans: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    result = rendered(monkeypatch, columns, "plan", "explain", plans[name])
    lines = result.stdout.splitlines()
    assert result.exit_code == 0 and result.stderr == "" and len(lines) <= LINES
    planned = load_planned(plans[name])
    topology = planned.topology
    assert lines[0].startswith(f"Plan: {len(planned.tables)} tables on {topology.world_size} ranks")
    assert any(line.startswith(f"  step    {ms(planned.solution.time_ms)} ms") for line in lines)
    assert "\x1b" not in result.stdout and (name != "few" or "?[31mred?and_more" in result.stdout)
    # a line for each rank, or for those between
    ranks = [int(match[1]) for line in lines if (match := re.match(r" *(\d+) +[\d.,]+  ░", line))]
    between = [int(match[1]) for line in lines if (match := re.match(r" …  (\d+) ranks between", line))]
    assert len(ranks) + sum(between) == topology.world_size and len({*ranks}) == len(ranks)
    slowest = int(planned.loads.time_ms.argmax())
    assert ranks[0] == slowest if between else ranks == [*range(topology.world_size)]
    # and every table is there or counted
    [head] = [number for number, line in enumerate(lines) if re.match(r"most w.*first ", line)]
    table_lines = lines[head + 1 : lines.index("", head)]
    counted = [re.match(r"… and (\d+) tables?", line) for line in table_lines]
    equal = [int(match[1]) if (match := re.search(r" x (\d+)  ", line)) else 1 for line in table_lines]
    here = sum(int(rest[1]) if rest else number for rest, number in zip(counted, equal, strict=True))
    assert here == len(planned.tables)


@pytest.mark.parametrize("columns", WIDTHS)
@pytest.mark.parametrize("name", ["few", "many", "ranks"])
def test_all_of_it_fits_too_and_breaks_no_number(
    name: str, columns: int, plans: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    result = rendered(monkeypatch, columns, "plan", "explain", plans[name], "--verbose")
    planned = load_planned(plans[name])
    step = ms(planned.solution.time_ms)
    assert result.exit_code == 0 and result.stdout.count(f" {step} ") >= 2 and "\x1b" not in result.stdout
    rows = [line for line in result.stdout.splitlines() if re.match(r" *\d+ +[\d.,]+  ", line)]
    assert len(rows) >= min(planned.topology.world_size, 14)


@pytest.mark.parametrize("columns", WIDTHS)
def test_questions_to_plans_fit(columns: int, plans: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    whatif = ("plan", "whatif", plans["few"], "--world-size", 4, "--dtype", "fp16")
    short, long = rendered(monkeypatch, columns, *whatif), rendered(monkeypatch, columns, *whatif, "--verbose")
    assert short.exit_code == long.exit_code == 0 and len(short.stdout.splitlines()) <= LINES
    assert short.stdout.splitlines()[:10] == long.stdout.splitlines()[:10]
    diff = ("plan", "diff", plans["many"], plans["ranks"])
    short, long = rendered(monkeypatch, columns, *diff), rendered(monkeypatch, columns, *diff, "--verbose")
    assert short.exit_code == long.exit_code == 1
    assert len(short.stdout.splitlines()) <= LINES < len(long.stdout.splitlines())
    assert re.search(r"… and \d+ tables more: --verbose", short.stdout)


def test_documents_are_one_on_stdout_with_one_indent(plans: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    few = plans["few"]
    asked: list[tuple[Any, ...]] = [
        ("explain", few), ("diff", few, plans["ranks"]), ("whatif", few, "--batch-size", 64),
        ("whatif", few, "--hbm", "1MiB"),
    ]  # fmt: skip
    keys = [
        {"format", "version", "world_size", "local_world_size", "plan", "about"},
        {"step_ms", "bound_ms", "tables", "same_tables", "ranks", "settings"},
        {"before", "after", "step_ms", "bound_ms", "tables", "same_tables", "ranks", "settings"},
    ]
    for arguments, names in zip(asked, [*keys, {"error", "error_type", "suggestions"}], strict=True):
        result = rendered(monkeypatch, 10_000, "plan", *arguments, "--json")
        document = json.loads(result.stdout)
        assert names <= set(document) and result.stdout.startswith('{\n  "')


def test_what_is_too_long_loses_its_middle() -> None:
    assert _middled("abcdefghij", 10) == "abcdefghij" and _middled("abcdefghij", 7) == "abc…hij"
    # of letters that are two columns wide fewer fit
    assert _middled("表" * 10, 9) == "表表…表表"
    made = [_Column("name", ["n" * 50, "m"], share=1), _Column("ms", ["1.5", "12.25"], right=True)]
    assert [line.plain for line in _lines(made, 20)] == [
        "name              ms", f"{'n' * 6}…{'n' * 6}    1.5", f"m{' ' * 12}  12.25",
    ]  # fmt: skip


def test_words_of_other_searches_are_folded_between_words() -> None:
    assert folded("  one two three\nfour", 12) == "  one two\n      three\nfour"


def test_a_terminal_that_knows_no_blocks_gets_letters(plans: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwise.cli.plan_printed._is_unicode", lambda: False)
    printed = rendered(monkeypatch, 80, "plan", "explain", plans["ranks"]).stdout
    assert printed.isascii() and ". overhead = exchange # compute" in printed


def test_on_cpus_the_memory_is_that_of_the_host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "cpu.json"
    save_planned(plan_tables(tables(2)[1:], Topology(1, "cpu"), 64), path)
    printed = rendered(monkeypatch, 80, "plan", "explain", path).stdout
    assert "DDR GiB" in printed and "HBM" not in printed
