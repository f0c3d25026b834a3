"""The difference of two plans, as `DistributedModelParallel.reshard` takes it."""

from __future__ import annotations

import copy
from collections.abc import Mapping

from ..engine.reshard import mebibytes
from ..plan.plan import EmbeddingModuleShardingPlan


def output_sharding_plan_delta_single(
    old_plan: EmbeddingModuleShardingPlan, new_plan: EmbeddingModuleShardingPlan, return_data_volume: bool = False
) -> tuple[float, EmbeddingModuleShardingPlan]:
    """The tables of one module that the new plan places or cuts otherwise.

    Args:
        return_data_volume: whether to count them.

    Returns:
        MiB of these tables in fp32, or 0 if they are not counted; their part of the new plan.

    Raises:
        ValueError: the plans are not of the same tables.
    """
    if set(old_plan) != set(new_plan):
        raise ValueError(f"the plans have different tables: {sorted(set(old_plan) ^ set(new_plan))}")
    changed = EmbeddingModuleShardingPlan(
        {name: copy.deepcopy(sharding) for name, sharding in new_plan.items() if sharding != old_plan[name]}
    )
    return mebibytes(changed) if return_data_volume else 0.0, changed


def output_sharding_plans_delta(
    old_plan: Mapping[str, EmbeddingModuleShardingPlan],
    new_plan: Mapping[str, EmbeddingModuleShardingPlan],
    return_data_volume: bool = False,
) -> dict[str, tuple[float, EmbeddingModuleShardingPlan]]:
    """The same for each module of a model, by its path.

    Raises:
        ValueError: the plans are not of the same modules and tables.
    """
    missing = sorted(set(old_plan) - set(new_plan))
    if missing:
        raise ValueError(f"the new plan lacks modules {missing}")
    return {
        path: output_sharding_plan_delta_single(plan, new_plan[path], return_data_volume)
        for path, plan in old_plan.items()
    }
