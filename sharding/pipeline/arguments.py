"""How the arguments of a module are made of a batch: steps that a pipeline runs ahead of the model.

features = ArgInfo([]).append_step(ArgInfoStepFactory.get_attr("sparse_features"))
args, kwargs = CallArgs([features], {}).build_args_kwargs(batch)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


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
