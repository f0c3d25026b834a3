"""`ShardedModule`: the stages of a module whose tables are sharded, by TorchRec's names.

A sharder of yours returns a subclass; `DistributedModelParallel` puts it in the place of the module, and leaves out of
data parallelism what its `sharded_parameter_names` names. Pipelines call the first stages of a batch ahead of its step.

    ctx = module.create_context()
    dist_input = module.input_dist(ctx, features).wait().wait()  # sizes, then ids of all ranks
    output = module.compute_and_output_dist(ctx, dist_input)  # what `module(features)` gives
"""

from __future__ import annotations

import abc
from collections.abc import Iterator, Mapping
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from shardwise.jagged import Multistreamable
from shardwise.jagged.scripting import NotScriptable
from shardwise.jagged.tracing import OneNode, holds_proxy, record_forward

from ..comms.awaitable import Awaitable

T = TypeVar("T")
Named = TypeVar("Named", bound="ShardedModule[Any, Any, Any, Any]")
# what is looked up on this rank, what its lookups give, the module's output, and what belongs to one step
CompIn = TypeVar("CompIn")
DistOut = TypeVar("DistOut")
Out = TypeVar("Out")
ShrdCtx = TypeVar("ShrdCtx")


class NullShardedModuleContext(Multistreamable):
    """The context of modules that keep nothing of a step."""

    def record_stream(self, stream: torch.Stream) -> None:
        """There is nothing to keep."""

    def __setattr__(self, key: str, value: object) -> None:
        raise AttributeError(f"NullShardedModuleContext keeps nothing of a step, {key!r} neither")


class ShardedModule(OneNode, NotScriptable, nn.Module, abc.ABC, Generic[CompIn, DistOut, Out, ShrdCtx]):
    """A module that is sharded, and the stages of its forward; all ranks call them in the same order.

    Args:
        qcomm_codecs_registry: codecs of the exchanges, as `get_qcomm_codecs_registry` makes them.
    """

    def __init__(self, qcomm_codecs_registry: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        self._qcomm_codecs_registry = dict(qcomm_codecs_registry or {})
        # TorchRec's programs read it
        self._module_fqn: str | None = None

    @property
    def module_fqn(self) -> str | None:
        """Its path in the model; None where the sharder was told none. The sharder sets it."""
        return self._module_fqn

    def named_in_model(self: Named, module_fqn: str | None) -> Named:
        """This module, once it knows its path in the model."""
        self._module_fqn = module_fqn
        return self

    @property
    def qcomm_codecs_registry(self) -> dict[str, Any]:
        """Codecs of the exchanges; empty without any."""
        return self._qcomm_codecs_registry

    @property
    @abc.abstractmethod
    def unsharded_module_type(self) -> type[nn.Module]:
        """The class of the module before it was sharded."""

    @abc.abstractmethod
    def create_context(self) -> ShrdCtx:
        """What the stages of one step share."""

    @abc.abstractmethod
    def input_dist(self, ctx: ShrdCtx, *input: Any, **kwargs: Any) -> Awaitable[Awaitable[CompIn]]:
        """Send the batch to the ranks that serve it; the first wait is for sizes of all ranks, the second for ids."""

    @abc.abstractmethod
    def compute(self, ctx: ShrdCtx, dist_input: CompIn) -> DistOut:
        """Look up what all ranks asked this one for."""

    @abc.abstractmethod
    def output_dist(self, ctx: ShrdCtx, output: DistOut) -> Any:
        """Send what was found to the ranks that asked: a `LazyAwaitable` of the module's output, or the output."""

    def compute_and_output_dist(self, ctx: ShrdCtx, input: CompIn) -> Any:
        """Both; a subclass may send the first results while it looks others up."""
        return self.output_dist(ctx, self.compute(ctx, input))

    def prefetch(
        self, dist_input: CompIn, forward_stream: torch.Stream | None = None, ctx: ShrdCtx | None = None
    ) -> bool | None:
        """Bring what the lookup of a batch needs closer, before its turn; False where there is no room yet."""
        return None

    def forward(self, *input: Any, **kwargs: Any) -> Any:
        """The stages in order."""
        if holds_proxy(input) or holds_proxy(kwargs):
            return record_forward(ShardedModule.forward, self, *input, **kwargs)
        ctx = self.create_context()
        dist_input = self.input_dist(ctx, *input, **kwargs).wait().wait()
        return self.compute_and_output_dist(ctx, dist_input)

    def write_dist(self, ctx: ShrdCtx, *input: Any, **kwargs: Any) -> Awaitable[Awaitable[CompIn]]:
        """Send what `write` is given to the ranks that hold it.

        Raises:
            NotImplementedError: a subclass that can be written to overrides it.
        """
        raise NotImplementedError(f"{type(self).__name__} is not written to: it has no write_dist")

    def update(self, ctx: ShrdCtx, dist_input: CompIn) -> None:
        """Put into this rank's part what `write_dist` brought.

        Raises:
            NotImplementedError: a subclass that can be written to overrides it.
        """
        raise NotImplementedError(f"{type(self).__name__} is not written to: it has no update")

    def write(self, *input: Any, **kwargs: Any) -> None:
        """Write into the sharded module: `write_dist`, then `update`."""
        ctx = self.create_context()
        self.update(ctx, self.write_dist(ctx, *input, **kwargs).wait().wait())

    def sharded_parameter_names(self, prefix: str = "") -> Iterator[str]:
        """Parameters whose gradients are not to be averaged by anybody else: all of them, unless overridden."""
        for name, _ in self.named_parameters(prefix):
            yield name

    def preprocess_input(self, args: list[T], kwargs: Mapping[str, T]) -> tuple[list[T], Mapping[str, T]]:
        """What a pipeline gives `input_dist` of the arguments that the module is called with."""
        return args, kwargs

    @staticmethod
    def extend_shard_name(shard_name: str) -> str:
        """The parameter of a table, by its name below this module."""
        return shard_name
