"""The table of ids that have slots: `MCHManagedCollisionModule`.

Letters: Z slots, N ids of a batch. State: `_mch_sorted_raw_ids` [Z] ids, ascending, the largest int64 where a slot is
free; `_mch_remapped_ids_mapping` [Z] their slots; `_mch_<name>` [Z] numbers of the policy. The last slot never has an
id: it is the row of all ids that have none.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardwise.errors import RefusedValueError
from shardwise.jagged import JaggedTensor
from shardwise.jagged.tracing import holds_proxy, record_forward

from .modules import ManagedCollisionModule, padded_borders
from .policies import MCHEvictionPolicy

_FREE = torch.iinfo(torch.int64).max


class MCHManagedCollisionModule(ManagedCollisionModule):
    """Gives slots to the ids that an eviction policy finds worth them, anew every `eviction_interval` batches.

    While training, each call notes the batch's ids; the last call of an interval gives slots to new ones among them
    before it maps its own batch. Ids without a slot share the last one, so Z - 1 ids have rows of their own. The id
    2^63 - 1, which marks free slots, never gets one.

    Ids noted since the last interval ended are no part of the state: training that goes on from a checkpoint made after
    a whole number of intervals gives the same bits as if it had not stopped.

    Args:
        zch_size: Z, rows of the table.
        device: where the state is, a string or `torch.device`.
        eviction_policy: which ids have the slots.
        eviction_interval: batches.
        input_hash_size: ids are in [0, input_hash_size); row shards divide this range evenly.
        input_hash_func: called with ids and `input_hash_size`, what ids are told apart by.
        mch_size, mch_hash_func: have no effect, as in TorchRec; a warning says so.
        name: of the table, for messages.
        output_global_offset, output_segments, buckets: of a row shard; set by what shards a table.

    Raises:
        ValueError: `zch_size` or `eviction_interval` is not positive.
    """

    _mch_sorted_raw_ids: Tensor
    _mch_remapped_ids_mapping: Tensor
    _current_iter_tensor: Tensor
    _output_segments_tensor: Tensor
    # slots that got an id since `evict` was asked last
    _given_up: Tensor | None = None

    def __init__(
        self,
        zch_size: int,
        device: torch.device | str,
        eviction_policy: MCHEvictionPolicy,
        eviction_interval: int,
        input_hash_size: int = 2**63 - 1,
        input_hash_func: Callable[[Tensor, int], Tensor] | None = None,
        mch_size: int | None = None,
        mch_hash_func: Callable[[Tensor, int], Tensor] | None = None,
        name: str | None = None,
        output_global_offset: int = 0,
        output_segments: list[int] | None = None,
        buckets: int = 1,
    ) -> None:
        # TorchRec's words, though an interval of 1 is fine
        for what, words, value in (
            ("zch_size", "zch_size must be > 0", zch_size),
            ("eviction_interval", "eviction_interval must be > 1", eviction_interval),
        ):
            if value <= 0:
                raise RefusedValueError(
                    f"{words}: managed collision module {name!r} needs a positive {what}, got {value}"
                )
        borders = output_segments or [output_global_offset, output_global_offset + zch_size]
        super().__init__(device, borders)
        if mch_size is not None or mch_hash_func is not None:
            warnings.warn("mch_size and mch_hash_func have no effect: ids without a slot share one", stacklevel=2)
        self._name, self._zch_size, self._first_slot = name, zch_size, output_global_offset
        self._segments, self._buckets = borders, buckets
        self._eviction_policy, self._eviction_interval = eviction_policy, eviction_interval
        self._input_hash_size, self._input_hash_func = input_hash_size, input_hash_func
        slots = self._all_slots(self._device)
        self.register_buffer("_mch_sorted_raw_ids", torch.full_like(slots, _FREE))
        self.register_buffer("_mch_remapped_ids_mapping", slots)
        for info in eviction_policy.metadata_info:
            if info.is_mch_metadata:
                self.register_buffer(f"_mch_{info.metadata_name}", torch.zeros_like(slots))
        self._given_up = None
        # the buffers have memory, and nobody filled it yet
        self._is_empty = self._device.type == "meta"
        self._begin()

    def _all_slots(self, device: torch.device) -> Tensor:
        return torch.arange(self._zch_size, dtype=torch.int64, device=device) + self._first_slot

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Forget all ids, as at the start."""
        self._mch_sorted_raw_ids.fill_(_FREE)
        if not self._mch_sorted_raw_ids.is_meta:
            self._mch_remapped_ids_mapping.copy_(self._all_slots(self._mch_sorted_raw_ids.device))
            self._output_segments_tensor.copy_(padded_borders(self._segments, self._output_segments_tensor.device))
            self._is_empty = False
        for numbers in (self._current_iter_tensor, *self._metadata().values()):
            numbers.zero_()
        self._given_up = None
        self._begin()

    def _fill(self) -> None:
        """Begin where a module that was made on meta has memory by now: it had no values that could have come along."""
        if self._is_empty and not self._mch_sorted_raw_ids.is_meta:
            self.reset_parameters()

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        self._fill()
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _begin(self) -> None:
        """Forget what belongs to the interval under way."""
        self._history: list[Tensor] = []
        self._history_metadata: dict[str, list[Tensor]] = {
            info.metadata_name: [] for info in self._eviction_policy.metadata_info if info.is_history_metadata
        }
        # batches seen, on the host: None until the state says
        self._iteration: int | None = None
        self._last_eviction = 0

    # what programs read of TorchRec's module beside the buffers
    @property
    def _output_global_offset(self) -> int:
        """The first slot."""
        return self._first_slot

    @property
    def _mch_metadata(self) -> dict[str, Tensor]:
        """The policy's numbers of each entry by name, [Z], live."""
        return self._metadata()

    @property
    def _mch_slots(self) -> Tensor:
        """How many slots ids may have, [1]: Z - 1."""
        return torch.full((1,), self._zch_size - 1, dtype=torch.int64, device=self.device)

    @property
    def _delimiter(self) -> Tensor:
        """What stands for the id of a free slot, [1]: 2^63 - 1."""
        return torch.full((1,), _FREE, dtype=torch.int64, device=self.device)

    @property
    def _current_iter(self) -> int:
        """Batches that were profiled; -1 before the first one since the module was made or loaded."""
        return -1 if self._iteration is None else self._iteration

    @property
    def _last_eviction_iter(self) -> int:
        """The batch that ended the last interval; -1 where `_current_iter` is."""
        return -1 if self._iteration is None else self._last_eviction

    @property
    def _evicted(self) -> bool:
        """Whether slots got ids since `evict` was asked last."""
        return self._given_up is not None

    @property
    def _evicted_emb_indices(self) -> Tensor:
        """Those slots, [n]; what `evict` will return."""
        return self._mch_remapped_ids_mapping[:0] if self._given_up is None else self._given_up

    @property
    def _history_accumulator(self) -> Tensor:
        """The ids noted since the last interval ended, [N], a copy."""
        return torch.cat([self._mch_sorted_raw_ids[:0], *self._history])

    @property
    def _current_history_buffer_offset(self) -> int:
        """How many these are."""
        return sum(ids.shape[0] for ids in self._history)

    @property
    def _init_output_segments_tensor(self) -> Tensor:
        """The borders of row shards that the module was made with, as `_output_segments_tensor` has them."""
        return padded_borders(self._segments, self.device)

    def _metadata(self) -> dict[str, Tensor]:
        """The policy's numbers of each entry, live."""
        names = [info.metadata_name for info in self._eviction_policy.metadata_info if info.is_mch_metadata]
        return {name: self.get_buffer(f"_mch_{name}") for name in names}

    def forward(self, features: dict[str, JaggedTensor], mutate_miss_lengths: bool = True) -> dict[str, JaggedTensor]:
        """Slots in the place of a batch's ids, once it was noted and, at the end of an interval, slots were given."""
        if holds_proxy(features):
            forward = MCHManagedCollisionModule.forward
            return record_forward(forward, self, features, mutate_miss_lengths)  # type: ignore[no-any-return]
        return self.remap(self.profile(self.preprocess(features)))

    @property
    def preprocesses(self) -> bool:
        """Whether there is an `input_hash_func`."""
        return self._input_hash_func is not None

    def preprocess(self, features: dict[str, JaggedTensor]) -> dict[str, JaggedTensor]:
        """Ids hashed by `input_hash_func`, if there is one."""
        if self._input_hash_func is None:
            return features
        return {
            name: _with_values(feature, self._input_hash_func(feature.values(), self._input_hash_size))
            for name, feature in features.items()
        }

    @torch.no_grad()
    def profile(self, features: dict[str, JaggedTensor]) -> dict[str, JaggedTensor]:
        """Note a batch's ids, and give slots at the end of an interval; nothing unless training."""
        self._fill()
        if not self.training or self._mch_sorted_raw_ids.is_meta:
            return features
        if self._iteration is None:
            self._iteration = self._last_eviction = self.batches_seen()
        self._iteration += 1
        self._current_iter_tensor += 1
        for feature in features.values():
            # a copy: batches may be overwritten once they were looked up
            ids = feature.values().detach().to(torch.int64, copy=True)
            self._history.append(ids)
            noted = {name: torch.zeros_like(ids) for name in self._history_metadata}
            self._eviction_policy.record_history_metadata(self._iteration, ids, noted)
            for name, numbers in noted.items():
                self._history_metadata[name].append(numbers)
        if self._iteration - self._last_eviction == self._eviction_interval:
            self._give_slots(self._iteration)
        return features

    def _give_slots(self, iteration: int) -> None:
        """End the interval."""
        policy, history = self._eviction_policy, torch.cat(self._history)
        noted = {name: torch.cat(numbers) for name, numbers in self._history_metadata.items()}
        self._begin()
        self._iteration = self._last_eviction = iteration
        named = history != _FREE
        # host sync on CUDA, as those below: distinct ids are a number that only the device knows
        if not bool(named.all()):
            history, noted = history[named], {name: numbers[named] for name, numbers in noted.items()}
        ids, inverse, counts = torch.unique(history, return_inverse=True, return_counts=True)
        passes: Tensor | None = None
        if policy._threshold_filtering_func is not None:
            passes, _ = policy._threshold_filtering_func(counts)
        noted = policy.coalesce_history_metadata(iteration, noted, counts, inverse, threshold_mask=passes)
        if passes is not None:
            ids, counts = ids[passes], counts[passes]
        order = torch.argsort(counts, descending=True, stable=True)
        ids, counts = ids[order], counts[order]
        entries = self._entries(ids)
        known = self._mch_sorted_raw_ids[entries] == ids
        given_up, taken = policy.update_metadata_and_generate_eviction_scores(
            iteration, self._zch_size, order, counts, known, entries[known], self._metadata(), noted
        )
        self._mch_sorted_raw_ids[given_up] = ids[~known][taken]
        slots = self._mch_remapped_ids_mapping[given_up]
        # of several intervals that nobody asked about each slot once
        self._given_up = slots if self._given_up is None else torch.unique(torch.cat([self._given_up, slots]))
        self._sort()

    def _sort(self) -> None:
        """Bring all entries into the order of their ids; free ones keep theirs, so the last stays last."""
        order = torch.argsort(self._mch_sorted_raw_ids, stable=True)
        for entries in (self._mch_sorted_raw_ids, self._mch_remapped_ids_mapping, *self._metadata().values()):
            entries.copy_(entries[order])

    def _entries(self, ids: Tensor) -> Tensor:
        """Where each id stands, if it does; the last entry is nobody's."""
        return torch.searchsorted(self._mch_sorted_raw_ids[:-1], ids)

    def remap(
        self, features: dict[str, JaggedTensor], mutate_miss_lengths: bool = True, write_weights: Tensor | None = None
    ) -> dict[str, JaggedTensor]:
        """Slots in the place of ids, the last for those that have none. `write_weights`, of any shape, are unused."""
        self._fill()
        return {name: _with_values(feature, self._slots(feature.values())) for name, feature in features.items()}

    def _slots(self, values: Tensor) -> Tensor:
        ids = values.to(torch.int64)
        entries = self._entries(ids)
        known = (self._mch_sorted_raw_ids[entries] == ids) & (ids != _FREE)
        slots = self._mch_remapped_ids_mapping[entries]
        return torch.where(known, slots, self._first_slot + self._zch_size - 1).to(values.dtype)

    def evict(self) -> Tensor | None:
        """Slots [n] that got an id, be it their first, since this was asked last; None where no interval ended."""
        slots, self._given_up = self._given_up, None
        return slots

    def output_size(self) -> int:
        """Z."""
        return self._zch_size

    def input_size(self) -> int:
        """`input_hash_size`."""
        return self._input_hash_size

    def buckets(self) -> int:
        """How many equal ranges of ids have slots of their own."""
        return self._buckets

    def open_slots(self) -> Tensor:
        """How many slots no id has yet, [1]; the last one, which none gets, is not counted."""
        self._fill()
        free = torch.full((1,), _FREE, dtype=torch.int64, device=self._mch_sorted_raw_ids.device)
        return self._zch_size - 1 - torch.searchsorted(self._mch_sorted_raw_ids, free)

    @torch.no_grad()
    def validate_state(self) -> None:
        """After a load: check that the slots are these, and begin an interval.

        Raises:
            ValueError: the checkpoint was cut at other rows.
        """
        loaded = self._output_segments_tensor.tolist()
        first, end = self._first_slot, self._first_slot + self._zch_size
        if first not in loaded or end not in loaded:
            borders = [border for border in loaded if border >= 0]
            raise ValueError(
                f"managed collision module {self._name!r}: its slots [{first}, {end}) are no whole segments of what is"
                f" loaded, whose borders are {borders}: ids and slots were divided otherwise there"
            )
        self._output_segments_tensor.copy_(padded_borders(self._segments, self._output_segments_tensor.device))
        self._given_up, self._is_empty = None, False
        self._begin()
        self._sort()

    def rebuild_with_output_id_range(
        self,
        output_id_range: tuple[int, int],
        output_segments: list[int],
        device: torch.device | str | None = None,
    ) -> MCHManagedCollisionModule:
        """One like it, without ids, that gives out the slots [low, high)."""
        low, high = output_id_range
        return type(self)(
            high - low, device or self.device, self._eviction_policy, self._eviction_interval,
            input_hash_size=self._input_hash_size, input_hash_func=self._input_hash_func, name=self._name,
            output_global_offset=low, output_segments=output_segments, buckets=len(output_segments) - 1,
        )  # fmt: skip


def _with_values(feature: JaggedTensor, values: Tensor) -> JaggedTensor:
    return JaggedTensor(values, feature.weights_or_none(), feature.lengths())
