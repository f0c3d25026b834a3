"""How much of a slow exchange a pipeline hides: steps of a plain and a pipelined loop, in turn, over two gloo ranks.

What every rank sends in headers and ids is
held back until 20 ms after it left, as on a slow network; rows and gradients travel as ever. Hidden is the part of the
time that the delay costs a plain loop which it does not cost the pipelined one. `--write` keeps the numbers in
perf/results/cpu/pipeline_overlap.json and draws docs/pictures/pipeline_overlap.svg. Less than 70 % are not
as it has to be.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from datetime import date
from itertools import cycle
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise import (
    DistributedModelParallel,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    KeyedJaggedTensor,
    ShardingPlan,
    TrainPipelineSparseDist,
    apply_optimizer_in_backward,
    construct_module_sharding_plan,
)
from shardwise._version import __version__
from shardwise.data import Batch
from shardwise.perf.evidence.report import ROOT, Report
from shardwise.perf.suite.options import Options
from shardwise.perf.suite.ranks import of_ranks, on_ranks
from shardwise.perf.suite.timing import spread
from shardwise.sharding import row_wise
from shardwise.sharding.comms.exchange import Exchange, Pending

RESULT, PICTURE = ROOT / "perf/results/cpu/pipeline_overlap.json", ROOT / "docs/pictures/pipeline_overlap.svg"
RANKS, DELAY_S, BOUND = 2, 0.02, 0.7
# tables of R rows and D columns; B samples a rank with L ids a table; dense layers of W units
T, R, D, B, L, WIDTH, LAYERS = 4, 10_000, 16, 256, 4, 1024, 3
# of each turn the first steps are left out: what left in the turn before has had time enough
STEPS, SKIPPED = 8, 3
LOOPS = ("no delay", "plain", "pipelined")


class Net(nn.Module):
    """Tables beside dense layers that take longer than the delay, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tables = EmbeddingBagCollection([EmbeddingBagConfig(R, D, f"t{n}") for n in range(T)])
        apply_optimizer_in_backward(torch.optim.SGD, self.tables.parameters(), {"lr": 0.01})
        sizes = [T * D, *[WIDTH] * LAYERS]
        layers = [layer for a, b in zip(sizes, sizes[1:], strict=False) for layer in (nn.Linear(a, b), nn.ReLU())]
        self.over = nn.Sequential(*layers, nn.Linear(WIDTH, 1))

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The mean of squares, and what is squared."""
        output: Tensor = self.over(self.tables(batch.sparse_features).values())
        return output.square().mean(), output


class Slow:
    """Holds headers and ids back for `seconds` after they left."""

    seconds = 0.0

    def __init__(self) -> None:
        for name in ("headers", "ids"):
            setattr(Exchange, name, self._late(getattr(Exchange, name)))

    def _late(self, launch: Callable[..., Pending]) -> Callable[..., Pending]:
        def launched(*args: Any) -> Pending:
            pending, due = launch(*args), time.perf_counter() + self.seconds
            wait = pending.wait

            def waited() -> Tensor:
                time.sleep(max(0.0, due - time.perf_counter()))
                return wait()

            pending.wait = waited  # type: ignore[method-assign]
            return pending

        return launched


def batches(rank: int) -> Iterator[Batch]:
    """A few batches, over and over."""
    generator = torch.Generator().manual_seed(rank)
    made = []
    for _ in range(5):
        lengths, ids = torch.full((T * B,), L), torch.randint(0, R, (T * B * L,), generator=generator)
        features = KeyedJaggedTensor([f"t{n}" for n in range(T)], ids, None, lengths)
        made.append(Batch(torch.zeros(B, 1), features, torch.zeros(B)))
    return cycle(made)


def loop(kind: str, rank: int) -> Callable[[], object]:
    """A step of a loop with a model of its own."""
    module = Net()
    cut = {f"t{n}": row_wise() for n in range(T)}
    plan = construct_module_sharding_plan(module.tables, cut, None, RANKS, RANKS, "cpu")
    model = DistributedModelParallel(module, device="cpu", plan=ShardingPlan({"tables": plan}))
    optimizer = torch.optim.SGD(module.over.parameters(), lr=0.01)
    given = batches(rank)
    if kind == "pipelined":
        pipeline: TrainPipelineSparseDist[Batch, Tensor] = TrainPipelineSparseDist(
            model, optimizer, torch.device("cpu")
        )
        return lambda: pipeline.progress(given)

    def step() -> None:
        optimizer.zero_grad()
        losses, _ = model(next(given))
        losses.backward()
        optimizer.step()

    return step


def measured(turns: int) -> dict[str, list[list[float]]]:
    """What all ranks do together, the loops in turn: times of the slowest rank, by loop and turn."""
    slow, steps = Slow(), {kind: loop(kind, dist.get_rank()) for kind in LOOPS}
    times: dict[str, list[list[float]]] = {kind: [] for kind in LOOPS}
    for turn in range(turns + 1):
        for kind in LOOPS:
            slow.seconds = 0.0 if kind == "no delay" else DELAY_S
            dist.barrier()
            taken = []
            for _ in range(STEPS):
                begin = time.perf_counter()
                steps[kind]()
                taken.append(1e3 * (time.perf_counter() - begin))
            # the first turn warms up
            if turn:
                times[kind].append(taken[SKIPPED:])
    gathered = of_ranks(times)
    return {
        kind: [[max(both) for both in zip(*of_turn, strict=True)]
               for of_turn in zip(*(of_rank[kind] for of_rank in gathered), strict=True)]
        for kind in LOOPS
    }  # fmt: skip


def summary(times: dict[str, list[list[float]]]) -> dict[str, Any]:
    """Milliseconds of a step of each loop, and the hidden share: of all steps, and its quartiles over turns."""
    ms = {kind: spread([t for turn in of_turns for t in turn]) for kind, of_turns in times.items()}
    by_turn = [hidden(*(statistics.median(times[kind][turn]) for kind in LOOPS)) for turn in range(len(times["plain"]))]
    return {
        "versions": (
            f"shardwise {__version__}, torch {torch.__version__}, Python {platform.python_version()},"
            f" {os.cpu_count()} CPUs, load {os.getloadavg()[1]:.1f}, {date.today()}"
        ),
        "shape": {"ranks": RANKS, "T": T, "R": R, "D": D, "B": B, "L": L, "width": WIDTH, "layers": LAYERS},
        "delay_ms": 1e3 * DELAY_S,
        "turns": len(by_turn),
        "ms": ms,
        "hidden": round(hidden(*(ms[kind]["median"] for kind in LOOPS)), 3),
        "hidden_quartiles": [round(value, 3) for value in statistics.quantiles(by_turn, n=4)],
    }


def hidden(without: float, plain: float, pipelined: float) -> float:
    """The part of what the delay costs the plain loop that it does not cost the pipelined one."""
    return (plain - pipelined) / (plain - without)


def picture(result: dict[str, Any]) -> str:
    """Bars of the median steps, as SVG."""
    left, top, height, longest = 96, 44, 26, 300
    most = max(result["ms"][kind]["p90"] for kind in LOOPS)
    shapes = []
    for number, (kind, colour) in enumerate(zip(LOOPS, ("#d3f0d0", "#ffe0b3", "#cfe2ff"), strict=True)):
        ms, y = result["ms"][kind], top + number * (height + 12)
        ends = {name: left + longest * ms[name] / most for name in ms}
        middle = y + height / 2
        shapes += [
            f'<text x="{left - 8}" y="{middle + 4:g}" text-anchor="end">{kind}</text>',
            f'<rect x="{left}" y="{y}" width="{ends["median"] - left:.1f}" height="{height}" fill="{colour}"/>',
            f'<path d="M{ends["p10"]:.1f} {middle:g}H{ends["p90"]:.1f}"/>',
            f'<text x="{ends["p90"] + 8:.1f}" y="{middle + 4:g}">{ms["median"]:.0f} ms</text>',
        ]
    width, full = left + longest + 80, top + len(LOOPS) * (height + 12) + 8
    delay, share = f"{result['delay_ms']:.0f} ms", f"{100 * result['hidden']:.0f} %"
    title = f"A step with headers and ids {delay} late each: {share} hidden"
    style = "text{font:13px ui-monospace,Menlo,Consolas,monospace;fill:#1f2328}rect{stroke:#59636e}path{stroke:#1f2328}"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {full}" width="{width}" role="img">',
            f"<title>{title}</title><style>{style}</style>",
            f'<rect width="{width}" height="{full}" rx="8" style="fill:#fff;stroke:#d1d9e0"/>',
            f'<text x="16" y="24" font-weight="bold">{title}</text>',
            *shapes,
            "</svg>\n",
        ]
    )


OPTIONS: Options = {
    "--turns": {"type": int, "default": 12},
}


def run(options: argparse.Namespace) -> Report:
    """Measure, print, and keep what was measured if asked to."""
    result = summary(on_ranks(RANKS, measured, options.turns))
    text = json.dumps(result, indent=1) + "\n"
    if options.write:
        RESULT.write_text(text)
        PICTURE.write_text(picture(result))
    return Report(text, result["hidden"] >= BOUND)
