"""What a collection does in Python for one more table or feature, above the kernels: counted, no clock.

Work is counted as bytecodes and calls of embeddings/ and jagged/. What still grows is named: three functions ask each
parameter whether somebody changed it, as torch tells nobody; a batch has a size for each key, and keys in another order
have these in another order; and an output of one object a feature, or of pieces of columns, takes these.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import pytest
import torch

from shardwise import (
    DataType,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    apply_optimizer_in_backward,
    embeddings,
    jagged,
)
from shardwise.kernels._op import INTERPRETED

pytestmark = pytest.mark.skipif(INTERPRETED, reason="counts of the path that runs without a tracer")

FOLDERS = tuple(str(Path(str(module.__file__)).resolve().parent) for module in (embeddings, jagged))
ROWS, DIM, SAMPLES = 5, 4, 3
# what asks each parameter of a collection, in its lookup
ASKED = {"_table_parameters", "_facts", "frozen"}


class Work(NamedTuple):
    """Bytecodes that run in functions of embeddings/ and jagged/, and their calls, by name."""

    bytecodes: Counter[str]
    calls: Counter[str]


@cache
def is_counted(file: str) -> bool:
    return str(Path(file).resolve()).startswith(FOLDERS)


def counted(call: Callable[[], object]) -> Work:
    """What a call does."""
    work = Work(Counter(), Counter())

    def seen(frame: FrameType, event: str, argument: object) -> Any:
        if not is_counted(frame.f_code.co_filename):
            return None
        named: FrameType = frame
        # a comprehension is its function's, as it is where Python has no frame for it
        while named.f_code.co_name.startswith("<") and named.f_back is not None:
            named = named.f_back
        name = named.f_code.co_name
        work.calls[name] += named is frame

        def of_frame(frame: FrameType, event: str, argument: object) -> Any:
            work.bytecodes[name] += event == "opcode"
            return of_frame

        frame.f_trace_opcodes = True
        return of_frame

    before = sys.gettrace()
    sys.settrace(seen)
    try:
        call()
    finally:
        sys.settrace(before)
    return work


class Kind(NamedTuple):
    """A training step whose work is counted, and which functions may do more for more features."""

    forward: set[str]
    backward: set[str]
    # calls for one more feature, forward
    calls: int = 0
    pooled: bool = True
    fused: bool = True
    dtypes: int = 1
    backwards: bool = False
    own_sizes: bool = False


KINDS = {
    "pooled": Kind(ASKED, {"frozen"}),
    "pooled, other order": Kind(ASKED | {"permute"}, {"frozen"}, backwards=True),
    "pooled, two groups": Kind(ASKED | {"permute", "columns_in_table_order"}, {"frozen"}, dtypes=2),
    "pooled, not fused": Kind(ASKED - {"frozen"}, {"backward"}, fused=False),
    "pooled, own batch sizes": Kind(ASKED | {"inverse_of"}, {"frozen"}, own_sizes=True),
    "sequence": Kind(ASKED | {"_of", "rows_by_name"}, {"frozen"}, calls=1, pooled=False),
    "sequence, other order": Kind(
        ASKED | {"permute", "_of", "rows_by_name"}, {"frozen"}, calls=1, pooled=False, backwards=True
    ),
    "sequence, not fused": Kind(
        {"_table_parameters", "_facts", "_of", "rows_by_name"}, {"backward"}, calls=1, pooled=False, fused=False
    ),
}


def model_of(kind: Kind, features: int) -> EmbeddingBagCollection | EmbeddingCollection:
    """A collection with a table for each feature."""
    dtypes = [DataType.FP16 if kind.dtypes > 1 and t % 2 else DataType.FP32 for t in range(features)]
    tables = [(ROWS, DIM, f"t{t}", dtype, [f"f{t}"]) for t, dtype in enumerate(dtypes)]
    model: EmbeddingBagCollection | EmbeddingCollection
    if kind.pooled:
        model = EmbeddingBagCollection([EmbeddingBagConfig(*table) for table in tables])
    else:
        model = EmbeddingCollection([EmbeddingConfig(*table) for table in tables])
    if kind.fused:
        apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    return model


def batch_of(kind: Kind, features: int) -> KeyedJaggedTensor:
    """A batch of which nothing was asked yet, of one id a bag."""
    keys = [f"f{f}" for f in range(features)][:: -1 if kind.backwards else 1]
    sizes = [SAMPLES - (f % 2 if kind.own_sizes else 0) for f in range(features)]
    lengths = torch.ones(sum(sizes), dtype=torch.int64)
    ids = torch.arange(len(lengths)) % ROWS
    if not kind.own_sizes:
        return KeyedJaggedTensor(keys, ids, lengths=lengths)
    inverse = torch.stack([torch.arange(SAMPLES) % n for n in sizes])
    return KeyedJaggedTensor(keys, ids, lengths=lengths, stride_per_key=sizes, inverse_indices=(keys, inverse))


def work(kind: Kind, features: int) -> tuple[Work, Work]:
    """That of a lookup and of its backward, in the third step."""
    model = model_of(kind, features)

    def step() -> tuple[Work, Work]:
        batch, outputs = batch_of(kind, features), list[Any]()
        forward = counted(lambda: outputs.append(model(batch)))
        joined = outputs[0].values() if kind.pooled else torch.cat([jt.values() for jt in outputs[0].values()])
        gradient = torch.ones_like(joined)
        return forward, counted(lambda: joined.backward(gradient))

    return [step() for _ in range(3)][-1]


def growing(few: Work, many: Work, features: int) -> set[str]:
    """Functions that run a bytecode more for each of so many more features, or for some of them."""
    return {name for name, n in many.bytecodes.items() if n - few.bytecodes[name] >= features // 4}


@pytest.mark.parametrize("name", KINDS)
def test_only_what_is_named_does_more_for_more_features(name: str) -> None:
    """A lookup of 856 features built a dict of their names and cut its output into as many pieces, one by one."""
    kind, few, many = KINDS[name], 26, 856
    before, after = work(kind, few), work(kind, many)
    for direction, expected, few_counts, other in zip(("forward", "backward"), kind[:2], before, after, strict=True):
        assert few_counts.bytecodes.total() > 50, direction
        assert growing(few_counts, other, many - few) == expected, direction
    assert after[0].calls.total() - before[0].calls.total() == kind.calls * (many - few)
    assert after[1].calls.total() == before[1].calls.total()
