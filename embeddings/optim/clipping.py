"""Gradients cut to size before a step: `GradientClippingOptimizer`.

Tables whose optimizer runs in the backward are cut with all else: their gradients then wait for the step, each row's
added up. What their own settings `gradient_clipping` and `max_gradient` cut are the numbers of each batch's gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from .fused_optimizer import FusedOptimizer
from .keyed_optimizer import KeyedOptimizer, OptimizerWrapper

# takes a rank's number (0-dim) and a process group; returns its sum over the group, or with True its maximum
ReduceNorm = Callable[[Tensor, Any, bool], Tensor]


class GradientClipping(Enum):
    """How gradients are cut: the length of all gradients together, each of their numbers, or nothing."""

    NORM = "norm"
    VALUE = "value"
    NONE = "none"


class GradientClippingOptimizer(OptimizerWrapper):
    """Cuts the gradients of all parameters, then steps.

    NORM multiplies every gradient by `min(1, max_gradient / (norm + 1e-6))`, where norm is the p-norm of all gradients
    as one vector; VALUE cuts every number to +-`max_gradient`. Of a DTensor a rank's own piece is cut. Fused optimizers
    within `optimizer` accumulate from now on, unless clipping is NONE: their tables are updated by `step`, not in the
    backward. Tables that are sharded always count whole, each replicated one once, and all ranks step together.

    By default each rank uses the norm of what it holds, which is the whole norm where parameters are replicated. With
    `enable_global_grad_clip` the norm is that of the whole model: a DTensor's is reduced over its mesh, and that of the
    parameters in `param_to_pgs` over each of their process groups by `reduce_norm`. All ranks must then hold the same
    parameters in the same order. On meta nothing is cut.

    Args:
        optimizer: the optimizer to wrap.
        clipping: what is cut.
        max_gradient: the largest norm, or number.
        norm_type: p, `"inf"` for the largest absolute value.
        enable_global_grad_clip: whether parameters that are spread over ranks count whole.
        param_to_pgs: the process groups over which a parameter is spread; others are replicated. Read only with
            `enable_global_grad_clip`.
        track_grad_norm: whether VALUE and NONE compute `last_total_grad_norm` too.
        reduce_norm: `reduce_norm(number, group, largest)` returns the sum of the ranks' numbers over a process group,
            or their maximum if `largest`; needed for `param_to_pgs`.

    Raises:
        ValueError: a number is negative or not finite, or parameters are to be reduced without a `reduce_norm`.
    """

    def __init__(
        self,
        optimizer: KeyedOptimizer,
        clipping: GradientClipping = GradientClipping.NONE,
        max_gradient: float = 0.1,
        norm_type: float | str = 2.0,
        enable_global_grad_clip: bool = False,
        param_to_pgs: Mapping[Any, Sequence[Any]] | None = None,
        track_grad_norm: bool = False,
        *,
        reduce_norm: ReduceNorm | None = None,
    ) -> None:
        super().__init__(optimizer)
        self._clipping = GradientClipping(clipping)
        self._max_gradient, self._norm_type = float(max_gradient), float(norm_type)
        if not 0 <= self._max_gradient < math.inf:
            raise ValueError(f"max_gradient must be finite and not negative, got {max_gradient}")
        if not self._norm_type > 0:
            raise ValueError(f"norm_type must be positive or 'inf', got {norm_type!r}")
        self._global = enable_global_grad_clip
        self._groups = {id(param): tuple(groups) for param, groups in (param_to_pgs or {}).items() if groups}
        if self._global and self._groups and reduce_norm is None:
            raise ValueError("param_to_pgs: give reduce_norm too, which adds a number up over a process group")
        # the ids above are those of these tensors
        self._spread = list(param_to_pgs or {})
        self._reduce_norm, self._track = reduce_norm, track_grad_norm
        self._last_norm: Tensor | None = None
        self._fused = _fused_in(optimizer) if self._clipping is not GradientClipping.NONE else []
        for fused in self._fused:
            fused.accumulate_gradients()

    @property
    def last_total_grad_norm(self) -> Tensor | None:
        """The norm before the cut in the last step (0-dim), None if none was computed."""
        return self._last_norm

    def step(self, closure: Any = None) -> Any:
        """Cut, then step. A closure is called once, before the cut; returns its loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._last_norm = None
        # asked of gradients: a table that began on meta may still be among the parameters
        if not any(grad.is_meta for grad in self._local_gradients(self._parameters())):
            if self._clipping is GradientClipping.NORM:
                self._last_norm = self.clip_grad_norm_()
            elif self._track:
                self._last_norm = self.compute_total_grad_norm()[0]
            if self._clipping is GradientClipping.VALUE:
                with torch.no_grad():
                    for grad in self._all_gradients():
                        grad.clamp_(-self._max_gradient, self._max_gradient)
        super().step()
        return loss

    @torch.no_grad()
    def clip_grad_norm_(self) -> Tensor | None:
        """Cut by the norm now, and return the norm before (0-dim); None where there is no gradient."""
        norm, grads = self.compute_total_grad_norm()
        if not grads and not self._fused and not self._is_reduced():
            return None
        factor = (self._max_gradient / (norm + 1e-6)).clamp(max=1.0)
        for device in {grad.device for grad in grads}:
            torch._foreach_mul_([grad for grad in grads if grad.device == device], factor.to(device))
        return norm

    @torch.no_grad()
    def compute_total_grad_norm(self) -> tuple[Tensor, list[Tensor]]:
        """The norm of all gradients (0-dim), and the rank's pieces of them."""
        params, largest = self._parameters(), self._norm_type == math.inf
        replicated = [param for param in params if self._kind(param) is None]
        local = self._local_gradients(replicated)
        norms = [self._norm(local)] if local else []
        meshes: dict[Any, list[Any]] = {}
        spread: dict[tuple[Any, ...], list[Tensor]] = {}
        for param in params:
            kind = self._kind(param)
            if isinstance(kind, tuple):
                spread.setdefault(kind, []).append(param)
            elif kind is not None and param.grad is not None:
                grad: Any = param.grad
                meshes.setdefault((kind, tuple(grad.placements), grad.dim()), []).append(grad)
        for distributed in meshes.values():
            norms.append(self._norm_over_mesh(distributed))
        for groups, members in spread.items():
            # a rank without a gradient takes part too: the others wait for its number
            norm = _at_least_fp32(self._norm(self._local_gradients(members), members[0].device))
            number = norm if largest else norm**self._norm_type
            for group in groups:
                assert self._reduce_norm is not None
                number = self._reduce_norm(number, group, largest)
            norms.append(number if largest else number ** (1.0 / self._norm_type))
        # a rank without rows takes part too
        norms += [fused.gradient_norm(self._norm_type) for fused in self._fused]
        grads = self._all_gradients()
        if len(norms) < 2:
            return (norms[0] if norms else torch.zeros(())), grads
        device = norms[0].device
        return torch.linalg.vector_norm(torch.stack([norm.to(device) for norm in norms]), self._norm_type), grads

    def _all_gradients(self) -> list[Tensor]:
        """The rank's pieces of the gradients of parameters, and those of tables that wait."""
        sums = [grad for fused in self._fused for grad in fused.gradient_sums()]
        return self._local_gradients(self._parameters()) + sums

    def _parameters(self) -> list[Tensor]:
        return [param for group in self.param_groups for param in group["params"]]

    def _kind(self, param: Tensor) -> Any:
        """None for a parameter that counts as the rank has it, else its process groups (a tuple) or its mesh."""
        if not self._global:
            return None
        groups = self._groups.get(id(param))
        return groups if groups else getattr(param, "device_mesh", None)

    def _is_reduced(self) -> bool:
        return any(self._kind(param) is not None for param in self._parameters())

    def _norm(self, grads: Sequence[Tensor], device: torch.device | None = None) -> Tensor:
        if not grads:
            return torch.zeros((), device=device)
        return get_total_norm(grads, self._norm_type)

    def _norm_over_mesh(self, grads: Sequence[Any]) -> Tensor:
        """The norm of DTensors that are cut alike over one mesh."""
        first = grads[0]
        if any(placement.is_partial() for placement in first.placements):
            return self._norm([grad.full_tensor() for grad in grads])
        pieces = [grad.to_local() for grad in grads]
        # torch's own norm of a DTensor fails for "inf" where a rank holds none of it. A rank's number stands for its
        # pieces, cut as they are: gathered, it is there once for every piece and once for copies of one
        number = _at_least_fp32(self._norm([piece for piece in pieces if piece.numel()], pieces[0].device))
        cut = type(first).from_local(number.reshape([1] * first.dim()), first.device_mesh, first.placements)
        norm: Tensor = torch.linalg.vector_norm(cut.full_tensor(), self._norm_type)
        return norm

    def _local_gradients(self, params: Sequence[Tensor]) -> list[Tensor]:
        """The rank's pieces of the gradients, empty ones left out; writing to them writes to the gradients."""
        gradients = []
        for param in params:
            grad: Any = param.grad
            if grad is None:
                continue
            if hasattr(grad, "to_local"):
                grad = grad.to_local()
            elif grad.is_sparse:
                # rows given twice must be added before their size means anything
                param.grad = grad = grad.coalesce()
                grad = grad._values()
            if grad.numel():
                gradients.append(grad)
        return gradients


def _fused_in(optimizer: KeyedOptimizer) -> list[FusedOptimizer]:
    """The fused optimizers that it is made of."""
    if isinstance(optimizer, FusedOptimizer):
        return [optimizer]
    return [fused for inner in optimizer.inner_optimizers() for fused in _fused_in(inner)]


def _at_least_fp32(number: Tensor) -> Tensor:
    # a rank without gradients has fp32: all must send the same type
    return number.float() if number.dtype in (torch.float16, torch.bfloat16) else number
