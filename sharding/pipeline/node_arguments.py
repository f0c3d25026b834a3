"""`NodeArgsHelper`: which part of the batch a module of a traced model is called with.

graph = Tracer().trace(model)
for node in graph.nodes:
    if node.op == "call_module" and node.target in sharded:
        call, found = NodeArgsHelper(model, context, False).get_node_args(node)
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.utils._pytree import tree_unflatten

from .arguments import ArgInfo, ArgInfoStepFactory, BaseArgInfoStep, CallArgs
from .contexts import TrainPipelineContext


class Postproc:
    """A module that prepares a part of the batch: called with the batch, it calls the module with its arguments."""

    def __init__(self, module: nn.Module, path: str, args: CallArgs) -> None:
        self.module, self.path, self.args = module, path, args

    def __call__(self, batch: Any) -> Any:
        """The module's result for a batch."""
        positional, named = self.args.build_args_kwargs(batch)
        return self.module(*positional, **named)


class NodeArgsHelper:
    """Finds the steps from the batch to the arguments of a node.

    Args:
        model: that was traced.
        context: has no effect; steps keep nothing of a batch.
        pipeline_postproc: whether constants, and modules without trained parameters, may be steps. The model runs such
            modules once more in its own step.
        default_stream, dist_stream: have no effect; the pipeline runs the steps on the stream that is current.
    """

    def __init__(
        self,
        model: nn.Module,
        context: TrainPipelineContext,
        pipeline_postproc: bool,
        default_stream: torch.Stream | None = None,
        dist_stream: torch.Stream | None = None,
    ) -> None:
        self._model, self._prepares = model, pipeline_postproc
        self._postprocs: dict[str, Postproc] = {}

    @property
    def pipelined_postprocs(self) -> set[Postproc]:
        """Modules that are steps of what was found so far."""
        return set(self._postprocs.values())

    def get_node_args(self, node: fx.Node, for_postproc_module: bool = False) -> tuple[CallArgs, int]:
        """The arguments that could be found, and their number: all were if the node has as many."""
        positional = self._found(node.args, none_counts=not for_postproc_module)
        named = self._found(node.kwargs.values(), none_counts=not for_postproc_module)
        kept = [one for one in positional if one is not None]
        by_name = {name: one for name, one in zip(node.kwargs, named, strict=True) if one is not None}
        return CallArgs(kept, by_name), len(kept) + len(by_name)

    def _found(self, arguments: Iterable[Any], *, none_counts: bool) -> list[ArgInfo | None]:
        found: list[ArgInfo | None] = []
        for argument in arguments:
            steps = self._steps(argument)
            if argument is None and none_counts:
                steps = _of_constant(None)
            found.append(None if steps is None else ArgInfo(steps))
        return found

    def _steps(self, argument: Any) -> list[BaseArgInfoStep] | None:
        """Steps from the batch to an argument; None if there are none that can run ahead."""
        if not isinstance(argument, fx.Node):
            return self._constant(argument) if self._prepares else None
        if argument.op == "placeholder":
            return _of_placeholder(argument)
        if argument.op == "call_module":
            return self._module(argument) if self._prepares else None
        if argument.op == "call_method" and argument.target == "get":
            return self._after(argument.args[0], ArgInfoStepFactory.get_item(argument.args[1]))  # type: ignore[arg-type]
        if argument.op != "call_function":
            return None
        if argument.target is getattr:
            return self._after(argument.args[0], ArgInfoStepFactory.get_attr(str(argument.args[1])))
        if argument.target is operator.getitem:
            whole, item = argument.args
            if isinstance(whole, fx.Node) and whole.target is tree_unflatten:
                # an exported program puts its flat inputs together first: the leaf itself is meant
                return self._steps(whole.args[0][item])  # type: ignore[index]
            return self._after(whole, ArgInfoStepFactory.get_item(item))  # type: ignore[arg-type]
        return None

    def _after(self, argument: Any, step: BaseArgInfoStep) -> list[BaseArgInfoStep] | None:
        before = self._steps(argument)
        return None if before is None else [*before, step]

    def _constant(self, value: Any) -> list[BaseArgInfoStep] | None:
        if isinstance(value, Mapping):
            named = {key: self._element(one) for key, one in value.items()}
            return None if _lacks(named.values()) else [ArgInfoStepFactory.from_dict(named)]
        if isinstance(value, Sequence) and not isinstance(value, str | bytes):
            parts = [self._element(one) for one in value]
            return None if _lacks(parts) else [ArgInfoStepFactory.from_list(parts)]
        return _of_constant(value)

    def _element(self, value: Any) -> Any:
        if not isinstance(value, fx.Node):
            return value
        steps = self._steps(value)
        return _LACKING if steps is None else ArgInfo(steps)

    def _module(self, node: fx.Node) -> list[BaseArgInfoStep] | None:
        """The call of a module as a step, if what it needs can be made of the batch, and nothing of it is trained."""
        path = str(node.target)
        if path not in self._postprocs:
            module = self._model.get_submodule(path)
            args, found = self.get_node_args(node, for_postproc_module=True)
            trained = any(param.requires_grad for param in module.parameters())
            if trained or not found or found != len(node.args) + len(node.kwargs):
                return None
            self._postprocs[path] = Postproc(module, path, args)
        return [ArgInfoStepFactory.postproc(self._postprocs[path])]


_LACKING = object()


def _lacks(parts: Iterable[object]) -> bool:
    return any(part is _LACKING for part in parts)


def _of_constant(value: object) -> list[BaseArgInfoStep]:
    return [ArgInfoStepFactory.from_scalar(value)]


def _of_placeholder(node: fx.Node) -> list[BaseArgInfoStep]:
    """The batch itself, or the part that an exported program's `ph_key` names: "sparse[item].rows" say."""
    key = getattr(node, "ph_key", None)
    if key is None:
        return [ArgInfoStepFactory.noop()]
    steps: list[BaseArgInfoStep] = []
    for part in key.replace("[", ".").split("."):
        if part.endswith("]"):
            item = part[:-1]
            steps.append(ArgInfoStepFactory.get_item(int(item) if item.lstrip("-").isdigit() else item))
        else:
            steps.append(ArgInfoStepFactory.get_attr(part))
    return steps
