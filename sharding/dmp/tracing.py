"""torch.fx graphs of models with tables: each collection of ours is one node, sharded, quantized or neither."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx, nn

from ..comms.awaitable import Awaitable
from .dmp import DistributedModelParallel

_tracing = False


def is_fx_tracing() -> bool:
    """Whether a `Tracer` of this module, which is `torchrec.fx`'s, traces what runs now."""
    return _tracing


# our layers of torch's kind, which are traced into; all other modules of ours are one node
_PLAIN = "shardwise.models"


class Tracer(fx.Tracer):
    """Traces a model; its wrappers, `DistributedModelParallel` and what reduces dense gradients, are looked through.

    Args:
        leaf_modules: names of classes, or paths of modules, that are to be one node as well.
    """

    def __init__(self, leaf_modules: list[str] | None = None) -> None:
        super().__init__()
        self._leaf_modules = list(leaf_modules or [])

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Collections and what else of ours works on jagged tensors, what is named, and layers of torch."""
        kind = type(m)
        ours = kind.__module__.startswith("shardwise.") and not kind.__module__.startswith(_PLAIN)
        named = kind.__name__ in self._leaf_modules or module_qualified_name in self._leaf_modules
        return ours or named or super().is_leaf_module(m, module_qualified_name)

    def trace(self, root: nn.Module | Callable[..., Any], concrete_args: dict[str, Any] | None = None) -> fx.Graph:
        """The graph of `root`; that of a `DistributedModelParallel` is of the model inside, without its wrappers."""
        global _tracing
        before, _tracing = _tracing, True
        try:
            return self._trace(root, concrete_args)
        finally:
            _tracing = before

    def _trace(self, root: nn.Module | Callable[..., Any], concrete_args: dict[str, Any] | None) -> fx.Graph:
        if not isinstance(root, DistributedModelParallel):
            return super().trace(root, concrete_args)
        inside = next(path for path, module in root.named_modules() if module is root.module)
        graph = super().trace(root.module, concrete_args)
        self.root = root
        for node in graph.nodes:
            if node.op in ("call_module", "get_attr"):
                node.target = f"{inside}.{node.target}"
        return graph

    def create_arg(self, a: Any) -> Any:
        """A result that is on its way is waited for."""
        return super().create_arg(a.wait() if isinstance(a, Awaitable) else a)


def symbolic_trace(
    root: nn.Module | Callable[..., Any],
    concrete_args: dict[str, Any] | None = None,
    leaf_modules: list[str] | None = None,
) -> fx.GraphModule:
    """A model, or a function, as a module that runs the graph of what it does.

    Args:
        root: the model.
        concrete_args: arguments that are fixed to a value.
        leaf_modules: as `Tracer`.
    """
    tracer = Tracer(leaf_modules)
    graph = tracer.trace(root, concrete_args)
    return fx.GraphModule(tracer.root, graph)
