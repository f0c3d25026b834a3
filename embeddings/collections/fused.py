"""Collections that are born with their optimizer in the backward, and the switch of a whole model to them."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn

from ..config import EmbeddingBagConfig, EmbeddingConfig
from ..optim.fbgemm_types import BELOW_DEVICE, EmbeddingLocation, require_location
from ..optim.optimizers import apply_optimizer_in_backward, optimizer_of
from ..policy import DEFAULT_POLICY, LookupPolicy
from .bag_collection import EmbeddingBagCollection
from .collection import TableCollection
from .sequence_collection import EmbeddingCollection


class _Fused(TableCollection):
    """A collection that is born with its optimizer, and knows where its rows are to lie."""

    _location: EmbeddingLocation | None = None

    def _lie(self, location: EmbeddingLocation | None) -> None:
        """Keep a location, for whoever shards the collection."""
        self._location = location
        if location is not None and location.name in BELOW_DEVICE and self.device.type != "meta":
            warnings.warn(
                f"location={location.name}: {type(self).__name__} has its rows on its device, {self.device}, until it"
                " is sharded: make it on meta, and give it to shardwise.tiered or DistributedModelParallel, which put"
                " them below their device",
                stacklevel=3,
            )

    def _train_with(self, optimizer_type: type[torch.optim.Optimizer], optimizer_kwargs: dict[str, Any]) -> None:
        self._optimizer = (optimizer_type, optimizer_kwargs)
        try:
            apply_optimizer_in_backward(optimizer_type, self.parameters(), optimizer_kwargs)
            self._settle()
        except ValueError as error:
            raise ValueError(
                f"Cannot fuse optimizer_type={optimizer_type} with kwargs {optimizer_kwargs}: {error}"
            ) from None

    @property
    def _optimizer_type(self) -> type[torch.optim.Optimizer]:
        """`optimizer_type()`, by the name of TorchRec's attribute."""
        return self._optimizer[0]

    @property
    def _optimizer_kwargs(self) -> dict[str, Any]:
        """`optimizer_kwargs()`, by the name of TorchRec's attribute."""
        return self._optimizer[1]

    def optimizer_type(self) -> type[torch.optim.Optimizer]:
        """The optimizer's class."""
        return self._optimizer[0]

    def optimizer_kwargs(self) -> dict[str, Any]:
        """The optimizer's keyword arguments as given."""
        return self._optimizer[1]


class FusedEmbeddingBagCollection(EmbeddingBagCollection, _Fused):
    """An `EmbeddingBagCollection` whose backward trains its tables with one optimizer.

    Args:
        tables, is_weighted, device, policy: as `EmbeddingBagCollection`.
        optimizer_type: torch.optim.SGD, Adagrad or Adam, or `RowWiseAdagrad`.
        optimizer_kwargs: its keyword arguments, `lr` first of all (default 0.01).
        location: where rows lie: DEVICE is on the device, HOST is the same for the CPU. MANAGED and MANAGED_CACHING are
            where they lie once the collection is sharded and its plan says no more than "fused": in the memory of the
            host, as with the compute kernels fused_uvm and fused_uvm_caching.

    Raises:
        ValueError: the optimizer has no fused rule, or an argument that the rule does not take; the location is not
            served.
    """

    def __init__(
        self,
        tables: list[EmbeddingBagConfig],
        optimizer_type: type[torch.optim.Optimizer],
        optimizer_kwargs: dict[str, Any],
        is_weighted: bool = False,
        device: torch.device | str | None = None,
        location: EmbeddingLocation | None = None,
        *,
        policy: LookupPolicy = DEFAULT_POLICY,
    ) -> None:
        require_location(location, device)
        super().__init__(tables, is_weighted, device, policy=policy)
        self._train_with(optimizer_type, optimizer_kwargs)
        self._lie(location)


class FusedEmbeddingCollection(EmbeddingCollection, _Fused):
    """An `EmbeddingCollection` whose backward trains its tables; arguments as `FusedEmbeddingBagCollection`."""

    def __init__(
        self,
        tables: list[EmbeddingConfig],
        optimizer_type: type[torch.optim.Optimizer],
        optimizer_kwargs: dict[str, Any],
        device: torch.device | str | None = None,
        need_indices: bool = False,
        location: EmbeddingLocation | None = None,
        *,
        policy: LookupPolicy = DEFAULT_POLICY,
    ) -> None:
        require_location(location, device)
        super().__init__(tables, device, need_indices, policy=policy)
        self._train_with(optimizer_type, optimizer_kwargs)
        self._lie(location)


def fuse_embedding_optimizer(
    model: nn.Module,
    optimizer_type: type[torch.optim.Optimizer],
    optimizer_kwargs: dict[str, Any],
    device: torch.device | str | None = None,
    location: EmbeddingLocation | None = None,
) -> nn.Module:
    """Replace every `EmbeddingBagCollection` and `EmbeddingCollection` of `model` by its fused twin, weights kept.

    A twin keeps dtypes, frozen tables and the bounds check; a collection used in several places stays one. A class
    derived from a collection keeps its class and gets the optimizer as `apply_optimizer_in_backward` gives it; fused
    collections are left as they are. `device` is where all of them go; by default each stays where it is. Returns the
    model, or the twin if `model` itself is a collection.

    Raises:
        ValueError: a table has an optimizer already, the new one has no fused rule, or the location is not served.
    """
    for module in model.modules():
        if isinstance(module, TableCollection):
            require_location(location, device or module.device)
    return _fuse(model, (optimizer_type, optimizer_kwargs), device, location, {})


def _fuse(
    model: nn.Module,
    optimizer: tuple[type[torch.optim.Optimizer], dict[str, Any]],
    device: torch.device | str | None,
    location: EmbeddingLocation | None,
    done: dict[nn.Module, nn.Module],
) -> nn.Module:
    if model not in done:
        done[model] = model
        if isinstance(model, TableCollection):
            where = model.device if device is None else torch.device(device)
            done[model] = _fused_twin(model, *optimizer, where, location)
        else:
            # not named_children, which leaves out a module that it has met before
            for name, child in model._modules.items():
                if child is not None:
                    setattr(model, name, _fuse(child, optimizer, device, location, done))
    return done[model]


def _fused_twin(
    model: TableCollection,
    optimizer_type: type[torch.optim.Optimizer],
    optimizer_kwargs: dict[str, Any],
    device: torch.device,
    location: EmbeddingLocation | None,
) -> nn.Module:
    if isinstance(model, _Fused):
        return model
    model._settle()
    for config, param in zip(model._configs, model._table_parameters(), strict=True):
        if optimizer_of(param) is not None:
            raise ValueError(f"table {config.name!r} already has an optimizer in the backward: a table takes one")
    twin: _Fused
    # on meta, so that nothing is drawn or allocated twice
    if type(model) is EmbeddingBagCollection:
        twin = FusedEmbeddingBagCollection(
            model.embedding_bag_configs(), optimizer_type, optimizer_kwargs, model.is_weighted(), "meta",
            policy=model._policy,
        )  # fmt: skip
    elif type(model) is EmbeddingCollection:
        twin = FusedEmbeddingCollection(
            model.embedding_configs(), optimizer_type, optimizer_kwargs, "meta", model.need_indices(),
            policy=model._policy,
        )  # fmt: skip
    else:
        apply_optimizer_in_backward(optimizer_type, model._table_parameters(), optimizer_kwargs)
        model._settle()
        return model.to(device) if device != model.device else model
    twin._become_twin(model, device)
    twin._lie(location)
    return twin
