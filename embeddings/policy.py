"""Policies of a collection: what lookups and updates do with bad input, when, and in which dtype they answer."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch

from shardwise.kernels import BoundsCheckMode


class GradientCheckMode(Enum):
    """How a gradient or per-id weight that is not finite is met: train on, leave its tables' update out, or raise."""

    IGNORE = 0
    SKIP = 1
    RAISE = 2


@dataclass(frozen=True)
class LookupPolicy:
    """How lookups treat bad input, and the dtype of their output.

    With `strict` a bad batch on CUDA raises in its own step, which waits for the device, instead of at the next one.
    With `index_in_forward` a lookup on CUDA sorts its ids for the update at once, on a stream beside the forward pass,
    instead of between the gradient and the update; the bits of the tables are the same.

    Raises:
        TypeError: a mode is of another class.
        ValueError: another `output_dtype`.
    """

    bounds_check: BoundsCheckMode = BoundsCheckMode.FATAL
    gradient_check: GradientCheckMode = GradientCheckMode.IGNORE
    strict: bool = False
    output_dtype: torch.dtype = torch.float32
    index_in_forward: bool = False

    def __post_init__(self) -> None:
        for name, kind in (("bounds_check", BoundsCheckMode), ("gradient_check", GradientCheckMode)):
            # a mode that no comparison knows would be taken for a lenient one
            if not isinstance(getattr(self, name), kind):
                example = next(iter(kind))
                say = f"{kind.__name__}.{example.name}"
                raise TypeError(f"{name} must be a {kind.__name__}, {say} say, got {getattr(self, name)!r}")
        # whoever compares it knows three modes
        object.__setattr__(self, "bounds_check", self.bounds_check.effect)
        if self.output_dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise ValueError(f"output_dtype must be float32, float16 or bfloat16, got {self.output_dtype}")


DEFAULT_POLICY = LookupPolicy()
