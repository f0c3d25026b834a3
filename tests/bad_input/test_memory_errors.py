"""Sizes that ask for more memory than there is: the error names the argument and the bytes, and nothing is made."""

from __future__ import annotations

import re
import resource
import subprocess
import sys
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from kernel_inputs import DEVICES, torch_device
from torch import Tensor

from shardwise import (
    DataType,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    FusedEmbeddingBagCollection,
    JaggedTensor,
    kernels,
)
from shardwise.embeddings.quant import QuantizedTable, QuantizedTables
from shardwise.embeddings.tables.table_layout import LookupFeature
from shardwise.kernels import memory, numba_loops
from shardwise.kernels.memory import require_memory

HUGE = 10**15
PATHS = [*DEVICES, "numba"]


def table(rows: int) -> dict[str, Any]:
    return {"name": "user", "num_embeddings": rows, "embedding_dim": 8, "feature_names": ["f"]}


def calls(device: torch.device) -> dict[str, tuple[str, Callable[[], Any]]]:
    """By name the argument that an error names, and the call."""

    def ints(*numbers: int) -> Tensor:
        return torch.tensor(numbers, device=device)

    k, rows = kernels, torch.randn(3, 2, device=device)
    dense, offsets = torch.randn(2, 3, 2, device=device), ints(0, 1, 3)
    leaf = rows.clone().requires_grad_()
    return {
        "padded": ("max_lengths", lambda: k.jagged_to_padded_dense(rows, offsets, HUGE)),
        "padded with a gradient": ("max_lengths", lambda: k.jagged_to_padded_dense(leaf, offsets, HUGE)),
        "padded twice": ("max_lengths", lambda: k.jagged_to_padded_dense(rows, [ints(0, 2), offsets], [10**8, 10**8])),
        "padded method": ("max_lengths", lambda: JaggedTensor(rows, offsets=offsets).to_padded_dense(HUGE)),
        "pack": ("max_lengths", lambda: k.pack_segments(rows, ints(1, 2), HUGE)),
        "unpack": ("lengths", lambda: k.unpack_segments(dense, ints(1, HUGE))),
        "unpack a total": ("total", lambda: k.unpack_segments(dense, ints(1, HUGE), total=HUGE + 1)),
        "jagged": ("offsets", lambda: k.padded_dense_to_jagged(dense, ints(0, 1, HUGE))),
        "jagged total": ("total_length", lambda: k.padded_dense_to_jagged(dense, offsets, HUGE)),
        "index add": ("output_lengths", lambda: k.jagged_index_add(rows, ints(1, 2), ints(0, 1), ints(1, 2, HUGE))),
        "index add with a gradient": (
            "output_lengths", lambda: k.jagged_index_add(leaf, ints(1, 2), ints(0, 1), ints(1, 2, HUGE))
        ),
        "index add halves": (
            "num_rows", lambda: k.jagged_index_add(rows.half(), ints(1, 2), ints(0, 1), ints(1, 2, HUGE))
        ),
        "expand": ("output_size", lambda: k.expand_into_jagged_permute(ints(0), ints(0, 3), ints(0, HUGE), HUGE)),
        "range": ("range_size", lambda: k.offsets_range(ints(0, 1), HUGE)),
        "bucketize": ("num_buckets", lambda: k.block_bucketize(ints(1, 2), ints(0, 1, 2), ints(1), HUGE)),
        "bags": (
            "table 'user' of 1000000000000000 rows x 8",
            lambda: EmbeddingBagCollection(tables=[EmbeddingBagConfig(**table(HUGE))], device=device),
        ),
        "rows": (
            "table 'user'",
            lambda: EmbeddingCollection(tables=[EmbeddingConfig(**table(HUGE))], device=device),
        ),
        "quantized": (
            "'user'",
            lambda: QuantizedTables(
                [QuantizedTable("user", HUGE, 8, "int8")], [LookupFeature("f", 0, False)], device=device
            ),
        ),
    }  # fmt: skip


@pytest.mark.parametrize("name", calls(torch.device("cpu")))
@pytest.mark.parametrize("device", PATHS)
def test_what_can_never_fit_is_refused_by_name_and_bytes(
    device: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch said "DefaultCPUAllocator: can't allocate memory", numpy and others so in words of their own, and what the
    system had promised it could not give: the process was ended."""
    where = torch_device("cpu" if device == "numba" else device)
    if device == "cpu":
        # as where numba is not installed
        monkeypatch.setitem(sys.modules, "numba", None)
        numba_loops.loops.cache_clear()
    try:
        argument, call = calls(where)[name]
        kind = torch.OutOfMemoryError if where.type == "cuda" else MemoryError
        with pytest.raises(kind, match=rf"{re.escape(argument)}.*: a tensor \[.* needs [\d,]{{15,}} bytes"):
            call()
    finally:
        if device == "cpu":
            numba_loops.loops.cache_clear()


@pytest.mark.parametrize("call", ["select", "permute"])
@pytest.mark.parametrize("numba", [True, False])
def test_repeats_that_fit_into_no_memory_are_refused(call: str, numba: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not numba:
        monkeypatch.setitem(sys.modules, "numba", None)
        numba_loops.loops.cache_clear()
    monkeypatch.setattr(memory, "_memory_of_host", lambda: 1 << 31)
    values, lengths, order = torch.zeros(30_000), torch.tensor([30_000]), torch.zeros(30_000, dtype=torch.int64)
    run: Any = {
        "select": lambda: kernels.jagged_index_select(values, lengths, order),
        "permute": lambda: kernels.permute_1d(order, lengths, values),
    }[call]
    try:
        with pytest.raises(MemoryError, match=r"lengths, which sum to 900000000: .* needs [\d,]+ bytes, and cpu has"):
            run()
    finally:
        numba_loops.loops.cache_clear()


def test_an_optimizer_state_that_does_not_fit_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table of fp16 fits, its state of fp32 does not."""
    monkeypatch.setattr(memory, "_LARGE", 1 << 24)
    monkeypatch.setattr(memory, "_memory_of_host", lambda: 60 << 20)
    config = EmbeddingBagConfig(**{**table(3 << 20), "data_type": DataType.FP16})
    with pytest.raises(MemoryError, match=r"an optimizer state of table 'user' of 3145728 rows x 8: .* 100,663,296"):
        FusedEmbeddingBagCollection([config], torch.optim.Adam, {"lr": 0.1})


def test_what_the_system_refuses_is_named_too() -> None:
    """A limit of the process on its addresses is none of the machine's memory."""
    code = (
        "import resource, sys; sys.modules['numba'] = None\nimport torch; from shardwise import kernels as k\n"
        "rows, offsets = torch.zeros(3, 2), torch.tensor([0, 3])\n"
        "k.jagged_to_padded_dense(rows, offsets, 2)\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + 2**28, used + 2**28))\n"
        "try:\n    k.jagged_to_padded_dense(rows, offsets, 2**28)\n"
        "except MemoryError as error:\n    print(error)\n"
    )
    if sys.platform != "linux" or resource.getrlimit(resource.RLIMIT_AS)[1] != resource.RLIM_INFINITY:
        pytest.skip("limits are another matter here")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert "max_lengths [268435456]" in done.stdout and "2,147,483,648 bytes, which the system does not give" in (
        done.stdout
    ), done.stderr[-1000:]


def test_cuda_keeps_its_own_error() -> None:
    """Programs catch torch.OutOfMemoryError, free memory and go on."""
    with (
        patch.object(memory, "_memory_of", lambda device: 1 << 30),
        pytest.raises(torch.OutOfMemoryError, match="x 1:"),
    ):
        require_memory("x 1", (1 << 31,), torch.uint8, "cuda")


def test_sizes_that_fit_and_tables_on_meta_ask_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(device: torch.device) -> int:
        raise AssertionError("asked")

    monkeypatch.setattr(memory, "_memory_of", asked)
    require_memory("x", (1 << 30,), torch.uint8)
    monkeypatch.undo()
    EmbeddingBagCollection(tables=[EmbeddingBagConfig(**table(HUGE))], device=torch.device("meta"))
