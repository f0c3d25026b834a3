"""The grid of an update: its size follows the device, and settings that an A/B may force."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shardwise.kernels import configs, persistent_grid
from shardwise.kernels.persistent_grid import Multiprocessors, persistent_programs, resident_programs
from shardwise.kernels.update import update
from shardwise.perf.compile import cases as launched, compiled
from shardwise.perf.compile.cases import Batch

HERE = torch.device("cuda", 1)
A100 = SimpleNamespace(
    multi_processor_count=108, regs_per_multiprocessor=65_536, max_threads_per_multi_processor=2048, name="A100"
)


@pytest.fixture
def a100(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[torch.device]]:
    """Every GPU is an A100; which of them was asked for its properties."""
    asked: list[torch.device] = []

    def properties(device: torch.device) -> SimpleNamespace:
        asked.append(device)
        return A100

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    persistent_grid.multiprocessors.cache_clear()
    yield asked
    persistent_grid.multiprocessors.cache_clear()


def update_of(batch: Batch, **settings: Any) -> launched.Case:
    (case,) = [
        case
        for case in launched.launches(lambda: launched.step(batch, "rowwise_adagrad", **settings), "of a test")
        if case.kernel_name == "update"
    ]
    return case


def launched_with(batch: Batch, rule: str = "sgd") -> dict[str, Any]:
    """Arguments of the update's launch, without one."""
    with launched._noted() as noted:
        launched.step(batch, rule)
    kernel, args, options = noted["update"]
    return {**dict(zip(kernel.arg_names, args, strict=True)), **options}


def test_a_grid_has_as_many_programs_as_the_device_has_multiprocessors_for(a100: list[torch.device]) -> None:
    assert persistent_programs(HERE) == 108 * 16
    # 4 warps of 56 registers: 65,536 of them are enough for 9 programs, of 64 registers for 8
    assert [resident_programs(HERE, 4, n) for n in (56, 57, 64, 128)] == [108 * 9, 108 * 8, 108 * 8, 108 * 4]
    # threads end at 16 programs of 4 warps, and programs at 32 where they are small; without a bound of registers too
    assert [resident_programs(HERE, *few) for few in ((4, 16), (1, 16), (1, 0))] == [108 * 16, 108 * 32, 108 * 32]
    assert resident_programs(HERE, 32, 255) == 108
    assert a100 == [HERE]
    # what is no GPU counts as an H100
    assert persistent_programs(torch.device("cpu")) == 132 * 16


def test_a_launch_has_the_programs_of_its_device_or_what_a_variant_forces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(persistent_grid, "PERSISTENT_PROGRAMS", 0)
    monkeypatch.setattr(persistent_grid, "multiprocessors", lambda device: Multiprocessors(1, 65_536, 2048))
    # 32 ids are at most 33 chunks; a program has one of them and 8 warps, whose threads take 128 registers at most
    many, few = Batch(4096, samples=32), Batch(4096, samples=8)
    assert (launched_with(many)["programs"], launched_with(few)["programs"]) == (16, 9)
    variants: list[tuple[dict[str, configs.Setting], int]] = [
        ({"update.waves": 1}, 2),
        ({"update.waves": 3}, 6),
        ({"update.waves": 1, "update.registers": 40}, 6),
        ({"update.waves": 1, "update.tile": (1, 4)}, 4),
        ({"update.programs": 5}, 5),
    ]
    for settings, programs in variants:
        with configs.variant(settings):
            assert launched_with(many)["programs"] == programs


def test_a_variant_says_how_a_launch_asks_for_memory() -> None:
    ways = ("NEXT", "PREFETCH", "CONTIGUOUS")
    plain = launched_with(Batch(128))
    assert [plain[way] for way in ways] == [False] * 3
    # SGD has no states
    assert plain["maxnreg"] == update.FEWER_REGISTERS < update.REGISTERS
    assert launched_with(Batch(128), "rowwise_adagrad")["maxnreg"] == update.REGISTERS
    assert launched_with(Batch(128, shifted=True), "rowwise_adagrad")["maxnreg"] == update.FEWER_REGISTERS
    assert launched_with(Batch(4096))["maxnreg"] == update.WIDE_REGISTERS
    for name, way in zip(("update.next_entries", "update.prefetch", "update.contiguous"), ways, strict=True):
        with configs.variant({name: True}):
            assert [other for other in ways if launched_with(Batch(128))[other]] == [way]
    with configs.variant({"update.registers": 48}):
        assert launched_with(Batch(128))["maxnreg"] == 48
    with configs.variant({"update.registers": 0}):
        assert "maxnreg" not in launched_with(Batch(128))


@pytest.mark.compiled
@pytest.mark.parametrize("name", ["update.next_entries", "update.prefetch", "update.contiguous"])
def test_what_a_variant_forces_compiles_without_spills(name: str) -> None:
    plain, forced = (update_of(Batch(128), forced=settings) for settings in ({}, {name: True}))
    report = compiled.compile_case(forced, "sm_90")
    assert report.spills == 0 and report.registers <= update.REGISTERS
    assert report.row_sums == compiled.compile_case(plain, "sm_90").row_sums
