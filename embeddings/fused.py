"""Collections that are born with their optimizer in the backward, and the switch of a whole model to them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .bag_collection import EmbeddingBagCollection
from .config import EmbeddingBagConfig, EmbeddingConfig
from .optimizers import apply_optimizer_in_backward
from .sequence_collection import EmbeddingCollection


class FusedEmbeddingBagCollection(EmbeddingBagCollection):
    """An `EmbeddingBagCollection` whose backward trains its tables with one optimizer.

    Args:
        tables, is_weighted, device: as `EmbeddingBagCollection`.
        optimizer_type: torch.optim.SGD, Adagrad or Adam, or `RowWiseAdagrad`.
        optimizer_kwargs: its keyword arguments, `lr` first of all (default 0.01).

    Raises:
        ValueError: the optimizer has no fused rule, or an argument that the rule does not take.
    """

    def __init__(
        self,
        tables: list[EmbeddingBagConfig],
        optimizer_type: type[torch.optim.Optimizer],
        optimizer_kwargs: dict[str, Any],
        is_weighted: bool = False,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(tables, is_weighted, device)
        self._optimizer = (optimizer_type, optimizer_kwargs)
        apply_optimizer_in_backward(optimizer_type, self.parameters(), optimizer_kwargs)
        self._fuse_marked_tables()

    def optimizer_type(self) -> type[torch.optim.Optimizer]:
        """The optimizer's class."""
        return self._optimizer[0]

    def optimizer_kwargs(self) -> dict[str, Any]:
        """The optimizer's keyword arguments as given."""
        return self._optimizer[1]


class FusedEmbeddingCollection(EmbeddingCollection):
    """An `EmbeddingCollection` whose backward trains its tables; arguments as `FusedEmbeddingBagCollection`."""

    def __init__(
        self,
        tables: list[EmbeddingConfig],
        optimizer_type: type[torch.optim.Optimizer],
        optimizer_kwargs: dict[str, Any],
        device: torch.device | str | None = None,
        need_indices: bool = False,
    ) -> None:
        super().__init__(tables, device, need_indices)
        self._optimizer = (optimizer_type, optimizer_kwargs)
        apply_optimizer_in_backward(optimizer_type, self.parameters(), optimizer_kwargs)
        self._fuse_marked_tables()

    def optimizer_type(self) -> type[torch.optim.Optimizer]:
        """The optimizer's class."""
        return self._optimizer[0]

    def optimizer_kwargs(self) -> dict[str, Any]:
        """The optimizer's keyword arguments as given."""
        return self._optimizer[1]


def fuse_embedding_optimizer(
    model: nn.Module,
    optimizer_type: type[torch.optim.Optimizer],
    optimizer_kwargs: dict[str, Any],
    device: torch.device | str | None = None,
) -> nn.Module:
    """Replace every `EmbeddingBagCollection` and `EmbeddingCollection` of `model` by its fused twin, weights kept.

    `device` is where the twins go; by default each stays where it is. Returns the model, or the twin if `model` itself
    is a collection.
    """
    fused: nn.Module | None = None
    if type(model) is EmbeddingBagCollection:
        fused = FusedEmbeddingBagCollection(
            model.embedding_bag_configs(), optimizer_type, optimizer_kwargs, model.is_weighted(), device or model.device
        )
    elif type(model) is EmbeddingCollection:
        fused = FusedEmbeddingCollection(
            model.embedding_configs(), optimizer_type, optimizer_kwargs, device or model.device, model.need_indices()
        )
    if fused is not None:
        if not any(param.is_meta for param in model.parameters()):
            fused.load_state_dict(model.state_dict())
        return fused
    for name, child in model.named_children():
        setattr(model, name, fuse_embedding_optimizer(child, optimizer_type, optimizer_kwargs, device))
    return model
