"""Random sharding options for estimators, ours and TorchRec's: one description, built with either library's classes.

`golden` are the numbers that torchrec 1.8.0 gave for the first cases of `random_cases`; print them anew with
`python -m shardwise.perf.evidence.beside_planner golden`, where torchrec is installed.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import nn

TYPES = (
    "data_parallel", "table_wise", "column_wise", "row_wise", "table_row_wise", "table_column_wise", "grid_shard",
)  # fmt: skip
KERNELS = (
    "fused", "fused", "fused", "dense", "fused_uvm", "fused_uvm_caching", "fused_uvm_caching", "fused_triton", "quant",
    "quant_uvm_caching", "key_value", "dram_virtual_table",
)  # fmt: skip
OPTIMIZERS = ("", "SGD", "Adam", "RowWiseAdagrad", "Adagrad")
SMALL = 1024 * 1024


@dataclass(frozen=True)
class Library:
    """The classes of one library: its planner's `types`, estimators and the rest that options are made of."""

    types: ModuleType
    estimators: ModuleType
    cache_params: Any
    key_value_params: Any
    data_type: Any
    optimizers: dict[str, type]


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


def estimate(case: dict[str, Any], library: Library) -> tuple[Any, list[tuple[float, ...]], list[tuple[int, ...]]]:
    """A built option, and its shards' `Perf` and `Storage` as tuples."""
    types = library.types
    links = {} if case["links"] is None else dict(zip(("inter_host_bw", "intra_host_bw"), case["links"], strict=True))
    topology = types.Topology(
        case["world"], case["device"], local_world_size=case["local"], pod_size=case["pod"], **links,
        bwd_compute_multiplier=case["multipliers"][0],
        weighted_feature_bwd_compute_multiplier=case["multipliers"][1],
    )  # fmt: skip
    tensor: Any = torch.empty(
        case["rows"], case["columns"], device="meta", dtype=torch.float16 if case["half"] else torch.float32
    )
    if case["optimizer"]:
        tensor._optimizer_classes = [library.optimizers[case["optimizer"]]]
    constraint = types.ParameterConstraints(
        pooling_factors=case["pooling_factors"],
        num_poolings=case["num_poolings"],
        batch_sizes=case["batch_sizes"],
        is_weighted=case["weighted"],
        use_virtual_table=case["virtual"],
        key_value_params=None if case["l1_mib"] is None else library.key_value_params(max_l1_cache_size=case["l1_mib"]),
    )
    stats = case["histogram"] and library.estimators.EmbeddingOffloadStats(
        0.5, 12345, torch.tensor(case["histogram"]), case["rows"]
    )
    cached = case["load_factor"] is not None or stats or case["passes"]
    option = types.ShardingOption(
        name="t",
        tensor=tensor,
        module=("", Collection(case["processed"])),
        input_lengths=case["pooling_factors"],
        batch_size=case["batch_size"],
        sharding_type=case["sharding_type"],
        partition_by="device",
        compute_kernel=case["kernel"],
        shards=[types.Shard(size=size, offset=[0, 0]) for size in shard_sizes(case)],
        cache_params=library.cache_params(
            load_factor=case["load_factor"],
            prefetch_pipeline=case["prefetch"],
            stats=stats,
            multipass_prefetch_config=case["passes"] and SimpleNamespace(num_passes=case["passes"]),
        )
        if cached
        else None,
        is_pooled=case["pooled"],
        output_dtype=library.data_type.FP16 if case["half_output"] else None,
    )
    exchanges = (
        "POOLED_EMBEDDINGS_ALL_TO_ALL", "SEQUENCE_EMBEDDINGS_ALL_TO_ALL", "POOLED_EMBEDDINGS_REDUCE_SCATTER",
    )  # fmt: skip
    factor = case["sharder_load_factor"]
    data = types.SharderData(
        {} if factor is None else {"cache_load_factor": factor},
        dict.fromkeys(exchanges, (1, 2)) if case["half_exchange"] else {},
        types.StorageUsageType[case["usage"]],
    )
    constraints, sharders = {"t": constraint}, {option.module_type_key: data}
    library.estimators.EmbeddingPerfEstimator(topology, constraints, case["inference"]).estimate([option], sharders)
    library.estimators.EmbeddingStorageEstimator(
        topology, constraints, library.types.PipelineType[case["pipeline"]], case["at_peak"], case["inference"]
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
