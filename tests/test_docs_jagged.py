"""docs/jagged.md says what is so: its snippets give what stands beside them, its table has every op, its pictures
are those that the script draws."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import io
import re
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shardwise import jagged, kernels

DOCS = Path(__file__).parents[1] / "docs"
PAGE = DOCS / "jagged.md"
# what `kernels` has for lookups and updates of tables, not for jagged batches
LOOKUPS = {
    *("DECAYS", "RULES", "BoundsCheckMode", "Feature", "Rule", "Segment", "check_gradient", "check_ids", "define_rule"),
    *("describe_gradient", "describe_weight", "flatten_segments", "fused_update", "is_clean", "new_guard"),
    *("pack_features", "per_id_weight_gradient", "pooled_lookup", "raise_from_guard", "require_ids", "rule_named"),
    *("sequence_lookup", "table_rows"),
}
# line of the page, statement, what is said of it: None where nothing is
Step = tuple[int, ast.stmt, str | None]


def steps(page: str) -> Iterator[Step]:
    """Every statement of the page's snippets, with the `# ->` behind it or on the lines below it."""
    for found in re.finditer(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE):
        code, before = found[1], page[: found.start(1)].count("\n")
        lines, body = code.splitlines(), ast.parse(code).body
        for node, after in zip(body, [*body[1:], None], strict=True):
            assert node.end_lineno is not None
            said = re.findall(r"  # -> (.*)$", lines[node.end_lineno - 1])
            for line in lines[node.end_lineno : after.lineno - 1 if after else None]:
                said += re.findall(r"^# -> (.*)$", line)
            ast.increment_lineno(node, before)
            yield node.lineno, node, " ".join(said) if said else None


def outcome(node: ast.stmt, names: dict[str, Any], fails: bool) -> str | None:
    """What an expression prints, or else its repr, or where it `fails` the error; None of other statements."""
    printed = io.StringIO()
    if not isinstance(node, ast.Expr):
        exec(compile(ast.Module([node], []), str(PAGE), "exec", dont_inherit=True), names)
        return None
    code = compile(ast.Expression(node.value), str(PAGE), "eval", dont_inherit=True)
    try:
        with contextlib.redirect_stdout(printed):
            value = eval(code, names)
    except Exception as error:
        if not fails:
            raise
        return "".join(traceback.format_exception_only(error))
    return printed.getvalue() or repr(value)


def plain(text: str) -> str:
    """Without the white space by which torch lines numbers up."""
    return re.sub(r"\s+", " ", text).strip().replace("[ ", "[")


def test_every_snippet_gives_what_stands_beside_it() -> None:
    pytest.importorskip("pyarrow")
    names: dict[str, Any] = {"__name__": "docs"}
    wrong, said = [], 0
    for line, node, expected in steps(PAGE.read_text()):
        found = outcome(node, names, fails=re.match(r"\w+Error: ", expected or "") is not None)
        # backward() and its like have nothing to say
        if found != "None" or expected is not None:
            said += expected is not None
            if plain(found or "") != plain(expected or ""):
                wrong.append(f"line {line}: {plain(found or '')!r} is not {plain(expected or '')!r}")
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
    kept = [path for path in (DOCS / "pictures").iterdir() if not path.name.startswith(("sharding_", "pipeline_"))]
    assert drawn == {path.name: path.read_text() for path in kept}
    assert set(re.findall(r"!\[.*?\]\(pictures/(.*?)\)", PAGE.read_text())) == set(drawn)
    assert max(map(len, drawn.values())) < 8_000
