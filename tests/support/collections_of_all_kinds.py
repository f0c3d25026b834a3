"""Every kind of collection on any device (`MAKERS`), and how programs give one that was made on meta its memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from shardwise import (
    DataType,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    FusedEmbeddingBagCollection,
    FusedEmbeddingCollection,
    KeyedJaggedTensor,
    RowWiseAdagrad,
)
from shardwise.embeddings import (
    EmbeddingTower,
    EmbeddingTowerCollection,
    FeatureProcessedEmbeddingBagCollection,
    PositionWeightedModule,
    PositionWeightedModuleCollection,
)
from shardwise.embeddings.managed_collision import (
    LFU_EvictionPolicy,
    ManagedCollisionCollection,
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
    MCHManagedCollisionModule,
)

BAGS = {"f": [[1, 2], [], [4]], "g": [[0], [3, 3], [1]]}


def configs() -> list[EmbeddingBagConfig]:
    return [
        EmbeddingBagConfig(5, 4, "a", feature_names=["f"]),
        EmbeddingBagConfig(6, 4, "b", feature_names=["g"]),
        EmbeddingBagConfig(7, 3, "c", feature_names=["f"], data_type=DataType.FP16),
    ]


def row_configs() -> list[EmbeddingConfig]:
    return [EmbeddingConfig(5, 4, "a", feature_names=["f"]), EmbeddingConfig(6, 4, "b", feature_names=["g"])]


def bags(device: str = "cpu", **more: Any) -> EmbeddingBagCollection:
    return EmbeddingBagCollection(configs(), device=device, **more)


def fused(device: str = "cpu") -> FusedEmbeddingBagCollection:
    return FusedEmbeddingBagCollection(configs(), RowWiseAdagrad, {"lr": 0.1}, device=device)


def behind_maps(kind: Any, collection: Any, tables: Any, device: str) -> nn.Module:
    maps = {t.name: MCHManagedCollisionModule(t.num_embeddings, device, LFU_EvictionPolicy(), 2) for t in tables}
    return kind(collection(tables, device=device), ManagedCollisionCollection(maps, tables))  # type: ignore[no-any-return]


class Model(nn.Module):
    """A collection, rows of another and a dense layer."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.bags, self.rows = bags(device), EmbeddingCollection(row_configs(), device=device)
        self.over = nn.Linear(11, 2, device=device)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        rows = torch.cat([jt.values() for jt in self.rows(features).values()])
        return self.over(self.bags(features).values()) * rows.sum()  # type: ignore[no-any-return]


MAKERS: dict[str, Callable[[str], nn.Module]] = {
    "bags": bags,
    "rows": lambda device: EmbeddingCollection(row_configs(), device=device),
    "fused bags": fused,
    "fused rows": lambda device: FusedEmbeddingCollection(row_configs(), torch.optim.Adam, {"lr": 0.1}, device=device),
    "bags behind maps": lambda device: behind_maps(
        ManagedCollisionEmbeddingBagCollection, EmbeddingBagCollection, configs(), device
    ),
    "rows behind maps": lambda device: behind_maps(
        ManagedCollisionEmbeddingCollection, EmbeddingCollection, row_configs(), device
    ),
    "feature processors": lambda device: FeatureProcessedEmbeddingBagCollection(
        bags(device, is_weighted=True), {name: PositionWeightedModule(3, device) for name in BAGS}
    ),
    "collection of feature processors": lambda device: FeatureProcessedEmbeddingBagCollection(
        bags(device, is_weighted=True), PositionWeightedModuleCollection(dict.fromkeys(BAGS, 3), device)
    ),
    "towers": lambda device: EmbeddingTowerCollection([EmbeddingTower(bags(device), Values())]),
    "model": Model,
}


class Values(nn.Module):
    """What is looked up, as a tensor."""

    def forward(self, looked_up: Any) -> Tensor:
        return looked_up.values()  # type: ignore[no-any-return]


def give_memory(module: nn.Module) -> None:
    """How programs give a model that was made on meta its memory: for `module.apply`."""
    for name, param in module._parameters.items():
        if param is not None and param.is_meta:
            module._parameters[name] = nn.Parameter(torch.empty_like(param, device="cpu"), param.requires_grad)
    for name, buffer in module._buffers.items():
        if buffer is not None and buffer.is_meta:
            module._buffers[name] = torch.zeros_like(buffer, device="cpu")
    reset: Any = getattr(module, "reset_parameters", None)
    if reset is not None:
        reset()


def values_of(output: Any) -> Tensor:
    output = output[0] if isinstance(output, tuple) else output
    if isinstance(output, dict):
        return torch.cat([jt.values() for jt in output.values()])
    return output if isinstance(output, Tensor) else output.values()  # type: ignore[no-any-return]
