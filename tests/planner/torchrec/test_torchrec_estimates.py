"""TorchRec's estimates, number for number: what torchrec 1.8.0 says of random options.

`python -m shardwise.perf.evidence.beside_planner golden` prints the numbers anew where torchrec is installed, and `... formulas`
compares thousands of options.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from shardwise.perf.evidence.beside_planner import our_library
from shardwise.perf.evidence.planner_cases import estimate, random_cases
from shardwise.planner.torchrec import estimators as shard_estimators
from shardwise.planner.torchrec import types
from shardwise.planner.torchrec.estimators import EmbeddingOffloadStats

# shards of the option, `Perf` of the first by field, `Storage` of the first
# fmt: off
GOLDEN: list[tuple[int, tuple[float, ...], tuple[int, ...]]] = [
    (16, (0.33035771024832, 10.730193340054, 0, 0, 1.6161668666667, 0),
     (211965728, 0, 0)),
    (16, (16.992927314604, 10.0993024, 25.489390971906, 23.682251757874, 2.5165626, 0),
     (0, 255301902, 0)),
    (38, (0.020722121108269, 6.0068571428571e-05, 0, 0, 0.0016232542857143, 0),
     (65289440, 0, 0)),
    (4, (0.094600228819095, 2.9781219615086, 0.18920045763819, 3.089598870963, 0.97188133333333, 0),
     (145343814, 0, 0)),
    (32, (143.0656525963, 21.028656005859, 286.1313051926, 222.69018137455, 5.1451220363379, 0),
     (288715907, 156237312, 0)),
    (1, (0.27758699622663, 5.3346157073975e-05, 0.41638049433994, 5.3346157073975e-05, 0.00078996798644463, 0),
     (0, 106617597, 0)),
    (32, (1.3276258226411, 2.3793347664, 2.6552516452822, 3.9793652614489, 2.8199523333333, 0),
     (0, 47389443, 0)),
    (3, (1.5706472270888, 1.2363093333333, 4.8690064039754, 1.2363093333333, 3.1329315333333, 0),
     (467850013, 0, 0)),
    (2, (0.0048887731588405, 0.00036798171428571, 0.009777546317681, 0.0010245553830559, 0.00047100714285714, 0),
     (93458429, 0, 0)),
    (16, (13.712235058219, 0, 40.793899298201, 60.882530378945, 0, 0),
     (0, 1033805774, 0)),
    (32, (0.39750798578356, 0, 0.59626197867534, 230.48180239458, 0, 0),
     (0, 1301209139, 0)),
    (1, (0.68811480890349, 1.2755273142857, 0, 0, 0.2359062, 0),
     (6068944800, 0, 0)),
    (1, (49.906863264801, 0.9202635262236, 99.813726529601, 1.8405270524472, 0.023596500977874, 0),
     (1248098295, 129030720, 0)),
    (18, (0.31345907627731, 0.239732864, 0.47018861441596, 0.239732864, 0.66244033333333, 0),
     (173007846, 0, 0)),
    (1, (651.6465625, 0.0033389031887054, 2020.10434375, 50.365751928091, 0.0014267147829135, 0),
     (286016386, 0, 1437972806)),
    (13, (2848.3785378189, 3.64097994752, 5696.7570756378, 3.64097994752, 0.45512253333333, 0),
     (440818812, 0, 324659398)),
    (56, (0.012214494585459, 0.0027273508571429, 0.018321741878189, 0.0075936436341458, 0.018771811428571, 0),
     (6993668, 0, 0)),
    (16, (0.47382279923329, 0, 0.94764559846658, 141.11289024117, 0, 0),
     (1300069909, 0, 0)),
    (59, (145.60878404549, 0.066947460174561, 218.41317606823, 0.066947460174561, 2.359282001853, 0.002874294295907),
     (33612877, 0, 0)),
    (2, (39.560313010313, 0.65846677606674, 122.63697033197, 0.65846677606674, 0.014314495714286, 0),
     (0, 1332210043, 0)),
    (1, (0.22057143828608, 0.16300354485512, 0.68377145868686, 0.16300354485512, 0.0018736052637299, 0),
     (1902866149, 0, 0)),
    (1, (30.235669578624, 5.2812100266667, 45.353504367935, 5.2812100266667, 1.5232003333333, 0),
     (0, 421927385, 0)),
    (23, (5.6642005819024, 1.1816241493333, 17.559021803897, 1.1816241493333, 0.59081213333333, 0),
     (0, 68456017, 0)),
    (19, (0.96142766778684, 0.15644455640713, 1.9228553355737, 0.15644455640713, 0.039111139873664, 0),
     (173059327, 0, 0)),
]
# fmt: on
CASES = random_cases(len(GOLDEN))


@pytest.mark.parametrize(
    ("case", "expected"),
    list(zip(CASES, GOLDEN, strict=True)),
    ids=[f"{case['sharding_type']}-{case['kernel']}-{case['device']}" for case in CASES],
)
def test_estimates_are_torchrecs(
    case: dict[str, Any], expected: tuple[int, tuple[float, ...], tuple[int, ...]]
) -> None:
    count, perf, storage = expected
    _, perfs, storages = estimate(case, our_library())
    assert len(perfs) == count and storages[0] == storage
    np.testing.assert_allclose(perfs[0], perf, rtol=1e-12)


def test_inference_has_no_backward_no_states_and_no_batches() -> None:
    trained = {
        **CASES[0],
        "inference": False,
        "optimizer": "Adam",
        "kernel": "fused",
        "usage": "BASE",
        "virtual": False,
    }
    _, perfs, storages = estimate({**trained, "sharding_type": "table_wise", "device": "cuda"}, our_library())
    _, quiet, bare = estimate(
        {**trained, "sharding_type": "table_wise", "device": "cuda", "inference": True}, our_library()
    )
    assert quiet[0][:2] == perfs[0][:2] and quiet[0][2:4] == (0, 0) and perfs[0][2] > 0
    element = 2 if trained["half"] else 4
    assert bare[0] == (trained["rows"] * trained["columns"] * element, 0, 0) and storages[0][0] > 3 * bare[0][0]


def test_estimates_do_not_share_what_partitioners_change() -> None:
    case = {**CASES[0], "sharding_type": "row_wise", "kernel": "fused", "device": "cuda", "world": 4, "local": 4}
    option, _, _ = estimate({**case, "pod": None, "rows": 4000}, our_library())
    option.shards[0].storage.hbm += 1
    option.shards[0].perf.fwd_compute += 1
    assert option.shards[0].storage != option.shards[1].storage and option.shards[0].perf != option.shards[1].perf


def test_storages_from_numbers_alone_are_those_of_the_estimator() -> None:
    case = next(c for c in CASES if c["sharding_type"] == "row_wise")
    case = {**case, "kernel": "fused", "device": "cuda", "virtual": False, "pod": None, "half_output": False}
    option, _, storages = estimate(case, our_library())
    found = shard_estimators.calculate_shard_storages(
        types.SharderData({}, {}, types.StorageUsageType[case["usage"]]), "row_wise", option.tensor, "cuda", "fused",
        [shard.size for shard in option.shards], case["batch_sizes"] or [case["batch_size"]] * option.num_inputs,
        case["world"], case["local"], case["pooling_factors"], case["num_poolings"] or [1.0] * option.num_inputs,
        0.2, case["pooled"], 8, option.tensor.element_size(), types.PipelineType[case["pipeline"]], case["at_peak"],
        case["inference"],
    )  # fmt: skip
    assert [(s.hbm, s.ddr, s.ssd) for s in found] == storages


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"kernel": "fused_uvm", "device": "cpu"}, "'t': compute_kernel 'fused_uvm' has no known bandwidth on cpu"),
        ({"batch_sizes": [1] * 9}, "'t': pooling_factors, num_poolings and batch_sizes must have one number for each"),
    ],
)
def test_what_cannot_be_estimated_is_an_error_that_names_the_table(changed: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        estimate({**CASES[0], **changed}, our_library())


@pytest.mark.parametrize(
    ("counts", "rates"),
    [
        # at load factors 0, 0.1, 0.5, 0.999 and 1, by torchrec 1.8.0
        ([6, 3, 0, 1], (1.0, 0.3999999761581421, 0.10000002384185791, 0.0, 0.0)),
        ([0, 0], (0.0, 0.0, 0.0, 0.0, 0.0)),
        ([5], (1.0, 0.0, 0.0, 0.0, 0.0)),
    ],
)
def test_a_larger_cache_misses_less(counts: list[int], rates: tuple[float, ...]) -> None:
    stats = EmbeddingOffloadStats(0.3, 77, torch.tensor(counts), 1000)
    found = [stats.expected_miss_rate(share) for share in (0, 0.1, 0.5, 0.999, 1)]
    assert found == pytest.approx(rates, rel=1e-6)
    assert (stats.expected_lookups, stats.cacheability, stats.height) == (77, 0.3, 1000)


@pytest.mark.parametrize("counts", [[], [[1, 2]]])
def test_a_histogram_must_be_a_list_of_numbers(counts: Any) -> None:
    with pytest.raises(ValueError, match="mrc_hist_counts"):
        EmbeddingOffloadStats(0.3, 77, counts, 1000)


def test_prefetched_bytes_are_what_misses_the_cache() -> None:
    case = {
        **CASES[0], "sharding_type": "table_wise", "kernel": "fused_uvm_caching", "device": "cuda", "rows": 1000,
        "columns": 64, "half": False, "load_factor": 0.35, "histogram": [6, 3, 0, 1],
    }  # fmt: skip
    _, perfs, _ = estimate(case, our_library())
    missed = EmbeddingOffloadStats(0.5, 12345, np.array([6, 3, 0, 1]), 1000).expected_miss_rate(0.35) * 12345
    assert perfs[0][5] == pytest.approx(missed * 64 * 4 / (32 * 1024**3 / 1000))


def test_exchanged_elements_have_the_size_of_their_codec() -> None:
    from shardwise.planner.torchrec.utils import build_sharder_data

    codec = SimpleNamespace(
        forward=SimpleNamespace(quantized_dtype=torch.float16), backward=SimpleNamespace(quantized_dtype=torch.bfloat16)
    )
    sharder = SimpleNamespace(
        qcomm_codecs_registry={"POOLED_EMBEDDINGS_ALL_TO_ALL": codec, "OTHER": codec},
        fused_params={"cache_load_factor": 0.4},
    )
    data = build_sharder_data(sharder)
    assert data.qcomm_dtype_sizes == {"POOLED_EMBEDDINGS_ALL_TO_ALL": (2, 2)}
    assert data.fused_params == {"cache_load_factor": 0.4}
    assert data.storage_usage_type == types.StorageUsageType.DEFAULT
