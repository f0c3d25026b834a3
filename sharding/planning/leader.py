"""One rank plans, all get the plan: as JSON, with its explanation; and its error, so that none waits for a plan."""

from __future__ import annotations

import builtins
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from shardwise.errors import REFUSALS
from shardwise.planner.errors import PlannerError, PlannerErrorType

from ...planner.tiers import without_functions
from ..comms.consensus import ErrorCodec, ErrorKind, value_or_error
from ..comms.env import get_local_size
from ..comms.exchange import Exchange
from ..plan.plan import EmbeddingModuleShardingPlan, ShardingPlan, plan_from_json, plan_to_json

_ERRORS = ErrorCodec(
    [
        *REFUSALS,
        *(error for error in vars(builtins).values() if isinstance(error, type) and issubclass(error, Exception)),
    ],
    [
        ErrorKind(
            PlannerError,
            payload=lambda error: error.error_type.value,
            rebuild=lambda text, error_type: PlannerError(text, PlannerErrorType(error_type)),
        )
    ],
)


def plan_on_leader(pg: dist.ProcessGroup | None, make: Callable[[], ShardingPlan]) -> ShardingPlan:
    """The plan that `make` returns on rank 0 of the group, on all ranks, which call this together.

    Raises:
        What `make` raised: PlannerError and Python's own as they are, others as RuntimeError with their text.
    """
    exchange = Exchange(pg)
    return value_or_error(
        exchange,
        0,
        make,
        encode=lambda plan: json.dumps(as_json(plan, exchange.world_size)).encode(),
        decode=lambda data: plan_from_json(json.loads(data), "the plan of rank 0"),
        errors=_ERRORS,
    )


def as_json(plan: ShardingPlan, ranks: int) -> dict[str, Any]:
    """The plan as the other ranks get it."""
    # a plan made by hand does not say how many ranks it is for
    world_size = plan.world_size or ranks
    # nobody may want the best bound, which takes longer than the plan
    at_once = getattr(plan.explanation, "at_once", None)
    explained = plan if at_once is None else replace(plan, explanation=at_once())
    # functions do not travel as text, and every rank was given them
    modules = {
        path: EmbeddingModuleShardingPlan(
            {
                name: sharding if sharding.tier is None else replace(sharding, tier=without_functions(sharding.tier))
                for name, sharding in of_module.items()
            }
        )
        if isinstance(of_module, EmbeddingModuleShardingPlan)
        else of_module
        for path, of_module in explained.plan.items()
    }
    return plan_to_json(
        replace(explained, plan=modules), world_size, plan.local_world_size or get_local_size(world_size)
    )
