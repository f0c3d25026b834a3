"""Every op with each of its arguments wrong in turn: an error speaks of arguments as the op's schema has them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.fbgemm import OPS
from shardwise.perf.evidence.fbgemm.calls import draw_call

# what torch says where it checks arguments, and where an id is
OTHERS = re.compile(
    r"index out of range|indexing axis|not implemented for|without overflow|inconsistent with step sign"
    r"|^feature \d+, sample \d+: id -?\d+ is outside"
)

# one of each family; all of them take a minute
QUICK = ("jagged_dense_bmm", "jagged_slice", "segment_sum_csr", "bucketize_sparse_features", "permute_pooled_embs")


def wrong(value: Any) -> Iterator[Any]:
    """What does not do in the place of a value that does."""
    if isinstance(value, Tensor) and value.dim():
        yield value.unsqueeze(0)
        yield value[:-1]
        yield torch.cat([value, value[:1]])
        if value.dtype in (torch.int32, torch.int64) and value.numel():
            yield value.double()
            yield value - value.max() - 3
            yield value + 99
    elif type(value) is int:
        yield -7
    elif isinstance(value, (list, tuple)) and value:
        yield value[:-1]
        yield [*value, value[-1]]
        for first in wrong(value[0]):
            yield [first, *value[1:]]


def good_arguments(name: str) -> list[Any]:
    for seed in range(40):
        call = draw_call(name, seed)
        if call.difference:
            continue
        try:
            OPS[name].function(*(each.clone() if isinstance(each, Tensor) else each for each in call.args))
        except (IndexError, NotImplementedError, RuntimeError, TypeError, ValueError):
            continue
        return list(call.args)
    raise AssertionError(f"40 calls of {name} raise")


@pytest.mark.filterwarnings("ignore:bounds_check_indices")
@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.long) for name in OPS])
def test_an_error_names_an_argument_of_the_op(name: str) -> None:
    """`jagged_dense_bmm` with a bad `y` raised "dense must be ...", with bad x_offsets "offsets must be ...": names of
    the function below."""
    arguments = [each.name for each in torch._C.parse_schema(OPS[name].schema).arguments]
    good = good_arguments(name)
    for place, value in enumerate(good):
        for bad in wrong(value):
            given = [each.clone() if isinstance(each, Tensor) else each for each in good]
            given[place] = bad
            try:
                OPS[name].function(*given)
            except Exception as error:
                words = re.findall(r"\w+", str(error))
                assert {*arguments} & {*words} or OTHERS.search(str(error)), f"{arguments[place]}: {error!r}"
