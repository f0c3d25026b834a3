"""The whole check-up, section by section as each is done."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from .findings import PROBLEM, UNTESTED, Finding, Section
from .traps import traps
from .versions import cores, torch_or_error, versions

# is told what is done, and how many of how many parts: 0 of 0 where nobody knows
Tell = Callable[[str, int, int], None]


def device_names() -> list[str]:
    """The devices of this machine, as `--device` takes them; "cpu" alone where torch does not import."""
    torch, _ = torch_or_error()
    if torch is None or not torch.cuda.is_available():
        return ["cpu"]
    return ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]


def examine(devices: Sequence[str], *, quick: bool, seconds: float, tell: Tell) -> Iterator[Section]:
    """Each section when it is done.

    Args:
        devices: those to measure and test, of `device_names`.
        quick: whether to leave out what takes time: measurements, links and the self-test.
        seconds: of the self-test, compiling apart.
        tell: is told what is done.
    """
    tell("versions", 0, 0)
    yield Section("Versions", [*versions()])
    tell("environment", 0, 0)
    environment = Section("Environment", [*traps(cores())])
    broken = _broken(environment)
    if broken:
        yield environment
        yield Section("Devices", [Finding(UNTESTED, "the rest", broken, "mend the problem above, and run it again")])
        return
    yield from _of_shardwise([*devices], quick, seconds, tell)
    yield environment


def _broken(environment: Section) -> str:
    """Why nothing of shardwise can be run here, or nothing."""
    torch, _ = torch_or_error()
    if torch is None:
        return "not looked at: torch does not import"
    if any(
        finding.mark == PROBLEM and finding.what in ("SHARDWISE_NUMBA", "parts") for finding in environment.findings
    ):
        return "not looked at: shardwise does not import"
    return ""


def _of_shardwise(devices: list[str], quick: bool, seconds: float, tell: Tell) -> Iterator[Section]:
    """What needs torch and the kernels."""
    from . import bandwidth, devices as of_devices, links, tested, tuned

    tell("devices", 0, 0)
    yield Section("Devices", [*of_devices.devices(devices)])
    parts: list[tuple[str, str, Callable[[], Iterator[Finding]]]] = [
        ("Bandwidth", "measuring memory", lambda: bandwidth.bandwidths(devices)),
        ("Links", "two processes exchange", lambda: links.links(devices)),
        ("Self-test", "self-test", lambda: tested.self_test(devices, seconds, tell)),
    ]
    for name, doing, part in parts:
        if quick:
            yield Section(name, [Finding(UNTESTED, name.lower(), "left out by --quick", "leave --quick out")])
            continue
        tell(doing, 0, 0)
        yield Section(name, [*_guarded(name, part)])
    tell("tuned configs", 0, 0)
    yield Section("Tuning", [*tuned.tuned(devices)])
    yield Section("Kernels", [*tested.proof()])


def _guarded(name: str, part: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    """The findings of a part; what it raises is one too, so that the rest is still reported."""
    try:
        yield from part()
    except Exception as error:
        text = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        yield Finding(PROBLEM, name.lower(), f"ended early: {text}", "please report it with `shardwise doctor --json`")


def document(sections: Sequence[Section], seconds: float) -> dict[str, Any]:
    """The report for programs."""
    from shardwise._version import __version__

    failed = any(finding.mark == PROBLEM for section in sections for finding in section.findings)
    return {
        "shardwise": __version__, "status": int(failed), "seconds": round(seconds, 1),
        "sections": [section.to_json() for section in sections],
    }  # fmt: skip
