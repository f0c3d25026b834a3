"""What TorchRec's enumerator and ours list for the same models on the same machines."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any

import torch
from torch import nn

import shardwise
from shardwise.planner.torchrec import offered_options as torchrec_options
from shardwise.planner.torchrec import types
from shardwise.planner.torchrec.enumerators import EmbeddingEnumerator
from shardwise.sharding import EmbeddingBagCollectionSharder, EmbeddingCollectionSharder

TOPOLOGIES: dict[str, dict[str, Any]] = {
    "4 ranks": {"world_size": 4, "compute_device": "cuda"},
    "2 hosts of 8": {"world_size": 16, "compute_device": "cuda", "local_world_size": 8},
    "pods of 2 hosts": {"world_size": 8, "compute_device": "cuda", "local_world_size": 2, "pod_size": 2},
    "uneven memory": {"world_size": 3, "compute_device": "cuda", "custom": {"hbm_cap": [10, 20, 40]}},
    "CPU": {"world_size": 4, "compute_device": "cpu"},
}
CONSTRAINTS: dict[str, dict[str, dict[str, Any]]] = {
    "no constraints": {},
    "constraints": {
        "t3": {
            "sharding_types": ["column_wise", "grid_shard", "table_wise"], "min_partition": 32,
            "pooling_factors": [7.5], "compute_kernels": ["fused", "key_value"],
        },
        "s1": {"compute_kernels": ["fused_uvm_caching"]},
    },
}  # fmt: skip


class _Bags(EmbeddingBagCollectionSharder):
    def sharding_types(self, compute_device_type: str) -> list[str]:
        return torchrec_options.sharding_types(True, compute_device_type)

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        return torchrec_options.compute_kernels(sharding_type, compute_device_type)


class _Rows(EmbeddingCollectionSharder):
    def sharding_types(self, compute_device_type: str) -> list[str]:
        return torchrec_options.sharding_types(False, compute_device_type)

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        return torchrec_options.compute_kernels(sharding_type, compute_device_type)


def compare() -> Iterator[tuple[str, int, int, bool]]:
    """What is enumerated, how many options ours and TorchRec's are, and whether they are the same."""
    torchrec, their_types = import_module("torchrec"), import_module("torchrec.distributed.planner.types")
    enumerators = import_module("torchrec.distributed.planner.enumerators")
    sharders = import_module("torchrec.distributed.sharding_plan").get_default_sharders()
    for machines, topology in TOPOLOGIES.items():
        for asked, constraints in CONSTRAINTS.items():
            if topology["compute_device"] == "cpu" and constraints:
                continue
            theirs = _listed(their_types, enumerators.EmbeddingEnumerator, topology, constraints)
            ours = _listed(types, EmbeddingEnumerator, topology, constraints)
            listed = theirs.enumerate(_model(torchrec), sharders)
            found = ours.enumerate(_model(shardwise), [_Bags(), _Rows()])
            same = sorted(map(_said, found)) == sorted(map(_said, listed))
            # tables come in the same order; TorchRec's order of a table's types depends on the process
            order = [list(dict.fromkeys(o.fqn for o in one)) for one in (found, listed)]
            yield f"{machines}, {asked}", len(found), len(listed), same and order[0] == order[1]


def _listed(library: Any, enumerator: Any, topology: dict[str, Any], constraints: dict[str, dict[str, Any]]) -> Any:
    arguments = dict(topology)
    custom = arguments.pop("custom", None)
    if custom:
        arguments["custom_topology_data"] = library.CustomTopologyData(custom, topology["world_size"])
    asked = {name: library.ParameterConstraints(**said) for name, said in constraints.items()}
    return enumerator(library.Topology(**arguments), 512, asked or None)


def _model(library: Any) -> nn.Module:
    bags = [
        library.EmbeddingBagConfig(
            name=f"t{i}", embedding_dim=dim, num_embeddings=1000 + 37 * i, feature_names=[f"f{i}"]
        )
        for i, dim in enumerate((8, 128, 256, 384, 512))
    ]
    rows = [
        library.EmbeddingConfig(name=f"s{i}", embedding_dim=256, num_embeddings=2000 + i, feature_names=[f"g{i}"])
        for i in range(2)
    ]
    made = nn.Module()
    made.bags = library.EmbeddingBagCollection(device=torch.device("meta"), tables=bags)
    made.inner = nn.Module()
    made.inner.rows = library.EmbeddingCollection(device=torch.device("meta"), tables=rows)
    return made


def _said(option: Any) -> tuple[Any, ...]:
    shards = tuple(
        (*shard.size, *shard.offset, shard.storage.hbm, shard.storage.ddr, shard.storage.ssd, shard.perf.total,
         shard.perf.input_dist_comms)
        for shard in option.shards
    )  # fmt: skip
    kind = option.sharding_type, option.compute_kernel, option.partition_by
    return option.fqn, *kind, shards, option.is_pooled, option.is_weighted, tuple(option.input_lengths)
