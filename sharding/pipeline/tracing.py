"""The tracer of pipelines: what is sharded is one node, and so is all that a program names by its path."""

from __future__ import annotations

from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from ..dmp.tracing import Tracer as _Tracer
from ..plan.sharded_module import ShardedModule


class Tracer(_Tracer):
    """Traces a model down to its sharded modules; buffers are values, no nodes.

    Args:
        leaf_modules: paths of modules that are to be one node as well.
        extend_leaf_fqn: and so are the modules inside of those, where the model calls them itself.
    """

    proxy_buffer_attributes = False

    def __init__(self, leaf_modules: list[str] | None = None, extend_leaf_fqn: bool = False) -> None:
        super().__init__(leaf_modules)
        self._inside = tuple(f"{path}." for path in self._leaf_modules) if extend_leaf_fqn else ()

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Sharded modules, those that FSDP shards, collections, what is named, and layers of torch."""
        sharded = isinstance(m, (ShardedModule, FullyShardedDataParallel, FSDPModule))
        inside = module_qualified_name.startswith(self._inside) if self._inside else False
        return sharded or inside or super().is_leaf_module(m, module_qualified_name)
