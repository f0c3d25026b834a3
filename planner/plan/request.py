"""All that decides a plan, kept together so that it can be asked again with a change (whatif.py has the changes)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..constraints import ParameterConstraints
from ..cost.model import CostModel
from ..tables import Table
from ..topology import Topology


@dataclass(frozen=True, eq=False)
class Request:
    """What `plan_tables` was asked.

    Args:
        topology: with the memory that tables may use.
        batch_size: of one rank.
        reserved: bytes of device memory [W] that are kept from tables and gone from `topology`; () for none.
        settings: what else decided the result, in words.
    """

    tables: tuple[Table, ...]
    topology: Topology
    batch_size: int
    cost: CostModel
    constraints: Mapping[str, ParameterConstraints] = field(default_factory=dict)
    reserved: tuple[int, ...] = ()
    settings: Mapping[str, str] = field(default_factory=dict)
