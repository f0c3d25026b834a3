"""TorchRec's planner types: topologies, storage and time, searches in one variable; what reservations keep."""

from __future__ import annotations

import copy
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from shardwise import EmbeddingBagCollection, EmbeddingBagConfig
from shardwise.planner import constants
from shardwise.planner.errors import PlannerError, PlannerErrorType
from shardwise.planner.torchrec import types, utils
from shardwise.planner.torchrec.reservations import (
    FixedAbsoluteStorageReservation,
    FixedPercentageStorageReservation,
    HeuristicalStorageReservation,
    InferenceStorageReservation,
    ModelStorageReservation,
    SKUAwareStorageReservation,
)
from shardwise.planner.torchrec.types import (
    BasicCommsBandwidths,
    CollectiveType,
    CustomTopologyData,
    HardwareConfig,
    KernelConfig,
    ParameterConstraints,
    Perf,
    Shard,
    ShardingOption,
    Storage,
    StorageReservation,
    Topology,
    TopologyFactory,
    TrainerConfig,
)
from shardwise.sharding import EmbeddingBagCollectionSharder

GIB = 1024**3


def option(**changed: Any) -> ShardingOption:
    module = SimpleNamespace(embedding_bag_configs=lambda: [], is_weighted=lambda: False)
    shards = [Shard([100, 8], [0, 8 * k], Storage(10 + k, 1), Perf(1, 2, 3, 4)) for k in range(2)]
    arguments: dict[str, Any] = {
        "name": "t", "tensor": SimpleNamespace(shape=(100, 16)), "module": ("sparse.ebc", module),
        "input_lengths": [2.0, 3.0], "batch_size": 64, "sharding_type": "column_wise", "partition_by": "device",
        "compute_kernel": "fused", "shards": shards,
    }  # fmt: skip
    return ShardingOption(**{**arguments, **changed})


def test_a_topology_has_torchrecs_defaults() -> None:
    topology = Topology(16, "cuda", local_world_size=8)
    assert topology.hbm == [32 * GIB] * 16 and topology.ddr == [128 * GIB] * 16
    assert {d.storage.ssd for d in topology.devices} == {2048 * GIB}
    assert topology.intra_host_bw == 600 * GIB / 1000 and topology.inter_host_bw == 12.5 * GIB / 1000
    assert (topology.hosts, topology.intra_group_size) == (2, 8)
    assert Topology(8, "cpu").hbm == [0] * 8
    assert Topology(8, "cuda").local_world_size == 8


def test_torchrecs_arguments_stand_in_torchrecs_order() -> None:
    links = BasicCommsBandwidths(7, 8)
    given = CustomTopologyData({"ddr_cap": [5, 6, 7, 8]}, 4)
    topology = Topology(4, "cuda", 1, 2, 3, 2, 2, 10, 20, 30, 40, 50, 60, 3, given, 1.5, 1.25, links, True)
    assert [d.storage for d in topology.devices] == [Storage(1, ddr, 3) for ddr in (5, 6, 7, 8)]
    assert topology.intra_group_size == 4
    speeds = (topology.hbm_mem_bw, topology.ddr_mem_bw, topology.ssd_mem_bw, topology.hbm_to_ddr_mem_bw)
    assert speeds == (10, 20, 30, 40)
    assert (topology.inter_host_bw, topology.intra_host_bw) == (7, 8)
    assert topology.bwd_compute_multiplier == 3 and topology.weighted_feature_bwd_compute_multiplier == 1.5
    assert topology.uneven_sharding_perf_multiplier == 1.25


def test_a_card_brings_its_memory_and_hbm_cap_wins() -> None:
    assert Topology(8, "cuda", card="h100").hbm == [79 * GIB] * 8
    assert Topology(8, "cuda", 10 * GIB, card="h100").hbm == [10 * GIB] * 8


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"world_size": 0}, "world_size must be 1 or more, got 0"),
        ({"compute_device": "tpu"}, "compute_device must be one of cpu, cuda, mtia, got 'tpu'"),
        ({"local_world_size": 3}, "world_size=8 does not divide into hosts of local_world_size=3"),
        ({"pod_size": 9}, "pod_size=9 must be from 1 to world_size=8"),
        ({"card": "tpu"}, "card 'tpu' is not known"),
        ({"inter_host_bw": 0}, "inter_host_bw must be positive"),
        ({"hbm_cap": -1}, "hbm_cap must be 0 or more bytes, got -1"),
        ({"custom_topology_data": CustomTopologyData({"hbm_cap": [1]}, 1)}, "1 numbers for hbm_cap, the world 8 ranks"),
    ],
)
def test_machines_that_cannot_be_are_refused(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Topology(**{"world_size": 8, "compute_device": "cuda", **arguments})


def test_what_a_reservation_takes_is_gone_from_a_copy_alone() -> None:
    topology = Topology(2, "cuda", hbm_cap=100)
    left = copy.deepcopy(topology)
    left.devices[1].storage -= Storage(30, 0)
    assert left.hbm == [100, 70] and topology.hbm == [100, 100]
    assert left._hash() != topology._hash() == Topology(2, "cuda", hbm_cap=100)._hash()


def test_a_topology_prints_what_decides() -> None:
    text = repr(Topology(16, "cuda", local_world_size=8, card="h100"))
    assert "16 ranks (cuda h100) on 2 hosts of 8" in text and "HBM 79 GiB, DDR 128 GiB" in text
    assert "between hosts 13.42" in text and "\n" not in text


def test_all_reduce_counts_a_card_for_each_rank_of_a_host() -> None:
    links = BasicCommsBandwidths(inter_host_bw=2, intra_host_bw=30)
    assert links.get_bw(8, 8, CollectiveType.ALL_TO_ALL) == 30
    assert links.get_bw(8, 16, CollectiveType.ALL_GATHER) == 2
    assert links.get_bw(8, 8, CollectiveType.ALL_REDUCE) == 16
    assert links == BasicCommsBandwidths(2, 30) != BasicCommsBandwidths(2, 31)


@pytest.mark.parametrize("data", [{"hbm": [1, 2]}, {"hbm_cap": [1]}])
def test_custom_topology_data_must_be_of_every_rank(data: dict[str, list[int]]) -> None:
    with pytest.raises(ValueError, match="hbm"):
        CustomTopologyData(data, 2)


@pytest.mark.parametrize(
    ("device", "kernel", "arguments", "expected"),
    [
        ("cpu", "dense", {}, 10),
        ("cpu", "fused", {}, 20),
        ("cpu", "fused_uvm", {}, None),
        ("mtia", "dense", {}, 500),
        ("cuda", "dense", {}, 500),
        ("cuda", "fused_triton", {}, 1000),
        ("cuda", "fused_uvm", {}, 10),
        ("cuda", "fused_uvm_caching", {}, (0.2 * 1000 + 0.8 * 100) / 10),
        ("cuda", "fused_uvm_caching", {"caching_ratio": 0.5}, 55),
        ("cuda", "fused_uvm_caching", {"prefetch_pipeline": True}, 1000),
        ("cuda", "quant_uvm_caching", {"caching_ratio": 0.5, "prefetch_pipeline": True}, 55),
        ("cuda", "key_value", {"ssd_mem_bw": 3}, 3),
        ("cuda", "dram_virtual_table", {}, 100),
        ("cuda", "customized_kernel", {}, None),
        ("meta", "fused", {}, None),
    ],
)
def test_kernels_read_at_torchrecs_speed(
    device: str, kernel: str, arguments: dict[str, Any], expected: float | None
) -> None:
    assert constants.kernel_bw_lookup(device, kernel, 1000, 20, 100, **arguments) == expected


def test_perf_and_storage_add_up() -> None:
    both = Perf(1, 2, 3, 4, 5, 6) + Perf(10, 20, 30, 40, 50, 60)
    assert both == Perf(11, 22, 33, 44, 55, 66)
    # the distribution of the input does not count
    assert both.total == 11 + 22 + 33 + 44 + 66
    assert Storage(1, 2, 3) + Storage(1, 1, 1) - Storage(2, 2, 2) == Storage(0, 1, 2)
    assert Storage(1, 2).fits_in(Storage(1, 2)) and not Storage(1, 2, 1).fits_in(Storage(5, 5))


def test_an_option_sums_its_shards_and_shares_its_table_with_copies() -> None:
    original = option()
    twin = copy.deepcopy(original)
    twin.shards[0].rank = 3
    assert original.fqn == "sparse.ebc.t" and original.num_inputs == 2 and original.num_shards == 2
    assert original.total_storage == Storage(21, 2) and original.total_perf == 20
    assert twin.tensor is original.tensor and twin.module is original.module
    assert original.get_shards_assignment() == [None, None] and twin.get_shards_assignment() == [3, None]
    assert twin.storage_hash() == original.storage_hash() != option(compute_kernel="fused_uvm").storage_hash()
    # as TorchRec 1.8.0 hashes it: plans that were saved there are found here
    assert original.storage_hash() == 35803030964513091


def test_a_sequence_collection_is_not_pooled_nor_is_what_contains_it() -> None:
    rows = SimpleNamespace(embedding_configs=lambda: [], named_parameters=lambda: [("embeddings.t.weight", None)])
    around = SimpleNamespace(modules=lambda: [rows])
    assert option().is_pooled and not option(module=("", rows)).is_pooled
    assert not option(module=("", around)).is_pooled and option(module=("", around), name="u").is_pooled


def test_units_and_placements() -> None:
    assert utils.gb_to_bytes(1.5) == 1536 * 1024**2 == utils.mb_to_bytes(1536)
    assert utils.bytes_to_gb(GIB) == 1 == utils.bytes_to_mb(1024**2)
    assert utils.placement("cuda", 9, 8) == "rank:9/cuda:1" and utils.placement("cpu", 9, 8) == "rank:9/cpu"
    assert utils.storage_repr_in_gb(Storage(GIB, 0)) == "Storage(hbm = 1.0 GB, ddr = 0.0 GB)"
    assert utils.storage_repr_in_gb(None) == "" and utils.prod([2, 3, 4]) == 24


@pytest.mark.parametrize("largest", [0, 1, 41, 99, 100])
def test_binary_search_finds_the_largest_that_holds(largest: int) -> None:
    search, tried = utils.BinarySearchPredicate(0, 100, 0), []
    probe = search.next(True)
    while probe is not None:
        tried.append(probe)
        probe = search.next(probe <= largest)
    assert max((t for t in tried if t <= largest), default=None) == largest and len(tried) <= 7


def test_luus_jaakola_takes_torchrecs_steps() -> None:
    search = utils.LuusJaakolaSearch(0, 1000, max_iterations=50, seed=42)
    probes, cost = [], 0.0
    while (probe := search.next(cost)) is not None:
        probes.append(probe)
        cost = (probe - 333) ** 2
    # the first four as TorchRec 1.8.0 takes them
    assert probes[:4] == pytest.approx([882.2692632675171, 1000, 647.9967832565308, 439.8483872413635], rel=1e-12)
    assert search.best()[0] == pytest.approx(312.42350459098816, rel=1e-12)


def test_the_first_configuration_that_speaks_decides() -> None:
    trainer = TrainerConfig(world_size=8, local_world_size=4, ddr_cap_bytes=100 * GIB)
    hardware = HardwareConfig(hbm_cap_bytes=80 * GIB, ddr_cap_bytes=101 * GIB, hbm_mem_bw=5e9)
    topology = TopologyFactory.create_topology(trainer, hardware)
    assert topology.hbm == [80 * GIB] * 8 and topology.ddr == [100 * GIB] * 8 and topology.local_world_size == 4
    assert topology.hbm_mem_bw == constants.HBM_MEM_BW
    measured = KernelConfig(use_hardware_based_bandwidth=True)
    assert TopologyFactory.create_topology(trainer, hardware, measured).hbm_mem_bw == 5e9
    with pytest.warns(UserWarning, match=r"planning with the 40.0 GiB of TrainerConfig, the hardware has 80.0 GiB"):
        TopologyFactory.create_topology(TrainerConfig(8, hbm_cap_bytes=40 * GIB), hardware)
    with pytest.raises(ValueError, match="needs a world_size"):
        TopologyFactory.create_topology(TrainerConfig())


def test_hashes_need_an_enumerator_that_has_enumerated() -> None:
    enumerator: Any = SimpleNamespace(last_stored_search_space=None)
    reservation: Any = SimpleNamespace(last_reserved_topology=Topology(2, "cuda"))
    with pytest.raises(ValueError, match="before the enumerator"):
        types.hash_planner_context_inputs(Topology(2, "cuda"), 512, enumerator, reservation, None)
    enumerator.last_stored_search_space = [option()]

    def hashed(hbm: int, batch: int) -> int:
        return types.hash_planner_context_inputs(Topology(2, "cuda", hbm), batch, enumerator, reservation, None)

    # storage counts to the nearest 100 GiB
    assert hashed(60 * GIB, 512) == hashed(90 * GIB, 512) != hashed(60 * GIB, 256)


BATCH = 300
CONSTRAINTS = {
    "t1": ParameterConstraints(pooling_factors=[20.0]),
    "t2": ParameterConstraints(pooling_factors=[3.5], batch_sizes=[100]),
}
IDS = BATCH * 1 + BATCH * 20 + 100 * 3.5


class Model(nn.Module):
    """Three tables, and dense layers of 60,600 parameters and 401 numbers in buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.ebc = EmbeddingBagCollection(
            [EmbeddingBagConfig(1000 * (n + 1), 16, f"t{n}", feature_names=[f"f{n}"]) for n in range(3)], device="meta"
        )
        self.over, self.norm = nn.Linear(300, 200), nn.BatchNorm1d(200)


def reserved(reservation: StorageReservation, device: str, constraints: Any = None, module: Any = None) -> Topology:
    machines = Topology(2, device, hbm_cap=10 * GIB, ddr_cap=20 * GIB)
    return reservation.reserve(machines, BATCH, module or Model(), [EmbeddingBagCollectionSharder()], constraints)


# by torchrec 1.8.0 for this model: device, reservation, bytes of HBM and of DDR that are left
GOLDEN = [
    ("cuda", FixedPercentageStorageReservation(0.2), 8589934592, 21474836480),
    ("cuda", FixedAbsoluteStorageReservation.from_gb(1.5), 9126805504, 21474836480),
    ("cuda", HeuristicalStorageReservation(0.15), 9124285496, 21474836480),
    ("cuda", HeuristicalStorageReservation(0.1, 2.0), 9662126008, 21474836480),
    ("cuda", HeuristicalStorageReservation(0.1, dense_tensor_estimate=10**6), 9661612416, 21474836480),
    ("cuda", InferenceStorageReservation(0.05), 10200250120, 21474836480),
    ("cpu", FixedPercentageStorageReservation(0.2), 0, 21474836480),
    ("cpu", FixedAbsoluteStorageReservation.from_gb(1.5), 0, 21474836480),
    ("cpu", HeuristicalStorageReservation(0.15), 0, 21472316472),
    ("cpu", InferenceStorageReservation(0.05), 0, 21474539272),
]


@pytest.mark.parametrize(("device", "reservation", "hbm", "ddr"), GOLDEN)
def test_torchrecs_reservations_leave_what_torchrec_leaves(
    device: str, reservation: StorageReservation, hbm: int, ddr: int
) -> None:
    left = reserved(reservation, device, CONSTRAINTS)
    assert (left.hbm, left.ddr) == ([hbm] * 2, [ddr] * 2)
    again = reservation.last_reserved_topology
    assert again is not None and (again.hbm, again.ddr) == (left.hbm, left.ddr)


def test_a_reserve_that_knows_its_device_is_the_same_on_another() -> None:
    """With the margin of its own device, 0.15 of 10 GiB, it is the heuristic there, and keeps no more elsewhere."""
    margin = 10 * GIB - int(0.85 * 10 * GIB)
    heuristic = reserved(HeuristicalStorageReservation(0.15), "cuda", CONSTRAINTS)
    assert reserved(SKUAwareStorageReservation(margin), "cuda", CONSTRAINTS).hbm == heuristic.hbm

    def taken(reservation: StorageReservation, hbm: int) -> set[int]:
        machines = Topology(2, "cuda", hbm_cap=hbm)
        left = reservation.reserve(machines, BATCH, Model(), [EmbeddingBagCollectionSharder()], CONSTRAINTS)
        again = reservation.last_reserved_topology
        assert again is not None and again.hbm == left.hbm
        return {hbm - rest for rest in left.hbm}

    aware = SKUAwareStorageReservation(margin, runtime_overhead_bytes=GIB)
    assert taken(aware, 80 * GIB) == taken(aware, 10 * GIB) == {10 * GIB + GIB - heuristic.hbm[0]}
    inputs = math.ceil(IDS * 8) * 20
    assert taken(SKUAwareStorageReservation(7, 5, dense_tensor_estimate=1000), GIB) == {7 + 5 + 1000 + inputs}
    # a measured base is in the place of margin and dense layers, and batches count as ever
    measured = SKUAwareStorageReservation(7, 5, model_base_bytes=3 * GIB)
    assert taken(measured, 80 * GIB) == {3 * GIB + 5 + inputs}
    for whole in (3 * GIB, 3 * GIB + 5 + inputs):
        with pytest.raises(PlannerError, match="rank 0 has no memory left.*3 GiB of the model") as raised:
            taken(measured, whole)
        assert raised.value.error_type is PlannerErrorType.INSUFFICIENT_STORAGE
    with pytest.raises(ValueError, match="runtime_overhead_bytes must be 0 or more, got -1"):
        SKUAwareStorageReservation(0, -1)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_ours_keeps_dense_layers_batches_and_a_share_of_the_memory_of_tables(device: str) -> None:
    left = reserved(ModelStorageReservation(0.1), device, CONSTRAINTS)
    trained, once = 200 * 300 + 200 + 200 + 200, 200 + 200
    dense = 5 * 4 * trained + 4 * once + 8
    batch = IDS * (8 + 4) + (2 * BATCH + 100) * 8
    whole = 20 * GIB if device == "cpu" else 10 * GIB
    assert (left.ddr if device == "cpu" else left.hbm) == [int(0.9 * whole) - dense - int(batch * 6)] * 2
    assert left.hbm[0] == 0 if device == "cpu" else left.ddr[0] == 20 * GIB


def test_a_lazy_layer_counts_nothing_before_its_first_forward() -> None:
    model = Model()
    model.lazy = nn.LazyLinear(4)
    assert reserved(ModelStorageReservation(), "cpu", None, model).ddr == reserved(ModelStorageReservation(), "cpu").ddr


@pytest.mark.parametrize("reservation", [HeuristicalStorageReservation(0.15), ModelStorageReservation()])
def test_dense_layers_that_fill_a_device_are_an_error(reservation: StorageReservation) -> None:
    model = nn.Sequential(Model(), nn.Linear(2**16, 2**15, device="meta"))
    with pytest.raises(PlannerError, match=r"rank 0 has no memory left.*10.0 GB.*dense layers take") as raised:
        reserved(reservation, "cuda", None, model)
    assert raised.value.error_type is PlannerErrorType.INSUFFICIENT_STORAGE


def test_what_is_no_share_is_refused() -> None:
    for kind in (FixedPercentageStorageReservation, HeuristicalStorageReservation, InferenceStorageReservation):
        with pytest.raises(ValueError, match="share from 0 to 1, got 15"):
            kind(15)
    with pytest.raises(ValueError, match="0 or more, got -1"):
        FixedAbsoluteStorageReservation(-1)
    assert torch.tensor(FixedAbsoluteStorageReservation.from_gb(0.5)._hbm_reserved_bytes) == GIB // 2
