"""What the tuner may try compiles and keeps the promises of launches, above all the order of a row's columns.

A sample of what `python -m shardwise kernels check --candidates` compiles.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest

from shardwise.kernels import configs
from shardwise.kernels.configs import Key
from shardwise.perf.compile import cases as launched, compiled, tuning_space
from shardwise.perf.compile.cases import Case
from shardwise.perf.compile.checks import broken_promises
from shardwise.perf.compile.tuning_space import candidate_cases, cases_of
from shardwise.perf.tune.candidates import KERNELS, candidates

pytestmark = pytest.mark.compiled

# start of the names of candidates, and a target
SAMPLE = [
    ("pooled_lookup D=128 fp32 tuned rows=8 columns=128 warps=4", "sm_90"),
    ("pooled_lookup D=128 fp16 tuned rows=4 columns=128 warps=4", "sm_80"),
    ("gather D=64 fp32 tuned rows=2 columns=64 warps=1", "gfx942"),
    ("quantized_pooled_lookup D=128 int8 tuned rows=16 columns=128 warps=8", "sm_100"),
    ("to_padded D=256 fp16 tuned rows=2 columns=256 warps=2", "sm_90"),
]  # fmt: skip
# rules that add up a row's columns: every number of chunks
ORDERED = [("rowwise_adagrad", 128, "sm_90"), ("rowwise_adagrad", 64, "gfx942"), ("lamb", 256, "sm_90")]


@cache
def known() -> dict[str, Case]:
    return {case.name: case for case in candidate_cases()}


def broken(*cases: Case, target: str) -> list[str]:
    reports = [(case, target, compiled.compile_case(case, target)) for case in cases]
    return [sentence for _, _, sentence in broken_promises(reports)]


@pytest.mark.parametrize(("name", "target"), SAMPLE, ids=[f"{name} {target}" for name, target in SAMPLE])
def test_a_candidate_keeps_the_promises_of_launches(name: str, target: str) -> None:
    assert broken(known()[name], target=target) == []


def test_every_candidate_is_compiled_as_the_tuner_would_launch_it() -> None:
    """A filter that missed its kernel would leave nothing to compile, and nothing to fail."""
    for case in known().values():
        name, settings = case.name.split(" tuned ")
        config = {key: int(value) for key, value in (word.split("=") for word in settings.split())}
        blocks = [n for key, n in case.constants.items() if key in ("BLOCK_B", "BLOCK_N", "BLOCK_R", "BLOCK_C")]
        # Triton takes a block of 1 as any other constant
        assert blocks == [config.get("rows") or config["chunks"]], name
        if "warps" in config:
            assert case.num_warps == config["warps"], name
    assert {case.kernel_name for case in known().values()} == {name.split()[0] for name in KERNELS}


@pytest.mark.parametrize(("rule", "dim", "target"), ORDERED)
def test_candidates_of_an_update_add_up_columns_as_the_heuristic_does(rule: str, dim: int, target: str) -> None:
    key = Key(f"update {rule}", "fp32", dim, 1, "")
    tried = [config for config in candidates(key.kernel, "fp32", dim) if "chunks" in config]
    cases = [case for config in ({}, *tried) for case in cases_of(key, config)]
    assert len(cases) == 1 + len(tried) > 2 and len({case.rows for case in cases}) == 1
    assert len({case.constants["BLOCK_C"] for case in cases}) == len(cases)
    usual = [case for case in launched.cases() if case.name == f"update {rule} D={dim} fp32"]
    assert not usual or usual[0].rows == cases[0].rows
    assert broken(*usual, *cases, target=target) == []


def test_an_entry_of_a_committed_file_that_spills_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = {"kernel": "quantized_pooled_lookup", "dtype": "int8", "dim": 128, "length": 32, "triton": "3.7.1"}
    entries = [{**entry, "config": {"rows": 16, "columns": 128, "warps": 1}}, {**entry, "length": 1, "config": {}}]
    content = {"shardwise_tuned": 1, "device": "NVIDIA H200", "architecture": "sm_90", "entries": entries}
    (tmp_path / "nvidia_h200.json").write_text(json.dumps(content))
    monkeypatch.setattr(configs, "FOLDER", tmp_path)
    (case,) = tuning_space.tuned_cases()
    assert any(sentence.startswith("spills ") for sentence in broken(case, target="sm_90"))
