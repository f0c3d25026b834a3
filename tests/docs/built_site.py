"""The built site as a browser has it: links and anchors of its pages, what they load, and what a search finds."""

from __future__ import annotations

import json
import math
import posixpath
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


@dataclass
class HtmlPage:
    """Anchors of a page, the targets of its links, and the addresses that a browser loads with it."""

    anchors: set[str] = field(default_factory=set)
    links: list[str] = field(default_factory=list)
    loads: list[str] = field(default_factory=list)
    paragraphs: list[str] = field(default_factory=list)


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.page = HtmlPage()
        self._in_paragraph = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.page.anchors |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.page.links.append(values["href"])
        if tag == "link" and values.get("rel") not in ("canonical", "next", "prev") and "href" in values:
            self.page.loads.append(values["href"])
        self.page.loads += [values[name] for name in ("src", "srcset", "data", "poster") if name in values]
        if tag == "p":
            self._in_paragraph = True
            self.page.paragraphs.append("")

    def handle_endtag(self, tag: str) -> None:
        self._in_paragraph = self._in_paragraph and tag != "p"

    def handle_data(self, data: str) -> None:
        if self._in_paragraph:
            self.page.paragraphs[-1] += data


def read_site(folder: Path) -> dict[str, HtmlPage]:
    """Page by its path below the folder, without 404.html: it is shown at any address, so its links are absolute."""
    pages = {}
    for path in sorted(folder.rglob("*.html")):
        if path.name != "404.html":
            reader = _Reader()
            reader.feed(path.read_text())
            pages[str(path.relative_to(folder))] = reader.page
    return pages


def broken(folder: Path, pages: dict[str, HtmlPage]) -> Iterator[str]:
    """A line for each link or load of a page that leads to no file of the site, or to no anchor of its page."""
    for place, page in pages.items():
        for address in [*page.links, *page.loads]:
            parts = urlsplit(address)
            if parts.scheme or parts.netloc:
                continue
            path = posixpath.normpath(posixpath.join(posixpath.dirname(place), unquote(parts.path)))
            target = place if not parts.path else path
            if address.startswith("/") or not (folder / target).is_file():
                yield f"{place} leads to {address}: no such file"
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].anchors:
                yield f"{place} leads to {address}: no such anchor"


# of the theme's search: what it multiplies a hit in a title by, and lunr's BM25
_TITLE, _K1, _B = 1_000.0, 1.2, 0.75


class Search:
    """Ranks as the site does: BM25 over titles and texts of sections, the last word of a query as a prefix too."""

    def __init__(self, folder: Path) -> None:
        sections = json.loads((folder / "search" / "search_index.json").read_text())["docs"]
        self.sections = [(each["location"], float(each.get("boost", 1))) for each in sections]
        self.fields = []
        for name, weight in (("title", _TITLE), ("text", 1.0)):
            counters = [Counter(_words(re.sub("<[^>]*>", " ", each[name]))) for each in sections]
            holders = Counter(term for counter in counters for term in counter)
            mean = sum(map(Counter.total, counters)) / len(counters)
            self.fields.append((counters, holders, mean, weight))

    def pages(self, query: str) -> list[str]:
        """Pages with a hit, best first: each counts as its best section, by how many words of the query that has."""
        words = _words(query)
        best: dict[str, float] = {}
        for i, (location, boost) in enumerate(self.sections):
            scores = [self._score(i, word, prefix=word is words[-1]) for word in words]
            score = boost * sum(scores) * sum(score > 0 for score in scores) / len(words)
            page = location.partition("#")[0]
            if score > best.get(page, 0):
                best[page] = score
        return sorted(best, key=lambda page: -best[page])

    def _score(self, i: int, word: str, prefix: bool) -> float:
        total = 0.0
        for counters, holders, mean, weight in self.fields:
            for term in counters[i]:
                if term == word or (prefix and term.startswith(word)):
                    rarity = math.log(1 + (len(counters) - holders[term] + 0.5) / (holders[term] + 0.5))
                    count, length = counters[i][term], counters[i].total()
                    total += weight * rarity * (_K1 + 1) * count / (count + _K1 * (1 - _B + _B * length / mean))
        return total


def _words(text: str) -> list[str]:
    """Words in lower case without the endings that make no difference to a search."""
    found = re.findall(r"[a-z0-9][a-z0-9_.]*[a-z0-9]|[a-z0-9]", text.lower())
    return [re.sub(r"(?<=\w{3})(ing|es|ed|e|s)$", "", word) for word in found]
