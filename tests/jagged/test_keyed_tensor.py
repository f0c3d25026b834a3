"""KeyedTensor: columns of one tensor by key, beside a dict of tensors. Also the text and `repr` of jagged types."""

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from shardwise.jagged import JaggedTensor, KeyedJaggedTensor, KeyedTensor


def example() -> KeyedTensor:
    return KeyedTensor(["a", "b"], [1, 2], tensor([[1.0, 2, 3], [4, 5, 6]]))


def other() -> KeyedTensor:
    return KeyedTensor(["c"], [1], tensor([[7.0], [8.0]]))


def test_accessors_say_what_was_given() -> None:
    kt = example()
    assert kt.keys() == ["a", "b"]
    assert kt.length_per_key() == [1, 2]
    assert kt.offset_per_key() == [0, 1, 3]
    assert kt.key_dim() == 1
    assert kt.device() == torch.device("cpu")
    assert kt.size_in_bytes() == 24
    assert KeyedTensor(["a"], [3], torch.zeros(2, 3), key_dim=-1).key_dim() == 1


def test_the_part_of_a_key_is_a_view() -> None:
    kt = example()
    assert kt["b"].tolist() == [[2, 3], [5, 6]]
    kt["a"].fill_(9)
    assert kt.values().tolist() == [[9, 2, 3], [9, 5, 6]]
    assert {key: part.tolist() for key, part in kt.to_dict().items()} == {"a": [[9], [9]], "b": [[2, 3], [5, 6]]}


@given(
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3), min_size=1, max_size=3),
    st.integers(0, 1),
    st.integers(0, 3),
    st.data(),
)
@settings(max_examples=100, deadline=None)
def test_regroup_is_a_concatenation_of_parts(
    widths: list[list[int]], key_dim: int, rows: int, data: st.DataObject
) -> None:
    """Any keys in any order, in several groups or in none, along either dim, forward and backward.

    TorchRec takes columns of an input whose key_dim is 0, without a word.
    """
    parts: dict[str, torch.Tensor] = {}
    inputs, leaves = [], []
    for i, sizes in enumerate(widths):
        keys = [f"{i}.{k}" for k in range(len(sizes))]
        values = torch.randn(*((rows, sum(sizes)) if key_dim else (sum(sizes), rows)), requires_grad=True)
        leaves.append(values)
        inputs.append(KeyedTensor(keys, sizes, values, key_dim))
        parts.update(zip(keys, values.split(sizes, key_dim), strict=True))
    groups = data.draw(st.lists(st.lists(st.sampled_from(sorted(parts)), max_size=4), max_size=3))
    nothing = leaves[0].narrow(key_dim, 0, 0)
    expected = [torch.cat([nothing, *(parts[key] for key in group)], key_dim) for group in groups]
    gradients = []
    for results in (KeyedTensor.regroup(inputs, groups), expected):
        assert [result.tolist() for result in results] == [want.tolist() for want in expected]
        # small numbers, each in one place, whose sums are exact; of which nothing is taken, that has the ones
        upstream = [torch.arange(1.0, want.numel() + 1).view(want.shape) + 100 * g for g, want in enumerate(expected)]
        total = sum(((out * grad).sum() for out, grad in zip(results, upstream, strict=True)), torch.zeros(()))
        gradients.append(torch.autograd.grad(total + sum(leaf.sum() for leaf in leaves), leaves))
    assert all(map(torch.equal, *gradients))


def test_regroup_as_dict_names_the_groups() -> None:
    grouped = KeyedTensor.regroup_as_dict([example(), other()], [["c", "a"], ["b"]], ["x", "y"])
    assert {key: part.tolist() for key, part in grouped.items()} == {"x": [[7, 1], [8, 4]], "y": [[2, 3], [5, 6]]}


def test_from_tensor_list_concatenates() -> None:
    kt = KeyedTensor.from_tensor_list(["a", "b"], [torch.ones(2, 1), torch.zeros(2, 2)])
    assert (kt.length_per_key(), kt.values().tolist()) == ([1, 2], [[1, 0, 0], [1, 0, 0]])
    kt = KeyedTensor.from_tensor_list(["a", "b"], [torch.ones(1, 2), torch.zeros(2, 2)], 0, 0)
    assert (kt.length_per_key(), kt.key_dim(), kt["b"].tolist()) == ([1, 2], 0, [[0, 0], [0, 0]])
    assert KeyedTensor.from_tensor_list([], []).keys() == []


def test_to_accepts_a_string_and_keeps_the_layout() -> None:
    kt = KeyedTensor(["a", "b"], [1, 2], torch.zeros(3, 2), key_dim=0).to("meta")
    assert (kt.device().type, kt.key_dim(), kt.keys(), kt.length_per_key()) == ("meta", 0, ["a", "b"], [1, 2])
    assert example().to(torch.device("cpu"))["a"].tolist() == [[1], [4]]


def kjt(lengths: list[int], *, weighted: bool = False, ranks: list[list[int]] | None = None) -> KeyedJaggedTensor:
    weights = tensor([0.1, 0.2, 0.3, 0.4]) if weighted else None
    return KeyedJaggedTensor(["a", "b"], tensor([1, 2, 3, 4]), weights, tensor(lengths), stride_per_key_per_rank=ranks)


WEIGHTED_A = (
    '    "a": {\n        "values": [[1, 2], []],\n'
    '        "weights": [[0.10000000149011612, 0.20000000298023224], []]\n    },\n'
)
# observed from torchrec 1.8.0
TEXTS = {
    "two keys": (example, 'KeyedTensor({\n    "a": [[1.0], [4.0]],\n    "b": [[2.0, 3.0], [5.0, 6.0]]\n})\n'),
    "dim 0": (
        lambda: KeyedTensor(["a", "b"], [1, 2], torch.arange(1.0, 10).view(3, 3), key_dim=0),
        'KeyedTensor({\n    "a": [[1.0, 2.0, 3.0]],\n    "b": [[4.0, 5.0, 6.0], [7.0, 8.0, 9.0]]\n})\n',
    ),
    "no keys": (lambda: KeyedTensor([], [], tensor([])), "KeyedTensor()\n"),
    "no keys, rows": (lambda: KeyedTensor([], [], torch.zeros(2, 0)), "KeyedTensor()\n"),
    "batch of 0": (lambda: KeyedTensor(["a"], [2], torch.zeros(0, 2)), 'KeyedTensor({\n    "a": []\n})\n'),
    "ints": (
        lambda: KeyedTensor(["a"], [2], torch.zeros(2, 2, dtype=torch.int32)),
        'KeyedTensor({\n    "a": [[0, 0], [0, 0]]\n})\n',
    ),
    "3-D": (
        lambda: KeyedTensor(["a", "b"], [1, 1], torch.zeros(1, 2, 2)),
        'KeyedTensor({\n    "a": [[[0.0, 0.0]]],\n    "b": [[[0.0, 0.0]]]\n})\n',
    ),
    "kjt": (lambda: kjt([2, 0, 1, 1]), 'KeyedJaggedTensor({\n    "a": [[1, 2], []],\n    "b": [[3], [4]]\n})\n'),
    "kjt of offsets": (
        lambda: KeyedJaggedTensor(["a", "b"], tensor([1, 2, 3, 4]), offsets=tensor([0, 2, 2, 3, 4])),
        'KeyedJaggedTensor({\n    "a": [[1, 2], []],\n    "b": [[3], [4]]\n})\n',
    ),
    "kjt of floats": (
        lambda: KeyedJaggedTensor(["a"], tensor([1.0, 2.1]), lengths=tensor([2, 0])),
        'KeyedJaggedTensor({\n    "a": [[1.0, 2.0999999046325684], []]\n})\n',
    ),
    "kjt weighted": (
        lambda: kjt([2, 0, 1, 1], weighted=True),
        "KeyedJaggedTensor({\n" + WEIGHTED_A + '    "b": {\n        "values": [[3], [4]],\n'
        '        "weights": [[0.30000001192092896], [0.4000000059604645]]\n    }\n})\n',
    ),
    "kjt, own batch sizes": (
        lambda: kjt([2, 0, 1, 0, 1], ranks=[[2], [3]]),
        'KeyedJaggedTensor({\n    "a": [[1, 2], []],\n    "b": [[3], [], [4]]\n})\n',
    ),
    "kjt, own batch sizes, weighted": (
        lambda: kjt([2, 0, 1, 0, 1], weighted=True, ranks=[[2], [3]]),
        "KeyedJaggedTensor({\n" + WEIGHTED_A + '    "b": {\n        "values": [[3], [], [4]],\n'
        '        "weights": [[0.30000001192092896], [], [0.4000000059604645]]\n    }\n})\n',
    ),
    "kjt, batch of 0": (
        lambda: KeyedJaggedTensor(["a", "b"], tensor([]), lengths=tensor([])),
        'KeyedJaggedTensor({\n    "a": [],\n    "b": []\n})\n',
    ),
    "kjt empty": (lambda: KeyedJaggedTensor.empty(), "KeyedJaggedTensor()\n"),
    "kjt empty weighted": (lambda: KeyedJaggedTensor.empty(is_weighted=True), "KeyedJaggedTensor()\n"),
    "kjt permuted": (
        lambda: kjt([2, 0, 1, 1]).permute([1, 0, 1]),
        'KeyedJaggedTensor({\n    "b": [[3], [4]],\n    "a": [[1, 2], []],\n    "b": [[3], [4]]\n})\n',
    ),
    # printing is how one finds out what is wrong: it cuts where the values end
    "kjt broken": (
        lambda: kjt([1, 1, 9, 1]),
        'KeyedJaggedTensor({\n    "a": [[1], [2]],\n    "b": [[3, 4], []]\n})\n',
    ),
}


@pytest.mark.parametrize("case", TEXTS)
def test_text_is_that_of_torchrec(case: str) -> None:
    make, expected = TEXTS[case]
    assert str(make()) == expected


Z = torch.zeros(2, 3)
ERRORS = {
    "duplicate": (lambda: KeyedTensor(["a", "a"], [1, 2], Z), ValueError, r"keys must be unique, repeated: \['a'\]"),
    "one string": (lambda: KeyedTensor("ab", [1, 2], Z), TypeError, "keys must be a list of strings, got str"),  # type: ignore[arg-type]
    "count": (lambda: KeyedTensor(["a", "b"], [3], Z), ValueError, r"2 keys \['a', 'b'\] but 1 lengths"),
    "negative": (lambda: KeyedTensor(["a", "b"], [4, -1], Z), ValueError, "key 'b': length must be >= 0, got -1"),
    "sum": (
        lambda: KeyedTensor(["a", "b"], [1, 1], Z),
        ValueError,
        r"\['a', 'b'\] sums to 2, values has 3 entries in dim 1 \(shape \[2, 3\]\)",
    ),
    "key_dim": (lambda: KeyedTensor(["a"], [3], Z, key_dim=2), ValueError, "key_dim 2 is out of range"),
    "not a tensor": (lambda: KeyedTensor(["a"], [1], [1.0]), TypeError, "values must be a torch.Tensor"),  # type: ignore[arg-type]
    "unknown": (lambda: example()["z"], KeyError, r"unknown key 'z', keys are \['a', 'b'\]"),
    "tensors": (
        lambda: KeyedTensor.from_tensor_list(["a", "b"], [Z]),
        ValueError,
        r"2 keys \['a', 'b'\] but 1 tensors",
    ),
    "other dim": (
        lambda: KeyedTensor.from_tensor_list(["a", "b"], [Z, Z], key_dim=0, cat_dim=1),
        ValueError,
        "sums to 4, values has 2 entries in dim 0",
    ),
    "regroup unknown": (lambda: KeyedTensor.regroup([example()], [["z"]]), KeyError, "unknown key 'z'"),
    "regroup twice": (
        lambda: KeyedTensor.regroup([example(), example()], [["a"]]),
        ValueError,
        "key 'a' is in 2 of the KeyedTensors",
    ),
    "regroup nothing": (lambda: KeyedTensor.regroup([], [["a"]]), ValueError, "needs at least one KeyedTensor"),
    "regroup dims": (
        lambda: KeyedTensor.regroup([example(), KeyedTensor(["c"], [2], Z, key_dim=0)], [["a"]]),
        ValueError,
        r"one key_dim, got \[0, 1\]",
    ),
    "regroup names": (
        lambda: KeyedTensor.regroup_as_dict([example()], [["a"], ["b"]], ["x"]),
        ValueError,
        r"2 groups but 1 keys \['x'\]",
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_bad_input_is_refused_with_its_names(case: str) -> None:
    make, error, message = ERRORS[case]
    with pytest.raises(error, match=message):
        make()


IDS, WEIGHTS = torch.zeros(7, dtype=torch.int64), torch.zeros(7)
REPRS = {
    "JaggedTensor(values=[7] int64 cpu, bags=2)": JaggedTensor(IDS, lengths=tensor([3, 4])),
    "JaggedTensor(values=[7] int64 cpu, weights=[7] float32 cpu, bags=1)": JaggedTensor(IDS, WEIGHTS, tensor([7])),
    "KeyedJaggedTensor(keys=['user', 'item'], stride=3, values=[7] int64 cpu)": KeyedJaggedTensor(
        ["user", "item"], IDS, lengths=tensor([1, 1, 1, 1, 1, 2])
    ),
    "KeyedJaggedTensor(keys=[], stride=0, values=[0] int64 meta)": KeyedJaggedTensor.empty(device="meta"),
    "KeyedTensor(keys=['user', 'item'], values=[3, 12] float32 cpu)": KeyedTensor(
        ["user", "item"], [4, 8], torch.zeros(3, 12)
    ),
}


@pytest.mark.parametrize("expected", REPRS)
def test_repr_is_one_line_of_keys_shapes_and_device(expected: str) -> None:
    assert repr(REPRS[expected]) == expected


def test_repr_reads_nothing() -> None:
    """Fake tensors have no numbers: reading one raises."""
    with FakeTensorMode():
        ids, lengths = torch.zeros(4, dtype=torch.int64), torch.zeros(4, dtype=torch.int64)
        assert repr(JaggedTensor(ids, lengths=lengths)) == "JaggedTensor(values=[4] int64 cpu, bags=4)"
        keyed = KeyedJaggedTensor(["a", "b"], ids, lengths=lengths)
        assert repr(keyed) == "KeyedJaggedTensor(keys=['a', 'b'], stride=2, values=[4] int64 cpu)"
