"""Which ids get the slots of a table: eviction policies of `MCHManagedCollisionModule`.

At the end of an interval the ids that it saw are told apart, and those without a slot compete with those that have one.
A policy keeps numbers ("metadata") of each slot, turns them into scores, and the highest scores have the slots after.

Letters: Z slots, U distinct ids of the interval, by falling count, of which M have a slot and U - M are new. The last
slot is for ids that have none: it always stays.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

# counts [U] -> which pass, and the threshold
ThresholdFilter: TypeAlias = Callable[[Tensor], tuple[Tensor, float | Tensor]]

_MOST = torch.iinfo(torch.int64).max
_COUNTS, _LAST_ACCESS = "counts", "last_access_iter"


class MCHEvictionPolicyMetadataInfo(NamedTuple):
    """A number that a policy keeps: for each slot, for each id that waits in the history, or for both."""

    metadata_name: str
    is_mch_metadata: bool
    is_history_metadata: bool


class MCHEvictionPolicy(ABC):
    """What an eviction policy answers; derive from it for one of your own.

    Args:
        metadata_info: the numbers that it keeps.
        threshold_filtering_func: which ids of an interval may ask for a slot, by their counts; by default all.
    """

    def __init__(
        self,
        metadata_info: list[MCHEvictionPolicyMetadataInfo],
        threshold_filtering_func: ThresholdFilter | None = None,
    ) -> None:
        self._metadata_info = metadata_info
        self._threshold_filtering_func = threshold_filtering_func

    @property
    @abstractmethod
    def metadata_info(self) -> list[MCHEvictionPolicyMetadataInfo]:
        """The numbers that it keeps."""

    @abstractmethod
    def record_history_metadata(
        self, current_iter: int, incoming_ids: Tensor, history_metadata: dict[str, Tensor]
    ) -> None:
        """Fill in the numbers [N] of ids [N] that just came, in place."""

    @abstractmethod
    def coalesce_history_metadata(
        self,
        current_iter: int,
        history_metadata: dict[str, Tensor],
        unique_ids_counts: Tensor,
        unique_inverse_mapping: Tensor,
        additional_ids: Tensor | None = None,
        threshold_mask: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """From numbers of the ids as they came to numbers of distinct ids that pass `threshold_mask`, ascending.

        Shapes: numbers [N] of ids as they came, counts [U] of distinct ids, the place of each id among them [N + A],
        ids that are added [A], mask [U]; returns [U], or as many as pass.
        """

    @abstractmethod
    def update_metadata_and_generate_eviction_scores(
        self,
        current_iter: int,
        mch_size: int,
        coalesced_history_argsort_mapping: Tensor,
        coalesced_history_sorted_unique_ids_counts: Tensor,
        coalesced_history_mch_matching_elements_mask: Tensor,
        coalesced_history_mch_matching_indices: Tensor,
        mch_metadata: dict[str, Tensor],
        coalesced_history_metadata: dict[str, Tensor],
    ) -> tuple[Tensor, Tensor]:
        """Update the slots' numbers in place; which entries are given up, and which new ids take them, one for one.

        Args:
            current_iter: batches seen so far.
            mch_size: Z.
            coalesced_history_argsort_mapping: [U] from ascending ids to falling counts.
            coalesced_history_sorted_unique_ids_counts: [U] falling.
            coalesced_history_mch_matching_elements_mask: [U] whether the id has a slot.
            coalesced_history_mch_matching_indices: [M] its entry.
            mch_metadata: [Z] each.
            coalesced_history_metadata: [U] each, by ascending ids.
        """

    def _compute_selected_eviction_and_replacement_indices(
        self, pivot: int, eviction_scores: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Entries below `pivot` that fall out of the `pivot` highest scores, and candidates that come in.

        Scores [pivot + candidates]; among equal ones the first stays.
        """
        ranked = torch.argsort(eviction_scores, descending=True, stable=True)
        stay, leave = ranked[:pivot], ranked[pivot:]
        return leave[leave < pivot], stay[stay >= pivot] - pivot


class _ScoringPolicy(MCHEvictionPolicy):
    """A policy that keeps counts, the batch of the last access, or both, and scores entries by them."""

    def __init__(self, names: list[str], threshold_filtering_func: ThresholdFilter | None) -> None:
        # a count is known from the history itself; when an id came is not
        info = [MCHEvictionPolicyMetadataInfo(name, True, name == _LAST_ACCESS) for name in names]
        super().__init__(info, threshold_filtering_func)

    @abstractmethod
    def _scores(self, current_iter: int, metadata: dict[str, Tensor]) -> Tensor:
        """What the entries are worth, [slots and candidates]; the lowest are given up first."""

    @property
    def metadata_info(self) -> list[MCHEvictionPolicyMetadataInfo]:
        """The numbers that it keeps."""
        return self._metadata_info

    def record_history_metadata(
        self, current_iter: int, incoming_ids: Tensor, history_metadata: dict[str, Tensor]
    ) -> None:
        """Note when the ids came."""
        for seen in history_metadata.values():
            seen[:] = current_iter

    def coalesce_history_metadata(
        self,
        current_iter: int,
        history_metadata: dict[str, Tensor],
        unique_ids_counts: Tensor,
        unique_inverse_mapping: Tensor,
        additional_ids: Tensor | None = None,
        threshold_mask: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """When each distinct id came last."""
        found = {}
        for name, seen in history_metadata.items():
            if additional_ids is not None:
                seen = torch.cat([seen, torch.full_like(additional_ids, current_iter)])  # noqa: PLW2901
            last = torch.zeros_like(unique_ids_counts)
            last.scatter_reduce_(0, unique_inverse_mapping, seen, reduce="amax", include_self=False)
            found[name] = last if threshold_mask is None else last[threshold_mask]
        return found

    def update_metadata_and_generate_eviction_scores(
        self,
        current_iter: int,
        mch_size: int,
        coalesced_history_argsort_mapping: Tensor,
        coalesced_history_sorted_unique_ids_counts: Tensor,
        coalesced_history_mch_matching_elements_mask: Tensor,
        coalesced_history_mch_matching_indices: Tensor,
        mch_metadata: dict[str, Tensor],
        coalesced_history_metadata: dict[str, Tensor],
    ) -> tuple[Tensor, Tensor]:
        """As `MCHEvictionPolicy` says, by `_scores`."""
        known, entries = coalesced_history_mch_matching_elements_mask, coalesced_history_mch_matching_indices
        fresh: dict[str, Tensor] = {}
        for name, of_slots in mch_metadata.items():
            if name == _COUNTS:
                seen = coalesced_history_sorted_unique_ids_counts
                of_slots[entries] += seen[known]
            else:
                seen = coalesced_history_metadata[name][coalesced_history_argsort_mapping]
                of_slots[entries] = seen[known]
            # no score is above that of the last slot
            of_slots[mch_size - 1] = _MOST if name == _COUNTS else current_iter
            fresh[name] = seen[~known]
        merged = {name: torch.cat([of_slots, fresh[name]]) for name, of_slots in mch_metadata.items()}
        given_up, taken = self._compute_selected_eviction_and_replacement_indices(
            mch_size, self._scores(current_iter, merged)
        )
        for name, of_slots in mch_metadata.items():
            of_slots[given_up] = fresh[name][taken]
        return given_up, taken


class LFU_EvictionPolicy(_ScoringPolicy):  # noqa: N801
    """Least frequently used: the ids that came most often have the slots."""

    def __init__(self, threshold_filtering_func: ThresholdFilter | None = None) -> None:
        super().__init__([_COUNTS], threshold_filtering_func)

    def _scores(self, current_iter: int, metadata: dict[str, Tensor]) -> Tensor:
        return metadata[_COUNTS]


class LRU_EvictionPolicy(_ScoringPolicy):  # noqa: N801
    """Least recently used: the ids that came last have the slots. `decay_exponent` above 0 changes no order."""

    def __init__(self, decay_exponent: float = 1.0, threshold_filtering_func: ThresholdFilter | None = None) -> None:
        super().__init__([_LAST_ACCESS], threshold_filtering_func)
        self._decay_exponent = decay_exponent

    def _scores(self, current_iter: int, metadata: dict[str, Tensor]) -> Tensor:
        return -torch.pow(current_iter - metadata[_LAST_ACCESS] + 1, self._decay_exponent)


class DistanceLFU_EvictionPolicy(_ScoringPolicy):  # noqa: N801
    """Frequent and recent: an id is worth its count / (batches since it came + 1)^`decay_exponent`."""

    def __init__(self, decay_exponent: float = 1.0, threshold_filtering_func: ThresholdFilter | None = None) -> None:
        super().__init__([_COUNTS, _LAST_ACCESS], threshold_filtering_func)
        self._decay_exponent = decay_exponent

    def _scores(self, current_iter: int, metadata: dict[str, Tensor]) -> Tensor:
        distance = torch.pow(current_iter - metadata[_LAST_ACCESS] + 1, self._decay_exponent)
        return torch.div(metadata[_COUNTS], distance)


# which ids of an interval may ask for a slot: of counts [U] of distinct ids the mask [U] of those that pass, and the
# threshold that it used


@torch.no_grad()
def dynamic_threshold_filter(id_counts: Tensor, threshold_skew_multiplier: float = 10.0) -> tuple[Tensor, Tensor]:
    """Which ids [U] came over `threshold_skew_multiplier` times as often as the average, and that threshold (0-dim)."""
    share = 1 / max(id_counts.numel(), 1)
    threshold = share * threshold_skew_multiplier * id_counts.sum()
    return id_counts > threshold, threshold


@torch.no_grad()
def average_threshold_filter(id_counts: Tensor) -> tuple[Tensor, Tensor]:
    """Which ids [U] came more often than the average id, and that average (0-dim)."""
    counts = id_counts.float()
    threshold = counts.mean()
    return counts > threshold, threshold


@torch.no_grad()
def probabilistic_threshold_filter(id_counts: Tensor, per_id_probability: float = 0.01) -> tuple[Tensor, Tensor]:
    """Each occurrence of an id [U] has `per_id_probability` to let it pass, drawn from torch's global generator.

    An id that came n times passes with probability 1 - (1 - p)^n: 63 % for n = 100 and p = 0.01.
    """
    missed = torch.full_like(id_counts, 1 - per_id_probability, dtype=torch.float)
    threshold = torch.rand(id_counts.size(), device=id_counts.device)
    return 1 - torch.pow(missed, id_counts) > threshold, threshold
