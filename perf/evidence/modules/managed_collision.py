"""Managed collision modules beside TorchRec's: the same ids in, the same slots, state and evictions out.

Streams are drawn from zipf, uniform and drifting ids; batches of one size, as TorchRec drops what exceeds 1.25 times
the first one. Prints one row for each policy.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from shardwise.perf.evidence.report import Report
from shardwise.perf.suite import libraries

POLICIES = {
    "LFU": lambda mc, keep: mc.LFU_EvictionPolicy(keep),
    "LRU": lambda mc, keep: mc.LRU_EvictionPolicy(threshold_filtering_func=keep),
    "LRU, exponent 0.5": lambda mc, keep: mc.LRU_EvictionPolicy(0.5, keep),
    "DistanceLFU": lambda mc, keep: mc.DistanceLFU_EvictionPolicy(threshold_filtering_func=keep),
    "DistanceLFU, exponent 2": lambda mc, keep: mc.DistanceLFU_EvictionPolicy(2.0, keep),
}
FILTERS = ("", "average_threshold_filter", "dynamic_threshold_filter", "probabilistic_threshold_filter")
STREAMS = ("zipf", "uniform", "drift", "few")
INTERVALS, SIZES, BATCHES, IDS = (1, 2, 5), (1, 7, 64), 24, 90


def batches_of(stream: str, seed: int) -> Iterator[Tensor]:
    """BATCHES batches of IDS ids each."""
    draw = torch.Generator().manual_seed(seed)
    for step in range(BATCHES):
        if stream == "zipf":
            ids = (torch.rand(IDS, generator=draw) ** -1.3).long() * 982_451_653 % 2**60
        elif stream == "uniform":
            ids = torch.randint(-(2**62), 2**62, (IDS,), generator=draw) // 2**53
        elif stream == "drift":
            ids = torch.randint(0, 40, (IDS,), generator=draw) + 5 * step
        else:
            ids = torch.randint(0, 6, (IDS,), generator=draw)
        yield ids


def differences(peer: Any, policy: str, keep: str, stream: str, interval: int, size: int) -> tuple[int, int]:
    """How many of (slots, state and evictions of a batch) were compared, and how many differed."""
    compared = wrong = 0
    pair = []
    for library in (libraries.ours(), peer):
        chosen = POLICIES[policy](library, getattr(library, keep) if keep else None)
        module = library.MCHManagedCollisionModule(size, torch.device("cpu"), chosen, interval)
        pair.append((module, library.JaggedTensor))
    names = [list(module.state_dict()) for module, _ in pair]
    assert names[0] == names[1], names
    for step, ids in enumerate(batches_of(stream, seed=size * 100 + interval)):
        seen = []
        for module, jagged in pair:
            module.train(step % 7 != 6)
            torch.manual_seed(step)
            # two features of one table come one after another
            given = {"t": jagged(ids.clone(), lengths=torch.tensor([IDS // 3, IDS - IDS // 3]))}
            slots, evicted = module(given)["t"].values(), module.evict()
            seen.append([slots, evicted, module.open_slots(), *module.state_dict().values()])
        compared += 1
        same = all(
            (a is None and b is None) or (a is not None and b is not None and torch.equal(a, b))
            for a, b in zip(*seen, strict=True)
        )
        wrong += not same
    return compared, wrong


def run(options: argparse.Namespace) -> Report:
    """Compare and print.

    Raises:
        ImportError: TorchRec is not installed.
    """
    lines, bad = [f"{'policy':26}{'runs':>6}{'batches':>9}{'differ':>8}"], 0
    for policy in POLICIES:
        cases = list(itertools.product(FILTERS, STREAMS, INTERVALS, SIZES))
        counts = [differences(libraries.torchrec(), policy, *case) for case in cases]
        compared, wrong = (sum(numbers) for numbers in zip(*counts, strict=True))
        lines.append(f"{policy:26}{len(cases):6}{compared:9}{wrong:8}")
        bad += wrong
    return Report("\n".join(lines) + "\n", not bad)
