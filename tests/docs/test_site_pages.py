"""Sources of the site of docs/: every page in the navigation, every public name on a page, and a reader's way."""

from __future__ import annotations

import importlib.util
import re
from collections import Counter
from typing import Any

import pytest
from checkout import ROOT

DOCS = ROOT / "docs"
# What a reader comes for: the words of a row in index.md, the page behind it, and what that page must show.
TASKS = {
    "install": ("install it for my machine", "howto/install.md", "pip install"),
    "move a model": ("move my TorchRec model", "howto/migration.md", "shardwise migrate"),
    "two nodes": ("launch on two nodes", "howto/launch.md", "--nnodes"),
    "resume": ("resume a run that stopped", "howto/resume.md", "checkpoint"),
    "serve": ("serve a model over HTTP", "howto/serve.md", "examples/serve"),
    "shard": ("shard a table in a way of my choice", "howto/shard.md", "ParameterConstraints"),
    "log": ("log to TensorBoard", "howto/log.md", "TensorBoard"),
    "debug": ("such as a bad id", "troubleshooting.md", "IndexError"),
    "profile": ("where the time of a step goes", "howto/profile.md", "torch.profiler"),
    "quantize": ("quantize tables", "howto/inference.md", "quantize_inference_model"),
}


def nav() -> list[tuple[str, str]]:
    """(title, page) of each entry of the navigation; "" where the page's own title is taken."""
    _, _, lines = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")
    return re.findall(r"^ +- (?:([^#\n]+): )?(\S+\.md)$", lines, re.MULTILINE)


def api_pages() -> Any:
    spec = importlib.util.spec_from_file_location("api_pages", DOCS / "site" / "api_pages.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_page_is_in_the_navigation_once_and_every_entry_is_a_page() -> None:
    pages = [str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")]
    entries = [page for _, page in nav() if not page.startswith("repository/")]
    assert Counter(entries) == Counter(pages)
    outside = [page.removeprefix("repository/") for _, page in nav() if page.startswith("repository/")]
    assert outside and [page for page in outside if not (ROOT / page).is_file()] == []


def test_entries_of_the_navigation_have_short_titles_of_their_own() -> None:
    titles = [title for title, page in nav() if not page.endswith("index.md")]
    assert all(0 < len(title) <= 40 for title in titles)
    howto = [title for title, page in nav() if page.startswith("howto/")]
    assert len(howto) == len(set(howto)) and not [title for title in howto if not title.strip()]


@pytest.mark.parametrize("task", TASKS)
def test_a_reader_gets_from_the_index_to_the_page_of_a_task_in_one_click(task: str) -> None:
    words, page, shown = TASKS[task]
    rows = [line for line in (DOCS / "index.md").read_text().splitlines() if words in line]
    assert len(rows) == 1
    assert f"]({page})" in rows[0]
    assert shown in (DOCS / page).read_text()


def test_every_public_name_has_one_entry_and_pages_are_as_they_are_written() -> None:
    module = api_pages()
    assert [*module.problems()] == []
    kept = {path.stem: path.read_text() for path in module.API.glob("*.md")}
    assert kept == module.pages(), "python docs/site/api_pages.py"


def test_the_faces_of_the_reference_are_all_that_have_public_names() -> None:
    """The same packages as the list that says whether a move lost a name, which finds them by walking folders."""
    spec = importlib.util.spec_from_file_location("public_names", ROOT / "perf" / "evidence" / "public_names.py")
    assert spec is not None and spec.loader is not None
    listed = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(listed)
    faces = {name.rpartition(".")[0] for name in listed._packages()}
    assert {f"shardwise.{face}".rstrip(".") for face in api_pages().FACES} == faces
    names = {path for name in api_pages().public_names() for path in name.paths}
    assert names == {*listed._packages()} - {"shardwise.__version__"}
