"""What gives out the rows of a table to ids of a larger range: `ManagedCollisionModule`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.errors import RefusedValueError
from shardwise.jagged import JaggedTensor
from shardwise.jagged.scripting import NotScriptable
from shardwise.jagged.tracing import OneNode

# borders of row shards that a module tells a checkpoint of
_MOST_BORDERS = 1025


class ManagedCollisionModule(OneNode, NotScriptable, nn.Module, ABC):
    """Maps ids of [0, input_size) to slots, the rows of a table; derive from it for a mapping of your own.

    A call `preprocess`es ids, `profile`s them while training, and `remap`s them. All take and return a dict with the
    ids of all features of a table as one JaggedTensor, under the table's name.

    Args:
        device: where its state is.
        output_segments: borders of the row shards that slots are given out by, [0, slots] for one.
        skip_state_validation: keep neither those nor a count of batches in the state.
        read_only_suffix, enable_per_feature_lookups: kept for modules that read them.

    Raises:
        ValueError: there are more than 1024 segments.
    """

    def __init__(
        self,
        device: torch.device | str,
        output_segments: list[int],
        skip_state_validation: bool = False,
        read_only_suffix: str = "_readonly",
        enable_per_feature_lookups: bool = False,
    ) -> None:
        super().__init__()
        self._device = torch.device(device)
        self._read_only_suffix, self._enable_per_feature_lookups = read_only_suffix, enable_per_feature_lookups
        if skip_state_validation:
            return
        if len(output_segments) > _MOST_BORDERS:
            raise RefusedValueError(
                f"ManagedCollisionModule limited to {_MOST_BORDERS - 1} shards, got {len(output_segments) - 1} segments"
            )
        self.register_buffer("_output_segments_tensor", padded_borders(output_segments, self._device))
        self.register_buffer("_current_iter_tensor", torch.zeros(1, dtype=torch.int64, device=self._device))
        self.register_load_state_dict_post_hook(_validate)  # type: ignore[no-untyped-call]

    @property
    def device(self) -> torch.device:
        """Where its state is."""
        return next((buffer.device for buffer in self.buffers()), self._device)

    @property
    def readable_suffix(self) -> str:
        """What names of features end with that are looked up and not profiled."""
        return self._read_only_suffix

    @property
    def preprocesses(self) -> bool:
        """Whether `preprocess` may change ids; False spares batches the way through it."""
        return True

    def batches_seen(self) -> int:
        """How many batches it has profiled."""
        counted = self._buffers.get("_current_iter_tensor")
        # host sync on CUDA
        return 0 if counted is None else int(counted)

    @abstractmethod
    def preprocess(self, features: dict[str, JaggedTensor]) -> dict[str, JaggedTensor]:
        """Ids as they are told apart: hashed, say. Where a table is sharded this runs before they travel."""

    @abstractmethod
    def profile(self, features: dict[str, JaggedTensor]) -> dict[str, JaggedTensor]:
        """Learn from a batch which ids are to have slots; returns its features."""

    @abstractmethod
    def remap(
        self, features: dict[str, JaggedTensor], mutate_miss_lengths: bool = True, write_weights: Tensor | None = None
    ) -> dict[str, JaggedTensor]:
        """Slots in the place of ids."""

    @abstractmethod
    def forward(self, features: dict[str, JaggedTensor], mutate_miss_lengths: bool = True) -> dict[str, JaggedTensor]:
        """All three."""

    @abstractmethod
    def evict(self) -> Tensor | None:
        """Slots that got another id since this was asked last, whose rows are to begin anew; None where none could."""

    def reset_inference_mode(self) -> None:
        """Forget what was evicted: from now on ids are only looked up."""
        self.evict()

    @abstractmethod
    def output_size(self) -> int:
        """How many slots there are: rows of the table."""

    @abstractmethod
    def input_size(self) -> int:
        """Ids are in [0, input_size)."""

    @abstractmethod
    def buckets(self) -> int:
        """How many equal ranges of ids have slots of their own."""

    @abstractmethod
    def validate_state(self) -> None:
        """Check a state that was just loaded."""

    @abstractmethod
    def open_slots(self) -> Tensor:
        """How many slots no id has yet, [1]."""

    @abstractmethod
    def rebuild_with_output_id_range(
        self,
        output_id_range: tuple[int, int],
        output_segments: list[int],
        device: torch.device | str | None = None,
    ) -> ManagedCollisionModule:
        """One like it, without its state, that gives out these slots: for a row shard."""


def padded_borders(output_segments: list[int], device: torch.device) -> Tensor:
    """Borders of segments as they stand in checkpoints, whatever their number: [1025], -1 past the last."""
    padding = [-1] * (_MOST_BORDERS - len(output_segments))
    return torch.tensor(output_segments + padding, dtype=torch.int64, device=device)


def _validate(module: Any, _: Any) -> None:
    module.validate_state()
