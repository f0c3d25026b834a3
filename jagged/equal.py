"""Whether two jagged batches hold the same, and whether one holds together."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from .jagged_tensor import JaggedTensor
from .keyed_jagged_tensor import KeyedJaggedTensor


@torch.fx.wrap
def jt_is_equal(jt_1: JaggedTensor, jt_2: JaggedTensor) -> bool:
    """Whether two have the same bags, equal or, where they are floats, close (`torch.allclose`) values and weights.

    Reads them on the host."""
    if not (isinstance(jt_1, JaggedTensor) and isinstance(jt_2, JaggedTensor)):
        return False
    return _close(jt_1._values, jt_2._values) and _same_bags(jt_1, jt_2)


@torch.fx.wrap
def kjt_is_equal(kjt_1: KeyedJaggedTensor, kjt_2: KeyedJaggedTensor) -> bool:
    """Whether two have the same keys in one order, batch sizes, bags and inverse indices, equal or, where they are
    floats, close (`torch.allclose`) values and weights. Reads them on the host."""
    if not (isinstance(kjt_1, KeyedJaggedTensor) and isinstance(kjt_2, KeyedJaggedTensor)):
        return False
    if kjt_1._strides != kjt_2._strides or not _close(kjt_1._values, kjt_2._values):
        return False
    mine, theirs = kjt_1._inverse, kjt_2._inverse
    if mine is None or theirs is None:
        return mine is theirs and _same_bags(kjt_1, kjt_2)
    return mine[0] == theirs[0] and _close(mine[1], theirs[1]) and _same_bags(kjt_1, kjt_2)


def _same_bags(one: JaggedTensor | KeyedJaggedTensor, other: JaggedTensor | KeyedJaggedTensor) -> bool:
    # lengths say all that offsets say
    return _close(one._weights, other._weights) and _close(one.lengths(), other.lengths())


def _close(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    if one.shape != other.shape:
        return False
    if not (one.is_floating_point() or other.is_floating_point()):
        # ids that are close are not the same
        return bool((one == other).all())
    common = torch.promote_types(one.dtype, other.dtype)
    return torch.allclose(one.to(common), other.to(common))


class TableConfig(Protocol):
    """What the check of ids reads of an `EmbeddingBagConfig` or `EmbeddingConfig`."""

    name: str
    num_embeddings: int
    feature_names: list[str]


def validate_keyed_jagged_tensor(kjt: KeyedJaggedTensor, configs: Sequence[TableConfig] | None = None) -> bool:
    """Check every bag of a batch, and with the `configs` of tables every id of their features. Reads on the host.

    Returns:
        False, after a warning that names feature, table and the smallest and largest id, where an id is outside of
        its table; True otherwise.

    Raises:
        ValueError: lengths or offsets do not fit the values, naming key and numbers, or batch sizes of several ranks.
    """
    kjt._check_in_full()
    ranks = kjt.stride_per_key_per_rank()
    if ranks and len(ranks[0]) > 1:
        raise ValueError(f"a batch that is not sent yet has batch sizes of one rank, got {len(ranks[0])}")
    good = True
    for config in configs or ():
        for feature in config.feature_names or [config.name]:
            if feature in kjt._strides.keys.index:
                good &= _ids_fit(feature, kjt[feature].values(), config)
    return good


def _ids_fit(feature: str, ids: Tensor, config: TableConfig) -> bool:
    if ids.numel() == 0:
        return True
    # host sync: the caller asked for it
    smallest, largest = torch.stack(ids.aminmax()).tolist()
    if smallest >= 0 and largest < config.num_embeddings:
        return True
    warnings.warn(
        f"feature {feature!r}: ids from {smallest} to {largest}, table {config.name!r} has"
        f" {config.num_embeddings} rows",
        stacklevel=3,
    )
    return False
