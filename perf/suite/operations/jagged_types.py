"""The operations of the jagged types that are compared with TorchRec's: one call for both.

A KeyedJaggedTensor of F keys has computed nothing before it is used, but where the name says "synced".
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree

from .inputs import (
    ROW,
    Make,
    batch,
    columns,
    dense,
    dims,
    fresh,
    groups,
    jt,
    jt_dict,
    kjt,
    kt,
    pieces,
    ranked,
    samples,
    tensor_dict,
)
from .operation import Operation, Size

CPU = torch.device("cpu")
PLAIN: dict[str, Any] = {}
SYNCED, WEIGHTED, VARIABLE, OFFSETS = {"synced": True}, {"weighted": True}, {"variable": True}, {"by_offsets": True}
INVERSE = {"variable": True, "inverse": True}

Call = Callable[[Any, Any], Any]


def _suffix(options: dict[str, Any]) -> str:
    words = {"by_offsets": "from offsets", "inverse": "inverse indices"}
    return "".join(f", {words.get(name, name)}" for name in options)


def _of_batch(
    name: str, call: Call, *variants: dict[str, Any], argument: Callable[[Size], Any] | None = None, **more: Any
) -> Iterator[Operation]:
    """A case for each kind of KJT; with an `argument` of the size the state is (kjt, argument)."""
    for options in variants or (PLAIN,):
        yield Operation(f"KJT {name}{_suffix(options)}", fresh(argument, **options), call, **more)


def _method(name: str) -> Call:
    return lambda lib, s: getattr(s, name)()


def _raised(name: str) -> Call:
    """Whether a method raises."""

    def call(lib: Any, s: Any) -> bool:
        try:
            getattr(s, name)()
        except Exception:
            return True
        return False

    return call


def _small(size: Size) -> bool:
    # text and pickles of millions of values say no more than these
    return size.keys * size.batch < 100_000


def _one_key(size: Size) -> bool:
    # a JaggedTensor has no keys
    return size.keys == 1


def _pair(lib: Any, size: Size) -> Any:
    return kjt(lib, size), kjt(lib, size, prefix="g")


def _pair_of(**options: Any) -> Make:
    return lambda lib, size: [kjt(lib, size, **options), kjt(lib, size, prefix="g", **options)]


def _matrix(lib: Any, size: Size) -> Any:
    b = batch(size)
    return lib.KeyedJaggedTensor(b.keys, b.values, None, b.lengths.view(*size))


def _members(weighted: bool = False) -> Make:
    return lambda lib, size: [
        lib.KeyedJaggedTensor([key], values, weights if weighted else None, lengths)
        for key, values, weights, lengths in pieces(size)
    ]


# ways of cutting and reordering keys
def _halves(size: Size) -> list[int]:
    return [size.keys // 2, size.keys - size.keys // 2] if size.keys > 1 else [1]


def _each(size: Size) -> list[int]:
    return [1] * size.keys


def _reverse(size: Size) -> list[int]:
    return list(range(size.keys))[::-1]


def _construct(name: str, sync: bool, *variants: dict[str, Any]) -> Iterator[Operation]:
    for options in variants:
        by_offsets = "by_offsets" in options

        def make(lib: Any, size: Size, o: dict[str, Any] = options) -> Any:
            b = batch(size, variable="variable" in o)
            bags = b.offsets if "by_offsets" in o else b.lengths
            given: dict[str, Any] = {"stride_per_key_per_rank": b.strides} if "variable" in o else {}
            if "inverse" in o:
                given["inverse_indices"] = (b.keys, b.inverse)
            return b.keys, b.values, bags, b.weights if "weighted" in o else None, given

        def call(lib: Any, s: Any, o: bool = by_offsets) -> Any:
            keys, values, bags, weights, given = s
            if not sync:
                given = {**given, "offsets" if o else "lengths": bags}
                return lib.KeyedJaggedTensor(keys, values, weights, **given)
            construct = lib.KeyedJaggedTensor.from_offsets_sync if o else lib.KeyedJaggedTensor.from_lengths_sync
            return construct(keys, values, bags, weights, **given)

        yield Operation(f"KJT {name}{_suffix(options)}", make, call)


def _split(lib: Any, s: Any) -> Any:
    return s[0].split(s[1])


def _permute(lib: Any, s: Any) -> Any:
    return s[0].permute(s[1])


def _look_up(lib: Any, s: Any) -> Any:
    return [s[key] for key in s.keys()]  # noqa: SIM118


def _copied(lib: Any, size: Size) -> Any:
    b = batch(size)
    other = lib.KeyedJaggedTensor(b.keys, b.values.clone(), None, b.lengths.clone())
    return other, kjt(lib, size)


def _leaves(lib: Any, size: Size) -> Any:
    return pytree.tree_flatten(kjt(lib, size, weighted=True))


def _dealt(repeats: bool = False, leaf: bool = False) -> Make:
    """Two KeyedTensors and how to group them."""
    return lambda lib, size: ([kt(lib, size, seed, leaf=leaf) for seed in (0, 1)], groups(size, repeats))


def _names(wanted: list[list[str]]) -> list[str]:
    return [f"group{g}" for g in range(len(wanted))]


def _module(first: bool) -> Make:
    def make(lib: Any, size: Size) -> Any:
        kts, wanted = _dealt()(lib, size)
        module = lib.KTRegroupAsDict(wanted, _names(wanted))
        if not first:
            module(kts)
        return module, kts

    return make


def _backward(lib: Any, s: Any) -> Any:
    kts, wanted = s
    out = lib.KeyedTensor.regroup(kts, wanted)
    return torch.autograd.grad(out, [kt.values() for kt in kts], [each.detach() for each in out])


def _values(made: Any) -> list[Any]:
    return [made.keys(), made.values(), made.length_per_key(), made.offset_per_key()]


def _keys(size: Size) -> list[str]:
    return [f"f{f}" for f in range(size.keys)]


def _jt(name: str, make: Make, call: Call, **more: Any) -> Operation:
    return Operation(f"JT {name}", make, call, fits=_one_key, **more)


_BOTH, _THREE, _FOUR = (PLAIN, WEIGHTED, OFFSETS), (PLAIN, WEIGHTED, VARIABLE), (PLAIN, SYNCED, WEIGHTED, VARIABLE)
_CONSTRUCTORS = [
    *_construct("constructor", False, *_BOTH, VARIABLE, INVERSE),
    *_construct("from_..._sync", True, *_BOTH, VARIABLE),
    *(
        operation
        for words, make in (
            ("", jt_dict()), (", weighted", jt_dict(weighted=True)), (", variable", jt_dict(variable=True)),
        )
        for operation in (
            Operation(f"KJT from_jt_dict{words}", make, lambda lib, s: lib.KeyedJaggedTensor.from_jt_dict(s)),
            Operation(f"ComputeJTDictToKJT{words}", make, lambda lib, s: lib.ComputeJTDictToKJT()(s)),
        )
    ),
    Operation("KJT empty", lambda lib, size: None, lambda lib, s: lib.KeyedJaggedTensor.empty()),
    Operation(
        "KJT empty, with dtypes", lambda lib, size: None,
        lambda lib, s: lib.KeyedJaggedTensor.empty(True, CPU, torch.int64, torch.float64, torch.int64),
    ),
    *_of_batch("empty_like", lambda lib, s: lib.KeyedJaggedTensor.empty_like(s), *_THREE),
    # its tensors hold anything
    *_of_batch(
        "empty_like, with device", lambda lib, s: lib.KeyedJaggedTensor.empty_like(s, CPU), PLAIN, WEIGHTED,
        read=lambda made: [made.keys(), made.stride(), made.values().shape, made.values().dtype, made.lengths().shape],
    ),
]  # fmt: skip
_REORDERINGS = [
    *(
        Operation(f"KJT concat of {words}", make, lambda lib, s: lib.KeyedJaggedTensor.concat(s))
        for words, make in (
            ("two", _pair_of()), *((f"two{_suffix(o)}", _pair_of(**o)) for o in (SYNCED, WEIGHTED, VARIABLE)),
            ("one per key", _members()), ("one per key, weighted", _members(True)),
        )
    ),
    *_of_batch("split in two", _split, *_FOUR, argument=_halves),
    *_of_batch("split by key", _split, *_FOUR, argument=_each),
    *_of_batch("split of all keys", _split, argument=lambda size: [size.keys]),
    *_of_batch("split with zeros", _split, PLAIN, SYNCED, argument=lambda size: [0, *_halves(size), 0]),
    *_of_batch("permute, reversed", _permute, *_FOUR, INVERSE, {"int32": True}, argument=_reverse),
    *_of_batch(
        "permute, every other key", _permute, PLAIN, SYNCED, VARIABLE,
        argument=lambda size: list(range(0, size.keys, 2)),
    ),
    *_of_batch(
        "permute, each key twice", _permute, PLAIN, SYNCED, WEIGHTED,
        argument=lambda size: [f for f in range(size.keys) for _ in range(2)],
    ),
    *_of_batch(
        "permute, with indices_tensor", lambda lib, s: s[0].permute(*s[1]),
        argument=lambda size: (_reverse(size), torch.tensor(_reverse(size), dtype=torch.int32)),
    ),
    *_of_batch("[key] of all keys", _look_up, *_FOUR),
    *_of_batch("to_dict", _method("to_dict"), *_FOUR),
    *_of_batch("to_dict, without offsets", lambda lib, s: s.to_dict(compute_offsets=False), PLAIN, SYNCED, VARIABLE),
    *_of_batch("ComputeKJTToJTDict", lambda lib, s: lib.ComputeKJTToJTDict()(s)),
    *_of_batch("flatten_lengths", _method("flatten_lengths")),
    Operation("KJT flatten_lengths of a matrix", _matrix, _method("flatten_lengths")),
]  # fmt: skip
_FACTS = [
    *(
        operation
        for name, variants in {
            "keys": (PLAIN,), "values": (PLAIN,), "weights": (WEIGHTED,), "lengths": (PLAIN, OFFSETS),
            "offsets": (PLAIN, OFFSETS), "stride": (PLAIN, VARIABLE, INVERSE), "stride_per_key": (PLAIN, VARIABLE),
            "stride_per_key_per_rank": (PLAIN, VARIABLE), "variable_stride_per_key": (PLAIN, VARIABLE),
            "inverse_indices": (INVERSE,), "inverse_indices_or_none": (PLAIN,),
            "length_per_key": (PLAIN, SYNCED, VARIABLE, OFFSETS), "offset_per_key": (PLAIN, SYNCED, VARIABLE),
            "lengths_offset_per_key": (PLAIN, VARIABLE), "index_per_key": (PLAIN,), "device": (PLAIN,),
            "size_in_bytes": (PLAIN, WEIGHTED), "sync": (PLAIN, VARIABLE), "unsync": (SYNCED,),
        }.items()
        for operation in _of_batch(name, _method(name), *variants)
    ),
    # of a batch that has none
    *_of_batch("weights", _raised("weights")),
    *_of_batch("inverse_indices", _raised("inverse_indices")),
]  # fmt: skip
_EXCHANGES = [
    *_of_batch("dist_labels", _method("dist_labels"), *_THREE),
    *_of_batch("dist_splits", lambda lib, s: s[0].dist_splits(s[1]), *_THREE, argument=_halves),
    *_of_batch("dist_splits, by key", lambda lib, s: s[0].dist_splits(s[1]), SYNCED, argument=_each),
    *_of_batch("dist_tensors", _method("dist_tensors"), *_THREE),
    *(
        Operation(f"KJT dist_init of {words}", make, lambda lib, s: lib.KeyedJaggedTensor.dist_init(*s))
        for words, make in (
            *(
                (f"{ranks} ranks{words}", ranked(ranks, **options))
                for ranks in (2, 4)
                for words, options in (
                    ("", PLAIN), (", weighted", WEIGHTED), (", uneven batches", {"uneven": True}),
                    (", variable", VARIABLE),
                )
            ),
            ("2 ranks, variable, weighted", ranked(2, variable=True, weighted=True)),
            ("4 ranks, variable, staggered", ranked(4, variable=True, stagger=2)),
        )
    ),
]  # fmt: skip
_COPIES = [
    *_of_batch("to", lambda lib, s: s.to(CPU), PLAIN, SYNCED, WEIGHTED, VARIABLE, INVERSE),
    *_of_batch("to, weights to float64", lambda lib, s: s.to(CPU, dtype=torch.float64), WEIGHTED),
    Operation("KJT copy_", _copied, lambda lib, s: s[0].copy_(s[1])),
    Operation("KJT clear_storage", lambda lib, size: _copied(lib, size)[0], lambda lib, s: s.clear_storage()),
    *_of_batch("pin_memory", lambda lib, s: s.pin_memory(), PLAIN, needs_cuda=True),
    *_of_batch("str", lambda lib, s: str(s), PLAIN, WEIGHTED, VARIABLE, fits=_small),
    *_of_batch("pickle", lambda lib, s: pickle.loads(pickle.dumps(s)), PLAIN, SYNCED, WEIGHTED, fits=_small),
    *_of_batch("pytree flatten", lambda lib, s: pytree.tree_flatten(s)[0], PLAIN, WEIGHTED),
    Operation("KJT pytree unflatten", _leaves, lambda lib, s: pytree.tree_unflatten(*s)),
    *_of_batch(
        "pytree map", lambda lib, s: pytree.tree_map(lambda leaf: leaf, s), PLAIN, WEIGHTED, VARIABLE, INVERSE
    ),
    Operation("flatten_kjt_list", _pair, lambda lib, s: lib.flatten_kjt_list(list(s))),
    Operation(
        "unflatten_kjt_list", lambda lib, size: lib.flatten_kjt_list(list(_pair(lib, size))),
        lambda lib, s: lib.unflatten_kjt_list(*s),
    ),
    Operation(
        "kjt_is_equal", lambda lib, size: (kjt(lib, size, weighted=True), kjt(lib, size, weighted=True)),
        lambda lib, s: lib.kjt_is_equal(*s),
    ),
    Operation("kjt_is_equal, other keys", _pair, lambda lib, s: lib.kjt_is_equal(*s)),
    Operation(
        "validate_keyed_jagged_tensor", fresh(weighted=True), lambda lib, s: lib.validate_keyed_jagged_tensor(s)
    ),
    Operation("maybe_td_to_kjt", tensor_dict, lambda lib, s: lib.maybe_td_to_kjt(s)),
    Operation("maybe_td_to_kjt, keys given", tensor_dict, lambda lib, s: lib.maybe_td_to_kjt(s, sorted(s.keys()))),
]  # fmt: skip
_PLAIN, _WEIGHTED, _ROWS, _OF_OFFSETS = jt(), jt(weighted=True), jt(rows=True), jt(by_offsets=True)
_JAGGED = [
    _jt("constructor", lambda lib, size: batch(size), lambda lib, b: lib.JaggedTensor(b.values, None, b.lengths)),
    _jt(
        "constructor, from offsets", lambda lib, size: batch(size),
        lambda lib, b: lib.JaggedTensor(b.values, b.weights, offsets=b.offsets),
    ),
    _jt("from_dense", lambda lib, size: samples(size)[0], lambda lib, s: lib.JaggedTensor.from_dense(s)),
    _jt("from_dense, weighted", lambda lib, size: samples(size), lambda lib, s: lib.JaggedTensor.from_dense(*s)),
    _jt(
        "from_dense_lengths", lambda lib, size: (dense(size), batch(size).lengths),
        lambda lib, s: lib.JaggedTensor.from_dense_lengths(*s),
    ),
    *(
        _jt(f"{method}, {words}", make, _method(method))
        for words, make in (("ids", _PLAIN), ("rows", _ROWS), ("from offsets", _OF_OFFSETS))
        for method in ("to_dense", "to_padded_dense")
    ),
    _jt("to_padded_dense, cut to 2", _ROWS, lambda lib, s: s.to_padded_dense(2, 1.0)),
    _jt("to_padded_dense, of 10", _PLAIN, lambda lib, s: s.to_padded_dense(10, -1.0)),
    _jt("to_dense_weights", _WEIGHTED, _method("to_dense_weights")),
    _jt("to_dense_weights, none", _PLAIN, _method("to_dense_weights")),
    _jt("to_padded_dense_weights", _WEIGHTED, _method("to_padded_dense_weights")),
    _jt("to_padded_dense_weights, of 10", _WEIGHTED, lambda lib, s: s.to_padded_dense_weights(10, 0.5)),
    _jt("lengths", _OF_OFFSETS, _method("lengths")),
    _jt("offsets", _PLAIN, _method("offsets")),
    _jt("size_in_bytes", _WEIGHTED, _method("size_in_bytes")),
    _jt("empty", lambda lib, size: None, lambda lib, s: lib.JaggedTensor.empty(True, CPU)),
    _jt("empty_like", _PLAIN, lambda lib, s: lib.JaggedTensor.empty_like(s)),
    _jt(
        "empty_like, with device", _ROWS, lambda lib, s: lib.JaggedTensor.empty_like(s, CPU),
        read=lambda made: [made.values().shape, made.values().dtype, made.lengths().shape],
    ),
    _jt(
        "copy_", lambda lib, size: (lib.JaggedTensor(torch.zeros(len(batch(size).values), ROW), None,
                                                     torch.zeros_like(batch(size).lengths)), _ROWS(lib, size)),
        lambda lib, s: s[0].copy_(s[1]),
    ),
    _jt("to", _WEIGHTED, lambda lib, s: s.to(CPU)),
    _jt("str", _WEIGHTED, lambda lib, s: str(s)),
    _jt("pytree flatten", _PLAIN, lambda lib, s: pytree.tree_flatten(s)[0]),
    _jt("pytree map", _WEIGHTED, lambda lib, s: pytree.tree_map(lambda leaf: leaf, s)),
    Operation(
        "jt_is_equal", lambda lib, size: (_PLAIN(lib, size), _PLAIN(lib, size)), lambda lib, s: lib.jt_is_equal(*s),
        fits=_one_key,
    ),
]  # fmt: skip
_KEYED = [
    Operation(
        "KT constructor", lambda lib, size: (_keys(size), dims(size), columns(size, 0)),
        lambda lib, s: lib.KeyedTensor(*s), read=_values,
    ),
    Operation(
        "KT from_tensor_list",
        lambda lib, size: (_keys(size), list(torch.split(columns(size, 0), dims(size), 1))),
        lambda lib, s: lib.KeyedTensor.from_tensor_list(*s),
    ),
    Operation("KT [key] of all keys", kt, _look_up),
    *(Operation(f"KT {name}", kt, _method(name)) for name in ("to_dict", "offset_per_key", "size_in_bytes")),
    Operation("KT to", kt, lambda lib, s: s.to(CPU)),
    Operation("KT str", kt, lambda lib, s: str(s), fits=_small),
    Operation("KT pytree flatten", kt, lambda lib, s: pytree.tree_flatten(s)[0]),
    Operation("KT pytree map", kt, lambda lib, s: pytree.tree_map(lambda leaf: leaf, s)),
    Operation("KT regroup", _dealt(), lambda lib, s: lib.KeyedTensor.regroup(*s)),
    Operation("KT regroup, with repeats", _dealt(repeats=True), lambda lib, s: lib.KeyedTensor.regroup(*s)),
    Operation(
        "KT regroup_as_dict", _dealt(),
        lambda lib, s: lib.KeyedTensor.regroup_as_dict(*s, _names(s[1])),
    ),
    Operation("KT regroup, forward and backward", _dealt(leaf=True), _backward),
    Operation("KT regroup, with repeats, forward and backward", _dealt(repeats=True, leaf=True), _backward),
    Operation("KTRegroupAsDict, first call", _module(first=True), lambda lib, s: s[0](s[1])),
    Operation("KTRegroupAsDict", _module(first=False), lambda lib, s: s[0](s[1])),
    Operation("permute_multi_embedding", _dealt(), lambda lib, s: lib.permute_multi_embedding(*s)),
    Operation("regroup_kts", _dealt(), lambda lib, s: lib.regroup_kts(*s)),
]  # fmt: skip
OPERATIONS = [*_CONSTRUCTORS, *_REORDERINGS, *_FACTS, *_EXCHANGES, *_COPIES, *_JAGGED, *_KEYED]
