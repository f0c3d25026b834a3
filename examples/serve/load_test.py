"""Thousands of requests at the same time, bad ones among them: `python examples/serve/load_test.py --folder served`.

Starts a server for the folder on a free port, opens the connections, and then sends on all of them at once. Every good
answer is compared with what the model says to that request alone, in this process, and every bad one with the refusal
that it must be. Ends with status 1 if any is wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import resource
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from bad_requests import Bad, bad_requests
from instances import answer, read_instances

from shardwise.inference import ModelFacts, Program, load_program

# how much a number of a good answer may be off, against the larger of 1 and itself: the dense layers of a batch of
# another size add in another order
TOLERANCE = 1e-6
SPARE_FILES = 100
SERVER = Path(__file__).with_name("server.py")


@dataclass(frozen=True)
class Good:
    """A request and its right answer."""

    body: bytes
    predictions: Sequence[dict[str, Any]]


@dataclass
class Seen:
    """What came back."""

    seconds: list[float] = field(default_factory=list)
    statuses: Counter[int] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    off: float = 0.0
    open: int = 0
    most_open: int = 0


def instance(facts: ModelFacts, random_: random.Random, *, max_ids: int = 5) -> dict[str, Any]:
    """An instance of the model, with up to `max_ids` ids a feature; features without any are left out at times."""
    bags = {
        feature.name: [random_.randrange(feature.ids or 2**63) for _ in range(random_.randint(0, max_ids))]
        for feature in facts.features
    }
    made: dict[str, Any] = {"features": {name: bag for name, bag in bags.items() if bag or random_.random() < 0.5}}
    if facts.dense:
        made["dense"] = [random_.uniform(-2, 2) for _ in facts.dense]
    if facts.weighted:
        made["weights"] = {name: [random_.random() for _ in bag] for name, bag in bags.items()}
    return made


def requests(program: Program, args: argparse.Namespace) -> list[Good | Bad]:
    """As many as asked for, the bad ones spread among the good."""
    random_ = random.Random(args.seed)
    limits = {"max_instances": args.max_instances, "max_bytes": args.max_bytes}
    kinds = [*bad_requests(program.facts, instance(program.facts, random_), **limits).values()]
    made: list[Good | Bad] = []
    for number in range(args.requests):
        if random_.random() < args.bad:
            made.append(kinds[number % len(kinds)])
            continue
        count = random_.randint(1, min(args.instances, args.max_instances))
        body = {"instances": [instance(program.facts, random_) for _ in range(count)]}
        asked = read_instances(body, program.facts, max_instances=args.max_instances)
        made.append(Good(json.dumps(body).encode(), answer(program, asked)))
    return made


async def send(session: aiohttp.ClientSession, request: Good | Bad, seen: Seen, free: asyncio.Semaphore) -> None:
    """Send a request as soon as a connection is free, and look at the answer."""
    bad = request if isinstance(request, Bad) else Bad(request.body, {}, status=200)
    async with free:
        began = time.perf_counter()
        seen.open += 1
        seen.most_open = max(seen.most_open, seen.open)
        try:
            asked = session.request(bad.method, bad.path, data=bad.body, headers=dict(bad.headers))
            async with asked as response:
                status, content = response.status, await response.json()
        except (aiohttp.ClientError, asyncio.TimeoutError, ValueError) as error:
            seen.wrong.append(f"{bad.body[:80]!r}: {type(error).__name__}: {error}")
            return
        finally:
            seen.open -= 1
    seen.seconds.append(time.perf_counter() - began)
    seen.statuses[status] += 1
    if status != bad.status:
        seen.wrong.append(f"{bad.body[:80]!r}: status {status} instead of {bad.status}: {str(content)[:200]}")
    elif isinstance(request, Good):
        _compare(request, content["predictions"], seen)
    elif {name: content["error"].get(name) for name in bad.error} != bad.error:
        seen.wrong.append(f"{bad.body[:80]!r}: {content['error']} instead of {bad.error}")


def _compare(request: Good, predictions: Sequence[dict[str, Any]], seen: Seen) -> None:
    wanted, answered = _numbers(request.predictions), _numbers(predictions)
    off = max((abs(a - b) / max(1.0, abs(a)) for a, b in zip(wanted, answered, strict=False)), default=0.0)
    seen.off = max(seen.off, off)
    if (
        len(wanted) != len(answered)
        or [*map(set, request.predictions)] != [*map(set, predictions)]
        or not off <= TOLERANCE
    ):
        seen.wrong.append(f"{request.body[:80]!r}: {predictions} instead of {request.predictions}")


def _numbers(value: Any) -> list[float]:
    """All numbers of an answer, in their order; dicts by their keys."""
    if isinstance(value, dict):
        return [number for key in sorted(value) for number in _numbers(value[key])]
    if isinstance(value, list | tuple):
        return [number for item in value for number in _numbers(item)]
    return [float(value)]


async def storm(url: str, made: Sequence[Good | Bad], connections: int) -> tuple[Seen, float, str]:
    """Send all of them over so many connections; what came back, the seconds that it took, and the server's numbers."""
    seen = Seen()
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=120, sock_read=300)
    connector = aiohttp.TCPConnector(limit=connections)
    async with aiohttp.ClientSession(url, connector=connector, timeout=timeout) as session:
        # nobody has an answer yet when the last of them asks for a connection, so each opens its own
        await asyncio.gather(*(session.get("/healthz") for _ in range(connections)))
        began = time.perf_counter()
        # of more requests than connections, the next is sent when one is answered
        free = asyncio.Semaphore(connections)
        await asyncio.gather(*(send(session, request, seen, free) for request in made))
        seconds = time.perf_counter() - began
        async with session.get("/metrics") as response:
            return seen, seconds, await response.text()


@contextmanager
def running(folder: str | Path, *arguments: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A server process for `folder` on a free port, once it is ready, with its URL. It is ended by SIGTERM."""
    command = [sys.executable, str(SERVER), "--folder", str(folder), "--port", "0", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            first = process.stdout.readline()
            if not first or process.stdout.readline() != "ready\n":
                raise RuntimeError(f"the server ended with status {process.wait()}")
            yield first.split()[-1], process
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(120)
            except subprocess.TimeoutExpired:
                process.kill()
                raise


def raise_file_limit(connections: int) -> str:
    """Let this process and its server open a file for each connection.

    Raises:
        ValueError: the hard limit is too low.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = connections + SPARE_FILES
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise ValueError(f"{connections} connections need {needed} open files, and the hard limit is {hard}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return f"open files: {soft} -> {hard}"


def report(seen: Seen, seconds: float, metrics: str) -> list[str]:
    """The table of a run, as Markdown."""
    ordered = sorted(seen.seconds) or [0.0]
    percentile = {share: ordered[min(len(ordered) - 1, len(ordered) * share // 100)] for share in (50, 95, 99)}
    numbers = dict(line.rsplit(" ", 1) for line in metrics.splitlines() if not line.startswith("#"))
    batches, instances = (float(numbers[f"serve_batch_instances_{kind}"]) for kind in ("count", "sum"))
    by_status = ", ".join(f"{status}: {count}" for status, count in sorted(seen.statuses.items()))
    rows = {
        "requests, and unanswered at a time": f"{len(seen.seconds)}, {seen.most_open}",
        "open connections, as the server counts": f"{float(numbers['serve_connections']):.0f}",
        "seconds, requests a second": f"{seconds:.2f}, {len(seen.seconds) / seconds:.0f}",
        "latency p50, p95, p99, worst": ", ".join(
            f"{latency:.3f} s" for latency in (*percentile.values(), ordered[-1])
        ),
        "answers by status": by_status,
        "batches, instances in one on average": f"{batches:.0f}, {instances / max(batches, 1):.1f}",
        "most instances that waited": f"{float(numbers['serve_queue_most_instances']):.0f}",
        "good answers off by at most": f"{seen.off:.1e}",
        "wrong answers": str(len(seen.wrong)),
    }
    return ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", required=True, help="an exported model")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--connections", type=int, help="by default one for each request")
    parser.add_argument("--bad", type=float, default=0.2, help="the share of bad requests")
    parser.add_argument("--instances", type=int, default=4, help="at most in a good request")
    parser.add_argument("--max-instances", type=int, default=64, help="what the server takes")
    parser.add_argument("--max-bytes", type=int, default=2**16, help="what the server takes")
    parser.add_argument("--max-batch", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    connections = args.connections or args.requests
    print(raise_file_limit(connections), flush=True)
    made = requests(load_program(args.folder), args)
    bad = sum(isinstance(request, Bad) for request in made)
    print(f"{len(made)} requests, {bad} of them bad, over {connections} connections", flush=True)
    limits = {name: getattr(args, name) for name in ("max_instances", "max_bytes", "max_batch")}
    limits["max_queue"] = args.requests * args.instances
    # the one that scrapes the numbers comes on top, and a machine that does all this at once is slow
    limits["max_connections"] = connections + SPARE_FILES
    limits |= dict.fromkeys(("header_seconds", "body_seconds", "idle_seconds"), 600)
    options = [f"--{name.replace('_', '-')}={value}" for name, value in limits.items()]
    with running(args.folder, *options) as (url, _):
        seen, seconds, metrics = asyncio.run(storm(url, made, connections))
    print("\n".join([*report(seen, seconds, metrics), *seen.wrong[:20]]))
    return 1 if seen.wrong or len(seen.seconds) < len(made) else 0


if __name__ == "__main__":
    sys.exit(main())
