"""Which row each id has where a table has fewer rows than ids, and how rows change hands.

The rules are those of FBGEMM's init_address_lookup, prune_embedding_tables and remap_indices_update_utils, to the
iteration and the sample, without its kernels: plain torch on any device, and the same bits twice.

Shapes: U ids, P < U rows, addresses [U] int64, utilization [U] fp32. The first row serves all ids without a row of
their own, and belongs to none that has one.
"""

from __future__ import annotations

import torch
from torch import Tensor

# utilizations are sorted for a threshold, of one id in so many
IDS_PER_SAMPLE = 23
# how much of a utilization is left at each pruning, once the first interval is over
DECAY = 0.98


def prunes_at(iteration: int, interval: int) -> bool:
    """Whether rows change hands before the batch of an iteration, from 0: often first, then each `interval` of them."""
    after = iteration + 1
    return (
        (iteration < 10 and after % 3 == 0)
        or (iteration < 100 and after % 30 == 0)
        or (iteration < 1000 and after % 300 == 0)
        or after % interval == 0
    )


def counts_at(iteration: int) -> bool:
    """Whether the ids of an iteration's batch are counted: those of a sample of batches."""
    return iteration < 10 or (iteration < 100 and (iteration + 1) % 19 == 0) or (iteration + 1) % 39 == 0


def resets_at(iteration: int, interval: int) -> bool:
    """Whether rows that change hands begin anew: not in the first interval, when few ids have been seen."""
    return iteration > interval


def first_addresses(ids: int, rows: int, device: torch.device, first_row: int = 0) -> Tensor:
    """Addresses [U] to begin with: the first ids have a row each, the others share the first."""
    addresses = torch.arange(ids, device=device)
    addresses[rows:] = 0
    return addresses + first_row


def id_counts(ids: Tensor, total: int, times: Tensor | None = None) -> Tensor:
    """How often each of `total` ids stands in `ids` [n], each counting `times` [n] where given: [total] int64."""
    if times is None:
        return torch.bincount(ids, minlength=total)
    # integers, whose sums have no order
    return torch.zeros(total, dtype=torch.int64, device=ids.device).scatter_add_(0, ids.long(), times)


@torch.no_grad()
def prune_rows(
    addresses: Tensor, utilization: Tensor, rows: int, iteration: int, interval: int, first_row: int = 0
) -> Tensor:
    """Give rows of little used ids to ids that are used more, in place; the rows that changed hands [k].

    Utilizations decay, and a sample of them gives the threshold above which as many ids lie as there are rows. Ids
    below it that have a row lose it, in their order, to those above that have none, in theirs; where one side has
    more, these stay as they are. A table of fewer than 23 ids is sampled whole. Iterations are
    batches, and so is `interval`.
    """
    if iteration > interval:
        utilization.mul_(DECAY)
    keeps = utilization > _threshold(utilization, rows, iteration)
    shared = addresses == first_row
    # host syncs on CUDA, once for each interval: how many ids change
    gaining, losing = (keeps & shared).nonzero().flatten(), (~keeps & ~shared).nonzero().flatten()
    count = min(gaining.shape[0], losing.shape[0])
    gaining, losing = gaining[:count], losing[:count]
    freed = addresses[losing]
    addresses[gaining] = freed
    addresses[losing] = first_row
    return freed


def _threshold(utilization: Tensor, rows: int, iteration: int) -> Tensor:
    """The utilization [] that a sample says U - P ids do not exceed."""
    total = utilization.shape[0]
    size = total // IDS_PER_SAMPLE
    sample = utilization
    if size:
        where = torch.arange(size, device=utilization.device) * IDS_PER_SAMPLE + iteration % IDS_PER_SAMPLE
        sample = utilization[where.clamp_(max=total - 1)]
    # in fp32, as FBGEMM rounds it
    kept = torch.tensor(float(rows), device="cpu") / torch.tensor(float(total), device="cpu")
    ratio = (1.0 - kept.double()).float()
    index = int((ratio * float(sample.shape[0])).floor())
    return sample.sort().values[min(index, sample.shape[0] - 1)]


def check_addresses(what: str, addresses: Tensor, first_row: int, rows: int) -> None:
    """Raise unless addresses [ids] are rows of first_row to first_row + rows, and no two ids share one but the first.

    Raises:
        ValueError: some do: they are those of another plan, or of another table.
    """
    own = addresses[addresses != first_row]
    inside = bool(((own >= first_row) & (own < first_row + rows)).all())
    if not inside or torch.unique(own).shape[0] < own.shape[0]:
        wrong = "gives rows to several ids" if inside else f"has rows outside of [{first_row}, {first_row + rows})"
        raise ValueError(
            f"{what}: the address lookup that is loaded {wrong}: it was saved with another number of rows, or of row"
            " shards, which prune by themselves; load it under the plan it was saved with"
        )
