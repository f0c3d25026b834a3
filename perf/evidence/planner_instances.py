"""Small random planning problems as TorchRec's planner has them: made-up options, many of them tied.

`types` is the module whose classes are used, TorchRec's `planner.torchrec.types` or ours, so that both can be given the same.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

# sharding type -> what a partitioner gives to it
PARTITION_BY = {
    "data_parallel": "uniform",
    "row_wise": "uniform",
    "table_wise": "device",
    "column_wise": "device",
    "table_row_wise": "host",
    "table_column_wise": "host",
    "grid_shard": "multi_host",
}
COLUMNS = 8
MIB = 2**20


class Module:
    """A collection that pools and has no tables of its own."""

    def modules(self) -> list[Any]:
        """Itself."""
        return [self]


@dataclass(frozen=True)
class Weight:
    """A table, as far as a planner looks at it."""

    shape: tuple[int, int]
    bytes_each: int = 4

    def element_size(self) -> int:
        """Bytes of an element."""
        return self.bytes_each


@dataclass(frozen=True)
class Instance:
    """Options of all tables and the devices to place them on."""

    options: list[Any]
    topology: Any


def instance(seed: int, types: Any) -> Instance:
    """The problem of this number: 2 to 8 tables on 1 to 4 hosts of 1 to 4 ranks, some of them too small for it.

    Times are sixteenths of a millisecond and sizes megabytes, few different ones, so that sums are exact and many tie.
    """
    draw = random.Random(seed)
    hosts, local = draw.choice([1, 2, 3, 4]), draw.choice([1, 2, 4])
    world = hosts * local
    room = draw.choice([40, 80, 200]) * MIB
    topology = types.Topology(
        world_size=world, compute_device="cuda", hbm_cap=room, ddr_cap=4 * room, local_world_size=local
    )
    options = []
    for table in range(draw.randint(2, 8)):
        # dependent tables lie on a host together
        tower = f"tower_{table % 2}" if draw.random() < 0.15 else None
        kinds = [kind for kind, by in PARTITION_BY.items() if tower is None or by == "host"]
        module = (draw.choice(["sparse", "dense.over"]), Module())
        weight = Weight((draw.choice([5, 64, 1000]), COLUMNS))
        for kind in draw.sample(kinds, draw.randint(1, len(kinds))):
            for kernel in draw.sample(["fused", "dense", "fused_uvm", "key_value"], draw.choice([1, 1, 2])):
                if kind == "data_parallel":
                    kernel = "dense"
                options.append(
                    types.ShardingOption(
                        name=f"table_{table}",
                        tensor=weight,
                        module=module,
                        input_lengths=[float(draw.choice([0, 1, 3]))],
                        batch_size=64,
                        sharding_type=kind,
                        partition_by=PARTITION_BY[kind],
                        compute_kernel=kernel,
                        shards=_shards(draw, types, kind, kernel, weight.shape[0], world, local),
                        dependency=tower,
                        is_pooled=draw.random() < 0.8,
                    )
                )
    return Instance(options, topology)


def _shards(draw: random.Random, types: Any, kind: str, kernel: str, rows: int, world: int, local: int) -> list[Any]:
    rectangles = {
        "data_parallel": (world, rows, COLUMNS),
        "row_wise": (world, rows // world, COLUMNS),
        "table_wise": (1, rows, COLUMNS),
        "column_wise": (2, rows, COLUMNS // 2),
        "table_row_wise": (local, rows // local, COLUMNS),
        "table_column_wise": (2, rows, COLUMNS // 2),
        "grid_shard": (2 * local, rows // local, COLUMNS // 2),
    }
    count, height, width = rectangles[kind]
    whole = draw.choice([0, 16, 32, 96]) * MIB
    size = whole if kind in ("data_parallel", "table_wise") else -(-whole // count)
    shards = []
    for number in range(count):
        parts = [draw.choice([0, 1, 2, 8]) / 16 for _ in range(4)]
        storage = types.Storage(hbm=0, ddr=size) if kernel == "fused_uvm" else types.Storage(hbm=size, ddr=0)
        offset = [height * number % rows, 0] if width == COLUMNS else [0, width * (number % 2)]
        shards.append(types.Shard([height, width], offset, storage, types.Perf(*parts)))
    return shards
