"""Time our CPU path beside FBGEMM's: the same tables, ids and gradients, in turn, in one process.

Run as `python -m shardwise.perf.cpu_beside_fbgemm [--shapes 0 1] [--repeats 15] [--json FILE]` where fbgemm-gpu-cpu is
installed; quiet machine, two threads. Ours is an EmbeddingBagCollection from KeyedJaggedTensor to KeyedTensor, checks
of ids included, FBGEMM's the op that TorchRec calls below its collection. `compiled` is ours with numba, `torch`
without.

Shapes: T tables of R rows x D columns, B samples, L ids a bag; outputs [B, T * D] fp32. Rule: rowwise Adagrad.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

from shardwise import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    KeyedJaggedTensor,
    RowWiseAdagrad,
    apply_optimizer_in_backward,
)
from shardwise.kernels import cpu_compiled, cpu_lookup

from .parity import load_peer, versions

THREADS, LR, EPS = 2, 0.01, 1e-8


class Shape(NamedTuple):
    """T tables of R rows x D columns, B samples, L ids a bag."""

    T: int
    R: int
    D: int
    B: int
    L: int


SHAPES = [
    Shape(32, 100_000, 128, 512, 20),
    *(Shape(26, 100_000, dim, batch, length) for dim, batch, length in product((64, 128), (2048, 8192), (1, 20))),
]
# who, and bounds on the geometric mean of its times over FBGEMM's, and on the worst shape
BOUNDS = {
    ("torch", "forward"): (0.85, math.inf),
    ("torch", "step"): (3.0, 3.0),
    ("compiled", "step"): (0.8, 1.0),
}


# one training step: seconds of the forward and of the backward, and the output
Step = Callable[[], tuple[float, float, Tensor]]


def _timed(look_up: Callable[[], Tensor], grad: Tensor) -> Step:
    def step() -> tuple[float, float, Tensor]:
        begin = time.perf_counter()
        out = look_up()
        middle = time.perf_counter()
        torch.autograd.backward(out, grad)
        return middle - begin, time.perf_counter() - middle, out.detach()

    return step


def _ours(shape: Shape, ids: Tensor, lengths: Tensor, grad: Tensor) -> tuple[Step, Tensor]:
    """A step of ours and its tables as one tensor [T * R, D]."""
    keys = [f"f{t}" for t in range(shape.T)]
    configs = [
        EmbeddingBagConfig(name=f"t{t}", num_embeddings=shape.R, embedding_dim=shape.D, feature_names=[key])
        for t, key in enumerate(keys)
    ]
    collection = EmbeddingBagCollection(configs)
    apply_optimizer_in_backward(RowWiseAdagrad, collection.parameters(), {"lr": LR, "eps": EPS})
    # a batch as a data loader makes it: lengths, and what follows from them
    features = KeyedJaggedTensor(keys, ids, None, lengths)
    features.offsets()
    step = _timed(lambda: collection(features).values(), grad)
    return step, collection._groups[0].flat.view(-1, shape.D)


def _theirs(shape: Shape, ids: Tensor, lengths: Tensor, grad: Tensor, peer: Any) -> tuple[Step, list[Tensor]]:
    tbe = peer.SplitTableBatchedEmbeddingBagsCodegen(
        [(shape.R, shape.D, peer.EmbeddingLocation.HOST, peer.ComputeDevice.CPU)] * shape.T,
        optimizer=peer.EmbOptimType.EXACT_ROWWISE_ADAGRAD, learning_rate=LR, eps=EPS,
        pooling_mode=peer.PoolingMode.SUM, device=torch.device("cpu"),
    )  # fmt: skip
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    return _timed(lambda: tbe(ids, offsets), grad), tbe.split_embedding_weights()


def _rotated(steps: dict[str, Step], turn: int) -> list[tuple[str, Step]]:
    pairs = list(steps.items())
    return pairs[turn % len(pairs) :] + pairs[: turn % len(pairs)]


def measure(shape: Shape, peer: Any, repeats: int) -> dict[str, Any]:
    """Medians of `repeats` turns, each of FBGEMM's step and both of ours, and quartiles of the ratios within a turn.

    Raises:
        AssertionError: the sides do not compute the same.
    """
    torch.manual_seed(0)
    ids = torch.randint(0, shape.R, (shape.T * shape.B * shape.L,))
    lengths = torch.full((shape.T * shape.B,), shape.L)
    grad = torch.randn(shape.B, shape.T * shape.D)
    batch = (ids, lengths, grad)
    theirs, tables = _theirs(shape, *batch, peer)
    steps = {"fbgemm": theirs}
    for who in ("compiled", "torch"):
        steps[who], mine = _ours(shape, *batch)
        mine.copy_(torch.cat(tables))
    found: dict[str, list[tuple[float, float]]] = {who: [] for who in steps}
    for turn in range(repeats + 2):
        # two turns to warm up: compilers, allocators, page faults
        outputs = {}
        for who, step in _rotated(steps, turn):
            with ExitStack() as without:
                if who == "torch":
                    without.enter_context(patch.object(cpu_compiled, "update", lambda *args: False))
                    without.enter_context(patch.object(cpu_lookup, "_loops", lambda: None))
                forward, backward, output = step()
            if turn < 2:
                outputs[who] = output
            else:
                found[who].append((forward, forward + backward))
            # each begins with what memory the one before has given back
            del output
        for who in outputs:
            torch.testing.assert_close(outputs[who], outputs["fbgemm"], rtol=0, atol=1e-5)
    result: dict[str, Any] = {"shape": shape._asdict(), "ms": {}, "ratio": {}}
    for who, times in found.items():
        for number, what in enumerate(("forward", "step")):
            result["ms"][f"{who} {what}"] = round(1e3 * statistics.median(t[number] for t in times), 2)
            ratios = [mine[number] / their[number] for mine, their in zip(times, found["fbgemm"], strict=True)]
            if who != "fbgemm":
                result["ratio"][f"{who} {what}"] = [round(q, 3) for q in statistics.quantiles(ratios, n=4)]
    return result


def summary(results: Sequence[dict[str, Any]]) -> tuple[list[str], bool]:
    """Geometric mean and worst of the median ratios, and whether all are within BOUNDS."""
    lines, good = [], True
    for who, what in (("compiled", "forward"), ("compiled", "step"), ("torch", "forward"), ("torch", "step")):
        medians = [result["ratio"][f"{who} {what}"][1] for result in results]
        mean, worst = statistics.geometric_mean(medians), max(medians)
        of_mean, of_worst = BOUNDS.get((who, what), (math.inf, math.inf))
        within = mean <= of_mean and worst <= of_worst
        good = good and within
        lines.append(f"{who} {what}: geometric mean {mean:.2f}, worst {worst:.2f}{'' if within else '  BEYOND'}")
    return lines, good


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", type=int, nargs="+", default=range(len(SHAPES)), help="numbers of SHAPES")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(argv)
    try:
        peer = load_peer()
    except ImportError as error:
        print(f"needs FBGEMM ({error}): docs/parity.md tells how to install it", file=sys.stderr)
        return 2
    torch.set_num_threads(THREADS)
    print(versions(peer.version))
    results = []
    for number in options.shapes:
        results.append(measure(SHAPES[number], peer, options.repeats))
        print(json.dumps(results[-1]), flush=True)
    lines, good = summary(results)
    print("\n".join(lines))
    if options.json:
        record = {"versions": versions(peer.version), "results": results, "summary": lines}
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
