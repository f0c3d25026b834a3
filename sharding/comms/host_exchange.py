"""Sums inside a host before they travel on: another exchange of rows, among the ranks of one host.

Every rank of a host has sums for the samples of all ranks of all hosts. Rank m of the host answers the sources with
number m on their hosts: it adds up what its host's ranks have for those. W ranks, `local_size` of them on a host.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor

from .exchange import Exchange


class HostExchange:
    """The exchange of sums [samples of all ranks, H] among the ranks of this host; rank `rank` of W is here."""

    def __init__(self, local: Exchange, rank: int) -> None:
        self._local, self._number, self._size = local, rank % local.world_size, local.world_size

    def rows(self, sums: Tensor, batches: Sequence[int]) -> list[tuple[int, Tensor]]:
        """Each source that this rank answers, and the host's sums [its samples, H]; `batches` [W] samples."""
        size, world, columns = self._size, len(batches), sums.shape[1]
        blocks = sums.split_with_sizes(list(batches))
        numbers = [sum(batches[m::size]) * columns for m in range(size)]
        send = torch.cat([blocks[source].flatten() for m in range(size) for source in range(m, world, size)])
        answered = batches[self._number :: size]
        received = self._local.rows(send, numbers, [numbers[self._number]] * size).wait()
        # in the order of the ranks
        total = reduce(torch.add, received.view(size, sum(answered), columns).unbind())
        return list(zip(range(self._number, world, size), total.split_with_sizes(list(answered)), strict=True))

    def rows_transpose(self, gradient: Tensor, batches: Sequence[int]) -> Tensor:
        """The gradient [samples of all ranks, H] of `rows`, given that of what this rank answered, source by source."""
        size, columns = self._size, gradient.shape[1]
        answered = [list(batches[m::size]) for m in range(size)]
        numbers = [sum(of_rank) * columns for of_rank in answered]
        given = self._local.rows_transpose(gradient.flatten().repeat(size), [gradient.numel()] * size, numbers)
        blocks: list[Tensor] = [gradient] * len(batches)
        for m, part in enumerate(given.wait().split_with_sizes(numbers)):
            blocks[m::size] = part.view(sum(answered[m]), columns).split_with_sizes(answered[m])
        return torch.cat(blocks)
