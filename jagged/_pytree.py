"""The jagged types as trees of tensors, for torch.export, torch.func, fx and whatever else walks over inputs.

Leaves are tensors, or None where there is none; all that is known on the host and does not vary from batch to batch is
the context. What was read of tensors (`length_per_key`) is left behind: a tree may be made of other tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor
from torch.fx._pytree import register_pytree_flatten_spec
from torch.utils._pytree import GetAttrKey, register_pytree_node

from ._combine import like
from ._keys import (
    Columns,
    Keys,
    Strides,
    keys_of,
)
from .jagged_tensor import JaggedTensor
from .keyed_jagged_tensor import KeyedJaggedTensor
from .keyed_tensor import KeyedTensor

_BAGS = ("values", "weights", "lengths", "offsets")
_KEYED = (*_BAGS, "inverse_indices")


class _Structure:
    """All of a keyed batch but its tensors: keys, batch sizes that lengths do not imply, capacity, and the keys of
    the inverse indices. Two of them are equal whatever the common batch size, which lengths imply."""

    __slots__ = ("capacity", "inverse", "strides", "uniform")

    def __init__(self, strides: Strides, capacity: int | None, inverse: list[str] | None) -> None:
        self.strides, self.capacity, self.inverse = strides, capacity, inverse
        self.uniform = bool(strides.keys.names) and strides.sizes is None

    def facts(self) -> list[Any]:
        """As JSON has it."""
        strides = self.strides
        stride = None if self.uniform else strides.stride
        return [strides.keys.names, stride, strides.sizes, strides.ranks, self.capacity, self.inverse]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Structure) and self.facts() == other.facts()

    def __hash__(self) -> int:
        return hash(tuple(self.strides.keys.names))

    def __repr__(self) -> str:
        return f"KeyedJaggedTensor structure {self.facts()}"


def _structure(facts: list[Any]) -> _Structure:
    keys, stride, sizes, ranks, capacity, inverse = facts
    known = keys_of(keys) if len(set(keys)) == len(keys) else Keys(keys)
    return _Structure(Strides(known, 0 if stride is None else stride, sizes, ranks), capacity, inverse)


def _flatten_jt(jt: JaggedTensor) -> tuple[list[Tensor | None], None]:
    return [jt._values, jt._weights, jt._lengths, jt._offsets], None


def _unflatten_jt(leaves: Iterable[Any], context: None) -> JaggedTensor:
    values, weights, lengths, offsets = leaves
    jt = JaggedTensor._of(values, weights, lengths)
    jt._offsets = offsets
    return jt


def _flatten_kjt(kjt: KeyedJaggedTensor) -> tuple[list[Tensor | None], _Structure]:
    inverse = kjt._inverse
    keys, indices = (None, None) if inverse is None else inverse
    return [kjt._values, kjt._weights, kjt._lengths, kjt._offsets, indices], _Structure(
        kjt._strides, kjt._capacity, keys
    )


def _unflatten_kjt(leaves: Iterable[Any], context: _Structure) -> KeyedJaggedTensor:
    values, weights, lengths, offsets, inverse = leaves
    strides = context.strides
    if context.uniform:
        # a tree may hold anything in the place of tensors
        bags = lengths.shape[0] if isinstance(lengths, Tensor) else 0
        bags = offsets.shape[0] - 1 if lengths is None and isinstance(offsets, Tensor) else bags
        strides = Strides(strides.keys, bags // len(strides.keys.names))
    both = None if context.inverse is None else (context.inverse, inverse)
    kjt = like(KeyedJaggedTensor, strides, values, weights, lengths, None, True, both)
    kjt._offsets, kjt._capacity = offsets, context.capacity
    return kjt


def _flatten_kt(kt: KeyedTensor) -> tuple[list[Tensor], tuple[Columns, int]]:
    return [kt._values], (kt._columns, kt._key_dim)


def _unflatten_kt(leaves: Iterable[Any], context: tuple[Columns, int]) -> KeyedTensor:
    (values,) = leaves
    return KeyedTensor._of(context[0], values, context[1])


def register() -> None:
    """Make torch know the three types; once a process."""
    for cls, flatten, unflatten, fields, dump, load in (
        (JaggedTensor, _flatten_jt, _unflatten_jt, _BAGS, lambda none: none, lambda none: none),
        (KeyedJaggedTensor, _flatten_kjt, _unflatten_kjt, _KEYED, _Structure.facts, _structure),
        (
            KeyedTensor, _flatten_kt, _unflatten_kt, ("values",),
            lambda context: [context[0].keys.names, context[0].widths, context[1]],
            lambda facts: (keys_of(facts[0]).columns(facts[1]), facts[2]),
        ),
    ):  # fmt: skip
        _register(cls, flatten, unflatten, fields, dump, load)


def _register(cls: Any, flatten: Any, unflatten: Any, fields: Sequence[str], dump: Any, load: Any) -> None:
    def with_keys(tree: Any) -> tuple[list[tuple[Any, Any]], Any]:
        leaves, context = flatten(tree)
        named: list[tuple[Any, Any]] = [(GetAttrKey(f), leaf) for f, leaf in zip(fields, leaves, strict=True)]
        return named, context

    register_pytree_node(
        cls,
        flatten,
        unflatten,
        serialized_type_name=f"shardwise.jagged.{cls.__name__}",
        to_dumpable_context=dump,
        from_dumpable_context=load,
        flatten_with_keys_fn=with_keys,
    )
    register_pytree_flatten_spec(cls, lambda tree, spec: flatten(tree)[0])


def flatten_kjt_list(kjt_arr: list[KeyedJaggedTensor]) -> tuple[list[Tensor | None], list[_Structure]]:
    """All tensors of several batches in one list, and for each batch what they do not say.

    Of each values [N], weights [N], lengths, offsets and indices of the inverse, None where it has none. The inverse is
    `unflatten_kjt_list`.
    """
    flat = [_flatten_kjt(kjt) for kjt in kjt_arr]
    return [leaf for leaves, _ in flat for leaf in leaves], [context for _, context in flat]


def unflatten_kjt_list(values: list[Tensor | None], contexts: list[_Structure]) -> list[KeyedJaggedTensor]:
    """The batches that `flatten_kjt_list` took apart, from values [N], weights [N] and so on of each.

    Raises:
        ValueError: the numbers of tensors do not fit.
    """
    each = len(_KEYED)
    if len(values) != each * len(contexts):
        raise ValueError(f"{len(contexts)} batches have {each * len(contexts)} tensors, got {len(values)}")
    return [_unflatten_kjt(values[i * each : (i + 1) * each], context) for i, context in enumerate(contexts)]
