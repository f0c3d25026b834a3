"""What a model does to a batch before a sharded module sees it, as a graph of its own that can run ahead.

The model is traced by torch.fx from its batch up to the call, and no further; what the call's input does not need is
left out. Both the graph and the model then run it, the one ahead and the other in the step, so it must be free of
effects and give the same result both times.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx, nn

from shardwise.sharding.engine.collection import ShardedCollection
from shardwise.sharding.modules.nested import ShardedFeatureProcessedEmbeddingBagCollection

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
        return isinstance(m, ShardedCollection) or super().is_leaf_module(m, module_qualified_name)

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
        if isinstance(module, ShardedCollection):
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
