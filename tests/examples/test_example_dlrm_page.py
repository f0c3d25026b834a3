"""The page of a run, as a browser shows it, and the commands under "What to try next", as they are pasted.

Takes half a minute: a run on two ranks, a browser, a server, and processes of the commands.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import time
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from browser import needs_browser, overflows, screenshot
from checkout import ROOT
from ranks import run_ranks
from test_example_dlrm import example, train

from shardwise.sharding.testing.environment import get_free_port

SMALL = ("--epochs", "2", "--steps", "24", "--batch-size", "256", "--dim", "8", "--log-every", "4")


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """What a run on two ranks says, and the folder with its page and checkpoints."""
    folder = tmp_path_factory.mktemp("demo run")
    places = ("--page", str(folder / "demo.html"), "--checkpoint-dir", str(folder / "demo" / "checkpoints"))
    return run_ranks(2, train, *SMALL, *places)[0], folder


def commands(page: str) -> list[str]:
    return [unescape(text) for text in re.findall(r'<pre class="command">([^<]*)</pre>', page)]


@pytest.mark.ranks
def test_the_page_has_the_numbers_of_the_run(shown: tuple[dict[str, Any], Path]) -> None:
    result, folder = shown
    page = (folder / "demo.html").read_text()
    for epoch in result["epochs"]:
        assert f"test AUC: {epoch['test_auc']:.3f}, step {24 * epoch['epoch']}" in page
    best = result["epochs"][result["best_epoch"] - 1]
    assert f"{best['test_auc']:.4f}" in page and f"{best['test_ne']:.4f}" in page
    assert f"a perfect model: {result['ceiling_auc']:.4f}" in page
    # a dot for each line of metrics, and names of all tables in the plan's picture and in their table
    assert len(re.findall(r"<title>loss: 0\.\d+, step ", page)) == 12
    for feature in ("user", "ad", "site", "country", "words", "history"):
        assert f'<th scope="row">{feature}</th>' in page
        assert re.search(rf"<title>rank [01], {feature}: [\d.]+ ms", page)
    # 48 steps of 256 samples of one user each
    assert f'data-of="lookups in training">{48 * 256:,}<' in page


@pytest.mark.ranks
def test_the_page_fetches_nothing_and_runs_nothing(shown: tuple[dict[str, Any], Path]) -> None:
    page = (shown[1] / "demo.html").read_text()
    assert not re.search(r"<script|<link|<img|\bsrc=|@import|url\((?!#)|https?://", page)


@needs_browser
@pytest.mark.ranks
@pytest.mark.parametrize("width", [1280, 390])
def test_nothing_overflows_in_a_browser(shown: tuple[dict[str, Any], Path], tmp_path: Path, width: int) -> None:
    page = (shown[1] / "demo.html").read_text()
    assert overflows(page, width, tmp_path) == []
    picture = screenshot(page, width, 1200, tmp_path)
    assert picture.startswith(b"\x89PNG") and len(picture) > 20_000


@needs_browser
@pytest.mark.parametrize("width", [1280, 390])
def test_what_overflows_is_seen(tmp_path: Path, width: int) -> None:
    wide = '<div class="wide" style="width:1400px">x</div>'
    drawn = '<svg class="lines" viewBox="0 0 100 50" width="100"><text x="90" y="20">far too long</text></svg>'
    start = '<!DOCTYPE html><html><body style="margin:0">'
    assert overflows(f"{start}<p>short</p></body></html>", width, tmp_path) == []
    assert overflows(f"{start}{wide}</body></html>", width, tmp_path) == [
        "the page is 1400 wide", "div.wide reaches to 1400",
    ]  # fmt: skip
    assert overflows(f'{start}<div style="overflow-x:auto">{wide}</div></body></html>', width, tmp_path) == []
    [message] = overflows(f"{start}{drawn}</body></html>", width, tmp_path)
    assert message == 'text. "far too long" reaches out of its picture'


@pytest.mark.full
@pytest.mark.ranks
def test_what_to_try_next_works_as_it_is_pasted(shown: tuple[dict[str, Any], Path]) -> None:
    pytest.importorskip("aiohttp")
    result, folder = shown
    export, serve, ask, _, plan = commands((folder / "demo.html").read_text())
    assert "step-000000000048" in export or result["best_epoch"] == 1
    for command in (export, export, plan):
        done = subprocess.run(shlex.split(command), cwd=ROOT, env=environment(), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    assert "6 tables on 8 ranks" in (folder / "demo_plan.html").read_text()
    port = get_free_port()
    server = subprocess.Popen([*shlex.split(serve), "--port", str(port)], cwd=ROOT, env=environment())
    try:
        answer = asked(ask, port)
    finally:
        server.terminate()
        assert server.wait(60) == 0
    assert [list(prediction) for prediction in answer["predictions"]] == [["logit", "click_probability"]]
    assert 0 < answer["predictions"][0]["click_probability"] < 1


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def asked(curl: str, port: int) -> Any:
    """What the command prints, once the server is up; by urllib, since not every machine has curl."""
    program, address, _, header, _, body = shlex.split(curl)
    assert (program, address) == ("curl", "localhost:8000/predict")
    name, value = header.split(": ")
    from urllib.error import URLError
    from urllib.request import Request, urlopen

    request = Request(f"http://127.0.0.1:{port}/predict", body.encode(), {name: value})
    for _ in range(300):
        try:
            with urlopen(request, timeout=60) as answer:
                return json.load(answer)
        except (URLError, ConnectionError):
            time.sleep(0.2)
    raise AssertionError("the server did not come up in a minute")


def test_resume_repeats_the_command_with_more_epochs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    argv = ["train.py", "--epochs", "5", "--checkpoint-dir", str(tmp_path), "--overwrite", "--data", "a folder"]
    monkeypatch.setattr(sys, "argv", argv)
    args = example("arguments").parse("", argv[1:])
    try_next = example("try_next")
    [step] = [
        next_step for next_step in try_next.next_steps(args, 1, None, {}, None) if next_step.what.startswith("resume")
    ]
    # the interpreter and the script come first
    assert shlex.split(step.command)[2:] == [
        "--checkpoint-dir", str(tmp_path), "--data", "a folder", "--epochs", "8", "--resume",
    ]  # fmt: skip


def test_a_table_s_health_counts_rows_hot_ids_and_norms() -> None:
    import torch

    counts = torch.zeros(200, dtype=torch.int64)
    counts[:4] = torch.tensor([50, 30, 15, 5])
    weight = torch.zeros(200, 2)
    weight[0] = torch.tensor([3.0, 4.0])
    health = example("health").table_health("user", counts, weight, weight * 1.01)
    assert (health.rows, health.dim, health.lookups, health.finite) == (200, 2, 100, True)
    # 4 rows of 200; the hottest 1% are 2 rows
    assert health.trained == pytest.approx(0.02) and health.hot == pytest.approx(0.8)
    assert (health.median_norm, health.largest_norm) == (0.0, 5.0)
    assert health.int8_error == pytest.approx(0.01, rel=1e-3)
    weight[7, 1] = float("nan")
    assert not example("health").table_health("user", counts, weight, weight).finite


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (0.4871, 0.6093), (0.0, 48204.0), (-3.0, 12.0), (0.8, 0.8001)])
def test_axes_have_few_round_marks_around_all_values(low: float, high: float) -> None:
    marks = example("charts").ticks(low, high)
    assert 2 <= len(marks) <= 6
    assert marks[0] <= low + 1e-9 and marks[-1] >= high - 1e-9
    steps = [b - a for a, b in zip(marks, marks[1:], strict=False)]
    assert max(steps) == pytest.approx(min(steps))
    assert float(f"{steps[0]:.1e}") == pytest.approx(steps[0])


def test_a_chart_without_numbers_is_drawn() -> None:
    charts = example("charts")
    axes = charts.Axes("none", str)
    for points in ([], [(1.0, float("nan"))], [(10.0, 0.5)]):
        drawn = charts.draw([charts.Line("x", "loss", points)], axes)
        assert "nan" not in drawn and drawn.count("<circle") == (points == [(10.0, 0.5)])
