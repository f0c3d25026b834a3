"""Two nodes on one machine train tables cut over both; nodes are killed and started anew, and their cable is cut.

Each node is a network namespace with an address and a torchrun of its own, or a loopback address where no namespace can
be made, and has two ranks. Not as it has to be: the losses of a run with a failure differ in a bit from those of an
undisturbed one; runs at other numbers of ranks differ by more than 1e-5; nodes that are cut off do not both say who is
gone within `timeout_s` and 15 s. `--write` keeps the result in `perf/results/cpu/two_nodes.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shardwise.perf.evidence.nodes.machine import LAUNCH, TwoNodes, namespaces_can_be_made
from shardwise.perf.evidence.report import ROOT, Report, Section, grid, report_of, versions
from shardwise.perf.suite.options import Options

RESULT = ROOT / "perf" / "results" / "cpu" / "two_nodes.json"
OPTIONS: Options = {"--namespaces": {"choices": ("auto", "no"), "default": "auto", "help": "no: loopback addresses"}}
STEPS, KILL_AT, CLOSE = 30, 8, 1e-5
# of the run with one node or two, which is longer
ELASTIC_STEPS = 120
TIMEOUT_S, GRACE_S = 10.0, 15.0
# seconds that a run may take to start, on a machine with other work to do
START_S, END_S = 150.0, 240.0


class Run:
    """A training over two nodes: its folder, its lines, its nodes."""

    def __init__(
        self, folder: Path, nodes: TwoNodes, *, steps: int = STEPS, pause: float = 0.2, how: str = "2"
    ) -> None:
        self.nodes, self.how = nodes, how
        self._losses = folder / "losses.jsonl"
        self._arguments = [f"--steps={steps}", f"--pause={pause}", f"--losses={self._losses}"]
        self._arguments += [f"--checkpoint-dir={folder / 'checkpoints'}", f"--timeout-s={TIMEOUT_S}"]

    def start(self, *which: int) -> None:
        for node in which:
            self.nodes.train(node, *self._arguments, nodes=self.how)

    def lines(self) -> list[dict[str, Any]]:
        text = self._losses.read_text(encoding="utf-8") if self._losses.exists() else ""
        # a kill may cut the last one short
        return [json.loads(line) for line in text.splitlines() if line.endswith("}")]

    def begins(self) -> list[dict[str, Any]]:
        return [line for line in self.lines() if "begin" in line]

    def wait_for_step(self, step: int) -> None:
        self.nodes.wait(lambda: any(line.get("step", 0) >= step for line in self.lines()), START_S, f"step {step}")

    def wait_for_generation(self, number: int) -> float:
        """How long it took until ranks trained for the `number`-th time."""
        return self.nodes.wait(lambda: len(self.begins()) >= number, START_S, f"generation {number}")

    def losses(self) -> list[float]:
        """Of each step the last one that was written."""
        of_step = {line["step"]: line["loss"] for line in self.lines() if "loss" in line}
        return [of_step[step] for step in sorted(of_step)]

    def report(self, seconds: dict[str, float] | None = None) -> dict[str, Any]:
        """What was seen, once all launchers ended."""
        statuses = self.nodes.ended(END_S)
        begins = [{"step": line["begin"], "ranks": line["ranks"]} for line in self.begins()]
        return {
            "statuses": statuses,
            "generations": begins,
            "placed": self.begins()[0]["of"],
            "seconds": {name: round(value, 1) for name, value in (seconds or {}).items()},
            "losses": self.losses(),
        }


def undisturbed(run: Run) -> dict[str, Any]:
    run.start(0, 1)
    return run.report()


def node_killed(run: Run, node: int) -> dict[str, Any]:
    """A node is killed in mid-training and comes back; the other one's torchrun is started anew if it ended."""
    run.start(0, 1)
    run.wait_for_step(KILL_AT)
    run.nodes.kill(node)
    other, seconds = 1 - node, {}
    if node == 0:
        # the store where nodes meet was there: the other torchrun ends, perhaps before its ranks can say a word
        seconds["until the other torchrun ended"] = run.nodes.wait(
            lambda: run.nodes.status(other) is not None, 120.0, "an end of the other torchrun"
        )
        run.start(other)
    else:
        said = run.nodes.wait(lambda: named(run.nodes, other), 60.0, "a failure")
        seconds["until the other node's ranks said so"] = said
    run.start(node)
    seconds["from the new start to training"] = run.wait_for_generation(2)
    return run.report(seconds)


def named(nodes: TwoNodes, node: int) -> bool:
    """Whether a rank of a node said which ranks are gone: torchrun may end the other one before it says a word."""
    return len(failures(nodes, node)) > 0


def failures(nodes: TwoNodes, node: int) -> list[str]:
    """What each rank of a node raised."""
    said = re.findall(r"^rank (\d): (.*(?:ended, or does not answer|failed).*)$", nodes.printed_by(node), re.MULTILINE)
    return [f"rank {rank}: {text.split('. ')[0]}" for rank, text in said if int(rank) // 2 == node]


def both_killed(run: Run) -> dict[str, Any]:
    run.start(0, 1)
    run.wait_for_step(KILL_AT)
    for node in range(2):
        run.nodes.kill(node)
    run.start(0, 1)
    return run.report({"from the new start to training": run.wait_for_generation(2)})


def elastic(run: Run) -> dict[str, Any]:
    """Node 1 is killed, node 0 goes on alone, node 1 comes back, and both go on together."""
    run.start(0, 1)
    run.wait_for_step(KILL_AT)
    run.nodes.kill(1)
    seconds = {"until one node trained alone": run.wait_for_generation(2)}
    run.start(1)
    seconds["until both trained again"] = run.wait_for_generation(3)
    return run.report(seconds)


def cut_off(run: Run) -> dict[str, Any]:
    """The cable is cut: all ranks say who is gone. Then it is mended, and both nodes are started anew."""
    run.start(0, 1)
    run.wait_for_step(KILL_AT)
    run.nodes.cut()
    within = TIMEOUT_S + GRACE_S
    said = run.nodes.wait(lambda: all(named(run.nodes, node) for node in range(2)), within, "errors of all ranks")
    messages = [text for node in range(2) for text in failures(run.nodes, node)]
    for node in range(2):
        run.nodes.kill(node)
    run.nodes.mend()
    run.start(0, 1)
    run.wait_for_generation(2)
    return {**run.report({"until all ranks said so": said}), "messages": messages}


def on_one_node(*arguments: str, ranks: int) -> list[float]:
    """The losses of the same training on one node."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks > 1 else []
    command = [sys.executable, *launcher, str(LAUNCH / "two_nodes.py"), *arguments]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=END_S)
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])
    return [json.loads(line)["loss"] for line in done.stdout.splitlines() if line.startswith('{"step"')]


SCENARIOS: dict[str, tuple[Callable[..., dict[str, Any]], dict[str, Any]]] = {
    "undisturbed": (undisturbed, {}),
    "node 1 killed, started anew": (lambda run: node_killed(run, 1), {}),
    "node 0 killed, both started anew": (lambda run: node_killed(run, 0), {}),
    "both nodes killed, started anew": (both_killed, {}),
    "--nnodes=1:2, node 1 killed, started anew later": (
        elastic, {"steps": ELASTIC_STEPS, "pause": 0.5, "how": "1:2"},
    ),
    "cable cut, mended, both started anew": (cut_off, {}),
}  # fmt: skip


def apart(losses: list[float], expected: list[float]) -> float:
    """The largest difference between two runs; infinite where they have other steps."""
    if len(losses) != len(expected):
        return float("inf")
    return max(abs(one - other) for one, other in zip(losses, expected, strict=True))


def judged(name: str, seen: dict[str, Any], expected: dict[str, list[float]]) -> tuple[dict[str, Any], list[str]]:
    """What is kept of a scenario, and what in it is not as it has to be."""
    losses = seen.pop("losses")
    several = {begin["ranks"] for begin in seen["generations"]} != {4}
    exact, near = expected["4 ranks of one node, as two of 2"], expected["1 process"]
    seen["steps"] = len(losses)
    seen["same bits"] = losses == exact[: len(losses)] and len(losses) == STEPS
    seen["from one process at most"] = apart(losses, near[: ELASTIC_STEPS if several else STEPS])
    bad = [f"{name}: the losses are not those of an undisturbed run"] if not (several or seen["same bits"]) else []
    if not seen["from one process at most"] <= CLOSE:
        bad.append(f"{name}: {seen['from one process at most']:.1e} from one process")
    if any(seen["statuses"]):
        bad.append(f"{name}: torchrun ended with {seen['statuses']}")
    return seen, bad


def run(options: argparse.Namespace) -> Report:
    """All scenarios, one after the other."""
    namespaces = options.namespaces == "auto" and namespaces_can_be_made()
    expected = {
        "1 process": on_one_node(f"--steps={ELASTIC_STEPS}", ranks=1),
        "4 ranks of one node, as two of 2": on_one_node(f"--steps={STEPS}", "--node-ranks=2", ranks=4),
    }
    seen, bad = {}, []
    with tempfile.TemporaryDirectory() as place:
        for number, (name, (scenario, settings)) in enumerate(SCENARIOS.items()):
            if scenario is cut_off and not namespaces:
                continue
            folder = Path(place) / str(number)
            with TwoNodes(folder, namespaces=namespaces) as nodes:
                seen[name], faults = judged(name, scenario(Run(folder, nodes, **settings)), expected)
            print(f"{name}: {seen[name]['seconds']}", file=sys.stderr, flush=True)
            bad += faults
    result: dict[str, Any] = {
        "versions": versions(),
        "nodes": "network namespaces" if namespaces else "loopback addresses",
    }
    result |= {"ranks of a node": 2, "timeout_s": TIMEOUT_S, "runs": seen}
    if options.write:
        RESULT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return report_of([Section(table(seen), bad)], str(result["nodes"]))


def table(seen: dict[str, Any]) -> list[str]:
    """A row for each scenario."""
    rows = [
        (
            name,
            ", ".join(f"{begin['ranks']} ranks from step {begin['step']}" for begin in of["generations"]),
            "; ".join(f"{what}: {value} s" for what, value in of["seconds"].items()) or "-",
            "yes" if of["same bits"] else f"to {of['from one process at most']:.0e}",
        )
        for name, of in seen.items()
    ]
    return grid(("what happens", "trained", "seconds", "same losses"), rows)
