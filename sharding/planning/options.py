"""Between our plans and TorchRec's words: `Planned` as sharding options, these as a `ShardingPlan`, and the checks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharding_spec.api import EnumerableShardingSpec

from shardwise.planner.constraints import ParameterConstraints
from shardwise.planner.errors import PlannerError, PlannerErrorType
from shardwise.planner.plan.planned import Planned
from shardwise.planner.plan.slots import chosen_tier
from shardwise.planner.search.problem import PARTS, Choice
from shardwise.planner.tables import Table
from shardwise.planner.topology import Perf, Storage, Topology
from shardwise.planner.torchrec.enumerators import GUARDED_KERNELS, get_partition_by_type
from shardwise.planner.torchrec.sharding_option import Shard, ShardingOption
from shardwise.planner.torchrec.types import PlanLoader

from ..modules.generators import placement
from ..modules.placement import find_modules
from ..plan.module_sharder import ModuleSharder
from ..plan.plan import (
    EmbeddingComputeKernel,
    EmbeddingModuleShardingPlan,
    ParameterSharding,
    ShardingPlan,
    ShardingType,
)

# what `GUARDED_KERNELS` are to TorchRec's programs; the enumerator reads that, so nothing can be added here
GUARDED_COMPUTE_KERNELS = frozenset(map(EmbeddingComputeKernel, GUARDED_KERNELS))
_DATA_PARALLEL = ShardingType.DATA_PARALLEL.value
# kernels with a cache, of which a share of the rows is in device memory
_CACHED = ("fused_uvm_caching", "quant_uvm_caching")


def options_of(
    planned: Planned,
    modules: Mapping[str, nn.Module],
    parameters: Mapping[str, nn.Parameter],
    constraints: Mapping[str, ParameterConstraints],
) -> list[ShardingOption]:
    """A plan as TorchRec's planner has it: an option with ranks for each table, in the order of the tables.

    `modules` are by path, `parameters` by the path of their table. Tables that share a rank share its cost evenly.
    """  # fmt: skip
    together = {name: len(item.names) for item in planned.problem.items for name in item.names}
    options = []
    for table, choice, starts in planned.placed():
        constraint = constraints.get(table.name, constraints.get("*", ParameterConstraints()))
        options.append(
            ShardingOption(
                name=table.name,
                tensor=parameters[table.path],
                module=(table.module, modules[table.module]),
                input_lengths=[feature.pooling_factor for feature in table.features],
                batch_size=planned.batch_size,
                sharding_type=choice.sharding_type,
                partition_by=get_partition_by_type(choice.sharding_type),
                compute_kernel=choice.compute_kernel,
                shards=_shards(planned, table, choice, starts, together[table.path]),
                cache_params=constraint.cache_params,
                enforce_hbm=constraint.enforce_hbm,
                stochastic_rounding=constraint.stochastic_rounding,
                bounds_check_mode=constraint.bounds_check_mode,
                is_pooled=table.pooled,
                feature_names=[feature.name for feature in table.features],
                output_dtype=constraint.output_dtype,
                key_value_params=constraint.key_value_params,
                num_poolings=[feature.num_poolings for feature in table.features],
                tier=chosen_tier(constraint.tier, choice),
            )
        )
    return options


def _shards(planned: Planned, table: Table, choice: Choice, starts: tuple[int, ...], sharers: int) -> list[Shard]:
    parts = dict(zip(PARTS, choice.parts_ms.reshape(len(PARTS), -1) / sharers, strict=True))
    hbm, ddr = choice.hbm.flatten() // sharers, choice.ddr.flatten() // sharers
    shards = []
    for n, shard in enumerate(planned.shards(table, choice, starts)):
        perf = Perf(
            fwd_compute=float(parts["fwd_compute"][n] + parts["overhead"][n]),
            fwd_comms=float(parts["fwd_comms"][n]),
            bwd_compute=float(parts["bwd_compute"][n]),
            bwd_comms=float(parts["bwd_comms"][n]),
            input_dist_comms=float(parts["input_comms"][n]),
            prefetch_compute=float(parts["prefetch"][n]),
        )
        size = [shard.rows[1] - shard.rows[0], shard.cols[1] - shard.cols[0]]
        storage = Storage(int(hbm[n]), int(ddr[n]))
        shards.append(Shard(size, [shard.rows[0], shard.cols[0]], storage, perf, shard.rank))
    return shards


def to_sharding_plan(sharding_options: Sequence[ShardingOption], topology: Topology) -> ShardingPlan:
    """The plan that options with ranks make.

    Raises:
        PlannerError: a shard has no rank.
    """
    device, local = topology.compute_device, topology.local_world_size
    plan: dict[str, EmbeddingModuleShardingPlan] = {}
    for option in sharding_options:
        ranks: list[Any] = [shard.rank for shard in option.shards]
        tier: Any = option.tier
        cuts = [
            ShardMetadata(list(shard.offset), list(shard.size), placement(device, rank, local))
            for shard, rank in zip(option.shards, ranks, strict=True)
            if rank is not None
        ]
        if len(cuts) != len(ranks):
            raise PlannerError(f"table {option.fqn!r}: shards without a rank", PlannerErrorType.INVALID_RANK_ASSIGNMENT)
        plan.setdefault(option.path, EmbeddingModuleShardingPlan())[option.name] = ParameterSharding(
            option.sharding_type,
            option.compute_kernel,
            ranks,
            None if option.sharding_type == _DATA_PARALLEL else EnumerableShardingSpec(cuts),
            option.cache_params,
            option.enforce_hbm,
            option.stochastic_rounding,
            option.bounds_check_mode,
            option.output_dtype,
            option.key_value_params,
            tier=tier,
        )
    return ShardingPlan(plan, world_size=topology.world_size, local_world_size=local)


def validate_modules_inclusion_in_sharding_plan(
    sharding_plan: ShardingPlan,
    module: nn.Module,
    sharders: Sequence[ModuleSharder[Any]],
    constraints: Mapping[str, ParameterConstraints] | None = None,
    device_group: str | None = None,
) -> None:
    """Check that the plan has a part for every module with tables, of this device group if one is named.

    Raises:
        PlannerError: it lacks one.
        ValueError: a device group, but no constraints that say what is in it.
    """
    if device_group is not None and constraints is None:
        raise ValueError("device_group needs constraints: they say which tables are in it")
    missing = []
    for paths, child, sharder in find_modules(module, sharders):
        names = list(sharder.shardable_parameters(child))
        if device_group is not None and constraints is not None:
            names = [name for name in names if name in constraints and constraints[name].device_group == device_group]
        if names and paths[0] not in sharding_plan.plan:
            missing.append(paths[0])
    if missing:
        raise PlannerError(
            f"the plan has no part for modules {sorted(missing)}", PlannerErrorType.MISSING_MODULE_IN_PLAN
        )


def validate_rank_assignment(sharding_plan: ShardingPlan, topology: Topology) -> None:
    """Check that every shard is on a rank that there is.

    Raises:
        PlannerError: one is not.
    """
    for path, of_module in sharding_plan.plan.items():
        for name, sharding in of_module.items():
            for shard in sharding.sharding_spec.shards if sharding.sharding_spec else ():
                where = shard.placement
                rank = None if where is None or isinstance(where, str) else where.rank()
                if rank is None or not 0 <= rank < topology.world_size:
                    raise PlannerError(
                        f"table {name!r} of module {path!r}: a shard is on rank {rank}; there are"
                        f" {topology.world_size}",
                        PlannerErrorType.INVALID_RANK_ASSIGNMENT,
                    )


def validate_compute_kernels(best_plan: Sequence[ShardingOption]) -> None:
    """Check that every option's kernel exists and takes no negative storage. Any sharding type goes with "dense".

    Raises:
        PlannerError: some do not; names all of them.
    """
    known = {kernel.value for kernel in EmbeddingComputeKernel}
    faults = []
    for option in best_plan:
        kernel, share = option.compute_kernel, option.cache_load_factor
        if kernel not in known:
            faults.append(f"{option.fqn}: there is no compute kernel {kernel!r}")
            continue
        if kernel in _CACHED and share is not None and not 0 < share < 1:
            faults.append(f"{option.fqn}: {kernel} needs a cache_load_factor between 0 and 1, got {share}")
        storage = option.total_storage
        if storage.hbm < 0 or storage.ddr < 0:
            faults.append(f"{option.fqn}: its storage is negative: {storage}")
    if faults:
        raise PlannerError("\n  ".join(["compute kernels:", *faults]), PlannerErrorType.INVALID_COMPUTE_KERNEL)


def extract_plan(
    search_space: Sequence[ShardingOption], loaded_sharding_options: Mapping[int, ShardingOption]
) -> list[ShardingOption]:
    """The options of a search space that were loaded, with the shards, and so the ranks, that they had.

    Raises:
        PlannerError: two options of the search space have one storage hash, or some of what was loaded is not in it.
    """
    chosen, seen = [], set()
    for option in search_space:
        number = option.storage_hash()
        if number in seen:
            raise PlannerError(
                f"two options have the storage hash {number}, one of them of {option.fqn!r}",
                PlannerErrorType.PLAN_LOADING_FAILED,
            )
        seen.add(number)
        if number in loaded_sharding_options:
            chosen.append(_with_shards(option, loaded_sharding_options[number].shards))
    if len(chosen) != len(loaded_sharding_options):
        raise PlannerError(
            f"{len(loaded_sharding_options)} options were loaded, and {len(chosen)} of them are in the search space",
            PlannerErrorType.PLAN_LOADING_FAILED,
        )
    return chosen


def _with_shards(option: ShardingOption, shards: list[Shard]) -> ShardingOption:
    return ShardingOption(
        option.name, option.tensor, option.module, option.input_lengths, option.batch_size, option.sharding_type,
        option.partition_by, option.compute_kernel, shards, option.cache_params, option.enforce_hbm,
        option.stochastic_rounding, option.bounds_check_mode, option.dependency, option.is_pooled,
        option.feature_names, option.output_dtype, option.key_value_params, option.num_poolings, tier=option.tier,
    )  # fmt: skip


def load_options(
    loader: PlanLoader, search_space: Sequence[ShardingOption], context: str
) -> list[ShardingOption] | None:
    """The plan that a loader has for this search space; None if it has none.

    Raises:
        PlannerError: it was made for something else (`context` is the hash of what this one is for), or as
            `extract_plan`.
    """
    made_for = loader.plan_context_hash()
    if made_for is not None and made_for != context:
        name = getattr(loader, "get_plan_id", lambda: None)()
        raise PlannerError(
            f"the plan{f' {name}' if name else ''} was made for other tables, machines or settings: its context is"
            f" {made_for}, this planner's {context}",
            PlannerErrorType.PLANNER_INPUT_CONTEXT_MISMATCH,
        )
    loaded = loader.load()
    return None if loaded is None else extract_plan(search_space, loaded)
