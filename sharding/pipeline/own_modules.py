"""Sharded modules of a user's own in a pipeline: their batches go ahead by their stages."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

from torch import nn

from shardwise.sharding.comms.awaitable import Awaitable
from shardwise.sharding.engine.stages import StagedModule
from shardwise.sharding.plan.sharded_module import ShardedModule
from shardwise.sharding.quant.collection import ShardedQuantizedCollection


@dataclass(eq=False)
class StagedStep:
    """A batch of a module that is under way."""

    context: Any
    # what `input_dist` returned, what the first wait gave, and the second
    sizes: Awaitable[Any]
    ids: Awaitable[Any] | None = None
    dist_input: Any = None
    # of `compute_and_output_dist`, where that was called ahead
    result: Any = None
    # the very object that the forward must be called with to take this step, or None: any
    taken_by: object | None = None

    def settle(self) -> None:
        """Wait for what travels."""
        self.sizes.wait().wait()

    def release_sent(self) -> None:
        """What was sent is the module's own."""


class OwnModule:
    """What routes batches ahead for such a module, and gives its forward those that were routed."""

    # it may do more than move ids, and is known to nobody here
    maps_ids = False

    def __init__(self, module: ShardedModule[Any, Any, Any, Any]) -> None:
        self.module = module
        self.routed_ahead: deque[StagedStep] = deque()
        # the module's forward while another is in its place, and whether that was the instance's own
        self._forward, self._had_own = module.forward, False

    def start(self, features: Any) -> StagedStep:
        """Call `input_dist` with the batch. Raises what `features` is, if that is an error of this rank."""
        if isinstance(features, Exception):
            raise features
        context = self.module.create_context()
        args, kwargs = self.module.preprocess_input([features], {})
        return StagedStep(context, self.module.input_dist(context, *args, **kwargs))

    def send_ids(self, step: StagedStep) -> None:
        """The first wait; nothing the second time."""
        step.ids = step.sizes.wait()

    def receive_ids(self, step: StagedStep) -> None:
        """The second wait; nothing the second time."""
        assert step.ids is not None
        step.dist_input = step.ids.wait()

    def prefetch(self, step: StagedStep) -> bool | None:
        """The module's own."""
        return self.module.prefetch(step.dist_input, ctx=step.context)

    def announce(self, step: StagedStep) -> None:
        """The stages of others know nothing of batches to come."""

    def look_up(self, step: StagedStep, *, all_tables: bool = False) -> None:
        """Call `compute_and_output_dist` ahead of the module's call, which then returns its result."""
        if step.result is None:
            step.result = self.module.compute_and_output_dist(step.context, step.dist_input)

    def drop(self, step: StagedStep) -> None:
        """Let a batch go that no forward will take."""
        step.settle()

    def replace_forward(self) -> None:
        """Have the module's calls take what was routed, until `restore_forward`."""
        self._had_own, self._forward = "forward" in vars(self.module), self.module.forward
        self.module.forward = self._take  # type: ignore[method-assign]

    def restore_forward(self) -> None:
        """Undo it."""
        del self.module.forward
        if self._had_own:
            self.module.forward = self._forward  # type: ignore[method-assign]

    def _take(self, *input: Any, **kwargs: Any) -> Any:
        given = input[0] if input else next(iter(kwargs.values()), None)
        step = self.routed_ahead[0] if self.routed_ahead else None
        if step is None or (step.taken_by is not None and step.taken_by is not given):
            return self._forward(*input, **kwargs)
        self.routed_ahead.popleft()
        if step.result is not None:
            return step.result
        return self.module.compute_and_output_dist(step.context, step.dist_input)


def own_modules(model: nn.Module) -> dict[str, OwnModule]:
    """Sharded modules that are not ours, by their first paths; what lies in one is its own affair."""
    found: dict[str, OwnModule] = {}
    for path, module in model.named_modules():
        ours = isinstance(module, StagedModule | ShardedQuantizedCollection)
        if isinstance(module, ShardedModule) and not ours and not any(path.startswith(f"{outer}.") for outer in found):
            found[path] = OwnModule(module)
    return found
