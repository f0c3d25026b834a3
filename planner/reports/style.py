"""The report's look: style sheet, small pieces of HTML, and patterns, by which looks differ beside their colour.

A strategy's pattern shows how it cuts: level lines for rows, upright lines for columns, both for grids, dots for
replicas. Parts of time that move bytes between ranks are hatched, those that compute are plain.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

# class of a colour -> (light, dark); strategies s-*, parts of time p-*
COLOURS = {
    "s-table_wise": ("#4a7fb5", "#6ba0d6"),
    "s-column_wise": ("#d98b3a", "#e0a15a"),
    "s-row_wise": ("#4f9b77", "#69b892"),
    "s-table_row_wise": ("#8f77b5", "#ab94d1"),
    "s-table_column_wise": ("#c0697f", "#d88aa0"),
    "s-grid_shard": ("#8b7a5e", "#b09d7e"),
    "s-data_parallel": ("#8a929c", "#9aa3ae"),
    "s-other": ("#5f9ea0", "#7fbdbf"),
    "s-mixed": ("#c9cfd6", "#4a525c"),
    "p-input_comms": ("#e9c46a", "#d9b55c"),
    "p-prefetch": ("#b07aa1", "#c391b5"),
    "p-fwd_compute": ("#5b8fc7", "#6fa3db"),
    "p-fwd_comms": ("#e8a15c", "#dd9750"),
    "p-bwd_compute": ("#2f5f94", "#4577ae"),
    "p-bwd_comms": ("#cc6f3d", "#c66c3c"),
    "p-overhead": ("#a9b0b8", "#757e89"),
}
# the lines of a pattern of 6 x 6 pixels
LINES = {
    "s-column_wise": "M2 0V6",
    "s-row_wise": "M0 2H6",
    "s-table_row_wise": "M0 1.5H6M0 4.5H6",
    "s-table_column_wise": "M1.5 0V6M4.5 0V6",
    "s-grid_shard": "M2 0V6M0 2H6",
    "s-data_parallel": "M2 2h1.4M5 5h1.4",
    "p-input_comms": "M-1 7L7 -1M-1 1L1 -1M5 7L7 5",
    "p-fwd_comms": "M-1 7L7 -1M-1 1L1 -1M5 7L7 5",
    "p-bwd_comms": "M-1 7L7 -1M-1 1L1 -1M5 7L7 5",
}


def patterns() -> str:
    """An empty picture that holds the patterns for all others."""
    elements = [
        f'<pattern id="{name}" width="6" height="6" patternUnits="userSpaceOnUse">'
        f'<rect width="6" height="6" class="f-{name}"/><path d="{lines}" class="line"/></pattern>'
        for name, lines in LINES.items()
    ]
    return f'<svg class="defs" width="0" height="0" aria-hidden="true"><defs>{"".join(elements)}</defs></svg>'


def style_sheet() -> str:
    """All of the report's CSS."""
    light = "".join(f"--{name}:{light};" for name, (light, _) in COLOURS.items())
    dark = "".join(f"--{name}:{dark};" for name, (_, dark) in COLOURS.items())
    fills = "".join(
        f".{name}{{fill:{f'url(#{name})' if name in LINES else f'var(--{name})'}}}.f-{name}{{fill:var(--{name})}}"
        for name in COLOURS
    )
    return PAGE.replace("LIGHT", light).replace("DARK", dark) + fills


def document(title: str, style: str, body: Iterable[str]) -> str:
    """A page that needs no other file: its title, its CSS, and pieces of HTML, a line each."""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{style}</style></head>\n<body>\n"
        + "\n".join(body)
        + "\n</body></html>\n"
    )


def swatch(look: str) -> str:
    """A small sample of a look, for legends."""
    return f'<svg width="14" height="14" aria-hidden="true"><rect class="b {look}" width="14" height="14"/></svg>'


def look(strategy: str) -> str:
    """The class of a strategy."""
    return f"s-{strategy}" if f"s-{strategy}" in COLOURS else "s-other"


def soft(text: str) -> str:
    """A paragraph beside the point."""
    return f'<p class="soft">{escape(text)}</p>'


def figure(svg: str, legend: Iterable[tuple[str, str]]) -> str:
    """A picture that scrolls where it is too wide, and its legend of looks and names."""
    items = "".join(f"<li>{swatch(look)}{escape(name)}</li>" for look, name in legend)
    scrolled = f'<div class="scroll" tabindex="0">{svg}</div>'
    return f'<figure>{scrolled}<figcaption><ul class="legend">{items}</ul></figcaption></figure>'


def numbers(cells: Iterable[str]) -> str:
    """Cells of a table, to the right."""
    return "".join(f'<td class="n">{escape(cell)}</td>' for cell in cells)


PAGE = """
:root{color-scheme:light dark;--page:#fcfcfa;--ink:#1f2328;--soft:#59636e;--rule:#d9dde1;--well:#eef0f1;--line:#fff;
--mark:#b3261e;LIGHT}
@media (prefers-color-scheme:dark){:root{--page:#14171a;--ink:#e6e8ea;--soft:#a3acb5;--rule:#363c43;--well:#23282d;
--line:#14171a;--mark:#ff8a80;DARK}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:1080px;padding:32px 24px 64px;background:var(--page);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
h1{font-size:26px;line-height:1.2;margin:0 0 6px;font-weight:650;letter-spacing:-.01em}
h2{font-size:18px;margin:40px 0 2px;font-weight:650}
p{margin:4px 0;max-width:96ch}
.soft,figcaption,dt{color:var(--soft);font-weight:400}
.facts{display:flex;flex-wrap:wrap;gap:12px 40px;margin:20px 0 8px;padding:14px 0;border:solid var(--rule);
border-width:1px 0}
.facts div{min-width:110px}
.facts b{display:block;font-size:24px;line-height:1.2;font-weight:600;font-variant-numeric:tabular-nums}
.facts span{color:var(--soft);font-size:13px}
figure{margin:12px 0 0}
.scroll{overflow-x:auto}
svg{display:block}
svg.chart{max-width:none}
.defs{position:absolute}
svg text{font:11.5px system-ui,-apple-system,"Segoe UI",Roboto,Arial,sans-serif;fill:var(--soft)}
svg text.in{fill:#fff;font-weight:600;pointer-events:none;paint-order:stroke;stroke:#0009;stroke-width:2.2px;
stroke-linejoin:round}
svg text.strong{fill:var(--ink);font-weight:600;paint-order:stroke;stroke:var(--page);stroke-width:3px}
svg text.mark{fill:var(--mark);font-weight:600}
.end{text-anchor:end}.mid{text-anchor:middle}
.well{fill:var(--well)}
.grid{stroke:var(--rule);fill:none}
.line{stroke:var(--line);stroke-opacity:.5;stroke-width:1;fill:none}
.bound,.limit{fill:none;stroke:var(--mark);stroke-width:1.5}
.bound{stroke-dasharray:6 3}
.b{stroke:var(--page);stroke-width:.8}
.b:hover{stroke:var(--ink);stroke-width:2}
.legend{display:flex;flex-wrap:wrap;gap:4px 18px;margin:8px 0 0;padding:0;list-style:none;font-size:13px}
.legend li{display:flex;align-items:center;gap:6px}
table{border-collapse:collapse;width:100%;font-size:13.5px;font-variant-numeric:tabular-nums}
th{font-weight:600;text-align:left;color:var(--soft);font-size:12.5px;vertical-align:bottom}
th,td{padding:5px 10px 5px 0;border-bottom:1px solid var(--rule)}
td,tbody th{vertical-align:top}
table.tables{table-layout:fixed;min-width:640px}
tr.top>*{border-bottom:0;padding-bottom:0}
td.why{padding-top:2px;font-size:13px;color:var(--soft)}
.ways{width:auto;min-width:60%;color:var(--ink)}.ways td,.ways th{padding-right:22px}
.ways tr:last-child>*{border-bottom:0}
.n{text-align:right;white-space:nowrap}
tbody th{color:var(--ink);font-size:13.5px;overflow-wrap:anywhere}
td table{margin:6px 0 4px;font-size:12.5px}
td td,td th{padding:2px 10px 2px 0}
tr.now td{font-weight:600}
summary{cursor:pointer}
summary:focus-visible{outline:2px solid var(--mark);outline-offset:2px}
details.block>summary{font-size:14px;color:var(--soft);margin:10px 0}
dl{display:grid;grid-template-columns:max-content 1fr;gap:4px 20px;margin:10px 0;font-size:14px}
dd{margin:0}
@media print{:root{--page:#fff;--ink:#000;--soft:#444;--rule:#bbb;--well:#eee;--line:#fff;--mark:#a00;LIGHT}
body{max-width:none;padding:0;font-size:11px}figure,tr{break-inside:avoid}h2{break-after:avoid}
.scroll{overflow:visible}svg.chart{width:100%;height:auto}.b{-webkit-print-color-adjust:exact;print-color-adjust:exact}}
"""
