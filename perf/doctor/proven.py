"""Proofs of the kernels that need no GPU, for people who have no checkout that could say it.

`PROVEN` is the one place that says whether a kernel has run on a GPU: `gpus` names the folders of `perf/results/` that
hold results of one. A test compares all of it with what the checkout's results say.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Proven:
    """What `perf/compile` and `perf/results` hold.

    `whole` are the architectures that every case is compiled for, `part` those that a part is compiled for; `compiled`
    says how many kernels kept every promise by version of Triton. `executed` cases ran on the CPU as compiled for
    `target` by Triton `executed_by`. By `pairs` of torch and Triton all tests passed, also of interpreted kernels.
    """

    whole: tuple[str, ...]
    part: tuple[str, ...]
    compiled: Mapping[str, int]
    executed: int
    target: str
    executed_by: str
    pairs: tuple[tuple[str, str], ...]
    gpus: tuple[str, ...] = field(default=())

    def how_compiled(self, architecture: str) -> str:
        """Whether kernels are compiled for an architecture: "whole", "part" or "" (not)."""
        return "whole" if architecture in self.whole else "part" if architecture in self.part else ""


PROVEN = Proven(
    whole=("sm_80", "sm_90", "sm_100", "gfx942"),
    part=("sm_75", "sm_86", "sm_89", "gfx950"),
    compiled={"3.6.0": 93, "3.7.1": 93, "3.8.0": 56, "3.9.0": 93},
    executed=861,
    target="sm_90",
    executed_by="3.7.1",
    pairs=(("2.9.0", "3.6.0"), ("2.13.0", "3.7.1"), ("2.15.0", "3.9.0")),
)
