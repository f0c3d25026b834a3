"""What mkdocs does besides for the site of docs/: pages with the files of the repository that pages link.

On the site a link out of docs/ (`../../examples/pipeline.py`, `../../FACTS.md`) leads to a page of `repository/` that
is made here: a Markdown file as it is, other text as code, a folder as a list. What such a page links is made too.
In the repository the same links lead to the files themselves.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
# where they lie on the site
REPOSITORY = "repository"
LANGUAGES = {".py": "python", ".sh": "bash", ".toml": "toml", ".json": "json", ".yml": "yaml", ".yaml": "yaml"}
# pages of a user's first questions, which sections of the same name in other pages must not hide from a search
_FIRST = ("howto/install.md", "howto/migration.md", "howto/launch.md", "howto/resume.md", "howto/serve.md")
_LOOKED_UP = ("reference/", "evidence/", "project/")
# in a Markdown file: a block of code, code in a line, or a link's address and anchor; links alone have a second group
_LINK = re.compile(r"^(?:```|~~~).*?^(?:```|~~~)|`[^`\n]+`|\]\(([^)\s#:]+)(#[^)\s]*)?\)", re.DOTALL | re.MULTILINE)
_ITEM = re.compile(r"(?:[-*+]|\d+\.) +(?=\S)")
_FENCE = re.compile(r"`{3,}|~{3,}")
_TITLE = re.compile(r"^# .+$", re.MULTILINE)
_UNSEARCHED = "---\nsearch:\n  exclude: true\n---\n\n"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds a page for each file or folder of the repository that is linked, from docs/ or from one of these pages."""
    texts = {f"docs/{file.src_uri}": file.content_string for file in files.documentation_pages()}
    # the navigation names some that no page need link
    wanted = [path for path in _named(config.nav) if path not in texts]
    for place, text in texts.items():
        wanted += linked(place, text)
    made: set[str] = set()
    while wanted:
        path = wanted.pop()
        if path in made or path.startswith("docs/") and path != "docs/":
            continue
        made.add(path)
        text = page_of(path)
        files.append(File.generated(config, f"{REPOSITORY}/{address(path)}", content=text))
        wanted += linked(place_of(path), text)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """The page with its links as they are on the site, and lists as Python-Markdown reads them."""
    source = page.file.src_uri
    if source.startswith(_LOOKED_UP):
        # who searches by words has a task; who searches for a name finds it all the same
        page.meta.setdefault("search", {"boost": 0.5})
    if source in _FIRST:
        page.meta.setdefault("search", {"boost": 2})
    origin = source.removeprefix(f"{REPOSITORY}/") if source.startswith(f"{REPOSITORY}/") else f"docs/{source}"
    folder = posixpath.dirname(source)

    def on_site(target: str) -> str:
        place = target.removeprefix("docs/") if target.startswith("docs/") else f"{REPOSITORY}/{address(target)}"
        return posixpath.relpath(place, folder or ".")

    return indented(with_links(origin, markdown, on_site))


def with_links(place: str, text: str, on_site: Callable[[str], str]) -> str:
    """The Markdown of the file at `place` with `on_site(path from the root)` for the address of each link to a file."""

    def changed(match: re.Match[str]) -> str:
        if match[1] is None:
            return match[0]
        target = _resolved(place, match[1])
        return match[0] if target is None else f"]({on_site(target)}{match[2] or ''})"

    return _LINK.sub(changed, text)


def indented(text: str) -> str:
    """The Markdown with four spaces for each list that a line is in, as Python-Markdown counts.

    GitHub looks where the words of an item begin.
    """
    # columns at which the words of the items begin that the line is in
    begins: list[int] = []
    lines, fence = [], ""
    for line in text.split("\n"):
        words = line.lstrip(" ")
        column = len(line) - len(words)
        if words and not fence:
            begins = [begin for begin in begins if begin <= column]
        within = column - begins[-1] if begins else column
        lines.append(" " * (4 * len(begins) + within) + words if words else "")
        mark = _FENCE.match(words)
        if mark and (not fence or words.strip() == fence):
            fence = "" if fence else mark[0]
        item = None if fence else _ITEM.match(words)
        if item and within < 4:
            begins.append(column + item.end())
    return "\n".join(lines)


def linked(place: str, text: str) -> list[str]:
    """Paths from the root of the files outside docs/ that the Markdown of the file at `place` links."""
    targets = (_resolved(place, match[1]) for match in _LINK.finditer(text) if match[1] is not None)
    return [target for target in targets if target is not None and not target.startswith("docs/")]


def address(path: str) -> str:
    """Where below `repository/` the page of a file or folder lies."""
    if path.endswith(".md"):
        return path
    return f"{path}/index.md" if (ROOT / path).is_dir() else f"{path}.md"


def place_of(path: str) -> str:
    """The file or folder itself, as a place that links start from."""
    return f"{path}/index.md" if (ROOT / path).is_dir() else path


def page_of(path: str) -> str:
    """The Markdown of a file's or a folder's page."""
    full = ROOT / path
    if full.is_dir():
        inside = sorted(child.name for child in full.iterdir() if child.suffix in (".py", ".md", ".sh", ".json"))
        return f"{_UNSEARCHED}# {path}\n\n" + "".join(f"- [{name}]({name})\n" for name in inside)
    text = full.read_text()
    if path.endswith(".md"):
        return _UNSEARCHED + (text if _TITLE.search(text) else f"# {path}\n\n{text}")
    # a file may have fences of its own
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{_UNSEARCHED}# {path}\n\n{fence} {LANGUAGES.get(full.suffix, 'text')}\n{text.rstrip()}\n{fence}\n"


def _resolved(place: str, target: str) -> str | None:
    """The path from the root of what a link in the file at `place` names, if that is there."""
    path = posixpath.normpath(posixpath.join(posixpath.dirname(place), target))
    return path if not path.startswith("..") and (ROOT / path).exists() else None


def _named(nav: object) -> list[str]:
    """Paths from the root of the files of the repository that the navigation names."""
    if isinstance(nav, str):
        return [nav.removeprefix(f"{REPOSITORY}/")] if nav.startswith(f"{REPOSITORY}/") else []
    inside = nav.values() if isinstance(nav, dict) else nav if isinstance(nav, list) else ()
    return [path for part in inside for path in _named(part)]
