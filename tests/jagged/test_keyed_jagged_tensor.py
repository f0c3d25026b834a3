"""KeyedJaggedTensor: bags of ids per key. The model is lists of lists. Its text is in test_keyed_tensor.py."""

import pickle
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.overrides import TorchFunctionMode

from shardwise.jagged import JaggedTensor, KeyedJaggedTensor

INT = torch.int64
KEYS = ["a", "b", "c", "d", "e"]
# a key, and its bags
Model = list[tuple[str, list[list[int]]]]


def ints(numbers: list[int]) -> Tensor:
    return tensor(numbers, dtype=INT)


def weights_for(values: list[int]) -> list[float]:
    return [n / 4 for n in values]


def build(model: Model, weighted: bool = False, offsets: bool = False, ranks: bool = False) -> KeyedJaggedTensor:
    """The KJT of a model; batch sizes of their own are declared where they differ, or where `ranks` asks for it."""
    bags = [bag for _, key_bags in model for bag in key_bags]
    values = [n for bag in bags for n in bag]
    lengths = ints([len(bag) for bag in bags])
    batches = [len(key_bags) for _, key_bags in model]
    varied = ranks or len(set(batches)) > 1
    return KeyedJaggedTensor(
        [key for key, _ in model],
        ints(values),
        tensor(weights_for(values)) if weighted else None,
        None if offsets else lengths,
        torch.nn.functional.pad(lengths.cumsum(0), (1, 0)) if offsets else None,
        stride_per_key_per_rank=[[n] for n in batches] if varied else None,
    )


def check(kjt: KeyedJaggedTensor, model: Model, weighted: bool = False) -> None:
    """Every accessor agrees with the model."""
    bags = [bag for _, key_bags in model for bag in key_bags]
    values = [n for bag in bags for n in bag]
    counts = [sum(len(bag) for bag in key_bags) for _, key_bags in model]
    batches = [len(key_bags) for _, key_bags in model]
    assert kjt.keys() == [key for key, _ in model]
    assert kjt.values().tolist() == values
    assert kjt.values().dtype == INT
    assert kjt.lengths().tolist() == [len(bag) for bag in bags]
    assert kjt.offsets().tolist() == [sum(len(bag) for bag in bags[:i]) for i in range(len(bags) + 1)]
    assert kjt.stride_per_key() == batches
    assert kjt.lengths_offset_per_key() == [sum(batches[:i]) for i in range(len(batches) + 1)]
    assert kjt.length_per_key() == counts
    assert kjt.offset_per_key() == [sum(counts[:i]) for i in range(len(counts) + 1)]
    assert (kjt.weights_or_none() is not None) == weighted
    if weighted:
        assert kjt.weights().tolist() == weights_for(values)
    check_dict(kjt.to_dict(), model, weighted)
    for key, key_bags in model:
        check_dict({key: kjt[key]}, [(key, key_bags)], weighted)


def check_dict(jts: dict[str, JaggedTensor], model: Model, weighted: bool) -> None:
    assert list(jts) == list(dict(model))
    for key, key_bags in dict(model).items():
        jt = jts[key]
        assert [bag.tolist() for bag in jt.to_dense()] == key_bags
        assert jt.offsets().tolist() == [sum(len(bag) for bag in key_bags[:i]) for i in range(len(key_bags) + 1)]
        assert (jt.weights_or_none() is not None) == weighted
        if weighted:
            assert jt.weights().tolist() == weights_for([n for bag in key_bags for n in bag])


@st.composite
def models(draw: st.DrawFn) -> Model:
    """Up to five keys; batches from 0, of one size or of any; many bags empty."""
    bag = st.lists(st.integers(0, 99), max_size=3)
    batch = draw(st.none() | st.integers(0, 3))
    low, high = (0, 3) if batch is None else (batch, batch)
    count = draw(st.integers(0, len(KEYS)))
    return [(key, draw(st.lists(bag, min_size=low, max_size=high))) for key in KEYS[:count]]


same = settings(max_examples=80, deadline=None)
flags = st.fixed_dictionaries({"weighted": st.booleans(), "offsets": st.booleans(), "ranks": st.booleans()})


@given(models(), flags)
@same
def test_accessors_agree_with_lists(model: Model, flags: dict[str, bool]) -> None:
    check(build(model, **flags), model, flags["weighted"])


@given(models(), flags, st.data())
@same
def test_split_cuts_and_concat_joins_again(model: Model, flags: dict[str, bool], data: st.DataObject) -> None:
    kjt = build(model, **flags)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(model)), max_size=3)))
    edges = [0, *cuts, len(model)]
    pieces = kjt.split([b - a for a, b in zip(edges, edges[1:], strict=False)])
    assert len(pieces) == len(edges) - 1
    for piece, a, b in zip(pieces, edges, edges[1:], strict=False):
        check(piece, model[a:b], flags["weighted"])
        assert piece.stride() == kjt.stride()
        assert piece.variable_stride_per_key() == kjt.variable_stride_per_key()
    joined = KeyedJaggedTensor.concat(pieces)
    check(joined, model, flags["weighted"])
    assert joined.stride() == kjt.stride()
    assert joined.stride_per_key_per_rank() == kjt.stride_per_key_per_rank()


@given(models(), flags, st.data())
@same
def test_permute_of_a_permute_is_the_composition(model: Model, flags: dict[str, bool], data: st.DataObject) -> None:
    """Indices may repeat and leave out."""
    kjt = build(model, **flags)
    first = data.draw(st.lists(st.integers(0, len(model) - 1), max_size=5)) if model else []
    second = data.draw(st.lists(st.integers(0, len(first) - 1), max_size=5)) if first else []
    once = kjt.permute(first, tensor(first))
    check(once, [model[i] for i in first], flags["weighted"])
    twice = once.permute(second)
    check(twice, [model[first[i]] for i in second], flags["weighted"])
    assert twice.stride() == kjt.stride()


@given(models(), flags)
@same
def test_from_jt_dict_inverts_to_dict(model: Model, flags: dict[str, bool]) -> None:
    kjt = build(model, **flags)
    back = KeyedJaggedTensor.from_jt_dict(kjt.to_dict())
    check(back, model, flags["weighted"] and bool(model))
    batches = {len(bags) for _, bags in model}
    assert back.variable_stride_per_key() == (len(batches) > 1)
    assert back.stride() == max(batches, default=0)


@given(models(), flags)
@same
def test_pickling_keeps_everything(model: Model, flags: dict[str, bool]) -> None:
    kjt = build(model, **flags)
    check(pickle.loads(pickle.dumps(kjt)), model, flags["weighted"])
    kjt.sync().to_dict()
    synced = pickle.loads(pickle.dumps(kjt))
    assert synced.length_per_key_or_none() == kjt.length_per_key()
    check(synced, model, flags["weighted"])


TWO: Model = [("a", [[1, 2], []]), ("b", [[3], [4]])]
VARIED: Model = [("a", [[1, 2], []]), ("b", [[3], [], [4]])]


def test_positional_order_is_torchrecs() -> None:
    """keys, values, weights, lengths, offsets, stride, stride_per_key_per_rank"""
    kjt = KeyedJaggedTensor(["a"], ints([1, 2]), tensor([0.25, 0.5]), ints([1, 1]), ints([0, 1, 2]), 2, [[2]])
    check(kjt, [("a", [[1], [2]])], weighted=True)
    kjt = KeyedJaggedTensor.from_lengths_sync(["a"], ints([1, 2]), ints([1, 1]), tensor([0.25, 0.5]), 2, [[2]])
    check(kjt, [("a", [[1], [2]])], weighted=True)
    kjt = KeyedJaggedTensor.from_offsets_sync(["a"], ints([1, 2]), ints([0, 1, 2]), tensor([0.25, 0.5]), 2, [[2]])
    check(kjt, [("a", [[1], [2]])], weighted=True)


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
    check(kjt, VARIED)
    assert kjt.variable_stride_per_key()
    assert kjt.stride() == 3
    assert kjt.stride_per_key_per_rank() == [[1, 1], [2, 1]]
    assert [piece.stride_per_key_per_rank() for piece in kjt.split([1, 1])] == [[[1, 1]], [[2, 1]]]
    assert kjt.permute([1, 0, 1]).stride_per_key_per_rank() == [[2, 1], [1, 1], [2, 1]]


def test_no_keys_is_an_ordinary_size_and_keeps_its_stride() -> None:
    for kjt in (
        KeyedJaggedTensor([], tensor([]), lengths=tensor([]), stride=5),
        KeyedJaggedTensor([], tensor([]), offsets=tensor([]), stride=5),
        build([(key, [[]] * 5) for key in "ab"]).permute([]),
        build([(key, [[]] * 5) for key in "ab"]).split([0, 2])[0],
    ):
        assert (kjt.keys(), kjt.stride(), kjt.stride_per_key(), kjt.length_per_key()) == ([], 5, [], [])
        assert (kjt.offset_per_key(), kjt.lengths_offset_per_key(), kjt.to_dict(), kjt.split([])) == ([0], [0], {}, [])
        assert torch.equal(kjt.lengths(), ints([]))
        assert kjt.permute([]).stride() == 5
        assert str(kjt) == "KeyedJaggedTensor()\n"
        assert KeyedJaggedTensor.concat([kjt]).stride() == 5


def test_empty_has_nothing_of_the_dtypes_asked_for() -> None:
    kjt = KeyedJaggedTensor.empty()
    check(kjt, [])
    assert (kjt.stride(), kjt.lengths().dtype, kjt.weights_or_none()) == (0, torch.int32, None)
    kjt = KeyedJaggedTensor.empty(True, "cpu", torch.int32, torch.half, INT)
    assert (kjt.values().dtype, kjt.weights().dtype, kjt.lengths().dtype) == (torch.int32, torch.half, INT)
    assert KeyedJaggedTensor.empty(device="meta").device().type == "meta"
    check(KeyedJaggedTensor.from_jt_dict({}), [])


@pytest.mark.parametrize(
    "model", [[("a", []), ("b", [])], [("a", [[], []]), ("b", [[], []])]], ids=["batch 0", "empty bags"]
)
def test_all_features_empty(model: Model) -> None:
    for offsets in (False, True):
        kjt = build(model, offsets=offsets)
        check(kjt, model)
        check(kjt.permute([1, 0]), model[::-1])
        check(kjt.split([1, 1])[1], model[1:])


def test_an_empty_float_feature_does_not_make_ids_float() -> None:
    """`torch.tensor([])` is float32; joined by torch.cat it turns int64 ids into floats, as it does in TorchRec."""
    kjt = KeyedJaggedTensor.from_jt_dict(
        {"a": JaggedTensor(ints([1, 2]), lengths=ints([1, 1])), "b": JaggedTensor(tensor([]), lengths=ints([0, 0]))}
    )
    check(kjt, [("a", [[1], [2]]), ("b", [[], []])])
    check(KeyedJaggedTensor.concat([KeyedJaggedTensor([], tensor([]), lengths=tensor([])), build(TWO)]), TWO)


def test_concat_joins_a_fixed_batch_and_batches_of_their_own() -> None:
    kjt = KeyedJaggedTensor.concat([build(VARIED, weighted=True), build([("c", [[5]])], weighted=True)])
    check(kjt, [*VARIED, ("c", [[5]])], weighted=True)
    assert kjt.stride_per_key_per_rank() == [[2], [3], [1]]


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
    for model in (TWO, VARIED):
        kjt = build(model)
        jts = kjt.to_dict(compute_offsets=False)
        assert all(jt.offsets_or_none() is None for jt in jts.values())
        assert kjt.to_dict() is jts
        assert (jts["b"].offsets_or_none() is not None) == (model is TWO)
        check_dict(jts, model, weighted=False)


def test_gradients_flow_through_weights_of_every_piece() -> None:
    weights = tensor([1.0, 2.0, 3.0, 4.0], requires_grad=True)
    kjt = KeyedJaggedTensor(["a", "b"], ints([1, 2, 3, 4]), weights, ints([2, 0, 1, 1]))
    pieces = [*kjt.split([1, 1]), kjt.permute([1, 0, 1]), kjt["b"], *kjt.to_dict().values()]
    scaled = [(i + 1) * piece.weights().sum() for i, piece in enumerate(pieces)]
    torch.stack(scaled).sum().backward()
    # split 1 | 2, permute 3 (b twice), getitem 4, to_dict 5 | 6
    assert weights.grad is not None
    assert weights.grad.tolist() == [1 + 3 + 5] * 2 + [2 + 3 * 2 + 4 + 6] * 2


def test_to_moves_every_tensor_and_leaves_cached_views_behind() -> None:
    """TorchRec hands the dict of to_dict on, so that its tensors stay on the old device."""
    kjt = build(TWO, weighted=True).sync()
    kjt.offsets()
    kjt.to_dict()
    for device in ("meta", torch.device("meta")):
        moved = kjt.to(device)
        held = [moved.values(), moved.weights(), moved.lengths_or_none(), moved.offsets_or_none()]
        assert [t.device.type for t in held if t is not None] == ["meta"] * 4
        assert {jt.device().type for jt in moved.to_dict().values()} == {"meta"}
        assert moved.length_per_key_or_none() == [2, 2]


def test_dtype_of_to_casts_the_weights_only() -> None:
    moved = build(TWO, weighted=True).to("cpu", dtype=torch.float16)
    assert (moved.weights().dtype, moved.values().dtype, moved.lengths().dtype) == (torch.float16, INT, INT)
    assert moved.weights().tolist() == weights_for([1, 2, 3, 4])
    assert build(TWO).to("cpu", dtype=torch.float16).weights_or_none() is None


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


@pytest.mark.parametrize("model", [TWO, VARIED], ids=["one batch size", "own batch sizes"])
@pytest.mark.parametrize("offsets", [False, True], ids=["lengths", "offsets"])
def test_one_host_read_serves_a_kjt_and_all_its_pieces(model: Model, offsets: bool) -> None:
    kjt = build(model, weighted=True, offsets=offsets)
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
@pytest.mark.parametrize("model", [TWO, VARIED], ids=["one batch size", "own batch sizes"])
def test_pieces_on_a_gpu_wait_once_and_agree_with_lists(model: Model) -> None:
    kjt = build(model, weighted=True).to("cuda").sync()
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
    check(fresh, model, weighted=True)
    check(permuted, model[::-1], weighted=True)
    check(pieces[1], model[1:], weighted=True)
    assert padded.tolist() == [(bag + [0, 0])[:2] for bag in model[1][1]]
    assert build(model).pin_memory().values().is_pinned()
