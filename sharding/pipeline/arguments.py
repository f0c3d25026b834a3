"""How the arguments of a module are made of a batch: steps that a pipeline runs ahead of the model.

features = ArgInfo([]).append_step(ArgInfoStepFactory.get_attr("sparse_features"))
args, kwargs = CallArgs([features], {}).build_args_kwargs(batch)

`NodeArgsHelper` finds them in a traced model, and a context keeps what a pipeline of your own has of a batch meanwhile.

graph = Tracer().trace(model)
for node in graph.nodes:
    if node.op == "call_module" and node.target in sharded:
        call, found = NodeArgsHelper(model, context, False).get_node_args(node)
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_unflatten

from shardwise.sharding.comms.awaitable import Awaitable
from shardwise.sharding.engine.stages import StepContext


class BaseArgInfoStep(ABC):
    """One step on the way from a batch to an argument."""

    @abstractmethod
    def process(self, arg: Any) -> Any:
        """What the step makes of the result of the step before, or of the batch."""


@dataclass(frozen=True)
class NoopArgInfoStep(BaseArgInfoStep):
    """The thing itself."""

    def process(self, arg: Any) -> Any:
        """`arg`."""
        return arg


@dataclass(frozen=True)
class GetAttrArgInfoStep(BaseArgInfoStep):
    """An attribute of it."""

    attr_name: str

    def process(self, arg: Any) -> Any:
        """The attribute."""
        return getattr(arg, self.attr_name)


@dataclass(frozen=True)
class GetItemArgInfoStep(BaseArgInfoStep):
    """An item of it."""

    item_index: str | int

    def process(self, arg: Any) -> Any:
        """The item."""
        return arg[self.item_index]


@dataclass(frozen=True)
class PostprocArgInfoStep(BaseArgInfoStep):
    """What a module of the model, or any callable, makes of it."""

    postproc_module: Callable[[Any], Any]

    def process(self, arg: Any) -> Any:
        """Its result."""
        return self.postproc_module(arg)


@dataclass(frozen=True)
class ScalarArgInfoStep(BaseArgInfoStep):
    """A value that the batch does not change."""

    value: object

    def process(self, arg: Any) -> Any:
        """The value."""
        return self.value


@dataclass(frozen=True)
class ListArgInfoStep(BaseArgInfoStep):
    """A list of values and of `ArgInfo`s."""

    value: list[object]

    def process(self, arg: Any) -> list[Any]:
        """The list, with what the `ArgInfo`s make of `arg`."""
        return [_made(one, arg) for one in self.value]


@dataclass(frozen=True)
class DictArgInfoStep(BaseArgInfoStep):
    """A dict of values and of `ArgInfo`s."""

    value: dict[str, object]

    def process(self, arg: Any) -> dict[str, Any]:
        """The dict, with what the `ArgInfo`s make of `arg`."""
        return {key: _made(one, arg) for key, one in self.value.items()}


class ArgInfoStepFactory:
    """Makes the steps."""

    noop = NoopArgInfoStep
    get_attr = GetAttrArgInfoStep
    get_item = GetItemArgInfoStep
    postproc = PostprocArgInfoStep
    from_scalar = ScalarArgInfoStep
    from_list = ListArgInfoStep
    from_dict = DictArgInfoStep


@dataclass
class ArgInfo:
    """An argument: steps from the batch to it, the first one first. Without steps it is None."""

    steps: list[BaseArgInfoStep]

    def add_step(self, step: BaseArgInfoStep) -> ArgInfo:
        """Put a step before all others."""
        self.steps.insert(0, step)
        return self

    def append_step(self, step: BaseArgInfoStep) -> ArgInfo:
        """Put a step after all others."""
        self.steps.append(step)
        return self

    def process_steps(self, arg: Any) -> Any:
        """The argument, made of the batch `arg`."""
        if not self.steps:
            return None
        for step in self.steps:
            arg = step.process(arg)
        return arg


@dataclass
class CallArgs:
    """The arguments of a call."""

    args: list[ArgInfo]
    kwargs: dict[str, ArgInfo]

    def build_args_kwargs(self, initial_input: Any) -> tuple[list[Any], dict[str, Any]]:
        """Positional and keyword arguments, made of the batch."""
        positional = [one.process_steps(initial_input) for one in self.args]
        return positional, {name: one.process_steps(initial_input) for name, one in self.kwargs.items()}


def _made(one: object, arg: Any) -> Any:
    return one.process_steps(arg) if isinstance(one, ArgInfo) else one


@dataclass
class TrainPipelineContext:
    """A batch under way: what its sharded modules wait for, by their paths.

    Args:
        input_dist_splits_requests: what `input_dist` returned; its wait sends the ids.
        input_dist_tensors_requests: what that wait returned; `PipelinedForward` takes it from here.
        module_contexts: of `create_context`, one a module.
        events: recorded when a stage of the batch was done, for other streams.
        index: of the batch.
        module_contexts_next_batch, fused_splits_awaitables, postproc_fwd_results, version: for pipelines that use them.
    """

    input_dist_splits_requests: dict[str, Awaitable[Any]] = field(default_factory=dict)
    input_dist_tensors_requests: dict[str, Awaitable[Any]] = field(default_factory=dict)
    module_contexts: dict[str, StepContext] = field(default_factory=dict)
    module_contexts_next_batch: dict[str, StepContext] = field(default_factory=dict)
    fused_splits_awaitables: list[tuple[list[str], Awaitable[Any]]] = field(default_factory=list)
    events: list[torch.Event] = field(default_factory=list)
    postproc_fwd_results: dict[str, Any] = field(default_factory=dict)
    index: int | None = None
    version: int = 0


@dataclass
class PrefetchTrainPipelineContext(TrainPipelineContext):
    """A batch whose rows are brought into their slots before its step.

    Args:
        module_input_post_prefetch: what `input_dist` brought, once `prefetch` has run; `PrefetchPipelinedForward` takes
            it from here, with
        module_contexts_post_prefetch: the module's context.
        module_input_post_prefetch_next_batch, module_contexts_post_prefetch_next_batch: for pipelines that use them.
    """

    module_input_post_prefetch: dict[str, Any] = field(default_factory=dict)
    module_contexts_post_prefetch: dict[str, StepContext] = field(default_factory=dict)
    module_input_post_prefetch_next_batch: dict[str, Any] = field(default_factory=dict)
    module_contexts_post_prefetch_next_batch: dict[str, StepContext] = field(default_factory=dict)


@dataclass
class EmbeddingTrainPipelineContext(TrainPipelineContext):
    """A batch whose rows are looked up before the model's forward.

    Args:
        embedding_a2a_requests: what `compute_and_output_dist` returned; `EmbeddingPipelinedForward` takes it from here,
            and leaves of each module
        embedding_tensors: what was looked up, [B, columns] or for each feature [N, dim],
        detached_embedding_tensors: the same as the model got it, whose gradients `embedding_backward` sends on, and
        embedding_features: their names.
    """

    embedding_a2a_requests: dict[str, Any] = field(default_factory=dict)
    embedding_tensors: list[list[Tensor]] = field(default_factory=list)
    embedding_features: list[list[str | list[str]]] = field(default_factory=list)
    detached_embedding_tensors: list[list[Tensor]] = field(default_factory=list)


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
