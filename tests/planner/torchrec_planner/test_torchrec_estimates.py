"""TorchRec's estimates, number for number: what torchrec 1.8.0 says of random options.

`python -m shardwise.perf.evidence.compare_planner golden` prints the numbers anew where torchrec is installed, and `...
formulas` compares thousands of options.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from checkout import golden

from shardwise.perf.evidence.planner_cases import estimate, random_cases
from shardwise.perf.suite.libraries import PLANNER, ours
from shardwise.planner.torchrec import estimators as shard_estimators
from shardwise.planner.torchrec import types
from shardwise.planner.torchrec.estimators import EmbeddingOffloadStats

# shards of the option, `Perf` of the first by field, `Storage` of the first
GOLDEN = golden("planner_estimates")
CASES = random_cases(len(GOLDEN))


@pytest.mark.parametrize(
    ("case", "expected"),
    list(zip(CASES, GOLDEN, strict=True)),
    ids=[f"{case['sharding_type']}-{case['kernel']}-{case['device']}" for case in CASES],
)
def test_estimates_are_torchrecs(case: dict[str, Any], expected: tuple[int, list[float], list[int]]) -> None:
    count, perf, storage = expected
    _, perfs, storages = estimate(case, ours(PLANNER))
    assert len(perfs) == count and storages[0] == tuple(storage)
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
    _, perfs, storages = estimate({**trained, "sharding_type": "table_wise", "device": "cuda"}, ours(PLANNER))
    _, quiet, bare = estimate(
        {**trained, "sharding_type": "table_wise", "device": "cuda", "inference": True}, ours(PLANNER)
    )
    assert quiet[0][:2] == perfs[0][:2] and quiet[0][2:4] == (0, 0) and perfs[0][2] > 0
    element = 2 if trained["half"] else 4
    assert bare[0] == (trained["rows"] * trained["columns"] * element, 0, 0) and storages[0][0] > 3 * bare[0][0]


def test_estimates_do_not_share_what_partitioners_change() -> None:
    case = {**CASES[0], "sharding_type": "row_wise", "kernel": "fused", "device": "cuda", "world": 4, "local": 4}
    option, _, _ = estimate({**case, "pod": None, "rows": 4000}, ours(PLANNER))
    option.shards[0].storage.hbm += 1
    option.shards[0].perf.fwd_compute += 1
    assert option.shards[0].storage != option.shards[1].storage and option.shards[0].perf != option.shards[1].perf


def test_storages_from_numbers_alone_are_those_of_the_estimator() -> None:
    case = next(c for c in CASES if c["sharding_type"] == "row_wise")
    case = {**case, "kernel": "fused", "device": "cuda", "virtual": False, "pod": None, "half_output": False}
    option, _, storages = estimate(case, ours(PLANNER))
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
        estimate({**CASES[0], **changed}, ours(PLANNER))


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
    _, perfs, _ = estimate(case, ours(PLANNER))
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
