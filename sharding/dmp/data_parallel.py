"""The layers of a model that are not sharded: values for what is on meta, their move to a device, data parallelism."""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from ..comms.env import ShardingEnv
from .unwrap import sharded_parameter_names

if TYPE_CHECKING:
    from .dmp import DistributedModelParallel
import warnings

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

# a lambda, as DDP knows torch's bf16 hook by its name and refuses it without NCCL; gloo serves it as well
_HOOKS: dict[str, Any] = {
    "fp16": default_hooks.fp16_compress_hook,
    "bf16": lambda state, bucket: default_hooks.bf16_compress_hook(state, bucket),
}


class DataParallelWrapper(abc.ABC):
    """How a `DistributedModelParallel` makes its dense layers data parallel."""

    @abc.abstractmethod
    def wrap(self, dmp: DistributedModelParallel, env: ShardingEnv, device: torch.device) -> None:
        """Put a wrapper in the place of `dmp._dmp_wrapped_module`, around it; it must leave sharded tables alone."""


class DefaultDataParallelWrapper(DataParallelWrapper):
    """DistributedDataParallel around all that is neither a shard nor trained in the backward; nothing if nothing is.

    Args:
        bucket_cap_mb, static_graph, find_unused_parameters: as DistributedDataParallel has them; with the static graph
            a layer that the loss never reaches is no error.
        allreduce_comm_precision: "fp16" or "bf16" halves the bytes of dense gradients on their way; None sends them as
            they are.
        params_to_ignore: more parameters to leave alone, by their names in the unsharded model.
        ddp_kwargs: further arguments of DistributedDataParallel; they go before ours.

    Raises:
        ValueError: the precision is unknown; from `wrap`: the model has no parameter of a name in `params_to_ignore`,
            or parameters are on meta.
    """

    def __init__(
        self,
        bucket_cap_mb: int = 25,
        static_graph: bool = True,
        find_unused_parameters: bool = False,
        allreduce_comm_precision: str | None = None,
        params_to_ignore: list[str] | None = None,
        ddp_kwargs: dict[str, Any] | None = None,
    ) -> None:
        if allreduce_comm_precision is not None and allreduce_comm_precision not in _HOOKS:
            raise ValueError(
                f"allreduce_comm_precision must be one of {[None, *_HOOKS]}, got {allreduce_comm_precision!r}"
            )
        self._precision, self._ignored = allreduce_comm_precision, list(params_to_ignore or [])
        self._kwargs: dict[str, Any] = {
            "bucket_cap_mb": bucket_cap_mb, "static_graph": static_graph,
            "find_unused_parameters": find_unused_parameters, "gradient_as_bucket_view": True,
            **(ddp_kwargs or {}),
        }  # fmt: skip

    def wrap(self, dmp: DistributedModelParallel, env: ShardingEnv, device: torch.device) -> None:
        """Wrap the model; see the class.

        Raises:
            ValueError: the model has no parameter of a name in `params_to_ignore`, or parameters are on meta.
        """
        module = dmp._dmp_wrapped_module
        names = dict(module.named_parameters(remove_duplicate=False))
        unknown = [name for name in self._ignored if name not in names]
        if unknown:
            raise ValueError(f"params_to_ignore {unknown}: the model has no such parameters")
        ignored = {*sharded_parameter_names(module), *self._ignored}
        trained = [param for name, param in names.items() if name not in ignored and param.requires_grad]
        if env.data_parallel_group is None or isinstance(module, DistributedDataParallel) or not trained:
            return
        missing = on_meta(module)
        if missing:
            raise ValueError(
                f"{missing} are on meta, and cannot be data parallel before they have values: pass init_parameters=True"
                ", or init_data_parallel=False and call init_data_parallel() when they have"
            )
        if not self._kwargs.get("broadcast_buffers"):
            # they stay each rank's own, as TorchRec leaves them; by name, as DDP's option changed between versions
            ignored.update(name for name, _ in module.named_buffers())
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ignored)  # type: ignore[no-untyped-call]
        wrapped = DistributedDataParallel(
            module,
            **{
                "device_ids": None if device.type == "cpu" else [device],
                "process_group": env.data_parallel_group,
                **self._kwargs,
            },
        )
        if self._kwargs["static_graph"]:
            _settle_buckets(wrapped)
        if self._precision is not None:
            wrapped.register_comm_hook(None, _HOOKS[self._precision])
        dmp._dmp_wrapped_module = wrapped


def _settle_buckets(wrapped: DistributedDataParallel) -> None:
    """Give gradients the buckets now that a static graph has from the second step on.

    What order a sum over more than two ranks is made in depends on where in a bucket a gradient lies. A run that goes
    on from a checkpoint would add its first step in another order than the run that was not stopped.
    """
    reducer = wrapped.reducer
    # a torch without these has sums of the first step in another order, and nothing else
    if hasattr(reducer, "_push_all_rebuilt_params") and hasattr(reducer, "_rebuild_buckets"):
        reducer._push_all_rebuilt_params()
        reducer._rebuild_buckets()


# what these hold is initialised by the module that has them
_HOLDERS = (nn.ParameterDict, nn.ParameterList)


@torch.no_grad()
def materialize(module: nn.Module, device: torch.device, stacklevel: int = 2) -> None:
    """Give what is on meta memory and its initial values; what exists is kept, and collections have theirs already.

    Values come from the module's `reset_parameters`; without one they are zeros, and a warning says so. Parameters of
    lazy modules wait for their first forward.
    """
    made: dict[int, Tensor] = {}
    zeros = []
    for path, child in module.named_modules():
        if isinstance(child, _HOLDERS) and path:
            continue
        owners = {"": child}
        owners.update({f"{name}.": holder for name, holder in child._modules.items() if isinstance(holder, _HOLDERS)})
        own: list[tuple[str, dict[str, Any]]] = [
            (prefix, tensors) for prefix, owner in owners.items() for tensors in (owner._parameters, owner._buffers)
        ]
        there = [(prefix + name, t) for prefix, tensors in own for name, t in tensors.items() if t is not None]
        kept = [t for _, t in there if not is_lazy(t) and not t.is_meta]
        names = [name for name, t in there if not is_lazy(t) and t.is_meta]
        for prefix, tensors in own:
            # tied tensors stay tied
            tensors.update(
                {
                    name: made.setdefault(id(t), _like(t, device))
                    for name, t in tensors.items()
                    if prefix + name in names
                }
            )
        reset: Any = getattr(child, "reset_parameters", None)
        if names and reset is not None:
            values = [t.clone() for t in kept]
            reset()
            for tensor, value in zip(kept, values, strict=True):
                tensor.copy_(value)
        else:
            zeros += [f"{path}.{name}" if path else name for name in names]
    if zeros:
        warnings.warn(
            f"{zeros} were on meta and their modules have no reset_parameters: they are zeros",
            stacklevel=stacklevel + 1,
        )


def on_meta(module: nn.Module) -> list[str]:
    """Names of parameters and buffers that have no memory yet."""
    named = [*module.named_parameters(), *module.named_buffers()]
    return [name for name, tensor in named if not is_lazy(tensor) and tensor.is_meta]


def move(module: nn.Module, device: torch.device) -> None:
    """`module.to(device)`, but what is on meta stays there."""
    if on_meta(module):
        module._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))  # type: ignore[no-untyped-call]
    else:
        module.to(device)


def _like(meta: Tensor, device: torch.device) -> Tensor:
    """Zeros in the shape of a tensor on meta, a parameter with the marks of that one if it was one."""
    zeros = torch.zeros_like(meta, device=device)
    if isinstance(meta, nn.Parameter):
        zeros = nn.Parameter(zeros, meta.requires_grad)
        vars(zeros).update(vars(meta))
    return zeros
