"""The GPU script's results as one page of HTML: decisions, prediction beside measurement, the A/B, kernels by time.

The page has no scripts and fetches nothing; hovering a mark tells what it is. All measures of figures are pixels.
What kernels should take on an H100 and an H200 was written down before any of them ran there: from the compiled code
(sm_90, triton 3.7.1), the bytes that ops declare and ASSUMPTIONS; a model, no measurement. `reviewed` is of the kernels
as they were when the model was made, `changed` of those that load a row's number, source and weights side by side,
index with one id a thread and search less.
`python -m shardwise.perf.gpu_scripts.gpu_page FILE.json` makes it again.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from shardwise.perf.gpu_scripts.gpu_ab import CONTROL, GAIN, LOSS
from shardwise.perf.suite.report_html import colour, style_sheet, svg
from shardwise.planner.reports.style import document, soft

Range = tuple[float, float]

# GB/s of a copy, ns of a load, multiprocessors, warp instructions a second at full issue
ASSUMPTIONS: Mapping[str, Mapping[str, float]] = {
    "H100": {
        "copy_gb_per_s": 3000, "dram_ns": 600, "dram_loaded_ns": 750, "l2_ns": 270, "multiprocessors": 132,
        "warp_instructions_per_s": 0.9e12,
    },
    "H200": {
        "copy_gb_per_s": 4300, "dram_ns": 600, "dram_loaded_ns": 750, "l2_ns": 270, "multiprocessors": 132,
        "warp_instructions_per_s": 0.9e12,
    },
}  # fmt: skip


@dataclass(frozen=True)
class Prediction:
    """Microseconds (or `unit`) on a card, from and to; `floor` is the declared bytes over a copy's bandwidth.

    `where` says what is measured: ("ab", shape, call), ("kernel", shape, parts of names ...), ("step", shape, call),
    ("yardstick", name ...).
    """

    name: str
    where: tuple[str, ...]
    reviewed: Mapping[str, Range]
    changed: Mapping[str, Range]
    floor: Mapping[str, float]
    bound: str
    unit: str = "us"


def _both(h100: Range | None, h200: Range | None) -> Mapping[str, Range]:
    return {name: value for name, value in (("H100", h100), ("H200", h200)) if value}


def _floor(h100: float, h200: float) -> Mapping[str, float]:
    return {"H100": h100, "H200": h200}


_FORWARD_A, _FORWARD_A_FP16 = _both((1050, 1150), (770, 880)), _both((580, 660), (470, 550))
_FORWARD_C, _FORWARD_ONE = _both((360, 420), (290, 350)), _both((95, 110), (80, 95))

PREDICTIONS: tuple[Prediction, ...] = (
    Prediction("copy", ("yardstick", "copy", "gb_per_s"), _both((3000, 3000), (4300, 4300)), {}, {}, "DRAM", "GB/s"),
    Prediction("load that misses L2", ("yardstick", "latency_ns", "DRAM"), _both((600, 750), (600, 750)), {}, {},
               "DRAM and TLB", "ns"),
    Prediction("load that hits L2", ("yardstick", "latency_ns", "L2"), _both((270, 270), (270, 270)), {}, {},
               "L2", "ns"),
    Prediction("A forward", ("ab", "A", "forward"), _FORWARD_A, _FORWARD_A, _floor(950, 670),
               "bandwidth; on an H200 latency"),
    Prediction("A fp16 forward", ("ab", "A fp16", "forward"), _FORWARD_A_FP16, _FORWARD_A_FP16, _floor(510, 350),
               "three gathers one after another, rows of 256 bytes"),
    Prediction("A backward", ("ab", "A", "backward"), _both((3900, 4400), (3700, 4200)),
               _both((2250, 2500), (1700, 1900)), _floor(2000, 1400), "five loads one after another"),
    Prediction("A backward: keys of rows", ("kernel", "A", "_row_keys_kernel"), _both((150, 200), (150, 150)), {},
               _floor(30, 30), "issue of instructions"),
    Prediction("A backward: sort", ("kernel", "A", "Sort", "sort", "Onesweep", "RadixHistogram"),
               _both((220, 220), (160, 160)), {}, _floor(180, 120), "bandwidth"),
    Prediction("A backward: marks and chunks", ("kernel", "A", "_mark_kernel", "_chunk_kernel", "Scan"),
               _both((250, 320), (250, 250)), {}, _floor(80, 80), "issue; barriers"),
    Prediction("A backward: update", ("kernel", "A", "_update_kernel"), _both((3200, 3700), (3100, 3600)),
               _both((1800, 2100), None), _floor(1800, 1250), "five loads one after another"),
    Prediction("C forward", ("ab", "C", "forward"), _FORWARD_C, {}, _floor(280, 200),
               "13 features of one id; bags of 100 ids begin late"),
    Prediction("C backward", ("ab", "C", "backward"), _both((1250, 1450), (1200, 1400)), _both((800, 850), None),
               _floor(650, 470), "as A"),
    Prediction("L=1 forward", ("ab", "L=1", "forward"), _FORWARD_ONE, {}, _floor(73, 51), "loads before the first row"),
    Prediction("FBGEMM's default, backward", ("ab", "FBGEMM", "backward"), _both((300, 350), (290, 290)), {},
               {"H100": 120}, "five loads one after another"),
    Prediction("64 x 26, a collection's step", ("step", "64 x 26", "module"), _both((330, 330), (330, 330)), {}, {},
               "the host, eager"),
)  # fmt: skip


def card_of(device_name: str) -> str | None:
    """The card of ASSUMPTIONS that a device's name says it is; None of any other."""
    return next((card for card in ASSUMPTIONS if card in device_name), None)


def measured(prediction: Prediction, sections: Mapping[str, Any]) -> float | None:
    """What the script's sections measured of it, if they did."""
    kind, *path = prediction.where
    if kind == "yardstick":
        value: Any = _result(sections, "yardsticks")
        for name in path:
            value = (value or {}).get(name)
        return None if value is None else float(value)
    if kind == "ab":
        shapes = {entry["shape"]: entry["default"] for entry in _result(sections, "ab").get("shapes", ())}
        us = shapes.get(path[0], {}).get(path[1], {}).get("us")
        return None if us is None else float(us)
    call = path[1] if kind == "step" else "step"
    for entry in _result(sections, "profile").get("shapes", ()):
        if (entry["shape"], entry["call"]) == (path[0], call):
            return (
                float(entry["busy_us"] + entry["idle_us"])
                if kind == "step"
                else _of_kernels(entry["kernels"], path[1:])
            )
    return None


def _result(sections: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    result: Mapping[str, Any] = sections.get(name, {}).get("result") or {}
    return result


def _of_kernels(kernels: Sequence[Mapping[str, Any]], parts: Sequence[str]) -> float | None:
    taken = [float(kernel["us"]) for kernel in kernels if any(part in kernel["kernel"] for part in parts)]
    return sum(taken) if taken else None


def compared(device_name: str, sections: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Each prediction for this card beside what was measured; cards that nothing was predicted for have only that."""
    card, rows = card_of(device_name), []
    for prediction in PREDICTIONS:
        reviewed, changed = (ranges.get(card or "") for ranges in (prediction.reviewed, prediction.changed))
        got, expected = measured(prediction, sections), changed or reviewed
        rows.append(
            {
                "name": prediction.name,
                "unit": prediction.unit,
                "bound": prediction.bound,
                "floor": prediction.floor.get(card or ""),
                "reviewed": reviewed,
                "changed": changed,
                "measured": got,
                "verdict": _outcome(got, expected, prediction.unit),
            }  # fmt: skip
        )
    return rows


def _outcome(got: float | None, expected: Range | None, unit: str) -> str:
    if got is None or expected is None:
        return "not measured" if got is None else "not predicted"
    low, high = expected[0] * 0.95, expected[1] * 1.05
    if low <= got <= high:
        return "as predicted"
    return "better" if (got < low) != (unit == "GB/s") else "worse"


WIDTH, NAMES, LINE, TOP = 940, 300, 22, 30
# ratios that the chart of the A/B shows; what lies outside is drawn at its edge
LEAST, MOST = 0.6, 1.6
STYLE = """
.band{fill:var(--c2);opacity:.13}.floor{stroke:var(--ink);stroke-width:1.5}.was{fill:var(--c8);opacity:.45}
td.take{color:var(--good,#2e7d4f);font-weight:600}.ok{color:#2e7d4f}.failed{color:var(--mark)}
ul.states{list-style:none;padding:0;display:flex;flex-wrap:wrap;gap:.2rem 1.1rem}
"""
Json = Mapping[str, Any]


def page(report: Json) -> str:
    """The page of a report of gpu_check, as far as it has got; the same bytes for the same report."""
    machine, sections = report["machine"], report["sections"]
    title = f"GPU check: {machine.get('device_name', '')}"
    body = [
        f"<h1>{escape(title)}</h1>",
        soft(_about(report)),
        *_states(sections),
        *_decisions(_result(sections, "ab")),
        *_predictions(str(machine.get("device_name", "")), sections),
        *_tiers(_result(sections, "tiers")),
        *_variants(_result(sections, "ab")),
        *_profile(_result(sections, "profile")),
        *_yardsticks(_result(sections, "yardsticks")),
        *_errors(sections),
    ]
    return document(title, style_sheet() + STYLE, body)


def _about(report: Json) -> str:
    machine, commit = report["machine"], report.get("commit", {})
    versions = ", ".join(f"{name} {version}" for name, version in machine.get("versions", {}).items() if version)
    memory = f", {machine['memory_gib']} GiB" if "memory_gib" in machine else ""
    return f"{versions}{memory}; ran {machine.get('path', '')}; commit {str(commit.get('id', ''))[:12]}"


def _states(sections: Json) -> Iterator[str]:
    items = "".join(
        f'<li><span class="{"ok" if section["status"] == "ok" else "failed"}">{escape(section["status"])}</span>'
        f" {escape(name)} <span class=soft>{section.get('seconds', 0):.0f} s</span></li>"
        for name, section in sections.items()
    )
    yield f'<ul class="states">{items}</ul>'


def _decisions(ab: Json) -> Iterator[str]:
    if "executed" in ab:
        yield "<h2>Variants that were executed without a device</h2>"
        yield soft(f"{len(ab['executed'])} give the default's bits: {', '.join(ab['executed'])}.")
    if "verdicts" not in ab:
        return
    yield "<h2>What to take</h2>"
    yield soft(
        f"{ab['rule']}. The default beside itself is apart by at most {max(ab['noise'].values(), default=0):.1%}."
    )
    for note in ab["notes"]:
        yield soft(note)
    taken = [entry for entry in ab["verdicts"] if entry["verdict"] == "take"]
    yield _table(
        ("call", "variant", "best", "worst", "mean", "shapes"),
        [(entry["call"], entry["variant"], *(f"{entry[key]:.3f}" for key in ("best", "worst", "mean")), entry["shapes"])
         for entry in taken],
    ) if taken else soft("No variant is better than the default by this rule.")  # fmt: skip
    reasons: dict[tuple[str, str, str], list[str]] = {}
    for entry in ab["dropped"]:
        reasons.setdefault((entry["call"], entry["variant"], entry["why"]), []).append(entry["shape"])
    if reasons:
        yield "<h3>Not timed</h3>"
        yield _table(
            ("call", "variant", "why", "shapes"), [(*key, ", ".join(shapes)) for key, shapes in reasons.items()]
        )


def _predictions(device_name: str, sections: Json) -> Iterator[str]:
    rows, card = compared(device_name, sections), card_of(device_name)
    yield "<h2>Prediction beside measurement</h2>"
    if card is None:
        yield soft(
            f"Nothing was predicted for this device; what was measured stands alone. Cards: {', '.join(ASSUMPTIONS)}."
        )
    else:
        yield soft(
            "Assumed: " + ", ".join(f"{name} {value:g}" for name, value in ASSUMPTIONS[card].items())
            + ". Bars are predictions (grey of the kernels as reviewed, coloured as changed since), the upright line"
            " is the floor, the dot what was measured; each row has a scale of its own, which begins at zero."
        )  # fmt: skip
        yield f'<figure><div class="scroll" tabindex="0">{_ranges(rows)}</div></figure>'
    yield _table(
        ("", "floor", "reviewed", "changed", "measured", "unit", "", "bound by"),
        [
            (
                row["name"], _number(row["floor"]), _range(row["reviewed"]), _range(row["changed"]),
                _number(row["measured"]), row["unit"], row["verdict"], row["bound"],
            )
            for row in rows
        ],
    )  # fmt: skip


def _ranges(rows: Sequence[Json]) -> str:
    shapes, y = [], TOP
    for row in rows:
        ranges = [row[key] for key in ("reviewed", "changed") if row[key]]
        values = [*(value for pair in ranges for value in pair), row["floor"] or 0, row["measured"] or 0]
        scale = (WIDTH - NAMES - 90) / max(*values, 1e-9)
        shapes.append(f'<text class="end" x="{NAMES - 12}" y="{y + 13}">{escape(row["name"])}</text>')
        for key, look, lift in (("reviewed", "was", 1), ("changed", "c0", 8)):
            if row[key]:
                low, high = row[key]
                title = f"{row['name']}, {key}: {_range(row[key])} {row['unit']}"
                shapes.append(
                    f'<rect class="{look}" x="{NAMES + low * scale:.1f}" y="{y + lift}" height="8"'
                    f' width="{max((high - low) * scale, 3):.1f}"><title>{escape(title)}</title></rect>'
                )
        if row["floor"]:
            shapes.append(f'<path class="floor" d="M{NAMES + row["floor"] * scale:.1f} {y - 1}v18"/>')
        if row["measured"] is not None:
            at = NAMES + row["measured"] * scale
            title = f"{row['name']}, measured: {_number(row['measured'])} {row['unit']}"
            shapes.append(
                f'<circle class="c1" cx="{at:.1f}" cy="{y + 8}" r="5"><title>{escape(title)}</title></circle>'
                f'<text x="{at + 9:.1f}" y="{y + 13}">{_number(row["measured"])} {row["unit"]}</text>'
            )
        y += LINE
    return svg(WIDTH, y + 6, "Predictions and measurements", shapes)


def _tiers(tiers: Json) -> Iterator[str]:
    if not tiers:
        return
    yield "<h2>Tables larger than the device, beside goals</h2>"
    yield soft(f"{tiers['note']}.") if "note" in tiers else ""
    yield _table(
        ("", "measured", "goal", "unit", "", "hits or rows read"),
        [
            (
                goal["name"], _number(goal["measured"]),
                f"{goal['at']} {_number(goal['goal'])}" if goal["goal"] else "", goal["unit"],
                {True: "met", False: "missed"}.get(goal["met"], goal.get("note", "")),
                f"{goal['hit_rate']:.1%}" if "hit_rate" in goal else _number(goal.get("loads")),
            )
            for goal in tiers["goals"]
        ],
    )  # fmt: skip


def _variants(ab: Json) -> Iterator[str]:
    rows = ab.get("rows", ())
    if not rows:
        return
    yield "<h2>Variants beside the default</h2>"
    cuts = [
        f"{entry['shape']}: {entry['about']}" + f" ({entry['scaled']})" * bool(entry["scaled"])
        for entry in ab["shapes"]
    ]
    yield soft(
        "Time over the default's, medians over rounds; thin lines reach from the tenth to the ninetieth percentile, the"
        f" band is {GAIN:g} to {LOSS:g}. To the left a variant is faster. " + "; ".join(cuts) + "."
    )
    names = list(dict.fromkeys(row["shape"] for row in rows))
    for call in dict.fromkeys(row["call"] for row in rows):
        part = [row for row in rows if row["call"] == call]
        items = "".join(
            f'<li><span class="chip {colour(names, name)}"></span>{escape(name)}</li>'
            for name in dict.fromkeys(row["shape"] for row in part)
        )
        yield f"<h3>{escape(call)}</h3>"
        yield (
            f'<figure><div class="scroll" tabindex="0">{_ratios(part, names)}</div>'
            f'<figcaption><ul class="legend">{items}</ul></figcaption></figure>'
        )
        yield _table_of_ratios(part, ab)


def _ratios(rows: Sequence[Json], names: Sequence[str]) -> str:
    def x(ratio: float) -> float:
        inside = min(max(ratio, LEAST), MOST)
        return NAMES + math.log(inside / LEAST) / math.log(MOST / LEAST) * (WIDTH - NAMES - 30)

    variants = list(dict.fromkeys(row["variant"] for row in rows))
    bottom = TOP + LINE * len(variants)
    shapes = [
        f'<rect class="band" x="{x(GAIN):.1f}" y="{TOP - 6}" width="{x(LOSS) - x(GAIN):.1f}"'
        f' height="{bottom - TOP + 6}"/>',
        *(
            f'<path class="{"bound" if ratio == 1 else "grid"}" d="M{x(ratio):.1f} {TOP - 6}V{bottom}"/>'
            f'<text class="mid" x="{x(ratio):.1f}" y="{TOP - 12}">{ratio:g}x</text>'
            for ratio in (0.6, 0.7, 0.8, 0.9, 1.0, 1.2, 1.4, 1.6)
        ),
    ]
    for place, variant in enumerate(variants):
        y = TOP + LINE * place + 9
        shapes.append(f'<text class="end" x="{NAMES - 12}" y="{y + 4}">{escape(variant)}</text>')
        for row in (row for row in rows if row["variant"] == variant):
            title = f"{variant} on {row['shape']}: {row['ratio']:.3f} ({row['p10']:.3f} to {row['p90']:.3f})"
            shapes.append(
                f'<path class="whisker" d="M{x(row["p10"]):.1f} {y}H{x(row["p90"]):.1f}"/>'
                f'<circle class="b {colour(names, row["shape"])}" cx="{x(row["ratio"]):.1f}" cy="{y}" r="4.5">'
                f"<title>{escape(title)}</title></circle>"
            )
    return svg(WIDTH, bottom + 6, "Ratios of variants to the default", shapes)


def _table_of_ratios(rows: Sequence[Json], ab: Json) -> str:
    shapes = list(dict.fromkeys(row["shape"] for row in rows))
    by_place = {(row["variant"], row["shape"]): row for row in rows}
    decisions = {(entry["call"], entry["variant"]): entry["verdict"] for entry in ab["verdicts"]}
    default = {entry["shape"]: entry["default"].get(rows[0]["call"], {}) for entry in ab["shapes"]}
    lines: list[Sequence[object]] = [
        ("the default", *(f"{default[shape].get('us', math.nan):.4g} us" for shape in shapes), "")
    ]
    for variant in dict.fromkeys(row["variant"] for row in rows):
        cells = [by_place.get((variant, shape)) for shape in shapes]
        texts = [f"{c['ratio']:.3f} ({c['p10']:.3f}-{c['p90']:.3f})" if c else "" for c in cells]
        decision = "noise" if variant == CONTROL else decisions.get((rows[0]["call"], variant), "")
        lines.append((variant, *texts, decision))
    return _table(("variant", *shapes, "verdict"), lines)


def _profile(profile: Json) -> Iterator[str]:
    for row in profile.get("shapes", ()):
        yield f"<h2>{escape(row['shape'])}: a {escape(row['call'])} by kernel</h2>"
        cut = f"; {row['scaled']}" if row["scaled"] else ""
        yield soft(
            f"{row['launches']:g} launches, {row['busy_us']:.4g} us busy, {row['idle_us']:.4g} us idle between them"
            f" (the longest {row['largest_gap_us']:.4g}){cut}."
        )
        share = 100 / max(row["busy_us"], 1e-9)
        yield _table(
            ("kernel", "launches", "us", "% of busy"),
            [(k["kernel"], f"{k['launches']:g}", f"{k['us']:.4g}", f"{k['us'] * share:.1f}") for k in row["kernels"]],
        )
    if kernels := profile.get("kernels"):
        yield "<h2>What the loaded kernels need</h2>"
        names = ("kernel", "registers", "bound", "spills", "shared_bytes", "warps", "programs_resident")
        yield _table(
            (*names, "warps_resident"),
            [
                [("" if kernel[name] is None else kernel[name]) for name in (*names, "warps_resident")]
                for kernel in kernels
            ],
        )


def _yardsticks(yardsticks: Json) -> Iterator[str]:
    if not yardsticks:
        return
    yield "<h2>Yardsticks</h2>"
    lines: list[Sequence[object]] = [
        (name.replace("_", " "), f"{yardsticks[name]['gb_per_s']:.4g}", "GB/s")
        for name in ("copy", "read", "gather", "gather_in_l2")
    ]
    lines += [(f"load that hits {name}", f"{ns:.4g}", "ns") for name, ns in yardsticks["latency_ns"].items()]
    lines += [(f"launch, {name}", _number(us), "us") for name, us in yardsticks["launch_us"].items()]
    yield _table(("", "", ""), lines)


def _errors(sections: Json) -> Iterator[str]:
    failed = {name: section["error"] for name, section in sections.items() if section.get("error")}
    if failed:
        yield "<h2>What failed</h2>"
    for name, error in failed.items():
        yield f"<h3>{escape(name)}</h3><pre>{escape(str(error)[-2000:])}</pre>"


def _table(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in heads)
    body = "".join(
        "<tr>"
        + "".join(f"<td{' class=take' if cell == 'take' else ''}>{escape(str(cell))}</td>" for cell in row)
        + "</tr>"
        for row in rows
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _range(pair: Sequence[float] | None) -> str:
    if pair is None:
        return ""
    return f"{pair[0]:g}" if pair[0] == pair[1] else f"{pair[0]:g} to {pair[1]:g}"


def main() -> None:
    """`python -m shardwise.perf.gpu_scripts.gpu_page FILE.json`: the page of a report beside it."""
    for name in sys.argv[1:]:
        path = Path(name)
        path.with_suffix(".html").write_text(page(json.loads(path.read_text(encoding="utf-8"))), encoding="utf-8")


if __name__ == "__main__":
    main()
