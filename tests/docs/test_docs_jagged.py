"""docs/jagged.md says what is so: its snippets give what stands beside them, its table has every op, its pictures
are those that the script draws."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
from checkout import ROOT
from snippets import steps, wrong_snippets

from shardwise import jagged, kernels

DOCS = ROOT / "docs"
PAGE = DOCS / "jagged.md"
# what `kernels` has for lookups and updates of tables, not for jagged batches
LOOKUPS = {
    *("DECAYS", "RULES", "BoundsCheckMode", "Feature", "Rule", "Segment", "check_gradient", "check_ids", "define_rule"),
    *("describe_gradient", "describe_weight", "flatten_segments", "fused_update", "is_clean", "new_guard", "origin_of"),
    *("pack_features", "per_id_weight_gradient", "pooled_lookup", "raise_from_guard", "require_ids", "rule_named"),
    *("sequence_lookup", "table_rows", "update_index", "capturing"),
    *("ROW_FORMATS", "RowFormat", "row_format", "quantize_rows", "dequantize_rows", "quantized_pooled_lookup"),
    *("use_configs", "quantized_sequence_lookup", "quantize_pooled", "dequantize_pooled"),
}


def test_every_snippet_gives_what_stands_beside_it() -> None:
    pytest.importorskip("pyarrow")
    wrong, said = wrong_snippets(PAGE)
    assert not wrong, "\n".join(wrong)
    assert said > 60


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


def test_every_public_name_is_on_the_page() -> None:
    page = PAGE.read_text()
    shown = " ".join(re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE))
    assert not [name for name in jagged.__all__ if not re.search(rf"\b{name}\b", shown)]


def test_the_table_has_the_jagged_ops_and_no_others() -> None:
    rows = re.findall(r"^\| (`\w+`.*?) \| (.*?) \| .*? \|$", PAGE.read_text(), re.MULTILINE)
    named = {name for first, does in rows for name in re.findall(r"`(\w+)`", first + does)}
    assert named == set(kernels.__all__) - LOOKUPS


def test_pictures_are_those_that_the_script_draws(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("jagged_pictures", DOCS / "jagged_pictures.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    script.write(tmp_path)
    drawn = {path.name: path.read_text() for path in tmp_path.iterdir()}
    others = ("sharding_", "pipeline_", "planner_")
    kept = [path for path in (DOCS / "pictures").iterdir() if not path.name.startswith(others)]
    assert drawn == {path.name: path.read_text() for path in kept}
    assert set(re.findall(r"!\[.*?\]\(pictures/(.*?)\)", PAGE.read_text())) == set(drawn)
    assert max(map(len, drawn.values())) < 8_000
