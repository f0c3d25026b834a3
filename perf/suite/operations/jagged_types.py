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


def _said(options: dict[str, Any]) -> str:
    words = {"by_offsets": "from offsets", "inverse": "inverse indices"}
    return "".join(f", {words.get(name, name)}" for name in options)


def _of_batch(
    name: str, call: Call, *variants: dict[str, Any], argument: Callable[[Size], Any] | None = None, **more: Any
) -> Iterator[Operation]:
    """A case for each kind of KJT; with an `argument` of the size the state is (kjt, argument)."""
    for options in variants or (PLAIN,):
        yield Operation(f"KJT {name}{_said(options)}", fresh(argument, **options), call, **more)


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
    def make(lib: Any, size: Size) -> Any:
        return [
            lib.KeyedJaggedTensor([key], values, weights if weighted else None, lengths)
            for key, values, weights, lengths in pieces(size)
        ]

    return make


# ways of cutting and reordering keys
def _halves(size: Size) -> list[int]:
    return [size.keys // 2, size.keys - size.keys // 2] if size.keys > 1 else [1]


def _each(size: Size) -> list[int]:
    return [1] * size.keys


def _all(size: Size) -> list[int]:
    return [size.keys]


def _zeros(size: Size) -> list[int]:
    return [0, *_halves(size), 0]


def _reverse(size: Size) -> list[int]:
    return list(range(size.keys))[::-1]


def _every_other(size: Size) -> list[int]:
    return list(range(0, size.keys, 2))


def _twice(size: Size) -> list[int]:
    return [f for f in range(size.keys) for _ in range(2)]


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

        yield Operation(f"KJT {name}{_said(options)}", make, call)


def _constructors() -> Iterator[Operation]:
    both = (PLAIN, WEIGHTED, OFFSETS)
    yield from _construct("constructor", False, *both, VARIABLE, INVERSE)
    yield from _construct("from_..._sync", True, *both, VARIABLE)
    for words, make in (
        ("", jt_dict()), (", weighted", jt_dict(weighted=True)), (", variable", jt_dict(variable=True)),
    ):  # fmt: skip
        yield Operation(f"KJT from_jt_dict{words}", make, lambda lib, s: lib.KeyedJaggedTensor.from_jt_dict(s))
        yield Operation(f"ComputeJTDictToKJT{words}", make, lambda lib, s: lib.ComputeJTDictToKJT()(s))
    yield Operation("KJT empty", lambda lib, size: None, lambda lib, s: lib.KeyedJaggedTensor.empty())
    yield Operation(
        "KJT empty, with dtypes", lambda lib, size: None,
        lambda lib, s: lib.KeyedJaggedTensor.empty(True, CPU, torch.int64, torch.float64, torch.int64),
    )  # fmt: skip
    yield from _of_batch("empty_like", lambda lib, s: lib.KeyedJaggedTensor.empty_like(s), PLAIN, WEIGHTED, VARIABLE)
    # its tensors hold anything
    yield from _of_batch(
        "empty_like, with device", lambda lib, s: lib.KeyedJaggedTensor.empty_like(s, CPU), PLAIN, WEIGHTED,
        read=lambda made: [made.keys(), made.stride(), made.values().shape, made.values().dtype, made.lengths().shape],
    )  # fmt: skip


def _reorderings() -> Iterator[Operation]:
    for words, options in (("", PLAIN), *((_said(o), o) for o in (SYNCED, WEIGHTED, VARIABLE))):
        yield Operation(
            f"KJT concat of two{words}", _pair_of(**options), lambda lib, s: lib.KeyedJaggedTensor.concat(s)
        )
    yield Operation("KJT concat of one per key", _members(), lambda lib, s: lib.KeyedJaggedTensor.concat(s))
    yield Operation(
        "KJT concat of one per key, weighted", _members(True), lambda lib, s: lib.KeyedJaggedTensor.concat(s)
    )

    def split(lib: Any, s: Any) -> Any:
        return s[0].split(s[1])

    yield from _of_batch("split in two", split, PLAIN, SYNCED, WEIGHTED, VARIABLE, argument=_halves)
    yield from _of_batch("split by key", split, PLAIN, SYNCED, WEIGHTED, VARIABLE, argument=_each)
    yield from _of_batch("split of all keys", split, argument=_all)
    yield from _of_batch("split with zeros", split, PLAIN, SYNCED, argument=_zeros)

    def permute(lib: Any, s: Any) -> Any:
        return s[0].permute(s[1])

    yield from _of_batch(
        "permute, reversed", permute, PLAIN, SYNCED, WEIGHTED, VARIABLE, INVERSE, {"int32": True}, argument=_reverse
    )
    yield from _of_batch("permute, every other key", permute, PLAIN, SYNCED, VARIABLE, argument=_every_other)
    yield from _of_batch("permute, each key twice", permute, PLAIN, SYNCED, WEIGHTED, argument=_twice)
    yield from _of_batch(
        "permute, with indices_tensor", lambda lib, s: s[0].permute(*s[1]),
        argument=lambda size: (_reverse(size), torch.tensor(_reverse(size), dtype=torch.int32)),
    )  # fmt: skip

    def look_up(lib: Any, s: Any) -> Any:
        return [s[key] for key in s.keys()]  # noqa: SIM118

    yield from _of_batch("[key] of all keys", look_up, PLAIN, SYNCED, WEIGHTED, VARIABLE)
    yield from _of_batch("to_dict", lambda lib, s: s.to_dict(), PLAIN, SYNCED, WEIGHTED, VARIABLE)
    yield from _of_batch(
        "to_dict, without offsets", lambda lib, s: s.to_dict(compute_offsets=False), PLAIN, SYNCED, VARIABLE
    )
    yield from _of_batch("ComputeKJTToJTDict", lambda lib, s: lib.ComputeKJTToJTDict()(s))
    yield from _of_batch("flatten_lengths", lambda lib, s: s.flatten_lengths())
    yield Operation("KJT flatten_lengths of a matrix", _matrix, lambda lib, s: s.flatten_lengths())


def _facts() -> Iterator[Operation]:
    for name, variants in {
        "keys": (PLAIN,), "values": (PLAIN,), "weights": (WEIGHTED,), "lengths": (PLAIN, OFFSETS),
        "offsets": (PLAIN, OFFSETS), "stride": (PLAIN, VARIABLE, INVERSE), "stride_per_key": (PLAIN, VARIABLE),
        "stride_per_key_per_rank": (PLAIN, VARIABLE), "variable_stride_per_key": (PLAIN, VARIABLE),
        "inverse_indices": (INVERSE,), "inverse_indices_or_none": (PLAIN,),
        "length_per_key": (PLAIN, SYNCED, VARIABLE, OFFSETS), "offset_per_key": (PLAIN, SYNCED, VARIABLE),
        "lengths_offset_per_key": (PLAIN, VARIABLE), "index_per_key": (PLAIN,), "device": (PLAIN,),
        "size_in_bytes": (PLAIN, WEIGHTED), "sync": (PLAIN, VARIABLE), "unsync": (SYNCED,),
    }.items():  # fmt: skip
        yield from _of_batch(name, _method(name), *variants)
    # of a batch that has none
    for name in ("weights", "inverse_indices"):
        yield from _of_batch(name, _raised(name))


def _exchanges() -> Iterator[Operation]:
    three = (PLAIN, WEIGHTED, VARIABLE)
    yield from _of_batch("dist_labels", lambda lib, s: s.dist_labels(), *three)
    yield from _of_batch("dist_splits", lambda lib, s: s[0].dist_splits(s[1]), *three, argument=_halves)
    yield from _of_batch("dist_splits, by key", lambda lib, s: s[0].dist_splits(s[1]), SYNCED, argument=_each)
    yield from _of_batch("dist_tensors", lambda lib, s: s.dist_tensors(), *three)

    def dist_init(lib: Any, s: Any) -> Any:
        return lib.KeyedJaggedTensor.dist_init(*s)

    for ranks in (2, 4):
        for words, options in (
            ("", PLAIN), (", weighted", WEIGHTED), (", uneven batches", {"uneven": True}), (", variable", VARIABLE),
        ):  # fmt: skip
            yield Operation(f"KJT dist_init of {ranks} ranks{words}", ranked(ranks, **options), dist_init)
    yield Operation("KJT dist_init of 2 ranks, variable, weighted", ranked(2, variable=True, weighted=True), dist_init)
    yield Operation("KJT dist_init of 4 ranks, variable, staggered", ranked(4, variable=True, stagger=2), dist_init)


def _copied(lib: Any, size: Size) -> Any:
    b = batch(size)
    other = lib.KeyedJaggedTensor(b.keys, b.values.clone(), None, b.lengths.clone())
    return other, kjt(lib, size)


def _leaves(lib: Any, size: Size) -> Any:
    return pytree.tree_flatten(kjt(lib, size, weighted=True))


def _copies() -> Iterator[Operation]:
    yield from _of_batch("to", lambda lib, s: s.to(CPU), PLAIN, SYNCED, WEIGHTED, VARIABLE, INVERSE)
    yield from _of_batch("to, weights to float64", lambda lib, s: s.to(CPU, dtype=torch.float64), WEIGHTED)
    yield Operation("KJT copy_", _copied, lambda lib, s: s[0].copy_(s[1]))
    yield Operation("KJT clear_storage", lambda lib, size: _copied(lib, size)[0], lambda lib, s: s.clear_storage())
    yield from _of_batch("pin_memory", lambda lib, s: s.pin_memory(), PLAIN, needs_cuda=True)
    yield from _of_batch("str", lambda lib, s: str(s), PLAIN, WEIGHTED, VARIABLE, fits=_small)
    yield from _of_batch("pickle", lambda lib, s: pickle.loads(pickle.dumps(s)), PLAIN, SYNCED, WEIGHTED, fits=_small)
    yield from _of_batch("pytree flatten", lambda lib, s: pytree.tree_flatten(s)[0], PLAIN, WEIGHTED)
    yield Operation("KJT pytree unflatten", _leaves, lambda lib, s: pytree.tree_unflatten(*s))
    yield from _of_batch(
        "pytree map", lambda lib, s: pytree.tree_map(lambda leaf: leaf, s), PLAIN, WEIGHTED, VARIABLE, INVERSE
    )
    yield Operation("flatten_kjt_list", _pair, lambda lib, s: lib.flatten_kjt_list(list(s)))
    yield Operation(
        "unflatten_kjt_list", lambda lib, size: lib.flatten_kjt_list(list(_pair(lib, size))),
        lambda lib, s: lib.unflatten_kjt_list(*s),
    )  # fmt: skip
    yield Operation(
        "kjt_is_equal", lambda lib, size: (kjt(lib, size, weighted=True), kjt(lib, size, weighted=True)),
        lambda lib, s: lib.kjt_is_equal(*s),
    )  # fmt: skip
    yield Operation("kjt_is_equal, other keys", _pair, lambda lib, s: lib.kjt_is_equal(*s))

    yield Operation(
        "validate_keyed_jagged_tensor", fresh(weighted=True), lambda lib, s: lib.validate_keyed_jagged_tensor(s)
    )
    yield Operation("maybe_td_to_kjt", tensor_dict, lambda lib, s: lib.maybe_td_to_kjt(s))
    yield Operation("maybe_td_to_kjt, keys given", tensor_dict, lambda lib, s: lib.maybe_td_to_kjt(s, sorted(s.keys())))


def _jagged() -> Iterator[Operation]:
    def case(name: str, make: Make, call: Call, **more: Any) -> Operation:
        return Operation(f"JT {name}", make, call, fits=_one_key, **more)

    plain, weighted, rows, offsets = jt(), jt(weighted=True), jt(rows=True), jt(by_offsets=True)
    yield case("constructor", lambda lib, size: batch(size), lambda lib, b: lib.JaggedTensor(b.values, None, b.lengths))
    yield case(
        "constructor, from offsets", lambda lib, size: batch(size),
        lambda lib, b: lib.JaggedTensor(b.values, b.weights, offsets=b.offsets),
    )  # fmt: skip
    yield case("from_dense", lambda lib, size: samples(size)[0], lambda lib, s: lib.JaggedTensor.from_dense(s))
    yield case("from_dense, weighted", lambda lib, size: samples(size), lambda lib, s: lib.JaggedTensor.from_dense(*s))
    yield case(
        "from_dense_lengths", lambda lib, size: (dense(size), batch(size).lengths),
        lambda lib, s: lib.JaggedTensor.from_dense_lengths(*s),
    )  # fmt: skip
    for words, make in ((", ids", plain), (", rows", rows), (", from offsets", offsets)):
        yield case(f"to_dense{words}", make, lambda lib, s: s.to_dense())
        yield case(f"to_padded_dense{words}", make, lambda lib, s: s.to_padded_dense())
    yield case("to_padded_dense, cut to 2", rows, lambda lib, s: s.to_padded_dense(2, 1.0))
    yield case("to_padded_dense, of 10", plain, lambda lib, s: s.to_padded_dense(10, -1.0))
    yield case("to_dense_weights", weighted, lambda lib, s: s.to_dense_weights())
    yield case("to_dense_weights, none", plain, lambda lib, s: s.to_dense_weights())
    yield case("to_padded_dense_weights", weighted, lambda lib, s: s.to_padded_dense_weights())
    yield case("to_padded_dense_weights, of 10", weighted, lambda lib, s: s.to_padded_dense_weights(10, 0.5))
    yield case("lengths", offsets, lambda lib, s: s.lengths())
    yield case("offsets", plain, lambda lib, s: s.offsets())
    yield case("size_in_bytes", weighted, lambda lib, s: s.size_in_bytes())
    yield case("empty", lambda lib, size: None, lambda lib, s: lib.JaggedTensor.empty(True, CPU))
    yield case("empty_like", plain, lambda lib, s: lib.JaggedTensor.empty_like(s))
    yield case(
        "empty_like, with device", rows, lambda lib, s: lib.JaggedTensor.empty_like(s, CPU),
        read=lambda made: [made.values().shape, made.values().dtype, made.lengths().shape],
    )  # fmt: skip
    yield case(
        "copy_", lambda lib, size: (lib.JaggedTensor(torch.zeros(len(batch(size).values), ROW), None,
                                                     torch.zeros_like(batch(size).lengths)), rows(lib, size)),
        lambda lib, s: s[0].copy_(s[1]),
    )  # fmt: skip
    yield case("to", weighted, lambda lib, s: s.to(CPU))
    yield case("str", weighted, lambda lib, s: str(s))
    yield case("pytree flatten", plain, lambda lib, s: pytree.tree_flatten(s)[0])
    yield case("pytree map", weighted, lambda lib, s: pytree.tree_map(lambda leaf: leaf, s))
    yield Operation(
        "jt_is_equal", lambda lib, size: (plain(lib, size), plain(lib, size)), lambda lib, s: lib.jt_is_equal(*s),
        fits=_one_key,
    )  # fmt: skip


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
    return torch.autograd.grad(out, [one.values() for one in kts], [each.detach() for each in out])


def _keyed() -> Iterator[Operation]:
    def parts(lib: Any, size: Size) -> Any:
        keys = [f"f{f}" for f in range(size.keys)]
        return keys, list(torch.split(columns(size, 0), dims(size), 1))

    def arguments(lib: Any, size: Size) -> Any:
        return [f"f{f}" for f in range(size.keys)], dims(size), columns(size, 0)

    yield Operation("KT constructor", arguments, lambda lib, s: lib.KeyedTensor(*s), read=_values)
    yield Operation("KT from_tensor_list", parts, lambda lib, s: lib.KeyedTensor.from_tensor_list(*s))
    yield Operation("KT [key] of all keys", kt, lambda lib, s: [s[key] for key in s.keys()])  # noqa: SIM118
    for name in ("to_dict", "offset_per_key", "size_in_bytes"):
        yield Operation(f"KT {name}", kt, _method(name))
    yield Operation("KT to", kt, lambda lib, s: s.to(CPU))
    yield Operation("KT str", kt, lambda lib, s: str(s), fits=_small)
    yield Operation("KT pytree flatten", kt, lambda lib, s: pytree.tree_flatten(s)[0])
    yield Operation("KT pytree map", kt, lambda lib, s: pytree.tree_map(lambda leaf: leaf, s))
    yield Operation("KT regroup", _dealt(), lambda lib, s: lib.KeyedTensor.regroup(*s))
    yield Operation("KT regroup, with repeats", _dealt(repeats=True), lambda lib, s: lib.KeyedTensor.regroup(*s))
    yield Operation(
        "KT regroup_as_dict", _dealt(),
        lambda lib, s: lib.KeyedTensor.regroup_as_dict(*s, _names(s[1])),
    )  # fmt: skip
    yield Operation("KT regroup, forward and backward", _dealt(leaf=True), _backward)
    yield Operation("KT regroup, with repeats, forward and backward", _dealt(repeats=True, leaf=True), _backward)
    yield Operation("KTRegroupAsDict, first call", _module(first=True), lambda lib, s: s[0](s[1]))
    yield Operation("KTRegroupAsDict", _module(first=False), lambda lib, s: s[0](s[1]))
    yield Operation("permute_multi_embedding", _dealt(), lambda lib, s: lib.permute_multi_embedding(*s))
    yield Operation("regroup_kts", _dealt(), lambda lib, s: lib.regroup_kts(*s))


def _values(made: Any) -> list[Any]:
    return [made.keys(), made.values(), made.length_per_key(), made.offset_per_key()]


OPERATIONS = [
    *_constructors(), *_reorderings(), *_facts(), *_exchanges(), *_copies(), *_jagged(), *_keyed(),
]  # fmt: skip
