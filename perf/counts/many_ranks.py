"""One rank's step among 64 and 512, counted without the others: torch's fake process group, the same batch on each.

Shapes: T tables of R rows x D columns, W ranks in hosts of HOST, B samples a rank, L ids a bag. Tables are those of
MLPerf's DLRM-DCNv2, over and over, with few rows, cut in every way. Where each goes does not depend on W: what rank 0
holds is the same among 64 and 512, but for blocks of rows. As all ranks have rank 0's batch, what one of them sends to
rank 0 is what rank 0 sends to itself: sizes, ids and gradients. Rows that others look up are zeros.

    python -m shardwise.perf.counts.many_ranks            the counts, and which own functions more ranks call more often
    python -m shardwise.perf.counts.many_ranks --update   the same, kept in many_ranks.json
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardwise import (
    DistributedModelParallel,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    KeyedJaggedTensor,
    ShardingEnv,
    ShardingPlan,
    apply_optimizer_in_backward,
    construct_module_sharding_plan,
)
from shardwise.perf.counts import baseline
from shardwise.perf.counts.calls import Called, peak_bytes, python_calls
from shardwise.perf.counts.steps import Count, Counts, one_thread
from shardwise.perf.suite.timing import collector_off
from shardwise.sharding import column_wise, data_parallel, grid_shard, row_wise, table_row_wise, table_wise

# rows and ids a bag of the 26 tables (mlcommons/training, recommendation_v2)
ROWS = (
    40_000_000, 39_060, 17_295, 7_424, 20_265, 3, 7_122, 1_543, 63, 40_000_000, 3_067_956, 405_282, 10, 2_209, 11_938,
    155, 4, 976, 14, 40_000_000, 40_000_000, 40_000_000, 590_152, 12_973, 108, 36,
)  # fmt: skip
IDS = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)
# no count depends on so many rows
SMALLER, D, B, HOST = 40_000, 32, 2, 8
# ranks that hold whole tables and columns: those of the smaller world
HOLDERS = 64
# now and then a step looks through what earlier collectives were lent
TURNS = 3


class Case(NamedTuple):
    """So many tables on so many ranks."""

    world: int
    tables: int

    def __str__(self) -> str:
        return f"EBC step of rank 0, {self.tables} tables, {self.world} ranks"


CASES = (Case(64, 26), Case(512, 26), Case(64, 856), Case(512, 856))
BASELINE = Path(__file__).with_suffix(".json")


def ways_of(tables: int) -> dict[str, Any]:
    """How each table is cut: rows over all ranks, a grid of four hosts, one host, columns, copies, or not at all."""
    turns = {kind: count() for kind in ("large", "columns", "whole")}
    ways: dict[str, Any] = {}
    for n in range(tables):
        rows = ROWS[n % len(ROWS)]
        if rows > 10**7:
            turn = next(turns["large"])
            host = turn // 3 % (HOLDERS // HOST)
            ways[f"t{n}"] = (row_wise(), table_row_wise(host), grid_shard([0, 1, 2, 3]))[turn % 3]
        elif rows > 10**5:
            first = 8 * next(turns["columns"])
            ways[f"t{n}"] = column_wise([(first + column) % HOLDERS for column in range(4)])
        else:
            ways[f"t{n}"] = data_parallel() if rows < 1000 else table_wise(8 * next(turns["whole"]) % HOLDERS)
    return ways


def model_of(case: Case) -> DistributedModelParallel:
    """The collection of rank 0."""
    configs = [
        EmbeddingBagConfig(max(3, ROWS[n % len(ROWS)] // SMALLER), D, f"t{n}", feature_names=[f"f{n}"])
        for n in range(case.tables)
    ]
    module = EmbeddingBagCollection(configs)
    apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.01})
    plan = construct_module_sharding_plan(module, ways_of(case.tables), None, HOST, case.world, "cpu")
    assert dist.group.WORLD is not None
    env = ShardingEnv.from_process_group(dist.group.WORLD, local_world_size=HOST)
    return DistributedModelParallel(module, env, device="cpu", plan=ShardingPlan({"": plan}), timeout_s=None)


def batch_of(tables: int) -> KeyedJaggedTensor:
    """B samples with L ids of each table."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([IDS[n % len(IDS)] for n in range(tables)]).repeat_interleave(B)
    ids = [
        torch.randint(0, max(3, ROWS[n % len(ROWS)] // SMALLER), (B * IDS[n % len(IDS)],), generator=generator)
        for n in range(tables)
    ]
    return KeyedJaggedTensor([f"f{n}" for n in range(tables)], torch.cat(ids), lengths=lengths)


@dataclass
class Messages:
    """Bytes of each all-to-all in order, by number, dtype and ranks."""

    sent: dict[str, int] = field(default_factory=dict)
    received: dict[str, int] = field(default_factory=dict)

    def clear(self) -> None:
        """Forget what was noted."""
        self.sent.clear()
        self.received.clear()

    def note(self, send: Tensor, receive: Tensor, ranks: int) -> None:
        """One more."""
        name = f"{len(self.sent) + 1}: {str(send.dtype).removeprefix('torch.')} among {ranks}"
        self.sent[name], self.received[name] = send.nbytes, receive.nbytes


class _Done:
    """The work of a collective that is over."""

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


@contextmanager
def fake_ranks(world: int) -> Iterator[Messages]:
    """A process group in which every rank sends to this one, rank 0, what it sends to itself, and zeros else."""
    messages = Messages()

    def all_to_all_single(
        output: Tensor, input: Tensor, output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None, group: Any = None, async_op: bool = False,
    ) -> Any:  # fmt: skip
        ranks = dist.get_world_size(group)
        own = input[: input.shape[0] // ranks if input_split_sizes is None else input_split_sizes[0]]
        sizes = {own.shape[0]} if output_split_sizes is None else set(output_split_sizes)
        if sizes == {own.shape[0]}:
            output.copy_(own.repeat(ranks, *[1] * (own.dim() - 1)))
        else:
            output.zero_()
        messages.note(input, output, ranks)
        return _Done()

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        with patch.object(dist, "all_to_all_single", all_to_all_single):
            yield messages
    finally:
        dist.destroy_process_group()


def counted(case: Case) -> tuple[Counts, Counter[Called]]:
    """Counts of forward and backward of rank 0, and its calls of shardwise's own functions.

    Bytes that are live at a time are those of the first step, which has nothing kept by one before. Calls are those of
    the cheapest of TURNS later ones.
    """
    with fake_ranks(case.world) as messages, one_thread():
        model, batch = model_of(case), batch_of(case.tables)
        gradient = torch.full((B, case.tables * D), 0.1)

        def step() -> None:
            messages.clear()
            model(batch).values().backward(gradient)

        with collector_off():
            peak = peak_bytes(step)
            turns = [own_calls(python_calls(step)) for _ in range(1 + TURNS)]
    calls = min(turns[1:], key=lambda turn: turn.total())
    by_folder: Counter[str] = Counter()
    for function, n in calls.items():
        by_folder[_folder(function)] += n
    counts = {
        "own python calls": Count.of(by_folder),
        # the first message of a step
        "header bytes": Count(next(iter(messages.sent.values()))),
        "bytes sent": Count(sum(messages.sent.values()), dict(messages.sent)),
        "bytes received": Count(sum(messages.received.values()), dict(messages.received)),
        "peak bytes": Count(peak),
    }
    return counts, calls


_ROOT = Path(__file__).resolve().parents[2]


def own_calls(calls: Counter[Called]) -> Counter[Called]:
    """Those of shardwise's own functions, perf left out."""
    return Counter({function: n for function, n in calls.items() if _folder(function) not in ("", "perf")})


def _folder(function: Called) -> str:
    path = Path(function.file)
    if not path.is_absolute() or not (inside := path.resolve()).is_relative_to(_ROOT):
        return ""
    first = inside.relative_to(_ROOT).parts[0]
    # an environment may lie in the checkout
    return "" if first.startswith(".") else first


def grown(fewer: Counter[Called], more: Counter[Called]) -> list[str]:
    """Functions of sharding that more ranks call more often, with both numbers of calls, those that grow most first.

    What kernels are called for may depend on how large a message is, and so on ranks, but not on each of them.
    """
    rises = Counter({function: n - fewer[function] for function, n in more.items() if _folder(function) == "sharding"})
    return [
        f"{Path(function.file).resolve().relative_to(_ROOT).as_posix()}:{function.line} {function.name}"
        f" {fewer[function]:,} -> {more[function]:,}"
        for function, rise in rises.most_common()
        if rise > 0
    ]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="One rank's step among 64 and 512, counted without the others.")
    parser.add_argument("--update", action="store_true", help="Keep the counts in many_ranks.json.")
    given = parser.parse_args(argv)
    counts, calls = {}, {}
    for case in CASES:
        counts[str(case)], calls[case] = counted(case)
        print(case)
        for name, count_of in counts[str(case)].items():
            print(f"  {name:<17} {count_of.total:>13,}  {dict(count_of.parts) or ''}")
    for few, many in zip(CASES[::2], CASES[1::2], strict=True):
        print(f"{few.tables} tables: calls among {few.world} ranks -> among {many.world}")
        print("\n".join(f"  {line}" for line in grown(calls[few], calls[many])) or "  none grows")
    if given.update:
        kept = baseline.read(BASELINE) if BASELINE.is_file() else {}
        baseline.write(BASELINE, {**kept, baseline.versions(): counts})


if __name__ == "__main__":
    main()
