"""One rank plans, all get the plan: as JSON, with its explanation; and its error, so that none waits for a plan."""

from __future__ import annotations

import builtins
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from shardwise.planner.errors import PlannerError, PlannerErrorType

from ..comms.env import get_local_size
from ..comms.exchange import Exchange
from ..comms.failures import agreed
from ..plan.plan import ShardingPlan, plan_from_json, plan_to_json


def plan_on_leader(pg: dist.ProcessGroup | None, make: Callable[[], ShardingPlan]) -> ShardingPlan:
    """What `make` returns on rank 0 of the group, on all of them; all ranks call this together.

    Raises:
        What `make` raised: PlannerError and Python's own as they are, others as RuntimeError with their text.
    """
    exchange = Exchange(pg)
    mine: ShardingPlan | None = None
    failure: Exception | None = None
    said = b""
    if exchange.rank == 0:
        try:
            mine = make()
            said = json.dumps(_told(mine, exchange.world_size)).encode()
        except Exception as error:
            failure = error
            said = json.dumps(_error_told(error)).encode()
    data = json.loads(exchange.value(said, 0))
    if failure is not None:
        raise agreed(failure)
    if mine is not None:
        return mine
    if "error" in data:
        raise agreed(_error_of(data)) from RuntimeError("rank 0 could not plan")
    return plan_from_json(data, "the plan of rank 0")


def _told(plan: ShardingPlan, ranks: int) -> dict[str, Any]:
    # a plan made by hand does not say how many ranks it is for
    world_size = plan.world_size or ranks
    # nobody may want the best bound, which takes longer than the plan
    at_once = getattr(plan.explanation, "at_once", None)
    said = plan if at_once is None else replace(plan, explanation=at_once())
    return plan_to_json(said, world_size, plan.local_world_size or get_local_size(world_size))


def _error_told(error: Exception) -> dict[str, str]:
    kind = error.error_type.value if isinstance(error, PlannerError) else type(error).__name__
    return {"error": str(error), "planner_error" if isinstance(error, PlannerError) else "class": kind}


def _error_of(data: dict[str, str]) -> Exception:
    if "planner_error" in data:
        return PlannerError(data["error"], PlannerErrorType(data["planner_error"]))
    kind = getattr(builtins, data["class"], None)
    if isinstance(kind, type) and issubclass(kind, Exception):
        try:
            return kind(data["error"])
        except TypeError:
            # one that takes more than a text
            pass
    return RuntimeError(f"{data['class']}: {data['error']}")
