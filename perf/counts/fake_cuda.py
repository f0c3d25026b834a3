"""A CUDA device that is not there: tensors that say they lie on one, with their values in host memory.

Python sees `device.type == "cuda"` and `is_cuda`, so the code takes the path that CUDA takes; every operation below
autograd comes to `FakeCudaMode`, which tells an `Observer` what it is and does it on the host. An op of shardwise runs
twice: on the host by its CPU path for the values, and by its own implementation on tensors without values, in which
Triton kernels are noted instead of launched. So nothing here depends on how large a batch is.

torch sees a meta tensor, because its autograd asks for a device that is there.
"""

from __future__ import annotations

import importlib
import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any, Protocol
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from shardwise.kernels._op import HAS_TRITON, INTERPRETED

CUDA = torch.device("cuda", 0)
# what the device says of itself, where something is sized by it: an H100's
PROPERTIES = SimpleNamespace(
    name="a device that is not there", major=9, minor=0, multi_processor_count=132, total_memory=80 << 30,
    L2_cache_size=50 << 20, regs_per_multiprocessor=65_536, max_threads_per_multi_processor=2048,
    shared_memory_per_multiprocessor=233_472,
)  # fmt: skip

Op = Any
_ATEN: Any = torch.ops.aten
_DATA: Any = Tensor.data
# compositions in torch that make a tensor and change its size, which a stand-in cannot follow
_LEAVES = {
    *(_ATEN.arange.default, _ATEN.arange.start, _ATEN.arange.start_step, _ATEN.empty_like.default),
    *(_ATEN.new_empty.default, _ATEN.new_empty_strided.default, _ATEN._unsafe_view.default),
}


class DeviceMemory:
    """A piece of the device's memory. Tensors that view it share this, and it is given back with the last of them."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes


class Observer(Protocol):
    """What is told what happens."""

    def operation(self, op: Op, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> None:
        """One of torch's on the device; `args` are the host's tensors, and those without values are meta tensors."""

    def kernel(self, name: str) -> None:
        """A launch of a Triton kernel."""

    def copy(self, where: str, waits: bool) -> None:
        """`where` is "to device" or "to host"."""

    def allocation(self, memory: DeviceMemory, op: Op, dtype: torch.dtype) -> None:
        """Memory that an operation's result of this dtype has. What torch's kernels take for themselves is not told."""


class FakeCudaTensor(Tensor):
    """A tensor that says it is on a GPU; `host` holds its values, or is a meta tensor where nobody may ask for them.

    `memory` is what it would take there, None until the mode returns it.
    """

    host: Tensor
    memory: DeviceMemory | None

    # all that is done to it comes to the mode
    __torch_function__: Any = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, host: Tensor) -> FakeCudaTensor:
        make: Any = Tensor._make_wrapper_subclass
        made: FakeCudaTensor = make(
            cls, host.size(), strides=host.stride(), storage_offset=host.storage_offset(), dtype=host.dtype,
            device="meta", requires_grad=False,
        )  # fmt: skip
        made.host, made.memory = host, None
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return CUDA

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    @property
    def is_meta(self) -> bool:  # type: ignore[override]
        return False

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, other: Tensor) -> None:
        assert isinstance(other, FakeCudaTensor)
        _DATA.__set__(self, other)
        self.host, self.memory = other.host, other.memory

    def get_device(self) -> int:
        return CUDA.index

    def untyped_storage(self) -> Any:
        return self.host.untyped_storage()

    def data_ptr(self) -> int:
        # memory begins where CUDA's allocator aligns it
        return 512 + int(self.host.storage_offset()) * self.host.itemsize

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"FakeCudaTensor({list(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(cls, func: Op, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is _ATEN._has_compatible_shallow_copy_type.default:
            # one stand-in may take the place of another
            return True
        raise RuntimeError(f"{func} on a tensor of a device that is not there, outside of `use_fake_cuda`")


class FakeCudaMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Does what is asked of the device that is not there, and tells `seen`."""

    def __init__(self, seen: Observer, *, sizes: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = seen
        # the number that an op asks the device for to make its result, where that is told
        self.sizes, self.size = sizes, 0
        self.inside = 0  # ops of shardwise that this is inside of
        # by the storage of the host
        self._memory: weakref.WeakValueDictionary[int, DeviceMemory] = weakref.WeakValueDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = self.dispatch(func, args, {**(kwargs or {})})
        self._give_memory(func, tree_leaves((args, kwargs)), result)
        return result

    def _give_memory(self, func: Any, leaves: Sequence[Any], result: Any) -> None:
        """Tensors of a result that have no memory get that of the storage they view, or new memory."""
        moved = func._schema.name == "aten::set_"
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, FakeCudaTensor) and (moved or not leaf.memory)]
        if not made:
            return
        # those without values inside of an op stand for others, whose memory they have
        of_arguments = (
            {} if moved else {_storage(leaf): leaf.memory for leaf in leaves if isinstance(leaf, FakeCudaTensor)}
        )
        for tensor in made:
            tensor.memory = of_arguments.get(_storage(tensor)) or self._memory.get(_storage(tensor))
            if tensor.memory is None:
                tensor.memory = self._memory[_storage(tensor)] = DeviceMemory(tensor.host.untyped_storage().nbytes())
                self.seen.allocation(tensor.memory, func, tensor.dtype)

    def dispatch(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """The result of an operation, told to `seen`."""
        # the host has no memory that is pinned for this device
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        leaves = tree_leaves((args, kwargs))
        on_device = any(isinstance(leaf, FakeCudaTensor) for leaf in leaves)
        device = kwargs.get("device")
        # "meta" is what torch takes the device for
        there = None if device is None else torch.device(device).type != "cpu"
        if func is _ATEN._pin_memory.default:
            return args[0].clone()
        if not on_device and not there:
            return func(*args, **kwargs)
        if func.namespace == "shardwise":
            return self.op(func, args, kwargs)
        if func is _ATEN._to_copy.default:
            return self.to_copy(args[0], kwargs, there)
        if func is _ATEN.copy_.default:
            return self.copy_(*args, **kwargs)
        if there:
            kwargs["device"] = torch.device("meta")
        kernel = _composite(func)
        if kernel is not None:
            with self:
                return func._op_dk(kernel, *args, **kwargs)
        return self.leaf(func, args, kwargs, leaves)

    def leaf(self, func: Any, args: Any, kwargs: dict[str, Any], leaves: Sequence[Any]) -> Any:
        """An operation that CUDA has kernels of its own for, done on the host."""
        bare = self.inside > 0 or any(isinstance(leaf, FakeCudaTensor) and leaf.host.is_meta for leaf in leaves)
        if "device" in kwargs and not bare:
            kwargs["device"] = torch.device("cpu")
        host_args, host_kwargs = tree_map(partial(_on_host, bare), (_tensors(func, args), kwargs))
        if bare and func is _ATEN._local_scalar_dense.default:
            # nobody knows the value; an op that asks for one asks how large its result is
            result: Any = torch.tensor(self.size, dtype=args[0].dtype).item()
        else:
            try:
                result = func(*host_args, **host_kwargs)
            except NotImplementedError:
                # its shape is known without a meta kernel if it only writes into its arguments
                if not bare or any(r.alias_info is None or not r.alias_info.is_write for r in func._schema.returns):
                    raise
                result = None
        self.seen.operation(func, host_args, host_kwargs, result)
        return _wrapped(func, args, kwargs, result)

    def op(self, func: Any, args: Any, kwargs: Any) -> Any:
        """An op of shardwise: its launches from its implementation, its values from the path of the CPU."""
        without_values = any(
            isinstance(leaf, FakeCudaTensor) and leaf.host.is_meta for leaf in tree_leaves((args, kwargs))
        )
        bare_args, bare_kwargs = (args, kwargs) if without_values else tree_map(_bare, (args, kwargs))
        if self.sizes and not without_values:
            values = tree_map(_values, (args, kwargs))
            made = tree_leaves(func(*tree_map(_copied, values[0]), **values[1]))
            self.size = next((leaf.shape[0] for leaf in made if isinstance(leaf, Tensor) and leaf.dim()), 0)
        self.inside += 1
        try:
            with self:
                noted = func._op_dk(torch._C.DispatchKey.CUDA, *bare_args, **bare_kwargs)
        finally:
            self.inside -= 1
        if without_values:
            return noted
        result = _wrapped(func, args, kwargs, func(*tree_map(_values, args), **tree_map(_values, kwargs)))
        for bare, tensor in zip(tree_leaves(noted), tree_leaves(result), strict=True):
            # what the implementation allocated, whatever the path of the CPU did
            if isinstance(tensor, FakeCudaTensor) and tensor.memory is None and bare.memory is not None:
                self._memory.pop(_storage(bare), None)
                tensor.memory = self._memory[_storage(tensor)] = bare.memory
        return result

    def to_copy(self, source: Tensor, kwargs: dict[str, Any], there: bool | None) -> Any:
        waits = not kwargs.get("non_blocking", False)
        host = source.host if isinstance(source, FakeCudaTensor) else source
        rest = {name: value for name, value in kwargs.items() if name not in ("device", "non_blocking")}
        same_type = kwargs.get("dtype") in (None, source.dtype)
        if isinstance(source, FakeCudaTensor) and there is False:
            if not same_type:
                self.seen.operation(_ATEN._to_copy.default, [host], rest, host)
            self.seen.copy("to host", waits)
            # without values nobody knows what would be there
            return _ATEN._to_copy.default(torch.zeros(host.shape, dtype=host.dtype) if host.is_meta else host, **rest)
        if not isinstance(source, FakeCudaTensor):
            self.seen.copy("to device", waits)
            result = _ATEN._to_copy.default(host, **rest)
            return FakeCudaTensor(result.to("meta") if self.inside else result)
        if same_type and there and rest.get("memory_format") is None:
            # torch takes the device for another; there is nothing to do
            return FakeCudaTensor(_ATEN.alias.default(host))
        result = _ATEN._to_copy.default(host, **rest)
        self.seen.operation(_ATEN._to_copy.default, [host], rest, result)
        return FakeCudaTensor(result)

    def copy_(self, target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        if isinstance(target, FakeCudaTensor) and isinstance(source, FakeCudaTensor):
            target.host.copy_(source.host)
            self.seen.operation(_ATEN.copy_.default, [target.host, source.host], {}, target.host)
        else:
            into, out = (tensor.host if isinstance(tensor, FakeCudaTensor) else tensor for tensor in (target, source))
            if not out.is_meta:
                into.copy_(out)
            self.seen.copy("to device" if isinstance(target, FakeCudaTensor) else "to host", not non_blocking)
        return target


def _composite(func: Any) -> torch._C.DispatchKey | None:
    """The key of torch's own composition of other operations, where CUDA runs that."""
    if func in _LEAVES or func._schema.name.startswith(("aten::_foreach", "aten::_fused")):
        return None
    has = partial(torch._C._dispatch_has_kernel_for_dispatch_key, func.name())
    if has("CompositeImplicitAutograd"):
        return torch._C.DispatchKey.CompositeImplicitAutograd
    if has("CompositeExplicitAutograd") and not is_view(func):
        return torch._C.DispatchKey.CompositeExplicitAutograd
    return None


def is_view(func: Op) -> bool:
    """Whether it returns memory of an argument and changes none."""
    return any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)


def _on_host(bare: bool, value: Any) -> Any:
    if isinstance(value, FakeCudaTensor):
        return value.host.to("meta") if bare else value.host
    # a scalar on the host may meet tensors of the device
    return value.to("meta") if bare and isinstance(value, Tensor) and value.dim() else value


def _tensors(func: Any, args: Sequence[Any]) -> list[Any]:
    """Arguments by place; torch hands on as a number what it made a tensor of for an operation of tensors."""
    kinds = [str(argument.type) for argument in func._schema.arguments]
    return [
        torch.tensor(value) if kind == "Tensor" and isinstance(value, (bool, int, float)) else value
        for value, kind in zip(args, kinds, strict=False)
    ]


def _bare(value: Any) -> Any:
    """The same without values; every tensor for itself."""
    if not isinstance(value, FakeCudaTensor):
        return value
    bare = FakeCudaTensor(torch.empty_strided(value.host.size(), value.host.stride(), dtype=value.dtype, device="meta"))
    bare.memory = value.memory
    return bare


def _copied(value: Any) -> Any:
    # an op that writes to an argument is called again
    return value.clone() if isinstance(value, Tensor) else value


def _storage(tensor: FakeCudaTensor) -> int:
    return int(tensor.host.untyped_storage()._cdata)


def _values(value: Any) -> Any:
    return value.host if isinstance(value, FakeCudaTensor) else value


def written(op: Op, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """The arguments that it writes to."""
    return [
        kwargs.get(argument.name, args[place] if place < len(args) else None)
        for place, argument in enumerate(op._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


def _wrapped(func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> Any:
    """What the op returned as tensors of the device; an argument that it wrote to is that argument."""
    changed = written(func, args, kwargs)
    for argument in changed:
        if isinstance(argument, FakeCudaTensor) and (argument.shape, argument.stride()) != (
            argument.host.shape,
            argument.host.stride(),
        ):
            _DATA.__set__(argument, FakeCudaTensor(argument.host))
    returns = func._schema.returns
    if len(returns) and all(r.alias_info is not None and r.alias_info.is_write for r in returns):
        return changed[0] if len(returns) == 1 else tuple(changed)
    return tree_map(lambda value: FakeCudaTensor(value) if isinstance(value, Tensor) else value, result)


class _Event:
    """Stands in for torch.cuda.Event: nothing runs behind anybody's back here."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def record(self, *args: Any) -> None: ...

    def synchronize(self) -> None: ...


@contextmanager
def use_fake_cuda(seen: Observer, *, sizes: bool = False) -> Iterator[None]:
    """The device "cuda" is there, as far as Python sees, and what it would do is told to `seen`.

    With `sizes` an op that waits for the size of its result gets it, and launches what fills it; otherwise it gets 0.

    Raises:
        RuntimeError: triton is not installed, or its kernels are interpreted in this process.
    """
    if not HAS_TRITON or INTERPRETED:
        raise RuntimeError("launches are counted with triton installed and TRITON_INTERPRET not set")

    def noted(kernel: Any, *args: Any, grid: Any, **kwargs: Any) -> None:
        axes: Any = grid(dict(zip(kernel.arg_names, args, strict=False)) | kwargs) if callable(grid) else grid
        # triton launches no empty grid
        if all(n > 0 for n in axes):
            seen.kernel(kernel.fn.__name__)

    jit = importlib.import_module("triton.runtime.jit").JITFunction
    lift = torch._C._only_lift_cpu_tensors()
    cuda: list[tuple[str, Any]] = [
        ("_lazy_init", lambda: None),
        ("is_available", lambda: True),
        ("is_current_stream_capturing", lambda: False),
        ("current_device", lambda: CUDA.index),
        ("current_stream", lambda device=None: None),
        ("Event", _Event),
        ("get_device_properties", lambda device=None: PROPERTIES),
    ]
    with ExitStack() as stack:
        stack.enter_context(patch.object(jit, "run", noted))
        for name, stand_in in cuda:
            stack.enter_context(patch.object(torch.cuda, name, stand_in))
        stack.enter_context(FakeCudaMode(seen, sizes=sizes))
        # torch.tensor(..., device="cuda") makes its values on the host first
        torch._C._set_only_lift_cpu_tensors(True)
        stack.callback(torch._C._set_only_lift_cpu_tensors, lift)
        yield
