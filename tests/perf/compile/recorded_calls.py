"""What every recorded call is held to: its programs do not race, their order does not matter, no bytes but declared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from kernel_inputs import assert_same_bits, torch_device
from torch import Tensor

from shardwise.perf.compile.recorded import SECTOR, Kind, Launch, races, recorded, sectors
from shardwise.perf.suite.declared import Traffic


class Call(NamedTuple):
    """What an op returned or changed, the bytes it declares, where they lie; the rest as `assert_within` takes it."""

    results: Sequence[Tensor]
    traffic: Traffic | None = None
    memory: dict[str, Tensor] = {}
    arrays: str = "IOP"
    ends: int = 2
    rest: int = 4


def assert_sound(make: Callable[[], Call], orders: Sequence[int] = (1,)) -> None:
    """No races, the declared bytes, and the same bits in other orders of programs."""
    torch_device("interpreted")
    torch.manual_seed(0)
    with recorded() as launches:
        done = make()
    assert launches
    assert [race for launch in launches for race in races(launch)] == []
    if done.traffic is not None:
        assert_within(launches, done.traffic, *done[2:])
    for order in orders:
        torch.manual_seed(0)
        with recorded(order=order):
            again = make()
        for first, other in zip(again.results, done.results, strict=True):
            assert_same_bits(first, other)


def by_kind(traffic: Traffic) -> list[tuple[Kind, dict[str, int]]]:
    return [("read", traffic.reads), ("write", traffic.writes)]


def assert_within(
    launches: list[Launch],
    traffic: Traffic,
    memory: dict[str, Tensor],
    arrays: str = "IOP",
    ends: int = 2,
    rest: int = 4,
) -> None:
    """No more sectors move than declared.

    Of tensors of rows every load or store of a tile counts, and none is to spare. Neighbours in `arrays` share sectors
    and a program comes back to them: each program counts a sector once, and may touch `ends` more than its share. All
    other memory has what is declared of no tensor in `memory`, and `rest` sectors a program.
    """
    programs = sum(len(launch.programs) for launch in launches)
    for kind, parts in by_kind(traffic):
        others = sum(sectors(launch, kind).fetched for launch in launches)
        for letter, tensor in memory.items():
            counts = [sectors(launch, kind, tensor) for launch in launches]
            fetched = sum(count.fetched for count in counts)
            moved = SECTOR * (fetched if letter in arrays else sum(count.requested for count in counts))
            allowed = parts.get(letter, 0) + (ends * SECTOR * programs if letter in arrays else 0)
            assert moved <= allowed, f"{letter}: {moved} bytes to {kind}, {allowed} declared"
            others -= fetched
        allowed = sum(n for letter, n in parts.items() if letter not in memory) + rest * SECTOR * programs
        assert SECTOR * others <= allowed, f"other memory: {SECTOR * others} bytes to {kind}, {allowed} declared"
