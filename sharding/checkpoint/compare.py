"""A checkpoint beside a model: what fits, and an exact report of what does not. Equal on all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shardwise.untrusted import repeated

from .contents import Contents
from .errors import LoadPolicy, Report
from .manifest import DENSE, OPTIMIZER, TABLE, WEIGHT, Manifest, Stored, dtype_name


@dataclass
class Matched:
    """The part of a checkpoint that fits the model, by the model's names.

    `pieces` are those of tables, their states, and dense tensors; `states` and `values` those of dense parameters'
    optimizers; `steps` the updates that tables counted; `rename` goes from the checkpoint's names to the model's.
    """

    pieces: dict[tuple[str, str], list[Stored]] = field(default_factory=dict)
    states: dict[str, dict[str, Stored]] = field(default_factory=dict)
    values: dict[str, dict[str, Any]] = field(default_factory=dict)
    steps: dict[str, int] = field(default_factory=dict)
    rename: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class _Whole:
    """The shape and dtype of something as a whole."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def compare(
    manifest: Manifest, contents: Contents, policy: LoadPolicy, *, with_optimizer: bool
) -> tuple[Matched, Report]:
    """The part of a checkpoint that fits a model, and how they differ.

    Raises:
        ValueError: `policy.rename` names something that is not in the checkpoint or the model, or two names become
            one.
    """
    rename = _rename(manifest, contents, policy)
    matched, report = Matched(rename=rename), Report(renamed=dict(policy.rename))
    stored = _stored(manifest, rename, with_optimizer)
    wanted = _wanted(contents)
    optional = {name for leaf in contents.leaves for name in leaf.params if not leaf.states(name)}
    for address, own in wanted.items():
        if address not in stored:
            report.missing.append(_text(address))
            continue
        theirs, pieces = stored[address]
        if _compare_one(_text(address), theirs, own, report, policy):
            _keep(matched, address, pieces)
    for address, (_, pieces) in stored.items():
        if address in wanted:
            continue
        kind, name, state, _ = address
        if kind == OPTIMIZER and name in optional:
            # an optimizer that never stepped takes what there is
            matched.states.setdefault(name, {})[state] = pieces[0]
        else:
            report.unexpected.append(_text(address))
    _match_values(manifest, contents, matched, report, optional)
    _refuse_other_classes(manifest, contents, matched, report, optional)
    tables = {rename.get(name, name): facts for name, facts in manifest.tables.items()}
    for name, table in contents.tables.items():
        if table.optimizer is not None and name in tables and tables[name].rule == table.rule:
            matched.steps[name] = tables[name].steps
    return matched, report


# kind, name, state and, of a table's state, the rule
_Address = tuple[str, str, str, str]


def _text(address: _Address) -> str:
    kind, name, state, rule = address
    if state == WEIGHT and kind != OPTIMIZER:
        return name
    return f"{name}: {rule} {state}" if rule else f"{name}: {state}"


def _rename(manifest: Manifest, contents: Contents, policy: LoadPolicy) -> dict[str, str]:
    saved = [*manifest.tables, *(name for kind, name, _ in manifest.by_address if kind == DENSE)]
    names = [*contents.tables, *contents.dense]
    unknown = sorted(set(policy.rename) - set(saved))
    strange = sorted(set(policy.rename.values()) - set(names))
    if unknown or strange:
        raise ValueError(f"rename: the checkpoint has no {unknown}, the model no {strange}: it has {sorted(names)}")
    new = [policy.rename.get(name, name) for name in saved]
    twice = sorted(set(policy.rename.values()) & set(repeated(new)))
    if twice:
        raise ValueError(f"rename: the checkpoint would have {twice} twice")
    return dict(policy.rename)


def _stored(
    manifest: Manifest, rename: Mapping[str, str], with_optimizer: bool
) -> dict[_Address, tuple[_Whole, list[Stored]]]:
    stored: dict[_Address, tuple[_Whole, list[Stored]]] = {}
    for (kind, name, state), pieces in manifest.by_address.items():
        if kind == OPTIMIZER and not with_optimizer:
            continue
        first, rule, shape = pieces[0], "", pieces[0].shape
        if kind == TABLE:
            facts = manifest.tables[name]
            rule = "" if state == WEIGHT else facts.rule or ""
            shape = (facts.rows, facts.dim) if len(first.shape) == 2 else (facts.rows,)
        # a table's rows may be a dense parameter of the model, and the other way round
        address = (DENSE if state == WEIGHT else kind, rename.get(name, name), state, rule)
        stored[address] = _Whole(shape, first.dtype), pieces
    return stored


def _wanted(contents: Contents) -> dict[_Address, _Whole]:
    wanted: dict[_Address, _Whole] = {}
    for name, table in contents.tables.items():
        wanted[DENSE, name, WEIGHT, ""] = _Whole((table.rows, table.dim), table.dtype)
        for state, is_row in table.states.items():
            shape = (table.rows,) if is_row else (table.rows, table.dim)
            wanted[TABLE, name, state, table.rule or ""] = _Whole(shape, torch.float32)
    for name, tensor in contents.dense.items():
        wanted[DENSE, name, WEIGHT, ""] = _Whole(tuple(tensor.shape), tensor.dtype)
    for leaf in contents.leaves:
        for name in leaf.params:
            for state, value in leaf.states(name).items():
                if isinstance(value, Tensor):
                    wanted[OPTIMIZER, name, state, ""] = _Whole(tuple(value.shape), value.dtype)
    return wanted


def _compare_one(what: str, theirs: _Whole, own: _Whole, report: Report, policy: LoadPolicy) -> bool:
    """Note how one tensor differs; whether it is loaded if the report is allowed."""
    if theirs.dtype != own.dtype:
        report.dtype[what] = dtype_name(theirs.dtype), dtype_name(own.dtype)
    if theirs.shape == own.shape:
        return True
    report.resized[what] = theirs.shape, own.shape
    alike = len(theirs.shape) == len(own.shape) > 0 and theirs.shape[1:] == own.shape[1:]
    if policy.resized == "overlap" and not alike:
        raise ValueError(
            f"{what} is {list(theirs.shape)} in the checkpoint, {list(own.shape)} in the model: resized='overlap'"
            " takes the rows that both have, all other dimensions must be equal"
        )
    return True


def _keep(matched: Matched, address: _Address, pieces: list[Stored]) -> None:
    kind, name, state, _ = address
    if kind == OPTIMIZER:
        matched.states.setdefault(name, {})[state] = pieces[0]
    else:
        matched.pieces[name, state] = pieces


def _match_values(manifest: Manifest, contents: Contents, matched: Matched, report: Report, optional: set[str]) -> None:
    """States of dense parameters that are no tensors."""
    if not contents.leaves:
        return
    saved = {matched.rename.get(name, name): dict(values) for name, values in manifest.values.items()}
    for leaf in contents.leaves:
        for name in leaf.params:
            theirs = saved.pop(name, {})
            keys = {key for key, value in leaf.states(name).items() if not isinstance(value, Tensor)}
            if name not in optional:
                report.missing += [f"{name}: {key}" for key in sorted(keys - set(theirs))]
                report.unexpected += [f"{name}: {key}" for key in sorted(set(theirs) - keys)]
                theirs = {key: value for key, value in theirs.items() if key in keys}
            if theirs:
                matched.values[name] = theirs
    report.unexpected += [f"{name}: {key}" for name, values in saved.items() for key in values]


def _refuse_other_classes(
    manifest: Manifest, contents: Contents, matched: Matched, report: Report, optional: set[str]
) -> None:
    """Have an optimizer that never stepped take no states of one of another class, which it could not use."""
    theirs = {
        matched.rename.get(name, name): group["optimizer"]
        for group in manifest.dense
        for name in (group["params"] if "optimizer" in group else ())
    }
    for leaf in contents.leaves:
        for name in sorted(optional & set(leaf.params)):
            if theirs.get(name, leaf.kind) != leaf.kind:
                states = [*matched.states.pop(name, {}), *matched.values.pop(name, {})]
                report.unexpected += [f"{name}: {theirs[name]} {state}" for state in states]
