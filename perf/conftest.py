"""`pytest perf/`: the cases of the suite as benchmarks of pytest-benchmark, with its storage and its comparisons."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shardwise._version import how_to_install
from shardwise.perf.suite import machine
from shardwise.perf.suite.case import (
    DEVICES,
    SUITES,
    Case,
    Setting,
    chosen,
)
from shardwise.perf.suite.cases import CASES
from shardwise.perf.suite.clock import Clock
from shardwise.perf.suite.measure import Failure, Measured
from shardwise.perf.suite.options import FLAG, Options
from shardwise.perf.suite.record import Record
from shardwise.perf.suite.storage import appendix

CHOSEN = pytest.StashKey[list[Case]]()
SETTING = pytest.StashKey[Setting]()
SIZES = pytest.StashKey[list[Record]]()
FAILURES = pytest.StashKey[list[Failure]]()
OPTIONS: Options = {
    "--suite": {"action": "append", "choices": SUITES, "help": "by default that of the device; may repeat"},
    "--device": {"choices": DEVICES, "default": "cpu"},
    "--only-case": {"default": "", "metavar": "REGEX", "help": "only cases with this in 'group: name'"},
    "--small": {**FLAG, "help": "tiny sizes: a proof that all of it runs"},
    "--peers": {**FLAG, "help": "FBGEMM and TorchRec too, where they are installed"},
    "--threads": {"type": int, "help": "of the CPU, by default one for each core"},
}


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("shardwise", "the regression suite of shardwise")
    for flag, arguments in OPTIONS.items():
        group.addoption(flag, **arguments)


def pytest_configure(config: pytest.Config) -> None:
    if not config.pluginmanager.hasplugin("benchmark"):
        raise pytest.UsageError(f"pytest perf/ needs pytest-benchmark: {how_to_install('perf')}")
    device = str(config.getoption("device"))
    others = machine.importable_peers() if config.getoption("peers") else frozenset[str]()
    try:
        cases = chosen(CASES, config.getoption("suite") or [device], device, str(config.getoption("only_case")))
    except ValueError as error:
        raise pytest.UsageError(str(error)) from None
    if device == "cuda" and not torch.cuda.is_available():
        raise pytest.UsageError("--device cuda: torch sees no CUDA device here")
    torch.set_num_threads(config.getoption("threads") or machine.cores())
    config.stash[CHOSEN] = cases
    config.stash[SETTING] = Setting(
        device, bool(config.getoption("small")), frozenset({"torch", *others}), machine.memory_for_tables(device)
    )
    config.stash[SIZES], config.stash[FAILURES] = list[Record](), list[Failure]()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" not in metafunc.fixturenames:
        return
    cases = metafunc.config.stash[CHOSEN]
    sizes = metafunc.function.__name__ == "test_size"
    metafunc.parametrize("name", [_parameter(case) for case in cases if (case.unit != "s") == sizes])


def _parameter(case: Case) -> Any:
    marks = [pytest.mark.benchmark(group=case.group, timer=Clock(), disable_gc=True)] if case.unit == "s" else []
    return pytest.param(case.name, id=case.name, marks=marks)


@pytest.fixture
def case(name: str) -> Case:
    """The case that a test is about; its name alone is a parameter, because parameters are stored."""
    return next(case for case in CASES if case.name == name)


@pytest.fixture
def setting(pytestconfig: pytest.Config) -> Setting:
    """Where and how large cases are made."""
    return pytestconfig.stash[SETTING]


@pytest.fixture
def clock(request: pytest.FixtureRequest) -> Clock:
    """The clock that the benchmark of this test reads."""
    marker = request.node.get_closest_marker("benchmark")
    timer: Clock = marker.kwargs["timer"]
    return timer


@pytest.fixture
def sizes(pytestconfig: pytest.Config) -> list[Record]:
    """Sizes that were measured, for the file."""
    return pytestconfig.stash[SIZES]


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    report = (yield).get_result()
    if report.failed and isinstance(item, pytest.Function) and "case" in item.fixturenames:
        failed_case: Case = next(case for case in CASES if case.name == item.callspec.params["name"])
        message = str(call.excinfo.value if call.excinfo else "failed")[:1000]
        item.config.stash[FAILURES].append(
            Failure(failed_case.name, failed_case.group, message, str(report.longrepr)[-4000:])
        )


@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_update_machine_info(config: pytest.Config, machine_info: dict[str, Any]) -> None:
    # as `perf run` writes it: pytest-benchmark warns of any difference
    machine_info.clear()
    machine_info.update(machine.machine_info(config.stash[SETTING].device, torch.get_num_threads()))


@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_update_json(config: pytest.Config, output_json: dict[str, Any]) -> None:
    measured = Measured((*config.stash[SIZES],), (*config.stash[FAILURES],))
    setting = config.stash[SETTING]
    about = {
        "suites": config.getoption("suite") or [setting.device], "small": setting.small, "laps": 1,
        "peers": sorted(setting.peers), "load": machine.load(),
    }  # fmt: skip
    output_json["shardwise"] = appendix(measured, about)
