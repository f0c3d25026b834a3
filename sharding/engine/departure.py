"""Batches that leave ahead of the forward that will look them up, so that an earlier batch trains meanwhile."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import torch

from ..comms.exchange import Pending
from ..comms.header import Head, Told
from .owner import Batch, InFlight, Owner
from .route import Inbound, Outbound, Receiving, arrange, in_order


@dataclass
class Departure:
    """A batch of one collection until its arrival: its sizes are told, then its ids travel, then it is a flight."""

    # None where it is bad on this rank: what the ranks are told then is the error
    outbound: Outbound | None
    batch: Batch | None
    update: bool
    # how what comes is put in order; another one since means another plan or device
    receiving: Receiving
    told: Told
    heads: list[Head] = field(default_factory=list)
    # ids on their way, and how many numbers come from each rank
    ids: Pending | None = None
    sizes: list[int] = field(default_factory=list)
    flight: InFlight | None = None

    def received(self) -> Inbound:
        """What all ranks sent, once it is here."""
        batches, ids_from, groups = [], [], []
        for head in self.heads:
            batches.append(head.sizes.batch)
            ids_from.append(head.sizes.ids)
            groups.append(head.sizes.ids_to_groups)
        to_groups = list(map(sum, zip(*groups, strict=True)))[: self.receiving.groups]
        if self.ids is None:
            out = self.outbound
            assert out is not None
            weights = None if out.weights is None else out.weights.detach()
            return in_order(out.ids, [out.lengths], weights, self.receiving, batches, to_groups)
        blocks = torch.split(self.ids.wait(), self.sizes)
        return arrange(blocks, self.receiving, batches, ids_from, to_groups)

    def settle(self) -> None:
        """Wait for what travels, without a look at it; on the stream that sent it, to whose memory it returns."""
        self.told.pending.wait()
        if self.ids is not None:
            self.ids.wait()

    def drop(self, owner: Owner) -> None:
        """Let the batch go, as no forward will take it: what travels is waited for, its rows may leave their slots."""
        self.settle()
        if self.flight is not None:
            # its rows went to other ids, whether it is looked up or not
            owner.renew(self.flight)
            owner.release(self.flight)


class Expected:
    """Departures of one collection, in the order of the forwards that will take them."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[Departure, object | None]] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, departure: Departure, features: object | None = None) -> None:
        """Have the next forward take this batch, if it is called with these `features`, the very object, or any."""
        self._waiting.append((departure, features))

    def pop(self, features: object) -> Departure | None:
        """The batch that a forward with `features` is to take, None if that is none of these."""
        departure, wanted = self._waiting[0]
        if wanted is not None and wanted is not features:
            return None
        self._waiting.popleft()
        return departure

    def pop_all(self) -> list[Departure]:
        """All of them."""
        found = [departure for departure, _ in self._waiting]
        self._waiting.clear()
        return found
