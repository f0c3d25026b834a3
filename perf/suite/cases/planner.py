"""Cases of the suite: how long planning takes, TorchRec's planner beside ours where it takes less than minutes.

Tables are on meta, cards are of 80 GiB, and each side prices and searches as it does by itself.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from shardwise.perf.suite.case import (
    Call,
    Case,
    Ready,
    Setting,
)
from shardwise.perf.suite.libraries import Library, ours, torchrec
from shardwise.perf.suite.workloads import CRITEO_ROWS
from shardwise.planner.tables import Feature, Table

GIB = 1 << 30
OPTIMIZER = "RowWiseAdagrad"


@dataclass(frozen=True)
class Problem:
    """Tables (rows, dim, mean ids a bag) and ranks, 8 to a host; `bearable`: TorchRec's planner needs seconds at most.

    TorchRec's planner takes 100 s of CPU time for 200 tables on 16 ranks.
    """

    tables: Sequence[tuple[int, int, float]]
    ranks: int
    bearable: bool
    batch: int = 8192


def criteo() -> Problem:
    """The 26 tables of TorchRec's benchmark, one id a bag."""
    return Problem([(rows, 128, 1.0) for rows in CRITEO_ROWS], 8, bearable=True)


def like_production() -> Problem:
    """200 made-up tables."""
    tables = [(table.num_embeddings, table.embedding_dim, table.features[0].pooling_factor) for table in generated(200)]
    return Problem(tables, 16, bearable=False)


def generated(count: int, seed: int = 0) -> list[Table]:
    """`count` tables as production models have them: many small ones, a few huge, lengths from 1 to some hundreds."""
    draw = np.random.default_rng(seed)
    rows = np.exp(draw.normal(11.5, 2.6, count)).clip(4, 2e8).astype(int)
    dims = draw.choice([16, 32, 64, 96, 128, 192, 256], count, p=[0.1, 0.15, 0.3, 0.1, 0.25, 0.05, 0.05])
    lengths = np.exp(draw.normal(1.2, 1.4, count)).clip(1, 500).round(1)
    return [
        Table(
            f"table_{n}", int(rows[n]), int(dims[n]), features=(Feature(f"feature_{n}", float(lengths[n])),),
            optimizer=OPTIMIZER,
        )
        for n in range(count)
    ]  # fmt: skip


def _planning(library: Library, problem: Problem) -> Callable[[], Any]:
    """Plan with a planner that is made anew, as a program does that plans once."""
    configs = [
        library.EmbeddingBagConfig(name=f"t{t}", num_embeddings=rows, embedding_dim=dim, feature_names=[f"f{t}"])
        for t, (rows, dim, _) in enumerate(problem.tables)
    ]
    model = torch.nn.ModuleDict({"bags": library.EmbeddingBagCollection(tables=configs, device=torch.device("meta"))})
    constraints = {
        f"t{t}": library.ParameterConstraints(pooling_factors=[length])
        for t, (_, _, length) in enumerate(problem.tables)
    }

    def plan() -> Any:
        topology = library.Topology(
            problem.ranks, "cuda", hbm_cap=80 * GIB, local_world_size=min(8, problem.ranks)
        )  # fmt: skip
        planner = library.EmbeddingShardingPlanner(
            topology=topology, batch_size=problem.batch, constraints=constraints, debug=False
        )  # fmt: skip
        with _quiet():
            return planner.plan(model, library.get_default_sharders())

    return plan


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the report that a planner logs."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


def check(problem: Problem, plan: Any, who: str) -> None:
    """Raise AssertionError unless every table is cut into shards that cover it, on ranks that there are."""
    (tables,) = plan.plan.values()
    if {*tables} != {f"t{t}" for t in range(len(problem.tables))}:
        raise AssertionError(f"{who} planned {sorted(tables)}")
    for t, (rows, dim, _) in enumerate(problem.tables):
        sharding = tables[f"t{t}"]
        if sharding.sharding_spec is None:
            continue
        shards = sharding.sharding_spec.shards
        covered = sum(height * width for height, width in (shard.shard_sizes for shard in shards))
        places = Counter(tuple(shard.shard_offsets) for shard in shards if 0 not in shard.shard_sizes)
        if covered != rows * dim or max(places.values()) > 1:
            raise AssertionError(f"{who}: shards of table t{t} cover {covered} of {rows * dim} elements: {places}")
        if not {*sharding.ranks} <= {*range(problem.ranks)}:
            raise AssertionError(f"{who}: table t{t} is on ranks {sharding.ranks} of {problem.ranks}")


def make(setting: Setting, *, problem: Callable[[], Problem]) -> Ready:
    """Planning of one problem."""
    asked = problem()
    if setting.small:
        asked = Problem([(min(rows, 1000), dim, length) for rows, dim, length in asked.tables[:4]], 2, asked.bearable)
    planning: dict[str, Call] = {"shardwise": _planning(ours(), asked)}
    if asked.bearable and "torchrec" in setting.peers:
        planning["torchrec"] = _planning(torchrec(), asked)

    def check_all() -> None:
        for who, plan in planning.items():
            check(asked, plan(), who)

    return Ready(
        calls=[planning["shardwise"]], check=check_all, graph=False,
        peers={who: [plan] for who, plan in planning.items() if who != "shardwise"},
        notes={"tables": len(asked.tables), "ranks": asked.ranks},
    )  # fmt: skip


CASES: Sequence[Case] = (
    Case("planner, 26 Criteo tables on 8 ranks", "planner", partial(make, problem=criteo), frozenset({"cpu", "full"}),
         devices=frozenset({"cpu"}), slow=True),
    Case("planner, 200 tables on 16 ranks", "planner", partial(make, problem=like_production),
         frozenset({"cpu", "full"}), devices=frozenset({"cpu"}), slow=True),
)  # fmt: skip
