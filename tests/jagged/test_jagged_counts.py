"""What the operations of the jagged types cost on small batches: Python calls and calls of torch, counted.

Small batches are bound by Python. These numbers may fall; whoever lets one rise says why.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.jagged import KeyedJaggedTensor, KeyedTensor, KTRegroupAsDict
from shardwise.kernels._op import INTERPRETED

pytestmark = pytest.mark.skipif(INTERPRETED, reason="counts of the path that runs without a tracer")

SAMPLES = 8
TORCH = str(Path(torch.__file__).parent)


def calls(run: Callable[[], Any]) -> tuple[int, int]:
    """Python functions that `run` calls, and torch's, at a second call: what is found once is not counted.

    Python functions of torch differ from version to version and are left out; what they call of torch is counted.
    """
    run()
    python = torchs = 0

    def count(frame: Any, event: str, function: Any) -> None:
        nonlocal python, torchs
        if event == "call":
            python += not frame.f_code.co_filename.startswith(TORCH)
        elif event == "c_call":
            owner = getattr(function, "__self__", None)
            module = getattr(function, "__module__", None) or ""
            torchs += isinstance(owner, torch.Tensor) or module.startswith("torch")

    sys.setprofile(count)
    try:
        run()
    finally:
        sys.setprofile(None)
    # `run` itself
    return python - 1, torchs


def batch(keys: list[str], weights: bool = False) -> KeyedJaggedTensor:
    lengths = torch.ones(len(keys) * SAMPLES, dtype=torch.int64)
    values = torch.arange(len(lengths))
    return KeyedJaggedTensor(keys, values, torch.rand(len(values)) if weights else None, lengths)


def operations(count: int) -> dict[str, Callable[[], Any]]:
    """Each on a batch of which nothing was asked yet."""
    keys, more = [f"f{i}" for i in range(count)], [f"g{i}" for i in range(count)]
    order = list(range(count))[::-1]
    dense = [
        KeyedTensor(keys, [4] * count, torch.rand(2, 4 * count)),
        KeyedTensor(more, [4] * count, torch.rand(2, 4 * count)),
    ]
    groups = [[*more, *keys][::2], [*keys, *more][1::2]]
    module = KTRegroupAsDict(groups, ["one", "other"])
    jts = batch(keys).to_dict()
    return {
        "construct": lambda: batch(keys),
        "from_lengths_sync": lambda: batch(keys).sync(),
        "split": lambda: batch(keys).split([count // 2, count - count // 2]),
        "permute": lambda: batch(keys).permute(order),
        "permute weighted": lambda: batch(keys, weights=True).permute(order),
        "to_dict": lambda: batch(keys).to_dict(),
        "from_jt_dict": lambda: KeyedJaggedTensor.from_jt_dict(jts),
        "concat": lambda: KeyedJaggedTensor.concat([batch(keys), batch(more)]),
        "getitem": lambda: batch(keys)[keys[-1]],
        "regroup": lambda: KeyedTensor.regroup(dense, groups),
        "KTRegroupAsDict": lambda: module(dense),
    }


# Python calls and torch calls for 26 keys, at most, conftest's poison and the path without numba included; and both
# for one more key
BOUNDS: dict[str, tuple[int, int, int, int]] = {
    "construct": (13, 8, 0, 0),
    "from_lengths_sync": (22, 13, 0, 0),
    "split": (38, 15, 0, 0),
    "permute": (40, 31, 0, 0),
    "permute weighted": (46, 49, 0, 0),
    "to_dict": (59, 32, 1, 0),
    "from_jt_dict": (45, 33, 1, 1),
    "concat": (47, 18, 0, 0),
    "getitem": (26, 13, 0, 0),
    "regroup": (20, 8, 0, 0),
    "KTRegroupAsDict": (17, 9, 0, 0),
}


@pytest.mark.parametrize("name", list(operations(2)))
def test_an_operation_makes_few_calls(name: str) -> None:
    few, many = calls(operations(26)[name]), calls(operations(126)[name])
    python, torchs, python_a_key, torchs_a_key = BOUNDS[name]
    assert few[0] <= python and few[1] <= torchs, few
    assert many[0] - few[0] <= 100 * python_a_key, many
    assert many[1] - few[1] <= 100 * torchs_a_key, many
