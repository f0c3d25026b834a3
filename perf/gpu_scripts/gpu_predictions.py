"""What the kernels should take on an H100 and an H200, written down before any of them ran there, as data.

From the compiled code (sm_90, triton 3.7.1), the bytes that ops declare, and the assumptions below: a model, no
measurement. `reviewed` is of the kernels as they were when the model was made, `changed` of those that load a row's
number, source and weights side by side, index with one id a thread and search less.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Range = tuple[float, float]

# GB/s of a copy, ns of a load, multiprocessors, warp instructions a second at full issue
ASSUMPTIONS: Mapping[str, Mapping[str, float]] = {
    "H100": {
        "copy_gb_per_s": 3000, "dram_ns": 600, "dram_loaded_ns": 750, "l2_ns": 270, "multiprocessors": 132,
        "warp_instructions_per_s": 0.9e12,
    },
    "H200": {
        "copy_gb_per_s": 4300, "dram_ns": 600, "dram_loaded_ns": 750, "l2_ns": 270, "multiprocessors": 132,
        "warp_instructions_per_s": 0.9e12,
    },
}  # fmt: skip


@dataclass(frozen=True)
class Prediction:
    """Microseconds (or `unit`) on a card, from and to; `floor` is the declared bytes over a copy's bandwidth.

    `where` says what is measured: ("ab", shape, call), ("kernel", shape, parts of names ...), ("step", shape, call),
    ("yardstick", name ...).
    """

    name: str
    where: tuple[str, ...]
    reviewed: Mapping[str, Range]
    changed: Mapping[str, Range]
    floor: Mapping[str, float]
    bound: str
    unit: str = "us"


def _both(h100: Range | None, h200: Range | None) -> Mapping[str, Range]:
    return {name: value for name, value in (("H100", h100), ("H200", h200)) if value}


def _floor(h100: float, h200: float) -> Mapping[str, float]:
    return {"H100": h100, "H200": h200}


_FORWARD_A, _FORWARD_A_FP16 = _both((1050, 1150), (770, 880)), _both((580, 660), (470, 550))
_FORWARD_C, _FORWARD_ONE = _both((360, 420), (290, 350)), _both((95, 110), (80, 95))

PREDICTIONS: tuple[Prediction, ...] = (
    Prediction("copy", ("yardstick", "copy", "gb_per_s"), _both((3000, 3000), (4300, 4300)), {}, {}, "DRAM", "GB/s"),
    Prediction("load that misses L2", ("yardstick", "latency_ns", "DRAM"), _both((600, 750), (600, 750)), {}, {},
               "DRAM and TLB", "ns"),
    Prediction("load that hits L2", ("yardstick", "latency_ns", "L2"), _both((270, 270), (270, 270)), {}, {},
               "L2", "ns"),
    Prediction("A forward", ("ab", "A", "forward"), _FORWARD_A, _FORWARD_A, _floor(950, 670),
               "bandwidth; on an H200 latency"),
    Prediction("A fp16 forward", ("ab", "A fp16", "forward"), _FORWARD_A_FP16, _FORWARD_A_FP16, _floor(510, 350),
               "three gathers one after another, rows of 256 bytes"),
    Prediction("A backward", ("ab", "A", "backward"), _both((3900, 4400), (3700, 4200)),
               _both((2250, 2500), (1700, 1900)), _floor(2000, 1400), "five loads one after another"),
    Prediction("A backward: keys of rows", ("kernel", "A", "_row_keys_kernel"), _both((150, 200), (150, 150)), {},
               _floor(30, 30), "issue of instructions"),
    Prediction("A backward: sort", ("kernel", "A", "Sort", "sort", "Onesweep", "RadixHistogram"),
               _both((220, 220), (160, 160)), {}, _floor(180, 120), "bandwidth"),
    Prediction("A backward: marks and chunks", ("kernel", "A", "_mark_kernel", "_chunk_kernel", "Scan"),
               _both((250, 320), (250, 250)), {}, _floor(80, 80), "issue; barriers"),
    Prediction("A backward: update", ("kernel", "A", "_update_kernel"), _both((3200, 3700), (3100, 3600)),
               _both((1800, 2100), None), _floor(1800, 1250), "five loads one after another"),
    Prediction("C forward", ("ab", "C", "forward"), _FORWARD_C, {}, _floor(280, 200),
               "13 features of one id; bags of 100 ids begin late"),
    Prediction("C backward", ("ab", "C", "backward"), _both((1250, 1450), (1200, 1400)), _both((800, 850), None),
               _floor(650, 470), "as A"),
    Prediction("L=1 forward", ("ab", "L=1", "forward"), _FORWARD_ONE, {}, _floor(73, 51), "loads before the first row"),
    Prediction("FBGEMM's default, backward", ("ab", "FBGEMM", "backward"), _both((300, 350), (290, 290)), {},
               {"H100": 120}, "five loads one after another"),
    Prediction("64 x 26, a collection's step", ("step", "64 x 26", "module"), _both((330, 330), (330, 330)), {}, {},
               "the host, eager"),
)  # fmt: skip


def card_of(device_name: str) -> str | None:
    """The card of ASSUMPTIONS that a device's name says it is; None of any other."""
    return next((card for card in ASSUMPTIONS if card in device_name), None)


def measured(prediction: Prediction, sections: Mapping[str, Any]) -> float | None:
    """What the script's sections measured of it, if they did."""
    kind, *path = prediction.where
    if kind == "yardstick":
        found: Any = _result(sections, "yardsticks")
        for name in path:
            found = (found or {}).get(name)
        return None if found is None else float(found)
    if kind == "ab":
        shapes = {one["shape"]: one["default"] for one in _result(sections, "ab").get("shapes", ())}
        us = shapes.get(path[0], {}).get(path[1], {}).get("us")
        return None if us is None else float(us)
    call = path[1] if kind == "step" else "step"
    for one in _result(sections, "profile").get("shapes", ()):
        if (one["shape"], one["call"]) == (path[0], call):
            return float(one["busy_us"] + one["idle_us"]) if kind == "step" else _of_kernels(one["kernels"], path[1:])
    return None


def _result(sections: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found: Mapping[str, Any] = sections.get(name, {}).get("result") or {}
    return found


def _of_kernels(kernels: Sequence[Mapping[str, Any]], parts: Sequence[str]) -> float | None:
    taken = [float(one["us"]) for one in kernels if any(part in one["kernel"] for part in parts)]
    return sum(taken) if taken else None


def compared(device_name: str, sections: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Each prediction for this card beside what was measured; cards that nothing was predicted for have only that."""
    card, rows = card_of(device_name), []
    for one in PREDICTIONS:
        reviewed, changed = (ranges.get(card or "") for ranges in (one.reviewed, one.changed))
        got, expected = measured(one, sections), changed or reviewed
        rows.append(
            {
                "name": one.name,
                "unit": one.unit,
                "bound": one.bound,
                "floor": one.floor.get(card or ""),
                "reviewed": reviewed,
                "changed": changed,
                "measured": got,
                "verdict": _verdict(got, expected, one.unit),
            }  # fmt: skip
        )
    return rows


def _verdict(got: float | None, expected: Range | None, unit: str) -> str:
    if got is None or expected is None:
        return "not measured" if got is None else "not predicted"
    low, high = expected[0] * 0.95, expected[1] * 1.05
    if low <= got <= high:
        return "as predicted"
    return "better" if (got < low) != (unit == "GB/s") else "worse"
