"""Named tables of a live TorchRec job on ours, to try and take back: `canary` and what it gives."""

from .attach import Canary, canary
from .report import CanaryReport, Difference, Half
from .shadow import CanaryDifference

__all__ = ["Canary", "CanaryDifference", "CanaryReport", "Difference", "Half", "canary"]
