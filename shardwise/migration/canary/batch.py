"""The batch of one of FBGEMM's modules of tables, cut into what some features ask for.

Shapes: F features in runs of neighbours, B samples (B_f where they differ), N ids: indices [N], offsets [sum B_f + 1],
per-sample weights [N]. What features give lies in the output of all of them in spans: columns of [B, sum of D_f], rows
of [N, D] where nothing is pooled, or elements of the one vector that batches of several sizes give.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

# batch sizes [F][ranks]
Sizes: TypeAlias = Sequence[Sequence[int]]
Span: TypeAlias = tuple[int, int]


class Ids(NamedTuple):
    """What a lookup takes: indices [N], offsets and per-sample weights [N]."""

    indices: Tensor
    offsets: Tensor
    weights: Tensor | None


class Batch:
    """A batch of `features` features; `sizes` where they have batch sizes of their own."""

    def __init__(self, ids: Ids, features: int, sizes: Sizes | None) -> None:
        self.ids, self.features, self.sizes = ids, features, sizes
        bags = ids.offsets.numel() - 1
        of_features = [bags // features] * features if sizes is None else [sum(of_feature) for of_feature in sizes]
        # the first bag of each feature, and their number
        self.bags = [0, *accumulate(of_features)]
        self._bounds: list[int] | None = None

    @property
    def bounds(self) -> list[int]:
        """The first id of each feature, and their number."""
        if self._bounds is None:
            # host sync on CUDA: how many ids each feature has decides the shapes of what is cut
            self._bounds = self.ids.offsets[self.bags].tolist()
        return self._bounds

    def detached(self) -> Batch:
        """The same batch, whose weights have no gradient."""
        weights = self.ids.weights
        if weights is None or not weights.requires_grad:
            return self
        return Batch(self.ids._replace(weights=weights.detach()), self.features, self.sizes)

    def pick(self, features: Sequence[int]) -> Ids:
        """The batch of some features, in increasing order."""
        if len(features) == self.features:
            return self.ids
        pieces, ids_before = [], 0
        for first, last in runs(features):
            begin, end = self.bounds[first], self.bounds[last]
            pieces.append(self.ids.offsets[self.bags[first] : self.bags[last]] - (begin - ids_before))
            ids_before += end - begin
        return self._cut(features, pieces, ids_before)

    def without(self, features: Sequence[int]) -> Ids:
        """The batch of all features, of which these have no ids."""
        kept = [feature for feature in range(self.features) if feature not in set(features)]
        pieces, ids_before, taken = [], 0, set(features)
        for feature in range(self.features):
            offsets = self.ids.offsets[self.bags[feature] : self.bags[feature + 1]]
            if feature in taken:
                pieces.append(torch.full_like(offsets, ids_before))
            else:
                pieces.append(offsets - (self.bounds[feature] - ids_before))
                ids_before += self.bounds[feature + 1] - self.bounds[feature]
        return self._cut(kept, pieces, ids_before)

    def _cut(self, features: Sequence[int], offsets: list[Tensor], total: int) -> Ids:
        ids = self.ids
        places = [slice(self.bounds[first], self.bounds[last]) for first, last in runs(features)]
        ends = torch.full_like(ids.offsets[:1], total)
        indices = torch.cat([ids.indices[place] for place in places]) if places else ids.indices[:0]
        weights = None
        if ids.weights is not None:
            weights = torch.cat([ids.weights[place] for place in places]) if places else ids.weights[:0]
        return Ids(indices, torch.cat([*offsets, ends]), weights)

    def count(self, features: Sequence[int]) -> int:
        """How many ids these features have."""
        if len(features) == self.features:
            return self.ids.indices.numel()
        return sum(self.bounds[last] - self.bounds[first] for first, last in runs(features))

    def spans(self, features: Sequence[int], dims: Sequence[int], *, pooled: bool) -> list[Span]:
        """Where what these features give lies in the output of all of them, whose widths are `dims`."""
        if not pooled:
            return [(self.bounds[first], self.bounds[last]) for first, last in runs(features)]
        starts = [0, *accumulate(dims)]
        if self.sizes is None:
            return [(starts[first], starts[last]) for first, last in runs(features)]
        lengths = [of_feature[rank] * dim for rank in range(len(self.sizes[0]))
                   for of_feature, dim in zip(self.sizes, dims, strict=True)]  # fmt: skip
        starts, taken = [0, *accumulate(lengths)], set(features)
        return [(starts[n], starts[n + 1]) for n in range(len(lengths)) if n % self.features in taken]


def runs(features: Sequence[int]) -> list[Span]:
    """Numbers in increasing order as [first, last) of neighbours."""
    spans: list[Span] = []
    for feature in features:
        if spans and spans[-1][1] == feature:
            spans[-1] = (spans[-1][0], feature + 1)
        else:
            spans.append((feature, feature + 1))
    return spans
