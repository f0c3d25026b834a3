"""After a fork every op runs in the child as in its parent, forward and backward, and so do torch's own.

Each test is a process of its own, whose child has a time limit: what stops, stops for ever.

Takes most of a minute where numba has compiled nothing yet: all ops, in processes of their own.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from shardwise import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    apply_optimizer_in_backward,
    kernels,
)
from shardwise.kernels.cpu import threads as cpu_threads

# enough for torch to divide each operator among threads
BAGS, ROWS, COLUMNS = 12_000, 36_000, 4
SECONDS = 60

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")


def jagged(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Lengths and offsets of bags that hold all rows."""
    lengths = torch.full((BAGS,), ROWS // BAGS)
    lengths[0] += 1
    lengths[-1] -= 1
    return lengths, torch.nn.functional.pad(lengths.cumsum(0), (1, 0))


def ops() -> dict[str, Callable[[], Any]]:
    """By name what is done, and where it has a gradient its backward."""
    generator = torch.Generator().manual_seed(0)
    lengths, offsets = jagged(generator)
    ids = torch.randint(0, ROWS, (ROWS,), generator=generator)

    def rows(*shape: int) -> Tensor:
        return torch.randn(*(shape or (ROWS, COLUMNS)), generator=generator).requires_grad_()

    def trained(fn: Callable[..., Any], *given: Any) -> Callable[[], Any]:
        def run() -> Any:
            outputs = fn(*given)
            output = (
                outputs
                if isinstance(outputs, Tensor)
                else next(t for t in outputs if t is not None and t.requires_grad)
            )
            return output, *torch.autograd.grad(output.square().sum(), [t for t in given if is_leaf(t)])

        return run

    def is_leaf(value: Any) -> bool:
        return isinstance(value, Tensor) and value.requires_grad

    def lookup(sequence: bool, fused: bool, weighted: bool = False) -> Callable[[], Any]:
        config = {"num_embeddings": ROWS, "embedding_dim": COLUMNS, "feature_names": ["f"]}
        module: Any
        if sequence:
            module = EmbeddingCollection(tables=[EmbeddingConfig(name="t", **config)])
        else:
            module = EmbeddingBagCollection(tables=[EmbeddingBagConfig(name="t", **config)], is_weighted=weighted)
        if fused:
            apply_optimizer_in_backward(torch.optim.Adam, module.parameters(), {"lr": 0.5})
        p = rows(ROWS) if weighted else None
        kjt = KeyedJaggedTensor(keys=["f"], values=ids, lengths=lengths, weights=p)

        def run() -> Any:
            out = module(kjt)["f"]
            (out.values() if sequence else out).square().sum().backward()
            return [table.grad for table in module.parameters()]

        return run

    k, order = kernels, torch.randperm(BAGS, generator=generator)
    pairs = KeyedJaggedTensor(keys=["a", "b"], values=ids, lengths=lengths)
    return {
        "torch's own": lambda: (rows().sin(), rows(500, 500) @ rows(500, 500), ids.sort(stable=True)),
        "bags": lookup(False, False),
        "weighted bags": lookup(False, False, True),
        "rows": lookup(True, False),
        "fused bags": lookup(False, True),
        "fused weighted bags": lookup(False, True, True),
        "fused rows": lookup(True, True),
        "to padded": trained(lambda x: k.jagged_to_padded_dense(x, offsets, 4), rows()),
        "to jagged": trained(lambda x: k.padded_dense_to_jagged(x, offsets, ROWS), rows(BAGS, 4, COLUMNS)),
        "pack": trained(lambda x: k.pack_segments(x, lengths, 4), rows()),
        "unpack": trained(lambda x: k.unpack_segments(x, lengths), rows(BAGS, 4, COLUMNS)),
        "add": trained(lambda x, y: k.jagged_dense_add(x, offsets, y), rows(), rows(BAGS, 4, COLUMNS)),
        "add jagged": trained(lambda x, y: k.jagged_dense_add_jagged(x, offsets, y), rows(), rows(BAGS, 4, COLUMNS)),
        "multiply": trained(lambda x, y: k.jagged_dense_mul(x, offsets, y), rows(), rows(BAGS, 4, COLUMNS)),
        "softmax": trained(lambda x: k.jagged_softmax(x, offsets), rows()),
        "bmm": trained(lambda x, w: k.jagged_dense_bmm(x, offsets, w), rows(), rows(BAGS, COLUMNS, 3)),
        "jagged bmm": trained(lambda x, y: k.jagged_jagged_bmm(x, y, offsets), rows(), rows()),
        "vector product": trained(lambda v, x: k.jagged_vector_product(v, x, offsets), rows(2 * BAGS, 4), rows()),
        "unary": trained(lambda w: k.batched_unary_embeddings(w, offsets[[0, -1]], offsets, ids), rows(2, ROWS, 1)),
        "select": trained(lambda x: k.jagged_index_select(x, lengths, order), rows()),
        "index add": trained(lambda x: k.jagged_index_add(x, lengths[order], order, lengths), rows()),
        "permute 1d": trained(lambda x: k.permute_1d(order, lengths, x), rows(ROWS)),
        "permute rows": trained(lambda x: k.permute_1d(order, lengths, x), rows()),
        "segment sum": trained(lambda x: k.segment_sum(offsets, x), rows()),
        "bucketize": trained(
            lambda p: [k.block_bucketize(lengths, ids, torch.tensor([ROWS // 4 + 1]), 4, weights=p).weights],
            rows(ROWS),
        ),
        "permute pooled": trained(lambda x: k.permute_pooled(x, [2, 1, 1], [2, 0, 0]), rows()),
        "unique": lambda: k.unique_ids(ids, return_counts=True),
        "jagged unique": lambda: k.jagged_unique(ids, offsets[[0, -1]], [ROWS]),
        "cumsum": lambda: (k.complete_cumsum(lengths), k.invert_permute(order), k.offsets_range(offsets, ROWS)),
        "expand": lambda: k.expand_into_jagged_permute(order, offsets, k.complete_cumsum(lengths[order]), ROWS),
        "quantize": lambda: k.dequantize_rows(*k.quantize_rows(rows().detach(), "int8"), COLUMNS, "int8"),
        "calibrate": lambda: k.histogram_binning_calibration(
            rows(ROWS).detach(), torch.ones(5000).double(), torch.ones(5000).double(), positive_weight=0.5
        ),
        "features": lambda: (pairs.permute([1, 0]).values(), pairs.split([1, 1]), pairs["a"].to_padded_dense(4)),
    }


def main(path: str, openmp: str) -> None:
    """In a process of two threads: all ops, a fork, and all ops again."""
    torch.set_num_threads(2)
    with ExitStack() as stack:
        if path == "torch alone":
            # as if it were not installed
            stack.enter_context(patch.dict(sys.modules, {"numba": None}))
        if openmp == "keeps its threads":
            stack.enter_context(patch.object(cpu_threads, "_end_threads", lambda: False))
        # a process that trains has its threads before it forks
        few = openmp != "ends its threads"
        run_all("parent", few)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pid = os.fork()
        if pid == 0:
            status = 1
            try:
                run_all("child", few)
                print("threads", torch.get_num_threads(), flush=True)
                status = 0
            finally:
                os._exit(status)
        until = time.monotonic() + SECONDS
        while not (ended := os.waitpid(pid, os.WNOHANG))[0]:
            if time.monotonic() > until:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                sys.exit("the child stopped")
            time.sleep(0.02)
        # the threads of the parent are back
        run_all("parent again", few=True)
    sys.exit(0 if ended[1] == 0 else "the child failed")


FEW = ("torch's own", "bags", "fused bags", "softmax")


def run_all(who: str, few: bool = False) -> None:
    for name, run in ops().items():
        if few and name not in FEW:
            continue
        print(f"{who}: {name}", flush=True)
        run()


@pytest.mark.parametrize(
    ("path", "openmp"),
    [
        pytest.param("numba", "ends its threads", marks=pytest.mark.full),
        # the threads that end are torch's own
        pytest.param("torch alone", "ends its threads", marks=pytest.mark.full),
        ("numba", "keeps its threads"),
    ],
)
def test_a_forked_process_runs_every_op(path: str, openmp: str) -> None:
    """The backward of a table without an optimizer stopped for ever in the child, in an operator of torch that is
    divided among threads; so did any of torch's own."""
    if path == "numba":
        pytest.importorskip("numba")
    here = Path(__file__)
    done = subprocess.run(
        [sys.executable, "-c", f"import {here.stem}; {here.stem}.main({path!r}, {openmp!r})"],
        capture_output=True, text=True, timeout=3 * SECONDS, cwd=here.parent,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stderr[-2000:]}\nlast: {done.stdout.splitlines()[-1:]}"
    # without the threads of others it goes on alone
    assert f"threads {2 if openmp == 'ends its threads' else 1}" in done.stdout or not cpu_threads._is_gnu()
