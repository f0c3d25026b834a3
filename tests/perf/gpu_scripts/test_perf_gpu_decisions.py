"""What the GPU script decides with: variants and their bits, verdicts, predictions, profiles, compiled kernels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from shardwise.kernels import configs
from shardwise.perf.counts.fake_cuda import FakeCudaTensor
from shardwise.perf.gpu_scripts import (
    gpu_ab,
    gpu_check,
    gpu_precompile,
    gpu_profile,
    gpu_yardsticks,
)
from shardwise.perf.gpu_scripts.gpu_ab import Compared, Row, verdicts
from shardwise.perf.gpu_scripts.gpu_page import PREDICTIONS, card_of, compared
from shardwise.perf.gpu_scripts.gpu_profile import (
    HOPPER,
    Span,
    by_name,
    resident,
)
from shardwise.perf.gpu_scripts.gpu_shapes import (
    SHAPES,
    hollow,
    hollow_call,
    sized,
)
from shardwise.perf.gpu_scripts.gpu_variants import VARIANTS, Variant
from shardwise.perf.suite import batches
from shardwise.perf.suite.workloads import equal
from shardwise.perf.tune.tuner_inputs import jobs_of, workloads_of


def test_every_variant_forces_what_is_known_on_shapes_that_are_there() -> None:
    assert len({(variant.call, variant.name) for variant in VARIANTS}) == len(VARIANTS) >= 40
    for variant in VARIANTS:
        assert set(variant.shapes) <= set(SHAPES)
        with variant.forced():
            assert variant.unread == sorted(variant.settings)


def test_shapes_are_cut_to_the_same_tables_on_cards_of_80_gb_and_more() -> None:
    for shape in SHAPES.values():
        small, large = (sized(shape, gib << 30) for gib in (80, 141))
        assert small == large and sum(small.workload.rows) * 128 * small.workload.dtype.itemsize <= 30 << 30
    assert sized(SHAPES["C"], 80 << 30).scaled == "largest tables divided by 4"
    assert not sized(SHAPES["A"], 80 << 30).scaled and sized(SHAPES["A"], 24 << 30).workload.cut == 2


class _Wrong(Variant):
    @contextmanager
    def forced(self) -> Iterator[None]:
        lookup = batches.pooled_lookup
        with patch.object(batches, "pooled_lookup", lambda *args: lookup(*args) + 1):
            yield


class _Broken(Variant):
    @contextmanager
    def forced(self) -> Iterator[None]:
        raise RuntimeError("no such tile")
        yield


@pytest.mark.parametrize("device", ["cpu", pytest.param("interpreted", marks=pytest.mark.interpreted)])
def test_a_variant_is_timed_only_where_it_gives_the_bits_of_the_default(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = [
        Variant("the default again", "forward"), Variant("few programs", "backward", {"update.programs": 2}),
        Variant("a setting that nothing reads", "forward", {"update.programs": 2}),
        _Wrong("wrong", "forward"), _Broken("broken", "forward"),
    ]  # fmt: skip
    monkeypatch.setattr(gpu_ab, "VARIANTS", tried)
    comparison = Compared()
    gpu_ab.compare(comparison, sized(SHAPES["A"], 1 << 30, small=True), "cpu", 2, float("inf"))
    dropped = {variant.variant: variant.why for variant in comparison.dropped}
    assert dropped["wrong"] == "gives other bits than the default"
    assert dropped["broken"] == "fails: RuntimeError: no such tile"
    # torch's path asks for no settings
    unread = dropped.pop("a setting that nothing reads", None)
    assert unread == ("no launch asks for update.programs" if device == "interpreted" else None)
    timed = {row.variant: row.rounds for row in comparison.rows}
    assert timed.items() >= {"the default again": 2, "few programs": 2}.items() and "wrong" not in timed
    assert set(comparison.shapes[0]["default"]) == {"forward", "backward"}


def test_a_variant_is_taken_that_gains_beyond_the_noise_and_loses_nowhere() -> None:
    def rows(variant: str, *ratios: float) -> list[Row]:
        return [Row(variant, "forward", shape, 1.0, r, r, r, 9) for shape, r in zip("AC", ratios, strict=True)]

    decisions = verdicts(
        [
            *rows("the default again", 1.02, 1.001), *rows("better on A, within its noise", 0.97, 1.0),
            *rows("better on C", 1.0, 0.97), *rows("best", 0.9, 1.009), *rows("loses on C", 0.8, 1.02),
            *rows("much as it was", 0.99, 1.0),
        ]
    )  # fmt: skip
    assert [(decision["variant"], decision["verdict"]) for decision in decisions] == [
        ("best", "take"), ("better on C", "take"), ("loses on C", "leave"),
        ("better on A, within its noise", "no difference"), ("much as it was", "no difference"),
    ]  # fmt: skip


def test_predictions_stand_beside_what_was_measured() -> None:
    kernels = [{"kernel": "_mark_kernel", "us": 200.0}, {"kernel": "_chunk_kernel", "us": 100.0}]
    sections: dict[str, Any] = {
        "yardsticks": {"result": {"copy": {"gb_per_s": 2500.0}, "latency_ns": {"DRAM": 640.0}}},
        "ab": {"result": {"shapes": [{"shape": "A", "default": {"backward": {"us": 2000.0}}}]}},
        "profile": {"result": {"shapes": [{"shape": "A", "call": "step", "kernels": kernels}]}},
    }
    rows = {row["name"]: row for row in compared("NVIDIA H100 80GB HBM3", sections)}
    assert len(rows) == len(PREDICTIONS)
    assert (rows["A backward"]["measured"], rows["A backward"]["verdict"]) == (2000.0, "better")
    assert (rows["copy"]["verdict"], rows["load that misses L2"]["verdict"]) == ("worse", "as predicted")
    assert rows["A backward: marks and chunks"]["measured"] == 300.0
    assert rows["C forward"]["verdict"] == "not measured"
    assert card_of("NVIDIA H200") == "H200" and card_of("NVIDIA B200") is None
    assert {row["verdict"] for row in compared("NVIDIA B200", sections)} == {"not predicted", "not measured"}


def test_registers_and_shared_memory_bound_the_programs_of_a_multiprocessor() -> None:
    # 58 registers are given out as 64, 48 as 48
    assert resident(HOPPER, 4, 58, 0) == 8 and resident(HOPPER, 4, 48, 0) == 10 and resident(HOPPER, 4, 40, 0) == 12
    assert resident(HOPPER, 4, 16, 100 << 10) == 2 and resident(HOPPER, 1, 16, 0) == 32
    assert resident(HOPPER, 16, 128, 0) == 1


def test_a_profile_adds_up_kernels_by_name_and_the_gaps_between_them() -> None:
    spans = [
        Span("_update_kernel", 30, 34), Span("void cub::DeviceRadixSort<int>(long)", 0, 10),
        Span("beside it", 5, 20), Span("_update_kernel", 20, 24),
    ]  # fmt: skip
    profile = by_name(spans, 2)
    assert profile["launches"] == 2 and profile["busy_us"] == 16.5
    assert (profile["idle_us"], profile["largest_gap_us"]) == (3.0, 6.0)
    assert [kernel["kernel"] for kernel in profile["kernels"]] == [
        "beside it",
        "cub::DeviceRadixSort",
        "_update_kernel",
    ]
    assert gpu_profile.loaded_kernels(HOPPER) == [] or not torch.cuda.is_available()


@pytest.mark.parametrize("device", ["cpu", pytest.param("interpreted", marks=pytest.mark.interpreted)])
def test_a_chain_goes_through_all_its_lines_and_ends_where_it_began(device: str) -> None:
    links, at = gpu_yardsticks.chain(20 * 128, "cpu"), torch.zeros(1, dtype=torch.int64)
    seen = []
    for _ in range(20):
        gpu_yardsticks.chase(links, at, 1)
        seen.append(int(at))
    assert sorted(seen) == list(range(0, 320, 16)) and seen[-1] == 0
    gpu_yardsticks.chase(links, at, 7)
    assert int(at) == gpu_yardsticks.chase_ref(links, 0, 7) == seen[6]


def test_the_tuner_begins_with_updates_and_with_what_no_variant_compared() -> None:
    jobs = gpu_check.ordered(jobs_of(workloads_of([128, 64], [20, 1], small=False), ["fp32", "fp16", "int8"]))
    first = [(job.key.kernel, job.key.dtype, job.key.dim) for job in jobs]
    assert first[0] == ("update rowwise_adagrad", "fp16", 128) or first[0][0].startswith("update ")
    kinds = [(kernel, dtype) for kernel, dtype, _ in first]
    count = len(set(kinds))
    # one shape of each before a second of any
    assert len(set(kinds[:count])) == count and kinds[count - 1][0] in gpu_check.TUNED_BY_AB


@pytest.mark.compiled
def test_kernels_made_beforehand_serve_elsewhere_and_another_build_of_triton(tmp_path: Path) -> None:
    import triton.runtime.cache

    shape = replace(SHAPES["64 x 26"], workload=equal("few", 2, 1000, 128, 64, 1))
    batch, state = hollow(shape, FakeCudaTensor)

    def made(folder: Path) -> gpu_precompile.Compiled:
        with gpu_precompile.compiling(folder, 90, 2) as done:
            hollow_call(batch, state, "forward")
        return done

    first = made(tmp_path / "here")
    assert (first.kernels, first.hits, first.failed) == (["_pooled_lookup_kernel"], 0, {})
    assert gpu_precompile.strip(tmp_path / "here") < 100_000
    (tmp_path / "here").rename(tmp_path / "there")
    assert gpu_precompile.relocate(tmp_path / "there") == 1
    # what triton says of its own files is another thing there
    with patch.object(triton.runtime.cache, "triton_key", lambda: "other"):
        again = made(tmp_path / "there")
    assert (again.kernels, again.hits) == ([], 1)
    # another bound of registers is another program
    with configs.forced({"pooled_lookup": {"rows": 2, "columns": 128, "warps": 2}}):
        assert made(tmp_path / "there").kernels == ["_pooled_lookup_kernel"]
