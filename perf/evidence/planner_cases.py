"""Random sharding options for planners, ours and TorchRec's: one description, built with either library's classes.

Also small planning problems, with many options tied, and the proposers and partitioners that go through them. The
numbers that torchrec 1.8.0 gave are printed anew by `python -m shardwise.perf.evidence planner --golden FILE`.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from shardwise.planner.torchrec.types import StorageUsageType

TYPES = (
    "data_parallel", "table_wise", "column_wise", "row_wise", "table_row_wise", "table_column_wise", "grid_shard",
)  # fmt: skip
KERNELS = (
    "fused", "fused", "fused", "dense", "fused_uvm", "fused_uvm_caching", "fused_uvm_caching", "fused_triton", "quant",
    "quant_uvm_caching", "key_value", "dram_virtual_table",
)  # fmt: skip
OPTIMIZERS = ("", "SGD", "Adam", "RowWiseAdagrad", "Adagrad")
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
PROPOSERS: dict[str, Callable[[Any], Any]] = {
    "greedy": lambda lib: lib.GreedyProposer(),
    "greedy by sum": lambda lib: lib.GreedyProposer(use_depth=False),
    "greedy, threshold 2": lambda lib: lib.GreedyProposer(threshold=2),
    "uniform": lambda lib: lib.UniformProposer(),
    "uniform by sum": lambda lib: lib.UniformProposer(use_depth=False),
    "grid": lambda lib: lib.GridSearchProposer(),
    "grid, at most 100": lambda lib: lib.GridSearchProposer(max_proposals=100),
    "dynamic": lambda lib: lib.DynamicProgrammingProposer(),
    "dynamic, 3 bins": lambda lib: lib.DynamicProgrammingProposer(hbm_bins_per_device=3),
}
PARTITIONERS: dict[str, Callable[[Any], Any]] = {
    "storage": lambda lib: lib.GreedyPerfPartitioner(),
    "perf": lambda lib: lib.GreedyPerfPartitioner(sort_by=lib.SortBy.PERF),
    "modules": lambda lib: lib.GreedyPerfPartitioner(balance_modules=True),
    "memory": lambda lib: lib.MemoryBalancedPartitioner(),
    "memory, loose": lambda lib: lib.MemoryBalancedPartitioner(max_search_count=3, tolerance=0.3, balance_modules=True),
}


class Collection(nn.Module):
    """A module as estimators see it, with a feature processor for table "t" or without."""

    def __init__(self, processed: bool) -> None:
        super().__init__()
        if processed:
            self._feature_processor = nn.Module()
            self._feature_processor.feature_processor_modules = nn.ModuleDict({"t": nn.Identity()})


def random_cases(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Descriptions of options, the same for the same seed: plain numbers and texts."""
    draw = random.Random(seed)
    return [_case(draw) for _ in range(count)]


def _case(draw: random.Random) -> dict[str, Any]:
    local = draw.choice((1, 2, 4, 8))
    hosts = draw.choice((1, 1, 2, 4, 8))
    device = draw.choice(("cuda", "cuda", "cuda", "cpu"))
    features = draw.randint(1, 3)
    kernel = draw.choice(("dense", "fused", "quant") if device == "cpu" else KERNELS)
    rows, columns = draw.randint(1, 5_000_000), 4 * draw.randint(1, 96)
    kind = draw.choice(TYPES)
    pod = draw.choice((None, None, 2)) if hosts > 1 else None
    return {
        "sharding_type": kind,
        "kernel": kernel,
        "world": local * hosts,
        "local": local,
        "pod": pod,
        "device": device,
        "links": draw.choice((None, (1.5e7, 7e8))),
        "multipliers": draw.choice(((2, 1), (2, 1), (1.5, 1.25))),
        "rows": rows,
        "columns": columns,
        "width": draw.choice([width for width in range(4, columns + 1, 4) if columns % width == 0]),
        "half": draw.random() < 0.3,
        "pooling_factors": [round(draw.uniform(0.1, 60), 3) for _ in range(features)],
        "num_poolings": draw.choice((None, [round(draw.uniform(0.5, 2), 2) for _ in range(features)])),
        "batch_sizes": draw.choice((None, [draw.randint(1, 9000) for _ in range(features)])),
        "batch_size": draw.randint(1, 9000),
        "pooled": draw.random() < 0.6,
        "weighted": draw.random() < 0.2,
        "processed": draw.random() < 0.1,
        "half_exchange": draw.random() < 0.2,
        "half_output": draw.random() < 0.2,
        "optimizer": draw.choice(OPTIMIZERS),
        "load_factor": draw.choice((None, 0.0, 0.35)),
        "sharder_load_factor": draw.choice((None, 0.1)),
        "histogram": draw.choice((None, [draw.randint(0, 9) for _ in range(draw.randint(1, 12))])),
        "prefetch": draw.random() < 0.3,
        "passes": draw.choice((None, 3)),
        "usage": draw.choice(("BASE", "BASE", "BASE_QUANT", "DEFAULT")),
        "pipeline": draw.choice(("NONE", "TRAIN_BASE", "TRAIN_SPARSE_DIST", "TRAIN_PREFETCH_SPARSE_DIST")),
        "at_peak": draw.random() < 0.5,
        "inference": draw.random() < 0.15,
        "l1_mib": draw.choice((None, 1, 4096)),
        "virtual": draw.random() < 0.05,
    }


def shard_sizes(case: dict[str, Any]) -> list[list[int]]:
    """Rows and columns of the shards, as both libraries cut them."""
    rows, columns, width, kind = case["rows"], case["columns"], case["width"], case["sharding_type"]
    group = case["local"] * (case["pod"] or 1)
    parts = {"row_wise": case["world"], "table_row_wise": group, "grid_shard": group}.get(kind, 1)
    block = -(-rows // parts)
    heights = [max(0, min(block, rows - block * part)) for part in range(parts)]
    widths = [width] * (columns // width) if kind in ("column_wise", "table_column_wise", "grid_shard") else [columns]
    copies = case["world"] if kind == "data_parallel" else 1
    return [[height, wide] for wide in widths for height in heights] * copies


def estimate(case: dict[str, Any], library: Any) -> tuple[Any, list[tuple[float, ...]], list[tuple[int, ...]]]:
    """A built option, and its shards' `Perf` and `Storage` as tuples."""
    links = {} if case["links"] is None else dict(zip(("inter_host_bw", "intra_host_bw"), case["links"], strict=True))
    topology = library.Topology(
        case["world"], case["device"], local_world_size=case["local"], pod_size=case["pod"], **links,
        bwd_compute_multiplier=case["multipliers"][0],
        weighted_feature_bwd_compute_multiplier=case["multipliers"][1],
    )  # fmt: skip
    tensor: Any = torch.empty(
        case["rows"], case["columns"], device="meta", dtype=torch.float16 if case["half"] else torch.float32
    )
    if case["optimizer"]:
        rowwise = case["optimizer"] == "RowWiseAdagrad"
        tensor._optimizer_classes = [library.RowWiseAdagrad if rowwise else getattr(torch.optim, case["optimizer"])]
    constraint = library.ParameterConstraints(
        pooling_factors=case["pooling_factors"],
        num_poolings=case["num_poolings"],
        batch_sizes=case["batch_sizes"],
        is_weighted=case["weighted"],
        use_virtual_table=case["virtual"],
        key_value_params=None if case["l1_mib"] is None else library.KeyValueParams(max_l1_cache_size=case["l1_mib"]),
    )
    stats = case["histogram"] and library.EmbeddingOffloadStats(
        0.5, 12345, torch.tensor(case["histogram"]), case["rows"]
    )
    cached = case["load_factor"] is not None or stats or case["passes"]
    option = library.ShardingOption(
        name="t",
        tensor=tensor,
        module=("", Collection(case["processed"])),
        input_lengths=case["pooling_factors"],
        batch_size=case["batch_size"],
        sharding_type=case["sharding_type"],
        partition_by="device",
        compute_kernel=case["kernel"],
        shards=[library.Shard(size=size, offset=[0, 0]) for size in shard_sizes(case)],
        cache_params=library.CacheParams(
            load_factor=case["load_factor"],
            prefetch_pipeline=case["prefetch"],
            stats=stats,
            multipass_prefetch_config=case["passes"] and SimpleNamespace(num_passes=case["passes"]),
        )
        if cached
        else None,
        is_pooled=case["pooled"],
        output_dtype=library.DataType.FP16 if case["half_output"] else None,
    )
    exchanges = (
        "POOLED_EMBEDDINGS_ALL_TO_ALL", "SEQUENCE_EMBEDDINGS_ALL_TO_ALL", "POOLED_EMBEDDINGS_REDUCE_SCATTER",
    )  # fmt: skip
    factor = case["sharder_load_factor"]
    data = library.SharderData(
        {} if factor is None else {"cache_load_factor": factor},
        dict.fromkeys(exchanges, (1, 2)) if case["half_exchange"] else {},
        getattr(library, "StorageUsageType", StorageUsageType)[case["usage"]],
    )
    constraints, sharders = {"t": constraint}, {option.module_type_key: data}
    library.EmbeddingPerfEstimator(topology, constraints, case["inference"]).estimate([option], sharders)
    library.EmbeddingStorageEstimator(
        topology, constraints, library.PipelineType[case["pipeline"]], case["at_peak"], case["inference"]
    ).estimate([option], sharders)
    perfs = [shard.perf for shard in option.shards]
    storages = [shard.storage for shard in option.shards]
    return (
        option,
        [
            (p.fwd_compute, p.fwd_comms, p.bwd_compute, p.bwd_comms, p.input_dist_comms, p.prefetch_compute)
            for p in perfs
        ],
        [(s.hbm, s.ddr, s.ssd) for s in storages],
    )


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


def instance(seed: int, library: Any) -> Instance:
    """The problem of this number: 2 to 8 tables on 1 to 4 hosts of 1 to 4 ranks, some of them too small for it.

    Times are sixteenths of a millisecond and sizes megabytes, few different ones, so that sums are exact and many tie.
    """
    draw = random.Random(seed)
    hosts, local = draw.choice([1, 2, 3, 4]), draw.choice([1, 2, 4])
    world = hosts * local
    room = draw.choice([40, 80, 200]) * MIB
    topology = library.Topology(
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
                    library.ShardingOption(
                        name=f"table_{table}",
                        tensor=weight,
                        module=module,
                        input_lengths=[float(draw.choice([0, 1, 3]))],
                        batch_size=64,
                        sharding_type=kind,
                        partition_by=PARTITION_BY[kind],
                        compute_kernel=kernel,
                        shards=_shards(draw, library, kind, kernel, weight.shape[0], world, local),
                        dependency=tower,
                        is_pooled=draw.random() < 0.8,
                    )
                )
    return Instance(options, topology)


def _shards(draw: random.Random, library: Any, kind: str, kernel: str, rows: int, world: int, local: int) -> list[Any]:
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
        storage = library.Storage(hbm=0, ddr=size) if kernel == "fused_uvm" else library.Storage(hbm=size, ddr=0)
        offset = [height * number % rows, 0] if width == COLUMNS else [0, width * (number % 2)]
        shards.append(library.Shard([height, width], offset, storage, library.Perf(*parts)))
    return shards
