"""Check every op against its reference on a GPU and decide there what nothing else can; needs only torch and triton.

Run by `perf/gpu_check.sh`, or as `PYTHONPATH=. python3 -m shardwise.perf.gpu_scripts.gpu_check --out FILE`. A section
that fails is recorded in the JSON and the others go on; with --isolate each runs in a process of its own, because a
CUDA fault spoils the process in which it happens. The JSON and a page of it are written after every section. What
answers an open question comes first, so that ten minutes on a card are enough; `--keep --sections ...` does the rest in
another call. `--device cpu --small` proves the script on a machine without a GPU. The tuner and the suite run here
without click and rich, which a bare machine does not have; what they find is also written to files of its own, which
`shardwise perf report` and lookups read. compute-sanitizer, where it is installed, runs small sections again: it finds
what correct values do not show.

Letters as in the kernels: R rows, D dim, B samples, L ids a bag, N ids, T tables.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

import torch

from shardwise.kernels import configs
from shardwise.kernels._op import HAS_TRITON, INTERPRETED
from shardwise.perf.gpu_scripts import gpu_ops, gpu_page, gpu_precompile
from shardwise.perf.gpu_scripts.gpu_ab import ab, executed
from shardwise.perf.gpu_scripts.gpu_kernels import (
    correctness,
    quantized_correctness,
    same_bits,
    torch_path,
)
from shardwise.perf.gpu_scripts.gpu_profile import profiles
from shardwise.perf.gpu_scripts.gpu_sizes import (
    GPU,
    SMALL,
    TIMES,
    Sizes,
)
from shardwise.perf.gpu_scripts.gpu_tiers import pinned_table, tiers
from shardwise.perf.gpu_scripts.gpu_yardsticks import yardsticks
from shardwise.perf.suite import machine, storage
from shardwise.perf.suite.batches import make, optimizer
from shardwise.perf.suite.case import Setting, chosen, in_a_line
from shardwise.perf.suite.cases import CASES
from shardwise.perf.suite.measure import BUDGETS, run
from shardwise.perf.suite.options import FLAG, Options, parser_of
from shardwise.perf.suite.timing import spread, times_us
from shardwise.perf.tune.tuner import (
    ROUNDS,
    File,
    text_of,
    tune_all,
)
from shardwise.perf.tune.tuner_inputs import (
    Job,
    fitted_job,
    jobs_of,
    workloads_of,
)

# tool -> sections that are run under it; each takes tens of times as long as without
TOOLS = {"memcheck": ("correctness", "quantized_correctness", "collections"), "racecheck": ("correctness",)}
# the status that the sanitizer ends with where it found something
FOUND = 9


def sanitizer(device: str, sizes: Sizes, limit_s: float = 60) -> dict[str, Any]:
    """Small sections under each tool; nothing where there is no sanitizer.

    Raises:
        AssertionError: a tool found something; has the end of what it printed.
    """
    program = _program()
    if program is None:
        return {"note": "compute-sanitizer is not on this machine"}
    reports: dict[str, Any] = {"program": Path(program).name}
    # every tensor an allocation of its own, so that an access behind one is seen
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    for tool, sections in TOOLS.items():
        with tempfile.TemporaryDirectory() as folder:
            command = [program, "--tool", tool, "--error-exitcode", str(FOUND), "--print-limit", "20", sys.executable]
            command += [
                "-m",
                "shardwise.perf.gpu_scripts.gpu_check",
                "--device",
                device,
                "--small",
                "--sections",
                *sections,
            ]
            try:
                status, printed = run_within(
                    limit_s / len(TOOLS), [*command, "--out", str(Path(folder) / "part.json")], environment
                )
            except subprocess.TimeoutExpired:
                reports[tool] = f"not finished in {limit_s / len(TOOLS):.0f} s"
                continue
        summary = re.findall(r"ERROR SUMMARY: .*|RACECHECK SUMMARY: .*", printed)
        reports[tool] = summary[-1] if summary else f"status {status}"
        assert status == 0, f"{tool}: status {status}\n{printed[-3000:]}"
    return reports


def run_within(limit_s: float, command: Sequence[str], environment: Mapping[str, str]) -> tuple[int, str]:
    """Exit status of a command and what it printed; what it started ends with it.

    Raises:
        subprocess.TimeoutExpired: it was not done in time, and was ended.
    """
    with subprocess.Popen(
        command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    ) as process:
        try:
            printed, _ = process.communicate(timeout=limit_s)
        except BaseException:
            # a sanitizer's target is a child of the sanitizer, and would go on
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return process.returncode, printed


def _program() -> str | None:
    """The sanitizer on the path, or in CUDA's own folder."""
    homes = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if name in os.environ] + ["/usr/local/cuda"]
    return shutil.which("compute-sanitizer") or shutil.which(
        "compute-sanitizer", path=os.pathsep.join(f"{home}/bin" for home in homes)
    )


GROUPS = ("lookup", "update", "rows", "quantized", "jagged", "keyed", "module")


# what the A/B of variants has compared already: its tiles and programs are those candidates
TUNED_BY_AB = ("update rowwise_adagrad", "pooled_lookup")


def ordered(jobs: Sequence[Job]) -> list[Job]:
    """One shape of each kernel and dtype before the others; updates before lookups, what the A/B left open first."""
    places: dict[tuple[str, str], int] = {}
    ranked = []
    for job in jobs:
        kind = job.key.kernel, job.key.dtype
        place = places[kind] = places.get(kind, -1) + 1
        compared = job.key.kernel in TUNED_BY_AB and job.key.dtype == "fp32"
        ranked.append((place, compared, not job.key.kernel.startswith("update "), job))
    return [job for *_, job in sorted(ranked, key=lambda entry: entry[:3])]


def autotune(device: str, sizes: Sizes) -> dict[str, Any]:
    """Tune the kernels for tables of 64 and 128 columns, bags of one id and of 20; has the file of tuned configs."""
    if not HAS_TRITON:
        return {"note": "triton is not installed"}
    jobs = ordered(jobs_of(workloads_of([128, 64], [20, 1], small=sizes.small), ["fp32", "fp16", "int8"]))
    entries: list[dict[str, Any]] = []
    dropped: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        place = torch.device(device, torch.cuda.current_device()) if device == "cuda" else torch.device("cpu")
        file = File(Path(folder) / "tuned.json", *configs.identity(place))
        rounds, repeats = (1, 1) if sizes.small else (ROUNDS, 20)
        for outcome in tune_all(
            [fitted_job(job, device) for job in jobs], device,
            file=file, repeats=repeats, rounds=rounds, seconds=sizes.tune_s,
        ):  # fmt: skip
            if outcome.failed:
                dropped += outcome.dropped
                continue
            entries.append({"entry": outcome.what, "ratio": round(outcome.ratio, 3), "config": text_of(outcome.config)})
            dropped += outcome.dropped
        tuned = json.loads(file.path.read_text(encoding="utf-8")) if entries else None
    return {"entries": entries, "of": len(jobs), "failed": dropped, "file": tuned}


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
        "failed": [f"{failure.name}: {failure.error}" for failure in measured.failures],
        "not_run": list(measured.not_run),
        "file": json.loads(json.dumps(storage.to_json(measured, info, about), default=str)),
    }


def hot_row(device: str, sizes: Sizes) -> dict[str, Any]:
    """One row hit by all ids against uniform ids: times, and an exact sum."""
    dim, result = sizes.dims[1], {}
    for rule in ("sgd", "rowwise_adagrad"):
        medians = {}
        for ids in ("uniform", "hot"):
            batch = make(device, [(sizes.rows, dim)], sizes.batch * 4, sizes.length, ids=ids)
            state = optimizer(rule, batch)
            medians[ids] = spread(times_us([partial(state.update, batch)], device, sizes.repeats))["median"]
        result[rule] = {"us": medians, "hot_over_uniform": round(medians["hot"] / medians["uniform"], 3)}
    batch = make(device, [(sizes.rows, dim)], sizes.batch, sizes.length, ids="hot")
    batch = replace(batch, weights=torch.zeros_like(batch.weights), grad=torch.ones_like(batch.grad))
    optimizer("sgd", batch, lr=1.0).update(batch)
    assert batch.weights[0].item() == -batch.ids, "the sum of ones is not exact"
    return {"hits": batch.ids, **result}


def compile_kernels(device: str, sizes: Sizes) -> dict[str, Any]:
    """Compile what the sections after this launch, into Triton's cache of this run, on all cores."""
    if not HAS_TRITON or INTERPRETED:
        return {"note": "kernels are not compiled here"}
    with tempfile.TemporaryDirectory() as folder:
        # without a device a proof that it works, which nobody uses
        out = os.environ.get("TRITON_CACHE_DIR", folder) if device == "cuda" else folder
        command = [sys.executable, "-m", "shardwise.perf.gpu_scripts.gpu_precompile", "--out", out, "--whole"]
        command += ["--checks"] if device == "cuda" else []
        if device == "cuda":
            command += ["--architecture", str(configs.identity(torch.device("cuda", 0))[1].removeprefix("sm_"))]
        else:
            command += ["--shapes", "64 x 26"]
        try:
            status, printed = run_within(sizes.compile_s, command, {**os.environ, "CUDA_VISIBLE_DEVICES": ""})
        except subprocess.TimeoutExpired:
            # what is compiled serves; the others are compiled where they are launched
            return {"note": f"not all kernels were compiled in {sizes.compile_s:g} s"}
    lines = printed.strip().splitlines()
    return {"note": lines[-1] if lines else "", "failed": lines[-20:] if status else []}


def gpu_tests(device: str, sizes: Sizes) -> dict[str, Any]:
    """What pytest marks `gpu`; without a GPU that the tests are there."""
    if importlib.util.find_spec("pytest") is None:
        return {"note": "pytest is not importable: the gpu tests did not run"}
    folder = Path(__file__).resolve().parents[2] / "tests"
    files = [
        path
        for path in sorted(folder.rglob("test_*.py"))
        if "kernels" in path.parts or "mark.gpu" in path.read_text(encoding="utf-8")
    ]
    command = [sys.executable, "-m", "pytest", "-v", "-m", "gpu", "--continue-on-collection-errors"]
    # a machine without hypothesis loses the files that import it, not the others
    command += ["-p", "no:cacheprovider", "--no-header", "--tb=line"]
    command += map(str, files) if device == "cuda" else ["--collect-only", str(files[0])]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    finished = True
    try:
        status, printed = run_within(sizes.tests_s, command, environment)
    except subprocess.TimeoutExpired as error:
        status, printed, finished = 0, bytes(error.output or b"").decode(errors="replace"), False
    lines = printed.strip().splitlines()
    failed = [line for line in lines if " FAILED" in line or line.startswith("ERROR")]
    # 5: nothing was collected
    if status not in (0, 5):
        failed = failed or lines[-20:]
    passed = sum(" PASSED" in line for line in lines)
    return {"finished": finished, "passed": passed, "last": lines[-1:], "failed": failed}


def nccl(device: str, sizes: Sizes) -> dict[str, Any]:
    """Collectives of one card: streams, waits and aliases of a process group through a sharded step."""
    try:
        module: Any = importlib.import_module("shardwise.perf.gpu_scripts.nccl_check")
    except ModuleNotFoundError as error:
        return {"note": f"not here: {error}"}
    results: dict[str, Any] = module.one_card(device)
    failed = [f"{name}: {part['error']}" for name, part in results["sections"].items() if part["status"] != "ok"]
    return {**results, "failed": failed}


# in the order in which they run; those of CHECKS beside one another, the others each with the machine for itself
SECTIONS: dict[str, Callable[[str, Sizes], dict[str, Any]]] = {
    "yardsticks": yardsticks,
    "compile": compile_kernels,
    "correctness": partial(correctness, dtype=torch.float32),
    "correctness_fp16": partial(correctness, dtype=torch.float16),
    "correctness_bf16": partial(correctness, dtype=torch.bfloat16),
    "quantized_correctness": quantized_correctness,
    **gpu_ops.SECTIONS,
    "gpu_tests": gpu_tests,
    "profile": profiles,
    "ab": lambda device, sizes: executed(sizes) if device == "executed" else ab(device, sizes),
    "same_bits": same_bits,
    "autotune": autotune,
    "nccl": nccl,
    "hot_row": hot_row,
    "pinned_table": pinned_table,
    "tiers": tiers,
    "torch_path": torch_path,
    "suite": suite,
    "sanitizer": lambda device, sizes: sanitizer(device, sizes, sizes.sanitizer_s),
}
COMPARED = ("correctness", "correctness_fp16", "correctness_bf16", "quantized_correctness")
CHECKS = ("compile", *COMPARED, *gpu_ops.SECTIONS, "gpu_tests")
# seconds after which a section of a process of its own is ended
MOST_S = {
    "yardsticks": 45.0, "compile": 100.0, "gpu_tests": 110.0, "profile": 75.0, "ab": 150.0, "same_bits": 70.0,
    "autotune": 150.0, "nccl": 60.0, "hot_row": 60.0, "pinned_table": 40.0, "tiers": 120.0,
    "suite": 250.0, "sanitizer": 80.0,
}  # fmt: skip
USUAL_S = 110.0
# of these, what a section does within its time has to end before its process is ended
SPARE_S = 20.0
# a section whose result has a "file": where that goes, beside the report
FILES = {"autotune": "tuned.json", "suite": "perf.json"}


def _fitting(sizes: Sizes) -> Sizes:
    """Fewer rows where tables and Adam's states at the widest dim would take more than half of the device."""
    half = torch.cuda.get_device_properties(0).total_memory // 2
    while 3 * 4 * sizes.tables * sizes.rows * max(sizes.dims) > half:
        sizes = replace(sizes, rows=sizes.rows // 2)
    return sizes


@contextmanager
def _recorded(sections: dict[str, Any], name: str) -> Iterator[dict[str, Any]]:
    record: dict[str, Any] = {"status": "failed"}
    sections[name], start = record, time.perf_counter()
    try:
        yield record
    except Exception:
        record["error"] = traceback.format_exc()[-4000:]
    record["seconds"] = round(time.perf_counter() - start, 2)
    print(f"{name:22} {record['status']:8} {record['seconds']:7.1f} s", flush=True)
    if "error" in record:
        print(record["error"].strip().splitlines()[-1][:500], flush=True)
    result = record.get("result", {})
    for line in (*result.get("failed", ()), *filter(None, [result.get("note")])):
        print(f"  {line[:500]}", flush=True)


def _isolated(name: str, arguments: argparse.Namespace, timeout_s: float) -> dict[str, Any]:
    """Run one section in a process of its own, with what was compiled and tuned before it, and return its record."""
    tuned = arguments.out.parent / FILES["autotune"]
    with tempfile.TemporaryDirectory() as folder:
        part = Path(folder) / "part.json"
        command = [sys.executable, "-m", "shardwise.perf.gpu_scripts.gpu_check", "--device", arguments.device]
        command += ["--out", str(part), "--sections", name, "--cases", arguments.cases]
        command += ["--small"] if arguments.small else []
        command += ["--compiled", str(arguments.compiled)] if arguments.compiled else []
        # what takes as long as it may ends by itself, and has something to tell
        command += ["--limit-s", str(max(1.0, timeout_s - SPARE_S))]
        environment = {**os.environ, **({"SHARDWISE_TUNED": str(tuned)} if tuned.is_file() else {})}
        status, printed = run_within(timeout_s, command, environment)
        if not part.is_file():
            raise RuntimeError(f"exit status {status}: {printed[-3000:]}")
        record: dict[str, Any] = json.loads(part.read_text())["sections"][name]
        return record


def _write(path: Path, text: str) -> None:
    # whole or not at all: the machine may go away at any time
    part = path.with_name(f"{path.name}.part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def _path() -> str:
    """What runs: kernels on a device, interpreted ones, or torch alone."""
    return "interpreted kernels" if INTERPRETED else "kernels" if torch.cuda.is_available() and HAS_TRITON else "torch"


def _sizes(arguments: argparse.Namespace) -> Sizes:
    sizes = SMALL if arguments.small else _fitting(GPU) if arguments.device == "cuda" else GPU
    limits = {name: min(getattr(sizes, name), arguments.limit_s) for name in TIMES}
    return replace(sizes, **limits, cases=arguments.cases)


OPTIONS: Options = {
    "--out": {"type": Path, "default": Path("gpu_check.json"), "help": "the JSON file to write"},
    "--device": {
        "choices": ["cuda", "cpu", "executed"],
        "default": "cuda",
        "help": "executed: the A/B's bits alone, by kernels compiled for sm_90 and run on the CPU",
    },
    "--small": {**FLAG, "help": "tiny sizes: a proof that the script runs"},
    "--sections": {"nargs": "+", "choices": list(SECTIONS), "default": list(SECTIONS)},
    "--keep": {**FLAG, "help": "add to what the JSON has of other sections"},
    "--compiled": {"type": Path, "help": "a folder of gpu_precompile: the cache of Triton"},
    "--cases": {"default": "", "metavar": "REGEX", "help": "of the suite only those with this in 'group: name'"},
    "--isolate": {**FLAG, "help": "each section in a process of its own"},
    "--limit-s": {"type": float, "default": 500, "help": "start no section after this many seconds"},
}


class Run:
    """One run of the script: its report, and its sections one after the other."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments, self.start, self.lock = arguments, time.perf_counter(), Lock()
        self.sizes = _sizes(arguments)
        self.sections: dict[str, Any] = {}
        if arguments.keep and arguments.out.is_file():
            self.sections = json.loads(arguments.out.read_text(encoding="utf-8"))["sections"]
        info = {**machine.described(arguments.device, torch.get_num_threads()), "path": _path()}
        self.report = {
            "machine": info, "commit": machine.commit_info(), "sizes": asdict(self.sizes), "sections": self.sections,
        }  # fmt: skip
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        for name in () if arguments.keep else FILES.values():
            # of an earlier run
            (arguments.out.parent / name).unlink(missing_ok=True)

    def go(self, name: str) -> None:
        """Run a section, unless the time is used up, and write the report."""
        left = self.arguments.limit_s - (time.perf_counter() - self.start)
        if left <= 0:
            self.sections[name] = {
                "status": "not run", "error": f"the {self.arguments.limit_s:g} s were used up: --keep --sections {name}"
            }  # fmt: skip
        else:
            with _recorded(self.sections, name) as record:
                if self.arguments.isolate:
                    record.update(_isolated(name, self.arguments, min(left, MOST_S.get(name, USUAL_S))))
                else:
                    record["result"] = SECTIONS[name](self.arguments.device, self.sizes)
                    record["status"] = "failed" if record["result"].get("failed") else "ok"
                if record.get("result", {}).get("file") and name in FILES:
                    text = json.dumps(record["result"]["file"], indent=1) + "\n"
                    _write(self.arguments.out.parent / FILES[name], text)
        with self.lock:
            # after every section, so that a machine that goes away leaves what it had
            _write(self.arguments.out, json.dumps(self.report, indent=1) + "\n")
            try:
                _write(self.arguments.out.with_suffix(".html"), gpu_page.page(self.report))
            # minutes on a card are not lost for a page, which the JSON can be made into again
            except Exception as error:
                print(f"no page: {in_a_line(error)}", flush=True)

    def go_all(self) -> None:
        """The sections that were asked for, in the order of SECTIONS."""
        wanted = [name for name in SECTIONS if name in self.arguments.sections]
        checks = [name for name in wanted if name in CHECKS]
        if "yardsticks" in wanted:
            self.go("yardsticks")
        workers = max(1, min(len(CHECKS), (os.cpu_count() or 1) // 2)) if self.arguments.isolate else 1
        # they mostly wait for compilers
        with ThreadPoolExecutor(workers) as pool:
            list(pool.map(self.go, checks))
        others = [name for name in wanted if name not in (*CHECKS, "yardsticks")]
        if "sanitizer" in others and any(
            self.sections[name]["status"] == "failed" for name in checks if name != "compile"
        ):
            # what it sees explains more than any time
            others = ["sanitizer", *(name for name in others if name != "sanitizer")]
        for name in others:
            self.go(name)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the sections and write the JSON and its page; 0 if all of them are ok."""
    arguments = parser_of(OPTIONS, "gpu_check", (__doc__ or "").split("\n")[0]).parse_args(argv)
    if arguments.device == "executed":
        arguments.sections = ["ab"]
    if arguments.device == "cuda" and not torch.cuda.is_available():
        print("gpu_check: torch sees no CUDA device; --device cpu --small proves the script without one")
        return 2
    if arguments.compiled is not None and HAS_TRITON:
        arguments.compiled.mkdir(parents=True, exist_ok=True)
        if not arguments.isolate:
            gpu_precompile.use(arguments.compiled)
        elif entries := gpu_precompile.relocate(arguments.compiled):
            print(f"{entries} kernels were compiled beforehand")
    run = Run(arguments)
    run.go_all()
    print(f"wrote {arguments.out}")
    return 0 if all(record["status"] == "ok" for record in run.sections.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
