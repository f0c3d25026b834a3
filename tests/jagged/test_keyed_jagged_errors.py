"""What keyed batches refuse, and that they name keys and numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.jagged import JaggedTensor, KeyedJaggedTensor

INT = torch.int64


def ints(numbers: list[int]) -> Tensor:
    return torch.tensor(numbers, dtype=INT)


def make(keys: Any = ("a", "b"), values: Any = None, **given: Any) -> KeyedJaggedTensor:
    """Four values in four bags of one, unless said otherwise."""
    if not {"lengths", "offsets"} & set(given):
        given["lengths"] = ints([1, 1, 1, 1])
    return KeyedJaggedTensor(keys, ints([1, 2, 3, 4]) if values is None else values, **given)


def from_jts(**jts: JaggedTensor) -> KeyedJaggedTensor:
    return KeyedJaggedTensor.from_jt_dict(jts)


def jt(values: Tensor, **given: Tensor) -> JaggedTensor:
    return JaggedTensor(values, lengths=torch.ones(len(values), dtype=INT, device=values.device), **given)


FOUR, META = ints([1, 2, 3, 4]), torch.device("meta")
BOTH = r"\['a', 'b'\]"
concat = KeyedJaggedTensor.concat


def of_lengths(*lengths: int, **given: Any) -> KeyedJaggedTensor:
    return KeyedJaggedTensor.from_lengths_sync(["a", "b"], FOUR, ints(list(lengths)), **given)


def of_offsets(*offsets: int) -> KeyedJaggedTensor:
    return KeyedJaggedTensor.from_offsets_sync(["a", "b"], FOUR, ints(list(offsets)))


def in_full(**given: Tensor) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(["a", "b"], FOUR, validate="full", **given)


def ranks(rows: Any, **given: Any) -> KeyedJaggedTensor:
    return make(stride_per_key_per_rank=rows, **given)


# message: attempt
VALUE_ERRORS: dict[str, Callable[[], object]] = {
    r"keys must be unique, repeated: \['a'\]": lambda: make(["a", "b", "a"]),
    "'k9', ... 12 keys": lambda: make([f"k{i}" for i in range(12)]),
    rf"values of {BOTH} must be 1-D, got shape \[4, 2\]": lambda: make(values=torch.zeros(4, 2)),
    rf"weights of {BOTH} must be 1-D, got shape \[4, 2\]": lambda: make(weights=torch.zeros(4, 2)),
    r"lengths must be 1-D or \[2 keys, batch\]": lambda: make(lengths=ints([1, 1, 1, 1]).view(2, 2, 1)),
    r"offsets must be 1-D, got": lambda: make(offsets=ints([0, 1, 2, 4]).view(2, 2)),
    "lengths or offsets must be given, got neither": lambda: make(lengths=None),
    "2 lengths need 3 offsets, got 2": lambda: make(lengths=ints([2, 2]), offsets=ints([0, 4])),
    r"weights must be as many as values: got shape \[3\] for 4 values": lambda: make(weights=torch.zeros(3)),
    "lengths are on meta, values on cpu": lambda: make(lengths=torch.ones(4, dtype=INT, device=META)),
    "weights are on meta, values on cpu": lambda: make(weights=torch.ones(4, device=META)),
    f"3 bags is not a multiple of 2 keys {BOTH}": lambda: make(lengths=ints([1, 1, 2])),
    "no keys own no bags, got 4": lambda: make([]),
    "4 values but no bags": lambda: make(lengths=ints([])),
    f"stride 3 and 2 keys {BOTH}: expected 6 bags, got 4": lambda: make(stride=3),
    f"stride 2 and 2 keys {BOTH}: expected 4 bags, got 2": lambda: make(offsets=ints([0, 2, 4]), stride=2),
    "stride must be an integer >= 0, got -1": lambda: make(stride=-1),
    f"1 rows for 2 keys {BOTH}": lambda: ranks([[4]]),
    "2 ranks for key 'b', 1 for 'a'": lambda: ranks([[2], [1, 1]]),
    r"expected 5 bags \('a': 2, 'b': 3\), got 4": lambda: ranks([[2], [3]]),
    r"key 'b' must be integers >= 0, got \[-1\]": lambda: ranks([[5], [-1]]),
    r"must be \[keys, ranks\], got shape \[2\]": lambda: ranks(ints([2, 2])),
    "stride_per_key_per_rank must be on the cpu": lambda: ranks(torch.ones(2, 1, device=META)),
    "stride 2 is below 3, the batch size of 'b'": lambda: ranks([[1], [3]], stride=2),
    "2 entries for 1 indices": lambda: make().permute([0], ints([0, 1])),
    rf"2 keys {BOTH}, got \[1\] which sum to 1": lambda: make().split([1]),
    r"got \[2, 1\] which sum to 3": lambda: make().split([2, 1]),
    r"must be >= 0 .* got \[3, -1\]": lambda: make().split([3, -1]),
    "this KeyedJaggedTensor has no weights": lambda: make().weights(),
    r"\['b'\] have, \['a', 'c'\] have not": lambda: from_jts(a=jt(FOUR), b=jt(FOUR, weights=FOUR), c=jt(FOUR)),
    "values of 'b' must be 1-D": lambda: from_jts(a=jt(FOUR), b=jt(torch.zeros(2, 3))),
    "values must be on one device, got 'a' on cpu, 'b' on meta": lambda: from_jts(a=jt(FOUR), b=jt(FOUR.to("meta"))),
    "'a' is torch.int64 and 'b' is torch.float32": lambda: from_jts(a=jt(FOUR), b=jt(FOUR.float())),
    "concat needs at least one KeyedJaggedTensor": lambda: concat([]),
    f"keys must be unique, repeated: {BOTH}": lambda: concat([make(), make()]),
    rf"different batch sizes: 2 for {BOTH}, 4 for \['c'\]": lambda: concat([make(), make(["c"])]),
    "2 for 'a', 2 for 'b', 1 for 'c'": lambda: concat([ranks([[1, 1], [1, 1]]), make(["c"])]),
    rf"\['c', 'd'\] have, {BOTH} have not": lambda: concat([make(), make(["c", "d"], weights=torch.ones(4))]),
    "lengths sum to 12, values has 4: key 'b', sample 0 ends at 11": lambda: of_lengths(1, 1, 9, 1),
    "lengths sum to 3, values has 4: 1 left after key 'b'": lambda: of_lengths(1, 1, 1, 0),
    r"key 'b', sample 0: length -1 \(offsets go from 3 to 2\)": lambda: in_full(lengths=ints([1, 2, -1, 2])),
    "lengths sum to 4, values has 4: key 'a', sample 1 ends at 5": lambda: of_lengths(4, 1, -2, 1),
    r"offsets must start at 0, got 1 \(key 'a'\)": lambda: of_offsets(1, 1, 2, 3, 4),
    r"key 'a', sample 1: length -1 \(offsets go from 3 to 2\)": lambda: in_full(offsets=ints([0, 3, 2, 2, 4])),
    "lengths sum to 6, values has 4: key 'b', sample 1 ends at 6": lambda: of_offsets(0, 1, 2, 3, 6),
    "key 'b', sample 1 ends at 11": lambda: of_lengths(1, 1, 9, stride_per_key_per_rank=[[1], [2]]),
    "lengths sum to 12, values has 4": lambda: make(lengths=ints([1, 1, 9, 1])).split([1, 1]),
}
TYPE_ERRORS: dict[str, Callable[[], object]] = {
    "keys must be a list of strings, got str": lambda: make("ab"),
    r"keys must be strings, got 7 \(int\)": lambda: make(["a", 7]),
    "values must be a torch.Tensor, got list": lambda: make(values=[1]),
    "lengths must be integers .* got torch.float32": lambda: make(lengths=torch.ones(4)),
    "offsets must be integers .* got torch.float32": lambda: make(offsets=torch.ones(5)),
}
LOOKUP_ERRORS: dict[str, Callable[[], object]] = {
    f"unknown key 'z', keys are {BOTH}": lambda: make()["z"],
    f"index 2 is out of range for 2 keys {BOTH}": lambda: make().permute([2]),
    "index -1 is out of range": lambda: make().permute([0, -1]),
}
REFUSALS = [
    pytest.param(error, message, attempt, id=message)
    for error, cases in ((ValueError, VALUE_ERRORS), (TypeError, TYPE_ERRORS), (LookupError, LOOKUP_ERRORS))
    for message, attempt in cases.items()
]


@pytest.mark.parametrize(("error", "message", "attempt"), REFUSALS)
def test_bad_input_is_refused_with_its_keys_and_numbers(
    error: type[Exception], message: str, attempt: Callable[[], object]
) -> None:
    with pytest.raises(error, match=message):
        attempt()
