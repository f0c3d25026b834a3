"""The pages of docs/ say what is so: snippets give what stands beside them; commands, tables and pictures are there."""

from __future__ import annotations

import importlib.util
import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from checkout import ROOT
from snippets import steps, wrong_snippets

from shardwise import ParameterConstraints, ShardingType, jagged, kernels
from shardwise.checkpoint import LoadPolicy
from shardwise.kernels import configs
from shardwise.perf.evidence import pipeline_overlap
from shardwise.perf.evidence.soak import summary
from shardwise.planner.constants_measured import CARDS, OFFERED
from shardwise.planner.plan.explanation import PART_NAMES
from shardwise.planner.search.problem import PARTS

DOCS = ROOT / "docs"
PICTURE = r"!\[.*?\]\(../pictures/(.*?)\)"
# how many statements of a page say what they give
SAID = {
    "accumulation": range(5, 6),
    "autocast": range(3, 4),
    "checkpoints": range(11, 1000),
    "checkpoints_convert": range(10, 1000),
    "debug": range(5, 1000),
    "evaluate": range(6, 1000),
    "compile_step": range(1, 2),
    "early_stopping": range(1, 2),
    "export": range(4, 5),
    "fbgemm": range(100, 1000),
    "install": range(1, 2),
    "jagged": range(61, 1000),
    "metrics": range(5, 6),
    "object_storage": range(5, 6),
    "launch": range(1, 2),
    "pipelines": range(12, 13),
    "planner": range(12, 1000),
    "profile": range(1, 2),
    "reliability": range(1, 1000),
    "resume": range(4, 1000),
    "serve": range(4, 1000),
    "shard": range(6, 1000),
    "schedules": range(2, 3),
    "sharding": range(16, 1000),
    "tiers": range(7, 1000),
    "train": range(3, 1000),
    "tuning": range(1, 2),
    "tutorial": range(7, 1000),
}
# what `kernels` has for lookups and updates of tables, not for jagged batches
LOOKUPS = {
    *("DECAYS", "RULES", "BoundsCheckMode", "Feature", "Rule", "Segment", "check_gradient", "check_ids", "define_rule"),
    *("describe_gradient", "describe_weight", "flatten_segments", "fused_update", "is_clean", "new_guard"),
    *("lookup_gradient", "origin_of"),
    *("pack_features", "per_id_weight_gradient", "pooled_lookup", "raise_from_guard", "require_ids", "rule_named"),
    *("sequence_lookup", "table_rows", "update_index", "capturing"),
    *("ROW_FORMATS", "RowFormat", "row_format", "quantize_rows", "dequantize_rows", "quantized_pooled_lookup"),
    *(
        "MINIFLOAT",
        "FusedTable",
        "FusedTables",
        "fused_pooled_lookup",
        "fused_rows",
        "fused_sequence_lookup",
        "ids_pass",
    ),
    *("use_configs", "quantized_sequence_lookup", "quantize_pooled", "dequantize_pooled"),
    # of rows below the device
    *("RecordLayout", "ReuseStack", "initial_rows", "lowest", "move_rows", "record_layout"),
    *("ask_file_rows", "read_file_rows", "write_file_rows"),
}


def path_of(page: str) -> Path:
    """The page of that name, in whichever of the folders of docs/ but that of the API, which mkdocs fills."""
    (path,) = [path for path in DOCS.rglob(f"{page}.md") if path.parent.name != "api"]
    return path


def read(page: str) -> str:
    return path_of(page).read_text()


@pytest.mark.parametrize("page", SAID)
def test_every_snippet_gives_what_stands_beside_it(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # a page may write files where it runs
    monkeypatch.chdir(tmp_path)
    if page == "jagged":
        pytest.importorskip("pyarrow")
    try:
        wrong, num_checked = wrong_snippets(path_of(page))
    finally:
        # a page may set some
        configs.use_configs()
    assert not wrong, "\n".join(wrong)
    assert num_checked in SAID[page]


@pytest.mark.parametrize(
    ("snippet", "said"),
    [
        ("x = 1\nx + 1  # -> 2", [None, "2"]),
        ("f(1,\n  2)\n# -> a\n# -> b\n\ny = 1", ["a b", None]),
        ("f()  # a -> b", [None]),
    ],
)
def test_the_reader_of_snippets_sees_what_is_said(snippet: str, said: list[str | None]) -> None:
    assert [expected for _, _, expected in steps(f"words\n```python\n{snippet}\n```\n")] == said


def test_every_policy_of_a_load_has_a_row() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", read("checkpoints"), re.MULTILINE)
    assert rows == [field.name for field in fields(LoadPolicy)]


def test_every_public_name_of_jagged_is_on_its_page() -> None:
    shown = " ".join(re.findall(r"^```python\n(.*?)^```", read("jagged"), re.DOTALL | re.MULTILINE))
    assert not [name for name in jagged.__all__ if not re.search(rf"\b{name}\b", shown)]


def test_the_table_has_the_jagged_ops_and_no_others() -> None:
    rows = re.findall(r"^\| (`\w+`.*?) \| (.*?) \| .*? \|$", read("jagged"), re.MULTILINE)
    named = {name for first, does in rows for name in re.findall(r"`(\w+)`", first + does)}
    assert named == set(kernels.__all__) - LOOKUPS


def test_every_part_of_a_step_has_a_row() -> None:
    page = read("planner")
    assert [name for name in PART_NAMES.values() if f"\n| {name} | " not in page] == []
    assert tuple(PART_NAMES) == PARTS


def test_the_table_of_cards_has_every_card_that_is_offered_with_its_peaks() -> None:
    rows = re.findall(r"^\| `([\w-]+)` \| (sm_\d+|gfx\d+) \| (.*) \|$", read("planner"), re.MULTILINE)
    assert [name for name, _, _ in rows] == [*OFFERED]
    for name, target, numbers in rows:
        gib, memory, links, network = (float(number.replace(",", "")) for number in numbers.split(" | "))
        card = CARDS[name]
        assert (target, gib) == (card.target, card.memory_gib)
        peaks = (card.constants.copy_gb_s / 0.9, card.constants.intra_gb_s / 0.75, card.constants.inter_gb_s / 0.8)
        assert peaks == pytest.approx((memory, links, network))


def test_fields_of_constraints_that_are_named_are_there() -> None:
    table = read("planner").split("| field | says |")[1].split("\n\n")[0]
    named = {name for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)}
    assert named <= {field.name for field in fields(ParameterConstraints)}
    assert {field.name for field in fields(ParameterConstraints) if field.kw_only} <= named


def test_the_table_has_the_numbers_of_the_recorded_soak() -> None:
    report = json.loads((ROOT / "perf" / "results" / "cpu" / "soak.json").read_text())
    assert [row for row in summary(report) if row not in read("reliability")] == []
    assert abs(report["test_auc"]["disturbed"] - report["test_auc"]["undisturbed"]) <= 0.005


def test_every_strategy_has_a_chapter_a_picture_and_a_row_of_bytes() -> None:
    page = read("sharding")
    kinds = [kind.value for kind in ShardingType]
    assert sorted(re.findall(r"^### (\w+)$", page, re.MULTILINE)) == sorted(kinds)
    assert set(drawer("sharding").STRATEGIES) == set(kinds)
    for kind in kinds:
        assert f"![{kind}](../pictures/sharding_{kind}.svg)" in page
        assert re.search(rf"^\| `{kind}` \|", page, re.MULTILINE)


def test_the_table_has_every_kernel_that_is_tuned() -> None:
    table = read("tuning").split("## What is tuned")[1].split("## ")[0]
    named = {name.split()[0] for name in re.findall(r"`([\w <>]+)`", table)}
    assert named == set(configs.FIELDS)


def commands(group: str) -> Any:
    """The command `shardwise group`."""
    import click

    from shardwise import cli

    root = cli.commands()
    return root.get_command(click.Context(root), group)


def options(command: Any) -> set[str]:
    return {option for parameter in command.params for option in parameter.opts}


def test_every_command_of_checkpoints_and_its_options_are_there() -> None:
    usages = dict(re.findall(r"^\| `shardwise ckpt (\w+) (.*?)` \|", read("checkpoints_convert"), re.MULTILINE))
    known = {
        name: {option for option in options(command) if option.startswith("--")} - {"--json"}
        for name, command in commands("ckpt").commands.items()
    }
    assert {name: set(re.findall(r"--[\w-]+", usage)) for name, usage in usages.items()} == known


def test_every_command_of_the_planner_and_its_options_are_there() -> None:
    plan = commands("plan")
    shown = re.findall(r"^shardwise plan ?(\w*) (.*)$", read("planner"), re.MULTILINE)
    assert {name for name, _ in shown if name} == set(plan.commands)
    for name, usage in shown:
        assert set(re.findall(r"--[\w-]+", usage)) <= options(plan.commands[name] if name else plan), name


def test_commands_of_the_tuner_and_their_options_are_there() -> None:
    known = commands("kernels").commands
    shown = [line for line in read("tuning").splitlines() if line.startswith("shardwise kernels autotune")]
    used = {option for line in shown for option in re.findall(r"--[\w-]+", line)}
    assert len(shown) > 5 and used <= options(known["autotune"])
    # what a proof takes is told by --help
    assert options(known["autotune"]) - used - {"--again", "--small"} == set()
    assert "--candidates" in options(known["check"])


def drawer(page: str) -> Any:
    """The module that draws the pictures of a page."""
    spec = importlib.util.spec_from_file_location(f"{page}_pictures", DOCS / "pictures" / f"{page}_pictures.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


@pytest.mark.parametrize("page", ["jagged", "sharding", "engine", "tiers"])
def test_pictures_are_those_that_the_script_draws(page: str, tmp_path: Path) -> None:
    drawer("jagged" if page == "jagged" else "sharding").write(tmp_path)
    # those of the page on jagged batches have no name in front
    pattern = "*" if page == "jagged" else f"{page}_*"
    drawn = {path.name: path.read_text() for path in tmp_path.glob(pattern)}
    others = ("pipeline_", "planner_", *(["sharding_", "engine_", "tiers_"] if page == "jagged" else []))
    kept = (DOCS / "pictures").glob(pattern)
    assert drawn == {
        path.name: path.read_text() for path in kept if path.suffix == ".svg" and not path.name.startswith(others)
    }
    assert set(re.findall(PICTURE, read(page))) == set(drawn)
    assert max(map(len, drawn.values())) < 8_000


def test_a_picture_shows_each_shard_where_it_is() -> None:
    """Areas by colour: a rank's cells once in the cut table, where replicas are white, and once at the rank."""
    script = drawer("sharding")
    for _, shards in script.STRATEGIES.values():
        svg = script.draw("", shards)
        counted = [int(n) for n in re.findall(r">(\d+) cells<", svg)]
        for rank, colour in enumerate(script.COLOURS):
            on_rank = [s for s in shards if s.rank == rank]
            held = sum((s.rows[1] - s.rows[0]) * (s.cols[1] - s.cols[0]) for s in on_rank)
            area = sum(int(w) * int(h) for w, h in re.findall(rf'width="(\d+)" height="(\d+)" fill="{colour}"', svg))
            assert counted[rank] == held
            assert area == held * (script.SMALL**2 + (0 if shards[0].replica else script.CELL**2))


def test_the_picture_of_pipelines_is_drawn_from_the_numbers() -> None:
    result = json.loads(pipeline_overlap.RESULT.read_text())
    assert pipeline_overlap.PICTURE.read_text() == pipeline_overlap.picture(result)
    assert pipeline_overlap.PICTURE.name in re.findall(PICTURE, read("pipelines"))


@pytest.mark.parametrize(("slower", "part"), [(100.0, 1.0), (110.0, 0.75), (140.0, 0.0)])
def test_hidden_is_the_part_of_the_delay_that_costs_nothing(slower: float, part: float) -> None:
    assert pipeline_overlap.hidden(100.0, 140.0, slower) == part


def test_pictures_of_the_planner_are_there_small_and_made_by_the_script() -> None:
    pages = read("planner") + (ROOT / "README.md").read_text()
    shown = {path for path in re.findall(r"\(\S*pictures/(\S+?)\)", pages) if path.endswith(".png")}
    script = (DOCS / "pictures" / "planner_pictures.py").read_text()
    assert shown == {f"planner_report_{name}.png" for name in re.findall(r'\("(\w+)", \w+_tables\(\)', script)}
    for path in shown:
        content = (DOCS / "pictures" / path).read_bytes()
        assert content.startswith(b"\x89PNG") and len(content) <= 300_000
