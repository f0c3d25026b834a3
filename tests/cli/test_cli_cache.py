"""`shardwise cache`: traces recorded from a loader, caches simulated by slots and by a plan, pages, JSON, errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from shardwise import cli
from shardwise.data import Trace

PROGRAM = """
from shardwise import EmbeddingBagCollection, EmbeddingBagConfig
from shardwise.data import ClickFeature, Clicks

FEATURES = (ClickFeature("user", rows=3000, max_ids=3), ClickFeature("ad", rows=800, skew=0.9))


def batches():
    print("made")
    return Clicks(0, features=FEATURES, train_samples=40 * 50, evaluate_samples=0).train(50)


def model():
    return EmbeddingBagCollection(tables=[
        EmbeddingBagConfig(name=f"t_{f.name}", num_embeddings=f.rows, embedding_dim=16, feature_names=[f.name])
        for f in FEATURES
    ])


def breaks():
    yield next(iter(batches()))
    raise RuntimeError("disk on fire")


def number():
    return 3
"""


def run(*arguments: Any) -> Result:
    return CliRunner().invoke(cli.commands(), ["cache", *map(str, arguments)])


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a program, a trace of its batches, tables and a plan of them on two ranks."""
    place = tmp_path_factory.mktemp("caches")
    (place / "program.py").write_text(PROGRAM)
    result = run(
        "record", place / "trace.npz", "--loader", f"{place}/program.py:batches", "--model",
        f"{place}/program.py:model", "--optimizer", "adam",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    tables = [
        {"name": "t_user", "num_embeddings": 3000, "embedding_dim": 16, "features": ["user"], "pooling_factor": 2,
         "optimizer": "Adam", "skew": {"alpha": 1.05}},
        {"name": "t_ad", "num_embeddings": 800, "embedding_dim": 16, "features": ["ad"], "optimizer": "Adam"},
    ]  # fmt: skip
    (place / "tables.json").write_text(json.dumps(tables))
    (place / "rules.json").write_text('{"*": {"sharding_types": ["row_wise"]}}')
    made = CliRunner().invoke(
        cli.commands(),
        ["plan", "--tables", f"{place}/tables.json", "--world-size", "2", "--hbm", "1GiB", "--batch-size", "50",
         "--constraints", f"{place}/rules.json", "--out", f"{place}/plan.json"],
    )  # fmt: skip
    assert made.exit_code == 0, made.output
    return place


def simulated(*arguments: Any) -> dict[str, Any]:
    result = run("simulate", *arguments, "--json")
    assert result.exit_code == 0, result.output
    read: dict[str, Any] = json.loads(result.stdout)
    return read


def test_a_loader_is_recorded_and_what_it_prints_is_no_part_of_the_output(place: Path) -> None:
    trace = Trace(place / "trace.npz")
    assert trace.batches == 40
    assert [(table.name, table.rows, table.record_bytes) for table in trace.tables] == [
        ("t_user", 3000, 192), ("t_ad", 800, 192),
    ]  # fmt: skip
    loader = f"{place}/program.py:batches"
    for more in (("--tables", place / "tables.json"), ("--plan", place / "plan.json")):
        result = run(
            "record",
            place / "more.npz",
            "--loader",
            loader,
            *more,
            "--merge",
            2,
            "--most",
            5,
            "--table",
            "t_ad",
            "--json",
        )
        assert result.exit_code == 0, result.output
        printed = json.loads(result.stdout)
        assert printed["batches"] == 5 and [table["name"] for table in printed["tables"]] == ["t_ad"]
        assert {batch.samples for batch in Trace(place / "more.npz")} == {100}


def test_tables_of_a_simulation(place: Path) -> None:
    found = simulated(place / "trace.npz", "--slots", "10%", "--slots", "t_ad=200", "--skip", 10)
    assert (found["batches"], found["skipped"]) == (30, 10)
    user, ad = found["tables"]
    assert (user["slots"], ad["slots"]) == (300, 200)
    for table in (user, ad):
        assert table["wanted"] == table["hits"] + table["misses"]
        assert table["bytes_moved"] == (table["misses"] + table["saves"]) * table["record_bytes"]
        assert table["regret"] == (table["best_hits"] - table["hits"]) / table["wanted"] >= 0
        assert table["curve"]["slots"] == sorted(table["curve"]["slots"])
        assert all(a <= b for a, b in zip(table["curve"]["lru"], table["curve"]["best"], strict=True))
    printed = run("simulate", place / "trace.npz", "--slots", "10%")
    assert printed.exit_code == 0 and "t_user" in printed.stdout and "regret" in printed.stdout


def test_a_window_over_all_batches_has_no_regret(place: Path) -> None:
    found = simulated(place / "trace.npz", "--slots", 150, "--ahead", 100, "--prefetch", 0)
    assert [table["regret"] for table in found["tables"]] == [0, 0]
    assert simulated(place / "trace.npz", "--slots", 150, "--policy", "lfu")["tables"][0]["regret"] > 0


def test_shards_of_a_plan_are_simulated_by_rank_with_the_times_of_its_steps(place: Path) -> None:
    found = simulated(place / "trace.npz", "--plan", place / "plan.json", "--slots", "10%")
    assert [(table["table"], table["begin"], table["end"], table["ranks"]) for table in found["tables"]] == [
        ("t_user", 0, 1500, [0]), ("t_user", 1500, 3000, [1]), ("t_ad", 0, 400, [0]), ("t_ad", 400, 800, [1]),
    ]  # fmt: skip
    assert [table["slots"] for table in found["tables"]] == [150, 150, 40, 40]
    whole = simulated(place / "trace.npz", "--slots", "10%")
    assert sum(table["wanted"] for table in found["tables"]) == sum(table["wanted"] for table in whole["tables"])
    for rank in found["ranks"]:
        assert rank["rest_ms"] > 0 and rank["step_ms"] >= max(rank["rest_ms"], rank["prefetch_ms"]) * (1 - 1e-9)
    plain = simulated(place / "trace.npz", "--plan", place / "plan.json", "--slots", "10%", "--prefetch", 0)
    for rank in plain["ranks"]:
        assert rank["step_ms"] == pytest.approx(rank["rest_ms"] + rank["prefetch_ms"])
    slower = simulated(
        place / "trace.npz", "--plan", place / "plan.json", "--slots", "10%", "--miss-ns", 1e6, "--batch-us", 5000
    )
    for rank, other in zip(found["ranks"], slower["ranks"], strict=True):
        misses = sum(t["misses"] for t in found["tables"] if t["ranks"] == [rank["rank"]]) / found["batches"]
        # a millisecond for each row that comes, and five for a batch of each of two tables
        assert other["prefetch_ms"] - rank["prefetch_ms"] == pytest.approx(misses + 10)
    assert "late batches" in run("simulate", place / "trace.npz", "--plan", place / "plan.json").stdout


def test_the_page_shows_a_curve_for_each_table_and_needs_no_other_file(place: Path) -> None:
    result = run("simulate", place / "trace.npz", "--slots", "5%", "--html", place / "caches.html")
    assert result.exit_code == 0, result.output
    page = (place / "caches.html").read_text()
    assert page.count('<svg class="chart"') == 2 and "t_user" in page and "Belady" in page
    assert "http" not in page and "<script" not in page
    run("simulate", place / "trace.npz", "--slots", "5%", "--html", place / "again.html")
    assert (place / "again.html").read_text() == page


def test_without_a_trace_an_approximation_is_given_and_named(place: Path) -> None:
    result = run("simulate", "--tables", place / "tables.json", "--batch-size", 400, "--slots", "20%")
    assert result.exit_code == 0 and "Che's approximation" in result.stdout
    found = simulated("--tables", place / "tables.json", "--batch-size", 400, "--slots", "20%")
    skewed, uniform = found["tables"]
    # of ids that are all alike a cache of a fifth of the rows has a fifth
    assert uniform["hits"] / uniform["wanted"] == pytest.approx(0.2, abs=0.2)
    assert skewed["hit_rate"] > uniform["hit_rate"] - 0.3 and skewed["curve"]["estimate"][-1] == 1


def test_a_plan_takes_misses_from_a_trace_and_prints_its_tiers(place: Path) -> None:
    (place / "tiers.json").write_text('{"*": {"tier": {}}}')
    asked = ["plan", "--tables", place / "tables.json", "--constraints", place / "tiers.json", "--world-size", 1,
             "--reserve", "0%", "--batch-size", 50]  # fmt: skip

    def plan(*more: Any) -> Result:
        return CliRunner().invoke(cli.commands(), [*map(str, asked), *map(str, more)])

    result = plan("--hbm", "400KiB", "--trace", place / "trace.npz", "--out", place / "tiered.json")
    assert result.exit_code == 0, result.output
    assert "tiers" in result.stdout and "hits" in result.stdout and "of the link to rank 0" in result.stdout
    assert "LRU of trace.npz" in (place / "tiered.json").read_text()
    found = simulated(place / "trace.npz", "--plan", place / "tiered.json")
    written = json.loads((place / "tiered.json").read_text())["plan"][""]
    slots = {name: entry["tier"]["slots"] for name, entry in written.items()}
    assert {table["table"]: table["slots"] for table in found["tables"]} == slots


def test_a_plan_that_would_thrash_ends_with_status_1_and_what_would_do(place: Path) -> None:
    (place / "tiers.json").write_text('{"*": {"tier": {}}}')
    table = {"name": "t", "num_embeddings": 1_000_000, "embedding_dim": 32, "pooling_factor": 4}
    (place / "large.json").write_text(json.dumps([table]))
    asked = ["plan", "--tables", place / "large.json", "--constraints", place / "tiers.json", "--world-size", 1,
             "--hbm", "7MiB", "--reserve", "0%"]  # fmt: skip
    result = CliRunner().invoke(cli.commands(), [*map(str, asked), "--json"])
    assert result.exit_code == 1, result.output
    assert json.loads(result.stdout)["more_bytes"]["t"] > 0 and "The smallest fix" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("simulate", "give a TRACE, or without one --tables FILE"),
        ("simulate {0}/trace.npz --tables {0}/tables.json", "give a TRACE"),
        ("simulate {0}/trace.npz --slots 3.5", "write 10% (of the rows), 0.1 or 20000"),
        ("simulate {0}/trace.npz --slots t_usr=5%", "did you mean 't_user'?"),
        ("simulate {0}/trace.npz --table t_usr", "did you mean 't_user'?"),
        ("simulate {0}/trace.npz --skip 40", "leaves none of the 40 batches"),
        ("simulate {0}/tables.json", "a trace is a file .npz or .parquet"),
        ("simulate {0}/trace.npz --plan {0}/tables.json", "no plan"),
        ("simulate {0}/trace.npz --html {0}/nowhere/a.html", "cannot be written"),
        ("record {0}/a.npz --loader {0}/program.py:batches", "one of --model, --plan and --tables"),
        ("record {0}/a.npz --loader {0}/program.py:batch --tables {0}/tables.json", "did you mean 'batches'?"),
        ("record {0}/a.npz --loader {0}/program.py:number --tables {0}/tables.json", "must return batches"),
        ("record {0}/a.npz --loader {0}/program.py:breaks --tables {0}/tables.json", "disk on fire"),
        ("record {0}/a.csv --loader {0}/program.py:batches --tables {0}/tables.json", "a trace is a file"),
        ("record {0}/a.npz --loader {0}/program.py:batches --tables {0}/tables.json --table x", "no table here"),
    ],
)
def test_what_is_wrong_is_a_line_and_status_2(arguments: str, text: str, place: Path) -> None:
    result = run(*arguments.format(place).split())
    assert result.exit_code == 2 and text in result.stderr, result.output
    assert result.stdout == "" and not (place / "a.npz").exists()
