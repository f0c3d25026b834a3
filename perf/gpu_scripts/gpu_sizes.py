"""Sizes of the sections of the GPU check."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sizes:
    """How much a section does: `GPU` fills a large device, `SMALL` suits the interpreter."""

    tables: int
    rows: int
    batch: int
    length: int
    dims: tuple[int, ...]
    repeats: int
    race_repeats: int
    copy_bytes: int
    checked_tables: int
    checked_batch: int
    compile_s: float
    tests_s: float
    profile_s: float
    ab_s: float
    ab_rounds: int
    same_bits_s: float
    tune_s: float
    suite_s: float
    sanitizer_s: float
    small: bool = False
    # only cases of the suite with this expression in "group: name"
    cases: str = ""


GPU = Sizes(
    tables=8, rows=1 << 20, batch=8192, length=20, dims=(64, 128, 256), repeats=30, race_repeats=20,
    copy_bytes=1 << 30, checked_tables=9, checked_batch=64, compile_s=80, tests_s=90, profile_s=50,
    ab_s=120, ab_rounds=20, same_bits_s=45, tune_s=120, suite_s=150, sanitizer_s=60,
)  # fmt: skip
SMALL = Sizes(
    tables=2, rows=50, batch=6, length=3, dims=(8, 16), repeats=3, race_repeats=3,
    copy_bytes=1 << 16, checked_tables=4, checked_batch=4, compile_s=60, tests_s=60, profile_s=30,
    ab_s=60, ab_rounds=2, same_bits_s=20, tune_s=10, suite_s=240, sanitizer_s=20, small=True,
)  # fmt: skip
# seconds that sections may take, of their own accord
TIMES = ("compile_s", "tests_s", "profile_s", "ab_s", "same_bits_s", "tune_s", "suite_s", "sanitizer_s")
