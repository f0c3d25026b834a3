"""The jagged types as trees of tensors, for torch.export, torch.func, fx and whatever else walks over inputs.

Leaves are tensors, or None where there is none; all that is known on the host and does not vary from batch to batch is
the context. What was read of tensors (`length_per_key`) is left behind: a tree may be made of other tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor
from torch.fx._pytree import register_pytree_flatten_spec
from torch.utils._pytree import GetAttrKey, KeyEntry, register_pytree_node

from ._pieces import like
from ._strides import Keys, Strides, keys_of
from .jagged_tensor import JaggedTensor
from .keyed_jagged_tensor import KeyedJaggedTensor
from .keyed_tensor import KeyedTensor

_BAGS = ("values", "weights", "lengths", "offsets")
_KEYED = (*_BAGS, "inverse_indices")

# keys, batch size where lengths do not tell it, batch sizes [keys][ranks], capacity, keys of the inverse indices
_Context = tuple[tuple[str, ...], int | None, tuple[tuple[int, ...], ...] | None, int | None, tuple[str, ...] | None]


def _flatten_jt(jt: JaggedTensor) -> tuple[list[Tensor | None], None]:
    return [jt._values, jt._weights, jt._lengths, jt._offsets], None


def _unflatten_jt(leaves: Iterable[Any], context: None) -> JaggedTensor:
    values, weights, lengths, offsets = leaves
    jt = JaggedTensor._of(values, weights, lengths)
    jt._offsets = offsets
    return jt


def _flatten_kjt(kjt: KeyedJaggedTensor) -> tuple[list[Tensor | None], _Context]:
    strides, inverse = kjt._strides, kjt._inverse
    told = bool(strides.keys.names) and strides.per_rank is None
    context = (
        tuple(strides.keys.names),
        None if told else strides.stride,
        None if strides.per_rank is None else tuple(map(tuple, strides.per_rank)),
        kjt._capacity,
        None if inverse is None else tuple(inverse[0]),
    )
    leaves = [kjt._values, kjt._weights, kjt._lengths, kjt._offsets, None if inverse is None else inverse[1]]
    return leaves, context


def _unflatten_kjt(leaves: Iterable[Any], context: _Context) -> KeyedJaggedTensor:
    values, weights, lengths, offsets, inverse = leaves
    names, stride, per_rank, capacity, inverse_keys = context
    keys = keys_of(list(names)) if len(set(names)) == len(names) else Keys(list(names))
    if stride is None:
        # a tree may hold anything in the place of tensors
        bags = lengths.shape[0] if isinstance(lengths, Tensor) else 0
        bags = offsets.shape[0] - 1 if lengths is None and isinstance(offsets, Tensor) else bags
        strides = Strides(keys, bags // len(names), None)
    else:
        strides = Strides(keys, stride, None if per_rank is None else [list(row) for row in per_rank])
    both = None if inverse_keys is None else (list(inverse_keys), inverse)
    kjt = like(KeyedJaggedTensor, strides, values, weights, lengths, None, True, both)
    kjt._offsets, kjt._capacity = offsets, capacity
    return kjt


def _flatten_kt(kt: KeyedTensor) -> tuple[list[Tensor], tuple[tuple[str, ...], tuple[int, ...], int]]:
    columns = kt._columns
    return [kt._values], (tuple(columns.keys.names), tuple(columns.widths), kt._key_dim)


def _unflatten_kt(leaves: Iterable[Any], context: tuple[Sequence[str], Sequence[int], int]) -> KeyedTensor:
    names, widths, key_dim = context
    (values,) = leaves
    return KeyedTensor._of(keys_of(list(names)).columns(list(widths)), values, key_dim)


def _to_lists(context: Any) -> Any:
    return [_to_lists(part) for part in context] if isinstance(context, tuple) else context


def _to_tuples(context: Any) -> Any:
    return tuple(_to_tuples(part) for part in context) if isinstance(context, list) else context


def register() -> None:
    """Make torch know the three types; once a process."""
    for cls, flatten, unflatten, fields in (
        (JaggedTensor, _flatten_jt, _unflatten_jt, _BAGS),
        (KeyedJaggedTensor, _flatten_kjt, _unflatten_kjt, _KEYED),
        (KeyedTensor, _flatten_kt, _unflatten_kt, ("values",)),
    ):
        _register(cls, flatten, unflatten, fields)


def _register(cls: Any, flatten: Any, unflatten: Any, fields: Sequence[str]) -> None:
    def with_keys(tree: Any) -> tuple[list[tuple[KeyEntry, Any]], Any]:
        leaves, context = flatten(tree)
        return [(GetAttrKey(field), leaf) for field, leaf in zip(fields, leaves, strict=True)], context

    register_pytree_node(
        cls,
        flatten,
        unflatten,
        serialized_type_name=f"shardwise.jagged.{cls.__name__}",
        to_dumpable_context=_to_lists,
        from_dumpable_context=_to_tuples,
        flatten_with_keys_fn=with_keys,
    )
    register_pytree_flatten_spec(cls, lambda tree, spec: flatten(tree)[0])


def flatten_kjt_list(kjt_arr: list[KeyedJaggedTensor]) -> tuple[list[Tensor | None], list[_Context]]:
    """All tensors of several batches in one list, and for each batch what they do not say.

    The inverse is `unflatten_kjt_list`.
    """
    flat = [_flatten_kjt(kjt) for kjt in kjt_arr]
    return [leaf for leaves, _ in flat for leaf in leaves], [context for _, context in flat]


def unflatten_kjt_list(values: list[Tensor | None], contexts: list[_Context]) -> list[KeyedJaggedTensor]:
    """The batches that `flatten_kjt_list` took apart. Raises ValueError where the numbers of tensors do not fit."""
    each = len(_KEYED)
    if len(values) != each * len(contexts):
        raise ValueError(f"{len(contexts)} batches have {each * len(contexts)} tensors, got {len(values)}")
    return [_unflatten_kjt(values[i * each : (i + 1) * each], context) for i, context in enumerate(contexts)]
