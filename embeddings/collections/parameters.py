"""Weights of a collection as others handle them: moved, replaced by other parameters, or by tensors for one forward.

A parameter that takes a table's place becomes the view of the group's buffer, with its values: the object that others
hold is the one that trains. What cannot be such a view (a tensor of `torch.func.functional_call`, one parameter for two
tables, what a parametrization computes) is copied into a buffer of that lookup alone, and gradients reach it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor

from ..tables.table_group import TableGroup
from ..tables.table_layout import laid_out

_data_ptr = Tensor.data_ptr


def memory(params: Sequence[Tensor]) -> list[int]:
    """Which object each is, then where the memory of each is; 0 for those that have none (meta, fake)."""
    if set(map(type, params)) == {nn.Parameter}:
        return [*map(id, params), *map(_data_ptr, params)]
    return [*map(id, params), *(param.data_ptr() if type(param) is nn.Parameter else 0 for param in params)]


def address(tensor: Tensor) -> int:
    """Where a tensor's memory is; 0 for tensors that have none (meta, fake, in a transform of torch.func)."""
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.is_meta or is_functorch_wrapped_tensor(tensor):
        return 0
    return tensor.data_ptr()


def loose_tables(params: Sequence[Tensor], names: Sequence[str]) -> tuple[int, ...]:
    """The tables whose weight can be no view of a buffer: it is no parameter, or that of several tables.

    Raises:
        ValueError: a weight is a DTensor, or what fully_shard gathered of one; names the table.
    """
    gathered = _gathered_by_fully_shard()
    for name, param in zip(names, params, strict=True):
        if hasattr(param, "placements") or id(param) in gathered:
            raise ValueError(
                f"table {name!r}: its weight is a DTensor, as fully_shard makes them: tables are sharded by"
                " DistributedModelParallel"
            )
    if set(map(type, params)) <= {nn.Parameter} and len(set(map(id, params))) == len(params):
        return ()
    numbers = list(map(id, params))
    return tuple(
        t for t, param in enumerate(params) if not isinstance(param, nn.Parameter) or numbers.count(id(param)) > 1
    )


def _gathered_by_fully_shard() -> set[int]:
    """The `id` of each parameter that fully_shard gathered for a forward: rows that it forgets afterwards."""
    states = getattr(sys.modules.get("torch.distributed._composable_state"), "_module_state_mapping", {})
    groups = [getattr(state(), "_fsdp_param_group", None) for state in states.values()]
    return {
        id(param._unsharded_param)
        for group in groups
        for param in getattr(group, "fsdp_params", ())
        if hasattr(param, "_unsharded_param")
    }


def require_shapes(group: TableGroup, given: Mapping[int, Tensor]) -> None:
    """ValueError unless weights have the shapes of these tables of the group."""
    for number, weight in given.items():
        wanted = group.view(number).shape
        if weight.shape != wanted:
            raise ValueError(
                f"table {group.tables[number].name!r}: its weight must be {list(wanted)}, got {list(weight.shape)}"
            )


def require_one_dtype(group: TableGroup, params: Mapping[int, Tensor]) -> bool:
    """Whether all parameters of a group have one dtype.

    Raises:
        ValueError: they are on several devices; names the tables.
    """
    by_device: dict[str, list[str]] = {}
    for number, param in params.items():
        by_device.setdefault(str(param.device), []).append(group.tables[number].name)
    if len(by_device) > 1:
        where = " and ".join(f"{names} on {device}" for device, names in by_device.items())
        raise ValueError(f"tables {where}: give all weights of a collection one device, or call to_empty first")
    return len({param.dtype for param in params.values()}) == 1


def adopt(group: TableGroup, given: Mapping[int, nn.Parameter]) -> None:
    """Make parameters that took the place of the group's own the views of its buffer, with their values.

    The group goes where they are, in their dtype, which all of its tables have. The parameters before keep their rows.

    Raises:
        ValueError: tables would get a dtype in which they cannot train.
    """
    some = next(iter(given.values()))
    if (some.dtype, some.device) != (group.flat.dtype, group.flat.device):
        # those that stay are loose: no view of the buffer, but rows that come back with it
        stay = {n: group.view(n) for n in range(len(group.tables)) if n not in given}
        group.move(partial(torch.empty_like, dtype=some.dtype, device=some.device))
        for n, rows in stay.items():
            if not rows.is_meta:
                group.view(n).copy_(rows)
    for n, param in given.items():
        replace(group, n, param, group.view(n))


def carry_marks(group: TableGroup, given: Mapping[int, nn.Parameter]) -> None:
    """Give parameters what those had whose place they took: an optimizer in the backward, above all."""
    for number, param in given.items():
        for name, value in vars(group.parameters[number]).items():
            vars(param).setdefault(name, value)


def replace(group: TableGroup, number: int, param: nn.Parameter, view: Tensor) -> None:
    """Have `param` take the place of a table's parameter: its rows go to `view`, which it becomes."""
    before = group.parameters[number]
    overwrites = address(before) and address(before) == address(view)
    group.parameters[number], previous = param, ref(before)
    del before
    held = previous()
    if held is not None and overwrites:
        # somebody holds it, and it keeps its rows
        held.data = view.clone()
    if not (view.is_meta or param.is_meta):
        view.copy_(param.detach())
    param.data = view


def take_memory_back(param: nn.Parameter, view: Tensor) -> None:
    """Copy into the flat buffer what `param.data = ...` put elsewhere."""
    if address(view) and address(param) != address(view):
        view.copy_(param.detach())
        param.data = view


def given_group(group: TableGroup, weights: Sequence[Tensor]) -> TableGroup:
    """A group that looks up these weights, one a table, which gradients reach; it has no optimizer.

    Raises:
        ValueError: a weight has another shape than its table, or they are on several devices.
    """
    require_shapes(group, dict(enumerate(weights)))
    if len({weight.device for weight in weights}) > 1:
        devices = {table.name: str(weight.device) for table, weight in zip(group.tables, weights, strict=True)}
        raise ValueError(f"weights of tables that are looked up together must be on one device, got {devices}")
    device, given = group.device, copy(group)
    given.optimizer, given.parameters = None, []
    given.flat = laid_out(group.cuts, weights)
    if given.flat.device != device:
        given._place(given.flat.device, fresh=True)
    return given


def move_tables(groups: Sequence[TableGroup], children: nn.ModuleDict, fn: Callable[[Tensor], Tensor]) -> None:
    """`nn.Module._apply` for tables: each parameter on its own would be torn out of its group's buffer.

    `children[table]` holds the parameter of each table. Across meta and a real device parameters become new objects.
    """
    for group in groups:
        group.move(fn)
        for number, table in enumerate(group.tables):
            child, view = children[table.name], group.view(number)
            own = group.parameters[number]
            if child._parameters.get("weight") is own:
                group.parameters[number] = _move_parameter(child, view, fn)
            else:
                # its weight is no view of the buffer
                child._apply(fn)  # type: ignore[no-untyped-call]
                group.parameters[number] = nn.Parameter(view, requires_grad=own.requires_grad)


def _move_parameter(child: nn.Module, view: Tensor, fn: Callable[[Tensor], Tensor]) -> nn.Parameter:
    old = child._parameters["weight"]
    assert old is not None
    grad = None if old.grad is None else fn(old.grad)
    param = old
    if old.is_meta == view.is_meta:
        old.data = view
    else:
        param = nn.Parameter(view, requires_grad=old.requires_grad)
        vars(param).update(vars(old))
        child._parameters["weight"] = param
    param.grad = grad
    return param


def take_back(module: Any) -> None:
    """After `load_state_dict(assign=True)`: the collection's own parameters return, with the values of the new ones.

    Raises:
        ValueError: tables would stay on meta while others of their group have memory.
    """
    children, loose = module._children(), set(module._loose)
    for group, tables in module._grouped():
        weights = [children[table.name]._parameters.get("weight") for table in group.tables]
        given = {
            n: new
            for n, new in enumerate(weights)
            if new is not None and tables[n] not in loose and new is not group.parameters[n]
        }
        for n in given:
            children[group.tables[n].name]._parameters["weight"] = group.parameters[n]
        if not given:
            continue
        device = next(iter(given.values())).device
        if group.flat.is_meta and device.type != "meta":
            missing = [table.name for n, table in enumerate(group.tables) if n not in given]
            if missing:
                raise ValueError(f"tables {missing} would stay on meta: load them too, or call to_empty first")
            move_tables([group], children, partial(torch.empty_like, device=device))
        for n, values in given.items():
            view, param = group.view(n), group.parameters[n]
            view.copy_(values)
            if address(param) != address(view):
                # what `param.data = ...` put elsewhere is older
                param.data = view
