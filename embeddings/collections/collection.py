"""The base of the two collections: tables in groups, parameters as views of them, features picked from a KJT.

A table is a parameter of a child module (state-dict name `<children>.<table>.weight`) and at the same time a view of
its group's flat buffer. `.to()`, loading, copying and pickling keep both the same memory.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, cast
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from shardwise.errors import RefusedValueError
from shardwise.jagged import KeyedJaggedTensor

from ..config import (
    BaseEmbeddingConfig,
    embedding_names_by_table,
    named_tables,
    table_dtype,
)
from ..optim.fused_optimizer import FusedOptimizer
from ..optim.optimizers import mark_optimizer, optimizer_in_backward, optimizer_spec
from ..policy import DEFAULT_POLICY, LookupPolicy
from ..tables.grouped import Found, SharedFeatures, look_up_groups, plan_columns, shared_features
from ..tables.row_sums import Accumulation
from ..tables.table_group import TableGroup
from ..tables.table_layout import LookupFeature, OptimizerSpec, TableShape
from ..tables.table_module import TableModule
from .parameters import (
    adopt,
    carry_marks,
    given_group,
    loose_tables,
    memory,
    move_tables,
    replace,
    require_one_dtype,
    require_shapes,
    take_back,
    take_memory_back,
)

# threads that look up in one collection, or plan for it, follow its parameters one by one
_FOLLOWING = threading.RLock()


class TableCollection(TableModule):
    """Tables of a collection, grouped by dtype and optimizer; the base of the pooled and the sequence collection."""

    _config_type: type[BaseEmbeddingConfig] = BaseEmbeddingConfig
    # tables whose weight is no view of their group's buffer
    _loose: tuple[int, ...] = ()
    _shared_features: SharedFeatures | None = None

    def __init__(
        self,
        tables: Sequence[BaseEmbeddingConfig],
        device: torch.device | str | None,
        policy: LookupPolicy = DEFAULT_POLICY,
    ) -> None:
        super().__init__()
        if not isinstance(policy, LookupPolicy):
            raise TypeError(f"policy must be a LookupPolicy, got {policy!r}")
        self._configs = named_tables(list(tables), type(self).__name__, self._config_type)
        self._names_by_table = embedding_names_by_table(self._configs)
        self._all_features = [feature for config in self._configs for feature in config.feature_names]
        self._policy = policy
        self._marks: list[tuple[type[torch.optim.Optimizer], dict[str, Any]] | None] = [None] * len(tables)
        self._trained = [True] * len(tables)
        self._groups: list[TableGroup] = []
        self._members: list[list[int]] = []
        self._fused_optimizer: FusedOptimizer | None = None
        self._accumulation = Accumulation()
        self._seen: list[bool] = []
        self._seen_memory: list[int] = []
        self._group(
            [table_dtype(config) for config in self._configs],
            torch.get_default_device() if device is None else torch.device(device),
        )
        self._make_children()
        self.register_load_state_dict_pre_hook(_settle_before_load)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_post_hook(_take_back_replaced)  # type: ignore[no-untyped-call]
        self._settle()
        self.reset_parameters()

    @property
    def device(self) -> torch.device:
        """Where the tables are."""
        return self._table_parameters()[0].device if self._groups else torch.device("cpu")

    @property
    def _device(self) -> torch.device:
        """`device`, by the name of TorchRec's attribute."""
        return self.device

    @property
    def _feature_names(self) -> list[list[str]]:
        """The features of each table, by the name of TorchRec's attribute."""
        return [config.feature_names for config in self._configs]

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Fill every table by its config's `init_fn`; on meta there is nothing to fill."""
        for config, param in zip(self._configs, self._table_parameters(), strict=True):
            if not param.is_meta:
                config.init_fn(param)

    def fused_optimizer(self) -> FusedOptimizer:
        """The optimizer that the tables run in their backward: its learning rates and states. One object, kept."""
        self._settle()
        if self._fused_optimizer is None:
            self._fused_optimizer = FusedOptimizer(self._groups, self._children_name)
        return self._fused_optimizer

    def renew_rows(self, table: str, rows: Tensor, values: Tensor, *, quietly: bool = False) -> None:
        """Have rows [n] of a table begin anew. Arguments as `TableGroup.renew`."""
        self._settle()
        names = [config.name for config in self._configs]
        group, number = self._homes()[names.index(table)]
        group.renew(number, rows, values, quietly=quietly)

    def check(self) -> None:
        """Raise now what a bad id on CUDA would raise at the next forward.

        Until it is raised no table is updated, whichever batch the update is of: a lookup of a bad batch also stops
        the update of one that was looked up before and has its backward after. Replays of a captured graph leave what
        they find until this raises it, or the second eager forward after them.
        """
        for group in self._groups:
            group.check.raise_pending()

    def _lookup(self, features: KeyedJaggedTensor, look_up: Callable[[TableGroup, KeyedJaggedTensor], Tensor]) -> Found:
        """Pick, check and look up the features of each group, of a batch of one batch size."""
        if not torch.compiler.is_compiling():
            self._settle()
            if self._loose:
                return look_up_groups(self._given_groups(), features, look_up, self._shared_features)
        elif self._seen != self._facts(self._table_parameters()):
            # a graph cannot regroup tables, and traced as they are they would be trained by the slow dense path
            raise RuntimeError(
                f"{type(self).__name__}: an optimizer was applied or a table frozen since the last lookup;"
                " call fused_optimizer() or look one batch up before torch.compile traces the collection"
            )
        return look_up_groups(self._groups, features, look_up, self._shared_features)

    def _group(self, dtypes: Sequence[torch.dtype], device: torch.device) -> None:
        """Make the groups; tables of one dtype and optimizer share one, in the order of their configs.

        Tables that an optimizer trains already stay apart from those that join it now: they have other steps behind
        them.
        """
        before = self._homes()
        members: dict[tuple[torch.dtype, OptimizerSpec | None, int | None], list[int]] = {}
        for t, dtype in enumerate(dtypes):
            home = before.get(t, (None, 0))[0]
            fused = home is not None and home.optimizer is not None
            # a frozen table has no use for an optimizer's states
            mark = self._marks[t] if self._trained[t] or fused else None
            spec = None if mark is None else optimizer_spec(*mark, table=self._configs[t].name)
            members.setdefault((dtype, spec, id(home) if fused else None), []).append(t)
        self._members = list(members.values())
        self._groups = []
        self._fused_optimizer = None
        self._seen = []
        for (dtype, spec, _), group_tables in members.items():
            configs = [self._configs[t] for t in group_tables]
            shapes = [TableShape(config.name, config.num_embeddings, config.embedding_dim) for config in configs]
            lookups = [
                LookupFeature(feature, number, self._is_averaged(config))
                for number, config in enumerate(configs)
                for feature in config.feature_names
            ]
            self._groups.append(
                TableGroup(shapes, lookups, dtype=dtype, device=device, optimizer=spec, policy=self._policy)
            )
        self._columns = plan_columns(self._groups, self._members, self._names_by_table)
        self._shared_features = shared_features(self._members, [config.feature_names for config in self._configs])
        self._share_guard()

    def _share_guard(self) -> None:
        """A batch that is bad for one group changes no table of the collection; they accumulate gradients together."""
        for group in self._groups:
            group.accumulation = self._accumulation
            group.check.share(self._groups[0].check)

    @torch.no_grad()
    def _become_twin(self, source: TableCollection, device: torch.device) -> None:
        """Take dtypes, weights and frozen tables of a collection with the same configs, on `device`."""
        params = source._table_parameters()
        self._trained = [param.requires_grad for param in params]
        # nothing of the groups made so far stays: frozen tables get no states
        self._groups, self._members = [], []
        self._group([param.dtype for param in params], device)
        self._make_children()
        for own, param in zip(self._table_parameters(), params, strict=True):
            own.requires_grad_(param.requires_grad)
            if not param.is_meta and not own.is_meta:
                own.copy_(param)
        if any(param.is_meta for param in params):
            self.reset_parameters()
        self.train(source.training)
        self._settle()

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

    def _settle(self, *, partly_on_meta: bool = False) -> None:
        """Follow what was done to the parameters since the last lookup: optimizers, freezing, other memory, others.

        Args:
            partly_on_meta: some tables may have memory and others not; those wait.

        Raises:
            ValueError: a weight has another shape, or is where the other tables are not; names the table.
        """
        params = self._table_parameters()
        if self._seen_memory == memory(params) and self._seen == self._facts(params):
            return
        if partly_on_meta and len({param.is_meta for param in params}) > 1:
            return
        # never traced by torch.compile, which loses `param.data = ...`; not imported just for this
        dynamo: Any = sys.modules.get("torch._dynamo")
        follow = self._follow if dynamo is None else dynamo.disable(self._follow)
        follow()

    # every lookup asks this of every table, as torch tells nobody what is done to a parameter
    def _facts(self, params: Sequence[nn.Parameter]) -> list[bool]:
        """Whether each is trained, then whether an optimizer was applied to each; `torch.compile` can trace this."""
        trained = [param.requires_grad for param in params]
        # one that is applied to a table that has one changes nothing
        if not [group for group in self._groups if group.optimizer is None]:
            return trained
        return trained + [hasattr(param, "_optimizer_classes") for param in params]

    def _follow(self) -> None:
        with _FOLLOWING:
            params = self._table_parameters()
            # another thread may have followed meanwhile
            if self._seen_memory != memory(params) or self._seen != self._facts(params):
                self._follow_parameters(params)

    @torch.no_grad()
    def _follow_parameters(self, params: Sequence[nn.Parameter]) -> None:
        self._loose = loose_tables(params, [config.name for config in self._configs])
        own, regroups = self._own(params), False
        for group, tables in self._grouped():
            members = {n: own[t] for n, t in enumerate(tables)}
            require_shapes(group, members)
            given = {n: param for n, param in members.items() if param is not group.parameters[n]}
            for n, param in members.items():
                if n not in given:
                    take_memory_back(param, group.view(n))
            carry_marks(group, given)
            if given and require_one_dtype(group, members):
                adopt(group, given)
            elif given:
                regroups = True
        if regroups or any(self._is_to_be_fused(t, param) for t, param in enumerate(own)):
            self._regroup(own)
        self._share_guard()
        self._seen = self._facts(params)
        self._seen_memory = memory(params)
        if self._fused_optimizer is not None:
            self._fused_optimizer._follow()

    def _own(self, params: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        """What are views of the groups: of loose tables that which was there before."""
        own = list(params)
        homes = self._homes() if self._loose else {}
        for t in self._loose:
            group, number = homes[t]
            own[t] = group.parameters[number]
        return own

    def _own_parameters(self) -> list[nn.Parameter]:
        """The tables' parameters, settled.

        Raises:
            ValueError: a weight is no parameter of its own; names the tables.
        """
        self._settle()
        if self._loose:
            names = [self._configs[t].name for t in self._loose]
            raise ValueError(
                f"tables {names}: their weight is no parameter of their own (a tensor in its place, one that tables"
                " share, or what a parametrization computes), which is looked up but not copied, pickled or sharded:"
                " give each table an nn.Parameter"
            )
        return self._table_parameters()

    def _given_groups(self) -> list[TableGroup]:
        """The groups, those of loose tables over the weights of this lookup."""
        params, loose = self._table_parameters(), set(self._loose)
        return [
            given_group(group, [params[t] for t in tables]) if loose.intersection(tables) else group
            for group, tables in self._grouped()
        ]

    def _is_to_be_fused(self, t: int, param: nn.Parameter) -> bool:
        if self._marks[t] is None:
            return hasattr(param, "_optimizer_classes") and optimizer_in_backward(param) is not None
        # frozen when it was marked
        return param.requires_grad and self._homes()[t][0].optimizer is None

    def _regroup(self, params: Sequence[nn.Parameter]) -> None:
        """Group anew once optimizers were applied or dtypes differ; states stay with their tables.

        Raises:
            RuntimeError: gradients of the tables wait for a step.
            ValueError: a DistributedDataParallel averages gradients of the tables.
        """
        marks = [optimizer_in_backward(param) for param in params]
        fused = [config.name for config, mark in zip(self._configs, marks, strict=True) if mark]
        if fused and is_replicated(self):
            raise refuse_replicas_of(fused[0])
        self._marks = marks
        self._trained = [param.requires_grad for param in params]
        before = self._homes()
        if self._accumulation.begun:
            raise RuntimeError(
                f"{type(self).__name__}: gradients wait for a step: call step() or zero_grad() of fused_optimizer()"
                " before an optimizer is applied to more tables"
            )
        self._group([param.dtype for param in params], params[0].device)
        for group, tables in self._grouped():
            for number, t in enumerate(tables):
                source, place = before[t]
                if not group.flat.is_meta:
                    group.copy_from(number, source, place)
                if params[t] is not source.parameters[place]:
                    replace(source, place, params[t], group.view(number))
                params[t].data = group.view(number)
            group.parameters = [params[t] for t in tables]

    def _homes(self) -> dict[int, tuple[TableGroup, int]]:
        """Each table's group and its number there."""
        return {t: (group, number) for group, tables in self._grouped() for number, t in enumerate(tables)}

    def _grouped(self) -> list[tuple[TableGroup, list[int]]]:
        return list(zip(self._groups, self._members, strict=True))

    def _table_parameters(self) -> list[nn.Parameter]:
        # every forward asks: not by `_children`, a call more
        children = self._modules[self._children_name]
        assert isinstance(children, nn.ModuleDict)
        try:
            return [child._parameters["weight"] for child in children.values()]  # type: ignore[misc]
        except KeyError:
            # a parametrization computes it
            return [cast(nn.Parameter, child.weight) for child in children.values()]

    def _is_averaged(self, config: BaseEmbeddingConfig) -> bool:
        return False

    def _child(self, config: BaseEmbeddingConfig, weight: Tensor) -> nn.Module:
        raise AssertionError("each collection makes its own children")

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        self._settle()
        if recurse:
            move_tables(self._groups, self._children(), fn)
            self._share_guard()
        return super()._apply(fn, recurse)

    def __copy__(self) -> TableCollection:
        # shares everything, as a shallow copy of any module does
        copied = type(self).__new__(type(self))
        copied.__dict__.update(self.__dict__)
        return copied

    def __getstate__(self) -> dict[str, Any]:
        trained = [param.requires_grad for param in self._own_parameters()]
        # the parameters are views: kept, each of them would carry its group's whole buffer into the copy
        modules = {**self._modules, self._children_name: None}
        return {**self.__dict__, "_modules": modules, "_trained": trained, "_fused_optimizer": None, "_seen_memory": []}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._all_features = [feature for config in self._configs for feature in config.feature_names]
        self._make_children()
        for param, requires_grad in zip(self._table_parameters(), self._trained, strict=True):
            param.requires_grad_(requires_grad)
        self._settle()


def _settle_before_load(module: nn.Module, *_: Any) -> None:
    """Before `load_state_dict`: parameters that took the place of the collection's own are its own by now."""
    assert isinstance(module, TableCollection)
    module._settle(partly_on_meta=True)


@torch.no_grad()
def _take_back_replaced(module: nn.Module, _: Any) -> None:
    take_back(module)


def require_batch(features: object, who: str, weighted: bool) -> None:
    """Refuse what no lookup takes; `who` is the collection, for the message.

    Raises:
        TypeError: it is no KeyedJaggedTensor.
        ValueError: features differ in batch size, or a weighted collection got no weights.
    """
    features = require_features(features, who, weighted)
    if features.variable_stride_per_key():
        raise ValueError(
            f"{who} takes one batch size for all features, got {features.stride_per_key()} for {features.keys()}"
        )


_ID_DTYPES = frozenset({torch.int64, torch.int32})


def require_features(features: object, who: str, weighted: bool) -> KeyedJaggedTensor:
    """As `require_batch`, but features may differ in batch size; returns them, with ids."""
    if not isinstance(features, KeyedJaggedTensor):
        raise TypeError(f"{who} takes a KeyedJaggedTensor, got {type(features).__name__}")
    if weighted:
        weights = features.weights_or_none()
        if weights is None:
            raise RefusedValueError(
                "This (Keyed)JaggedTensor doesn't have weights. This collection is weighted: the batch must carry"
                " per-id weights"
            )
        if weights.ndim != 1:
            raise ValueError(f"{who} takes a weight for each id, got weights of shape {list(weights.shape)}")
    values = features._values
    if values.ndim == 1 and values.dtype in _ID_DTYPES:
        return features
    if values.ndim != 1:
        raise ValueError(
            f"{who} looks ids up, [N]: got values of shape {list(values.shape)} for {features.keys()}; rows that travel"
            " as values are read by to_dict()"
        )
    # torch.tensor([]) is float: it holds no ids
    return features if values.shape[0] else without_ids(features)


def without_ids(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """A batch without values, of whatever dtype, as one without ids."""
    variable = features.variable_stride_per_key()
    weights = features.weights_or_none()
    return KeyedJaggedTensor(
        features.keys(), features.values().new_empty(0, dtype=torch.int64),
        None if weights is None else weights.new_empty(0), features.lengths(), stride=features.stride(),
        stride_per_key_per_rank=features.stride_per_key_per_rank() if variable else None,
        inverse_indices=features.inverse_indices_or_none(), capacity=features.capacity(),
    )  # fmt: skip


# collections that a DistributedDataParallel holds, and which
_wrapped: WeakKeyDictionary[nn.Module, ReferenceType[nn.Module]] = WeakKeyDictionary()


def refuse_replicas_of(table: str) -> ValueError:
    """The error that names a table and what to use instead."""
    return ValueError(
        f"DistributedDataParallel around table {table!r}, which has an optimizer in the backward: the table has no"
        " gradient to average, so each rank would train it by its own batch alone. Wrap the model in"
        " shardwise.sharding.DistributedModelParallel, where dense layers are data parallel and tables sharded or"
        " replicated (data_parallel()); or leave the optimizer out of the backward: an ordinary one steps the table"
    )


def is_replicated(collection: nn.Module) -> bool:
    """Whether a DistributedDataParallel that is alive averages the gradients of this collection's tables."""
    wrapper = _wrapped.get(collection)
    return wrapper is not None and wrapper() is not None


def _refuse_replicas(wrapper: nn.Module, name: str, module: nn.Module | None) -> None:
    """Refuse a DistributedDataParallel around tables that their own backward trains, where it is built.

    It averages the gradients of parameters, and such tables have none: each rank would train them by its own batch
    alone. Called by torch whenever a module gets another as its child.
    """
    if name != "module" or module is None or not isinstance(wrapper, DistributedDataParallel):
        return
    ignored: set[str] = getattr(wrapper, "parameters_to_ignore", set())
    for path, inner_module in module.named_modules():
        # collections, and sharded ones
        if not hasattr(inner_module, "_children_name"):
            continue
        below = {f"{path}.{inner}" if path else inner: param for inner, param in inner_module.named_parameters()}
        averaged = {full: param for full, param in below.items() if full not in ignored}
        for full, param in averaged.items():
            # frozen ones too: they may train later, and the wrapper reads the marks of all
            if hasattr(param, "_optimizer_classes"):
                raise refuse_replicas_of(full.removesuffix(".weight").rpartition(".")[2])
        if averaged:
            _wrapped[inner_module] = ref(wrapper)


# not DistributedDataParallel's own attributes: a hook of torch.nn is the same in every version and order of imports
register_module_module_registration_hook(_refuse_replicas)
