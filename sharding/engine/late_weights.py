"""Weights of ids that follow their ids: what makes them, a feature processor, is trained by the step before."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from shardwise.embeddings.tables.variable_batch import pad_strides
from shardwise.jagged import KeyedJaggedTensor

from ..comms.consensus import raise_first
from .route import divide_ahead, route
from .routes import Routes
from .step import Step
from .wire import unpack_weights

if TYPE_CHECKING:
    from .collection import ShardedCollection


def finish_weights(collection: ShardedCollection, step: Step, features: KeyedJaggedTensor | Exception) -> None:
    """Send the weights of a batch whose ids left ahead of them: what makes them is trained by the step before.

    Raises, on all ranks, what `features` is on some rank; ValueError: it is not the batch that left.
    """
    lenient = step.sending.lenient
    weighed = step
    failure: Exception | None = None
    try:
        if isinstance(features, Exception):
            raise features
        padded = pad_strides(features) if features.variable_stride_per_key() else features
        weighed = _route_again(step, collection._routes, padded, lenient=lenient)
    except Exception as error:
        failure = error
    weights = weighed.sent_weights
    assert weights is not None
    flag = torch.tensor([int(failure is not None)], dtype=torch.int32, device="cpu").to(collection.device)
    pending = collection._exchange.rows(weights.detach(), step.ids_to, step.ids_from, flag=flag, what="weights")
    received = pending.wait()
    if any(pending.flags):
        collection.drop(step)
        raise_first(collection._exchange, pending.flags, failure, collection.device)
    step.sent_weights, step.received_weights = weights, unpack_weights(step, received)
    step.replicated, step.division, step.awaits_weights = weighed.replicated, weighed.division, False


def _route_again(step: Step, routes: Routes, features: KeyedJaggedTensor, *, lenient: bool) -> Step:
    """A batch that was lined up as `step` without its weights, lined up once more with them; `features` are padded.

    Raises:
        ValueError: it is not the batch that was lined up.
    """
    weights = features.weights() if step.update else features.weights().detach()
    weighed = Step(step.update, step.receiving)
    weighed.routed, weighed.sending = features, step.sending
    if step.sending.batch_keys != list(features.keys()):
        raise ValueError(f"the batch that left ahead has keys {step.sending.batch_keys}, this one {features.keys()}")
    sizes = None if step.division is None else step.division.sizes
    divided = divide_ahead(features, routes, step.sending, weights, lenient=lenient) if step.divided_ahead else None
    if divided is not None and sizes is not None:
        divided.sizes = sizes
    route(weighed, routes, weights, lenient=lenient, divided=divided, sizes=sizes)
    if weighed.counts != step.counts:
        raise ValueError("the batch that left ahead has other ids: what makes weights may change nothing else of it")
    return weighed
