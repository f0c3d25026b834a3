"""Hashes of constraints, topologies and of what a planner was given: TorchRec 1.8's numbers, in every process."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from typing import Any

import pytest
from checkout import python_path
from torch import nn

from shardwise import DataType, EmbeddingBagCollection, EmbeddingBagConfig
from shardwise.kernels import BoundsCheckMode
from shardwise.planner.hashes import text_of
from shardwise.planner.tables import Skew
from shardwise.planner.torchrec import types
from shardwise.planner.torchrec.enumerators import EmbeddingEnumerator
from shardwise.planner.torchrec.reservations import HeuristicalStorageReservation
from shardwise.planner.torchrec.types import ParameterConstraints, Topology
from shardwise.sharding import CacheParams, EmbeddingBagCollectionSharder
from shardwise.sharding.planning.planners import EmbeddingShardingPlanner

GIB = 1024**3
# constraints -> what `__hash__` of TorchRec 1.8.0 gives
OF_TORCHREC: dict[str, tuple[dict[str, Any], int]] = {
    "nothing": ({}, 87402189562645569893241693142733106025831414106284310119099070476335611002833),
    "empty lists are none": (
        {"sharding_types": [], "num_poolings": []},
        87402189562645569893241693142733106025831414106284310119099070476335611002833,
    ),
    "ways": (
        {"sharding_types": ["row_wise", "table_wise"], "compute_kernels": ["fused"], "min_partition": 16},
        86798453485948360522890203081089666287241990074251702509965462251034369197552,
    ),
    "ids": (
        {"pooling_factors": [2.0, 3.5], "num_poolings": [1.0, 2.0], "batch_sizes": [4, 8], "is_weighted": True},
        49629204084821894228724343406054770896312645143438194341407590632944372767984,
    ),
    "settings": (
        {
            "cache_params": CacheParams(load_factor=0.2, precision=DataType.FP16), "enforce_hbm": True,
            "stochastic_rounding": False, "bounds_check_mode": BoundsCheckMode.WARNING, "feature_names": ["a"],
            "output_dtype": DataType.BF16, "device_group": "cuda", "use_virtual_table": True,
        },
        107900926087906531571137375755296799276019835139081854700584415254559852654208,
    ),
}  # fmt: skip
# of `context` below, TorchRec 1.8.0's
CONTEXT = "a6c5a2b397b09494315ccca0d4820d13b08218c56817cddfdadce30e652a7d34"
TOPOLOGY = 61712454838223902235199816057671144374582656226744047219383763076873562390883


class Statistics:
    """Cache statistics of somebody's, which print their address."""

    def __init__(self) -> None:
        self.expected_lookups = 3.5
        self.days = {"monday", "tuesday", "friday"}


def constraints() -> dict[str, ParameterConstraints]:
    """Constraints with every kind of value that hashing could trip over."""
    cached = CacheParams(load_factor=0.2, stats=Statistics())
    return {
        "t0": ParameterConstraints(sharding_types=["row_wise", "table_wise"], cache_params=cached),
        "t1": ParameterConstraints(not_on=[1], skew=Skew(1.1)),
    }


def model() -> nn.Module:
    tables = [EmbeddingBagConfig(1000 + n, 64, f"t{n}", feature_names=[f"f{n}"]) for n in range(3)]
    return nn.Sequential(EmbeddingBagCollection(tables, device="meta"))


def context() -> str:
    """The hash of a planner's inputs, its parts made one by one."""
    topology = Topology(16, "cuda", local_world_size=8, hbm_cap=80 * GIB)
    asked = {f"t{n}": ParameterConstraints(sharding_types=["row_wise"], compute_kernels=["fused"]) for n in (2, 0, 1)}
    enumerator, reservation = EmbeddingEnumerator(topology, 512, constraints=asked), HeuristicalStorageReservation(0.1)
    module, sharders = model(), [EmbeddingBagCollectionSharder()]
    enumerator.enumerate(module, sharders)
    reservation.reserve(topology, 512, module, sharders, asked)
    return types.hash_planner_context_inputs_str(topology, 512, enumerator, reservation, asked)


def planned(**changed: Any) -> str:
    """The hash of a planner that planned by our search."""
    arguments = {"topology": Topology(4, "cuda"), "batch_size": 64, "constraints": constraints(), **changed}
    planner = EmbeddingShardingPlanner(**arguments)
    with pytest.raises(ValueError, match="before the enumerator has enumerated"):
        planner.hash_planner_context_inputs_str()
    planner.plan(model(), [EmbeddingBagCollectionSharder()])
    assert planner.hash_planner_context_inputs() == int(planner.hash_planner_context_inputs_str(), 16)
    return planner.hash_planner_context_inputs_str()


@pytest.mark.parametrize("case", OF_TORCHREC)
def test_a_constraint_hashes_as_torchrecs(case: str) -> None:
    settings, expected = OF_TORCHREC[case]
    constraint = ParameterConstraints(**settings)
    assert constraint.__hash__() == expected and hash(constraint) == hash(copy.deepcopy(constraint))
    assert {constraint: 1}[copy.deepcopy(constraint)] == 1


@pytest.mark.parametrize("own", [{"ranks": [0]}, {"not_on": [0]}, {"same_rank": "a"}, {"skew": Skew(1.0)}])
def test_a_field_of_ours_changes_the_hash_of_a_constraint(own: dict[str, Any]) -> None:
    settings: list[dict[str, Any]] = [{}, {"ranks": [1]}, {"not_on": [1]}, {"same_rank": "b"}]
    others = [ParameterConstraints(**other) for other in settings]
    assert ParameterConstraints(**own).__hash__() not in [other.__hash__() for other in others]


def test_topologies_and_contexts_hash_as_torchrecs() -> None:
    assert Topology(16, "cuda", local_world_size=8, hbm_cap=80 * GIB)._hash() == TOPOLOGY
    assert context() == CONTEXT


@pytest.mark.filterwarnings("ignore:the constraint")
def test_a_context_is_that_of_what_was_given_and_nothing_else() -> None:
    same = planned()
    assert planned() == planned(constraints=dict(reversed(constraints().items()))) == same
    fewer = {"t0": constraints()["t0"]}
    others = [
        planned(topology=Topology(4, "cuda", local_world_size=2)),
        planned(batch_size=65),
        planned(constraints=fewer),
        planned(constraints=None),
        planned(storage_reservation=HeuristicalStorageReservation(0.4)),
        planned(enumerator=EmbeddingEnumerator(Topology(4, "cuda"), 64, constraints=fewer), constraints=fewer),
    ]
    assert len({same, *others[:5]}) == 6
    # an enumerator that lists the same makes the same context, but for the reservation's policy
    assert others[5] == planned(constraints=fewer)


def test_text_has_no_address_and_no_order_of_a_set() -> None:
    cached = CacheParams(load_factor=0.2, stats=Statistics())
    assert text_of(cached) == (
        "CacheParams(algorithm=None, load_factor=0.2, reserved_memory=None, precision=None, prefetch_pipeline=None,"
        " stats=Statistics(days={'friday', 'monday', 'tuesday'}, expected_lookups=3.5), multipass_prefetch_config=None)"
    )
    values = ["x", ("y",), [1, None], {"b": {"d", "c"}}, DataType.FP16, BoundsCheckMode.FATAL]
    assert text_of(values) == str(values).replace("{'d', 'c'}", "{'c', 'd'}")


SCRIPT = """
import warnings
from test_planner_hashes import constraints, context, planned
warnings.simplefilter("ignore")
print([constraint.__hash__() for constraint in constraints().values()], context(), planned())
"""


@pytest.mark.full
def test_hashes_do_not_depend_on_the_process() -> None:
    """Two processes of other hash seeds: constraints with objects that print their address had another hash in each."""
    outputs = set()
    for seed in ("0", "1"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": python_path()}
        ran = subprocess.run(
            [sys.executable, "-c", SCRIPT], cwd=os.path.dirname(__file__), env=environment, check=True,
            capture_output=True, text=True,
        )  # fmt: skip
        outputs.add(ran.stdout)
    assert len(outputs) == 1 and CONTEXT in outputs.pop()
