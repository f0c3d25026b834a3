"""`DistributedModelParallel.forward` in graphs of torch.compile: DistributedDataParallel's part of it is one op.

Its own forward ends a graph. Here the model inside is traced, and its outputs go through an op that does what DDP does
around a forward: it makes the reducer ready for a backward, in which the hooks of parameters average gradients as ever.

Shapes: outputs are any tensors with a gradient; they come back as copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import distributed
from torch.utils import _pytree as pytree

from ..compiled.registry import module_of
from ..compiled.step import recording, register_backward, register_ordered

if TYPE_CHECKING:
    from .dmp import DistributedModelParallel


def forward_in_graph(dmp: DistributedModelParallel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What torch.compile records of the model's forward.

    What DDP does more for some of its settings than an op can do ends the graph, as DDP does everywhere.
    """
    wrapped = dmp._dmp_wrapped_module
    if not isinstance(wrapped, distributed.DistributedDataParallel) or not _is_plain(wrapped):
        return wrapped(*args, **kwargs)
    output = wrapped.module(*args, **kwargs)
    leaves, tree = pytree.tree_flatten(output)
    places = [n for n, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if not places or not torch.is_grad_enabled():
        return output
    for n, copied in zip(places, _averaged([leaves[n] for n in places], dmp.graph_name), strict=True):
        leaves[n] = copied
    return pytree.tree_unflatten(leaves, tree)


def _is_plain(wrapped: Any) -> bool:
    """Whether all that DDP does around a forward is to make its reducer ready."""
    searches = wrapped.find_unused_parameters and not wrapped.static_graph
    sends_buffers = wrapped.broadcast_buffers and len(wrapped.modules_buffers) > 0
    casts = wrapped.mixed_precision is not None
    return not (
        searches or sends_buffers or casts or wrapped._use_python_reducer or wrapped._delay_all_reduce_all_params
    )


def _run_averaged(outputs: Sequence[Tensor], name: str) -> list[Tensor]:
    """Copies of the outputs, once DDP expects a backward."""
    wrapped: Any = module_of(name)._dmp_wrapped_module
    with recording(gradients=True):
        # it looks at the first argument, which it would move to its device
        wrapped._pre_forward(torch.empty(0, device="cpu"))
        wrapped._post_forward(())
    return [output.clone() for output in outputs]


def _run_averaged_backward(grads: Sequence[Tensor], name: str) -> list[Tensor]:
    """Copies of the gradients, once the first backward of a static graph has its end."""
    wrapped: nn.Module = module_of(name)._dmp_wrapped_module
    sink: Any = distributed._DDPSink
    sink.backward(SimpleNamespace(ddp_weakref=lambda: wrapped))
    return [grad.clone() for grad in grads]


def _fake(tensors: Sequence[Tensor], name: str) -> list[Tensor]:
    return [torch.empty_like(tensor) for tensor in tensors]


_averaged = register_ordered("averaged(Tensor[] outputs, str name) -> Tensor[]", _run_averaged, _fake)
_averaged_backward = register_ordered(
    "averaged_backward(Tensor[] grads, str name) -> Tensor[]", _run_averaged_backward, _fake
)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    ctx.name = inputs[1]


def _backward(ctx: Any, grads: list[Tensor]) -> tuple[list[Tensor], None]:
    return _averaged_backward(grads, ctx.name), None


register_backward(_averaged, _backward, _keep)
