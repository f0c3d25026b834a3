"""Storage reservations, memory that is not for tables: TorchRec's by their names, and `ModelStorageReservation`.

A reservation copies a topology and takes from the storage of each rank. Modules are known by what they answer to:
`parameters()`, `buffers()` and `named_children()`, with tensors that have `numel()` and `element_size()`. Percentages
are shares, 0.15 say.
"""

from __future__ import annotations

import copy
import math
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from typing import Any

from ..constants import BIGINT_DTYPE, POOLING_FACTOR
from ..constraints import ParameterConstraints
from ..errors import PlannerError, PlannerErrorType
from ..topology import Storage, Topology
from .types import StorageReservation
from .utils import gb_to_bytes, storage_repr_in_gb

# TorchRec's: two batches in a pipeline, each in ten copies
_TORCHREC_BATCHES = 20
# batches of ours that are somewhere in a pipeline at once: copied in, exchanged, trained; before and after the exchange
_BATCHES, _COPIES = 3, 2
# of a dense parameter: value, gradient, the bucket its gradient is averaged in, two states of an optimizer as Adam
_TRAINED, _FROZEN = 5.0, 1.0


class StorageReservationType(str, Enum):
    """The kinds of reservation, for settings."""

    HEURISTIC = "heuristic"
    FIXED_PERCENTAGE = "fixed_percentage"
    FIXED_ABSOLUTE = "fixed_absolute"


@dataclass(frozen=True)
class Inputs:
    """A model's inputs: ids of one rank's batch by feature, and the modules that have the tables."""

    ids: tuple[float, ...]
    bags: tuple[float, ...]
    modules: tuple[Any, ...]


def inputs_of(
    module: Any,
    sharders: Sequence[Any],
    batch_size: int,
    constraints: Mapping[str, ParameterConstraints] | None = None,
) -> Inputs:
    """The inputs of the tables that have a sharder; a table without a constraint counts as one feature of one id."""
    ids: list[float] = []
    bags: list[float] = []
    sharder_of = dict(_sharded(module, {sharder.module_type: sharder for sharder in reversed(sharders)}))
    for part, sharder in sharder_of.items():
        for name in sharder.shardable_parameters(part):
            constraint = (constraints or {}).get(name)
            factors = [POOLING_FACTOR] if constraint is None else constraint.pooling_factors
            sizes = (constraint and constraint.batch_sizes) or [batch_size] * len(factors)
            ids += [factor * size for factor, size in zip(factors, sizes, strict=False)]
            bags += [float(size) for size in sizes]
    return Inputs(tuple(ids), tuple(bags), tuple(sharder_of))


def _sharded(module: Any, sharders: Mapping[type, Any]) -> Iterator[tuple[Any, Any]]:
    sharder = sharders.get(type(module))
    if sharder is not None:
        yield module, sharder
        return
    for _, child in module.named_children():
        yield from _sharded(child, sharders)


def _bytes_of(tensors: Iterable[Any]) -> int:
    total = 0
    for tensor in tensors:
        # a lazy layer's parameter has no size before a first forward
        with suppress(ValueError):
            total += tensor.numel() * tensor.element_size()
    return total


def _dense_bytes(module: Any, inside: Iterable[Any], multiplier: float) -> int:
    """Bytes of what a module has outside of those `inside`, parameters `multiplier` times."""

    def size(part: Any) -> int:
        return round(multiplier * _bytes_of(part.parameters()) + _bytes_of(part.buffers()))

    return size(module) - sum(size(part) for part in inside)


def _on(compute_device: str, size: int) -> Storage:
    return Storage(hbm=0, ddr=size) if compute_device == "cpu" else Storage(hbm=size, ddr=0)


def _ids_storage(topology: Topology, inputs: Inputs, copies: int) -> Storage:
    return _on(topology.compute_device, math.ceil(sum(inputs.ids) * BIGINT_DTYPE) * copies)


def _take(topology: Topology, storage: Storage) -> None:
    for device in topology.devices:
        device.storage -= storage


def _take_share(topology: Topology, percentage: float) -> None:
    for device in topology.devices:
        device.storage.hbm = int((1 - percentage) * device.storage.hbm)


class _Reservation(StorageReservation):
    """A share of device memory and what else a subclass keeps; remembers what it returned."""

    # whether a rank that is left with less than nothing is an error
    _requires_rest = False

    def __init__(self, percentage: float) -> None:
        if not 0 <= percentage <= 1:
            raise ValueError(f"percentage must be a share from 0 to 1, got {percentage}")
        self._percentage = percentage
        self._dense_storage: Storage | None = None
        self._kjt_storage: Storage | None = None
        self._last_reserved_topology: Topology | None = None

    @property
    def last_reserved_topology(self) -> Topology | None:
        """A copy of what `reserve` returned last."""
        return copy.deepcopy(self._last_reserved_topology)

    def reserve(
        self,
        topology: Topology,
        batch_size: int,
        module: Any,
        sharders: list[Any],
        constraints: dict[str, ParameterConstraints] | None = None,
    ) -> Topology:
        """A copy of the topology with what is left.

        Raises:
            PlannerError: nothing is, where the reservation is a guess by what the model has.
        """
        reserved = copy.deepcopy(topology)
        self._keep(reserved, module, inputs_of(module, sharders, batch_size, constraints))
        if self._requires_rest:
            self._require_rest(topology, reserved, batch_size)
        self._last_reserved_topology = copy.deepcopy(reserved)
        return reserved

    @abstractmethod
    def _keep(self, reserved: Topology, module: Any, inputs: Inputs) -> None:
        """Take from `reserved` what is not for tables."""

    def _require_rest(self, topology: Topology, reserved: Topology, batch_size: int) -> None:
        """Raise PlannerError where a rank has less than nothing left."""
        for before, after in zip(topology.devices, reserved.devices, strict=True):
            if after.storage.hbm < 0 or after.storage.ddr < 0:
                raise PlannerError(
                    f"rank {before.rank} has no memory left for tables: of {storage_repr_in_gb(before.storage)},"
                    f" {self._percentage:.0%} is a reserve, dense layers take {storage_repr_in_gb(self._dense_storage)}"
                    f" and batches of {batch_size} {storage_repr_in_gb(self._kjt_storage)}. Reduce the batch, reserve a"
                    " smaller share, say what dense layers really take (dense_tensor_estimate, or"
                    " FixedPercentageStorageReservation where they are sharded), or take devices with more memory",
                    PlannerErrorType.INSUFFICIENT_STORAGE,
                )


class FixedPercentageStorageReservation(_Reservation):
    """Keeps a share of device memory; host memory stays whole, on a CPU too.

    Raises:
        ValueError: the share is not between 0 and 1.
    """

    def _keep(self, reserved: Topology, module: Any, inputs: Inputs) -> None:
        _take_share(reserved, self._percentage)
        # nothing is kept for inputs: the number is for statistics
        self._kjt_storage = _ids_storage(reserved, inputs, _TORCHREC_BATCHES)

    def __str__(self) -> str:
        return f"{self._percentage:.0%} of device memory"


class FixedAbsoluteStorageReservation(FixedPercentageStorageReservation):
    """Keeps so many bytes of device memory on every rank, all of it where there is less.

    Raises:
        ValueError: the number is negative.
    """

    def __init__(self, hbm_reserved_bytes: int) -> None:
        if hbm_reserved_bytes < 0:
            raise ValueError(f"hbm_reserved_bytes must be 0 or more, got {hbm_reserved_bytes}")
        super().__init__(percentage=0.0)
        self._hbm_reserved_bytes = hbm_reserved_bytes

    @classmethod
    def from_gb(cls, hbm_reserved_gb: float) -> FixedAbsoluteStorageReservation:
        """So many GiB."""
        return cls(gb_to_bytes(hbm_reserved_gb))

    def _keep(self, reserved: Topology, module: Any, inputs: Inputs) -> None:
        super()._keep(reserved, module, inputs)
        for device in reserved.devices:
            device.storage.hbm = max(0, device.storage.hbm - self._hbm_reserved_bytes)

    def __str__(self) -> str:
        return f"{self._hbm_reserved_bytes / 1024**3:.4g} GiB of device memory"


class _Guess(_Reservation):
    """TorchRec's kind: a share, dense parameters some times over or as estimated, and copies of a batch of ids."""

    # copies of a batch of ids
    _copies = 1

    def __init__(self, percentage: float, parameter_multiplier: float, dense_tensor_estimate: int | None) -> None:
        super().__init__(percentage)
        self._parameter_multiplier, self._dense_tensor_estimate = parameter_multiplier, dense_tensor_estimate

    def _keep(self, reserved: Topology, module: Any, inputs: Inputs) -> None:
        _take_share(reserved, self._percentage)
        size = self._dense_tensor_estimate or _dense_bytes(module, inputs.modules, self._parameter_multiplier)
        self._dense_storage = _on(reserved.compute_device, size)
        self._kjt_storage = _ids_storage(reserved, inputs, self._copies)
        _take(reserved, self._dense_storage)
        _take(reserved, self._kjt_storage)

    def __str__(self) -> str:
        return (
            f"{self._percentage:.0%} of device memory, dense layers {storage_repr_in_gb(self._dense_storage)},"
            f" inputs {storage_repr_in_gb(self._kjt_storage)}"
        )


class HeuristicalStorageReservation(_Guess):
    """TorchRec's guess for training: a share of device memory, dense parameters several times, twenty batches of ids.

    Args:
        percentage: share of device memory.
        parameter_multiplier: how often a dense parameter is there: itself, its gradient, states, buckets.
        dense_tensor_estimate: bytes of all that is dense, instead.

    Raises:
        ValueError: the share is not between 0 and 1.
    """

    _requires_rest, _copies = True, _TORCHREC_BATCHES

    def __init__(
        self,
        percentage: float,
        parameter_multiplier: float = 6.0,
        dense_tensor_estimate: int | None = None,
    ) -> None:
        super().__init__(percentage, parameter_multiplier, dense_tensor_estimate)


class SKUAwareStorageReservation(_Reservation):
    """TorchRec's guess for jobs that run on one kind of device today and on another tomorrow, of TorchRec 1.9.

    As `HeuristicalStorageReservation`, but the reserve is a number of bytes, whatever device memory there is.

    Args:
        margin_bytes: the reserve: a share of the memory of the device that the job was tuned on, say.
        runtime_overhead_bytes: of drivers, communication and allocators on the device.
        parameter_multiplier: how often a dense parameter is there.
        model_base_bytes: instead of margin and dense layers, where somebody measured them.
        dense_tensor_estimate: bytes of all that is dense, instead of the parameters.

    Raises:
        ValueError: a number of bytes is negative.
    """

    _requires_rest = True

    def __init__(
        self,
        margin_bytes: int,
        runtime_overhead_bytes: int = 0,
        parameter_multiplier: float = 6.0,
        model_base_bytes: int | None = None,
        dense_tensor_estimate: int | None = None,
    ) -> None:
        sizes = {
            "margin_bytes": margin_bytes, "runtime_overhead_bytes": runtime_overhead_bytes,
            "model_base_bytes": model_base_bytes, "dense_tensor_estimate": dense_tensor_estimate,
        }  # fmt: skip
        for name, size in sizes.items():
            if size is not None and size < 0:
                raise ValueError(f"{name} must be 0 or more, got {size}")
        super().__init__(percentage=0.0)
        self._margin_bytes, self._runtime_overhead_bytes = margin_bytes, runtime_overhead_bytes
        self._parameter_multiplier, self._dense_tensor_estimate = parameter_multiplier, dense_tensor_estimate
        self._model_base_bytes = model_base_bytes

    def _keep(self, reserved: Topology, module: Any, inputs: Inputs) -> None:
        measured = self._model_base_bytes
        base = self._margin_bytes if measured is None else measured
        for device in reserved.devices:
            device.storage.hbm = max(0, device.storage.hbm - base - self._runtime_overhead_bytes)
        dense = self._dense_tensor_estimate or _dense_bytes(module, inputs.modules, self._parameter_multiplier)
        # a measured base has the dense layers in it
        self._dense_storage = _on(reserved.compute_device, dense if measured is None else 0)
        self._kjt_storage = _ids_storage(reserved, inputs, _TORCHREC_BATCHES)
        _take(reserved, self._dense_storage)
        _take(reserved, self._kjt_storage)

    def _require_rest(self, topology: Topology, reserved: Topology, batch_size: int) -> None:
        tier = "ddr" if reserved.compute_device == "cpu" else "hbm"
        for device in reserved.devices:
            if getattr(device.storage, tier) <= 0:
                raise PlannerError(
                    f"rank {device.rank} has no memory left for tables: {self} leave nothing of"
                    f" {storage_repr_in_gb(topology.devices[device.rank].storage)}. Reduce the batch ({batch_size}),"
                    " margin_bytes, model_base_bytes or runtime_overhead_bytes, say what dense layers really take"
                    " (dense_tensor_estimate), or take devices with more memory",
                    PlannerErrorType.INSUFFICIENT_STORAGE,
                )

    def __str__(self) -> str:
        measured = self._model_base_bytes
        base = f"{self._margin_bytes / 1024**3:.4g} GiB of margin and dense layers {_size(self._dense_storage)}"
        if measured is not None:
            base = f"{measured / 1024**3:.4g} GiB of the model"
        overhead = f"{self._runtime_overhead_bytes / 1024**3:.4g} GiB of overhead"
        return f"{base}, {overhead}, inputs {_size(self._kjt_storage)}"


class InferenceStorageReservation(_Guess):
    """TorchRec's guess for serving: a share of device memory, dense parameters once, and one batch of ids.

    Args:
        percentage: share of device memory.
        dense_tensor_estimate: bytes of all that is dense, where it is not whole on every rank.

    Raises:
        ValueError: the share is not between 0 and 1.
    """

    def __init__(self, percentage: float, dense_tensor_estimate: int | None = None) -> None:
        super().__init__(percentage, 1, dense_tensor_estimate)


class ModelStorageReservation(_Reservation):
    """Ours: what dense layers and batches take, and a share of the memory that tables are in.

    A dense parameter that trains is there five times (value, gradient, the bucket in which its gradient is averaged,
    two states as Adam has), one that does not and a buffer once. Batches: ids, lengths and weights of three, before and
    after the exchange, with the pooling factors that constraints say. The share is for activations, the libraries'
    workspaces and what an allocator cannot use.

    Args:
        percentage: that share.

    Raises:
        ValueError: it is not between 0 and 1.
    """

    _requires_rest = True

    def __init__(self, percentage: float = 0.15) -> None:
        super().__init__(percentage)

    def _keep(self, reserved: Topology, module: Any, inputs: Inputs) -> None:
        cpu = reserved.compute_device == "cpu"
        _take_share(reserved, self._percentage)
        if cpu:
            for device in reserved.devices:
                device.storage.ddr = int((1 - self._percentage) * device.storage.ddr)
        of_tables = {id(param) for part in inputs.modules for param in (*part.parameters(), *part.buffers())}
        dense = sum(
            (_TRAINED if param.requires_grad else _FROZEN) * _bytes_of([param])
            for param in (*module.parameters(), *module.buffers())
            if id(param) not in of_tables
        )
        # an id and its weight; a length for each bag
        batch = sum(inputs.ids) * (BIGINT_DTYPE + 4) + sum(inputs.bags) * BIGINT_DTYPE
        self._dense_storage = _on(reserved.compute_device, math.ceil(dense))
        self._kjt_storage = _on(reserved.compute_device, math.ceil(batch * _BATCHES * _COPIES))
        _take(reserved, self._dense_storage)
        _take(reserved, self._kjt_storage)

    def __str__(self) -> str:
        dense, inputs = (_size(storage) for storage in (self._dense_storage, self._kjt_storage))
        return f"{self._percentage:.0%} of the memory of a rank, {dense} for dense layers, {inputs} for batches"


def _size(storage: Storage | None) -> str:
    size = 0 if storage is None else storage.hbm + storage.ddr
    return f"{size / 1024**3:.3g} GiB" if size >= 1024**3 / 10 else f"{size / 1024**2:.3g} MiB"
