"""What a call of an op gave: outputs, arguments that it wrote, gradients, or an error; and where two of them differ."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .calls import Call

# relative and absolute difference allowed, by dtype; numbers of other dtypes are equal. FBGEMM adds fp16 up in fp16
BOUNDS = {torch.float64: 1e-6, torch.float32: 1e-6, torch.float16: 2.0**-8, torch.bfloat16: 2.0**-6}


@dataclass
class Outcome:
    """Of one call. `grads` has one entry for each argument that wants a gradient, None where the op gave none."""

    outputs: list[Any] = field(default_factory=list)
    written: list[Any] = field(default_factory=list)
    grads: list[Any] | None = None
    error: str = ""


def outcome(function: Callable[..., Any], call: Call, *, packed: bool = False, device: str = "cpu") -> Outcome:
    """Call with copies of the arguments, and back with gradients that depend on the shapes of outputs alone.

    Args:
        packed: whether copies are contiguous; otherwise they lie in memory as the arguments do.
        device: where they lie, and where arguments that are devices lead; results are on the CPU.
    """
    args = [_copy(argument, packed, device) for argument in call.args]
    try:
        returned = function(*args)
    except Exception as error:
        return Outcome(error=f"{type(error).__name__}: {error}".splitlines()[0])
    outputs = list(flat([returned]))
    result = Outcome(outputs=[each.detach().cpu() if isinstance(each, Tensor) else each for each in outputs])
    result.written = [each.detach().cpu() for each in flat(args) if isinstance(each, Tensor)]
    if call.compared is not None:
        result.outputs = list(call.compared(result.outputs))
    inputs = [each for each in flat(args) if isinstance(each, Tensor) and each.requires_grad]
    roots = [each for each in outputs if isinstance(each, Tensor) and each.requires_grad]
    if inputs and roots:
        try:
            grads = torch.autograd.grad(roots, inputs, [upstream_gradient(each) for each in roots], allow_unused=True)
        except Exception as error:
            return Outcome(error=f"backward: {type(error).__name__}: {error}".splitlines()[0])
        result.grads = [None if grad is None else grad.cpu() for grad in grads]
    return result


def upstream_gradient(output: Tensor) -> Tensor:
    """A gradient of this shape whose numbers differ from place to place."""
    places = torch.arange(output.numel(), dtype=torch.float64).view(output.shape)
    return ((places * 7 % 11) / 8 - 0.5).to(output)


def flat(values: Sequence[Any]) -> list[Any]:
    """What is in lists and tuples, in order."""
    return [leaf for each in values for leaf in (flat(each) if isinstance(each, (list, tuple)) else [each])]


def differences(ours: Outcome, theirs: Outcome) -> tuple[list[str], float]:
    """What differs, in words, and the largest difference of floats, relative to 1 or what is larger."""
    if ours.error or theirs.error:
        if ours.error and theirs.error:
            return [], 0.0
        return [f"ours: {ours.error or 'no error'}; theirs: {theirs.error or 'no error'}"], 0.0
    faults, largest = _compare("output", ours.outputs, theirs.outputs)
    more, also = _compare("argument", ours.written, theirs.written)
    faults, largest = [*faults, *more], max(largest, also)
    if ours.grads is not None and theirs.grads is not None:
        # an op without a part in a gradient may give zeros or nothing
        pairs = [
            (a, b) if a is not None and b is not None else (_or_zeros(a, b), _or_zeros(b, a))
            for a, b in zip(ours.grads, theirs.grads, strict=True)
        ]
        more, also = _compare("gradient", [a for a, _ in pairs], [b for _, b in pairs])
        faults, largest = [*faults, *more], max(largest, also)
    elif theirs.grads is not None:
        faults.append("theirs has gradients, ours none")
    return faults, largest


def _or_zeros(grad: Tensor | None, other: Tensor | None) -> Tensor | None:
    return torch.zeros_like(other) if grad is None and other is not None else grad


def _compare(what: str, ours: Sequence[Any], theirs: Sequence[Any]) -> tuple[list[str], float]:
    if len(ours) != len(theirs):
        return [f"{what}s: {len(ours)} of ours, {len(theirs)} of theirs"], 0.0
    faults, largest = [], 0.0
    for place, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
            if type(a) is not type(b) or a != b:
                faults.append(f"{what} {place}: {a!r} for {b!r}")
        elif a.dtype != b.dtype or a.shape != b.shape:
            faults.append(f"{what} {place}: {a.dtype} {list(a.shape)} for {b.dtype} {list(b.shape)}")
        elif a.dtype in BOUNDS:
            distance = _distance(a.double(), b.double())
            largest = max(largest, distance)
            if not distance <= BOUNDS[a.dtype]:
                faults.append(f"{what} {place}: {distance:.2g} apart")
        elif not torch.equal(a, b):
            faults.append(f"{what} {place}: {a.flatten().tolist()[:8]} for {b.flatten().tolist()[:8]}")
    return faults, largest


def _distance(a: Tensor, b: Tensor) -> float:
    same = (a == b) | (a.isnan() & b.isnan())
    apart = torch.where(same, torch.zeros_like(a), (a - b).abs() / b.abs().clamp(min=1))
    return float(apart.max()) if apart.numel() else 0.0


def _copy(value: Any, packed: bool, device: str) -> Any:
    if isinstance(value, (list, tuple)):
        return [_copy(each, packed, device) for each in value]
    if isinstance(value, torch.device):
        return torch.device(device)
    if not isinstance(value, Tensor):
        return value
    copied = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
    if packed:
        copied = torch.empty(value.shape, dtype=value.dtype, device=device)
    copied.copy_(value.detach())
    return copied.requires_grad_(value.requires_grad)
