"""Ops on jagged values: offsets, padding, permutes, selection, products, buckets, distinct ids."""

from .regroup_numbers import Row, dims_of, of_widths, plan_permutes, plan_rows, plan_tables, regroup_apart
from .requests import source_bags

__all__ = [
    "Row",
    "dims_of",
    "of_widths",
    "plan_permutes",
    "plan_rows",
    "plan_tables",
    "regroup_apart",
    "source_bags",
]
