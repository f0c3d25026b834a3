"""Small parts of programs that are made for torch.fx: markers, checks, and a model's forward with its own arguments.

Names and behaviour are of `torchrec.fx.utils`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn
from torch.fx._symbolic_trace import is_fx_symbolic_tracing

if TYPE_CHECKING:
    from .dmp import DistributedModelParallel


def fake_range() -> Any:
    """A place in no file, for functions of TorchScript that ask for one, as `torch.jit.annotations` does."""
    torch_c: Any = torch._C
    return torch_c._jit_tree_views.SourceRangeFactory("", None, 0, 0).make_raw_range(0, 1)


def dmp_fx_trace_forward(dmp: DistributedModelParallel, tracer: fx.Tracer) -> Callable[..., Any]:
    """The forward of a model as a function with the arguments of the model inside, which `tracer` can trace.

    `DistributedModelParallel.forward` takes whatever it is given, which no tracer can follow. The graph is one of
    `dmp`: run it as `torch.fx.GraphModule(dmp, graph)`. Called with tensors the function is `dmp` itself.

    Raises:
        ValueError: the model's forward takes `*args` or `**kwargs` too.
    """
    signature = inspect.signature(dmp.module.forward)
    parameters = list(signature.parameters.values())
    kinds = {parameter.kind for parameter in parameters}
    if kinds & {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}:
        raise ValueError(
            f"{type(dmp.module).__name__}.forward{signature}: name its arguments, tracers cannot follow these"
        )

    # the tracer of a function has an empty module for its root; `dmp` itself names buffers as those of the model inside
    root = nn.Module()
    root._dmp_wrapped_module = dmp._dmp_wrapped_module

    def call(*args: Any, **kwargs: Any) -> Any:
        if not is_fx_symbolic_tracing():
            return dmp(*args, **kwargs)
        tracer.root = root
        return dmp.module.forward(*args, **kwargs)

    # torch.fx reads the names of arguments from a function's code
    by_name = [parameter for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]
    by_place = [parameter for parameter in parameters if parameter.kind is not parameter.KEYWORD_ONLY]
    taken = ", ".join([*(p.name for p in by_place), *(["*"] if by_name else []), *(p.name for p in by_name)])
    given = ", ".join([*(p.name for p in by_place), *(f"{p.name}={p.name}" for p in by_name)])
    names: dict[str, Any] = {"call": call}
    exec(f"def forward({taken}): return call({given})", names)
    forward: Any = names["forward"]
    forward.__defaults__ = tuple(p.default for p in by_place if p.default is not p.empty)
    forward.__kwdefaults__ = {p.name: p.default for p in by_name if p.default is not p.empty}
    forward.__signature__ = signature
    return forward  # type: ignore[no-any-return]


@fx.wrap
def _fx_marker(s: str, any_proxy_unused: Any) -> None:
    """A node of a graph; nothing where it runs."""


def fx_marker(s: str, any_proxy_unused: Any) -> None:
    """Leave a node by the name `s` in the graph that is traced, at a value of it; nothing where nothing traces."""
    if is_fx_symbolic_tracing():
        _fx_marker(s, any_proxy_unused)


def is_marker_node(node: fx.Node, marker_name: str) -> bool:
    """Whether a node is what `fx_marker(marker_name, ...)` left."""
    return node.op == "call_function" and node.target is _marker and node.args[0] == marker_name


# the function itself: a trace has something else by its name
_marker = _fx_marker


@torch.jit.ignore  # type: ignore[untyped-decorator]
def assert_fx_safe(condition: bool, message: str) -> None:
    """Assert what a trace, whose values are not there, cannot know; where torch.fx traces nothing is asserted.

    Raises:
        AssertionError: the condition is false.
    """
    if not is_fx_symbolic_tracing():
        assert condition, message
