"""Decorators of a hardware config: what of TorchRec's performance estimates a machine has otherwise.

Those of classes set one number or switch. Those of methods mark a formula, whatever the method's name: for one sharding
type, for several, or for all without one. A subclass has what its bases have, and overrides it by the name of a method;
of several methods for one sharding type the first in alphabetical order counts. Bandwidths are bytes per millisecond.

Example:
    >>> @hbm_mem_bw(2000 * 1024**3 / 1000)
    ... class Card(HardwarePerfConfig):
    ...     @forward_compute(sharding_type="row_wise")
    ...     def lookup_ms(self, context):
    ...         return context.batch_inputs * context.emb_dim / self.hbm_mem_bw
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import cache
from typing import Any, TypeVar, cast, overload

from ..constraints import SHARDING_TYPES

__all__ = [
    "backward_compute",
    "bwd_coefficient",
    "bwd_comms",
    "ddr_mem_bw",
    "decorated_names",
    "device_bw",
    "formula_of",
    "forward_compute",
    "fwd_coefficient",
    "fwd_comms",
    "get_backward_compute",
    "get_bwd_coefficient",
    "get_bwd_comms",
    "get_forward_compute",
    "get_fwd_coefficient",
    "get_fwd_comms",
    "get_input_dist_comms",
    "get_output_write_size",
    "get_prefetch_coefficient",
    "get_prefetch_compute",
    "hbm_mem_bw",
    "hbm_to_ddr_mem_bw",
    "input_data_type_size",
    "input_dist_comms",
    "inter_host_bw",
    "intra_host_bw",
    "output_write_size",
    "prefetch_coefficient",
    "prefetch_compute",
    "ssd_mem_bw",
    "supported_sharding_types",
    "use_block_usage_penalty",
    "use_bytes_for_input_read_size",
    "use_min_dim_for_lookup",
]

Config = TypeVar("Config", bound=type)
Method = TypeVar("Method", bound=Callable[..., Any])
Types = str | Sequence[str] | None

_KNOWN = SHARDING_TYPES
# on a decorated method: which formulas it is, each with its sharding types, None for all
_MARK = "_perf_formulas"


def _types(given: Types) -> frozenset[str] | None:
    if given is None:
        return None
    names = [given] if isinstance(given, str) else list(given)
    types = frozenset(str(getattr(name, "value", name)).lower() for name in names)
    unknown = sorted(types - set(_KNOWN))
    if unknown:
        raise ValueError(f"sharding type {unknown[0]!r} is not one of {', '.join(_KNOWN)}")
    return types


def _mark(method: Method, formula: str, types: frozenset[str] | None) -> Method:
    method.__dict__.setdefault(_MARK, {})[formula] = types
    return method


class _Formula:
    """`@decorator`, `@decorator("row_wise")`, `@decorator(["row_wise", ...])` or `@decorator(sharding_type=...)`."""

    def __init__(self, name: str, doc: str) -> None:
        self.__name__, self.__doc__ = name, doc

    @overload
    def __call__(self, method_or_sharding_type: Method) -> Method: ...

    @overload
    def __call__(
        self, method_or_sharding_type: Types = None, *, sharding_type: Types = None
    ) -> Callable[[Method], Method]: ...

    def __call__(self, method_or_sharding_type: Any = None, *, sharding_type: Types = None) -> Any:
        given = method_or_sharding_type
        if callable(given):
            return _mark(given, self.__name__, None)
        types = _types(given if sharding_type is None else sharding_type)
        return lambda method: _mark(method, self.__name__, types)


forward_compute = _Formula("forward_compute", "The method gives milliseconds of a lookup forward, from the context.")
backward_compute = _Formula("backward_compute", "The method gives milliseconds of a lookup backward, from the context.")
fwd_comms = _Formula("fwd_comms", "The method gives milliseconds of sending rows back forward, from the context.")
bwd_comms = _Formula("bwd_comms", "The method gives milliseconds of sending gradients backward, from the context.")
input_dist_comms = _Formula("input_dist_comms", "The method gives milliseconds of sending ids, from the context.")
output_write_size = _Formula(
    "output_write_size",
    "The method gives bytes that a lookup writes, from the context and `is_fwd`: they count in its compute, not in what"
    " ranks send.",
)


def prefetch_compute(method: Method) -> Method:
    """The method gives milliseconds of fetching cached rows ahead, from the context, for all sharding types."""
    return _mark(method, "prefetch_compute", None)


def fwd_coefficient(sharding_type: Types = None) -> Callable[[Method], Method]:
    """The method, which takes nothing, gives the `PerfCoefficient` of a lookup forward."""
    types = _types(sharding_type)
    return lambda method: _mark(method, "fwd_coefficient", types)


def bwd_coefficient(sharding_type: Types = None) -> Callable[[Method], Method]:
    """The method, which takes nothing, gives the `PerfCoefficient` of a lookup backward."""
    types = _types(sharding_type)
    return lambda method: _mark(method, "bwd_coefficient", types)


def prefetch_coefficient() -> Callable[[Method], Method]:
    """The method, which takes nothing, gives the `PrefetchCoefficients`."""
    return lambda method: _mark(method, "prefetch_coefficient", None)


def formula_of(config: Any, formula: str, sharding_type: str | None = None) -> Callable[..., Any] | None:
    """The method of a config that one of these decorators marked, None without one.

    Args:
        formula: name of the decorator.
        sharding_type: by value; None takes a method for any.
    """
    for name in decorated_names(config):
        method = getattr(config, name, None)
        marks = getattr(method, _MARK, {})
        if formula in marks:
            types = marks[formula]
            if sharding_type is None or types is None or sharding_type.lower() in types:
                return cast(Callable[..., Any], method)
    return None


def decorated_names(config: Any) -> list[str]:
    """Names of a config's decorated methods, in alphabetical order."""
    of_class = _marked(cast(Hashable, type(config)))
    own = [name for name, value in vars(config).items() if name[:1] != "_" and hasattr(value, _MARK)]
    # mostly there are none, and every formula of every shard asks
    return sorted({*own, *of_class}) if own or of_class else []


@cache
def _marked(kind: Hashable) -> tuple[str, ...]:
    """Names of decorated methods of a class and its bases; private ones are not looked at."""
    return tuple(name for name in dir(kind) if name[:1] != "_" and hasattr(getattr(kind, name, None), _MARK))


def get_forward_compute(config: Any, sharding_type: str | None = None) -> Callable[..., float] | None:
    """The config's method under `forward_compute`, None without one."""
    return formula_of(config, "forward_compute", sharding_type)


def get_backward_compute(config: Any, sharding_type: str | None = None) -> Callable[..., float] | None:
    """The config's method under `backward_compute`, None without one."""
    return formula_of(config, "backward_compute", sharding_type)


def get_prefetch_compute(config: Any) -> Callable[..., float] | None:
    """The config's method under `prefetch_compute`, None without one."""
    return formula_of(config, "prefetch_compute")


def get_input_dist_comms(config: Any, sharding_type: str | None = None) -> Callable[..., float] | None:
    """The config's method under `input_dist_comms`, None without one."""
    return formula_of(config, "input_dist_comms", sharding_type)


def get_fwd_comms(config: Any, sharding_type: str | None = None) -> Callable[..., float] | None:
    """The config's method under `fwd_comms`, None without one."""
    return formula_of(config, "fwd_comms", sharding_type)


def get_bwd_comms(config: Any, sharding_type: str | None = None) -> Callable[..., float] | None:
    """The config's method under `bwd_comms`, None without one."""
    return formula_of(config, "bwd_comms", sharding_type)


def get_output_write_size(config: Any, sharding_type: str | None = None) -> Callable[..., float] | None:
    """The config's method under `output_write_size`, None without one."""
    return formula_of(config, "output_write_size", sharding_type)


def get_fwd_coefficient(config: Any, sharding_type: str) -> Any:
    """What the config's method under `fwd_coefficient` gives, None without one."""
    method = formula_of(config, "fwd_coefficient", sharding_type)
    return method and method()


def get_bwd_coefficient(config: Any, sharding_type: str) -> Any:
    """What the config's method under `bwd_coefficient` gives, None without one."""
    method = formula_of(config, "bwd_coefficient", sharding_type)
    return method and method()


def get_prefetch_coefficient(config: Any) -> Any:
    """What the config's method under `prefetch_coefficient` gives, None without one."""
    method = formula_of(config, "prefetch_coefficient")
    return method and method()


def _set(name: str, value: object) -> Callable[[Config], Config]:
    def decorate(config: Config) -> Config:
        setattr(config, name, value)
        return config

    return decorate


def _speed(name: str, value: float) -> Callable[[Config], Config]:
    if not value > 0:
        raise ValueError(f"{name} must be positive (bytes per millisecond), got {value}")
    return _set(name, value)


def hbm_mem_bw(value: float) -> Callable[[Config], Config]:
    """Of device memory, for formulas of the config's own: others read the topology's."""
    return _speed("hbm_mem_bw", value)


def ddr_mem_bw(value: float) -> Callable[[Config], Config]:
    """Of host memory, for formulas of the config's own: others read the topology's."""
    return _speed("ddr_mem_bw", value)


def ssd_mem_bw(value: float) -> Callable[[Config], Config]:
    """Of disk, for formulas of the config's own: others read the topology's."""
    return _speed("ssd_mem_bw", value)


def intra_host_bw(value: float) -> Callable[[Config], Config]:
    """Between ranks of a host, for formulas of the config's own: others read the topology's."""
    return _speed("intra_host_bw", value)


def inter_host_bw(value: float) -> Callable[[Config], Config]:
    """Between hosts, for formulas of the config's own: others read the topology's."""
    return _speed("inter_host_bw", value)


def hbm_to_ddr_mem_bw(value: float) -> Callable[[Config], Config]:
    """Between device and host, at which cached rows are fetched ahead."""
    return _speed("hbm_to_ddr_mem_bw", value)


def device_bw(
    bandwidth: float | None = None,
    *,
    device: str | None = None,
    compute_kernel: str | list[str] | None = None,
) -> Callable[[Config], Config]:
    """At which kernels read rows: all of them, or those named on one device; None takes it back.

    Raises:
        ValueError: only one of `device` and `compute_kernel` is given, or the bandwidth is not positive.
    """
    if (device is None) != (compute_kernel is None):
        raise ValueError(f"give device and compute_kernel together, got {device!r} and {compute_kernel!r}")
    if bandwidth is not None and not bandwidth > 0:
        raise ValueError(f"bandwidth must be positive (bytes per millisecond), got {bandwidth}")
    if device is None or compute_kernel is None:
        return _set("device_bw", bandwidth)
    kernels = [compute_kernel] if isinstance(compute_kernel, str) else compute_kernel
    asked = {(device.lower(), kernel.lower()): bandwidth for kernel in kernels}

    def decorate(config: Config) -> Config:
        # a dict of the class's own: its bases keep theirs
        together = {**getattr(config, "kernel_device_bandwidths", {}), **asked}
        kept = {key: speed for key, speed in together.items() if speed is not None}
        return _set("kernel_device_bandwidths", kept)(config)

    return decorate


def use_min_dim_for_lookup(value: bool = True) -> Callable[[Config], Config]:
    """Does a lookup forward read at least 32 columns of a row? By default of whole rows and columns; cuts by rows never
    do."""
    return _set("_use_min_dim_for_lookup", value)


def use_block_usage_penalty(value: bool = True) -> Callable[[Config], Config]:
    """Do narrow rows cost more? By default of whole rows and columns."""
    return _set("_use_block_usage_penalty", value)


def use_bytes_for_input_read_size(value: bool = True) -> Callable[[Config], Config]:
    """Are ids counted in bytes, or one by one? Of whole rows and columns only, as in TorchRec."""
    return _set("_use_bytes_for_input_read_size", value)


def input_data_type_size(value: float) -> Callable[[Config], Config]:
    """Bytes of an id."""
    return _set("_input_data_type_size", value)


def supported_sharding_types(*sharding_types: str) -> Callable[[Config], Config]:
    """The only sharding types that are estimated; others raise ValueError."""
    return _set("_supported_sharding_types", _types(sharding_types))
