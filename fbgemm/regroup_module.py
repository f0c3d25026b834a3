"""The op that regroups columns as a module: what programs build their own regrouping from.

Shapes: values [B, D_i] in which keys lie side by side; a tensor [B, width] of each group.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

# registers the op
from . import regroup as _regroup


class PermuteMultiEmbedding(nn.Module):
    """`torch.ops.fbgemm.permute_multi_embedding` with its arguments kept in buffers, which follow the module's device.

    `init_tensors` gives them: what `torch.ops.fbgemm.kt_regroup_arguments` returns for `groups`. Until then values come
    back as they are. With `multi_device` the buffers go to the device of the values at each call.
    """

    _permutes: Tensor
    _in_shapes: Tensor
    _out_shapes: Tensor

    def __init__(self, groups: list[list[str]], multi_device: bool = False) -> None:
        super().__init__()
        self._groups, self._multi_device = groups, multi_device
        for name in ("_permutes", "_in_shapes", "_out_shapes"):
            self.register_buffer(name, torch.empty(0), persistent=False)
        self._out_lengths: list[int] | None = None

    def init_tensors(self, permute: Tensor, in_shapes: Tensor, out_shapes: Tensor, out_lengths: list[int]) -> None:
        """Take the arguments of the op: permutes [P, 6], widths of values and of groups, and the latter as a list."""
        self._permutes, self._in_shapes, self._out_shapes = permute, in_shapes, out_shapes
        self._out_lengths = out_lengths

    def set_device(self, device: torch.device | str) -> None:
        """Move the buffers."""
        self.to(device)

    def forward(self, values: list[Tensor]) -> list[Tensor]:
        """A tensor [B, width] of each group."""
        if self._out_lengths is None:
            return values
        buffers = [self._permutes, self._in_shapes, self._out_shapes]
        if self._multi_device:
            buffers = [buffer.to(values[0].device, non_blocking=True) for buffer in buffers]
        grouped: list[Tensor] = torch.ops.fbgemm.permute_multi_embedding(values, *buffers, self._out_lengths)
        return grouped

    def extra_repr(self) -> str:
        return f"groups={self._groups}"


del _regroup
