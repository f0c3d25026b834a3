"""The way of an id and of a gradient in docs/concepts/engine.md is that of a lookup and an update, and stays short."""

from __future__ import annotations

import re
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardwise.kernels import numba_loops
from shardwise.kernels._op import INTERPRETED
from shardwise.perf.counts.calls import of_folder, python_calls
from shardwise.perf.counts.counted_ranks import B, D, T, batch_of, model_of
from shardwise.perf.suite.ranks import on_ranks

ROOT = Path(__file__).resolve().parents[2]
# a function of the table as it is called, in a file of sharding/
Hop = tuple[str, str]
# functions of sharding/ from the model's forward to the kernel, and from its backward to the rows
MOST_FORWARD, MOST_BACKWARD = 20, 12
# Python calls of a forward: the engine's own and all; of a backward no more than before the engine was redesigned
MOST_CALLS = {"forward": (120, 220), "backward": (94, 129)}


def read_page(title: str) -> list[Hop]:
    """The functions of a table, in order, with their files."""
    page = (ROOT / "docs/concepts/engine.md").read_text()
    table = page.split(f"## {title}")[1].split("\n## ")[0]
    hops: list[Hop] = []
    for _, functions, files, _ in re.findall(r"^\| (\d+) \| (.*?) \| (.*?) \| (.*?) \|$", table, re.MULTILINE):
        names, paths = re.findall(r"`(.*?)`", functions), files.split(", ")
        # where there are several files, the last function is of the last one
        hops += [(name, paths[0] if name != names[-1] else paths[-1]) for name in names]
    return hops


class Walk:
    """The named functions of sharding/ in the order in which they are first called, and when the kernel is reached."""

    def __init__(self) -> None:
        self.hops: list[Hop] = []
        self.to_kernel: int | None = None

    def seen(self, frame: Any, event: str, _: object) -> None:
        code = frame.f_code
        name, path = code.co_qualname if hasattr(code, "co_qualname") else code.co_name, Path(code.co_filename)
        if event != "call" or not path.resolve().is_relative_to(ROOT):
            return
        inside = path.resolve().relative_to(ROOT)
        if inside.parts[0] == "kernels" and name in ("pooled_lookup", "fused_update") and self.to_kernel is None:
            self.to_kernel = len(self.hops)
        named = not re.search(r"<|__", name) and not is_property(frame, name)
        hop = name, "/".join(inside.parts[1:])
        if inside.parts[0] == "sharding" and named and hop not in self.hops:
            self.hops.append(hop)


def is_property(frame: Any, name: str) -> bool:
    """Whether a method is read as an attribute."""
    owner, attribute = frame.f_locals.get("self"), name.rpartition(".")[2]
    return isinstance(getattr(type(owner), attribute, None), property)


def walked() -> dict[str, Any]:
    """The walks of a forward and a backward that are warm, and their Python calls: own and all."""
    torch.set_num_threads(1)
    device = torch.device("cpu")
    model, grad = model_of("table-wise", device, nn.Sequential), torch.full((B, T * D), 0.1)
    for turn in range(3):
        model(batch_of(turn, device)).values().backward(grad)
    measured: dict[str, Any] = {}
    batch, output = batch_of(3, device), list[Any]()
    steps = {
        "forward": lambda: output.append(model(batch).values()),
        "backward": lambda: output.pop().backward(grad),
    }
    for what, run in steps.items():
        walk = Walk()
        sys.setprofile(walk.seen)
        try:
            run()
        finally:
            sys.setprofile(None)
        measured[what] = walk.hops, walk.to_kernel
    # now and then one looks through what earlier collectives were lent: the fewest of three turns
    for turn in range(4, 7):
        batch = batch_of(turn, device)
        for what, run in steps.items():
            calls = python_calls(run)
            del calls[
                next(function for function in calls if function.name.endswith("<lambda>") and function.file == __file__)
            ]
            own = sum(of_folder(calls, str(ROOT / folder)).total() for folder in ("sharding", "shardwise"))
            own += sum(of_folder(calls, str(ROOT / folder)).total() for folder in ("kernels", "embeddings", "jagged"))
            measured[f"{what} calls"] = min(measured.get(f"{what} calls", (own, calls.total())), (own, calls.total()))
    return measured


@cache
def of_ranks() -> dict[str, Any]:
    """Those of rank 0 of two processes in which nothing of the tests runs: poisoned memory would be more calls."""
    return on_ranks(2, walked, threads=1)  # type: ignore[no-any-return]


pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(sys.version_info < (3, 11), reason="functions know their classes from Python 3.11 on"),
    pytest.mark.skipif(
        INTERPRETED or not numba_loops.compiles(), reason="calls are counted on the path of the CPU with numba"
    ),
]


@pytest.mark.parametrize(
    ("title", "what", "most"),
    [("The way of an id", "forward", MOST_FORWARD), ("The way of a gradient", "backward", MOST_BACKWARD)],
)
def test_the_hops_of_the_page_are_those_of_the_code_and_few(title: str, what: str, most: int) -> None:
    page = read_page(title)
    hops, to_kernel = of_ranks()[what]
    assert hops == page
    assert to_kernel is not None and to_kernel <= most


@pytest.mark.parametrize("what", MOST_CALLS)
def test_python_calls_of_a_step_stay_few(what: str) -> None:
    own, all_calls = of_ranks()[f"{what} calls"]
    assert 30 < own <= MOST_CALLS[what][0]
    assert own < all_calls <= MOST_CALLS[what][1]


def test_every_file_and_hop_of_the_page_is_there() -> None:
    page = (ROOT / "docs/concepts/engine.md").read_text()
    for path in re.findall(r"\]\((\.\./.*?)\)", page):
        assert (ROOT / "docs/concepts" / path).is_file(), path
    assert len(read_page("The way of an id")) + len(read_page("The way of a gradient")) > 40
