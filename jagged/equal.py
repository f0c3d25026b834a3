"""Comparison of two jagged batches, and the check whether one holds together."""

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
    inverse_1, inverse_2 = kjt_1._inverse, kjt_2._inverse
    if inverse_1 is None or inverse_2 is None:
        return inverse_1 is inverse_2 and _same_bags(kjt_1, kjt_2)
    return inverse_1[0] == inverse_2[0] and _close(inverse_1[1], inverse_2[1]) and _same_bags(kjt_1, kjt_2)


def _same_bags(x: JaggedTensor | KeyedJaggedTensor, y: JaggedTensor | KeyedJaggedTensor) -> bool:
    # lengths say all that offsets say
    return _close(x._weights, y._weights) and _close(x.lengths(), y.lengths())


def _close(x: Tensor | None, y: Tensor | None) -> bool:
    if x is None or y is None:
        return x is y
    if x.shape != y.shape:
        return False
    if not (x.is_floating_point() or y.is_floating_point()):
        # ids that are close are not the same
        return bool((x == y).all())
    common = torch.promote_types(x.dtype, y.dtype)
    return torch.allclose(x.to(common), y.to(common))


class TableConfig(Protocol):
    """The fields of an `EmbeddingBagConfig` or `EmbeddingConfig` that the check of ids reads."""

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
