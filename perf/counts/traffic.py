"""What ranks send each other in a step, predicted from a plan: bytes of every pair of ranks, as plain data.

Exact for lengths, sums and gradients of sums; what depends on the ids is exact for whole tables and, for ranges of
rows, what evenly spread ids come to. Letters as in sharding/engine/routes.py: W ranks, B samples of one rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardwise.sharding.comms.consensus import header_bytes
from shardwise.sharding.engine.routes import REPLICA, ROWS, Group, Routes, Serving
from shardwise.sharding.engine.tiers import reserved_numbers

_NUMBER = 4


@dataclass(frozen=True)
class Traffic:
    """Bytes from one rank to another in a step; `local` ones are between ranks of a host, over an exchange of theirs.

    ids: their numbers. lengths: of bags. weights: a factor for each id, where those travel. rows: sums of bags and rows
    of ids. gradients: of those, the other way. weight_gradients: of per-id weights, if they are wanted. local_rows,
    local_gradients: what is added inside a host first, and its gradient.
    """

    headers: float = 0
    ids: float = 0
    lengths: float = 0
    weights: float = 0
    rows: float = 0
    gradients: float = 0
    weight_gradients: float = 0
    local_rows: float = 0
    local_gradients: float = 0


def predicted_bytes(
    routes: Routes, rank: int, batches: Sequence[int], bag_lengths: Mapping[str, float], *, update: bool = True
) -> list[Traffic]:
    """What `rank` sends to each rank, itself included, in a step without compression.

    Args:
        batches: samples of each rank.
        bag_lengths: ids in a bag of each feature, in the mean.
        update: whether a backward follows: replicated tables then tell each other their ids.

    Not counted is what rules of whole rows give each other for tables cut by columns (`row_state="table"`): it depends
    on how many different rows a batch names.
    """
    own = routes.serving[rank]
    header = header_bytes(3 + max(len(serving.groups) for serving in routes.serving) + reserved_numbers(routes))
    # samples that each rank of this host answers for all hosts
    each = routes.local_size
    answered = [sum(batches[m::each]) for m in range(each)]
    to_ranks = []
    for other, serving in enumerate(routes.serving):
        near, same_host = (other - rank) % each == 0, other // each == rank // each
        there = _ids_of_streams(routes, serving, bag_lengths, batches[rank], update)
        back = _ids_of_streams(routes, own, bag_lengths, batches[other], update)
        ids = sum(there)
        returned = sum(back[: own.returned])
        sums = own.sums + own.host_sums * near
        rows = batches[other] * sums + _row_numbers(own, back, (ROWS,))
        gradients: float
        if routes.pooled:
            gradients = batches[rank] * (serving.gradient_columns + serving.host_sums * near)
        else:
            gradients = _row_numbers(serving, there, (ROWS, REPLICA) if update else (ROWS,))
        streams = len(serving.streams_for(update))
        to_ranks.append(
            Traffic(
                headers=header,
                ids=ids * routes.id_dtype.itemsize,
                lengths=streams * (batches[rank] if routes.pooled else 1) * _NUMBER,
                weights=ids * _NUMBER if routes.scaled else 0,
                rows=rows * _NUMBER,
                gradients=gradients * _NUMBER if update else 0,
                weight_gradients=returned * _NUMBER if update and routes.weighted else 0,
                local_rows=answered[other % each] * own.host_sums * _NUMBER if same_host else 0,
                local_gradients=answered[rank % each] * own.host_sums * _NUMBER if same_host and update else 0,
            )
        )
    return to_ranks


def _ids_of_streams(
    routes: Routes, serving: Serving, bag_lengths: Mapping[str, float], batch: int, update: bool
) -> list[float]:
    """Ids that a rank with `batch` samples sends for each stream of another."""
    ids = []
    for stream in serving.streams_for(update):
        share = 1.0
        if stream.cut is not None:
            borders = routes.cuts[stream.cut].borders
            share = (borders[stream.bucket + 1] - borders[stream.bucket]) / borders[-1]
        ids.append(batch * bag_lengths[routes.lookups[stream.lookup][0]] * share)
    return ids


def _row_numbers(serving: Serving, ids: Sequence[float], kinds: Sequence[str]) -> float:
    """Numbers of the rows of ids, group by group."""
    groups: list[Group] = [group for group in serving.groups if group.kind in kinds]
    return sum(ids[slot.stream] * slot.width for group in groups for slot in group.slots)
