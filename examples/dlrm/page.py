"""A run as one page of HTML: what was trained on what, how it went, where the tables are, how they fared, what is next.

The page has no scripts and fetches nothing. It looks as the planner's report does, light or dark as the reader has it,
and reads on a phone: charts scale, tables become blocks, commands wrap.
"""

from __future__ import annotations

import os
import platform
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from html import escape
from pathlib import Path
from typing import Any

import torch
from charts import Axes, Line, draw as draw_lines
from health import HOT_SHARE, TableHealth
from summary import plan_in_short
from try_next import Step

from shardwise.planner.plan.alternatives import pieces, slowest_ranks
from shardwise.planner.plan.explanation import rows
from shardwise.planner.plan.planned import Planned
from shardwise.planner.reports.figures import Block, Chart, draw, milliseconds, short
from shardwise.planner.reports.style import document, figure, look, patterns, soft, style_sheet

STYLE = """
:root{--loss:#4a7fb5;--score:#4f9b77;--speed:#d98b3a}
@media (prefers-color-scheme:dark){:root{--loss:#6ba0d6;--score:#69b892;--speed:#e0a15a}}
h2{margin:44px 0 6px}
.facts{display:grid;grid-template-columns:repeat(4,1fr);gap:16px 28px}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,400px),1fr));gap:22px 36px;margin:26px 0 0}
.charts h3{font-size:15px;font-weight:650;margin:0}
.charts p{font-size:13px;margin:0 0 6px}
svg.lines{width:100%;height:auto}
.line-of{fill:none;stroke-width:2;stroke-linejoin:round;stroke-linecap:round}
.line-of.loss{stroke:var(--loss)}.line-of.score{stroke:var(--score)}.line-of.speed{stroke:var(--speed)}
.dot{stroke:var(--page);stroke-width:1}
.dot.loss{fill:var(--loss)}.dot.score{fill:var(--score)}.dot.speed{fill:var(--speed)}
.hover{fill:transparent}.hover:hover{fill:var(--ink);fill-opacity:.35}
.best{fill:none;stroke:var(--ink);stroke-width:1.5}
.level{fill:none;stroke:var(--soft);stroke-width:1.2;stroke-dasharray:5 4}
.plan{display:flex;flex-wrap:wrap;gap:8px 40px;align-items:flex-start}
.plan figure{flex:0 1 auto;max-width:100%}
.plan .told{flex:1 1 320px;min-width:0;padding-top:26px}
.plan .told p{margin:0 0 8px}
pre{font:13px/1.55 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;margin:12px 0;white-space:pre-wrap;
overflow-wrap:anywhere}
pre.command{background:var(--well);padding:10px 12px;border-radius:6px;margin:4px 0 16px}
pre.whole{white-space:pre;overflow-x:auto;overflow-wrap:normal}
ol.next{padding-left:1.4em;margin:14px 0}
.share{display:flex;align-items:center;gap:8px;justify-content:flex-end}
.share i{flex:none;width:72px;height:8px;border-radius:4px;background:var(--well);overflow:hidden}
.share i b{display:block;height:100%;background:var(--score)}
.share.hot i b{background:var(--speed)}
.share span{min-width:3.4em;text-align:right}
table.wide{margin:12px 0}
table.wide th.n{white-space:normal}
table.small{width:auto;margin:12px 0}
table.small th,table.small td{padding-right:28px}
dd{overflow-wrap:anywhere;min-width:0}
@media (max-width:640px){
body{padding:20px 16px 48px}
.facts{grid-template-columns:1fr 1fr;gap:16px}
h1{font-size:22px}
table.wide thead{display:none}
table.wide tr{display:block;padding:10px 0;border-bottom:1px solid var(--rule)}
table.wide th,table.wide td{display:flex;justify-content:space-between;gap:12px;border:0;padding:2px 0;
white-space:normal}
table.wide td::before{content:attr(data-of);color:var(--soft);text-align:left;flex:1}
dl{grid-template-columns:1fr;gap:0}dd{margin:0 0 10px}
table.small th,table.small td{padding-right:16px}
}
"""


@dataclass(frozen=True)
class Run:
    """What the page tells: what `--json` writes, (step, loss, samples a second) of lines of metrics, the plan as text
    and, where the planner made it, as it is; the tables, what to try next, and what became of the compiled loops."""

    result: dict[str, Any]
    history: Sequence[tuple[int, float, float | None]]
    plan: str
    planned: Planned | None
    health: Sequence[TableHealth]
    steps: Sequence[Step]
    loops: str


def write_page(path: Path, run: Run) -> None:
    """Write the page; the folder is there."""
    # a name of a file on the command line may be none of UTF-8
    path.write_text(page(run), encoding="utf-8", errors="replace")


def page(run: Run) -> str:
    """The page as text."""
    data = run.result["config"]["data"]
    title = f"DLRM on {'generated clicks' if data == 'clicks' else Path(data).name}"
    body = [
        patterns(),
        f"<h1>{escape(title)}</h1>",
        soft(_headline(run)),
        *_facts(run),
        *_charts(run),
        *_plan(run),
        *_tables(run.health),
        *_caches(run.result),
        *_int8(run.result),
        *_next(run.steps),
        *_settings(run),
    ]
    return document(title, style_sheet() + STYLE, body)


def _headline(run: Run) -> str:
    result, config = run.result, run.result["config"]
    epochs, steps = result["epochs"], sum(int(epoch["steps"]) for epoch in result["epochs"])
    samples = steps * config["batch_size"]
    ranks = f"{result['world_size']} rank{'s' if result['world_size'] > 1 else ''}"
    return (
        f"{len(epochs)} epochs, {steps:,} steps, {samples:,} samples on {ranks} ({result['device']}),"
        f" {datetime.now().astimezone():%Y-%m-%d %H:%M %Z}. Scores are of samples that were never trained on."
    )


def _facts(run: Run) -> list[str]:
    result, best = run.result, _best(run.result)
    numbers = [
        (f"{best['test_auc']:.4f}", f"test AUC of epoch {best['epoch']}, the best of {len(result['epochs'])}"),
        (f"{best['test_ne']:.4f}", "its normalized entropy; 1 is the mean click rate"),
        (f"{result['epochs'][-1]['samples_per_s']:,.0f}", "samples a second, without warm-up"),
        (f"{result['int8']['ratio']:.2f}x", f"smaller as int8, at an AUC of {result['int8']['test_auc']:.4f}"),
    ]
    blocks = "".join(f"<div><b>{escape(value)}</b><span>{escape(meaning)}</span></div>" for value, meaning in numbers)
    return [f'<div class="facts">{blocks}</div>']


def _best(result: dict[str, Any]) -> dict[str, Any]:
    epoch: dict[str, Any] = result["epochs"][result["best_epoch"] - 1]
    return epoch


def _charts(run: Run) -> list[str]:
    result = run.result
    ends, step = [], 0
    for epoch in result["epochs"]:
        step += int(epoch["steps"])
        ends.append(step)
    chosen = result["best_epoch"] - 1

    def of_epochs(name: str) -> list[tuple[float, float]]:
        return [(end, epoch[name]) for end, epoch in zip(ends, result["epochs"], strict=True)]

    # a short run ends before its first line of metrics
    losses = [(step, loss) for step, loss, _ in run.history] or of_epochs("train_loss")
    speeds = [(step, rate) for step, _, rate in run.history if rate is not None] or of_epochs("samples_per_s")
    ceiling = result.get("ceiling_auc")
    auc = Axes(
        "Test AUC by steps",
        lambda value: f"{value:.3f}",
        level=None if ceiling is None else (ceiling, f"a perfect model: {ceiling:.4f}"),
        best=of_epochs("test_auc")[chosen],
    )
    plots = [
        ("Loss", "Binary cross-entropy in training, lower is better.",
         Line("loss", "loss", losses), Axes("Training loss by steps", lambda value: f"{value:.3f}")),
        ("AUC", "Area under the ROC curve on test samples, higher is better.",
         Line("test AUC", "score", of_epochs("test_auc")), auc),
        ("NE", "Normalized entropy on test samples, lower is better.",
         Line("test NE", "score", of_epochs("test_ne")),
         Axes("Test NE by steps", lambda value: f"{value:.3f}", best=of_epochs("test_ne")[chosen])),
        ("Throughput", "Samples a second of all ranks, without a process's first steps.",
         Line("samples/s", "speed", speeds), Axes("Samples a second by steps", _thousands, zero=True)),
    ]  # fmt: skip
    charts = "".join(
        f"<div><h3>{escape(name)}</h3>{soft(explanation)}{draw_lines([line], axes)}</div>"
        for name, explanation, line, axes in plots
    )
    return [f'<div class="charts">{charts}</div>']


def _thousands(value: float) -> str:
    return f"{value / 1000:,.4g}k" if value >= 1000 else f"{value:.0f}"


def _plan(run: Run) -> list[str]:
    lines = ["<h2>Where the tables are</h2>"]
    if run.planned is not None:
        summary = "".join(
            f"<p>{escape(line.strip()[:1].upper() + line.strip()[1:])}</p>"
            for line in plan_in_short(run.planned).splitlines()
        )
        summary = f'<div class="told">{summary}</div>'
        explanation = "Each rank's part of a step as the planner predicts it, in milliseconds, by table."
        lines += [
            soft(explanation),
            f'<div class="plan">{_picture(run.planned)}{summary}</div>',
        ]
    return [
        *lines,
        '<details class="block"><summary>The whole plan, and why it is so</summary>'
        f'<pre class="whole" tabindex="0">{escape(run.plan)}</pre></details>',
    ]


def _picture(planned: Planned) -> str:
    """The planner's columns of ranks, with the names of features for those of tables."""
    by_index = {row.index: row for row in rows(planned)}
    stacks = []
    for rank, (base, on_rank) in enumerate(zip(planned.problem.base_ms.tolist(), pieces(planned), strict=True)):
        stack = [Block(base, "p-overhead", "other", f"rank {rank}, whatever the plan: {milliseconds(base)}")]
        for piece in sorted(on_rank, key=lambda piece: -piece.time_ms):
            row = by_index[piece.item]
            name = " + ".join(table.name.removeprefix("t_") for table in row.tables)
            kind = row.choice.sharding_type
            detail = f"rank {rank}, {name}: {milliseconds(piece.time_ms)}, {kind}, {row.choice.compute_kernel}"
            stack.append(Block(piece.time_ms, look(kind), name, detail))
        stacks.append(stack)
    used = dict.fromkeys(row.choice.sharding_type for row in by_index.values())
    legend = [*((look(name), name) for name in used), ("p-overhead", "dense layers and the rest of a step")]
    time = planned.loads.time_ms
    chart = Chart(
        "Time of each rank by table",
        f"A column for each of {time.size} ranks; the slowest takes {milliseconds(float(time.max()))}.",
        milliseconds,
        short,
        planned.problem.local_size,
        bound=planned.certified.bound_ms or None,
        mark=slowest_ranks(planned)[0],
        widest=110.0,
    )
    return figure(draw(stacks, chart), legend)


def _tables(health: Sequence[TableHealth]) -> list[str]:
    heads = (
        "rows", "lookups in training", "rows trained", f"lookups of the hottest {HOT_SHARE:.0%} of rows",
        "row norm, median", "largest", "int8 error at most",
    )  # fmt: skip
    lines = []
    for table in health:
        cells = [
            f"{table.rows:,}", f"{table.lookups:,}", _share(table.trained), _share(table.hot, "hot"),
            f"{table.median_norm:.3g}", f"{table.largest_norm:.3g}" if table.finite else "not finite",
            f"{table.int8_error:.2%}",
        ]  # fmt: skip
        tagged = "".join(
            f'<td class="n" data-of="{escape(head)}">{cell if cell.startswith("<") else escape(cell)}</td>'
            for head, cell in zip(heads, cells, strict=True)
        )
        lines.append(f'<tr><th scope="row">{escape(table.feature)}</th>{tagged}</tr>')
    return [
        "<h2>How the tables fared</h2>",
        soft(
            "A row that no training sample asked for still has its random start. Where a few rows get most lookups,"
            " they decide the load of a rank. Norms are Euclidean; the error is what int8 changes of a row, as a part"
            " of its norm."
        ),
        _wide(heads, lines),
    ]


def _caches(result: dict[str, Any]) -> list[str]:
    """What `--tier` did on rank 0; nothing without it."""
    heads = ("below", "rows", "slots", "rows wanted", "of them on the device", "bytes moved", "stalls", "times grown")
    lines = []
    for table, numbers in result.get("caches", {}).items():
        cells = [
            numbers["below"], *(f"{numbers[name]:,}" for name in ("rows", "slots", "wanted")),
            _share(numbers["hit_rate"]), *(f"{numbers[name]:,}" for name in ("bytes_moved", "stalls", "grown")),
        ]  # fmt: skip
        tagged = "".join(
            f'<td class="n" data-of="{escape(head)}">{cell}</td>' for head, cell in zip(heads, cells, strict=True)
        )
        lines.append(f'<tr><th scope="row">{escape(table.removeprefix("t_"))}</th>{tagged}</tr>')
    explained = "Rows that have no slot on the device lie below it, and come before a batch looks them up. Of rank 0."
    return ["<h2>Rows below the device</h2>", soft(explained), _wide(heads, lines)] if lines else []


def _wide(heads: Sequence[str], lines: Sequence[str]) -> str:
    titles = "".join(f'<th scope="col" class="n">{escape(head)}</th>' for head in heads)
    return (
        f'<table class="wide"><thead><tr><th scope="col">table</th>{titles}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table>"
    )


def _share(value: float, look: str = "") -> str:
    return (
        f'<div class="share {look}"><i><b style="width:{value:.1%}"></b></i>'
        f"<span>{f'{value:.0%}' if value >= 0.0995 or not value else f'{value:.1%}'}</span></div>"
    )


def _int8(result: dict[str, Any]) -> list[str]:
    best, int8 = _best(result), result["int8"]
    comparison = [
        ("test AUC", f"{best['test_auc']:.4f}", f"{int8['test_auc']:.4f}"),
        ("test NE", f"{best['test_ne']:.4f}", f"{int8['test_ne']:.4f}"),
        ("tables", _megabytes(int8["fp32_table_bytes"]), _megabytes(int8["table_bytes"])),
    ]
    lines = "".join(
        f'<tr><th scope="row">{name}</th><td class="n">{before}</td><td class="n">{after}</td></tr>'
        for name, before, after in comparison
    )
    return [
        "<h2>As it would serve</h2>",
        soft("The same weights with their tables quantized to int8, on the same test samples."),
        '<table class="small"><thead><tr><th></th><th scope="col" class="n">fp32</th>'
        f'<th scope="col" class="n">int8</th></tr></thead><tbody>{lines}</tbody></table>',
    ]


def _megabytes(count: float) -> str:
    return f"{count / 1e6:,.2f} MB"


def _next(steps: Sequence[Step]) -> list[str]:
    if not steps:
        return []
    lines = "".join(
        f'<li>{escape(step.what[0].upper() + step.what[1:])}<pre class="command">{escape(step.command)}</pre></li>'
        for step in steps
    )
    return [
        "<h2>What to try next</h2>",
        soft(f"From {Path.cwd().name}/, the folder that this run was started in."),
        f'<ol class="next">{lines}</ol>',
    ]


def _settings(run: Run) -> list[str]:
    result = run.result
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    threads = torch.get_num_threads()
    script = os.path.relpath(sys.argv[0]) if sys.argv[0] else "train.py"
    facts = {
        "command": shlex.join([script, *sys.argv[1:]]),
        "machine": f"{result['device']}, {os.cpu_count()} cores, {platform.system()}; threads of a rank: {threads}",
        "versions": versions,
        "loops": run.loops.removeprefix("loops: "),
        "settings": ", ".join(
            f"{name} {value}" for name, value in result["config"].items() if value not in (None, False)
        ),
    }
    if result["skipped_rows"]:
        facts["rows left out"] = ", ".join(f"{count:,} for {why}" for why, count in result["skipped_rows"].items())
    lines = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in facts.items())
    return ["<h2>How it was made</h2>", f"<dl>{lines}</dl>"]
