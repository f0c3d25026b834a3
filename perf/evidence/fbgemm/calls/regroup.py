"""Calls of ops that put columns of pooled embeddings together anew."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from .draw import Call, Draw, calls

# what FBGEMM regroups
HALVES_AND_FLOATS = (torch.float32, torch.float32, torch.float16, torch.bfloat16)


class _Keyed:
    """Some tensors, their keys, and groups of these."""

    def __init__(self, draw: Draw) -> None:
        counts = [draw.between(1, 3) for _ in range(draw.between(1, 3))]
        ends = list(accumulate(counts, initial=0))
        self.keys = [[f"k{i}" for i in range(ends[t], ends[t + 1])] for t in range(len(counts))]
        if draw.coin(0.1):
            # the first tensor that has a key is meant
            self.keys[-1][-1] = "k0"
        self.lengths = [[draw.between(0 if draw.coin(0.1) else 1, 5) for _ in names] for names in self.keys]
        names = [name for listed in self.keys for name in listed]
        if draw.coin():
            # each key once
            order = draw.permutation(len(names)).tolist()
            cut = draw.between(0, len(names))
            self.groups = [[names[i] for i in order[:cut]], [names[i] for i in order[cut:]]]
        else:
            self.groups = [[draw.choice(names) for _ in range(draw.below(4))] for _ in range(draw.between(1, 3))]
        used = {name for group in self.groups for name in group}
        self.all_used = used == set(names) and len(set(names)) == len(names)

    def values(self, draw: Draw, grad: bool) -> list[Tensor]:
        batch, dtype = draw.below(4), draw.choice(HALVES_AND_FLOATS)
        return [draw.layout(draw.floats((batch, sum(each)), dtype, grad=grad)) for each in self.lengths]

    def arguments(self) -> list[Any]:
        """Permutes and widths, as kt_regroup_arguments gives them."""
        owners: dict[str, tuple[int, int, int]] = {}
        for t, (names, lengths) in enumerate(zip(self.keys, self.lengths, strict=True)):
            for name, first, length in zip(names, accumulate(lengths, initial=0), lengths, strict=False):
                owners.setdefault(name, (t, first, length))
        rows: list[list[int]] = []
        uses: dict[str, list[int]] = {}
        widths = [0] * len(self.groups)
        for output, group in enumerate(self.groups):
            for name in group:
                t, first, length = owners[name]
                uses.setdefault(name, []).append(len(rows))
                rows.append([t, output, first, widths[output], length, 0])
                widths[output] += length
        for places in uses.values():
            if len(places) > 1:
                for i, place in enumerate(places):
                    after = places[i + 1] if i + 1 < len(places) else len(rows)
                    rows[place][5] = after if i == 0 else -after
        shapes = [torch.tensor(each, dtype=torch.int32) for each in (list(map(sum, self.lengths)), widths)]
        return [torch.tensor(rows, dtype=torch.int32).view(-1, 6), *shapes, widths]


@calls("kt_regroup_arguments")
def _arguments(draw: Draw) -> Call:
    keyed = _Keyed(draw)
    return Call([draw.floats((2, 3)), keyed.keys, keyed.lengths, keyed.groups])


@calls("regroup_keyed_tensor", "permute_multi_embedding")
def _regroup(draw: Draw) -> Call:
    keyed, grad = _Keyed(draw), draw.coin()
    values = keyed.values(draw, grad)
    # it leaves the gradient of a key that no group has as memory was
    unset = "the gradient of a key that no group has" * (grad and not keyed.all_used)
    if draw.op == "regroup_keyed_tensor":
        return Call([values, keyed.keys, keyed.lengths, keyed.groups], difference=unset)
    return Call([values, *keyed.arguments()], difference=unset)


def _offsets(dims: list[int]) -> Tensor:
    return torch.tensor(list(accumulate(dims, initial=0)))


@calls(
    "permute_pooled_embs",
    "permute_pooled_embs_split",
    "permute_pooled_embs_auto_grad",
    "permute_pooled_embs_auto_grad_split",
    "permute_duplicate_pooled_embs",
    "permute_duplicate_pooled_embs_split",
    "permute_duplicate_pooled_embs_auto_grad",
    "permute_duplicate_pooled_embs_auto_grad_split",
)
def _permute_pooled(draw: Draw) -> Call:
    tables, batch, grad = draw.between(1, 5), draw.below(4), draw.coin()
    dims = [draw.between(0 if draw.coin(0.1) else 1, 4) for _ in range(tables)]
    dtype = draw.choice((*HALVES_AND_FLOATS, torch.float64))
    pooled = draw.layout(draw.floats((batch, sum(dims)), dtype, grad=grad))
    order, difference = draw.permutation(tables).tolist(), ""
    inverse = sorted(range(tables), key=order.__getitem__)
    if "duplicate" in draw.op:
        if draw.coin():
            order = [draw.below(tables) for _ in range(draw.between(1, 6))]
            inverse = [order.index(table) if table in order else 0 for table in range(tables)]
            difference = "the gradient of tables that come twice or not at all"
        if draw.op.endswith("_auto_grad"):
            difference = "permute_duplicate_pooled_embs_auto_grad has no gradient"
        if not grad or "auto_grad" not in draw.op:
            difference = ""
        if batch == 0 and sum(dims[table] for table in order) != sum(dims):
            difference = "the columns of no samples"
    offsets, new_offsets = _offsets(dims), _offsets([dims[table] for table in order])
    if draw.coin(0.2):
        # without the end
        offsets = offsets[:-1]
    return Call([pooled, offsets, torch.tensor(order), new_offsets, torch.tensor(inverse)], difference=difference)
