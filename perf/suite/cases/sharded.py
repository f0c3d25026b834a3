"""Cases of the suite: a training step of a sharded collection on two gloo ranks, without a dense model around it.

Rowwise Adagrad in the backward; a step takes as long as its slower rank. TorchRec is beside ours where it can shard
that way over gloo and trains in the backward, too. The ranks stay alive and step when they are asked to by their pipes.

Shapes: T tables of R rows x D columns, B samples of one rank, L ids a bag; outputs [B, T * D] fp32.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.perf.suite.case import (
    OURS,
    Case,
    Ready,
    Series,
    Setting,
)
from shardwise.perf.suite.cases.module_sides import TOLERANCE
from shardwise.perf.suite.cases.sharded_sides import (
    Shape,
    Stepper,
    batch_of,
    keys_of,
    sharded_of,
    turns,
    weights_of,
)
from shardwise.perf.suite.libraries import Library, ours, torchrec
from shardwise.perf.suite.peers import assert_close
from shardwise.perf.suite.ranks import join_group

FULL, SMALL = Shape(26, 20_000, 64, 2048, 1), Shape(4, 40, 64, 8, 3)
# of TorchRec: row shards need a reduce-scatter, which gloo has not; replicas need DDP around them and a dense optimizer
BESIDE = ("table_wise", "column_wise")
IN_CPU_SUITE = ("table_wise", "row_wise", "planned")
RANKS = 2
# a gloo rank that waits for a peer that has ended gives up after this
STUCK_SECONDS = 60.0
OPTIMIZER = "rowwise_adagrad"
# of the check of the weights after a step, which no split of a table changes
PLAIN, LR = "sgd", 0.05
# the shape of that check
FEW = Shape(5, 40, 64, 8, 3)


class RankError(RuntimeError):
    """A rank raised, ended or did not answer in time; the text is what it printed."""


@dataclass(frozen=True)
class Asked:
    """Of all ranks: the tables, how they are sharded, and whether TorchRec runs beside ours."""

    shape: Shape
    strategy: str
    beside: bool


class Ranks:
    """Processes that have one sharded collection of each side, until `close`."""

    def __init__(self, asked: Asked, *, seconds: float = 300.0) -> None:
        """Start them and wait until their collections are there.

        Raises:
            RankError: a rank failed to.
        """
        context = multiprocessing.get_context("forkserver")
        # each rank would import them anew, seconds every time
        context.set_forkserver_preload(["torch", "torch.distributed", "numba", "shardwise.sharding.modules.generators"])
        self._folder = tempfile.TemporaryDirectory(prefix="ranks")
        self._ends: list[Connection] = []
        self._processes = []
        for rank in range(RANKS):
            own_end, rank_end = context.Pipe()
            store = str(Path(self._folder.name) / "store")
            process = context.Process(target=_serve, args=(rank_end, rank, store, asked), daemon=True)
            process.start()
            rank_end.close()
            self._ends.append(own_end)
            self._processes.append(process)
        self._answers(seconds)

    def check(self, *, seconds: float = 120.0) -> None:
        """Raise AssertionError unless outputs, and weights after a step, are what they have to be on every rank."""
        for wrong in self._ask(("check", 0), seconds):
            if wrong:
                raise AssertionError(wrong)

    def rounds(self, count: int, *, seconds_each: float = 20.0) -> Series:
        """Seconds of each of so many steps of each side; a step takes as long as its slowest rank."""
        seconds_of_ranks = self._ask(("rounds", count), 60.0 + seconds_each * count)
        return {
            who: [max(rank[who][n] for rank in seconds_of_ranks) for n in range(count)] for who in seconds_of_ranks[0]
        }

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
        for process, end in zip(self._processes, self._ends, strict=True):
            process.join(5.0)
            end.close()
        self._processes, self._ends = [], []
        self._folder.cleanup()

    def _ask(self, request: tuple[str, int], seconds: float) -> list[Any]:
        if not self._ends:
            raise RankError("the ranks have been closed")
        for rank, end in enumerate(self._ends):
            try:
                end.send(request)
            except (BrokenPipeError, ConnectionError) as error:
                code = self._processes[rank].exitcode
                self.close()
                raise RankError(f"rank {rank} ended with exit code {code}") from error
        return self._answers(seconds)

    def _answers(self, seconds: float) -> list[Any]:
        """The answer of each rank; if one gives none, all are ended."""
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + seconds
        try:
            while len(answers) < RANKS:
                waiting = {end: rank for rank, end in enumerate(self._ends) if rank not in answers}
                ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
                if not ready:
                    raise RankError(f"ranks {sorted(waiting.values())} of {RANKS} did not answer in {seconds:.0f} s")
                for end in ready:
                    assert isinstance(end, Connection)
                    rank = waiting[end]
                    answers[rank] = self._answer(rank, end)
        except BaseException:
            self.close()
            raise
        return [answers[rank] for rank in range(RANKS)]

    def _answer(self, rank: int, end: Connection) -> Any:
        try:
            good, value = end.recv()
        except (EOFError, ConnectionError) as error:
            self._processes[rank].join(5.0)
            raise RankError(f"rank {rank} ended with exit code {self._processes[rank].exitcode}") from error
        if not good:
            raise RankError(f"rank {rank} of {RANKS}:\n{value}")
        return value


def _serve(end: Connection, rank: int, store: str, asked: Asked) -> None:
    """A rank: make the collections, then do what comes through the pipe until it is closed."""
    try:
        torch.set_num_threads(1)
        if any(name == "lo" for _, name in socket.if_nameindex()):
            # all ranks are on this host, whatever its name resolves to
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        join_group(rank, RANKS, store, stuck_seconds=STUCK_SECONDS)
        sides = [ours(), *([torchrec()] if asked.beside else [])]
        steppers = [Stepper(side, asked.shape, asked.strategy, OPTIMIZER) for side in sides]
        end.send((True, None))
        while True:
            task, count = end.recv()
            end.send((True, _checked(steppers, asked) if task == "check" else _timed(steppers, count)))
    except EOFError:
        # the one who asks is gone
        return
    except BaseException:
        end.send((False, traceback.format_exc()))


def _timed(steppers: Sequence[Stepper], count: int) -> dict[str, list[float]]:
    taken_of = turns(steppers, count, warm_up=1)
    names = {stepper.side.label: name for stepper, name in zip(steppers, (OURS, "torchrec"), strict=False)}
    return {names[side]: [clock for clock, _ in taken] for side, taken in taken_of.items()}


def _checked(steppers: Sequence[Stepper], asked: Asked) -> str:
    """The first fault, or "": in outputs of the first batch, or weights after a step of a smaller collection."""
    rank = dist.get_rank()
    try:
        ids, lengths = batch_of(asked.shape, rank, 0)
        expected = _looked_up(asked.shape, [weights_of(asked.shape, t) for t in range(asked.shape.T)], ids, lengths)
        for stepper in steppers:
            output = _by_name(stepper.side, stepper.model, asked.shape, ids, lengths).detach()
            assert_close(output, expected, TOLERANCE, f"rank {rank}: output of {stepper.side.label}")
        for stepper in steppers:
            _check_step(stepper.side, asked.strategy, rank)
    except AssertionError as error:
        return str(error)
    return ""


def _check_step(side: Library, strategy: str, rank: int) -> None:
    """The rows after one step are those that the gradients of all ranks' batches, over the number of ranks, lead to."""
    model = sharded_of(side, FEW, strategy, PLAIN, LR)
    tables = [weights_of(FEW, t) for t in range(FEW.T)]
    for other in range(RANKS):
        ids, lengths = batch_of(FEW, other, 0, vary=True)
        grad = torch.randn(FEW.B, FEW.T * FEW.D, generator=torch.Generator().manual_seed(other))
        if other == rank:
            torch.autograd.backward(_by_name(side, model, FEW, ids, lengths), grad)
        for t, (table, rows) in enumerate(zip(tables, _of_tables(FEW, ids, lengths), strict=True)):
            bags = torch.repeat_interleave(torch.arange(FEW.B), rows[1])
            table.index_add_(0, rows[0], grad[:, t * FEW.D : (t + 1) * FEW.D][bags], alpha=-LR / RANKS)
    ids, lengths = batch_of(FEW, rank, 1, vary=True)
    output = _by_name(side, model, FEW, ids, lengths).detach()
    expected = _looked_up(FEW, tables, ids, lengths)
    assert_close(output, expected, TOLERANCE, f"rank {rank}: output of {side.label} after a step")


def _by_name(side: Library, model: nn.Module, shape: Shape, ids: Tensor, lengths: Tensor) -> Tensor:
    """A lookup, columns in the order of the keys: TorchRec's output has the tables of rank 0 first."""
    pooled: Any = model(side.KeyedJaggedTensor(keys=keys_of(shape), values=ids, lengths=lengths))
    return torch.cat([pooled[key] for key in keys_of(shape)], dim=1)


def _of_tables(shape: Shape, ids: Tensor, lengths: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Ids and lengths [B] of each table."""
    each = lengths.view(shape.T, shape.B)
    return list(zip(torch.split(ids, each.sum(1).tolist()), each, strict=True))


def _looked_up(shape: Shape, tables: Sequence[Tensor], ids: Tensor, lengths: Tensor) -> Tensor:
    """The lookup in plain torch."""
    pooled = []
    for table, (rows, sizes) in zip(tables, _of_tables(shape, ids, lengths), strict=True):
        bags = torch.repeat_interleave(torch.arange(shape.B), sizes)
        pooled.append(torch.zeros(shape.B, shape.D).index_add_(0, bags, table[rows]))
    return torch.cat(pooled, dim=1)


def make(setting: Setting, *, strategy: str) -> Ready:
    """Ranks that have the collections of this strategy."""
    shape = SMALL if setting.small else FULL
    ranks = Ranks(Asked(shape, strategy, strategy in BESIDE and "torchrec" in setting.peers))
    return Ready(
        check=ranks.check, rounds=ranks.rounds, close=ranks.close, graph=False,
        notes={"ranks": RANKS, "backend": "gloo", "shape": str(shape)},
    )  # fmt: skip


CASES: Sequence[Case] = tuple(
    Case(f"sharded EBC step, {strategy}", "sharded", partial(make, strategy=strategy),
         frozenset({"cpu", "full"} if strategy in IN_CPU_SUITE else {"full"}), devices=frozenset({"cpu"}))
    for strategy in ("table_wise", "row_wise", "column_wise", "data_parallel", "mixed", "planned")
)  # fmt: skip
