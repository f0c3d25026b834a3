"""Measurements as one page of HTML: the table, bytes against time with the line of a copy, ratios to peers.

The page has no scripts and fetches nothing; hovering a point or a bar tells what it is.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from html import escape

from shardwise.perf.suite import record
from shardwise.perf.suite.case import PEERS
from shardwise.perf.suite.report import (
    columns,
    heading,
    remarks,
    rows,
)
from shardwise.perf.suite.roofline import (
    COLOURS,
    Bar,
    Point,
    bars,
    colour,
    roofline,
)
from shardwise.perf.suite.storage import Stored
from shardwise.planner.report.style import PAGE, document, soft

MORE = """
body{max-width:1180px}.whisker{stroke:var(--ink);stroke-width:1.2;fill:none}
.chip{display:inline-block;width:11px;height:11px;border-radius:2px}
td.bad{color:var(--mark);font-weight:600}tbody tr:hover td{background:var(--well)}
"""


def page(stored: Sequence[Stored]) -> str:
    """The page, the same bytes for the same files."""
    title = "shardwise: measured" if len(stored) == 1 else f"shardwise: {len(stored)} runs"
    body = [f"<h1>{escape(title)}</h1>"]
    for place, one in enumerate(stored, 1):
        label = "" if len(stored) == 1 else f"[{place}] {one.path}: "
        body.append(soft(f"{label}{heading(one)}"))
        body += [f'<p class="soft">{escape(said)}</p>' for said in remarks(one)]
    groups = list(dict.fromkeys(row.group for row in rows(stored) if row.group))
    for one in stored:
        body += _figures(one, groups)
    body += ["<h2>Cases</h2>", *_table(stored), *_versions(stored)]
    return document(title, style_sheet(), body)


def style_sheet() -> str:
    """The CSS of a page of measurements."""
    light, dark = ("".join(f"--{name}:{both[dim]};" for name, both in COLOURS.items()) for dim in (0, 1))
    fills = "".join(f".{name}{{fill:var(--{name});background:var(--{name})}}" for name in COLOURS)
    return PAGE.replace("LIGHT", light).replace("DARK", dark) + MORE + fills


def _figures(one: Stored, groups: Sequence[str]) -> Iterator[str]:
    where = f"{one.machine.get('device_name')} ({one.machine.get('device')})"
    records = [each for each in record.split(one.measured.records) if each.unit == "s"]
    points = [
        Point(each.name, each.group, each.bytes_moved, record.best_median(each))
        for each in records
        if each.bytes_moved and record.copy_gb_s(each)
    ]
    copies = [copy for each in records if (copy := record.copy_gb_s(each))]
    if points:
        copy = statistics.median(copies)
        yield f"<h2>Bytes and time on {escape(where)}</h2>"
        yield soft(
            f"The dashed line is a copy, measured in the same run: {copy:.4g} GB/s of reads and writes. Nothing that"
            " moves its bytes through memory is below it; what lies in a cache can be."
        )
        yield _figure(roofline(points, copy, groups, f"Bytes against time on {where}"), groups)
    found = [
        Bar(each.name, peer, *quartiles)
        for each in records
        for peer in record.peers(each)
        if (quartiles := record.ratio(each, peer))
    ]
    peers = [peer for peer in PEERS if any(bar.peer == peer for bar in found)]
    if found:
        yield f"<h2>Time over that of peers on {escape(where)}</h2>"
        yield soft(
            "Medians of the ratios within a round; thin lines reach from quartile to quartile. Below 1x ours is faster."
        )
        yield _figure(bars(found, peers, f"Ratios to peers on {where}"), peers)


def _figure(svg: str, names: Sequence[str]) -> str:
    items = "".join(f'<li><span class="chip {colour(names, name)}"></span>{escape(name)}</li>' for name in names)
    scrolled = f'<div class="scroll" tabindex="0">{svg}</div>'
    return f'<figure>{scrolled}<figcaption><ul class="legend">{items}</ul></figcaption></figure>'


def _table(stored: Sequence[Stored]) -> Iterator[str]:
    names = columns(stored)
    heads = "".join(f'<th scope="col" class="n">{escape(name)}</th>' for name in names)
    yield f'<div class="scroll"><table><thead><tr><th>group</th><th scope="col">case</th>{heads}</tr></thead><tbody>'
    for row in rows(stored):
        cells = [row.cells.get(name, "") for name in names]
        told = "".join(
            f'<td class="n{" bad" if cell in ("failed", "not run") else ""}">{escape(cell)}</td>' for cell in cells
        )
        yield f'<tr><td>{escape(row.group)}</td><th scope="row">{escape(row.name)}</th>{told}</tr>'
    yield "</tbody></table></div>"


def _versions(stored: Sequence[Stored]) -> Iterator[str]:
    yield "<h2>Versions</h2>"
    names = list(dict.fromkeys(name for one in stored for name in one.machine.get("versions", {})))
    heads = "".join(f"<th>{escape(one.path)}</th>" for one in stored)
    lines = [
        (name, [str(one.machine.get("versions", {}).get(name) or "not installed") for one in stored]) for name in names
    ]
    lines += [(key, [str(one.machine.get(key, "")) for one in stored]) for key in ("device_name", "threads", "cores")]
    lines += [(key, [str(one.about.get(key, "")) for one in stored]) for key in ("commit", "dirty", "datetime", "load")]
    told = "".join(
        f'<tr><th scope="row">{escape(name)}</th>{"".join(f"<td>{escape(cell)}</td>" for cell in cells)}</tr>'
        for name, cells in lines
    )
    yield f'<div class="scroll"><table class="ways"><thead><tr><th></th>{heads}</tr></thead>'
    yield f"<tbody>{told}</tbody></table></div>"
