"""Takes the pictures of docs/concepts/planner.md and the README: `python docs/pictures/planner_pictures.py [folder]`.

Needs a Chromium and table sets. Plans 26 tables (MLPerf's DLRM-DCNv2, multi-hot) on 8 ranks and 500 made-up tables on
64, writes their reports and takes the top of each page; of the first also its two charts alone, for the README. The
sizes of the 26 are read from $SHARDWISE_TABLES, or from ../shared/tables beside the repository; $CHROMIUM names the
browser.
"""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from shardwise.planner import Feature, Planned, Table, Topology, plan_tables, read_tables, report

SETS = Path(os.environ.get("SHARDWISE_TABLES", Path(__file__).parents[3] / "shared" / "tables"))
CHROMIUM = os.environ.get("CHROMIUM", "chromium")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip
GIB = 1024**3
# pixels of the pictures
WIDTH = 1100


def few_tables() -> Planned:
    """26 tables on 8 ranks of 80 GiB, 15 % of it kept free."""
    read = read_tables(SETS / "mlperf_dlrm_dcnv2_multihot.json")
    tables = [replace(table, optimizer="RowWiseAdagrad") for table in read]
    topology = Topology(8, "cuda", int(0.85 * 80 * GIB))
    return plan_tables(tables, topology, 8192, settings={"reservation": "15 % of 80 GiB"})


def many_tables(count: int = 500) -> Planned:
    """Tables of ten thousand to a hundred million rows, one id to a hundred a sample, on 8 hosts of 8 ranks."""
    draw = random.Random(0)
    tables = []
    for n in range(count):
        ids = draw.choice([1, 1, 1, 1, 5, 10, 20, 50, 100])
        rows, dim = int(10 ** draw.triangular(4, 8, 5.5)), draw.choice([32, 64, 64, 128, 128, 256])
        tables.append(Table(f"table_{n}", rows, dim, features=(Feature(f"f_{n}", float(ids)),), optimizer="Adam"))
    topology = Topology(64, "cuda", int(0.85 * 80 * GIB), local_world_size=8)
    return plan_tables(tables, topology, 2048, settings={"reservation": "15 % of 80 GiB"})


def take(page: str, picture: Path, height: int) -> None:
    """A picture of the top of a page, the second of its tables opened."""
    page = re.sub(r"(<details><summary>.*?)<details>", r"\1<details open>", page, count=1, flags=re.DOTALL)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "report.html"
        file.write_text(page, encoding="utf-8")
        asked = [f"--user-data-dir={folder}/browser", f"--screenshot={picture}", f"--window-size={WIDTH},{height}"]
        subprocess.run([CHROMIUM, *FLAGS, *asked, file.as_uri()], check=True, capture_output=True)


def write(folder: Path) -> None:
    """All pictures."""
    pictures = (("26", few_tables(), 2130), ("500", many_tables(), 1500), ("top", few_tables(), 1065))
    for name, planned, height in pictures:
        take(report(planned), (folder / f"planner_report_{name}.png").resolve(), height)


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
