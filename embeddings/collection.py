"""What the two collections share: tables in groups, parameters as views of them, features picked from a KJT.

A table is a parameter of a child module (state-dict name `<children>.<table>.weight`) and at the same time a view of
its group's flat buffer. `.to()`, loading, copying and pickling keep both the same memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.jagged import KeyedJaggedTensor
from shardwise.kernels import BoundsCheckMode

from .config import BaseEmbeddingConfig, data_type_to_dtype, embedding_names_by_table, named_tables
from .keyed_optimizer import FusedOptimizer
from .optimizers import OptimizerSpec, mark_optimizer, optimizer_of, optimizer_spec
from .table_group import LookupFeature, TableGroup, TableShape


class TableCollection(nn.Module):
    """Tables of a collection, grouped by dtype and optimizer; the base of the pooled and the sequence collection."""

    _children_name: str

    def __init__(
        self,
        tables: Sequence[BaseEmbeddingConfig],
        device: torch.device | str | None,
        bounds_check: BoundsCheckMode = BoundsCheckMode.FATAL,
    ) -> None:
        super().__init__()
        self._configs = named_tables(list(tables), type(self).__name__)
        self._names_by_table = embedding_names_by_table(self._configs)
        self._bounds_check = bounds_check
        self._marks: list[tuple[type[torch.optim.Optimizer], dict[str, Any]] | None] = [None] * len(tables)
        self._trained = [True] * len(tables)
        self._group([data_type_to_dtype(config.data_type) for config in self._configs], torch.device(device or "cpu"))
        self._make_children()
        self.reset_parameters()

    @property
    def device(self) -> torch.device:
        """Where the tables are."""
        return self._groups[0].flat.device if self._groups else torch.device("cpu")

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Fill every table by its config's `init_fn`; on meta there is nothing to fill."""
        for config, param in zip(self._configs, self._table_parameters(), strict=True):
            if not param.is_meta:
                config.init_fn(param)

    def fused_optimizer(self) -> FusedOptimizer:
        """The optimizer that the tables run in their backward: its learning rates and states."""
        self._fuse_marked_tables()
        names = [[f"{self._children_name}.{table.name}.weight" for table in group.tables] for group in self._groups]
        return FusedOptimizer(self._groups, names)

    def check(self) -> None:
        """Raise now what a bad id on CUDA would raise at the next forward."""
        for group in self._groups:
            group.raise_pending()

    def _lookup(
        self, features: KeyedJaggedTensor, look_up: Callable[[TableGroup, KeyedJaggedTensor], Tensor]
    ) -> list[tuple[KeyedJaggedTensor, Tensor]]:
        """Pick, check and look up the features of each group."""
        self._fuse_marked_tables()
        if not isinstance(features, KeyedJaggedTensor):
            raise TypeError(f"{type(self).__name__} takes a KeyedJaggedTensor, got {type(features).__name__}")
        if features.variable_stride_per_key():
            raise ValueError(
                f"{type(self).__name__} takes one batch size for all features, got {features.stride_per_key()}"
                f" for {features.keys()}"
            )
        found = []
        for group in self._groups:
            picked = pick_features(features, [f.name for f in group.lookups])
            if picked.device() != group.flat.device:
                raise ValueError(f"ids are on {picked.device()}, the tables on {group.flat.device}")
            group.check(picked.values(), picked.offsets())
            found.append((picked, look_up(group, picked)))
        return found

    def _group(self, dtypes: Sequence[torch.dtype], device: torch.device) -> None:
        """Make the groups; tables of one dtype and optimizer share one, in the order of their configs."""
        specs = [self._spec_of(t) for t in range(len(self._configs))]
        members: dict[tuple[torch.dtype, OptimizerSpec | None], list[int]] = {}
        for t, key in enumerate(zip(dtypes, specs, strict=True)):
            members.setdefault(key, []).append(t)
        self._members = list(members.values())
        self._groups = []
        for (dtype, spec), group_tables in members.items():
            configs = [self._configs[t] for t in group_tables]
            shapes = [TableShape(config.name, config.num_embeddings, config.embedding_dim) for config in configs]
            lookups = [
                LookupFeature(feature, number, self._is_averaged(config))
                for number, config in enumerate(configs)
                for feature in config.feature_names
            ]
            self._groups.append(
                TableGroup(shapes, lookups, dtype=dtype, device=device, optimizer=spec, bounds_check=self._bounds_check)
            )

    def _make_children(self) -> None:
        """Parameters as views of the groups, each in a child module of its table's name."""
        children = nn.ModuleDict()
        views = {t: group.view(n) for group, ts in self._grouped() for n, t in enumerate(ts)}
        for t, config in enumerate(self._configs):
            children[config.name] = self._child(config, views[t])
        self.add_module(self._children_name, children)
        self._adopt_parameters()

    def _adopt_parameters(self) -> None:
        params = self._table_parameters()
        for t, mark in enumerate(self._marks):
            if mark is not None:
                mark_optimizer(params[t], *mark)
        for group, tables in self._grouped():
            group.parameters = [params[t] for t in tables]

    def _fuse_marked_tables(self) -> None:
        """Regroup once optimizers were applied to the parameters; the parameters stay the same objects."""
        params = self._table_parameters()
        if not any(
            mark is None and hasattr(p, "_optimizer_classes") for mark, p in zip(self._marks, params, strict=True)
        ):
            return
        self._marks = [optimizer_of(param) for param in params]
        self._trained = [param.requires_grad for param in params]
        values = [param.detach() for param in params]
        self._group([param.dtype for param in params], self.device)
        for group, tables in self._grouped():
            for number, t in enumerate(tables):
                view = group.view(number)
                if not view.is_meta:
                    view.copy_(values[t])
                params[t].data = view
            group.parameters = [params[t] for t in tables]

    def _spec_of(self, t: int) -> OptimizerSpec | None:
        # a frozen table keeps its rows, whatever was applied to it
        mark = self._marks[t] if self._trained[t] else None
        return None if mark is None else optimizer_spec(*mark, table=self._configs[t].name)

    def _grouped(self) -> list[tuple[TableGroup, list[int]]]:
        return list(zip(self._groups, self._members, strict=True))

    def _table_parameters(self) -> list[nn.Parameter]:
        children = self._modules[self._children_name]
        assert isinstance(children, nn.ModuleDict)
        return [child._parameters["weight"] for child in children.values()]  # type: ignore[misc]

    def _is_averaged(self, config: BaseEmbeddingConfig) -> bool:
        return False

    def _child(self, config: BaseEmbeddingConfig, weight: Tensor) -> nn.Module:
        raise AssertionError("each collection makes its own children")

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> TableCollection:
        children = self._modules[self._children_name]
        assert isinstance(children, nn.ModuleDict)
        move_tables(self._groups, children, fn)
        return self

    def __getstate__(self) -> dict[str, Any]:
        # the parameters are views: kept, each of them would carry its group's whole buffer into the copy
        modules = {name: module for name, module in self._modules.items() if name != self._children_name}
        trained = [param.requires_grad for param in self._table_parameters()]
        return {**self.__dict__, "_modules": modules, "_trained": trained}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._make_children()
        for param, requires_grad in zip(self._table_parameters(), self._trained, strict=True):
            param.requires_grad_(requires_grad)


def move_tables(groups: Sequence[TableGroup], children: nn.ModuleDict, fn: Callable[[Tensor], Tensor]) -> None:
    """`nn.Module._apply` for tables: each parameter on its own would be torn out of its group's buffer.

    `children[table]` holds the parameter of each table. Across meta and a real device parameters become new objects.
    """
    for group in groups:
        group.move(fn)
        group.parameters = [
            _move_parameter(children[table.name], group.view(number), fn) for number, table in enumerate(group.tables)
        ]


def _move_parameter(child: nn.Module, view: Tensor, fn: Callable[[Tensor], Tensor]) -> nn.Parameter:
    old = child._parameters["weight"]
    assert old is not None
    grad = None if old.grad is None else fn(old.grad)
    param = old
    if old.is_meta == view.is_meta:
        old.data = view
    else:
        param = nn.Parameter(view, requires_grad=old.requires_grad)
        vars(param).update(vars(old))
        child._parameters["weight"] = param
    param.grad = grad
    return param


def pick_features(features: KeyedJaggedTensor, names: Sequence[str]) -> KeyedJaggedTensor:
    """The named features in that order, a name as often as it is listed.

    Raises:
        KeyError: names the features that are missing.
    """
    keys = features.keys()
    if list(names) == list(keys):
        return features
    place = {key: number for number, key in enumerate(keys)}
    missing = [name for name in names if name not in place]
    if missing:
        raise KeyError(f"features {missing} are not in the batch, which has {list(keys)}")
    return features.permute([place[name] for name in names])
