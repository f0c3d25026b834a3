"""TorchRec's process-wide switch for inference: whether quantized shards go to the device that is asked for."""

from __future__ import annotations

import warnings


def set_propogate_device(val: bool) -> None:
    """Have quantized shards go to the device that is given. They always do: False has no effect and warns.

    TorchRec's go to CUDA unless this is True.
    """
    if not val:
        warnings.warn("set_propogate_device(False): quantized shards go to the device that is given", stacklevel=2)


def get_propogate_device() -> bool:
    """Whether quantized shards go to the device that is given: always."""
    return True
