"""The way of a batch's ids ahead of its step: they leave, arrive, and are taken by the model's forward.

Every rank calls `start`, `send` and `arrive` for the same batches in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from shardwise.jagged import KeyedJaggedTensor
from shardwise.sharding.comms.exchange import Exchange
from shardwise.sharding.comms.failures import agreed
from shardwise.sharding.engine.stages import StagedModule
from shardwise.sharding.modules.sharded_collections import ShardedEmbeddingBagCollection, ShardedEmbeddingCollection

from .calls import Calls, Started
from .feed import Fetched
from .own_modules import OwnModule
from .streams import current, on, record_stream, wait_for

In = TypeVar("In")


def in_step(started: Started) -> str | None:
    """Why a call is not looked up ahead of its step; None where it may be."""
    if started.call.module.maps_ids:
        return "its ids are mapped to rows by what it has learned when their step comes"
    if started.call.around is not None:
        return "its weights are made by feature processors that are trained"
    return None


class Ahead(Generic[In]):
    """Routes batches of a model ahead, on a stream of its own.

    Args:
        agrees_by: an exchange between all ranks that train the model, and the device whose tensors it takes.
        prepares: whether inputs that the model makes itself are made ahead.
        rows_stream: where rows are brought to their slots; None: where the forward is.
        frees: whether the memory of a batch's features is freed once they are lined up to leave.
    """

    def __init__(
        self,
        model: nn.Module,
        agrees_by: tuple[Exchange, torch.device],
        stream: torch.Stream | None,
        *,
        prepares: bool,
        rows_stream: torch.Stream | None = None,
        frees: bool = False,
    ) -> None:
        self._model, self._frees, self._rows_stream = model, frees, rows_stream
        self._calls, self._stream = Calls(model, *agrees_by, prepares=prepares), stream

    def collections(self) -> list[nn.Module]:
        """The sharded modules of the model."""
        return self._calls.sharded_modules()

    def can_start(self, fetched: Fetched[In]) -> bool:
        """Whether the calls of the batch's step are known, and it is a batch that may leave."""
        if (torch.is_grad_enabled(), self._model.training) not in self._calls.known or fetched.mode is not None:
            return False
        return not (fetched.ended or fetched.error is not None or fetched.stays)

    def start(self, fetched: Fetched[In], given: In | None = None) -> None:
        """Have the batch's sizes leave; does nothing the second time, or where its calls are not known yet.

        `given` is routed in the place of the batch; the model's step then takes it whatever it is called with.
        """
        if not self.can_start(fetched):
            return
        mode = fetched.mode = torch.is_grad_enabled(), self._model.training
        calls = self._calls.known[mode]
        with on(self._stream):
            own = fetched.use(self._stream)
            batch = own if given is None else given
            fetched.is_replaced = batch is not own
            for call in calls:
                with torch.set_grad_enabled(call.grad):
                    features: Any
                    try:
                        features = call.input_of(batch)
                    except Exception as error:
                        # in the place of the batch, so that no rank waits for this one
                        features = error
                    fetched.started.append(Started(call, features, call.start(features)))

            if self._frees and self._calls.reads_batches_ahead(mode) and not fetched.is_replaced:
                self._free(fetched)

    def _free(self, fetched: Fetched[In]) -> None:
        """Free what of the batch's features is read by nobody later: sharded modules have copies, in another order."""
        # by the batch that several modules may share: the tensors that one of them still reads
        read: dict[int, set[str]] = {}
        batches: dict[int, KeyedJaggedTensor] = {}
        for one in fetched.started:
            module = one.call.module
            assert isinstance(module, ShardedEmbeddingBagCollection | ShardedEmbeddingCollection)
            if not isinstance(one.features, KeyedJaggedTensor) or not hasattr(one.step, "sent_ids"):
                # a batch that is bad here: all ranks raise in its place
                return
            batches[id(one.features)] = one.features
            read.setdefault(id(one.features), set()).update(module.read_later(one.step))
        kept = {
            tensor.untyped_storage().data_ptr()
            for number, batch in batches.items()
            for name, tensor in batch.storages().items()
            if name in read[number]
        }
        freed = [
            tensor
            for batch in batches.values()
            for tensor in batch.storages().values()
            if tensor.untyped_storage().data_ptr() not in kept and not tensor.requires_grad
        ]
        for one in fetched.started:
            one.step.part_from(freed)
        for tensor in freed:
            tensor.untyped_storage().resize_(0)
        fetched.is_freed = True

    def clear_inputs(self, fetched: Fetched[In]) -> None:
        """Let go what was sent for a batch whose ids have arrived."""
        for one in fetched.started:
            one.step.release_sent()

    def send(self, fetched: Fetched[In]) -> None:
        """Wait for the sizes of all ranks, and have the batch's ids leave.

        What is wrong with the batch becomes its `error`, on all ranks.
        """
        fetched.is_sent = fetched.mode is not None
        with on(self._stream):
            for one in fetched.started:
                try:
                    one.call.module.send_ids(one.step)
                except Exception as error:
                    fetched.error = fetched.error or error
        if fetched.error is not None:
            self.drop(fetched)

    def arrive(self, fetched: Fetched[In]) -> None:
        """Wait for the ids of all ranks. A batch that left for another kind of step is dropped."""
        self._arrive(fetched, maps=True)

    def _arrive(self, fetched: Fetched[In], *, maps: bool) -> None:
        """`arrive`; without `maps` modules whose ids are mapped are left out."""
        if fetched.mode is not None and fetched.mode != (torch.is_grad_enabled(), self._model.training):
            if fetched.is_freed:
                fetched.error = agreed(RuntimeError(
                    "the batch left ahead for another kind of step (train() or eval(), with gradients or without), and"
                    " its features were freed: leave free_features_storage_early=False, or reset() before such a change"
                ))  # fmt: skip
            self.drop(fetched)
        if not fetched.is_sent:
            self.send(fetched)
        here = current(self._stream)
        with on(self._stream):
            for one in fetched.started:
                if one.call.module.maps_ids and not maps:
                    continue
                one.call.module.receive_ids(one.step)
                if here is not None:
                    record_stream(one.step, here)
        wait_for(self._stream)

    def receive(self, fetched: Fetched[In]) -> None:
        """Wait for the ids of a batch before its turn. All ranks call it for the same batches in the same order.

        One that left for another kind of step than that of now stays as it is: its own may be of that kind.
        """
        if fetched.is_here or fetched.mode != (torch.is_grad_enabled(), self._model.training):
            return
        with on(self._rows_stream):
            self._arrive(fetched, maps=False)
        fetched.is_here = True

    def announce(self, fetched: Fetched[In]) -> None:
        """Tell row stores of a batch that was received: nothing is brought yet, and they know what to keep.

        In the order of the batches. What `prefetch` leaves out is left out here.
        """
        if fetched.is_announced or not fetched.is_here:
            return
        with on(self._rows_stream):
            for one in fetched.started:
                if not one.call.module.maps_ids:
                    one.call.module.announce(one.step)
        fetched.is_announced = True

    def prefetch(self, fetched: Fetched[In]) -> bool:
        """Bring the rows of a batch into the slots of their stores, once its ids have arrived.

        False where some store has no room yet: ask again before a later batch. That hangs on the rows of this rank, so
        nothing is exchanged here for a batch that was received. Ids that are mapped to rows wait for their step: a map
        learns from what it maps if that trains, and only then it is certain that this batch does, and that it is not
        dropped.
        """
        self.receive(fetched)
        if fetched.is_prefetched or not fetched.is_here:
            # one that did not leave brings its rows itself
            return fetched.is_prefetched or fetched.mode is None
        here, rows_stream = current(self._rows_stream), self._rows_stream
        is_there = True
        for one in fetched.started:
            module = one.call.module
            if one.is_prefetched or module.maps_ids:
                continue
            if rows_stream is None or not isinstance(module, StagedModule):
                # a user's own knows nothing of our streams
                wait_for(rows_stream)
                one.is_prefetched = module.prefetch(one.step) is not False
            else:
                with on(rows_stream):
                    one.is_prefetched = module.prefetch(one.step, here)
                # slots were made there
                record_stream(one.step, here)
            is_there = is_there and one.is_prefetched
        fetched.is_prefetched = is_there
        return is_there

    def look_up(self, fetched: Fetched[In], *, all_tables: bool, used_on: torch.Stream | None = None) -> None:
        """Look up a batch whose ids have arrived, on the current stream; the forward will be `used_on` another one.

        Does nothing the second time.

        With `all_tables` also tables that every rank holds and such as are trained by their gradient, so that no table
        is read after an update that comes before the forward. What `in_step` names waits for its step.
        """
        self._arrive(fetched, maps=False)
        for one in fetched.started:
            if in_step(one) is not None:
                continue
            with torch.set_grad_enabled(one.call.grad):
                one.call.module.look_up(one.step, all_tables=all_tables)
            if used_on is not None:
                record_stream(one.step, used_on)

    @contextmanager
    def taken(self, fetched: Fetched[In], batch: Any) -> Iterator[None]:
        """Run the model's forward of `batch` inside: its sharded modules take what has arrived for them.

        Raises:
            RuntimeError: the model left something.
        """
        own: list[OwnModule] = []
        for one in fetched.started:
            module: Any = one.call.module
            takes_any = one.call.is_prepared or fetched.is_replaced
            one.step.taken_by = None if takes_any else one.features
            module.routed_ahead.append(one.step)
            if isinstance(module, OwnModule) and module not in own:
                own.append(module)
                module.replace_forward()
        left: list[str] = []
        try:
            with self._calls.watching(batch):
                yield
        finally:
            for module in own:
                module.restore_forward()
            for one in fetched.started:
                module = one.call.module
                while module.routed_ahead:
                    module.drop(module.routed_ahead.popleft())
                    left.append(one.call.name)
            fetched.started = []
        if left:
            raise RuntimeError(
                f"modules {left}: the batch was routed for them, and the model did not call them with it. Call them in"
                " every step with the same part of the batch, or train without the pipeline"
            )

    def drop(self, fetched: Fetched[In]) -> None:
        """Let go what left ahead; the model routes the batch itself."""
        # what comes lies in memory of that stream, which must know of its end before it gives the memory away
        with on(self._stream):
            for one in fetched.started:
                one.step.settle()
        for one in fetched.started:
            one.call.module.drop(one.step)
        fetched.started, fetched.mode, fetched.is_sent = [], None, False
        fetched.is_here = fetched.is_announced = fetched.is_prefetched = False
