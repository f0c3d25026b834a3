"""`diff`: how two checkpoints differ, whatever plans they were saved under; values are compared block by block."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from shardwise.planner.layout import Shard

from .manifest import TABLE, WEIGHT, Manifest, dtype_name
from .offline import Source

Address = tuple[str, str, str]


@dataclass(frozen=True)
class Values:
    """How many elements of a tensor differ, of how many, and by how much at most: nan if a NaN meets a number."""

    different: int
    elements: int
    largest: float


@dataclass
class Difference:
    """The differences of two checkpoints a and b; empty, and false, where they say the same.

    Tensors are named by their parameter, a state of an optimizer `<parameter>: <state>`. A difference of the plans
    alone is none of what is saved: `same_content` passes over it.

    Attributes:
        only_a, only_b: tensors that one of them has.
        shapes, dtypes, plans: of the same tensor in a and in b.
        values: of tensors of one shape and dtype, where any element differs; NaN equals NaN.
        facts: other things by name: the step, the number of ranks, rules of optimizers, settings, counts of steps.
    """

    only_a: list[str] = field(default_factory=list)
    only_b: list[str] = field(default_factory=list)
    shapes: dict[str, tuple[list[int], list[int]]] = field(default_factory=dict)
    dtypes: dict[str, tuple[str, str]] = field(default_factory=dict)
    plans: dict[str, tuple[str, str]] = field(default_factory=dict)
    values: dict[str, Values] = field(default_factory=dict)
    facts: dict[str, tuple[Any, Any]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return any(getattr(self, field.name) for field in fields(self))

    @property
    def same_content(self) -> bool:
        """Whether only plans and the number of ranks differ: a model loads the same from both."""
        others = [getattr(self, field.name) for field in fields(self) if field.name not in ("plans", "facts")]
        return not any(others) and set(self.facts) <= {"world_size"}

    def lines(self) -> list[str]:
        """It as text, a difference a line."""
        lines = [f"only in a: {name}" for name in self.only_a] + [f"only in b: {name}" for name in self.only_b]
        for what, pairs in (("shape", self.shapes), ("dtype", self.dtypes), ("plan", self.plans)):
            lines += [f"{what}: {name} is {a} in a, {b} in b" for name, (a, b) in pairs.items()]
        for name, gap in self.values.items():
            lines.append(
                f"values: {name} differs in {gap.different} of {gap.elements} elements, by up to {gap.largest:g}"
            )
        return lines + [f"{name}: {a!r} in a, {b!r} in b" for name, (a, b) in self.facts.items()]

    def as_json(self) -> dict[str, Any]:
        """It as plain dicts and lists; a `largest` that is no finite number is None."""
        values = {
            name: {
                "different": gap.different, "elements": gap.elements,
                "largest": gap.largest if math.isfinite(gap.largest) else None,
            }
            for name, gap in self.values.items()
        }  # fmt: skip
        return {field.name: values if field.name == "values" else getattr(self, field.name) for field in fields(self)}


def diff(a: str | os.PathLike[str], b: str | os.PathLike[str]) -> Difference:
    """How two checkpoints differ; each is a step folder, or a folder of them, of which the newest good one is taken.

    Raises:
        CheckpointDamaged, FileNotFoundError: one of them cannot be read.
    """
    with Source(a) as first, Source(b) as second:
        return _compare(first, second)


def _compare(a: Source, b: Source) -> Difference:
    pieces, their_pieces = a.manifest.by_address, b.manifest.by_address
    difference = Difference(
        [_text(address) for address in pieces if address not in their_pieces],
        [_text(address) for address in their_pieces if address not in pieces],
    )
    for name in a.manifest.tables.keys() & b.manifest.tables.keys():
        plans = _plan(a.manifest.tables[name].shards), _plan(b.manifest.tables[name].shards)
        if plans[0] != plans[1]:
            difference.plans[name] = plans
    difference.plans = dict(sorted(difference.plans.items()))
    for address in (address for address in pieces if address in their_pieces):
        name, shapes = _text(address), (_shape(a.manifest, address), _shape(b.manifest, address))
        dtypes = pieces[address][0].dtype, their_pieces[address][0].dtype
        if shapes[0] != shapes[1]:
            difference.shapes[name] = shapes
        if dtypes[0] != dtypes[1]:
            difference.dtypes[name] = dtype_name(dtypes[0]), dtype_name(dtypes[1])
        elif shapes[0] == shapes[1]:
            values = _values(a, b, address)
            if values.different:
                difference.values[name] = values
    facts, their_facts = _facts(a.manifest), _facts(b.manifest)
    both = {what: (facts.get(what), their_facts.get(what)) for what in {**facts, **their_facts}}
    difference.facts = {what: pair for what, pair in both.items() if pair[0] != pair[1]}
    return difference


def _values(a: Source, b: Source, address: Address) -> Values:
    different, elements, largest = 0, 0, 0.0
    for piece in a.manifest.by_address[address]:
        for block, their_block in zip(a.blocks(piece), b.blocks(piece), strict=True):
            elements += block.numel()
            unequal = _unequal(block, their_block)
            count = int(unequal.sum())
            if count:
                different += count
                gaps = _gaps(block[unequal], their_block[unequal])
                # NaN wins over every number
                largest = float(torch.maximum(gaps.max(), torch.tensor(largest, dtype=gaps.dtype)))
    return Values(different, elements, largest)


def _unequal(a: Tensor, b: Tensor) -> Tensor:
    if not a.dtype.is_floating_point:
        return a != b
    # torch compares no 8-bit floats
    a, b = a.double(), b.double()
    return (a != b) & ~(a.isnan() & b.isnan())


def _gaps(a: Tensor, b: Tensor) -> Tensor:
    """How far the elements are apart, in float64."""
    far = (a.double() - b.double()).abs()
    if a.dtype.is_floating_point:
        return far
    # float64 rounds large whole numbers, and int64 has no room for the widest gaps
    return torch.where(far < 2**62, (a.long() - b.long()).abs().double(), far)


def _shape(manifest: Manifest, address: Address) -> list[int]:
    """The whole tensor's; of a number a row for each of several column blocks, rows x blocks."""
    kind, name, _ = address
    pieces = manifest.by_address[address]
    if kind != TABLE:
        return list(pieces[0].shape)
    facts = manifest.tables[name]
    if len(pieces[0].shape) == 2:
        return [facts.rows, facts.dim]
    blocks = len({piece.columns for piece in pieces})
    return [facts.rows] if blocks == 1 else [facts.rows, blocks]


def _plan(shards: tuple[Shard, ...]) -> str:
    """Where a table's cells lie, in a line."""
    if shards and shards[0].replica:
        return "whole on every rank"
    return ", ".join(f"rank {s.rank}: rows {list(s.rows)} columns {list(s.cols)}" for s in shards)


def _facts(manifest: Manifest) -> dict[str, Any]:
    """Everything that is no tensor, flat by name."""
    facts: dict[str, Any] = {"step": manifest.step, "world_size": manifest.world_size}
    for name, table in manifest.tables.items():
        table_facts = {"rule": table.rule, "steps": table.steps, "settings": dict(table.settings)}
        facts.update({f"{name}: {what}": value for what, value in table_facts.items()})
    for what, groups in (("fused", manifest.fused), ("dense", manifest.dense)):
        for group in groups:
            for name in group["params"]:
                settings = {key: value for key, value in group.items() if key not in ("params", "optimizer")}
                facts[f"{name}: {what} param_group"] = settings
                if "optimizer" in group:
                    facts[f"{name}: optimizer"] = group["optimizer"]
    facts.update({f"{name}: {key}": value for name, states in manifest.values.items() for key, value in states.items()})
    facts.update({f"extra: {key}": value for key, value in manifest.extra.items()})
    facts.update({f"{alias}: same as": name for alias, name in manifest.aliases.items()})
    return facts


def _text(address: Address) -> str:
    _, name, state = address
    return name if state == WEIGHT else f"{name}: {state}"
