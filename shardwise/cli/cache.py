"""`shardwise cache`: record which rows a loader's batches want, and simulate caches over such traces."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .cache_runs import (
    Asked,
    batches_of,
    estimate,
    guarded,
    placed_by,
    rest_of,
    simulate_trace,
    slots_from,
    traced_tables,
    writable_trace,
)
from .output import (
    Finite,
    json_option,
    load_torch,
    one_line,
    print_json,
    print_table,
    require_writable,
    show,
    spinner,
    table_of,
    warning_lines,
)
from .plan_request import MOST_RANKS, MOST_SAMPLES, optimizer, tables_of, unusable

if TYPE_CHECKING:
    from ..data import LookedUp, Trace
    from ..planner.plan.planned import Planned
    from ..planner.reports.caches import CacheReport


def add_cache(commands: click.Group) -> None:
    """Give a group of commands the group `cache`."""
    file = click.Path(exists=True, dir_okay=False, path_type=Path)
    target = click.Path(dir_okay=False, writable=True, path_type=Path)
    ranks, samples = click.IntRange(1, MOST_RANKS), click.IntRange(1, MOST_SAMPLES)
    only = click.option("--table", "only", multiple=True, metavar="TABLE", help="This one alone; may repeat.")

    @commands.group()
    def cache() -> None:
        """Record which rows a loader's batches want, and simulate caches of tables larger than the device.

        Examples:
          shardwise cache record t.npz --loader data.py:batches ...
          shardwise cache simulate t.npz --slots 10% --ahead 32
          shardwise cache simulate t.npz --plan p.json --html a.html
          shardwise cache simulate --tables tables.json --slots 5%
        """

    @cache.command()
    @click.argument("path", metavar="TRACE", type=target)
    @click.option(
        "--loader",
        required=True,
        metavar="MODULE:FUNCTION",
        help="A function that gives batches; FILE.py:FUNCTION too.",
    )
    @click.option(
        "--model", metavar="MODULE:FACTORY", help="A function that makes the model whose tables they are for."
    )
    @click.option("--plan", "plan_path", type=file, help="Or the plan of them, as `plan --out` writes it.")
    @click.option("--tables", type=file, help="Or a file of them, as `plan` reads it.")
    @click.option("--optimizer", help="Of tables that do not say theirs, for the bytes of a row; 'none'.")
    @click.option("--merge", type=ranks, default=1, help="Batches that make up a step: the ranks.", show_default=True)
    @click.option("--most", type=click.IntRange(1), help="Steps at most.")
    @only
    @json_option
    def record(
        path: Path,
        loader: str,
        model: str | None,
        plan_path: Path | None,
        tables: Path | None,
        optimizer: str | None,
        merge: int,
        most: int | None,
        only: tuple[str, ...],
        as_json: bool,
    ) -> None:
        """Write which rows of each table every batch of a loader wants into the file TRACE, .npz or .parquet.

        The function gives anything that can be iterated: KeyedJaggedTensors, or batches that have one. It is called
        with nothing. A row takes about two bytes; batches are not kept.
        """
        load_torch()
        with one_line(*unusable(), ImportError), warning_lines(), spinner("reading tables") as update:
            writable_trace(path)
            require_writable(path)
            looked_up = _tables(model, plan_path, tables, optimizer, only)
            from ..data import record_trace

            update(f"making the batches of {loader}")
            batches = guarded(batches_of(loader), loader, lambda count: update(f"{count:,} batches"))
            trace = record_trace(batches, looked_up, path, merge=merge, most=most)
        _give_trace(trace, as_json)

    @cache.command()
    @click.argument("path", metavar="[TRACE]", type=file, required=False)
    @click.option("--plan", "plan_path", type=file, help="Simulate its shards, with its tiers, and times of its steps.")
    @click.option("--tables", type=file, help="Without a trace: estimate the caches of these, as `plan` reads them.")
    @click.option("--batch-size", type=samples, help="Of a step, all ranks, without a trace.  [default: 512]")
    @click.option(
        "--slots", multiple=True, metavar="[TABLE=]N|SHARE", help="Rows on the device: 20000, 10%; of one, item=5%."
    )
    @click.option("--ahead", type=click.IntRange(0), default=0, help="Batches known ahead.", show_default=True)
    @click.option("--prefetch", type=click.IntRange(0), default=1, help="Batches fetched ahead.", show_default=True)
    @click.option("--policy", type=click.Choice(["aged_lfu", "lru", "lfu"]), help="What goes first.")
    @click.option("--half-life", type=click.IntRange(1), help="Of aged_lfu, in batches.")
    @click.option("--skip", type=click.IntRange(0), default=0, help="Batches that only fill caches.", show_default=True)
    @click.option("--link-gb-s", type=Finite(0.001), help="Of the link to the host, each way.  [default: 32]")
    @click.option("--disk-gb-s", type=Finite(0.001), default=3.0, help="Of the disk.", show_default=True)
    @click.option("--miss-ns", type=Finite(0), default=0.0, help="A missing row beside its bytes.", show_default=True)
    @click.option(
        "--batch-us", type=Finite(0), default=0.0, help="A batch of a table beside its rows.", show_default=True
    )
    @click.option("--no-curves", is_flag=True, help="Leave out curves, Belady and regret.")
    @click.option("--html", type=target, help="Write a report that a browser shows.")
    @only
    @json_option
    def simulate(
        path: Path | None,
        plan_path: Path | None,
        tables: Path | None,
        batch_size: int | None,
        slots: tuple[str, ...],
        link_gb_s: float | None,
        disk_gb_s: float,
        miss_ns: float,
        batch_us: float,
        no_curves: bool,
        html: Path | None,
        as_json: bool,
        **how: Any,
    ) -> None:
        """Simulate caches over the file TRACE: hits, misses, saves, stalls and times by table and rank.

        The decisions are those of the caches that run, to the last row. Beside them stand LRU at all sizes and
        Belady's rule, which no cache beats: regret is how many more hits it had. Without a trace, --tables gives an
        estimate from how ids are drawn (skew), Che's approximation of LRU.
        """
        if (path is None) == (tables is None):
            raise click.UsageError("give a TRACE, or without one --tables FILE for an estimate")
        if html is not None:
            require_writable(html)
        load_torch()
        with one_line(*unusable(), ImportError), warning_lines(), spinner("reading") as update:
            from ..planner.cost.cache import Links

            asked = Asked(slots=slots_from(slots), curves=not no_curves, **how)
            planned, placed = _plan(plan_path)
            # bytes per millisecond are a millionth of GB/s
            link = link_gb_s or (32.0 if planned is None else planned.topology.hbm_to_ddr_mem_bw / 1e6)
            links = Links(link_gb_s=link, disk_gb_s=disk_gb_s, miss_ns=miss_ns, batch_us=batch_us)
            if path is None:
                assert tables is not None
                report = _estimate(tables, batch_size or 512, asked, links)
            else:
                from ..data import Trace

                report = simulate_trace(
                    Trace(path), asked, links=links, placed=placed, rest_ms=rest_of(planned),
                    settings=_settings(path, plan_path, asked, links),
                    tell=lambda done, of: update(f"{done:,} of {of:,} batches"),
                )  # fmt: skip
            if html is not None:
                from ..planner.reports.caches import cache_page

                html.write_text(cache_page(report), encoding="utf-8")
        if as_json:
            print_json(report.as_dict())
        else:
            _print(report)


def _tables(
    model: str | None, plan_path: Path | None, tables: Path | None, rule: str | None, only: tuple[str, ...]
) -> list[LookedUp]:
    if sum(source is not None for source in (model, plan_path, tables)) != 1:
        raise click.UsageError("say which tables: one of --model, --plan and --tables")
    from dataclasses import replace

    from ..planner.plan.files import read_tables
    from ..planner.plan.plan_files import load_planned

    chosen = None if rule is None else optimizer(rule) or ""
    if model is not None:
        found = list(tables_of(model, "cpu", {}, chosen).tables)
    else:
        found = [*load_planned(plan_path).tables] if plan_path is not None else read_tables(tables or "")
        if chosen is not None:
            found = [table if table.optimizer else replace(table, optimizer=chosen or None) for table in found]
    return traced_tables(found, only)


def _plan(path: Path | None) -> tuple[Planned | None, Any]:
    if path is None:
        return None, None
    from ..planner.plan.plan_files import is_whole, planned_from_json, read_plan

    data = read_plan(path)
    return planned_from_json(data, str(path)) if is_whole(data) else None, placed_by(data, str(path))


def _estimate(path: Path, batch_size: int, asked: Asked, links: Any) -> CacheReport:
    from ..planner.plan.files import read_tables

    tables = read_tables(path)
    settings = {
        "tables": str(path),
        "estimate": "Che's approximation of LRU, of ids drawn independently by each table's skew: no trace was read",
        "batch": f"{batch_size:,} samples",
        "link": f"{links.link_gb_s:.4g} GB/s each way",
    }
    return estimate(tables, {table.name: table.ids(batch_size) for table in tables}, asked, links, settings)


def _settings(path: Path, plan_path: Path | None, asked: Asked, links: Any) -> dict[str, str]:
    settings = {"trace": str(path)} | ({} if plan_path is None else {"plan": str(plan_path)})
    return settings | {
        "policy": asked.policy or "the plan's, or aged_lfu",
        "ahead": f"{asked.ahead} batches known before they come",
        "prefetch": f"{asked.prefetch} batches fetched ahead",
        "link": f"{links.link_gb_s:.4g} GB/s each way",
        "disk": f"{links.disk_gb_s:.4g} GB/s",
    }


def _give_trace(trace: Trace, as_json: bool) -> None:
    size = trace.path.stat().st_size
    if as_json:
        print_json(
            {
                "path": str(trace.path), "batches": trace.batches, "bytes": size,
                "tables": [
                    {"name": table.name, "rows": table.rows, "dim": table.dim, "record_bytes": table.record_bytes,
                     "wanted": wanted}
                    for table, wanted in zip(trace.tables, trace.rows, strict=True)
                ],
            }
        )  # fmt: skip
        return
    printed = table_of("table", right=("rows", "wanted a step", "record, bytes"))
    for table, wanted in zip(trace.tables, trace.rows, strict=True):
        mean = wanted / max(1, trace.batches)
        printed.add_row(table.name, f"{table.rows:,}", f"{mean:,.1f}", f"{table.record_bytes:,}")
    print_table(printed)
    rows = max(1, sum(trace.rows))
    show(f"{trace.path}: {trace.batches:,} steps, {size:,} bytes, {size / rows:.2f} a row")


def _print(report: CacheReport) -> None:
    from ..planner.plan.explanation import ms, size
    from ..planner.reports.caches import percent

    columns = ("rows", "slots", "hits", "misses", "saves", "stalls", "moved", "ms", "LRU", "Belady", "regret")
    table = table_of("table", "ranks", right=columns)
    for run in report.runs:
        best, lru = (None if hits is None else hits / max(1, run.wanted) for hits in (run.best_hits, run.lru_hits))
        table.add_row(
            run.name, ", ".join(map(str, run.ranks)), f"{run.end - run.begin:,}", f"{run.slots:,}",
            percent(run.hit_rate), f"{run.misses:,}", f"{run.saves:,}", f"{run.stalls:,}", size(run.bytes_moved),
            ms(run.prefetch_ms[0]), percent(lru), percent(best), percent(run.regret),
        )  # fmt: skip
    print_table(table, drop=("LRU", "moved", "stalls", "saves", "rows", "ranks"))
    if any(rank.step_ms is not None for rank in report.ranks):
        times = table_of("rank", right=("rest, ms", "prefetch, ms", "step, ms", "late batches"))
        for rank in report.ranks:
            cells = (ms(v) if v is not None else "" for v in (rank.rest_ms, rank.prefetch_ms, rank.step_ms))
            times.add_row(str(rank.rank), *cells, f"{rank.late:,}")
        click.echo()
        print_table(times)
    click.echo()
    if "estimate" in report.settings:
        show(report.settings["estimate"])
    else:
        show(f"{report.batches:,} batches counted, after {report.skipped:,}; ms a step to bring rows; {_said(report)}")


def _said(report: CacheReport) -> str:
    grown = [run.name for run in report.runs if run.grown]
    more = f"; slots of {', '.join(grown[:6])} grew, as a batch needed more" if grown else ""
    return f"{report.settings.get('ahead', '')}, {report.settings.get('link', '')}{more}"
