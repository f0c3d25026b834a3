"""Which sharded modules a model calls in a step, and which part of the batch each is called with.

Seen in the first step, by watching the modules' inputs: the part of the batch that is the very object. Later batches
have it at the same place, so that their ids can leave before the model asks. Where the model makes the input of the
batch, it is traced by torch.fx up to the call, and what makes the input is a graph of its own. Both the graph and the
model then run it, the one ahead and the other in the step, so it must be free of effects and give the same result both
times.
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from operator import attrgetter, itemgetter
from typing import Any

import torch
from torch import Tensor, fx, nn

from shardwise.jagged import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from shardwise.sharding.comms.exchange import Exchange
from shardwise.sharding.dmp.unwrap import get_unwrapped_module
from shardwise.sharding.engine.collection import ShardedCollection
from shardwise.sharding.engine.step import Step
from shardwise.sharding.modules.managed_collision import ShardedManagedCollisionEmbeddings
from shardwise.sharding.modules.nested import Nested, ShardedFeatureProcessedEmbeddingBagCollection
from shardwise.sharding.modules.placement import sharded_collections
from shardwise.sharding.plan.sharded_module import ShardedModule

from .own_modules import OwnModule, StagedStep, own_modules

# the input of a call, made of a batch
Preparation = Callable[[Any], Any]


# the method of a feature-processed collection that makes the input of its tables
PROCESSED = ShardedFeatureProcessedEmbeddingBagCollection._processed.__name__


class _Reached(Exception):
    """The call that is looked for; `features` is its input."""

    def __init__(self, features: Any) -> None:
        super().__init__()
        self.features = features


class _UpTo(fx.Tracer):
    """Traces up to call number `number` of a module."""

    def __init__(self, name: str, number: int) -> None:
        super().__init__()
        self._name, self._left = name, number

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Sharded modules are one node, as are layers of torch."""
        return (
            isinstance(m, ShardedModule)
            and not isinstance(m, Nested)
            or super().is_leaf_module(m, module_qualified_name)
        )

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Stops at the call; feature processors are one node, which knows what is wrong with a batch."""
        path = self.path_of_module(m)
        if isinstance(m, ShardedFeatureProcessedEmbeddingBagCollection):
            features = args[0] if args else next(iter(kwargs.values()))
            processed = self.create_proxy(
                "call_method", PROCESSED, (self.create_proxy("get_attr", path, (), {}), features), {}
            )
            return m._embedding_bag_collection(processed)
        if isinstance(m, ShardedManagedCollisionEmbeddings):
            # its part is the node that is looked for
            return m._rows_of(m._remap(args[0] if args else next(iter(kwargs.values())))), None
        if path == self._name:
            if not self._left:
                raise _Reached(args[0] if args else next(iter(kwargs.values())))
            self._left -= 1
        return super().call_module(m, forward, args, kwargs)


def prepare(model: nn.Module, name: str, number: int) -> Preparation:
    """What makes of a batch the input of call number `number` of the sharded module `name`.

    Raises:
        ValueError: it needs another sharded module, or parameters that are trained: their step is still to come.
        Exception: it cannot be traced.
    """
    if not name:
        raise ValueError("the sharded module is the model itself")
    tracer = _UpTo(name, number)
    try:
        tracer.trace(model)
    except _Reached as reached:
        features = reached.features
    else:
        raise ValueError("the trace does not come to the call")
    if isinstance(features, Exception):
        # modules hand an error on in the place of a batch
        raise features
    if not isinstance(features, fx.Proxy):
        raise ValueError("its input does not depend on the batch")
    tracer.graph.output(features.node)
    prepared = fx.GraphModule(model, tracer.graph)
    prepared.graph.eliminate_dead_code()
    for node in prepared.graph.nodes:
        _check(model, node)
    prepared.recompile()
    return prepared


def _check(model: nn.Module, node: fx.Node) -> None:
    """Refuse what would not be the same ahead."""
    if node.op == "call_module":
        module = model.get_submodule(str(node.target))
        if isinstance(module, ShardedModule):
            raise ValueError(f"it needs the sharded module {node.target!r}")
        trained = [f"{node.target}.{name}" for name, param in module.named_parameters() if param.requires_grad]
    elif node.op == "get_attr":
        owner, _, name = str(node.target).rpartition(".")
        value = getattr(model.get_submodule(owner), name)
        if isinstance(value, ShardedFeatureProcessedEmbeddingBagCollection):
            processors: nn.Module = value._feature_processors
            below = f"{node.target}._feature_processors"
            trained = [f"{below}.{one}" for one, param in processors.named_parameters() if param.requires_grad]
        else:
            trained = [str(node.target)] if getattr(value, "requires_grad", False) else []
    else:
        return
    if trained:
        raise ValueError(f"it needs parameters that are trained, {trained}")


# steps from a batch to one of its parts: names of attributes, keys and numbers of items
Path = tuple[tuple[str, Any], ...]
# whether gradients are enabled, and whether the model trains
Mode = tuple[bool, bool]
# how far into a batch parts are looked for
_DEPTH = 5


@dataclass(frozen=True)
class ModuleCall:
    """A call that was watched."""

    name: str
    module: ShardedCollection | OwnModule
    features: object
    grad: bool
    # what was given to the feature-processed module around it
    processed: object = None
    # how many a module of a user's own was called with
    arguments: int = 1


@dataclass(frozen=True)
class Call:
    """A call of every step: its module, and where its input is in the batch or what makes it of the batch.

    Where a feature-processed module is `around`, the input is that module's: its weights follow in the step.
    """

    name: str
    module: ShardedCollection | OwnModule
    source: Path | Preparation
    grad: bool
    around: ShardedFeatureProcessedEmbeddingBagCollection | None = None

    def start(self, features: Any) -> Step | StagedStep:
        """Have the batch's sizes leave."""
        return self.module.start(features) if self.around is None else self.around.start_without_weights(features)

    def input_of(self, batch: Any) -> Any:
        """The input of the call in the step of `batch`."""
        if not isinstance(self.source, tuple):
            return self.source(batch)
        for kind, key in self.source:
            batch = (attrgetter if kind == "attribute" else itemgetter)(key)(batch)
        return batch

    @property
    def is_prepared(self) -> bool:
        """Whether the input is made ahead: the call itself then makes another one."""
        return not isinstance(self.source, tuple)

    def __str__(self) -> str:
        source = "prepared" if self.is_prepared else self.source
        weights = "" if self.around is None else ", weights later"
        return f"{self.name} of {source}, gradients {self.grad}{weights}"


@dataclass
class Started:
    """A call of a batch whose step is still to come."""

    call: Call
    features: Any
    # of its module's kind
    step: Any
    # whether the rows that it wants are where its lookup finds them
    is_prefetched: bool = False


class Calls:
    """The calls of a model by the kind of step, once such a step was seen."""

    def __init__(self, model: nn.Module, exchange: Exchange, device: torch.device, *, prepares: bool) -> None:
        self._model, self._exchange, self._device = model, exchange, device
        self._prepares = prepares
        inside = get_unwrapped_module(model)
        own = own_modules(inside)
        # those that modules of a user's own hold are routed by these
        self._modules: dict[str, ShardedCollection | OwnModule] = {
            path: one
            for path, one in sharded_collections(inside).items()
            if not any(path.startswith(f"{outer}.") for outer in own)
        }
        self._modules.update(own)
        # feature-processed modules by the path of their collection
        self._around = {
            f"{path}._embedding_bag_collection" if path else "_embedding_bag_collection": module
            for path, module in get_unwrapped_module(model).named_modules()
            if isinstance(module, ShardedFeatureProcessedEmbeddingBagCollection)
        }
        # calls that can leave ahead by the kind of step, once such a step was seen
        self.known: dict[Mode, list[Call]] = {}
        # kinds of steps of which every call of a sharded module finds its input in the batch
        self._read_ahead: set[Mode] = set()
        self._warned: set[str] = set()

    def sharded_modules(self) -> list[nn.Module]:
        """Modules whose calls are looked for."""
        return [one.module if isinstance(one, OwnModule) else one for one in self._modules.values()]

    def mode(self) -> Mode:
        """The kind of step that would be made now."""
        return torch.is_grad_enabled(), self._model.training

    def reads_batches_ahead(self, mode: Mode) -> bool:
        """Whether in such a step no sharded module reads what it is called with: all of it left ahead."""
        return mode in self._read_ahead

    @contextmanager
    def watching(self, batch: Any) -> Iterator[None]:
        """Run the model inside: the first step of its kind is watched."""
        mode = self.mode()
        if mode in self.known:
            yield
            return
        seen: list[ModuleCall] = []
        processed: dict[str, Any] = {}
        hooks = [
            (module.module if isinstance(module, OwnModule) else module).register_forward_pre_hook(
                _noting(seen, processed, name, module), with_kwargs=True
            )
            for name, module in self._modules.items()
        ]
        hooks += [
            module.register_forward_pre_hook(_noting_processed(processed, name), with_kwargs=True)
            for name, module in self._around.items()
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        self.known[mode] = calls = self._agreed(self._found(seen, batch))
        reads = [call for call in calls if call.is_prepared or call.around or isinstance(call.module, OwnModule)]
        if len(calls) == len(seen) and not reads:
            self._read_ahead.add(mode)

    def _found(self, seen: list[ModuleCall], batch: Any) -> list[Call]:
        calls: list[Call] = []
        numbers: dict[str, int] = {}
        for seen_call in seen:
            number = numbers[seen_call.name] = numbers.get(seen_call.name, -1) + 1
            source: Path | Preparation | None = _path_to(seen_call.features, batch, _DEPTH, set())
            why = "its input is not a part of the batch"
            if seen_call.arguments != 1:
                source, why = None, "it is called with several arguments"
            elif isinstance(seen_call.features, Tensor):
                why = "it takes tensors, not a KeyedJaggedTensor"
            elif source is None and self._prepares:
                try:
                    source = prepare(get_unwrapped_module(self._model), seen_call.name, number)
                except Exception as error:
                    why += f", and what makes it of the batch cannot run ahead: {error}"
            elif source is None:
                why += ": pipeline_postproc=True runs ahead what makes it, if that is possible"
            around = self._around.get(seen_call.name) if source is None else None
            if around is not None and around.only_weighs:
                source = _path_to(seen_call.processed, batch, _DEPTH, set())
            if source is None:
                self._warn(seen_call.name, why)
            else:
                calls.append(Call(seen_call.name, seen_call.module, source, seen_call.grad, around))
        return calls

    def _agreed(self, calls: list[Call]) -> list[Call]:
        """The calls if they are the same on all ranks."""
        checksum = zlib.crc32("\n".join(map(str, calls)).encode())
        # host sync, once: whether all ranks will send the same ahead
        if all(theirs == [checksum] for theirs in self._exchange.gather([checksum], self._device)):
            return calls
        self._warn("", "ranks call them with different parts of their batches")
        return []

    def _warn(self, name: str, why: str) -> None:
        if name not in self._warned:
            self._warned.add(name)
            what = f"module {name!r} is" if name else "sharded modules are"
            warnings.warn(f"{what} not pipelined: {why}", stacklevel=7)


def _noting(seen: list[ModuleCall], processed: dict[str, Any], name: str, module: ShardedCollection | OwnModule) -> Any:
    def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        features = args[0] if args else next(iter(kwargs.values()), None)
        arguments = len(args) + len(kwargs) if isinstance(module, OwnModule) else 1
        grad = torch.is_grad_enabled()
        seen.append(ModuleCall(name, module, features, grad, processed.pop(name, None), arguments))

    return note


def _noting_processed(processed: dict[str, Any], name: str) -> Any:
    def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        processed[name] = args[0] if args else next(iter(kwargs.values()), None)

    return note


def _path_to(wanted: object, thing: Any, depth: int, visited: set[int]) -> Path | None:
    """Where in `thing` the object is that `wanted` is."""
    if thing is wanted and not isinstance(thing, Tensor):
        return ()
    closed = thing is None or isinstance(thing, Tensor | nn.Module | KeyedJaggedTensor | JaggedTensor | KeyedTensor)
    if closed or not depth or id(thing) in visited or isinstance(thing, str | bytes | int | float):
        return None
    visited.add(id(thing))
    for step, part in _parts(thing):
        rest = _path_to(wanted, part, depth - 1, visited)
        if rest is not None:
            return (step, *rest)
    return None


def _parts(thing: Any) -> list[tuple[tuple[str, Any], Any]]:
    if isinstance(thing, Mapping):
        return [(("item", key), value) for key, value in thing.items()]
    if isinstance(thing, list | tuple):
        return [(("item", number), value) for number, value in enumerate(thing)]
    names = [field.name for field in fields(thing)] if is_dataclass(thing) else list(getattr(thing, "__dict__", ()))
    return [(("attribute", name), getattr(thing, name)) for name in names if hasattr(thing, name)]
