"""What is to be on a GPU, on a machine without one: it is on the CPU, and one warning says so."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_SAID = "there is no CUDA here, so all runs on the CPU"
PLANNED_ON = "the plan places tables on"


def is_missing(device: torch.device | str) -> bool:
    """Whether it is a GPU and there is none here."""
    return torch.device(device).type == "cuda" and not torch.cuda.is_available()


def device_here(device: torch.device | str, stacklevel: int) -> torch.device:
    """The device to compute on: `device`, or the CPU with a warning if it is a GPU and there is none here."""
    if not is_missing(device):
        return torch.device(device)
    warnings.warn(f"device {str(device)!r}: {_SAID}", stacklevel=stacklevel + 1)
    return torch.device("cpu")


@contextmanager
def quiet_without_cuda(device: torch.device | str) -> Iterator[None]:
    """Once `device_here` has warned of `device`, plans and parts inside that want CUDA too do not say it again."""
    if not is_missing(device):
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=f".*{re.escape(_SAID)}")
        warnings.filterwarnings("ignore", message=f"{re.escape(PLANNED_ON)} cuda,")
        yield
