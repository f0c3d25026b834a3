"""One batch's life in a sharded collection: from the ids that are routed to the rows that are released.

A `Step` goes through the phases below, on every rank in the same order, and the fields of a phase exist from then on:
reading one too early is an AttributeError. Several steps may be under way at a time.

Letters: W ranks, B samples of this rank (1 where nothing is pooled), S streams that leave this rank, N ids that leave
it; G groups of shards that this rank serves, with slots in them, M ids that it serves for all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from torch import Tensor

from shardwise.jagged import KeyedJaggedTensor

from ...planner.layout import Span

if TYPE_CHECKING:
    from ..comms.consensus import PendingHeader
    from ..comms.exchange import Pending
    from .id_map import Renewal
    from .route import Division, ReplicatedBatch, Sending
    from .routes import Routes
    from .tiers import Reservation
    from .wire import Receiving

# of a step: what has been done for it
STARTED, IDS_SENT, IDS_RECEIVED, LOOKED_UP = range(4)


class _Referable:
    """For a class with slots: weak references to its objects."""

    __slots__ = ("__weakref__",)


@dataclass(eq=False, slots=True)
class Step(_Referable):
    """What one batch of one collection needs, on this rank."""

    # whether a backward may follow: replicated tables then learn every rank's ids
    update: bool
    # how what comes is put in order; another object since means another plan or device
    receiving: Receiving
    phase: int = STARTED
    # the very object that the forward must be called with to take this step, or None: any
    taken_by: object | None = None

    # whether the memory of the batch that was given is freed: it cannot be routed once more
    is_freed: bool = False
    # whether its weights are those of nobody yet: they travel by themselves once its ids are here
    awaits_weights: bool = False

    # STARTED: the batch as it was given, padded to one batch size, and as it travels: that, or each id once
    given: KeyedJaggedTensor = field(init=False)
    padded: KeyedJaggedTensor = field(init=False)
    routed: KeyedJaggedTensor = field(init=False)
    # where each id of `padded` lies in `routed`, if ids travel once
    inverse: Tensor | None = None
    # its ids, lined up for the ranks that serve them: rank after rank, stream after stream
    sending: Sending = field(init=False)
    batch: int = field(init=False)  # B
    counts: list[int] = field(init=False)  # [S] ids of each stream
    ids_to: list[int] = field(init=False)  # [W] ids that each rank gets
    returned_to: list[int] = field(init=False)  # [W] those of them whose results come back
    ids_to_groups: list[list[int]] = field(init=False)  # [W][groups of the rank]
    sent_ids: Tensor = field(init=False)  # [N]
    sent_lengths: Tensor = field(init=False)  # [S, B] int32
    # [N] a factor for each id, through which gradients of weights go back
    sent_weights: Tensor | None = None
    # what is looked up here, in tables that every rank holds; and the ids that were divided among row ranges
    replicated: list[ReplicatedBatch] = field(init=False)
    division: Division | None = None
    divided_ahead: bool = False
    # whether its rows were asked for before its lookup
    is_ahead: bool = False
    # sizes of the message to each rank, on their way; all that there is of a batch that is bad on this rank
    header: PendingHeader = field(init=False)
    # what all ranks know of it, where tables may lack slots
    reservation: Reservation | None = None

    # IDS_SENT: what each rank said of its message to this one
    batches: list[int] = field(init=False)  # [W] samples
    ids_from: list[int] = field(init=False)  # [W] ids
    returned_from: list[int] = field(init=False)  # [W] those whose results go back
    ids_by_group: Sequence[Sequence[int]] = field(init=False)  # [G][W] ids of each group
    id_sizes: list[int] = field(init=False)  # [W] int32 numbers of their messages
    # ids on their way; None for a rank that is alone
    ids: Pending | None = None

    # IDS_RECEIVED: what this rank serves, in the order [slot][global sample][position]
    received_ids: Tensor = field(init=False)  # [M]
    received_lengths: Tensor = field(init=False)  # [slots, samples of all ranks] int32
    received_offsets: Tensor = field(init=False)  # [slots * samples + 1]
    received_weights: Tensor | None = None  # [M]
    first_id: list[int] = field(init=False)  # [G + 1] where the ids of each group begin
    # lengths of each rank as they came: [W] of [streams * B_r]
    arrived_lengths: list[Tensor] = field(init=False)
    # rows of tables with an id map that begin anew before the lookup, by table and rows of the shard
    renewals: dict[tuple[str, Span], Renewal] = field(default_factory=dict)
    # rows of this rank's ids in tables with an id map, on their way back, where they are wanted
    mapped: Pending | None = None

    # by group what its store was told of the batch ahead
    announced: dict[int, Any] = field(default_factory=dict)

    # LOOKED_UP, or prefetched: by group the slots of its ids, and what holds them there until the update
    leases: dict[int, tuple[Tensor, Any]] = field(default_factory=dict)
    # whether the backward trains tables: not one of a module in eval()
    trains: bool = True
    # of each group the tables that were frozen at the lookup
    frozen: list[tuple[bool, ...]] = field(init=False)
    # why the rows that this rank was asked for cannot all be in slots
    lack: Exception | None = None
    # rows on their way to those who asked, and how many numbers come from each rank
    rows: Pending = field(init=False)
    row_sizes: list[int] = field(init=False)  # [W]
    # rows of each group, until all ranks are known to have sent theirs as they are
    unsure_rows: Mapping[int, Tensor] = field(default_factory=dict)
    # of a step that is looked up ahead of its forward, by lookup: rows of tables that every rank holds, and of those
    # that are trained by their gradient
    replicated_rows: dict[int, Tensor] | None = None
    dense_rows: dict[int, Tensor] | None = None

    @property
    def fits(self) -> bool:
        """Whether all ranks know that its rows find slots on every one."""
        return self.reservation is not None and self.reservation.fits

    def is_stale(self, routes: Routes) -> bool:
        """Whether it left under another plan than that of `routes`."""
        return self.receiving.routes is not routes

    def settle(self) -> None:
        """Wait for what travels, without a look at it; on the stream that sent it, to whose memory it returns."""
        self.header.pending.wait()
        for pending in (self.ids, self.mapped, getattr(self, "rows", None)):
            if pending is not None:
                pending.wait()

    def release_sent(self) -> None:
        """Let what was sent go, once the ids of all ranks are here: only sizes are asked for later."""
        self.sent_ids, self.sent_lengths, self.ids = self.sent_ids.new_empty(0), self.sent_lengths.new_empty(0), None
        if self.sent_weights is None:
            # gradients of weights find their way back by them
            self.arrived_lengths = []

    def part_from(self, memory: Sequence[Tensor]) -> None:
        """Keep copies of what lies in `memory` of its batch, which is about to be freed."""
        freed = {tensor.untyped_storage().data_ptr() for tensor in memory if tensor.numel()}
        self.is_freed = True
        for owner in (self, self.division, *self.replicated):
            for part in () if owner is None else fields(owner):
                value = getattr(owner, part.name, None)
                if isinstance(value, Tensor) and value.numel() and value.untyped_storage().data_ptr() in freed:
                    setattr(owner, part.name, value.clone())
