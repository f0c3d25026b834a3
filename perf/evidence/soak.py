"""Trains the DLRM example while its processes are killed at random, and once undisturbed, and compares the two.

    python perf/evidence/soak.py --minutes 60 --ranks 2 --seed 0 --folder runs/soak --json perf/results/cpu/soak.json

The disturbed run goes on until the minutes are over and its epoch is complete; the undisturbed one then trains as many
epochs. Which processes are hit, how and when follows from the seed; what they are doing at that moment does not. The
disturbed run pauses at each line of metrics, so that the undisturbed one is over sooner: what is shown is that nothing
is lost, not how fast it is.

It fails where the job ends or stands still by itself, or where the two areas under the ROC curve differ by more than
0.005. It needs /proc, so Linux.
"""

from __future__ import annotations

import json
import os
import platform
import random
import re
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shardwise import checkpoint
from shardwise.perf.suite.options import Options, parser_of

WORKER = Path(__file__).with_name("soak_worker.py")
# what is done to the job, how often relative to the others
KINDS = {
    "one worker killed": 6,
    "one worker stopped, killed later": 3,
    "all workers killed": 3,
    "whole job killed, started anew": 3,
    "job told to end, started anew": 1,
    "one worker stopped for good": 1,
}
# of lines of metrics that tell the time
TIMES = ("samples_per_s", "seconds")
# "1" gives each restart of torchrun a store of its own: docs/howto/reliability.md
OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
# a job without a step for so long stands still
STILL_S = 240.0


@dataclass
class Disturbance:
    """What was done, when, at which step, and how long it took until a new process finished a line of metrics."""

    kind: str
    at_s: float
    step: int
    while_saving: bool
    recovered_s: float | None = None


class Job:
    """A torchrun of the example that can be started anew, its log and the events that its rank 0 wrote."""

    def __init__(self, folder: Path, ranks: int, train: Sequence[str]) -> None:
        self.folder = folder
        self.launches = 0
        self.events: list[dict[str, float]] = []
        self._events_read = 0
        self._ranks = ranks
        self._train = train
        self._process: subprocess.Popen[bytes] | None = None
        folder.mkdir(parents=True)

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    def start(self, *, epochs: int, pause_s: float) -> None:
        self.launches += 1
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={self._ranks}"]
        command += ["--max-restarts=1000", "--monitor-interval=0.5", str(WORKER), str(self.folder / "events.jsonl")]
        command += [
            str(pause_s),
            *self._train,
            f"--epochs={epochs}",
            f"--checkpoint-dir={self.checkpoints}",
            "--resume",
        ]
        command += [f"--metrics={self.folder / 'metrics.jsonl'}", f"--json={self.folder / 'result.json'}"]
        with (self.folder / "torchrun.log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)

    def ended(self) -> int | None:
        """The exit status, None while it runs."""
        assert self._process is not None
        return self._process.poll()

    def workers(self) -> list[int]:
        """The processes of the ranks that live now."""
        assert self._process is not None
        return workers_of(self._process.pid, str(WORKER))

    def kill(self) -> None:
        """Ends torchrun and all its workers at once."""
        assert self._process is not None
        workers = self.workers()
        self._process.kill()
        for pid in workers:
            send(pid, signal.SIGKILL)
        self._process.wait()

    def terminate(self) -> None:
        """Ends the job as an operator does, by SIGTERM to torchrun, which ends its workers."""
        assert self._process is not None
        self._process.terminate()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self.kill()

    def read_events(self) -> None:
        """Adds to `events` what the workers wrote since the last call."""
        path = self.folder / "events.jsonl"
        if not path.exists():
            return
        with path.open("rb") as lines:
            lines.seek(self._events_read)
            for line in lines:
                # a line in the making is read once it is whole; one cut short by a kill runs into the next
                if not line.endswith(b"\n"):
                    break
                self._events_read += len(line)
                with suppress(ValueError):
                    self.events.append(json.loads(line))

    def saving(self) -> bool:
        """Whether a checkpoint is being written: it lies in a hidden folder until it is complete."""
        return any(self.checkpoints.glob(".saving-*"))


def workers_of(torchrun: int, script: str) -> list[int]:
    """The processes that a torchrun started to run `script`."""
    workers = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        # a process may end while it is looked at
        with suppress(FileNotFoundError, ProcessLookupError):
            # the name of the program, in parentheses, may hold anything
            _, parent, *_ = stat.read_text().rpartition(")")[2].split()
            if int(parent) == torchrun and script in (stat.parent / "cmdline").read_text():
                workers.append(int(stat.parent.name))
    return sorted(workers)


def json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a file with one a line, but for a line that a kill cut short."""
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            yield json.loads(line)
        except ValueError:
            continue


def send(pid: int, number: signal.Signals) -> None:
    """Sends a signal to a process that may be gone."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)


class Soak:
    """The disturbed run: what was done to it and what came of it."""

    def __init__(self, job: Job, seed: int, pause_s: float) -> None:
        self.job = job
        self.done: list[Disturbance] = []
        self.failures: list[str] = []
        self.steps_saved: set[str] = set()
        self._random = random.Random(seed)
        self._pause_s = pause_s
        self._begin = time.time()
        self._progress_t = self._begin

    def run(self, minutes: float, gaps_s: tuple[float, float]) -> None:
        """Disturbs the job until the minutes are over."""
        end = self._begin + 60 * minutes
        self._start()
        while time.time() < end:
            self._watch(min(end, time.time() + self._random.uniform(*gaps_s)))
            if time.time() < end:
                self._disturb(self._random.choices(list(KINDS), weights=list(KINDS.values()))[0])

    def finish(self, epochs: int) -> None:
        """Lets the job go on to the end of its last epoch."""
        self.job.terminate()
        self.job.start(epochs=epochs, pause_s=0.0)
        if self._wait_for_end(600.0) != 0:
            self.failures.append(f"the last launch ended with status {self.job.ended()}")
            self.job.kill()
        self._note()

    def _start(self) -> None:
        # more epochs than there is time for
        self.job.start(epochs=1_000_000, pause_s=self._pause_s)
        self._progress_t = time.time()

    def _wait_for_end(self, seconds: float) -> int | None:
        until = time.time() + seconds
        while self.job.ended() is None and time.time() < until:
            time.sleep(0.2)
        return self.job.ended()

    def _watch(self, until: float) -> None:
        while time.time() < until:
            time.sleep(0.2)
            self._note()
            status = self.job.ended()
            if status is not None:
                self._fail(f"the job ended by itself with status {status}")
            elif time.time() - self._progress_t > STILL_S:
                self._fail(f"no step for {STILL_S:.0f} s")

    def _fail(self, problem: str) -> None:
        self.failures.append(f"{time.time() - self._begin:.0f} s: {problem}")
        say(self.failures[-1])
        # where they stand goes to the log
        for pid in self.job.workers():
            send(pid, signal.SIGUSR1)
        time.sleep(1.0)
        self.job.kill()
        self._start()

    def _note(self) -> None:
        """Takes down what the job did since the last look."""
        self.steps_saved |= {path.name for path in checkpoint.steps(self.job.checkpoints)}
        self.job.read_events()
        if self.job.events:
            self._progress_t = max(self._progress_t, self.job.events[-1]["t"])

    def _disturb(self, kind: str) -> None:
        workers = self.job.workers()
        if not workers:
            # between two generations of workers
            return
        known = {event["pid"] for event in self.job.events}
        begin = time.time()
        step = int(self.job.events[-1]["step"]) if self.job.events else 0
        done = Disturbance(kind, begin - self._begin, step, self.job.saving())
        self.done.append(done)
        victim = self._random.choice(workers)
        if kind == "one worker killed":
            send(victim, signal.SIGKILL)
        elif kind == "one worker stopped, killed later":
            send(victim, signal.SIGSTOP)
            time.sleep(self._random.uniform(0.5, 10.0))
            send(victim, signal.SIGKILL)
        elif kind == "all workers killed":
            for pid in workers:
                send(pid, signal.SIGKILL)
        elif kind == "one worker stopped for good":
            send(victim, signal.SIGSTOP)
        else:
            if kind == "whole job killed, started anew":
                self.job.kill()
            else:
                self.job.terminate()
            self._start()
        say(f"{done.at_s:.0f} s: {kind} at step {step}{' while saving' if done.while_saving else ''}")
        # another one comes before the job has recovered, now and then; but a stopped worker is given its time
        patience = (
            STILL_S + 30.0 if kind == "one worker stopped for good" else self._random.choice((20.0, 90.0, 90.0, 90.0))
        )
        while time.time() - begin < patience and done.recovered_s is None:
            self._watch(time.time() + 0.2)
            fresh = next((event for event in self.job.events if event["pid"] not in known), None)
            if fresh is not None:
                done.recovered_s = fresh["t"] - begin


def repeated_steps(events: Sequence[Mapping[str, float]], line_steps: int) -> int:
    """Steps that were trained again, to the line of metrics: what each process redid of those before it.

    A process has its first event `line_steps` after the line that it began at.
    """
    repeated, reached, pid = 0, 0, 0.0
    for event in events:
        if event["pid"] != pid:
            repeated += max(0, reached - (int(event["step"]) - line_steps))
            pid = event["pid"]
        reached = max(reached, int(event["step"]))
    return repeated


def same_metrics(first: Path, second: Path) -> tuple[bool, float]:
    """Whether two files of metrics agree in every digit but of times, and how far losses are apart at most."""
    pairs = [
        [{name: value for name, value in line.items() if name not in TIMES} for line in json_lines(path)]
        for path in (first, second)
    ]
    losses = [{line["step"]: line["loss"] for line in lines if "loss" in line} for lines in pairs]
    apart = max((abs(losses[0][step] - losses[1][step]) for step in losses[0].keys() & losses[1].keys()), default=0.0)
    return pairs[0] == pairs[1], apart


def same_tensors(first: Path, second: Path) -> bool:
    """Whether the last checkpoints of two runs hold the same bytes of weights and optimizer states."""
    files = [{path.name: path.read_bytes() for path in folder.rglob("*.safetensors")} for folder in (first, second)]
    return bool(files[0]) and files[0] == files[1]


def summary(report: Mapping[str, Any]) -> list[str]:
    """The rows of the table in docs/howto/reliability.md."""
    kinds = "; ".join(f"{count} x {kind}" for kind, count in report["disturbances"].items())
    recovered, aucs = report["recovered_s"], report["test_auc"]
    rows = {
        "time": f"{report['wall_minutes']:.1f} minutes on {report['ranks']} ranks, {report['machine']}",
        "disturbances": f"{sum(report['disturbances'].values())}: {kinds}",
        "launches of torchrun; groups of workers that trained": (
            f"{report['launches_of_torchrun']}; {report['groups_of_workers']}"
        ),
        "steps; trained again after a restart": f"{report['steps']:,}; {report['steps_repeated']:,}",
        "checkpoints": f"{report['checkpoints']}",
        "from a disturbance to the next line of metrics": (
            f"median {recovered['median']:.0f} s, at most {recovered['max']:.0f} s; {recovered['of']} came so far"
        ),
        "test AUC, disturbed; undisturbed": f"{aucs['disturbed']:.6f}; {aucs['undisturbed']:.6f}",
        "metrics of both equal in every digit but times": "yes" if report["same_metrics"] else "no",
        "last checkpoints of both equal in every byte": "yes" if report["same_bytes_of_last_checkpoint"] else "no",
        "times that the job ended or stood still by itself": f"{len(report['failures'])}",
    }
    return [f"| {name} | {value} |" for name, value in rows.items()]


def messages(log: Path) -> dict[str, int]:
    """How often the ranks that were left raised what, by the name of the exception."""
    raised = re.findall(
        r"^(?:\[rank\d+\]:\s*)?([\w.]*(?:Error|Failure|Exception))\b", log.read_text(errors="replace"), re.M
    )
    return dict(Counter(name.rpartition(".")[2] for name in raised).most_common())


def say(line: str) -> None:
    print(time.strftime("%H:%M:%S"), line, flush=True)


OPTIONS: Options = {
    "--minutes": {"type": float, "default": 60.0},
    "--ranks": {"type": int, "default": 2},
    "--seed": {"type": int, "default": 0},
    "--folder": {"type": Path, "required": True, "help": "for checkpoints, metrics and logs; must not exist"},
    "--json": {"type": Path, "required": True, "help": "write the results to this file"},
    "--gaps": {"type": float, "nargs": 2, "default": (30.0, 120.0), "help": "seconds between disturbances"},
    "--pause": {"type": float, "default": 0.3, "help": "seconds of the disturbed run at each line of metrics"},
    "train": {"nargs": "*", "help": "arguments of examples/dlrm/train.py, after --"},
}


def main(argv: Sequence[str] | None = None) -> int:
    args = parser_of(OPTIONS, None, (__doc__ or "").split("\n\n")[0]).parse_args(argv)
    disturbed = Job(args.folder / "disturbed", args.ranks, args.train)
    undisturbed = Job(args.folder / "undisturbed", args.ranks, args.train)
    soak = Soak(disturbed, args.seed, args.pause)
    try:
        begin = time.time()
        soak.run(args.minutes, tuple(args.gaps))
        ended = [line for line in json_lines(disturbed.folder / "metrics.jsonl") if "test_auc" in line]
        epochs = len(ended) + 1
        say(f"the time is over: finishing epoch {epochs}")
        soak.finish(epochs)
        wall_s = time.time() - begin

        say("undisturbed")
        undisturbed.start(epochs=epochs, pause_s=0.0)
        while undisturbed.ended() is None:
            time.sleep(0.5)
    finally:
        for job in (disturbed, undisturbed):
            if job.launches and job.ended() is None:
                job.kill()

    results = [json.loads((job.folder / "result.json").read_text()) for job in (disturbed, undisturbed)]
    aucs = [result["epochs"][-1]["test_auc"] for result in results]
    same_lines, apart = same_metrics(disturbed.folder / "metrics.jsonl", undisturbed.folder / "metrics.jsonl")
    events = disturbed.events
    recovered = [done.recovered_s for done in soak.done if done.recovered_s is not None]
    report = {
        "versions": results[0]["versions"],
        "machine": f"{os.cpu_count()} {platform.machine()} cores",
        "store_of_torchrun": "of each restart" if os.environ.get(OWN_STORE) == "1" else "kept over restarts",
        "ranks": args.ranks,
        "seed": args.seed,
        "train": args.train,
        "wall_minutes": wall_s / 60,
        "disturbances": dict(Counter(done.kind for done in soak.done)),
        "disturbed_while_saving": sum(done.while_saving for done in soak.done),
        "launches_of_torchrun": disturbed.launches,
        "groups_of_workers": len({event["pid"] for event in events}),
        "steps": int(events[-1]["step"]),
        "steps_repeated": repeated_steps(events, results[0]["config"]["log_every"]),
        "epochs": epochs,
        "checkpoints": len(soak.steps_saved),
        "recovered_s": {"median": statistics.median(recovered), "max": max(recovered), "of": len(recovered)},
        "exceptions_of_ranks_left": messages(disturbed.folder / "torchrun.log"),
        "failures": soak.failures,
        "test_auc": {"disturbed": aucs[0], "undisturbed": aucs[1]},
        "same_metrics": same_lines,
        "largest_difference_of_losses": apart,
        "same_bytes_of_last_checkpoint": same_tensors(latest(disturbed), latest(undisturbed)),
        "log": [asdict(done) for done in soak.done],
    }
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(report, indent=2) + "\n")
    say("\n".join(["", *summary(report), *soak.failures]))
    return 1 if soak.failures or abs(aucs[0] - aucs[1]) > 0.005 else 0


def latest(job: Job) -> Path:
    newest = checkpoint.latest(job.checkpoints)
    assert newest is not None
    return newest


if __name__ == "__main__":
    sys.exit(main())
