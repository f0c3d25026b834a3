"""KeyedJaggedTensor: bags of ids per key, by example, and what it refuses; any batch is in test_jagged_model.py."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from jagged_model import Batch, Form, build, check, check_dict, from_bags, pick
from torch import Tensor, tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.overrides import TorchFunctionMode

from shardwise.jagged import JaggedTensor, KeyedJaggedTensor

INT = torch.int64


def ints(numbers: list[int]) -> Tensor:
    return tensor(numbers, dtype=INT)


def batch(weighted: bool = False, **bags: list[list[int]]) -> Batch:
    """The weight of an id is a quarter of it."""
    return from_bags({key: [[(n, n / 4) for n in bag] for bag in some] for key, some in bags.items()}, weighted)


TWO = batch(a=[[1, 2], []], b=[[3], [4]])
VARIED = batch(a=[[1, 2], []], b=[[3], [], [4]])
EMPTY = batch(a=[[]] * 5, b=[[]] * 5)


def weighted(two: Batch) -> Batch:
    return replace(two, weighted=True)


def test_positional_order_is_torchrecs() -> None:
    """keys, values, weights, lengths, offsets, stride, stride_per_key_per_rank"""
    ids, weights, lengths, offsets = ints([1, 2]), tensor([0.25, 0.5]), ints([1, 1]), ints([0, 1, 2])
    for kjt in (
        KeyedJaggedTensor(["a"], ids, weights, lengths, offsets, 2, [[2]]),
        KeyedJaggedTensor.from_lengths_sync(["a"], ids, lengths, weights, 2, [[2]]),
        KeyedJaggedTensor.from_offsets_sync(["a"], ids, offsets, weights, 2, [[2]]),
    ):
        check(kjt, replace(batch(True, a=[[1], [2]]), ranks=((2,),)))


def test_keys_of_one_batch_size_share_it() -> None:
    kjt = build(TWO)
    # four ids and four lengths of eight bytes
    assert kjt.size_in_bytes() == 4 * 8 + 4 * 8
    assert (kjt.stride(), kjt.stride_per_key()) == (2, [2, 2])
    assert kjt.stride_per_key_per_rank() == []
    assert not kjt.variable_stride_per_key()
    assert kjt.index_per_key() == {"a": 0, "b": 1}
    # what one KJT reports another accepts
    again = KeyedJaggedTensor(kjt.keys(), kjt.values(), lengths=kjt.lengths(), stride_per_key_per_rank=[])
    assert not again.variable_stride_per_key()


@pytest.mark.parametrize(
    "ranks", [[[1, 1], [2, 1]], tensor([[1, 1], [2, 1]], dtype=torch.int32)], ids=["list", "tensor"]
)
def test_batch_sizes_per_rank_follow_their_keys(ranks: Any) -> None:
    kjt = KeyedJaggedTensor(
        ["a", "b"], ints([1, 2, 3, 4]), lengths=ints([2, 0, 1, 0, 1]), stride_per_key_per_rank=ranks
    )
    check(kjt, replace(VARIED, ranks=((1, 1), (2, 1))))
    assert [piece.stride_per_key_per_rank() for piece in kjt.split([1, 1])] == [[[1, 1]], [[2, 1]]]
    assert kjt.permute([1, 0, 1]).stride_per_key_per_rank() == [[2, 1], [1, 1], [2, 1]]


def test_no_keys_is_an_ordinary_size_and_keeps_its_stride() -> None:
    for kjt in (
        KeyedJaggedTensor([], tensor([]), lengths=tensor([]), stride=5),
        KeyedJaggedTensor([], tensor([]), offsets=tensor([]), stride=5),
        build(EMPTY).permute([]),
        build(EMPTY).split([0, 2])[0],
    ):
        assert (kjt.keys(), kjt.stride(), kjt.stride_per_key(), kjt.length_per_key()) == ([], 5, [], [])
        assert (kjt.offset_per_key(), kjt.lengths_offset_per_key(), kjt.to_dict(), kjt.split([])) == ([0], [0], {}, [])
        assert torch.equal(kjt.lengths(), ints([]))
        assert kjt.permute([]).stride() == 5
        assert str(kjt) == "KeyedJaggedTensor()\n"
        assert KeyedJaggedTensor.concat([kjt]).stride() == 5


def test_empty_has_nothing_of_the_dtypes_asked_for() -> None:
    kjt = KeyedJaggedTensor.empty()
    check(kjt, batch())
    assert (kjt.stride(), kjt.lengths().dtype, kjt.weights_or_none()) == (0, torch.int32, None)
    kjt = KeyedJaggedTensor.empty(True, "cpu", torch.int32, torch.half, INT)
    assert (kjt.values().dtype, kjt.weights().dtype, kjt.lengths().dtype) == (torch.int32, torch.half, INT)
    assert KeyedJaggedTensor.empty(device="meta").device().type == "meta"
    check(KeyedJaggedTensor.from_jt_dict({}), batch())


def test_an_empty_float_feature_does_not_make_ids_float() -> None:
    """`torch.tensor([])` is float32; joined by torch.cat it turns int64 ids into floats, as it does in TorchRec."""
    kjt = KeyedJaggedTensor.from_jt_dict(
        {"a": JaggedTensor(ints([1, 2]), lengths=ints([1, 1])), "b": JaggedTensor(tensor([]), lengths=ints([0, 0]))}
    )
    check(kjt, batch(a=[[1], [2]], b=[[], []]), Form())
    check(KeyedJaggedTensor.concat([KeyedJaggedTensor([], tensor([]), lengths=tensor([])), build(TWO)]), TWO, Form())


def test_offsets_of_int32_lengths_widen_past_their_range() -> None:
    """uint8 stands in for int32 and 300 values for 2^31."""
    kjt = KeyedJaggedTensor(["a", "b"], torch.arange(300), lengths=tensor([150, 150], dtype=torch.uint8))
    assert kjt.offsets().tolist() == [0, 150, 300]
    assert kjt.length_per_key() == [150, 150]
    assert kjt.to_dict()["b"].offsets().tolist() == [0, 150]
    narrow = KeyedJaggedTensor(["a"], ints([1]), lengths=tensor([1], dtype=torch.int32))
    assert narrow.offsets().dtype == torch.int32


def test_pieces_are_views_and_permute_copies() -> None:
    kjt = build(TWO)
    for view in (kjt["b"], kjt.to_dict()["b"], kjt.split([1, 1])[1]):
        assert view.values().data_ptr() == kjt.values()[2:].data_ptr()
    kjt.permute([0, 1]).values().fill_(9)
    check(kjt, TWO)
    assert kjt.split([2])[0] is kjt
    assert kjt.split([0, 2, 0])[1] is kjt


def test_to_dict_is_made_once_and_honours_compute_offsets() -> None:
    """TorchRec returns its cached dict, without offsets if the first caller wanted none."""
    for some in (TWO, VARIED):
        kjt = build(some)
        jts = kjt.to_dict(compute_offsets=False)
        assert all(jt.offsets_or_none() is None for jt in jts.values())
        assert kjt.to_dict() is jts
        assert (jts["b"].offsets_or_none() is not None) == (some is TWO)
        check_dict(jts, some)


def test_to_moves_every_tensor_and_leaves_cached_views_behind() -> None:
    """TorchRec hands the dict of to_dict on, so that its tensors stay on the old device."""
    kjt = build(weighted(TWO)).sync()
    kjt.offsets()
    kjt.to_dict()
    for device in ("meta", torch.device("meta")):
        moved = kjt.to(device)
        held = [moved.values(), moved.weights(), moved.lengths_or_none(), moved.offsets_or_none()]
        assert [t.device.type for t in held if t is not None] == ["meta"] * 4
        assert {jt.device().type for jt in moved.to_dict().values()} == {"meta"}
        assert moved.length_per_key_or_none() == [2, 2]


def test_a_pickle_of_a_synced_batch_is_synced() -> None:
    kjt = build(TWO).sync()
    kjt.to_dict()
    assert pickle.loads(pickle.dumps(kjt)).length_per_key_or_none() == [2, 2]


def test_sync_knows_the_lengths_and_unsync_forgets_them() -> None:
    kjt = build(TWO)
    assert (kjt.length_per_key_or_none(), kjt.offset_per_key_or_none()) == (None, None)
    assert kjt.sync().length_per_key_or_none() == [2, 2]
    assert kjt.sync().offset_per_key_or_none() == [0, 2, 4]
    assert kjt.unsync() is kjt
    assert (kjt.length_per_key_or_none(), kjt.offset_per_key_or_none()) == (None, None)


class HostReads(TorchFunctionMode):
    """Counts the calls that wait for a device."""

    NAMES = frozenset({"item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__"})

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in self.NAMES:
            self.seen[name] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("some", [TWO, VARIED], ids=["one batch size", "own batch sizes"])
@pytest.mark.parametrize("given", ["lengths", "offsets"])
def test_one_host_read_serves_a_kjt_and_all_its_pieces(some: Batch, given: str) -> None:
    kjt = build(weighted(some), Form(given=given))
    with HostReads() as reads:
        kjt.to_dict()
        for piece in (*kjt.split([1, 1]), kjt.permute([1, 0]), kjt.permute([1]).permute([0]), kjt.to("cpu")):
            piece.permute([0]).split([1])
            piece.to_dict()
            _ = piece[piece.keys()[0]].offsets()
        KeyedJaggedTensor.concat(kjt.split([1, 1])).sync()
        KeyedJaggedTensor.from_jt_dict(kjt.to_dict()).sync()
    # the second compares the members of from_jt_dict; on the cpu what is to be checked is read beside them
    assert reads.seen["tolist"] == 2


@pytest.mark.parametrize("ranks", [None, [[2], [2]]], ids=["one batch size", "own batch sizes"])
def test_construction_reads_nothing(ranks: list[list[int]] | None) -> None:
    """Fake tensors have no numbers: reading one raises."""
    with FakeTensorMode():
        values, weights, lengths = torch.zeros(4, dtype=INT), torch.zeros(4), torch.zeros(4, dtype=INT)
        kjt = KeyedJaggedTensor(["a", "b"], values, weights, lengths, stride_per_key_per_rank=ranks)
        KeyedJaggedTensor(["a", "b"], values, weights, offsets=kjt.offsets(), stride_per_key_per_rank=ranks).lengths()
        jts = {"a": JaggedTensor(values, weights, lengths), "b": JaggedTensor(values, weights, lengths)}
        both = KeyedJaggedTensor.from_jt_dict(jts)
        both.permute([1, 0]).split([1, 1])[0].to_dict()
        KeyedJaggedTensor.concat([kjt.permute([]), kjt]).to("cpu").split([2])
        with pytest.raises(DataDependentOutputException):
            kjt.length_per_key()


@pytest.mark.gpu
@pytest.mark.parametrize("some", [TWO, VARIED], ids=["one batch size", "own batch sizes"])
def test_pieces_on_a_gpu_wait_once_and_agree_with_lists(some: Batch) -> None:
    kjt = build(weighted(some)).to("cuda").sync()
    torch.cuda.set_sync_debug_mode("error")
    try:
        fresh = KeyedJaggedTensor(
            kjt.keys(),
            kjt.values(),
            kjt.weights(),
            kjt.lengths(),
            stride_per_key_per_rank=kjt.stride_per_key_per_rank(),
        )
        fresh.offsets()
        permuted = kjt.permute([1, 0])
        pieces = kjt.split([1, 1])
        kjt.to_dict()
        kjt.record_stream(torch.cuda.current_stream())
        padded = kjt["b"].to_padded_dense(2)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for kjt, order in ((fresh, [0, 1]), (permuted, [1, 0]), (pieces[1], [1])):
        check(kjt, pick(weighted(some), order))
    assert padded.tolist() == [([i for i, _ in bag] + [0, 0])[:2] for bag in some.features[1][1]]
    assert build(some).pin_memory().values().is_pinned()


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
    r"lengths must be 1-D or \[2 keys, batch\]": lambda: make(lengths=ints([1, 1, 1, 1]).view(2, 2, 1)),
    r"offsets must be 1-D, got": lambda: make(offsets=ints([0, 1, 2, 4]).view(2, 2)),
    "Must provide lengths or offsets, got neither": lambda: make(lengths=None),
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
    "doesn't have weights. .* of a KeyedJaggedTensor": lambda: make().weights(),
    r"\['b'\] have, \['a', 'c'\] have not": lambda: from_jts(a=jt(FOUR), b=jt(FOUR, weights=FOUR), c=jt(FOUR)),
    "values must be on one device, got 'a' on cpu, 'b' on meta": lambda: from_jts(a=jt(FOUR), b=jt(FOUR.to("meta"))),
    "'a' is torch.int64 and 'b' is torch.float32": lambda: from_jts(a=jt(FOUR), b=jt(FOUR.float())),
    "concat needs at least one KeyedJaggedTensor": lambda: concat([]),
    f"keys must be unique, repeated: {BOTH}": lambda: concat([make(), make()]),
    rf"strides must be consistent for all KJTs, got 2 for {BOTH}, 4 for \['c'\]": lambda: concat([make(), make(["c"])]),
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
    r"keys must be strings or ints, got 7.0 \(float\)": lambda: make(["a", 7.0]),
    "values must be a torch.Tensor, got list": lambda: make(values=[1]),
    "lengths must be of integer type, but got torch.float32": lambda: make(lengths=torch.ones(4)),
    "offsets must be of integer type, but got torch.float32": lambda: make(offsets=torch.ones(5)),
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
