"""What is kept from tables: TorchRec's reservations by its own numbers, and ours by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from shardwise import EmbeddingBagCollection, EmbeddingBagConfig
from shardwise.planner.errors import PlannerError, PlannerErrorType
from shardwise.planner.torchrec.reservations import (
    FixedAbsoluteStorageReservation,
    FixedPercentageStorageReservation,
    HeuristicalStorageReservation,
    InferenceStorageReservation,
    ModelStorageReservation,
)
from shardwise.planner.torchrec.types import ParameterConstraints, StorageReservation, Topology
from shardwise.sharding import EmbeddingBagCollectionSharder

GIB = 1024**3
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
