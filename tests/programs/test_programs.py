"""Programs of others on the alias, unmodified, end with the losses that TorchRec gave them.

They use the names of facebookresearch/dlrm's and MLPerf training's DLRM, and of TorchRec's golden training, retrieval,
bert4rec and prediction examples and its benchmark of collections, in the same way; `program_cases.py` records what the
real library prints. Takes 80 s: every rank is a process that imports torch and runs a whole program.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from checkout import ROOT, golden
from program_cases import PROGRAMS, make_rows, run_program

RECORDED = golden("programs")
SERVED = [sys.executable, "-m", "shardwise.torchrec"]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with shardwise alone, as an installation has it: beside the checkout's `data` a program's own hides."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "shardwise").symlink_to(ROOT / "shardwise")
    return str(folder)


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_rows(tmp_path_factory.mktemp("rows"))


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where the training of two towers leaves what their retrieval loads."""
    yield tmp_path_factory.mktemp("out")


def numbers(value: Any) -> list[float]:
    return [number for entry in value for number in numbers(entry)] if isinstance(value, list) else [value]


@pytest.mark.ranks
@pytest.mark.parametrize(
    "name", [name if name == "dlrm" else pytest.param(name, marks=pytest.mark.full) for name in PROGRAMS]
)
def test_a_program_on_the_alias_ends_with_torchrecs_losses(name: str, site: str, rows: Path, out: Path) -> None:
    program = PROGRAMS[name]
    losses = run_program(program, SERVED, [site], rows, out)
    recorded = RECORDED["losses"][name]
    assert losses.keys() == recorded.keys()
    for kind in recorded:
        ours, theirs = numbers(losses[kind]), numbers(recorded[kind])
        assert len(ours) == len(theirs) > 0
        scale = max(1.0, *map(abs, theirs))
        assert max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) <= program.tolerance * scale, kind


@pytest.mark.full
def test_adam_in_backward_trains_bert4rec_where_fbgemm_has_none_on_the_cpu(site: str, rows: Path, out: Path) -> None:
    program = PROGRAMS["bert4rec"]
    adam = type(program)(program.script, ["--fused_optimizer", "ADAM", "--num_epochs", "3"])
    losses = run_program(adam, SERVED, [site], rows, out)["losses"]
    for rank in losses:
        # of 4 batches an epoch: the last epoch is better than the first
        assert sum(rank[-4:]) < sum(rank[:4]) - 0.05
