"""docs/sharding.md says what is so: its snippets give what stands beside them, its pictures are those of the script."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

from checkout import ROOT
from snippets import wrong_snippets

from shardwise.sharding import ShardingType

DOCS = ROOT / "docs"
PAGE = DOCS / "sharding.md"


def pictures() -> Any:
    """The module that draws."""
    spec = importlib.util.spec_from_file_location("sharding_pictures", DOCS / "sharding_pictures.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


def test_every_snippet_gives_what_stands_beside_it() -> None:
    wrong, said = wrong_snippets(PAGE)
    assert not wrong, "\n".join(wrong)
    assert said > 15


def test_every_strategy_has_a_chapter_a_picture_and_a_row_of_bytes() -> None:
    page = PAGE.read_text()
    kinds = [kind.value for kind in ShardingType]
    assert sorted(re.findall(r"^### (\w+)$", page, re.MULTILINE)) == sorted(kinds)
    assert set(pictures().STRATEGIES) == set(kinds)
    for kind in kinds:
        assert f"![{kind}](pictures/sharding_{kind}.svg)" in page
        assert re.search(rf"^\| `{kind}` \|", page, re.MULTILINE)


def test_pictures_are_those_that_the_script_draws(tmp_path: Path) -> None:
    script = pictures()
    script.write(tmp_path)
    drawn = {path.name: path.read_text() for path in tmp_path.iterdir()}
    kept = {path.name: path.read_text() for path in (DOCS / "pictures").glob("sharding_*")}
    assert drawn == kept
    assert set(re.findall(r"!\[.*?\]\(pictures/(.*?)\)", PAGE.read_text())) == set(drawn)
    assert max(map(len, drawn.values())) < 8_000


def test_a_picture_shows_each_shard_where_it_is() -> None:
    """Areas by colour: a rank's cells once in the cut table, where replicas are white, and once at the rank."""
    script = pictures()
    for _, shards in script.STRATEGIES.values():
        svg = script.draw("", shards)
        counted = [int(n) for n in re.findall(r">(\d+) cells<", svg)]
        for rank, colour in enumerate(script.COLOURS):
            mine = [s for s in shards if s.rank == rank]
            held = sum((s.rows[1] - s.rows[0]) * (s.cols[1] - s.cols[0]) for s in mine)
            area = sum(int(w) * int(h) for w, h in re.findall(rf'width="(\d+)" height="(\d+)" fill="{colour}"', svg))
            assert counted[rank] == held
            assert area == held * (script.SMALL**2 + (0 if shards[0].replica else script.CELL**2))
