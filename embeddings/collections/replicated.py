"""DistributedDataParallel around tables that their own backward trains: refused where it is built.

It averages the gradients of parameters, and such tables have none: each rank would train them by its own batch alone.
"""

from __future__ import annotations

from weakref import ReferenceType, WeakKeyDictionary, ref

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

# collections that a DistributedDataParallel holds, and which
_wrapped: WeakKeyDictionary[nn.Module, ReferenceType[nn.Module]] = WeakKeyDictionary()


def refuse_replicas_of(table: str) -> ValueError:
    """The error that names a table and what to use instead."""
    return ValueError(
        f"DistributedDataParallel around table {table!r}, which has an optimizer in the backward: the table has no"
        " gradient to average, so each rank would train it by its own batch alone. Wrap the model in"
        " shardwise.sharding.DistributedModelParallel, where dense layers are data parallel and tables sharded or"
        " replicated (data_parallel()); or leave the optimizer out of the backward: an ordinary one steps the table"
    )


def is_replicated(collection: nn.Module) -> bool:
    """Whether a DistributedDataParallel that is alive averages the gradients of this collection's tables."""
    wrapper = _wrapped.get(collection)
    return wrapper is not None and wrapper() is not None


def _check(wrapper: nn.Module, name: str, module: nn.Module | None) -> None:
    """Called by torch whenever a module gets another as its child."""
    if name != "module" or module is None or not isinstance(wrapper, DistributedDataParallel):
        return
    ignored: set[str] = getattr(wrapper, "parameters_to_ignore", set())
    for path, one in module.named_modules():
        # collections, and sharded ones
        if not hasattr(one, "_children_name"):
            continue
        below = {f"{path}.{inner}" if path else inner: param for inner, param in one.named_parameters()}
        averaged = {full: param for full, param in below.items() if full not in ignored}
        for full, param in averaged.items():
            # frozen ones too: they may train later, and the wrapper reads the marks of all
            if hasattr(param, "_optimizer_classes"):
                raise refuse_replicas_of(full.removesuffix(".weight").rpartition(".")[2])
        if averaged:
            _wrapped[one] = ref(wrapper)


# not DistributedDataParallel's own attributes: a hook of torch.nn is the same in every version and order of imports
register_module_module_registration_hook(_check)
