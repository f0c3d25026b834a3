"""A sharded collection's step as one op of a graph, and its backward as another.

Inside of the first runs the very forward of the eager module, whose autograd graph is kept for the second; what a
compiled model computes is then what the eager one does, collective for collective. A ticket, one number [1] on the
CPU, leads from the second to what the first kept; the memory of the ticket is what keeps it. The ops are ordered: no
compiler moves one past another, which would have ranks call their collectives in different orders.

Letters: B samples, N ids, D columns of all lookups.
"""

from __future__ import annotations

import abc
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np
import torch
from torch import Tensor

# torch offers no public name for an op whose order counts before 2.13
from torch._higher_order_ops.effects import _EffectType, _register_effectful_op
from torch.autograd.graph import GradientEdge, get_gradient_edge

from shardwise.jagged import KeyedJaggedTensor
from shardwise.kernels._op import outside_graphs

from ..comms.failures import agreed, is_agreed, raise_after_backward
from .registry import NamedInGraphs, module_of

_library = torch.library.Library("shardwise_sharded", "DEF")  # type: ignore[no-untyped-call]
# of a thread in which nothing traces and autograd records
_INCLUDED, _EXCLUDED = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()


@dataclass(frozen=True)
class Batch:
    """A `KeyedJaggedTensor` as arguments of an op.

    Args:
        sizes: the batch size of every key, or with `ranks` those of [keys][ranks] in one list.
        ranks: how many sizes each key has; 0 where all keys share one.
        inverse_keys: of `inverse` [keys, B], empty without.
    """

    keys: list[str]
    values: Tensor
    weights: Tensor | None
    lengths: Tensor | None
    offsets: Tensor | None
    inverse: Tensor | None
    inverse_keys: list[str]
    sizes: list[int]
    ranks: int

    def batch_sizes(self) -> list[int]:
        """Bags of each key."""
        if not self.ranks:
            return self.sizes * len(self.keys)
        return [sum(self.sizes[at : at + self.ranks]) for at in range(0, len(self.sizes), self.ranks)]

    def features(self, weights: Tensor | None) -> KeyedJaggedTensor:
        """The batch, with these weights."""
        ranks = self.ranks
        per_rank = [self.sizes[at : at + ranks] for at in range(0, len(self.sizes), ranks)] if ranks else None
        return KeyedJaggedTensor(
            self.keys, self.values, weights, self.lengths, self.offsets,
            stride=None if ranks else self.sizes[0], stride_per_key_per_rank=per_rank,
            inverse_indices=None if self.inverse is None else (self.inverse_keys, self.inverse),
        )  # fmt: skip


class OneOp(NamedInGraphs, abc.ABC):
    """A module whose step is one op of a graph."""

    @abc.abstractmethod
    def eager_outputs(self, features: KeyedJaggedTensor) -> list[Tensor]:
        """The tensors of the result of a forward that nothing traces; none is a view of the batch."""

    @abc.abstractmethod
    def fake_outputs(self, batch: Batch) -> list[Tensor]:
        """`eager_outputs` without values, for a graph that is traced."""

    @abc.abstractmethod
    def result_of(self, outputs: list[Tensor]) -> Any:
        """The result of which these are the tensors."""


def register_ordered(schema: str, implementation: Any, fake: Any) -> Any:
    """An op of a graph, for any device, that no compiler leaves out or moves past another such op."""
    name = schema.split("(")[0]
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))  # type: ignore[no-untyped-call]
    _library.impl(name, outside_graphs(implementation), "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"shardwise_sharded::{name}", fake, lib=_library)
    op = getattr(torch.ops.shardwise_sharded, name).default
    _register_effectful_op(op, _EffectType.ORDERED)
    return op


def register_backward(op: Any, backward: Any, setup_context: Any) -> None:
    """Give an ordered op its gradient, as `torch.library.register_autograd`."""
    torch.library.register_autograd(op._name, backward, setup_context=setup_context, lib=_library)


@contextmanager
def recording(*, gradients: bool) -> Iterator[None]:
    """Run as a program that nothing traces; autograd, which an op's implementation is below, records again."""
    with torch._C._ForceDispatchKeyGuard(_INCLUDED, _EXCLUDED), torch.set_grad_enabled(gradients):
        yield


def step_in_graph(collection: Any, features: Any) -> list[Tensor]:
    """What torch.compile records of a forward of a `ShardedCollection`: the tensors of its result."""
    if not isinstance(features, KeyedJaggedTensor):
        raise TypeError(f"a sharded collection takes a KeyedJaggedTensor, got {type(features).__name__}")
    weights, (inverse_keys, inverse) = features.weights_or_none(), features.inverse_indices_or_none() or ([], None)
    variable = features.variable_stride_per_key()
    per_rank = features.stride_per_key_per_rank() if variable else []
    sizes = [size for sizes in per_rank for size in sizes] if variable else [features.stride()]
    outputs: list[Tensor] = _step(
        collection._anchor, collection._tables.gradient_parameters(), features.values(), weights,
        features.lengths_or_none(), features.offsets_or_none(), inverse, sizes,
        len(per_rank[0]) if variable else 0, features.keys(), list(inverse_keys), collection.graph_name,
        torch.is_grad_enabled(), torch.is_grad_enabled() and weights is not None and weights.requires_grad,
    )  # fmt: skip
    # but the ticket
    return outputs[:-1]


@dataclass(frozen=True)
class _Kept:
    """What the backward of a step begins from and leads to."""

    outputs: list[GradientEdge]
    # of the outputs, those
    differentiable: list[int]
    # the anchor, weights that want gradients, and parameters
    inputs: list[Tensor]


_numbers = count()
# by the number of a ticket
_kept: dict[int, _Kept] = {}


def _ticket(kept: _Kept | None) -> Tensor:
    """A ticket [1] on the CPU that keeps this while any graph holds its memory."""
    number = next(_numbers)
    array = np.array([number])
    if kept is not None:
        _kept[number] = kept
        weakref.finalize(array, _kept.pop, number, None).atexit = False
    return torch.from_numpy(array)


def _run_step(
    anchor: Tensor,
    parameters: Sequence[Tensor],
    values: Tensor,
    weights: Tensor | None,
    lengths: Tensor | None,
    offsets: Tensor | None,
    inverse: Tensor | None,
    sizes: Sequence[int],
    ranks: int,
    keys: Sequence[str],
    inverse_keys: Sequence[str],
    name: str,
    update: bool,
    weights_learn: bool,
) -> list[Tensor]:
    """The outputs of a collection's forward, detached, and the ticket of its backward."""
    collection = module_of(name)
    batch = Batch(list(keys), values, weights, lengths, offsets, inverse, list(inverse_keys), list(sizes), ranks)
    if collection.routed_ahead:
        raise agreed(RuntimeError(
            "a pipeline sent a batch ahead, which a compiled step does not take: run the compiled model in a"
            " TrainPipelineBase, or compile the dense layers alone"
        ))  # fmt: skip
    try:
        with recording(gradients=update):
            own = None if weights is None else weights.detach().requires_grad_(weights_learn)
            outputs = collection.eager_outputs(batch.features(own))
            kept = None
            if update:
                places = [n for n, output in enumerate(outputs) if output.requires_grad]
                learning = [own] if own is not None and weights_learn else []
                inputs = [collection._anchor, *learning, *collection._tables.gradient_parameters()]
                kept = _Kept([get_gradient_edge(outputs[n]) for n in places], places, inputs)
    except BaseException as error:
        if collection._exchange.watch is not None:
            collection._exchange.watch.report(error, "in forward")
        raise
    return [*(output.detach() for output in outputs), _ticket(kept)]


def _fake_step(
    anchor: Tensor,
    parameters: Sequence[Tensor],
    values: Tensor,
    weights: Tensor | None,
    lengths: Tensor | None,
    offsets: Tensor | None,
    inverse: Tensor | None,
    sizes: Sequence[int],
    ranks: int,
    keys: Sequence[str],
    inverse_keys: Sequence[str],
    name: str,
    update: bool,
    weights_learn: bool,
) -> list[Tensor]:
    batch = Batch(list(keys), values, weights, lengths, offsets, inverse, list(inverse_keys), list(sizes), ranks)
    return [*module_of(name).fake_outputs(batch), torch.empty(1, dtype=torch.int64, device="cpu")]


_step = register_ordered(
    "sharded_step(Tensor anchor, Tensor[] parameters, Tensor values, Tensor? weights, Tensor? lengths, Tensor? offsets,"
    " Tensor? inverse, SymInt[] sizes, int ranks, str[] keys, str[] inverse_keys, str name, bool update,"
    # one list: inductor takes sizes that nobody knows from an ordered op with one result alone
    " bool weights_learn) -> Tensor[]",
    _run_step,
    _fake_step,
)


def _run_backward(
    grads: Sequence[Tensor], ticket: Tensor, name: str, ids: int, dtype: torch.dtype | None
) -> list[Tensor]:
    """Gradients of anchor [1], weights [ids] if they want one, which is where `dtype` is theirs, and parameters."""
    # of a number on the CPU, which waits for nothing
    kept = _kept.pop(int(ticket), None)
    if kept is None:
        raise RuntimeError(f"a second backward through one compiled step of {name!r}: its tables are trained by one")
    failure: list[Exception] = []
    found: Sequence[Tensor | None] = [None] * len(kept.inputs)
    with recording(gradients=False):
        try:
            upstream = [grads[n] for n in kept.differentiable]
            found = torch.autograd.grad(kept.outputs, kept.inputs, upstream, allow_unused=True)
        except Exception as error:
            if not is_agreed(error):
                raise
            failure.append(error)
        full = [torch.zeros_like(of) if grad is None else grad for of, grad in zip(kept.inputs, found, strict=True)]
    if failure:
        raise_after_backward(failure[0])
    return full


def _fake_backward(
    grads: Sequence[Tensor], ticket: Tensor, name: str, ids: int, dtype: torch.dtype | None
) -> list[Tensor]:
    collection = module_of(name)
    made = [torch.empty(1, device=collection.device)]
    if dtype is not None:
        made.append(torch.empty(ids, dtype=dtype, device=collection.device))
    return made + [
        torch.empty(p.shape, dtype=p.dtype, device=p.device) for p in collection._tables.gradient_parameters()
    ]


_step_backward = register_ordered(
    "sharded_step_backward(Tensor[] grads, Tensor ticket, str name, SymInt ids, ScalarType? dtype) -> Tensor[]",
    _run_backward,
    _fake_backward,
)


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    weights, name, weights_learn = inputs[3], inputs[11], inputs[13]
    ctx.save_for_backward(output[-1])
    # torch takes an empty list for one of tensors, whose gradients are a list too
    ctx.name, ctx.inputs = name, [[] if isinstance(given, (list, tuple)) and not given else None for given in inputs]
    ctx.ids, ctx.dtype = (weights.shape[0], weights.dtype) if weights_learn else (0, None)


def _backward_of_step(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
    (ticket,) = ctx.saved_tensors
    anchor, *others = _step_backward(grads[:-1], ticket, ctx.name, ctx.ids, ctx.dtype)
    of_weights = others.pop(0) if ctx.dtype is not None else None
    given = list(ctx.inputs)
    given[0], given[1], given[3] = anchor, others, of_weights
    return tuple(given)


register_backward(_step, _backward_of_step, _keep_for_backward)
