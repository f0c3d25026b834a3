"""What the doctor says of versions, devices, tuning and links, on machines that are not this one."""

from __future__ import annotations

import ast
import json
import multiprocessing
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkout import ROOT

from shardwise.kernels import _op, configs, numba_loops
from shardwise.perf.doctor import bandwidth, devices, links, tested, tuned, versions
from shardwise.perf.doctor.findings import NOTE, OK, PROBLEM, UNTESTED, Finding
from shardwise.perf.doctor.proven import PROVEN
from shardwise.perf.selftest.run import Path as OpPath, Result, SelfTest


def a_torch(version: str, cuda: str | None = None, available: bool = False) -> Any:
    def init() -> None:
        raise RuntimeError("Found no NVIDIA driver on your system")

    return SimpleNamespace(
        __version__=version, version=SimpleNamespace(cuda=cuda, hip=None),
        cuda=SimpleNamespace(is_available=lambda: available, init=init),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("torch_", "driver", "mark", "words", "mend"),
    [
        (a_torch("2.13.0+cpu"), "", OK, "2.13.0+cpu, built for the CPU alone", ""),
        (a_torch("2.13.0", "13.0", True), "580.1", OK, "2.13.0, built for CUDA 13.0", ""),
        (a_torch("2.8.1+cpu"), "", PROBLEM, "shardwise needs 2.9 or newer", 'pip install "torch>=2.9"'),
        (a_torch("2.13.0+cpu"), "580.1", NOTE, "an NVIDIA driver (580.1): its GPU cannot be used", "a CUDA build"),
        (a_torch("2.13.0", "13.0"), "", NOTE, "finds no GPU: Found no NVIDIA driver on your system", ""),
    ],
)
def test_of_torch_what_it_was_built_for_and_whether_that_fits(
    torch_: Any, driver: str, mark: str, words: str, mend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(versions, "nvidia_driver", lambda: driver)
    finding = versions._of_torch(torch_)
    assert finding.mark == mark and words in finding.text and mend in finding.mend


@pytest.mark.parametrize(
    ("installed", "asked", "gpu", "mark", "words", "mend"),
    [
        ("3.7.1", "3.7.1", True, OK, "3.7.1", ""),
        ("3.9.0", "", False, OK, "3.9.0", ""),
        (None, "", False, OK, "not installed: kernels on a GPU need it", ""),
        (None, "3.7.1", True, NOTE, "not installed: a GPU runs the slower torch path", 'pip install "triton==3.7.1"'),
        ("3.6.0", "3.7.1", True, PROBLEM, "this torch was made for triton 3.7.1", 'pip install "triton==3.7.1"'),
        ("3.6.0", "3.7.1", False, NOTE, "this torch was made for triton 3.7.1", 'pip install "triton==3.7.1"'),
        ("3.5.0", "", False, NOTE, "compiled by 3.6 to 3.9 alone", 'pip install "triton>=3.6,<3.10"'),
        ("3.5.0", "3.5.0", True, NOTE, "compiled by 3.6 to 3.9 alone", "a torch that comes with one of these"),
        ("4.0.0", "4.0.0", True, NOTE, "compiled by 3.6 to 3.9 alone", "a torch that comes with one of these"),
    ],
)
def test_of_triton_whether_torch_and_the_kernels_get_on_with_it(
    installed: str | None, asked: str, gpu: bool, mark: str, words: str, mend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(versions, "find_spec", lambda name: installed and object())
    monkeypatch.setattr(versions, "_version_of", lambda *names: installed)
    monkeypatch.setattr(versions, "asked_by_torch", lambda: asked)
    finding = versions._triton(a_torch("2.13.0", available=gpu))
    assert finding.mark == mark and words in finding.text and finding.mend.startswith(mend)


@pytest.mark.parametrize(
    ("line", "asked"),
    [
        ('triton==3.7.1; platform_system == "Linux"', "3.7.1"),
        ("pytorch-triton-rocm==3.5.0 ; platform_system == 'Linux'", "3.5.0"),
        ("sympy>=1.13.3", ""),
    ],
)
def test_the_triton_that_torch_asks_for_is_read_in_its_metadata(
    line: str, asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(versions, "requires", lambda name: ["numpy", line])
    assert versions.asked_by_torch() == asked


def test_of_numba_that_is_missing_or_does_not_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "find_spec", lambda name: None)
    missing = versions._numba()
    assert missing.mark == NOTE and "not installed" in missing.text and "pip install" in missing.mend

    def broken(name: str) -> Any:
        raise ImportError("Numba needs NumPy 2.3 or less")

    monkeypatch.setattr(versions, "find_spec", lambda name: object())
    monkeypatch.setattr(versions, "import_module", broken)
    finding = versions._numba()
    assert finding.mark == NOTE and "does not work: ImportError: Numba needs NumPy 2.3 or less" in finding.text


def test_an_old_python_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions.sys, "version_info", (3, 15, 0))
    finding = versions._python()
    assert finding.mark == NOTE and "tested on 3.10 to 3.14" in finding.text


@pytest.mark.parametrize(
    ("architecture", "mark", "words"),
    [
        ("sm_90", OK, "every kernel is compiled and checked for sm_90"),
        ("gfx942", OK, "every kernel is compiled and checked for gfx942"),
        ("sm_89", OK, "at two widths"),
        ("sm_75", OK, "products of fp16 and bf16 jagged tensors are not supported"),
        ("sm_120", NOTE, "nobody has compiled the kernels for sm_120; they are for sm_80, sm_90"),
    ],
)
def test_of_an_architecture_whether_kernels_compile_for_it(architecture: str, mark: str, words: str) -> None:
    finding = devices.kernels_for("GPU 0", architecture)
    assert finding.mark == mark and words in finding.text


class _Gpu:
    """What torch says of an H200, on a machine without one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        properties = SimpleNamespace(name="NVIDIA H200", major=9, minor=0, multi_processor_count=132)
        for name, value in {
            "is_available": lambda: True,
            "device_count": lambda: 1,
            "get_device_properties": lambda device: properties,
            "mem_get_info": lambda device=None: (100 << 30, 139 << 30),
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(devices, "_driver", lambda: "580.1")
        configs.identity.cache_clear()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    yield _Gpu(monkeypatch)
    configs.identity.cache_clear()


@pytest.mark.usefixtures("gpu")
@pytest.mark.skipif(_op.INTERPRETED, reason="kernels are interpreted")
def test_of_a_gpu_its_memory_its_kernels_and_its_path(monkeypatch: pytest.MonkeyPatch) -> None:
    assert devices.present() == ["cpu", "cuda:0"]
    monkeypatch.setattr(_op, "HAS_TRITON", True)
    findings = {finding.what: finding for finding in devices.devices(["cpu", "cuda:0"])}
    assert findings["GPU 0"].text == (
        "NVIDIA H200, sm_90; 139 GiB of memory, 100 free; 132 multiprocessors; driver 580.1"
    )
    assert findings["kernels, GPU 0"].mark == OK and findings["path, GPU 0"].text == "Triton's kernels"
    monkeypatch.setattr(_op, "HAS_TRITON", False)
    without = {finding.what: finding for finding in devices.devices(["cuda:0"])}["path, GPU 0"]
    assert without.mark == NOTE and without.text.startswith("torch alone, since triton is not installed")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"NUMBA": False}, "torch alone, since SHARDWISE_NUMBA=0"),
        ({"INTERPRETED": True}, "Triton's interpreter, a thousand times slower, since TRITON_INTERPRET=1"),
    ],
)
def test_the_path_of_cpu_tensors_has_a_reason(
    change: dict[str, bool], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_op, "INTERPRETED", False)
    for name, value in change.items():
        monkeypatch.setattr(_op, name, value)
    finding = devices._path_on_cpu()
    assert finding.mark == NOTE and words in finding.text and finding.mend


def test_a_container_with_fewer_cores_than_threads_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "core_quota", lambda: 0.5)
    finding = devices._cpu()
    assert finding.mark == NOTE and "may use 0.5 cores" in finding.text and finding.mend == "export OMP_NUM_THREADS=1"


@pytest.fixture
def tuned_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Writes a file of tuned configs that launches look in; forgotten afterwards."""

    def write(content: dict[str, Any] | str) -> None:
        file = tmp_path / "device.json"
        file.write_text(content if isinstance(content, str) else json.dumps({"shardwise_tuned": 1, **content}))
        monkeypatch.setattr(configs, "_given", (file,))

    yield write
    monkeypatch.undo()
    configs.forget()


def _tuned(*names: str) -> dict[str, Finding]:
    return {finding.what: finding for finding in tuned.tuned(names)}


@pytest.mark.usefixtures("gpu")
@pytest.mark.skipif(_op.INTERPRETED, reason="kernels are interpreted")
def test_of_tuning_what_there_is_and_the_command_for_the_rest(tuned_file: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_op, "HAS_TRITON", True)
    monkeypatch.setattr(configs, "triton_version", lambda: "3.7.1")
    findings = _tuned("cpu", "cuda:0")
    assert findings["CPU path"].mark == findings["GPU 0"].mark == NOTE
    assert findings["CPU path"].mend.startswith("shardwise kernels autotune --device cpu")
    assert findings["GPU 0"].mend.startswith("shardwise kernels autotune") and "--device" not in findings["GPU 0"].mend
    assert findings["planner"].mend == "shardwise plan calibrate --device cuda --out constants.json"

    entry = {"kernel": "gather", "dtype": "fp32", "dim": 64, "length": 1, "triton": "3.7.1", "config": {}}
    tuned_file({"device": "NVIDIA H200", "architecture": "sm_90", "entries": [entry]})
    assert _tuned("cuda:0")["GPU 0"].text == "1 configs are tuned for NVIDIA H200 and triton 3.7.1"
    tuned_file({"device": "NVIDIA H100", "architecture": "sm_90", "entries": [entry]})
    near = _tuned("cuda:0")["GPU 0"]
    assert near.mark == NOTE and near.text == "1 configs are those of another sm_90, none of NVIDIA H200"
    tuned_file({"device": "NVIDIA H200", "architecture": "sm_90", "entries": [{**entry, "triton": "3.6.0"}]})
    assert "tuned for triton 3.6.0, not for 3.7.1" in _tuned("cuda:0")["GPU 0"].text

    setting = {"setting": "update_tasks", "threads": torch.get_num_threads(), "value": 4}
    tuned_file({"device": configs.cpu_name(), "architecture": "cpu", "cpu": [setting]})
    assert _tuned("cpu")["CPU path"].mark == OK
    tuned_file("{")
    assert "are not used: no JSON" in _tuned("cpu")["files"].text


def test_where_nothing_can_be_written_beside_the_kernels_the_command_says_where_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In an installed wheel of another user's, autotune ended with "nothing can be written"."""
    monkeypatch.setattr(tuned.os, "access", lambda *args: False)
    monkeypatch.setattr(_op, "TUNED", None)
    assert tuned._command("--device cpu") == (
        "shardwise kernels autotune --device cpu --out ~/shardwise_tuned.json;"
        " export SHARDWISE_TUNED=~/shardwise_tuned.json"
    )
    monkeypatch.setattr(_op, "TUNED", "/data/mine.json")
    assert tuned._command("") == "shardwise kernels autotune --out /data/mine.json"


def test_a_bandwidth_is_bytes_over_the_median_time() -> None:
    finding = bandwidth._finding("a copy", 4_000_000, [400.0, 1000.0, 800.0, 900.0, 1000.0], "words")
    assert finding.data["gb_per_s"] == 4.444 and finding.data["p90"] == 10.0 and finding.data["p10"] == 4.0
    assert finding.mark == NOTE and "something else runs here" in finding.text
    assert bandwidth._finding("a copy", 1000, [1.0] * 5, "words").text == "1 GB/s (1 to 1); words"


def test_memory_is_measured_within_its_time_or_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("COPY_BYTES", "TABLE_BYTES"):
        monkeypatch.setattr(bandwidth, name, 1 << 20)
    monkeypatch.setattr(bandwidth, "SECONDS", 0.01)
    copy, gather = bandwidth.bandwidths(["cpu"])
    assert [finding.what for finding in (copy, gather)] == ["CPU, copy", "CPU, gather"]
    assert copy.data["gb_per_s"] > 0 and 5 <= copy.data["calls"] <= bandwidth.REPEATS
    monkeypatch.setattr(bandwidth.machine, "memory_bytes", lambda device: 1 << 20)
    (small,) = bandwidth.bandwidths(["cpu"])
    assert small.mark == UNTESTED and "1 MiB are free" in small.text


@pytest.mark.full
def test_two_processes_that_meet_are_measured() -> None:
    (finding,) = links.links(["cpu"])
    assert finding.mark == OK and finding.data["latency_us"] > 0 and finding.data["gb_per_s"] > 0


@pytest.mark.full
def test_two_processes_that_cannot_meet_are_a_problem_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no_such_interface")
    (finding,) = links.links(["cpu"])
    assert finding.mark == PROBLEM and "no_such_interface" in finding.text and "GLOO_SOCKET_IFNAME=lo" in finding.mend


def test_two_processes_that_do_not_come_are_given_up_and_ended() -> None:
    before = {*multiprocessing.active_children()}
    (finding,) = links.links(["cpu"], timeout_s=0.01)
    assert finding.mark == PROBLEM and "did not exchange anything within 0.01 s" in finding.text
    # other tests of this process keep ranks
    assert {*multiprocessing.active_children()} <= before


def _of_results(*results: Result) -> Sequence[Finding]:
    return [*tested._of_paths(SelfTest(results, 1.0, 0.0, ()), 20.0)]


def test_what_was_not_tested_is_never_ok() -> None:
    path = OpPath("cuda:0", "triton")
    left = Result("offsets", path, passed=1, untested=["b: 20 s were over"])
    (finding,) = _of_results(Result("offsets", path, untested=["b: 20 s were over"]))
    assert finding.mark == UNTESTED and finding.what == "GPU 0, Triton"
    assert finding.text == "1 checks did not fit 20 s: offsets" and "--seconds" in finding.mend
    good, rest = _of_results(left, Result("padded", path, passed=2))
    assert (good.mark, rest.mark, rest.text) == (OK, UNTESTED, finding.text)
    assert good.text == "3 of 4 checks passed, of all families"
    assert good.data["families"][0]["untested"] == ["b: 20 s were over"]


def test_many_failures_are_counted_and_not_all_printed() -> None:
    path = OpPath("cpu", "numba")
    (finding,) = _of_results(Result("offsets", path, failed=[f"check {n}: differs" for n in range(20)]))
    lines = finding.text.splitlines()
    assert finding.mark == PROBLEM and len(lines) == tested.MOST + 2
    assert lines[0] == "20 of 20 checks failed: results here cannot be trusted" and lines[-1] == "and 8 more"
    assert lines[1] == "offsets, check 0: differs" and len(finding.data["failures"]) == 20
    assert finding.mend.startswith("SHARDWISE_NUMBA=0 does without numba")


def test_without_a_gpu_it_says_that_no_kernel_has_run_on_one() -> None:
    first, *rest = tested.proof()
    if not PROVEN.gpus and not torch.cuda.is_available():
        assert (first.mark, first.text) == (NOTE, "no kernel of shardwise has run on a GPU yet")
        assert "what follows is proven without one" in first.mend
    assert {finding.what for finding in rest} >= {"compiled", "executed", "interpreted"}


def test_numba_is_asked_once_whether_it_works() -> None:
    """The doctor and ops must not differ in this."""
    assert (devices._path_on_cpu().data["path"] == "numba") == (numba_loops.compiles() and not _op.INTERPRETED)


@pytest.mark.parametrize("name", versions.VISIBLE)
def test_a_variable_that_hides_gpus_is_what_to_unset(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in versions.VISIBLE:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv(name, "7,abc")
    assert versions._to_find_one() == f"unset {name}, which is '7,abc'"


def test_every_finding_that_is_not_ok_says_how_to_mend_it() -> None:
    """Fourteen said what was wrong and left people alone with it."""
    silent = []
    for path in sorted((ROOT / "perf" / "doctor").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Finding":
                mark = ast.unparse(node.args[0])
                mended = len(node.args) > 3 or any(argument.arg == "mend" for argument in node.keywords)
                if mark != "OK" and not mended:
                    silent.append(f"{path.name}:{node.lineno}")
    assert silent == []
