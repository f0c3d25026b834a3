"""`DistributedModelParallel`: plan, shard and run a model whose tables are spread over ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.fx import Proxy
from torch.fx.proxy import TraceError

from shardwise.embeddings import CombinedOptimizer, KeyedOptimizer, optimizer_of
from shardwise.jagged import KeyedJaggedTensor
from shardwise.kernels._op import in_graph

from ..comms.agreement import Facts, facts_of_dense
from ..comms.env import ShardingEnv, default_env
from ..comms.exchange import hang_up
from ..comms.watch import watch_over
from ..compiled.registry import NamedInGraphs, name_for_graphs
from ..engine.reshard import changes_of, reshard_by_plan
from ..engine.state import check_weights, take_over
from ..engine.writing import write_rows
from ..modules.default_sharders import get_default_sharders
from ..modules.placement import (
    Place,
    agree_on_plan,
    find_places,
    shard_places,
    sharded_collections,
    warn_of_optimizers,
)
from ..plan.device_fallback import device_here, quiet_without_cuda
from ..plan.module_sharder import ModuleSharder
from ..plan.plan import EmbeddingModuleShardingPlan, ShardingPlan
from ..plan.sharded_module import ShardedModule
from ..planning.planners import plan_for
from .compiled import forward_in_graph
from .data_parallel import (
    DataParallelWrapper,
    DefaultDataParallelWrapper,
    materialize,
    move,
)
from .unwrap import copy_to_device, get_unwrapped_module


class DistributedModelParallel(NamedInGraphs):
    """A model whose embedding collections are sharded over ranks and whose other layers are data parallel.

    Collections are replaced in place in `module`; their weights are kept (those on meta are initialised). Dense layers
    are wrapped in DistributedDataParallel. Apply optimizers to tables (`apply_optimizer_in_backward`) before; a sharded
    table without one trains with SGD at lr 0.01, as in TorchRec, and a warning says so.

    Args:
        module: the model, or a collection itself.
        env: rank and process group; by default those of torch.distributed's default group.
        device: where this rank computes, a string or `torch.device`; by default "cpu". Tables go there whatever device
            the plan names, with a warning where it names another. On "meta" nothing is allocated: state dicts tell
            shapes and pieces, and `to_empty(device=...)`, `load_state_dict` and `init_data_parallel()` bring the model
            to life; pass `init_data_parallel=False`.
        plan: where each table goes; by default rank 0 plans with `EmbeddingShardingPlanner`, for machines like its own
            and 512 samples a rank.
        sharders: what shards which class of module; by default `get_default_sharders()`.
        init_data_parallel: False leaves dense layers as they are until you call `init_data_parallel()`: for lazy
            modules, which get their parameters in a first forward, and for your own work on the model in between.
        init_parameters: False leaves parameters and buffers of dense layers on meta where they are there; give them
            values before `init_data_parallel()`. Tables are always initialised.
        data_parallel_wrapper: what wraps dense layers; by default `DefaultDataParallelWrapper()`.
        model_tracker_configs: not served.
        timeout_s: seconds that this rank waits for others in an exchange before it raises RankFailure; None leaves it
            to the process group's own timeout, which is never changed. Of all models of a process group, the last one
            made says how long.

    Raises:
        RuntimeError: there is no process group, or ranks hold different plans, tables or versions of shardwise.
        PlannerError: no plan is given, and none stays within memory.
        ValueError: the plan does not fit the module, the process group does not serve the device, a table's optimizer
            has no fused rule, a dense layer has one in the backward, or `model_tracker_configs` are given. What fails
            on one rank is raised on all.
        TypeError: an argument is of another class.

    Example:
        >>> tables = EmbeddingBagCollection([EmbeddingBagConfig(10, 4, "item", feature_names=["clicked"])])
        >>> apply_optimizer_in_backward(RowWiseAdagrad, tables.parameters(), {"lr": 0.1})
        >>> env = ShardingEnv.from_local(world_size=1, rank=0)  # or from_process_group(dist.group.WORLD)
        >>> model = DistributedModelParallel(tables, env=env)
        >>> batch = KeyedJaggedTensor(["clicked"], torch.tensor([1, 2, 3]), lengths=torch.tensor([2, 1]))
        >>> model(batch).values().shape
        torch.Size([2, 4])
        >>> model.plan.plan[""]["item"].ranks
        [0]
    """

    def __init__(
        self,
        module: nn.Module,
        env: ShardingEnv | None = None,
        device: torch.device | str | None = None,
        plan: ShardingPlan | None = None,
        sharders: Sequence[ModuleSharder[Any]] | None = None,
        init_data_parallel: bool = True,
        init_parameters: bool = True,
        data_parallel_wrapper: DataParallelWrapper | None = None,
        model_tracker_configs: object | None = None,
        timeout_s: float | None = 60,
    ) -> None:
        super().__init__()
        if model_tracker_configs is not None:
            raise ValueError("model_tracker_configs: trackers of changed rows are not served, leave it None")
        for what, value, kind in (
            ("env", env, ShardingEnv),
            ("plan", plan, ShardingPlan),
            ("data_parallel_wrapper", data_parallel_wrapper, DataParallelWrapper),
        ):
            if value is not None and not isinstance(value, kind):
                hint = ": ShardingPlan({module path: its plan})" if kind is ShardingPlan else ""
                raise TypeError(f"{what} must be a {kind.__name__}{hint}, got {type(value).__name__}")
        self._env, self._device = env or default_env(), device_here(device or "cpu", stacklevel=2)
        self._sharders = get_default_sharders() if sharders is None else list(sharders)
        for sharder in self._sharders:
            if not isinstance(sharder, ModuleSharder):
                raise TypeError(
                    f"sharders must be ModuleSharders, EmbeddingBagCollectionSharder() say, got {sharder!r}"
                )
        self.graph_name = name_for_graphs(self)
        self._init_parameters = init_parameters
        self._data_parallel_wrapper = data_parallel_wrapper or DefaultDataParallelWrapper()
        self._is_data_parallel = False
        self._watch = watch_over(self._groups(), timeout_s, hang_up)
        places = find_places(module, self._sharders, plan, self._env_of)
        with quiet_without_cuda(device or "cpu"):
            self._plan = agree_on_plan(
                places, plan, self._device, self._env.data_parallel_group,
                lambda: plan_for(module, self._sharders, self._env, self._device),
                more=_dense_facts(module, places, self._env, data_parallel=init_data_parallel, values=init_parameters),
            )  # fmt: skip
            warn_of_optimizers(places, self._plan, stacklevel=2)
            self._dmp_wrapped_module = shard_places(module, places, self._plan, self._device)
        self._sharded = sharded_collections(self._dmp_wrapped_module)
        for path, sharded in self._sharded.items():
            sharded.name_exchanges(path)
        if init_parameters and self._device.type != "meta":
            materialize(self._dmp_wrapped_module, self._device, stacklevel=3)
        move(self._dmp_wrapped_module, self._device)
        if init_data_parallel:
            self.init_data_parallel()

    @property
    def module(self) -> nn.Module:
        """The model itself, without any wrapper."""
        return get_unwrapped_module(self)

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        return self._device

    @property
    def sharders(self) -> list[ModuleSharder[Any]]:
        """The sharders, each for a class of modules."""
        return self._sharders

    @property
    def plan(self) -> ShardingPlan:
        """Where each table is; prints as tables."""
        return self._plan

    @property
    def fused_optimizer(self) -> CombinedOptimizer:
        """The optimizers that tables run in their backward, by full parameter name.

        A `ShardedModule` of yours that holds none of our collections brings its own, by an attribute `fused_optimizer`.
        """
        found: dict[str, KeyedOptimizer] = {path: sharded.fused_optimizer for path, sharded in self._sharded.items()}
        for path, module in self.module.named_modules():
            if not isinstance(module, ShardedModule) or any(f"{of}.".startswith(f"{path}.") for of in self._sharded):
                continue
            own = getattr(module, "fused_optimizer", None)
            if isinstance(own, KeyedOptimizer):
                found[path] = own
        return CombinedOptimizer(list(found.items()))

    def init_data_parallel(self) -> None:
        """Make dense layers data parallel; nothing happens the second time. All ranks call it together.

        Raises:
            ValueError: parameters are still on meta (`init_parameters=False`).
        """
        if self._is_data_parallel:
            return
        self._leave_meta()
        if self._init_parameters and self._device.type != "meta":
            # those that came since
            materialize(self._dmp_wrapped_module, self._device)
        move(self._dmp_wrapped_module, self._device)
        try:
            self._data_parallel_wrapper.wrap(self, self._env, self._device)
        except RuntimeError as error:
            if self._watch is not None:
                self._watch.translate(error)
            raise
        self._is_data_parallel = True

    def copy(self, device: torch.device | str) -> DistributedModelParallel:
        """A copy whose tensors are on `device`; where they are there already it shares them."""
        copied = copy_to_device(self, self._device, torch.device(device))
        assert isinstance(copied, DistributedModelParallel)
        copied._device = torch.device(device)
        return copied

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward on this rank's batch; all ranks must call it the same number of times.

        Raises:
            RankFailure: another rank failed, ended or did not come.
            ValueError: the model is on meta.
            TraceError: a tracer that does not know it, as torch.fx's own, begins with it.
        """
        if isinstance(args, Proxy):
            raise TraceError(
                "DistributedModelParallel passes on whatever arguments it is given, which this tracer cannot follow:"
                " use torchrec.fx.symbolic_trace, by our name shardwise.sharding.dmp.tracing.symbolic_trace, or trace"
                " model.module"
            )
        if in_graph():
            return forward_in_graph(self, args, kwargs)
        if self._device.type == "meta":
            self._leave_meta()
            if self._device.type == "meta":
                raise ValueError("the model is on meta: call to_empty(device=...) and load a state dict first")
        try:
            return self._dmp_wrapped_module(*args, **kwargs)
        except BaseException as error:
            if self._watch is not None:
                self._watch.report(error, "in forward")
            raise

    def watched(self, where: str = "in a step") -> AbstractContextManager[None]:
        """`with model.watched():` around a step tells all ranks of whatever is raised in it.

        What `forward` and tables raise in the backward is told anyway; loss, optimizer and your own code are not, nor
        is an average of dense gradients that ended because of another rank a RankFailure. `where` is what others read.
        """
        return nullcontext() if self._watch is None else self._watch.over(where)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters by the names of the unsharded model; a table of another rank is an empty parameter."""
        yield from self.module.named_parameters(prefix, recurse, remove_duplicate)

    def bare_named_parameters(self, prefix: str = "", recurse: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
        """As `named_parameters`, each parameter once."""
        return self.named_parameters(prefix, recurse)

    def sparse_grad_parameter_names(self, destination: list[str] | None = None, prefix: str = "") -> list[str]:
        """Names of parameters with sparse gradients, those of nn.Embedding and nn.EmbeddingBag with `sparse=True`."""
        names = [] if destination is None else destination
        for name, module in self.module.named_modules(prefix=prefix):
            if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
                names.append(f"{name}.weight" if name else "weight")
        return names

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Buffers by the names of the unsharded model."""
        yield from self.module.named_buffers(prefix, recurse, remove_duplicate)

    def state_dict(  # type: ignore[override]
        self, destination: dict[str, Any] | None = None, prefix: str = "", keep_vars: bool = False
    ) -> dict[str, Any]:
        """The model by the names of the unsharded model, the same on all ranks whatever the plan.

        A cut table is a `ShardedTensor` (or a DTensor, see `ShardingEnv`) whose local shards are this rank's live rows,
        none on a rank without; replicated tables and dense layers are plain tensors. `torch.distributed.checkpoint`
        saves and loads it, also across plans and numbers of ranks.
        """
        filled: dict[str, Any] = {} if destination is None else destination
        return self.module.state_dict(destination=filled, prefix=prefix, keep_vars=keep_vars)

    def load_state_dict(  # type: ignore[override]
        self, state_dict: Mapping[str, Any], prefix: str = "", strict: bool = True
    ) -> Any:
        """Copy in what begins with `prefix`: what `state_dict` gave under the same plan, or tensors of whole tables.

        Raises:
            ValueError: a table has another shape, or is in pieces that another plan cut; names it. Nothing is changed.
            RuntimeError: keys are missing or unexpected (unless not `strict`), or a dense layer has another shape.
        """
        inner = {name[len(prefix) :]: value for name, value in state_dict.items() if name.startswith(prefix)}
        for path, sharded in self._sharded.items():
            check_weights(sharded, inner, f"{path}." if path else "")
        return self.module.load_state_dict(inner, strict)

    def write(self, embeddings: KeyedJaggedTensor) -> None:
        """Write rows into tables whose config has `enable_embedding_update`; all ranks call this together.

        Arguments and errors as `ShardedCollection.write`; the names may be of tables of several collections, and one
        that several have is written in all of them.

        Raises:
            RuntimeError: no table of the model is writable.
        """
        writable = [sharded for sharded in self._sharded.values() if sharded.enable_embedding_update]
        if not writable:
            raise RuntimeError(
                "no table of the model is writable: set enable_embedding_update=True in the config of a table"
            )
        with self.watched("in write"):
            write_rows(writable, embeddings)

    def reshard(
        self,
        changed_shard_to_params: Mapping[str, Any],
        sharded_module_fqn: str | None = None,
        *,
        resplit: str | None = None,
    ) -> float:
        """Go over to another plan in place, in the middle of training; all ranks call it, with no batch under way.

        Weights, optimizer states, counts of steps and learning rates move along.

        Args:
            changed_shard_to_params: module path -> (volume, plan of the tables that change), as TorchRec's
                `output_sharding_plans_delta` makes it; or a plan of one module, whole or of what changes.
            sharded_module_fqn: the module's path; by default all that the dict names, or the only one.
            resplit: as `reshard.reshard`.

        Returns:
            The volume that was told, or the MiB of the tables in a plan.

        Raises:
            ValueError: the plan does not fit, or as `reshard.reshard`; on all ranks, and nothing is changed.
        """
        moves = changes_of(changed_shard_to_params, sharded_module_fqn, list(self._sharded))
        for path, (_, changes) in moves.items():
            with self.watched("in reshard"):
                reshard_by_plan(self._sharded[path], changes, resplit=resplit)
            if path in self._plan.plan:
                merged = EmbeddingModuleShardingPlan({**self._plan.plan[path], **changes})
                self._plan = ShardingPlan({**self._plan.plan, path: merged})
        return sum(float(volume) for volume, _ in moves.values())

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._leave_meta()
        return self

    def _leave_meta(self) -> None:
        """Compute where parameters are by now, if they began on meta."""
        if self._device.type == "meta":
            for sharded in self._sharded.values():
                take_over(sharded)
            self._device = next((t.device for t in self.parameters() if not t.is_meta), self._device)

    def _groups(self) -> list[dist.ProcessGroup | None]:
        """The process groups that a failure ends, all ranks first."""
        return [self._env.data_parallel_group, self._env.process_group]

    def _env_of(self, kind: type[nn.Module]) -> ShardingEnv:
        """The ranks over which modules of a class are sharded."""
        return self._env


def _dense_facts(
    module: nn.Module, places: Sequence[Place], env: ShardingEnv, *, data_parallel: bool, values: bool
) -> Callable[[], Facts]:
    """Facts of dense layers that ranks must share; that none steps in the backward, before its gradient is averaged.

    `data_parallel` and `values` say whether they are made data parallel and given values at once.
    """

    def find() -> Facts:
        in_tables = {id(param) for place in places for param in place.parameters().values()}
        in_tables |= {
            id(param) for collection in sharded_collections(module).values() for param in collection.parameters()
        }
        dense = [(name, param) for name, param in module.named_parameters() if id(param) not in in_tables]
        marked = [name for name, param in dense if param.requires_grad and optimizer_of(param) is not None]
        if marked and env.data_parallel_group is not None:
            raise ValueError(
                f"dense parameters {marked} have an optimizer in the backward, which would run before their gradients"
                " are averaged over the ranks: give them to an ordinary optimizer"
            )
        settings = {"init_data_parallel": str(data_parallel), "init_parameters": str(values)}
        return {**settings, **facts_of_dense(dense)}

    return find
