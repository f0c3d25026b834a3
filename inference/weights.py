"""The rows of a model's quantized tables by table name: read, and put into another model.

Shapes: per table payload uint8 [rows, row_bytes] and scales [rows, parts], or None where the format has none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol, runtime_checkable

from torch import Tensor, nn


@runtime_checkable
class HoldsQuantizedTables(Protocol):
    """A module with quantized tables, or with all parts of such: a quantized collection, sharded or not."""

    def table_weights(self) -> dict[str, tuple[Tensor, Tensor | None]]:
        """Payload and scales of each table, as views where they lie in one piece."""
        ...

    def assign_table_weights(self, weights: Mapping[str, tuple[Tensor, Tensor | None]]) -> None:
        """Copy in the payload and scales of every table."""


def get_table_to_weights_from_tbe(model: nn.Module) -> dict[str, tuple[Tensor, Tensor | None]]:
    """Payload uint8 [R, row_bytes] and scales [R, parts], or None, of every quantized table of a model, by its name.

    Raises:
        ValueError: two collections have tables of the same name.
    """
    by_table: dict[str, tuple[Tensor, Tensor | None]] = {}
    # a module used in several places is one
    for module in dict.fromkeys(_holders(model)):
        weights = module.table_weights()
        if twice := sorted(set(weights) & set(by_table)):
            raise ValueError(f"tables {twice} are in more than one collection: read each by its table_weights()")
        by_table.update(weights)
    return by_table


def assign_weights_to_tbe(model: nn.Module, table_to_weight: Mapping[str, tuple[Tensor, Tensor | None]]) -> None:
    """Copy rows into every quantized table of a model; tables on meta come to life where the rows are.

    Payload uint8 [R, row_bytes] and scales [R, parts], None where there are none. Tables of `table_to_weight` that the
    model does not have may be those of another model.

    Raises:
        KeyError: a table of the model is missing.
        ValueError: payload or scales have another shape or dtype than the table; names it.
    """
    # a module used in several places is one
    for module in dict.fromkeys(_holders(model)):
        module.assign_table_weights(table_to_weight)


def _holders(model: nn.Module) -> Iterator[HoldsQuantizedTables]:
    """The outermost modules that hold quantized tables."""
    if isinstance(model, HoldsQuantizedTables):
        yield model
    else:
        for child in model.children():
            yield from _holders(child)
