"""The part of gpu_check.py that tunes the main shapes on the device, then runs the regression suite there.

Both run here without click, rich and pytest-benchmark, which a bare machine does not have. What they find is a part of
the JSON; gpu_check.py also writes it to files of its own, which `shardwise perf report` and lookups read.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from shardwise.kernels import configs
from shardwise.kernels._op import HAS_TRITON
from shardwise.perf.gpu_scripts.gpu_sizes import Sizes
from shardwise.perf.suite import machine, storage
from shardwise.perf.suite.case import Setting, chosen
from shardwise.perf.suite.cases import CASES
from shardwise.perf.suite.measure import BUDGETS, run
from shardwise.perf.tune.tuner import (
    ROUNDS,
    File,
    told,
    tune_all,
)
from shardwise.perf.tune.tuner_inputs import (
    Job,
    fitted_job,
    jobs_of,
    workloads_of,
)

GROUPS = ("lookup", "update", "quantized", "jagged", "keyed", "module")


# what the A/B of variants has compared already: its tiles and programs are those candidates
COMPARED = ("update rowwise_adagrad", "pooled_lookup")


def ordered(jobs: Sequence[Job]) -> list[Job]:
    """One shape of each kernel and dtype before the others; updates before lookups, what the A/B left open first."""
    places: dict[tuple[str, str], int] = {}
    ranked = []
    for job in jobs:
        kind = job.key.kernel, job.key.dtype
        place = places[kind] = places.get(kind, -1) + 1
        compared = job.key.kernel in COMPARED and job.key.dtype == "fp32"
        ranked.append((place, compared, not job.key.kernel.startswith("update "), job))
    return [job for *_, job in sorted(ranked, key=lambda one: one[:3])]


def autotune(device: str, sizes: Sizes) -> dict[str, Any]:
    """Tune the kernels for tables of 64 and 128 columns, bags of one id and of 20; has the file of tuned configs."""
    if not HAS_TRITON:
        return {"note": "triton is not installed"}
    jobs = ordered(jobs_of(workloads_of([128, 64], [20, 1], small=sizes.small), ["fp32", "fp16", "int8"]))
    found: list[dict[str, Any]] = []
    dropped: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        place = torch.device(device, torch.cuda.current_device()) if device == "cuda" else torch.device("cpu")
        file = File(Path(folder) / "tuned.json", *configs.identity(place))
        rounds, repeats = (1, 1) if sizes.small else (ROUNDS, 20)
        for one in tune_all(
            [fitted_job(job, device) for job in jobs], device,
            file=file, repeats=repeats, rounds=rounds, seconds=sizes.tune_s,
        ):  # fmt: skip
            if one.failed:
                dropped += one.dropped
                continue
            found.append({"entry": one.what, "ratio": round(one.ratio, 3), "config": told(one.config)})
            dropped += one.dropped
        tuned = json.loads(file.path.read_text(encoding="utf-8")) if found else None
    return {"entries": found, "of": len(jobs), "failed": dropped, "file": tuned}


def suite(device: str, sizes: Sizes) -> dict[str, Any]:
    """The cases of the suite "cuda", beside the peers that are importable; has what `shardwise perf run` writes."""
    peers = frozenset({"torch", *machine.importable_peers()})
    setting = Setting(device, sizes.small, peers, machine.memory_for_tables(device))
    # what other processes do, and plans, and sizes, no GPU changes
    cases, load = chosen(CASES, ("cuda",), device, f"^(?=({'|'.join(GROUPS)}): ).*(?:{sizes.cases})"), machine.load()
    budget = BUDGETS[device](sizes.suite_s, 1 if sizes.small else None, sizes.small)
    measured = run(cases, setting, budget)
    about = {
        "suites": ["cuda"], "small": sizes.small, "laps": budget.laps, "peers": sorted(peers), "load": load,
    }  # fmt: skip
    info = machine.machine_info(device, torch.get_num_threads())
    return {
        "cases": len(measured.records),
        "failed": [f"{one.name}: {one.error}" for one in measured.failures],
        "not_run": list(measured.not_run),
        "file": json.loads(json.dumps(storage.to_json(measured, info, about), default=str)),
    }
