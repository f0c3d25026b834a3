"""The built site. Takes 40 s: mkdocs builds it once, reading every module for the reference.

Every link leads somewhere, nothing is loaded from elsewhere, and a search finds the page of a question first.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from built_site import HtmlPage, Search, broken, read_site
from checkout import ROOT, run_python
from optional import need
from test_site_pages import TASKS, api_pages, nav

need("mkdocs")
need("mkdocstrings")

# what a user types, and the page that answers it
QUESTIONS = {
    "install": "howto/install",
    "migrate torchrec model": "howto/migration",
    "two nodes": "howto/launch",
    "checkpoint resume": "howto/resume",
    "serve model": "howto/serve",
}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as `make docs` does."""
    folder = tmp_path_factory.mktemp("site")
    run_python("-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", folder, folder=ROOT)
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[str, HtmlPage]:
    return read_site(site)


def test_every_page_of_the_navigation_is_built(pages: dict[str, HtmlPage]) -> None:
    assert {page.removesuffix(".md") + ".html" for _, page in nav()} <= pages.keys()


def test_every_link_leads_to_a_file_and_an_anchor(site: Path, pages: dict[str, HtmlPage]) -> None:
    assert [*broken(site, pages)] == []


def test_nothing_is_loaded_from_elsewhere(site: Path, pages: dict[str, HtmlPage]) -> None:
    loads = {address for page in pages.values() for address in page.loads}
    assert [address for address in loads if urlsplit(address).netloc] == []
    styles = "".join(path.read_text() for path in site.rglob("*.css"))
    assert re.findall(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//[^)]*", styles) == []
    # what the theme would fetch for such blocks
    assert not [place for place in pages if 'class="mermaid"' in (site / place).read_text()]


def test_a_link_out_of_docs_leads_to_a_page_with_the_file(site: Path, pages: dict[str, HtmlPage]) -> None:
    assert "../repository/examples/serve/index.html" in pages["howto/inference.html"].links
    code = (site / "repository" / "planner" / "layout.py.html").read_text()
    assert (ROOT / "planner" / "layout.py").read_text().split('"""')[1].split()[0] in code
    assert "../docs/" not in (site / "repository" / "CONTRIBUTING.html").read_text()
    assert "../project/releasing.html" in pages["repository/CONTRIBUTING.html"].links


def test_lists_and_tables_are_no_running_text(pages: dict[str, HtmlPage]) -> None:
    """GitHub takes a list or a table right below a line of text for one, Python-Markdown does not."""
    wrong = [
        (place, text[:80])
        for place, page in pages.items()
        for text in page.paragraphs
        if re.search(r"^(- |1\. |\|.*\|$)", text, re.MULTILINE)
    ]
    assert wrong == []


def test_every_public_name_has_an_anchor(pages: dict[str, HtmlPage]) -> None:
    anchors = {anchor for place, page in pages.items() if "/api/" in place for anchor in page.anchors}
    assert {name.path for name in api_pages().public_names()} - anchors == set()


@pytest.mark.parametrize("query", QUESTIONS)
def test_a_search_finds_the_page_of_a_question_first(site: Path, query: str) -> None:
    assert Search(site).pages(query)[:1] == [f"{QUESTIONS[query]}.html"]


def test_pages_of_tasks_are_two_clicks_from_the_start(pages: dict[str, HtmlPage]) -> None:
    links = {urlsplit(address).path for address in pages["index.html"].links}
    assert {page.removesuffix(".md") + ".html" for _, page, _ in TASKS.values()} <= links


def test_a_broken_link_and_anchor_are_seen(tmp_path: Path) -> None:
    text = '<p id="x">y</p><a href="#x"></a><a href="#y"></a><img src="b.png"><a href="/a.html">'
    (tmp_path / "a.html").write_text(text)
    lines = [*broken(tmp_path, read_site(tmp_path))]
    assert [line.split(" leads to ")[1].split(":")[0] for line in lines] == ["#y", "/a.html", "b.png"]


def test_the_search_prefers_titles_and_all_words(tmp_path: Path) -> None:
    (tmp_path / "search").mkdir()
    docs = [
        {"location": "a.html", "title": "Serving", "text": "<p>a model</p>"},
        {"location": "b.html", "title": "Other", "text": "serve serve serve model"},
        {"location": "b.html#c", "title": "Serve", "text": "nothing"},
    ]
    (tmp_path / "search" / "search_index.json").write_text(json.dumps({"docs": docs}))
    assert Search(tmp_path).pages("serve model") == ["a.html", "b.html"]
