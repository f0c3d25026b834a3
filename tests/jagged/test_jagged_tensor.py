"""JaggedTensor: one flat tensor in bags. The model is a list of lists.

Also what a KeyedJaggedTensor says of members and bags that contradict each other.
"""

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor, tensor

from shardwise.jagged import JaggedTensor, KeyedJaggedTensor

INT = torch.int64


def bags_of(jt: JaggedTensor) -> list[list[object]]:
    return [bag.tolist() for bag in jt.to_dense()]


def example(**given: Tensor) -> JaggedTensor:
    return JaggedTensor(tensor([1, 2, 3]), lengths=tensor([2, 0, 1]), **given)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8], ids=str)
def test_lengths_and_offsets_are_computed_once_from_each_other_in_their_dtype(dtype: torch.dtype) -> None:
    of_lengths = JaggedTensor(tensor([1, 2, 3]), lengths=tensor([2, 0, 1], dtype=dtype))
    assert of_lengths.offsets_or_none() is None
    assert torch.equal(of_lengths.offsets(), tensor([0, 2, 2, 3], dtype=dtype))
    assert of_lengths.offsets() is of_lengths.offsets_or_none()
    of_offsets = JaggedTensor(tensor([1, 2, 3]), offsets=tensor([0, 2, 2, 3], dtype=dtype))
    assert of_offsets.lengths_or_none() is None
    assert torch.equal(of_offsets.lengths(), tensor([2, 0, 1], dtype=dtype))
    assert of_offsets.lengths() is of_offsets.lengths_or_none()


def test_offsets_widen_where_their_sum_does_not_fit_in_the_dtype_of_the_lengths() -> None:
    """TorchRec keeps int32 and wraps round past 2^31 values; here the same with 300 values and uint8."""
    jt = JaggedTensor(torch.zeros(300), lengths=tensor([150, 150], dtype=torch.uint8))
    assert torch.equal(jt.offsets(), tensor([0, 150, 300]))


def test_positional_order_is_values_weights_lengths_offsets() -> None:
    jt = JaggedTensor(tensor([1, 2]), tensor([0.5, 0.25]), tensor([1, 1]), tensor([0, 1, 2]))
    assert jt.values().tolist() == [1, 2]
    assert jt.weights().tolist() == [0.5, 0.25]
    assert jt.weights_or_none() is jt.weights()
    assert jt.lengths().tolist() == [1, 1]
    assert jt.offsets().tolist() == [0, 1, 2]
    assert jt.device() == torch.device("cpu")


@given(st.lists(st.lists(st.integers(-9, 9), max_size=4), max_size=6), st.integers(0, 5), st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_dense_and_padded_round_trips_match_lists(bags: list[list[int]], width: int, inner: int) -> None:
    """Each value is a row of `inner` equal numbers, so that N-D values are covered."""
    jt = JaggedTensor.from_dense([tensor(bag, dtype=INT)[:, None].expand(-1, inner) for bag in bags])
    wide = [[[n] * inner for n in bag] for bag in bags]
    assert bags_of(jt) == wide
    padded = jt.to_padded_dense(width, 7)
    fill = [[7] * inner] * width
    assert padded.tolist() == [(bag + fill)[:width] for bag in wide]
    if bags:
        assert padded.dtype == INT
        assert torch.equal(jt.to_padded_dense(), jt.to_padded_dense(max(len(bag) for bag in bags), 0))


def test_from_dense_takes_weights_and_empty_float_samples_do_not_make_ids_float() -> None:
    """`torch.tensor([])` is float32; in TorchRec it turns the ids of the whole batch into floats."""
    jt = JaggedTensor.from_dense(
        [tensor([1, 2]), tensor([]), tensor([3])], [tensor([0.5, 1.0]), tensor([]), tensor([2.0])]
    )
    assert jt.values().dtype == INT
    assert bags_of(jt) == [[1, 2], [], [3]]
    assert jt.weights().tolist() == [0.5, 1.0, 2.0]
    assert jt.lengths().dtype == torch.int32
    assert bags_of(JaggedTensor.from_dense([])) == []


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.int32, torch.bool], ids=str)
def test_padding_keeps_the_dtype(dtype: torch.dtype) -> None:
    padded = JaggedTensor(tensor([1, 0, 1], dtype=dtype), lengths=tensor([2, 0, 1])).to_padded_dense(2, 1)
    assert torch.equal(padded, tensor([[1, 0], [1, 1], [1, 1]], dtype=dtype))


def test_a_batch_of_nothing_pads_to_nothing() -> None:
    nothing = JaggedTensor(torch.zeros(0, 3), lengths=torch.zeros(0, dtype=INT))
    assert nothing.to_padded_dense().shape == (0, 0, 3)
    assert nothing.to_padded_dense(4).shape == (0, 4, 3)
    assert nothing.to_dense() == []
    assert JaggedTensor(torch.zeros(0), lengths=tensor([0, 0])).to_padded_dense().shape == (2, 0)


def test_to_moves_every_tensor_and_accepts_a_string() -> None:
    jt = example(weights=tensor([0.5, 0.25, 1.0]), offsets=tensor([0, 2, 2, 3]))
    for device in ("meta", torch.device("meta")):
        moved = jt.to(device)
        held = [moved.values(), moved.weights(), moved.lengths_or_none(), moved.offsets_or_none()]
        assert [t.device.type for t in held if t is not None] == ["meta"] * 4
    assert jt.to("cpu").values() is jt.values()


def test_size_in_bytes_counts_what_is_held() -> None:
    jt = example()
    assert jt.size_in_bytes() == 3 * 8 + 3 * 8
    jt.offsets()
    assert jt.size_in_bytes() == 3 * 8 + 3 * 8 + 4 * 8


# observed from torchrec 1.8.0, apart from "3-D", which it cannot print
TEXTS = {
    "ints": (tensor([1, 2, 3]), None, [2, 0, 1], "JaggedTensor({\n    [[1, 2], [], [3]]\n})\n"),
    "floats": (
        tensor([1.0, 2.5, 3.123456]),
        None,
        [2, 0, 1],
        "JaggedTensor({\n    [[1.0, 2.5], [], [3.1234560012817383]]\n})\n",
    ),
    "half": (
        tensor([1.1, 2, 3], dtype=torch.half),
        None,
        [2, 0, 1],
        "JaggedTensor({\n    [[1.099609375, 2.0], [], [3.0]]\n})\n",
    ),
    "bool": (tensor([True, False]), None, [1, 1], "JaggedTensor({\n    [[True], [False]]\n})\n"),
    "weighted": (
        tensor([1, 2, 3]),
        tensor([0.5, 0.25, 1.0]),
        [2, 0, 1],
        'JaggedTensor({\n    "values": [[1, 2], [], [3]],\n    "weights": [[0.5, 0.25], [], [1.0]]\n})\n',
    ),
    "2-D": (
        tensor([[1.0, 2], [3, 4], [5, 6]]),
        None,
        [2, 0, 1],
        "JaggedTensor({\n    [[[1.0, 2.0], [3.0, 4.0]], [], [[5.0, 6.0]]]\n})\n",
    ),
    "2-D weighted": (
        tensor([[1.0, 2], [3, 4], [5, 6]]),
        tensor([0.5, 0.25, 1.0]),
        [2, 0, 1],
        'JaggedTensor({\n    "values": [[[1.0, 2.0], [3.0, 4.0]], [], [[5.0, 6.0]]],\n'
        '    "weights": [[0.5, 0.25], [], [1.0]]\n})\n',
    ),
    "3-D": (
        torch.arange(4).view(2, 1, 2),
        None,
        [1, 1],
        "JaggedTensor({\n    [[[[0, 1]]], [[[2, 3]]]]\n})\n",
    ),
    "batch of 0": (tensor([]), None, [], "JaggedTensor({\n    []\n})\n"),
    "batch of 0 weighted": (
        tensor([]),
        tensor([]),
        [],
        'JaggedTensor({\n    "values": [],\n    "weights": []\n})\n',
    ),
    "empty bags": (torch.zeros(0, 3), None, [0, 0], "JaggedTensor({\n    [[], []]\n})\n"),
}


@pytest.mark.parametrize("case", TEXTS)
def test_text_is_that_of_torchrec(case: str) -> None:
    values, weights, lengths, expected = TEXTS[case]
    assert str(JaggedTensor(values, weights, lengths=tensor(lengths, dtype=INT))) == expected
    offsets = torch.nn.functional.pad(tensor(lengths, dtype=INT).cumsum(0), (1, 0))
    assert str(JaggedTensor(values, weights, offsets=offsets)) == expected


def test_no_bags_may_come_as_empty_float_lengths_or_empty_offsets() -> None:
    """`torch.tensor([])` is float32, and TorchRec's users write it for lengths and offsets of nothing."""
    for jt in (JaggedTensor(tensor([]), lengths=tensor([])), JaggedTensor(tensor([]), offsets=tensor([]))):
        assert torch.equal(jt.offsets(), tensor([0]))
        assert torch.equal(jt.lengths(), torch.zeros(0, dtype=INT))


V, META = tensor([1, 2, 3]), torch.device("meta")
ERRORS = {
    "neither": (lambda: JaggedTensor(V), ValueError, "Must provide lengths or offsets, got neither"),
    "list": (lambda: JaggedTensor([1], lengths=V), TypeError, "values must be a torch.Tensor, got list"),  # type: ignore[arg-type]
    "list lengths": (lambda: JaggedTensor(V, lengths=[3]), TypeError, "lengths must be a torch.Tensor, got list"),  # type: ignore[arg-type]
    "scalar": (lambda: JaggedTensor(tensor(1), lengths=V), ValueError, "values must have at least one dim"),
    "float lengths": (
        lambda: JaggedTensor(V, lengths=tensor([3.0])),
        TypeError,
        "lengths must be of integer type, but got torch.float32",
    ),
    "bool offsets": (
        lambda: JaggedTensor(V, offsets=tensor([True])),
        TypeError,
        "offsets must be of integer type, but got torch.bool",
    ),
    "2-D offsets": (
        lambda: JaggedTensor(V, offsets=tensor([[0, 3]])),
        ValueError,
        r"offsets must be 1-D, got shape \[1, 2\]",
    ),
    "both": (
        lambda: JaggedTensor(V, lengths=tensor([3]), offsets=tensor([0, 1, 3])),
        ValueError,
        "1 lengths need 2 offsets, got 3",
    ),
    "no bags": (lambda: JaggedTensor(V, lengths=tensor([])), ValueError, "3 values but no bags"),
    "weights": (
        lambda: JaggedTensor(V, tensor([1.0]), tensor([3])),
        ValueError,
        r"weights must be as many as values: got shape \[1\] for 3 values",
    ),
    "device of lengths": (
        lambda: JaggedTensor(V, lengths=torch.ones(3, dtype=INT, device=META)),
        ValueError,
        "lengths are on meta, values on cpu",
    ),
    "device of weights": (
        lambda: JaggedTensor(V, torch.ones(3, device=META), tensor([3])),
        ValueError,
        "weights are on meta, values on cpu",
    ),
    "no weights": (lambda: example().weights(), ValueError, "doesn't have weights. .* of a JaggedTensor"),
    "sum": (
        lambda: JaggedTensor(V, lengths=tensor([1, 1])).to_dense(),
        ValueError,
        r"lengths \[1, 1\] sum to 2, values has 3",
    ),
    "offsets from 1": (
        lambda: JaggedTensor(V, offsets=tensor([1, 3])).to_dense(),
        ValueError,
        r"lengths \[2\] sum to 2, values has 3",
    ),
    "negative": (
        lambda: JaggedTensor(V, lengths=tensor([4, -1])).to_dense(),
        ValueError,
        r"lengths \[4, -1\] sum to 3",
    ),
    "padded": (lambda: example().to_padded_dense(-1), ValueError, "desired_length must be >= 0, got -1"),
    "dense weights": (
        lambda: JaggedTensor.from_dense([V, V], [V, V[:1]]),
        ValueError,
        "sample 1: 1 weights for 3 values",
    ),
    "dense count": (lambda: JaggedTensor.from_dense([V], []), ValueError, "got 0 for 1 samples"),
    "dense kinds": (
        lambda: JaggedTensor.from_dense([V, V.float()]),
        ValueError,
        "sample 0 is torch.int64 and sample 1 is torch.float32",
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_bad_input_is_refused_with_its_numbers(case: str) -> None:
    make, error, message = ERRORS[case]
    with pytest.raises(error, match=message):
        make()


# bags of three values, and what is said of them
MISFITS = {
    "too long": ({"lengths": [1, 4]}, r"lengths \[1, 4\] sum to 5, values has 3"),
    "negative": ({"lengths": [4, -1]}, r"lengths \[4, -1\] sum to 3"),
    "contradiction": (
        {"lengths": [2, 1], "offsets": [0, 1, 3]},
        r"lengths \[2, 1\] contradict offsets \[0, 1, 3\]",
    ),
    "offsets from 1": ({"offsets": [1, 4]}, r"lengths \[3\] contradict offsets \[1, 4\]"),
}


@pytest.mark.parametrize("case", MISFITS)
def test_dense_and_padded_refuse_the_same_bags(case: str) -> None:
    """to_padded_dense padded lengths that exceed the values, and of lengths and offsets that contradict each other
    to_dense followed the first and to_padded_dense the second."""
    given, message = MISFITS[case]
    jt = JaggedTensor(V, **{name: tensor(numbers) for name, numbers in given.items()})
    for attempt in (jt.to_dense, jt.to_padded_dense, lambda: jt.to_padded_dense(2)):
        with pytest.raises(ValueError, match=message):
            attempt()


def swapped() -> dict[str, JaggedTensor]:
    """Five values in all, and lengths of five in all, but not of the same keys."""
    return {
        "a": JaggedTensor(tensor([1, 2]), lengths=tensor([2, 1])),
        "b": JaggedTensor(tensor([3, 4, 5]), lengths=tensor([1, 1])),
    }


def test_a_member_whose_lengths_do_not_fit_is_refused() -> None:
    """from_jt_dict took lengths at their word: a lookup of "a" then read an id of "b" as one of its own."""
    with pytest.raises(ValueError, match="key 'a': lengths sum to 3, values has 2"):
        KeyedJaggedTensor.from_jt_dict(swapped())
    with pytest.raises(ValueError, match="key 'c': lengths sum to -1, values has 3"):
        KeyedJaggedTensor.from_jt_dict({"c": JaggedTensor(V, lengths=tensor([-2, 1]))})


def test_sync_checks_the_members_that_construction_could_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sizes that from_jt_dict knows counted as read, so that sync had nothing left to check."""
    monkeypatch.setattr("shardwise.jagged.keyed_jagged_tensor.readable", lambda _: False)
    kjt = KeyedJaggedTensor.from_jt_dict(swapped())
    empty = KeyedJaggedTensor(["c"], V[:0], lengths=tensor([0, 0]))
    for piece in (kjt, kjt.to("cpu"), KeyedJaggedTensor.concat([empty.sync(), kjt]), kjt.permute([1, 0])):
        with pytest.raises(ValueError, match="key '[ab]': lengths sum to"):
            piece.sync()
    with pytest.raises(ValueError, match="lengths sum to 3, values has 2"):
        kjt.split([1, 1])[0].sync()


@pytest.mark.parametrize("ranks", [None, [[2], [1]]], ids=["one batch size", "own batch sizes"])
def test_lengths_and_offsets_of_a_key_that_contradict_each_other_are_refused(ranks: list[list[int]] | None) -> None:
    """Bags came from the lengths and places of keys from the offsets: rows of another key, silently."""
    lengths, offsets = tensor([1, 0, 1, 1][: 3 if ranks else 4]), tensor([0, 1, 1, 3, 3][: 4 if ranks else 5])
    kjt = KeyedJaggedTensor(["a", "b"], V, None, lengths, offsets, stride_per_key_per_rank=ranks)
    with pytest.raises(ValueError, match="key 'b', sample 0: length 1, but its offsets go from 1 to 3"):
        kjt.sync()
    with pytest.raises(ValueError, match="key 'b', sample 0"):
        kjt.length_per_key()
