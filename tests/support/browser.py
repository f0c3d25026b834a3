"""Pages as a real browser lays them out: headless Chromium or Chrome, whichever is there."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Sequence
from html import escape, unescape
from pathlib import Path

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
BROWSER = next(filter(None, map(shutil.which, NAMES)), None)
needs_browser = pytest.mark.skipif(BROWSER is None, reason=f"no browser: none of {', '.join(NAMES)} is on PATH")

QUIET = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-dev-shm-usage",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars",
)  # fmt: skip

# what reaches past the sides of the page, or of the picture that it is in. What lies in a box that scrolls by itself
# does not: its own box is looked at. All details are opened first
MEASURE = """<script>addEventListener("load", () => {
  document.querySelectorAll("details").forEach(one => one.open = true)
  const found = [], wide = innerWidth, name = one => one.tagName.toLowerCase() + "." + (one.getAttribute("class") || "")
  const whole = document.documentElement.scrollWidth
  if (whole > wide) found.push(`the page is ${whole} wide`)
  for (const one of document.body.querySelectorAll("*")) {
    const box = one.getBoundingClientRect(), picture = one.parentElement.closest("svg")
    if (!box.width) continue
    if (picture) {
      const around = picture.getBoundingClientRect()
      if (one.tagName == "text" && (box.left < around.left - 1 || box.right > around.right + 1))
        found.push(`${name(one)} "${one.textContent}" reaches out of its picture`)
      continue
    }
    let scrolls = false
    for (let up = one.parentElement; up && up != document.body; up = up.parentElement)
      scrolls ||= getComputedStyle(up).overflowX != "visible"
    if (!scrolls && (box.right > wide + 1 || box.left < -1)) found.push(`${name(one)} reaches to ${box.right}`)
  }
  parent.document.body.dataset.found = JSON.stringify({wide, found, high: document.documentElement.scrollHeight})
})</script>"""


def overflows(page: str, width: int, folder: Path) -> list[str]:
    """What does not fit into a window of so many pixels; a copy of the page is measured."""
    measured = _shown(page.replace("</body>", f"{MEASURE}</body>"), width, 900, folder)
    dom = _run(measured, width, 900, folder, "--dump-dom").stdout
    [text] = re.findall(r'data-found="([^"]*)"', dom)
    found = json.loads(unescape(text))
    assert found["wide"] == width
    return list(found["found"])


def screenshot(page: str, width: int, height: int, folder: Path) -> bytes:
    """A PNG of the page in a window of this size."""
    picture = folder / f"page_{width}.png"
    _run(_shown(page, width, height, folder), width, height, folder, f"--screenshot={picture}")
    return picture.read_bytes()


def _shown(page: str, width: int, height: int, folder: Path) -> Path:
    """A page with the other in a frame of the width: windows are not narrower than 500 pixels, frames are."""
    path = folder / f"frame_{width}.html"
    frame = f'<iframe style="width:{width}px;height:{height}px;border:0" srcdoc="{escape(page)}"></iframe>'
    path.write_text(f'<!DOCTYPE html><body style="margin:0">{frame}</body>', encoding="utf-8")
    return path


def _run(page: Path, width: int, height: int, folder: Path, *what: str) -> subprocess.CompletedProcess[str]:
    assert BROWSER is not None
    command: Sequence[str] = [
        BROWSER, *QUIET, f"--user-data-dir={folder / 'profile'}", f"--window-size={max(width, 500)},{height}", *what,
        page.as_uri(),
    ]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
