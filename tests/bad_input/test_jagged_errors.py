"""Faults of reference/faults.md met by the jagged types and by the collections that take them.

Numbers are those of that list; `TESTED` says where each is tested.
"""

from __future__ import annotations

import ast
import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from checkout import file_of_tests
from jagged_batches import tables_of
from jagged_model import Batch, Form, build, check, concat, from_bags, pick
from kernel_inputs import UPDATES
from test_huge_sizes import FAR, untouched
from test_module_errors import EVERY_MODULE, IDS, OFFSETS, batch, step, values_of
from torch import Tensor

from shardwise import EmbeddingBagCollection, EmbeddingBagConfig, JaggedTensor, KeyedJaggedTensor, KeyedTensor

# file: tests
TESTED: dict[int, dict[str, list[str]]] = {
    5: {
        "test_jagged_errors": ["test_5_bags_are_counted_in_integers"],
        "test_module_errors": ["test_5_ids_of_another_type"],
        "test_rank_errors": ["test_a_bad_batch_of_one_rank_raises_on_all_and_leaves_no_trace"],
    },
    **dict.fromkeys(
        (6, 7, 8, 9),
        {
            "test_jagged_errors": [
                "test_6_7_8_9_bags_that_do_not_fit_are_refused_by_whoever_reads_them",
                "test_6_7_8_9_full_validation_refuses_at_construction",
                "test_6_7_8_9_bags_of_one_key_are_refused",
            ],
            "test_module_errors": ["test_6_7_8_offsets_out_of_order", "test_offsets_out_of_order_raise_in_every_mode"],
            "test_rank_errors_jagged": ["test_6_7_8_9_bags_of_a_rank_that_do_not_fit_raise_on_all_in_every_mode"],
            "test_rank_errors": ["test_a_bad_batch_of_one_rank_raises_on_all_and_leaves_no_trace"],
        },
    ),
    **dict.fromkeys(
        (10, 11, 12),
        {
            "test_jagged_errors": ["test_10_11_12_what_does_not_go_together_is_refused"],
            "test_module_errors": ["test_9_10_11_12_batches_that_cannot_be_made", "test_11_missing_and_unknown_keys"],
            "test_keyed_jagged_tensor": ["test_bad_input_is_refused_with_its_keys_and_numbers"],
            "test_rank_errors": ["test_wrong_weights_of_one_rank_raise_on_all"],
        },
    ),
    **dict.fromkeys(
        (14, 16, 17, 18),
        {
            "test_jagged_errors": ["test_14_16_17_18_every_operation_takes_empty_batches"],
            "test_module_errors": [
                "test_14_15_16_17_19_empty_is_an_ordinary_size",
                "test_18_no_tables_and_no_features",
            ],
            "test_rank_errors": [
                "test_empty_and_uneven_batches_train_as_their_union",
                "test_zero_tables_and_zero_features_are_ordinary_sizes",
            ],
        },
    ),
    15: {
        "test_rank_errors_jagged": ["test_15_17_sequences_of_a_rank_without_ids"],
        "test_jagged_model_exchange": ["test_15_ranks_without_samples_are_ordinary_ranks"],
        "test_rank_errors": ["test_empty_and_uneven_batches_train_as_their_union"],
    },
    22: {
        "test_jagged_errors": [
            "test_22_keys_beyond_the_reach_of_int32",
            "test_22_lengths_whose_sum_wraps_to_the_number_of_values",
            "test_22_bags_beyond_the_reach_of_int32",
        ],
        "test_huge_sizes": ["test_22_more_ids_than_int32_counts_are_looked_up"],
        "test_keyed_jagged_tensor": ["test_offsets_of_int32_lengths_widen_past_their_range"],
    },
    26: {
        "test_jagged_errors": [
            "test_26_tensors_with_gaps_are_tensors",
            "test_26_collections_take_tensors_with_gaps",
            "test_26_tensors_of_several_devices",
            "test_26_a_batch_of_the_cpu_for_tables_on_a_gpu",
        ],
        "test_module_errors": ["test_26_ids_on_another_device_than_the_tables"],
    },
    27: {
        "test_rank_errors_jagged": [
            "test_27_the_order_of_keys_on_a_rank_changes_no_bit",
            "test_27_tables_in_another_order_on_a_rank_are_refused",
            "test_27_keys_that_only_one_rank_has",
        ],
        "test_rank_errors": ["test_features_in_another_order_on_one_rank_are_told_apart_by_name"],
    },
}
EVERYWHERE = pytest.mark.parametrize("device", UPDATES)
V = torch.tensor([1, 2, 3, 4])


def test_the_faults_of_jagged_types_all_have_tests() -> None:
    assert sorted(TESTED) == [*range(5, 13), *range(14, 19), 22, 26, 27]
    there: dict[str, set[str]] = {}
    for file in {file for files in TESTED.values() for file in files}:
        tree = ast.parse(file_of_tests(f"{file}.py").read_text())
        there[file] = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    named = {(file, test) for files in TESTED.values() for file, tests in files.items() for test in tests}
    assert [(file, test) for file, test in sorted(named) if test not in there[file]] == []


NOT_COUNTS = {
    "float lengths": {"lengths": torch.ones(4)},
    "bool lengths": {"lengths": torch.ones(4, dtype=torch.bool)},
    "float offsets": {"offsets": torch.arange(5.0)},
    "bool offsets": {"offsets": torch.ones(5, dtype=torch.bool)},
}


@pytest.mark.parametrize("name", NOT_COUNTS)
def test_5_bags_are_counted_in_integers(name: str) -> None:
    given, dtype = NOT_COUNTS[name], "float32" if "float" in name else "bool"
    message = f"{name.split()[1]} must be of integer type, but got torch.{dtype}"
    for make in (lambda: KeyedJaggedTensor(["u", "i"], V, **given), lambda: JaggedTensor(V, **given)):
        with pytest.raises(TypeError, match=message):
            make()


# Bags of the ids of test_module_errors.py, by their numbers, and what is said of them. What is wrong within a key is
# seen by who reads bags: a lookup, `validate="full"` and JaggedTensor, but not by who cuts and joins keys.
START = "offsets must start at 0, got 1"
MISFITS: dict[str, tuple[dict[str, list[int]], str]] = {
    "6 start": ({"offsets": [1, 2, 2, 4, 5, 8, 8]}, START),
    "7 decreasing": (
        {"offsets": [0, 2, 1, 4, 5, 8, 8]},
        r"key 'u', sample 1: length -1 \(offsets go from 2 to 1\)",
    ),
    "7 between keys": (
        {"offsets": [0, 2, 2, 9, 9, 8, 8]},
        "lengths sum to 8, values has 8: key 'u', sample 2 ends at 9",
    ),
    "7 first of a key": (
        {"offsets": [0, 2, 2, 4, 3, 8, 8]},
        r"key 'i', sample 0: length -1 \(offsets go from 4 to 3\)",
    ),
    "7 negative length": ({"lengths": [2, 0, 2, 2, -1, 3]}, "key 'i', sample 1: length -1"),
    "8 short": ({"offsets": [0, 2, 2, 4, 5, 7, 7]}, "lengths sum to 7, values has 8"),
    "8 long": ({"offsets": [0, 2, 2, 4, 5, 8, 9]}, "lengths sum to 9, values has 8: key 'i', sample 2 ends at 9"),
    "9 short": ({"lengths": [2, 0, 2, 1, 2, 0]}, "lengths sum to 7, values has 8"),
    "9 long": ({"lengths": [2, 0, 2, 1, 3, 5]}, "lengths sum to 13, values has 8: key 'i', sample 2 ends at 13"),
    "9 contradiction": (
        {"lengths": [2, 0, 2, 1, 3, 0], "offsets": [0, 2, 2, 4, 4, 8, 8]},
        r"key 'i', sample 0: length 1, but its offsets go from 4 to 4",
    ),
}
WITHIN_A_KEY = ("7 decreasing", "7 first of a key", "7 negative length")
READERS: dict[str, Callable[[KeyedJaggedTensor], object]] = {
    "sync": lambda kjt: kjt.sync(),
    "length_per_key": lambda kjt: kjt.length_per_key(),
    "offset_per_key": lambda kjt: kjt.offset_per_key(),
    "getitem": lambda kjt: kjt["u"],
    "to_dict": lambda kjt: kjt.to_dict(),
    "split": lambda kjt: kjt.split([1, 1]),
    "permute": lambda kjt: kjt.permute([1, 0]),
    "dist_splits": lambda kjt: kjt.dist_splits([1, 1]),
}


def misfit(name: str, **given: Any) -> KeyedJaggedTensor:
    bags: dict[str, Any] = {what: torch.tensor(numbers) for what, numbers in MISFITS[name][0].items()}
    return KeyedJaggedTensor(["u", "i"], torch.tensor(IDS), **bags, **given)


@pytest.mark.parametrize("name", [name for name in MISFITS if name not in WITHIN_A_KEY])
def test_6_7_8_9_bags_that_do_not_fit_are_refused_by_whoever_reads_them(name: str) -> None:
    """Every time that they are read: a batch that was refused once is not taken the second time."""
    for read in READERS.values():
        kjt = misfit(name)
        for _ in range(2):
            with pytest.raises(ValueError, match=MISFITS[name][1]):
                read(kjt)


@pytest.mark.parametrize("name", MISFITS)
def test_6_7_8_9_full_validation_refuses_at_construction(name: str) -> None:
    with pytest.raises(ValueError, match=MISFITS[name][1]):
        misfit(name, validate="full")
    good = KeyedJaggedTensor(["u", "i"], torch.tensor(IDS), offsets=torch.tensor(OFFSETS), validate="full")
    assert good.length_per_key() == [4, 4]
    # what is past the last bag of a batch with a capacity is no fault
    assert KeyedJaggedTensor(["u"], V, offsets=torch.tensor([0, 3]), capacity=4, validate="full").length_per_key() == [
        3
    ]
    with pytest.raises(ValueError, match="validate.*'all'"):
        KeyedJaggedTensor(["u"], V, lengths=torch.tensor([4]), validate="all")


@pytest.mark.parametrize("name", MISFITS)
def test_6_7_8_9_bags_of_one_key_are_refused(name: str) -> None:
    bags = {what: torch.tensor(numbers) for what, numbers in MISFITS[name][0].items()}
    jt = JaggedTensor(torch.tensor(IDS), torch.ones(8), **bags)
    for read in (
        lambda: jt.to_dense(),
        lambda: jt.to_dense_weights(),
        lambda: jt.to_padded_dense(),
        lambda: jt.to_padded_dense(3),
        lambda: jt.to_padded_dense_weights(3),
    ):
        with pytest.raises(ValueError, match=r"\[.*\] (sum to|contradict)"):
            read()
    if name[0] in "89" and name != "9 contradiction":
        with pytest.raises(ValueError, match=r"key 'u': lengths sum to \d+, values has 8"):
            KeyedJaggedTensor.from_jt_dict({"u": jt})


def make(keys: Any = ("u", "i"), values: Tensor = V, **given: Any) -> KeyedJaggedTensor:
    if not {"lengths", "offsets"} & set(given):
        given["lengths"] = torch.ones(4, dtype=torch.int64)
    return KeyedJaggedTensor(list(keys), values, **given)


def inverse(keys: list[str], rows: list[list[int]], **given: Any) -> KeyedJaggedTensor:
    return make(stride_per_key_per_rank=[[2], [2]], inverse_indices=(keys, torch.tensor(rows)), **given)


def bags(count: int, **given: Tensor) -> JaggedTensor:
    return JaggedTensor(V[:count], lengths=torch.ones(count, dtype=torch.int64), **given)


def lists(ids: Any, weights: Any = None) -> KeyedJaggedTensor:
    return KeyedJaggedTensor.from_lists(ids, weights)


BESIDE: dict[str, tuple[Callable[[], object], str]] = {
    "10 lengths": (lambda: make(lengths=torch.tensor([2, 1, 1])), r"3 bags is not a multiple of 2 keys \['u', 'i'\]"),
    "10 offsets": (lambda: make(offsets=torch.tensor([0, 1, 3, 4])), "3 bags is not a multiple of 2 keys"),
    "10 stride": (lambda: make(stride=3), "stride 3 and 2 keys .*: expected 6 bags, got 4"),
    "10 sizes per rank": (lambda: make(stride_per_key_per_rank=[[2], [3]]), r"expected 5 bags \('u': 2, 'i': 3\), got"),
    "10 sizes per key": (lambda: make(stride_per_key=[1, 1]), r"stride_per_key must be \[2, 2\], got \[1, 1\]"),
    "10 sizes per key that differ": (lambda: make(stride_per_key=[1, 2]), r"expected 3 bags \('u': 1, 'i': 2\), got 4"),
    "10 lengths [bags, keys]": (lambda: make(lengths=torch.ones(4, 1).long()), r"\[4, 1\]"),
    "10 counts per key": (lambda: make(length_per_key=[2]), "length_per_key.* 1 .*2 keys"),
    "10 counts of other values": (lambda: make(length_per_key=[2, 3]), "length_per_key.*5.*4"),
    "11 twice": (lambda: make(["u", "u"]), r"keys must be unique, repeated: \['u'\]"),
    "11 twice, joined": (lambda: KeyedJaggedTensor.concat([make(), make(["i", "x"])]), r"repeated: \['i'\]"),
    "11 twice, dense": (lambda: KeyedTensor(["u", "u"], [1, 1], torch.ones(2, 2)), r"repeated: \['u'\]"),
    "11 in two dense inputs": (
        lambda: KeyedTensor.regroup([KeyedTensor(["u"], [1], torch.ones(2, 1))] * 2, [["u"]]),
        "key 'u' is in 2 of the KeyedTensors",
    ),
    "11 unknown dense": (
        lambda: KeyedTensor.regroup([KeyedTensor(["u"], [1], torch.ones(2, 1))], [["x"]]),
        "unknown key 'x', keys are",
    ),
    "11 unknown": (lambda: make()["x"], r"unknown key 'x', keys are \['u', 'i'\]"),
    "11 no such place": (lambda: make().permute([0, 2]), r"index 2 is out of range for 2 keys \['u', 'i'\]"),
    "11 left out": (lambda: make().split([1]), r"sum to the 2 keys \['u', 'i'\], got \[1\]"),
    "11 inverse of an unknown": (lambda: inverse(["u", "x"], [[0, 1], [0, 1]]), "'x'"),
    "11 inverse missing": (lambda: inverse(["u"], [[0, 1]]), "'i'"),
    "11 inverse twice": (lambda: inverse(["u", "u"], [[0, 1], [0, 1]]), "'u'"),
    "11 inverse with one twice": (lambda: inverse(["u", "i", "u"], [[0, 1], [0, 1], [1, 0]]), "'u'"),
    "11 inverse of other rows": (lambda: inverse(["u", "i"], [[0, 1]]), "inverse"),
    "12 weights": (lambda: make(weights=torch.ones(3)), r"weights must be as many as values: got shape \[3\] for 4"),
    "12 of one key": (lambda: bags(3, weights=torch.ones(2)), r"got shape \[2\] for 3 values"),
    "12 samples": (lambda: JaggedTensor.from_dense([V, V], [V, V[:2]]), "sample 1: 2 weights for 4 values"),
    "12 some keys": (
        lambda: KeyedJaggedTensor.from_jt_dict({"u": bags(3), "i": bags(3, weights=torch.ones(3))}),
        r"\['i'\] have, \['u'\] have not",
    ),
    "12 some members": (
        lambda: KeyedJaggedTensor.concat([make(), make(["x"], weights=torch.ones(4), stride=4)]),
        r"strides must be consistent|\['x'\] have",
    ),
    "12 lists of other keys": (lambda: lists({"u": [[1]]}, {"i": [[1.0]]}), "'[ui]'"),
    "12 lists of other samples": (lambda: lists({"u": [[1], []]}, {"u": [[1.0]]}), "'u'.*1.*2|'u'.*2.*1"),
    "12 lists of other bags": (lambda: lists({"u": [[1], [2, 3]]}, {"u": [[1.0], [2.0]]}), "'u', sample 1: 1 .*2"),
    "12 none": (lambda: make().weights(), "doesn't have weights"),
}  # fmt: skip


@pytest.mark.parametrize("name", BESIDE)
def test_10_11_12_what_does_not_go_together_is_refused(name: str) -> None:
    attempt, message = BESIDE[name]
    with pytest.raises((ValueError, LookupError), match=message):
        attempt()


EMPTY = {
    "14 no samples": Batch((("a", []), ("b", [])), 0),
    "14 no samples, weighted": Batch((("a", []), ("b", [])), 0, True),
    "14 no samples of any rank": Batch((("a", []), ("b", [])), 0, False, ((0, 0), (0, 0))),
    "15 no samples of a rank": Batch((("a", [[(1, 1.0)]]), ("b", [[]])), 1, True, ((0, 1), (0, 1))),
    "16 a key without ids": Batch((("a", [[], []]), ("b", [[(1, 2.0)], [(2, 0.5)]])), 2, True),
    "16 a key without samples": Batch((("a", []), ("b", [[(1, 2.0)], []])), 2, False, ((0,), (2,))),
    "17 no ids": Batch((("a", [[], []]), ("b", [[], []])), 2, True),
    "18 no keys": Batch((), 0),
    "18 no keys, weighted": Batch((), 3, True),
}


@pytest.mark.parametrize("padding", [None, 2])
@pytest.mark.parametrize("given", ["lengths", "offsets"])
@pytest.mark.parametrize("name", EMPTY)
def test_14_16_17_18_every_operation_takes_empty_batches(name: str, given: str, padding: int | None) -> None:
    empty, form = EMPTY[name], Form(given=given, padding=padding)
    keys = range(len(empty.features))
    whole, back = [*keys], [*keys][::-1]
    check(build(empty, form), empty)
    for copied in (lambda kjt: kjt.to("cpu"), copy.copy, copy.deepcopy, lambda kjt: pickle.loads(pickle.dumps(kjt))):
        check(copied(build(empty, form)), empty)
    check(build(empty, form).permute(back), pick(empty, back))
    check(build(empty, form).permute([]), pick(empty, []))
    pieces = build(empty, form).split([1] * len(whole))
    for i, piece in enumerate(pieces):
        check(piece, pick(empty, [i]))
    if pieces:
        check(KeyedJaggedTensor.concat(pieces[::-1]), concat([pick(empty, [i]) for i in back]))
    jts = build(empty, form).to_dict()
    check(KeyedJaggedTensor.from_jt_dict(jts), from_bags(dict(empty.features), empty.weighted))
    for (_, wanted), jt in zip(empty.features, jts.values(), strict=True):
        width = max(map(len, wanted), default=0)
        assert jt.to_padded_dense().shape == (len(wanted), width)
        assert jt.to_padded_dense(3).shape == (len(wanted), 3)
        assert len(jt.to_dense()) == len(wanted)
    assert isinstance(str(build(empty, form)), str) and isinstance(repr(build(empty, form)), str)


# More than 2^31 ids: ids of one byte each, which nobody touches.


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_22_keys_beyond_the_reach_of_int32(dtype: torch.dtype) -> None:
    """Lengths fit in int32 and their sum does not: offsets that wrap round would name other ids."""
    ids = untouched(FAR + 64, torch.int8)
    ids[-64:] = torch.arange(64)
    lengths = torch.tensor([FAR - 1, 1, 60, 4], dtype=dtype)

    def near(kjt: KeyedJaggedTensor) -> None:
        assert kjt["near"].values().tolist() == list(range(64))
        assert kjt["near"].offsets().tolist() == [0, 60, 64]
        assert kjt["near"].to_padded_dense(2).tolist() == [[0, 1], [60, 61]]

    for given in ({"lengths": lengths}, {"offsets": torch.tensor([0, FAR - 1, FAR, FAR + 60, FAR + 64])}):
        kjt = KeyedJaggedTensor(["far", "near"], ids, **given)
        # before anybody computed offsets
        assert (kjt.length_per_key(), kjt.offset_per_key()) == ([FAR, 64], [0, FAR, FAR + 64])
        assert kjt.offsets().tolist() == [0, FAR - 1, FAR, FAR + 60, FAR + 64]
        assert kjt.lengths().tolist() == lengths.tolist()
        assert kjt.dist_splits([1, 1])[:2] == [[2, 2], [FAR, 64]]
        for piece in (kjt, kjt.split([1, 1])[1], kjt.permute([1])):
            near(piece)
        jts = kjt.to_dict()
        assert jts["far"].offsets().tolist() == [0, FAR - 1, FAR]
        assert jts["near"].offsets().tolist() == [0, 60, 64]
        with pytest.raises(ValueError, match=rf"lengths sum to {FAR + 64}, values has {FAR + 63}"):
            KeyedJaggedTensor(["far", "near"], ids[:-1], **given).sync()


def test_22_lengths_whose_sum_wraps_to_the_number_of_values() -> None:
    """2^32 more ids than there are: as int32 the lengths add up."""
    lengths = torch.tensor([FAR - 1, FAR - 1, 2, 4], dtype=torch.int32)
    for kjt in (
        KeyedJaggedTensor(["u"], V, lengths=lengths),
        KeyedJaggedTensor(["u", "i"], V, lengths=torch.cat([lengths, lengths * 0])),
        KeyedJaggedTensor(["u", "i"], V, lengths=torch.cat([lengths, lengths[:0]]), stride_per_key_per_rank=[[4], [0]]),
    ):
        with pytest.raises(ValueError, match=rf"lengths sum to {2 * FAR + 4}, values has 4"):
            kjt.sync()
    with pytest.raises(ValueError, match=rf"sum to {2 * FAR + 4}, values has 4"):
        KeyedJaggedTensor.from_jt_dict({"u": JaggedTensor(V, lengths=lengths)})
    with pytest.raises(ValueError, match=rf"sum to {2 * FAR + 4}, values has 4"):
        JaggedTensor(V, lengths=lengths).to_padded_dense(2)


def test_22_bags_beyond_the_reach_of_int32() -> None:
    ids = untouched(FAR + 4, torch.int8)
    ids[-4:] = torch.arange(4)
    jt = JaggedTensor(ids, lengths=torch.tensor([FAR - 1, 1, 3, 1], dtype=torch.int32))
    assert jt.offsets().tolist() == [0, FAR - 1, FAR, FAR + 3, FAR + 4]
    assert [bag.tolist() for bag in jt.to_dense()[2:]] == [[0, 1, 2], [3]]


def gapped(tensor: Tensor) -> Tensor:
    """The same numbers in every second place."""
    wide = tensor.new_zeros(tensor.shape[0], 2)
    wide[:, 0] = tensor
    return wide[:, 0]


def with_gaps(device: torch.device, **given: Any) -> KeyedJaggedTensor:
    ids, offsets = torch.tensor(IDS, device=device), torch.tensor(OFFSETS, device=device)
    return KeyedJaggedTensor(
        ["u", "i"], gapped(ids), gapped(torch.arange(8.0, device=device)), offsets=gapped(offsets), **given
    )


def test_26_tensors_with_gaps_are_tensors() -> None:
    items = list(zip(IDS, map(float, range(8)), strict=True))
    wanted = Batch((("u", [items[0:2], [], items[2:4]]), ("i", [items[4:5], items[5:8], []])), 3, True)
    lengths = gapped(torch.tensor([2, 0, 2, 1, 3, 0]))
    of_lengths = KeyedJaggedTensor(["u", "i"], gapped(torch.tensor(IDS)), gapped(torch.arange(8.0)), lengths)
    for kjt in (with_gaps(torch.device("cpu")), of_lengths):
        assert not kjt.values().is_contiguous()
        check(kjt, wanted)
        check(kjt.permute([1, 0]), pick(wanted, [1, 0]))
        check(KeyedJaggedTensor.concat(kjt.split([1, 1])[::-1]), pick(wanted, [1, 0]))
        check(KeyedJaggedTensor.from_jt_dict(kjt.to_dict()), wanted)
        check(copy.deepcopy(kjt), wanted)
        assert [tensor.tolist() for tensor in kjt.dist_tensors()] == [wanted.lengths, wanted.ids, wanted.weights]
        assert kjt["u"].to_padded_dense(2).tolist() == [[5, 0], [0, 0], [1, 2]]
    dense = KeyedTensor(["a", "b"], [1, 2], torch.arange(6.0).view(3, 2).t())
    assert KeyedTensor.regroup([dense], [["b", "a"]])[0].tolist() == [[2, 4, 0], [3, 5, 1]]


@EVERYWHERE
@EVERY_MODULE
def test_26_collections_take_tensors_with_gaps(where: torch.device, make: Any) -> None:
    """The bits of the same batch without gaps, looked up and trained."""
    first, second = make(where), make(where)
    second.load_state_dict(first.state_dict())
    results = []
    for module, features in ((first, batch(where)), (second, with_gaps(where))):
        step(module, features)
        results.append([values_of(module(features)), *tables_of(module).values()])
    assert all(map(torch.equal, *results))


@EVERYWHERE
def test_26_weighted_collections_take_tensors_with_gaps(where: torch.device) -> None:
    module = EmbeddingBagCollection([EmbeddingBagConfig(6, 4, "t", feature_names=["u", "i"])], True, where)
    packed = KeyedJaggedTensor(
        ["u", "i"], torch.tensor(IDS, device=where), torch.arange(8.0, device=where),
        offsets=torch.tensor(OFFSETS, device=where),
    )  # fmt: skip
    assert torch.equal(module(with_gaps(where)).values(), module(packed).values())


ELSEWHERE = V.to("meta")
SEVERAL_DEVICES: dict[str, Callable[[], object]] = {
    "lengths": lambda: make(lengths=torch.ones(4, dtype=torch.int64, device="meta")),
    "offsets": lambda: make(offsets=torch.arange(5, device="meta")),
    "weights": lambda: make(weights=torch.ones(4, device="meta")),
    "inverse": lambda: make(
        stride_per_key_per_rank=[[2], [2]], inverse_indices=(["u", "i"], torch.zeros(2, 2, device="meta").long())
    ),
    "concat": lambda: KeyedJaggedTensor.concat([make(), make(["x", "y"]).to("meta")]),
    "from_jt_dict": lambda: KeyedJaggedTensor.from_jt_dict({"u": bags(2), "i": bags(2).to("meta")}),
    "from_dense": lambda: JaggedTensor.from_dense([V, ELSEWHERE]),
    "regroup": lambda: KeyedTensor.regroup(
        [KeyedTensor(["u"], [1], torch.ones(2, 1)), KeyedTensor(["i"], [1], torch.ones(2, 1, device="meta"))],
        [["u", "i"]],
    ),
}


@pytest.mark.parametrize("name", SEVERAL_DEVICES)
def test_26_tensors_of_several_devices(name: str) -> None:
    # torch's own words for dense parts are as good
    with pytest.raises((ValueError, RuntimeError), match=r"(?=.*\bcpu\b)(?=.*\bmeta\b)"):
        SEVERAL_DEVICES[name]()


@pytest.mark.gpu
@EVERY_MODULE
def test_26_a_batch_of_the_cpu_for_tables_on_a_gpu(make: Any) -> None:
    module = make(torch.device("cuda"))
    before = tables_of(module)
    with pytest.raises(ValueError, match="ids are on cpu, the tables on cuda"):
        module(batch(torch.device("cpu")))
    assert all(torch.equal(table, before[name]) for name, table in tables_of(module).items())
    step(module, batch(torch.device("cuda")))
