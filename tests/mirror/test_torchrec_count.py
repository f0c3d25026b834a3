"""How many of the names that TorchRec's programs import lead to something here, by level."""

from __future__ import annotations

import re
from collections import Counter
from importlib import import_module
from pathlib import Path

import pytest
from checkout import SHARED

from shardwise.migration.mirror import MODULES
from shardwise.torchrec import TABLE

LISTED = Path(__file__).with_name("torchrec_names.txt")
# the list that ours was made of, where a checkout has it beside it
REFERENCE = SHARED / "reference" / "torchrec_names.md"
AREAS = ("sparse", "modules", "distributed", "optim", "quant", "inference", "fx", "streamable", "types", "")
# names of these areas that are there, of core and of common ones
COMMITTED = {1: 152, 2: 61}


def listed() -> list[tuple[int, str, str]]:
    """Level, module and name; the name is empty where the module itself is imported."""
    lines = [line.split() for line in LISTED.read_text().splitlines() if not line.startswith("#")]
    return [(int(level), path, *rest, *([] if rest else [""]))[:3] for level, path, *rest in lines]  # type: ignore[misc]


def area(path: str) -> str:
    return f"{path}.".split(".")[1]


def leads_somewhere(path: str, name: str) -> bool:
    if not name:
        return path in MODULES
    if name not in TABLE.get(path, {}):
        return False
    getattr(import_module(path.replace("torchrec", "shardwise.torchrec", 1)), name)
    return True


def test_core_and_common_names_lead_somewhere(capsys: pytest.CaptureFixture[str]) -> None:
    have: Counter[int] = Counter()
    total: Counter[int] = Counter()
    lacking: set[str] = set()
    for level, path, name in listed():
        if area(path) in AREAS:
            total[level] += 1
            if leads_somewhere(path, name):
                have[level] += 1
            else:
                lacking.add(f"{path}.{name}")
    with capsys.disabled():
        print(f"\nnames of TorchRec: core {have[1]} of {total[1]}, common {have[2]} of {total[2]}")
    assert not lacking
    assert {level: have[level] for level in COMMITTED} == COMMITTED


def test_names_of_models_and_data_lead_somewhere() -> None:
    others = [(path, name) for _, path, name in listed() if area(path) in ("models", "datasets")]
    assert others and all(leads_somewhere(path, name) for path, name in others)


@pytest.mark.skipif(not REFERENCE.is_file(), reason="the list of TorchRec's names is not here")
def test_the_committed_list_is_the_reference() -> None:
    wanted = []
    for path, names in re.findall(r"^- `([\w.]+)`: (.*)$", REFERENCE.read_text(), re.M):
        for name, level in re.findall(r"(\(?\w+\)?) \((\d)\)", names):
            if int(level) <= 2:
                wanted.append((int(level), path, "" if name == "(module)" else name))
    assert listed() == wanted
